"""A config.json comes in; how far headway and transformers differ on one random model of it goes out.

    random model of transformers -> its folder -> headway reads it as it reads any folder
      logits      plain forward
      gradients   of the summed loss over documents, packed here, alone there; read through the same
                  names as weights
      packed      documents in one row here, and alone here
      cached      logits through the paged cache, a prompt in two pieces
      greedy      tokens chosen through the cache, equal or not
      export      every tensor of headway's export byte by byte, and its logits in transformers

Everything is computed in fp32 on the CPU.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from headway.checkpoint.stored_model import StoredModel, find_model
from headway.data.batch import Batch
from headway.diagnose.small_model import FIRST_LENGTH, random_model
from headway.errors import ConfigError
from headway.export.huggingface import export_huggingface
from headway.model.base import Model, build_frozen_model
from headway.model.layout import in_groups
from headway.model.loading.huggingface import CONFIG
from headway.model.paged_rows import PagedRows
from headway.model.stock.classes import quiet
from headway.runtime.json_file import read_object

if TYPE_CHECKING:
    from headway.model.families.transformers import Wrapping

LOGITS = 1e-5
"""Largest difference of logits that counts as equal, relative to the largest logit above 1."""
GRADIENTS = 1e-4
"""The same for a gradient, relative to its largest element."""
UNTRAINED = in_groups("router_bias", "fixed")
"""Parameters that no gradient moves."""
LENGTHS = ((7, 19), (26,), (3, 18, 5))
"""Documents of the rows that are trained on."""
WIDTH = 26
PROMPT = 11
NEW = 9
LONGROPE_NEW = FIRST_LENGTH - PROMPT
"""With longrope, frequencies of a cache do not change while a text grows over the first length; those
of the reference do."""


@dataclass(frozen=True)
class Agreement:
    """Worst differences between headway and transformers on one random model."""

    logits: float
    gradients: float
    packed: float
    cached: float
    greedy: bool
    export: bool

    @property
    def problem(self) -> str | None:
        """What differs; None: nothing beyond rounding."""
        limits = {
            "logits": LOGITS,
            "gradients": GRADIENTS,
            "packed": GRADIENTS,
            "cached": GRADIENTS,
        }
        for name, limit in limits.items():
            gap = getattr(self, name)
            # Written so that a NaN is a difference.
            if not gap < limit:
                return f"{name} differ by {gap:.1e}; below {limit:.0e} is equal"
        if not self.greedy:
            return "greedy text through the cache differs"
        if not self.export:
            return "an export holds other tensors, or computes other logits in transformers"
        return None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def compare(
    hf_config: Mapping[str, Any], *, wrapping: Wrapping | None = None, seed: int = 0
) -> Agreement:
    """Compare both on a random model of a config.json; `wrapping`: headway wraps the class."""
    trust = wrapping is not None and wrapping.trust_remote_code
    reference = random_model(hf_config, trust_remote_code=trust)
    vocab = reference.config.vocab_size
    with tempfile.TemporaryDirectory(prefix="headway-agreement-") as name, _silent():
        folder = Path(name)
        reference.save_pretrained(folder / "model")
        stored = find_model(folder / "model", wrapping=wrapping)
        model = _loaded(stored)
        batch = packed_batch(vocab, seed)
        tokens = torch.randint(
            3, vocab, (2, WIDTH), generator=torch.Generator().manual_seed(seed + 1)
        )
        cached, greedy = _generate(reference, model, tokens[:, :PROMPT])
        return Agreement(
            _logits(reference, model, tokens),
            _gradients(reference, stored, batch, folder / "gradients", wrapping),
            _packed(model, batch),
            cached,
            greedy,
            _export(reference, stored, tokens, folder),
        )


def packed_batch(vocab: int, seed: int = 0) -> Batch:
    """Rows of several documents; the last position of each document predicts nothing."""
    rows = len(LENGTHS)
    tokens = torch.randint(
        3, vocab, (rows, WIDTH + 1), generator=torch.Generator().manual_seed(seed)
    )
    weight = torch.zeros(rows, WIDTH)
    position = torch.zeros(rows, WIDTH, dtype=torch.int32)
    document = torch.zeros(rows, WIDTH, dtype=torch.int32)
    bounds = torch.full((rows, 2 + max(map(len, LENGTHS))), WIDTH, dtype=torch.int32)
    for row, lengths in enumerate(LENGTHS):
        assert sum(lengths) == WIDTH, "rows are full, so that every token has a document"
        start = 0
        for index, length in enumerate(lengths):
            bounds[row, index] = start
            position[row, start : start + length] = torch.arange(length, dtype=torch.int32)
            document[row, start : start + length] = index
            weight[row, start : start + length - 1] = 1.0
            start += length
    source = torch.zeros(rows, dtype=torch.int32)
    return Batch(
        tokens[:, :-1].clone(),
        tokens[:, 1:].clone(),
        weight,
        position,
        document,
        source,
        bounds,
        single_document=False,
    )


@contextmanager
def _silent() -> Iterator[None]:
    """Without progress bars and remarks of transformers."""
    from transformers.utils import logging

    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet():
            yield
    finally:
        if shows_bars:
            logging.enable_progress_bar()


def _loaded(stored: StoredModel) -> Model:
    return build_frozen_model(stored.config, stored.weights(), torch.device("cpu"), torch.float32)


def _gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, relative to the largest number of theirs above 1."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1.0))


@torch.no_grad()
def _logits(reference: Any, model: Model, tokens: torch.Tensor) -> float:
    """How far logits [B,T,V] of a plain forward are off."""
    expected = reference(tokens, use_cache=False).logits
    position = torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1)
    ours = model.logits(model.hidden_states(tokens, position))
    return _gap(ours, expected)


@torch.no_grad()
def _generate(reference: Any, model: Model, prompt: torch.Tensor) -> tuple[float, bool]:
    """How far logits of a prompt through the cache are off, and whether greedy text is equal."""
    # Without the reference's cache: `generate` of some classes numbers positions in its own way.
    scaling = model.config.rope_scaling
    new = NEW
    if scaling is not None and scaling.kind == "longrope":
        new = LONGROPE_NEW
    text = prompt
    for _ in range(new):
        last = reference(text, use_cache=False).logits[:, -1]
        text = torch.cat((text, last.argmax(-1, keepdim=True)), dim=1)

    rows = PagedRows(model, prompt.shape[0], PROMPT + new)
    middle = PROMPT // 2
    hidden = torch.cat((rows.read(prompt[:, :middle]), rows.read(prompt[:, middle:])), dim=1)
    gap = _gap(model.logits(hidden), reference(prompt, use_cache=False).logits)

    last_hidden = hidden[:, -1]
    for index in range(new):
        chosen = model.logits(last_hidden).argmax(-1)
        if not torch.equal(chosen, text[:, PROMPT + index]):
            return gap, False
        last_hidden = rows.step(chosen)
    return gap, True


def _gradients(
    reference: Any, stored: StoredModel, batch: Batch, folder: Path, wrapping: Wrapping | None
) -> float:
    """How far gradients are off, relative to the largest element of each tensor's."""
    # Alone there: every document is a forward of its own.
    loss = torch.zeros(())
    for row, lengths in enumerate(LENGTHS):
        parts = zip(
            batch.tokens[row].split(lengths), batch.targets[row].split(lengths), strict=True
        )
        for tokens, targets in parts:
            logits = reference(tokens[None], use_cache=False).logits[0, :-1]
            loss = loss + F.cross_entropy(logits, targets[:-1], reduction="sum")
    reference.zero_grad()
    loss.backward()

    # Written as if they were weights, so that the family's own reading gives them our names.
    reference.save_pretrained(folder, state_dict=_gradient_state(reference))
    expected = dict(find_model(folder, wrapping=wrapping).weights())

    # Dropout is for training alone, and its draws would differ.
    model = _loaded(stored).eval().requires_grad_(True)
    model.forward_batch(batch).head.nll(batch.targets, batch.loss_weight).total.backward()
    largest = max(float(value.abs().max()) for value in expected.values())
    worst = 0.0
    untrained = {spec.name for spec in model.param_specs() if spec.groups & UNTRAINED}
    for name, parameter in model.named_parameters():
        if name not in expected or name in untrained:
            continue
        theirs = expected[name]
        ours = parameter.grad
        if ours is None:
            ours = torch.zeros_like(theirs)
        # Of a gradient that is zero but for rounding, only the rounding would be compared.
        scale = theirs.abs().max().clamp(min=1e-3 * largest)
        gap = float((ours - theirs).abs().max() / scale)
        if not gap <= worst:
            worst = gap
    return worst


