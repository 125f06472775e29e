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
PAGE_TOKENS = 64
"""Positions of a page of the cache (`EngineOptions.page_tokens`)."""
PREFILL_TOKENS = 8192
"""Prompt tokens between two steps of decoding (`EngineOptions.prefill_tokens`)."""
PAGES_OVER_NEED = 2
MIN_SNAPSHOTS = 4
SLOTS_PER_SNAPSHOT = 2
"""As in infer/engine/memory.py, which needs torch; a test compares the bytes."""
ROUTE_BYTES = 2
"""Of the number of an expert."""
DRAWING_BYTES = 24
"""For each answer and id of the vocabulary while a token is drawn (infer/engine/sampler.py): scores,
probabilities and their running sum, all in double."""
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
    is_base: bool = False
    """It is the frozen base under the adapter that trains: it takes time and no memory."""

    def parameters(self, tensor: int = 1) -> ParamCount:
        """Its parameters on one tensor rank; nothing of it trains and no pipeline divides it."""
        counts = count_parameters(self.model, self.specs, (), tensor)
        return counts.on_stages([range(self.model.num_layers)], first=True, last=True)

    def weight_bytes(self, compute_bytes: int, tensor: int = 1) -> int:
        """Its weights on one rank, in the compute dtype or quantised."""
        if self.is_base:
            return 0
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
class PromptLengths:
    """How long the prompts of a run are, in tokens."""

    mean: float
    longest: int
    num_read: int = 0
    """Prompts that were read; 0: the lengths are assumed."""


