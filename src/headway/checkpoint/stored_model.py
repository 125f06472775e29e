"""What `--model X` means: a run folder, a checkpoint folder or a Hugging Face folder comes in, its
config and a way to read its weights go out.

runs/NAME              its final/ if training ended, else its newest good checkpoint;
                       of several stages, the last that has one
.../step-00000500      a checkpoint: has manifest.json
.../adapter            a PEFT adapter: has adapter_config.json, which names its base
.../model_tp*_pp*.pt   a folder with shards of InternLM
s3://bucket/prefix     a checkpoint there, or the newest of several: read in ranges, no local copy
FILE.gguf              a file of llama.cpp, or a folder with one and no config.json: dequantised
ORG/NAME[@REVISION]    a model of the hub, if there is no such folder: from the cache, or downloaded
anything else          a Hugging Face folder: has config.json

An adapter is merged: `weights` are plain. Nothing is read before it is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from headway.checkpoint.load import Reader, locate, open_checkpoint, step_folders
from headway.checkpoint.manifest import MANIFEST
from headway.config.load import validate
from headway.errors import CheckpointError, ConfigError, HeadwayError
from headway.kernels.packed_layout import packed_name
from headway.model.adapter.config import AdapterConfig
from headway.model.config import ModelConfig
from headway.model.families.base import as_stored, trusting
from headway.model.head_masks.gates_file import MASKS_FILE, TrainedGates, read_gates
from headway.model.layout import GATES, param_specs
from headway.model.loading.gguf_model import GgufModel, gguf_file, holds_only_gguf
from headway.model.loading.huggingface import (
    check_weights,
    has_weights,
    is_pretrained,
    other_parts,
    read_config,
    read_end_ids,
    read_weights,
)
from headway.model.loading.other_parts import OtherParts, kept_parts
from headway.model.loading.unsupported import named_format
from headway.model.loading.untrusted import check_finite
from headway.model.media_files import FILES as MEDIA_FILES
from headway.model.media_files import read_media_files
from headway.runtime.digests import read_digests
from headway.runtime.json_file import read_object
from headway.runtime.paths import AnyPath, S3Path, parse_path
from headway.text.hub import is_hub_id, local_or_hub
from headway.tokenizer.folder import has_tokenizer

if TYPE_CHECKING:
    import torch

    from headway.model.adapter.stored import StoredAdapter
    from headway.model.families.transformers import Wrapping
    from headway.model.head_masks.choice import MaskSource
    from headway.tokenizer.load import Tokenizer

log = logging.getLogger("headway")

FINAL = "final"
MEDIA_WEIGHTS = tuple(MEDIA_FILES.values())
STAGES = "stages.json"
"""Lists the stages of a run that has several."""


@dataclass(frozen=True)
class StoredModel:
    """A model on disk: its config is known, its weights are read on demand."""

    path: AnyPath
    config: ModelConfig
    tokenizer_folder: Path | None
    weights: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    """Name and tensor of every parameter, in forward order."""
    end_ids: frozenset[int] = frozenset()
    """Ids that end a text besides the tokenizer's own end, as a Hugging Face folder lists them."""
    adapter: StoredAdapter | None = None
    """The adapter that `weights` has merged."""
    masks_file: Path | None = None
    """A mask table in its Hugging Face folder."""
    parts: OtherParts | None = None
    """What it has besides text, kept for an export."""

    def mask_source(self) -> MaskSource:
        """What its own head masks are made from."""
        from headway.model.head_masks.choice import MaskSource

        return MaskSource(str(self.path), self.config, self.gates, self.masks_file)

    def gates(self) -> TrainedGates | None:
        """The head gates it was trained with, or None."""
        if self.config.head_gates is None:
            return None
        log_alpha = next(value for name, value in self.weights() if name == GATES)
        return TrainedGates(self.config.head_gates, log_alpha.float().cpu())

    def with_adapter(self, folder: Path) -> StoredModel:
        """This model with a PEFT adapter merged; that of a reward model brings its head."""
        from headway.model.adapter.stored import is_scoring, stored_adapter

        config = self.config
        if is_scoring(folder):
            config = config.with_(score_head=True)
        adapter = stored_adapter(folder, config, str(self.path), self.weights)
        return replace(self, config=config, weights=lambda: adapter.merged(config), adapter=adapter)

    def with_vision(self) -> StoredModel:
        """This model with its vision tower; a ConfigError where it has none that headway reads."""
        if self.config.vision is not None:
            return self
        from headway.model.loading.native_vision import check_tower, read_vision, tower_values

        vision = read_vision(self.parts, str(self.path))
        try:
            config = self.config.with_(vision=vision)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ConfigError(f"{self.path}: {reason}.") from None
        parts = self.parts
        assert parts is not None, "read_vision refuses a model without parts"
        # Names and shapes now: a wrong tower is refused before any work.
        place = str(self.path)
        check_tower(parts, config, place)
        log.info("%s: pictures enter through its own vision tower", place)

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            yield from check_finite(tower_values(parts, config), place)
            yield from self.weights()

        return replace(self, config=config, weights=weights)

    def with_pictures(self) -> StoredModel:
        """This model with its vision tower, where it has one that headway reads."""
        if self.parts is None:
            return self
        from headway.model.loading.native_vision import reads_pictures

        if not reads_pictures(self.parts):
            return self
        try:
            return self.with_vision()
        except (ConfigError, CheckpointError) as problem:
            # It still answers questions without pictures.
            log.warning("%s; pictures are not read", str(problem).rstrip("."))
            return self

    def without_tower(self) -> StoredModel:
        """This model as one of text alone."""
        if self.config.vision is None:
            return self
        from headway.model.loading.native_vision import without_tower

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            return without_tower(self.weights(), {})

        return replace(self, config=self.config.with_(vision=None), weights=weights)

    def check_head(self, *, scores: bool = False) -> None:
        """Refuse a reward model where a language model is needed, or with `scores` the other way
        round.
        """
        if self.config.score_head and not scores:
            raise ConfigError(
                f"{self.path}: is a reward model, which scores answers and writes no text. "
                "Use `headway eval reward`."
            )
        if scores and not self.config.score_head:
            raise ConfigError(
                f"{self.path}: is a language model, not a reward model. Train one with objective: "
                f"{{kind: reward}}."
            )

    def of_family(self, family: str | None) -> StoredModel:
        """This model with the user's family module that a recipe or flag names.

        A checkpoint alone never imports code.
        """
        config = trusting(self.config, family)
        if config is self.config:
            return self
        return replace(self, config=config)


