"""Held-out prompts, answered before the first step and after the last. In: a run with validation data; out: samples.json in its folder.

A prompt is the beginning of a held-out document: all that comes before the first target of a conversation, or the first words of a text.
The model that answers is a copy of the engine's weights (adapters merged) in the inference engine. It is freed before training continues.

Invariant: a sample never ends a run. All ranks hand out their weights, the first one alone generates, and what fails there is one warning.
A resumed run keeps the answers from before its first step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headway.data.mixture import MixtureSource
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.request import EngineOptions, EngineRequest
from headway.infer.engine.text import RequestText
from headway.infer.load import LoadedModel
from headway.model.adapter.lora import merged
from headway.model.adapter.packed_base import plain_values
from headway.model.base import build_frozen_model
from headway.model.layout import param_specs
from headway.runtime.json_file import load_json
from headway.tokenizer.load import Tokenizer, load_tokenizer
from headway.train.run_folder import write_json
from headway.train.run_form import run_form

if TYPE_CHECKING:
    from torch import Tensor

    from headway.train.run import Run

log = logging.getLogger("headway")

FILE = "samples.json"
AUTO_SAMPLES = 2
LARGE_PARAMETERS = 1_000_000_000
"""From here on no samples are made unless the recipe asks for them: a second copy of the weights, and time to generate."""
NEW_TOKENS = 48
LEAST_NEW_TOKENS = 8
"""A prompt leaves room for so many in the model's context."""
LONGEST_PROMPT = 512
"""Documents with a longer prompt are passed over."""
TEXT_TOKENS = 32
"""Tokens of a text that is continued."""
LOOKED_AT = 1000
"""Documents of a validation set that are looked at for a prompt."""
ROLES = ("system", "user", "human", "assistant", "bot", "gpt", "tool")


@dataclass(frozen=True)
class Answer:
    """What the model wrote."""

    text: str
    was_cut: bool
    """It had not finished after NEW_TOKENS."""


@dataclass(frozen=True)
class HeldOutPrompt:
    """One held-out prompt and its answers."""

    set: str
    source: str
    document: int
    prompt: str
    """The last turn before the answer, or the beginning of the text."""
    expected: str
    """What the data answers."""
    before: Answer | None = None
    """Before the first step; None: the run was resumed from one without samples."""
    after: Answer | None = None
    ids: tuple[int, ...] = field(default=(), repr=False)
    """The whole prompt; not stored."""

    @property
    def place(self) -> tuple[str, str, int]:
        """The document it comes from."""
        return self.set, self.source, self.document


def num_samples(run: Run) -> int:
    """How many prompts a run answers; the same on all ranks."""
    wanted = run.recipe.log.samples
    writes_text = (
        run_form(run.model).writes_text and run.model.media is None and not run.model.score_head
    )
    if not run.data.valid or run.tokenizer_path is None or not writes_text:
        return 0
    if wanted != "auto":
        return wanted
    size = sum(spec.size for spec in param_specs(run.model))
    return AUTO_SAMPLES if size < LARGE_PARAMETERS else 0


def sample_before(run: Run) -> None:
    """Answer the prompts before the first step; a resumed run has done so."""
    count = num_samples(run)
    is_done = run.process.is_first and bool(read_samples(run.start.folder))
    if not count or run.state.step != run.first_step or run.ranks.world.max(int(is_done)):
        return
    with _reported(run):
        prompts, answers = _answered(run, count)
        if prompts:
            _write(
                run,
                [replace(one, before=answer) for one, answer in zip(prompts, answers, strict=True)],
            )


def sample_after(run: Run) -> list[HeldOutPrompt]:
    """Answer the prompts with the weights that final/ has; the samples of the run with both answers, none where it makes none."""
    count = num_samples(run)
    if not count:
        return []
    samples: list[HeldOutPrompt] = []
    with _reported(run):
        prompts, answers = _answered(run, count)
        known = {one.place: one for one in read_samples(run.start.folder)}
        for prompt, answer in zip(prompts, answers, strict=True):
            earlier = known.get(prompt.place)
            samples.append(
                replace(prompt, before=None if earlier is None else earlier.before, after=answer)
            )
        if samples:
            _write(run, samples)
    return samples


