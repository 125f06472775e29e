"""A model that clients can ask: what a request says comes in, the ids and limits of engine requests
go out. No torch.

    chat     turns, tools, media -> chat template -> ids, and the ids that end an answer
    text     text or ids -> ids

Prompts are made in one thread per model, because a template and its budget serve one rendering at a
time.
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
    from headway.media.patches import Grid
    from headway.tokenizer.chat import ChatTemplate

log = logging.getLogger("headway")
C = TypeVar("C")
R = TypeVar("R")
TAIL = 16
"""Last ids of a prompt that are decoded with the answer's first ones: a token alone may be a part
of a character, or lose the space before it.
"""


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
    """One model, or one of its adapters, as the HTTP process sees it: makes the engine's requests
    of calls.
    """

    def __init__(
        self, client: EngineClient, facts: EngineFacts, template: str | None, limits: ServeLimits
    ) -> None:
        if facts.tokenizer is None:
            raise ConfigError(
                f"{client.setup.path}: holds no tokenizer. Put tokenizer.json and "
                "tokenizer_config.json there."
            )

        self.client = client
        self.facts = facts
        self.limits = limits
        self.name = facts.name
        self.adapter: str | None = None
        self.tokenizer: Tokenizer = facts.tokenizer
        self.special_ids = frozenset(self.tokenizer.special_tokens.values())

        template_name = template or None
        if template_name is None and self.tokenizer.chat_template is not None:
            template_name = TOKENIZER_TEMPLATE
        if template_name is None and facts.media:
            # A model with media was trained on conversations; ChatML is the default there.
            template_name = "chatml"

        self.template: ChatTemplate | None = None
        self.tool_format: ToolFormat | None = None
        self.answer_ends: frozenset[int] = frozenset()
        if template_name is not None:
            self.template = find_template(template_name, self.tokenizer)
            self.tool_format = tool_format(self.template.export(self.tokenizer) or "")
            self.answer_ends = frozenset(answer_end(self.template, self.tokenizer))

        # Rendering and tokenizing a long prompt takes a while, in which the event loop serves
        # others.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"prompts-{self.name}")
        self._checker = GrammarChecker(self.tokenizer, facts.vocab, facts.end_ids)

    def close(self) -> None:
        """End the process that checks grammars, and the thread that makes prompts."""
        self._checker.close()
        self._thread.shutdown(wait=False)

    async def warm_up(self) -> None:
        """Do now what the first request would wait for."""
        if self.facts.constraints:
            await self._checker.warm_up()

    def with_adapter(self, name: str) -> ServedModel:
        """The same model with an adapter, under the adapter's name."""
        # Everything but the name is shared: the client, the prompt thread, the grammar checker.
        adapted = object.__new__(ServedModel)
        adapted.__dict__ |= self.__dict__
        adapted.name = adapted.adapter = name
        return adapted

    async def chat(self, call: ChatCall) -> PreparedPrompt:
        """The prompt of a conversation."""
        if self.template is None:
            raise needs_template(self.name)

        # The check may take seconds in another process; the prompt thread does not wait for it.
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
        """Run a step in the prompt thread; whatever it raises becomes an ApiError."""
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
        """The prompt of a conversation, in the prompt thread."""
        assert self.template is not None
        # A model with its own vision tower reads conversations without pictures as any other does.
        if self.facts.media and (call.media or self.facts.native is None):
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
        """The same for a model with media: each item takes as many positions as its encoder gives
        vectors.
        """
        from headway.media.patches import header_grid
        from headway.records.encode_media import (
            MediaEncoder,
            MediaPositions,
            NativePositions,
            place_media,
        )

        assert self.template is not None
        if call.media and self.facts.media_problem:
            raise bad_field(
                "messages",
                f"hold pictures or sounds, which model {self.name!r} cannot take: "
                f"{self.facts.media_problem}",
            )

        # The encoder of conversations with media renders no tools.
        if call.tools:
            raise bad_field(
                "tools",
                f"cannot be used with model {self.name!r}, which takes "
                "pictures and sounds. Leave it out.",
            )

        positions = self.facts.native
        if positions is None:
            positions = MediaPositions(self.facts.media, self.facts.media_missing)
        grids: dict[str, Grid] = {}
        for ref in call.media:
            # A modality that the model does not take is refused by `place_media`.
            if isinstance(positions, NativePositions) and ref.modality in positions.tokens:
                # By the header: bytes of strangers are decoded in another process.
                grids[ref.content_hash()] = header_grid(ref, positions.picture)
        hashes = [ref.content_hash() for ref in call.media]
        items = [(str(ref.modality), name) for ref, name in zip(call.media, hashes, strict=True)]
        placed = place_media(call.turns, items, positions)
        encoder = MediaEncoder(self.tokenizer, self.template, positions, grids=grids)
        document = encoder.prompt(placed, continues=call.continues)
        prepared = self._prepared(
            document.ids.tolist(), call.fields, "messages", grammar, is_chat=True
        )

        # Without features: the engine process makes them of what is decoded later.
        media = PromptMedia(document.items, {}, grids)
        requests = tuple(replace(request, media=media) for request in prepared.requests)
        media_by_hash = dict(zip(hashes, call.media, strict=True))
        return replace(prepared, requests=requests, media=media_by_hash)

    def _grammar(self, call: ChatCall) -> str | None:
        """The grammar that the answer follows: of a schema or of a tool call. None: any text."""
        if call.schema is None and call.tool_choice in ("auto", "none"):
            return None

        if not self.facts.constraints:
            raise bad_field(
                _grammar_field(call),
                f"cannot be followed by model {self.name!r}: llguidance, or "
                "an id that ends a text, is missing.",
            )

        if call.schema is not None:
            return schema_grammar(call.schema)

        if self.tool_format is None:
            raise bad_field(
                "tool_choice",
                "must be auto or none: how the chat template of "
                f"{self.name!r} writes calls is not known.",
            )

        name = None
        if call.tool_choice.startswith("="):
            name = call.tool_choice[1:]
        return call_grammar(self.tool_format, call.tools, name)

    def _text(self, call: TextCall) -> list[PreparedPrompt]:
        """The prompts of a completion, in the prompt thread."""
        all_prepared: list[PreparedPrompt] = []
        for prompt in call.prompts:
            ids = self._ids(prompt, "prompt")
            prepared = self._prepared(ids, call.fields, "prompt", None, is_chat=False)
            if call.echo:
                prepared = self._with_echo(prepared, ids, call.fields)
            all_prepared.append(prepared)
        return all_prepared

    def _with_echo(
        self, prepared: PreparedPrompt, ids: Sequence[int], fields: GenerationFields
    ) -> PreparedPrompt:
        """A prompt whose answer begins with it, and its log-probabilities where they are asked
        for. `max_tokens: 0` asks for these alone.
        """
        wants_logprobs = fields.logprobs is not None
        if fields.max_tokens == 0 and not wants_logprobs:
            raise bad_field(
                "max_tokens",
                "is 0, and no log-probabilities of the prompt are asked for. Give "
                "logprobs or 1 or more.",
            )

        max_new_tokens = prepared.requests[0].max_new_tokens
        if fields.max_tokens == 0:
            max_new_tokens = 0
        requests = tuple(
            replace(request, prompt_logprobs=wants_logprobs, max_new_tokens=max_new_tokens)
            for request in prepared.requests
        )
        echo = self.tokenizer.decode(ids, skip_special=True)
        return replace(prepared, requests=requests, echo=echo)

    def _embeddings(self, call: EmbeddingCall) -> list[EngineRequest]:
        """The engine's requests for vectors, in the prompt thread."""
        if call.dimensions not in (None, self.facts.hidden_size):
            raise bad_field(
                "dimensions",
                f"is {call.dimensions}; model {self.name!r} gives vectors of "
                f"{self.facts.hidden_size}.",
            )
        requests: list[EngineRequest] = []
        for text in call.inputs:
            ids = self._ids(text, "input")
            self._check_room(len(ids), "input")
            requests.append(EngineRequest(tuple(ids), 1, adapter=self.adapter, embed=True))
        return requests

    def _ids(self, prompt: PromptInput, field: str) -> list[int]:
        """The ids of a text, with those that begin a document; ids stay as they are."""
        if isinstance(prompt, tuple):
            # A model may have more embeddings than its tokenizer has ids; they stand for no text.
            vocab = min(self.facts.vocab, self.tokenizer.vocab_size)
            if max(prompt) >= vocab:
                raise bad_field(
                    field,
                    f"has the id {max(prompt)}; the vocabulary of {self.name!r} has {vocab} ids.",
                )

            return list(prompt)

        ids = [*bos_ids(self.tokenizer), *self.tokenizer.encode(prompt)]
        if ids:
            return ids

        # An empty prompt asks for any text: it begins behind the end of another document.
        start = self.tokenizer.bos_id
        if start is None:
            start = self.tokenizer.eos_id
        if start is None or field == "input":
            raise bad_field(field, "is empty. Give some text.")
        return [start]

    def _check_room(self, tokens: int, field: str) -> int:
        """How many tokens an answer may have behind so many."""
        room = self.facts.context - tokens
        if room < 1:
            raise ApiError(
                400,
                f"{field} has {tokens} tokens; the context of model {self.name!r} is "
                f"{self.facts.context} tokens and leaves no room for an answer. Shorten it.",
                field,
                "context_length_exceeded",
            )
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
        """The engine's requests for the samples of one prompt, within the limits of the server."""
        room = self._check_room(len(ids), field)
        server_limit = self.limits.max_tokens
        if (
            fields.max_tokens is not None
            and server_limit is not None
            and fields.max_tokens > server_limit
        ):
            raise bad_field(
                "max_tokens", f"is {fields.max_tokens}; this server makes at most {server_limit}."
            )

        # Only here, because a body is read without knowing its model.
        biased = max((token for token, _ in fields.sampling.logit_bias), default=0)
        if biased >= self.facts.vocab:
            raise bad_field(
                "logit_bias",
                f"has the id {biased}; the vocabulary of {self.name!r} has {self.facts.vocab} ids.",
            )

        max_new_tokens = room
        max_tokens = fields.max_tokens if fields.max_tokens is not None else server_limit
        if max_tokens is not None:
            # 0 is an echo of the prompt alone, which `_with_echo` sets; elsewhere one is the least.
            max_new_tokens = max(1, min(max_tokens, room))

        stop_ids = fields.stop_ids
        if is_chat and not fields.ignore_eos:
            stop_ids = stop_ids | self.answer_ends

        request = EngineRequest(
            prompt=tuple(ids),
            max_new_tokens=max_new_tokens,
            sampling=fields.sampling,
            stop_ids=stop_ids,
            ignore_eos=fields.ignore_eos,
            adapter=self.adapter,
            logprobs=fields.logprobs,
            constraint=grammar,
        )
        # Samples differ by their key, from which their random numbers are drawn.
        return PreparedPrompt(
            tuple(replace(request, key=str(number)) for number in range(fields.n))
        )


def _grammar_field(call: ChatCall) -> str:
    """The field of a body that asks for a grammar."""
    return "tool_choice" if call.schema is None else "response_format"
