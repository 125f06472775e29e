"""Retrieval with an aligner, scored. In: a run of phase 1 and captioned records; out: recall, MRR and median rank of each pair, and rows.

Each item is ranked among the items of all records that have both modalities of a pair. Candidates that are equally similar share their
mean rank and their chance to be among the first, so that equal captions count for neither side. Training validates with the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice, permutations
from pathlib import Path

import numpy as np

from headway.errors import ConfigError
from headway.eval.media_report import RetrievalRow
from headway.media.items import MediaRef
from headway.model.loading.aligner_file import AlignerHeads, read_aligner
from headway.model.media_encoders import aligned_encoder_text, aligner_folder, open_encoder
from headway.prepare.features import Sample, read_samples
from headway.prepare.media_inputs import content_hash
from headway.tasks.contrastive import places_of, recall_ceiling

ENCODED_AT_ONCE = 64
EPS = 1e-6
SHOWN = 3
"""The best candidates of a query that a report shows."""


@dataclass(frozen=True)
class RetrievalScores:
    """One direction, such as text to image."""

    pair: str
    candidates: int
    recall_at_1: float
    recall_at_5: float
    recall_at_10: float
    mrr: float
    median_rank: float
    modality_gap: float
    """Distance between the mean vectors of the two modalities."""
    ceiling: float = 1.0
    """The highest recall at 1 that any model can have, because some items are equal."""

    @property
    def chance(self) -> float:
        """Recall at 1 of a guess."""
        return 1 / self.candidates


def evaluate_retrieval(
    model: Path, data: str, limit: int | None = None
) -> tuple[list[RetrievalScores], list[RetrievalRow]]:
    """The scores of every direction, and the queries of all of them."""
    import torch

    folder = aligner_folder(model)
    if folder is None:
        raise ConfigError(
            f"{model}: is not a run of phase 1 with its encoders (recipe multimodal/align)."
        )
    heads = read_aligner(folder)
    names = [
        name for name in ("text", "image", "audio") if f"heads.{name}.proj.weight" in heads.tensors
    ]
    samples = list(islice(read_samples(data, names), limit))
    scores: list[RetrievalScores] = []
    rows: list[RetrievalRow] = []
    vectors = {name: _vectors(folder, heads, name, samples) for name in names}
    for first, second in permutations(names, 2):
        both = [
            number
            for number, one in enumerate(samples)
            if first in one.items and second in one.items
        ]
        if len(both) < 2:
            continue
        queries, keys = (np.stack([vectors[name][n] for n in both]) for name in (first, second))
        similarity, gap = queries @ keys.T, float(np.linalg.norm(queries.mean(0) - keys.mean(0)))
        given = (torch.from_numpy(one) for one in (queries, keys, np.ones(len(both), np.bool_)))
        higher, equal = (one.numpy() for one in places_of(*given))
        ranks = higher + (equal + 1) / 2
        scored = _scores(f"{first}_to_{second}", higher, equal, ranks, gap)
        first_contents = [content_hash(samples[number].items[first]) for number in both]
        second_contents = [content_hash(samples[number].items[second]) for number in both]
        scores.append(replace(scored, ceiling=recall_ceiling(first_contents, second_contents)))
        for at, number in enumerate(both):
            best = np.argsort(-similarity[at], kind="stable")[:SHOWN]
            found = tuple(
                (_item(samples[both[int(one)]], second), float(similarity[at, one])) for one in best
            )
            rows.append(
                RetrievalRow(
                    _item(samples[number], first),
                    _item(samples[number], second),
                    int(np.ceil(ranks[at])),
                    found,
                )
            )
    if not scores:
        raise ConfigError(
            f"{data}: fewer than two records have two of {', '.join(names)}; nothing can be ranked."
        )
    return scores, rows


def _scores(
    pair: str, higher: np.ndarray, equal: np.ndarray, ranks: np.ndarray, gap: float
) -> RetrievalScores:
    def recall(k: int) -> float:
        return float(np.clip((k - higher) / equal, 0, 1).mean())

    median = float(np.sort(ranks)[(len(ranks) - 1) // 2])
    return RetrievalScores(
        pair, len(ranks), recall(1), recall(5), recall(10), float((1 / ranks).mean()), median, gap
    )


def _item(sample: Sample, name: str) -> MediaRef | str:
    return sample.items[name]


def _vectors(
    folder: Path, heads: AlignerHeads, name: str, samples: list[Sample]
) -> dict[int, np.ndarray]:
    """The unit vectors of one modality, by sample."""
    there = [number for number, one in enumerate(samples) if name in one.items]
    if not there:
        return {}
    encoder = open_encoder(aligned_encoder_text(folder, name), name)
    weight, bias, proj = (
        heads.tensors[f"heads.{name}.{leaf}"].numpy()
        for leaf in ("norm.weight", "norm.bias", "proj.weight")
    )
    found: dict[int, np.ndarray] = {}
    for start in range(0, len(there), ENCODED_AT_ONCE):
        some = there[start : start + ENCODED_AT_ONCE]
        features = encoder.encode(
            np.stack([encoder.input.read(samples[number].items[name]) for number in some])
        ).reshape(len(some), -1)
        centred = features - features.mean(1, keepdims=True)
        normed = centred / np.sqrt((centred**2).mean(1, keepdims=True) + EPS) * weight + bias
        values = normed @ proj.T
        found |= dict(
            zip(
                some,
                values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12),
                strict=True,
            )
        )
    return found
