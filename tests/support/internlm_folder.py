"""InternLM checkpoints as its trainer leaves them: our weights and moments come in, shards over tensor, pipeline and zero ranks go out.

Written after the description of the format, not after the code that reads it: parameters are dealt to zero ranks greedily by size.
"""

import enum
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

Values = dict[str, torch.Tensor]


def stage_layers(layers: int, pp: int) -> list[list[int]]:
    """Which layers each pipeline stage has; the remainder goes to the last."""
    each = layers // pp
    return [list(range(s * each, layers if s == pp - 1 else (s + 1) * each)) for s in range(pp)]


def shard(
    ours: Values, layers: int, tp: int, pp: int, *, by_hidden: bool, evo: bool
) -> dict[tuple[int, int], Values]:
    """(tensor rank, stage) -> state dict in the order of InternLM's modules."""
    cut = lambda value, dim: value.chunk(tp, dim)  # noqa: E731
    shards: dict[tuple[int, int], Values] = {}
    stages = stage_layers(layers, pp)
    for stage, numbers in enumerate(stages):
        for rank in range(tp):
            state: Values = {}
            if stage == 0:
                key = "embedding.weight" if by_hidden else "embedding.word_embeddings.weight"
                state[key] = cut(ours["model.embed_tokens.weight"], 1 if by_hidden else 0)[rank]
            for local, layer in enumerate(numbers):
                mine = {
                    name.split(f"layers.{layer}.")[1]: value
                    for name, value in ours.items()
                    if f"layers.{layer}." in name
                }
                parts: Values = {}
                for leaf in ("weight", "bias"):
                    parts[f"mixer.Wqkv.{leaf}"] = torch.cat(
                        [cut(mine[f"self_attn.{x}_proj.{leaf}"], 0)[rank] for x in "qkv"]
                    )
                parts["mixer.out_proj.weight"] = cut(mine["self_attn.o_proj.weight"], 1)[rank]
                if rank == 0:
                    parts["mixer.out_proj.bias"] = mine["self_attn.o_proj.bias"]
                parts |= {
                    f"norm{n}.weight": mine[f"{name}_layernorm.weight"]
                    for n, name in ((1, "input"), (2, "post_attention"))
                }
                up = cut(mine["mlp.up_proj.weight"], 0)[rank]
                down = cut(mine["mlp.down_proj.weight"], 1)[rank]
                parts |= {"mlp.w1.weight": cut(mine["mlp.gate_proj.weight"], 0)[rank]}
                parts |= (
                    {"mlp.w2.weight": down, "mlp.w3.weight": up}
                    if evo
                    else {"mlp.w2.weight": up, "mlp.w3.weight": down}
                )
                state |= {f"blocks.{local}.{key}": value for key, value in parts.items()}
            if stage == len(stages) - 1:
                state |= {
                    "norm.weight": ours["model.norm.weight"],
                    "head.weight": cut(ours["lm_head.weight"], 0)[rank],
                }
            shards[rank, stage] = {f"model.{key}": value.clone() for key, value in state.items()}
    return shards


@contextmanager
def upstream_classes() -> Iterator[types.SimpleNamespace]:
    """Stand-ins under the names of InternLM's own modules while something is pickled."""

    class Config(dict):  # type: ignore[type-arg]
        def __setattr__(self, key: str, value: object) -> None:
            self[key] = value

    class ParallelMode(enum.Enum):
        DATA = "data"

    places = {
        "internlm.core.context.parallel_context": Config,
        "internlm.core.context.process_group_initializer": ParallelMode,
    }
    parents = ["internlm", "internlm.core", "internlm.core.context"]
    sys.modules |= {name: types.ModuleType(name) for name in parents}
    for name, kind in places.items():
        kind.__module__ = name
        kind.__qualname__ = kind.__name__
        module = sys.modules[name] = types.ModuleType(name)
        setattr(module, kind.__name__, kind)
    try:
        yield types.SimpleNamespace(Config=Config, ParallelMode=ParallelMode)
    finally:
        for name in (*places, *parents):
            del sys.modules[name]


def write_weights(
    ours: Values,
    folder: Path,
    tp: int,
    pp: int,
    *,
    by_hidden: bool = True,
    evo: bool = False,
    heads: int = 4,
) -> None:
    """model_config.pt and model_tp*_pp*.pt."""
    folder.mkdir()
    layers = 1 + max(
        int(name.split("layers.")[1].split(".")[0]) for name in ours if "layers." in name
    )
    with upstream_classes() as upstream:
        settings = upstream.Config({
            "checkpoint": False, "num_chunks": 1, "num_attention_heads": heads, "embed_split_hidden": by_hidden, "dtype": torch.bfloat16,
            "layer_norm_epsilon": 1e-5, "mlp_ratio": 1.5, "parallel": upstream.Config({"tensor": tp}),
        })  # fmt: skip
        torch.save(settings, folder / "model_config.pt")
    for (rank, stage), state in shard(ours, layers, tp, pp, by_hidden=by_hidden, evo=evo).items():
        torch.save(state, folder / f"model_tp{rank}_pp{stage}.pt")


def write_optimizer(
    roles: dict[str, Values],
    folder: Path,
    tp: int,
    pp: int,
    zero: int,
    *,
    updates: int,
    context: dict[str, int],
) -> None:
    """optimizer_tp*_pp*_zo*.pt and context.pt; `roles` has master, exp_avg and exp_avg_sq."""
    layers = 1 + max(
        int(name.split("layers.")[1].split(".")[0]) for name in roles["master"] if "layers." in name
    )
    cut = {
        role: shard(values, layers, tp, pp, by_hidden=True, evo=False)
        for role, values in roles.items()
    }
    for (rank, stage), local in cut["master"].items():
        owners: list[list[str]] = [[] for _ in range(zero)]
        plan: list[list[str]] = [[] for _ in range(zero)]
        sizes = [0] * zero
        for number, key in enumerate(
            sorted(local, key=lambda name: local[name].numel(), reverse=True)
        ):
            lightest = sizes.index(min(sizes))
            owners[lightest].append(key)
            plan[lightest].append("_".join(map(str, (number, *local[key].shape))))
            sizes[lightest] += local[key].numel()
        for number, keys in enumerate(owners):
            flat = {
                role: torch.cat([cut[role][rank, stage][key].reshape(-1) for key in keys])
                for role in roles
            }
            with upstream_classes() as upstream:
                group = {
                    "name": "default",
                    "lr": 1e-3,
                    "dp_mode": upstream.ParallelMode.DATA,
                    "dtype": torch.float32,
                    "params": [0],
                }
                moments = {slot: flat[slot] for slot in ("exp_avg", "exp_avg_sq")}
                states = {
                    "grad_scaler": {"_scale": 1024.0, "_growth_step": 3, "_hysteresis_step": 1},
                    "base_optim_states": {
                        "state": {0: {"step": torch.tensor(float(updates)), **moments}},
                        "param_groups": [group],
                    },
                    "flat_fp32_weights": {0: flat["master"].requires_grad_()},
                    "zero_devide_optim_plan": [plan],
                }
                torch.save(states, folder / f"optimizer_tp{rank}_pp{stage}_zo{number}.pt")
    torch.save(
        {"batch_count": context["step_count"] - 1, **context, "tensorboard_folder": None},
        folder / "context.pt",
    )
