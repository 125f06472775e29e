"""`headway doctor model`: a folder with a config.json comes in; what headway knows of it goes out.

    config.json   its family, and of each key: read, of no effect, or unknown
    weights       parameters matched, missing, extra, of another shape
    tokenizer     its vocabulary beside the model's, the chat template
    uses          generate, train, export hf, export gguf: yes, or why not
    agreement     headway beside transformers, on random weights of a small copy of the config

What a key does is found by trying: the family reads the config without it and with another value.
Nothing of the folder is run, and no weight is read, only headers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.stored_model import find_model
from headway.diagnose.check import Check
from headway.errors import ConfigError, HeadwayError
from headway.model.families._config_keys import METADATA
from headway.model.families.base import WRAPPED, family_for, family_of, to_hf_config
from headway.model.loading.huggingface import (
    CONFIG,
    INDEX,
    PICKLED,
    PICKLED_INDEX,
    WEIGHTS,
    packing,
    read_config,
    read_json,
    survey_weights,
)
from headway.model.loading.other_parts import (
    FOR_PICTURES,
    has_other_parts,
    text_config,
)
from headway.model.loading.unsupported import named_format
from headway.runtime.optional import is_installed

if TYPE_CHECKING:
    from headway.model.config import ModelConfig

READ = "read"
NO_EFFECT = "no effect"
UNKNOWN = "unknown"
OTHER_VALUE = "?"
"""A value that no key takes: what reads it refuses it or changes."""
PARTS = ("vision_config", "audio_config", "text_config")
SHOWN = 6
"""Names that a line lists at most."""


@dataclass(frozen=True)
class KeyFact:
    """What headway does with one key of config.json."""

    key: str
    value: Any
    state: str
    why: str


@dataclass
class ModelReport:
    """All that is known of a folder."""

    folder: Path
    family: str | None = None
    model_type: str | None = None
    keys: list[KeyFact] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    uses: dict[str, str] = field(default_factory=dict)
    """Verb -> "yes", or why not."""
    agreement: dict[str, Any] | None = None

    @property
    def is_usable(self) -> bool:
        """Whether nothing speaks against using it."""
        return not any(check.state == "fail" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "ok": self.is_usable,
            "folder": str(self.folder),
            "family": self.family,
            "model_type": self.model_type,
            "keys": [asdict(fact) for fact in self.keys],
            "checks": [check.to_json() for check in self.checks],
            "uses": self.uses,
            "agreement": self.agreement,
        }


def examine_model(path: Path, *, compares: bool = True) -> ModelReport:
    """Report on a folder, or on a config.json alone; `compares`: also beside transformers."""
    folder = path
    if path.is_file() and path.name == CONFIG:
        folder = path.parent
    elif not path.is_dir():
        raise ConfigError(
            f"{path}: is no folder. Give a folder with a {CONFIG}, or that file itself."
        )
    elif not (path / CONFIG).is_file() and (path / "final" / CONFIG).is_file():
        # A run folder.
        folder = path / "final"

    hf_config = read_json(folder / CONFIG)
    report = ModelReport(folder, model_type=str(hf_config.get("model_type"))[:80])
    config = _examine_config(report, hf_config)
    if config is None:
        return report
    has_weights = _examine_weights(report, config)
    has_tokenizer = _examine_tokenizer(report, config)
    _list_uses(report, config, has_weights, has_tokenizer)
    if compares:
        _compare(report, hf_config, config)
    return report


def _examine_config(report: ModelReport, hf_config: dict[str, Any]) -> ModelConfig | None:
    """The family, and what each key is; None: it cannot be read."""
    text = {key: value for key, value in hf_config.items() if key != "quantization_config"}
    parts = ""
    try:
        if has_other_parts(text):
            text = text_config(text)
            parts = f", the text part of {report.model_type}"
        family = family_for(text)
    except ConfigError as problem:
        report.checks.append(
            Check("family", "fail", str(problem), "Read it with a family module of your own.")
        )
        return None

    report.family = str(vars(family)["__name__"]).rpartition(".")[2]
    if report.family == WRAPPED:
        detail = f"the class of transformers for {text.get('model_type')}{parts}"
    else:
        detail = f"{report.family}, one of headway's own{parts}"
    report.checks.append(Check("family", "ok", detail))

    report.keys = list(_key_facts(text, family.read, is_wrapped=report.family == WRAPPED))
    for key in PARTS:
        if key in hf_config and parts:
            why = "the text part" if key == "text_config" else "kept aside, written back on export"
            report.keys.append(KeyFact(key, "{...}", READ, why))
    try:
        # With the whole file, as every verb reads it: quantised weights are refused here.
        config = read_config(report.folder)
    except HeadwayError as problem:
        report.checks.append(Check("config.json", "fail", str(problem)))
        return None
    unknown = [fact.key for fact in report.keys if fact.state == UNKNOWN]
    if unknown:
        report.checks.append(
            Check(
                "config.json",
                "warn",
                f"{_listed(unknown)}: no setting of this class in the installed transformers",
                "It keeps them and does not read them. Install the version that the model needs.",
            )
        )
    else:
        num_read = sum(fact.state == READ for fact in report.keys)
        detail = f"{num_read} keys are read, {len(report.keys) - num_read} have no effect"
        report.checks.append(Check("config.json", "ok", detail))
    return config


def _key_facts(
    hf_config: dict[str, Any], read: Callable[[Mapping[str, Any]], ModelConfig], *, is_wrapped: bool
) -> Iterator[KeyFact]:
    """What each key is, in the order of the file."""
    known: set[str] = set()
    if is_wrapped:
        known = _settings_of_class(hf_config)
    whole = _outcome(read, hf_config)
    for key, value in hf_config.items():
        if key == "model_type":
            yield KeyFact(key, value, READ, "chooses the family")
        elif key in METADATA or key in FOR_PICTURES:
            yield KeyFact(key, value, NO_EFFECT, "does not change what a forward computes")
        elif is_wrapped and key in known:
            yield KeyFact(key, value, READ, "given to the class of transformers")
        elif is_wrapped:
            yield KeyFact(key, value, UNKNOWN, "no setting of the class")
        else:
            yield _tried(hf_config, key, read, whole)


def _tried(
    hf_config: dict[str, Any],
    key: str,
    read: Callable[[Mapping[str, Any]], ModelConfig],
    whole: ModelConfig | str,
) -> KeyFact:
    """A key of one of headway's families: read it without the key, and with another value."""
    value = hf_config[key]
    without = _outcome(read, {other: hf_config[other] for other in hf_config if other != key})
    if isinstance(whole, str) and without != whole and key in whole:
        return KeyFact(key, value, UNKNOWN, "refused: headway does not compute it")
    if without != whole:
        return KeyFact(key, value, READ, "a setting of the model")
    other = _outcome(read, {**hf_config, key: OTHER_VALUE})
    if other != whole:
        return KeyFact(key, value, READ, "says what is the case without it, too")
    return KeyFact(key, value, NO_EFFECT, "not read by this family, nor by its class")


