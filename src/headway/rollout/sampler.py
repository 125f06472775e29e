"""A copy of the weights that train, in the inference engine: prompts come in, sampled answers with
the log-probability of every token go out.

    refresh(weights)    after an update: the copy is overwritten in place
    sample(requests)    answers, in the order of the requests

The copy lives as long as the run, in the compute dtype: the engine fuses projections and records
decoding steps, which keep pointers to it. What a token becomes depends on the weights, the prompt
and (seed, key, position) alone: neither on the batch nor on the order of completion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from headway.errors import TrainingError
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.request import EngineOptions, EngineRequest
from headway.infer.engine.text import CONTEXT
from headway.infer.load import LoadedModel
from headway.infer.sampling import Sampling
from headway.model.base import build_frozen_model
from headway.model.exact import check_machine
from headway.model.layout import GATES
from headway.model.transformer import Transformer
from headway.rollout.config import Cuts
from headway.rollout.journal import Floats, Ints, KeptIds, Routes

if TYPE_CHECKING:
    from torch import Tensor

    from headway.model.config import ModelConfig
    from headway.tokenizer.load import Tokenizer

Weights = Iterable[tuple[str, "Tensor"]]


@dataclass(frozen=True)
class AnswerRequest:
    """One answer that is wanted."""

    prompt: tuple[int, ...]
    key: str
    """With the seed, it decides every draw."""


@dataclass(frozen=True)
class DrawnAnswer:
    """One answer as it was drawn."""

    ids: tuple[int, ...]
    logprobs: Floats
    finished: str
    text: str
    kept: KeptIds | None = None
    """None: every token was drawn from the whole vocabulary."""
    routes: Routes | None = None
    """The experts of its prompt's tokens and of its own but the last; None where none are kept."""


@dataclass(frozen=True)
class SamplerSettings:
    """What a sampler needs to know of a run."""

    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    end_ids: frozenset[int]
    max_new_tokens: int
    longest_prompt: int
    at_once: int
    cache_bytes: int | None
    seed: int
    folder: Path
    """The run, for messages."""
    routes: bool = False
    """Answers of a mixture of experts come with the experts of their tokens."""
    exact: bool = False
    """Tokens have the bits that the trainer gives them (model/exact.py)."""


def _ignore_round() -> None:
    """What is called between rounds where nobody counts them."""


