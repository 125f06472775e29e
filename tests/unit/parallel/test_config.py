"""Which settings of parallelism are refused, and what the refusal advises."""

from typing import Any

import pytest

from headway.config.load import load
from headway.errors import ConfigError, ParallelError
from headway.model.adapter.config import AdapterConfig
from headway.model.config import ModelConfig
from headway.model.experts_config import ExpertsConfig
from headway.parallel.config import ParallelConfig
from headway.parallel.mesh import plan_mesh
from headway.tasks.base import TaskConfig
from headway.tasks.dpo import Config as DPO
from headway.tasks.next_token import Config as NextToken
from headway.train.config import Recipe


def rows_refusal(
    seq_len: int = 64,
    objective: TaskConfig = NextToken(),
    adapter: AdapterConfig | None = None,
    **model: Any,
) -> str:
    shape = ModelConfig.model_validate({"num_heads": 8, "num_kv_heads": 4, **model})
    config = ParallelConfig(context=4)
    with pytest.raises(ParallelError) as caught:
        config.check_rows(shape, seq_len, objective, adapter)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "model", "seq_len", "objective"),
    [
        (ParallelConfig(context=4), ModelConfig(num_heads=8, num_kv_heads=4), 64, NextToken()),
        (ParallelConfig(context=4), ModelConfig(num_heads=8, num_kv_heads=2), 64, NextToken()),
        (ParallelConfig(), ModelConfig(num_heads=8, num_kv_heads=2, dropout=0.1), 63, DPO()),
    ],
    ids=["heads are shared", "a ring", "one rank a row"],
)
def test_rows_that_ranks_can_share_are_accepted(
    config: ParallelConfig, model: ModelConfig, seq_len: int, objective: TaskConfig
) -> None:
    config.check_rows(model, seq_len, objective, None)


BEYOND = "parallel.context is 4, which is beyond the 2 KV heads of a rank and needs a ring"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"num_kv_heads": 2, "head_gates": {"window": 4}},
            f"{BEYOND}; head gates have none. Use 2.",
        ),
        (
            {"num_kv_heads": 2, "sliding_window": 8},
            f"{BEYOND}; sliding windows have none. Use 2.",
        ),
        (
            {"num_kv_heads": 2, "seq_len": 60},
            "data.seq_len=60 must be a multiple of 8. Use 56",
        ),
        ({"seq_len": 62}, "must divide data.seq_len=62. Use seq_len 60"),
        ({"dropout": 0.1}, "model.dropout is 0.1"),
        ({"adapter": AdapterConfig(dropout=0.2)}, "adapter.dropout is 0.2"),
        (
            {"objective": DPO()},
            "objective dpo needs whole rows: parallel.context is 4 and must be 1.",
        ),
    ],
)
def test_rows_that_ranks_cannot_share_are_refused_with_a_remedy(
    settings: dict[str, Any], message: str
) -> None:
    assert message in rows_refusal(**settings)


@pytest.mark.parametrize(
    ("context", "remedy"), [(3, "start 3 ranks"), (8, "start 8 or a multiple of it")]
)
def test_a_context_that_does_not_divide_the_ranks_is_refused(context: int, remedy: str) -> None:
    message = f"parallel.context is {context}; it must divide the number of ranks, 4. .*{remedy}"
    with pytest.raises(ParallelError, match=message):
        ParallelConfig(context=context).mesh(0, 4)


def refusal(**parallel: object) -> str:
    config = ParallelConfig.model_validate(parallel)
    with pytest.raises(ParallelError) as caught:
        config.check(config.mesh(0, 4), "float16")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"zero1": {"size": 3}},
            "parallel.zero1.size is 3; it must divide the 4 ranks. Use auto or 1 or 2 or 4.",
        ),
        ({"strategy": "fsdp", "fsdp": {"size": 8}}, "parallel.fsdp.size is 8"),
        ({"strategy": "fsdp", "hook": {"kind": "powersgd"}}, "exchanges gradients itself"),
        ({"strategy": "fsdp", "overlap": {"reduce": False}}, "always overlaps"),
        ({"strategy": "fsdp", "accumulate_dtype": "compute"}, "adds up in fp32"),
        (
            {"zero1": {"size": 1}, "hook": {"kind": "reduce_scatter"}},
            "needs parallel.zero1.size above 1",
        ),
        (
            {
                "hook": {"kind": "powersgd", "error_feedback": False},
                "accumulate_dtype": "compute",
            },
            "needs fp32",
        ),
        ({"hook": {"kind": "powersgd"}}, "loss scale"),
        (
            {"hook": {"kind": "all_reduce"}, "reduce_dtype": "bf16"},
            "decides the precision itself",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused_in_one_line(
    settings: dict[str, Any], message: str
) -> None:
    assert message in refusal(**settings)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            {"expert": 3},
            "parallel.expert is 3; it must divide the 4 data-parallel ranks. Use 1 or 2 or 4.",
        ),
        (
            {"expert": 4, "tensor": 2},
            "parallel.expert is 4; it must divide the 2 data-parallel ranks. Use 1 or 2.",
        ),
    ],
)
def test_experts_that_do_not_divide_the_data_ranks_are_refused(
    axes: dict[str, int], message: str
) -> None:
    assert refusal(**axes) == message


