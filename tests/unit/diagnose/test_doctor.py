"""The doctor tells a healthy machine from a sick one, with a remedy for each trouble, quickly and without a trace."""

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

from headway.cli import main
from headway.diagnose import disk_speed, doctor, host, preflight, rank_checks
from headway.diagnose.check import Bandwidth, Check, RanksReport
from headway.diagnose.disk_speed import DiskSpeed, speed_check
from headway.diagnose.doctor import DoctorPlan, examine
from headway.parallel.collectives import RankGroup
from headway.runtime.process import Process


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_speed, "MOST_BYTES", 1 << 16)
    monkeypatch.setattr(disk_speed, "BLOCK_BYTES", 1 << 14)


def look(folder: Path) -> list[Check]:
    return examine(DoctorPlan(folder, folder / "cache"), {})


def by_name(checks: list[Check]) -> dict[str, Check]:
    assert len({check.name for check in checks}) == len(checks)
    return {check.name: check for check in checks}


def test_a_machine_that_runs_the_tests_has_no_failure(tmp_path: Path) -> None:
    checks = by_name(look(tmp_path))
    assert {
        "python",
        "cpu",
        "attention kernels",
        "compile",
        "memory",
        "disk",
        "run folder",
        "tensorboard",
    } <= set(checks)
    assert [check for check in checks.values() if check.state == "fail"] == []
    assert all(check.remedy for check in checks.values() if check.state != "ok")
    assert os.listdir(tmp_path) == []


def test_no_gpu_on_a_laptop_is_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(doctor, "driver_version", lambda: None)
    assert by_name(look(tmp_path))["gpu"] == Check("gpu", "ok", "none here: CPU only")


def test_a_driver_that_torch_cannot_use_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(doctor, "driver_version", lambda: "570.86")
    check = by_name(look(tmp_path))["gpu"]
    assert check.state == "warn"
    assert "570.86" in check.detail
    assert check.remedy


def test_missing_and_outdated_packages_fail_with_the_command_that_mends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        doctor, "requirements", lambda: {"numpy": ">=99", "no-such-package": ">=1", "rich": ""}
    )
    checks = by_name(look(tmp_path))
    assert checks["package numpy"].state == "fail"
    assert checks["package numpy"].remedy == "Run pip install 'numpy>=99'."
    assert "not installed" in checks["package no-such-package"].detail
    assert "package rich" not in checks
    assert "packages" not in checks


@pytest.mark.parametrize(("free", "state"), [(1e6, "fail"), (5e9, "warn"), (50e9, "ok")])
def test_little_disk_warns_and_none_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, state: str
) -> None:
    monkeypatch.setattr(host, "free_bytes", lambda folder: free)
    assert by_name(look(tmp_path))["disk"].state == state


def test_a_run_folder_that_cannot_be_made_fails(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    check = by_name(look(tmp_path / "runs" / "x"))["run folder"]
    assert check.state == "fail"
    assert "is a file" in check.detail


def test_a_wrong_clock_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.time, "time", lambda: 0.0)
    assert "clock differs" in by_name(look(tmp_path))["run folder"].detail


def test_without_a_compiler_compile_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert by_name(look(tmp_path))["compile"].state == "warn"


def test_no_working_attention_kernel_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "headway.kernels.attention.working_backends", lambda device: [("sdpa", False, "broken")]
    )
    check = by_name(look(tmp_path))["attention kernels"]
    assert check.state == "fail"
    assert "sdpa: broken" in check.detail


def test_the_verb_prints_json_and_exits_1_on_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--json"]) == 0
    healthy = json.loads(capsys.readouterr().out)
    assert healthy["ok"] is True
    assert {"name", "state", "detail", "remedy"} == set(healthy["checks"][0])
    monkeypatch.setattr(
        doctor,
        "examine",
        lambda plan, environment: [Check("disk", "fail", "0 B free", "Free some space.")],
    )
    assert main(["doctor"]) == 1
    assert "Free some space." in capsys.readouterr().out


def test_a_slow_or_broken_disk_is_named_with_its_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = disk_speed.measure(tmp_path / "not" / "yet")
    assert real.write > 0
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(disk_speed, "measure", lambda folder: DiskSpeed(20e6, 900e6))
    check = speed_check("run folder speed", tmp_path)
    assert check.state == "warn"
    assert "write 20.0 MB/s" in check.detail
    assert check.remedy

    def broken(folder: Path) -> DiskSpeed:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk_speed, "measure", broken)
    assert speed_check("run folder speed", tmp_path).state == "fail"


@pytest.mark.parametrize(("free", "state"), [(64e6, "fail"), (0.5e9, "warn"), (16e9, "ok")])
def test_little_shared_memory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, state: str
) -> None:
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr(host.shutil, "disk_usage", lambda path: usage)
    check = next(host.shared_memory_check(tmp_path))
    assert check.state == state
    assert (check.remedy is None) == (state == "ok")


