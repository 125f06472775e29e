"""Keys of transformers' TrainingArguments, which Flare, PruLong, LLaMA-Factory and others take
over. One table, used by several systems.

DEFAULTS are the trainer's own, for keys that a file leaves out and for which headway's default
differs (transformers 4.57).
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from headway.config.kinds import kind_names
from headway.workflows.import_config.rules import (
    NOT_USED,
    OFF,
    ImportDraft,
    Rule,
    automatic,
    if_setting,
    integer,
    missing,
    number,
    one_of,
    sets,
    text,
    tracker,
    words,
    yes,
)

SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}
"""Their schedules -> ours."""
LONGEST_TIMEOUT = 86400
"""Seconds. Timeouts above it stand for something else than ranks that wait."""
PLAIN_ADAMW = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_hf",
    "adamw",
    "adamw_apex_fused",
    "adamw_anyprecision",
)
OTHER_OPTIMIZERS = {"muon": "muon", "lion": "lion", "lion_32bit": "lion", "adafactor": "adafactor"}
SCHEDULE_FREE = (
    "schedule_free_adamw",
    "adamw_schedule_free",
    "schedulefree_adamw",
    "schedule_free",
)


def output_folder(draft: ImportDraft, key: str, value: Any) -> None:
    """`outputs/lora-out` is run.dir outputs and run.name lora-out."""
    # Posix on every system: the file may be from another machine.
    path = PurePosixPath(text(key, value))
    if path.name and str(path.parent) != ".":
        draft.set("run.dir", str(path.parent))
    draft.set("run.name", path.name or "run")
    draft.tell(
        key,
        value,
        "set",
        f"run.dir: {draft.get('run.dir') or 'runs'}, run.name: {draft.get('run.name')}",
    )


def schedule(draft: ImportDraft, key: str, value: Any) -> None:
    """The shape of the learning rate; transformers' schedules end at 0."""
    if value == "constant":
        # Their `constant` ignores the warm-up keys, which `constant_with_warmup` reads.
        draft.set("optim.schedule.warmup", 0)
        draft.write(key, value, "optim.schedule.kind", "constant", "without warm-up")
    elif value in SCHEDULES:
        # A default: keys such as cosine_min_lr_ratio may have set another floor.
        draft.default("optim.schedule.floor", 0.0)
        draft.write(
            key, value, "optim.schedule.kind", SCHEDULES[value], "falls to 0 (optim.schedule.floor)"
        )
    else:
        draft.tell(
            key,
            value,
            "missing",
            "optim.schedule.kind: cosine, linear, constant or wsd",
            "there is no schedule of this shape; without a setting it is cosine",
        )


def warmup_share(draft: ImportDraft, key: str, value: Any) -> None:
    """Warm-up as a share of all steps; a number of steps wins over it."""
    if draft.value("warmup_steps"):
        draft.tell(key, value, "automatic", note="warmup_steps is given and wins")
    elif draft.value("lr_scheduler_type", "lr_scheduler") == "constant":
        draft.tell(key, value, "automatic", note="this schedule has no warm-up")
    else:
        draft.write(key, value, "optim.schedule.warmup", float(number(key, value)) or 0)


def warmup_steps(draft: ImportDraft, key: str, value: Any) -> None:
    """Warm-up in steps; newer versions of transformers take a share here as well."""
    steps = number(key, value)
    if not steps:
        draft.tell(key, value, "automatic", note="0: warmup_ratio counts")
        return
    # headway's setting takes both as well: a share below 1, steps from 1 on.
    if not 0 < steps < 1:
        steps = int(steps)
    draft.write(key, value, "optim.schedule.warmup", steps)


