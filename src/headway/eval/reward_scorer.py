"""The model behind the reward kind `model`: settings come in, a scorer of conversations goes out.

Scores are those of `headway eval reward`: the same template, the same cut, the same batches. An
answer that cannot be written or scored is a reason in place of a number, and costs itself alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.stored_model import find_model
from headway.errors import ConfigError, HeadwayError, first_line
from headway.eval.reward import score_answers
from headway.eval.reward_data import PAIRS
from headway.infer.load import load_model
from headway.records.parse_turns import TurnReader, tools_of
from headway.records.preference import PairEncoder, PreferencePair
from headway.rewards.base import digest_of
from headway.runtime.device import choose_compute
from headway.runtime.digests import read_digests
from headway.runtime.process import from_environment
from headway.tokenizer.chat import default_template, encode_segments, find_template
from headway.tokenizer.chat_template import Segment, Turn

if TYPE_CHECKING:
    from headway.infer.load import LoadedModel
    from headway.rewards.model import Config as ModelRewardSettings


def open_reward_model(settings: ModelRewardSettings) -> RewardModelScorer:
    """Load the reward model of some settings onto this rank's device."""
    compute = choose_compute(settings.device, settings.precision, from_environment().local_rank)
    loaded = load_model(settings.path, device=compute.device, dtype=compute.dtype, scores=True)
    return RewardModelScorer(loaded, settings)


class RewardModelScorer:
    """A reward model with its tokenizer and template."""

    def __init__(self, loaded: LoadedModel, settings: ModelRewardSettings) -> None:
        self._loaded = loaded
        self._settings = settings
        self._tokenizer = loaded.require_tokenizer()
        name = settings.chat_template or default_template(self._tokenizer)
        self._template = find_template(name, self._tokenizer)
        longest = loaded.config.max_seq_len
        if settings.max_length is not None:
            if settings.max_length > longest:
                raise ConfigError(
                    f"reward.N.max_length is {settings.max_length}; the model at {loaded.path} "
                    f"reads at most {longest} tokens."
                )
            longest = settings.max_length
        # A prompt that is cut keeps half of the length, as in training.
        self._encoder = PairEncoder(longest, longest // 2)

    def digest(self) -> str:
        """Weights, config, tokenizer, template and precision."""
        return digest_of(
            [
                weights_digest(self._loaded, self._settings.path),
                self._loaded.config.model_dump(mode="json"),
                str(self._loaded.model.head_weight.dtype),
                self._tokenizer.fingerprint,
                self._template.cache_key,
                self._encoder.max_length,
            ]
        )

    def score(self, answers: Sequence[dict[str, Any]]) -> list[float | str]:
        """The score of each answer, or why it has none."""
        results: list[float | str] = ["" for _ in answers]
        encoded: dict[int, Sequence[int]] = {}
        for index, ids in enumerate(self._encoded(answers)):
            if isinstance(ids, str):
                results[index] = ids
            else:
                encoded[index] = ids

        for index, score in zip(encoded, self._scores(list(encoded.values())), strict=True):
            results[index] = score
        return results

    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float | str]:
        """Scores of all rows at once; if that fails, of each by itself."""
        if not rows:
            return []
        try:
            return score_answers(self._loaded, rows, self._settings.batch_tokens).tolist()
        # torch's errors, out of memory among them, are RuntimeErrors.
        except (HeadwayError, RuntimeError) as problem:
            if len(rows) == 1:
                return [f"the model fails: {first_line(problem)}"]
        middle = len(rows) // 2
        return [*self._scores(rows[:middle]), *self._scores(rows[middle:])]

    def _encoded(self, answers: Sequence[dict[str, Any]]) -> list[Sequence[int] | str]:
        """The ids of each conversation, or why it cannot be written."""
        written: list[list[Segment] | str] = []
        for answer in answers:
            try:
                written.append(self._segments(answer))
            except HeadwayError as problem:
                written.append(first_line(problem))

        # One call for all texts: the tokenizer encodes many in parallel.
        texts = [segments for segments in written if not isinstance(segments, str)]
        rendered = iter(encode_segments(texts, self._template.name, self._tokenizer))
        encoded: list[Sequence[int] | str] = []
        for segments in written:
            if isinstance(segments, str):
                encoded.append(segments)
                continue
            result = next(rendered)
            if isinstance(result, HeadwayError):
                encoded.append(first_line(result))
                continue
            document, _ = self._encoder.fitted([result, result], Counter())
            encoded.append(document.ids.tolist())
        return encoded

    def _segments(self, answer: dict[str, Any]) -> list[Segment]:
        """A conversation as the template writes it, with loss on its answer alone: the mask says
        where the prompt ends.
        """
        prompt = TurnReader().turns(answer["messages"], "the prompt")
        turn = (Turn("assistant", answer["text"]),)
        tools = ()
        if answer["tools"] is not None:
            tools = tools_of(answer["tools"], "the record")
        return PAIRS.segments(PreferencePair(tuple(prompt), turn, turn, tools), self._template)[0]

    def close(self) -> None:
        """Nothing is open: the weights end with this object."""


def weights_digest(loaded: LoadedModel, path: str) -> str:
    """A digest of the weights: that of headway_digests.json, which was compared with the files
    when they were read, else of the tensors.
    """
    stored = find_model(path)
    if isinstance(stored.path, Path) and stored.adapter is None:
        digests = read_digests(stored.path)
        if digests is not None:
            return digest_of({name: file.sha256 for name, file in digests.files.items()})
    return tensors_digest(loaded)


def tensors_digest(loaded: LoadedModel) -> str:
    """A digest of the tensors that a model computes with."""
    import torch

    digest = hashlib.sha256()
    for name, value in sorted(loaded.model.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype} ".encode())
        flat = value.detach().reshape(-1).contiguous().cpu()
        digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()
