"""Pages of the site that are not files of docs/: pages of the repository's root, and references made from the code.

In: the repository; out: pages for mkdocs (it loads this file as a hook). Links between pages are written as they work in the
repository (`../benchmarks/README.md`) and are changed here to those of the site. Invariant: a page says only what the code says.
"""

import inspect
import posixpath
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]
FROM_ROOT = {
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks.md",
    "ARCHITECTURE.md": "ARCHITECTURE.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "README.zh-CN.md": "README.zh-CN.md",
}
"""File of the repository -> page of the site."""
CHINESE = r"[\u3000-\u9fff\uff00-\uffef]"
BETWEEN_CHINESE = re.compile(rf"(?<={CHINESE})\n(?={CHINESE})")
FENCED = re.compile(r"(?ms)^```.*?^```")
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """A page that the navigation does not name goes to the end of its part "How to"."""
    named = set(re.findall(r"[\w./-]+\.md", str(config.nav)))
    rest = sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name not in named)
    next(part["How to"] for part in config.nav if "How to" in part).extend(rest)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages."""
    from mkdocs.structure.files import File

    made = {page: (ROOT / source).read_text(encoding="utf-8") for source, page in FROM_ROOT.items()}
    for page, text in {
        **made,
        "commands.md": commands_page(),
    }.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they work in the repository -> links of the site."""
    source = next(
        (one for one, name in FROM_ROOT.items() if name == page.file.src_uri),
        f"docs/{page.file.src_uri}",
    )
    return LINK.sub(lambda link: _linked(link, source), join_chinese_lines(markdown))


def join_chinese_lines(markdown: str) -> str:
    """Lines of one paragraph that end and begin in Chinese become one: a browser would show a space between them.

    A heading stays a line of its own, and so do the lines of a block of code.
    """
    parts: list[str] = []
    end = 0
    for block in [*FENCED.finditer(markdown), None]:
        prose = markdown[end : block.start()] if block else markdown[end:]
        # The break after a heading becomes two, so that no line of text follows it directly.
        prose = re.sub(r"(?m)^(#+ .*)\n(?=.)", r"\1\n\n", prose)
        parts.append(BETWEEN_CHINESE.sub("", prose))
        if block:
            parts.append(block[0])
            end = block.end()
    return "".join(parts)


def _linked(link: re.Match[str], source: str) -> str:
    """One link: to a page of the site, or, for a file of the repository that is none, its path."""
    text, target, anchor = link[1], link[2], link[3] or ""
    path = (ROOT / source).parent.joinpath(target).resolve()
    if "://" in target or not path.is_relative_to(ROOT):
        return link[0]
    inside = path.relative_to(ROOT).as_posix()
    if inside not in FROM_ROOT and not inside.startswith("docs/"):
        return f"`{inside}`"
    # A page in a folder below docs/ links relative to that folder.
    page = PurePosixPath(FROM_ROOT.get(source, source.removeprefix("docs/")))
    there = FROM_ROOT.get(inside, inside.removeprefix("docs/"))
    relative = posixpath.relpath(there, page.parent)
    return f"[{text}]({relative}{anchor})"


def commands_page() -> str:
    """Every verb with its arguments and options, as `--help` prints them."""
    import typer

    from headway.cli import build_app

    lines = [
        "# Commands",
        "",
        "Every verb, as `headway VERB --help` prints it. `headway list` shows what a recipe can name.",
        "",
    ]
    for words, command in _verbs(typer.main.get_command(build_app()), ()):
        lines += [
            f"## headway {' '.join(words)}",
            "",
            inspect.cleandoc(command.help or "").replace("\n", " "),
            "",
        ]
        rows = [row for parameter in command.params if (row := _parameter(parameter))]
        lines += ["| option | meaning | default |", "|---|---|---|", *rows, ""] if rows else []
    return "\n".join(lines)


def _verbs(command: Any, words: tuple[str, ...]) -> Any:
    for name, below in sorted(getattr(command, "commands", {}).items()):
        if hasattr(below, "commands"):
            if below.invoke_without_command:
                yield (*words, name), below
            yield from _verbs(below, (*words, name))
        else:
            yield (*words, name), below


