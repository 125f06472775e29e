"""Messages between the server and its engine."""

from headway.serve.frames import FrameReader, pack


def test_frames_survive_any_cut() -> None:
    messages = [("events", [(1, (2, 3), None, None, 0, None)]), "x" * 5000, {"a": 1}]
    data = b"".join(map(pack, messages))
    for size in (1, 7, 64, len(data)):
        reader = FrameReader()
        received = []
        for start in range(0, len(data), size):
            received += reader.feed(data[start : start + size])
        assert received == messages
