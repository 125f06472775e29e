"""Rollouts as the source of a run's steps: prompts are answered by the weights that train, rewards
judge the answers, and the answers become microbatches.

    step   prompts by number -> journal, or sampler -> rewards -> advantages -> rows -> StepBatch

`RolloutLoader` stands where `Loader` stands in other runs. Its cursor is that of the prompts: it
moves on with the last update on their answers. What was sampled, and what it earned, is in the
journal before any update uses it, so a run that was killed at any moment continues with the same
answers.

With `rollout.ahead` the next batch of prompts is answered and judged by a thread while updates are
computed; it does no more than fill the journal, from which the batch is read when its turn comes:

    main    weights -> copy | update on batch k                | batch k + 1 from the journal | ...
    thread                  | batch k + 1 -> answers, rewards -> journal |

Which weights draw an answer therefore does not depend on the speed of either side. A checkpoint is
saved after the thread has ended, so a resumed run never needs weights that are gone.

Invariants: all ranks draw the same prompts and see the same answers and rewards. Every rank samples
the answers to its share of the prompts; which rank that is changes no token. Rewards and the
journal belong to the first rank.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from headway.data.batch import Batch, StepBatch
from headway.data.config import default_cache_dir
from headway.data.loader import DataAmount, Loader, LoaderState, ReplayedBatches
from headway.data.open import OpenData, sets_of, with_valid
from headway.errors import ConfigError, GaveUpError, HeadwayError, TrainingError
from headway.eval.rewards import open_reward_model
from headway.rewards.base import RewardAnswer
from headway.rewards.panel import RewardPanel
from headway.rollout.config import Cuts
from headway.rollout.journal import (
    Floats,
    RewardedBatch,
    RolloutJournal,
    SampledAnswer,
    SampledBatch,
    ScoredBatch,
)
from headway.rollout.prompts import PROMPT, SEQ_LEN, PromptSource, RolloutPrompt, read_prompts
from headway.rollout.rows import StepRows, TrainedAnswer, answer_step
from headway.rollout.sampler import AnswerRequest, DrawnAnswer, PolicySampler, SamplerSettings
from headway.runtime.progress import progress
from headway.store.checksums import Checksums
from headway.tasks.answers import AnswerGroup, rated
from headway.tasks.base import StepInfo

if TYPE_CHECKING:
    from torch import Tensor

    from headway.data.config import DataConfig, ResolvedBatch, SourceConfig
    from headway.kernels.policy_scores import DrawnFrom
    from headway.parallel.collectives import RankGroups
    from headway.runtime.device import Compute
    from headway.tokenizer.load import Tokenizer
    from headway.train.config import Recipe
    from headway.train.resolve import Resolved
    from headway.train.state import TrainState

log = logging.getLogger("headway")

REWARDS_FOLDER = "rewards"
"""In the run folder: results of rewards, by their content."""
TRAINING_SETTINGS = {
    "objective",
    "reward",
    "rollout",
    "optim",
    "freeze",
    "train",
    "adapter",
    "heal",
    "steps",
    "epochs",
    "precision",
}
"""Of a recipe: what decides how answers change the weights."""
HEART_SECONDS = 1.0
"""Between two looks at whether the sampling ahead makes progress."""
LATER_SETTINGS: dict[str, Any] = {
    "top_k": None,
    "top_p": None,
    "min_p": None,
    "ahead": 0,
    "routes": "replay",
    "exact": False,
}
"""Of `rollout`, with their defaults: settings that the first journals did not know."""
Weights = Callable[[], Iterator[tuple[str, "Tensor"]]]


def open_prompts(resolved: Resolved) -> OpenData:
    """The prompts of a run, in memory: training sources, and validation sets by name."""
    recipe = resolved.recipe
    config = recipe.data
    tokenizer = resolved.tokenizer
    if tokenizer is None:
        raise ConfigError("data.train has prompts, which need a tokenizer. Set `tokenizer`.")
    # Above 0, and within the model's context: both were checked before. A prompt that is longer
    # would leave no room for a whole answer in a row.
    longest = config.seq_len - recipe.rollout.max_new_tokens
    next_number = 0

    def opened(sources: Sequence[SourceConfig]) -> list[tuple[SourceConfig, PromptSource]]:
        nonlocal next_number
        members: list[tuple[SourceConfig, PromptSource]] = []
        for source in sources:
            prompts = read_prompts(
                source, config.cache_dir, tokenizer, longest=longest, first_number=next_number
            )
            # Numbers run on over all sources: in batches and in the journal one number is a prompt.
            next_number += prompts.num_documents
            members.append((source, prompts))
        return members

    train = opened(config.train or ())
    valid: dict[str, list[tuple[SourceConfig, PromptSource]]] = {}
    if config.valid is not None and config.valid.sets:
        valid = {name: opened(members) for name, members in sets_of(config.valid.sets).items()}
    checksums = Checksums(config.cache_dir or default_cache_dir())
    return with_valid(prompt_config(config), train, valid, checksums)


def prompt_config(config: DataConfig) -> DataConfig:
    """How prompts are read: a prompt is a row."""
    return config.model_copy(
        update={
            "seq_len": SEQ_LEN,
            "packing": "pad",
            "max_documents": SEQ_LEN,
            "max_tokens": None,
            "balance": False,
            "workers": 0,
            "pin_memory": False,
        }
    )


def prompt_loader(
    recipe: Recipe, data: OpenData, cursor: LoaderState | None, epochs: int | None
) -> Loader:
    """The batches of prompts from a cursor on; every rank reads all of them."""
    # Without rank and ranks: which prompts a rank samples is decided later (`_sample`), so a run
    # may resume on other ranks and answer the same ones.
    return Loader(
        prompt_config(recipe.data),
        sources=data.train,
        rows_per_step=recipe.rollout.prompts,
        micro_rows=recipe.rollout.prompts,
        seed=recipe.seed,
        state=cursor,
        epochs=epochs,
    )


@dataclass(frozen=True)
class _Group:
    """A prompt with its answers and what they earned."""

    prompt: RolloutPrompt
    answers: tuple[SampledAnswer, ...]
    rewards: tuple[float, ...]
    old: tuple[Floats, ...] = ()
    advantages: tuple[float, ...] = ()
    """By the task, once it is known which groups are trained on."""

    @property
    def has_signal(self) -> bool:
        """Whether its answers differ in their rewards."""
        return max(self.rewards) > min(self.rewards)


@dataclass
class _Collected:
    """The groups that the updates of a rollout train on."""

    groups: list[_Group]
    version: int
    """Updates of the oldest weights that drew them."""
    facts: dict[str, float]
    before: LoaderState
    after: LoaderState
    epoch: int


class _Abandoned(Exception):
    """The run ends: nobody wants the answers that are being sampled."""


@dataclass
class Rollouts:
    """What the rollouts of a run share: sampler, rewards, journal. Made once; loaders come and
    go."""

    recipe: Recipe
    state: TrainState
    data: OpenData
    ranks: RankGroups
    compute: Compute
    batch: ResolvedBatch
    tokenizer: Tokenizer
    end_ids: frozenset[int]
    folder: Path
    weights: Weights
    """The weights that train, without adapters; all ranks take all of them."""
    drawn: DrawnFrom
    """The distribution that answers are drawn from."""
    score: Callable[[Batch], Batch] | None = None
    """Adds the frozen model's log-probabilities, where the reward has a divergence."""
    refresh_seconds: float = 0.0
    """How long the sampler took over the weights of the last update."""
    _sampler: PolicySampler | None = None
    _journal: RolloutJournal | None = None
    _panel: RewardPanel | None = None
    _prompts: list[RolloutPrompt] = field(default_factory=list[RolloutPrompt])
    _thread: ThreadPoolExecutor | None = None
    _begun: Future[None] | None = None
    """The batch that is answered and judged ahead."""
    _rounds: int = 0
    """Of the sampling in the thread so far."""
    _is_abandoned: bool = False

    def __post_init__(self) -> None:
        self._world = self.ranks.world
        """All ranks. Nothing in this class exchanges over it while the thread works."""
        if self.recipe.rollout.ahead:
            # The thread's exchanges happen at any time, so they have connections of their own.
            self._world = self.ranks.world.host_group(self.recipe.parallel.timeout_seconds)
        # By number, over all sources in the order in which they were opened. Both sides of a split
        # share their source.
        sources: dict[int, PromptSource] = {}
        for mixture in (self.data.train, *self.data.valid.values()):
            for member in mixture:
                source = member.selection.source
                assert isinstance(source, PromptSource)
                sources[source.first_number] = source
        for number in sorted(sources):
            self._prompts += sources[number].prompts
        self.is_first = self.ranks.world.rank == 0

    # ---- parts that are made when they are needed

    @property
    def journal(self) -> RolloutJournal:
        """The first rank's journal."""
        if self._journal is None:
            self._journal = RolloutJournal.open(self.folder)
        return self._journal

    @property
    def panel(self) -> RewardPanel:
        """The first rank's rewards."""
        if self._panel is None:
            self._panel = RewardPanel(
                self.recipe.reward,
                self.folder / REWARDS_FOLDER,
                self.recipe.rollout.workers,
                open_reward_model,
            )
            self._panel.check({name for prompt in self._prompts for name in prompt.record})
        return self._panel

    def check_rewards(self) -> None:
        """Refuse rewards that cannot work, before anything is sampled; all ranks together."""
        if self.recipe.reward:
            # Making the panel checks it.
            self._on_first_rank(lambda: self.panel.names)

    def sampler(self, version: int) -> PolicySampler:
        """The sampler with the weights after `version` updates; all ranks together."""
        if self._sampler is None:
            rollout = self.recipe.rollout
            cache_bytes = None
            if rollout.cache_gib is not None:
                cache_bytes = int(rollout.cache_gib * 2**30)
            settings = SamplerSettings(
                model=self.state.model,
                device=self.compute.device,
                dtype=self.compute.dtype,
                end_ids=self.end_ids,
                max_new_tokens=rollout.max_new_tokens,
                longest_prompt=max(len(prompt.ids) for prompt in self._prompts),
                at_once=rollout.at_once,
                cache_bytes=cache_bytes,
                seed=self.recipe.seed,
                folder=self.folder,
                routes=rollout.routes == "replay",
                exact=rollout.exact,
            )
            self._sampler = PolicySampler(settings, self.tokenizer, self.weights())
            self._sampler.version = version
        elif self._sampler.version != version:
            # The update may still be on its way: its time is not that of the copy.
            self._wait_for_device()
            began = time.perf_counter()
            self._sampler.refresh(self.weights(), version)
            self._wait_for_device()
            self.refresh_seconds = time.perf_counter() - began
        return self._sampler

    def _wait_for_device(self) -> None:
        if self.compute.device.type == "cuda":
            torch.cuda.synchronize(self.compute.device)

    def close(self) -> None:
        """End the processes of rewards. After a rollback the next loader starts them again."""
        # Seen by the thread between two rounds (`_count_round`), which then ends the sampling.
        self._is_abandoned = self._begun is not None and not self._begun.done()
        # The panel before the thread: a thread that waits for rewards ends when they are closed.
        if self._panel is not None:
            self._panel.close()
            self._panel = None
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None
        if self._is_abandoned:
            # The sampling ended between two rounds, with requests that nobody reads.
            self._sampler = None
        self._begun = None
        self._is_abandoned = False

    # ---- answers and rewards of a batch of prompts

    def answers(self, batch: int, numbers: Sequence[int], start: int) -> SampledBatch:
        """The answers to a batch of prompts whose first update follows `start` others, from the
        journal or sampled now; all ranks together."""
        oldest = start
        if self.recipe.rollout.ahead or self.state.step > start:
            # They may have been begun ahead, before the setting was changed.
            oldest = start - self.recipe.rollout.num_updates
        sampled = self._known(batch, numbers, range(oldest, start + 1), start)
        if sampled is None:
            sampled = self._drawn(batch, numbers, start, start)
        return sampled

    def begin(self, batch: int, numbers: Sequence[int], start: int) -> None:
        """Have a batch of prompts answered by the weights of now, and judged, while the run
        continues; all ranks together. Its first update follows `start` others."""
        version = self.state.step
        sampled = self._known(batch, numbers, range(version, version + 1), start)
        if sampled is None:
            # Weights are gathered over the ranks, so this is not for the thread.
            self.sampler(version)
        if self.recipe.reward and self.is_first:
            # Processes of rewards end with the thread that has started them.
            _ = self.panel
        # Here, before the updates begin; the thread then has the rewards alone.
        if sampled is None and not self._samples_beside:
            sampled = self._drawn(batch, numbers, version, start)

        def work() -> None:
            answers = sampled
            if answers is None:
                answers = self._drawn(batch, numbers, version, start, in_thread=True)
            if self.recipe.reward:
                self.rewards(answers, in_thread=True)

        if self._thread is None:
            # One thread: the batches reach the journal in their order.
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="headway-rollouts")
        self._begun = self._thread.submit(work)

    @property
    def _samples_beside(self) -> bool:
        """Whether the thread samples, too, while updates are computed.

        On a GPU both would take turns on the device, and recorded decoding must not be recorded
        while another thread allocates. Ranks that share layers exchange in every layer, in one
        order. There the thread only waits for rewards.
        """
        shares_layers = self.ranks.tensor.size > 1 or self.ranks.pipeline.size > 1
        return self.compute.device.type == "cpu" and not shares_layers

    def settle(self) -> None:
        """Wait until what was begun ahead is in the journal; all ranks together. An error of it
        waits for `take_begun`."""
        rounds = self._rounds
        while self._begun is not None and not wait_for([self._begun], HEART_SECONDS).done:
            # Sampling that makes progress is no hang.
            if self._rounds != rounds:
                rounds = self._rounds
                self.ranks.world.heart.beat("rollout", self.state.step)

    def take_begun(self) -> None:
        """Wait for what was begun ahead, and raise what went wrong there."""
        self.settle()
        # Taken off first: what failed is raised once, and the next loader begins anew.
        begun = self._begun
        self._begun = None
        if begun is not None:
            begun.result()

    def _known(
        self, batch: int, numbers: Sequence[int], versions: range, start: int
    ) -> SampledBatch | None:
        """The answers to a batch of prompts in the journal, where they were drawn with these
        settings by weights of one of these versions; all ranks together."""
        digest = self._answers_digest(numbers)
        training = self._training_digest()

        def known() -> SampledBatch | None:
            sampled = self.journal.answers(batch)
            if sampled is not None:
                # Answers of weights that are gone stay, whatever trains on them from now on.
                are_gone = sampled.version < self.state.step
                has_same_weights = are_gone or sampled.training == training
                if sampled.version in versions and sampled.digest == digest and has_same_weights:
                    return sampled
            # In the middle of a rollout nothing can be sampled anew: the weights now are others
            # than those of its first update.
            if self.state.step > start:
                raise TrainingError(
                    f"rollout {batch}: its first update was done, and the journal has no answers "
                    "of these settings that it was done with. Restore the journal and the "
                    f"settings, or remove the checkpoints after step {start} and resume."
                )
            if sampled is None:
                return None
            log.info(
                "rollout %d was sampled by other weights or settings; it is sampled anew", batch
            )
            # Later batches go, too: their weights were trained on the answers that are removed.
            self.journal.forget_from(batch)
            return None

        return self._on_first_rank(known)

    def _drawn(
        self,
        batch: int,
        numbers: Sequence[int],
        version: int,
        start: int,
        *,
        in_thread: bool = False,
    ) -> SampledBatch:
        """Answers to a batch of prompts, sampled now and written to the journal."""
        digest = self._answers_digest(numbers)
        training = self._training_digest()
        began = time.perf_counter()
        samples = self.recipe.rollout.samples
        # The key has the batch: a prompt that comes back in a later epoch gets other draws.
        drawn = self._sample(
            [
                (number, sample, f"{batch}:{number}:{sample}")
                for number in numbers
                for sample in range(samples)
            ],
            version,
            self.recipe.rollout.temperature,
            f"rollout {batch}",
            self.recipe.rollout.cuts,
            in_thread=in_thread,
        )
        sampled = SampledBatch(
            batch,
            version,
            digest,
            tuple(self._prompts[number].digest for number in numbers),
            tuple(drawn),
            time.perf_counter() - began,
            tuple(self._prompts[number].question for number in numbers),
            training,
            start=start,
            tokenizer=self.tokenizer.fingerprint,
            templates=tuple(self._prompts[number].template for number in numbers),
            seed=self.recipe.seed,
        )
        if self.is_first:
            self.journal.add(sampled)
        return sampled

    def _sample(
        self,
        wanted: Sequence[tuple[int, int, str]],
        version: int,
        temperature: float,
        title: str,
        cuts: Cuts = Cuts(),
        *,
        in_thread: bool = False,
    ) -> list[SampledAnswer]:
        """An answer for each (prompt, sample, key), in order; every rank samples its share."""
        sampler = self.sampler(version)
        world = self._world
        # All answers to a prompt on one rank: they share what the prompt has in the cache.
        prompts = sorted({number for number, _, _ in wanted})
        rank_of = {number: index % world.size for index, number in enumerate(prompts)}
        mine = [index for index, entry in enumerate(wanted) if rank_of[entry[0]] == world.rank]
        requests = [
            AnswerRequest(self._prompts[wanted[index][0]].ids, wanted[index][2]) for index in mine
        ]
        if in_thread:
            # The main thread has the heartbeat and the console.
            here = sampler.sample(requests, temperature, self._count_round, cuts)
        else:
            with progress(title, unit="rounds") as advance:

                def on_round() -> None:
                    self.ranks.world.heart.beat("rollout", self.state.step)
                    advance(1)

                here = sampler.sample(requests, temperature, on_round, cuts)
        # Every rank gets all answers: each packs the rows of the whole step from their lengths.
        drawn: dict[int, DrawnAnswer] = {}
        for part in world.gather(dict(zip(mine, here, strict=True))):
            drawn |= part
        return [
            SampledAnswer(
                number,
                sample,
                drawn[index].ids,
                drawn[index].logprobs,
                drawn[index].finished,
                drawn[index].text,
                drawn[index].kept,
                routes=drawn[index].routes,
            )
            for index, (number, sample, _) in enumerate(wanted)
        ]

    def _count_round(self) -> None:
        """Called between the rounds of the sampling in the thread."""
        if self._is_abandoned:
            raise _Abandoned
        self._rounds += 1

    def rewards(self, sampled: SampledBatch, *, in_thread: bool = False) -> RewardedBatch:
        """What the answers of a batch earned; all ranks together."""

        def earned() -> RewardedBatch:
            digest = self.panel.digest()
            # With the digest: rewards that were changed since then are asked again.
            known = self.journal.rewards(sampled.batch)
            if known is not None and known.digest == digest:
                return known
            # From the main thread alone: `settle` beats for the other one, while it makes progress.
            if not in_thread:
                self.ranks.world.heart.beat("rewards", self.state.step)
            rewarded = self._score(sampled.batch, sampled.answers)
            self.journal.add(rewarded)
            return rewarded

        return self._on_first_rank(earned)

    def _score(self, batch: int, answers: Sequence[SampledAnswer]) -> RewardedBatch:
        """On the first rank: ask the rewards."""
        began = time.perf_counter()
        scores = self.panel.score(
            [
                RewardAnswer(
                    number=index,
                    prompt=self._prompts[answer.prompt].messages,
                    text=answer.text,
                    record=self._prompts[answer.prompt].record,
                    tokens=len(answer.ids),
                    finished=not answer.is_cut,
                )
                for index, answer in enumerate(answers)
            ]
        )
        problems = [score.problems for score in scores]
        num_failed = sum(1 for texts in problems if texts)
        if num_failed:
            first = next(texts[0] for texts in problems if texts)
            log.warning(
                "rewards failed on %d of %d answers, which get the default; the first: %s",
                num_failed,
                len(scores),
                first,
            )
        return RewardedBatch(
            batch,
            self.panel.digest(),
            tuple(score.total for score in scores),
            tuple(score.parts for score in scores),
            tuple(problems),
            time.perf_counter() - began,
        )

    def without_rewards(self, sampled: SampledBatch) -> RewardedBatch:
        """What answers earn that a teacher judges token by token: 0 each. It is not in the journal,
        because nothing was asked."""
        return _unrewarded(sampled.batch, sampled.answers)

    def scores(self, sampled: SampledBatch, start: int) -> ScoredBatch:
        """The trainer's log-probabilities of the answers after `start` updates, before the first
        one on them, and their divergence from the reference; all ranks together."""

        def known() -> ScoredBatch | None:
            scored = self.journal.scores(sampled.batch)
            if scored is not None and scored.version == start:
                return scored
            return None

        scored = self._on_first_rank(known)
        if scored is not None:
            return scored
        if self.state.step != start:
            raise TrainingError(
                f"rollout {sampled.batch}: its first update was done, and the journal has no "
                f"log-probabilities from before it. Remove the checkpoints after step "
                f"{start} and resume."
            )

        answers = [
            TrainedAnswer(
                self._prompts[answer.prompt].ids,
                answer.ids,
                answer.logprobs,
                0.0,
                kept=answer.kept,
                routes=answer.routes,
            )
            for answer in sampled.answers
        ]
        # All answers of the batch as the rows of one step. Their advantage of 0 is not read.
        step = answer_step(answers, self.step_rows(), self.state.epoch)
        info = StepInfo(self.state.step, 1, training=False)
        frozen = self.recipe.objective.needs.frozen
        old: dict[int, Floats] = {}
        divergence: dict[int, float] = {}
        log_probs = self.state.engine.token_log_probs(step.batch.microbatches, info, self.drawn)
        for micro, values, places in zip(
            step.batch.microbatches, log_probs, step.places, strict=True
        ):
            reference = None
            if self.score is not None:
                assert frozen is not None and frozen.token_column is not None
                # The same rows through the frozen model: both numbers stand at the same positions.
                scored_micro = self.score(micro.to(self.compute.device))
                reference = scored_micro.extra[frozen.token_column].float().cpu().numpy()
            here = values.float().cpu().numpy()
            for answer, row, first in places:
                part = slice(first, first + len(answers[answer].ids))
                old[answer] = here[row, part].astype(np.float32)
                if reference is not None:
                    # k1, the sum of log p - log p_reference over the sampled tokens; in float64,
                    # because the terms have both signs, and their sum may be small beside them.
                    difference = here[row, part].astype(np.float64) - reference[row, part]
                    divergence[answer] = float(difference.sum())
        for others_old, others_divergence in self._world.gather((old, divergence)):
            old |= others_old
            divergence |= others_divergence
        indices = range(len(answers))
        divergences: tuple[float, ...] = ()
        if self.score is not None:
            divergences = tuple(divergence[index] for index in indices)
        scored = ScoredBatch(
            sampled.batch, start, tuple(old[index] for index in indices), divergences
        )
        if self.is_first:
            self.journal.add(scored)
        return scored

    def step_rows(self) -> StepRows:
        """How the rows of an update are made on this rank."""
        data = self.recipe.data
        return StepRows(
            data.seq_len,
            data.documents_per_row,
            self.batch.micro_rows,
            self.ranks.data.rank,
            self.ranks.data.size,
        )

    # ---- validation

    def evaluate(self, name: str) -> dict[str, float]:
        """The rewards of the held-out prompts of a set; all ranks together."""
        # The sampler gets other weights now: what is sampled ahead must have ended.
        self.settle()
        rollout = self.recipe.rollout
        with Loader(
            # The batches to be skipped are numbered in the training data.
            prompt_config(self.recipe.data).model_copy(update={"skip_batches": ""}),
            sources=self.data.valid[name],
            rows_per_step=rollout.prompts,
            micro_rows=rollout.prompts,
            seed=self.recipe.seed,
            epochs=1,
            shuffle=False,
            max_rows=self.recipe.eval.rows,
        ) as loader:
            numbers = [number for step, _ in loader for number in prompt_numbers(step)]
        samples = rollout.valid_samples
        # The key has no step: validations of all steps draw with the same random numbers, so their
        # differences come from the weights.
        answers = self._sample(
            [
                (number, sample, f"valid:{number}:{sample}")
                for number in numbers
                for sample in range(samples)
            ],
            self.state.step,
            rollout.valid_temperature,
            f"validation {name}",
        )
        # The journal is of training; results of rewards are kept by their content.
        rewarded = self._on_first_rank(lambda: self._judged(answers))
        metrics = _reward_facts(rewarded, answers)
        is_right = [total >= rollout.pass_at for total in rewarded.totals]
        metrics["pass@1"] = sum(is_right) / len(is_right)
        if samples > 1:
            groups = [
                any(is_right[first : first + samples]) for first in range(0, len(answers), samples)
            ]
            metrics[f"pass@{samples}"] = sum(groups) / len(groups)
        return metrics

    def _judged(self, answers: Sequence[SampledAnswer]) -> RewardedBatch:
        """On the first rank: what answers to held-out prompts earn."""
        if self.recipe.reward:
            self.ranks.world.heart.beat("rewards", self.state.step)
            return self._score(-1, answers)
        return _unrewarded(-1, answers)

    def valid_metrics(self) -> list[str]:
        """The names of the numbers that every validation has; all ranks together."""
        names = ["reward", "reward/std", "answer/tokens", "answer/cut", "pass@1"]
        samples = self.recipe.rollout.valid_samples
        if samples > 1:
            names.append(f"pass@{samples}")
        parts: list[str] = []
        if self.recipe.reward:
            parts = self._on_first_rank(lambda: self.panel.names)
        if len(parts) > 1:
            names += [f"reward/{part}" for part in parts]
        return names

    # ---- agreement of ranks

    def _on_first_rank(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the first rank; its result, or its error, on every rank."""
        outcome: Any = None
        error: HeadwayError | None = None
        # A reward that refuses must not skip the exchange below, in which the other ranks wait.
        if self.is_first:
            try:
                outcome = work()
            except HeadwayError as problem:
                error = problem
        outcome, text = self._world.gather((outcome, None if error is None else str(error)))[0]
        if error is not None:
            raise error
        if text is not None:
            raise GaveUpError(text)
        return outcome

    def _answers_digest(self, numbers: Sequence[int]) -> str:
        """All that decides answers beside the weights."""
        rollout = self.recipe.rollout
        content = [
            [self._prompts[number].digest for number in numbers],
            rollout.samples,
            rollout.max_new_tokens,
            rollout.temperature,
            self.recipe.seed,
            self.tokenizer.fingerprint,
            sorted(self.end_ids),
        ]
        # Appended where they are set: journals of runs without them keep their digests.
        if rollout.cuts != Cuts():
            content.append(list(rollout.cuts))
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def _training_digest(self) -> str:
        """Settings that decide what updates make of the weights: with others, answers to later
        batches were drawn by weights that a resumed run does not reach."""
        settings = self.recipe.model_dump(mode="json", include=TRAINING_SETTINGS)
        for name, default in LATER_SETTINGS.items():
            if settings["rollout"][name] == default:
                del settings["rollout"][name]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def needs_scores(self) -> bool:
        """Whether the trainer scores the answers before the first update on them."""
        return self.recipe.rollout.num_updates > 1 or self.score is not None

    def prompt(self, number: int) -> RolloutPrompt:
        """A prompt by its number."""
        return self._prompts[number]


def prompt_numbers(step: StepBatch) -> list[int]:
    """The numbers of the prompts in a batch, in order."""
    numbers: list[int] = []
    for micro in step.microbatches:
        # -1: a row without a prompt, at the end of an epoch.
        numbers += [number for number in micro.extra[PROMPT].tolist() if number >= 0]
    return numbers


class RolloutLoader:
    """Yields the updates of a run with the cursor after each, as `Loader` does for stored data."""

    def __init__(self, rollouts: Rollouts, prompts: Loader) -> None:
        self._rollouts = rollouts
        self._prompts = prompts
        self._collected: _Collected | None = None
        self.read_seconds = 0.0
        """How long this rank waited for the answers of the last step."""
        self.rollout_seconds: float | None = 0.0
        """How much of that was sampling and rewards, not reading prompts."""
        self._prompt_seconds = 0.0
        self._next: tuple[StepBatch, LoaderState] | None = None
        """The batch of prompts that was begun ahead, and the cursor after it."""
        self._state = prompts.state

    @property
    def state(self) -> LoaderState:
        """The cursor after the last update that was returned."""
        return self._state

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[StepBatch, LoaderState]:
        rollouts = self._rollouts
        rollout = rollouts.recipe.rollout
        began = time.perf_counter()
        self._prompt_seconds = 0.0
        # From the number of the step alone, so that a resumed run finds the same update.
        update = rollouts.state.step % rollout.num_updates
        if update == 0 or self._collected is None:
            rollouts.take_begun()
            self._collected = self._collect(rollouts.state.step - update)
            # Later in a rollout the weights that should draw the next answers are gone; a run that
            # resumes there has them in its journal.
            if update == 0 and rollout.ahead:
                self._begin_next()
        collected = self._collected

        # Each pass goes over all groups, each update of a pass over its part of them.
        part = update % rollout.updates
        groups = collected.groups[part :: rollout.updates]
        batch = self._step(groups, collected, update)
        if update == rollout.num_updates - 1:
            self._state = collected.after
            self._collected = None
        else:
            # A run that resumes in the middle of a rollout reads its prompts once more.
            self._state = collected.before
        self.read_seconds = time.perf_counter() - began
        self.rollout_seconds = self.read_seconds - self._prompt_seconds
        return batch, self._state

    def _step(self, groups: Sequence[_Group], collected: _Collected, update: int) -> StepBatch:
        rollouts = self._rollouts
        rollout = rollouts.recipe.rollout
        answers: list[TrainedAnswer] = []
        for group in groups:
            for index, (answer, advantage) in enumerate(
                zip(group.answers, group.advantages, strict=True)
            ):
                old = None
                if rollout.num_updates > 1:
                    old = group.old[index]
                answers.append(
                    TrainedAnswer(
                        group.prompt.ids,
                        answer.ids,
                        answer.logprobs,
                        advantage,
                        old,
                        has_loss=not (rollout.mask_cut and answer.is_cut),
                        kept=answer.kept,
                        mask=answer.mask,
                        routes=answer.routes,
                    )
                )
        staleness = rollouts.state.step - collected.version
        facts = {**collected.facts, "rollout/staleness": float(staleness)}
        return answer_step(answers, rollouts.step_rows(), collected.epoch, facts).batch

    def _begin_next(self) -> None:
        """Have the first batch of the next rollout answered and judged while this one trains."""
        rollouts = self._rollouts
        steps = rollouts.recipe.steps
        start = rollouts.state.step + rollouts.recipe.rollout.num_updates
        # Nothing would train on it.
        if steps is not None and start >= steps:
            return
        try:
            self._next = next(self._prompts)
        except StopIteration:
            return
        step, after = self._next
        # The cursor counts the batches that were read; the number of this one is one less.
        rollouts.begin(after.batch - 1, prompt_numbers(step), start)

    def _next_prompts(self) -> tuple[StepBatch, LoaderState]:
        """The next batch of prompts, and the cursor after it."""
        if self._next is not None:
            batch_and_cursor = self._next
            self._next = None
            return batch_and_cursor
        began = time.perf_counter()
        batch_and_cursor = next(self._prompts)
        self._prompt_seconds += time.perf_counter() - began
        return batch_and_cursor

    def _collect(self, start: int) -> _Collected:
        """Read batches of prompts until there are enough groups, and sample or read their
        answers. `start`: updates before the first one on them."""
        rollouts = self._rollouts
        rollout = rollouts.recipe.rollout
        before = self._state
        groups: list[_Group] = []
        without_signal: list[_Group] = []
        sampled_batches: list[tuple[SampledBatch, RewardedBatch]] = []
        after = before
        epoch = 0
        for _ in range(1 + rollout.refill):
            step, after = self._next_prompts()
            epoch = step.stats.epoch
            sampled = rollouts.answers(after.batch - 1, prompt_numbers(step), start)
            if rollouts.recipe.reward:
                rewarded = rollouts.rewards(sampled)
            else:
                rewarded = rollouts.without_rewards(sampled)
            sampled_batches.append((sampled, rewarded))
            for group in self._groups(sampled, rewarded, start):
                if rollout.refill and not group.has_signal:
                    without_signal.append(group)
                else:
                    groups.append(group)
            if len(groups) >= rollout.prompts:
                break
        # The last refill may have brought more than are missing; an update keeps its size.
        groups = groups[: rollout.prompts]
        # Every update needs a group; one without signal changes nothing. The last batch of an epoch
        # may have fewer prompts than a rollout has updates: some then train on the same answers.
        groups += without_signal[: max(0, rollout.updates - len(groups))]
        groups = [groups[index % len(groups)] for index in range(max(len(groups), rollout.updates))]
        groups = self._rate(groups)
        version = min(sampled.version for sampled, _ in sampled_batches)
        return _Collected(groups, version, self._facts(sampled_batches), before, after, epoch)

    def _rate(self, groups: Sequence[_Group]) -> list[_Group]:
        """The groups of a rollout with the advantages of their answers."""
        asked = [
            AnswerGroup(group.rewards, tuple(len(answer.ids) for answer in group.answers))
            for group in groups
        ]
        advantages = rated(self._rollouts.recipe.objective, asked)
        return [replace(group, advantages=of) for group, of in zip(groups, advantages, strict=True)]

    def _groups(
        self, sampled: SampledBatch, rewarded: RewardedBatch, start: int
    ) -> Iterator[_Group]:
        """The answers of a batch by their prompts, with the rewards that count."""
        rollouts = self._rollouts
        weight = rollouts.recipe.objective.reward_divergence
        totals = list(rewarded.totals)
        old: tuple[Floats, ...] = ()
        if rollouts.needs_scores:
            scored = rollouts.scores(sampled, start)
            old = scored.old
            if scored.divergence:
                # Before the advantages: the divergence is compared within the group, as rewards are.
                totals = [
                    total - weight * divergence
                    for total, divergence in zip(totals, scored.divergence, strict=True)
                ]
        samples = rollouts.recipe.rollout.samples
        # `_drawn` asks for all samples of a prompt one after the other.
        for first in range(0, len(sampled.answers), samples):
            part = slice(first, first + samples)
            answers = sampled.answers[part]
            yield _Group(
                rollouts.prompt(answers[0].prompt), answers, tuple(totals[part]), old[part]
            )

    def _facts(self, batches: Sequence[tuple[SampledBatch, RewardedBatch]]) -> dict[str, float]:
        """Numbers about the rollout, for the record of its updates."""
        samples = self._rollouts.recipe.rollout.samples
        answers = [answer for sampled, _ in batches for answer in sampled.answers]
        # As if it were one batch, also where refill has read several: the record describes all that
        # was sampled, not only what is trained on.
        joined = RewardedBatch(
            0,
            "",
            tuple(total for _, rewarded in batches for total in rewarded.totals),
            tuple(parts for _, rewarded in batches for parts in rewarded.parts),
            tuple(texts for _, rewarded in batches for texts in rewarded.problems),
        )
        facts = _reward_facts(joined, answers)
        groups = [
            joined.totals[first : first + samples]
            for first in range(0, len(joined.totals), samples)
        ]
        without_signal = sum(1 for totals in groups if max(totals) == min(totals))
        facts["rollout/no_signal"] = without_signal / len(groups)
        facts["rollout/prompts"] = float(len(groups))
        seconds = sum(sampled.seconds for sampled, _ in batches)
        facts["rollout/seconds"] = seconds
        facts["rollout/refresh_seconds"] = self._rollouts.refresh_seconds
        facts["rollout/reward_seconds"] = sum(rewarded.seconds for _, rewarded in batches)
        if seconds:
            num_tokens = sum(len(answer.ids) for answer in answers)
            facts["rollout/tokens_per_second"] = num_tokens / seconds
        return facts

    # ---- what a run asks any loader

    def close(self) -> None:
        """Stop reading, and end the processes of rewards."""
        self._prompts.close()
        self._rollouts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def batches_in(self, epochs: int) -> int:
        """Batches of prompts in whole passes over them."""
        return self._prompts.batches_in(epochs)

    def rows_per_epoch(self) -> int:
        """Prompts of one pass."""
        return self._prompts.rows_per_epoch()

    def amount(self, batches: int, epochs: float | None = None) -> DataAmount:
        """How many prompts there are, and how much of them some updates read."""
        rollout = self._rollouts.recipe.rollout
        return self._prompts.amount(-(-batches // rollout.num_updates), epochs)

    def documents_of(self, state: LoaderState, first: int, last: int) -> dict[str, list[int]]:
        """The prompts of some batches, by source."""
        return self._prompts.documents_of(state, first, last)

    def batches_reading(
        self, wanted: Mapping[int, range], stops: Callable[[], bool]
    ) -> ReplayedBatches:
        """Which batches read some prompts."""
        return self._prompts.batches_reading(wanted, stops)

    def steps_after(self, batch: int) -> int:
        """Updates after those on a batch of prompts."""
        return self._prompts.steps_after(batch) * self._rollouts.recipe.rollout.num_updates


def _unrewarded(batch: int, answers: Sequence[SampledAnswer]) -> RewardedBatch:
    """A reward of 0 for every answer."""
    return RewardedBatch(batch, "", (0.0,) * len(answers), ({},) * len(answers))


def _reward_facts(rewarded: RewardedBatch, answers: Sequence[SampledAnswer]) -> dict[str, float]:
    """Means over answers: reward and its parts, their lengths, how many were cut or failed."""
    count = len(answers)
    totals = np.array(rewarded.totals, np.float64)
    facts = {"reward": float(totals.mean()), "reward/std": float(totals.std())}
    names = sorted({name for parts in rewarded.parts for name in parts})
    # The part of a single reward is the reward itself.
    if len(names) > 1:
        for name in names:
            facts[f"reward/{name}"] = sum(parts.get(name, 0.0) for parts in rewarded.parts) / count
    facts["answer/tokens"] = sum(len(answer.ids) for answer in answers) / count
    facts["answer/cut"] = sum(answer.is_cut for answer in answers) / count
    if any(rewarded.problems):
        facts["reward/failed"] = sum(1 for texts in rewarded.problems if texts) / count
    return facts