def _parameter(parameter: Any) -> str | None:
    if getattr(parameter, "hidden", False):
        return None
    is_option = parameter.param_type_name == "option"
    name = (
        ", ".join([*parameter.opts, *parameter.secondary_opts])
        if is_option
        else (parameter.metavar or parameter.name.upper())
    )
    default = parameter.default
    if callable(default) or default in (None, False, (), [], ""):
        shown = "required" if parameter.required else ""
    else:
        shown = f"`{default}`"
    cells = (f"`{name}`", (getattr(parameter, "help", None) or "").replace("\n", " "), shown)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def api_page() -> str:
    """The names of `headway` and `headway.plugin`, with signatures and docstrings: docs/api-reference.md."""
    import headway
    from headway import plugin
    from headway.track.callbacks import CallbackControl

    public = {
        f"hw.{name}": getattr(headway, name) for name in headway.__all__ if not name.startswith("_")
    }
    # What a callback finds in `self.control`.
    public["Callback.control"] = CallbackControl
    shown_above = {id(thing) for thing in public.values()}
    of_plugins = {f"plugin.{name}": getattr(plugin, name) for name in plugin.__all__}

    lines = [
        "# Python reference",
        "",
        "Made from the docstrings by `make reference`; a test compares them. [The Python API](api.md) shows by example how the",
        "names are used, and [Extend headway](extend.md) does so for plug-ins.",
        "",
        "`import headway as hw` gives the names that begin with `hw.`: functions first, then classes, then errors.",
        "",
    ]
    for name in sorted(public, key=lambda name: (_rank(public[name]), name)):
        lines += _entry(name, public[name])

    lines += [
        "## Names for plug-ins",
        "",
        "`from headway import plugin` gives these. A *protocol* is a set of methods that your class has; nothing needs to be",
        "derived from it.",
        "",
    ]
    for name, thing in of_plugins.items():
        if id(thing) not in shown_above:
            lines += _entry(name, thing)
    return "\n".join(lines).rstrip("\n") + "\n"


def _entry(name: str, thing: Any) -> list[str]:
    """The heading of a name, its signature, its docstring, and its documented members."""
    lines = [f"## {name}", ""]
    if not inspect.isclass(thing) and not inspect.isfunction(thing):
        # A module, or a name for a type: `dict[str, numpy.ndarray]`.
        if inspect.ismodule(thing):
            lines += [f"The module `{thing.__name__}`. {_text(thing)}", ""]
        elif isinstance(thing, str):
            # The name of a column or a total, which code should not spell out.
            lines += [f'The text `"{thing}"`.', ""]
        else:
            lines += [f"The type `{_type(thing)}`.", ""]
        return lines

    signature = _signature(thing)
    is_error = inspect.isclass(thing) and issubclass(thing, BaseException)
    # The signature of a section of settings is its fields: docs/settings.md lists those.
    has_settings = hasattr(thing, "model_fields")
    if getattr(thing, "_is_protocol", False):
        lines += ["*A protocol.*", ""]
    elif signature and len(signature) < 600 and not is_error and not has_settings:
        lines += ["```python", f"{name}{signature}", "```", ""]
    lines += [_text(thing), ""]

    members = vars(thing).items() if inspect.isclass(thing) else ()
    for member, value in members:
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if member.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        lines += [f"### .{member}", ""]
        if not isinstance(value, property):
            lines += ["```python", f"{member}{_signature(function)}", "```", ""]
        lines += [_text(function), ""]
    return lines


def _rank(thing: Any) -> int:
    return (
        0
        if inspect.isfunction(thing)
        else 2
        if isinstance(thing, type) and issubclass(thing, BaseException)
        else 1
    )


def _text(thing: Any) -> str:
    """A docstring; its example becomes a block of code."""
    text, _, example = inspect.cleandoc(thing.__doc__ or "").partition("\nExample:\n")
    code = [
        line.strip().removeprefix(">>> ").removeprefix("... ")
        for line in example.splitlines()
        if line.strip()
    ]
    return text.strip() + ("\n\n```python\n" + "\n".join(code) + "\n```" if code else "")


def _signature(thing: Any) -> str:
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    parts: list[str] = []
    for name, one in found.parameters.items():
        if name in ("self", "cls"):
            continue
        if (
            one.kind is one.KEYWORD_ONLY
            and "*" not in parts
            and not any(part.startswith("*") for part in parts)
        ):
            parts.append("*")
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        kind = "" if one.annotation is one.empty else f": {_type(one.annotation)}"
        default = "" if one.default is one.empty else f" = {one.default!r}"
        parts.append(f"{stars}{name}{kind}{default}")
    result = (
        ""
        if found.return_annotation in (found.empty, None, "None")
        else f" -> {_type(found.return_annotation)}"
    )
    whole = f"({', '.join(parts)}){result}"
    return whole if len(whole) < 80 else "(\n    " + ",\n    ".join(parts) + f",\n){result}"


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"ForwardRef\('([^']*)'[^)]*\)", r"\1", text)
    return re.sub(r"\b(?:headway|pathlib|collections\.abc|typing)\.(?:\w+\.)*", "", text)


if __name__ == "__main__":
    sys.stdout.write(api_page())