def _outcome(
    read: Callable[[Mapping[str, Any]], ModelConfig], hf_config: Mapping[str, Any]
) -> ModelConfig | str:
    """The settings that a config.json gives, or the error."""
    try:
        return read(hf_config)
    except HeadwayError as problem:
        return str(problem)


def _settings_of_class(hf_config: Mapping[str, Any]) -> set[str]:
    """The keys that a class of transformers has settings for."""
    from headway.model.stock.classes import make_config

    kind = hf_config.get("model_type")
    try:
        default = make_config({"model_type": kind}, trust_remote_code=False)
    except ConfigError:
        # Code of a folder is not run to look at it.
        return set(hf_config)
    return (
        set(default.to_dict()) | set(type(default).attribute_map) | {"rope_theta", "rope_scaling"}
    )


def _examine_weights(report: ModelReport, config: ModelConfig) -> bool:
    """Compare the tensors of the folder with the config; False: there are none."""
    names = (WEIGHTS, INDEX, PICKLED, PICKLED_INDEX)
    if not any((report.folder / name).is_file() for name in names):
        other = named_format(report.folder)
        if other is not None:
            report.checks.append(Check("weights", "fail", other))
        else:
            detail = f"the folder holds no {WEIGHTS}"
            report.checks.append(Check("weights", "warn", detail, "Download the whole model."))
        return False
    try:
        survey = survey_weights(report.folder, config)
    except HeadwayError as problem:
        report.checks.append(Check("weights", "fail", str(problem)))
        return True
    if survey.missing:
        report.checks.append(
            Check(
                "weights",
                "fail",
                f"missing: {_listed(survey.missing)}",
                "Download the whole model again.",
            )
        )
    if survey.extra:
        report.checks.append(
            Check(
                "weights",
                "fail",
                f"no parameters of this config: {_listed(survey.extra)}",
                "Look whether config.json belongs to these files.",
            )
        )
    for problem in survey.wrong[:SHOWN]:
        report.checks.append(Check("weights", "fail", problem))
    if not (survey.missing or survey.extra or survey.wrong):
        detail = f"{survey.matched} parameters match"
        form = packing(report.folder)
        if form is not None:
            detail += f"; stored in {form.description}, dequantised while they are read: "
            detail += "what is trained or written from them has 16 or 32 bits"
        report.checks.append(Check("weights", "ok", detail))
    return True


