"""PruLong's run scripts (variables with defaults), a file of `export NAME=value` lines, or its
training command. Never executed.
"""

from __future__ import annotations

from typing import Any

from headway.workflows.import_config import hugging_face
from headway.workflows.import_config.rules import (
    ImportDraft,
    Rule,
    automatic,
    integer,
    missing,
    number,
    sets,
    text,
    tracker_mode,
    tracks,
    yes,
)

SYSTEM = "PruLong"
LONG_NAMES = {
    "model_name": "MODEL",
    "learning_rate": "LR",
    "max_steps": "STEPS",
    "save_steps": "SAVE",
    "warmup_ratio": "WARMUP",
    "min_lr_ratio": "MIN_LR_RATIO",
    "seq_parallel_size": "SEQ_PARALLEL_SIZE",
    "per_device_max_tokens": "MAX_TOKS",
    "start_head_sparsity": "START_HEAD_SPARSITY",
    "end_head_sparsity": "END_HEAD_SPARSITY",
    "mask_learning_rate": "MASK_LEARNING_RATE",
    "reg_learning_rate": "REG_LEARNING_RATE",
    "warmup_type": "WARMUP_TYPE",
    "sparsity_warmup_ratio": "SPARSITY_WARMUP_RATIO",
    "disable_linear_regularization_term": "DISABLE_LINEAR_REG_TERM",
    "context_window_if_toggled": "CONTEXT_WINDOW_IF_TOGGLED",
    "freeze_non_mask_parameters": "FREEZE_WEIGHTS",
    "freeze_mask_parameters": "FREEZE_MASKS",
    "tokenized_mds_train": "DATASET",
    "toggle_type": "TOGGLE_TYPE",
    "sink_size": "SINK_SIZE",
    "load_masks_from": "LOAD_MASKS_FROM",
    "load_masks_sparsity": "LOAD_MASKS_SPARSITY",
    "per_device_train_batch_size": "SEQ",
}
"""Options of the trainer that the scripts fill from variables."""


