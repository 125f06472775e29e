"""LLaMA-Factory's YAML or JSON (keys of version 0.9). Dataset names are looked up in its
dataset_info.json, if that lies at dataset_dir.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.runtime.json_file import read_object
from headway.workflows.import_config import hugging_face
from headway.workflows.import_config.preference import finish_objective, of_objective
from headway.workflows.import_config.rules import (
    NOT_USED,
    ImportDraft,
    Rule,
    automatic,
    integer,
    missing,
    number,
    one_of,
    sets,
    shown,
    text,
    tracker_mode,
    tracks,
    with_partners,
    words,
    yes,
)

SYSTEM = "LLaMA-Factory"
KINDS = {"pt": "text", "sft": "chat", "rm": "preference", "dpo": "preference", "kto": "unpaired"}
OBJECTIVES = {"rm": "reward", "dpo": "dpo", "kto": "kto"}
TEMPLATES = {
    "alpaca": "alpaca",
    "llama3": "llama3",
    "qwen": "qwen",
    "chatml": "chatml",
    "intern": "internlm",
}
COLUMNS = {
    "prompt": "prompt",
    "query": "context",
    "response": "response",
    "system": "system",
    "history": "history",
    "tools": "tools",
    "messages": "messages",
    "chosen": "chosen",
    "rejected": "rejected",
    "kto_tag": "label",
}
SHAPES = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "messages": "conversations",
    "kto_tag": "kto_tag",
}
"""The record keys that LLaMA-Factory expects if columns are not given."""
TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
}
"""Their names of the words in a turn -> ours."""
USUAL_TAGS = {
    "role": "from",
    "content": "value",
    "user": "human",
    "assistant": "gpt",
    "tool": "observation",
}
"""The words of ShareGPT's records, which headway knows too."""
PARTNERS = {
    "chat": {"prompt": "instruction", "context": "input?", "response": "output"},
    "preference": dict.fromkeys(("prompt", "chosen", "rejected")),
    "unpaired": {"prompt": "instruction", "context": "input?", "response": "output"},
}
"""Kind of records -> LLaMA-Factory's usual names of their keys (see `with_partners`); a record may
lack one that ends in `?`.
"""
LOSSES = ("sigmoid", "hinge", "ipo", "kto_pair")
OTHER_OBJECTIVES = ("orpo", "simpo")


def kind_of(draft: ImportDraft) -> str | None:
    """The preference objective of a file, if it has one."""
    kind = OBJECTIVES.get(str(draft.value("stage")))
    # There they are losses of stage dpo, here objectives.
    loss = draft.value("pref_loss")
    if kind == "dpo" and loss in OTHER_OBJECTIVES:
        return loss
    return kind


def stage(draft: ImportDraft, key: str, value: Any) -> None:
    """Pre-training, SFT, a reward model or preference; another stage would become another training:
    refused.
    """
    if str(value) not in KINDS:
        raise ConfigError(
            f"stage is {shown(value)}, which headway cannot train; it has {', '.join(KINDS)}."
        )
    settings = f"data.train kind: {KINDS[value]}"
    kind = kind_of(draft)
    if kind is not None:
        draft.set("objective.kind", kind)
        settings += f", objective.kind: {kind}"
    draft.tell(key, value, "set", settings)


def method(draft: ImportDraft, key: str, value: Any) -> None:
    """full, lora, or layers that train (freeze)."""
    if value == "lora":
        draft.write(key, value, "adapter.kind", "dora" if draft.value("use_dora") else "lora")
        # LLaMA-Factory's defaults: rank 8, and an alpha of twice the rank.
        rank = integer("lora_rank", draft.value("lora_rank", default=8))
        alpha = float(number("lora_alpha", draft.value("lora_alpha", default=2 * rank)))
        draft.default("adapter.rank", rank)
        draft.default("adapter.alpha", alpha)
    elif value == "full":
        draft.tell(
            key, value, "automatic", note="all parameters train unless the recipe says otherwise"
        )
    elif value == "freeze":
        draft.tell(key, value, "missing", "train: [layers.30-31]", "name the layers that train")
    else:
        draft.tell(
            key, value, "missing", "adapter.kind: lora or dora", "there is no adapter of this kind"
        )


