"""What a model finds in long prompts, without and under head masks: a plan and variants come in,
scores and KV footprints go out.

    tasks x lengths x depths x samples -> cases -> generate  -> share of answers found
    texts (optional)                   -> windows -> score   -> perplexity by tokens of context

Cases are the same for every variant. Windows have the greatest length of the plan.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.errors import ConfigError
from headway.eval.kv_footprint import critical_footprint, footprint
from headway.eval.mask_comparison import MaskComparison, compare_masks, scores_of
from headway.eval.mask_verdict import GateState, LongVerdict, verdict_of
from headway.eval.options import LongPlan
from headway.runtime.json_file import load_json
from headway.runtime.progress import progress
from headway.runtime.storage import write_atomic
from headway.text import longbench, ruler
from headway.text.long_tasks import Case, Generator, find_task, fit, smallest
from headway.text.ruler_files import RulerFiles

if TYPE_CHECKING:
    from headway.eval.perplexity import EvalDocument
    from headway.infer.load import LoadedModel
    from headway.model.head_masks.choice import MaskVariant, VariantKind
    from headway.tokenizer.load import Tokenizer


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


@dataclass(frozen=True)
class LongCase:
    """A case of a plan: its task, length and depth, and the prompt's ids."""

    task: str
    length: int
    depth: float
    """Of the plan. `case.depth` is the exact one, or None for a task without a depth."""
    case: Case
    ids: list[int]
    new_tokens: int
    """The most tokens that its answer may have."""


def make_cases(tokenizer: Tokenizer, plan: LongPlan) -> list[LongCase]:
    """The cases of a plan; each leaves room for its answer inside the length."""
    plan = plan.resolved()
    ids_of = prompts_of(tokenizer, plan)
    files = RulerFiles(plan.questions.ruler_data)
    cases: list[LongCase] = []
    choices: list[longbench.ChoiceQuestion] = []
    if plan.questions.longbench is not None and set(plan.tasks) & set(longbench.NAMES):
        choices = longbench.read_questions(plan.questions.longbench)
    for task in plan.tasks:
        if task in longbench.NAMES:
            cases += _longbench_cases(task, choices, tokenizer, plan, ids_of)
            continue
        for length in plan.lengths:
            generator = _generator(task, length, tokenizer, files)
            for depth in plan.questions.depths:
                for sample in range(plan.questions.samples):
                    seed = (plan.questions.seed, length, depth, sample)
                    # The room for the answer must be known before the prompt is fitted to the rest.
                    answer_tokens = generator.answer_tokens
                    if answer_tokens is None:
                        shortest = smallest(task, depth, seed, generator)
                        answer_tokens = _answer_tokens(shortest, tokenizer)
                    case, _ = fit(
                        task,
                        lambda case: len(ids_of(case)),
                        length,
                        depth,
                        seed,
                        room=answer_tokens,
                        generator=generator,
                    )
                    cases.append(LongCase(task, length, depth, case, ids_of(case), answer_tokens))
    return cases


def _longbench_cases(
    task: str,
    choices: list[longbench.ChoiceQuestion],
    tokenizer: Tokenizer,
    plan: LongPlan,
    ids_of: Callable[[Case], list[int]],
) -> list[LongCase]:
    """Questions of one length class, cut to every length; as many as another task has cases."""
    number = len(plan.questions.depths) * plan.questions.samples
    questions = longbench.draw_questions(choices, task, number, plan.questions.seed)
    cases: list[LongCase] = []
    for length in plan.lengths:
        for question in questions:
            case = longbench.cut_case(
                question,
                length,
                tokenizer.encode,
                tokenizer.decode,
                lambda case: len(ids_of(case)),
            )
            cases.append(LongCase(task, length, 0.0, case, ids_of(case), longbench.ANSWER_TOKENS))
    return cases


def _generator(task: str, length: int, tokenizer: Tokenizer, files: RulerFiles) -> Generator:
    """How cases of a task are made for a length."""
    if task in ruler.NAMES:
        return ruler.generator(task, length, lambda text: len(tokenizer.encode(text)), files)
    return Generator(find_task(task))


def plan_notes(plan: LongPlan) -> list[str]:
    """Limits of what the numbers mean."""
    notes = ruler.notes(plan.tasks, plan.questions.ruler_data)
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


def prompts_in_words(tokenizer: Tokenizer, plan: LongPlan) -> str:
    """The form of the prompts, in words."""
    from headway.tokenizer.chat import expected_bos_ids

    if plan.questions.template is not None:
        return f"questions in chat template {plan.questions.template}"
    before = expected_bos_ids(tokenizer, plan.questions.bos)
    if before:
        return f"text after {tokenizer.decode(before)}"
    return "text with no begin token"


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