def _examine_tokenizer(report: ModelReport, config: ModelConfig) -> bool:
    """Load the tokenizer and try its chat template; False: there is none."""
    from headway.checkpoint.stored_model import check_vocabulary
    from headway.tokenizer.chat import default_template, find_template
    from headway.tokenizer.folder import has_tokenizer
    from headway.tokenizer.load import load_tokenizer

    if not has_tokenizer(report.folder):
        report.checks.append(
            Check("tokenizer", "warn", "none", "Put its files next to config.json.")
        )
        return False
    try:
        tokenizer = load_tokenizer(report.folder)
        check_vocabulary(tokenizer, report.folder, config)
    except HeadwayError as problem:
        report.checks.append(Check("tokenizer", "fail", str(problem)))
        return True
    detail = f"{tokenizer.vocab_size} ids, the model has {config.vocab} rows"
    report.checks.append(Check("tokenizer", "ok", detail))
    try:
        name = default_template(tokenizer)
        find_template(name, tokenizer)
    except HeadwayError as problem:
        report.checks.append(Check("chat template", "warn", str(problem)))
    else:
        detail = f"none of its own; conversations use {name}"
        if tokenizer.chat_template is not None:
            detail = "the tokenizer's own"
        report.checks.append(Check("chat template", "ok", detail))
    return True


def _list_uses(
    report: ModelReport, config: ModelConfig, has_weights: bool, has_tokenizer: bool
) -> None:
    """Which verbs take the model."""
    uses = report.uses
    absent = None
    if not report.is_usable:
        absent = "see the failed checks"
    elif not has_weights:
        absent = "no weights here"
    elif not has_tokenizer:
        absent = "no tokenizer here"
    uses["generate"] = absent or "yes"
    uses["train"] = _reason(lambda: _check_training(config)) or "yes"
    sees = any(fact.key == "vision_config" for fact in report.keys)
    if sees:
        problem = absent or _reason(lambda: find_model(report.folder).with_vision())
        uses["pictures"] = problem or "yes"
    uses["export hf"] = _reason(lambda: to_hf_config(config)) or "yes"
    uses["export gguf"] = _reason(lambda: _check_gguf(config)) or "yes"
    for use, answer in uses.items():
        report.checks.append(Check(use, "ok" if answer == "yes" else "warn", answer))


def _reason(check: Callable[[], object]) -> str | None:
    """Why a check refuses; None: it does not."""
    try:
        check()
    except HeadwayError as problem:
        return str(problem)
    return None


def _check_training(config: ModelConfig) -> None:
    if config.family != WRAPPED:
        family_of(config.family)
        return
    from headway.model.stock.facts import check_trainable

    check_trainable(config)


def _check_gguf(config: ModelConfig) -> None:
    from headway.export.gguf_writer import gguf_target

    gguf_target(config)


def _compare(report: ModelReport, hf_config: dict[str, Any], config: ModelConfig) -> None:
    """Compare with transformers on random weights of a small copy."""
    name = "transformers"
    if not is_installed(name):
        report.checks.append(
            Check(
                name, "warn", "not compared: it is not installed", "pip install 'transformers>=5'"
            )
        )
        return
    from headway.diagnose.agreement import compare
    from headway.diagnose.small_model import shrunk
    from headway.model.stock.classes import foreign

    text = {key: value for key, value in hf_config.items() if key != "quantization_config"}
    try:
        if has_other_parts(text):
            text = text_config(text)
        # Whatever the code of a class raises for sizes that it does not expect becomes one line.
        with foreign("a small copy of config.json"):
            _check_defaults(report, text, config)
            agreement = compare(shrunk(text))
    except HeadwayError as problem:
        report.checks.append(Check(name, "warn", f"not compared: {problem}"))
        return
    report.agreement = agreement.to_json()
    detail = (
        f"logits {agreement.logits:.1e}, gradients {agreement.gradients:.1e}, "
        f"packed {agreement.packed:.1e}, cached {agreement.cached:.1e}, "
        "greedy text and export the same"
    )
    problem = agreement.problem
    if problem is None:
        report.checks.append(Check(name, "ok", f"{detail}, on random weights of a small copy"))
    else:
        report.checks.append(
            Check(name, "fail", problem, "Please report it, with this config.json.")
        )


def _check_defaults(report: ModelReport, text: dict[str, Any], config: ModelConfig) -> None:
    """Absent keys mean to headway what they mean to transformers: the completed config is the same
    model."""
    if config.family == WRAPPED:
        return
    from headway.model.stock.classes import make_config

    completed = json.loads(
        make_config(text, trust_remote_code=False).to_json_string(use_diff=False)
    )
    again = family_of(config.family).read({**completed, "architectures": text.get("architectures")})

    def explicit(shape: ModelConfig) -> ModelConfig:
        return shape.with_(head_dim=shape.head_size, num_kv_heads=shape.kv_heads)

    ours = explicit(config).model_dump()
    theirs = explicit(again).model_dump()
    for key, value in ours.items():
        if value != theirs[key]:
            report.checks.append(
                Check(
                    "defaults",
                    "fail",
                    f"model.{key} is {value!r}, and transformers makes it {theirs[key]!r}",
                    "Please report it, with this config.json.",
                )
            )


def _listed(names: list[str] | tuple[str, ...]) -> str:
    """Some names and how many more there are."""
    shown = ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        return f"{shown} and {len(names) - SHOWN} more"
    return shown