def find_model(
    path: AnyPath | str, cache_dir: Path | None = None, wrapping: Wrapping | None = None
) -> StoredModel:
    """The model a path or a hub id means, opened but not read.

    `cache_dir` receives downloads; None: the hub's cache.

    `wrapping`: of a Hugging Face folder, the class of transformers computes, whatever families
    headway has.
    """
    location = parse_path(path)
    if isinstance(location, S3Path):
        return _checkpoint(locate(location), wrapping)

    # A folder wins over a hub id of the same spelling.
    path = location
    if not _is_dir(path) and is_hub_id(str(path)):
        path = local_or_hub(path, cache_dir=cache_dir)

    if not _is_dir(path):
        if _is_file(path) and (file := gguf_file(path)) is not None:
            return _gguf(file)
        # A format that headway knows but does not read gets its own remedy.
        unsupported = named_format(path)
        if unsupported is not None:
            raise ConfigError(f"model is {str(path)!r}, which is {unsupported}")
        raise ConfigError(
            f"model is {str(path)[:500]!r}, which is not a folder. "
            "Give a run folder, a checkpoint folder, a Hugging Face "
            "folder, a GGUF file or a hub id (ORGANISATION/NAME)."
        )
    if (path / MANIFEST).is_file():
        return _checkpoint(locate(path), wrapping)

    # The order matters: the folder of a run that has ended has final/ as well as checkpoints.
    for folder in (path, path / FINAL):
        if is_pretrained(folder) and not holds_only_gguf(folder):
            return _pretrained(folder, wrapping)
    from headway.model.adapter.stored import is_adapter
    from headway.model.loading.internlm import is_internlm, open_internlm

    if is_internlm(path):
        config, weights = open_internlm(path)
        return StoredModel(path, config, None, lambda: check_finite(weights(), path))
    if is_adapter(path):
        return _adapter(path)
    if (path / STAGES).is_file():
        return _staged(path, wrapping)

    has_steps = (path / "checkpoints").is_dir() or bool(step_folders(path))
    if not has_steps:
        if (file := gguf_file(path)) is not None:
            return _gguf(file)
        unsupported = named_format(path)
        if unsupported is not None:
            raise ConfigError(
                f"{path}: holds neither a checkpoint nor a Hugging Face model; {unsupported}"
            )
    return _checkpoint(locate(path), wrapping)


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name that no file system takes
        return False


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _gguf(path: Path) -> StoredModel:
    digests = read_digests(path.parent)
    model = GgufModel(path)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        values = model.weights()
        if digests is not None:
            values = digests.through([path.name], values)
        return check_finite(values, path)

    return StoredModel(path, model.config, model.tokenizer_folder(), weights, model.end_ids())


