"""Answers of a chat from an engine in this process: turns come in, ids go through the engine,
pieces of text go out.

The engine lives as long as the conversation. What it has computed for earlier turns it keeps, and
does not compute again.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError
from headway.infer.chat import ChatAnswer, ChatStats, ContextFull
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.request import EngineOptions, EngineRequest, PromptMedia, RequestTooLarge
from headway.infer.engine.text import CONTEXT, RequestText
from headway.infer.generate import conversation_name
from headway.infer.generate_options import GenerateOptions, Say
from headway.infer.load import LoadedModel
from headway.media.items import MODALITIES, MediaRef, Modality
from headway.tokenizer.chat import (
    TOKENIZER_TEMPLATE,
    Turn,
    answer_end,
    find_template,
    render_prompt,
)
from headway.tokenizer.chat_template import BUILT_IN

if TYPE_CHECKING:
    import numpy as np

ANSWER_SHARE = 4
"""A conversation is shortened when less than this part of the context (1/n) is left for an answer
that may be as long."""


class EngineResponder:
    """Answers with a model in this process: a chat template and an engine of one request at a
    time."""

    def __init__(self, loaded: LoadedModel, template: str | None, name: str | None = None) -> None:
        tokenizer = loaded.require_tokenizer()
        if template is None and tokenizer.chat_template is None:
            raise ConfigError(
                f"{loaded.path}: its tokenizer has no chat template, so it was not trained on "
                f"conversations. Give --chat-template ({', '.join(BUILT_IN)}), or use headway "
                "generate."
            )
        self.loaded = loaded
        self.tokenizer = tokenizer
        self.name = name or str(loaded.path)
        self._template = find_template(template or TOKENIZER_TEMPLATE, self.tokenizer)
        self._ends = answer_end(self._template, self.tokenizer)
        self._engine: InferenceEngine | None = None
        self._features: dict[str, np.ndarray] = {}
        """Features [vectors, width] of the conversation's media by content hash: each is encoded
        once.
        """
        self._cache_bytes = 0
        """Bytes of the cache while the last answer was computed."""

    @property
    def takes(self) -> frozenset[Modality]:
        """Kinds of media that the model was trained with."""
        if self.loaded.config.vision is not None:
            return frozenset({"image"})
        media = self.loaded.config.media
        if media is None:
            return frozenset()
        known = {media_input.modality for media_input in media.inputs}
        return frozenset(kind for kind in MODALITIES if kind in known)

    @property
    def context(self) -> int:
        """Tokens that the model's context holds."""
        return self.loaded.config.max_seq_len

    def answer(
        self,
        turns: Sequence[Turn],
        media: Sequence[MediaRef],
        options: GenerateOptions,
        say: Say,
        *,
        attempt: int = 0,
        is_last_try: bool = False,
    ) -> ChatAnswer:
        """The next turn."""
        name, ids, prompt_media = self._prompt(turns, media)
        # Room for one token is enough where nothing can be left out any more.
        wanted = 1
        if not is_last_try:
            wanted = min(options.max_new_tokens, self.context // ANSWER_SHARE)
        if self.context - len(ids) < wanted:
            raise ContextFull(
                f"prompt has {len(ids)} tokens; the model's max_seq_len={self.context} leaves no "
                "room after it. Shorten the prompt."
            )
        request = EngineRequest(
            tuple(ids),
            options.max_new_tokens,
            options.sampling,
            # another attempt at the same question draws other numbers
            key=f"{attempt}:{name}",
            stop_ids=frozenset((*options.stop_ids, *self._ends)),
            media=prompt_media,
        )
        return self._run(request, options, say)

    def _prompt(
        self, turns: Sequence[Turn], media: Sequence[MediaRef]
    ) -> tuple[str, list[int], PromptMedia | None]:
        if self.loaded.config.media is not None or media:
            from headway.infer.media import MediaQuestion, media_prompts

            prompt = media_prompts(
                self.loaded,
                [MediaQuestion(tuple(turns), tuple(media))],
                self._template,
                self._features,
            )[0]
            # What this conversation no longer sends is dropped.
            self._features = dict(prompt.media.features)
            return prompt.name, prompt.ids, prompt.media
        return conversation_name(turns), render_prompt(turns, self._template, self.tokenizer), None

    def _run(self, request: EngineRequest, options: GenerateOptions, say: Say) -> ChatAnswer:
        engine = self._open(options)
        text = RequestText(self.tokenizer, request.prompt[-CONTEXT:], options.stop)
        said = list[str]()
        begun = first = time.monotonic()
        tokens = cached = 0
        was_cut = False
        try:
            number = engine.submit(request)
        except RequestTooLarge as problem:  # the cache is smaller than the context
            raise ContextFull(str(problem)) from None

        def tell(piece: str) -> None:
            if piece:
                said.append(piece)
                say(piece)

        was_interrupted = False
        interrupt = _InterruptFlag()
        try:
            with interrupt:
                while engine.busy and not text.stopped and not interrupt.is_set:
                    events = engine.step()
                    # Nothing is in use after the last token; the number before that is of interest.
                    self._cache_bytes = engine.stats().cache_bytes_used or self._cache_bytes
                    for event in events:
                        if event.error is not None:
                            raise ConfigError(event.error)
                        if event.tokens and not tokens:
                            first = time.monotonic()
                        tokens += len(event.tokens)
                        cached = max(cached, event.cached_tokens)
                        was_cut = event.finished in ("length", "context")
                        tell(text.add(event.tokens))
                # A flag that was set after the last token has interrupted nothing.
                was_interrupted = interrupt.is_set and engine.busy
            tell(text.finish())
        except KeyboardInterrupt:
            was_interrupted = True
            if interrupt.is_set:
                # The second one, in the middle of a step: what the engine holds may be half
                # written.
                self._engine = None
        except BaseException:
            # The next answer begins with a new engine, whatever state this one is in.
            self._engine = None
            raise
        if self._engine is not None:
            self._drain(engine, number)
        stats = ChatStats(
            len(request.prompt), cached, tokens, first - begun, time.monotonic() - begun
        )
        return ChatAnswer("".join(said), was_interrupted, was_cut and not text.stopped, stats=stats)

    def _drain(self, engine: InferenceEngine, number: int) -> None:
        """Let the engine finish what is on its way: the next answer must not find results of this
        one."""
        if engine.busy:
            engine.cancel(number)
        while engine.busy:
            engine.step()

    def _open(self, options: GenerateOptions) -> InferenceEngine:
        """The engine of the conversation, made when something is first asked."""
        if self._engine is None:
            self._engine = InferenceEngine(
                self.loaded,
                EngineOptions(
                    max_running=1,
                    max_waiting=1,
                    prefill_tokens=options.chunk_tokens,
                    speculation=options.speculation,
                ),
            )
        return self._engine

    def describe(self) -> dict[str, Any]:
        """The context in tokens; once something was asked, the cache in bytes."""
        facts: dict[str, Any] = {"context": self.context}
        if self._engine is not None:
            facts |= {
                "cache_bytes": self._cache_bytes,
                "cache_budget_bytes": self._engine.stats().cache_bytes_budget,
            }
        return facts


class _InterruptFlag:
    """Ctrl-C sets a flag between two steps of the engine instead of breaking one in the middle; a
    second one breaks it."""

    def __init__(self) -> None:
        self.is_set = False
        self._before: Any = None
        self._is_installed = False

    def __enter__(self) -> _InterruptFlag:
        # Python allows handlers in the main thread only; elsewhere Ctrl-C stays as it is.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._receive)
            self._is_installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A handler that was not set from Python is reported as None and cannot be put back.
        if self._is_installed:
            signal.signal(
                signal.SIGINT,
                self._before if self._before is not None else signal.default_int_handler,
            )

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
