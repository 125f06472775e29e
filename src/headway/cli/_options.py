"""Options that several verbs share, each declared once: single ones as constants, those that belong together as a dataclass.

A verb takes a group like any parameter; `flatten` shows typer the fields of the group instead. A group is a dataclass of the command line
(its defaults are options of typer), or the dataclass that the work takes (its fields are declared with `config/options.py`):

    def ppl(model: Path = MODEL, masks: MaskOptions = GROUP) -> None        # --model, --masks, --equal-per-layer, ...
    def pack(source: Path = SOURCE, options: PackOptions = GROUP) -> None   # --pack-length, --mode, ...
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import Field, dataclass, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from headway.cli._complete import complete_recipe
from headway.cli._output import exit_with
from headway.config.options import OPTION, CommandOption
from headway.errors import ConfigError, Terminated
from headway.runtime.process import LAUNCHER_PID

if TYPE_CHECKING:
    from headway.infer.engine.request import Speculation
    from headway.infer.load import LoadedModel
    from headway.model.head_masks.choice import MaskChoice
    from headway.parallel.collectives import RankGroup
    from headway.runtime.executor.work import Placement
    from headway.train.config import Recipe

log = logging.getLogger("headway")

JSON = typer.Option(
    False,
    "--json",
    help="Print the result as JSON on standard output, everything else on standard error.",
)
RECIPE = typer.Argument(
    None,
    metavar="[RECIPE] [section.key=value]...",
    help="A recipe (a file, or a name such as lora or laptop/sft) and overrides; both are optional.",
    autocompletion=complete_recipe,
)


class ModelOption(OptionInfo):
    """A --model whose value may also be given as an argument: `headway chat runs/mine`. With a default of ..., one of them is needed."""


def model_option(default: Any, help: str, metavar: str | None = None) -> Any:
    """Declare a `ModelOption`, as `typer.Option` declares others."""
    return ModelOption(default=default, help=help, metavar=metavar)


MODEL_HELP = "A run folder, a checkpoint folder, a Hugging Face folder, a GGUF file or a hub id (ORGANISATION/NAME)."
MODEL = model_option(..., help=MODEL_HELP)
MODEL_ARGUMENT = "model_argument"
"""Name of the parameter that `flatten` adds for a `ModelOption`."""
REVISION = typer.Option(
    None, help="With a hub id: a branch, tag or commit of the model; default: main."
)
MORE_INPUTS = typer.Argument(
    None, metavar="[FILE]...", help="More input files, as the shell expands `--input *.jsonl`."
)
INPUTS = typer.Option(..., "--input", help="Raw files, folders or globs; may be repeated.")
TEMPLATE_FLAGS = ("--chat-template", "--template")
"""One option: every verb that takes a chat template accepts both spellings."""
CHAT_TEMPLATE = typer.Option(
    None,
    *TEMPLATE_FLAGS,
    help="Treat prompts as questions in this chat template: a name, tokenizer (the model's own) or a .jinja file.",
)
RECORD_KEYS = typer.Option(
    None,
    metavar="NAME=KEY,...",
    help="Chat, preference: names of the record's keys, e.g. prompt=question,response=answer.",
)
STORE_KIND = typer.Option(
    None,
    "--from",
    help="Format of the input if it cannot be detected: internlm, zero2all, zero2all-sft, mds, megatron.",
)
TASKS_AT_A_TIME = typer.Option(
    None,
    "--workers",
    min=1,
    help="With --on: tasks at a time; default: one per core, of the cluster with ray; with slurm 16 array elements.",
)
EQUAL_PER_LAYER = typer.Option(
    False,
    "--equal-per-layer",
    help="Keep the same number of full heads in every layer, the best of each.",
)
GROUP: Any = None
"""Default of a parameter that is a group of options."""


@dataclass(frozen=True)
class ManyMachines:
    """Where the tasks of a data verb run."""

    on: str | None = typer.Option(
        None,
        metavar="KIND",
        help="Run as tasks on: local (processes of this machine), ray[://HOST:PORT] (without an address a cluster of this machine), "
        "slurm[:partition=P,mem=8G,...] (array jobs). The output is the same; run again after a stop, the command continues.",
    )
    work_dir: Path | None = typer.Option(
        None,
        help="With --on: a folder that all machines share, for results of tasks; default: OUT.work next to the output.",
    )
    task_size: str = typer.Option("32MB", help="With --on: input bytes of one task.")

    def placement(self, workers: int | None) -> Placement | None:
        """The options as one value; None without --on, where the others have no meaning."""
        from headway.runtime.executor.work import Placement
        from headway.text.sample import parse_bytes

        if self.on is None:
            refuse_flags(
                "a run without --on",
                {
                    "--work-dir": self.work_dir,
                    "--task-size": None if self.task_size == "32MB" else "",
                },
            )
            return None
        return Placement(
            self.on, workers, self.work_dir, parse_bytes(self.task_size, "--task-size")
        )


@dataclass(frozen=True)
class MaskOptions:
    """Head masks: which heads attend to the whole context and which only to sinks and a window."""

    masks: str | None = typer.Option(
        None,
        metavar="own|none|FILE",
        help="Head masks; a head at 0 keeps only sinks and a window. own: from the model's gates (the default if it has gates); "
        "none; or a file (masks.tsv, or DuoAttention's file or folder).",
    )
    equal_per_layer: bool = EQUAL_PER_LAYER
    stream_window: int | None = typer.Option(
        None, help="Newest tokens a streaming head keeps; default: from the masks, else 1024."
    )
    stream_sinks: int | None = typer.Option(
        None, help="First tokens a streaming head keeps; default: from the masks, else 128."
    )

    def choice(self) -> MaskChoice:
        """The masks, checked."""
        from headway.model.head_masks.choice import MaskChoice

        return MaskChoice(self.masks, self.equal_per_layer, self.stream_window, self.stream_sinks)


@dataclass(frozen=True)
class ComputeOptions:
    """Where a model computes, and in which precision."""

    device: str = typer.Option("auto", help="auto, cpu, cuda or mps.")
    precision: str = typer.Option(
        "auto", help="auto (bf16 on a GPU that has it, else fp32), fp32 or bf16."
    )

    def check(self) -> None:
        """Refuse an unknown device or precision."""
        for name, value, known in (
            ("device", self.device, ("auto", "cpu", "cuda", "mps")),
            ("precision", self.precision, ("auto", "fp32", "bf16")),
        ):
            if value not in known:
                raise ConfigError(
                    f"--{name} is {value!r}; it must be {', '.join(known[:-1])} or {known[-1]}."
                )

    def load(self, model: Path, *, scores: bool = False) -> LoadedModel:
        """A model on this rank's device, without masks; with `scores` a reward model."""
        from headway.infer.load import load_model
        from headway.runtime.device import choose_compute
        from headway.runtime.process import from_environment

        compute = choose_compute(self.device, self.precision, from_environment().local_rank)
        return load_model(model, device=compute.device, dtype=compute.dtype, scores=scores)


