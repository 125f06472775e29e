"""Answers of a chat from an engine in this process: turns come in, ids go through the engine, pieces of text go out.

The engine lives as long as the conversation. What it has computed for earlier turns it keeps, and does not compute again.
"""

from __future__ import annotations

import json
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
from headway.infer.generate import GenerateOptions
from headway.infer.load import LoadedModel
from headway.infer.stream import Say
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
"""A conversation is shortened when less than this part of the context (1/n) is left for an answer that may be as long."""


class EngineResponder:
    """A loaded model with its chat template."""

    def __init__(self, loaded: LoadedModel, template: str | None, name: str | None = None) -> None:
        if loaded.tokenizer is None:
            raise ConfigError(
                f"{loaded.path}: holds no tokenizer. Put tokenizer.json and tokenizer_config.json there."
            )
        if template is None and loaded.tokenizer.chat_template is None:
            raise ConfigError(
                f"{loaded.path}: its tokenizer has no chat template, so it was not trained on conversations. "
                f"Give --chat-template ({', '.join(BUILT_IN)}), or use headway generate."
            )
        self.loaded, self.tokenizer = loaded, loaded.tokenizer
        self.name = name or str(loaded.path)
        self._template = find_template(template or TOKENIZER_TEMPLATE, self.tokenizer)
        self._ends = answer_end(self._template, self.tokenizer)
        self._engine: InferenceEngine | None = None
        self._features: dict[str, np.ndarray] = {}
        """Of the media of the conversation, by content hash."""
        self._cache_bytes = 0
        """That the last answer took."""

    @property
    def takes(self) -> frozenset[Modality]:
        """Media the model was trained with."""
        media = self.loaded.config.media
        known = {one.modality for one in media.inputs} if media is not None else set[str]()
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
        wanted = 1 if is_last_try else min(options.max_new_tokens, self.context // ANSWER_SHARE)
        if self.context - len(ids) < wanted:
            raise ContextFull(
                f"prompt has {len(ids)} tokens; the model's max_seq_len={self.context} leaves no room after it. Shorten the prompt."
            )
        request = EngineRequest(
            tuple(ids), options.max_new_tokens, options.sampling, key=f"{attempt}:{name}",
            stop_ids=frozenset((*options.stop_ids, *self._ends)), media=prompt_media,
        )  # fmt: skip
        return self._run(request, options, say)

    def _prompt(
        self, turns: Sequence[Turn], media: Sequence[MediaRef]
    ) -> tuple[str, list[int], PromptMedia | None]:
        if self.loaded.config.media is not None:
            from headway.infer.media import MediaQuestion, media_prompts

            found = media_prompts(
                self.loaded,
                [MediaQuestion(tuple(turns), tuple(media))],
                self._template,
                self._features,
            )[0]
            self._features = dict(found.media.features)
            return found.name, found.ids, found.media
        name = turns[0].content if len(turns) == 1 else json.dumps([turn.content for turn in turns])
        return name, render_prompt(turns, self._template, self.tokenizer), None

    def _run(self, request: EngineRequest, options: GenerateOptions, say: Say) -> ChatAnswer:
        engine = self._open(options)
        text, said = (
            RequestText(self.tokenizer, request.prompt[-CONTEXT:], options.stop),
            list[str](),
        )
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

        was_interrupted, interrupt = False, _InterruptFlag()
        try:
            with interrupt:
                while engine.busy and not text.stopped and not interrupt.is_set:
                    events = engine.step()
                    self._cache_bytes = engine.stats().cache_bytes_used or self._cache_bytes
                    for event in events:
                        if event.error is not None:
                            raise ConfigError(event.error)
                        first = first if tokens or not event.tokens else time.monotonic()
                        tokens += len(event.tokens)
                        cached = max(cached, event.cached_tokens)
                        was_cut = event.finished in ("length", "context")
                        tell(text.add(event.tokens))
                was_interrupted = interrupt.is_set and engine.busy
            tell(text.finish())
        except KeyboardInterrupt:
            was_interrupted = True
            if (
                interrupt.is_set
            ):  # the second one, in the middle of a step: what the engine holds may be half written
                self._engine = None
        except BaseException:
            self._engine = None
            raise
        if self._engine is not None:
            self._drain(engine, number)
        stats = ChatStats(
            len(request.prompt), cached, tokens, first - begun, time.monotonic() - begun
        )
        return ChatAnswer("".join(said), was_interrupted, was_cut and not text.stopped, stats=stats)

    def _drain(self, engine: InferenceEngine, number: int) -> None:
        if engine.busy:
            engine.cancel(number)
        while engine.busy:
            engine.step()

    def _open(self, options: GenerateOptions) -> InferenceEngine:
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
        """Context and cache."""
        found: dict[str, Any] = {"context": self.context}
        if self._engine is not None:
            found |= {
                "cache_bytes": self._cache_bytes,
                "cache_budget_bytes": self._engine.stats().cache_bytes_budget,
            }
        return found


class _InterruptFlag:
    """Ctrl-C sets a flag between two steps of the engine instead of breaking one in the middle; a second one breaks it."""

    def __init__(self) -> None:
        self.is_set = False
        self._before: Any = None
        self._is_installed = False

    def __enter__(self) -> _InterruptFlag:
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
        if self._is_installed:
            signal.signal(
                signal.SIGINT,
                self._before if self._before is not None else signal.default_int_handler,
            )

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
