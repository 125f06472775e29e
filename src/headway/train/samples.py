"""Held-out prompts, answered before the first step and after the last.

In: a run with validation data; out: samples.json in its folder.

A prompt is the beginning of a held-out document: all that comes before the first target of a
conversation, or the first words of a text. The model that answers is a copy of the engine's weights
(adapters merged) in the inference engine. It is freed before training continues.

Invariant: a sample never ends a run. All ranks hand out their weights, the first one alone
generates, and what fails there is one warning. A resumed run keeps the answers from before its
first step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headway.data.mixture import MixtureSource
from headway.model.base import build_frozen_model
from headway.model.layout import param_specs
from headway.runtime.json_file import load_json
from headway.train.run_folder import write_json

if TYPE_CHECKING:
    from torch import Tensor

    from headway.infer.load import LoadedModel
    from headway.model.config import ModelConfig
    from headway.tokenizer.load import Tokenizer
    from headway.train.config import Recipe
    from headway.train.run import Run

log = logging.getLogger("headway")

FILE = "samples.json"
AUTO_SAMPLES = 2
"""Prompts of log.samples=auto."""
LARGE_PARAMETERS = 1_000_000_000
"""From here on no samples are made unless the recipe asks for them: a second copy of the weights,
and time to generate.
"""
NEW_TOKENS = 48
"""Upper bound on the tokens of an answer."""
LEAST_NEW_TOKENS = 8
"""A prompt leaves room for so many in the model's context, and a time limit, too."""
CPU_SECONDS_BEFORE = 10.0
"""On a CPU, answers before the first step end after this time: training must not wait for them."""
LONGEST_PROMPT = 512
"""Documents with a longer prompt are passed over."""
TEXT_TOKENS = 32
"""Tokens of a text that is continued."""
LOOKED_AT = 1000
"""Documents of a validation set that are looked at for a prompt."""
MAX_REASON = 300
"""Characters of an error in the warning."""
ROLES = ("system", "user", "human", "assistant", "bot", "gpt", "tool")
"""Names of speakers that templates write as text."""


@dataclass(frozen=True)
class Answer:
    """What the model wrote."""

    text: str
    was_cut: bool
    """It had not finished after NEW_TOKENS."""


