"""Options that several verbs share, each declared once: single ones as constants, those that belong
together as a dataclass.

A verb takes a group like any parameter; `flatten` shows typer the fields of the group instead. A
group is a dataclass of the command line (its defaults are options of typer), or the dataclass that
the work takes (its fields are declared with `config/options.py`):

    # --model, --device, --precision
    def reward(model: Path = MODEL, compute: ComputeOptions = GROUP) -> None

    # SRC, --pack-length, --mode, ...
    def pack(source: Path = SOURCE, options: PackOptions = GROUP) -> None

    # with another default of --max-new-tokens
    def chat(options: GenerateOptions = group(GenerateOptions(1024))) -> None

    # --from alone
    def inspect(path: str = PATH, source: ConvertOptions = group(only=("kind",))) -> None
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from functools import cache
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from headway.cli._complete import complete_recipe
from headway.cli._output import exit_with
from headway.config.options import (
    INNER_OPTIONS,
    OPTION,
    PROMPT_TEMPLATE_HELP,
    TEMPLATE_FLAGS,
    CommandOption,
)
from headway.errors import ConfigError, Terminated
from headway.runtime.process import LAUNCHER_PID
from headway.text.record_keys import KEYS_HELP, KEYS_METAVAR

if TYPE_CHECKING:
    from headway.infer.engine.request import Speculation
    from headway.infer.load import LoadedModel
    from headway.launch.options import LaunchOptions
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
    help="A recipe (a file, or a name such as lora or laptop/sft) and overrides; both are "
    "optional.",
    autocompletion=complete_recipe,
)


# A class of its own marks the option: `flatten` knows by it that an argument is to be added.
class ModelOption(OptionInfo):
    """A --model whose value may also be given as an argument: `headway chat runs/mine`. With a
    default of ..., one of them is needed.
    """


def model_option(default: Any, help: str, metavar: str | None = None) -> Any:
    """Declare a `ModelOption`, as `typer.Option` declares others."""
    return ModelOption(default=default, help=help, metavar=metavar)


MODEL_HELP = (
    "A run folder, a checkpoint folder, a Hugging Face folder, a GGUF file or a hub id "
    "(ORGANISATION/NAME)."
)
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
CHAT_TEMPLATE = typer.Option(None, *TEMPLATE_FLAGS, help=PROMPT_TEMPLATE_HELP)
RECORD_KEYS = typer.Option(None, metavar=KEYS_METAVAR, help=KEYS_HELP)
TASKS_AT_A_TIME = typer.Option(
    None,
    "--workers",
    min=1,
    help="With --on: tasks at a time; default: one per core, of the cluster with ray; with slurm "
    "16 array elements.",
)


DEFAULT_TASK_SIZE = "32MB"


@dataclass(frozen=True)
class Group:
    """Which options of a dataclass a verb takes."""

    start: Any = None
    """Has the defaults of the options and the values of all other fields; None: as the dataclass
    declares them.
    """
    only: tuple[str, ...] = ()
    """Names of fields; empty: all options."""

    def fields(self, kind: Any) -> list[Field[Any]]:
        """The fields of the dataclass that are options of this verb."""
        return [
            field
            for field in fields(kind)
            if is_option(field) and (not self.only or field.name in self.only)
        ]

    def inside(self, field: Field[Any]) -> Group:
        """The options of a field whose value is a dataclass with options; it has their defaults."""
        return Group(getattr(self.start, field.name, field.default))


GROUP: Any = Group()
"""Default of a parameter that is a group of options."""


def group(start: Any = None, only: tuple[str, ...] = ()) -> Any:
    """Declare a group with other defaults than those of its dataclass, or with some of its options."""
    return Group(start, only)


@dataclass(frozen=True)
class ManyMachines:
    """Where the tasks of a data verb run."""

    on: str | None = typer.Option(
        None,
        metavar="KIND",
        help="Run as tasks on: local (processes of this machine), ray[://HOST:PORT] (without an "
        "address a cluster of this machine), "
        "slurm[:partition=P,mem=8G,...] (array jobs). The output is the same; run again after a "
        "stop, the command continues.",
    )
    work_dir: Path | None = typer.Option(
        None,
        help="With --on: a folder that all machines share, for results of tasks; default: "
        "OUT.work next to the output.",
    )
    task_size: str = typer.Option(DEFAULT_TASK_SIZE, help="With --on: input bytes of one task.")

    def placement(self, workers: int | None) -> Placement | None:
        """The options as one value; None without --on, where the others have no meaning."""
        from headway.runtime.executor.work import Placement
        from headway.text.sample import parse_bytes

        if self.on is None:
            task_size = None
            if self.task_size != DEFAULT_TASK_SIZE:
                task_size = self.task_size
            refuse_flags(
                "a run without --on", {"--work-dir": self.work_dir, "--task-size": task_size}
            )
            return None

        task_bytes = parse_bytes(self.task_size, "--task-size")
        return Placement(self.on, workers, self.work_dir, task_bytes)


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
        help="Guess tokens and check several at a time; the text stays the same. ngram: what "
        "followed the last tokens earlier; "
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

        # Without a draft model the tokens are guessed from n-grams of the text so far.
        draft_model = None
        if self.speculate != "ngram":
            draft_model = self.speculate
        if self.speculate_tokens is None:
            return Speculation(draft_model)
        return Speculation(draft_model, tokens=self.speculate_tokens)


def with_masks(loaded: LoadedModel, choice: MaskChoice, *, is_first: bool = True) -> LoadedModel:
    """The model under the chosen masks; the first rank logs which masks are used."""
    from headway.model.head_masks.masks import in_words

    masked = loaded.with_mask_choice(choice)
    if is_first and (choice.masks is not None or masked.masks is not None):
        hint = ""
        if choice.masks is None:
            # The model has masks of its own, which nobody asked for on this command line.
            hint = " Use --masks none to ignore them."
        log.info("%s: masks %s.%s", loaded.path, in_words(masked.describe_masks()), hint)
    return masked


def read_recipe(
    arguments: Sequence[str] | None, *, makes_tokenizer: bool = False, makes_name: bool = False
) -> Recipe:
    """The recipe that command-line arguments describe; without one, raw data in `data.train`
    chooses it.

    `makes_tokenizer`: train the tokenizer that such a choice may need. `makes_name`: choose the
    folder of a run without a name.
    """
    from headway.config.load import load
    from headway.config.shipped import find_recipe
    from headway.train.change import translate_key
    from headway.train.config import Recipe
    from headway.train.run_name import with_name

    path, overrides = split_recipe(arguments)

    # A launcher reads the recipe before it starts ranks, so they need not repeat its messages.
    say = log.info
    if LAUNCHER_PID in os.environ:
        say = log.debug

    if path is None and any(override.startswith("data.") for override in overrides):
        from headway.workflows.first_run import choose_recipe

        first = choose_recipe(overrides)
        path = first.recipe
        overrides = first.overrides
        for line in first.lines:
            say(line)
        if makes_tokenizer and first.tokenizer is not None:
            first.tokenizer.make()

    file = None
    if path is not None:
        file = find_recipe(path, say)
    recipe = load(Recipe, file, overrides, say, translate_key)
    if makes_name:
        return with_name(recipe, file, overrides, say)
    return recipe


def split_recipe(arguments: Sequence[str] | None) -> tuple[Path | None, list[str]]:
    """The recipe file among command-line arguments, and the overrides."""
    words = list(arguments or ())
    files = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if len(files) > 1:
        raise ConfigError(
            f"two recipes were given, {files[0]} and {files[1]}; give one. Overrides have the "
            "form section.key=value."
        )
    if not files:
        return None, overrides
    return Path(files[0]), overrides


def refuse_flags(context: str, flags: dict[str, Any]) -> None:
    """Refuse flags that have no effect in this context; a flag that was not given is None."""
    unwanted = [flag for flag, value in flags.items() if value is not None]
    if unwanted:
        raise ConfigError(f"{unwanted[0]} has no meaning with {context}. Leave it out.")


def refuse_options(situation: str, context: typer.Context, names: Sequence[str]) -> None:
    """Refuse options, given by the names of their parameters, that have no effect in this
    situation.
    """
    parameters: dict[str | None, Any] = {
        declared.name: declared for declared in context.command.params
    }
    flags: dict[str, Any] = {}
    for name in names:
        parameter = parameters[name]
        value = context.params[name]
        # typer does not tell a default from the same value on the command line.
        if value == parameter.get_default(context):
            value = None
        flag = "/".join([parameter.opts[0], *parameter.secondary_opts])
        flags[flag] = value
    refuse_flags(situation, flags)


def on_ranks(
    context: typer.Context,
    compute: ComputeOptions,
    ranks: LaunchOptions,
    work: Callable[[RankGroup], None],
) -> None:
    """Run `work` on the ranks that the options request; each is started with the command line of
    this verb.
    """
    from headway.launch.launcher import run_on_ranks

    exit_with(run_on_ranks(compute.device, ranks, command_line(context), work))


def command_line(context: typer.Context) -> list[str]:
    """The verb and its options as arguments of `headway`; options at their default are left out."""
    words: list[str] = []
    level: Any = context
    while level.parent is not None:
        words.insert(0, level.info_name)
        level = level.parent

    positional: list[str] = []
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name not in context.params or value == parameter.get_default(context):
            continue

        values: list[Any] = [value]
        if isinstance(value, list | tuple):
            values = list(value)

        if parameter.param_type_name == "argument":
            positional += map(str, values)
        elif value is True:
            words.append(parameter.opts[0])
        elif value is False:
            words.append(parameter.secondary_opts[0])
        else:
            # One word each, so that a value may begin with a dash.
            words += [f"{parameter.opts[0]}={item}" for item in values]

    if positional:
        # Behind `--`, so that an argument may begin with a dash, too.
        words += ["--", *positional]
    return words


def flatten(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as typer must see it.

    typer makes options of the parameters of a signature. So the function that is returned has a
    signature of its own, and collects the values again for the function that is passed in:

    - a group of options is replaced by its fields;
    - `--model` comes with `--revision`, and with an argument that means the same.
    """
    hints = get_type_hints(function)
    groups: dict[str, tuple[Any, Group]] = {}
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

            # `chosen_model` refuses a missing model: typer cannot know that the argument counts.
            # A copy, since the same declaration (`MODEL`) serves several verbs.
            default = copy(default)
            default.default = None
            annotation = _or_none(annotation)
        parameters.append(
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )

    for parameter in signature(function).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            chosen = GROUP
            if isinstance(parameter.default, Group):
                chosen = parameter.default
            groups[parameter.name] = (kind, chosen)
            for name, declared, annotation in options_of(kind, chosen):
                add(name, declared, annotation)
        else:
            add(parameter.name, parameter.default, kind)
        # Other declarations of --model take lists or files, or have a --revision of their own.
        if parameter.default is MODEL:
            has_revision = True
            add("revision", REVISION, str | None)

    def command(**arguments: Any) -> None:
        if model_options:
            arguments["model"] = chosen_model(
                arguments["model"], arguments.pop(MODEL_ARGUMENT), model_options[0]
            )
        if has_revision:
            arguments["model"] = at_revision(arguments["model"], arguments.pop("revision"))

        # Each group takes its fields out of `arguments`; those that are left are parameters of
        # the function itself.
        grouped: dict[str, Any] = {}
        for name, (kind, chosen) in groups.items():
            grouped[name] = fill_group(kind, chosen, arguments)

        try:
            function(**arguments, **grouped)
        # The run was saved before it stopped, also after Ctrl-C (`Interrupted` is a subclass). So
        # this is an ordinary end with the exit code of the signal.
        except Terminated as stopped:
            if str(stopped):
                log.info("%s", stopped)
            raise typer.Exit(stopped.exit_code) from None

    # typer takes the help from the docstring, names and defaults from the signature, and types from
    # the annotations.
    command.__doc__ = function.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return command


