"""Scores of a reward model: candidates come in, one number each goes out, with what they say about
pairs.

    pairs           accuracy (chosen above rejected), mean margin, mean scores, Bradley-Terry loss,
                    a histogram of margins
    conversations   mean, spread and a histogram of scores
    generations     the same, and which answer is the best

With `out`, every record is written with its scores, in order, as it is scored: `reward_chosen` and
`reward_rejected`, `reward`, or `rewards` and `best`. The file appears whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import numpy.typing as npt

from headway.errors import CheckpointError, ConfigError, DataError
from headway.eval.reward_data import (
    Candidates,
    ReadCounts,
    RecordKind,
    RewardSource,
    read_candidates,
)
from headway.eval.scoring import ScoreWindow, sorted_batches
from headway.runtime.progress import progress
from headway.runtime.storage import check_writable, writing
from headway.runtime.temporary import clear_leftovers, temporary_name

if TYPE_CHECKING:
    from headway.infer.load import LoadedModel
    from headway.parallel.collectives import RankGroup

Floats = npt.NDArray[np.float64]
BATCH_TOKENS = 8192
BINS = 12
"""About this many bins of a histogram: their width is rounded."""


@dataclass(frozen=True)
class RewardBin:
    """Values from `low` to below `high`; the last bin has its upper end too."""

    low: float
    high: float
    count: int


@dataclass(frozen=True)
class RewardReport:
    """What a reward model says of some data."""

    model: str
    data: str
    kind: RecordKind
    records: int
    """That were scored."""
    answers: int
    mean: float
    """Mean score of all answers."""
    std: float
    lowest: float
    highest: float
    histogram: list[RewardBin]
    """Of margins for pairs, else of scores."""
    accuracy: float | None = None
    """Pairs: share whose chosen answer has the higher score."""
    margin: float | None = None
    """Pairs: mean of chosen - rejected."""
    chosen: float | None = None
    rejected: float | None = None
    loss: float | None = None
    """Pairs: mean of -log sigmoid(chosen - rejected), the loss of Bradley and Terry's model."""
    best: float | None = None
    """Generations: mean score of the best answer of each prompt."""
    truncated: int = 0
    bad: int = 0
    out: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self)


@dataclass
class _RunningScores:
    """Scores so far: of every answer, and of the sides of pairs or the best of generations."""

    kind: RecordKind | None = None
    scores: list[Floats] = field(default_factory=list)
    firsts: list[Floats] = field(default_factory=list)
    """Of chosen answers, or of the best ones."""
    seconds: list[Floats] = field(default_factory=list)

    def add(self, kind: RecordKind, scores: Floats) -> None:
        """Add the scores of one record, in the order of its candidates."""
        self.kind = kind
        self.scores.append(scores)
        if kind == "pair":
            self.firsts.append(scores[:1])
            self.seconds.append(scores[1:2])
        else:
            self.firsts.append(scores.max(keepdims=True))


def evaluate_reward(
    loaded: LoadedModel,
    source: RewardSource,
    *,
    batch_tokens: int = BATCH_TOKENS,
    out: Path | None = None,
    keep: Callable[[dict[str, Any]], object] | None = None,
    group: RankGroup | None = None,
) -> RewardReport:
    """Score all records of a source; `keep` gets each with its scores.

    Over several ranks each scores its share of the batches, and the first one writes.
    """
    check_source(loaded, source, batch_tokens)
    counts = ReadCounts()
    running = _RunningScores()

    # Every rank has all scores, so the first can write them alone.
    written = None
    if group is None or group.rank == 0:
        written = out
    with (
        output_lines(written, source.path) as file,
        progress("score", unit="answers") as advance,
    ):
        for block in read_candidates(source, loaded, counts):
            # Answers of all records of a block are scored together, to fill the batches.
            flat = [ids for candidates in block for ids in candidates.ids]
            scores = score_answers(loaded, flat, batch_tokens, group)

            start = 0
            for candidates in block:
                record_scores = scores[start : start + len(candidates.ids)]
                start += len(candidates.ids)
                running.add(candidates.kind, record_scores)
                if file is not None:
                    record = with_scores(candidates, record_scores.tolist())
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
                if keep is not None:
                    keep(with_scores(candidates, record_scores.tolist()))
            advance(len(flat))

        # Inside the block, so that no empty file appears.
        if running.kind is None:
            raise DataError(
                f"{source.path}: nothing to score; {counts.bad} of {counts.records} records "
                "cannot be read."
            )
    return _report(running, running.kind, counts, loaded, source, out)


def check_source(loaded: LoadedModel, source: RewardSource, batch_tokens: int) -> None:
    """Refuse impossible limits."""
    longest = loaded.config.max_seq_len
    if source.max_length is not None and not 2 <= source.max_length <= longest:
        raise ConfigError(
            f"--max-length is {source.max_length}; it must be from 2 to the model's max_seq_len "
            f"of {longest}."
        )
    if batch_tokens < 1:
        raise ConfigError(f"--batch-tokens is {batch_tokens}; it must be at least 1.")


