"""The `model.experts` section: how a layer's feed-forward becomes a mixture of experts. Imports
without torch."""

from typing import Literal

from pydantic import model_validator

from headway.config.section import Section, setting

MAX_EXPERTS = 4096
"""More is a typing error. Dispatch sorts numbers of experts as 16 bits (expert_products.py)."""


class ExpertsConfig(Section):
    """A mixture of experts in place of the feed-forward.

    Every token passes `per_token` of `num` experts; none is dropped.
    """

    num: int = setting(8, "Experts of a layer.", ge=2, le=MAX_EXPERTS)
    per_token: int = setting(2, "Experts that a token passes.", ge=1)
    ffn_size: int | None = setting(None, "Inner width of one expert; null = model.ffn_size.", gt=0)
    shared_ffn_size: int = setting(
        0, "Inner width of the shared expert that every token passes besides; 0 = none.", ge=0
    )
    shared_gate: bool = setting(
        False, "The shared expert's result is multiplied by the sigmoid of a trained gate."
    )
    normalize: bool = setting(True, "Divide the weights of a token's experts by their sum.")
    sum_offset: float = setting(
        0.0, "Added to the sum of a token's weights before they are divided by it.", ge=0, le=1.0
    )
    router: Literal["softmax", "sigmoid"] = setting(
        "softmax", "How the router's logits become scores."
    )
    router_bias: bool = setting(False, "A trained bias on the router's logits.")
    bias: bool = setting(False, "Biases on the projections of the experts.")
    swiglu_limit: float | None = setting(
        None,
        "Clamped SwiGLU: gate is at most this, up is between minus this and this, and down reads "
        "gate * sigmoid(alpha * gate) * (up + 1); "
        "null = gate * sigmoid(gate) * up.",
        gt=0,
        le=1e6,
    )
    swiglu_alpha: float = setting(1.702, "alpha of clamped SwiGLU.", gt=0)
    routed_scale: float = setting(
        1.0, "The weights of a token's experts are multiplied by this.", gt=0
    )
    num_groups: int = setting(
        1,
        "Groups of neighbouring experts; a token's experts come from groups_per_token of them.",
        ge=1,
    )
    groups_per_token: int = setting(1, "Groups that a token may choose experts of.", ge=1)
    group_score: Literal["top2", "top1"] = setting(
        "top2", "A group is as good as the sum of its two best scores, or as its best one."
    )
    first_dense: int = setting(0, "The first layers that keep an ordinary feed-forward.", ge=0)
    every: int = setting(1, "After those, every n-th layer is a mixture; 1 = all of them.", ge=1)
    aux_loss: float = setting(
        0.01, "Weight of the load-balancing loss; 0 = none.", ge=0, on_resume="free"
    )
    aux_scope: Literal["row", "step"] = setting(
        "row",
        "Over which tokens the load is balanced: each row by itself, or all tokens of a step over "
        "all ranks. With more than one "
        "microbatch or rank, step needs a pass without gradients first.",
        on_resume="free",
    )
    aux_layers: Literal["each", "pooled"] = setting(
        "each",
        "each: the mean of every layer's balancing loss; pooled: all layers counted together, as "
        "transformers does.",
        on_resume="free",
    )
    z_loss: float = setting(
        0.0,
        "Weight of the squared log-partition of the router's logits, which keeps them small.",
        ge=0,
        on_resume="free",
    )
    bias_rate: float | None = setting(
        None,
        "Balance without a loss: a bias of each expert, used to choose experts only, moves by this "
        "much per step against its load; "
        "null = no bias.",
        ge=0,
    )

    @model_validator(mode="after")
    def _fits(self) -> "ExpertsConfig":
        if self.per_token > self.num:
            raise ValueError(f"per_token is {self.per_token}; it must not exceed num={self.num}")
        if self.shared_gate and not self.shared_ffn_size:
            raise ValueError(
                "shared_gate is given without shared_ffn_size; it is for the shared expert. Give "
                "shared_ffn_size too"
            )
        default_alpha = type(self).model_fields["swiglu_alpha"].default
        if self.swiglu_limit is None and self.swiglu_alpha != default_alpha:
            raise ValueError(
                f"swiglu_alpha is {self.swiglu_alpha} without swiglu_limit; it is for clamped "
                "SwiGLU. Give swiglu_limit too"
            )
        if self.num % self.num_groups:
            raise ValueError(f"num_groups is {self.num_groups}; it must divide num={self.num}")

        group_size = self.num // self.num_groups
        eligible = self.groups_per_token * group_size
        if self.groups_per_token > self.num_groups or eligible < self.per_token:
            raise ValueError(
                f"groups_per_token is {self.groups_per_token}; it must be at most "
                f"num_groups={self.num_groups}, and so many groups "
                f"of {group_size} experts must have per_token={self.per_token}"
            )
        if self.num_groups > 1 and self.group_score == "top2" and group_size < 2:
            raise ValueError(
                f"group_score is top2 and a group has {group_size} expert; use top1, or fewer "
                "groups"
            )
        return self

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        # As transformers counts: with every=2 the second layer is the first mixture.
        return layer >= self.first_dense and (layer - self.first_dense + 1) % self.every == 0


class UpcycleConfig(Section):
    """How a dense model becomes a mixture: every expert starts as a copy of the layer's
    feed-forward.

    Its logits do not change, since a token's experts are equal and their weights add up to 1.
    """

    experts: int = setting(8, "Experts of a layer.", ge=2, le=MAX_EXPERTS)
    per_token: int = setting(2, "Experts that a token passes.", ge=1)
    noise: float = setting(
        0.0,
        "Normal noise on every expert's matrices, as a share of the matrix's standard deviation; "
        "0 = exact copies.",
        ge=0,
        le=1,
    )
    router_std: float = setting(
        0.02, "Standard deviation of the routers' initial weights.", gt=0, le=10
    )

    @model_validator(mode="after")
    def _fits(self) -> "UpcycleConfig":
        if self.per_token > self.experts:
            raise ValueError(
                f"per_token is {self.per_token}; it must not exceed experts={self.experts}"
            )
        return self
