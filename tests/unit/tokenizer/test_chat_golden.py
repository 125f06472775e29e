"""The built-in chat templates write the ids and loss masks, the refusals and the exported text that earlier versions wrote."""

import hashlib
import json

import pytest
from support.chat_cases import (
    GOLDEN,
    TALKS,
    TEMPLATES,
    encoded,
    in_transformers,
    tokenizers_by_name,
)
from support.chat_tokenizer import byte_tokenizer

from headway.tokenizer.chat import find_template
from headway.tokenizer.chat_template import BUILT_IN

IDS = json.loads((GOLDEN / "ids.json").read_text())
EXPORTED = json.loads((GOLDEN / "exported.json").read_text())
TOKENIZERS = tokenizers_by_name()


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tokenizer", IDS)
def test_ids_masks_and_refusals_are_unchanged(tokenizer: str, template: str) -> None:
    encodings = {
        name: encoded(turns, template, TOKENIZERS[tokenizer], tools)
        for name, (turns, tools) in TALKS.items()
    }
    assert encodings == dict(zip(TALKS, IDS[tokenizer][template], strict=True))


@pytest.mark.parametrize("template", TEMPLATES)
def test_exported_templates_render_the_same_text_in_transformers_and_the_same_ids_and_masks_here(
    template: str,
) -> None:
    tokenizer = TOKENIZERS["bpe"]
    source = find_template(template, tokenizer).export(tokenizer)
    if template not in EXPORTED:
        assert source is None
        return
    assert source is not None
    rendered = {
        name: in_transformers(turns, source, tokenizer, tools)
        for name, (turns, tools) in TALKS.items()
    }
    if (
        template == "alpaca"
    ):  # earlier exports dropped tool definitions silently; headway refuses them, and now so do exports
        assert rendered.pop("tools and plain talk") == "refused refused"
        rendered["tools and plain talk"] = "10b342feea 64805775a0"
    assert rendered == dict(zip(TALKS, EXPORTED[template]["transformers"], strict=True))
    with_template = tokenizer.with_chat_template(source)
    rendered = {
        name: encoded(turns, "tokenizer", with_template, tools)
        for name, (turns, tools) in TALKS.items()
    }
    assert rendered == dict(zip(TALKS, EXPORTED[template]["tokenizer"], strict=True))


def test_cached_stores_of_earlier_versions_are_found() -> None:
    """The key of a cached store holds the template's: the one of earlier versions, as long as the template is the same."""
    digests = {
        name: hashlib.sha256(template.cache_key.encode()).hexdigest()[:10]
        for name, template in BUILT_IN.items()
    }
    assert digests == json.loads((GOLDEN / "cache_keys.json").read_text())
    key = find_template("tokenizer", byte_tokenizer("{{ messages }}'\n")).cache_key
    assert hashlib.sha256(key.encode()).hexdigest()[:10] == "603c56efda"
