"""One flipped bit in any file around a run is never used silently: it is an error, or the file is made again with a warning."""

from pathlib import Path

import pytest
from support.bit_flips import KINDS, flip_all

from headway.store import checksums


@pytest.fixture(autouse=True)
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums are remembered at once, as those of files that were written long ago are."""
    monkeypatch.setattr(checksums, "SETTLED_SECONDS", -1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_no_flipped_bit_is_used_silently(tmp_path: Path, kind: str) -> None:
    outcomes = flip_all(kind, tmp_path, count=12, seed=1)
    assert outcomes["silent"] == 0, outcomes


@pytest.mark.drill
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_hundreds_of_flipped_bits_are_never_used_silently(tmp_path: Path, kind: str) -> None:
    outcomes = flip_all(kind, tmp_path, count=300, seed=2)
    print(f"{kind}: {dict(outcomes)}")  # noqa: T201
    assert outcomes["silent"] == 0, outcomes