def targets(draft: ImportDraft, key: str, value: Any) -> None:
    """Linears with an adapter: `all`, or their names with commas."""
    draft.write(key, value, "adapter.targets", words(key, value))


def datasets(draft: ImportDraft, key: str, value: Any) -> None:
    """Names of dataset_info.json, each with a path, a shape and columns."""
    # A relative folder is looked for beside the file, then from the working directory.
    dataset_dir = str(draft.value("dataset_dir", default="data"))
    folder = draft.source.parent / dataset_dir
    if not folder.is_dir():
        folder = Path(dataset_dir)
    info = _dataset_info(folder)
    names = words(key, value)
    sources = [_source(draft, name, folder, info) for name in names]
    if key == "eval_dataset":
        valid_sets = {name: [source] for name, source in zip(names, sources, strict=True)}
        draft.write(key, value, "data.valid.sets", valid_sets)
        return

    # Shares and limits are for training alone.
    shares = draft.value("interleave_probs")
    if shares is not None:
        for source, share in zip(sources, words("interleave_probs", str(shares)), strict=False):
            source["weight"] = number("interleave_probs", share)
    limit = draft.value("max_samples")
    if limit is not None:
        for source in sources:
            source["limit"] = integer("max_samples", limit)
    draft.write(key, value, "data.train", sources)


def _dataset_info(folder: Path) -> dict[str, Any]:
    path = folder / "dataset_info.json"
    if path.is_file():
        return read_object(path, ConfigError)
    return {}


def _source(draft: ImportDraft, name: str, folder: Path, info: dict[str, Any]) -> dict[str, Any]:
    """A source of `data.train` from a name. One that dataset_info.json lacks becomes a path that
    the report asks to correct.
    """
    entry = info.get(name)
    kind = KINDS[draft.value("stage", default="sft")]
    if not isinstance(entry, dict):
        draft.tell(
            "dataset",
            name,
            "missing",
            "data.train: [{path: FILE}]",
            f"not found in {folder / 'dataset_info.json'}; set its path",
        )
        source: dict[str, Any] = {"path": name}
    elif entry.get("file_name"):
        source = {"path": str(folder / entry["file_name"])}
    elif entry.get("hf_hub_url"):
        source = {"path": entry["hf_hub_url"]}
    else:
        draft.tell(
            "dataset",
            name,
            "missing",
            "data.train: [{path: FILE}]",
            "neither file_name nor hf_hub_url; set its path",
        )
        source = {"path": name}

    # Plain text has one column, which dataset_info.json calls `prompt`.
    if kind == "text":
        column = (entry or {}).get("columns", {}).get("prompt", "text")
        if column == "text":
            return source
        return {**source, "text_key": column}
    source["kind"] = kind
    source["chat_template"] = _template(draft)
    if keys := _keys(entry or {}, kind):
        source["keys"] = keys
    return source


def _template(draft: ImportDraft) -> str:
    return TEMPLATES.get(draft.value("template", default=""), "tokenizer")


def _keys(entry: dict[str, Any], kind: str) -> dict[str, str]:
    """Names of keys of a dataset that headway would not find by itself."""
    columns = entry.get("columns") or {}
    tags = entry.get("tags") or {}
    keys: dict[str, str] = {}
    for column, name in COLUMNS.items():
        if columns.get(column) not in (None, SHAPES.get(column), name):
            keys[name] = columns[column]
    for tag, name in TAGS.items():
        if tags.get(tag) not in (None, USUAL_TAGS[name], name):
            keys[name] = tags[tag]
    if "messages" in keys:
        return keys
    return with_partners(keys, PARTNERS[kind])


