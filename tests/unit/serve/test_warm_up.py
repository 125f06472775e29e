"""What the first request would start has run once before the server is ready."""

import asyncio
from pathlib import Path

import pytest
from support.byte_model import CONFIG, write_model
from support.chat_tokenizer import byte_tokenizer

from headway.infer.engine.request import EngineOptions
from headway.media.items import AudioSpec, ImageSpec
from headway.media.patches import PictureSpec
from headway.prepare.media_inputs import CellInput, ImageInput, MediaInputSpec, MelInput
from headway.serve.engine_process import MediaEncoding, open_engine
from headway.serve.engine_setup import EngineSetup
from headway.serve.grammar_check import GrammarChecker
from headway.serve.limits import ServeLimits
from headway.serve.warm_up import decode_samples
from headway.serve.workers import WorkerPool


@pytest.mark.parametrize(
    "inputs",
    [
        {"image": ImageInput(ImageSpec(size=8, resize=8))},
        {"image": CellInput(PictureSpec(patch=4))},
        {"image": ImageInput(), "audio": MelInput(AudioSpec())},
    ],
    ids=["pictures of one size", "pictures of any size", "pictures and sounds"],
)
def test_every_process_that_decodes_has_decoded_once(inputs: dict[str, MediaInputSpec]) -> None:
    async def idle_processes() -> list[int]:
        pool = WorkerPool("decode the media", 2, ServeLimits().media_bytes)
        try:
            await decode_samples(pool, inputs, 30)
            return [worker.pid for worker in pool.idle if worker.is_alive]
        finally:
            await pool.close()

    assert len(set(asyncio.run(idle_processes()))) == 2


def test_the_process_that_checks_grammars_has_checked_one() -> None:
    pytest.importorskip("llguidance")
    tokenizer = byte_tokenizer()
    assert tokenizer.eos_id is not None
    checker = GrammarChecker(tokenizer, tokenizer.vocab_size, frozenset([tokenizer.eos_id]))
    try:
        asyncio.run(checker.warm_up())
        assert checker._process is not None
        assert checker._process.poll() is None
        assert list(checker._verdicts.values()) == [""]
    finally:
        checker.close()


def test_an_encoder_that_fails_does_not_end_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(encoding: MediaEncoding) -> None:
        raise RuntimeError("no memory for an encoder")

    monkeypatch.setattr(MediaEncoding, "warm_up", fail)
    model = write_model(tmp_path, CONFIG.with_(max_seq_len=64))
    setup = EngineSetup("m", str(model), device="cpu", options=EngineOptions(max_running=2))
    _, facts, _ = open_engine(setup)
    assert facts.name == "m"
    assert "m: pictures and sounds may fail: no memory for an encoder" in caplog.text