def find_model_of_family(path: AnyPath | str, family: str | None) -> StoredModel:
    """The model a path means. `family` names the user's module of a model with its own family."""
    model = find_model(path)
    if family is not None and model.of_family(family) is model:
        raise ConfigError(
            f"--family is {family!r}; the config of {path} does not name this module as its "
            "family. Remove --family."
        )
    return model.of_family(family)


def _staged(run: Path, wrapping: Wrapping | None) -> StoredModel:
    """The model of the last stage that has left one."""
    stages = read_object(run / STAGES, ConfigError).get("stages")
    names: list[Any] = [None]
    if isinstance(stages, list):
        names = [stage.get("folder") if isinstance(stage, dict) else None for stage in stages]
    # The file may come from elsewhere: no name in it may lead out of the run folder.
    if not all(
        isinstance(name, str)
        and Path(name).parts
        and "\0" not in name
        and ".." not in Path(name).parts
        for name in names
    ):
        raise ConfigError(f"{run / STAGES}: does not list stages. Give the folder of one stage.")

    for name in reversed(names):
        folder = run / str(name)
        if (folder / FINAL).is_dir() or step_folders(folder / "checkpoints"):
            return find_model(folder, wrapping=wrapping)
    raise ConfigError(
        f"{run}: none of its stages has saved anything yet. Wait for the first checkpoint."
    )


def _adapter(folder: Path) -> StoredModel:
    from headway.model.adapter.stored import base_model_of

    base = base_model_of(folder)
    try:
        model = find_model(base)
    except HeadwayError as problem:
        raise ConfigError(f"{folder}: its base cannot be opened: {problem}") from None
    except RecursionError:
        raise ConfigError(
            f"{folder}: is an adapter of itself. Give the model, and this folder as init.adapter."
        ) from None
    # The adapter may be of the tower too.
    model = model.with_pictures()
    return replace(model.with_adapter(folder), path=folder)


def _pretrained(folder: Path, wrapping: Wrapping | None) -> StoredModel:
    # Small files are checked before they are read, weights while they are read.
    digests = read_digests(folder)
    if digests is not None:
        digests.check()
        digests.check(MEDIA_WEIGHTS)
    base = read_config(folder, wrapping)
    if has_weights(folder):
        check_weights(folder, base)

    # Head gates and media are files of headway beside those of Hugging Face. The config of the
    # model has them; the weight files are read with `base`, which does not know their names.
    config = base
    gates = read_gates(folder, base)
    if gates is not None:
        config = config.with_(head_gates=gates.config)
    media = read_media_files(folder, base.hidden_size)
    if media is not None:
        config = config.with_(media=media[0])

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        if gates is not None:
            yield GATES, gates.log_alpha
        if media is not None:
            yield from check_finite(media[1].items(), folder)
        yield from check_finite(read_weights(folder, base, digests), folder)

    masks_file = folder / MASKS_FILE
    return StoredModel(
        folder,
        config,
        folder if has_tokenizer(folder) else None,
        weights,
        read_end_ids(folder),
        masks_file=masks_file if masks_file.is_file() else None,
        parts=other_parts(folder) if has_weights(folder) else None,
    )


