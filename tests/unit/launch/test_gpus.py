"""The choice of GPUs, against lists of devices as nvidia-smi prints them."""

import os
from pathlib import Path

import pytest
from support.runs import headway

from headway.errors import LaunchError
from headway.launch.gpus import Gpu, choose_gpus, is_type, parse_gpus, visible
from headway.runtime.machine import cuda_of_torch

BOX = """\
0, GPU-aaaa0000-1, NVIDIA A800 80GB PCIe, 81920, 3, 0
1, GPU-aaaa1111-1, NVIDIA A800 80GB PCIe, 81920, 40000, 0
2, GPU-bbbb2222-1, NVIDIA A40, 46068, 3, 55
3, GPU-bbbb3333-1, NVIDIA A40, 46068, 3, 0
4, GPU-cccc4444-1, NVIDIA RTX A4000, 16376, 3, [N/A]
"""


def devices() -> list[Gpu]:
    return parse_gpus(BOX)


def seen(wish: str, environment: dict[str, str] | None = None) -> str:
    choice = choose_gpus(wish, environment or {}, devices)
    assert choice.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    return choice.environment["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ("0,1", "0,1"),
        ("3, 0", "3,0"),
        ("GPU-bbbb3333-1", "3"),
        ("gpu-bbbb3", "3"),
        ("A800", "0,1"),
        ("a40", "2,3"),
        ("RTX A4000", "4"),
        ("A800,A40", "0,1,2,3"),
        ("auto", "0,3,4"),
    ],
)
def test_a_wish_becomes_visible_devices(wish: str, expected: str) -> None:
    assert seen(wish) == expected


def test_auto_names_what_it_skips_and_why() -> None:
    notes = choose_gpus("auto", {}, devices).notes
    assert any(
        "GPU 1 (NVIDIA A800 80GB PCIe) is skipped" in note and "49%" in note for note in notes
    )
    assert any("GPU 2 (NVIDIA A40) is skipped" in note and "55%" in note for note in notes)


def test_auto_with_no_free_gpu_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"no GPU is free: GPU 1 .*GPU 2"):
        choose_gpus("auto", {}, lambda: devices()[1:3])


def test_ids_count_the_entries_of_visible_devices_already_set() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "3,GPU-aaaa0000-1"}
    assert seen("0", environment) == "3"
    assert seen("1", environment) == "0"
    assert seen("A800", environment) == "0"
    with pytest.raises(LaunchError, match="Visible GPUs: 0 NVIDIA A40"):
        choose_gpus("2", environment, devices)


def test_an_entry_that_does_not_exist_ends_the_visible_list_as_in_cuda() -> None:
    assert [gpu.index for gpu in visible(devices(), "2,9,3")] == [2]
    assert visible(devices(), "") == []


@pytest.mark.parametrize("wish", ["7", "H100", "GPU-dddd", "GPU-aaaa", "A400", "NVIDIA A4"])
def test_what_does_not_exist_is_refused_with_what_does(wish: str) -> None:
    with pytest.raises(
        LaunchError,
        match=r"Visible GPUs: 0 NVIDIA A800 80GB PCIe GPU-aaaa0000, .*4 NVIDIA RTX A4000",
    ):
        choose_gpus(wish, {}, devices)


@pytest.mark.parametrize(
    ("wish", "words"), [("0,0", "named twice"), ("A800,0", "named twice"), ("0,,1", "empty")]
)
def test_a_contradictory_wish_is_refused(wish: str, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        choose_gpus(wish, {}, devices)


@pytest.mark.parametrize(
    ("wanted", "name", "expected"),
    [
        ("A40", "NVIDIA A40", True),
        ("A40", "NVIDIA RTX A4000", False),
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("A100", "NVIDIA A100-SXM4-80GB", True),
        ("rtx 4090", "NVIDIA GeForce RTX 4090", True),
        ("4090 rtx", "NVIDIA GeForce RTX 4090", False),
        ("-", "NVIDIA A40", False),
    ],
)
def test_a_type_is_matched_by_whole_words(wanted: str, name: str, expected: bool) -> None:
    assert is_type(wanted, name) is expected


def test_a_mix_of_types_warns_which_is_slowest() -> None:
    (warning,) = choose_gpus("A800,A40", {}, devices).warnings
    assert "waits for the slowest, NVIDIA A40 (150 TFLOP/s)" in warning
    (unknown,) = choose_gpus("0,4", {}, devices).warnings
    assert "the slowest is unknown (no peak for NVIDIA RTX A4000)" in unknown
    assert choose_gpus("A800", {}, devices).warnings == ()


def test_none_hides_all_gpus_and_asks_nobody() -> None:
    choice = choose_gpus("none", {}, lambda: pytest.fail("asked"))
    assert choice.gpus == ()
    assert choice.environment == {
        "CUDA_VISIBLE_DEVICES": "",
        "HEADWAY_GPUS": "",
    }


def test_auto_without_gpus_says_so() -> None:
    choice = choose_gpus("auto", {}, list)
    assert choice.gpus == ()
    assert "no GPU is visible here" in choice.notes[0]
    with pytest.raises(LaunchError, match="No GPU is visible here; use --gpus none"):
        choose_gpus("0", {}, list)


def test_a_mig_slice_is_not_chosen_by_number() -> None:
    with pytest.raises(LaunchError, match="MIG slice"):
        choose_gpus("0", {"CUDA_VISIBLE_DEVICES": "MIG-1234"}, devices)


@pytest.mark.skipif(cuda_of_torch() is not None, reason="the installed torch has CUDA")
def test_train_on_gpus_is_refused_where_torch_has_no_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\ncat <<'END'\n{BOX}END\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    done = headway("train", f"run.dir={tmp_path}/runs", "steps=1", "--gpus", "A800")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: gpus is 'A800'")
    assert "built without CUDA" in line
    assert "pip install" in line
    assert not (tmp_path / "runs").exists()
