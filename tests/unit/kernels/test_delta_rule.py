"""The gated delta rule in chunks is the recurrence token by token, and documents share no state."""

import pytest
import torch
from torch import Tensor

from headway.kernels.delta_rule import delta_rule, delta_step, unit_heads
from headway.kernels.segments import Segments
from headway.kernels.short_convolution import (
    convolution_step,
    last_inputs,
    short_convolution,
)

CHUNK = 8
KEY_HEADS = 2
HEADS = 6
KEY = 5
VALUE = 7
TAPS = 4
CHANNELS = 9
LENGTHS = {
    "one token": [1],
    "around a chunk": [1, 2, CHUNK - 1, CHUNK, CHUNK + 1],
    "several chunks": [3 * CHUNK + 1, 1, 2 * CHUNK, CHUNK - 1, 3 * CHUNK + 1],
}
CPU = torch.device("cpu")


def inputs(tokens: int, seed: int = 0) -> list[Tensor]:
    """q, k, v, g and b, of which g reaches from no decay to one that underflows."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, KEY_HEADS, KEY, generator=generator)
    k = torch.randn(tokens, KEY_HEADS, KEY, generator=generator)
    v = torch.randn(tokens, HEADS, VALUE, generator=generator)
    g = -torch.exp(4 * torch.randn(tokens, HEADS, generator=generator))
    b = torch.rand(tokens, HEADS, generator=generator)
    return [q, k, v, g, b]


def in_chunks(
    values: list[Tensor], lengths: list[int], past: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What is tested."""
    q, k, v, g, b = values
    return delta_rule(q, k, v, g, b, Segments.of_lengths(lengths, CPU), past, CHUNK)


