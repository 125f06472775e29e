"""Mixtures of transformers and ours: the same logits, losses, gradients and greedy text, read and written in both forms."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.batches import make_batch

from headway.checkpoint.stored_model import find_model
from headway.export.huggingface import export_model
from headway.infer.load import load_model
from headway.model.families.base import family_of
from headway.model.paged_rows import PagedRows
from headway.model.transformer import Transformer
from headway.tasks.balance import with_balance
from headway.tasks.base import StepInfo
from headway.tasks.next_token import Config as NextToken

transformers = pytest.importorskip("transformers")
SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.2, "output_router_logits": True, "router_aux_loss_coef": 0.3,
    "rms_norm_eps": 1e-3, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 40, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6},
    "qwen3_moe": {
        "intermediate_size": 56, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3, "mlp_only_layers": [0],
        "head_dim": 12, "attention_bias": True,
    },
    "olmoe": {"intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3},
    "qwen3_moe normalised": {
        "intermediate_size": 56, "moe_intermediate_size": 24, "num_experts": 4, "norm_topk_prob": True, "num_experts_per_tok": 2,
        "decoder_sparse_step": 2,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def reference_and_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """A model of transformers and the folder it was saved to."""
    kind = request.param.split()[0]
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, **SHAPE, **CASES[request.param])
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    folder = tmp_path_factory.mktemp("theirs")
    model.save_pretrained(folder)
    return model, folder


def ours(folder: Path) -> Transformer:
    stored = find_model(folder)
    model = Transformer(stored.config)
    model.load_state_dict(dict(stored.weights()))
    return model


def test_logits_losses_and_gradients_are_those_of_transformers(
    reference_and_folder: tuple[Any, Path],
) -> None:
    model, folder = reference_and_folder
    our_model = ours(folder)
    our_model.config = our_model.config.with_(
        experts={**our_model.config.experts.model_dump(), "aux_scope": "step"}
    )  # pyright: ignore[reportOptionalMemberAccess]
    batch = make_batch([[16]], seq_len=16, vocab=96)
    right = model(batch.tokens, labels=batch.tokens)
    out = our_model.forward_batch(batch)
    torch.testing.assert_close(our_model.logits(out.hidden), right.logits, atol=1e-5, rtol=1e-5)
    loss = with_balance(NextToken().build(), our_model.config).loss(
        out, batch, StepInfo(0, 1), None
    )  # pyright: ignore[reportArgumentType]
    share = loss.share({"targets": 15.0, "rows": 1.0, "tokens": 16.0, "step": 1.0})
    total, weight = loss.metrics["aux_loss"]
    assert (total / weight).item() == pytest.approx(right.aux_loss.item(), rel=1e-5)
    assert share.item() == pytest.approx(right.loss.item(), rel=1e-5)
    share.backward()
    right.loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in our_model.named_parameters():
        path = name.removesuffix(".weight")
        fused = (
            path.replace("gate_proj", "gate_up_proj").replace("up_proj", "gate_up_proj")
            if ".experts." in name
            else name
        )
        expected = grads[fused.replace("gate_gate_up_proj", "gate_up_proj")]
        if ".experts." in name and "down_proj" not in name:
            expected = expected.chunk(2, dim=1)[0 if "gate_proj" in name else 1]
        torch.testing.assert_close(
            parameter.grad,
            expected,
            atol=1e-4,
            rtol=1e-3,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    model.zero_grad()


def test_greedy_text_through_the_cache_is_that_of_transformers(
    reference_and_folder: tuple[Any, Path],
) -> None:
    model, folder = reference_and_folder
    prompt = [5, 17, 3, 88, 41]
    right = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[
        0, 5:
    ].tolist()
    loaded = load_model(folder)
    rows = PagedRows(loaded.model, 1, 32)
    hidden = rows.read(torch.tensor([prompt]))[:, -1]
    generated: list[int] = []
    for _ in range(12):
        generated.append(int(loaded.model.logits(hidden).argmax()))
        hidden = rows.step(torch.tensor(generated[-1:]))
    assert generated == right


def test_an_export_is_what_transformers_wrote_and_fused_tensors_are_read_too(
    reference_and_folder: tuple[Any, Path], tmp_path: Path
) -> None:
    model, folder = reference_and_folder
    export_model(folder, tmp_path / "out")
    written = load_file(tmp_path / "out/model.safetensors")
    right = load_file(folder / "model.safetensors")
    assert written.keys() == right.keys()
    assert all(torch.equal(written[name], value) for name, value in right.items())
    config = find_model(folder).config
    config = config.with_(head_dim=config.head_size)
    assert find_model(tmp_path / "out").config == config
    assert (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")(torch.tensor([[1, 2]]))
        .logits.isfinite()
        .all()
    )
    assert (
        family_of(config.family).read(json.loads((tmp_path / "out/config.json").read_text()))
        == config
    )
    fused = tmp_path / "fused"
    fused.mkdir()
    (fused / "config.json").write_text((folder / "config.json").read_text())
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()},
        fused / "model.safetensors",
    )
    for (name, value), (_, right_value) in zip(
        find_model(fused).weights(), find_model(folder).weights(), strict=True
    ):
        assert torch.equal(value, right_value), name
