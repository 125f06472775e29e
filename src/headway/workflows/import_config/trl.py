"""TRL's GRPO: a YAML or JSON file with the arguments of GRPOConfig and of the script `trl grpo`.

A batch there counts answers of one device. `rollout.prompts` counts the prompts of all ranks, so the
recipe is for one rank, as the report says. DEFAULTS are those of TRL 1.x.
"""

from __future__ import annotations

from typing import Any

from headway.errors import ConfigError
from headway.workflows.import_config import hugging_face
from headway.workflows.import_config.policy import (
    add_reward,
    counted,
    cut,
    finish_policy,
    reward_model,
    set_length,
    set_rollouts,
)
from headway.workflows.import_config.rules import (
    ImportDraft,
    Rule,
    automatic,
    integer,
    missing,
    number,
    sets,
    shown,
    text,
    yes,
)

SYSTEM = "TRL (GRPO)"
LOSSES: dict[str, dict[str, str]] = {
    "grpo": {"algorithm": "grpo"},
    "dr_grpo": {"algorithm": "grpo", "weighting": "longest"},
    "bnpo": {"algorithm": "bnpo"},
    # Over the tokens of the whole step, which is what `token` does here.
    "dapo": {"algorithm": "bnpo"},
    "cispo": {"algorithm": "cispo"},
}
"""loss_type -> the loss; the advantage is scale_rewards' matter in TRL."""
ADVANTAGES = {"group": "std", "true": "std", "none": "mean", "false": "mean"}


def loss(draft: ImportDraft, key: str, value: Any) -> None:
    """The loss; a recipe with another one would train something else."""
    if value not in LOSSES:
        raise ConfigError(
            f"loss_type is {shown(value)}, which headway cannot train; it has {', '.join(LOSSES)}."
        )
    for name, setting in LOSSES[value].items():
        draft.write(key, value, f"objective.{name}", setting)


def scaling(draft: ImportDraft, key: str, value: Any) -> None:
    """What rewards are divided by."""
    advantage = ADVANTAGES.get(str(value).lower())
    if advantage is None:
        draft.tell(
            key, value, "missing", "objective.advantage: std", "rewards are compared in a group"
        )
    else:
        draft.write(key, value, "objective.advantage", advantage)


def level(draft: ImportDraft, key: str, value: Any) -> None:
    """Ratios of tokens or of whole answers."""
    if value in ("token", "sequence"):
        draft.write(key, value, "objective.ratio", value)
    else:
        draft.tell(key, value, "missing", "objective.ratio: token or sequence", "another ratio")


def upper(draft: ImportDraft, key: str, value: Any) -> None:
    """The upper bound of the ratio."""
    draft.write(key, value, "objective.clip_high", number(key, value))


def lower(draft: ImportDraft, key: str, value: Any) -> None:
    """TRL's epsilon is both bounds, unless epsilon_high is given. cispo has the upper one alone."""
    bound = number(key, value)
    is_cispo = draft.value("loss_type", default="dapo") == "cispo"
    if is_cispo:
        draft.tell(key, value, "automatic", note="cispo has no lower bound")
    else:
        draft.write(key, value, "objective.clip_low", bound)
    if draft.value("epsilon_high") is None:
        draft.set("objective.clip_high", bound)


def functions(draft: ImportDraft, key: str, value: Any) -> None:
    """Rewards by name, with their weights."""
    names = value
    if not isinstance(value, list):
        names = [value]
    # TRL has 1 for each where there is no list.
    weights = draft.value("reward_weights", default=[None] * len(names))
    if not isinstance(weights, list) or len(weights) != len(names):
        raise ConfigError(
            f"reward_weights is {shown(weights)}; it must have one number for each of reward_funcs."
        )
    for name, weight in zip(names, weights, strict=True):
        factor = None
        if weight is not None:
            factor = float(number(key, weight))
        add_reward(draft, key, name, factor)


def dataset(draft: ImportDraft, key: str, value: Any) -> None:
    """A dataset of prompts."""
    path = text(key, value)
    split = draft.value("dataset_train_split")
    if split is not None and split != "train":
        path = f"{path}:{split}"
    draft.set("data.train", [{"path": path, "kind": "prompt"}])
    draft.tell(key, value, "set", f"data.train: [{{path: {path}, kind: prompt}}]")


