"""Shared by all tests: few threads, and a CPU whose bf16 products work."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure() -> None:
    """Before any test uses oneDNN."""
    from headway.runtime.device import avoid_broken_amx

    avoid_broken_amx()
