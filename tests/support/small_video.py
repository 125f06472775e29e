"""Small videos for tests."""

import io
from fractions import Fraction

import numpy as np


def film(frames: int = 24, kind: str = "mp4", sound: bool = True, rate: int = 16_000) -> bytes:
    """Grey frames that grow brighter from 0 to 230, with a tone of 1000 Hz in `rate` samples a second."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format=kind) as container:
        stream = container.add_stream("mpeg4", rate=12)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        track = container.add_stream("aac", rate=rate, layout="mono") if sound else None
        for number in range(frames):
            pixels = np.full((32, 32, 3), 10 * number % 240, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        container.mux(stream.encode())
        if track is not None:
            wave = (0.5 * np.sin(2 * np.pi * 1000 * np.arange(frames * rate // 12) / rate)).astype(
                np.float32
            )
            frame = av.AudioFrame.from_ndarray(wave[None], format="fltp", layout="mono")
            frame.sample_rate = rate
            frame.time_base = Fraction(1, rate)
            frame.pts = 0
            for packet in [*track.encode(frame), *track.encode(None)]:
                container.mux(packet)
    return out.getvalue()
