"""Pictures and sounds become arrays of one shape; damaged, huge and wrong files are one line."""

import io
import struct
import sys
import wave

import numpy as np
import pytest
import soundfile
from PIL import Image

from headway.errors import ConfigError, DataError
from headway.media.image_header import image_size
from headway.media.items import (
    AudioSpec,
    ImageSpec,
    MediaLimits,
    MediaRef,
    decode_audio,
    decode_image,
    decode_waveform,
)
from headway.media.png import read_plain_png, write_png
from headway.media.sound import LogMel, mel_filters, read_wave, resample, trim_silence, write_wave

RNG = np.random.default_rng(0)


def image(data: bytes) -> MediaRef:
    return MediaRef("image", data=data, name="a.png")


def audio(data: bytes) -> MediaRef:
    return MediaRef("audio", data=data, name="a.wav")


def encoded(picture: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def picture(width: int = 40, height: int = 30, mode: str = "RGB") -> Image.Image:
    bands = RNG.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(bands).resize((width, height), Image.Resampling.BILINEAR).convert(mode)


def tone(seconds: float, rate: int, hz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate)) / rate)).astype(
        np.float32
    )


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_every_kind_of_picture_has_the_shape_of_the_spec(kind: str) -> None:
    data = encoded(picture(), kind, **({"lossless": True} if kind == "WEBP" else {}))
    assert image_size(data, "x")[1:] == (40, 30)
    pixels = decode_image(image(data), ImageSpec(16, 20))
    assert pixels.shape == (3, 16, 16)
    assert pixels.dtype == np.uint8


def test_a_lossy_webp_and_an_extended_one_tell_their_size() -> None:
    assert image_size(encoded(picture(), "WEBP", quality=50), "x") == ("WEBP", 40, 30)
    assert image_size(
        encoded(picture(mode="RGBA"), "WEBP", quality=50, exif=Image.Exif()), "x"
    ) == ("WEBP", 40, 30)


