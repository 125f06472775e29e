"""`headway export` and `headway masks`: a trained model, its adapter or its head masks in files
that other tools read.
"""

from pathlib import Path

import typer

from headway.cli._options import JSON, MODEL, group, model_option
from headway.cli._output import print_json, print_table
from headway.errors import ConfigError
from headway.model.head_masks.choice import MaskChoice
from headway.runtime.optional import need

GATES_HELP = "A run folder, a checkpoint folder or a Hugging Face folder with head gates."
GATED_MODEL = model_option(..., help=GATES_HELP)
ALIGNER_HELP = (
    "A run of recipe multimodal/align, a checkpoint of it, or an aligner.pt or aligner.safetensors."
)
ALIGNER = model_option(..., help=ALIGNER_HELP)


def hf(
    model: Path = MODEL,
    out: Path = typer.Option(..., help="The folder to write; an earlier export there is replaced."),
    dtype: str = typer.Option(
        "float32",
        help="The dtype of the written weights: float32, bfloat16 or float16 (also fp32, bf16, "
        "fp16).",
    ),
    remote_code: bool = typer.Option(
        False,
        "--remote-code",
        help="Add a model class for a model that transformers does not have (Qwen 3 with "
        "no_rope_layers); "
        "it loads only with trust_remote_code=True.",
    ),
    adapter: bool = typer.Option(
        False,
        "--adapter",
        help="Write only the adapter, as a PEFT folder; by default it is merged.",
    ),
    family: str | None = typer.Option(
        None, help="Your module that the checkpoint names as its family; it is imported."
    ),
    json: bool = JSON,
) -> None:
    """Write a folder that transformers loads: weights, config and tokenizer."""
    from headway.export.huggingface import export_model, parse_dtype
    from headway.runtime.storage import check_writable

    # The export is written beside its place and moved there when it is complete.
    chosen = parse_dtype(dtype)
    check_writable(out.parent)

    if adapter:
        from headway.export.adapter import export_adapter

        if remote_code:
            raise ConfigError(
                "--adapter and --remote-code are both given; an adapter needs no model class. "
                "Leave one of them out."
            )
        export_adapter(model, out, dtype=chosen, family=family)
    else:
        export_model(model, out, dtype=chosen, remote_code=remote_code, family=family)

    if json:
        print_json(
            {"out": str(out), "dtype": chosen, "remote_code": remote_code, "adapter_only": adapter}
        )
    else:
        typer.echo(f"wrote {out}")


def llava(
    model: Path = MODEL,
    out: Path = typer.Option(..., help="The folder to write; it must not exist yet."),
    dtype: str = typer.Option(
        "float32",
        help="The dtype of the written weights: float32, bfloat16 or float16 (also fp32, bf16, "
        "fp16).",
    ),
    json: bool = JSON,
) -> None:
    """Write a folder that LlavaForConditionalGeneration loads: vision tower, projector, language model. For models of patch tokens."""
    from headway.export.huggingface import parse_dtype
    from headway.export.llava import export_llava
    from headway.runtime.storage import check_writable

    chosen = parse_dtype(dtype)
    check_writable(out.parent)
    export_llava(model, out, dtype=chosen)
    if json:
        print_json({"out": str(out), "dtype": chosen})
    else:
        typer.echo(f"wrote {out}")


def gguf(
    model: Path = MODEL,
    out: Path = typer.Option(
        ...,
        help="The file to write, such as model.gguf; a Modelfile for Ollama is written next to it.",
    ),
    kind: str = typer.Option("f16", "--type", help="f32, f16, bf16, q8_0, q6_k, q5_k_m or q4_k_m."),
    name: str | None = typer.Option(
        None, help="The model's name in the file; default: the name of its folder."
    ),
    family: str | None = typer.Option(
        None, help="Your module that the checkpoint names as its family; it is imported."
    ),
    json: bool = JSON,
) -> None:
    """Write one GGUF file that llama.cpp and Ollama load: weights, tokenizer, chat template. For llama, mistral, qwen2, qwen3, smollm3."""
    from dataclasses import asdict

    from headway.export.gguf_writer import export_gguf, parse_type
    from headway.runtime.storage import check_writable

    chosen = parse_type(kind)
    check_writable(out.parent)
    result = export_gguf(model, out, kind=chosen, name=name, family=family)
    if json:
        print_json({**asdict(result), "out": str(result.out), "modelfile": str(result.modelfile)})
    else:
        stored = ", ".join(f"{count} {name}" for name, count in sorted(result.stored.items()))
        typer.echo(
            f"wrote {out}: {result.architecture}, {result.bytes / 1e6:.1f} MB, tensors: {stored}"
        )
        typer.echo(f"wrote {result.modelfile}")


