"""axolotl's YAML (keys of version 0.18, and older names that its files still have)."""

from __future__ import annotations

from typing import Any

from headway.errors import ConfigError
from headway.workflows.import_config import axolotl_rl, hugging_face
from headway.workflows.import_config.preference import DATA_KINDS
from headway.workflows.import_config.rules import (
    ImportDraft,
    Rule,
    automatic,
    integer,
    missing,
    number,
    one_of,
    sets,
    text,
    tracker_mode,
    tracks,
    with_partners,
    words,
    yes,
)

SYSTEM = "axolotl"
TEMPLATES = {
    "chatml": "chatml",
    "llama3": "llama3",
    "alpaca": "alpaca",
    "qwen_25": "qwen",
    "qwen2": "qwen",
    "tokenizer_default": "tokenizer",
}
RENAMED = {
    "field_instruction": "prompt",
    "field_input": "context",
    "field_output": "response",
    "field_system": "system",
    "field_prompt": "prompt",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_tools": "tools",
    "field_completion": "response",
    "field_label": "label",
    "message_field_role": "role",
    "message_field_content": "content",
}
OF_A_DATASET = {
    "path", "type", "ds_type", "data_files", "field", "field_messages", "chat_template",
    "chat_template_jinja", "split", "name", "message_property_mappings", "roles_to_train",
    "train_on_eos", "revision", "conversation", *RENAMED,
}  # fmt: skip
"""Keys of an entry of `datasets` that are read or reported with their own reason."""
PARTNERS = {
    "chat": {"prompt": "instruction", "context": "input?", "response": "output"},
    "preference": dict.fromkeys(("prompt", "chosen", "rejected")),
    "unpaired": {"prompt": "prompt", "response": "completion"},
}
"""Kind of records -> axolotl's usual names of their keys (see `with_partners`); a record may lack
one that ends in `?`.
"""


def datasets(draft: ImportDraft, key: str, value: Any) -> None:
    """Each entry becomes one source of the mixture."""
    entries = value if isinstance(value, list) else [value]
    sources: list[dict[str, Any]] = []
    for index, entry in enumerate(entries):
        # An entry may be a path alone.
        if not isinstance(entry, dict):
            entry = {"path": entry}
        sources.append(_source(draft, f"{key}.{index}", entry))
    if key == "test_datasets":
        draft.write(key, value, "data.valid.sets", {"test": sources})
    else:
        draft.write(key, value, "data.train", sources)


def _source(draft: ImportDraft, entry_key: str, entry: dict[str, Any]) -> dict[str, Any]:
    """A source of `data.train` from one entry, whose key in the report is e.g. `datasets.0`."""
    if not entry.get("path"):
        raise ConfigError(f"{entry_key}.path is missing; each dataset of the file needs one.")
    files = entry.get("data_files")
    path = entry["path"]
    # As in `datasets.load_dataset("json", data_files=...)`: the path names a format, or the entry
    # does, and the files are the data.
    if files and (path in ("json", "csv", "parquet", "text") or entry.get("ds_type")):
        if not isinstance(files, list):
            files = [files]
        path = files[0]
        for other in files[1:]:
            draft.tell(
                f"{entry_key}.data_files",
                other,
                "missing",
                "another entry of data.train",
                "one path per source",
            )

    source: dict[str, Any] = {"path": text(f"{entry_key}.path", path)}
    kind = _kind(draft, entry)
    if kind != "text":
        source["kind"] = kind
        source["chat_template"] = _template(draft, entry_key, entry)
        if keys := _keys(draft, entry_key, entry, kind):
            source["keys"] = keys
    elif entry.get("field") not in (None, "text"):
        source["text_key"] = entry["field"]
    _report_entry(draft, entry_key, entry, kind)
    return source


def _kind(draft: ImportDraft, entry: dict[str, Any]) -> str:
    """The kind of an entry's records."""
    task = axolotl_rl.kind_of(draft)
    if task is not None:
        return DATA_KINDS[task]
    name = entry.get("type")
    if name in ("completion", "pretrain"):
        return "text"
    if name is None and draft.value("pretraining_dataset"):
        return "text"
    return "chat"


