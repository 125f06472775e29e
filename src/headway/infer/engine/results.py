"""Tokens on their way from the device to the host, with what was asked about them. Nothing waits until `read`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headway.infer.engine.device import EngineDevice
from headway.infer.engine.request import TokenLogprobs, failure_line
from headway.infer.engine.rounds import PieceOf
from headway.infer.engine.sampler import NO_TOKEN, RowChoice, Sampler
from headway.infer.engine.sequence import EngineSequence
from headway.infer.sampling import Sampling
from headway.model.cache_blocks import to_device

LOGPROB_TOKENS = 512
"""Prompt tokens whose log-probabilities exist at one time."""
NOTHING_FOLLOWS = (
    "no token can follow: under its penalties, biases and grammar, no score is a finite number."
)


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What one sequence gained."""

    sequence: EngineSequence
    token: int | None
    logprobs: TokenLogprobs | None = None
    embedding: tuple[float, ...] | None = None
    error: str | None = None
    """Why it cannot be continued."""
    was_chosen: bool = True
    """A token was in flight for it."""


def chosen_token(
    sequence: EngineSequence, token: int, logprobs: TokenLogprobs | None = None
) -> SequenceResult:
    """A token as the sampler gives it."""
    if token == NO_TOKEN:
        return SequenceResult(sequence, None, error=NOTHING_FOLLOWS)
    return SequenceResult(sequence, token, logprobs)


class HostTensors:
    """Tensors on their way to the host."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            self._tensors = [
                torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(
                    one, non_blocking=True
                )
                for one in tensors
            ]
            event = self._event = torch.cuda.Event()
            event.record()
        else:
            self._tensors = [one.clone() for one in tensors]

    def read(self) -> list[torch.Tensor]:
        """The tensors; waits until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


class PendingTokens:
    """One new token of each of some sequences."""

    def __init__(
        self,
        rows: Sequence[EngineSequence],
        tokens: torch.Tensor,
        scored: list[int],
        scores: list[torch.Tensor],
        failures: Mapping[int, str] = {},
    ) -> None:
        """`scored`: the rows whose log-probabilities are in `scores`; `failures`: why some rows have no token."""
        self.rows = list(rows)
        self._scored = scored
        self._failures = failures
        self._copy = HostTensors([tokens, *scores])

    def read(self) -> list[SequenceResult]:
        """Of every sequence."""
        tokens, *scores = self._copy.read()
        values: list[int] = tokens.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(values)
        if self._scored:
            chosen, ids, tops = (one.tolist() for one in scores)
            for place, row in enumerate(self._scored):
                count = self.rows[row].request.logprobs or 0
                top = tuple(zip(ids[place][:count], tops[place][:count], strict=True))
                logprobs[row] = TokenLogprobs(values[row], chosen[place], top)
        results: list[SequenceResult] = []
        for row, sequence in enumerate(self.rows):
            if row in self._failures:
                results.append(SequenceResult(sequence, None, error=self._failures[row]))
            else:
                results.append(chosen_token(sequence, values[row], logprobs[row]))
        return results


def choose_tokens(
    device: EngineDevice,
    sampler: Sampler,
    logits: torch.Tensor,
    rows: Sequence[EngineSequence],
    *,
    chosen: bool = False,
) -> PendingTokens:
    """The next token of each sequence, of logits [n,V]; it becomes the last token of its slot. `chosen`: the likeliest ones already are."""
    last, on = device.last_token, device.cache.device
    if chosen and all(one.is_plain for one in rows):
        for one in rows:
            one.in_flight += 1
        return PendingTokens(
            rows, last[to_device(torch.tensor([one.slot for one in rows]), on)], [], []
        )
    failures: dict[int, str] = {}
    choices: list[RowChoice] = []
    for row, sequence in enumerate(rows):
        try:
            choice = sequence.choice(_mask(sequence, logits.shape[-1]))
        except Exception as problem:  # its grammar or its draw; the others of the batch have theirs
            failures[row] = failure_line(problem)
            choice = RowChoice(sequence.slot, Sampling(), 0.0)
        choices.append(choice)
    scored = [row for row, one in enumerate(rows) if one.request.logprobs is not None]
    raw = logits[to_device(torch.tensor(scored), on)] if scored else logits
    others = [row for row, choice in enumerate(choices) if not choice.is_greedy]
    slots = to_device(torch.tensor([one.slot for one in rows]), on)
    if not chosen:
        last[slots] = logits.argmax(-1)
    tokens = last[slots]
    if others:
        drawn, problems = draw_rows(sampler, logits, others, [choices[row] for row in others])
        failures = {**problems, **failures}
        tokens[to_device(torch.tensor(others), on)] = device.agree(drawn)
        # A row without a token ends when it is read; a step may be launched before, and needs an id that exists.
        last[slots] = tokens.clamp(min=0)
    scores = []
    if scored:
        scores = _logprobs(
            raw, tokens.clamp(min=0), scored, max(rows[row].request.logprobs or 0 for row in scored)
        )
    for one in rows:
        one.in_flight += 1
    return PendingTokens(rows, tokens, scored, scores, failures)


