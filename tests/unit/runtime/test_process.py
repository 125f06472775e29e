"""Every launcher's variables name the same process; half-set or wrong ones are refused."""

import os
import subprocess
import sys
import time

import pytest

from headway.errors import LaunchError
from headway.runtime.device import gpu_of_rank
from headway.runtime.process import ChildFailureError, Process, from_environment, run_in_child

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
}
BATCH_SCRIPT = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "2",
}


@pytest.mark.parametrize(
    "environment", [TORCHRUN, OPENMPI, MPICH, SLURM], ids=["torchrun", "openmpi", "mpich", "slurm"]
)
def test_each_launcher_names_the_process(environment: dict[str, str]) -> None:
    assert from_environment(environment) == Process(
        rank=5, local_rank=1, world=8, node=1, num_nodes=2
    )


def test_torchrun_inside_a_slurm_step_wins() -> None:
    step = {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_NODES": "2",
    }
    assert from_environment({**step, **TORCHRUN}).world == 8


@pytest.mark.parametrize(
    "environment",
    [{}, BATCH_SCRIPT, {"RANK": "3"}],
    ids=["nothing", "sbatch without srun", "half set"],
)
def test_without_a_launcher_it_is_one_process(environment: dict[str, str]) -> None:
    assert from_environment(environment) == Process(0, 0, 1, 0, 1)
    assert from_environment(environment).is_first


def test_one_process_per_node_needs_no_local_rank() -> None:
    assert from_environment({"RANK": "2", "WORLD_SIZE": "3"}) == Process(2, 0, 3, 2, 3)


@pytest.mark.parametrize("wrong", [{"RANK": "x"}, {"RANK": "8"}, {"WORLD_SIZE": "-1"}])
def test_a_rank_outside_the_world_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match=r"RANK|WORLD_SIZE"):
        from_environment({**TORCHRUN, **wrong})


def test_a_slurm_task_without_its_step_does_not_train_a_run_of_its_own() -> None:
    with pytest.raises(
        LaunchError, match=r"SLURM_PROCID is 1 and SLURM_STEP_NUM_TASKS is not set.*srun"
    ):
        from_environment({**BATCH_SCRIPT, "SLURM_PROCID": "1", "SLURM_JOB_ID": "7"})
    assert from_environment({**BATCH_SCRIPT, "SLURM_JOB_ID": "7"}).is_first


def test_a_function_in_a_process_of_its_own_answers() -> None:
    assert run_in_child(divmod, (7, 2), 60) == (3, 1)


def test_an_error_or_an_early_end_in_a_process_of_its_own_is_named() -> None:
    with pytest.raises(ChildFailureError, match="by zero"):
        run_in_child(divmod, (7, 0), 60)
    with pytest.raises(ChildFailureError, match=r"ended without an answer \(exit code 3\)"):
        run_in_child(os._exit, (3,), 60)


def test_a_process_that_takes_too_long_is_ended() -> None:
    begin = time.monotonic()
    with pytest.raises(ChildFailureError, match="no answer within 1 s"):
        run_in_child(time.sleep, (100,), 1)
    assert time.monotonic() - begin < 30


SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "3"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
}
MPIEXEC = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "3"}
TORCHRUN_OF_ONE_NODE = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}


@pytest.mark.parametrize("environment", [SRUN, MPIRUN, MPIEXEC])
def test_a_rank_that_sees_one_gpu_uses_it(environment: dict[str, str]) -> None:
    assert gpu_of_rank(3, 1, environment) == 0
    assert gpu_of_rank(3, 8, environment) == 3
    with pytest.raises(LaunchError, match="sees 2 GPUs"):
        gpu_of_rank(3, 2, environment)


@pytest.mark.parametrize(
    "environment", [TORCHRUN_OF_ONE_NODE, {**SRUN, **TORCHRUN_OF_ONE_NODE}, {}]
)
def test_ranks_that_see_the_same_gpu_do_not_share_it(environment: dict[str, str]) -> None:
    assert gpu_of_rank(0, 1, environment) == 0
    with pytest.raises(LaunchError, match="a GPU takes one rank"):
        gpu_of_rank(3, 1, environment)


def test_the_device_of_a_task_with_one_gpu_is_number_0(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from headway.runtime.device import choose_compute

    chosen: list[int] = []
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"gpu {index}")
    compute = choose_compute("auto", "auto", local_rank=3)
    assert (compute.device.index, compute.name, chosen) == (0, "gpu 0", [0])


@pytest.mark.parametrize(
    ("world", "local", "rank", "node", "nodes"),
    [(10, 4, 9, 2, 3), (8, 4, 3, 0, 2), (9, 4, 8, 2, 3), (3, 4, 2, 0, 1)],
)
def test_a_last_node_with_fewer_ranks_is_counted(
    world: int, local: int, rank: int, node: int, nodes: int
) -> None:
    variables = {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": world,
        "OMPI_COMM_WORLD_LOCAL_RANK": rank % local,
    }
    environment = {
        name: str(value)
        for name, value in (variables | {"OMPI_COMM_WORLD_LOCAL_SIZE": local}).items()
    }
    assert from_environment(environment) == Process(rank, rank % local, world, node, nodes)


ENDING = """
import atexit, threading, time
from headway.runtime.process import end_process, remember_group

class Global:
    def __del__(self):
        print("the interpreter was taken apart")

kept = Global()
{group}
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
atexit.register(print, "exit handler")
end_process(3)
"""


def ending(group: str) -> tuple[int, list[str]]:
    ended = subprocess.run(
        [sys.executable, "-c", ENDING.format(group=group)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stdout.splitlines()


def test_a_rank_ends_after_its_threads_and_exit_handlers_and_before_python_is_taken_apart() -> None:
    alone = ["thread", "exit handler", "the interpreter was taken apart"]
    assert ending("") == (3, alone)
    assert ending("remember_group()") == (3, alone[:2])
