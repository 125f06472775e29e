"""`data clean --on slurm` against a real SLURM: array jobs write the bytes of one process, and a cancelled element is done again."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.corpora import texts
from support.slurm_cluster import Cluster

from headway.text.clean import CleanRules, clean_files

pytestmark = pytest.mark.cluster
WAIT_SECONDS = 240


def test_array_jobs_write_the_bytes_of_one_process_although_an_element_is_cancelled(
    slurm: Cluster, tmp_path: Path
) -> None:
    source = tmp_path / "a.jsonl"
    out = tmp_path / "many.jsonl"
    source.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts(4000)), encoding="utf-8"
    )
    clean_files([source], tmp_path / "one.jsonl", CleanRules())
    command = [
        sys.executable,
        "-P",
        "-m",
        "headway",
        "data",
        "clean",
        str(source),
        str(out),
        "--task-size",
        "30kB",
    ]
    driver = subprocess.Popen(
        [*command, "--on", "slurm:cpus-per-task=1", "--workers", "3"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **slurm.environment},
    )
    done = tmp_path / "many.jsonl.work" / "done"
    end = time.monotonic() + WAIT_SECONDS
    while not done.is_dir() or len(os.listdir(done)) < 2:
        assert driver.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    job = slurm.run("squeue", "--noheader", "--format=%F").split()[0]
    slurm.run("scancel", f"{job}_1")
    said = driver.communicate(timeout=WAIT_SECONDS)[1]
    assert driver.returncode == 0, said
    assert "ended without a result" in said
    assert "is done again" in said
    assert out.read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert not done.parent.exists()