def _template(draft: ImportDraft, entry_key: str, entry: dict[str, Any]) -> str:
    """The chat template of an entry: its own, or that of the file."""
    template = (
        entry.get("chat_template") or entry.get("conversation") or draft.value("chat_template")
    )
    if isinstance(entry.get("type"), str) and entry["type"].startswith("alpaca"):
        return "alpaca"
    if template in TEMPLATES:
        return TEMPLATES[template]
    if template is not None:
        draft.tell(
            f"{entry_key}.chat_template",
            template,
            "missing",
            "a .jinja file as chat_template",
            "headway uses the tokenizer's own template",
        )
    return "tokenizer"


def _keys(draft: ImportDraft, entry_key: str, entry: dict[str, Any], kind: str) -> dict[str, str]:
    """Names of keys that differ from the usual ones; a question or answer that is named brings its
    partners.
    """
    # A format in the file itself: `type: {field_prompt: question, ...}`.
    record_format = entry.get("type")
    if kind in ("preference", "unpaired") and isinstance(record_format, dict):
        entry = entry | {name: record_format[name] for name in RENAMED if name in record_format}
        for name in set(record_format) - set(RENAMED):
            draft.tell(
                f"{entry_key}.type.{name}",
                record_format[name],
                "missing",
                "keys and a .jinja file as chat_template",
                "a format of your own",
            )

    keys = {
        name: entry[field]
        for field, name in RENAMED.items()
        if entry.get(field) not in (None, name)
    }
    if entry.get("field_messages") and entry["field_messages"] not in ("messages", "conversations"):
        keys["messages"] = entry["field_messages"]

    mapping = entry.get("message_property_mappings") or {}
    for name in ("role", "content"):
        if mapping.get(name) not in (None, name):
            keys[name] = mapping[name]
    for name in set(mapping) - {"role", "content"}:
        draft.tell(
            f"{entry_key}.message_property_mappings.{name}",
            mapping[name],
            "missing",
            "keys: {...}",
            "not a key of a turn that is read",
        )
    if "messages" not in keys:
        return with_partners(keys, PARTNERS[kind])
    return keys


def _report_entry(draft: ImportDraft, entry_key: str, entry: dict[str, Any], kind: str) -> None:
    """Report what of an entry has no counterpart; the source has the rest."""
    for name, value in entry.items():
        key = f"{entry_key}.{name}"
        if value is None:
            continue
        if name not in OF_A_DATASET:
            nearest = ""
            if name in ("shards", "shards_idx"):
                nearest = "limit: DOCUMENTS at the source"
            draft.tell(key, value, "missing", nearest, "not an option of a source of data.train")
        elif name == "roles_to_train" and value not in (
            ["assistant"],
            ["gpt"],
            ["assistant", "gpt"],
        ):
            draft.tell(key, value, "missing", "", "the loss is on the assistant's turns only")
        elif name == "split" and value != "train":
            draft.tell(
                key,
                value,
                "missing",
                "headway download ORG/NAME --dataset --include 'PATTERN'",
                "the files at path are all read",
            )
        elif name in ("name", "revision"):
            draft.tell(
                key,
                value,
                "missing",
                "headway download ORG/NAME --dataset",
                "download this part, then give its folder as path",
            )
        elif name == "train_on_eos" and value not in ("turn", "last"):
            draft.tell(key, value, "missing", "", "the token that ends an answer is always trained")
    if kind == "chat" and isinstance(entry.get("type"), dict):
        draft.tell(
            f"{entry_key}.type",
            entry["type"],
            "missing",
            "keys and a .jinja file as chat_template",
            "a prompt format of your own",
        )


def adapter(draft: ImportDraft, key: str, value: Any) -> None:
    """lora, or qlora: over a base in nf4."""
    if value in ("lora", "qlora"):
        kind = "dora" if draft.value("peft_use_dora") else "lora"
        draft.set("adapter.kind", kind)
        draft.tell(key, value, "set", f"adapter: {{kind: {kind}}}")
        if value == "qlora":
            draft.set("adapter.base", "nf4")
            draft.tell(
                key,
                value,
                "set",
                "adapter: {base: nf4}",
                "with double quantisation, as bitsandbytes' nf4",
            )
    else:
        draft.tell(
            key, value, "missing", "adapter.kind: lora or dora", "there is no adapter of this kind"
        )


