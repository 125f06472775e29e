"""AdamW with moments in bf16 or 8 bits: the arithmetic is fp32, only the stored moments are rounded, stochastically (see state_storage.py).

One piece at a time on the CPU, so that temporaries stay small. On CUDA one kernel per tensor: for bf16 that of kernels/adamw.py, which
also writes the copies; for 8 bits the rule is compiled.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.kernels.adamw import AdamWHyper, AdamWTensors, adamw_step
from headway.optim.base import Guard, Hyper
from headway.optim.state_storage import BLOCK, SCALE, StateStorage, chance_of, pack, to_bf16, unpack

PIECE = 1 << 20
AVERAGE, SQUARE = "exp_avg", "exp_avg_sq"


class StepNumbers(NamedTuple):
    """0-dim fp32 tensors on the device, so that no value is compiled in."""

    lr: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    decay: Tensor
    sign: Tensor
    step: Tensor
    near: Tensor
    far: Tensor
    """1 - beta1^step and sqrt(1 - beta2^step): computed once, not for every element"""
    divisor: Tensor
    skip: Tensor


class LowPrecisionAdamW:
    """As AdamW, with moments stored in the form of `storage`."""

    NARROW_ON_CUDA = True
    slots: tuple[str, ...] = (AVERAGE, SQUARE)

    def __init__(self, storage: StateStorage) -> None:
        self.storage = storage

    def update(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Tensor]], steps: list[Tensor], hyper: Hyper, guard: Guard,
        copies: list[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Change params and state in place; a skipped step leaves both and the counters as they were."""
        device = params[0].device
        if device.type == "cuda" and not self.storage.is_blocked:
            tensors = AdamWTensors(
                params, grads, state[AVERAGE], state[SQUARE], steps, copies or ()
            )
            numbers = AdamWHyper(
                hyper.lr, *hyper.betas, hyper.eps, hyper.weight_decay, hyper.maximize
            )
            adamw_step(tensors, numbers, guard.scale, guard.found_inf)
            return
        values = (
            hyper.lr,
            *hyper.betas,
            hyper.eps,
            hyper.weight_decay,
            -1.0 if hyper.maximize else 1.0,
        )
        lr, beta1, beta2, eps, decay, sign = (
            torch.full((), value, dtype=torch.float32, device=device) for value in values
        )
        for index, (param, grad, step) in enumerate(zip(params, grads, steps, strict=True)):
            step += 1
            near, far = 1 - beta1**step, (1 - beta2**step).sqrt()
            numbers = StepNumbers(
                lr, beta1, beta2, eps, decay, sign, step, near, far, guard.scale, guard.found_inf
            )
            moments = {role: parts[index] for role, parts in state.items()}
            (self._update_blocks if self.storage.is_blocked else self._update_bf16)(
                param.view(-1), grad.reshape(-1), moments, numbers
            )
            step -= guard.found_inf
        if copies:
            torch._foreach_copy_(copies, params)

    def _update_bf16(
        self, param: Tensor, grad: Tensor, state: dict[str, Tensor], numbers: StepNumbers
    ) -> None:
        size = param.numel()
        for start in range(0, size, PIECE):
            part = slice(start, start + PIECE)
            step_bf16(param[part], grad[part], (state[AVERAGE][part], state[SQUARE][part]), numbers)

    def _update_blocks(
        self, param: Tensor, grad: Tensor, state: dict[str, Tensor], numbers: StepNumbers
    ) -> None:
        size, whole = param.numel(), param.numel() // BLOCK * BLOCK
        piece = max(whole, 1) if param.is_cuda else PIECE
        names = (AVERAGE, SQUARE, AVERAGE + SCALE, SQUARE + SCALE)
        for start in range(0, whole, piece):
            stop = min(start + piece, whole)
            codes = [state[name][start:stop].view(-1, BLOCK) for name in names[:2]]
            scales = [state[name][start // BLOCK : stop // BLOCK].view(-1, 1) for name in names[2:]]
            _block_rule(param.is_cuda)(
                param[start:stop].view(-1, BLOCK),
                grad[start:stop].view(-1, BLOCK),
                (*codes, *scales),
                numbers,
            )
        if whole < size:  # the last block of a tensor that is not a multiple of 64 long
            rest = [
                torch.nn.functional.pad(x[whole:], (0, BLOCK - size + whole)).view(1, BLOCK)
                for x in (param, grad)
            ]
            codes = [state[name][whole:].view(1, BLOCK) for name in names[:2]]
            scales = [state[name][whole // BLOCK :].view(1, 1) for name in names[2:]]
            step_blocks(rest[0], rest[1], (*codes, *scales), numbers)
            param[whole:] = rest[0].view(-1)[: size - whole]


@cache
def _block_rule(compiled: bool) -> Any:
    if not compiled:
        return step_blocks
    fused = torch.compile(step_blocks, fullgraph=True)

    def run(param: Tensor, grad: Tensor, state: tuple[Tensor, ...], numbers: StepNumbers) -> None:
        for tensor in (param, grad, *state):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)  # buckets differ in length, blocks do not
        fused(param, grad, state, numbers)

    return run


def moved(
    param: Tensor, grad: Tensor, average: Tensor, square: Tensor, n: StepNumbers
) -> tuple[Tensor, Tensor, Tensor]:
    """(param, exp_avg, exp_avg_sq) after one update, in fp32."""
    grad = grad.float() * n.sign / n.divisor
    average = average + (1 - n.beta1) * (grad - average)
    square = n.beta2 * square + (1 - n.beta2) * grad * grad
    root = square.sqrt() / n.far + n.eps
    return param * (1 - n.lr * n.decay) - n.lr / n.near * average / root, average, square


def step_bf16(param: Tensor, grad: Tensor, state: tuple[Tensor, ...], n: StepNumbers) -> None:
    """One update of flat tensors in place, the state in bf16."""
    new, average, square = moved(param, grad, state[0].float(), state[1].float(), n)
    skips = n.skip > 0
    param.copy_(torch.where(skips, param, new))
    state[0].copy_(torch.where(skips, state[0], to_bf16(average, n.step, 0)))
    state[1].copy_(torch.where(skips, state[1], to_bf16(square, n.step, 1)))


def step_blocks(param: Tensor, grad: Tensor, state: tuple[Tensor, ...], n: StepNumbers) -> None:
    """One update of [blocks, 64] tensors in place, the state as codes and scales."""
    codes, squares, scale, square_scale = state
    new, average, square = moved(
        param,
        grad,
        unpack(codes, scale, square=False),
        unpack(squares, square_scale, square=True),
        n,
    )
    skips = n.skip > 0
    param.copy_(torch.where(skips, param, new))
    packed = pack(average, square=False, chance=chance_of(average, n.step, 0))
    packed_square = pack(square, square=True, chance=chance_of(square, n.step, 1))
    for old, value in zip(
        (codes, scale, squares, square_scale), (*packed, *packed_square), strict=True
    ):
        old.copy_(torch.where(skips, old, value))
