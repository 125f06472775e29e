"""A kind of records: a question with choices becomes a conversation, whose answer is the right choice."""

from __future__ import annotations

from headway.plugin import ChatKind, Conversation, DataError, Record, RecordFields, Turn


class Kind(ChatKind):
    """{"ask": "Which is a fruit?", "choices": ["a stone", "an apple"], "right": 1}."""

    unit = "questions"

    def parse(self, record: Record, fields: RecordFields) -> Conversation:
        """The question with all choices, and the right one as the answer."""
        choices, right = record.data["choices"], record.data["right"]
        if not 0 <= right < len(choices):
            raise DataError(f"{record.place}: right is {right}; there are {len(choices)} choices.")
        asked = "\n".join([record.data["ask"], *(f"- {choice}" for choice in choices)])
        return Conversation((Turn("user", asked), Turn("assistant", choices[right])))
