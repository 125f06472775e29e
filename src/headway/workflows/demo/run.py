"""The whole pipeline in small: text -> tokenizer -> store -> pretrain -> evaluate -> fine-tune ->
DPO -> sparsify -> export, on a CPU.

Every part leaves its result in the demo's folder and is not repeated; a second call only reports.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.workflows.demo.corpus import write_corpus, write_instructions
from headway.workflows.demo.post_training import (
    VALID_FRACTION,
    VALID_MODULES,
    compare_answers,
    fine_tune,
    prefer,
    sparsify,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

log = logging.getLogger("headway")

VOCAB_SIZE = 2048
SAMPLE_TOKENS = 64
STRIDE_TOKENS = 128
"""Half of the model's context: after a document's start, each token is scored with at least as
many tokens before it.
"""
SMOOTHING = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Values of k tried for the bigram model."""
PROMPT = "def read(self, path):\n"
RECIPE = """\
run: {{name: pretrain, dir: {out}/runs}}
model: {{hidden_size: 128, num_layers: 3, num_heads: 4, num_kv_heads: 2, ffn_size: 344, max_seq_len: 256}}
tokenizer: {out}/tokenizer
data:
  train: [{out}/store]
  valid: {{fraction: {fraction}}}
  seq_len: 256
  cache_dir: {out}/cache
batch: {{tokens: 2048, micro_rows: 8}}
optim: {{lr: 4e-3, schedule: {{kind: cosine, warmup: 0.05, floor: 0.05}}}}
steps: {steps}
eval: {{every: 100, rows: 96}}
checkpoint: {{every: 250}}
track: [{{kind: tensorboard}}]
log: {{every: 50}}
device: cpu
"""


class Demo:
    """The folders and files of the demo."""

    def __init__(self, out: Path, steps: int) -> None:
        self.out = out
        self.steps = steps
        self.corpus = out / "corpus" / "library.jsonl"
        self.tokenizer = out / "tokenizer"
        self.store = out / "store"
        self.instructions = out / "instructions"
        """Questions and answers made from docstrings."""
        self.pairs = out / "pairs"
        """Right and wrong answers."""
        self.recipe = out / "pretrain.yaml"
        self.run = out / "runs" / "pretrain"
        self.export = out / "hf"


