"""Pictures and sounds as arrays. In: a `MediaRef` (a file, or bytes with a name); out: arrays of
one shape for every file.

    decode_image(ref, ImageSpec())   PNG, JPEG, WebP       uint8   [3, 224, 224]  red, green, blue
    decode_audio(ref, AudioSpec())   WAV, FLAC, OGG, MP3   float32 [64, 256]      log-mel in dB
    decode_waveform(ref, 16000)      the same files        float32 [samples]      mono

A log-mel has time to the right; waveforms are for encoders with their own features.
`media/video.py` decodes videos and .m4a sounds, which need PyAV.

Invariant: sizes are checked before anything is decoded (`MediaLimits`), only regular files are
read, and a file that cannot be decoded is a DataError that names it. The defaults are PurrSight's:
224 pixels cropped from 256; 64 mels x 256 frames at 16 kHz.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headway.errors import ConfigError, DataError, first_line
from headway.media.image_header import IMAGE_KINDS, image_size
from headway.media.png import read_plain_png
from headway.media.sound import LogMel, is_cut, read_wave, resample, trim_silence
from headway.runtime.json_file import read_bounded
from headway.runtime.optional import is_installed, need

if TYPE_CHECKING:
    from numpy.typing import NDArray

Modality = Literal["image", "audio", "video"]
MODALITIES: tuple[Modality, ...] = ("image", "audio", "video")
MEGA = 1 << 20
AUDIO_KINDS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")
SAMPLE_RATES = (1000, 768_000)
"""The lowest and the highest rate of a sound that is read."""
BLOCK_SAMPLES = 1 << 18
"""Samples that are decoded before their number is checked again."""
MP3_SHARE = 0.95
"""The length of an MP3 file is an estimate where it has no table of its frames; so much of it must
be there."""


@dataclass(frozen=True)
class MediaLimits:
    """The largest file of each kind that is decoded. A file above a limit is refused by its header,
    before memory is taken."""

    image_pixels: int = 64_000_000
    image_bytes: int = 128 * MEGA
    audio_seconds: float = 600.0
    audio_bytes: int = 512 * MEGA
    audio_channels: int = 32
    video_seconds: float = 600.0
    video_frames: int = 36_000
    video_bytes: int = 2048 * MEGA

    def bytes_of(self, modality: Modality) -> int:
        """The largest file of a modality."""
        if modality == "image":
            return self.image_bytes
        if modality == "audio":
            return self.audio_bytes
        return self.video_bytes


LIMITS = MediaLimits()


@dataclass(frozen=True)
class MediaRef:
    """One picture, sound or video: a file on disk, or bytes (of a tar, a Parquet row, a data: URI)
    and their name."""

    modality: Modality
    path: Path | None = None
    data: bytes | None = field(default=None, repr=False)
    name: str = ""
    part: str = ""
    """Of a video: `frame 2/4` is a picture of it, `sound` its sound; empty: the whole file."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.data is None):
            raise ConfigError(f"a {self.modality} needs either a path or bytes.")
        # object.__setattr__: the class is frozen.
        if self.path is not None:
            object.__setattr__(self, "path", Path(self.path))
        if not self.name:
            name = f"{self.modality} bytes"
            if self.path is not None:
                name = str(self.path)
            object.__setattr__(self, "name", name)

    def size(self) -> int:
        """The number of bytes; only regular files have one."""
        if self.data is not None:
            return len(self.data)
        assert self.path is not None
        try:
            status = os.stat(self.path)
        except (OSError, ValueError) as error:  # ValueError: a null character in the name
            raise DataError(
                f"{self.name}: cannot be read: {getattr(error, 'strerror', None) or error}."
            ) from None
        # A pipe or device would block, or never end.
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{self.name}: is not a file.")
        return status.st_size

    def read(self, limits: MediaLimits = LIMITS) -> bytes:
        """All bytes of a file that is not above its limit."""
        # A part is read out of the whole video.
        kind: Modality = "video" if self.part else self.modality
        max_bytes = limits.bytes_of(kind)
        if self.size() > max_bytes:
            raise DataError(
                f"{self.name}: {self.size()} bytes; {kind} files have at most {max_bytes}."
            )
        if self.data is not None:
            return self.data
        assert self.path is not None
        try:
            return read_bounded(self.path, max_bytes)
        except OSError as error:
            raise DataError(f"{self.name}: cannot be read: {error.strerror}.") from None

    def content_hash(self, limits: MediaLimits = LIMITS) -> str:
        """The name of the content: sha256 of the bytes, the same for equal files wherever they
        lie."""
        # The kind is part of it: the frames and the sound of one video are different contents.
        kind: str = self.modality
        if self.part:
            kind = f"{self.modality} {self.part}"
        return hashlib.sha256(kind.encode() + b"\0" + self.read(limits)).hexdigest()


