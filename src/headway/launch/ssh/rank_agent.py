"""The ranks of one host of an ssh job: `headway train` as a child, watched until it ends or the
session is gone.

In: the `start` message and what follows it. Out: log lines, saved steps and the exit code, as
messages. A child of an earlier session of the same run that still lives here is ended first, so
that no two starts of a run meet.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from headway.config.regular_file import regular_only
from headway.launch.failure import shell_code
from headway.launch.hang import HangDetector, record_hang, send_signal
from headway.launch.ssh.host_check import enter_folder
from headway.runtime.deferred import Deferred
from headway.runtime.heartbeat import Beat, read_beats
from headway.runtime.process import RESTARTS, SUPERVISOR, headway_command
from headway.runtime.run_lock import Holder, read_holder, this_process
from headway.runtime.storage import write_atomic
from headway.train.stages import steps_saved

POLL_SECONDS = 0.1
REPORT_SECONDS = 2.0
"""How often the newest step is sent."""
OUTPUT_SECONDS = 5.0
"""How long the last lines of the ranks may take after their end."""
SAVE_SECONDS = 30.0
"""How long ranks may take to save after the session is gone."""
RECIPE = "launch-recipe.yaml"
MAX_LINE_BYTES = 1 << 16


class RankAgent:
    """Runs `headway train` of one node."""

    def __init__(
        self,
        start: Mapping[str, Any],
        send: Callable[[Mapping[str, Any]], None],
        receive: Callable[[float], dict[str, Any] | None],
        silent_seconds: float,
    ) -> None:
        self.start = start
        self.send = send
        self.receive = receive
        self.silent_seconds = silent_seconds
        self.node: int = start["node"]
        self.child: subprocess.Popen[bytes] | None = None
        self.kill_at: float | None = None
        """When the child is killed, if it has not ended by then."""
        self.run_dir = Path()

    def run(self) -> int:
        """Run the ranks to their end; returns the exit code as a shell shows it."""
        enter_folder(self.start["workdir"])
        self.run_dir = Path(self.start["run"]).expanduser()
        record = self.run_dir / "logs" / f"launch-agent-{self.node}.json"
        record.parent.mkdir(parents=True, exist_ok=True)
        end_earlier(record)

        recipe = self.run_dir / RECIPE
        write_atomic(recipe, self.start["recipe"])
        command = headway_command(
            ["train", str(recipe), *self.start["arguments"], *self._node_options()]
        )
        # The supervisor is on another machine: its variables are passed on here.
        environment = {
            **os.environ,
            **self.start["environment"],
            SUPERVISOR: self.start["job"],
            RESTARTS: str(self.start["restarts"]),
        }

        # Heartbeats of the start before must not be taken for ranks that hang.
        stale_beats = read_beats(self.run_dir)
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            process_group=0,
        )
        try:
            # In the form of a lock file, with the child added: `end_earlier` of a later session
            # reads it.
            write_atomic(record, json.dumps({**asdict(this_process()), "child": self.child.pid}))

            assert self.child.stdout is not None
            reader = threading.Thread(
                target=self._copy_output,
                args=(self.child.stdout,),
                name="headway-copy",
                daemon=True,
            )
            reader.start()
            self._watch(HangDetector(self.start["hang_seconds"], stale_beats))
            reader.join(OUTPUT_SECONDS)
        finally:
            self._kill()
            record.unlink(missing_ok=True)

        code = shell_code(self.child.returncode)
        self.send({"ended": code, "step": steps_saved(self.run_dir)})
        return code

    def _node_options(self) -> list[str]:
        """The options of `headway train` that differ between nodes."""
        words: list[str] = []
        if self.start["ranks"] is not None:
            words += ["--nproc", str(self.start["ranks"])]
        if self.start["size"] > 1:
            host, port = self.start["master"]
            words += ["--nnodes", str(self.start["size"])]
            words += ["--node-rank", str(self.node)]
            words += ["--master", f"{host}:{port}"]
        return words

    def _copy_output(self, stream: IO[bytes]) -> None:
        with stream:
            # Bounded: a longer line arrives in pieces.
            while line := stream.readline(MAX_LINE_BYTES):
                self.send({"log": line.decode(errors="replace").rstrip("\r\n")})

    def _watch(self, detector: HangDetector) -> None:
        """Wait for the end of the child, and do what the other side says meanwhile."""
        assert self.child is not None
        last_message_at = time.monotonic()
        report_at = 0.0
        is_session_gone = False
        while self.child.poll() is None:
            now = time.monotonic()
            if is_session_gone:
                time.sleep(POLL_SECONDS)
            else:
                try:
                    message = self.receive(POLL_SECONDS)
                    is_session_gone = message is None
                    if message is not None:
                        last_message_at = now
                        self._obey(message)
                except queue.Empty:
                    is_session_gone = now - last_message_at > self.silent_seconds
                if is_session_gone:
                    self._end_with_save()

            if self.kill_at is not None and time.monotonic() > self.kill_at:
                self._kill()
            if now > report_at:
                report_at = now + REPORT_SECONDS
                beats = read_beats(self.run_dir)
                saved = steps_saved(self.run_dir)
                step = max([saved, *(beat.step for beat in beats)])
                self.send({"step": step, "saved": saved})
                if hung := detector.hung(beats):
                    self._end_hung(hung)

    def _obey(self, message: Mapping[str, Any]) -> None:
        """Do what a message says; a beat says only that the session is there."""
        assert self.child is not None
        if message["do"] == "signal":
            self.child.send_signal(message["number"])
        elif message["do"] == "kill":
            self._kill()

    def _end_with_save(self) -> None:
        """Stop the child after a save; it is killed if that takes too long."""
        assert self.child is not None
        self.child.send_signal(signal.SIGTERM)
        self.kill_at = time.monotonic() + SAVE_SECONDS

    def _end_hung(self, beats: list[Beat]) -> None:
        text = record_hang(self.run_dir, beats, Deferred())
        self.send({"hung": text, "step": max(beat.step for beat in beats)})
        # Ranks by their own ids: the launcher put them into separate groups.
        for beat in beats:
            send_signal(beat.pid, signal.SIGKILL)
        self._kill()

    def _kill(self) -> None:
        """Kill the child; its ranks end with it."""
        if self.child is not None and self.child.poll() is None:
            try:
                os.killpg(self.child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.child.wait()


def end_earlier(record: Path) -> None:
    """End what an earlier session left running here: it gets the time that it has for its save,
    then it is killed.
    """
    state = read_holder(record)
    if state is None or state.holder is None:
        return
    holder = state.holder
    child = _child_of(record)
    deadline = time.monotonic() + SAVE_SECONDS
    while _lives(holder, child):
        if time.monotonic() > deadline:
            for pid in (child, holder.pid):
                if pid is not None:
                    send_signal(pid, signal.SIGKILL)
            deadline = float("inf")  # once is enough: only wait for them to be gone
        time.sleep(POLL_SECONDS)


def _child_of(record: Path) -> int | None:
    try:
        with open(record, "rb", opener=regular_only) as file:
            pid = json.loads(file.read())["child"]
        return pid if isinstance(pid, int) else None  # the file may be damaged
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _lives(holder: Holder, child: int | None) -> bool:
    """Whether the agent, or the `headway train` that it started, still runs on this machine."""
    # The run folder is shared: the record may be of another host that had this node's number.
    this = this_process()
    if (holder.host, holder.machine) != (this.host, this.machine):
        return False
    return bool(holder.is_alive()) or (child is not None and _is_train(child))


def _is_train(pid: int) -> bool:
    """Whether a process id is still that of `headway train`: ids repeat."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    has_recipe = any(word.endswith(RECIPE.encode()) for word in words)
    return b"headway" in words and b"train" in words and has_recipe
