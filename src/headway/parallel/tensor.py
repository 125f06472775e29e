"""Tensor parallelism: splits every matrix of a model over the ranks of the tensor axis.

A model of whole layers on the meta device comes in; the same model with this rank's part of every
matrix goes out, with the exchanges in its layers, and a box for every parameter.

    column   q, k, v, gate, up     rows of the matrix: this rank's heads, its part of the MLP
    row      o, down               columns: the same heads and part; ranks add up their results
    vocab    embedding, head       rows: some of the tokens, as even as possible
    whole    norms, biases of row-split products, head gates,
             A of column-split and B of row-split adapters

Of stacked experts these are dim 1 and 2; the expert axis splits dim 0, so experts stay whole.

What is whole on several ranks is trained by each of them, with the same updates. Where a rank's
gradient covers its heads, its tokens or its inputs only (`ParamSpec.covers`), the ranks add theirs
up before the update (`is_partial`). The bias of a row-split product is added by the first rank.
Fewer KV heads than ranks: each head is on tensor / num_kv_heads neighbouring ranks, which add up
its gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.errors import ParallelError
from headway.kernels.vocab_loss import VocabShard
from headway.model.base import LayerSplit, Model, build_model, keep_float32, model_specs
from headway.model.config import ModelConfig
from headway.model.layout import GATES, ParamSpec
from headway.parallel.base import LocalModel
from headway.parallel.box import ParamBox
from headway.parallel.collectives import RankGroup, RankGroups, split_group
from headway.parallel.engine import EngineSpec

if TYPE_CHECKING:
    from headway.kernels.fp8 import Fp8Linear
    from headway.parallel.tensor_exchange import TensorExchange


def split_model(model: Model, spec: EngineSpec) -> LocalModel:
    """Give a model this rank's part of every parameter and the exchanges between parts.

    Nothing changes on axes of 1.
    """
    specs = model_specs(model)
    group = spec.ranks.tensor
    experts = spec.ranks.expert

    if experts.size > 1:
        from headway.parallel.expert_exchange import ExpertExchange

        model.share_experts(partial(ExpertExchange, group=experts))
    if group.size == 1:
        boxes = {
            name: expert_part(ParamBox.whole(param_spec), experts)
            for name, param_spec in specs.items()
        }
        if experts.size > 1:
            _shrink(model, boxes)
        return LocalModel(boxes)

    from headway.parallel.tensor_exchange import TensorExchange

    copies = kv_copies(model.config, group.size)
    plan = TensorPlan(group, spec.parallel.sequence, copies)
    for param_spec in list(specs.values()):
        bias = param_spec.name.removesuffix("weight") + "bias"
        if param_spec.split == "row" and bias in specs:
            # Only the first rank adds it (`_replace_modules`); its gradient is zero on the others.
            specs[bias] = replace(specs[bias], covers="part")
    boxes = {name: expert_part(plan.box(param_spec), experts) for name, param_spec in specs.items()}

    exchange = TensorExchange(group, sequence=spec.parallel.sequence)
    _shrink(model, boxes)
    _replace_modules(model, specs, boxes, exchange)

    # The head computes logits of its rows of the vocabulary; the loss needs the parts of all ranks.
    vocab = model.config.vocab
    parts = even_parts(vocab, group.size)
    shard = VocabShard(
        parts[group.rank].start,
        vocab,
        exchange.stack,
        exchange.gather_input,
        tuple(map(len, parts)),
    )
    split = LayerSplit(
        exchange.gather_input,
        exchange.reduce_output,
        exchange.drop,
        heads=local_heads(model.config, group),
        own_tokens=exchange.own_tokens,
        is_first=group.rank == 0,
        vocab=shard,
        mean=exchange.mean,
    )
    model.split_layers(split)
    return LocalModel(boxes, _sum_groups(spec.ranks, copies))


def expert_part(box: ParamBox, group: RankGroup) -> ParamBox:
    """The box of this rank's experts, if the parameter stacks experts; else the box itself."""
    if group.size == 1 or "expert" not in box.spec.groups:
        return box
    local_experts = box.shape[0] // group.size
    return replace(
        box,
        offset=(group.rank * local_experts, *box.offset[1:]),
        shape=(local_experts, *box.shape[1:]),
        expert_ranks=group.size,
    )


