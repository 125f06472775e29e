"""The settings of rollouts: how many answers are sampled of how many prompts, and how. No torch."""

from __future__ import annotations

from headway.config.section import Section, setting


class RolloutConfig(Section):
    """How the model answers prompts while it trains."""

    prompts: int = setting(
        8, "Prompts of one step over all ranks; a step trains on all of their answers.", gt=0
    )
    samples: int = setting(8, "Answers of each prompt, compared with each other.", ge=1)
    max_new_tokens: int = setting(256, "Tokens of an answer, at most.", gt=0)
    temperature: float = setting(
        1.0,
        "Temperature of the sampling. The loss uses the probabilities of the distribution that "
        "was sampled from.",
        gt=0,
    )
    updates: int = setting(1, "Updates on the answers of one rollout.", gt=0)
    refill: int = setting(
        0,
        "Leave out prompts whose answers all have the same reward, and read up to so many further "
        "batches of prompts to replace them (dynamic sampling of DAPO). 0 = train on all.",
        ge=0,
    )
    mask_cut: bool = setting(
        False, "Answers that were cut at max_new_tokens carry no loss.", on_resume="free"
    )
    at_once: int = setting(64, "Answers that are sampled at once on a rank.", gt=0)
    workers: int = setting(1, "Processes of each reward that needs some.", gt=0, on_resume="free")
    difference_limit: float | None = setting(
        1.0,
        "Stop where the trainer's log-probabilities of sampled tokens differ from the sampler's "
        "by more than this, on average over a step. null = never.",
        gt=0,
        on_resume="free",
    )
    valid_samples: int = setting(
        1, "Answers of each held-out prompt; with k of them pass@k is reported, too.", gt=0
    )
    passes_at: float = setting(1.0, "The reward from which an answer counts as passed in pass@k.")
