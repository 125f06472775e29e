"""How the command line answers a word it does not know, or none: help for nothing, the nearest verb
for a mistake.

In: the words after `headway` or one of its groups. Out: help with exit code 0, or one line with a
suggestion and exit code 2.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from headway.errors import ConfigError

OTHER_WORDS = {
    "ask": "generate",
    "dpo": "train dpo",
    "fine-tune": "train lora",
    "finetune": "train lora",
    "fit": "train",
    "grpo": "train grpo",
    "inference": "generate",
    "infer": "generate",
    "lora": "train lora",
    "predict": "generate",
    "pretrain": "train pretrain",
    "resume": "train",
    "run": "train",
    "sft": "train sft",
    "preprocess": "data tokenize",
    "prepare": "data tokenize",
    "perplexity": "eval ppl",
    "kinds": "list",
    "recipes": "list",
    "help": "--help",
    "version": "--version",
}
"""What other tools call a verb."""

SECTIONS = {
    "Start here": ("demo", "init", "list", "download"),
    "Train": ("train", "plan", "sparsify", "supervise", "stop"),
    "Use a model": ("chat", "generate", "serve", "eval", "export", "masks", "push", "pull"),
    "Prepare data": ("data", "tokenizer"),
    "Watch runs": ("board", "top", "report", "rollouts"),
    "Check": ("doctor", "verify", "config"),
    "Many machines": ("launch",),
}
"""The headings of `headway --help`, in the order of a first day.

A verb that none of them names stands under the last heading.
"""
OTHER_SECTION = "More"
MOST_SUGGESTIONS = 2


class VerbGroup(TyperGroup):
    """A group of verbs, or all of them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Without a word, print the help: a person who looks around has made no mistake."""
        if not args and not ctx.resilient_parsing and not self.invoke_without_command:
            typer.echo(ctx.get_help())
            raise typer.Exit
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The verbs under their headings, each with its whole first sentence, wrapped to the
        terminal.
        """
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        visible = {
            name: command
            for name, command in commands.items()
            if command is not None and not command.hidden
        }

        # click aligns each section by itself. Names are padded to one width, so that all sections
        # share their columns.
        width = max(map(len, visible), default=0)
        sections = _sections(list(visible), is_root=ctx.parent is None)
        for heading, names in sections.items():
            rows = [(name.ljust(width), first_sentence(visible[name].help or "")) for name in names]
            with formatter.section(heading):
                formatter.write_dl(rows)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb; an unknown one is a ConfigError that names the nearest."""
        # click explains an unknown option itself. Completion in a shell parses resiliently: it
        # must not fail on a word that is typed half.
        is_known = not args or args[0] in self.commands
        if is_known or args[0].startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)

        hint = f"`{ctx.command_path} --help` lists them."
        near = suggestions(args[0], self, ctx.find_root().command)
        if near:
            command_lines = " or ".join(f"`{line}`" for line in near)
            hint = f"Did you mean {command_lines}?"
        raise ConfigError(f"{ctx.command_path} has no verb {args[0][:80]!r}. {hint}")


LIST_TYPE = re.compile(r"<list\[(\w+)\]>")
"""How typer shows the type of an option that may be repeated: `<list[str]>`."""


class VerbCommand(TyperCommand):
    """One verb, with a help page of its own.

    typer puts brackets around an argument, whose metavar has some already
    (`[RECIPE] [section.key=value]...`). Here it is shown as it is declared.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line after the verb."""
        pieces = [self.options_metavar or ""]
        for parameter in self.get_params(ctx):
            if isinstance(parameter, TyperArgument):
                pieces.append(_argument_in_usage(parameter))
        return pieces

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments and options with what they mean."""
        arguments: list[tuple[str, str]] = []
        options: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            name, text = record
            if isinstance(parameter, TyperArgument):
                arguments.append((_argument_name(parameter), text))
            else:
                options.append((LIST_TYPE.sub(r"<\1>", name), text))

        for heading, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def _argument_name(argument: TyperArgument) -> str:
    return argument.metavar or (argument.name or "").upper()


def _argument_in_usage(argument: TyperArgument) -> str:
    """The name, in brackets if it may be left out, with dots if it may be repeated."""
    name = _argument_name(argument)
    # A metavar with dots, such as `[FILE]...`, has the brackets that it needs.
    if "..." in name:
        return name

    if not argument.required:
        name = f"[{name}]"
    if argument.nargs != 1:
        name += "..."
    return name


def first_sentence(text: str) -> str:
    """The first sentence of a help text, or its first paragraph if that has one sentence."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    # "e.g. this" does not end a sentence: the next one begins with a capital letter or with code.
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", paragraph, maxsplit=1)[0]


def _sections(names: list[str], *, is_root: bool) -> dict[str, list[str]]:
    """The verbs of a help page by heading; a group's own verbs are few and stand under one."""
    if not is_root:
        return {"Commands": names}

    sections = {
        heading: [verb for verb in verbs if verb in names] for heading, verbs in SECTIONS.items()
    }

    # Verbs of plug-ins, and one of headway that has no heading yet.
    listed = {verb for verbs in SECTIONS.values() for verb in verbs}
    sections[OTHER_SECTION] = [name for name in names if name not in listed]
    return {heading: verbs for heading, verbs in sections.items() if verbs}


def suggestions(word: str, group: Any, root: Any) -> list[str]:
    """Up to two command lines the user may have meant: the verb in another group, another tool's
    word for it, or a near spelling.
    """
    word = word.lower()

    # Every verb by its words -> the last of them, which people remember: tokenize, ppl.
    last_words = {
        f"{name} {verb}": verb
        for name, command in root.commands.items()
        for verb in getattr(command, "commands", ())
    }
    last_words |= {name: name for name in root.commands}

    same = [f"headway {words}" for words, last in last_words.items() if last == word]
    if same:
        return same[:MOST_SUGGESTIONS]
    if word in OTHER_WORDS:
        return [f"headway {OTHER_WORDS[word]}"]

    # A near spelling among the verbs of this group is most likely what was meant.
    prefix = "headway"
    if group is not root:
        prefix = f"headway {group.name}"
    near = get_close_matches(word, group.commands, n=MOST_SUGGESTIONS, cutoff=0.6)
    if near:
        return [f"{prefix} {name}" for name in near]

    # Among the verbs of all groups a word resembles another by chance more often, so it must be
    # nearer.
    near = get_close_matches(word, set(last_words.values()), n=1, cutoff=0.75)
    matching = [f"headway {words}" for words, last in last_words.items() if last in near]
    return matching[:MOST_SUGGESTIONS]