@torch.no_grad()
def build_frozen_part(spec: EngineSpec, weights: Iterable[tuple[str, Tensor]]) -> Model:
    """This rank's part of a model with given weights, in evaluation mode and without gradients.

    All its heads are full, and all experts are here.
    """
    # Without an expert axis no token leaves its rank, and without gates every head is full.
    spec = replace(
        spec,
        model=spec.model.with_(head_gates=None),
        ranks=replace(spec.ranks, expert=RankGroup()),
    )
    with torch.device("meta"):
        model = build_model(spec.model)
    boxes = split_model(model, spec).boxes
    model = model.to(spec.dtype).to_empty(device=spec.device).eval().requires_grad_(False)
    keep_float32(model)
    parameters = dict(model.named_parameters())
    for name, value in weights:
        if name != GATES:
            parameters[name].copy_(boxes[name].of(value))
    return model


def _sum_groups(ranks: RankGroups, copies: int) -> dict[int, RankGroup]:
    """Ranks that add up partial gradients, by how many of them hold the same elements.

    Whole parameters are on all ranks of the tensor axis, shared KV heads on `copies` of them.
    """
    groups = {ranks.tensor.size: ranks.tensor}
    if copies not in (1, ranks.tensor.size):
        groups[copies] = split_group(ranks, "tensor", copies)
    return groups


