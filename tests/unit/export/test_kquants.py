"""What is quantised here is near the weights when the gguf package reads it."""

import numpy as np
import pytest
import torch

from headway.export.kquants import quantise

quants = pytest.importorskip("gguf.quants")
from gguf import GGMLQuantizationType  # noqa: E402

CASES = {
    "normal": lambda g: torch.randn(8, 512, generator=g) * 0.02,
    "heavy tails": lambda g: torch.randn(8, 512, generator=g) ** 3,
    "all positive": lambda g: torch.rand(4, 256, generator=g) + 5,
    "one value": lambda g: torch.full((2, 256), -0.3),
    "one outlier": lambda g: (
        torch.nn.functional.one_hot(torch.tensor([[7]]), 256).float().reshape(1, 256) * 3.0
    ),
}
BOUNDS = {"q4_k": 0.11, "q5_k": 0.055, "q6_k": 0.03}


@pytest.mark.parametrize("kind", ["q4_k", "q5_k", "q6_k"])
@pytest.mark.parametrize("case", CASES)
def test_gguf_reads_back_what_was_quantised_within_the_bound(kind: str, case: str) -> None:
    x = CASES[case](torch.Generator().manual_seed(1))
    back = quants.dequantize(quantise(x, kind), GGMLQuantizationType[kind.upper()])
    error = np.sqrt(((back - x.numpy()) ** 2).mean()) / float(x.square().mean().sqrt())
    assert error < BOUNDS[kind], f"{case}: relative error {error}"


def test_q4_k_is_better_than_the_older_four_bits() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(2))
    older = quants.dequantize(
        quants.quantize(x.numpy(), GGMLQuantizationType.Q4_0), GGMLQuantizationType.Q4_0
    )
    newer = quants.dequantize(quantise(x, "q4_k"), GGMLQuantizationType.Q4_K)
    assert ((newer - x.numpy()) ** 2).mean() < 0.8 * ((older - x.numpy()) ** 2).mean()


@pytest.mark.parametrize("kind", ["q4_k", "q5_k", "q6_k"])
def test_zeros_stay_zeros(kind: str) -> None:
    back = quants.dequantize(
        quantise(torch.zeros(2, 256), kind), GGMLQuantizationType[kind.upper()]
    )
    assert not back.any()