def masks_export(
    model: Path = GATED_MODEL,
    out: Path = typer.Option(..., help="The file to write, such as masks.tsv."),
    sparsity: float | None = typer.Option(
        None, help="Share of streaming heads; default: the sparsity the gates have reached."
    ),
    raw: bool = typer.Option(
        False,
        "--raw",
        help="Write log_alpha, E[z], P(z=0) and P(z=1) of every head instead of a decision.",
    ),
    choice: MaskChoice = group(only=("equal_per_layer",)),
    json: bool = JSON,
) -> None:
    """Write which KV heads keep the whole context (1) and which only sinks and a window (0): one row per layer, tab separated."""
    from headway.checkpoint.stored_model import find_model
    from headway.model.head_masks.file import write_masks

    if raw and (sparsity is not None or choice.equal_per_layer):
        raise ConfigError(
            "--raw writes the gates and makes no decision; leave out --sparsity and "
            "--equal-per-layer."
        )

    gates = find_model(model).mask_source().trained_gates()
    # How far a streaming head sees: the last tokens, and the first ones.
    reach = {"window": gates.config.window, "sinks": gates.config.sinks}
    if raw:
        gates.write_raw(out)
        result = {"out": str(out), "raw": True, "heads": gates.log_alpha.numel(), **reach}
    else:
        masks = gates.masks(sparsity, equal_per_layer=choice.equal_per_layer)
        write_masks(masks, out)
        heads = masks.num_layers * masks.num_kv_heads
        result = {
            "out": str(out),
            "raw": False,
            "heads": heads,
            "full_heads": masks.num_full,
            "sparsity": masks.sparsity,
            **reach,
        }

    if json:
        print_json(result)
    elif raw:
        typer.echo(f"wrote {out}: log_alpha of {result['heads']} heads")
    else:
        typer.echo(
            f"wrote {out}: {result['full_heads']} of {result['heads']} heads full, sparsity "
            f"{result['sparsity']:.4f}"
        )


def masks_show(
    model: Path | None = model_option(None, help=GATES_HELP),
    masks: Path | None = typer.Option(None, help="Or a mask file (DuoAttention's too)."),
    sparsity: float | None = typer.Option(
        None, help="Share of streaming heads; default: from the gates or the file."
    ),
    choice: MaskChoice = group(only=("equal_per_layer",)),
    out: Path | None = typer.Option(None, help="Also draw layers x heads into this PNG file."),
    json: bool = JSON,
) -> None:
    """Show which KV heads are full and which stream, as a table and a picture."""
    from headway.checkpoint.stored_model import find_model
    from headway.model.head_masks.file import read_masks
    from headway.model.head_masks.plot import draw_masks

    if (model is None) == (masks is None):
        raise ConfigError("give either a model or --masks.")
    if out is not None and out.suffix != ".png":
        raise ConfigError(
            f"out is {str(out)!r}; the picture is a PNG. Give a name that ends in .png."
        )
    # Before the model is read, which may take a while.
    if out is not None:
        need("matplotlib", f"--out {out}")

    log_alpha = None
    if model is not None:
        gates = find_model(model).mask_source().trained_gates()
        head_masks = gates.masks(sparsity, equal_per_layer=choice.equal_per_layer)
        log_alpha = gates.log_alpha
    else:
        assert masks is not None
        head_masks = read_masks(masks, sparsity, equal_per_layer=choice.equal_per_layer)
    if out is not None:
        draw_masks(head_masks, out, log_alpha)

    if json:
        print_json(
            {
                "layers": head_masks.num_layers,
                "kv_heads": head_masks.num_kv_heads,
                "full_heads": head_masks.num_full,
                "sparsity": head_masks.sparsity,
                "window": head_masks.window,
                "sinks": head_masks.sinks,
                "full": [[int(is_full) for is_full in row] for row in head_masks.full],
                "log_alpha": None if log_alpha is None else log_alpha.tolist(),
                "picture": None if out is None else str(out),
            }
        )
        return

    rows = [
        (layer, "".join("#" if is_full else "." for is_full in row), sum(row))
        for layer, row in enumerate(head_masks.full)
    ]
    print_table(("layer", "heads (# full, . streaming)", "full"), rows)

    # A mask file of DuoAttention need not say how far its streaming heads see.
    heads = head_masks.num_layers * head_masks.num_kv_heads
    reach = "window and sinks unknown"
    if head_masks.window is not None:
        reach = f"window {head_masks.window}, sinks {head_masks.sinks}"
    typer.echo(
        f"{head_masks.num_full} of {heads} heads full, sparsity {head_masks.sparsity:.4f}; {reach}"
    )
    if out is not None:
        typer.echo(f"wrote {out}")


def aligner(
    model: Path = ALIGNER,
    out: Path = typer.Option(
        ...,
        help="A file ending in .safetensors, or in .pt for PurrSight; or a folder: the heads and "
        "the trained encoders.",
    ),
    json: bool = JSON,
) -> None:
    """Write the heads and scales of an aligner under PurrSight's names; to a folder, also the encoders that were trained."""
    from headway.export.aligner import export_aligner

    result = export_aligner(model, out)
    if json:
        print_json(result)
    else:
        widths = ", ".join(f"{name} {width}" for name, width in result["widths"].items())
        typer.echo(f"wrote {out}: {widths} -> {result['dim']} dimensions")


VERBS = {
    "export hf": hf,
    "export gguf": gguf,
    "export aligner": aligner,
    "export llava": llava,
    "masks export": masks_export,
    "masks show": masks_show,
}
