"""A model with its own vision tower on several ranks: decoder, tower and adapters train as in one process, with pictures in some rows only."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import Setup, make_engine
from support.ranks import run_ranks
from support.small_vision import write_conversations, write_vision

from headway.config.load import load
from headway.data.loader import Loader
from headway.model.adapter.config import AdapterConfig
from headway.optim.adamw import Config as AdamW
from headway.optim.base import GroupRule
from headway.optim.groups import hypers
from headway.parallel.collectives import RankGroup
from headway.tasks.base import StepInfo
from headway.train.batches import open_run_data
from headway.train.config import Recipe
from headway.train.resolve import resolve

pytest.importorskip("transformers", minversion="5.0")
STEPS = 3
ROWS = 4
OPTIM = AdamW(lr=1e-2, clip=0.5, eps=1e-4, groups=(GroupRule(match=("tower",), lr_factor=0.5),))
"""A large eps: with a small one, Adam makes whole steps of gradients that are rounding alone."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"zero1": {"size": 1}},
    "zero1": {"zero1": {"size": "auto"}},
    "fsdp": {"strategy": "fsdp"},
}
EXPERTS: dict[str, dict[str, Any]] = {"experts over ranks": {"expert": 2}}
"""Layouts of mixtures besides."""
TRAINS: dict[str, dict[str, Any]] = {
    "decoder": {"optim": OPTIM.model_copy(update={"groups": ()})},
    "decoder and tower": {"optim": OPTIM, "train": ("weights",)},
    "adapters": {
        "optim": OPTIM.model_copy(update={"groups": ()}),
        "adapter": AdapterConfig(rank=2, targets=("q_proj", "visual.*")),
    },
}

Result = tuple[list[tuple[float, float]], dict[str, torch.Tensor]]


def trained(folder: Path, case: str, parallel: dict[str, Any], group: RankGroup) -> Result:
    """Loss and norm of each step, and the weights behind the last."""
    settings = [
        f"init.from={folder}/model", f"data.train=[{{path: {folder}/chat.jsonl, kind: multimodal}}]", f"data.cache_dir={folder}/cache",
        "data.seq_len=256", "multimodal.native={}", f"batch.rows={ROWS}", "data.packing=pad", "device=cpu",
    ]  # fmt: skip
    resolved = resolve(load(Recipe, None, settings))
    data = open_run_data(resolved)
    setup = Setup(parallel, freeze=(), config=resolved.model, **TRAINS[case])
    engine = make_engine(group, setup)
    seen: list[tuple[float, float]] = []
    with Loader(
        resolved.recipe.data, sources=data.train, rows_per_step=ROWS, micro_rows=1, rank=group.rank, world=group.size, seed=1,
        sum_over_ranks=group.sum, media=data.media,
    ) as loader:  # fmt: skip
        for index in range(STEPS):
            result = engine.forward_backward(next(loader)[0], StepInfo(index, 20))
            update = engine.update(hypers(engine.spec.optim, engine.groups, index, 20))
            seen.append((float(result.loss), float(update.norm)))
    return seen, {name: value.clone() for name, value in engine.weights()}


def all_layouts(
    folder: Path, layouts: dict[str, dict[str, Any]], group: RankGroup
) -> list[tuple[str, str, Result]]:
    return [
        (case, layout, trained(folder, case, parallel, group))
        for case in TRAINS
        for layout, parallel in layouts.items()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_two_ranks_train_like_one(tmp_path: Path, kind: str) -> None:
    write_vision(tmp_path / "model", kind=kind)
    write_conversations(tmp_path)
    alone = {case: trained(tmp_path, case, {}, RankGroup()) for case in TRAINS}
    frozen = alone["decoder"][1]
    name = "visual.patch_embed.proj.weight"
    assert not torch.equal(frozen[name], alone["decoder and tower"][1][name])
    layouts = LAYOUTS | EXPERTS if kind.endswith("moe") else LAYOUTS
    for results in run_ranks(partial(all_layouts, tmp_path, layouts), 2):
        for case, layout, (seen, weights) in results:
            wanted, expected = alone[case]
            torch.testing.assert_close(seen, wanted, rtol=1e-4, atol=1e-5, msg=f"{case}, {layout}")
            assert weights.keys() == expected.keys()
            for name in weights:
                torch.testing.assert_close(
                    weights[name], expected[name], rtol=1e-4, atol=1e-5, msg=f"{case}, {layout}: {name}"
                )  # fmt: skip
