"""What a model finds in long prompts, without and under head masks: a plan and variants come in,
scores and KV footprints go out.

    tasks x lengths x depths x samples -> cases -> generate  -> share of answers found
    texts (optional)                   -> windows -> score   -> perplexity by tokens of context

Cases are the same for every variant. Windows have the greatest length of the plan.

Variants share their cases, the sums of the weights, and the speed of masks of one size. They share no
keys and values: under other masks every layer but the first computes other ones. Within a variant,
cases that are read in chunks of one size share an engine, and prompts with the same beginning share its pages.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.errors import ConfigError
from headway.eval.kv_footprint import critical_footprint, footprint
from headway.eval.long_cases import (
    FROM_FILES,
    LongCase,
    make_cases,
    prompts_in_words,
    prompts_key,
)
from headway.eval.mask_comparison import MaskComparison, compare_masks, scores_of
from headway.eval.mask_verdict import GateState, LongVerdict, verdict_of
from headway.eval.options import LongPlan
from headway.runtime.json_file import load_json
from headway.runtime.progress import progress
from headway.runtime.storage import write_atomic
from headway.text import helmet, ruler

if TYPE_CHECKING:
    import torch

    from headway.eval.perplexity import EvalDocument
    from headway.infer.generate import Generation
    from headway.infer.load import LoadedModel
    from headway.infer.speed import GenerationSpeed
    from headway.model.config import ModelConfig
    from headway.model.head_masks.choice import MaskVariant, VariantKind
    from headway.model.head_masks.masks import HeadMasks

log = logging.getLogger("headway")


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
    """`own` (of the model's gates), a file or the kind of a baseline; None: every head keeps the
    whole past."""
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
    kind: VariantKind = "full"
    compared_with: str | None = None
    """Of a baseline: the name of the masks that are compared with it."""
    seed: int | None = None
    """Of random masks."""

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
    """Of each task: the smallest footprint that keeps 90 % of the full score; None where that is 0
    or no mask was tried.
    """
    chunks: dict[int, int] = field(default_factory=dict)
    """Of each length: tokens of a prompt that went through the model at once."""
    prompts: str = "text"
    """The form of the prompts, in the words of `prompts_in_words`."""
    notes: list[str] = field(default_factory=list)
    """Limits of what the numbers mean."""
    gates: GateState | None = None
    """How the model's gates ended, where masks are made of them."""

    def comparisons(self) -> list[MaskComparison]:
        """Every one of the masks with its random draws and simple choices."""
        return compare_masks(self.variants, self.plan.tasks)

    def verdict(self) -> LongVerdict | None:
        """What the comparisons come to; None where no masks were measured and the full model can do
        the tasks."""
        full = self.variants[0]
        cases = sum(cell.cases for cell in full.cells)
        return verdict_of(scores_of([full], self.plan.tasks), self.comparisons(), cases, self.gates)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        verdict = self.verdict()
        return {
            **asdict(self),
            "plan": self.plan.to_json(),
            "comparisons": [comparison.to_json() for comparison in self.comparisons()],
            "verdict": None if verdict is None else verdict.to_json(),
        }


def plan_notes(plan: LongPlan) -> list[str]:
    """Limits of what the numbers mean."""
    notes = [
        *ruler.notes(plan.tasks, plan.questions.ruler_data),
        *helmet.notes(plan.tasks, plan.lengths, plan.questions.helmet),
    ]
    whole = plan.whole()
    if not whole:
        return notes
    lengths = ", ".join(map(str, whole))
    return [
        *notes,
        f"--chunk-tokens is {plan.questions.chunk_tokens}, not smaller than the length of "
        f"{lengths} tokens: prompts are read in one chunk and "
        "nothing is evicted meanwhile, so the KV footprint is about 100 % under any masks. Give a "
        "smaller chunk, or leave it out.",
    ]


def variant_in_words(variant: MaskVariant) -> str:
    """The masks of a variant, in words."""
    masks = variant.masks
    if masks is None:
        return f"{variant.name}: none"
    heads = masks.num_layers * masks.num_kv_heads
    return (
        f"{variant.name}: {variant.masks_from}, {masks.num_full} of {heads} heads full, "
        f"window {masks.window}, sinks {masks.sinks}"
    )


def evaluate_long(
    loaded: LoadedModel,
    variants: Sequence[MaskVariant],
    plan: LongPlan,
    *,
    name: str | None = None,
    texts: Callable[[], Iterable[EvalDocument]] | None = None,
    results_dir: Path | None = None,
    target: float | None = None,
    cases: list[LongCase] | None = None,
) -> LongResult:
    """Evaluate every variant on the same cases.

    With `results_dir`, results are stored there and not measured again. `target`: the sparsity that
    the model's gates were trained for, if it is known. `cases`: those of the plan, where they were
    made before with the model's tokenizer.
    """
    if loaded.tokenizer is None:
        raise ConfigError(
            f"{loaded.path}: holds no tokenizer, which prompts need. Put tokenizer.json and "
            "tokenizer_config.json there."
        )
    if max(plan.lengths) > loaded.config.max_seq_len:
        raise ConfigError(
            f"--lengths holds {max(plan.lengths)}; the model's max_seq_len is "
            f"{loaded.config.max_seq_len}. Give lengths up to that."
        )

    if cases is None:
        cases = make_cases(loaded.tokenizer, plan)
    prompts = prompts_in_words(loaded.tokenizer, plan)
    notes = plan_notes(plan)
    plan = plan.resolved()
    # Baselines are many, and their masks are all of one size.
    chosen = [variant for variant in variants if variant.kind in ("full", "masks")]
    log.info(
        "%s: prompts are %s; masks %s; %d masks to compare with",
        loaded.path,
        prompts,
        "; ".join(map(variant_in_words, chosen)),
        len(variants) - len(chosen),
    )
    # Before the measurement, which takes long; the report has them, too.
    for note in notes:
        log.warning("%s", note)

    evaluation = _Evaluation(loaded, plan, cases, texts, results_dir)
    results = [evaluation.result(variant) for variant in variants]

    # Baselines are what masks are compared with; they do not count as a way to save.
    full = results[0]
    measured = [result for result in results if result.kind in ("full", "masks")]
    critical: dict[str, float | None] = {}
    for task in plan.tasks:
        critical[task] = None
        if len(measured) > 1:
            points = [(result.footprints[task], result.score(task)) for result in measured]
            critical[task] = critical_footprint(full.score(task), points)

    chunks = {length: plan.chunk(length) for length in plan.lengths}
    gates = None
    if loaded.gates is not None:
        trained = loaded.gates
        gates = GateState(trained.sparsity, trained.undecided, trained.log_alpha.numel(), target)
    return LongResult(
        name or str(loaded.path), plan, results, critical, chunks, prompts, notes, gates
    )


class _Evaluation:
    """The measurements of one model on one plan, and what its variants share."""

    def __init__(
        self,
        loaded: LoadedModel,
        plan: LongPlan,
        cases: list[LongCase],
        texts: Callable[[], Iterable[EvalDocument]] | None,
        results_dir: Path | None,
    ) -> None:
        self.loaded = loaded
        self.plan = plan
        """With the names of tasks for those of groups."""
        self.cases = cases
        self.texts = texts
        self.results_dir = results_dir
        self._speeds: dict[tuple[object, ...], GenerationSpeed] = {}
        """By the size of the masks (`mask_size`)."""

    @cached_property
    def _weights_key(self) -> list[str]:
        """What tells other weights of the same shapes."""
        # Sums instead of all weights: any training step changes them, and they cost little.
        return [str(float(weight.float().sum())) for weight in self.loaded.model.parameters()]

    @cached_property
    def _inputs_key(self) -> str:
        """A hash of the texts, and of the prompts where they are made of files.

        Other prompts follow from the plan and the model's tokenizer; files may change under the
        same plan.
        """
        key = ""
        if self.texts is not None:
            key = _texts_key(self.texts())
        if FROM_FILES & set(self.plan.tasks):
            key += prompts_key(self.cases)
        return key

    def _key(self, variant: MaskVariant) -> str:
        """A hash of what a variant's numbers depend on: plan, masks, weights, texts and device."""
        content = json.dumps(
            [
                self.plan.to_json(),
                repr(variant.masks),
                self._weights_key,
                self._inputs_key,
                str(self.loaded.device),
            ]
        )
        return hashlib.sha256(content.encode()).hexdigest()

    def result(self, variant: MaskVariant) -> VariantResult:
        """The stored result of a variant, if it was measured under the same conditions, or a new
        one.
        """
        if self.results_dir is None:
            return self._measure(variant)

        key = self._key(variant)
        file = self.results_dir / f"{variant.name.replace(' ', '-')}.json"
        if file.is_file():
            content = load_json(file)
            if content.get("key") == key:
                return self._stored(variant, content["result"])

        result = self._measure(variant)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps({"key": key, "result": asdict(result)}, indent=1) + "\n")
        return result

    def _stored(self, variant: MaskVariant, stored: dict[str, Any]) -> VariantResult:
        """A result that an earlier command has measured."""
        from headway.infer.speed import GenerationSpeed

        result = VariantResult(**{**stored, "cells": [Cell(**cell) for cell in stored["cells"]]})
        # Masks of this size that are still to be measured have the same speed.
        speed = GenerationSpeed(
            result.cache_bytes,
            result.prefill_tokens_per_second,
            result.decode_tokens_per_second,
        )
        self._speeds.setdefault(mask_size(self.loaded.config, variant.masks), speed)
        # What the measurement is of is said by this command, not by the one that made it.
        return replace(result, **_about(variant))

    def _measure(self, variant: MaskVariant) -> VariantResult:
        """Scores, footprints, speed and perplexity of one variant."""
        from headway.eval.perplexity import perplexity

        plan = self.plan
        masks = variant.masks
        loaded = self.loaded.with_masks(masks)
        longest = max(plan.lengths)

        # (task, length, depth) -> scores of its cases.
        groups: dict[tuple[str, int, float | None], list[float]] = {}
        shares: dict[str, list[float]] = {task: [] for task in plan.tasks}
        peaks: list[float] = []
        answers = answer_cases(loaded, plan, self.cases, variant.name)
        for case, answer in zip(self.cases, answers, strict=True):
            # A task whose answer is in many places has no depth; its cases form one cell.
            depth = None
            if case.case.depth is not None:
                depth = case.depth
            score = case.case.score(answer.text)
            groups.setdefault((case.task, case.length, depth), []).append(score)
            chunk = plan.chunk(case.length)
            kept = footprint(masks, len(case.ids), len(answer.token_ids), chunk)
            shares[case.task].append(kept.share)
            peaks.append(kept.peak)
        cells = [
            Cell(*group, sum(scores) / len(scores), len(scores)) for group, scores in groups.items()
        ]

        # Without tasks, texts alone are scored: the footprint is that of a prompt of the greatest
        # length. It has no task, so only its mean is reported below, not `footprints`.
        if not self.cases:
            kept = footprint(masks, longest, 0, plan.chunk(longest))
            shares = {"": [kept.share]}
            peaks = [kept.peak]
        footprints = {task: sum(values) / len(values) for task, values in shares.items()}
        mean_footprint = sum(footprints.values()) / len(footprints)

        speed = self._speed(loaded)
        text_scores = None
        if self.texts is not None:
            batch_tokens = plan.questions.measured_rows * longest
            scored = perplexity(loaded, self.texts(), window=longest, batch_tokens=batch_tokens)
            text_scores = scored.to_json()

        return VariantResult(
            name=variant.name,
            sparsity=0.0 if masks is None else masks.sparsity,
            window=None if masks is None else masks.window,
            sinks=None if masks is None else masks.sinks,
            masks_from=None if masks is None else variant.masks_from,
            cells=cells,
            footprints=footprints if self.cases else {},
            footprint=mean_footprint,
            peak=sum(peaks) / len(peaks),
            length=longest,
            cache_bytes=speed.cache_bytes,
            prefill_tokens_per_second=speed.prefill_tokens_per_second,
            decode_tokens_per_second=speed.decode_tokens_per_second,
            perplexity=text_scores,
            **_about(variant),
        )

    def _speed(self, loaded: LoadedModel) -> GenerationSpeed:
        """Of the model under its masks; masks of one size are measured once."""
        from headway.infer.speed import measure_speed

        size = mask_size(loaded.config, loaded.masks)
        if size not in self._speeds:
            longest = max(self.plan.lengths)
            self._speeds[size] = measure_speed(
                loaded,
                longest,
                rows=self.plan.questions.measured_rows,
                chunk_tokens=self.plan.chunk(longest),
            )
        return self._speeds[size]


