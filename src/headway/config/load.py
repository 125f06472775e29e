"""A recipe comes in as YAML 1.2 plus `section.key=value` overrides; a frozen config model goes out, or one line per mistake.

Each mistake names the key, the value, what is expected, a similar name if there is one, and the line of the file.
"""

import copy
import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML

from headway.config.kinds import KindConfig, KindIn, NestedErrors, kind_config, kind_names
from headway.config.regular_file import regular_only
from headway.config.section import ALTERNATIVES, Overlay, Section
from headway.config.shipped import find_recipe
from headway.config.user_code import is_file_name
from headway.config.yaml_reader import MAX_BYTES, Where, parse_yaml
from headway.errors import ConfigError

S = TypeVar("S", bound=Section)
Loc = tuple[Any, ...]
Translate = Callable[[str, Any, bool], str | None]
"""An unknown key, its value, whether it is inside a section -> what to write instead; None if it is no known name of another system."""
LONGEST_LINE = 800
MODULE_KEYS = ("kind", "family", "objective", "optim", "hook", "format")
"""Keys whose dotted value names a user's module; without a dot it is a file of headway."""
NAMES_DATA = re.compile(r"(stages\.\d+\.)?data\.(train|valid)")
"""Keys whose value may be the path of data."""
FUNCTION_KEYS = ("function", "state")
"""Keys whose value is module:function."""


def load(
    schema: type[S],
    path: Path | None = None,
    overrides: Sequence[str] = (),
    say: Callable[[str], object] = str,
    translate: Translate | None = None,
) -> S:
    """Read a recipe file (or none), apply overrides and validate.

    `say` receives a line for the keys of the file that an override removes. `translate` knows names of other systems.
    """
    where: Where = {}
    data: dict[str, Any] = {}
    if path is not None:
        data = read_yaml(find_recipe(path, say), where)
    for note in apply_overrides(schema, data, overrides, where):
        say(note)
    return validate(schema, data, where, translate)


def apply_overrides(
    schema: type[Section], data: dict[str, Any], overrides: Sequence[str], where: Where
) -> list[str]:
    """Apply overrides to the raw recipe and remove what they replace; returns a line for each removal."""
    before = copy.deepcopy(data)
    given = [apply_override(data, override, where) for override in in_order(overrides)]
    notes = list(replace_alternatives(data, given, where))
    return notes + list(leave_out_other_kinds(schema, before, data, given))


def replace_alternatives(data: dict[str, Any], given: Sequence[Loc], where: Where) -> Iterator[str]:
    """An override replaces the alternative keys of the file: batch.rows removes batch.tokens. Yields a line for each."""
    for loc in given:
        node = node_at(data, loc[:-1])
        alternatives = next(
            (ways for ways in ALTERNATIVES if any(loc[-1] in way for way in ways)), ()
        )
        if not isinstance(node, dict) or node.get(loc[-1]) is None:
            continue
        for key in (key for way in alternatives if loc[-1] not in way for key in way):
            other = (*loc[:-1], key)
            if node.get(key) is not None and other not in given:
                at = where.get(other, "the recipe")
                yield f"{'.'.join(map(str, loc))}={node[loc[-1]]} replaces {'.'.join(map(str, other))}={node.pop(key)} of {at}"


def leave_out_other_kinds(
    schema: type[BaseModel], before: Any, data: dict[str, Any], given: Sequence[Loc]
) -> Iterator[str]:
    """An override that changes a `kind` removes the recipe's settings that belong to the other kind. Yields a line for each such kind.

    `before` is the recipe without overrides. Settings that were given as overrides stay, and so does what is wrong for the old kind, too:
    validation reports them.
    """
    for loc in given:
        section = node_at(data, loc[:-1])
        old_section = node_at(before, loc[:-1])
        kinded = _kinded_field(schema, loc[:-1])
        if (
            loc[-1] != "kind"
            or kinded is None
            or not isinstance(section, dict)
            or not isinstance(old_section, dict)
        ):
            continue
        old_kind = old_section.get("kind", kinded.default)
        new_kind = section.get("kind")
        if old_kind == new_kind or not isinstance(old_kind, str) or not isinstance(new_kind, str):
            continue
        try:
            old_config = kind_config(kinded.package, old_kind)
            new_config = kind_config(kinded.package, new_kind)
        except ConfigError:
            continue  # an unknown kind, which validation explains
        fixed = {path[len(loc) - 1 :] for path in given if path[: len(loc) - 1] == loc[:-1]}
        wrong_before = _wrong_keys(old_config, old_section)
        removed: list[str] = []
        for path in _keys_of_other_kind(old_config, new_config, kinded.base, section):
            is_given = any(
                path[: len(override)] == override or override[: len(path)] == path
                for override in fixed
            )
            if is_given or path in wrong_before:
                continue
            value = node_at(section, path[:-1]).pop(path[-1])
            removed.append(f"{'.'.join(map(str, path))}={json.dumps(value)}")
        if removed:
            name = ".".join(map(str, loc))
            verb = "is" if len(removed) == 1 else "are"
            yield f"{name}={new_kind} leaves out {', '.join(removed)} of the recipe, which {verb} for {old_kind}"


