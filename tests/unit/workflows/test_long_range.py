"""`headway data long-range`: gains equal two naive forwards, far copies stand out, and work that is done is kept."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.byte_model import CONFIG, write_model
from support.copying_model import write_copying_model, write_documents
from support.dense_head_masks import masked_forward

from headway.cli import main
from headway.errors import ConfigError, DataError
from headway.eval.far_gain import score_gains, spread
from headway.eval.far_options import FarReach
from headway.infer.load import LoadedModel, load_model
from headway.model.head_masks.masks import HeadMasks
from headway.store.reader import open_store
from headway.store.writer import StoreWriter
from headway.workflows.long_range_options import FarSelection


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Random weights."""
    folder = tmp_path_factory.mktemp("model")
    return load_model(write_model(folder, CONFIG.with_(max_seq_len=96, init_std=0.2)))


def write_store(folder: Path, lengths: list[int], masked: bool) -> Path:
    draw = np.random.default_rng(0)
    with StoreWriter(folder, dtype="uint16", tokenizer_fingerprint=None, masked=masked) as writer:
        for length in lengths:
            mask = draw.random(length) < 0.5 if masked else None
            writer.add(draw.integers(0, 256, length), mask)
        writer.finish()
    return folder


def naive(loaded: LoadedModel, ids: np.ndarray, masks: HeadMasks | None) -> np.ndarray:
    """The loss of every token but the first, by one forward under dense masks."""
    tokens = torch.as_tensor(ids.astype(np.int64))[None]
    with torch.inference_mode():
        hidden = masked_forward(loaded.model, tokens, masks)
        logits = loaded.model.logits(hidden[0, :-1]).double()
    return torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none").numpy()


@pytest.mark.parametrize("masked", [False, True])
def test_the_gain_equals_two_naive_forwards(
    loaded: LoadedModel, tmp_path: Path, masked: bool
) -> None:
    source = open_store(write_store(tmp_path / "store", [90, 40, 17, 64, 200], masked))
    reach = FarReach(window=12, sinks=3, length=80)
    rows = score_gains(loaded, source, range(5), reach, batch_tokens=170)
    gains = {gain.document: gain for _, batch in rows for gain in batch}

    streaming = HeadMasks(((False,) * 2,) * 2, window=12, sinks=3)
    for document, length in enumerate([80, 40, 17, 64, 80]):
        ids = source.tokens(document, 0, length)
        # The first token with another before it that window and sinks do not hold.
        far = np.arange(1, length) >= 12 + 3 + 1
        if masked:
            targets = source.mask(document, 0, length)
            assert targets is not None
            far &= targets[1:]
        assert gains[document].far_tokens == far.sum()
        if not far.any():
            assert gains[document].gain is None
            continue
        expected = naive(loaded, ids, streaming)[far].mean() - naive(loaded, ids, None)[far].mean()
        assert gains[document].gain == pytest.approx(expected, abs=1e-5)
        assert abs(expected) > 1e-4


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command line over documents of which the even ones are far copies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = write_copying_model(tmp_path / "model")
    write_documents(tmp_path / "docs.jsonl")
    out = str(tmp_path / "scores")
    arguments = ["--data", str(tmp_path / "docs.jsonl"), "--model", str(model), "--out", out]
    return ["data", "long-range", *arguments, "--device", "cpu", "--window", "16"]


def read_gains(out: Path) -> list[float | None]:
    lines = (out / "scores.jsonl").read_text().splitlines()
    return [json.loads(line)["gain"] for line in lines]


