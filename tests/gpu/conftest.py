"""Shared by the tests on a GPU: each begins with exact fp32 products, whatever a training before it in this process allowed."""

import pytest

from headway.runtime.device import set_arithmetic


@pytest.fixture(autouse=True)
def exact_arithmetic() -> None:
    """No TF32, and kernels as fast as torch has them."""
    set_arithmetic(tf32=False, deterministic=False)
