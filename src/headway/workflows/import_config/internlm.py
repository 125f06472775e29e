"""InternLM's and InternEvo's Python configuration (InternLM v0.1 to v0.2.1; InternEvo's forms of
the same keys). Never executed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.runtime.optional import how_to_get
from headway.workflows.import_config.hugging_face import beta
from headway.workflows.import_config.rules import (
    NOT_USED,
    ImportDraft,
    Rule,
    automatic,
    has_setting,
    if_setting,
    integer,
    missing,
    number,
    one_of,
    sets,
    text,
    yes,
)

SYSTEM = "InternLM"
DTYPES = {
    "torch.float16": "fp16",
    "torch.half": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float32": "fp32",
    "torch.tf32": "fp32",
}
FAMILIES = {"INTERNLM": "internlm", "LLAMA2": "llama", "LLAMA": "llama", "QWEN2": "qwen2"}
TYPES_UNCHECKED = "InternLM's files do not record their tokenizer"
FFN_MULTIPLE = 256
"""The width of the feed-forward layer is a multiple of it."""


def local(value: str) -> str:
    """A path without the prefix of its storage; `boto3:` paths stay as they are, which headway
    reads.
    """
    return value.removeprefix("local:")


def train_folder(draft: ImportDraft, key: str, value: Any) -> None:
    """One folder with a folder per type."""
    source: dict[str, Any] = {"path": local(text(key, value))}
    if (least := draft.value("data.min_length")) is not None:
        source["min_length"] = max(1, integer("data.min_length", least))
    draft.set("data.tokenizer_unchecked", True)
    draft.write(key, value, "data.train", [source], TYPES_UNCHECKED)


def valid_folder(draft: ImportDraft, key: str, value: Any) -> None:
    """One validation set per folder in it."""
    draft.write(key, value, "data.valid.sets", local(text(key, value)))


def never_is_null(path: str) -> Rule:
    """An interval in steps; 0 and infinity mean never."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        steps = number(key, value)
        setting = None
        if 0 < steps < math.inf:
            setting = int(steps)
        draft.write(key, value, path, setting)

    return rule


def rampup(draft: ImportDraft, key: str, value: Any) -> None:
    """`start increment interval`: two numbers of microbatches of a rank, and one of steps. headway
    counts rows.
    """
    if not str(value).strip():
        draft.tell(key, value, "automatic", note=NOT_USED)
        return
    numbers = [integer(key, part) for part in str(value).split()]
    rows = integer("data.micro_bsz", draft.value("data.micro_bsz", default=1))
    if len(numbers) != 3:
        raise ConfigError(
            f"{key} is {value!r}; it must be three numbers: start, increment and interval."
        )
    # InternLM counts microbatches, headway rows.
    start, add, every = numbers
    draft.write(
        key,
        value,
        "batch.rampup",
        {"start": rows * start, "add": rows * add, "every": every, "per_rank": True},
    )


def zero1(draft: ImportDraft, key: str, value: Any) -> None:
    """-1: over all ranks; 1: none; else the size of a group."""
    size = integer(key, value)
    draft.write(key, value, "parallel.zero1.size", "auto" if size <= 0 else size)


def is_ignored(draft: ImportDraft, path: str) -> bool:
    """Whether InternLM would not read these weights: with auto_resume, its default, only the newest
    checkpoint of the run counts.

    The folder of a published example is a placeholder. One that exists is meant, whatever InternLM
    does.
    """
    # The older key says the opposite of auto_resume.
    resumes = draft.value("ckpt.auto_resume")
    if resumes is None:
        resumes = not yes(
            "ckpt.load_given_ckpt", draft.value("ckpt.load_given_ckpt", default=False)
        )
    is_remote = ":" in path
    return yes("ckpt.auto_resume", resumes) and not is_remote and not Path(path).exists()


def load_path(draft: ImportDraft, key: str, value: Any) -> None:
    """The weights to start from."""
    path = local(text(key, value))
    if is_ignored(draft, path):
        note = (
            "no such folder here, and InternLM ignores it unless auto_resume=False; the recipe "
            "starts from random weights"
        )
        draft.tell(key, value, "missing", f"init.from: {path}", note)
    else:
        draft.write(key, value, "init.from", path)


