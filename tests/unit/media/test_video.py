"""Videos become evenly spread frames and a log-mel; other containers, long and damaged ones are one line."""

import io
from fractions import Fraction

import numpy as np
import pytest

from headway.errors import DataError
from headway.media.items import AudioSpec, ImageSpec, MediaLimits, MediaRef, decode_audio
from headway.media.video import VideoSpec, decode_video

av = pytest.importorskip("av")
SPEC = VideoSpec(4, ImageSpec(16, 16), AudioSpec(64))


def film(frames: int = 24, kind: str = "mp4", sound: bool = True) -> bytes:
    """Grey frames that grow brighter from 0 to 230, with a tone of 1000 Hz."""
    out = io.BytesIO()
    with av.open(out, "w", format=kind) as container:
        stream = container.add_stream("mpeg4", rate=12)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        track = container.add_stream("aac", rate=16_000, layout="mono") if sound else None
        for number in range(frames):
            pixels = np.full((32, 32, 3), 10 * number % 240, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        container.mux(stream.encode())
        if track is not None:
            wave = (0.5 * np.sin(2 * np.pi * 1000 * np.arange(frames * 16_000 // 12) / 16_000)).astype(np.float32)
            frame = av.AudioFrame.from_ndarray(wave[None], format="fltp", layout="mono")
            frame.sample_rate, frame.time_base, frame.pts = 16_000, Fraction(1, 16_000), 0
            for packet in [*track.encode(frame), *track.encode(None)]:
                container.mux(packet)
    return out.getvalue()


FILM = film()


def video(data: bytes) -> MediaRef:
    return MediaRef("video", data=data, name="a.mp4")


@pytest.mark.parametrize("kind", ["mp4", "matroska", "avi"])
def test_frames_are_spread_evenly_over_the_video(kind: str) -> None:
    found = decode_video(video(FILM if kind == "mp4" else film(kind=kind)), SPEC)
    assert found.frames.shape == (4, 3, 16, 16) and found.frames.dtype == np.uint8
    means = found.frames.reshape(4, -1).mean(axis=1)
    assert abs(means - [30, 90, 150, 210]).max() < 12
    assert found.audio is not None and found.audio.shape == (64, 64)
    assert abs(int(found.audio[:, 32].argmax()) - 23) <= 4


def test_a_video_without_sound_and_one_of_few_frames() -> None:
    found = decode_video(video(film(2, sound=False)), SPEC)
    assert found.audio is None and found.frames.shape == (4, 3, 16, 16)


def test_the_sound_of_an_mp4_can_be_read_alone() -> None:
    mel = decode_audio(MediaRef("audio", data=FILM, name="a.m4a"), AudioSpec(64))
    np.testing.assert_array_equal(mel, decode_video(video(FILM), SPEC).audio)


def test_long_large_damaged_and_other_files_are_one_line() -> None:
    with pytest.raises(DataError, match="2 seconds of video; at most 1 are decoded"):
        decode_video(video(FILM), SPEC, MediaLimits(video_seconds=1))
    with pytest.raises(DataError, match="more than 10 frames"):
        decode_video(video(FILM), SPEC, MediaLimits(video_frames=10))
    with pytest.raises(DataError, match="at most 100 are decoded"):
        decode_video(video(FILM), SPEC, MediaLimits(image_pixels=100))
    playlist = b"#EXTM3U\n#EXTINF:10,\nfile:///etc/hostname\n"
    for damaged in (b"", playlist, FILM[:40], FILM[: len(FILM) // 3], b"\x1a\x45\xdf\xa3" + bytes(100)):
        with pytest.raises(DataError, match=r"^a\.mp4: "):
            decode_video(video(damaged), SPEC)
