"""The parity table of docs/support.md: every native family and every wrapped class beside transformers, with worst differences.

configurations of family_cases.py and odd_configs.py -> headway.diagnose.agreement.compare -> worst of each column
the first configuration of a family                  -> two tensor ranks beside one process; LoRA beside PEFT
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headway.checkpoint.stored_model import find_model
from headway.diagnose.agreement import Agreement, compare
from headway.diagnose.small_model import random_model
from headway.export.adapter import write_adapter
from headway.model.adapter.config import HEAD_MODULE, AdapterConfig, linears
from headway.model.adapter.lora import adapt
from headway.model.base import build_frozen_model
from headway.model.config import ModelConfig
from headway.model.families.base import family_for
from headway.model.families.transformers import Wrapping
from headway.model.stock.facts import facts_of
from headway.parallel.collectives import RankGroup
from support import layout_trials, stock_walk
from support.family_cases import CASES, SHAPE
from support.odd_configs import ODD, odd_config
from support.ranks import run_ranks

COLUMNS = ("logits", "gradients", "packed", "cached", "LoRA", "tensor 2", "greedy text", "export")
SAME = "same"
EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3")
EVEN_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
UPDATE = 0.03
"""Spread of the updates of an adapter."""
STEPS = 3
TOLERANCE = 1e-4
"""Of weights after steps on two ranks, relative."""


@dataclass(frozen=True)
class Row:
    """A family or class, and its worst differences; None: refused by name."""

    name: str
    agreement: Agreement
    lora: float | None
    tensor: float | None

    def cells(self) -> list[str]:
        """The line of the page."""
        seen = self.agreement
        return [
            f"`{self.name}`",
            *(decade(gap) for gap in (seen.logits, seen.gradients, seen.packed, seen.cached)),
            decade(self.lora),
            decade(self.tensor),
            SAME if seen.greedy else "differs",
            SAME if seen.export else "differs",
        ]

    def check(self) -> None:
        """Nothing differs beyond rounding."""
        assert self.agreement.problem is None, f"{self.name}: {self.agreement.problem}"
        assert self.lora is None or self.lora < TOLERANCE, (
            f"{self.name}: LoRA differs by {self.lora:.1e}"
        )
        assert self.tensor is None or self.tensor < TOLERANCE, f"{self.name}: {self.tensor:.1e}"


def decade(gap: float | None) -> str:
    """A difference rounded up to a power of ten: its digits are those of one machine."""
    if gap is None:
        return "refused"
    if gap == 0:
        return "0"
    return f"1e{math.ceil(math.log10(gap))}"


def family_configs() -> dict[str, list[dict[str, Any]]]:
    """Native family -> its configurations."""
    import transformers

    configs: dict[str, list[dict[str, Any]]] = {}
    for name, settings in CASES.values():
        shape = {} if name == "GPT2" else SHAPE
        config = getattr(transformers, f"{name}Config")(**{**shape, **settings}).to_dict()
        configs.setdefault(_family(config), []).append(config)
    for kind, listed in ODD.items():
        for settings in listed:
            configs.setdefault(_family({"model_type": kind}), []).append(odd_config(kind, settings))
    return configs


def _family(config: dict[str, Any]) -> str:
    return str(vars(family_for(config))["__name__"]).rpartition(".")[2]


def native_rows() -> list[Row]:
    """Every family of headway."""
    configs = family_configs()
    tensor = tensor_gaps({name: listed[0] for name, listed in configs.items()})
    rows: list[Row] = []
    for name, listed in configs.items():
        seen = [compare(config) for config in listed]
        worst = Agreement(
            *(
                max(getattr(one, column) for one in seen)
                for column in ("logits", "gradients", "packed", "cached")
            ),
            greedy=all(one.greedy for one in seen),
            export=all(one.export for one in seen),
        )
        rows.append(Row(name, worst, lora_gap(listed[0], None), tensor[name]))
    return rows


def wrapped_rows(kinds: Sequence[str]) -> list[Row]:
    """Classes of transformers behind `model.family: transformers`."""
    rows: list[Row] = []
    for kind in kinds:
        config = stock_walk.config_of(kind).to_dict()
        rows.append(
            Row(kind, compare(config, wrapping=Wrapping()), lora_gap(config, Wrapping()), None)
        )
    return rows


def has_stacked_experts(config: ModelConfig) -> bool:
    """Whether a wrapped class is a mixture."""
    return config.hf_config is not None and facts_of(config).experts_per_token is not None


def attention_targets(config: ModelConfig) -> tuple[str, ...]:
    """Linears of attention, without names that PEFT takes for those of experts (docs/support.md)."""
    paths = [path for path in linears(config) if "attn" in path or "attention" in path]
    return tuple(path for path in paths if path.rpartition(".")[2] not in EXPERT_NAMES)


@torch.no_grad()
def lora_gap(hf_config: dict[str, Any], wrapping: Wrapping | None) -> float | None:
    """How far a model with an adapter is from the one that PEFT makes of the written adapter; None: it has no linear."""
    import peft

    reference = random_model(hf_config)
    with tempfile.TemporaryDirectory(prefix="headway-parity-") as name:
        folder = Path(name)
        reference.save_pretrained(folder / "model")
        stored = find_model(folder / "model", wrapping=wrapping)
        if set(linears(stored.config)) <= {HEAD_MODULE}:
            return None
        targets: tuple[str, ...] = ("all",)
        if stored.config.experts is not None or has_stacked_experts(stored.config):
            targets = attention_targets(stored.config)
        config = AdapterConfig(rank=3, targets=targets)
        generator = torch.Generator().manual_seed(2)
        updates = {
            path: torch.randn(shape, generator=generator) * UPDATE
            for path, shape in config.shapes(stored.config).items()
        }
        write_adapter(updates, config, stored.config, folder / "adapter", base=None)

        model = build_frozen_model(
            stored.config, stored.weights(), torch.device("cpu"), torch.float32
        )
        values = {path: value.clone() for path, value in model.named_parameters()}
        adapt(model, config, config.modules(stored.config))
        model.eval()
        for path, parameter in model.named_parameters():
            parameter.copy_(updates[path] if path in updates else values[path])

        tokens = torch.randint(3, 60, (2, 20), generator=generator)
        position = torch.arange(20).expand(2, -1)
        ours = model.logits(model.hidden_states(tokens, position))
        theirs = peft.PeftModel.from_pretrained(reference, folder / "adapter").eval()
        wanted = theirs(tokens, use_cache=False).logits
        return float((ours - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))


def tensor_gaps(configs: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How far weights are from those of one process after some steps on two ranks that share layers."""
    trials: list[layout_trials.LayoutTrial] = []
    for name, hf_config in configs.items():
        # Two ranks have as many heads each; the configurations have odd numbers of linear ones.
        even = {key: value for key, value in EVEN_HEADS.items() if key in hf_config}
        config = family_for(hf_config).read({**hf_config, **even})
        # Balance is a setting of training that transformers' file may name.
        if config.experts is not None:
            config = config.with_(experts={**config.experts.model_dump(), "aux_loss": 0.0})
        parallel = {"tensor": 2, "sequence": False}
        trials.append(layout_trials.trial(name, 2, parallel, config=config.with_(dropout=0.0)))
    outcomes = run_ranks(functools.partial(_train_all, trials), 2, timeout=60 + 20 * len(trials))
    alone = [layout_trials.on_one_process(trial) for trial in trials]
    (expected,) = run_ranks(functools.partial(_train_all, alone), 1, timeout=60 + 20 * len(trials))
    gaps: dict[str, float] = {}
    for index, trial in enumerate(trials):
        right = expected[index].weights
        gaps[trial.name] = max(
            float(
                (outcome[index].weights[name].float() - value.float()).norm()
                / value.float().norm().clamp(min=1.0)
            )
            for outcome in outcomes
            for name, value in right.items()
        )
    return gaps


def _train_all(
    trials: Sequence[layout_trials.LayoutTrial], group: RankGroup
) -> list[layout_trials.Outcome]:
    return [layout_trials.train_trial(trial, group, STEPS) for trial in trials]


def page(native: list[Row], wrapped: list[Row]) -> str:
    """The table of docs/support.md."""
    import transformers

    lines = [
        f"{len(native)} native families and {len(wrapped)} wrapped classes beside transformers {transformers.__version__}, fp32 on the CPU.",
        "",
        "| native family | " + " | ".join(COLUMNS) + " |",
        "|---" * (1 + len(COLUMNS)) + "|",
        *("| " + " | ".join(row.cells()) + " |" for row in native),
        "",
        "| wrapped class | " + " | ".join(COLUMNS) + " |",
        "|---" * (1 + len(COLUMNS)) + "|",
        *("| " + " | ".join(row.cells()) + " |" for row in wrapped),
    ]
    return "\n".join(lines) + "\n"
