"""Tasks: what a run learns from, and how. `KINDS` names the modules that a recipe's
`objective.kind` may choose.

    base.py          what is asked of a task, and its loss
    preference/      what tasks over pairs share: dpo, orpo, simpo, reward
    kto/             labelled answers
    grpo/            answers that the model samples itself, and their rewards
    answers.py       what tasks share that learn from such answers
    balance.py       the losses of mixtures of experts, added to any task
"""

SETTING = "objective"
"""The section of a recipe that chooses a task."""

KINDS = (
    "contrastive",
    "distill",
    "dpo",
    "grpo",
    "head_sparsity",
    "kto",
    "next_token",
    "orpo",
    "reward",
    "simpo",
)
