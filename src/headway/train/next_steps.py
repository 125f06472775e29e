"""What to do with a finished run. In: its summary; out: commands that work as they are printed, each with what it does.

A command is listed only if the run has what it needs: a tokenizer to generate, text to measure, TensorBoard files to look at.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.checkpoint.stored_model import StoredModel, find_model
from headway.config.load import load
from headway.errors import HeadwayError
from headway.model.media_shape import MediaShape
from headway.records.base import record_kind
from headway.runtime.optional import is_installed
from headway.train.config import Recipe
from headway.train.run_folder import RECIPE
from headway.train.run_form import run_form

PROMPT = "Once upon a time"
QUESTION = "What can you do?"
MEDIA_QUESTION = "What is this?"
EXAMPLE_FILES = {"image": "picture.png", "audio": "sound.wav"}
"""Stand for the user's own files in the command that follows a multimodal run."""
TENSORBOARD = "tensorboard"
COLUMNS = 100
"""Commands that are longer than this with their explanation are printed alone."""


def next_steps(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Commands and what each does; none for a run that was stopped or left no model."""
    if summary.get("stopped_by") is not None or summary.get("final") is None:
        return []
    run = Path(str(summary["run"]))
    try:
        recipe = load(Recipe, run / RECIPE)
        commands = run_form(recipe.model).next_commands(run, recipe)
        if commands is not None:
            return [(shlex.join(words), what) for words, what in commands]
        found = find_model(run)
    except HeadwayError:
        return []
    listed = (
        [*_talk(run, found, recipe), *_measure(run, found, recipe)]
        if not found.config.score_head
        else _scored(run, recipe)
    )
    listed.append(
        (
            ["headway", "export", "hf", "--model", str(run), "--out", f"{run}-hf"],
            "a folder for transformers and vLLM",
        )
    )
    if (run / TENSORBOARD).is_dir() and is_installed("tensorboard"):
        listed.append((["tensorboard", "--logdir", str(run)], "the curves"))
    return [(shlex.join(words), what) for words, what in listed]


def _scored(run: Path, recipe: Recipe) -> list[tuple[list[str], str]]:
    """What follows a reward model: validation sets before training data."""
    sets: Any = recipe.data.valid.sets if recipe.data.valid is not None else None
    held_out = [one for many in sets.values() for one in many] if isinstance(sets, dict) else []
    data = [one.path for one in (*held_out, *(recipe.data.train or ())) if Path(one.path).exists()][
        :1
    ]
    return [
        (
            ["headway", "eval", "reward", "--model", str(run), "--data", path],
            "accuracy and margin of pairs",
        )
        for path in data
    ]


def _talk(run: Path, found: StoredModel, recipe: Recipe) -> list[tuple[list[str], str]]:
    if found.tokenizer_folder is None:
        return []
    if found.config.media is not None:
        return [(_ask_about_media(run, found.config.media), "one answer; name a file of yours")]
    if _is_chat(recipe):
        asks = [
            "headway",
            "generate",
            "--model",
            str(run),
            "--chat-template",
            "tokenizer",
            "--prompt",
            QUESTION,
        ]
        return [(["headway", "chat", "--model", str(run)], "talk to it"), (asks, "one answer")]
    return [
        (
            [
                "headway",
                "generate",
                "--model",
                str(run),
                "--prompt",
                PROMPT,
                "--max-new-tokens",
                "64",
            ],
            "continue a text",
        )
    ]


def _ask_about_media(run: Path, media: MediaShape) -> list[str]:
    """A question about one item of every kind that the model takes."""
    files: list[str] = []
    for entry in media.inputs:
        files += [f"--{entry.modality}", EXAMPLE_FILES[entry.modality]]
    return ["headway", "generate", "--model", str(run), *files, "--prompt", MEDIA_QUESTION]


def _is_chat(recipe: Recipe) -> bool:
    """Whether the last thing the model learned was to answer."""
    last = recipe.stage_settings(len(recipe.stages) - 1).get("data", {}) if recipe.stages else None
    sources: Any = (
        (last.get("train") or [])
        if last is not None
        else [one.model_dump() for one in recipe.data.train or ()]
    )
    return any(isinstance(one, dict) and _is_answered(one.get("kind")) for one in sources)


def _is_answered(name: Any) -> bool:
    """Whether records of a kind teach to answer in words."""
    if not isinstance(name, str) or name == "auto":
        return False
    kind = record_kind(name)
    return kind.has_template and not kind.holds_media


def _measure(run: Path, found: StoredModel, recipe: Recipe) -> list[tuple[list[str], str]]:
    """Perplexity on text that the recipe names: validation sets before training data."""
    if (
        found.tokenizer_folder is None
        or _is_chat(recipe)
        or recipe.stages
        or recipe.data.train is None
    ):
        return []
    sets: Any = recipe.data.valid.sets if recipe.data.valid is not None else None
    held_out = [one for many in sets.values() for one in many] if isinstance(sets, dict) else []
    plain = [
        one
        for one in (*held_out, *recipe.data.train)
        if not one.raw_settings and record_kind(one.kind).is_text and Path(one.path).exists()
    ]
    if not plain:
        return []
    return [
        (["headway", "eval", "ppl", "--model", str(run), "--data", plain[0].path], "perplexity")
    ]


def next_lines(summary: Mapping[str, Any]) -> list[str]:
    """The commands as lines for the screen."""
    steps = next_steps(summary)
    width = max((len(command) for command, _ in steps), default=0)
    has_room = all(width + len(what) + 7 <= COLUMNS for _, what in steps)
    lines = [
        f"  {command:<{width}}   # {what}" if has_room else f"  {command}"
        for command, what in steps
    ]
    return ["next:", *lines] if steps else []
