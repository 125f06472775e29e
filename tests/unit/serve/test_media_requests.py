"""Pictures inside a request reach the model as `headway generate` gives them."""

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.byte_model import CONFIG, byte_tokenizer

from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.request import EngineOptions, EngineRequest
from headway.infer.generate import GenerateOptions
from headway.infer.load import LoadedModel, build_frozen_model
from headway.infer.media import MediaQuestion, answer_media
from headway.media.items import MediaRef
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.model.media_shape import MediaInput, MediaShape
from headway.serve.api_errors import ApiError
from headway.serve.chat_request import read_chat
from headway.serve.engine_process import MediaEncoding
from headway.serve.engine_setup import EngineFacts
from headway.serve.limits import ServeLimits
from headway.serve.served_model import ServedModel
from headway.tokenizer.chat import Turn


def encode(loaded: LoadedModel, refs: dict[str, MediaRef], opened: object = None) -> dict[str, np.ndarray]:
    """Features that depend on the bytes alone."""
    assert loaded.config.media is not None
    one = loaded.config.media.inputs[0]
    return {name: np.full((one.vectors, one.width), ref.read()[0] / 8, np.float32) for name, ref in refs.items()}


def ask(model: ServedModel, parts: list[dict[str, Any]]) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 12, "temperature": 0}
    return model._chat(read_chat(json.dumps(body).encode(), 1))


def picture(value: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(bytes([value])).decode()}"}}


def test_a_picture_in_a_request_is_answered_as_the_same_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIG.with_(max_seq_len=256, media=MediaShape((MediaInput("image", 6, 3),), hidden=8))
    weights = [(spec.name, initial_value(spec.name, spec.shape, config, 4)) for spec in param_specs(config)]
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")
    loaded = LoadedModel(build_frozen_model(config, weights, torch.device("cpu"), torch.float32), config, tokenizer, tmp_path)
    monkeypatch.setattr("headway.infer.media.encode_media", encode)
    assert config.media is not None
    tokens = {one.modality: one.tokens for one in config.media.inputs}
    facts = EngineFacts(
        "m", tokenizer, 256, config.vocab, 32, frozenset(), "cpu", "float32", 0, media=tokens, media_missing=config.media.missing
    )
    client: Any = SimpleNamespace(setup=SimpleNamespace(path="m"))
    model, engine = ServedModel(client, facts, None, ServeLimits()), InferenceEngine(loaded, EngineOptions(max_running=2))

    def answered(parts: list[dict[str, Any]]) -> list[int]:
        prepared = ask(model, parts)
        request: EngineRequest = MediaEncoding(loaded)(prepared.requests[0], prepared.media)
        engine.submit(request)
        return [token for _ in range(100) if engine.busy for event in engine.step() for token in event.tokens]

    def expected(content: str, *values: int) -> list[int]:
        media = tuple(MediaRef("image", data=bytes([value])) for value in values)
        return answer_media(loaded, [MediaQuestion((Turn("user", content),), media)], "chatml", GenerateOptions(12))[0].token_ids

    text = {"type": "text", "text": "\nwhat?"}
    assert answered([picture(10), text]) == expected("<image>\nwhat?", 10) != expected("<image>\nwhat?", 200)
    assert answered([picture(10), text, picture(200)]) == expected("<image>\nwhat?<image>", 10, 200)
    with pytest.raises(ApiError, match="stands for a part"):
        ask(model, [picture(10), {"type": "text", "text": "<image>"}])
