"""Flare's training_config.json, or a file with its training command. Both stages become `stages:`
of one run.
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
    one_of,
    sets,
    text,
    tracks,
)

SYSTEM = "Flare"
SECTIONS = ("model_args", "data_args", "training_args")
OF_A_STAGE = (
    "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps",
    "eval_steps", "save_steps", "gradient_checkpointing", "weight_decay", "warmup_ratio",
    "num_train_epochs",
)  # fmt: skip
"""Keys of a stage that are read."""


def dataset(draft: ImportDraft, key: str, value: Any) -> None:
    """One source: path, column, number of documents, which are keys of their own in the file."""
    source: dict[str, Any] = {"path": text(key, value)}
    if (column := draft.value("text_column")) not in (None, "text"):
        source["text_key"] = column
    if (most := draft.value("dataset_size")) is not None:
        source["limit"] = integer("dataset_size", most)
    draft.write(key, value, "data.train", [source])


def layers(draft: ImportDraft, key: str, value: Any) -> None:
    """Layers without rotary positions."""
    numbers = value if isinstance(value, list) else [value]
    draft.write(key, value, "model.no_rope_layers", [integer(key, layer) for layer in numbers])


def gpus(draft: ImportDraft, key: str, value: Any) -> None:
    """Ids or a type; the same setting takes both."""
    ids = value if isinstance(value, list) else [value]
    draft.write(key, value, "run.gpus", ",".join(str(gpu) for gpu in ids))


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
    stage_number = integer(key, value)
    if draft.value("stage_configs.stage1.learning_rate") is not None:
        draft.tell(key, value, "automatic", note="the recipe has both stages, one after the other")
    elif stage_number == 1:
        # Stage 1 of Flare trains the layers whose rotation was removed, and nothing else.
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
    """A key of a stage is reported here; `finish` makes the stages of all of them."""
    draft.tell(key, value, "set", f"stages: {key.split('.')[1]}")


def split(draft: ImportDraft, key: str, value: Any) -> None:
    """A part of a dataset of the hub; all files at a path are read here."""
    if value == "train":
        draft.tell(key, value, "automatic", note="the usual split")
    else:
        draft.tell(
            key,
            value,
            "missing",
            "headway download ORG/NAME --dataset --include 'PATTERN'",
            "the files at path are all read",
        )


RULES: dict[str, Rule] = {
    **hugging_face.RULES,
    **hugging_face.LORA,
    # The run.
    "output_dir": output,
    "base_output_dir": sets("run.dir", text),
    "experiment_name": sets("run.name", text),
    # The model: layers without rotary positions are Flare's subject.
    "model_name_or_path": sets("init.from", text),
    "no_rope_layers": layers,
    "rope_theta": sets("model.rope_theta", number),
    "max_position_embeddings": sets("model.max_seq_len", integer),
    "use_flash_attention": automatic("kernels.attention: auto"),
    "torch_dtype": dtype,
    # Data. `dataset` reads text_column and dataset_size too.
    "dataset_name": dataset,
    "dataset_config": missing(
        "download the configuration", "headway download ORG/NAME --dataset --include 'CONFIG/*'"
    ),
    "dataset_split": split,
    "text_column": automatic("text_key at the source"),
    "dataset_size": automatic("limit at the source"),
    "max_seq_length": sets("data.seq_len", integer),
    "stage1_max_seq_len": sets("data.seq_len", integer),
    "validation_split_percentage": sets(
        "data.valid.fraction", number, "a fraction in spite of its name"
    ),
    "preprocessing_num_workers": automatic("all cores tokenize"),
    "cache_dir": sets("data.cache_dir", text),
    # Stages, devices and the rest.
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
    # Early stopping without validation data would be refused.
    if draft.get("data.valid") is None:
        draft.recipe.get("eval", {}).pop("stop", None)

    stages = [
        _stage(draft, name)
        for name in ("stage1", "stage2")
        if any(key.startswith(f"stage_configs.{name}.") for key in draft.given)
    ]
    if not stages:
        return
    # Each stage has its own length and batch.
    for path in ("steps", "epochs", "batch"):
        draft.recipe.pop(path, None)
    draft.set("stages", stages)


def _stage(draft: ImportDraft, name: str) -> dict[str, Any]:
    """One stage: the settings of its section, and the changed layers alone in the first."""
    prefix = f"stage_configs.{name}."
    section = {
        key.removeprefix(prefix): value
        for key, value in draft.given.items()
        if key.startswith(prefix)
    }

    # The rules of single keys run on a draft of the stage, whose recipe is its settings.
    stage_draft = ImportDraft(
        {key: section[key] for key in OF_A_STAGE if section.get(key) is not None}, draft.source
    )
    # The recipe loses its length and batch (see `finish`), so a stage without them takes them over.
    for key in (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "max_steps",
        "num_train_epochs",
    ):
        if stage_draft.given.get(key) is None and draft.given.get(key) is not None:
            stage_draft.given[key] = draft.given[key]
    for key, value in stage_draft.given.items():
        RULES[key](stage_draft, key, value)
    for key in sorted(set(section) - set(OF_A_STAGE) - {"description"}):
        draft.tell(
            prefix + key,
            section[key],
            "missing",
            "a setting of the stage",
            "not a key of a stage that is read",
        )

    if name != "stage1":
        return {"name": "all-parameters", **stage_draft.recipe}
    patterns = hugging_face.trained_layers(draft.get("model.no_rope_layers") or [])
    return {"name": "changed-layers", "train": patterns, **stage_draft.recipe}
