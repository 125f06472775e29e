"""A verb over several ranks of this machine: the same command line is started once per rank, and `work` runs in each of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from headway.parallel.collectives import RankGroup

TIMEOUT_SECONDS = 1800.0
"""How long a rank waits for the others."""


def over_ranks(context: typer.Context, device: str, nproc: int | None, gpus: str | None, work: Callable[[RankGroup], None]) -> None:
    """Run `work` in as many ranks as were asked for, or in this process where it is one of several already."""
    from headway.cli.train import as_rank
    from headway.launch.local import Wishes, is_launched, launch, plan_ranks
    from headway.launch.outer import meeting_point
    from headway.runtime.process import set_environment
    from headway.runtime.temporary import temporary_folder

    if is_launched(os.environ):
        as_rank(lambda: _joined(device, work))
        return
    job = plan_ranks(device, Wishes(nproc, gpus), os.environ)
    if job.choice is not None:
        log = logging.getLogger("headway")
        for note in (*job.choice.notes, *job.choice.warnings):
            log.info("%s", note)
    if not job.needs_launcher:
        set_environment({**(job.choice.environment if job.choice is not None else {}), **meeting_point(os.environ)})
        _joined(device, work)
        return
    level = logging.getLevelName(logging.getLogger("headway").level)
    with temporary_folder("verb") as folder:  # there is no run folder: what ranks print besides their results goes nowhere
        code = launch(job, command_line(context), folder / "no-logs", {**os.environ, "LOG_LEVEL": level})
    if code:
        raise typer.Exit(code)


def _joined(device: str, work: Callable[[RankGroup], None]) -> int:
    from headway.parallel.collectives import start_group
    from headway.runtime.device import backend_of
    from headway.runtime.process import from_environment

    with start_group(from_environment(), backend_of(device), TIMEOUT_SECONDS) as group:
        work(group)
    return 0


def command_line(context: typer.Context) -> list[str]:
    """The verb and everything it was told, as arguments of `headway`; what has its default is left out."""
    words: list[str] = []
    here: Any = context
    while here.parent is not None:
        words.insert(0, here.info_name)
        here = here.parent
    positional: list[str] = []
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name not in context.params or value == parameter.get_default(context):
            continue
        values: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
        if parameter.param_type_name == "argument":
            positional += map(str, values)
        elif isinstance(value, bool):
            words += [parameter.opts[0] if value else parameter.secondary_opts[0]]
        else:
            # One word each, so that a value may begin with a dash.
            words += [f"{parameter.opts[0]}={one}" for one in values]
    return [*words, *(["--", *positional] if positional else [])]
