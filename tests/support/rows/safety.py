"""Stopping, supervising, healing and alerts."""

from typing import Any

from headway.config.load import load
from headway.train.config import Recipe
from support.setting_runs import Row, loss_numbers, numbers_or_refusal, trained_run


def recipe(overrides: tuple[str, ...]) -> Any:
    return load(Recipe, None, list(overrides))


def alert(settings: str = "") -> list[str]:
    """The tracks of a recipe: one alert, by a command that does nothing unless the settings name another."""
    plain = "" if "command:" in settings else "command: ['true'], "
    form = "" if "form:" in settings else "form: command, "
    return [f"{{kind: alert, {form}{plain}{settings}}}"]


def alert_lines(overrides: tuple[str, ...]) -> Any:
    """What the log says of alerts, without the time."""
    lines = trained_run(overrides).log.splitlines()
    return [line.split(" alert", 1)[1] for line in lines if " alert" in line]


def tracker(name: str) -> Any:
    return lambda overrides: getattr(recipe(overrides).track[0], name)


def spikes(overrides: tuple[str, ...]) -> Any:
    return [record["step"] for record in trained_run(overrides).records if "anomaly" in record]


NAN = ("steps=8", "optim.lr=1e30", "optim.clip=null")
SPIKES = ("data.train=null", "steps=12", "optim.lr=0.1", "heal.window=4", "heal.sigma=0.5")
POST = "{kind: heartbeat, url_env: "

ROWS: dict[str, Row] = {
    "run.takeover_seconds": ((), 120.0, 1.0, lambda o: recipe(o).run.takeover_seconds),
    "data.accept_changed": ((), False, True, lambda o: recipe(o).data.accept_changed),
    "run.supervise": ((), False, True, lambda o: recipe(o).run.supervise),
    "supervise.max_restarts": ((), 5, 0, lambda o: recipe(o).supervise),
    "supervise.backoff_seconds": ((), 10.0, 0.0, lambda o: recipe(o).supervise),
    "supervise.hang_seconds": ((), 900.0, 5.0, lambda o: recipe(o).supervise),
    "heal.on_nan": (NAN, "skip", "rollback", numbers_or_refusal),
    "heal.on_spike": (SPIKES, "alert", "skip", loss_numbers),
    "heal.sigma": (SPIKES, 0.5, None, spikes),
    "heal.window": (SPIKES, 4, 60, spikes),
    "heal.skip_before": ((*SPIKES, "heal.on_spike=rollback", "checkpoint.every=1", "heal.limit=30"), 0, 1, loss_numbers),
    "heal.limit": ((*SPIKES, "heal.on_spike=skip"), 30, 0, numbers_or_refusal),
    "run.grace_seconds": ((), 120.0, 1.0, lambda o: recipe(o).run.grace_seconds),
    "track[alert].kind": ((), [], alert(), alert_lines),
    "track[alert].form": ((), alert(), alert("form: webhook, url_env: NO_SUCH"), numbers_or_refusal),
    "track[alert].url_env": ((), alert("form: slack, url_env: NO_SUCH"), alert("form: slack, url_env: NOR_THIS"), numbers_or_refusal),
    "track[alert].command": ((), alert(), alert("command: ['false']"), alert_lines),
    "track[alert].events": ((), alert("events: [start]"), alert("events: [finish]"), alert_lines),
    "track[alert].every_seconds": ((), alert("every_seconds: 9"), alert("every_seconds: 0"), tracker("every_seconds")),
    "track[alert].timeout_seconds": (
        (), alert("command: [sleep, '0.5'], timeout_seconds: 0.1"), alert("command: [sleep, '0.5'], timeout_seconds: 30"), alert_lines,
    ),
    "track[heartbeat].kind": ((), [], [POST + "NO_SUCH}"], numbers_or_refusal),
    "track[heartbeat].url_env": ((), [POST + "NO_SUCH}"], [POST + "NOR_THIS}"], numbers_or_refusal),
    "track[heartbeat].every": ((), [POST + "A, every: 1}"], [POST + "A, every: 2}"], tracker("every")),
    "track[heartbeat].timeout_seconds": ((), [POST + "A, timeout_seconds: 1}"], [POST + "A, timeout_seconds: 2}"], tracker("timeout_seconds")),
}  # fmt: skip
