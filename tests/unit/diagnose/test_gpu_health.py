"""nvidia-smi's answers on several kinds of GPU become one line each; a sick GPU fails with a remedy, a healthy one does not."""

import subprocess
from typing import Any

import pytest

from headway.diagnose import gpu_health
from headway.diagnose.check import Check
from headway.diagnose.gpu_health import (
    QUERY,
    health_checks,
    parse_gpu_health,
    parse_topology,
    read_gpu_health,
    topology_check,
)

H100 = "0, NVIDIA H100 80GB HBM3, 81559, 4, 34, 71.45, 700.00, 0, 0, 0, [N/A], No, No, 0x0000000000000001, 5, 5, 16, 16"
A100 = "3, NVIDIA A100-SXM4-80GB, 81920, 12, 31, 62.10, 400.00, 0, 0, 0, No, No, No, 0x0000000000000004, 4, 4, 16, 16"
V100 = "1, Tesla V100-SXM2-32GB, 32768, 0, 41, 44.02, 300.00, 0, 0, 2, No, [N/A], [N/A], 0x0000000000000000, 3, 3, 16, 16"
RTX_4090 = "0, NVIDIA GeForce RTX 4090, 24564, 21003, 61, 310.22, 450.00, 99, [N/A], [N/A], [N/A], [N/A], [N/A], 0x0000000000000000, 4, 4, 16, 16"
T4 = "2, Tesla T4, 15360, 2, 48, [N/A], 70.00, 0, 0, 0, 0, No, No, 0x0000000000000001, 3, 3, 8, 16"


def check_of(row: str) -> Check:
    return next(health_checks(parse_gpu_health(row + "\n")))


@pytest.mark.parametrize("row", [H100, A100, V100])
def test_a_healthy_gpu_is_ok_and_described(row: str) -> None:
    check = check_of(row)
    assert check.state == "ok"
    assert check.remedy is None
    assert row.split(", ")[1] in check.detail
    assert "°C" in check.detail
    assert " W of " in check.detail


def test_unknown_values_are_unknown_and_not_zero() -> None:
    gpu = parse_gpu_health(RTX_4090)[0]
    assert gpu.uncorrected_errors is None
    assert gpu.corrected_errors is None
    assert gpu.utilisation == 0.99
    assert "no ECC" in check_of(RTX_4090).detail
    assert parse_gpu_health(T4)[0].watts is None


@pytest.mark.parametrize(
    ("row", "field", "value", "state", "said"),
    [
        (A100, "ecc.errors.uncorrected.volatile.total", "2", "fail", "2 uncorrected ECC errors"),
        (A100, "remapped_rows.failure", "Yes", "fail", "no spare rows"),
        (H100, "remapped_rows.pending", "Yes", "warn", "next reset"),
        (V100, "retired_pages.pending", "Yes", "warn", "next reset"),
        (
            H100,
            "clocks_throttle_reasons.active",
            "0x0000000000000048",
            "fail",
            "hardware slowdown, thermal slowdown (hardware)",
        ),
        (
            H100,
            "clocks_throttle_reasons.active",
            "0x0000000000000020",
            "warn",
            "thermal slowdown (software)",
        ),
        (H100, "clocks_throttle_reasons.active", "0x0000000000000080", "fail", "power brake"),
        (A100, "ecc.errors.corrected.volatile.total", "12345", "warn", "12345 corrected"),
        (A100, "temperature.gpu", "91", "warn", "hot (91 °C)"),
        (A100, "pcie.link.width.current", "4", "warn", "PCIe x4 of x16"),
        (A100, "memory.used", "70000", "warn", "85% of its memory"),
    ],
)
def test_each_fault_has_its_state_and_a_remedy(
    row: str, field: str, value: str, state: str, said: str
) -> None:
    cells = row.split(", ")
    cells[QUERY.index(field)] = value
    check = check_of(", ".join(cells))
    assert check.state == state
    assert said in check.detail
    assert check.remedy


def test_mixed_types_are_named_and_broken_lines_are_skipped() -> None:
    text = f"{H100}\nUnable to determine the device handle for GPU 0000:1B:00.0: Unknown Error\n{A100}\n"
    checks = list(health_checks(parse_gpu_health(text)))
    assert [check.name for check in checks] == ["gpu 0 health", "gpu 3 health", "gpu types"]
    assert checks[-1].state == "warn"


def answers(monkeypatch: pytest.MonkeyPatch, *outputs: tuple[int, str]) -> list[list[str]]:
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        code, text = outputs[min(len(asked), len(outputs) - 1)]
        asked.append(command)
        return subprocess.CompletedProcess(command, code, text, "")

    monkeypatch.setattr(gpu_health.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(gpu_health.subprocess, "run", run)
    return asked


def test_a_driver_that_renamed_or_dropped_a_field_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = ", ".join(
        cell
        for cell, name in zip(
            H100.replace("0x0000000000000001", "0x8").split(", "), QUERY, strict=True
        )
        if name != "retired_pages.pending"
    )
    refused = 'Field "{}" is not a valid field to query.\n'
    asked = answers(
        monkeypatch,
        (2, refused.format("clocks_throttle_reasons.active")),
        (2, refused.format("retired_pages.pending")),
        (0, row),
    )
    gpus, problem = read_gpu_health()
    assert problem is None
    assert gpus[0].slowed_by == ["hardware slowdown"]
    assert not gpus[0].pages_pending
    assert len(asked) == 3


def test_a_driver_that_does_not_answer_fails_and_no_driver_is_no_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers(
        monkeypatch,
        (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."),
    )
    assert read_gpu_health()[1] is not None
    assert read_gpu_health()[1].state == "fail"

    def hang(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 30)

    monkeypatch.setattr(gpu_health.subprocess, "run", hang)
    problem = read_gpu_health()[1]
    assert problem is not None
    assert "may hang" in problem.detail
    assert problem.remedy
    monkeypatch.setattr(gpu_health.shutil, "which", lambda name: None)
    assert read_gpu_health() == ([], None)


NVLINK = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPIX\t0-55\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tNODE\t0-55\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tSYS\t56-111\t1\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tSYS\t56-111\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
"""


def test_a_topology_of_nvlink_is_one_line() -> None:
    check = topology_check(parse_topology(NVLINK))
    assert check is not None
    assert check.state == "ok"
    assert "6 of 6 pairs: NVLink (NV18)" in check.detail


def test_a_pair_across_cpu_sockets_warns() -> None:
    pcie = NVLINK.replace("NV18", "PHB").replace("GPU0\t X \tPHB\tPHB", "GPU0\t X \tPHB\tSYS")
    check = topology_check(parse_topology(pcie))
    assert check is not None
    assert check.state == "warn"
    assert "across CPU sockets" in check.detail
    assert check.remedy


def test_a_pair_without_nvlink_among_others_warns_about_tensor_ranks() -> None:
    uneven = NVLINK.replace("GPU0\t X \tNV18\tNV18", "GPU0\t X \tNV18\tSYS")
    check = topology_check(parse_topology(uneven))
    assert check is not None
    assert check.state == "warn"
    assert "tensor" in (check.remedy or "")


def test_a_single_gpu_has_no_topology() -> None:
    assert topology_check(parse_topology("\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n")) is None
