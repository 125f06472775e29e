"""Tokens on their way from the device to the host, with what was asked about them. Nothing waits
until `read`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headway.infer.engine.device import EngineDevice
from headway.infer.engine.prefill_batches import PieceOf
from headway.infer.engine.request import EngineRequest, TokenLogprobs, failure_line
from headway.infer.engine.sampler import NO_TOKEN, RowChoice, Sampler, kept_tokens
from headway.infer.engine.sequence import EngineSequence
from headway.infer.sampling import Sampling
from headway.kernels.row_blocks import row_log_probs
from headway.model.cache_blocks import to_device

LOGPROB_TOKENS = 512
"""Prompt tokens whose log-probabilities exist at one time."""
NOTHING_FOLLOWS = (
    "no token can follow: under its penalties, biases and grammar, no score is a finite number."
)


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What one sequence gained in a launch: a token, an embedding, or the reason why it fails."""

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
    """A token as the sampler gives it; NO_TOKEN becomes an error of its sequence."""
    if token == NO_TOKEN:
        return SequenceResult(sequence, None, error=NOTHING_FOLLOWS)
    return SequenceResult(sequence, token, logprobs)


class HostTensors:
    """Copies of tensors on their way to the host. On CUDA nothing waits until `read`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            # Only a copy into pinned memory is asynchronous; the event marks its end on the stream.
            self._tensors = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                    tensor, non_blocking=True
                )
                for tensor in tensors
            ]
            event = self._event = torch.cuda.Event()
            event.record()
        else:
            # A copy here too: what later launches write in place must not reach what is read later.
            self._tensors = [tensor.clone() for tensor in tensors]

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
        """`scored`: the rows whose log-probabilities are in `scores`, perhaps with the ids that
        could be drawn; `failures`: why some rows have no token."""
        self.rows = list(rows)
        self._scored = scored
        self._failures = failures
        self._copy = HostTensors([tokens, *scores])

    def read(self) -> list[SequenceResult]:
        """One token of every sequence, in the order of the rows; waits for the device."""
        tokens, *scores = self._copy.read()
        values: list[int] = tokens.tolist()

        # All rows were scored with the largest count that one of them asks for.
        logprobs: list[TokenLogprobs | None] = [None] * len(values)
        if self._scored:
            chosen, ids, tops = (part.tolist() for part in scores[:3])
            for index, row in enumerate(self._scored):
                count = self.rows[row].request.logprobs or 0
                top = tuple(zip(ids[index][:count], tops[index][:count], strict=True))
                kept = None
                if len(scores) > 3:
                    kept = _ascending(scores[3][index])
                logprobs[row] = TokenLogprobs(values[row], chosen[index], top, kept)

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
    """The next token of each sequence, of logits [n,V]; it becomes the last token of its slot.
    `chosen`: the likeliest ones already are."""
    last = device.last_token
    on = device.cache.device
    slots = to_device(torch.tensor([sequence.slot for sequence in rows]), on)
    if chosen and all(sequence.is_plain for sequence in rows):
        # The usual case of decoding: the recorded step has chosen already.
        for sequence in rows:
            sequence.in_flight += 1
        return PendingTokens(rows, last[slots], [], [])

    failures: dict[int, str] = {}
    choices: list[RowChoice] = []
    for row, sequence in enumerate(rows):
        try:
            choice = sequence.choice(_mask(sequence, logits.shape[-1]))
        except Exception as problem:  # its grammar or its draw; the others of the batch have theirs
            failures[row] = failure_line(problem)
            # The row stays in the batch as a greedy one; `failures` ends it when it is read.
            choice = RowChoice(sequence.slot, Sampling(), 0.0)
        choices.append(choice)

    # Taken before the sampler changes logits in place: log-probabilities are the model's own.
    scored = [row for row, sequence in enumerate(rows) if sequence.request.logprobs is not None]
    raw = logits
    if scored:
        raw = logits[to_device(torch.tensor(scored), on)]

    others = [row for row, choice in enumerate(choices) if not choice.is_greedy]
    if not chosen:
        last[slots] = logits.argmax(-1)
    tokens = last[slots]
    if others:
        drawn, problems = draw_rows(sampler, logits, others, [choices[row] for row in others])
        failures = {**problems, **failures}
        # Kernels may round differently from GPU to GPU; ranks that share the layers need one token.
        tokens[to_device(torch.tensor(others), on)] = device.agree(drawn)
        # A row without a token ends when it is read; a step may be launched before, and needs an id
        # that exists.
        last[slots] = tokens.clamp(min=0)

    scores = []
    if scored:
        most = max(rows[row].request.logprobs or 0 for row in scored)
        requests = [rows[row].request for row in scored]
        kept = None
        if any(request.drawn_logprobs for request in requests):
            raw, kept = _drawn_from(raw, requests)
        scores = _logprobs(raw, tokens.clamp(min=0), scored, most, is_exact=device.is_exact)
        if kept is not None:
            scores.append(kept)
    for sequence in rows:
        sequence.in_flight += 1
    return PendingTokens(rows, tokens, scored, scores, failures)


def draw_rows(
    sampler: Sampler, logits: torch.Tensor, rows: Sequence[int], choices: Sequence[RowChoice]
) -> tuple[torch.Tensor, dict[int, str]]:
    """The sampler's tokens [n] of some rows of logits [N,V], and the rows that it cannot choose
    for, with the reason."""
    try:
        return sampler.choose(logits[to_device(torch.tensor(rows), logits.device)], choices), {}
    except Exception as problem:
        if len(rows) == 1:
            no_token = torch.full((1,), NO_TOKEN, device=logits.device)
            return no_token, {rows[0]: failure_line(problem)}

    # One of the rows is to blame, or all of them together take more memory than there is.
    tokens: list[torch.Tensor] = []
    problems: dict[int, str] = {}
    for row, choice in zip(rows, choices, strict=True):
        token, problem = draw_rows(sampler, logits, [row], [choice])
        tokens.append(token)
        problems |= problem
    return torch.cat(tokens), problems


def _mask(sequence: EngineSequence, vocab: int) -> np.ndarray | None:
    """int32 [ceil(vocab / 32)]: the bits of the tokens that its grammar allows next."""
    if sequence.constraint is None:
        return None
    mask = np.zeros(-(-vocab // 32), dtype=np.int32)
    sequence.constraint.fill_mask(mask)
    return mask


def _drawn_from(
    logits: torch.Tensor, requests: Sequence[EngineRequest]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits [n,V] of the distribution that requests draw from, of those that ask for it; and the
    ids [n,k] that it is cut to, NO_TOKEN behind the last, None where no request cuts."""
    cut = [
        row
        for row, request in enumerate(requests)
        if request.drawn_logprobs and request.sampling.cuts
    ]
    kept = None
    allowed = None
    if cut:
        where = to_device(torch.tensor(cut), logits.device)
        # By the same function as the draw: of the same scores it keeps the same tokens.
        some = kept_tokens(logits[where], [requests[row].sampling for row in cut])
        kept = some.new_full((len(requests), some.shape[1]), NO_TOKEN)
        kept[where] = some
        # A row that is not cut keeps everything. The column behind the last takes the padding.
        vocab = logits.shape[-1]
        allowed = torch.ones(len(requests), vocab + 1, dtype=torch.bool, device=logits.device)
        allowed[where] = False
        allowed.scatter_(1, kept.where(kept >= 0, vocab), True)
        allowed = allowed[:, :vocab]
    temperatures = [
        request.sampling.temperature if request.drawn_logprobs else 1.0 for request in requests
    ]
    if any(temperature != 1.0 for temperature in temperatures):
        divisor = torch.tensor(temperatures, dtype=logits.dtype)
        logits = logits / to_device(divisor, logits.device)[:, None]
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    return logits, kept


