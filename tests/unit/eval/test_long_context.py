"""`headway eval long`: prompts of the length asked for with any tokenizer, answers where the depth says, and reports of what was found."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.byte_model import CONFIG, byte_tokenizer, write_model

from headway.cli import main
from headway.errors import ConfigError
from headway.eval.dataset import Dataset, ReadOptions, read_eval_documents
from headway.eval.long_context import LongPlan, make_cases
from headway.eval.long_tasks import find_task, fit, task_names
from headway.infer.generate import prompt_ids
from headway.infer.load import load_model
from headway.model.head_masks.file import write_masks
from headway.model.head_masks.masks import HeadMasks
from headway.tokenizer.load import Tokenizer

TASKS = [
    "common_words", "key_value", "needle_multi_key", "needle_multi_query", "needle_multi_value", "needle_single", "passkey",
    "variable_tracking",
]  # fmt: skip
TOKENIZERS = {"bytes": lambda text: len(text.encode()), "words": lambda text: len(text.split())}


def test_every_task_has_a_file() -> None:
    assert task_names() == TASKS


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_prompts_fill_their_length_with_any_tokenizer(task: str, tokenizer: str) -> None:
    count = TOKENIZERS[tokenizer]
    for length in (1500, 9000):
        case, tokens = fit(task, lambda case: count(case.prompt), length, 0.5, (0, 1))
        assert tokens == count(case.prompt) and 0.93 * length <= tokens <= length
        assert fit(task, lambda case: count(case.prompt), length, 0.5, (0, 1))[0] == case
        assert fit(task, lambda case: count(case.prompt), length, 0.5, (0, 2))[0] != case


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_stands_in_the_prompt_at_its_depth_and_not_in_the_question(task: str) -> None:
    for depth in (0.0, 0.5, 1.0):
        case = find_task(task)(random.Random(3), 200, depth)
        places = [
            case.prompt.lower().find(answer.lower()) / len(case.prompt) for answer in case.answers
        ]
        assert all(place >= 0 for place in places)
        assert case.score(" ".join(case.answers).upper()) == 1.0 and case.score("nothing") == 0.0
        question = case.prompt.rsplit("\n", 1)[-1]
        assert not any(answer in question for answer in case.answers)
        if case.depth is not None:
            assert case.depth == pytest.approx(depth, abs=0.01) and places[0] == pytest.approx(
                depth, abs=0.12
            )


def test_common_words_are_the_most_common() -> None:
    from collections import Counter

    case = find_task("common_words")(random.Random(1), 400, 0.0)
    words = [word for word in case.prompt.split("\n")[1].split() if not word.endswith(".")]
    assert {word for word, _ in Counter(words).most_common(10)} == set(case.answers)


def test_variables_of_the_chain_and_no_others_hold_the_value() -> None:
    import re

    case = find_task("variable_tracking")(random.Random(1), 100, 0.0)
    value = re.findall(r"the value (\d+)", case.prompt)[0]
    held: dict[str, str] = {}
    for name, what in re.findall(r"VAR (\w+) = (VAR \w+|\d+)", case.prompt):
        held[name] = held[what.removeprefix("VAR ")] if what.startswith("VAR") else what
    assert {name for name, what in held.items() if what == value} == set(case.answers)


def test_cases_leave_room_for_their_answers() -> None:
    tokenizer = byte_tokenizer()
    plan = LongPlan(tuple(TASKS), (1200,), (0.0, 1.0), samples=1)
    cases = make_cases(tokenizer, plan)
    assert len(cases) == 2 * len(TASKS)
    for asked in cases:
        assert len(prompt_ids(tokenizer, asked.case.prompt)) + asked.new_tokens <= 1200
        assert asked.new_tokens > len(" ".join(asked.case.answers))
    with pytest.raises(
        ConfigError, match=r"--lengths holds \d+; needle_single needs at least \d+ tokens"
    ):
        make_cases(tokenizer, LongPlan(("needle_single",), (120,)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model"), CONFIG.with_(max_seq_len=512)))


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["eval", "long", "--device", "cpu", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_a_report_compares_the_model_with_masks(
    capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
) -> None:
    write_masks(HeadMasks(((True, False), (False, False)), 16, 4), tmp_path / "masks.tsv")
    (tmp_path / "text.txt").write_text("the cat sat on the mat and then it went away " * 12)
    arguments = [
        "--model", model, "--tasks", "key_value,passkey", "--lengths", "350,400", "--depths", "0,1", "--samples", "1",
        "--masks", str(tmp_path / "masks.tsv"), "--random-masks", "--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "report"),
    ]  # fmt: skip
    found = json.loads(run(capsys, *arguments, "--json"))
    assert [one["name"] for one in found["variants"]] == ["full", "s=0.75", "random s=0.75"]
    full, sparse, _ = found["variants"]
    assert (
        full["footprint"] == pytest.approx(1.0)
        and sparse["footprint"] < 1
        and sparse["sparsity"] == 0.75
    )
    # Keys and values of 4 rows in fp32; a full head has 7 pages of 64, a ring 4 sinks, its window of 16 and 64 to spare.
    position = 2 * 4 * 4 * 8
    assert full["cache_bytes"] == position * 4 * 448
    assert sparse["cache_bytes"] == position * (448 + 3 * 84)
    assert len(full["cells"]) == 8 and all(
        one["decode_tokens_per_second"] > 0 for one in found["variants"]
    )
    assert full["perplexity"]["loss"] != sparse["perplexity"]["loss"]
    stored = json.loads((tmp_path / "report" / "results.json").read_text())
    assert stored["variants"] == found["variants"]
    report = (tmp_path / "report" / "report.md").read_text()
    assert (
        "| task | full | s=0.75 | random s=0.75 | critical footprint |" in report
        and "Loss by tokens of context" in report
    )
    assert f"| full | none | 0.0% | 100.0% | 100.0% | {full['cache_bytes']:,} | 1.00x |" in report
    for picture in ("heat-map.png", "score-by-footprint.png"):
        assert (tmp_path / "report" / picture).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    again = json.loads(run(capsys, *arguments, "--json"))
    assert again == found, "what was measured is kept, timings included"
    changed = json.loads(run(capsys, *arguments, "--seed", "1", "--json"))
    assert changed["variants"][0]["decode_tokens_per_second"] != full["decode_tokens_per_second"]
    (tmp_path / "text.txt").write_text("another text of the same name, which is scored again " * 9)
    assert (
        json.loads(run(capsys, *arguments, "--json"))["variants"][0]["perplexity"]
        != full["perplexity"]
    )
    assert "s=0.75" in run(capsys, *arguments)


def test_prompts_are_read_in_eighths_of_their_length_by_default_and_one_piece_is_reported(
    capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
) -> None:
    plan = LongPlan(("key_value",), (400, 4096, 131072))
    assert [plan.chunk(length) for length in plan.lengths] == [50, 512, 4096]
    write_masks(HeadMasks(((False, False), (False, False)), 16, 4), tmp_path / "masks.tsv")
    common = [
        "--model",
        model,
        "--tasks",
        "key_value",
        "--lengths",
        "400",
        "--depths",
        "0",
        "--samples",
        "1",
    ]
    masked = [*common, "--masks", str(tmp_path / "masks.tsv"), "--out", str(tmp_path / "report")]
    found = json.loads(run(capsys, *masked, "--json"))
    # Every head keeps 20 entries and up to 50 of a chunk: 50 * 51 / 2 cells of each of 8 chunks, and 50 * 20 of all but the first,
    # of 400 * 401 / 2 in all.
    assert found["variants"][1]["footprint"] == pytest.approx(
        (8 * 1275 + 7 * 1000) / 80200, rel=0.1
    )
    assert (found["chunks"], found["notes"]) == ({"400": 50}, [])
    assert (
        main(["eval", "long", "--device", "cpu", *masked, "--chunk-tokens", "400", "--json"]) == 0
    )
    captured = capsys.readouterr()
    whole = json.loads(captured.out)
    assert whole["variants"][1]["footprint"] > 0.9
    (note,) = whole["notes"]
    assert "--chunk-tokens is 400, not smaller than the length of 400 tokens" in note
    assert note in captured.err and note in (tmp_path / "report" / "report.md").read_text()


def test_questions_are_asked_in_a_chat_template_and_the_answer_begins_behind_it() -> None:
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")
    plan = LongPlan(tuple(TASKS), (1600,), (0.5,), samples=1, template="chatml")
    for asked in make_cases(tokenizer, plan):
        text = tokenizer.decode(asked.ids)
        question, start = asked.case.question, asked.case.answer_start
        assert text == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{start}"
        assert asked.case.prompt.startswith(question) and asked.case.prompt.endswith(start)
        assert (start == "") == (asked.task == "key_value")
        assert len(asked.ids) + asked.new_tokens <= 1600


def chat_tokenizer(template: str | None) -> Tokenizer:
    """A tokenizer that adds no begin token, with a chat template."""
    return byte_tokenizer("<|im_start|>", "<|im_end|>").with_chat_template(template)


@pytest.mark.parametrize(
    ("template", "bos", "first"),
    [
        (None, None, []),
        ("{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}", None, ["<s>"]),
        ("{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}", False, []),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", None, []),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", True, ["<s>"]),
        ("{{ raise_exception('no') }}", None, []),
    ],
)
def test_texts_and_prompts_begin_as_the_model_expects(
    tmp_path: Path, template: str | None, bos: bool | None, first: list[str]
) -> None:
    tokenizer = chat_tokenizer(template)
    expected = [tokenizer.special_tokens[name] for name in first]
    (asked,) = make_cases(tokenizer, LongPlan(("key_value",), (256,), (0.0,), samples=1, bos=bos))
    assert asked.ids == [*expected, *tokenizer.encode(asked.case.prompt)]
    (tmp_path / "text.txt").write_text("the cat")
    loaded = replace(load_model(write_model(tmp_path)), tokenizer=tokenizer)
    (piece,) = read_eval_documents(
        Dataset("text", (str(tmp_path / "text.txt"),)), loaded, ReadOptions(bos=bos)
    )
    assert (list(piece.lead), piece.ids) == (expected, tokenizer.encode("the cat"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--tasks", "needle"], "--tasks holds 'needle'; there are common_words"),
        (["--lengths", "4q"], "--lengths holds '4q'"),
        (["--lengths", "1k"], "--lengths holds 1024; the model's max_seq_len is 512"),
        (["--depths", "2"], "--depths is 2.0"),
        (["--samples", "0"], "--samples is 0"),
        (["--sparsities", "0,0.5"], "--sparsities is 0.0, 0.5"),
        (["--random-masks"], "--random-masks is given, but there are no masks"),
        (["--masks", "nowhere.tsv"], "masks is 'nowhere.tsv'"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], model: str, wrong: list[str], said: str
) -> None:
    told = run(capsys, "--model", model, "--tasks", "key_value", "--lengths", "256", *wrong, code=2)
    assert said in told and len(told.strip().splitlines()) == 1
