"""Shared by all tests: few threads, a CPU whose bf16 products work, and no GPU unless the tests that need one were asked for."""

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
