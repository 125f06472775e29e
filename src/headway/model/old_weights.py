"""Weights that other trainers left as pickles: read through torch's restricted loader alone, so that a file that holds code is refused.

    InternLM   model_tp{t}_pp{p}.pt ... + model_config.pt     shards over tensor and pipeline ranks, merged here
    zero2all   best1_model.pt, last1_model.pt, ...            one state dict, config.json beside it or one folder up
    Hugging Face pytorch_model.bin (and its index) goes through model/pretrained.py, which opens the files with `open_pickled`.

Merging happens parameter by parameter when it is asked for; the files are mapped, not copied.
"""

from __future__ import annotations

import re
import struct
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import CheckpointError, first_line
from headway.model.families import internlm
from headway.model.layout import param_specs

if TYPE_CHECKING:
    import torch

    from headway.model.config import ModelConfig

SHARD = re.compile(r"model_tp(\d+)_pp(\d+)\.pt")
BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
MODEL_CONFIG = "model_config.pt"
CONFIG_CLASS = "internlm.core.context.parallel_context.Config"
"""InternLM pickles its settings as this subclass of dict."""
ZERO2ALL = ("best1_model.pt", "last1_model.pt", "best2_model.pt", "last2_model.pt")
Shards = list[dict[str, Any]]
UNREADABLE = (OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError,
              MemoryError, struct.error)  # fmt: skip
"""What torch's loader may raise over damaged files."""
MISFITS = (LookupError, TypeError, AttributeError, RuntimeError, ValueError, ArithmeticError)
"""What putting together shards of unexpected content may raise."""


def open_pickled(path: Path, stand_ins: Mapping[str, type] | None = None) -> dict[str, Any]:
    """What torch.save has written, as far as it is tensors and plain values; anything else is refused, not run.

    `stand_ins` maps the dotted names of foreign classes to the plain types that are made in their place.
    """
    import pickle

    import torch

    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([(kind, name) for name, kind in (stand_ins or {}).items()]):
            warnings.simplefilter("ignore", UserWarning)  # of pickles that torch did not write; they are refused below
            try:
                found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # files of before torch 1.6 cannot be mapped
                found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        raise CheckpointError(f"{path}: refused: {_refusal(str(problem))}.") from None
    except UNREADABLE as problem:
        raise CheckpointError(f"{path}: cannot be read: {first_line(problem)}. Fetch it again.") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, not tensors by name.")
    return found


def _refusal(problem: str) -> str:
    """Why the restricted loader stopped: at a class, which it names, or at bytes that are no pickle of torch."""
    named = re.search(r"GLOBAL (\S+)|reduce for unrecognized function (.+?)(?: which|$)", problem)
    if named:
        return f"it holds more than tensors ({named.group(1) or named.group(2)}), and such a file can run code"
    first = problem.splitlines()[0][:200] if problem else "no pickle of torch"
    return f"it holds more than tensors, and such a file can run code ({first})"


def zero2all_file(folder: Path) -> Path | None:
    """The weights of a zero2all run: the best, else the last, in the folder or its ckpt/."""
    return next((path for name in ZERO2ALL for path in (folder / name, folder / "ckpt" / name) if path.is_file()), None)


def is_internlm(folder: Path) -> bool:
    """Whether a folder holds shards of InternLM."""
    return any(SHARD.fullmatch(path.name) for path in folder.glob("model_tp*_pp*.pt"))


def open_internlm(folder: Path) -> tuple[ModelConfig, Callable[[], Iterator[tuple[str, torch.Tensor]]]]:
    """The shape of the model in an InternLM folder, and its parameters under our names."""
    try:
        return _open_internlm(folder)
    except MISFITS as problem:
        raise _misfit(folder, problem) from None


def _misfit(folder: Path, problem: BaseException) -> CheckpointError:
    return CheckpointError(f"{folder}: its shards do not make a model of InternLM: {first_line(problem)}. Fetch them again.")


def _open_internlm(folder: Path) -> tuple[ModelConfig, Callable[[], Iterator[tuple[str, torch.Tensor]]]]:
    stages = internlm_stages(folder)
    first, last = stages[0], stages[-1]
    layers = layers_of(stages)
    if not layers or "embedding.weight" not in first[0] or "head.weight" not in last[0]:
        raise CheckpointError(f"{folder}: holds no embedding, blocks and head of InternLM (it has {', '.join(list(first[0])[:4])}, ...).")
    given = open_pickled(folder / MODEL_CONFIG, {CONFIG_CLASS: OrderedDict}) if (folder / MODEL_CONFIG).is_file() else {}
    if "num_attention_heads" not in given:
        raise CheckpointError(f"{folder}: {MODEL_CONFIG} does not say num_attention_heads, which the weights do not show. Put it there.")
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
        merged = Merge(config, stages, layers)
        for spec in param_specs(config):
            try:
                value = merged.parameter(spec.name)
            except MISFITS as problem:
                raise _misfit(folder, problem) from None
            if tuple(value.shape) != spec.shape:
                raise CheckpointError(f"{folder}: {spec.name} comes to {list(value.shape)}; the model has {list(spec.shape)}.")
            yield spec.name, value

    return config, weights


