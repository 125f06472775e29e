"""Retrieval with an aligner, scored.

In: a run of phase 1 and captioned records; out: recall, MRR and median rank of each pair, and rows.

Each item is ranked among the items of all records that have both modalities of a pair. Candidates
that are equally similar share their mean rank and their chance to be among the first, so that equal
captions count for neither side. Training validates with the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice, permutations
from pathlib import Path

import numpy as np

from headway.errors import ConfigError
from headway.eval.media_report import RetrievalRow
from headway.model.loading.aligner_file import AlignerHeads, read_aligner
from headway.model.media_encoders import aligned_encoder_text, aligner_folder, open_encoder
from headway.prepare.features import Sample, read_samples
from headway.prepare.media_inputs import content_hash
from headway.tasks.contrastive import places_of, recall_ceiling

ENCODED_AT_ONCE = 64
"""Items of one batch of an encoder."""
EPS = 1e-6
"""Of the layer norm in an aligner's head."""
SHORTEST_NORM = 1e-12
"""As in torch.nn.functional.normalize: a vector of zeros stays one."""
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
    # The modalities that the run has aligned.
    names = [
        name for name in ("text", "image", "audio") if f"heads.{name}.proj.weight" in heads.tensors
    ]
    samples = list(islice(read_samples(data, names), limit))
    vectors = {name: _vectors(folder, heads, name, samples) for name in names}

    scores: list[RetrievalScores] = []
    rows: list[RetrievalRow] = []
    for first, second in permutations(names, 2):
        indices = sorted(vectors[first].keys() & vectors[second].keys())
        pairs = [samples[index] for index in indices]
        # One candidate alone is always first.
        if len(pairs) < 2:
            continue

        # [pairs, width] each; row i of both is of the same record.
        queries = np.stack([vectors[first][index] for index in indices])
        keys = np.stack([vectors[second][index] for index in indices])
        similarity = queries @ keys.T
        gap = float(np.linalg.norm(queries.mean(0) - keys.mean(0)))

        # Candidates above the right one, and those as similar as it is, itself included: it stands
        # in the middle of these.
        is_present = torch.ones(len(pairs), dtype=torch.bool)
        places = places_of(torch.from_numpy(queries), torch.from_numpy(keys), is_present)
        higher, equal = (counts.numpy() for counts in places)
        ranks = higher + (equal + 1) / 2

        direction_scores = _scores(f"{first}_to_{second}", higher, equal, ranks, gap)
        ceiling = recall_ceiling(
            [content_hash(sample.items[first]) for sample in pairs],
            [content_hash(sample.items[second]) for sample in pairs],
        )
        scores.append(replace(direction_scores, ceiling=ceiling))

        for index, sample in enumerate(pairs):
            best = np.argsort(-similarity[index], kind="stable")[:SHOWN]
            candidates = tuple(
                (pairs[int(other)].items[second], float(similarity[index, other])) for other in best
            )
            rank = int(np.ceil(ranks[index]))
            rows.append(RetrievalRow(sample.items[first], sample.items[second], rank, candidates))
    if not scores:
        raise ConfigError(
            f"{data}: fewer than two records have two of {', '.join(names)}; nothing can be ranked."
        )
    return scores, rows


def _scores(
    pair: str, higher: np.ndarray, equal: np.ndarray, ranks: np.ndarray, gap: float
) -> RetrievalScores:
    """The numbers of one direction, from the places of the right candidates."""

    def recall(k: int) -> float:
        # The chance of being among the first k, if equal candidates are put in any order.
        return float(np.clip((k - higher) / equal, 0, 1).mean())

    # The lower of the two middle ranks, as torch.median has it.
    median = float(np.sort(ranks)[(len(ranks) - 1) // 2])
    return RetrievalScores(
        pair, len(ranks), recall(1), recall(5), recall(10), float((1 / ranks).mean()), median, gap
    )


def _vectors(
    folder: Path, heads: AlignerHeads, name: str, samples: list[Sample]
) -> dict[int, np.ndarray]:
    """The unit vectors of one modality, by the index of their sample.

    item -> encoder -> features [n, width] -> layer norm -> projection [n, dim] -> length 1
    """
    indices = [index for index, sample in enumerate(samples) if name in sample.items]
    if not indices:
        return {}

    encoder = open_encoder(aligned_encoder_text(folder, name), name)
    weight = heads.tensors[f"heads.{name}.norm.weight"].numpy()
    bias = heads.tensors[f"heads.{name}.norm.bias"].numpy()
    projection = heads.tensors[f"heads.{name}.proj.weight"].numpy()

    vectors: dict[int, np.ndarray] = {}
    for start in range(0, len(indices), ENCODED_AT_ONCE):
        batch = indices[start : start + ENCODED_AT_ONCE]
        inputs = np.stack([encoder.input.read(samples[index].items[name]) for index in batch])
        features = encoder.encode(inputs).reshape(len(batch), -1)

        centred = features - features.mean(1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(1, keepdims=True) + EPS)
        projected = (centred / deviation * weight + bias) @ projection.T
        norms = np.linalg.norm(projected, axis=1, keepdims=True)
        unit_vectors = projected / np.maximum(norms, SHORTEST_NORM)
        vectors |= dict(zip(batch, unit_vectors, strict=True))
    return vectors
