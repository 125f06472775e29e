"""The class of transformers for a model with several parts, without memory: where its text part is,
and what its tensors are called."""

from __future__ import annotations

from typing import Any

import torch

from headway.errors import ConfigError
from headway.model.stock.classes import foreign, make_config, quiet


class WholeClass:
    """A class with a text part and others."""

    def __init__(self, hf_config: dict[str, Any]) -> None:
        from transformers import AutoModelForMultimodalLM
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        config = make_config(hf_config, trust_remote_code=False)
        with foreign("hf_config"), quiet(), torch.device("meta"):
            model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
        self.class_name = type(model).__name__
        decoder = model.get_decoder()
        head = model.get_output_embeddings()
        paths = {id(module): path for path, module in model.named_modules()}
        if id(decoder) not in paths or head is None or decoder is model:
            raise ConfigError(f"{self.class_name} has no text part that headway can find.")
        self.text_prefix = f"{paths[id(decoder)]}."
        self.head = paths[id(head)]
        self.is_tied = head.weight is model.get_input_embeddings().weight
        self.text: dict[str, Any] = config.get_text_config(decoder=True).to_dict()

        mapping = get_model_conversion_mapping(model)
        self._renamings: Any = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters: Any = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._state: dict[str, Any] = dict(model.state_dict())
        self._prefix = model.base_model_prefix
        # A tied matrix is stored once.
        tied = set(model.all_tied_weights_keys) if self.is_tied else set()
        self.names = frozenset(self._state) - tied

    def shape(self, inner: str) -> tuple[int, ...]:
        """The shape of a tensor of the class; () where it has none of this name."""
        value = self._state.get(inner)
        if value is None:
            return ()
        return tuple(value.shape)

    def inner_name(self, name: str) -> str:
        """The name in the class of a tensor in a folder."""
        from transformers.core_model_loading import rename_source_key

        inner, pattern = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._state
        )
        # What is joined of another part stays as it is in the folder. Of the text part, the family
        # reads it as in a folder of the text model alone: as one of several, such as an expert.
        if pattern is not None and inner.startswith(self.text_prefix):
            inner, _ = rename_source_key(name, self._renamings, [], self._prefix, self._state)
        return inner