def _blocks(state: dict[str, Any]) -> list[int]:
    """The numbers of the blocks in a stage, which begin anew in each."""
    return sorted({int(match.group(1)) for match in map(BLOCK.match, state) if match})


def layers_of(stages: list[Shards]) -> list[tuple[Shards, int]]:
    """The stage and the number within it of every block, in the order of the model."""
    return [(stage, index) for stage in stages for index in _blocks(stage[0])]


def internlm_stages(folder: Path) -> list[Shards]:
    """The state dicts by pipeline stage and tensor rank, all of them there."""
    import torch

    found = {(int(m.group(2)), int(m.group(1))): path for path in folder.iterdir() if (m := SHARD.fullmatch(path.name))}
    stages, ranks = max(stage for stage, _ in found) + 1, max(rank for _, rank in found) + 1
    for stage in range(stages):
        for rank in range(ranks):
            if (stage, rank) not in found:
                raise CheckpointError(f"{folder / f'model_tp{rank}_pp{stage}.pt'}: no such file, but others of its kind are there.")
    opened = [[_plain(open_pickled(found[stage, rank])) for rank in range(ranks)] for stage in range(stages)]
    for shards in opened:
        for shard in shards:
            strange = [key for key, value in shard.items() if not isinstance(value, torch.Tensor) or value.layout is not torch.strided]
            if strange:
                raise CheckpointError(f"{folder}: {strange[0]} in its shards is no plain tensor. Fetch them again.")
    return opened


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict without the wrapper's prefix; a vocabulary-parallel embedding is one level deeper than the other kind."""
    names = {key: str(key).removeprefix("model.").replace("embedding.word_embeddings.", "embedding.") for key in state}
    return {names[key]: value for key, value in state.items()}


KNOWN = {
    "norm1.weight", "norm2.weight", "mixer.Wqkv.weight", "mixer.Wqkv.bias", "mixer.out_proj.weight", "mixer.out_proj.bias",
    "mlp.w1.weight", "mlp.w2.weight", "mlp.w3.weight", "mixer.rotary_emb.inv_freq",
}  # fmt: skip


def _require_known(folder: Path, stages: list[Shards]) -> None:
    """Name what has no place in the model."""
    keys = {key for stage in stages for shard in stage for key in shard}
    others = ("embedding.weight", "norm.weight", "head.weight")
    strange = sorted(key for key in keys if key not in others and not ((match := BLOCK.match(key)) and match.group(2) in KNOWN))
    if strange:
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise CheckpointError(f"{folder}: {', '.join(strange[:3])}{more} cannot be mapped: headway's InternLM 1 has no place for it.")


class Merge:
    """Parameters put together from shards. Rows of Wqkv are (3, heads, head_dim) in each shard."""

    def __init__(self, config: ModelConfig, stages: list[Shards], layers: list[tuple[Shards, int]]) -> None:
        self.config, self.stages, self.layers = config, stages, layers

    def parameter(self, name: str) -> torch.Tensor:
        """One of our parameters."""
        if name == "model.embed_tokens.weight":
            shards = [shard["embedding.weight"] for shard in self.stages[0]]
            return self._cat(shards, 1 if shards[0].shape[0] == self.config.vocab else 0)
        if name in ("model.norm.weight", "lm_head.weight"):
            shards = [shard["norm.weight" if "norm" in name else "head.weight"] for shard in self.stages[-1]]
            return shards[0] if "norm" in name else self._cat(shards, 0)
        _, _, number, part = name.split(".", 3)
        shards, local = self.layers[int(number)]
        get = lambda key: [shard[f"blocks.{local}.{key}"] for shard in shards if f"blocks.{local}.{key}" in shard]  # noqa: E731
        module, _, leaf = part.rpartition(".")
        if module.endswith("layernorm"):
            return get(f"norm{1 if module.startswith('input') else 2}.{leaf}")[0]
        if module == "self_attn.o_proj":
            # a row-parallel bias is added once, so only one shard may have it
            return get(f"mixer.out_proj.{leaf}")[0] if leaf == "bias" else self._cat(get("mixer.out_proj.weight"), 1)
        if module.startswith("self_attn."):
            which = "qkv".index(module.removeprefix("self_attn.")[0])
            return self._cat([shard.view(3, -1, *shard.shape[1:])[which] for shard in get(f"mixer.Wqkv.{leaf}")], 0)
        # until 0.2 w2 goes up and w3 comes down, from InternEvo 0.3 on the other way round
        swapped = get("mlp.w2.weight")[0].shape[1] != self.config.hidden_size
        key = {"gate": "w1", "up": "w3" if swapped else "w2", "down": "w2" if swapped else "w3"}[module.removeprefix("mlp.").split("_")[0]]
        return self._cat(get(f"mlp.{key}.weight"), 1 if "down" in module else 0)

    @staticmethod
    def _cat(shards: list[torch.Tensor], dim: int) -> torch.Tensor:
        import torch

        return shards[0] if len(shards) == 1 else torch.cat(shards, dim)
