"""A real server with a tiny model, asked by OpenAI's own client: the same answers as `headway generate`, alone and together."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import save_file
from support.byte_model import CONFIG, write_model
from support.chat_tokenizer import byte_tokenizer
from support.odd_schemas import SCHEMAS
from support.serving import RunningServer, serving

from headway.infer.generate import GenerateOptions, answer, generate
from headway.infer.load import LoadedModel, load_model
from headway.tokenizer.chat_template import BUILT_IN

PROMPTS = [
    "Once upon a time",
    "The",
    "A longer prompt with several words in it, and a comma",
    "你好",
    "x",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = byte_tokenizer()
    with_template = tokenizer.with_chat_template(BUILT_IN["chatml"].export(tokenizer))
    return write_model(
        tmp_path_factory.mktemp("model"), CONFIG.with_(max_seq_len=1024), with_template
    )


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder)


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of the model, as PEFT writes it."""
    folder_of_adapter = tmp_path_factory.mktemp("adapter")
    settings = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": str(folder),
    }
    (folder_of_adapter / "adapter_config.json").write_text(json.dumps(settings))
    torch.manual_seed(1)
    names = [
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight"
        for layer in (0, 1)
        for part in "AB"
    ]
    save_file(
        {name: torch.randn(2, 32) if "_A" in name else torch.randn(32, 2) for name in names},
        folder_of_adapter / "adapter_model.safetensors",
    )
    return folder_of_adapter


@pytest.fixture(scope="module")
def server(folder: Path, adapter: Path) -> Iterator[RunningServer]:
    options = (
        "--device",
        "cpu",
        "--max-running",
        "8",
        "--cache-gib",
        "0.05",
        "--adapter",
        f"law={adapter}",
    )
    with serving("--model", f"tiny={folder}", *options, stand_in=False) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[Any]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as openai_client:
        yield openai_client


def test_greedy_text_is_that_of_generate_alone_and_together(
    client: Any, loaded: LoadedModel
) -> None:
    expected = [
        generation.text
        for generation in generate(loaded, PROMPTS, GenerateOptions(max_new_tokens=24))
    ]

    def ask(prompt: str) -> str:
        return (
            client.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0)
            .choices[0]
            .text
        )

    assert [ask(prompt) for prompt in PROMPTS] == expected
    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(ask, PROMPTS * 4)) == expected * 4
    assert [
        choice.text
        for choice in client.completions.create(
            model="tiny", prompt=PROMPTS, max_tokens=24, temperature=0
        ).choices
    ] == expected


def test_chat_streams_what_it_answers(client: Any, loaded: LoadedModel) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 0,
        "max_tokens": 20,
    }
    expected = answer(loaded, ["Hi"], "tokenizer", GenerateOptions(max_new_tokens=20))[0].text
    assert client.chat.completions.create(**asked).choices[0].message.content == expected
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == expected
    )
    assert (
        chunks[-1].usage.completion_tokens
        == client.chat.completions.create(**asked).usage.completion_tokens
    )


def test_a_seed_gives_the_same_samples_whatever_else_runs(client: Any) -> None:
    def ask(seed: int) -> list[str]:
        completion = client.completions.create(
            model="tiny", prompt="Once", max_tokens=12, temperature=1.3, seed=seed, n=2
        )
        return [choice.text for choice in completion.choices]

    alone = [ask(seed) for seed in range(4)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, [0, 1, 2, 3] * 2)) == alone * 2
    assert alone[0][0] != alone[0][1]
    assert alone[0] != alone[1]


def test_an_adapter_is_a_model_of_its_own_in_the_same_batch(
    client: Any, loaded: LoadedModel, adapter: Path
) -> None:
    options = GenerateOptions(max_new_tokens=16)
    expected = {
        "tiny": generate(loaded, ["Once"], options)[0].text,
        "law": generate(load_model(adapter), ["Once"], options)[0].text,
    }
    assert expected["tiny"] != expected["law"]

    def ask(model: str) -> str:
        return (
            client.completions.create(model=model, prompt="Once", max_tokens=16, temperature=0)
            .choices[0]
            .text
        )

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, ["tiny", "law"] * 3)) == [expected["tiny"], expected["law"]] * 3


def test_a_schema_is_followed(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "age": {"type": "integer", "maximum": 99, "minimum": 1},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    for seed in range(2):
        completion = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Who?"}], seed=seed, max_tokens=120,
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
        )  # fmt: skip
        person = json.loads(completion.choices[0].message.content)
        assert set(person) == {"name", "age"}
        assert 1 <= person["age"] <= 99


def test_a_tool_that_must_be_called_is_called(client: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    completion = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Add."}], tool_choice="required", max_tokens=120, seed=1,
        tools=[{"type": "function", "function": {"name": "add", "parameters": parameters}}],
    )  # fmt: skip
    call = completion.choices[0].message.tool_calls[0]
    assert completion.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "add"
    assert json.loads(call.function.arguments)["a"] in (1, 2)


