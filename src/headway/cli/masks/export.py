"""`headway masks export`."""

from pathlib import Path

import typer

from headway.cli._output import JSON_FLAG, print_json
from headway.errors import ConfigError


def command(
    model: Path = typer.Option(..., help="A run folder, a checkpoint folder or a Hugging Face folder with head gates."),
    out: Path = typer.Option(..., help="The file to write, such as masks.tsv."),
    sparsity: float | None = typer.Option(None, help="Share of heads that stream; without it, what the gates have come to."),
    raw: bool = typer.Option(False, "--raw", help="Write log_alpha, E[z], P(z=0) and P(z=1) of every head instead of a decision."),
    equal_per_layer: bool = typer.Option(False, "--equal-per-layer", help="As many full heads in every layer, the best of each."),
    json: bool = JSON_FLAG,
) -> None:
    """Write which KV heads keep the whole past (1) and which only sinks and a window (0): one row per layer, tab separated."""
    from headway.infer.load import find_model
    from headway.model.head_masks.file import write_masks

    if raw and (sparsity is not None or equal_per_layer):
        raise ConfigError("--raw writes what was learned and decides nothing; leave out --sparsity and --equal-per-layer.")
    gates = find_model(model).mask_source().trained_gates()
    reach = {"window": gates.config.window, "sinks": gates.config.sinks}
    if raw:
        gates.write_raw(out)
        result = {"out": str(out), "raw": True, "heads": gates.log_alpha.numel(), **reach}
    else:
        masks = gates.masks(sparsity, equal_per_layer=equal_per_layer)
        write_masks(masks, out)
        heads = masks.num_layers * masks.num_kv_heads
        result = {"out": str(out), "raw": False, "heads": heads, "full_heads": masks.num_full, "sparsity": masks.sparsity, **reach}
    if json:
        print_json(result)
    elif raw:
        typer.echo(f"wrote {out}: log_alpha of {result['heads']} heads")
    else:
        typer.echo(f"wrote {out}: {result['full_heads']} of {result['heads']} heads full, sparsity {result['sparsity']:.4f}")
