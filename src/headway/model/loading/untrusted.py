"""Weights from files without checksums. Pickles are read by torch's restricted loader only, so a
file that contains code is refused. A value that is not finite is an error that names the tensor.
"""

from __future__ import annotations

import re
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config.regular_file import require_regular
from headway.errors import CheckpointError, first_line

if TYPE_CHECKING:
    import torch

ZERO2ALL = ("best1_model.pt", "last1_model.pt", "best2_model.pt", "last2_model.pt")
"""Files of a zero2all run, the preferred one first."""
UNREADABLE = (
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    MemoryError,
    struct.error,
)
"""What torch's loader may raise on damaged files."""


def open_pickled(path: Path, stand_ins: Mapping[str, type] | None = None) -> dict[str, Any]:
    """The tensors and plain values of a torch.save file; any other object is refused, not run.

    `stand_ins` maps dotted names of foreign classes to the plain types that replace them.
    """
    import pickle

    import torch

    allowed: list[Any] = [(kind, name) for name, kind in (stand_ins or {}).items()]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(allowed):
            # About pickles that torch did not write; they are refused below.
            warnings.simplefilter("ignore", UserWarning)
            require_regular(path)
            try:
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # files from before torch 1.6 cannot be mapped
                content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        raise CheckpointError(f"{path}: refused: {_refusal(str(problem))}.") from None
    except UNREADABLE as problem:
        raise CheckpointError(
            f"{path}: cannot be read: {first_line(problem)}. Fetch it again."
        ) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not tensors by name.")
    return content


def _refusal(problem: str) -> str:
    """Why the restricted loader stopped: at a class, which it names, or at bytes that are not a
    torch pickle."""
    # torch says what it refused in the middle of advice that does not apply here.
    named = re.search(r"GLOBAL (\S+)|reduce for unrecognized function (.+?)(?: which|$)", problem)
    if named:
        return f"it contains more than tensors ({named.group(1) or named.group(2)}), and such a file can run code"
    first = "not a torch pickle"
    if problem:
        first = problem.splitlines()[0][:200]
    return f"it contains more than tensors, and such a file can run code ({first})"


def zero2all_file(folder: Path) -> Path | None:
    """The weights of a zero2all run: the best, else the last, in the folder or in its ckpt/."""
    for name in ZERO2ALL:
        for path in (folder / name, folder / "ckpt" / name):
            if path.is_file():
                return path
    return None


def check_finite(
    values: Iterable[tuple[str, torch.Tensor]], where: object
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass tensors through; a value that is not finite is an error.

    Costs about 0.5 s for a billion values on two cores.
    """
    for name, value in values:
        if not is_finite(value):
            raise CheckpointError(
                f"{where}: {name} holds a value that is not finite. The file is damaged, or its training run had diverged. "
                "Download it again, or use another checkpoint."
            )
        yield name, value


def is_finite(value: torch.Tensor) -> bool:
    """Whether all values are finite. Minimum and maximum suffice: both are NaN if any value is."""
    import torch

    if value.numel() == 0:
        return True
    extremes = torch.stack(torch.aminmax(value.detach()))
    return bool(extremes.isfinite().all())
