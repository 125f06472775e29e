"""Files of an aligner: PurrSight's aligner.pt or aligner.safetensors comes in, heads and scales go
out, and back. Never unpickles objects.

    PurrSight's name, in both files                         ours
    projection_heads.NAME_head.{ln.weight,ln.bias}          heads.NAME.{norm.weight,norm.bias}
    projection_heads.NAME_head.fc.weight                    heads.NAME.proj.weight
    postprocessors.NAME_scaling.logit_scale                 the log scale of each modality

NAME is text, image or audio. A final/ folder has aligner.safetensors, aligner.json (the
`model.aligner` section and the scales) and, where encoders were trained, towers.safetensors.

Invariant: a file that lacks a tensor, has one too many, another shape or a value that is not finite
is an error that names it; nothing is left out silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config.load import validate
from headway.errors import CheckpointError, ConfigError, first_line
from headway.model.aligner_config import AlignerConfig
from headway.model.encoders.base import MODALITIES
from headway.model.loading.untrusted import check_finite, open_pickled
from headway.runtime.digests import check_digests, write_digests
from headway.runtime.json_file import read_object
from headway.runtime.storage import write_atomic, writing

if TYPE_CHECKING:
    import torch

    from headway.model.aligner import Aligner

ALIGNER = "aligner.safetensors"
DESCRIPTION = "aligner.json"
TOWERS = "towers.safetensors"
LEAVES = {"ln.weight": "norm.weight", "ln.bias": "norm.bias", "fc.weight": "proj.weight"}
"""PurrSight's names of a head's parameters -> ours."""
NOTES = {"format": "pt"}
"""Metadata of a safetensors file. One key: with two, their order in the file would change from
run to run."""


@dataclass(frozen=True)
class AlignerHeads:
    """The heads and scales of an aligner."""

    tensors: dict[str, torch.Tensor]
    """heads.NAME.norm.weight, heads.NAME.norm.bias, heads.NAME.proj.weight of every modality,
    fp32."""
    log_scales: dict[str, float]

    @property
    def modalities(self) -> tuple[str, ...]:
        """Modalities that have a head, in the order of MODALITIES."""
        return tuple(name for name in MODALITIES if f"heads.{name}.proj.weight" in self.tensors)

    def width_of(self, modality: str) -> int:
        """Width of the features a head takes."""
        return int(self.tensors[f"heads.{modality}.proj.weight"].shape[1])

    @property
    def dim(self) -> int:
        """Width of the common space."""
        return int(self.tensors[f"heads.{self.modalities[0]}.proj.weight"].shape[0])

    def require(self, modalities: Mapping[str, int], dim: int, where: object) -> None:
        """Refuse heads that are not for these modalities, widths and dim."""
        for name, width in modalities.items():
            if name not in self.modalities:
                raise ConfigError(
                    f"{where}: has no head for {name}; it has {', '.join(self.modalities)}."
                )
            if self.width_of(name) != width:
                raise ConfigError(
                    f"{where}: its {name} head takes features of width {self.width_of(name)}; the {name} encoder gives {width}. "
                    "Use the encoder it was trained with."
                )
        if self.dim != dim:
            raise ConfigError(
                f"{where}: projects to {self.dim} dimensions; {dim} are expected. Set dim to {self.dim}."
            )


def is_purrsight_file(path: Path) -> bool:
    """Whether the heads of this path come from PurrSight, which saves with torch.save; headway
    writes such a file only for export."""
    return _heads_file(path).suffix != ".safetensors"


def _heads_file(path: Path) -> Path:
    """The file with the heads: the path itself, or in its folder."""
    if path.is_dir():
        for file in (path / ALIGNER, path / "final" / ALIGNER, path / "aligner.pt"):
            if file.is_file():
                return file
        raise ConfigError(
            f"{path}: holds no {ALIGNER} and no aligner.pt. Give such a file, or the run that made one."
        )
    if not path.is_file():
        raise ConfigError(f"{path}: no such file. Give an {ALIGNER} or an aligner.pt.")
    return path


def read_aligner(path: Path) -> AlignerHeads:
    """The heads of an aligner.safetensors, a PurrSight aligner.pt (bare, or below `state_dict`),
    or a folder with aligner.safetensors."""
    path = _heads_file(path)
    # Nothing is checked where there are no digests: PurrSight's files have none.
    check_digests(path.parent, (path.name,))
    if path.suffix == ".safetensors":
        state: Any = _read_safetensors(path)
    else:
        state = open_pickled(path)
    if isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    return _parse(state, path)


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as problem:
        raise CheckpointError(
            f"{path}: not a safetensors file: {first_line(problem)}. Fetch it again."
        ) from None


def _parse(state: Mapping[str, Any], path: Path) -> AlignerHeads:
    """The heads in a state dict with PurrSight's names."""
    import torch

    tensors = {str(name): value for name, value in state.items()}
    no_tensors = [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]
    our_names: dict[str, str] = {}
    for modality in MODALITIES:
        for leaf, our_leaf in LEAVES.items():
            our_names[f"projection_heads.{modality}_head.{leaf}"] = f"heads.{modality}.{our_leaf}"
    scales = {f"postprocessors.{m}_scaling.logit_scale": m for m in MODALITIES}
    unknown = [name for name in tensors if name not in our_names and name not in scales]
    if no_tensors or unknown:
        raise ConfigError(
            f"{path}: not an aligner: it holds {(no_tensors or unknown)[0]!r}. Expected are projection_heads.* and postprocessors.*."
        )

    # A modality is there if its projection is; then all its other tensors must be too.
    present = [m for m in MODALITIES if f"projection_heads.{m}_head.fc.weight" in tensors]
    if len(present) < 2:
        raise ConfigError(
            f"{path}: has projection heads for {', '.join(present) or 'no modality'}; an aligner has two or three."
        )
    needed = [name for name in (*our_names, *scales) if any(f".{m}_" in name for m in present)]
    missing = [name for name in needed if name not in tensors]
    extra = [name for name in tensors if name not in needed]
    if missing:
        raise ConfigError(f"{path}: lacks {missing[0]}.")
    if extra:
        raise ConfigError(f"{path}: has {extra[0]} without the head it belongs to.")

    heads = {
        our_names[name]: tensors[name].detach().float().contiguous()
        for name in needed
        if name in our_names
    }
    for modality in present:
        _check_shapes(heads, modality, path)
    log_scales = {scales[name]: tensors[name] for name in needed if name in scales}
    wrong = next((m for m, value in log_scales.items() if value.numel() != 1), None)
    if wrong is not None:
        raise ConfigError(
            f"{path}: the logit_scale of {wrong} has {log_scales[wrong].numel()} values; it must be one number."
        )
    aligner = AlignerHeads(
        dict(check_finite(heads.items(), path)),
        {modality: float(value) for modality, value in check_finite(log_scales.items(), path)},
    )
    dims = {m: int(heads[f"heads.{m}.proj.weight"].shape[0]) for m in present}
    if len(set(dims.values())) > 1:
        raise ConfigError(
            f"{path}: its heads project to different widths: {', '.join(f'{m} {d}' for m, d in dims.items())}."
        )
    return aligner


