"""Attention of every head to a needle: the weights of a plain forward pass of transformers, at the needle's own tokens."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from support.byte_model import CONFIG, write_model

from headway.cli import main
from headway.eval.attention import measure_attention, needle_span, needle_weights
from headway.eval.long_cases import make_cases
from headway.eval.options import ATTENTION_TASKS, AttentionPlan
from headway.infer.load import LoadedModel, load_model
from headway.model.rope_config import RopeScaling

LONG = CONFIG.with_(max_seq_len=1000)
SHAPES = {
    "rope": LONG,
    "no rope in a layer": LONG.with_(family="smollm3", no_rope_layers=(1,)),
    "linear": LONG.with_(rope_scaling=RopeScaling(kind="linear", factor=4.0)),
    "yarn": LONG.with_(rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=100)),
    "sliding window": LONG.with_(family="mistral", sliding_window=60),
}


@pytest.fixture(scope="module")
def rope_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("rope"), LONG)


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_those_of_an_eager_forward_of_transformers(shape: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    folder = write_model(tmp_path, SHAPES[shape])
    loaded = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    judge = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    ids = torch.randint(3, 250, (200,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.no_grad():
        attentions = judge(torch.tensor([ids]), output_attentions=True).attentions
    for begin, end in ((20, 27), (150, 153)):
        got = needle_weights(loaded, ids, begin, end)
        right = torch.stack([layer[0, :, -1, begin:end].sum(-1) for layer in attentions])
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-6)
    assert got.shape == (2, 4)
    assert float(got.max()) > 0


def test_the_model_computes_afterwards_as_before(rope_model: Path) -> None:
    loaded = load_model(rope_model, device=torch.device("cpu"), dtype=torch.float32)
    cores = [block.core for block in loaded.model.blocks().values()]
    needle_weights(loaded, list(range(10, 60)), 3, 5)
    assert [block.core for block in loaded.model.blocks().values()] == cores


@pytest.mark.parametrize("task", ATTENTION_TASKS)
def test_the_tokens_of_the_answer_are_found_in_the_needle(rope_model: Path, task: str) -> None:
    loaded = load_model(rope_model, device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    plan = AttentionPlan(task, (800,), (0.0, 0.5, 1.0), samples=2)
    for case in make_cases(tokenizer, plan.prompts()):
        begin, end = needle_span(tokenizer, case)
        assert tokenizer.decode(case.ids[begin:end]) == case.case.answers[0]
        if task == "key_value":
            key = case.case.prompt.rsplit("\n", 1)[-1]
            assert tokenizer.decode(case.ids[:begin]).endswith(key)


HYBRIDS = {
    "lfm2": LONG.with_(
        family="lfm2", num_layers=4, qk_norm=True, short_convolution={"layers": (0, 2)}
    ),
    "qwen3_5": LONG.with_(
        family="qwen3_5",
        num_layers=4,
        norm="rmsnorm1p",
        qk_norm=True,
        attention_gate=True,
        linear_attention={
            "key_heads": 2,
            "value_heads": 4,
            "key_head_dim": 6,
            "value_head_dim": 5,
            "layers": (0, 2),
        },
    ),
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_of_a_hybrid_without_attention_are_left_out_and_named(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    folder = write_model(tmp_path, HYBRIDS[family])
    loaded = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    judge = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    ids = torch.randint(3, 250, (100,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.no_grad():
        attentions = judge(torch.tensor([ids]), output_attentions=True).attentions
    weights = [layer[0, :, -1, 20:27].sum(-1) for layer in attentions if layer is not None]
    right = torch.stack(weights)
    torch.testing.assert_close(needle_weights(loaded, ids, 20, 27), right, rtol=1e-4, atol=1e-6)

    out = tmp_path / "report"
    options = ["--lengths", "500", "--depths", "0,1", "--samples", "1", "--task", "passkey"]
    command = ["eval", "attention", "--model", str(folder), *options, "--out", str(out)]
    assert main([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["num_layers"] == 4
    assert printed["layers_without_attention"] == [0, 2]
    assert {head["layer"] for head in printed["heads"]} == {1, 3}
    assert len(printed["heads"]) == 2 * 4 * 2
    report = (out / "report.md").read_text()
    assert "Layers 0, 2 have no attention and are left out." in report
    assert (out / "attention.png").stat().st_size > 1000


def test_a_model_without_any_attention_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = HYBRIDS["lfm2"].with_(short_convolution={"layers": (0, 1, 2, 3)})
    folder = write_model(tmp_path, config)
    assert main(["eval", "attention", "--model", str(folder), "--lengths", "300"]) == 2
    error = capsys.readouterr().err
    assert "none of its layers has attention" in error
    assert len(error.strip().splitlines()) == 1


def measured(model: Path, loaded: LoadedModel | None = None) -> list[tuple[float, float]]:
    loaded = loaded or load_model(model, device=torch.device("cpu"), dtype=torch.float32)
    plan = AttentionPlan("passkey", (500, 700), (0.0, 1.0), samples=2)
    result = measure_attention(loaded, plan)
    assert len(result.heads) == 2 * 4 * 2 * 2
    assert all(0 <= head.attention <= 1 for head in result.heads)
    return [(head.distance, head.attention) for head in result.heads]


def test_depth_is_distance_and_the_same_seed_gives_the_same_numbers(rope_model: Path) -> None:
    cells = measured(rope_model)
    assert cells == measured(rope_model)
    # the end of the prompt is as far from the question in a longer one
    distances = sorted({distance for distance, _ in cells})
    assert len(distances) == 3
    assert distances[0] < 120
    assert 500 < distances[-1] < 700


def test_the_command_writes_table_picture_numbers_and_report(
    rope_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report"
    options = ["--lengths", "500", "--depths", "0,1", "--samples", "1", "--task", "passkey"]
    command = ["eval", "attention", "--model", str(rope_model), *options, "--out", str(out)]
    assert main([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["num_heads"] == 4
    rows = list(csv.DictReader((out / "attention.csv").read_text().splitlines()))
    assert len(rows) == len(printed["heads"]) == 2 * 4 * 2
    assert {row["rope"] for row in rows} == {"True"}
    assert float(rows[0]["attention"]) == printed["heads"][0]["attention"]
    assert json.loads((out / "results.json").read_text())["heads"] == printed["heads"]
    assert (out / "attention.png").stat().st_size > 1000
    assert "| distance | length |" in (out / "report.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "common_words"], "--task is 'common_words'; it must be one of needle_single"),
        (["--lengths", "4k"], "--lengths holds 4096; the model's max_seq_len is 1000"),
        (["--lengths", "300", "--depths", "2"], "depths must be between 0"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    rope_model: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "attention", "--model", str(rope_model), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