@dataclass(frozen=True)
class SpeculateOptions:
    """Speculative decoding: several tokens are guessed and checked at once, with the same result."""

    speculate: str | None = typer.Option(
        None,
        metavar="ngram|MODEL",
        help="Guess tokens and check several at a time; the text stays the same. ngram: what followed the last tokens earlier; "
        "or a small model with the same tokenizer.",
    )
    speculate_tokens: int | None = typer.Option(
        None, help="With --speculate: most tokens that are guessed at a time; default: 4."
    )

    def speculation(self) -> Speculation | None:
        """The options as one value; None without --speculate."""
        from headway.infer.engine.request import Speculation

        if self.speculate is None:
            refuse_flags(
                "decoding without --speculate", {"--speculate-tokens": self.speculate_tokens}
            )
            return None
        tokens = {} if self.speculate_tokens is None else {"tokens": self.speculate_tokens}
        return Speculation(None if self.speculate == "ngram" else self.speculate, **tokens)


@dataclass(frozen=True)
class RankOptions:
    """How many ranks of this machine share the work."""

    nproc: int | None = typer.Option(
        None,
        help="Ranks that share the work on this machine; default: one per chosen GPU, else one.",
    )
    gpus: str | None = typer.Option(
        None,
        help="GPUs: ids as in nvidia-smi (0,1), UUIDs, a type (A800), auto (all free ones) or none.",
    )


