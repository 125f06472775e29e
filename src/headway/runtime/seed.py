"""Randomness is derived, never stored: every random choice comes from (seed, names and numbers that
say what it is for).
"""

import hashlib


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit number that depends on all of its arguments and on nothing else, the same on every
    machine.
    """
    digest = hashlib.blake2b(digest_size=8, person=b"headway")
    digest.update(seed.to_bytes(16, "little", signed=True))
    for part in purpose:
        if isinstance(part, str):
            tag = b"s"
            encoded = part.encode()
        else:
            tag = b"i"
            encoded = part.to_bytes(16, "little", signed=True)
        # Length and type keep ("ab", "c") from ("a", "bc"), and "1" from 1.
        digest.update(len(encoded).to_bytes(4, "little") + tag + encoded)
    # 63 bits fit into a signed 64-bit integer.
    return int.from_bytes(digest.digest(), "little") >> 1
