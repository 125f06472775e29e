"""Processes that another launcher started (torchrun, mpirun, srun): which one it was, and where its
ranks meet (MASTER_ADDR, MASTER_PORT).

Inside a SLURM step the address is the first host of the step, the port comes from the ids of job
and step: a restart gets another port.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping

from headway.errors import LaunchError
from headway.runtime.process import LAUNCHERS, from_environment

FIRST_PORT = 20000
NUM_PORTS = 10000
"""Ports from 20000 to 29999: below those that Linux gives to outgoing connections."""
SCONTROL_SECONDS = 60


def external_launcher(environment: Mapping[str, str]) -> str | None:
    """The launcher that started this process as one of several; None if there is none."""
    for launcher in LAUNCHERS:
        if launcher.rank not in environment or launcher.world not in environment:
            continue
        # A world of one is a single process, e.g. an interactive srun; torchrun makes even that a
        # group.
        if launcher.program == "torchrun" or environment[launcher.world] != "1":
            return launcher.program
    return None


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list such as `gpu[03-07,9]`, as scontrol expands it."""
    program = shutil.which("scontrol")
    if program is None:
        raise LaunchError(
            "SLURM started this rank, but scontrol is not found, so the first host is unknown. "
            "Set MASTER_ADDR and MASTER_PORT."
        )
    process = subprocess.run(
        [program, "show", "hostnames", nodes],
        capture_output=True,
        text=True,
        timeout=SCONTROL_SECONDS,
        check=False,
    )
    hosts = process.stdout.split()
    if process.returncode != 0 or not hosts:
        raise LaunchError(
            f"scontrol cannot expand the node list {nodes!r}: {process.stderr.strip()}. "
            "Set MASTER_ADDR and MASTER_PORT."
        )
    if _resolves(hosts[0]):
        return hosts[0]
    return _node_address(program, hosts[0])


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _node_address(scontrol: str, node: str) -> str:
    """The address under which SLURM reaches a node whose name is in no name service.

    The name itself where SLURM has no other.
    """
    process = subprocess.run(
        [scontrol, "--oneliner", "show", "node", node],
        capture_output=True,
        text=True,
        timeout=SCONTROL_SECONDS,
        check=False,
    )
    for word in process.stdout.split():
        if word.startswith("NodeAddr="):
            return word.removeprefix("NodeAddr=")
    return node


def master_address(
    environment: Mapping[str, str], first: Callable[[str], str] = first_host
) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT, if missing: derived from the SLURM job id, so that every rank
    gets the same.
    """
    process = from_environment(environment)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if process.world == 1 or not missing:
        return {}
    if "SLURM_JOB_ID" in environment and "SLURM_STEP_NODELIST" in environment:
        settings: dict[str, str] = {}
        if "MASTER_ADDR" in missing:
            settings["MASTER_ADDR"] = first(environment["SLURM_STEP_NODELIST"])
        if "MASTER_PORT" in missing:
            settings["MASTER_PORT"] = str(_step_port(environment))
        return settings
    raise LaunchError(
        f"{' and '.join(missing)} not set, so rank {process.rank} of {process.world} cannot find "
        "the others. Set both to a host and free port of rank 0, e.g. "
        "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500."
    )


def _step_port(environment: Mapping[str, str]) -> int:
    """The port of a SLURM step, the same on all its nodes."""
    job = int(environment["SLURM_JOB_ID"])
    step = int(environment.get("SLURM_STEP_ID", "0"))
    # The factor keeps the steps of one job from the ports of the next job.
    return FIRST_PORT + (job * 31 + step) % NUM_PORTS


def step_node(
    num_nodes: int, environment: Mapping[str, str], first: Callable[[str], str] = first_host
) -> tuple[int, str] | None:
    """(node rank, HOST:PORT of node 0) of a launcher that srun started once on each of `num_nodes`
    nodes; None for any other process.
    """
    # One task per node: otherwise the tasks are ranks, not launchers.
    step_nodes = environment.get("SLURM_STEP_NUM_NODES")
    step_tasks = environment.get("SLURM_STEP_NUM_TASKS")
    if num_nodes < 2 or not str(num_nodes) == step_nodes == step_tasks:
        return None
    if not {"SLURM_STEP_NODELIST", "SLURM_NODEID", "SLURM_JOB_ID"} <= environment.keys():
        return None

    host = environment.get("MASTER_ADDR") or first(environment["SLURM_STEP_NODELIST"])
    port = environment.get("MASTER_PORT") or _step_port(environment)
    return int(environment["SLURM_NODEID"]), f"{host}:{port}"
