"""Every optimizer against a public reference: torch's own where it has one, else the published formulas written out here.

Twenty steps on parameters of several shapes, with clipping's divisor, decay and a learning rate that changes; then what the engines add: a
skipped step changes nothing, lower-precision copies follow, and state in bf16 stays close.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.optim.adafactor import Config as Adafactor
from headway.optim.base import Guard, MatrixOptimizer
from headway.optim.lion import Config as Lion
from headway.optim.muon import Config as Muon
from headway.optim.schedule_free import Config as ScheduleFree
from headway.optim.schedule_free import WarmupSchedule
from headway.optim.state_storage import storage_of
from headway.parallel.update_rules import UpdateRule

SHAPES = [(32, 48), (48, 32), (48, 32), (16, 64), (7, 5)]
STEPS = 20
DIVISOR = 4.0


class Case:
    """Parameters under one of headway's rules."""

    def __init__(
        self, config: Any, shapes: list[tuple[int, ...]], *, copies: torch.dtype | None = None
    ) -> None:
        self.config = config
        optimizer = config.build()
        self.rule = UpdateRule(optimizer, storage_of(optimizer))
        generator = torch.Generator().manual_seed(1)
        self.params = [0.1 * torch.randn(shape, generator=generator) for shape in shapes]
        self.state = [self._state(param) for param in self.params]
        self.steps = [torch.zeros(()) for _ in shapes]
        self.copies: list[Tensor] | None = None
        if copies is not None:
            self.copies = [param.to(copies, copy=True) for param in self.params]

    def reference_parameters(self) -> list[torch.nn.Parameter]:
        """The same values for an optimizer of another library."""
        return [torch.nn.Parameter(param.clone()) for param in self.params]

    def tensors(self) -> list[Tensor]:
        """All that a step may change."""
        held = [tensor for state in self.state for tensor in state.values()]
        return [*self.params, *(self.copies or ()), *held]

    def _state(self, param: Tensor) -> dict[str, Tensor]:
        if isinstance(self.rule.optimizer, MatrixOptimizer):
            return self.rule.allocate_whole(tuple(param.shape), param.device)
        return self.rule.storage.allocate(self.rule.optimizer.slots, param.numel(), param.device)

    def step(self, grads: list[Tensor], index: int, *, skip: bool = False, **changes: Any) -> None:
        hyper = replace(self.config.hyper(index, STEPS), **changes)
        guard = Guard(torch.tensor(DIVISOR), torch.tensor(float(skip)))
        flat = not isinstance(self.rule.optimizer, MatrixOptimizer)
        for kinds in {tuple(state) for state in self.state}:
            members = [i for i, state in enumerate(self.state) if tuple(state) == kinds]

            def of(tensors: list[Tensor], indices: list[int] = members) -> list[Tensor]:
                return [tensors[i].view(-1) if flat else tensors[i] for i in indices]

            state = {slot: [self.state[i][slot] for i in members] for slot in kinds}
            copies = None if self.copies is None else of(self.copies)
            self.rule.optimizer.update(
                of(self.params),
                of(grads),
                state,
                [self.steps[i] for i in members],
                hyper,
                guard,
                copies,
            )


def gradients(shapes: list[tuple[int, ...]]) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(STEPS)]