def is_option(field: Field[Any]) -> bool:
    """Whether a field of a group is an option, or has options itself."""
    return (
        OPTION in field.metadata
        or INNER_OPTIONS in field.metadata
        or isinstance(field.default, OptionInfo)
    )


def options_of(kind: Any, chosen: Group) -> Iterator[tuple[str, Any, Any]]:
    """Name, declaration and type of every option of a group, as typer takes them."""
    for field in chosen.fields(kind):
        if INNER_OPTIONS in field.metadata:
            yield from options_of(type_of(kind, field.name), chosen.inside(field))
            continue
        declared: CommandOption | None = field.metadata.get(OPTION)
        if declared is None:
            yield field.name, field.default, type_of(kind, field.name)
            continue

        default = declared.default
        if declared.read is not None:
            # The default of the command line is text, as a person would write it. A default of
            # `chosen.start` is a value that was read already, and cannot stand here.
            annotation = declared.written_type
        else:
            annotation = written_type(type_of(kind, field.name))
            if chosen.start is not None:
                default = getattr(chosen.start, field.name)
            if isinstance(default, tuple):
                default = list(cast("tuple[Any, ...]", default))

        typer_option = typer.Option(default, *declared.flags, help=declared.help, **declared.shown)
        yield field.name, typer_option, annotation


