"""Destinations of metrics and events.

`KINDS` lists the modules that an entry of the recipe's `track` may choose.
"""

KINDS = ("alert", "heartbeat", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")
