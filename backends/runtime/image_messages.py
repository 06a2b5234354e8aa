"""Images in the messages of a chat, in the order in which templates write their placeholders.

The content of a message is a string, or a list of parts. Two kinds of parts hold images:
`{"type": "image", "image": SOURCE}` with a path, the bytes of a file or a Pillow image, and
`{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`, as in the OpenAI API.
Nothing is fetched from a network.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgecc.backends.runtime.image_files import ImageSource, NamedImage
from edgecc.errors import RequestError

IMAGE_KINDS = ("image", "image_url")
"""Types of parts that are images, and keys that only they have."""

_DATA_URL = re.compile(r"data:(image/[\w.+-]+)?(;[\w-]+=[^;,]*)*;base64,", re.ASCII | re.IGNORECASE)

_WHITE_SPACE = re.compile(r"[ \t\n\f\r]+")


def images_of(
    messages: Sequence[Mapping[str, Any]], *, allow_files: bool = True
) -> list[NamedImage]:
    """The images of a chat, in order, named by their file or their place in the messages.

    Args:
        messages: The chat.
        allow_files: Whether paths may be read. A server says no: its clients have no business with
            its files.

    Raises:
        RequestError: A part is malformed, or is an image from somewhere else.
    """
    return [
        _image(part, f"messages[{i}].content[{j}]", allow_files=allow_files)
        for i, message in enumerate(_listed(messages))
        for j, part in _parts(message)
    ]


def without_sources(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same chat for a template, which only needs to know where images are, not what."""
    rendered: list[Mapping[str, Any]] = []
    for message in messages:
        places = {j for j, _ in _parts(message)}
        if places:
            message = {
                **message,
                "content": [
                    {"type": "image", "image": ""} if j in places else part
                    for j, part in enumerate(message["content"])
                ],
            }
        rendered.append(message)
    return rendered


def _listed(value: object) -> Sequence[Any]:
    """What is no list has no items: rendering says what is wrong with it."""
    return value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()


def _parts(message: object) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Parts that are images. Templates tell them by their type or by having such a key."""
    content = message.get("content") if isinstance(message, Mapping) else None
    for j, part in enumerate(_listed(content)):
        if isinstance(part, Mapping) and (
            part.get("type") in IMAGE_KINDS or any(kind in part for kind in IMAGE_KINDS)
        ):
            yield j, part


def _image(part: Mapping[str, Any], where: str, *, allow_files: bool) -> NamedImage:
    if "image_url" in part:
        url = part["image_url"]
        url = url.get("url") if isinstance(url, Mapping) else url
        return _decoded(url, f"{where}.image_url")
    if "image" not in part:
        raise RequestError(
            "image/no-source",
            "this part is an image, but has neither image nor image_url",
            where=where,
            help="an image_url has a data URL: data:image/png;base64,...",
        )
    where = f"{where}.image"
    image: ImageSource = part["image"]
    if isinstance(image, str) and image[:5].lower() == "data:":
        return _decoded(image, where)
    if not allow_files and not isinstance(image, bytes):
        raise RequestError(
            "image/no-files",
            "images are given by their bytes, not by the name of a file",
            where=where,
            help="send it as a data URL: data:image/png;base64,...",
        )
    return NamedImage(image, os.fspath(image) if isinstance(image, str | os.PathLike) else where)


def _decoded(url: object, where: str) -> NamedImage:
    """The bytes of a data URL; programs that write base64 in lines put white space into it."""
    if not isinstance(url, str):
        raise RequestError(
            "image/bad-url", f"a URL is a string, not a {type(url).__name__}", where=where
        )
    found = _DATA_URL.match(url)
    if found is None:
        shown = url if len(url) <= 40 else f"{url[:37]}..."
        raise RequestError(
            "image/remote",
            f"{shown!r} is no data URL of an image in base64: nothing is fetched from elsewhere",
            where=where,
            help="send the bytes: data:image/png;base64,...",
        )
    try:
        text = _WHITE_SPACE.sub("", url[found.end() :])
        return NamedImage(base64.b64decode(text, validate=True), where)
    except (binascii.Error, ValueError) as error:
        raise RequestError(
            "image/bad-base64", f"the data URL is not base64: {error}", where=where
        ) from error
