"""PurrSight's phase-2 YAML, flat or nested ({common, phase2}): a language model that sees and
hears, behind the aligner of phase 1.
"""

from __future__ import annotations

import math
from pathlib import Path
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
    tracks,
    yes,
)

SYSTEM = "PurrSight"
TOKENS = 4
"""Soft tokens of a picture and of a sound."""
MODALITIES = ("image", "audio")
ENCODERS = (
    "weights of PurrSight's encoders come from timm and PANNs; give their files, or the encoders "
    "of the aligner's training"
)
FILES = "multimodal.image.encoder: mobilenet_v4:FILE, multimodal.audio.encoder: cnn14:FILE"
LOCAL_MLFLOW = "sqlite:///mlflow.db"
"""What `mlflow ui` shows where no server is named."""
MASTER = automatic(
    "an option of the launch: headway train RECIPE --nnodes N --node-rank K --master HOST:PORT; "
    "SLURM finds it by itself"
)


def data_folder(draft: ImportDraft, key: str, value: Any) -> None:
    """train.jsonl and, if it is there, val.jsonl; a path to a file is that file."""
    # As texts rather than as paths, so that the recipe has them as the file writes them.
    train = _train_file(key, value)
    folder, slash, _ = train.rpartition("/")
    valid = f"{folder}{slash}val.jsonl"
    source = {"kind": "multimodal", "chat_template": "tokenizer"}
    draft.set("data.train", [{"path": train, **source}])
    draft.tell(
        key,
        value,
        "set",
        f"data.train: [{{path: {train}, kind: multimodal}}]",
        "the chat template of the model",
    )
    if _find_file(draft, valid) is not None:
        draft.set("data.valid", {"sets": {"val": [{"path": valid, **source}]}})


def _train_file(key: str, value: Any) -> str:
    path = text(key, value).rstrip("/")
    if path.endswith(".jsonl"):
        return path
    return f"{path}/train.jsonl"


def _find_file(draft: ImportDraft, path: str) -> Path | None:
    """A file as the recipe will find it, from the working directory, or beside the file that is
    read.
    """
    for candidate in (Path(path), draft.source.parent / path):
        if candidate.is_file():
            return candidate
    return None


def half(draft: ImportDraft, key: str, value: Any) -> None:
    """Mixed precision is fp16 there."""
    precision = "fp16" if yes(key, value) else "fp32"
    note = "bf16 needs no loss scale on newer GPUs" if value else ""
    draft.write(key, value, "precision", precision, note)


def targets(draft: ImportDraft, key: str, value: Any) -> None:
    """Linears with an adapter."""
    # PurrSight has no key for the kind: LoRA is its only one.
    draft.set("adapter.kind", "lora")
    hugging_face.LORA["lora_target_modules"](draft, key, value)


def per_epoch(draft: ImportDraft, key: str, value: Any) -> None:
    """Checkpoints count steps; how many an epoch has is known where the data is."""
    epochs = integer(key, value)
    rows = 1
    for name in ("batch_size", "gradient_accumulation_steps", "num_gpus"):
        rows *= integer("batch_size", draft.value(name, default=DEFAULTS.get(name, 1)))
    path = None
    data = draft.value("data_dir")
    if data is not None:
        path = _find_file(draft, _train_file("data_dir", data))
    if path is None or rows < 1 or epochs < 1:
        draft.tell(
            key, value, "missing", "checkpoint.every: STEPS", "checkpoints count steps, not epochs"
        )
        return
    with path.open("rb") as file:
        records = sum(1 for line in file if line.strip())
    steps_per_epoch = math.ceil(records / rows)
    steps = max(1, epochs * steps_per_epoch)
    draft.write(
        key, value, "checkpoint.every", steps, f"steps: {records} records, {rows} rows a step"
    )


def layers(draft: ImportDraft, key: str, value: Any) -> None:
    """The projector has two linears, there and here."""
    if integer(key, value) == 2:
        draft.tell(key, value, "automatic", note="the projector has two linears")
    else:
        draft.tell(
            key,
            value,
            "missing",
            "multimodal.hidden",
            "the projector has two linears; PurrSight builds no other either",
        )


def tokens(draft: ImportDraft, key: str, value: Any) -> None:
    """Soft tokens of each modality."""
    count = integer(key, value)
    for modality in MODALITIES:
        draft.set(f"multimodal.{modality}.tokens", count)
    draft.tell(
        key, value, "set", f"multimodal.image.tokens: {count}, multimodal.audio.tokens: {count}"
    )


