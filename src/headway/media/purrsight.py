"""Pictures and sounds as PurrSight prepares them, for aligners that were trained with it. In: a
file; out: pixels or a log-mel.

What differs from `decode_image` and `decode_audio`:

    picture    bilinear instead of bicubic, the whole picture resized before the crop, EXIF
               orientation ignored
    sound      resampled with a Hann window of six zero crossings; ends below an amplitude of 0.01
               cut sample by sample; magnitudes instead of powers go through the mel filters, then
               10 log10; a short sound gets zeros at its end

A test compares both with what PurrSight's own code computed (tests/golden/purrsight).
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.media.image_header import image_size
from headway.media.items import (
    LIMITS,
    MediaLimits,
    MediaRef,
    check_pixels,
    open_image,
    read_samples,
)
from headway.media.sound import FLOOR, magnitudes
from headway.runtime.optional import need

if TYPE_CHECKING:
    from numpy.typing import NDArray

SIZE = 224
SHORTER_SIDE = 256
"""int(224 * 1.143): the shorter side before the centre is cut out."""
SAMPLE_RATE = 16_000
N_FFT = 512
HOP = 160
MELS = 64
FRAMES = 256
QUIET = 10.0 ** (-40 / 20)
"""-40 dB: samples of a smaller amplitude at both ends are cut."""
ZERO_CROSSINGS = 6
ROLLOFF = 0.99
"""torchaudio's defaults for another sample rate."""
STEPS_AT_ONCE = 1 << 16
"""Windows of a product that is computed at once: bounds memory."""
LONGEST_SIDE = 16 * SHORTER_SIDE
"""A resized picture that would be longer is cut before it is resized; the numbers are the same up
to rounding."""


def purrsight_pixels(ref: MediaRef, limits: MediaLimits = LIMITS) -> NDArray[np.uint8]:
    """The pixels of a picture, `[3, 224, 224]`."""
    from PIL import Image

    data = ref.read(limits)
    kind, width, height = image_size(data, ref.name)
    check_pixels(ref.name, width, height, limits)
    need("PIL", f"{ref.name} ({kind})")
    image = open_image(data, ref.name, limits, as_stored=True)
    # Only RGBA gets a white background, as in PurrSight; other modes just lose their transparency.
    if image.mode == "RGBA":
        opaque = Image.new("RGB", image.size, (255, 255, 255))
        opaque.paste(image, mask=image.split()[3])
        image = opaque
    elif image.mode != "RGB":
        image = image.convert("RGB")
    image = _resized(_shortened(image))
    left = round((image.width - SIZE) / 2)
    top = round((image.height - SIZE) / 2)
    cropped = image.crop((left, top, left + SIZE, top + SIZE))
    return np.ascontiguousarray(np.asarray(cropped, dtype=np.uint8).transpose(2, 0, 1))


def _shortened(image: Any) -> Any:
    """A very long thin picture without its far ends, which the crop removes anyway: resizing them
    would take gigabytes."""
    shorter = min(image.size)
    longest = shorter * LONGEST_SIDE // SHORTER_SIDE
    if max(image.size) <= longest:
        return image
    left = max(0, (image.width - longest) // 2)
    top = max(0, (image.height - longest) // 2)
    return image.crop((left, top, image.width - left, image.height - top))


def _resized(image: Any) -> Any:
    from PIL import Image

    width, height = image.size
    if width <= height:
        size = (SHORTER_SIDE, int(SHORTER_SIDE * height / width))
    else:
        size = (int(SHORTER_SIDE * width / height), SHORTER_SIDE)
    return image.resize(size, Image.Resampling.BILINEAR)


def purrsight_mel(
    ref: MediaRef, filters: NDArray[np.float32], limits: MediaLimits = LIMITS
) -> NDArray[np.float32]:
    """The log-mel of a sound, `[64, 256]`; `filters` are the mel filters of the encoder's file,
    `[257, 64]`."""
    samples, rate = read_samples(ref, limits)
    # Mono after resampling, unlike `decode_waveform`: the sums round differently.
    channels = hann_resample(samples.T, rate, SAMPLE_RATE)
    return purrsight_log_mel(channels.mean(axis=0, dtype=np.float32), filters)


def purrsight_log_mel(
    samples: NDArray[np.float32], filters: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The log-mel of mono samples at 16 kHz: the middle of a long sound; a short one ends with
    zeros."""
    # Pure silence stays whole.
    loud = np.flatnonzero(np.abs(samples) + FLOOR > QUIET)
    if len(loud):
        samples = samples[loud[0] : loud[-1] + 1]
    spectrum = magnitudes(samples, N_FFT, HOP).astype(np.float32)
    decibels = 10 * np.log10(np.maximum(spectrum @ filters, np.float32(FLOOR)))
    count = len(decibels)
    if count > FRAMES:
        start = (count - FRAMES) // 2
        decibels = decibels[start : start + FRAMES]
    else:
        decibels = np.pad(decibels, ((0, FRAMES - count), (0, 0)))
    return np.ascontiguousarray(decibels.T, dtype=np.float32)


def hann_resample(channels: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """`[channels, samples]` at another rate, as torchaudio's Resample computes it with its
    defaults.

    New sample n lies at time n / wanted. It is a sum over old samples of a sinc, cut off at
    `ROLLOFF` of the lower Nyquist rate, times a Hann window that ends after `ZERO_CROSSINGS` of its
    zeros.
    """
    if rate == wanted:
        return channels
    divisor = gcd(rate, wanted)
    old = rate // divisor
    new = wanted // divisor
    cutoff = min(old, new) * ROLLOFF
    width = int(np.ceil(ZERO_CROSSINGS * old / cutoff))
    # One kernel for each of the `new` phases between two old samples.
    offsets = np.arange(-width, width + old) / old
    times = (np.arange(0, -new, -1) / new)[:, None] + offsets[None, :]
    times = np.clip(times * cutoff, -ZERO_CROSSINGS, ZERO_CROSSINGS)
    window = np.cos(times * np.pi / ZERO_CROSSINGS / 2) ** 2
    kernels = (np.sinc(times) * window * (cutoff / old)).astype(np.float32)
    length = channels.shape[1]
    padded = np.pad(channels, ((0, 0), (width, width + old)))
    steps = np.lib.stride_tricks.sliding_window_view(padded, kernels.shape[1], axis=1)[:, ::old]
    # The windows overlap, and a product copies them: a part at a time keeps that small.
    parts = [
        steps[:, first : first + STEPS_AT_ONCE] @ kernels.T
        for first in range(0, steps.shape[1], STEPS_AT_ONCE)
    ]
    resampled = np.concatenate(parts, axis=1).reshape(len(channels), -1)
    return np.ascontiguousarray(resampled[:, : -(-new * length // old)], dtype=np.float32)
