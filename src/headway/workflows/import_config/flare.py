"""Flare's training_config.json, or a file with its training command. Both stages become `stages:` of one run."""

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
    one_of,
    sets,
    text,
    tracks,
)

SYSTEM = "Flare"
SECTIONS = ("model_args", "data_args", "training_args")
OF_A_STAGE = ("learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "eval_steps", "save_steps",
              "gradient_checkpointing", "weight_decay", "warmup_ratio", "num_train_epochs")  # fmt: skip


def dataset(draft: ImportDraft, key: str, value: Any) -> None:
    """One source: path, column, number of documents."""
    source: dict[str, Any] = {"path": text(key, value)}
    if (column := draft.value("text_column")) not in (None, "text"):
        source["text_key"] = column
    if (most := draft.value("dataset_size")) is not None:
        source["limit"] = integer("dataset_size", most)
    draft.write(key, value, "data.train", [source])


def layers(draft: ImportDraft, key: str, value: Any) -> None:
    """Layers without rotary positions."""
    draft.write(
        key,
        value,
        "model.no_rope_layers",
        [integer(key, one) for one in (value if isinstance(value, list) else [value])],
    )


def gpus(draft: ImportDraft, key: str, value: Any) -> None:
    """Ids or a type; the same setting takes both."""
    ids = ",".join(str(one) for one in value) if isinstance(value, list) else str(value)
    draft.write(key, value, "run.gpus", ids)


def dtype(draft: ImportDraft, key: str, value: Any) -> None:
    """The dtype of the weights is the precision."""
    one_of(
        "precision",
        {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "auto": "auto"},
        "another dtype",
    )(draft, key, value)


def output(draft: ImportDraft, key: str, value: Any) -> None:
    """base_output_dir/experiment_name is the run folder."""
    if draft.value("base_output_dir") is not None:
        draft.tell(key, value, "automatic", note="base_output_dir and experiment_name count")
    else:
        hugging_face.output_folder(draft, key, value)


def stage(draft: ImportDraft, key: str, value: Any) -> None:
    """With stage_configs both stages are in the recipe; else only this one."""
    number_of = integer(key, value)
    if draft.value("stage_configs.stage1.learning_rate") is not None:
        draft.tell(key, value, "automatic", note="the recipe has both stages, one after the other")
    elif number_of == 1:
        patterns = hugging_face.trained_layers(draft.value("no_rope_layers", default=range(20, 33)))
        draft.write(key, value, "train", patterns)
    else:
        draft.tell(
            key,
            value,
            "automatic",
            note="all parameters train; set init.from to the run of stage 1",
        )


def of_stage(draft: ImportDraft, key: str, value: Any) -> None:
    """Collected by `finish`."""
    draft.tell(key, value, "set", f"stages: {key.split('.')[1]}")


RULES: dict[str, Rule] = {
    **hugging_face.RULES,
    **hugging_face.LORA,
    "output_dir": output,
    "base_output_dir": sets("run.dir", text),
    "experiment_name": sets("run.name", text),
    "model_name_or_path": sets("init.from", text),
    "no_rope_layers": layers,
    "rope_theta": sets("model.rope_theta", number),
    "max_position_embeddings": sets("model.max_seq_len", integer),
    "use_flash_attention": automatic("kernels.attention: auto"),
    "torch_dtype": dtype,
    "dataset_name": dataset,
    "dataset_config": missing(
        "download the configuration", "headway download ORG/NAME --dataset --include 'CONFIG/*'"
    ),
    "dataset_split": one_of(
        "data.train",
        {},
        "the files at path are all read",
        "headway download ORG/NAME --dataset --include 'PATTERN'",
    ),
    "text_column": automatic("text_key at the source"),
    "dataset_size": automatic("limit at the source"),
    "max_seq_length": sets("data.seq_len", integer),
    "stage1_max_seq_len": sets("data.seq_len", integer),
    "validation_split_percentage": sets(
        "data.valid.fraction", number, "a fraction in spite of its name"
    ),
    "preprocessing_num_workers": automatic("all cores tokenize"),
    "cache_dir": sets("data.cache_dir", text),
    "stage": stage,
    "gpu_ids": gpus,
    "gpu_type": gpus,
    "enable_tensorboard": tracks("tensorboard"),
    "config_file": automatic("the recipe"),
    "evaluation_datasets*": missing(
        "evaluation is a verb of its own", "headway eval ppl --model RUN --data NAME=PATH"
    ),
    "stage_configs.*": of_stage,
}
RULES["dataset_split"] = lambda draft, key, value: (
    draft.tell(key, value, "automatic", note="the usual split")
    if value == "train"
    else draft.tell(
        key,
        value,
        "missing",
        "headway download ORG/NAME --dataset --include 'PATTERN'",
        "the files at path are all read",
    )
)

DEFAULTS: dict[str, Any] = {
    **hugging_face.DEFAULTS,
    "no_rope_layers": list(range(20, 33)),
    "max_seq_length": 4096,
    "weight_decay": 0.01,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "save_total_limit": 3,
}


def defaults(draft: ImportDraft) -> dict[str, Any]:
    """Flare's own layers and length; the trainer's for the rest."""
    return DEFAULTS


def finish(draft: ImportDraft) -> None:
    """Two stages of one run: the changed layers, then all parameters."""
    draft.set("data.packing", "pad")
    draft.tell(
        "data.packing",
        None,
        "assumed",
        "data.packing: pad",
        "one document per row, as in Flare; best_fit wastes no tokens",
    )
    if draft.get("data.valid") is None:
        draft.recipe.get("eval", {}).pop("stop", None)
    stages = [
        _stage(draft, name)
        for name in ("stage1", "stage2")
        if any(key.startswith(f"stage_configs.{name}.") for key in draft.given)
    ]
    if not stages:
        return
    for path in ("steps", "epochs", "batch"):
        draft.recipe.pop(path, None)
    draft.set("stages", stages)


def _stage(draft: ImportDraft, name: str) -> dict[str, Any]:
    """One stage: the settings of its section, and the changed layers alone in the first."""
    prefix = f"stage_configs.{name}."
    given = {
        key.removeprefix(prefix): value
        for key, value in draft.given.items()
        if key.startswith(prefix)
    }
    own = ImportDraft(
        {key: given[key] for key in OF_A_STAGE if given.get(key) is not None}, draft.source
    )
    for key in (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "max_steps",
        "num_train_epochs",
    ):
        if own.given.get(key) is None and draft.given.get(key) is not None:
            own.given[key] = draft.given[key]
    for key, value in own.given.items():
        RULES[key](own, key, value)
    for key in sorted(set(given) - set(OF_A_STAGE) - {"description"}):
        draft.tell(
            prefix + key,
            given[key],
            "missing",
            "a setting of the stage",
            "not a key of a stage that is read",
        )
    named = {"name": "changed-layers" if name == "stage1" else "all-parameters"}
    patterns = hugging_face.trained_layers(draft.get("model.no_rope_layers") or [])
    return {**named, **({"train": patterns} if name == "stage1" else {}), **own.recipe}
