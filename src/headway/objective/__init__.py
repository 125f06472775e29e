"""Losses. `KINDS` names the modules that a recipe's `objective.kind` may choose."""

KINDS = (
    "contrastive",
    "distill",
    "dpo",
    "head_sparsity",
    "kto",
    "next_token",
    "orpo",
    "reward",
    "simpo",
)