def beta(index: int) -> Rule:
    """One of Adam's two decay rates."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        # A file may give one of them; the other keeps Adam's usual value.
        betas = list(draft.get("optim.betas") or (0.9, 0.999))
        betas[index] = float(number(key, value))
        draft.write(key, value, "optim.betas", betas)

    return rule


def optimizer(draft: ImportDraft, key: str, value: Any) -> None:
    """The optimizer and how it stores its state."""
    name = text(key, value).lower()
    kinds = kind_names("headway.optim")
    schedule_free = next((kind for kind in kinds if "free" in kind), None)
    if name in PLAIN_ADAMW:
        draft.write(key, value, "optim.kind", "adamw")
    elif name.removeprefix("paged_") in ("adamw_8bit", "adamw_bnb_8bit"):
        note = ""
        if name.startswith("paged_"):
            note = "paging: memory.offload: [optimizer]"
        draft.set("optim.kind", "adamw")
        draft.write(key, value, "optim.state_dtype", "8bit", note)
    elif name == "paged_adamw_32bit":
        draft.set("optim.kind", "adamw")
        draft.add("memory.offload", "optimizer")
        draft.tell(key, value, "set", "optim.kind: adamw, memory.offload: [optimizer]")
    elif OTHER_OPTIMIZERS.get(name) in kinds:
        draft.write(
            key,
            value,
            "optim.kind",
            OTHER_OPTIMIZERS[name],
            "check optim.lr: rates of other optimizers are not comparable",
        )
    elif name in SCHEDULE_FREE and schedule_free is not None:
        draft.write(key, value, "optim.kind", schedule_free)
    else:
        draft.tell(
            key,
            value,
            "missing",
            f"optim.kind: {', '.join(kinds)}",
            "there is no such optimizer; without a setting it is adamw",
        )


def num_steps(draft: ImportDraft, key: str, value: Any) -> None:
    """Steps win over epochs; -1 means that epochs count."""
    steps = integer(key, value)
    if steps > 0:
        # A recipe gives one of the two. The rule of epochs may have run before.
        draft.recipe.pop("epochs", None)
        draft.write(key, value, "steps", steps)
    else:
        draft.tell(key, value, "automatic", note="-1: epochs count")


def num_epochs(draft: ImportDraft, key: str, value: Any) -> None:
    """Passes over the data, unless the file gives steps."""
    if number("max_steps", draft.value("max_steps", default=-1)) > 0:
        draft.tell(key, value, "automatic", note="max_steps is given and wins")
        return
    epochs = number(key, value)
    # Their files often say 3.0, where a recipe says 3.
    if float(epochs).is_integer():
        epochs = int(epochs)
    draft.write(key, value, "epochs", epochs)


def interval(path: str) -> Rule:
    """Steps between two events; below 1 it is a share of the run in their trainer."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        steps = number(key, value)
        if 0 < steps < 1:
            draft.tell(
                key,
                value,
                "missing",
                f"{path}: STEPS",
                "a share of the run; write the number of steps",
            )
        elif steps < 1:
            draft.write(key, value, path, None)
        else:
            draft.write(key, value, path, int(steps))

    return rule


def by_steps(path: str) -> Rule:
    """`steps` is how headway counts; `no` switches off; `epoch` has no form."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        if value == "no":
            draft.write(key, value, path, None, "only at the end")
        elif value == "steps":
            draft.tell(key, value, "automatic", note=f"{path} counts steps")
        else:
            draft.tell(key, value, "missing", f"{path}: STEPS", f"{path} counts steps, not epochs")

    return rule


def precision(name: str) -> Rule:
    """bf16, fp16 and the like are switches; the one that is on is the precision."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        if value == "auto":
            draft.write(key, value, "precision", "auto", "bf16 on CUDA, else fp32")
        elif value == "full" or yes(key, value):
            draft.write(key, value, "precision", name)
        else:
            draft.tell(key, value, "automatic", note=NOT_USED)

    return rule


def recompute(draft: ImportDraft, key: str, value: Any) -> None:
    """Activation checkpointing; `offload` moves the rest to host memory."""
    if value in ("offload", "offload_disk"):
        draft.set("memory.recompute", True)
        draft.add("memory.offload", "activations")
        draft.tell(key, value, "set", "memory.recompute: true, memory.offload: [activations]")
    elif yes(key, value):
        draft.write(key, value, "memory.recompute", True)
    else:
        draft.write(key, value, "memory.recompute", "none")


