"""How much each head attends to a needle: a model and a plan of prompts come in, one number for
every layer, query head, length and depth goes out.

    prompt    ... needle ... question, beginning of the answer
                    ^                                        |
                    `---- attention of the last position ----'

The last position predicts the first token of the answer. A head's number is the sum of its weights
there over the tokens of the answer in the needle, averaged over prompts. With T tokens, n of them
the needle's, a head that attends to all tokens equally has n / T (`uniform`).

The weights are those of the model's own pass: the queries and keys are taken where the layer hands
them to its attention kernel, after RoPE and norms.

    weights = softmax(rule(q k / sqrt(hd)))        of the keys that the layer's window shows

Layers that keep a state in place of attention (linear attention, short convolutions) have no weights
and are left out.

Shapes: T tokens, A layers with attention, H query heads, KV key heads, hd head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError, DataError
from headway.eval.long_cases import LongCase, make_cases
from headway.eval.options import AttentionPlan
from headway.infer.load import LoadedModel
from headway.runtime.progress import progress

if TYPE_CHECKING:
    from torch import Tensor

    from headway.kernels.attention import ScoreRule
    from headway.model.config import ModelConfig
    from headway.model.transformer import Block
    from headway.tokenizer.load import Tokenizer


@dataclass(frozen=True)
class HeadAttention:
    """One query head, at one length and depth."""

    layer: int
    head: int
    rope: bool
    """Whether the layer turns queries and keys by their positions."""
    window: int | None
    """The sliding window of the layer; None: the whole past."""
    length: int
    """Of the plan."""
    depth: float
    distance: float
    """Tokens from the needle to the position that looks for it; the mean over prompts."""
    attention: float
    """Sum of the weights on the needle; the mean over prompts."""
    uniform: float
    """What a head that attends to all tokens equally would have."""


@dataclass(frozen=True)
class AttentionResult:
    """All heads of a model."""

    model: str
    plan: AttentionPlan
    heads: list[HeadAttention]
    num_layers: int
    num_heads: int
    rope_scaling: str | None
    """The kind of scaling that extends the context; None: none."""
    layers_without_attention: list[int] = field(default_factory=list)
    """Layers with a state in place of attention: they have no weights, and no row in `heads`."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def cells(self) -> list[tuple[int, float]]:
        """Length and depth of every cell, the smallest distance first."""
        distances = {(cell.length, cell.depth): cell.distance for cell in self.heads}
        return sorted(distances, key=lambda cell: distances[cell])


def measure_attention(
    loaded: LoadedModel, plan: AttentionPlan, *, name: str | None = None
) -> AttentionResult:
    """Read every prompt once."""
    config = loaded.config
    check_attention_model(loaded)
    longest = max(plan.lengths)
    if longest > config.max_seq_len:
        raise ConfigError(
            f"--lengths holds {longest}; the model's max_seq_len is {config.max_seq_len}. Give "
            "lengths up to that, or extend the model's context (docs/long-context.md)."
        )
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise ConfigError(f"--model is {loaded.path}: it has no tokenizer, and prompts are text.")

    cases = make_cases(tokenizer, plan.prompts())
    # [A,H] of each prompt for A layers with attention, by its length and depth
    weights: dict[tuple[int, float], list[Tensor]] = {}
    spans: dict[tuple[int, float], list[tuple[float, float]]] = {}
    with progress("read prompts", total=len(cases), unit="prompts") as advance:
        for case in cases:
            begin, end = needle_span(tokenizer, case)
            last = len(case.ids) - 1
            cell = (case.length, case.depth)
            weights.setdefault(cell, []).append(needle_weights(loaded, case.ids, begin, end))
            distance = last - (begin + end - 1) / 2
            spans.setdefault(cell, []).append((distance, (end - begin) / len(case.ids)))
            advance(1)

    layers = _layers_with_attention(config)
    heads: list[HeadAttention] = []
    for (length, depth), of_prompts in weights.items():
        distance = fmean(distance for distance, _ in spans[length, depth])
        uniform = fmean(share for _, share in spans[length, depth])
        mean = sum(of_prompts[1:], start=of_prompts[0]) / len(of_prompts)
        for layer, row in zip(layers, mean.tolist(), strict=True):
            has_rope = config.positions == "rotary" and layer not in config.no_rope_layers
            window = config.window_of(layer)
            for head, attention in enumerate(row):
                heads.append(
                    HeadAttention(
                        layer, head, has_rope, window, length, depth, distance, attention, uniform
                    )
                )
    scaling = None
    if config.rope_scaling is not None:
        scaling = config.rope_scaling.kind
    without = [layer for layer in range(config.num_layers) if layer not in layers]
    return AttentionResult(
        name or str(loaded.path),
        plan,
        heads,
        config.num_layers,
        config.num_heads,
        scaling,
        without,
    )