def _keys_of_other_kind(
    old: type[KindConfig], new: type[KindConfig], base: type[BaseModel], section: dict[str, Any]
) -> list[Loc]:
    """The settings of a section that its new kind does not have, or has with another meaning: its own default differs from the old kind's.

    A setting of the base class means the same for all kinds.
    """
    paths = list(_wrong_keys(new, section))
    for key in section:
        if key in base.model_fields or key not in old.model_fields or key not in new.model_fields:
            continue
        if old.model_fields[key].default != new.model_fields[key].default:
            paths.append((key,))
    return paths


def _wrong_keys(config: type[BaseModel], section: dict[str, Any]) -> dict[Loc, None]:
    """The keys of a section that a kind does not know, or whose value it refuses by a word or a rule of its own."""
    section = copy.deepcopy(section)
    wrong: dict[Loc, None] = {}
    while paths := _refused_paths(config, section):
        for path in paths:
            node_at(section, path[:-1]).pop(path[-1])
            wrong[path] = None
    return wrong


def _refused_paths(config: type[BaseModel], section: dict[str, Any]) -> list[Loc]:
    """Keys that a kind's first check refuses. Rules about several keys are checked only after all keys are known."""
    errors = _errors(config, section)
    paths = [
        loc
        for loc, reason in errors
        if reason in ("extra_forbidden", "literal_error") and _is_key(section, loc)
    ]
    if paths:
        return paths
    for loc, reason in errors:
        below = node_at(section, loc)
        for key in below if reason == "value_error" and isinstance(below, dict) else ():
            without = copy.deepcopy(section)
            del node_at(without, loc)[key]
            if (loc, reason) not in _errors(config, without):
                return [(*loc, key)]
    return []


def _is_key(section: dict[str, Any], loc: Loc) -> bool:
    """Whether a path ends in a key of a mapping; the path of an error may also pass through the members of a union."""
    holder = node_at(section, loc[:-1])
    return isinstance(holder, dict) and loc[-1] in holder


def _errors(config: type[BaseModel], section: dict[str, Any]) -> list[tuple[Loc, str]]:
    """Place and type of everything that a kind refuses in a section."""
    try:
        config.model_validate_json(json.dumps(section))
    except ValidationError as error:
        return [(one["loc"], one["type"]) for one in error.errors()]
    except ValueError:
        pass  # a number that JSON does not have, which validation explains
    return []


@dataclass(frozen=True)
class _Kinded:
    """A place of the schema whose settings depend on their `kind`."""

    package: str
    default: str | None
    base: type[BaseModel]


def _kinded_field(schema: type[BaseModel], loc: Loc) -> _Kinded | None:
    """The kinds that a section at a path of the schema may have; None if it has none."""
    current = schema
    for index, part in enumerate(loc):
        if isinstance(part, int):
            continue
        if issubclass(current, Overlay) and part not in current.model_fields:
            current = schema
        field = next((f for n, f in current.model_fields.items() if part in (n, f.alias)), None)
        if field is None:
            return None
        mark = next(
            (mark for mark in field.metadata if isinstance(mark, KindIn)),
            _kind_mark(field.annotation),
        )
        below = _classes(field.annotation)
        if mark is not None:
            # The section itself, or one of a list or mapping of sections.
            return _Kinded(mark.package, mark.default, below[0]) if len(loc) - index <= 2 else None
        if not below:
            return None
        current = below[0]
    return None


def node_at(data: Any, loc: Loc) -> Any:
    """The value at a path; None if a later override removed it."""
    for part in loc:
        if (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        ):
            data = data[part]
        else:
            return None
    return data


