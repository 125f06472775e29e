"""Contrastive alignment: the vectors of one sample in two modalities are closer than those of different samples. Symmetric InfoNCE.

In: unit vectors [rows, modalities, dim] and which are present; out: one term per step. With S = scale * a b^T over the n samples of the
whole step (all microbatches and ranks) that have both modalities of a pair:

    loss of a pair = sum over i of [logsumexp_j S_ij - S_ii + logsumexp_j S_ji - S_ii] / (2 n)          the step's loss: the mean over pairs

Samples without one of the two are no rows and no columns: their logits are minus infinity, exactly. With `equal_items: ignore` the same
holds for S_ij where i and j are different samples with the same caption, picture or sound. A pair with n < 2 is left out. A pair's
scale is the mean of the exponentials of its modalities' log scales. Each microbatch returns its rows' part of the value, and the
gradient of the whole step's loss by its vectors, so that neither accumulation nor ranks change anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import log
from typing import TYPE_CHECKING, Literal

from pydantic import field_validator, model_validator

from headway.config.section import setting
from headway.data.samples import CONTENT, SAMPLE
from headway.errors import ConfigError
from headway.tasks.base import (
    Collectives,
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
    from headway.model.base import ModelOut

CHUNK_ROWS = 4096
"""Rows of a similarity matrix that exist at one time."""
TOP = (1, 5, 10)
TIE = 1e-6
"""Similarities that differ by less are equal: the same text gives the same vector but for rounding."""
LOG_SCALE = "log_scale"
CONTENT_PARTS = 3
PART_BITS = 16


class Config(TaskConfig):
    """Settings of contrastive alignment."""

    kind: str = setting("contrastive", "contrastive.", on_resume="fixed")
    log_scale: float | dict[str, float] = setting(
        log(1 / 0.07),
        "Logarithm of the factor of similarities: one number for all (2.66 = temperature 0.07), or one per modality. PurrSight: "
        "{text: 1.0, image: 2.66, audio: 2.66}.",
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
        "Samples with an equal caption, picture or sound (captions made of class names): negative = each is a wrong answer for the other, "
        "as in CLIP; ignore = they are not compared.",
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
        for value in (
            self.log_scale.values() if isinstance(self.log_scale, dict) else (self.log_scale,)
        ):
            if not -5 <= value <= log(self.max_scale):
                raise ValueError(
                    f"has log_scale {value:g}; it must be between -5 and log(max_scale) = {log(self.max_scale):.3f}"
                )
        return self

    @property
    def rules(self) -> tuple[ParameterRule, ...]:
        """The scale does not decay."""
        return (
            ()
            if self.scale_lr is None
            else (ParameterRule(("objective",), self.scale_lr, 0.0, (0.9, 0.999)),)
        )

    def check(self, modalities: tuple[str, ...]) -> None:
        """Refuse settings that do not fit the modalities of a model."""
        if isinstance(self.log_scale, dict) and set(self.log_scale) != set(modalities):
            given = ", ".join(self.log_scale)
            raise ConfigError(
                f"objective.log_scale has {given}; the aligner has {', '.join(modalities)}. Give one number for each."
            )
        for pair in self.pairs or ():
            if not set(pair.split("-")) <= set(modalities):
                raise ConfigError(
                    f"objective.pairs has {pair!r}; the aligner has {', '.join(modalities)}."
                )

    def without_absent(self, modalities: tuple[str, ...]) -> tuple[Config, tuple[str, ...]]:
        """The settings for an aligner without some modalities, and the pairs this leaves out: none if no pair would remain."""
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

    def scales_of(self, modalities: tuple[str, ...], trained: Tensor | None) -> dict[str, float]:
        """The log scale of every modality: as trained, or as given."""
        given = self.log_scale
        if isinstance(given, dict):
            return {
                name: float(given[name] if trained is None else trained[list(given).index(name)])
                for name in modalities
            }
        return {name: float(given if trained is None else trained) for name in modalities}

    @property
    def reads(self) -> tuple[str, ...]:
        """Captions with pictures or sounds."""
        return ("captions",)

    @property
    def needs(self) -> TaskNeeds:
        """A model that gives vectors."""
        return TaskNeeds(head="vectors")

    def build(self) -> Contrastive:
        """Make the objective."""
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
    """[N]"""
    gradient: Tensor
    """[N, M, D]"""
    by_log_scale: Tensor
    """[M]"""
    pair_loss: dict[str, Tensor]
    num_rows: Tensor


class Contrastive:
    """One term: the mean of the pairs' losses."""

    scope: Literal["row", "step"] = "step"

    def __init__(self, config: Config) -> None:
        import torch
        from torch import nn

        self.config = config
        given = config.log_scale
        self.order = tuple(given) if isinstance(given, dict) else ()
        self._fixed = torch.tensor(
            list(given.values()) if isinstance(given, dict) else given,
            dtype=torch.float32,
            device="cpu",
        )
        self.module: nn.Module | None = (
            nn.ParameterDict({LOG_SCALE: nn.Parameter(self._fixed.clone())})
            if config.learn_scale
            else None
        )
        self._last: tuple[Tensor, StepLoss] | None = None

    def survey(self, out: ModelOut, batch: Batch) -> Tensor:
        """The vectors of every row, which are present, and whether the row is a sample: [rows, M * D + M + 1].

        Where equal items are ignored, also the numbers of the rows' contents, in parts that a float holds: [rows, M * PARTS] in front.
        """
        import torch

        found = out.embeddings
        assert found is not None, "the contrastive objective needs a model that gives embeddings"
        is_sample = (batch.extra[SAMPLE] >= 0)[:, None]
        present = found.present & is_sample
        values = found.values.detach() * present[..., None]
        columns = [values.flatten(1), present.to(values.dtype), is_sample.to(values.dtype)]
        if self.config.equal_items == "ignore":
            contents = torch.stack([batch.extra[f"{CONTENT}{name}"] for name in found.names], dim=1)
            columns.insert(0, content_parts(contents).to(values.dtype))
        return torch.cat(columns, dim=1)

    def loss(self, out: ModelOut, batch: Batch, at: StepInfo, collectives: Collectives) -> Loss:
        """This microbatch's rows of the step's loss; its gradient is that of the whole step."""
        found = out.embeddings
        assert found is not None
        survey = self.survey(out, batch) if at.survey is None else at.survey
        scales = self.log_scales(found.names, survey.device)
        whole = self._whole(survey, found.names, scales.detach())
        count = found.values.shape[0]
        rows = slice(at.survey_start, at.survey_start + count)
        value = whole.row_loss[rows].sum()
        through = (whole.gradient[rows] * found.values).sum()
        # every microbatch carries an equal share of what the scale receives
        through = through + (whole.by_log_scale * scales).sum() * (count / survey.shape[0])
        share = value + through - through.detach()
        metrics: MetricSums = {
            f"loss/{name}": (one * count, one.new_tensor(float(count)))
            for name, one in whole.pair_loss.items()
        }
        metrics["scale"] = (scales.detach().exp().mean() * count, value.new_tensor(float(count)))
        if not at.training:
            metrics = {
                "loss": (value.detach(), value.new_tensor(count / survey.shape[0])),
                **metrics,
            }
            _, vectors = self._split_contents(survey, len(found.names))
            metrics |= retrieval_sums(vectors, found.names, self._pairs(found.names), rows)
        return Loss({"contrastive": Term(share * whole.num_rows.clamp(min=1), per="rows")}, metrics)

    def log_scales(self, names: tuple[str, ...], device: torch.device) -> Tensor:
        """The log scale of every modality, [M]."""
        if self.module is None:
            own = self._fixed.to(device)
        else:
            own = dict(self.module.named_parameters())[LOG_SCALE]
        return (
            own[[self.order.index(name) for name in names]]
            if self.order
            else own.expand(len(names))
        )

    def _pairs(self, names: tuple[str, ...]) -> list[tuple[int, int]]:
        chosen = (
            None
            if self.config.pairs is None
            else {frozenset(pair.split("-")) for pair in self.config.pairs}
        )
        return [
            (a, b)
            for a, b in combinations(range(len(names)), 2)
            if chosen is None or {names[a], names[b]} in chosen
        ]

    def _split_contents(self, survey: Tensor, modalities: int) -> tuple[Tensor | None, Tensor]:
        """The content numbers [N, M, PARTS] in front of a survey, or None, and the rest of it."""
        if self.config.equal_items == "negative":
            return None, survey
        width = modalities * CONTENT_PARTS
        return survey[:, :width].view(len(survey), modalities, CONTENT_PARTS), survey[:, width:]

    def _whole(self, survey: Tensor, names: tuple[str, ...], log_scales: Tensor) -> StepLoss:
        """The loss of all rows, computed once for the microbatches of a step."""
        if self._last is None or self._last[0] is not survey:
            self._last = (survey, self._compute(survey, names, log_scales))
        return self._last[1]

    def _compute(self, survey: Tensor, names: tuple[str, ...], log_scales: Tensor) -> StepLoss:
        import torch

        contents, survey = self._split_contents(survey, len(names))
        values, present, is_sample = split_survey(survey, len(names))
        factors = log_scales.float().exp().clamp(max=self.config.max_scale)
        pairs = self._pairs(names)
        found: dict[tuple[int, int], PairResult] = {}
        for a, b in pairs:
            both = present[:, a] & present[:, b]
            pair_contents = None if contents is None else contents[:, [a, b]]
            found[a, b] = pair_loss(
                values[:, a], values[:, b], both, (factors[a] + factors[b]) / 2, pair_contents
            )
        active = torch.stack([one.is_active for one in found.values()]).sum().clamp(min=1)
        gradient, by_scale = torch.zeros_like(values), torch.zeros_like(factors)
        for (a, b), one in found.items():
            gradient[:, a] += one.by_first / active
            gradient[:, b] += one.by_second / active
            by_scale[[a, b]] += one.by_scale / active / 2
        by_log = by_scale * factors
        at_limit = log_scales.float() >= log(self.config.max_scale)
        by_log = torch.where(
            at_limit & (by_log < 0), 0.0, by_log
        )  # at the limit it may only shrink
        return StepLoss(
            sum((one.row_loss for one in found.values()), torch.zeros_like(is_sample)) / active,
            gradient,
            by_log,
            {f"{names[a]}-{names[b]}": one.row_loss.sum() for (a, b), one in found.items()},
            is_sample.sum(),
        )


