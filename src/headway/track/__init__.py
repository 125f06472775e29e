"""Where metrics and events go. `KINDS` names the modules that an entry of a recipe's `track` may choose."""

KINDS = ("alert", "heartbeat", "tensorboard")