def deepspeed(draft: ImportDraft, key: str, value: Any) -> None:
    """The name of a DeepSpeed file says its stage; `offload` in the name moves optimizer state to
    the host.
    """
    name = str(value).lower()
    marks = ("z0", "zero1", "z1", "zero2", "z2", "zero3", "z3")
    mark = next((mark for mark in marks if mark in name), None)
    if mark is None:
        draft.tell(
            key,
            value,
            "missing",
            "parallel.strategy: zero1 or fsdp",
            "the stage is not in the file's name",
        )
        return

    stage = mark[-1]
    if stage == "0":
        draft.set("parallel.zero1.size", 1)
        settings = "parallel.zero1.size: 1"
    elif stage == "1":
        draft.set("parallel.strategy", "zero1")
        settings = "parallel.strategy: zero1"
    else:
        draft.set("parallel.strategy", "fsdp")
        settings = "parallel.strategy: fsdp"
        # Stage 2 divides gradients and optimizer state, and keeps parameters whole in a step.
        if stage == "2":
            draft.set("parallel.fsdp.reshard_after_forward", False)
            settings += ", parallel.fsdp.reshard_after_forward: false"
    if "offload" in name:
        draft.add("memory.offload", "optimizer")
        settings += ", memory.offload: [optimizer]"
    draft.tell(key, value, "set", settings, "from the file's name; the file itself is not read")


def fully_sharded(draft: ImportDraft, key: str, value: Any) -> None:
    """FSDP: true, or words such as `full_shard auto_wrap` (a text or a list)."""
    names = [part for word in listed(value) for part in word.split()]
    if "no_shard" in names:
        draft.write(key, value, "parallel.zero1.size", 1, "plain data parallelism")
        return
    if value in OFF or value == []:
        draft.tell(key, value, "automatic", note=NOT_USED)
        return

    draft.set("parallel.strategy", "fsdp")
    settings = "parallel.strategy: fsdp"
    # Parameters stay whole between forward and backward; gradients and optimizer state are sharded.
    if "shard_grad_op" in names:
        draft.set("parallel.fsdp.reshard_after_forward", False)
        settings += ", parallel.fsdp.reshard_after_forward: false"
    if "offload" in names:
        draft.add("memory.offload", "optimizer")
        settings += ", memory.offload: [optimizer]"
    note = ""
    if any(name.startswith("hybrid_shard") for name in names):
        note = "hybrid: parallel.fsdp.size says how many ranks share a copy"
    draft.tell(key, value, "set", settings, note)


def listed(value: Any) -> list[str]:
    """The words of a text or a list; none of any other value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, (list, tuple)):
        return [str(word) for word in value]
    return []


def of_trackio(option: str) -> Rule:
    """An option of the tracker trackio, which their trainer ignores without `report_to: trackio`."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        if "trackio" in listed(draft.value("report_to")):
            tracker(draft, key, value, "trackio", **{option: value})
        else:
            draft.tell(key, value, "automatic", note="counts with report_to: trackio alone")

    return rule


def report_to(draft: ImportDraft, key: str, value: Any) -> None:
    """Trackers by name, one or several; each gets its own line in the report."""
    for name in words(key, value):
        if name in ("none", ""):
            draft.tell(key, value, "automatic", note="metrics.jsonl is always written")
        else:
            tracker(draft, key, name, name)


def compiled(draft: ImportDraft, key: str, value: Any) -> None:
    """torch.compile: true, false or `auto`."""
    draft.write(key, value, "kernels.compile", "auto" if value == "auto" else yes(key, value))


def pinned(draft: ImportDraft, key: str, value: Any) -> None:
    """Pinned memory if there is a GPU."""
    draft.write(key, value, "data.pin_memory", "auto" if yes(key, value) else False)


