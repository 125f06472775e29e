"""`headway train --nproc N`: this process becomes the launcher of N ranks on this machine, alone or beside launchers on other nodes.

In: the recipe, what the user asked for, the environment. Out: an exit code, after every rank has ended; or one error that names the cause.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import LaunchError
from headway.launch.failure import RankError
from headway.launch.gpus import Choice, Gpu, choose_gpus, read_gpus, visible
from headway.launch.nodes import Meeting, Nodes
from headway.launch.ranks import Ranks, RankStart
from headway.runtime.machine import CUDA_TORCH, cuda_of_torch, package_version, torch_release, usable_cores
from headway.runtime.process import LAUNCHER_PID, own_command

if TYPE_CHECKING:
    from headway.train.config import Recipe

log = logging.getLogger("headway")

FOREIGN = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}


@dataclass(frozen=True)
class Wishes:
    """What the command line asks for; None = not said."""

    nproc: int | None = None
    gpus: str | None = None
    nodes: Nodes = field(default_factory=Nodes)


@dataclass(frozen=True)
class Job:
    """What is to be started here."""

    num_ranks: int
    choice: Choice | None
    nodes: Nodes

    @property
    def needs_launcher(self) -> bool:
        """Whether this process must start others; a single rank is this process itself."""
        return self.num_ranks > 1 or self.nodes.num > 1


def plan_job(recipe: Recipe, wishes: Wishes, environment: Mapping[str, str], devices: Callable[[], list[Gpu]] = read_gpus) -> Job:
    """Settle GPUs and number of ranks of a run; contradictions are refused here, before anything is started."""
    wish = wishes.gpus if wishes.gpus is not None else recipe.run.gpus_wish
    return plan_ranks(recipe.device, replace(wishes, gpus=wish), environment, devices)


def plan_ranks(device: str, wishes: Wishes, environment: Mapping[str, str], devices: Callable[[], list[Gpu]] = read_gpus) -> Job:
    """Settle GPUs and number of ranks for work on a device (auto, cpu, cuda)."""
    outer, wish = outer_launcher(environment), wishes.gpus
    if outer is not None and (wishes.nproc is not None or wishes.nodes.num > 1):
        if outer == "torchrun" or wishes.nodes.num == 1:
            raise LaunchError(
                f"--nproc is given and {outer} has already started this process as one of many. Leave --nproc and --nnodes out."
            )
        outer = None  # one launcher per node, which SLURM or MPI has put there
    if outer is not None and wish == "auto":
        raise LaunchError(
            f"gpus is 'auto' and {outer} started this process; its ranks would see each other as busy. Name the GPUs instead."
        )
    if wishes.nproc is not None and wishes.nproc < 1:
        raise LaunchError(f"--nproc is {wishes.nproc}; it must be at least 1.")
    choice = None if wish is None else choose_gpus(wish, environment, devices)
    _check_device(device, wish, choice)
    if choice is not None and choice.gpus and cuda_of_torch() is None:
        raise LaunchError(
            f"gpus is {wish!r}; the GPUs are here, but torch {package_version('torch')} was built without CUDA. "
            f"Install a CUDA build, e.g. {CUDA_TORCH.format(torch_release())}; or use --gpus none to compute on the CPU."
        )
    if outer is not None:
        return Job(1, choice, Nodes())
    on_gpus = None
    if choice is not None and choice.gpus:
        on_gpus = len(choice.gpus)
    elif choice is None and device != "cpu" and (wishes.nproc or 1) > 1:
        on_gpus = len(visible(devices(), environment.get("CUDA_VISIBLE_DEVICES"))) or None
    num_ranks = wishes.nproc if wishes.nproc is not None else on_gpus or 1
    if on_gpus is not None and num_ranks > on_gpus:
        raise LaunchError(f"--nproc is {num_ranks}; {on_gpus} GPUs are chosen, and a GPU takes one rank. Lower it, or use --gpus none.")
    return Job(num_ranks, choice, wishes.nodes)


def _check_device(device: str, wish: str | None, choice: Choice | None) -> None:
    if choice is None:
        return
    if device == "cuda" and not choice.gpus:
        found = "hides all GPUs" if wish == "none" else "finds no GPU here"
        raise LaunchError(f"gpus is {wish!r}, which {found}, and device is 'cuda'. Use device=auto or device=cpu to compute on the CPU.")
    if device == "cpu" and choice.gpus:
        raise LaunchError(f"gpus is {wish!r} and device is 'cpu'; they contradict each other. Leave one of them out.")


def outer_launcher(environment: Mapping[str, str]) -> str | None:
    """Who started this process as one of several; None if nobody did."""
    for name, (rank, world) in FOREIGN.items():
        if rank in environment and (name == "torchrun" or environment.get(world, "1") != "1") and world in environment:
            return name
    return None


def launch(job: Job, arguments: Sequence[str], logs: Path, environment: Mapping[str, str]) -> int:
    """Start the ranks of this node with `python -m headway ARGUMENTS`, watch them to their end, return their exit code."""
    meeting = Meeting(job.nodes, job.num_ranks)
    if job.nodes.num > 1:
        meeting.serve()
        try:
            meeting.gather()
        except LaunchError:
            meeting.leave(well=False)
            raise
    shared = {**environment, **rank_environment(job, meeting, environment)}
    starts = [RankStart(meeting.first_rank + local, _identity(job, meeting, local)) for local in range(job.num_ranks)]
    log.log(logging.INFO if job.nodes.num > 1 else logging.DEBUG, "starting %s", _describe(job, meeting))
    with Ranks(own_command(arguments), starts, shared, logs) as ranks:
        if job.nodes.num == 1:
            meeting.serve()  # after the start, because both take seconds to load torch; the port is bound and waits
        try:
            code = ranks.wait(meeting.trouble)
        except RankError as error:
            meeting.announce(error)
            first = meeting.first_cause(error)
            meeting.leave(well=False)
            raise first from None
    meeting.leave(well=code == 0)
    return code


def rank_environment(job: Job, meeting: Meeting, given: Mapping[str, str]) -> dict[str, str]:
    """What all ranks of this node share; what the user has set stays."""
    shared = {
        "MASTER_ADDR": meeting.host,
        "MASTER_PORT": str(meeting.port),
        "WORLD_SIZE": str(meeting.world),
        "LOCAL_WORLD_SIZE": str(job.num_ranks),
        "GROUP_RANK": str(job.nodes.rank),
        "GROUP_WORLD_SIZE": str(job.nodes.num),
        # torch's own words for: the store is served by the launcher, ranks only connect
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        **(job.choice.environment if job.choice is not None else {}),
    }
    if "OMP_NUM_THREADS" not in given:
        shared["OMP_NUM_THREADS"] = str(max(1, usable_cores() // job.num_ranks))
    interface = meeting.interface()
    if "GLOO_SOCKET_IFNAME" not in given and interface is not None:
        shared["GLOO_SOCKET_IFNAME"] = interface
    return shared


def _identity(job: Job, meeting: Meeting, local: int) -> dict[str, str]:
    return {"RANK": str(meeting.first_rank + local), "LOCAL_RANK": str(local)}


def _describe(job: Job, meeting: Meeting) -> str:
    last = meeting.first_rank + job.num_ranks - 1
    here = f"rank {last}" if job.num_ranks == 1 else f"ranks {meeting.first_rank} to {last}"
    return f"{here} of {meeting.world}" + (f" on node {job.nodes.rank} of {job.nodes.num}" if job.nodes.num > 1 else "")


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether headway's own launcher started this process."""
    return LAUNCHER_PID in environment
