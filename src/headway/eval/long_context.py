"""What a model finds in long prompts, without and under head masks: a plan and variants come in, scores and KV footprints go out.

tasks x lengths x depths x samples -> cases, the same for every variant -> generate -> share of answers found
texts (optional) -> perplexity by tokens of context, read as one window of the greatest length
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.errors import ConfigError
from headway.eval.kv_footprint import critical_footprint, footprint
from headway.eval.long_tasks import Case, find_task, fit, smallest
from headway.runtime.json_file import load_json
from headway.runtime.progress import progress
from headway.runtime.storage import write_atomic

if TYPE_CHECKING:
    from headway.eval.perplexity import EvalDocument
    from headway.infer.load import LoadedModel
    from headway.model.head_masks.choice import MaskVariant
    from headway.tokenizer.load import Tokenizer


log = logging.getLogger("headway")

CHUNKS, MAX_CHUNK = 8, 4096
"""A prompt is read in about this many chunks; the second value is the largest chunk in tokens."""
MAX_SAMPLES, MAX_ROWS, MAX_TOKENS = 10**6, 2**16, 2**40


@dataclass(frozen=True)
class LongPlan:
    """The tasks, lengths and depths to evaluate."""

    tasks: tuple[str, ...]
    """May be empty if texts are scored."""
    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 2
    """Cases of each task, length and depth."""
    seed: int = 0
    chunk_tokens: int | None = None
    """Tokens of each prompt that go through the model at once; None: an eighth of the length, at most 4096."""
    rows: int = 4
    """Prompts that are computed at once."""
    template: str | None = None
    """Chat template of the questions; None: prompts are plain text to continue."""
    bos: bool | None = None
    """Put the begin token before prompts and texts; None: where the model expects it. A template has its own."""

    def __post_init__(self) -> None:
        for name, values in (
            ("--tasks", self.tasks),
            ("--lengths", self.lengths),
            ("--depths", self.depths),
        ):
            if (not values and name != "--tasks") or len(set(values)) < len(values):
                raise ConfigError(
                    f"{name} is {', '.join(map(str, values)) or 'empty'}; give one or more different values."
                )
        for task in self.tasks:
            find_task(task)
        if min(self.lengths) < 1:
            raise ConfigError(f"--lengths holds {min(self.lengths)}; a length is 1 or more.")
        if any(not 0 <= depth <= 1 for depth in self.depths):
            raise ConfigError(
                f"--depths is {', '.join(map(str, self.depths))}; depths must be between 0 (the beginning) and 1 (the end)."
            )
        for name, value, most in (
            ("--samples", self.samples, MAX_SAMPLES),
            ("--chunk-tokens", self.chunk_tokens, MAX_TOKENS),
            ("--rows", self.rows, MAX_ROWS),
        ):
            if value is not None and not 1 <= value <= most:
                raise ConfigError(f"{name} is {value}; it must be from 1 to {most}.")

    def chunk(self, length: int) -> int:
        """Tokens of a prompt of this length that go through the model at once."""
        return (
            min(MAX_CHUNK, max(1, length // CHUNKS))
            if self.chunk_tokens is None
            else self.chunk_tokens
        )

    def whole(self) -> list[int]:
        """Lengths that go through the model in one chunk, so that nothing is evicted while a prompt is read."""
        return [length for length in self.lengths if self.chunk(length) >= length]


@dataclass(frozen=True)
class Cell:
    """Cases of one task at one length and depth."""

    task: str
    length: int
    depth: float | None
    score: float
    cases: int


@dataclass(frozen=True)
class VariantResult:
    """Everything measured about one variant."""

    name: str
    sparsity: float
    window: int | None
    sinks: int | None
    masks_from: str | None
    """`own` (of the model's gates), a file or `random`; None: every head keeps the whole past."""
    cells: list[Cell]
    footprints: dict[str, float]
    """Of each task: KV footprint as a share of full causal attention, averaged over the cases."""
    footprint: float
    peak: float
    """The most KV entries stored at one step as a share of all tokens, averaged over the cases."""
    length: int
    """Where cache and speed were measured."""
    cache_bytes: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    perplexity: dict[str, Any] | None = None

    def score(self, task: str, length: int | None = None) -> float:
        """Mean over the cases of a task, at one length or at all."""
        chosen = [
            cell for cell in self.cells if cell.task == task and length in (None, cell.length)
        ]
        return sum(cell.score * cell.cases for cell in chosen) / sum(cell.cases for cell in chosen)


@dataclass(frozen=True)
class LongResult:
    """One model, several variants; the first is the model without masks."""

    model: str
    plan: LongPlan
    variants: list[VariantResult]
    critical: dict[str, float | None] = field(default_factory=dict)
    """Of each task: the smallest footprint that keeps 90 % of the full score; None where that is 0 or no mask was tried."""
    chunks: dict[int, int] = field(default_factory=dict)
    """Of each length: tokens of a prompt that went through the model at once."""
    prompts: str = "text"
    """The form of the prompts: `chat template NAME`, or text and its prefix."""
    notes: list[str] = field(default_factory=list)
    """Limits of what the numbers mean."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class LongCase:
    """A case of a plan: its task, length and depth, and the prompt's ids."""

    task: str
    length: int
    depth: float
    case: Case
    ids: list[int]
    new_tokens: int


def make_cases(tokenizer: Tokenizer, plan: LongPlan) -> list[LongCase]:
    """The cases of a plan; each leaves room for its answer inside the length."""
    ids_of = prompts_of(tokenizer, plan)
    found: list[LongCase] = []
    for task in plan.tasks:
        for length in plan.lengths:
            for depth in plan.depths:
                for sample in range(plan.samples):
                    seed = (plan.seed, length, depth, sample)
                    new = _answer_tokens(smallest(task, depth, seed), tokenizer)
                    case, _ = fit(
                        task, lambda case: len(ids_of(case)), length, depth, seed, room=new
                    )
                    found.append(LongCase(task, length, depth, case, ids_of(case), new))
    return found


def plan_notes(plan: LongPlan) -> list[str]:
    """Limits of what the numbers mean."""
    whole = plan.whole()
    if not whole:
        return []
    lengths = ", ".join(map(str, whole))
    return [
        f"--chunk-tokens is {plan.chunk_tokens}, not smaller than the length of {lengths} tokens: prompts are read in one chunk and "
        "nothing is evicted meanwhile, so the KV footprint is about 100 % under any masks. Give a smaller chunk, or leave it out."
    ]


def prompts_in_words(tokenizer: Tokenizer, plan: LongPlan) -> str:
    """The form of the prompts, in words."""
    from headway.tokenizer.chat import expected_bos_ids

    if plan.template is not None:
        return f"questions in chat template {plan.template}"
    before = expected_bos_ids(tokenizer, plan.bos)
    return f"text after {tokenizer.decode(before)}" if before else "text with no begin token"


def variant_in_words(variant: MaskVariant) -> str:
    """The masks of a variant, in words."""
    masks = variant.masks
    if masks is None:
        return f"{variant.name}: none"
    heads = masks.num_layers * masks.num_kv_heads
    return f"{variant.name}: {variant.masks_from}, {masks.num_full} of {heads} heads full, window {masks.window}, sinks {masks.sinks}"


def prompts_of(tokenizer: Tokenizer, plan: LongPlan) -> Callable[[Case], list[int]]:
    """How a case becomes the ids of a prompt: plain text after the begin token, or a question in a chat and the answer's beginning."""
    from headway.tokenizer.chat import (
        Segment,
        Turn,
        encode_segments,
        expected_bos_ids,
        find_template,
    )

    if plan.template is None:
        before = expected_bos_ids(tokenizer, plan.bos)
        return lambda case: [*before, *tokenizer.encode(case.prompt)]
    template = find_template(plan.template, tokenizer)

    def asked(case: Case) -> list[int]:
        pieces = [*template.prompt([Turn("user", case.question)]), Segment(case.answer_start)]
        (rendered,) = encode_segments([pieces], template.name, tokenizer)
        if isinstance(rendered, Exception):
            raise rendered
        return rendered.ids.tolist()

    return asked


def _answer_tokens(case: Case, tokenizer: Tokenizer) -> int:
    """Room for the answers, with words between them."""
    answers = len(tokenizer.encode(" " + ", ".join(case.answers)))
    return answers + (2 if case.stop else answers // 2 + 8)


def evaluate_long(
    loaded: LoadedModel,
    variants: Sequence[MaskVariant],
    plan: LongPlan,
    *,
    name: str | None = None,
    texts: Callable[[], Iterable[EvalDocument]] | None = None,
    results_dir: Path | None = None,
) -> LongResult:
    """Evaluate every variant on the same cases. With `results_dir`, results are stored there and not measured again."""
    if loaded.tokenizer is None:
        raise ConfigError(
            f"{loaded.path}: holds no tokenizer, which prompts need. Put tokenizer.json and tokenizer_config.json there."
        )
    if max(plan.lengths) > loaded.config.max_seq_len:
        raise ConfigError(
            f"--lengths holds {max(plan.lengths)}; the model's max_seq_len is {loaded.config.max_seq_len}. Give lengths up to that."
        )
    cases = make_cases(loaded.tokenizer, plan)
    prompts, notes = prompts_in_words(loaded.tokenizer, plan), plan_notes(plan)
    log.info(
        "%s: prompts are %s; masks %s",
        loaded.path,
        prompts,
        "; ".join(map(variant_in_words, variants)),
    )
    for note in notes:
        log.warning("%s", note)
    key = "" if results_dir is None or texts is None else _texts_key(texts())
    results: list[VariantResult] = []
    for variant in variants:
        results.append(_load_or_measure(loaded, variant, plan, cases, texts, results_dir, key))
    full = results[0]
    critical: dict[str, float | None] = {}
    for task in plan.tasks:
        points = [
            (one.footprints[task], one.score(task))
            for one in results
            if not one.name.startswith("random")
        ]
        critical[task] = critical_footprint(full.score(task), points) if len(points) > 1 else None
    chunks = {length: plan.chunk(length) for length in plan.lengths}
    return LongResult(name or str(loaded.path), plan, results, critical, chunks, prompts, notes)


def _load_or_measure(
    loaded: LoadedModel,
    variant: MaskVariant,
    plan: LongPlan,
    cases: list[LongCase],
    texts: Callable[[], Iterable[EvalDocument]] | None,
    results_dir: Path | None,
    texts_key: str,
) -> VariantResult:
    key = _key(loaded, variant, plan, texts_key) if results_dir is not None else ""
    file = (
        results_dir / f"{variant.name.replace(' ', '-')}.json" if results_dir is not None else None
    )
    if file is not None and file.is_file():
        content = load_json(file)
        if content.get("key") == key:
            stored = content["result"]
            return VariantResult(**{**stored, "cells": [Cell(**cell) for cell in stored["cells"]]})
    result = _measure(loaded.with_masks(variant.masks), variant, plan, cases, texts)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps({"key": key, "result": asdict(result)}, indent=1) + "\n")
    return result


def _texts_key(texts: Iterable[EvalDocument]) -> str:
    """A hash of all texts."""
    found = hashlib.sha256()
    for piece in texts:
        found.update(json.dumps([piece.lead, len(piece.ids)]).encode())
        found.update(np.asarray(piece.ids, np.int64).tobytes())
    return found.hexdigest()


def _key(loaded: LoadedModel, variant: MaskVariant, plan: LongPlan, texts_key: str) -> str:
    """A hash of everything a variant's numbers depend on."""
    weights = [str(float(parameter.float().sum())) for parameter in loaded.model.parameters()]
    content = json.dumps(
        [asdict(plan), repr(variant.masks), weights, texts_key, str(loaded.device)]
    )
    return hashlib.sha256(content.encode()).hexdigest()


def _measure(
    loaded: LoadedModel,
    variant: MaskVariant,
    plan: LongPlan,
    cases: list[LongCase],
    texts: Callable[[], Iterable[EvalDocument]] | None,
) -> VariantResult:
    from headway.eval.perplexity import perplexity
    from headway.infer.speed import measure_speed

    masks = variant.masks
    answers = _answer(loaded, variant, plan, cases)
    groups: dict[tuple[str, int, float | None], list[float]] = {}
    shares: dict[str, list[float]] = {task: [] for task in plan.tasks}
    peaks: list[float] = []
    for asked, (score, written) in zip(cases, answers, strict=True):
        groups.setdefault(
            (asked.task, asked.length, None if asked.case.depth is None else asked.depth), []
        ).append(score)
        found = footprint(masks, len(asked.ids), written, plan.chunk(asked.length))
        shares[asked.task].append(found.share)
        peaks.append(found.peak)
    longest = max(plan.lengths)
    if not cases:
        found = footprint(masks, longest, 0, plan.chunk(longest))
        shares, peaks = {"": [found.share]}, [found.peak]
    speed = measure_speed(loaded, longest, rows=plan.rows, chunk_tokens=plan.chunk(longest))
    scored = (
        None
        if texts is None
        else perplexity(loaded, texts(), window=longest, batch_tokens=plan.rows * longest).to_json()
    )
    means = {task: sum(values) / len(values) for task, values in shares.items()}
    mean = sum(means.values()) / len(means)
    return VariantResult(
        variant.name,
        0.0 if masks is None else masks.sparsity,
        None if masks is None else masks.window,
        None if masks is None else masks.sinks,
        variant.masks_from if masks is not None else None,
        [Cell(*place, sum(scores) / len(scores), len(scores)) for place, scores in groups.items()],
        means if cases else {},
        mean,
        sum(peaks) / len(peaks),
        longest,
        speed.cache_bytes,
        speed.prefill_tokens_per_second,
        speed.decode_tokens_per_second,
        scored,
    )


def _answer(
    loaded: LoadedModel, variant: MaskVariant, plan: LongPlan, cases: list[LongCase]
) -> list[tuple[float, int]]:
    """Score and generated tokens of every case; the cases of one task and length form a batch."""
    from headway.infer.generate import GenerateOptions, generate_from_ids
    from headway.tokenizer.chat import answer_end

    assert loaded.tokenizer is not None
    stop_ids = () if plan.template is None else answer_end(plan.template, loaded.tokenizer)
    results: list[tuple[float, int]] = [(0.0, 0)] * len(cases)
    groups: dict[tuple[str, int], list[int]] = {}
    for index, asked in enumerate(cases):
        groups.setdefault((asked.task, asked.length), []).append(index)
    with progress(f"evaluate {variant.name}", total=len(cases), unit="cases") as advance:
        for indices in groups.values():
            some = [cases[index] for index in indices]
            most = max(asked.new_tokens for asked in some)
            options = GenerateOptions(
                most,
                some[0].case.stop,
                stop_ids,
                rows=plan.rows,
                chunk_tokens=plan.chunk(some[0].length),
            )
            made = generate_from_ids(
                loaded, [(asked.case.prompt, asked.ids) for asked in some], options
            )
            for index, asked, one in zip(indices, some, made, strict=True):
                results[index] = (asked.case.score(one.text), len(one.token_ids))
            advance(len(some))
    return results
