"""After a warm-up no launch is of a new kind: nothing is compiled, recorded or allocated for the first requests."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_fuzz import CONTEXT, FuzzModels, RequestPool, TokenRule

from headway.infer.engine.device import EngineDevice
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.request import EngineOptions, EngineRequest, Speculation
from headway.infer.engine.sampler import MOST_LISTED, RowChoice, Sampler, has_penalties
from headway.infer.engine.warm_up import EngineAbilities, prompt_lengths, warm_up_batches
from headway.model.paged_layer import PrefillPiece

OPTIONS = EngineOptions(max_running=3, page_tokens=8, prefill_tokens=16, max_waiting=2, lag=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> FuzzModels:
    return FuzzModels(tmp_path_factory.mktemp("models"))


class RecordedStep:
    """Stands in for a recorded step: a replay is the step itself."""

    def __init__(self, device: EngineDevice, rows: int) -> None:
        self.device = device
        self.rows = rows

    def replay(self) -> None:
        self.device._step(self.device._batch(self.rows))


class Launches:
    """What is launched, by what compilers, recorders and planners tell apart; and steps that are recorded, as on a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds: set[tuple[Any, ...]] = set()
        self.sizes: set[int] = set()
        """Tokens of prompts in one launch."""
        prefill = EngineDevice.prefill
        logits = EngineDevice.logits
        choose = Sampler.choose
        record = self.record

        def seen_prefill(
            device: EngineDevice,
            pieces: Sequence[PrefillPiece],
            tokens: Sequence[Sequence[int]],
            media: Any = None,
            adapters: Sequence[int] = (),
        ) -> torch.Tensor:
            total = sum(piece.count for piece in pieces)
            has_past = any(piece.start > 0 for piece in pieces)
            self.sizes.add(total)
            self.kinds.add((device.model, "prefill", "one token", total == 1, has_past))
            self.kinds.add((device.model, "prefill", "one piece", len(pieces) == 1, has_past))
            self.kinds.add((device.model, "prefill", "size", total.bit_length()))
            self.kinds.add((device.model, "prefill", "media", media is not None))
            self.kinds.add((device.model, "prefill", "adapters", any(adapters)))
            return prefill(device, pieces, tokens, media, adapters)

        def seen_logits(device: EngineDevice, hidden: torch.Tensor) -> torch.Tensor:
            self.kinds.add((device.model, "logits", len(hidden).bit_length()))
            return logits(device, hidden)

        def seen_choose(
            sampler: Sampler, scores: torch.Tensor, rows: Sequence[RowChoice]
        ) -> torch.Tensor:
            sampled = [row.sampling for row in rows if row.sampling.temperature > 0]
            lists = all(
                sampling.top_k is not None and sampling.top_k <= MOST_LISTED for sampling in sampled
            )
            if not sampled:
                way = "greedy"
            elif lists:
                way = "listed"
            else:
                way = "sorted"
            self.kinds.add((sampler, "choose", way))
            self.kinds.add(
                (sampler, "choose", "penalties", any(has_penalties(row.sampling) for row in rows))
            )
            self.kinds.add(
                (sampler, "choose", "bias", any(row.sampling.logit_bias for row in rows))
            )
            self.kinds.add((sampler, "choose", "mask", any(row.mask is not None for row in rows)))
            return choose(sampler, scores, rows)

        monkeypatch.setattr(EngineDevice, "prefill", seen_prefill)
        monkeypatch.setattr(EngineDevice, "logits", seen_logits)
        monkeypatch.setattr(
            EngineDevice, "_record", lambda device, batch: record(device, batch.rows)
        )
        monkeypatch.setattr(Sampler, "choose", seen_choose)

    def record(self, device: EngineDevice, rows: int) -> None:
        self.kinds.add((device.model, "recorded", rows))
        device._graphs[rows] = RecordedStep(device, rows)  # pyright: ignore[reportArgumentType]

    @staticmethod
    def on_a_gpu(engine: InferenceEngine) -> InferenceEngine:
        """Let an engine on the CPU record its steps; rows without a part exist on a GPU alone, so there is a step of every size."""
        devices = [engine._device]
        if (
            engine._speculator is not None
            and engine.options.speculation is not None
            and engine.options.speculation.draft is not None
        ):
            devices.append(engine._speculator.proposer._device)  # pyright: ignore[reportAttributeAccessIssue]
        for device in devices:
            device.records = True
            device.has_first_times = True
            device._sizes = list(range(1, device.cache.slots + 1))
        return engine


