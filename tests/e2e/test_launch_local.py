"""`headway launch local`: a job that outlives its shell, and the verbs that find it again."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

HEADWAY = [sys.executable, "-P", "-m", "headway"]
RECIPE = """
device: cpu
model: {hidden_size: 16, num_layers: 1, num_heads: 2, num_kv_heads: 2, ffn_size: 24, vocab_size: 64, max_seq_len: 64}
batch: {rows: 2}
data: {seq_len: 32}
steps: 100000
eval: {every: null}
checkpoint: {every: 20, keep_last: 2}
run: {name: run}
"""


def verb(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HEADWAY, "launch", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def status(folder: Path) -> dict[str, Any]:
    return json.loads(verb(folder, "status", "runs/run", "--json").stdout)


@pytest.mark.slow
def test_a_job_is_found_and_stopped_from_another_shell(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    begun = verb(tmp_path, "local", "r.yaml", "--detach", "--json")
    assert begun.returncode == 0 and json.loads(begun.stdout)["state"] == "running", begun.stderr
    try:
        deadline = time.monotonic() + 100
        while not list((tmp_path / "runs/run/checkpoints").glob("step-????????")):
            assert time.monotonic() < deadline, verb(tmp_path, "logs", "runs/run").stdout
            time.sleep(0.1)
        second = verb(tmp_path, "local", "r.yaml")
        assert second.returncode == 2
        assert "in use" in second.stderr
        assert len(second.stderr.strip().splitlines()) == 1
    finally:
        cancelled = verb(tmp_path, "cancel", "runs/run", "--json")
    assert json.loads(cancelled.stdout)["state"] == "stopping"
    followed = verb(tmp_path, "logs", "runs/run", "--follow")
    assert "saved runs/run/checkpoints/step-" in followed.stdout
    job_status = status(tmp_path)
    assert (job_status["state"], job_status["exit_code"], job_status["attempt"]) == (
        "cancelled",
        130,
        1,
    )
    assert job_status["step"] >= 20
    assert verb(tmp_path, "cancel", "runs/run").returncode == 2
    rest = verb(tmp_path, "local", "r.yaml", f"steps={job_status['step'] + 2}", "--json")
    assert rest.returncode == 0 and json.loads(rest.stdout)["state"] == "done", rest.stderr
    assert "resum" in rest.stderr
    assert status(tmp_path)["step"] == job_status["step"] + 2
