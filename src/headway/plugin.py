"""What code outside headway may import, the one stable namespace for plug-ins (docs/extend.md).

    from headway.plugin import Loss, TaskConfig, Term, setting

Each name is imported when it is first used, so a kind's module loads no torch. Where a name's
module moves, this one stays.
"""

import importlib

TYPE_CHECKING = False
"""True for type checkers."""

if TYPE_CHECKING:
    from headway.api.results import loss_table as loss_table
    from headway.config.section import setting as setting
    from headway.data.batch import ANSWERS as ANSWERS
    from headway.data.batch import SCORED as SCORED
    from headway.data.batch import Batch as Batch
    from headway.data.batch import StepBatch as StepBatch
    from headway.data.config import DataConfig as DataConfig
    from headway.data.groups import Columns as Columns
    from headway.data.groups import DocumentReader as DocumentReader
    from headway.data.groups import GroupSource as GroupSource
    from headway.data.groups import RecordSource as RecordSource
    from headway.data.groups import SourceReader as SourceReader
    from headway.data.groups import marks_of as marks_of
    from headway.data.rows import RowLayout as RowLayout
    from headway.data.rows import RowPieces as RowPieces
    from headway.errors import ConfigError as ConfigError
    from headway.errors import DataError as DataError
    from headway.errors import HeadwayError as HeadwayError
    from headway.model.base import Model as Model
    from headway.model.base import ModelOut as ModelOut
    from headway.model.config import ModelConfig as ModelConfig
    from headway.model.encoders.base import EncoderConfig as EncoderConfig
    from headway.model.encoders.base import FrozenMediaEncoder as FrozenMediaEncoder
    from headway.model.families import llama as llama
    from headway.optim.base import AveragingOptimizer as AveragingOptimizer
    from headway.optim.base import Guard as Guard
    from headway.optim.base import Hyper as Hyper
    from headway.optim.base import MatrixOptimizer as MatrixOptimizer
    from headway.optim.base import OptimConfig as OptimConfig
    from headway.optim.base import Optimizer as Optimizer
    from headway.parallel.hooks.base import Hook as Hook
    from headway.parallel.hooks.base import HookConfig as HookConfig
    from headway.parallel.hooks.base import StatefulHook as StatefulHook
    from headway.records.base import DocumentSettings as DocumentSettings
    from headway.records.base import EncodeContext as EncodeContext
    from headway.records.base import EncodedDocument as EncodedDocument
    from headway.records.base import ExampleEncoder as ExampleEncoder
    from headway.records.base import RecordFields as RecordFields
    from headway.records.base import RecordKind as RecordKind
    from headway.records.chat import Conversation as Conversation
    from headway.records.chat import Kind as _ChatKind
    from headway.records.preference import Kind as _PreferenceKind
    from headway.records.unpaired import Kind as _UnpairedKind
    from headway.store.reader import Store as Store
    from headway.store.source import TokenSource as TokenSource
    from headway.tasks.answers import AnswerGroup as AnswerGroup
    from headway.tasks.answers import AnswerSampling as AnswerSampling
    from headway.tasks.answers import SampledTokens as SampledTokens
    from headway.tasks.base import Collectives as Collectives
    from headway.tasks.base import FirstPass as FirstPass
    from headway.tasks.base import GateSpec as GateSpec
    from headway.tasks.base import Loss as Loss
    from headway.tasks.base import MetricSums as MetricSums
    from headway.tasks.base import ParameterRule as ParameterRule
    from headway.tasks.base import ReferenceSpec as ReferenceSpec
    from headway.tasks.base import SeenRows as SeenRows
    from headway.tasks.base import StepInfo as StepInfo
    from headway.tasks.base import Task as Task
    from headway.tasks.base import TaskConfig as TaskConfig
    from headway.tasks.base import TaskNeeds as TaskNeeds
    from headway.tasks.base import Term as Term
    from headway.tasks.base import UsualRates as UsualRates
    from headway.text.document import Record as Record
    from headway.text.raw import RawFile as RawFile
    from headway.text.raw import lines as lines
    from headway.tokenizer.chat import Rendered as Rendered
    from headway.tokenizer.chat_template import Turn as Turn
    from headway.track.base import Event as Event
    from headway.track.base import Tracker as Tracker
    from headway.track.base import TrackerConfig as TrackerConfig
    from headway.track.callbacks import Callback as Callback

    ChatKind = _ChatKind
    PreferenceKind = _PreferenceKind
    UnpairedKind = _UnpairedKind

