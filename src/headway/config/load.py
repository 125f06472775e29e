"""A recipe comes in as YAML 1.2 plus `section.key=value` overrides; a frozen config model goes out,
or one line per mistake.

    file -> parse_yaml -> plain dict -> apply_overrides -> validate -> Recipe
              |                            |                  |
              +---- `where`: path of a key -> its line -------+-> "recipe.yaml:7: optim.lr is ..."

Until `validate`, a recipe is plain data (dict, list, str, numbers): overrides and stages are merged
before any rule is checked, so that a rule sees only the final values.

Each mistake names the key, the value, what is expected, a similar name if there is one, and the
line of the file.
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
from pydantic.fields import FieldInfo
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
"""A path in a recipe: names of keys and indices of lists, `("data", "train", 0, "path")`."""
Translate = Callable[[str, Any, bool], str | None]
"""An unknown key, its value, whether it is inside a section -> what to write instead; None if it is
no known name of another system.
"""
LONGEST_LINE = 800
"""Characters of one reported mistake."""
SHOWN_VALUE = 60
"""Characters of a wrong value that its message quotes."""
SEARCHED_LEVELS = 3
"""How deep a setting without its section is looked for."""
MAX_SUGGESTED = 3
"""A hint with more paths than this would help nobody."""
MODULE_KEYS = ("kind", "family", "objective", "optim", "hook", "format")
"""Keys whose value names a user's module if it has a dot; without one it is a kind of headway."""
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

    `say` receives a line for each key of the file that an override removes; by default (`str`,
    whose result nobody uses) nothing is said. `translate` knows names of other systems.
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
    """Apply overrides to the raw recipe and remove what they replace.

    Returns a line for each removal.
    """
    before = copy.deepcopy(data)
    override_locs = [apply_override(data, override, where) for override in in_order(overrides)]

    notes = list(replace_alternatives(data, override_locs, where))
    notes += leave_out_other_kinds(schema, before, data, override_locs)
    return notes


def replace_alternatives(
    data: dict[str, Any], override_locs: Sequence[Loc], where: Where
) -> Iterator[str]:
    """An override replaces the alternative keys of the file: batch.rows removes batch.tokens.

    Yields a line for each.
    """
    for loc in override_locs:
        key = loc[-1]
        section = node_at(data, loc[:-1])
        # An override to null removes a setting; it does not choose it over another.
        if not isinstance(section, dict) or section.get(key) is None:
            continue

        # Each entry of ALTERNATIVES is several ways to say one thing; a way is the keys it needs.
        alternatives = next((ways for ways in ALTERNATIVES if any(key in way for way in ways)), ())
        other_keys = [other for way in alternatives if key not in way for other in way]
        for other in other_keys:
            other_loc = (*loc[:-1], other)
            # Two overrides that exclude each other both stay: validation reports them.
            if section.get(other) is None or other_loc in override_locs:
                continue
            origin = where.get(other_loc, "the recipe")
            removed = section.pop(other)
            yield (
                f"{_dotted(loc)}={section[key]} replaces {_dotted(other_loc)}={removed} of {origin}"
            )


def leave_out_other_kinds(
    schema: type[BaseModel], before: Any, data: dict[str, Any], override_locs: Sequence[Loc]
) -> Iterator[str]:
    """An override that changes a `kind` removes the recipe's settings that belong to the other
    kind. Yields a line for each such kind.

    `before` is the recipe without overrides. Settings that were given as overrides stay, and so
    does what is wrong for the old kind, too: validation reports them.
    """
    for loc in override_locs:
        if loc[-1] != "kind":
            continue
        section_loc = loc[:-1]
        section = node_at(data, section_loc)
        old_section = node_at(before, section_loc)
        kinded = _kinded_field(schema, section_loc)
        if kinded is None or not isinstance(section, dict) or not isinstance(old_section, dict):
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

        # Overrides below this section, as paths relative to it.
        depth = len(section_loc)
        overrides = {path[depth:] for path in override_locs if path[:depth] == section_loc}
        wrong_before = _wrong_keys(old_config, old_section)
        removed: list[str] = []
        for path in _keys_of_other_kind(old_config, new_config, kinded.base, section):
            # An override of a key, of a section above it, or of a key below it.
            is_overridden = any(
                path[: len(override)] == override or override[: len(path)] == path
                for override in overrides
            )
            if is_overridden or path in wrong_before:
                continue
            value = node_at(section, path[:-1]).pop(path[-1])
            removed.append(f"{_dotted(path)}={json.dumps(value)}")

        if removed:
            verb = "is" if len(removed) == 1 else "are"
            yield (
                f"{_dotted(loc)}={new_kind} leaves out {', '.join(removed)} of the recipe, "
                f"which {verb} for {old_kind}"
            )