def read_plain(path: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """A recipe file with its overrides as plain data; imports none of the modules it names."""
    data = read_yaml(path) if path is not None else {}
    for override in in_order(overrides):
        apply_override(data, override, {})
    return data


def in_order(overrides: Sequence[str]) -> list[str]:
    """Overrides with the data before its settings, so that `data.train.0.limit=50 data.train=FILE` and its reverse mean the same.

    Everywhere else, and for null, the last one wins: a section replaces what was set in it before.
    """
    ordered: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        first_part = len(ordered)
        if NAMES_DATA.fullmatch(key.strip()) and value.strip() not in ("", "null", "~"):
            parts = (
                index
                for index, other in enumerate(ordered)
                if other.lstrip().startswith(f"{key.strip()}.")
            )
            first_part = next(parts, first_part)
        ordered.insert(first_part, override)
    return ordered


def read_yaml(path: Path, where: Where | None = None) -> dict[str, Any]:
    """Parse one YAML 1.2 file, or a shipped recipe by its name, into plain Python; the line of every key goes into `where`."""
    path = find_recipe(path)
    try:
        with open(path, encoding="utf-8", opener=regular_only) as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}.") from None
    tree = parse_yaml(text, str(path), where)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path}: a recipe is a mapping of sections, not a {type(tree).__name__}."
        )
    return cast(dict[str, Any], tree)


def apply_override(data: dict[str, Any], override: str, where: Where) -> Loc:
    """Apply one `section.key=value` to the raw recipe, with the value read as YAML; returns the path of the key."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"override {_shortened(override)!r} is not of the form section.key=value, e.g. optim.lr=3e-4."
        )
    shown = repr(_shortened(override))
    try:
        value = parse_yaml(text, "value") if text.strip() else ""
    except ConfigError as error:
        raise ConfigError(
            f"override {shown}: {str(error).partition(': ')[2]} Quote it if it is text, e.g. '{key[:60]}=\"...\"'."
        ) from None
    return set_value(data, key, value, override, where)


def key_parts(key: str) -> list[Any]:
    """`data.train.0.path` as its names and indices."""
    return [
        int(part) if part.isascii() and part.isdecimal() and len(part) < 10 else part
        for part in key.strip().split(".")
    ]


def write_out_sources(data: dict[str, Any], parts: list[Any]) -> list[Any]:
    """Give the sources on the way to a key their long form in the raw recipe: `train: FILE` becomes `train: [{path: FILE}]`.

    Returns the key. With `valid: FILE`, which is one set, `data.valid.0.limit` gets the name of that set.
    """
    start = 2 if parts[0] == "stages" else 0
    if parts[start : start + 1] != ["data"]:
        return parts
    holder = node_at(data, tuple(parts[:start]))
    section = holder.setdefault("data", {}) if isinstance(holder, dict) else None
    if not isinstance(section, dict):
        return parts
    name, *below = parts[start + 1 :] or [None]
    if name == "train" and below:
        section["train"] = _long_form(section.get("train"), below)
    elif name == "valid" and below:
        valid: Any = section.get("valid")
        if isinstance(valid, str):
            valid = section["valid"] = {"sets": valid}
        sets: Any = valid.get("sets") if isinstance(valid, dict) else None
        if isinstance(sets, str):
            sets = valid["sets"] = {set_name(sets): sets}
        if isinstance(sets, dict) and len(sets) == 1 and isinstance(below[0], int):
            below = ["sets", *sets, *below]
            parts = [*parts[: start + 2], *below]
        if isinstance(sets, dict) and below[0] == "sets" and len(below) > 2:
            sets[below[1]] = _long_form(sets.get(below[1]), below[2:])
    return parts


def _long_form(sources: Any, below: Sequence[Any]) -> Any:
    """Sources in the form in which the key `below` them can be set: a list of mappings, or one mapping."""
    if not isinstance(below[0], int):
        return {"path": sources} if isinstance(sources, str) else sources
    if sources is None:
        sources = [{}]
    if not isinstance(sources, list):
        sources = [sources]
    index = below[0]
    if len(below) > 1 and index < len(sources) and isinstance(sources[index], str):
        sources[index] = {"path": sources[index]}
    return sources


def set_name(path: str) -> str:
    """The name of the validation set in a file: the file's, up to the first dot."""
    return path.rstrip("/").rpartition("/")[2].split(".")[0] or "valid"


