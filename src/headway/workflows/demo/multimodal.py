"""Phase 1 and phase 2 in small, on a generated set and a CPU: align encoders, teach a language
model to see and hear, ask it.

    pictures and tones -> align (contrastive) -> recall on held-out samples
                       -> tune (soft tokens into a small language model)
                          -> answers about held-out combinations
                          -> the same questions with the media blanked: chance

Every part leaves its result in the demo's folder and is not repeated; a second call only reports.
Invariant: no combination of shape, colour, place and tone in the held-out files is in the files
that train.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.media.synthetic import ANSWERS, SyntheticMedia, write_media
from headway.records.encode_media import MARK
from headway.runtime.storage import write_atomic
from headway.workflows.demo.part import demo_part

if TYPE_CHECKING:
    from headway.infer.media import MediaQuestion

VOCAB_SIZE = 340
"""Little more than the 256 bytes: the conversations have few words."""
SUMMARY = "summary.json"
HELD_OUT = 0.1
"""Share of the captions that phase 1 is validated on."""
REPORT = "report.html"
FIGURES = ("seen", "blank", "left_out", "chance")
"""Shares of right answers: with the media, with grey pictures and silence, with none at all, by
guessing.
"""
TUNE = """\
run: {{name: tune, dir: {out}/runs}}
model: {{hidden_size: 128, num_layers: 2, num_heads: 4, ffn_size: 344, max_seq_len: 128}}
tokenizer: {out}/tokenizer
multimodal:
  aligner: {out}/runs/align
  image: {{tokens: 4}}
  audio: {{tokens: 4}}
  hidden: 512
data:
  train: [{{path: {out}/media/chat.jsonl, kind: multimodal, chat_template: chatml}}]
  seq_len: 128
  cache_dir: {out}/cache
batch: {{rows: 16}}
optim: {{lr: 1.0e-3, weight_decay: 0.01, schedule: {{kind: cosine, warmup: 20}}, groups: [{{match: [projector], lr_factor: 3}}]}}
steps: {steps}
eval: {{every: null}}
checkpoint: {{every: null}}
log: {{every: 50}}
device: cpu
"""


@dataclass(frozen=True)
class MediaDemo:
    """The sizes of the demo."""

    samples: int = 3000
    heldout: int = 120
    align_steps: int = 400
    tune_steps: int = 600


def run_multimodal_demo(out: Path, sizes: MediaDemo = MediaDemo()) -> dict[str, Any]:
    """Make everything that is not there yet; returns the summary, which is also in summary.json."""
    began = time.monotonic()
    summary: dict[str, Any] = {"out": str(out)}
    summary |= demo_part(out, "media", lambda: _make_media(out, sizes))
    summary |= demo_part(out, "align", lambda: _align(out, sizes))
    summary |= demo_part(out, "tune", lambda: _tune(out, sizes))
    summary |= demo_part(out, "answers", lambda: _ask(out))
    summary["seconds"] = time.monotonic() - began
    write_atomic(out / SUMMARY, json.dumps(summary, indent=1) + "\n")
    return summary


def _make_media(out: Path, sizes: MediaDemo) -> dict[str, Any]:
    """Pictures, tones and conversations about them, and a tokenizer of their few words."""
    from headway.tokenizer.train import train_bpe

    files = write_media(
        out / "media", SyntheticMedia(samples=sizes.samples, heldout=sizes.heldout, image_size=32)
    )
    lines = files["chat"].read_text(encoding="utf-8").splitlines()
    texts = [turn["content"] for line in lines for turn in json.loads(line)["messages"]]
    train_bpe(texts, vocab_size=VOCAB_SIZE, out=out / "tokenizer")
    return {"samples": sizes.samples, "heldout": sizes.heldout, "conversations": len(lines)}


def _align(out: Path, sizes: MediaDemo) -> dict[str, Any]:
    """Phase 1: train encoders of pictures, sounds and captions into one space."""
    from headway.train.config import Recipe
    from headway.workflows.stopping import train_or_stop

    recipe = Recipe.load(
        "multimodal/align",
        {
            "run.dir": out / "runs",
            "run.name": "align",
            "data.train": [{"path": str(out / "media/captions.jsonl"), "kind": "captions"}],
            "model.aligner.encoders.image": {
                "kind": "vit",
                "image_size": 32,
                "patch": 4,
                "width": 64,
                "layers": 2,
                "stem": "convolutions",
            },
            "data.valid": {"fraction": HELD_OUT},
            "data.cache_dir": out / "cache",
            "steps": sizes.align_steps,
            "eval.every": None,
            "checkpoint.every": None,
            "device": "cpu",
        },
    )
    train_or_stop(recipe)

    # The newest record with a validation: that of the end of the run.
    lines = (recipe.run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    valid = next(
        record["valid"]["valid"] for record in map(json.loads, reversed(lines)) if "valid" in record
    )
    # `text-image/recall_at_1` -> `text-image`
    recall = {
        name.split("/")[0]: value for name, value in valid.items() if name.endswith("/recall_at_1")
    }
    return {"recall": recall, "candidates": int(valid["text-image/samples"]), "valid": valid}


def _tune(out: Path, sizes: MediaDemo) -> dict[str, Any]:
    """Phase 2: train a language model and the projectors that feed it the encoders' features."""
    from headway.config.load import load
    from headway.train.config import Recipe
    from headway.workflows.stopping import train_or_stop

    path = out / "tune.yaml"
    write_atomic(path, TUNE.format(out=out, steps=sizes.tune_steps))
    summary = train_or_stop(load(Recipe, path, []))
    return {"first_loss": summary["first_loss"], "last_loss": summary["last_loss"]}


