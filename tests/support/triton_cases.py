"""The Triton kernels beside their references, in Triton's interpreter: TRITON_INTERPRET=1 python -m support.triton_cases says what differs.

The interpreter is chosen when a kernel is made, so all cases run in one process of their own. Products of 16-bit numbers are wrong there
(`tl.dot`); those are tests/gpu's.
"""

import json
import sys
import traceback
from collections.abc import Callable
from itertools import cycle

import torch

from headway.kernels.adamw import AdamWHyper, AdamWTensors, _fused, adamw_step_reference
from headway.kernels.cross_entropy import Shaping, softmax_gradient_cuda, softmax_gradient_reference
from headway.kernels.packed_layout import FORMS, PackedLayout
from headway.kernels.packed_weight import pack, unpack_reference
from headway.kernels.packed_weight_triton import unpack as unpack_cuda
from headway.kernels.streaming_pieces import merge_cuda, merge_reference
from headway.kernels.vocab_loss import (
    partial_scores_cuda,
    partial_scores_reference,
    write_gradient_cuda,
    write_gradient_reference,
)
from headway.optim.base import Guard, Hyper
from headway.optim.low_precision_adamw import LowPrecisionAdamW
from headway.optim.state_storage import StateStorage
from support.adamw_case import bf16_moments
from support.chunk_case import SEQUENCES, SHAPES, gap
from support.paged_case import HEADS, paged_gaps

HEAD_SHAPES = ((24, 3), (64, 4), (16, 1))
"""(size, queries per KV head), one for each case in turn: every pair of them takes long here, and tests/gpu has them all."""


def adamw() -> None:
    """With and without a narrow copy, both directions, skipped and not."""

    def made(seed: int) -> AdamWTensors:
        generator = torch.Generator().manual_seed(seed)
        flat = [torch.randn(5000, generator=generator) for _ in range(3)] + [
            torch.rand(5000, generator=generator)
        ]
        copies, counts = flat[0].bfloat16(), torch.tensor([3.0, 3.0])
        parts = [[one[:2048], one[2048:]] for one in (*flat, copies)]
        return AdamWTensors(*parts[:4], [counts[0], counts[1]], parts[4] if seed else ())

    for seed, maximize, bad in ((0, False, 0.0), (0, True, 1.0), (1, True, 0.0), (1, False, 1.0)):
        ours, theirs = made(seed), made(seed)
        numbers, scale = AdamWHyper(1e-2, 0.9, 0.999, 1e-8, 0.1, maximize), torch.tensor(2.5)
        _fused(ours, numbers, scale, torch.tensor(bad))
        adamw_step_reference(theirs, numbers, scale, torch.tensor(bad))
        for name, one, other in zip(AdamWTensors._fields, ours, theirs, strict=True):
            if name == "grads":
                continue
            for a, b in zip(one, other, strict=True):
                torch.testing.assert_close(
                    a, b, rtol=2e-6 if a.dtype == torch.float32 else 8e-3, atol=1e-7
                )
                assert not bad or name == "copies" or torch.equal(a, b), name

    for bad in (0.0, 1.0):
        ours, theirs = bf16_moments(made(1)), bf16_moments(made(1))
        # Halves of numbers with few bits are exact, so that both draw the same.
        numbers, scale = AdamWHyper(1e-2, 0.5, 0.5, 1e-8, 0.1, False), torch.tensor(2.0)
        _fused(ours, numbers, scale, torch.tensor(bad))
        state, guard = (
            {"exp_avg": list(theirs.exp_avg), "exp_avg_sq": list(theirs.exp_avg_sq)},
            Guard(scale, torch.tensor(bad)),
        )
        plain = LowPrecisionAdamW(StateStorage(torch.bfloat16))
        hyper = Hyper(1e-2, (0.5, 0.5), 1e-8, 0.1)
        plain.update(
            list(theirs.params),
            list(theirs.grads),
            state,
            list(theirs.steps),
            hyper,
            guard,
            list(theirs.copies),
        )
        for name, one, other in zip(AdamWTensors._fields, ours, theirs, strict=True):
            for a, b in zip(one, other, strict=True):
                assert torch.equal(a, b) or (not bad and name in ("params", "copies")), name
                torch.testing.assert_close(
                    a, b, rtol=2e-6 if a.dtype == torch.float32 else 8e-3, atol=1e-6
                )


def cached_chunk() -> None:
    """New tokens at the beginning, behind a short and a long past, in ragged rows, with sinks, reach, soft-capping, and trained sinks."""
    for (name, sequences), shape in zip(
        SEQUENCES.items(), SHAPES, strict=True
    ):  # every pair of them takes half a minute
        far, same = gap(sequences, shape, sinks=shape[1] > 1)
        assert far < 2e-5 and same, (name, shape, far, same)