def _checkpoint(folder: AnyPath, wrapping: Wrapping | None) -> StoredModel:
    reader = open_checkpoint(folder)
    shape: Any = reader.scalars.get("model")
    if not isinstance(shape, dict):
        raise CheckpointError(
            f"{folder}: its manifest does not say what shape the model has. Use another checkpoint."
        )
    config = as_stored(validate(ModelConfig, shape))
    # Trust is never stored: the caller who opens the checkpoint grants it.
    if wrapping is not None and wrapping.trust_remote_code and config.hf_config is not None:
        config = config.with_(trust_remote_code=True)
    if config.head == "vectors":
        raise ConfigError(
            f"{folder}: is an aligner, not a language model. Use `headway eval retrieval` or "
            "`headway export aligner`."
        )

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for spec in param_specs(config):
            yield spec.name, reader.weight(spec.name)

    parts = None
    if isinstance(folder, Path):
        # RUN/checkpoints/step-*: the run keeps what its model has besides text.
        parts = kept_parts(folder.parents[1])
    model = StoredModel(folder, config, reader.tokenizer_folder, weights, parts=parts)
    saved_adapter: Any = reader.scalars.get("adapter")
    if not isinstance(saved_adapter, dict):
        return model
    adapter_config = validate(AdapterConfig, saved_adapter["config"])
    adapter = _adapter_of(reader, adapter_config, saved_adapter["base"], config)
    return replace(model, weights=lambda: adapter.merged(config), adapter=adapter)


def _adapter_of(
    reader: Reader, config: AdapterConfig, base: str | None, model: ModelConfig
) -> StoredAdapter:
    """The adapter of a checkpoint; matrices of its base may be stored quantised."""
    from headway.model.adapter.stored import StoredAdapter

    update_names = config.shapes(model)
    # The packed layout of each quantised matrix of the base; empty if none is.
    layouts = config.layouts(model)

    def stored() -> Iterator[tuple[str, torch.Tensor]]:
        """The base's parameters as they are stored: packed matrices under their packed names."""
        for spec in param_specs(model):
            layout = layouts.get(spec.name)
            if layout is None:
                yield spec.name, reader.weight(spec.name)
                continue
            name = packed_name(spec.name, layout.form)
            if tuple(reader.shape(name)) != (layout.nbytes,):
                raise CheckpointError(
                    f"{reader.path}: {name} has shape {list(reader.shape(name))}; "
                    f"the model needs {layout.nbytes} bytes."
                )
            yield name, reader.weight(name)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        """The base's parameters, dequantised."""
        from headway.model.adapter.packed_base import plain_values

        return plain_values(stored(), layouts)

    def trained() -> list[str]:
        """Parameters of the base that were trained as well: those with a master copy."""
        names = [spec.name for spec in param_specs(model)]
        candidates = [name for name in names if name != GATES and name not in layouts]
        return [name for name in candidates if "master" in reader.roles(name)]

    def updates() -> dict[str, torch.Tensor]:
        return {name: reader.weight(name) for name in update_names}

    if not layouts:
        return StoredAdapter(config, base, stored, updates, trained, None)
    return StoredAdapter(config, base, weights, updates, trained, stored)


def check_vocabulary(tokenizer: Tokenizer, folder: Path, config: ModelConfig) -> None:
    """Refuse a tokenizer with more ids than the model."""
    if tokenizer.vocab_size > config.vocab:
        raise ConfigError(
            f"{folder}: has {tokenizer.vocab_size} ids; the model has rows for {config.vocab}. "
            "It is another model's tokenizer."
        )
