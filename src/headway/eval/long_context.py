"""What a model still finds in long prompts, as it is and under head masks: a plan and variants come in, scores and footprints go out.

tasks x lengths x depths x samples -> cases, the same for every variant -> generate -> share of answers found
texts (optional) -> perplexity by tokens of context, read as one window of the greatest length
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError
from headway.eval.kv_footprint import critical_footprint, footprint
from headway.eval.long_tasks.base import Case, find_task, fit, smallest
from headway.runtime.progress import progress
from headway.runtime.storage import write_atomic

if TYPE_CHECKING:
    from headway.eval.perplexity import Piece
    from headway.infer.load import LoadedModel
    from headway.model.head_masks import HeadMasks
    from headway.tokenizer.load import Tokenizer


@dataclass(frozen=True)
class LongPlan:
    """What is asked."""

    tasks: tuple[str, ...]
    """May be empty where texts are scored."""
    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 2
    """Cases of each task, length and depth."""
    seed: int = 0
    chunk_tokens: int = 4096
    rows: int = 4
    """Prompts that are computed at once."""

    def __post_init__(self) -> None:
        for name, values in (("--tasks", self.tasks), ("--lengths", self.lengths), ("--depths", self.depths)):
            if (not values and name != "--tasks") or len(set(values)) < len(values):
                raise ConfigError(f"{name} is {', '.join(map(str, values)) or 'empty'}; give one or more different values.")
        for task in self.tasks:
            find_task(task)
        if min(self.lengths) < 1:
            raise ConfigError(f"--lengths holds {min(self.lengths)}; a length is 1 or more.")
        if any(not 0 <= depth <= 1 for depth in self.depths):
            raise ConfigError(f"--depths is {', '.join(map(str, self.depths))}; depths lie between 0 (the beginning) and 1 (the end).")
        for name, value in (("--samples", self.samples), ("--chunk-tokens", self.chunk_tokens), ("--rows", self.rows)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more.")


@dataclass(frozen=True)
class Variant:
    """One way to read the model."""

    name: str
    masks: HeadMasks | None
    masks_from: str | None = None
    """`own` (of the model's gates), a file or `random`; None where there are none."""


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
    """Of each task: share of full causal attention's cells that are kept, averaged over the cases."""
    footprint: float
    peak: float
    """Most entries kept at one step as a share of all tokens, averaged over the cases."""
    length: int
    """Where cache and speed were measured."""
    cache_bytes: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    perplexity: dict[str, Any] | None = None

    def score(self, task: str, length: int | None = None) -> float:
        """Mean over the cases of a task, at one length or at all."""
        chosen = [cell for cell in self.cells if cell.task == task and length in (None, cell.length)]
        return sum(cell.score * cell.cases for cell in chosen) / sum(cell.cases for cell in chosen)


@dataclass(frozen=True)
class LongResult:
    """One model, several variants; the first is the model as it is."""

    model: str
    plan: LongPlan
    variants: list[VariantResult]
    critical: dict[str, float | None] = field(default_factory=dict)
    """Of each task: the smallest footprint that keeps 90 % of the full score; None where that is 0 or no mask was tried."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Asked:
    """A case and where it stands in the plan."""

    task: str
    length: int
    depth: float
    case: Case
    tokens: int
    new_tokens: int


def make_cases(tokenizer: Tokenizer, plan: LongPlan) -> list[Asked]:
    """The cases of a plan; each leaves room for its answer inside the length."""
    from headway.infer.generate import prompt_ids

    def count(text: str) -> int:
        return len(prompt_ids(tokenizer, text))

    found: list[Asked] = []
    for task in plan.tasks:
        for length in plan.lengths:
            for depth in plan.depths:
                for sample in range(plan.samples):
                    seed = (plan.seed, length, depth, sample)
                    new = _answer_tokens(smallest(task, depth, seed), tokenizer)
                    case, tokens = fit(task, count, length, depth, seed, room=new)
                    found.append(Asked(task, length, depth, case, tokens, new))
    return found


def _answer_tokens(case: Case, tokenizer: Tokenizer) -> int:
    """Room for the answers, with words between them."""
    told = len(tokenizer.encode(" " + ", ".join(case.answers)))
    return told + (2 if case.stop else told // 2 + 8)


def evaluate_long(
    loaded: LoadedModel,
    variants: Sequence[Variant],
    plan: LongPlan,
    *,
    name: str | None = None,
    texts: Callable[[], Iterable[Piece]] | None = None,
    keep: Path | None = None,
) -> LongResult:
    """Ask every variant the same. With `keep`, what a variant gave is written there and not measured again."""
    if loaded.tokenizer is None:
        raise ConfigError(
            f"{loaded.path}: holds no tokenizer, so no prompt can be made. Put tokenizer.json and tokenizer_config.json there."
        )
    if max(plan.lengths) > loaded.config.max_seq_len:
        raise ConfigError(
            f"--lengths holds {max(plan.lengths)}; the model's max_seq_len is {loaded.config.max_seq_len}. Give lengths up to that."
        )
    cases = make_cases(loaded.tokenizer, plan) if loaded.tokenizer is not None else []
    results: list[VariantResult] = []
    for variant in variants:
        results.append(_kept(loaded, variant, plan, cases, texts, keep))
    full = results[0]
    critical: dict[str, float | None] = {}
    for task in plan.tasks:
        points = [(one.footprints[task], one.score(task)) for one in results if not one.name.startswith("random")]
        critical[task] = critical_footprint(full.score(task), points) if len(points) > 1 else None
    return LongResult(name or str(loaded.path), plan, results, critical)


def _kept(
    loaded: LoadedModel,
    variant: Variant,
    plan: LongPlan,
    cases: list[Asked],
    texts: Callable[[], Iterable[Piece]] | None,
    keep: Path | None,
) -> VariantResult:
    key = _key(loaded, variant, plan, texts is not None) if keep is not None else ""
    file = keep / f"{variant.name.replace(' ', '-')}.json" if keep is not None else None
    if file is not None and file.is_file():
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.get("key") == key:
            stored = content["result"]
            return VariantResult(**{**stored, "cells": [Cell(**cell) for cell in stored["cells"]]})
    result = _measure(loaded.with_masks(variant.masks), variant, plan, cases, texts)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps({"key": key, "result": asdict(result)}, indent=1) + "\n")
    return result


def _key(loaded: LoadedModel, variant: Variant, plan: LongPlan, has_texts: bool) -> str:
    """What a variant's numbers depend on."""
    weights = [str(float(parameter.float().sum())) for parameter in loaded.model.parameters()]
    told = json.dumps([asdict(plan), repr(variant.masks), weights, has_texts, str(loaded.device)])
    return hashlib.sha256(told.encode()).hexdigest()


def _measure(
    loaded: LoadedModel, variant: Variant, plan: LongPlan, cases: list[Asked], texts: Callable[[], Iterable[Piece]] | None
) -> VariantResult:
    from headway.eval.perplexity import perplexity
    from headway.infer.speed import measure_speed

    masks = variant.masks
    answers = _answer(loaded, variant, plan, cases)
    groups: dict[tuple[str, int, float | None], list[float]] = {}
    shares: dict[str, list[float]] = {task: [] for task in plan.tasks}
    peaks: list[float] = []
    for asked, (score, written) in zip(cases, answers, strict=True):
        groups.setdefault((asked.task, asked.length, None if asked.case.depth is None else asked.depth), []).append(score)
        found = footprint(masks, asked.tokens, written, plan.chunk_tokens)
        shares[asked.task].append(found.share)
        peaks.append(found.peak)
    longest = max(plan.lengths)
    if not cases:
        found = footprint(masks, longest, 0, plan.chunk_tokens)
        shares, peaks = {"": [found.share]}, [found.peak]
    speed = measure_speed(loaded, longest, rows=plan.rows, chunk_tokens=plan.chunk_tokens)
    told = None if texts is None else perplexity(loaded, texts(), window=longest, batch_tokens=plan.rows * longest).to_json()
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
        told,
    )


def _answer(loaded: LoadedModel, variant: Variant, plan: LongPlan, cases: list[Asked]) -> list[tuple[float, int]]:
    """Score and written tokens of every case; cases that end alike and are equally long go together."""
    from headway.infer.generate import Options, generate

    results: list[tuple[float, int]] = [(0.0, 0)] * len(cases)
    groups: dict[tuple[str, int], list[int]] = {}
    for index, asked in enumerate(cases):
        groups.setdefault((asked.task, asked.length), []).append(index)
    with progress(f"ask {variant.name}", total=len(cases), unit="cases") as advance:
        for indices in groups.values():
            some = [cases[index] for index in indices]
            most = max(asked.new_tokens for asked in some)
            options = Options(most, some[0].case.stop, rows=plan.rows, chunk_tokens=plan.chunk_tokens)
            made = generate(loaded, [asked.case.prompt for asked in some], options)
            for index, asked, one in zip(indices, some, made, strict=True):
                results[index] = (asked.case.score(one.text), len(one.token_ids))
            advance(len(some))
    return results
