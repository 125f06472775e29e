"""An engine whose layers several ranks of this machine share. The first rank is the caller's
process; it starts the others.

    load_on_ranks    starts them, joins them, and every rank reads its part of the weights
    build_engine     the engine of a model: on the first of several ranks one that tells the others
                     what it does
    Followers        the other processes: commands go through their stdin, whose end is theirs

    first rank   submit, cancel -> noted        step -> notes to all -> the same round
    others                                      notes -> submit, cancel -> the same round, events
                                                dropped

Schedules depend on requests and their order alone, so all ranks have the same pages and exchange
the same tensors. A rank that ends ends the engine with one line, also where the first rank waits
for it in an exchange.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headway.checkpoint.stored_model import find_model
from headway.errors import CommunicationError, ConfigError
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.part import ModelPart, check_part
from headway.infer.engine.request import (
    ConstraintFactory,
    EngineEvent,
    EngineOptions,
    EngineRequest,
)
from headway.infer.load import LoadedModel
from headway.parallel.collectives import RankGroup, start_group
from headway.runtime.device import choose_compute
from headway.runtime.process import Process

log = logging.getLogger("headway")
PROGRAM = "headway.infer.engine.rank_process"
WAIT_SECONDS = 30 * 24 * 3600.0
"""A rank may wait this long in an exchange; that a rank is gone is seen by its process."""
GRACE_SECONDS = 3.0
"""After a rank is gone, until this process ends where it does not notice by itself."""
CLOSE_SECONDS = 10.0
LOST_CONTACT = 3
"""Exit code of a rank that ends because another one is gone."""
MakeConstraints = Callable[[LoadedModel], ConstraintFactory | None]
"""A function of a module, which every rank calls with its model."""


@dataclass(frozen=True)
class RankSetup:
    """What a rank is started with."""

    rank: int
    size: int
    path: str
    device: str
    precision: str


def load_on_ranks(
    path: str | Path, size: int, device: str = "auto", precision: str = "auto"
) -> LoadedModel:
    """Read a model onto `size` ranks of this machine, one per GPU, or processes on the CPU.
    `close_ranks` ends the others."""
    from headway.infer.load import load_model

    if size < 1:
        raise ConfigError(f"--tensor is {size}; it must be 1 or more.")
    compute = choose_compute(device, precision)
    if size == 1:
        return load_model(path, device=compute.device, dtype=compute.dtype)
    kind = compute.device.type
    if kind == "mps":
        raise ConfigError(
            f"--tensor is {size} and the device is mps, of which there is one. Leave --tensor "
            "out, or use --device cpu."
        )
    if kind == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(
            f"--tensor is {size}; torch sees {torch.cuda.device_count()} GPUs here, and each "
            "takes one rank. Use fewer."
        )
    check_part(find_model(path).config, size)
    # The other processes start before this rank reads weights: all ranks read theirs at once.
    followers = Followers(str(path), size, kind, precision)
    with followers.watched():
        loaded = load_model(
            path, device=compute.device, dtype=compute.dtype, group=followers.join(kind)
        )
    assert loaded.part is not None
    return replace(loaded, part=ModelPart(loaded.part.group, followers))


def close_ranks(loaded: LoadedModel) -> None:
    """End the other ranks of a model, if it has any."""
    if loaded.part is not None and loaded.part.followers is not None:
        loaded.part.followers.close()


def build_engine(
    loaded: LoadedModel,
    options: EngineOptions,
    adapters: Mapping[str, Path] = {},
    make_constraints: MakeConstraints | None = None,
) -> InferenceEngine:
    """The engine of a model, on all ranks that share it."""
    if loaded.part is not None and loaded.part.followers is not None:
        return LeadingEngine(loaded, options, adapters, make_constraints)
    return InferenceEngine(
        loaded, options, adapters, None if make_constraints is None else make_constraints(loaded)
    )


class LeadingEngine(InferenceEngine):
    """The engine of the first rank."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: EngineOptions,
        adapters: Mapping[str, Path],
        make_constraints: MakeConstraints | None,
    ) -> None:
        assert loaded.part is not None and loaded.part.followers is not None
        loaded.part.check(options, adapters)
        self._followers = loaded.part.followers
        self._notes: list[tuple[str, EngineRequest | int]] = []
        with self._followers.watched():
            self._followers.send(("open", options, loaded.masks, make_constraints))
            super().__init__(
                loaded,
                options,
                constraints=None if make_constraints is None else make_constraints(loaded),
            )

    def warm_up(self) -> None:
        """Warm up all ranks together: they exchange in every launch."""
        with self._followers.watched():
            self._followers.send(("warm_up",))
            super().warm_up()

    def submit(self, request: EngineRequest) -> int:
        """Submit here first; the others get only what was not refused, with the next round."""
        number = super().submit(request)
        self._notes.append(("submit", request))
        return number

    def cancel(self, request: int) -> None:
        """On every rank, before the next round."""
        super().cancel(request)
        self._notes.append(("cancel", request))

    def step(self) -> list[EngineEvent]:
        """One round of every rank."""
        with self._followers.watched():
            # Sent before the round, so that all ranks schedule the same requests in it.
            notes = self._notes
            self._notes = []
            self._followers.send(("step", notes))
            return super().step()


