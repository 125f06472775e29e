"""Videos become evenly spread frames and a log-mel; other containers, long and damaged ones are one line."""

from pathlib import Path

import numpy as np
import pytest
from support.small_video import film

from headway.errors import DataError
from headway.media.items import (
    AudioSpec,
    ImageSpec,
    MediaLimits,
    MediaRef,
    decode_audio,
    decode_image,
)
from headway.media.records import MediaOptions, parse_media_record
from headway.media.video import decode_frames
from headway.records.multimodal import parse_media
from headway.text.document import Record

av = pytest.importorskip("av")
SPEC = ImageSpec(16, 16)
SOUND = AudioSpec(64)


FILM = film()


def video(data: bytes) -> MediaRef:
    return MediaRef("video", data=data, name="a.mp4")


def sound(data: bytes) -> MediaRef:
    return MediaRef("audio", data=data, name="a.mp4 (sound)", part="sound")


@pytest.mark.parametrize("kind", ["mp4", "matroska", "avi"])
def test_frames_are_spread_evenly_over_the_video(kind: str) -> None:
    data = FILM if kind == "mp4" else film(kind=kind)
    frames = decode_frames(video(data), 4, SPEC)
    assert frames.shape == (4, 3, 16, 16)
    assert frames.dtype == np.uint8
    means = frames.reshape(4, -1).mean(axis=1)
    assert abs(means - [30, 90, 150, 210]).max() < 12
    mel = decode_audio(sound(data), SOUND)
    assert mel.shape == (64, 64)
    assert abs(int(mel[:, 32].argmax()) - 23) <= 4


def test_sound_at_another_rate_has_the_same_pitch() -> None:
    plain = decode_audio(sound(film(rate=16_000)), SOUND)
    wide = decode_audio(sound(film(rate=32_000)), SOUND)
    assert int(wide[:, 32].argmax()) == int(plain[:, 32].argmax())
    # half of the samples would be a tone of 500 Hz
    assert float(np.abs(wide[:, 20:44] - plain[:, 20:44]).mean()) < 6


def test_a_video_without_sound_has_frames_and_its_sound_is_refused() -> None:
    silent = film(2, sound=False)
    assert decode_frames(video(silent), 4, SPEC).shape == (4, 3, 16, 16)
    with pytest.raises(DataError, match="holds no sound"):
        decode_audio(sound(silent), SOUND)


def test_the_sound_of_an_mp4_can_be_read_alone() -> None:
    mel = decode_audio(MediaRef("audio", data=FILM, name="a.m4a"), SOUND)
    np.testing.assert_array_equal(mel, decode_audio(sound(FILM), SOUND))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (MediaLimits(video_seconds=1), "2 seconds of video; at most 1 are decoded"),
        (MediaLimits(video_frames=10), "more than 10 frames"),
        (MediaLimits(image_pixels=100), "at most 100 are decoded"),
    ],
    ids=["seconds", "frames", "pixels"],
)
def test_a_video_beyond_a_limit_is_refused(limits: MediaLimits, message: str) -> None:
    with pytest.raises(DataError, match=message):
        decode_frames(video(FILM), 4, SPEC, limits)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"#EXTM3U\n#EXTINF:10,\nfile:///etc/hostname\n",
        FILM[:40],
        FILM[: len(FILM) // 3],
        b"\x1a\x45\xdf\xa3" + bytes(100),
    ],
    ids=["empty", "playlist", "header", "a third", "zeros"],
)
def test_a_file_that_is_no_whole_video_is_refused_by_name(content: bytes) -> None:
    with pytest.raises(DataError, match=r"^a\.mp4: "):
        decode_frames(video(content), 4, SPEC)


def test_a_video_of_a_record_stands_for_pictures_and_its_sound(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(FILM)
    (tmp_path / "b.mp4").write_bytes(film(4, sound=False))
    turns = [
        {"role": "user", "content": "<video>One? <video>Two?"},
        {"role": "assistant", "content": "Yes."},
    ]
    path = str(tmp_path / "a.jsonl")
    media_record = parse_media_record(
        Record({"messages": turns, "videos": ["a.mp4", "b.mp4"]}, path, 1),
        MediaOptions(video_frames=2),
    )
    conversation = parse_media(media_record)
    assert conversation.turns[0].content == "<image><image><audio>One? <image><image>Two?"
    assert [(ref.modality, ref.part) for ref in conversation.media] == [
        ("image", "frame 1/2"), ("image", "frame 2/2"), ("audio", "sound"), ("image", "frame 1/2"), ("image", "frame 2/2")]  # fmt: skip
    frames = [decode_image(ref, SPEC) for ref in conversation.media[:2]]
    np.testing.assert_array_equal(np.stack(frames), decode_frames(video(FILM), 2, SPEC))
    mel = decode_audio(conversation.media[2], SOUND)
    np.testing.assert_array_equal(mel, decode_audio(sound(FILM), SOUND))
    assert len({ref.content_hash() for ref in conversation.media}) == 5
    caption = parse_media_record(Record({"text": "x", "video": "a.mp4"}, path, 2))
    assert [(ref.modality, ref.part) for ref in caption.media] == [
        ("image", "frame 1/1"),
        ("audio", "sound"),
    ]
    unmarked = parse_media(
        parse_media_record(
            Record({"instruction": "What?", "response": "x", "video": "b.mp4"}, path, 3)
        )
    )
    assert unmarked.turns[0].content == "<image>\n" * 4 + "What?"


def test_videos_whose_marks_are_not_clear_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(FILM)
    turns = [{"role": "user", "content": "<video>One?"}, {"role": "assistant", "content": "Yes."}]
    for record, why in (
        (
            {"messages": turns, "videos": ["a.mp4", "a.mp4"]},
            "1 <video> marks in the texts, but 2 video files",
        ),
        ({"messages": turns, "video": "a.mp4", "image": "a.png"}, "beside other media"),
        ({"messages": turns, "video": "none.mp4"}, "No such file"),
    ):
        with pytest.raises(DataError, match=why):
            parse_media_record(Record(record, str(tmp_path / "a.jsonl"), 1))
