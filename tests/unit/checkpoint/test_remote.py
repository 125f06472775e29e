"""Checkpoints in S3, against a real server over HTTP: complete or absent, sent once, read in ranges, and faults cost time alone."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.s3_server import Store, serve_s3

from headway.checkpoint.config import CheckpointConfig
from headway.checkpoint.load import locate, newest_good, open_checkpoint
from headway.checkpoint.remote import RemoteCheckpoints
from headway.checkpoint.save import Writers, save_checkpoint
from headway.checkpoint.saver import SaveJob, Saver
from headway.config.load import load
from headway.errors import CheckpointError, ConfigError, ObjectStoreUnavailable
from headway.parallel.box import StateTensor
from headway.runtime import s3 as s3_module
from headway.runtime.paths import S3Path, parse_path
from headway.runtime.s3 import S3
from headway.train.config import Recipe

PLACE = S3Path("bucket", "runs/one")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(s3_module, "FIRST_PAUSE_SECONDS", 0.01)
    with serve_s3(monkeypatch) as running:
        yield running


def config(**values: Any) -> CheckpointConfig:
    return CheckpointConfig(**{"async": True, "retry_seconds": 3.0, "keep_last": 2, **values})


def saver(folder: Path, **values: Any) -> Saver:
    saver = Saver(folder, config(**values))
    saver.send_to(RemoteCheckpoints(PLACE, saver.config))
    return saver


def state(value: float, size: int = 1000) -> list[StateTensor]:
    weight = torch.arange(float(size)) + value
    half = size // 2
    return [
        StateTensor("w", "master", (size,), [((0,), weight[:half]), ((half,), weight[half:])]),
        StateTensor("b", "param", (3,), [((0,), torch.full((3,), value, dtype=torch.bfloat16))]),
    ]


def save(a_saver: Saver, step: int, loss: float | None = None) -> None:
    a_saver.save(
        SaveJob(step, {"valid": None if loss is None else {"web": {"loss": loss}}}),
        state(float(step)),
    )


def tokenizer(folder: Path) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


def test_a_text_is_parsed_as_a_local_path_or_a_bucket() -> None:
    assert (
        parse_path("s3://b/x/y")
        == parse_path("boto3:s3://b/x/y")
        == parse_path(Path("s3://b/x/y"))
        == S3Path("b", "x/y")
    )
    assert parse_path("boto3:s3://b.10.0.0.1:80/x") == S3Path("b", "x", "http://10.0.0.1:80")
    assert parse_path("local:/data/x") == Path("/data/x") == parse_path("/data/x")
    assert str(S3Path("b", "x") / "y") == "s3://b/x/y"
    assert (S3Path("b", "x/y")).parent == S3Path("b", "x")
    with pytest.raises(ConfigError, match="not an S3 path"):
        parse_path("s3://")


@pytest.mark.parametrize(
    "to",
    [
        "s3://user:hunter2@bucket/prefix",
        "s3:/user:hunter2@bucket/prefix",
        "boto3:s3://user:hunter2@bucket.10.0.0.1:80/prefix",
        "https://user:hunter2@store.example/bucket",
    ],
)
def test_a_place_with_credentials_is_refused_and_no_line_shows_them(to: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.to is .*\*\*\*@") as refused:
        load(Recipe, None, [f"checkpoint.to={to}"])
    assert "hunter2" not in str(refused.value)


def test_an_address_that_is_not_of_s3_is_no_folder() -> None:
    with pytest.raises(ConfigError, match=r"gs://b/x; expected s3://bucket/prefix or a folder"):
        load(Recipe, None, ["checkpoint.to=gs://b/x"])


def test_what_went_up_is_read_back_in_ranges_bit_for_bit(store: Store, tmp_path: Path) -> None:
    remote_saver = saver(tmp_path / "c")
    remote_saver.tokenizer = tokenizer(tmp_path / "tok")
    save(remote_saver, 5)
    remote_saver.require()
    with (
        open_checkpoint(tmp_path / "c" / "step-00000005") as local,
        open_checkpoint(f"{PLACE}/step-00000005") as remote,
    ):
        assert remote.names() == local.names()
        assert remote.scalars == local.scalars
        for name in local.names():
            for role in local.roles(name):
                assert torch.equal(remote.read(name, role), local.read(name, role))
        assert torch.equal(
            remote.read("w", "master", (450,), (100,)), local.read("w", "master", (450,), (100,))
        )
        remote.verify(deep=True)
        folder = remote.tokenizer_folder
        assert folder is not None
        assert (folder / "tokenizer.json").read_text() == '{"model": {}}'
    assert locate(str(PLACE)) == locate(f"{PLACE}/latest") == PLACE / "step-00000005"
    assert newest_good(PLACE).path == PLACE / "step-00000005"


def test_the_store_keeps_what_retention_says_and_the_disk_the_newest_and_the_best(
    store: Store, tmp_path: Path
) -> None:
    remote_saver = saver(tmp_path, keep_best=1, keep_every=30)
    for step, loss in ((10, 0.9), (20, 0.1), (30, 0.5), (40, 0.6), (50, 0.7)):
        save(remote_saver, step, loss)
        remote_saver.require()
    names = sorted(set(RemoteCheckpoints(PLACE, config()).names()))
    assert names == [f"step-{step:08}" for step in (20, 30, 40, 50)]
    assert locate(f"{PLACE}/best-1") == PLACE / "step-00000020"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best-1",
        "latest",
        "step-00000020",
        "step-00000050",
    ]


def test_errors_and_cut_lines_cost_time_alone(store: Store, tmp_path: Path) -> None:
    remote_saver = saver(tmp_path)
    told = list[str]()
    seen = dict[tuple[str, str], int]()
    remote_saver.on_failure(told.append)

    def every_first_time(method: str, path: str) -> int | None:
        seen[method, path] = seen.get((method, path), 0) + 1
        return {1: 500, 2: -1}.get(seen[method, path])

    store.fault = every_first_time
    save(remote_saver, 5)
    remote_saver.require()
    assert torch.equal(
        open_checkpoint(f"{PLACE}/step-00000005").weight("w"), torch.arange(1000.0) + 5
    )
    assert told
    assert "trying again" in told[0]


def test_a_server_that_hangs_is_asked_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "READ_SECONDS", 0.3)
    remote_saver = saver(tmp_path)
    slow = iter([1.0])
    store.fault = lambda method, path: next(slow, None) if method == "PUT" else None
    save(remote_saver, 5)
    remote_saver.require()
    assert remote_saver.saved_step == 5
    assert newest_good(PLACE).path is not None


def test_a_store_that_stays_down_fails_the_save_keeps_the_local_one_and_is_caught_up_with(
    store: Store, tmp_path: Path
) -> None:
    remote_saver = saver(tmp_path, retry_seconds=0.1)
    told = list[str]()
    remote_saver.on_failure(told.append)
    save(remote_saver, 5)
    remote_saver.require()
    store.fault = lambda method, path: 503
    for step in (10, 15):
        save(remote_saver, step)
        remote_saver.wait()
    with pytest.raises(CheckpointError, match="does not answer"):
        remote_saver.require()
    assert any("step 10 was not uploaded: " in text for text in told)
    assert any("2 uploads in a row" in text for text in told)
    assert newest_good(tmp_path).path == tmp_path / "step-00000015", (
        "nothing is lost: it is whole on the disk"
    )
    store.fault = lambda method, path: None
    assert newest_good(PLACE).path == PLACE / "step-00000005"
    again = saver(tmp_path)
    again.resume_upload()
    again.require()
    assert newest_good(PLACE).path == PLACE / "step-00000015"


def test_a_save_does_not_wait_for_a_store_that_is_down(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "HURRY_SECONDS", 0.2)
    remote_saver = saver(tmp_path, retry_seconds=60)
    told = list[str]()
    is_down = True
    remote_saver.on_failure(told.append)
    store.fault = lambda method, path: 503 if is_down else None
    begun = time.monotonic()
    for step in (5, 10, 15):
        save(remote_saver, step)
    assert time.monotonic() - begun < 15, "nobody waits a minute"
    while not any("was not uploaded" in text for text in told):
        assert time.monotonic() - begun < 30, "a newer one waits: the older one is given up soon"
        time.sleep(0.01)
    is_down = False
    remote_saver.require()
    unsent = [text for text in told if "was not uploaded" in text]
    assert (
        unsent and "step 5 " in unsent[0] and not any("step 15 was" in text for text in unsent)
    ), "a newer one took its place"
    assert newest_good(PLACE).path == PLACE / "step-00000015"
    assert newest_good(tmp_path).path == tmp_path / "step-00000015"


def test_an_upload_that_was_cut_off_is_continued_not_repeated(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(s3_module, "THREADS", 1)
    size = 4 * (5 << 20) // 4
    records = [StateTensor("w", "master", (size,), [((0,), torch.arange(float(size)))])]
    path = save_checkpoint(tmp_path, 5, records, {})
    parts = iter(range(100))
    store.fault = lambda method, path: (
        500 if method == "PUT" and "partNumber" in path and next(parts) >= 2 else None
    )
    remote = RemoteCheckpoints(PLACE, config(retry_seconds=0.0))
    with pytest.raises(CheckpointError, match="does not answer"):
        remote.publish(path, Writers())
    assert newest_good(PLACE).path is None, "without its manifest it is no checkpoint"
    store.fault = lambda method, path: None
    store.bytes_sent = 0
    RemoteCheckpoints(PLACE, config()).publish(path, Writers())
    assert 2 * (5 << 20) <= store.bytes_sent < 3 * (5 << 20) + (1 << 20), (
        "two of five parts were there already"
    )
    assert torch.equal(
        open_checkpoint(f"{PLACE}/step-00000005").weight("w"), torch.arange(float(size))
    )
    assert S3().abort_uploads(PLACE) == 0


def test_the_uploads_of_a_run_whose_name_begins_alike_are_left_alone(
    store: Store, tmp_path: Path
) -> None:
    S3().call(
        PLACE, "create_multipart_upload", Key="runs/one-more/step-00000005/rank-00000.safetensors"
    )
    remote_saver = saver(tmp_path)
    save(remote_saver, 5)
    remote_saver.require()
    assert S3().abort_uploads(S3Path("bucket", "runs/one-more")) == 1


def test_other_bytes_under_the_same_name_are_sent_anew(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "PART_BYTES", 5 << 20)
    big = tmp_path / "f"
    big.write_bytes(b"a" * (11 << 20))
    parts = iter(range(100))
    store.fault = lambda method, path: 500 if method == "PUT" and next(parts) >= 2 else None
    with pytest.raises(CheckpointError):
        S3(retry_seconds=0).upload(PLACE / "f", big)
    store.fault = lambda method, path: None
    big.write_bytes(b"b" * (11 << 20))
    S3().upload(PLACE / "f", big)
    assert S3().read(PLACE / "f") == b"b" * (11 << 20)


def test_what_can_never_succeed_is_refused_at_once_in_one_line(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"^s3://no-such/x/\.ping-.*: the store refuses: NoSuchBucket.*Check the bucket",
    ):
        RemoteCheckpoints(S3Path("no-such", "x"), config(retry_seconds=60)).probe()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(ConfigError, match="Set AWS_ACCESS_KEY_ID"):
        RemoteCheckpoints(PLACE, config()).probe()


def test_a_damaged_object_is_named_and_never_loaded(store: Store, tmp_path: Path) -> None:
    remote_saver = saver(tmp_path)
    for step in (5, 10):
        save(remote_saver, step)
        remote_saver.require()
    target = PLACE / "step-00000010" / "rank-00000.safetensors"
    content = bytearray(S3().read(target) or b"")
    content[-2] ^= 1
    S3().write(target, bytes(content))
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: damaged"):
        open_checkpoint(PLACE / "step-00000010").verify()
    S3().write(target, bytes(content[:-1]))
    newest = newest_good(PLACE)
    assert newest.path == PLACE / "step-00000005"
    assert "bytes" in newest.rejected[0][1]


def test_a_store_that_is_down_is_no_reason_to_go_back_to_an_older_checkpoint(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(S3.__init__, "__defaults__", (None, 0.1))
    remote_saver = saver(tmp_path)
    for step in (5, 10):
        save(remote_saver, step)
        remote_saver.require()
    store.fault = lambda method, path: 503 if method == "GET" and "step-00000010" in path else None
    with pytest.raises(ObjectStoreUnavailable, match="does not answer"):
        newest_good(PLACE)


def test_going_back_takes_later_ones_out_of_the_way(store: Store, tmp_path: Path) -> None:
    remote_saver = saver(tmp_path)
    for step in (5, 10):
        save(remote_saver, step)
        remote_saver.require()
    assert RemoteCheckpoints(PLACE, config()).set_aside_later(5) == [PLACE / "step-00000010"]
    assert newest_good(PLACE).path == PLACE / "step-00000005"
