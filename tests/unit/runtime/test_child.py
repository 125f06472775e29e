"""A command started on behalf of another ends with it: it gets each signal once, saves, and nothing follows."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headway.errors import Interrupted, Terminated
from headway.runtime.child import run_command

SAVES = """
import signal, sys, time
def save(number, frame):
    with open(sys.argv[1], "a") as file:
        file.write(f"{number} ")
    time.sleep(0.2)
    sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, save)
print("ready", flush=True)
open(sys.argv[1], "w").close()
time.sleep(30)
"""


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, Interrupted), (signal.SIGTERM, Terminated)]
)
def test_a_signal_goes_to_the_command_and_ends_this_one_after_it(
    number: signal.Signals, raised: type[BaseException], tmp_path: Path
) -> None:
    before = signal.getsignal(number)
    mark = tmp_path / "mark"

    def tell() -> None:
        while not mark.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=tell, daemon=True).start()
    with pytest.raises(raised) as stopped:
        run_command([sys.executable, "-c", SAVES, str(mark)])
    assert mark.read_text() == f"{int(number)} ", "once, and it had the time to save"
    assert getattr(stopped.value, "exit_code") == 128 + number  # noqa: B009
    assert signal.getsignal(number) is before


def test_without_a_signal_the_result_comes_back() -> None:
    done = run_command(
        [
            sys.executable,
            "-c",
            "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)",
        ],
        captures_errors=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


POOL = """
import os, sys, time
from headway.runtime.process import worker_pool
if __name__ == "__main__":
    with worker_pool(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 60).result()
"""


def test_workers_end_with_the_process_they_work_for(tmp_path: Path) -> None:
    (tmp_path / "pool.py").write_text(POOL)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "pool.py")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 10
    while (
        time.monotonic() < deadline
        and Path(f"/proc/{worker}/stat").exists()
        and " Z " not in Path(f"/proc/{worker}/stat").read_text()
    ):
        time.sleep(0.05)
    assert time.monotonic() < deadline, "the worker waits for work that nobody will give it"
