"""A picture of head masks: layers x KV heads, as a PNG file."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from headway.model.head_masks.masks import HeadMasks
from headway.runtime.optional import need
from headway.runtime.storage import write_atomic

if TYPE_CHECKING:
    import torch


def draw_masks(masks: HeadMasks, out: Path, log_alpha: torch.Tensor | None = None) -> None:
    """Full heads dark and streaming ones light; with log_alpha, its values in colour and a dot
    on every full head."""
    need("matplotlib", str(out))
    # Figure, not pyplot: pyplot keeps figures and a choice of screen for the whole process.
    from matplotlib.figure import Figure

    layers = masks.num_layers
    heads = masks.num_kv_heads
    figure = Figure(
        figsize=(max(3.2, 0.35 * heads + 2.2), max(2.4, 0.22 * layers + 1.3)),
        dpi=140,
        layout="constrained",
    )
    axes = figure.subplots()
    if log_alpha is None:
        axes.imshow(
            [[float(is_full) for is_full in row] for row in masks.full],
            cmap="Blues",
            vmin=-0.15,
            vmax=1.2,
            aspect="auto",
        )
    else:
        bound = max(1.0, float(log_alpha.abs().max()))
        image = axes.imshow(log_alpha.tolist(), cmap="RdBu", vmin=-bound, vmax=bound, aspect="auto")
        figure.colorbar(image, ax=axes, label="log_alpha")
        points = [(head, layer) for layer in range(layers) for head in masks.full_heads(layer)]
        axes.scatter(
            [x for x, _ in points],
            [y for _, y in points],
            s=12,
            marker="o",
            facecolors="white",
            edgecolors="black",
            linewidths=0.8,
        )
    axes.set_xlabel("KV head")
    axes.set_ylabel("layer")
    axes.set_xticks(range(0, heads, max(1, heads // 16)))
    axes.set_yticks(range(0, layers, max(1, layers // 16)))
    sign = "dark" if log_alpha is None else "dots"
    axes.set_title(
        f"{masks.num_full} of {layers * heads} heads full ({sign}), sparsity {masks.sparsity:.3f}",
        fontsize=9,
    )
    picture = BytesIO()
    figure.savefig(picture, format="png")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, picture.getvalue())