def correction(draft: ImportDraft, key: str, value: Any) -> None:
    """Importance sampling between sampler and trainer."""
    if yes(key, value):
        draft.tell(key, value, "automatic", note="on by default (objective.importance)")
    else:
        draft.write(key, value, "objective.importance", "off")


def importance(draft: ImportDraft, key: str, value: Any) -> None:
    """`token_truncate` and the like: what is weighted, and what happens beyond the bounds."""
    level, _, beyond = str(value).partition("_")
    if draft.value("vllm_importance_sampling_correction") is False:
        draft.tell(key, value, "automatic", note="counts with the correction alone")
        return
    if level not in ("token", "sequence"):
        draft.tell(
            key, value, "missing", "objective.importance: token or sequence", "another weight"
        )
        return
    note = ""
    if beyond == "mask":
        note = "weights above the cap are cut to it, not set to 0"
    draft.write(key, value, "objective.importance", level, note)


def peft(draft: ImportDraft, key: str, value: Any) -> None:
    """LoRA, whose size other keys give."""
    if yes(key, value):
        # The size and alpha that TRL's ModelConfig has for lora_r and lora_alpha.
        draft.default("adapter.rank", 16)
        draft.default("adapter.alpha", 32)
        draft.tell(key, value, "set", "adapter: {rank, alpha}")
    else:
        draft.recipe.pop("adapter", None)
        draft.tell(key, value, "automatic", note="full weights")


NO_SAPO = "there is no loss sapo, which alone has it; nearest: objective.algorithm"
NO_VESPO = "there is no loss vespo, which alone has it; nearest: objective.algorithm"
IN_THE_JOURNAL = automatic("every answer is in rollouts.jsonl: headway rollouts RUN")
IN_THE_SAME_PROCESS = automatic("the model samples in the processes that train it; no server")
RULES: dict[str, Rule] = {
    **hugging_face.RULES,
    **hugging_face.LORA,
    "model_name_or_path": sets("init.from", text),
    "use_peft": peft,
    "dataset_name": dataset,
    "dataset_train_split": automatic("part of data.train"),
    "dataset_test_split": missing("validation is a share, or files", "data.valid"),
    "reward_funcs": functions,
    "reward_weights": automatic("the weights of reward_funcs"),
    "reward_model_name_or_path": reward_model,
    "num_generations": sets("rollout.samples", integer),
    "num_generations_eval": missing(
        "a validation draws rollout.valid_samples answers at rollout.valid_temperature",
        "rollout.valid_samples",
    ),
    "per_device_train_batch_size": counted("batch.micro_rows"),
    "gradient_accumulation_steps": counted("rollout.prompts"),
    "generation_batch_size": counted("rollout.prompts"),
    "steps_per_generation": counted("rollout.updates"),
    "num_iterations": sets("rollout.passes", integer),
    "max_completion_length": sets("rollout.max_new_tokens", integer),
    "max_prompt_length": counted("data.seq_len"),
    "temperature": sets("rollout.temperature", number),
    "top_p": cut("rollout.top_p"),
    "top_k": cut("rollout.top_k"),
    "min_p": cut("rollout.min_p"),
    "repetition_penalty": missing("there is no penalty in rollouts", off=(None, 1, 1.0)),
    "beta": sets("objective.beta", number),
    "epsilon": lower,
    "epsilon_high": upper,
    "delta": missing("no second bound of the ratio", "objective.clip_high"),
    "loss_type": loss,
    "importance_sampling_level": level,
    "scale_rewards": scaling,
    "multi_objective_aggregation": missing(
        "rewards are added, then compared", "weights of rewards", off=(None, "sum_then_normalize")
    ),
    "mask_truncated_completions": sets("rollout.mask_cut", yes),
    "entropy_coef": sets("objective.entropy", number),
    "use_adaptive_entropy": missing("the weight of the entropy is fixed", "objective.entropy"),
    **dict.fromkeys(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        automatic("counts with use_adaptive_entropy alone; here it is fixed: objective.entropy"),
    ),
    "off_policy_mask_threshold": missing(
        "answers of older weights are weighted, not left out", "objective.importance"
    ),
    "use_bias_correction_kl": missing(
        "the KL term is not weighted by the ratio", "objective.kl, objective.kl_in"
    ),
    **dict.fromkeys(("sapo_temperature_neg", "sapo_temperature_pos"), automatic(NO_SAPO)),
    **dict.fromkeys(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), automatic(NO_VESPO)
    ),
    "top_entropy_quantile": missing("the loss has all tokens", off=(None, 1, 1.0)),
    "sync_ref_model": missing("the reference stays as it is", "objective.reference"),
    "ref_model_mixup_alpha": automatic("counts with sync_ref_model alone"),
    "ref_model_sync_steps": automatic("counts with sync_ref_model alone"),
    "disable_dropout": automatic("there is no dropout unless model.dropout sets it"),
    "cast_lm_head_to_fp32": automatic("log-probabilities are computed in fp32"),
    "shuffle_dataset": missing("documents are shuffled, by the seed", off=(True,)),
    "log_completions": IN_THE_JOURNAL,
    "num_completions_to_print": IN_THE_JOURNAL,
    "log_unique_prompts": IN_THE_JOURNAL,
    "log_multimodal": IN_THE_JOURNAL,
    "log_completions_hub_repo": missing(
        "answers are sent nowhere", "rollouts.jsonl, `headway rollouts RUN`"
    ),
    "ds3_gather_for_generation": automatic("the sampler has a copy of all weights"),
    "use_vllm": IN_THE_SAME_PROCESS,
    "vllm_importance_sampling_correction": correction,
    "vllm_importance_sampling_cap": sets("objective.importance_cap", number),
    "vllm_importance_sampling_clip_max": sets("objective.importance_cap", number),
    "vllm_importance_sampling_clip_min": missing(
        "the weight has no lower bound", "objective.importance_cap"
    ),
    "vllm_importance_sampling_mode": importance,
    "vllm_*": IN_THE_SAME_PROCESS,
    "use_transformers_continuous_batching": IN_THE_SAME_PROCESS,
    "transformers_continuous_batching_config": IN_THE_SAME_PROCESS,
    "use_transformers_paged": IN_THE_SAME_PROCESS,
    "cache_implementation": IN_THE_SAME_PROCESS,
    "generation_kwargs": missing("further settings of a sampler", "rollout.temperature"),
    "torch_dtype": automatic("precision says it"),
    "dtype": automatic("precision says it"),
    "attn_implementation": automatic("kernels.attention chooses"),
    "trust_remote_code": missing(
        "families need no code of a model",
        "model: {family: transformers, trust_remote_code: true}",
    ),
}


