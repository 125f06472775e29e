"""What is scored besides short texts: long ones in pieces, token stores of headway and of other systems."""

import json
from pathlib import Path

import pytest
from support.byte_model import write_model

from headway.errors import ConfigError, DataError
from headway.eval.dataset import Dataset, FileIds, ReadOptions, read_eval_documents
from headway.eval.perplexity import perplexity
from headway.infer.load import LoadedModel, load_model
from headway.prepare.pack import PackOptions, pack
from headway.store.convert import ConvertOptions, convert
from headway.store.foreign.mds_writer import MdsTokenWriter
from headway.store.writer import StoreWriter

TEXT = "the cat sat on the mat, and then zwölf Boxkämpfer went away.\n" * 40


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_model(tmp_path_factory.mktemp("model")))


def test_a_long_text_is_scored_in_pieces_from_a_file_with_the_same_numbers(
    tmp_path: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    dataset = Dataset("a", (str(tmp_path / "a.txt"),))
    whole = perplexity(loaded, read_eval_documents(dataset, loaded), window=32)
    monkeypatch.setattr("headway.text.raw.BLOCK_BYTES", 300)
    monkeypatch.setattr("headway.tokenizer.load.WHOLE_CHARACTERS", 100)
    monkeypatch.setattr("headway.tokenizer.split_points.PIECE_CHARACTERS", 100)
    monkeypatch.setattr("headway.eval.dataset.IN_MEMORY_TOKENS", 200)
    (piece,) = read_eval_documents(dataset, loaded)
    assert isinstance(piece.ids, FileIds)
    assert perplexity(loaded, [piece], window=32) == whole


def test_stores_of_every_kind_score_like_their_text(tmp_path: Path, loaded: LoadedModel) -> None:
    assert loaded.tokenizer is not None
    texts = [TEXT[:200], TEXT[3:90], TEXT[7:30]]
    (tmp_path / "raw.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    whole = perplexity(
        loaded,
        read_eval_documents(Dataset("raw", (str(tmp_path / "raw.jsonl"),)), loaded),
        window=32,
    )
    with StoreWriter(
        tmp_path / "headway", dtype="uint16", tokenizer_fingerprint=loaded.tokenizer.fingerprint
    ) as writer:
        for text in texts:
            writer.add(loaded.tokenizer.encode(text))
        writer.finish()
    convert(tmp_path / "headway", tmp_path / "mds", "mds")
    convert(tmp_path / "headway", tmp_path / "internlm", "internlm", ConvertOptions(type="cn"))
    pack(tmp_path / "headway", tmp_path / "packs", PackOptions(1000, to="mds"))
    for kind in ("headway", "mds", "internlm", "packs"):
        scored = perplexity(
            loaded, read_eval_documents(Dataset(kind, (str(tmp_path / kind),)), loaded), window=32
        )
        assert (scored.tokens, scored.documents) == (whole.tokens, 3), kind
        assert scored.loss == pytest.approx(whole.loss, rel=1e-6)
    (piece, *_) = read_eval_documents(
        Dataset("t", (str(tmp_path / "internlm"),)), loaded, ReadOptions(by="type")
    )
    assert piece.part == "cn"
    with pytest.raises(ConfigError, match="whose documents have no keys"):
        list(
            read_eval_documents(
                Dataset("t", (str(tmp_path / "headway"),)), loaded, ReadOptions(by="type")
            )
        )


def test_ids_beyond_the_model_are_refused(tmp_path: Path, loaded: LoadedModel) -> None:
    with MdsTokenWriter(tmp_path / "mds") as writer:
        writer.add([1, 2, 60000])
        writer.finish()
    with pytest.raises(DataError, match="holds id 60000; the model has"):
        list(read_eval_documents(Dataset("t", (str(tmp_path / "mds"),)), loaded))
