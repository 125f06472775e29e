"""The former home of the contract of tasks, kept for one release for plug-ins that import it. They
should import `headway.plugin`."""

from headway.tasks.base import (
    Collectives,
    GateSpec,
    Loss,
    MetricSums,
    ParameterRule,
    ReferenceSpec,
    StepInfo,
    Term,
)
from headway.tasks.base import StepTask as StepObjective
from headway.tasks.base import Task as Objective
from headway.tasks.base import TaskConfig as ObjectiveConfig

__all__ = [
    "Collectives",
    "GateSpec",
    "Loss",
    "MetricSums",
    "Objective",
    "ObjectiveConfig",
    "ParameterRule",
    "ReferenceSpec",
    "StepInfo",
    "StepObjective",
    "Term",
]