def run_demo(out: Path, steps: int = 1000) -> dict[str, Any]:
    """Do every part that is not done yet; returns the summary."""
    demo = Demo(out, steps)
    out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    parts: list[tuple[str, Callable[[Demo], dict[str, Any]]]] = [
        ("corpus", make_corpus),
        ("tokenizer", make_tokenizer),
        ("token store", make_store),
        ("instruction data", make_instructions),
        ("pretrain", pretrain),
        ("evaluate", evaluate),
        ("fine-tune on questions", fine_tune),
        ("prefer right answers", prefer),
        ("sparsify", sparsify),
        ("export and generate", export_and_generate),
    ]
    summary: dict[str, Any] = {"out": str(out)}
    for number, (name, make) in enumerate(parts, start=1):
        log.info("[%d/%d] %s", number, len(parts), name)
        summary |= make(demo)
    # Last, because its report holds the numbers of all parts.
    summary |= compare_answers(demo, summary)
    summary["seconds"] = time.perf_counter() - began
    summary["next"] = next_commands(demo)
    (out / "summary.json").write_text(
        json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return summary


def make_corpus(demo: Demo) -> dict[str, Any]:
    """The standard library's source as JSON lines."""
    if not demo.corpus.exists():
        write_corpus(demo.corpus)
    # Counted from the file, so that a second call reports the same numbers.
    lines = demo.corpus.read_text(encoding="utf-8").splitlines()
    return {
        "modules": len(lines),
        "corpus_bytes": sum(len(json.loads(line)["text"].encode()) for line in lines),
    }


def make_tokenizer(demo: Demo) -> dict[str, Any]:
    """A byte-level BPE tokenizer of the corpus."""
    from headway.text.read import read_documents
    from headway.tokenizer.load import load_tokenizer
    from headway.tokenizer.train import train_bpe

    if not (demo.tokenizer / "tokenizer.json").exists():
        train_bpe(
            (document.text for document in read_documents([demo.corpus])),
            vocab_size=VOCAB_SIZE,
            out=demo.tokenizer,
        )
    return {"vocabulary": load_tokenizer(demo.tokenizer).vocab_size}


def make_store(demo: Demo) -> dict[str, Any]:
    """The corpus as a token store."""
    from headway.prepare.build import build_store
    from headway.store.reader import is_store, open_store

    if not is_store(demo.store):
        build_store([demo.corpus], demo.tokenizer, demo.store)
    store = open_store(demo.store)
    return {"documents": store.num_documents, "tokens": store.num_tokens}


def make_instructions(demo: Demo) -> dict[str, Any]:
    """Questions and answers from docstrings, as masked stores: the loss is on the answers and their
    end token.
    """
    from headway.prepare.build import BuildOptions, build_store
    from headway.store.reader import is_store, open_store

    raw = demo.instructions / "docstrings.jsonl"
    stores = demo.instructions / "store"
    if not raw.exists():
        write_instructions(raw)
    if not (is_store(stores / "train") and is_store(stores / "valid")):
        build_store(
            [raw], demo.tokenizer, stores, BuildOptions("chat", valid_fraction=VALID_FRACTION)
        )
    train = open_store(stores / "train")
    valid = open_store(stores / "valid")
    return {
        "conversations": train.num_documents,
        "valid_conversations": valid.num_documents,
        "conversation_tokens": train.num_tokens,
    }


def pretrain(demo: Demo) -> dict[str, Any]:
    """Train a small Llama-style model from scratch."""
    from headway.config.load import load
    from headway.train.config import Recipe
    from headway.workflows.stopping import train_or_stop

    demo.recipe.write_text(
        RECIPE.format(out=demo.out.as_posix(), fraction=VALID_MODULES, steps=demo.steps),
        encoding="utf-8",
    )
    summary = train_or_stop(load(Recipe, demo.recipe))
    return {
        key: summary[key]
        for key in ("steps", "first_valid_loss", "last_valid_loss", "tokens_per_second")
    }


def evaluate(demo: Demo) -> dict[str, Any]:
    """Perplexity and bits per byte on held-out modules, and those of a bigram model of the same
    tokens.
    """
    import numpy as np

    from headway.data.selection import in_valid
    from headway.eval.perplexity import EvalDocument, perplexity
    from headway.infer.load import load_model
    from headway.store.reader import open_store

    store = open_store(demo.store)
    loaded = load_model(demo.run)
    tokenizer = loaded.tokenizer
    assert tokenizer is not None

    # The same rule as in training decides which documents are held out.
    held_out = in_valid(np.arange(store.num_documents), VALID_MODULES)
    train = [store.document(index) for index in np.flatnonzero(~held_out).tolist()]
    valid = [store.document(index) for index in np.flatnonzero(held_out).tolist()]
    documents: list[EvalDocument] = []
    for document in valid:
        ids = document.tolist()
        num_bytes = len(tokenizer.decode_bytes(ids, skip_special=True))
        documents.append(EvalDocument(ids, num_bytes))
    result = perplexity(loaded, documents, stride=STRIDE_TOKENS)
    assert result.num_bytes is not None

    # Both score every token of a document but its first, so that both losses are about the same
    # bytes.
    assert result.tokens == sum(len(document) - 1 for document in valid)
    baseline = bigram_loss(train, valid, tokenizer.vocab_size)
    return {
        "loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
        "bigram_bits_per_byte": baseline * result.tokens / math.log(2) / result.num_bytes,
    }


def bigram_loss(
    train: Iterable[npt.NDArray[np.integer]], valid: Iterable[npt.NDArray[np.integer]], vocab: int
) -> float:
    """The baseline: mean loss in nats of a bigram model on every token of `valid` but each
    document's first.

    P(b|a) = (count(a, b) + k P(b)) / (count(a) + k), with the k that is best on `valid` itself, so
    the baseline is flattered.
    """
    import numpy as np

    # One is added to every single count, so that no token of `valid` has probability 0.
    pairs = np.zeros(vocab * vocab, np.int64)
    singles = np.ones(vocab, np.float64)
    for document in train:
        ids = document.astype(np.int64)
        singles += np.bincount(ids, minlength=vocab)
        pairs += np.bincount(ids[:-1] * vocab + ids[1:], minlength=vocab * vocab)
    counts = pairs.reshape(vocab, vocab)
    unigram = singles / singles.sum()

    a = np.concatenate([document[:-1].astype(np.int64) for document in valid])
    b = np.concatenate([document[1:].astype(np.int64) for document in valid])
    count_ab = counts[a, b]
    count_a = counts.sum(1)[a]
    losses = [-np.log((count_ab + k * unigram[b]) / (count_a + k)).mean() for k in SMOOTHING]
    best = float(min(losses))
    assert math.isfinite(best)
    return best


def export_and_generate(demo: Demo) -> dict[str, Any]:
    """A Hugging Face folder of the model, and a sample from it."""
    from headway.checkpoint.stored_model import find_model
    from headway.export.huggingface import export_huggingface
    from headway.infer.generate import GenerateOptions, generate
    from headway.infer.load import load_model
    from headway.infer.sampling import Sampling

    stored = find_model(demo.run)
    if not demo.export.exists():
        export_huggingface(
            stored.config, stored.weights(), demo.export, tokenizer=stored.tokenizer_folder
        )

    # The sample comes from the export rather than from the run, and so shows that it loads.
    sampling = Sampling(temperature=0.7, top_p=0.9, seed=1)
    options = GenerateOptions(max_new_tokens=SAMPLE_TOKENS, sampling=sampling)
    sample = generate(load_model(demo.export), [PROMPT], options)[0]
    return {"export": str(demo.export), "sample": PROMPT + sample.text}


def next_commands(demo: Demo) -> list[str]:
    """What to try next."""
    return [
        f"headway generate --model {demo.run} --prompt 'import os' --max-new-tokens 80 "
        "--temperature 0.8",
        f"headway eval ppl --model {demo.run} --data README.md",
        f"headway train {demo.recipe} run.name=longer steps={demo.steps * 4}",
        f"headway train {demo.out / 'dpo.yaml'} run.name=ipo objective.loss_type=ipo",
    ]
