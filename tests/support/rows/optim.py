"""Settings of the optimizers other than AdamW. What every optimizer has is looked at in the numbers its groups get, without training."""

from typing import Any

import torch

from headway.model.layout import ParamSpec, in_groups
from headway.optim.base import Guard
from headway.optim.groups import hypers
from headway.optim.state_storage import storage_of
from headway.parallel.assemble import group_parameters, meta_model, whole_specs
from headway.parallel.engine import EngineSpec
from headway.parallel.update_rules import UpdateRule
from headway.tasks.next_token import Config as NextToken
from headway.train.config import Recipe
from support.setting_runs import BASE, Row, load, numbers_or_refusal


def group_numbers(overrides: tuple[str, ...]) -> Any:
    """Groups, their hyperparameters over six steps, and the clip norm."""
    recipe = load(Recipe, None, [*BASE, *overrides])
    spec = EngineSpec(recipe.model, NextToken(), recipe.optim, torch.device("cpu"))
    groups = group_parameters(whole_specs(meta_model(spec), NextToken().build()), spec)
    return (
        [(group.names, group.part) for group in groups],
        [hypers(recipe.optim, groups, step, 6) for step in range(6)],
        recipe.optim.clip,
    )


def updated(overrides: tuple[str, ...]) -> Any:
    """Small parameters after three updates with the rules of a recipe, in the order its parts come."""
    optim = load(Recipe, None, [*BASE, *overrides]).optim
    parts = [
        optim.part(part)
        for part in dict.fromkeys(
            (
                "",
                *optim.parts(
                    {
                        "up_proj.weight": ParamSpec("up_proj.weight", (8, 4)),
                        "norm.weight": ParamSpec("norm.weight", (8,), groups=in_groups("norm")),
                    }
                ).values(),
            )
        )
    ]
    return [_update(part, (8, 4) if index == 0 else (32,)) for index, part in enumerate(parts)]


def _update(config: Any, shape: tuple[int, ...]) -> list[float]:
    rule = UpdateRule(config.build(), storage_of(config.build()))
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(shape, generator=generator)
    step = torch.zeros(())
    if rule.matrices is not None:
        state = rule.allocate_whole(shape, param.device)
    else:
        param = param.view(-1)
        state = rule.storage.allocate(rule.optimizer.slots, param.numel(), param.device)
    copy = torch.zeros_like(param)
    for index in range(3):
        grad = torch.randn(param.shape, generator=generator)
        lists = {slot: [held] for slot, held in state.items()}
        rule.optimizer.update(
            [param],
            [grad],
            lists,
            [step],
            config.hyper(index, 3),
            Guard(torch.ones(()), torch.zeros(())),
            [copy],
        )
    return [*param.view(-1).tolist(), *copy.view(-1).tolist()]


def stored(overrides: tuple[str, ...]) -> Any:
    """How state is stored."""
    return storage_of(load(Recipe, None, [*BASE, *overrides]).optim.build())


