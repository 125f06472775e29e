"""Reward models as whole runs: trained, resumed, exported, loaded by transformers and PEFT, and asked for scores."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.byte_model import byte_tokenizer
from support.runs import assert_same_run, deterministic, headway

import headway as hw
from headway.checkpoint.stored_model import find_model
from headway.config.load import load
from headway.errors import HeadwayError
from headway.eval.reward import evaluate_reward
from headway.eval.reward_data import RewardSource
from headway.export.gguf_writer import export_gguf
from headway.infer.check_checkpoint import check_checkpoint
from headway.infer.load import LoadedModel, load_model
from headway.model.layout import HEAD, SCORE
from headway.store.writer import StoreWriter
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe

SHAPE = (
    "model.hidden_size=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_size=48", "model.max_seq_len=96",
    "model.tie_embeddings=false",
)  # fmt: skip
LORA = ("adapter.rank=4", "optim.lr=1e-2")


def go(folder: Path, name: str, *more: str) -> list[dict[str, Any]]:
    """Train a run on pairs of texts; returns its metrics."""
    settings = [
        f"run.dir={folder}/runs", f"run.name={name}", f"data.train=[{{path: {folder}/pairs.jsonl, kind: preference}}]",
        f"tokenizer={folder}/tokenizer", "data.seq_len=96", f"data.cache_dir={folder}/cache", "objective.kind=reward", "batch.rows=8",
        "batch.micro_rows=4", "optim.lr=5e-3", "steps=4", "checkpoint.every=2", "device=cpu", *more,
    ]  # fmt: skip
    train(load(Recipe, None, settings))
    return read_metrics(folder / "runs" / name / "metrics.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs whose better answer repeats the question, a language model, and a reward model over it."""
    folder = tmp_path_factory.mktemp("reward")
    byte_tokenizer("<|im_start|>", "<|im_end|>").save(folder / "tokenizer")
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 6)))) for _ in range(48)]
    lines = [
        {"id": n, "prompt": word, "chosen": f"{word}!", "rejected": words[n - 5]}
        for n, word in enumerate(words)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chat = [
        f"data.train=[{{path: {folder}/chat.jsonl, kind: chat}}]",
        "objective.kind=next_token",
        "steps=1",
    ]
    (folder / "chat.jsonl").write_text(
        "".join(json.dumps({"prompt": w, "response": w}) + "\n" for w in words)
    )
    go(folder, "base", *SHAPE, *chat)
    go(folder, "full", f"init.from={folder}/runs/base")
    return folder


@pytest.fixture(scope="module")
def scoring(folder: Path) -> LoadedModel:
    return load_model(folder / "runs" / "full", scores=True)


def scores(path: Path, data: Path, out: Path) -> list[dict[str, Any]]:
    evaluate_reward(load_model(path, scores=True), RewardSource(str(data)), out=out)
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_run_starts_from_a_language_model_and_all_it_leaves_gives_the_same_scores(
    folder: Path, tmp_path: Path
) -> None:
    run = folder / "runs" / "full"
    assert {
        "rewards/chosen",
        "rewards/mean",
        "rewards/margins",
        "rewards/accuracies",
    } <= read_metrics(run / "metrics.jsonl")[0].keys()
    weights = dict(find_model(run).weights())
    assert SCORE in weights
    assert HEAD not in weights
    assert HEAD in dict(find_model(folder / "runs" / "base").weights())
    scored = scores(run, folder / "pairs.jsonl", tmp_path / "out.jsonl")
    assert [record["id"] for record in scored] == list(range(48))
    again = scores(
        run / "checkpoints" / "step-00000004", folder / "pairs.jsonl", tmp_path / "again.jsonl"
    )
    assert scored == again


@pytest.mark.slow
def test_transformers_scores_a_padded_batch_of_texts_with_final_as_headway_does(
    folder: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    run = folder / "runs" / "full"
    scored = scores(run, folder / "pairs.jsonl", tmp_path / "out.jsonl")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "final")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(run / "final").eval()
    assert model.config.pad_token_id == tokenizer.pad_token_id is not None
    texts = [
        f"<|im_start|>user\n{record['prompt']}<|im_end|>\n<|im_start|>assistant\n{record[side]}<|im_end|>"
        for record in scored[:6]
        for side in ("chosen", "rejected")
    ]
    with torch.no_grad():
        expected = model(
            **tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
        ).logits[:, 0]
    ours = torch.tensor(
        [record[f"reward_{side}"] for record in scored[:6] for side in ("chosen", "rejected")]
    )
    torch.testing.assert_close(expected, ours, rtol=1e-4, atol=1e-5)


def test_a_resumed_reward_run_is_bit_for_bit_the_uninterrupted_one(folder: Path) -> None:
    whole = folder / "runs" / "full"
    again = folder / "runs" / "again"
    settings = load(Recipe, whole / "recipe.yaml", ["run.name=again"])
    train(settings, resume=str(whole / "checkpoints" / "step-00000002"))
    assert deterministic(again / "metrics.jsonl") == deterministic(whole / "metrics.jsonl")[2:]
    shutil.copyfile(whole / "metrics.jsonl", again / "metrics.jsonl")
    assert_same_run(whole, again, 4)
    report = check_checkpoint(whole)
    assert not report.problems
    assert report.score is not None


def test_a_stock_reward_model_goes_on_where_it_ended(folder: Path) -> None:
    loss = evaluate_reward(
        load_model(folder / "runs" / "full", scores=True), RewardSource(str(folder / "pairs.jsonl"))
    ).loss
    first = go(
        folder,
        "more",
        f"init.from={folder}/runs/full/final",
        "batch.rows=48",
        "batch.micro_rows=48",
        "steps=1",
    )[0]
    assert first["loss"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("base", [None, "nf4"])
def test_the_head_of_an_adapter_run_trains_and_is_in_its_peft_folder(
    folder: Path, base: str | None, tmp_path: Path
) -> None:
    name = f"lora-{base}"
    go(
        folder,
        name,
        f"init.from={folder}/runs/base",
        *LORA,
        *([f"adapter.base={base}"] if base else []),
    )
    run = folder / "runs" / name
    settings = json.loads((run / "final/adapter/adapter_config.json").read_text())
    assert settings["task_type"] == "SEQ_CLS"
    assert settings["modules_to_save"] == ["score"]
    before = dict(find_model(run / "checkpoints" / "step-00000002").weights())[SCORE]
    after = dict(find_model(run / "checkpoints" / "step-00000004").weights())[SCORE]
    assert (before - after).abs().max() > 1e-3
    data = folder / "pairs.jsonl"
    merged = scores(run, data, tmp_path / "a.jsonl")
    assert scores(run / "checkpoints" / "step-00000004", data, tmp_path / "b.jsonl")[
        0
    ] == pytest.approx(merged[0], abs=1e-5)
    if base is not None:
        train(
            load(Recipe, run / "recipe.yaml", ["run.name=lora-again"]),
            resume=str(run / "checkpoints" / "step-00000002"),
        )
        again = folder / "runs" / "lora-again"
        shutil.copyfile(run / "metrics.jsonl", again / "metrics.jsonl")
        assert_same_run(run, again, 4)
    if base is None:
        apart = scores(run / "final" / "adapter", data, tmp_path / "c.jsonl")
        assert [record["reward_chosen"] for record in apart] == pytest.approx(
            [record["reward_chosen"] for record in merged], abs=1e-5
        )
        first = go(
            folder,
            "on",
            f"init.from={run}/final/adapter",
            *LORA,
            "batch.rows=48",
            "batch.micro_rows=48",
            "steps=1",
        )[0]
        both = np.array([[record["reward_chosen"], record["reward_rejected"]] for record in merged])
        assert first["rewards/margins"] == pytest.approx(
            float((both[:, 0] - both[:, 1]).mean()), abs=1e-4
        )
        _peft_scores(run, folder, [record["reward_chosen"] for record in merged])


def _peft_scores(run: Path, folder: Path, right: list[float]) -> None:
    """PEFT, over the language model that the adapter names, scores the first pairs' chosen answers the same."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    import torch

    named = peft.PeftConfig.from_pretrained(run / "final/adapter").base_model_name_or_path
    base = transformers.AutoModelForSequenceClassification.from_pretrained(named, num_labels=1)
    model = peft.PeftModel.from_pretrained(base, run / "final/adapter").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "final")
    prompts = [
        json.loads(line)["prompt"] for line in (folder / "pairs.jsonl").read_text().splitlines()[:3]
    ]
    for prompt, score in zip(prompts, right, strict=False):
        text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{prompt}!<|im_end|>"
        with torch.no_grad():
            assert float(
                model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits
            ) == pytest.approx(score, abs=1e-4)


def test_commands_that_need_the_other_kind_of_model_are_refused_in_one_line(folder: Path) -> None:
    reads = ("--data", f"{folder}/pairs.jsonl", "--device", "cpu")
    for arguments, said in (
        (
            ("generate", "--model", f"{folder}/runs/full", "--prompt", "a", "--device", "cpu"),
            "is a reward model, which scores answers",
        ),
        (
            ("eval", "reward", "--model", f"{folder}/runs/base", *reads),
            "is a language model, not a reward model",
        ),
    ):
        result = headway(*arguments)
        assert (
            result.returncode == 2
            and said in result.stderr
            and len(result.stderr.strip().splitlines()) == 1
        ), result.stderr
    for load_it in (load_model, lambda path: export_gguf(path, folder / "x.gguf")):
        with pytest.raises(HeadwayError, match=r"is a reward model, .*Use `headway eval reward`"):
            load_it(folder / "runs" / "full")


@pytest.mark.parametrize(
    ("lines", "more", "said"),
    [
        (None, {}, "no such file"),
        ("", {}, "empty"),
        ('{"text": "a"}', {}, "not a conversation; its keys are text"),
        (
            '{"prompt": "a", "response": "b"}\n{"prompt": "a", "chosen": "b", "rejected": "c"}',
            {},
            "holds a conversation and a pair",
        ),
        ('{"prompt": "a", "chosen": "b"}', {}, "data.jsonl:1: no rejected; .*--drop-bad"),
        ('{"prompt": "a", "chosen": "b"}', {"drop_bad": True}, "nothing to score; 1 of 1 records"),
        (
            '{"messages": [{"role": "assistant", "content": "b"}, {"role": "user", "content": "a"}]}',
            {},
            "the last turn is the user's",
        ),
        ('{"prompt": "a", "generations": [1]}', {}, "generations is no list of texts"),
        ('{"prompt": "a", "response": "b"}', {"max_length": 97}, "--max-length is 97"),
        ('{"prompt": "a", "response": "b"}', {"chat_template": "nothing"}, "template is 'nothing'"),
    ],
)
def test_data_that_cannot_be_scored_is_refused_in_one_line(
    scoring: LoadedModel, tmp_path: Path, lines: str | None, more: dict[str, Any], said: str
) -> None:
    path = tmp_path / "data.jsonl"
    out = tmp_path / "out.jsonl"
    if lines is not None:
        path.write_text(lines + "\n" if lines else "")
    with pytest.raises(HeadwayError, match=said) as refused:
        evaluate_reward(scoring, RewardSource(str(path), **more), out=out)
    assert "\n" not in str(refused.value)
    assert not out.exists()
    assert [path.name for path in tmp_path.iterdir()] in ([], ["data.jsonl"])


def test_an_output_that_would_overwrite_the_data_is_refused(
    scoring: LoadedModel, folder: Path
) -> None:
    with pytest.raises(HeadwayError, match=r"--out is .*another than --data"):
        evaluate_reward(
            scoring, RewardSource(str(folder / "pairs.jsonl")), out=folder / "pairs.jsonl"
        )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("init.from=$/runs/full", "objective.kind=dpo"),
            r"init.from: .*full is a reward model, and objective dpo trains language models",
        ),
        (
            ("model.score_head=true", "objective.kind=dpo"),
            "model.score_head is true, and objective dpo",
        ),
        (
            ("init.from=$/runs/base", "objective={kind: dpo, reference: $/runs/full}"),
            "objective.reference: .*is a reward model",
        ),
        (("model.family=granite",), "model.family is granite; a reward model needs"),
    ],
)
def test_recipes_that_cannot_work_are_refused_in_one_line(
    folder: Path, overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises(HeadwayError, match=said) as refused:
        go(folder, "refused", *(override.replace("$", str(folder)) for override in overrides))
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2


def test_answers_and_generations_get_scores_that_pairs_would_give(
    folder: Path, tmp_path: Path
) -> None:
    run = folder / "runs" / "full"
    pairs = scores(folder / "runs" / "full", folder / "pairs.jsonl", tmp_path / "pairs.jsonl")
    answers = [
        {
            "messages": [
                {"role": "user", "content": p["prompt"]},
                {"role": "assistant", "content": p["chosen"]},
            ]
        }
        for p in pairs
    ]
    (tmp_path / "chat.jsonl").write_text(
        "".join(json.dumps({**answer, "label": False}) + "\n" for answer in answers)
    )
    scored = scores(run, tmp_path / "chat.jsonl", tmp_path / "scored.jsonl")
    assert [record["reward"] for record in scored] == pytest.approx(
        [pair["reward_chosen"] for pair in pairs], abs=1e-5
    )
    several = [
        {
            "index": n,
            "prompt": p["prompt"],
            "generations": [{"text": p["rejected"]}, {"text": p["chosen"]}],
        }
        for n, p in enumerate(pairs)
    ]
    (tmp_path / "several.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in several)
    )
    scored = scores(run, tmp_path / "several.jsonl", tmp_path / "best.jsonl")
    for score, right in zip(hw.score(run, several[:3], device="cpu"), scored, strict=False):
        assert score["rewards"] == pytest.approx(right["rewards"], abs=1e-5)
        assert score["prompt"] == right["prompt"]
    for score, pair in zip(scored, pairs, strict=True):
        assert score["rewards"] == pytest.approx(
            [pair["reward_rejected"], pair["reward_chosen"]], abs=1e-5
        )
        assert score["best"] == int(pair["reward_chosen"] > pair["reward_rejected"])


def test_a_report_has_the_numbers_of_its_scores(
    folder: Path, scoring: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = evaluate_reward(
        scoring,
        RewardSource(str(folder / "pairs.jsonl")),
        out=tmp_path / "o.jsonl",
        batch_tokens=64,
    )
    lines = (tmp_path / "o.jsonl").read_text().splitlines()
    both = np.array(
        [
            [record[f"reward_{side}"] for side in ("chosen", "rejected")]
            for record in map(json.loads, lines)
        ]
    )
    margins = both[:, 0] - both[:, 1]
    assert (report.records, report.answers, sum(bucket.count for bucket in report.histogram)) == (
        48,
        96,
        48,
    )
    assert report.accuracy == pytest.approx((margins > 0).mean())
    assert report.margin == pytest.approx(margins.mean())
    assert (report.mean, report.lowest, report.highest) == pytest.approx(
        (both.mean(), both.min(), both.max())
    )
    assert sum(bucket.count for bucket in report.histogram if bucket.high <= 0) == int(
        (margins < 0).sum()
    )
    assert json.loads(json.dumps(report.to_json()))["kind"] == "pair"
    cut = evaluate_reward(
        scoring, RewardSource(str(folder / "pairs.jsonl"), max_length=12, limit=5)
    )
    assert (cut.records, cut.truncated) == (5, 5)


@pytest.mark.slow
def test_a_reward_model_prefers_the_better_answer_of_pairs_it_has_not_seen(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    for name, pairs in (("train", 300), ("held-out", 100)):
        writer = StoreWriter(
            tmp_path / name,
            dtype="uint16",
            tokenizer_fingerprint=None,
            masked=True,
            sources=["kind=preference"],
        )
        for _ in range(pairs):
            prompt = rng.integers(2, 64, rng.integers(2, 8))
            for low, high in ((2, 42), (24, 64)):  # a good answer has more small ids
                answer = rng.integers(low, high, rng.integers(4, 10))
                writer.add(
                    np.concatenate([prompt, answer]).astype(np.uint16),
                    np.arange(len(prompt) + len(answer)) >= len(prompt),
                )
        writer.finish()
    settings = [
        f"run.dir={tmp_path}", "run.name=reward", f"data.train=[{tmp_path}/train]", "data.seq_len=64", "data.tokenizer_unchecked=true",
        f"data.cache_dir={tmp_path}/cache", "objective={kind: reward, center_rewards_coefficient: 0.01}", "batch.rows=16",
        "batch.micro_rows=16", "optim.lr=5e-3", "steps=40", "device=cpu", *SHAPE, "model.vocab_size=64",
    ]  # fmt: skip
    train(load(Recipe, None, settings))
    result = headway(
        "eval",
        "reward",
        "--model",
        f"{tmp_path}/reward",
        "--data",
        f"{tmp_path}/held-out",
        "--json",
        "--device",
        "cpu",
    )
    report = json.loads(result.stdout)
    assert report["records"] == 100 and report["accuracy"] >= 0.85, report
