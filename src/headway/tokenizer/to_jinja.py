"""headway's own chat templates as jinja, so that a tokenizer folder carries the one its model was trained with.

In: a template and the tokenizer whose special tokens it writes. Out: text that transformers, vLLM and `headway --chat-template tokenizer`
render to what the template itself writes. White space around every tag is stripped by the tag, so line breaks here are for readers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from headway.tokenizer.jinja_template import JinjaTemplate
from headway.tokenizer.load import Tokenizer
from headway.tokenizer.templates import AlpacaTemplate, Glued, Part, Template, Token, TurnTemplate

VALUE = "\0"
"""Stands on both sides of a value in a text that is otherwise literal."""


def to_jinja(template: Template, tokenizer: Tokenizer) -> str | None:
    """The template as jinja; None for one that has no such form."""
    if isinstance(template, JinjaTemplate):
        return template.source
    if isinstance(template, TurnTemplate) and not template.is_text:
        return None
    if isinstance(template, TurnTemplate):
        return "\n".join(_turns(template, tokenizer)) + "\n"
    if isinstance(template, AlpacaTemplate):
        return "\n".join(_alpaca(template, tokenizer)) + "\n"
    return None


def _turns(template: TurnTemplate, tokenizer: Tokenizer) -> Iterable[str]:
    def said(*parts: Part) -> str:
        return _said(parts, tokenizer)

    trim = " | trim" if template.strip else ""
    yield f"{{{{- {said(*template.begin)} -}}}}"
    yield "{%- set ns = namespace(system=none, text='') -%}"
    if template.default_system is not None:
        yield f"{{%- set ns.system = {_literal(template.default_system)} -%}}"
    yield "{%- if messages and messages[0]['role'] == 'system' -%}{%- set ns.system = messages[0]['content'] -%}{%- endif -%}"
    yield from _tools(template)
    if (system := template.frames.get("system")) is not None:
        yield "{%- if ns.system is not none -%}"
        yield f"{{{{- {said(*system.before)} + (ns.system{trim}) + {said(*system.end, *system.gap)} -}}}}"
        yield "{%- endif -%}"
    yield "{%- for message in messages -%}"
    yield "{%- if not (loop.first and message['role'] == 'system') -%}"
    yield f"{{%- set ns.text = (message['content'] or ''){trim} -%}}"
    yield "{%- for each in message['tool_calls'] or [] -%}{%- set call = each['function'] or each -%}"
    yield f"{{%- set ns.text = ns.text + ('\\n' if ns.text else '') + {_call(template)} -%}}{{%- endfor -%}}"
    word = "if"
    for role, frame in template.frames.items():
        yield f"{{%- {word} message['role'] == '{role}' -%}}"
        before, after = said(*frame.before), said(*frame.end, *frame.gap)
        if role == "tool" and template.tool_joint is not None:
            before = f"({_literal(template.tool_joint)} if loop.previtem is defined and loop.previtem['role'] == 'tool' else {before})"
            after = f"('' if loop.nextitem is defined and loop.nextitem['role'] == 'tool' else {after})"
        yield f"{{{{- {before} + ns.text + {after} -}}}}"
        word = "elif"
    yield f"{{%- else -%}}{_refusal(template.name)}{{%- endif -%}}"
    yield "{%- endif -%}{%- endfor -%}"
    yield f"{{%- if add_generation_prompt -%}}{{{{- {said(*template.frames['assistant'].before)} -}}}}"
    yield f"{{%- else -%}}{{{{- {said(*template.finish)} -}}}}{{%- endif -%}}"


def _tools(template: TurnTemplate) -> Iterable[str]:
    yield "{%- if tools -%}"
    if template.tool_prompt is None:
        yield f"{{{{- raise_exception({_literal(f'template {template.name} has no place for tool definitions')}) -}}}}"
    else:
        before, after = (_literal(text) for text in template.tool_prompt.split("{tools}"))
        yield f"{{%- set ns.text = {before} -%}}"
        yield "{%- for tool in tools -%}{%- set ns.text = ns.text + ('' if loop.first else '\\n') + (tool | tojson) -%}{%- endfor -%}"
        yield f"{{%- set ns.system = (ns.system + '\\n\\n' if ns.system else '') + ns.text + {after} -%}}"
    yield "{%- endif -%}"


def _call(template: TurnTemplate) -> str:
    """What a tool call is written as: the template's format with the values put in."""
    name, arguments = (f"{VALUE}(call['{key}'] | tojson){VALUE}" for key in ("name", "arguments"))
    parts = template.call_format.format(name=name, arguments=arguments).split(VALUE)
    return " + ".join(part if at % 2 else _literal(part) for at, part in enumerate(parts))


def _alpaca(template: AlpacaTemplate, tokenizer: Tokenizer) -> Iterable[str]:
    yield f"{{{{- {_said([Token(role='bos', optional=True)], tokenizer)} -}}}}"
    yield f"{{{{- messages[0]['content'] if messages and messages[0]['role'] == 'system' else {_literal(template.preamble)} -}}}}"
    yield "{%- for message in messages -%}"
    yield f"{{%- if message['role'] == 'user' -%}}{{{{- {_literal(template.question)} + message['content'] -}}}}"
    answered = _said([template.end], tokenizer)
    yield f"{{%- elif message['role'] == 'assistant' -%}}{{{{- {_literal(template.response)} + message['content'] + {answered} -}}}}"
    yield f"{{%- elif not loop.first or message['role'] != 'system' -%}}{_refusal(template.name)}{{%- endif -%}}"
    yield "{%- endfor -%}"
    yield f"{{%- if add_generation_prompt -%}}{{{{- {_literal(template.response)} -}}}}{{%- endif -%}}"


def _refusal(name: str) -> str:
    return f"{{{{- raise_exception({_literal(f'template {name} has no place for a turn of ')} + message['role']) -}}}}"


def _said(parts: Iterable[Part], tokenizer: Tokenizer) -> str:
    """Parts as one literal."""
    return _literal("".join(_spelled(part, tokenizer) for part in parts))


def _spelled(part: Part, tokenizer: Tokenizer) -> str:
    if isinstance(part, Token):
        return part.spelling or tokenizer.roles.get(part.role, "")
    return part.text if isinstance(part, Glued) else part


def _literal(text: str) -> str:
    return json.dumps(text)
