"""What Python runs in a sandbox: a program of an answer, then expressions whose values are sent
back. Nothing here is trusted: the program runs in the same interpreter and may change all of it.
What arrives outside counts only if it equals values that never come in here.

    file 3   the job: {"program": ..., "steps": [...]}; no steps: the program reads its stdin
    file 4   the values, one JSON object

It is handed to the interpreter as text, so it imports nothing but Python's library. It starts for
every test, so it does without `json`, whose import takes longer than all the rest.
"""

import builtins
import marshal
import os
import sys
from _json import encode_basestring_ascii

DEEPEST = 60
"""Lists in lists that are sent."""


def main() -> None:
    """Run the job of file 3."""
    with os.fdopen(3, "rb") as file:
        job = marshal.loads(file.read())
    # These come from a module that is left out, and programs of contests use them.
    builtins.exit = sys.exit
    builtins.quit = sys.exit
    sys.path += job["folders"]
    source = job["program"]
    steps = job["steps"]
    if steps is None:
        os.close(4)
        sys.argv = ["answer.py"]
        exec(compile(source, "answer.py", "exec"), {"__name__": "__main__"})
        return

    # Not "__main__": what a program does only as a script, such as reading input, is no part of
    # a test that calls its functions.
    names = {"__name__": "answer"}
    exec(compile(source, "answer.py", "exec"), names)
    values = []
    for step in steps:
        if step["kind"] == "run":
            exec(compile(step["code"], "test", "exec"), names)
            continue
        try:
            # What cannot be sent fails its own test alone: the others are asked all the same.
            value = encode(eval(compile(step["code"], "test", "eval"), names), 0)
        except Exception:
            value = None
        values.append(value)
    with os.fdopen(4, "wb") as file:
        file.write(f'{{"values": {as_json(values)}}}'.encode())
    # Threads and functions for the end of the program have no use any more.
    os._exit(0)


def encode(value, depth):
    """A plain value as [type, content]; other types are a TypeError."""
    if depth > DEEPEST:
        raise TypeError("too deep")
    if value is None:
        return ["none"]
    # Before int, of which bool is a subclass.
    if isinstance(value, bool):
        return ["bool", bool(value)]
    if isinstance(value, int):
        return ["int", hex(int(value))]
    if isinstance(value, float):
        return ["float", float(value).hex()]
    if isinstance(value, complex):
        return ["complex", value.real.hex(), value.imag.hex()]
    if isinstance(value, str):
        return ["str", str.__str__(value)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, dict):
        pairs = [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in value.items()]
        return ["dict", pairs]
    for name, kind in (("list", list), ("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, kind):
            return [name, [encode(item, depth + 1) for item in value]]
    raise TypeError(type(value).__name__)


def as_json(value):
    """Lists of texts, truths and None as JSON."""
    if isinstance(value, list):
        return "[" + ", ".join(as_json(item) for item in value) + "]"
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    return {None: "null", True: "true", False: "false"}[value]


if __name__ == "__main__":
    main()
