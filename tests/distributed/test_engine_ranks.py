"""The inference engine on ranks that share the layers: the same tokens as on one, whatever is scheduled."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.byte_model import CONFIG, write_model
from support.engine_fuzz import MIXTURE, MODEL, FuzzModels, FuzzReport, fuzz
from support.ranks import run_ranks

from headway.errors import ConfigError
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.memory import build_cache
from headway.infer.engine.part import ModelPart
from headway.infer.engine.ranks import build_engine, follow, load_on_ranks
from headway.infer.engine.request import EngineOptions, EngineRequest, Speculation
from headway.infer.generate import GenerateOptions, generate
from headway.infer.load import LoadedModel, load_model
from headway.infer.sampling import Sampling
from headway.model.config import ModelConfig
from headway.model.head_masks.masks import HeadMasks
from headway.parallel.collectives import RankGroup

UNEVEN = HeadMasks(((True, False), (True, False)), window=6, sinks=2)
"""The first of two ranks has full heads only, the second none."""
MIXED = HeadMasks(((True, False), (False, False)), window=10, sinks=3)
SHAPES: dict[str, ModelConfig] = {
    "two KV heads, odd vocabulary": CONFIG.with_(max_seq_len=96, vocab_size=321),
    "one KV head, tied": CONFIG.with_(max_seq_len=96, num_kv_heads=1, tie_embeddings=True),
    "latent attention": CONFIG.with_(
        max_seq_len=96, family="deepseek_v3", num_kv_heads=None, head_dim=None, rope_interleaved=True,
        latent_attention={"kv_rank": 12, "q_rank": 10, "nope_head_dim": 6, "rope_head_dim": 4, "value_head_dim": 8},
        experts={"num": 4, "per_token": 2, "ffn_size": 16, "shared_ffn_size": 16, "router": "sigmoid", "first_dense": 1, "num_groups": 2},
    ),
    "linear attention": CONFIG.with_(
        max_seq_len=96, family="qwen3_5", norm="rmsnorm1p", qk_norm=True, attention_gate=True, rotary_fraction=0.5,
        linear_attention={"key_heads": 2, "value_heads": 4, "key_head_dim": 6, "value_head_dim": 5, "layers": (0,)},
    ),
    "short convolution": CONFIG.with_(
        max_seq_len=96, family="lfm2", qk_norm=True, short_convolution={"taps": 4, "bias": True, "layers": (0,)},
    ),
    "state space": CONFIG.with_(
        max_seq_len=96, family="granitemoehybrid",
        state_space={"heads": 4, "head_dim": 8, "state_size": 6, "layers": (0,)},
    ),
    "experts, biases and sinks": CONFIG.with_(
        max_seq_len=96, family="gpt_oss", attention_sinks=True, qkv_bias=True, output_bias=True,
        experts={"num": 4, "per_token": 2, "ffn_size": 16, "router_bias": True, "bias": True, "swiglu_limit": 0.8},
    ),
}  # fmt: skip


def requests() -> list[EngineRequest]:
    """Some with the same beginning, greedy and sampled, with penalties and log-probabilities."""
    rng = random.Random(5)
    begin = tuple(rng.randrange(256) for _ in range(24))
    kinds = [
        Sampling(),
        Sampling(0.9, seed=3),
        Sampling(1.1, top_k=9),
        Sampling(0.8, top_p=0.8),
        Sampling(repetition_penalty=1.3),
    ]
    listed = []
    for number in range(6):
        prompt = (begin if number % 2 else ()) + tuple(
            rng.randrange(256) for _ in range(rng.choice([1, 5, 13]))
        )
        listed.append(
            EngineRequest(
                prompt, 14, kinds[number % 5], key=str(number), ignore_eos=number % 3 == 0
            )
        )
    return listed


def answers(
    loaded: LoadedModel, options: EngineOptions, cancelled: int | None = None
) -> dict[str, Any]:
    """All tokens, with requests that come over time; one of them may be cancelled on its way."""
    engine = build_engine(loaded, options)
    left = list(enumerate(requests()))
    tokens = dict[int, list[int]]()
    steps = 0
    while left or engine.busy:
        for number, request in left[:2]:
            assert engine.submit(request) == number
            tokens[number] = []
        left = left[2:]
        if cancelled is not None and steps == 6:
            engine.cancel(cancelled)
        for event in engine.step():
            tokens[event.request] += event.tokens
        steps += 1
    stats = engine.stats()
    return {
        "tokens": tokens,
        "preempted": stats.preempted,
        "cached": stats.cached_tokens,
        "bytes": engine.cache.num_bytes,
    }


def small_budget(loaded: LoadedModel) -> int:
    shape = build_cache(loaded, EngineOptions(max_running=4, page_tokens=8), 96).shape
    return 8 * shape.page_bytes


def cases(loaded: LoadedModel, budget: int) -> dict[str, Any]:
    roomy = EngineOptions(max_running=3, page_tokens=8, prefill_tokens=16)
    if loaded.config.vocab == 320:
        return {"lag": answers(loaded, replace(roomy, lag=True))}
    results: dict[str, Any] = {
        f"masks {masks}": answers(loaded.with_masks(masks), roomy)
        for masks in (None, UNEVEN, MIXED)
    }
    results["cancelled"] = answers(loaded, roomy, cancelled=2)
    results["ngram"] = answers(loaded, replace(roomy, speculation=Speculation(None, tokens=3)))
    results["small"] = answers(loaded, replace(roomy, cache_bytes=budget, max_running=4))
    embedded = InferenceEngine(loaded, roomy)
    embedded.submit(EngineRequest((1, 2, 3), 0, embed=True))
    results["embedding"] = next(event.embedding for event in embedded.step())
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_model(tmp_path_factory.mktemp("model"), config)
        for name, config in SHAPES.items()
    }


@pytest.mark.slow
def test_ranks_that_share_layers_answer_like_one(folders: dict[str, Path]) -> None:
    def on_ranks(group: RankGroup) -> dict[str, Any]:
        models = {name: load_model(folder, group=group) for name, folder in folders.items()}
        results = {name: cases(loaded, small_budget(loaded)) for name, loaded in models.items()}
        loaded = models["experts, biases and sinks"]
        with pytest.raises(ConfigError, match=r"--tensor is 2 and adapters"):
            InferenceEngine(loaded, EngineOptions(), {"a": Path("a")})
        with pytest.raises(ConfigError, match=r"--tensor is 2 and --speculate"):
            InferenceEngine(loaded, EngineOptions(speculation=Speculation("draft")))
        return results

    ranks = run_ranks(on_ranks, 2)
    for name, folder in folders.items():
        loaded = load_model(folder)
        alone = cases(loaded, small_budget(loaded))
        for rank in ranks:
            answered = rank[name]
            for case in alone:
                if case == "embedding":
                    assert answered[case] == pytest.approx(alone[case], abs=1e-5)
                elif case == "cancelled":
                    assert answered[case]["tokens"] == alone[case]["tokens"]
                    assert 0 < len(answered[case]["tokens"][2]) < 14
                else:
                    assert answered[case]["tokens"] == alone[case]["tokens"], (name, case)
            if "small" in alone:
                assert answered["small"]["preempted"] > 0
                assert answered["masks None"]["cached"] > 0


def test_what_cannot_be_shared_is_refused_before_a_rank_is_started(
    folders: dict[str, Path],
) -> None:
    with pytest.raises(
        ConfigError, match=r"--tensor is 3; it must divide model.num_heads=4. Use 2\."
    ):
        load_on_ranks(next(iter(folders.values())), 3, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("config", [MODEL, MIXTURE], ids=["media", "experts"])
def test_ranks_that_share_layers_give_the_plain_loops_answers_in_any_schedule(
    tmp_path: Path, config: ModelConfig
) -> None:
    """Grammars, log-probabilities, media, preemption: every feature but adapters and draft models."""

    def on_ranks(group: RankGroup) -> FuzzReport:
        models = FuzzModels(tmp_path / str(group.rank), config, group)
        return fuzz(models, range(440, 445), 20, 5)

    first, second = run_ranks(on_ranks, 2, timeout=300)
    assert first.differences == []
    assert second.differences == []
    assert first.features == second.features
    assert first.preempted == second.preempted
    assert first.preempted > 5
    wanted = {"grammar", "failing grammar", "logprobs", "prompt logprobs"}
    wanted.add("media" if config is MODEL else "routes")
    assert wanted <= set(first.features)


class PipedFollowers:
    """Commands for one other rank, which this test has forked."""

    def __init__(self, writing: int) -> None:
        self.file = os.fdopen(writing, "wb")

    def send(self, command: tuple[Any, ...] | None) -> None:
        pickle.dump(command, self.file)
        self.file.flush()

    def watched(self) -> nullcontext[None]:
        return nullcontext()


def commands(reading: int) -> Iterator[Any]:
    with os.fdopen(reading, "rb") as file:
        while (command := pickle.load(file)) is not None:
            yield command


def test_the_first_rank_leads_the_others(folders: dict[str, Path]) -> None:
    folder = next(iter(folders.values()))
    options = EngineOptions(max_running=3, max_waiting=5, page_tokens=8)
    reading, writing = os.pipe()

    def on_ranks(group: RankGroup) -> Any:
        loaded = load_model(folder, group=group)
        if group.rank:
            return follow(commands(reading), loaded)
        followers = PipedFollowers(writing)
        loaded = replace(loaded, part=ModelPart(group, followers))  # pyright: ignore[reportArgumentType]
        with pytest.raises(ConfigError, match="cache_bytes"):
            build_engine(loaded, replace(options, cache_bytes=10))
        answered = [
            answers(loaded.with_masks(masks), options, cancelled=1)["tokens"]
            for masks in (None, UNEVEN)
        ]
        followers.send(None)
        return answered

    answered = run_ranks(on_ranks, 2)[0]
    os.close(reading)
    os.close(writing)
    loaded = load_model(folder)
    assert answered == [
        answers(loaded.with_masks(masks), options, cancelled=1)["tokens"]
        for masks in (None, UNEVEN)
    ]


def generate_command(folder: Path, *more: str) -> subprocess.Popen[str]:
    words = [
        sys.executable,
        "-m",
        "headway",
        "generate",
        "--model",
        str(folder),
        "--device",
        "cpu",
        *more,
    ]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def children(process: int) -> list[int]:
    return [
        int(process_id)
        for task in Path(f"/proc/{process}/task").iterdir()
        for process_id in (task / "children").read_text().split()
    ]


@pytest.mark.slow
def test_generate_starts_its_ranks_and_ends_when_one_is_gone(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = next(iter(folders.values()))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n' * 100_000)
    output = tmp_path / "answers.jsonl"
    endless = generate_command(
        folder,
        "--input",
        str(prompts),
        "--output",
        str(output),
        "--max-new-tokens",
        "9",
        "--tensor",
        "2",
    )
    end = time.monotonic() + 30
    while not (output.is_file() and output.stat().st_size) and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(children(endless.pid)[0], signal.SIGKILL)
    assert (
        "rank 1 of 2 has ended with exit code -9; the engine cannot continue."
        in endless.communicate(timeout=20)[1]
    )
    assert endless.returncode == 1
    alone = generate(load_model(folder), ["a"], GenerateOptions(9))[0]
    with open(output) as lines:
        assert json.loads(next(lines))["generations"][0]["text"] == alone.text


@pytest.mark.drill
def test_a_server_whose_ranks_share_the_layers_answers_like_one_and_restarts(
    folders: dict[str, Path],
) -> None:
    pytest.importorskip("uvicorn")
    pytest.importorskip("httpx")
    from support.serving import RunningServer, serving

    model = f"m={next(iter(folders.values()))}"

    def ask(server: RunningServer, number: int) -> str:
        body = {
            "model": "m",
            "prompt": f"the cat {number % 3}",
            "max_tokens": 9,
            "temperature": number % 2,
            "seed": number,
        }
        return server.client().post("/v1/completions", json=body).json()["choices"][0]["text"]

    texts: list[list[str]] = []
    for more in ([], ["--tensor", "2"]):
        with serving("--model", model, "--device", "cpu", *more, stand_in=False) as server:
            with ThreadPoolExecutor(4) as pool:
                texts.append(list(pool.map(lambda number: ask(server, number), range(12))))
            if more:
                engine = children(server.process.pid)[0]
                os.kill(children(engine)[0], signal.SIGKILL)
                end = time.monotonic() + 60
                while "It is started again" not in server.log() and time.monotonic() < end:
                    time.sleep(0.2)
                while server.client().get("/health").status_code != 200 and time.monotonic() < end:
                    time.sleep(0.2)
                assert "rank 1 of 2 has ended with exit code -9" in server.log()
                assert ask(server, 1) == texts[0][1]
    assert texts[0] == texts[1]
