"""Records the commit and the address of the repository in what is built; everything else is in pyproject.toml.

    git checkout --build--> headway/commit.txt in the wheel and in the source distribution
                            (`headway --version` prints it)
    HEADWAY_REPOSITORY=https://... --build--> the links of the packages ([project.urls]), and README.md with
                                              whole addresses: a package index has no file beside it

A build of a source distribution keeps the commit that is there. The address comes from the environment alone, never from
a git remote, which may name a private host.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path, PurePosixPath

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
SHORT_COMMIT = 12
"""As `headway --version` shortens the commit of a checkout."""
RELATIVE_LINK = re.compile(r"\]\((?![a-z]+:|#|/)([^)\s#]+)(#[^)\s]*)?\)")
"""The target of a Markdown link or image that is a path of the repository: `](docs/board.md#alerts)`."""
PICTURES = (".png", ".svg", ".jpg", ".gif", ".webp")


def commit_text() -> str | None:
    """The commit of this checkout, with `, modified` where tracked files differ from it."""
    if not (ROOT / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")[:SHORT_COMMIT]
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        # Without git, or in a checkout that git refuses to read, nothing is recorded.
        return None
    suffix = ""
    if changed:
        suffix = ", modified"
    return commit + suffix + "\n"


def write_commit(package: Path) -> None:
    """Write the file into a copy of the package, never into the checkout."""
    text = commit_text()
    if text is not None:
        package.mkdir(parents=True, exist_ok=True)
        (package / "commit.txt").write_text(text, encoding="ascii")


class BuildWithCommit(build_py):
    """The package of a wheel."""

    def run(self) -> None:
        super().run()
        # An editable install is the checkout itself, which git describes.
        if not self.editable_mode:
            write_commit(Path(self.build_lib) / "headway")


class SourceWithCommit(sdist):
    """The package in a source distribution."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir) / "src" / "headway")


def repository_address() -> str | None:
    """HEADWAY_REPOSITORY without its end, or None if it is not set."""
    repository = os.environ.get("HEADWAY_REPOSITORY")
    if not repository:
        return None
    if not repository.startswith("https://") or "@" in repository:
        raise SystemExit(
            f"HEADWAY_REPOSITORY is {repository!r}; it must be https://HOST/OWNER/NAME, without a user"
        )
    return repository.rstrip("/").removesuffix(".git")


def links(address: str | None) -> dict[str, str]:
    """The links of a published package: pages of a repository on GitHub, or on a server that names them as GitHub does."""
    if address is None:
        return {}
    return {
        "Homepage": address,
        "Documentation": f"{address}/tree/HEAD/docs",
        "Source": address,
        "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def description(address: str | None) -> str:
    """README.md; with an address its relative links lead to the repository, and its pictures to raw files."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if address is None:
        return text

    def absolute(match: re.Match[str]) -> str:
        path = match[1]
        suffix = PurePosixPath(path).suffix
        # By the suffix: a source distribution, of which wheels are built, does not have these files.
        if suffix in PICTURES:
            view = "raw"
        elif suffix:
            view = "blob"
        else:
            view = "tree"
        return f"]({address}/{view}/HEAD/{path}{match[2] or ''})"

    return RELATIVE_LINK.sub(absolute, text)


ADDRESS = repository_address()
setup(
    cmdclass={"build_py": BuildWithCommit, "sdist": SourceWithCommit},
    project_urls=links(ADDRESS),
    long_description=description(ADDRESS),
    long_description_content_type="text/markdown",
)
