"""Reward models: Bradley-Terry's formula, transformers' sequence classification and TRL's trainer on the same batch, however it is cut."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pairs import pair_batch
from support.trl_pairs import LAYOUTS, MODEL, PAIRS

from headway.data.batch import Batch, StepBatch, StepStats
from headway.export.huggingface import export_huggingface
from headway.model.families.base import family_of
from headway.model.init import initial_value
from headway.model.layout import SCORE, param_specs
from headway.model.score import ScoreHead
from headway.optim.adamw import Config as AdamW
from headway.parallel.assemble import assemble
from headway.parallel.engine import EngineSpec
from headway.tasks.base import StepInfo
from headway.tasks.reward import Config

SCORING = MODEL.with_(score_head=True)
CONFIG = Config(margin=0.3, center_rewards_coefficient=0.05)


def weights() -> dict[str, torch.Tensor]:
    """Larger than at the start of a run, so that scores differ."""
    return {one.name: 6 * initial_value(one, SCORING, 1) for one in param_specs(SCORING)}


def step(
    config: Config, micro: list[Batch]
) -> tuple[float, dict[str, float], dict[str, torch.Tensor]]:
    """Loss, metrics and gradients of one step over some microbatches."""
    engine: Any = assemble(EngineSpec(SCORING, config, AdamW()))
    engine.fill(weights().items())
    totals = {"pairs": float(len(PAIRS)), "targets": 1.0, "rows": 1.0}
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


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same model as transformers loads it from an export."""
    transformers = pytest.importorskip("transformers")
    folder: Path = tmp_path_factory.mktemp("reward") / "hf"
    export_huggingface(SCORING, weights().items(), folder, tokenizer=None)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForSequenceClassification" and model.config.num_labels == 1
    model.config.pad_token_id = 0  # no answer ends with it
    return model


def inputs() -> dict[str, torch.Tensor]:
    """The pairs as TRL's collator lays them out: all chosen ones, then all rejected ones, padded at the right."""
    rows = [
        [*prompt, *answer]
        for side in (1, 2)
        for pair in PAIRS
        for prompt, answer in [(pair[0], pair[side])]
    ]
    assert all(row[-1] != 0 for row in rows)
    longest = max(map(len, rows))
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {
        "input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in rows]),
        "attention_mask": mask,
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_are_those_of_transformers_however_pairs_are_packed(
    theirs: Any, layout: str
) -> None:
    loss, metrics, grads = step(CONFIG, [pair_batch(LAYOUTS[layout], seq_len=64, max_documents=12)])
    chosen, rejected = theirs(**inputs()).logits.squeeze(-1).chunk(2)
    right = -F.logsigmoid(chosen - rejected - 0.3).mean() + 0.05 * ((chosen + rejected) ** 2).mean()
    theirs.zero_grad()
    right.backward()
    assert loss == pytest.approx(right.item(), abs=1e-6)
    found = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert found.keys() == {family_of("llama").to_theirs(name) for name in grads}
    for name, gradient in grads.items():
        torch.testing.assert_close(gradient, found[name], rtol=1e-4, atol=1e-5)
    assert metrics["rewards/chosen"] == pytest.approx(chosen.mean().item(), abs=1e-5)
    assert metrics["rewards/rejected"] == pytest.approx(rejected.mean().item(), abs=1e-5)
    assert metrics["rewards/mean"] == pytest.approx((chosen + rejected).mean().item() / 2, abs=1e-5)
    assert metrics["rewards/margins"] == pytest.approx((chosen - rejected).mean().item(), abs=1e-5)
    assert metrics["rewards/accuracies"] == pytest.approx(float((chosen > rejected).float().mean()))
    assert grads[SCORE].abs().max() > 0


def test_loss_and_metrics_are_those_of_trls_trainer(theirs: Any) -> None:
    pytest.importorskip("accelerate")
    trainer = pytest.importorskip("trl.trainer.reward_trainer").RewardTrainer
    as_trainer: Any = SimpleNamespace(
        model=theirs,
        args=SimpleNamespace(center_rewards_coefficient=0.05),
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    theirs.zero_grad()
    right = trainer.compute_loss(
        as_trainer, theirs.train(), inputs() | {"margin": torch.full((len(PAIRS),), 0.3)}
    )
    right.backward()
    loss, metrics, grads = step(CONFIG, [pair_batch([PAIRS], seq_len=64, max_documents=12)])
    assert loss == pytest.approx(right.item(), abs=1e-6)
    logged = {name: values[0] for name, values in as_trainer._metrics["train"].items()}
    assert metrics["rewards/accuracies"] == pytest.approx(logged["accuracy"])
    assert metrics["rewards/margins"] == pytest.approx(logged["margin"], abs=1e-5)
    assert metrics["rewards/mean"] == pytest.approx(logged["mean_reward"], abs=1e-5)
    torch.testing.assert_close(grads[SCORE], theirs.score.weight.grad, rtol=1e-4, atol=1e-5)


def test_microbatches_and_empty_rows_change_nothing() -> None:
    whole = step(CONFIG, [pair_batch([PAIRS[:2], PAIRS[2:]], seq_len=64)])
    parts = step(CONFIG, [pair_batch([row], seq_len=64) for row in (PAIRS[:2], PAIRS[2:], [])])
    assert parts[:2] == (pytest.approx(whole[0], abs=1e-6), pytest.approx(whole[1], abs=1e-5))
    for name, gradient in whole[2].items():
        torch.testing.assert_close(parts[2][name], gradient, rtol=1e-5, atol=1e-6)


def test_without_settings_only_the_difference_of_scores_counts() -> None:
    plain = step(Config(), [pair_batch([PAIRS], seq_len=64, max_documents=12)])
    assert plain[0] != pytest.approx(
        step(CONFIG, [pair_batch([PAIRS], seq_len=64, max_documents=12)])[0], abs=1e-3
    )
    assert plain[0] > 0


def test_a_document_is_scored_at_its_last_token_also_where_it_has_one() -> None:
    hidden = torch.arange(8.0).view(1, 4, 2)
    head = ScoreHead(hidden, torch.tensor([[1.0, 10.0]]))
    # documents of 1, 2 and 1 tokens: tokens 0, 2 and 3
    assert head.of_documents(torch.tensor([[0, 1, 3, 4]])).tolist() == [[0 + 10, 4 + 50, 6 + 70]]