def follow(
    case: Case,
    reference: Any,
    references: Sequence[Tensor],
    shapes: list[tuple[int, ...]],
    **close: Any,
) -> None:
    """Twenty steps of both; the reference is a torch optimizer whose first group's lr is set."""
    for index, grads in enumerate(gradients(shapes)):
        for parameter, grad in zip(references, grads, strict=True):
            parameter.grad = grad / DIVISOR
        for group in reference.param_groups:
            group["lr"] = case.config.hyper(index, STEPS).lr
        reference.step()
        case.step(grads, index)
        for ours, expected in zip(case.params, references, strict=True):
            torch.testing.assert_close(ours, expected.detach(), **close)
    assert all(float(step) == STEPS for step in case.steps)


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs_muon(scale: Any, nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Muon(lr=0.02, scale=scale, nesterov=nesterov, momentum=0.9, weight_decay=0.2)
    case = Case(config, SHAPES)
    references = case.reference_parameters()
    reference = torch.optim.Muon(
        references,
        lr=0.02,
        weight_decay=0.2,
        momentum=0.9,
        nesterov=nesterov,
        adjust_lr_fn=scale,
    )
    # torch's Newton-Schulz is always bf16; in fp32 both can be compared tightly.
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    follow(case, reference, references, SHAPES, rtol=2e-5, atol=2e-6)


def test_muon_in_bf16_is_torchs_within_its_rounding() -> None:
    case = Case(Muon(lr=0.02, ns_dtype="bf16"), SHAPES)
    references = case.reference_parameters()
    reference = torch.optim.Muon(
        references, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    follow(case, reference, references, SHAPES, rtol=1e-2, atol=1e-3)


def test_adafactor_is_torchs_adafactor() -> None:
    shapes: list[tuple[int, ...]] = [*SHAPES, (33,), (1,), (2, 6, 5)]
    case = Case(Adafactor(lr=0.3, weight_decay=0.1, clip_update=1.5, beta2_decay=-0.7), shapes)
    references = case.reference_parameters()
    reference = torch.optim.Adafactor(references, lr=0.3, weight_decay=0.1, d=1.5, beta2_decay=-0.7)
    follow(case, reference, references, shapes, rtol=2e-5, atol=1e-6)


def test_adafactor_holds_far_less_state_than_parameters() -> None:
    case = Case(Adafactor(), SHAPES)
    held = sum(tensor.numel() for state in case.state for tensor in state.values())
    assert held < sum(param.numel() for param in case.params) / 5


def test_adafactor_without_the_scale_of_parameters_steps_by_the_rate_alone() -> None:
    case = Case(Adafactor(lr=1e-3, scale_by_rms=False, clip_update=1e9), [(40,)])
    before = case.params[0].clone()
    (grad,) = gradients([(40,)])[0]
    case.step([grad], 5)
    expected = 1e-3 * case.config.schedule.factor(5, STEPS) * grad.sign()
    torch.testing.assert_close(before - case.params[0], expected, rtol=1e-3, atol=1e-7)


def schedule_free_reference(
    params: list[Tensor], rates: list[float], betas: Any, decay: float
) -> Iterator[tuple[Any, Any]]:
    """(what trains, averages) before every step of schedule-free AdamW as published (Defazio et al. 2024), in fp64."""
    x = [param.double() for param in params]
    z = [param.double() for param in params]
    squares = [torch.zeros_like(value) for value in x]
    total = 0.0
    trained = [value.clone() for value in x]
    for count, (rate, grads) in enumerate(
        zip(rates, gradients([tuple(param.shape) for param in params]), strict=True), start=1
    ):
        total += rate**2
        share = rate**2 / total
        for i, grad in enumerate(grads):
            g = grad.double() / DIVISOR
            squares[i] = betas[1] * squares[i] + (1 - betas[1]) * g * g
            direction = (
                g / ((squares[i] / (1 - betas[1] ** count)).sqrt() + 1e-8) + decay * trained[i]
            )
            z[i] = z[i] - rate * direction
            x[i] = (1 - share) * x[i] + share * z[i]
            trained[i] = (1 - betas[0]) * z[i] + betas[0] * x[i]
        yield trained, x


def test_schedule_free_is_the_published_one() -> None:
    config = ScheduleFree(
        lr=0.02, betas=(0.85, 0.97), weight_decay=0.2, schedule=WarmupSchedule(warmup=5)
    )
    case = Case(config, SHAPES, copies=torch.float32)
    rates = [config.hyper(index, STEPS).lr for index in range(STEPS)]
    assert rates[0] == pytest.approx(0.004)
    assert rates[4:] == [0.02] * 16
    assert case.copies is not None
    reference = schedule_free_reference(
        [param.clone() for param in case.params], rates, config.betas, 0.2
    )
    for index, (grads, (trained, averages)) in enumerate(
        zip(gradients(SHAPES), reference, strict=True)
    ):
        case.step(grads, index)
        for ours, expected in zip((*case.copies, *case.params), (*trained, *averages), strict=True):
            torch.testing.assert_close(ours, expected.float(), rtol=2e-5, atol=1e-6)
    apart = sum(
        float((copy - param).abs().max())
        for copy, param in zip(case.copies, case.params, strict=True)
    )
    assert apart > 0.01, "what trains is not what is kept"


def test_schedule_free_is_the_packages() -> None:
    package = pytest.importorskip("schedulefree")
    config = ScheduleFree(
        lr=0.02, betas=(0.85, 0.97), weight_decay=0.2, schedule=WarmupSchedule(warmup=5)
    )
    case = Case(config, SHAPES, copies=torch.float32)
    references = case.reference_parameters()
    reference = package.AdamWScheduleFree(
        references, lr=0.02, betas=(0.85, 0.97), weight_decay=0.2, warmup_steps=5
    )
    assert case.copies is not None
    for index, grads in enumerate(gradients(SHAPES)):
        reference.train()
        for parameter, grad in zip(references, grads, strict=True):
            parameter.grad = grad / DIVISOR
        reference.step()
        case.step(grads, index)
        for ours, expected in zip(case.copies, references, strict=True):
            torch.testing.assert_close(ours, expected.detach(), rtol=2e-5, atol=2e-6)
        reference.eval()
        for ours, expected in zip(case.params, references, strict=True):
            torch.testing.assert_close(ours, expected.detach(), rtol=2e-5, atol=2e-6)


def test_schedule_free_begins_with_the_weights_and_sets_what_trains_bit_for_bit() -> None:
    case = Case(ScheduleFree(lr=0.02), SHAPES, copies=torch.bfloat16)
    rule: Any = case.rule.optimizer
    assert case.copies is not None

    def again() -> list[Tensor]:
        values = [torch.zeros_like(copy).view(-1) for copy in case.copies or ()]
        state = {slot: [held[slot] for held in case.state] for slot in rule.slots}
        rule.set_training_weights(
            [param.view(-1) for param in case.params], state, case.steps, values
        )
        return values

    assert all(
        torch.equal(value, param.to(torch.bfloat16).view(-1))
        for value, param in zip(again(), case.params, strict=True)
    )
    case.step([torch.full_like(param, float("inf")) for param in case.params], 0, skip=True)
    assert all(
        torch.equal(copy, param.to(torch.bfloat16))
        for copy, param in zip(case.copies, case.params, strict=True)
    )
    for index, grads in enumerate(gradients(SHAPES)[:3]):
        case.step(grads, index)
        assert all(
            torch.equal(value, copy.view(-1))
            for value, copy in zip(again(), case.copies, strict=True)
        )


class PlainLion:
    """Lion as published: Chen et al. 2023, algorithm 2, in fp64."""

    def __init__(self, params: Sequence[Tensor], betas: tuple[float, float], decay: float) -> None:
        self.params = params
        self.betas = betas
        self.decay = decay
        self.momentum = [torch.zeros_like(param, dtype=torch.float64) for param in params]
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0}]

    @torch.no_grad()
    def step(self) -> None:
        lr = self.param_groups[0]["lr"]
        (beta1, beta2) = self.betas
        for param, held in zip(self.params, self.momentum, strict=True):
            assert param.grad is not None
            grad = param.grad.double()
            direction = (beta1 * held + (1 - beta1) * grad).sign()
            param.copy_(param.double() - lr * (direction + self.decay * param.double()))
            held.copy_(beta2 * held + (1 - beta2) * grad)


