"""AdamW with moments in bf16 or 8 bits (Dettmers et al. 2022, arXiv:2110.02861).

The arithmetic is that of adamw.py in fp32; only the stored moments are rounded, stochastically (see
state_storage.py).

One piece at a time on the CPU, so that temporaries stay small. On CUDA one kernel per tensor: for
bf16 that of kernels/adamw.py, which also writes the copies; for 8 bits the rule is compiled.
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
"""Elements at a time on the CPU; a multiple of BLOCK."""
AVERAGE = "exp_avg"
SQUARE = "exp_avg_sq"


class StepNumbers(NamedTuple):
    """0-dim fp32 tensors on the device, so that no value is compiled in."""

    lr: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    decay: Tensor
    sign: Tensor
    """-1 to ascend."""
    step: Tensor
    """Number of this update, from 1."""
    average_correction: Tensor
    """1 - beta1^step: computed once, not for every element."""
    root_correction: Tensor
    """sqrt(1 - beta2^step)."""
    divisor: Tensor
    """Of gradients: the loss scale and the clip factor."""
    skip: Tensor
    """Not 0: nothing changes."""


class LowPrecisionAdamW:
    """As AdamW, with moments stored in the form of `storage`."""

    NARROW_ON_CUDA = True
    """bf16 gradients are read as they are (`takes_narrow_gradients`): the kernel and `moved` widen
    them.
    """
    slots: tuple[str, ...] = (AVERAGE, SQUARE)

    def __init__(self, storage: StateStorage) -> None:
        self.storage = storage

    def update(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        state: dict[str, list[Tensor]],
        steps: list[Tensor],
        hyper: Hyper,
        guard: Guard,
        copies: list[Tensor] | None = None,
    ) -> None:
        """Change params and state in place.

        A skipped step leaves both and the counters as they were.
        """
        device = params[0].device
        # The kernel rounds bf16 moments itself and writes the copies.
        if device.type == "cuda" and not self.storage.is_blocked:
            tensors = AdamWTensors(
                params, grads, state[AVERAGE], state[SQUARE], steps, copies or ()
            )
            numbers = AdamWHyper(
                hyper.lr, *hyper.betas, hyper.eps, hyper.weight_decay, hyper.maximize
            )
            adamw_step(tensors, numbers, guard.scale, guard.found_inf)
            return

        direction = 1.0
        if hyper.maximize:
            direction = -1.0
        values = (hyper.lr, *hyper.betas, hyper.eps, hyper.weight_decay, direction)
        lr, beta1, beta2, eps, decay, sign = (
            torch.full((), value, dtype=torch.float32, device=device) for value in values
        )
        for index, (param, grad, step) in enumerate(zip(params, grads, steps, strict=True)):
            # The corrections count this update; a skipped one is taken back below.
            step += 1
            numbers = StepNumbers(
                lr,
                beta1,
                beta2,
                eps,
                decay,
                sign,
                step,
                average_correction=1 - beta1**step,
                root_correction=(1 - beta2**step).sqrt(),
                divisor=guard.scale,
                skip=guard.found_inf,
            )
            moments = {role: parts[index] for role, parts in state.items()}
            if self.storage.is_blocked:
                self._update_blocks(param.view(-1), grad.reshape(-1), moments, numbers)
            else:
                self._update_bf16(param.view(-1), grad.reshape(-1), moments, numbers)
            step -= guard.found_inf
        # Also after a skipped step, in which they are set to what they hold already.
        if copies:
            torch._foreach_copy_(copies, params)

    def _update_bf16(
        self, param: Tensor, grad: Tensor, state: dict[str, Tensor], numbers: StepNumbers
    ) -> None:
        for start in range(0, param.numel(), PIECE):
            part = slice(start, start + PIECE)
            moments = (state[AVERAGE][part], state[SQUARE][part])
            step_bf16(param[part], grad[part], moments, numbers)

    def _update_blocks(
        self, param: Tensor, grad: Tensor, state: dict[str, Tensor], numbers: StepNumbers
    ) -> None:
        """Update codes and scales: whole blocks first, then the last elements, padded to one."""
        size = param.numel()
        in_blocks = size // BLOCK * BLOCK
        piece = PIECE
        if param.is_cuda:
            piece = max(in_blocks, 1)  # one kernel for all
        code_names = (AVERAGE, SQUARE)
        scale_names = (AVERAGE + SCALE, SQUARE + SCALE)
        for start in range(0, in_blocks, piece):
            stop = min(start + piece, in_blocks)
            blocks = slice(start // BLOCK, stop // BLOCK)
            codes = [state[name][start:stop].view(-1, BLOCK) for name in code_names]
            scales = [state[name][blocks].view(-1, 1) for name in scale_names]
            _block_rule(param.is_cuda)(
                param[start:stop].view(-1, BLOCK),
                grad[start:stop].view(-1, BLOCK),
                (*codes, *scales),
                numbers,
            )
        if in_blocks == size:
            return

        # Storage is rounded up to whole blocks, parameters and gradients are not. The scale of a
        # block is its largest absolute value, which zeros do not change.
        padding = (0, BLOCK - size + in_blocks)
        last_param = torch.nn.functional.pad(param[in_blocks:], padding).view(1, BLOCK)
        last_grad = torch.nn.functional.pad(grad[in_blocks:], padding).view(1, BLOCK)
        codes = [state[name][in_blocks:].view(1, BLOCK) for name in code_names]
        scales = [state[name][in_blocks // BLOCK :].view(1, 1) for name in scale_names]
        step_blocks(last_param, last_grad, (*codes, *scales), numbers)
        param[in_blocks:] = last_param.view(-1)[: size - in_blocks]


@cache
def _block_rule(compiled: bool) -> Any:
    """`step_blocks`, or a compiled form of it."""
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
    root = square.sqrt() / n.root_correction + n.eps
    new = param * (1 - n.lr * n.decay) - n.lr / n.average_correction * average / root
    return new, average, square


def step_bf16(param: Tensor, grad: Tensor, state: tuple[Tensor, ...], n: StepNumbers) -> None:
    """One update of flat tensors in place, the state in bf16."""
    new, average, square = moved(param, grad, state[0].float(), state[1].float(), n)
    skips = n.skip > 0
    param.copy_(torch.where(skips, param, new))
    state[0].copy_(torch.where(skips, state[0], to_bf16(average, n.step, 0)))
    state[1].copy_(torch.where(skips, state[1], to_bf16(square, n.step, 1)))


def step_blocks(param: Tensor, grad: Tensor, state: tuple[Tensor, ...], n: StepNumbers) -> None:
    """One update of [blocks, BLOCK] tensors in place.

    The state: codes of the average and of the square, then the scales of both.
    """
    average_codes, square_codes, average_scale, square_scale = state
    new, average, square = moved(
        param,
        grad,
        unpack(average_codes, average_scale, square=False),
        unpack(square_codes, square_scale, square=True),
        n,
    )
    skips = n.skip > 0
    param.copy_(torch.where(skips, param, new))
    # Different salts: both moments of an element must not be rounded by the same noise.
    packed_average = pack(average, square=False, chance=chance_of(average, n.step, 0))
    packed_square = pack(square, square=True, chance=chance_of(square, n.step, 1))
    # In the order of `pack`, which returns codes and scale of one moment.
    stored = (average_codes, average_scale, square_codes, square_scale)
    for old, value in zip(stored, (*packed_average, *packed_square), strict=True):
        old.copy_(torch.where(skips, old, value))