def prompts_of(tokenizer: Tokenizer, plan: LongPlan) -> Callable[[Case], list[int]]:
    """How a case becomes the ids of a prompt: plain text after the begin token, or a question in a
    chat and the answer's beginning.
    """
    from headway.tokenizer.chat import (
        Segment,
        Turn,
        encode_segments,
        expected_bos_ids,
        find_template,
    )

    if plan.questions.template is None:
        before = expected_bos_ids(tokenizer, plan.questions.bos)
        return lambda case: [*before, *tokenizer.encode(case.prompt)]

    template = find_template(plan.questions.template, tokenizer)

    def chat_prompt(case: Case) -> list[int]:
        # The assistant's turn is open and begins with the beginning of the answer, so that chat
        # models and others continue the same words.
        pieces = [*template.prompt([Turn("user", case.question)]), Segment(case.answer_start)]
        (rendered,) = encode_segments([pieces], template.name, tokenizer)
        if isinstance(rendered, Exception):
            raise rendered
        return rendered.ids.tolist()

    return chat_prompt


def _answer_tokens(case: Case, tokenizer: Tokenizer) -> int:
    """Room for the answers, with words between them."""
    answers = len(tokenizer.encode(" " + ", ".join(case.answers)))
    # A case with stop texts has one bare answer, which the stop ends.
    if case.stop:
        return answers + 2
    return answers + answers // 2 + 8