@contextmanager
def _reported(run: Run) -> Iterator[None]:
    """Whatever goes wrong inside is a warning: training matters more than its samples."""
    run.heart.beat("validate", run.state.step)
    try:
        yield
    except (
        Exception
    ) as problem:  # a model of the user's, a full disk, too little memory for a second copy
        log.warning(
            "no samples of held-out prompts: %s: %s",
            type(problem).__name__,
            " ".join(str(problem).split())[:300],
        )
    run.meter.interrupt()


def _answered(run: Run, count: int) -> tuple[list[HeldOutPrompt], list[Answer]]:
    """The prompts of a run and the answers of its present weights, on the first rank; the other ranks hand out their weights."""
    weights = run.engine.weights()
    if not run.process.is_first:
        for _ in weights:
            pass
        return [], []
    try:
        assert run.tokenizer_path is not None
        tokenizer = load_tokenizer(run.tokenizer_path)
        prompts = pick_prompts(run.data.valid, tokenizer, count, run.model.max_seq_len)
        if not prompts:
            return [], []
        with _memory_apart(run.compute.device):
            model = build_frozen_model(
                run.model, plain_weights(run, weights), run.compute.device, run.compute.dtype
            )
            ends = run.targets.end_ids | (
                {tokenizer.eos_id} if tokenizer.eos_id is not None else set()
            )
            loaded = LoadedModel(
                model,
                run.model.with_(head_gates=None),
                tokenizer,
                run.start.folder,
                frozenset(ends),
            )
            answers = write_answers(
                loaded, prompts, lambda: run.heart.beat("validate", run.state.step)
            )
            del model, loaded
        return prompts, answers
    finally:
        # Other ranks wait until every tensor was taken.
        for _ in weights:
            pass