def group_rate(name: str) -> Rule:
    """A learning rate of its own for a group of parameters; without it, a multiple of learning_rate
    (see finish).
    """

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        rate = float(number(key, value))
        draft.add("optim.groups", {"match": [name], "lr": rate})
        draft.tell(key, value, "set", f"optim.groups: [{{match: [{name}], lr: {rate:g}}}]")

    return rule


def gpus(draft: ImportDraft, key: str, value: Any) -> None:
    """The number of ranks is an option; the guide promises that the learning rate follows it."""
    draft.tell(key, value, "automatic", note=f"headway train RECIPE --nproc {integer(key, value)}")


FLAT: dict[str, Rule] = {
    **hugging_face.LORA,
    "lora_target_modules": targets,
    # The language model, the aligner of phase 1 and the projector between them.
    "llm_model_name": sets("init.from", text),
    "phase1_checkpoint_path": sets(
        "multimodal.aligner",
        text,
        "aligner.pt of PurrSight, aligner.safetensors or a run of phase 1",
    ),
    "aligner_dim": automatic("read from the aligner's file, and checked"),
    "llm_hidden_dim": automatic("read from the model's config.json"),
    "projector_hidden_dim": sets("multimodal.hidden", integer),
    "projector_num_layers": layers,
    "projector_lr": group_rate("projector"),
    "lora_lr": group_rate("adapter"),
    # Optimizer and batch.
    "learning_rate": sets(
        "optim.lr", number, "the projector learns 5 times as fast, LoRA half as fast (optim.groups)"
    ),
    "weight_decay": sets("optim.weight_decay", number),
    "batch_size": sets(
        "batch.rows_per_rank", integer, "a row holds one conversation (data.packing: pad)"
    ),
    "num_epochs": hugging_face.num_epochs,
    "warmup_steps": hugging_face.warmup_steps,
    "gradient_clip_val": sets("optim.clip", number),
    "gradient_accumulation_steps": sets("batch.accumulate", integer),
    # Data. A row has one conversation, and its soft tokens (see `finish`).
    "data_dir": data_folder,
    "max_text_length": sets("data.seq_len", integer, "soft tokens are added to it"),
    "num_workers": sets("data.workers", integer),
    "pin_memory": hugging_face.pinned,
    "persistent_workers": automatic("readers live as long as the run"),
    # The run: logs, checkpoints, trackers.
    "log_every_n_steps": sets("log.every", integer),
    "save_every_n_epochs": per_epoch,
    "checkpoint_dir": automatic("checkpoints are in the run folder"),
    "output_dir": hugging_face.output_folder,
    "mlflow_experiment_name": tracks("mlflow", "experiment"),
    "mlflow_tracking_uri": tracks("mlflow", "uri"),
    # Devices and precision.
    "num_gpus": gpus,
    "distributed_backend": automatic("nccl on GPUs, gloo on CPUs"),
    "device": sets("device", text),
    "seed": sets("seed", integer),
    "mixed_precision": half,
    "compile_model": sets("kernels.compile", yes),
    "gradient_checkpointing": hugging_face.recompute,
}
NESTED: dict[str, Rule] = {
    "llm_model_path": FLAT["llm_model_name"],
    "adapter_path": FLAT["phase1_checkpoint_path"],
    "aligner_path": FLAT["phase1_checkpoint_path"],
    "data_path": data_folder,
    "epochs": hugging_face.num_epochs,
    "warmup_ratio": sets("optim.schedule.warmup", number),
    "projector.hidden_dim": FLAT["projector_hidden_dim"],
    "projector.num_tokens": tokens,
    "projector.num_layers": layers,
    "lora.r": sets("adapter.rank", integer),
    "lora.alpha": sets("adapter.alpha", number),
    "lora.dropout": sets("adapter.dropout", number),
    "lora.target_modules": targets,
}
CLUSTER: dict[str, Rule] = {
    "use_slurm": automatic(
        "headway launch slurm RECIPE submits the job, headway train RECIPE runs it here"
    ),
    "slurm_job_name": automatic("the job has the name of the run"),
    "slurm_partition": sets("launch.slurm.partition", text),
    "slurm_time": sets("launch.slurm.time", lambda key, value: str(value)),
    "slurm_nodes": sets("launch.slurm.nodes", integer),
    "slurm_gpus_per_node": sets("launch.slurm.gpus_per_node", integer),
    "slurm_cpus_per_task": sets("launch.slurm.cpus", integer),
    "slurm_mem": sets("launch.slurm.mem", lambda key, value: str(value)),
    "master_addr": MASTER,
    "master_port": MASTER,
    "timeout_minutes": automatic(
        "launch.slurm.time limits the job; ranks wait parallel.timeout_seconds for each other"
    ),
    "enable_profiling": missing(
        "profiling is an option of the verb", "headway train RECIPE --profile"
    ),
    "profile_steps": automatic("headway train RECIPE --profile --profile-steps N"),
}
RULES: dict[str, Rule] = {
    **FLAT,
    **{f"cluster.{name}": rule for name, rule in CLUSTER.items()},
    **{
        f"{section}.{name}": rule
        for section in ("common", "phase2")
        for name, rule in (FLAT | NESTED).items()
    },
}

