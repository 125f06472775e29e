"""What stands before a text: the begin token, where a model expects one.

A tokenizer may put it there itself (Llama's does). A chat model whose own template begins with the begin token has never read a text
without it, whatever its tokenizer does: without it such a model scores any text as noise.
"""

from __future__ import annotations

from headway.errors import ConfigError, HeadwayError
from headway.tokenizer.load import Tokenizer


def opening_ids(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before every text."""
    if tokenizer.is_sentencepiece:
        return [tokenizer.bos_id] if tokenizer.config.get("add_bos_token") and tokenizer.bos_id is not None else []
    bare, full = (tokenizer.fast.encode("a", add_special_tokens=added).ids for added in (False, True))
    return next(full[:at] for at in range(len(full)) if full[at : at + len(bare)] == bare)


def expected_ids(tokenizer: Tokenizer, bos: bool | None = None) -> list[int]:
    """What stands before a text for a model: its begin token (True), nothing (False), or what the model expects (None)."""
    if bos is False:
        return []
    if bos:
        if tokenizer.bos_id is None:
            raise ConfigError("--bos was given; the model's tokenizer has no token that begins a document. Leave it out.")
        return [tokenizer.bos_id]
    return opening_ids(tokenizer) or _opening_of_chats(tokenizer)


def _opening_of_chats(tokenizer: Tokenizer) -> list[int]:
    """The begin token, where the tokenizer's own chat template begins with it."""
    from headway.tokenizer.chat import OWN, Turn, render_prompt

    if tokenizer.chat_template is None or tokenizer.bos_id is None:
        return []
    try:
        first = render_prompt([Turn("user", "a")], OWN, tokenizer)[:1]
    except HeadwayError:  # a template that cannot be rendered says nothing; whoever asks for it gets its error
        return []
    return first if first == [tokenizer.bos_id] else []
