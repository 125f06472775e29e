"""axolotl's keys of preference training and reward models. In: a draft; out: an objective and its settings."""

from __future__ import annotations

from typing import Any

from headway.errors import ConfigError
from headway.workflows.import_config.preference import finish_objective, of_objective
from headway.workflows.import_config.rules import ImportDraft, Rule, missing, number, shown, yes

OBJECTIVES = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "simpo": "simpo", "kto": "kto"}
LOSSES = {"dpo": "sigmoid", "ipo": "ipo"}


def kind_of(draft: ImportDraft) -> str | None:
    """The preference objective of a file, if it has one."""
    return "reward" if draft.value("reward_model") else OBJECTIVES.get(str(draft.value("rl")))


def objective(draft: ImportDraft, key: str, value: Any) -> None:
    """Preference training. A recipe with another objective than the file's would train something else: refused."""
    if str(value) not in OBJECTIVES:
        raise ConfigError(
            f"rl is {shown(value)}, which headway cannot train; it has {', '.join(OBJECTIVES)} (objective.kind)."
        )
    draft.write(key, value, "objective.kind", OBJECTIVES[value])
    if value in LOSSES:
        draft.write(key, value, "objective.loss_type", LOSSES[value])


def reward_model(draft: ImportDraft, key: str, value: Any) -> None:
    """Bradley-Terry on pairs."""
    if yes(key, value):
        draft.write(key, value, "objective.kind", "reward")
    else:
        draft.tell(key, value, "automatic", note="not a reward model")


def supervised_part(draft: ImportDraft, key: str, value: Any) -> None:
    """The supervised loss beside SimPO's, which TRL adds with weight 1 unless it is 0."""
    if number(key, value):
        draft.tell(
            key,
            value,
            "missing",
            "",
            "a supervised loss beside the preference; objective simpo has none",
        )
    else:
        draft.tell(key, value, "automatic", note="objective simpo has no supervised part")


def finish(draft: ImportDraft) -> None:
    """Defaults that the file leaves out."""
    kind = kind_of(draft)
    finish_objective(draft, kind)
    if kind == "simpo" and draft.value("cpo_alpha") is None:
        supervised_part(draft, "cpo_alpha", 1.0)


RULES: dict[str, Rule] = {
    "rl": objective,
    "rl_beta": of_objective(kind_of, "beta", number),
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
