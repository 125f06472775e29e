"""A request to the Hugging Face hub: which repository, what is needed of it, where it lies in
the cache. Uses no network.

In: a name, a need, the list of a repository's files. Out: the files to download; the folder in
the cache. Invariant: of a model only safetensors and texts are chosen, never a pickle, unless
the user names it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from headway.errors import DataError

Need = Literal["model", "tokenizer", "dataset", "everything"]
UNFINISHED = ".headway-unfinished"
"""The name of the mark of an unfinished download."""
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.tsv")
TOKENIZER_FILES = (
    "tokenizer*.json",
    "tokenizer.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.*",
    "config.json",
    "generation_config.json",
    "*.tiktoken",
)
OTHER_WEIGHTS = (
    "*.bin",
    "*.ckpt",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx*",
    "*.ot",
    "*.pickle",
    "*.pkl",
    "*.pt",
    "*.pth",
    "*.tflite",
)
"""Pickles, which can run code when they are loaded, and weights that headway does not read."""
PICKLES = ("*.bin", "*.ckpt", "*.pickle", "*.pkl", "*.pt", "*.pth")
DUPLICATES = re.compile(
    r"consolidated.*\.safetensors"
    r"|model\.(?!safetensors)\w+(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
)
"""The same weights once more: in Mistral's own format, or in another precision."""


@dataclass(frozen=True)
class HubRequest:
    """A repository, what is needed of it, and where it goes."""

    repo_id: str
    need: Need = "model"
    revision: str | None = None
    include: Sequence[str] = ()
    to: Path | None = None
    cache_dir: Path | None = None

    @property
    def repo_type(self) -> str:
        """`dataset` or `model`, as the hub calls the kinds of repositories."""
        return "dataset" if self.need == "dataset" else "model"

    @property
    def cache(self) -> Path:
        """The folder of the repository in the cache."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        return (self.cache_dir or Path(constants.HF_HUB_CACHE)) / repo_folder_name(
            repo_id=self.repo_id, repo_type=self.repo_type
        )

    @property
    def unfinished(self) -> Path:
        """The mark of an unfinished download."""
        return self.cache / UNFINISHED

    def cached(self) -> Path | None:
        """The folder of its revision in the cache, by the layout that the hub documents; None if
        there is none.
        """
        # refs/NAME holds the commit of a branch or tag. A commit has no such file.
        revision = self.revision or "main"
        try:
            commit = (self.cache / "refs" / revision).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            commit = revision

        # The name must not lead out of the cache ("..", "/").
        folder = self.cache / "snapshots" / commit
        if not re.fullmatch(r"\w+", commit) or not folder.is_dir():
            return None
        return folder

    def choose(self, names: Sequence[str]) -> list[str]:
        """The files to download, of all files of the repository: safetensors and no pickles,
        unless `include` says otherwise.
        """
        if self.include:
            return [name for name in names if _matches(name, self.include)]
        if self.need == "dataset":
            return [name for name in names if not _matches(name, PICKLES)]
        if self.need == "tokenizer":
            return [name for name in names if "/" not in name and _matches(name, TOKENIZER_FILES)]

        # Files in sub-folders are other exports of the model (onnx/, original/).
        weights = [name for name in names if name.endswith(".safetensors") and "/" not in name]
        if self.need == "everything":
            return [name for name in names if not (weights and _matches(name, OTHER_WEIGHTS))]

        other = [name for name in names if "/" not in name and _matches(name, OTHER_WEIGHTS)]
        if not weights and other:
            raise DataError(
                f"{self.repo_id}: has no safetensors; {other[0]} is another format, and pickles "
                f"can run code. If you trust it, run `headway download {self.repo_id} --include "
                "'*.json' --include '*.bin' --include '*.model' --to FOLDER` and give FOLDER."
            )

        # A repository may have nothing but what looks like a duplicate; then that is taken.
        whole = [name for name in weights if not DUPLICATES.fullmatch(name)]
        return [
            name
            for name in names
            if "/" not in name
            and _matches(name, MODEL_FILES)
            and not (whole and DUPLICATES.fullmatch(name))
        ]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
