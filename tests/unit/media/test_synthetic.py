"""The generated set: fixed bytes, held-out combinations, captions and questions about what is present."""

import hashlib
import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.media.items import AudioSpec, ImageSpec, MediaRef, decode_audio, decode_image
from headway.media.synthetic import ANSWERS, COLOURS, TONES, SyntheticMedia, scenes, write_media

SMALL = SyntheticMedia(samples=40, heldout=10, seed=3, image_size=32)


def fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.*")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def test_the_same_seed_gives_the_same_bytes_and_another_other_ones(tmp_path: Path) -> None:
    for name, spec in (("a", SMALL), ("b", SMALL), ("c", SyntheticMedia(40, 10, 4, 32))):
        write_media(tmp_path / name, spec)
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b") != fingerprint(tmp_path / "c")


def test_held_out_combinations_are_never_shown_but_every_pair_of_values_is() -> None:
    train, held_out = scenes(SyntheticMedia(samples=3000, heldout=500))
    assert not {(s.shape, s.colour, s.place, s.tone) for s in train} & {
        (s.shape, s.colour, s.place, s.tone) for s in held_out
    }
    for names in combinations(("shape", "colour", "place", "tone"), 2):
        pairs = [
            {tuple(getattr(s, name) for name in names) for s in many} for many in (train, held_out)
        ]
        assert pairs[1] <= pairs[0], f"a value rules out another one: {names}"
    assert {answer for s in held_out for _, answer in s.questions} == {
        answer for every in ANSWERS.values() for answer in every
    }


def test_missing_modalities_are_neither_written_nor_asked_about(tmp_path: Path) -> None:
    files = write_media(tmp_path, SyntheticMedia(60, 10, image_size=32, missing=0.3))
    records = [json.loads(line) for line in files["captions"].read_text().splitlines()]
    assert {tuple(sorted(r)) for r in records} == {
        ("audio", "image", "text"),
        ("audio", "text"),
        ("image", "text"),
    }
    for record in records:
        assert ("tone" in record["text"]) == ("audio" in record)
        assert any(colour in record["text"] for colour in COLOURS) == ("image" in record)
        assert all((tmp_path / record[key]).is_file() for key in record if key != "text")
    for line in files["chat"].read_text().splitlines():
        record = json.loads(line)
        assert record["messages"][0]["content"].count("<image>") == len(record.get("images", ()))
        assert record["messages"][0]["content"].count("<audio>") == len(record.get("audios", ()))
        assert ("tone" in record["messages"][0]["content"]) <= ("audios" in record)


def test_colour_and_tone_can_be_read_from_the_decoded_arrays(tmp_path: Path) -> None:
    write_media(tmp_path, SMALL)
    pitches: dict[str, set[int]] = {tone: set() for tone in TONES}
    for scene in scenes(SMALL)[0]:
        if scene.has_image:
            pixels = (
                decode_image(
                    MediaRef("image", tmp_path / scene.media["image"]), ImageSpec(32, None)
                )
                .reshape(3, -1)
                .astype(int)
            )
            brightest = pixels[:, pixels.max(axis=0).argsort()[-20:]].mean(axis=1)
            nearest = min(
                COLOURS, key=lambda name: float(np.abs(np.array(COLOURS[name]) - brightest).sum())
            )
            assert nearest == scene.colour
        if scene.has_audio:
            mel = decode_audio(MediaRef("audio", tmp_path / scene.media["audio"]), AudioSpec(64))
            pitches[scene.tone].add(int(mel[:, 32].argmax()))
    assert max(pitches["low"]) < min(pitches["middle"])
    assert max(pitches["middle"]) < min(pitches["high"])


def test_impossible_sizes_of_synthetic_media_are_refused() -> None:
    for wrong in ({"samples": 0}, {"image_size": 4}, {"seconds": 0.0}, {"missing": 0.9}):
        with pytest.raises(ConfigError):
            SyntheticMedia(**wrong)


def test_without_sounds_every_scene_is_a_picture_alone_and_others_are_held_out(
    tmp_path: Path,
) -> None:
    spec = SyntheticMedia(400, 60, image_size=16, sounds=False)
    files = write_media(tmp_path, spec)
    assert not (tmp_path / "sounds").exists()
    records = [json.loads(line) for line in files["chat"].read_text().splitlines()]
    assert len(records) == 1200
    assert all(record.keys() == {"messages", "images"} for record in records)
    assert all("tone" not in line for line in files["captions"].read_text().splitlines())
    shown, held_out = (
        {(scene.shape, scene.colour, scene.place) for scene in listed} for listed in scenes(spec)
    )
    assert len(held_out) > 20
    assert not shown & held_out
