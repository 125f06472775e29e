"""Batch jobs: each line becomes what it would alone, in order; a stopped job continues; a bad line is one line's error."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.byte_model import CONFIG, byte_tokenizer, write_model, write_small_adapter
from support.disk_bit_flip import flip_bit_on_disk

from headway.cli import main
from headway.errors import ConfigError
from headway.infer.batch import WINDOW, BatchOptions, BatchReport, _BatchJob, answer_file  # pyright: ignore[reportPrivateUsage]
from headway.infer.batch_files import BatchLine, read_lines
from headway.infer.engine.request import EngineOptions
from headway.infer.generate import GenerateOptions, answer, generate
from headway.infer.load import LoadedModel, load_model
from headway.infer.sampling import Sampling
from headway.model.head_masks.masks import HeadMasks
from headway.runtime.digests import DIGESTS
from headway.tokenizer.chat_template import BUILT_IN

ENGINE = EngineOptions(max_running=4, prefill_tokens=24, page_tokens=16)
SAMPLED = GenerateOptions(max_new_tokens=10, sampling=Sampling(1.0, seed=3))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plain = byte_tokenizer("<|im_start|>", "<|im_end|>")
    tokenizer = plain.with_chat_template(BUILT_IN["chatml"].export(plain))
    return write_model(tmp_path_factory.mktemp("model"), CONFIG.with_(max_seq_len=96), tokenizer)


@pytest.fixture(scope="module")
def loaded(model: Path) -> LoadedModel:
    return load_model(model)


def write(path: Path, records: list[Any]) -> Path:
    path.write_text(
        "".join(
            (record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records
        )
    )
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(loaded: LoadedModel, path: Path, output: Path, options: BatchOptions) -> BatchReport:
    return answer_file(loaded, path, output, options, ENGINE)


def test_every_line_is_what_it_would_be_alone(loaded: LoadedModel, tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"prompt": f"line {number} " * (1 + number % 3), "id": f"n{number}"} for number in range(13)
    ]
    records[4] = {"text": "a text to continue", "note": {"kept": True}}
    records[7] = {"messages": [{"role": "user", "content": "Hello?"}], "id": 7}
    path = write(tmp_path / "in.jsonl", records)
    out = tmp_path / "out.jsonl"
    report = run(loaded, path, out, BatchOptions(SAMPLED, samples=3))
    results = lines(out)
    assert (report.lines, report.answered, report.failed) == (13, 13, 0)
    for number, (record, line) in enumerate(zip(records, results, strict=True)):
        assert line == {"index": number, **record, "generations": line["generations"]}
        asked = record.get("prompt", record.get("text"))
        if asked is None:
            alone = answer(loaded, ["Hello?"] * 3, "tokenizer", SAMPLED)
        else:
            alone = generate(loaded, [asked] * 3, SAMPLED)
        assert [generation["text"] for generation in line["generations"]] == [
            generation.text for generation in alone
        ], number
        assert [generation["stopped_by"] for generation in line["generations"]] == [
            generation.stopped_by for generation in alone
        ]
        assert [generation["tokens"] for generation in line["generations"]] == [
            len(generation.token_ids) for generation in alone
        ]
    assert report.generated_tokens == sum(
        generation["tokens"] for line in results for generation in line["generations"]
    )


def test_questions_of_a_file_end_at_stop_texts_as_they_do_alone(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    path = write(tmp_path / "in.jsonl", [{"prompt": f"what is {number}?"} for number in range(5)])
    alone = answer(
        loaded, [f"what is {number}?" for number in range(5)], "chatml", SAMPLED, system="Be brief."
    )
    stop = next(generation.text[2:4] for generation in alone if len(generation.text) > 4)
    options = replace(SAMPLED, stop=(stop,))
    run(loaded, path, tmp_path / "out.jsonl", BatchOptions(options, "chatml", "Be brief."))
    alone = answer(
        loaded, [f"what is {number}?" for number in range(5)], "chatml", options, system="Be brief."
    )
    generations = [line["generations"][0] for line in lines(tmp_path / "out.jsonl")]
    assert [(generation["text"], generation["stopped_by"]) for generation in generations] == [
        (generation.text, generation.stopped_by) for generation in alone
    ]
    assert any(generation["stopped_by"] == "stop" for generation in generations)


def test_a_stopped_job_continues_and_loses_nothing(loaded: LoadedModel, tmp_path: Path) -> None:
    path = write(
        tmp_path / "in.jsonl", [{"prompt": f"line {number}", "id": number} for number in range(9)]
    )
    whole = tmp_path / "whole.jsonl"
    out = tmp_path / "out.jsonl"
    run(loaded, path, whole, BatchOptions(SAMPLED))
    content = whole.read_bytes()
    run(loaded, path, out, BatchOptions(SAMPLED))
    for size in (0, 1, content.index(b"\n") + 1, len(content) // 2, len(content) - 1):
        out.write_bytes(content[:size])
        report = run(loaded, path, out, BatchOptions(SAMPLED))
        assert out.read_bytes() == content
        assert report.answered == 9 - content[:size].count(b"\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            BatchOptions(replace(SAMPLED, max_new_tokens=4)),
            "begun with max_new_tokens 10; now it is 4",
        ),
        (BatchOptions(SAMPLED, samples=2), "begun with n 1; now it is 2"),
        (BatchOptions(replace(SAMPLED, sampling=Sampling(1.0, seed=4))), "begun with seed 3"),
    ],
)
def test_a_job_is_not_continued_with_other_settings(
    loaded: LoadedModel, tmp_path: Path, options: BatchOptions, said: str
) -> None:
    path = write(tmp_path / "in.jsonl", [{"prompt": "one"}, {"prompt": "two"}])
    run(loaded, path, tmp_path / "out.jsonl", BatchOptions(SAMPLED))
    with pytest.raises(ConfigError, match=said):
        run(loaded, path, tmp_path / "out.jsonl", options)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [(["one", "three"], "line 2 is of another input"), (["one"], "more lines than the input")],
)
def test_an_output_of_another_input_is_refused(
    loaded: LoadedModel, tmp_path: Path, prompts: list[str], message: str
) -> None:
    path = write(tmp_path / "in.jsonl", [{"prompt": "one"}, {"prompt": "two"}])
    run(loaded, path, tmp_path / "out.jsonl", BatchOptions(SAMPLED))
    write(path, [{"prompt": prompt} for prompt in prompts])
    with pytest.raises(ConfigError, match=message):
        run(loaded, path, tmp_path / "out.jsonl", BatchOptions(SAMPLED))


def test_an_output_of_another_tool_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [{"prompt": "one"}])
    (tmp_path / "other.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="not written by this verb"):
        run(loaded, path, tmp_path / "other.jsonl", BatchOptions(SAMPLED))


def test_several_greedy_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="--n is 2 with temperature 0"):
        BatchOptions(samples=2)


BAD = ["not json", "[1]", {"id": 1}, {"prompt": 5}, {"prompt": ""}, {"prompt": "x" * 200}, {"messages": []}, {"prompt": "p", "index": 3},
       {"messages": [{"role": "assistant", "content": "hi"}]}, '{"prompt": "\\ud800"}']  # fmt: skip


def test_a_bad_line_is_an_error_of_that_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "in.jsonl", ["", {"prompt": "ok"}, *BAD, {"prompt": "fine"}])
    out = tmp_path / "deep" / "out.jsonl"
    code = main(
        [
            "generate",
            "--model",
            str(model),
            "--input",
            str(path),
            "--output",
            str(out),
            "--max-new-tokens",
            "3",
            "--json",
        ]
    )
    report = json.loads(capsys.readouterr().out)
    results = lines(out)
    assert code == 1
    assert report["failed"] == len(BAD)
    assert report["lines"] == len(BAD) + 2
    assert [("error" in line) for line in results] == [False, *[True] * len(BAD), False]
    assert all("\n" not in line["error"] and "in.jsonl:" in line["error"] for line in results[1:-1])
    code = main(
        [
            "generate",
            "--model",
            str(model),
            "--input",
            str(tmp_path / "none.jsonl"),
            "--output",
            str(out),
        ]
    )
    assert code == 2
    assert main(["generate", "--model", str(model), "--prompt", "a", "--n", "2"]) == 2


def test_memory_does_not_grow_with_the_input(loaded: LoadedModel) -> None:
    """The job never holds more lines than its window, and reads no line before it has room for it."""
    read = 0

    def endless() -> Any:
        nonlocal read
        while True:
            yield BatchLine(read, "here", {"prompt": "a"})
            read += 1

    job = _BatchJob(loaded, BatchOptions(GenerateOptions(max_new_tokens=1)), ENGINE)
    for written, _ in zip(range(1, 3001), job.run(endless()), strict=False):
        assert read - written <= WINDOW
        assert len(job._open) <= 2 * ENGINE.max_running + 1  # pyright: ignore[reportPrivateUsage]
        if written == 100:
            break
    assert read < 100 + 4 * ENGINE.max_running


def test_compressed_lines_are_read(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "in.jsonl.gz").write_bytes(
        gzip.compress(b'\xef\xbb\xbf{"prompt": "a"}\n\n{"prompt": "b"}')
    )
    assert [line.record for line in read_lines(tmp_path / "in.jsonl.gz")] == [
        {"prompt": "a"},
        {"prompt": "b"},
    ]


@pytest.mark.drill
def test_a_killed_job_gives_the_bytes_of_an_undisturbed_one(model: Path, tmp_path: Path) -> None:
    path = write(
        tmp_path / "in.jsonl", [{"prompt": f"line {number}", "id": number} for number in range(400)]
    )
    words = [sys.executable, "-m", "headway", "generate", "--model", str(model), "--input", str(path), "--max-new-tokens", "24",
             "--temperature", "1", "--n", "2", "--output"]  # fmt: skip
    subprocess.run([*words, str(tmp_path / "whole.jsonl")], check=True)
    chance = random.Random(5)
    kills = 0
    out = tmp_path / "out.jsonl"
    while True:
        job = subprocess.Popen([*words, str(out)])
        before = out.stat().st_size if out.exists() else 0
        wanted = before + chance.randrange(1, 12000)
        while job.poll() is None and (not out.exists() or out.stat().st_size < wanted):
            time.sleep(0.002)
        if job.poll() is not None:
            break
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
        kills += 1
    assert job.returncode == 0
    assert kills >= 3
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("part", ["weights", "tokenizer", "adapter"])
def test_another_model_under_the_same_path_does_not_continue_a_job(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the path holds was replaced while the job stood still: its answers would be of two models."""
    base = write_model(tmp_path / "base", CONFIG.with_(max_seq_len=96))
    model = write_small_adapter(base, tmp_path / "model") if part == "adapter" else base
    path = write(tmp_path / "in.jsonl", [{"prompt": f"line {number}"} for number in range(4)])
    out = tmp_path / "out.jsonl"
    command = [
        "generate",
        "--model",
        str(model),
        "--input",
        str(path),
        "--output",
        str(out),
        "--max-new-tokens",
        "3",
    ]
    assert main(command) == 0
    whole = out.read_text()
    out.write_text("".join(line + "\n" for line in whole.splitlines()[:2]))
    if part == "tokenizer":
        config = model / "tokenizer_config.json"
        config.write_text(config.read_text().replace("}", ', "note": 1}', 1))
    else:
        file = next(model.glob("*model.safetensors"))
        flip_bit_on_disk(file, 8 * (file.stat().st_size - 2))
    capsys.readouterr()
    assert main(["verify", "folder", str(model), "--update"]) == 0
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--output is {out}, which was begun with other content of model" in line
    assert f"its {part} changed" in line
    # A folder without digests is told apart by the content of its files.
    (model / DIGESTS).unlink()
    assert main(command) == 2
    assert f"its {part} changed" in capsys.readouterr().err


def test_a_job_of_an_earlier_version_continues_and_other_masks_do_not(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    path = write(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    out = tmp_path / "out.jsonl"
    options = BatchOptions(GenerateOptions(max_new_tokens=2))
    layers = loaded.config.num_layers
    heads = loaded.config.kv_heads
    head_masks = HeadMasks(((True,) + (False,) * (heads - 1),) * layers, 8, 1)
    other_masks = HeadMasks(((False,) * (heads - 1) + (True,),) * layers, 8, 1)
    run(loaded.with_masks(head_masks, "own"), path, out, options)
    side = out.with_name("out.jsonl.settings")
    settings = json.loads(side.read_text())
    with pytest.raises(ConfigError, match="its masks changed"):
        run(loaded.with_masks(other_masks, "own"), path, out, options)
    side.write_text(
        json.dumps({key: value for key, value in settings.items() if not key.endswith("_digest")})
    )
    assert run(loaded.with_masks(head_masks, "own"), path, out, options).answered == 0
    assert json.loads(side.read_text()) == settings
