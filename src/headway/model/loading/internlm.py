"""Checkpoints of InternLM under our names: weights, and the optimizer state and progress with which a run continues.

    model_tp{t}_pp{p}.pt, model_config.pt    weights, sharded over tensor and pipeline ranks
    optimizer_tp{t}_pp{p}_zo{z}.pt           flat buffers of whole parameters, and the plan that says which parameters they hold
    context.pt                               updates done, tokens consumed, batches skipped

A plan entry is `<i>_<dims>`: the i-th of the shard's parameters by falling size, in the order of the model where sizes are equal.
Files are mapped, not copied. Each parameter is merged to its whole shape when it is read, so the run that continues may have any layout.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import CheckpointError, ConfigError, first_line
from headway.model.families import internlm
from headway.model.layout import param_specs
from headway.model.loading.untrusted import open_pickled

if TYPE_CHECKING:
    import torch

    from headway.model.config import ModelConfig

SHARD = re.compile(r"model_tp(\d+)_pp(\d+)\.pt")
BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
MODEL_CONFIG = "model_config.pt"
CONFIG_CLASS = "internlm.core.context.parallel_context.Config"
"""InternLM pickles its settings as this subclass of dict."""
Shards = list[dict[str, Any]]
MISFITS = (LookupError, TypeError, AttributeError, RuntimeError, ValueError, ArithmeticError)
"""What merging shards with unexpected content may raise."""
CONTEXT = "context.pt"
SLOTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
OPTIMIZER_SHARD = re.compile(r"optimizer_tp(\d+)_pp(\d+)_zo(\d+)\.pt")
MODE_CLASS = "internlm.core.context.process_group_initializer.ParallelMode"
"""An enumeration of strings that newer versions store in parameter groups."""
REMEDY = "Load only the weights: init.content=[model]."


def is_internlm(folder: Path) -> bool:
    """Whether a folder holds InternLM shards."""
    return any(SHARD.fullmatch(path.name) for path in folder.glob("model_tp*_pp*.pt"))


def open_internlm(
    folder: Path,
) -> tuple[ModelConfig, Callable[[], Iterator[tuple[str, torch.Tensor]]]]:
    """The config of the model in an InternLM folder, and its parameters under our names."""
    try:
        return _open_internlm(folder)
    except MISFITS as problem:
        raise _misfit(folder, problem) from None


def _misfit(folder: Path, problem: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{folder}: its shards do not form an InternLM model: {first_line(problem)}. Download them again."
    )


def _open_internlm(
    folder: Path,
) -> tuple[ModelConfig, Callable[[], Iterator[tuple[str, torch.Tensor]]]]:
    stages = internlm_stages(folder)
    first, last = stages[0], stages[-1]
    layers = layers_of(stages)
    if not layers or "embedding.weight" not in first[0] or "head.weight" not in last[0]:
        raise CheckpointError(
            f"{folder}: has no embedding, blocks and head of InternLM (it has {', '.join(list(first[0])[:4])}, ...)."
        )
    given = (
        open_pickled(folder / MODEL_CONFIG, {CONFIG_CLASS: OrderedDict})
        if (folder / MODEL_CONFIG).is_file()
        else {}
    )
    if "num_attention_heads" not in given:
        raise CheckpointError(
            f"{folder}: {MODEL_CONFIG} has no num_attention_heads, which cannot be derived from the weights. Add it."
        )
    hidden = first[0]["blocks.0.norm1.weight"].shape[0]
    gate = sum(shard["blocks.0.mlp.w1.weight"].shape[0] for shard in first)
    config = internlm.read({
        "model_type": internlm.MODEL_TYPE,
        "vocab_size": sum(shard["head.weight"].shape[0] for shard in last),
        "hidden_size": hidden,
        "intermediate_size": gate,
        "num_hidden_layers": len(layers),
        "num_attention_heads": given["num_attention_heads"],
        "rms_norm_eps": given.get("layer_norm_epsilon", 1e-5),
        "max_position_embeddings": given.get("max_position_embeddings", given.get("seq_len", 2048)),
        "bias": "blocks.0.mixer.Wqkv.bias" in first[0],
        "tie_word_embeddings": False,
    })  # fmt: skip
    _require_known(folder, stages)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        merged = MergedShards(config, stages, layers)
        for spec in param_specs(config):
            try:
                value = merged.parameter(spec.name)
            except MISFITS as problem:
                raise _misfit(folder, problem) from None
            if tuple(value.shape) != spec.shape:
                raise CheckpointError(
                    f"{folder}: {spec.name} has shape {list(value.shape)} after merging; the model has {list(spec.shape)}."
                )
            yield spec.name, value

    return config, weights


def _blocks(state: dict[str, Any]) -> list[int]:
    """The numbers of the blocks in a stage; each stage counts from 0."""
    return sorted({int(match.group(1)) for match in map(BLOCK.match, state) if match})


def layers_of(stages: list[Shards]) -> list[tuple[Shards, int]]:
    """For every block, in the order of the model: its stage and its number there."""
    return [(stage, index) for stage in stages for index in _blocks(stage[0])]


def internlm_stages(folder: Path) -> list[Shards]:
    """The state dicts by pipeline stage and tensor rank; a missing one is an error."""
    import torch

    found = {
        (int(m.group(2)), int(m.group(1))): path
        for path in folder.iterdir()
        if (m := SHARD.fullmatch(path.name))
    }
    stages, ranks = max(stage for stage, _ in found) + 1, max(rank for _, rank in found) + 1
    for stage in range(stages):
        for rank in range(ranks):
            if (stage, rank) not in found:
                raise CheckpointError(
                    f"{folder / f'model_tp{rank}_pp{stage}.pt'}: no such file, but other shards exist. Download it too."
                )
    opened = [
        [_plain(open_pickled(found[stage, rank])) for rank in range(ranks)]
        for stage in range(stages)
    ]
    for shards in opened:
        for shard in shards:
            strange = [
                key
                for key, value in shard.items()
                if not isinstance(value, torch.Tensor) or value.layout is not torch.strided
            ]
            if strange:
                raise CheckpointError(
                    f"{folder}: {strange[0]} in its shards is not a plain tensor. Download them again."
                )
    return opened


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict without wrapper prefixes; a vocabulary-parallel embedding is one level deeper than a plain one."""
    names = {
        key: str(key).removeprefix("model.").replace("embedding.word_embeddings.", "embedding.")
        for key in state
    }
    return {names[key]: value for key, value in state.items()}