def test_log_probabilities_are_those_of_the_model(client: Any, loaded: LoadedModel) -> None:
    completion = client.completions.create(
        model="tiny", prompt="Once", max_tokens=3, temperature=0, logprobs=2, echo=True
    ).choices[0]
    assert loaded.tokenizer is not None
    ids = [
        *loaded.tokenizer.encode("Once"),
        *generate(loaded, ["Once"], GenerateOptions(max_new_tokens=3))[0].token_ids,
    ]
    with torch.inference_mode():
        hidden = loaded.model.hidden_states(torch.tensor([ids]), torch.arange(len(ids))[None])
        scores = (
            loaded.model.logits(hidden)[0, :-1]
            .float()[:, : loaded.tokenizer.vocab_size]
            .log_softmax(-1)
        )
    expected = scores[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()
    assert completion.logprobs.token_logprobs[0] is None
    assert len(completion.logprobs.tokens) == len(ids) == 4 + 3
    assert completion.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)
    assert [max(top.values()) for top in completion.logprobs.top_logprobs[4:]] == pytest.approx(
        scores[3:].amax(-1).tolist(), abs=1e-3
    )


def test_embeddings_are_vectors_of_the_models_width(client: Any) -> None:
    answer = client.embeddings.create(model="tiny", input=["one text", "another text"])
    plain = (
        client.embeddings.create(model="tiny", input=["one text"], encoding_format="float")
        .data[0]
        .embedding
    )
    assert [len(item.embedding) for item in answer.data] == [32, 32]
    assert answer.data[0].embedding != answer.data[1].embedding
    assert plain == pytest.approx(answer.data[0].embedding, rel=1e-3, abs=1e-4)


def test_mistakes_arrive_as_openais_errors(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="x", temperature=9)
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError, match="leaves no room"):
        client.completions.create(model="tiny", prompt="x" * 1100)
    assert [model.id for model in client.models.list()] == ["tiny", "law"]


def engines_of(server: RunningServer) -> list[int]:
    """The process ids of its engines, oldest first."""
    listed = subprocess.run(
        ["pgrep", "-P", str(server.process.pid), "-f", "headway.serve.engine_process"],
        capture_output=True,
        text=True,
        check=False,
    )
    return sorted(map(int, listed.stdout.split()))


@pytest.mark.slow
def test_killed_engines_come_back_and_a_folder_that_is_gone_is_a_visible_reason(
    folder: Path, tmp_path: Path
) -> None:
    moving = tmp_path / "moving"
    shutil.copytree(folder, moving)
    options = ("--device", "cpu", "--cache-gib", "0.05", "--max-running", "4")
    models = ("--model", f"steady={folder}", "--model", f"moving={moving}")

    def ask(model: str) -> httpx.Response:
        return server.client().post(
            "/v1/completions",
            json={"model": model, "prompt": "Once", "max_tokens": 4, "temperature": 0},
        )

    def health() -> Any:
        return server.client().get("/health").json()

    def until(is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not is_there():
            assert time.monotonic() < deadline, server.log()
            time.sleep(0.05)

    with serving(*models, *options, stand_in=False) as server:
        expected = ask("moving").json()["choices"][0]["text"]
        first, second = engines_of(server)
        os.kill(second, signal.SIGKILL)
        until(lambda: health()["status"] != "ok")
        (down,) = health()["down"]
        steady = "moving" if down == "steady" else "steady"
        assert "SIGKILL" in ask(down).json()["error"]["message"]
        assert ask(steady).status_code == 200
        until(lambda: health()["status"] == "ok")
        assert ask(down).json()["choices"][0]["text"] == expected
        # Again, and this time the folder is gone when it is started.
        moving.rename(tmp_path / "away")
        for engine in engines_of(server):
            os.kill(engine, signal.SIGKILL)
        until(
            lambda: (
                "cannot be started" in health().get("down", {}).get("moving", {}).get("reason", "")
            )
        )
        until(lambda: health()["models"]["steady"] == "ok")
        assert ask("steady").json()["choices"][0]["text"] == expected
        refused = ask("moving")
        assert refused.status_code == 503
        assert "moving" in refused.json()["error"]["message"]
        assert refused.headers["Retry-After"]
        (tmp_path / "away").rename(moving)
        until(lambda: health()["status"] == "ok")
        assert ask("moving").json()["choices"][0]["text"] == expected
        assert first not in engines_of(server)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": {"$ref": "#"}},
                }
            },
            400,
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": SCHEMAS["3000 properties"]},
                }
            },
            400,
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": SCHEMAS["array of itself, never empty"]},
                }
            },
            400,
        ),
        ({"repetition_penalty": 1e-300, "temperature": 1}, 500),
    ],
    ids=[
        "schema of itself",
        "3000 properties",
        "array of itself",
        "a penalty that divides by nothing",
    ],
)
def test_what_one_request_breaks_is_its_own_answer(
    client: Any, server: RunningServer, fields: dict[str, Any], status: int
) -> None:
    """Others that run at the same time, and those after it, are answered as before."""
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 60,
        "temperature": 0,
    }
    expected = client.chat.completions.create(**asked).choices[0].message.content
    with ThreadPoolExecutor(4) as pool:
        neighbours = [pool.submit(client.chat.completions.create, **asked) for _ in range(3)]
        refused = server.client().post("/v1/chat/completions", json={**asked, **fields})
        assert [neighbour.result().choices[0].message.content for neighbour in neighbours] == [
            expected
        ] * 3
    assert refused.status_code == status, refused.text
    assert refused.json()["error"]["message"]
    assert client.chat.completions.create(**asked).choices[0].message.content == expected


def test_every_token_of_a_text_that_its_grammar_completes_has_a_log_probability(
    client: Any,
) -> None:
    completion = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=40,
        logprobs=True,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": {"const": "yes"}},
        },
    ).choices[0]
    assert completion.message.content == '"yes"'
    assert [score.token for score in completion.logprobs.content] == list('"yes"')
    assert completion.finish_reason == "stop"
