"""Randomness is derived, never stored: every random choice comes from (seed, names and numbers that say what it is for)."""

import hashlib


def derive(seed: int, *what: str | int) -> int:
    """A 63-bit number that depends on all of its arguments and on nothing else, the same on every machine."""
    digest = hashlib.blake2b(digest_size=8, person=b"headway")
    digest.update(seed.to_bytes(16, "little", signed=True))
    for part in what:
        encoded = (
            part.encode() if isinstance(part, str) else part.to_bytes(16, "little", signed=True)
        )
        digest.update(
            len(encoded).to_bytes(4, "little") + (b"s" if isinstance(part, str) else b"i") + encoded
        )
    return int.from_bytes(digest.digest(), "little") >> 1
