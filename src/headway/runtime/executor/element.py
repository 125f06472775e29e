"""One element of an array job: `python -m headway.runtime.executor.element JOB.json`.

It does every N-th task and leaves what failed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from headway.errors import HeadwayError, LaunchError
from headway.runtime.executor.task import check_worker, inspect_worker, run_task
from headway.runtime.json_file import read_object
from headway.runtime.storage import write_atomic


def main(job_file: Path, element: int) -> int:
    """Do the tasks of this element that are not done yet."""
    job = read_object(job_file, LaunchError)
    tasks: list[dict[str, Any]] = job["tasks"]
    for index in range(element, len(tasks), job["elements"]):
        try:
            check_worker(
                inspect_worker(job["work"]), Path(job["work"]), job["token"], job["versions"]
            )
            outcome = run_task(job["work"], tasks[index])
        except HeadwayError as problem:
            outcome = {"state": "failed", "kind": type(problem).__name__, "message": str(problem)}
        if outcome["state"] != "done":
            # The driver submits the tasks that this element leaves undone again.
            content = {"index": index, "kind": "", "message": "", **outcome}
            failure_file = job_file.with_name(f"{job_file.stem}-failed-{index}.json")
            write_atomic(failure_file, json.dumps(content))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(os.environ["SLURM_ARRAY_TASK_ID"])))
