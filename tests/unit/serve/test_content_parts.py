"""Pictures inside a request reach the model as `headway generate` gives them."""

import asyncio
import base64
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.byte_model import CONFIG, byte_tokenizer

from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.request import EngineOptions, EngineRequest
from headway.infer.generate import GenerateOptions
from headway.infer.load import LoadedModel
from headway.infer.media import MediaQuestion, answer_media
from headway.media.items import ImageSpec, MediaRef
from headway.model.base import build_frozen_model
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.model.media_shape import MediaInput, MediaShape
from headway.prepare.media_inputs import ImageInput
from headway.serve.api_errors import ApiError
from headway.serve.chat_request import read_chat
from headway.serve.engine_process import MediaEncoding
from headway.serve.engine_setup import EngineFacts
from headway.serve.limits import ServeLimits
from headway.serve.metrics import ServeMetrics
from headway.serve.served_model import PreparedPrompt, ServedModel
from headway.serve.served_request import ServedRequest
from headway.serve.workers import WorkerPool
from headway.tokenizer.chat import Turn


class MeanColour:
    """An encoder whose feature is the mean of the pixels."""

    input = ImageInput(ImageSpec(size=8, resize=8))
    tokens = 1
    width = 6

    def to(self, device: Any) -> "MeanColour":
        return self

    def encode(self, inputs: np.ndarray) -> np.ndarray:
        return np.repeat(inputs.mean(axis=(1, 2, 3))[:, None, None] / 8, 6, axis=2).astype(
            np.float32
        )


def png(value: int, side: int = 8) -> bytes:
    """A grey picture."""
    data = io.BytesIO()
    Image.new("L", (side, side), value).save(data, "PNG")
    return data.getvalue()


def ask(model: ServedModel, parts: list[dict[str, Any]]) -> Any:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 12,
        "temperature": 0,
    }
    return model._chat(read_chat(json.dumps(body).encode(), 1))


def picture(value: int) -> dict[str, Any]:
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png(value)).decode()}"},
    }


def test_a_picture_in_a_request_is_answered_as_the_same_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIG.with_(max_seq_len=256, media=MediaShape((MediaInput("image", 6, 3),), hidden=8))
    weights = [(spec.name, initial_value(spec, config, 4)) for spec in param_specs(config)]
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")
    loaded = LoadedModel(
        build_frozen_model(config, weights, torch.device("cpu"), torch.float32),
        config,
        tokenizer,
        tmp_path,
    )
    monkeypatch.setattr("headway.infer.media.open_encoder", lambda *arguments: MeanColour())
    encoding = MediaEncoding(loaded)
    assert config.media is not None
    facts = EngineFacts(
        "m",
        tokenizer,
        256,
        config.vocab,
        32,
        frozenset(),
        "cpu",
        "float32",
        0,
        media={"image": 3},
        media_missing=config.media.missing,
        media_inputs=encoding.inputs,
    )
    client: Any = SimpleNamespace(setup=SimpleNamespace(path="m"), check_alive=lambda: None)
    model = ServedModel(client, facts, None, ServeLimits())
    engine = InferenceEngine(loaded, EngineOptions(max_running=2))

    async def decode(prompt: PreparedPrompt) -> PreparedPrompt:
        decoders = WorkerPool("decode the media", 1, ServeLimits().media_bytes)
        served = ServedRequest(model, ServeMetrics(("m",)), 60, lambda request: None)
        try:
            return await served.decoded(prompt, decoders, ServeLimits())
        finally:
            served.__exit__()
            await decoders.close()

    def answered(parts: list[dict[str, Any]]) -> list[int]:
        prepared = asyncio.run(decode(ask(model, parts)))
        request: EngineRequest | None = None
        while request is None:
            request = encoding(prepared.requests[0], prepared.decoded)
        engine.submit(request)
        return [
            token
            for _ in range(100)
            if engine.busy
            for event in engine.step()
            for token in event.tokens
        ]

    def expected(content: str, *values: int) -> list[int]:
        media = tuple(MediaRef("image", data=png(value)) for value in values)
        return answer_media(
            loaded, [MediaQuestion((Turn("user", content),), media)], "chatml", GenerateOptions(12)
        )[0].token_ids

    text = {"type": "text", "text": "\nwhat?"}
    assert (
        answered([picture(10), text])
        == expected("<image>\nwhat?", 10)
        != expected("<image>\nwhat?", 200)
    )
    assert answered([picture(10), text, picture(200)]) == expected("<image>\nwhat?<image>", 10, 200)
    many = [10 * number for number in range(12)]
    assert answered([*map(picture, many), text]) == expected("<image>" * 12 + "\nwhat?", *many)
    with pytest.raises(ApiError, match="stands for a part"):
        ask(model, [picture(10), {"type": "text", "text": "<image>"}])
