"""One model over several datasets: everything a report shows about it."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from headway.eval.dataset import Dataset, read_eval_documents
from headway.eval.options import ContinuationOptions, ReadOptions
from headway.eval.perplexity import BATCH_TOKENS, Perplexity, check_windows, perplexity

if TYPE_CHECKING:
    from headway.infer.load import LoadedModel
    from headway.parallel.collectives import RankGroup

log = logging.getLogger("headway")


@dataclass(frozen=True)
class GeneratedSample:
    """One generated text."""

    prompt: str
    text: str


@dataclass(frozen=True)
class EvalPlan:
    """What is measured, and how."""

    datasets: Sequence[Dataset]
    read_options: ReadOptions = ReadOptions()
    window: int | None = None
    stride: int | None = None
    batch_tokens: int = BATCH_TOKENS
    samples: ContinuationOptions = ContinuationOptions()

    def __post_init__(self) -> None:
        check_windows(self.window, self.stride, self.batch_tokens)
        self.samples.check()


@dataclass(frozen=True)
class ValidationPoint:
    """The numbers of one validation set after some steps; None: not finite."""

    step: int
    numbers: dict[str, float | None]


@dataclass(frozen=True)
class TrainingCurves:
    """The losses and validations of one run, or of one stage of it."""

    run: str
    steps: int
    loss: list[tuple[int, float]]
    """Training loss: means over ranges of steps, each with its last step."""
    valid: dict[str, list[ValidationPoint]]
    """Validations of each set in the order of their steps; step 0 is before the first update
    (`eval.at_start`).
    """


@dataclass(frozen=True)
class Spread:
    """Mean and spread of some numbers."""

    mean: float
    std: float
    min: float
    max: float


@dataclass(frozen=True)
class Evaluation:
    """Everything measured about one model."""

    model: str
    """The name under which it was given."""
    path: str
    """The folder of its weights, such as a run's newest checkpoint."""
    tokenizer: str | None
    """Fingerprint; losses per token of two models are comparable only if it is the same."""
    datasets: dict[str, Perplexity]
    samples: list[GeneratedSample] = field(default_factory=list)
    template: str | None = None
    """The chat template under which the samples are answers; None: they are continuations."""
    training: list[TrainingCurves] = field(default_factory=list)
    """The curves of the run, or of each of its stages, where the model is one. `evaluate` leaves
    them empty: the caller reads them from the run folder.
    """
    masks: dict[str, Any] | None = None
    """The head masks it ran under; None: every head keeps the whole past."""
    rope_theta: float | None = None
    no_rope_layers: list[int] = field(default_factory=list)
    """Layers (from 0) without rotary positions."""
    begin: str | None = None
    """The token that stood before each window of a text."""
    perplexities: Spread | None = None
    """Perplexity over the datasets."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def evaluate(
    loaded: LoadedModel, plan: EvalPlan, *, name: str | None = None, group: RankGroup | None = None
) -> Evaluation:
    """Measure one model, over several ranks if there are; only the first generates samples."""
    for dataset in plan.datasets:
        # A wrong key or path in the last dataset shows before the first one is scored.
        next(read_eval_documents(dataset, loaded, replace(plan.read_options, max_samples=1)), None)

    results: dict[str, Perplexity] = {}
    for dataset in plan.datasets:
        log.debug("%s: score %s", loaded.path, dataset.name)
        documents = read_eval_documents(dataset, loaded, plan.read_options)
        results[dataset.name] = perplexity(
            loaded,
            documents,
            window=plan.window,
            stride=plan.stride,
            batch_tokens=plan.batch_tokens,
            group=group,
        )

    samples = []
    if group is None or group.rank == 0:
        samples = _samples(loaded, plan.samples)
    tokenizer = None
    if loaded.tokenizer is not None:
        tokenizer = loaded.tokenizer.fingerprint
    path = str(loaded.path)
    return Evaluation(
        name or path,
        path,
        tokenizer,
        results,
        samples,
        plan.samples.template,
        masks=loaded.describe_masks(),
        rope_theta=loaded.config.rope_theta,
        no_rope_layers=list(loaded.config.no_rope_layers),
        begin=_begin_token(loaded, plan.read_options),
        perplexities=spread([result.perplexity for result in results.values()]),
    )


def spread(values: Sequence[float]) -> Spread | None:
    """Mean, population standard deviation and range; None without numbers."""
    if not values:
        return None
    # Of the population: the datasets are all there are, not a sample of more.
    return Spread(statistics.fmean(values), statistics.pstdev(values), min(values), max(values))


def _begin_token(loaded: LoadedModel, options: ReadOptions) -> str | None:
    """The token before each window of raw text, as it is written; None if there is none."""
    from headway.tokenizer.chat import expected_bos_ids

    if loaded.tokenizer is None:
        return None
    ids = expected_bos_ids(loaded.tokenizer, options.bos)
    if ids:
        return loaded.tokenizer.decode(ids)
    return None


def share_a_tokenizer(evaluations: Sequence[Evaluation]) -> bool:
    """Whether losses per token of these models are comparable."""
    return len({evaluation.tokenizer for evaluation in evaluations}) == 1


def _samples(loaded: LoadedModel, continuations: ContinuationOptions) -> list[GeneratedSample]:
    if not continuations.prompts:
        return []
    from headway.infer.generate import answer, generate

    # `generate` counts the repetitions of a prompt, so that each gives another sample.
    prompts = [
        prompt for prompt in continuations.prompts for _ in range(continuations.per_prompt or 1)
    ]
    options = continuations.options()
    if continuations.template is None:
        generations = generate(loaded, prompts, options)
    else:
        generations = answer(loaded, prompts, continuations.template, options)
    return [
        GeneratedSample(prompt, generation.text)
        for prompt, generation in zip(prompts, generations, strict=True)
    ]