def test_lion_is_the_published_one() -> None:
    case = Case(Lion(lr=1e-2, betas=(0.8, 0.95), weight_decay=0.3), SHAPES)
    references = case.reference_parameters()
    follow(case, PlainLion(references, (0.8, 0.95), 0.3), references, SHAPES, rtol=1e-5, atol=1e-6)


def test_lion_is_the_packages() -> None:
    package = pytest.importorskip("lion_pytorch")
    case = Case(Lion(lr=1e-2, betas=(0.8, 0.95), weight_decay=0.3), SHAPES)
    references = case.reference_parameters()
    reference = package.Lion(references, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.3)
    follow(case, reference, references, SHAPES, rtol=1e-5, atol=1e-6)


def test_singular_values_of_a_batch_of_matrices_become_about_one() -> None:
    from headway.optim.muon_update import orthogonalize

    matrices = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(3))
    for wide_or_tall in (matrices, matrices.mT.contiguous()):
        values = torch.linalg.svdvals(orthogonalize(wide_or_tall, 5))
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_muon_updates_stacked_matrices_as_it_updates_each() -> None:
    stacked = Case(Muon(lr=0.02), [(3, 24, 40)])
    apart = Case(Muon(lr=0.02), [(24, 40)] * 3)
    for matrix, stacked_matrix in zip(apart.params, stacked.params[0], strict=True):
        matrix.copy_(stacked_matrix)
    for index in range(3):
        grads = list(gradients([(3, 24, 40)])[index][0])
        stacked.step([torch.stack(grads)], index)
        apart.step(grads, index)
    torch.testing.assert_close(torch.stack(apart.params), stacked.params[0])


