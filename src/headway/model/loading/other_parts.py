"""A folder of a model with pictures or sounds comes in; its text part goes out, as a folder of a text
model would have it, and with it what a later export needs to put the whole model together again.

    config.json with parts -> the class of transformers without memory -> where its text part is
      text_config                             -> the config.json of a text model, for a family
      model.language_model.layers.0 ...       -> model.layers.0 ...: `OtherParts.names`
      every other tensor                      -> kept as it is: `OtherParts.others`

A text part is read where a test has compared it with the whole model on text (`KNOWN`). Everything
that the class has must be in the folder: half a model is refused.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config.regular_file import require_regular
from headway.errors import CheckpointError, ConfigError, first_line
from headway.model.families._experts import TURNED
from headway.runtime.json_file import read_object
from headway.runtime.optional import is_installed
from headway.runtime.storage import fsync_file

if TYPE_CHECKING:
    import torch

    from headway.model.config import ModelConfig

log = logging.getLogger("headway")

CONFIG = "config.json"
MIN_VERSION = 5
"""Least major version of transformers."""
TEXT = "text_config"
TOWERS = ("vision_config", "audio_config")
"""Keys of config.json that describe other parts."""
KNOWN = (
    "exaone4_5",
    "fast_vlm",
    "gemma3",
    "gemma4",
    "glm4v",
    "glm4v_moe",
    "glmasr",
    "got_ocr2",
    "idefics2",
    "idefics3",
    "internvl",
    "lfm2_vl",
    "lighton_ocr",
    "llava",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "mistral3",
    "ovis2",
    "qwen2_5_vl",
    "qwen2_audio",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
    "video_llava",
    "vipllava",
    "voxtral",
)
"""Model types whose text part is a decoder by itself, by test."""
CHANGES_LOGITS = ("gemma4",)
"""Those whose class scales or caps logits as its text model does, by test; others leave it out."""
ALONE = ("gemma3",)
"""Types whose family finds the text part itself, without the other parts, where transformers is
missing."""
NOT_READ = {
    "gemma3n": "its vision tower is a model of timm, which headway does not read",
    "llama4": "its text part attends within chunks of the text, which headway does not compute",
}
"""Model types whose text part cannot be read, and why."""
SAME_ON_TEXT = {
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Types of text parts that compute on text what another type does: their positions have three rows,
of time, height and width, which are equal for text."""
ALWAYS = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
"""Settings of the other type that these types always have, and do not write."""
ROTATE_ALL = ("glm4v_text", "glm4v_moe_text")
"""Types that rotate whole heads where no share is given; the other type rotates half of each."""
TURNS_EXPERTS = ("qwen3_vl_moe",)
"""Types whose published files have the matrices of experts the other way than their class."""
HIDDEN_OVER_HEADS = ("glm4v_text",)
"""Types whose heads divide the width of the model, whatever `head_dim` says."""
THREE_ROWS = ("mrope_section", "mrope_interleaved")
"""Keys of rotary positions that only rows that differ need."""
FOR_PICTURES = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
                "vision_token_id", "image_token_index", "audio_token_id")  # fmt: skip
"""Keys of a text part that only pictures and sounds need."""
OLD_PREFIX = "model."
FOLDER = "other_parts"
"""The folder of a run that keeps the parts of the model it began with."""
KEPT = "other_parts.safetensors"
NAMES = "names.json"
SMALL_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
    "chat_template.jinja",
)
"""Files for pictures and sounds."""


@dataclass(frozen=True)
class OtherParts:
    """What a folder holds besides a text model."""

    folder: Path
    hf_config: Mapping[str, Any]
    """The whole config.json."""
    names: Mapping[str, str]
    """Name of a tensor in a folder of the text model -> its name here."""
    others: Mapping[str, str]
    """Name of every other tensor -> its file."""

    def values(self) -> dict[str, torch.Tensor]:
        """The other tensors, as they are stored."""
        from safetensors import safe_open

        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(set(self.others.values())):
            with safe_open(self.folder / file, framework="pt") as opened:
                for name, listed in self.others.items():
                    if listed == file:
                        tensors[name] = opened.get_tensor(name)
        return tensors

    def config_with(self, changed: Mapping[str, Any]) -> dict[str, Any]:
        """The whole config.json with some settings of the text part changed."""
        written = dict(self.hf_config)
        if isinstance(written.get(TEXT), Mapping):
            written[TEXT] = {**written[TEXT], **changed}
            return written
        return {**written, **changed}

    def copy_files(self, folder: Path) -> None:
        """Copy the small files for pictures and sounds, where the folder has none."""
        for name in SMALL_FILES:
            target = folder / name
            if (self.folder / name).is_file() and not target.exists():
                shutil.copyfile(self.folder / name, target)
                with open(target, "rb") as file:
                    fsync_file(file.fileno())


