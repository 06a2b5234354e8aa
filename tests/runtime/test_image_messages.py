"""Images in chats: which ones, in which order, and what is refused."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from edgecc.backends.runtime.chat import ChatTemplates
from edgecc.backends.runtime.image_messages import images_of, without_sources
from edgecc.errors import RequestError

URL = "data:image/png;base64," + base64.b64encode(b"pixels").decode()
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You see."},
    {
        "role": "user",
        "content": [
            {"type": "image", "image": "first.png"},
            {"type": "text", "text": "and"},
            {"type": "image_url", "image_url": {"url": URL}},
        ],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "I see."}]},
    {"role": "user", "content": [{"image": b"third"}, {"type": "image_url", "image_url": URL}]},
]


def sources(messages: Any) -> list[Any]:
    return [image.source for image in images_of(messages)]


def test_images_in_order() -> None:
    assert sources(CHAT) == ["first.png", b"pixels", b"third", b"pixels"]
    assert sources(CHAT[:1]) == sources([]) == sources([{"role": "user"}]) == []


def test_a_template_writes_as_many_placeholders() -> None:
    """With the rule of the templates of this family."""
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for c in m.content %}"
        "{% if 'image' in c or 'image_url' in c or c.type == 'image' %}<image>"
        "{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    plain = without_sources(CHAT)
    text = ChatTemplates({"default": template}).render(plain, add_generation_prompt=False)
    assert text == "You see.<image>and<image>I see.<image><image>"


@pytest.mark.parametrize(
    ("url", "data"),
    [
        ("data:image/jpeg;base64,AAEC", b"\x00\x01\x02"),
        ("DATA:IMAGE/PNG;BASE64,AAEC", b"\x00\x01\x02"),
        ("data:;base64,AAEC", b"\x00\x01\x02"),
        ("data:image/png;base64,AA\r\nEC\n", b"\x00\x01\x02"),
        ("data:image/svg+xml;charset=utf-8;base64,AAEC", b"\x00\x01\x02"),
    ],
)
def test_data_urls(url: str, data: bytes) -> None:
    for part in ({"type": "image_url", "image_url": {"url": url}}, {"image": url}):
        (found,) = images_of([{"content": [part]}], allow_files=False)
        assert found.source == data


@pytest.mark.parametrize(
    ("part", "id_", "key"),
    [
        ({"type": "image"}, "image/no-source", ""),
        ({"type": "image_url"}, "image/no-source", ""),
        ({"type": "image_url", "image_url": {}}, "image/bad-url", ".image_url"),
        ({"type": "image_url", "image_url": 3}, "image/bad-url", ".image_url"),
        ({"image_url": {"url": "https://example.com/cat.png"}}, "image/remote", ".image_url"),
        ({"image_url": {"url": "file:///etc/passwd"}}, "image/remote", ".image_url"),
        ({"image_url": {"url": "/etc/passwd"}}, "image/remote", ".image_url"),
        ({"image_url": {"url": "data:text/html;base64,AAEC"}}, "image/remote", ".image_url"),
        ({"image_url": {"url": "data:image/png,AAEC"}}, "image/remote", ".image_url"),
        ({"image_url": {"url": "data:image/png;base64,A?"}}, "image/bad-base64", ".image_url"),
        ({"image_url": {"url": "data:image/png;base64,AAE"}}, "image/bad-base64", ".image_url"),
        ({"image_url": {"url": "data:image/png;base64,ü"}}, "image/bad-base64", ".image_url"),
    ],
)
def test_refuses(part: dict[str, Any], id_: str, key: str) -> None:
    with pytest.raises(RequestError) as caught:
        images_of([{"content": "text"}, {"content": [{"type": "text"}, part]}])
    assert caught.value.id == id_
    assert caught.value.diagnostics[0].where == f"messages[1].content[1]{key}"


def test_names_for_messages() -> None:
    names = [image.name for image in images_of(CHAT)]
    assert names == [
        "first.png",
        "messages[1].content[2].image_url",
        "messages[3].content[0].image",
        "messages[3].content[1].image_url",
    ]


def test_files_of_a_server_are_its_own() -> None:
    with pytest.raises(RequestError) as caught:
        images_of([{"content": [{"type": "image", "image": "/etc/passwd"}]}], allow_files=False)
    assert caught.value.id == "image/no-files"