def load_content(draft: ImportDraft, key: str, value: Any) -> None:
    """What is taken from the checkpoint; a position in InternLM's data has no meaning here."""
    if is_ignored(draft, local(str(draft.value("ckpt.load_ckpt_info.path", default="")))):
        draft.tell(key, value, "automatic", note="no checkpoint is loaded")
        return
    names = value if isinstance(value, list) else [value]
    parts = [str(name) for name in names]
    content = [part for part in parts if part != "sampler"]
    if "all" in parts:
        content = ["model", "optimizer", "scheduler"]
    draft.write(key, value, "init.content", content)
    if {"sampler", "all"} & set(parts):
        draft.tell(
            key,
            value,
            "missing",
            "",
            "the position in InternLM's data does not fit headway's order of documents",
        )


def load_folder(draft: ImportDraft, key: str, value: Any) -> None:
    """The older form of load_ckpt_info."""
    if draft.value("ckpt.load_ckpt_info.path"):
        draft.tell(key, value, "automatic", note="load_ckpt_info is given and wins")
    else:
        load_path(draft, key, value)


def save_folder(draft: ImportDraft, key: str, value: Any) -> None:
    """A local folder holds the run; an object store receives the checkpoints."""
    folder = text(key, value)
    if folder.startswith("local:") or "://" not in folder:
        draft.write(key, value, "run.dir", local(folder))
    else:
        draft.write(key, value, "checkpoint.to", folder, how_to_get("boto3") or "")


def saving(draft: ImportDraft, key: str, value: Any) -> None:
    """A switch; false means no checkpoints at all."""
    if yes(key, value):
        draft.tell(key, value, "automatic", note="checkpoint.every counts")
    else:
        # `finish` writes it, after the rules of the intervals.
        draft.tell(key, value, "set", "checkpoint: {every: null, at_end: false}")


def recompute(draft: ImportDraft, key: str, value: Any) -> None:
    """true, false, or a share of the layers."""
    if isinstance(value, bool):
        draft.write(key, value, "memory.recompute", True if value else "none")
    else:
        draft.write(key, value, "memory.recompute", float(number(key, value)) or "none")


def packed(draft: ImportDraft, key: str, value: Any) -> None:
    """True: attention spans the whole row."""
    draft.write(key, value, "data.packing", "one_document" if yes(key, value) else "concat")


def alerts(draft: ImportDraft, key: str, value: Any) -> None:
    """Feishu; the address comes from the environment."""
    if value is True:
        draft.add("track", {"kind": "alert", "form": "feishu", "url_env": "FEISHU_WEBHOOK"})
        draft.tell(
            key, value, "set", "track: [{kind: alert, form: feishu, url_env: FEISHU_WEBHOOK}]"
        )
    else:
        draft.tell(key, value, "automatic", note=NOT_USED)


def floor(draft: ImportDraft, key: str, value: Any) -> None:
    """eta_min as a share of the peak."""
    peak = float(number("adam.lr", draft.value("adam.lr", default=0.0)))
    if peak > 0:
        draft.write(key, value, "optim.schedule.floor", round(float(number(key, value)) / peak, 6))
    else:
        draft.tell(
            key,
            value,
            "missing",
            "optim.schedule.floor: eta_min / lr",
            "adam.lr is not in the file",
        )


def heartbeat(draft: ImportDraft, key: str, value: Any) -> None:
    """Metrics to a monitor; the address comes from the environment."""
    draft.add("track", {"kind": "heartbeat", "url_env": "MONITOR_ADDRESS"})
    draft.tell(
        key,
        value,
        "set",
        "track: [{kind: heartbeat, url_env: MONITOR_ADDRESS}]",
        "set the variable to the address",
    )


