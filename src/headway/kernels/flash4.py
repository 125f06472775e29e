"""FlashAttention-4, an optional package (`pip install "headway[fa4]"`): causal attention of whole
rows or of many documents.

Its kernels are compiled on first use and cached on disk next to torch's compiled code, so that only
the first run of a shape waits.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.runtime.optional import install_command


@cache
def why_not() -> str:
    """Why it cannot be used in this process; empty when it can."""
    if not torch.cuda.is_available():
        return "it runs on CUDA"
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        return f"it needs a Hopper or Blackwell GPU and this is {torch.cuda.get_device_name()}"
    # `flash_attn` may be there as version 2, without this part.
    try:
        package = find_spec("flash_attn.cute")
    except ImportError:
        package = None
    if package is None:
        return f"it is not installed ({install_command('fa4')})"
    try:
        _interface()
    except (ImportError, OSError, RuntimeError) as error:
        return f"it does not start: {str(error).splitlines()[0]}"
    return ""


@cache
def _interface() -> Any:
    """The package's functions, imported once, with its compiled kernels cached on disk."""
    # Read when the package is imported.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        os.environ.setdefault(
            "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
            str(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "flash4"),
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own parts warn of each other
        from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]

    return interface


def causal(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Rows of one document each: q [B,T,H,hd], k and v [B,T,KV,hd] -> [B,T,H,hd]."""
    return _first(_interface().flash_attn_func(q, k, v, **_options(window)))


def documents(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int | None
) -> Tensor:
    """All documents of flattened rows: q [N,H,hd], k and v [N,KV,hd], starts [documents + 1] ->
    [N,H,hd]."""
    call = _interface().flash_attn_varlen_func
    return _first(
        call(
            q,
            k,
            v,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            **_options(window),
        )
    )


def _options(window: int | None) -> dict[str, Any]:
    # Keys left of the query; a window counts the query too. (None, None) is no window.
    left = None
    if window is not None:
        left = window - 1
    right = None if window is None else 0
    return {
        "causal": True,
        "window_size": (left, right),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _first(result: Any) -> Tensor:
    """The output; some versions return it with its log-sum-exp."""
    if isinstance(result, tuple):
        return result[0]
    return result