@cache
def type_of(kind: Any, name: str) -> Any:
    """The type of one field of a dataclass.

    `get_type_hints` of the whole class would fail: types of fields that are no options may be
    imported for type checkers alone.
    """
    owner = next(base for base in kind.__mro__ if name in vars(base).get("__annotations__", ()))
    single_field = SimpleNamespace(__annotations__={name: owner.__annotations__[name]})
    return get_type_hints(single_field, vars(sys.modules[owner.__module__]))[name]


def written_type(annotation: Any) -> Any:
    """The type that typer parses for a field of this type."""
    if get_origin(annotation) is Literal:
        # Any word: the dataclass itself refuses unknown ones, with a message of headway's.
        return str
    # typer repeats options of lists alone; `fill_group` makes tuples of them again.
    if get_origin(annotation) is tuple:
        return list[get_args(annotation)[0]]
    return annotation


def fill_group(kind: Any, chosen: Group, arguments: dict[str, Any]) -> Any:
    """A group with its values of the command line, which are taken out of `arguments`."""
    values: dict[str, Any] = {}
    for field in chosen.fields(kind):
        if INNER_OPTIONS in field.metadata:
            inner = type_of(kind, field.name)
            values[field.name] = fill_group(inner, chosen.inside(field), arguments)
            continue
        value = arguments.pop(field.name)
        declared: CommandOption | None = field.metadata.get(OPTION)
        if declared is not None:
            if declared.read is not None:
                value = declared.read(value)
            elif isinstance(value, list):
                value = tuple(value)
        values[field.name] = value

    if chosen.start is not None:
        return replace(chosen.start, **values)
    return kind(**values)


