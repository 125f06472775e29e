"""The bodies of /v1/completions and /v1/embeddings: bytes come in, a `TextCall` or an
`EmbeddingCall` goes out, or an ApiError.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from headway.serve.api_errors import bad_field
from headway.serve.generation_fields import (
    MAX_TOKENS,
    GenerationBody,
    GenerationFields,
    ModelBody,
    generation_fields,
)
from headway.serve.request_body import Flag, MustBe, Whole, needed, parse_body, wrong_value

MAX_LOGPROBS = 5
"""OpenAI's limit for this path."""
MAX_PROMPTS = 256
"""And answers: prompts times samples."""
MAX_INPUTS = 2048
"""OpenAI's limit for embeddings."""
MAX_IDS = 4 << 20
"""Of all prompts of a request."""
DEFAULT_MAX_TOKENS = 16
"""Of /v1/completions, as OpenAI documents it."""
MAX_TOKENS_WORDS = f"a whole number from 1 to {MAX_TOKENS}, or 0 with echo: true"
"""0: the prompt alone, for its log-probabilities."""
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


def _as_inputs(value: Any) -> Any:
    """A single text, or the ids of one, as a list of one input."""
    if isinstance(value, str):
        return [value]
    # A list of numbers is the ids of one text; a list of texts or lists is several inputs.
    if isinstance(value, list) and value and not isinstance(value[0], (str, list)):
        return [value]
    return value


Ids = Annotated[
    tuple[Annotated[int, Field(strict=True, ge=0, lt=1 << 31)], ...],
    Field(min_length=1, fail_fast=True),
]
Inputs = Annotated[
    tuple[Annotated[str, Field(strict=True)] | Ids, ...],
    Field(min_length=1, fail_fast=True),
    BeforeValidator(_as_inputs),
]


def _input_words(most: int) -> MustBe:
    return MustBe(f"a text, a list of token ids, or a list of at most {most} of them")


class TextBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: Annotated[Inputs, _input_words(MAX_PROMPTS)] = needed()
    echo: Flag = False
    logprobs: Annotated[int | None, Whole(0, MAX_LOGPROBS)] = None
    max_tokens: Annotated[int | None, Whole(0, MAX_TOKENS), MustBe(MAX_TOKENS_WORDS)] = None
    best_of: Annotated[int | None, Whole(1)] = None
    suffix: Any = None


class EmbeddingBody(ModelBody):
    """The body of /v1/embeddings."""

    input: Annotated[Inputs, _input_words(MAX_INPUTS)] = needed()
    encoding_format: Annotated[Literal["float", "base64"], MustBe("float or base64")] = "float"
    dimensions: Annotated[int | None, Whole(1, 1 << 24)] = None


def read_completion(data: bytes, max_n: int) -> TextCall:
    """Read a request for a continuation."""
    body = parse_body(TextBody, data)
    prompts = _limited("prompt", body.prompt, MAX_PROMPTS)
    if body.max_tokens == 0 and not body.echo:
        raise wrong_value("max_tokens", 0, MAX_TOKENS_WORDS)

    fields = generation_fields(
        body, max_n=max_n, default_max_tokens=DEFAULT_MAX_TOKENS, logprobs=body.logprobs
    )
    # OpenAI samples best_of answers and returns the n likeliest.
    if body.best_of is not None and body.best_of != fields.n:
        raise bad_field(
            "best_of",
            f"is {body.best_of}; it must be n ({fields.n}): this server "
            "returns every sample. Leave it out.",
        )

    if body.suffix:
        raise bad_field("suffix", "is not supported by this server. Leave it out.")

    num_answers = len(prompts) * fields.n
    if num_answers > MAX_PROMPTS:
        raise bad_field(
            "n",
            f"times the number of prompts is {num_answers}; at most "
            f"{MAX_PROMPTS} answers are made.",
        )

    return TextCall(body.model, prompts, fields, body.echo)


def read_embedding(data: bytes) -> EmbeddingCall:
    """Read a request for vectors."""
    body = parse_body(EmbeddingBody, data)
    inputs = _limited("input", body.input, MAX_INPUTS)
    return EmbeddingCall(body.model, inputs, body.encoding_format, body.dimensions)


def _limited(field: str, inputs: tuple[PromptInput, ...], most: int) -> tuple[PromptInput, ...]:
    """The inputs, unless they are too many or too long."""
    if len(inputs) > most:
        raise bad_field(field, f"is a list of {len(inputs)}; at most {most} are answered at once.")
    # Numbers in lists are not counted when the body is read; texts are bounded by its bytes.
    num_ids = sum(len(ids) for ids in inputs if isinstance(ids, tuple))
    if num_ids > MAX_IDS:
        raise bad_field(field, f"has {num_ids} token ids; at most {MAX_IDS} are read.")
    return inputs