KNOWN = {
    "norm1.weight", "norm2.weight", "mixer.Wqkv.weight", "mixer.Wqkv.bias", "mixer.out_proj.weight", "mixer.out_proj.bias",
    "mlp.w1.weight", "mlp.w2.weight", "mlp.w3.weight", "mixer.rotary_emb.inv_freq",
}  # fmt: skip


def _require_known(folder: Path, stages: list[Shards]) -> None:
    """Refuse tensors that the model does not have."""
    keys = {key for stage in stages for shard in stage for key in shard}
    others = ("embedding.weight", "norm.weight", "head.weight")
    strange = sorted(
        key
        for key in keys
        if key not in others and not ((match := BLOCK.match(key)) and match.group(2) in KNOWN)
    )
    if strange:
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise CheckpointError(
            f"{folder}: {', '.join(strange[:3])}{more} cannot be mapped: InternLM 1 in headway has no such parameter."
        )


class MergedShards:
    """Whole parameters from shards. Rows of Wqkv are (3, heads, head_dim) in each shard."""

    def __init__(
        self, config: ModelConfig, stages: list[Shards], layers: list[tuple[Shards, int]]
    ) -> None:
        self.config, self.stages, self.layers = config, stages, layers

    def parameter(self, name: str) -> torch.Tensor:
        """One of our parameters."""
        if name == "model.embed_tokens.weight":
            shards = [shard["embedding.weight"] for shard in self.stages[0]]
            return self._cat(shards, 1 if shards[0].shape[0] == self.config.vocab else 0)
        if name in ("model.norm.weight", "lm_head.weight"):
            shards = [
                shard["norm.weight" if "norm" in name else "head.weight"]
                for shard in self.stages[-1]
            ]
            return shards[0] if "norm" in name else self._cat(shards, 0)
        _, _, number, part = name.split(".", 3)
        shards, local = self.layers[int(number)]

        def get(key: str) -> list[torch.Tensor]:
            full = f"blocks.{local}.{key}"
            return [shard[full] for shard in shards if full in shard]

        module, _, leaf = part.rpartition(".")
        if module.endswith("layernorm"):
            return get(f"norm{1 if module.startswith('input') else 2}.{leaf}")[0]
        if module == "self_attn.o_proj":
            # a row-parallel bias is added once, so only one shard has it
            return (
                get(f"mixer.out_proj.{leaf}")[0]
                if leaf == "bias"
                else self._cat(get("mixer.out_proj.weight"), 1)
            )
        if module.startswith("self_attn."):
            which = "qkv".index(module.removeprefix("self_attn.")[0])
            return self._cat(
                [shard.view(3, -1, *shard.shape[1:])[which] for shard in get(f"mixer.Wqkv.{leaf}")],
                0,
            )
        # up to 0.2, w2 is up and w3 is down; since InternEvo 0.3 it is the other way round
        swapped = get("mlp.w2.weight")[0].shape[1] != self.config.hidden_size
        key = {"gate": "w1", "up": "w3" if swapped else "w2", "down": "w2" if swapped else "w3"}[
            module.removeprefix("mlp.").split("_")[0]
        ]
        return self._cat(get(f"mlp.{key}.weight"), 1 if "down" in module else 0)

    @staticmethod
    def _cat(shards: list[torch.Tensor], dim: int) -> torch.Tensor:
        import torch

        return shards[0] if len(shards) == 1 else torch.cat(shards, dim)


