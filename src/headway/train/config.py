"""The recipe: everything `headway train` needs, as one frozen tree. Imports without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from headway.checkpoint.config import CheckpointConfig
from headway.config.kinds import KindIn, NestedErrors
from headway.config.section import Section, setting, unusable_path
from headway.data.config import BatchConfig, DataConfig
from headway.model.adapter.config import AdapterConfig
from headway.model.config import ModelConfig
from headway.objective.base import ObjectiveConfig
from headway.objective.next_token import Config as NextTokenConfig
from headway.optim.adamw import Config as AdamWConfig
from headway.optim.base import OptimConfig
from headway.optim.scaler import ScalerConfig
from headway.parallel.config import MemoryConfig, ParallelConfig
from headway.track.base import TrackerConfig
from headway.train.overlay import NOT_A_STAGES, StageConfig, overlay
from headway.train.watch import HealConfig


class RunConfig(Section):
    """Where the run lives."""

    name: str = setting("run", "Name of the run; its folder is dir/name.", min_length=1)
    dir: Path = setting(Path("runs"), "Folder that holds runs.")
    gpus: int | str | tuple[int | str, ...] | None = setting(
        None, "GPUs `headway train` uses: ids, UUIDs, a type, auto (all free ones) or none; null = as torch sees them. --gpus wins."
    )
    supervise: bool = setting(False, "Start the run again after a crash or a hang, as `headway supervise` does; see supervise.")
    grace_seconds: float = setting(
        120.0, "After a signal to stop: how long a run that is not saving may take to leave; validation is cut short at half of it.", gt=0
    )

    takeover_seconds: float = setting(
        120.0,
        "A start that finds the folder locked by a process on another host or in another container waits so long for a sign of life before "
        "it takes over.",
        gt=0,
    )

    @field_validator("name")
    @classmethod
    def _stays_in_dir(cls, name: str) -> str:
        if problem := unusable_path(name):
            raise ValueError(problem)
        if name.startswith(("/", "~")) or {".", ".."} & set(name.split("/")):
            raise ValueError(f"is {name!r}; it must name a folder below run.dir. Say with run.dir where runs are kept")
        return name

    @property
    def gpus_wish(self) -> str | None:
        """The GPUs as --gpus would say it."""
        return ",".join(map(str, self.gpus)) if isinstance(self.gpus, tuple) else None if self.gpus is None else str(self.gpus)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.dir / self.name


class SuperviseConfig(Section):
    """How patient a supervisor is, with run.supervise or `headway supervise`, whose flags win."""

    max_restarts: int = setting(5, "Failures in a row, without a newer checkpoint, before it gives up.", ge=0)
    backoff_seconds: float = setting(10.0, "Pause before a restart; doubled with each failure in a row, ten minutes at most.", ge=0)
    hang_seconds: float = setting(
        900.0,
        "A rank without progress (a step, a validation batch, a save) for so long hangs: stacks are kept, all is restarted.",
        gt=0,
    )


Content = Literal["model", "optimizer", "scheduler", "sampler", "rng"]


class InitConfig(Section):
    """Where the weights start."""

    source: str | None = Field(
        None,
        alias="from",
        description="A run, checkpoint, Hugging Face or PEFT adapter folder to take weights, shape and tokenizer from; null = random.",
        json_schema_extra={"on_resume": "fixed"},
    )
    content: tuple[Content, ...] | Literal["all"] = setting(
        ("model",),
        "Taken from a checkpoint in `from`: model, optimizer, scheduler, sampler, rng, or all. From InternLM's: all but sampler.",
        on_resume="fixed",
    )
    adapter: str | None = setting(
        None, "A PEFT adapter folder over `from`: continued where the recipe's adapter has the same form, else merged.", on_resume="fixed"
    )
    merge: bool = setting(False, "Merge the adapter that `from` carries even where it could be continued.", on_resume="fixed")

    masks: Path | None = setting(
        None,
        "Mask file (or a folder that holds one, DuoAttention's too) the head gates start from: log_alpha = 10 (2 x - 1).",
        on_resume="fixed",
    )
    masks_sparsity: float | None = setting(
        None, "Round a mask file of soft values to this share of streaming heads first; null = as it is.", ge=0, le=1, on_resume="fixed"
    )

    @field_validator("content", mode="before")
    @classmethod
    def _as_list(cls, value: object) -> object:
        """A single name stands for a list of one; `all` in a list is all."""
        listed = value if isinstance(value, (list, tuple)) else [value]
        return "all" if "all" in listed else tuple(cast(Any, listed))

    @field_validator("source", "adapter")
    @classmethod
    def _is_a_path(cls, value: str | None) -> str | None:
        if value is not None and (problem := unusable_path(value)):
            raise ValueError(problem)
        return value

    @property
    def contents(self) -> tuple[Content, ...]:
        """What is taken, written out."""
        return get_args(Content) if self.content == "all" else self.content

    @model_validator(mode="after")
    def _belongs_to_something(self) -> InitConfig:
        if "model" not in self.contents:
            raise ValueError(f"content is {list(self.contents)}; it must hold model, which the rest belongs to")
        if len(self.contents) > 1 and self.source is None:
            raise ValueError("content is given without from; name the checkpoint it is taken from")
        if "rng" in self.contents and "scheduler" not in self.contents:
            raise ValueError("content has rng without scheduler; randomness is derived from the seed and the step. Add scheduler")
        if self.adapter is not None and self.source is None:
            raise ValueError("adapter is given without from; an adapter needs the model it belongs to")
        if self.masks_sparsity is not None and self.masks is None:
            raise ValueError("masks_sparsity is given without masks; give the mask file too")
        return self


class KernelConfig(Section):
    """How operations are computed; never what they compute."""

    attention: Literal["auto", "reference", "sdpa", "varlen", "fa4"] = setting(
        "auto",
        "Attention kernel; auto picks by device and mask: fa4 where installed, else cuDNN for whole rows, varlen for documents.",
    )
    compile: Literal["auto"] | bool = setting("auto", "Compile the halves of each block; auto = on CUDA.")
    tf32: bool = setting(True, "Allow TF32 in fp32 matrix products on CUDA.")


class Fp8Config(Section):
    """The 8-bit products of precision fp8."""

    scaling: Literal["tensorwise", "rowwise"] = setting(
        "tensorwise", "One scale for a whole operand (fastest), or one for each row or column (closer to bf16)."
    )


class StopConfig(Section):
    """When a run ends early. What better means: checkpoint.metric and checkpoint.goal."""

    patience: int = setting(3, "Validations in a row without a better one that end the run.", gt=0)
    min_delta: float = setting(0.0, "A validation is better if it beats the best by more than this.", ge=0)
    restore_best: bool = setting(True, "Make final/ from the best checkpoint; every validation that is best saves one.")


class EvalConfig(Section):
    """Validation inside the run."""

    every: int | None = setting(100, "Steps between validations; null = only at the end.", gt=0)
    at_start: bool = setting(
        False, "Also validate before the first step, so that there is a before to compare with; does not count for eval.stop or the best."
    )
    rows: int = setting(64, "Rows of each validation set that are read, at most; the same ones whatever the microbatch and ranks.", gt=0)
    stop: StopConfig | None = setting(None, "End the run when validations get no better; null = never.")


class LogConfig(Section):
    """What is shown while training; metrics.jsonl has every step regardless."""

    every: int = setting(10, "Steps between console lines and tracker points.", gt=0)
    slow_ratio: float | None = setting(
        1.2, "Every 50 steps a rank is named that takes longer than the ranks' mean by this factor; null = ranks are not compared.", gt=1
    )


Tracker = Annotated[TrackerConfig, KindIn("headway.track")]


class Recipe(Section):
    """One training run."""

    run: RunConfig = setting(RunConfig, "Where the run lives.")
    supervise: SuperviseConfig = setting(SuperviseConfig, "How patient a supervisor is.")
    model: ModelConfig = setting(ModelConfig, "Shape of the model.", on_resume="fixed")
    init: InitConfig = setting(InitConfig, "Where the weights start.")
    tokenizer: Path | None = setting(None, "Tokenizer folder, tokenizer.json or sentencepiece model.", on_resume="fixed")
    data: DataConfig = setting(DataConfig, "What to train and validate on; without train, generated data.")
    objective: Annotated[ObjectiveConfig, KindIn("headway.objective", "next_token")] = setting(NextTokenConfig, "The loss.")
    optim: Annotated[OptimConfig, KindIn("headway.optim", "adamw")] = setting(AdamWConfig, "Optimizer and schedule.")
    batch: BatchConfig = setting(BatchConfig, "Size of a step and of a microbatch.")
    steps: int | None = setting(None, "Updates in the run; or give epochs.", gt=0, on_resume="free")
    epochs: int | float | None = setting(None, "Passes over the training data; or give steps.", gt=0, on_resume="free")
    freeze: tuple[str, ...] = setting(
        (), "Parameters that do not train: patterns such as embeddings, layers.0-19, *.mlp.*.", on_resume="fixed"
    )
    train: tuple[str, ...] = setting(
        (), "The only parameters that train; the opposite of freeze. With an adapter: what trains beside it.", on_resume="fixed"
    )
    adapter: AdapterConfig | None = setting(None, "A low-rank update beside frozen weights; null = none.", on_resume="fixed")
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = setting(
        "auto",
        "Compute dtype; master weights are fp32. auto = bf16 on CUDA, else fp32. fp16 scales the loss. "
        "fp8: bf16 with the blocks' matrix products in 8 bits (Ada, Hopper and newer).",
    )
    fp8: Fp8Config = setting(Fp8Config, "The 8-bit products of precision fp8.")
    loss_scale: ScalerConfig = setting(ScalerConfig, "The loss scale of precision fp16.")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Where to compute; auto = CUDA where there is one.")
    parallel: ParallelConfig = setting(ParallelConfig, "How ranks share the work.")
    kernels: KernelConfig = setting(KernelConfig, "How operations are computed.")
    memory: MemoryConfig = setting(MemoryConfig, "Memory against time.")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "When to save, what to keep.")
    heal: HealConfig = setting(HealConfig, "What to do about a loss that is not finite or jumps.")
    eval: EvalConfig = setting(EvalConfig, "Validation inside the run.")
    log: LogConfig = setting(LogConfig, "What is shown while training.")
    track: tuple[Tracker, ...] = setting((), "Where else metrics go.")
    seed: int = setting(42, "Everything random is derived from it.", ge=0, on_resume="fixed")
    deterministic: bool = setting(False, "Bit-equal reruns on GPU too; slower kernels where needed, refused where there is none.")

    stages: tuple[StageConfig, ...] = setting(
        (), "Stages that run one after another: each a name and the settings in which it differs from this recipe.", on_resume="fixed"
    )

    @model_validator(mode="after")
    def _stages(self) -> Recipe:
        names = [stage.name for stage in self.stages]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"stages has two called {twice!r}; each needs its own name")
        mistakes: list[Any] = []
        for index, stage in enumerate(self.stages):
            for key, reason in NOT_A_STAGES.items():
                if key in stage.settings:
                    raise ValueError(f"stages.{index}.{key} is given, but {reason}. Remove it")
            try:
                Recipe.model_validate_json(json.dumps(self.stage_settings(index)))
            except ValidationError as error:
                mistakes += [{**one, "loc": ("stages", index, *one["loc"])} for one in error.errors()]
        if mistakes:
            raise NestedErrors(mistakes)
        return self

    def stage_settings(self, index: int) -> dict[str, Any]:
        """What one stage's recipe says: its own settings over this recipe's."""
        return overlay(self.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"stages"}), self.stages[index].settings)

    @model_validator(mode="after")
    def _stops_by_validations(self) -> Recipe:
        stop = self.eval.stop
        if stop is None:
            return self
        if self.data.valid is None or self.eval.every is None:
            missing = "data.valid" if self.data.valid is None else "eval.every"
            raise ValueError(f"eval.stop is given, but {missing} is null, so nothing is validated. Set it, or leave eval.stop out")
        if stop.restore_best and (self.checkpoint.keep_best == 0 or not self.checkpoint.at_end):
            needed = "checkpoint.keep_best is 0" if self.checkpoint.keep_best == 0 else "checkpoint.at_end is false"
            raise ValueError(f"eval.stop.restore_best is true, but {needed}, so no best checkpoint is there. Change one of them")
        return self

    @model_validator(mode="after")
    def _starts_with_something_to_validate(self) -> Recipe:
        if self.eval.at_start and self.data.valid is None:
            raise ValueError("eval.at_start is true, but data.valid is null, so there is nothing to validate. Set it, or leave it out")
        return self

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Recipe:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs are both given; a run has one length. Keep one of them")
        return self

    @model_validator(mode="after")
    def _fp8_fits(self) -> Recipe:
        if self.precision == "fp8" and self.adapter is not None:
            raise ValueError("precision is fp8 with an adapter, whose layers compute in 16 bits. Use precision bf16, or no adapter")
        if self.precision == "fp8" and self.data.seq_len % 16:
            raise ValueError(f"data.seq_len is {self.data.seq_len}; with precision fp8 it must be a multiple of 16")
        return self
