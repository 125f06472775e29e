"""What variants and cases of `headway eval long` share: engines, pages, speeds and keys, with the answers that each case has alone."""

import itertools
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.byte_model import CONFIG, write_model
from support.runs import headway

from headway.eval import long_context
from headway.eval.long_cases import make_cases
from headway.eval.long_context import answer_cases, evaluate_long, mask_size
from headway.eval.options import LongPlan, LongQuestions
from headway.infer import generate
from headway.infer.engine.engine import InferenceEngine
from headway.infer.generate import GenerateOptions, generate_from_ids
from headway.infer.load import LoadedModel, load_model
from headway.infer.speed import GenerationSpeed
from headway.model.head_masks.baselines import random_draws
from headway.model.head_masks.choice import MaskVariant
from headway.model.head_masks.file import write_masks
from headway.model.head_masks.masks import HeadMasks

MASKS = HeadMasks(((True, False), (False, False)), 16, 4)
TASKS = ("key_value", "passkey")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_model(tmp_path_factory.mktemp("model"), CONFIG.with_(max_seq_len=2048))
    return load_model(folder)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[InferenceEngine]:
    """Every engine that is built."""
    built: list[InferenceEngine] = []
    build = generate.build_engine

    def counted(*arguments: Any, **named: Any) -> InferenceEngine:
        built.append(build(*arguments, **named))
        return built[-1]

    monkeypatch.setattr(generate, "build_engine", counted)
    return built


def questions(**changes: Any) -> LongQuestions:
    return LongQuestions(**{"depths": (0.0, 1.0), "samples": 1, **changes})


@pytest.mark.parametrize("masks", [None, MASKS], ids=["full", "masks"])
@pytest.mark.parametrize(("chunk", "builds"), [(None, 2), (60, 1)])
def test_answers_of_a_shared_engine_are_those_of_an_engine_for_each_case(
    loaded: LoadedModel,
    engines: list[InferenceEngine],
    masks: HeadMasks | None,
    chunk: int | None,
    builds: int,
) -> None:
    plan = LongPlan(TASKS, (350, 400), questions(chunk_tokens=chunk))
    assert loaded.tokenizer is not None
    cases = make_cases(loaded.tokenizer, plan)
    masked = loaded.with_masks(masks)
    together = answer_cases(masked, plan, cases, "full")
    assert len(engines) == builds, "by the size of chunks"

    engines.clear()
    for case, answer in zip(cases, together, strict=True):
        options = GenerateOptions(
            max(other.new_tokens for other in cases if other.task == case.task),
            case.case.stop,
            rows=1,
            chunk_tokens=plan.chunk(case.length),
        )
        (alone,) = generate_from_ids(masked, [("", case.ids)], options)
        assert answer == alone
    assert len(engines) == 8
    assert len({tuple(answer.token_ids) for answer in together}) > 4


@pytest.mark.parametrize(("rows", "slots"), [(None, 4), (3, 3)])
def test_as_many_prompts_as_there_are_run_at_once_unless_rows_says_less(
    loaded: LoadedModel, engines: list[InferenceEngine], rows: int | None, slots: int
) -> None:
    plan = LongPlan(TASKS, (350,), questions(rows=rows))
    assert loaded.tokenizer is not None
    answer_cases(loaded, plan, make_cases(loaded.tokenizer, plan), "full")
    (engine,) = engines
    assert engine.cache.slots == slots


