"""Perplexity equals what plain transformers and plain torch say; windows, batches and buckets leave the numbers unchanged."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.byte_model import write_model

from headway.errors import CheckpointError, ConfigError, DataError
from headway.eval.dataset import Dataset, ReadOptions, parse_datasets, read_eval_documents
from headway.eval.perplexity import EvalDocument, perplexity
from headway.eval.scoring import NUM_BINS, ScoreWindow, TokenScores, TokenSums, batches
from headway.infer.load import LoadedModel, load_model
from headway.store.writer import StoreWriter

TEXTS = [
    "the cat sat on the mat and then it went away, far over the hills",
    "a",
    "the dog",
    "zwölf Boxkämpfer jagen Viktor quer",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "held-out.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture(scope="module")
def pieces(loaded: LoadedModel, data: Path) -> list[EvalDocument]:
    return list(read_eval_documents(Dataset("held-out", (str(data),)), loaded))


def brute_force(
    folder: Path, documents: list[list[int]], window: int, stride: int
) -> list[tuple[float, bool, float, int]]:
    """(nll, correct, confidence, context) of every scored token, one forward of transformers each."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    scores: list[tuple[float, bool, float, int]] = []
    for ids in documents:
        for position in range(1, len(ids)):
            # The first window that reaches the token, which is the one with the longest context.
            begin = next(b for b in range(0, len(ids), stride) if position < b + window)
            if begin == position:
                continue
            with torch.no_grad():
                logits = model(torch.tensor([ids[begin:position]])).logits[0, -1].double()
            chance = logits.softmax(-1)
            scores.append(
                (
                    -math.log(chance[ids[position]]),
                    int(chance.argmax()) == ids[position],
                    float(chance.max()),
                    position - begin,
                )
            )
    return scores


@pytest.mark.parametrize(("window", "stride"), [(32, 32), (32, 16), (16, 5), (8, 1), (16, 16)])
def test_everything_measured_equals_brute_force_with_transformers(
    folder: Path, loaded: LoadedModel, pieces: list[EvalDocument], window: int, stride: int
) -> None:
    expected = brute_force(folder, [list(piece.ids) for piece in pieces], window, stride)
    result = perplexity(loaded, pieces, window=window, stride=stride)
    nll, correct, confidence, context = (np.array(column) for column in zip(*expected, strict=True))
    assert result.tokens == len(expected)
    assert result.loss == pytest.approx(nll.mean(), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(nll.mean()), rel=1e-4)
    assert result.accuracy == pytest.approx(correct.mean())
    # one token is one byte
    assert result.num_bytes == len(expected)
    assert result.bits_per_byte == pytest.approx(nll.mean() / math.log(2), rel=1e-5)
    for bucket in result.positions:
        inside = (context >= bucket.first) & (context <= bucket.last)
        assert bucket.tokens == inside.sum()
        assert bucket.loss == pytest.approx(nll[inside].mean(), rel=1e-5)
    bins = [
        (confidence > low / NUM_BINS) & (confidence <= (low + 1) / NUM_BINS)
        for low in range(NUM_BINS)
    ]
    error = sum(abs(confidence[inside].sum() - correct[inside].sum()) for inside in bins) / len(
        expected
    )
    assert result.calibration_error == pytest.approx(error, rel=1e-4)