def trained_in_addition(draft: ImportDraft, key: str, value: Any) -> None:
    """Whole modules that train beside the adapter."""
    names = words(key, value)
    patterns: list[str] = []
    # One pattern of headway stands for the embedding and the head.
    if {"embed_tokens", "lm_head"} & set(names):
        patterns.append("embeddings")
    for name in names:
        if not name.startswith(("embed_tokens", "lm_head")):
            patterns.append(f"*.{name}.*")
    draft.write(key, value, "train", patterns)


def minimum(draft: ImportDraft, key: str, value: Any) -> None:
    """The lowest rate as a share of the peak."""
    draft.write(key, value, "optim.schedule.floor", float(number(key, value)))


def sharded(draft: ImportDraft, key: str, value: Any) -> None:
    """FSDP as a list of words, or true."""
    draft.set("parallel.strategy", "fsdp")
    # `[full_shard, auto_wrap, offload]`
    if "offload" in str(value):
        draft.add("memory.offload", "optimizer")
    draft.tell(key, value, "set", "parallel.strategy: fsdp")


def target_all(draft: ImportDraft, key: str, value: Any) -> None:
    """Every linear of the layers."""
    if yes(key, value):
        draft.write(key, value, "adapter.targets", ["all"])
    else:
        draft.tell(key, value, "automatic", note="lora_target_modules counts")


def embedding_rate(draft: ImportDraft, key: str, value: Any) -> None:
    """A learning rate of the embeddings, which become a parameter group."""
    draft.add("optim.groups", {"match": ["embeddings"], "lr": number(key, value)})
    draft.tell(key, value, "set", "optim.groups: [{match: [embeddings], lr: ...}]")


def special(draft: ImportDraft, key: str, value: Any) -> None:
    """A pad token alone changes nothing here; other tokens would."""
    others = value
    if isinstance(value, dict):
        others = {name: token for name, token in value.items() if name != "pad_token"}
    if others:
        draft.tell(
            key,
            others,
            "missing",
            "a tokenizer folder with these tokens as `tokenizer`",
            "the tokenizer's own tokens are used",
        )
    else:
        draft.tell(key, value, "automatic", note="rows need no pad token")


def plugins(draft: ImportDraft, key: str, value: Any) -> None:
    """Fused kernels are built in; other plug-ins are code of axolotl."""
    for name in words(key, value):
        if "Liger" in name or "CutCrossEntropy" in name:
            draft.tell(
                key, name, "automatic", note="the loss never makes all logits; kernels are fused"
            )
        else:
            draft.tell(key, name, "missing", "docs/extend.md", "a plug-in of axolotl")


COMMON = (
    "output_dir", "seed", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "max_grad_norm", "warmup_ratio", "warmup_steps", "max_steps",
    "gradient_accumulation_steps", "bf16", "fp16", "fp8", "tf32", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "torch_compile", "torch_compile_backend",
    "torch_compile_mode", "deepspeed", "ddp_timeout", "logging_steps", "eval_steps",
    "eval_strategy", "save_steps", "save_strategy", "save_total_limit", "save_only_model",
    "save_safetensors", "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
    "early_stopping_patience", "resume_from_checkpoint", "dataloader_num_workers",
    "dataloader_pin_memory", "dataloader_prefetch_factor", "group_by_length",
    "neftune_noise_alpha", "hub_*", "context_parallel_size", "tensor_parallel_size",
    "auto_find_batch_size", "dataloader_drop_last", "remove_unused_columns",
    "accelerator_config", "ddp_bucket_cap_mb", "ddp_broadcast_buffers",
    "ddp_find_unused_parameters", "torch_empty_cache_steps", "local_rank",
)  # fmt: skip
"""Keys that axolotl takes over from transformers' trainer as they are."""


