"""Tokenizing against transformers, and streams of text against decoding all at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from edgecc.backends.runtime import Tokenizer
from edgecc.errors import BundleError, RequestError

DATA = Path(__file__).parents[1] / "data"
PAIR = DATA / "pairs" / "tiny-qwen3-nvfp4"
TOKENIZER = Tokenizer.from_directory(PAIR)
CASES = json.loads((DATA / "runtime" / "tokenizer_cases.json").read_text(encoding="utf-8"))["cases"]

# Ids without a token (4095) are among the drawn ones: a model can choose what a tokenizer lacks.
ANY_IDS = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 4095), st.integers(4090, 4095)))


def pieces_of(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> list[str]:
    """The text of ids that arrive in groups of the given sizes, then one by one."""
    stream = tokenizer.stream(skip_special_tokens=skip)
    pieces, place = [], 0
    for size in [*cuts, *[1] * len(ids)]:
        pieces.append(stream.push(ids[place : place + size]))
        place += size
    return [*pieces, stream.finish()]


def byte_fallback_tokenizer() -> Tokenizer:
    """A vocabulary in SentencePiece's manner: metaspaces, and bytes for what it lacks."""
    words = ["<unk>", "<s>", "\u2581", "\u2581the", "\u2581a", "b", "ing", ".", "\u00e9"]
    vocabulary = {token: id_ for id_, token in enumerate(words)}
    vocabulary |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


WINDOWED = byte_fallback_tokenizer()


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case["text"])[:20])
def test_equals_the_reference(case: dict[str, object]) -> None:
    ids = TOKENIZER.encode(str(case["text"]))
    assert ids == case["ids"]
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == case["decoded"]
    assert TOKENIZER.decode(ids) == case["without_specials"]


@given(ids=ANY_IDS, cuts=st.lists(st.integers(0, 9)), skip=st.booleans())
@example(ids=[172, 253, 239, 102, 162, 245, 98, 162], cuts=[1, 1, 2], skip=True)
def test_pieces_of_a_stream_join_to_the_whole_text(
    ids: list[int], cuts: list[int], skip: bool
) -> None:
    pieces = pieces_of(TOKENIZER, ids, cuts, skip)
    assert "".join(pieces) == TOKENIZER.decode(ids, skip_special_tokens=skip)


@given(text=st.text(st.characters(codec="utf-8")), cuts=st.lists(st.integers(0, 9)))
def test_no_piece_of_proper_text_has_half_a_character(text: str, cuts: list[int]) -> None:
    text = text.replace("\N{REPLACEMENT CHARACTER}", "")
    pieces = pieces_of(TOKENIZER, TOKENIZER.encode(text), cuts, skip=False)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert pieces[-1] == ""


def test_added_tokens_read_as_they_are_written() -> None:
    backend = tokenizers.Tokenizer.from_file(str(PAIR / "tokenizer.json"))
    backend.add_tokens(["<a b>", "\u65e5\u672c", "<plain>"])
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("x<a b>\u65e5\u672c<plain>")
    assert ids[1:] == [4095, 4096, 4097]
    assert "".join(pieces_of(tokenizer, ids, [], skip=True)) == "x<a b>\u65e5\u672c<plain>"


def test_a_piece_comes_as_soon_as_its_characters_are_complete() -> None:
    stream = TOKENIZER.stream()
    ids = TOKENIZER.encode("\u65e5!")
    assert len(ids) == 4
    assert [stream.push([id_]) for id_ in ids] == ["", "", "\u65e5", "!"]


def test_an_unfinished_character_ends_as_a_replacement() -> None:
    ids = TOKENIZER.encode("a\u65e5")[:-1]
    stream = TOKENIZER.stream()
    assert stream.push(ids) == "a"
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}" == TOKENIZER.decode(ids)[1:]


@given(ids=st.lists(st.integers(0, 300)), cuts=st.lists(st.integers(0, 9)), skip=st.booleans())
def test_streams_of_other_decoders_join_to_the_whole_text(
    ids: list[int], cuts: list[int], skip: bool
) -> None:
    pieces = pieces_of(WINDOWED, ids, cuts, skip)
    assert "".join(pieces) == WINDOWED.decode(ids, skip_special_tokens=skip)


@given(text=st.text(alphabet="the ab.\u00e9\u65e5\U0001f642"))
def test_other_decoders_hold_back_half_characters(text: str) -> None:
    pieces = pieces_of(WINDOWED, WINDOWED.encode(text), [], skip=True)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_other_decoders_look_back_at_a_few_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    decode = Tokenizer.decode

    def counting(self: Tokenizer, token_ids: Sequence[int], **options: bool) -> str:
        lengths.append(len(token_ids))
        return decode(self, token_ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    pieces_of(WINDOWED, WINDOWED.encode("the a b" * 50), [], skip=True)
    assert len(lengths) > 300
    assert max(lengths) < 10


def test_a_lone_surrogate_is_no_text() -> None:
    with pytest.raises(RequestError, match="character 2") as caught:
        TOKENIZER.encode("ab\ud800")
    assert caught.value.id == "request/not-unicode"


def test_ids_and_what_an_embedding_lacks() -> None:
    assert TOKENIZER.num_ids == 4095
    assert TOKENIZER.special_ids == {4092, 4093, 4094}
    assert TOKENIZER.tokens_beyond(4095) == []
    assert TOKENIZER.tokens_beyond(4093) == [(4093, "<|im_start|>"), (4094, "<|im_end|>")]


def test_special_tokens_can_be_split_as_the_config_asks(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((PAIR / "tokenizer.json").read_bytes())
    assert Tokenizer.from_directory(tmp_path).encode("<|im_end|>") == [4094]
    config = {"split_special_tokens": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    split = Tokenizer.from_directory(tmp_path)
    ids = split.encode("<|im_end|>")
    assert 4094 not in ids
    assert split.decode(ids) == "<|im_end|>"


def test_truncation_and_padding_of_the_file_are_not_applied() -> None:
    backend = tokenizers.Tokenizer.from_file(str(PAIR / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    assert Tokenizer(backend).encode("a b c d") == TOKENIZER.encode("a b c d")
    assert len(TOKENIZER.encode("a b c d")) == 4


@pytest.mark.parametrize(
    ("content", "identifier"),
    [
        (None, "tokenizer/unreadable"),
        (b"\xff\xff", "tokenizer/unreadable"),
        (b"{}", "tokenizer/malformed"),
        (b'{"version": "1.0", "model": {"type": "Unheard"}}', "tokenizer/malformed"),
    ],
)
def test_files_that_are_no_tokenizer(
    tmp_path: Path, content: bytes | None, identifier: str
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BundleError, match=r"tokenizer\.json") as caught:
        Tokenizer.from_directory(tmp_path)
    assert caught.value.id == identifier


@pytest.mark.parametrize("content", ["[1]", "{", "\x00"])
def test_a_config_that_is_no_object(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((PAIR / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(BundleError, match=r"tokenizer_config\.json") as caught:
        Tokenizer.from_directory(tmp_path)
    assert caught.value.id == "tokenizer/malformed-config"
