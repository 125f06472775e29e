"""The data of a run, opened: every path of the recipe becomes sources of a mixture and named validation sets, checked against the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headway.data.config import DataConfig, SourceConfig
from headway.data.mixture import MixtureSource
from headway.data.order import Selection
from headway.data.source import Source
from headway.data.store import is_store, open_store
from headway.data.synthetic import SyntheticSource
from headway.errors import DataError
from headway.tokenizer.load import Tokenizer


@dataclass(frozen=True)
class OpenData:
    """What a run trains and validates on."""

    train: list[MixtureSource]
    valid: dict[str, list[MixtureSource]]

    @property
    def names(self) -> tuple[str, ...]:
        """The training sources, by name."""
        return tuple(source.selection.source.name for source in self.train)


def open_data(config: DataConfig, tokenizer: Tokenizer | None, vocab_size: int, seed: int) -> OpenData:
    """Open and check every source."""
    fraction = (config.valid.fraction if config.valid else None) or 0.0
    if config.train is None:
        opened: list[tuple[SourceConfig | None, Source]] = [(None, SyntheticSource(vocab_size, seed))]
    else:
        opened = [(one, _open(one, config, tokenizer, vocab_size)) for one in config.train]
    train = [_part(one, source, "train" if fraction else None, fraction) for one, source in opened]
    valid: dict[str, list[MixtureSource]] = {}
    if fraction:
        valid["held_out"] = [_part(one, source, "valid", fraction) for one, source in opened]
    for name, members in ((config.valid.sets if config.valid else None) or {}).items():
        valid[name] = [_part(one, _open(one, config, tokenizer, vocab_size), None, 0.0) for one in members]
    return OpenData(train, valid)


def _part(one: SourceConfig | None, source: Source, side: Literal["train", "valid"] | None, fraction: float) -> MixtureSource:
    if one is None:
        return MixtureSource(Selection(source, side=side, fraction=fraction))
    selection = Selection(source, one.limit, one.min_length, side, fraction)
    return MixtureSource(selection, one.weight if side != "valid" else None, one.repeat if side != "valid" else 1)


def _open(one: SourceConfig, config: DataConfig, tokenizer: Tokenizer | None, vocab_size: int) -> Source:
    from pathlib import Path

    path = Path(one.path)
    if not path.exists():
        raise DataError(f"data.train: {one.path} does not exist. Give a token store or raw files; `headway data tokenize` makes a store.")
    if not is_store(path):
        raise DataError(f"data.train: {one.path} is not a token store. `headway data tokenize --input {one.path} ...` makes one.")
    source = open_store(path)
    check_source(source, tokenizer, vocab_size, unchecked=config.tokenizer_unchecked)
    return source


def check_source(source: Source, tokenizer: Tokenizer | None, vocab_size: int, *, unchecked: bool) -> None:
    """Refuse ids the model does not know and ids that another tokenizer made."""
    if source.max_id >= vocab_size:
        raise DataError(
            f"{source.name}: holds id {source.max_id}; the model's vocabulary has {vocab_size}. "
            "It was made by another tokenizer, or model.vocab_size is too small."
        )
    if tokenizer is not None and source.fingerprint is not None and source.fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{source.name}: was made by another tokenizer ({source.fingerprint[:12]}, the recipe's is {tokenizer.fingerprint[:12]}). "
            "Tokenize it again."
        )
    if source.fingerprint is None and not unchecked and not isinstance(source, SyntheticSource):
        raise DataError(
            f"{source.name}: does not say which tokenizer made it. If it is the right one, set data.tokenizer_unchecked=true; "
            "only the highest id is then checked."
        )
