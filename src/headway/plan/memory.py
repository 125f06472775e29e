"""How many bytes a rank needs for a step, by kind, before anything is allocated. Numbers come in,
numbers go out; nothing imports torch.

    all the time      weights (what the model computes with), masters (fp32, where they are not the
                      weights themselves), optimizer state, a reference model or teacher in memory
    with rollouts     the sampler's copy of the weights, its cache of answers and its logits
    during a step     gradients, activations (what autograd saves between forward and backward),
                      logits (one chunk, the head's gradients)

The peak is the largest of these moments. Kinds are those of that moment:

    head     all activations, one chunk of logits, the head's gradient
    block    backward of the last block: all activations, what this block computes again, its
             working memory
    end      backward of the first block: all gradients, one block's activations and working memory
    sampling answers are drawn, between two updates: no gradients and no activations

Gradients kept across microbatches count at every moment; on CUDA a step of one microbatch allocates
them during backward. Widths: D stream, A query heads, K key heads, F feed-forward. What a block
stores per token, in elements of the compute dtype (seen in what torch saves; tests hold these to
it):

    compiled             4 D + 2 A + 2 K + 3 F           x, norm, q, k, v, o, stream, norm, gate,
                                                         up, product
    compiled, selective  2 D + 2 A + 2 K + 2 F           x, q, k, v, o, projection, gate, up
    compiled, fp8        3 D + 1.5 A + 2 K + 2 F         norms in 8 bits, product computed again
    eager                6 D (10 D) + 2 A + 2 K + 4 F    x and norms three times (five in 16 bits),
                                                         silu
    eager, selective     3 D + 3 A + 3 K + 2 F           matrix products kept apart
    recomputed           D                               x

A layer of linear attention keeps no A and K. Its core keeps, in fp32, for M channels of its
convolution with t taps and H heads of widths k and v, in chunks of C tokens:

    (t + 3) M + 5 H k + 6 H v + 6 H C + H k v / C        one M more in 16 bits

A state space keeps, in fp32, for H heads of P channels whose states have N numbers for each:

    (t + 3) M + 7 H P + H (3 C + 5) + H N P / C          and H P of the compute dtype

A short convolution keeps (t + 1) M in fp32, one M more in 16 bits, and 4 M of the compute dtype.

Tensor ranks divide A, K, F and the vocabulary; with sequence parallelism also the stream. A matrix
product reads whole tokens, so the norm's result is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from headway.model.config import LinearAttentionConfig, ModelConfig, StateSpaceConfig
from headway.parallel.config import MemoryConfig

GIB = 1 << 30
STATE_BYTES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2.125}
"""Bytes of AdamW's moments per parameter."""
ON_DEVICE_BLOCKS = 3
"""With offloaded activations: blocks whose activations are on the device at once, one in use and
two being copied."""
PAGE_LOCKED_ROUND = 1.44
"""What rounding up to a power of two adds on the average, over many tensors of any size: 1 / ln
2."""
ROUND = 1.01
"""What allocators round up, on the average."""
WORKSPACE = 96 << 20
"""Work space of the matrix libraries on CUDA."""
LOSS_BYTES = 16
"""What the loss keeps for each token beside logits and hidden states."""
MIN_WHOLE_GIB = 0.05
"""Sizes below this many GiB are printed in MiB."""
CHUNK = 64
"""Tokens of a chunk of linear attention or a state space, as in kernels/delta_rule.py and
state_space.py, which need torch."""
WORTHWHILE = 0.01
"""A setting that frees less than this share of a rank's bytes is not suggested."""
ROUTER_SCORE_COPIES = 3
"""fp32 tensors over all experts that routing keeps for each token."""
POLICY_LOGIT_BYTES = 12
"""For each token of a chunk and id, at the peak of the loss of sampled answers
(kernels/policy_scores.py): fp32 logits of a chunk and of the one before, the latter's gradient, and
the result of the product in 16 bits."""
ROUTED_SLOT_BYTES = 24
"""Bytes that routing keeps for each token and expert chosen for it: weights and the order by
experts."""


