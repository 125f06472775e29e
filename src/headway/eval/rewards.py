"""Answers of a file, scored by rewards: what a policy is worth on prompts with a known answer.

    {..., generations: [...]} of `headway generate --input --output --n 8`, and the columns that a
    reward wants                       -> mean of every reward, pass@1, pass@k, failures

A record is one prompt. An answer passes if its total is at least `passes_at`. With c of n answers
of a prompt that pass, pass@k is the chance that at least one of k drawn answers passes
(Chen et al. 2021, arXiv:2107.03374):

    pass@k = 1 - C(n - c, k) / C(n, k), averaged over prompts
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

from headway.config.load import validate
from headway.config.section import Section, setting
from headway.config.yaml_reader import parse_yaml
from headway.errors import DataError
from headway.eval.reward import output_lines
from headway.infer.batch_files import ERROR, GENERATIONS, INDEX
from headway.rewards.base import ModelScorer, RewardAnswer, RewardList
from headway.rewards.panel import RewardPanel, Score
from headway.runtime.progress import progress
from headway.text.document import Record
from headway.text.read import read_records
from headway.text.record_keys import LISTS

READ_AT_ONCE = 256
"""Records whose answers are scored together."""
SHOWN_PROBLEMS = 5
"""Different problems that a report lists."""
CUT = ("length", "context")
"""Reasons of `stopped_by` that cut an answer."""


class RewardsSection(Section):
    """The rewards of a command line, checked like the section of a recipe."""

    reward: RewardList = setting(..., "Rewards, in order.")


def read_rewards(texts: Sequence[str]) -> RewardsSection:
    """The rewards of a command line: names, files, or settings as YAML in braces."""
    rewards: list[Any] = []
    for text in texts:
        if text.lstrip().startswith("{"):
            rewards.append(parse_yaml(text, "--reward"))
        else:
            rewards.append(text)
    return validate(RewardsSection, {"reward": rewards})


@dataclass(frozen=True)
class AnswersReport:
    """What rewards say of the answers of a file."""

    data: str
    prompts: int
    answers: int
    mean: float
    """Mean total of all answers."""
    parts: dict[str, float]
    """Mean of every reward, without its weight."""
    passes_at: float
    pass_at: dict[int, float]
    """pass@k by k: 1, 2, 4 and so on, up to the fewest answers of a prompt."""
    without_signal: float
    """Share of the prompts whose answers all have the same total: a policy learns nothing there."""
    cut: int
    """Answers that ended at the longest length."""
    failures: int
    """Answers on which a reward failed; it counts as its default there."""
    skipped: int
    """Records whose answers could not be generated."""
    problems: list[str] = field(default_factory=list)
    """The first different reasons of failures."""
    out: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain numbers; keys of JSON objects are texts."""
        values = asdict(self)
        values["pass_at"] = {str(k): share for k, share in self.pass_at.items()}
        return values


@dataclass
class _Totals:
    """Sums over the answers so far."""

    totals: list[list[float]] = field(default_factory=list)
    """The totals of the answers of every prompt."""
    parts: dict[str, list[float]] = field(default_factory=dict)
    cut: int = 0
    failures: int = 0
    skipped: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, answers: Sequence[RewardAnswer], scores: Sequence[Score]) -> None:
        """Add the answers of one prompt."""
        self.totals.append([score.total for score in scores])
        self.cut += sum(not answer.finished for answer in answers)
        for score in scores:
            for name, value in score.parts.items():
                self.parts.setdefault(name, []).append(value)
            self.failures += bool(score.problems)
            for problem in score.problems:
                if problem not in self.problems and len(self.problems) < SHOWN_PROBLEMS:
                    self.problems.append(problem)