def plain_weights(run: Run, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model without adapters: dequantised and merged."""
    adapter = run.recipe.adapter
    if adapter is None:
        return weights
    return merged(
        plain_values(weights, adapter.layouts(run.model)), adapter, adapter.modules(run.model)
    )


@contextmanager
def _memory_apart(device: torch.device) -> Iterator[None]:
    """Give the memory of a second model back, and leave it out of the peak that metrics report."""
    if device.type != "cuda":
        yield
        return
    peak = torch.cuda.max_memory_allocated(device)
    try:
        yield
    finally:
        torch.cuda.empty_cache()
        if torch.cuda.max_memory_allocated(device) > peak:
            torch.cuda.reset_peak_memory_stats(device)


def write_answers(
    loaded: LoadedModel, prompts: Sequence[HeldOutPrompt], on_round: Callable[[], object] = str
) -> list[Answer]:
    """The likeliest continuation of every prompt."""
    assert loaded.tokenizer is not None
    longest = max(len(one.ids) for one in prompts)
    options = EngineOptions(
        max_running=len(prompts),
        max_waiting=len(prompts),
        prefill_tokens=LONGEST_PROMPT,
        max_context=min(loaded.config.max_seq_len, longest + NEW_TOKENS),
        # For so few tokens, neither recording nor compiling pays.
        record=False,
        compile_blocks=False,
    )
    engine = InferenceEngine(loaded, options)
    texts = [RequestText(loaded.tokenizer, one.ids) for one in prompts]
    pieces: list[list[str]] = [[] for _ in prompts]
    was_cut = [False] * len(prompts)
    numbers = {
        engine.submit(EngineRequest(one.ids, NEW_TOKENS, key=str(index))): index
        for index, one in enumerate(prompts)
    }
    while engine.busy:
        on_round()
        for event in engine.step():
            index = numbers[event.request]
            pieces[index].append(texts[index].add(event.tokens))
            if event.finished is not None:
                was_cut[index] = event.finished in ("length", "context")
    return [
        Answer("".join([*piece, text.finish()]).strip(), cut)
        for piece, text, cut in zip(pieces, texts, was_cut, strict=True)
    ]


def pick_prompts(
    valid: dict[str, tuple[MixtureSource, ...]], tokenizer: Tokenizer, count: int, max_seq_len: int
) -> list[HeldOutPrompt]:
    """The first prompts of the validation sets, one of each set in turn."""
    streams = [
        _prompts(name, many, tokenizer, min(LONGEST_PROMPT, max_seq_len - LEAST_NEW_TOKENS))
        for name, many in valid.items()
    ]
    picked: list[HeldOutPrompt] = []
    while streams and len(picked) < count:
        stream = streams.pop(0)
        sample = next(stream, None)
        if sample is not None:
            picked.append(sample)
            streams.append(stream)
    return picked


def _prompts(
    name: str, mixture: Sequence[MixtureSource], tokenizer: Tokenizer, longest: int
) -> Iterator[HeldOutPrompt]:
    for one in mixture:
        source = one.selection.source
        documents = _first_documents(one)
        for document in documents:
            length = int(source.lengths(document, document + 1)[0])
            ids = source.tokens(document, 0, length)
            mask = source.mask(document, 0, length)
            if mask is not None and mask.any() and not mask[0]:
                begin = int(mask.argmax())
                after = mask[begin:]
                end = length if after.all() else begin + int(after.argmin())
                text = last_turn(ids[:begin].tolist(), tokenizer)
            else:
                begin = min(TEXT_TOKENS, length // 2)
                end = min(length, begin + NEW_TOKENS)
                text = tokenizer.decode(ids[:begin].tolist(), skip_special=True)
            if 0 < begin <= longest and text.strip():
                expected = tokenizer.decode(ids[begin:end].tolist(), skip_special=True)
                yield HeldOutPrompt(
                    name,
                    source.name,
                    int(document),
                    text.strip(),
                    expected.strip(),
                    ids=tuple(ids[:begin].tolist()),
                )


def _first_documents(source: MixtureSource) -> list[int]:
    """The first documents that a selection reads."""
    found: list[int] = []
    selection = source.selection
    for first in range(0, selection.num_documents, LOOKED_AT):
        found += selection.pick(first, first + LOOKED_AT)[0].tolist()
        if len(found) >= LOOKED_AT:
            break
    return found[:LOOKED_AT]


def last_turn(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """What was said last before the answer: the text between the special tokens of a template, without the name of its speaker."""
    special = frozenset(tokenizer.special_tokens.values())
    turns: list[list[int]] = [[]]
    for token in ids:
        if token in special:
            turns.append([])
        else:
            turns[-1].append(token)
    for turn in reversed(turns):
        text = tokenizer.decode(turn, skip_special=True).strip()
        speaker, _, said = text.partition("\n")
        if speaker.strip(" :").lower() in ROLES:
            text = said.strip()
        if text:
            return text
    return ""


def _write(run: Run, samples: Sequence[HeldOutPrompt]) -> None:
    write_json(run.start.folder / FILE, {"samples": [as_plain(one) for one in samples]})


def as_plain(sample: HeldOutPrompt) -> dict[str, Any]:
    """A sample as samples.json and summary.json have it."""
    return {name: value for name, value in asdict(sample).items() if name != "ids"}


def read_samples(folder: Path) -> list[HeldOutPrompt]:
    """The samples of a run folder; none if the file is missing or damaged."""
    try:
        listed: Any = load_json(folder / FILE)["samples"]
        return [
            HeldOutPrompt(
                set=str(one["set"]),
                source=str(one["source"]),
                document=int(one["document"]),
                prompt=str(one["prompt"]),
                expected=str(one["expected"]),
                before=None if one["before"] is None else Answer(**one["before"]),
                after=None if one["after"] is None else Answer(**one["after"]),
            )
            for one in listed
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
