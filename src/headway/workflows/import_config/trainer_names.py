"""Arguments of TRL's trainers and of uploads whose answer no table of the importers has: the tables
are for files, in which a name has one meaning. In: the value that a person gave; out: an `NameAnswer`.

    label_smoothing=0.1   ->  here it is objective.label_smoothing=0.1
    loss_type=dapo        ->  here it is objective.kind=grpo objective.algorithm=bnpo
    padding_free=true     ->  rows are packed without padding between documents: data.packing

Sources: TrainingArguments of transformers 5.22; SFTConfig, DPOConfig, GRPOConfig, KTOConfig and
RewardConfig of TRL 1.16, and names of its earlier versions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from headway.config.kinds import kind_config
from headway.workflows.import_config import trl
from headway.workflows.import_config.rules import shown

VALUE = "VALUE"
"""Stands for a value that was not given."""


@dataclass(frozen=True)
class NameAnswer:
    """What headway has instead of a name."""

    text: str
    settings: int = 0
    """How many settings the text gives as a replacement; 0: it says why there is none."""


Explain = Callable[[Any], NameAnswer]


def settings_answer(settings: list[str]) -> NameAnswer:
    """`optim.lr=0.1` and the like."""
    return NameAnswer("here it is " + " ".join(settings), len(settings))


def setting(path: str) -> Explain:
    """The value is the setting at `path`."""

    def explain(value: Any) -> NameAnswer:
        return settings_answer([f"{path}={written(value)}"])

    return explain


def reason(text: str) -> Explain:
    """There is no such setting; `text` says why, or what is nearest."""

    def explain(value: Any) -> NameAnswer:
        return NameAnswer(text)

    return explain


def choice(forms: dict[Any, str], otherwise: str) -> Explain:
    """Each value is a setting of its own."""

    def explain(value: Any) -> NameAnswer:
        # A list or mapping is no key of a table.
        if isinstance(value, (str, bool)) and value in forms:
            return settings_answer([forms[value]])
        return NameAnswer(otherwise)

    return explain


def written(value: Any) -> str:
    """A value as an override has it."""
    if value is None:
        return VALUE
    return shown(value)


def _choices(task: str, field: str) -> tuple[str, ...]:
    """The values that a setting of an objective may have."""
    return get_args(kind_config("headway.tasks", task).model_fields[field].annotation)


LOSSES_OF_OTHER_TRAINERS = {
    "nll": ["objective.kind=next_token"],
    "chunked_nll": ["objective.kind=next_token", "memory.loss_chunk_tokens=auto"],
    "bradley_terry": ["objective.kind=reward"],
    "kto": ["objective.kind=kto"],
    "orpo": ["objective.kind=orpo"],
    "simpo": ["objective.kind=simpo"],
}
"""loss_type of SFTConfig, RewardConfig and KTOConfig, and names of CPOConfig."""


def loss_type(value: Any) -> NameAnswer:
    """SFTConfig, DPOConfig, KTOConfig and GRPOConfig have an argument of this name each; their
    values differ, so a value says which of them is meant. DPOConfig also takes a list.
    """
    names = [value]
    if isinstance(value, (list, tuple)):
        names = list(value)
    if len(names) > 1:
        return NameAnswer(
            "a run has one loss; nearest: objective.loss_type with objective.kind=dpo"
        )

    name = str(names[0]) if names else ""
    pair_losses = _choices("dpo", "loss_type")
    if name in LOSSES_OF_OTHER_TRAINERS:
        return settings_answer(LOSSES_OF_OTHER_TRAINERS[name])
    if name in pair_losses:
        return settings_answer(["objective.kind=dpo", f"objective.loss_type={name}"])
    if name in trl.LOSSES:
        parts = [f"objective.{key}={part}" for key, part in trl.LOSSES[name].items()]
        return settings_answer(["objective.kind=grpo", *parts])
    return NameAnswer(
        f"headway has no such loss; objective.loss_type of dpo is {', '.join(pair_losses)}, and "
        f"objective.algorithm of grpo is {', '.join(_choices('grpo', 'algorithm'))}"
    )


ON_ANSWERS = reason("the loss of a conversation is on its answers alone, without a setting")
OF_THE_TOKENIZER = reason("the tokenizer's files name it; nearest: tokenizer=PATH")
UPLOADS_NOTHING = "a run uploads nothing by itself"
TOO_LONG = (
    "a document that is longer than data.seq_len is cut into rows, and a pair that is longer is left "
    "out; nearest: `headway data tokenize --max-length N --too-long truncate_left`"
)
NO_TOOLS = "rollouts call no tools; a reward may run programs: reward=code"

OTHER_PRECISION = "precision has it: bf16, fp16 or fp32; auto is bf16 on CUDA, else fp32"

ANSWERS: dict[str, Explain] = {
    # Of TrainingArguments, where a value of the command line needs more than the tables have.
    "warmup_steps": setting("optim.schedule.warmup"),
    "bf16": choice({True: "precision=bf16"}, OTHER_PRECISION),
    "fp16": choice({True: "precision=fp16"}, OTHER_PRECISION),
    "project": reason("a tracker has it: track=[{kind: trackio, project: NAME}]"),
    "trackio_space_id": reason("a tracker has it: track=[{kind: trackio, space: USER/NAME}]"),
    # Lengths, packing and records.
    "max_prompt_length": reason(
        "prompts are not cut alone; nearest: data.seq_len, for prompt and answer"
    ),
    "dataset_text_field": setting("data.train.0.text_key"),
    "dataset_kwargs": reason(
        "a source has settings of its own: data.train.0.keys, data.train.0.template"
    ),
    "dataset_num_proc": reason("raw files are tokenized by one process per core"),
    "chat_template_path": setting("data.train.0.chat_template"),
    "chat_template_kwargs": reason(
        "a template gets no arguments of yours; nearest: data.train.0.chat_template=FILE.jinja"
    ),
    "formatting_func": reason(
        "a template builds the text of a record: data.train.0.template='{title}\\n{content}'"
    ),
    "eos_token": OF_THE_TOKENIZER,
    "pad_token": OF_THE_TOKENIZER,
    "label_pad_token_id": reason("targets carry a mask; no id stands for padding"),
    "padding_value": reason("targets carry a mask; no id stands for padding"),
    "pad_to_multiple_of": reason("all rows have data.seq_len tokens"),
    "packing_strategy": choice(
        {
            "bfd": "data.packing=best_fit",
            "bfd_split": "data.packing=best_fit",
            "wrapped": "data.packing=concat",
        },
        "nearest: data.packing=best_fit or data.packing=concat",
    ),
    "eval_packing": reason("rows of validation are made as those of training: data.packing"),
    "padding_free": reason(
        "documents of a row stand one after another without padding, and see only themselves: "
        "data.packing=best_fit"
    ),
    "truncation_mode": reason(TOO_LONG),
    "completion_only_loss": ON_ANSWERS,
    "assistant_only_loss": ON_ANSWERS,
    "train_on_responses_only": ON_ANSWERS,
    # The model.
    "model_init_kwargs": reason(
        "what from_pretrained takes are settings: precision, kernels.attention, "
        "init.from=NAME@REVISION"
    ),
    "quantization_config": reason("here it is adapter.base=nf4 or adapter.base=int8"),
    "router_aux_loss_coef": setting("model.experts.aux_loss"),
    # Losses and references.
    "loss_type": loss_type,
    "loss_weights": reason("a run has one loss; nearest: objective.loss_type"),
    "beta": setting("objective.beta"),
    "center_rewards_coefficient": setting("objective.center_rewards_coefficient"),
    "label_smoothing": setting("objective.label_smoothing"),
    "desirable_weight": setting("objective.desirable_weight"),
    "undesirable_weight": setting("objective.undesirable_weight"),
    "reference_free": setting("objective.reference_free"),
    "ref_model": setting("objective.reference"),
    "ref_adapter_name": reason("with an adapter the reference is its frozen base, without a copy"),
    "precompute_ref_log_probs": choice(
        {True: "objective.reference_logps=cached", False: "objective.reference_logps=live"},
        "here it is objective.reference_logps=cached",
    ),
    "precompute_ref_batch_size": reason(
        "objective.reference_logps=cached scores with the microbatch of the run: batch.micro_rows"
    ),
    "teacher_model_name_or_path": setting("objective.teacher"),
    "f_divergence_type": reason("the divergence of dpo is reverse KL, without a setting"),
    "f_alpha_divergence_coef": reason("the divergence of dpo is reverse KL, without a setting"),
    "ld_alpha": reason(
        "answers are not weighted by length; objective.kind=simpo divides by the length"
    ),
    "use_weighting": reason("pairs are not weighted by their probabilities (no WPO)"),
    "discopop_tau": reason("headway has no loss discopop; nearest: objective.loss_type"),
    "rpo_alpha": reason("dpo has no supervised term; objective.kind=orpo has one"),
    "generate_during_eval": reason("held-out prompts are answered: log.samples=2"),
    "is_encoder_decoder": reason("headway trains decoders"),
    # Rollouts.
    "generation_batch_size": reason(
        "a rollout counts prompts: rollout.prompts, each with rollout.samples answers"
    ),
    "steps_per_generation": reason(
        "a rollout counts updates, not microbatches: rollout.updates, over rollout.prompts prompts"
    ),
    "reward_weights": reason("each reward has its own: reward=[{kind: math, weight: 2}]"),
    "reward_processing_classes": reason(
        "a reward model has its own tokenizer: reward=[{kind: model, path: PATH}]"
    ),
    "tools": reason(NO_TOOLS),
    "max_tool_calling_iterations": reason(NO_TOOLS),
    "environment_factory": reason(NO_TOOLS),
    "rollout_func": reason("rollouts are headway's own: the section rollout has their settings"),
    # Uploads.
    "hub_model_id": lambda value: NameAnswer(
        f"{UPLOADS_NOTHING}; nearest: `headway push RUN {written(value)}`"
    ),
    "hub_private_repo": reason(
        "`headway push` makes a private repository; --public makes a public one"
    ),
    "hub_token": reason("`headway push` reads HF_TOKEN or the login of `hf auth login`"),
}
"""Name -> what explains it."""