@dataclass(frozen=True)
class ImageSpec:
    """How a picture becomes pixels. `resize` is the shorter side before a centre crop to `size`;
    other fits need no `resize`."""

    size: int = 224
    resize: int | None = 256
    fit: Literal["crop", "pad", "stretch"] = "crop"
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    background: tuple[int, int, int] = (255, 255, 255)
    """Behind transparent pixels."""
    pad_colour: tuple[int, int, int] = (0, 0, 0)
    """Around a picture that `fit: pad` makes square."""

    def __post_init__(self) -> None:
        if self.fit not in ("crop", "pad", "stretch"):
            raise ConfigError(f"fit is {self.fit!r}; it must be crop, pad or stretch.")
        if not 1 <= self.size <= 4096:
            raise ConfigError(f"size is {self.size}; it must be 1 to 4096 pixels.")
        if self.fit == "crop" and self.resize is not None and not self.size <= self.resize <= 8192:
            raise ConfigError(
                f"resize is {self.resize}; it must be at least size ({self.size}) and at most 8192."
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of a decoded picture."""
        return (3, self.size, self.size)


@dataclass(frozen=True)
class AudioSpec:
    """How a sound becomes a log-mel picture: mono, without silence at its ends, cropped or padded
    with silence to `frames`."""

    frames: int = 256
    mel: LogMel = LogMel()
    trim_db: float | None = -40.0
    """Ends that are quieter than this below the loudest part are cut; None: nothing is cut."""

    def __post_init__(self) -> None:
        if not 1 <= self.frames <= 100_000:
            raise ConfigError(f"frames is {self.frames}; it must be 1 to 100000.")
        if self.trim_db is not None and not self.trim_db < 0:
            raise ConfigError(f"trim_db is {self.trim_db}; it must be below 0.")

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a decoded sound."""
        return (self.mel.mels, self.frames)


def decode_image(
    ref: MediaRef, spec: ImageSpec = ImageSpec(), limits: MediaLimits = LIMITS
) -> NDArray[np.uint8]:
    """The pixels of a picture, `[3, size, size]`; its EXIF orientation is applied."""
    if ref.part:
        from headway.media.video import decode_frame

        return decode_frame(ref, spec, limits)

    data = ref.read(limits)
    kind, width, height = image_size(data, ref.name)
    check_pixels(ref.name, width, height, limits)

    # Generated pictures of the right size need no Pillow.
    if width == height == spec.size and spec.resize in (None, spec.size):
        plain = read_plain_png(data, ref.name)
        if plain is not None:
            return np.ascontiguousarray(plain.transpose(2, 0, 1))
    need("PIL", f"{ref.name} ({kind})")
    return fit_image(open_image(data, ref.name, limits), spec)


def check_pixels(name: str, width: int, height: int, limits: MediaLimits) -> None:
    """Refuse a picture whose header claims more pixels than the limit."""
    if width < 1 or height < 1:
        raise DataError(f"{name}: {width} x {height} pixels; the picture is empty.")
    if width * height > limits.image_pixels:
        raise DataError(
            f"{name}: {width} x {height} pixels; at most {limits.image_pixels} are decoded."
        )


def open_image(data: bytes, name: str, limits: MediaLimits, *, as_stored: bool = False) -> Any:
    """A decoded Pillow image, upright and in RGB or RGBA; or as it is stored, in any mode."""
    from PIL import Image, ImageOps

    try:
        # Pillow knows many formats, some of which start other programs.
        image = Image.open(io.BytesIO(data), formats=IMAGE_KINDS)
        check_pixels(name, image.width, image.height, limits)
        image.load()
        if as_stored:
            return image
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16 bits; Pillow would clip at 255
            values = np.asarray(image, dtype=np.int64).clip(0, 65535) >> 8
            image = Image.fromarray(values.astype(np.uint8))
        has_alpha = image.mode in ("RGBA", "LA", "PA", "La", "RGBa")
        is_transparent = has_alpha or "transparency" in image.info
        return image.convert("RGBA" if is_transparent else "RGB")
    except DataError:
        raise
    except MemoryError:
        raise DataError(f"{name}: there is not enough memory to decode the picture.") from None
    except Exception as error:  # Pillow's plugins raise many types for damaged files
        raise DataError(
            f"{name}: the picture is damaged or cut short ({first_line(error)})."
        ) from None


def fit_image(image: Any, spec: ImageSpec) -> NDArray[np.uint8]:
    """A Pillow image, resized and cropped, padded or stretched to the spec."""
    from PIL import Image

    if image.mode == "RGBA":
        behind = Image.new("RGBA", image.size, (*spec.background, 255))
        image = Image.alpha_composite(behind, image).convert("RGB")
    interpolation = Image.Resampling.BILINEAR
    if spec.interpolation == "bicubic":
        interpolation = Image.Resampling.BICUBIC

    width, height = image.size
    if spec.fit == "pad" and width != height:
        side = max(width, height)
        # Scaled first: a picture of 1 x 1,000,000 pixels must not become a square of that side.
        width = max(1, round(width * spec.size / side))
        height = max(1, round(height * spec.size / side))
        square = Image.new("RGB", (spec.size, spec.size), spec.pad_colour)
        corner = ((spec.size - width) // 2, (spec.size - height) // 2)
        square.paste(image.resize((width, height), interpolation), corner)
        image = square
    elif spec.fit == "crop":
        image = _crop(image, spec.size, spec.resize or spec.size, interpolation)
    if image.size != (spec.size, spec.size):
        image = image.resize((spec.size, spec.size), interpolation)
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))


