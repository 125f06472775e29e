"""Shared by the tests on a GPU: each begins as a new process does, whatever was compiled, allowed or held before it."""

import gc

import pytest
import torch

from headway.runtime.device import set_arithmetic


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Exact fp32 products, nothing compiled, no engine of an earlier test waiting to be collected."""
    set_arithmetic(tf32=False, deterministic=False)
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