ALL = [
    Muon(lr=0.02),
    Muon(lr=0.02, state_dtype="bf16"),
    Lion(lr=0.02),
    Lion(state_dtype="bf16"),
    Adafactor(weight_decay=0.5),
    ScheduleFree(weight_decay=0.5),
]
"""All of them decay: a skipped step must not."""


@pytest.mark.parametrize(
    "config", ALL, ids=lambda config: f"{config.kind} {storage_of(config.build()).dtype}"
)
def test_a_skipped_step_changes_nothing(config: Any) -> None:
    case = Case(config, SHAPES, copies=torch.bfloat16)
    grads = gradients(SHAPES)
    case.step(grads[0], 5)
    before = [tensor.clone() for tensor in case.tensors()]
    case.step([torch.full_like(grad, float("nan")) for grad in grads[1]], 6, skip=True)
    assert all(torch.equal(old, new) for old, new in zip(before, case.tensors(), strict=True))
    assert all(float(step) == 1 for step in case.steps)


@pytest.mark.parametrize(
    "config", ALL, ids=lambda config: f"{config.kind} {storage_of(config.build()).dtype}"
)
def test_copies_follow_the_parameters_where_none_are_averaged(config: Any) -> None:
    case = Case(config, SHAPES, copies=torch.bfloat16)
    grads = gradients(SHAPES)
    case.step(grads[0], 5)
    case.step([torch.full_like(grad, float("nan")) for grad in grads[1]], 6, skip=True)
    case.step(grads[2], 6)
    if case.rule.averages is not None:
        return
    assert case.copies is not None
    for copy, param in zip(case.copies, case.params, strict=True):
        assert torch.equal(copy, param.to(torch.bfloat16))


@pytest.mark.parametrize(
    "config",
    [Muon(lr=0.01), Lion(lr=0.01), Adafactor(), ScheduleFree()],
    ids=lambda config: config.kind,
)
def test_maximize_ascends(config: Any) -> None:
    up = Case(config, SHAPES, copies=torch.float32)
    down = Case(config, SHAPES, copies=torch.float32)
    for index, grads in enumerate(gradients(SHAPES)[:3]):
        up.step(grads, index, maximize=True)
        down.step([-grad for grad in grads], index)
    assert all(
        torch.equal(param, other) for param, other in zip(up.params, down.params, strict=True)
    )


@pytest.mark.parametrize("config", [Muon, Lion], ids=["muon", "lion"])
def test_state_in_bf16_stays_close_to_fp32(config: Any) -> None:
    exact = Case(config(lr=1e-3), SHAPES)
    rounded = Case(config(lr=1e-3, state_dtype="bf16"), SHAPES)
    assert all(held.dtype == torch.bfloat16 for state in rounded.state for held in state.values())
    start = [param.clone() for param in exact.params]
    for index, grads in enumerate(gradients(SHAPES)):
        exact.step(grads, index)
        rounded.step(grads, index)
    for exact_param, other, first in zip(exact.params, rounded.params, start, strict=True):
        assert (exact_param - other).norm() < 0.05 * (exact_param - first).norm()
