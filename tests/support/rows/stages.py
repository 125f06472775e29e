"""Settings of stages."""

from support.setting_runs import Row, files_left

ROWS: dict[str, Row] = {
    "stages.name": ((), ["{name: one}"], ["{name: two}"], files_left("stages/*")),
}