def _check_shapes(heads: Mapping[str, torch.Tensor], modality: str, path: Path) -> None:
    """Norm and projection of a head fit each other."""
    matrix = heads[f"heads.{modality}.proj.weight"]
    width = None
    if matrix.ndim == 2:
        width = matrix.shape[-1]
    for leaf in ("norm.weight", "norm.bias"):
        shape = tuple(heads[f"heads.{modality}.{leaf}"].shape)
        if width is None or shape != (width,):
            raise ConfigError(
                f"{path}: the {modality} head has a projection of shape {tuple(matrix.shape)} and a {leaf} of shape {shape}; "
                "expected are [dim, width] and [width]."
            )


def purrsight_tensors(heads: AlignerHeads) -> dict[str, torch.Tensor]:
    """The tensors of a file, under PurrSight's names: 12 for three modalities."""
    import torch

    purrsight_leaves = {our_leaf: leaf for leaf, our_leaf in LEAVES.items()}
    tensors = {}
    for name, value in heads.tensors.items():
        _, modality, leaf = name.split(".", 2)
        purrsight_name = f"projection_heads.{modality}_head.{purrsight_leaves[leaf]}"
        tensors[purrsight_name] = value.detach().float().cpu().contiguous()
    for modality, value in heads.log_scales.items():
        tensors[f"postprocessors.{modality}_scaling.logit_scale"] = torch.tensor(
            value, dtype=torch.float32, device="cpu"
        )
    return tensors