def tensor_mode(draft: ImportDraft, key: str, value: Any) -> None:
    """mtp keeps all tokens on every rank, msp and fsp divide them; isp is another way to divide a
    row.
    """
    if value in ("mtp", "msp", "fsp") and has_setting("parallel.sequence"):
        draft.write(key, value, "parallel.sequence", value != "mtp")
    else:
        draft.tell(
            key,
            value,
            "missing",
            "parallel.context and parallel.strategy: fsdp",
            "weights are not divided in this way",
        )


def chunks(draft: ImportDraft, key: str, value: Any) -> None:
    """More than one chunk: interleaved stages."""
    count = integer(key, value)
    if count <= 1:
        draft.tell(key, value, "automatic", note="stages are not interleaved")
    elif has_setting("parallel.virtual_stages"):
        draft.set("parallel.schedule", "interleaved")
        draft.write(key, value, "parallel.virtual_stages", count)
    else:
        draft.tell(
            key, value, "missing", "parallel.strategy: fsdp", "there is no interleaved pipeline"
        )


TENSOR = if_setting(
    "parallel.tensor", integer, "there is no tensor parallelism", "parallel.strategy: fsdp"
)
PIPELINE = if_setting(
    "parallel.pipeline",
    integer,
    "there is no pipeline parallelism",
    "parallel.strategy: fsdp, memory.recompute: true",
)
OF_AXES = automatic("a detail of tensor or pipeline parallelism")

