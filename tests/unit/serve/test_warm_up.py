"""What the first request would start has run once before the server is ready."""

import asyncio

import pytest
from support.chat_tokenizer import byte_tokenizer

from headway.media.items import AudioSpec, ImageSpec
from headway.media.patches import PictureSpec
from headway.prepare.media_inputs import CellInput, ImageInput, MediaInputSpec, MelInput
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