def test_a_port_in_use_fails() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert host.port_check(port).state == "fail"
    assert host.port_check(port).state == "ok"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--fast", "--nproc", "2"], "--nproc has no meaning with --fast"),
        (["--nproc", "0"], "--nproc is 0"),
        (["--port", "99999"], "65535"),
        (["--master", "here"], "--master"),
        (["recipe", "--world", "8"], "--world is 8 without --gpu"),
        (["recipe", "laptop/sft", "--gpu", "h1000"], "Did you mean h100"),
        (["data", "laptop/stf"], "no such file"),
        (["data", "missing.jsonl"], "missing.jsonl"),
        (["data", "laptop/sft", "--document", "-1"], "counted from 0"),
    ],
)
def test_wrong_options_of_doctor_are_one_line_and_code_2(
    line: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *line]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_ranks_measure_their_collectives_and_compare_their_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_checks, "SECONDS_PER_CASE", 0.02)
    monkeypatch.setattr(rank_checks, "CPU_SIZES", (1 << 12, 1 << 16))
    monkeypatch.setattr(preflight, "RENAME_SECONDS", 0.05)

    def work(group: RankGroup) -> dict[str, Any]:
        process = Process(group.rank, 0, group.size, node=group.rank, num_nodes=group.size)
        return rank_checks.check_ranks(
            group, process, torch.device("cpu"), DoctorPlan(tmp_path, tmp_path), {}
        ).to_json()

    reports = run_ranks(work, 2)
    assert reports[0] == reports[1]
    report = RanksReport.from_json(reports[0])
    names = {check.name for check in report.checks}
    assert {
        "hosts",
        "versions",
        "clocks",
        "shared folder",
        "sum over ranks",
        "compute",
        "bandwidth",
    } <= names
    assert [bandwidth.collective for bandwidth in report.bandwidths] == [
        "all_reduce",
        "all_gather",
    ] * 2
    for measured in (
        report.bandwidths
    ):  # two ranks: an all-reduce sends each byte once, an all-gather half of them
        assert measured.bus == pytest.approx(
            measured.algorithm * (1 if measured.collective == "all_reduce" else 0.5)
        )
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_each_see_one_gpu_and_their_own_cores_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `srun --gpus-per-task=1`: two ranks of a host, each with one visible GPU (uuid) and one core.
    monkeypatch.setattr(
        rank_checks,
        "measure",
        lambda group, name, size, device: Bandwidth(name, size, 1.0, 1e12, 1e12),
    )
    monkeypatch.setattr(
        rank_checks, "sums_check", lambda group, device: Check("sum over ranks", "ok", "")
    )
    monkeypatch.setattr(rank_checks, "compute_checks", lambda group, device: [])
    monkeypatch.setattr(preflight, "RENAME_SECONDS", 0.05)

    def work(group: RankGroup) -> dict[str, Any]:
        properties = SimpleNamespace(uuid=f"gpu-{group.rank}")
        torch.cuda.get_device_properties = lambda device=None: properties  # pyright: ignore[reportAttributeAccessIssue]
        os.sched_getaffinity = lambda pid: {group.rank}
        process = Process(group.rank, group.rank, group.size)
        return rank_checks.check_ranks(
            group, process, torch.device("cuda", 0), DoctorPlan(tmp_path, tmp_path), {}
        ).to_json()

    report = RanksReport.from_json(run_ranks(work, 2)[0])
    assert [check.state for check in report.checks if check.name == "gpu count"] == ["ok"]
    assert "cores" not in {check.name for check in report.checks}


def test_ranks_on_the_same_gpu_are_a_failure() -> None:
    assert rank_checks.gpu_checks([None, None]) == []
    assert [check.state for check in rank_checks.gpu_checks(["a", "b"])] == ["ok"]
    (shared,) = rank_checks.gpu_checks(["a", "b", "a"])
    assert shared.state == "fail"
    assert "0, 2" in shared.detail


def test_a_slow_network_a_slow_gpu_and_a_wrong_one_are_named() -> None:
    slow = [Bandwidth("all_reduce", 256 << 20, 1.0, 0.3e9, 0.5e9)]
    gpu = torch.device("cuda")
    assert rank_checks.bandwidth_checks(slow, gpu, nodes=2)[0].state == "warn"
    assert rank_checks.bandwidth_checks(slow, torch.device("cpu"), nodes=2)[0].state == "ok"
    facts = [
        rank_checks.ComputeResult("a", "H100", 600e12, "x"),
        rank_checks.ComputeResult("a", "H100", 610e12, "x"),
        rank_checks.ComputeResult("b", "H100", 400e12, "y"),
    ]
    speed = rank_checks._speed_check(facts, is_gpu=True)
    assert speed.state == "warn"
    assert "rank 2 on b" in speed.detail
    wrong = rank_checks._result_check(facts)[0]
    assert wrong.state == "fail"
    assert "rank 2 on b" in wrong.detail
