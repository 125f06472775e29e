"""`headway export hf`."""

from enum import StrEnum
from pathlib import Path

import typer

from headway.cli._output import JSON_FLAG, print_json
from headway.errors import ConfigError


class Dtype(StrEnum):
    """The types weights can be written in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def command(
    model: Path = typer.Option(..., help="A run folder, a checkpoint folder or a Hugging Face folder."),
    out: Path = typer.Option(..., help="The folder to write; an earlier export there is replaced."),
    dtype: Dtype = typer.Option(Dtype.float32, help="The type of the written weights."),
    remote_code: bool = typer.Option(
        False,
        "--remote-code",
        help="Put a class of its own beside a model that transformers has none for (Qwen 3 with no_rope_layers); "
        "it then loads with trust_remote_code=True alone.",
    ),
    adapter: bool = typer.Option(False, "--adapter", help="Write only the adapter, as a PEFT folder; without it an adapter is merged."),
    family: str | None = typer.Option(None, help="The module of your own that a checkpoint names as its family; it is imported."),
    json: bool = JSON_FLAG,
) -> None:
    """Write a folder that transformers loads as it is: weights, config and tokenizer."""
    from headway.export.huggingface import export_model
    from headway.runtime.storage import check_writable

    check_writable(out.parent)
    if adapter:
        from headway.export.adapter import export_adapter

        if remote_code:
            raise ConfigError("--adapter and --remote-code are both given; an adapter has no class of its own. Leave one of them out.")
        export_adapter(model, out, dtype=dtype.value, family=family)
    else:
        export_model(model, out, dtype=dtype.value, remote_code=remote_code, family=family)
    if json:
        print_json({"out": str(out), "dtype": dtype.value, "remote_code": remote_code, "adapter_only": adapter})
    else:
        typer.echo(f"wrote {out}")
