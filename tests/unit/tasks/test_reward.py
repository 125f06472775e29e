"""Reward models: Bradley-Terry's formula, transformers' sequence classification and TRL's trainer on the same batch, however it is cut."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pair_steps import PairStep, train_pairs
from support.preference_pairs import pair_batch
from support.trl_pairs import LAYOUTS, MODEL, PAIRS

from headway.data.batch import Batch
from headway.export.huggingface import export_huggingface
from headway.model.base import ScoreHead
from headway.model.families.base import family_of
from headway.model.init import initial_value
from headway.model.layout import SCORE, param_specs
from headway.tasks.reward import Config

SCORING = MODEL.with_(score_head=True)
CONFIG = Config(margin=0.3, center_rewards_coefficient=0.05)


def weights() -> dict[str, torch.Tensor]:
    """Larger than at the start of a run, so that scores differ."""
    return {spec.name: 6 * initial_value(spec, SCORING, 1) for spec in param_specs(SCORING)}


def train(config: Config, microbatches: list[Batch]) -> PairStep:
    return train_pairs(SCORING, weights(), config, microbatches, num_pairs=len(PAIRS))


@pytest.fixture(scope="module")
def reference_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same model as transformers loads it from an export."""
    transformers = pytest.importorskip("transformers")
    folder: Path = tmp_path_factory.mktemp("reward") / "hf"
    export_huggingface(SCORING, weights().items(), folder, tokenizer=None)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert model.config.num_labels == 1
    model.config.pad_token_id = 0  # no answer ends with it
    return model


def inputs() -> dict[str, torch.Tensor]:
    """The pairs as TRL's collator lays them out: all chosen ones, then all rejected ones, padded at the right."""
    chosen_rows = [[*prompt, *chosen] for prompt, chosen, _ in PAIRS]
    rejected_rows = [[*prompt, *rejected] for prompt, _, rejected in PAIRS]
    rows = [*chosen_rows, *rejected_rows]
    assert all(row[-1] != 0 for row in rows)
    longest = max(map(len, rows))
    ids = [row + [0] * (longest - len(row)) for row in rows]
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_are_those_of_transformers_however_pairs_are_packed(
    reference_model: Any, layout: str
) -> None:
    step = train(CONFIG, [pair_batch(LAYOUTS[layout], seq_len=64, max_documents=12)])
    chosen, rejected = reference_model(**inputs()).logits.squeeze(-1).chunk(2)
    ranking_loss = -F.logsigmoid(chosen - rejected - 0.3).mean()
    expected = ranking_loss + 0.05 * ((chosen + rejected) ** 2).mean()
    reference_model.zero_grad()
    expected.backward()
    assert step.loss == pytest.approx(expected.item(), abs=1e-6)
    expected_gradients = {
        name: parameter.grad for name, parameter in reference_model.named_parameters()
    }
    exported_names = {family_of("llama").to_hf_name(name) for name in step.gradients}
    assert expected_gradients.keys() == exported_names
    for name, gradient in step.gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-5)
    assert step.gradients[SCORE].abs().max() > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_are_means_of_the_scores_however_pairs_are_packed(
    reference_model: Any, layout: str
) -> None:
    metrics = train(CONFIG, [pair_batch(LAYOUTS[layout], seq_len=64, max_documents=12)]).metrics
    chosen, rejected = reference_model(**inputs()).logits.detach().squeeze(-1).chunk(2)
    expected = {
        "rewards/chosen": chosen.mean().item(),
        "rewards/rejected": rejected.mean().item(),
        "rewards/mean": (chosen + rejected).mean().item() / 2,
        "rewards/margins": (chosen - rejected).mean().item(),
        "rewards/accuracies": (chosen > rejected).float().mean().item(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_loss_and_metrics_are_those_of_trls_trainer(reference_model: Any) -> None:
    pytest.importorskip("accelerate")
    trainer = pytest.importorskip("trl.trainer.reward_trainer").RewardTrainer
    as_trainer: Any = SimpleNamespace(
        model=reference_model,
        args=SimpleNamespace(center_rewards_coefficient=0.05),
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    reference_model.zero_grad()
    batch = inputs() | {"margin": torch.full((len(PAIRS),), 0.3)}
    expected = trainer.compute_loss(as_trainer, reference_model.train(), batch)
    expected.backward()
    step = train(CONFIG, [pair_batch([PAIRS], seq_len=64, max_documents=12)])
    assert step.loss == pytest.approx(expected.item(), abs=1e-6)
    logged = {name: values[0] for name, values in as_trainer._metrics["train"].items()}
    assert step.metrics["rewards/accuracies"] == pytest.approx(logged["accuracy"])
    assert step.metrics["rewards/margins"] == pytest.approx(logged["margin"], abs=1e-5)
    assert step.metrics["rewards/mean"] == pytest.approx(logged["mean_reward"], abs=1e-5)
    expected_gradient = reference_model.score.weight.grad
    torch.testing.assert_close(step.gradients[SCORE], expected_gradient, rtol=1e-4, atol=1e-5)


def test_microbatches_and_empty_rows_do_not_change_the_reward_loss() -> None:
    rows = [PAIRS[:2], PAIRS[2:]]
    whole = train(CONFIG, [pair_batch(rows, seq_len=64)])
    divided = train(CONFIG, [pair_batch([row], seq_len=64) for row in (*rows, [])])
    assert divided.loss == pytest.approx(whole.loss, abs=1e-6)
    assert divided.metrics == pytest.approx(whole.metrics, abs=1e-5)
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(divided.gradients[name], gradient, rtol=1e-5, atol=1e-6)


def test_without_settings_only_the_difference_of_scores_counts() -> None:
    microbatches = [pair_batch([PAIRS], seq_len=64, max_documents=12)]
    plain = train(Config(), microbatches).loss
    assert plain > 0
    assert plain != pytest.approx(train(CONFIG, microbatches).loss, abs=1e-3)


def test_a_document_is_scored_at_its_last_token_also_where_it_has_one() -> None:
    hidden = torch.arange(8.0).view(1, 4, 2)
    head = ScoreHead(hidden, torch.tensor([[1.0, 10.0]]))
    # documents of 1, 2 and 1 tokens: tokens 0, 2 and 3
    assert head.of_documents(torch.tensor([[0, 1, 3, 4]])).tolist() == [[0 + 10, 4 + 50, 6 + 70]]