@dataclass(frozen=True)
class MemoryJob:
    """What decides the memory of one rank."""

    model: ModelConfig
    trained: int
    """Parameters that train."""
    frozen: int
    rows: int
    """Rows of a microbatch."""
    seq_len: int
    accumulate: int
    compute_bytes: int
    """Bytes of an element of the compute dtype."""
    grad_bytes: int = 4
    state_dtype: str = "fp32"
    other_state_bytes: float | None = None
    """Bytes of state per parameter, for an optimizer other than AdamW."""
    shards: int = 1
    """Ranks that share masters and optimizer state, or everything (fsdp)."""
    fsdp: bool = False
    context: int = 1
    """Ranks that share the tokens of a row."""
    expert: int = 1
    """Ranks that share the experts of a layer (expert parallelism)."""
    expert_shards: int = 1
    """Ranks that share masters and optimizer state of the same experts."""
    experts: int = 0
    """Of `trained`: the parameters of this rank's experts."""
    frozen_experts: int = 0
    """Of `frozen`: the parameters of this rank's experts."""
    memory: MemoryConfig = MemoryConfig()
    compiled: bool = False
    on_cuda: bool = False
    chunk_tokens: int = 2048
    fp8: bool = False
    adapter: bool = False
    """Low-rank updates around the linears."""
    tensor: int = 1
    """Ranks that share every layer. `trained` and `frozen` are those of one rank."""
    sequence: bool = True
    """Tensor ranks also share the tokens of norms and stream."""
    held_blocks: float | None = None
    """Blocks times microbatches whose activations a pipeline rank holds at once; None = every block
    of the model, once."""
    streams: int = 0
    """Hidden states that a pipeline rank keeps to send or has received, one of each for a
    microbatch in flight."""
    packed: int = 0
    """Of `frozen`: the parameters that are stored quantised, in `packed_bytes`."""
    packed_bytes: int = 0
    has_head: bool = True
    """The last pipeline stage is here."""
    bucket_bytes: int = 32 << 20
    reference_bytes: int = 0
    """Weights of a frozen second model (`ReferenceModel`)."""
    reference_token_bytes: int = 0
    """What a microbatch keeps of the second model's forward pass, for each token."""
    sampler_weights: int = 0
    """The copy of the model that samples answers (`SamplerCopy`)."""
    answer_cache: int = 0
    """Keys and values of the answers that it samples at the same time."""
    answer_logits: int = 0
    """Its buffer of logits, which stays."""
    sampling_work: int = 0
    """What it needs while it samples, and gives back."""

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch that are this rank's."""
        return self.rows * self.seq_len // self.context

    @property
    def trained_shard(self) -> float:
        """Parameters of which this rank has masters and optimizer state (with fsdp also weights and
        gradients)."""
        return (self.trained - self.experts) / self.shards + self.experts / self.expert_shards


@dataclass(frozen=True)
class Estimate:
    """Bytes by kind on one rank at the peak of a step, and what waits in host memory."""

    kinds: dict[str, int]
    host: int = 0

    @property
    def total(self) -> int:
        """All kinds together."""
        return sum(self.kinds.values())

    def describe(self) -> str:
        """`weights 2.3 GiB, masters 4.6 GiB, ...`, without what is nothing."""
        return ", ".join(f"{kind} {amount(size)}" for kind, size in self.kinds.items() if size)


def amount(size: float) -> str:
    """Bytes as readable text."""
    if size >= MIN_WHOLE_GIB * GIB:
        return f"{size / GIB:.1f} GiB"
    return f"{size / (1 << 20):.1f} MiB"


def estimate(job: MemoryJob) -> Estimate:
    """Bytes by kind at the peak of a step."""
    peak = max(moments(job).values(), key=lambda kinds: sum(kinds.values()))
    return _at(job, peak)


