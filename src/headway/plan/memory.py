"""How many bytes a rank needs for a step, by kind, before anything is allocated. Numbers come in, numbers go out; nothing imports torch.

    all the time      weights (what the model computes with), masters (fp32, where they are not the weights themselves), optimizer state,
                      a reference model or teacher in memory
    during a step     gradients, activations (what autograd saves between forward and backward), logits (one chunk, the head's gradients)

The peak is the largest of three moments. Kinds are those of that moment:

    head     all activations, one chunk of logits, the head's gradient
    block    backward of the last block: all activations, what this block computes again, its working memory
    end      backward of the first block: all gradients, one block's activations and working memory

Gradients kept across microbatches count at every moment; on CUDA a step of one microbatch allocates them during backward. Widths: D stream,
A query heads, K key heads, F feed-forward. What a block stores per token, in elements of the compute dtype (seen in what torch saves; tests
hold these to it):

    compiled             x, norm, q, k, v, o, stream, norm, gate, up, product     4 D + 2 A + 2 K + 3 F
    compiled, selective  x, q, k, v, o, projection, gate, up                      2 D + 2 A + 2 K + 2 F
    compiled, fp8        norms in 8 bits, product computed again                  3 D + 1.5 A + 2 K + 2 F
    eager                x and norms three times (five in 16 bits), silu          6 D (10 D) + 2 A + 2 K + 4 F
    eager, selective     matrix products kept apart                               3 D + 3 A + 3 K + 2 F
    recomputed           x                                                        D

Tensor ranks divide A, K, F and the vocabulary; with sequence parallelism also the stream. A matrix product reads whole tokens, so the
norm's result is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from headway.model.config import ModelConfig
from headway.parallel.config import MemoryConfig

GIB = 1 << 30
STATE_BYTES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2.125}
"""Bytes of AdamW's moments per parameter."""
OUTSIDE = 3
"""Blocks whose activations are on the device at once when they are offloaded: one in use, two being copied."""
PAGE_LOCKED_ROUND = 1.44
"""What rounding up to a power of two adds on the average, over many tensors of any size: 1 / ln 2."""
ROUND = 1.01
"""What allocators round up, on the average."""
WORKSPACE = 96 << 20
"""Work space of the matrix libraries on CUDA."""


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
    """Ranks that share experts. `experts` of `trained` and `frozen_experts` of `frozen` are of this rank's experts."""
    expert_shards: int = 1
    """Ranks that share masters and optimizer state of the same experts."""
    experts: int = 0
    frozen_experts: int = 0
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
    """Blocks times microbatches whose activations a pipeline rank holds at once; None = every block of the model, once."""
    streams: int = 0
    """Hidden states that a pipeline rank keeps to send or has received, one of each for a microbatch in flight."""
    packed: int = 0
    """Of the frozen parameters: stored quantised."""
    packed_bytes: int = 0
    has_head: bool = True
    """The last pipeline stage is here."""
    bucket_bytes: int = 32 << 20
    reference_bytes: int = 0
    """Weights of a frozen second model (`ReferenceModel`)."""
    reference_token_bytes: int = 0
    """What a microbatch keeps of its forward pass, for each token."""

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch that are this rank's."""
        return self.rows * self.seq_len // self.context

    @property
    def trained_shard(self) -> float:
        """Parameters of which this rank has masters and optimizer state (with fsdp also weights and gradients)."""
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
    return f"{size / GIB:.1f} GiB" if size >= 0.05 * GIB else f"{size / (1 << 20):.1f} MiB"


def estimate(job: MemoryJob) -> Estimate:
    """Bytes by kind at the peak of a step."""
    on_host = "optimizer" in job.memory.offload
    shares = job.compute_bytes == 4 and job.shards == 1
    masters = 0 if shares else int(4 * job.trained_shard)
    per_state = (
        STATE_BYTES[job.state_dtype] if job.other_state_bytes is None else job.other_state_bytes
    )
    state = int(per_state * job.trained_shard)
    kinds = {
        "weights": _weights(job),
        "masters": 0 if on_host and not job.fsdp else masters,
        "optimizer state": 0 if on_host else state,
        **max(moments(job).values(), key=lambda kinds: sum(kinds.values())),
        "buffers": _buffers(job),
    }
    if job.reference_bytes:
        kinds["reference model"] = job.reference_bytes + job.reference_token_bytes * job.tokens
    host = _on_host(job, 0 if job.fsdp else masters, state, per_state) if on_host else 0
    if "activations" in job.memory.offload:
        host += int(
            _per_block(job) * (job.model.num_layers if job.held_blocks is None else job.held_blocks)
        )
    return Estimate({kind: int(size * ROUND) for kind, size in kinds.items()}, host)


