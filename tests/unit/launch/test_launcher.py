"""What `headway train --nproc --gpus` settles before anything starts."""

from importlib.metadata import version
from typing import Any

import pytest

from headway.config.load import load
from headway.errors import LaunchError
from headway.launch.external import master_address
from headway.launch.gpus import Gpu
from headway.launch.launcher import (
    LaunchOptions,
    LaunchSpec,
    external_launcher,
    plan_for_recipe,
    rank_environment,
)
from headway.launch.nodes import NodeSpec, Rendezvous
from headway.runtime.device import choose_compute
from headway.runtime.machine import usable_cores
from headway.runtime.process import Process, from_environment
from headway.train.config import Recipe

TWO = [
    Gpu(0, "GPU-aa", "NVIDIA H100 80GB HBM3", 80, 0, 0.0),
    Gpu(1, "GPU-bb", "NVIDIA H100 80GB HBM3", 80, 0, 0.0),
]
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}


@pytest.fixture(autouse=True)
def torch_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch of these tests may have no CUDA; the machines they describe do."""
    monkeypatch.setattr("headway.launch.launcher.cuda_of_torch", lambda: "12.8")


def plan(
    *overrides: str, gpus: list[Gpu] = TWO, environment: dict[str, str] | None = None, **wishes: Any
) -> LaunchSpec:
    return plan_for_recipe(
        load(Recipe, None, overrides),
        LaunchOptions(**wishes),
        environment or {},
        lambda: list(gpus),
    )


def test_one_rank_is_this_process_itself() -> None:
    assert not plan().needs_launcher
    assert plan().num_ranks == 1


def test_ranks_default_to_the_chosen_gpus() -> None:
    assert plan_for_recipe(load(Recipe), LaunchOptions(gpus="auto"), {}, lambda: TWO).num_ranks == 2
    assert plan("run.gpus=[0, 1]").num_ranks == 2
    assert plan("run.gpus=H100").num_ranks == 2
    assert plan("run.gpus=1").choice.environment["CUDA_VISIBLE_DEVICES"] == "1"  # pyright: ignore[reportOptionalMemberAccess]


def test_the_flag_wins_over_the_recipe() -> None:
    job = plan_for_recipe(
        load(Recipe, None, ["run.gpus=auto"]), LaunchOptions(gpus="1"), {}, lambda: TWO
    )
    assert job.choice is not None
    assert job.choice.environment["CUDA_VISIBLE_DEVICES"] == "1"


def test_without_gpus_auto_means_one_rank_on_the_cpu() -> None:
    assert plan("run.gpus=auto", gpus=[]).num_ranks == 1


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (
            ["run.gpus=auto", "device=cuda"],
            {"gpus": []},
            "gpus is 'auto', which finds no GPU here, and device is 'cuda'",
        ),
        (
            ["run.gpus=none", "device=cuda"],
            {},
            "gpus is 'none', which hides all GPUs, and device is 'cuda'",
        ),
        (["run.gpus=0", "device=cpu"], {}, "gpus is '0' and device is 'cpu'"),
    ],
)
def test_gpus_that_contradict_the_device_are_refused(
    settings: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        plan(*settings, **options)


@pytest.mark.parametrize("wish", ["H100", "0", "GPU-aa", "auto"])
def test_gpus_that_the_installed_torch_cannot_use_are_refused_with_the_torch_to_install(
    wish: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.launch.launcher.cuda_of_torch", lambda: None)
    with pytest.raises(LaunchError) as refused:
        plan_for_recipe(load(Recipe), LaunchOptions(gpus=wish), {}, lambda: TWO)
    assert refused.value.exit_code == 2
    plain = version("torch").partition("+")[0]
    assert f"gpus is '{wish}'" in str(refused.value)
    assert f"'torch=={plain}'" in str(refused.value)
    assert plan_for_recipe(load(Recipe), LaunchOptions(gpus="none"), {}, lambda: TWO).num_ranks == 1
    assert plan_for_recipe(load(Recipe), LaunchOptions(), {}, lambda: TWO).num_ranks == 1


def test_chosen_gpus_that_torch_does_not_find_are_not_replaced_by_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choice = plan_for_recipe(load(Recipe), LaunchOptions(gpus="H100"), {}, lambda: TWO).choice
    assert choice is not None
    for name, value in choice.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(LaunchError, match=r"gpus is 'H100'; torch .* finds no CUDA device"):
        choose_compute("auto", "auto")
    assert choose_compute("cpu", "auto").name == "cpu"


def test_a_gpu_takes_one_rank() -> None:
    with pytest.raises(LaunchError, match="--nproc is 3; 2 GPUs are chosen"):
        plan("run.gpus=auto", nproc=3)
    with pytest.raises(LaunchError, match="--nproc is 3; 2 GPUs"):
        plan(nproc=3)
    assert plan("device=cpu", nproc=3).num_ranks == 3
    assert plan("run.gpus=none", nproc=3).num_ranks == 3
    assert plan(gpus=[], nproc=3).num_ranks == 3


@pytest.mark.parametrize("environment", [TORCHRUN, SRUN], ids=["torchrun", "srun"])
def test_ranks_of_another_launcher_start_no_others(environment: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="has already started this process"):
        plan(nproc=2, environment=environment)
    with pytest.raises(LaunchError, match="would see each other as busy"):
        plan("run.gpus=auto", environment=environment)
    assert not plan("run.gpus=[0, 1]", environment=environment).needs_launcher


def test_slurm_may_start_one_launcher_per_node() -> None:
    assert external_launcher(SRUN) == "srun"
    job = plan(nproc=2, nodes=NodeSpec(2, 1, "127.0.0.1", 29500), environment=SRUN)
    assert job.needs_launcher
    assert job.nodes.rank == 1


def test_ranks_learn_who_they_are_and_share_the_cores() -> None:
    job = LaunchSpec(2, None, NodeSpec(2, 1, "127.0.0.1", 29500))
    meeting = Rendezvous(job.nodes, 2)
    meeting.first_rank = 3
    meeting.world = 5
    shared = rank_environment(job, meeting, {})
    assert from_environment({**shared, "RANK": "4", "LOCAL_RANK": "1"}) == Process(4, 1, 5, 1, 2)
    assert shared["OMP_NUM_THREADS"] == str(max(1, usable_cores() // 2))
    assert "OMP_NUM_THREADS" not in rank_environment(job, meeting, {"OMP_NUM_THREADS": "7"})
    assert shared["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in rank_environment(
        job, meeting, {"GLOO_SOCKET_IFNAME": "eth0"}
    )


def test_under_srun_all_ranks_derive_the_same_meeting_point() -> None:
    step = {
        **SRUN,
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "gpu[03-04]",
        "SLURM_NODEID": "1",
    }
    points = [
        master_address({**step, "SLURM_PROCID": rank}, lambda nodes: nodes.replace("[03-04]", "03"))
        for rank in "01"
    ]
    assert points[0] == points[1]
    assert points[0]["MASTER_ADDR"] == "gpu03"
    assert 20000 <= int(points[0]["MASTER_PORT"]) < 30000
    assert master_address({**step, "MASTER_ADDR": "x", "MASTER_PORT": "1"}) == {}
    assert master_address({}) == {}


def test_under_mpirun_the_meeting_point_must_be_given() -> None:
    rank = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    }
    with pytest.raises(LaunchError, match=r"MASTER_ADDR and MASTER_PORT not set, so rank 1 of 2"):
        master_address(rank)
