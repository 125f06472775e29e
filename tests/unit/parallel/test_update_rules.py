"""The optimizers in an engine of one process, and what a recipe may combine them with: groups, adapters, gates, host memory, fp16."""

from typing import Any

import pytest
import torch
from support.engines import CONFIG, Setup, make_engine, train_steps

from headway.config.load import load
from headway.errors import HeadwayError, ParallelError
from headway.model.adapter.config import AdapterConfig
from headway.model.config import HeadGatesConfig
from headway.model.layout import GATES
from headway.optim.adafactor import Config as Adafactor
from headway.optim.base import GroupRule
from headway.optim.lion import Config as Lion
from headway.optim.muon import Config as Muon
from headway.optim.schedule import Schedule
from headway.optim.schedule_free import Config as ScheduleFree
from headway.optim.schedule_free import WarmupSchedule
from headway.parallel.collectives import RankGroup
from headway.parallel.flat.buffer import BufferSharding, lay_out_whole
from headway.parallel.update_rules import assign, check_whole
from headway.tasks.head_sparsity import Config as HeadSparsity
from headway.train.config import Recipe

COMMON: dict[str, Any] = {"lr": 3e-3, "clip": 0.5, "schedule": Schedule(warmup=1)}
FREE = ScheduleFree(**COMMON | {"schedule": WarmupSchedule(warmup=1)})
KINDS = {
    "muon": Muon(**COMMON),
    "lion": Lion(**COMMON),
    "adafactor": Adafactor(**COMMON),
    "schedule_free": FREE,
}
ALONE = RankGroup()


