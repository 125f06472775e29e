"""Samples of sound in numpy: PCM WAV files, another sample rate, silence at the ends, log-mel
pictures.

    LogMel      power spectrum of Hann windows (centred, reflected ends)
                -> mel filters of equal area -> 10 log10(max(power, 1e-10))

These are the features of PANNs and librosa; a test compares them with transformers' `audio_utils`.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from headway.errors import ConfigError, DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

ZERO_CROSSINGS = 16
"""Zeros of the sinc on each side of a new sample, after which it is cut off."""
CUTOFF_SHARE = 0.98
"""Of the lower Nyquist rate: the filter needs room to fall off below it."""
CHUNK_VALUES = 1 << 21
"""Weights of new samples that are computed at once."""
FLOOR = 1e-10
"""Power of silence: -100 dB."""
FRAMES_AT_ONCE = 8
"""Of a product with the mel filters. Small products stay on one thread: with two the BLAS waited
eight times as long as it computed."""
STREAMED = 0xFFFFFF00
"""Sizes from here on were written by a program that did not know the length."""

# Slaney's mel scale, as librosa has it: linear to 1000 Hz, then 27 mels for a factor of 6.4.
LINEAR_HZ = 200.0 / 3
LOG_HZ = 1000.0
LOG_STEP = np.log(6.4) / 27


@dataclass(frozen=True)
class LogMel:
    """How samples become a log-mel picture."""

    sample_rate: int = 16_000
    n_fft: int = 512
    hop: int = 160
    mels: int = 64
    fmin: float = 50.0
    fmax: float = 8000.0

    def __post_init__(self) -> None:
        if not 0 <= self.fmin < self.fmax <= self.sample_rate / 2:
            raise ConfigError(
                f"fmin is {self.fmin:g} and fmax {self.fmax:g}; 0 <= fmin < fmax <= "
                f"{self.sample_rate / 2:g} is expected."
            )
        if min(self.n_fft, self.hop, self.mels) < 1:
            raise ConfigError("n_fft, hop and mels must be at least 1.")

    def __call__(
        self, samples: NDArray[np.float32], frames: int | None = None
    ) -> NDArray[np.float32]:
        """`[mels, frames]`: all frames, or the `frames` in the middle; dB."""
        power = magnitudes(samples, self.n_fft, self.hop, frames) ** 2
        filters = mel_filters(self)
        parts = [
            power[first : first + FRAMES_AT_ONCE] @ filters
            for first in range(0, len(power), FRAMES_AT_ONCE)
        ]
        energy = np.concatenate(parts)
        return (10 * np.log10(np.maximum(energy, FLOOR))).T.astype(np.float32)


def magnitudes(
    samples: NDArray[np.float32], n_fft: int, hop: int, frames: int | None = None
) -> NDArray[np.float64]:
    """Spectra of Hann windows, centred, with reflected ends, `[frames, 1 + n_fft / 2]`: all, or the
    `frames` in the middle."""
    half = n_fft // 2
    if len(samples) <= half:  # too short to reflect
        samples = np.pad(samples, (0, half + 1 - len(samples)))
    num_windows = 1 + len(samples) // hop
    num_kept = num_windows if frames is None else min(frames, num_windows)
    first = (num_windows - num_kept) // 2
    padded = np.pad(samples, half, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, n_fft)[first * hop :: hop]
    windows = windows[:num_kept]
    # The periodic form, which divides by n_fft: scipy's fftbins, torch's default.
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n_fft) / n_fft)
    return np.abs(np.fft.rfft(windows * hann, axis=1))


@lru_cache(maxsize=16)
def mel_filters(spec: LogMel) -> NDArray[np.float64]:
    """Triangles of equal area on the mel scale, `[1 + n_fft / 2, mels]`: linear to 1000 Hz,
    logarithmic above."""
    # librosa.filters.mel with its default norm="slaney": triangle m rises from edge m to m + 1 and
    # falls to m + 2, with an area of 1.
    edges = _hz(np.linspace(_mel(spec.fmin), _mel(spec.fmax), spec.mels + 2))
    bins = np.linspace(0, spec.sample_rate / 2, 1 + spec.n_fft // 2)
    slopes = edges[None, :] - bins[:, None]
    widths = np.diff(edges)
    up = -slopes[:, :-2] / widths[:-1]
    down = slopes[:, 2:] / widths[1:]
    return np.maximum(0, np.minimum(up, down)) * (2.0 / (edges[2:] - edges[:-2]))


def _mel(hz: float) -> float:
    """The mel of a frequency f in Hz: f / (200 / 3) below 1000 Hz, else 15 + 27 ln(f / 1000) / ln
    6.4."""
    if hz < LOG_HZ:
        return hz / LINEAR_HZ
    return float(LOG_HZ / LINEAR_HZ + np.log(hz / LOG_HZ) / LOG_STEP)


def _hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    """The inverse of `_mel`."""
    knee = LOG_HZ / LINEAR_HZ
    logarithmic = LOG_HZ * np.exp(LOG_STEP * (np.maximum(mel, knee) - knee))
    return np.where(mel < knee, mel * LINEAR_HZ, logarithmic)


def resample(samples: NDArray[np.float32], rate: int, new_rate: int) -> NDArray[np.float32]:
    """Samples at another rate: a windowed sinc at each new time, cut off below the lower of both
    Nyquist rates.

    out[n] = sum_k w[n, k] samples[k], w[n, k] = sinc(d) cos^2(pi d / (2 ZERO_CROSSINGS)),
    normalised, d = cutoff * (k - n * rate / new_rate) for |d| <= ZERO_CROSSINGS
    """
    if rate == new_rate or len(samples) == 0:
        return samples
    cutoff = min(1.0, new_rate / rate) * CUTOFF_SHARE
    reach = int(np.ceil(ZERO_CROSSINGS / cutoff))
    count = -(-len(samples) * new_rate // rate)
    padded = np.pad(samples.astype(np.float64), reach)
    out = np.empty(count, np.float32)
    offsets = np.arange(-reach + 1, reach + 1)
    # Arrays of a chunk stay near 30 MB also where a high rate makes the sinc long.
    step = max(1, CHUNK_VALUES // (2 * reach))
    for start in range(0, count, step):
        # Whole numbers: in floats the time of a late sample of a long sound would be inexact.
        times = np.arange(start, min(count, start + step), dtype=np.int64) * rate
        whole = times // new_rate
        fraction = (times % new_rate) / new_rate
        distance = (offsets[None, :] - fraction[:, None]) * cutoff
        window = np.cos(np.clip(distance / ZERO_CROSSINGS, -1, 1) * (np.pi / 2)) ** 2
        weights = np.sinc(distance) * window
        # Constant sounds stay constant.
        weights /= weights.sum(axis=1, keepdims=True)
        neighbours = padded[whole[:, None] + offsets[None, :] + reach]
        out[start : start + len(times)] = (neighbours * weights).sum(axis=1)
    return out


def trim_silence(
    samples: NDArray[np.float32], below_db: float, window: int, hop: int
) -> NDArray[np.float32]:
    """Samples without the quiet ends. A window is quiet if its power, relative to the loudest
    window, is less than `below_db`, which is negative: -40 for a ten-thousandth. Pure silence stays
    whole."""
    if len(samples) <= window:
        return samples
    # The power of any window is a difference of two running sums.
    running_sum = np.concatenate(([0.0], np.cumsum(samples.astype(np.float64) ** 2)))
    starts = np.arange(0, len(samples) - window + hop, hop)
    stops = np.minimum(starts + window, len(samples))
    power = running_sum[stops] - running_sum[starts]
    if power.max() <= 0:
        return samples
    loud = np.flatnonzero(power >= power.max() * 10 ** (below_db / 10))
    return samples[starts[loud[0]] : stops[loud[-1]]]


def is_cut(data: bytes) -> bool:
    """Whether a WAV or OGG file ends before its end. soundfile takes such a file for a shorter
    one."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        # Chunks: a name and a size of 4 bytes each, the content, padded to an even length.
        offset = 12
        while offset + 8 <= len(data):
            size = int.from_bytes(data[offset + 4 : offset + 8], "little")
            if data[offset : offset + 4] == b"data":
                return offset + 8 + size > len(data) and size < STREAMED
            offset += 8 + size + size % 2
        return True
    if data[:4] == b"OggS":
        # The page that ends a stream has the flag 4.
        last_page = data.rfind(b"OggS")
        flags = data[last_page + 5 : last_page + 6]
        return not flags or not flags[0] & 4
    return False


