"""What goes into the inference engine and what comes out: requests, events, options and counters.
Imports no torch, so that a process without a device can make and read them.

    EngineRequest (ids, limits, sampling) -> InferenceEngine -> EngineEvent (new ids; the last one
                                                                says why it ended)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from headway.config.options import option
from headway.errors import ConfigError, HeadwayError, first_line
from headway.infer.sampling import Sampling

if TYPE_CHECKING:
    import numpy as np

    from headway.media.patches import Grid
    from headway.store.media_items import MediaItem

StopReason = Literal["eos", "stop", "grammar", "length", "context", "cancelled", "error"]
"""eos: an end id; stop: one of stop_ids or a stop text; grammar: the text of its grammar is
complete, and the last token belongs to it; length: max_new_tokens; context: the model's
max_seq_len; error: its own grammar, sampling or media failed (`EngineEvent.error`).
"""


class RequestTooLarge(ConfigError):
    """A request that can never fit: its prompt leaves no room in the model's context or in the
    cache."""


class QueueFull(HeadwayError):
    """As many requests wait as may wait; the same request may succeed later."""


def failure_line(problem: BaseException) -> str:
    """An exception that ended a request, as one line for its client."""
    # Our own messages are written for users; others need the name of their type to be understood.
    if isinstance(problem, HeadwayError):
        return str(problem)
    return f"{type(problem).__name__}: {first_line(problem)}."


@dataclass(frozen=True)
class PromptMedia:
    """The pictures and sounds of one prompt."""

    items: tuple[MediaItem, ...]
    features: Mapping[str, np.ndarray]
    """[vectors, width] by content hash; items without are absent."""
    grids: Mapping[str, Grid] = field(default_factory=dict)
    """By content hash: rows and columns of positions of a picture, for a model with its own vision
    tower; its features are [rows * columns, width]."""

    def pictures(self) -> list[tuple[int, Grid]]:
        """Where each picture of such a model begins, and its rows and columns."""
        return [
            (item.offset, self.grids[item.content_hash])
            for item in self.items
            if item.content_hash is not None and item.content_hash in self.grids
        ]

    def rotary_shift(self) -> int:
        """What is added to the number of a token behind all pictures, to get the position by which
        it is rotated: a picture takes as many as its longer side."""
        return sum(max(grid) - grid[0] * grid[1] for _, grid in self.pictures())


@dataclass(frozen=True)
class EngineRequest:
    """One prompt and how it is continued."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    key: str = ""
    """`sampling.seed` and this decide every draw, whatever else runs."""
    stop_ids: frozenset[int] = frozenset()
    """The request ends after one of these."""
    ignore_eos: bool = False
    """The model's own end ids do not end it."""
    adapter: str | None = None
    """The name of a loaded adapter."""
    logprobs: int | None = None
    """n: log-probabilities of the chosen token and of the n likeliest; 0: of the chosen one
    only."""
    drawn_logprobs: bool = False
    """Log-probabilities are those of the distribution that tokens are drawn from: after the
    temperature, among the tokens that top_k, top_p and min_p keep. Needs `logprobs` of 0, and a
    sampling without penalties and biases."""
    prompt_logprobs: bool = False
    """Log-probabilities of the prompt's tokens too, in the first event."""
    routes: bool = False
    """The last event has the experts of every token; for an engine with `routes`."""
    constraint: str | None = None
    """A grammar; the engine's constraint factory reads it."""
    media: PromptMedia | None = None
    embed: bool = False
    """No generation: the only event has the mean of the hidden states."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ConfigError("prompt is empty; it must have at least one token.")
        # Embeddings and the scores of a prompt need no new token.
        if self.max_new_tokens < 1 and not (self.embed or self.prompt_logprobs):
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; it must be 1 or more.")
        sampling = self.sampling
        if self.drawn_logprobs and (
            self.logprobs != 0
            or sampling.temperature == 0
            or sampling.changes_scores
            or self.constraint is not None
        ):
            raise ConfigError(
                "drawn_logprobs is true; it needs logprobs=0, a temperature above 0, and no "
                "penalties, biases or grammar."
            )
        if self.logprobs is not None and self.logprobs < 0:
            raise ConfigError(
                f"logprobs is {self.logprobs}; it must be 0 (the chosen token alone) or more."
            )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model found a token, before temperature and penalties; with `drawn_logprobs`
    in the distribution that it was drawn from."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(id, log-probability) of the likeliest tokens, likeliest first."""
    kept: np.ndarray | None = field(default=None, compare=False)
    """int32: the ids that could be drawn, ascending; None: all of them. With `drawn_logprobs`
    only."""


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """What a request has gained since its last event."""

    request: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finished: StopReason | None = None
    embedding: tuple[float, ...] | None = None
    cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache had; in the first event."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Of every token of the prompt; None for the first one, which nothing precedes. In the first
    event."""
    error: str | None = None
    """One line, where `finished` is "error"."""
    proposed_tokens: int = 0
    """Tokens that speculation guessed for the request; in the last event."""
    accepted_tokens: int = 0
    """Of them, those that were right."""
    routes: np.ndarray | None = field(default=None, compare=False)
    """int16 [tokens - 1, layers, k]: the experts of the prompt's tokens and of the new ones but the
    last, which no step has read; in the last event of a request with `routes`."""


class TokenConstraint(Protocol):
    """Which tokens may follow. The engine asks before each token of a row, and reports the token
    that was chosen."""

    def fill_mask(self, mask: np.ndarray) -> None:
        """Set the bits of allowed tokens in a zeroed int32 [ceil(vocab / 32)]: token t is bit t %
        32 of mask[t // 32]."""
        ...

    def accept(self, token: int) -> None:
        """Advance by the token that was chosen for the row."""
        ...

    @property
    def is_finished(self) -> bool:
        """Nothing may follow: the text is complete. The request then ends with "grammar"."""
        ...


ConstraintFactory = Callable[[str], TokenConstraint]
"""`EngineRequest.constraint` -> a fresh constraint; raises where it cannot be read. Called in a
thread of its own."""


MAX_SPECULATED = 32
"""Tokens that may be guessed at a time, at most."""


@dataclass(frozen=True)
class Speculation:
    """Some next tokens are guessed and checked in one step. The result is that of single steps."""

    draft: str | None = None
    """A small model of the same tokenizer that guesses; None: guesses are what followed the last
    tokens earlier in the sequence."""
    tokens: int = 4
    """Most tokens that are guessed at a time; a sequence whose guesses fail has fewer."""

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= MAX_SPECULATED:
            raise ConfigError(
                f"--speculate-tokens is {self.tokens}; it must be between 1 and {MAX_SPECULATED}."
            )


def _gibibytes(size: float | None) -> int | None:
    if size is None:
        return None
    if not size > 0:  # refuses NaN too
        raise ConfigError(f"--cache-gib is {size}; it must be above 0.")
    return int(size * (1 << 30))


@dataclass(frozen=True)
class EngineOptions:
    """How much the engine keeps and does at once."""

    cache_bytes: int | None = option(
        None,
        "GiB of keys and values per model and rank, never exceeded; default: from free memory.",
        "--cache-gib",
        read=_gibibytes,
        written_type=float | None,
    )
    """None: what `max_running` requests of full length need, at most a share of the free memory."""
    max_running: int = option(64, "Requests that are computed at once, per model.", min=1)
    max_waiting: int = option(1024, "Requests that may wait, per model; more get 429.", min=0)
    """More are refused with QueueFull."""
    prefill_tokens: int = option(
        8192, "Prompt tokens that are computed between two steps of decoding.", min=1
    )
    max_context: int | None = option(
        None, "Tokens of a request, prompt included; default: the model's.", min=2
    )
    page_tokens: int = 64
    """Positions of one page."""
    prefix_reuse: bool = option(True, "Compute what prompts begin with only once.")
    record: bool | Literal["auto"] = "auto"
    """Record decoding steps as CUDA graphs; auto: on CUDA."""
    compile_blocks: bool | Literal["auto"] = option(
        False,
        "Compile decoding steps: faster on GPUs, after a minute or more at the start.",
        "--compile",
        read=bool,
    )
    """auto: on CUDA."""
    lag: bool | Literal["auto"] = "auto"
    """Start a step before the tokens of the last one are read; auto: on CUDA."""

    speculation: Speculation | None = None
    """Guess and check several tokens at a time."""
    exact: bool = False
    """Compute every token in the bits that a packed row gives it in training (model/exact.py);
    on CPUs, of models without anything that `why_not_exact` names."""

    routes: bool = False
    """Store the experts of every token in layers with a mixture of experts."""

    def __post_init__(self) -> None:
        if self.routes and self.speculation is not None:
            raise ConfigError("routes is true; an engine that guesses tokens stores none.")
        for name in ("max_running", "prefill_tokens", "page_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more.")


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made, and the requests and memory it has now."""

    running: int
    waiting: int
    cache_bytes_used: int
    cache_bytes_budget: int
    prompt_tokens: int
    """Prompt tokens that were computed."""
    cached_tokens: int
    """Prompt tokens that the prefix cache had."""
    generated_tokens: int
    finished: int
    """Requests that ended, for whatever reason."""
    preempted: int
    """How often a request gave its memory back and was computed again."""
    steps: int
    first_token_seconds: tuple[float, ...] = ()
    """From submission to the first token, of the requests whose first token came since `stats` was
    last called."""
    proposed_tokens: int = 0
    """Tokens that speculation guessed."""
    accepted_tokens: int = 0
    """Of them, those that were right."""
