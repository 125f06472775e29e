"""`headway masks show`."""

from pathlib import Path

import typer

from headway.cli._output import JSON_FLAG, print_json, print_table
from headway.errors import ConfigError


def command(
    model: Path | None = typer.Option(None, help="A run folder, a checkpoint folder or a Hugging Face folder with head gates."),
    masks: Path | None = typer.Option(None, help="Or a mask file (DuoAttention's too)."),
    sparsity: float | None = typer.Option(None, help="Share of heads that stream; without it, as the gates or the file say."),
    equal_per_layer: bool = typer.Option(False, "--equal-per-layer", help="As many full heads in every layer, the best of each."),
    out: Path | None = typer.Option(None, help="Also draw layers x heads into this PNG file."),
    json: bool = JSON_FLAG,
) -> None:
    """Show which KV heads see everything and which stream, as a table and a picture."""
    from headway.infer.load import find_model
    from headway.model.head_masks.file import read_masks
    from headway.model.head_masks.plot import draw_masks

    if (model is None) == (masks is None):
        raise ConfigError("give either --model or --masks.")
    if out is not None and out.suffix != ".png":
        raise ConfigError(f"out is {str(out)!r}; the picture is a PNG. Give a name that ends in .png.")
    gates = None if model is None else find_model(model).mask_source().trained_gates()
    if gates is not None:
        found = gates.masks(sparsity, equal_per_layer=equal_per_layer)
    else:
        assert masks is not None
        found = read_masks(masks, sparsity, equal_per_layer=equal_per_layer)
    log_alpha = None if gates is None else gates.log_alpha
    if out is not None:
        draw_masks(found, out, log_alpha)
    heads = found.num_layers * found.num_kv_heads
    if json:
        print_json(
            {
                "layers": found.num_layers, "kv_heads": found.num_kv_heads, "full_heads": found.num_full, "sparsity": found.sparsity,
                "window": found.window, "sinks": found.sinks, "full": [[int(keeps) for keeps in row] for row in found.full],
                "log_alpha": None if log_alpha is None else log_alpha.tolist(), "picture": None if out is None else str(out),
            }
        )  # fmt: skip
        return
    print_table(
        ("layer", "heads (# full, . streaming)", "full"),
        [(layer, "".join("#" if keeps else "." for keeps in row), sum(row)) for layer, row in enumerate(found.full)],
    )
    reach = "window and sinks not known" if found.window is None else f"window {found.window}, sinks {found.sinks}"
    typer.echo(f"{found.num_full} of {heads} heads full, sparsity {found.sparsity:.4f}; {reach}")
    if out is not None:
        typer.echo(f"wrote {out}")