def has_other_parts(hf_config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes more than a text model."""
    if hf_config.get("model_type") in ALONE and not _has_classes():
        return False
    return any(isinstance(hf_config.get(key), Mapping) for key in (TEXT, *TOWERS))


def _has_classes() -> bool:
    """Whether the installed transformers has the classes of whole models."""
    if not is_installed("transformers"):
        return False
    return int(version("transformers").split(".")[0]) >= MIN_VERSION


def text_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the text part, complete."""
    return json.loads(_text_config(json.dumps(hf_config, sort_keys=True)))


@lru_cache(maxsize=8)
def _text_config(key: str) -> str:
    return json.dumps(_Whole(json.loads(key)).text)


def check_logits(hf_config: Mapping[str, Any], config: ModelConfig) -> None:
    """Refuse a text part whose logits would not be those of the whole model."""
    is_plain = config.logit_scale == 1.0 and config.logit_softcap is None
    kind = str(hf_config.get("model_type"))[:80]
    if not is_plain and kind not in CHANGES_LOGITS:
        raise ConfigError(
            f"the text part of {kind!r} scales or caps its logits, and the whole model of transformers leaves that out. "
            "Give a folder of its text model."
        )


def find_other_parts(
    folder: Path, hf_config: Mapping[str, Any], stored: Mapping[str, str]
) -> OtherParts:
    """The text part and the others of a folder; `stored`: name of every tensor -> its file."""
    return _find(folder, json.dumps(hf_config, sort_keys=True), tuple(sorted(stored.items())))


@lru_cache(maxsize=8)
def _find(folder: Path, key: str, stored: tuple[tuple[str, str], ...]) -> OtherParts:
    hf_config = json.loads(key)
    hf_type = hf_config.get("model_type")
    whole = _Whole(hf_config)
    files = dict(stored)
    names: dict[str, str] = {}
    others: dict[str, str] = {}
    found: set[str] = set()
    for name, file in files.items():
        inner = whole.inner_name(name)
        found.add(inner)
        text_name = whole.text_name(inner)
        if text_name is None:
            others[name] = file
        else:
            if hf_type in TURNS_EXPERTS and _is_turned(folder / file, name, whole.shape(inner)):
                text_name += TURNED
            names[text_name] = name

    missing = sorted(whole.other_names - found)
    if missing:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise CheckpointError(
            f"{folder}: {missing[0]}{more} not among the weights, but {CONFIG} describes the part that has it. "
            "Download the whole model again."
        )
    wrong = sorted({file for file in others.values() if not file.endswith(".safetensors")})
    if wrong:
        raise ConfigError(
            f"{folder / wrong[0]}: holds parts besides the text model. headway keeps such parts from safetensors only; "
            "give the model in that form."
        )
    log.info(
        "%s: %s has parts besides text; headway uses its text part, %s, and keeps the others (%d tensors) for export",
        folder,
        whole.class_name,
        whole.text["model_type"],
        len(others),
    )
    return OtherParts(folder, whole.hf_config, names, others)


def _is_turned(file: Path, name: str, shape: tuple[int, ...]) -> bool:
    """Whether a stored tensor has the matrices of experts the other way than its class."""
    from safetensors import SafetensorError, safe_open

    if len(shape) != 3 or file.suffix != ".safetensors":
        return False
    try:
        with safe_open(file, framework="pt") as opened:
            stored = tuple(opened.get_slice(name).get_shape())
    except (SafetensorError, OSError):
        # Reading its weights says what is wrong with the file.
        return False
    return stored != shape and stored == (shape[0], shape[2], shape[1])


class _Whole:
    """The class of a folder with parts, without memory."""

    def __init__(self, hf_config: dict[str, Any]) -> None:
        kind = str(hf_config.get("model_type"))[:80]
        if not _has_classes():
            raise ConfigError(
                f"model_type is {kind!r}, which has parts besides text. Reading its text part needs transformers {MIN_VERSION}: "
                "pip install '.[transformers]'."
            )
        if kind in NOT_READ:
            raise ConfigError(
                f"model_type is {kind!r}, which has parts besides text, and {NOT_READ[kind]}. "
                "Give a folder of its text model, or of another model."
            )
        if kind not in KNOWN:
            raise ConfigError(
                f"model_type is {kind!r}, which has parts besides text. headway reads the text part of {', '.join(KNOWN)}. "
                "Give a folder of its text model."
            )
        from headway.model.stock.classes import WholeClass

        self.hf_config = hf_config
        self._class = WholeClass(hf_config)
        self.class_name = self._class.class_name
        self.text = self._plain(self._class.text)
        self.other_names = frozenset(
            name for name in self._class.names if self.text_name(name) is None
        )

    def _plain(self, text: dict[str, Any]) -> dict[str, Any]:
        """The config of a text model of the type that computes the same on text."""
        text = {**text, "tie_word_embeddings": self._class.is_tied}
        kind = text["model_type"]
        if kind not in SAME_ON_TEXT:
            return text
        text["model_type"] = SAME_ON_TEXT[kind]
        text |= ALWAYS.get(kind, {})
        if kind in HIDDEN_OVER_HEADS:
            text["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
        text.pop("architectures", None)
        for key in FOR_PICTURES:
            text.pop(key, None)
        for key in ("rope_parameters", "rope_scaling"):
            rope = text.get(key)
            if not isinstance(rope, dict):
                continue
            rope = {name: value for name, value in rope.items() if name not in THREE_ROWS}
            for name in ("rope_type", "type"):
                if rope.get(name) == "mrope":
                    rope[name] = "default"
            if kind in ROTATE_ALL:
                rope.setdefault("partial_rotary_factor", 1.0)
            text[key] = rope
        return text

    def inner_name(self, name: str) -> str:
        """The name in the class of a tensor in a folder."""
        return self._class.inner_name(name)

    def shape(self, inner: str) -> tuple[int, ...]:
        """The shape in the class of a tensor; () where it has none of this name."""
        return self._class.shape(inner)

    def text_name(self, inner: str) -> str | None:
        """The name of a tensor of the text part in a folder of the text model alone; None for
        one of another part."""
        if inner == f"{self._class.head}.weight":
            return "lm_head.weight"
        if inner.startswith(self._class.text_prefix):
            return OLD_PREFIX + inner.removeprefix(self._class.text_prefix)
        return None


def keep_other_parts(parts: OtherParts, run: Path) -> None:
    """Keep the parts of the model that a run begins with in the run's folder; once."""
    from safetensors.torch import save_file

    target = run / FOLDER
    if (target / CONFIG).is_file():
        return
    target.mkdir(parents=True, exist_ok=True)
    save_file(parts.values(), target / KEPT, metadata={"format": "pt"})
    parts.copy_files(target)
    (target / NAMES).write_text(json.dumps(dict(parts.names)), encoding="utf-8")
    # Last: its presence says that the rest is complete.
    (target / CONFIG).write_text(json.dumps(dict(parts.hf_config)), encoding="utf-8")


def kept_parts(run: Path) -> OtherParts | None:
    """The parts that a run keeps, if it does."""
    folder = run / FOLDER
    if not (folder / CONFIG).is_file():
        return None
    from safetensors import SafetensorError, safe_open

    try:
        require_regular(folder / KEPT)
        with safe_open(folder / KEPT, framework="pt") as opened:
            others = dict.fromkeys(opened.keys(), KEPT)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{folder / KEPT}: cannot be read: {first_line(error)}. Copy the parts there again, or remove {folder} to export text alone."
        ) from None
    names = read_object(folder / NAMES, CheckpointError)
    return OtherParts(folder, read_object(folder / CONFIG, CheckpointError), names, others)
