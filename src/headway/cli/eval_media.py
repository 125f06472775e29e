"""`headway eval multimodal` and `eval retrieval`: answers about pictures and sounds, and what an
aligner finds, with a picture report.
"""

from __future__ import annotations

from pathlib import Path

import typer

from headway.cli._options import CHAT_TEMPLATE, JSON, MODEL, model_option
from headway.cli._output import print_json, print_table


def multimodal(
    model: Path = MODEL,
    data: str = typer.Option(
        ...,
        help="Records with pictures and sounds, as training reads them; their last answers are "
        "expected.",
    ),
    limit: int = typer.Option(None, min=1, help="Only the first records, this many."),
    blank: bool = typer.Option(
        False,
        "--blank",
        help="Ask again with grey pictures and silence, to see what the model takes from media.",
    ),
    schema: str = typer.Option(
        None, help="Answers must follow this JSON schema: a file, or purrsight_v3."
    ),
    report: Path = typer.Option(
        None, metavar="FILE.html", help="Write pictures and sounds beside questions and answers."
    ),
    chat_template: str = CHAT_TEMPLATE,
    max_new_tokens: int = typer.Option(64, min=1, help="Maximum tokens of an answer."),
    rows: int = typer.Option(16, min=1, help="Questions that are answered at once."),
    drop_bad: bool = typer.Option(
        False,
        "--drop-bad",
        help="Leave out and count records that cannot be read instead of refusing them.",
    ),
    device: str = typer.Option("auto", help="auto, cpu, cuda or mps."),
    json: bool = JSON,
) -> None:
    """Ask a model about the pictures and sounds of records, and compare its answers with theirs."""
    from headway.eval.media_report import PictureReport, check_report_path, write_picture_report
    from headway.eval.multimodal import MultimodalPlan, as_json, evaluate_multimodal
    from headway.infer.generate import GenerateOptions
    from headway.infer.load import load_model
    from headway.infer.media import template_of
    from headway.media.schema import load_schema
    from headway.runtime.device import choose_compute

    # Before the model is loaded and every record is answered.
    if report is not None:
        check_report_path(report)
    checks = None
    if schema is not None:
        checks = load_schema(schema)

    compute = choose_compute(device, "auto")
    loaded = load_model(model, device=compute.device, dtype=compute.dtype)
    options = GenerateOptions(max_new_tokens, rows=rows)
    template = template_of(loaded, chat_template)
    plan = MultimodalPlan(template, options, checks, blank, limit, drop_bad)
    scores = evaluate_multimodal(loaded, data, plan)
    if report is not None:
        pictures = PictureReport(f"{model} on {data}", scores.figures(), scores.rows)
        write_picture_report(report, pictures)

    if json:
        print_json({**as_json(scores), "report": report})
        return

    # Shares are floats, counts are not.
    for name, value in scores.figures().items():
        shown = f"{value:.1%}" if isinstance(value, float) else str(value)
        typer.echo(f"{name}: {shown}")

    if scores.questions:
        lines: list[tuple[str, int, str, str]] = []
        for question in scores.questions:
            # Asked again without the media only with --blank.
            without_media = ""
            if question.blank is not None:
                without_media = f"{question.blank:.1%}"
            right = f"{question.right:.1%}"
            lines.append((question.question, question.records, right, without_media))
        print_table(("question", "records", "right", "with blank media"), lines)
    if report is not None:
        typer.echo(f"report: {report}")


def retrieval(
    model: Path = model_option(..., help="A run of phase 1 (recipe multimodal/align)."),
    data: str = typer.Option(..., help="Records with captions, pictures and sounds."),
    limit: int = typer.Option(None, min=2, help="Only the first records, this many."),
    report: Path = typer.Option(
        None, metavar="FILE.html", help="Write queries beside what they found, with ranks."
    ),
    json: bool = JSON,
) -> None:
    """Rank texts, pictures and sounds by an aligner: recall at 1, 5 and 10, MRR and median rank of every pair."""
    from headway.eval.media_report import PictureReport, check_report_path, write_picture_report
    from headway.eval.retrieval import evaluate_retrieval

    if report is not None:
        check_report_path(report)
    scores, rows = evaluate_retrieval(model, data, limit)
    if report is not None:
        figures = {
            f"{score.pair} recall@1 of {score.candidates}": score.recall_at_1 for score in scores
        }
        write_picture_report(report, PictureReport(f"{model} on {data}", figures, retrievals=rows))

    if json:
        print_json(
            {
                "pairs": [{**vars(score), "chance_at_1": score.chance} for score in scores],
                "report": report,
            }
        )
        return

    # Fields of the scores and their headings.
    numbers = {
        "chance": "chance",
        "ceiling": "ceiling",
        "recall_at_1": "recall@1",
        "recall_at_5": "recall@5",
        "recall_at_10": "recall@10",
        "mrr": "MRR",
        "median_rank": "median rank",
        "modality_gap": "modality gap",
    }
    cells = [
        (score.pair, score.candidates, *(f"{getattr(score, name):.3f}" for name in numbers))
        for score in scores
    ]
    print_table(("pair", "candidates", *numbers.values()), cells)


VERBS = {"eval multimodal": multimodal, "eval retrieval": retrieval}
