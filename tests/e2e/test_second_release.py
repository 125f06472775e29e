"""What the second release wrote is read today: every objective's interrupted run ends as it would have ended with it.

Metrics and weights are compared bit for bit on the kind of processor and the torch that made the archive; elsewhere metrics are
compared within rounding.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support.old_releases import assert_resumes, is_same_machine, unpack_release
from support.runs import headway

RUNS = (
    "base", "sft", "orpo", "simpo", "dpo", "reward", "kto", "distill", "stored_logits", "experts", "quantised", "gates", "align", "tune"
)  # fmt: skip


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("second_release")


@pytest.fixture(scope="module", autouse=True)
def expected(release: Path) -> dict[str, Any]:
    return unpack_release("second_release", release)


THREADED = {"align"}
"""Sums of convolutions depend on the number of threads, so these are compared within rounding."""


def test_every_run_of_the_archive_is_resumed(expected: dict[str, Any]) -> None:
    assert set(RUNS) == set(expected["runs"])


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_the_second_release_left_unfinished_ends_as_it_would_have(
    release: Path, expected: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(release)
    assert_resumes(
        release,
        name,
        expected["runs"][name],
        bit_for_bit=is_same_machine(expected) and name not in THREADED,
        # Caches of records with media are named by the place of the media.
        same_caches=name != "tune",
    )


def test_a_reward_model_scores_as_it_did(
    release: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(release)
    scored = headway(
        "eval",
        "reward",
        "--model",
        "reward",
        "--data",
        "pairs.jsonl",
        "--chat-template",
        "chatml",
        "--json",
    )
    assert scored.returncode == 0, scored.stderr
    scores = json.loads(scored.stdout)
    for key, value in expected["reward"].items():
        if isinstance(value, float):
            assert scores[key] == pytest.approx(value, rel=1e-4), key
