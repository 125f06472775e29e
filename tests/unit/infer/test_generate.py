"""Generation: what a prompt becomes depends on the prompt, the model and the options alone, and equals what a full forward would say."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headway.checkpoint.stored_model import find_model
from headway.cli import main
from headway.errors import ConfigError, DataError, HeadwayError
from headway.export.huggingface import export_huggingface
from headway.infer.engine.engine import InferenceEngine
from headway.infer.generate import GenerateOptions, generate, prompt_ids, read_prompts
from headway.infer.load import LoadedModel, load_model
from headway.infer.sampling import Sampling
from headway.kernels.attention import causal_mask
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.tokenizer.load import Tokenizer

CONFIG = ModelConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    vocab_size=320,
    max_seq_len=96,
    init_std=0.5,
)
PROMPTS = ["the cat", "a", "sat on the mat and then it", "the cat", "the dog"]


def byte_tokenizer(*, adds_bos: bool = False) -> Tokenizer:
    """One id per byte, then begin and end."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 256)]
        )
    backend.encode_special_tokens = True
    return Tokenizer(backend, {"bos": "<s>", "eos": "</s>"})


def random_weights(config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    for spec in param_specs(config):
        yield spec.name, initial_value(spec, config, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    byte_tokenizer().save(root / "tokenizer")
    export_huggingface(CONFIG, random_weights(CONFIG), root / "out", tokenizer=root / "tokenizer")
    return root / "out"


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder)


def without_cache(loaded: LoadedModel, ids: list[int], steps: int) -> list[int]:
    """Greedy tokens, each from a forward over everything before it."""
    ids, start = list(ids), len(ids)
    for _ in range(steps):
        position = torch.arange(len(ids))[None]
        logits = loaded.model.logits(
            loaded.model(torch.tensor([ids]), position, causal_mask(1, len(ids)))
        )
        ids.append(int(logits[0, -1, :258].argmax()))
        if ids[-1] == 257:
            break
    return ids[start:]


def test_greedy_tokens_are_those_of_the_full_forward(loaded: LoadedModel) -> None:
    results = generate(loaded, PROMPTS, GenerateOptions(12))
    assert loaded.tokenizer is not None
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.token_ids == without_cache(loaded, loaded.tokenizer.encode(prompt), 12)
        assert result.prompt_tokens == len(prompt)
    assert results[0] == results[3]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(1.0, seed=5), Sampling(0.7, top_k=20, seed=1), Sampling(1.3, top_p=0.8)],
)
def test_a_prompt_becomes_the_same_alone_and_in_any_batch(
    loaded: LoadedModel, sampling: Sampling
) -> None:
    together = generate(loaded, PROMPTS, GenerateOptions(10, sampling=sampling))
    split = generate(loaded, PROMPTS, GenerateOptions(10, sampling=sampling, rows=2))
    turned = generate(loaded, PROMPTS[::-1], GenerateOptions(10, sampling=sampling))
    assert together == split
    for prompt in set(PROMPTS):
        alone = generate(loaded, [prompt], GenerateOptions(10, sampling=sampling))[0]
        assert together[PROMPTS.index(prompt)] == alone
        assert turned[PROMPTS[::-1].index(prompt)] == alone


def test_the_same_prompt_twice_is_two_samples_and_a_seed_repeats_both(loaded: LoadedModel) -> None:
    options = GenerateOptions(16, sampling=Sampling(1.0, seed=3))
    first, second = generate(loaded, ["the cat", "the cat"], options)
    assert first.token_ids != second.token_ids
    assert generate(loaded, ["the cat", "the cat"], options) == [first, second]
    assert (
        generate(loaded, ["the cat"], GenerateOptions(16, sampling=Sampling(1.0, seed=4)))[
            0
        ].token_ids
        != first.token_ids
    )


