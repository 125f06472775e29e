"""The recurrence of Mamba-2 in chunks is the one of its equation, and documents in a row share no bit."""

import pytest
import torch
from torch import Tensor

from headway.kernels.segments import Segments
from headway.kernels.state_space import state_space, state_space_step

GROUPS = 2
HEADS = 6
KEY = 8
VALUE = 16
"""Widths as models have them: libraries round products of tensors that do not begin at a multiple of 64
bytes in another way."""
LENGTHS = [1, 5, 64, 65, 130]
CPU = torch.device("cpu")


def inputs(length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and logarithms of decays of random tokens."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(length, *shape, generator=generator)

    decays = -torch.rand(length, HEADS, generator=generator)
    return normal(GROUPS, KEY), normal(GROUPS, KEY), normal(HEADS, VALUE), decays


def by_equation(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One document, token by token and head by head, in float64; the state is [H,K,V]."""
    outputs: list[Tensor] = []
    state = state.double()
    for token in range(len(v)):
        heads: list[Tensor] = []
        states: list[Tensor] = []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            written = torch.outer(k[token, group].double(), v[token, head].double())
            after = g[token, head].double().exp() * state[head] + written
            heads.append(after.T @ q[token, group].double())
            states.append(after)
        outputs.append(torch.stack(heads))
        state = torch.stack(states)
    return torch.stack(outputs), state


@pytest.mark.parametrize("chunk", [4, 64])
def test_chunks_compute_the_equation_from_any_state(chunk: int) -> None:
    q, k, v, g = inputs(23)
    past = torch.randn(1, HEADS, KEY, VALUE, generator=torch.Generator().manual_seed(9))
    o, states = state_space(q, k, v, g, Segments.of_lengths([23], CPU), past, chunk)
    expected, last = by_equation(q, k, v, g, past[0])
    assert torch.allclose(o.double(), expected, atol=1e-5)
    assert torch.allclose(states[0].double(), last, atol=1e-5)


def test_gradients_of_chunks_are_those_of_the_equation() -> None:
    chunked = tuple(x.requires_grad_() for x in inputs(23))
    q, k, v, g = chunked
    o, _ = state_space(q, k, v, g, Segments.of_lengths([23], CPU), chunk=4)
    o.square().sum().backward()

    plain = tuple(x.requires_grad_() for x in inputs(23))
    q, k, v, g = plain
    expected, _ = by_equation(q, k, v, g, torch.zeros(HEADS, KEY, VALUE))
    expected.square().sum().backward()
    for ours, reference in zip(chunked, plain, strict=True):
        assert ours.grad is not None
        assert reference.grad is not None
        assert torch.allclose(ours.grad, reference.grad, rtol=1e-4, atol=1e-4)


def test_steps_compute_the_equation() -> None:
    q, k, v, g = inputs(9)
    state = torch.zeros(1, HEADS, KEY, VALUE)
    outputs: list[Tensor] = []
    for token in range(9):
        here = slice(token, token + 1)
        o, state = state_space_step(q[here], k[here], v[here], g[here], state)
        outputs.append(o)
    expected, last = by_equation(q, k, v, g, torch.zeros(HEADS, KEY, VALUE))
    assert torch.allclose(torch.cat(outputs).double(), expected, atol=1e-5)
    assert torch.allclose(state[0].double(), last, atol=1e-5)


def test_a_packed_row_of_a_state_space_has_the_bits_of_its_documents_alone() -> None:
    whole = inputs(sum(LENGTHS))
    packed = tuple(x.clone().requires_grad_() for x in whole)
    q, k, v, g = packed
    o, states = state_space(q, k, v, g, Segments.of_lengths(LENGTHS, CPU))
    o.square().sum().backward()

    begin = 0
    for number, length in enumerate(LENGTHS):
        tokens = slice(begin, begin + length)
        alone = tuple(x[tokens].clone().requires_grad_() for x in whole)
        q, k, v, g = alone
        single, state = state_space(q, k, v, g, Segments.of_lengths([length], CPU))
        single.square().sum().backward()
        assert torch.equal(single, o[tokens])
        assert torch.equal(state[0], states[number])
        for part, joined in zip(alone, packed, strict=True):
            assert part.grad is not None
            assert joined.grad is not None
            assert torch.equal(part.grad, joined.grad[tokens])
        begin += length
