"""What a plan is made of: the settings of a run as plain values, and which part of the model each
pipeline rank has. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeVar

from headway.model.config import ModelConfig
from headway.model.flops import token_flops
from headway.model.layout import EMBEDDING, HEAD, SCORE, Specs, param_specs
from headway.parallel.config import MemoryConfig
from headway.parallel.layouts import Layout, LayoutShape, check_sizes
from headway.parallel.pipeline_order import PipelineAction, pipeline_actions, stages_on
from headway.parallel.stage_split import layer_costs, split_layers
from headway.plan.hardware import GIB, GPUS, GpuModel
from headway.plan.memory import MemoryJob
from headway.plan.parameters import ModelCounts, ParamCount, count_parameters
from headway.plan.rates import Software

_T = TypeVar("_T")
IN_TRANSIT = 3
"""Hidden states and gradients that have arrived early or are being sent, besides those of
microbatches in flight."""
MAX_MICROBATCHES = 4096
"""Microbatches of a step whose order is looked at; more than that repeat what was before."""
STEADY_ROUNDS = 4
"""Microbatches per pipeline rank after which a schedule holds no more activations at once than
before."""


@dataclass(frozen=True)
class ReferenceModel:
    """The frozen second model of a run: the reference of a preference task, or a teacher. What it
    adds to a rank's memory and arithmetic.

    It is whole on every data-parallel rank, divided by the tensor axis alone, and reads every
    microbatch forward.
    """

    role: str
    """reference or teacher."""
    model: ModelConfig
    specs: Specs
    """Its parameters; what is stored quantised as bytes."""

    def parameters(self, tensor: int = 1) -> ParamCount:
        """Its parameters on one tensor rank; nothing of it trains and no pipeline divides it."""
        counts = count_parameters(self.model, self.specs, (), tensor)
        return counts.on_stages([range(self.model.num_layers)], first=True, last=True)

    def weight_bytes(self, compute_bytes: int, tensor: int = 1) -> int:
        """Its weights on one rank, in the compute dtype or quantised."""
        count = self.parameters(tensor)
        # No master copy, gradient or state: it never changes.
        return compute_bytes * (count.frozen - count.packed) + count.packed_bytes

    def token_bytes(self, compute_bytes: int) -> int:
        """What stays of its forward pass for each token of a microbatch: a teacher's hidden
        states."""
        # A reference leaves one number per document, which is nothing; a teacher's logits are made
        # from its hidden states chunk by chunk, in the loss.
        if self.role == "teacher":
            return compute_bytes * self.model.hidden_size
        return 0

    def flops(self, seq_len: int) -> float:
        """FLOPs of one token: forward alone, attention causal."""
        return token_flops(self.model, seq_len, specs=self.specs, training=()).causal


@dataclass(frozen=True)
class SamplerCopy:
    """What a run that samples its own answers keeps on every rank besides what trains.

    That is the whole model once more, without its adapter, and the keys and values of the answers
    that are sampled at the same time."""

    model: ModelConfig
    at_once: int
    tokens: int
    """Of the longest prompt with its answer, at most."""
    cache_bytes_given: int | None = None
    """What the recipe allows for keys and values; None: as much as the answers need."""

    def weight_bytes(self, compute_bytes: int) -> int:
        """The weights, in the compute dtype and on every rank whole."""
        specs = {spec.name: spec for spec in param_specs(self.model)}
        counts = count_parameters(self.model, specs, (), 1)
        whole = counts.on_stages([range(self.model.num_layers)], first=True, last=True)
        return compute_bytes * whole.frozen

    def cache_bytes(self, compute_bytes: int) -> int:
        """Keys and values of all answers at their longest; layers with a window keep no more."""
        if self.cache_bytes_given is not None:
            return self.cache_bytes_given
        positions = 0
        for layer in range(self.model.num_layers):
            if self.model.has_state(layer):
                continue
            window = self.model.window_of(layer)
            positions += self.tokens if window is None else min(self.tokens, window)
        # With latent attention the stored vector is key and value in one.
        vectors = 2 if self.model.latent_attention is None else 1
        width = self.model.cached_heads * self.model.cached_size
        states = 0
        if self.model.has_states:
            # A state of fixed size, in fp32, and the last inputs of the convolution.
            shape = self.model.state_shape
            layers = sum(map(self.model.has_state, range(self.model.num_layers)))
            states = layers * (shape.input_size * compute_bytes + 4 * shape.memory_size)
        return self.at_once * (positions * vectors * width * compute_bytes + states)


@dataclass(frozen=True)
class PlanJob:
    """One run on one layout."""

    model: ModelConfig
    seq_len: int
    rows: int
    """Rows of a microbatch."""
    accumulate: int
    """Microbatches of a step on a rank."""
    layout: Layout = field(default_factory=Layout)
    gpu: GpuModel = GPUS["h200"]
    precision: str = "bf16"
    """bf16, fp16, fp8 or fp32."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    software: Software = field(default_factory=Software)
    specs: Specs | None = None
    """Every parameter, adapters too; None = the model's own."""
    training: Collection[str] | None = None
    """Names of the parameters that train; None = all."""
    state_dtype: str = "fp32"
    other_state_bytes: float | None = None
    grad_bytes: int = 4
    bucket_bytes: int = 32 << 20
    pipeline_split: tuple[int, ...] = ()
    """Layers of every pipeline stage; empty = balanced by cost."""
    reshard: bool = True
    """fsdp: a block's parameters are gathered again for backward."""
    reference: ReferenceModel | None = None
    """A frozen second model in memory."""
    sampler: SamplerCopy | None = None
    """The copy that samples answers, in a run that learns from rewards."""

    allows: Callable[[Layout], bool] | None = field(default=None, compare=False, repr=False)
    """Whether the recipe may run on another layout, besides the rules of sizes; None = on any."""
    cache: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What the same run on other layouts has in common (`varied`)."""

    def cached(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """A value that is computed once for all variations of a job."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element of the compute dtype; fp8 products keep everything else in bf16."""
        return 4 if self.precision == "fp32" else 2

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch that are one rank's; tensor ranks have the same ones."""
        return self.rows * self.seq_len // self.layout.context

    @property
    def step_tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.rows * self.seq_len * self.accumulate * self.layout.data

    @property
    def all_specs(self) -> Specs:
        """Every parameter by name, adapters included."""
        if self.specs is not None:
            return self.specs
        return self.cached("specs", lambda: {spec.name: spec for spec in param_specs(self.model)})

    @property
    def trains(self) -> Collection[str]:
        """The names that train."""
        if self.training is None:
            return self.cached("trains", lambda: set(self.all_specs))
        return self.training

    @property
    def has_adapter(self) -> bool:
        """Whether there are low-rank updates."""
        return self.cached(
            "adapter", lambda: any("adapter" in spec.groups for spec in self.all_specs.values())
        )

    @property
    def trained_layers(self) -> frozenset[int]:
        """Layers in which a matrix trains."""
        trained = (self.all_specs[name] for name in self.trains)
        return self.cached(
            "layers",
            lambda: frozenset(
                spec.stage
                for spec in trained
                if isinstance(spec.stage, int) and "adapter" not in spec.groups
            ),
        )

    @property
    def recomputed(self) -> frozenset[int]:
        """Layers of which only the input is kept."""
        memory = self.memory
        return self.cached(
            ("recomputed", memory.recompute),
            lambda: frozenset(memory.recomputed_blocks(self.model.num_layers)),
        )

    @property
    def counts(self) -> ModelCounts:
        """Parameters of one tensor and expert rank."""
        tensor = self.layout.tensor
        expert = self.layout.expert
        key = ("counts", tensor, expert)
        return self.cached(
            key, lambda: count_parameters(self.model, self.all_specs, self.trains, tensor, expert)
        )

    @property
    def stages(self) -> list[range]:
        """The layers of each pipeline stage."""

        def split() -> list[range]:
            # The recipe's split is for its own number of stages; other layouts are balanced.
            if len(self.pipeline_split) == self.layout.stages:
                ends = list(accumulate(self.pipeline_split))
                return [
                    range(end - size, end)
                    for end, size in zip(ends, self.pipeline_split, strict=True)
                ]
            costs, first, last = layer_costs(self.model, self.seq_len)
            return split_layers(costs, self.layout.stages, first=first, last=last)

        return self.cached(("stages", self.layout.stages), split)

    def stages_of(self, rank: int) -> list[int]:
        """The pipeline stages of a rank of the pipeline."""
        return stages_on(rank, self.layout.pipeline, self.layout.virtual_stages)

    @property
    def actions(self) -> list[list[PipelineAction]]:
        """What each pipeline rank does in a step."""
        layout = self.layout
        order = (layout.schedule, layout.pipeline, self.accumulate, layout.virtual_stages)
        return self.cached(("actions", *order), lambda: pipeline_actions(*order))

    @property
    def held(self) -> list[dict[int, int]]:
        """Microbatches in flight, by stage, for every pipeline rank. More rounds than a few do not
        change the most that are held."""
        from headway.plan.timeline import in_flight

        size = self.layout.pipeline
        virtual = self.layout.virtual_stages
        steady = STEADY_ROUNDS * size
        # Interleaved schedules need whole rounds of microbatches: an odd count has an order of its
        # own.
        repeats = self.accumulate > steady and (virtual == 1 or self.accumulate % size == 0)
        if repeats:
            microbatches = steady
        else:
            microbatches = min(self.accumulate, MAX_MICROBATCHES)

        def count() -> list[dict[int, int]]:
            shorter = self.varied(self.layout, self.rows, microbatches)
            return [in_flight(actions) for actions in shorter.actions]

        key = ("held", self.layout.schedule, size, virtual, microbatches)
        return self.cached(key, count)

    def parameters_of(self, rank: int) -> ParamCount:
        """Parameters of one rank of the pipeline (and of its tensor group)."""
        layout = self.layout
        key = (
            "parameters",
            layout.tensor,
            layout.expert,
            layout.pipeline,
            layout.virtual_stages,
            rank,
        )
        stages = self.stages_of(rank)
        layers = [self.stages[stage] for stage in stages]
        is_last = layout.stages - 1 in stages
        return self.cached(
            key, lambda: self.counts.on_stages(layers, first=0 in stages, last=is_last)
        )

    def held_blocks(self, rank: int) -> float:
        """Blocks times microbatches whose activations a rank holds at once."""
        if self.layout.pipeline == 1:
            return float(self.model.num_layers)
        in_flight_by_stage = self.held[rank]
        return float(
            sum(len(self.stages[stage]) * count for stage, count in in_flight_by_stage.items())
        )

    def memory_job(self, rank: int = 0) -> MemoryJob:
        """What decides the memory of one rank of the pipeline."""
        layout = self.layout
        count = self.parameters_of(rank)

        held_blocks = None
        streams = 0
        if layout.pipeline > 1:
            held_blocks = self.held_blocks(rank)
            streams = sum(self.held[rank].values()) + IN_TRANSIT

        reference_bytes = 0
        reference_token_bytes = 0
        if self.reference is not None:
            reference_bytes = self.reference.weight_bytes(self.compute_bytes, layout.tensor)
            reference_token_bytes = self.reference.token_bytes(self.compute_bytes)

        sampler_weights = 0
        answer_cache = 0
        if self.sampler is not None:
            sampler_weights = self.sampler.weight_bytes(self.compute_bytes)
            answer_cache = self.sampler.cache_bytes(self.compute_bytes)

        return MemoryJob(
            model=self.model,
            trained=count.trained,
            frozen=count.frozen,
            packed=count.packed,
            packed_bytes=count.packed_bytes,
            rows=self.rows,
            seq_len=self.seq_len,
            accumulate=self.accumulate,
            compute_bytes=self.compute_bytes,
            grad_bytes=self.grad_bytes,
            state_dtype=self.state_dtype,
            other_state_bytes=self.other_state_bytes,
            shards=layout.shards,
            fsdp=layout.strategy == "fsdp" and layout.shards > 1,
            context=layout.context,
            expert=layout.expert,
            expert_shards=layout.expert_shards,
            experts=count.experts,
            frozen_experts=count.frozen_experts,
            memory=self.memory,
            compiled=self.software.fusion != "eager",
            on_cuda=True,
            chunk_tokens=self.memory.chunk_tokens(on_cuda=True),
            fp8=self.precision == "fp8",
            adapter=self.has_adapter,
            tensor=layout.tensor,
            sequence=layout.sequence and layout.tensor > 1,
            held_blocks=held_blocks,
            streams=streams,
            has_head=layout.stages - 1 in self.stages_of(rank),
            bucket_bytes=self.bucket_bytes,
            reference_bytes=reference_bytes,
            reference_token_bytes=reference_token_bytes,
            sampler_weights=sampler_weights,
            answer_cache=answer_cache,
        )

    @property
    def usable_bytes(self) -> int:
        """Bytes that one rank may use: memory.limit_gib, else most of the GPU."""
        limit = self.memory.limit_gib
        if limit is None:
            return self.gpu.usable_bytes
        return min(int(limit * GIB), self.gpu.memory_bytes)

    @property
    def layout_shape(self) -> LayoutShape:
        """The sizes that the rules of layouts look at."""
        return LayoutShape(self.model, self.seq_len)

    def check(self) -> None:
        """Refuse a layout that breaks a rule."""
        check_sizes(self.layout, self.layout_shape)

    def varied(
        self, layout: Layout, rows: int, accumulate: int, memory: MemoryConfig | None = None
    ) -> PlanJob:
        """The same run on another layout, with other microbatches."""
        other = replace(
            self, layout=layout, rows=rows, accumulate=accumulate, memory=memory or self.memory
        )
        # Shared on purpose: keys hold everything of the layout that a value depends on.
        object.__setattr__(other, "cache", self.cache)
        return other


def head_trains(job: PlanJob) -> bool:
    """Whether the head's matrix gets a gradient."""
    if job.model.score_head:
        name = SCORE
    elif job.model.tie_embeddings:
        name = EMBEDDING
    else:
        name = HEAD
    return name in job.trains
