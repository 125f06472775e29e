"""verl: a YAML file of its trainer, or a shell script with `key=value` overrides of
`verl.trainer.main_ppo`.

A step there is a rollout with its updates; here it is an update, so intervals are multiplied.
DEFAULTS are those of verl 0.6.
"""

from __future__ import annotations

import re
from typing import Any

from headway.errors import ConfigError
from headway.workflows.import_config.policy import (
    counted,
    cut,
    every,
    finish_policy,
    reward_model,
    rollouts_to_updates,
    set_length,
    set_rollouts,
)
from headway.workflows.import_config.rules import (
    NOT_USED,
    ImportDraft,
    Rule,
    automatic,
    if_setting,
    integer,
    missing,
    number,
    one_of,
    sets,
    shown,
    text,
    tracker,
    words,
    yes,
)

SYSTEM = "verl"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
ADVANTAGES = {"grpo": "std", "rloo": "leave_one_out"}
# verl has two names for each estimate.
KL_FORMS = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}
UNBOUNDED_REFILL = 10
"""Further batches of prompts where verl samples until it has enough."""
WEIGHTINGS = {
    "token-mean": "token",
    "seq-mean-token-mean": "answer",
    "seq-mean-token-sum-norm": "longest",
}


def estimator(draft: ImportDraft, key: str, value: Any) -> None:
    """The advantage. Estimators with a critic are refused: a recipe without it trains something
    else."""
    if value not in ADVANTAGES:
        raise ConfigError(
            f"{key} is {shown(value)}, which headway cannot train; it has {', '.join(ADVANTAGES)}, "
            "which need no critic."
        )
    advantage = ADVANTAGES[value]
    # Without the division by the standard deviation this is Dr. GRPO's advantage.
    by_std = yes(key, draft.value("algorithm.norm_adv_by_std_in_grpo", default=True))
    if value == "grpo" and not by_std:
        advantage = "mean"
    draft.write(key, value, "objective.advantage", advantage)


def loss_mode(draft: ImportDraft, key: str, value: Any) -> None:
    """The ratio of the loss."""
    if value == "vanilla":
        draft.tell(key, value, "automatic", note="the ratio of tokens")
    elif value == "gspo":
        draft.write(key, value, "objective.ratio", "sequence")
    else:
        raise ConfigError(
            f"{key} is {shown(value)}, which headway cannot train; it has vanilla and gspo."
        )


def clip(draft: ImportDraft, key: str, value: Any) -> None:
    """Both bounds, where none is given by itself."""
    bound = number(key, value)
    # `default` keeps what clip_ratio_low and clip_ratio_high have set, whichever key came first.
    draft.default("objective.clip_low", bound)
    draft.default("objective.clip_high", bound)
    draft.tell(key, value, "set", f"objective.clip_low, objective.clip_high: {bound:g}")


def kl_in_loss(draft: ImportDraft, key: str, value: Any) -> None:
    """A divergence in the loss, with its weight."""
    if yes(key, value):
        beta = number(key, draft.value(f"{ACTOR}.kl_loss_coef", default=0.001))
        draft.write(key, value, "objective.beta", beta)
    else:
        draft.tell(key, value, "automatic", note="no divergence in the loss")


def kl_in_reward(draft: ImportDraft, key: str, value: Any) -> None:
    """A divergence that is subtracted from the reward."""
    if yes(key, value):
        beta = number(key, draft.value("algorithm.kl_ctrl.kl_coef", default=0.001))
        draft.set("objective.kl_in", "reward")
        draft.write(key, value, "objective.beta", beta)
    else:
        draft.tell(key, value, "automatic", note="no divergence in the reward")


def files(draft: ImportDraft, key: str, value: Any) -> None:
    """Parquet files of prompts."""
    paths = value
    if isinstance(value, str):
        # A shell script has them as one text: [a.parquet,b.parquet], with or without quotes.
        paths = re.findall(r"[^\s\[\],'\"]+", value)
    if not isinstance(paths, list) or not paths:
        raise ConfigError(f"{key} is {shown(value)}; it must be a path or a list of paths.")
    sources = [{"path": str(path), "kind": "prompt"} for path in paths]
    if key == "data.train_files":
        draft.set("data.train", sources)
        draft.tell(key, value, "set", "data.train: kind prompt")
        return
    # A set for each file: verl, too, reports the data sets of a validation one by one.
    if len(sources) == 1:
        sets_by_name = {"valid": sources}
    else:
        sets_by_name = {f"valid_{number}": [source] for number, source in enumerate(sources)}
    draft.set("data.valid.sets", sets_by_name)
    draft.tell(key, value, "set", "data.valid.sets")