def frozen(name: str) -> Rule:
    """Weights or gates that do not train."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        if yes(key, value):
            draft.add("freeze", name)
            draft.tell(key, value, "set", f"freeze: [{name}]")
        else:
            draft.tell(key, value, "automatic", note="trains, as is the default")

    return rule


def datasets(draft: ImportDraft, key: str, value: Any) -> None:
    """`path@0.3` is a share, `path#2` a repeat. The script for fine-tuning has one folder and the
    names of its domains.
    """
    if isinstance(value, list):
        paths = [text(key, path) for path in value]
    else:
        paths = text(key, value).split()

    note = "MDS folders do not record their tokenizer"
    domains = draft.value("DOMAINS")
    if domains is not None:
        names = text("DOMAINS", domains).split()
        paths = [f"{folder.rstrip('/')}/{name}" for folder in paths for name in names]
        note = "one source per name in DOMAINS; " + note

    sources: list[dict[str, Any]] = []
    for written in paths:
        path, _, share = written.partition("@")
        path, _, repeat = path.partition("#")
        source: dict[str, Any] = {"path": path}
        if share:
            source["weight"] = number(key, share)
        if repeat:
            source["repeat"] = integer(key, repeat)
        sources.append(source)
    draft.set("data.tokenizer_unchecked", True)
    draft.write(key, value, "data.train", sources, note)


def domains(draft: ImportDraft, key: str, value: Any) -> None:
    """Names below DATASET; without it they lead nowhere."""
    if draft.value("DATASET") is not None:
        draft.tell(key, value, "automatic", note="the sources of data.train, below DATASET")
    else:
        draft.tell(
            key,
            value,
            "missing",
            "data.train: [{path: DATASET/DOMAIN, weight: ...}]",
            "DATASET is not in the file",
        )


def batch(draft: ImportDraft, key: str, value: Any) -> None:
    """Sequences of a step; a sequence-parallel group shares one, so unique tokens are BSZ /
    SEQ_PARALLEL_SIZE rows of MAX_TOKS.
    """
    size = integer(key, value)
    usual = defaults(draft).get("SEQ_PARALLEL_SIZE", 1)
    shared = max(1, integer("SEQ_PARALLEL_SIZE", draft.value("SEQ_PARALLEL_SIZE", default=usual)))
    draft.write(
        key,
        value,
        "batch.rows",
        max(1, size // shared),
        f"{size} sequences shared by groups of {shared}",
    )


def local_heads(draft: ImportDraft, key: str, value: Any) -> None:
    """`local`: a window without sinks."""
    if value == "local":
        draft.write(key, value, "objective.sinks", 0)
    else:
        draft.tell(key, value, "automatic", note="objective.sinks counts")


def sharding(draft: ImportDraft, key: str, value: Any) -> None:
    """How parameters are divided, as a code from 0 to 5."""
    code = integer(key, value)
    if code in (0, 3):
        draft.write(key, value, "parallel.zero1.size", 1, "plain data parallelism")
    elif code in (1, 2, 4, 5):
        draft.set("parallel.strategy", "fsdp")
        settings = "parallel.strategy: fsdp"
        # torch's ShardingStrategy: 2 is SHARD_GRAD_OP, 4 and 5 are the hybrids of 1 and 2.
        if code in (2, 5):
            draft.set("parallel.fsdp.reshard_after_forward", False)
            settings += ", reshard_after_forward: false"
        draft.tell(key, value, "set", settings)
        if code in (4, 5):
            draft.tell(
                key,
                value,
                "missing",
                "parallel.fsdp.size: GPUS_PER_NODE",
                "the file does not say how many GPUs a node has",
            )
    else:
        draft.tell(key, value, "missing", "parallel.strategy: zero1 or fsdp", "not one of 0 to 5")


LAUNCH = automatic(
    "an option of the launch: headway train RECIPE --nproc N --nnodes N --node-rank K --master "
    "HOST:PORT"
)
ENVIRONMENT = automatic("read by torch, NCCL or the tokenizers library as before")
ENVIRONMENT_VARIABLES = (
    "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF",
    "CUDA_LAUNCH_BLOCKING", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS",
)  # fmt: skip
"""Variables that libraries read."""
OF_THE_SCRIPT = (
    "TIMESTAMP", "RUN_NAME", "OUT_DIR", "EXTRA_NAME", "WANDB_DIR", "FSDP_SHARDING_STRATEGY",
    "FSDP_STATE_DICT_TYPE", "BASE_ARGUMENTS", "fsdp", "tokenizer_name", "config_overrides_json",
    "use_fast_tokenizer", "rdzv-backend", "rdzv-endpoint", "nnodes", "nproc-per-node",
    "job-name", "checkpoint", "out_path", "sparsity",
)  # fmt: skip
"""Variables and options of the scripts themselves."""

RULES: dict[str, Rule] = {
    # The trainer is transformers', so its options work too; those that the scripts fill from
    # variables have the names of these variables (`LONG_NAMES`).
    **{key: rule for key, rule in hugging_face.RULES.items() if key not in LONG_NAMES},
    # The variables of the scripts: model, batch, schedule.
    "MODEL": sets("init.from", text),
    "BSZ": batch,
    "SEQ": sets("batch.micro_rows", integer),
    "MAX_TOKS": sets("data.seq_len", integer),
    "LR": sets("optim.lr", number),
    "WARMUP": sets("optim.schedule.warmup", number),
    "MIN_LR_RATIO": sets("optim.schedule.floor", number),
    "STEPS": sets("steps", integer),
    "SAVE": sets("checkpoint.every", integer),
    "SAVE_STEPS": sets("checkpoint.every", integer, "PruLong's scripts ignore it"),
    # The training of head gates.
    "START_HEAD_SPARSITY": sets("objective.start", number),
    "END_HEAD_SPARSITY": sets("objective.target", number),
    "SPARSITY_WARMUP_RATIO": sets("objective.warmup", number),
    "WARMUP_TYPE": sets("objective.warmup_shape", text),
    "MASK_LEARNING_RATE": sets("objective.mask_lr", number),
    "REG_LEARNING_RATE": sets("objective.reg_lr", number),
    "DISABLE_LINEAR_REG_TERM": sets(
        "objective.linear_term", lambda key, value: not yes(key, value)
    ),
    "CONTEXT_WINDOW_IF_TOGGLED": sets("objective.window", integer),
    "SINK_SIZE": sets("objective.sinks", integer),
    "TOGGLE_TYPE": local_heads,
    # What trains, and masks to start from.
    "FREEZE_WEIGHTS": frozen("weights"),
    "FREEZE_MASKS": frozen("gates"),
    "LOAD_MASKS_FROM": sets("init.masks", text),
    "LOAD_MASKS_SPARSITY": sets("init.masks_sparsity", number),
    # Data, ranks and memory.
    "DATASET": datasets,
    "DOMAINS": domains,
    "SEQ_PARALLEL_SIZE": sets("parallel.context", integer),
    "FSDP": sharding,
    "GC": hugging_face.recompute,
    "LOGIT_BLOCK_SIZE": sets("memory.loss_chunk_tokens", integer),
    # The run.
    "OVERRIDES": missing("settings of the model are settings of the recipe", "model: {...}"),
    "SUFFIX": missing("the run has one name", "run.name"),
    "BF16": hugging_face.precision("bf16"),
    "TORCH_COMPILE": hugging_face.compiled,
    "DATALOADER_NUM_WORKERS": sets("data.workers", integer),
    "DATALOADER_PIN_MEMORY": hugging_face.pinned,
    "RESUME_FROM_CHECKPOINT": missing(
        "a run resumes by itself", "headway train RECIPE --resume CHECKPOINT"
    ),
    # Options that the command has besides those of transformers' trainer.
    "apply_instruct_masks": automatic("the mask column of an MDS store is the loss mask"),
    "token_scaled_loss": automatic("the loss is always divided by the targets of the whole step"),
    "should_log_loss": automatic("metrics.jsonl has every step"),
    "WANDB_PROJECT": tracks("wandb", "project"),
    "WANDB_MODE": tracker_mode("wandb"),
    **dict.fromkeys(
        ("NUM_GPUS", "NUM_NODES", "MASTER_ADDR", "MASTER_PORT", "HEADER", "ACCU"), LAUNCH
    ),
    **dict.fromkeys(ENVIRONMENT_VARIABLES, ENVIRONMENT),
    **dict.fromkeys(OF_THE_SCRIPT, automatic("a variable or option of the script itself")),
}

MASKS_ONLY: dict[str, Any] = {
    "BSZ": 16,
    "SEQ": 1,
    "LR": 1e-5,
    "STEPS": 1000,
    "SAVE": 200,
    "WARMUP": 0.1,
    "MIN_LR_RATIO": 0.01,
    "SEQ_PARALLEL_SIZE": 2,
    "FSDP": 1,
    "GC": 1,
    "MAX_TOKS": 131072,
    "START_HEAD_SPARSITY": 0.0,
    "END_HEAD_SPARSITY": 0.7,
    "MASK_LEARNING_RATE": 1.0,
    "REG_LEARNING_RATE": 1.0,
    "SPARSITY_WARMUP_RATIO": 0.8,
    "WARMUP_TYPE": "linear",
    "CONTEXT_WINDOW_IF_TOGGLED": 1024,
    "SINK_SIZE": 128,
    "FREEZE_WEIGHTS": True,
    "LOGIT_BLOCK_SIZE": 2048,
    "save_total_limit": 3,
}
"""Defaults of prulong_masksonly.sh."""
MASKS_AND_WEIGHTS = MASKS_ONLY | {
    "MIN_LR_RATIO": 0.1,
    "START_HEAD_SPARSITY": 0.7,
    "FREEZE_WEIGHTS": False,
    "save_total_limit": 1,
}
"""Defaults of prulong_masksandweights.sh."""
FINE_TUNING: dict[str, Any] = {
    "BSZ": 64,
    "SEQ": 1,
    "LR": 2e-5,
    "STEPS": 250,
    "SAVE": 250,
    "WARMUP": 0.05,
    "MIN_LR_RATIO": 0.1,
    "SEQ_PARALLEL_SIZE": 2,
    "FSDP": 1,
    "GC": 1,
    "MAX_TOKS": 131072,
    "FREEZE_MASKS": True,
    "LOGIT_BLOCK_SIZE": 2048,
    "save_total_limit": 3,
}
"""Defaults of sft.sh. Gates and their settings come with the checkpoint."""
TRAINER: dict[str, Any] = {
    "MIN_LR_RATIO": 0.0,
    "END_HEAD_SPARSITY": 0.95,
    "MASK_LEARNING_RATE": 1e-3,
    "REG_LEARNING_RATE": 1e-3,
    "WARMUP_TYPE": "linear",
    "SPARSITY_WARMUP_RATIO": 0.05,
    "CONTEXT_WINDOW_IF_TOGGLED": 4096,
}
"""Defaults of the trainer's own options, for a command without a script."""


