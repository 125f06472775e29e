"""Tensor parallelism: a model of whole layers on the meta device comes in; the same model with this rank's part of every matrix goes out,
with the exchanges in its layers, and a box for every parameter.

    column   q, k, v, gate, up        rows of the matrix: this rank's heads, its part of the feed-forward
    row      o, down                  columns: the same heads and part; the ranks' results are added up
    vocab    embedding, head          rows: some of the tokens, as even as possible
    (of stacked experts, dim 1 and 2; the expert axis splits dim 0: whole experts)
    whole    norms, biases of row-split products, head gates, A of column-split and B of row-split adapters

What is whole on several ranks is trained by each of them, with the same updates. Where a rank's gradient covers its heads, its tokens or
its inputs only (`ParamSpec.covers`), the ranks add theirs up before the update (`is_partial`). The bias of a row-split product is added
by the first rank.
Fewer KV heads than ranks: each head is on tensor / num_kv_heads neighbouring ranks, which add up its gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.errors import ParallelError
from headway.kernels.fp8 import MULTIPLE, Fp8Linear, LinearSplit
from headway.kernels.vocab_loss import VocabShard
from headway.model.adapter.lora import AdaptedLinear
from headway.model.base import LayerSplit, Model, build_model, keep_wide, model_specs
from headway.model.config import ModelConfig
from headway.model.layout import GATES, ParamSpec
from headway.model.moe import ExpertLinear
from headway.parallel.base import LocalModel
from headway.parallel.box import ParamBox
from headway.parallel.collectives import RankGroup, RankGroups, split_group
from headway.parallel.engine import EngineSpec
from headway.parallel.expert_exchange import ExpertExchange
from headway.parallel.tensor_exchange import TensorExchange


def split_model(model: Model, spec: EngineSpec) -> LocalModel:
    """Give a model this rank's part of every parameter and the exchanges between parts. Nothing changes on axes of 1."""
    specs = model_specs(model)
    group, experts = spec.ranks.tensor, spec.ranks.expert
    if experts.size > 1:
        model.share_experts(partial(ExpertExchange, group=experts))
    if group.size == 1:
        boxes = {name: expert_part(ParamBox.whole(one), experts) for name, one in specs.items()}
        if experts.size > 1:
            _shrink(model, boxes)
        return LocalModel(boxes)
    copies = kv_copies(model.config, group.size)
    cut = Cut(group, spec.parallel.sequence, copies)
    for one in list(specs.values()):
        bias = one.name.removesuffix("weight") + "bias"
        if one.split == "row" and bias in specs:
            # Only the first rank adds it (`_replace_modules`); its gradient is zero on the others.
            specs[bias] = replace(specs[bias], covers="part")
    boxes = {name: expert_part(cut.box(one), experts) for name, one in specs.items()}
    exchange = TensorExchange(group, sequence=spec.parallel.sequence)
    _shrink(model, boxes)
    _replace_modules(model, specs, boxes, exchange)
    vocab = model.config.vocab
    parts = even_parts(vocab, group.size)
    shard = VocabShard(
        parts[group.rank].start, vocab, exchange.stack, exchange.enter, tuple(map(len, parts))
    )
    heads = local_heads(model.config, group)
    first = group.rank == 0
    split = LayerSplit(
        exchange.enter,
        exchange.leave,
        exchange.drop,
        heads,
        exchange.own_tokens,
        first,
        shard,
        exchange.mean,
    )
    model.split_layers(split)
    return LocalModel(boxes, _sum_groups(spec.ranks, copies))


def expert_part(box: ParamBox, group: RankGroup) -> ParamBox:
    """Of a box of stacked experts, those of this rank of the expert axis; of any other parameter, the box itself."""
    if group.size == 1 or "expert" not in box.spec.groups:
        return box
    each = box.shape[0] // group.size
    return replace(
        box,
        offset=(group.rank * each, *box.offset[1:]),
        shape=(each, *box.shape[1:]),
        expert_ranks=group.size,
    )


@torch.no_grad()
def build_frozen_part(spec: EngineSpec, weights: Iterable[tuple[str, Tensor]]) -> Model:
    """This rank's part of a model with given weights, in evaluation mode and without gradients; all its heads are full, and all experts
    are here."""
    spec = replace(
        spec, model=spec.model.with_(head_gates=None), ranks=replace(spec.ranks, expert=RankGroup())
    )
    with torch.device("meta"):
        model = build_model(spec.model)
    boxes = split_model(model, spec).boxes
    model = model.to(spec.dtype).to_empty(device=spec.device).eval().requires_grad_(False)
    keep_wide(model)
    parameters = dict(model.named_parameters())
    for name, value in weights:
        if name != GATES:
            parameters[name].copy_(boxes[name].of(value))
    return model


def _sum_groups(ranks: RankGroups, copies: int) -> dict[int, RankGroup]:
    """Who adds up partial gradients, by the number of ranks with the same elements."""
    groups = {ranks.tensor.size: ranks.tensor}
    if copies not in (1, ranks.tensor.size):
        groups[copies] = split_group(ranks, "tensor", copies)
    return groups