def follow(commands: Iterator[Any], loaded: LoadedModel) -> None:
    """Do what the first rank does, until there are no more commands."""
    engine: InferenceEngine | None = None
    for kind, *values in commands:
        if kind == "open":
            options, masks, make_constraints = values
            engine = None  # the memory of the one before goes first
            factory = None
            if make_constraints is not None:
                factory = make_constraints(loaded)
            try:
                engine = InferenceEngine(loaded.with_masks(masks), options, constraints=factory)
            except ConfigError:  # the first rank says it
                continue
        assert engine is not None
        if kind == "warm_up":
            engine.warm_up()
        elif kind == "step":
            for command, value in values[0]:
                if command == "submit":
                    engine.submit(value)
                else:
                    engine.cancel(value)
            engine.step()


class Followers:
    """The processes of the other ranks."""

    def __init__(self, path: str, size: int, device: str, precision: str) -> None:
        self.size = size
        self.lost = ""
        self._closed = self._reported = False
        self._on_cuda = device == "cuda"
        self._port = _free_port()
        environment = {**os.environ, **_at(self._port)}
        # Ranks on the CPU share its cores.
        if device == "cpu":
            threads = max(1, torch.get_num_threads() // size)
            torch.set_num_threads(threads)
            environment["OMP_NUM_THREADS"] = str(threads)
        # Their stdout is our stderr: stdout belongs to the results of the caller.
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", PROGRAM], stdin=subprocess.PIPE, stdout=2, env=environment
            )
            for _ in range(1, size)
        ]
        atexit.register(self.close)
        threading.Thread(target=self._watch, daemon=True, name="ranks").start()
        for rank, process in enumerate(self.processes, 1):
            self._write(process, RankSetup(rank, size, path, device, precision))

    def join(self, device: str) -> RankGroup:
        """The group of all ranks."""
        # Put back afterwards: the caller's own job may use the same variables.
        before = {name: os.environ.get(name) for name in _at(0)}
        os.environ.update(_at(self._port))
        try:
            return start_group(
                Process(0, 0, self.size), "nccl" if device == "cuda" else "gloo", WAIT_SECONDS
            )
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value

    def send(self, command: tuple[Any, ...]) -> None:
        """Send a command to every other rank."""
        for process in self.processes:
            self._write(process, command)

    def _write(self, process: subprocess.Popen[bytes], value: Any) -> None:
        assert process.stdin is not None
        pickle.dump(value, process.stdin)
        process.stdin.flush()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around what needs the others: where one of them is gone, the error says this."""
        try:
            yield
        except (OSError, RuntimeError, CommunicationError):
            # The failure may be seen here before the watching thread has seen the process end.
            end = time.monotonic() + 2.0
            while not self.lost and time.monotonic() < end:
                time.sleep(0.05)
            if not self.lost:
                raise
            self._reported = True
            raise CommunicationError(f"{self.lost}; the engine cannot continue.") from None

    def _watch(self) -> None:
        """See whether a rank has ended; a thread of its own runs this until `close`."""
        while not self._closed:
            time.sleep(0.1)
            codes = [(rank, process.poll()) for rank, process in enumerate(self.processes, 1)]
            dead = [(rank, code) for rank, code in codes if code is not None]
            if dead and not self._closed:
                # The first cause: a rank that others have lost ends after them at times.
                rank, code = min(dead, key=lambda end: (end[1] == LOST_CONTACT, end[0]))
                if code == LOST_CONTACT and len(dead) < len(self.processes):
                    continue  # the rank that caused it has not been seen yet
                self.lost = f"rank {rank} of {self.size} has ended with exit code {code}"
                # An exchange that waits for the rank does not return by itself: if nobody has
                # reported the loss after a while, the whole process ends.
                time.sleep(GRACE_SECONDS)
                if not (self._reported or self._closed):
                    log.error("%s; the engine cannot continue.", self.lost)
                    os._exit(1)
                return

    def close(self) -> None:
        """End the other ranks."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.close()
            except OSError:
                pass
        if self._on_cuda and self.lost:
            atexit.register(_leave)
        elif self._on_cuda:
            end_group()  # with NCCL all ranks do this at the same time
        end = time.monotonic() + CLOSE_SECONDS
        for process in self.processes:
            try:
                process.wait(max(0.1, end - time.monotonic()) if not self.lost else 1.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if not self.lost:
            end_group()  # with gloo nobody may use it any more


def end_group() -> None:
    """Leave the group of all ranks."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _leave() -> None:
    """End at once: what NCCL waits for at the end of a process does not come from a rank that is
    gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(CommunicationError.exit_code)


def _at(port: int) -> dict[str, str]:
    """Where ranks meet, on this machine alone."""
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if sys.platform == "linux":
        # Otherwise gloo looks up the host's name, which need not resolve to an address of its own.
        return {**here, "GLOO_SOCKET_IFNAME": "lo"}
    return here


def _free_port() -> int:
    """A port that nobody uses now; the system chooses it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
