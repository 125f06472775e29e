"""A model that transformers has no class for is exported with a class of its own, on request alone, and computes the same there."""

import ast
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.byte_model import byte_tokenizer

from headway.checkpoint.stored_model import find_model
from headway.cli import main
from headway.errors import ConfigError
from headway.export.huggingface import export_huggingface
from headway.infer.generate import GenerateOptions, generate
from headway.infer.load import load_model
from headway.kernels.attention import causal_mask
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.model.rope_config import RopeScaling
from headway.model.transformer import Transformer

SIZES = {
    "vocab_size": 258,
    "hidden_size": 32,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_size": 56,
}
BASE = ModelConfig(family="qwen3", qk_norm=True, max_seq_len=64, **SIZES)
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=16)
CASES = {
    "tied": BASE.with_(no_rope_layers=(1,)),
    "untied, biased, wide heads": BASE.with_(
        no_rope_layers=(0, 2),
        tie_embeddings=False,
        qkv_bias=True,
        output_bias=True,
        head_dim=12,
        rope_theta=777.0,
    ),
    "windows and yarn": BASE.with_(
        no_rope_layers=(2,), sliding_window=5, window_layers=(0, 2), rope_scaling=YARN
    ),
}


@pytest.fixture
def transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
        from transformers import dynamic_module_utils

    # Where it copies the code it runs: not the user's cache.
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    return transformers


def random_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        spec.name: torch.randn(spec.shape, generator=generator) * 0.2
        + initial_value(spec, config, 0)
        for spec in param_specs(config)
    }


def export(config: ModelConfig, folder: Path) -> Path:
    byte_tokenizer().save(folder / "tokenizer")
    export_huggingface(
        config,
        random_weights(config).items(),
        folder / "out",
        tokenizer=folder / "tokenizer",
        remote_code=True,
    )
    return folder / "out"


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def our_logits(model: Transformer) -> torch.Tensor:
    return model.logits(model(tokens(), torch.arange(40).expand(2, -1), causal_mask(2, 40)))


@pytest.mark.parametrize("case", CASES)
def test_the_exported_class_gives_our_logits_and_generates_our_text(
    case: str, transformers: Any, tmp_path: Path
) -> None:
    config = CASES[case]
    out = export(config, tmp_path)
    assert find_model(out).config == config
    ours = load_model(out)
    exported = transformers.AutoModelForCausalLM.from_pretrained(
        out, trust_remote_code=True, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        expected = our_logits(ours.model)
        assert (exported(tokens()).logits - expected).abs().max() <= 1e-5
        rotated = Transformer(config.with_(no_rope_layers=())).eval()
        rotated.load_state_dict(random_weights(config))
        assert (our_logits(rotated) - expected).abs().max() > 0.1
    (generation,) = generate(ours, ["the cat"], GenerateOptions(max_new_tokens=12))
    prompt = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)(
        "the cat", return_tensors="pt"
    )
    cached = exported.generate(**prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert cached[0, prompt["input_ids"].shape[1] :].tolist() == generation.token_ids


def test_a_folder_that_transformers_saves_again_is_still_the_model(
    transformers: Any, tmp_path: Path
) -> None:
    out = export(CASES["tied"], tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    model.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "again", trust_remote_code=True
    ).eval()
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, model.eval()(tokens()).logits)
    assert find_model(tmp_path / "again").config.no_rope_layers == (1,)


def test_without_trust_nothing_is_loaded_instead(transformers: Any, tmp_path: Path) -> None:
    out = export(CASES["tied"], tmp_path)
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=False)


def test_the_flag_is_asked_for_where_transformers_has_no_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = export(CASES["tied"], tmp_path)
    arguments = ["export", "hf", "--model", str(model), "--out"]
    assert main([*arguments, str(tmp_path / "plain")]) == 2
    error = capsys.readouterr().err
    assert "no_rope_layers is [1]" in error
    assert "--remote-code" in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "plain").exists()
    assert main([*arguments, str(tmp_path / "coded"), "--remote-code", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["remote_code"] is True


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BASE, "--remote-code is given; transformers already has a class for this qwen3 model"),
        (
            BASE.with_(family="llama", qk_norm=False, no_rope_layers=(1,)),
            "--remote-code is given; transformers already has a class for this smollm3 model",
        ),
        (BASE.with_(norm="layernorm"), r"model\.norm is 'layernorm'"),
    ],
    ids=["qwen3", "smollm3", "layernorm"],
)
def test_the_flag_is_refused_where_the_code_is_not_needed_or_does_not_help(
    tmp_path: Path, config: ModelConfig, message: str
) -> None:
    weights = random_weights(config).items()
    with pytest.raises(ConfigError, match=message):
        export_huggingface(config, weights, tmp_path / "stock", tokenizer=None, remote_code=True)


def test_the_code_imports_transformers_and_torch_alone() -> None:
    code = Path(__file__).parents[3] / "src" / "headway" / "export" / "code"
    files = sorted(code.glob("modeling_*.py"))
    assert [file.name for file in files] == ["modeling_qwen3_nope.py"]
    for file in files:
        imports = [
            node
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        names = {
            name.split(".")[0]
            for statement in imports
            for name in (getattr(statement, "module", None) or statement.names[0].name,)
        }
        assert names == {"typing", "torch", "transformers"}