def timeout(draft: ImportDraft, key: str, value: Any) -> None:
    """Seconds that ranks wait; very long ones only stood in for slow data preparation."""
    seconds = float(number(key, value))
    if seconds > LONGEST_TIMEOUT:
        draft.tell(
            key,
            value,
            "automatic",
            note="ranks wait for tokenization on a lock file, not in a collective; the default of "
            "30 minutes is enough",
        )
    else:
        draft.write(key, value, "parallel.timeout_seconds", seconds)


def validation(draft: ImportDraft, key: str, value: Any) -> None:
    """A share of the documents; the other systems also take a number of them."""
    share = number(key, value)
    if share == 0:
        draft.tell(key, value, "automatic", note="no validation")
    elif share < 1:
        draft.write(key, value, "data.valid.fraction", float(share))
    else:
        draft.tell(
            key,
            value,
            "missing",
            "data.valid.fraction: 0.05",
            "a number of documents; give their share",
        )


def packing(draft: ImportDraft, key: str, value: Any) -> None:
    """Rows of several documents, which do not see each other; without packing each row has one."""
    draft.write(key, value, "data.packing", "best_fit" if yes(key, value) else "pad")


WITHOUT_MEANING = (
    "label_names", "length_column_name", "remove_unused_columns", "skip_memory_metrics",
    "use_legacy_prediction_loop", "log_level", "include_inputs_for_metrics", "torchdynamo",
    "ray_scope", "jit_mode_eval", "use_ipex", "disable_tqdm", "prediction_loss_only",
    "include_num_input_tokens_seen", "include_tokens_per_second", "ddp_bucket_cap_mb",
    "ddp_broadcast_buffers", "local_rank", "cuda_empty_cache", "torch_empty_cache_steps",
    "accelerator_config",
)  # fmt: skip
"""Options of transformers' trainer without a meaning here."""

OWN_KERNELS = automatic("losses and other fused operations are headway's own")
OF_VALIDATION = automatic("validation adds up losses and keeps no predictions")

