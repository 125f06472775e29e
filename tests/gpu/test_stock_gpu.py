"""A class of transformers on a GPU: loss and gradients are near those of the CPU, and recorded steps give the texts of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.batches import make_batch
from support.stock_cases import build_stock, save_stock

from headway.checkpoint.stored_model import find_model
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.request import EngineOptions, EngineRequest
from headway.infer.load import load_model
from headway.model.base import build_frozen_model

pytest.importorskip("transformers", minversion="5.0")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("kind", ["starcoder2", "phi", "vaultgemma"])
def test_loss_and_gradients_in_bf16_are_near_those_of_the_cpu_in_fp32(
    kind: str, tmp_path: Path
) -> None:
    found = find_model(save_stock(build_stock(kind), tmp_path / kind))
    batch = make_batch([[7, 9], [16], [3, 4, 5]], seq_len=16, vocab=64)
    losses, grads = [], []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        model = (
            build_frozen_model(found.config, found.weights(), torch.device(device), dtype)
            .train()
            .requires_grad_(True)
        )
        moved = batch.to(torch.device(device))
        loss = model.forward_batch(moved).head.nll(moved.targets, moved.loss_weight).total
        loss.backward()
        losses.append(float(loss.detach()))
        grads.append(
            torch.cat(
                [
                    one.grad.float().cpu().flatten()
                    for one in model.parameters()
                    if one.grad is not None
                ]
            )
        )
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert torch.nn.functional.cosine_similarity(grads[0], grads[1], dim=0) > 0.98


@pytest.mark.parametrize("kind", ["starcoder2", "opt", "exaone4"])
def test_recorded_steps_of_the_engine_give_the_texts_of_the_cpu(kind: str, tmp_path: Path) -> None:
    folder = save_stock(build_stock(kind), tmp_path / kind)
    texts = []
    for device in ("cpu", "cuda"):
        engine = InferenceEngine(
            load_model(folder, device=device, dtype=torch.float32), EngineOptions(max_running=4)
        )
        numbers = [
            engine.submit(EngineRequest(tuple(range(3, 3 + size)), 12, ignore_eos=True))
            for size in (3, 9, 20)
        ]
        found: dict[int, list[int]] = {number: [] for number in numbers}
        while engine.busy:
            for event in engine.step():
                found[event.request] += event.tokens
        texts.append([found[number] for number in numbers])
    assert texts[0] == texts[1]