def with_masks(loaded: LoadedModel, choice: MaskChoice, *, is_first: bool = True) -> LoadedModel:
    """The model under the chosen masks; the first rank logs which masks are used."""
    from headway.model.head_masks.masks import in_words

    chosen = loaded.with_mask_choice(choice)
    if is_first and (choice.masks is not None or chosen.masks is not None):
        hint = " Use --masks none to ignore them." if choice.masks is None else ""
        log.info("%s: masks %s.%s", loaded.path, in_words(chosen.describe_masks()), hint)
    return chosen


def read_recipe(
    arguments: Sequence[str] | None, *, makes_tokenizer: bool = False, makes_name: bool = False
) -> Recipe:
    """The recipe that command-line arguments describe; without one, raw data in `data.train` chooses it.

    `makes_tokenizer`: train the tokenizer that such a choice may need. `makes_name`: choose the folder of a run without a name.
    """
    from headway.config.load import load
    from headway.config.shipped import find_recipe
    from headway.train.config import Recipe
    from headway.train.run_name import with_name

    path, overrides = split_recipe(arguments)
    say = log.debug if LAUNCHER_PID in os.environ else log.info
    if path is None and any(one.startswith("data.") for one in overrides):
        from headway.workflows.first_run import choose_recipe

        first = choose_recipe(overrides)
        path, overrides = first.recipe, first.overrides
        for line in first.lines:
            say(line)
        if makes_tokenizer and first.tokenizer is not None:
            first.tokenizer.make()
    file = None if path is None else find_recipe(path, say)
    recipe = load(Recipe, file, overrides, say, translate_key)
    return with_name(recipe, file, overrides, say) if makes_name else recipe


def translate_key(key: str, value: Any, is_nested: bool = False) -> str | None:
    """How headway writes a key of another trainer; None if it is not known."""
    from headway.workflows.import_config.names import translate

    return translate(key, value, is_nested=is_nested)


def split_recipe(arguments: Sequence[str] | None) -> tuple[Path | None, list[str]]:
    """The recipe file among command-line arguments, and the overrides."""
    given = list(arguments or ())
    files = [argument for argument in given if "=" not in argument]
    if len(files) > 1:
        raise ConfigError(
            f"two recipes were given, {files[0]} and {files[1]}; give one. Overrides have the form section.key=value."
        )
    return Path(files[0]) if files else None, [argument for argument in given if "=" in argument]


def refuse_flags(context: str, flags: dict[str, Any]) -> None:
    """Refuse flags that have no effect in this context; a flag that was not given is None."""
    if given := [flag for flag, value in flags.items() if value is not None]:
        raise ConfigError(f"{given[0]} has no meaning with {context}. Leave it out.")


def on_ranks(
    context: typer.Context,
    compute: ComputeOptions,
    ranks: RankOptions,
    work: Callable[[RankGroup], None],
) -> None:
    """Run `work` on the ranks that the options request; each is started with the command line of this verb."""
    from headway.launch.launcher import LaunchOptions, run_on_ranks

    exit_with(
        run_on_ranks(
            compute.device, LaunchOptions(ranks.nproc, ranks.gpus), command_line(context), work
        )
    )


def command_line(context: typer.Context) -> list[str]:
    """The verb and its options as arguments of `headway`; options at their default are left out."""
    words: list[str] = []
    here: Any = context
    while here.parent is not None:
        words.insert(0, here.info_name)
        here = here.parent
    positional: list[str] = []
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name not in context.params or value == parameter.get_default(context):
            continue
        values: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
        if parameter.param_type_name == "argument":
            positional += map(str, values)
        elif isinstance(value, bool):
            words += [parameter.opts[0] if value else parameter.secondary_opts[0]]
        else:
            # One word each, so that a value may begin with a dash.
            words += [f"{parameter.opts[0]}={one}" for one in values]
    return [*words, *(["--", *positional] if positional else [])]


