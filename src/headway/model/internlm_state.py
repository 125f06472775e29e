"""What an InternLM checkpoint holds besides weights: fp32 masters, Adam's moments, loss scale and progress, under our names.

    optimizer_tp{t}_pp{p}_zo{z}.pt   flat buffers of whole parameters, and the plan that says which parameters they hold
    context.pt                       successful updates, consumed tokens, skipped batches

A plan entry is `<i>_<dims>`: the i-th of the shard's parameters by falling size, in the order of the model where sizes are equal.
Everything is put together to whole parameters, so that the run that continues may have any layout.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import CheckpointError, ConfigError
from headway.model.old_weights import Merge, Shards, internlm_stages, layers_of, open_pickled

if TYPE_CHECKING:
    import torch

    from headway.model.config import ModelConfig

CONTEXT = "context.pt"
SLOTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
SHARD = re.compile(r"optimizer_tp(\d+)_pp(\d+)_zo(\d+)\.pt")
MODE_CLASS = "internlm.core.context.process_group_initializer.ParallelMode"
"""An enumeration that newer versions keep in their parameter groups; its value is a word."""
REMEDY = "Take the weights alone: init.content=[model]."


class InternlmState:
    """Optimizer state and progress of one InternLM folder; files are mapped, parameters are put together when they are read."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.folder, self.config = folder, config
        self._last: tuple[tuple[str, str], torch.Tensor] | None = None

    @cached_property
    def _context(self) -> dict[str, Any]:
        path = self.folder / CONTEXT
        if not path.is_file():
            raise ConfigError(f"{path}: no such file, so nothing says how far this run had come. {REMEDY}")
        return open_pickled(path)

    @property
    def step(self) -> int:
        """Updates that were made."""
        return self._number("step_count") if "step_count" in self._context else self._number("batch_count") + 1

    @property
    def consumed_tokens(self) -> int:
        """Tokens that were trained on."""
        return self._number("num_consumed_tokens")

    def _number(self, key: str) -> int:
        value = self._context.get(key)
        if not isinstance(value, int) or value < 0:
            raise CheckpointError(f"{self.folder / CONTEXT}: {key} is {value!r}; a count is expected. {REMEDY}")
        return value

    def scalars(self) -> dict[str, Any]:
        """What an engine keeps besides tensors."""
        merged = self._merges["updates"]
        counts = {spec: int(merged.parameter(spec).flatten()[0]) for spec in self._names}
        scale: dict[str, Any] = self._shards[0][0]["grad_scaler"]
        scaler = {"scale": float(scale["_scale"]), "good": int(scale["_growth_step"]), "overflows": int(scale["_hysteresis_step"])}
        return {"steps": counts, "skipped": self._context.get("inf_nan_skip_batches", 0), "scaler": scaler, "hook": None}

    def read(self, name: str, role: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """A part of one of our parameters in a role, as engines ask for it."""
        role = MASTER if role == "param" else role
        if role not in (MASTER, *SLOTS):
            raise ConfigError(
                f"init.content has optimizer, which here has {role}; {self.folder} holds AdamW's {', '.join(SLOTS)}. {REMEDY}"
            )
        if name not in self._names:
            raise ConfigError(f"init.content has optimizer, but {self.folder} holds nothing of {name}. {REMEDY}")
        if self._last is None or self._last[0] != (name, role):
            self._last = ((name, role), self._merges[role].parameter(name))
        return self._last[1][tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]

    @cached_property
    def _names(self) -> set[str]:
        from headway.model.layout import param_specs

        return {spec.name for spec in param_specs(self.config)}

    @cached_property
    def _shards(self) -> dict[int, dict[int, dict[str, Any]]]:
        """Optimizer files by running number of the model shard and by zero rank."""
        found: dict[int, dict[int, dict[str, Any]]] = {}
        paths = {tuple(map(int, match.groups())): path for path in self.folder.iterdir() if (match := SHARD.fullmatch(path.name))}
        if not paths:
            raise ConfigError(f"{self.folder}: holds no optimizer_tp*_pp*_zo*.pt, so no optimizer state. {REMEDY}")
        for number, (stage, rank) in enumerate((p, t) for p, shards in enumerate(self._stages) for t in range(len(shards))):
            mine = {zero: path for (t, p, zero), path in paths.items() if (t, p) == (rank, stage)}
            missing = [zero for zero in range(max(mine, default=0) + 1) if zero not in mine]
            if missing:
                raise CheckpointError(f"{self.folder / f'optimizer_tp{rank}_pp{stage}_zo{missing[0]}.pt'}: no such file. {REMEDY}")
            found[number] = {zero: open_pickled(path, {MODE_CLASS: str}) for zero, path in sorted(mine.items())}
        return found

    @cached_property
    def _stages(self) -> list[Shards]:
        return internlm_stages(self.folder)

    @cached_property
    def _merges(self) -> dict[str, Merge]:
        """For each role the shards' state dicts with that role's values in place of the weights."""
        by_role: dict[str, list[Shards]] = {role: [[] for _ in self._stages] for role in (MASTER, *SLOTS, "updates")}
        number = 0
        for stage, shards in enumerate(self._stages):
            for weights in shards:
                pieces = self._pieces(weights, self._shards[number])
                for role, stages in by_role.items():
                    stages[stage].append({key: values[role] for key, values in pieces.items()})
                number += 1
        return {role: Merge(self.config, stages, layers_of(stages)) for role, stages in by_role.items()}

    def _pieces(self, weights: dict[str, torch.Tensor], files: dict[int, dict[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
        """Parameter of one model shard -> its values by role, cut out of the flat buffers as the plan says."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        try:
            for group, settings in enumerate(files[0]["base_optim_states"]["param_groups"]):
                ordered = self._ordered(weights, files[0], settings)
                plan = files[0]["zero_devide_optim_plan"][group]
                if len(plan) != len(files) or sorted(int(one.split("_")[0]) for part in plan for one in part) != list(range(len(ordered))):
                    raise CheckpointError(f"{self.folder}: the optimizer's plan does not fit the weights. {REMEDY}")
                for zero, part in enumerate(plan):
                    if part:
                        keys = [ordered[int(one.split("_")[0])] for one in part]
                        found |= self._cut(keys, weights, files[zero], group)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as problem:
            raise CheckpointError(f"{self.folder}: the optimizer's shards lack {type(problem).__name__} {problem}. {REMEDY}") from None
        return found

    @staticmethod
    def _ordered(weights: dict[str, torch.Tensor], file: dict[str, Any], settings: dict[str, Any]) -> list[str]:
        """The parameters of one group, largest first. Newer versions keep those that train in fp32 in a group called fp32."""
        import torch

        keys = [key for key in weights if not key.endswith("inv_freq")]
        if len(file["base_optim_states"]["param_groups"]) > 1:
            keys = [key for key in keys if (weights[key].dtype == torch.float32) == (settings.get("name") == "fp32")]
        return sorted(keys, key=lambda key: -weights[key].numel())

    def _cut(self, keys: list[str], weights: dict[str, torch.Tensor], file: dict[str, Any], group: int) -> dict[str, Any]:
        """One zero rank's flat buffers as parameters; the masters must round to the weights, or the plan was misread."""
        import torch

        base = file["base_optim_states"]
        settings = base["param_groups"][group]
        state = base["state"].get(settings["params"][0], {})
        updates = state["step"] if "step" in state else settings.get("step", 0)
        flat = {MASTER: file["flat_fp32_weights"][group], **{slot: state[slot] for slot in SLOTS}}
        if any(one.numel() != sum(weights[key].numel() for key in keys) for one in flat.values()):
            raise CheckpointError(f"{self.folder}: the optimizer's buffers do not have the weights' sizes. {REMEDY}")
        found: dict[str, Any] = {}
        at = 0
        for key in keys:
            weight = weights[key]
            values = {role: one.detach().view(-1)[at : at + weight.numel()].view(weight.shape) for role, one in flat.items()}
            if not torch.equal(values[MASTER].to(weight.dtype), weight):
                raise CheckpointError(
                    f"{self.folder}: the optimizer's copy of {key} is not the weight. They are of two runs or steps. {REMEDY}"
                )
            found[key] = {**values, "updates": torch.tensor(float(updates)).expand(weight.shape)}
            at += weight.numel()
        return found