def test_far_copies_score_far_above_shuffled_documents(
    copies: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*copies, "--keep", "0.5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    *gains, short = read_gains(tmp_path / "scores")
    assert short is None
    copied = [gain for gain in gains[0::2] if gain is not None]
    shuffled = [gain for gain in gains[1::2] if gain is not None]
    assert len(copied) == len(shuffled) == 4
    assert min(copied) > 10 * max(map(abs, shuffled))
    assert result["summary"]["without_far_tokens"] == 1
    assert result["summary"]["clear"] >= 4

    # Half of nine: four. They are the copies, in their order.
    selected = open_store(tmp_path / "scores" / "selected")
    lines = (tmp_path / "docs.jsonl").read_text().splitlines()
    wanted = [json.loads(line)["text"] for line in lines[0:8:2]]
    tokenizer = load_model(result["model"]).require_tokenizer()
    decoded: list[str] = []
    for document in range(selected.num_documents):
        length = int(selected.lengths(document, document + 1)[0])
        ids = selected.tokens(document, 0, length).tolist()
        decoded.append(tokenizer.decode(ids))
    assert [text.removesuffix("</s>") for text in decoded] == wanted
    assert "gain (nats per far token)" in (tmp_path / "scores" / "report.md").read_text()
    # A finished selection is not overwritten.
    assert main([*copies, "--keep", "0.5"]) == 2
    assert "already holds a store" in capsys.readouterr().err


def test_a_stopped_command_continues_with_the_same_scores(
    copies: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = [*copies, "--batch-tokens", "200"]
    assert main(copies) == 0
    whole = (tmp_path / "scores" / "scores.jsonl").read_bytes()
    journal = tmp_path / "scores" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) > 2
    # Killed in the middle of a line.
    journal.write_bytes(lines[0] + lines[1][:20])
    (tmp_path / "scores" / "scores.jsonl").unlink()

    scored: list[int] = []
    from headway.eval import far_gain

    batch_gains = far_gain._batch_gains

    def counted(*arguments):
        scored.append(len(arguments[-1]))
        return batch_gains(*arguments)

    monkeypatch.setattr(far_gain, "_batch_gains", counted)
    assert main(copies) == 0
    assert (tmp_path / "scores" / "scores.jsonl").read_bytes() == whole
    assert len(scored) == len(lines) - 1


def test_mistakes_of_a_search_for_far_context_end_in_one_line(
    copies: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*more: str) -> str:
        assert main([*copies, *more]) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len([line for line in lines if line.startswith("error")]) == 1
        return lines[-1]

    assert "--window 200 and --sinks 4 leave nothing far in --length 128" in error(
        "--window", "200"
    )
    assert "--length is 500; the model's max_seq_len is 128" in error("--length", "500")
    assert "--keep is 1.5; it must be above 0 and at most 1" in error("--keep", "1.5")
    assert "no document of" in error("--min-gain", "1000")
    assert "was begun with window 16; now it is 20" in error("--window", "20")


def test_models_without_kv_heads_are_refused(loaded: LoadedModel) -> None:
    from headway.eval.far_gain import check_far_model

    config = loaded.config.model_copy(update={"hf_config": {"model_type": "gpt2"}})
    wrapped = replace(loaded, config=config)
    with pytest.raises(ConfigError, match="a class of transformers computes has no KV heads"):
        check_far_model(wrapped)


def test_packs_are_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    from headway.eval.far_gain import check_far_source

    with StoreWriter(
        tmp_path / "packs", dtype="uint16", tokenizer_fingerprint=None, spans=True
    ) as writer:
        writer.add(np.arange(20), None, np.array([0, 10]))
        writer.finish()
    with pytest.raises(DataError, match="holds packs of several documents"):
        check_far_source(open_store(tmp_path / "packs"), loaded)


def test_a_sample_is_spread_over_the_source() -> None:
    assert spread(10, None) == list(range(10))
    assert spread(10, 20) == list(range(10))
    assert spread(10, 2) == [2, 7]
    assert spread(1000, 4) == [125, 375, 625, 875]


def test_both_limits_of_a_selection_hold() -> None:
    from headway.eval.far_gain import DocumentGain

    values = [0.5, None, 0.1, 0.5, 0.3]
    gains = [
        DocumentGain(number, 9, 3, 1.0, None if value is None else 1.0 + value)
        for number, value in enumerate(values)
    ]
    assert FarSelection(keep=0.2).choose(gains) == [0]
    assert FarSelection(keep=0.6).choose(gains) == [0, 3, 4]
    assert FarSelection(min_gain=0.2).choose(gains) == [0, 3, 4]
    assert FarSelection(keep=0.4, min_gain=0.4).choose(gains) == [0, 3]
