"""Where the pieces of a text go while it is generated. `engine/text.py` decides which pieces are final."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], object]
"""Receives the next piece of a text."""