def kv_copies(config: ModelConfig, tensor: int) -> int:
    """Ranks that hold the same KV head."""
    return max(1, tensor // config.kv_heads)


def local_heads(config: ModelConfig, group: RankGroup) -> slice:
    """The KV heads of this rank.

    With fewer heads than ranks, it is one that the rank shares with its neighbours.
    """
    copies = kv_copies(config, group.size)
    heads_per_rank = config.kv_heads * copies // group.size
    first = group.rank // copies * heads_per_rank
    return slice(first, first + heads_per_rank)


def even_parts(size: int, parts: int) -> list[range]:
    """0 .. size - 1 in consecutive parts that differ by one at most."""
    length, remainder = divmod(size, parts)
    # The first `remainder` parts have one more.
    starts = [index * length + min(index, remainder) for index in range(parts + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


class TensorPlan:
    """Which part of each parameter this rank of the tensor axis holds."""

    def __init__(self, group: RankGroup, sequence: bool, copies: int) -> None:
        self.group = group
        self.sequence = sequence
        self.copies = copies

    def box(self, spec: ParamSpec) -> ParamBox:
        """The box of one parameter."""
        dim = spec.split_dim
        if dim is None:
            # With parallel.sequence, norms see some of the tokens: so does their gradient.
            is_partial = spec.covers == "part" or (spec.covers == "tokens" and self.sequence)
            return ParamBox.whole(spec, self.group.size, self.group.rank, is_partial=is_partial)
        copies = 1
        if spec.of_kv_heads:
            copies = self.copies
        parts = even_parts(spec.shape[dim], self.group.size // copies)
        part = parts[self.group.rank // copies]

        offset = [0] * len(spec.shape)
        offset[dim] = part.start
        shape = list(spec.shape)
        shape[dim] = len(part)
        return ParamBox(
            tuple(offset),
            tuple(shape),
            spec,
            copies=copies,
            copy=self.group.rank % copies,
            # Ranks with the same KV head have different query heads, so different gradients of it.
            is_partial=copies > 1,
            sizes=tuple(len(part) for part in parts),
        )


def _shrink(model: Model, boxes: dict[str, ParamBox]) -> None:
    """Replace parameters, which have no memory yet, by ones of the shape of their box."""
    for path, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            assert parameter.is_meta
            name = f"{path}.{leaf}".removeprefix(".")  # the model itself has an empty path
            local = torch.empty(boxes[name].shape, dtype=parameter.dtype, device="meta")
            module._parameters[leaf] = nn.Parameter(local, parameter.requires_grad)
        # Kept true for code that reads sizes from the module instead of the weight.
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape


def _replace_modules(
    model: Model, specs: dict[str, ParamSpec], boxes: dict[str, ParamBox], exchange: TensorExchange
) -> None:
    """Put the embedding's exchange in place, and let row-split products add their bias once."""
    from headway.kernels.fp8 import Fp8Linear
    from headway.model.adapter.lora import AdaptedLinear
    from headway.model.moe import ExpertLinear

    for path, module in list(model.named_modules()):
        spec = specs.get(f"{path}.weight")
        if spec is None:
            continue
        if isinstance(module, nn.Embedding) and spec.split == "vocab":
            _put(model, path, VocabEmbedding(module, boxes[spec.name].offset[0], exchange))
        # Results of row-split products are added up over ranks, so one rank alone adds the bias.
        elif isinstance(module, ExpertLinear) and spec.split == "row":
            module.adds_bias = exchange.rank == 0
        elif isinstance(module, Fp8Linear):
            _split_fp8(path, module, spec, exchange)
        elif isinstance(module, nn.Linear) and spec.split == "row":
            if isinstance(module, AdaptedLinear):
                module.adds_bias = exchange.rank == 0
                module.drop = exchange.drop_inputs
                module.over_inputs = exchange.sum
            elif module.bias is not None:
                _put(model, path, RowLinear(module, adds_bias=exchange.rank == 0))


def _split_fp8(path: str, module: Fp8Linear, spec: ParamSpec, exchange: TensorExchange) -> None:
    """Let an fp8 layer scale by the largest value over all ranks, as a whole matrix would."""
    from headway.kernels.fp8 import MULTIPLE, LinearSplit

    if any(size % MULTIPLE for size in module.weight.shape):
        raise ParallelError(
            f"precision is 'fp8' and parallel.tensor is {exchange.size}; a rank's part of a matrix "
            f"needs sizes that are multiples of {MULTIPLE}, and that of {path} is "
            f"{list(module.weight.shape)}. Use a smaller tensor degree, or bf16."
        )
    assert spec.split in ("column", "row"), "only the layers of blocks are in fp8"
    module.split = LinearSplit(spec.split, exchange.highest)
    module.adds_bias = spec.split == "column" or exchange.rank == 0


def _put(model: Model, path: str, module: nn.Module) -> None:
    """Put a module in the place of the one at `path`."""
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


class VocabEmbedding(nn.Embedding):
    """An embedding of which this rank has some rows: [B,T] tokens -> the stream.

    A token of other ranks is zero here. Ranks add up their results as after a row-split product.
    """

    def __init__(self, whole: nn.Embedding, first: int, exchange: TensorExchange) -> None:
        rows, width = whole.weight.shape
        super().__init__(rows, width, _weight=whole.weight)
        # The same dict, so that the parameter itself is taken over, not a copy.
        self._parameters = whole._parameters
        self.first = first
        self.exchange = exchange

    def forward(self, input: Tensor) -> Tensor:
        local = input - self.first
        outside = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(outside, 0), self.weight)
        return self.exchange.reduce_output(rows.masked_fill(outside[..., None], 0.0))


class RowLinear(nn.Linear):
    """A linear with some of the inputs, whose results ranks add up: one of them adds the bias."""

    def __init__(self, whole: nn.Linear, *, adds_bias: bool) -> None:
        super().__init__(whole.in_features, whole.out_features, device="meta")
        # The parameters of the layer it replaces, in the place of its own.
        self._parameters = whole._parameters
        self.adds_bias = adds_bias

    def forward(self, input: Tensor) -> Tensor:
        bias = None
        if self.adds_bias:
            bias = self.bias
        return F.linear(input, self.weight, bias)