RULES: dict[str, Rule] = {
    # The run, its optimizer and its schedule.
    "output_dir": output_folder,
    "run_name": sets("run.name", text),
    "seed": sets("seed", integer),
    "learning_rate": sets("optim.lr", number),
    "weight_decay": sets("optim.weight_decay", number),
    "adam_beta1": beta(0),
    "adam_beta2": beta(1),
    "adam_epsilon": sets("optim.eps", number),
    "max_grad_norm": sets("optim.clip", number),
    "optim": optimizer,
    "lr_scheduler_type": schedule,
    "warmup_ratio": warmup_share,
    "warmup_steps": warmup_steps,
    "lr_scheduler_kwargs": missing(
        "the options of a schedule are settings", "optim.schedule.floor, optim.schedule.decay"
    ),
    "optim_args": missing(
        "the options of an optimizer are settings", "optim.betas, optim.eps, optim.weight_decay"
    ),
    "optim_target_modules": missing(
        "there is no optimizer of low rank (GaLore, APOLLO)", "optim.groups, adapter.rank"
    ),
    "label_smoothing_factor": sets("objective.label_smoothing", number),
    # Length and batch. Their batch counts rows of one device, so it becomes rows_per_rank:
    # batch.rows would not grow with the number of ranks.
    "num_train_epochs": num_epochs,
    "max_steps": num_steps,
    "per_device_train_batch_size": sets("batch.rows_per_rank", integer),
    "gradient_accumulation_steps": sets("batch.accumulate", integer),
    "average_tokens_across_devices": automatic(
        "a loss is the mean over the tokens of all ranks, without a setting"
    ),
    "per_device_eval_batch_size": automatic("validation uses the microbatch of training"),
    "auto_find_batch_size": missing(
        "microbatches are sized by another key", "batch.micro_rows: auto"
    ),
    # Precision, memory and compilation.
    "bf16": precision("bf16"),
    "fp16": precision("fp16"),
    "fp8": precision("fp8"),
    "bf16_full_eval": automatic("validation has the precision of training"),
    "fp16_full_eval": automatic("validation has the precision of training"),
    "tf32": sets("kernels.tf32", yes),
    "gradient_checkpointing": recompute,
    "gradient_checkpointing_kwargs": automatic("the recomputation needs no options"),
    "torch_compile": compiled,
    "torch_compile_backend": automatic("blocks are compiled with torch's default backend"),
    "torch_compile_mode": automatic("blocks are compiled with torch's default mode"),
    "use_liger_kernel": OWN_KERNELS,
    "liger_kernel_config": OWN_KERNELS,
    "use_cache": automatic("training keeps no cache of keys and values"),
    # Communication between ranks.
    "deepspeed": deepspeed,
    "ddp_timeout": timeout,
    "ddp_backend": automatic("nccl on GPUs, gloo on CPUs"),
    "ddp_find_unused_parameters": automatic(
        "parameters without a gradient are found before the run"
    ),
    "ddp_static_graph": automatic("headway exchanges gradients itself, without torch's DDP"),
    "fsdp": fully_sharded,
    "fsdp_config": missing(
        "blocks are wrapped, loaded and saved without options",
        "parallel.fsdp.size, parallel.fsdp.reshard_after_forward, memory.recompute",
    ),
    "parallelism_config": missing(
        "each axis is a setting",
        "parallel.tensor, parallel.context, parallel.expert, parallel.pipeline, parallel.fsdp.size",
    ),
    # Logging and validation, which headway counts in steps alone.
    "logging_steps": interval("log.every"),
    "logging_strategy": by_steps("log.every"),
    "logging_first_step": automatic("metrics.jsonl has every step"),
    "logging_dir": automatic("the run folder has a tensorboard/ folder"),
    "logging_nan_inf_filter": missing(
        "a loss that is not finite is shown as it is", "heal.on_nan says what happens to its step"
    ),
    "log_on_each_node": automatic("rank 0 logs; other ranks have warnings and errors"),
    "log_level_replica": automatic("rank 0 logs; other ranks have warnings and errors"),
    "debug": missing("headway starts no debugger", "heal.on_nan, `headway profile`"),
    "report_to": report_to,
    "project": of_trackio("project"),
    "trackio_space_id": of_trackio("space"),
    "trackio_bucket_id": missing("metrics go to no bucket", "track: [{kind: trackio}]"),
    "trackio_static_space_id": missing("no page is made after a run", "`headway report RUN`"),
    "eval_steps": interval("eval.every"),
    "eval_strategy": by_steps("eval.every"),
    "evaluation_strategy": by_steps("eval.every"),
    "eval_on_start": sets("eval.at_start", yes),
    "eval_delay": missing("the first validation is after one interval", "eval.every"),
    **dict.fromkeys(
        (
            "batch_eval_metrics",
            "eval_accumulation_steps",
            "eval_do_concat_batches",
            "eval_use_gather_object",
            "include_for_metrics",
        ),
        OF_VALIDATION,
    ),
    # Checkpoints, the best of them, and early stopping.
    "save_steps": interval("checkpoint.every"),
    "save_strategy": by_steps("checkpoint.every"),
    "save_total_limit": sets("checkpoint.keep_last", integer),
    "save_only_model": automatic(
        "checkpoints hold everything a resumed run needs; final/ has the model alone"
    ),
    "save_on_each_node": automatic("each rank writes its part of a checkpoint, once"),
    "enable_jit_checkpoint": automatic("a run that gets SIGTERM saves before it exits"),
    "save_safetensors": automatic("all files are safetensors"),
    "load_best_model_at_end": automatic(
        "best-1 links to the best checkpoint; with eval.stop, final/ is the best one"
    ),
    "metric_for_best_model": one_of(
        "checkpoint.metric",
        {"eval_loss": "loss", "loss": "loss"},
        "the metric has another name here",
        "checkpoint.metric: SET/METRIC",
    ),
    "greater_is_better": automatic("checkpoint.goal follows the metric"),
    "early_stopping_patience": sets("eval.stop.patience", integer),
    "early_stopping_threshold": sets("eval.stop.min_delta", number),
    "resume_from_checkpoint": missing(
        "a run resumes by itself",
        "headway train RECIPE --resume CHECKPOINT",
        off=(False, True, "auto"),
    ),
    "ignore_data_skip": automatic(
        "a resumed run continues at the next row; it does not read those before"
    ),
    "restore_callback_states_from_checkpoint": missing(
        "a checkpoint has no state of callbacks", "control.lr_scale, which it has"
    ),
    "overwrite_output_dir": automatic("the same command resumes; --resume never starts over"),
    # Reading data.
    "dataloader_num_workers": sets("data.workers", integer),
    "dataloader_pin_memory": pinned,
    "dataloader_prefetch_factor": sets(
        "data.prefetch", integer, "in steps, not in batches of a worker"
    ),
    "dataloader_persistent_workers": automatic("readers live as long as the run"),
    "dataloader_multiprocessing_context": automatic("threads read rows (data.workers)"),
    "dataloader_in_order": automatic("the order of rows does not depend on their readers"),
    "data_seed": missing("one seed orders the data, too", "seed", off=(None,)),
    "train_sampling_strategy": missing(
        "documents are shuffled and packed", "data.packing, data.balance", off=(None, "random")
    ),
    "dataloader_drop_last": automatic("every step has the same number of rows"),
    "group_by_length": missing(
        "rows are packed instead", "data.packing: best_fit, data.balance: true"
    ),
    # Features without a counterpart, or with a setting of another form.
    "neftune_noise_alpha": missing("there is no noise on embeddings"),
    "full_determinism": sets("deterministic", yes),
    "use_cpu": missing("a device is named", "device: cpu"),
    "push_to_hub": missing(
        "a run uploads nothing by itself",
        "`headway push RUN USER/NAME` after it has ended",
    ),
    "hub_*": missing(
        "a run uploads nothing by itself",
        "`headway push RUN USER/NAME` after it has ended",
    ),
    # Axes of parallelism; their trainer has 1 where an axis is not used.
    "context_parallel_size": if_setting("parallel.context", integer, "no context parallelism"),
    "tensor_parallel_size": if_setting(
        "parallel.tensor", integer, "there is no tensor parallelism", "parallel.strategy: fsdp"
    ),
    **dict.fromkeys(
        ("do_train", "do_eval", "do_predict"),
        automatic("the verb says it: headway train, headway eval"),
    ),
    **dict.fromkeys(
        WITHOUT_MEANING,
        automatic("an option of transformers' trainer without a meaning here"),
    ),
}

DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0.0,
    "num_train_epochs": 3,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
}

LORA: dict[str, Rule] = {
    "lora_r": sets("adapter.rank", integer),
    "lora_rank": sets("adapter.rank", integer),
    "lora_alpha": sets("adapter.alpha", number),
    "lora_dropout": sets("adapter.dropout", number),
    "lora_target_modules": sets("adapter.targets", words),
    "use_rslora": sets("adapter.rslora", yes),
}


def trained_layers(layers: Any) -> list[str]:
    """`[20, 21, 22]` as patterns of `train`: `layers.20-22`."""
    # [first, last] of each stretch of neighbours.
    stretches: list[list[int]] = []
    for layer in sorted({integer("layers", item) for item in layers}):
        if stretches and layer == stretches[-1][1] + 1:
            stretches[-1][1] = layer
        else:
            stretches.append([layer, layer])

    patterns: list[str] = []
    for first, last in stretches:
        if first == last:
            patterns.append(f"layers.{first}")
        else:
            patterns.append(f"layers.{first}-{last}")
    return patterns
