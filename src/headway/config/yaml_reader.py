"""YAML 1.2 text comes in; plain Python (dict, list, str, int, float, bool, None) goes out, with the
line of every key.

The parser's events are read one by one with limits on nesting, aliases and size, so a hostile file
is rejected in milliseconds. Only the plain types are ever constructed. Dates stay text.
"""

import copy
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.nodes import ScalarNode

from headway.errors import ConfigError

Where = dict[tuple[Any, ...], str]
"""The path of a key in the document -> `FILE:LINE`, for messages."""

MAX_BYTES = 512 << 10
MAX_DEPTH = 32
MAX_VALUES = 50_000
"""Counted after aliases are expanded."""
MAX_DIGITS = 400
"""Per number."""
TAG = "tag:yaml.org,2002:"
MERGE = object()
"""The key `<<`."""


class _Refused(Exception):
    """A rejected document: the message, and the line counted from 0 (None if unknown)."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class _Open:
    """A mapping or sequence whose end has not been read yet.

    `path` is where it stands in the document, `values` how many values it has so far, itself
    included. `key` is the key whose value comes next (with `has_key`), `merged` the mappings of
    `<<`.
    """

    def __init__(self, value: Any, path: tuple[Any, ...], line: int, anchor: str | None) -> None:
        self.value = value
        self.path = path
        self.line = line
        self.anchor = anchor
        self.key: Any = None
        self.has_key = False
        self.merged: list[dict[str, Any]] = []
        self.values = 1


def parse_yaml(text: str, name: str, where: Where | None = None) -> Any:
    """The content of one YAML document.

    A mistake raises a ConfigError that begins with `name` and the line.
    """
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise ConfigError(
            f"{name}: larger than {MAX_BYTES >> 10} KiB, the limit for a "
            "recipe. Give the path of a recipe."
        )

    tree = _Tree(name, where if where is not None else {})
    try:
        tree.read(text)
    except _Refused as refused:
        line = ""
        if refused.line is not None:
            line = f":{refused.line + 1}"
        raise ConfigError(f"{name}{line}: {refused}") from None
    except (YAMLError, AssertionError, ValueError) as error:
        # AssertionError: ruamel asserts the version that a %YAML line names.
        mark = getattr(error, "problem_mark", None)
        line = ""
        if mark:
            line = f":{mark.line + 1}"
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{name}{line}: not YAML: {problem[:200]}.") from None

    return tree.root


class _Tree:
    """Builds plain values from the parser's events.

    open      the mappings and sequences around the next event, outermost first
    anchors   &name -> its value and how many values that is
    where     filled as a side effect: the line of every key and list element
    """

    def __init__(self, name: str, where: Where) -> None:
        self.name = name
        self.where = where
        self.root: Any = None
        self.open: list[_Open] = []
        self.anchors: dict[str, tuple[Any, int]] = {}
        self.num_documents = 0

    def read(self, text: str) -> None:
        """Read a document; `root` has its value then."""
        parser = YAML(typ="safe", pure=True)
        for event in parser.parse(text):
            line = event.start_mark.line
            if isinstance(event, (MappingStartEvent, SequenceStartEvent)):
                self._begin(event, line)
            elif isinstance(event, (MappingEndEvent, SequenceEndEvent)):
                self._end()
            elif isinstance(event, AliasEvent):
                self._alias(str(event.anchor), line)
            elif isinstance(event, ScalarEvent):
                if event.tag not in (None, "!"):
                    tag = event.tag
                else:
                    tag = parser.resolver.resolve(ScalarNode, event.value, event.implicit)
                self._put(_scalar(str(event.value), str(tag), line), line, event.anchor, 1)
            elif isinstance(event, DocumentStartEvent):
                self.num_documents += 1
                if self.num_documents > 1:
                    raise _Refused(
                        "a second document begins; a recipe is a single "
                        "document. Remove the `---`.",
                        line,
                    )

    def _begin(self, event: MappingStartEvent | SequenceStartEvent, line: int) -> None:
        """Open a mapping or a sequence."""
        is_mapping = isinstance(event, MappingStartEvent)
        if event.tag not in (None, "!", TAG + ("map" if is_mapping else "seq")):
            raise _Refused(
                f"the tag {str(event.tag)[:60]!r} is not supported. Write plain values.", line
            )

        if len(self.open) >= MAX_DEPTH:
            raise _Refused(
                f"nested more than {MAX_DEPTH} levels deep, the limit for a recipe.", line
            )

        holder = None
        if self.open:
            holder = self.open[-1]

        if holder is not None and isinstance(holder.value, dict) and not holder.has_key:
            raise _Refused(
                "found a list or mapping where a key is expected. Write the key as text.", line
            )

        path = ()
        if holder is not None:
            path = self._record_line(line)
        value: Any = {} if is_mapping else []
        self.open.append(_Open(value, path, line, event.anchor))

    def _end(self) -> None:
        """Close the innermost mapping or sequence: it is a value now."""
        finished = self.open.pop()

        # At the end, and only where a key is absent: explicit keys win wherever `<<` stands, and of
        # several merged mappings the first one wins, as YAML 1.1 defines it.
        for source in finished.merged:
            for key, value in source.items():
                finished.value.setdefault(key, value)
        self._put(finished.value, finished.line, finished.anchor, finished.values)

    def _alias(self, anchor: str, line: int) -> None:
        """Put a copy of an earlier value here."""
        # An anchor is known when its value is complete.
        if anchor not in self.anchors and any(holder.anchor == anchor for holder in self.open):
            raise _Refused(
                f"the alias *{anchor[:60]} refers to a value that contains it. Remove the alias.",
                line,
            )

        if anchor not in self.anchors:
            raise _Refused(
                f"the alias *{anchor[:60]} has no anchor above it. Define &{anchor[:60]} first.",
                line,
            )

        value, values = self.anchors[anchor]

        # A copy, since overrides change the data in place. `values` counts it once more, so that
        # aliases of aliases reach MAX_VALUES before they fill the memory.
        self._put(copy.deepcopy(value), line, None, values)

    def _put(self, value: Any, line: int, anchor: str | None, values: int) -> None:
        """Add a finished value to the open mapping or sequence, or make it the root."""
        # `<<` merges only as a plain key; as a value, in a list or with an anchor it is text.
        if value is MERGE and (
            anchor is not None
            or not self.open
            or isinstance(self.open[-1].value, list)
            or self.open[-1].has_key
        ):
            value = "<<"

        if anchor is not None:
            self.anchors[str(anchor)] = (value, values)

        if not self.open:
            self.root = value
            return

        holder = self.open[-1]
        holder.values += values
        if sum(container.values for container in self.open) > MAX_VALUES:
            raise _Refused(
                f"more than {MAX_VALUES} values after aliases are "
                "expanded, the limit for a recipe.",
                line,
            )

        if isinstance(holder.value, list):
            self._record_line(line)
            holder.value.append(value)
        elif not holder.has_key:
            self._put_key(holder, value, line)
        else:
            self._put_value(holder, value, line)

    def _put_key(self, holder: _Open, key: Any, line: int) -> None:
        """Take a key; its value comes next."""
        if isinstance(key, (dict, list)):
            raise _Refused(
                "found a list or mapping where a key is expected. Write the key as text.", line
            )

        if key is MERGE:
            holder.key = key
        else:
            holder.key = str(key)

        if holder.key in holder.value:
            raise _Refused(
                f'found duplicate key "{str(key)[:60]}"; a key may occur once. Remove one of them.',
                line,
            )

        holder.has_key = True
        self._record_line(line)

    def _put_value(self, holder: _Open, value: Any, line: int) -> None:
        """Take the value of the last key, or mappings to merge."""
        holder.has_key = False
        if holder.key is not MERGE:
            holder.value[holder.key] = value
            return
        if isinstance(value, list):
            sources = value
        else:
            sources = [value]
        if not all(isinstance(source, dict) for source in sources):
            raise _Refused("`<<` needs a mapping or a list of mappings.", line)
        holder.merged += sources

    def _record_line(self, line: int) -> tuple[Any, ...]:
        """The path of the next value; records its line."""
        holder = self.open[-1]
        key = holder.key
        if isinstance(holder.value, list):
            key = len(holder.value)
        path = (*holder.path, key)
        self.where.setdefault(path, f"{self.name}:{line + 1}")
        return path


def _scalar(text: str, tag: str, line: int) -> Any:
    """A scalar as plain Python, by the tag that YAML 1.2 resolves it to."""
    kind = ""
    if tag.startswith(TAG):
        kind = tag.removeprefix(TAG)
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "merge":
        return MERGE
    if kind in ("int", "float"):
        return _number(text, kind, line)
    if kind in ("str", "timestamp", "value"):
        return text
    raise _Refused(f"the tag {tag[:60]!r} is not supported. Write plain values.", line)


def _number(text: str, kind: str, line: int) -> int | float:
    """An integer or a float, of a bounded length: Python takes quadratic time for long ones."""
    digits_text = text.replace("_", "").lower()
    if len(digits_text) > MAX_DIGITS:
        raise _Refused(
            f"a number of {len(digits_text)} characters; write one of at most {MAX_DIGITS}.", line
        )

    try:
        if kind == "float":
            return float(digits_text.replace(".inf", "inf").replace(".nan", "nan"))
        digits = digits_text.lstrip("+-")

        # YAML 1.2: 010 is ten, not eight.
        base = {"0x": 16, "0o": 8, "0b": 2}.get(digits[:2], 10)
        return int(digits_text, base)
    except ValueError:
        raise _Refused(
            f"{text[:60]!r} is not {'an integer' if kind == 'int' else 'a number'}.", line
        ) from None
