"""A model on disk that is a base and an adapter: they come in; one merged model goes out, or the
base and the updates as two streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import CheckpointError, ConfigError
from headway.kernels.packed_layout import PackedForm
from headway.model.adapter.config import AdapterConfig
from headway.model.adapter.peft import PeftAdapter, base_of, is_adapter, is_scoring, read_adapter
from headway.model.config import ModelConfig
from headway.model.layout import HEAD, SCORE

if TYPE_CHECKING:
    import torch

    Values = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class StoredAdapter:
    """The adapter of a stored model, and the weights beneath it."""

    config: AdapterConfig
    base: str | None
    """The path of the base, if known."""
    base_weights: Callable[[], Values]
    """Every parameter of the model without the adapter."""
    updates: Callable[[], Mapping[str, torch.Tensor]]
    """The tensors of the adapter, by our names."""
    full_weights: Callable[[], list[str]]
    """Names of the base's parameters that were trained too."""
    stored_base: Callable[[], Values] | None = None
    """The base as it was trained over, quantised matrices as bytes; None: the base is not stored
    quantised."""
    patterned: bool = False
    """Its linears have different ranks or alphas. Such an adapter is merged, never trained
    further."""

    def base_in(self, form: PackedForm | None) -> Values:
        """The base for a run that stores it in a form: the stored bytes where they are of this
        form, else floats."""
        # Bytes of the same form are taken as they are: to quantise their floats would round again.
        if self.stored_base is not None and form == self.config.base:
            return self.stored_base()
        return self.base_weights()

    def merged(self, model: ModelConfig) -> Values:
        """Every parameter of the model with the adapter merged into it."""
        from headway.model.adapter.lora import merged, with_updates

        modules = self.config.modules(model)
        # The seed is of no use: every tensor of the update is stored.
        values = with_updates(self.base_weights(), self.config, modules, 0, self.updates())
        return merged(values, self.config, modules)


def stored_adapter(
    folder: Path, model: ModelConfig, base: str, base_weights: Callable[[], Values]
) -> StoredAdapter:
    """A PEFT folder over a base."""

    # Read once, when its config, base or tensors are first needed.
    @cache
    def opened() -> PeftAdapter:
        return read_adapter(folder, model)

    def with_trained_parameters() -> Values:
        """The base, with the parameters that were fully trained in place of its own."""
        whole = opened().whole
        has_score = False
        for name, value in base_weights():
            # The adapter of a reward model has the head that takes the LM head's place.
            if name == HEAD and model.score_head:
                continue
            has_score |= name == SCORE
            yield name, whole.get(name, value)
        if model.score_head and not has_score:
            if SCORE not in whole:
                raise CheckpointError(
                    f"{folder}: is an adapter of a reward model and has no {SCORE}. Fetch the "
                    "whole adapter again."
                )
            yield SCORE, whole[SCORE]

    return StoredAdapter(
        opened().config,
        base,
        with_trained_parameters,
        lambda: opened().updates,
        lambda: sorted(opened().whole),
        None,
        opened().patterned,
    )


def base_model_of(folder: Path) -> str:
    """The path of an adapter folder's base model; refused where the folder does not name it."""
    base = base_of(folder)
    if base is None:
        raise ConfigError(
            f"{folder}: is an adapter and does not name its base model. Give the model, and this "
            "folder as init.adapter."
        )
    return base


__all__ = ["StoredAdapter", "base_model_of", "is_adapter", "is_scoring", "stored_adapter"]
