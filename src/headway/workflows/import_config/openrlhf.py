"""OpenRLHF: a shell script with the options of `openrlhf.cli.train_ppo_ray`, or a YAML file of them.

A batch of training counts answers there, and steps count rollouts. DEFAULTS are those of OpenRLHF 0.8.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from headway.errors import ConfigError
from headway.workflows.import_config.hugging_face import recompute
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
    tracks,
    words,
    yes,
)

SYSTEM = "OpenRLHF"
ADVANTAGES = {"group_norm": "std", "dr_grpo": "mean", "rloo": "leave_one_out"}
STRATEGIES = {0: "ddp", 1: "zero1", 2: "zero1", 3: "fsdp"}


def estimator(draft: ImportDraft, key: str, value: Any) -> None:
    """The advantage. Estimators with a critic or a baseline over the batch are refused."""
    if value not in ADVANTAGES:
        raise ConfigError(
            f"{key} is {shown(value)}, which headway cannot train; it has {', '.join(ADVANTAGES)}, "
            "which compare the answers to one prompt."
        )
    draft.write(key, value, "objective.advantage", ADVANTAGES[value])


def clip(draft: ImportDraft, key: str, value: Any) -> None:
    """Both bounds, where eps_clip_low_high does not give them."""
    if draft.value("eps_clip_low_high") is not None:
        draft.tell(key, value, "automatic", note="eps_clip_low_high counts")
        return
    bound = number(key, value)
    draft.set("objective.clip_low", bound)
    draft.set("objective.clip_high", bound)
    draft.tell(key, value, "set", f"objective.clip_low, objective.clip_high: {bound:g}")


def clip_pair(draft: ImportDraft, key: str, value: Any) -> None:
    """The lower and the upper bound."""
    if not isinstance(value, list) or len(value) != 2:
        raise ConfigError(f"{key} is {shown(value)}; it must be two numbers.")
    low, high = (number(key, bound) for bound in value)
    draft.set("objective.clip_low", low)
    draft.set("objective.clip_high", high)
    draft.tell(key, value, "set", f"objective.clip_low: {low:g}, objective.clip_high: {high:g}")


def divergence(draft: ImportDraft, key: str, value: Any) -> None:
    """The weight of the divergence: in the loss with use_kl_loss, else in the reward."""
    draft.write(key, value, "objective.beta", number(key, value))
    # Read here, whichever key comes first in the file; use_kl_loss itself has nothing to set.
    in_loss = draft.value("use_kl_loss", default=False)
    if number(key, value) and not in_loss:
        draft.set("objective.kl_in", "reward")


def prompts(draft: ImportDraft, key: str, value: Any) -> None:
    """Datasets of prompts, with commas."""
    sources: list[dict[str, Any]] = []
    for path in words(key, value):
        source: dict[str, Any] = {"path": path, "kind": "prompt"}
        question = draft.value("input_key", default="input")
        source["keys"] = {"messages" if "messages" in str(question) else "prompt": question}
        sources.append(source)
    draft.set("data.train", sources)
    draft.tell(key, value, "set", "data.train: kind prompt")


def label(draft: ImportDraft, key: str, value: Any) -> None:
    """The column of the right answer."""
    # OpenRLHF hands the label to a reward function. For labels that are right answers this is math;
    # the report shows the choice.
    draft.set("reward", [{"kind": "math", "column": text(key, value)}])
    draft.tell(key, value, "set", f"reward: [{{kind: math, column: {value}}}]")


def judge_address(draft: ImportDraft, key: str, value: Any) -> None:
    """A file with a reward function, or the address of a server."""
    nearest = "reward: ./mine.py with `def reward(prompt, answer, record)`"
    draft.tell(key, value, "missing", nearest, "its function has other arguments")


def output_folder(draft: ImportDraft, key: str, value: Any) -> None:
    """`./checkpoint/llama-rlhf` is run.dir checkpoint and run.name llama-rlhf."""
    path = PurePosixPath(text(key, value))
    if str(path.parent) != ".":
        draft.set("run.dir", str(path.parent))
    draft.write(key, value, "run.name", path.name or "run")


def lora(draft: ImportDraft, key: str, value: Any) -> None:
    """LoRA; 0: full weights."""
    if integer(key, value):
        draft.write(key, value, "adapter.rank", integer(key, value))
        draft.set("adapter.alpha", number(key, draft.value("lora_alpha", default=16)))
    else:
        draft.tell(key, value, "automatic", note="full weights")


PLACEMENT = automatic("the ranks that train also sample; ranks are options of the command")
RULES: dict[str, Rule] = {
    "pretrain": sets("init.from", text),
    "reward_pretrain": reward_model,
    "remote_rm_url": judge_address,
    "critic_*": automatic("there is no critic"),
    "prompt_data": prompts,
    "prompt_split": automatic("part of the path: data.train: ORG/NAME:SPLIT"),
    "prompt_data_probs": missing("weights of sources", "data.train.0.weight"),
    "input_key": automatic("data.train.0.keys"),
    "label_key": label,
    "apply_chat_template": automatic("always"),
    "input_template": missing("a template of text", "data.train.0.chat_template"),
    "eval_dataset": missing("validation sets by name", "data.valid.sets"),
    "max_samples": missing("a number of records", "data.train.0.limit"),
    "rollout_batch_size": counted("rollout.prompts"),
    "n_samples_per_prompt": sets("rollout.samples", integer),
    "train_batch_size": counted("rollout.updates"),
    "micro_train_batch_size": sets("batch.micro_rows", integer),
    "micro_rollout_batch_size": automatic("rollout.at_once"),
    "max_epochs": sets("rollout.passes", integer),
    "num_episodes": sets("epochs", number),
    "prompt_max_len": counted("data.seq_len"),
    "generate_max_len": sets("rollout.max_new_tokens", integer),
    "temperature": sets("rollout.temperature", number),
    "top_p": cut("rollout.top_p"),
    "advantage_estimator": estimator,
    "eps_clip": clip,
    "eps_clip_low_high": clip_pair,
    "dual_clip": missing("no second bound for negative advantages", "objective.clip_high"),
    "init_kl_coef": divergence,
    "use_kl_loss": automatic("objective.kl_in"),
    "kl_estimator": one_of(
        "objective.kl", {"k1": "k1", "k2": "k2", "k3": "k3"}, "another estimate", "objective.kl"
    ),
    "kl_target": missing("the weight is fixed", "objective.beta"),
    "entropy_loss_coef": sets("objective.entropy", number),
    "gamma": missing("one reward for a whole answer", off=(1, 1.0)),
    "lambd": automatic("there is no critic"),
    "normalize_reward": missing("rewards are compared in a group", "objective.advantage"),
    "reward_clip_range": missing("rewards are not clipped"),
    "dynamic_filtering": lambda draft, key, value: draft.write(
        key, value, "rollout.refill", 10 if yes(key, value) else 0
    ),
    "dynamic_filtering_reward_range": missing(
        "prompts whose answers all have the same reward are left out", "rollout.refill"
    ),
    "overlong_buffer_len": missing("a reward of its own", "reward: {kind: length}"),
    "overlong_penalty_factor": automatic("part of the reward length"),
    "actor_learning_rate": sets("optim.lr", number),
    "l2": sets("optim.weight_decay", number),
    "max_norm": sets("optim.clip", number),
    "lr_warmup_ratio": sets("optim.schedule.warmup", number),
    "lr_scheduler": automatic("optim.schedule.kind"),
    "adam_betas": sets("optim.betas"),
    "zero_stage": one_of("parallel.strategy", STRATEGIES, "another stage", "parallel.strategy"),
    "bf16": lambda draft, key, value: draft.write(
        key, value, "precision", "bf16" if yes(key, value) else "fp32"
    ),
    "gradient_checkpointing": recompute,
    "gradient_checkpointing_*": automatic("the recomputation needs no options"),
    "adam_offload": lambda draft, key, value: (
        draft.add("memory.offload", "optimizer")
        or draft.tell(key, value, "set", "memory.offload: [optimizer]")
    ),
    "packing_samples": automatic("answers are packed"),
    "ring_attn_size": if_setting("parallel.context", integer, "no context parallelism"),
    "lora_rank": lora,
    "lora_alpha": automatic("with lora_rank: adapter.alpha"),
    "load_in_4bit": lambda draft, key, value: draft.write(key, value, "adapter.base", "nf4"),
    "seed": sets("seed", integer),
    "save_path": output_folder,
    "ckpt_path": automatic("checkpoints lie in the run folder"),
    "save_steps": every("checkpoint.every"),
    "eval_steps": every("eval.every"),
    "logging_steps": every("log.every"),
    "max_ckpt_num": sets("checkpoint.keep_last", integer),
    "save_hf_ckpt": automatic("final/ is a Hugging Face folder"),
    "load_checkpoint": automatic("the same command resumes"),
    "use_wandb": tracks("wandb"),
    "use_tensorboard": tracks("tensorboard"),
    "wandb_*": automatic("settings of the tracker"),
    "eval_*": missing("settings of a validation", "rollout.valid_samples, eval"),
    "flash_attn": automatic("kernels.attention chooses"),
    "attn_implementation": automatic("kernels.attention chooses"),
    "vllm_enable_is_correction": automatic("on by default (objective.importance)"),
    "vllm_*": PLACEMENT,
    "enforce_eager": PLACEMENT,
    "ref_*": PLACEMENT,
    "actor_*": PLACEMENT,
    "reward_*": PLACEMENT,
    "colocate_*": PLACEMENT,
    "deepspeed_*": PLACEMENT,
    "async_train": lambda draft, key, value: draft.write(key, value, "rollout.ahead", 1),
    "async_*": missing("one rollout is begun ahead", "rollout.ahead"),
    "agent_func_path": missing("answers have one turn"),
}


def defaults(draft: ImportDraft) -> dict[str, Any]:
    """What OpenRLHF assumes."""
    return {
        # With a critic, so a file that names no estimator is refused and not trained otherwise.
        "advantage_estimator": "gae",
        "eps_clip": 0.2,
        "init_kl_coef": 0.01,
        "kl_estimator": "k1",
        "actor_learning_rate": 1e-6,
        "generate_max_len": 1024,
        "n_samples_per_prompt": 1,
        "lr_warmup_ratio": 0.03,
        "l2": 0.0,
        "max_norm": 1.0,
        "num_episodes": 1,
    }


def finish(draft: ImportDraft) -> None:
    """The size of a rollout and its updates."""
    prompt_count = integer("batch", draft.value("rollout_batch_size", default=1024))
    # rollout_batch_size counts prompts, train_batch_size answers.
    answers = prompt_count * draft.get("rollout.samples")
    of_update = integer("batch", draft.value("train_batch_size", default=128))
    set_rollouts(draft, prompt_count, -(-answers // of_update), "train_batch_size")
    set_length(draft, draft.value("prompt_max_len", default=1024))
    # Their loss is a mean over the tokens of an answer, then over answers.
    draft.default("objective.weighting", "answer")
    draft.default("optim.schedule.kind", "cosine")
    rollouts_to_updates(draft)
    finish_policy(draft)
