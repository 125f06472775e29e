"""A dense model becomes a mixture of experts: its config and weights come in, those of the mixture
go out, one tensor at a time.

    model.layers.0.mlp.gate_proj.weight  [out, in]  ->  model.layers.0.mlp.experts.gate_proj.weight  [experts, out, in], copies

Routers are drawn from (seed, name). The experts of a token are equal at first and its weights add
up to 1, so logits stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from headway.errors import ConfigError
from headway.model.layout import STACKED, ParamSpec, param_specs
from headway.runtime.seed import derive

if TYPE_CHECKING:
    import torch

    from headway.model.config import ModelConfig
    from headway.model.experts_config import ExpertsConfig, UpcycleConfig

INNER = ".mlp.experts."
DENSE = ".mlp."


def upcycled_config(
    config: ModelConfig, upcycle: UpcycleConfig, settings: ExpertsConfig | None
) -> ModelConfig:
    """The mixture of a dense model; `settings`: the recipe's other settings of experts."""
    if config.experts is not None:
        raise ConfigError(
            "init.upcycle is given, but the model in init.from already has experts. Remove "
            "init.upcycle."
        )
    if config.ffn_bias:
        raise ConfigError(
            "init.upcycle is given, but the feed-forward layers in init.from have biases, which "
            "experts do not have."
        )

    fields = {}
    if settings is not None:
        fields = {key: getattr(settings, key) for key in settings.model_fields_set}
    # With these the mixture of equal experts computes what the dense layer did.
    fixed = {
        "num": upcycle.experts,
        "per_token": upcycle.per_token,
        "normalize": True,
        "ffn_size": None,
        "shared_ffn_size": 0,
        "bias": False,
        "swiglu_limit": None,
    }
    for key, value in fixed.items():
        if fields.get(key, value) != value:
            raise ConfigError(
                f"model.experts.{key} is {fields[key]!r} and init.upcycle makes it {value!r}. "
                "Leave it out of model.experts."
            )
    return config.with_(experts={**fields, **fixed})


def upcycled_weights(
    weights: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    config: ModelConfig,
    upcycle: UpcycleConfig,
    seed: int,
) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """The weights of the mixture `config`, from those of the dense model."""
    specs = {spec.name: spec for spec in param_specs(config)}
    # Name in the dense model -> spec in the mixture.
    stacked = {
        name.replace(INNER, DENSE): spec
        for name, spec in specs.items()
        if len(spec.shape) == STACKED
    }

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in weights():
            if name not in stacked:
                yield name, value
                continue
            # Routers have no dense form: each is yielded before the first matrix of its experts.
            if name.endswith("gate_proj.weight"):
                yield from _router(stacked[name], specs, upcycle, seed)
            yield stacked[name].name, _copies(stacked[name], value, upcycle, seed)

    return read


def _router(
    spec: ParamSpec, specs: dict[str, ParamSpec], upcycle: UpcycleConfig, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of the router in the layer of an expert's matrix; biases are 0."""
    import torch

    prefix = spec.name.split(INNER)[0] + ".mlp.gate."
    for name in specs:
        if not name.startswith(prefix):
            continue
        value = torch.zeros(*specs[name].shape, device="cpu")
        if name.endswith(".weight"):
            generator = torch.Generator(device="cpu").manual_seed(derive(seed, "upcycle", name))
            value.normal_(0.0, upcycle.router_std, generator=generator)
        yield name, value


def _copies(
    spec: ParamSpec, value: torch.Tensor, upcycle: UpcycleConfig, seed: int
) -> torch.Tensor:
    """[experts, ...] of a dense matrix, each with noise of its own if the recipe asks for it."""
    import torch

    # A view: nothing is copied until an engine takes its part.
    copies = value.expand(upcycle.experts, *value.shape)
    if not upcycle.noise:
        return copies
    generator = torch.Generator(device="cpu").manual_seed(derive(seed, "upcycle", spec.name))
    noise = torch.empty(*copies.shape, device="cpu").normal_(0.0, 1.0, generator=generator)
    return copies.float() + noise * (upcycle.noise * float(value.float().std()))