def defaults(draft: ImportDraft) -> dict[str, Any]:
    """What TRL assumes."""
    return {
        **hugging_face.DEFAULTS,
        "learning_rate": 1e-6,
        "loss_type": "dapo",
        "epsilon": 0.2,
        "beta": 0.0,
        "max_completion_length": 256,
        "num_generations": 8,
    }


def finish(draft: ImportDraft) -> None:
    """The size of a rollout, from the sizes of batches."""
    per_device = integer("batch", draft.value("per_device_train_batch_size", default=8))
    accumulate = integer("batch", draft.value("gradient_accumulation_steps", default=1))
    samples = draft.get("rollout.samples")
    default_answers = per_device * integer(
        "batch", draft.value("steps_per_generation", default=accumulate)
    )
    # TRL takes one of the two keys; generation_batch_size says it directly.
    answers = integer("batch", draft.value("generation_batch_size", default=default_answers))
    if answers % samples:
        draft.tell(
            "num_generations",
            samples,
            "missing",
            f"rollout.prompts: {max(1, answers // samples)}",
            f"the {answers} answers of one rank are no whole groups; set rollout.prompts",
        )
    set_rollouts(
        draft, answers // samples, answers // (per_device * accumulate), "steps_per_generation"
    )
    draft.set("batch.micro_rows", per_device)
    set_length(draft, draft.value("max_prompt_length"))
    draft.tell(
        "world size",
        1,
        "assumed",
        f"rollout.prompts: {draft.get('rollout.prompts')}",
        "prompts of all ranks; with N devices multiply by N",
    )
    finish_policy(draft)