def quantised(form: str) -> Rule:
    """A base in 4 or 8 bits, which only an adapter may have."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        if value and draft.value("adapter") in ("lora", "qlora"):
            draft.write(key, value, "adapter.base", form)
        else:
            QUANTIZED(draft, key, value)

    return rule


QUANTIZED = missing(
    "weights are kept in 16 bits or more",
    "adapter.base: nf4 under an adapter; optim.state_dtype: 8bit",
)
KERNEL = automatic("headway chooses its kernels by device and mask (kernels.attention: auto)")

IN_MODEL_FILES = (
    "model_type", "tokenizer_type", "processor_type", "tokenizer_use_fast", "tokenizer_legacy",
    "is_falcon_derived_model", "is_llama_derived_model", "is_mistral_derived_model",
    "is_qwen_derived_model", "base_model_config", "strict", "device_map", "low_cpu_mem_usage",
    "lora_fan_in_fan_out", "lora_on_cpu",
)  # fmt: skip
"""Keys that repeat what the model's and the tokenizer's files say."""
KERNEL_KEYS = (
    "flash_attention", "sdp_attention", "xformers_attention", "flex_attention",
    "sage_attention", "eager_attention", "s2_attention", "attn_implementation", "flash_attn_*",
    "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "liger_*", "cut_cross_entropy",
    "chunked_cross_entropy", "unsloth_*", "tiled_mlp", "ring_attn_func", "heads_k_stride",
)  # fmt: skip
"""Keys that choose kernels."""
OF_THE_PIPELINE = (
    "pad_to_sequence_len", "eval_sample_packing", "sample_packing_*", "multipack_real_batches",
    "batch_flattening", "dataset_processes", "dataset_num_proc", "dataset_keep_in_memory",
    "shuffle_merged_datasets", "shuffle_before_merging_datasets", "eval_batch_size",
    "skip_prepare_dataset", "streaming", "streaming_multipack_buffer_size",
    "pretrain_multipack_*", "gc_steps", "gc_collect_steps", "include_tkps", "wandb_watch",
    "wandb_log_model", "wandb_run_id", "use_ray", "ray_*", "save_first_step", "dataset_shard_*",
)  # fmt: skip
"""Keys of the data pipeline and the run folder without a setting here."""

RULES: dict[str, Rule] = {
    **{key: hugging_face.RULES[key] for key in COMMON},
    **axolotl_rl.RULES,
    **{
        key: rule
        for key, rule in hugging_face.LORA.items()
        if key not in ("lora_rank", "use_rslora")
    },
    # The model and its adapter.
    "base_model": sets("init.from", text),
    "tokenizer_config": sets("tokenizer", text),
    "trust_remote_code": missing(
        "the families of `headway list` need no code of a model",
        "model: {family: transformers, trust_remote_code: true}",
    ),
    "revision_of_model": missing(
        "a revision is chosen at the download", "headway download ORG/NAME --revision REVISION"
    ),
    "adapter": adapter,
    "lora_target_linear": target_all,
    "lora_modules_to_save": trained_in_addition,
    "lora_model_dir": sets("init.adapter", text),
    "peft_use_rslora": sets("adapter.rslora", yes),
    "peft_use_dora": automatic("adapter.kind: dora"),
    # Data.
    "datasets": datasets,
    "pretraining_dataset": datasets,
    "test_datasets": datasets,
    "val_set_size": hugging_face.validation,
    "dataset_prepared_path": sets("data.cache_dir", text, "token stores are cached there"),
    "chat_template": automatic("set at each source of data.train"),
    "sequence_len": sets("data.seq_len", integer),
    "sample_packing": hugging_face.packing,
    # Batch, optimizer and schedule.
    "micro_batch_size": sets("batch.rows_per_rank", integer),
    "num_epochs": hugging_face.num_epochs,
    "optimizer": hugging_face.optimizer,
    "lr_scheduler": hugging_face.schedule,
    "cosine_min_lr_ratio": minimum,
    "embedding_lr": embedding_rate,
    # Precision and memory.
    "bfloat16": hugging_face.precision("bf16"),
    "float16": hugging_face.precision("fp16"),
    "float32": hugging_face.precision("fp32"),
    "selective_checkpointing": one_of(
        "memory.recompute", {True: "selective"}, "chosen layers", "memory.recompute: selective"
    ),
    "activation_offloading": one_of(
        "memory.offload",
        {True: ["activations"], False: []},
        "another form",
        "memory.offload: [activations]",
    ),
    # Ranks. Older files have a list of words and fsdp_config, newer ones sizes of axes.
    "fsdp": sharded,
    "fsdp_config.reshard_after_forward": sets("parallel.fsdp.reshard_after_forward", yes),
    "fsdp_config.activation_checkpointing": hugging_face.recompute,
    "fsdp_config.offload_params": missing(
        "parameters stay on the GPU", "memory.offload: [optimizer]"
    ),
    "fsdp_config.*": automatic("blocks are wrapped, loaded and saved without options"),
    "fsdp_version": automatic("FSDP2"),
    "fsdp_final_state_dict_type": automatic("final/ is always a whole Hugging Face folder"),
    "dp_shard_size": sets("parallel.fsdp.size", integer),
    "dp_replicate_size": automatic("the number of ranks divided by parallel.fsdp.size"),
    "sequence_parallel_degree": hugging_face.RULES["context_parallel_size"],
    # What the loss is on, validation and checkpoints.
    "train_on_inputs": missing(
        "chat data is trained on the answers only", "kind: text with a template of keys"
    ),
    "excess_length_strategy": automatic(
        "longer documents are cut into rows; conversations are cut at the row's end and reported"
    ),
    "early_stopping_threshold": hugging_face.RULES["early_stopping_threshold"],
    "evals_per_epoch": missing("validation counts steps", "eval.every: STEPS"),
    "saves_per_epoch": missing("checkpoints count steps", "checkpoint.every: STEPS"),
    "auto_resume_from_checkpoints": automatic(
        "a run always resumes from its newest good checkpoint"
    ),
    "loss_watchdog_*": missing(
        "the watchdog works with deviations of the loss", "heal: {on_spike: rollback, sigma: 6.0}"
    ),
    # Trackers and plug-ins.
    "use_tensorboard": tracks("tensorboard"),
    "use_wandb": tracks("wandb"),
    "wandb_project": tracks("wandb", "project"),
    "wandb_entity": tracks("wandb", "entity"),
    "wandb_name": automatic("the run's name"),
    "wandb_mode": tracker_mode("wandb"),
    "use_mlflow": tracks("mlflow"),
    "mlflow_experiment_name": tracks("mlflow", "experiment"),
    "mlflow_tracking_uri": tracks("mlflow", "uri"),
    "use_trackio": tracks("trackio"),
    "trackio_project_name": tracks("trackio", "project"),
    "plugins": plugins,
    # Tokens and parameters.
    "special_tokens": special,
    "tokens": missing(
        "the tokenizer's own tokens are used",
        "a tokenizer folder with these tokens as `tokenizer`",
        off=((), []),
    ),
    "unfrozen_parameters": missing(
        "patterns here are shell patterns, not regular expressions",
        "train: [layers.20-31, embeddings]",
    ),
    "lr_groups": missing(
        "groups are written by pattern", "optim.groups: [{match: [...], lr: ...}]"
    ),
    **dict.fromkeys(
        IN_MODEL_FILES,
        automatic("read from the model's and the tokenizer's files"),
    ),
    **dict.fromkeys(
        KERNEL_KEYS,
        KERNEL,
    ),
    **dict.fromkeys(
        OF_THE_PIPELINE,
        automatic("headway's data pipeline and run folder do this without a setting"),
    ),
    # A base in few bits.
    "load_in_4bit": quantised("nf4"),
    "load_in_8bit": quantised("int8"),
    **dict.fromkeys(("gptq", "bnb_config_kwargs", "qat", "quantization", "peft"), QUANTIZED),
    **dict.fromkeys(
        ("loraplus_lr_ratio", "loraplus_lr_embedding"),
        missing("one rate for A and B", "optim.groups: [{match: [*.lora_B*]}]"),
    ),
}

DEFAULTS: dict[str, Any] = {
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_epochs": 1,
    "sequence_len": 512,
    "sample_packing": False,
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "lr_scheduler": "cosine",
    "warmup_ratio": 0.03,
}


def defaults(draft: ImportDraft) -> dict[str, Any]:
    """axolotl's values of keys that a file leaves out; they depend on no other key."""
    return DEFAULTS


def finish(draft: ImportDraft) -> None:
    """Settings that follow from several keys."""
    axolotl_rl.finish(draft)
    # A recipe with eval.stop and nothing to validate would be refused.
    if draft.get("eval.stop") is not None and draft.get("data.valid") is None:
        draft.recipe["eval"].pop("stop")
        draft.tell(
            "early_stopping_patience",
            draft.value("early_stopping_patience"),
            "missing",
            "eval.stop",
            "there is no validation data",
        )
