"""The bodies of /v1/completions and /v1/embeddings: bytes come in, a `TextCall` or an `EmbeddingCall` goes out, or an ApiError."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from headway.serve.api_errors import bad_field
from headway.serve.fields import HARMLESS, BodyFields, read_json
from headway.serve.generation_fields import GenerationFields, read_generation

MAX_LOGPROBS = 5
MAX_PROMPTS = 256
MAX_INPUTS = 2048
MAX_IDS = 4 << 20
"""Of all prompts of a request."""
DEFAULT_MAX_TOKENS = 16
"""Of /v1/completions, as OpenAI documents it."""
PromptInput = str | tuple[int, ...]
"""A text, or its ids."""


@dataclass(frozen=True)
class TextCall:
    """Prompts to continue."""

    model: str
    prompts: tuple[PromptInput, ...]
    fields: GenerationFields
    echo: bool = False
    """The answer begins with the prompt."""


@dataclass(frozen=True)
class EmbeddingCall:
    """Texts of which vectors are asked."""

    model: str
    inputs: tuple[PromptInput, ...]
    encoding: Literal["float", "base64"]
    dimensions: int | None


def read_completion(body: bytes, max_n: int) -> TextCall:
    """Read a request for a continuation."""
    fields = BodyFields(read_json(body))
    model = fields.needed_text("model")
    prompts = _inputs(fields, "prompt", MAX_PROMPTS)
    logprobs = fields.whole("logprobs", 0, MAX_LOGPROBS)
    echo = fields.flag("echo")
    least = 0 if echo else 1  # the prompt alone, for its log-probabilities
    generation = read_generation(
        fields,
        max_n=max_n,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=logprobs,
        least_tokens=least,
    )
    best_of = fields.whole("best_of", 1, max_n)
    if best_of is not None and best_of != generation.n:
        raise bad_field(
            "best_of",
            f"is {best_of}; it must be n ({generation.n}): this server returns every sample. Leave it out.",
        )
    if fields.get("suffix"):
        raise bad_field("suffix", "is not supported by this server. Leave it out.")
    fields.finish(HARMLESS)
    if len(prompts) * generation.n > MAX_PROMPTS:
        raise bad_field(
            "n",
            f"times the number of prompts is {len(prompts) * generation.n}; at most {MAX_PROMPTS} answers are made.",
        )
    return TextCall(model, prompts, generation, echo)


def read_embedding(body: bytes) -> EmbeddingCall:
    """Read a request for vectors."""
    fields = BodyFields(read_json(body))
    model = fields.needed_text("model")
    inputs = _inputs(fields, "input", MAX_INPUTS)
    encoding = fields.text("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise fields.wrong("encoding_format", "float or base64")
    dimensions = fields.whole("dimensions", 1, 1 << 24)
    fields.finish(HARMLESS)
    return EmbeddingCall(model, inputs, cast(Literal["float", "base64"], encoding), dimensions)


def _inputs(fields: BodyFields, field: str, most: int) -> tuple[PromptInput, ...]:
    """A text, ids, a list of texts or a list of ids."""
    given = fields.get(field)
    expected = f"a text, a list of token ids, or a list of at most {most} of them"
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, list) or not given:
        raise fields.wrong(field, expected)
    listed = cast(list[Any], given)
    if _is_ids(listed):
        if len(listed) > MAX_IDS:
            raise bad_field(field, f"has {len(listed)} token ids; at most {MAX_IDS} are read.")
        return (tuple(cast(list[int], listed)),)
    if len(listed) > most:
        raise bad_field(field, f"is a list of {len(listed)}; at most {most} are answered at once.")
    found: list[PromptInput] = []
    for one in listed:
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, list) and one and _is_ids(cast(list[Any], one)):
            found.append(tuple(cast(list[int], one)))
        else:
            raise fields.wrong(field, expected)
    num_ids = sum(len(one) for one in found if isinstance(one, tuple))
    if num_ids > MAX_IDS:
        raise bad_field(field, f"has {num_ids} token ids; at most {MAX_IDS} are read.")
    return tuple(found)


def _is_ids(listed: list[Any]) -> bool:
    return all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 1 << 31 for one in listed
    )
