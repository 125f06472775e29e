"""The Dockerfile cannot be built by tests; what can be read in it is true: files, packages, bounds, extras, a user without root rights."""

import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
KNOWN = {"ARG", "FROM", "RUN", "ENV", "COPY", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """Instructions and what follows them, with continued lines joined."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    lines = [line for line in re.sub(r"\\\n\s*", " ", text).splitlines() if line.strip()]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def of(kind: str) -> list[str]:
    return [rest for name, rest in instructions() if name == kind]


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_it_has_known_instructions_in_an_order_that_works() -> None:
    names = [name for name, _ in instructions()]
    assert set(names) <= KNOWN
    assert names[:2] == ["ARG", "FROM"]
    assert names[-2:] == ["ENTRYPOINT", "CMD"]
    assert of("FROM") == ["${BASE}"]
    for rest in of("RUN"):
        assert shlex.split(rest.replace("&&", ";")), rest  # quotes are closed
    arguments = {rest.split("=")[0] for rest in of("ARG")}
    used = set(re.findall(r"\$\{(\w+)\}", (ROOT / "Dockerfile").read_text(encoding="utf-8")))
    assert used == arguments == {"BASE", "TORCH_INDEX", "EXTRAS", "COMMIT"}


def test_what_is_copied_exists_and_reaches_the_builder() -> None:
    ignored = [
        line
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    assert ignored[0] == "*"
    sent = [line[1:] for line in ignored if line.startswith("!")]
    for rest in of("COPY"):
        *sources, _ = rest.split()
        for source in sources:
            assert (ROOT / source).exists() and any(fnmatch(source, pattern) for pattern in sent), (
                source
            )
    # pyproject.toml names the licences; setup.py reads the README.
    licences = project()["license-files"]
    assert isinstance(licences, list)
    needed = ["src", "pyproject.toml", "setup.py", "README.md", *licences]
    copied = {word for rest in of("COPY") for word in rest.split()[:-1]}
    assert set(needed) == copied


def test_torch_and_the_extras_are_those_of_the_project_and_its_readme() -> None:
    torch = next(line for line in project()["dependencies"] if line.startswith("torch"))  # pyright: ignore[reportGeneralTypeIssues, reportAttributeAccessIssue]
    bounds = re.search(r'pip install "(torch[^"]+)"', " ".join(of("RUN")))
    assert bounds is not None
    assert bounds[1] == torch.replace(" ", "")
    assert "<" in bounds[1]
    assert f'pip install "{bounds[1]}" --index-url' in (ROOT / "README.md").read_text(
        encoding="utf-8"
    )
    extras = next(rest.split("=", 1)[1] for rest in of("ARG") if rest.startswith("EXTRAS"))
    assert set(extras.split(",")) <= set(project()["optional-dependencies"])  # pyright: ignore[reportArgumentType]
    base = next(rest.split("=", 1)[1] for rest in of("ARG") if rest.startswith("BASE"))
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-runtime-\w+\d+\.\d+", base), (
        "a CUDA runtime of one version"
    )


def test_it_does_not_run_as_root_and_the_page_says_how_to_build_it() -> None:
    names = [name for name, _ in instructions()]
    assert of("USER") == ["headway"]
    assert "RUN" not in names[names.index("USER") :]
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    assert (
        "--build-arg BASE=debian:bookworm-slim --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu"
        in page
    )
