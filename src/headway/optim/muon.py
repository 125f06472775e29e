"""Muon: the momentum of every hidden matrix is orthogonalized before the step.

Everything else is updated by AdamW.

Hidden matrices are parameters of two or more dimensions, other than embeddings, the output head,
head gates and what `adamw.match` names.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. The scale `match_rms_adamw` is that
of Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv:2502.16982. The equations are in
muon_update.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import field_validator

from headway.config.section import Section, setting
from headway.optim.adamw import Config as AdamWConfig
from headway.optim.base import Hyper, OptimConfig, Optimizer, check_betas

if TYPE_CHECKING:
    from torch import Tensor

    from headway.model.layout import Specs
    from headway.optim.base import Guard
    from headway.optim.state_storage import StateStorage

REST = "adamw"
"""The part of what is not a hidden matrix."""
Scale = Literal["match_rms_adamw", "original", "none"]


class AdamWPart(Section):
    """AdamW for everything that is not a hidden matrix."""

    match: tuple[str, ...] = setting(
        ("embeddings",),
        "Matrices that AdamW updates, as patterns of `freeze`; parameters of one dimension always "
        "belong to AdamW.",
    )
    lr: float | None = setting(None, "Peak learning rate; null = optim.lr.", ge=0, le=1e30)
    weight_decay: float | None = setting(
        None, "Decoupled weight decay; null = optim.weight_decay.", ge=0, le=1000
    )
    betas: tuple[float, float] = setting((0.9, 0.95), "Decay rates of the first and second moment.")
    eps: float = setting(1e-8, "Added to the root of the second moment.", gt=0, le=1)
    state_dtype: Literal["fp32", "bf16", "8bit"] = setting(
        "fp32", "How AdamW's moments are stored between updates."
    )

    _check_betas = field_validator("betas")(check_betas)


class Config(OptimConfig):
    """Settings of Muon."""

    NEEDS_MATRICES: ClassVar[bool] = True

    kind: str = setting("muon", "muon.", on_resume="fixed")
    momentum: float = setting(0.95, "Decay rate of the momentum.", ge=0, lt=1)
    nesterov: bool = setting(True, "Orthogonalize the Nesterov momentum.")
    ns_steps: int = setting(5, "Newton-Schulz iterations.", ge=1, le=20)
    ns_dtype: Literal["auto", "bf16", "fp32"] = setting(
        "auto", "Precision of Newton-Schulz; auto = bf16 on CUDA, else fp32."
    )
    scale: Scale = setting(
        "match_rms_adamw",
        "Factor of a matrix's step: match_rms_adamw = 0.2 sqrt(max(rows, columns)), which suits "
        "AdamW's lr; original = sqrt(max(1, rows / columns)), which wants an lr near 0.02; none = "
        "1.",
    )
    state_dtype: Literal["fp32", "bf16"] = setting(
        "fp32", "How momentum is stored between updates: 4 or 2 bytes per parameter."
    )
    adamw: AdamWPart = setting(AdamWPart, "AdamW for embeddings, head, norms and biases.")

    def parts(self, specs: Specs) -> dict[str, str]:
        """AdamW's part; every other parameter is a hidden matrix."""
        from headway.optim.groups import select

        # Patterns of the default and of things that a model may lack need not match anything.
        other = select(
            self.adamw.match,
            specs,
            "optim.adamw.match",
            may_be_empty=("embeddings", "gates", "objective", "adapter"),
        )
        # What keeps fp32 (gates, the objective's parameters) is AdamW's whatever its dimensions.
        return {
            name: REST
            for name, spec in specs.items()
            if not spec.is_matrix or spec.keeps_float32 or name in other
        }

    def part(self, name: str) -> OptimConfig:
        """AdamW's settings for its part."""
        if name != REST:
            return self
        adamw = self.adamw
        lr = adamw.lr
        if lr is None:
            lr = self.lr
        weight_decay = adamw.weight_decay
        if weight_decay is None:
            weight_decay = self.weight_decay
        return AdamWConfig(
            lr=lr,
            weight_decay=weight_decay,
            schedule=self.schedule,
            betas=adamw.betas,
            eps=adamw.eps,
            state_dtype=adamw.state_dtype,
        )

    def build(self) -> Optimizer:
        """Make the rule of hidden matrices."""
        from headway.optim.state_storage import DTYPES, StateStorage

        return Muon(self, StateStorage(DTYPES[self.state_dtype]))

    def hyper(self, step: int, total_steps: int) -> Hyper:
        """The numbers of hidden matrices at one step; the first of `betas` is the momentum."""
        return Hyper(
            self.lr * self.schedule.factor(step, total_steps),
            (self.momentum, 0.0),
            0.0,
            self.weight_decay,
        )


class Muon:
    """Updates whole matrices; a parameter of more dimensions is a batch of them."""

    slots: tuple[str, ...] = ("momentum",)

    def __init__(self, config: Config, storage: StateStorage) -> None:
        self.config = config
        self.storage = storage

    def state_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """One momentum of each element."""
        return {"momentum": shape}

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
        """Change params and momentum in place, matrices of one shape together.

        A skipped step changes nothing.
        """
        from headway.optim.muon_update import MuonTensors, muon_step

        muon_step(
            MuonTensors(params, grads, state["momentum"], steps, copies), self.config, hyper, guard
        )
