"""Processes that another launcher started (torchrun, mpirun, srun): which one it was, and where its ranks meet (MASTER_ADDR, MASTER_PORT).

Inside a SLURM step the address is the first host of the step, the port comes from the ids of job and step: a restart gets another port.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping

from headway.errors import LaunchError
from headway.runtime.process import LAUNCHERS, from_environment

FIRST_PORT, NUM_PORTS = 20000, 10000


def external_launcher(environment: Mapping[str, str]) -> str | None:
    """The launcher that started this process as one of several; None if there is none."""
    for one in LAUNCHERS:
        if (
            one.rank in environment
            and one.world in environment
            and (one.program == "torchrun" or environment[one.world] != "1")
        ):
            return one.program
    return None


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list such as `gpu[03-07,9]`, as scontrol expands it."""
    program = shutil.which("scontrol")
    if program is None:
        raise LaunchError(
            "SLURM started this rank, but scontrol is not found, so the first host is unknown. Set MASTER_ADDR and MASTER_PORT."
        )
    done = subprocess.run(
        [program, "show", "hostnames", nodes],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    hosts = done.stdout.split()
    if done.returncode != 0 or not hosts:
        raise LaunchError(
            f"scontrol cannot expand the node list {nodes!r}: {done.stderr.strip()}. Set MASTER_ADDR and MASTER_PORT."
        )
    return hosts[0] if _resolves(hosts[0]) else _node_address(program, hosts[0])


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _node_address(scontrol: str, node: str) -> str:
    """The address under which SLURM reaches a node whose name is in no name service; its name where SLURM has no other."""
    done = subprocess.run(
        [scontrol, "--oneliner", "show", "node", node],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return next(
        (
            word.removeprefix("NodeAddr=")
            for word in done.stdout.split()
            if word.startswith("NodeAddr=")
        ),
        node,
    )


def master_address(
    environment: Mapping[str, str], first: Callable[[str], str] = first_host
) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT, if missing: derived from the SLURM job id, so that every rank gets the same."""
    process = from_environment(environment)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if process.world == 1 or not missing:
        return {}
    if "SLURM_JOB_ID" in environment and "SLURM_STEP_NODELIST" in environment:
        found = {
            "MASTER_ADDR": lambda: first(environment["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": lambda: str(_step_port(environment)),
        }
        return {name: found[name]() for name in missing}
    raise LaunchError(
        f"{' and '.join(missing)} not set, so rank {process.rank} of {process.world} cannot find the others. "
        "Set both to a host and free port of rank 0, e.g. mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500."
    )


def _step_port(environment: Mapping[str, str]) -> int:
    """The port of a SLURM step, the same on all its nodes."""
    return (
        FIRST_PORT
        + (int(environment["SLURM_JOB_ID"]) * 31 + int(environment.get("SLURM_STEP_ID", "0")))
        % NUM_PORTS
    )


def step_node(
    num_nodes: int, environment: Mapping[str, str], first: Callable[[str], str] = first_host
) -> tuple[int, str] | None:
    """(node rank, HOST:PORT of node 0) of a launcher that srun started once on each of `num_nodes` nodes; None for any other process."""
    counts = [environment.get(name) for name in ("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS")]
    if (
        num_nodes < 2
        or counts != [str(num_nodes)] * 2
        or not {"SLURM_STEP_NODELIST", "SLURM_NODEID", "SLURM_JOB_ID"} <= environment.keys()
    ):
        return None
    host = environment.get("MASTER_ADDR") or first(environment["SLURM_STEP_NODELIST"])
    return int(
        environment["SLURM_NODEID"]
    ), f"{host}:{environment.get('MASTER_PORT') or _step_port(environment)}"
