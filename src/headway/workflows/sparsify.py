"""Head sparsity from training to a report in one folder: a recipe with head gates comes in,
`<run>/sparsify/` goes out.

    train -> masks_sp0.7.tsv ..., heads.png -> questions and perplexity under each mask
          -> report.md, results.json, pictures

Every part is resumable: a finished run is not trained again, and finished measurements are not
repeated.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError
from headway.eval.long_cases import LongCase, make_cases
from headway.eval.long_context import LongResult, evaluate_long
from headway.eval.long_report import write_long_report
from headway.eval.options import LongPlan
from headway.eval.report import can_draw
from headway.model.head_masks.choice import FULL, NONE, OWN, MaskChoice, MaskSpec, MaskVariant
from headway.runtime.child import run_command
from headway.runtime.device import choose_compute
from headway.runtime.process import headway_command
from headway.workflows.far_check import warn_without_far_gain
from headway.workflows.sparsify_options import SparsifyPlan

if TYPE_CHECKING:
    from headway.tokenizer.load import Tokenizer
    from headway.train.config import Recipe

log = logging.getLogger("headway")

FOLDER = "sparsify"
PICTURE = "heads.png"


@dataclass(frozen=True)
class Sparsified:
    """The run, its mask files and the measurements."""

    run: Path
    masks: list[str]
    training: dict[str, Any]
    result: LongResult

    @property
    def folder(self) -> Path:
        """The folder of masks, report and pictures."""
        return self.run / FOLDER

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        files = [str(self.folder / name) for name in self.masks]
        return {
            "run": str(self.run),
            "report": str(self.folder / "report.md"),
            "masks": files,
            "training": self.training,
            **self.result.to_json(),
        }


@dataclass(frozen=True)
class Checked:
    """A plan that fits its recipe."""

    spec: MaskSpec
    """The run's gates at each sparsity."""
    extra: MaskSpec
    """Further masks to measure."""
    long: LongPlan
    tokenizer: Tokenizer
    """Of the recipe, with which the cases are made."""
    cases: list[LongCase]

    def cases_for(self, tokenizer: Tokenizer | None) -> list[LongCase] | None:
        """The cases for the trained model; None where its tokenizer makes others."""
        if tokenizer is None or tokenizer.fingerprint != self.tokenizer.fingerprint:
            return None
        if tokenizer.chat_template != self.tokenizer.chat_template:
            return None
        return self.cases


def check(recipe: Recipe, plan: SparsifyPlan) -> Checked:
    """Check everything that can be checked before training."""
    from headway.tokenizer.load import load_tokenizer
    from headway.train.resolve import resolve

    gates = recipe.objective.needs.gates
    if gates is None:
        raise ConfigError(
            f"objective.kind is {recipe.objective.kind!r}; sparsify trains head gates. Use "
            f"objective: {{kind: head_sparsity}}."
        )
    if not recipe.checkpoint.at_end:
        raise ConfigError(
            "checkpoint.at_end is false; sparsify reads the trained model from it. Set it to true."
        )

    sparsities = plan.sparsities
    if not sparsities:
        if gates.target is None:
            raise ConfigError(
                f"objective {recipe.objective.kind} has no target sparsity. Give --sparsities, "
                "e.g. 0.5,0.7."
            )
        sparsities = (gates.target,)
    spec = MaskSpec(
        MaskChoice(equal_per_layer=plan.equal_per_layer),
        sparsities,
        plan.random,
        plan.random_draws,
        plan.simple,
        plan.questions.seed,
    )
    has_extra = plan.masks not in (None, NONE)
    extra = MaskSpec(
        MaskChoice(plan.masks or NONE),
        random=plan.random and has_extra,
        random_draws=plan.random_draws,
        simple=plan.simple and has_extra,
        seed=plan.questions.seed,
    )

    # Tokenizer, questions, texts and mask files are tried now, so that a mistake in them is
    # reported before training.
    lengths = plan.lengths or (recipe.data.seq_len,)
    long = LongPlan(plan.tasks, lengths, plan.questions)
    resolved = resolve(recipe)
    longest = resolved.model.max_seq_len
    if max(lengths) > longest:
        raise ConfigError(
            f"--lengths holds {max(lengths)}; the model's max_seq_len is {longest}. Give lengths "
            "up to that."
        )
    if resolved.tokenizer_path is None:
        raise ConfigError(
            "the recipe has no tokenizer, and the tasks need text. Give tokenizer=DIR, or "
            "init.from a model that has one."
        )
    tokenizer = load_tokenizer(resolved.tokenizer_path)
    cases = make_cases(tokenizer, long)
    _check_data(plan.data)
    if plan.masks not in (None, NONE, OWN):
        extra.choice.read(Path(plan.masks), resolved.model)
    return Checked(spec, extra, long, tokenizer, cases)


def _check_data(data: Sequence[str]) -> None:
    """Refuse text that cannot be read, by reading its first document."""
    from headway.eval.dataset import parse_datasets
    from headway.store.reader import is_store
    from headway.text.read import read_documents

    if not data:
        return
    for dataset in parse_datasets(data):
        for path in dataset.paths:
            if not is_store(Path(path)):
                next(iter(read_documents([path])), None)


