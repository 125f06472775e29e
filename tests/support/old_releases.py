"""Archives that earlier releases wrote (tests/golden/*_release): unpacked, resumed and compared with what those releases computed."""

import hashlib
import json
import platform
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from support.runs import headway

GOLDEN = Path(__file__).parents[1] / "golden"


def unpack_release(name: str, folder: Path) -> dict[str, Any]:
    """The archive of a release unpacked into a folder, and what it expects."""
    with tarfile.open(GOLDEN / name / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return json.loads((folder / "expected.json").read_text(encoding="utf-8"))


def is_same_machine(expected: dict[str, Any]) -> bool:
    """Whether numbers are comparable bit for bit: the kind of processor and the torch that made the archive."""
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return cpu == expected["cpu"] and torch.__version__ == expected["torch"]


def flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under slashed keys; a single validation set is `valid/...`, however deep it is nested."""
    values: dict[str, Any] = {}
    for key, value in record.items():
        if key == "time":
            continue
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{key}/")
        else:
            values[f"{prefix}{key}".replace("valid/valid/", "valid/")] = value
    return values


def checksums(folder: Path) -> dict[str, str]:
    """Of every tensor in the safetensors files of a folder."""
    digests: dict[str, str] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                content = (
                    file.get_tensor(name)
                    .contiguous()
                    .reshape(-1)
                    .view(torch.uint8)
                    .numpy()
                    .tobytes()
                )
                digests[f"{path.relative_to(folder)}:{name}"] = hashlib.sha256(content).hexdigest()
    return digests


def names_of(folder: Path) -> list[str]:
    """The entries of a folder that may not exist."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir())


ADDED = ("full_heads", "streaming_heads", "expected_sparsity")
"""Metrics that came after both releases: runs with head gates count the heads of each kind for their MFU, and what their gates
expect."""


def assert_resumes(
    release: Path, name: str, wanted: dict[str, Any], *, bit_for_bit: bool, same_caches: bool = True
) -> None:
    """An interrupted run of the archive goes on and ends with the metrics and weights of the undisturbed one.

    The current folder is the archive's: its recipes name files relative to it.
    """
    run = release / "runs" / name
    first_line = (run / "metrics.jsonl").read_text().splitlines()[0]
    stores = names_of(release / "cache" / "stores")
    resumed = headway("train", f"{name}.yaml")
    assert resumed.returncode == 0, resumed.stderr
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert lines[0] == first_line, "the run began again instead of resuming"
    records = [
        {key: value for key, value in flat(json.loads(line)).items() if key not in ADDED}
        for line in lines
    ]
    expected = [flat(record) for record in wanted["metrics"]]
    if bit_for_bit:
        assert records == expected
        assert checksums(run / "final") == wanted["weights"]
    assert [list(record) for record in records] == [list(record) for record in expected]
    for record, other in zip(records, expected, strict=True):
        for key, value in record.items():
            if isinstance(value, float):
                assert value == pytest.approx(other[key], rel=1e-4, abs=1e-5), key
            else:
                assert value == other[key], key
    if same_caches:
        assert names_of(release / "cache" / "stores") == stores, "a text cache was not found again"
