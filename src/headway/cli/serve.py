"""`headway serve`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli._options import (
    EQUAL_PER_LAYER,
    GROUP,
    JSON,
    TEMPLATE_FLAGS,
    ComputeOptions,
    SpeculateOptions,
    model_option,
)
from headway.cli._output import print_json
from headway.errors import ConfigError
from headway.serve.limits import ServeLimits

if TYPE_CHECKING:
    from headway.infer.engine.request import EngineOptions, Speculation
    from headway.model.head_masks.choice import MaskChoice
    from headway.serve.engine_setup import EngineSetup

TOKEN_VARIABLE = "HEADWAY_SERVE_TOKEN"
NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._:/-]{0,99})=(.+)", re.DOTALL)
PARTS_OF_RUNS = ("final", "checkpoints", "model", "adapter")
GIB = 1 << 30
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
        help="A LoRA adapter, served as a model of its own; may be repeated. MODEL: of several, which.",
    )
    masks: list[str] = typer.Option(
        [],
        metavar="[NAME=]own|none|FILE",
        help="Head masks of all models, or of the one named; a head at 0 keeps only sinks and a window.",
    )
    equal_per_layer: bool = EQUAL_PER_LAYER
    stream_window: int | None = typer.Option(
        None, help="Newest tokens a streaming head keeps; default: from the masks, else 1024."
    )
    stream_sinks: int | None = typer.Option(
        None, help="First tokens a streaming head keeps; default: from the masks, else 128."
    )
    chat_template: str | None = typer.Option(
        None,
        *TEMPLATE_FLAGS,
        help="Chat template of conversations: a name or a .jinja file; default: the tokenizer's own.",
    )

    def setups(
        self, options: EngineOptions, compute: ComputeOptions, tensor: int = 1
    ) -> tuple[EngineSetup, ...]:
        """One engine per model."""
        from headway.serve.engine_setup import EngineSetup

        paths = dict(split_model(one) for one in self.model)
        if len(paths) < len(self.model):
            raise ConfigError(
                "--model: two models have the same name. Name them: --model a=PATH --model b=PATH."
            )
        if tensor > 1 and self.adapter:
            raise ConfigError(
                f"--tensor is {tensor} and --adapter is given; adapters are chosen per request on one rank only. Merge it."
            )
        adapters: dict[str, dict[str, str]] = {name: {} for name in paths}
        for one in self.adapter:
            base, name, path = split_adapter(one, tuple(paths))
            if name in paths or any(name in known for known in adapters.values()):
                raise ConfigError(f"--adapter {one}: the name {name!r} is taken. Choose another.")
            adapters[base][name] = path
        masks = self._masks(tuple(paths))
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

    def _masks(self, names: Sequence[str]) -> dict[str, MaskChoice]:
        from headway.model.head_masks.choice import MaskChoice

        found: dict[str, str | None] = dict.fromkeys(names)
        for one in self.masks:
            named = NAMED.fullmatch(one)
            if named is not None and named[1] in found:
                found[named[1]] = named[2]
            else:
                found = {name: given if given is not None else one for name, given in found.items()}
        # windows are of the models that masks are given for, or else of all
        masked = [name for name, one in found.items() if one not in (None, "none")] or names
        windows = (self.equal_per_layer, self.stream_window, self.stream_sinks)
        return {
            name: MaskChoice(one, *windows) if name in masked else MaskChoice(one)
            for name, one in found.items()
        }


@dataclass(frozen=True)
class EngineFlags:
    """How much an engine keeps and does at once."""

    cache_gib: float | None = typer.Option(
        None,
        help="GiB of keys and values per model and rank, never exceeded; default: from free memory.",
    )
    max_running: int = typer.Option(
        64, help="Requests that are computed at once, per model.", min=1
    )
    max_waiting: int = typer.Option(
        1024, help="Requests that may wait, per model; more get 429.", min=0
    )
    max_context: int | None = typer.Option(
        None, help="Tokens of a request, prompt included; default: the model's.", min=2
    )
    prefill_tokens: int = typer.Option(
        8192, help="Prompt tokens that are computed between two steps of decoding.", min=1
    )
    prefix_reuse: bool = typer.Option(True, help="Compute what prompts begin with only once.")
    tensor: int = typer.Option(
        1,
        help="Ranks that share the layers of a model: GPUs of this machine, or processes on its CPU.",
        min=1,
    )
    compile: bool = typer.Option(
        False,
        "--compile",
        help="Compile decoding steps: faster on GPUs, after a minute or more at the start.",
    )

    def options(self, speculation: Speculation | None) -> EngineOptions:
        """As the engine takes them."""
        from headway.infer.engine.request import EngineOptions

        if self.cache_gib is not None and not self.cache_gib > 0:
            raise ConfigError(f"--cache-gib is {self.cache_gib}; it must be above 0.")
        if self.tensor > 1 and self.compile:
            raise ConfigError(
                f"--tensor is {self.tensor} and --compile is given; exchanges between ranks are not compiled. Leave it out."
            )
        return EngineOptions(
            cache_bytes=None if self.cache_gib is None else int(self.cache_gib * GIB),
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            max_context=self.max_context,
            prefill_tokens=self.prefill_tokens,
            prefix_reuse=self.prefix_reuse,
            compile_blocks=self.compile,
            speculation=speculation,
        )


def serve(
    models: ServedModels = GROUP,
    host: str = typer.Option(
        "127.0.0.1",
        help=f"Address to listen on. Any other than loopback needs a token ({TOKEN_VARIABLE}).",
    ),
    port: int = typer.Option(8000, help="Port to listen on; 0: any free one.", min=0, max=65535),
    token_file: Path | None = typer.Option(
        None, help=f"A file that holds the token; default: the variable {TOKEN_VARIABLE}."
    ),
    allow_host: list[str] = typer.Option(
        [], help="Another name under which clients reach this machine; may be repeated."
    ),
    engine: EngineFlags = GROUP,
    speculate: SpeculateOptions = GROUP,
    limits: ServeLimits = GROUP,
    compute: ComputeOptions = GROUP,
    json: bool = JSON,
) -> None:
    """Serve models over HTTP: OpenAI's API for programs, and a chat page for people."""
    from headway.runtime.optional import need
    from headway.runtime.web_access import is_loopback

    for package in ("starlette", "uvicorn"):
        need(package, "headway serve")
    compute.check()
    loopback = is_loopback(host)
    token = read_token(token_file)
    if token is None and not loopback:
        raise ConfigError(
            f"--host is {host!r}, which other machines reach, and no token is set. Set {TOKEN_VARIABLE} or --token-file, for example to "
            "the output of `openssl rand -hex 24`."
        )
    if limits.requests_per_minute is None and not loopback:
        limits = replace(limits, requests_per_minute=REQUESTS_PER_MINUTE)
    setups = models.setups(engine.options(speculate.speculation()), compute, engine.tensor)
    from headway.serve.server import ServeOptions
    from headway.serve.server import serve as run

    def started(facts: dict[str, object]) -> None:
        if json:
            print_json(facts)
            return
        typer.echo(f"serving {', '.join(map(str, facts['models']))}: {facts['url']}")  # pyright: ignore[reportArgumentType]
        typer.echo(f"OpenAI's API: {facts['url']}v1; Ctrl-C ends it", err=True)

    options = ServeOptions(
        setups, host, port, token, tuple(allow_host), models.chat_template, limits
    )
    code = run(options, started)
    if code:
        raise typer.Exit(code)