def test_experts_that_do_not_fit_the_shards_of_the_optimizer_are_refused() -> None:
    with pytest.raises(
        ParallelError,
        match=r"parallel.expert is 2; it must divide key=3, or be a multiple of it. Use 1 or 3 or 6.",
    ):
        plan_mesh(0, 6, 3, "key", expert=2)


SIX_EXPERTS = ModelConfig(experts=ExpertsConfig(num=6))


@pytest.mark.parametrize(
    ("model", "expert", "message"),
    [
        (SIX_EXPERTS, 4, "parallel.expert is 4.*model.experts.num=6. Use 3."),
        (ModelConfig(), 2, "parallel.expert is 2.*has no experts .* Use expert 1."),
    ],
)
def test_ranks_that_do_not_divide_the_experts_are_refused(
    model: ModelConfig, expert: int, message: str
) -> None:
    with pytest.raises(ParallelError, match=message):
        ParallelConfig(expert=expert).check_rows(model, 64, NextToken(), None)


@pytest.mark.parametrize("axis", ["pipeline", "context"])
def test_experts_are_refused_on_axes_that_do_not_take_them(axis: str) -> None:
    config = ParallelConfig.model_validate({axis: 2, "expert": 2})
    with pytest.raises(ParallelError, match=f"parallel.{axis} is 2 and model.experts is given"):
        config.check_rows(SIX_EXPERTS, 64, NextToken(), None)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "memory.recompute=selective",
            r"memory.recompute is selective and parallel.expert is 2.* such as 1",
        ),
        (
            "optim.kind=adafactor",
            r"parallel.expert is 2, but optim.kind adafactor .* Use adamw, or expert 1",
        ),
    ],
)
def test_settings_that_split_experts_cannot_have_are_refused(setting: str, message: str) -> None:
    settings = ["run.name=x", "model.experts.num=4", "parallel.expert=2", setting]
    with pytest.raises(ConfigError, match=message):
        load(Recipe, None, settings)


@pytest.mark.parametrize(
    ("parallel", "model", "refused"),
    [
        ({"tensor": 3}, {}, r"parallel.tensor is 3; it must divide model.num_heads=8. Use 2."),
        (
            {"tensor": 8},
            {"ffn_size": 100},
            r"parallel.tensor is 8; it must divide model.ffn_size=100. Use 4.",
        ),
        (
            {"tensor": 4},
            {"num_heads": 12, "num_kv_heads": 3, "head_dim": 4, "seq_len": 60},
            r"num_kv_heads=3, or be a multiple of it. Use 3.",
        ),
        (
            {"tensor": 4},
            {"seq_len": 30},
            r"must divide data.seq_len=30, since parallel.sequence .*Use 2.",
        ),
        ({"tensor": 4, "context": 4}, {"seq_len": 24}, r"data.seq_len=24 / context 4.* Use 2."),
        ({"tensor": 4, "sequence": False}, {"seq_len": 30}, None),
        ({"tensor": 8}, {"vocab_size": 61}, None),
        ({"tensor": 8}, {"num_kv_heads": 2}, None),
        (
            {"tensor": 8},
            {"vocab_size": 5},
            r"parallel.tensor is 8; every rank needs a row of model.vocab_size=5. Use 4.",
        ),
    ],
)
def test_a_layout_that_a_model_does_not_fit_is_refused_with_the_nearest_that_works(
    parallel: dict[str, Any], model: dict[str, Any], refused: str | None
) -> None:
    seq_len = model.pop("seq_len", 64)
    shape = ModelConfig(
        **{
            "hidden_size": 32,
            "num_heads": 8,
            "num_kv_heads": 4,
            "ffn_size": 48,
            "vocab_size": 64,
            **model,
        }
    )
    config = ParallelConfig.model_validate(parallel)
    if refused is None:
        config.check_rows(shape, seq_len, NextToken(), None)
    else:
        with pytest.raises(ParallelError, match=refused):
            config.check_rows(shape, seq_len, NextToken(), None)


@pytest.mark.parametrize("kind", ["powersgd", "torch_style"])
def test_hooks_that_cannot_serve_parts_of_matrices_are_refused(kind: str) -> None:
    for axis in ("tensor", "expert"):
        config = ParallelConfig.model_validate({axis: 2, "hook": {"kind": kind}})
        with pytest.raises(ParallelError, match=f"parallel.hook.kind is {kind}.*parallel.{axis}"):
            config.check(config.mesh(0, 4), "float32")
