"""A whole run against a loop of torch alone: own forward, cross-entropy, clipping, AdamW and a learning rate counted by hand.

Runs that are compared with runs cannot see what is wrong in both. Here nothing of headway computes the other side but the first values of
the weights and which documents each step reads; every document is read there alone, so that packing, accumulation, masks, weights of
sources and ranks are all on trial.
"""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.ranks import start_processes
from torch import Tensor

from headway.checkpoint.load import open_checkpoint
from headway.config.load import load
from headway.data.loader import Loader
from headway.data.open import open_data
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.store.writer import StoreWriter
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe

STEPS = 5
SEQ_LEN = 32
ROWS = 4
RATES = [0.5, 1.0, 1.0, 0.775, 0.325]
"""Two steps of warm-up, then a cosine over three: 0.1 + 0.9 (1 + cos(0, pi/3, 2 pi/3)) / 2."""
LR = 2e-2
CLIP = 3.2
DECAY = 0.1
BETAS = (0.9, 0.95)
EPS = 1e-8
SHAPE = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 48,
    "vocab_size": 64,
    "max_seq_len": SEQ_LEN,
}
Document = tuple[tuple[int, ...], tuple[bool, ...]]
"""Ids, and which of them are targets."""


def write_store(path: Path, seed: int, count: int) -> list[Document]:
    rng = np.random.default_rng(seed)
    documents: list[Document] = []
    with StoreWriter(path, dtype="uint16", tokenizer_fingerprint=None, masked=True) as writer:
        for _ in range(count):
            ids = rng.integers(1, 64, int(rng.integers(4, 20)))
            mask = rng.random(20) < 0.7
            writer.add(ids.astype(np.uint16), mask[: len(ids)])
            documents.append((tuple(ids.tolist()), tuple(mask[: len(ids)].tolist())))
        writer.finish()
    return documents


def recipe_of(folder: Path, name: str, *overrides: str) -> Recipe:
    model = ", ".join(f"{key}: {value}" for key, value in SHAPE.items())
    text = f"""\
run: {{name: {name}, dir: {folder}/runs}}
model: {{{model}, init_std: 0.2, tie_embeddings: false}}
data:
  train: [{{path: {folder}/one, weight: 0.7}}, {{path: {folder}/two, weight: 0.3}}]
  valid: {{sets: {{held: {folder}/valid}}}}
  seq_len: {SEQ_LEN}
  tokenizer_unchecked: true
  cache_dir: {folder}/cache
batch: {{rows: {ROWS}, micro_rows: 2}}
optim: {{lr: {LR}, clip: {CLIP}, weight_decay: {DECAY}, betas: [0.9, 0.95], eps: {EPS}, schedule: {{kind: cosine, warmup: 2, floor: 0.1}}}}
steps: {STEPS}
eval: {{every: 5, rows: 64}}
seed: 11
device: cpu
precision: fp32
"""
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return load(Recipe, path, list(overrides))


def documents_of_steps(
    recipe: Recipe, known: list[dict[tuple[int, ...], Document]]
) -> list[list[tuple[int, Document]]]:
    """Which documents each step reads, with their source; recognised by their content, everything else about them is the test's own."""
    data = open_data(recipe.data, tokenizer=None, vocab_size=64, seed=recipe.seed)
    steps = []
    with Loader(
        recipe.data, sources=data.train, rows_per_step=ROWS, micro_rows=ROWS, seed=recipe.seed
    ) as loader:
        for _ in range(STEPS):
            (batch,) = next(loader)[0].microbatches
            documents = []
            for row in range(ROWS):
                source = int(batch.source[row])
                edges = sorted(set(batch.bounds[row].tolist()))
                for begin, end in pairwise(edges):
                    ids = tuple(batch.tokens[row, begin:end].tolist())
                    if any(ids):
                        documents.append((source, known[source][ids]))
            steps.append(documents)
    return steps