def _crop(image: Any, size: int, shorter: int, interpolation: Any) -> Any:
    """The centre of an image whose shorter side is `shorter`. Only the part that is kept is
    resized, so long thin pictures cost nothing."""
    width, height = image.size
    short = min(width, height)
    # The sides that the whole picture would have, and the corner of the crop in it.
    resized_width = shorter * width // short
    resized_height = shorter * height // short
    left = (resized_width - size) // 2
    top = (resized_height - size) // 2

    # The same box in pixels of the original.
    across = width / resized_width
    down = height / resized_height
    box = (
        left * across,
        top * down,
        min(width, (left + size) * across),
        min(height, (top + size) * down),
    )
    return image.resize((size, size), interpolation, box=box)


def decode_audio(
    ref: MediaRef, spec: AudioSpec = AudioSpec(), limits: MediaLimits = LIMITS
) -> NDArray[np.float32]:
    """The log-mel of a sound, `[mels, frames]`: its middle if it is longer, with silence around it
    if it is shorter."""
    return fit_audio(decode_waveform(ref, spec.mel.sample_rate, limits), spec)


def fit_audio(samples: NDArray[np.float32], spec: AudioSpec) -> NDArray[np.float32]:
    """The log-mel of mono samples at the spec's rate."""
    if spec.trim_db is not None:
        samples = trim_silence(samples, spec.trim_db, spec.mel.n_fft, spec.mel.hop)
    # Windows are centred: the first is at sample 0, the last at (frames - 1) * hop.
    missing = (spec.frames - 1) * spec.mel.hop - len(samples)
    if missing > 0:
        samples = np.pad(samples, (missing // 2, missing - missing // 2))
    return spec.mel(samples, spec.frames)


def decode_waveform(
    ref: MediaRef, sample_rate: int, limits: MediaLimits = LIMITS
) -> NDArray[np.float32]:
    """The samples of a sound, mono, at this rate, about -1 to 1."""
    # Mono first: one channel to resample.
    samples, rate = read_samples(ref, limits)
    return resample(samples.mean(axis=1, dtype=np.float32), rate, sample_rate)


def read_samples(ref: MediaRef, limits: MediaLimits = LIMITS) -> tuple[NDArray[np.float32], int]:
    """`[samples, channels]` and the rate of a sound; an empty one and values that are not finite
    are refused."""
    samples, rate = _stored_samples(ref, limits)
    if len(samples) == 0:
        raise DataError(f"{ref.name}: the sound is empty.")
    if not np.isfinite(samples).all():
        raise DataError(f"{ref.name}: the sound holds values that are not finite.")
    return samples, rate


def _stored_samples(ref: MediaRef, limits: MediaLimits) -> tuple[NDArray[np.float32], int]:
    """`[samples, channels]` and the rate. Without soundfile, PCM WAV files are read by the standard
    library."""
    data = ref.read(limits)
    # A video, or .m4a: AAC inside MP4, which soundfile cannot read.
    if ref.part or data[4:8] == b"ftyp":
        from headway.media.video import read_track

        return read_track(data, ref.name, limits)
    if not is_installed("soundfile"):
        sound = read_wave(
            data,
            ref.name,
            lambda rate, channels, count: check_sound(ref.name, rate, channels, count, limits),
        )
        if sound is not None:
            return sound
        need("soundfile", ref.name)

    if is_cut(data):
        raise DataError(f"{ref.name}: the sound is cut short.")
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.format not in AUDIO_KINDS:
                raise DataError(
                    f"{ref.name}: {file.format} audio; WAV, FLAC, OGG or MP3 is expected."
                )
            check_sound(ref.name, file.samplerate, file.channels, file.frames, limits)

            max_samples = int(limits.audio_seconds * file.samplerate)
            blocks: list[NDArray[Any]] = []
            count = 0
            # Headers lie: what is decoded is counted too.
            while len(block := file.read(BLOCK_SAMPLES, dtype="float32", always_2d=True)):
                count += len(block)
                check_sound(
                    ref.name, file.samplerate, file.channels, min(count, max_samples + 1), limits
                )
                blocks.append(block)

            share = MP3_SHARE if file.format == "MP3" else 1
            if not blocks or count < file.frames * share:
                raise DataError(
                    f"{ref.name}: the sound is cut short: {count} of {file.frames} samples."
                )
            return np.concatenate(blocks), file.samplerate
    except (soundfile.SoundFileError, RuntimeError, ValueError, OSError) as error:
        raise DataError(
            f"{ref.name}: the sound is damaged or of an unknown kind ({first_line(error)})."
        ) from None


def check_sound(name: str, rate: int, channels: int, samples: int, limits: MediaLimits) -> None:
    """Refuse a sound that is too long, has too many channels or an impossible rate."""
    if not SAMPLE_RATES[0] <= rate <= SAMPLE_RATES[1]:
        raise DataError(
            f"{name}: {rate} samples a second; {SAMPLE_RATES[0]} to {SAMPLE_RATES[1]} are read."
        )
    if not 1 <= channels <= limits.audio_channels:
        raise DataError(f"{name}: {channels} channels; 1 to {limits.audio_channels} are read.")
    if samples > limits.audio_seconds * rate:
        raise DataError(
            f"{name}: {samples / rate:.0f} seconds of sound; at most {limits.audio_seconds:g} are "
            "decoded."
        )