def split_survey(survey: Tensor, modalities: int) -> tuple[Tensor, Tensor, Tensor]:
    """(vectors [N, M, D], present [N, M], 1 for samples [N]) of a survey."""
    width = survey.shape[1] - modalities - 1
    values = survey[:, :width].view(len(survey), modalities, width // modalities)
    return values, survey[:, width : width + modalities] > 0, survey[:, -1]


def _chunks(rows: int) -> Iterator[slice]:
    return (slice(start, min(start + CHUNK_ROWS, rows)) for start in range(0, rows, CHUNK_ROWS))


def content_parts(contents: Tensor) -> Tensor:
    """Content numbers [n, M] of 48 bits as parts of 16 bits, [n, M * PARTS]: float32 holds each exactly."""
    import torch

    parts = [
        (contents >> (PART_BITS * part)) & ((1 << PART_BITS) - 1) for part in range(CONTENT_PARTS)
    ]
    return torch.stack(parts, dim=-1).flatten(1)


def _share_content(contents: Tensor, rows: slice) -> Tensor:
    """Which of some rows have the same item as which row, of either modality: [rows, N]. One [rows, N] at a time exists."""
    shared = None
    for modality in range(contents.shape[1]):
        same = None
        for part in range(contents.shape[2]):
            equal = contents[rows, None, modality, part] == contents[None, :, modality, part]
            same = equal if same is None else same & equal
        assert same is not None
        shared = same if shared is None else shared | same
    assert shared is not None
    return shared


def recall_ceiling(queries: Sequence[object], candidates: Sequence[object]) -> float:
    """The highest recall at 1 that any model can have: equal items cannot be distinguished.

    Of k samples with the same query, one finds its own candidate first; of k equal candidates, the right one stands first with chance 1/k.
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
    """Symmetric InfoNCE of two sets of vectors [N, D] over the rows where `valid`, and its gradients; a chunk of logits at a time.

    `contents` [N, 2, PARTS]: rows whose content of the first or of the second modality is equal are not compared with each other.

    Columns that are not valid are minus infinity. What is not valid is replaced, not multiplied, so that no value of it can matter.
    """
    import torch

    n = valid.sum()
    active = (n >= 2).to(first.dtype)
    weight = active / (2 * n.clamp(min=1))
    a, b = torch.where(valid[:, None], first, 0.0), torch.where(valid[:, None], second, 0.0)
    diagonal = (a * b).sum(1)
    row_lse, column_lse = torch.empty_like(diagonal), torch.full_like(diagonal, float("-inf"))

    def logits(rows: slice) -> Tensor:
        both = valid[rows, None] & valid[None, :]
        if contents is not None:
            # A row is always compared with itself: that is the pair it has to find.
            number = torch.arange(len(a), device=a.device)
            is_self = number[rows, None] == number[None, :]
            both &= is_self | ~_share_content(contents, rows)
        return torch.where(both, scale * (a[rows] @ b.T), float("-inf"))

    for rows in _chunks(len(a)):
        chunk = logits(rows)
        row_lse[rows] = chunk.logsumexp(1)
        column_lse = torch.logaddexp(column_lse, chunk.logsumexp(0))
    row_lse, column_lse = torch.where(valid, row_lse, 0.0), torch.where(valid, column_lse, 0.0)
    by_first, by_second, total = torch.empty_like(a), torch.zeros_like(b), torch.zeros_like(weight)
    for rows in _chunks(len(a)):
        chunk = logits(rows)
        share = ((chunk - row_lse[rows, None]).exp() + (chunk - column_lse[None, :]).exp()) * weight
        by_first[rows] = share @ b
        by_second += share.T @ a[rows]
        total += (by_first[rows] * a[rows]).sum()
    row_loss = torch.where(valid, (row_lse + column_lse - 2 * scale * diagonal) * weight, 0.0)
    by_first, by_second = (by_first - 2 * weight * b) * scale, (by_second - 2 * weight * a) * scale
    return PairResult(row_loss, by_first, by_second, total - 2 * weight * diagonal.sum(), active)


def places_of(first: Tensor, second: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of `first`: how many of `second` are closer than its own partner, and how many as close, itself counted: [N] each.

    Equal texts give equal scores: a partner among `equal` that tie stands at each of their ranks with the same probability.
    """
    import torch

    better, equal = (torch.empty(len(first), device=first.device) for _ in range(2))
    for rows in _chunks(len(first)):
        scores = first[rows] @ second.T
        own = scores.gather(1, torch.arange(rows.start, rows.stop, device=first.device)[:, None])
        close = (scores - own).abs() <= TIE
        better[rows] = ((scores > own) & ~close & valid).sum(1).to(better.dtype)
        equal[rows] = (close & valid).sum(1).clamp(min=1).to(equal.dtype)
    return better, equal


def retrieval_sums(
    survey: Tensor, names: tuple[str, ...], pairs: list[tuple[int, int]], rows: slice
) -> MetricSums:
    """Retrieval metrics of every pair over all rows of a survey, as this microbatch's part of sums; medians and gaps enter whole."""
    import torch

    values, present, _ = split_survey(survey, len(names))
    part = survey.new_tensor((rows.stop - rows.start) / len(survey))
    sums: MetricSums = {}
    for a, b in pairs:
        valid = present[:, a] & present[:, b]
        mine = valid[rows].to(values.dtype)
        count = valid.sum()
        x, y = (
            torch.where(valid[:, None], values[:, a], 0.0),
            torch.where(valid[:, None], values[:, b], 0.0),
        )
        for one, two, name in (
            (x, y, f"{names[a]}_to_{names[b]}"),
            (y, x, f"{names[b]}_to_{names[a]}"),
        ):
            better, equal = places_of(one, two, valid)
            ranks = better + (equal + 1) / 2
            for k in TOP:
                found = ((k - better[rows]) / equal[rows]).clamp(0, 1)
                sums[f"{name}/recall_at_{k}"] = ((found * mine).sum(), mine.sum())
            sums[f"{name}/mrr"] = ((mine / ranks[rows]).sum(), mine.sum())
            middle = torch.where(valid, ranks, float("nan")).nanmedian().nan_to_num(0.0)
            sums[f"{name}/median_rank"] = (middle * part, part)
        pair = f"{names[a]}-{names[b]}"
        positive = (x * y).sum(1)
        total_x, total_y = x.sum(0), y.sum(0)
        others = ((total_x @ total_y) - positive.sum()) / (count * (count - 1)).clamp(min=1)
        sums[f"{pair}/positive_similarity"] = ((positive[rows] * mine).sum(), mine.sum())
        sums[f"{pair}/negative_similarity"] = (others * part, part)
        gap = (total_x / count.clamp(min=1) - total_y / count.clamp(min=1)).norm()
        sums[f"{pair}/modality_gap"] = (gap * part, part)
        sums[f"{pair}/samples"] = (count * part, part)
    return sums
