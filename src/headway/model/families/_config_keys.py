"""Keys of real config.json files for which headway has no setting: those without effect, and those
of which headway computes only some values.

Collected from published Llama, Qwen, Mistral, InternLM, SmolLM, Yi, Falcon, MiniMind and distilled
models and from what training tools (unsloth, axolotl, nanotron, PaddleNLP, LLaMA-Factory) leave
behind.
"""

from collections.abc import Mapping
from typing import Any

# Keys that never change what a forward computes.
METADATA = frozenset((
    # what the model is, and who wrote the file
    "architectures", "model_type", "transformers_version", "_name_or_path", "name_or_path", "_model_name_or_path", "model_name_or_path",
    "base_model_name_or_path", "_commit_hash", "commit_hash", "revision", "model_name", "finetuned_from", "license", "language", "tags",
    "pipeline_tag", "library_name", "vendor", "author", "paddlenlp_version", "unsloth_version", "unsloth_fixed", "unsloth_training",
    "axolotl_version", "mergekit_version", "transformers.js_config", "onnx", "_auto_class", "custom_pipelines", "_diffusers_version",
    # storage and kernels
    "torch_dtype", "dtype", "params_dtype", "use_cache", "torchscript", "use_bfloat16", "fp16", "bf16", "fp32", "_attn_implementation",
    "_attn_implementation_autoset", "_attn_implementation_internal", "attn_implementation", "_flash_attn_2_enabled", "_flash_attn_enabled",
    "flash_attention", "use_flash_attention", "use_flash_attention_2", "use_flash_attn", "use_sdpa", "use_memory_efficient_attention",
    "_use_sdpa", "use_fused_rope", "use_fused_rms_norm", "use_fused_swiglu", "use_fused_mlp", "use_xformers", "fuse_attention_qkv",
    "fuse_attention_ffn", "fused_linear", "use_triton", "use_recompute", "recompute_granularity", "virtual_pp_degree",
    "tensor_parallel_degree", "tensor_parallel_output", "tensor_parallel_rank", "sequence_parallel", "pipeline_parallel_degree",
    "tp_plan", "base_model_tp_plan", "device_map", "low_cpu_mem_usage", "chunk_size_feed_forward", "cache_implementation",
    "use_cache_quantization", "use_cache_kernel", "softmax_in_fp32", "residual_in_fp32", "fp32_attention",
    # how it was trained
    "gradient_checkpointing", "_gradient_checkpointing", "use_reentrant_checkpointing", "neftune_noise_alpha", "max_sequence_length",
    "max_seq_length", "model_max_length", "tokenizer_model_max_length", "seq_length", "seq_len", "sequence_length", "train_seq_len",
    "pretrained_seq_len", "keep_in_fp32", "loss_reduction", "loss_type", "ignore_index", "label_smoothing",
    "tune_mm_mlp_adapter", "z_loss", "router_aux_loss_coef", "output_router_logits", "freeze_embeddings", "trainable", "batch_size",
    # tokens
    "tokenizer_class", "tokenizer_type", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "cls_token_id",
    "mask_token_id", "im_start_id", "im_end_id", "decoder_start_token_id", "image_token_id", "video_token_id", "eos_token", "bos_token",
    "pad_token", "additional_special_tokens", "chat_format", "chat_template", "prefix", "user_token_id", "assistant_token_id",
    "padding_idx", "ignore_pad_tokens", "add_bos_token", "add_eos_token", "padding_side",
    # classification and generation
    "finetuning_task", "task_specific_params", "problem_type", "id2label", "label2id", "num_labels", "return_dict",
    "return_dict_in_generate", "output_hidden_states", "output_attentions", "output_scores", "tf_legacy_loss", "is_decoder", "max_length",
    "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens", "max_new_tokens", "generation_config", "keys_to_ignore_at_inference",
    "max_context_len", "onnx_safe", "is_chat_model", "is_llama_config", "is_mistral_config", "is_qwen_config",
))  # fmt: skip

# Keys of which only these values are what headway computes, in every family. The first one is named
# in the error.
ONLY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), ("silu", "swish")),
    "activation": ("swiglu", "silu"),
    "norm_type": ("rmsnorm", "rms_norm"),
    "normalization_type": ("rmsnorm", "rms_norm", "RMSNorm"),
    "position_embedding_type": ("rope", "rotary"),
    **dict.fromkeys((
        "attention_dropout", "attention_probs_dropout_prob", "hidden_dropout", "hidden_dropout_prob", "residual_dropout", "resid_pdrop",
        "embd_pdrop", "embed_dropout", "embedding_dropout", "dropout", "dropout_rate", "classifier_dropout", "n_routed_experts",
        "num_nextn_predict_layers", "router_jitter_noise", "attn_logit_softcapping", "final_logit_softcapping",
    ), (0,)),
    "summary_first_dropout": (0, 0.1),
    **dict.fromkeys((
        "pretraining_tp", "partial_rotary_factor", "rotary_pct", "rotary_percent", "rope_ratio", "rope_scaling_factor", "logit_scale",
        "logits_scaling", "embedding_multiplier", "residual_multiplier", "scale_emb", "sliding_window_pattern",
    ), (1,)),
    **dict.fromkeys(("num_experts", "num_local_experts"), (0, 1)),
    "quantization_bit": (0, 16),
    **dict.fromkeys((
        "rope_interleaved", "rope_interleave", "use_mrope", "alibi", "use_alibi", "use_dynamic_ntk", "use_logn_attn", "is_encoder_decoder",
        "tie_encoder_decoder", "add_cross_attention", "use_parallel_residual", "parallel_attn", "qk_layer_norms", "use_resampler",
        "use_bias", "lm_head_bias", "use_moe", "is_moe",
    ), (False,)),
    **dict.fromkeys(("use_rope", "use_rotary", "is_causal", "use_causal_mask", "no_bias"), (True,)),
    "pruned_heads": ({},),
    "mlp_only_layers": ([],),
}  # fmt: skip

