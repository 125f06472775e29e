"""A tokenizer fits a model that has a row for each of its ids, to the last one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.checkpoint.stored_model import check_vocabulary
from headway.errors import ConfigError
from headway.model.config import ModelConfig


def test_one_id_without_a_row_is_refused_and_spare_rows_are_not() -> None:
    config = ModelConfig(vocab_size=320)
    for size in (256, 319, 320):
        tokenizer: Any = SimpleNamespace(vocab_size=size)
        check_vocabulary(tokenizer, Path("tokenizer"), config)
    tokenizer = SimpleNamespace(vocab_size=321)
    with pytest.raises(ConfigError, match="has 321 ids; the model has rows for 320"):
        check_vocabulary(tokenizer, Path("tokenizer"), config)