@pytest.mark.parametrize("kind", KINDS)
def test_fp16_skips_overflows_and_trains_on(kind: str) -> None:
    engine = make_engine(ALONE, Setup(dtype=torch.float16, optim=KINDS[kind], freeze=()))
    before = {name: value.clone() for name, value in engine.masters.items()}
    scale = engine.scaler.scale.clone()
    engine.scaler.scale.fill_(float("inf"))
    assert train_steps(engine, ALONE, 2, 0, 1)[0][2] == 1
    assert all(torch.equal(before[name], value) for name, value in engine.masters.items())
    engine.scaler.scale.copy_(scale.clamp(max=1024))
    assert [step[2] for step in train_steps(engine, ALONE, 2, 1, 4)] == [0, 0, 0]
    assert all(not torch.equal(before[name], value) for name, value in engine.masters.items())
    assert set(engine.scalars()["steps"].values()) == {3}
    assert engine.scalars()["skipped"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_groups_and_gates_train(kind: str) -> None:
    rules = (GroupRule(match=("layers.1",), lr=0.0, weight_decay=0.0),)
    optim = KINDS[kind].model_copy(update={"groups": rules})
    engine = make_engine(ALONE, Setup(optim=optim, freeze=("norms",)))
    before = {name: value.clone() for name, value in engine.masters.items()}
    train_steps(engine, ALONE, 2, 0, 2)
    changed = {
        name for name, value in engine.masters.items() if not torch.equal(before[name], value)
    }
    assert changed == {name for name in before if "layers.1." not in name and "norm" not in name}
    adapted = make_engine(ALONE, Setup(optim=KINDS[kind], adapter=AdapterConfig(rank=3), freeze=()))
    first = {name: value.clone() for name, value in adapted.masters.items()}
    train_steps(adapted, ALONE, 2, 0, 3)
    assert {
        name for name, value in adapted.masters.items() if not torch.equal(first[name], value)
    } == {n for n in first if ".lora_" in n}
    gated = CONFIG.with_(head_gates=HeadGatesConfig(window=3, sinks=1), dropout=0.0)
    engine = make_engine(
        ALONE,
        Setup(
            optim=KINDS[kind], config=gated, objective=HeadSparsity(target=0.5), freeze=("weights",)
        ),
    )
    start = engine.masters[GATES].clone()
    train_steps(engine, ALONE, 2, 0, 2)
    assert not torch.equal(engine.masters[GATES], start)


def test_muon_gives_embeddings_norms_and_gates_to_adamw() -> None:
    gated = CONFIG.with_(head_gates=HeadGatesConfig(window=3, sinks=1), qkv_bias=True)
    engine = make_engine(
        ALONE,
        Setup(optim=KINDS["muon"], config=gated, objective=HeadSparsity(target=0.5), freeze=()),
    )
    hidden = {name for name, rule in engine.rule_of.items() if rule.matrices is not None}
    assert hidden == {
        name for name, shape in engine.shapes.items() if ".layers." in name and len(shape) == 2
    }
    roles = {(name, role) for name, role, _, _ in engine.tensors()}
    assert {role for name, role in roles if name in hidden} == {"master", "momentum"}
    assert {role for name, role in roles if name not in hidden} == {
        "master",
        "exp_avg",
        "exp_avg_sq",
    }


def test_muon_refuses_matrices_that_are_split_over_tensor_ranks() -> None:
    with pytest.raises(
        ParallelError,
        match=r"optim.kind is 'muon', .* splits a.weight \(\[4, 8\] of \[8, 8\] here\). Use parallel.tensor=1",
    ):
        check_whole(Muon(), ["a.weight"], {"a.weight": ((8, 8), (4, 8))})


def test_matrices_that_do_not_divide_evenly_among_ranks_are_refused() -> None:
    shapes = {"big": (2048, 2048), "small": (64,)}
    with pytest.raises(
        ParallelError,
        match=r"2 of them do not divide evenly among 16 ranks.*Lower parallel.zero1.size",
    ):
        lay_out_whole(list(shapes), shapes, BufferSharding(1 << 10, 16))


@pytest.mark.parametrize(
    ("kind", "setting", "words"),
    [
        (
            "muon",
            "memory.offload=[optimizer]",
            "memory.offload has optimizer, but optim.kind muon updates whole matrices",
        ),
        (
            "adafactor",
            "parallel.tensor=2",
            "parallel.tensor is 2, but optim.kind adafactor updates whole matrices",
        ),
    ],
)
def test_optimizers_of_whole_matrices_refuse_settings_that_split_them(
    kind: str, setting: str, words: str
) -> None:
    with pytest.raises(HeadwayError, match=words):
        load(Recipe, None, [f"optim.kind={kind}", setting])


def test_a_pattern_for_adamw_that_matches_no_parameter_is_refused() -> None:
    config = Muon.model_validate({"kind": "muon", "adamw": {"match": ("nothing",)}})
    with pytest.raises(HeadwayError, match=r"optim.adamw.match contains 'nothing'"):
        make_engine(ALONE, Setup(optim=config))


def test_whole_matrices_are_laid_out_evenly() -> None:
    layer = {
        "q": (64, 64),
        "k": (16, 64),
        "v": (16, 64),
        "o": (64, 64),
        "gate": (192, 64),
        "up": (192, 64),
        "down": (64, 192),
    }
    shapes = {f"{index}.{name}": shape for index in range(12) for name, shape in layer.items()}
    for shards in (2, 3, 4, 8):
        sharding = BufferSharding(4096, shards)
        spans, length = lay_out_whole(list(shapes), shapes, sharding)
        assert [slot.name for span in spans for slot in span.slots].__len__() == len(shapes)
        assert length <= 1.2 * sum(torch.Size(shape).numel() for shape in shapes.values())
        for span in spans:
            each = (span.stop - span.start) // shards
            for slot in span.slots:
                assert (slot.start - span.start) // each == (
                    slot.start + slot.size - 1 - span.start
                ) // each, "in one shard"
        assert len(spans) > 1, "gradients can still be exchanged during backward"
    assert assign([5, 4, 3, 3, 3], 2) == ([0, 1, 1, 0, 1], 10)