def filtering(draft: ImportDraft, key: str, value: Any) -> None:
    """Dynamic sampling: further batches replace prompts without signal."""
    if not yes(key, value):
        draft.tell(key, value, "automatic", note=NOT_USED)
        return
    most = integer(key, draft.value("algorithm.filter_groups.max_num_gen_batches", default=0))
    # The first batch counts there; 0 means no bound, which a run that ends cannot have.
    refill = UNBOUNDED_REFILL
    if most > 0:
        refill = max(1, most - 1)
    draft.write(key, value, "rollout.refill", refill)


def overlong(draft: ImportDraft, key: str, value: Any) -> None:
    """A penalty of long answers."""
    if not yes(key, value):
        draft.tell(key, value, "automatic", note=NOT_USED)
        return
    prefix = key.removesuffix("enable")
    limit = integer(key, draft.value("data.max_response_length", default=512))
    entry = {
        "kind": "length",
        "max_tokens": limit,
        "buffer": integer(key, draft.value(f"{prefix}len", default=0)),
    }
    factor = number(key, draft.value(f"{prefix}penalty_factor", default=1))
    if factor != 1:
        entry["weight"] = factor
    draft.set("reward", [*(draft.get("reward") or []), entry])
    draft.tell(key, value, "set", "reward: [{kind: length}]")


def loggers(draft: ImportDraft, key: str, value: Any) -> None:
    """Trackers by name."""
    names = value
    if isinstance(value, str):
        # As the files: one text such as [console,wandb] in a script.
        names = re.findall(r"\w+", value)
    for name in words(key, names):
        if name == "console":
            draft.tell(key, name, "automatic", note="the console is always on")
        else:
            tracker(draft, key, name, name)


def total_steps(draft: ImportDraft, key: str, value: Any) -> None:
    """Rollouts in all; null and -1: epochs count."""
    steps = integer(key, value)
    if steps > 0:
        draft.write(key, value, "steps", steps, "rollouts there, updates here")
    else:
        draft.tell(key, value, "automatic", note="epochs count")


