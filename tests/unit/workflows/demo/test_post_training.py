"""The demo's pairs: what is held out from fine-tuning is held out from preference, and wrong answers stay on their side."""

import json
from pathlib import Path

from support.byte_model import byte_tokenizer

from headway.prepare.build import BuildOptions, build_store
from headway.store.reader import open_store
from headway.workflows.demo.post_training import VALID_FRACTION, held_out, report, write_pairs


def test_the_same_questions_are_held_out_and_no_answer_crosses_sides(tmp_path: Path) -> None:
    byte_tokenizer("<|im_start|>", "<|im_end|>").save(tmp_path / "tokenizer")
    questions = tmp_path / "questions" / "docstrings.jsonl"
    pairs = tmp_path / "pairs" / "docstrings.jsonl"
    questions.parent.mkdir()
    turns = [
        [
            {"role": "user", "content": f"What does f{n} do?"},
            {"role": "assistant", "content": f"It adds {n}."},
        ]
        for n in range(60)
    ]
    questions.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    assert write_pairs(questions, pairs) == 60
    sides = held_out(questions)
    assert sum(sides) == 6
    for number, line in enumerate(pairs.read_text().splitlines()):
        pair = json.loads(line)
        assert pair["chosen"] == f"It adds {number}."
        wrong = int(pair["rejected"].removeprefix("It adds ").removesuffix("."))
        assert wrong != number
        assert sides[wrong] == sides[number]
    build_store(
        [questions],
        tmp_path / "tokenizer",
        tmp_path / "chat",
        BuildOptions("chat", valid_fraction=VALID_FRACTION),
    )
    build_store(
        [pairs],
        tmp_path / "tokenizer",
        tmp_path / "store",
        BuildOptions("preference", valid_fraction=VALID_FRACTION),
    )
    chat = open_store(tmp_path / "chat" / "valid")
    store = open_store(tmp_path / "store" / "valid")
    for number in range(6):
        answer = store.document(2 * number)
        assert chat.document(number)[: len(answer)].tolist() == answer.tolist()


def test_a_report_shows_every_model_and_escapes_what_would_break_a_table() -> None:
    answers = [
        {"question": "Q?", "docstring": "a | b", "pretrain": "", "sft": "two\nlines", "dpo": "c"}
    ]
    numbers = dict.fromkeys(
        (
            "first_valid_loss",
            "last_valid_loss",
            "bits_per_byte",
            "bigram_bits_per_byte",
            "sft_first_valid_loss",
            "sft_last_valid_loss",
        ),
        1.0,
    )
    page = report(
        {
            **numbers,
            "reward_accuracy": 0.75,
            "valid_pairs": 8,
            "reward_margin": 0.5,
            "answers": answers,
        }
    )
    assert "| the library itself | a \\| b |" in page
    assert "| fine-tuned | two lines |" in page
    assert "| pretrained | (nothing) |" in page
    assert "0.750 of 8 pairs" in page