def set_value(data: dict[str, Any], key: str, value: Any, override: str, where: Where) -> Loc:
    """Set the value at a dotted key of the raw recipe; errors quote `override`. Returns the path of the key."""
    shown = repr(_shortened(override))
    parts = write_out_sources(data, key_parts(key))
    node: Any = data
    for depth, part in enumerate(parts[:-1]):
        if isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
            continue
        if isinstance(node, list):
            raise ConfigError(
                f"override {shown}: {'.'.join(map(str, parts[:depth]))} is a list of length {len(node)}; use an index below {len(node)}."
            )
        if not isinstance(node, dict):
            raise ConfigError(
                f"override {shown}: {'.'.join(map(str, parts[:depth]))} is not a mapping, so it has no keys. Override it as a whole."
            )
        if not isinstance(node.get(part), (dict, list)):
            was = node.get(part)
            node[part] = {"kind": was} if isinstance(was, str) else {}
        node = node[part]
    last = parts[-1]
    if not isinstance(node, (dict, list)):
        holder = ".".join(map(str, parts[:-1]))
        raise ConfigError(
            f"override {shown}: {holder} is {node!r}, which has no keys. Write it as a mapping."
        )
    if isinstance(node, list) and (not isinstance(last, int) or last >= len(node)):
        raise ConfigError(
            f"override {shown}: {'.'.join(map(str, parts[:-1]))} is a list of length {len(node)}; use an index below {len(node)}."
        )
    node[last] = value
    where[tuple(parts)] = f"override {_shortened(override)}"
    return tuple(parts)


def validate(
    schema: type[S],
    data: Mapping[str, Any],
    where: Where | None = None,
    translate: Translate | None = None,
) -> S:
    """Validate plain data in JSON mode (lists become tuples, text becomes paths) or raise a ConfigError that lists every mistake."""
    try:
        return schema.model_validate_json(json.dumps(data, allow_nan=False))
    except ValueError as error:
        if not isinstance(error, ValidationError):
            raise ConfigError(f"recipe: {error}.") from None
        lines = [
            _shortened(_explain(one, schema, where or {}, data, translate))
            for one in _flatten(error.errors())
        ]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _shortened(line: str) -> str:
    """The line, with the middle of a very long value left out."""
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 205]} ... {line[-200:]}"


def _flatten(errors: list[Any]) -> list[Any]:
    flat: list[Any] = []
    for one in errors:
        inner = one.get("ctx", {}).get("error")
        if isinstance(inner, NestedErrors):
            flat += [
                {**below, "loc": (*one["loc"], *below["loc"])} for below in _flatten(inner.errors)
            ]
        else:
            flat.append(one)
    return flat