class PolicySampler:
    """The inference engine over a copy of the weights."""

    def __init__(self, settings: SamplerSettings, tokenizer: Tokenizer, weights: Weights) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.version = -1
        """Updates of the weights in the copy."""
        model = build_frozen_model(settings.model, weights, settings.device, settings.dtype)
        loaded = LoadedModel(
            model,
            # As `build_frozen_model` made it: gates that still train are no part of the copy.
            settings.model.with_(head_gates=None),
            tokenizer,
            settings.folder,
            settings.end_ids,
        )
        # Models of transformers and of users choose their experts themselves.
        is_routed = settings.model.experts is not None and isinstance(model, Transformer)
        self._keeps_routes = settings.routes and is_routed
        context = min(settings.model.max_seq_len, settings.longest_prompt + settings.max_new_tokens)
        options = EngineOptions(
            cache_bytes=settings.cache_bytes,
            max_running=settings.at_once,
            # All answers of a rollout wait in the queue, which must refuse none.
            max_waiting=1 << 30,
            max_context=context,
            compile_blocks="auto",
            exact=settings.exact,
            routes=self._keeps_routes,
        )
        self._engine = InferenceEngine(loaded, options)
        if settings.exact:
            assert isinstance(model, Transformer)
            check_machine(model)
        # Only now: the engine may have joined projections, whose parameters are views since then.
        self._parameters = dict(model.named_parameters())

    @torch.no_grad()
    def refresh(self, weights: Weights, version: int) -> None:
        """Overwrite the copy. What was computed with the old weights is forgotten."""
        for name, value in weights:
            if name != GATES:
                self._parameters[name].copy_(value)
        # Keys and values of the old weights: a prompt that begins alike must not find them.
        self._engine.cache.forget_all()
        self.version = version

    def sample(
        self,
        requests: Sequence[AnswerRequest],
        temperature: float,
        on_round: Callable[[], object] = _ignore_round,
        cuts: Cuts = Cuts(),
    ) -> list[DrawnAnswer]:
        """The answers to some requests, in their order; `on_round` is called again and again."""
        sampling = Sampling(
            temperature=temperature,
            top_k=cuts.top_k,
            top_p=cuts.top_p,
            min_p=cuts.min_p,
            seed=self.settings.seed,
            # Without cuts there is nothing to sort.
            by_id=temperature > 0 and cuts == Cuts(),
        )
        # A prompt is computed once: its first answer fills the cache, and the other answers wait
        # until they can begin there.
        first, others = _in_order(requests)
        running = {self._submit(requests[index], sampling): index for index in first}
        ids: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        kept: list[list[Ints]] = [[] for _ in requests]
        routes: list[Routes | None] = [None] * len(requests)
        finished = [""] * len(requests)
        unread = set(first)

        while self._engine.busy or others:
            on_round()
            for event in self._engine.step():
                index = running[event.request]
                unread.discard(index)
                if event.error is not None:
                    raise TrainingError(f"rollout: an answer failed: {event.error}")
                ids[index] += event.tokens
                for entry in event.logprobs or ():
                    logprobs[index].append(entry.logprob)
                    if entry.kept is not None:
                        kept[index].append(entry.kept)
                if event.finished is not None:
                    finished[index] = event.finished
                    routes[index] = event.routes
            # Their prompts are in the cache now: the other answers to them begin there.
            if not unread and others:
                running |= {self._submit(requests[index], sampling): index for index in others}
                others = []
        return [
            DrawnAnswer(
                tuple(ids[index]),
                np.array(logprobs[index], np.float32),
                finished[index],
                self._text(request.prompt, ids[index]),
                _joined(kept[index]),
                routes[index],
            )
            for index, request in enumerate(requests)
        ]

    def _submit(self, request: AnswerRequest, sampling: Sampling) -> int:
        return self._engine.submit(
            EngineRequest(
                request.prompt,
                self.settings.max_new_tokens,
                sampling=sampling,
                key=request.key,
                # Of the token alone, without candidates. At temperature 0 nothing is drawn, and its
                # log-probability is that of the model.
                logprobs=0,
                drawn_logprobs=sampling.temperature > 0,
                routes=self._keeps_routes,
            )
        )

    def _text(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """The text of a whole answer. One decoding, where a stream needs one for each token."""
        # Behind the end of the prompt, as in a stream: some tokenizers drop the first space of a text.
        tail = list(prompt)[-CONTEXT:]
        before = len(self.tokenizer.decode_bytes(tail, skip_special=True))
        whole = self.tokenizer.decode_bytes([*tail, *ids], skip_special=True)
        # Cut in bytes: the last token of a prompt may end within a character.
        return whole[before:].decode("utf-8", "replace")


def _joined(kept: Sequence[Ints]) -> KeptIds | None:
    """The kept ids of every token of an answer; None where the sampling was not cut."""
    if not kept:
        return None
    counts = np.array([len(ids) for ids in kept], np.int32)
    return KeptIds(counts, np.concatenate(kept))


def _in_order(requests: Sequence[AnswerRequest]) -> tuple[list[int], list[int]]:
    """The order in which requests are submitted: the first answer to every prompt, then all others.

    Long prompts come first; equal lengths keep their order. The rule depends on the data alone.
    """
    seen: set[tuple[int, ...]] = set()
    first: list[int] = []
    others: list[int] = []
    for index in sorted(range(len(requests)), key=lambda index: -len(requests[index].prompt)):
        prompt = requests[index].prompt
        if prompt in seen:
            others.append(index)
        else:
            seen.add(prompt)
            first.append(index)
    return first, others
