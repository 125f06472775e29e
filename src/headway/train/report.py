"""Records that have arrived go to metrics.jsonl, some of them to the console and the trackers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.train.evaluate import AT_START

if TYPE_CHECKING:
    from headway.train.build import Run


def report(run: Run, *, everything: bool = False) -> None:
    """Write the records that have arrived: every step to metrics.jsonl, some to the console and the trackers."""
    run.writes.retry(now=False)
    for record in run.meter.collect(everything=everything):
        run.metrics.write(record)
        run.healer.see(run, record)
        if record["step"] % run.recipe.log.every == 0 or record["step"] in (1, run.total_steps) or "valid" in record:
            shown = {name: value for name, value in record.items() if name != AT_START}  # told when it was measured
            for tracker in run.trackers:
                tracker.log(record["step"], shown)
