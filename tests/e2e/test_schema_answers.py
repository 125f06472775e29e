"""`generate --schema`: answers follow the schema, whatever the model would say; one that was cut is an error."""

import json
from pathlib import Path

import pytest
from support.byte_model import CONFIG, write_model
from support.chat_tokenizer import byte_tokenizer
from support.runs import headway

from headway.tokenizer.chat_template import BUILT_IN

SCHEMA = {
    "type": "object",
    "required": ["mood", "risk"],
    "properties": {
        "mood": {"enum": ["calm", "angry"]},
        "risk": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "if": {"properties": {"mood": {"const": "angry"}}},
    "then": {"properties": {"risk": {"minimum": 4}}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = byte_tokenizer()
    with_template = tokenizer.with_chat_template(BUILT_IN["chatml"].export(tokenizer))
    return write_model(
        tmp_path_factory.mktemp("model"), CONFIG.with_(max_seq_len=1024), with_template
    )


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("schema") / "mood.json"
    path.write_text(json.dumps(SCHEMA))
    return path


def test_answers_follow_the_schema(model: Path, schema: Path) -> None:
    pytest.importorskip("llguidance")
    prompts = ["--prompt", "How is the cat?", "--prompt", "And now?"]
    done = headway(
        "generate",
        "--model",
        str(model),
        *prompts,
        "--schema",
        str(schema),
        "--temperature",
        "1",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    for generation in json.loads(done.stdout)["generations"]:
        answer = json.loads(generation["text"])
        assert set(answer) == {"mood", "risk"}
        assert generation["valid"]
        assert generation["stopped_by"] in ("grammar", "eos")
        assert answer["risk"] >= (4 if answer["mood"] == "angry" else 1)


def test_a_shipped_schema_with_a_condition_is_followed(model: Path) -> None:
    pytest.importorskip("llguidance")
    asked = (
        "--prompt",
        "Report.",
        "--schema",
        "purrsight_v3",
        "--max-new-tokens",
        "900",
        "--temperature",
        "1",
        "--json",
    )
    done = headway("generate", "--model", str(model), *asked)
    text = json.loads(done.stdout)["text"]
    # A random model may talk without end inside a string, but what it has said so far follows the schema.
    assert text.startswith('{"diagnostic":{"physical_markers":{"ears":')
    assert '"risk_rating"' in text


def test_an_answer_that_was_cut_is_an_error(model: Path, schema: Path) -> None:
    pytest.importorskip("llguidance")
    done = headway(
        "generate",
        "--model",
        str(model),
        "--prompt",
        "Well?",
        "--schema",
        str(schema),
        "--max-new-tokens",
        "3",
    )
    assert done.returncode == 1
    assert "not valid by the schema: the answer is not JSON" in done.stderr


@pytest.mark.parametrize(
    ("content", "named"),
    [('{"type": "object", "if": {"not": {}}, "then": {}}', "not"), ("{nonsense", "JSON")],
)
def test_a_schema_that_cannot_be_followed_is_refused_before_the_model_is_read(
    tmp_path: Path, content: str, named: str
) -> None:
    pytest.importorskip("llguidance")
    (tmp_path / "bad.json").write_text(content)
    done = headway(
        "generate",
        "--model",
        "nowhere",
        "--prompt",
        "Well?",
        "--schema",
        str(tmp_path / "bad.json"),
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert named in done.stderr
    assert "Traceback" not in done.stderr
