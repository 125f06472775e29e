"""What a model is made of, as digests: a loaded model comes in; a digest each of its weights,
adapter, tokenizer and masks goes out.

A model that was replaced at the same path has other digests, so work that began with one model is
not continued with another. Where a folder has headway_digests.json, its entries are used, which
loading has compared with the files. Other files are hashed here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.files import open_files
from headway.checkpoint.manifest import MANIFEST
from headway.errors import ConfigError
from headway.model.adapter.stored import base_model_of, is_adapter
from headway.model.head_masks.gates_file import GATES_FILE, MASKS_FILE
from headway.model.loading.huggingface import is_pretrained
from headway.model.media_files import ENCODERS_FOLDER
from headway.runtime.digests import WEIGHTS, is_covered, read_digests
from headway.runtime.paths import AnyPath, S3Path
from headway.runtime.storage import sha256_file
from headway.tokenizer.folder import is_tokenizer_file

if TYPE_CHECKING:
    from headway.infer.load import LoadedModel

MASK_FILES = (GATES_FILE, MASKS_FILE, "masks.json")


def content_of(loaded: LoadedModel) -> dict[str, Any]:
    """Digests of what decides a model's answers: its weights, adapter and tokenizer, and the masks
    it runs under."""
    masks_digest = None
    if loaded.masks is not None:
        full_heads = json.dumps(loaded.masks.full)
        masks_digest = hashlib.sha256(full_heads.encode()).hexdigest()
    return {**_stored(loaded.path), "masks_digest": masks_digest}


def _stored(path: AnyPath) -> dict[str, str | None]:
    """The digests of what is stored at a path: a checkpoint, one file, an adapter or a Hugging Face
    folder."""
    # In S3 there are only checkpoints.
    if isinstance(path, S3Path) or (path / MANIFEST).is_file():
        manifest = open_files(path).read(MANIFEST)
        if manifest is None:
            raise ConfigError(
                f"{path}: has no {MANIFEST} any more. Give a model that is not removed while it is "
                "used."
            )
        # The manifest has the checksums of all tensors and of the tokenizer.
        digest = hashlib.sha256(manifest).hexdigest()
        return {"weights_digest": digest, "adapter_digest": None, "tokenizer_digest": digest}
    if path.is_file():
        # A GGUF file has its tokenizer inside.
        digest = _known(path.parent).get(path.name) or sha256_file(path)
        return {"weights_digest": digest, "adapter_digest": None, "tokenizer_digest": digest}
    if is_adapter(path) and not is_pretrained(path):
        from headway.checkpoint.stored_model import find_model

        base = _stored(find_model(base_model_of(path)).path)
        return {**base, "adapter_digest": _joined(path, _names(path))}

    names = _names(path)
    tokenizer = [name for name in names if is_tokenizer_file(name)]
    # Masks have their own digest: which of them a job runs under is its choice.
    weights = [name for name in names if name not in tokenizer and name not in MASK_FILES]
    return {
        "weights_digest": _joined(path, weights),
        "adapter_digest": None,
        "tokenizer_digest": _joined(path, tokenizer),
    }


def _names(folder: Path) -> list[str]:
    """The files that a model is read from: other weights beside safetensors are not."""
    names = sorted(path.name for path in folder.iterdir() if is_covered(path))
    if any(name.endswith(".safetensors") for name in names):
        names = [
            name for name in names if name.endswith(".safetensors") or not name.endswith(WEIGHTS)
        ]
    encoders = folder / ENCODERS_FOLDER
    if encoders.is_dir():
        names += [f"{ENCODERS_FOLDER}/{name}" for name in _names(encoders)]
    return names


def _known(folder: Path) -> dict[str, str]:
    digests = read_digests(folder)
    if digests is None:
        return {}
    return {name: file.sha256 for name, file in digests.files.items()}


def _joined(folder: Path, names: Iterable[str]) -> str:
    """One digest of several files: of their names and digests."""
    known = _known(folder)
    lines = [f"{name} {known.get(name) or sha256_file(folder / name)}" for name in names]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
