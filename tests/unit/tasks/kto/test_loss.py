"""KTO: TRL's own numbers, and however a step is packed and cut."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.batches import make_batch
from support.trl_pairs import MODEL, wave
from support.unpaired_records import random_records, steps_of, write_unpaired_store

from headway.data.batch import Batch, StepBatch, StepStats
from headway.model.base import build_frozen_model
from headway.optim.adamw import Config as AdamW
from headway.parallel.assemble import assemble
from headway.parallel.engine import EngineSpec
from headway.tasks.base import Collectives, SeenRows, StepInfo
from headway.tasks.kto import Config
from headway.tasks.kto.loss import KL_COMPLETIONS, KL_REFERENCE, RecordColumns
from headway.tasks.kto.source import LABEL
from headway.tasks.preference.loss import REFERENCE
from headway.train.frozen_model import score_with

ALONE: Collectives = None  # type: ignore[assignment] - the first pass communicates, the loss does not
GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "trl" / "kto.json").read_text())
RECORDS = list(zip(GOLDEN["prompts"], GOLDEN["answers"], GOLDEN["labels"], strict=True))


def engine_of(config: Config, shift: float) -> Any:
    """An engine whose reference differs from the model by a shift of its weights."""
    reference = build_frozen_model(MODEL, wave(shift).items(), torch.device("cpu"), torch.float32)
    engine: Any = assemble(
        EngineSpec(
            MODEL,
            config,
            AdamW(),
            chunk_tokens=8,
            prepare=score_with(reference, 8, RecordColumns()),
        )
    )
    engine.fill(wave(0.0).items())
    return engine


def step(
    config: Config, micro: list[Batch], records: int, shift: float
) -> tuple[float, dict[str, float], dict[str, torch.Tensor]]:
    """Loss, metrics and gradients of one step over some microbatches."""
    engine = engine_of(config, shift)
    totals = {"records": float(records), "targets": 1.0, "rows": 1.0}
    result = engine.forward_backward(
        StepBatch(tuple(micro), totals, StepStats(1, 1, 1, 1, 1, 0)), StepInfo(0, 1)
    )
    grads = {
        name: view.clone() for buffer in engine.buffers for name, view in buffer.gradients.items()
    }
    return (
        float(result.loss),
        {name: float(a) / float(b) for name, (a, b) in result.metrics.items()},
        grads,
    )


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
@pytest.mark.parametrize(
    "case", GOLDEN["cases"], ids=lambda case: f"{case['weights']} {case['shift']}"
)
def test_loss_gradients_and_metrics_are_those_of_trl(
    case: dict[str, Any], packing: str, tmp_path: Path
) -> None:
    config = Config(
        beta=GOLDEN["beta"],
        desirable_weight=case["weights"][0],
        undesirable_weight=case["weights"][1],
    )
    (whole,) = steps_of(
        write_unpaired_store(tmp_path / "s", RECORDS),
        seq_len=16,
        rows=4,
        micro_rows=1,
        packing=packing,
    )
    loss, metrics, grads = step(config, list(whole.microbatches), 4, case["shift"])
    assert loss == pytest.approx(case["loss"], abs=1e-6)
    norm = torch.stack([grad.double().norm() for grad in grads.values()]).norm()
    assert float(norm) == pytest.approx(case["grad_norm"], rel=1e-5)
    for name, value in case["metrics"].items():
        assert metrics[name] == pytest.approx(value, abs=2e-6), name
    assert 0.0 <= metrics["rewards/accuracies"] <= 1.0


@pytest.mark.parametrize("micro_rows", [1, 4])
def test_a_validation_has_the_numbers_of_trl_too(micro_rows: int, tmp_path: Path) -> None:
    """Its divergence comes from the mismatches of all of its microbatches, and from those of one."""
    path = write_unpaired_store(tmp_path / "s", RECORDS)
    (whole,) = steps_of(path, seq_len=16, rows=4, micro_rows=micro_rows, packing="pad")
    for case in GOLDEN["cases"]:
        good, bad = case["weights"]
        config = Config(beta=GOLDEN["beta"], desirable_weight=good, undesirable_weight=bad)
        sums = engine_of(config, case["shift"]).evaluate(
            list(whole.microbatches), StepInfo(0, 1, training=False)
        )
        metrics = {name: float(total) / float(weight) for name, (total, weight) in sums.items()}
        assert metrics["loss"] == pytest.approx(case["loss"], abs=1e-6)
        for name, value in case["metrics"].items():
            assert metrics[name] == pytest.approx(value, abs=2e-6), name


def test_microbatches_packing_and_empty_rows_change_neither_loss_nor_divergence(
    tmp_path: Path,
) -> None:
    path = write_unpaired_store(tmp_path / "s", random_records(5, vocab=32, longest=8))
    config = Config(beta=0.5)
    results = []
    for rows, micro_rows, packing in ((6, 6, "best_fit"), (6, 2, "best_fit"), (6, 3, "pad")):
        (whole,) = steps_of(path, seq_len=16, rows=rows, micro_rows=micro_rows, packing=packing)
        results.append(step(config, list(whole.microbatches), 5, -0.4))
    assert results[0][1]["kl"] > 0
    for loss, metrics, grads in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-6)
        assert metrics == pytest.approx(results[0][1], abs=1e-5)
        for name, gradient in results[0][2].items():
            torch.testing.assert_close(grads[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_step_without_bad_answers_has_a_loss_and_no_margin(tmp_path: Path) -> None:
    good = [(prompt, answer, True) for prompt, answer, _ in RECORDS]
    (whole,) = steps_of(write_unpaired_store(tmp_path / "s", good), seq_len=16, rows=4)
    result = engine_of(Config(), 0.1).forward_backward(whole, StepInfo(0, 1))
    assert torch.isfinite(result.loss)
    assert float(result.metrics["rewards/margins"][1]) == 0
    assert float(result.metrics["rewards/rejected"][1]) == 0


def scored(gains: list[float], labels: list[int]) -> tuple[Any, Batch]:
    """Answers of one token, whose model and reference give them log-probabilities that differ by these gains; -1 is an empty slot."""
    batch = make_batch([[2] * len(gains)], seq_len=2 * len(gains) + 2, vocab=8)
    slots = batch.bounds.shape[1] - 1
    reference = torch.zeros(1, slots)
    label = torch.full((1, slots), -1)
    log_probs = torch.zeros_like(batch.loss_weight)
    for index, (gain, kind) in enumerate(zip(gains, labels, strict=True)):
        log_probs[0, 2 * index] = -3.0 + gain
        reference[0, index] = -3.0
        label[0, index] = kind
    log_probs[0, -1] = -50.0  # padding carries no loss
    out: Any = SimpleNamespace(head=SimpleNamespace(scores=lambda targets: (log_probs, None)))
    return out, replace(batch, extra={REFERENCE: reference, KL_REFERENCE: reference, LABEL: label})


def test_loss_and_metrics_by_hand_where_the_divergence_is_one() -> None:
    config = Config(beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    out, batch = scored([0.5, 2.0, 0.75, 0.5], [1, 1, 1, 0])
    # KL completions of the step: gains 3 and -1, a record without one does not count; six good answers and two bad ones
    first_pass = torch.tensor(
        [[3.0, 1, 1, 0], [-1.0, 1, 0, 1], [9.0, 0, 0, 0]] + [[0.0, 0, 1, 0]] * 5 + [[0.0, 0, 0, 1]]
    )
    loss = config.build().loss(
        out, batch, StepInfo(0, 1, seen={KL_COMPLETIONS: SeenRows(first_pass)}), ALONE
    )

    def bad(x: float) -> float:
        return 1 - 1 / (1 + math.exp(-x))

    expected = 2 * (bad(0.5 * -0.5) + bad(0.5 * 1.0) + bad(0.5 * -0.25)) + 3 * bad(0.5 * 0.5)
    assert float(loss.terms["kto"].sum) == pytest.approx(expected, rel=1e-6)
    sums = {name: (float(total), float(weight)) for name, (total, weight) in loss.metrics.items()}
    # of the good answers only the second gained more than 1; the bad one gained less
    assert sums["rewards/accuracies"] == (2.0, 4.0)
    assert sums["kl"] == (4.0, 4.0)
    assert sums["rewards/chosen"] == pytest.approx((0.5 * 3.25, 3.0))
    assert sums["rewards/rejected"] == pytest.approx((0.25, 1.0))
    assert sums["logps/chosen"] == pytest.approx((-9.0 + 3.25, 3.0))
    assert sums["logps/rejected"] == pytest.approx((-2.5, 1.0))
    # this microbatch has four of the step's eight answers: its shares of both means, and half of the weight
    assert sums["rewards/margins"] == pytest.approx((0.5 * 3.25 / 6 - 0.25 / 2, 0.5))
    valid = (
        config.build()
        .loss(
            out,
            batch,
            StepInfo(0, 1, training=False, seen={KL_COMPLETIONS: SeenRows(first_pass)}),
            ALONE,
        )
        .metrics["loss"]
    )
    assert (float(valid[0]), float(valid[1])) == (pytest.approx(expected, rel=1e-6), 4.0)


def test_a_first_pass_holds_gain_and_label_of_every_slot() -> None:
    out, batch = scored([0.5, 2.0], [1, 0])
    rows = Config().build().read_kl_completions(out, batch)
    assert rows[:2].tolist() == [pytest.approx([0.5, 1, 1, 0]), pytest.approx([2.0, 1, 0, 1])]
    assert not rows[2:, 1:].any()
    # a record whose mismatch lost its whole answer says nothing of the divergence
    weight = batch.loss_weight.clone()
    weight[0, 2] = 0.0
    assert Config().build().read_kl_completions(out, replace(batch, loss_weight=weight))[
        1, 1:
    ].tolist() == [0, 0, 1]


def test_a_model_that_is_its_own_reference_is_right_by_chance(tmp_path: Path) -> None:
    (whole,) = steps_of(
        write_unpaired_store(tmp_path / "s", RECORDS),
        seq_len=16,
        rows=4,
        micro_rows=4,
        packing="best_fit",
    )
    _, metrics, _ = step(Config(), list(whole.microbatches), 4, 0.0)
    assert (metrics["kl"], metrics["rewards/margins"]) == (0.0, 0.0)
    assert metrics["rewards/accuracies"] == 0.5
