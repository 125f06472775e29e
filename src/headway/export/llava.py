"""A model that sees patches as a folder of transformers' LLaVA class. In: a model with one image
input of patches; out: a folder that `LlavaForConditionalGeneration.from_pretrained` loads, with
vision tower, projector, language model, tokenizer and image processor.

The shape must be LLaVA's: a CLIP or SigLIP vision tower from a Hugging Face folder, every patch a
token, two linears with GELU between them, no aligner, no sounds. Anything else is refused in one
line. The class is transformers' own, so no code travels with the folder.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.stored_model import StoredModel, find_model
from headway.errors import ConfigError, first_line
from headway.export.huggingface import Dtype, atomic_folder, export_huggingface
from headway.model.media_files import without_media
from headway.model.media_shape import PROJECTOR, MediaInput
from headway.runtime.digests import write_digests
from headway.runtime.optional import need
from headway.tokenizer.load import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import torch

IMAGE_MARK = "<image>"
"""The token that LLaVA's processor repeats once for each patch."""
TOWERS = ("clip", "clip_vision_model", "siglip", "siglip_vision_model")
"""The `model_type`s that LLaVA takes: whole models, whose vision part is taken, and that part."""
LINEARS = {"linear_1": "up", "linear_2": "down"}
"""LLaVA's names of the projector's layers -> ours."""


def export_llava(model: Path | str, out: Path, *, dtype: Dtype = "float32") -> None:
    """Write the folder; an earlier one at `out` must be removed first."""
    need("transformers", "export llava")
    source = find_model(model)
    source.check_head()
    image_input = _image_input(source)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(
            f"out is {str(out)!r}, which is not empty. Give a folder that does not exist yet."
        )
    if source.tokenizer_folder is None:
        raise ConfigError(f"{model}: holds no tokenizer, which LLaVA needs for its image token.")
    tokenizer = load_tokenizer(source.tokenizer_folder)
    token = _image_token(tokenizer, source)

    # The language model is exported first: transformers then loads it under its own class, and
    # only its names of a LLaVA model's parts have to be known here.
    media_weights: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as scratch, atomic_folder(out) as folder:
        text_folder = Path(scratch) / "text"
        export_huggingface(
            source.config.with_(media=None),
            without_media(source.weights(), media_weights),
            text_folder,
            tokenizer=source.tokenizer_folder,
            dtype=dtype,
            end_ids=source.end_ids,
        )
        try:
            _write(folder, text_folder, image_input, media_weights, token, dtype)
            write_digests(folder)
        except (OSError, ValueError, KeyError, RuntimeError, AttributeError) as problem:
            raise ConfigError(
                f"transformers cannot make a LLaVA model of {model}: {first_line(problem)}"
            ) from None


def _image_input(source: StoredModel) -> MediaInput:
    """The image input of a model of LLaVA's shape. Another shape is refused with its reason."""
    shape = source.config.media
    if shape is None:
        raise ConfigError(
            f"{source.path}: takes text alone, so there is no LLaVA model of it. Use `headway "
            "export hf`."
        )
    image_input = shape.inputs[0]
    hidden = source.config.hidden_size
    encoder_settings = {}
    if image_input.encoder:
        encoder_settings = json.loads(image_input.encoder)

    reason = None
    if shape.modalities != ("image",):
        reason = f"it takes {', '.join(shape.modalities)}"
    elif shape.aligned is not None:
        reason = "it has the heads of an aligner"
    elif image_input.is_pooled:
        reason = "a picture is pooled into one vector"
    elif shape.hidden != hidden:
        # LLaVA has no setting for this width: its projector is as wide as the language model.
        reason = f"its projector is {shape.hidden} wide inside, not {hidden}"
    elif encoder_settings.get("kind") != "huggingface":
        reason = "its vision tower is no Hugging Face folder"
    if reason is not None:
        raise ConfigError(
            f"{source.path}: LLaVA has another shape: {reason}. LLaVA takes patches of a CLIP or "
            "SigLIP folder. Use `headway export hf`."
        )
    return image_input


