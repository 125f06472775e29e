"""The doctor tells a healthy machine from a sick one, with a remedy for each trouble, quickly and without a trace."""

import json
import os
from pathlib import Path

import pytest

from headway.cli import main
from headway.diagnose import doctor
from headway.diagnose.doctor import Check, examine


def by_name(checks: list[Check]) -> dict[str, Check]:
    assert len({check.name for check in checks}) == len(checks)
    return {check.name: check for check in checks}


def test_a_machine_that_runs_the_tests_has_no_failure(tmp_path: Path) -> None:
    checks = by_name(examine(tmp_path))
    assert {"python", "cpu", "attention kernels", "compile", "memory", "disk", "run folder", "tensorboard"} <= set(checks)
    assert [check for check in checks.values() if check.state == "fail"] == []
    assert all(check.remedy for check in checks.values() if check.state != "ok")
    assert os.listdir(tmp_path) == []


def test_no_gpu_on_a_laptop_is_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(doctor, "driver_version", lambda: None)
    assert by_name(examine(tmp_path))["gpu"] == Check("gpu", "ok", "none here: CPU only")


def test_a_driver_that_torch_cannot_use_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(doctor, "driver_version", lambda: "570.86")
    found = by_name(examine(tmp_path))["gpu"]
    assert found.state == "warn" and "570.86" in found.detail and found.remedy


def test_missing_and_outdated_packages_fail_with_the_command_that_mends_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "requirements", lambda: {"numpy": ">=99", "no-such-package": ">=1", "rich": ""})
    checks = by_name(examine(tmp_path))
    assert checks["package numpy"].state == "fail" and checks["package numpy"].remedy == "Run pip install 'numpy>=99'."
    assert "not installed" in checks["package no-such-package"].detail
    assert "package rich" not in checks and "packages" not in checks


@pytest.mark.parametrize(("free", "state"), [(1e6, "fail"), (5e9, "warn"), (50e9, "ok")])
def test_little_disk_warns_and_none_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, state: str) -> None:
    monkeypatch.setattr(doctor, "free_bytes", lambda folder: free)
    assert by_name(examine(tmp_path))["disk"].state == state


def test_a_run_folder_that_cannot_be_made_fails(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    found = by_name(examine(tmp_path / "runs" / "x"))["run folder"]
    assert found.state == "fail" and "is a file" in found.detail


def test_a_wrong_clock_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.time, "time", lambda: 0.0)
    assert "clock differs" in by_name(examine(tmp_path))["run folder"].detail


def test_without_a_compiler_compile_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert by_name(examine(tmp_path))["compile"].state == "warn"


def test_no_working_attention_kernel_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.kernels.attention.working_backends", lambda device: [("sdpa", False, "broken")])
    found = by_name(examine(tmp_path))["attention kernels"]
    assert found.state == "fail" and "sdpa: broken" in found.detail


def test_the_verb_prints_json_and_exits_1_on_a_failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor", "--json"]) == 0
    healthy = json.loads(capsys.readouterr().out)
    assert healthy["ok"] is True and {"name", "state", "detail", "remedy"} == set(healthy["checks"][0])
    monkeypatch.setattr(doctor, "examine", lambda run_dir: [Check("disk", "fail", "0 B free", "Free some space.")])
    assert main(["doctor"]) == 1
    assert "Free some space." in capsys.readouterr().out
