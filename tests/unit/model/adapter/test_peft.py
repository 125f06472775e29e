"""Adapters compute what PEFT computes, read and write its folders, and merge into the plain model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.initial_weights import initialize

from headway.checkpoint.stored_model import find_model
from headway.errors import CheckpointError, ConfigError
from headway.export.adapter import export_adapter
from headway.infer.load import load_model
from headway.kernels.attention import causal_mask
from headway.model.adapter.config import AdapterConfig, linears
from headway.model.adapter.lora import AdaptedLinear, adapt, merged, with_updates
from headway.model.adapter.peft import PREFIX, read_adapter
from headway.model.config import ModelConfig
from headway.model.transformer import Transformer

GOLDEN = Path(__file__).parents[3] / "golden" / "peft"
SMALL = ModelConfig(
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    ffn_size=24,
    vocab_size=32,
    max_seq_len=32,
    qkv_bias=True,
    tie_embeddings=False,
)


def adapted(base: Path, folder: Path) -> tuple[Transformer, set[str]]:
    """The model with its updates in place, and the names of what trains."""
    stored = find_model(base).with_adapter(folder)
    assert stored.adapter is not None
    config = stored.adapter.config
    modules = stored.adapter.config.modules(stored.config)
    model = Transformer(stored.config).eval()
    adapt(model, config, modules)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in with_updates(
            stored.adapter.base_weights(), config, modules, 0, stored.adapter.updates()
        ):
            parameters[name].copy_(value)
    return model.eval(), {*stored.adapter.updates(), *stored.adapter.full_weights()}


def logits(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    rows, length = tokens.shape
    return model.logits(
        model(tokens, torch.arange(length).expand(rows, -1), causal_mask(rows, length))
    )


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_logits_and_gradients_equal_those_of_peft(kind: str) -> None:
    seen = load_file(GOLDEN / kind / "seen.safetensors")
    model, training = adapted(GOLDEN / "base", GOLDEN / kind)
    out = logits(model, seen["tokens"])
    assert (out - seen["logits"]).abs().max() <= 1e-5
    (out * seen["direction"]).sum().backward()
    reference = {
        name.removeprefix("gradient." + PREFIX): value
        for name, value in seen.items()
        if name.startswith("gradient.")
    }
    assert set(reference) == training
    for name, parameter in model.named_parameters():
        if name in reference:
            assert parameter.grad is not None
            assert (parameter.grad - reference[name]).abs().max() <= 1e-5 * max(
                1.0, float(reference[name].abs().max())
            ), name


@pytest.mark.parametrize("kind", ["lora", "dora", "patterns"])
def test_a_merged_peft_adapter_gives_the_same_logits_through_model(
    kind: str, tmp_path: Path
) -> None:
    shutil.copytree(GOLDEN / kind, tmp_path / "adapter")
    settings = json.loads((GOLDEN / kind / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps({**settings, "base_model_name_or_path": str(GOLDEN / "base")})
    )
    seen = load_file(GOLDEN / kind / "seen.safetensors")
    with torch.no_grad():
        out = logits(load_model(tmp_path / "adapter").model, seen["tokens"])
    assert (out - seen["logits"]).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_what_is_written_is_what_peft_wrote(kind: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / kind, tmp_path / "theirs")
    settings = json.loads((GOLDEN / kind / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(GOLDEN / "base")
    (tmp_path / "theirs" / "adapter_config.json").write_text(json.dumps(settings))
    export_adapter(tmp_path / "theirs", tmp_path / "ours")
    ours = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    written_by_peft = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    assert set(ours) == set(written_by_peft)
    assert all(torch.equal(ours[name], written_by_peft[name]) for name in written_by_peft)
    written = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    for key, value in written.items():
        same = (
            sorted(value) == sorted(settings[key])
            if isinstance(value, list)
            else value == settings[key]
        )
        assert same or key == "task_type", f"{key}: {value} is not {settings[key]}"


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_peft_itself_loads_what_is_written(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    import transformers

    shutil.copytree(GOLDEN / kind, tmp_path / "theirs")
    settings = json.loads((GOLDEN / kind / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(GOLDEN / "base")
    (tmp_path / "theirs" / "adapter_config.json").write_text(json.dumps(settings))
    export_adapter(tmp_path / "theirs", tmp_path / "ours")
    base = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / "base", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    seen = load_file(GOLDEN / kind / "seen.safetensors")
    with torch.no_grad():
        assert (model(seen["tokens"]).logits - seen["logits"]).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("targets", [("all",), ("q_proj", "lm_head"), ("*.1.mlp.*",)])
def test_merged_equals_unmerged(kind: Any, targets: tuple[str, ...]) -> None:
    config = AdapterConfig(kind=kind, rank=3, alpha=5.0, targets=targets)
    plain = Transformer(SMALL).eval()
    modules = config.modules(SMALL)
    initialize(plain, 1)
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(1))
    updates = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(7)).abs() * 0.3
        for name, shape in config.shapes(SMALL).items()
    }
    model = Transformer(SMALL).eval()
    adapt(model, config, modules)
    values = dict(with_updates(plain.state_dict().items(), config, modules, 3, updates))
    model.load_state_dict(values)
    alone = Transformer(SMALL).eval()
    alone.load_state_dict(dict(merged(values.items(), config, modules)))
    with torch.no_grad():
        assert (logits(model, tokens) - logits(alone, tokens)).abs().max() <= 1e-5
        assert (logits(model, tokens) - logits(plain, tokens)).abs().max() > 1e-3
    # in any order: an engine gives updates first and the frozen rest last
    backwards = dict(merged(reversed(list(values.items())), config, modules))
    assert all(torch.equal(backwards[name], value) for name, value in alone.state_dict().items())


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_new_adapter_changes_nothing(kind: Any) -> None:
    config = AdapterConfig(kind=kind, rank=3)
    plain = Transformer(SMALL).eval()
    modules = config.modules(SMALL)
    initialize(plain, 1)
    model = Transformer(SMALL).eval()
    adapt(model, config, modules)
    model.load_state_dict(dict(with_updates(plain.state_dict().items(), config, modules, 3, {})))
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        assert (logits(model, tokens) - logits(plain, tokens)).abs().max() <= 1e-6


def test_dropout_acts_on_the_update_alone_and_only_in_training() -> None:
    config = AdapterConfig(rank=2, alpha=2.0, dropout=0.5, targets=("q_proj",))
    linear = AdaptedLinear(8, 4, bias=True, config=config)
    x = torch.randn(3, 8)
    torch.manual_seed(5)
    y = linear(x)
    torch.manual_seed(5)
    dropped = torch.nn.functional.dropout(x, 0.5, True)
    expected = torch.nn.functional.linear(x, linear.weight, linear.bias) + linear.lora_B(
        linear.lora_A(dropped)
    )
    assert torch.allclose(y, expected)
    linear.eval()
    assert torch.allclose(
        linear(x), torch.nn.functional.linear(x, linear.effective, linear.bias), atol=1e-6
    )


def test_an_adapted_linear_is_one_graph_for_the_compiler() -> None:
    linear = AdaptedLinear(8, 4, bias=True, config=AdapterConfig(kind="dora", rank=2))
    x = torch.randn(3, 8)
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), linear(x), atol=1e-6)
    torch._dynamo.reset()


def test_targets_are_every_linear_of_a_block_or_modules_by_path() -> None:
    assert len(AdapterConfig().modules(SMALL)) == 14
    assert "lm_head" in linears(SMALL)
    targets = ["model.layers.1.mlp.up_proj", "lm_head"]
    assert AdapterConfig(targets=tuple(targets)).modules(SMALL) == targets


def test_a_target_that_matches_nothing_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        ConfigError, match=r"'q_porj', which matches no linear.*Did you mean 'q_proj'"
    ):
        AdapterConfig(targets=("q_porj",)).modules(SMALL)


def test_a_tied_or_dropped_out_head_is_no_target() -> None:
    with pytest.raises(ConfigError, match="tie_embeddings"):
        AdapterConfig(targets=("lm_head",)).modules(SMALL.with_(tie_embeddings=True))
    with pytest.raises(ConfigError, match=r"adapter\.dropout is 0\.1"):
        AdapterConfig(targets=("lm_head",), dropout=0.1).modules(SMALL)


@pytest.fixture
def lora_folder(tmp_path: Path) -> Path:
    """A copy of an adapter that PEFT wrote."""
    return Path(shutil.copytree(GOLDEN / "lora", tmp_path / "lora"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"r": 8}, "shape"),
    ],
)
def test_what_an_adapter_asks_for_and_headway_does_not_do_is_refused(
    lora_folder: Path, change: dict[str, Any], message: str
) -> None:
    path = lora_folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises((ConfigError, CheckpointError), match=message):
        read_adapter(lora_folder, find_model(GOLDEN / "base").config)


def test_an_adapter_of_a_larger_model_is_refused(lora_folder: Path) -> None:
    model = find_model(GOLDEN / "base").config.with_(num_layers=1)
    with pytest.raises(CheckpointError, match="matches no parameter of the model"):
        read_adapter(lora_folder, model)


def test_an_adapter_whose_file_is_damaged_is_refused(lora_folder: Path) -> None:
    (lora_folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_adapter(lora_folder, find_model(GOLDEN / "base").config)


def test_an_adapter_with_ranks_of_its_own_is_merged_and_not_continued(tmp_path: Path) -> None:
    stored = find_model(GOLDEN / "base").with_adapter(GOLDEN / "patterns")
    assert stored.adapter is not None
    assert stored.adapter.patterned
    assert not find_model(GOLDEN / "base").with_adapter(GOLDEN / "lora").adapter.patterned  # pyright: ignore[reportOptionalMemberAccess]
    shutil.copytree(GOLDEN / "patterns", tmp_path / "patterns")
    path = tmp_path / "patterns" / "adapter_config.json"
    settings = json.loads(path.read_text())
    for change, message in (
        ({"rank_pattern": {"v_proj": 3}}, "shape"),
        ({"rank_pattern": {"(a+)+$": 3}}, "holds the expression"),
        ({"alpha_pattern": {"v_proj": "many"}}, "a number above 0 is expected"),
        ({"alpha_pattern": [1]}, "a mapping from linears to numbers"),
        (
            {"use_qalora": True, "layer_replication": [[0, 1]]},
            r"use_qalora is True.*layer_replication is|layer_replication is.*use_qalora",
        ),
    ):
        path.write_text(json.dumps({**settings, **change}))
        with pytest.raises((ConfigError, CheckpointError), match=message):
            find_model(GOLDEN / "base").with_adapter(tmp_path / "patterns")
