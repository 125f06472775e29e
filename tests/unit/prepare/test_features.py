"""Tables of media: made once and found again, continued after a kill, shared between data sets, broken files by rule."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.data.samples import SampleSource, columns_of
from headway.errors import DataError
from headway.media.items import ImageSpec
from headway.media.png import write_png
from headway.prepare import features
from headway.prepare.features import (
    EncoderRows,
    InputRows,
    SampleSet,
    prepare_samples,
    read_samples,
)
from headway.prepare.media_inputs import ByteInput, ImageInput, content_hash


class Means:
    """A frozen encoder: the mean of each colour."""

    modality = "image"
    tokens = 1
    width = 3
    identity = "means"

    def __init__(self) -> None:
        self.input = ImageInput(ImageSpec(size=8, resize=8))
        self.encoded = 0

    def encode(self, inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self.encoded += len(inputs)
        return inputs.mean((2, 3), dtype=np.float32)[:, None]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Ten captions, eight with a picture; two pictures are equal."""
    for n in range(8):
        (tmp_path / f"{n}.png").write_bytes(write_png(np.full((8, 8, 3), 10 * (n % 7), np.uint8)))
    lines: list[dict[str, Any]] = [{"text": f"picture {n}", "image": f"{n}.png"} for n in range(8)]
    write(tmp_path / "all.jsonl", lines)
    write(tmp_path / "some.jsonl", lines[2:5])
    return tmp_path


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def prepared(data: Path, encoder: Means, name: str = "all.jsonl", **options: Any) -> SampleSet:
    makers = [InputRows("text", ByteInput(12)), EncoderRows(encoder)]
    return prepare_samples(
        name, read_samples(str(data / name), ("text", "image")), makers, data / "cache", **options
    )


def test_features_are_made_once_and_equal_pictures_share_a_row(data: Path) -> None:
    encoder = Means()
    features = prepared(data, encoder)
    assert encoder.encoded == 7
    assert len(features) == 8
    assert features.rows[0, 1] == features.rows[7, 1]
    np.testing.assert_allclose(
        features.tables[1].rows(features.rows[:, 1])[:, 0, 0], [10 * (n % 7) for n in range(8)]
    )
    assert (
        bytes(features.tables[0].rows([features.rows[3, 0]])[0, :9].astype(np.uint8))
        == b"picture 3"
    )
    again = prepared(data, Means())
    assert again.content_key == features.content_key
    other = Means()
    part = prepared(data, other, "some.jsonl")
    assert other.encoded == 0
    assert len(part) == 3
    other.identity = "other weights"
    prepared(data, other)
    assert other.encoded == 7


def test_a_killed_build_continues(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "BATCH_ITEMS", 2)
    monkeypatch.setattr("headway.store.media_table.COMMIT_BYTES", 1)
    whole = prepared(data, Means())
    (data / "cache").rename(data / "first")

    class Dies(Means):
        def encode(self, inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            if self.encoded >= 4:
                raise KeyboardInterrupt
            return super().encode(inputs)

    with pytest.raises(KeyboardInterrupt):
        prepared(data, Dies())
    encoder = Means()
    rebuilt = prepared(data, encoder)
    assert encoder.encoded == 3
    assert rebuilt.content_key == whole.content_key


def test_a_broken_file_is_an_error_or_counted_and_listed(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (data / "3.png").write_bytes((data / "3.png").read_bytes()[:-20])
    (data / "5.png").unlink()
    with pytest.raises(DataError, match=r"all\.jsonl:\d+: .*drop_bad"):
        prepared(data, Means())
    caplog.set_level(logging.WARNING, "headway")
    for _ in range(2):  # the second time from the cache: still counted
        caplog.clear()
        features = prepared(data, Means(), skip_bad=True)
        assert (features.rows[:, 1] < 0).tolist() == [n in (3, 5) for n in range(8)]
        assert (features.rows[:, 0] >= 0).all()
        assert len(features.bad) == 2
        assert {item.place.rsplit(":", 1)[1] for item in features.bad} == {"4", "6"}
        assert "2 items cannot be read and are left out" in caplog.text


def test_a_changed_file_is_read_again(data: Path) -> None:
    before = prepared(data, Means())
    (data / "2.png").write_bytes(write_png(np.full((8, 8, 3), 200, np.uint8)))
    after = prepared(data, Means())
    assert before.content_key != after.content_key
    assert float(after.tables[1].rows([after.rows[2, 1]]).max()) == 200


def test_conversations_videos_and_two_pictures_are_refused(data: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "a conversation": {
            "messages": [
                {"role": "user", "content": "<image>x"},
                {"role": "assistant", "content": "y"},
            ],
            "images": ["0.png"],
        },
        "two of modality image": {"text": "x", "images": ["0.png", "1.png"]},
    }
    for message, line in cases.items():
        write(data / "wrong.jsonl", [line])
        with pytest.raises(DataError, match=message):
            list(read_samples(str(data / "wrong.jsonl"), ("text", "image")))


def test_columns_have_zeros_where_nothing_is(data: Path) -> None:
    features = prepared(data, Means())
    rows = features.rows.copy()
    rows[1, 1] = -1
    media, present = columns_of(rows, features.tables)
    assert present[1].tolist() == [n != 1 for n in range(8)]
    assert not media[1][1].any()
    source = SampleSource("x", features.modalities, rows, features.tables, "k")
    assert (source.num_documents, source.num_tokens, source.lengths(0, 3).tolist()) == (
        8,
        8,
        [1, 1, 1],
    )
    assert content_hash("a") != content_hash("b")
