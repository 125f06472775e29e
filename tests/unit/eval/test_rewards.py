"""Answers of a file and rewards: means and pass@k are those of their formulas, mistakes are one line."""

import json
from math import comb
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError, DataError
from headway.eval.rewards import AnswersReport, read_rewards, score_file


def answers_file(folder: Path, records: list[dict[str, Any]]) -> str:
    path = folder / "answers.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def report_of(folder: Path, records: list[dict[str, Any]], **options: Any) -> AnswersReport:
    return score_file(answers_file(folder, records), read_rewards(["number"]), **options)


RECORDS = [
    {"question": "2+2", "answer": "so #### 4", "generations": ["4", "it is 5", "4.0", "6"]},
    {"question": "1+1", "answer": "2", "generations": ["3", "4", "5", "6"]},
]


def test_pass_at_k_is_the_chance_that_one_of_k_drawn_answers_passes(tmp_path: Path) -> None:
    report = report_of(tmp_path, RECORDS)
    # Two of four pass for the first prompt, none for the second one.
    expected = {k: (1 - comb(2, k) / comb(4, k)) / 2 for k in (1, 2, 4)}
    assert report.pass_at == pytest.approx(expected)
    assert report.mean == pytest.approx(2 / 8)


def test_prompts_whose_answers_all_have_one_reward_are_without_signal(tmp_path: Path) -> None:
    assert report_of(tmp_path, RECORDS).without_signal == 0.5


def test_k_ends_at_the_fewest_answers_of_a_prompt(tmp_path: Path) -> None:
    few = {"question": "1", "answer": "1", "generations": ["1", "2"]}
    assert list(report_of(tmp_path, [*RECORDS, few]).pass_at) == [1, 2]


def test_answers_of_generate_are_read_with_their_tokens_and_their_end(tmp_path: Path) -> None:
    generation = {"text": "4", "stopped_by": "length", "tokens": 90}
    record = {"prompt": "2+2", "answer": 4, "index": 0, "generations": [generation]}
    rewards = read_rewards(["number", "{kind: length, max_tokens: 100, buffer: 20}"])
    report = score_file(answers_file(tmp_path, [record]), rewards)
    assert report.parts == {"number": 1.0, "length": -0.5}
    assert report.mean == 0.5
    assert report.cut == 1


def test_every_record_is_written_with_its_rewards(tmp_path: Path) -> None:
    out = tmp_path / "scored.jsonl"
    report_of(tmp_path, RECORDS, out=out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["rewards"] for line in lines] == [[1.0, 0.0, 1.0, 0.0], [0.0] * 4]
    assert lines[0]["reward_parts"][0] == {"number": 1.0}


def test_a_record_whose_answers_failed_is_counted_and_left_out(tmp_path: Path) -> None:
    failed = {"question": "?", "answer": "1", "error": "too long"}
    report = report_of(tmp_path, [*RECORDS, failed])
    assert (report.prompts, report.skipped) == (2, 1)


def test_a_reward_of_the_user_that_raises_costs_its_answer_only(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def reward(prompt, answer, record):\n    return 1 / (int(answer) - 5)\n"
    )
    record = {"question": "1", "answer": "1", "generations": ["5", "6"]}
    rewards = read_rewards([str(tmp_path / "mine.py")])
    report = score_file(answers_file(tmp_path, [record]), rewards)
    assert report.failures == 1
    assert "ZeroDivisionError" in report.problems[0]
    assert report.mean == 0.5


@pytest.mark.parametrize(
    ("reward", "line"),
    [
        ("nmber", "reward.0.*'nmber'.*number"),
        ("{kind: format}", "reward.0.*pattern"),
        ("{kind: number, wieght: 2}", "reward.0.*wieght"),
        ("{kind: [", "--reward"),
    ],
)
def test_a_wrong_reward_is_one_line_with_its_key(reward: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        read_rewards([reward])


def test_records_without_a_right_answer_are_refused_before_scoring(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs one of the columns answer"):
        report_of(tmp_path, [{"question": "?", "generations": ["1"]}])


@pytest.mark.parametrize("record", [{"answer": "1"}, {"answer": "1", "generations": [{"no": 1}]}])
def test_a_record_without_answers_is_named_by_its_line(
    tmp_path: Path, record: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match=r"answers\.jsonl:1: .*generations"):
        report_of(tmp_path, [record])