# Keys that are settings of some families; in the others they may only say what those always do.
ELSEWHERE: dict[str, tuple[Any, ...]] = dict.fromkeys(
    (
        "attention_bias",
        "attn_bias",
        "qkv_bias",
        "mlp_bias",
        "bias",
        "qk_norm",
        "use_qk_norm",
        "use_sliding_window",
    ),
    (False,),
)


# Types of the settings that are read; the code that reads them relies on it.
WHOLE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "sliding_window", "max_window_layers", "no_rope_layer_interval", "multiple_of", "num_experts",
    "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step",
)  # fmt: skip
SWITCHES = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "bias",
    "use_sliding_window",
    "norm_topk_prob",
)
NUMBERS = ("initializer_range", "rms_norm_eps", "rope_theta", "router_aux_loss_coef")
MAPPINGS = ("rope_scaling", "rope_parameters", "rotary")
LISTS = ("layer_types", "no_rope_layers", "mlp_only_layers")
LARGEST = 1 << 40
"""Of a whole number; far above any real size, far below what overflows."""
# Of families with multipliers, caps and several rotary bases.
WHOLE += ("sliding_window_pattern", "_sliding_window_pattern", "original_max_position_embeddings", "n_embd", "n_layer", "n_head", "n_inner",
          "n_positions", "n_ctx")  # fmt: skip
# Of families with latent attention.
WHOLE += ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "n_shared_experts",
          "n_group", "topk_group", "first_k_dense_replace", "moe_layer_freq", "num_nextn_predict_layers")  # fmt: skip
# Of families with linear attention.
WHOLE += ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
          "full_attention_interval", "shared_expert_intermediate_size")  # fmt: skip
# Of families with short convolutions.
WHOLE += ("conv_L_cache", "block_multiple_of")
SWITCHES += ("conv_bias", "block_auto_adjust_ff_dim")
LISTS += ("full_attn_idxs",)
# Of a mixture with short convolutions.
WHOLE += ("num_dense_layers",)
SWITCHES += ("use_expert_bias",)
# Of families with state spaces.
WHOLE += (
    "mamba_n_heads",
    "mamba_d_state",
    "mamba_n_groups",
    "mamba_d_conv",
    "mamba_expand",
    "mamba_chunk_size",
    "shared_intermediate_size",
)
SWITCHES += ("mamba_conv_bias", "mamba_proj_bias")
LISTS += ("layers_block_type",)
SWITCHES += ("rope_interleave",)
WHOLE += ("rotary_dim", "moe_num_shared_experts", "moe_layer_start_index")
SWITCHES += ("attention_out_bias", "use_qk_norm", "use_bias")
NUMBERS += (
    "moe_norm_min", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "embedding_multiplier", "residual_multiplier",
    "attention_multiplier", "logits_scaling", "logit_scale", "layer_norm_eps", "layer_norm_epsilon", "partial_rotary_factor",
    "rope_local_base_freq", "routed_scaling_factor", "norm_eps", "block_ffn_dim_multiplier",
)  # fmt: skip


def misfit(key: str, value: Any) -> str | None:
    """What a setting should have been; None if it is that."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if key in WHOLE and not (isinstance(value, int) and is_number and 0 <= value <= LARGEST):
        return f"a whole number up to {LARGEST} is expected"
    if key in SWITCHES and not isinstance(value, bool):
        return "true or false is expected"
    if key in NUMBERS and not is_number:
        return "a number is expected"
    if key in MAPPINGS and not isinstance(value, Mapping):
        return "a mapping is expected"
    if key in LISTS and not isinstance(value, list):
        return "a list is expected"
    return None


def harmless(key: str, value: Any, hf_config: Mapping[str, Any]) -> bool:
    """Whether an unread key has a value that changes nothing."""
    if value is None or key in METADATA:
        return True
    values = ONLY.get(key, ELSEWHERE.get(key))
    if values is not None:
        if not isinstance(values[0], str):
            return not isinstance(value, str) and value in values
        return value in values
    # Keys of windows that say what every layer without one does.
    if key == "layer_types":
        return isinstance(value, list) and all(kind == "full_attention" for kind in value)
    if key == "max_window_layers":
        return not hf_config.get("use_sliding_window")
    return False