RULES: dict[str, Rule] = {
    "JOB_NAME": sets("run.name", text),
    "DO_ALERT": automatic("a variable of the file"),
    "model_type": one_of(
        "model.family", FAMILIES, "there is no such family", "model.family: a module of your own"
    ),
    # Data and batch. InternLM's micro_num counts microbatches of a rank in a step.
    "data.seq_len": sets("data.seq_len", integer),
    "data.micro_bsz": sets("batch.rows_per_rank", integer),
    "data.micro_num": sets("batch.accumulate", integer),
    "data.gradient_accumulation": automatic("equal to micro_num"),
    "data.valid_micro_num": automatic("eval.rows bounds a validation set"),
    "data.valid_every": never_is_null("eval.every"),
    "data.pack_sample_into_one": packed,
    "data.total_steps": sets("steps", integer),
    "data.skip_batches": sets("data.skip_batches", text),
    "data.rampup_batch_size": rampup,
    "data.min_length": automatic("min_length at the source"),
    "data.min_length_dict": missing(
        "one minimum per source", "data.train: [{path: ..., min_length: ...}, ...]", off=({},)
    ),
    "data.train_folder": train_folder,
    "data.valid_folder": valid_folder,
    "data.num_worker": sets("data.workers", integer),
    "data.type": one_of(
        "data.by_type",
        {"tokenized": True},
        "another form of data",
        "data.train detects raw files, MDS, Megatron",
    ),
    "data.use_packed_dataset": automatic("data.packing counts"),
    "data.fixed_random_dataset_seqlen": automatic("generated data fills its rows"),
    "data.diag_outlier_ratio": sets("log.slow_ratio", number),
    "data.empty_cache_and_diag_interval": sets(
        "log.slow_every", integer, "ranks are compared; the cache of CUDA is never emptied"
    ),
    # Checkpoints, and weights to start from.
    "ckpt.enable_save_ckpt": saving,
    "ckpt.save_ckpt_folder": save_folder,
    "ckpt.load_ckpt_folder": load_folder,
    "ckpt.load_ckpt_info.path": load_path,
    "ckpt.load_ckpt_info.content": load_content,
    "ckpt.load_ckpt_info.ckpt_type": automatic("the format of a checkpoint is detected"),
    "ckpt.load_model_only_folder": load_folder,
    "ckpt.load_optimizer": automatic("init.content says what is loaded"),
    "ckpt.checkpoint_every": never_is_null("checkpoint.every"),
    "ckpt.oss_snapshot_freq": never_is_null("checkpoint.snapshot_every"),
    "ckpt.async_upload": sets("checkpoint.async", yes),
    "ckpt.async_upload_tmp_folder": automatic("the local copy is in the run folder"),
    "ckpt.load_given_ckpt": automatic(
        "a run always resumes; init.from names the weights of a new one"
    ),
    "ckpt.auto_resume": automatic("a run always resumes; `--resume never` starts over"),
    "ckpt.stop_file_path": missing("a run is stopped by a verb", "headway stop RUN --at-step N"),
    # Loss scale, gradients and the loss.
    "grad_scaler.fp16.initial_scale": sets("loss_scale.initial", number),
    "grad_scaler.fp16.min_scale": sets("loss_scale.min", number),
    "grad_scaler.fp16.growth_interval": sets("loss_scale.growth_interval", integer),
    "grad_scaler.growth_factor": sets("loss_scale.growth_factor", number),
    "grad_scaler.backoff_factor": sets("loss_scale.backoff_factor", number),
    "grad_scaler.max_scale": sets("loss_scale.max", number),
    "grad_scaler.hysteresis": sets("loss_scale.hysteresis", integer),
    "hybrid_zero_optimizer.overlap_sync_grad": sets("parallel.overlap.reduce", yes),
    "hybrid_zero_optimizer.zero_overlap_communication": sets("parallel.overlap.reduce", yes),
    "hybrid_zero_optimizer.overlap_sync_param": sets("parallel.overlap.gather", yes),
    "hybrid_zero_optimizer.reduce_bucket_size": automatic(
        "parallel.bucket_bytes; InternLM counts elements of one large bucket"
    ),
    "hybrid_zero_optimizer.clip_grad_norm": sets("optim.clip", number),
    "loss.label_smoothing": sets("objective.label_smoothing", number),
    # Optimizer and schedule.
    "adam.lr": sets("optim.lr", number),
    "adam.adam_beta1": beta(0),
    "adam.adam_beta2": beta(1),
    "adam.adam_beta2_c": sets("optim.beta2_c", number),
    "adam.adam_eps": sets("optim.eps", number),
    "adam.weight_decay": sets("optim.weight_decay", number),
    "lr_scheduler.total_steps": automatic("data.total_steps counts"),
    "lr_scheduler.init_steps": sets("optim.schedule.zero_steps", integer),
    "lr_scheduler.warmup_ratio": sets(
        "optim.schedule.warmup", lambda key, value: float(number(key, value)) or 0
    ),
    "lr_scheduler.eta_min": floor,
    "lr_scheduler.last_epoch": automatic("a resumed run knows its step"),
    "beta2_scheduler.init_beta2": automatic("adam.adam_beta2 counts"),
    "beta2_scheduler.c": sets("optim.beta2_c", number),
    "beta2_scheduler.cur_iter": automatic("a resumed run knows its step"),
    # The model. `finish` drops its shape where weights bring their own.
    "model.checkpoint": recompute,
    "model.num_attention_heads": sets("model.num_heads", integer),
    "model.num_kv_attention_heads": sets("model.num_kv_heads", integer),
    "model.hidden_size": sets("model.hidden_size", integer),
    "model.num_layers": sets("model.num_layers", integer),
    "model.vocab_size": sets("model.vocab_size", integer),
    "model.mlp_ratio": automatic(
        "model.ffn_size: hidden_size * mlp_ratio, rounded up to a multiple of 256"
    ),
    "model.dtype": one_of("precision", DTYPES, "another dtype", "precision: bf16"),
    "model.norm_type": sets("model.norm", text),
    "model.layer_norm_epsilon": sets("model.norm_eps", number),
    "model.embed_grad_scale": sets("model.embed_grad_scale", number),
    "model.rope_base": sets("model.rope_theta", number),
    "model.use_flash_attn": automatic("kernels.attention: auto"),
    "model.apply_post_layer_norm": automatic("InternLM accepts and ignores it"),
    "model.drop_rate": sets("model.dropout", number),
    "model.embed_split_hidden": OF_AXES,
    "model.parallel_output": OF_AXES,
    "model.num_chunks": chunks,
    # Parallelism: a number in older files, a dict with `size` in newer ones.
    "parallel.zero1": zero1,
    "parallel.zero1.size": zero1,
    "parallel.zero1.fsdp": one_of(
        "parallel.strategy", {True: "fsdp", False: "zero1"}, "true or false"
    ),
    "parallel.tensor": TENSOR,
    "parallel.tensor.size": TENSOR,
    "parallel.tensor.mode": tensor_mode,
    "parallel.pipeline": PIPELINE,
    "parallel.pipeline.size": PIPELINE,
    "parallel.pipeline.interleaved_overlap": OF_AXES,
    "parallel.pipeline.*": OF_AXES,
    "parallel.sequence_parallel": if_setting(
        "parallel.sequence", yes, "there is no tensor parallelism", "parallel.context"
    ),
    "parallel.weight.size": if_setting(
        "parallel.weight", integer, "weights are cut by fsdp", "parallel.strategy: fsdp"
    ),
    "parallel.weight.*": OF_AXES,
    # Determinism and monitoring.
    "cudnn_deterministic": sets("deterministic", yes),
    "cudnn_benchmark": automatic("the kernels are not cuDNN's convolutions"),
    "monitor.alert.enable_feishu_alert": alerts,
    "monitor.alert.feishu_alert_address": missing(
        "addresses come from the environment",
        "FEISHU_WEBHOOK, track: [{kind: alert, form: feishu}]",
    ),
    "monitor.alert.light_monitor_address": heartbeat,
    "monitor.alert.alert_file_path": automatic("alerts are sent once per event"),
    "use_fp32_norm": automatic("norms are computed in fp32"),
    "tensorboard": automatic("track: [{kind: tensorboard}]"),
}

