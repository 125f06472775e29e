"""The content of a message: a text, or parts with pictures and sounds, comes in; text with a mark for each item, and the items, go out.

    {"type": "text", "text": "..."}
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}
    {"type": "input_audio", "input_audio": {"data": "<base64>", "format": "wav"}}

Only bytes inside the request are read: no address is fetched and no file is opened.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any, cast

from headway.media.items import MediaRef
from headway.serve.api_errors import bad_field
from headway.serve.fields import BodyFields

DATA_URI = re.compile(r"data:image/[a-z0-9.+-]{1,40};base64,", re.IGNORECASE)
AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "m4a")
MARK = re.compile(r"<(image|audio|video)>")
MAX_ITEMS = 64
MAX_PARTS = 1024


def read_content(given: Any, where: str, media: list[MediaRef]) -> str:
    """The text of a content; pictures and sounds are added to `media` and marked in the text."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not given or len(cast(list[Any], given)) > MAX_PARTS:
        raise bad_field(where, "must be a text or a list of parts.")
    texts: list[str] = []
    has_media = False
    for number, one in enumerate(cast(list[Any], given)):
        place = f"{where}[{number}]"
        if not isinstance(one, dict):
            raise bad_field(place, "must be an object with a type, such as text or image_url.")
        part = BodyFields(cast(dict[str, Any], one), place)
        kind = part.needed_text("type")
        if kind == "text":
            texts.append(part.needed_text("text"))
        elif kind == "image_url":
            media.append(_image(part))
            texts.append("<image>")
            has_media = True
        elif kind == "input_audio":
            media.append(_audio(part))
            texts.append("<audio>")
            has_media = True
        else:
            raise bad_field(
                f"{place}.type", f"is {kind[:40]!r}; it must be text, image_url or input_audio."
            )
        part.finish(("cache_control",))
        if len(media) > MAX_ITEMS:
            raise bad_field(
                where, f"and the other messages hold more than {MAX_ITEMS} pictures and sounds."
            )
    if not has_media:
        return "".join(texts)
    if any(
        MARK.search(text)
        for text, kind in zip(texts, cast(list[Any], given), strict=True)
        if kind["type"] == "text"
    ):
        raise bad_field(
            where,
            "has a text with <image>, <audio> or <video>, which stands for a part. Leave it out.",
        )
    return "".join(texts)


def _image(part: BodyFields) -> MediaRef:
    inner = part.inner("image_url")
    if inner is None:
        raise bad_field(
            part.name("image_url"), 'is missing; it must be {"url": "data:image/png;base64,..."}.'
        )
    url = inner.needed_text("url")
    inner.get(
        "detail"
    )  # how much of a picture another service looks at; here an encoder has one size
    inner.finish()
    found = DATA_URI.match(url[:100])
    if found is None:
        raise bad_field(
            inner.name("url"),
            "must be a data: URI with base64 (data:image/png;base64,...); addresses are never fetched.",
        )
    return MediaRef(
        "image", data=_decoded(url[found.end() :], inner.name("url")), name=inner.name("url")
    )


def _audio(part: BodyFields) -> MediaRef:
    inner = part.inner("input_audio")
    if inner is None:
        raise bad_field(
            part.name("input_audio"),
            'is missing; it must be {"data": "<base64>", "format": "wav"}.',
        )
    kind = inner.text("format", "wav")
    if kind not in AUDIO_FORMATS:
        raise inner.wrong("format", f"one of {', '.join(AUDIO_FORMATS)}")
    data = _decoded(inner.needed_text("data"), inner.name("data"))
    inner.finish()
    return MediaRef("audio", data=data, name=inner.name("data"))


def _decoded(text: str, where: str) -> bytes:
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise bad_field(where, "is not valid base64.") from None
    if not found:
        raise bad_field(where, "holds no bytes.")
    return found
