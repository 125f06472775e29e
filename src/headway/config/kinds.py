"""A kind names a module: `objective.kind: dpo` is headway/tasks/dpo.py, `kind: my_lab.dpo2` is a
module of the user, and `kind: ./my_loss.py` a file in the working directory (see user_code.py).

A kind's module holds a class `Config` (a `KindConfig`) that imports without torch and whose
`build(...)` makes the object. A recipe field is declared `Annotated[KindConfig,
KindIn("headway.tasks")]`; loading the recipe finds the `Config` of its kind and validates it. A
package lists the kinds it ships in `KINDS`.
"""

import difflib
import importlib
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, cast

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema, to_json

from headway.config.section import Section, setting
from headway.config.user_code import import_user_module
from headway.errors import ConfigError


class KindConfig(Section):
    """The settings of one kind; `kind` names its module."""

    kind: str = setting(
        "",
        "A built-in kind, the dotted name of your own module, or a file: ./my_kind.py.",
        on_resume="fixed",
    )


class NestedErrors(ValueError):
    """Passes the validation errors of a kind's settings through the outer validator, so that each
    keeps its key.
    """

    def __init__(self, errors: list[Any]) -> None:
        super().__init__("invalid settings")
        self.errors = errors


def kind_names(package: str) -> list[str]:
    """The kinds that headway ships in one package: the package's `KINDS`."""
    return list(importlib.import_module(package).KINDS)


def kind_module(package: str, kind: str) -> ModuleType:
    """Import the module of a kind; the error for an unknown kind lists the known ones."""
    # Messages name the setting, which most packages are named after. The others declare it:
    # headway.tasks is the section `objective`.
    setting_name = getattr(importlib.import_module(package), "SETTING", package.rpartition(".")[2])
    if "." in kind:
        return import_user_module(kind, f"{setting_name} kind")

    names = kind_names(package)
    if kind in names:
        return importlib.import_module(f"{package}.{kind}")

    near = difflib.get_close_matches(kind, names, n=1)
    hint = ""
    if near:
        hint = f" Did you mean {near[0]!r}?"
    raise ConfigError(
        f"{setting_name} kind is {kind[:100]!r}; it must be one of {', '.join(names)}, "
        f"the dotted name of your own module, or a file such as ./my_kind.py.{hint}"
    )


def kind_config(package: str, kind: str, base: type[KindConfig] = KindConfig) -> type[KindConfig]:
    """The config class of a kind."""
    config_class = getattr(kind_module(package, kind), "Config", None)
    if not (isinstance(config_class, type) and issubclass(config_class, base)):
        raise ConfigError(
            f"{kind} has no class Config derived from {base.__module__}.{base.__qualname__}; a "
            "kind's module needs one."
        )
    return config_class


@dataclass(frozen=True)
class KindIn:
    """Marks a recipe field whose config class is chosen by its `kind`: a module of `package` or of
    the user.
    """

    package: str
    default: str | None = None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """How pydantic reads and writes such a field: `validate` decides."""
        serializer = core_schema.plain_serializer_function_ser_schema(
            lambda value: value.model_dump(mode="json")
        )

        # `source` is X of `Annotated[X, KindIn(...)]`. The class is known only when the value is:
        # pydantic's own schema of X would accept the base class alone.
        return core_schema.no_info_plain_validator_function(
            partial(self.validate, base=source), serialization=serializer
        )

    def validate(self, value: Any, base: type[KindConfig] = KindConfig) -> KindConfig:
        """The settings of a kind, whose class derives from `base`."""
        if isinstance(value, base):
            return value
        if isinstance(value, str):
            value = {"kind": value}
        if not isinstance(value, dict):
            raise ValueError("must be a mapping with a key `kind`")

        settings = cast(dict[str, Any], value)
        kind = settings.get("kind", self.default)
        if not isinstance(kind, str):
            raise ValueError(f"needs a key `kind`, one of {', '.join(kind_names(self.package))}")

        # Through JSON, as the whole recipe is read: a strict class takes a list for a tuple and
        # text for a path only there.
        try:
            config_class = kind_config(self.package, kind, base)
            return config_class.model_validate_json(to_json({**settings, "kind": kind}))
        except ValidationError as error:
            raise NestedErrors(error.errors()) from None
        except ConfigError as error:
            raise ValueError(str(error)) from None

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The schema that editors complete recipes with: one alternative for each kind that ships,
        and one for modules of the user.
        """
        options: list[Any] = []
        for name in kind_names(self.package):
            option = _inline(kind_config(self.package, name).model_json_schema())
            option["properties"]["kind"] = {"const": name}
            option["required"] = ["kind"]
            options.append(option)

        # A module or file of the user, whose settings are not known here: its name has a dot.
        users_module = {
            "type": "object",
            "properties": {"kind": {"type": "string", "pattern": r"\."}},
            "required": ["kind"],
        }
        return {"anyOf": [*options, users_module]}


def one_or_more(value: Any) -> Any:
    """A single entry of a list of kinds is a list of one; a strict section takes no list for a
    tuple."""
    if isinstance(value, (str, dict, KindConfig)):
        return (value,)
    if isinstance(value, list):
        return tuple(cast(list[Any], value))
    return value


def _inline(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its references expanded, so that it can be nested in another one."""
    definitions: dict[str, Any] = schema.pop("$defs", {})

    def walk(node: Any) -> Any:
        if isinstance(node, list):
            return [walk(item) for item in cast(list[Any], node)]
        if not isinstance(node, dict):
            return node

        mapping = cast(dict[str, Any], node)
        target = str(mapping.get("$ref", "")).removeprefix("#/$defs/")
        if target in definitions:
            # Keys beside the reference, such as a default, win over those of the definition.
            siblings = {key: value for key, value in mapping.items() if key != "$ref"}
            mapping = {**definitions[target], **siblings}
        return {key: walk(value) for key, value in mapping.items()}

    return cast(dict[str, Any], walk(schema))
