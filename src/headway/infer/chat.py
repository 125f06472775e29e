"""A conversation with a model: what a person says comes in, the answer goes out piece by piece, and both become turns."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from headway.errors import ConfigError, HeadwayError
from headway.infer.generate import GenerateOptions, answer_conversations
from headway.infer.load import LoadedModel
from headway.infer.messages import as_messages
from headway.infer.stream import Say
from headway.prepare.parse_chat import Conversation
from headway.runtime.storage import write_atomic
from headway.tokenizer.chat import TOKENIZER_TEMPLATE, find_template
from headway.tokenizer.chat_template import BUILT_IN, Turn


@dataclass(frozen=True)
class ChatAnswer:
    """What the model said."""

    text: str
    was_interrupted: bool = False
    """Ctrl-C ended it; what had been said stays in the conversation."""


class ChatSession:
    """A model, and the turns so far. Every answer is computed from the whole conversation."""

    def __init__(self, loaded: LoadedModel, template: str | None, options: GenerateOptions, system: str | None = None) -> None:
        if loaded.tokenizer is None:
            raise ConfigError(f"{loaded.path}: holds no tokenizer. Put tokenizer.json and tokenizer_config.json there.")
        if template is None and loaded.tokenizer.chat_template is None:
            raise ConfigError(
                f"{loaded.path}: its tokenizer has no chat template, so it was not trained on conversations. "
                f"Give --chat-template ({', '.join(BUILT_IN)}), or use headway generate."
            )
        self.loaded, self.options = loaded, options
        self.template = template or TOKENIZER_TEMPLATE
        find_template(self.template, loaded.tokenizer)
        self.turns: list[Turn] = []
        self.system = system

    def ask(self, text: str, say: Say) -> ChatAnswer:
        """Say something and get the answer. If it cannot be answered, the conversation is as before."""
        said: list[str] = []

        def on_text(_: int, piece: str) -> None:
            said.append(piece)
            say(piece)

        before, was_interrupted = list(self.turns), False
        self.turns.append(Turn("user", text))
        try:
            answer_conversations(self.loaded, [Conversation(tuple(self._all()))], self.template, self.options, on_text)
        except KeyboardInterrupt:
            was_interrupted = True
        except HeadwayError:
            self.turns = before
            raise
        whole = "".join(said)
        if whole:
            self.turns.append(Turn("assistant", whole))
        else:  # an empty turn would teach the model to be silent
            self.turns = before
        return ChatAnswer(whole, was_interrupted)

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.turns = []

    def save(self, path: Path) -> None:
        """Write the conversation as JSON in OpenAI's shape, as `--messages` and training on chats read it."""
        if path.suffix != ".json":
            raise ConfigError(f"{path}: give a name that ends in .json.")
        write_atomic(path, json.dumps({"messages": self.messages()}, ensure_ascii=False, indent=2) + "\n")

    def messages(self) -> list[dict[str, str]]:
        """The conversation in OpenAI's shape, the system message first."""
        return as_messages(self._all())

    def _all(self) -> list[Turn]:
        return [*([Turn("system", self.system)] if self.system else []), *self.turns]
