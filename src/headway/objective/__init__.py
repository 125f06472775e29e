"""Losses. `KINDS` names the modules that a recipe's `objective.kind` may choose."""

KINDS = ("dpo", "head_sparsity", "next_token")
