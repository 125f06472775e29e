"""Every family computes what transformers computes: logits, gradients, greedy text, and an export that transformers loads again.

The models are small and random, with unusual settings (support/family_cases.py). `pytest -s` prints the table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.dense_head_masks import masked_forward
from support.family_cases import CASES, build_reference

from headway.data.batch import Batch
from headway.export.huggingface import export_huggingface
from headway.kernels.attention import AttentionMask, causal_mask, mask_of
from headway.model.config import ModelConfig
from headway.model.families.base import family_names, family_of, pieces_of
from headway.model.head_masks.masks import HeadMasks
from headway.model.layout import ROUTER_BIAS, param_specs
from headway.model.loading.huggingface import read_config, read_weights
from headway.model.paged_rows import PagedRows
from headway.model.transformer import Transformer

pytest.importorskip("transformers")

T = 26
PROMPT = 9
NEW = 7
WITHOUT_CLASS = {"internlm", "z2all", "transformers"}
"""transformers has no class for these, which are exported as other families; the last one wraps any class and has tests of its own."""

PUBLISHED = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
    "feed_forward.experts.gate_up_proj": "mlp.experts.gate_up_proj",
    "feed_forward.experts.down_proj": "mlp.experts.down_proj",
}
"""Parts of transformers' names in memory -> those that a folder may have: of Granite 4, of LFM2's mixture."""


@dataclass
class Pair:
    """One model, as transformers has it and as headway has it."""

    reference: Any
    ours: Transformer
    folder: Path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    made_pairs: dict[str, Pair] = {}
    for case in CASES:
        folder = tmp_path_factory.mktemp("family")
        reference = build_reference(case)
        reference.save_pretrained(folder)
        made_pairs[case] = Pair(reference, load(folder), folder)
    return made_pairs


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, dict[str, str]]]:
    rows: dict[str, dict[str, str]] = {}
    yield rows
    columns = ("logits", "gradients", "greedy", "export")
    lines = [
        ["family", *columns],
        *([case, *(row.get(column, "-") for column in columns)] for case, row in rows.items()),
    ]
    sys.stdout.write(
        "\n\n"
        + "\n".join(f"{line[0]:16}" + "".join(f"{cell:>12}" for cell in line[1:]) for line in lines)
        + "\n"
    )


def load(folder: Path) -> Transformer:
    config = read_config(folder)
    model = Transformer(config)
    model.load_state_dict(dict(read_weights(folder, config)), strict=True)
    return model


def ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(seed))


def positions(rows: int, length: int) -> torch.Tensor:
    return torch.arange(length).expand(rows, length)


def our_logits(
    model: Transformer,
    tokens: torch.Tensor,
    position: torch.Tensor | None = None,
    mask: AttentionMask | None = None,
):
    if position is None:
        position = positions(*tokens.shape)
    if mask is None:
        mask = causal_mask(tokens.shape[0], tokens.shape[1])
    return model.logits(model(tokens, position, mask))


def explicit(config: ModelConfig) -> ModelConfig:
    return config.with_(head_dim=config.head_size, num_kv_heads=config.kv_heads)


def test_every_family_is_in_the_table() -> None:
    assert {case.split()[0] for case in CASES} == set(family_names()) - WITHOUT_CLASS


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_transformers(
    case: str, pairs: dict[str, Pair], table: dict[str, dict[str, str]]
) -> None:
    pair = pairs[case]
    tokens = ids(2, T)
    pair.reference.zero_grad()
    expected = pair.reference(tokens, use_cache=False).logits
    logits = our_logits(pair.ours, tokens)
    gap = (logits - expected).abs().max().item()
    targets = tokens.roll(-1, 1)
    F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    pair.ours.zero_grad()
    hidden = pair.ours(tokens, positions(2, T), causal_mask(2, T))
    coefficients = torch.full((2, T), 1 / (2 * T))
    pair.ours._output(hidden, None).head.nll(targets, coefficients).total.backward()
    worst = max(gradient_gaps(pair))
    table.setdefault(case, {}).update(logits=f"{gap:.1e}", gradients=f"{worst:.1e}")
    assert gap < 1e-5 * max(1.0, expected.abs().max().item()), case
    assert worst < 1e-4, case


def as_published(name: str) -> str:
    """The name in a folder of a parameter that transformers calls otherwise in memory."""
    for module, published in PUBLISHED.items():
        name = name.replace(module, published)
    return name


def gradient_gaps(pair: Pair) -> Iterator[float]:
    """How far each gradient is off, relative to the largest element of theirs."""
    family = family_of(pair.ours.config.family)
    config = pair.ours.config
    reference = {
        as_published(name): parameter for name, parameter in pair.reference.named_parameters()
    }
    ours = dict(pair.ours.named_parameters())
    assert set(ours) == {spec.name for spec in param_specs(config)}
    for spec in param_specs(config):
        if spec.name.endswith(ROUTER_BIAS):
            continue  # never trained by a gradient
        (piece,) = pieces_of(family, spec, config, reference)
        # some names differ on disk
        whole = reference[piece.name if piece.name in reference else spec.name].grad
        gradient = ours[spec.name].grad
        assert whole is not None and gradient is not None, spec.name
        part = whole
        if piece.dim is not None:
            rows = torch.tensor(piece.rows(whole.shape[piece.dim]))
            part = whole.index_select(piece.dim, rows)
        part = part.transpose(-1, -2) if piece.transposed else part
        yield ((part - gradient).abs().max() / part.abs().max().clamp(min=1e-3)).item()


@pytest.mark.parametrize("case", CASES)
def test_greedy_text_is_that_of_transformers_and_of_the_forward(
    case: str, pairs: dict[str, Pair], table: dict[str, dict[str, str]]
) -> None:
    pair = pairs[case]
    prompt = ids(2, PROMPT, 1)
    length = PROMPT + NEW
    expected = pair.reference.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False
    )
    rows = PagedRows(pair.ours, 2, length)
    with torch.inference_mode():
        logits = pair.ours.logits(rows.read(prompt)[:, -1])
        generated = prompt
        for _ in range(NEW - 1):
            generated = torch.cat((generated, logits.argmax(-1)[:, None]), 1)
            logits = pair.ours.logits(rows.step(generated[:, -1]))
        generated = torch.cat((generated, logits.argmax(-1)[:, None]), 1)
        whole = our_logits(pair.ours, generated[:, :-1])
    table.setdefault(case, {})["greedy"] = "same" if torch.equal(generated, expected) else "differs"
    assert torch.equal(generated, expected), case
    assert (whole[:, -1] - logits).abs().max() < 1e-4, "decoding from the cache is the forward"


@pytest.mark.parametrize("case", CASES)
def test_an_export_has_the_same_bytes_and_loads_in_transformers(
    case: str, pairs: dict[str, Pair], table: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    pair = pairs[case]
    tokens = ids(2, T, 2)
    config = pair.ours.config
    export_huggingface(config, read_weights(pair.folder, config), tmp_path / "out", tokenizer=None)
    assert explicit(read_config(tmp_path / "out")) == explicit(config), (
        "what was written is read back"
    )
    before = load_file(pair.folder / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    ).eval()
    assert type(again) is type(pair.reference)
    with torch.no_grad():
        same = torch.equal(again(tokens).logits, pair.reference(tokens).logits)
    table.setdefault(case, {})["export"] = "same" if same else "differs"
    assert same, case


@pytest.mark.parametrize("case", CASES)
def test_packed_documents_compute_what_they_compute_alone(
    case: str, pairs: dict[str, Pair]
) -> None:
    """One of them longer than the length at which longrope changes its frequencies."""
    model = pairs[case].ours
    lengths = [5, 18, 3]
    tokens = ids(1, sum(lengths), 3)
    position = torch.cat([torch.arange(length) for length in lengths])[None]
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[
        None
    ].int()
    bounds = torch.tensor([[0, 5, 23, 26]], dtype=torch.int32)
    zero = torch.zeros_like(tokens)
    mask = mask_of(
        Batch(
            tokens,
            zero,
            zero.float(),
            position.int(),
            document,
            zero[:, 0].int(),
            bounds,
            single_document=False,
        )
    )
    with torch.inference_mode():
        packed = our_logits(model, tokens, position, mask)
        alone = [our_logits(model, part) for part in tokens.split(lengths, dim=1)]
    assert (packed - torch.cat(alone, 1)).abs().max() < 1e-4, case


@pytest.mark.parametrize("case", CASES)
def test_decoding_with_head_masks_is_the_forward_under_them(
    case: str, pairs: dict[str, Pair]
) -> None:
    model = pairs[case].ours
    tokens = ids(2, 15, 4)
    prompt = 11
    config = model.config
    if config.latent_attention is not None:
        return  # no KV heads: test_latent_attention.py has the refusal
    if config.has_states:
        return  # nor these: test_engine_states.py
    masks = HeadMasks(
        tuple(
            tuple((layer + head) % 2 == 0 for head in range(config.kv_heads))
            for layer in range(config.num_layers)
        ),
        4,
        2,
    )
    rows = PagedRows(model, 2, 15, masks=masks)
    with torch.inference_mode():
        logits = [model.logits(rows.read(tokens[:, :prompt])[:, -1])]
        logits += [model.logits(rows.step(tokens[:, index])) for index in range(prompt, 15)]
        expected = model.logits(masked_forward(model, tokens, masks))[:, prompt - 1 :]
    assert (torch.stack(logits, 1) - expected).abs().max() < 1e-4, case
