"""Settings of trackers that need a package: where the run is kept, and what its process is told."""

from typing import Any

from headway.track.service import ServiceConfig
from headway.train.config import Recipe
from support.setting_runs import BASE, Row, load


def told(overrides: tuple[str, ...]) -> Any:
    """What decides the run in the service: its target, the variables of the package's process, and the settings `open` gets."""
    (tracker,) = load(Recipe, None, [*BASE, *overrides]).track
    if not isinstance(tracker, ServiceConfig):
        return tracker.kind
    return (
        tracker.kind,
        tracker.target(),
        tracker.variables(load(Recipe, None, [*BASE, *overrides]).run.folder),
        tracker.model_dump(exclude={"kind"}),
    )


def rows(kind: str, **values: tuple[str, str]) -> dict[str, Row]:
    """Two values of each setting."""
    trackers = {
        f"track[{kind}].{name}": (
            (),
            [f"{{kind: {kind}, {name}: {a}}}"],
            [f"{{kind: {kind}, {name}: {b}}}"],
            told,
        )
        for name, (a, b) in values.items()
    }
    return {
        f"track[{kind}].kind": ((), ["{kind: tensorboard}"], [f"{{kind: {kind}}}"], told),
        **trackers,
    }


SECONDS = {"timeout_seconds": ("60", "5")}
ROWS: dict[str, Row] = {
    **rows(
        "wandb",
        project=("a", "b"),
        entity=("null", "lab"),
        mode=("offline", "online"),
        group=("null", "g"),
        tags=("[]", "[x]"),
        **SECONDS,
    ),
    **rows(
        "mlflow",
        uri=("null", "http://host:5000"),
        experiment=("a", "b"),
        artifacts=("true", "false"),
        weights=("false", "true"),
        **SECONDS,
    ),
    **rows(
        "swanlab",
        project=("a", "b"),
        workspace=("null", "lab"),
        mode=("offline", "online"),
        **SECONDS,
    ),
    **rows(
        "trackio",
        project=("a", "b"),
        folder=("null", "there"),
        space=("null", "me/curves"),
        **SECONDS,
    ),
}
