"""Contrastive alignment: the vectors of one sample in two modalities are closer than those of
different samples. Symmetric InfoNCE.

In: unit vectors [rows, modalities, dim] and which are present; out: one term per step (CLIP's
loss, arXiv:2103.00020). With S = scale * a b^T over the n samples of the whole step (all
microbatches and ranks) that have both modalities of a pair:

    loss of a pair = sum over i of [logsumexp_j S_ij - S_ii + logsumexp_j S_ji - S_ii] / (2 n)
    loss of a step = the mean over pairs

Samples without one of the two are no rows and no columns: their logits are minus infinity, exactly.
With `equal_items: ignore` the same holds for S_ij where i and j are different samples with the same
caption, picture or sound. A pair with n < 2 is left out. A pair's scale is the mean of the
exponentials of its modalities' log scales. Each microbatch returns its rows' part of the value, and
the gradient of the whole step's loss by its vectors, so that neither accumulation nor ranks change
anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from math import log
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import field_validator, model_validator

from headway.config.section import setting
from headway.data.samples import CONTENT, SAMPLE
from headway.errors import ConfigError
from headway.tasks.base import (
    Collectives,
    FirstPass,
    Loss,
    MetricSums,
    ParameterRule,
    StepInfo,
    TaskConfig,
    TaskNeeds,
    Term,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from headway.data.batch import Batch
    from headway.data.samples import SampleSource
    from headway.model.base import ModelOut

CHUNK_ROWS = 4096
"""Rows of a similarity matrix that exist at one time."""
STEP_VECTORS = "vectors"
"""The name of the first pass, which reads the vectors of a whole step."""
TOP = (1, 5, 10)
"""Recall is reported among the nearest 1, 5 and 10."""
TIE = 1e-6
"""Similarities that differ by less are equal: the same text gives the same vector but for
rounding."""
LOG_SCALE = "log_scale"
CONTENT_PARTS = 3
PART_BITS = 16
"""Content numbers have 48 bits; vectors are gathered as float32, which holds 24 of them, so they
travel in parts."""
MIN_LOG_SCALE = -5
"""The smallest log scale that is accepted: logits within exp(-5) of each other hardly tell samples
apart."""


class Config(TaskConfig):
    """Settings of contrastive alignment."""

    kind: str = setting("contrastive", "contrastive.", on_resume="fixed")
    log_scale: float | dict[str, float] = setting(
        log(1 / 0.07),
        "Logarithm of the factor of similarities: one number for all (2.66 = temperature 0.07), or "
        "one per modality. PurrSight: {text: 1.0, image: 2.66, audio: 2.66}.",
    )
    learn_scale: bool = setting(
        True, "Train the scale; false = it stays as given.", on_resume="fixed"
    )
    max_scale: float = setting(100.0, "The scale does not grow above this.", gt=1)
    scale_lr: float | None = setting(
        None, "Learning rate of the scale; null = that of the weights.", gt=0
    )
    equal_items: Literal["negative", "ignore"] = setting(
        "negative",
        "Samples with an equal caption, picture or sound (captions made of class names): negative "
        "= each is a wrong answer for the other, as in CLIP; ignore = they are not compared.",
        on_resume="fixed",
    )
    pairs: tuple[str, ...] | None = setting(
        None,
        "Which pairs are aligned, e.g. [text-image, image-audio]; null = all of them.",
        on_resume="fixed",
    )

    @field_validator("pairs")
    @classmethod
    def _are_pairs(cls, pairs: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for pair in pairs or ():
            names = pair.split("-")
            if len(names) != 2 or names[0] == names[1]:
                raise ValueError(f"has {pair!r}; a pair is two modalities, e.g. text-image")
        if pairs == ():
            raise ValueError("is []; give at least one pair, or null for all")
        return pairs

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if self.scale_lr is not None and not self.learn_scale:
            raise ValueError(
                "has scale_lr and learn_scale=false, so it would be ignored. Remove one of them"
            )
        if isinstance(self.log_scale, dict):
            log_scales = list(self.log_scale.values())
        else:
            log_scales = [self.log_scale]
        for value in log_scales:
            if not MIN_LOG_SCALE <= value <= log(self.max_scale):
                raise ValueError(
                    f"has log_scale {value:g}; it must be between {MIN_LOG_SCALE} and "
                    f"log(max_scale) = {log(self.max_scale):.3f}"
                )
        return self

    @property
    def rules(self) -> tuple[ParameterRule, ...]:
        """A learning rate of its own for the scale, without weight decay."""
        if self.scale_lr is None:
            return ()
        return (ParameterRule(("objective",), self.scale_lr, 0.0, (0.9, 0.999)),)

    def check_modalities(self, modalities: tuple[str, ...]) -> None:
        """Pairs are of these modalities, and scales given by modality are for each of them."""
        if isinstance(self.log_scale, dict) and set(self.log_scale) != set(modalities):
            names = ", ".join(self.log_scale)
            raise ConfigError(
                f"objective.log_scale has {names}; the aligner has {', '.join(modalities)}. Give "
                "one number for each."
            )
        for pair in self.pairs or ():
            if not set(pair.split("-")) <= set(modalities):
                raise ConfigError(
                    f"objective.pairs has {pair!r}; the aligner has {', '.join(modalities)}."
                )

    def without_absent(self, modalities: tuple[str, ...]) -> tuple[Self, tuple[str, ...]]:
        """The settings for the modalities that are there, and the pairs left out; none is left out
        if no pair would remain.
        """
        pairs = self.pairs
        left_out: tuple[str, ...] = ()
        if pairs is not None:
            kept = tuple(pair for pair in pairs if set(pair.split("-")) <= set(modalities))
            if kept:
                left_out = tuple(pair for pair in pairs if pair not in kept)
                pairs = kept
        log_scale = self.log_scale
        if isinstance(log_scale, dict) and set(modalities) <= set(log_scale):
            log_scale = {name: log_scale[name] for name in log_scale if name in modalities}
        return self.model_copy(update={"pairs": pairs, "log_scale": log_scale}), left_out

    def remarks(self, samples: SampleSource) -> Iterator[str]:
        """What equal captions, pictures or sounds mean for recall, and for the loss."""
        if self.equal_items == "ignore":
            treated = "not compared with each other"
        else:
            treated = "wrong answers for each other"
        contents = samples.contents(np.arange(samples.num_documents))
        for first, second in permutations(range(len(samples.modalities)), 2):
            both = (contents[:, first] >= 0) & (contents[:, second] >= 0)
            if both.sum() < 2:
                continue
            ceiling = recall_ceiling(
                contents[both, first].tolist(), contents[both, second].tolist()
            )
            if ceiling < 1:
                names = f"{samples.modalities[first]}_to_{samples.modalities[second]}"
                yield (
                    f"{samples.name}: some samples have equal items, so recall at 1 of {names} "
                    f"over all {int(both.sum())} cannot exceed {100 * ceiling:.1f} %; in the loss "
                    f"they are {treated} (objective.equal_items)"
                )

    def values_from_scales(
        self, modalities: tuple[str, ...], log_scales: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """The scale, where it is trained: one for each modality, or their mean."""
        import torch

        if not self.learn_scale:
            return {}
        if isinstance(self.log_scale, dict):
            first = torch.tensor([log_scales[name] for name in self.log_scale], device="cpu")
        else:
            scales = [log_scales[name] for name in modalities]
            first = torch.tensor(sum(scales) / len(scales), device="cpu")
        return {LOG_SCALE: first}

    def scales_of(
        self, modalities: tuple[str, ...], values: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """The log scale of every modality: as trained, or as given."""
        initial = self.log_scale
        trained = values.get(LOG_SCALE)
        if not isinstance(initial, dict):
            shared = float(initial if trained is None else trained)
            return dict.fromkeys(modalities, shared)
        if trained is None:
            return {name: float(initial[name]) for name in modalities}
        # the parameter has one number for each modality, in the order of the setting
        order = list(initial)
        return {name: float(trained[order.index(name)]) for name in modalities}

    @property
    def reads(self) -> tuple[str, ...]:
        """Captions with pictures or sounds."""
        return ("captions",)

    @property
    def needs(self) -> TaskNeeds:
        """A model that gives vectors."""
        return TaskNeeds(head="vectors")

    def build(self) -> Contrastive:
        return Contrastive(self)


@dataclass(frozen=True)
class PairResult:
    """What one pair of modalities says of a whole step. N rows; tensors without gradients."""

    row_loss: Tensor
    """[N]: each row's part of the pair's loss; 0 where it has none."""
    by_first: Tensor
    """[N, D]: the gradient of the pair's loss by the first modality's vectors."""
    by_second: Tensor
    by_scale: Tensor
    """The gradient by the pair's scale."""
    is_active: Tensor
    """1 if at least two samples have both modalities."""