DEFAULTS: dict[str, Any] = {
    "learning_rate": 2e-4,
    "weight_decay": 0.01,
    "batch_size": 16,
    "num_epochs": 10,
}


def defaults(draft: ImportDraft) -> dict[str, Any]:
    """PurrSight's own, which are those of its flat files."""
    if any(key.startswith(("phase2.", "common.")) for key in draft.given):
        return {}
    return DEFAULTS


def finish(draft: ImportDraft) -> None:
    """What is in PurrSight's code and guide, and not in the file."""
    # Not a file of PurrSight: what is assumed below would hide that from the caller.
    if not any(line.outcome in ("set", "missing") for line in draft.report):
        return

    draft.set("optim.betas", [0.9, 0.999])
    draft.set("optim.schedule.kind", "cosine")
    draft.set("optim.schedule.floor", 0.0)
    draft.set("data.packing", "pad")
    draft.tell(
        "optim",
        None,
        "assumed",
        "optim: {betas: [0.9, 0.999], schedule: {kind: cosine, floor: 0.0}}, data.packing: pad",
    )
    if draft.get("adapter") is not None:
        draft.default("adapter.kind", "lora")
    _finish_rates(draft)

    for modality in MODALITIES:
        draft.default(f"multimodal.{modality}.tokens", TOKENS)
    draft.default("multimodal.shared", True)
    draft.tell(
        "multimodal",
        None,
        "assumed",
        "multimodal: {image, audio, shared: true}",
        "one projector, 4 soft tokens of each modality",
    )
    if draft.get("multimodal.aligner") is None:
        draft.tell(
            "phase1_checkpoint_path",
            None,
            "missing",
            "multimodal.aligner: FILE",
            "the file names no aligner of phase 1",
        )
        draft.set("multimodal.aligner", "aligner.safetensors")
    draft.tell("encoders", None, "missing", FILES, ENCODERS)

    for tracker in draft.get("track") or ():
        if isinstance(tracker, dict) and tracker.get("kind") == "mlflow" and not tracker.get("uri"):
            tracker["uri"] = LOCAL_MLFLOW
            note = (
                "the file names no server; `mlflow ui --backend-store-uri sqlite:///mlflow.db` "
                "shows this one"
            )
            draft.tell(
                "mlflow_tracking_uri",
                None,
                "assumed",
                f"track: [{{kind: mlflow, uri: {LOCAL_MLFLOW}}}]",
                note,
            )

    # max_text_length counts text alone; a row of headway also holds the soft tokens.
    length = draft.get("data.seq_len")
    if length is not None:
        for modality in MODALITIES:
            length += draft.get(f"multimodal.{modality}.tokens")
        draft.set("data.seq_len", length)


def _finish_rates(draft: ImportDraft) -> None:
    """The projector at 5 times and LoRA at half of the rate; the rate follows the number of GPUs,
    as the guide promises.
    """
    # Groups with a rate in the file; the others get a multiple of the recipe's rate.
    named = {name for group in draft.get("optim.groups") or () for name in group["match"]}
    if "projector" not in named:
        draft.add("optim.groups", {"match": ["projector"], "lr_factor": 5.0})
    if "adapter" not in named and draft.get("adapter") is not None:
        draft.add("optim.groups", {"match": ["adapter"], "lr_factor": 0.5})
    draft.tell(
        "optim.groups",
        None,
        "assumed",
        "optim.groups: projector lr_factor 5, adapter lr_factor 0.5",
    )

    rows = draft.get("batch.rows_per_rank")
    if rows is not None:
        rows *= draft.get("batch.accumulate") or 1
        draft.set("batch.lr_scaling", "sqrt")
        draft.set("batch.reference_rows", rows)
        note = "the guide promises that the rate follows the number of GPUs; sqrt suits Adam"
        draft.tell(
            "batch.lr_scaling",
            None,
            "assumed",
            f"batch: {{lr_scaling: sqrt, reference_rows: {rows}}}",
            note,
        )
