"""`headway eval long`: prompts of the length asked for with any tokenizer, answers where the depth says, and reports of what was found."""

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

import pytest
from support.byte_model import CONFIG, byte_tokenizer, write_model

from headway.cli import main
from headway.errors import ConfigError
from headway.eval.dataset import Dataset, ReadOptions, read_eval_documents
from headway.eval.long_cases import make_cases
from headway.eval.options import LongPlan, LongQuestions
from headway.infer.generate import prompt_ids
from headway.infer.load import load_model
from headway.model.head_masks.file import write_masks
from headway.model.head_masks.masks import HeadMasks
from headway.text.long_tasks import find_task, fit, task_names
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
        assert tokens == count(case.prompt)
        assert 0.93 * length <= tokens <= length
        assert fit(task, lambda case: count(case.prompt), length, 0.5, (0, 1))[0] == case
        assert fit(task, lambda case: count(case.prompt), length, 0.5, (0, 2))[0] != case


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_stands_in_the_prompt_at_its_depth_and_not_in_the_question(task: str) -> None:
    for depth in (0.0, 0.5, 1.0):
        case = find_task(task)(random.Random(3), 200, depth)
        places = [
            case.prompt.lower().find(answer.lower()) / len(case.prompt) for answer in case.answers
        ]
        assert all(offset >= 0 for offset in places)
        assert case.score(" ".join(case.answers).upper()) == 1.0
        assert case.score("nothing") == 0.0
        question = case.prompt.rsplit("\n", 1)[-1]
        assert not any(answer in question for answer in case.answers)
        if case.depth is not None:
            assert case.depth == pytest.approx(depth, abs=0.01)
            assert places[0] == pytest.approx(depth, abs=0.12)


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
    for name, assigned in re.findall(r"VAR (\w+) = (VAR \w+|\d+)", case.prompt):
        held[name] = held[assigned.removeprefix("VAR ")] if assigned.startswith("VAR") else assigned
    assert {name for name, content in held.items() if content == value} == set(case.answers)


def test_cases_leave_room_for_their_answers() -> None:
    tokenizer = byte_tokenizer()
    plan = LongPlan(tuple(TASKS), (1200,), LongQuestions((0.0, 1.0), samples=1))
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


@dataclass
class Comparison:
    """An evaluation of a model with and without masks: its command line, its text, its report."""

    arguments: list[str]
    text: Path
    report: Path


@pytest.fixture
def comparison(model: str, tmp_path: Path) -> Comparison:
    masks = tmp_path / "masks.tsv"
    write_masks(HeadMasks(((True, False), (False, False)), 16, 4), masks)
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and then it went away " * 12)
    report = tmp_path / "report"
    arguments = [
        "--model", model, "--tasks", "key_value,passkey", "--lengths", "350,400", "--depths", "0,1", "--samples", "1",
        "--masks", str(masks), "--random-masks", "--random-draws", "2", "--no-simple-masks", "--data", str(text),
        "--out", str(report),
    ]  # fmt: skip
    return Comparison(arguments, text, report)


def test_a_comparison_measures_the_model_with_and_without_masks(
    capsys: pytest.CaptureFixture[str], comparison: Comparison
) -> None:
    variants = json.loads(run(capsys, *comparison.arguments, "--json"))["variants"]
    assert [variant["name"] for variant in variants] == [
        "full",
        "s=0.75",
        "random s=0.75",
        "random 2 s=0.75",
    ]
    full, sparse, *_ = variants
    assert full["footprint"] == pytest.approx(1.0)
    assert sparse["footprint"] < 1
    assert sparse["sparsity"] == 0.75
    # Keys and values of 4 rows in fp32; a full head has 7 pages of 64, a ring 4 sinks, its window of 16 and 64 to spare.
    position = 2 * 4 * 4 * 8
    assert full["cache_bytes"] == position * 4 * 448
    assert sparse["cache_bytes"] == position * (448 + 3 * 84)
    assert len(full["cells"]) == 8
    assert all(variant["decode_tokens_per_second"] > 0 for variant in variants)
    assert full["perplexity"]["loss"] != sparse["perplexity"]["loss"]