def _image_token(tokenizer: Tokenizer, source: StoredModel) -> int:
    """The id that stands for a patch: the tokenizer's own, or a free row of the embedding."""
    known = tokenizer.token_to_id(IMAGE_MARK)
    if known is not None:
        return known
    if tokenizer.vocab_size >= source.config.vocab:
        raise ConfigError(
            f"{source.path}: its tokenizer has no {IMAGE_MARK}, and its embedding no free row for "
            "one. Train with a tokenizer that has it."
        )
    return tokenizer.vocab_size


def _write(
    folder: Path,
    text_folder: Path,
    image_input: MediaInput,
    media_weights: dict[str, torch.Tensor],
    token: int,
    dtype: Dtype,
) -> None:
    """Join the vision tower, our projector and the language model in `text_folder` into a model."""
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

    # Network and code of the folders are excluded: an export reads files that are here.
    settings = json.loads(image_input.encoder)
    tower = Path(settings["path"])
    tower_config: Any = AutoConfig.from_pretrained(
        tower, local_files_only=True, trust_remote_code=False
    )
    if tower_config.model_type not in TOWERS:
        raise ConfigError(
            f"{tower}: a {tower_config.model_type} model; LLaVA's vision tower is CLIP or SigLIP."
        )
    vision: Any = AutoModel.from_pretrained(
        tower, local_files_only=True, trust_remote_code=False, dtype=torch.float32
    )
    if tower_config.model_type in ("clip", "siglip"):
        vision = getattr(vision, "vision_model", vision)
    language: Any = AutoModelForCausalLM.from_pretrained(
        text_folder, local_files_only=True, dtype=torch.float32
    )

    config = LlavaConfig(
        vision_config=getattr(tower_config, "vision_config", tower_config),
        text_config=language.config,
        image_token_index=token,
        vision_feature_layer=settings.get("layer", -1),
        # All vectors of the tower, a class token included: the projector was trained with them.
        vision_feature_select_strategy="full",
        projector_hidden_act="gelu",
        tie_word_embeddings=bool(language.config.tie_word_embeddings),
        image_seq_length=image_input.vectors,
    )
    llava: Any = LlavaForConditionalGeneration(config)
    llava = llava.float()
    parts = llava.model
    parts.language_model.load_state_dict(language.model.state_dict())
    llava.lm_head.load_state_dict(language.lm_head.state_dict())
    _load_tower(parts.vision_tower, vision)
    projector: dict[str, torch.Tensor] = {}
    for llava_name, name in LINEARS.items():
        for leaf in ("weight", "bias"):
            weight = media_weights[f"{PROJECTOR}image.{name}.{leaf}"]
            projector[f"{llava_name}.{leaf}"] = weight.float()
    parts.multi_modal_projector.load_state_dict(projector)
    llava.to(getattr(torch, dtype)).save_pretrained(folder)

    # config.json has the image token's id already, so the tokenizer must agree.
    tokenizer: Any = AutoTokenizer.from_pretrained(text_folder, local_files_only=True)
    if tokenizer.convert_tokens_to_ids(IMAGE_MARK) != token:
        tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_MARK]})
        if tokenizer.convert_tokens_to_ids(IMAGE_MARK) != token:
            raise ConfigError(
                f"the tokenizer gives {IMAGE_MARK} another id than {token}. Train with a tokenizer "
                "that has it."
            )
    tokenizer.save_pretrained(folder)
    AutoImageProcessor.from_pretrained(tower, local_files_only=True).save_pretrained(folder)


def _load_tower(target: Any, vision: Any) -> None:
    """Copy a vision part, wherever this version of transformers keeps it inside its class."""
    target_part = getattr(target, "vision_model", target)
    vision_part = getattr(vision, "vision_model", vision)
    target_part.load_state_dict(vision_part.state_dict())
