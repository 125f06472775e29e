"""The JSON object of a request: bytes come in, a pydantic model of it goes out, or an ApiError that
names the field.

A body is a subclass of `RequestBody`. Null means the same as a field that is missing. Every field
is read, declared as harmless (`Any`), or refused by its name: nothing is ignored. The annotations
here say what a value must be, in types for pydantic and in words for the client:

    temperature: Annotated[float, Number(0, 2)] = 1.0
    -> temperature is 3; it must be a number from 0 to 2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from headway.serve.api_errors import ApiError, bad_field

MAX_DEPTH = 64
"""Levels of lists and objects in a body."""
MAX_VALUES = 200_000
"""Lists, objects and texts of a body."""
MAX_NAME = 100
"""Characters of an unknown field's name that are repeated to the client."""
MAX_SHOWN = 80
"""Characters of a wrong value that are repeated to the client."""

# Types of the errors that annotations and validators of bodies raise.
WRONG = "wrong_value"
PROBLEM = "problem"
UNKNOWN = "extra_forbidden"
EXPECTED = {"model_type": "an object", "tuple_type": "a list of objects"}
"""What pydantic's own errors expected.

Other types do not occur: values have an annotation of this module.
"""

NO_FIELDS: frozenset[str] = frozenset()

Body = TypeVar("Body", bound="RequestBody")


def parse_body(model: type[Body], body: bytes) -> Body:
    """A request's body as its model."""
    data = read_json(body)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        # One mistake at a time, as OpenAI reports them.
        raise _api_error(error.errors(include_url=False)[0]) from None


def read_json(body: bytes) -> dict[str, Any]:
    """The object of a request's body."""
    try:
        # Python's json reads NaN and Infinity, which are no JSON and which no answer could repeat.
        data = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(
            400, f"The body is not JSON: {' '.join(str(error).split())[:200]}."
        ) from None
    if not isinstance(data, dict):
        raise ApiError(400, "The body must be a JSON object.")
    check_tree(cast(dict[str, Any], data))
    return cast(dict[str, Any], data)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def check_tree(data: dict[str, Any]) -> None:
    """Refuse what is nested too deep, holds too many values, or has text that is not valid Unicode.

    Numbers in lists are not counted.
    """
    # A stack of our own: recursion would end at Python's limit, not at ours.
    waiting: list[tuple[Any, int]] = [(data, 0)]
    count = 1
    while waiting:
        value, depth = waiting.pop()
        count_before = count
        parts = value
        is_object = isinstance(value, dict)
        if is_object:
            parts = [*value.keys(), *value.values()]
            count += len(parts)

        for part in parts:
            # Exact types: json.loads makes no subclasses, and this loop sees every value of a body.
            kind = type(part)
            if kind is str:
                check_text(part)
            elif kind is dict or kind is list:
                waiting.append((part, depth + 1))
            elif part is not None:
                continue

            if not is_object:
                count += 1

        if count > count_before and depth == MAX_DEPTH:
            raise ApiError(400, f"The body is nested deeper than {MAX_DEPTH} levels.")
        if count > MAX_VALUES:
            raise ApiError(400, f"The body holds more than {MAX_VALUES} lists, objects and texts.")


def check_text(text: str) -> None:
    """Refuse a lone surrogate, which no tokenizer takes and no answer can repeat."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ApiError(
                400,
                "A text of the body is not valid Unicode: a lone "
                f"surrogate at character {error.start}.",
            ) from None


class RequestBody(BaseModel):
    """An object of a body. Fields of type `Any` that no code reads change no answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    known_fields: ClassVar[frozenset[str]] = frozenset()
    """The names of all fields as clients write them."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        # Once per class, not per message.
        fields = cls.__pydantic_fields__.items()
        cls.known_fields = frozenset(field.alias or name for name, field in fields)

    kind_field: ClassVar[str] = ""
    absent: ClassVar[Mapping[str, frozenset[str]]] = {}
    """By the value of `kind_field`: declared fields that such an object does not have."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: dict[str, Any] | Any) -> Any:
        """The object without nulls, and without empty lists and objects in fields that it does not
        have.
        """
        if not isinstance(data, dict):
            return data

        known = cls.known_fields
        absent = NO_FIELDS
        if cls.absent:
            kind = data.get(cls.kind_field)
            if isinstance(kind, str):
                absent = cls.absent.get(kind, NO_FIELDS)

        # Nearly always there is nothing to drop, and this runs for each of 10,000 messages.
        if None not in data.values() and data.keys() <= known and absent.isdisjoint(data):
            return data

        present: dict[str, Any] = {}
        for name, value in data.items():
            is_absent = name in absent
            # Clients send back messages that they got from other services, which add empty
            # fields to them, such as OpenAI's `annotations: []`.
            if value is None or ((is_absent or name not in known) and value in ([], {})):
                continue
            if is_absent:
                raise PydanticCustomError(UNKNOWN, "is not supported", {"field": name})
            present[name] = value

        return present