def test_a_comparison_is_written_as_numbers_tables_and_pictures(
    capsys: pytest.CaptureFixture[str], comparison: Comparison
) -> None:
    variants = json.loads(run(capsys, *comparison.arguments, "--json"))["variants"]
    full = variants[0]
    stored = json.loads((comparison.report / "results.json").read_text())
    assert stored["variants"] == variants
    page = (comparison.report / "report.md").read_text()
    assert "| task | full | s=0.75 | random s=0.75 | critical footprint |" in page
    assert "| random s=0.75 | random, 2 draws | 75.0% |" in page
    assert "Loss by tokens of context" in page
    assert f"| full | none | 0.0% | 100.0% | 100.0% | {full['cache_bytes']:,} | 1.00x |" in page
    for picture in ("heat-map.png", "score-by-footprint.png"):
        assert (comparison.report / picture).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "s=0.75" in run(capsys, *comparison.arguments)


def test_by_default_masks_are_compared_with_random_draws_and_simple_choices(
    capsys: pytest.CaptureFixture[str], comparison: Comparison
) -> None:
    arguments = comparison.arguments[: comparison.arguments.index("--random-masks")]
    more = ["--data", str(comparison.text), "--out", str(comparison.report)]
    arguments[arguments.index("--tasks") + 1] = "key_value"
    arguments[arguments.index("--lengths") + 1] = "350"
    printed = json.loads(run(capsys, *arguments, *more, "--seed", "7", "--json"))
    # Of four heads one is full: there are four such masks, and no fifth to draw.
    assert [variant["name"] for variant in printed["variants"]] == [
        "full",
        "s=0.75",
        "random s=0.75",
        "random 2 s=0.75",
        "random 3 s=0.75",
        "random 4 s=0.75",
        "first s=0.75",
        "windows",
    ]
    draws = [variant for variant in printed["variants"] if variant["kind"] == "random"]
    losses = [draw["perplexity"]["loss"] for draw in draws]
    (compared,) = printed["comparisons"]
    assert compared["seeds"] == [draw["seed"] for draw in draws]
    assert compared["seeds"][0] == 7
    random_loss = compared["random"]["loss"]
    assert random_loss["values"] == losses
    assert (random_loss["min"], random_loss["max"]) == (min(losses), max(losses))
    assert random_loss["mean"] == pytest.approx(fmean(losses))
    assert random_loss["std"] == pytest.approx(stdev(losses))
    assert random_loss["std"] > 0
    windows = next(variant for variant in printed["variants"] if variant["kind"] == "windows")
    assert compared["simple"]["windows"]["loss"] == windows["perplexity"]["loss"]
    assert set(compared["simple"]) == {"first", "windows"}, "a table of 0 and 1 ranks no heads"
    page = (comparison.report / "report.md").read_text()
    assert f"{fmean(losses):.4f} ± {stdev(losses):.4f}" in page
    assert f"{min(losses):.4f} to {max(losses):.4f}" in page
    told = run(capsys, *arguments, "--random-draws", "0", code=2)
    assert "--random-draws is 0" in told


@pytest.mark.slow
def test_a_comparison_is_measured_again_when_seed_or_text_change(
    capsys: pytest.CaptureFixture[str], comparison: Comparison
) -> None:
    first = json.loads(run(capsys, *comparison.arguments, "--json"))
    again = json.loads(run(capsys, *comparison.arguments, "--json"))
    assert again == first, "what was measured is kept, timings included"
    full = first["variants"][0]
    other_seed = json.loads(run(capsys, *comparison.arguments, "--seed", "1", "--json"))
    speed = other_seed["variants"][0]["decode_tokens_per_second"]
    assert speed != full["decode_tokens_per_second"]
    comparison.text.write_text("another text of the same name, which is scored again " * 9)
    other_text = json.loads(run(capsys, *comparison.arguments, "--json"))
    assert other_text["variants"][0]["perplexity"] != full["perplexity"]


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
    report = json.loads(run(capsys, *masked, "--json"))
    # Every head keeps 20 entries and up to 50 of a chunk: 50 * 51 / 2 cells of each of 8 chunks, and 50 * 20 of all but the first,
    # of 400 * 401 / 2 in all.
    assert report["variants"][1]["footprint"] == pytest.approx(
        (8 * 1275 + 7 * 1000) / 80200, rel=0.1
    )
    assert (report["chunks"], report["notes"]) == ({"400": 50}, [])
    assert (
        main(["eval", "long", "--device", "cpu", *masked, "--chunk-tokens", "400", "--json"]) == 0
    )
    captured = capsys.readouterr()
    whole = json.loads(captured.out)
    assert whole["variants"][1]["footprint"] > 0.9
    (note,) = whole["notes"]
    assert "--chunk-tokens is 400, not smaller than the length of 400 tokens" in note
    assert note in captured.err
    assert note in (tmp_path / "report" / "report.md").read_text()


