"""A grammar lets through only tokens that continue a valid text."""

import json

import numpy as np
import pytest
from support.chat_tokenizer import byte_tokenizer

from headway.serve.constraints import call_grammar, constraint_factory, schema_grammar
from headway.serve.tool_calls import ToolCallReader

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]


def generated(grammar: str, seed: int) -> str:
    """A text of tokens drawn at random among those that a grammar allows."""
    tokenizer = byte_tokenizer()
    vocab = 320
    assert tokenizer.eos_id is not None
    factory = constraint_factory(tokenizer, vocab, frozenset([tokenizer.eos_id]))
    assert factory is not None
    constraint = factory(grammar)
    rng = np.random.default_rng(seed)
    tokens = []
    while not constraint.is_finished:
        mask = np.zeros(vocab // 32, np.int32)
        constraint.fill_mask(mask)
        token = int(
            rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")))
        )
        if token == tokenizer.eos_id:
            break
        constraint.accept(token)
        tokens.append(token)
        assert len(tokens) < 500
    return tokenizer.decode(tokens)


def test_random_tokens_under_a_schema_are_a_valid_object() -> None:
    pytest.importorskip("llguidance")
    for seed in range(5):
        value = json.loads(generated(schema_grammar(SCHEMA), seed))
        assert value["city"] in ("Oslo", "Rome")
        assert 1 <= value["days"] <= 9
        assert len(value) == 2
    value = json.loads(generated(call_grammar("whole", TOOLS, "weather"), 0))
    assert value["name"] == "weather"
    assert set(value["parameters"]) == {"city", "days"}
    tagged = generated(call_grammar("tags", TOOLS, None), 1)
    reader = ToolCallReader("tags")
    calls = reader.add(tagged)[1]
    assert len(calls) == 1
    assert calls[0].name in ("weather", "now")
