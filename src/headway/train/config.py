"""The recipe: all settings of `headway train`, as one frozen tree. Imports without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from headway.checkpoint.config import CheckpointConfig
from headway.config.kinds import KindIn, NestedErrors
from headway.config.section import Overlay, Section, overlay, path_problem, setting
from headway.data.config import BatchConfig, DataConfig
from headway.model.adapter.config import AdapterConfig
from headway.model.config import ModelConfig
from headway.model.experts_config import UpcycleConfig
from headway.optim.adamw import Config as AdamWConfig
from headway.optim.base import OptimConfig
from headway.optim.scaler import ScalerConfig
from headway.parallel.config import MemoryConfig, ParallelConfig
from headway.rollout.config import RolloutConfig
from headway.tasks.base import TaskConfig
from headway.tasks.next_token import Config as NextTokenConfig
from headway.track.base import TrackerConfig
from headway.train.launch_config import LaunchConfig, SuperviseConfig
from headway.train.multimodal_config import MultimodalConfig

if TYPE_CHECKING:
    from headway.rewards.base import RewardList
else:
    from headway.train.reward_list import RewardsOnDemand as RewardList

MAX_SAMPLES = 100
"""Of log.samples: they are computed at once."""
SHARED_BY_STAGES = {
    "stages": "stages have no stages",
    "run": "all stages share the run folder",
    "device": "all stages share the device",
    "launch": "all stages run on the same machines",
    "callbacks": "all stages share the callbacks",
}
"""Sections that a stage may not set, and why."""


class RunConfig(Section):
    """The run folder, and how the run is started."""

    name: str = setting(
        "run",
        "Name of the run; its folder is run.dir/run.name. "
        "Not given, runs with other settings get names of recipe, model and data.",
        min_length=1,
    )
    dir: Path = setting(Path("runs"), "Parent folder of all runs.")
    gpus: int | str | tuple[int | str, ...] | None = setting(
        None,
        "GPUs `headway train` uses: ids, UUIDs, a type, auto (all free GPUs) or none; "
        "null = those torch sees. --gpus overrides it.",
    )
    supervise: bool = setting(
        False,
        "Restart the run after a crash or a hang, as `headway supervise` does; see supervise.",
    )
    grace_seconds: float = setting(
        120.0,
        "After a stop signal: how long a run that is not saving may take to exit; "
        "validation is cut short after half of it.",
        gt=0,
    )

    takeover_seconds: float = setting(
        120.0,
        "If a process on another host or in another container holds the run folder's lock: "
        "how long to wait for its next heartbeat before taking over.",
        gt=0,
    )

    @field_validator("name")
    @classmethod
    def _stays_in_dir(cls, name: str) -> str:
        if problem := path_problem(name):
            raise ValueError(problem)
        # A name may have folders in it: sweeps/lr-1e-4.
        if name.startswith(("/", "~")) or {".", ".."} & set(name.split("/")):
            raise ValueError(
                f"is {name!r}; it must name a folder below run.dir. "
                "Set run.dir to keep runs elsewhere"
            )
        return name

    @property
    def gpus_option(self) -> str | None:
        """The GPUs in the form of --gpus."""
        if isinstance(self.gpus, tuple):
            return ",".join(map(str, self.gpus))
        if self.gpus is None:
            return None
        return str(self.gpus)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.dir / self.name


Content = Literal["model", "optimizer", "scheduler", "sampler", "rng"]


class InitConfig(Section):
    """Where the initial weights come from."""

    # `from` is a keyword of Python, so the field has another name than the key.
    source: str | None = Field(
        None,
        alias="from",
        description="A run, checkpoint, Hugging Face or PEFT adapter folder, or a hub id "
        "(ORG/NAME or ORG/NAME@REVISION), that gives weights, shape and tokenizer; null = random.",
        json_schema_extra={"on_resume": "fixed"},
    )
    content: tuple[Content, ...] | Literal["all"] = setting(
        ("model",),
        "What to take from the checkpoint in `from`: "
        "model, optimizer, scheduler, sampler, rng, or all. InternLM's have no sampler.",
        on_resume="fixed",
    )
    adapter: str | None = setting(
        None,
        "A PEFT adapter folder for `from`: trained further if the recipe's adapter has the same "
        "form; otherwise merged.",
        on_resume="fixed",
    )
    merge: bool = setting(
        False, "Merge the adapter in `from` even if it could be trained further.", on_resume="fixed"
    )
    upcycle: UpcycleConfig | None = setting(
        None, "Turn the dense model in `from` into a mixture of experts.", on_resume="fixed"
    )
    masks: Path | None = setting(
        None,
        "Mask file, or a folder with one (also DuoAttention's), that initializes the head gates: "
        "log_alpha = 10 (2 x - 1).",
        on_resume="fixed",
    )
    masks_sparsity: float | None = setting(
        None,
        "Round soft values of a mask file to this share of streaming heads; null = unchanged.",
        ge=0,
        le=1,
        on_resume="fixed",
    )

    @field_validator("content", mode="before")
    @classmethod
    def _as_list(cls, value: object) -> object:
        """A single name is a list of one; a list with `all` is all."""
        names = value
        if not isinstance(value, (list, tuple)):
            names = [value]
        if "all" in cast(Any, names):
            return "all"
        return tuple(cast(Any, names))

    @field_validator("source", "adapter")
    @classmethod
    def _is_a_path(cls, value: str | None) -> str | None:
        if value is not None and (problem := path_problem(value)):
            raise ValueError(problem)
        return value

    @property
    def contents(self) -> tuple[Content, ...]:
        """What is taken, with `all` expanded."""
        if self.content == "all":
            return get_args(Content)
        return self.content

    @model_validator(mode="after")
    def _belongs_to_something(self) -> InitConfig:
        if "model" not in self.contents:
            raise ValueError(
                f"content is {list(self.contents)}; it must contain model, "
                "which the rest belongs to"
            )
        if len(self.contents) > 1 and self.source is None:
            raise ValueError(
                "content is given without from; set from to the checkpoint it is taken from"
            )
        if "rng" in self.contents and "scheduler" not in self.contents:
            raise ValueError(
                "content has rng without scheduler; randomness is derived from the seed and the "
                "step. Add scheduler"
            )
        if self.adapter is not None and self.source is None:
            raise ValueError("adapter is given without from; set from to the model it belongs to")
        if self.masks_sparsity is not None and self.masks is None:
            raise ValueError("masks_sparsity is given without masks; set masks to the mask file")
        return self


class KernelConfig(Section):
    """How operations are computed. Changes speed, not the model."""

    attention: Literal["auto", "reference", "sdpa", "varlen", "fa4", "flex"] = setting(
        "auto",
        "Attention kernel; auto chooses by device and mask: "
        "fa4 if installed, otherwise cuDNN for whole rows and varlen for documents; "
        "flex for soft-capped scores.",
    )
    compile: Literal["auto"] | bool = setting(
        "auto", "Compile the halves of each block; auto = on CUDA."
    )
    tf32: bool = setting(True, "Allow TF32 in fp32 matrix multiplications on CUDA.")


class Fp8Config(Section):
    """The 8-bit matrix multiplications of precision fp8."""

    scaling: Literal["tensorwise", "rowwise"] = setting(
        "tensorwise",
        "One scale for each operand (fastest), or one for each row or column (closer to bf16).",
    )


class StopConfig(Section):
    """Early stopping. checkpoint.metric and checkpoint.goal say which validation is better."""

    patience: int = setting(
        3, "Validations in a row without improvement, after which the run ends.", gt=0
    )
    min_delta: float = setting(
        0.0,
        "A validation counts as an improvement if it beats the best one by more than this.",
        ge=0,
    )
    restore_best: bool = setting(
        True, "Export final/ from the best checkpoint; every new best validation saves one."
    )


class EvalConfig(Section):
    """Validation during training."""

    every: int | None = setting(100, "Steps between validations; null = only at the end.", gt=0)
    at_start: bool = setting(
        False,
        "Also validate before the first step, as a baseline; "
        "it does not count for eval.stop or the best checkpoint.",
    )
    rows: int = setting(
        64,
        "Upper bound on the rows read from each validation set; "
        "the same rows for every microbatch size and number of ranks.",
        gt=0,
    )
    stop: StopConfig | None = setting(None, "Early stopping; null = off.")


class HealConfig(Section):
    """What to do about a loss that is not finite or spikes. An alert is sent in any case (events
    nan and spike)."""

    on_nan: Literal["skip", "rollback"] = setting(
        "skip",
        "A loss or gradient that is not finite: skip the step, or roll back to a checkpoint and "
        "skip that batch.",
    )
    on_spike: Literal["alert", "skip", "rollback"] = setting(
        "alert",
        "A loss spike: only send an alert, skip the step, or roll back to a checkpoint and skip "
        "that batch.",
    )
    sigma: float | None = setting(
        6.0,
        "A spike is this many standard deviations above the mean of the window; "
        "null = no spike detection.",
        gt=0,
    )
    window: int = setting(
        128,
        "Good losses in the window; no loss is a spike before the window is full.",
        gt=1,
        le=1_000_000,
    )
    skip_before: int = setting(
        0, "On rollback: batches before the bad one that are skipped with it.", ge=0, le=1_000_000
    )
    limit: int = setting(
        3,
        "Skipped steps in a row, or rollbacks to the same checkpoint, after which the run gives "
        "up (exit code 3).",
        ge=0,
    )

    @property
    def rolls_back(self) -> bool:
        """Whether a run may roll back to a checkpoint."""
        return "rollback" in (self.on_nan, self.on_spike)


class LogConfig(Section):
    """What is shown during training; metrics.jsonl always has every step."""

    every: int = setting(10, "Steps between console lines and tracker points.", gt=0)
    style: Literal["headway", "internlm"] = setting(
        "headway",
        "Form of the console lines; internlm = the key=value line of InternLM's trainer, "
        "for scripts that read it.",
    )
    samples: int | Literal["auto"] = setting(
        "auto",
        "Held-out prompts that are answered before the first step and after the last, "
        "and shown side by side (samples.json). auto = 2 "
        "for a model of less than a billion parameters with validation data, otherwise 0.",
    )
    slow_every: int = setting(50, "Steps between two comparisons of ranks.", gt=0)
    slow_ratio: float | None = setting(
        1.2,
        "Every slow_every steps, report ranks that take longer than the mean of all ranks by this "
        "factor; null = do not compare ranks.",
        gt=1,
    )

    @field_validator("samples")
    @classmethod
    def _not_negative(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 0 <= value <= MAX_SAMPLES:
            raise ValueError(f"is {value}; it must be auto, or from 0 to {MAX_SAMPLES}")
        return value


Tracker = Annotated[TrackerConfig, KindIn("headway.track")]


class StageConfig(Overlay):
    """One stage: a name, and the settings in which it differs from the recipe."""

    name: str = setting(
        ...,
        "Name of the stage; its folder is stages/NN-name in the run folder.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
    )

    @property
    def settings(self) -> dict[str, Any]:
        """The settings given for the stage."""
        return dict(self.model_extra or {})


class Recipe(Section):
    """All settings of one training run, frozen. `Recipe.load` reads a recipe; `recipe.with_` makes
    a changed copy."""

    run: RunConfig = setting(RunConfig, "The run folder, and how the run is started.")
    supervise: SuperviseConfig = setting(
        SuperviseConfig, "When a supervised run restarts and gives up."
    )
    launch: LaunchConfig = setting(LaunchConfig, "Where `headway launch` starts the run.")
    model: ModelConfig = setting(ModelConfig, "Model family and shape.", on_resume="fixed")
    init: InitConfig = setting(InitConfig, "Where the initial weights come from.")
    tokenizer: Path | None = setting(
        None,
        "Tokenizer folder, tokenizer.json, sentencepiece model, or the hub id of a model whose "
        "tokenizer is used.",
        on_resume="fixed",
    )
    multimodal: MultimodalConfig | None = setting(
        None,
        "Pictures and sounds as inputs of the language model; sources with kind: "
        "multimodal hold them. null = text alone.",
    )
    data: DataConfig = setting(
        DataConfig, "Training and validation data; without data.train, generated data."
    )
    objective: Annotated[TaskConfig, KindIn("headway.tasks", "next_token")] = setting(
        NextTokenConfig, "The loss."
    )
    reward: RewardList = setting(
        (),
        "What the answers of rollouts are worth (objective grpo): a kind, a file of yours, or a "
        "list of them with weights.",
        on_resume="free",
    )
    rollout: RolloutConfig = setting(
        RolloutConfig, "How the model samples answers while it trains (objective grpo)."
    )
    optim: Annotated[OptimConfig, KindIn("headway.optim", "adamw")] = setting(
        AdamWConfig, "Optimizer and schedule."
    )
    batch: BatchConfig = setting(BatchConfig, "Size of a step and of a microbatch.")
    steps: int | None = setting(None, "Number of updates; or give epochs.", gt=0, on_resume="free")
    epochs: int | float | None = setting(
        None, "Number of passes over the training data; or give steps.", gt=0, on_resume="free"
    )
    freeze: tuple[str, ...] = setting(
        (),
        "Parameters that do not train: patterns such as embeddings, layers.0-19, *.mlp.*.",
        on_resume="fixed",
    )
    train: tuple[str, ...] = setting(
        (),
        "The only parameters that train; the opposite of freeze. With an adapter: "
        "what trains in addition to it.",
        on_resume="fixed",
    )
    adapter: AdapterConfig | None = setting(
        None, "A low-rank adapter (LoRA) on frozen weights; null = none.", on_resume="fixed"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = setting(
        "auto",
        "Compute dtype; master weights are fp32. auto = bf16 on CUDA, else fp32. "
        "fp16 scales the loss. fp8: bf16, with the matrix multiplications of the blocks in 8 bits "
        "(Ada, Hopper and newer).",
    )
    fp8: Fp8Config = setting(Fp8Config, "The 8-bit matrix multiplications of precision fp8.")
    loss_scale: ScalerConfig = setting(ScalerConfig, "The loss scale of precision fp16.")
    device: Literal["auto", "cpu", "cuda", "mps"] = setting(
        "auto", "Where to compute; auto = CUDA if there is a GPU. mps = an Apple GPU."
    )
    parallel: ParallelConfig = setting(ParallelConfig, "How ranks divide the work.")
    kernels: KernelConfig = setting(KernelConfig, "How operations are computed.")
    memory: MemoryConfig = setting(MemoryConfig, "Settings that trade time for memory.")
    checkpoint: CheckpointConfig = setting(
        CheckpointConfig, "When to save, and which checkpoints to keep."
    )
    heal: HealConfig = setting(HealConfig, "What to do about a loss that is not finite or spikes.")
    eval: EvalConfig = setting(EvalConfig, "Validation during training.")
    log: LogConfig = setting(LogConfig, "What is shown during training.")
    track: tuple[Tracker, ...] = setting((), "Further destinations for metrics and events.")
    callbacks: tuple[str, ...] = setting(
        (), "Your classes that follow the run (docs/api.md): module:Class or ./file.py:Class."
    )
    seed: int = setting(42, "All randomness is derived from it.", ge=0, on_resume="fixed")
    deterministic: bool = setting(
        False,
        "Bit-identical reruns on GPU too. Uses slower kernels where needed; "
        "refused where there is no deterministic one.",
    )

    stages: tuple[StageConfig, ...] = setting(
        (),
        "Stages that run one after another; each has a name and the settings in which it differs "
        "from this recipe.",
        on_resume="fixed",
    )

    @classmethod
    def load(
        cls,
        recipe: str | Path | Mapping[str, Any] | None = None,
        overrides: Sequence[str] | Mapping[str, Any] = (),
        **sections: Any,
    ) -> Recipe:
        """Read a recipe: a file, the name of a shipped one (`headway init` lists them), plain data,
        or None for the defaults.

        Overrides have the form of the command line (`["optim.lr=1e-4"]`) or of `with_`.

        Example:
            >>> hw.Recipe.load("laptop/sft", {"steps": 100}, init={"from": "runs/pretrain-laptop"})
        """
        from headway.train.change import load_recipe

        return load_recipe(recipe, overrides, sections)

    def with_(self, changes: Mapping[str, Any] | None = None, **sections: Any) -> Recipe:
        """A changed copy, validated; this recipe stays as it is.

        Keys may be dotted; sections merge key by key.

        A section with another `kind` or `preset` is replaced as a whole, and a setting removes its
        alternatives (`epochs`: `steps`).

        Example:
            >>> recipe.with_({"optim.lr": 1e-4, "data.train.0.path": "mine.jsonl"})
            >>> recipe.with_(optim={"lr": 1e-4}, steps=100)
        """
        from headway.train.change import changed

        return changed(self, {**(changes or {}), **sections})

    @model_validator(mode="after")
    def _stages(self) -> Recipe:
        # Names are folders and keys of stages.json.
        names = [stage.name for stage in self.stages]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"stages has two called {name!r}; each needs its own name")

        # A stage is checked as the recipe that it will be; its mistakes are reported under its key.
        mistakes: list[Any] = []
        for index, stage in enumerate(self.stages):
            for key, reason in SHARED_BY_STAGES.items():
                if key in stage.settings:
                    raise ValueError(f"stages.{index}.{key} is given, but {reason}. Remove it")
            try:
                Recipe.model_validate_json(json.dumps(self.stage_settings(index)))
            except ValidationError as error:
                mistakes += [
                    {**mistake, "loc": ("stages", index, *mistake["loc"])}
                    for mistake in error.errors()
                ]
        if mistakes:
            raise NestedErrors(mistakes)
        return self

    def stage_settings(self, index: int) -> dict[str, Any]:
        """The settings of one stage: its own over this recipe's."""
        # Without defaults: they would count as given, and override presets of the stage.
        settings = self.model_dump(
            mode="json", by_alias=True, exclude_unset=True, exclude={"stages"}
        )
        return overlay(settings, self.stages[index].settings)

    @field_validator("callbacks")
    @classmethod
    def _are_callbacks(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        from headway.train.callbacks import find_callback

        # Imported when the recipe is read, so that a misspelt name does not end a long start.
        for name in names:
            find_callback(name)
        return names

    @model_validator(mode="after")
    def _stops_by_validations(self) -> Recipe:
        stop = self.eval.stop
        if stop is None:
            return self

        missing = None
        if self.data.valid is None:
            missing = "data.valid"
        elif self.eval.every is None:
            missing = "eval.every"
        if missing is not None:
            raise ValueError(
                f"eval.stop is given, but {missing} is null, so nothing is validated. "
                "Set it, or remove eval.stop"
            )

        if not stop.restore_best:
            return self
        obstacle = None
        if self.checkpoint.keep_best == 0:
            obstacle = "checkpoint.keep_best is 0"
        elif not self.checkpoint.at_end:
            obstacle = "checkpoint.at_end is false"
        if obstacle is not None:
            raise ValueError(
                f"eval.stop.restore_best is true, but {obstacle}, so there is no best checkpoint. "
                "Change one of them"
            )
        return self

    @model_validator(mode="after")
    def _starts_with_something_to_validate(self) -> Recipe:
        if self.eval.at_start and self.data.valid is None:
            raise ValueError(
                "eval.at_start is true, but data.valid is null, so there is nothing to validate. "
                "Set data.valid, or remove eval.at_start"
            )
        return self

    @model_validator(mode="after")
    def _samples_held_out_prompts(self) -> Recipe:
        # Stages may set data.valid, and are checked one by one.
        if self.log.samples not in ("auto", 0) and self.data.valid is None and not self.stages:
            raise ValueError(
                f"log.samples is {self.log.samples}, but data.valid is null, "
                "so no prompts are held out. Set data.valid, or remove log.samples"
            )
        return self

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Recipe:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                "steps and epochs are both given; a run has one length. Keep one of them"
            )
        return self

    @model_validator(mode="after")
    def _optimizer_fits(self) -> Recipe:
        """Refuse layouts and offloading that an optimizer of whole matrices (Muon) cannot have."""
        reason = ""
        if self.optim.NEEDS_MATRICES:
            reason = f"but optim.kind {self.optim.kind} updates whole matrices"
        if reason and "optimizer" in self.memory.offload:
            raise ValueError(
                f"memory.offload has optimizer, {reason}, whose state stays on the device. "
                "Remove it and shard the state (parallel.zero1, fsdp), or use optim.kind adamw"
            )
        if reason and self.parallel.tensor > 1:
            raise ValueError(
                f"parallel.tensor is {self.parallel.tensor}, {reason}, "
                "which the tensor axis splits. "
                "Use parallel.tensor=1, or another optimizer such as adamw"
            )
        if self.parallel.expert > 1 and self.optim.COUPLES_EXPERTS:
            raise ValueError(
                f"parallel.expert is {self.parallel.expert}, {reason}, "
                "all experts of a layer in one. Use adamw, or expert 1"
            )
        self.memory.check(self.parallel)
        return self

    @model_validator(mode="after")
    def _fp8_fits(self) -> Recipe:
        if self.precision != "fp8":
            return self
        if self.adapter is not None:
            raise ValueError(
                "precision is fp8 with an adapter, whose layers compute in 16 bits. "
                "Use precision bf16, or remove the adapter"
            )
        # Operands of the 8-bit products need dimensions that are multiples of 16.
        if self.data.seq_len % 16:
            raise ValueError(
                f"data.seq_len is {self.data.seq_len}; "
                "with precision fp8 it must be a multiple of 16"
            )
        return self