def template(draft: ImportDraft, key: str, value: Any) -> None:
    """A built-in template of the same name, or the tokenizer's own."""
    if value in TEMPLATES:
        draft.tell(key, value, "set", f"chat_template: {TEMPLATES[value]}")
    elif value in ("empty", "default"):
        draft.tell(
            key,
            value,
            "missing",
            "a .jinja file as chat_template",
            "headway uses the tokenizer's own template",
        )
    else:
        draft.tell(
            key,
            value,
            "set",
            "chat_template: tokenizer",
            "the template in the model's tokenizer files",
        )


def rope(draft: ImportDraft, key: str, value: Any) -> None:
    """Scaling of the rotary frequencies; the factor is not in their file."""
    draft.tell(
        key,
        value,
        "missing",
        "model.rope_scaling: {kind: yarn, factor: 4.0}",
        "the factor is not in the file; write it",
    )


def preference_loss(draft: ImportDraft, key: str, value: Any) -> None:
    """DPO's losses; ORPO and SimPO are objectives of their own."""
    if draft.value("stage", default="sft") != "dpo":
        draft.tell(key, value, "automatic", note="counts for stage dpo alone")
    elif value in OTHER_OBJECTIVES:
        draft.tell(key, value, "set", f"objective.kind: {value}")
    elif value in LOSSES:
        draft.write(key, value, "objective.loss_type", value)
    else:
        known = ", ".join((*LOSSES, *OTHER_OBJECTIVES))
        raise ConfigError(
            f"pref_loss is {shown(value)}, which headway cannot train; it has {known}."
        )


def full_16_bits(draft: ImportDraft, key: str, value: Any) -> None:
    """bf16 without fp32 masters."""
    nearest = "precision: bf16, optim.state_dtype: bf16"
    if yes(key, value):
        draft.tell(key, value, "missing", nearest, "master weights are fp32")
    else:
        draft.tell(key, value, "automatic", nearest, NOT_USED)


def recompute_off(draft: ImportDraft, key: str, value: Any) -> None:
    """LLaMA-Factory recomputes activations unless told otherwise."""
    draft.write(key, value, "memory.recompute", "none" if yes(key, value) else True)


NOT_IN_HEADWAY = (
    "loraplus_lr_ratio", "pissa_init", "use_galore", "use_apollo", "use_badam", "use_adam_mini",
    "use_llama_pro", "mixture_of_depths", "shift_attn", "use_dft_loss", "use_asft_loss",
    "use_eaft_loss", "pref_ftx", "pref_bco_weight", "freeze_trainable_layers",
    "freeze_trainable_modules", "freeze_extra_modules", "resize_vocab", "add_tokens",
    "add_special_tokens", "use_mca", "use_kt", "image_max_pixels", "video_max_pixels",
    "freeze_vision_tower", "freeze_multi_modal_projector", "media_dir", "predict_with_generate",
)  # fmt: skip
"""Keys of features that headway does not have."""
NO_SETTING = (
    "plot_loss", "preprocessing_num_workers", "preprocessing_batch_size", "overwrite_cache",
    "use_fast_tokenizer", "split_special_tokens", "low_cpu_mem_usage", "enable_liger_kernel",
    "use_unsloth", "use_unsloth_gc", "upcast_layernorm", "ignore_pad_token_for_loss",
    "print_param_status", "data_shared_file_system", "buffer_size",
    "include_effective_tokens_per_second", "disable_shuffling", "double_quantization",
    "quantization_method", "use_reentrant_gc", "ray_*", "enable_thinking", "compute_accuracy",
)  # fmt: skip
"""Keys that headway needs no setting for."""