@dataclass(frozen=True)
class StepLoss:
    """The loss of a whole step and its gradients."""

    row_loss: Tensor
    """[N]: each row's part of the loss."""
    gradient: Tensor
    """[N, M, D]: by the vectors."""
    by_log_scale: Tensor
    """[M]: by the log scale of each modality."""
    pair_loss: dict[str, Tensor]
    num_rows: Tensor


class Contrastive:
    """One term: the mean of the pairs' losses."""

    scope: Literal["row", "step"] = "step"

    def __init__(self, config: Config) -> None:
        import torch
        from torch import nn

        self.config = config
        self.order: tuple[str, ...] = ()
        """The modalities of the scale's numbers; empty where one number is for all."""
        initial: float | list[float]
        if isinstance(config.log_scale, dict):
            self.order = tuple(config.log_scale)
            initial = list(config.log_scale.values())
        else:
            initial = config.log_scale
        # On the CPU whatever the default device is: the engine moves parameters, `log_scales` this
        # one.
        self._fixed = torch.tensor(initial, dtype=torch.float32, device="cpu")
        self.module: nn.Module | None = None
        if config.learn_scale:
            self.module = nn.ParameterDict({LOG_SCALE: nn.Parameter(self._fixed.clone())})
        self._last: tuple[Tensor, StepLoss] | None = None
        """The rows of the last step and their loss, which all microbatches of the step share."""

    def first_passes(self) -> tuple[FirstPass, ...]:
        """The vectors of all rows of the step: each row is compared with all of them."""
        return (FirstPass(STEP_VECTORS, self.read_vectors),)

    def read_vectors(self, out: ModelOut, batch: Batch) -> Tensor:
        """The vectors of every row, which are present, and whether the row is a sample: [rows, M *
        D + M + 1].

        Where equal items are ignored, also the numbers of the rows' contents, in parts that a float
        holds: [rows, M * PARTS] in front.
        """
        import torch

        embeddings = out.embeddings
        assert embeddings is not None, (
            "the contrastive objective needs a model that gives embeddings"
        )
        is_sample = (batch.extra[SAMPLE] >= 0)[:, None]
        present = embeddings.present & is_sample
        # Vectors of absent items are meaningless; they are zeroed before ranks exchange them.
        values = embeddings.values.detach() * present[..., None]
        columns = [values.flatten(1), present.to(values.dtype), is_sample.to(values.dtype)]
        if self.config.equal_items == "ignore":
            contents = torch.stack(
                [batch.extra[f"{CONTENT}{name}"] for name in embeddings.names], dim=1
            )
            columns.insert(0, content_parts(contents).to(values.dtype))
        return torch.cat(columns, dim=1)

    def loss(self, out: ModelOut, batch: Batch, at: StepInfo, collectives: Collectives) -> Loss:
        """This microbatch's rows of the step's loss; its gradient is that of the whole step."""
        embeddings = out.embeddings
        assert embeddings is not None
        names = embeddings.names
        if STEP_VECTORS in at.seen:
            step_rows, start = at.seen[STEP_VECTORS]
        else:
            # one microbatch on one rank: its rows are those of the step
            step_rows = self.read_vectors(out, batch)
            start = 0

        scales = self.log_scales(names, step_rows.device)
        whole = self._whole(step_rows, names, scales.detach())

        # The value is this microbatch's rows of the step's loss; the gradient, known in closed
        # form, is that of the whole step by these rows' vectors.
        count = embeddings.values.shape[0]
        rows = slice(start, start + count)
        value = whole.row_loss[rows].sum()
        through = (whole.gradient[rows] * embeddings.values).sum()
        # Every microbatch carries an equal share of what the scale receives.
        step_share = count / step_rows.shape[0]
        through = through + (whole.by_log_scale * scales).sum() * step_share
        # x - x.detach() is zero and has the gradient of x.
        share = value + through - through.detach()

        weight = value.new_tensor(float(count))
        metrics: MetricSums = {
            f"loss/{pair}": (loss * count, weight) for pair, loss in whole.pair_loss.items()
        }
        metrics["scale"] = (scales.detach().exp().mean() * count, weight)
        if not at.training:
            metrics = {"loss": (value.detach(), value.new_tensor(step_share)), **metrics}
            _, vectors = self._split_contents(step_rows, len(names))
            metrics |= retrieval_sums(vectors, names, self._pairs(names), rows)
        # The engine divides by the step's rows; the loss is a mean already.
        return Loss({"contrastive": Term(share * whole.num_rows.clamp(min=1), per="rows")}, metrics)

    def log_scales(self, names: tuple[str, ...], device: torch.device) -> Tensor:
        """The log scale of every modality, [M]."""
        if self.module is None:
            scales = self._fixed.to(device)
        else:
            scales = dict(self.module.named_parameters())[LOG_SCALE]
        # One number per modality is stored in the order of the setting, not of the model.
        if self.order:
            return scales[[self.order.index(name) for name in names]]
        return scales.expand(len(names))

    def _pairs(self, names: tuple[str, ...]) -> list[tuple[int, int]]:
        """Indices of the modalities of every aligned pair; text-image and image-text are the
        same."""
        chosen = None
        if self.config.pairs is not None:
            chosen = {frozenset(pair.split("-")) for pair in self.config.pairs}
        return [
            (a, b)
            for a, b in combinations(range(len(names)), 2)
            if chosen is None or {names[a], names[b]} in chosen
        ]

    def _split_contents(self, step_rows: Tensor, modalities: int) -> tuple[Tensor | None, Tensor]:
        """The content numbers [N, M, PARTS] in front of what the first pass read, or None, and the
        rest of it."""
        if self.config.equal_items == "negative":
            return None, step_rows
        width = modalities * CONTENT_PARTS
        contents = step_rows[:, :width].view(len(step_rows), modalities, CONTENT_PARTS)
        return contents, step_rows[:, width:]

    def _whole(self, step_rows: Tensor, names: tuple[str, ...], log_scales: Tensor) -> StepLoss:
        """The loss of all rows, computed once for the microbatches of a step."""
        # All microbatches of a step see the same tensor of the first pass.
        if self._last is None or self._last[0] is not step_rows:
            self._last = (step_rows, self._compute(step_rows, names, log_scales))
        return self._last[1]

    def _compute(self, step_rows: Tensor, names: tuple[str, ...], log_scales: Tensor) -> StepLoss:
        """Value and gradients of the step's loss in closed form, pair by pair."""
        import torch

        contents, vectors = self._split_contents(step_rows, len(names))
        values, present, is_sample = split_vectors(vectors, len(names))
        factors = log_scales.float().exp().clamp(max=self.config.max_scale)

        results: dict[tuple[int, int], PairResult] = {}
        for a, b in self._pairs(names):
            both = present[:, a] & present[:, b]
            pair_contents = None
            if contents is not None:
                pair_contents = contents[:, [a, b]]
            results[a, b] = pair_loss(
                values[:, a], values[:, b], both, (factors[a] + factors[b]) / 2, pair_contents
            )

        # The step's loss is the mean over pairs that have something to compare.
        active = torch.stack([result.is_active for result in results.values()]).sum().clamp(min=1)
        gradient = torch.zeros_like(values)
        by_scale = torch.zeros_like(factors)
        for (a, b), result in results.items():
            gradient[:, a] += result.by_first / active
            gradient[:, b] += result.by_second / active
            # a pair's scale is the mean of two
            by_scale[[a, b]] += result.by_scale / active / 2

        # d exp(s) / ds = exp(s); at the limit the scale may only shrink
        by_log_scale = by_scale * factors
        is_at_limit = log_scales.float() >= log(self.config.max_scale)
        by_log_scale = torch.where(is_at_limit & (by_log_scale < 0), 0.0, by_log_scale)

        no_loss = torch.zeros_like(is_sample)
        row_loss = sum((result.row_loss for result in results.values()), no_loss) / active
        pair_losses = {
            f"{names[a]}-{names[b]}": result.row_loss.sum() for (a, b), result in results.items()
        }
        return StepLoss(row_loss, gradient, by_log_scale, pair_losses, is_sample.sum())