def _layers_with_attention(config: ModelConfig) -> list[int]:
    """Layers whose heads have attention weights; the others of a hybrid keep a state."""
    return [layer for layer in range(config.num_layers) if not config.has_state(layer)]


def check_attention_model(loaded: LoadedModel) -> None:
    """Refuse models whose attention has no queries and keys of its own here."""
    reason = None
    if loaded.config.hf_config is not None:
        reason = "a class of transformers computes its attention"
    elif loaded.config.latent_attention is not None:
        reason = "its attention is latent"
    elif not _layers_with_attention(loaded.config):
        reason = "none of its layers has attention"
    if reason is not None:
        raise ConfigError(
            f"--model is {loaded.path}: {reason}, so the weights of its heads are not known here. "
            "Give a model of another family."
        )


def needle_span(tokenizer: Tokenizer, case: LongCase) -> tuple[int, int]:
    """The tokens [begin, end) that hold the answer in the needle, not in the question."""
    answer = case.case.answers[0]
    before = ""
    if case.task == "key_value":
        # A table repeats values; the line is known by its key, with which the prompt ends.
        before = "\n" + case.case.prompt.rsplit("\n", 1)[-1]
    # The newline lets the first line of a table be found like the others.
    text = "\n" + tokenizer.decode(case.ids)
    found = text.find(before + answer)
    if found < 0:
        raise DataError(
            f"the prompt of {case.task} with {case.length} tokens does not hold {answer!r} after "
            "it was tokenized: the tokenizer changes text. Take another task."
        )
    begin_character = found + len(before) - 1

    def tokens_until(character: int) -> int:
        """The fewest tokens whose text goes beyond a character."""
        low = 0
        high = len(case.ids)
        while low < high:
            middle = (low + high) // 2
            if len(tokenizer.decode(case.ids[:middle])) > character:
                high = middle
            else:
                low = middle + 1
        return low

    begin = tokens_until(begin_character) - 1
    end = tokens_until(begin_character + len(answer) - 1)
    return begin, end


def needle_weights(loaded: LoadedModel, ids: Sequence[int], begin: int, end: int) -> Tensor:
    """fp32 [A,H] on the host: the weights of the last position on the tokens [begin, end), of the A
    layers with attention."""
    import torch

    tokens = torch.tensor([list(ids)], dtype=torch.int64, device=loaded.device)
    position = torch.arange(len(ids), dtype=torch.int32, device=loaded.device)[None]
    sums: dict[str, Tensor] = {}
    # Head masks of the model are left out: every head sees what its layer shows.
    with torch.inference_mode(), _watched(loaded, sums, begin, end):
        loaded.model.hidden_states(tokens, position)
    return torch.stack([sums[name] for name in loaded.model.blocks() if name in sums]).cpu()


@contextmanager
def _watched(loaded: LoadedModel, sums: dict[str, Tensor], begin: int, end: int) -> Iterator[None]:
    """Inside, every layer with attention leaves that of its last position to [begin, end) in
    `sums`."""
    from headway.model.transformer import Block

    blocks: dict[str, Block] = {}
    for name, block in loaded.model.blocks().items():
        assert isinstance(block, Block), "models without our blocks were refused"
        # The core of a layer with a state takes no queries and keys.
        if block.stateful is None:
            blocks[name] = block
    cores = {name: block.core for name, block in blocks.items()}

    def watching(name: str, block: Block) -> Any:
        core = cores[name]

        def attend(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
            weights = last_weights(q, k, settings.get("window"), block.rule)
            sums[name] = weights[:, begin:end].sum(-1)
            return core(q, k, v, **settings)

        return attend

    try:
        for name, block in blocks.items():
            block.core = watching(name, block)
        yield
    finally:
        for name, block in blocks.items():
            block.core = cores[name]


def last_weights(q: Tensor, k: Tensor, window: int | None, rule: ScoreRule) -> Tensor:
    """fp32 [H,T]: the attention weights of the last position of a single row.

    q [1,T,H,hd], k [1,T,KV,hd].
    """
    import torch

    _, num_tokens, num_heads, width = q.shape
    shared_by = num_heads // k.shape[2]
    keys = k[0].float().repeat_interleave(shared_by, dim=1)
    scores = torch.einsum("hd,thd->ht", q[0, -1].float(), keys) / width**0.5
    scores = rule(scores)
    if window is not None:
        scores[:, : max(0, num_tokens - window)] = -torch.inf
    if rule.sinks is None:
        return scores.softmax(-1)
    # A trained logit is one more term of the denominator.
    with_sink = torch.cat([scores, rule.sinks.float()[:, None]], dim=-1)
    return with_sink.softmax(-1)[:, :-1]
