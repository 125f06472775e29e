"""Tensors of an AdamW step whose arithmetic is exact, so that two implementations round moments alike."""

from headway.kernels.adamw import AdamWTensors


def bf16_moments(tensors: AdamWTensors) -> AdamWTensors:
    """The same with moments in bf16, and gradients of as few bits."""
    grads = [x.bfloat16() for x in tensors.grads]
    first = [x.bfloat16() for x in tensors.exp_avg]
    second = [x.bfloat16() for x in tensors.exp_avg_sq]
    return tensors._replace(grads=[x.float() for x in grads], exp_avg=first, exp_avg_sq=second)
