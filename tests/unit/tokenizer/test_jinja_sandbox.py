"""A template is somebody else's program: whatever it does ends in one line, soon, and in little memory."""

import resource
import time

import pytest
from support.chat_tokenizer import byte_tokenizer

from headway.errors import ConfigError, DataError
from headway.tokenizer import jinja_sandbox
from headway.tokenizer.chat import Turn, render

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MANY = "range(99999)"
DOUBLED = (
    "{{% set n = namespace(a={0}) %}}{{% for i in range(200) %}}{{% set n.a = {1} %}}{{% endfor %}}"
)
FAILING = {
    "division by zero": "{{ 1 / 0 }}",
    "whole division by zero": "{{ 1 // 0 }}",
    "remainder of zero": "{{ 1 % 0 }}",
    "divisible by zero": "{{ 3 is divisibleby 0 }}",
    "an overflow": "{{ 2.0 ** 100000 }}",
    "infinity as a whole number": "{{ (1e999) | round | int }}",
    "an index": "{{ [][3].x }}",
    "a missing key": "{{ {}['a'].b }}",
    "a wrong type": "{{ 1 + 'a' }}",
    "a text as a number": "{{ 'a' * 'b' }}",
    "an undefined call": "{{ nothing() }}",
    "an undefined filter": "{{ 1 | nothing }}",
    "an undefined test": "{{ 1 is nothing }}",
    "an unhashable key": "{{ {[1]: 2} }}",
    "a bad format": "{{ '%d' % 'a' }}",
    "a bad str.format": "{{ '{:q}'.format(1) }}",
    "a missing format value": "{{ '{} {}'.format(1) }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a block that calls itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "a loop that calls itself": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "a list in itself": "{% set n = namespace() %}{% set n.a = n %}{{ n }}",
    "another file": "{% include 'a' %}",
    "another file's macros": "{% import 'a' as b %}",
    "a parent": "{% extends 'a' %}",
    "python's classes": "{{ ''.__class__.__mro__ }}",
    "python's globals": "{{ raise_exception.__globals__.os.path }}",
    "changing a list": "{{ messages.append(1) }}",
    "a lone surrogate": "{{ '\\ud800'.encode() }}",
    "an unknown codec": "{{ ''.encode('nothing') }}",
    "a long number": "{{ 9" + "9" * 5000 + " }}",
    "brackets without end": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "lists without end": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "minus without end": "{{ " + "-" * 20000 + "1 }}",
    "loops in loops": "{% for a in [1] %}" * 60 + "x" + "{% endfor %}" * 60,
    "conditions in conditions": "{% if 1 %}" * 300 + "x" + "{% endif %}" * 300,
    "a tag that is not closed": "{% for a in messages %}",
    "an unknown tag": "{% nothing %}",
    "a huge source": "x" * 1_000_001,
}
ENDLESS = {
    "loops in loops": "{% for a in R %}{% for b in R %}{% for c in R %}{% endfor %}{% endfor %}{% endfor %}",
    "a loop that writes": "{% for a in R %}{% for b in R %}x{% endfor %}{% endfor %}",
    "a loop whose condition is never true": "{% for a in R %}{% for b in R if false %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in [1] recursive %}{% for b in R %}{{ loop(R) }}{% endfor %}{% endfor %}",
    "macros that double": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a power in an assignment": "{% set x = 10 ** 100000000 %}",
    "products that grow": DOUBLED.format("3", "n.a * n.a"),
    "powers that grow": DOUBLED.format("3", "n.a ** 2"),
    "rounding": "{{ 1 | round(100000000) }}",
    "filters over filters": "{% for a in R %}{{ R | map('string') | join | length }}{% endfor %}",
    "sorting again and again": "{% for a in R %}{% set x = R | sort %}{% endfor %}",
    "summing lists": "{{ R | batch(1) | sum(start=[]) | length }}",
    "searching again and again": "{% set x = 'a' * 90000 %}{% for a in R %}{% if 'b' in x %}{% endif %}{% endfor %}",
    "comparing what doubles": DOUBLED.format("[1]", "[n.a, n.a]")
    + DOUBLED.format("[1]", "[n.a, n.a]")
    + "{{ n.a == [n.a] }}",
    "slices": "{% for a in R %}{{ R | slice(90000) | list | length }}{% endfor %}",
}
LARGE = {
    "a repeated text": "{{ 'a' * 10000000000 }}",
    "a repeated list": "{{ [0] * 10000000000 }}",
    "a repeated list, the number first": "{{ 10000000000 * [0] }}",
    "a text that doubles": DOUBLED.format("'a'", "n.a + n.a"),
    "a joined text that doubles": DOUBLED.format("'a'", "n.a ~ n.a"),
    "a list that doubles": DOUBLED.format("[1]", "n.a + n.a"),
    "a nested list that doubles": DOUBLED.format("[1]", "[n.a, n.a]") + "{{ n.a }}",
    "a nested tuple that doubles": DOUBLED.format("(1,)", "(n.a, n.a)") + "{{ n.a | tojson }}",
    "a nested object that doubles": DOUBLED.format("{}", "{'a': n.a, 'b': n.a}") + "{{ n.a }}",
    "namespaces that double": "{% set n = 1 %}"
    + "{% set n = namespace(a=n, b=n) %}" * 80
    + "{{ n }}",
    "dict() that doubles": "{% set n = 1 %}" + "{% set n = dict(a=n, b=n) %}" * 80 + "{{ n }}",
    "center": "{{ 'a' | center(10000000000) }}",
    "str.center": "{{ 'a'.center(10000000000) }}",
    "str.ljust": "{{ 'a'.ljust(10000000000) }}",
    "str.zfill": "{{ 'a'.zfill(10000000000) }}",
    "tabs": "{{ ('\\t' * 90000).expandtabs(90000) }}",
    "int.to_bytes": "{{ (5).to_bytes(10000000000, 'big') }}",
    "indent": "{{ 'a' | indent(10000000000, true) }}",
    "indent of many lines": "{{ ('\\n' * 90000) | indent(90000, true, true) }}",
    "replace": "{{ ('a' * 90000) | replace('a', 'b' * 90000) }}",
    "str.replace": "{{ ('a' * 90000).replace('', 'b' * 90000) }}",
    "join": "{{ R | join('b' * 90000) }}",
    "str.join": "{{ ('b' * 90000).join('a' * 90000) }}",
    "batch": "{{ [1] | batch(10000000000, 0) | list }}",
    "wordwrap": "{{ ('a' * 90000) | wordwrap(1, true, 'b' * 90000) }}",
    "tojson": "{{ [[1]] | tojson(indent=1000000000) }}",
    "a wide format": "{{ '%1000000000d' % 1 }}",
    "a wide format filter": "{{ '%1000000000d' | format(1) }}",
    "a wide format by a value": "{{ '%*d' % (1000000000, 1) }}",
    "a wide str.format": "{{ '{:1000000000}'.format(1) }}",
    "a wide str.format by a value": "{{ '{:{}}'.format(1, 1000000000) }}",
    "lorem ipsum": "{{ lipsum(1000000) }}",
    "a macro that writes much": "{% macro f() %}{% for a in R %}{{ 'a' * 900 }}{% endfor %}{% endmacro %}{{ f() }}",
    "a block that is set": "{% set x %}{% for a in R %}{{ 'a' * 900 }}{% endfor %}{% endset %}",
    "much output": "{% for a in R %}{{ 'a' * 900 }}{% endfor %}",
    "a filter block": "{% filter upper %}{% for a in R %}{{ 'a' * 900 }}{% endfor %}{% endfilter %}",
}
CASES = {
    f"{kind}: {name}": source
    for kind, cases in (("fails", FAILING), ("endless", ENDLESS), ("large", LARGE))
    for name, source in cases.items()
}
MOST_BYTES = 64 << 20


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_template_ends_in_one_line_soon_and_in_little_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a tenth of the real budget: the same stops, sooner
    monkeypatch.setattr(jinja_sandbox, "MAX_TEXT", 100_000)
    monkeypatch.setattr(jinja_sandbox, "MAX_STEPS", 20_000)
    tokenizer = byte_tokenizer(CASES[name].replace("R", MANY) + CHATML)
    begun = time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((DataError, ConfigError)) as caught:
        render([Turn("user", "Hi"), Turn("assistant", "Hello!")], "tokenizer", tokenizer)
    seconds = time.process_time() - begun
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert str(caught.value).startswith("chat template tokenizer")
    assert seconds < 30 and peak < MOST_BYTES, f"{seconds:.1f} s, {peak >> 20} MiB"


def test_there_are_enough_hostile_templates() -> None:
    assert len(CASES) >= 60


def test_a_long_conversation_and_a_template_that_counts_have_room() -> None:
    quadratic = (
        "{% for m in messages %}{% for n in messages %}{% set x = n.role ~ loop.index %}{% endfor %}{% endfor %}"
        + CHATML
    )
    turns = [Turn(role, "word " * 40) for _ in range(150) for role in ("user", "assistant")]
    assert len(render(turns[:60], "tokenizer", byte_tokenizer(quadratic)).ids) > 60 * 200
    assert len(render(turns, "tokenizer", byte_tokenizer(CHATML)).ids) > 300 * 200