def recurrence(values: list[Tensor], lengths: list[int], past: Tensor) -> tuple[Tensor, Tensor]:
    """The equations of delta_rule.py, one token and one head after the other."""
    q, k, v, g, b = values
    q, k = unit_heads(q, k)
    results: list[Tensor] = []
    states: list[Tensor] = []
    token = 0
    for number, length in enumerate(lengths):
        state = past[number]
        for _ in range(length):
            rows: list[Tensor] = []
            heads: list[Tensor] = []
            for head in range(HEADS):
                key = k[token, head // (HEADS // KEY_HEADS)]
                query = q[token, head // (HEADS // KEY_HEADS)]
                decayed = state[head] * g[token, head].exp()
                update = b[token, head] * (v[token, head] - decayed.T @ key)
                after = decayed + torch.outer(key, update)
                rows.append(after.T @ query)
                heads.append(after)
            state = torch.stack(heads)
            results.append(torch.stack(rows))
            token += 1
        states.append(state)
    return torch.stack(results), torch.stack(states)


def gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def leaves(values: list[Tensor]) -> list[Tensor]:
    return [value.clone().requires_grad_() for value in values]


@pytest.mark.parametrize("name", LENGTHS)
def test_chunks_compute_the_recurrence_and_its_gradients(name: str) -> None:
    lengths = LENGTHS[name]
    values = inputs(sum(lengths))
    past = torch.randn(len(lengths), HEADS, KEY, VALUE, generator=torch.Generator().manual_seed(1))
    ours = leaves([*values, past])
    theirs = leaves([*values, past])

    o, states = in_chunks(ours[:5], lengths, ours[5])
    expected, expected_states = recurrence(theirs[:5], lengths, theirs[5])

    torch.testing.assert_close(o, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, expected_states, atol=1e-5, rtol=1e-5)
    direction = torch.randn(o.shape, generator=torch.Generator().manual_seed(2))
    ((o * direction).sum() + states.square().sum()).backward()
    ((expected * direction).sum() + expected_states.square().sum()).backward()
    for ours_leaf, theirs_leaf in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient(ours_leaf), gradient(theirs_leaf), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", LENGTHS)
def test_a_packed_row_has_the_bits_of_its_documents_alone(name: str) -> None:
    lengths = LENGTHS[name]
    values = inputs(sum(lengths))
    packed = leaves(values)
    o, states = in_chunks(packed, lengths)
    o.square().sum().backward()

    begin = 0
    for number, length in enumerate(lengths):
        alone = leaves([value[begin : begin + length] for value in values])
        single, state = in_chunks(alone, [length])
        single.square().sum().backward()
        assert torch.equal(single, o[begin : begin + length])
        assert torch.equal(state[0], states[number])
        for some, whole in zip(alone, packed, strict=True):
            assert torch.equal(gradient(some), gradient(whole)[begin : begin + length])
        begin += length


def test_a_text_in_two_pieces_is_the_text_in_one() -> None:
    tokens = 3 * CHUNK + 2
    values = inputs(tokens)
    whole, last = in_chunks(values, [tokens])

    cut = CHUNK + 3
    first = [value[:cut] for value in values]
    rest = [value[cut:] for value in values]
    begin, state = in_chunks(first, [cut])
    end, state = in_chunks(rest, [tokens - cut], state)

    torch.testing.assert_close(torch.cat((begin, end)), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, last, atol=1e-5, rtol=1e-5)


def test_single_steps_are_the_chunks() -> None:
    tokens = CHUNK + 3
    values = inputs(tokens)
    whole, last = in_chunks(values, [tokens])

    state = torch.zeros(1, HEADS, KEY, VALUE)
    for token in range(tokens):
        q, k, v, g, b = (value[token : token + 1] for value in values)
        o, state = delta_step(q, k, v, g, b, state)
        torch.testing.assert_close(o[0], whole[token], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, last, atol=1e-5, rtol=1e-5)


def test_a_decay_to_nothing_gives_no_nan() -> None:
    q, k, v, g, b = leaves(inputs(2 * CHUNK))
    o, _ = in_chunks([q, k, v, g * 1e6, b], [2 * CHUNK])
    o.sum().backward()
    assert o.isfinite().all()
    assert gradient(g).isfinite().all()


@pytest.mark.parametrize("name", LENGTHS)
def test_the_convolution_is_torchs_for_each_document(name: str) -> None:
    lengths = LENGTHS[name]
    x = torch.randn(sum(lengths), CHANNELS, generator=torch.Generator().manual_seed(3))
    weight = torch.randn(CHANNELS, 1, TAPS, generator=torch.Generator().manual_seed(4))
    result = short_convolution(x, weight, Segments.of_lengths(lengths, CPU))

    expected: list[Tensor] = []
    for part in x.split(lengths):
        padded = torch.nn.functional.pad(part.T[None], (TAPS - 1, 0))
        expected.append(torch.nn.functional.conv1d(padded, weight, groups=CHANNELS)[0].T)
    torch.testing.assert_close(result, torch.cat(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LENGTHS)
def test_a_convolution_has_the_bits_of_its_documents_alone(name: str) -> None:
    lengths = LENGTHS[name]
    x = torch.randn(sum(lengths), CHANNELS, generator=torch.Generator().manual_seed(3))
    weight = torch.randn(CHANNELS, 1, TAPS, generator=torch.Generator().manual_seed(4))
    packed = leaves([x])[0]
    result = short_convolution(packed, weight, Segments.of_lengths(lengths, CPU))
    result.square().sum().backward()

    for part, whole, expected in zip(
        x.split(lengths), result.split(lengths), gradient(packed).split(lengths), strict=True
    ):
        alone = leaves([part])[0]
        single = short_convolution(alone, weight, Segments.of_lengths([len(part)], CPU))
        single.square().sum().backward()
        assert torch.equal(single, whole)
        assert torch.equal(gradient(alone), expected)


@pytest.mark.parametrize("cut", [1, 2, 3, 7])
def test_a_convolution_goes_on_behind_what_was_kept(cut: int) -> None:
    lengths = [11, 9]
    x = torch.randn(sum(lengths), CHANNELS, generator=torch.Generator().manual_seed(5))
    weight = torch.randn(CHANNELS, 1, TAPS, generator=torch.Generator().manual_seed(6))
    whole = short_convolution(x, weight, Segments.of_lengths(lengths, CPU)).split(lengths)

    parts = x.split(lengths)
    firsts = torch.cat([part[:cut] for part in parts])
    begins = Segments.of_lengths([cut, cut], CPU)
    past = torch.zeros(2, TAPS - 1, CHANNELS)
    short_convolution(firsts, weight, begins, past)
    past = last_inputs(firsts, begins, past)

    rests = torch.cat([part[cut:] for part in parts])
    left = [length - cut for length in lengths]
    ends = short_convolution(rests, weight, Segments.of_lengths(left, CPU), past).split(left)
    for end, expected in zip(ends, whole, strict=True):
        torch.testing.assert_close(end, expected[cut:], atol=1e-6, rtol=1e-6)

    step, _ = convolution_step(torch.stack([part[cut] for part in parts]), weight, past)
    torch.testing.assert_close(
        step, torch.stack([expected[cut] for expected in whole]), atol=1e-6, rtol=1e-6
    )