def score_file(
    path: str,
    rewards: RewardsSection,
    *,
    passes_at: float = 1.0,
    limit: int | None = None,
    workers: int = 1,
    cache: Path | None = None,
    out: Path | None = None,
) -> AnswersReport:
    """Score the answers of a file. With `out`, every record is written with `rewards` (totals),
    `reward_parts` and, where a reward failed, `reward_problems`; the file appears when it is
    whole.
    """
    seen = _Totals()
    records = islice(read_records(path), limit)
    with (
        RewardPanel(rewards.reward, cache, workers, open_reward_model) as panel,
        output_lines(out, path) as file,
        progress("score", unit="answers") as advance,
    ):
        is_first = True
        while block := list(islice(records, READ_AT_ONCE)):
            answers_of = [_answers(record) for record in block]
            if is_first:
                # What cannot work is refused before anything is scored. Records of one file may
                # differ in their keys, so those of a whole block count.
                panel.check({key for record in block for key in record.data})
                is_first = False

            # Answers of all records are scored together, so that workers are never idle.
            scores = iter(panel.score([answer for answers in answers_of for answer in answers]))
            for record, answers in zip(block, answers_of, strict=True):
                own_scores = list(islice(scores, len(answers)))
                if answers:
                    seen.add(answers, own_scores)
                else:
                    seen.skipped += 1
                if file is not None:
                    line = json.dumps(_with_scores(record, own_scores), ensure_ascii=False)
                    file.write(line + "\n")
                advance(len(answers))

        # Inside the block, so that no file without scores appears.
        if not seen.totals:
            raise DataError(
                f"{path}: nothing to score; {seen.skipped} records have no {GENERATIONS}. "
                "`headway generate --input prompts.jsonl --output FILE` writes them."
            )
    return _report(path, seen, passes_at, out)


def open_reward_model(settings: Any) -> ModelScorer:
    """The reward model of some settings. Rewards without one do without torch."""
    from headway.eval import reward_scorer

    return reward_scorer.open_reward_model(settings)


def _answers(record: Record) -> list[RewardAnswer]:
    """The answers of a record; none where generating them failed."""
    data = record.data
    if GENERATIONS not in data and ERROR in data:
        return []
    generations = data.get(GENERATIONS)
    if not isinstance(generations, list) or not generations:
        raise DataError(
            f"{record.place}: has no list `{GENERATIONS}`; its keys are {', '.join(data)}. "
            "`headway generate --input prompts.jsonl --output FILE` writes it."
        )

    columns = {key: value for key, value in data.items() if key not in (GENERATIONS, INDEX)}
    messages = list(_messages(columns))
    answers: list[RewardAnswer] = []
    for number, generation in enumerate(generations):
        # `headway generate` writes {text, stopped_by, tokens}; a list of texts will do.
        values: dict[str, Any] = {"text": generation}
        if isinstance(generation, dict):
            values = generation
        text = values.get("text")
        if not isinstance(text, str):
            raise DataError(f"{record.place}: {GENERATIONS}[{number}] has no text.")
        tokens = values.get("tokens")
        answers.append(
            RewardAnswer(
                number,
                messages,
                text,
                columns,
                tokens=tokens if isinstance(tokens, int) else 0,
                finished=values.get("stopped_by") not in CUT,
            )
        )
    return answers


def _messages(columns: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The prompt of a record as messages."""
    for key in (*LISTS, "prompt"):
        if isinstance(columns.get(key), list):
            yield from columns[key]
            return
    for key in ("prompt", "question", "problem", "instruction"):
        if isinstance(columns.get(key), str):
            yield {"role": "user", "content": columns[key]}
            return


def _with_scores(record: Record, scores: Sequence[Score]) -> dict[str, Any]:
    if not scores:
        return record.data
    scored = {
        **record.data,
        "rewards": [score.total for score in scores],
        "reward_parts": [score.parts for score in scores],
    }
    problems = [list(score.problems) for score in scores]
    if any(problems):
        scored["reward_problems"] = problems
    return scored


def _report(path: str, seen: _Totals, passes_at: float, out: Path | None) -> AnswersReport:
    flat = [total for totals in seen.totals for total in totals]
    fewest = min(len(totals) for totals in seen.totals)

    pass_at: dict[int, float] = {}
    k = 1
    while k <= fewest:
        shares: list[float] = []
        for totals in seen.totals:
            passed = sum(total >= passes_at for total in totals)
            shares.append(1 - comb(len(totals) - passed, k) / comb(len(totals), k))
        pass_at[k] = fmean(shares)
        k *= 2

    return AnswersReport(
        data=path,
        prompts=len(seen.totals),
        answers=len(flat),
        mean=fmean(flat),
        parts={name: fmean(values) for name, values in seen.parts.items()},
        passes_at=passes_at,
        pass_at=pass_at,
        without_signal=fmean(len(set(totals)) == 1 for totals in seen.totals),
        cut=seen.cut,
        failures=seen.failures,
        skipped=seen.skipped,
        problems=seen.problems,
        out=None if out is None else str(out),
    )
