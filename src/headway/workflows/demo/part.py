"""A part of a demo that is made once: its result lies in the demo's folder, and a later call reads it.

demo_part(out, "media", work)  ->  out/media.json
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.runtime.storage import write_atomic

log = logging.getLogger("headway")


def demo_part(out: Path, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a part, from its file if it was done before."""
    path = out / f"{name}.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    log.info("demo: %s", name)
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    result = work()
    result[f"{name}_seconds"] = round(time.monotonic() - began, 1)
    # Written when the part is complete, so that one that was interrupted is done again.
    write_atomic(path, json.dumps(result) + "\n")
    return result