@dataclass(frozen=True)
class MustBe:
    """What the value of a field must be, in words.

    The words are the error of any other value, whatever in it is wrong.
    """

    words: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return _in_words(handler(source), self.words)


@dataclass(frozen=True)
class Whole:
    """A whole number in bounds. Some clients write it as a float, e.g. 16.0."""

    low: int
    high: int | None = None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        number = core_schema.int_schema(strict=True, ge=self.low, le=self.high)
        words = f"a whole number from {self.low} to {self.high}"
        if self.high is None:
            words = f"a whole number, at least {self.low}"
        return _in_words(core_schema.no_info_before_validator_function(_whole_float, number), words)


@dataclass(frozen=True)
class Number:
    """A finite number in bounds."""

    low: float
    high: float

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        number = core_schema.float_schema(
            strict=True, ge=self.low, le=self.high, allow_inf_nan=False
        )
        return _in_words(number, f"a number from {self.low:g} to {self.high:g}")


@dataclass(frozen=True)
class ReadBy:
    """A value that `read(value, check)` makes.

    `check` validates it as `kind`, which is not the type of the field.
    """

    read: Callable[[Any, Callable[[Any], Any]], Any]
    kind: Any

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = handler.generate_schema(self.kind)
        return core_schema.no_info_wrap_validator_function(self.read, schema)


Text = Annotated[str, Field(strict=True), MustBe("a text")]
Flag = Annotated[bool, Field(strict=True), MustBe("true or false")]


def needed() -> Any:
    """The default of a field that must be there: null, which its type refuses."""
    return Field(default=None, validate_default=True)


def _in_words(schema: CoreSchema, words: str) -> CoreSchema:
    """A schema whose every error is one sentence: the value must be `words`."""
    return core_schema.custom_error_schema(
        schema,
        custom_error_type=WRONG,
        custom_error_message="must be {words}",
        custom_error_context={"words": words},
    )


def _whole_float(value: Any) -> Any:
    # Above 2**53 a float does not say which whole number was meant.
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def wrong(words: str) -> PydanticCustomError:
    """The error of a validator: the value must be something else."""
    return PydanticCustomError(WRONG, "must be {words}", {"words": words})


def problem(text: str, field: str | None = None) -> PydanticCustomError:
    """The error of a validator in the client's words.

    `field` is the field that the validator of a whole model found wrong.
    """
    return PydanticCustomError(PROBLEM, "{text}", {"text": text, "field": field})


def wrong_value(name: str, value: Any, words: str) -> ApiError:
    """The error of a value that is not what is expected."""
    if value is None and not name.endswith("]"):
        return bad_field(name, f"is missing; it must be {words}.")
    shown = json.dumps(value, ensure_ascii=False, default=str)
    if len(shown) > MAX_SHOWN:
        shown = f"{shown[:MAX_SHOWN]}..."
    return bad_field(name, f"is {shown}; it must be {words}.")


def _api_error(error: ErrorDetails) -> ApiError:
    """The first of pydantic's errors as the client reads it: its path as a name, and what it must
    be.
    """
    context = error.get("ctx", {})
    path = error["loc"]
    if context.get("field") is not None:
        path = (*path, context["field"])

    name = ""
    for step in path:
        if isinstance(step, int):
            name += f"[{step}]"
        elif name:
            name += f".{step}"
        else:
            name = step

    kind = error["type"]
    if kind == UNKNOWN:
        name = name[:MAX_NAME]
        return bad_field(name, "is not supported by this server. Leave it out.")

    if kind == PROBLEM:
        return bad_field(name, context["text"])
    if kind == WRONG:
        return wrong_value(name, error["input"], context["words"])
    return wrong_value(name, error["input"], EXPECTED[kind])
