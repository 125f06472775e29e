"""The body of /v1/chat/completions: bytes come in, a `ChatCall` goes out, or an ApiError that names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from headway.media.items import MediaRef
from headway.media.schema import SHIPPED, load_schema
from headway.media.schema_branches import closed_schema
from headway.serve.api_errors import ApiError, bad_field
from headway.serve.content_parts import MARK, read_content
from headway.serve.fields import HARMLESS, BodyFields, read_json
from headway.serve.generation_fields import MAX_TOP_LOGPROBS, GenerationFields, read_generation
from headway.tokenizer.chat_template import Call, Role, Turn

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
MAX_MESSAGES = 10_000
MAX_TOOLS = 512


@dataclass(frozen=True)
class ChatCall:
    """A conversation that waits for an answer."""

    model: str
    turns: tuple[Turn, ...]
    fields: GenerationFields
    media: tuple[MediaRef, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str = "auto"
    """auto; required: some tool must be called; =NAME: this one."""
    parallel_calls: bool = True
    """False: the answer ends after one call."""
    schema: Any = None
    """The JSON schema that the answer follows; None: any text."""
    continues: bool = False
    """The last message is the beginning of the answer, which continues it."""


def read_chat(body: bytes, max_n: int) -> ChatCall:
    """Read a request."""
    fields = BodyFields(read_json(body))
    model = fields.needed_text("model")
    media: list[MediaRef] = []
    continues = _continues(fields)
    turns = _turns(fields, media, continues)
    wants = fields.flag("logprobs")
    top = fields.whole("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wants:
        raise bad_field("top_logprobs", "is only allowed with logprobs: true.")
    generation = read_generation(
        fields, max_n=max_n, default_max_tokens=None, logprobs=(top or 0) if wants else None
    )
    tools, choice = _tools(fields)
    parallel = fields.flag("parallel_tool_calls", True)
    schema = _schema(fields)
    if schema is not None and choice not in ("auto", "none"):
        raise bad_field(
            "tool_choice", "and response_format both constrain the answer. Give one of them."
        )
    modalities = fields.get("modalities")
    if modalities not in (None, ["text"]):
        raise bad_field("modalities", 'must be ["text"]; this server answers in text.')
    if fields.get("functions") or fields.get("function_call"):
        raise bad_field("functions", "is not supported by this server. Use tools and tool_choice.")
    fields.finish(HARMLESS)
    return ChatCall(
        model,
        turns,
        generation,
        tuple(media),
        () if choice == "none" else tools,
        choice,
        parallel,
        schema,
        continues,
    )


def _continues(fields: BodyFields) -> bool:
    """Whether the last message is continued. The names and their meaning are vLLM's."""
    continues = fields.flag("continue_final_message")
    adds_prompt = fields.flag("add_generation_prompt", not continues)
    if continues and adds_prompt:
        raise bad_field(
            "add_generation_prompt",
            "must be false with continue_final_message: true: the answer has begun already.",
        )
    if not continues and not adds_prompt:
        raise bad_field(
            "add_generation_prompt",
            "may be false only with continue_final_message: true. Leave it out.",
        )
    return continues


def _turns(fields: BodyFields, media: list[MediaRef], continues: bool) -> tuple[Turn, ...]:
    listed = fields.objects("messages")
    if not listed:
        raise bad_field(
            "messages",
            'must be a list of messages, such as [{"role": "user", "content": "Hello"}].',
        )
    if len(listed) > MAX_MESSAGES:
        raise bad_field("messages", f"has {len(listed)} messages; at most {MAX_MESSAGES} are read.")
    turns = tuple(
        _turn(BodyFields(one, f"messages[{number}]"), media) for number, one in enumerate(listed)
    )
    last = turns[-1]
    if continues and (last.role != "assistant" or last.calls):
        raise bad_field(
            "messages",
            "must end with a text of the assistant, because continue_final_message is true.",
        )
    if last.role == "assistant" and not continues:
        raise bad_field(
            "messages",
            "ends with the assistant's message, so nothing waits for an answer. Leave it out, or let the answer continue it: "
            "continue_final_message: true and add_generation_prompt: false.",
        )
    if media and any(MARK.search(turn.content) and turn.role != "user" for turn in turns):
        raise bad_field(
            "messages",
            "must have pictures, sounds, and their marks <image> and <audio>, only in messages of the user.",
        )
    return turns


