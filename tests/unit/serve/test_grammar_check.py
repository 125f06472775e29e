"""Odd schemas: each is refused in one line or followed, and none ends or delays the engine, its neighbours or the server."""

import asyncio
import logging
import time
from collections.abc import Iterator

import numpy as np
import pytest
from support.byte_model import CONFIG, write_model
from support.odd_schemas import SCHEMAS, SLOW_SCHEMAS

from headway.errors import ConfigError
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.request import EngineEvent, EngineOptions, EngineRequest
from headway.infer.load import LoadedModel, load_model
from headway.infer.sampling import Sampling
from headway.serve import constraints, grammar_check
from headway.serve.api_errors import ApiError
from headway.serve.constraints import (
    GrammarConstraint,
    call_grammar,
    constraints_of,
    schema_grammar,
)
from headway.serve.grammar_check import GrammarChecker

pytest.importorskip("llguidance")
REFUSED_FOR_TIME = "takes more than 1 s"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_model(tmp_path_factory.mktemp("model"), CONFIG.with_(max_seq_len=96)))


@pytest.fixture(scope="module")
def checker(loaded: LoadedModel) -> Iterator[GrammarChecker]:
    assert loaded.tokenizer is not None
    checker = GrammarChecker(loaded.tokenizer, loaded.config.vocab, loaded.end_ids)
    yield checker
    checker.close()


def checked(checker: GrammarChecker, schema: object) -> tuple[str | None, str]:
    """(the grammar of a schema, or None where it is refused; why it is)"""

    async def check() -> str:
        grammar = schema_grammar(schema)
        await checker.check(grammar, "response_format")
        return grammar

    try:
        return asyncio.run(check()), ""
    except ApiError as problem:
        return None, f"{problem.status} {problem}"


def test_no_schema_ends_or_delays_the_engine_or_its_neighbours(
    loaded: LoadedModel, checker: GrammarChecker, caplog: pytest.LogCaptureFixture
) -> None:
    """Every schema that passes the check is followed beside a plain request; the plain one is the same as alone."""
    caplog.set_level(logging.CRITICAL)
    verdicts = {name: checked(checker, schema) for name, schema in SCHEMAS.items()}
    for name, (grammar, problem) in verdicts.items():
        assert grammar is not None or problem.startswith("400 response_format "), name
        assert "\n" not in problem, name
        assert "<state>" not in problem, name
    used = {name: grammar for name, (grammar, _) in verdicts.items() if grammar is not None}
    # Some of both, so that the test tests something; which library version refuses which is its own affair.
    assert {"list", "300 properties", "pattern of Chinese", "empty", "dates"} <= set(used)
    assert {
        "itself",
        "3000 properties",
        "array of itself, never empty",
        "900 deep",
        "not",
        "no type",
    }.isdisjoint(used)
    assert {
        "unknown type",
        "nowhere",
        "pattern that is wrong",
        "another site",
        "too long",
    }.isdisjoint(used)
    neighbour = EngineRequest((1, 2, 3), 40, Sampling(0.9, seed=4), ignore_eos=True)
    alone = InferenceEngine(loaded, EngineOptions())
    alone.submit(neighbour)
    expected = [
        token for _ in range(99) if alone.busy for event in alone.step() for token in event.tokens
    ]
    engine = InferenceEngine(
        loaded,
        EngineOptions(max_running=8, page_tokens=8, max_waiting=4096),
        constraints=constraints_of(loaded),
    )
    first = engine.submit(neighbour)
    for number, grammar in enumerate(used.values()):
        engine.submit(EngineRequest((5, 6), 12, Sampling(1.0, seed=number), constraint=grammar))
    last = engine.submit(neighbour)
    tokens: dict[int, list[int]] = {}
    ends: dict[int, EngineEvent] = {}
    while engine.busy:
        for event in engine.step():
            tokens.setdefault(event.request, []).extend(event.tokens)
            if event.finished is not None:
                ends[event.request] = event
    assert tokens[first] == tokens[last] == expected
    assert len(ends) == len(used) + 2
    for name, number in zip(used, range(first + 1, last), strict=True):
        assert ends[number].finished in ("eos", "grammar", "length"), (name, ends[number].error)
    engine.cache.forget_all()
    assert engine.stats().cache_bytes_used == 0


def test_a_schema_that_takes_hours_to_compile_is_refused_and_the_next_one_is_checked(
    checker: GrammarChecker,
) -> None:
    began = time.monotonic()
    grammar, problem = checked(checker, SLOW_SCHEMAS["multiples of many primes"])
    assert grammar is None
    assert REFUSED_FOR_TIME in problem
    assert time.monotonic() - began < 2 * grammar_check.WALL_SECONDS
    assert checked(checker, {"type": "integer"})[0] is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_SCHEMAS)
def test_schemas_that_are_slow_to_compile_are_refused(checker: GrammarChecker, name: str) -> None:
    grammar, problem = checked(checker, SLOW_SCHEMAS[name])
    assert grammar is None
    assert REFUSED_FOR_TIME in problem


def test_a_verdict_is_remembered(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(checker, {"const": "remembered"})[0] is not None
    assert checked(checker, {"$ref": "#"})[0] is None
    monkeypatch.setattr(checker, "_ask", lambda grammar: "was asked again.")
    assert checked(checker, {"const": "remembered"})[0] is not None
    assert "no text that ends" in checked(checker, {"$ref": "#"})[1]


def test_more_grammars_than_may_wait_are_refused(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "MAX_PENDING", 0)
    with pytest.raises(ApiError) as caught:
        asyncio.run(checker.check(schema_grammar({"const": "many"}), "response_format"))
    assert caught.value.status == 429


def test_the_process_ends_with_its_pipe_and_is_started_again(checker: GrammarChecker) -> None:
    assert checked(checker, {"const": 1})[0] is not None
    process = checker._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(20) == 0
    assert checked(checker, {"const": 2})[0] is not None


def test_the_grammar_of_a_tool_call_is_checked_in_the_same_way(checker: GrammarChecker) -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"$ref": "#/properties/arguments"}},
        }
    ]
    with pytest.raises(ApiError, match="tool_choice cannot be used as a grammar"):
        asyncio.run(checker.check(call_grammar("tags", tools, None), "tool_choice"))
    deep = [{"type": "function", "function": {"name": "f", "parameters": SCHEMAS["900 deep"]}}]
    with pytest.raises(ApiError, match="tools has a schema that cannot be used"):
        call_grammar("tags", deep, None)


def test_masks_that_take_too_long_end_their_answer(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory = constraints_of(loaded)
    assert factory is not None
    constraint: GrammarConstraint = factory(schema_grammar({"type": "string"}))
    monkeypatch.setattr(constraints, "MASK_SECONDS_PER_TOKEN", -0.4)
    mask = np.zeros(10, np.int32)
    constraint.fill_mask(mask)
    constraint.fill_mask(mask)
    with pytest.raises(ConfigError, match="too long"):
        constraint.fill_mask(mask)


def test_the_tokenizer_of_grammars_is_ready_with_the_engine(loaded: LoadedModel) -> None:
    """The first request that has a grammar does not wait for it."""
    factory = constraints_of(loaded)
    assert factory is not None
    assert "guidance_tokenizer" in vars(factory)
