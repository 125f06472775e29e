"""Optimizers, schedules, parameter groups.

`KINDS` names the modules that a recipe's `optim.kind` may choose.
"""

KINDS = ("adafactor", "adamw", "lion", "muon", "schedule_free")