def forward(weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits of one document; Llama as its paper has it."""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weights[name], 1e-5)

    def turned(x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
        a = x[..., :4]
        b = x[..., 4:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    x = F.embedding(ids, weights["model.embed_tokens.weight"])
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        h = norm(x, prefix + "input_layernorm.weight")
        q, k, v = (
            F.linear(h, weights[f"{prefix}self_attn.{name}_proj.weight"])
            .view(len(ids), -1, 8)
            .transpose(0, 1)
            for name in "qkv"
        )
        q = turned(q)
        k = turned(k)
        o = F.scaled_dot_product_attention(
            q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), is_causal=True
        )
        x = x + F.linear(
            o.transpose(0, 1).reshape(len(ids), -1), weights[prefix + "self_attn.o_proj.weight"]
        )
        h = norm(x, prefix + "post_attention_layernorm.weight")
        gate = F.silu(F.linear(h, weights[prefix + "mlp.gate_proj.weight"])) * F.linear(
            h, weights[prefix + "mlp.up_proj.weight"]
        )
        x = x + F.linear(gate, weights[prefix + "mlp.down_proj.weight"])
    return F.linear(norm(x, "model.norm.weight"), weights["lm_head.weight"])


def nll(weights: dict[str, Tensor], document: Document) -> tuple[Tensor, int]:
    """Sum of losses over the targets of one document, and how many there are; the first token is predicted by nothing."""
    ids = torch.tensor(document[0])
    mask = torch.tensor(document[1][1:])
    losses = F.cross_entropy(forward(weights, ids)[:-1], ids[1:], reduction="none")
    return losses[mask].sum(), int(mask.sum())


@pytest.fixture(scope="module")
def torch_only(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[dict[str, Any]], dict[str, Tensor]]:
    """The folder of the data, what the loop saw in every step, and its weights at the end."""
    folder = tmp_path_factory.mktemp("torch")
    stores = [
        write_store(folder / name, seed, count)
        for seed, (name, count) in enumerate((("one", 40), ("two", 25), ("valid", 9)))
    ]
    config = ModelConfig.model_validate({**SHAPE, "init_std": 0.2, "tie_embeddings": False})
    weights = {
        spec.name: initial_value(spec, config, 11).requires_grad_() for spec in param_specs(config)
    }
    matrices = [value for value in weights.values() if value.dim() == 2]
    rest = [value for value in weights.values() if value.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}],
        betas=BETAS,
        eps=EPS,
    )
    seen: list[dict[str, Any]] = []
    known = [{ids: (ids, mask) for ids, mask in store} for store in stores[:2]]
    for rate, documents in zip(
        RATES, documents_of_steps(recipe_of(folder, "plan"), known), strict=True
    ):
        scored = [(source, *nll(weights, document)) for source, document in documents]
        loss = sum(total for _, total, _ in scored) / sum(count for _, _, count in scored)
        optimizer.zero_grad()
        loss.backward()  # pyright: ignore[reportAttributeAccessIssue]
        norm = math.sqrt(
            sum(float(value.grad.double().square().sum()) for value in weights.values())
        )  # pyright: ignore
        for value in weights.values():
            value.grad *= min(1.0, CLIP / norm)  # pyright: ignore
        for group in optimizer.param_groups:
            group["lr"] = LR * rate
        optimizer.step()
        by_source = {
            name: [(t.item(), c) for s, t, c in scored if s == n]
            for n, name in enumerate(("one", "two"))
        }
        seen.append({
            "loss": loss.item(), "grad_norm": norm, "lr": LR * rate, "tokens": sum(len(ids) for _, (ids, _) in documents),
            **{f"loss/{name}": sum(t for t, _ in sums) / sum(c for _, c in sums) for name, sums in by_source.items() if sums},
        })  # fmt: skip
    with torch.no_grad():
        held = [nll(weights, document) for document in stores[2]]
    seen.append(
        {
            "valid": float(sum(total for total, _ in held)) / sum(count for _, count in held),
            "targets": sum(c for _, c in held),
        }
    )
    return folder, seen, {name: value.detach() for name, value in weights.items()}


@pytest.mark.parametrize(
    ("name", "overrides", "world"),
    [
        ("plain", (), 1),
        ("accumulated", ("batch.micro_rows=1",), 1),
        ("zero1", ("batch.micro_rows=1",), 2),
        ("resumed", ("checkpoint.every=3", "checkpoint.at_end=false"), 1),
    ],
)
def test_a_run_is_the_loop_that_torch_alone_makes(
    name: str,
    overrides: tuple[str, ...],
    world: int,
    torch_only: tuple[Path, list[dict[str, Any]], dict[str, Tensor]],
) -> None:
    folder, seen, weights = torch_only
    recipe = recipe_of(folder, name, *overrides)
    if world == 1:
        train(recipe)
    else:
        start_processes(lambda: train(recipe), world)
    if name == "resumed":  # its newest checkpoint is of step 3
        (recipe.run.folder / "summary.json").unlink()
        train(recipe_of(folder, name))
    records = read_metrics(recipe.run.folder / "metrics.jsonl")
    norms = [step["grad_norm"] for step in seen[:STEPS]]
    assert min(norms) < CLIP < max(norms), (
        f"the clip takes part in some steps and not in others: {norms}"
    )
    consumed = 0
    for record, right in zip(records, seen[:STEPS], strict=True):
        consumed += right["tokens"]
        assert {key: record[key] for key in right} == pytest.approx(right, rel=1e-5), (
            f"step {record['step']}"
        )
        assert record["num_consumed_tokens"] == consumed
    valid = records[-1]["valid"]["held"]
    assert (valid["loss"], valid["tokens"]) == (
        pytest.approx(seen[-1]["valid"], rel=1e-5),
        seen[-1]["targets"],
    )
    assert valid["perplexity"] == pytest.approx(math.exp(seen[-1]["valid"]), rel=1e-4)
    reader = open_checkpoint(recipe.run.folder / "checkpoints" / "latest")
    for parameter, value in weights.items():
        torch.testing.assert_close(
            reader.read(parameter, "master"), value, rtol=1e-4, atol=1e-5, msg=parameter
        )


@pytest.mark.parametrize(("micro_rows", "world"), [(2, 1), (1, 2), (4, 1)])
def test_a_validation_reads_the_first_rows_and_no_more(
    micro_rows: int,
    world: int,
    torch_only: tuple[Path, list[dict[str, Any]], dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    """Rows of one document each: three rows are the first three documents, on however many ranks."""
    folder = torch_only[0]
    held = write_store(tmp_path / "valid", 2, 9)
    settings = (
        "data.packing=pad",
        "eval.rows=3",
        "eval.every=1",
        "steps=1",
        "optim.lr=0",
        "checkpoint.at_end=false",
        f"run.dir={tmp_path}",
    )
    recipe = recipe_of(
        folder, f"rows{micro_rows}-{world}", *settings, f"batch.micro_rows={micro_rows}"
    )
    if world == 1:
        train(recipe)
    else:
        start_processes(lambda: train(recipe), world)
    (record,) = read_metrics(recipe.run.folder / "metrics.jsonl")
    config = ModelConfig.model_validate({**SHAPE, "init_std": 0.2, "tie_embeddings": False})
    weights = {spec.name: initial_value(spec, config, 11) for spec in param_specs(config)}
    losses = [nll(weights, document) for document in held[:3]]
    assert record["valid"]["held"]["tokens"] == sum(count for _, count in losses)
    assert record["valid"]["held"]["loss"] == pytest.approx(
        float(sum(t for t, _ in losses)) / sum(c for _, c in losses), rel=1e-5
    )