def test_what_prompts_begin_with_together_is_computed_once(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.infer import generate as module

    engines: list[InferenceEngine] = []
    build = module.build_engine
    monkeypatch.setattr(
        module,
        "build_engine",
        lambda *arguments, **named: engines.append(build(*arguments, **named)) or engines[-1],
    )
    beginning = "over the hills and far away " * 3
    prompts = [beginning[:70] + end for end in ("ab", "", "ab", "cd", "ab")]
    options = GenerateOptions(max_new_tokens=6)
    together = generate(loaded, prompts, options)
    stats = engines[0].stats()
    assert stats.cached_tokens == 4 * 64
    assert stats.prompt_tokens == 70 + 4 * (70 - 64) + 4 * 2
    assert [generate(loaded, [prompt], options)[0] for prompt in prompts] == together


def test_prompts_with_pictures_wait_for_none_that_begins_with_the_same_ids() -> None:
    from headway.infer.engine.request import EngineRequest, PromptMedia
    from headway.infer.generate import _chains, _Sequence

    def chains(media: PromptMedia | None) -> int:
        requests = [EngineRequest((7,) * 20, 4, media=media) for _ in range(3)]
        rows = [_Sequence(byte_tokenizer(), request, (), None) for request in requests]
        return len(_chains(rows, page_tokens=4))

    assert chains(PromptMedia((), {})) == 3
    assert chains(None) == 1


def test_a_row_ends_at_a_stop_text_and_the_others_go_on(loaded: LoadedModel) -> None:
    free = generate(loaded, PROMPTS, GenerateOptions(12))
    assert loaded.tokenizer is not None
    stop = loaded.tokenizer.decode(free[0].token_ids[4:6])
    generations = generate(loaded, PROMPTS, GenerateOptions(12, stop=(stop,)))
    whole = loaded.tokenizer.decode(free[0].token_ids)
    assert generations[0].stopped_by == "stop"
    assert generations[0].text == whole[: whole.index(stop)]
    assert generations[0].token_ids == free[0].token_ids[: len(generations[0].token_ids)]
    for stopped, other in zip(generations, free, strict=True):
        if stop not in other.text:
            assert stopped == other
    by_id = generate(loaded, ["the cat"], GenerateOptions(12, stop_ids=(free[0].token_ids[2],)))[0]
    assert by_id.stopped_by == "stop"
    assert by_id.token_ids == free[0].token_ids[: free[0].token_ids.index(free[0].token_ids[2]) + 1]


def test_generation_ends_where_the_context_is_full_and_says_so(loaded: LoadedModel) -> None:
    result = generate(loaded, ["x" * 90], GenerateOptions(50, sampling=Sampling(1.0)))[0]
    assert result.stopped_by in ("context", "eos")
    assert len(result.token_ids) <= 6
    with pytest.raises(ConfigError, match="prompt has 96 tokens; the model's max_seq_len=96"):
        generate(loaded, ["x" * 96], GenerateOptions(1))


def test_no_id_behind_the_vocabulary_is_ever_chosen(loaded: LoadedModel) -> None:
    results = generate(loaded, ["the cat"] * 8, GenerateOptions(40, sampling=Sampling(5.0)))
    assert max(max(r.token_ids) for r in results) < 258


def test_the_end_of_text_stops_a_row_and_stays_out_of_its_text(loaded: LoadedModel) -> None:
    results = generate(loaded, ["the cat"] * 16, GenerateOptions(80, sampling=Sampling(3.0)))
    ended = [r for r in results if r.stopped_by == "eos"]
    assert ended
    assert all(
        r.token_ids[-1] == 257 and 257 not in r.token_ids[:-1] and "</s>" not in r.text
        for r in ended
    )


def test_a_prompt_gets_what_its_tokenizer_puts_before_a_text() -> None:
    plain = byte_tokenizer()
    adding = byte_tokenizer(adds_bos=True)
    assert prompt_ids(plain, "ab") == plain.encode("ab")
    assert prompt_ids(adding, "ab") == [256, *plain.encode("ab")]
    assert prompt_ids(plain, "<s>a", special=True) == [256, *plain.encode("a")]
    assert 256 not in prompt_ids(plain, "<s>a"), "what a user types is text"
    assert prompt_ids(plain, "") == [256]


def test_prompts_come_from_lines_or_jsonl(tmp_path: Path) -> None:
    lines = tmp_path / "p.txt"
    records = tmp_path / "p.jsonl"
    bad = tmp_path / "bad.jsonl"
    lines.write_text("one\n\ntwo\n")
    records.write_text('{"prompt": "one"}\n{"prompt": "two\\nlines"}\n')
    bad.write_text('{"prompt": "one"}\n{"text": "two"}\n')
    assert read_prompts(lines) == ["one", "two"]
    assert read_prompts(records) == ["one", "two\nlines"]
    with pytest.raises(DataError, match=r"bad\.jsonl:2: "):
        read_prompts(bad)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--prompt", "a", "--temperature", "-1"], "temperature is -1"),
        (["--prompt", "a", "--top-k", "0"], "top-k is 0"),
        (["--prompt", "a", "--top-p", "1.5"], "top-p is 1.5"),
        (["--prompt", "a", "--max-new-tokens", "0"], "max-new-tokens is 0"),
        (["--prompt", "a", "--stop", ""], "stop is an empty text"),
        ([], "no prompt is given"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_two(
    folder: Path, flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", str(folder), "--device", "cpu", *flags]) == 2
    assert named in capsys.readouterr().err


def test_the_verb_prints_one_result_or_a_list(
    folder: Path, loaded: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [
        "generate",
        "--model",
        str(folder),
        "--device",
        "cpu",
        "--max-new-tokens",
        "5",
        "--json",
    ]
    assert main([*common, "--prompt", "the cat"]) == 0
    report = json.loads(capsys.readouterr().out)
    expected = generate(loaded, ["the cat"], GenerateOptions(5))[0]
    assert (report["text"], report["token_ids"], report["stopped_by"]) == (
        expected.text,
        expected.token_ids,
        "length",
    )
    assert main([*common, "--prompt", "the cat", "--prompt", "a"]) == 0
    assert json.loads(capsys.readouterr().out)["generations"][0]["token_ids"] == report["token_ids"]


def test_a_folder_that_is_no_model_says_what_is_missing(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="which is not a folder"):
        find_model(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="there is no checkpoint and no model"):
        find_model(tmp_path)
    (tmp_path / "final").symlink_to(folder)
    assert find_model(tmp_path).config.vocab_size == 320


def test_a_text_that_cannot_be_continued_ends_in_one_line(loaded: LoadedModel) -> None:
    with pytest.raises(
        HeadwayError, match="cannot be continued after 0 tokens: no token can follow"
    ):
        generate(
            loaded, ["a"], GenerateOptions(4, sampling=Sampling(0.9, repetition_penalty=1e-300))
        )