def run(
    engine: InferenceEngine, requests: Sequence[EngineRequest], rng: random.Random
) -> list[list[int]]:
    """Submit in small groups, as clients come."""
    left = list(requests)
    tokens: dict[int, list[int]] = {}
    while left or engine.busy:
        while left and engine.num_waiting < engine.options.max_waiting and rng.random() < 0.7:
            tokens[engine.submit(left.pop(0))] = []
        for event in engine.step():
            tokens[event.request] += event.tokens
    return [tokens[number] for number in sorted(tokens)]


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("ngram", "draft")]


@pytest.mark.parametrize("speculation", ["none", *SLOW])
def test_no_launch_of_the_first_requests_is_of_a_new_kind(
    models: FuzzModels, speculation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guess = {
        "none": None,
        "ngram": Speculation(None, 3),
        "draft": Speculation(str(models.draft), 3),
    }[speculation]
    launches = Launches(monkeypatch)
    engine = launches.on_a_gpu(
        InferenceEngine(
            models.load(), replace(OPTIONS, speculation=guess), models.adapters, TokenRule
        )
    )
    engine.warm_up()
    warmed = set(launches.kinds)
    assert set(prompt_lengths(OPTIONS.prefill_tokens, OPTIONS.prefill_tokens)) <= launches.sizes
    assert {rows for _, kind, rows, *_ in warmed if kind == "recorded"} == {1, 2, 3}
    requests = [
        request
        for request in RequestPool(models, 7, 16).requests
        if not request.constraint or "make" not in request.constraint
    ]
    run(engine, requests, random.Random(1))
    assert [kind[1:] for kind in launches.kinds - warmed] == []


def test_an_engine_without_warm_up_meets_new_kinds(
    models: FuzzModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the test above can fail."""
    launches = Launches(monkeypatch)
    engine = launches.on_a_gpu(InferenceEngine(models.load(), OPTIONS, models.adapters, TokenRule))
    run(engine, RequestPool(models, 7, 6).requests, random.Random(1))
    assert len(launches.kinds) > 12


@contextmanager
def counted_variants(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[Any, ...]]]:
    """Stands in for the compiler, which makes a variant for sizes of one and one for all others."""
    variants: set[tuple[Any, ...]] = set()

    def compiled(method: Callable[..., Any], **_: object) -> Callable[..., Any]:
        def call(*tensors: torch.Tensor) -> Any:
            variants.add(
                (method, *(tuple(size == 1 for size in tensor.shape[:2]) for tensor in tensors))
            )
            return method(*tensors)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    yield variants


def test_nothing_is_compiled_for_the_first_requests(
    models: FuzzModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted_variants(monkeypatch) as variants:
        engine = InferenceEngine(
            models.load(), replace(OPTIONS, compile_blocks=True), constraints=TokenRule
        )
        engine.warm_up()
        warmed = len(variants)
        assert warmed > 0
        requests = [
            request for request in RequestPool(models, 9, 16).requests if request.adapter is None
        ]
        run(engine, requests, random.Random(2))
        assert len(variants) == warmed


def test_a_warm_up_leaves_an_engine_as_it_was(
    models: FuzzModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        request for request in RequestPool(models, 11, 8).requests if request.constraint is None
    ]
    options = replace(OPTIONS, speculation=Speculation(None, 3))
    expected = run(
        InferenceEngine(models.load(), options, models.adapters), requests, random.Random(3)
    )
    launches = Launches(monkeypatch)
    engine = launches.on_a_gpu(InferenceEngine(models.load(), options, models.adapters))
    reset = engine._reset_counters
    cached: list[int] = []

    def seen_reset() -> None:
        cached.append(engine.stats().cached_tokens)
        reset()

    monkeypatch.setattr(engine, "_reset_counters", seen_reset)
    engine.warm_up()
    assert cached == [0], "no prompt found its pages computed by an earlier batch"
    stats = engine.stats()
    assert stats == replace(
        stats,
        prompt_tokens=0,
        cached_tokens=0,
        generated_tokens=0,
        finished=0,
        preempted=0,
        steps=0,
        proposed_tokens=0,
    )
    assert stats.cache_bytes_used == 0
    assert stats.first_token_seconds == ()
    assert not engine.busy
    assert run(engine, requests, random.Random(3)) == expected


def test_an_engine_that_works_is_only_recorded(
    models: FuzzModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Launches(monkeypatch).on_a_gpu(InferenceEngine(models.load(), OPTIONS))
    number = engine.submit(EngineRequest((1, 2, 3), 9, ignore_eos=True))
    engine.step()
    engine.warm_up()
    tokens = [
        token
        for _ in range(99)
        if engine.busy
        for event in engine.step()
        for token in event.tokens
        if event.request == number
    ]
    alone = InferenceEngine(models.load(), OPTIONS)
    alone.submit(EngineRequest((1, 2, 3), 9, ignore_eos=True))
    expected = [
        token for _ in range(99) if alone.busy for event in alone.step() for token in event.tokens
    ]
    assert tokens == expected[-len(tokens) :]
    assert len(tokens) >= 8


def test_on_a_cpu_nothing_waits_to_be_done_and_a_warm_up_takes_no_time(
    models: FuzzModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(monkeypatch)
    InferenceEngine(models.load(), OPTIONS, models.adapters).warm_up()
    assert launches.kinds == set()


def test_every_batch_fits_any_engine() -> None:
    """Whatever its context, memory and rounds: no request of a warm-up is longer than what the engine takes."""
    rng = random.Random(5)
    for _ in range(200):
        rows = rng.choice([1, 3, 64])
        context, room, round_tokens = (rng.choice([4, 9, 33, 700, 5000]) for _ in range(3))
        can = EngineAbilities(
            context, room, round_tokens, sorted({1, rows}), vocab=rng.choice([2, 50])
        )
        for batch in warm_up_batches(can):
            for request in batch.requests:
                assert len(request.prompt) + request.max_new_tokens <= min(context, room)
                assert max(request.prompt) < max(3, can.vocab)
    assert prompt_lengths(8192, 100_000)[0] > 8192
    assert {1, 2, 3, 1024, 3072, 8192} <= set(prompt_lengths(8192, 100_000))
    assert warm_up_batches(EngineAbilities(3, 3, 8, [1], 9)) == []


def test_a_model_with_its_own_vision_tower_reads_a_picture() -> None:
    can = EngineAbilities(64, 256, 32, [1, 2], 50, picture_width=8)
    pictures = [
        request.media
        for batch in warm_up_batches(can)
        for request in batch.requests
        if request.media is not None
    ]
    assert len(pictures) == 3, "two at once, and one alone"
    for media in pictures:
        assert media.features["warm-up"].shape == (6, 8)
        # Two rows and three columns take three positions of the six.
        assert media.rotary_shift() == -3


def test_batches_of_a_real_engine_are_few(tmp_path: Path) -> None:
    """The work of a warm-up is bounded: about a dozen rounds of the longest prompts."""
    can = EngineAbilities(32768, 1 << 20, 8192, [1, 2, 4, 8, 16, 32, 48, 64], 128_000)
    batches = warm_up_batches(can)
    assert sum(len(request.prompt) for batch in batches for request in batch.requests) < 16 * 8192
    assert len(batches) < 100
    assert CONTEXT < 8192


def test_the_steps_of_a_draft_model_are_recorded_too(
    models: FuzzModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(monkeypatch)
    engine = launches.on_a_gpu(
        InferenceEngine(
            models.load(), replace(OPTIONS, speculation=Speculation(str(models.draft), 3))
        )
    )
    assert engine._speculator is not None
    engine._speculator.proposer.warm_up()
    assert {rows for _, kind, rows in launches.kinds if kind == "recorded"} == {1, 2, 3}


def test_a_size_that_finds_no_memory_is_reported_and_the_engine_starts(
    models: FuzzModels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Launches(monkeypatch).on_a_gpu(InferenceEngine(models.load(), OPTIONS))
    prefill = engine._device.prefill

    def small_prefill(pieces: Sequence[PrefillPiece], *more: Any) -> torch.Tensor:
        if sum(piece.count for piece in pieces) > 12:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prefill(pieces, *more)

    monkeypatch.setattr(engine._device, "prefill", small_prefill)
    engine.warm_up()
    assert "find no memory" in caplog.text
    assert not engine.busy
    assert engine.stats().cache_bytes_used == 0
    assert (
        len(run(engine, [EngineRequest((1, 2, 3), 5, ignore_eos=True)], random.Random(1))[0]) == 5
    )