def kv_copies(config: ModelConfig, tensor: int) -> int:
    """Ranks that hold the same KV head."""
    return max(1, tensor // config.kv_heads)


def local_heads(config: ModelConfig, group: RankGroup) -> slice:
    """The KV heads of this rank; with fewer heads than ranks, one that it shares with its neighbours."""
    copies = kv_copies(config, group.size)
    each = config.kv_heads * copies // group.size
    return slice(group.rank // copies * each, (group.rank // copies + 1) * each)


def even_parts(size: int, parts: int) -> list[range]:
    """0 .. size - 1 in consecutive parts that differ by one at most."""
    each, more = divmod(size, parts)
    starts = [index * each + min(index, more) for index in range(parts + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


class Cut:
    """Which part of each parameter this rank of the tensor axis holds."""

    def __init__(self, group: RankGroup, sequence: bool, copies: int) -> None:
        self.group, self.sequence, self.copies = group, sequence, copies

    def box(self, spec: ParamSpec) -> ParamBox:
        """The box of one parameter."""
        dim = spec.split_dim
        if dim is None:
            is_partial = spec.covers == "part" or (spec.covers == "tokens" and self.sequence)
            return ParamBox.whole(spec, self.group.size, self.group.rank, is_partial=is_partial)
        copies = self.copies if spec.of_kv_heads else 1
        parts = even_parts(spec.shape[dim], self.group.size // copies)
        part = parts[self.group.rank // copies]
        offset = tuple(part.start if index == dim else 0 for index in range(len(spec.shape)))
        local = tuple(len(part) if index == dim else size for index, size in enumerate(spec.shape))
        sizes = tuple(len(one) for one in parts)
        return ParamBox(offset, local, spec, copies, self.group.rank % copies, copies > 1, sizes)


def _shrink(model: Model, boxes: dict[str, ParamBox]) -> None:
    """Replace parameters, which have no memory yet, by ones of the shape of their box."""
    for path, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            local = boxes[f"{path}.{leaf}" if path else leaf].shape
            assert parameter.is_meta
            module._parameters[leaf] = nn.Parameter(
                torch.empty(local, dtype=parameter.dtype, device="meta"), parameter.requires_grad
            )
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape


def _replace_modules(
    model: Model, specs: dict[str, ParamSpec], boxes: dict[str, ParamBox], exchange: TensorExchange
) -> None:
    """Put the embedding's exchange in place, and let row-split products add their bias once."""
    for path, module in list(model.named_modules()):
        spec = specs.get(f"{path}.weight")
        if spec is None:
            continue
        if isinstance(module, nn.Embedding) and spec.split == "vocab":
            _put(model, path, VocabEmbedding(module, boxes[spec.name].offset[0], exchange))
        elif isinstance(module, ExpertLinear) and spec.split == "row":
            module.adds_bias = exchange.rank == 0
        elif isinstance(module, Fp8Linear):
            _split_fp8(path, module, spec, exchange)
        elif isinstance(module, nn.Linear) and spec.split == "row":
            if isinstance(module, AdaptedLinear):
                module.adds_bias = exchange.rank == 0
                module.drop, module.over_inputs = exchange.drop_inputs, exchange.sum
            elif module.bias is not None:
                _put(model, path, RowLinear(module, adds_bias=exchange.rank == 0))


def _split_fp8(path: str, module: Fp8Linear, spec: ParamSpec, exchange: TensorExchange) -> None:
    if any(size % MULTIPLE for size in module.weight.shape):
        raise ParallelError(
            f"precision is 'fp8' and parallel.tensor is {exchange.size}; a rank's part of a matrix needs sizes that are multiples of "
            f"{MULTIPLE}, and that of {path} is {list(module.weight.shape)}. Use a smaller tensor degree, or bf16."
        )
    assert spec.split in ("column", "row"), "only the layers of blocks are in fp8"
    module.split = LinearSplit(spec.split, exchange.highest)
    module.adds_bias = spec.split == "column" or exchange.rank == 0


def _put(model: Model, path: str, module: nn.Module) -> None:
    above, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(above), leaf, module)


class VocabEmbedding(nn.Embedding):
    """An embedding of which this rank has some rows; ranks add up what they find, and the stream leaves as it leaves a layer."""

    def __init__(self, whole: nn.Embedding, first: int, exchange: TensorExchange) -> None:
        rows, width = whole.weight.shape
        super().__init__(rows, width, _weight=whole.weight)
        self._parameters = whole._parameters
        self.first, self.exchange = first, exchange

    def forward(self, input: Tensor) -> Tensor:
        local = input - self.first
        outside = (local < 0) | (local >= self.weight.shape[0])
        found = F.embedding(local.masked_fill(outside, 0), self.weight)
        return self.exchange.leave(found.masked_fill(outside[..., None], 0.0))


class RowLinear(nn.Linear):
    """A linear with some of the inputs, whose results are added up: one rank adds the bias."""

    def __init__(self, whole: nn.Linear, *, adds_bias: bool) -> None:
        super().__init__(whole.in_features, whole.out_features, device="meta")
        self._parameters = whole._parameters
        self.adds_bias = adds_bias

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias if self.adds_bias else None)