def _explain(
    error: Any,
    schema: type[BaseModel],
    where: Where,
    data: Any = None,
    translate: Translate | None = None,
) -> str:
    loc = tuple(
        part
        for part in error["loc"]
        if not (isinstance(part, str) and part.startswith(("function-", "tagged-", "constrained-")))
    )
    place = next((where[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in where), "")
    if not place and loc:  # the error concerns the whole section: name any line of it
        place = next((at for key, at in where.items() if key[: len(loc)] == loc), "")
    key = ".".join(map(str, loc)) or "recipe"
    prefix = f"{place}: " if place else ""
    if error["type"] == "extra_forbidden":
        translated = (
            None if translate is None else translate(str(loc[-1]), error.get("input"), len(loc) > 1)
        )
        if translated is not None:
            return f"{prefix}{key} is not a setting; {translated}"
        return f"{prefix}{key} is not a setting; {_known_key_hint(schema, loc, data)}"
    message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message = message if message.endswith("?") else message.rstrip(".") + "."
    if error["type"] == "missing":
        return f"{prefix}{key} is missing; set it in the recipe or as an override."
    if error["type"] in ("value_error", "assertion_error"):
        return f"{prefix}{key + ' ' if loc and not message.startswith(str(key)) else ''}{message}"
    value = json.dumps(error.get("input"), default=str)
    value = value if len(value) <= 60 else value[:57] + "..."
    message = message[0].lower() + message[1:]
    message = message.replace("input should", "it should")
    if len(loc) == 1 and translate is not None and isinstance(error.get("input"), str):
        # A word where a section is expected, such as model=Qwen/Qwen2.5-0.5B.
        translated = translate(key, error["input"], False)
        if translated is not None:
            message = translated
    return f"{prefix}{key} is {value}; {message}"


def _known_key_hint(schema: type[BaseModel], loc: Loc, data: Any) -> str:
    """What to write instead of an unknown key: a similar one, or all that exist there."""
    owner = ".".join(map(str, loc[:-1])) or "a recipe"
    known = _keys(schema, loc[:-1])
    section = node_at(data, loc[:-1])
    if loc[-1] in known and isinstance(section, dict) and isinstance(section.get("kind"), str):
        # Another kind has it, so that a similar name does not help.
        kinded = _kinded_field(schema, loc[:-1])
        if kinded is not None:
            owner = f"{owner}.kind {section['kind']}"
            known = list(kind_config(kinded.package, section["kind"]).model_fields)
            return f"{owner} takes {', '.join(known)}."
    if len(loc) == 1:
        homes = _homes(schema, str(loc[0]))
        if 0 < len(homes) <= 3:
            return f"did you mean {' or '.join(map(repr, homes))}?"
    near = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    if known:
        return f"{owner} takes {', '.join(known)}."
    return "remove it."


def _homes(schema: type[BaseModel], key: str) -> list[str]:
    """Where a setting that was given without its section exists: the paths of the outermost sections that have it."""
    level: list[tuple[str, type[BaseModel]]] = [("", schema)]
    for _ in range(3):
        below = [
            (f"{prefix}{field.alias or name}.", section)
            for prefix, owner in level
            for name, field in owner.model_fields.items()
            # Elements of lists have an index in their paths, and stages have all sections once more.
            for section in _plain_sections(field.annotation)
        ]
        homes = [
            prefix + key
            for prefix, section in below
            if any(key in (name, field.alias) for name, field in section.model_fields.items())
        ]
        if homes:
            return homes
        level = below
    return []


def _plain_sections(annotation: Any) -> list[type[BaseModel]]:
    """The section that an annotation is, alone or beside None and other values."""
    members = (annotation,)
    if get_origin(annotation) in (Union, UnionType):
        members = get_args(annotation)
    return [member for member in members if _is_section(member)]


def _keys(schema: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    """The settings that exist at a path of the schema, for 'did you mean'."""
    current: type[BaseModel] = schema
    for part in loc:
        if isinstance(part, int):
            continue
        if issubclass(current, Overlay) and part not in current.model_fields:
            current = schema
        field = next((f for n, f in current.model_fields.items() if part in (n, f.alias)), None)
        if field is None:
            return []
        mark = next(
            (mark for mark in field.metadata if isinstance(mark, KindIn)),
            _kind_mark(field.annotation),
        )
        if mark is not None:
            return _all_kind_keys(mark.package)
        below = _classes(field.annotation)
        if not below:
            return []
        current = below[0]
    if issubclass(current, Overlay):
        return [*current.model_fields, *(f.alias or n for n, f in schema.model_fields.items())]
    return [f.alias or n for n, f in current.model_fields.items()]


def _is_section(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, BaseModel)


def _all_kind_keys(package: str) -> list[str]:
    return sorted(
        {key for name in kind_names(package) for key in kind_config(package, name).model_fields}
    )


def _kind_mark(annotation: Any) -> KindIn | None:
    for mark in getattr(annotation, "__metadata__", ()):
        if isinstance(mark, KindIn):
            return mark
    return next(
        (mark for a in getattr(annotation, "__args__", ()) if (mark := _kind_mark(a)) is not None),
        None,
    )


def _classes(annotation: Any) -> list[type[BaseModel]]:
    if _is_section(annotation):
        return [annotation]
    return [c for a in getattr(annotation, "__args__", ()) for c in _classes(a)]


def dump_yaml(config: BaseModel | Mapping[str, Any], *, only_given: bool = False) -> str:
    """The resolved config as YAML, as printed by `config show` and stored in a run folder; `only_given` leaves out defaults."""
    from io import StringIO

    out = StringIO()
    yaml = YAML()
    yaml.default_flow_style = None
    yaml.width = 120
    data = (
        config.model_dump(mode="json", by_alias=True, exclude_unset=only_given)
        if isinstance(config, BaseModel)
        else dict(config)
    )
    yaml.dump(data, out)
    return out.getvalue()


@dataclass(frozen=True)
class ExternalCode:
    """One module, function or program outside headway that a recipe names."""

    key: str
    action: str
    is_imported: bool
    """Whether it is imported when the recipe is loaded. A program is only started by a run."""
    module: str | None = None
    """The module's dotted name, or the path of a file."""

    def __str__(self) -> str:
        return f"{self.key} {self.action}"


def find_external_code(data: Any, at: str = "") -> Iterator[ExternalCode]:
    """All code outside headway that a recipe names, found in its plain data without importing anything."""
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, value in items:
        place = f"{at}.{key}" if at else str(key)
        is_listed = isinstance(key, int)
        if isinstance(value, str):
            if "." in value and (key in MODULE_KEYS or (is_listed and at.endswith("track"))):
                yield ExternalCode(
                    place,
                    f"imports the {'file' if is_file_name(value) else 'module'} {value}",
                    True,
                    value,
                )
            elif ":" in value and (
                key in FUNCTION_KEYS or (is_listed and at.endswith("callbacks"))
            ):
                yield ExternalCode(place, f"calls {value}", True, value.rpartition(":")[0])
        elif key == "command" and isinstance(value, list):
            yield ExternalCode(place, f"starts {' '.join(map(str, value))}", False)
        else:
            yield from find_external_code(value, place)
