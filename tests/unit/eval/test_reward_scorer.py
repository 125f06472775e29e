"""The reward kind `model` gives the scores of `headway eval reward`, one by one and batched."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.byte_model import CONFIG, byte_tokenizer, write_model

from headway.errors import ConfigError
from headway.eval.reward import evaluate_reward
from headway.eval.reward_data import RewardSource
from headway.eval.reward_scorer import open_reward_model, tensors_digest
from headway.eval.rewards import read_rewards, score_file
from headway.infer.load import load_model
from headway.rewards.model import Config
from headway.runtime.digests import DIGESTS

REWARD = CONFIG.with_(score_head=True, tie_embeddings=False, max_seq_len=96)
QUESTION = [{"role": "user", "content": "2+2?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")
    return write_model(tmp_path_factory.mktemp("reward"), REWARD, tokenizer)


def settings(folder: Path, **more: Any) -> Config:
    return Config(path=str(folder), device="cpu", **more)


def inputs(*texts: str) -> list[dict[str, Any]]:
    return [{"messages": QUESTION, "text": text, "tools": None} for text in texts]


def test_scores_are_those_of_eval_reward(folder: Path, tmp_path: Path) -> None:
    texts = ["4", "it is four", "x" * 200]
    data = tmp_path / "data.jsonl"
    record = {"messages": QUESTION, "generations": texts}
    data.write_text(json.dumps(record) + "\n")
    out = tmp_path / "out.jsonl"
    evaluate_reward(load_model(folder, scores=True), RewardSource(str(data)), out=out)
    expected = json.loads(out.read_text())["rewards"]
    assert open_reward_model(settings(folder)).score(inputs(*texts)) == expected

    report = score_file(str(data), read_rewards([f"{{kind: model, path: {folder}}}"]))
    assert report.mean == pytest.approx(sum(expected) / 3)
    assert report.failures == 0


def test_batches_do_not_change_scores(folder: Path) -> None:
    texts = [chr(97 + number) * number for number in range(20)]
    together = open_reward_model(settings(folder)).score(inputs(*texts))
    apart = open_reward_model(settings(folder, batch_tokens=1)).score(inputs(*texts))
    assert together == pytest.approx(apart, rel=1e-5)


def test_an_empty_answer_has_a_score(folder: Path) -> None:
    (score,) = open_reward_model(settings(folder)).score(inputs(""))
    assert isinstance(score, float)


def test_an_answer_that_cannot_be_written_costs_itself(folder: Path) -> None:
    scorer = open_reward_model(settings(folder))
    bad = {"messages": [{"role": "nobody", "content": "?"}], "text": "4", "tools": None}
    problem, score = scorer.score([bad, *inputs("4")])
    assert isinstance(problem, str)
    assert [score] == scorer.score(inputs("4"))


def test_an_error_of_the_model_costs_the_answers_it_meets(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = open_reward_model(settings(folder))
    expected = scorer.score(inputs("4", "long answer", "5"))
    plain = scorer._loaded.model.hidden_states

    def hidden_states(tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        if tokens.shape[1] > 40:
            raise RuntimeError("CUDA out of memory")
        return plain(tokens, position)

    monkeypatch.setattr(scorer._loaded.model, "hidden_states", hidden_states)
    scores = scorer.score(inputs("4", "long answer " * 4, "5"))
    assert scores[1] == "the model fails: CUDA out of memory"
    assert [scores[0], scores[2]] == pytest.approx([expected[0], expected[2]])


def test_scores_that_are_not_finite_cost_their_answers(folder: Path) -> None:
    scorer = open_reward_model(settings(folder))
    with torch.no_grad():
        scorer._loaded.model.head_weight.fill_(float("nan"))
    first, second = scorer.score(inputs("4", "5"))
    assert "not finite" in str(first)
    assert "not finite" in str(second)


def test_the_digest_covers_weights_template_and_length(folder: Path, tmp_path: Path) -> None:
    def digest(path: Path, **more: Any) -> str:
        return open_reward_model(settings(path, **more)).digest()

    first = digest(folder)
    assert digest(folder) == first
    assert digest(folder, max_length=40) != first
    assert digest(folder, precision="bf16") != first
    other = write_model(
        tmp_path, REWARD.with_(init_std=0.25), byte_tokenizer("<|im_start|>", "<|im_end|>")
    )
    assert digest(other) != first


def test_weights_without_digests_are_hashed(folder: Path, tmp_path: Path) -> None:
    first = load_model(folder, scores=True)
    second = load_model(folder, scores=True)
    assert tensors_digest(first) == tensors_digest(second)
    with torch.no_grad():
        second.model.head_weight[0, 0] += 1
    assert tensors_digest(first) != tensors_digest(second)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        if path.name != DIGESTS:
            (copy / path.name).write_bytes(path.read_bytes())
    scorer = open_reward_model(settings(copy))
    assert scorer.digest() != open_reward_model(settings(folder)).digest()
    assert scorer.digest() == open_reward_model(settings(copy)).digest()


def test_a_language_model_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path, CONFIG)
    with pytest.raises(ConfigError, match="is a language model, not a reward model"):
        open_reward_model(settings(path))


def test_a_length_beyond_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.N\.max_length is 97"):
        open_reward_model(settings(folder, max_length=97))