@dataclass(frozen=True)
class RolloutShape:
    """How many answers the updates of a run train on, and how long they are expected to be, before
    any is sampled.

    A document is a prompt with its answer. Every update packs its documents into rows, as
    `rollout/rows.py` does; here all documents have the expected length.
    """

    prompts: int
    """Prompts of one rollout, over all ranks."""
    samples: int
    """Answers of a prompt."""
    max_new_tokens: int
    prompt: PromptLengths
    answer_tokens: float
    """Expected mean length of an answer."""
    documents_per_row: int
    """Most documents of a row; its padding counts as one."""
    updates: int = 1
    """Updates of a pass over the answers of a rollout."""
    passes: int = 1
    ahead: bool = False
    """The next rollout is answered and judged while the updates on this one are computed."""
    refill: int = 0
    """Further batches of prompts that may be sampled in the place of prompts without signal."""
    scores_first: bool = False
    """The trainer scores the answers of a rollout before its first update."""
    reference_once: bool = False
    """The frozen model scores the answers once, with that pass, and not in every update."""

    @property
    def num_updates(self) -> int:
        """Updates on the answers of one rollout."""
        return self.updates * self.passes

    @property
    def answers(self) -> int:
        """Answers of a rollout over all ranks."""
        return self.prompts * self.samples

    @property
    def step_answers(self) -> int:
        """Answers that one update trains on, over all ranks."""
        return self.prompts // self.updates * self.samples

    @property
    def document_tokens(self) -> float:
        """Expected length of a prompt with its answer."""
        return self.prompt.mean + self.answer_tokens

    @property
    def longest_answer(self) -> float:
        """Tokens of the longest answer of a rollout, where lengths are spread evenly around their
        mean: twice the mean, at most max_new_tokens."""
        return min(2 * self.answer_tokens, float(self.max_new_tokens))

    def rank_prompts(self, ranks: int) -> int:
        """Prompts that the rank with the most of them answers. All ranks share them, whatever their
        layout: each has a whole copy of the weights."""
        return -(-self.prompts // ranks)

    def microbatches(self, seq_len: int, rows: int, data_ranks: int) -> int:
        """Microbatches of an update on a rank.

        A row of T tokens takes floor(T / L) documents of L tokens, at most `documents_per_row` - 1.
        Rows are filled up to whole microbatches, the same number on every data-parallel rank.
        """
        fitting = int(seq_len // self.document_tokens)
        per_row = max(1, min(self.documents_per_row - 1, fitting))
        num_rows = -(-self.step_answers // per_row)
        return -(-num_rows // (rows * data_ranks))


@dataclass(frozen=True)
class SamplerCopy:
    """What a run that samples its own answers keeps on every rank besides what trains.

    That is the whole model once more, without its adapter, and the keys and values of the answers
    that are sampled at the same time: pages of PAGE_TOKENS positions for heads that see everything,
    and for each answer the rings and states of the others (infer/engine/memory.py)."""

    model: ModelConfig
    at_once: int
    """Answers that the cache has room for. A run reserves it for all of them, also where a rank has
    fewer answers."""
    tokens: int
    """Of the longest prompt with its answer, at most."""
    cache_bytes_given: int | None = None
    """What the recipe allows for keys and values; None: as much as the answers need."""
    keeps_routes: bool = False
    """Each position also has the experts of its token."""

    def weight_bytes(self, compute_bytes: int) -> int:
        """The weights, in the compute dtype and on every rank whole."""
        return compute_bytes * self.parameters

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        specs = {spec.name: spec for spec in param_specs(self.model)}
        counts = count_parameters(self.model, specs, (), 1)
        return counts.on_stages([range(self.model.num_layers)], first=True, last=True).frozen

    def cache_bytes(self, compute_bytes: int) -> int:
        """What the engine allocates: pages of all answers at their longest, rings and states of
        all answers and of the snapshots. With a budget, that at most, and at most twice the
        pages that all answers need."""
        page_bytes = self.page_bytes(compute_bytes)
        state_bytes = self.state_bytes(compute_bytes)
        snapshots = 0
        if state_bytes:
            snapshots = max(MIN_SNAPSHOTS, self.at_once // SLOTS_PER_SNAPSHOT)
        fixed_bytes = self.idle_bytes(compute_bytes) + (self.at_once + snapshots) * state_bytes
        wanted_pages = self.at_once * self.pages
        if self.cache_bytes_given is None:
            return fixed_bytes + wanted_pages * page_bytes

        wanted_bytes = fixed_bytes + wanted_pages * page_bytes
        if page_bytes == 0 or self.cache_bytes_given < wanted_bytes:
            return min(self.cache_bytes_given, wanted_bytes)
        affordable_pages = (self.cache_bytes_given - fixed_bytes) // page_bytes
        return fixed_bytes + min(affordable_pages, PAGES_OVER_NEED * wanted_pages) * page_bytes

    @property
    def pages(self) -> int:
        """Pages of the longest prompt with its answer."""
        return -(-self.tokens // PAGE_TOKENS)

    def _is_ring(self, layer: int) -> bool:
        """Whether a layer keeps no more than a window, which is shorter than what it could see."""
        window = self.model.window_of(layer)
        return window is not None and window < self.tokens

    def _entry_bytes(self, compute_bytes: int) -> int:
        """Keys and values of one position in one layer."""
        # With latent attention the stored vector is key and value in one.
        vectors = 2 if self.model.latent_attention is None else 1
        return vectors * self.model.cached_heads * self.model.cached_size * compute_bytes

    def page_bytes(self, compute_bytes: int) -> int:
        """One page in all layers."""
        layers = [
            layer
            for layer in range(self.model.num_layers)
            if not self.model.has_state(layer) and not self._is_ring(layer)
        ]
        routes = 0
        if self.keeps_routes and self.model.experts is not None:
            mixtures = sum(map(self.model.is_mixture, range(self.model.num_layers)))
            routes = ROUTE_BYTES * mixtures * self.model.experts.per_token
        return PAGE_TOKENS * (len(layers) * self._entry_bytes(compute_bytes) + routes)

    def state_bytes(self, compute_bytes: int) -> int:
        """What an answer has beside pages: rings of layers with a window, which may take back one
        page, and states of a fixed size."""
        entries = 0
        for layer in range(self.model.num_layers):
            window = self.model.window_of(layer)
            if not self.model.has_state(layer) and self._is_ring(layer) and window is not None:
                entries += window + PAGE_TOKENS
        return entries * self._entry_bytes(compute_bytes) + self.idle_bytes(compute_bytes)

    def idle_bytes(self, compute_bytes: int) -> int:
        """The states of one sequence in all layers, in fp32, with the last inputs of their
        convolutions. Rows of a batch that take no part have them once."""
        if not self.model.has_states:
            return 0
        shape = self.model.state_shape
        layers = sum(map(self.model.has_state, range(self.model.num_layers)))
        return layers * (shape.input_size * compute_bytes + 4 * shape.memory_size)

    def shared_tokens(self, prompt_tokens: float) -> int:
        """Tokens of a prompt that its further answers find in the cache: whole pages before the
        last token, which is always computed."""
        return max(0, int(prompt_tokens) - 1) // PAGE_TOKENS * PAGE_TOKENS

    def running(self, shape: RolloutShape, ranks: int, compute_bytes: int) -> int:
        """Answers that a rank samples at the same time: at_once, no more than its share of the
        prompts has, and no more than a given budget of the cache holds at their longest. Answers
        to one prompt share its whole pages."""
        wanted = min(self.at_once, shape.rank_prompts(ranks) * shape.samples)
        if self.cache_bytes_given is None:
            return wanted
        shared_pages = self.shared_tokens(shape.prompt.mean) // PAGE_TOKENS
        own_pages = self.pages - shared_pages * (1 - 1 / shape.samples)
        answer_bytes = own_pages * self.page_bytes(compute_bytes) + self.state_bytes(compute_bytes)
        budget = self.cache_bytes_given - self.idle_bytes(compute_bytes)
        return max(1, min(wanted, int(budget / answer_bytes)))

    def work_bytes(self, compute_bytes: int) -> int:
        """What sampling needs at its peak and gives back: log-probabilities of the vocabulary for
        all answers while tokens are drawn, or a piece of prompts in a block."""
        drawing = DRAWING_BYTES * self.at_once * self.model.vocab
        width = self.model.hidden_size
        # Gate, up and their product, and the stream with its norm, q, k and v.
        prefill = PREFILL_TOKENS * compute_bytes * (3 * self.model.ffn_size + 5 * width)
        return max(drawing, prefill)

    @property
    def logit_bytes(self) -> int:
        """The buffer of logits, fp32, that recorded steps write into. It stays."""
        return 4 * self.at_once * self.model.vocab


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
    rollout: RolloutShape | None = None
    """The answers that such a run samples and trains on."""

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
        """Tokens of a step over all ranks; of sampled answers without the padding of rows."""
        if self.rollout is not None:
            return round(self.rollout.step_answers * self.rollout.document_tokens)
        return self.rows * self.seq_len * self.accumulate * self.layout.data

    @property
    def attended(self) -> int:
        """Tokens within which a token attends: its row, or its prompt and answer."""
        if self.rollout is not None:
            return min(self.seq_len, round(self.rollout.document_tokens))
        return self.seq_len

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
        answer_logits = 0
        sampling_work = 0
        if self.sampler is not None:
            sampler_weights = self.sampler.weight_bytes(self.compute_bytes)
            answer_cache = self.sampler.cache_bytes(self.compute_bytes)
            answer_logits = self.sampler.logit_bytes
            sampling_work = self.sampler.work_bytes(self.compute_bytes)

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
            answer_logits=answer_logits,
            sampling_work=sampling_work,
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
