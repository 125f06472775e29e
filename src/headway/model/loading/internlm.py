"""Checkpoints of InternLM under our names: weights, and the optimizer state and progress with which
a run continues.

    model_tp{t}_pp{p}.pt, model_config.pt    weights, sharded over tensor and pipeline ranks
    optimizer_tp{t}_pp{p}_zo{z}.pt           flat buffers of whole parameters, and the plan that says
                                             which parameters they hold
    context.pt                               updates done, tokens consumed, batches skipped

A plan entry is `<i>_<dims>`: the i-th of the shard's parameters by falling size, in the order of
the model where sizes are equal. Files are mapped, not copied. Each parameter is merged to its whole
shape when it is read, so the run that continues may have any layout.
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
"""The state dicts of one pipeline stage, by tensor rank."""
MISFITS = (LookupError, TypeError, AttributeError, RuntimeError, ValueError, ArithmeticError)
"""What merging shards with unexpected content may raise."""
CONTEXT = "context.pt"
SLOTS = ("exp_avg", "exp_avg_sq")
"""Roles of AdamW's state."""
MASTER = "master"
"""Role of the fp32 copy of the weights."""
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
    # The embedding is in the first stage, norm and head are in the last.
    stages = internlm_stages(folder)
    first = stages[0]
    last = stages[-1]
    layers = layers_of(stages)
    if not layers or "embedding.weight" not in first[0] or "head.weight" not in last[0]:
        raise CheckpointError(
            f"{folder}: has no embedding, blocks and head of InternLM (it has {', '.join(list(first[0])[:4])}, ...)."
        )

    # Shapes come from the weights; model_config.pt has what they do not show.
    settings = {}
    if (folder / MODEL_CONFIG).is_file():
        settings = open_pickled(folder / MODEL_CONFIG, {CONFIG_CLASS: OrderedDict})
    if "num_attention_heads" not in settings:
        raise CheckpointError(
            f"{folder}: {MODEL_CONFIG} has no num_attention_heads, which cannot be derived from the weights. Add it."
        )
    row_length = settings.get("seq_len", 2048)
    hf_config = {
        "model_type": internlm.MODEL_TYPE,
        "vocab_size": sum(shard["head.weight"].shape[0] for shard in last),
        "hidden_size": first[0]["blocks.0.norm1.weight"].shape[0],
        "intermediate_size": sum(shard["blocks.0.mlp.w1.weight"].shape[0] for shard in first),
        "num_hidden_layers": len(layers),
        "num_attention_heads": settings["num_attention_heads"],
        "rms_norm_eps": settings.get("layer_norm_epsilon", 1e-5),
        "max_position_embeddings": settings.get("max_position_embeddings", row_length),
        "bias": "blocks.0.mixer.Wqkv.bias" in first[0],
        "tie_word_embeddings": False,
    }
    config = internlm.read(hf_config)
    _require_known(folder, stages)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        # Shards are mapped files: a parameter is in memory only while it is merged.
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

    paths: dict[tuple[int, int], Path] = {}
    for path in folder.iterdir():
        match = SHARD.fullmatch(path.name)
        if match is not None:
            rank, stage = map(int, match.groups())
            paths[stage, rank] = path

    num_stages = max(stage for stage, _ in paths) + 1
    num_ranks = max(rank for _, rank in paths) + 1
    for stage in range(num_stages):
        for rank in range(num_ranks):
            if (stage, rank) not in paths:
                raise CheckpointError(
                    f"{folder / f'model_tp{rank}_pp{stage}.pt'}: no such file, but other shards exist. Download it too."
                )

    stages = [
        [_plain(open_pickled(paths[stage, rank])) for rank in range(num_ranks)]
        for stage in range(num_stages)
    ]
    for shards in stages:
        for shard in shards:
            for key, value in shard.items():
                if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                    raise CheckpointError(
                        f"{folder}: {key} in its shards is not a plain tensor. Download them again."
                    )
    return stages


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict without wrapper prefixes; a vocabulary-parallel embedding is one level deeper
    than a plain one."""
    plain: dict[str, Any] = {}
    for key, value in state.items():
        name = str(key).removeprefix("model.")
        plain[name.replace("embedding.word_embeddings.", "embedding.")] = value
    return plain


KNOWN = {
    "norm1.weight",
    "norm2.weight",
    "mixer.Wqkv.weight",
    "mixer.Wqkv.bias",
    "mixer.out_proj.weight",
    "mixer.out_proj.bias",
    "mlp.w1.weight",
    "mlp.w2.weight",
    "mlp.w3.weight",
    "mixer.rotary_emb.inv_freq",
}
"""Tensors of a block."""
OUTSIDE_BLOCKS = ("embedding.weight", "norm.weight", "head.weight")


def _require_known(folder: Path, stages: list[Shards]) -> None:
    """Refuse tensors that the model does not have."""
    unknown: set[str] = set()
    for stage in stages:
        for shard in stage:
            for key in shard:
                match = BLOCK.match(key)
                is_known = match is not None and match.group(2) in KNOWN
                if not is_known and key not in OUTSIDE_BLOCKS:
                    unknown.add(key)
    if unknown:
        names = sorted(unknown)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise CheckpointError(
            f"{folder}: {', '.join(names[:3])}{more} cannot be mapped: InternLM 1 in headway has no such parameter."
        )


class MergedShards:
    """Whole parameters from shards. Rows of Wqkv are (3, heads, head_dim) in each shard."""

    def __init__(
        self, config: ModelConfig, stages: list[Shards], layers: list[tuple[Shards, int]]
    ) -> None:
        self.config = config
        self.stages = stages
        self.layers = layers

    def parameter(self, name: str) -> torch.Tensor:
        """One of our parameters, whole."""
        if name == "model.embed_tokens.weight":
            shards = [shard["embedding.weight"] for shard in self.stages[0]]
            # Split over the vocabulary, or over the width where every shard has all tokens.
            has_all_tokens = shards[0].shape[0] == self.config.vocab
            return self._cat(shards, 1 if has_all_tokens else 0)
        if name == "model.norm.weight":
            return self.stages[-1][0]["norm.weight"]
        if name == "lm_head.weight":
            return self._cat([shard["head.weight"] for shard in self.stages[-1]], 0)

        _, _, layer, part = name.split(".", 3)
        stage, index = self.layers[int(layer)]

        def get(key: str) -> list[torch.Tensor]:
            full_key = f"blocks.{index}.{key}"
            return [shard[full_key] for shard in stage if full_key in shard]

        module, _, leaf = part.rpartition(".")
        if module == "input_layernorm":
            return get(f"norm1.{leaf}")[0]
        if module.endswith("layernorm"):
            return get(f"norm2.{leaf}")[0]
        if module == "self_attn.o_proj":
            # A row-parallel bias is added once, so only one shard has it.
            if leaf == "bias":
                return get(f"mixer.out_proj.{leaf}")[0]
            return self._cat(get("mixer.out_proj.weight"), 1)
        if module.startswith("self_attn."):
            which = "qkv".index(module.removeprefix("self_attn.")[0])
            joined = get(f"mixer.Wqkv.{leaf}")
            return self._cat([shard.view(3, -1, *shard.shape[1:])[which] for shard in joined], 0)

        # Up to 0.2, w2 is up and w3 is down; since InternEvo 0.3 it is the other way round.
        is_swapped = get("mlp.w2.weight")[0].shape[1] != self.config.hidden_size
        keys = {"mlp.gate_proj": "w1", "mlp.up_proj": "w2", "mlp.down_proj": "w3"}
        if is_swapped:
            keys |= {"mlp.up_proj": "w3", "mlp.down_proj": "w2"}
        dim = 1 if module == "mlp.down_proj" else 0
        return self._cat(get(f"mlp.{keys[module]}.weight"), dim)

    @staticmethod
    def _cat(shards: list[torch.Tensor], dim: int) -> torch.Tensor:
        import torch

        if len(shards) == 1:
            return shards[0]
        return torch.cat(shards, dim)


class InternlmState:
    """Optimizer state and progress of one InternLM folder."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.folder = folder
        self.config = config
        self._last: tuple[tuple[str, str], torch.Tensor] | None = None
        """(name, role) and value of the parameter that was read last: an engine reads it slice
        by slice."""

    @cached_property
    def _context(self) -> dict[str, Any]:
        path = self.folder / CONTEXT
        if not path.is_file():
            raise ConfigError(f"{path}: no such file, so the step of this run is unknown. {REMEDY}")
        return open_pickled(path)

    @property
    def step(self) -> int:
        """Optimizer updates done."""
        if "step_count" in self._context:
            return self._number("step_count")
        # Older versions store the number of the last batch, from 0.
        return self._number("batch_count") + 1

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
        updates = {name: int(merged.parameter(name).flatten()[0]) for name in self._names}
        grad_scaler: dict[str, Any] = self._shards[0][0]["grad_scaler"]
        scaler = {
            "scale": float(grad_scaler["_scale"]),
            "good": int(grad_scaler["_growth_step"]),
            "overflows": int(grad_scaler["_hysteresis_step"]),
        }
        return {
            "steps": updates,
            "skipped": self._context.get("inf_nan_skip_batches", 0),
            "scaler": scaler,
            "hook": None,
        }

    def read(
        self, name: str, role: str, offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> torch.Tensor:
        """A slice of one of our parameters in one role; an engine's ReadTensor."""
        if role == "param":
            role = MASTER
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
        value = self._last[1]
        box = [slice(start, start + size) for start, size in zip(offset, shape, strict=True)]
        return value[tuple(box)]

    @cached_property
    def _names(self) -> set[str]:
        return {spec.name for spec in param_specs(self.config)}

    @cached_property
    def _shards(self) -> dict[int, dict[int, dict[str, Any]]]:
        """Optimizer files by number of the model shard and by ZeRO rank."""
        paths: dict[tuple[int, int], dict[int, Path]] = {}
        for path in self.folder.iterdir():
            match = OPTIMIZER_SHARD.fullmatch(path.name)
            if match is not None:
                rank, stage, zero = map(int, match.groups())
                paths.setdefault((stage, rank), {})[zero] = path
        if not paths:
            raise ConfigError(
                f"{self.folder}: holds no optimizer_tp*_pp*_zo*.pt, so no optimizer state. {REMEDY}"
            )

        shards: dict[int, dict[int, dict[str, Any]]] = {}
        for stage, model_shards in enumerate(self._stages):
            for rank in range(len(model_shards)):
                files = paths.get((stage, rank), {})
                missing = [zero for zero in range(max(files, default=0) + 1) if zero not in files]
                if missing:
                    raise CheckpointError(
                        f"{self.folder / f'optimizer_tp{rank}_pp{stage}_zo{missing[0]}.pt'}: no such file. {REMEDY}"
                    )
                shards[len(shards)] = {
                    zero: open_pickled(path, {MODE_CLASS: str})
                    for zero, path in sorted(files.items())
                }
        return shards

    @cached_property
    def _stages(self) -> list[Shards]:
        return internlm_stages(self.folder)

    @cached_property
    def _merges(self) -> dict[str, MergedShards]:
        """For each role, the shards with that role's values instead of the weights."""
        # The state of a parameter is sharded as its weight, so the same merge serves all roles.
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
        """Parameter of one model shard -> its values by role, sliced from the flat buffers by
        the plan."""
        pieces: dict[str, dict[str, torch.Tensor]] = {}
        try:
            for group, settings in enumerate(files[0]["base_optim_states"]["param_groups"]):
                ordered = self._ordered(weights, files[0], settings)
                # `<i>_<dims>` of every parameter, by ZeRO rank. The key is InternLM's spelling.
                plan = files[0]["zero_devide_optim_plan"][group]
                plan = [[int(entry.split("_")[0]) for entry in entries] for entries in plan]
                indices = sorted(index for part in plan for index in part)
                if len(plan) != len(files) or indices != list(range(len(ordered))):
                    raise CheckpointError(
                        f"{self.folder}: the optimizer's plan does not fit the weights. {REMEDY}"
                    )
                for zero, part in enumerate(plan):
                    if part:
                        keys = [ordered[index] for index in part]
                        pieces |= self._slices(keys, weights, files[zero], group)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as problem:
            raise CheckpointError(
                f"{self.folder}: the optimizer shards are damaged: {type(problem).__name__} {problem}. {REMEDY}"
            ) from None
        return pieces

    @staticmethod
    def _ordered(
        weights: dict[str, torch.Tensor], file: dict[str, Any], settings: dict[str, Any]
    ) -> list[str]:
        """The parameters of one group, largest first.

        Newer versions have a group named fp32 for those that train in fp32.
        """
        import torch

        # Frequencies are buffers, without optimizer state.
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
        """The flat buffers of one ZeRO rank as parameters.

        Masters must round to the weights, else the plan was misread.
        """
        import torch

        base = file["base_optim_states"]
        settings = base["param_groups"][group]
        state = base["state"].get(settings["params"][0], {})
        # Some optimizers count updates for each parameter, others for the group.
        updates = state["step"] if "step" in state else settings.get("step", 0)

        buffers = {MASTER: file["flat_fp32_weights"][group]}
        buffers |= {slot: state[slot] for slot in SLOTS}
        size = sum(weights[key].numel() for key in keys)
        if any(buffer.numel() != size for buffer in buffers.values()):
            raise CheckpointError(
                f"{self.folder}: the optimizer's buffers do not have the weights' sizes. {REMEDY}"
            )

        slices: dict[str, Any] = {}
        begin = 0
        for key in keys:
            weight = weights[key]
            end = begin + weight.numel()
            values = {
                role: buffer.detach().view(-1)[begin:end].view(weight.shape)
                for role, buffer in buffers.items()
            }
            if not torch.equal(values[MASTER].to(weight.dtype), weight):
                raise CheckpointError(
                    f"{self.folder}: the optimizer's copy of {key} differs from the weight; they are from different runs or steps. {REMEDY}"
                )
            # As a tensor of the weight's shape, so that it is merged like the others.
            slices[key] = {**values, "updates": torch.tensor(float(updates)).expand(weight.shape)}
            begin = end
        return slices
