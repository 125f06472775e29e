"""The body of /v1/chat/completions: bytes come in, a `ChatCall` goes out, or an ApiError that names
the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, model_validator

from headway.media.items import MediaRef
from headway.media.schema import SHIPPED, load_schema
from headway.media.schema_branches import closed_schema
from headway.serve.api_errors import ApiError, bad_field
from headway.serve.content_parts import MARK, Content, joined_content
from headway.serve.generation_fields import GenerationBody, GenerationFields, generation_fields
from headway.serve.request_body import (
    Flag,
    MustBe,
    ReadBy,
    RequestBody,
    Text,
    Whole,
    needed,
    parse_body,
    problem,
    wrong_value,
)
from headway.tokenizer.chat_template import Call, Role, Turn

ROLES: dict[str, Role] = {
    "system": "system",
    # OpenAI's newer name for it; chat templates know the old one.
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
MAX_MESSAGES = 10_000
MAX_TOOLS = 512
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class ChatCall:
    """A conversation that waits for an answer."""

    model: str
    turns: tuple[Turn, ...]
    fields: GenerationFields
    media: tuple[MediaRef, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str = "auto"
    """auto; none; required: some tool must be called; =NAME: this one, even if it is `auto`."""
    parallel_calls: bool = True
    """False: the answer ends after one call."""
    schema: Any = None
    """The JSON schema that the answer follows; None: any text."""
    continues: bool = False
    """The last message is the beginning of the answer, which continues it."""


FunctionType = Annotated[Literal["function"], MustBe("function")]


def _parsed_arguments(arguments: Any) -> Any:
    """Clients send the arguments of a call as JSON in a text; some send the object itself."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        raise problem("is not JSON.") from None


class CalledFunction(RequestBody):
    """`function` of a call that the assistant made."""

    name: Text = needed()
    arguments: Annotated[Any, BeforeValidator(_parsed_arguments)] = Field(default_factory=dict)


class MessageCall(RequestBody):
    """One of the `tool_calls` of a message."""

    id: Text | None = None
    type: FunctionType = "function"
    function: CalledFunction = needed()
    index: Any = None


class ChatMessage(RequestBody):
    """One of the `messages`."""

    kind_field = "role"
    absent = {
        "system": frozenset(("refusal", "name")),
        "developer": frozenset(("refusal", "name")),
        "user": frozenset(("refusal", "name")),
        "assistant": frozenset(("tool_call_id", "name")),
        "tool": frozenset(("refusal",)),
    }

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        MustBe(f"one of {', '.join(ROLES)}"),
    ] = needed()
    content: Content | None = None
    tool_calls: Annotated[tuple[MessageCall, ...], Field(fail_fast=True)] = ()
    refusal: Any = None
    tool_call_id: Any = None
    name: Text | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise problem("is only allowed in messages of the assistant.", "tool_calls")
        if self.content is None and not self.tool_calls:
            raise problem("is missing; it must be a text or a list of parts.", "content")
        return self


class ToolFunction(RequestBody):
    """`function` of a tool."""

    name: Text = needed()
    description: Text | None = None
    parameters: Annotated[dict[str, Any] | None, MustBe("an object")] = None
    strict: Flag = False


class Tool(RequestBody):
    """One of the `tools`."""

    type: FunctionType = "function"
    function: ToolFunction = needed()


def _as_sent(tool: Any, check: Callable[[Any], Any]) -> Any:
    """A tool, checked, but with the keys and the order that the client wrote: chat templates show
    it to the model as JSON.
    """
    check(tool)
    return tool


SentTool = Annotated[Mapping[str, Any], ReadBy(_as_sent, Tool)]


class NamedSchema(RequestBody):
    """`json_schema` of a response format."""

    name: Text | None = None
    description: Text | None = None
    strict: Flag = False
    rules: Any = Field(default=None, alias="schema")


