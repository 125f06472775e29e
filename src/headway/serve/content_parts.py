"""The content of a message: a text, or parts with pictures and sounds, comes in; text with a mark
for each item, and the items, go out.

    {"type": "text", "text": "..."}
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}
    {"type": "input_audio", "input_audio": {"data": "<base64>", "format": "wav"}}

Only bytes inside the request are read: no address is fetched and no file is opened.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import BeforeValidator, Field, model_validator

from headway.media.items import MediaRef
from headway.serve.api_errors import bad_field
from headway.serve.request_body import (
    MustBe,
    ReadBy,
    RequestBody,
    Text,
    needed,
    problem,
    wrong,
)

DATA_URI = re.compile(r"data:image/[a-z0-9.+-]{1,40};base64,", re.IGNORECASE)
AudioFormat = Literal["wav", "mp3", "flac", "ogg", "m4a"]
MARK = re.compile(r"<(image|audio|video)>")
"""Stands in the text of a turn for an item, in the order of the items."""
EXAMPLES = {
    "text": "a text",
    "image_url": '{"url": "data:image/png;base64,..."}',
    "input_audio": '{"data": "<base64>", "format": "wav"}',
}
"""The field of each type of part, and what it must be."""
MAX_ITEMS = 64
"""Pictures and sounds of a request."""
MAX_PARTS = 1024
"""Of one message."""


def _decoded(text: Any) -> Any:
    """The bytes of a base64 text, without line breaks or other characters that decoders skip."""
    if not isinstance(text, str):
        raise wrong("a text")
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise problem("is not valid base64.") from None
    if not content:
        raise problem("holds no bytes.")
    return content


def _decoded_uri(url: Any) -> Any:
    """The bytes of a picture in a data: URI."""
    if not isinstance(url, str):
        raise wrong("a text")
    # The beginning alone: a URI may have 32 MiB.
    head = DATA_URI.match(url[:100])
    if head is None:
        raise problem(
            "must be a data: URI with base64 "
            "(data:image/png;base64,...); addresses are never fetched."
        )
    return _decoded(url[head.end() :])


class ImageContent(RequestBody):
    """`image_url`."""

    url: Annotated[bytes, BeforeValidator(_decoded_uri)] = needed()
    detail: Any = None
    """How much of a picture another service looks at; here an encoder has one size."""


class AudioContent(RequestBody):
    """`input_audio`."""

    data: Annotated[bytes, BeforeValidator(_decoded)] = needed()
    format: Annotated[AudioFormat, MustBe(f"one of {', '.join(get_args(AudioFormat))}")] = "wav"


class ContentPart(RequestBody):
    """One of the parts of a content: its type, and the field of that name."""

    # A part has the field that its type names. Clients also send those of other types as null; with
    # a value they are refused.
    kind_field = "type"
    absent = {
        "text": frozenset(("image_url", "input_audio")),
        "image_url": frozenset(("text", "input_audio")),
        "input_audio": frozenset(("text", "image_url")),
    }

    type: Annotated[
        Literal["text", "image_url", "input_audio"], MustBe("text, image_url or input_audio")
    ] = needed()
    text: Text | None = None
    image_url: ImageContent | None = None
    input_audio: AudioContent | None = None
    cache_control: Any = None

    @model_validator(mode="after")
    def _has_the_field_of_its_type(self) -> Self:
        if getattr(self, self.type) is None:
            raise problem(f"is missing; it must be {EXAMPLES[self.type]}.", self.type)
        return self


Parts = Annotated[tuple[ContentPart, ...], Field(fail_fast=True)]


def _text_or_parts(value: Any, read_parts: Callable[[Any], Any]) -> Any:
    if isinstance(value, str):
        return value
    # Counted before parts are read, each of which may be a picture.
    if not isinstance(value, list) or not 1 <= len(cast(list[Any], value)) <= MAX_PARTS:
        raise wrong("a text or a list of parts")
    return read_parts(value)


Content = Annotated[str | tuple[ContentPart, ...], ReadBy(_text_or_parts, Parts)]


def joined_content(content: Content, field: str, media: list[MediaRef]) -> str:
    """The text of a content; pictures and sounds are added to `media` and marked in the text."""
    if isinstance(content, str):
        return content

    texts: list[str] = []
    has_media = False
    for number, part in enumerate(content):
        if part.text is not None:
            texts.append(part.text)
            continue

        has_media = True
        if part.image_url is not None:
            name = f"{field}[{number}].image_url.url"
            media.append(MediaRef("image", data=part.image_url.url, name=name))
            texts.append("<image>")

        if part.input_audio is not None:
            name = f"{field}[{number}].input_audio.data"
            media.append(MediaRef("audio", data=part.input_audio.data, name=name))
            texts.append("<audio>")

    if len(media) > MAX_ITEMS:
        raise bad_field(
            field, f"and the other messages hold more than {MAX_ITEMS} pictures and sounds."
        )

    # Items are matched to marks by their order: a mark in the text would take the next item's
    # place.
    if has_media and any(part.text is not None and MARK.search(part.text) for part in content):
        raise bad_field(
            field,
            "has a text with <image>, <audio> or <video>, which stands for a part. Leave it out.",
        )

    return "".join(texts)
