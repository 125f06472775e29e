"""`--masks`: generation and perplexity with fewer keys and values are those of the forward under the same masks."""

import json
import math
from pathlib import Path

import pytest
import torch
from support.byte_model import CONFIG, write_model
from support.dense_head_masks import masked_forward
from support.engine_steps import engine_logits

from headway.cli import main
from headway.errors import ConfigError
from headway.infer.generate import GenerateOptions, generate
from headway.infer.load import LoadedModel, load_model
from headway.kernels.attention import causal_mask
from headway.model.head_masks.choice import MaskChoice
from headway.model.head_masks.file import write_masks
from headway.model.head_masks.masks import HeadMasks, random_masks

MASKS = HeadMasks(((True, False), (False, False)), window=6, sinks=2)
TEXT = "the cat sat on the mat and then it went away over the hills and far away, to the sea, and never came back again"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), CONFIG.with_(max_seq_len=160))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder)


@pytest.fixture
def masks_file(tmp_path: Path) -> Path:
    write_masks(MASKS, tmp_path / "masks.tsv")
    return tmp_path / "masks.tsv"


@pytest.mark.parametrize("chunk_tokens", [3, 16, 4096])
def test_generation_under_masks_is_that_of_the_masked_forward(
    loaded: LoadedModel, chunk_tokens: int
) -> None:
    prompts = [TEXT, "a", TEXT[:40]]
    results = generate(
        loaded.with_masks(MASKS), prompts, GenerateOptions(12, chunk_tokens=chunk_tokens)
    )
    assert loaded.tokenizer is not None
    for prompt, result in zip(prompts, results, strict=True):
        ids = loaded.tokenizer.encode(prompt)
        for token in result.token_ids:
            logits = loaded.model.logits(
                masked_forward(loaded.model, torch.tensor([ids]), MASKS)[0, -1]
            )
            assert token == int(logits[:258].argmax())
            ids.append(token)
    assert [r.token_ids for r in results] != [
        r.token_ids for r in generate(loaded, prompts, GenerateOptions(12))
    ]


def test_perplexity_under_masks_is_that_of_the_masked_forward(
    loaded: LoadedModel,
    folder: Path,
    masks_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    common = [
        "eval",
        "ppl",
        "--model",
        str(folder),
        "--device",
        "cpu",
        "--data",
        str(tmp_path / "text.txt"),
        "--json",
    ]
    assert main([*common, "--masks", str(masks_file)]) == 0
    loss = json.loads(capsys.readouterr().out)["loss"]
    assert loaded.tokenizer is not None
    ids = torch.tensor([loaded.tokenizer.encode(TEXT)])
    logits = loaded.model.logits(masked_forward(loaded.model, ids, MASKS))
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item()
    assert math.isclose(loss, expected, rel_tol=1e-5)
    assert main([*common, "--masks", str(masks_file), "--stream-window", "160"]) == 0
    whole = json.loads(capsys.readouterr().out)["loss"]
    assert main(common) == 0
    assert math.isclose(json.loads(capsys.readouterr().out)["loss"], whole, rel_tol=1e-6)


def test_the_verb_generates_under_masks(
    loaded: LoadedModel, folder: Path, masks_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [
        "generate",
        "--model",
        str(folder),
        "--device",
        "cpu",
        "--max-new-tokens",
        "6",
        "--prompt",
        TEXT,
        "--json",
    ]
    assert main([*common, "--masks", str(masks_file), "--chunk-tokens", "9"]) == 0
    token_ids = json.loads(capsys.readouterr().out)["token_ids"]
    assert token_ids == generate(loaded.with_masks(MASKS), [TEXT], GenerateOptions(6))[0].token_ids
    (masks_file.parent / "soft.tsv").write_text("0.9\t0.2\n0.3\t0.4\n")
    assert (
        main(
            [
                *common,
                "--masks",
                str(masks_file.parent / "soft.tsv"),
                "--equal-per-layer",
                "--stream-window",
                "6",
            ]
        )
        == 0
    )
    equal = json.loads(capsys.readouterr().out)["token_ids"]
    ranked = HeadMasks(((True, False), (False, True)), 6, 128)
    assert equal == generate(loaded.with_masks(ranked), [TEXT], GenerateOptions(6))[0].token_ids


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--equal-per-layer"], "--equal-per-layer is given without --masks"),
        (["--stream-sinks", "0"], "--stream-sinks is given without --masks"),
        (["--masks", "nowhere.tsv"], "masks is 'nowhere.tsv'"),
        (["--chunk-tokens", "0"], "chunk-tokens is 0"),
    ],
)
def test_a_wrong_option_of_masks_is_refused_by_generate(
    folder: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["generate", "--model", str(folder), "--device", "cpu", "--prompt", "a", *flags]) == 2
    )
    assert said in capsys.readouterr().err


def test_masks_fit_their_model_and_have_a_reach(
    loaded: LoadedModel, masks_file: Path, tmp_path: Path
) -> None:
    assert MaskChoice().read(masks_file, loaded.config) == MASKS
    assert MaskChoice(stream_window=9, stream_sinks=0).read(
        masks_file, loaded.config
    ) == MASKS.with_reach(9, 0)
    write_masks(HeadMasks(MASKS.full), tmp_path / "bare.tsv")
    assert MaskChoice().read(tmp_path / "bare.tsv", loaded.config) == MASKS.with_reach(1024, 128)
    with pytest.raises(ConfigError, match="stream-window is 0"):
        MaskChoice(stream_window=0)
    with pytest.raises(ConfigError, match="the model has 3 layers"):
        MaskChoice().read(masks_file, loaded.config.with_(num_layers=3))


def test_random_masks_keep_the_count() -> None:
    uneven = HeadMasks(
        ((True, True, True, False), (False, False, False, False), (False, True, False, True)), 8, 2
    )
    for seed in range(3):
        drawn = random_masks(uneven, seed)
        assert drawn.num_full == uneven.num_full
        assert drawn == random_masks(uneven, seed)
    assert random_masks(uneven, 0) != random_masks(uneven, 1)


def test_joined_projections_change_nothing(folder: Path) -> None:
    plain = load_model(folder)
    joined = load_model(folder)
    joined.model.fuse_projections()
    joined.model.fuse_projections()
    names = dict(joined.model.named_parameters())
    assert all(torch.equal(value, names[name]) for name, value in plain.model.named_parameters())
    ids = torch.arange(24)[None]
    position = torch.arange(24)[None]
    results = [variant.model(ids, position, causal_mask(1, 24)) for variant in (plain, joined)]
    assert (results[0] - results[1]).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_steps_are_the_plain_ones(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda half, **more: compile_(half, backend="aot_eager", **more)
    )
    tokens = torch.arange(24).view(2, 12)
    plain = engine_logits(
        loaded.model, tokens, [3, 3], 9, chunk=3, masks=MASKS, compile_blocks=False
    )
    compiled = engine_logits(
        loaded.model, tokens, [3, 3], 9, chunk=3, masks=MASKS, compile_blocks=True
    )
    for row in range(2):
        assert (plain[row] - compiled[row]).abs().max() < 1e-4
