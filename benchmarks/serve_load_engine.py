"""The engine process of `serve_load.py`: a model with random weights, made on the device, in place of one that is read from disk.

`python -m serve_load_engine` with this folder on PYTHONPATH; the server starts it. `opening` is what both the server and the run without
HTTP use, so that they compute the same.
"""

from __future__ import annotations

import random
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from headway.infer.engine.request import EngineEvent, EngineOptions, EngineRequest, EngineStats
from headway.serve.engine_process import OpenedEngine, main
from headway.serve.engine_setup import EngineFacts, EngineSetup
from headway.tokenizer.load import Tokenizer

SHAPES: dict[str, dict[str, Any]] = {
    "1b": {"preset": "llama-1b", "vocab_size": 128256, "max_seq_len": 36864},
    "small": {"preset": "laptop", "vocab_size": 1024, "max_seq_len": 4096},
    "tiny": {
        "hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 128, "vocab_size": 1024, "max_seq_len": 4096,
    },
}  # fmt: skip


PACED = "paced"
"""No model: an engine that gives every running request a random token in each step of STEP_SECONDS, to measure HTTP alone."""
STEP_SECONDS = 64 / 26_600
SHAPES[PACED] = {"vocab_size": 128256, "max_seq_len": 36864, "hidden_size": 8}


class PacedEngine:
    """As fast as the lock-step decoding of a 1B model on an H200, without a device."""

    def __init__(self, options: EngineOptions, vocab: int) -> None:
        self.options, self.vocab = options, vocab
        self.waiting: deque[tuple[int, int]] = deque()
        self.running: dict[int, int] = {}
        self.ended: list[int] = []
        self.next, self.generated, self.due = 0, 0, 0.0
        self.rng = random.Random(0)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self.ended)

    def submit(self, request: EngineRequest) -> int:
        self.waiting.append((self.next, request.max_new_tokens))
        self.next += 1
        return self.next - 1

    def cancel(self, request: int) -> None:
        if self.running.pop(request, None) is not None:
            self.ended.append(request)

    def step(self) -> list[EngineEvent]:
        self.due = max(self.due + STEP_SECONDS, time.perf_counter())
        time.sleep(max(0.0, self.due - time.perf_counter()))
        events = [EngineEvent(number, (), finished="cancelled") for number in self.ended]
        self.ended = []
        while self.waiting and len(self.running) < self.options.max_running:
            number, left = self.waiting.popleft()
            self.running[number] = left
        token = self.rng.randrange(self.vocab - 2)
        for number, left in list(self.running.items()):
            events.append(EngineEvent(number, (token,), finished=None if left > 1 else "length"))
            self.running[number] = left - 1
            if left == 1:
                del self.running[number]
        self.generated += len(events)
        return events

    def stats(self) -> EngineStats:
        return EngineStats(
            len(self.running), len(self.waiting), 0, 0, 0, 0, self.generated, 0, 0, 0
        )


def make_tokenizer(vocab: int) -> Tokenizer:
    """One id per byte and made-up words up to the size of a vocabulary, so that decoding costs what it costs for a real one."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters, rng = "abcdefghijklmnopqrstuvwxyz", np.random.default_rng(0)
    known = set(words)
    while len(words) < vocab - 2:
        word = "Ġ" * bool(rng.integers(2)) + "".join(
            letters[i] for i in rng.integers(0, 26, int(rng.integers(2, 8)))
        )
        if word not in known:
            known.add(word)
            words.append(word)
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, {"bos": "<s>", "eos": "</s>"})


def opening(setup: EngineSetup) -> OpenedEngine:
    """An engine with a model of the shape that the setup's path names."""
    if setup.path == PACED:
        tokenizer = make_tokenizer(SHAPES[PACED]["vocab_size"])
        facts = EngineFacts(
            setup.name,
            tokenizer,
            36864,
            128256,
            8,
            frozenset([tokenizer.eos_id or 0]),
            "none",
            "none",
            0,
        )
        return PacedEngine(setup.options, 128256), facts, lambda request, refs: request
    import torch

    from headway.infer.engine.engine import InferenceEngine
    from headway.infer.load import LoadedModel
    from headway.model.base import build_model
    from headway.model.config import ModelConfig
    from headway.runtime.device import choose_compute

    config = ModelConfig.model_validate(SHAPES[setup.path])
    compute = choose_compute(setup.device, setup.precision)
    with torch.device("meta"):
        model = build_model(config)
    model = model.to(compute.dtype).to_empty(device=compute.device).requires_grad_(False).eval()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0) if "norm" in name else parameter.normal_(
            std=0.02 if setup.path == "1b" else 0.2
        )
    tokenizer = make_tokenizer(config.vocab)
    assert tokenizer.eos_id is not None
    loaded = LoadedModel(model, config, tokenizer, Path(setup.path), frozenset([tokenizer.eos_id]))
    engine = InferenceEngine(loaded, setup.options)
    engine.warm_up()
    facts = EngineFacts(
        setup.name, tokenizer, config.max_seq_len, config.vocab, config.hidden_size, loaded.end_ids, str(compute.device),
        str(compute.dtype), sum(one.numel() for one in model.parameters()),
    )  # fmt: skip
    return engine, facts, lambda request, refs: request


def time_engine(
    setup: EngineSetup, work: Any, clients: int, warmup: float, seconds: float
) -> dict[str, float]:
    """Tokens per second of the engine alone, with as many requests at a time as there would be clients. `work()` makes a request."""
    engine, _, _ = opening(setup)
    for _ in range(clients):
        engine.submit(work())
    began, first = time.perf_counter(), None
    finished = 0
    while True:
        for event in engine.step():
            if event.finished is not None:
                finished += 1
                engine.submit(work())
        now = time.perf_counter()
        if first is None and now - began >= warmup:
            first = now, engine.stats()
        if first is not None and now - first[0] >= seconds:
            stats = engine.stats()
            passed = now - first[0]
            return {
                "tokens_per_second": (stats.generated_tokens - first[1].generated_tokens) / passed,
                "prompt_tokens_per_second": (stats.prompt_tokens - first[1].prompt_tokens) / passed,
                "seconds": passed,
                "requests": finished,
            }


if __name__ == "__main__":
    raise SystemExit(main(opening))
