"""`headway push` and `headway pull`: a run's model to the hub, and a model from there.

    RUN ──export──▶ a folder beside the run ──card──▶ README.md ──upload──▶ USER/NAME

In: a run that has ended, or a folder that `headway export` wrote. Out: one commit on the hub. What
is pushed is made in a temporary folder from files that do not change, so that a second push of the
same run has the same bytes and sends nothing twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from headway.checkpoint.stored_model import find_model
from headway.config.regular_file import regular_only
from headway.errors import ConfigError
from headway.export.adapter import FOLDER as ADAPTER_FOLDER
from headway.export.adapter import export_adapter
from headway.export.gguf_writer import export_gguf, parse_type
from headway.model.adapter.stored import is_adapter
from headway.model.loading.gguf_model import gguf_file
from headway.model.loading.huggingface import is_pretrained
from headway.runtime.digests import read_digests, write_digests
from headway.runtime.json_file import read_object
from headway.runtime.storage import writing
from headway.runtime.temporary import clear_temporary, temporary_name
from headway.text.hub import fetch, split_revision
from headway.text.hub_upload import (
    CARD,
    UploadRequest,
    UploadResult,
    check_repository,
    local_files,
    upload,
)
from headway.train.run_name import RECIPE
from headway.workflows.model_card import CURVE, CardOptions, Form, public_name, write_card

log = logging.getLogger("headway")

ADAPTER_CONFIG = "adapter_config.json"
BASE = "base_model_name_or_path"
GGUF_ENDINGS = (".gguf", ".Modelfile")
"""What `--form gguf` writes for each type."""
LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")
"""How the hub writes licences: apache-2.0, mit, llama3.1, other."""


@dataclass(frozen=True)
class PushOptions:
    """What `headway push` is asked for."""

    repo_id: str
    form: Form = "model"
    gguf_type: str = "q8_0"
    license: str | None = None
    is_public: bool = False
    replace: bool = False

    def __post_init__(self) -> None:
        check_repository(self.repo_id)
        if self.form not in get_args(Form):
            raise ConfigError(f"--form is {self.form!r}; it must be {', '.join(get_args(Form))}.")
        if self.license is not None and LICENCE.fullmatch(self.license) is None:
            raise ConfigError(
                f"--license is {self.license[:100]!r}; write it as the hub does, such as "
                "apache-2.0, mit or other."
            )
        parse_type(self.gguf_type)


@dataclass(frozen=True)
class Prepared:
    """A folder that is ready to be sent."""

    folder: Path
    source: str
    files: dict[str, Path]
    card: str


def push(source: Path, options: PushOptions) -> UploadResult:
    """Send a run's model, or an exported folder, to the hub."""
    # A repository usually has a model's GGUF files of several types side by side.
    kept_endings: tuple[str, ...] = ()
    if options.form == "gguf":
        kept_endings = GGUF_ENDINGS
    with prepared(source, options) as content:
        return upload(
            UploadRequest(
                options.repo_id,
                content.folder,
                content.source,
                is_public=options.is_public,
                replace=options.replace,
                kept_endings=kept_endings,
            )
        )


@contextmanager
def prepared(source: Path, options: PushOptions) -> Iterator[Prepared]:
    """What a push would send, in a temporary folder that is removed afterwards."""
    if not source.is_dir():
        raise ConfigError(f"{source}: no such run or folder.")
    is_run = (source / RECIPE).is_file()
    if not is_run and options.form != "model":
        raise ConfigError(
            f"{source} is not a run folder (it has no {RECIPE}), so --form {options.form} cannot "
            "be made from it. Export it first, and push that folder without --form."
        )

    if is_run:
        final = _final_folder(source)
        if options.form == "adapter" and not is_adapter(final / ADAPTER_FOLDER):
            raise ConfigError(
                f"{source}: was trained without an adapter. Leave --form out to push the model."
            )
    else:
        final = source
        if not (is_pretrained(source) or is_adapter(source) or gguf_file(source) is not None):
            raise ConfigError(
                f"{source}: is neither a run folder nor a folder that `headway export` wrote. "
                "Give a run that has ended."
            )

    name = f"{source.resolve().name} ({_identity(source, is_run=is_run)}, {options.form})"
    with _beside(source) as folder:
        content = folder / "content"
        content.mkdir()
        file = None
        if options.form == "adapter":
            export_adapter(source, content)
            _hide_base_folder(content)
        elif options.form == "gguf":
            file = f"{options.repo_id.partition('/')[2]}-{options.gguf_type}.gguf"
            export_gguf(source, content / file, kind=parse_type(options.gguf_type))
        else:
            _copy(final, content)

        card_options = CardOptions(options.repo_id, options.form, name, options.license, file)
        card = _card(source, content, card_options, is_run=is_run)
        (content / CARD).write_text(card, encoding="utf-8")
        if is_run and (source / CURVE).is_file():
            shutil.copyfile(source / CURVE, content / CURVE)
        yield Prepared(content, name, local_files(content), card)


