"""Fields that chat and text completions share: how to sample, when to stop, what to report.

A body comes in, one value goes out.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from headway.infer.sampling import Sampling
from headway.serve.api_errors import bad_field
from headway.serve.request_body import (
    Flag,
    MustBe,
    Number,
    RequestBody,
    Text,
    Whole,
    needed,
    wrong_value,
)

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_BIASES = 1024
MAX_TOKENS = 1 << 24
LEAST_TOP_P = 1e-9
"""Keeps the likeliest token and no other."""


@dataclass(frozen=True)
class GenerationFields:
    """What a client asks of every answer."""

    sampling: Sampling
    max_tokens: int | None
    """None: as many as the context has room for."""
    n: int = 1
    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many likely tokens are reported for each position; 0: the chosen one alone; None:
    nothing.
    """
    stream: bool = False
    include_usage: bool = False


class ModelBody(RequestBody):
    """What the bodies of all paths have."""

    model: Text = needed()

    # Fields that change no answer: names of the user, storage and prices of another service,
    # hints for its speed.
    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None


class StreamOptions(RequestBody):
    """`stream_options`."""

    include_usage: Flag = False
    include_obfuscation: Any = None


def _as_list(stop: Any) -> Any:
    if isinstance(stop, str):
        return [stop]
    return stop


StopText = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(strict=True, ge=0)]
BiasedId = Annotated[str, Field(strict=True, pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, Field(strict=True, ge=-100, le=100)]


class GenerationBody(ModelBody):
    """The fields that both kinds of completion have."""

    max_tokens: Annotated[int | None, Whole(1, MAX_TOKENS)] = None
    max_completion_tokens: Annotated[int | None, Whole(1, MAX_TOKENS)] = None
    n: Annotated[int, Whole(1)] = 1
    stream: Flag = False
    stream_options: StreamOptions | None = None
    stop: Annotated[
        tuple[StopText, ...],
        Field(max_length=MAX_STOPS),
        BeforeValidator(_as_list),
        MustBe(
            f"a text or a list of at most {MAX_STOPS} texts, each with 1 "
            f"to {MAX_STOP_CHARACTERS} characters"
        ),
    ] = ()
    stop_token_ids: Annotated[
        tuple[TokenId, ...],
        Field(max_length=MAX_STOPS),
        MustBe(f"a list of at most {MAX_STOPS} token ids"),
    ] = ()
    # stop_token_ids, ignore_eos, top_k, min_p and repetition_penalty are vLLM's additions to
    # OpenAI's API.
    ignore_eos: Flag = False
    seed: Annotated[int | None, Whole(-(2**63), 2**63 - 1)] = None
    temperature: Annotated[float, Number(0, 2)] = 1.0
    top_k: Annotated[int, Whole(-1, MAX_TOKENS)] = -1
    top_p: Annotated[float, Number(0, 1)] = 1.0
    min_p: Annotated[float, Number(0, 1)] = 0.0
    repetition_penalty: Annotated[
        float,
        Field(strict=True, gt=0, le=10),
        MustBe("a number above 0, at most 10"),
    ] = 1.0
    presence_penalty: Annotated[float, Number(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, Number(-2, 2)] = 0.0
    logit_bias: Annotated[
        dict[BiasedId, Bias],
        Field(max_length=MAX_BIASES),
        MustBe(f"an object of at most {MAX_BIASES} token ids and numbers from -100 to 100"),
    ] = Field(default_factory=dict)


def generation_fields(
    body: GenerationBody,
    *,
    max_n: int,
    default_max_tokens: int | None,
    logprobs: int | None,
) -> GenerationFields:
    """What a body asks of every answer.

    Its fields are checked against each other and against this server's limit.
    """
    max_tokens = body.max_tokens
    newer = body.max_completion_tokens
    if max_tokens is not None and newer is not None and max_tokens != newer:
        raise bad_field(
            "max_tokens", f"is {max_tokens} and max_completion_tokens {newer}. Give one of them."
        )

    if newer is not None:
        max_tokens = newer
    if max_tokens is None:
        max_tokens = default_max_tokens
    if body.n > max_n:
        raise wrong_value("n", body.n, f"a whole number from 1 to {max_n}")

    include_usage = False
    if body.stream_options is not None:
        if not body.stream:
            raise bad_field("stream_options", "is only allowed with stream: true.")
        include_usage = body.stream_options.include_usage

    return GenerationFields(
        sampling=_sampling(body),
        max_tokens=max_tokens,
        n=body.n,
        stops=tuple(dict.fromkeys(body.stop)),
        stop_ids=frozenset(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        stream=body.stream,
        include_usage=include_usage,
    )


def _sampling(body: GenerationBody) -> Sampling:
    """How to sample.

    A request without a seed gets one, so that its answers differ from those of the next.
    """
    seed = body.seed
    if seed is None:
        seed = secrets.randbits(62)

    top_k = None
    if body.top_k > 0:
        top_k = body.top_k

    top_p = None
    if body.top_p < 1:
        # OpenAI's clients send 0 for "the likeliest token alone".
        top_p = max(body.top_p, LEAST_TOP_P)

    return Sampling(
        temperature=body.temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed % 2**63,  # OpenAI's seeds may be negative
        min_p=body.min_p or None,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=tuple((int(token), bias) for token, bias in body.logit_bias.items()),
    )
