"""What `headway plan` computes: known figures, hand-made sums, and agreement with the estimate of `headway train`."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.cli import main
from headway.config.load import load
from headway.errors import ConfigError, ParallelError
from headway.model.config import ModelConfig
from headway.parallel.config import MemoryConfig
from headway.parallel.layouts import Layout
from headway.parallel.pipeline.program import PipelineShape
from headway.parallel.pipeline_order import ActionKind, ScheduleName, pipeline_actions
from headway.plan.compute import layer_seconds
from headway.plan.hardware import GPUS, find_gpu
from headway.plan.job import PlanJob
from headway.plan.memory import estimate
from headway.plan.result import Plan, arithmetic, as_dict, make_plan, rank_groups
from headway.plan.search import _space, best_plans, fitting_jobs, nearest_fitting
from headway.plan.timeline import in_flight, simulate
from headway.plan.traffic import RankRing, rings
from headway.runtime.device import choose_compute
from headway.train.config import Recipe
from headway.train.memory import describe_job
from headway.train.planning import PlanTarget, plan_job

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import plan_anchors

PAGE = Path(__file__).parents[3] / "docs" / "plan.md"
LLAMA = ModelConfig(preset="llama-8b")
INTERNLM = [
    "model.hidden_size=4096", "model.num_layers=32", "model.num_heads=32", "model.ffn_size=11008", "model.vocab_size=103168",
    "model.tie_embeddings=false", "model.qkv_bias=true", "model.output_bias=true", "model.max_seq_len=2048", "data.seq_len=2048",
]  # fmt: skip


def planned(*settings: str, world: int | None = None, gpu: str = "h100") -> Plan:
    return make_plan(plan_job(load(Recipe, None, list(settings)), PlanTarget(find_gpu(gpu), world)))


@pytest.fixture(scope="module")
def internlm_plan() -> Plan:
    """A plan of InternLM 7B on 16 ranks, over every axis."""
    return planned(
        *INTERNLM,
        "batch.rows=64",
        "parallel.tensor=2",
        "parallel.pipeline=2",
        "parallel.zero1.size=2",
        world=16,
    )


def test_flops_are_those_of_internlms_formula(internlm_plan: Plan) -> None:
    assert internlm_plan.flops.internlm == 44_411_387_904


def test_flops_of_recomputed_layers_count_a_second_forward() -> None:
    recomputed = planned(*INTERNLM, "batch.rows=8", "memory.recompute=0.5")
    head_flops = 6 * 4096 * 103_168
    assert recomputed.flops.internlm == 4 / 3 * (44_411_387_904 - head_flops) + head_flops


def test_groups_of_ranks_are_listed_by_axis(internlm_plan: Plan) -> None:
    groups = rank_groups(internlm_plan.job)
    assert groups["shard"] == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert groups["tensor"][:2] == [[0, 1], [2, 3]]
    assert groups["pipeline"][0] == [0, 8]
    assert groups["data"] == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]


def test_parameters_of_all_stages_are_those_of_the_model(internlm_plan: Plan) -> None:
    job = internlm_plan.job
    both_stages = job.parameters_of(0).total + job.parameters_of(1).total
    # A tensor rank has half of the model.
    assert both_stages == pytest.approx(7_321_948_160 / 2, rel=1e-4)


def test_windows_are_counted_in_arithmetic_recomputation_and_time() -> None:
    model = ModelConfig(
        hidden_size=512, num_layers=4, num_heads=4, num_kv_heads=4, ffn_size=1024, vocab_size=1024, max_seq_len=8192,
        tie_embeddings=False, sliding_window=1024, window_layers=(0, 1, 2),
    )  # fmt: skip
    job = PlanJob(model, 8192, 1, 1, memory=MemoryConfig(recompute=1.0))
    counts = arithmetic(job)
    matrices = 4 * 512 * 512 + 3 * 512 * 1024
    channels = 2 * 512
    # three layers in which a token sees 960 of 1024 keys on the average, and one in which it sees half of the row
    forward = 4 * 2 * matrices + 2 * channels * (3 * 960 + 4096)
    assert counts.recomputed == forward
    assert counts.model.causal == 3 * forward + 6 * 512 * 1024
    assert (
        counts.model.full
        == 3 * (4 * 2 * matrices + 2 * channels * (3 * 1024 + 8192)) + 6 * 512 * 1024
    )
    assert counts.hardware == counts.model.causal + forward
    # a window that leaves one token out costs what a full layer does, not twice as much
    nearly = replace(job, model=model.with_(sliding_window=8191), memory=MemoryConfig())
    full = replace(
        job, model=model.with_(sliding_window=None, window_layers=None), memory=MemoryConfig()
    )
    assert layer_seconds(nearly, 0).forward == pytest.approx(
        layer_seconds(full, 0).forward, rel=1e-3
    )
    assert (
        layer_seconds(replace(job, memory=MemoryConfig()), 0).forward
        < 0.7 * layer_seconds(full, 0).forward
    )


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["freeze=[embeddings, layers.0-1]"],
        ["adapter.rank=4", "memory.recompute=1"],
        [
            "precision=bf16",
            "optim.state_dtype=8bit",
            "memory.offload=[optimizer]",
            "batch.micro_rows=4",
        ],
        ["objective.kind=head_sparsity", "model.tie_embeddings=false", "freeze=[weights]"],
    ],
)
def test_bytes_are_those_of_headway_train(settings: list[str]) -> None:
    settings = [*settings, "model.vocab_size=1024", "batch.rows=8", "device=cpu"]
    recipe = load(Recipe, None, settings)
    job = plan_job(recipe, PlanTarget(find_gpu("a40")))
    compute = replace(choose_compute("cpu", "bf16", 0), device=torch.device("cuda"))
    mine = describe_job(recipe, job.model, compute, recipe.batch.resolve(512, 1), 1)
    assert estimate(mine) == estimate(replace(job.memory_job(), compute_bytes=2))


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_bubble_of_equal_stages_is_the_known_one(stages: int) -> None:
    def bubble(schedule: ScheduleName, virtual: int) -> float:
        usual: dict[ActionKind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
        seconds: dict[ActionKind, list[float]] = {
            kind: [size / virtual] * stages * virtual for kind, size in usual.items()
        }
        timeline = simulate(PipelineShape(schedule, stages, virtual), 2 * stages, seconds)
        busy = sum(action.end - action.start for action in timeline.actions)
        return 1 - busy / (stages * timeline.seconds)

    number = 2 * stages
    assert bubble("1f1b", 1) == pytest.approx((stages - 1) / (number + stages - 1))
    assert bubble("interleaved", 2) == pytest.approx((stages - 1) / (2 * number + stages - 1))
    # ZB-H1: of F, I and W each rank waits for F + I - W
    assert bubble("zero_bubble", 1) == pytest.approx((stages - 1) / (3 * number + stages - 1))


def test_microbatches_in_flight_are_those_counted_by_hand() -> None:
    assert [in_flight(actions) for actions in pipeline_actions("1f1b", 4, 8)] == [
        {0: 4},
        {1: 3},
        {2: 2},
        {3: 1},
    ]
    assert in_flight(pipeline_actions("interleaved", 2, 4, 2)[0]) == {0: 3, 2: 2}
    assert [
        sum(in_flight(actions).values()) for actions in pipeline_actions("zero_bubble", 4, 8)
    ] == [4, 4, 4, 4]


def test_a_pipeline_holds_its_stages_and_more_microbatches_first() -> None:
    job = PlanJob(LLAMA, 4096, 1, 16, Layout(8, pipeline=4), GPUS["h100"])
    plan = make_plan(job)
    # the head costs as much as two layers
    assert [len(stage) for stage in job.stages] == [
        8,
        9,
        9,
        6,
    ]
    assert plan.worst_rank == 0
    assert plan.by_rank[0].total > plan.by_rank[3].total
    assert job.parameters_of(0).total == 525_336_576 + len(job.stages[0]) * 218_112_000
    assert job.held_blocks(0) == 4 * len(job.stages[0])
    assert plan.timeline is not None
    assert plan.timeline.seconds < plan.step_seconds < 1.2 * plan.timeline.seconds


@pytest.fixture
def traffic_job() -> PlanJob:
    """A model over every axis, on GPUs with a slow network."""
    gpu = replace(GPUS["a100"], network=10e9)
    return PlanJob(LLAMA, 4096, 1, 2, Layout(32, tensor=2, context=2, pipeline=2), gpu)


def test_traffic_of_each_axis_is_that_counted_by_hand(traffic_job: PlanJob) -> None:
    traffic = make_plan(traffic_job).traffic
    assert set(traffic) == {"data", "tensor", "context", "pipeline"}
    trained = max(traffic_job.parameters_of(stage).trained for stage in (0, 1))
    assert traffic["data"].sent_bytes == pytest.approx(trained * (4 + 2) * 7 / 8, rel=0.15)
    # Two microbatches, forward and backward, tokens over two ranks.
    assert traffic["pipeline"].sent_bytes == 2 * 2 * (2048 * 4096 * 2 / 2)
    layers = max(len(stage) for stage in traffic_job.stages)
    assert traffic["tensor"].sent_bytes == 2 * layers * 8 * (2048 * 4096 * 2) / 2
    assert traffic["context"].sent_bytes == 2 * layers * 2 * 2048 * 2 * (4096 + 1024) / 2


def test_a_ring_counts_its_ranks_and_those_on_one_machine(traffic_job: PlanJob) -> None:
    assert rings(traffic_job)["tensor"] == RankRing(2, 2)
    assert rings(traffic_job)["reduce"] == RankRing(8, 4)


def test_a_ring_over_machines_is_as_fast_as_its_slowest_link(traffic_job: PlanJob) -> None:
    assert RankRing(16, 8).bandwidth(traffic_job.gpu) == min(300e9 * 0.78, 8 * 10e9 * 0.86)


def test_a_ring_of_one_rank_takes_no_time(traffic_job: PlanJob) -> None:
    assert RankRing(1, 1).pass_seconds(traffic_job.gpu, 1e9) == 0


def test_a_search_lists_layouts_that_fit_the_fastest_first() -> None:
    job = PlanJob(LLAMA, 8192, 1, 8, Layout(16), GPUS["h100"])
    best = best_plans(job)
    assert len(best) == 10
    assert all(plan.fits for plan in best)
    speeds = [plan.per_gpu for plan in best]
    assert speeds == sorted(speeds, reverse=True)
    assert {plan.job.step_tokens for plan in best} == {job.step_tokens}
    assert len({(plan.job.layout, plan.job.memory.recompute) for plan in best}) == 10
    too_large = replace(job, layout=Layout(8), gpu=GPUS["4090"], seq_len=4096)
    assert not make_plan(too_large).fits
    near = nearest_fitting(too_large)
    assert len(near) == 3
    assert all(plan.fits and plan.job.layout.world == 8 for plan in near)


def test_the_errors_on_the_page_are_those_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    peaks, speeds = plan_anchors.errors()
    tables = plan_anchors.page(peaks, speeds)
    assert text.partition(plan_anchors.BEGIN + "\n")[2].partition(plan_anchors.END)[0] == tables, (
        "run plan_anchors.py --write"
    )
    assert max(abs(error) for _, _, error in peaks) < 0.06
    assert sum(abs(error) <= 0.05 for _, _, error in peaks) >= 12
    assert sum(abs(error) <= 0.1 for _, _, error in speeds) >= 0.85 * len(speeds)
    assert any(anchor.job.layout.world == 1024 and abs(error) <= 0.1 for anchor, _, error in speeds)


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    seen = capsys.readouterr()
    return code, seen.out, seen.err


PIPELINE_OF_FOUR = [
    "--world", "8", "--gpu", "a800", "model.preset=llama-1b", "data.seq_len=2048", "batch.rows=64", "batch.micro_rows=1",
    "parallel.pipeline=4",
]  # fmt: skip


def test_the_verb_prints_layout_memory_budget_and_groups_as_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--json", "--tokens", "20B", "--price", "2", "--groups"]
    code, out, _ = run_cli(capsys, *PIPELINE_OF_FOUR, *options)
    printed = json.loads(out)
    assert code == 0
    assert printed["layout"]["data"] == 2
    assert printed["memory"]["fits"] is True
    assert sum(printed["memory"]["kinds"].values()) == printed["memory"]["total"]
    seconds = 20e9 / printed["speed"]["tokens_per_second"]
    assert printed["budget"]["gpu_hours"] == pytest.approx(seconds / 3600 * 8)
    assert printed["budget"]["cost"] == pytest.approx(2 * printed["budget"]["gpu_hours"])
    assert printed["pipeline"]["in_flight"][0] == {"0": 4}
    assert printed["groups"]["pipeline"][0] == [0, 2, 4, 6]


def test_the_verb_draws_a_picture_and_lists_the_fastest_layouts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "plan.png"
    code, out, _ = run_cli(capsys, *PIPELINE_OF_FOUR, "--plot", str(picture), "--search")
    assert code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Fastest layouts" in out
    assert "microbatches in flight: stage 0: 4" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--gpu", "h1000"], "--gpu is 'h1000'; it must be one of b200, h200"),
        (["--tokens", "many"], "--tokens is 'many'; it must be a number above 0"),
        (["--price", "2"], "--price is 2, but --tokens is not given"),
        (["--plot", "x.txt", "model.vocab_size=512"], "its name must end in .png, .svg or .pdf"),
        (["--plot", "/nowhere/x.png", "model.vocab_size=512"], "there is no folder /nowhere"),
        (
            ["--world", "8", "parallel.tensor=3", "model.vocab_size=512"],
            "The nearest layout that works on 8 ranks: ",
        ),
        (
            ["--world", "6", "parallel.pipeline=6", "model.vocab_size=512"],
            "every stage needs a layer, and the model has 4",
        ),
        (
            ["--world", "8", "batch.tokens=1000", "model.vocab_size=512"],
            "batch.tokens is 1000; it must be a multiple",
        ),
    ],
)
def test_a_layout_that_cannot_be_planned_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    code, _, err = run_cli(capsys, *arguments)
    assert code == 2
    assert expected in err
    assert len(err.strip().splitlines()) == 1


def test_planning_needs_no_torch() -> None:
    program = (
        "import sys; from headway.cli import main; code = main(['plan', '--world', '64', 'model.preset=llama-8b', '--search', '--json']);"
        " sys.exit(code or ('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]


def test_auto_rows_are_the_most_that_fit() -> None:
    plan = planned(
        "model.preset=llama-1b",
        "data.seq_len=8192",
        "batch.rows=64",
        "batch.micro_rows=auto",
        gpu="h200",
    )
    more = replace(plan.job, rows=2 * plan.job.rows, accumulate=plan.job.accumulate // 2)
    assert plan.fits
    assert not make_plan(more).fits


def test_a_layout_error_names_the_rule() -> None:
    with pytest.raises(
        ParallelError, match=r"fsdp, which has no pipeline.*nearest layout that works on 8 ranks"
    ):
        planned("model.vocab_size=512", "parallel.strategy=fsdp", "parallel.pipeline=2", world=8)
    with pytest.raises(ConfigError, match=r"data.seq_len is 1024; it must not exceed"):
        planned("model.vocab_size=512", "data.seq_len=1024")


LONG_ROWS = [
    "model.preset=llama-1b",
    "model.max_seq_len=32768",
    "data.seq_len=32768",
    "batch.rows=16",
    "batch.micro_rows=1",
]


def searched_degrees(axis: str, *settings: str) -> set[int]:
    """The degrees of an axis among the layouts that a search tries."""
    recipe = load(Recipe, None, [*LONG_ROWS, *settings])
    job = plan_job(recipe, PlanTarget(find_gpu("a100"), 8))
    return {getattr(candidate.layout, axis) for candidate in fitting_jobs(job, _space(job))}


@pytest.mark.parametrize(
    ("axis", "refused_with"),
    [
        ("context", "model.dropout=0.1"),
        ("tensor", "optim.kind=muon"),
        ("pipeline", "objective.kind=dpo"),
    ],
)
def test_a_search_leaves_out_an_axis_that_training_would_refuse(
    axis: str, refused_with: str
) -> None:
    assert searched_degrees(axis) > {1}
    assert searched_degrees(axis, refused_with) == {1}


def test_a_plan_refuses_what_training_would_refuse() -> None:
    with pytest.raises(ConfigError, match=r"optim.kind muon updates whole matrices"):
        planned(*LONG_ROWS, "optim.kind=muon", "parallel.tensor=2", world=8)
    with pytest.raises(
        ParallelError, match=r"parallel.virtual_stages is 2 and parallel.schedule is 1f1b"
    ):
        planned(*LONG_ROWS, "parallel.pipeline=2", "parallel.virtual_stages=2", world=8)


def test_a_plan_has_the_stages_and_the_schedule_of_the_recipe() -> None:
    plan = planned(
        *LONG_ROWS,
        "parallel.pipeline=2",
        "parallel.pipeline_split=[10, 6]",
        "parallel.schedule=zero_bubble",
        world=8,
    )
    assert [len(stage) for stage in plan.job.stages] == [10, 6]
    assert plan.job.layout.schedule == "zero_bubble"


def test_shipped_recipes_are_planned_or_refused_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("pretrain", "sft"):
        code, out, err = run_cli(capsys, name, "--json")
        assert code == 0 or len(err.strip().splitlines()) == 1, err
        printed: dict[str, Any] = json.loads(out) if code == 0 else {}
        assert code or printed["speed"]["per_gpu"] > 0


def test_flops_of_a_windowed_model_add_up_in_the_json_too() -> None:
    windowed = LLAMA.with_(sliding_window=1024, family="mistral")
    flops = as_dict(make_plan(PlanJob(windowed, 8192, 1, 1)))["flops_per_token"]
    assert flops["model_causal"] == pytest.approx(flops["matrices"] + flops["attention_causal"])