@pytest.mark.parametrize("masks", [None, MASKS], ids=["full", "masks"])
def test_prompts_that_begin_alike_compute_their_beginning_once(
    loaded: LoadedModel, engines: list[InferenceEngine], masks: HeadMasks | None
) -> None:
    # RULER repeats one line of noise, so its prompts differ at their needles alone.
    plan = LongPlan(("ruler_niah_single_1",), (1600,), questions(samples=3))
    assert loaded.tokenizer is not None
    cases = make_cases(loaded.tokenizer, plan)
    masked = loaded.with_masks(masks)
    together = answer_cases(masked, plan, cases, "full")
    stats = engines[0].stats()
    prompts = sorted(case.ids for case in cases)
    shared = [common(*pair) // 64 * 64 for pair in itertools.pairwise(prompts)]
    worth_waiting = sum(tokens for tokens in shared if 4 * tokens >= 1425)
    assert worth_waiting >= 400
    # Rings of streaming heads are there at the places where a copy was kept.
    assert stats.cached_tokens >= (worth_waiting if masks is None else 64)
    assert stats.prompt_tokens + stats.cached_tokens == sum(map(len, prompts))
    for case, answer in zip(cases, together, strict=True):
        options = GenerateOptions(128, rows=1, chunk_tokens=plan.chunk(1600))
        assert answer == generate_from_ids(masked, [("", case.ids)], options)[0]


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Ids that two prompts begin with together."""
    same = [token == other for token, other in zip(first, second, strict=False)]
    return same.index(False)


def speeds_measured(monkeypatch: pytest.MonkeyPatch) -> list[HeadMasks | None]:
    """The masks of every measurement of speed; each has another result."""
    measured: list[HeadMasks | None] = []

    def measure(loaded: LoadedModel, length: int, **options: Any) -> GenerationSpeed:
        measured.append(loaded.masks)
        assert (length, options) == (350, {"rows": 4, "chunk_tokens": 43})
        return GenerationSpeed(100, len(measured), 10 * len(measured))

    monkeypatch.setattr("headway.infer.speed.measure_speed", measure)
    return measured


def variants() -> list[MaskVariant]:
    """The full model, masks, two draws of their size, and others with two full heads."""
    draws = random_draws(MASKS, 2, 0)
    larger = HeadMasks(((True, False), (False, True)), 16, 4)
    return [
        MaskVariant("full", None),
        MaskVariant("s=0.75", MASKS, "own", "masks"),
        *(
            MaskVariant(f"random {draw.seed}", draw.masks, "random", "random", "s=0.75", draw.seed)
            for draw in draws
        ),
        MaskVariant("s=0.5", larger, "own", "masks"),
    ]


def test_speed_is_measured_once_for_each_size_of_masks(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = speeds_measured(monkeypatch)
    plan = LongPlan(("key_value",), (350,), questions(depths=(0.0,)))
    results = evaluate_long(loaded, variants(), plan, results_dir=tmp_path).variants
    assert measured == [None, MASKS, variants()[-1].masks]
    assert [result.prefill_tokens_per_second for result in results] == [1, 2, 2, 2, 3]

    # A command that goes on finds the speed of a size in a stored result.
    (tmp_path / "random-0.json").unlink()
    again = evaluate_long(loaded, variants(), plan, results_dir=tmp_path).variants
    assert len(measured) == 3
    assert again == results


def test_masks_of_one_size_have_caches_of_one_size() -> None:
    import torch

    from headway.model.paged_cache import CacheShape

    config = CONFIG.with_(
        family="gemma3", num_layers=3, sliding_window=24, window_layers=(0, 1), max_seq_len=512
    )
    masks = HeadMasks(((True, True), (True, False), (False, False)), 16, 4)
    sizes: dict[tuple[object, ...], set[tuple[int, int]]] = {}
    for draw in random_draws(masks, 12, 0):
        shape = CacheShape(config, draw.masks, 512, 64, torch.float32)
        size = mask_size(config, draw.masks)
        sizes.setdefault(size, set()).add((shape.page_bytes, shape.state_bytes))
    assert len(sizes) == 3, "0, 1 or 2 of the full heads are in the layer without a window"
    assert all(len(of_size) == 1 for of_size in sizes.values())
    assert len({next(iter(of_size)) for of_size in sizes.values()}) == 3
    other_window = HeadMasks(masks.full, 20, 4)
    assert mask_size(config, masks) != mask_size(config, other_window)


def test_weights_are_summed_once_for_all_variants(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    speeds_measured(monkeypatch)
    calls: list[None] = []
    parameters = loaded.model.parameters

    def counted(*arguments: Any) -> Any:
        calls.append(None)
        return parameters(*arguments)

    monkeypatch.setattr(loaded.model, "parameters", counted)
    plan = LongPlan(("key_value",), (350,), questions(depths=(0.0,)))
    evaluate_long(loaded, variants(), plan, results_dir=tmp_path)
    assert len(calls) == 1
    keys = {json.loads(file.read_text())["key"] for file in tmp_path.iterdir()}
    assert len(keys) == len(variants())


def without_speeds(report: dict[str, Any]) -> dict[str, Any]:
    """A result without what a clock decides."""
    for variant in report["variants"]:
        del variant["prefill_tokens_per_second"]
        del variant["decode_tokens_per_second"]
    return report


@pytest.mark.slow
def test_an_evaluation_killed_between_measurements_ends_like_an_uninterrupted_one(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("headway.eval.long_report.can_draw", lambda: False)
    write_masks(MASKS, tmp_path / "masks.tsv")
    (tmp_path / "text.txt").write_text("the cat sat on the mat and then it went away " * 9)
    command = [
        "eval", "long", "--device", "cpu", "--model", str(loaded.path), "--tasks", "key_value,passkey", "--lengths", "350",
        "--depths", "0", "--samples", "1", "--masks", str(tmp_path / "masks.tsv"), "--random-draws", "2",
        "--data", str(tmp_path / "text.txt"), "--json",
    ]  # fmt: skip
    whole = headway(*command, "--out", str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr

    measure = long_context._Evaluation._measure

    def killed_at_a_draw(evaluation: Any, variant: MaskVariant) -> Any:
        if variant.kind == "random":
            os.kill(os.getpid(), signal.SIGKILL)
        return measure(evaluation, variant)

    out = tmp_path / "killed"
    with monkeypatch.context() as patched:
        patched.setattr(long_context._Evaluation, "_measure", killed_at_a_draw)
        assert headway(*command, "--out", str(out)).returncode == -signal.SIGKILL
    parts = sorted(file.name for file in (out / "parts").iterdir())
    assert parts == ["full.json", "s=0.75.json"]
    assert not (out / "report.md").exists()

    measured = tmp_path / "measured"

    def noted(evaluation: Any, variant: MaskVariant) -> Any:
        with open(measured, "a") as file:
            file.write(f"{variant.name}\n")
        return measure(evaluation, variant)

    monkeypatch.setattr(long_context._Evaluation, "_measure", noted)
    resumed = headway(*command, "--out", str(out))
    assert resumed.returncode == 0, resumed.stderr
    names = measured.read_text().splitlines()
    assert names == ["random s=0.75", "random 2 s=0.75", "first s=0.75", "windows"]
    assert without_speeds(json.loads(resumed.stdout)) == without_speeds(json.loads(whole.stdout))