def defaults(draft: ImportDraft) -> dict[str, Any]:
    """Those of the script that the file is, or that its variables are for; of the trainer for a
    command without a script.
    """
    if is_command(draft):
        if is_fine_tuning(draft):
            return {"MIN_LR_RATIO": TRAINER["MIN_LR_RATIO"]}
        return TRAINER
    if is_fine_tuning(draft):
        script = FINE_TUNING
    elif is_masks_and_weights(draft):
        script = MASKS_AND_WEIGHTS
    else:
        script = MASKS_ONLY

    script = dict(script)
    if draft.value("NUM_GPUS") == 1 and draft.value("NUM_NODES", default=1) == 1:
        # Two GPUs share a sequence in the scripts; a file for one GPU cannot mean that.
        script["SEQ_PARALLEL_SIZE"] = 1
    # Defaults are applied after the file's keys, and these two would overwrite what other keys of
    # the file have set.
    if draft.value("SAVE_STEPS") is not None:
        script.pop("SAVE")
    if draft.value("TOGGLE_TYPE") == "local":
        script.pop("SINK_SIZE", None)
    return script


def is_command(draft: ImportDraft) -> bool:
    """The model is named in the command itself; scripts name it in a variable."""
    return "MODEL" in draft.options


def is_fine_tuning(draft: ImportDraft) -> bool:
    """Gates frozen and weights not: fine-tuning under masks, without the objective of the gates."""
    freezes_gates = _says(draft, "FREEZE_MASKS", otherwise=draft.source.stem.startswith("sft"))
    return freezes_gates and not _says(draft, "FREEZE_WEIGHTS", otherwise=False)