def test_questions_are_asked_in_a_chat_template_and_the_answer_begins_behind_it() -> None:
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")
    plan = LongPlan(tuple(TASKS), (1600,), LongQuestions((0.5,), samples=1, template="chatml"))
    for asked in make_cases(tokenizer, plan):
        text = tokenizer.decode(asked.ids)
        question = asked.case.question
        start = asked.case.answer_start
        assert text == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{start}"
        assert asked.case.prompt.startswith(question)
        assert asked.case.prompt.endswith(start)
        assert (start == "") == (asked.task == "key_value")
        assert len(asked.ids) + asked.new_tokens <= 1600


@pytest.mark.slow
def test_rulers_tasks_are_chosen_by_one_name_and_what_is_left_out_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = str(write_model(tmp_path / "model", CONFIG.with_(max_seq_len=8192)))
    arguments = ["--model", model, "--tasks", "ruler,key_value", "--lengths", "3000", "--depths", "0", "--samples", "1"]  # fmt: skip
    code = main(["eval", "long", "--device", "cpu", *arguments, "--json"])
    assert code == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    tasks = [cell["task"] for cell in result["variants"][0]["cells"]]
    assert tasks == result["plan"]["tasks"]
    assert tasks == [
        "ruler_niah_single_1",
        "ruler_niah_multikey_2",
        "ruler_niah_multikey_3",
        "ruler_vt",
        "ruler_fwe",
        "key_value",
    ]
    assert set(result["critical"]) == set(tasks)
    left_out, names = result["notes"]
    assert "left out: ruler_niah_single_2" in left_out
    assert left_out in captured.err
    assert "own words" in names


def test_results_of_rulers_tasks_are_measured_again_when_their_files_change(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = str(write_model(tmp_path / "model", CONFIG.with_(max_seq_len=2048)))
    folder = tmp_path / "files"
    folder.mkdir()
    arguments = [
        "--model", model, "--tasks", "ruler_niah_single_2", "--lengths", "1k", "--depths", "0", "--samples", "1",
        "--ruler-data", str(folder), "--out", str(tmp_path / "report"), "--json",
    ]  # fmt: skip
    told = run(capsys, *arguments, code=2)
    assert "ruler_niah_single_2, which needs PaulGrahamEssays.json in the folder" in told
    keys: list[str] = []
    for text in ("A line. " * 40, "A line. " * 40, "Other words. " * 40):
        (folder / "PaulGrahamEssays.json").write_text(json.dumps({"text": text}))
        run(capsys, *arguments)
        keys.append(json.loads((tmp_path / "report/parts/full.json").read_text())["key"])
    assert keys[0] == keys[1]
    assert keys[0] != keys[2]


def test_plans_without_rulers_files_are_stored_under_the_same_values_as_before() -> None:
    assert "ruler_data" not in LongPlan(("key_value",), (256,)).to_json()


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
    plan = LongPlan(("key_value",), (256,), LongQuestions((0.0,), samples=1, bos=bos))
    (asked,) = make_cases(tokenizer, plan)
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
        (["--tasks", "ruler_x"], "--tasks holds 'ruler_x'; of RULER there are ruler, ruler_niah"),
        (["--tasks", "ruler,ruler_vt"], "--tasks holds ruler and ruler_vt; ruler holds it already"),
        (["--tasks", "ruler_qa_1"], "--tasks holds ruler_qa_1, which needs squad.json"),
        (["--longbench", "nowhere"], "--longbench is 'nowhere', which is not a file"),
        (["--ruler-data", "nowhere"], "--ruler-data is 'nowhere', which is not a folder"),
        (["--lengths", "4q"], "--lengths holds '4q'"),
        (["--lengths", "1k"], "--lengths holds 1024; the model's max_seq_len is 512"),
        (["--depths", "2"], "--depths is 2.0"),
        (["--samples", "0"], "--samples is 0"),
        (["--sparsities", "0,0.5"], "--sparsities is 0.0, 0.5"),
        (["--random-masks"], "--random-masks is given, but there are no masks"),
        (["--masks", "nowhere.tsv"], "masks is 'nowhere.tsv'"),
    ],
)
def test_a_wrong_option_of_long_context_tasks_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], model: str, wrong: list[str], said: str
) -> None:
    told = run(capsys, "--model", model, "--tasks", "key_value", "--lengths", "256", *wrong, code=2)
    assert said in told
    assert len(told.strip().splitlines()) == 1