def phase_estimates(job: MemoryJob) -> dict[str, Estimate]:
    """Bytes by kind at the peak of each phase of a run that samples its own answers: sampling and
    training. The larger one is `estimate`."""
    by_moment = moments(job)
    sampling = by_moment.pop("sampling")
    training = max(by_moment.values(), key=lambda kinds: sum(kinds.values()))
    return {"sampling": _at(job, sampling), "training": _at(job, training)}


def _at(job: MemoryJob, moment: dict[str, int]) -> Estimate:
    """All bytes at one of the `moments`."""
    on_host = "optimizer" in job.memory.offload
    # In fp32 on one rank the optimizer updates the weights themselves.
    weights_are_masters = job.compute_bytes == 4 and job.shards == 1
    masters = 0
    if not weights_are_masters:
        masters = int(4 * job.trained_shard)
    if job.other_state_bytes is None:
        state_bytes = STATE_BYTES[job.state_dtype]
    else:
        state_bytes = job.other_state_bytes
    state = int(state_bytes * job.trained_shard)

    # fsdp keeps its masters on the device also with offload: they are the shards that are gathered.
    masters_on_host = on_host and not job.fsdp
    kinds = {
        "weights": _weights(job),
        "masters": 0 if masters_on_host else masters,
        "optimizer state": 0 if on_host else state,
        **moment,
        "buffers": _buffers(job),
    }
    if job.reference_bytes:
        kinds["reference model"] = job.reference_bytes + job.reference_token_bytes * job.tokens

    # All three stay while the run trains: the engine's recorded steps keep pointers to them.
    if job.sampler_weights:
        kinds["sampler"] = job.sampler_weights
        kinds["cache of answers"] = job.answer_cache
        kinds["logits of answers"] = job.answer_logits

    host = 0
    if on_host:
        host = _on_host(job, masters if masters_on_host else 0, state, state_bytes)
    if "activations" in job.memory.offload:
        host += int(_per_block(job) * _blocks_in_flight(job))
    return Estimate({kind: int(size * ROUND) for kind, size in kinds.items()}, host)


def moments(job: MemoryJob) -> dict[str, dict[str, int]]:
    """What a step adds at each moment that may be its peak, by kind."""
    gradients = _gradients(job)
    # Sums over microbatches exist from the start; else CUDA allocates a gradient when backward
    # reaches it.
    gradients_kept = 0
    if job.fsdp or job.accumulate > 1 or not job.on_cuda:
        gradients_kept = gradients
    head_gradient = _head_gradient(job)

    saved = _saved(job)
    one_block = min(saved, _per_block(job))
    recomputes = bool(job.memory.recomputed_blocks(job.model.num_layers))
    working = _working(job, recomputed=recomputes)

    added = {
        "block": {
            "gradients": max(gradients_kept, head_gradient),
            "activations": int(saved + working),
            "logits and head": 0,
        },
        "end": {
            "gradients": gradients,
            "activations": int(one_block + working),
            "logits and head": 0,
        },
    }
    if job.has_head:
        added["head"] = {
            "gradients": gradients_kept,
            "activations": int(saved + _ends(job)),
            "logits and head": _logits(job) + head_gradient,
        }
    if job.sampler_weights:
        # On CUDA gradients have memory from backward to the update alone.
        gradients_between = gradients
        if job.on_cuda:
            gradients_between = 0
        # All moments have the same kinds.
        added = {name: {**kinds, "drawing of tokens": 0} for name, kinds in added.items()}
        added["sampling"] = {
            "gradients": gradients_between,
            "activations": 0,
            "logits and head": 0,
            "drawing of tokens": job.sampling_work,
        }
    return added


