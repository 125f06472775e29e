"""Shared by all tests: few threads, a CPU whose bf16 products work, and no GPU unless the tests that need one were asked for."""

import gc
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test uses torch."""
    if "not gpu" in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from headway.runtime.device import avoid_broken_amx

    avoid_broken_amx()


def pytest_collection_finish() -> None:
    """A run collects garbage before its first step; what was imported until here is none, and looking at it takes longer than the run."""
    gc.collect()
    gc.freeze()