def write_wave(samples: NDArray[np.float32], rate: int) -> bytes:
    """The bytes of a mono WAV file with 16 bits."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", "not compressed"))
        file.writeframes((np.clip(samples, -1, 1) * 32767).round().astype("<i2").tobytes())
    return content.getvalue()


def read_wave(
    data: bytes, name: str, check: Callable[[int, int, int], None]
) -> tuple[NDArray[np.float32], int] | None:
    """`[samples, channels]` and the rate of a WAV file of integers; None for any other sound.
    `check` gets rate, channels, samples."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return None
    try:
        with wave.open(io.BytesIO(data)) as file:
            rate = file.getframerate()
            channels = file.getnchannels()
            width = file.getsampwidth()
            count = file.getnframes()
            check(rate, channels, count)
            raw = file.readframes(count)
    except wave.Error:  # other encodings inside WAV
        return None
    except EOFError:
        raise DataError(f"{name}: the sound is cut short.") from None
    if len(raw) < count * channels * width:
        raise DataError(
            f"{name}: the sound is cut short: {len(raw)} of {count * channels * width} bytes."
        )

    # To -1 ... 1. Samples of 8 bits have no sign; those of 24 bits become the upper bytes of 32.
    if width == 1:
        values = np.frombuffer(raw, np.uint8).astype(np.float32) / 128 - 1
    elif width == 3:
        parts = np.frombuffer(raw, np.uint8).reshape(-1, 3).astype(np.int32)
        shifted = parts[:, 0] << 8 | parts[:, 1] << 16 | parts[:, 2] << 24
        values = (shifted / np.float32(1 << 31)).astype(np.float32)
    else:
        largest = np.float32(1 << (8 * width - 1))
        values = np.frombuffer(raw, f"<i{width}").astype(np.float32) / largest
    return values.reshape(-1, channels).astype(np.float32), rate
