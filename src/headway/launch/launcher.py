"""The launcher: this process starts N ranks on this machine, alone or together with the launchers
of other nodes.

In: device, launch options, environment. Out: an exit code after every rank has ended, or one error
that names the cause.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import LaunchError
from headway.launch.external import external_launcher, master_address
from headway.launch.failure import RankError, is_stop_code, run_as_rank
from headway.launch.gpus import Gpu, GpuChoice, choose_gpus, read_gpus, visible
from headway.launch.nodes import Rendezvous
from headway.launch.options import LaunchOptions, NodeSpec
from headway.runtime.device import backend_of
from headway.runtime.machine import (
    CUDA_TORCH,
    cuda_of_torch,
    package_version,
    torch_release,
    usable_cores,
)
from headway.runtime.process import LAUNCHER_PID, from_environment, headway_command, set_environment
from headway.runtime.temporary import temporary_folder

if TYPE_CHECKING:
    from headway.parallel.collectives import RankGroup
    from headway.train.config import Recipe

log = logging.getLogger("headway")

RANK_TIMEOUT_SECONDS = 1800.0
"""How long a rank of `run_on_ranks` waits for the others."""


@dataclass(frozen=True)
class LaunchSpec:
    """The ranks to start on this machine."""

    num_ranks: int
    choice: GpuChoice | None
    nodes: NodeSpec

    @property
    def needs_launcher(self) -> bool:
        """Whether this process must start others; a single rank runs in this process."""
        return self.num_ranks > 1 or self.nodes.num > 1

    def log_choice(self) -> None:
        """Log which GPUs are used."""
        if self.choice is not None:
            for note in self.choice.notes:
                log.info("%s", note)
            for warning in self.choice.warnings:
                log.warning("%s", warning)

    def enter(self, environment: Mapping[str, str]) -> None:
        """Make this process the single rank: it sees the chosen GPUs, and its peers if another
        launcher started it.
        """
        gpu_settings = self.choice.environment if self.choice is not None else {}
        set_environment({**gpu_settings, **master_address(environment)})


def plan_for_recipe(
    recipe: Recipe,
    options: LaunchOptions,
    environment: Mapping[str, str],
    devices: Callable[[], list[Gpu]] = read_gpus,
) -> LaunchSpec:
    """Choose GPUs and number of ranks for a recipe; the command line wins over the recipe."""
    gpus = options.gpus if options.gpus is not None else recipe.run.gpus_option
    return plan_launch(recipe.device, replace(options, gpus=gpus), environment, devices)


def plan_launch(
    device: str,
    options: LaunchOptions,
    environment: Mapping[str, str],
    devices: Callable[[], list[Gpu]] = read_gpus,
) -> LaunchSpec:
    """Choose GPUs and number of ranks for work on a device (auto, cpu, cuda).

    Contradictions are refused before anything starts.
    """
    # First what contradicts itself, before a device is looked at.
    external = external_launcher(environment)
    gpus = options.gpus
    if external is not None and (options.nproc is not None or options.nodes.num > 1):
        # With --nnodes, SLURM or MPI may have started one launcher per node; torchrun starts ranks.
        if external == "torchrun" or options.nodes.num == 1:
            raise LaunchError(
                f"--nproc is given, but {external} has already started this process as one of "
                "many. Leave --nproc and --nnodes out."
            )
        external = None
    if external is not None and gpus == "auto":
        raise LaunchError(
            f"gpus is 'auto' and {external} started this process; "
            "its ranks would see each other as busy. Name the GPUs instead."
        )
    if options.nproc is not None and options.nproc < 1:
        raise LaunchError(f"--nproc is {options.nproc}; it must be at least 1.")
    if device == "mps" and (options.nproc or 1) * options.nodes.num > 1:
        raise LaunchError(
            "device is 'mps'; an Apple GPU takes one rank. Leave --nproc out, or use device=cpu."
        )

    choice = None
    if gpus is not None:
        choice = choose_gpus(gpus, environment, devices)
    _check_device(device, gpus, choice)
    # Found in torch's files: the launcher does not load torch only to learn this.
    if choice is not None and choice.gpus and cuda_of_torch() is None:
        raise LaunchError(
            f"gpus is {gpus!r}; the GPUs are here, but torch {package_version('torch')} was built "
            f"without CUDA. Install a CUDA build, e.g. {CUDA_TORCH.format(torch_release())}; "
            "or use --gpus none to compute on the CPU."
        )
    if external is not None:
        return LaunchSpec(1, choice, NodeSpec())

    # Without --gpus the visible ones are counted only where ranks may be too many for them:
    # nvidia-smi takes time.
    num_gpus = None
    if choice is not None and choice.gpus:
        num_gpus = len(choice.gpus)
    elif choice is None and device != "cpu" and (options.nproc or 1) > 1:
        num_gpus = len(visible(devices(), environment.get("CUDA_VISIBLE_DEVICES"))) or None
    num_ranks = num_gpus or 1
    if options.nproc is not None:
        num_ranks = options.nproc
    if num_gpus is not None and num_ranks > num_gpus:
        raise LaunchError(
            f"--nproc is {num_ranks}; {num_gpus} GPUs are chosen, and a GPU takes one rank. "
            "Lower it, or use --gpus none."
        )
    return LaunchSpec(num_ranks, choice, options.nodes)


def _check_device(device: str, gpus: str | None, choice: GpuChoice | None) -> None:
    if choice is None:
        return
    if device == "cuda" and not choice.gpus:
        reason = "hides all GPUs" if gpus == "none" else "finds no GPU here"
        raise LaunchError(
            f"gpus is {gpus!r}, which {reason}, and device is 'cuda'. "
            "Use device=auto or device=cpu to compute on the CPU."
        )
    if device == "cpu" and choice.gpus:
        raise LaunchError(
            f"gpus is {gpus!r} and device is 'cpu'; they contradict each other. "
            "Leave one of them out."
        )


@dataclass(frozen=True)
class RunPlace:
    """What the nodes of a run check together before it starts: its folder, and what must be equal
    on all of them.
    """

    folder: Path
    same: Mapping[str, str] = field(default_factory=dict)
    """Digests that all nodes must share, by what they are digests of."""


def launch(
    spec: LaunchSpec,
    arguments: Sequence[str],
    logs: Path,
    environment: Mapping[str, str],
    place: RunPlace | None = None,
) -> int:
    """Start the ranks of this node with `python -m headway ARGUMENTS`, wait for them and return
    their exit code.
    """
    from headway.launch.ranks import RankProcesses, RankStart

    rendezvous = Rendezvous(spec.nodes, spec.num_ranks)
    if spec.nodes.num > 1:
        # The number of this node's first rank depends on the nodes before it: meet first.
        rendezvous.serve()
        try:
            rendezvous.gather()
            if place is not None:
                check_nodes(spec, rendezvous, place, environment)
        except LaunchError:
            rendezvous.leave(well=False)
            raise

    shared = {**environment, **rank_environment(spec, rendezvous, environment)}
    first = rendezvous.first_rank
    starts = [
        RankStart(first + local, {"RANK": str(first + local), "LOCAL_RANK": str(local)})
        for local in range(spec.num_ranks)
    ]
    level = logging.INFO if spec.nodes.num > 1 else logging.DEBUG
    log.log(level, "starting %s", _describe(spec, rendezvous))

    with RankProcesses(headway_command(arguments), starts, shared, logs) as ranks:
        if spec.nodes.num == 1:
            # After the start: both take seconds to load torch, and the port is bound already.
            rendezvous.serve()
        try:
            code = ranks.wait(rendezvous.first_failure)
        except RankError as error:
            rendezvous.announce(error)
            cause = rendezvous.first_cause(error)
            rendezvous.leave(well=False)
            raise cause from None
    rendezvous.leave(well=code == 0 or is_stop_code(code))
    return code


def check_nodes(
    spec: LaunchSpec, rendezvous: Rendezvous, place: RunPlace, environment: Mapping[str, str]
) -> None:
    """The fast checks of `headway doctor` on all nodes together.

    A failed one stops every node with the same line.
    """
    from headway.diagnose.host import HostNeeds
    from headway.diagnose.preflight import StoreExchange, preflight, require

    assert rendezvous.store is not None
    # The checks must see the GPUs of the ranks, not all of this process.
    chosen = {} if spec.choice is None else spec.choice.environment
    needs = HostNeeds(
        spec.num_ranks,
        gpu_ranks=spec.choice is not None and bool(spec.choice.gpus),
        same=place.same,
    )
    exchange = StoreExchange(rendezvous.store, spec.nodes.rank, spec.nodes.num)
    require(preflight(exchange, place.folder, needs, {**environment, **chosen}))


def rank_environment(
    spec: LaunchSpec, rendezvous: Rendezvous, environment: Mapping[str, str]
) -> dict[str, str]:
    """The variables that all ranks of this node share; variables set by the user stay."""
    shared = {
        "MASTER_ADDR": rendezvous.host,
        "MASTER_PORT": str(rendezvous.port),
        "WORLD_SIZE": str(rendezvous.world),
        "LOCAL_WORLD_SIZE": str(spec.num_ranks),
        "GROUP_RANK": str(spec.nodes.rank),
        "GROUP_WORLD_SIZE": str(spec.nodes.num),
        # torch's name for it: the launcher serves the store, and rank 0 does not bind the port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        **(spec.choice.environment if spec.choice is not None else {}),
    }
    # Ranks that each use all cores would slow each other down.
    if "OMP_NUM_THREADS" not in environment:
        shared["OMP_NUM_THREADS"] = str(max(1, usable_cores() // spec.num_ranks))
    # Left alone, gloo takes the address of the host's name, which may be of another network.
    interface = rendezvous.interface()
    if "GLOO_SOCKET_IFNAME" not in environment and interface is not None:
        shared["GLOO_SOCKET_IFNAME"] = interface
    return shared


def _describe(spec: LaunchSpec, rendezvous: Rendezvous) -> str:
    """The ranks of this node for a log line: `ranks 8 to 15 of 16 on node 1 of 2`."""
    last = rendezvous.first_rank + spec.num_ranks - 1
    ranks = f"ranks {rendezvous.first_rank} to {last}"
    if spec.num_ranks == 1:
        ranks = f"rank {last}"
    node = ""
    if spec.nodes.num > 1:
        node = f" on node {spec.nodes.rank} of {spec.nodes.num}"
    return f"{ranks} of {rendezvous.world}{node}"


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether headway's own launcher started this process."""
    return LAUNCHER_PID in environment


def run_on_ranks(
    device: str, options: LaunchOptions, arguments: Sequence[str], work: Callable[[RankGroup], None]
) -> int:
    """Run `work` on every rank of this machine and return the exit code.

    This process starts ranks with the same `arguments`, is itself the only rank, or was started as
    one of them.
    """
    if is_launched(os.environ):
        return run_as_rank(lambda: _join(device, work))
    spec = plan_launch(device, options, os.environ)
    spec.log_choice()
    if not spec.needs_launcher:
        spec.enter(os.environ)
        return _join(device, work)
    # There is no run folder, so what ranks other than the first print is dropped: logs go to a
    # folder that never exists.
    with temporary_folder("verb") as folder:
        return launch(spec, arguments, folder / "no-logs", logging_environment())


def _join(device: str, work: Callable[[RankGroup], None]) -> int:
    """Run `work` as a rank of the group."""
    from headway.parallel.collectives import start_group

    with start_group(from_environment(), backend_of(device), RANK_TIMEOUT_SECONDS) as group:
        work(group)
    return 0


def logging_environment() -> dict[str, str]:
    """This process's variables, with its log level for the ranks."""
    return {**os.environ, "LOG_LEVEL": logging.getLevelName(log.level)}
