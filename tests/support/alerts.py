"""Alerts in a recipe, and what a run's log says of them."""


def alert(settings: str = "") -> list[str]:
    """The tracks of a recipe: one alert, by a command that does nothing unless the settings name another."""
    plain = "" if "command:" in settings else "command: ['true'], "
    form = "" if "form:" in settings else "form: command, "
    return [f"{{kind: alert, {form}{plain}{settings}}}"]


def alert_lines(log: str) -> list[str]:
    """What was told, and what could not be, without the time."""
    return [line.split(" alert", 1)[1] for line in log.splitlines() if " alert" in line]
