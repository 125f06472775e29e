"""A real Ray cluster of this machine: the bytes of one process for all four verbs, with a worker that is killed. Skipped without Ray."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.corpora import texts, write_corpus

from headway.cli import main
from headway.errors import ConfigError, LaunchError
from headway.runtime.executor.work import executor_for
from headway.tokenizer.load import Tokenizer

pytestmark = pytest.mark.slow
CLUSTER = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
}
"""What the cluster and its drivers share: a token, and loopback, which Ray would replace by another address of this machine."""
CLUSTER |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A cluster of 4 workers that outlives a command; its address."""
    pytest.importorskip("ray")
    program = "import ray,sys;c=ray.init(num_cpus=4,include_dashboard=False,log_to_driver=False,object_store_memory=80<<20);"
    program += "print('ADDRESS',c.address_info['gcs_address'],flush=True);sys.stdin.read()"
    variables = {**os.environ, **CLUSTER, "RAY_raylet_start_wait_time_s": "120"}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=variables,
    ) as head:
        assert head.stdin is not None
        assert head.stdout is not None
        yield next(line.split()[1] for line in head.stdout if line.startswith("ADDRESS"))
        head.stdin.close()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tokenizers

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.train_from_iterator(
        texts(50), tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<|end|>"])
    )
    Tokenizer(tokenizer, {"eos": "<|end|>"}).save(folder)
    return folder


def run_headway(*words: str) -> str:
    """Run a verb in a process of its own; returns what it said."""
    command = [sys.executable, "-P", "-m", "headway", *words]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, **CLUSTER},
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_all_verbs_give_the_bytes_of_one_process(
    tmp_path: Path, cluster: str, tokenizer: Path
) -> None:
    inputs = write_corpus(tmp_path / "raw", 200)
    flags = [word for path in inputs for word in ("--input", path)]
    verbs = {
        "clean.jsonl": ["data", "clean", *inputs],
        "dedup.jsonl.gz": ["data", "dedup", *inputs],
        "sample.jsonl": ["data", "sample", *flags[:10], "--bytes", "9kB"],
        "store": ["data", "tokenize", *flags, "--tokenizer", str(tokenizer)],
    }
    for name, words in verbs.items():
        alone = tmp_path / f"one-{name}"
        many = tmp_path / f"many-{name}"
        out = [] if words[1] in ("clean", "dedup") else ["--out"]
        assert main([*words, *out, str(alone)]) == 0
        run_headway(
            *words[:2], "--on", f"ray:{cluster}", "--task-size", "12kB", *words[2:], *out, str(many)
        )
        files = (
            [(alone, many)]
            if alone.is_file()
            else [(path, many / path.name) for path in sorted(alone.iterdir())]
        )
        assert all(first.read_bytes() == second.read_bytes() for first, second in files), name


def test_a_killed_ray_worker_is_replaced_and_the_output_is_that_of_one_process(
    tmp_path: Path,
) -> None:
    pytest.importorskip("ray")
    source = tmp_path / "a.jsonl"
    out = tmp_path / "many.jsonl"
    source.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts(6000)), encoding="utf-8"
    )
    assert main(["data", "clean", str(source), str(tmp_path / "one.jsonl")]) == 0
    command = [
        sys.executable,
        "-P",
        "-m",
        "headway",
        "data",
        "clean",
        str(source),
        str(out),
        "--on",
        "ray",
        "--workers",
        "4",
    ]
    driver = subprocess.Popen(
        [*command, "--task-size", "40kB"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    killed = None
    end = time.monotonic() + 200
    while driver.poll() is None and killed is None and time.monotonic() < end:
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                is_worker = Path(f"/proc/{entry}/cmdline").read_bytes().startswith(b"ray::run_task")
            except OSError:
                continue
            if is_worker and str(driver.pid) in _ancestors(int(entry)):
                killed = int(entry)
                os.kill(killed, signal.SIGKILL)
                break
    said = driver.communicate(timeout=200)[1]
    assert driver.returncode == 0, said
    assert killed is not None
    assert "is done again" in said
    assert "127.0.0.1" not in said
    assert out.read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def _ancestors(pid: int) -> set[str]:
    ancestors: set[str] = set()
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        ancestors.add(str(pid))
    return ancestors


def test_an_address_that_does_not_answer_or_is_none_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    for wrong in ("ray:nowhere", "ray://:10001", "ray:host:port"):
        with pytest.raises(ConfigError, match="must be ray, ray://HOST:PORT or ray:HOST:PORT"):
            executor_for(wrong, None)
    with pytest.raises(LaunchError, match=r"nothing answers at 127.0.0.1:1: "):
        executor_for("ray://127.0.0.1:1", None).start(tmp_path)
