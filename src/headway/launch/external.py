"""Ranks that another launcher started (torchrun, mpirun, srun): which one it was, and where its ranks meet (MASTER_ADDR, MASTER_PORT)."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping

from headway.errors import LaunchError
from headway.runtime.process import LAUNCHERS, from_environment

FIRST_PORT, NUM_PORTS = 20000, 10000


def external_launcher(environment: Mapping[str, str]) -> str | None:
    """The launcher that started this process as one of several; None if there is none."""
    for one in LAUNCHERS:
        if one.rank in environment and one.world in environment and (one.program == "torchrun" or environment[one.world] != "1"):
            return one.program
    return None


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list such as `gpu[03-07,9]`, as scontrol expands it."""
    program = shutil.which("scontrol")
    if program is None:
        raise LaunchError(
            "SLURM started this rank, but scontrol is not found, so the first host is unknown. Set MASTER_ADDR and MASTER_PORT."
        )
    done = subprocess.run([program, "show", "hostnames", nodes], capture_output=True, text=True, timeout=60, check=False)
    hosts = done.stdout.split()
    if done.returncode != 0 or not hosts:
        raise LaunchError(f"scontrol cannot expand the node list {nodes!r}: {done.stderr.strip()}. Set MASTER_ADDR and MASTER_PORT.")
    return hosts[0]


def master_address(environment: Mapping[str, str], first: Callable[[str], str] = first_host) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT, if missing: derived from the SLURM job id, so that every rank gets the same."""
    process = from_environment(environment)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if process.world == 1 or not missing:
        return {}
    if "SLURM_JOB_ID" in environment and "SLURM_STEP_NODELIST" in environment:
        job = int(environment["SLURM_JOB_ID"]) * 31 + int(environment.get("SLURM_STEP_ID", "0"))
        found = {"MASTER_ADDR": first(environment["SLURM_STEP_NODELIST"]), "MASTER_PORT": str(FIRST_PORT + job % NUM_PORTS)}
        return {name: found[name] for name in missing}
    raise LaunchError(
        f"{' and '.join(missing)} not set, so rank {process.rank} of {process.world} cannot find the others. "
        "Set both to a host and free port of rank 0, e.g. mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500."
    )