def _on_host(job: MemoryJob, masters: int, state: int, state_bytes: float) -> int:
    """What the optimizer keeps in host memory. Page-locked memory, which a GPU copies from, comes
    in powers of two from torch's allocator.

    Masters and each moment are one large tensor, whose rounding can be computed. fsdp has one
    tensor for each parameter, whose rounding averages out."""
    if not job.on_cuda:
        return masters + state
    if job.fsdp:
        return int(PAGE_LOCKED_ROUND * (masters + state))

    # AdamW has two moments; another optimizer as many fp32 tensors as its bytes make.
    num_moments = 2
    if job.other_state_bytes is not None:
        num_moments = max(1, round(state_bytes / 4))
    return page_locked(masters) + num_moments * page_locked(state // num_moments)


def page_locked(size: int) -> int:
    """The bytes allocated for a page-locked tensor: the next power of two."""
    if size <= 0:
        return 0
    return 1 << (size - 1).bit_length()


def _weights(job: MemoryJob) -> int:
    """What the model computes with."""
    count = job.trained + job.frozen - job.packed
    if not job.fsdp:
        return job.compute_bytes * count + job.packed_bytes

    # fsdp gathers one unit at a time: embedding and head stay whole through a pass, and of the
    # blocks there are two, the one in use and the one being gathered.
    model = job.model
    num_ends = 1 if model.ties_head or model.score_head else 2
    ends = model.vocab * model.hidden_size * num_ends // job.tensor
    block = (count - ends) // max(1, model.num_layers)
    packed_blocks = 2 * job.packed_bytes // max(1, model.num_layers)
    return job.compute_bytes * (ends + 2 * block) + packed_blocks + _frozen_shard(job)


def _frozen_shard(job: MemoryJob) -> int:
    """fsdp's shard of what does not train: in fp32, or quantised as it is stored."""
    dense = 4 * (job.frozen - job.packed - job.frozen_experts) + job.packed_bytes
    return dense // job.shards + 4 * job.frozen_experts // job.expert_shards


def _gradients(job: MemoryJob) -> int:
    """All gradients of a step."""
    if job.fsdp:
        shard = int(4 * job.trained_shard)
        if job.accumulate == 1:
            return shard
        # Sums over microbatches are whole until the last one is reduced to shards.
        return shard + 4 * job.trained
    grad_bytes = 4 if job.compute_bytes == 4 else job.grad_bytes
    return grad_bytes * job.trained


def _stream(job: MemoryJob) -> float:
    """Width of the residual stream, spread over the ranks that share its tokens."""
    if job.sequence:
        return job.model.hidden_size / job.tensor
    return float(job.model.hidden_size)


def _per_token(job: MemoryJob, *, selective: bool) -> float:
    """Elements of the compute dtype that one block keeps for one token (the table at the top of
    this file)."""
    model = job.model
    # Of an average layer: those with a state have neither queries nor keys of this kind.
    softmax_share = 1 - model.state_share
    query = softmax_share * model.num_heads * model.head_size / job.tensor
    key = softmax_share * model.kv_heads * model.head_size / min(job.tensor, model.kv_heads)
    ffn = model.ffn_size / job.tensor
    width = model.hidden_size
    stream = _stream(job)
    in_fp32 = job.compute_bytes == 4

    # `ffn_tensors` counts the tensors of the feed-forward's width in each row.
    if job.compiled and job.fp8:
        ffn_tensors = 2
        kept = 2 * stream + width + 1.5 * query + 2 * key + 2 * ffn
    elif job.compiled and selective:
        ffn_tensors = 2
        kept = 2 * (stream + query + key + ffn)
    elif job.compiled:
        ffn_tensors = 3
        kept = 2 * stream + 2 * width + 2 * query + 2 * key + 3 * ffn
    elif selective:
        ffn_tensors = 2
        kept = 3 * stream + 3 * query + 3 * key + 2 * ffn
    else:
        ffn_tensors = 2 if job.fp8 else 4
        norms = 6 if in_fp32 else 10
        kept = (norms - 2) * stream + 2 * width + 2 * query + 2 * key + 4 * ffn

    if model.experts is not None:
        kept += _mixture_extra(job, ffn_tensors * ffn)
    if model.qk_norm:
        kept += query + key
    if model.has_states:
        kept += model.state_share * state_core(model, job.tensor, job.compute_bytes)
    if model.attention_gate:
        # the gate and its product with what attention gives; the stream is normed once more
        kept += 2 * query + softmax_share * (width + (2 if in_fp32 else 4) * stream)
    if model.latent_attention is not None:
        latent = model.latent_attention
        # Latents before and after their norms; eager norms keep what they multiply too, in fp32.
        copies = 2
        if not job.compiled and not selective:
            copies = 3 if in_fp32 else 5
        kept += copies * ((latent.q_rank or 0) + latent.kv_rank) + latent.rope_head_dim
        if latent.value_head_dim < model.head_size:
            # attention's result, cut to the width of values
            kept += model.num_heads * latent.value_head_dim / job.tensor
    if model.norm_placement == "both":
        # what the further norms read
        kept += 2 * stream
    if job.context > 1:
        # attention's result before its exchange and after it
        kept += query

    # The attention's sums and the norms' scales are fp32; dropout keeps a byte for each element.
    small_bytes = 4 * (model.num_heads / job.tensor + 4)
    if model.dropout:
        small_bytes += 2 * stream
    return kept + small_bytes / job.compute_bytes


def state_core(model: ModelConfig, tensor: int, compute_bytes: int) -> float:
    """Elements of the compute dtype that a layer with a state keeps for one token in the place of
    attention (the formulas at the top of this file)."""
    if model.linear_attention is not None:
        return _linear_core(model.linear_attention, tensor, compute_bytes)
    if model.state_space is not None:
        return _space_core(model.state_space, tensor, compute_bytes)
    assert model.short_convolution is not None
    channels = model.convolved / tensor
    copies = model.short_convolution.taps + 1 + (compute_bytes != 4)
    # Both gates, what they gate, and the result are of the compute dtype.
    return 4 * channels + 4 * copies * channels / compute_bytes


def _linear_core(linear: LinearAttentionConfig, tensor: int, compute_bytes: int) -> float:
    """The same of linear attention."""
    heads = linear.value_heads / tensor
    mixed = linear.mixed_width / tensor
    copies = linear.taps + 3 + (compute_bytes != 4)
    state = linear.key_head_dim * linear.value_head_dim
    by_head = 5 * linear.key_head_dim + 6 * linear.value_head_dim + 6 * CHUNK + state / CHUNK
    in_fp32 = copies * mixed + heads * by_head
    # What it reads and gives is of the compute dtype.
    values = linear.value_width / tensor
    return mixed + 2 * values + 4 * in_fp32 / compute_bytes


def _space_core(space: StateSpaceConfig, tensor: int, compute_bytes: int) -> float:
    """The same of a state space."""
    heads = space.heads / tensor
    # One group alone is whole on every rank.
    groups = space.groups if space.groups == 1 else space.groups / tensor
    values = heads * space.head_dim
    mixed = values + 2 * groups * space.state_size
    state = space.state_size * space.head_dim
    by_head = 7 * space.head_dim + 3 * CHUNK + 5 + state / CHUNK
    in_fp32 = (space.taps + 3) * mixed + heads * by_head
    # Its result is of the compute dtype.
    return values + 4 * in_fp32 / compute_bytes


def _mixture_extra(job: MemoryJob, dense: float) -> float:
    """What an average block keeps for a token beyond the `dense` feed-forward: gate and up of its
    experts, fp32 scores, order of tokens."""
    model = job.model
    assert model.experts is not None
    experts = model.experts
    mixture_share = sum(map(model.is_mixture, range(model.num_layers))) / model.num_layers

    routed = 2 * (experts.per_token * model.expert_size / job.tensor)
    shared = 3 * experts.shared_ffn_size / job.tensor
    routing_bytes = ROUTER_SCORE_COPIES * experts.num * 4 + ROUTED_SLOT_BYTES * experts.per_token
    routing = routing_bytes / job.compute_bytes
    router_input = 0
    if not job.compiled and job.compute_bytes != 4:
        # an fp32 copy, which compiled code does not keep
        router_input = 2 * model.hidden_size
    # With expert parallelism a block keeps the rows that arrived from other ranks, one for each
    # expert of a token, instead of the token's one input. As many arrive as this rank sends, where
    # loads are equal.
    arrived = 0
    if job.expert > 1:
        arrived = (experts.per_token - 1) * model.hidden_size
    return mixture_share * (routed + shared + routing + router_input + arrived - dense)


def _per_block(job: MemoryJob) -> float:
    """Bytes an average block keeps for a microbatch."""
    model = job.model
    recomputed_share = len(job.memory.recomputed_blocks(model.num_layers)) / model.num_layers
    kept = _per_token(job, selective=job.memory.recompute == "selective")
    elements = (1 - recomputed_share) * kept + recomputed_share * _stream(job)
    return job.tokens * job.compute_bytes * elements


def _blocks_in_flight(job: MemoryJob) -> float:
    """Blocks times microbatches whose activations exist at once."""
    if job.held_blocks is None:
        return job.model.num_layers
    return job.held_blocks


def _saved(job: MemoryJob) -> float:
    """Bytes that all blocks keep on the device between forward and backward."""
    blocks = _blocks_in_flight(job)
    if "activations" in job.memory.offload:
        blocks = min(blocks, ON_DEVICE_BLOCKS)
    return _per_block(job) * blocks


def _working(job: MemoryJob, *, recomputed: bool) -> float:
    """Bytes in use while the backward of one block runs: what is computed again, and gradients of
    activations."""
    model = job.model
    ffn = model.ffn_size / job.tensor
    width = model.hidden_size

    # Compiled, the gradient of the product becomes that of the gate in place, next to that of up;
    # eager operations keep each result.
    if job.compiled:
        gradients = ffn + width
    else:
        gradients = 3 * ffn + 2 * width
    if model.experts is not None:
        # Sorted copies of inputs and of gradients, and gradients of gate, up and their product.
        # What is sent to other ranks and what arrives exist at the same time.
        copies = 5 if job.expert > 1 else 3
        gradients += model.experts.per_token * (3 * model.expert_size / job.tensor + copies * width)
    if job.adapter:
        # gate and up of the low-rank branch
        gradients += 2 * ffn

    computed_again = 0.0
    if recomputed:
        computed_again = _per_token(job, selective=False)
    if job.memory.recompute == "selective":
        # norms and product of this block
        computed_again = 2 * width + ffn
    return job.tokens * job.compute_bytes * (gradients + computed_again)


def _ends(job: MemoryJob) -> float:
    """What is kept outside the blocks. The last norm is never compiled: its input, twice in fp32,
    and its result. Angles of positions are fp32 too."""
    tensors = 3 if job.compute_bytes == 4 else 5
    norm_bytes = tensors * _stream(job) * job.compute_bytes
    angle_bytes = 4 * job.model.head_size
    return job.tokens * (norm_bytes + angle_bytes)


def _logits(job: MemoryJob) -> int:
    """One chunk of logits, and the gradient of hidden."""
    model = job.model
    chunk = min(job.chunk_tokens, job.tokens) * model.head_rows // job.tensor
    # The fused kernel overwrites the logits; plain torch works in fp32 copies.
    if job.sampler_weights:
        logits = chunk * POLICY_LOGIT_BYTES
    elif job.on_cuda:
        logits = chunk * job.compute_bytes
    elif job.compute_bytes == 4:
        logits = chunk * 4
    else:
        logits = chunk * (4 + 2 * job.compute_bytes)

    # With sequence parallelism the hidden states are also gathered for the head.
    hidden_copies = 2 if job.tensor > 1 and job.sequence else 1
    hidden_bytes = hidden_copies * model.hidden_size * job.compute_bytes
    return logits + job.tokens * (hidden_bytes + LOSS_BYTES)


def _head_gradient(job: MemoryJob) -> int:
    """The gradient of the head's matrix in fp32, where it trains."""
    size = job.model.head_rows * job.model.hidden_size // job.tensor
    # A job does not say which parameters train. No more than the head has means that it is frozen
    # (an adapter trains).
    if job.has_head and job.trained > size:
        return 4 * size
    return 0


def _buffers(job: MemoryJob) -> int:
    """Work space of libraries; a matrix in floats; buckets of gradients and parameters, and hidden
    states between stages, on their way."""
    # The largest quantised matrix is written out for its product; that of experts is of all of
    # them.
    model = job.model
    matrix = 0
    if job.packed:
        widest = model.ffn_size
        if model.experts is not None:
            widest = max(model.ffn_size, model.experts.num * model.expert_size)
        matrix = job.compute_bytes * model.hidden_size * widest

    messages = int(job.streams * job.tokens * _stream(job) * job.compute_bytes)
    if not job.on_cuda:
        return matrix + messages

    # One bucket is being exchanged while the next one fills.
    buckets = 0
    if job.shards > 1 and not job.fsdp:
        buckets = 2 * job.bucket_bytes
    return matrix + messages + WORKSPACE + buckets


Change = tuple[str, Callable[[MemoryJob], MemoryJob | None]]
"""A setting as the user writes it, and the job with it; None where it changes nothing."""


def _memory(**changes: object) -> Callable[[MemoryJob], MemoryJob | None]:
    def apply(job: MemoryJob) -> MemoryJob | None:
        changed = job.memory.model_copy(update=changes)
        if changed == job.memory:
            return None
        return replace(job, memory=changed)

    return apply


def _offload(kind: str) -> Callable[[MemoryJob], MemoryJob | None]:
    def apply(job: MemoryJob) -> MemoryJob | None:
        if kind in job.memory.offload:
            return None
        return _memory(offload=(*job.memory.offload, kind))(job)

    return apply


def _fewer_rows(job: MemoryJob) -> MemoryJob | None:
    rows = max((n for n in range(1, job.rows) if job.rows % n == 0), default=None)
    if rows is None:
        return None
    return replace(job, rows=rows, accumulate=job.accumulate * job.rows // rows)


def _selective(job: MemoryJob) -> MemoryJob | None:
    if job.memory.recompute != "none":
        return None
    return _memory(recompute="selective")(job)


def _state_8bit(job: MemoryJob) -> MemoryJob | None:
    # only AdamW stores its moments in 8 bits
    if job.other_state_bytes is not None:
        return None
    return replace(job, state_dtype="8bit")


def _gradients_in_compute_dtype(job: MemoryJob) -> MemoryJob | None:
    # fsdp always sums in fp32
    if job.fsdp:
        return None
    return replace(job, grad_bytes=job.compute_bytes)


def suggestions(job: MemoryJob) -> list[tuple[str, int]]:
    """Settings that would need less memory, with the bytes each would free alone, largest first."""
    fewer_rows = _fewer_rows(job)
    fewer_chunk_tokens = max(1, job.chunk_tokens // 4)
    changes: list[Change] = [
        ("memory.recompute=selective", _selective),
        ("memory.recompute=1", _memory(recompute=1.0)),
        ("optim.state_dtype=8bit", _state_8bit),
        ("parallel.accumulate_dtype=compute", _gradients_in_compute_dtype),
        (f"batch.micro_rows={fewer_rows.rows if fewer_rows else 1}", lambda _: fewer_rows),
        (
            f"memory.loss_chunk_tokens={fewer_chunk_tokens}",
            lambda job: replace(job, chunk_tokens=fewer_chunk_tokens),
        ),
    ]
    if job.on_cuda:
        # On the CPU, activations and state already are in host memory.
        changes.append(("memory.offload=[activations]", _offload("activations")))
        changes.append(("memory.offload=[optimizer]", _offload("optimizer")))

    now = estimate(job).total
    freed_by: list[tuple[str, int]] = []
    for setting, change in changes:
        changed = change(job)
        if changed is None:
            continue
        freed = now - estimate(changed).total
        if freed > WORTHWHILE * now:
            freed_by.append((setting, freed))
    return sorted(freed_by, key=lambda suggestion: -suggestion[1])
