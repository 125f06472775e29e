"""Modules outside headway that a recipe names. In: a dotted name, or the path of a .py file; out:
the module, imported.

`my_lab.my_loss`     a module on Python's path
`./my_loss.py`       a file, relative to the working directory; Python's path is neither used
                     nor changed

A file's module is named after its path and content: an edited file is another module, and the same
file is imported once. Such code imports from `headway` and `headway.plugin`. Other modules of
headway work, with a warning: they may move.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.config.regular_file import regular_only
from headway.errors import ConfigError

log = logging.getLogger("headway")

PREFIX = "headway_user_file_"
"""Of the names of modules that were imported from a file."""
STABLE = ("headway", "headway.plugin")
"""What code outside headway may import."""
MAX_BYTES = 10 << 20


def import_user_module(name: str, setting: str) -> ModuleType:
    """Import a user's module by its dotted name, or a file by its path.

    Errors begin with `setting`, the key that named it.
    """
    if is_file_name(name):
        return _import_file(Path(name), name, setting)

    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(
            f"{setting} is {name[:100]!r}; it must be the import path of your module, e.g. "
            "my_lab.my_module, or a file, ./my_module.py."
        )

    is_new = name not in sys.modules
    module = _import(name, setting, lambda: importlib.import_module(name))
    if is_new and module.__file__ is not None:
        try:
            warn_of_internal_imports(name, Path(module.__file__).read_bytes()[:MAX_BYTES])
        except (OSError, SyntaxError, ValueError):
            pass  # it was imported: what is not Python source here is a compiled module

    return module


def warn_of_internal_imports(name: str, source: bytes) -> None:
    """Warn of the imports of a user's module, from its source, that `headway.plugin` does not
    offer.
    """
    internal = internal_imports(source)
    if internal:
        log.warning(
            "%s imports %s. Import these names from headway.plugin: other modules of headway may "
            "move with the next release.",
            name,
            ", ".join(internal),
        )


def internal_imports(source: bytes) -> list[str]:
    """The modules of headway that some code imports beside the stable ones."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            modules.add(node.module)
    return sorted(name for name in modules if name.startswith("headway.") and name not in STABLE)


def is_file_name(name: str) -> bool:
    """Whether a recipe means a file, not a module on Python's path."""
    return name.endswith(".py") or "/" in name


def user_code_file(name: str) -> Path | None:
    """The file of a module that is imported already, for a record of the code.

    None where it has none.
    """
    if is_file_name(name):
        return Path(name).resolve()
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return None
    return Path(file)


def _import_file(path: Path, name: str, setting: str) -> ModuleType:
    """Import a file as a module that is named after its path and content."""
    if path.suffix != ".py":
        raise ConfigError(
            f"{setting} is {name[:200]!r}; a file of your own ends in .py, e.g. ./my_module.py."
        )

    try:
        with open(path, "rb", opener=regular_only) as file:
            code = file.read(MAX_BYTES + 1)
        absolute = path.resolve()
    except (OSError, ValueError) as error:
        reason = "there is no such file"
        if not isinstance(error, FileNotFoundError):
            reason = f"it cannot be read: {error}"
        raise ConfigError(
            f"{setting} is {name[:200]!r}, but {reason} (working directory: {Path.cwd()}). Give "
            "the path of your file."
        ) from None

    if len(code) > MAX_BYTES:
        raise ConfigError(
            f"{setting} is {name[:200]!r}, which has more than "
            f"{MAX_BYTES >> 20} MiB. Give a Python file."
        )

    # The path is hashed too: two equal files are two modules, each with its own state.
    module_name = PREFIX + hashlib.sha256(str(absolute).encode() + b"\0" + code).hexdigest()[:24]
    if module_name in sys.modules:
        return sys.modules[module_name]

    spec = importlib.util.spec_from_file_location(module_name, absolute)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)

    def run() -> ModuleType:
        sys.modules[module_name] = module  # dataclasses and pickle look it up
        try:
            # The bytes that were hashed, not what the loader would read: the file may have
            # changed since, and no .pyc is written or read.
            exec(compile(code, str(absolute), "exec"), module.__dict__)
        except BaseException:
            del sys.modules[module_name]
            raise

        return module

    imported = _import(name, setting, run)
    warn_of_internal_imports(name, code)
    return imported


def _import(name: str, setting: str, work: Callable[[], ModuleType]) -> ModuleType:
    """Run an import and turn whatever it raises into a ConfigError that names the setting."""
    try:
        return work()
    except ModuleNotFoundError as missing:
        # The module itself, or a package of its dotted name, is missing; otherwise something that
        # it imports.
        if missing.name is not None and (
            name == missing.name or name.startswith(missing.name + ".")
        ):
            raise ConfigError(
                f"{setting} is {name[:200]!r}, but there is no module of that name. Add the folder "
                "that contains it to PYTHONPATH."
            ) from None

        raise ConfigError(
            f"{setting} is {name[:200]!r}, which imports {(missing.name or '')[:200]!r}, but that "
            "is not installed. Install it."
        ) from missing
    except Exception as error:  # importing the user's module may raise anything
        frame = traceback.extract_tb(error.__traceback__)[-1]
        file = frame.filename
        line = frame.lineno
        if isinstance(error, SyntaxError):
            # The last frame is the compiler's; the error itself knows the user's line.
            file = error.filename
            line = error.lineno
        problem = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{setting} is {name[:200]!r}, but importing it fails: {type(error).__name__}: "
            f"{problem} ({file}:{line})."
        ) from error


class UserFiles:
    """The files imported so far.

    Unpickled in another process it imports them there, so that what comes after it can be
    unpickled.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        modules = list(sys.modules.items())
        files = [str(module.__file__) for name, module in modules if name.startswith(PREFIX)]
        return _import_again, (files,)


def _import_again(files: Sequence[str]) -> UserFiles:
    for file in files:
        import_user_module(file, "file")
    return UserFiles()
