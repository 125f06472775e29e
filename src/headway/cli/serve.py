"""`headway serve`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from headway.cli._options import (
    GROUP,
    JSON,
    ComputeOptions,
    SpeculateOptions,
    group,
    model_option,
)
from headway.cli._output import exit_with, print_json
from headway.config.options import TEMPLATE_FLAGS
from headway.errors import ConfigError
from headway.infer.engine.request import EngineOptions
from headway.model.head_masks.choice import MaskChoice
from headway.serve.limits import ServeLimits

if TYPE_CHECKING:
    from headway.serve.engine_setup import EngineSetup

TOKEN_VARIABLE = "HEADWAY_SERVE_TOKEN"
NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._:/-]{0,99})=(.+)", re.DOTALL)
"""NAME=PATH."""
LONGEST_NAME = 100
PARTS_OF_RUNS = ("final", "checkpoints", "model", "adapter")
"""Folders inside a run, which say nothing about which model they hold."""
MAX_TOKEN_FILE_BYTES = 4096
REQUESTS_PER_MINUTE = 600.0
"""Of one client, where others than this machine reach the server."""


@dataclass(frozen=True)
class ServedModels:
    """What is served."""

    model: list[str] = model_option(
        ...,
        metavar="[NAME=]MODEL",
        help="A run, checkpoint or Hugging Face folder, or a hub id; repeat it for several models.",
    )
    adapter: list[str] = typer.Option(
        [],
        metavar="[MODEL:]NAME=PATH",
        help="A LoRA adapter, served as a model of its own; may be repeated. MODEL: of several, "
        "which.",
    )
    masks: list[str] = typer.Option(
        [],
        metavar="[NAME=]own|none|FILE",
        help="Head masks of all models, or of the one named; a head at 0 keeps only sinks and a "
        "window.",
    )
    chat_template: str | None = typer.Option(
        None,
        *TEMPLATE_FLAGS,
        help="Chat template of conversations: a name or a .jinja file; default: the tokenizer's "
        "own.",
    )

    def setups(
        self,
        options: EngineOptions,
        windows: MaskChoice,
        compute: ComputeOptions,
        tensor: int = 1,
    ) -> tuple[EngineSetup, ...]:
        """One engine per model."""
        from headway.serve.engine_setup import EngineSetup

        paths = dict(split_model(text) for text in self.model)
        if len(paths) < len(self.model):
            raise ConfigError(
                "--model: two models have the same name. Name them: --model a=PATH --model b=PATH."
            )
        if tensor > 1 and options.compile_blocks:
            raise ConfigError(
                f"--tensor is {tensor} and --compile is given; exchanges between ranks are not "
                "compiled. Leave it out."
            )
        if tensor > 1 and self.adapter:
            raise ConfigError(
                f"--tensor is {tensor} and --adapter is given; adapters are chosen per request on "
                "one rank only. Merge it."
            )

        # A request names an adapter as it names a model, so the names of all must differ.
        adapters: dict[str, dict[str, str]] = {name: {} for name in paths}
        for text in self.adapter:
            base, name, path = split_adapter(text, tuple(paths))
            if name in paths or any(name in known for known in adapters.values()):
                raise ConfigError(f"--adapter {text}: the name {name!r} is taken. Choose another.")
            adapters[base][name] = path

        masks = self.mask_choices(tuple(paths), windows)
        return tuple(
            EngineSetup(
                name,
                path,
                options,
                adapters[name],
                masks[name],
                compute.device,
                compute.precision,
                tensor,
            )
            for name, path in paths.items()
        )

    def mask_choices(self, names: Sequence[str], windows: MaskChoice) -> dict[str, MaskChoice]:
        """The masks of each model; `windows` has the other options of masks."""
        masks: dict[str, str | None] = dict.fromkeys(names)
        for text in self.masks:
            named = NAMED.fullmatch(text)
            if named is not None and named[1] in masks:
                masks[named[1]] = named[2]
                continue
            # Without a name it is for every model that has no masks yet.
            for name, earlier in masks.items():
                if earlier is None:
                    masks[name] = text

        # Windows belong to the models that masks are given for, or else to all: those may have
        # masks of their own. Elsewhere a window would be refused.
        masked = [name for name, text in masks.items() if text not in (None, "none")] or names
        choices: dict[str, MaskChoice] = {}
        for name, text in masks.items():
            choices[name] = MaskChoice(text)
            if name in masked:
                choices[name] = replace(windows, masks=text)
        return choices


def serve(
    models: ServedModels = GROUP,
    windows: MaskChoice = group(only=("equal_per_layer", "stream_window", "stream_sinks")),
    host: str = typer.Option(
        "127.0.0.1",
        help=f"Address to listen on. An address other than loopback requires a token ({TOKEN_VARIABLE}).",
    ),
    port: int = typer.Option(8000, help="Port to listen on; 0: any free one.", min=0, max=65535),
    token_file: Path | None = typer.Option(
        None, help=f"A file that holds the token; default: the variable {TOKEN_VARIABLE}."
    ),
    allow_host: list[str] = typer.Option(
        [], help="Another name under which clients reach this machine; may be repeated."
    ),
    engine: EngineOptions = GROUP,
    tensor: int = typer.Option(
        1,
        help="Ranks that share the layers of a model: GPUs of this machine, or processes on its "
        "CPU.",
        min=1,
    ),
    speculate: SpeculateOptions = GROUP,
    limits: ServeLimits = GROUP,
    compute: ComputeOptions = GROUP,
    json: bool = JSON,
) -> None:
    """Serve models over HTTP: OpenAI's API for programs, and a chat page for people."""
    from headway.runtime.optional import need
    from headway.runtime.web_access import is_loopback

    # Mistakes come first, since loading models takes minutes.
    for package in ("starlette", "uvicorn"):
        need(package, "headway serve")
    compute.check()

    loopback = is_loopback(host)
    token = read_token(token_file)
    if token is None and not loopback:
        raise ConfigError(
            f"--host is {host!r}, which other machines reach, and no token is set. Set "
            f"{TOKEN_VARIABLE} or --token-file, for example to "
            "the output of `openssl rand -hex 24`."
        )
    if limits.requests_per_minute is None and not loopback:
        limits = replace(limits, requests_per_minute=REQUESTS_PER_MINUTE)

    engine = replace(engine, speculation=speculate.speculation())
    setups = models.setups(engine, windows, compute, tensor)

    # Only now, since a mistake above is reported without loading the server.
    from headway.serve.server import ServeOptions
    from headway.serve.server import serve as run

    # Called when the server listens: with port 0 its address is known only then.
    def started(facts: dict[str, object]) -> None:
        if json:
            print_json(facts)
            return
        names = ", ".join(map(str, cast("list[object]", facts["models"])))
        typer.echo(f"serving {names}: {facts['url']}")
        typer.echo(f"OpenAI's API: {facts['url']}v1; Ctrl-C ends it", err=True)

    options = ServeOptions(
        setups, host, port, token, tuple(allow_host), models.chat_template, limits
    )
    exit_with(run(options, started))


