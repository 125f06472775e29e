"""A model as lm-evaluation-harness needs it: texts come in, log-likelihoods and continuations go out.

loglikelihood   (context, continuation) -> (sum of log-probabilities of the continuation, whether each token was the first choice)
rolling         text                    -> log-probability of the whole text, in adjacent windows
generate        (context, settings)     -> continuation, truncated before the first stop text

Ids, windows and stops equal those of the harness's own model for Hugging Face folders, so both give the same results. Over several ranks
each computes its share of the batches, and all get every result.
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
                f"{loaded.path}: holds no tokenizer, and tasks need one. Put tokenizer.json and tokenizer_config.json there."
            )
        check_windows(None, None, batch_tokens)
        self.loaded, self.tokenizer, self.batch_tokens, self.group = (
            loaded,
            loaded.tokenizer,
            batch_tokens,
            group,
        )
        self.limit = loaded.config.max_seq_len

    @property
    def prefix(self) -> int:
        """The id put before a text without context."""
        first = (
            self.tokenizer.bos_id if self.tokenizer.bos_id is not None else self.tokenizer.eos_id
        )
        if first is None:
            raise ConfigError(
                f"{self.loaded.path}: its tokenizer has neither a begin nor an end token, which a text without context needs."
            )
        return first

    def encode(self, text: str, *, opening: bool = True) -> list[int]:
        """Ids of a text, behind the tokenizer's own opening unless the text has it already; special tokens in it are those tokens."""
        from headway.tokenizer.chat import bos_ids

        ids = self.tokenizer.encode(text, allowed_special="all")
        before = bos_ids(self.tokenizer) if opening else []
        return ids if ids[: len(before)] == before else [*before, *ids]

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Of each continuation behind its context."""
        return self._scored([self._pair(context, continuation) for context, continuation in pairs])

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Of each whole text."""
        windows: list[tuple[list[int], list[int]]] = []
        owner: list[int] = []
        for index, text in enumerate(texts):
            for one in self._windows(self.encode(text)):
                windows.append(one)
                owner.append(index)
        sums = [0.0] * len(texts)
        for index, (value, _) in zip(owner, self._scored(windows), strict=True):
            sums[index] += value
        return sums

    def generate(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """A continuation of each context."""
        from headway.infer.generate import generate_from_ids

        found: dict[int, str] = {}
        plans = [
            (index, context, *generate_options(settings))
            for index, (context, settings) in enumerate(requests)
        ]
        for options in dict.fromkeys(plan[2] for plan in plans):
            room = self.limit - options.max_new_tokens
            if room < 1:
                raise ConfigError(
                    f"a task requests {options.max_new_tokens} new tokens; the model's max_seq_len={self.limit} leaves no room for its "
                    "text. Give its generation_kwargs a smaller max_gen_toks."
                )
            share = self._share([plan for plan in plans if plan[2] == options])
            prompts = [
                (context, (self.encode(context) or [self.prefix])[-room:])
                for _, context, _, _ in share
            ]
            rows = max(
                1,
                self.batch_tokens
                // (max((len(ids) for _, ids in prompts), default=0) + options.max_new_tokens),
            )
            made_all = generate_from_ids(self.loaded, prompts, replace(options, rows=rows))
            for (index, _, _, until), made in zip(share, made_all, strict=True):
                found[index] = _cut_text(
                    self.tokenizer.decode(made.token_ids, skip_special=True), until
                )
        return self._together(found, len(requests))

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if not context:
            ids = self.encode(continuation, opening=False)
            return ([self.prefix], ids) if ids[:1] != [self.prefix] else (ids[:1], ids[1:])
        # A space at the end of the context is the beginning of the continuation's first word.
        bare = context.rstrip()
        whole, before = self.encode(context + continuation), self.encode(bare)
        return before, whole[len(before) :]

    def _windows(self, ids: list[int]) -> list[tuple[list[int], list[int]]]:
        """(context, scored) of each window: the first behind the prefix, later ones full of context, every token scored once."""
        found: list[tuple[list[int], list[int]]] = []
        if ids:
            found.append(([self.prefix], ids[: self.limit]))
        for begin in range(self.limit, len(ids), self.limit):
            end = min(begin + self.limit, len(ids))
            found.append((ids[end - self.limit - 1 : begin], ids[begin:end]))
        return found

    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        rows: list[ScoreWindow] = []
        for index, (before, scored) in enumerate(pairs):
            if not scored:
                raise DataError(
                    "a task requests the likelihood of an empty text. Every choice or text of a task must have at least one token."
                )
            if len(scored) > self.limit:
                raise ConfigError(
                    f"a task has an answer of {len(scored)} tokens; the model's max_seq_len is {self.limit}."
                )
            ids = [*before, *scored][-(self.limit + 1) :]
            rows.append(ScoreWindow(ids, max(1, len(ids) - len(scored)), index))
        found: dict[int, tuple[float, bool]] = {}
        batches = self._share(list(sorted_batches(rows, self.batch_tokens)))
        with progress(
            "score", total=sum(len(batch) for batch in batches), unit="requests"
        ) as advance:
            for batch in batches:
                found |= self._sums(batch)
                advance(len(batch))
        return self._together(found, len(pairs))

    def _sums(self, batch: Sequence[ScoreWindow]) -> dict[int, tuple[float, bool]]:
        scores = score(self.loaded, batch)
        if not np.isfinite(scores.nll).all():
            raise CheckpointError(
                f"{self.loaded.path}: its loss is not finite. The weights are damaged, or overflow in this precision."
            )
        nll, wrong = (
            np.bincount(scores.row, weights=w, minlength=len(batch))
            for w in (scores.nll, 1 - scores.correct)
        )
        return {
            int(row.label or 0): (-float(nll[at]), bool(wrong[at] == 0))
            for at, row in enumerate(batch)
        }

    def _share(self, work: list[T]) -> list[T]:
        return work if self.group is None else work[self.group.rank :: self.group.size]

    def _together(self, found: dict[int, T], count: int) -> list[T]:
        """Everyone's answers in the order of the requests."""
        everyone = [found] if self.group is None else self.group.gather(found)
        answers = {index: answer for one in everyone for index, answer in one.items()}
        return [answers[index] for index in range(count)]


def generate_options(settings: Mapping[str, Any]) -> tuple[GenerateOptions, tuple[str, ...]]:
    """How to generate by a task's `generation_kwargs`, and its stop texts; settings that headway does not have are refused."""
    from headway.infer.generate import GenerateOptions
    from headway.infer.sampling import Sampling

    left = dict(settings)
    lengths = [value for key in LENGTH_KEYS if (value := left.pop(key, None)) is not None]
    until = left.pop("until", None) or []
    stops = tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)
    sample, temperature = left.pop("do_sample", None), left.pop("temperature", None)
    if temperature is None:
        temperature = 1.0 if sample else 0.0
    among = {key: value for key in ("top_k", "top_p") if (value := left.pop(key, None))}
    # Without sampling the likeliest token is taken, which is always among them.
    choice: dict[str, Any] = (
        {"temperature": float(temperature), **among}
        if sample is not False and temperature > 0
        else {}
    )
    for key, value in left.items():
        if value not in NEUTRAL.get(key, ()):
            raise ConfigError(
                f"a task's generation_kwargs has {key} {value!r}, which headway does not support. Remove it from the task."
            )
    return GenerateOptions(
        int(lengths[0]) if lengths else MAX_NEW_TOKENS,
        stop=stops,
        special=True,
        sampling=Sampling(**choice),
    ), stops


def _cut_text(text: str, stops: Sequence[str]) -> str:
    for stop in stops:
        text = text.split(stop)[0]
    return text