def is_masks_and_weights(draft: ImportDraft) -> bool:
    """Weights train beside the gates. A file that does not say so is for the script that trains
    gates alone.
    """
    return not _says(draft, "FREEZE_WEIGHTS", otherwise="masksandweights" not in draft.source.stem)


def _says(draft: ImportDraft, key: str, *, otherwise: bool) -> bool:
    value = draft.value(key)
    if value is None:
        return otherwise
    return yes(key, value)


def finish(draft: ImportDraft) -> None:
    """The objective, and the trainer's constants."""
    if is_fine_tuning(draft):
        draft.recipe.pop("objective", None)
        draft.tell(
            "FREEZE_MASKS",
            True,
            "set",
            "objective: next_token",
            "frozen gates need no objective; they come with init.from",
        )
    else:
        # `set` makes the section if no key did. Then `kind` becomes its first key.
        draft.set("objective.kind", "head_sparsity")
        draft.recipe["objective"] = {"kind": "head_sparsity", **draft.recipe["objective"]}
    if draft.get("init.masks") is None and draft.get("init.masks_sparsity") is not None:
        draft.recipe["init"].pop("masks_sparsity")
        draft.tell(
            "LOAD_MASKS_SPARSITY",
            draft.value("LOAD_MASKS_SPARSITY"),
            "automatic",
            note="no masks are loaded from a file",
        )
    draft.default("optim.betas", [0.9, 0.95])
    draft.default("optim.weight_decay", 0.1)
    draft.default("precision", "bf16")
    draft.tell(
        "constants",
        None,
        "assumed",
        "optim: {betas: [0.9, 0.95], weight_decay: 0.1}, precision: bf16",
        "fixed in the scripts",
    )
    # The rows may be longer than the context of the model that is trained further.
    if length := draft.get("data.seq_len"):
        draft.set("model.max_seq_len", length)
