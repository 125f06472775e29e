"""What self-instruct takes, and the options of `headway data self-instruct`: the endpoint, and the
tasks to generate.

A module of its own, because the command line imports it for every help, without the client and the
filters.
"""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from headway.config.options import option
from headway.errors import ConfigError

KEY_VARIABLE = "OPENAI_API_KEY"
Language = Literal["en", "zh"]


@dataclass(frozen=True)
class Endpoint:
    """An address, a model and the settings of requests."""

    url: str = option(
        ...,
        "An OpenAI-compatible server, e.g. http://localhost:8000/v1. The API key is read from "
        "OPENAI_API_KEY only.",
        "--endpoint",
    )
    model: str = option(..., "The model's name on that server.")
    key: str | None = field(default=None, repr=False)
    key_variable: str = field(default=KEY_VARIABLE)
    """The environment variable that has the key, for messages."""
    names: tuple[str, str, str] = field(default=("--endpoint", "--model", "--max-tokens"))
    """What the settings of address, model and length are called, for messages."""
    temperature: float = option(1.0, "Sampling temperature.")
    max_tokens: int = option(3072, "Maximum tokens of an answer; a task cut off there is dropped.")
    timeout_seconds: float = option(
        120.0, "Seconds to wait for an answer before a retry.", "--timeout"
    )
    max_retries: int = option(
        8, "Retries of one request (429, 5xx, no answer, invalid answer) before the run ends."
    )
    requests_per_minute: float = option(
        0.0, "Maximum requests per minute; 0: no limit.", "--rate-limit"
    )

    def __post_init__(self) -> None:
        """Refuse an invalid address or key. Neither is shown where it may hold a secret."""
        try:
            parts = urllib.parse.urlsplit(self.url)
            port_is_valid = parts.port is None or parts.port > 0
        except ValueError:
            parts = urllib.parse.urlsplit("")
            port_is_valid = False
        if parts.username is not None or parts.password is not None:
            raise ConfigError(
                f"{self.names[0]} holds a user name or password; put the key into the environment "
                f"variable {self.key_variable} instead."
            )
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or not port_is_valid
            or not self.url.isascii()
            or " " in self.url
        ):
            raise ConfigError(
                f"{self.names[0]} is {self.url!r}; it must be an address such as "
                "http://localhost:8000/v1."
            )
        if self.key is not None and not (
            self.key.isascii() and self.key.isprintable() and " " not in self.key
        ):
            raise ConfigError(
                f"{self.key_variable} holds characters that no key has (blanks, line ends, not "
                "ASCII). Set it again."
            )

    @property
    def address(self) -> str:
        """Where requests go: the path is completed to .../v1/chat/completions."""
        parts = urllib.parse.urlsplit(self.url)
        path = parts.path.rstrip("/")
        if not path.endswith("/chat/completions"):
            path = f"{path or '/v1'}/chat/completions"
        return urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))

    @property
    def shown_address(self) -> str:
        """The address to display, without its query, which may contain a secret."""
        return self.address.partition("?")[0]


@dataclass(frozen=True)
class SelfInstruct:
    """How many tasks to generate, in which language, from which seed tasks, and in requests of
    which size."""

    num: int = option(..., "Total number of tasks to keep.")
    out: Path = option(
        ..., "Output folder: tasks.jsonl. Run again after a kill, the command resumes there."
    )
    language: Language = option("en", "Language of prompts and tasks: en or zh.")
    seeds: Path | None = option(
        None,
        "Your own seed tasks: records with instruction, input, output. Default: headway's.",
    )
    per_request: int = option(20, "Tasks per request.")
    requests_per_round: int = option(5, "Concurrent requests.")
    seed: int = option(0, "Seed of the choice of examples.")
    give_up_after: int = option(20, "End after this many answers in a row without a task to keep.")