def split_model(text: str) -> tuple[str, str]:
    """The name and the path of --model; without a name it is that of the folder or hub id."""
    path = Path(text)
    named = NAMED.fullmatch(text)
    # The name of a folder may contain "=", too.
    if named is not None and not path.exists():
        return named[1], named[2]
    if not path.exists() and not text.startswith("s3://"):
        return text[:LONGEST_NAME], text

    # runs/mine/checkpoints/step-100 is served as `mine`.
    parts = [
        part
        for part in Path(os.path.abspath(path)).parts
        if part not in PARTS_OF_RUNS and not part.startswith("step-")
    ]
    name = text
    if len(parts) > 1:
        name = parts[-1]
    return re.sub(r"[^A-Za-z0-9._-]", "-", name), text


def split_adapter(text: str, models: Sequence[str]) -> tuple[str, str, str]:
    """The model, the name and the path of --adapter."""
    named = NAMED.fullmatch(text)
    if named is None:
        raise ConfigError(f"--adapter is {text!r}; it must be NAME=PATH.")
    name = named[1]
    path = named[2]
    # Names of models may contain colons, so the known ones are tried.
    base = next((model for model in models if name.startswith(f"{model}:")), None)
    if base is not None:
        return base, name[len(base) + 1 :], path
    if len(models) > 1:
        raise ConfigError(
            f"--adapter is {text!r}; of several models it must be MODEL:NAME=PATH, MODEL one of "
            f"{', '.join(models)}."
        )
    return models[0], name, path


def read_token(file: Path | None) -> str | None:
    """The token of the server, from a file or the environment."""
    from headway.runtime.json_file import read_bounded
    from headway.runtime.web_access import check_token

    if file is not None:
        try:
            content = read_bounded(file, MAX_TOKEN_FILE_BYTES)
        except OSError as problem:
            raise ConfigError(
                f"--token-file is {str(file)!r}; it cannot be read: {problem.strerror}."
            ) from None
        return check_token(content.decode("ascii", "replace").strip(), f"--token-file {file}")

    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token:
        return None
    return check_token(token, TOKEN_VARIABLE)


VERBS = {"serve": serve}
