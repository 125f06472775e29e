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
from support.adamw_tensors import bf16_moments
from support.cached_chunk_case import SEQUENCES, SHAPES, chunk_gap
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
        copies = flat[0].bfloat16()
        counts = torch.tensor([3.0, 3.0])
        parts = [[tensor[:2048], tensor[2048:]] for tensor in (*flat, copies)]
        return AdamWTensors(*parts[:4], [counts[0], counts[1]], parts[4] if seed else ())

    for seed, maximize, bad in ((0, False, 0.0), (0, True, 1.0), (1, True, 0.0), (1, False, 1.0)):
        ours = made(seed)
        expected = made(seed)
        numbers = AdamWHyper(1e-2, 0.9, 0.999, 1e-8, 0.1, maximize)
        scale = torch.tensor(2.5)
        _fused(ours, numbers, scale, torch.tensor(bad))
        adamw_step_reference(expected, numbers, scale, torch.tensor(bad))
        for name, tensor, other in zip(AdamWTensors._fields, ours, expected, strict=True):
            if name == "grads":
                continue
            for a, b in zip(tensor, other, strict=True):
                torch.testing.assert_close(
                    a, b, rtol=2e-6 if a.dtype == torch.float32 else 8e-3, atol=1e-7
                )
                assert not bad or name == "copies" or torch.equal(a, b), name

    for bad in (0.0, 1.0):
        ours = bf16_moments(made(1))
        expected = bf16_moments(made(1))
        # Halves of numbers with few bits are exact, so that both draw the same.
        numbers = AdamWHyper(1e-2, 0.5, 0.5, 1e-8, 0.1, False)
        scale = torch.tensor(2.0)
        _fused(ours, numbers, scale, torch.tensor(bad))
        state = {"exp_avg": list(expected.exp_avg), "exp_avg_sq": list(expected.exp_avg_sq)}
        guard = Guard(scale, torch.tensor(bad))
        plain = LowPrecisionAdamW(StateStorage(torch.bfloat16))
        hyper = Hyper(1e-2, (0.5, 0.5), 1e-8, 0.1)
        plain.update(
            list(expected.params),
            list(expected.grads),
            state,
            list(expected.steps),
            hyper,
            guard,
            list(expected.copies),
        )
        for name, tensor, other in zip(AdamWTensors._fields, ours, expected, strict=True):
            for a, b in zip(tensor, other, strict=True):
                assert torch.equal(a, b) or (not bad and name in ("params", "copies")), name
                torch.testing.assert_close(
                    a, b, rtol=2e-6 if a.dtype == torch.float32 else 8e-3, atol=1e-6
                )


def cached_chunk() -> None:
    """New tokens at the beginning, behind a short and a long past, in ragged rows, with sinks, reach, soft-capping, and trained sinks."""
    for (name, sequences), shape in zip(
        SEQUENCES.items(), SHAPES, strict=True
    ):  # every pair of them takes half a minute
        far, same = chunk_gap(sequences, shape, sinks=shape[1] > 1)
        assert far < 2e-5 and same, (name, shape, far, same)


def paged_attention() -> None:
    """Pages, rings and both, head sizes that are no powers of two, grouped heads, a row that takes no part."""
    for name, (head_size, groups) in zip(HEADS, cycle(HEAD_SHAPES)):
        chunk_gap, same = paged_gaps(name, head_size, groups)
        assert chunk_gap < 1e-5 and same, (name, head_size, groups, chunk_gap, same)
    chunk_gap, same = paged_gaps("mixed", 16, 2, softcap=2.0, sinks=True)
    assert chunk_gap < 1e-5 and same, ("softcap and trained sinks", chunk_gap, same)


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
        targets = torch.randint(vocab, (5,), generator=generator)
        coefficients = torch.rand(5, generator=generator)
        ours = logits.clone()
        reference = logits.clone()
        result = softmax_gradient_cuda(ours, targets, coefficients, smoothing, z, cap)
        expected = softmax_gradient_reference(
            reference, targets, coefficients, Shaping(smoothing, z), cap
        )
        narrow = dtype != torch.float32
        for value, other in zip((*result, ours), (*expected, reference), strict=True):
            torch.testing.assert_close(
                value.float(), other.float(), rtol=1e-2 if narrow else 1e-5, atol=1e-6
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
        lse = ours[0] + 2.0
        coefficients = torch.rand(6, generator=generator)
        whole = logits.clone()
        other = logits.clone()
        write_gradient_cuda(whole, local, coefficients, lse, Shaping(smoothing, z), 4 * vocab, cap)
        write_gradient_reference(
            other, local, coefficients, lse, Shaping(smoothing, z), 4 * vocab, cap
        )
        torch.testing.assert_close(
            whole.float(), other.float(), rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-6
        )


def merge() -> None:
    """A piece at a slice and at listed places, widths that are no powers of two."""
    for width, rows in ((16, slice(3, 43)), (24, torch.tensor([0, 5, 49, 7]))):
        generator = torch.Generator().manual_seed(width)
        count = len(range(50)[rows]) if isinstance(rows, slice) else len(rows)
        o = torch.randn(50, 2, width, generator=generator)
        lse = torch.randn(2, 50, generator=generator)
        part = torch.randn(count, 2, width, generator=generator)
        part_lse = torch.randn(2, count, generator=generator)
        ours = (o.clone(), lse.clone())
        reference = (o.clone(), lse.clone())
        merge_cuda(*ours, part, part_lse, rows)
        merge_reference(*reference, part, part_lse, rows)
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)


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
            ours = unpack_cuda(packed, layout, dtype)
            reference = unpack_reference(packed, layout, dtype)
            torch.testing.assert_close(
                ours, reference, rtol=0.0 if dtype == torch.float32 else 2**-7, atol=0.0
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
    differences = {}
    for name, case in CASES.items():
        try:
            case()
            differences[name] = ""
        except Exception:
            differences[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(differences))


if __name__ == "__main__":
    main()