def _ascending(kept: torch.Tensor) -> np.ndarray | None:
    """The ids of a row of `kept_tokens`, int32; None where it has none."""
    ids = kept[kept >= 0]
    if len(ids) == 0:
        return None
    return np.sort(ids.numpy().astype(np.int32))


def _logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    scored: list[int],
    count: int,
    *,
    is_exact: bool = False,
) -> list[torch.Tensor]:
    """Log-probability of the chosen tokens [n], ids and log-probabilities of the likeliest [n,
    count]."""
    chosen = tokens[to_device(torch.tensor(scored), tokens.device)]
    scores = logits.log_softmax(-1)
    if is_exact:
        top = scores.topk(min(count, scores.shape[-1]), dim=-1)
        return [row_log_probs(logits, chosen), top.indices, top.values]
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
        self._tokens = tokens
        self._embedded = embedded
        self._only = only
        self._sums = HostTensors(
            [sequence.hidden_sum for sequence in embedded if sequence.hidden_sum is not None]
        )
        self._scores: list[tuple[EngineSequence, int, HostTensors]] = []
        self._failures: list[SequenceResult] = []

    @staticmethod
    def of(
        device: EngineDevice, sampler: Sampler, hidden: torch.Tensor, work: Sequence[PieceOf]
    ) -> PendingPrefill:
        """What is launched for the hidden states [N,D] of packed pieces: sums, log-probabilities,
        first tokens."""
        begin = 0
        last: list[int] = []
        scores: list[tuple[EngineSequence, int, HostTensors]] = []
        failures: list[SequenceResult] = []
        for sequence, piece in work:
            part = hidden[begin : begin + piece.count]
            begin += piece.count
            if sequence.request.embed:
                # The mean over the prompt is summed up piece by piece, in fp32 as bf16 would lose
                # terms.
                total = part.float().sum(0)
                if sequence.hidden_sum is None:
                    sequence.hidden_sum = total
                else:
                    sequence.hidden_sum = sequence.hidden_sum + total
            # A prompt's last token predicts none of its tokens. A preempted sequence reads its
            # prompt again, but its first event, which has the scores, may have been sent.
            if (
                sequence.request.prompt_logprobs
                and piece.start < len(sequence.request.prompt) - 1
                and not sequence.sent_any
            ):
                try:
                    scores += _prompt_scores(device, part, sequence, piece.start)
                except Exception as problem:  # scores of the whole vocabulary may find no memory
                    failures.append(
                        SequenceResult(
                            sequence, None, error=failure_line(problem), was_chosen=False
                        )
                    )
            if not sequence.is_reading and sequence.max_generated > 0:
                # the hidden state of the prompt's last token gives the first new one
                last.append(begin - 1)

        ended = [sequence for sequence, _ in work if not sequence.is_reading]
        rows = [sequence for sequence in ended if sequence.max_generated > 0]
        tokens = None
        if rows:
            last_positions = to_device(torch.tensor(last), hidden.device)
            tokens = choose_tokens(device, sampler, device.logits(hidden[last_positions]), rows)
        pending = PendingPrefill(
            tokens,
            [sequence for sequence in ended if sequence.request.embed],
            [sequence for sequence in ended if sequence.max_generated == 0],
        )
        pending._scores = scores
        pending._failures = failures
        return pending

    def read(self) -> list[SequenceResult]:
        """One result for every sequence whose prompt is complete or cannot be read."""
        for sequence, start, copy in self._scores:
            chosen, ids, tops = (part.tolist() for part in copy.read())
            for index, value in enumerate(chosen):
                top = tuple(zip(ids[index], tops[index], strict=True))
                sequence.prompt_logprobs.append(
                    TokenLogprobs(sequence.request.prompt[start + index + 1], value, top)
                )
        sums = dict(
            zip([sequence.number for sequence in self._embedded], self._sums.read(), strict=True)
        )
        results = list(self._failures)
        for sequence in self._only:
            mean = None
            if sequence.number in sums:
                mean = tuple((sums[sequence.number] / len(sequence.request.prompt)).tolist())
            results.append(SequenceResult(sequence, None, embedding=mean, was_chosen=False))
        return results + ([] if self._tokens is None else self._tokens.read())


def _prompt_scores(
    device: EngineDevice, hidden: torch.Tensor, sequence: EngineSequence, start: int
) -> list[tuple[EngineSequence, int, HostTensors]]:
    """Log-probabilities of a prompt's tokens after hidden states [n,D], the first at `start`; each
    entry is (sequence, position, copies)."""
    prompt = sequence.request.prompt
    copies: list[tuple[EngineSequence, int, HostTensors]] = []
    stop = min(len(hidden), len(prompt) - 1 - start)
    # In chunks: the scores of a whole piece, fp32 [n,V], could be larger than the cache.
    for begin in range(0, stop, LOGPROB_TOKENS):
        end = min(begin + LOGPROB_TOKENS, stop)
        # The hidden state at a position predicts the token after it.
        targets = to_device(
            torch.tensor(prompt[start + begin + 1 : start + end + 1]), hidden.device
        )
        scores = _logprobs(
            device.logits(hidden[begin:end]),
            targets,
            list(range(end - begin)),
            sequence.request.logprobs or 0,
        )
        copies.append((sequence, start + begin, HostTensors(scores)))
    return copies
