"""KTO, a whole task: its settings (here), how labelled answers and their KL completions are read
(source.py), and its loss (loss.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from headway.config.section import setting
from headway.tasks.base import ReferenceSpec, TaskConfig, TaskNeeds, UsualRates
from headway.tasks.preference import PREFERENCE_RATES

if TYPE_CHECKING:
    from headway.data.config import DataConfig
    from headway.data.groups import SourceReader
    from headway.tasks.kto.loss import KTO


class Config(TaskConfig):
    """Settings of KTO."""

    kind: str = setting("kto", "kto.", on_resume="fixed")
    beta: float = setting(
        0.1,
        "How strongly the model is kept near the reference; a smaller value lets it move further.",
        gt=0,
    )
    desirable_weight: float = setting(1.0, "Weight of the loss of good answers.", ge=0)
    undesirable_weight: float = setting(
        1.0, "Weight of the loss of bad answers; lower it where there are many more of them.", ge=0
    )
    reference: str | None = setting(
        None,
        "The reference model: a run, a checkpoint or a Hugging Face folder; null = the weights "
        "the run starts from.",
        on_resume="fixed",
    )
    reference_logps: Literal["live", "cached"] = setting(
        "live",
        "live: keep the reference as a second model. cached: score the records it reads once and "
        "store the results in data.cache_dir.",
    )

    @property
    def reads(self) -> tuple[str, ...]:
        """Labelled answers; a pair counts as one good and one bad answer."""
        return ("unpaired", "preference")

    @property
    def usual_rates(self) -> UsualRates | None:
        """The learning rates of other preference tasks."""
        return PREFERENCE_RATES

    def reader(self, config: DataConfig) -> SourceReader:
        """Records with their KL completions, which are no longer than a row."""
        from headway.tasks.kto.source import UnpairedReader

        return UnpairedReader(config.seq_len)

    @property
    def needs(self) -> TaskNeeds:
        """A frozen reference, live or as stored log-probabilities of records and KL completions."""
        from headway.tasks.kto.loss import RecordColumns

        is_cached = self.reference_logps == "cached"
        return TaskNeeds(frozen=ReferenceSpec(self.reference, is_cached, RecordColumns()))

    def build(self) -> KTO:
        from headway.tasks.kto.loss import KTO

        return KTO(self)
