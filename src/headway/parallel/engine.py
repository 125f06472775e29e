"""The contract between the training loop and an engine, and `EngineSpec`, which describes one.

    EngineSpec --assemble--> Engine

    one step of the loop     forward_backward(StepBatch) -> StepResult     gradients add up
                             update(Hyper per group)     -> Update         parameters change
    checkpoints              tensors, scalars <-> load
    export                   weights

Everything a step returns stays on the device: the loop decides when to wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from headway.data.batch import Batch, StepBatch
from headway.model.adapter.config import AdapterConfig
from headway.model.config import ModelConfig
from headway.model.layout import ParamSpec
from headway.optim.base import Hyper, OptimConfig
from headway.optim.groups import ParamGroup
from headway.optim.scaler import ScalerConfig
from headway.parallel.box import StateTensor
from headway.parallel.collectives import RankGroups
from headway.parallel.config import MemoryConfig, ParallelConfig
from headway.tasks.base import MetricSums, StepInfo, TaskConfig

if TYPE_CHECKING:
    from headway.kernels.fp8 import Scaling
    from headway.kernels.policy_scores import DrawnFrom
    from headway.model.base import Model

ReadTensor = Callable[[str, str, tuple[int, ...], tuple[int, ...]], Tensor]
"""(name, role, offset, shape) -> tensor: how a checkpoint's content reaches an engine.

The layout of the run that saved it does not matter: the reader puts each box together."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class EngineSpec:
    """Everything that decides an engine: what trains, precision, memory, and who does what."""

    model: ModelConfig
    objective: TaskConfig
    optim: OptimConfig
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    """What the model computes in; master weights are fp32."""
    chunk_tokens: int = 2048
    """Tokens whose logits exist at one time."""
    seq_len: int | None = None
    """Tokens of a row, by which the cost of layers is judged; None = as many as the model takes."""
    seed: int = 0
    freeze: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    adapter: AdapterConfig | None = None
    fp8: Scaling | None = None
    loss_scale: ScalerConfig = ScalerConfig()
    attention: str = "auto"
    compile_blocks: bool = False
    exact: bool = False
    """Compute every token in the bits that the inference engine gives it (model/exact.py)."""
    memory: MemoryConfig = MemoryConfig()
    parallel: ParallelConfig = ParallelConfig()
    ranks: RankGroups = field(default_factory=RankGroups)
    prepare: Callable[[Batch], Batch] | None = None
    """Adds the columns an objective needs to a microbatch on the device, such as a reference
    model's log-probabilities."""

    @property
    def grad_dtype(self) -> torch.dtype:
        """The precision in which the flat engine adds up the gradients of microbatches."""
        if self.parallel.accumulate_dtype == "fp32":
            return torch.float32
        return self.dtype

    @property
    def state_on_host(self) -> bool:
        """Whether optimizer state stays in host memory between updates.

        So do the flat engine's master weights.
        """
        return "optimizer" in self.memory.offload


@dataclass(frozen=True)
class DeviceTimestamp:
    """A moment on the device's clock, recorded without waiting for the device."""

    event: torch.cuda.Event | None
    host: float

    @classmethod
    def now(cls, device: torch.device) -> DeviceTimestamp:
        """Record the moment at which the device reaches this point of its queue."""
        # Without CUDA events the host's clock has to do.
        if device.type != "cuda":
            return cls(None, time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return cls(event, time.perf_counter())

    def since(self, earlier: DeviceTimestamp) -> float:
        """Seconds since an earlier timestamp; the device must have passed both."""
        if self.event is None or earlier.event is None:
            return self.host - earlier.host
        milliseconds = earlier.event.elapsed_time(self.event)
        return milliseconds / 1000


@dataclass(frozen=True)
class StepResult:
    """Loss and metrics of one forward and backward over all microbatches, on the device."""

    loss: Tensor
    metrics: MetricSums
    verdict: Tensor | None = None
    """The verdict of the loss monitor (headway.train.health), as a number."""
    compute_window: tuple[DeviceTimestamp, DeviceTimestamp] | None = None
    """Begin and end of a period in which this rank waited for no other rank.

    Its length shows which rank is slow; the time of a whole step is the same on all of them."""


@dataclass(frozen=True)
class Update:
    """The outcome of one optimizer step, on the device."""

    norm: Tensor
    skipped: Tensor
    """1 if nothing was changed, because gradients were not finite or `skip` was 1; else 0."""
    loss_scale: Tensor
    """What the loss of this step was multiplied by; 1 unless the precision is fp16."""


class Engine(Protocol):
    """Holds the model, the gradients and the optimizer state of this rank."""

    model: Model
    """The part of it that this rank has."""
    groups: list[ParamGroup]
    specs: dict[str, ParamSpec]
    """Every parameter of the whole model and of the objective, in the order of the model."""
    shapes: dict[str, tuple[int, ...]]
    """The whole shape of each of them."""

    def holds(self, name: str) -> bool:
        """Whether this rank has any part of a parameter.

        Ranks of a pipeline hold those of their stages.
        """
        ...

    def forward_backward(self, batch: StepBatch, step_info: StepInfo) -> StepResult:
        """Accumulate the gradients of one step: every microbatch adds its share of one loss."""
        ...

    @property
    def is_validated_as_a_whole(self) -> bool:
        """Whether a validation of the objective compares all of its rows with each other.

        Its first rows then have no numbers of their own.
        """
        ...

    def evaluate(self, batches: Iterable[Batch], step_info: StepInfo) -> MetricSums:
        """Metric sums without gradients, in evaluation mode."""
        ...

    def token_log_probs(
        self, batches: Iterable[Batch], step_info: StepInfo, drawn: DrawnFrom
    ) -> list[Tensor]:
        """The log-probability of every target of this rank's microbatches, [rows, seq_len] each,
        without gradients."""
        ...

    def update(self, hypers: dict[str, Hyper], skip: Tensor | None = None) -> Update:
        """Clip, step, and clear the gradients.

        Nothing changes where the norm is not finite or `skip` (on the device) is 1.
        """
        ...

    def fill(self, values: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Set parameters by name; returns the names that were not given."""
        ...

    def tensors(self) -> Iterator[StateTensor]:
        """Everything to save. Of ranks that hold the same elements, one yields their values."""
        ...

    def scalars(self) -> dict[str, Any]:
        """Everything to save that is not a tensor."""
        ...

    def load(self, read: ReadTensor, scalars: dict[str, Any]) -> None:
        """Restore what `tensors` and `scalars` returned, perhaps on another layout."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The model's whole parameters at full precision, by name; all ranks call it together."""
        ...

    def objective_values(self) -> dict[str, Tensor]:
        """The objective's own parameters, by the names that checkpoints use."""
        ...

    def flush(self) -> None:
        """Wait until all parameters are current; other ranks' shards may still be arriving."""
        ...