class InternlmState:
    """Optimizer state and progress of one InternLM folder."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.folder, self.config = folder, config
        self._last: tuple[tuple[str, str], torch.Tensor] | None = None

    @cached_property
    def _context(self) -> dict[str, Any]:
        path = self.folder / CONTEXT
        if not path.is_file():
            raise ConfigError(f"{path}: no such file, so the step of this run is unknown. {REMEDY}")
        return open_pickled(path)

    @property
    def step(self) -> int:
        """Optimizer updates done."""
        return (
            self._number("step_count")
            if "step_count" in self._context
            else self._number("batch_count") + 1
        )

    @property
    def consumed_tokens(self) -> int:
        """Tokens trained on."""
        return self._number("num_consumed_tokens")

    def _number(self, key: str) -> int:
        value = self._context.get(key)
        if not isinstance(value, int) or value < 0:
            raise CheckpointError(
                f"{self.folder / CONTEXT}: {key} is {value!r}; a count is expected. {REMEDY}"
            )
        return value

    def scalars(self) -> dict[str, Any]:
        """What an engine stores besides tensors."""
        merged = self._merges["updates"]
        counts = {spec: int(merged.parameter(spec).flatten()[0]) for spec in self._names}
        scale: dict[str, Any] = self._shards[0][0]["grad_scaler"]
        scaler = {
            "scale": float(scale["_scale"]),
            "good": int(scale["_growth_step"]),
            "overflows": int(scale["_hysteresis_step"]),
        }
        return {
            "steps": counts,
            "skipped": self._context.get("inf_nan_skip_batches", 0),
            "scaler": scaler,
            "hook": None,
        }

    def read(
        self, name: str, role: str, offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> torch.Tensor:
        """A slice of one of our parameters in one role; an engine's ReadTensor."""
        role = MASTER if role == "param" else role
        if role not in (MASTER, *SLOTS):
            raise ConfigError(
                f"init.content has optimizer, and this optimizer needs {role}; {self.folder} has {', '.join(SLOTS)} of AdamW. {REMEDY}"
            )
        if name not in self._names:
            raise ConfigError(
                f"init.content has optimizer, but {self.folder} has no state of {name}. {REMEDY}"
            )
        if self._last is None or self._last[0] != (name, role):
            self._last = ((name, role), self._merges[role].parameter(name))
        return self._last[1][
            tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        ]

    @cached_property
    def _names(self) -> set[str]:
        return {spec.name for spec in param_specs(self.config)}

    @cached_property
    def _shards(self) -> dict[int, dict[int, dict[str, Any]]]:
        """Optimizer files by number of the model shard and by ZeRO rank."""
        found: dict[int, dict[int, dict[str, Any]]] = {}
        paths = {
            tuple(map(int, match.groups())): path
            for path in self.folder.iterdir()
            if (match := OPTIMIZER_SHARD.fullmatch(path.name))
        }
        if not paths:
            raise ConfigError(
                f"{self.folder}: holds no optimizer_tp*_pp*_zo*.pt, so no optimizer state. {REMEDY}"
            )
        for number, (stage, rank) in enumerate(
            (p, t) for p, shards in enumerate(self._stages) for t in range(len(shards))
        ):
            files = {zero: path for (t, p, zero), path in paths.items() if (t, p) == (rank, stage)}
            missing = [zero for zero in range(max(files, default=0) + 1) if zero not in files]
            if missing:
                raise CheckpointError(
                    f"{self.folder / f'optimizer_tp{rank}_pp{stage}_zo{missing[0]}.pt'}: no such file. {REMEDY}"
                )
            found[number] = {
                zero: open_pickled(path, {MODE_CLASS: str}) for zero, path in sorted(files.items())
            }
        return found

    @cached_property
    def _stages(self) -> list[Shards]:
        return internlm_stages(self.folder)

    @cached_property
    def _merges(self) -> dict[str, MergedShards]:
        """For each role, the shards with that role's values instead of the weights."""
        by_role: dict[str, list[Shards]] = {
            role: [[] for _ in self._stages] for role in (MASTER, *SLOTS, "updates")
        }
        number = 0
        for stage, shards in enumerate(self._stages):
            for weights in shards:
                pieces = self._pieces(weights, self._shards[number])
                for role, stages in by_role.items():
                    stages[stage].append({key: values[role] for key, values in pieces.items()})
                number += 1
        return {
            role: MergedShards(self.config, stages, layers_of(stages))
            for role, stages in by_role.items()
        }

    def _pieces(
        self, weights: dict[str, torch.Tensor], files: dict[int, dict[str, Any]]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Parameter of one model shard -> its values by role, sliced from the flat buffers by the plan."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        try:
            for group, settings in enumerate(files[0]["base_optim_states"]["param_groups"]):
                ordered = self._ordered(weights, files[0], settings)
                plan = files[0]["zero_devide_optim_plan"][group]
                if len(plan) != len(files) or sorted(
                    int(one.split("_")[0]) for part in plan for one in part
                ) != list(range(len(ordered))):
                    raise CheckpointError(
                        f"{self.folder}: the optimizer's plan does not fit the weights. {REMEDY}"
                    )
                for zero, part in enumerate(plan):
                    if part:
                        keys = [ordered[int(one.split("_")[0])] for one in part]
                        found |= self._slices(keys, weights, files[zero], group)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as problem:
            raise CheckpointError(
                f"{self.folder}: the optimizer shards are damaged: {type(problem).__name__} {problem}. {REMEDY}"
            ) from None
        return found

    @staticmethod
    def _ordered(
        weights: dict[str, torch.Tensor], file: dict[str, Any], settings: dict[str, Any]
    ) -> list[str]:
        """The parameters of one group, largest first. Newer versions have a group named fp32 for those that train in fp32."""
        import torch

        keys = [key for key in weights if not key.endswith("inv_freq")]
        if len(file["base_optim_states"]["param_groups"]) > 1:
            keys = [
                key
                for key in keys
                if (weights[key].dtype == torch.float32) == (settings.get("name") == "fp32")
            ]
        return sorted(keys, key=lambda key: -weights[key].numel())

    def _slices(
        self, keys: list[str], weights: dict[str, torch.Tensor], file: dict[str, Any], group: int
    ) -> dict[str, Any]:
        """The flat buffers of one ZeRO rank as parameters. Masters must round to the weights, else the plan was misread."""
        import torch

        base = file["base_optim_states"]
        settings = base["param_groups"][group]
        state = base["state"].get(settings["params"][0], {})
        updates = state["step"] if "step" in state else settings.get("step", 0)
        flat = {MASTER: file["flat_fp32_weights"][group], **{slot: state[slot] for slot in SLOTS}}
        if any(one.numel() != sum(weights[key].numel() for key in keys) for one in flat.values()):
            raise CheckpointError(
                f"{self.folder}: the optimizer's buffers do not have the weights' sizes. {REMEDY}"
            )
        found: dict[str, Any] = {}
        at = 0
        for key in keys:
            weight = weights[key]
            values = {
                role: one.detach().view(-1)[at : at + weight.numel()].view(weight.shape)
                for role, one in flat.items()
            }
            if not torch.equal(values[MASTER].to(weight.dtype), weight):
                raise CheckpointError(
                    f"{self.folder}: the optimizer's copy of {key} differs from the weight; they are from different runs or steps. {REMEDY}"
                )
            found[key] = {**values, "updates": torch.tensor(float(updates)).expand(weight.shape)}
            at += weight.numel()
        return found
