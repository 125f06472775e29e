"""`headway generate`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from headway.cli._options import (
    CHAT_TEMPLATE,
    GROUP,
    JSON,
    MODEL,
    SpeculateOptions,
    refuse_flags,
    with_masks,
)
from headway.cli._output import exit_with, print_json
from headway.errors import ConfigError
from headway.infer.generate_options import AnswerGrammar, GenerateOptions
from headway.model.head_masks.choice import MaskChoice
from headway.runtime.optional import need

if TYPE_CHECKING:
    from headway.infer.load import LoadedModel
    from headway.media.schema import AnswerSchema
    from headway.records.chat import Conversation

DEVICE = typer.Option("auto", help="auto, cpu, cuda or mps.")
TENSOR = typer.Option(
    1,
    help="Ranks that share the model's layers: GPUs of this machine, or processes on its CPU.",
    min=1,
)


@dataclass(frozen=True)
class AskOptions:
    """What the model gets."""

    prompt: list[str] = typer.Option([], help="Text to continue; may be repeated.")
    prompts_file: Path | None = typer.Option(
        None, help="Prompts, one per line, or a .jsonl file with a key `prompt`."
    )
    messages: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="Conversations to answer, .json or .jsonl in OpenAI's shape: {messages: [{role, "
        "content}, ...]}.",
    )
    system: str | None = typer.Option(
        None, metavar="TEXT", help="A system message before the questions."
    )
    chat_template: str | None = CHAT_TEMPLATE
    image: list[Path] = typer.Option(
        [], metavar="FILE", help="A picture the prompt is about; may be repeated."
    )
    audio: list[Path] = typer.Option(
        [], metavar="FILE", help="A sound the prompt is about; may be repeated."
    )
    video: list[Path] = typer.Option(
        [],
        metavar="FILE",
        help="A video the prompt is about: four of its pictures and its sound; may be repeated.",
    )
    input: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="A .jsonl file with `prompt`, `messages` or `text` in each line; answers go to "
        "--output. With a model that takes pictures and "
        "sounds: records as training reads them.",
    )
    output: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="Answers to --input: one line of JSON each, in order. The same command continues "
        "after a stop.",
    )
    n: int = typer.Option(1, "--n", min=1, help="With --input: answers to each line.")
    schema: str | None = typer.Option(
        None,
        metavar="FILE",
        help="JSON schema that answers follow (needs headway[serve]), or purrsight_v3; an invalid "
        "answer: exit code 1.",
    )

    @property
    def has_media(self) -> bool:
        """Whether pictures, sounds or videos are given."""
        return bool(self.image or self.audio or self.video)

    @property
    def files(self) -> dict[str, list[Path]]:
        """The media by modality."""
        return {"image": self.image, "audio": self.audio, "video": self.video}

    def prompts(self) -> list[str]:
        """The prompts, if there are no messages."""
        from headway.infer.generate import read_prompts

        if (self.input is None) != (self.output is None):
            raise ConfigError(
                "--input and --output go together: records, and the file for their answers."
            )
        if self.input is not None:
            if self.prompt or self.prompts_file or self.messages or self.has_media:
                raise ConfigError(
                    "--input has its own questions and media. Leave --prompt, --messages, "
                    "--image, --audio and --video out."
                )
            return []

        if self.n != 1:
            raise ConfigError(
                "--n is given without --input. Repeat --prompt for several samples of a prompt."
            )
        if self.messages is not None and self.has_media:
            raise ConfigError(
                "--messages with --image, --audio or --video: put the files into the records and "
                "use --input."
            )

        texts = list(self.prompt)
        if self.prompts_file is not None:
            texts += read_prompts(self.prompts_file)
        if self.messages is not None:
            if texts:
                raise ConfigError("--messages and a prompt are both given. Leave one of them out.")
            return []
        if not texts:
            raise ConfigError(
                "no prompt is given. Use --prompt TEXT, --prompts-file FILE or --messages FILE."
            )
        # A model continues tokens, and an empty text has none.
        if "" in texts:
            raise ConfigError("a prompt is empty; there is nothing to continue. Give some text.")
        return texts

    @property
    def template(self) -> str | None:
        """The chat template to use; None: prompts are continued as plain text."""
        is_chat = self.messages is not None or self.system is not None
        if self.chat_template is None and is_chat:
            return "tokenizer"
        return self.chat_template


def generate(
    model: Path = MODEL,
    ask: AskOptions = GROUP,
    options: GenerateOptions = GROUP,
    choice: MaskChoice = GROUP,
    guess: SpeculateOptions = GROUP,
    device: str = DEVICE,
    tensor: int = TENSOR,
    stream: bool | None = typer.Option(
        None, "--stream/--no-stream", help="Show text as it is made; default: on a terminal."
    ),
    json: bool = JSON,
) -> None:
    """Continue prompts, or answer questions and conversations, with a trained model."""
    if json:
        refuse_flags("--json", {"--stream": stream or None})
    options = replace(options, speculation=guess.speculation())
    if ask.template is not None and options.special:
        raise ConfigError(
            "--chat-template and --special are both given; the template writes the special "
            "tokens. Leave --special out."
        )
    shows = sys.stdout.isatty()
    if stream is not None:
        shows = stream
    shows = shows and not json

    from headway.infer.engine.ranks import close_ranks, load_on_ranks
    from headway.infer.messages import read_messages
    from headway.runtime.device import choose_compute

    # Read once, since they may be pipes, and before the model, so that mistakes are found early.
    prompts = ask.prompts()
    conversations: list[Conversation] = []
    if ask.messages is not None:
        conversations = read_messages(ask.messages, ask.system)
    choose_compute(device, "auto")  # refuses an unknown device
    if ask.input is not None and not ask.input.is_file():
        raise ConfigError(f"--input is {str(ask.input)!r}; there is no such file.")
    schema = None
    if ask.schema is not None:
        from headway.media.schema import load_schema

        schema = load_schema(ask.schema)
        options = replace(options, grammar=_answer_grammar(schema))

    loaded = load_on_ranks(model, tensor, device)
    try:
        asked = (prompts, conversations)
        _generate(with_masks(loaded, choice), ask, asked, options, schema, stream=shows, json=json)
    finally:
        close_ranks(loaded)


def _answer_grammar(schema: AnswerSchema) -> AnswerGrammar:
    """The grammar of the answers that a schema allows; keys that it does not name are forbidden."""
    from headway.media.schema_branches import closed_schema
    from headway.serve.api_errors import ApiError
    from headway.serve.constraints import constraints_of, schema_grammar

    # Answers are constrained while they are generated, as `headway serve` does it.
    need("llguidance", "--schema")
    try:
        return AnswerGrammar(schema_grammar(closed_schema(schema.rules)), constraints_of)
    except ApiError as problem:
        raise ConfigError(f"--schema {schema.name}: {problem}") from None


def _checked(schema: AnswerSchema | None, texts: Sequence[str]) -> list[dict[str, Any]]:
    """What a schema says of every answer; nothing without a schema."""
    if schema is None:
        return [{} for _ in texts]
    return [{"valid": schema.is_valid(text), "problems": schema.problems(text)} for text in texts]


def _end_checked(checks: Sequence[dict[str, Any]]) -> None:
    """Exit with 1 where an answer is not valid: it was cut, or the model cannot be constrained."""
    invalid = [check for check in checks if not check.get("valid", True)]
    for check in invalid:
        typer.echo("not valid by the schema: " + "; ".join(check["problems"]), err=True)
    if invalid:
        exit_with(1)


def _generate(
    loaded: LoadedModel,
    ask: AskOptions,
    asked: tuple[list[str], list[Conversation]],
    options: GenerateOptions,
    schema: AnswerSchema | None,
    *,
    stream: bool,
    json: bool,
) -> None:
    """Print what the model makes of the prompts or conversations; `asked` has both."""
    from headway.infer import generate as infer

    prompts, conversations = asked
    template = ask.template

    # What is printed before each text: a continued prompt stands in front of its continuation, a
    # question on a line of its own.
    if conversations:
        heads = [""] * len(conversations)
    elif template is None:
        heads = prompts
    else:
        heads = [f"{prompt}\n" for prompt in prompts]
    shown = StreamedTexts(heads)
    on_text = shown if stream else None

    takes_media = loaded.config.media is not None
    if ask.input is not None and loaded.config.vision is not None:
        # Such a model answers files of texts too, as any other model does.
        takes_media = _holds_media(ask.input)
    if ask.input is not None and not takes_media:
        _answer_file(loaded, ask, options, json=json)
        return
    # A model that takes media answers every question on the same path, with media and without.
    is_question = template is not None and not conversations
    if ask.input is not None or ask.has_media or (takes_media and is_question):
        _answer_media(loaded, ask, prompts, options, schema, on_text, json=json)
        return

    if template is None:
        results = infer.generate(loaded, prompts, options, on_text)
    elif conversations:
        results = infer.answer_conversations(loaded, conversations, template, options, on_text)
    else:
        results = infer.answer(
            loaded, prompts, template, options, system=ask.system, on_text=on_text
        )

    checks = _checked(schema, [result.text for result in results])
    if json:
        listed = [
            {**asdict(result), **check} for result, check in zip(results, checks, strict=True)
        ]
        print_json({**_single_or_list(listed), "masks": loaded.describe_masks()})
    elif stream:
        shown.end()
    else:
        for head, result in zip(heads, results, strict=True):
            typer.echo(head + result.text)
    _end_checked(checks)


def _holds_media(path: Path) -> bool:
    """Whether the first record of a file names pictures or sounds."""
    from headway.media.sources import read_sources
    from headway.records.multimodal import refs_of

    first = next(iter(read_sources(path)), None)
    return first is not None and bool(refs_of(first))


def _single_or_list(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """With one answer its fields are at the top level, as a script reads them."""
    if len(answers) == 1:
        return answers[0]
    return {"generations": answers}


def _answer_file(
    loaded: LoadedModel, ask: AskOptions, options: GenerateOptions, *, json: bool
) -> None:
    """Answer --input with a model of text alone."""
    from headway.infer.batch import BatchOptions, answer_file

    assert ask.input is not None and ask.output is not None
    if ask.schema is not None:
        raise ConfigError(
            "--schema with --input is for models that take pictures and sounds. Use "
            "--prompts-file FILE instead of --input."
        )
    report = answer_file(
        loaded, ask.input, ask.output, BatchOptions(options, ask.template, ask.system, ask.n)
    )
    if json:
        print_json(asdict(report))
    else:
        speed = 0.0
        if report.seconds:
            speed = report.generated_tokens / report.seconds
        failed = ""
        if report.failed:
            failed = f", {report.failed} with an error"
        typer.echo(
            f"{report.output}: {report.lines} lines, {report.answered} of them new{failed}; "
            f"{speed:.0f} tokens/s"
        )
    if report.failed:
        exit_with(1)


def _answer_media(
    loaded: LoadedModel,
    ask: AskOptions,
    prompts: list[str],
    options: GenerateOptions,
    schema: AnswerSchema | None,
    on_text: StreamedTexts | None,
    *,
    json: bool,
) -> None:
    """Answer --input, or prompts about the media of the command line, with a model that takes
    media.
    """
    from headway.infer.media import answer_media, answer_records, question_about, template_of
    from headway.media.items import MODALITIES, MediaRef

    template = template_of(loaded, ask.chat_template)
    if ask.n != 1:
        raise ConfigError(
            f"--n is {ask.n}; a model that takes pictures and sounds gives one answer to each "
            "record. Leave --n out."
        )
    if ask.input is not None and ask.output is not None:
        report = answer_records(loaded, ask.input, ask.output, template, options, schema)
        if json:
            print_json(asdict(report))
        else:
            facts = [f"{report.output}: {report.records} answers, {report.answered} of them new"]
            if report.failed:
                facts.append(f"{report.failed} could not be read")
            if report.exact is not None:
                facts.append(f"{report.exact:.1%} equal to the data's answers")
            if report.valid is not None:
                facts.append(f"{report.valid:.1%} valid by the schema")
            typer.echo("; ".join(facts))
        if report.valid is not None and report.valid < 1:
            exit_with(1)
        return

    # All media of the command line go with every prompt.
    media = [MediaRef(modality, path) for modality in MODALITIES for path in ask.files[modality]]
    questions = [question_about(prompt, media, ask.system) for prompt in prompts]
    results = answer_media(loaded, questions, template, options, on_text)
    checks = _checked(schema, [result.text for result in results])
    if json:
        answers = [
            {**asdict(result), **check} for result, check in zip(results, checks, strict=True)
        ]
        files = {
            f"{modality}s": [str(path) for path in paths] for modality, paths in ask.files.items()
        }
        print_json({**_single_or_list(answers), **files})
    elif on_text is not None:
        on_text.end()
    else:
        for prompt, result in zip(prompts, results, strict=True):
            typer.echo(f"{prompt}\n{result.text}")
    _end_checked(checks)


class StreamedTexts:
    """Prints texts piece by piece, each after its head; together they are what the verb prints at
    once elsewhere.
    """

    def __init__(self, heads: Sequence[str]) -> None:
        self.heads = heads
        self.begun = 0

    def __call__(self, number: int, piece: str) -> None:
        self._begin(number)
        typer.echo(piece, nl=False)

    def end(self) -> None:
        """End the last text, and show the heads of those without one."""
        self._begin(len(self.heads) - 1)
        typer.echo()

    def _begin(self, number: int) -> None:
        """Print the heads up to this text; texts come in order, so the one before has ended."""
        while self.begun <= number:
            if self.begun:
                typer.echo("\n", nl=False)
            typer.echo(self.heads[self.begun], nl=False)
            self.begun += 1


VERBS = {"generate": generate}
