"""Reward models: `score` of the public API. Loads torch only when it is called."""

from __future__ import annotations

from typing import Any

from headway.api.data import Data, input_paths
from headway.api.models import Where, place_of
from headway.errors import ConfigError


def score(
    model: Where, data: Data, *, chat_template: str | None = None, max_length: int | None = None, device: str = "auto",
    precision: str = "auto",
) -> list[dict[str, Any]]:  # fmt: skip
    """Every record of some data with its scores by a reward model, in order.

    Pairs get `reward_chosen` and `reward_rejected`, conversations `reward`, a prompt with `generations` gets `rewards` and `best`.

    Example:
        >>> scored = hw.score("runs/reward-laptop", [{"prompt": "1+1?", "response": "2"}])
        >>> good = [record for record in scored if record["reward"] > 0]
    """
    from headway.eval.reward import evaluate_reward
    from headway.eval.reward_data import RewardSource
    from headway.infer.load import load_model
    from headway.runtime.device import choose_compute

    paths = input_paths(data)
    if len(paths) != 1:
        raise ConfigError(
            f"data is {len(paths)} paths; give one file, folder or store, or records."
        )
    compute = choose_compute(device, precision)
    loaded = load_model(place_of(model), device=compute.device, dtype=compute.dtype, scores=True)
    found: list[dict[str, Any]] = []
    evaluate_reward(
        loaded, RewardSource(paths[0], chat_template, max_length=max_length), keep=found.append
    )
    return found
