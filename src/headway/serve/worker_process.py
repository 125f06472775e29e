"""A process that reads what clients send: `python -m headway.serve.worker_process`. Jobs on stdin,
answers on stdout. No torch.

    in     bytes of memory it may use, then jobs:
           ("body", kind, bytes, max_n)    ("media", [(MediaRef, input), ...], pixels)
    out    per job: the lengths of a JSON head and of a body, both,
           e.g. {"status": 200} and the arrays one after the other

Hostile bytes are read here, so that a picture or a body that takes long, takes much memory or
crashes its decoder costs one process and one request, never the server. The answer to a media job
is raw numbers and is never unpickled: a decoder may have been taken over.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import struct
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from headway.errors import DataError, HeadwayError, first_line
from headway.runtime.stop import SIGNALS
from headway.serve.api_errors import ApiError
from headway.serve.frames import LENGTH

if TYPE_CHECKING:
    from headway.media.items import MediaRef
    from headway.prepare.media_inputs import MediaInputSpec

LENGTHS = struct.Struct("<QQ")
"""Of the head and of the body of an answer."""
NICE = 10
"""Engines and the HTTP process come first on a busy machine."""


def main() -> int:
    """Do jobs until stdin ends."""
    for number in SIGNALS:  # the HTTP process decides when this one ends
        signal.signal(number, signal.SIG_IGN)

    os.nice(NICE)
    jobs = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    memory_bytes = _next(jobs)
    if memory_bytes is None:
        return 0

    bound_memory(memory_bytes)
    while (job := _next(jobs)) is not None:
        head, body = answer(job)
        packed = json.dumps(head).encode()
        answers.write(LENGTHS.pack(len(packed), len(body)) + packed)
        answers.write(body)
        answers.flush()
        del body, job  # the next job may need the memory

    return 0


def bound_memory(most_bytes: int) -> None:
    """Let allocations above a limit fail, where the system has such a limit."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    except (ImportError, ValueError, OSError):
        return  # the time limit and the pixels still bound a job


def _next(jobs: BinaryIO) -> Any:
    """The next message; None at the end."""
    head = jobs.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    return pickle.loads(jobs.read(size))


def answer(job: tuple[Any, ...]) -> tuple[dict[str, Any], bytes]:
    """The head and the body of the answer to a job.

    `is_spent` in a head: the process may be damaged, so that its pool ends it.
    """
    try:
        if job[0] == "body":
            return {"status": 200}, pickle.dumps(read_body(*job[1:]), protocol=5)
        return {"status": 200}, decode(*job[1:])
    except ApiError as problem:
        return _failure(problem.status, str(problem), problem.code, problem.param), b""
    except HeadwayError as problem:
        return _failure(400, str(problem)), b""
    except MemoryError:
        message = "The request needs more memory than one request may use to be read. Send less."
        return {**_failure(400, message, "too_much_memory"), "is_spent": True}, b""
    except Exception as problem:
        message = f"The request could not be read: {type(problem).__name__}: {first_line(problem)}"
        return {**_failure(500, message, "internal_error"), "is_spent": True}, b""


def _failure(
    status: int, message: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    return {"status": status, "message": message, "param": param, "code": code}


def read_body(kind: str, body: bytes, max_n: int) -> Any:
    """The call that a body asks for."""
    if kind == "chat":
        from headway.serve.chat_request import read_chat

        return read_chat(body, max_n)
    from headway.serve.text_request import read_completion, read_embedding

    if kind == "completion":
        return read_completion(body, max_n)
    return read_embedding(body)


def decode(items: Sequence[tuple[MediaRef, MediaInputSpec]], most_pixels: int) -> bytes:
    """The arrays of pictures and sounds, one after the other.

    All headers are read before anything is decoded.
    """
    from headway.media.image_header import image_size

    # A few bytes of a picture can claim any size; its header says so before memory is taken.
    pixels = 0
    for ref, _ in items:
        if ref.modality == "image":
            _, width, height = image_size(ref.read(), ref.name)
            pixels += width * height

    if pixels > most_pixels:
        raise DataError(
            f"the pictures of the request have {pixels} pixels; at most {most_pixels} are decoded "
            "together. Send smaller ones."
        )

    return b"".join(source.read(ref).tobytes() for ref, source in items)


if __name__ == "__main__":
    sys.exit(main())
