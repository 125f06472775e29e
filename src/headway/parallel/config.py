"""The `parallel` and `memory` sections of a recipe.

How ranks share the work, and what trades memory for time.

Imports without torch.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import field_validator

from headway.config.kinds import KindIn
from headway.config.section import Section, setting
from headway.errors import ParallelError
from headway.model.adapter.config import AdapterConfig
from headway.model.config import ModelConfig
from headway.parallel.hooks.base import HookConfig
from headway.parallel.layout_rules import LayoutCase, check_layout
from headway.parallel.mesh import Mesh, plan_mesh
from headway.parallel.pipeline.program import PipelineShape
from headway.parallel.pipeline_order import ScheduleName
from headway.tasks.base import TaskConfig

Offload = Literal["activations", "optimizer"]


class Zero1Config(Section):
    """Settings of strategy zero1."""

    size: int | Literal["auto"] = setting(
        "auto",
        "Ranks over which the optimizer state is sharded: auto = all (ZeRO-1), 1 = plain data "
        "parallelism, in between = ZeRO-1.5.",
    )

    @field_validator("size")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        return _at_least_one(value)


class FsdpConfig(Section):
    """Fully sharded data parallelism."""

    size: int | Literal["auto"] = setting(
        "auto",
        "Ranks over which everything is sharded: auto = all, fewer = replicated groups (HSDP).",
    )
    reshard_after_forward: bool = setting(
        True, "Free a block's parameters after its forward and gather them again for backward."
    )

    @field_validator("size")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        return _at_least_one(value)


def _at_least_one(value: int | str) -> int | str:
    if isinstance(value, int) and value < 1:
        raise ValueError(f"is {value}; it must be at least 1, or auto")
    return value


class OverlapConfig(Section):
    """What runs at the same time; results do not depend on it."""

    reduce: bool = setting(True, "Exchange gradients bucket by bucket during backward.")
    gather: bool = setting(
        True, "Gather updated parameters during the next forward, one bucket ahead."
    )
    step: bool = setting(
        True,
        "Compute the norm of a bucket while later ones are exchanged; gather it while later ones "
        "are updated. Clipping stays exact.",
    )


class ParallelConfig(Section):
    """How ranks share the work."""

    strategy: Literal["zero1", "fsdp"] = setting(
        "zero1",
        "zero1: the optimizer state is sharded. fsdp: parameters, gradients and optimizer state "
        "are sharded.",
    )
    zero1: Zero1Config = setting(Zero1Config, "Settings of strategy zero1.")
    fsdp: FsdpConfig = setting(FsdpConfig, "Settings of strategy fsdp.")
    bucket_bytes: int = setting(
        32 << 20, "Bytes of gradients that are exchanged at a time (strategy zero1).", gt=0
    )
    accumulate_dtype: Literal["fp32", "compute"] = setting(
        "fp32",
        "Precision in which gradients of microbatches are summed; compute = that of the model, "
        "half the memory in 16 bits.",
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = setting(
        "fp32", "Precision in which gradients are exchanged between ranks."
    )
    overlap: OverlapConfig = setting(OverlapConfig, "What runs at the same time (strategy zero1).")
    hook: Annotated[HookConfig, KindIn("headway.parallel.hooks")] | None = setting(
        None,
        "How gradients are exchanged; null = a plain sum: reduce_scatter if the optimizer state "
        "is sharded, else all_reduce.",
    )
    context: int = setting(
        1,
        "Ranks that share the tokens of each row; attention covers the whole row. They exchange "
        "heads (Ulysses) as far as the KV heads go, beyond that keys in a ring. Must divide "
        "data.seq_len.",
        ge=1,
    )
    tensor: int = setting(
        1,
        "Ranks that share the matrices of every layer, the embedding and the head (tensor "
        "parallelism). It must divide heads and widths.",
        ge=1,
    )
    sequence: bool = setting(
        True,
        "With tensor above 1: norms and residual stream hold the tokens of a rank only; false = "
        "all tokens on every rank.",
    )
    expert: int = setting(
        1,
        "Data-parallel ranks among which the experts of every mixture are split (expert "
        "parallelism): tokens travel to their experts and back. It must divide model.experts.num "
        "and the number of data-parallel ranks.",
        ge=1,
    )
    pipeline: int = setting(
        1, "Ranks that share the layers: each holds some of them (pipeline parallelism).", ge=1
    )
    schedule: ScheduleName = setting(
        "1f1b",
        "Order of the microbatches in a pipeline: 1f1b, interleaved (several stages per rank: "
        "less idle time, more messages), or zero_bubble (gradients of weights are computed while "
        "a rank would wait).",
    )
    virtual_stages: int | None = setting(
        None, "Stages of one rank with schedule interleaved; null = 2.", ge=2
    )
    pipeline_split: tuple[int, ...] = setting(
        (),
        "Layers of every pipeline stage, in the order of the model; empty = balanced by cost, "
        "embedding and head included.",
    )
    timeout_seconds: float = setting(
        1800.0, "Seconds that ranks wait for each other before they give up.", gt=0
    )

    @property
    def ranks_per_row(self) -> int:
        """Ranks that work on the same rows."""
        return self.context * self.tensor * self.pipeline

    @property
    def pipeline_shape(self) -> PipelineShape:
        """Schedule and stages of the pipeline."""
        stages = 1
        if self.schedule == "interleaved":
            stages = self.virtual_stages or 2
        return PipelineShape(self.schedule, self.pipeline, stages)

    def mesh(self, rank: int, world: int) -> Mesh:
        """The layout of the ranks."""
        size = self.zero1.size
        if self.strategy == "fsdp":
            size = self.fsdp.size
        return plan_mesh(
            rank,
            world,
            size,
            f"parallel.{self.strategy}.size",
            context=self.context,
            tensor=self.tensor,
            pipeline=self.pipeline,
            expert=self.expert,
        )

    def check_rows(
        self,
        model: ModelConfig,
        seq_len: int,
        objective: TaskConfig,
        adapter: AdapterConfig | None,
    ) -> None:
        """Refuse a layout on which this model, row length or objective would not train exactly.

        The rules are in layout_rules.py.
        """
        check_layout(LayoutCase(self, model, seq_len, objective, adapter))

    def check(self, mesh: Mesh, precision: str) -> None:
        """Refuse settings that contradict each other."""
        # What fsdp decides itself is refused rather than ignored.
        if self.strategy == "fsdp":
            if self.hook is not None:
                raise ParallelError(
                    "parallel.hook is set and parallel.strategy is fsdp, which exchanges "
                    "gradients itself. Use zero1, or no hook."
                )
            if not (self.overlap.reduce and self.overlap.gather and self.overlap.step):
                raise ParallelError(
                    "parallel.overlap is switched off and parallel.strategy is fsdp, which always "
                    "overlaps. Use zero1, or leave it on."
                )
            if self.accumulate_dtype != "fp32":
                raise ParallelError(
                    "parallel.accumulate_dtype is compute and parallel.strategy is fsdp, which "
                    "adds up in fp32. Use zero1, or fp32."
                )
        if self.hook is not None:
            if self.accumulate_dtype != "fp32" and self.hook.NEEDS_FP32:
                raise ParallelError(
                    "parallel.accumulate_dtype is compute and parallel.hook.kind is "
                    f"{self.hook.kind}, which needs fp32. Use fp32."
                )
            if self.reduce_dtype != "fp32":
                raise ParallelError(
                    f"parallel.reduce_dtype is {self.reduce_dtype} and parallel.hook.kind is "
                    f"{self.hook.kind}; a hook decides the precision itself. Keep one of them."
                )
            self.hook.check(mesh, precision)


class MemoryConfig(Section):
    """What trades memory for time."""

    loss_chunk_tokens: int | Literal["auto"] = setting(
        "auto", "Tokens whose logits are computed at a time; auto = 4096 on CUDA, else 2048."
    )
    recompute: float | str = setting(
        "none",
        "Activations that backward recomputes instead of storing: none or false, true (all "
        "blocks), a fraction of the blocks (0 to 1, the first ones), every-k (every k-th block), "
        "or selective (in all blocks, all but the results of matrix products and attention).",
    )
    offload: tuple[Offload, ...] = setting(
        (),
        "What is kept in host memory: activations (large ones, between forward and backward), "
        "optimizer (its state and fp32 masters).",
    )

    limit_gib: float | None = setting(
        None,
        "Memory limit of a rank in GiB; null = all of the device, on the CPU most of what is "
        "free. batch.micro_rows=auto fits into it.",
        gt=0,
    )

    def check(self, parallel: ParallelConfig) -> None:
        """Refuse what cannot be recomputed on this layout."""
        if parallel.expert > 1 and self.recompute == "selective":
            raise ValueError(
                f"memory.recompute is selective and parallel.expert is {parallel.expert}: tokens "
                "on their way to other ranks cannot be recomputed in part. Use a fraction of the "
                "blocks, such as 1"
            )

    def chunk_tokens(self, *, on_cuda: bool) -> int:
        """Tokens whose logits exist at one time, on a device."""
        if self.loss_chunk_tokens != "auto":
            return self.loss_chunk_tokens
        if on_cuda:
            return 4096
        return 2048

    @field_validator("loss_chunk_tokens")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"is {value}; it must be at least 1")
        return value

    @field_validator("recompute", mode="before")
    @classmethod
    def _switch(cls, value: object) -> object:
        """true means all blocks, false none."""
        if not isinstance(value, bool):
            return value
        if value:
            return 1.0
        return "none"

    @field_validator("recompute")
    @classmethod
    def _known(cls, value: float | str) -> float | str:
        if isinstance(value, str):
            fits = value in ("none", "selective") or re.fullmatch(r"every-[1-9]\d*", value)
        else:
            fits = 0 <= value <= 1
        if not fits:
            raise ValueError(
                f"is {value!r}; it must be none, selective, every-k (such as every-2) or a "
                "fraction from 0 to 1"
            )
        return value

    @field_validator("offload")
    @classmethod
    def _once(cls, value: tuple[Offload, ...]) -> tuple[Offload, ...]:
        return tuple(dict.fromkeys(value))

    def recomputed_blocks(self, num_layers: int) -> list[int]:
        """The blocks of which only the input is kept."""
        if isinstance(self.recompute, str):
            if not self.recompute.startswith("every-"):
                return []
            step = int(self.recompute.removeprefix("every-"))
            # The last block of every k.
            return list(range(step - 1, num_layers, step))
        # The first ones: their activations are kept longest, until the end of backward.
        return list(range(int(num_layers * self.recompute)))
