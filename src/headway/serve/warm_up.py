"""What the first request would start: the process that checks grammars, and those that decode media.
In: the models of a server; out: processes that have done such a job once.

The engines warm up by themselves (`infer/engine/warm_up.py`). All of this happens before the server
says that it is ready.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from headway.errors import first_line
from headway.media.items import MediaRef
from headway.media.png import write_png
from headway.prepare.media_inputs import CellInput, MediaInputSpec
from headway.serve.workers import WorkerPool

if TYPE_CHECKING:
    from headway.serve.serve_state import ServeState

PICTURE_PIXELS = 64
"""Of a side of the made-up picture."""
SOUND_SECONDS = 0.25
SOUND_RATE = 16_000
log = logging.getLogger("headway")


async def warm_up(state: ServeState) -> None:
    """Start and run once whatever the first request would wait for; none of it ends a server."""
    jobs = [model.warm_up() for model in state.bases]
    inputs: dict[str, MediaInputSpec] = {}
    for model in state.bases:
        inputs |= model.facts.media_inputs
    if inputs:
        jobs.append(decode_samples(state.decoders, inputs, state.limits.media_seconds))
    for problem in await asyncio.gather(*jobs, return_exceptions=True):
        if isinstance(problem, Exception):
            # The first request that needs it tries again, and tells its client.
            log.warning("serve: could not be warmed up: %s", first_line(problem))


async def decode_samples(
    decoders: WorkerPool, inputs: Mapping[str, MediaInputSpec], seconds: float
) -> None:
    """Decode a made-up item of each modality in every process that decodes."""
    items = [
        (ref, _sized(inputs[ref.modality])) for ref in sample_media() if ref.modality in inputs
    ]
    most_bytes = sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for _, spec in items)
    job = ("media", items, PICTURE_PIXELS**2)
    # As many jobs as processes, at once: each process is started for one of them.
    await asyncio.gather(*(decoders.run(job, seconds, most_bytes) for _ in range(decoders.count)))


def sample_media() -> list[MediaRef]:
    """A black picture and a silent sound."""
    from headway.media.sound import write_wave

    picture = write_png(np.zeros((PICTURE_PIXELS, PICTURE_PIXELS, 3), np.uint8))
    sound = write_wave(np.zeros(int(SOUND_SECONDS * SOUND_RATE), np.float32), SOUND_RATE)
    return [
        MediaRef("image", data=picture, name="made-up picture"),
        MediaRef("audio", data=sound, name="made-up sound"),
    ]


def _sized(spec: MediaInputSpec) -> MediaInputSpec:
    if isinstance(spec, CellInput):
        return spec.sized(spec.spec.fit(PICTURE_PIXELS, PICTURE_PIXELS, "made-up picture"))
    return spec