@pytest.mark.parametrize(("window", "stride"), [(32, 32), (16, 5)])
def test_a_begin_token_stands_before_every_window(
    folder: Path, loaded: LoadedModel, data: Path, window: int, stride: int
) -> None:
    from transformers import AutoModelForCausalLM

    assert loaded.tokenizer is not None
    assert loaded.tokenizer.bos_id is not None
    bos = loaded.tokenizer.bos_id
    result = perplexity(
        loaded,
        read_eval_documents(Dataset("held-out", (str(data),)), loaded, ReadOptions(bos=True)),
        window=window,
        stride=stride,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected: list[float] = []
    for ids in map(loaded.tokenizer.encode, TEXTS):
        for position in range(len(ids)):
            begin = next(
                b for b in range(0, len(ids), min(stride, window - 1)) if position < b + window - 1
            )
            with torch.no_grad():
                chance = (
                    model(torch.tensor([[bos, *ids[begin:position]]]))
                    .logits[0, -1]
                    .double()
                    .log_softmax(-1)
                )
            expected.append(-float(chance[ids[position]]))
    assert result.tokens == len(expected)
    assert result.loss == pytest.approx(np.mean(expected), rel=1e-5)


def test_positions_and_bins_add_up_to_the_whole(
    loaded: LoadedModel, pieces: list[EvalDocument]
) -> None:
    result = perplexity(loaded, pieces, stride=8)
    assert (
        sum(bucket.tokens for bucket in result.positions)
        == sum(bin.tokens for bin in result.bins)
        == result.tokens
    )
    assert sum(
        bucket.loss * bucket.tokens for bucket in result.positions
    ) / result.tokens == pytest.approx(result.loss)
    assert sum(
        bucket.accuracy * bucket.tokens for bucket in result.positions
    ) / result.tokens == pytest.approx(result.accuracy)
    assert [(bucket.first, bucket.last) for bucket in result.positions] == [
        (1, 1),
        (2, 3),
        (4, 7),
        (8, 15),
        (16, 31),
    ]


@pytest.mark.parametrize("batch_tokens", [1, 40, 64, 10_000])
def test_the_size_of_batches_changes_nothing(
    loaded: LoadedModel, pieces: list[EvalDocument], batch_tokens: int
) -> None:
    whole = perplexity(loaded, pieces, stride=8, batch_tokens=8192)
    cut = perplexity(loaded, pieces, stride=8, batch_tokens=batch_tokens)
    assert cut.tokens == whole.tokens
    assert cut.loss == pytest.approx(whole.loss, rel=1e-6)


def test_a_batch_holds_at_most_its_tokens_with_padding_and_no_row_is_lost() -> None:
    lengths = np.random.default_rng(3).integers(2, 50, size=500).tolist()
    rows = [ScoreWindow([index] * length, 1) for index, length in enumerate(lengths)]
    batched = list(batches(rows, 64))
    assert all(
        len(batch) == 1 or len(batch) * max(len(row.ids) for row in batch) <= 64
        for batch in batched
    )
    assert sorted(row.ids[0] for batch in batched for row in batch) == list(range(500))


def test_the_calibration_error_is_that_counted_by_hand() -> None:
    tally = TokenSums()
    # Ten tokens at 0.8 of which six are right, ten at 0.3 of which four are: (0.2 * 10 + 0.1 * 10) / 20.
    confidence = np.array([0.8] * 10 + [0.3] * 10)
    correct = np.array([1.0] * 6 + [0.0] * 4 + [1.0] * 4 + [0.0] * 6)
    tally.add(
        TokenScores(np.ones(20), correct, confidence, np.arange(1, 21), np.zeros(20, dtype=int))
    )
    assert tally.calibration_error() == pytest.approx(0.15)
    filled = [bin for bin in tally.bins() if bin.tokens]
    assert [(bin.tokens, bin.accuracy) for bin in filled] == [
        (10, pytest.approx(0.4)),
        (10, pytest.approx(0.6)),
    ]


def test_a_sure_and_right_model_is_calibrated_and_bounds_fall_into_bins() -> None:
    tally = TokenSums()
    tally.add(
        TokenScores(np.zeros(2), np.ones(2), np.ones(2), np.array([1, 2]), np.zeros(2, dtype=int))
    )
    assert tally.calibration_error() == 0.0
    assert tally.bins()[-1].tokens == 2
    tally.add(
        TokenScores(np.zeros(1), np.zeros(1), np.zeros(1), np.array([4]), np.zeros(1, dtype=int))
    )
    assert tally.bins()[0].tokens == 1


def test_a_store_scores_like_its_text_and_another_tokenizers_is_refused(
    tmp_path: Path, loaded: LoadedModel, pieces: list[EvalDocument]
) -> None:
    assert loaded.tokenizer is not None
    for name, fingerprint in (("same", loaded.tokenizer.fingerprint), ("other", "0" * 64)):
        writer = StoreWriter(tmp_path / name, dtype="uint16", tokenizer_fingerprint=fingerprint)
        for piece in pieces:
            writer.add(piece.ids)
        writer.finish()
    stored = perplexity(
        loaded, read_eval_documents(Dataset("same", (str(tmp_path / "same"),)), loaded)
    )
    assert stored.loss == perplexity(loaded, pieces).loss
    assert stored.bits_per_byte is None
    with pytest.raises(DataError, match="another tokenizer"):
        list(read_eval_documents(Dataset("other", (str(tmp_path / "other"),)), loaded))


def test_max_samples_takes_the_first_documents_and_joined_records_are_one(
    loaded: LoadedModel, data: Path
) -> None:
    first = list(
        read_eval_documents(Dataset("d", (str(data),)), loaded, ReadOptions(max_samples=2))
    )
    assert [piece.num_bytes for piece in first] == [len(text.encode()) for text in TEXTS[:2]]
    joined = list(
        read_eval_documents(
            Dataset("d", (str(data),), join="\n\n"), loaded, ReadOptions(max_samples=3)
        )
    )
    assert [piece.num_bytes for piece in joined] == [len("\n\n".join(TEXTS[:3]).encode())]


def test_names_of_datasets_are_given_or_the_files() -> None:
    assert [
        (d.name, d.paths) for d in parse_datasets(["a=x.txt", "b/y.txt", "c/y.txt", "a=z.txt"])
    ] == [
        ("a", ("x.txt", "z.txt")),
        ("y.txt", ("b/y.txt",)),
        ("c/y.txt", ("c/y.txt",)),
    ]
    with pytest.raises(ConfigError, match="no data to score is given"):
        parse_datasets([])
    with pytest.raises(ConfigError, match="NAME=PATH"):
        parse_datasets(["a="])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stride": 0}, "stride is 0"),
        ({"window": 1}, "window is 1"),
        ({"batch_tokens": 0}, "batch-tokens is 0"),
    ],
)
def test_a_window_in_which_nothing_is_scored_is_refused(
    loaded: LoadedModel, pieces: list[EvalDocument], settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        perplexity(loaded, pieces, **settings)


def test_documents_of_one_token_leave_nothing_to_score(loaded: LoadedModel) -> None:
    with pytest.raises(DataError, match="nothing to score"):
        perplexity(loaded, [EvalDocument([1], 1, "x")])


def test_an_id_outside_the_vocabulary_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(DataError, match="id 400"):
        perplexity(loaded, [EvalDocument([1, 400], 1, "x")])


def test_at_most_zero_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="max-samples"):
        ReadOptions(max_samples=0)


def test_weights_that_are_no_numbers_are_an_error(folder: Path) -> None:
    broken = load_model(folder)
    broken.model.head_weight.data.fill_(float("nan"))
    with pytest.raises(CheckpointError, match="its loss is not finite"):
        perplexity(broken, [EvalDocument([1, 2, 3], None, "x")])