RULES: dict[str, Rule] = {
    **hugging_face.RULES,
    **hugging_face.LORA,
    # The model.
    "model_name_or_path": sets("init.from", text),
    "adapter_name_or_path": sets("init.adapter", text),
    "trust_remote_code": automatic(
        "families of `headway list` need no code of a model; others: model: {family: transformers, "
        "trust_remote_code: true}"
    ),
    "cache_dir": sets("data.cache_dir", text),
    "model_revision": missing(
        "a revision is chosen at the download",
        "headway download ORG/NAME --revision REVISION",
        off=("main",),
    ),
    # What is trained, and how.
    "stage": stage,
    "finetuning_type": method,
    "lora_target": targets,
    "use_dora": automatic("adapter.kind: dora"),
    "additional_target": missing("patterns of `train` name them", "train: [embeddings]"),
    "create_new_adapter": automatic("init.adapter is merged if its form differs"),
    # Data. `datasets` reads what other keys say about all sources.
    "dataset": datasets,
    "eval_dataset": datasets,
    "dataset_dir": automatic("used to find dataset_info.json"),
    "template": template,
    "cutoff_len": sets("data.seq_len", integer),
    "max_samples": automatic("limit at each source"),
    "interleave_probs": automatic("weight at each source"),
    "mix_strategy": automatic("sources are mixed by weight, or by size"),
    "val_size": hugging_face.validation,
    "packing": hugging_face.packing,
    "neat_packing": automatic("documents of a row never see each other"),
    "train_on_prompt": missing(
        "chat data is trained on the answers only", "kind: text with a template of keys"
    ),
    "mask_history": missing("every answer of a conversation is trained"),
    "default_system": missing("system prompts come from the records", "keys: {system: KEY}"),
    # Precision, memory and early stopping.
    "rope_scaling": rope,
    "flash_attn": automatic("headway chooses its kernels (kernels.attention: auto)"),
    "pure_bf16": full_16_bits,
    "disable_gradient_checkpointing": recompute_off,
    "early_stopping_steps": sets("eval.stop.patience", integer),
    # Preference training. A key that the objective does not have is reported.
    "pref_beta": of_objective(kind_of, "beta", number),
    "simpo_gamma": of_objective(kind_of, "gamma", number),
    "kto_chosen_weight": of_objective(kind_of, "desirable_weight", number),
    "kto_rejected_weight": of_objective(kind_of, "undesirable_weight", number),
    "pref_loss": preference_loss,
    "dpo_label_smoothing": of_objective(kind_of, "label_smoothing", number),
    "ref_model": of_objective(kind_of, "reference", text),
    # Optimizer, trackers and a quantised base.
    "use_muon": one_of("optim.kind", {True: "muon", False: "adamw"}, "true or false"),
    "use_swanlab": tracks("swanlab"),
    "swanlab_project": tracks("swanlab", "project"),
    "swanlab_workspace": tracks("swanlab", "workspace"),
    "swanlab_mode": tracker_mode("swanlab"),
    "swanlab_run_name": automatic("the run's name"),
    "swanlab_api_key": missing("keys come from the environment", "SWANLAB_API_KEY"),
    "tokenized_path": sets("data.cache_dir", text, "token stores are cached there"),
    "quantization_bit": one_of(
        "adapter.base",
        {4: "nf4", 8: "int8"},
        "a base is stored in 4 bits (nf4) or 8 (int8)",
        "adapter.base: nf4 under an adapter",
    ),
    "streaming": missing("data is tokenized once into a store on disk", "headway data tokenize"),
    **dict.fromkeys(
        NOT_IN_HEADWAY,
        missing("headway has no such feature"),
    ),
    **dict.fromkeys(
        NO_SETTING,
        automatic("headway does this without a setting, or needs nothing for it"),
    ),
}

DEFAULTS: dict[str, Any] = {
    **hugging_face.DEFAULTS,
    "cutoff_len": 2048,
    "stage": "sft",
    "finetuning_type": "lora",
}


def defaults(draft: ImportDraft) -> dict[str, Any]:
    """LLaMA-Factory packs by default in pre-training only, and recomputes activations."""
    return {
        **DEFAULTS,
        "packing": draft.value("stage") == "pt",
        "disable_gradient_checkpointing": False,
    }


def finish(draft: ImportDraft) -> None:
    """Settings that follow from several keys."""
    # LLaMA-Factory's default of lora_target.
    if draft.get("adapter") is not None:
        draft.default("adapter.targets", ["all"])
    finish_objective(draft, kind_of(draft))
