"""Head sparsity from training to a report in one folder: a recipe with head gates comes in, `<run>/sparsify/` goes out.

    train -> masks_sp0.7.tsv ... heads.png -> questions and perplexity under each mask -> report.md, results.json, pictures

Every part is resumable: a finished run is not trained again, and finished measurements are not repeated.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError
from headway.eval.long_context import LongPlan, LongResult, evaluate_long, make_cases
from headway.eval.long_report import write_long_report
from headway.eval.report import can_draw
from headway.model.head_masks.choice import FULL, NONE, OWN, MaskChoice, MaskSpec, MaskVariant
from headway.runtime.child import run_command
from headway.runtime.device import choose_compute
from headway.runtime.process import headway_command

if TYPE_CHECKING:
    from headway.train.config import Recipe

log = logging.getLogger("headway")

FOLDER = "sparsify"
PICTURE = "heads.png"
DEFAULT_TASKS = ("key_value",)


@dataclass(frozen=True)
class SparsifyPlan:
    """The masks to export and the measurements to make."""

    sparsities: tuple[float, ...] = ()
    """Shares of streaming heads to export and measure; empty: the objective's target."""
    tasks: tuple[str, ...] = DEFAULT_TASKS
    lengths: tuple[int, ...] = ()
    """Tokens of the prompts; empty: the recipe's data.seq_len."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 2
    random: bool = True
    """Also measure a random mask with as many heads for each mask."""
    equal_per_layer: bool = False
    data: tuple[str, ...] = ()
    """Texts or stores to score by tokens of context."""
    rows: int = 4
    seed: int = 0
    chunk_tokens: int | None = None
    masks: str | None = None
    """Further masks to measure: own (where the gates ended) or a file."""
    template: str | None = None
    """Chat template of the questions; None: plain text to continue."""
    bos: bool | None = None
    """Whether questions and texts start with the begin token; None: if the model expects it."""


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


def check(recipe: Recipe, plan: SparsifyPlan) -> Checked:
    """Check everything that can be checked before training."""
    from headway.tokenizer.load import load_tokenizer
    from headway.train.resolve import resolve

    objective: Any = recipe.objective
    if objective.needs.gates is None:
        raise ConfigError(
            f"objective.kind is {objective.kind!r}; sparsify trains head gates. Use objective: {{kind: head_sparsity}}."
        )
    if not recipe.checkpoint.at_end:
        raise ConfigError(
            "checkpoint.at_end is false; sparsify reads the trained model from it. Set it to true."
        )
    sparsities = plan.sparsities or (objective.target,)
    extra = MaskSpec(
        MaskChoice(plan.masks or NONE),
        random=plan.random and plan.masks not in (None, NONE),
        seed=plan.seed,
    )
    spec = MaskSpec(
        MaskChoice(equal_per_layer=plan.equal_per_layer), sparsities, plan.random, plan.seed
    )
    lengths = plan.lengths or (recipe.data.seq_len,)
    long = LongPlan(
        plan.tasks,
        lengths,
        plan.depths,
        plan.samples,
        plan.seed,
        plan.chunk_tokens,
        plan.rows,
        plan.template,
        plan.bos,
    )
    resolved = resolve(recipe)
    longest = resolved.model.max_seq_len
    if max(lengths) > longest:
        raise ConfigError(
            f"--lengths holds {max(lengths)}; the model's max_seq_len is {longest}. Give lengths up to that."
        )
    if resolved.tokenizer_path is None:
        raise ConfigError(
            "the recipe has no tokenizer, and the tasks need text. Give tokenizer=DIR, or init.from a model that has one."
        )
    make_cases(load_tokenizer(resolved.tokenizer_path), long)
    _check_data(plan.data)
    if plan.masks not in (None, NONE, OWN):
        extra.choice.read(Path(plan.masks), resolved.model)
    return Checked(spec, extra, long)


def _check_data(data: Sequence[str]) -> None:
    """Refuse text that cannot be read, by reading its first document."""
    from headway.eval.dataset import parse_datasets
    from headway.store.reader import is_store
    from headway.text.read import read_documents

    for dataset in parse_datasets(data) if data else []:
        for path in dataset.paths:
            if not is_store(Path(path)):
                next(iter(read_documents([path])), None)


def sparsify(
    recipe: Recipe, plan: SparsifyPlan, *, train: Callable[[Recipe], dict[str, Any]] | None = None
) -> Sparsified | int:
    """Do every part that is not done yet; returns an exit code if training was stopped. `train` may train in other processes."""
    from headway.train.session import (
        run_recipe as train_here,
    )  # a stop is an exit code here, not a signal
    from headway.workflows.stopping import stop_code

    checked = check(recipe, plan)
    run = recipe.run.folder
    log.info("[1/3] train %s", run)
    summary = (train or train_here)(recipe)
    if (code := stop_code(summary)) is not None:
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
    """A `train` that runs `headway train` with these arguments in a separate process, which may start several ranks."""
    flags = [
        text
        for flag, value in (("--nproc", nproc), ("--gpus", gpus))
        if value is not None
        for text in (flag, str(value))
    ]

    def train(recipe: Recipe) -> dict[str, Any]:
        child = run_command(headway_command(["train", *arguments, *flags, "--json"]))
        return (
            json.loads(child.stdout) if child.returncode == 0 else {"exit_code": child.returncode}
        )

    return train


def write_mask_files(run: Path, spec: MaskSpec, out: Path) -> list[str]:
    """One mask file per sparsity, and a picture of the gates with the last one; returns the files' names."""
    from headway.checkpoint.stored_model import find_model
    from headway.model.head_masks.file import write_masks
    from headway.model.head_masks.plot import draw_masks

    source = find_model(run).mask_source()
    learned = [
        one.masks
        for one in spec.variants(source)
        if one.masks is not None and one.masks_from != "random"
    ]
    files = [f"masks_sp{sparsity:g}.tsv" for sparsity in sorted(spec.sparsities)]
    for masks, name in zip(learned, files, strict=True):
        write_masks(masks, out / name)
    if can_draw():
        draw_masks(learned[-1], out / PICTURE, source.trained_gates().log_alpha)
    return files


