"""`headway demo`."""

from pathlib import Path
from typing import Any

import typer

from headway.cli._output import JSON_FLAG, print_json, print_table


def command(
    out: Path = typer.Option(Path("demo"), "--out", help="Folder for everything the demo makes."),
    json: bool = JSON_FLAG,
) -> None:
    """The main job in small: tokenizer, data, pretraining, evaluation, fine-tuning, preference, export; on a CPU, offline, in minutes."""
    from headway.runtime.log import start_logging
    from headway.runtime.storage import check_writable
    from headway.workflows.demo.run import run_demo

    check_writable(out)
    with start_logging():
        summary = run_demo(out)
    if json:
        print_json(summary)
        return
    rows = [
        ("corpus", f"{summary['modules']} modules of the standard library, {summary['corpus_bytes'] / 1e6:.1f} MB", out / "corpus"),
        ("tokenizer", f"{summary['vocabulary']} tokens, byte-level BPE", out / "tokenizer"),
        ("token store", f"{summary['documents']} documents, {summary['tokens']:,} tokens", out / "store"),
        ("instructions", f"{summary['conversations']} questions and answers from docstrings, loss on answers", out / "instructions"),
        ("run", f"validation loss {summary['first_valid_loss']:.3f} -> {summary['last_valid_loss']:.3f}", out / "runs" / "pretrain"),
        (
            "evaluation",
            f"{summary['bits_per_byte']:.3f} bits per byte (bigram {summary['bigram_bits_per_byte']:.3f})",
            out / "summary.json",
        ),
        (
            "fine-tuning",
            f"loss on held-out answers {summary['sft_first_valid_loss']:.3f} -> {summary['sft_last_valid_loss']:.3f}",
            out / "runs" / "sft",
        ),
        (
            "preference",
            f"reward accuracy {summary['reward_accuracy']:.2f} on {summary['valid_pairs']} held-out pairs",
            out / "runs" / "dpo",
        ),
        ("sparse heads", sparse_heads(summary["sparse"]), summary["sparse"]["report"]),
        ("Hugging Face", "loads with AutoModelForCausalLM and AutoTokenizer", summary["export"]),
    ]
    typer.echo(f"\nThe demo took {summary['seconds']:.0f} s and made:")
    print_table(["what", "result", "where"], rows)
    one = summary["answers"][0]
    typer.echo(f"\nA sample:\n{summary['sample']}\n\nAn answer, before and after ({summary['report']} has more):\n  {one['question']}")
    for name in ("pretrain", "sft", "dpo"):
        typer.echo(f"  {name + ':':10}{' '.join(one[name].split())}")
    typer.echo("\nTry next:")
    for line in summary["next"]:
        typer.echo(f"  {line}")


def sparse_heads(sparse: dict[str, Any]) -> str:
    """What half the heads' cache costs in loss, and what it saves."""
    full, learned, drawn = sparse["losses"].values()
    smaller = sparse["kv"][1][6]
    return f"cache {smaller} smaller at 256 tokens: loss {full:.3f} -> {learned:.3f} (random heads {drawn:.3f})"
