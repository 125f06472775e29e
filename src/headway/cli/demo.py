"""`headway demo`."""

from pathlib import Path
from typing import Any

import typer

from headway.cli._options import JSON
from headway.cli._output import print_json, print_table
from headway.errors import ConfigError


def demo(
    out: Path | None = typer.Option(
        None,
        "--out",
        help="Folder for everything the demo makes; demo, demo-multimodal or demo-rl.",
    ),
    multimodal: bool = typer.Option(
        False,
        "--multimodal",
        help="Pictures and sounds instead: align encoders, then teach a model to answer.",
    ),
    rl: bool = typer.Option(
        False,
        "--rl",
        help="Reinforcement learning instead: a model that half knows sums learns from rewards.",
    ),
    control: bool = typer.Option(
        False,
        "--control",
        help="With --rl: also a run that is rewarded by chance, whatever its answers are.",
    ),
    json: bool = JSON,
) -> None:
    """The whole pipeline in small: tokenizer, data, pretraining, evaluation, fine-tuning, preference, export; on a CPU, offline."""
    from headway.runtime.log import start_logging
    from headway.runtime.storage import check_writable
    from headway.workflows.demo.run import run_demo

    if multimodal and rl:
        raise ConfigError("--multimodal and --rl are two demos; give one of them.")
    if control and not rl:
        raise ConfigError("--control belongs to the demo --rl. Add --rl, or leave it out.")
    if rl:
        _reinforcement(out or Path("demo-rl"), control=control, json=json)
        return
    if multimodal:
        _multimodal(out or Path("demo-multimodal"), json=json)
        return

    out = out or Path("demo")
    check_writable(out)
    with start_logging():
        summary = run_demo(out)
    if json:
        print_json(summary)
        return

    typer.echo(f"\nThe demo took {summary['seconds']:.0f} s and made:")
    print_table(["what", "result", "where"], _rows(summary, out))
    answers = summary["answers"][0]
    typer.echo(
        f"\nA sample:\n{summary['sample']}\n\nAn answer, before and after ({summary['report']} "
        f"has more):\n  {answers['question']}"
    )
    for name in ("pretrain", "sft", "dpo"):
        typer.echo(f"  {name + ':':10}{' '.join(answers[name].split())}")
    typer.echo("\nTry next:")
    for line in summary["next"]:
        typer.echo(f"  {line}")


def _reinforcement(out: Path, *, control: bool, json: bool) -> None:
    from headway.runtime.log import start_logging
    from headway.runtime.storage import check_writable
    from headway.workflows.demo.reinforcement import run_addition_demo

    check_writable(out)
    with start_logging():
        summary = run_addition_demo(out, control=control)
    if json:
        print_json(summary)
        return
    typer.echo(
        f"\nThe demo took {summary['seconds']:.0f} s. Right sums of two-digit numbers, of "
        f"{summary['held_out_questions']} held-out questions:"
    )
    rows: list[tuple[str, str, str, str]] = []
    for name, label in (("grpo", "right sums"), ("control", "chance")):
        if name in summary:
            shares = summary[name]
            rows.append((label, "sampled", f"{shares['before']:.1%}", f"{shares['after']:.1%}"))
            greedy_before = f"{shares['greedy_before']:.1%}"
            greedy_after = f"{shares['greedy_after']:.1%}"
            rows.append((label, "likeliest token", greedy_before, greedy_after))
    print_table(["rewarded for", "answers", "before", "after"], rows)
    typer.echo(f"\n{summary['verdict']['text']}")
    typer.echo("\nTry next:")
    for line in summary["next"]:
        typer.echo(f"  {line}")


def _multimodal(out: Path, *, json: bool) -> None:
    from headway.runtime.log import start_logging
    from headway.runtime.storage import check_writable
    from headway.workflows.demo.multimodal import run_multimodal_demo

    check_writable(out)
    with start_logging():
        summary = run_multimodal_demo(out)
    if json:
        print_json(summary)
        return
    typer.echo(
        f"\nThe demo took {summary['seconds']:.0f} s. Phase 1, recall@1 among "
        f"{summary['candidates']} held-out samples:"
    )
    chance = f"{1 / summary['candidates']:.1%}"
    print_table(
        ["direction", "recall@1", "chance"],
        [(name, f"{value:.1%}", chance) for name, value in summary["recall"].items()],
    )
    typer.echo("\nPhase 2, right answers about held-out combinations:")
    kinds = ("seen", "blank", "left_out", "chance")
    rows = [
        (question, *(f"{shares[key]:.1%}" for key in kinds))
        for question, shares in summary["answers"].items()
    ]
    print_table(["question", "right", "grey and silent", "media left out", "chance"], rows)
    typer.echo(f"\nPictures and sounds beside every answer: {summary['report']}")
    # The first picture of the generated set.
    image = out / "media/images/000000.png"
    prompt = "What colour is the shape?"
    typer.echo(
        f"\nTry next:\n  headway generate --model {out / 'runs/tune'} --image {image} --prompt "
        f"'{prompt}'"
    )


def _rows(summary: dict[str, Any], out: Path) -> list[tuple[str, str, Path]]:
    """The table at the end: what was made, the number that shows it worked, and where it is."""
    # Losses without masks, with learned masks and with random ones of the same sparsity; the
    # second row of the cache table is that of the learned masks.
    full, learned, random = summary["sparse"]["losses"].values()
    cache = summary["sparse"]["kv"][1][6]
    runs = out / "runs"
    return [
        (
            "corpus",
            f"{summary['modules']} modules of the standard library, "
            f"{summary['corpus_bytes'] / 1e6:.1f} MB",
            out / "corpus",
        ),
        ("tokenizer", f"{summary['vocabulary']} tokens, byte-level BPE", out / "tokenizer"),
        (
            "token store",
            f"{summary['documents']} documents, {summary['tokens']:,} tokens",
            out / "store",
        ),
        (
            "instructions",
            f"{summary['conversations']} questions and answers from docstrings, loss on answers",
            out / "instructions",
        ),
        (
            "run",
            f"validation loss {summary['first_valid_loss']:.3f} -> "
            f"{summary['last_valid_loss']:.3f}",
            runs / "pretrain",
        ),
        (
            "evaluation",
            f"{summary['bits_per_byte']:.3f} bits per byte (bigram "
            f"{summary['bigram_bits_per_byte']:.3f})",
            out / "summary.json",
        ),
        (
            "fine-tuning",
            f"loss on held-out answers {summary['sft_first_valid_loss']:.3f} -> "
            f"{summary['sft_last_valid_loss']:.3f}",
            runs / "sft",
        ),
        (
            "preference",
            f"reward accuracy {summary['reward_accuracy']:.2f} on {summary['valid_pairs']} "
            "held-out "
            "pairs",
            runs / "dpo",
        ),
        (
            "sparse heads",
            f"cache {cache} smaller at 256 tokens: loss {full:.3f} -> {learned:.3f} (random heads "
            f"{random:.3f})",
            summary["sparse"]["report"],
        ),
        ("Hugging Face", "loads with AutoModelForCausalLM and AutoTokenizer", summary["export"]),
    ]


VERBS = {"demo": demo}
