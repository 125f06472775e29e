"""Settings of media inputs, each seen in the first numbers of a small run on a generated store and tables."""

import functools
from typing import Any

import numpy as np

from support.setting_runs import Row, data_folder, loss_numbers, numbers_or_refusal

NAMES = ("image", "audio")


@functools.cache
def prepare() -> None:
    """Conversations with pictures and sounds, tables of their features, and an aligner, below the root of all rows."""
    import torch

    from headway.media.items import MediaRef
    from headway.media.synthetic import SyntheticMedia, write_media
    from headway.model.loading.aligner_file import AlignerHeads, write_aligner
    from headway.store.media_table import MediaTableWriter

    folder = data_folder() / "media"
    write_media(folder, SyntheticMedia(samples=6, heldout=0, image_size=16, seconds=0.1))
    for number, name in enumerate(NAMES):
        kind, suffix = ("images", "png") if name == "image" else ("sounds", "wav")
        files = sorted((folder / kind).glob(f"*.{suffix}"))
        hashes = [MediaRef(name, file).content_hash() for file in files]  # pyright: ignore[reportArgumentType]
        for extra in (0, 1):
            rows = (
                np.random.default_rng(10 * number + extra)
                .normal(size=(len(files), 1, 6))
                .astype(np.float32)
            )
            with MediaTableWriter(
                data_folder() / f"{name}{extra}", (1, 6), "float32", f"made {name} {extra}"
            ) as writer:
                writer.add(hashes, rows)
                writer.finish()
    generator = torch.Generator().manual_seed(0)
    shapes = {"norm.weight": (6,), "norm.bias": (6,), "proj.weight": (5, 6)}
    heads = {
        f"heads.{name}.{leaf}": torch.randn(*shape, generator=generator)
        for name in NAMES
        for leaf, shape in shapes.items()
    }
    write_aligner(
        AlignerHeads(heads, dict.fromkeys(NAMES, 2.66)), data_folder() / "aligner.safetensors"
    )


def seen(overrides: tuple[str, ...]) -> Any:
    prepare()
    return loss_numbers(overrides)


def said(overrides: tuple[str, ...]) -> Any:
    prepare()
    return numbers_or_refusal(overrides)


@functools.cache
def prepare_vision() -> None:
    """A small model with its own vision tower, and conversations about pictures."""
    from support.small_vision import write_conversations, write_vision

    write_vision(data_folder() / "vision")
    write_conversations(data_folder() / "seen")


def sized(overrides: tuple[str, ...]) -> Any:
    prepare_vision()
    return loss_numbers(overrides)


CHAT = (
    "data.train=[{path: $/media/chat.jsonl, kind: multimodal}]",
    "tokenizer=$/tok0",
    "model.vocab_size=null",
    "data.seq_len=128",
)
TABLES = tuple(f"multimodal.{name}.features=$/{name}0" for name in NAMES)
VISION = (
    "data.train=[{path: $/seen/chat.jsonl, kind: multimodal}]",
    "init.from=$/vision",
    "model={max_seq_len: 512}",
    "data.seq_len=256",
)
ROWS: dict[str, Row] = {
    "model.vision": ((), None, "{kind: qwen2_5_vl, sections: [1]}", numbers_or_refusal),
    "multimodal.native.min_pixels": ((*VISION, "multimodal.native={}"), 64, 1024, sized),
    "multimodal.native.max_pixels": ((*VISION, "multimodal.native={}"), 640, 2560, sized),
    "multimodal.image.features": ((*CHAT, TABLES[1]), "$/image0", "$/image1", seen),
    "multimodal.image.tokens": ((*CHAT, *TABLES), 2, 3, seen),
    "multimodal.image.encoder": ((*CHAT, TABLES[1]), "$/nowhere", "vit", said),
    "multimodal.image.patches": ((*CHAT, *TABLES), False, True, said),
    "multimodal.audio.features": ((*CHAT, TABLES[0]), "$/audio0", "$/audio1", seen),
    "multimodal.audio.tokens": ((*CHAT, *TABLES), 2, 3, seen),
    "multimodal.audio.encoder": ((*CHAT, TABLES[0]), "$/nowhere", "audio_cnn", said),
    "multimodal.audio.patches": ((*CHAT, *TABLES), False, True, said),
    "multimodal.aligner": ((*CHAT, *TABLES), None, "$/aligner.safetensors", seen),
    "multimodal.hidden": ((*CHAT, *TABLES), 8, 16, seen),
    "multimodal.shared": ((*CHAT, *TABLES, "multimodal.hidden=8"), False, True, seen),
    "multimodal.missing": ((*CHAT, *TABLES, "multimodal.hidden=8"), True, False, seen),
}
