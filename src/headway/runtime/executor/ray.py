"""`--on ray`: tasks of a Ray cluster.

Without an address, a cluster of this machine alone for the time of the command.

    ray                   starts one here: loopback only, without its dashboard
    ray://HOST:PORT       connects as a Ray client (usually port 10001)
    ray:HOST:PORT         joins from a machine of the cluster (usually port 6379); ray:auto finds it

Ray moves small values only: a task's arguments and its outcome. Data is in the work folder. Usage
statistics are off.
"""

from __future__ import annotations

import importlib
import os
import secrets
import socket
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, LaunchError, first_line
from headway.runtime.executor.task import (
    TaskOutcome,
    WorkTask,
    as_json,
    check_worker,
    inspect_worker,
    place_token,
    run_task,
    versions,
)
from headway.runtime.machine import usable_cores
from headway.runtime.optional import need

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray accepts; nothing large goes through it."""
POLL_SECONDS = 1.0
CHECK_SECONDS = 120.0
"""How long all machines together may take for a first small task."""
CONNECT_SECONDS = 10.0
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Read by Ray when it is imported. A busy machine starts its processes slowly."""
ONLY_HERE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Whatever its name says: with it Ray keeps to 127.0.0.1, where it would replace that by an address
that others can reach.
"""


def build(suffix: str, workers: int | None) -> RayExecutor:
    """The executor of `--on ray`."""
    need("ray", "--on ray")
    address = suffix
    if suffix.startswith("//"):
        address = f"ray:{suffix}"
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if address not in ("", "auto") and (not host or not colon or not port.isdigit()):
        raise ConfigError(
            f"--on is 'ray:{suffix}'; it must be ray, ray://HOST:PORT or ray:HOST:PORT."
        )
    return RayExecutor(address or None, workers)


class RayExecutor:
    """The workers of a Ray cluster."""

    def __init__(self, address: str | None, workers: int | None) -> None:
        self.address = address
        """None: a cluster of this machine alone, started here."""
        self.workers = workers
        self._limit = 1
        """Tasks at a time."""
        self._nodes = 1

    def start(self, work: Path) -> None:
        """Connect and look at every machine of the cluster."""
        # The user's own values stay, but for the one that keeps Ray off the network.
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
        if self.address is None:
            os.environ.update(ONLY_HERE)
        self._refuse_silence()

        ray = _ray()
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if self.address is None:
            options |= {
                "num_cpus": self.workers or usable_cores(),
                "include_dashboard": False,
                "_node_ip_address": LOOPBACK,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        else:
            options["address"] = self.address
        try:
            ray.init(**options)
        except Exception as problem:
            # Ray raises a bare Exception when its processes do not start in time.
            where = "a Ray cluster on this machine cannot be started"
            if self.address is not None:
                where = f"no Ray cluster answers at {self.address}"
            raise LaunchError(f"--on ray: {where}: {first_line(problem)}.") from None

        if self.address is None and (listens_on := ray.util.get_node_ip_address()) != LOOPBACK:
            ray.shutdown()
            raise LaunchError(
                f"--on ray: Ray listens on {listens_on} instead of {LOOPBACK}: "
                "it was imported before. Use a new process."
            )

        # The head node of a cluster often has no CPUs for tasks.
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        self._nodes = len(nodes)
        self._limit = self.workers or int(sum(node["Resources"]["CPU"] for node in nodes))
        if not self._limit:
            raise LaunchError(f"--on ray: the cluster at {self.address} has no CPUs for tasks.")
        self._check(work, [node["NodeID"] for node in nodes])

    def _refuse_silence(self) -> None:
        """Refuse an address where nothing listens; Ray itself would try for minutes."""
        host, _, port = (self.address or "").removeprefix("ray://").rpartition(":")
        if host:
            try:
                socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
            except (OSError, OverflowError) as problem:
                raise LaunchError(
                    f"--on ray: nothing answers at {host}:{port}: {first_line(problem)}."
                ) from None

    def _check(self, work: Path, nodes: Sequence[str]) -> None:
        """Every machine must see the work folder and have this machine's versions."""
        ray = _ray()
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        token = secrets.token_hex(16)
        place_token(work, token)

        # One task for each node. It needs no CPU, so that it also runs on a busy one.
        inspect = ray.remote(num_cpus=0)(inspect_worker)
        references: list[Any] = []
        for node in nodes:
            strategy = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
            references.append(inspect.options(scheduling_strategy=strategy).remote(str(work)))
        try:
            workers = ray.get(references, timeout=CHECK_SECONDS)
        except ray.exceptions.RayError as problem:
            raise LaunchError(
                "--on ray: a machine of the cluster did not answer a first task: "
                f"{first_line(problem)}. headway must be installed on each."
            ) from None
        for worker in workers:
            check_worker(worker, work, token, versions())

    def run(self, work: Path, tasks: Sequence[WorkTask]) -> Generator[TaskOutcome, None, None]:
        """Run every task once."""
        ray = _ray()
        # Ray does not retry: the work folder counts lost tasks, logs them and runs them again.
        remote = ray.remote(num_cpus=1, max_retries=0)(run_task)
        running: dict[Any, int] = {}
        next_index = 0
        try:
            while True:
                while len(running) < self._limit and next_index < len(tasks):
                    task = as_json(tasks[next_index])
                    running[remote.remote(str(work), task)] = next_index
                    next_index += 1
                if not running:
                    return

                for reference in ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)[0]:
                    index = running.pop(reference)
                    try:
                        yield TaskOutcome(index, **ray.get(reference))
                    except ray.exceptions.RayError as problem:
                        yield TaskOutcome(
                            index,
                            "lost",
                            message=f"a Ray worker was lost ({type(problem).__name__})",
                        )
        finally:
            for reference in running:
                # The cluster may be gone.
                with suppress(ray.exceptions.RayError, RuntimeError, ConnectionError):
                    ray.cancel(reference, force=True)

    def describe(self) -> str:
        """Where the tasks run."""
        where = "this machine" if self.address is None else self.address
        return f"a Ray cluster ({where}, {self._nodes} nodes), {self._limit} tasks at a time"

    def close(self) -> None:
        """Disconnect; a cluster that was started here ends."""
        _ray().shutdown()


def _ray() -> Any:
    """The package, which is not installed everywhere."""
    return importlib.import_module("ray")
