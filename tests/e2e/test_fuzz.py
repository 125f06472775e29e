"""Hostile recipes, settings, options, records, files and folders: each is accepted or refused in one line, never a traceback or a hang.

Each target gets HEADWAY_FUZZ_SECONDS (a second by default; `.ci/run` gives more, `make drill` much more); HEADWAY_FUZZ_SEED chooses other
cases. To see the counts: pytest -s. To run one case again: HEADWAY_FUZZ_CASE=N with the seed that a finding names.
"""

import os
from pathlib import Path

import pytest
import torch
from support.fuzz_targets import all_targets
from support.fuzzing import Target, fuzz

SECONDS = float(os.environ.get("HEADWAY_FUZZ_SECONDS", "1"))
SEED = int(os.environ.get("HEADWAY_FUZZ_SEED", "0"))
CASE = int(os.environ["HEADWAY_FUZZ_CASE"]) if "HEADWAY_FUZZ_CASE" in os.environ else None


@pytest.mark.timeout(120 + 20 * SECONDS)
@pytest.mark.parametrize("target", all_targets(), ids=lambda target: target.name)
def test_hostile_input_is_accepted_or_refused_in_one_line(target: Target, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    tally = fuzz(target, tmp_path / "fuzz", SECONDS, SEED, CASE)
    print(f"\n{tally.line(target.name)}")  # noqa: T201
    assert tally.cases > 0
    assert not tally.findings, "\n\n".join(tally.findings[:5])


def test_the_harness_sees_a_traceback_a_hang_and_a_dead_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("support.fuzzing.CASE_SECONDS", 0.2)

    def loop() -> None:
        while True:
            pass

    calls = {
        "a good one": lambda: None,
        "a traceback": lambda: {}["x"],
        "a hang": loop,
        "a dead process": lambda: os._exit(3),
    }
    for number, (name, call) in enumerate(calls.items()):
        tally = fuzz(
            Target(name, lambda rng, folder, name=name, call=call: (name, call)),
            tmp_path,
            5,
            only=number,
        )
        assert (tally.cases, len(tally.findings)) == (1, int(name != "a good one")), name