def positive(path: str, convert: Any) -> Rule:
    """A setting where the number is above 0; others mean that it is not used."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        if number(key, value) > 0:
            draft.write(key, value, path, convert(key, value))
        else:
            draft.tell(key, value, "automatic", note=NOT_USED)

    return rule


ENGINE = automatic("the model samples in the processes that train it; no second engine")
PLACEMENT = automatic("no placement: the ranks that train also sample")
# The first pattern that matches a key counts, so those with a star come last in their group.
RULES: dict[str, Rule] = {
    "data.train_files": files,
    "data.val_files": files,
    "data.train_batch_size": counted("rollout.prompts"),
    "data.gen_batch_size": automatic("refilled batches have rollout.prompts prompts"),
    "data.val_batch_size": automatic("a validation answers eval.rows prompts"),
    "data.max_prompt_length": counted("data.seq_len"),
    "data.max_response_length": sets("rollout.max_new_tokens", integer),
    "data.filter_overlong_prompts": automatic("prompts without room are left out, with a warning"),
    "data.truncation": automatic("prompts are never cut"),
    "data.prompt_key": automatic("a column prompt is found"),
    "data.shuffle": missing("documents are shuffled, by the seed", off=(True,)),
    "data.seed": sets("seed", integer),
    "data.*": automatic("an option of verl's reader without a meaning here"),
    "algorithm.adv_estimator": estimator,
    "algorithm.norm_adv_by_std_in_grpo": automatic("objective.advantage"),
    "algorithm.use_kl_in_reward": kl_in_reward,
    "algorithm.kl_ctrl.kl_coef": automatic("counts with use_kl_in_reward: objective.beta"),
    "algorithm.kl_ctrl.type": missing("the weight is fixed", "objective.beta", off=("fixed",)),
    "algorithm.kl_penalty": one_of("objective.kl", KL_FORMS, "another estimate", "objective.kl"),
    "algorithm.filter_groups.enable": filtering,
    "algorithm.filter_groups.*": automatic("rollout.refill: by the total reward"),
    "algorithm.gamma": missing("one reward for a whole answer", off=(1, 1.0)),
    "algorithm.lam": missing("one reward for a whole answer", off=(1, 1.0)),
    "algorithm.*": missing("an option of verl's algorithms"),
    f"{MODEL}.path": sets("init.from", text),
    f"{MODEL}.enable_gradient_checkpointing": sets("memory.recompute", yes),
    f"{MODEL}.use_remove_padding": automatic("answers are packed"),
    f"{MODEL}.lora_rank": positive("adapter.rank", integer),
    f"{MODEL}.lora_alpha": automatic("adapter.alpha, with lora_rank"),
    f"{MODEL}.target_modules": missing("names of verl", "adapter.targets: [all]"),
    f"{MODEL}.*": automatic("an option of verl's loading without a meaning here"),
    f"{ACTOR}.optim.lr": sets("optim.lr", number),
    f"{ACTOR}.optim.weight_decay": sets("optim.weight_decay", number),
    f"{ACTOR}.optim.lr_warmup_steps": positive("optim.schedule.warmup", integer),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": positive("optim.schedule.warmup", number),
    f"{ACTOR}.optim.total_training_steps": automatic("steps"),
    f"{ACTOR}.optim.*": missing("an option of verl's optimizer", "optim"),
    f"{ACTOR}.grad_clip": sets("optim.clip", number),
    f"{ACTOR}.ppo_mini_batch_size": counted("rollout.updates"),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": sets("batch.micro_rows", integer),
    f"{ACTOR}.ppo_micro_batch_size": automatic("ppo_micro_batch_size_per_gpu"),
    f"{ACTOR}.ppo_epochs": sets("rollout.passes", integer),
    f"{ACTOR}.use_dynamic_bsz": automatic("rows are packed"),
    f"{ACTOR}.ppo_max_token_len_per_gpu": automatic("batch.micro_rows x data.seq_len"),
    f"{ACTOR}.clip_ratio": clip,
    f"{ACTOR}.clip_ratio_low": sets("objective.clip_low", number),
    f"{ACTOR}.clip_ratio_high": sets("objective.clip_high", number),
    f"{ACTOR}.clip_ratio_c": missing(
        "no second bound for negative advantages", "objective.clip_high"
    ),
    f"{ACTOR}.loss_agg_mode": one_of(
        "objective.weighting", WEIGHTINGS, "another weight of tokens", "objective.weighting"
    ),
    f"{ACTOR}.policy_loss.loss_mode": loss_mode,
    f"{ACTOR}.policy_loss.*": automatic("counts with other loss modes alone"),
    f"{ACTOR}.entropy_coeff": sets("objective.entropy", number),
    f"{ACTOR}.use_kl_loss": kl_in_loss,
    f"{ACTOR}.kl_loss_coef": automatic("counts with use_kl_loss: objective.beta"),
    f"{ACTOR}.kl_loss_type": one_of("objective.kl", KL_FORMS, "another estimate", "objective.kl"),
    f"{ACTOR}.ulysses_sequence_parallel_size": if_setting(
        "parallel.context", integer, "no context parallelism"
    ),
    f"{ACTOR}.strategy": one_of(
        "parallel.strategy",
        {"fsdp": "fsdp", "fsdp2": "fsdp"},
        "another way to divide the model",
        "parallel.strategy: fsdp, parallel.tensor",
    ),
    f"{ACTOR}.fsdp_config.*": missing(
        "an option of FSDP", "memory.offload", off=(False, None, -1, "fp32")
    ),
    f"{ACTOR}.*": missing("an option of verl's actor"),
    f"{ROLLOUT}.n": sets("rollout.samples", integer),
    f"{ROLLOUT}.temperature": sets("rollout.temperature", number),
    f"{ROLLOUT}.top_p": cut("rollout.top_p"),
    f"{ROLLOUT}.top_k": cut("rollout.top_k"),
    f"{ROLLOUT}.val_kwargs.n": sets("rollout.valid_samples", integer),
    f"{ROLLOUT}.val_kwargs.temperature": sets("rollout.valid_temperature", number),
    f"{ROLLOUT}.val_kwargs.*": automatic("rollout.valid_temperature says it"),
    f"{ROLLOUT}.max_num_seqs": sets("rollout.at_once", integer),
    f"{ROLLOUT}.*": ENGINE,
    "actor_rollout_ref.ref.*": automatic("the reference is computed as the model is"),
    "actor_rollout_ref.hybrid_engine": ENGINE,
    "actor_rollout_ref.*": missing("an option of verl's workers"),
    "reward_model.enable": missing("a model that scores answers", "reward: {kind: model}"),
    "reward_model.model.path": reward_model,
    "reward_model.reward_manager": automatic("rewards are functions of single answers"),
    "reward_model.overlong_buffer.enable": overlong,
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": overlong,
    "reward_model.overlong_buffer.*": automatic("part of the reward length"),
    "reward_model.reward_kwargs.*": automatic("part of the reward length"),
    "reward_model.*": automatic("counts with a reward model alone"),
    "custom_reward_function.path": missing(
        "its function has other arguments",
        "reward: ./mine.py with `def reward(prompt, answer, record)`",
    ),
    "custom_reward_function.*": automatic("of the reward function"),
    "critic.*": automatic("there is no critic"),
    "trainer.total_epochs": sets("epochs", number),
    "trainer.total_training_steps": total_steps,
    "trainer.save_freq": every("checkpoint.every"),
    "trainer.test_freq": every("eval.every"),
    "trainer.val_before_train": sets("eval.at_start", yes),
    "trainer.logger": loggers,
    "trainer.project_name": automatic("a tracker's project is a setting of the tracker"),
    "trainer.experiment_name": sets("run.name", text),
    "trainer.default_local_dir": sets("run.dir", text),
    "trainer.max_actor_ckpt_to_keep": sets("checkpoint.keep_last", integer),
    "trainer.n_gpus_per_node": missing(
        "ranks are options of the command", "headway train RECIPE --nproc N", off=(1,)
    ),
    "trainer.nnodes": missing(
        "ranks are options of the command", "headway launch slurm RECIPE --nodes N", off=(1,)
    ),
    "trainer.critic_warmup": automatic("there is no critic"),
    "trainer.balance_batch": automatic("answers are packed into rows of one length"),
    "trainer.resume_mode": automatic("the same command resumes"),
    "trainer.*": PLACEMENT,
    "ray_kwargs.*": PLACEMENT,
    "ray_init.*": PLACEMENT,
    "global_profiler.*": automatic("headway has a profiler of its own"),
    "transfer_queue.*": PLACEMENT,
}


def defaults(draft: ImportDraft) -> dict[str, Any]:
    """What verl assumes."""
    # Either bound given by itself leaves the common one without a use.
    clip_default = {}
    if draft.value(f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high") is None:
        clip_default = {f"{ACTOR}.clip_ratio": 0.2}
    return {
        # With a critic, so a file that names no estimator is refused and not trained otherwise.
        "algorithm.adv_estimator": "gae",
        f"{ACTOR}.optim.lr": 1e-6,
        f"{ACTOR}.optim.weight_decay": 0.01,
        f"{ACTOR}.loss_agg_mode": "token-mean",
        f"{ROLLOUT}.n": 1,
        f"{ACTOR}.grad_clip": 1.0,
        "data.max_response_length": 512,
        **clip_default,
    }


def finish(draft: ImportDraft) -> None:
    """The size of a rollout and its updates."""
    prompts = integer("batch", draft.value("data.train_batch_size", default=1024))
    of_update = integer("batch", draft.value(f"{ACTOR}.ppo_mini_batch_size", default=256))
    # Rounded up: a last, smaller batch is an update there as well.
    set_rollouts(draft, prompts, -(-prompts // of_update), f"{ACTOR}.ppo_mini_batch_size")
    set_length(draft, draft.value("data.max_prompt_length"))
    draft.default("optim.schedule.kind", "constant")
    draft.default("optim.schedule.warmup", 0)
    if draft.get("adapter.rank"):
        alpha = number("lora_alpha", draft.value(f"{MODEL}.lora_alpha", default=16))
        draft.set("adapter.alpha", alpha)
    rollouts_to_updates(draft)
    finish_policy(draft)
