"""The settings of rollouts: how many answers are sampled of how many prompts, and how. No torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import model_validator

from headway.config.section import Section, setting

JOURNAL = "rollouts.jsonl"
"""In the run folder: what was sampled and what it earned (journal.py)."""
MOST_KEPT = 1024
"""Ids that a token may be drawn from where the distribution is cut. The journal and a column of
every microbatch have them, int32: at most 4 KiB for each sampled token."""


class Cuts(NamedTuple):
    """What is left out of the distribution that tokens are drawn from, after the temperature: in
    this order, and what is left is renormalised."""

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


class RolloutConfig(Section):
    """How the model answers prompts while it trains."""

    # prompts, samples, updates and passes are fixed: the number of a step says which part of which
    # rollout it trains on (`RolloutLoader`), also in a run that resumes.
    prompts: int = setting(
        8,
        "Prompts of one rollout over all ranks; its updates train on all of their answers.",
        gt=0,
        on_resume="fixed",
    )
    samples: int = setting(
        8, "Answers of each prompt, compared with each other.", ge=1, on_resume="fixed"
    )
    max_new_tokens: int = setting(
        256, "Tokens of an answer, at most; data.seq_len holds the prompt, too.", gt=0
    )
    temperature: float = setting(
        1.0,
        "Temperature of the sampling. The loss uses the probabilities of the distribution that "
        "was sampled from.",
        gt=0,
    )
    top_k: int | None = setting(
        None,
        f"Draw from the so many likeliest tokens; null = all, or {MOST_KEPT} with top_p or min_p. "
        "The journal has the ids that each token was drawn from, and the loss uses them.",
        ge=1,
        le=MOST_KEPT,
    )
    top_p: float | None = setting(
        None,
        "Draw from the smallest set of likeliest tokens with this total probability.",
        gt=0,
        le=1,
    )
    min_p: float | None = setting(
        None,
        "Draw from the tokens with at least this share of the likeliest one's probability.",
        gt=0,
        le=1,
    )
    updates: int = setting(
        1,
        "Updates of one pass over the answers of a rollout: each trains on the answers of equally "
        "many prompts.",
        gt=0,
        on_resume="fixed",
    )
    passes: int = setting(
        1, "How often the answers of a rollout are trained on.", gt=0, on_resume="fixed"
    )
    ahead: Literal[0, 1] = setting(
        0,
        "Rollouts that are begun ahead: with 1, the next prompts are answered and judged while the "
        "updates on the answers at hand are computed. Their weights are then as many updates older "
        "as a rollout has; objective.importance corrects for it.",
        on_resume="free",
    )
    refill: int = setting(
        0,
        "Leave out prompts whose answers all have the same reward, and sample up to so many "
        "further batches of prompts to replace them (dynamic sampling of DAPO). 0 = train on all.",
        ge=0,
    )
    mask_cut: bool = setting(
        False, "Answers that were cut at max_new_tokens carry no loss.", on_resume="free"
    )
    # These three decide how fast answers come, not which: a draw depends on the weights, the
    # prompt and its key alone (sampler.py).
    at_once: int = setting(
        64, "Answers that are sampled at the same time on a rank.", gt=0, on_resume="free"
    )
    cache_gib: float | None = setting(
        None,
        "GiB of keys and values while answers are sampled, per rank; null = as much as at_once "
        "answers of full length need, at most a share of the free memory.",
        gt=0,
        on_resume="free",
    )
    workers: int = setting(1, "Processes of each reward that needs some.", gt=0, on_resume="free")
    difference_limit: float | None = setting(
        0.5,
        "Stop where the trainer's log-probabilities of sampled tokens differ from the sampler's "
        "by more than this, on average over a step. null = never.",
        gt=0,
        on_resume="free",
    )
    routes: Literal["replay", "own"] = setting(
        "replay",
        "In a mixture of experts the trainer passes every token through the experts that the "
        "sampler chose for it (replay), or through those that its own routers choose (own).",
        on_resume="fixed",
    )
    exact: bool = setting(
        False,
        "Sampler and trainer compute the log-probability of every sampled token in the same bits; "
        "a difference ends the run. Slower. On CPUs, of plain transformers; docs/rl.md lists what works.",
        on_resume="fixed",
    )
    # Validations are not in the journal, so nothing that is resumed depends on them.
    valid_samples: int = setting(
        1,
        "Answers of each held-out prompt in a validation; with more than one, pass@k is reported.",
        gt=0,
        on_resume="free",
    )
    valid_temperature: float = setting(
        0.0, "Temperature of a validation; 0 = the likeliest token each time.", ge=0
    )
    pass_at: float = setting(
        1.0, "The reward from which an answer counts as right in pass@k.", on_resume="free"
    )

    @model_validator(mode="after")
    def _fits(self) -> RolloutConfig:
        if self.prompts % self.updates:
            raise ValueError(
                f"has prompts={self.prompts} and updates={self.updates}; each update trains on "
                "equally many prompts. Choose prompts as a multiple of updates"
            )
        if self.valid_samples > 1 and self.valid_temperature == 0:
            raise ValueError(
                f"has valid_samples={self.valid_samples} and valid_temperature=0, with which all "
                "samples are equal. Set valid_temperature, e.g. 1.0"
            )
        return self

    @property
    def cuts(self) -> Cuts:
        """What the sampling leaves out."""
        cuts = Cuts(self.top_k, self.top_p, self.min_p)
        if cuts != Cuts() and cuts.top_k is None:
            # The ids are kept for every token, so there is a bound on their number.
            cuts = cuts._replace(top_k=MOST_KEPT)
        return cuts

    @property
    def num_updates(self) -> int:
        """Updates on the answers of one rollout."""
        return self.passes * self.updates
