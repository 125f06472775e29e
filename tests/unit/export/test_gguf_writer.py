"""A model written as GGUF is read back as the same model; what llama.cpp would compute differently is refused; damage is one line."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chat_tokenizer import byte_tokenizer

from headway.checkpoint.stored_model import find_model
from headway.cli import main
from headway.errors import CheckpointError, ConfigError, DataError, HeadwayError
from headway.export.gguf_writer import export_gguf, parse_type
from headway.export.huggingface import export_huggingface
from headway.export.modelfile import turn_texts
from headway.infer.load import load_model
from headway.model.config import HeadGatesConfig, ModelConfig
from headway.model.layout import param_specs
from headway.model.loading.gguf_file import GgufFile
from headway.model.rope_config import RopeScaling
from headway.tokenizer.byte_level import WORDS, byte_level
from headway.tokenizer.chat_template import BUILT_IN
from headway.tokenizer.gguf_vocabulary import WHOLE, to_metadata, write_files
from headway.tokenizer.load import Tokenizer, load_tokenizer

gguf = pytest.importorskip("gguf")

BASE = ModelConfig(
    vocab_size=320,
    hidden_size=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=64,
    max_seq_len=64,
)
SCALED = RopeScaling(
    kind="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=2.0, original_max_seq_len=16
)
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=16, beta_fast=8.0)
CONFIGS = {
    "llama": BASE,
    "llama biases": BASE.with_(
        tie_embeddings=False,
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
        rope_theta=777.0,
        norm_eps=1e-3,
    ),
    "llama llama3": BASE.with_(rope_scaling=SCALED, head_dim=12),
    "llama linear": BASE.with_(rope_scaling=RopeScaling(kind="linear", factor=3.0)),
    "llama yarn": BASE.with_(
        rope_scaling=YARN.model_copy(update={"attention_factor": 1.5}), rope_theta=500.0
    ),
    "mistral": BASE.with_(family="mistral", head_dim=20),
    "qwen2": BASE.with_(family="qwen2", qkv_bias=True),
    "qwen3": BASE.with_(family="qwen3", qk_norm=True, head_dim=16),
    "smollm3": BASE.with_(family="smollm3", no_rope_layers=(3,)),
    "internlm": BASE.with_(family="internlm", qkv_bias=True, output_bias=True),
    "z2all": BASE.with_(family="z2all"),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def chat_tokenizer() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.backend.pre_tokenizer = byte_level(WORDS)  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer.with_chat_template(BUILT_IN["chatml"].export(tokenizer))


def folder(config: ModelConfig, out: Path) -> Path:
    """A Hugging Face folder with random weights."""
    generator = torch.Generator().manual_seed(1)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for spec in param_specs(config):
            yield (
                spec.name,
                torch.randn(spec.shape, generator=generator) * 0.1 + ("norm" in spec.name),
            )

    chat_tokenizer().save(out / "tokenizer")
    export_huggingface(config, weights(), out / "hf", tokenizer=out / "tokenizer")
    return out / "hf"


def logits(model: Path) -> torch.Tensor:
    loaded = load_model(model)
    ids = torch.arange(40)[None] * 7 % 300
    hidden = loaded.model.hidden_states(ids, torch.arange(40)[None])
    return hidden.float() @ loaded.model.head_weight.float().T


@pytest.mark.parametrize("name", CONFIGS)
def test_f32_is_read_back_exactly(name: str, tmp_path: Path) -> None:
    source = folder(CONFIGS[name], tmp_path)
    result = export_gguf(source, tmp_path / "m.gguf", kind="f32")
    before = find_model(source)
    after = find_model(result.out)
    written = dict(before.weights())
    for key, value in after.weights():
        assert torch.equal(value, written.get(key, torch.zeros(value.shape)).float()), key
    same = (
        "hidden_size",
        "num_layers",
        "kv_heads",
        "head_size",
        "ffn_size",
        "rope_theta",
        "rope_scaling",
        "norm_eps",
        "no_rope_layers",
    )
    for key in (*same, "max_seq_len", "tie_embeddings", "vocab_size"):
        assert getattr(after.config, key) == getattr(before.config, key), key
    assert after.end_ids == before.end_ids


@pytest.mark.parametrize(
    ("kind", "bound"), [("f16", 2e-3), ("bf16", 2e-2), ("q8_0", 6e-2), ("q4_k_m", 0.5)]
)
def test_other_types_are_near_and_equal_what_gguf_dequantises(
    kind: Any, bound: float, tmp_path: Path
) -> None:
    config = BASE.with_(
        hidden_size=256, num_heads=4, head_dim=64, ffn_size=288, num_layers=2, num_kv_heads=1
    )
    source = folder(config, tmp_path)
    result = export_gguf(source, tmp_path / "m.gguf", kind=kind)
    reader = gguf.GGUFReader(result.out)
    mine = GgufFile(result.out)
    for tensor in reader.tensors:
        reference = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert (
            mine.read(tensor.name).astype("float32")
            == reference.reshape(mine.tensors[tensor.name].shape)
        ).all(), tensor.name
    exact = logits(source)
    near = logits(result.out)
    assert (exact - near).norm() / exact.norm() < bound
    if (
        kind == "q4_k_m"
    ):  # the tied head and the last layer count more; rows of 288 are no whole blocks
        assert result.stored == {"f32": 5, "q6_k": 2, "q4_k": 11, "q8_0": 1, "q5_0": 1}, (
            result.stored
        )


def test_weights_and_tokenizer_come_from_the_metadata_of_a_foreign_file(tmp_path: Path) -> None:
    """Files of other tools hold no tokenizer.json; the ids are rebuilt from tokens and merges."""
    tokenizer = chat_tokenizer()
    values = to_metadata(tokenizer, 320)
    values.pop(WHOLE)
    (tmp_path / "t").mkdir()
    write_files(values, tmp_path / "t")
    again = load_tokenizer(tmp_path / "t")
    texts = ["Hello, world! I'll see 123 of them.", "你好 world", "<|im_end|> typed"]
    assert again.encode_batch(texts) == tokenizer.encode_batch(texts)
    assert (again.bos_id, again.eos_id, again.chat_template) == (
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.chat_template,
    )
    assert again.special_tokens == tokenizer.special_tokens


def test_a_folder_with_one_file_is_a_model_and_with_two_is_refused(tmp_path: Path) -> None:
    source = folder(BASE, tmp_path)
    export_gguf(source, tmp_path / "g" / "m.gguf")
    assert find_model(tmp_path / "g").config.num_layers == 4
    loaded = load_model(tmp_path / "g")
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.chat_template == chat_tokenizer().chat_template
    (tmp_path / "g" / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="holds 2 GGUF files"):
        find_model(tmp_path / "g")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"norm": "layernorm"}, "model.norm"),
        ({"family": "qwen2", "qkv_bias": True, "head_dim": 16}, "head_dim"),
        ({"family": "smollm3", "no_rope_layers": (0,)}, "no_rope_layers"),
        ({"family": "qwen3", "qk_norm": True, "rope_scaling": SCALED}, "llama3"),
        ({"rope_scaling": YARN.model_copy(update={"truncate": False})}, "truncate"),
    ],
)
def test_what_llama_cpp_computes_differently_is_refused_by_name(
    changes: dict[str, Any], said: str
) -> None:
    from headway.export.gguf_writer import gguf_target

    with pytest.raises(ConfigError, match=said):
        gguf_target(BASE.with_(**changes))


def test_windows_end_the_context_and_gates_are_left_out(tmp_path: Path) -> None:
    window = BASE.with_(family="mistral", sliding_window=24)
    assert (
        find_model(
            export_gguf(folder(window, tmp_path / "w"), tmp_path / "w.gguf").out
        ).config.max_seq_len
        == 24
    )
    gated = BASE.with_(head_gates=HeadGatesConfig(window=8, sinks=2))
    assert (
        find_model(
            export_gguf(folder(gated, tmp_path / "g"), tmp_path / "g.gguf").out
        ).config.head_gates
        is None
    )


@pytest.mark.parametrize("name", ["chatml", "qwen", "llama3", "alpaca", "zero2all"])
def test_the_modelfile_writes_turns_as_the_chat_template_does(name: str, tmp_path: Path) -> None:
    plain = byte_tokenizer()
    texts = turn_texts(plain.with_chat_template(BUILT_IN[name].export(plain)))
    # turn_texts compares the pieces with the template on a longer conversation
    assert texts is not None
    go = texts.go("")
    assert go.count("{{ .Content }}") == 2
    assert go.count("{{ .System }}") == 1


def test_the_verb_writes_a_file_and_a_modelfile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder(BASE, tmp_path)
    options = ["--model", str(source), "--out", str(tmp_path / "m.gguf"), "--type", "Q8_0"]
    assert main(["export", "gguf", *options, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["architecture"] == "llama"
    assert result["stored"]["q8_0"] > 0
    modelfile = Path(result["modelfile"]).read_text()
    assert "FROM ./m.gguf" in modelfile
    assert 'PARAMETER stop "<|im_end|>"' in modelfile
    assert "TEMPLATE" in modelfile


def test_a_file_of_another_name_or_type_is_refused(tmp_path: Path) -> None:
    source = folder(BASE, tmp_path)
    options = ["--model", str(source), "--out"]
    assert main(["export", "gguf", *options, str(tmp_path / "m.bin")]) == 2
    assert main(["export", "gguf", *options, str(tmp_path / "m.gguf"), "--type", "q3"]) == 2
    with pytest.raises(ConfigError, match="q4_k_m"):
        parse_type("q3_k_m")


def _header(values: list[bytes], tensors: list[bytes] = [], version: int = 3) -> bytes:  # noqa: B006
    return (
        b"GGUF"
        + struct.pack("<IQQ", version, len(tensors), len(values))
        + b"".join(values)
        + b"".join(tensors)
    )


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


HOSTILE = {
    "empty": b"",
    "magic only": b"GGUF",
    "many values": b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 62),
    "many tensors": b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 0),
    "other version": _header([], version=9),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "long key": _header([struct.pack("<Q", 1 << 60)]),
    "unknown type": _header([_text("a") + struct.pack("<I", 77)]),
    "long list": _header([_text("a") + struct.pack("<IIQ", 9, 4, 1 << 61)]),
    "long list of texts": _header([_text("a") + struct.pack("<IIQ", 9, 8, 1 << 61)]),
    "nested list": _header([_text("a") + struct.pack("<IIQ", 9, 9, 1 << 20)]),
    "key twice": _header([_text("a") + struct.pack("<IB", 0, 1)] * 2),
    "alignment": _header([_text("general.alignment") + struct.pack("<II", 4, 0)]),
    "dimensions": _header([], [_text("t") + struct.pack("<I", 1 << 30)]),
    "architecture": _header(
        [_text("general.architecture") + struct.pack("<I", 8) + _text("gpt-j")]
    ),
    "no shape": _header([_text("general.architecture") + struct.pack("<I", 8) + _text("llama")]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(HeadwayError) as caught:
        find_model(path)
    assert "\n" not in str(caught.value)
    assert "m.gguf" in str(caught.value)


def test_a_cut_or_changed_file_is_one_line(tmp_path: Path) -> None:
    whole = export_gguf(folder(BASE, tmp_path), tmp_path / "m.gguf", kind="q8_0").out.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (30, 200, 3000, len(whole) // 2, len(whole) - 40):
        cut.write_bytes(whole[:length])
        with pytest.raises(HeadwayError):
            list(find_model(cut).weights())
    generator = torch.Generator().manual_seed(3)
    for _ in range(60):
        changed = bytearray(whole)
        for offset in torch.randint(0, 4000, (6,), generator=generator).tolist():
            changed[offset] = int(torch.randint(0, 256, (1,), generator=generator))
        cut.write_bytes(changed)
        try:
            list(find_model(cut).weights())
        except (ConfigError, CheckpointError, DataError):
            continue


def test_a_part_of_a_split_file_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "m-00001-of-00003.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="llama-gguf-split --merge"):
        find_model(tmp_path / "m-00001-of-00003.gguf")
