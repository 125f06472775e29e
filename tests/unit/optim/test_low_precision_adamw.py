"""Optimizer state in bf16 and 8 bits: sound rounding, exact restoring, and training that follows fp32 state."""

import pytest
import torch

from headway.optim.adamw import AdamW
from headway.optim.base import Guard, Hyper
from headway.optim.low_precision_adamw import LowPrecisionAdamW
from headway.optim.state_storage import (
    BLOCK,
    DTYPES,
    StateStorage,
    chance_of,
    pack,
    to_bf16,
    unpack,
)

GUARD = Guard(torch.ones(()), torch.zeros(()))


def spread(size: int, seed: int = 0) -> torch.Tensor:
    """Values over many orders of magnitude, as moments have."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator) * 10 ** (
        -4 * torch.rand(size, generator=generator)
    )


@pytest.mark.parametrize("square", [False, True])
def test_packing_what_was_unpacked_gives_the_same_bits(square: bool) -> None:
    values = spread(64 * 200)
    blocks = (values.square() if square else values).view(-1, BLOCK)
    blocks[3] = 0
    codes, scale = pack(blocks, square=square, chance=chance_of(blocks, torch.tensor(7.0), 1))
    again, scale_again = pack(unpack(codes, scale, square=square), square=square)
    assert torch.equal(codes, again)
    assert torch.equal(scale, scale_again)
    assert not codes[3].any()
    assert len(codes.unique()) > 100


@pytest.mark.parametrize("square", [False, True])
def test_eight_bits_are_close_at_every_magnitude_of_a_block(square: bool) -> None:
    values = spread(64 * 200).square() if square else spread(64 * 200)
    blocks = values.view(-1, BLOCK)
    codes, scale = pack(blocks, square=square)
    gap = (unpack(codes, scale, square=square) - blocks).abs()
    assert (gap <= 0.02 * scale).all()
    large = blocks.abs() > 1e-2 * scale
    assert (gap[large] <= 0.08 * blocks.abs()[large]).all()
    assert not square or bool((unpack(codes, scale, square=True)[blocks > 0] > 0).all()), (
        "a square that is not zero stays so"
    )


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
def test_rounding_keeps_the_mean(kind: str) -> None:
    value = torch.full((1, BLOCK), 0.3337)
    value[0, 0] = 1.0
    seen = torch.zeros(1, BLOCK)
    for step in range(2000):
        # the same bits, another update
        step_tensor = torch.tensor(float(step))
        noise = value * 1
        if kind == "bf16":
            seen += to_bf16(noise, step_tensor, 0).float()
        else:
            codes, scale = pack(noise, square=True, chance=chance_of(noise, step_tensor, 0))
            seen += unpack(codes, scale, square=True)
    assert seen[0, 1].item() / 2000 == pytest.approx(0.3337, rel=5e-4)


def test_a_second_moment_that_moves_less_than_half_a_step_still_arrives() -> None:
    hyper = Hyper(0.0, (0.9, 0.999), 1e-8, 0.0)
    for kind in ("bf16", "8bit"):
        rule = LowPrecisionAdamW(StateStorage(DTYPES[kind]))
        state = rule.storage.allocate(rule.slots, 256, torch.device("cpu"))
        params = torch.zeros(256)
        step = torch.zeros(())
        grad = torch.linspace(0.999, 1.001, 256)
        for _ in range(1000):
            rule.update(
                [params],
                [grad],
                {role: [part] for role, part in state.items()},
                [step],
                hyper,
                GUARD,
            )
        reached = rule.storage.read(state, "exp_avg_sq", 0, 256).float()
        assert reached.mean().item() == pytest.approx(1 - 0.999**1000, rel=0.02), kind


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
@pytest.mark.parametrize("size", [640, 100, 7])
def test_an_update_follows_fp32_state(kind: str, size: int) -> None:
    hyper = Hyper(1e-2, (0.9, 0.95), 1e-8, 0.1)
    generator = torch.Generator().manual_seed(1)
    rules = [AdamW(), LowPrecisionAdamW(StateStorage(DTYPES[kind]))]
    params = [torch.ones(size), torch.ones(size)]
    states = [
        StateStorage().allocate(rules[0].slots, size, torch.device("cpu")),
        StateStorage(DTYPES[kind]).allocate(rules[1].slots, size, torch.device("cpu")),
    ]
    steps = [torch.zeros(()), torch.zeros(())]
    for _ in range(30):
        grad = torch.randn(size, generator=generator) * torch.linspace(0.05, 1, size)
        for rule, param, state, step in zip(rules, params, states, steps, strict=True):
            rule.update(
                [param],
                [grad.clone()],
                {role: [part] for role, part in state.items()},
                [step],
                hyper,
                GUARD,
            )
    moved = (params[0] - 1).norm()
    assert (params[0] - params[1]).norm() < 0.03 * moved
    assert steps[0].item() == steps[1].item() == 30
    before = [params[1].clone(), *(part.clone() for part in states[1].values())]
    skip = Guard(torch.ones(()), torch.ones(()))
    rules[1].update(
        [params[1]],
        [torch.full((size,), torch.inf)],
        {r: [p] for r, p in states[1].items()},
        [steps[1]],
        hyper,
        skip,
    )
    assert all(
        torch.equal(a, b) for a, b in zip(before, [params[1], *states[1].values()], strict=True)
    )
    assert steps[1].item() == 30


def test_a_value_costs_eight_four_or_little_over_two_bytes_of_state() -> None:
    size = 64 * 1000
    used = {
        kind: sum(
            t.nbytes
            for t in StateStorage(dtype).allocate(AdamW.slots, size, torch.device("cpu")).values()
        )
        / size
        for kind, dtype in DTYPES.items()
    }
    assert used == {"fp32": 8, "bf16": 4, "8bit": 2.125}


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
def test_maximize_ascends_with_state_of_low_precision(kind: str) -> None:
    rule = LowPrecisionAdamW(StateStorage(DTYPES[kind]))
    ends = []
    for sign, maximize in ((1.0, True), (-1.0, False)):
        param = torch.zeros(2 * BLOCK + 3)
        state = {
            name: [part]
            for name, part in rule.storage.allocate(rule.slots, param.numel(), param.device).items()
        }
        rule.update(
            [param],
            [torch.full_like(param, 2.0 * sign)],
            state,
            [torch.zeros(())],
            Hyper(0.1, (0.9, 0.99), 1e-8, 0.0, maximize),
            GUARD,
        )
        ends.append(param)
    # the first step of Adam is as large as the rate, whatever the gradient
    torch.testing.assert_close(ends[0], torch.full_like(ends[0], 0.1), rtol=0.02, atol=0)
    assert torch.equal(ends[0], ends[1])
