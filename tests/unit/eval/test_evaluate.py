"""`headway eval` as one types it: several datasets, suites, continuations, reports, models side by side."""

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.byte_model import CONFIG, byte_tokenizer, write_model
from support.ranks import start_processes

from headway.cli import main
from headway.eval.dataset import SUITES

TEXTS = [
    "the cat sat on the mat and then it went away, far over the hills",
    "a",
    "the dog",
    "zwölf Boxkämpfer jagen Viktor quer",
]
KEYS = {
    "loss",
    "perplexity",
    "tokens",
    "bits_per_byte",
    "accuracy",
    "documents",
    "window",
    "stride",
}
PARTS = (
    ("Salesforce/wikitext", "wikitext-2-raw-v1", "text"),
    ("Salesforce/wikitext", "wikitext-103-raw-v1", "text"),
    ("ptb-text-only/ptb_text_only", "penn_treebank", "sentence"),
    ("cimec/lambada", "plain_text", "text"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    (tmp_path / "long.txt").write_text(TEXTS[0])
    (tmp_path / "short.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[1:])
    )
    return ["--data", f"story={tmp_path / 'long.txt'}", "--data", str(tmp_path / "short.jsonl")]


def output(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["eval", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_one_dataset_has_its_numbers_at_the_top_of_the_json(
    capsys: pytest.CaptureFixture[str], model: str, data: list[str]
) -> None:
    report = json.loads(output(capsys, "ppl", "--model", model, *data[:2], "--json"))
    assert set(report) >= KEYS
    assert (report["documents"], report["window"], report["stride"]) == (1, 32, 32)


def test_several_datasets_have_the_numbers_they_have_alone(
    capsys: pytest.CaptureFixture[str], model: str, data: list[str]
) -> None:
    both = json.loads(output(capsys, "ppl", "--model", model, *data, "--stride", "16", "--json"))[
        "datasets"
    ]
    assert list(both) == ["story", "short.jsonl"]
    for name, options in zip(both, (data[:2], data[2:]), strict=True):
        alone = json.loads(
            output(capsys, "ppl", "--model", model, *options, "--stride", "16", "--json")
        )
        assert {key: alone[key] for key in KEYS} == {key: both[name][key] for key in KEYS}
    table = output(capsys, "ppl", "--model", model, *data)
    assert "story" in table
    assert "short.jsonl" in table
    assert "ECE" in table


def test_continuations_stand_beside_the_numbers(
    capsys: pytest.CaptureFixture[str], model: str, data: list[str]
) -> None:
    arguments = [
        "ppl",
        "--model",
        model,
        *data[:2],
        "--prompt",
        "the",
        "--samples",
        "2",
        "--max-new-tokens",
        "4",
    ]
    samples = json.loads(output(capsys, *arguments, "--json"))["samples"]
    assert [sample["prompt"] for sample in samples] == ["the", "the"]
    assert samples[0]["text"] != samples[1]["text"]
    assert "--prompt" in output(capsys, "ppl", "--model", model, *data, "--samples", "2", code=2)


def fill_cache(cache: Path, parts: tuple[tuple[str, str, str], ...]) -> None:
    """What the hub's library leaves behind after a download."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for repo, folder, key in parts:
        root = cache / f"datasets--{repo.replace('/', '--')}"
        converted = key == "sentence"
        file = (
            root
            / "snapshots"
            / "abc"
            / folder
            / ("test/0000.parquet" if converted else "test-00000-of-00001.parquet")
        )
        file.parent.mkdir(parents=True)
        pq.write_table(pa.table({key: ["", *TEXTS, ""]}), file)
        revision = root / "refs" / ("refs/convert/parquet" if converted else "main")
        revision.parent.mkdir(parents=True, exist_ok=True)
        revision.write_text("abc")


def test_a_suite_comes_from_the_cache_and_what_is_missing_is_named(
    capsys: pytest.CaptureFixture[str],
    model: str,
    data: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    fill_cache(tmp_path / "cache", PARTS[:1])
    said = output(capsys, "ppl", "--model", model, "--suite", "default", code=2)
    assert (
        "headway download Salesforce/wikitext --dataset --include 'wikitext-103-raw-v1/test*'"
        in said
    )
    assert (
        "headway download ptb-text-only/ptb_text_only --dataset --revision refs/convert/parquet"
        in said
    )
    assert "wikitext-2 " not in said
    assert "lambada" in said
    fill_cache(tmp_path / "cache", PARTS[1:3])
    options = ["--data", f"lambada={tmp_path / 'short.jsonl'}"]
    report = json.loads(
        output(capsys, "ppl", "--model", model, "--suite", "default", *options, "--json")
    )["datasets"]
    assert list(report) == list(SUITES["default"])
    assert [result["documents"] for result in report.values()] == [1, 1, 1, 3]


def test_a_mistake_in_the_last_dataset_shows_before_the_first_is_scored(
    capsys: pytest.CaptureFixture[str],
    model: str,
    data: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "wrong.jsonl").write_text('{"body": "x"}\n')
    monkeypatch.setattr("headway.eval.evaluate.perplexity", lambda *_, **__: pytest.fail("scored"))
    assert "no key 'text'" in output(
        capsys, "ppl", "--model", model, *data, "--data", str(tmp_path / "wrong.jsonl"), code=2
    )


def is_png(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_report_holds_every_number_tables_and_pictures(
    capsys: pytest.CaptureFixture[str], model: str, data: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "new" / "report"
    arguments = [
        "ppl",
        "--model",
        model,
        *data,
        "--prompt",
        "# the",
        "--max-new-tokens",
        "4",
        "--out",
        str(out),
        "--json",
    ]
    printed = json.loads(output(capsys, *arguments))
    assert json.loads((out / "results.json").read_text())["models"] == [printed]
    report = (out / "report.md").read_text()
    for name, result in printed["datasets"].items():
        assert f"| {name} | {model} | {result['loss']:.4f} |" in report
        for bucket in result["positions"]:
            assert (
                f"| {bucket['first']}-{bucket['last']} | {bucket['loss']:.4f} ({math.exp(bucket['loss']):.2f}) |"
                in report
            )
    assert "\n    # the" in report
    assert sorted(path.name for path in out.iterdir()) == [
        "loss-by-position.png",
        "reliability.png",
        "report.md",
        "results.json",
    ]
    assert is_png(out / "loss-by-position.png")
    assert is_png(out / "reliability.png")
    output(capsys, *arguments)
    assert "long.txt: is a file" in output(
        capsys, "ppl", "--model", model, *data, "--out", str(tmp_path / "long.txt"), code=2
    )


def test_scalars_reach_tensorboard(
    capsys: pytest.CaptureFixture[str], model: str, data: list[str], tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    printed = json.loads(
        output(
            capsys, "ppl", "--model", model, *data, "--tensorboard", str(tmp_path / "tb"), "--json"
        )
    )
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert "eval/story/loss_by_context/16-31" in tags
    for name, result in printed["datasets"].items():
        (point,) = events.Scalars(f"eval/{name}/loss")
        assert (point.step, point.value) == (0, pytest.approx(result["loss"]))


def test_scalars_of_a_checkpoint_are_at_its_step(
    capsys: pytest.CaptureFixture[str], model: str, data: list[str], tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "step-00000500").symlink_to(model)
    output(
        capsys,
        "ppl",
        "--model",
        str(tmp_path / "step-00000500"),
        *data,
        "--tensorboard",
        str(tmp_path / "tb"),
    )
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [point.step for point in events.Scalars("eval/story/loss")] == [500]


def test_models_side_by_side_have_the_numbers_they_have_alone(
    capsys: pytest.CaptureFixture[str], model: str, data: list[str], tmp_path: Path
) -> None:
    longer = CONFIG.model_copy(update={"max_seq_len": 64, "num_layers": 1})
    other = str(write_model(tmp_path / "other", longer))
    out = ["--out", str(tmp_path / "report"), "--tensorboard", str(tmp_path / "tb")]
    comparison = json.loads(output(capsys, "compare", model, other, *data, *out, "--json"))
    assert comparison["same_tokenizer"] is True
    assert [model["model"] for model in comparison["models"]] == [model, other]
    for scores in comparison["models"]:
        alone = json.loads(
            output(capsys, "ppl", "--model", scores["model"], *data, "--window", "32", "--json")
        )
        assert scores == alone
    report = (tmp_path / "report" / "report.md").read_text()
    assert f"| context | {model} | {other} |" in report
    assert is_png(tmp_path / "report" / "loss-by-position.png")
    assert len(list((tmp_path / "tb").iterdir())) == 2
    table = output(capsys, "compare", model, other, *data)
    assert "different tokenizers" not in table
    assert "two or more" in output(capsys, "compare", model, *data, code=2)
    assert "two or more" in output(capsys, "compare", model, model, *data, code=2)


def test_a_comparison_says_what_each_model_is_and_how_its_perplexities_lie(
    capsys: pytest.CaptureFixture[str],
    model: str,
    data: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a test runner may have set it, and narrow tables fold their headings
    monkeypatch.delenv("COLUMNS", raising=False)
    other = str(write_model(tmp_path / "other", CONFIG.with_(rope_theta=5e5, no_rope_layers=(1,))))
    arguments = ["compare", model, other, *data, "--out", str(tmp_path / "report")]
    models = json.loads(output(capsys, *arguments, "--json"))["models"]
    assert [
        (scores["rope_theta"], scores["no_rope_layers"], scores["masks"]) for scores in models
    ] == [
        (1e4, [], None),
        (5e5, [1], None),
    ]
    for scores in models:
        first, second = (result["perplexity"] for result in scores["datasets"].values())
        spread = {
            "mean": (first + second) / 2,
            "std": abs(first - second) / 2,
            "min": min(first, second),
            "max": max(first, second),
        }
        assert scores["perplexities"] == pytest.approx(spread)
    shown = output(capsys, *arguments)
    report = (tmp_path / "report" / "report.md").read_text()
    assert (
        f"| {other} | 500000 | 1 | none | none | {models[1]['perplexities']['mean']:.3f} |"
        in report
    )
    assert "layers without RoPE" in shown
    assert "mean perplexity" in shown
    assert "500000" in shown


def test_models_with_other_tokenizers_are_compared_by_bits_per_byte(
    capsys: pytest.CaptureFixture[str], model: str, data: list[str], tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", tokenizer=byte_tokenizer("<extra>"))
    arguments = ["compare", model, str(other), *data, "--out", str(tmp_path / "report")]
    assert "compare bits per byte" in output(capsys, *arguments)
    assert "compare bits per byte" in (tmp_path / "report" / "report.md").read_text()


TEXTS_BY_PART = {"books": TEXTS[:1], "web": TEXTS[1:]}


@pytest.fixture
def labelled_texts(tmp_path: Path) -> Path:
    """A folder with one file of all texts, labelled by part, and a file for each part."""
    rows = [
        {"text": text, "meta": {"set": name}}
        for name in TEXTS_BY_PART
        for text in TEXTS_BY_PART[name]
    ]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, texts in TEXTS_BY_PART.items():
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return tmp_path


def scores_alone(capsys: pytest.CaptureFixture[str], model: str, file: Path) -> dict[str, Any]:
    report = json.loads(output(capsys, "ppl", "--model", model, "--data", str(file), "--json"))
    assert report["parts"] == []
    return report


def assert_same_scores(part: dict[str, Any], alone: dict[str, Any]) -> None:
    keys = KEYS & set(part)
    assert {key: part[key] for key in keys} == pytest.approx({key: alone[key] for key in keys})


def test_parts_by_key_have_the_numbers_they_have_alone(
    capsys: pytest.CaptureFixture[str], model: str, labelled_texts: Path
) -> None:
    data = str(labelled_texts / "all.jsonl")
    arguments = ["ppl", "--model", model, "--data", data, "--by", "meta.set"]
    parts = json.loads(output(capsys, *arguments, "--json"))["parts"]
    assert [part["name"] for part in parts] == list(TEXTS_BY_PART)
    for part in parts:
        file = labelled_texts / f"{part['name']}.jsonl"
        assert_same_scores(part, scores_alone(capsys, model, file))
    report = labelled_texts / "report"
    assert "all.jsonl by part" in output(capsys, *arguments, "--out", str(report))
    row = f"| web | {model} | {parts[1]['loss']:.4f} |"
    assert row in (report / "report.md").read_text()


def test_parts_by_file_have_the_numbers_they_have_alone(
    capsys: pytest.CaptureFixture[str], model: str, labelled_texts: Path
) -> None:
    files = [labelled_texts / f"{name}.jsonl" for name in TEXTS_BY_PART]
    data = [word for file in files for word in ("--data", f"both={file}")]
    report = json.loads(output(capsys, "ppl", "--model", model, *data, "--by", "file", "--json"))
    assert [part["name"] for part in report["parts"]] == [str(file) for file in files]
    for part, file in zip(report["parts"], files, strict=True):
        assert_same_scores(part, scores_alone(capsys, model, file))


def test_a_key_that_records_lack_is_refused_with_the_line(
    capsys: pytest.CaptureFixture[str], model: str, labelled_texts: Path
) -> None:
    data = str(labelled_texts / "all.jsonl")
    error = output(capsys, "ppl", "--model", model, "--data", data, "--by", "meta.kind", code=2)
    assert "all.jsonl:1: has no key 'meta.kind'" in error
    assert len(error.strip().splitlines()) == 1


def printed(arguments: list[str]) -> str:
    """What a rank prints; `--nproc 2` starts such ranks as fresh interpreters (test_harness.py)."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(arguments) == 0
    return out.getvalue()


def test_two_ranks_find_what_one_finds(
    capfd: pytest.CaptureFixture[str], model: str, data: list[str], tmp_path: Path
) -> None:
    (tmp_path / "again").symlink_to(model)
    options = ["--batch-tokens", "32", "--stride", "8", "--by", "file", "--prompt=-a", "--json"]
    arguments = ["eval", "compare", model, str(tmp_path / "again"), *data, *options]
    assert main(arguments) == 0
    alone = json.loads(capfd.readouterr().out)
    first, second = start_processes(lambda: printed(arguments), 2)
    assert second == ""
    both = json.loads(first)
    for model_alone, other in zip(alone["models"], both["models"], strict=True):
        assert list(flat(model_alone)) == list(flat(other))
        for key, value in flat(model_alone).items():
            assert flat(other)[key] == (
                pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
            ), key
    assert main([*arguments, "--nproc", "0"]) == 2
    assert "--nproc is 0" in capfd.readouterr().err


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Every leaf of plain values, by its path."""
    if isinstance(value, dict):
        return {
            path: leaf
            for name, inner in value.items()
            for path, leaf in flat(inner, f"{key}/{name}").items()
        }
    if isinstance(value, list):
        return {
            path: leaf
            for index, inner in enumerate(value)
            for path, leaf in flat(inner, f"{key}/{index}").items()
        }
    return {key: value}


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (["--suite", "best"], "--suite is 'best'"),
        (["--device", "tpu"], "--device is 'tpu'"),
        (["--precision", "int3"], "--precision is 'int3'"),
        (["--split", "word"], "--split is 'word'"),
        (["--samples", "0", "--prompt", "a"], "--samples is 0"),
    ],
)
def test_a_wrong_option_of_ppl_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], model: str, data: list[str], wrong: list[str], word: str
) -> None:
    said = output(capsys, "ppl", "--model", model, *data, *wrong, code=2)
    assert word in said
    assert len(said.strip().splitlines()) == 1
