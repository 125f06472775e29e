"""Pages of the site that are not files of docs/: pages of the repository's root, and references made from the code.

In: the repository; out: pages for mkdocs (it loads this file as a hook). Links between pages are written as they work in the
repository (`../benchmarks/README.md`) and are changed here to those of the site. Invariant: a page says only what the code says.
"""

import inspect
import re
from pathlib import Path
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
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")


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
    for page, text in {**made, "commands.md": commands_page(), "api-reference.md": api_page()}.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they work in the repository -> links of the site."""
    source = next((one for one, name in FROM_ROOT.items() if name == page.file.src_uri), f"docs/{page.file.src_uri}")
    return LINK.sub(lambda link: f"]({_target(link[1], source)}{link[2] or ''})", markdown)


def _target(link: str, source: str) -> str:
    if "://" in link or link.startswith("mailto:"):
        return link
    path = (ROOT / source).parent.joinpath(link).resolve()
    if not path.is_relative_to(ROOT):
        return link
    inside = path.relative_to(ROOT).as_posix()
    if inside in FROM_ROOT:
        return FROM_ROOT[inside]
    if inside.startswith("docs/") and path.is_file():
        return inside.removeprefix("docs/")
    return "index.md" if inside == "docs" else link


def commands_page() -> str:
    """Every verb with its arguments and options, as `--help` prints them."""
    import typer

    from headway.cli import build_app

    lines = ["# Commands", "", "Every verb, as `headway VERB --help` prints it. `headway list` shows what a recipe can name.", ""]
    for words, command in _verbs(typer.main.get_command(build_app()), ()):
        lines += [f"## headway {' '.join(words)}", "", inspect.cleandoc(command.help or "").replace("\n", " "), ""]
        rows = [row for parameter in command.params if (row := _parameter(parameter))]
        lines += ["| option | meaning | default |", "|---|---|---|", *rows, ""] if rows else []
    return "\n".join(lines)


def _verbs(command: Any, words: tuple[str, ...]) -> Any:
    for name, below in sorted(getattr(command, "commands", {}).items()):
        if hasattr(below, "commands"):
            yield from _verbs(below, (*words, name))
        else:
            yield (*words, name), below


def _parameter(parameter: Any) -> str | None:
    if getattr(parameter, "hidden", False):
        return None
    is_option = parameter.param_type_name == "option"
    name = ", ".join([*parameter.opts, *parameter.secondary_opts]) if is_option else (parameter.metavar or parameter.name.upper())
    default = parameter.default
    if callable(default) or default in (None, False, (), [], ""):
        shown = "required" if parameter.required else ""
    else:
        shown = f"`{default}`"
    cells = (f"`{name}`", (getattr(parameter, "help", None) or "").replace("\n", " "), shown)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def api_page() -> str:
    """The public names of `headway`, with signatures and docstrings."""
    import headway

    names = [name for name in getattr(headway, "__all__", []) if name != "__version__"]
    lines = ["# Python names", "", "`import headway as hw` gives these names. The import loads no torch; torch is loaded when a name needs it.", ""]
    for name in names:
        thing = getattr(headway, name)
        lines += [f"## hw.{name}", "", *_described(name, thing)]
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                found = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if not member.startswith("_") and inspect.isfunction(found) and found.__doc__:
                    shown = f".{member}" if isinstance(value, property) else f".{member}{_signature(found)}"
                    lines += [f"- `{shown}`: {' '.join(inspect.cleandoc(found.__doc__).split())}"]
            lines.append("")
    return "\n".join(lines)


def _described(name: str, thing: Any) -> list[str]:
    text = inspect.cleandoc(thing.__doc__ or "")
    if not callable(thing):
        return [text, ""]
    return ["```python", f"hw.{name}{_signature(thing)}", "```", "", text, ""]


def _signature(thing: Any) -> str:
    try:
        found = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return "(...)"
    found = re.sub(r"\bheadway\.[\w.]+\.(\w+)|\bpathlib\.|\bcollections\.abc\.|\btyping\.", lambda m: m[1] or "", found)
    return found.replace("'", "")
