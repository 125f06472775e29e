"""HarnessModel to the harness equal plain transformers, token by token; they need no harness."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.byte_model import CONFIG, write_model
from support.ranks import run_ranks

from headway.errors import ConfigError, DataError
from headway.eval.harness_model import MAX_NEW_TOKENS, HarnessModel, generate_options
from headway.infer.load import load_model

LIMIT = 24
PAIRS = [
    ("the cat sat on ", "the mat"),
    ("", "zwölf"),
    ("a" * 40, "bcd"),
    ("x", " y"),
    ("<s>q", "r"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("model"), CONFIG.with_(vocab_size=258, max_seq_len=LIMIT)
    )


@pytest.fixture(scope="module")
def transformers_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def reference(reference_model: Any, before: list[int], after: list[int]) -> tuple[float, bool]:
    """One forward per token, each from at most LIMIT tokens before it, the last token with a full window."""
    ids = [*before, *after][-(LIMIT + 1) :]
    value = 0.0
    greedy = True
    for position in range(len(ids) - len(after), len(ids)):
        chance = (
            reference_model(torch.tensor([ids[:position]])).logits[0, -1].double().log_softmax(-1)
        )
        value += float(chance[ids[position]])
        greedy &= int(chance.argmax()) == ids[position]
    return value, greedy


def test_likelihoods_equal_transformers(folder: Path, transformers_model: Any) -> None:
    answers = HarnessModel(load_model(folder), batch_tokens=30)
    likelihoods = answers.loglikelihood(PAIRS)
    for (context, continuation), (value, greedy) in zip(PAIRS, likelihoods, strict=True):
        bare = context.rstrip()
        spaces = context[len(bare) :]
        before = answers.tokenizer.encode(bare, allowed_special=["<s>"]) or [256]
        expected = reference(
            transformers_model, before, answers.tokenizer.encode(spaces + continuation)
        )
        assert (value, greedy) == (pytest.approx(expected[0], rel=1e-5), expected[1])


def test_a_greedy_continuation_is_called_greedy(folder: Path) -> None:
    answers = HarnessModel(load_model(folder))
    prompts = [chr(letter) for letter in range(97, 123)]
    is_greedy = dict(
        zip(
            prompts,
            answers.generate([(prompt, {"max_gen_toks": 1}) for prompt in prompts]),
            strict=True,
        )
    )
    pairs = [
        (prompt, text) for prompt, text in is_greedy.items() if text.isascii() and text.strip()
    ]
    assert len(pairs) > 3
    assert all(greedy for _, greedy in answers.loglikelihood(pairs))
    others = [(prompt, "~" if text != "~" else "!") for prompt, text in pairs]
    assert not any(greedy for _, greedy in answers.loglikelihood(others))


def test_a_long_text_is_scored_whole_in_windows_that_touch(
    folder: Path, transformers_model: Any
) -> None:
    answers = HarnessModel(load_model(folder))
    ids = answers.tokenizer.encode("over the hills and far away, to the sea and the islands")
    assert 2 * LIMIT < len(ids) < 3 * LIMIT
    parts = [
        ([256], ids[:LIMIT]),
        (ids[LIMIT - 1 : LIMIT], ids[LIMIT : 2 * LIMIT]),
        (ids[len(ids) - LIMIT - 1 : 2 * LIMIT], ids[2 * LIMIT :]),
    ]
    expected = sum(reference(transformers_model, before, after)[0] for before, after in parts)
    assert answers.rolling([answers.tokenizer.decode(ids), "a"])[0] == pytest.approx(
        expected, rel=1e-5
    )


def test_ranks_share_the_work_and_all_get_every_answer(folder: Path) -> None:
    requests = [
        (context + continuation, {"max_gen_toks": 3 + len(context) % 2, "until": ["e"]})
        for context, continuation in PAIRS
    ]

    def work(group: Any) -> Any:
        answers = HarnessModel(load_model(folder), batch_tokens=30, group=group)
        return (
            answers.loglikelihood(PAIRS),
            answers.rolling(["a" * 60, "b"]),
            answers.generate(requests),
        )

    (alone,) = run_ranks(work, 1)
    assert run_ranks(work, 2) == [alone, alone]
    assert len(alone[2]) == len(PAIRS)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (MAX_NEW_TOKENS, (), 0.0)),
        (
            {
                "until": "\n",
                "max_new_tokens": 5,
                "do_sample": False,
                "temperature": 0.7,
                "top_p": 0.9,
                "num_beams": 1,
            },
            (5, ("\n",), 0.0),
        ),
        (
            {
                "until": ["a", ""],
                "max_gen_toks": 3,
                "max_tokens": 9,
                "temperature": 0.5,
                "top_k": 4,
            },
            (3, ("a",), 0.5),
        ),
        ({"do_sample": True}, (MAX_NEW_TOKENS, (), 1.0)),
        ({"do_sample": True, "temperature": 0.0}, (MAX_NEW_TOKENS, (), 0.0)),
    ],
)
def test_settings_of_generation_mean_what_they_mean_to_the_harness(
    settings: dict[str, Any], expected: Any
) -> None:
    options, until = generate_options(settings)
    assert (options.max_new_tokens, until, options.sampling.temperature) == expected
    assert (options.stop, options.sampling.top_k) == (until, 4 if "top_k" in settings else None)


def test_a_beam_search_is_refused(folder: Path) -> None:
    answers = HarnessModel(load_model(folder))
    with pytest.raises(ConfigError, match="num_beams 4, which headway does not support"):
        answers.generate([("a", {"num_beams": 4})])


def test_an_answer_longer_than_the_context_is_refused(folder: Path) -> None:
    answers = HarnessModel(load_model(folder))
    with pytest.raises(ConfigError, match=r"requests 24 new tokens; the model's max_seq_len=24"):
        answers.generate([("a", {"max_gen_toks": LIMIT})])
    with pytest.raises(ConfigError, match="an answer of 30 tokens"):
        answers.loglikelihood([("a", "b" * 30)])


def test_the_likelihood_of_an_empty_answer_is_refused(folder: Path) -> None:
    answers = HarnessModel(load_model(folder))
    with pytest.raises(DataError, match="an empty text"):
        answers.loglikelihood([("a", "")])


def test_batches_of_no_tokens_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--batch-tokens is 0"):
        HarnessModel(load_model(folder), batch_tokens=0)
