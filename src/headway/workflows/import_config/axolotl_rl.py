"""axolotl's keys of preference training and reward models. In: a draft; out: an objective and its
settings.
"""

from __future__ import annotations

from typing import Any

from headway.errors import ConfigError
from headway.workflows.import_config.preference import finish_objective, of_objective
from headway.workflows.import_config.rules import ImportDraft, Rule, missing, number, shown, yes

OBJECTIVES = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "simpo": "simpo", "kto": "kto"}
"""A value of axolotl's `rl` -> headway's objective.kind."""
LOSSES = {"dpo": "sigmoid", "ipo": "ipo"}
"""A value of axolotl's `rl` -> headway's objective.loss_type, where the objective has several."""


def kind_of(draft: ImportDraft) -> str | None:
    """The headway objective of a file that trains on preferences or a reward model, else None."""
    if draft.value("reward_model"):
        return "reward"
    return OBJECTIVES.get(str(draft.value("rl")))


def objective(draft: ImportDraft, key: str, value: Any) -> None:
    """The rule of `rl`. A value without an objective here is refused: a recipe without it would
    train something else.
    """
    if str(value) not in OBJECTIVES:
        raise ConfigError(
            f"rl is {shown(value)}, which headway cannot train; it has {', '.join(OBJECTIVES)} "
            "(objective.kind)."
        )
    draft.write(key, value, "objective.kind", OBJECTIVES[value])
    # IPO is a loss of the objective dpo here.
    if value in LOSSES:
        draft.write(key, value, "objective.loss_type", LOSSES[value])


def reward_model(draft: ImportDraft, key: str, value: Any) -> None:
    """The rule of a switch: on, it is the objective reward, which is Bradley-Terry on pairs."""
    if yes(key, value):
        draft.write(key, value, "objective.kind", "reward")
    else:
        draft.tell(key, value, "automatic", note="not a reward model")


def supervised_part(draft: ImportDraft, key: str, value: Any) -> None:
    """The rule of `cpo_alpha`: the weight of a supervised loss that TRL adds to SimPO's.

    Only a weight of 0, which switches that loss off, is what headway trains.
    """
    if number(key, value):
        draft.tell(
            key,
            value,
            "missing",
            note="a supervised loss beside the preference; objective simpo has none",
        )
    else:
        draft.tell(key, value, "automatic", note="objective simpo has no supervised part")


def finish(draft: ImportDraft) -> None:
    """After all keys of the file: the defaults of those that it leaves out."""
    kind = kind_of(draft)
    finish_objective(draft, kind)
    # TRL's default of the weight is 1, so a file without the key has the supervised loss.
    if kind == "simpo" and draft.value("cpo_alpha") is None:
        supervised_part(draft, "cpo_alpha", 1.0)


RULES: dict[str, Rule] = {
    "rl": objective,
    "rl_beta": of_objective(kind_of, "beta", number),
    # TRL has one setting, beta, for both: in ORPO it is the weight of the odds ratio.
    "orpo_alpha": of_objective(kind_of, "beta", number),
    "simpo_gamma": of_objective(kind_of, "gamma", number),
    "cpo_alpha": supervised_part,
    "kto_desirable_weight": of_objective(kind_of, "desirable_weight", number),
    "kto_undesirable_weight": of_objective(kind_of, "undesirable_weight", number),
    "dpo_label_smoothing": of_objective(kind_of, "label_smoothing", number),
    "precompute_ref_log_probs": of_objective(
        kind_of, "reference_logps", lambda key, value: "cached" if yes(key, value) else "live"
    ),
    "reward_model": reward_model,
    "center_rewards_coefficient": of_objective(kind_of, "center_rewards_coefficient", number),
    "process_reward_model": missing(
        "a process reward model scores steps of an answer",
        "objective: {kind: reward} scores whole answers",
    ),
    "rpo_alpha": missing("no supervised loss beside that of pairs", "objective: {kind: orpo}"),
}
