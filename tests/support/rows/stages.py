"""Settings of stages."""

from support.observe import Row, files

ROWS: dict[str, Row] = {
    "stages.name": ((), ["{name: one}"], ["{name: two}"], files("stages/*")),
}
