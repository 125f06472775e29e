"""gpt-oss: mixtures of biased experts with a clamped SwiGLU, attention with a trained sink per
head, a window in every other layer.

ours    mlp.experts.gate_proj.weight   [experts, out, in]
        mlp.experts.gate_proj.bias     [experts, out]
theirs  mlp.experts.gate_up_proj       [experts, in, 2 out]; gate and up in turn
        mlp.experts.gate_up_proj_bias  [experts, 2 out]
mxfp4   mlp.experts.gate_up_proj_blocks and _scales: [experts, 2 out, in] in blocks of 32
        (loading/mxfp4.py), read only
"""

from collections.abc import Collection, Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import _forms as forms
from headway.model.families._experts import read_experts, written_experts
from headway.model.families.base import HfPiece
from headway.model.layout import EXPERTS, ParamSpec

MODEL_TYPE = "gpt_oss"
ARCHITECTURE = "GptOssForCausalLM"
CLASSIFIER = "GptOssForSequenceClassification"
QUANTISED = ("mxfp4",)
PERIOD = 2
THETA = 150_000.0
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "sliding_window": 128,
    "layer_types": None,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
    # Of the first files: what transformers calls otherwise, and does not read.
    "initial_context_length": None,
    "experts_per_token": None,
}
EXPERT_KEYS = {"swiglu_limit": "swiglu_limit", "swiglu_alpha": "swiglu_alpha"}

to_hf_name, from_hf_name = forms.replacing(".mlp.gate.", ".mlp.router.")
to_hf_model = shared.as_it_is


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[HfPiece, ...]:
    """The tensors of the experts."""
    if EXPERTS not in spec.name:
        return ()
    path, _, leaf = spec.name.rpartition(".")
    layer, module = path.split(EXPERTS)
    if module == "down_proj":
        name = f"{layer}{EXPERTS}down_proj"
        start = 0
        stop = config.hidden_size
        step = 1
    else:
        # Even outputs are gate, odd ones up.
        name = f"{layer}{EXPERTS}gate_up_proj"
        start = int(module == "up_proj")
        stop = 2 * config.expert_size
        step = 2
    if leaf == "bias":
        return (HfPiece(name + "_bias", 1, start, stop, step=step),)
    if stored is not None and name not in stored and name + "_blocks" in stored:
        return (HfPiece(name + "_blocks", 1, start, stop, step=step, scales=name + "_scales"),)
    return (HfPiece(name, 2, start, stop, transposed=True, step=step),)


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a gpt-oss config.json.

    As in transformers, load is balanced where the file asks for the routers' logits.
    """
    settings = shared.validate_hf_config(hf_config, DEFAULTS)
    settings["layer_types"] = forms.pattern(settings, PERIOD)
    if settings["rope_parameters"] is None and settings["rope_scaling"] is None:
        settings["rope_parameters"] = YARN
    shared.default_theta(settings, THETA)
    per_token = settings["num_experts_per_tok"]
    former_key = settings["experts_per_token"]
    if former_key is not None and former_key != per_token:
        raise ConfigError(
            f"experts_per_token is {former_key} and num_experts_per_tok is {per_token}; they are "
            "the same. Remove one of them."
        )
    # transformers adds the balancing loss only with this switch.
    if not settings["output_router_logits"]:
        settings["router_aux_loss_coef"] = 0.0
    biased = {"router_bias": True, "bias": True}
    experts = read_experts(settings, EXPERT_KEYS, num="num_local_experts", **biased)
    windows = shared.read_windows({**settings, "use_sliding_window": True})
    return shared.model_config(
        "gpt_oss",
        settings,
        shared.ATTENTION_BIAS,
        attention_sinks=True,
        experts=experts,
        **windows,
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The gpt-oss config.json of a ModelConfig."""
    shared.require(
        config,
        "gpt_oss",
        shared.ATTENTION_BIAS,
        attention_sinks=True,
        experts=config.experts,
        qk_norm=False,
        ffn_bias=False,
    )
    always = {"normalize": True, "router_bias": True, "bias": True, "first_dense": 0, "every": 1}
    # Any limit can be written; without one the message below says more.
    limit = None if config.experts is None else config.experts.swiglu_limit
    experts = written_experts(
        config, "gpt_oss", EXPERT_KEYS, num="num_local_experts", swiglu_limit=limit, **always
    )
    assert config.experts is not None
    if config.experts.swiglu_limit is None:
        raise ConfigError(
            "model.experts.swiglu_limit is null; the SwiGLU of a Hugging Face gpt_oss model is "
            "clamped. Use another family."
        )
    return {
        **shared.settings_of(config, MODEL_TYPE, ARCHITECTURE, shared.ATTENTION_BIAS),
        "sliding_window": config.sliding_window,
        "layer_types": forms.layer_types(config),
        **experts,
        "intermediate_size": config.expert_size,
        "output_router_logits": config.experts.aux_loss > 0,
    }