@contextmanager
def _beside(source: Path) -> Iterator[Path]:
    """A temporary folder on the file system of a run, so that its files can be linked."""
    parent = source.absolute().parent
    clear_temporary(parent)
    folder = temporary_name(parent / "push")
    with writing(folder):
        folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _hide_base_folder(adapter: Path) -> None:
    """In the config of an adapter, of a base that is a folder here only its name stays."""
    path = adapter / ADAPTER_CONFIG
    settings = read_object(path, ConfigError)
    base = settings.get(BASE)
    if not isinstance(base, str) or public_name(base) == base:
        return
    settings[BASE] = public_name(base)
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    write_digests(adapter)
    log.warning(
        "the base of the adapter is a folder of this machine; %s says %r. Push the base, too, and "
        "change the name there.",
        ADAPTER_CONFIG,
        settings[BASE],
    )


def _card(source: Path, content: Path, options: CardOptions, *, is_run: bool) -> str:
    if is_run:
        return write_card(source, options)
    # A card that somebody wrote is theirs: only the mark for the next push is added.
    text = ""
    if (content / CARD).is_file():
        text = (content / CARD).read_text(encoding="utf-8")
    return marked(text, options)


def marked(text: str, options: CardOptions) -> str:
    """A card of one's own with the mark of the push, and the licence if one is given, in its head."""
    from headway.text.hub_upload import MARK

    lines = [f"{MARK}: {options.source}"]
    if options.license is not None:
        lines.append(f"license: {options.license}")
    head = re.match(r"(?s)---\n(.*?\n)---\n", text)
    if head is None:
        title = text or f"# {options.repo_id.partition('/')[2]}\n"
        return "---\n" + "\n".join(lines) + "\n---\n\n" + title
    keys = tuple(line.partition(":")[0] + ":" for line in lines)
    kept = [line for line in head[1].splitlines() if not line.startswith(keys)]
    return "---\n" + "\n".join([*kept, *lines]) + "\n---\n" + text[head.end() :]


def _final_folder(run: Path) -> Path:
    """The Hugging Face folder of a run that has ended."""
    # Of a run without final/ the model is a checkpoint, or nothing yet.
    final = run / "final"
    if is_pretrained(final):
        return final
    if (run / "stages.json").is_file():
        path = find_model(run).path
        if isinstance(path, Path) and is_pretrained(path):
            return path
    raise ConfigError(
        f"{run}: has not ended: it has no final/ with a model. Let it end "
        f"(`headway train` with the same recipe resumes it), or export a checkpoint with "
        f"`headway export hf {run} --out FOLDER` and push FOLDER."
    )


def _identity(source: Path, *, is_run: bool) -> str:
    """Twelve digits that are the same for every push of this run, and differ for others."""
    digest = hashlib.sha256()
    if is_run:
        with open(source / RECIPE, "rb", opener=regular_only) as file:
            digest.update(file.read())
        # The first line has the time of the first start.
        events = source / "events.jsonl"
        if events.is_file():
            with open(events, "rb") as file:
                digest.update(file.readline(1 << 16))
    else:
        # Names alone: the folder of one export is made anew with other weights.
        digest.update("\n".join(local_files(source)).encode())
    return digest.hexdigest()[:12]


def _copy(source: Path, target: Path) -> None:
    """The files of a folder, linked where the file system can: a model may be large.

    Folders below are left out: the adapter inside of a run's model is another form of it.
    """
    for name, path in local_files(source).items():
        if "/" in name:
            continue
        copy = target / name
        if name == CARD:
            # It is rewritten below, and the original must stay as it is.
            shutil.copyfile(path, copy)
            continue
        try:
            os.link(path, copy)
        except OSError:
            shutil.copyfile(path, copy)


@dataclass(frozen=True)
class PullResult:
    """A model that was downloaded."""

    folder: Path
    form: Form | None
    """None: neither a model, an adapter nor a GGUF file."""
    is_checked: bool
    """Whether the folder lists digests of headway, which all agree."""


def pull(repo_id: str, to: Path | None = None, revision: str | None = None) -> PullResult:
    """Download a model into a folder and check it; an interrupted download continues."""
    name, _ = split_revision(repo_id)
    check_repository(name)
    folder = to or Path(name.partition("/")[2])
    # The hub library leaves this folder in what it downloads.
    is_download = (folder / ".cache" / "huggingface").is_dir()
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_download and not is_free:
        raise ConfigError(
            f"{folder} exists and is not a download of the hub. Choose another folder with --to."
        )
    fetch(repo_id, revision=revision, to=folder)

    digests = read_digests(folder)
    if digests is not None:
        # Only what is covered by the list and came along: a card may have been edited since.
        digests.check_all()
    form: Form | None = None
    if is_pretrained(folder):
        form = "model"
    elif is_adapter(folder):
        form = "adapter"
    elif gguf_file(folder) is not None:
        form = "gguf"
    return PullResult(folder, form, digests is not None)