def _or_none(annotation: Any) -> Any:
    """The type of an option that may be left out; a list may be empty anyway."""
    if get_origin(annotation) is list:
        return annotation
    return annotation | None


def chosen_model(option: Any, argument: Any, declared: ModelOption) -> Any:
    """The model, given as --model or as an argument. Lists stay lists."""
    if option and argument:
        raise ConfigError(
            f"the model is given twice: {_listed(argument)}, and --model {_listed(option)}. "
            "Leave one of them out."
        )
    if declared.default is ... and not option and not argument:
        raise ConfigError(
            f"no model is given. Name it after the verb or with --model. {declared.help}"
        )
    return argument or option


def _listed(models: Any) -> str:
    if isinstance(models, list):
        return ", ".join(map(str, cast("list[Any]", models)))
    return str(models)


def at_revision(model: Path, revision: str | None) -> Path:
    """The model with `--revision` in its name; refused where the name is a folder."""
    if revision is None:
        return model
    from headway.text.hub import is_hub_id, split_revision

    # A folder wins over a hub id of the same name wherever a model is opened.
    if model.exists() or not is_hub_id(str(model)):
        raise ConfigError(
            f"--revision is {revision!r}, and --model {model} is no hub id (ORGANISATION/NAME). "
            "Leave --revision out."
        )

    name, named_revision = split_revision(str(model))
    if named_revision not in (None, revision):
        raise ConfigError(
            f"--model {model} names a revision, and --revision is {revision!r}. Give one of them."
        )
    return Path(f"{name}@{revision}")