def _dotted(loc: Sequence[Any]) -> str:
    """A path as people write it: data.train.0.path."""
    return ".".join(map(str, loc))


def _keys_of_other_kind(
    old: type[KindConfig], new: type[KindConfig], base: type[BaseModel], section: dict[str, Any]
) -> list[Loc]:
    """The settings of a section that its new kind does not have, or has with another meaning, which
    shows in another default.

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
    """The keys of a section that a kind does not know, or whose value it refuses: the value is not
    in its list of words (`Literal`), or breaks a rule about several keys.

    Keys are removed and the rest is checked again until nothing is refused: pydantic checks rules
    about several keys only when all keys are known. The dict is an ordered set.
    """
    section = copy.deepcopy(section)
    wrong: dict[Loc, None] = {}
    while paths := _refused_paths(config, section):
        for path in paths:
            node_at(section, path[:-1]).pop(path[-1])
            wrong[path] = None
    return wrong


def _refused_paths(config: type[BaseModel], section: dict[str, Any]) -> list[Loc]:
    """Keys that a kind's check refuses now; more may follow once these are removed."""
    errors = _errors(config, section)
    paths = [
        loc
        for loc, reason in errors
        if reason in ("extra_forbidden", "literal_error") and _is_key(section, loc)
    ]
    if paths:
        return paths

    # A rule about several keys names their section only. The key to blame is the first one
    # without which the rule is satisfied.
    for loc, reason in errors:
        subsection = node_at(section, loc)
        if reason != "value_error" or not isinstance(subsection, dict):
            continue
        for key in subsection:
            without = copy.deepcopy(section)
            del node_at(without, loc)[key]
            if (loc, reason) not in _errors(config, without):
                return [(*loc, key)]

    return []


def _is_key(section: dict[str, Any], loc: Loc) -> bool:
    """Whether a path ends in a key of a mapping.

    The path of an error may also pass through the members of a union.
    """
    holder = node_at(section, loc[:-1])
    return isinstance(holder, dict) and loc[-1] in holder


def _errors(config: type[BaseModel], section: dict[str, Any]) -> list[tuple[Loc, str]]:
    """Place and type of everything that a kind refuses in a section."""
    try:
        config.model_validate_json(json.dumps(section))
    except ValidationError as error:
        return [(details["loc"], details["type"]) for details in error.errors()]
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
        field = _field(schema, current, part)
        if field is None:
            return None

        mark = _field_mark(field)
        subsections = _classes(field.annotation)
        if mark is not None:
            # The section itself (nothing follows in the path), or one of a list or mapping of
            # sections (its index or name follows). Anything longer is inside a kind's settings.
            if len(loc) - index <= 2:
                return _Kinded(mark.package, mark.default, subsections[0])
            return None
        if not subsections:
            return None
        current = subsections[0]
    return None


def _field(schema: type[BaseModel], section: type[BaseModel], key: Any) -> FieldInfo | None:
    """The field of a section that a recipe writes as `key`; None if there is none."""
    # A stage may contain every setting of the recipe besides its own fields.
    if issubclass(section, Overlay) and key not in section.model_fields:
        section = schema
    for name, field in section.model_fields.items():
        if key in (name, field.alias):
            return field
    return None


def _field_mark(field: FieldInfo) -> KindIn | None:
    """The mark of a field whose settings depend on their kind.

    Pydantic moves the metadata of `Annotated[X, mark]` to the field; inside a list or a union it
    stays in the annotation.
    """
    for mark in field.metadata:
        if isinstance(mark, KindIn):
            return mark
    return _kind_mark(field.annotation)


def node_at(data: Any, loc: Loc) -> Any:
    """The value at a path; None if a later override removed it."""
    node = data
    for part in loc:
        is_key = isinstance(node, dict) and part in node
        is_index = isinstance(node, list) and isinstance(part, int) and part < len(node)
        if not is_key and not is_index:
            return None
        node = node[part]
    return node