def _measure(recipe: Recipe, run: Path, checked: Checked, plan: SparsifyPlan) -> LongResult:
    from headway.checkpoint.stored_model import find_model
    from headway.eval.dataset import read_texts
    from headway.infer.load import load_model

    compute = choose_compute(recipe.device, "auto")
    loaded = load_model(run, device=compute.device, dtype=compute.dtype)
    source = find_model(run).mask_source()
    variants = [
        *checked.spec.variants(source),
        *(_named(one, plan.masks) for one in checked.extra.variants(source)[1:]),
    ]
    assert variants[0].name == FULL
    results_dir = run / FOLDER / "parts"
    return evaluate_long(
        loaded,
        variants,
        checked.long,
        name=str(run),
        texts=read_texts(plan.data, loaded, plan.bos),
        results_dir=results_dir,
    )


def _named(variant: MaskVariant, masks: str | None) -> MaskVariant:
    """A variant under the name of its masks; other variants are named by sparsity."""
    return replace(
        variant,
        name=("random " if variant.masks_from == "random" else "")
        + (Path(masks).name if masks else variant.name),
    )


def _training_numbers(summary: dict[str, Any]) -> dict[str, Any]:
    names = ("steps", "first_valid_loss", "last_valid_loss", "tokens_per_second", "seconds")
    return {name: summary[name] for name in names if name in summary}


def _preface(summary: dict[str, Any], files: Sequence[str]) -> Iterable[str]:
    numbers = ", ".join(
        f"{name.replace('_', ' ')} {value:g}"
        for name, value in _training_numbers(summary).items()
        if isinstance(value, int | float)
    )
    yield f"Training: {numbers}."
    yield ""
    yield "`full` is the model without masks; `s=...` are the run's own gates at a sparsity, `own` where they ended."
    yield ""
    yield f"Masks: {', '.join(f'`{name}`' for name in files)}; use one with `--masks` of `headway generate` and `headway eval`."
    yield ""
    yield f"![gates of all heads]({PICTURE})"
    yield ""
