"""What depends on whether a run trains a language model or an aligner of media.

`run_form` chooses; all others ask the form.

                  rows      memory                          final/
language model    tokens    estimated from the sizes        a Hugging Face folder
aligner           samples   encoders of any size            heads under PurrSight's names
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headway.data.open import OpenData
    from headway.model.config import Head, ModelConfig
    from headway.model.flops import TokenFlops
    from headway.model.layout import ParamSpec
    from headway.train.config import Recipe
    from headway.train.resolve import Resolved
    from headway.train.run import Run

Command = tuple[list[str], str]
"""The words of a command line, and what it does."""


class RunForm:
    """A run that trains a language model, a reward model or a model with media inputs."""

    unit: ClassVar[str] = "tokens"
    """What the log counts."""
    is_estimated: ClassVar[bool] = True
    """Whether memory is estimated: sizes of layers decide it."""
    has_targets: ClassVar[bool] = True
    """Whether documents have tokens to predict."""

    def open_data(
        self,
        resolved: Resolved,
        device: torch.device | None,
        workers: int | None,
        check_media: bool,
    ) -> OpenData:
        """The open data of a run; what is not a store yet is made now."""
        from headway.train.batches import open_token_data

        return open_token_data(resolved, device, workers, check_media)

    def describe_amount(self, documents: str, tokens: str) -> str:
        """How much data there is."""
        return f"{documents} documents, {tokens} tokens"

    def describe_step(self, rows: int, seq_len: int) -> str:
        """How much data a step reads."""
        return f"{rows} rows x {seq_len} tokens"

    def flops(
        self,
        model: ModelConfig,
        seq_len: int,
        specs: Mapping[str, ParamSpec],
        training: Collection[str],
    ) -> TokenFlops:
        """FLOPs of one token."""
        from headway.model.flops import token_flops

        return token_flops(model, seq_len, specs=specs, training=training)

    def first_values(
        self, resolved: Resolved, shapes: Mapping[str, Any]
    ) -> Iterator[tuple[str, Tensor]]:
        """Values that replace initial ones, beside those of `init.from`."""
        return iter(())

    def check_export(self, model: ModelConfig) -> None:
        """Raise a ConfigError with the reason where final/ cannot be written."""
        from headway.model.families.base import to_hf_config

        # Called for its error: a config.json is the part of an export that needs no weights.
        to_hf_config(model)

    def write_final(self, run: Run, target: Path) -> str | None:
        """Write final/ on the first rank.

        None, with the reason in the log, where the model has no such form.
        """
        from headway.train.finish import write_final_model

        return write_final_model(run, target)

    def next_commands(self, run: Path, recipe: Recipe) -> list[Command] | None:
        """What to do with a finished run; None: that depends on the exported model."""
        return None


class AlignerForm(RunForm):
    """A run that aligns encoders of several modalities."""

    unit: ClassVar[str] = "samples"
    is_estimated: ClassVar[bool] = False
    has_targets: ClassVar[bool] = False

    def open_data(
        self,
        resolved: Resolved,
        device: torch.device | None,
        workers: int | None,
        check_media: bool,
    ) -> OpenData:
        from headway.train.alignment import open_samples

        aligner = resolved.model.aligner_settings
        return open_samples(resolved.recipe, aligner, device, check_media)

    def describe_amount(self, documents: str, tokens: str) -> str:
        return f"{documents} samples"

    def describe_step(self, rows: int, seq_len: int) -> str:
        return f"{rows} samples"

    def flops(
        self,
        model: ModelConfig,
        seq_len: int,
        specs: Mapping[str, ParamSpec],
        training: Collection[str],
    ) -> TokenFlops:
        """FLOPs of one sample, which is a row of one token."""
        from headway.train.alignment import sample_flops

        return sample_flops(model)

    def first_values(
        self, resolved: Resolved, shapes: Mapping[str, Any]
    ) -> Iterator[tuple[str, Tensor]]:
        """Heads of `model.aligner.weights`."""
        from headway.train.alignment import first_heads

        aligner = resolved.model.aligner_settings
        return first_heads(aligner, resolved.recipe.objective, shapes)

    def check_export(self, model: ModelConfig) -> None:
        """Heads and towers can always be written."""

    def write_final(self, run: Run, target: Path) -> str | None:
        from headway.train.finish import write_final_aligner

        return write_final_aligner(run, target)

    def next_commands(self, run: Path, recipe: Recipe) -> list[Command] | None:
        commands: list[Command] = []
        if recipe.data.train:
            path = recipe.data.train[0].path
            retrieval = ["headway", "eval", "retrieval", "--model", str(run), "--data", path]
            commands.append((retrieval, "recall of every pair"))
        export = ["headway", "export", "aligner", "--model", str(run), "--out"]
        commands.append(([*export, f"{run}-aligner.pt"], "a file for PurrSight"))
        return commands


FORMS: dict[Head, RunForm] = {
    "tokens": RunForm(),
    "scores": RunForm(),
    "vectors": AlignerForm(),
}
"""By the model's head."""


def run_form(model: ModelConfig) -> RunForm:
    """The form of a run that trains a model."""
    return FORMS[model.head]