def mask_size(config: ModelConfig, masks: HeadMasks | None) -> tuple[object, ...]:
    """What the work under masks depends on: their window and sinks, and how many heads are full in
    the layers of each sliding window."""
    if masks is None:
        return ()
    full = Counter[int | None]()
    for layer in range(masks.num_layers):
        full[config.window_of(layer)] += len(masks.full_heads(layer))
    return masks.window, masks.sinks, frozenset(full.items())


def _texts_key(texts: Iterable[EvalDocument]) -> str:
    """A hash of all texts."""
    digest = hashlib.sha256()
    for piece in texts:
        # With its length, so that texts which are divided otherwise have another hash.
        digest.update(json.dumps([piece.lead, len(piece.ids)]).encode())
        digest.update(np.asarray(piece.ids, np.int64).tobytes())
    return digest.hexdigest()


def _about(variant: MaskVariant) -> dict[str, Any]:
    """What a variant is for, as fields of its result."""
    return {
        "kind": variant.kind,
        "compared_with": variant.compared_with,
        "seed": variant.seed,
    }


def answer_cases(
    loaded: LoadedModel, plan: LongPlan, cases: Sequence[LongCase], name: str
) -> list[Generation]:
    """What a model writes after every case, under the masks that are on it.

    Cases whose prompts are read in chunks of one size go through one engine, whatever their tasks
    and lengths. `name` is for the progress bar.
    """
    from headway.infer.generate import GenerateOptions, PromptEnd, generate_from_ids
    from headway.tokenizer.chat import answer_end

    stop_ids = ()
    if plan.questions.template is not None:
        stop_ids = answer_end(plan.questions.template, loaded.require_tokenizer())

    # The cases of a task and length have equal room, whatever their own answers need.
    room: dict[tuple[str, int], int] = {}
    by_chunk: dict[int, list[int]] = {}
    for index, case in enumerate(cases):
        group = (case.task, case.length)
        room[group] = max(case.new_tokens, room.get(group, 0))
        by_chunk.setdefault(plan.chunk(case.length), []).append(index)

    answers: dict[int, Generation] = {}
    with progress(f"evaluate {name}", total=len(cases), unit="cases") as advance:
        for chunk, indices in by_chunk.items():
            chosen = [cases[index] for index in indices]
            ends = [PromptEnd(room[case.task, case.length], case.case.stop) for case in chosen]
            prompts = [(case.case.prompt, case.ids) for case in chosen]
            options = GenerateOptions(
                stop_ids=stop_ids, rows=plan.questions.answered_rows, chunk_tokens=chunk
            )
            generations = generate_from_ids(loaded, prompts, options, ends=ends)
            answers.update(zip(indices, generations, strict=True))
            _return_memory(loaded.device)
            advance(len(chosen))
    return [answers[index] for index in range(len(cases))]


def _return_memory(device: torch.device) -> None:
    """Give the memory of an engine that has ended back: the next cache is as large as what is
    free."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