class TimeLimit:
    """A time that begins now."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def is_over(self) -> bool:
        """Whether it has passed."""
        return self._clock() >= self._end


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
    def origin(self) -> tuple[str, str, int]:
        """The document it comes from."""
        return self.set, self.source, self.document


def num_samples(run: Run) -> int:
    """How many prompts a run answers; the same on all ranks."""
    wanted = run.recipe.log.samples
    takes_media = run.model.media is not None or run.model.vision is not None
    writes_text = run.model.head == "tokens" and not takes_media
    # Rollouts show far more answers, with what they earned (`headway rollouts`).
    writes_text = writes_text and run.rollouts is None
    if not run.data.valid or run.tokenizer_path is None or not writes_text:
        return 0
    if wanted != "auto":
        return wanted
    num_parameters = sum(spec.size for spec in param_specs(run.model))
    if num_parameters >= LARGE_PARAMETERS:
        return 0
    return AUTO_SAMPLES


def sample_before(run: Run) -> None:
    """Answer the prompts before the first step; a resumed run has done so."""
    count = num_samples(run)
    # The first rank alone may see the file, so it decides for all.
    is_done = run.process.is_first and bool(read_samples(run.start.folder))
    if not count or run.state.step != run.first_step or run.ranks.world.max(int(is_done)):
        return
    with _warn_on_failure(run):
        limit = None
        if run.compute.device.type == "cpu":
            limit = TimeLimit(CPU_SECONDS_BEFORE)
        prompts, answers = _answer_prompts(run, count, limit)
        samples = [
            replace(prompt, before=answer) for prompt, answer in zip(prompts, answers, strict=True)
        ]
        if samples:
            _write(run, samples)


def sample_after(run: Run) -> list[HeldOutPrompt]:
    """Answer the prompts with the weights that final/ has.

    The samples of the run with both answers, none where it makes none.
    """
    count = num_samples(run)
    if not count:
        return []
    samples: list[HeldOutPrompt] = []
    with _warn_on_failure(run):
        prompts, answers = _answer_prompts(run, count)
        known = {sample.origin: sample for sample in read_samples(run.start.folder)}
        for prompt, answer in zip(prompts, answers, strict=True):
            before = None
            if prompt.origin in known:
                before = known[prompt.origin].before
            samples.append(replace(prompt, before=before, after=answer))
        if samples:
            _write(run, samples)
    return samples


@contextmanager
def _warn_on_failure(run: Run) -> Iterator[None]:
    """Whatever goes wrong inside is a warning: training matters more than its samples."""
    run.heart.beat("validate", run.state.step)
    try:
        yield
    # A model of the user's, a full disk, too little memory for a second copy of the weights.
    except Exception as problem:
        log.warning(
            "no samples of held-out prompts: %s: %s",
            type(problem).__name__,
            " ".join(str(problem).split())[:MAX_REASON],
        )
    run.meter.interrupt()


def _answer_prompts(
    run: Run, count: int, limit: TimeLimit | None = None
) -> tuple[list[HeldOutPrompt], list[Answer]]:
    """The prompts of a run and the answers of its present weights, on the first rank.

    The other ranks hand out their weights.
    """
    weights = run.engine.weights()
    if not run.process.is_first:
        # Each tensor is gathered from all ranks as it is taken, so all ranks take them all.
        for _ in weights:
            pass
        return [], []

    from headway.infer.load import LoadedModel
    from headway.tokenizer.load import load_tokenizer

    try:
        assert run.tokenizer_path is not None
        tokenizer = load_tokenizer(run.tokenizer_path)
        prompts = pick_prompts(run.data.valid, tokenizer, count, run.model.max_seq_len)
        if not prompts:
            return [], []
        with _separate_memory(run.compute.device):
            model = build_frozen_model(
                run.model,
                plain_weights(run.recipe, run.model, weights),
                run.compute.device,
                run.compute.dtype,
            )
            end_ids = set(run.targets.end_ids)
            if tokenizer.eos_id is not None:
                end_ids.add(tokenizer.eos_id)
            loaded = LoadedModel(
                model,
                run.model.with_(head_gates=None),
                tokenizer,
                run.start.folder,
                frozenset(end_ids),
            )

            def on_round() -> None:
                run.heart.beat("validate", run.state.step)
                run.start_progress.advance()

            answers = write_answers(loaded, prompts, on_round, limit)
            # Freed inside the block, which gives the memory back to the device.
            del model, loaded
        return prompts, answers
    finally:
        # Other ranks wait until every tensor was taken.
        for _ in weights:
            pass


def plain_weights(
    recipe: Recipe, model: ModelConfig, weights: Iterator[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model without adapters: dequantised and merged."""
    adapter = recipe.adapter
    if adapter is None:
        return weights

    from headway.model.adapter.lora import merged
    from headway.model.adapter.packed_base import plain_values

    dequantised = plain_values(weights, adapter.layouts(model))
    return merged(dequantised, adapter, adapter.modules(model))


@contextmanager
def _separate_memory(device: torch.device) -> Iterator[None]:
    """Give the memory of a second model back, and leave it out of the peak that metrics report."""
    if device.type != "cuda":
        yield
        return
    peak = torch.cuda.max_memory_allocated(device)
    try:
        yield
    finally:
        torch.cuda.empty_cache()
        # A peak can be reset but not set: where the second model raised it, it counts anew.
        if torch.cuda.max_memory_allocated(device) > peak:
            torch.cuda.reset_peak_memory_stats(device)


def write_answers(
    loaded: LoadedModel,
    prompts: Sequence[HeldOutPrompt],
    on_round: Callable[[], object] = str,
    limit: TimeLimit | None = None,
) -> list[Answer]:
    """The likeliest continuation of every prompt; what `limit` ends is cut."""
    from headway.infer.engine.engine import InferenceEngine
    from headway.infer.engine.request import EngineOptions, EngineRequest
    from headway.infer.engine.text import RequestText

    assert loaded.tokenizer is not None
    longest = max(len(prompt.ids) for prompt in prompts)
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
    decoders = [RequestText(loaded.tokenizer, prompt.ids) for prompt in prompts]
    texts = [""] * len(prompts)
    # An answer counts as cut until the engine says how it ended.
    was_cut = [True] * len(prompts)
    num_tokens = [0] * len(prompts)
    index_of: dict[int, int] = {}
    for index, prompt in enumerate(prompts):
        request = EngineRequest(prompt.ids, NEW_TOKENS, key=str(index))
        index_of[engine.submit(request)] = index

    while engine.busy:
        on_round()
        for event in engine.step():
            index = index_of[event.request]
            texts[index] += decoders[index].add(event.tokens)
            num_tokens[index] += len(event.tokens)
            if event.finished is not None:
                was_cut[index] = event.finished in ("length", "context")
                num_tokens[index] = NEW_TOKENS
        if limit is not None and min(num_tokens) >= LEAST_NEW_TOKENS and limit.is_over:
            break

    # Decoders hold back bytes that are no whole character yet; `finish` gives them.
    return [
        Answer((text + decoder.finish()).strip(), cut)
        for text, decoder, cut in zip(texts, decoders, was_cut, strict=True)
    ]