def test_resize_and_crop_equal_the_plain_steps() -> None:
    source = picture(125, 90)
    # as transformers' CLIP processor: resize all, then crop
    whole = source.resize((32 * 125 // 90, 32), Image.Resampling.BICUBIC)
    reference = np.asarray(whole.crop((10, 4, 34, 28)), dtype=np.int64).transpose(2, 0, 1)
    pixels = decode_image(image(encoded(source, "PNG")), ImageSpec(24, 32)).astype(np.int64)
    assert abs(pixels - reference).max() <= 1


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_thin_pictures_fit_without_large_memory(fit: str) -> None:
    data = encoded(Image.new("RGB", (60_000, 1), (255, 0, 0)), "PNG")
    assert decode_image(image(data), ImageSpec(8, 8, fit)).shape == (3, 8, 8)


def test_pad_keeps_the_whole_picture_and_centres_it() -> None:
    pixels = decode_image(
        image(encoded(Image.new("RGB", (20, 10), (255, 255, 255)), "PNG")),
        ImageSpec(20, None, "pad"),
    )
    assert (pixels[:, :5] == 0).all()
    assert (pixels[:, 5:15] == 255).all()
    assert (pixels[:, 15:] == 0).all()


def test_a_padded_picture_has_the_colour_of_the_spec_around_it() -> None:
    pixels = decode_image(
        image(encoded(Image.new("RGB", (40, 20), (200, 100, 50)), "PNG")),
        ImageSpec(16, fit="pad", pad_colour=(10, 20, 30)),
    )
    # 16 x 8 pixels in the middle of 16 x 16
    assert (
        pixels[:, 0, 0].tolist()
        == pixels[:, 3, 15].tolist()
        == pixels[:, 12, 5].tolist()
        == [10, 20, 30]
    )
    assert pixels[:, 8, 8].tolist() == pixels[:, 5, 0].tolist() == [200, 100, 50]


def test_a_picture_is_turned_as_its_exif_data_says() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn clockwise
    left_half = np.full((8, 4, 3), 255, np.uint8)
    right_half = np.zeros((8, 4, 3), np.uint8)
    source = Image.fromarray(np.concatenate([left_half, right_half], axis=1))
    pixels = decode_image(image(encoded(source, "JPEG", exif=turned, quality=100)), ImageSpec(8, 8))
    assert pixels[:, :3].min() > 200
    assert pixels[:, 5:].max() < 50


def test_transparent_pixels_are_white() -> None:
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert (decode_image(image(encoded(clear, "PNG")), ImageSpec(8, 8)) == 255).all()


def test_sixteen_bits_a_pixel_are_scaled_to_eight() -> None:
    deep = Image.fromarray(np.full((8, 8), 0x8000, np.uint16))
    assert (decode_image(image(encoded(deep, "PNG")), ImageSpec(8, 8)) == 128).all()


@pytest.mark.parametrize(
    ("mode", "file_format"), [("L", "PNG"), ("P", "PNG"), ("CMYK", "JPEG"), ("LA", "PNG")]
)
def test_pictures_of_any_mode_become_three_colours(mode: str, file_format: str) -> None:
    pixels = decode_image(image(encoded(picture(8, 8, mode), file_format)), ImageSpec(8, 8))
    assert pixels.shape == (3, 8, 8)


def test_our_png_equals_pillows_reading_and_needs_no_pillow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pixels = RNG.integers(0, 256, (200, 150, 3), dtype=np.uint8)
    data = write_png(pixels)
    assert (np.asarray(Image.open(io.BytesIO(data))) == pixels).all()
    assert (read_plain_png(data, "x") == pixels).all()
    assert read_plain_png(encoded(picture(), "PNG"), "x") is None
    monkeypatch.setitem(sys.modules, "PIL", None)
    square = write_png(pixels[:150])
    assert (
        decode_image(image(square), ImageSpec(150, None)) == pixels[:150].transpose(2, 0, 1)
    ).all()
    with pytest.raises(ConfigError, match=r"needs Pillow.*pip install .*\[media\]"):
        decode_image(image(data), ImageSpec(8, 8))


def test_a_picture_of_too_many_pixels_is_refused_by_its_header() -> None:
    picture_file = bytearray(write_png(np.zeros((8, 8, 3), np.uint8)))
    picture_file[16:24] = struct.pack(">II", 60_000, 60_000)
    with pytest.raises(DataError, match="60000 x 60000 pixels; at most 64000000"):
        decode_image(image(bytes(picture_file)))


def test_a_picture_of_too_many_bytes_is_refused() -> None:
    with pytest.raises(DataError, match="at most 100"):
        decode_image(image(encoded(picture(), "JPEG")), limits=MediaLimits(image_bytes=100))


def test_a_sound_of_too_many_seconds_is_refused() -> None:
    one_second = write_wave(np.zeros(16_000, np.float32), 16_000)
    with pytest.raises(DataError, match=r"1 seconds of sound; at most 0\.5"):
        decode_audio(audio(one_second), limits=MediaLimits(audio_seconds=0.5))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_cut_picture_is_one_line(kind: str) -> None:
    data = encoded(picture(200, 200), kind)
    for part in (0, 5, 20, len(data) // 2, len(data) - 40):
        with pytest.raises(DataError, match=r"^a\.png: "):
            decode_image(image(data[:part]))


def test_only_regular_files_are_read(tmp_path) -> None:
    for path, why in (
        (tmp_path, "not a file"),
        (tmp_path / "none.png", "No such file"),
        ("/dev/zero", "not a file"),
        ("a\0b", "null"),
    ):
        with pytest.raises(DataError, match=why):
            decode_image(MediaRef("image", tmp_path / path))


def test_the_hash_depends_on_content_and_modality_alone(tmp_path) -> None:
    (tmp_path / "a.png").write_bytes(b"same")
    assert (
        MediaRef("image", tmp_path / "a.png").content_hash()
        == MediaRef("image", data=b"same").content_hash()
    )
    assert (
        MediaRef("audio", data=b"same").content_hash()
        != MediaRef("image", data=b"same").content_hash()
    )


def test_log_mel_equals_transformers() -> None:
    audio_utils = pytest.importorskip("transformers.audio_utils")
    spec = LogMel()
    filters = audio_utils.mel_filter_bank(
        257, 64, 50.0, 8000.0, 16_000, norm="slaney", mel_scale="slaney"
    )
    np.testing.assert_allclose(mel_filters(spec), filters, atol=1e-12)
    samples = (tone(1.0, 16_000) + 0.1 * RNG.standard_normal(16_000)).astype(np.float32)
    window = audio_utils.window_function(512, "hann")
    reference = audio_utils.spectrogram(
        samples,
        window,
        512,
        160,
        512,
        power=2.0,
        mel_filters=filters,
        log_mel="dB",
        min_value=1e-10,
        mel_floor=1e-10,
    )
    np.testing.assert_allclose(spec(samples), reference, atol=1e-3)
    np.testing.assert_array_equal(spec(samples, 21), spec(samples)[:, 40:61])


def stereo(left: list[float], right: list[float], rate: int = 16_000) -> bytes:
    """A WAV file of two channels with 16 bits, made without any of headway's code."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((2, 2, rate, 0, "NONE", "not compressed"))
        samples = [round(value * 32768) for pair in zip(left, right, strict=True) for value in pair]
        file.writeframes(struct.pack(f"<{len(samples)}h", *samples))
    return out.getvalue()


@pytest.mark.parametrize("has_soundfile", [True, False])
def test_stereo_is_the_mean_of_both_channels(
    has_soundfile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.media.items.is_installed", lambda name: has_soundfile)
    data = stereo([0.5, -0.25, 0.0, 0.75], [-0.25, -0.25, 0.5, 0.25])
    assert decode_waveform(audio(data), 16_000).tolist() == [0.125, -0.25, 0.25, 0.5]


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_every_kind_of_sound_has_the_shape_of_the_spec(kind: str) -> None:
    out = io.BytesIO()
    soundfile.write(out, np.stack([tone(1.0, 44_100)] * 2, axis=1), 44_100, format=kind)
    spectrum = decode_audio(audio(out.getvalue()))
    assert spectrum.shape == (64, 256)
    assert spectrum.dtype == np.float32
    middle = spectrum[:, 128]
    loudest = LogMel()(tone(1.0, 16_000))[:, 50].argmax()
    assert abs(int(middle.argmax()) - int(loudest)) <= 1
    assert spectrum[:, 0].max() == -100.0  # silence on both sides
    assert spectrum[:, -1].max() == -100.0


@pytest.mark.parametrize(
    ("rate", "wanted"), [(44_100, 16_000), (8000, 16_000), (48_000, 16_000), (22_051, 16_000)]
)
def test_resampling_keeps_a_tone_and_drops_what_cannot_be_heard(rate: int, wanted: int) -> None:
    resampled = resample(tone(0.2, rate, 1000), rate, wanted)
    expected = tone(0.2, wanted, 1000)
    assert abs(len(resampled) - len(expected)) <= 1
    inner = slice(200, len(expected) - 200)
    assert abs(resampled[inner] - expected[inner]).max() < 2e-3
    if rate > 2 * 9000:
        assert abs(resample(tone(0.2, rate, 9000), rate, wanted)[inner]).max() < 0.02


@pytest.mark.parametrize(
    ("count", "rate", "wanted", "expected"),
    [(10, 3000, 2000, 7), (9, 3000, 2000, 6), (1, 48_000, 16_000, 1)],
)
def test_resampling_rounds_the_length_up(count: int, rate: int, wanted: int, expected: int) -> None:
    resampled = resample(np.ones(count, np.float32), rate, wanted)
    assert len(resampled) == expected  # 10 samples at two thirds of the rate are 6.67


def test_the_level_of_silence_is_a_power() -> None:
    quiet = np.full(4000, 10 ** (-30 / 20), np.float32)
    loud = np.ones(4000, np.float32)
    samples = np.concatenate([quiet, loud, quiet])  # ends 30 dB below the middle
    assert len(trim_silence(samples, -40, 400, 100)) == 12_000
    assert 4000 <= len(trim_silence(samples, -20, 400, 100)) <= 4800


def test_silence_is_trimmed_at_the_ends_only() -> None:
    parts = [
        np.zeros(8000),
        tone(0.2, 16_000),
        np.zeros(4000),
        tone(0.2, 16_000),
        1e-4 * tone(0.5, 16_000),
    ]
    trimmed = trim_silence(np.concatenate(parts).astype(np.float32), -40, 512, 160)
    assert abs(len(trimmed) - (3200 + 4000 + 3200)) < 1100
    silent = np.zeros(4000, np.float32)
    assert trim_silence(silent, -40, 512, 160) is silent
    assert np.isfinite(decode_audio(audio(write_wave(silent, 16_000)))).all()


def test_sounds_of_any_length_are_padded_or_cropped_to_one_shape() -> None:
    assert decode_audio(audio(write_wave(tone(0.001, 16_000), 16_000))).shape == (64, 256)
    assert decode_audio(audio(write_wave(tone(5.0, 16_000), 16_000))).shape == (64, 256)


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32"])
def test_the_standard_librarys_wave_equals_soundfile(
    subtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.BytesIO()
    soundfile.write(
        out,
        np.stack([tone(0.1, 16_000), tone(0.1, 16_000, 300)], axis=1),
        16_000,
        format="WAV",
        subtype=subtype,
    )
    with_soundfile = decode_waveform(audio(out.getvalue()), 16_000)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    np.testing.assert_array_equal(decode_waveform(audio(out.getvalue()), 16_000), with_soundfile)
    with pytest.raises(ConfigError, match=r"needs soundfile.*pip install .*\[media\]"):
        decode_waveform(audio(b"fLaC"), 16_000)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_a_sound_that_is_cut_short_is_one_line(kind: str) -> None:
    out = io.BytesIO()
    soundfile.write(out, RNG.standard_normal(32_000).astype(np.float32) / 4, 16_000, format=kind)
    data = out.getvalue()
    decode_audio(audio(data))
    for part in (len(data) // 4, len(data) // 2, len(data) * 4 // 5):
        with pytest.raises(DataError, match=r"^a\.wav: the sound is (cut short|damaged)"):
            decode_audio(audio(data[:part]))


def test_damaged_sounds_are_one_line() -> None:
    data = write_wave(tone(0.5, 16_000), 16_000)
    float_wav = io.BytesIO()
    soundfile.write(
        float_wav, np.full(100, np.nan, np.float32), 16_000, format="WAV", subtype="FLOAT"
    )
    aiff = io.BytesIO()
    soundfile.write(aiff, tone(0.1, 16_000), 16_000, format="AIFF")
    for damaged in (
        b"",
        b"RIFF",
        data[:20],
        float_wav.getvalue(),
        aiff.getvalue(),
        write_wave(np.zeros(0, np.float32), 16_000),
    ):
        with pytest.raises(DataError, match=r"^a\.wav: "):
            decode_audio(audio(damaged))
    assert read_wave(b"other", "x", lambda *_: None) is None


def test_impossible_shapes_of_pictures_and_sounds_are_refused() -> None:
    for build in (
        lambda: ImageSpec(0),
        lambda: ImageSpec(32, 16),
        lambda: ImageSpec(fit="x"),
        lambda: AudioSpec(0),
        lambda: LogMel(fmax=9000),
    ):
        with pytest.raises(ConfigError):
            build()
    assert ImageSpec().shape == (3, 224, 224)
    assert AudioSpec().shape == (64, 256)
