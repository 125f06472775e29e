"""`headway doctor data|recipe` on the user's own data: a good recipe passes, and each trouble is one line with its state and a remedy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.byte_model import byte_tokenizer
from support.runs import make_stores, tiny_settings

from headway.cli import main
from headway.config.load import load
from headway.data import rows
from headway.data.config import SourceConfig
from headway.diagnose import equality
from headway.diagnose.check import Check
from headway.model.config import ModelConfig
from headway.store.writer import StoreWriter
from headway.train.config import Recipe
from headway.workflows.doctor_data import SampleOptions, check_data, round_trip_checks
from headway.workflows.doctor_recipe import check_recipe, check_step

MODEL = [
    "model.hidden_size=32",
    "model.num_layers=1",
    "model.num_heads=4",
    "model.ffn_size=48",
    "model.max_seq_len=96",
    "data.seq_len=96",
]


def by_name(checks: list[Check] | tuple[Check, ...]) -> dict[str, Check]:
    assert len({check.name for check in checks}) == len(checks)
    assert all(check.remedy for check in checks if check.state != "ok"), (
        "a trouble without a remedy"
    )
    return {check.name: check for check in checks}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("chat")
    byte_tokenizer("<|im_start|>", "<|im_end|>").save(folder / "tokenizer")
    lines = [
        json.dumps({"instruction": f"Say {word}.", "output": f"{word}!"})
        for word in ("hello", "good", "light", "tree", "你好") * 4
    ]
    (folder / "chat.jsonl").write_text("\n".join(lines), encoding="utf-8")
    settings = [
        f"data.train={folder}/chat.jsonl",
        f"tokenizer={folder}/tokenizer",
        f"data.cache_dir={folder}/cache",
        f"run.dir={folder}",
    ]
    return folder, [*settings, *MODEL]


def test_a_sample_is_shown_with_its_targets_in_brackets(
    chat: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    _, settings = chat
    assert main(["doctor", "data", *settings, "--samples", "1", "data.valid.fraction=0.3"]) == 0
    shown = capsys.readouterr().out
    assert "⟦hello!" in shown
    assert "Say hello." in shown
    assert "⟦Say" not in shown


def test_good_conversations_pass_and_one_document_is_shown_as_json(
    chat: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, settings = chat
    arguments = [f"{folder}/chat.jsonl", *settings[1:], "data.valid.fraction=0.3"]
    assert main(["doctor", "data", *arguments, "--json", "--document", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["stop token of chat.jsonl"]["state"] == "ok"
    assert "20 of 20" in checks["stop token of chat.jsonl"]["detail"]
    assert {"targets of chat.jsonl", "packed = unpacked", "accumulation"} <= set(checks)
    assert checks["duplicates"]["state"] == "warn"
    assert checks["validation set valid"]["state"] == "warn"
    (sample,) = report["samples"]
    assert [document["document"] for document in sample["documents"]] == [1]
    assert any(run["target"] for run in sample["documents"][0]["runs"])
    assert not (folder / "run").exists()


def masked_store(path: Path, masks: list[list[int]]) -> Path:
    with StoreWriter(path, dtype="uint16", tokenizer_fingerprint=None, masked=True) as writer:
        for number, mask in enumerate(masks):
            writer.add(
                np.arange(number, number + len(mask), dtype=np.uint16) % 60,
                np.array(mask, np.bool_),
            )
        writer.finish()
    return path


def test_samples_without_targets_and_data_without_a_stop_token_fail(tmp_path: Path) -> None:
    store = masked_store(tmp_path / "store", [[0] * 9, [0] * 12])
    settings = [*tiny_settings(tmp_path, "run"), f"data.train=[{store}]", "data.valid=null"]
    checks = by_name(check_data(load(Recipe, None, settings))[0].checks)
    assert checks["targets of store"].state == "fail"
    assert "2 of 2 samples have no target" in checks["targets of store"].detail
    assert checks["stop token of store"].state == "warn"  # nothing says what ends an answer
    store = masked_store(tmp_path / "all", [[1] * 9, [1] * 12])
    checks = by_name(check_data(load(Recipe, None, [*settings, f"data.train=[{store}]"]))[0].checks)
    assert checks["targets of all"].state == "warn"
    assert "prompts are learned too" in checks["targets of all"].detail


def test_an_answer_that_never_stops_fails(
    chat: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.diagnose.data_checks.all_stops", lambda *_: frozenset([3]))
    check = by_name(check_data(load(Recipe, None, chat[1]), SampleOptions(0))[0].checks)[
        "stop token of chat.jsonl"
    ]
    assert check.state == "fail"
    assert "would not learn to stop" in check.detail


def tiny(folder: Path, *more: str) -> Recipe:
    if not (folder / "store0").exists():
        make_stores(folder)
    return load(
        Recipe, None, [*tiny_settings(folder, "run"), "steps=20", "checkpoint.every=5", *more]
    )


def test_documents_that_see_each_other_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert by_name(check_data(tiny(tmp_path))[0].checks)["packed = unpacked"].state == "ok"
    real = rows._layout

    def one_document(position: Any, layout: Any) -> Any:
        return real(
            position, type(layout)(layout.sources, layout.seq_len, layout.max_documents, True)
        )

    monkeypatch.setattr(rows, "_layout", one_document)
    assert by_name(check_data(tiny(tmp_path))[0].checks)["packed = unpacked"].state == "fail"


def test_a_mean_of_means_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = equality._gradients

    def averaged(*arguments: Any) -> Any:
        """What trainers do that divide by the targets of each microbatch."""
        loss, grads = real(*arguments)
        if arguments[-1] != 1:
            return loss, grads
        return loss * 1.01, {name: grad * 1.01 for name, grad in grads.items()}

    monkeypatch.setattr(equality, "_gradients", averaged)
    check = by_name(check_data(tiny(tmp_path))[0].checks)["accumulation"]
    assert check.state == "fail"
    assert "1.0e-02" in check.detail


def test_a_large_model_is_tried_as_a_small_one_of_its_family() -> None:
    large = ModelConfig(family="qwen3", hidden_size=4096, num_layers=36, num_heads=32, num_kv_heads=8, ffn_size=12288, vocab_size=1000,
                        max_seq_len=4096, qk_norm=True, no_rope_layers=(1, 35))  # fmt: skip
    small, words = equality.small_model(large, 128)
    assert small.family == "qwen3"
    assert small.qk_norm
    assert small.num_layers == 2
    assert small.kv_heads == 1
    assert small.no_rope_layers == (1,)
    assert "small random qwen3" in words
    assert small.vocab == 1000


def test_texts_that_a_tokenizer_loses_are_named(
    chat: tuple[Path, list[str]], tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer()
    (tmp_path / "two.jsonl").write_text('{"text": "good"}\n{"text": "bad"}\n')
    config = load(Recipe, None, [f"data.train={tmp_path}/two.jsonl"]).data.model_copy(
        update={"train": (SourceConfig(path=f"{tmp_path}/two.jsonl", kind="text"),)}
    )
    assert [check.state for check in round_trip_checks(config, tokenizer)] == ["ok", "ok"]
    real = type(tokenizer).decode_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(tokenizer),
            "decode_bytes",
            lambda self, ids: real(self, ids).replace(b"bad", b"b?d"),
        )
        named = round_trip_checks(config, tokenizer)[1]
    assert named.state == "warn"
    assert "two.jsonl:2" in named.detail
    assert "two.jsonl:1" not in named.detail


def test_a_good_recipe_passes_and_one_step_trains_without_a_trace(tmp_path: Path) -> None:
    recipe = tiny(tmp_path)
    assert {check.state for check in check_recipe(recipe)} == {"ok"}
    before = sorted(tmp_path.iterdir())
    assert check_step(recipe).state == "ok"
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("more", "name", "state", "said"),
    [
        (["optim.schedule.warmup=50"], "warm-up", "warn", "takes 50 steps and the run has 20"),
        (["eval.every=50"], "validation", "warn", "only once"),
        (["data.valid=null"], "validation", "warn", "overfits"),
        (
            ["checkpoint.every=null", "checkpoint.at_end=false"],
            "checkpoints",
            "fail",
            "no checkpoint is ever written",
        ),
        (["steps=200", "checkpoint.every=500"], "checkpoints", "warn", "only at the end"),
        (["optim.lr=0"], "learning rate", "fail", "nothing is learned"),
        (["optim.lr=1.0"], "learning rate", "warn", "usual are"),
        (["steps=5000"], "length", "warn", "by heart"),
        (["batch.rows=512"], "length", "warn", "larger than all data"),
        (["log.every=100"], "log", "warn", "only the first and the last"),
        (["eval.stop={patience: 30}"], "early stopping", "warn", "can never stop"),
        (["data.train=[missing]"], "data", "fail", "missing"),
        (["tokenizer=nowhere"], "recipe", "fail", "tokenizer is 'nowhere'"),
    ],
)
def test_a_recipe_that_would_train_badly_is_reported_with_its_reason(
    tmp_path: Path, more: list[str], name: str, state: str, said: str
) -> None:
    checks = by_name(check_recipe(tiny(tmp_path, *more)))
    assert checks[name].state == state and said in checks[name].detail, checks


def test_stages_are_checked_one_by_one(tmp_path: Path) -> None:
    stages = "stages=[{name: first, steps: 10}, {name: second, optim: {lr: 1.0}}]"
    checks = by_name(check_recipe(tiny(tmp_path, stages)))
    assert checks["first: learning rate"].state == "ok"
    assert checks["second: learning rate"].state == "warn"


def test_memory_is_judged_for_the_gpu_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_stores(tmp_path)
    line = [
        "doctor",
        "recipe",
        *tiny_settings(tmp_path, "run"),
        "steps=20",
        "checkpoint.every=5",
        "--json",
    ]
    assert main([*line, "--gpu", "h100", "--world", "2"]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert "2 x" in checks["memory"]["detail"]
    huge = [
        "model.hidden_size=16384",
        "model.num_layers=100",
        "model.ffn_size=65536",
        "model.num_heads=64",
    ]
    assert main([*line, "--gpu", "4090", *huge]) == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["memory"]["state"] == "fail"
    assert "does not fit" in checks["memory"]["detail"]