def sparsify(
    recipe: Recipe, plan: SparsifyPlan, *, train: Callable[[Recipe], dict[str, Any]] | None = None
) -> Sparsified | int:
    """Do every part that is not done yet; returns an exit code if training was stopped. `train` may
    train in other processes.
    """
    from headway.train.session import run_recipe
    from headway.workflows.stopping import stop_code

    checked = check(recipe, plan)
    warn_without_far_gain(recipe)
    run = recipe.run.folder
    log.info("[1/3] train %s", run)
    # `run_recipe` reports a stop in its summary, where `train` raises Interrupted or Terminated.
    summary = (train or run_recipe)(recipe)
    code = stop_code(summary)
    if code is not None:
        return code

    out = run / FOLDER
    out.mkdir(exist_ok=True)
    log.info("[2/3] masks at sparsity %s", ", ".join(map(str, checked.spec.sparsities)))
    files = write_mask_files(run, checked.spec, out)

    log.info("[3/3] measure the model with and without the masks")
    result = _measure(recipe, run, checked, plan)
    write_long_report(out, result, preface=list(_preface(summary, files)))
    return Sparsified(run, files, _training_numbers(summary), result)


def train_in_processes(
    arguments: Sequence[str], nproc: int | None, gpus: str | None
) -> Callable[[Recipe], dict[str, Any]]:
    """A `train` that runs `headway train` with these arguments in a separate process, which may
    start several ranks.
    """
    flags: list[str] = []
    if nproc is not None:
        flags += ["--nproc", str(nproc)]
    if gpus is not None:
        flags += ["--gpus", gpus]

    def train(recipe: Recipe) -> dict[str, Any]:
        child = run_command(headway_command(["train", *arguments, *flags, "--json"]))
        if child.returncode == 0:
            return json.loads(child.stdout)
        return {"exit_code": child.returncode}

    return train


def write_mask_files(run: Path, spec: MaskSpec, out: Path) -> list[str]:
    """One mask file per sparsity, and a picture of the gates with the last one; returns the files'
    names.
    """
    from headway.checkpoint.stored_model import find_model
    from headway.model.head_masks.file import write_masks
    from headway.model.head_masks.plot import draw_masks

    source = find_model(run).mask_source()
    # The variants also hold the full model, which has no masks, and what they are compared with.
    learned = [
        variant.masks
        for variant in spec.variants(source)
        if variant.masks is not None and variant.kind == "masks"
    ]
    # Variants come in ascending order of sparsity, and so do the names.
    files = [f"masks_sp{sparsity:g}.tsv" for sparsity in sorted(spec.sparsities)]
    for masks, name in zip(learned, files, strict=True):
        write_masks(masks, out / name)
    if can_draw():
        draw_masks(learned[-1], out / PICTURE, source.trained_gates().log_alpha)
    return files


def _measure(recipe: Recipe, run: Path, checked: Checked, plan: SparsifyPlan) -> LongResult:
    """Questions and perplexity of the full model and under each mask. Finished measurements in
    `parts` are not repeated.
    """
    from headway.checkpoint.stored_model import find_model
    from headway.eval.dataset import read_texts
    from headway.infer.load import load_model

    compute = choose_compute(recipe.device, "auto")
    loaded = load_model(run, device=compute.device, dtype=compute.dtype)
    source = find_model(run).mask_source()
    variants = list(checked.spec.variants(source))
    assert variants[0].name == FULL
    # The first of the further variants is the full model once more.
    for variant in checked.extra.variants(source)[1:]:
        named = _named(variant, plan.masks)
        # Windows alone may have been measured for the run's own gates.
        if named.name not in {other.name for other in variants}:
            variants.append(named)
    return evaluate_long(
        loaded,
        variants,
        checked.long,
        name=str(run),
        texts=read_texts(plan.data, loaded, plan.questions.bos),
        results_dir=run / FOLDER / "parts",
        target=_target(recipe),
        cases=checked.cases_for(loaded.tokenizer),
    )


def _target(recipe: Recipe) -> float | None:
    """The sparsity that the gates are trained for."""
    gates = recipe.objective.needs.gates
    if gates is None:
        return None
    return gates.target


def _named(variant: MaskVariant, masks: str | None) -> MaskVariant:
    """A variant under the name of its masks; other variants are named by sparsity."""
    if not masks or variant.kind == "windows":
        return variant
    file_name = Path(masks).name
    if variant.compared_with is None:
        return replace(variant, name=file_name)
    # random 2 s=0.50 -> random 2 masks.tsv
    name = variant.name.removesuffix(variant.compared_with) + file_name
    return replace(variant, name=name, compared_with=file_name)


def _training_numbers(summary: dict[str, Any]) -> dict[str, Any]:
    names = ("steps", "first_valid_loss", "last_valid_loss", "tokens_per_second", "seconds")
    return {name: summary[name] for name in names if name in summary}


def _preface(summary: dict[str, Any], files: Sequence[str]) -> Iterable[str]:
    """The Markdown lines of the report before its tables."""
    numbers = ", ".join(
        f"{name.replace('_', ' ')} {value:g}"
        for name, value in _training_numbers(summary).items()
        if isinstance(value, int | float)
    )
    yield f"Training: {numbers}."
    yield ""
    yield (
        "`full` is the model without masks; `s=...` are the run's own gates at a sparsity, `own` "
        "where they ended."
    )
    yield ""
    names = ", ".join(f"`{name}`" for name in files)
    yield f"Masks: {names}; use one with `--masks` of `headway generate` and `headway eval`."
    yield ""
    yield f"![gates of all heads]({PICTURE})"
    yield ""
