"""What to do with a finished run.

In: its summary; out: commands that work as they are printed, each with what it does.

A command is listed only if the run has what it needs: a tokenizer to generate, text to measure,
TensorBoard files to look at.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.checkpoint.stored_model import StoredModel, find_model
from headway.config.load import load
from headway.data.config import SourceConfig
from headway.errors import HeadwayError
from headway.records.base import record_kind
from headway.rollout.config import JOURNAL
from headway.runtime.optional import is_installed
from headway.train.config import Recipe
from headway.train.run_folder import RECIPE
from headway.train.run_form import Command, run_form

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
        model = find_model(run) if commands is None else None
    except HeadwayError:
        return []
    if model is not None:
        commands = _model_commands(run, model, recipe)
    return [(shlex.join(words), purpose) for words, purpose in commands or ()]


def _model_commands(run: Path, model: StoredModel, recipe: Recipe) -> list[Command]:
    """What to do with a run that has trained a language model or a reward model."""
    if model.config.score_head:
        commands = _score(run, recipe)
    else:
        commands = [
            *_sampled(run),
            *_talk(run, model, recipe),
            *_measure(run, model, recipe),
        ]

    export = ["headway", "export", "hf", "--model", str(run), "--out", f"{run}-hf"]
    commands.append((export, "a folder for transformers and vLLM"))
    if (run / TENSORBOARD).is_dir() and is_installed("tensorboard"):
        commands.append((["tensorboard", "--logdir", str(run)], "the curves"))
    return commands


def _sources(recipe: Recipe) -> list[SourceConfig]:
    """The data of a recipe that is still there, validation sets before training data."""
    sources: list[SourceConfig] = []
    sets: Any = None
    if recipe.data.valid is not None:
        sets = recipe.data.valid.sets
    if isinstance(sets, dict):
        for of_set in sets.values():
            sources += of_set
    sources += recipe.data.train or ()
    return [source for source in sources if Path(source.path).exists()]


def _score(run: Path, recipe: Recipe) -> list[Command]:
    """The accuracy of a reward model."""
    sources = _sources(recipe)
    if not sources:
        return []
    words = ["headway", "eval", "reward", "--model", str(run), "--data", sources[0].path]
    return [(words, "accuracy and margin of pairs")]


def _sampled(run: Path) -> list[Command]:
    """The answers that a run with rollouts has learned from."""
    if not (run / JOURNAL).is_file():
        return []
    words = ["headway", "rollouts", str(run)]
    return [([*words, "--best"], "the best answers"), ([*words, "--worst"], "the worst")]


def _talk(run: Path, model: StoredModel, recipe: Recipe) -> list[Command]:
    """A conversation, a question or a text to continue, by what the model has learned."""
    if model.tokenizer_folder is None:
        return []
    modalities: tuple[str, ...] = ()
    if model.config.media is not None:
        modalities = model.config.media.modalities
    elif recipe.multimodal is not None:
        # Pictures through the model's own vision tower.
        modalities = ("image",)
    if modalities:
        return [(_ask_about_media(run, modalities), "one answer; name a file of yours")]
    generate = ["headway", "generate", "--model", str(run)]
    if _is_chat(recipe):
        chat = ["headway", "chat", "--model", str(run)]
        ask = [*generate, "--chat-template", "tokenizer", "--prompt", QUESTION]
        return [(chat, "talk to it"), (ask, "one answer")]
    return [([*generate, "--prompt", PROMPT, "--max-new-tokens", "64"], "continue a text")]


def _ask_about_media(run: Path, modalities: Sequence[str]) -> list[str]:
    """A question about one item of every kind that the model takes."""
    files: list[str] = []
    for modality in modalities:
        files += [f"--{modality}", EXAMPLE_FILES[modality]]
    return ["headway", "generate", "--model", str(run), *files, "--prompt", MEDIA_QUESTION]


def _is_chat(recipe: Recipe) -> bool:
    """Whether the last thing the model learned was to answer."""
    sources: Any
    if recipe.stages:
        # As they were given: sources may be plain paths, whose kind is not known here.
        last_stage = recipe.stage_settings(len(recipe.stages) - 1)
        sources = last_stage.get("data", {}).get("train") or []
    else:
        sources = [source.model_dump() for source in recipe.data.train or ()]
    return any(isinstance(source, dict) and _is_answered(source.get("kind")) for source in sources)


def _is_answered(name: Any) -> bool:
    """Whether records of a kind teach to answer in words."""
    if not isinstance(name, str) or name == "auto":
        return False
    kind = record_kind(name)
    return kind.has_template and not kind.holds_media


def _measure(run: Path, model: StoredModel, recipe: Recipe) -> list[Command]:
    """Perplexity on text that the recipe names."""
    if model.tokenizer_folder is None or _is_chat(recipe):
        return []
    if recipe.stages or recipe.data.train is None:
        return []
    # The command takes a path alone, so a source with settings of its own would be read otherwise.
    texts = [
        source
        for source in _sources(recipe)
        if not source.raw_settings and record_kind(source.kind).is_text
    ]
    if not texts:
        return []
    words = ["headway", "eval", "ppl", "--model", str(run), "--data", texts[0].path]
    return [(words, "perplexity")]


def next_lines(summary: Mapping[str, Any]) -> list[str]:
    """The commands as lines for the screen."""
    steps = next_steps(summary)
    if not steps:
        return []
    width = max(len(command) for command, _ in steps)
    explained = [f"  {command:<{width}}   # {purpose}" for command, purpose in steps]
    if all(len(line) <= COLUMNS for line in explained):
        return ["next:", *explained]
    return ["next:", *(f"  {command}" for command, _ in steps)]
