"""The table of settings, one file per part of a recipe; each has ROWS: setting -> (overrides that go before it, two values, what to look at)."""

import importlib
import pkgutil

from support.setting_runs import Row


def all_rows() -> dict[str, Row]:
    """Every file's rows together; a setting may stand in one file only."""
    table: dict[str, Row] = {}
    for module in pkgutil.iter_modules(__path__):
        rows: dict[str, Row] = importlib.import_module(f"{__name__}.{module.name}").ROWS
        assert not table.keys() & rows.keys(), (
            f"{module.name}.py has settings that stand elsewhere: {table.keys() & rows.keys()}"
        )
        table |= rows
    return table