DEFAULTS: dict[str, Any] = {
    "model_type": "INTERNLM",
    "data.micro_num": 1,
    "data.pack_sample_into_one": False,
    "adam.adam_beta2": 0.95,
}


def defaults(draft: ImportDraft) -> dict[str, Any]:
    """InternLM's values of keys that a file leaves out."""
    return DEFAULTS


def finish(draft: ImportDraft) -> None:
    """What follows from several keys, and what InternLM does without a key."""
    # Runs of InternLM have TensorBoard files.
    draft.set("track", [{"kind": "tensorboard"}, *(draft.get("track") or ())])
    # The switch wins over the intervals, which the rules have written.
    if draft.value("ckpt.enable_save_ckpt") is False:
        draft.set("checkpoint", {"every": None, "at_end": False})
    draft.set("optim.decay", ["*"])
    draft.tell(
        "adam.weight_decay",
        draft.value("adam.weight_decay"),
        "assumed",
        "optim.decay: ['*']",
        "InternLM decays every parameter",
    )

    # The file gives a ratio, and InternLM rounds the width up.
    width = draft.get("model.hidden_size")
    ratio = draft.value("model.mlp_ratio")
    if width and ratio is not None:
        ffn_size = int(width * float(number("model.mlp_ratio", ratio)))
        draft.set("model.ffn_size", FFN_MULTIPLE * math.ceil(ffn_size / FFN_MULTIPLE))
    if draft.get("model.family") == "internlm":
        for path in ("model.qkv_bias", "model.output_bias"):
            draft.set(path, True)
        draft.set("model.tie_embeddings", False)
        draft.tell(
            "model_type",
            "INTERNLM",
            "assumed",
            "model: {qkv_bias: true, output_bias: true, tie_embeddings: false}",
        )

    if draft.get("data.seq_len"):
        draft.set("model.max_seq_len", draft.get("data.seq_len"))
    if draft.get("init.from"):
        draft.recipe.pop("model", None)
        draft.tell(
            "model",
            draft.get("init.from"),
            "automatic",
            note="the shape comes with the weights of init.from",
        )
    if draft.get("data.valid") is None and draft.get("eval.every") is None:
        draft.recipe.pop("eval", None)
    draft.tell(
        "tokenizer",
        None,
        "missing",
        "tokenizer: V7_sft.model",
        "the file names no tokenizer; name it if you train on raw text or export",
    )
