"""PurrSight's phase-2 YAML. The language-model part has a form here; its image and audio parts have none yet."""

from __future__ import annotations

from typing import Any

from headway.workflows.import_config import hugging_face
from headway.workflows.import_config.rules import ImportDraft, Rule, automatic, integer, missing, number, sets, text, tracks, yes

SYSTEM = "PurrSight"
MODAL = missing("there are no image, audio or video inputs", "fine-tune the language model on text alone", off=())
ELSEWHERE = automatic("options of the launch: headway train RECIPE --nproc N --nnodes N --node-rank K --master HOST:PORT, or srun")


def data_folder(draft: ImportDraft, key: str, value: Any) -> None:
    """train.jsonl and, if it is there, val.jsonl; media keys of the records are ignored on purpose."""
    folder = text(key, value).rstrip("/")
    source = {
        "kind": "chat",
        "chat_template": "tokenizer",
        "keys": {"prompt": "instruction", "response": "response", "image": "", "audio": "", "video": ""},
    }
    draft.set("data.train", [{"path": f"{folder}/train.jsonl", **source}])
    draft.tell(
        key, value, "set", f"data.train: [{{path: {folder}/train.jsonl, kind: chat}}]", "instruction and response; media are ignored"
    )
    if (draft.source.parent / folder / "val.jsonl").is_file():
        draft.set("data.valid", {"sets": {"val": [{"path": f"{folder}/val.jsonl", **source}]}})


def half(draft: ImportDraft, key: str, value: Any) -> None:
    """Mixed precision is fp16 there."""
    draft.write(key, value, "precision", "fp16" if yes(key, value) else "fp32", "bf16 needs no loss scale on newer GPUs" if value else "")


def targets(draft: ImportDraft, key: str, value: Any) -> None:
    """Linears with an adapter."""
    draft.set("adapter.kind", "lora")
    hugging_face.LORA["lora_target_modules"](draft, key, value)


def per_epoch(draft: ImportDraft, key: str, value: Any) -> None:
    """Checkpoints count steps."""
    draft.tell(key, value, "missing", "checkpoint.every: STEPS", "checkpoints count steps, not epochs")


RULES: dict[str, Rule] = {
    **hugging_face.LORA,
    "lora_target_modules": targets,
    "llm_model_name": sets("init.from", text),
    "phase2.llm_model_path": sets("init.from", text),
    "phase1_checkpoint_path": MODAL,
    "aligner_dim": MODAL,
    "projector_*": MODAL,
    "phase2.projector.*": MODAL,
    "phase2.adapter_path": MODAL,
    "projector_lr": missing("there is no projector", "optim.groups: [{match: [...], lr: ...}]"),
    "lora_lr": sets("optim.lr", number, "only the adapter trains"),
    "llm_hidden_dim": automatic("read from the model's config.json"),
    "learning_rate": sets("optim.lr", number, "of the adapter; PurrSight multiplies it by 0.5 for LoRA"),
    "weight_decay": sets("optim.weight_decay", number),
    "batch_size": sets("batch.rows_per_rank", integer),
    "num_epochs": hugging_face.num_epochs,
    "phase2.epochs": hugging_face.num_epochs,
    "warmup_steps": hugging_face.warmup_steps,
    "phase2.warmup_ratio": sets("optim.schedule.warmup", number),
    "gradient_clip_val": sets("optim.clip", number),
    "gradient_accumulation_steps": sets("batch.accumulate", integer),
    "data_dir": data_folder,
    "phase2.data_path": data_folder,
    "max_text_length": sets("data.seq_len", integer),
    "num_workers": sets("data.workers", integer),
    "pin_memory": hugging_face.pinned,
    "persistent_workers": automatic("readers live as long as the run"),
    "log_every_n_steps": sets("log.every", integer),
    "save_every_n_epochs": per_epoch,
    "checkpoint_dir": automatic("checkpoints are in the run folder"),
    "output_dir": hugging_face.output_folder,
    "mlflow_experiment_name": tracks("mlflow", "experiment"),
    "mlflow_tracking_uri": tracks("mlflow", "uri"),
    "num_gpus": automatic("headway train RECIPE --nproc N"),
    "distributed_backend": automatic("nccl on GPUs, gloo on CPUs"),
    "device": sets("device", text),
    "seed": sets("seed", integer),
    "mixed_precision": half,
    "compile_model": sets("kernels.compile", yes),
    "gradient_checkpointing": hugging_face.recompute,
    "cluster.timeout_minutes": automatic("the limit of the SLURM job; ranks wait parallel.timeout_seconds for each other"),
    "cluster.enable_profiling": missing("profiling is an option of the verb", "headway train RECIPE --profile"),
    "cluster.*": ELSEWHERE,
    "common.*": automatic("read where phase2 repeats it"),
    "phase2.lora.r": sets("adapter.rank", integer),
    "phase2.lora.alpha": sets("adapter.alpha", number),
    "phase2.lora.dropout": sets("adapter.dropout", number),
    "phase2.lora.target_modules": targets,
}

DEFAULTS: dict[str, Any] = {"learning_rate": 2e-4, "weight_decay": 0.01, "batch_size": 16, "num_epochs": 10}


def defaults(draft: ImportDraft) -> dict[str, Any]:
    """PurrSight's own."""
    return {} if any(key.startswith("phase2.") for key in draft.given) else DEFAULTS


def finish(draft: ImportDraft) -> None:
    """Its optimizer and schedule, which are not in the file."""
    draft.set("optim.betas", [0.9, 0.999])
    draft.set("optim.schedule.kind", "cosine")
    draft.set("optim.schedule.floor", 0.0)
    draft.set("data.packing", "pad")
    draft.tell("optim", None, "assumed", "optim: {betas: [0.9, 0.999], schedule: {kind: cosine, floor: 0.0}}, data.packing: pad")
