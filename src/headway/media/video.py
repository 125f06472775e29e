"""Video as frames and sound, through PyAV. In: a `MediaRef` of MP4, MOV, WebM, Matroska or AVI;
out: frames spread evenly, or the sound.

    decode_frames(ref, 16, ImageSpec())    uint8 [16, 3, 224, 224]
    parts_of(ref, 4)                       references to four pictures and the sound, which models
                                           read like any other picture and sound

Packets are counted before anything is decoded; then every frame is decoded in order and the wanted
ones are kept. Invariant: the container is chosen by the file's first bytes. FFmpeg never guesses
it: a playlist would make it open other files.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.errors import ConfigError, DataError, first_line
from headway.media.items import (
    LIMITS,
    ImageSpec,
    MediaLimits,
    MediaRef,
    check_pixels,
    check_sound,
    fit_image,
)
from headway.runtime.optional import need

if TYPE_CHECKING:
    from numpy.typing import NDArray

FRAME = "frame "
SOUND = "sound"
CHECKED_FRAMES = 16
"""Spread over a video that is checked; all frames up to the last of them are decoded."""
MATROSKA = b"\x1a\x45\xdf\xa3"
"""The first bytes of EBML: Matroska and WebM."""


def decode_frames(
    ref: MediaRef, count: int, spec: ImageSpec, limits: MediaLimits = LIMITS
) -> NDArray[np.uint8]:
    """`count` frames that are spread evenly over a video, `[count, 3, size, size]`. A video with
    fewer frames repeats some."""
    need("PIL", ref.name)
    data = ref.read(limits)
    total = _count_packets(data, ref.name, limits)
    numbers = [_frame_number(number, count, total) for number in range(count)]
    return _pick(data, ref.name, numbers, spec, limits)


def check_video(ref: MediaRef, limits: MediaLimits = LIMITS) -> None:
    """Decode the frames and the sound of a video; what cannot be read is an error."""
    # The last of them is near the end, and all frames before it are decoded.
    decode_frames(ref, CHECKED_FRAMES, ImageSpec(), limits)
    _track(ref.read(limits), ref.name, limits)


def read_track(
    data: bytes, name: str, limits: MediaLimits = LIMITS
) -> tuple[NDArray[np.float32], int]:
    """The sound of an MP4 file, `[samples, 1]` and its rate."""
    track = _track(data, name, limits)
    if track is None:
        raise DataError(f"{name}: the file holds no sound.")
    return track


def _container(data: bytes, name: str) -> str:
    if data[4:8] == b"ftyp":
        return "mp4"
    if data.startswith(MATROSKA):
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    raise DataError(
        f"{name}: not an MP4, MOV, WebM, Matroska or AVI file (it begins with "
        f"{data[:12].hex(' ')})."
    )


@contextmanager
def _opened(data: bytes, name: str) -> Iterator[Any]:
    kind = _container(data, name)
    need("av", name)
    import av

    # No protocol at all: bytes in memory are the only thing that FFmpeg may read.
    try:
        with av.open(
            io.BytesIO(data), format=kind, options={"protocol_whitelist": "none"}
        ) as container:
            yield container
    except DataError:
        raise
    except (av.FFmpegError, ValueError, RuntimeError, MemoryError, EOFError) as error:
        raise DataError(
            f"{name}: the video is damaged or of an unknown kind ({first_line(error)})."
        ) from None


def _frame_number(number: int, count: int, total: int) -> int:
    """Which of all frames is the `number`th of `count` that are spread evenly: the middle of each
    of `count` equal parts."""
    return int((number + 0.5) * total / count)


def _pick(
    data: bytes, name: str, wanted: list[int], spec: ImageSpec, limits: MediaLimits
) -> NDArray[np.uint8]:
    """The frames of these numbers, which ascend; the last frame of the video stands for any beyond
    it."""
    pictures: list[NDArray[np.uint8]] = []
    last: Any = None
    with _opened(data, name) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number >= limits.video_frames:
                raise DataError(
                    f"{name}: more than {limits.video_frames} frames; at most that many are "
                    "decoded."
                )
            check_pixels(name, frame.width, frame.height, limits)
            last = frame

            # A short video has one frame several times, which is fitted once.
            while len(pictures) < len(wanted) and wanted[len(pictures)] <= number:
                if pictures and wanted[len(pictures)] == wanted[len(pictures) - 1]:
                    pictures.append(pictures[-1])
                else:
                    pictures.append(fit_image(frame.to_image(), spec))
            if len(pictures) == len(wanted):
                break

        if last is None:
            raise DataError(f"{name}: no frame can be decoded.")
        if len(pictures) < len(wanted):  # some packets carry no frame
            pictures += [fit_image(last.to_image(), spec)] * (len(wanted) - len(pictures))
    return np.stack(pictures)


def decode_frame(ref: MediaRef, spec: ImageSpec, limits: MediaLimits = LIMITS) -> NDArray[np.uint8]:
    """One frame of a video, `[3, size, size]`: `frame 2/4` of a ref is the second of four that are
    spread evenly."""
    number, _, count = ref.part.removeprefix(FRAME).partition("/")
    if not (
        ref.part.startswith(FRAME)
        and number.isdigit()
        and count.isdigit()
        and 1 <= int(number) <= int(count)
    ):
        raise ConfigError(
            f"{ref.name}: {ref.part!r} is not a picture of a video; frame 1/4 is one."
        )
    need("PIL", ref.name)
    data = ref.read(limits)
    total = _count_packets(data, ref.name, limits)
    wanted = _frame_number(int(number) - 1, int(count), total)
    return _pick(data, ref.name, [wanted], spec, limits)[0]


def parts_of(ref: MediaRef, frames: int, limits: MediaLimits = LIMITS) -> list[MediaRef]:
    """A video as `frames` pictures and its sound, if it has one. Only its header is read."""
    with _opened(ref.read(limits), ref.name) as container:
        if not container.streams.video:
            raise DataError(f"{ref.name}: the file holds no pictures.")
        has_sound = bool(container.streams.audio)
    refs: list[MediaRef] = []
    for number in range(1, frames + 1):
        part = f"{FRAME}{number}/{frames}"
        refs.append(MediaRef("image", ref.path, ref.data, f"{ref.name} ({part})", part))
    if has_sound:
        refs.append(MediaRef("audio", ref.path, ref.data, f"{ref.name} ({SOUND})", SOUND))
    return refs


def _count_packets(data: bytes, name: str, limits: MediaLimits) -> int:
    """The number of video packets, after the limits on size and length have been checked."""
    with _opened(data, name) as container:
        if not container.streams.video:
            raise DataError(f"{name}: the file holds no pictures.")
        stream = container.streams.video[0]
        check_pixels(name, stream.codec_context.width, stream.codec_context.height, limits)
        seconds = (container.duration or 0) / 1e6
        if seconds > limits.video_seconds:
            raise DataError(
                f"{name}: {seconds:.0f} seconds of video; at most {limits.video_seconds:g} are "
                "decoded."
            )
        # Headers may lie about the number of frames; packets cost little to count.
        total = 0
        for packet in container.demux(stream):
            total += packet.size > 0
            if total > limits.video_frames:
                raise DataError(
                    f"{name}: more than {limits.video_frames} frames; at most that many are "
                    "decoded."
                )
    if total == 0:
        raise DataError(f"{name}: the video is cut short: it holds no frame.")
    return total


def _track(data: bytes, name: str, limits: MediaLimits) -> tuple[NDArray[np.float32], int] | None:
    """The first sound track, mono, at its own rate; None if there is none."""
    blocks: list[NDArray[np.float32]] = []
    with _opened(data, name) as container:
        if not container.streams.audio:
            return None
        import av

        rate = int(container.streams.audio[0].codec_context.sample_rate or 0)
        check_sound(name, rate, 1, 0, limits)
        mono = av.AudioResampler(format="fltp", layout="mono", rate=rate)
        count = 0
        for frame in container.decode(audio=0):
            for part in mono.resample(frame):
                blocks.append(np.asarray(part.to_ndarray()[0], np.float32))
                count += len(blocks[-1])
            check_sound(name, rate, 1, count, limits)
        # What the resampler still holds back.
        for part in mono.resample(None):
            blocks.append(np.asarray(part.to_ndarray()[0], np.float32))
    samples = np.concatenate(blocks) if blocks else np.zeros(0, np.float32)
    if len(samples) == 0:
        return None
    if not np.isfinite(samples).all():
        raise DataError(f"{name}: the sound holds values that are not finite.")
    return samples[:, None], rate
