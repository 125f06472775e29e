"""The weights of a published network in one file: safetensors, or a torch.save file, read by the
restricted loader. Out: tensors by name.

Invariant: names and shapes are exactly those of the network; a file that fits in part is refused by
the first tensor that does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headway.errors import CheckpointError, ConfigError, first_line
from headway.model.loading.untrusted import check_finite, open_pickled

NESTED = ("model", "state_dict", "model_state_dict")
"""Under these keys trainers put the tensors."""


def read_weights(path: Path, key: str) -> dict[str, Tensor]:
    """The tensors of a file; `key` is the setting that names it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise ConfigError(f"{key} is {path}, which is not a file. Give the file of the weights.")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as problem:
            raise CheckpointError(
                f"{path}: cannot be read: {first_line(problem)}. Fetch it again."
            ) from None
    content = open_pickled(path)
    for name in NESTED:
        if isinstance(content.get(name), dict):
            content = content[name]
            break
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def fill_exactly(
    network: nn.Module, tensors: Mapping[str, Any], path: Path, ignored: Sequence[str] = ()
) -> None:
    """Put tensors into a network that was built without memory; those that start with `ignored`
    are of parts that are not used."""
    used = {
        str(name): value
        for name, value in tensors.items()
        if not str(name).startswith(tuple(ignored))
    }
    expected = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    stored = {
        name: tuple(value.shape) if isinstance(value, Tensor) else None
        for name, value in used.items()
    }
    for name in {**expected, **stored}:
        if name not in stored or name not in expected or stored[name] != expected[name]:
            raise CheckpointError(
                f"{path}: {name} is {stored.get(name, 'missing')}; {expected.get(name, 'nothing')} "
                "is expected."
            )
    network.load_state_dict(dict(check_finite(used.items(), path)), assign=True)