def read_plain(path: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """A recipe file with its overrides as plain data; imports none of the modules it names."""
    data = {}
    if path is not None:
        data = read_yaml(path)
    for override in in_order(overrides):
        apply_override(data, override, {})
    return data


def in_order(overrides: Sequence[str]) -> list[str]:
    """Overrides with the data before its settings.

    So `data.train.0.limit=50 data.train=FILE` and its reverse mean the same. Everywhere else, and
    for null, the last one wins: a section replaces what was set in it before.
    """
    ordered: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        position = len(ordered)
        if NAMES_DATA.fullmatch(key.strip()) and value.strip() not in ("", "null", "~"):
            for index, earlier in enumerate(ordered):
                if earlier.lstrip().startswith(f"{key.strip()}."):
                    position = index
                    break

        ordered.insert(position, override)

    return ordered


def read_yaml(path: Path, where: Where | None = None) -> dict[str, Any]:
    """Parse one YAML 1.2 file, or a shipped recipe by its name, into plain Python; the line of
    every key goes into `where`.
    """
    path = find_recipe(path)
    try:
        with open(path, encoding="utf-8", opener=regular_only) as file:
            # One byte more than the limit, so that parse_yaml sees that the file is too large.
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
    """Apply one `section.key=value` to the raw recipe, with the value read as YAML.

    Returns the path of the key.
    """
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"override {_shortened(override)!r} is not of the form "
            "section.key=value, e.g. optim.lr=3e-4."
        )

    shown = repr(_shortened(override))
    try:
        # `key=` is empty text. YAML would read it as null, which removes a setting.
        value = ""
        if text.strip():
            value = parse_yaml(text, "value")
    except ConfigError as error:
        # Without the "value:1: " that parse_yaml puts in front.
        problem = str(error).partition(": ")[2]
        raise ConfigError(
            f"override {shown}: {problem} Quote it if it is text, e.g. '{key[:60]}=\"...\"'."
        ) from None

    return set_value(data, key, value, override, where)


def key_parts(key: str) -> list[Any]:
    """`data.train.0.path` as its names and indices."""
    parts: list[Any] = []
    for part in key.strip().split("."):
        # isdecimal alone also accepts digits of other scripts; a longer number is no index.
        is_index = part.isascii() and part.isdecimal() and len(part) < 10
        parts.append(int(part) if is_index else part)
    return parts


def write_out_sources(data: dict[str, Any], parts: list[Any]) -> list[Any]:
    """Give the sources above a key their long form in the raw recipe.

    `train: FILE` becomes `train: [{path: FILE}]`, so that `data.train.0.limit` has a place to be
    set at. Returns the key. With `valid: FILE`, which is one set, `data.valid.0.limit` gets the
    name of that set.
    """
    # A stage has its own data: stages.INDEX.data.
    start = 2 if parts[0] == "stages" else 0
    if parts[start : start + 1] != ["data"]:
        return parts

    holder = node_at(data, tuple(parts[:start]))
    section = None
    if isinstance(holder, dict):
        section = holder.setdefault("data", {})
    if not isinstance(section, dict):
        return parts

    name, *subkey = parts[start + 1 :] or [None]
    if name == "train" and subkey:
        section["train"] = _long_form(section.get("train"), subkey)
        return parts
    if name != "valid" or not subkey:
        return parts

    # valid: FILE -> valid: {sets: FILE} -> valid: {sets: {NAME: FILE}}
    valid: Any = section.get("valid")
    if isinstance(valid, str):
        valid = section["valid"] = {"sets": valid}
    sets: Any = None
    if isinstance(valid, dict):
        sets = valid.get("sets")
    if isinstance(sets, str):
        sets = valid["sets"] = {set_name(sets): sets}
    if not isinstance(sets, dict):
        return parts

    if len(sets) == 1 and isinstance(subkey[0], int):
        subkey = ["sets", *sets, *subkey]
        parts = [*parts[: start + 2], *subkey]
    if subkey[0] == "sets" and len(subkey) > 2:
        sets[subkey[1]] = _long_form(sets.get(subkey[1]), subkey[2:])
    return parts


def _long_form(sources: Any, subkey: Sequence[Any]) -> Any:
    """Sources as a list of mappings, or as one mapping: the form in which `subkey` can be set."""
    if not isinstance(subkey[0], int):
        if isinstance(sources, str):
            return {"path": sources}
        return sources

    if sources is None:
        sources = [{}]
    if not isinstance(sources, list):
        sources = [sources]

    index = subkey[0]
    if len(subkey) > 1 and index < len(sources) and isinstance(sources[index], str):
        sources[index] = {"path": sources[index]}
    return sources


def set_name(path: str) -> str:
    """The name of the validation set in a file: the file's, up to the first dot."""
    return path.rstrip("/").rpartition("/")[2].split(".")[0] or "valid"


