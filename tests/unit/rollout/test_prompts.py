"""Prompts in memory: records become ids and messages, each is one row, and what cannot be used is left out or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.byte_model import byte_tokenizer

from headway.data.config import SourceConfig
from headway.errors import ConfigError, DataError
from headway.rollout.prompts import PROMPT, PromptSource, read_prompts
from headway.tokenizer.chat import find_template, render_prompt
from headway.tokenizer.load import Tokenizer

RECORDS: list[dict[str, Any]] = [
    {"question": "1+1=", "answer": "2"},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    {"prompt": "Say x", "level": 3},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


def prompts_of(
    folder: Path, records: list[Any], tokenizer: Tokenizer, longest: int = 500, **settings: Any
) -> PromptSource:
    path = folder / "prompts.jsonl"
    path.write_text(
        "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), "utf-8"
    )
    source = SourceConfig.model_validate(
        {"path": str(path), "kind": "prompt", "chat_template": "alpaca", **settings}
    )
    return read_prompts(source, None, tokenizer, longest=longest, first_number=settings.get("first", 0))  # fmt: skip


def test_a_prompt_has_the_ids_of_its_turns_its_messages_and_its_record(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    source = prompts_of(tmp_path, RECORDS, tokenizer)
    assert source.num_documents == 3
    first, second, third = source.prompts
    assert first.record["answer"] == "2"
    assert [dict(message) for message in first.messages] == [{"role": "user", "content": "1+1="}]
    assert [message["role"] for message in second.messages] == ["system", "user"]
    assert third.record["level"] == 3
    template = find_template("alpaca", tokenizer)
    text = tokenizer.decode(list(first.ids))
    assert "1+1=" in text
    assert "2" not in text.replace("1+1=", "")
    assert template is not None
    assert render_prompt is not None
    assert len({prompt.digest for prompt in source.prompts}) == 3


def test_digests_depend_on_the_record_too(tmp_path: Path, tokenizer: Tokenizer) -> None:
    other = [{"question": "1+1=", "answer": "3"}]
    digest = prompts_of(tmp_path, RECORDS[:1], tokenizer).prompts[0].digest
    assert prompts_of(tmp_path, RECORDS[:1], tokenizer).prompts[0].digest == digest
    assert prompts_of(tmp_path, other, tokenizer).prompts[0].digest != digest
    assert (
        prompts_of(tmp_path, other, tokenizer).content_key
        != prompts_of(tmp_path, RECORDS[:1], tokenizer).content_key
    )


def test_longer_prompts_are_left_out_with_one_line(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = [len(prompt.ids) for prompt in prompts_of(tmp_path, RECORDS, tokenizer).prompts]
    source = prompts_of(tmp_path, RECORDS, tokenizer, longest=sorted(lengths)[1])
    assert source.num_documents == 2
    assert "1 prompts are left out: 1 leave no room" in caplog.text


def test_no_prompt_that_fits_is_refused_in_one_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"no prompt of at most 5 tokens \(3 are longer") as info:
        prompts_of(tmp_path, RECORDS, tokenizer, longest=5)
    assert len(str(info.value).splitlines()) == 1


def test_bad_records_are_refused_or_dropped_as_the_source_says(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    records = [RECORDS[0], {"question": 7}, RECORDS[2]]
    with pytest.raises(DataError, match=r"prompts\.jsonl"):
        prompts_of(tmp_path, records, tokenizer)
    source = prompts_of(tmp_path, records, tokenizer, drop_bad=True)
    assert source.num_documents == 2
    assert "1 cannot be read" in caplog.text


def test_a_limit_counts_records(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert prompts_of(tmp_path, RECORDS, tokenizer, limit=2).num_documents == 2


def test_a_row_is_one_prompt_with_its_number(tmp_path: Path, tokenizer: Tokenizer) -> None:
    from headway.data.rows import RowLayout
    from headway.rollout.prompts import SEQ_LEN

    source = prompts_of(tmp_path, RECORDS, tokenizer)
    layout = RowLayout([source], SEQ_LEN, 2, one_document=True)
    assert source.lengths(0, 3).tolist() == [1, 1, 1]
    assert source.lengths(1, 9).tolist() == [1, 1]
    assert source.tokens(1, 0, 1).tolist() == [0]
    assert source.first_at(2) == 2
    assert source.empty_columns(4, layout)[PROMPT].tolist() == [-1] * 4
