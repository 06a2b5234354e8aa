"""Text to token ids and back, with the bundle's own `tokenizer.json`.

Text is decoded as tokens arrive. One character may be spread over several tokens, so a piece of
text is handed out only when its characters are complete; the pieces joined are exactly what
decoding all tokens at once gives.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from edgecc.errors import BundleError, RequestError, UnsupportedError


class Tokenizer:
    """The tokenizer of a bundle.

    Args:
        backend: The loaded tokenizer.
        split_special_tokens: Encode special tokens that a text names as ordinary text.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, split_special_tokens: bool = False
    ) -> None:
        # Some files carry the padding and truncation of their training runs.
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = split_special_tokens
        self._backend = backend
        self._special_ids = frozenset(
            id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._bytes: dict[int, bytes] | None = {} if _joins_bytes(backend) else None

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Load `tokenizer.json`, and what `tokenizer_config.json` says about special tokens.

        Raises:
            BundleError: The file is missing or is not a tokenizer.
        """
        path = directory / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(
                "tokenizer/unreadable",
                f"cannot read the tokenizer: {error}",
                where=str(path),
                help="compile the bundle again from a checkpoint that has a tokenizer.json",
            ) from error
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise BundleError(
                "tokenizer/malformed",
                f"not a tokenizer that the tokenizers library {tokenizers.__version__} reads: "
                f"{error}",
                where=str(path),
            ) from error
        config = read_config(directory)
        return cls(backend, split_special_tokens=config.get("split_special_tokens") is True)

    @property
    def num_ids(self) -> int:
        """One more than the highest token id: the rows an embedding needs for this tokenizer."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens: they end or frame texts and are not part of them."""
        return self._special_ids

    def tokens_beyond(self, rows: int) -> list[tuple[int, str]]:
        """Tokens that an embedding of so many rows has no row for: (id, token), by id."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return sorted((id_, token) for token, id_ in vocabulary.items() if id_ >= rows)

    def with_special_token(self, token: str) -> tuple[str, int]:
        """The tokenizer with one more special token, as JSON, and that token's id.

        Raises:
            UnsupportedError: There is no id for one more.
        """
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False)])
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if list(vocabulary.values()).count(vocabulary[token]) > 1:
            raise UnsupportedError(
                "tokenizer/no-free-id", "the vocabulary has gaps where a new token would go"
            )
        return backend.to_str(), vocabulary[token]

    def encode(self, text: str) -> list[int]:
        """The token ids of a text.

        Special tokens that the text names become their ids; none are added around it.

        Raises:
            RequestError: The text has half surrogate pairs, so it is no Unicode text.
        """
        return list(self._backend.encode(unicode_text(text), add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens. Bytes that are no UTF-8 become U+FFFD; unknown ids are left out."""
        ids = list(token_ids)
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def stream(self, *, skip_special_tokens: bool = True) -> DetokenizerStream:
        """A decoder for tokens that arrive one after another."""
        if self._bytes is None:
            return _WindowStream(self, skip_special_tokens)
        return _ByteStream(self, self._bytes, skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it; None for an unknown id."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for in a byte-level vocabulary; none for an unknown id."""
        token = self.token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:  # an added token, which is stored as it reads
            return token.encode()


def unicode_text(text: str, where: str = "") -> str:
    """The same text, which has no half surrogate pairs.

    Args:
        text: Of a request.
        where: What messages call it.

    Raises:
        RequestError: It has some, so it is no Unicode text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            "request/not-unicode",
            f"the text has half of a surrogate pair at character {error.start}",
            where=where,
            help="decode the text as UTF-8 before passing it",
        ) from error
    return text


class DetokenizerStream(ABC):
    """Turns tokens into text as they come, in whole characters."""

    @abstractmethod
    def push(self, token_ids: Iterable[int]) -> str:
        """Take more tokens; returns the text that is complete now, possibly none."""

    @abstractmethod
    def finish(self) -> str:
        """The rest: U+FFFD for bytes of a character that was never completed."""


class _ByteStream(DetokenizerStream):
    """For byte-level vocabularies: each token is a fixed string of bytes, whatever its place."""

    def __init__(self, tokenizer: Tokenizer, table: dict[int, bytes], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._table = table
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        table, skipped = self._table, self._skipped
        data = bytearray()
        for token_id in token_ids:
            if token_id in skipped:
                continue
            piece = table.get(token_id)
            if piece is None:
                piece = table[token_id] = self._tokenizer.token_bytes(token_id)
            data += piece
        return self._utf8.decode(bytes(data))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream(DetokenizerStream):
    """For all other decoders: decode a window of recent tokens again with each new one.

    A token's text can depend on the token before it (a space at the start of a text is dropped), so
    the window keeps tokens whose text is already out, and what is new is what follows that text.
    A run of byte tokens is decoded as a whole, all of it failing together, so it waits for its end.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window: list[int] = []
        self._known = 0

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(self._push(token_id) for token_id in token_ids)

    def _push(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        if token is None or (self._skip_special and token_id in self._tokenizer.special_ids):
            return ""
        self._window.append(token_id)
        text = self._text(self._window)
        if text.endswith("\N{REPLACEMENT CHARACTER}") or _BYTE_TOKEN.fullmatch(token):
            return ""
        new = text[len(self._text(self._window[: self._known])) :]
        if new:
            self._window = self._window[self._known :]
            self._known = len(self._window)
        return new

    def finish(self) -> str:
        return self._text(self._window)[len(self._text(self._window[: self._known])) :]

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)


def read_config(directory: Path, name: str = "tokenizer_config.json") -> dict[str, Any]:
    """A JSON object beside the tokenizer, or nothing if there is no such file.

    Raises:
        BundleError: The file is not a JSON object.
    """
    path = directory / name
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(
            "tokenizer/malformed-config", f"cannot be read as JSON: {error}", where=str(path)
        ) from error
    if not isinstance(config, dict):
        raise BundleError("tokenizer/malformed-config", "expected a JSON object", where=str(path))
    return config


def _joins_bytes(backend: tokenizers.Tokenizer) -> bool:
    """Whether decoding joins the bytes of tokens and does nothing else."""
    if backend.decoder is None:
        return False
    decoder = json.loads(backend.decoder.__getstate__())
    while decoder["type"] == "Sequence" and len(decoder["decoders"]) == 1:
        (decoder,) = decoder["decoders"]
    return bool(decoder["type"] == "ByteLevel")


def _byte_of_character() -> dict[str, int]:
    """How byte-level vocabularies write bytes (GPT-2): Latin-1 where it prints, then U+0100 on."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in prints}
    others = [byte for byte in range(0x100) if byte not in set(prints)]
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return table


_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")

_BYTE_OF_CHARACTER = _byte_of_character()