def score_answers(
    loaded: LoadedModel,
    answers: Sequence[Sequence[int]],
    batch_tokens: int = BATCH_TOKENS,
    group: RankGroup | None = None,
) -> Floats:
    """The score of every answer, in order; answers of similar length are computed together."""
    rank = 0
    world = 1
    if group is not None:
        rank = group.rank
        world = group.size

    # Every rank makes the same batches, so an answer is computed in the same batch for any number
    # of ranks. The label of a window is the index of its answer.
    scores = np.zeros(len(answers))
    rows = [ScoreWindow(ids, 0, index) for index, ids in enumerate(answers)]
    for number, batch in enumerate(sorted_batches(rows, batch_tokens)):
        if number % world != rank:
            continue
        indices = [int(row.label or 0) for row in batch]
        scores[indices] = _score(loaded, [row.ids for row in batch])

    # Scores of other ranks' answers are 0 here, so the sum has every score once.
    if group is not None and world > 1:
        scores = np.sum(group.gather(scores), axis=0)
    if not np.isfinite(scores).all():
        raise CheckpointError(
            f"{loaded.path}: its scores are not finite. The weights are damaged, or overflow in "
            "this precision."
        )
    return scores


def _score(loaded: LoadedModel, answers: Sequence[Sequence[int]]) -> Floats:
    """One batch: rows padded at the right, each scored at its last token."""
    import torch

    from headway.model.base import ScoreHead

    # Padding is at the end, where nothing before it looks.
    lengths = torch.tensor([len(ids) for ids in answers])
    tokens = torch.zeros(len(answers), int(lengths.max()), dtype=torch.int64)
    for index, ids in enumerate(answers):
        tokens[index, : len(ids)] = torch.as_tensor(ids, dtype=torch.int64)
    highest = int(tokens.max())
    if highest >= loaded.config.vocab:
        raise DataError(
            f"the data holds id {highest}; the model has ids below {loaded.config.vocab}. It was "
            "made with another tokenizer."
        )

    position = torch.arange(tokens.shape[1], dtype=torch.int32, device=loaded.device)
    # (begin, end) of the document in each row, [rows, 2]; padding is behind it.
    bounds = torch.stack([torch.zeros_like(lengths), lengths], dim=1).to(loaded.device)
    with torch.inference_mode():
        tokens = tokens.to(loaded.device)
        hidden = loaded.model.hidden_states(tokens, position.expand(tokens.shape))
        scores = ScoreHead(hidden, loaded.model.head_weight).of_documents(bounds)[:, 0]
        return scores.double().cpu().numpy()


def with_scores(candidates: Candidates, scores: Sequence[float]) -> dict[str, Any]:
    """The line of the output: the record and its scores."""
    if candidates.kind == "pair":
        return {**candidates.record, "reward_chosen": scores[0], "reward_rejected": scores[1]}
    if candidates.kind == "conversation":
        return {**candidates.record, "reward": scores[0]}
    return {**candidates.record, "rewards": list(scores), "best": int(np.argmax(scores))}


@contextmanager
def output_lines(out: Path | None, data: str) -> Iterator[TextIO | None]:
    """The output file, which appears under its name when the block ends well."""
    if out is None:
        yield None
        return
    if out.is_dir() or out.absolute() == Path(data).absolute():
        raise ConfigError(f"--out is {str(out)!r}; give a file to write, another than --data.")

    # Leftovers are temporary files of a run that was killed.
    check_writable(out.absolute().parent)
    clear_leftovers(out)
    temporary = temporary_name(out.absolute())
    try:
        with writing(out), temporary.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def _report(
    running: _RunningScores,
    kind: RecordKind,
    counts: ReadCounts,
    loaded: LoadedModel,
    source: RewardSource,
    out: Path | None,
) -> RewardReport:
    scores = np.concatenate(running.scores)
    firsts = np.concatenate(running.firsts)

    # Numbers that only this kind of records has, and what the histogram is of.
    kind_numbers: dict[str, Any] = {}
    values = scores
    if kind == "pair":
        rejected = np.concatenate(running.seconds)
        margins = firsts - rejected
        values = margins
        kind_numbers = {
            "accuracy": float(np.heaviside(margins, 0.5).mean()),  # equal scores are half right
            "margin": float(margins.mean()),
            "chosen": float(firsts.mean()),
            "rejected": float(rejected.mean()),
            # log(1 + exp(-margin)) = -log sigmoid(margin), without overflow.
            "loss": float(np.logaddexp(0.0, -margins).mean()),
        }
    elif kind == "generations":
        kind_numbers = {"best": float(firsts.mean())}

    return RewardReport(
        model=str(loaded.path),
        data=source.path,
        kind=kind,
        records=len(firsts),
        answers=len(scores),
        mean=float(scores.mean()),
        std=float(scores.std()),
        lowest=float(scores.min()),
        highest=float(scores.max()),
        histogram=histogram(values),
        truncated=counts.truncated,
        bad=counts.bad,
        out=None if out is None else str(out),
        **kind_numbers,
    )


def histogram(values: Floats, bins: int = BINS) -> list[RewardBin]:
    """Bins of one round width that cover all values; 0 is a border, so that wrong pairs are in bins
    of their own.
    """
    low = min(0.0, float(values.min()))
    high = max(0.0, float(values.max()))
    width = round_up((high - low) / bins)

    # Edges are multiples of the width; at least one bin, also where all values are 0.
    first = math.floor(low / width)
    last = max(first + 1, math.ceil(high / width))
    edges = [step * width for step in range(first, last + 1)]
    counted, _ = np.histogram(values, np.array(edges))
    return [
        RewardBin(start, end, int(count))
        for start, end, count in zip(edges, edges[1:], counted, strict=False)
    ]


def round_up(width: float) -> float:
    """The next of 1, 2, 5, 10 ... times a power of ten."""
    if width <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(width))
    # A little below counts as equal: 0.3 / 3 is not exactly 0.1.
    return next(step * power for step in (1, 2, 5, 10) if step * power >= width * (1 - 1e-9))