def _ask(out: Path) -> dict[str, Any]:
    """The share of right answers by question, with the media, with grey pictures and silence
    instead, and without any; and a report.
    """
    from headway.eval.media_report import PictureReport, write_picture_report
    from headway.eval.multimodal import MultimodalPlan, evaluate_multimodal
    from headway.infer.generate import GenerateOptions
    from headway.infer.load import load_model
    from headway.infer.media import answer_media, read_questions

    loaded = load_model(out / "runs/tune")
    path = out / "media/chat_heldout.jsonl"
    options = GenerateOptions(max_new_tokens=12, rows=64)
    scores = evaluate_multimodal(loaded, path, MultimodalPlan("chatml", options, blank=True))

    bare = [without_media(question) for _, question in read_questions(path)]
    generations = answer_media(loaded, bare, "chatml", options)
    answered = [
        (question.turns[-1].content, question.expected or "", generation.text)
        for question, generation in zip(bare, generations, strict=True)
    ]
    left_out = right_by_question(answered)

    shares: dict[str, dict[str, Any]] = {}
    for score in scores.questions:
        shares[score.question] = {
            "chance": 1 / len(ANSWERS[score.question]),
            "seen": score.right,
            "blank": score.blank,
            "left_out": left_out[score.question],
            "asked": score.records,
        }
    figures: dict[str, Any] = {}
    for question, share in shares.items():
        for name in FIGURES:
            figures[f"{question} {name.replace('_', ' ')}"] = share[name]
    write_picture_report(
        out / REPORT, PictureReport("Answers about held-out combinations", figures, scores.rows)
    )
    return {"answers": shares, "report": str(out / REPORT)}


def without_media(question: MediaQuestion) -> MediaQuestion:
    """The same question with neither media nor marks."""
    return replace(
        question,
        media=(),
        turns=tuple(
            replace(turn, content=MARK.sub("", turn.content).strip()) for turn in question.turns
        ),
    )


def right_by_question(asked: Sequence[tuple[str, str, str]]) -> dict[str, float]:
    """The share of right answers to each question; in: question, expected answer, answer."""
    from headway.eval.media_report import same_answer

    outcomes: dict[str, list[bool]] = {}
    for question, expected, answer in asked:
        outcomes.setdefault(question, []).append(same_answer(answer, expected))
    return {question: sum(right) / len(right) for question, right in outcomes.items()}
