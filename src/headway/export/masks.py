"""Head gates of a trained model come in; masks, raw numbers or a picture of them go out."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import ConfigError
from headway.infer.load import StoredModel, find_model
from headway.model.gates_file import TrainedGates
from headway.model.head_masks import HeadMasks, write_masks
from headway.runtime.storage import write_atomic

if TYPE_CHECKING:
    import torch

RAW_COLUMNS = ("layer", "head", "log_alpha", "expected_z", "p_streaming", "p_full")


def read_trained_gates(model: Path | str) -> TrainedGates:
    """The gates of what `--model` names."""
    return trained_gates(find_model(model), str(model))


def trained_gates(found: StoredModel, name: str | None = None) -> TrainedGates:
    """The gates of a model on disk; refused where it has none."""
    gates = found.gates()
    if gates is None:
        raise ConfigError(
            f"model is {name or str(found.path)!r}, which has no head gates. Train them with objective head_sparsity, or give a mask file "
            "with --masks."
        )
    return gates


def export_masks(masks: HeadMasks, out: Path) -> None:
    """Write a mask file."""
    _check(out)
    write_masks(masks, out)


def export_raw(gates: TrainedGates, out: Path) -> None:
    """Write the numbers themselves, with a header; such a file decides nothing and is refused where masks are read."""
    _check(out)
    lines = ["\t".join(RAW_COLUMNS), *("\t".join(map(repr, row)) for row in gates.raw())]
    write_atomic(out, "\n".join(lines) + "\n")


def _check(out: Path) -> None:
    if out.is_dir():
        raise ConfigError(f"out is {str(out)!r}, which is a folder. Give the name of a file, such as {out / 'masks.tsv'}.")
    if out.suffix == ".json":
        raise ConfigError(f"out is {str(out)!r}; window and sinks go into a .json beside the masks. Give a name that ends in .tsv.")
    out.parent.mkdir(parents=True, exist_ok=True)


def draw_masks(masks: HeadMasks, out: Path, log_alpha: torch.Tensor | None = None) -> None:
    """A PNG of layers x KV heads: full heads dark, streaming ones light, or log_alpha in colour with a dot in full heads."""
    # The figure itself instead of pyplot, which keeps figures and a choice of screen for the whole process.
    from matplotlib.figure import Figure

    layers, heads = masks.num_layers, masks.num_kv_heads
    figure = Figure(figsize=(max(3.2, 0.35 * heads + 2.2), max(2.4, 0.22 * layers + 1.3)), dpi=140, layout="constrained")
    axes = figure.subplots()
    if log_alpha is None:
        axes.imshow([[float(keeps) for keeps in row] for row in masks.full], cmap="Blues", vmin=-0.15, vmax=1.2, aspect="auto")
    else:
        bound = max(1.0, float(log_alpha.abs().max()))
        image = axes.imshow(log_alpha.tolist(), cmap="RdBu", vmin=-bound, vmax=bound, aspect="auto")
        figure.colorbar(image, ax=axes, label="log_alpha")
        places = [(head, layer) for layer, row in enumerate(masks.full) for head, keeps in enumerate(row) if keeps]
        axes.scatter(
            [x for x, _ in places], [y for _, y in places], s=12, marker="o", facecolors="white", edgecolors="black", linewidths=0.8
        )
    axes.set_xlabel("KV head")
    axes.set_ylabel("layer")
    axes.set_xticks(range(0, heads, max(1, heads // 16)))
    axes.set_yticks(range(0, layers, max(1, layers // 16)))
    what = "dark" if log_alpha is None else "dots"
    axes.set_title(f"{masks.num_full} of {layers * heads} heads full ({what}), sparsity {masks.sparsity:.3f}", fontsize=9)
    picture = BytesIO()
    figure.savefig(picture, format="png")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, picture.getvalue())