def write_aligner(heads: AlignerHeads, path: Path) -> None:
    """Write aligner.safetensors, or PurrSight's aligner.pt if the name ends in .pt."""
    import io

    tensors = purrsight_tensors(heads)
    with writing(path, error=CheckpointError):
        if path.suffix == ".pt":
            import torch

            content = io.BytesIO()
            torch.save(tensors, content)
            write_atomic(path, content.getvalue())
        elif path.suffix == ".safetensors":
            from safetensors.torch import save

            write_atomic(path, save(tensors, metadata=NOTES))
        else:
            raise ConfigError(
                f"out is {str(path)!r}; it must end in .safetensors, or in .pt for PurrSight."
            )


def heads_of(weights: Mapping[str, torch.Tensor], log_scales: Mapping[str, float]) -> AlignerHeads:
    """The heads among the weights of an aligner model."""
    return AlignerHeads(
        {name: value for name, value in weights.items() if name.startswith("heads.")},
        dict(log_scales),
    )


def write_aligner_folder(
    folder: Path,
    config: AlignerConfig,
    weights: Mapping[str, torch.Tensor],
    log_scales: Mapping[str, float],
) -> None:
    """Write the three files of an aligner into a folder, and their digests."""
    from safetensors.torch import save

    # Heads alone are in PurrSight's form, for its programs; towers are headway's.
    write_aligner(heads_of(weights, log_scales), folder / ALIGNER)
    towers = {
        name: value.detach().float().cpu().contiguous()
        for name, value in weights.items()
        if name.startswith("towers.")
    }
    if towers:
        write_atomic(folder / TOWERS, save(towers, metadata=NOTES))
    described = {"aligner": config.model_dump(mode="json"), "log_scales": dict(log_scales)}
    write_atomic(folder / DESCRIPTION, json.dumps(described, indent=1) + "\n")
    write_digests(folder)


@dataclass(frozen=True)
class StoredAligner:
    """An aligner on disk, with its config."""

    path: Path
    config: AlignerConfig
    weights: dict[str, torch.Tensor]
    log_scales: dict[str, float]

    def load(self, device: torch.device | str = "cpu") -> Aligner:
        """The model in evaluation mode, fp32."""
        import torch

        from headway.model.aligner import Aligner
        from headway.model.config import ModelConfig

        with torch.device("meta"):
            model = Aligner(ModelConfig(aligner=self.config, vocab_size=1))

        values: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            stored_shape = "missing"
            if name in self.weights:
                stored_shape = tuple(self.weights[name].shape)
            if stored_shape != shape:
                raise CheckpointError(
                    f"{self.path}: {name} is {stored_shape}; {shape} is expected. The folder is damaged."
                )
            values[name] = self.weights[name].float()
        model.load_state_dict(dict(check_finite(values.items(), self.path)), assign=True)
        return model.to(device).eval().requires_grad_(False)


def is_aligner_folder(folder: Path) -> bool:
    """Whether a folder holds what `write_aligner_folder` wrote."""
    return (folder / DESCRIPTION).is_file()


def read_aligner_folder(folder: Path) -> StoredAligner:
    """An aligner with its towers."""
    check_digests(folder, (DESCRIPTION, ALIGNER, TOWERS))
    described = read_object(folder / DESCRIPTION, CheckpointError)
    if not isinstance(described.get("aligner"), dict):
        raise CheckpointError(
            f"{folder / DESCRIPTION}: does not describe an aligner. Export it again."
        )
    config = validate(AlignerConfig, described["aligner"])
    heads = read_aligner(folder / ALIGNER)
    widths = {name: config.width_of(name) for name in config.modalities}
    heads.require(widths, config.dim, folder / ALIGNER)
    towers = {}
    if (folder / TOWERS).is_file():
        towers = _read_safetensors(folder / TOWERS)
    return StoredAligner(folder, config, {**heads.tensors, **towers}, heads.log_scales)
