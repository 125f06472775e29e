"""Small random models of transformers with pictures or sounds, whose text part headway reads; needs transformers 5."""

from __future__ import annotations

from typing import Any

import torch

TEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "head_dim": 8,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
}  # fmt: skip
CLIP = {**VISION, "model_type": "clip_vision_model", "projection_dim": 16}
SIGLIP = {**VISION, "model_type": "siglip_vision_model"}
AUDIO = {
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 20,
    "num_mel_bins": 8,
}
QWEN_VISION = {
    "depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
THREE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
TOKENS = {
    "image_token_id": 60,
    "video_token_id": 61,
    "vision_start_token_id": 58,
    "vision_end_token_id": 59,
}
QWEN3_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
HYBRID = {
    **TEXT, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 7, "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0], "mrope_interleaved": True,
    },
}  # fmt: skip
QWEN3_TOWER = {**QWEN3_VISION, "deepstack_visual_indexes": [0]}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
GLM_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4, "image_size": 16,
}  # fmt: skip
GLM_TOKENS = {
    "image_token_id": 60, "video_token_id": 61, "image_start_token_id": 58, "image_end_token_id": 59, "video_start_token_id": 57,
    "video_end_token_id": 56,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": {"text_config": {**TEXT, **MOE, "rope_parameters": {**THREE, "mrope_interleaved": True}}, "vision_config": QWEN3_TOWER,
                     **TOKENS},
    "glm4v": {"text_config": {**TEXT, "rope_parameters": THREE}, "vision_config": GLM_VISION, **GLM_TOKENS},
    "glm4v_moe": {"text_config": {**TEXT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                                  "rope_parameters": {**THREE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}},
                  "vision_config": GLM_VISION, **GLM_TOKENS},
    "lfm2_vl": {"text_config": {**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3,
                                "block_multiple_of": 8},
                "vision_config": {**VISION, "model_type": "siglip2_vision_model", "num_patches": 16}, "image_token_id": 60,
                "projector_hidden_size": 20},
    "qwen3_5": {"text_config": HYBRID, "vision_config": QWEN3_VISION, **TOKENS},
    "qwen3_5_moe": {
        "text_config": {**HYBRID, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                        "shared_expert_intermediate_size": 12},
        "vision_config": QWEN3_VISION, **TOKENS,
    },
    "llava": {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": CLIP, "image_token_index": 60},
    "llava_next": {"text_config": {**TEXT, "model_type": "mistral", "sliding_window": 5}, "vision_config": CLIP, "image_token_index": 60},
    "llava_onevision": {"text_config": {**TEXT, "model_type": "qwen2"}, "vision_config": SIGLIP, "image_token_index": 60},
    "vipllava": {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": {**CLIP, "num_hidden_layers": 13}, "image_token_index": 60},
    "mistral3": {"text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
                 "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8}, "image_token_index": 60,
                 "tie_word_embeddings": False},
    "qwen2_vl": {"text_config": {**TEXT, "rope_parameters": THREE}, "vision_config": QWEN_VISION, **TOKENS},
    "qwen2_5_vl": {"text_config": {**TEXT, "rope_parameters": THREE, "tie_word_embeddings": True}, "tie_word_embeddings": True,
                   "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 32,
                                     "patch_size": 4, "fullatt_block_indexes": [0]}, **TOKENS},
    "qwen3_vl": {"text_config": {**TEXT, "rope_parameters": {**THREE, "mrope_interleaved": True}},
                 "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 32,
                                   "patch_size": 4, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}, **TOKENS},
    "gemma3": {"text_config": {**TEXT, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
               "vision_config": SIGLIP, "image_token_index": 60, "mm_tokens_per_image": 4},
    "gemma4": {"text_config": {**TEXT, "sliding_window": 5, "final_logit_softcapping": 2.0,
                               "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 10,
                               "layer_types": ["sliding_attention", "full_attention", "full_attention"],
                               "per_layer_config": {"1": {"head_dim": 16}, "2": {"head_dim": 16}}},
               "vision_config": {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2,
                                 "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16},
               "audio_config": None, "image_token_id": 60},
    "idefics3": {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": VISION, "image_token_id": 60, "scale_factor": 2},
    "smolvlm": {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": VISION, "image_token_id": 60, "scale_factor": 2},
    "internvl": {"text_config": {**TEXT, "model_type": "qwen2"}, "vision_config": {**VISION, "image_size": [16, 16], "patch_size": [8, 8]},
                 "image_token_id": 60},
    "got_ocr2": {"text_config": {**TEXT, "model_type": "qwen2"}, "image_token_index": 60,
                 "vision_config": {**VISION, "output_channels": 8, "global_attn_indexes": [0], "mlp_dim": 20, "window_size": 2}},
    "lighton_ocr": {"text_config": {**TEXT, "model_type": "qwen3"}, "image_token_id": 60,
                    "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8}},
    "qwen2_audio": {"text_config": {**TEXT, "model_type": "qwen2"}, "audio_config": {**AUDIO, "max_source_positions": 8}, "audio_token_index": 60},
    "voxtral": {"text_config": {**TEXT, "model_type": "llama"},
                "audio_config": {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
                                 "num_mel_bins": 8, "max_source_positions": 8}, "audio_token_id": 60},
    "exaone4_5": {"text_config": {**TEXT, "model_type": "exaone4", "sliding_window": 5, "sliding_window_pattern": 2},
                  "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 32,
                                    "patch_size": 4, "fullatt_block_indexes": [0]}},
    "llava_next_video": {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": CLIP, "image_token_index": 60,
                         "video_token_index": 61},
    "video_llava": {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": CLIP, "image_token_index": 60, "video_token_index": 61},
    "idefics2": {"text_config": {**TEXT, "model_type": "mistral", "sliding_window": 5}, "vision_config": VISION, "image_token_id": 60,
                 "perceiver_config": {"hidden_size": 32, "resampler_n_latents": 2, "resampler_depth": 1, "resampler_n_heads": 2,
                                      "resampler_head_dim": 8, "num_key_value_heads": 1}},
    "fast_vlm": {"text_config": {**TEXT, "model_type": "qwen2"}, "vision_config": SIGLIP},
    "ovis2": {"text_config": {**TEXT, "model_type": "qwen2"}, "vision_config": VISION},
    "glmasr": {"text_config": {**TEXT, "model_type": "llama"},
               "audio_config": {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
                                "num_mel_bins": 8, "max_source_positions": 8}, "audio_token_id": 60},
}  # fmt: skip
"""model_type -> its settings."""


OTHER_TEXT: dict[str, Any] = {
    **CASES["mistral3"], "text_config": {
        **TEXT, "model_type": "ministral3", "sliding_window": None,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
                            "llama_4_scaling_beta": 0.1},
    },
}  # fmt: skip
"""A Mistral 3 with Ministral 3 inside."""
SCALED = {
    "model_type": "aya_vision", "text_config": {**TEXT, "model_type": "cohere2", "sliding_window": 5}, "vision_config": SIGLIP,
}  # fmt: skip
"""A model type that was not compared."""
CHANGED_LOGITS: list[dict[str, Any]] = [
    {**CASES["llava"], "model_type": "llava", "text_config": {**TEXT, "model_type": "granite", "logits_scaling": 8.0}},
    {**CASES["gemma3"], "model_type": "gemma3", "text_config": {**CASES["gemma3"]["text_config"], "final_logit_softcapping": 2.0}},
]  # fmt: skip
"""Models that leave out what their text part does to logits."""


def build_whole(kind: str, settings: dict[str, Any] | None = None) -> Any:
    """A model in evaluation mode, every parameter random."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **(settings or CASES[kind]))
    model = transformers.AutoModelForMultimodalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(sum(map(ord, kind)))
    with torch.no_grad():
        for parameter in dict.fromkeys(model.parameters()):
            parameter.add_(
                torch.randn(parameter.shape, generator=generator)
                * (0.1 if parameter.dim() > 1 else 0.2)
            )
    return model.eval()
