"""Fields that chat and text completions share: how to sample, when to stop, what to report. A body's fields come in, one value goes out."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from headway.infer.sampling import Sampling
from headway.serve.api_errors import bad_field
from headway.serve.fields import BodyFields

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_TOKENS = 1 << 24


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
    """How many likely tokens are reported for each position; 0: the chosen one alone; None: nothing."""
    stream: bool = False
    include_usage: bool = False


def read_generation(
    body: BodyFields,
    *,
    max_n: int,
    default_max_tokens: int | None,
    logprobs: int | None,
    least_tokens: int = 1,
) -> GenerationFields:
    """Read the fields that both kinds of completion have."""
    asked = body.whole("max_tokens", least_tokens, MAX_TOKENS)
    newer = body.whole("max_completion_tokens", 1, MAX_TOKENS)
    if asked is not None and newer is not None and asked != newer:
        raise bad_field(
            "max_tokens", f"is {asked} and max_completion_tokens {newer}. Give one of them."
        )
    stream = body.flag("stream")
    options = body.inner("stream_options")
    include_usage = False
    if options is not None:
        if not stream:
            raise bad_field("stream_options", "is only allowed with stream: true.")
        include_usage = options.flag("include_usage")
        options.finish(("include_obfuscation",))
    return GenerationFields(
        sampling=_sampling(body),
        max_tokens=newer
        if newer is not None
        else asked
        if asked is not None
        else default_max_tokens,
        n=body.whole("n", 1, max_n, 1) or 1,
        stops=_stops(body),
        stop_ids=_stop_ids(body),
        ignore_eos=body.flag("ignore_eos"),
        logprobs=logprobs,
        stream=stream,
        include_usage=include_usage,
    )


def _sampling(body: BodyFields) -> Sampling:
    seed = body.whole("seed", -(2**63), 2**63 - 1)
    top_k = body.whole("top_k", -1, MAX_TOKENS)
    return Sampling(
        temperature=body.number("temperature", 0, 2, 1.0),
        top_k=None if top_k is None or top_k < 1 else top_k,
        top_p=_fraction(body, "top_p"),
        seed=secrets.randbits(62) if seed is None else seed % 2**63,
        min_p=body.number("min_p", 0, 1, 0.0) or None,
        repetition_penalty=_above_zero(body, "repetition_penalty"),
        presence_penalty=body.number("presence_penalty", -2, 2, 0.0),
        frequency_penalty=body.number("frequency_penalty", -2, 2, 0.0),
        logit_bias=_biases(body),
    )


def _above_zero(body: BodyFields, field: str) -> float:
    found = body.number(field, 0, 10, 1.0)
    if found == 0:
        raise body.wrong(field, "a number above 0, at most 10")
    return found


def _fraction(body: BodyFields, field: str) -> float | None:
    found = body.number(field, 0, 1, 1.0)
    # OpenAI's clients send 0 for "the likeliest token alone"
    return None if found == 1 else max(found, 1e-9)


def _biases(body: BodyFields) -> tuple[tuple[int, float], ...]:
    found = body.get("logit_bias")
    if found is None:
        return ()
    if not isinstance(found, dict) or len(cast(dict[str, Any], found)) > MAX_BIASES:
        raise body.wrong("logit_bias", f"an object of at most {MAX_BIASES} token ids and numbers")
    biases: list[tuple[int, float]] = []
    for token, bias in cast(Mapping[str, Any], found).items():
        if (
            not (token.isascii() and token.isdecimal() and len(token) < 10)
            or isinstance(bias, bool)
            or not isinstance(bias, (int, float))
        ):
            raise body.wrong("logit_bias", "an object of token ids and numbers from -100 to 100")
        if not -100 <= bias <= 100:
            raise bad_field(f"logit_bias.{token}", "must be a number from -100 to 100.")
        biases.append((int(token), float(bias)))
    return tuple(biases)


def _stops(body: BodyFields) -> tuple[str, ...]:
    found = body.get("stop")
    if found is None:
        return ()
    listed = cast(list[Any], found) if isinstance(found, list) else [found]
    if len(listed) > MAX_STOPS or not all(
        isinstance(one, str) and 0 < len(one) <= MAX_STOP_CHARACTERS for one in listed
    ):
        raise body.wrong(
            "stop",
            f"a text or a list of at most {MAX_STOPS} texts, each with 1 to {MAX_STOP_CHARACTERS} characters",
        )
    return tuple(dict.fromkeys(cast(list[str], listed)))


def _stop_ids(body: BodyFields) -> frozenset[int]:
    found = body.get("stop_token_ids")
    if found is None:
        return frozenset()
    listed = cast(list[Any], found) if isinstance(found, list) else [None]
    if len(listed) > MAX_STOPS or not all(
        isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in listed
    ):
        raise body.wrong("stop_token_ids", f"a list of at most {MAX_STOPS} token ids")
    return frozenset(cast(list[int], listed))
