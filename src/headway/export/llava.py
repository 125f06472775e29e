"""A model that sees patches as a folder of transformers' LLaVA class. In: a model with one image input of patches; out: a folder that
`LlavaForConditionalGeneration.from_pretrained` loads, with vision tower, projector, language model, tokenizer and image processor.

The shape must be LLaVA's: a CLIP or SigLIP vision tower from a Hugging Face folder, every patch a token, two linears with GELU between
them, no aligner, no sounds. Anything else is refused in one line. The class is transformers' own, so no code travels with the folder.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.stored_model import StoredModel, find_model
from headway.errors import ConfigError, first_line
from headway.export.huggingface import Dtype, atomic_folder, export_huggingface
from headway.model.media_files import is_media
from headway.model.media_shape import PROJECTOR, MediaInput
from headway.runtime.digests import write_digests
from headway.runtime.optional import need
from headway.tokenizer.load import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import torch

IMAGE_MARK = "<image>"
TOWERS = ("clip", "clip_vision_model", "siglip", "siglip_vision_model")


def export_llava(model: Path | str, out: Path, *, dtype: Dtype = "float32") -> None:
    """Write the folder; an earlier one at `out` must be removed first."""
    need("transformers", "export llava")
    found = find_model(model)
    found.check_head()
    one = _checked(found)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(
            f"out is {str(out)!r}, which is not empty. Give a folder that does not exist yet."
        )
    if found.tokenizer_folder is None:
        raise ConfigError(f"{model}: holds no tokenizer, which LLaVA needs for its image token.")
    tokenizer = load_tokenizer(found.tokenizer_folder)
    token = _image_token(tokenizer, found)
    media: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as scratch, atomic_folder(out) as folder:
        plain = found.config.with_(media=None)

        def language() -> Any:
            for name, value in found.weights():
                if is_media(name):
                    media[name] = value
                else:
                    yield name, value

        export_huggingface(
            plain,
            language(),
            Path(scratch) / "text",
            tokenizer=found.tokenizer_folder,
            dtype=dtype,
            end_ids=found.end_ids,
        )
        try:
            _write(folder, Path(scratch) / "text", one, media, token, dtype)
            write_digests(folder)
        except (OSError, ValueError, KeyError, RuntimeError, AttributeError) as problem:
            raise ConfigError(
                f"transformers cannot make a LLaVA model of {model}: {first_line(problem)}"
            ) from None


def _checked(found: StoredModel) -> MediaInput:
    """The image input, if LLaVA has this shape."""
    shape = found.config.media
    if shape is None:
        raise ConfigError(
            f"{found.path}: takes text alone, so there is no LLaVA model of it. Use `headway export hf`."
        )
    reasons = {
        f"it takes {', '.join(shape.modalities)}": shape.modalities != ("image",),
        "it has the heads of an aligner": shape.aligned is not None,
        "a picture is pooled into one vector": shape.inputs[0].is_pooled,
        f"its projector is {shape.hidden} wide inside, not {found.config.hidden_size}": shape.hidden
        != found.config.hidden_size,
    }
    wrong = next((reason for reason, is_so in reasons.items() if is_so), None)
    settings = json.loads(shape.inputs[0].encoder) if shape.inputs[0].encoder else {}
    if wrong is None and settings.get("kind") != "huggingface":
        wrong = "its vision tower is no Hugging Face folder"
    if wrong is not None:
        raise ConfigError(
            f"{found.path}: LLaVA has another shape: {wrong}. LLaVA takes patches of a CLIP or SigLIP folder. Use `headway export hf`."
        )
    return shape.inputs[0]


def _image_token(tokenizer: Tokenizer, found: StoredModel) -> int:
    """The id that stands for a patch: the tokenizer's own, or a free row of the embedding."""
    known = tokenizer.token_to_id(IMAGE_MARK)
    if known is not None:
        return known
    if tokenizer.vocab_size >= found.config.vocab:
        raise ConfigError(
            f"{found.path}: its tokenizer has no {IMAGE_MARK}, and its embedding no free row for one. Train with a tokenizer that has it."
        )
    return tokenizer.vocab_size


def _write(
    folder: Path,
    text: Path,
    one: MediaInput,
    media: dict[str, torch.Tensor],
    token: int,
    dtype: Dtype,
) -> None:
    import torch
    from transformers import (
        AutoConfig,
        AutoImageProcessor,
        AutoModel,
        AutoModelForCausalLM,
        AutoTokenizer,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    settings = json.loads(one.encoder)
    tower = Path(settings["path"])
    described: Any = AutoConfig.from_pretrained(
        tower, local_files_only=True, trust_remote_code=False
    )
    if described.model_type not in TOWERS:
        raise ConfigError(
            f"{tower}: a {described.model_type} model; LLaVA's vision tower is CLIP or SigLIP."
        )
    vision: Any = AutoModel.from_pretrained(
        tower, local_files_only=True, trust_remote_code=False, dtype=torch.float32
    )
    vision = (
        getattr(vision, "vision_model", vision)
        if described.model_type in ("clip", "siglip")
        else vision
    )
    language: Any = AutoModelForCausalLM.from_pretrained(
        text, local_files_only=True, dtype=torch.float32
    )
    config = LlavaConfig(
        vision_config=getattr(described, "vision_config", described), text_config=language.config, image_token_index=token,
        vision_feature_layer=settings.get("layer", -1), vision_feature_select_strategy="full", projector_hidden_act="gelu",
        tie_word_embeddings=bool(language.config.tie_word_embeddings), image_seq_length=one.vectors,
    )  # fmt: skip
    made: Any = LlavaForConditionalGeneration(config)
    made = made.float()
    inner = made.model
    inner.language_model.load_state_dict(language.model.state_dict())
    made.lm_head.load_state_dict(language.lm_head.state_dict())
    _load_tower(inner.vision_tower, vision)
    linears = {"linear_1": "up", "linear_2": "down"}
    inner.multi_modal_projector.load_state_dict(
        {
            f"{theirs}.{leaf}": media[f"{PROJECTOR}image.{ours}.{leaf}"].float()
            for theirs, ours in linears.items()
            for leaf in ("weight", "bias")
        }
    )
    made.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(text, local_files_only=True)
    if tokenizer.convert_tokens_to_ids(IMAGE_MARK) != token:
        tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_MARK]})
        if tokenizer.convert_tokens_to_ids(IMAGE_MARK) != token:
            raise ConfigError(
                f"the tokenizer gives {IMAGE_MARK} another id than {token}. Train with a tokenizer that has it."
            )
    tokenizer.save_pretrained(folder)
    AutoImageProcessor.from_pretrained(tower, local_files_only=True).save_pretrained(folder)


def _load_tower(target: Any, vision: Any) -> None:
    """Copy a vision part, wherever this version of transformers keeps it inside its class."""
    inside = getattr(target, "vision_model", target)
    inside.load_state_dict(getattr(vision, "vision_model", vision).state_dict())
