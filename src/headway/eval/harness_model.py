"""A model as lm-evaluation-harness needs it: texts come in, log-likelihoods and continuations go
out.

    loglikelihood   (context, continuation) -> (sum of log-probabilities of the continuation,
                                               whether each token was the first choice)
    rolling         text                    -> log-probability of the whole text
    generate        (context, settings)     -> continuation, truncated before the first stop text

Ids, windows and stops equal those of the harness's own model for Hugging Face folders
(`lm_eval.models.huggingface.HFLM`), so both give the same results. Over several ranks each computes
its share of the batches, and all get every result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from headway.errors import CheckpointError, ConfigError, DataError
from headway.eval.perplexity import BATCH_TOKENS, check_windows
from headway.eval.scoring import ScoreWindow, score, sorted_batches
from headway.runtime.progress import progress

if TYPE_CHECKING:
    from headway.infer.generate import GenerateOptions
    from headway.infer.load import LoadedModel
    from headway.parallel.collectives import RankGroup

T = TypeVar("T")

MAX_NEW_TOKENS = 256
"""The harness's default where a task sets no length."""
LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names under which tasks set a length, the first that is set wins."""
# Settings of generation that change nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1, None),
    "repetition_penalty": (1, None),
    "use_cache": (True, None),
}


class HarnessModel:
    """A loaded model behind the three requests of the harness."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        batch_tokens: int = BATCH_TOKENS,
        group: RankGroup | None = None,
    ) -> None:
        if loaded.tokenizer is None:
            raise ConfigError(
                f"{loaded.path}: holds no tokenizer, and tasks need one. Put tokenizer.json and "
                "tokenizer_config.json there."
            )
        check_windows(None, None, batch_tokens)
        self.loaded = loaded
        self.tokenizer = loaded.tokenizer
        self.batch_tokens = batch_tokens
        self.group = group
        self.limit = loaded.config.max_seq_len

    @property
    def begin_id(self) -> int:
        """The id put before a text without context; `prefix_token_id` in the harness."""
        begin_id = self.tokenizer.bos_id
        if begin_id is None:
            begin_id = self.tokenizer.eos_id
        if begin_id is None:
            raise ConfigError(
                f"{self.loaded.path}: its tokenizer has neither a begin nor an end token, which a "
                "text without context needs."
            )
        return begin_id

    def encode(self, text: str, *, opening: bool = True) -> list[int]:
        """Ids of a text; special tokens that are written in it are those tokens.

        With `opening` they stand behind the tokenizer's begin token, if it has one and the text
        does not begin with it already.
        """
        from headway.tokenizer.chat import bos_ids

        ids = self.tokenizer.encode(text, allowed_special="all")
        begin_ids = []
        if opening:
            begin_ids = bos_ids(self.tokenizer)
        if ids[: len(begin_ids)] == begin_ids:
            return ids
        return [*begin_ids, *ids]

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation behind its context, and whether it is the greedy
        one.
        """
        return self._score([self._pair(context, continuation) for context, continuation in pairs])

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Log-probability of each whole text."""
        windows: list[tuple[list[int], list[int]]] = []
        text_indices: list[int] = []
        for index, text in enumerate(texts):
            for window in self._windows(self.encode(text)):
                windows.append(window)
                text_indices.append(index)

        sums = [0.0] * len(texts)
        for index, (log_probability, _) in zip(text_indices, self._score(windows), strict=True):
            sums[index] += log_probability
        return sums

    def generate(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """A continuation of each context."""
        from headway.infer.generate import generate_from_ids

        # (number of the request, context, options, stop texts)
        numbered = [
            (index, context, *generate_options(settings))
            for index, (context, settings) in enumerate(requests)
        ]

        # Requests with the same options form batches; a dict keeps the order of the options.
        texts: dict[int, str] = {}
        for options in dict.fromkeys(request[2] for request in numbered):
            room = self.limit - options.max_new_tokens
            if room < 1:
                raise ConfigError(
                    f"a task requests {options.max_new_tokens} new tokens; the model's "
                    f"max_seq_len={self.limit} leaves no room for its "
                    "text. Give its generation_kwargs a smaller max_gen_toks."
                )

            # A context that is too long loses its beginning, as in the harness.
            share = self._share([request for request in numbered if request[2] == options])
            prompts: list[tuple[str, list[int]]] = []
            for _, context, _, _ in share:
                ids = self.encode(context) or [self.begin_id]
                prompts.append((context, ids[-room:]))

            longest = max((len(ids) for _, ids in prompts), default=0) + options.max_new_tokens
            rows = max(1, self.batch_tokens // longest)
            generations = generate_from_ids(self.loaded, prompts, replace(options, rows=rows))
            for (index, _, _, stops), generation in zip(share, generations, strict=True):
                text = self.tokenizer.decode(generation.token_ids, skip_special=True)
                texts[index] = _cut_text(text, stops)
        return self._gather(texts, len(requests))

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of a context and of its continuation, split where the harness splits them."""
        if not context:
            ids = self.encode(continuation, opening=False)
            if ids[:1] != [self.begin_id]:
                return ([self.begin_id], ids)
            return (ids[:1], ids[1:])

        # A space at the end of the context is the beginning of the continuation's first word. Both
        # are encoded together, since a token may reach over the border.
        whole = self.encode(context + continuation)
        before = self.encode(context.rstrip())
        return before, whole[len(before) :]

    def _windows(self, ids: list[int]) -> list[tuple[list[int], list[int]]]:
        """(context, scored) of each window; every token is scored once.

        The first window stands behind the begin id. A later one is filled up with context: only the
        last has room for more than one token of it. Equals the harness's
        `get_rolling_token_windows` with `make_disjoint_window`.
        """
        windows: list[tuple[list[int], list[int]]] = []
        if ids:
            windows.append(([self.begin_id], ids[: self.limit]))
        for begin in range(self.limit, len(ids), self.limit):
            end = min(begin + self.limit, len(ids))
            windows.append((ids[end - self.limit - 1 : begin], ids[begin:end]))
        return windows

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Log-probability of the scored ids of each (context, scored), and whether all are greedy."""
        rows: list[ScoreWindow] = []
        for index, (before, scored) in enumerate(pairs):
            if not scored:
                raise DataError(
                    "a task requests the likelihood of an empty text. Every choice or text of a "
                    "task must have at least one token."
                )
            if len(scored) > self.limit:
                raise ConfigError(
                    f"a task has an answer of {len(scored)} tokens; the model's max_seq_len is "
                    f"{self.limit}."
                )
            # One more than the model reads: the last id is only predicted, never read.
            ids = [*before, *scored][-(self.limit + 1) :]
            rows.append(ScoreWindow(ids, max(1, len(ids) - len(scored)), index))

        results: dict[int, tuple[float, bool]] = {}
        batches = self._share(list(sorted_batches(rows, self.batch_tokens)))
        num_requests = sum(len(batch) for batch in batches)
        with progress("score", total=num_requests, unit="requests") as advance:
            for batch in batches:
                results |= self._score_batch(batch)
                advance(len(batch))
        return self._gather(results, len(pairs))

    def _score_batch(self, batch: Sequence[ScoreWindow]) -> dict[int, tuple[float, bool]]:
        """The results of one batch, by the index of their request, which is the window's label."""
        scores = score(self.loaded, batch)
        if not np.isfinite(scores.nll).all():
            raise CheckpointError(
                f"{self.loaded.path}: its loss is not finite. The weights are damaged, or "
                "overflow in this precision."
            )

        nll = np.bincount(scores.row, weights=scores.nll, minlength=len(batch))
        wrong = np.bincount(scores.row, weights=1 - scores.correct, minlength=len(batch))
        return {
            int(row.label or 0): (-float(nll[index]), bool(wrong[index] == 0))
            for index, row in enumerate(batch)
        }

    def _share(self, work: list[T]) -> list[T]:
        """What this rank computes of a list that is the same on every rank."""
        if self.group is None:
            return work
        return work[self.group.rank :: self.group.size]

    def _gather(self, results: dict[int, T], count: int) -> list[T]:
        """The results of all ranks in the order of the requests, on every rank."""
        by_request = dict(results)
        if self.group is not None:
            for rank_results in self.group.gather(results):
                by_request |= rank_results
        return [by_request[index] for index in range(count)]


def generate_options(settings: Mapping[str, Any]) -> tuple[GenerateOptions, tuple[str, ...]]:
    """How to generate by a task's `generation_kwargs`, and its stop texts.

    Settings that headway does not have are refused, unless their value changes nothing.
    """
    from headway.infer.generate import GenerateOptions
    from headway.infer.sampling import Sampling

    # Settings are taken out one by one; what is left in the end is unknown.
    left = dict(settings)
    lengths = [value for key in LENGTH_KEYS if (value := left.pop(key, None)) is not None]
    max_new_tokens = MAX_NEW_TOKENS
    if lengths:
        max_new_tokens = int(lengths[0])

    until = left.pop("until", None) or []
    if isinstance(until, str):
        until = [until]
    stops = tuple(stop for stop in until if stop)

    do_sample = left.pop("do_sample", None)
    temperature = left.pop("temperature", None)
    if temperature is None:
        temperature = 1.0 if do_sample else 0.0
    limits = {key: value for key in ("top_k", "top_p") if (value := left.pop(key, None))}
    # Without sampling the likeliest token is taken, which no limit excludes.
    sampling: dict[str, Any] = {}
    if do_sample is not False and temperature > 0:
        sampling = {"temperature": float(temperature), **limits}

    for key, value in left.items():
        if value not in NEUTRAL.get(key, ()):
            raise ConfigError(
                f"a task's generation_kwargs has {key} {value!r}, which headway does not support. "
                "Remove it from the task."
            )

    options = GenerateOptions(
        max_new_tokens, stop=stops, special=True, sampling=Sampling(**sampling)
    )
    return options, stops


def _cut_text(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop. Generation may end with the token that completes a stop."""
    for stop in stops:
        text = text.split(stop)[0]
    return text
