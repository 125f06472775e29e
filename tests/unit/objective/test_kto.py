"""KTO: TRL's own numbers, and however a step is packed and cut."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trl_pairs import MODEL, wave
from support.unpaired import random_records, steps_of, write_unpaired

from headway.data.batch import Batch, StepBatch, StepStats
from headway.infer.load import build_frozen_model
from headway.objective.base import StepInfo
from headway.objective.kto import Config
from headway.optim.adamw import Config as AdamW
from headway.parallel.assemble import assemble
from headway.parallel.engine import EngineSpec
from headway.train.dpo_reference import score_with

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "trl" / "kto.json").read_text())
RECORDS = list(zip(GOLDEN["prompts"], GOLDEN["answers"], GOLDEN["labels"], strict=True))


def step(config: Config, micro: list[Batch], records: int, shift: float) -> tuple[float, dict[str, float], dict[str, torch.Tensor]]:
    """Loss, metrics and gradients of one step over some microbatches."""
    reference = build_frozen_model(MODEL, wave(shift).items(), torch.device("cpu"), torch.float32)
    engine: Any = assemble(EngineSpec(MODEL, config, AdamW(), chunk_tokens=8, prepare=score_with(reference, 8)))
    engine.fill(wave(0.0).items())
    totals = {"records": float(records), "targets": 1.0, "rows": 1.0}
    result = engine.forward_backward(StepBatch(tuple(micro), totals, StepStats(1, 1, 1, 1, 1, 0)), StepInfo(0, 1))
    grads = {name: view.clone() for buffer in engine.buffers for name, view in buffer.gradients.items()}
    return float(result.loss), {name: float(a) / float(b) for name, (a, b) in result.metrics.items()}, grads


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['weights']} {case['shift']}")
def test_loss_gradients_and_metrics_are_those_of_trl(case: dict[str, Any], packing: str, tmp_path: Path) -> None:
    config = Config(beta=GOLDEN["beta"], desirable_weight=case["weights"][0], undesirable_weight=case["weights"][1])
    (whole,) = steps_of(write_unpaired(tmp_path / "s", RECORDS), seq_len=16, rows=4, micro_rows=1, packing=packing)
    loss, metrics, grads = step(config, list(whole.microbatches), 4, case["shift"])
    assert loss == pytest.approx(case["loss"], abs=1e-6)
    norm = torch.stack([grad.double().norm() for grad in grads.values()]).norm()
    assert float(norm) == pytest.approx(case["grad_norm"], rel=1e-5)
    for name, value in case["metrics"].items():
        assert metrics[name] == pytest.approx(value, abs=2e-6), name
    assert 0.0 <= metrics["rewards/accuracies"] <= 1.0


def test_microbatches_packing_and_empty_rows_change_nothing(tmp_path: Path) -> None:
    path = write_unpaired(tmp_path / "s", random_records(5, vocab=32, longest=8))
    config, found = Config(beta=0.5), []
    for rows, micro_rows, packing in ((6, 6, "best_fit"), (6, 2, "best_fit"), (6, 3, "pad")):
        (whole,) = steps_of(path, seq_len=16, rows=rows, micro_rows=micro_rows, packing=packing)
        found.append(step(config, list(whole.microbatches), 5, -0.4))
    assert found[0][1]["kl"] > 0
    for loss, metrics, grads in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-6)
        assert metrics == pytest.approx(found[0][1], abs=1e-5)
        for name, gradient in found[0][2].items():
            torch.testing.assert_close(grads[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_step_without_bad_answers_has_a_loss_and_no_margin(tmp_path: Path) -> None:
    good = [(prompt, answer, True) for prompt, answer, _ in RECORDS]
    (whole,) = steps_of(write_unpaired(tmp_path / "s", good), seq_len=16, rows=4)
    reference = build_frozen_model(MODEL, wave(0.1).items(), torch.device("cpu"), torch.float32)
    engine: Any = assemble(EngineSpec(MODEL, Config(), AdamW(), chunk_tokens=8, prepare=score_with(reference, 8)))
    engine.fill(wave(0.0).items())
    result = engine.forward_backward(whole, StepInfo(0, 1))
    assert torch.isfinite(result.loss)
    assert float(result.metrics["rewards/margins"][1]) == 0 and float(result.metrics["rewards/rejected"][1]) == 0