def evaluate_long(
    loaded: LoadedModel,
    variants: Sequence[MaskVariant],
    plan: LongPlan,
    *,
    name: str | None = None,
    texts: Callable[[], Iterable[EvalDocument]] | None = None,
    results_dir: Path | None = None,
    target: float | None = None,
) -> LongResult:
    """Evaluate every variant on the same cases.

    With `results_dir`, results are stored there and not measured again. `target`: the sparsity that
    the model's gates were trained for, if it is known.
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

    texts_key = ""
    if results_dir is not None and texts is not None:
        texts_key = _texts_key(texts())
    results: list[VariantResult] = []
    for variant in variants:
        results.append(
            _load_or_measure(loaded, variant, plan, cases, texts, results_dir, texts_key)
        )

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


def _load_or_measure(
    loaded: LoadedModel,
    variant: MaskVariant,
    plan: LongPlan,
    cases: list[LongCase],
    texts: Callable[[], Iterable[EvalDocument]] | None,
    results_dir: Path | None,
    texts_key: str,
) -> VariantResult:
    """The stored result of a variant, if it was measured under the same conditions, or a new one."""
    if results_dir is None:
        return _measure(loaded.with_masks(variant.masks), variant, plan, cases, texts)

    # Files may change under the same plan; other prompts follow from it.
    if any(task in (*ruler.NAMES, *longbench.NAMES) for task in plan.tasks):
        texts_key += _prompts_key(cases)
    key = _key(loaded, variant, plan, texts_key)
    file = results_dir / f"{variant.name.replace(' ', '-')}.json"
    if file.is_file():
        content = load_json(file)
        if content.get("key") == key:
            stored = content["result"]
            result = VariantResult(
                **{**stored, "cells": [Cell(**cell) for cell in stored["cells"]]}
            )
            # What the measurement is of is said by this command, not by the one that made it.
            return replace(result, **_about(variant))

    result = _measure(loaded.with_masks(variant.masks), variant, plan, cases, texts)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps({"key": key, "result": asdict(result)}, indent=1) + "\n")
    return result


def _texts_key(texts: Iterable[EvalDocument]) -> str:
    """A hash of all texts."""
    digest = hashlib.sha256()
    for piece in texts:
        # With its length, so that texts which are divided otherwise have another hash.
        digest.update(json.dumps([piece.lead, len(piece.ids)]).encode())
        digest.update(np.asarray(piece.ids, np.int64).tobytes())
    return digest.hexdigest()


def _prompts_key(cases: Sequence[LongCase]) -> str:
    """A hash of the ids of all prompts."""
    digest = hashlib.sha256()
    for case in cases:
        digest.update(np.asarray([len(case.ids), *case.ids], np.int64).tobytes())
    return digest.hexdigest()


def _key(loaded: LoadedModel, variant: MaskVariant, plan: LongPlan, texts_key: str) -> str:
    """A hash of what a variant's numbers depend on: plan, masks, weights, texts and device.

    The prompts are not in it, but those made of files: they follow from the plan and the model's
    tokenizer.
    """
    # Sums instead of all weights: any training step changes them, and they cost little.
    weights = [str(float(parameter.float().sum())) for parameter in loaded.model.parameters()]
    content = json.dumps(
        [plan.to_json(), repr(variant.masks), weights, texts_key, str(loaded.device)]
    )
    return hashlib.sha256(content.encode()).hexdigest()


def _measure(
    loaded: LoadedModel,
    variant: MaskVariant,
    plan: LongPlan,
    cases: list[LongCase],
    texts: Callable[[], Iterable[EvalDocument]] | None,
) -> VariantResult:
    """Scores, footprints, speed and perplexity of one variant, whose masks are on the model."""
    from headway.eval.perplexity import perplexity
    from headway.infer.speed import measure_speed

    masks = variant.masks
    rows = plan.questions.rows
    longest = max(plan.lengths)

    # (task, length, depth) -> scores of its cases.
    groups: dict[tuple[str, int, float | None], list[float]] = {}
    shares: dict[str, list[float]] = {task: [] for task in plan.tasks}
    peaks: list[float] = []
    answers = _answer(loaded, variant, plan, cases)
    for case, (score, new_tokens) in zip(cases, answers, strict=True):
        # A task whose answer is in many places has no depth; its cases form one cell.
        depth = None
        if case.case.depth is not None:
            depth = case.depth
        groups.setdefault((case.task, case.length, depth), []).append(score)
        kept = footprint(masks, len(case.ids), new_tokens, plan.chunk(case.length))
        shares[case.task].append(kept.share)
        peaks.append(kept.peak)
    cells = [
        Cell(*group, sum(scores) / len(scores), len(scores)) for group, scores in groups.items()
    ]

    # Without tasks, texts alone are scored: the footprint is that of a prompt of the greatest
    # length. It has no task, so only its mean is reported below, not `footprints`.
    if not cases:
        kept = footprint(masks, longest, 0, plan.chunk(longest))
        shares = {"": [kept.share]}
        peaks = [kept.peak]
    footprints = {task: sum(values) / len(values) for task, values in shares.items()}
    mean_footprint = sum(footprints.values()) / len(footprints)

    speed = measure_speed(loaded, longest, rows=rows, chunk_tokens=plan.chunk(longest))
    text_scores = None
    if texts is not None:
        scored = perplexity(loaded, texts(), window=longest, batch_tokens=rows * longest)
        text_scores = scored.to_json()

    return VariantResult(
        name=variant.name,
        sparsity=0.0 if masks is None else masks.sparsity,
        window=None if masks is None else masks.window,
        sinks=None if masks is None else masks.sinks,
        masks_from=None if masks is None else variant.masks_from,
        cells=cells,
        footprints=footprints if cases else {},
        footprint=mean_footprint,
        peak=sum(peaks) / len(peaks),
        length=longest,
        cache_bytes=speed.cache_bytes,
        prefill_tokens_per_second=speed.prefill_tokens_per_second,
        decode_tokens_per_second=speed.decode_tokens_per_second,
        perplexity=text_scores,
        **_about(variant),
    )


def _about(variant: MaskVariant) -> dict[str, Any]:
    """What a variant is for, as fields of its result."""
    return {
        "kind": variant.kind,
        "compared_with": variant.compared_with,
        "seed": variant.seed,
    }


def _answer(
    loaded: LoadedModel, variant: MaskVariant, plan: LongPlan, cases: list[LongCase]
) -> list[tuple[float, int]]:
    """Score and generated tokens of every case; the cases of one task and length form a batch."""
    from headway.infer.generate import GenerateOptions, generate_from_ids
    from headway.tokenizer.chat import answer_end

    assert loaded.tokenizer is not None
    stop_ids = ()
    if plan.questions.template is not None:
        stop_ids = answer_end(plan.questions.template, loaded.tokenizer)

    # Cases of one task and length have the same stop texts and the same chunk.
    groups: dict[tuple[str, int], list[int]] = {}
    for index, case in enumerate(cases):
        groups.setdefault((case.task, case.length), []).append(index)

    results: list[tuple[float, int]] = [(0.0, 0)] * len(cases)
    with progress(f"evaluate {variant.name}", total=len(cases), unit="cases") as advance:
        for indices in groups.values():
            batch = [cases[index] for index in indices]
            options = GenerateOptions(
                max(case.new_tokens for case in batch),
                batch[0].case.stop,
                stop_ids,
                rows=plan.questions.rows,
                chunk_tokens=plan.chunk(batch[0].length),
            )
            prompts = [(case.case.prompt, case.ids) for case in batch]
            generations = generate_from_ids(loaded, prompts, options)
            for index, case, generation in zip(indices, batch, generations, strict=True):
                results[index] = (case.case.score(generation.text), len(generation.token_ids))
            advance(len(batch))
    return results
