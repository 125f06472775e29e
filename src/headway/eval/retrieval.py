"""Retrieval with a trained aligner. In: an aligner and records of captions, pictures and sounds; out: recall, MRR and gaps for every pair.

The metrics are those of validation (objective/contrastive.py), over all samples at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.data.config import default_cache_dir
from headway.errors import ConfigError
from headway.infer.aligner import find_aligner, row_makers
from headway.objective.contrastive import TOP, retrieval_sums
from headway.prepare.features import SampleSet, prepare_samples, read_samples

if TYPE_CHECKING:
    import torch

    from headway.model.aligner import Aligner

BATCH_SAMPLES = 256


@dataclass(frozen=True)
class RetrievalPlan:
    """What to score and how."""

    data: str
    limit: int | None = None
    skip_bad: bool = False
    cache_dir: Path | None = None


def evaluate_retrieval(model: Path, plan: RetrievalPlan, device: torch.device) -> dict[str, Any]:
    """Metrics of every pair of modalities, both directions."""
    import torch

    stored = find_aligner(model)
    names = stored.config.modalities
    cache_dir = plan.cache_dir or default_cache_dir()
    makers = row_makers(stored.config, device)
    samples = prepare_samples(plan.data, read_samples(plan.data, names), makers, cache_dir, skip_bad=plan.skip_bad, limit=plan.limit)
    if not len(samples):
        raise ConfigError(f"--data is {plan.data!r}; it holds no samples.")
    survey = torch.cat(list(_surveyed(stored.load(device), samples, device)))
    sums = retrieval_sums(survey, names, list(combinations(range(len(names)), 2)), slice(0, len(survey)))
    found = {name: float(total / weight) if float(weight) else None for name, (total, weight) in sums.items()}
    return {
        "model": str(model),
        "data": plan.data,
        "samples": len(samples),
        "skipped": [{"place": one.place, "reason": one.reason} for one in samples.bad],
        "pairs": [_pair(found, names[a], names[b]) for a, b in combinations(range(len(names)), 2)],
    }


def _pair(found: dict[str, float | None], a: str, b: str) -> dict[str, Any]:
    pair = f"{a}-{b}"
    count = int(found[f"{pair}/samples"] or 0)
    ways = {}
    for name in (f"{a}_to_{b}", f"{b}_to_{a}"):
        ways[name] = {key: found[f"{name}/{key}"] for key in (*(f"recall_at_{k}" for k in TOP), "mrr", "median_rank")}
    rest = {key: found[f"{pair}/{key}"] for key in ("positive_similarity", "negative_similarity", "modality_gap")}
    return {"pair": pair, "samples": count, "chance_at_1": 1 / count if count else None, **ways, **rest}


def _surveyed(model: Aligner, samples: SampleSet, device: torch.device) -> Iterator[torch.Tensor]:
    """Vectors of all samples, in the form of a survey."""
    import torch

    from headway.data.samples import columns_of

    for start in range(0, len(samples), BATCH_SAMPLES):
        media, present = columns_of(samples.rows[start : start + BATCH_SAMPLES], samples.tables)
        there = torch.from_numpy(present).to(device)
        given = {name: torch.from_numpy(values).to(device) for name, values in zip(samples.modalities, media, strict=True)}
        with torch.no_grad():
            values = model(given, there.T)
        yield torch.cat([values.flatten(1), there.T.float(), torch.ones(len(values), 1, device=device)], dim=1)


def table_rows(result: dict[str, Any]) -> tuple[list[str], Sequence[list[str]]]:
    """Header and rows of a table: one line per direction."""
    header = ["direction", "samples", "chance@1", *(f"recall@{k}" for k in TOP), "MRR", "median rank", "gap"]
    rows = []
    for pair in result["pairs"]:
        for name, way in ((key, value) for key, value in pair.items() if isinstance(value, dict)):
            numbers = [pair["chance_at_1"], *(way[f"recall_at_{k}"] for k in TOP), way["mrr"], way["median_rank"], pair["modality_gap"]]
            rows.append([name.replace("_", " "), str(pair["samples"]), *("none" if one is None else f"{one:.3f}" for one in numbers)])
    return header, rows