def draw_rows(
    sampler: Sampler, logits: torch.Tensor, rows: Sequence[int], choices: Sequence[RowChoice]
) -> tuple[torch.Tensor, dict[int, str]]:
    """The sampler's tokens [n] of some rows of logits [N,V], and the rows that it cannot choose for, with the reason."""
    try:
        return sampler.choose(logits[to_device(torch.tensor(rows), logits.device)], choices), {}
    except Exception as problem:
        if len(rows) == 1:
            return torch.full((1,), NO_TOKEN, device=logits.device), {
                rows[0]: failure_line(problem)
            }
    # One of the rows is to blame, or all of them together take more memory than there is.
    tokens: list[torch.Tensor] = []
    problems: dict[int, str] = {}
    for row, choice in zip(rows, choices, strict=True):
        token, problem = draw_rows(sampler, logits, [row], [choice])
        tokens.append(token)
        problems |= problem
    return torch.cat(tokens), problems


def _mask(one: EngineSequence, vocab: int) -> np.ndarray | None:
    if one.constraint is None:
        return None
    mask = np.zeros(-(-vocab // 32), dtype=np.int32)
    one.constraint.fill_mask(mask)
    return mask


def _logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, scored: list[int], count: int
) -> list[torch.Tensor]:
    """Log-probability of the chosen tokens [n], ids and log-probabilities of the likeliest [n, count]."""
    chosen = tokens[to_device(torch.tensor(scored), tokens.device)]
    scores = logits.log_softmax(-1)
    top = scores.topk(min(count, scores.shape[-1]), dim=-1)
    return [scores.gather(-1, chosen[:, None])[:, 0], top.indices, top.values]


class PendingPrefill:
    """The results of a prefill piece: first tokens, embeddings, log-probabilities of prompts."""

    def __init__(
        self,
        tokens: PendingTokens | None,
        embedded: list[EngineSequence],
        only: list[EngineSequence],
    ) -> None:
        self._tokens, self._embedded, self._only = tokens, embedded, only
        self._sums = HostTensors([one.hidden_sum for one in embedded if one.hidden_sum is not None])
        self._scores: list[tuple[EngineSequence, int, HostTensors]] = []
        self._failures: list[SequenceResult] = []

    @staticmethod
    def of(
        device: EngineDevice, sampler: Sampler, hidden: torch.Tensor, work: Sequence[PieceOf]
    ) -> PendingPrefill:
        """Of the hidden states [N,D] of packed pieces."""
        begin = 0
        last: list[int] = []
        scores: list[tuple[EngineSequence, int, HostTensors]] = []
        failures: list[SequenceResult] = []
        for one, piece in work:
            part = hidden[begin : begin + piece.count]
            begin += piece.count
            if one.request.embed:
                total = part.float().sum(0)
                one.hidden_sum = total if one.hidden_sum is None else one.hidden_sum + total
            if (
                one.request.prompt_logprobs
                and piece.start < len(one.request.prompt) - 1
                and not one.sent_any
            ):
                try:
                    scores += _prompt_scores(device, part, one, piece.start)
                except Exception as problem:  # scores of the whole vocabulary may find no memory
                    failures.append(
                        SequenceResult(one, None, error=failure_line(problem), was_chosen=False)
                    )
            if not one.is_reading and one.most > 0:
                last.append(begin - 1)
        ended = [one for one, _ in work if not one.is_reading]
        rows = [one for one in ended if one.most > 0]
        tokens = None
        if rows:
            at = to_device(torch.tensor(last), hidden.device)
            tokens = choose_tokens(device, sampler, device.logits(hidden[at]), rows)
        found = PendingPrefill(
            tokens,
            [one for one in ended if one.request.embed],
            [one for one in ended if one.most == 0],
        )
        found._scores = scores
        found._failures = failures
        return found

    def read(self) -> list[SequenceResult]:
        """Of every sequence whose prompt is complete or cannot be read."""
        for one, start, copy in self._scores:
            chosen, ids, tops = (part.tolist() for part in copy.read())
            for place, value in enumerate(chosen):
                top = tuple(zip(ids[place], tops[place], strict=True))
                one.prompt_logprobs.append(
                    TokenLogprobs(one.request.prompt[start + place + 1], value, top)
                )
        sums = dict(zip([one.number for one in self._embedded], self._sums.read(), strict=True))
        found = list(self._failures)
        for one in self._only:
            mean = (
                None
                if one.number not in sums
                else tuple((sums[one.number] / len(one.request.prompt)).tolist())
            )
            found.append(SequenceResult(one, None, embedding=mean, was_chosen=False))
        return found + ([] if self._tokens is None else self._tokens.read())


def _prompt_scores(
    device: EngineDevice, hidden: torch.Tensor, one: EngineSequence, start: int
) -> list[tuple[EngineSequence, int, HostTensors]]:
    prompt = one.request.prompt
    found: list[tuple[EngineSequence, int, HostTensors]] = []
    stop = min(len(hidden), len(prompt) - 1 - start)
    for begin in range(0, stop, LOGPROB_TOKENS):
        end = min(begin + LOGPROB_TOKENS, stop)
        targets = to_device(
            torch.tensor(prompt[start + begin + 1 : start + end + 1]), hidden.device
        )
        scores = _logprobs(
            device.logits(hidden[begin:end]),
            targets,
            list(range(end - begin)),
            one.request.logprobs or 0,
        )
        found.append((one, start + begin, HostTensors(scores)))
    return found
