"""Tensors of an AdamW step whose arithmetic is exact, so that two implementations round moments alike."""

from headway.kernels.adamw import AdamWTensors


def bf16_moments(given: AdamWTensors) -> AdamWTensors:
    """The same with moments in bf16, and gradients of as few bits."""
    grads, first, second = (
        [x.bfloat16() for x in side] for side in (given.grads, given.exp_avg, given.exp_avg_sq)
    )
    return given._replace(grads=[x.float() for x in grads], exp_avg=first, exp_avg_sq=second)