def pick_prompts(
    valid: dict[str, tuple[MixtureSource, ...]], tokenizer: Tokenizer, count: int, max_seq_len: int
) -> list[HeldOutPrompt]:
    """The first prompts of the validation sets, one of each set in turn."""
    longest = min(LONGEST_PROMPT, max_seq_len - LEAST_NEW_TOKENS)
    streams = [
        _prompts_of_set(name, mixture, tokenizer, longest) for name, mixture in valid.items()
    ]
    picked: list[HeldOutPrompt] = []
    while streams and len(picked) < count:
        # Round robin: a stream that has given a prompt goes to the end, an empty one is dropped.
        stream = streams.pop(0)
        sample = next(stream, None)
        if sample is not None:
            picked.append(sample)
            streams.append(stream)
    return picked


def _prompts_of_set(
    name: str, mixture: Sequence[MixtureSource], tokenizer: Tokenizer, longest: int
) -> Iterator[HeldOutPrompt]:
    """Prompts of at most `longest` tokens from a validation set, in the order of its documents."""
    for part in mixture:
        source = part.selection.source
        for document in _first_documents(part):
            length = int(source.lengths(document, document + 1)[0])
            ids = source.tokens(document, 0, length)
            mask = source.mask(document, 0, length)
            if mask is not None and mask.any() and not mask[0]:
                # A conversation: its first answer is the first run of targets.
                begin = int(mask.argmax())
                answer = mask[begin:]
                end = length
                if not answer.all():
                    end = begin + int(answer.argmin())
                text = last_turn(ids[:begin].tolist(), tokenizer)
            else:
                # A text, all of which is learned: it is continued.
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
    documents: list[int] = []
    selection = source.selection
    # A selection may leave out most documents (a split, a limit), so several pieces are tried.
    for first in range(0, selection.num_documents, LOOKED_AT):
        documents += selection.pick(first, first + LOOKED_AT)[0].tolist()
        if len(documents) >= LOOKED_AT:
            break
    return documents[:LOOKED_AT]


def last_turn(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """What was said last before the answer.

    That is the last text between special tokens of the template, without the name of its speaker.
    """
    special = frozenset(tokenizer.special_tokens.values())
    turns: list[list[int]] = [[]]
    for token in ids:
        if token in special:
            turns.append([])
        else:
            turns[-1].append(token)

    # The last turn may hold a name alone: that of the speaker who is to answer.
    for turn in reversed(turns):
        text = tokenizer.decode(turn, skip_special=True).strip()
        speaker, _, words = text.partition("\n")
        if speaker.strip(" :").lower() in ROLES:
            text = words.strip()
        if text:
            return text
    return ""


def _write(run: Run, samples: Sequence[HeldOutPrompt]) -> None:
    write_json(run.start.folder / FILE, {"samples": [as_plain(sample) for sample in samples]})


def as_plain(sample: HeldOutPrompt) -> dict[str, Any]:
    """A sample as samples.json and summary.json have it."""
    return {name: value for name, value in asdict(sample).items() if name != "ids"}


def read_samples(folder: Path) -> list[HeldOutPrompt]:
    """The samples of a run folder; none if the file is missing or damaged."""
    try:
        entries: Any = load_json(folder / FILE)["samples"]
        return [
            HeldOutPrompt(
                set=str(entry["set"]),
                source=str(entry["source"]),
                document=int(entry["document"]),
                prompt=str(entry["prompt"]),
                expected=str(entry["expected"]),
                before=_read_answer(entry["before"]),
                after=_read_answer(entry["after"]),
            )
            for entry in entries
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _read_answer(entry: Any) -> Answer | None:
    if entry is None:
        return None
    return Answer(**entry)