def moments(job: MemoryJob) -> dict[str, dict[str, int]]:
    """What a step adds at each moment that may be its peak, by kind."""
    gradients, again = _gradients(job), job.memory.recomputed_blocks(job.model.num_layers)
    kept = gradients if job.fsdp or job.accumulate > 1 or not job.on_cuda else 0
    saved, working = _saved(job), _working(job, recomputed=bool(again))
    one_block = min(saved, _per_block(job))
    head = _head_gradient(job)
    found = {
        "block": {
            "gradients": max(kept, head),
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
        found["head"] = {
            "gradients": kept,
            "activations": int(saved + _ends(job)),
            "logits and head": _logits(job) + head,
        }
    return found


def _on_host(job: MemoryJob, masters: int, state: int, per_state: float) -> int:
    """What the optimizer keeps in host memory. Page-locked memory, which a GPU copies from, comes in powers of two from torch's allocator.

    Masters and each moment are one tensor of the main group; fsdp has one for each parameter, whose rounding evens out.
    """
    if not job.on_cuda:
        return masters + state
    if job.fsdp:
        return int(PAGE_LOCKED_ROUND * (masters + state))
    moments = 2 if job.other_state_bytes is None else max(1, round(per_state / 4))
    return page_locked(masters) + moments * page_locked(state // moments)


def page_locked(size: int) -> int:
    """The bytes allocated for a page-locked tensor: the next power of two."""
    return 0 if size <= 0 else 1 << (size - 1).bit_length()


def _weights(job: MemoryJob) -> int:
    """What the model computes with."""
    count = job.trained + job.frozen - job.packed
    if not job.fsdp:
        return job.compute_bytes * count + job.packed_bytes
    model = job.model
    ends = (
        model.vocab
        * model.hidden_size
        * (1 if model.ties_head or model.score_head else 2)
        // job.tensor
    )
    block = (count - ends) // max(1, model.num_layers)
    gathered = 2 * job.packed_bytes // max(1, model.num_layers)
    return job.compute_bytes * (ends + 2 * block) + gathered + _frozen_shard(job)


def _frozen_shard(job: MemoryJob) -> int:
    plain = 4 * (job.frozen - job.packed - job.frozen_experts) + job.packed_bytes
    return plain // job.shards + 4 * job.frozen_experts // job.expert_shards


def _gradients(job: MemoryJob) -> int:
    if job.fsdp:
        return int(4 * job.trained_shard) + (4 * job.trained if job.accumulate > 1 else 0)
    return (4 if job.compute_bytes == 4 else job.grad_bytes) * job.trained


def _stream(job: MemoryJob) -> float:
    """Width of the residual stream, spread over the ranks that share its tokens."""
    return job.model.hidden_size / job.tensor if job.sequence else float(job.model.hidden_size)


def _per_token(job: MemoryJob, *, selective: bool) -> float:
    """Elements of the compute dtype that one block keeps for one token."""
    model = job.model
    query = model.num_heads * model.head_size / job.tensor
    key = model.kv_heads * model.head_size / min(job.tensor, model.kv_heads)
    ffn = model.ffn_size / job.tensor
    width = model.hidden_size
    part = _stream(job)
    if job.compiled and job.fp8:
        kept = 2 * part + width + 1.5 * query + 2 * key + 2 * ffn
    elif job.compiled:
        kept = (
            2 * (part + query + key + ffn)
            if selective
            else 2 * part + 2 * width + 2 * query + 2 * key + 3 * ffn
        )
    elif selective:
        kept = 3 * part + 3 * query + 3 * key + 2 * ffn
    else:
        norms = 6 if job.compute_bytes == 4 else 10
        kept = (norms - 2) * part + 2 * width + 2 * query + 2 * key + 4 * ffn
    if model.experts is not None:
        kept += _mixture_extra(job, (2 if selective or job.fp8 else 3 if job.compiled else 4) * ffn)
    if model.qk_norm:
        kept += query + key
    if model.latent_attention is not None:
        latent = model.latent_attention
        # latents before and after their norms; eager norms keep what they multiply too, in fp32
        copies = 2
        if not job.compiled and not selective:
            copies = 3 if job.compute_bytes == 4 else 5
        kept += copies * ((latent.q_rank or 0) + latent.kv_rank) + latent.rope_head_dim
        if (
            latent.value_head_dim < model.head_size
        ):  # attention's result, cut to the width of values
            kept += model.num_heads * latent.value_head_dim / job.tensor
    if model.norm_placement == "both":  # what the further norms read
        kept += 2 * part
    if job.context > 1:  # attention's result before its exchange and after it
        kept += query
    # the attention's sums and the norms' scales are fp32; dropout keeps a byte for each element
    small = 4 * (model.num_heads / job.tensor + 4) + (2 * part if model.dropout else 0)
    return kept + small / job.compute_bytes


def _mixture_extra(job: MemoryJob, dense: float) -> float:
    """What an average block keeps for a token beyond the `dense` feed-forward: gate and up of its experts, fp32 scores, order of tokens."""
    model = job.model
    assert model.experts is not None
    share = sum(map(model.is_mixture, range(model.num_layers))) / model.num_layers
    inner = model.experts.per_token * model.expert_size / job.tensor
    shared = 3 * model.experts.shared_ffn_size / job.tensor
    small = (3 * model.experts.num * 4 + 24 * model.experts.per_token) / job.compute_bytes
    wide = (
        0 if job.compiled or job.compute_bytes == 4 else 2 * model.hidden_size
    )  # the router's fp32 input
    # slots that came from other ranks instead of the tokens they were made of; as many as this rank sends where loads are equal
    arrived = (model.experts.per_token - 1) * model.hidden_size if job.expert > 1 else 0
    return share * (2 * inner + shared + small + wide + arrived - dense)


def _per_block(job: MemoryJob) -> float:
    """Bytes an average block keeps for a microbatch."""
    model = job.model
    again = len(job.memory.recomputed_blocks(model.num_layers)) / model.num_layers
    kept = _per_token(job, selective=job.memory.recompute == "selective")
    return job.tokens * job.compute_bytes * ((1 - again) * kept + again * _stream(job))


def _saved(job: MemoryJob) -> float:
    """Bytes that all blocks keep on the device between forward and backward."""
    blocks = job.model.num_layers if job.held_blocks is None else job.held_blocks
    return _per_block(job) * (
        min(blocks, OUTSIDE) if "activations" in job.memory.offload else blocks
    )


def _working(job: MemoryJob, *, recomputed: bool) -> float:
    """Bytes in use while the backward of one block runs: what is computed again, and gradients of activations."""
    model = job.model
    ffn, width = model.ffn_size / job.tensor, model.hidden_size
    # the gradient of the product becomes that of the gate in place, next to that of up; eager operations keep each result
    gradients = (ffn + width) if job.compiled else (3 * ffn + 2 * width)
    if (
        model.experts is not None
    ):  # sorted copies of inputs and of gradients, and gradients of gate, up and their product
        copies = 5 if job.expert > 1 else 3  # what is sent and what arrives exist at the same time
        gradients += model.experts.per_token * (3 * model.expert_size / job.tensor + copies * width)
    if job.adapter:  # gate and up of the low-rank branch
        gradients += 2 * ffn
    again = _per_token(job, selective=False) if recomputed else 0.0
    if job.memory.recompute == "selective":  # norms and product of this block
        again = 2 * width + ffn
    return job.tokens * job.compute_bytes * (gradients + again)


def _ends(job: MemoryJob) -> float:
    """The last norm is never compiled: its input, twice in fp32, and its result; the angles of positions are fp32 too."""
    return job.tokens * (
        (3 if job.compute_bytes == 4 else 5) * _stream(job) * job.compute_bytes
        + 4 * job.model.head_size
    )


def _logits(job: MemoryJob) -> int:
    """One chunk of logits, and the gradient of hidden."""
    model = job.model
    chunk = min(job.chunk_tokens, job.tokens) * model.head_rows // job.tensor
    # the fused kernel overwrites the logits; plain torch works in fp32 copies
    logits = (
        chunk * job.compute_bytes
        if job.on_cuda
        else chunk * (4 if job.compute_bytes == 4 else 4 + 2 * job.compute_bytes)
    )
    whole = 2 if job.tensor > 1 and job.sequence else 1  # gathered for the head
    return logits + job.tokens * (whole * model.hidden_size * job.compute_bytes + 16)


def _head_gradient(job: MemoryJob) -> int:
    """The gradient of the head's matrix in fp32, where it trains."""
    size = job.model.head_rows * job.model.hidden_size // job.tensor
    return 4 * size if job.has_head and job.trained > size else 0


def _buffers(job: MemoryJob) -> int:
    """Work space of libraries; a matrix in floats; buckets of gradients and parameters, and hidden states between stages, on their way."""
    on_the_way = 2 * job.bucket_bytes if job.shards > 1 and not job.fsdp else 0
    # the largest quantised matrix is written out for its product; that of experts is of all of them
    model = job.model
    widest = (
        model.ffn_size
        if model.experts is None
        else max(model.ffn_size, model.experts.num * model.expert_size)
    )
    matrix = job.compute_bytes * model.hidden_size * widest if job.packed else 0
    messages = matrix + int(job.streams * job.tokens * _stream(job) * job.compute_bytes)
    return messages + (WORKSPACE + on_the_way if job.on_cuda else 0)


Change = tuple[str, Callable[[MemoryJob], MemoryJob | None]]


def _memory(**changes: object) -> Callable[[MemoryJob], MemoryJob | None]:
    def apply(job: MemoryJob) -> MemoryJob | None:
        changed = job.memory.model_copy(update=changes)
        return None if changed == job.memory else replace(job, memory=changed)

    return apply


def _offload(what: str) -> Callable[[MemoryJob], MemoryJob | None]:
    def apply(job: MemoryJob) -> MemoryJob | None:
        if what in job.memory.offload:
            return None
        return replace(
            job, memory=job.memory.model_copy(update={"offload": (*job.memory.offload, what)})
        )

    return apply


def _fewer_rows(job: MemoryJob) -> MemoryJob | None:
    rows = max((n for n in range(1, job.rows) if job.rows % n == 0), default=None)
    return (
        None
        if rows is None
        else replace(job, rows=rows, accumulate=job.accumulate * job.rows // rows)
    )


def suggestions(job: MemoryJob) -> list[tuple[str, int]]:
    """Settings that would need less memory, with the bytes each would free alone, largest first."""
    now = estimate(job).total
    fewer = _fewer_rows(job)
    changes: list[Change] = [
        (
            "memory.recompute=selective",
            _memory(recompute="selective") if job.memory.recompute == "none" else lambda _: None,
        ),
        ("memory.recompute=1", _memory(recompute=1.0)),
        (
            "optim.state_dtype=8bit",
            lambda j: replace(j, state_dtype="8bit") if j.other_state_bytes is None else None,
        ),
        (
            "parallel.accumulate_dtype=compute",
            lambda j: None if j.fsdp else replace(j, grad_bytes=j.compute_bytes),
        ),
        (f"batch.micro_rows={fewer.rows if fewer else 1}", lambda _: fewer),
        (
            f"memory.loss_chunk_tokens={max(1, job.chunk_tokens // 4)}",
            lambda j: replace(j, chunk_tokens=max(1, j.chunk_tokens // 4)),
        ),
    ]
    if job.on_cuda:
        # what a GPU gives to host memory is where a run on the CPU already is
        changes.append(("memory.offload=[activations]", _offload("activations")))
        changes.append(("memory.offload=[optimizer]", _offload("optimizer")))
    found = [
        (name, now - estimate(other).total)
        for name, change in changes
        if (other := change(job)) is not None
    ]
    return sorted(
        ((name, freed) for name, freed in found if freed > 0.01 * now), key=lambda one: -one[1]
    )