def set_value(data: dict[str, Any], key: str, value: Any, override: str, where: Where) -> Loc:
    """Set the value at a dotted key of the raw recipe; errors quote `override`.

    Sections on the way are created. Returns the path of the key.
    """
    shown = repr(_shortened(override))
    parts = write_out_sources(data, key_parts(key))

    node: Any = data
    for depth, part in enumerate(parts[:-1]):
        if isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
            continue
        if isinstance(node, list):
            raise ConfigError(
                f"override {shown}: {_dotted(parts[:depth])} is a list of length {len(node)}; "
                f"use an index below {len(node)}."
            )
        if not isinstance(node, dict):
            raise ConfigError(
                f"override {shown}: {_dotted(parts[:depth])} is not a mapping, so it has no keys. "
                "Override it as a whole."
            )

        subsection = node.get(part)
        if isinstance(subsection, str):
            # The short form of a section with a kind: `optim: muon`.
            node[part] = {"kind": subsection}
        elif not isinstance(subsection, (dict, list)):
            node[part] = {}
        node = node[part]

    last = parts[-1]
    if not isinstance(node, (dict, list)):
        raise ConfigError(
            f"override {shown}: {_dotted(parts[:-1])} is {node!r}, which has no keys. "
            "Write it as a mapping."
        )
    if isinstance(node, list) and (not isinstance(last, int) or last >= len(node)):
        raise ConfigError(
            f"override {shown}: {_dotted(parts[:-1])} is a list of length {len(node)}; "
            f"use an index below {len(node)}."
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
    """Validate plain data in JSON mode (lists become tuples, text becomes paths) or raise a
    ConfigError that lists every mistake.
    """
    try:
        return schema.model_validate_json(json.dumps(data, allow_nan=False))
    except ValidationError as error:
        lines = [
            _shortened(_explain(details, schema, where or {}, data, translate))
            for details in _flatten(error.errors())
        ]
        # Two members of a union may report the same mistake.
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None
    except ValueError as error:
        # A number that JSON does not have, which json.dumps refuses.
        raise ConfigError(f"recipe: {error}.") from None


def _shortened(line: str) -> str:
    """The line, with the middle of a very long value left out."""
    if len(line) <= LONGEST_LINE:
        return line
    return f"{line[: LONGEST_LINE - 205]} ... {line[-200:]}"


def _flatten(errors: list[Any]) -> list[Any]:
    """Pydantic's errors, where those of a kind's settings replace the error that carries them."""
    flat: list[Any] = []
    for error in errors:
        carrier = error.get("ctx", {}).get("error")
        if not isinstance(carrier, NestedErrors):
            flat.append(error)
            continue
        for nested in _flatten(carrier.errors):
            flat.append({**nested, "loc": (*error["loc"], *nested["loc"])})
    return flat


def _explain(
    error: Any,
    schema: type[BaseModel],
    where: Where,
    data: Any = None,
    translate: Translate | None = None,
) -> str:
    """One of pydantic's errors as a line for the user."""
    # Pydantic puts the names of its inner validators into the path; a recipe does not have them.
    loc = tuple(
        part
        for part in error["loc"]
        if not (isinstance(part, str) and part.startswith(("function-", "tagged-", "constrained-")))
    )
    key = _dotted(loc) or "recipe"
    line = _line_of(loc, where)
    prefix = ""
    if line:
        prefix = f"{line}: "

    if error["type"] == "extra_forbidden":
        translated = None
        if translate is not None:
            translated = translate(str(loc[-1]), error.get("input"), len(loc) > 1)
        if translated is not None:
            return f"{prefix}{key} is not a setting; {translated}"
        return f"{prefix}{key} is not a setting; {_known_key_hint(schema, loc, data)}"

    if error["type"] == "missing":
        return f"{prefix}{key} is missing; set it in the recipe or as an override."

    message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if not message.endswith("?"):
        message = message.rstrip(".") + "."

    if error["type"] in ("value_error", "assertion_error"):
        # Rules of headway are whole sentences; some begin with the key.
        if loc and not message.startswith(key):
            message = f"{key} {message}"
        return prefix + message

    value = json.dumps(error.get("input"), default=str)
    if len(value) > SHOWN_VALUE:
        value = value[: SHOWN_VALUE - 3] + "..."
    message = message[0].lower() + message[1:]
    message = message.replace("input should", "it should")

    if len(loc) == 1 and translate is not None and isinstance(error.get("input"), str):
        # A word where a section is expected, such as model=Qwen/Qwen2.5-0.5B.
        translated = translate(key, error["input"], False)
        if translated is not None:
            message = translated
    return f"{prefix}{key} is {value}; {message}"


def _line_of(loc: Loc, where: Where) -> str:
    """Where a key was written: its own line, or that of the nearest section around it."""
    for length in range(len(loc), 0, -1):
        if loc[:length] in where:
            return where[loc[:length]]
    # The error concerns a section without a line, such as one that overrides created: name any
    # line in it.
    if loc:
        return next((line for key, line in where.items() if key[: len(loc)] == loc), "")
    return ""


def _known_key_hint(schema: type[BaseModel], loc: Loc, data: Any) -> str:
    """What to write instead of an unknown key: a similar one, or all that exist there."""
    owner = _dotted(loc[:-1]) or "a recipe"
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
        paths = _paths_with(schema, str(loc[0]))
        if 0 < len(paths) <= MAX_SUGGESTED:
            return f"did you mean {' or '.join(map(repr, paths))}?"

    near = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    if known:
        return f"{owner} takes {', '.join(known)}."
    return "remove it."


def _paths_with(schema: type[BaseModel], key: str) -> list[str]:
    """Where a setting that was given without its section exists: the paths of the outermost
    sections that have it.
    """
    level: list[tuple[str, type[BaseModel]]] = [("", schema)]
    for _ in range(SEARCHED_LEVELS):
        # Elements of lists have an index in their paths, and stages have all sections once more,
        # so only plain sections are entered.
        subsections = [
            (f"{prefix}{field.alias or name}.", section)
            for prefix, owner in level
            for name, field in owner.model_fields.items()
            for section in _plain_sections(field.annotation)
        ]
        paths = [
            prefix + key
            for prefix, section in subsections
            if any(key in (name, field.alias) for name, field in section.model_fields.items())
        ]
        if paths:
            return paths
        level = subsections

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
        field = _field(schema, current, part)
        if field is None:
            return []

        mark = _field_mark(field)
        if mark is not None:
            return _all_kind_keys(mark.package)
        subsections = _classes(field.annotation)
        if not subsections:
            return []
        current = subsections[0]

    keys = [field.alias or name for name, field in current.model_fields.items()]
    if issubclass(current, Overlay):
        keys += [field.alias or name for name, field in schema.model_fields.items()]
    return keys


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _all_kind_keys(package: str) -> list[str]:
    """The settings of all kinds together, since the kind itself may be what is wrong."""
    keys: set[str] = set()
    for name in kind_names(package):
        keys.update(kind_config(package, name).model_fields)
    return sorted(keys)


def _kind_mark(annotation: Any) -> KindIn | None:
    """The first mark in an annotation or in its arguments, depth first."""
    for mark in getattr(annotation, "__metadata__", ()):
        if isinstance(mark, KindIn):
            return mark
    for argument in getattr(annotation, "__args__", ()):
        mark = _kind_mark(argument)
        if mark is not None:
            return mark
    return None


def _classes(annotation: Any) -> list[type[BaseModel]]:
    """The sections in an annotation: `list[Source] | None` has Source."""
    if _is_section(annotation):
        return [annotation]
    classes: list[type[BaseModel]] = []
    for argument in getattr(annotation, "__args__", ()):
        classes += _classes(argument)
    return classes


def dump_yaml(config: BaseModel | Mapping[str, Any], *, only_given: bool = False) -> str:
    """The resolved config as YAML, as printed by `config show` and stored in a run folder;
    `only_given` leaves out defaults.
    """
    from io import StringIO

    out = StringIO()
    yaml = YAML()
    yaml.default_flow_style = None
    yaml.width = 120
    if isinstance(config, BaseModel):
        data = config.model_dump(mode="json", by_alias=True, exclude_unset=only_given)
    else:
        data = dict(config)

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


def find_external_code(data: Any, path: str = "") -> Iterator[ExternalCode]:
    """All code outside headway that a recipe names, found in its plain data without importing
    anything.
    """
    if isinstance(data, dict):
        items = data.items()
    elif isinstance(data, list):
        items = enumerate(data)
    else:
        items = ()

    for key, value in items:
        key_path = f"{path}.{key}" if path else str(key)
        is_listed = isinstance(key, int)

        if isinstance(value, str):
            names_module = key in MODULE_KEYS or (is_listed and path.endswith("track"))
            names_function = key in FUNCTION_KEYS or (is_listed and path.endswith("callbacks"))
            if "." in value and names_module:
                noun = "file" if is_file_name(value) else "module"
                yield ExternalCode(
                    key_path, f"imports the {noun} {value}", is_imported=True, module=value
                )
            elif ":" in value and names_function:
                module, _, _ = value.rpartition(":")
                yield ExternalCode(key_path, f"calls {value}", is_imported=True, module=module)
        elif key == "command" and isinstance(value, list):
            command = " ".join(map(str, value))
            yield ExternalCode(key_path, f"starts {command}", is_imported=False)
        else:
            yield from find_external_code(value, key_path)