def _turn(one: BodyFields, media: list[MediaRef]) -> Turn:
    role = ROLES.get(one.needed_text("role"))
    if role is None:
        raise one.wrong("role", f"one of {', '.join(ROLES)}")
    calls = tuple(
        _call(BodyFields(each, f"{one.name('tool_calls')}[{at}]"))
        for at, each in enumerate(one.objects("tool_calls"))
    )
    if calls and role != "assistant":
        raise bad_field(one.name("tool_calls"), "is only allowed in messages of the assistant.")
    given = one.get("content")
    if given is None and not calls:
        raise bad_field(one.name("content"), "is missing; it must be a text or a list of parts.")
    content = "" if given is None else read_content(given, one.name("content"), media)
    one.get("refusal" if role == "assistant" else "tool_call_id")
    if role == "tool":
        one.text("name")
    one.finish()
    return Turn(role, content, calls=calls)


def _call(one: BodyFields) -> Call:
    one.text("id")
    if one.text("type", "function") != "function":
        raise one.wrong("type", "function")
    function = one.inner("function")
    if function is None:
        raise bad_field(one.name("function"), "is missing.")
    name, arguments = function.needed_text("name"), function.get("arguments")
    one.finish(("index",))
    function.finish()
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise bad_field(function.name("arguments"), "is not JSON.") from None
    return Call(name, {} if arguments is None else arguments)


def _tools(fields: BodyFields) -> tuple[tuple[Mapping[str, Any], ...], str]:
    tools = fields.objects("tools")
    if len(tools) > MAX_TOOLS:
        raise bad_field("tools", f"has {len(tools)} tools; at most {MAX_TOOLS} are read.")
    names: list[str] = []
    for number, one in enumerate(tools):
        tool = BodyFields(one, f"tools[{number}]")
        if tool.text("type", "function") != "function":
            raise tool.wrong("type", "function")
        function = tool.inner("function")
        if function is None:
            raise bad_field(tool.name("function"), "is missing.")
        names.append(function.needed_text("name"))
        function.text("description")
        function.inner("parameters")
        function.flag("strict")
        tool.finish()
        function.finish()
    return tuple(tools), _tool_choice(fields, names)


def _tool_choice(fields: BodyFields, names: list[str]) -> str:
    given = fields.get("tool_choice")
    if given is None or given == "auto" or (given == "none" and isinstance(given, str)):
        return "auto" if given is None else str(given)
    if not names:
        raise bad_field("tool_choice", "is only allowed with tools.")
    if given == "required":
        return "required"
    function: Any = cast(dict[str, Any], given).get("function") if isinstance(given, dict) else None
    name: Any = cast(dict[str, Any], function).get("name") if isinstance(function, dict) else None
    if name not in names:
        raise fields.wrong(
            "tool_choice", "none, auto, required or an object that names one of the tools"
        )
    return f"={name}"


def _schema(fields: BodyFields) -> Any:
    form = fields.inner("response_format")
    if form is None:
        return None
    kind = form.needed_text("type")
    if kind == "text":
        form.finish()
        return None
    if kind == "json_object":
        form.finish()
        return {"type": "object"}
    if kind != "json_schema":
        raise form.wrong("type", "text, json_object or json_schema")
    inner = form.inner("json_schema")
    form.finish()
    if inner is None:
        raise bad_field(
            "response_format.json_schema",
            'is missing; it must be {"name": "...", "schema": {...}}.',
        )
    name = inner.text("name")
    inner.text("description")
    is_strict = inner.flag("strict")
    schema = inner.get("schema")
    inner.finish()
    if schema is None and name in SHIPPED:
        return closed_schema(load_schema(name).rules)
    if isinstance(schema, dict) and is_strict:
        return closed_schema(schema)
    if not isinstance(schema, dict):
        raise bad_field(
            "response_format.json_schema.schema", "must be a JSON schema, which is an object."
        )
    return cast(dict[str, Any], schema)


def needs_template(name: str) -> ApiError:
    """The error of a model that has no chat template."""
    return ApiError(
        400,
        f"model {name!r} has no chat template, so it was not trained on conversations. Use /v1/completions, or start the server with "
        "--chat-template.",
        "model",
    )