def _gradient_state(reference: Any) -> dict[str, torch.Tensor]:
    """The gradient of every tensor that the reference stores, a tied one once."""
    parameters = dict(reference.named_parameters())
    owners = {parameter.data_ptr(): name for name, parameter in parameters.items()}
    gradients: dict[str, torch.Tensor] = {}
    for name, value in reference.state_dict().items():
        if owners.get(value.data_ptr(), name) != name:
            continue
        parameter = parameters.get(name)
        if parameter is None or parameter.grad is None:
            gradients[name] = torch.zeros_like(value)
        else:
            gradients[name] = parameter.grad
    return gradients


@torch.no_grad()
def _packed(model: Model, batch: Batch) -> float:
    """How far documents in one row are from the same documents alone."""
    packed = model.logits(model.forward_batch(batch).hidden)
    worst = 0.0
    for row, lengths in enumerate(LENGTHS):
        parts = zip(packed[row].split(lengths), batch.tokens[row].split(lengths), strict=True)
        for together, tokens in parts:
            position = torch.arange(len(tokens))[None]
            alone = model.logits(model.hidden_states(tokens[None], position))[0]
            worst = max(worst, _gap(together, alone))
    return worst


def _keep_token_ids(read: Path, written: Path) -> None:
    """Give an export the ids of special tokens, which come with a tokenizer; some classes need them."""
    settings = read_object(read, ConfigError)
    ids = {key: value for key, value in settings.items() if key.endswith("_token_id")}
    written.write_text(json.dumps({**read_object(written, ConfigError), **ids}), encoding="utf-8")


@torch.no_grad()
def _export(reference: Any, stored: StoredModel, tokens: torch.Tensor, folder: Path) -> bool:
    """Whether an export has the tensors it was read from, and transformers computes the same."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    out = folder / "export"
    export_huggingface(stored.config, stored.weights(), out, tokenizer=None)
    _keep_token_ids(folder / "model" / CONFIG, out / CONFIG)
    before = load_file(folder / "model/model.safetensors")
    after = load_file(out / "model.safetensors")
    if before.keys() != after.keys():
        return False
    if not all(torch.equal(value, after[name]) for name, value in before.items()):
        return False
    again = AutoModelForCausalLM.from_pretrained(
        out, attn_implementation="eager", dtype=torch.float32
    )
    theirs = reference(tokens, use_cache=False).logits
    return torch.equal(again.eval()(tokens, use_cache=False).logits, theirs)
