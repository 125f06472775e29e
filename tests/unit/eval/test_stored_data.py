"""What is scored besides short texts: long ones in pieces, token stores of headway and of other systems."""

from pathlib import Path

import pytest
from support.byte_model import write_model

from headway.eval.dataset import Dataset, read_pieces
from headway.eval.encoded_text import FileIds
from headway.eval.perplexity import perplexity
from headway.infer.load import LoadedModel, load_model

TEXT = "the cat sat on the mat, and then zwölf Boxkämpfer went away.\n" * 40


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_model(tmp_path_factory.mktemp("model")))


def test_a_long_text_is_scored_in_pieces_from_a_file_with_the_same_numbers(
    tmp_path: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    dataset = Dataset("a", (str(tmp_path / "a.txt"),))
    whole = perplexity(loaded, read_pieces(dataset, loaded), window=32)
    monkeypatch.setattr("headway.text.raw.BLOCK_BYTES", 300)
    monkeypatch.setattr("headway.tokenizer.load.WHOLE_CHARACTERS", 100)
    monkeypatch.setattr("headway.tokenizer.safe_cuts.PIECE_CHARACTERS", 100)
    monkeypatch.setattr("headway.eval.encoded_text.IN_MEMORY_TOKENS", 200)
    (piece,) = read_pieces(dataset, loaded)
    assert isinstance(piece.ids, FileIds)
    assert perplexity(loaded, [piece], window=32) == whole