def split_model(given: str) -> tuple[str, str]:
    """The name and the path of --model; without a name it is that of the folder or hub id."""
    named = NAMED.fullmatch(given)
    if named is not None and not Path(given).exists():
        return named[1], named[2]
    path = Path(given)
    if not path.exists() and not given.startswith("s3://"):
        return given[:100], given
    parts = [
        part
        for part in Path(os.path.abspath(path)).parts
        if part not in PARTS_OF_RUNS and not part.startswith("step-")
    ]
    return re.sub(r"[^A-Za-z0-9._-]", "-", parts[-1] if len(parts) > 1 else given), given


def split_adapter(given: str, models: Sequence[str]) -> tuple[str, str, str]:
    """The model, the name and the path of --adapter."""
    named = NAMED.fullmatch(given)
    if named is None:
        raise ConfigError(f"--adapter is {given!r}; it must be NAME=PATH.")
    name, path = named[1], named[2]
    base = next((one for one in models if name.startswith(f"{one}:")), None)
    if base is not None:
        return base, name[len(base) + 1 :], path
    if len(models) > 1:
        raise ConfigError(
            f"--adapter is {given!r}; of several models it must be MODEL:NAME=PATH, MODEL one of {', '.join(models)}."
        )
    return models[0], name, path


def read_token(file: Path | None) -> str | None:
    """The token of the server, from a file or the environment."""
    from headway.runtime.json_file import read_bounded
    from headway.runtime.web_access import check_token

    if file is not None:
        try:
            return check_token(
                read_bounded(file, 4096).decode("ascii", "replace").strip(), f"--token-file {file}"
            )
        except OSError as problem:
            raise ConfigError(
                f"--token-file is {str(file)!r}; it cannot be read: {problem.strerror}."
            ) from None
    given = os.environ.get(TOKEN_VARIABLE, "").strip()
    return check_token(given, TOKEN_VARIABLE) if given else None


VERBS = {"serve": serve}
