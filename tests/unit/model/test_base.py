"""Halves of blocks may come in more variants than the compiler allows by itself."""

from functools import partial

import pytest
import torch

from headway.model.base import compile_method


def test_a_half_may_be_compiled_for_more_than_eight_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with torch._dynamo.config.patch(
        recompile_limit=8
    ):  # pytest's own patch leaves the setting deleted
        half = compile_method(lambda x: x * 2)
        for size in range(2, 14):
            assert torch.equal(half(torch.ones(size)), torch.full((size,), 2.0))
