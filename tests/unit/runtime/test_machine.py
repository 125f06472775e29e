"""A known GPU has its data sheet's peak; an unknown one has none; what is recorded of a machine names nobody."""

import importlib.util
import json
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from headway.runtime import machine
from headway.runtime.machine import (
    GpuLoad,
    _group_limits,
    describe,
    environment,
    git_state,
    gpu_load,
    package_version,
    peak_flops,
    ram_bytes,
    resident_bytes,
    source_commit,
)

KNOWN = {
    "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A100-PCIE-40GB": 312, "NVIDIA A100 80GB PCIe": 312, "A100-SXM4-40GB": 312,
    "NVIDIA A800-SXM4-80GB": 312, "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835, "NVIDIA H200": 989,
    "NVIDIA H800": 989, "NVIDIA H20": 148, "NVIDIA GH200 480GB": 989, "NVIDIA GH200 144G HBM3e": 989, "NVIDIA B200": 2250,
    "NVIDIA L40S": 362, "NVIDIA L4": 121, "NVIDIA A10": 125, "NVIDIA A40": 150, "NVIDIA GeForce RTX 4090": 165,
    "NVIDIA GeForce RTX 3090": 71,
}  # fmt: skip
UNKNOWN = [
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA A10G", "NVIDIA H1000",
    "AMD Instinct MI300X", "NVIDIA A100-SXM-64GB", "cpu", "",
]  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_gpu_has_its_peak(name: str) -> None:
    assert peak_flops(name, "bf16") == KNOWN[name] * 1e12


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_gpu_has_none(name: str) -> None:
    assert peak_flops(name, "bf16") is None


def test_a_type_without_a_unit_has_none() -> None:
    assert peak_flops("Tesla V100-SXM2-32GB", "bf16") is None
    assert peak_flops("Tesla V100-SXM2-32GB", "fp16") == 125e12
    assert peak_flops("NVIDIA H200", "tf32") == 494e12


def test_what_is_recorded_is_plain_data_without_host_user_or_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "very-secret-key")
    recorded = json.dumps(environment())
    assert "very-secret-key" not in recorded
    assert f'"{platform.node()}"' not in recorded
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", describe()["torch"])
    assert describe()["cores"] >= 1
    assert json.loads(recorded)["packages"]["numpy"] == package_version("numpy")


def test_git_state_names_the_commit_and_whether_files_changed(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    run = f"cd {tmp_path} && git init -q . && echo 1 > a && git add a && git -c user.name=n -c user.email=e commit -qm m"
    if os.system(f"({run}) >/dev/null 2>&1") != 0:
        pytest.skip("git is not installed")
    state = git_state(tmp_path)
    assert state is not None
    assert len(state["commit"]) == 40
    assert not state["changed"]
    (tmp_path / "a").write_text("2")
    changed = git_state(tmp_path)
    assert changed is not None
    assert changed["changed"]


def test_memory_is_counted_in_bytes() -> None:
    total, available = ram_bytes()
    resident = resident_bytes()
    if total is None or resident is None:
        pytest.skip("this system does not say")
    assert 10_000_000 < resident < total
    assert available is None or available <= total


@dataclass(frozen=True)
class ControlGroups:
    """How a version of control groups names its files."""

    root: str
    limit: str
    used: str
    cached: str
    of_process: str


VERSIONS = {
    1: ControlGroups(
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
        "4:memory:/job/step\n",
    ),
    2: ControlGroups("", "memory.max", "memory.current", "inactive_file", "0::/job/step\n"),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_memory_is_what_the_control_group_and_those_above_it_have(
    tmp_path: Path, version: int
) -> None:
    names = VERSIONS[version]
    for group, limit, used, cached in (("job", "900", 500, 100), ("job/step", "max", 300, 50)):
        folder = tmp_path / names.root / group
        folder.mkdir(parents=True)
        (folder / names.limit).write_text(f"{limit}\n")
        (folder / names.used).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\n{names.cached} {cached}\n")
    (tmp_path / "own").write_text(names.of_process)
    assert _group_limits(tmp_path, tmp_path / "own") == [(900, 400)]
    assert _group_limits(tmp_path, tmp_path / "none") == []


def test_without_a_gpu_its_load_is_not_known() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_load(0) == GpuLoad(None, None)


@pytest.mark.gpu
def test_a_gpu_is_described_and_its_load_is_asked_by_uuid() -> None:
    import torch

    driver = describe()["driver"]
    assert driver is not None
    assert re.fullmatch(r"\d+\.\d+.*", driver)
    assert describe()["gpus"][0]["name"] == torch.cuda.get_device_name(0)
    load = gpu_load(0)
    if importlib.util.find_spec("pynvml") is None:
        assert load == GpuLoad(None, None)
    else:
        assert load.utilisation is not None
        assert 0 <= load.utilisation <= 1
        assert load.power_watts is not None
        assert load.power_watts > 10


def test_a_process_may_use_what_its_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_group_limits", lambda *_: [(1 << 20, 3 << 18), (1 << 22, 0)])
    assert ram_bytes() == (1 << 20, 1 << 18)
    # more in use than allowed: nothing is left
    monkeypatch.setattr(machine, "_group_limits", lambda *_: [(1 << 20, 1 << 21)])
    assert ram_bytes() == (1 << 20, 0)


def test_the_commit_of_the_source_is_the_checkouts_or_the_recorded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "src" / "headway"
    (package / "runtime").mkdir(parents=True)
    monkeypatch.setattr("headway.runtime.machine.__file__", str(package / "runtime" / "machine.py"))
    assert source_commit() is None

    # A damaged file is not repeated on the screen.
    (package / "commit.txt").write_text("\x1b[31m not a commit")
    assert source_commit() is None
    (package / "commit.txt").write_text("0123456789ab, modified\n")
    assert source_commit() == "commit 0123456789ab, modified"

    run = f"cd {tmp_path} && git init -q . && echo 1 > a && git add a && git -c user.name=n -c user.email=e commit -qm m"
    if os.system(f"({run}) >/dev/null 2>&1") != 0:
        pytest.skip("git is not installed")
    state = git_state(tmp_path)
    assert state is not None
    assert source_commit() == f"commit {state['commit'][:12]}"
    (tmp_path / "a").write_text("2")
    assert source_commit() == f"commit {state['commit'][:12]}, modified"


def test_a_package_inside_of_another_repository_does_not_name_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / ".venv" / "site-packages" / "headway"
    (package / "runtime").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr("headway.runtime.machine.__file__", str(package / "runtime" / "machine.py"))
    assert source_commit() is None


@pytest.mark.parametrize(
    ("text", "has_bf16"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 avx512vl\n", True),
        ("flags\t: fpu amx_tile amx_bf16\n", True),
        # Without the instruction, bf16 products are computed in fp32 and are no faster.
        ("flags\t: fpu avx2 avx512f avx512_bf16x\n", False),
        ("Features\t: fp asimd bf16\n", False),
    ],
)
def test_bf16_products_are_read_from_the_flags_of_a_processor(
    tmp_path: Path, text: str, has_bf16: bool
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert machine.has_fast_bf16(path) is has_bf16


def test_a_system_without_cpuinfo_has_no_known_bf16(tmp_path: Path) -> None:
    assert machine.has_fast_bf16(tmp_path / "missing") is False
