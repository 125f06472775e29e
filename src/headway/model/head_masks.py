"""Which KV heads see the whole past (full) and which only sinks and a window (streaming): a table in a file, a frozen value in memory.

    masks.tsv     no header; one row per layer, one tab-separated number per KV head: 1.0 = full, 0.0 = streaming
    masks.json    beside it, where known: {"window": 1024, "sinks": 128}

DuoAttention's patterns are the same table with soft values (full_attention_heads.tsv) beside a config.json that says sink_size and
recent_size; the file or its folder is read. Soft values are cut at a sparsity that is asked for, or at 0.5.

What streaming means, everywhere in headway: a query at position i of its document sees key j of the same document iff
j <= i and (i - j < window or j < sinks). Positions count from the document's first token. Imports without torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from headway.errors import ConfigError, DataError
from headway.runtime.json_file import load_json
from headway.runtime.storage import write_atomic

if TYPE_CHECKING:
    from headway.model.config import ModelConfig

Table = Sequence[Sequence[float]]
FILE_NAMES = ("masks.tsv", "full_attention_heads.tsv")
DEFAULT_WINDOW, DEFAULT_SINKS = 1024, 128
"""Of streaming heads where nobody says."""


@dataclass(frozen=True)
class HeadMasks:
    """One decision per layer and KV head; the query heads of a group follow their KV head."""

    full: tuple[tuple[bool, ...], ...]
    """[num_layers][num_kv_heads]: True = the head keeps and sees the whole past of its document."""
    window: int | None = None
    """Tokens a streaming head sees up to and including the query itself; None = the file does not say."""
    sinks: int | None = None
    """First tokens of its document that a streaming head also sees (0 = none); None = the file does not say."""

    @property
    def num_layers(self) -> int:
        """Rows of the table."""
        return len(self.full)

    @property
    def num_kv_heads(self) -> int:
        """Columns of the table."""
        return len(self.full[0])

    @property
    def num_full(self) -> int:
        """Full heads of the whole model."""
        return sum(map(sum, self.full))

    @property
    def sparsity(self) -> float:
        """Share of streaming heads."""
        return 1 - self.num_full / (self.num_layers * self.num_kv_heads)

    def full_heads(self, layer: int) -> tuple[int, ...]:
        """Numbers of the full KV heads of one layer, ascending."""
        return tuple(head for head, keeps in enumerate(self.full[layer]) if keeps)

    def streaming_heads(self, layer: int) -> tuple[int, ...]:
        """Numbers of the streaming KV heads of one layer, ascending."""
        return tuple(head for head, keeps in enumerate(self.full[layer]) if not keeps)

    def with_reach(self, window: int | None, sinks: int | None) -> HeadMasks:
        """The same heads with window and sinks replaced where they are given."""
        return replace(self, window=self.window if window is None else window, sinks=self.sinks if sinks is None else sinks)

    def check(self, config: ModelConfig, what: str = "masks") -> None:
        """Refuse masks of another model."""
        if (self.num_layers, self.num_kv_heads) != (config.num_layers, config.kv_heads):
            raise ConfigError(
                f"{what} holds {self.num_layers} layers of {self.num_kv_heads} KV heads; the model has {config.num_layers} layers of "
                f"{config.kv_heads}. Use masks made for this model."
            )


def heads_kept(total: int, sparsity: float) -> int:
    """How many of `total` heads stay full: floor(total * (1 - sparsity)) in exact decimal arithmetic, so that 10 heads at 0.9 keep one."""
    if not 0 <= sparsity <= 1:
        raise ConfigError(f"sparsity is {sparsity}; it must lie between 0 and 1.")
    return math.floor(total * (1 - Fraction(str(sparsity))))


def rank_heads(scores: Table, sparsity: float, *, equal_per_layer: bool = False) -> HeadMasks:
    """Keep the heads with the highest scores (log_alpha), exactly `heads_kept` of them over the whole model."""
    return keep_heads(scores, heads_kept(len(scores) * len(scores[0]), sparsity), equal_per_layer=equal_per_layer)


def keep_heads(scores: Table, kept: int, *, equal_per_layer: bool = False) -> HeadMasks:
    """Keep the `kept` heads with the highest scores; ties go to the lower layer, then to the lower head.

    With `equal_per_layer` every layer keeps the same number: the share of one layer, rounded to the nearest (a half rounds up), those with
    the highest scores of the layer.
    """
    if equal_per_layer:
        each = math.floor(Fraction(kept, len(scores)) + Fraction(1, 2))
        return HeadMasks(tuple(highest([row], each)[0] for row in scores))
    return HeadMasks(highest(scores, kept))


def highest(scores: Table, kept: int) -> tuple[tuple[bool, ...], ...]:
    """Which `kept` heads have the highest scores; ties go to the lower layer, then to the lower head."""
    order = sorted((-score, layer, head) for layer, row in enumerate(scores) for head, score in enumerate(row))
    chosen = {(layer, head) for _, layer, head in order[:kept]}
    return tuple(tuple((layer, head) in chosen for head in range(len(row))) for layer, row in enumerate(scores))


def write_masks(masks: HeadMasks, path: Path) -> None:
    """Write the table, and window and sinks beside it where they are known."""
    lines = ("\t".join("1.0" if keeps else "0.0" for keeps in row) for row in masks.full)
    write_atomic(path, "\n".join(lines) + "\n")
    beside = path.with_suffix(".json")
    if masks.window is not None or masks.sinks is not None:
        write_atomic(beside, json.dumps({"window": masks.window, "sinks": masks.sinks}) + "\n")
    else:
        beside.unlink(missing_ok=True)  # else the numbers of an earlier export would be read with this table


def read_masks(path: Path | str, sparsity: float | None = None, *, equal_per_layer: bool = False) -> HeadMasks:
    """Read masks; soft values are cut at `sparsity`, or at 0.5, and ranked inside each layer with `equal_per_layer`.

    A table of 0 and 1 is taken as it is: it ranks no heads, so it cannot be cut elsewhere.
    """
    file = find_masks(Path(path))
    scores = read_table(file)
    window, sinks = _reach(file)
    hard = HeadMasks(tuple(tuple(value >= 0.5 for value in row) for row in scores), window, sinks)
    if sparsity is None and not equal_per_layer:
        return hard
    kept = hard.num_full if sparsity is None else heads_kept(hard.num_layers * hard.num_kv_heads, sparsity)
    masks = keep_heads(scores, kept, equal_per_layer=equal_per_layer).with_reach(window, sinks)
    if all(value in (0.0, 1.0) for row in scores for value in row) and masks.full != hard.full:
        _refuse_decided(file, hard, sparsity if kept != hard.num_full else None)
    return masks


def _refuse_decided(file: Path, hard: HeadMasks, sparsity: float | None) -> NoReturn:
    """The error for a table of 0 and 1 that would have to be cut at another sparsity, or evened out over its layers."""
    if sparsity is not None:
        raise ConfigError(
            f"{file}: holds only 0 and 1 at sparsity {hard.sparsity:.4f}, so heads cannot be ranked for sparsity {sparsity}. "
            f"Leave the sparsity out, or export again with --sparsity {sparsity} from the run that trained them."
        )
    counts = ", ".join(str(sum(row)) for row in hard.full)
    raise ConfigError(
        f"{file}: holds only 0 and 1 with {counts} full heads in its layers, so heads cannot be ranked for --equal-per-layer. "
        "Leave it out, or export again with `headway masks export --equal-per-layer` from the run that trained them."
    )


def read_table(path: Path) -> tuple[tuple[float, ...], ...]:
    """The numbers of a mask file, every row as long as the first, none outside 0..1."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: cannot be read as a mask table ({problem}). Give a file that `headway masks export` wrote.") from None
    rows = [_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    if not rows:
        raise DataError(f"{path}: is empty; a mask table has one row per layer and one number per KV head.")
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise DataError(f"{path}: row {number} has {len(row)} numbers and the first has {len(rows[0])}; a mask table is a rectangle.")
    return tuple(rows)


def _row(path: Path, number: int, line: str) -> tuple[float, ...]:
    if line.startswith("layer\t"):
        raise DataError(f"{path}: is a raw export (--raw), which decides nothing. Export masks with --sparsity instead.")
    try:
        values = tuple(float(text) for text in line.split())
    except ValueError:
        raise DataError(f"{path}: line {number} is {line[:40]!r}; a mask table holds numbers between tabs.") from None
    for value in values:
        if not -1e-6 <= value <= 1 + 1e-6:  # a soft value may be off by its rounding; NaN is refused too
            raise DataError(f"{path}: line {number} holds {value}; masks lie between 0 (streaming) and 1 (full).")
    return tuple(min(max(value, 0.0), 1.0) for value in values)


def find_masks(path: Path) -> Path:
    """The mask file a path means: itself, or one of a known name in a folder."""
    if path.is_file():
        return path
    for name in FILE_NAMES:
        if (path / name).is_file():
            return path / name
    raise ConfigError(f"masks is {str(path)!r}; there is no such file, nor a folder that holds {' or '.join(FILE_NAMES)}.")


def _reach(file: Path) -> tuple[int | None, int | None]:
    """Window and sinks written beside a table, by headway or by DuoAttention."""
    for beside, keys in ((file.with_suffix(".json"), ("window", "sinks")), (file.with_name("config.json"), ("recent_size", "sink_size"))):
        if not beside.is_file():
            continue
        try:
            content: Any = load_json(beside)
        except (OSError, ValueError) as problem:
            raise DataError(f"{beside}: cannot be read as JSON ({problem}); it says the window and sinks of {file.name}.") from None
        if isinstance(content, dict) and any(key in content for key in keys):
            window, sinks = (_count(beside, key, content.get(key), least) for key, least in zip(keys, (1, 0), strict=True))
            return window, sinks
    return None, None


def _count(file: Path, key: str, value: Any, least: int) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least):
        return value
    raise DataError(f"{file}: {key} is {value!r}; it must be an integer of at least {least}.")
