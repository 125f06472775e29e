"""Killed saves, damaged files, full disks and hostile files: the older checkpoint stays, the damage is named, nothing is executed."""

import errno
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from support.crash_at_write import Killed, killed_at

from headway.checkpoint.load import newest_good, open_checkpoint
from headway.checkpoint.save import save_checkpoint
from headway.errors import CheckpointError
from headway.parallel.box import StateTensor


def records(value: float) -> list[StateTensor]:
    weight = torch.full((4, 4), value)
    return [
        StateTensor("w", "master", (4, 4), [((0, 0), weight[:2]), ((2, 0), weight[2:])]),
        StateTensor("w", "exp_avg", (4, 4), [((0, 0), weight * 2)]),
    ]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tok"
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


def save(folder: Path, step: int, tokenizer: Path | None = None) -> Path:
    return save_checkpoint(folder, step, records(float(step)), {"cursor": [step, 0]}, tokenizer)


def holds(folder: Path) -> tuple[int, float]:
    newest = newest_good(folder)
    assert newest.reader is not None
    assert newest.rejected == []
    assert newest.reader.scalars == {"cursor": [newest.reader.step, 0]}
    assert newest.reader.tokenizer_folder is not None
    return newest.reader.step, float(newest.reader.weight("w").unique())


@pytest.mark.parametrize("second", [2, 1], ids=["next step", "same step again"])
def test_a_save_killed_at_any_call_leaves_the_old_or_the_complete_new_one(
    tmp_path: Path, tokenizer: Path, second: int
) -> None:
    clean_save = tmp_path / "clean"
    save(clean_save, 1, tokenizer)
    with killed_at(10**9, clean_save) as calls:
        save(clean_save, second, tokenizer)
    assert len(calls) > 12
    seen = set()
    for call in range(len(calls)):
        folder = tmp_path / f"killed-{call}"
        save(folder, 1, tokenizer)
        with pytest.raises(Killed), killed_at(call, folder):
            save(folder, second, tokenizer)
        step, value = holds(folder)
        assert step in (1, second)
        assert value == step
        seen.add(step)
        save(folder, 3, tokenizer)
        assert holds(folder) == (3, 3.0)
        kept = {p.name for p in folder.iterdir()}
        assert kept <= {"latest", "step-00000001", "step-00000002", "step-00000003"}
        assert "step-00000001" in kept
        shutil.rmtree(folder)
    assert seen == {1, second}


def flip(path: Path, share: float) -> None:
    data = bytearray(path.read_bytes())
    data[int((len(data) - 1) * share)] ^= 0x04
    path.write_bytes(bytes(data))


DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
    "flipped at the start": lambda path: flip(path, 0.0),
    "flipped in the middle": lambda path: flip(path, 0.5),
    "flipped at three quarters": lambda path: flip(path, 0.75),
    "flipped near the end": lambda path: flip(path, 0.97),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"x"),
}


@pytest.mark.parametrize(
    "file", ["rank-00000.safetensors", "manifest.json", "tokenizer/tokenizer.json"]
)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_any_file_is_named_and_the_previous_checkpoint_is_used(
    tmp_path: Path, tokenizer: Path, file: str, damage: str
) -> None:
    folder = tmp_path / "c"
    save(folder, 1, tokenizer)
    newest = save(folder, 2, tokenizer)
    DAMAGE[damage](newest / file)
    result = newest_good(folder)
    assert result.path == folder / "step-00000001"
    [(path, reason)] = result.rejected
    assert path == newest
    assert str(newest / file) in reason
    assert "\n" not in reason


def test_every_single_bit_flip_of_the_tensor_file_is_found(tmp_path: Path) -> None:
    newest = save(tmp_path, 1)
    path = newest / "rank-00000.safetensors"
    good = path.read_bytes()
    for offset in range(len(good)):
        path.write_bytes(
            good[:offset] + bytes([good[offset] ^ (1 << offset % 8)]) + good[offset + 1 :]
        )
        assert newest_good(tmp_path).path is None, f"byte {offset}"
    path.write_bytes(good)
    assert newest_good(tmp_path).path == newest


def test_a_flipped_bit_is_found_by_a_plain_read_and_only_once_paid_for(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    flip(path / "rank-00000.safetensors", 1.0)
    with open_checkpoint(path) as reader:
        with pytest.raises(
            CheckpointError,
            match=r"rank-00000\.safetensors: damaged: the checksum of exp_avg:w\|0,0",
        ):
            reader.read("w", "exp_avg")
        assert torch.equal(reader.weight("w"), torch.full((4, 4), 1.0))


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("executed",)


def test_a_pickle_in_the_place_of_a_file_is_refused_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "c", 1)
    size = (path / "rank-00000.safetensors").stat().st_size
    payload = pickle.dumps(Payload())
    (path / "rank-00000.safetensors").write_bytes(payload + b"\0" * (size - len(payload)))
    (path / "optimizer.pt").write_bytes(payload)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: damaged"):
        open_checkpoint(path).weight("w")
    (path / "manifest.json").write_bytes(payload)
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged"):
        open_checkpoint(path)
    assert not (tmp_path / "executed").exists()


def test_a_manifest_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    from headway.checkpoint.manifest import CheckpointManifest, StoredFile, read_manifest

    for name in ("../secret", "/etc/passwd", ""):
        (tmp_path / "manifest.json").write_bytes(
            CheckpointManifest(1, 1, (StoredFile(name, 1),), {}, (), {}).to_bytes()
        )
        with pytest.raises(CheckpointError, match="is outside the checkpoint"):
            read_manifest(tmp_path)


def test_a_disk_that_fills_up_fails_the_save_in_one_line_and_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr("headway.runtime.storage.free_bytes", lambda path: 10)
    with pytest.raises(CheckpointError, match=r"the disk is full: \d+ bytes needed, 10 bytes free"):
        save(tmp_path, 2)
    monkeypatch.undo()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("headway.checkpoint.save.fsync_file", full)
    with pytest.raises(
        CheckpointError,
        match=r"rank-00000\.safetensors: the disk is full: \d+ bytes needed, \d+ bytes free",
    ):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]
    assert newest_good(tmp_path).path == tmp_path / "step-00000001"
