"""A step of sampled answers in a plan: its rows are those that a run makes, its prompts those that the engine reads, its phases
add up, and its memory is that of the larger phase."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.byte_model import CONFIG, byte_tokenizer
from support.rollout_runs import rollout_recipe, write_rollout_inputs

from headway.cli import main
from headway.config.load import load
from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.parallel.layouts import Layout
from headway.plan.compute import head_seconds
from headway.plan.hardware import GPUS
from headway.plan.job import PlanJob, PromptLengths, RolloutShape, SamplerCopy
from headway.plan.memory import moments
from headway.plan.result import Plan, as_dict, make_plan
from headway.plan.rollout import (
    decode_answers,
    decode_step,
    hand_over_seconds,
    prefill_tokens,
)
from headway.plan.search import best_plans
from headway.plan.table import tables
from headway.rollout.rows import StepRows, TrainedAnswer, answer_step
from headway.rollout.sampler import AnswerRequest, PolicySampler, SamplerSettings
from headway.runtime.device import choose_compute
from headway.train.config import Recipe
from headway.train.memory import describe_job
from headway.train.planning import PlanTarget, plan_job, read_lengths
from headway.train.resolve import resolve
from headway.train.rollouts import open_prompts

ROOT = Path(__file__).parents[3]
LLAMA_1B = ModelConfig(preset="llama-1b", vocab_size=128256)
SETTINGS = [
    "model.preset=llama-1b",
    "model.vocab_size=128256",
    "precision=bf16",
    "data.train=[{path: prompts.jsonl, kind: prompt}]",
    "data.seq_len=2560",
    "objective.kind=grpo",
    "rollout.prompts=64",
    "rollout.samples=8",
    "rollout.max_new_tokens=512",
    "rollout.at_once=512",
    "reward=number",
    "batch.micro_rows=4",
]
"""The job of benchmarks/grpo.py."""


def planned(*settings: str, world: int = 1, prompt: int | None = 128, **target: Any) -> Plan:
    recipe = load(Recipe, None, [*SETTINGS, *settings])
    return make_plan(plan_job(recipe, PlanTarget(GPUS["h200"], world, prompt, **target)))


def shape_of(**changes: Any) -> RolloutShape:
    shape = RolloutShape(
        prompts=64,
        samples=8,
        max_new_tokens=512,
        prompt=PromptLengths(128, 128),
        answer_tokens=512,
        documents_per_row=64,
    )
    return replace(shape, **changes)


def job_of(model: ModelConfig = LLAMA_1B, at_once: int = 512, **changes: Any) -> PlanJob:
    copy = SamplerCopy(model, at_once, 640)
    job = PlanJob(model, 2560, 4, 32, sampler=copy, rollout=shape_of())
    return replace(job, **changes)


# ---- rows and microbatches


@pytest.mark.parametrize(
    ("answers", "length", "seq_len", "documents", "micro_rows", "ranks"),
    [
        (12, 10, 64, 16, 2, 1),
        (12, 10, 64, 4, 2, 1),
        (37, 9, 64, 16, 2, 3),
        (5, 60, 64, 16, 4, 2),
        (64, 21, 64, 16, 1, 4),
    ],
)
def test_an_update_has_the_microbatches_that_a_run_packs(
    answers: int, length: int, seq_len: int, documents: int, micro_rows: int, ranks: int
) -> None:
    trained = [
        TrainedAnswer((1,) * (length - 4), (2,) * 4, np.zeros(4, np.float32), 0.5)
        for _ in range(answers)
    ]
    rows = StepRows(seq_len, documents, micro_rows, 0, ranks)
    packed = answer_step(trained, rows, 0).batch.microbatches
    shape = shape_of(
        prompts=answers,
        samples=1,
        prompt=PromptLengths(length - 4, length - 4),
        answer_tokens=4,
        documents_per_row=documents,
    )
    assert shape.microbatches(seq_len, micro_rows, ranks) == len(packed)


def test_eight_ranks_share_rows_and_prompts() -> None:
    plan = planned(world=8)
    # 512 documents of 640 tokens, four in a row, four rows in a microbatch: 32 microbatches, 4 each.
    assert (plan.job.rows, plan.job.accumulate) == (4, 4)
    assert plan.job.step_tokens == 512 * 640
    assert plan.rollout is not None
    assert plan.rollout.rank_answers == 64
    assert plan.rollout.decoding.running == 64


def test_updates_divide_the_answers_and_the_time_of_a_rollout() -> None:
    one = planned().rollout
    four = planned("rollout.updates=4").rollout
    assert one is not None
    assert four is not None
    assert planned("rollout.updates=4").job.accumulate == 8
    for phase in ("hand_over", "prefill", "decoding", "passes"):
        assert four.phases[phase] == pytest.approx(one.phases[phase] / 4, rel=0.01)
    # The answers of a rollout are scored before the first of several updates.
    assert one.phases["scoring"] == 0
    assert 0.2 * four.phases["passes"] < four.phases["scoring"] < 0.5 * four.phases["passes"]


def test_two_passes_score_the_answers_once() -> None:
    one = planned("rollout.updates=2").rollout
    two = planned("rollout.updates=2", "rollout.passes=2").rollout
    assert one is not None
    assert two is not None
    assert two.phases["scoring"] == pytest.approx(one.phases["scoring"] / 2)
    assert two.phases["decoding"] == pytest.approx(one.phases["decoding"] / 2)
    assert two.phases["passes"] == pytest.approx(one.phases["passes"])


# ---- prompts


@pytest.mark.parametrize("length", [5, 64, 65, 70])
def test_prompts_are_read_as_often_as_the_engine_reads_them(length: int) -> None:
    model = CONFIG.with_(max_seq_len=96, init_std=0.3)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        return ((spec.name, initial_value(spec, model, 1)) for spec in param_specs(model))

    settings = SamplerSettings(
        model=model,
        device=torch.device("cpu"),
        dtype=torch.float32,
        end_ids=frozenset(),
        max_new_tokens=3,
        longest_prompt=length,
        at_once=16,
        cache_bytes=None,
        seed=3,
        folder=Path(),
    )
    sampler = PolicySampler(settings, byte_tokenizer(), weights())
    requests = [
        AnswerRequest((prompt,) * length, f"{prompt}:{sample}")
        for prompt in range(2)
        for sample in range(4)
    ]
    sampler.sample(requests, 1.0)
    shape = shape_of(prompts=2, samples=4, prompt=PromptLengths(length, length))
    job = job_of(model, rollout=shape)
    assert prefill_tokens(job) == sampler._engine.stats().prompt_tokens


def test_lengths_of_prompts_are_read_from_data(tmp_path: Path) -> None:
    write_rollout_inputs(tmp_path)
    recipe = rollout_recipe(tmp_path, "plan")
    lengths = read_lengths(recipe, resolve(recipe).tokenizer)
    assert lengths is not None
    # 20 questions of four letters behind one template.
    assert lengths.num_read == 20
    assert lengths.mean == lengths.longest
    job = plan_job(recipe, PlanTarget(GPUS["h200"]))
    assert job.rollout is not None
    assert job.rollout.prompt == lengths
    (text,) = [table for table in tables(make_plan(job)) if table.title == "Rollout"]
    assert "of 20 that were read" in dict(text.rows)["tokens of a prompt"]


def test_lengths_that_cannot_be_read_are_assumed_and_said_so() -> None:
    plan = planned(prompt=None)
    assert plan.rollout is not None
    # Rows of 2,560 tokens leave 2,048 beside an answer.
    assert plan.rollout.shape.prompt == PromptLengths(256, 2048)
    (text,) = [table for table in tables(plan) if table.title == "Rollout"]
    assert "assumed" in dict(text.rows)["tokens of a prompt"]
    short = planned("data.seq_len=600", prompt=None).rollout
    assert short is not None
    assert short.shape.prompt == PromptLengths(88, 88)


@pytest.mark.parametrize(
    ("settings", "target", "message"),
    [
        ([], {"prompt": 2049}, "--prompt-tokens is 2049; data.seq_len=2560 leaves 2048"),
        ([], {"answer_tokens": 513}, "--answer-tokens is 513; rollout.max_new_tokens is 512"),
        (["rollout.samples=1"], {}, "rollout.samples is 1"),
        (["data.seq_len=512"], {}, "data.seq_len is 512; a row must hold"),
    ],
)
def test_lengths_and_settings_that_cannot_be_are_refused(
    settings: list[str], target: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        planned(*settings, **target)


def test_lengths_of_answers_are_refused_where_nothing_is_sampled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["plan", "model.preset=llama-1b", "model.vocab_size=1024", "--answer-tokens", "5"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--answer-tokens is 5, but objective next_token samples no answers" in error


# ---- decoding


def test_answers_of_equal_length_need_a_step_for_each_token() -> None:
    decoding = decode_answers(job_of())
    assert decoding.steps == 512
    assert decoding.batch == 512
    assert decoding.context == 128 + 256


def test_answers_run_in_waves_where_fewer_slots_are_reserved() -> None:
    decoding = decode_answers(job_of(at_once=128))
    assert decoding.steps == 4 * 512
    assert decoding.batch == 128


def test_the_last_answers_end_one_after_another() -> None:
    # A mean of 256 of at most 512 tokens: lengths from 0 to 512, so the longest needs 512 steps.
    decoding = decode_answers(job_of(rollout=shape_of(answer_tokens=256)))
    assert decoding.steps == 512
    assert decoding.batch == 256
    # The mean position in an answer, over tokens: 512 / 3.
    assert decoding.context == pytest.approx(128 + 512 / 3)


@pytest.mark.parametrize(
    ("context", "batch", "milliseconds"), [(2048, 1, 1.207), (32768, 8, 3.291), (131072, 8, 9.033)]
)
def test_steps_of_decoding_are_near_those_measured(
    context: int, batch: int, milliseconds: float
) -> None:
    # benchmarks/README.md, Decoding, dense on one H200; its steps draw nothing.
    step = decode_step(job_of(), batch, context)
    assert 1000 * (step.total - step.drawing) == pytest.approx(milliseconds, rel=0.07)


def test_few_answers_wait_for_bytes_and_many_for_arithmetic() -> None:
    few = decode_step(job_of(), 1, 100)
    many = decode_step(job_of(), 2048, 100)
    assert not few.is_compute_bound
    assert many.is_compute_bound
    # All weights but the norms, 2 bytes each at 80 % of 4.8 TB/s.
    matrices = sum(spec.size for spec in param_specs(LLAMA_1B) if spec.is_matrix)
    assert few.weights == pytest.approx(2 * matrices / (0.8 * 4.8e12), rel=1e-6)
    # At least 2 FLOPs for each of them and each answer, at 70 % of 989 TFLOP/s.
    assert many.weights > 2048 * 2 * matrices / (0.7 * 989e12)
    # Keys and values: 16 layers of 8 heads of 64, twice, in 2 bytes, at 85 % of the bandwidth.
    assert many.cache == pytest.approx(2048 * 100 * 16 * 2 * 8 * 64 * 2 / (0.85 * 4.8e12))


def test_a_window_bounds_what_is_read_of_the_cache() -> None:
    windowed = LLAMA_1B.with_(sliding_window=32, window_layers=tuple(range(8)))
    whole = decode_step(job_of(), 64, 512).cache
    assert decode_step(job_of(windowed), 64, 512).cache == pytest.approx(
        whole * (512 + 32) / (2 * 512)
    )


def test_a_mixture_reads_the_experts_that_any_answer_takes() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "num_layers": 1,
        "num_heads": 8,
        "ffn_size": 512,
        "vocab_size": 1024,
        "max_seq_len": 4096,
    }
    dense = ModelConfig(**sizes)
    mixture = dense.with_(experts={"num": 64, "per_token": 8})
    read_dense = decode_step(job_of(dense), 1, 100).weights
    read_one = decode_step(job_of(mixture), 1, 100).weights
    read_many = decode_step(job_of(mixture), 64, 100).weights
    expert = 3 * 512 * 1024 * 2 / (0.8 * 4.8e12)
    # One answer takes 8 experts where the dense layer has one feed-forward of the same size.
    assert read_one - read_dense == pytest.approx(7 * expert, rel=0.05)
    # 64 answers leave (7 / 8)^64 of 64 experts alone, which is none.
    assert read_many - read_dense == pytest.approx(63 * expert, rel=0.05)


# ---- phases


def test_phases_add_up_to_the_step_and_rewards_are_unknown() -> None:
    plan = planned()
    figures = as_dict(plan)["rollout"]
    known = [seconds for seconds in figures["seconds"].values() if seconds is not None]
    assert figures["seconds"]["rewards"] is None
    assert figures["shares"]["rewards"] is None
    assert sum(known) == pytest.approx(plan.step_seconds)
    assert sum(share for share in figures["shares"].values() if share) == pytest.approx(1)
    assert figures["answers_per_second"] == pytest.approx(512 / plan.step_seconds)
    assert plan.tokens_per_second == pytest.approx(512 * 640 / plan.step_seconds)
    rows = {row[0]: row[1] for table in tables(plan) for row in table.rows}
    assert rows["rewards"] == "not known before a run"


def test_the_weights_are_handed_over_in_fp32_and_gathered_where_ranks_share_them() -> None:
    alone = hand_over_seconds(job_of())
    parameters = sum(spec.size for spec in param_specs(LLAMA_1B))
    # 4 bytes are read and 2 written; two launches for each of the 146 parameters.
    num_parameters = len(list(param_specs(LLAMA_1B)))
    assert alone == pytest.approx(6 * parameters / (0.8 * 4.8e12) + 2 * num_parameters * 4.5e-6)
    shared = hand_over_seconds(job_of(layout=Layout(8, strategy="fsdp")))
    # 7 / 8 of the fp32 numbers over a link of 450 GB/s at 78 %.
    assert shared - alone > 4 * parameters * 7 / 8 / (0.78 * 450e9)


def test_a_reference_takes_time_and_the_base_of_an_adapter_no_memory() -> None:
    lora = planned("adapter.rank=16")
    beta = planned("adapter.rank=16", "objective.beta=0.1")
    assert lora.rollout is not None
    assert beta.rollout is not None
    assert lora.rollout.phases["reference"] == 0
    assert beta.rollout.phases["reference"] > 0.1 * beta.rollout.phases["passes"]
    assert beta.rollout.phases["passes"] == pytest.approx(lora.rollout.phases["passes"])
    assert beta.memory.total == lora.memory.total
    # Full weights need a second model.
    full = planned()
    referred = planned("objective.beta=0.1")
    assert referred.memory.total - full.memory.total == pytest.approx(2 * 1.2358e9, rel=0.02)


def test_a_divergence_in_the_reward_is_scored_once_for_all_passes() -> None:
    in_loss = planned("objective.beta=0.1", "rollout.passes=4").rollout
    in_reward = planned("objective.beta=0.1", "rollout.passes=4", "objective.kl_in=reward").rollout
    assert in_loss is not None
    assert in_reward is not None
    assert in_reward.phases["reference"] == pytest.approx(in_loss.phases["reference"] / 4)
    assert in_reward.phases["passes"] == pytest.approx(in_loss.phases["passes"])


def test_ahead_makes_answers_older_and_takes_turns() -> None:
    ahead = planned("rollout.ahead=1", "rollout.updates=4").rollout
    after = planned("rollout.updates=4").rollout
    assert ahead is not None
    assert after is not None
    assert (ahead.staleness, after.staleness) == (4, 0)
    assert ahead.seconds == after.seconds


def test_the_loss_of_answers_computes_logits_twice() -> None:
    job = job_of()
    plain = head_seconds(replace(job, rollout=None))
    policy = head_seconds(job)
    assert policy.weights == plain.weights
    # The product once more, and 102 bytes instead of 6 of each token and id.
    tokens_and_ids = job.tokens * 128256
    moved = (102 - 6) * tokens_and_ids / (0.8 * 4.8e12)
    assert policy.total - plain.total == pytest.approx(moved + plain.weights, rel=1e-6)


# ---- memory


def test_the_peak_is_that_of_the_larger_phase() -> None:
    plan = planned()
    assert plan.rollout is not None
    sampling = plan.rollout.memory["sampling"]
    training = plan.rollout.memory["training"]
    assert plan.memory.total == max(sampling.total, training.total)
    assert training.kinds["activations"] > 0
    assert sampling.kinds["activations"] == 0
    assert sampling.kinds["gradients"] == 0
    for kind in ("weights", "masters", "optimizer state", "sampler", "cache of answers"):
        assert sampling.kinds[kind] == training.kinds[kind] > 0
    # Tokens of 512 answers are drawn from 128,256 ids, with three numbers in double for each.
    assert sampling.kinds["drawing of tokens"] == int(1.01 * 512 * 128256 * 24)


def test_sampling_is_the_peak_where_updates_are_small() -> None:
    plan = planned("data.seq_len=640", "batch.micro_rows=1", "rollout.at_once=4096")
    assert plan.rollout is not None
    assert plan.memory.total == plan.rollout.memory["sampling"].total
    assert plan.memory.kinds["drawing of tokens"] > 0


def test_gradients_stay_on_a_cpu_while_answers_are_sampled() -> None:
    job = job_of().memory_job()
    assert moments(job)["sampling"]["gradients"] == 0
    on_cpu = moments(replace(job, on_cuda=False))
    assert on_cpu["sampling"]["gradients"] == on_cpu["end"]["gradients"] > 0


def test_a_run_estimates_the_bytes_of_its_plan(tmp_path: Path) -> None:
    write_rollout_inputs(tmp_path)
    recipe = rollout_recipe(tmp_path, "plan", "rollout.at_once=16", "data.seq_len=256")
    resolved = resolve(recipe)
    plan = plan_job(recipe, PlanTarget(GPUS["h200"], 2)).memory_job()
    compute = choose_compute("cpu", "bf16")
    batch = recipe.batch.resolve(recipe.data.seq_len, 2)
    opened = describe_job(recipe, resolved.model, compute, batch, 2, open_prompts(resolved))
    for name in ("sampler_weights", "answer_cache", "answer_logits", "accumulate", "rows"):
        assert getattr(opened, name) == getattr(plan, name)
    # Before data is open, a run reserves for the longest prompt that rows have room for.
    unopened = describe_job(recipe, resolved.model, compute, batch, 2)
    longest = plan_job(recipe, PlanTarget(GPUS["h200"], 2, 256 - 8)).memory_job()
    assert unopened.answer_cache == longest.answer_cache
    assert unopened.answer_cache > plan.answer_cache


# ---- the command


@pytest.mark.slow
def test_a_search_keeps_the_rollout_and_finds_layouts() -> None:
    job = planned(world=8).job
    plans = best_plans(job, 3)
    assert plans
    for plan in plans:
        assert plan.rollout is not None
        assert plan.job.step_tokens == job.step_tokens


def test_the_command_prints_the_phases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *SETTINGS, "--prompt-tokens", "128", "--answer-tokens", "300"]) == 0
    text = capsys.readouterr().out
    for title in ("Rollout", "Memory by phase", "Time of a step (estimate)"):
        assert title in text
    assert main(["plan", *SETTINGS, "--json", "--answer-tokens", "300"]) == 0
    figures = json.loads(capsys.readouterr().out)["rollout"]
    assert figures["answer_tokens"] == 300
    assert figures["memory"].keys() == {"sampling", "training"}


# ---- beside a measured run


@pytest.mark.parametrize("page", ["docs/plan.md", "docs/plan.zh-CN.md"])
def test_the_page_has_the_plan_of_the_measured_run(page: str) -> None:
    rollout = planned().rollout
    assert rollout is not None
    peak = max(estimate.total for estimate in rollout.memory.values())
    generation = rollout.phases["prefill"] + rollout.phases["decoding"]
    training = rollout.phases["passes"] + rollout.phases["update"]
    text = (ROOT / page).read_text(encoding="utf-8")
    for figure in (
        f"| 52.2 GiB | {peak / 2**30:.1f} GiB | {100 * (peak / 2**30 / 52.2 - 1):+.0f} % |",
        f"| 11.95 s | {rollout.seconds:.2f} s | {100 * (rollout.seconds / 11.95 - 1):+.0f} % |",
        f"| 5.72 s | {generation:.2f} s | {100 * (generation / 5.72 - 1):+.0f} % |",
        f"| 4.29 s | {generation:.2f} s | {100 * (generation / 4.29 - 1):+.0f} % |",
        f"| 6.10 s | {training:.2f} s | {100 * (training / 6.10 - 1):+.0f} % |",
        f"| 7 ms | {1000 * rollout.phases['hand_over']:.0f} ms |",
    ):
        assert figure in text
