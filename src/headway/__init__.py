"""headway: one LLM training system, from raw text to a trained long-context model.

    import headway as hw

    recipe = hw.Recipe.load("laptop/sft", {"init.from": "runs/pretrain-laptop"})
    result = hw.train(recipe, data=[{"prompt": "1+1?", "response": "2"}])
    print(hw.load_model(result).generate("2+2?").text)

The names below are the public API (docs/api.md). They are imported when they are first used:
`import headway` loads neither torch nor pydantic.
"""

import importlib
import sys
from types import FunctionType, ModuleType

TYPE_CHECKING = False
"""True for type checkers. Importing it from typing would take most of the time of `import headway`.
"""

if TYPE_CHECKING:
    from headway.api.models import LanguageModel, evaluate, export, load_model, score, tokenize
    from headway.api.results import EvalResult, ExportResult, TokenizeResult, TrainResult
    from headway.api.table import ResultTable
    from headway.api.training import train
    from headway.errors import (
        ConfigError,
        DataError,
        HeadwayError,
        Interrupted,
        Terminated,
        TrainingError,
    )
    from headway.infer.generate import Generation
    from headway.track.callbacks import Callback
    from headway.train.config import Recipe

if sys.platform == "win32":
    from headway.runtime.windows import refuse_windows

    refuse_windows()

__version__ = "0.2.0"

__all__ = [
    "Callback",
    "ConfigError",
    "DataError",
    "EvalResult",
    "ExportResult",
    "Generation",
    "HeadwayError",
    "Interrupted",
    "LanguageModel",
    "Recipe",
    "ResultTable",
    "Terminated",
    "TokenizeResult",
    "TrainResult",
    "TrainingError",
    "__version__",
    "evaluate",
    "export",
    "load_model",
    "score",
    "tokenize",
    "train",
]

_HOMES = {
    "headway.api.models": (
        "LanguageModel",
        "evaluate",
        "export",
        "load_model",
        "score",
        "tokenize",
    ),
    "headway.api.results": ("EvalResult", "ExportResult", "TokenizeResult", "TrainResult"),
    "headway.api.table": ("ResultTable",),
    "headway.api.training": ("train",),
    "headway.errors": (
        "ConfigError",
        "DataError",
        "HeadwayError",
        "Interrupted",
        "Terminated",
        "TrainingError",
    ),
    "headway.infer.generate": ("Generation",),
    "headway.track.callbacks": ("Callback",),
    "headway.train.config": ("Recipe",),
}
"""Module -> the public names that it defines."""
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_ALSO_PACKAGES = ("train", "export")
"""Public functions with the name of a package: `hw.train` is the function, `import
headway.train.loop` imports from the package.
"""


class _Package(ModuleType):
    """Keeps `hw.train` and `hw.export` functions: Python sets every imported submodule as an
    attribute of its package.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _ALSO_PACKAGES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


if not TYPE_CHECKING:  # type checkers would take any name for one of ours

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'headway' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        if name in _ALSO_PACKAGES:
            assert isinstance(value, FunctionType)
            # The function answers for the package too, so that `headway.train.loop` and
            # `import headway.train.loop as loop` work.
            value.__dict__ = vars(importlib.import_module(f"headway.{name}"))
        # The next use finds it without this function.
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
