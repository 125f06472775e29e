"""Classes of transformers behind headway's Model compute what transformers computes, packed or alone, cached or not; others are refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.batches import make_batch, make_step
from support.stock_cases import CASES, SHAPE, build_stock, save_stock

from headway.checkpoint.stored_model import find_model
from headway.data.batch import Batch
from headway.errors import ConfigError
from headway.export.huggingface import export_huggingface, export_model
from headway.infer.load import LoadedModel, load_model
from headway.model.base import build_frozen_model
from headway.model.families.base import as_stored, family_for
from headway.model.families.transformers import Wrapping, read
from headway.model.flops import token_flops
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.model.paged_rows import PagedRows
from headway.model.stock.facts import check_trainable
from headway.model.stock.model import StockModel
from headway.tasks.balance import StepBalanced, with_balance
from headway.tasks.base import SeenRows, StepInfo
from headway.tasks.next_token import Config as NextToken
from headway.train.config import Recipe
from headway.train.wrapped import wrapped_shape

pytest.importorskip("transformers", minversion="5.0")
LENGTHS = [[7, 9], [16], [3, 4, 5]]


@pytest.fixture(scope="module", params=CASES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, LoadedModel]:
    """A model of transformers, and the same one as headway reads it from its folder."""
    reference = build_stock(request.param)
    return reference, load_model(save_stock(reference, tmp_path_factory.mktemp(request.param)))


def a_batch() -> Batch:
    return make_batch(LENGTHS, seq_len=16, vocab=SHAPE["vocab_size"])


def test_loss_and_gradients_are_those_of_transformers_document_by_document(
    pair: tuple[Any, LoadedModel],
) -> None:
    reference, loaded = pair
    ours = loaded.model
    batch = a_batch()
    assert isinstance(ours, StockModel)
    ours.train().requires_grad_(True)
    out = ours.forward_batch(batch)
    loss = out.head.nll(batch.targets, batch.loss_weight).total
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    ours.zero_grad(set_to_none=True)
    ours.eval().requires_grad_(False)
    wanted = torch.zeros(())
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            logits = reference(batch.tokens[row : row + 1, start : start + length]).logits[0, :-1]
            wanted = wanted + F.cross_entropy(
                logits, batch.targets[row, start : start + length - 1], reduction="sum"
            )
            start += length
    reference.zero_grad()
    wanted.backward()
    assert abs(float((loss - wanted).detach())) < 1e-4 * float(wanted.detach())
    largest = max(float(parameter.grad.abs().max()) for parameter in reference.parameters())
    for (
        name,
        parameter,
    ) in (
        reference.named_parameters()
    ):  # the gradient of a key's bias is noise where nothing is rotated
        gap = (gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max().clamp(
            min=1e-3 * largest
        )
        assert gap < 1e-4, f"{name}: {gap}"


@torch.no_grad()
def test_logits_and_greedy_text_are_those_of_transformers(pair: tuple[Any, LoadedModel]) -> None:
    reference, loaded = pair
    tokens = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    position = torch.arange(12).expand(2, -1)
    gap = (
        (
            loaded.model.logits(loaded.model.hidden_states(tokens, position))
            - reference(tokens).logits
        )
        .abs()
        .max()
    )
    assert gap < 1e-5
    wanted = reference.generate(
        tokens, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0
    )[:, 12:].tolist()
    rows = PagedRows(loaded.model, 2, 24)
    hidden = rows.read(tokens)[:, -1]
    generated = []
    for _ in range(12):
        logits = loaded.model.logits(hidden)
        logits[:, SHAPE["eos_token_id"]] = -torch.inf  # as min_new_tokens does
        generated.append(logits.argmax(-1))
        hidden = rows.step(generated[-1])
    assert torch.stack(generated, 1).tolist() == wanted
    sys.stdout.write(f"{type(reference).__name__:24} logits {gap:.1e}, greedy text equal\n")


@torch.no_grad()
def test_an_export_is_the_folder_of_transformers_again(
    pair: tuple[Any, LoadedModel], tmp_path: Path
) -> None:
    import transformers
    from safetensors import safe_open

    reference, loaded = pair
    export_model(str(loaded.path), tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    tokens = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(2))
    assert type(again) is type(reference)
    assert torch.equal(again(tokens).logits, reference(tokens).logits)
    names = [
        set(safe_open(Path(str(folder)) / "model.safetensors", "pt").keys())
        for folder in (loaded.path, tmp_path / "out")
    ]
    assert names[0] == names[1]


def test_the_shape_of_a_wrapped_class_is_read_off_it(pair: tuple[Any, LoadedModel]) -> None:
    reference, loaded = pair
    config = loaded.config
    assert config.family == "transformers"
    assert config.num_layers == 2
    assert config.num_heads == 4
    assert sum(spec.size for spec in param_specs(config)) == sum(
        parameter.numel() for parameter in reference.parameters()
    )
    kind = reference.config.model_type
    assert [config.window_of(layer) for layer in range(2)] == {
        "starcoder2": [5, 5], "exaone4": [4, None], "vaultgemma": [4, None],
    }.get(kind, [None, None])  # fmt: skip
    assert (config.logit_scale, config.logit_softcap, config.attention_softcap) == {
        "cohere": (0.25, None, None), "vaultgemma": (1.0, 2.0, 3.0),
    }.get(kind, (1.0, None, None))  # fmt: skip
    flops = token_flops(config, 16)
    linear = sum(
        spec.size
        for spec in param_specs(config)
        if len(spec.shape) == 2 and "embed" not in spec.name
    )
    head = sum(spec.size for spec in param_specs(config) if spec.tied_to)
    assert flops.matrices == 6 * (linear + head)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            {"model_type": "mamba"},
            "MambaForCausalLM can be neither used nor trained: it keeps a recurrent state",
        ),
        (
            {"model_type": "falcon"},
            "FalconForCausalLM can be neither used nor trained: it computes with its attention mask itself",
        ),
        (
            {"model_type": "bert"},
            "BertLMHeadModel .* its mask lets tokens see later ones. Set is_decoder",
        ),
        (
            {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
            "it has layers of conv",
        ),
        (
            {
                "model_type": "arcee",
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            },
            "rope_type is 'dynamic'",
        ),
        (
            {"model_type": "stablelm", "num_attention_heads": "four"},
            "transformers cannot make this model",
        ),
        (
            {"model_type": "starcoder2", "max_position_embeddings": -1},
            "Starcoder2ForCausalLM: max_seq_len Input should be greater than 0",
        ),
        ({"model_type": {}}, "does not know"),
        ({"model_type": "no_such_model"}, "which the installed transformers does not know"),
        (
            {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Mine"}},
            "model.trust_remote_code=true",
        ),
    ],
)
def test_what_cannot_be_used_exactly_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        read({**SHAPE, **config})
    assert "\n" not in str(caught.value)
    assert "StockMask" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            {"model_type": "seed_oss", "attention_dropout": 0.1},
            "attention has dropout 0.1.*Set it to 0",
        ),
        ({"model_type": "opt", "layerdrop": 0.2}, "layerdrop is 0.2.*Set it to 0"),
    ],
)
def test_what_only_training_needs_is_refused_for_training_alone(
    config: dict[str, Any], named: str
) -> None:
    model = read({**SHAPE, **config})
    with pytest.raises(ConfigError, match=f"can be used but not trained: {named}"):
        check_trainable(model)
    with pytest.raises(ConfigError, match=named):
        wrapped_shape(recipe(config), None, 64)


def recipe(config: dict[str, Any]) -> Recipe:
    model = {"family": "transformers", "hf_config": {**SHAPE, **config}}
    return Recipe.model_validate({"model": model, "data": {"train": ["x"]}, "steps": 1})


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "gpt_oss"])
@pytest.mark.parametrize("micro_rows", [2, 1])
def test_the_balance_loss_that_a_config_asks_for_is_that_of_the_class(
    kind: str, micro_rows: int
) -> None:
    import transformers

    settings = {**SHAPE, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                "head_dim": 8, "output_router_logits": True, "router_aux_loss_coef": 0.5}  # fmt: skip
    config = transformers.AutoConfig.for_model(kind, **settings)
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    model_config = read({"model_type": kind, **settings})
    weights = [(name, value.detach()) for name, value in reference.named_parameters()]
    ours = build_frozen_model(model_config, weights, torch.device("cpu"), torch.float32)
    ours.train().requires_grad_(True)
    batch = make_batch([[16], [16]], seq_len=16, vocab=64)
    task = with_balance(NextToken().build(), model_config)
    assert isinstance(task, StepBalanced)

    # The class takes the loss over all tokens of a batch; rows that come one by one change nothing.
    parts = make_step(batch, 2 // micro_rows).microbatches
    load = torch.stack([task.read_load(ours.forward_batch(part), part)[0] for part in parts]).sum(0)
    seen = {"expert_load": SeenRows(load.detach()[None], 0)} if micro_rows == 1 else {}
    totals = {"targets": float(batch.loss_weight.sum()), "rows": 2.0, "tokens": 32.0, "step": 1.0}
    for part in parts:
        loss = task.loss(ours.forward_batch(part), part, StepInfo(0, 1, seen=seen), None)  # pyright: ignore[reportArgumentType]
        loss.share(totals).backward()

    labels = batch.tokens.clone()
    wanted = reference(batch.tokens, labels=labels).loss
    wanted.backward()
    largest = max(float(parameter.grad.abs().max()) for parameter in reference.parameters())
    for name, parameter in reference.named_parameters():
        mine = ours.get_parameter(name).grad
        assert mine is not None, name
        gap = (mine - parameter.grad).abs().max() / parameter.grad.abs().max().clamp(
            min=1e-3 * largest
        )
        assert gap < 1e-4, f"{name}: {gap}"


def test_a_token_passes_a_few_of_the_experts_of_a_mixture() -> None:
    settings = {**SHAPE, "model_type": "qwen2_moe", "num_experts": 8, "moe_intermediate_size": 16}
    specs = {spec.name: spec for spec in param_specs(read({**settings, "num_experts_per_tok": 2}))}
    experts = sum(spec.size for spec in specs.values() if len(spec.shape) == 3)
    two, four = (
        token_flops(read({**settings, "num_experts_per_tok": count}), 16).matrices
        for count in (2, 4)
    )
    assert experts > 0
    assert four - two == 6 * experts * (4 - 2) / 8


def test_a_known_family_is_wrapped_on_request_only(tmp_path: Path) -> None:
    config = {**SHAPE, "model_type": "llama", "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_model(tmp_path).config.family == "llama"
    wrapped = find_model(tmp_path, wrapping=Wrapping({"rms_norm_eps": 1e-3})).config
    assert wrapped.family == "transformers"
    assert wrapped.hf_config is not None
    assert wrapped.hf_config["rms_norm_eps"] == 1e-3
    assert family_for({"model_type": "starcoder2"}) is family_for({"model_type": "stablelm"})
    with pytest.raises(
        ConfigError, match=r"model.family=transformers model.trust_remote_code=true"
    ):
        family_for({"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Mine"}})


def test_random_weights_are_drawn_as_the_class_draws_them_by_name_and_seed() -> None:
    config = read({**SHAPE, "model_type": "nemotron"})  # its norms add 1 to their weights
    weights = {spec.name: initial_value(spec, config, 3) for spec in param_specs(config)}
    again = {spec.name: initial_value(spec, config, 3) for spec in reversed(param_specs(config))}
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert float(weights["model.norm.weight"].sum()) == 32.0
    assert float(weights["model.norm.bias"].abs().sum()) == 0.0
    drawn = weights["model.layers.1.mlp.up_proj.weight"]
    assert abs(float(drawn.std()) - 0.0134) < 2e-3
    assert not torch.equal(drawn, weights["model.layers.0.mlp.up_proj.weight"])


def test_code_of_a_folder_runs_when_a_recipe_trusts_it_and_travels_with_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "configuration_mine.py").write_text(
        "from transformers import LlamaConfig\nclass MineConfig(LlamaConfig):\n    model_type = 'mine'\n"
    )
    (folder / "modeling_mine.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .configuration_mine import MineConfig\n"
        "class MineForCausalLM(LlamaForCausalLM):\n    config_class = MineConfig\n"
    )
    classes = {
        "AutoConfig": "configuration_mine.MineConfig",
        "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
    }
    (folder / "config.json").write_text(
        json.dumps({**SHAPE, "model_type": "mine", "auto_map": classes})
    )
    for wrapping in (None, Wrapping()):
        with pytest.raises(ConfigError, match="trust_remote_code=true"):
            find_model(folder, wrapping=wrapping)
    assert "modeling_mine" not in str([name for name in sys.modules if "mine" in name])
    config = find_model(folder, wrapping=Wrapping(trust_remote_code=True)).config
    assert as_stored(config).trust_remote_code is False  # a checkpoint alone runs nothing
    weights = ((spec.name, initial_value(spec, config, 0)) for spec in param_specs(config))
    export_huggingface(config, weights, tmp_path / "out", tokenizer=None)
    assert (tmp_path / "out/modeling_mine.py").is_file()
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["architectures"] == ["MineForCausalLM"]
    assert "_name_or_path" not in written
