"""Prompts as callers give them: text, tokens or a chat, with images and without."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from edgecc.backends.runtime import ChatTemplates, ModelInfo
from edgecc.backends.runtime.image_config import ImageConfig
from edgecc.backends.runtime.prompt import Prompt, PromptReader
from edgecc.errors import RequestError
from helpers.byte_tokenizer import VISION_CHAT_TEMPLATE, VISION_SPECIAL, byte_tokenizer

Image = pytest.importorskip("PIL.Image")

START, END, IMAGE = 259, 260, 261
CONFIG = ImageConfig(
    patch_size=4,
    temporal_patch_size=2,
    merge_size=2,
    grid_size=5,
    min_pixels=64,
    max_pixels=4096,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    max_tokens=64,
    feature_size=8,
    image_token_id=IMAGE,
    start_token_id=START,
    end_token_id=END,
)
PICTURE = Image.new("RGB", (24, 16))  # 2 x 3 tokens


class Bytes:
    """The part of a tokenizer that prompts need."""

    def __init__(self) -> None:
        special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *VISION_SPECIAL)
        self._tokenizer = byte_tokenizer(special)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def reader(images: ImageConfig | None = CONFIG, **limits: int) -> PromptReader:
    model = ModelInfo(
        vocab_size=288,
        num_tokens=262,
        eos_token_ids=frozenset(),
        images=images,
        **{"max_model_len": 64, "max_input_len": 48, "prefill_chunk": 8, **limits},
    )
    tokenizer: Any = Bytes()
    return PromptReader(model, tokenizer, ChatTemplates({"default": VISION_CHAT_TEMPLATE}))


def read(*, images: Any = None, on: PromptReader | None = None, **given: Any) -> Prompt:
    order = ("prompt", "token_ids", "messages")
    return (on or reader()).read(*(given.get(name) for name in order), images)


def refused(**given: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(**given)
    return caught.value


def test_text_alone() -> None:
    for found in (read(prompt="ab"), read(token_ids=[97, 98]), read(prompt="ab", images=[])):
        assert found.token_ids.tolist() == [97, 98]
        assert found.images is None


def test_images_in_front_of_text() -> None:
    """As the template of the family writes them, one after the other."""
    found = read(prompt="ab", images=[PICTURE, PICTURE])
    one = [START, *[IMAGE] * 6, END]
    assert found.token_ids.tolist() == [*one, *one, 97, 98]
    assert found.images is not None
    assert found.images.prompt.feature_rows.tolist() == [
        *(-1, 0, 1, 2, 3, 4, 5, -1),
        *(-1, 6, 7, 8, 9, 10, 11, -1, -1, -1),
    ]


def test_images_where_text_says() -> None:
    marked = read(prompt=f"a{VISION_SPECIAL[2]}b", images=[PICTURE])
    assert marked.token_ids.tolist() == [97, *[IMAGE] * 6, 98]
    listed = read(token_ids=np.array([97, IMAGE, 98]), images=(PICTURE,))
    assert listed.token_ids.tolist() == marked.token_ids.tolist()


def test_a_tower_without_tokens_around_images() -> None:
    bare = reader(ImageConfig(**{**as_dict(CONFIG), "start_token_id": None, "end_token_id": None}))
    assert read(prompt="a", images=[PICTURE], on=bare).token_ids.tolist() == [*[IMAGE] * 6, 97]


def as_dict(config: ImageConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ImageConfig.__dataclass_fields__}


def test_tokens_have_their_own_placeholders() -> None:
    """Nothing is added to a list of tokens."""
    assert refused(token_ids=[97, 98], images=[PICTURE]).id == "image/placeholders"


def test_images_of_a_chat() -> None:
    """Each source is read; templates never see it."""
    stream = io.BytesIO()
    PICTURE.save(stream, "PNG")
    for source in (PICTURE, stream.getvalue()):
        parts = [
            {"type": "text", "text": "a"},
            {"type": "image", "image": source},
            {"type": "text", "text": "b"},
        ]
        found = read(messages=[{"role": "user", "content": parts}])
        text = found.token_ids.tolist()
        assert text.count(IMAGE) == 6
        assert text[text.index(START) - 1] == 97
        assert text[text.index(END) + 1] == 98


@pytest.mark.parametrize(
    ("given", "id"),
    [
        ({}, "request/one-prompt"),
        ({"prompt": "a", "token_ids": [1]}, "request/one-prompt"),
        ({"prompt": "a", "images": "cat.png"}, "request/bad-images"),
        ({"prompt": "a", "images": PICTURE}, "request/bad-images"),
        ({"messages": [{"role": "user", "content": "a"}], "images": [PICTURE]}, "request/bad-imag"),
        ({"prompt": "a", "images": [7]}, "image/bad-source"),
        ({"prompt": "a", "images": [None]}, "image/bad-source"),
        ({"prompt": f"a{VISION_SPECIAL[2]}"}, "image/placeholders"),
        ({"prompt": VISION_SPECIAL[2] * 2, "images": [PICTURE]}, "image/placeholders"),
        ({"token_ids": [IMAGE], "images": [PICTURE, PICTURE]}, "image/placeholders"),
        ({"prompt": "a", "images": [PICTURE] * 6}, "request/prompt-too-long"),
        ({"token_ids": [99999], "images": [PICTURE]}, "request/token-out-of-range"),
        ({"messages": "a chat"}, "chat/bad-messages"),
        ({"messages": ["a"]}, "chat/bad-messages"),
        (
            {"messages": ["a", {"role": "user", "content": [{"type": "image", "image": PICTURE}]}]},
            "chat/bad-messages",
        ),
        ({"messages": 7}, "chat/bad-messages"),
        ({"messages": []}, "request/empty-prompt"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image/no-source"),
        ({"prompt": 7}, "request/bad-prompt"),
        ({"prompt": ""}, "request/empty-prompt"),
    ],
)
def test_refused(given: dict[str, Any], id: str) -> None:
    assert refused(**given).id.startswith(id)


def test_placeholders_are_counted_before_images_are_read() -> None:
    """A wrong count costs nothing: the files need not even exist."""
    images = ["no such file", "nor this"]
    assert refused(token_ids=[IMAGE], images=images).id == "image/placeholders"


def test_the_whole_prompt_must_fit() -> None:
    """With all tokens of its images; the message says how many these are."""
    assert len(read(prompt="a" * 40, images=[PICTURE]).token_ids) == 48
    error = refused(prompt="a" * 41, images=[PICTURE])
    assert error.id == "request/prompt-too-long"
    assert "the prompt has 49 tokens, 6 of them for images" in str(error)
    assert "--max-input-len" in str(error)
    longer = reader(max_input_len=63)
    assert "at most 63 can be prompt" in str(refused(prompt="a" * 56, images=[PICTURE], on=longer))


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": "a", "images": [PICTURE]},
        {"token_ids": [IMAGE], "images": ["cat.png"]},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"}]}]},
    ],
)
def test_a_bundle_for_text(given: dict[str, Any]) -> None:
    error = refused(**given, on=reader(None))
    assert error.id == "request/no-vision"
    assert "--components all" in str(error)


def test_a_bundle_for_text_has_no_placeholders() -> None:
    """There the token is one like any other."""
    assert read(token_ids=[97, IMAGE], on=reader(None)).token_ids.tolist() == [97, IMAGE]
