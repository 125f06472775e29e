"""Mask files: a table, with its window and sinks in a second file next to it.

    masks.tsv     no header; one row per layer, one tab-separated number per KV head: 1.0 = full,
                  0.0 = streaming
    masks.json    where known: {"window": 1024, "sinks": 128}

DuoAttention's patterns are the same table with soft values (full_attention_heads.tsv) beside a
config.json with sink_size and recent_size. The file or its folder is read. Soft values become
decisions at a given sparsity, or at 0.5. Imports without torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from headway.errors import ConfigError, DataError
from headway.model.head_masks.masks import (
    HeadMasks,
    num_full_heads,
    select_heads,
    warn_if_unreached,
)
from headway.runtime.digests import check_digests, record_digests
from headway.runtime.json_file import load_json, read_bounded
from headway.runtime.storage import write_atomic

FILE_NAMES = ("masks.tsv", "full_attention_heads.tsv")
ROUNDING = 1e-6
"""How far a soft value may be outside of 0..1."""


def write_masks(masks: HeadMasks, path: Path) -> None:
    """Write the table and, if they are known, the window and sinks next to it; digests of both
    are recorded beside them."""
    prepare_output(path)
    lines = ("\t".join("1.0" if is_full else "0.0" for is_full in row) for row in masks.full)
    write_atomic(path, "\n".join(lines) + "\n")
    reach_file = path.with_suffix(".json")
    if masks.window is not None or masks.sinks is not None:
        write_atomic(reach_file, json.dumps({"window": masks.window, "sinks": masks.sinks}) + "\n")
    else:
        # Else the numbers of an earlier export would be read with this table.
        reach_file.unlink(missing_ok=True)
    record_digests(path.parent, (path.name, reach_file.name))


def prepare_output(path: Path) -> None:
    """Refuse a path that cannot be a mask table; make its folder."""
    if path.is_dir():
        raise ConfigError(
            f"out is {str(path)!r}, which is a folder. Give the name of a file, such as "
            f"{path / 'masks.tsv'}."
        )
    if path.suffix == ".json":
        raise ConfigError(
            f"out is {str(path)!r}; window and sinks are written to a .json file next to the "
            "masks. Give a name that ends in .tsv."
        )
    path.parent.mkdir(parents=True, exist_ok=True)


def read_masks(
    path: Path | str, sparsity: float | None = None, *, equal_per_layer: bool = False
) -> HeadMasks:
    """Read masks. Soft values are selected at `sparsity`, or at 0.5; with `equal_per_layer`, in
    each layer.

    A table of 0 and 1 ranks no heads, so it cannot be selected at another sparsity.
    """
    # Digests are checked where they exist; DuoAttention's folders have none.
    file = find_masks(Path(path))
    check_digests(file.parent, (file.name, file.with_suffix(".json").name, "config.json"))
    scores = read_table(file)
    window, sinks = _read_reach(file)
    hard = HeadMasks(tuple(tuple(value >= 0.5 for value in row) for row in scores), window, sinks)
    if sparsity is None and not equal_per_layer:
        return hard

    num_full = hard.num_full
    if sparsity is not None:
        num_full = num_full_heads(hard.num_layers * hard.num_kv_heads, sparsity)
    selected = select_heads(scores, num_full, equal_per_layer=equal_per_layer)
    masks = selected.with_reach(window, sinks)
    is_decided = all(value in (0.0, 1.0) for row in scores for value in row)
    if is_decided and masks.full != hard.full:
        _refuse_decided(file, hard, sparsity if num_full != hard.num_full else None)
    if equal_per_layer:
        warn_if_unreached(masks, sparsity, num_full)
    return masks


def _refuse_decided(file: Path, hard: HeadMasks, sparsity: float | None) -> NoReturn:
    """The error for a table of 0 and 1 that is requested at another sparsity, or with equal
    layers."""
    if sparsity is not None:
        raise ConfigError(
            f"{file}: holds only 0 and 1 at sparsity {hard.sparsity:.4f}, so heads cannot be "
            f"ranked for sparsity {sparsity}. "
            f"Leave the sparsity out, or export again with --sparsity {sparsity} from the run that "
            "trained them."
        )
    counts = ", ".join(str(sum(row)) for row in hard.full)
    raise ConfigError(
        f"{file}: holds only 0 and 1 with {counts} full heads in its layers, so heads cannot be "
        "ranked for --equal-per-layer. "
        "Leave it out, or export again with `headway masks export --equal-per-layer` from the run "
        "that trained them."
    )


def read_table(path: Path) -> tuple[tuple[float, ...], ...]:
    """The numbers of a mask file, every row as long as the first, none outside 0..1."""
    try:
        lines = read_bounded(path).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(
            f"{path}: cannot be read as a mask table ({problem}). Give a file that `headway masks "
            "export` wrote."
        ) from None
    rows = [
        _row(path, number, line)
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.startswith("#")
    ]
    if not rows:
        raise DataError(
            f"{path}: is empty; a mask table has one row per layer and one number per KV head."
        )
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise DataError(
                f"{path}: row {number} has {len(row)} numbers and the first has {len(rows[0])}; a "
                "mask table is a rectangle."
            )
    return tuple(rows)


def _row(path: Path, number: int, line: str) -> tuple[float, ...]:
    if line.startswith("layer\t"):
        raise DataError(
            f"{path}: is a raw export (--raw), which holds no masks. Export masks with --sparsity "
            "instead."
        )
    try:
        values = tuple(float(text) for text in line.split())
    except ValueError:
        raise DataError(
            f"{path}: line {number} is {line[:40]!r}; a mask table holds numbers between tabs."
        ) from None
    for value in values:
        # Written so that NaN is refused too.
        if not -ROUNDING <= value <= 1 + ROUNDING:
            raise DataError(
                f"{path}: line {number} contains {value}; masks must be between 0 (streaming) and "
                "1 (full)."
            )
    return tuple(min(max(value, 0.0), 1.0) for value in values)


def find_masks(path: Path) -> Path:
    """The mask file a path means: itself, or one of a known name in a folder."""
    if path.is_file():
        return path
    for name in FILE_NAMES:
        if (path / name).is_file():
            return path / name
    raise ConfigError(
        f"masks is {str(path)!r}; there is no such file, nor a folder that holds "
        f"{' or '.join(FILE_NAMES)}."
    )


def _read_reach(file: Path) -> tuple[int | None, int | None]:
    """The window and sinks stored next to a table by headway or DuoAttention."""
    for path, window_key, sinks_key in (
        (file.with_suffix(".json"), "window", "sinks"),
        (file.with_name("config.json"), "recent_size", "sink_size"),
    ):
        if not path.is_file():
            continue
        try:
            fields: Any = load_json(path)
        except (OSError, ValueError) as problem:
            raise DataError(
                f"{path}: cannot be read as JSON ({problem}); it holds the window and sinks of "
                f"{file.name}."
            ) from None
        if isinstance(fields, dict) and (window_key in fields or sinks_key in fields):
            window = _count(path, window_key, fields.get(window_key), least=1)
            sinks = _count(path, sinks_key, fields.get(sinks_key), least=0)
            return window, sinks
    return None, None


def _count(file: Path, key: str, value: Any, least: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise DataError(f"{file}: {key} is {value!r}; it must be an integer of at least {least}.")