def split_vectors(step_rows: Tensor, modalities: int) -> tuple[Tensor, Tensor, Tensor]:
    """(vectors [N, M, D], present [N, M], 1 for samples [N]) of what the first pass read, without
    content numbers."""
    width = step_rows.shape[1] - modalities - 1
    values = step_rows[:, :width].view(len(step_rows), modalities, width // modalities)
    present = step_rows[:, width : width + modalities] > 0
    return values, present, step_rows[:, -1]


def _chunks(rows: int) -> Iterator[slice]:
    """Slices of at most CHUNK_ROWS rows: memory grows with N, not with its square."""
    return (slice(start, min(start + CHUNK_ROWS, rows)) for start in range(0, rows, CHUNK_ROWS))


def content_parts(contents: Tensor) -> Tensor:
    """Content numbers [n, M] of 48 bits as parts of 16 bits, [n, M * PARTS]: float32 holds each
    exactly."""
    import torch

    parts = [
        (contents >> (PART_BITS * part)) & ((1 << PART_BITS) - 1) for part in range(CONTENT_PARTS)
    ]
    return torch.stack(parts, dim=-1).flatten(1)


def _share_content(contents: Tensor, rows: slice) -> Tensor:
    """Which of some rows have the same item as which row, of either modality: [rows, N]. One [rows,
    N] at a time exists."""
    import torch

    matrix = (len(contents[rows]), len(contents))
    shared = torch.zeros(matrix, dtype=torch.bool, device=contents.device)
    for modality in range(contents.shape[1]):
        # content numbers are equal where all their parts are
        same = torch.ones_like(shared)
        for part in range(contents.shape[2]):
            same &= contents[rows, None, modality, part] == contents[None, :, modality, part]
        shared |= same
    return shared


def recall_ceiling(queries: Sequence[object], candidates: Sequence[object]) -> float:
    """The highest recall at 1 that any model can have: equal items cannot be distinguished.

    Of k samples with the same query, one finds its own candidate first; of k equal candidates, the
    right one stands first with chance 1/k.
    """
    same_query = Counter(queries)
    same_candidate = Counter(candidates)
    best = [
        1 / max(same_query[query], same_candidate[candidate])
        for query, candidate in zip(queries, candidates, strict=True)
    ]
    return sum(best) / len(best)


def pair_loss(
    first: Tensor, second: Tensor, valid: Tensor, scale: Tensor, contents: Tensor | None = None
) -> PairResult:
    """Symmetric InfoNCE of two sets of vectors [N, D] over the rows where `valid`, and its
    gradients; a chunk of logits at a time.

    `contents` [N, 2, PARTS]: rows whose content of the first or of the second modality is equal are
    not compared with each other.

    Columns that are not valid are minus infinity. What is not valid is replaced, not multiplied, so
    that no value of it can matter.
    """
    import torch

    # One sample alone has nothing to be compared with: its pair is left out of the step's mean.
    n = valid.sum()
    active = (n >= 2).to(first.dtype)
    weight = active / (2 * n.clamp(min=1))
    a = torch.where(valid[:, None], first, 0.0)
    b = torch.where(valid[:, None], second, 0.0)
    diagonal = (a * b).sum(1)
    row_lse = torch.empty_like(diagonal)
    column_lse = torch.full_like(diagonal, float("-inf"))

    def logits(rows: slice) -> Tensor:
        both = valid[rows, None] & valid[None, :]
        if contents is not None:
            # A row is always compared with itself: that is the pair it has to find.
            number = torch.arange(len(a), device=a.device)
            is_self = number[rows, None] == number[None, :]
            both &= is_self | ~_share_content(contents, rows)
        return torch.where(both, scale * (a[rows] @ b.T), float("-inf"))

    # First sweep: the log-sums over rows and columns. Logits are computed twice rather than kept.
    for rows in _chunks(len(a)):
        chunk = logits(rows)
        row_lse[rows] = chunk.logsumexp(1)
        # A column runs through all chunks, so its log-sum is added up.
        column_lse = torch.logaddexp(column_lse, chunk.logsumexp(0))
    row_lse = torch.where(valid, row_lse, 0.0)
    column_lse = torch.where(valid, column_lse, 0.0)

    # Second sweep: d loss / d S_ij = [softmax over row i + softmax over column j - 2 (i = j)] / (2
    # n).
    by_first = torch.empty_like(a)
    by_second = torch.zeros_like(b)
    by_scale = torch.zeros_like(weight)
    for rows in _chunks(len(a)):
        chunk = logits(rows)
        row_softmax = (chunk - row_lse[rows, None]).exp()
        column_softmax = (chunk - column_lse[None, :]).exp()
        by_logits = (row_softmax + column_softmax) * weight
        by_first[rows] = by_logits @ b
        by_second += by_logits.T @ a[rows]
        # sum_ij dS_ij (a_i . b_j): what the product with b has just given, times a.
        by_scale += (by_first[rows] * a[rows]).sum()

    # The diagonal's -2 (i = j), kept out of the sweeps above.
    row_loss = torch.where(valid, (row_lse + column_lse - 2 * scale * diagonal) * weight, 0.0)
    by_first = (by_first - 2 * weight * b) * scale
    by_second = (by_second - 2 * weight * a) * scale
    by_scale = by_scale - 2 * weight * diagonal.sum()
    return PairResult(row_loss, by_first, by_second, by_scale, active)


def places_of(first: Tensor, second: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of `first`: how many of `second` are closer than its own partner, and how many
    as close, itself counted: [N] each.

    Equal texts give equal scores: a partner among `equal` that tie stands at each of their ranks
    with the same probability.
    """
    import torch

    better = torch.empty(len(first), device=first.device)
    equal = torch.empty(len(first), device=first.device)
    for rows in _chunks(len(first)):
        scores = first[rows] @ second.T
        # The partner of row i is column i.
        partners = torch.arange(rows.start, rows.stop, device=first.device)[:, None]
        partner_score = scores.gather(1, partners)
        is_tie = (scores - partner_score).abs() <= TIE
        better[rows] = ((scores > partner_score) & ~is_tie & valid).sum(1).to(better.dtype)
        equal[rows] = (is_tie & valid).sum(1).clamp(min=1).to(equal.dtype)
    return better, equal


def retrieval_sums(
    step_rows: Tensor, names: tuple[str, ...], pairs: list[tuple[int, int]], rows: slice
) -> MetricSums:
    """Retrieval metrics of every pair over all rows of a step, as this microbatch's part of sums;
    medians and gaps enter whole."""
    import torch

    values, present, _ = split_vectors(step_rows, len(names))
    # What is one number for the whole step is given by every microbatch with its share as the
    # weight.
    part = step_rows.new_tensor((rows.stop - rows.start) / len(step_rows))
    sums: MetricSums = {}
    for a, b in pairs:
        valid = present[:, a] & present[:, b]
        in_microbatch = valid[rows].to(values.dtype)
        count = valid.sum()
        x = torch.where(valid[:, None], values[:, a], 0.0)
        y = torch.where(valid[:, None], values[:, b], 0.0)
        directions = (
            (x, y, f"{names[a]}_to_{names[b]}"),
            (y, x, f"{names[b]}_to_{names[a]}"),
        )
        for queries, candidates, name in directions:
            better, equal = places_of(queries, candidates, valid)
            # the mean of the ranks that a partner among equal candidates may have
            ranks = better + (equal + 1) / 2
            for k in TOP:
                # the chance that it is among the first k
                hits = ((k - better[rows]) / equal[rows]).clamp(0, 1)
                sums[f"{name}/recall_at_{k}"] = ((hits * in_microbatch).sum(), in_microbatch.sum())
            sums[f"{name}/mrr"] = ((in_microbatch / ranks[rows]).sum(), in_microbatch.sum())
            # nanmedian skips rows that are not valid; without any there is no median, which counts
            # 0.
            median = torch.where(valid, ranks, float("nan")).nanmedian().nan_to_num(0.0)
            sums[f"{name}/median_rank"] = (median * part, part)

        pair = f"{names[a]}-{names[b]}"
        positive = (x * y).sum(1)
        total_x = x.sum(0)
        total_y = y.sum(0)
        # The sum over all i, j is the product of the sums; what is left without i = j are the
        # negatives.
        negative = ((total_x @ total_y) - positive.sum()) / (count * (count - 1)).clamp(min=1)
        sums[f"{pair}/positive_similarity"] = (
            (positive[rows] * in_microbatch).sum(),
            in_microbatch.sum(),
        )
        sums[f"{pair}/negative_similarity"] = (negative * part, part)
        gap = (total_x / count.clamp(min=1) - total_y / count.clamp(min=1)).norm()
        sums[f"{pair}/modality_gap"] = (gap * part, part)
        sums[f"{pair}/samples"] = (count * part, part)
    return sums