def shared_rows(kind: str) -> dict[str, Row]:
    """The rows of what every optimizer has."""
    chosen = (f"optim.kind={kind}",)
    constant = (*chosen, "optim.schedule.kind=constant")
    rule = (*chosen, "optim.groups=[{match: [norms]}]")
    wsd = (*chosen, "optim.schedule.kind=wsd")

    def groups(*settings: str) -> list[str]:
        return [f"{{match: [norms], {', '.join(settings)}}}"] if settings else ["{match: [norms]}"]

    section = f"optim[{kind}]"
    return {
        f"{section}.kind": ((), kind, "nothing", numbers_or_refusal),
        f"{section}.lr": (chosen, 1e-2, 1e-3, group_numbers),
        f"{section}.weight_decay": (chosen, 0.1, 10.0, group_numbers),
        f"{section}.decay": (chosen, ["matrices"], ["weights"], group_numbers),
        f"{section}.clip": (chosen, 1.0, 0.01, group_numbers),
        f"{section}.schedule.kind": (
            chosen,
            "constant",
            "linear",
            numbers_or_refusal if kind == "schedule_free" else group_numbers,
        ),
        f"{section}.schedule.warmup": (constant, 1, 3, group_numbers),
        f"{section}.schedule.decay": (wsd, 2, 4, refused_or_numbers),
        f"{section}.schedule.decay_shape": (
            (*wsd, "optim.schedule.decay=4"),
            "linear",
            "sqrt",
            refused_or_numbers,
        ),
        f"{section}.schedule.floor": (chosen, 0.1, 0.9, refused_or_numbers),
        f"{section}.schedule.zero_steps": (constant, 0, 2, group_numbers),
        f"{section}.groups.match": (
            chosen,
            groups("lr: 0.5"),
            ["{match: [embeddings], lr: 0.5}"],
            group_numbers,
        ),
        f"{section}.groups.lr": (rule, groups(), groups("lr: 0.5"), group_numbers),
        f"{section}.groups.lr_factor": (rule, groups(), groups("lr_factor: 3"), group_numbers),
        f"{section}.groups.betas": (
            rule,
            groups(),
            groups("betas: [0.1, 0.1]"),
            refused_or_numbers,
        ),
        f"{section}.groups.eps": (rule, groups(), groups("eps: 1.0"), refused_or_numbers),
        f"{section}.groups.weight_decay": (
            rule,
            groups(),
            groups("weight_decay: 10"),
            group_numbers,
        ),
        f"{section}.groups.maximize": (
            rule,
            groups(),
            groups("maximize: true"),
            refused_or_numbers,
        ),
    }


def refused_or_numbers(overrides: tuple[str, ...]) -> Any:
    """The numbers, or the message that refuses a setting which this optimizer does not have, with the value it names."""
    from headway.errors import HeadwayError

    try:
        return group_numbers(overrides)
    except HeadwayError as error:
        return str(error), overrides[-1]


ADAFACTOR = ("optim.kind=adafactor", "optim.schedule.warmup=1")
LION = ("optim.kind=lion", "optim.schedule.warmup=1")
FREE = ("optim.kind=schedule_free", "optim.schedule.warmup=1")
MUON = ("optim.kind=muon", "optim.schedule.warmup=1")

ROWS: dict[str, Row] = {
    **shared_rows("adafactor"),
    "optim[adafactor].beta2_decay": (ADAFACTOR, -0.8, -0.1, updated),
    "optim[adafactor].eps": (ADAFACTOR, None, 10.0, updated),
    "optim[adafactor].eps_scale": (ADAFACTOR, 1e-3, 10.0, updated),
    "optim[adafactor].clip_update": (ADAFACTOR, 1.0, 0.1, updated),
    "optim[adafactor].scale_by_rms": (ADAFACTOR, True, False, updated),
    **shared_rows("lion"),
    **shared_rows("muon"),
    "optim[lion].betas": (LION, [0.9, 0.99], [0.1, 0.2], updated),
    "optim[lion].state_dtype": (LION, "fp32", "bf16", stored),
    **shared_rows("schedule_free"),
    "optim[schedule_free].betas": (FREE, [0.9, 0.999], [0.5, 0.9], updated),
    "optim[schedule_free].eps": (FREE, 1e-8, 1.0, updated),
    "optim[muon].momentum": (MUON, 0.95, 0.5, updated),
    "optim[muon].nesterov": (MUON, True, False, updated),
    "optim[muon].ns_steps": (MUON, 5, 1, updated),
    "optim[muon].ns_dtype": (MUON, "fp32", "bf16", updated),
    "optim[muon].scale": (MUON, "match_rms_adamw", "original", updated),
    "optim[muon].state_dtype": (MUON, "fp32", "bf16", updated),
    "optim[muon].adamw.match": (MUON, ["embeddings"], ["embeddings", "layers.0"], group_numbers),
    "optim[muon].adamw.lr": (MUON, None, 1e-3, group_numbers),
    "optim[muon].adamw.weight_decay": (MUON, None, 0.5, group_numbers),
    "optim[muon].adamw.betas": (MUON, [0.9, 0.95], [0.1, 0.2], group_numbers),
    "optim[muon].adamw.eps": (MUON, 1e-8, 1.0, group_numbers),
    "optim[muon].adamw.state_dtype": (MUON, "fp32", "8bit", updated),
}