_NAMES_OF_MODULES = {
    "headway.api.results": ("loss_table",),
    "headway.config.section": ("setting",),
    "headway.data.batch": ("ANSWERS", "Batch", "SCORED", "StepBatch"),
    "headway.data.config": ("DataConfig",),
    "headway.data.groups": (
        "Columns",
        "DocumentReader",
        "GroupSource",
        "RecordSource",
        "SourceReader",
        "marks_of",
    ),
    "headway.data.rows": ("RowLayout", "RowPieces"),
    "headway.errors": ("ConfigError", "DataError", "HeadwayError"),
    "headway.model.base": ("Model", "ModelOut"),
    "headway.model.config": ("ModelConfig",),
    "headway.model.encoders.base": ("EncoderConfig", "FrozenMediaEncoder"),
    "headway.tasks.answers": ("AnswerGroup", "AnswerSampling", "SampledTokens"),
    "headway.tasks.base": (
        "Collectives",
        "FirstPass",
        "GateSpec",
        "Loss",
        "MetricSums",
        "ParameterRule",
        "ReferenceSpec",
        "SeenRows",
        "StepInfo",
        "Task",
        "TaskConfig",
        "TaskNeeds",
        "Term",
        "UsualRates",
    ),
    "headway.optim.base": (
        "AveragingOptimizer",
        "Guard",
        "Hyper",
        "MatrixOptimizer",
        "OptimConfig",
        "Optimizer",
    ),
    "headway.parallel.hooks.base": ("Hook", "HookConfig", "StatefulHook"),
    "headway.records.base": (
        "DocumentSettings",
        "EncodeContext",
        "EncodedDocument",
        "ExampleEncoder",
        "RecordFields",
        "RecordKind",
    ),
    "headway.records.chat": ("Conversation",),
    "headway.store.reader": ("Store",),
    "headway.store.source": ("TokenSource",),
    "headway.text.document": ("Record",),
    "headway.text.raw": ("RawFile", "lines"),
    "headway.tokenizer.chat": ("Rendered",),
    "headway.tokenizer.chat_template": ("Turn",),
    "headway.track.base": ("Event", "Tracker", "TrackerConfig"),
    "headway.track.callbacks": ("Callback",),
}
"""Where a name is defined."""
_OTHER_NAMES = {
    "ChatKind": ("headway.records.chat", "Kind"),
    "PreferenceKind": ("headway.records.preference", "Kind"),
    "UnpairedKind": ("headway.records.unpaired", "Kind"),
    "llama": ("headway.model.families.llama", None),
}
"""Where a name is defined under another one; None: it is the module itself."""
_LOCATIONS: dict[str, tuple[str, str | None]] = {
    name: (module, name) for module, names in _NAMES_OF_MODULES.items() for name in names
}
"""Module and attribute of every name that is offered."""
_LOCATIONS |= _OTHER_NAMES

__all__ = sorted(_LOCATIONS)  # pyright: ignore[reportUnsupportedDunderAll]


if not TYPE_CHECKING:  # type checkers would take any name for one of these

    def __getattr__(name: str) -> object:
        if name not in _LOCATIONS:
            raise AttributeError(
                f"headway.plugin offers no {name!r}; docs/extend.md lists the names"
            )

        module_name, attribute = _LOCATIONS[name]
        value: object = importlib.import_module(module_name)
        if attribute is not None:
            value = getattr(value, attribute)
        # The next use finds it without this function.
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return list(__all__)
