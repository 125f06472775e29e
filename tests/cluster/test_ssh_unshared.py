"""Two hosts without a shared folder are refused before anything starts. A stand-in for ssh runs both in folders here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import fake_ssh

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

RECIPE = """
run: {name: job}
device: cpu
model: {hidden_size: 16, num_layers: 1, num_heads: 2, num_kv_heads: 2, ffn_size: 24, vocab_size: 64, max_seq_len: 64}
batch: {rows: 4}
data: {seq_len: 32}
steps: 400
eval: {every: null}
checkpoint: {every: 20, keep_last: 3}
supervise: {backoff_seconds: 0.2}
"""
HEADWAY = [sys.executable, "-P", "-m", "headway"]


def launch(root: Path, *more: str) -> list[str]:
    (root / "r.yaml").write_text(RECIPE)
    return [*HEADWAY, "launch", "ssh", "r.yaml", *more, "--hosts", "h1,h2", "--workdir", "."]


def test_without_a_shared_folder_a_job_is_refused(tmp_path: Path) -> None:
    environment = {**os.environ, **fake_ssh.install(tmp_path, "h1", "h2")}
    done = subprocess.run(
        launch(tmp_path, "checkpoint.to=s3://bucket/x"),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "does not see what" in done.stderr
    assert "set run.dir to a shared one" in done.stderr
    assert not any((tmp_path / folder / "runs").exists() for folder in (".", "h1", "h2")), (
        "nothing is left"
    )
