"""Files of an aligner: PurrSight's aligner.pt or aligner.safetensors comes in, heads and scales go out, and back. Never unpickles objects.

    projection_heads.{text,image,audio}_head.{ln.weight,ln.bias,fc.weight}      heads.NAME.{norm.weight,norm.bias,proj.weight}
    postprocessors.{text,image,audio}_scaling.logit_scale                       the log scale of each modality

A final/ folder has aligner.safetensors, aligner.json (the `model.aligner` section and the scales) and, where encoders were trained,
towers.safetensors. Invariant: a file that lacks a tensor, has one too many, another shape or a value that is not finite is an error that
names it; nothing is left out silently.
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

ALIGNER, DESCRIPTION, TOWERS = "aligner.safetensors", "aligner.json", "towers.safetensors"
LEAVES = {"ln.weight": "norm.weight", "ln.bias": "norm.bias", "fc.weight": "proj.weight"}
NOTES = {"format": "pt"}
"""One key: with two, the order in the file would change from run to run."""


@dataclass(frozen=True)
class AlignerHeads:
    """The heads and scales of an aligner."""

    tensors: dict[str, torch.Tensor]
    """heads.NAME.norm.weight, heads.NAME.norm.bias, heads.NAME.proj.weight of every modality, fp32."""
    log_scales: dict[str, float]

    @property
    def modalities(self) -> tuple[str, ...]:
        """Those that have a head."""
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
    """Whether the heads of this path come from PurrSight, which saves with torch.save; headway writes such a file only for export."""
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
    """The heads of an aligner.safetensors, a PurrSight aligner.pt (bare, or below `state_dict`), or a folder with aligner.safetensors."""
    path = _heads_file(path)
    check_digests(path.parent, (path.name,))
    given: Any = _read_safetensors(path) if path.suffix == ".safetensors" else open_pickled(path)
    if isinstance(given.get("state_dict"), dict):
        given = given["state_dict"]
    return _parse(given, path)


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as problem:
        raise CheckpointError(
            f"{path}: not a safetensors file: {first_line(problem)}. Fetch it again."
        ) from None


def _parse(given: Mapping[str, Any], path: Path) -> AlignerHeads:
    import torch

    tensors = {str(name): value for name, value in given.items()}
    other = [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]
    expected = {
        f"projection_heads.{m}_head.{leaf}": f"heads.{m}.{ours}"
        for m in MODALITIES
        for leaf, ours in LEAVES.items()
    }
    scales = {f"postprocessors.{m}_scaling.logit_scale": m for m in MODALITIES}
    unknown = [name for name in tensors if name not in expected and name not in scales]
    if other or unknown:
        raise ConfigError(
            f"{path}: not an aligner: it holds {(other or unknown)[0]!r}. Expected are projection_heads.* and postprocessors.*."
        )
    present = [m for m in MODALITIES if f"projection_heads.{m}_head.fc.weight" in tensors]
    if len(present) < 2:
        raise ConfigError(
            f"{path}: has projection heads for {', '.join(present) or 'no modality'}; an aligner has two or three."
        )
    needed = [name for name in (*expected, *scales) if any(f".{m}_" in name for m in present)]
    missing = [name for name in needed if name not in tensors]
    extra = [name for name in tensors if name not in needed]
    if missing or extra:
        raise ConfigError(
            f"{path}: {f'lacks {missing[0]}' if missing else f'has {extra[0]} without the head it belongs to'}."
        )
    heads = {
        expected[name]: tensors[name].detach().float().contiguous()
        for name in needed
        if name in expected
    }
    for modality in present:
        _check_shapes(heads, modality, path)
    log_scales = {scales[name]: tensors[name] for name in needed if name in scales}
    wrong = next((m for m, value in log_scales.items() if value.numel() != 1), None)
    if wrong is not None:
        raise ConfigError(
            f"{path}: the logit_scale of {wrong} has {log_scales[wrong].numel()} values; it must be one number."
        )
    found = AlignerHeads(
        dict(check_finite(heads.items(), path)),
        {m: float(v) for m, v in check_finite(log_scales.items(), path)},
    )
    dims = {m: int(heads[f"heads.{m}.proj.weight"].shape[0]) for m in present}
    if len(set(dims.values())) > 1:
        raise ConfigError(
            f"{path}: its heads project to different widths: {', '.join(f'{m} {d}' for m, d in dims.items())}."
        )
    return found


def _check_shapes(heads: Mapping[str, torch.Tensor], modality: str, path: Path) -> None:
    matrix = heads[f"heads.{modality}.proj.weight"]
    width = matrix.shape[-1] if matrix.ndim == 2 else None
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

    theirs = {ours: leaf for leaf, ours in LEAVES.items()}
    found = {}
    for name, value in heads.tensors.items():
        _, modality, leaf = name.split(".", 2)
        found[f"projection_heads.{modality}_head.{theirs[leaf]}"] = (
            value.detach().float().cpu().contiguous()
        )
    for modality, value in heads.log_scales.items():
        found[f"postprocessors.{modality}_scaling.logit_scale"] = torch.tensor(
            value, dtype=torch.float32, device="cpu"
        )
    return found


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
        wanted = {name: tuple(one.shape) for name, one in model.named_parameters()}
        for name, shape in wanted.items():
            if name not in self.weights or tuple(self.weights[name].shape) != shape:
                found = tuple(self.weights[name].shape) if name in self.weights else "missing"
                raise CheckpointError(
                    f"{self.path}: {name} is {found}; {shape} is expected. The folder is damaged."
                )
        model.load_state_dict(
            dict(check_finite(((n, self.weights[n].float()) for n in wanted), self.path)),
            assign=True,
        )
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
    heads.require(
        {name: config.width_of(name) for name in config.modalities}, config.dim, folder / ALIGNER
    )
    towers = _read_safetensors(folder / TOWERS) if (folder / TOWERS).is_file() else {}
    return StoredAligner(folder, config, {**heads.tensors, **towers}, heads.log_scales)