class ResponseFormat(RequestBody):
    """`response_format`."""

    kind_field = "type"
    absent = {"text": frozenset(("json_schema",)), "json_object": frozenset(("json_schema",))}

    type: Annotated[
        Literal["text", "json_object", "json_schema"],
        MustBe("text, json_object or json_schema"),
    ] = needed()
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _fits_its_type(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise problem('is missing; it must be {"name": "...", "schema": {...}}.', "json_schema")
        return self


class ChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    # fail_fast: the first wrong element is reported; the others of a long list are not read.
    messages: Annotated[tuple[ChatMessage, ...], Field(fail_fast=True)] = ()
    # The names and meanings of these two are vLLM's.
    continue_final_message: Flag = False
    add_generation_prompt: Flag | None = None
    logprobs: Flag = False
    top_logprobs: Annotated[int | None, Whole(0, MAX_TOP_LOGPROBS)] = None
    tools: Annotated[tuple[SentTool, ...], Field(fail_fast=True)] = ()
    tool_choice: Any = None
    parallel_tool_calls: Flag = True
    response_format: ResponseFormat | None = None

    # Read only to refuse them with a message that says what to use instead.
    modalities: Any = None
    functions: Any = None
    function_call: Any = None


def read_chat(data: bytes, max_n: int) -> ChatCall:
    """Read a request."""
    body = parse_body(ChatBody, data)
    _check_continuation(body)
    media: list[MediaRef] = []
    turns = _turns(body, media)

    logprobs = None
    if body.logprobs:
        logprobs = body.top_logprobs or 0
    elif body.top_logprobs is not None:
        raise bad_field("top_logprobs", "is only allowed with logprobs: true.")

    fields = generation_fields(body, max_n=max_n, default_max_tokens=None, logprobs=logprobs)
    if len(body.tools) > MAX_TOOLS:
        raise bad_field("tools", f"has {len(body.tools)} tools; at most {MAX_TOOLS} are read.")

    tools = body.tools
    choice = _tool_choice(body)
    if choice == "none":
        # The chat template then does not show them, so that the model does not know of them.
        tools = ()

    schema = _schema(body.response_format)
    if schema is not None and choice not in ("auto", "none"):
        raise bad_field(
            "tool_choice", "and response_format both constrain the answer. Give one of them."
        )

    if body.modalities not in (None, ["text"]):
        raise bad_field("modalities", 'must be ["text"]; this server answers in text.')
    if body.functions or body.function_call:
        raise bad_field("functions", "is not supported by this server. Use tools and tool_choice.")
    return ChatCall(
        model=body.model,
        turns=turns,
        fields=fields,
        media=tuple(media),
        tools=tools,
        tool_choice=choice,
        parallel_calls=body.parallel_tool_calls,
        schema=schema,
        continues=body.continue_final_message,
    )


def _check_continuation(body: ChatBody) -> None:
    """The two flags of vLLM say one thing twice; they must agree."""
    if body.add_generation_prompt is None:
        return

    if body.continue_final_message and body.add_generation_prompt:
        raise bad_field(
            "add_generation_prompt",
            "must be false with continue_final_message: true: the answer has begun already.",
        )

    if not body.continue_final_message and not body.add_generation_prompt:
        raise bad_field(
            "add_generation_prompt",
            "may be false only with continue_final_message: true. Leave it out.",
        )


def _turns(body: ChatBody, media: list[MediaRef]) -> tuple[Turn, ...]:
    """The messages as turns of a conversation; their pictures and sounds are added to `media`."""
    if not body.messages:
        raise bad_field(
            "messages",
            'must be a list of messages, such as [{"role": "user", "content": "Hello"}].',
        )

    if len(body.messages) > MAX_MESSAGES:
        raise bad_field(
            "messages", f"has {len(body.messages)} messages; at most {MAX_MESSAGES} are read."
        )

    turns: list[Turn] = []
    for number, message in enumerate(body.messages):
        content = ""
        if message.content is not None:
            content = joined_content(message.content, f"messages[{number}].content", media)

        calls = tuple(
            Call(call.function.name, call.function.arguments) for call in message.tool_calls
        )
        turns.append(Turn(ROLES[message.role], content, calls=calls))

    last = turns[-1]
    continues = body.continue_final_message
    if continues and (last.role != "assistant" or last.calls):
        raise bad_field(
            "messages",
            "must end with a text of the assistant, because continue_final_message is true.",
        )

    if last.role == "assistant" and not continues:
        raise bad_field(
            "messages",
            "ends with the assistant's message, so nothing waits for an answer. Leave it out, or "
            "let the answer continue it: "
            "continue_final_message: true and add_generation_prompt: false.",
        )

    # In training, too, media stand in questions of the user.
    if media and any(MARK.search(turn.content) and turn.role != "user" for turn in turns):
        raise bad_field(
            "messages",
            "must have pictures, sounds, and their marks <image> and "
            "<audio>, only in messages of the user.",
        )

    return tuple(turns)


def _tool_choice(body: ChatBody) -> str:
    """`ChatCall.tool_choice` of a body."""
    choice = body.tool_choice
    if choice is None:
        return "auto"
    if choice in ("auto", "none"):
        return choice
    if not body.tools:
        raise bad_field("tool_choice", "is only allowed with tools.")
    if choice == "required":
        return choice

    # An object: {"type": "function", "function": {"name": NAME}}.
    name: Any = None
    if isinstance(choice, dict):
        function = cast(dict[str, Any], choice).get("function")
        if isinstance(function, dict):
            name = cast(dict[str, Any], function).get("name")

    if name not in [tool["function"]["name"] for tool in body.tools]:
        raise wrong_value(
            "tool_choice",
            choice,
            "none, auto, required or an object that names one of the tools",
        )

    return f"={name}"


def _schema(form: ResponseFormat | None) -> Any:
    """The JSON schema that a response format asks for; None: any text."""
    if form is None or form.type == "text":
        return None
    if form.json_schema is None:
        return {"type": "object"}

    named_schema = form.json_schema

    # A schema that comes with headway is chosen by its name.
    if named_schema.rules is None and named_schema.name in SHIPPED:
        return closed_schema(load_schema(named_schema.name).rules)

    if not isinstance(named_schema.rules, dict):
        raise bad_field(
            "response_format.json_schema.schema", "must be a JSON schema, which is an object."
        )

    # OpenAI's strict mode: objects have no keys but those of the schema.
    if named_schema.strict:
        return closed_schema(named_schema.rules)
    return cast(dict[str, Any], named_schema.rules)


def needs_template(name: str) -> ApiError:
    """The error of a model that has no chat template."""
    return ApiError(
        400,
        f"model {name!r} has no chat template, so it was not trained on conversations. Use "
        "/v1/completions, or start the server with --chat-template.",
        "model",
    )
