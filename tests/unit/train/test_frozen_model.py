"""Cached log-probabilities of two sources against the plain model: every pair finds its own, whatever source and split it is in."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from support.initial_weights import initialize
from support.preference_pairs import make_pair_store

from headway.config.load import load
from headway.data.loader import Loader
from headway.data.open import open_data
from headway.kernels.attention import causal_mask
from headway.model.transformer import Transformer
from headway.parallel.engine import EngineSpec
from headway.store.reader import Store, open_store
from headway.tasks.preference.loss import REFERENCE
from headway.tasks.preference.source import PAIR, PairReader
from headway.train.config import Recipe
from headway.train.frozen_model import make_reference
from headway.train.resolve import resolve

SETTINGS = [
    "model.hidden_size=32", "model.num_layers=1", "model.num_heads=4", "model.ffn_size=48", "model.vocab_size=64", "model.max_seq_len=64",
    "model.init_std=0.3", "data.seq_len=64", "data.tokenizer_unchecked=true", "data.valid.fraction=0.3", "objective.kind=dpo",
    "objective.reference_logps=cached", "device=cpu", "seed=5", "steps=1",
]  # fmt: skip


def log_probability(model: Transformer, store: Store, document: int) -> float:
    """Of the answer of one conversation, read alone: the sum over its targets."""
    ids = torch.tensor(store.document(document).astype(np.int64))
    mask = store.document_mask(document)
    assert mask is not None
    hidden = model(
        ids[None], torch.arange(len(ids), dtype=torch.int32)[None], causal_mask(1, len(ids))
    )
    losses = F.cross_entropy(model.logits(hidden)[0, :-1], ids[1:], reduction="none")
    return -float(losses[torch.from_numpy(mask[1:])].sum())


def test_pairs_of_every_source_and_split_find_their_own_numbers(tmp_path: Path) -> None:
    # two sources of different sizes, named against the order in which they are given
    stores = [
        open_store(make_pair_store(tmp_path / name, pairs=pairs, seed=pairs))
        for name, pairs in (("z", 9), ("a", 14))
    ]
    paths = ",".join(str(tmp_path / name) for name in ("z", "a"))
    recipe = load(
        Recipe,
        None,
        [
            *SETTINGS,
            f"data.train=[{paths}]",
            f"data.cache_dir={tmp_path / 'cache'}",
            f"run.dir={tmp_path}",
        ],
    )
    resolved = resolve(recipe)
    data = open_data(recipe.data, tokenizer=None, vocab_size=64, seed=5, reader=PairReader())
    spec = EngineSpec(resolved.model, recipe.objective, recipe.optim, chunk_tokens=64, seed=5)
    reference = make_reference(resolved, data, spec, 3)
    assert reference is not None
    model = Transformer(resolved.model)
    initialize(model, 5)
    model.eval()
    seen = []
    for mixture in (data.train, *data.valid.values()):
        with (
            Loader(
                recipe.data, sources=mixture, rows_per_step=4, micro_rows=4, seed=5, epochs=1
            ) as loader,
            torch.no_grad(),
        ):
            for step, _ in loader:
                batch = reference.prepare(step.microbatches[0])
                for row, column in (batch.extra[PAIR] >= 0).nonzero().tolist():
                    pair = int(batch.extra[PAIR][row, column])
                    store, number = (stores[0], pair) if pair < 9 else (stores[1], pair - 9)
                    right = [log_probability(model, store, 2 * number + side) for side in (0, 1)]
                    torch.testing.assert_close(
                        batch.extra[REFERENCE][row, 2 * column : 2 * column + 2].tolist(),
                        right,
                        rtol=1e-5,
                        atol=1e-5,
                    )
                    seen.append(pair)
    assert sorted(seen) == list(range(23))
