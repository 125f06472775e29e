"""Checks that every kind of layer with a state passes: what its core takes, and documents that share no bit in a packed row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from headway.kernels.segments import Segments
from headway.model.config import ModelConfig
from headway.model.state_mixer import StateMixer
from headway.model.transformer import Transformer
from support.batches import make_batch
from support.initial_weights import initialize


def core_inputs(mixer: StateMixer, length: int) -> list[torch.Tensor]:
    """The three tensors [N,...] that the core takes of random tokens of width 32."""
    hidden = torch.randn(length, 32, generator=torch.Generator().manual_seed(4))
    angles = torch.zeros(1)
    return [x[0].detach() for x in mixer.project(hidden[None], angles, angles)]


def assert_packed_is_alone(mixer: StateMixer, lengths: Sequence[int]) -> None:
    """Documents of these lengths give the same bits in one row and alone, forward and backward."""
    whole = core_inputs(mixer, sum(lengths))
    packed = [x.clone().requires_grad_() for x in whole]
    segments = Segments.of_lengths(lengths, whole[0].device)
    o, _ = mixer.mix_segments(packed[0], packed[1], packed[2], segments, None)
    o.square().sum().backward()

    begin = 0
    for length in lengths:
        tokens = slice(begin, begin + length)
        alone = [x[tokens].clone().requires_grad_() for x in whole]
        segment = Segments.of_lengths([length], whole[0].device)
        single, _ = mixer.mix_segments(alone[0], alone[1], alone[2], segment, None)
        single.square().sum().backward()
        assert torch.equal(single, o[tokens])
        for part, joined in zip(alone, packed, strict=True):
            assert part.grad is not None
            assert joined.grad is not None
            assert torch.equal(part.grad, joined.grad[tokens])
        begin += length


def assert_documents_are_apart(config: ModelConfig) -> None:
    """Other tokens in one document of a row change no bit of what a whole model gives for the others."""
    model = Transformer(config)
    initialize(model, 5)
    batch = make_batch([[3, 1, 6, 2, 5]], seq_len=20, vocab=96)
    changed = batch.tokens.clone()
    changed[0, 4:10] = (changed[0, 4:10] + 1) % 96
    outputs: list[torch.Tensor] = []
    for tokens in (batch.tokens, changed):
        hidden = model.forward_batch(replace(batch, tokens=tokens)).hidden
        outputs.append(torch.cat((hidden[:, :4], hidden[:, 10:17]), 1).detach())
    assert torch.equal(*outputs)
