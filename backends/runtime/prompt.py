"""What a caller gives as a prompt, to tokens and images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from edgecc.backends.base import IntArray
from edgecc.backends.runtime.chat import ChatTemplates, Message
from edgecc.backends.runtime.image_config import ImageConfig
from edgecc.backends.runtime.image_files import ImageSource, NamedImage
from edgecc.backends.runtime.image_messages import images_of, without_sources
from edgecc.backends.runtime.image_prompt import PromptImages, expand, in_front, placeholders
from edgecc.backends.runtime.images import PreparedImage, prepare
from edgecc.backends.runtime.model_info import ModelInfo
from edgecc.backends.runtime.request import check_length, check_prompt, check_token_ids
from edgecc.backends.runtime.tokenizer import Tokenizer
from edgecc.errors import RequestError

Images: TypeAlias = "Sequence[ImageSource | NamedImage | PreparedImage]"
"""Paths, bytes of files, Pillow images, or images that are prepared already."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt that a decoder can continue.

    Attributes:
        token_ids: i64 `[T]`; an image has a placeholder for each of its tokens.
        images: The images among them; None for text alone.
    """

    token_ids: IntArray
    images: PromptImages | None = None


class PromptReader:
    """Reads prompts for one model.

    Args:
        model: What the bundle says about it.
        tokenizer: Of the bundle, if it has one.
        chat: Its chat templates.
    """

    def __init__(self, model: ModelInfo, tokenizer: Tokenizer | None, chat: ChatTemplates) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._chat = chat

    @property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer.

        Raises:
            RequestError: The bundle has none.
        """
        if self._tokenizer is None:
            raise RequestError(
                "request/no-tokenizer",
                "the bundle has no tokenizer",
                help="pass token_ids instead of text",
            )
        return self._tokenizer

    def read(
        self,
        prompt: str | None,
        token_ids: Sequence[int] | IntArray | None,
        messages: Sequence[Message] | None,
        images: Images | None,
    ) -> Prompt:
        """Read what was given as exactly one of text, tokens and a chat, with its images.

        Images of a chat are parts of its messages. Text that has no placeholder has its images in
        front; text that has some, and tokens, have one for each image.

        Raises:
            RequestError: Not one was given, or it cannot be used.
            ResourceError: An image cannot be read.
            UnsupportedError: Pillow is not installed.
        """
        _check_one(prompt=prompt, token_ids=token_ids, messages=messages)
        is_text = prompt is not None
        given = _check_images(images, messages)
        if messages is not None:
            given = images_of(messages)
            self._image_config(given)
            prompt = self._chat.render(without_sources(messages) if given else messages)
        if prompt is not None:
            token_ids = self.tokenizer.encode(check_prompt(prompt))
        ids = token_ids if token_ids is not None else ()
        if is_text and given:
            ids = self._with_placeholders(ids, given)
        return self._with_images(check_token_ids(ids, self._model), given)

    def _image_config(self, given: Images) -> ImageConfig | None:
        """How images are read; None if the bundle reads none and none are there.

        Raises:
            RequestError: There are some.
        """
        config = self._model.images
        if config is None and given:
            raise RequestError(
                "request/no-vision",
                "the bundle reads text only, and there is an image",
                help="compile a target that has a vision tower, with --components all",
            )
        return config

    def _with_placeholders(
        self, token_ids: Sequence[int] | IntArray, given: Images
    ) -> Sequence[int] | IntArray:
        """Text without placeholders gets them in front."""
        config = self._image_config(given)
        if config is None or config.image_token_id in token_ids:
            return token_ids
        return in_front(token_ids, len(given), config)

    def _with_images(self, ids: IntArray, given: Images) -> Prompt:
        """The images take their places; there must be one for each placeholder."""
        config = self._image_config(given)
        if config is None:
            return Prompt(ids)
        placeholders(ids, len(given), config)  # before the work of reading them
        if not given:
            return Prompt(ids)
        pictures = prepare(given, config)
        expanded = expand(ids, [picture.grid for picture in pictures], config)
        tokens = sum(picture.tokens for picture in pictures)
        check_length(len(expanded.token_ids), self._model, image_tokens=tokens)
        return Prompt(expanded.token_ids, PromptImages(expanded, tuple(pictures)))


def _check_one(**given: object) -> None:
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise RequestError(
            "request/one-prompt",
            "give exactly one of prompt, token_ids and messages, not "
            + (" and ".join(names) or "none of them"),
        )


def _check_images(images: object, messages: object) -> Images:
    """Images beside a prompt.

    Raises:
        RequestError: They are no list, or there is a chat.
    """
    if images is None:
        return ()
    if not isinstance(images, list | tuple):
        raise RequestError(
            "request/bad-images",
            f"images are a list, not a {type(images).__name__}",
            help="for example images=['cat.png']",
        )
    if messages is not None:
        raise RequestError(
            "request/bad-images",
            "images of a chat are parts of its messages",
            help='for example {"role": "user", "content": [{"type": "image", "image": "cat.png"}, '
            '{"type": "text", "text": "What is this?"}]}',
        )
    return images
