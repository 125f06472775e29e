"""The settings of rewards, what they read and what they give. No torch.

A recipe lists rewards, and a field declared as `RewardList` reads them:

    reward: [{kind: math, weight: 1}, {kind: format, pattern: "<think>.*"}, {kind: ./mine.py}]
    reward: math

`RewardSettings.build` makes a `BuiltReward`. What it computes depends on `inputs(answer)` alone:
the same value is sent to the process that computes, and is the key under which a result is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, cast

from pydantic import BeforeValidator, ValidationError
from pydantic_core import to_json

import headway
from headway.config.kinds import KindConfig, KindIn, NestedErrors, one_or_more
from headway.config.section import setting
from headway.config.user_code import is_file_name
from headway.errors import ConfigError


@dataclass(frozen=True)
class RewardAnswer:
    """An answer that was sampled, with the record of its prompt."""

    number: int
    prompt: Sequence[Mapping[str, Any]]
    """Messages with `role` and `content`."""
    text: str
    record: Mapping[str, Any]
    """All columns of the prompt's record."""
    tokens: int = 0
    finished: bool = True
    """False: it was cut at the longest length."""


@dataclass(frozen=True)
class Score:
    """What an answer is worth."""

    total: float
    """The sum of weight x part over all rewards."""
    parts: dict[str, float]
    """One number per reward, without its weight. A reward that returns a mapping adds `NAME/KEY`
    for its other keys, which are not part of the total.
    """
    problems: tuple[str, ...] = ()
    """One line per reward that failed and counted as its `default`."""


@dataclass(frozen=True)
class RewardOutcome:
    """What one reward says of one answer: a value, or the reason why there is none."""

    value: float | None
    problem: str | None = None
    details: dict[str, float] = field(default_factory=dict)


class BuiltReward(Protocol):
    """A reward that is ready to score."""

    def digest(self) -> str:
        """Identifies code, settings and versions: two sources with the same one agree."""
        ...

    def inputs(self, answer: RewardAnswer, /) -> dict[str, Any]:
        """All that the score depends on beside the digest, as a JSON value."""
        ...

    def score(self, inputs: Sequence[dict[str, Any]]) -> Iterator[dict[int, RewardOutcome]]:
        """The outcomes by the index of their input, in portions: what takes long, or is asked of
        somebody, is handed over as it is ready. A failure is an outcome, never an exception.
        """
        ...

    def close(self) -> None:
        """End processes and connections."""
        ...


class ModelScorer(Protocol):
    """A reward model that is loaded."""

    def digest(self) -> str:
        """Identifies weights, tokenizer and template."""
        ...

    def score(self, answers: Sequence[dict[str, Any]], /) -> list[float | str]:
        """A number for each conversation, or the reason why it has none."""
        ...

    def close(self) -> None:
        """Release the model."""
        ...


OpenModel = Callable[[Any], ModelScorer]
"""Loads the reward model of the settings `headway.rewards.model.Config`."""


@dataclass(frozen=True)
class RewardTools:
    """What a reward is built with."""

    workers: int = 1
    """Processes that a reward may use."""
    open_model: OpenModel | None = None
    """How reward models are loaded; None: by nobody."""


class RewardSettings(KindConfig):
    """Base of the settings of every reward."""

    weight: float = setting(1.0, "The factor of this reward in the sum.")

    @property
    def fallback(self) -> float:
        """What an answer gets when this reward fails on it."""
        return 0.0

    @property
    def failures_allowed(self) -> float:
        """The share of the last answers on which it may fail before the run stops."""
        return 0.0

    @property
    def name(self) -> str:
        """What parts and messages call this reward."""
        return self.kind

    def check(self, columns: Collection[str]) -> None:
        """Refuse settings that cannot work here, or that need a column which records lack."""

    def build(self, tools: RewardTools) -> BuiltReward:
        """What scores answers; processes and models are at its disposal in `tools`."""
        raise ConfigError(f"{type(self).__module__} defines no Config.build(tools).")


class FallibleSettings(RewardSettings):
    """Base of the settings of rewards that can fail on an answer."""

    default: float = setting(0.0, "What an answer gets when this reward fails on it.")
    max_failures: float = setting(
        0.5, "Stop when more than this share of the last 200 answers failed.", ge=0, le=1
    )

    @property
    def fallback(self) -> float:
        return self.default

    @property
    def failures_allowed(self) -> float:
        return self.max_failures


class WorkerSettings(FallibleSettings):
    """Base of the settings of rewards that run in worker processes."""

    timeout: float = setting(10.0, "Seconds that one answer may take.", gt=0, le=3600)
    memory_gib: float = setting(4.0, "Memory of the process that computes this reward.", gt=0)


@dataclass(frozen=True)
class RewardIn(KindIn):
    """A `KindIn` that never imports code of the user: files and modules are of the kind `file`,
    whose worker process imports them.
    """

    package: str = "headway.rewards"

    def validate(self, value: Any, base: type[KindConfig] = RewardSettings) -> KindConfig:
        """The settings of one reward."""
        # `reward: math` is short for a mapping with the kind alone.
        settings = {"kind": value} if isinstance(value, str) else value
        if isinstance(settings, dict):
            kind = cast(dict[str, Any], settings).get("kind")
            if isinstance(kind, str) and (is_file_name(kind) or "." in kind):
                from headway.rewards.user_file import UserFileReward

                try:
                    # Through JSON, as the whole recipe is read (config/kinds.py).
                    return UserFileReward.model_validate_json(to_json(settings))
                except ValidationError as error:
                    raise NestedErrors(error.errors()) from None
        return super().validate(value, base)


RewardList = Annotated[
    tuple[Annotated[RewardSettings, RewardIn()], ...], BeforeValidator(one_or_more)
]
"""The type of a recipe's field `reward`."""


def digest_of(value: Any) -> str:
    """SHA-256 of a JSON value."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def settings_digest(settings: RewardSettings, *more: Any) -> str:
    """The digest of a source by its settings and `more`: versions, the bytes of a file."""
    values = settings.model_dump(mode="json")
    # These decide what is done with a result, not the result.
    for name in ("weight", "default", "timeout", "memory_gib", "max_failures"):
        values.pop(name, None)
    # Another release may compute the same reward in another way.
    return digest_of([values, headway.__version__, *more])


def column_value(record: Mapping[str, Any], path: str) -> Any:
    """The value of a column; dots go into nested mappings. None if it is absent."""
    # A column whose own name has a dot comes first.
    if path in record:
        return record[path]
    value: Any = record
    for name in path.split("."):
        # Tables of verl keep a nested column as JSON text.
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return None
        if not isinstance(value, Mapping):
            return None
        value = cast(Mapping[str, Any], value).get(name)
    return value


def require_column(
    kind: str, columns: Collection[str], paths: Sequence[str], setting_name: str = "column"
) -> None:
    """Refuse records that have none of these columns."""
    if any(path in columns or path.split(".")[0] in columns for path in paths):
        return
    raise ConfigError(
        f"reward kind {kind} needs one of the columns {', '.join(paths)}; the records have "
        f"{', '.join(sorted(columns)) or 'none'}. Name the column: reward.N.{setting_name}=NAME."
    )
