"""A model that clients can ask: what a request says comes in, the ids and limits of engine requests go out. No torch.

    chat     turns, tools, media -> chat template -> ids, and the ids that end an answer
    text     text or ids -> ids

Prompts are made in one thread per model, because a template and its budget serve one rendering at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from headway.errors import ConfigError, HeadwayError, first_line
from headway.infer.engine.request import EngineRequest, PromptMedia
from headway.media.items import MediaRef
from headway.serve.api_errors import ApiError, bad_field
from headway.serve.chat_request import ChatCall, needs_template
from headway.serve.constraints import call_grammar, schema_grammar
from headway.serve.engine_client import EngineClient
from headway.serve.engine_setup import DecodedMedia, EngineFacts
from headway.serve.generation_fields import GenerationFields
from headway.serve.grammar_check import GrammarChecker
from headway.serve.limits import ServeLimits
from headway.serve.text_request import EmbeddingCall, PromptInput, TextCall
from headway.serve.tool_calls import ToolFormat, tool_format
from headway.tokenizer.chat import (
    TOKENIZER_TEMPLATE,
    answer_end,
    bos_ids,
    find_template,
    render_prompt,
)
from headway.tokenizer.load import Tokenizer

if TYPE_CHECKING:
    from headway.tokenizer.chat import ChatTemplate

log = logging.getLogger("headway")
C = TypeVar("C")
R = TypeVar("R")
TAIL = 16
"""Last ids of a prompt that are decoded with the answer's first ones."""


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt as the engine takes it."""

    requests: tuple[EngineRequest, ...]
    """One per sample."""
    media: Mapping[str, MediaRef] = field(default_factory=dict)
    """As the client sent them, by content hash: the same picture twice is decoded once."""
    decoded: Mapping[str, DecodedMedia] = field(default_factory=dict)
    echo: str = ""
    """The text of the prompt, where the answer repeats it."""

    @property
    def tail(self) -> tuple[int, ...]:
        """The end of the prompt."""
        return self.requests[0].prompt[-TAIL:]

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.requests[0].prompt)


class ServedModel:
    """One model, or one of its adapters."""

    def __init__(
        self, client: EngineClient, facts: EngineFacts, template: str | None, limits: ServeLimits
    ) -> None:
        if facts.tokenizer is None:
            raise ConfigError(
                f"{client.setup.path}: holds no tokenizer. Put tokenizer.json and tokenizer_config.json there."
            )
        self.client, self.facts, self.limits = client, facts, limits
        self.name = facts.name
        self.adapter: str | None = None
        self.tokenizer: Tokenizer = facts.tokenizer
        self.special_ids = frozenset(self.tokenizer.special_tokens.values())
        has_own = self.tokenizer.chat_template is not None
        named = template or (TOKENIZER_TEMPLATE if has_own else "chatml" if facts.media else None)
        self.template: ChatTemplate | None = (
            None if named is None else find_template(named, self.tokenizer)
        )
        source = "" if self.template is None else self.template.export(self.tokenizer) or ""
        self.tool_format: ToolFormat | None = tool_format(source)
        self.answer_ends = frozenset(
            () if self.template is None else answer_end(self.template, self.tokenizer)
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"prompts-{self.name}")
        self._checker = GrammarChecker(self.tokenizer, facts.vocab, facts.end_ids)

    def close(self) -> None:
        """End the process that checks grammars, and the thread that makes prompts."""
        self._checker.close()
        self._thread.shutdown(wait=False)

    def with_adapter(self, name: str) -> ServedModel:
        """The same model with an adapter, under the adapter's name."""
        found = object.__new__(ServedModel)
        found.__dict__ |= self.__dict__
        found.name = found.adapter = name
        return found

    async def chat(self, call: ChatCall) -> PreparedPrompt:
        """The prompt of a conversation."""
        if self.template is None:
            raise needs_template(self.name)
        grammar = await self._prepare(self._grammar, call)
        if grammar is not None:
            await self._checker.check(grammar, _grammar_field(call))
        return await self._prepare(partial(self._chat, grammar=grammar), call)

    async def text(self, call: TextCall) -> list[PreparedPrompt]:
        """The prompts of a completion."""
        return await self._prepare(self._text, call)

    async def embeddings(self, call: EmbeddingCall) -> list[EngineRequest]:
        """The texts of which vectors are asked."""
        return await self._prepare(self._embeddings, call)

    async def _prepare(self, work: Callable[[C], R], call: C) -> R:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, call)
        except ApiError:
            raise
        except HeadwayError as problem:
            raise ApiError(400, str(problem)) from None
        except Exception as problem:
            log.error("serve: a prompt for model %r could not be made", self.name, exc_info=problem)
            message = (
                f"The prompt could not be made: {type(problem).__name__}: {first_line(problem)}"
            )
            raise ApiError(500, message, code="internal_error") from None

    def _chat(self, call: ChatCall, grammar: str | None = None) -> PreparedPrompt:
        assert self.template is not None
        if self.facts.media:
            return self._media_chat(call, grammar)
        if call.media:
            raise bad_field(
                "messages", f"hold pictures or sounds; model {self.name!r} takes text alone."
            )
        ids = render_prompt(
            call.turns, self.template, self.tokenizer, call.tools, continues=call.continues
        )
        return self._prepared(ids, call.fields, "messages", grammar, is_chat=True)

    def _media_chat(self, call: ChatCall, grammar: str | None) -> PreparedPrompt:
        from headway.records.encode_media import MediaEncoder, MediaPositions, place_media

        assert self.template is not None
        if call.media and self.facts.media_problem:
            raise bad_field(
                "messages",
                f"hold pictures or sounds, which model {self.name!r} cannot take: {self.facts.media_problem}",
            )
        if call.tools:
            raise bad_field(
                "tools",
                f"cannot be used with model {self.name!r}, which takes pictures and sounds. Leave it out.",
            )
        positions = MediaPositions(self.facts.media, self.facts.media_missing)
        names = [ref.content_hash() for ref in call.media]
        hashed = [(str(ref.modality), name) for ref, name in zip(call.media, names, strict=True)]
        placed = place_media(call.turns, hashed, positions)
        document = MediaEncoder(self.tokenizer, self.template, positions).prompt(
            placed, continues=call.continues
        )
        found = self._prepared(
            document.ids.tolist(), call.fields, "messages", grammar, is_chat=True
        )
        media = PromptMedia(document.items, {})
        requests = tuple(replace(request, media=media) for request in found.requests)
        return replace(found, requests=requests, media=dict(zip(names, call.media, strict=True)))

    def _grammar(self, call: ChatCall) -> str | None:
        if call.schema is None and call.tool_choice in ("auto", "none"):
            return None
        if not self.facts.constraints:
            raise bad_field(
                _grammar_field(call),
                f"cannot be followed by model {self.name!r}: llguidance, or an id that ends a text, is missing.",
            )
        if call.schema is not None:
            return schema_grammar(call.schema)
        if self.tool_format is None:
            raise bad_field(
                "tool_choice",
                f"must be auto or none: how the chat template of {self.name!r} writes calls is not known.",
            )
        return call_grammar(
            self.tool_format,
            call.tools,
            call.tool_choice[1:] if call.tool_choice.startswith("=") else None,
        )

    def _text(self, call: TextCall) -> list[PreparedPrompt]:
        found: list[PreparedPrompt] = []
        for one in call.prompts:
            ids = self._ids(one, "prompt")
            prepared = self._prepared(ids, call.fields, "prompt", None, is_chat=False)
            if call.echo:
                wants = call.fields.logprobs is not None
                is_alone = call.fields.max_tokens == 0
                if is_alone and not wants:
                    raise bad_field(
                        "max_tokens",
                        "is 0, and no log-probabilities of the prompt are asked for. Give logprobs or 1 or more.",
                    )
                most = 0 if is_alone else prepared.requests[0].max_new_tokens
                requests = tuple(
                    replace(each, prompt_logprobs=wants, max_new_tokens=most)
                    for each in prepared.requests
                )
                prepared = replace(
                    prepared, requests=requests, echo=self.tokenizer.decode(ids, skip_special=True)
                )
            found.append(prepared)
        return found

    def _embeddings(self, call: EmbeddingCall) -> list[EngineRequest]:
        if call.dimensions not in (None, self.facts.hidden_size):
            raise bad_field(
                "dimensions",
                f"is {call.dimensions}; model {self.name!r} gives vectors of {self.facts.hidden_size}.",
            )
        found: list[EngineRequest] = []
        for one in call.inputs:
            ids = self._ids(one, "input")
            self._check_room(len(ids), "input")
            found.append(EngineRequest(tuple(ids), 1, adapter=self.adapter, embed=True))
        return found

    def _ids(self, given: PromptInput, field: str) -> list[int]:
        if isinstance(given, tuple):
            # A model may have more embeddings than its tokenizer has ids; they stand for no text.
            vocab = min(self.facts.vocab, self.tokenizer.vocab_size)
            if max(given) >= vocab:
                raise bad_field(
                    field,
                    f"has the id {max(given)}; the vocabulary of {self.name!r} has {vocab} ids.",
                )
            return list(given)
        ids = [*bos_ids(self.tokenizer), *self.tokenizer.encode(given)]
        if not ids:
            start = (
                self.tokenizer.bos_id
                if self.tokenizer.bos_id is not None
                else self.tokenizer.eos_id
            )
            if start is None or field == "input":
                raise bad_field(field, "is empty. Give some text.")
            ids = [start]
        return ids

    def _check_room(self, tokens: int, field: str) -> int:
        room = self.facts.context - tokens
        if room < 1:
            raise ApiError(
                400, f"{field} has {tokens} tokens; the context of model {self.name!r} is {self.facts.context} tokens and leaves no room "
                "for an answer. Shorten it.", field, "context_length_exceeded",
            )  # fmt: skip
        return room

    def _prepared(
        self,
        ids: Sequence[int],
        fields: GenerationFields,
        field: str,
        grammar: str | None,
        *,
        is_chat: bool,
    ) -> PreparedPrompt:
        room, most = self._check_room(len(ids), field), self.limits.max_tokens
        if fields.max_tokens is not None and most is not None and fields.max_tokens > most:
            raise bad_field(
                "max_tokens", f"is {fields.max_tokens}; this server makes at most {most}."
            )
        biased = max((token for token, _ in fields.sampling.logit_bias), default=0)
        if biased >= self.facts.vocab:
            raise bad_field(
                "logit_bias",
                f"has the id {biased}; the vocabulary of {self.name!r} has {self.facts.vocab} ids.",
            )
        wanted = fields.max_tokens if fields.max_tokens is not None else most
        request = EngineRequest(
            prompt=tuple(ids),
            max_new_tokens=room if wanted is None else min(wanted, room) if wanted else 1,
            sampling=fields.sampling,
            stop_ids=fields.stop_ids
            | (self.answer_ends if is_chat and not fields.ignore_eos else frozenset()),
            ignore_eos=fields.ignore_eos,
            adapter=self.adapter,
            logprobs=fields.logprobs,
            constraint=grammar,
        )
        return PreparedPrompt(
            tuple(replace(request, key=str(number)) for number in range(fields.n))
        )


def _grammar_field(call: ChatCall) -> str:
    """The field of a body that asks for a grammar."""
    return "tool_choice" if call.schema is None else "response_format"
