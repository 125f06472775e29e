"""Optimizers, schedules, parameter groups. `KINDS` names the modules that a recipe's `optim.kind` may choose."""

KINDS = ("adamw", "lion", "muon")