def flatten(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as typer must see it.

    A group of options is replaced by its fields. `--model` comes with `--revision`, and with an argument that means the same.
    """
    hints = get_type_hints(function)
    groups: dict[str, Any] = {}
    parameters: list[Parameter] = []
    model_options: list[ModelOption] = []
    has_revision = False

    def add(name: str, default: Any, annotation: Any) -> None:
        if isinstance(default, ModelOption):
            model_options.append(default)
            argument = typer.Argument(
                None,
                metavar=default.metavar or "MODEL",
                help="The same as --model.",
                show_default=False,
            )
            parameters.append(
                Parameter(
                    MODEL_ARGUMENT,
                    Parameter.KEYWORD_ONLY,
                    default=argument,
                    annotation=_or_none(annotation),
                )
            )
            default = copy(default)
            default.default = None
            annotation = _or_none(annotation)
        parameters.append(
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )

    for parameter in signature(function).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            groups[parameter.name] = kind
            types = get_type_hints(kind)
            for field in option_fields(kind):
                add(field.name, *as_typer(field, types[field.name]))
        else:
            add(parameter.name, parameter.default, kind)
        if parameter.default is MODEL:
            has_revision = True
            add("revision", REVISION, str | None)

    def command(**given: Any) -> None:
        if model_options:
            given["model"] = chosen_model(
                given["model"], given.pop(MODEL_ARGUMENT), model_options[0]
            )
        if has_revision:
            given["model"] = at_revision(given["model"], given.pop("revision"))
        grouped = {name: fill_group(kind, given) for name, kind in groups.items()}
        try:
            function(**given, **grouped)
        except Terminated as stopped:  # Ctrl-C too: Interrupted is one
            if str(stopped):
                log.info("%s", stopped)
            raise typer.Exit(stopped.exit_code) from None

    command.__doc__ = function.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return command


def option_fields(kind: Any) -> list[Field[Any]]:
    """The fields of a group that are options."""
    return [
        field
        for field in fields(kind)
        if OPTION in field.metadata or isinstance(field.default, OptionInfo)
    ]


def as_typer(field: Field[Any], annotation: Any) -> tuple[Any, Any]:
    """The default and the type of an option as typer takes them."""
    declared: CommandOption | None = field.metadata.get(OPTION)
    if declared is None:
        return field.default, annotation
    if declared.read is not None:
        annotation = str | None
        if declared.default is not None:
            annotation = type(declared.default)
    elif get_origin(annotation) is Literal:
        # The dataclass says which words are known, in the words of headway.
        annotation = str
    made = typer.Option(declared.default, *declared.flags, help=declared.help, **declared.shown)
    return made, annotation


def option_of(kind: Any, name: str) -> Any:
    """One option of a group, for a verb that takes no other."""
    field = next(field for field in option_fields(kind) if field.name == name)
    return as_typer(field, get_type_hints(kind)[name])[0]


def fill_group(kind: Any, given: dict[str, Any]) -> Any:
    """A group with the values that were given, which leave `given`."""
    values: dict[str, Any] = {}
    for field in option_fields(kind):
        value = given.pop(field.name)
        declared: CommandOption | None = field.metadata.get(OPTION)
        if declared is not None and declared.read is not None:
            value = declared.read(value)
        values[field.name] = value
    return kind(**values)


def _or_none(annotation: Any) -> Any:
    """The type of an option that may be left out; a list may be empty anyway."""
    return annotation if get_origin(annotation) is list else annotation | None


def chosen_model(option: Any, argument: Any, declared: ModelOption) -> Any:
    """The model, given as --model or as an argument. Lists stay lists."""
    if option and argument:
        words = [
            ", ".join(map(str, one)) if isinstance(one, list) else str(one)
            for one in (argument, option)
        ]
        raise ConfigError(
            f"the model is given twice: {words[0]}, and --model {words[1]}. Leave one of them out."
        )
    if declared.default is ... and not option and not argument:
        raise ConfigError(
            f"no model is given. Name it after the verb or with --model. {declared.help}"
        )
    return argument or option


def at_revision(model: Path, revision: str | None) -> Path:
    """The model with `--revision` in its name; refused where the name is a folder."""
    if revision is None:
        return model
    from headway.text.hub import is_hub_id, split_revision

    if model.exists() or not is_hub_id(str(model)):
        raise ConfigError(
            f"--revision is {revision!r}, and --model {model} is no hub id (ORGANISATION/NAME). Leave --revision out."
        )
    name, own = split_revision(str(model))
    if own not in (None, revision):
        raise ConfigError(
            f"--model {model} names a revision, and --revision is {revision!r}. Give one of them."
        )
    return Path(f"{name}@{revision}")