def paged_attention() -> None:
    """Pages, rings and both, head sizes that are no powers of two, grouped heads, a row that takes no part."""
    for name, (head_size, groups) in zip(HEADS, cycle(HEAD_SHAPES)):
        gap, same = paged_gaps(name, head_size, groups)
        assert gap < 1e-5 and same, (name, head_size, groups, gap, same)
    gap, same = paged_gaps("mixed", 16, 2, softcap=2.0, sinks=True)
    assert gap < 1e-5 and same, ("softcap and trained sinks", gap, same)


def softmax_gradient() -> None:
    """Vocabularies that are no powers of two, one and several blocks, with smoothing and z-loss, in fp32 and bf16."""
    for vocab, smoothing, z, dtype, cap in (
        (37, 0.0, 0.0, torch.float32, None),
        (100, 0.1, 1e-3, torch.float32, None),
        (9001, 0.1, 0.0, torch.float32, 2.0),
        (100, 0.0, 1e-3, torch.bfloat16, None),
    ):
        generator = torch.Generator().manual_seed(vocab)
        logits = (3 * torch.randn(5, vocab, generator=generator)).to(dtype)
        targets, coefficients = (
            torch.randint(vocab, (5,), generator=generator),
            torch.rand(5, generator=generator),
        )
        ours, theirs = logits.clone(), logits.clone()
        found = softmax_gradient_cuda(ours, targets, coefficients, smoothing, z, cap)
        expected = softmax_gradient_reference(
            theirs, targets, coefficients, Shaping(smoothing, z), cap
        )
        narrow = dtype != torch.float32
        for one, other in zip((*found, ours), (*expected, theirs), strict=True):
            torch.testing.assert_close(
                one.float(), other.float(), rtol=1e-2 if narrow else 1e-5, atol=1e-6
            )


def vocab_loss() -> None:
    """Some rows of a head: targets on this rank and on others, with smoothing and z-loss, one and several blocks."""
    for vocab, smoothing, z, dtype, cap in (
        (37, 0.0, 0.0, torch.float32, None),
        (9001, 0.1, 1e-3, torch.float32, None),
        (100, 0.0, 1e-3, torch.bfloat16, None),
        (9001, 0.1, 1e-3, torch.float32, 2.0),
    ):
        generator = torch.Generator().manual_seed(vocab)
        logits = (3 * torch.randn(6, vocab, generator=generator)).to(dtype)
        local = torch.tensor([0, vocab - 1, -1, vocab, -500, vocab // 2])
        ours = partial_scores_cuda(logits, local, cap)
        torch.testing.assert_close(
            ours, partial_scores_reference(logits, local, cap), rtol=1e-5, atol=1e-4
        )
        lse, coefficients = ours[0] + 2.0, torch.rand(6, generator=generator)
        one, other = logits.clone(), logits.clone()
        write_gradient_cuda(one, local, coefficients, lse, Shaping(smoothing, z), 4 * vocab, cap)
        write_gradient_reference(
            other, local, coefficients, lse, Shaping(smoothing, z), 4 * vocab, cap
        )
        torch.testing.assert_close(
            one.float(), other.float(), rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-6
        )


def merge() -> None:
    """A piece at a slice and at listed places, widths that are no powers of two."""
    for width, at in ((16, slice(3, 43)), (24, torch.tensor([0, 5, 49, 7]))):
        generator = torch.Generator().manual_seed(width)
        count = len(range(50)[at]) if isinstance(at, slice) else len(at)
        o, lse = (
            torch.randn(50, 2, width, generator=generator),
            torch.randn(2, 50, generator=generator),
        )
        part, part_lse = (
            torch.randn(count, 2, width, generator=generator),
            torch.randn(2, count, generator=generator),
        )
        ours, theirs = (o.clone(), lse.clone()), (o.clone(), lse.clone())
        merge_cuda(*ours, part, part_lse, at)
        merge_reference(*theirs, part, part_lse, at)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def unpack() -> None:
    """Both forms, sizes that are no multiple of a block, an odd number of elements, several programs, fp32 and bf16.

    The interpreter rounds to bf16 towards zero.
    """
    for form in FORMS:
        for shape, dtype in (
            ((7, 9), torch.float32),
            ((70, 100), torch.bfloat16),
            ((33, 129), torch.float32),
            ((16, 1030), torch.bfloat16),
        ):
            packed = pack(torch.randn(shape, generator=torch.Generator().manual_seed(3)), form)
            layout = PackedLayout(form, *shape)
            ours, theirs = (
                unpack_cuda(packed, layout, dtype),
                unpack_reference(packed, layout, dtype),
            )
            torch.testing.assert_close(
                ours, theirs, rtol=0.0 if dtype == torch.float32 else 2**-7, atol=0.0
            )


RUN = (
    adamw,
    paged_attention,
    cached_chunk,
    softmax_gradient,
    vocab_loss,
    merge,
    unpack,
)
CASES: dict[str, Callable[[], None]] = {case.__name__: case for case in RUN}


def main() -> None:
    """Run all; standard output gets one JSON object: case -> "" or why it failed."""
    found = {}
    for name, case in CASES.items():
        try:
            case()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
