"""How many ids have a token, from whatever the checkpoint says about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgecc.errors import InputError, Severity
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.config import read_text_config
from edgecc.frontends.vocabulary import count_tokens
from helpers.checkpoints import DROP, edit_json, write_target


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """288 rows, of which the tokenizer knows 259; stop tokens 256 and 258."""
    return write_target(tmp_path / "t", layers=1, quantized=False)


def count(path: Path) -> tuple[int, list[str]]:
    """Tokens, and what was found out on the way."""
    with Checkpoint.open(path, role="target") as checkpoint:
        found = count_tokens(checkpoint, read_text_config(checkpoint))
        return found, [f.id for f in checkpoint.findings]


def write(path: Path, **tokenizer: Any) -> Path:
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def without_stop_tokens(path: Path) -> Path:
    (path / "generation_config.json").unlink()
    edit_json(path / "config.json", eos_token_id=DROP, bos_token_id=DROP)
    return path


def test_a_byte_tokenizer(target: Path) -> None:
    assert count(target) == (259, [])


def test_no_tokenizer(target: Path) -> None:
    (target / "tokenizer.json").unlink()
    assert count(target) == (288, [])


def test_added_tokens_count(target: Path) -> None:
    edit_json(
        target / "tokenizer.json",
        added_tokens=[{"id": 270, "content": "<x>"}, {"id": 261, "content": "<y>"}],
    )
    assert count(target) == (271, [])


def test_a_vocabulary_that_is_a_list(target: Path) -> None:
    """Unigram models keep tokens and scores in the order of ids."""
    without_stop_tokens(target)
    vocab = [[f"t{i}", -1.5] for i in range(200)]
    assert count(write(target, model={"type": "Unigram", "vocab": vocab})) == (200, [])
    added = [{"id": 3, "content": "<s>"}]
    assert count(write(target, model={"vocab": vocab}, added_tokens=added)) == (200, [])


def test_stop_tokens_count_although_the_tokenizer_lacks_them(target: Path) -> None:
    """An id that ends texts must be choosable, or no text would end."""
    write(target, model={"vocab": {"a": 0, "b": 1}})
    assert count(target) == (259, [])


def test_ids_beyond_the_table_are_reported(target: Path) -> None:
    added = [{"id": 288, "content": "<beyond>"}, {"id": 300, "content": "<far>"}]
    edit_json(target / "tokenizer.json", added_tokens=added)
    with Checkpoint.open(target, role="target") as checkpoint:
        assert count_tokens(checkpoint, read_text_config(checkpoint)) == 259
        (finding,) = checkpoint.findings
    assert finding.id == "tokenizer/tokens-without-row"
    assert finding.severity is Severity.WARNING
    assert finding.message.startswith("2 tokens have no row in an embedding of 288 rows")
    assert finding.notes == ("'<beyond>' is 288", "'<far>' is 300")


def test_only_ids_beyond_the_table(target: Path) -> None:
    without_stop_tokens(target)
    found, findings = count(write(target, model={"vocab": {"a": 1000}}))
    assert found == 288
    assert findings == ["tokenizer/tokens-without-row"]


@pytest.mark.parametrize(
    "tokenizer",
    [{}, {"model": None}, {"model": {}}, {"model": {"vocab": {}}}, {"model": {"vocab": "x"}}],
    ids=str,
)
def test_a_tokenizer_without_vocabulary_limits_nothing(
    target: Path, tokenizer: dict[str, Any]
) -> None:
    assert count(write(target, **tokenizer)) == (288, [])


@pytest.mark.parametrize("bad", [-1, 1.5, True, "7", None, 2**31, [1]], ids=str)
@pytest.mark.parametrize("place", ["vocab", "added"])
def test_no_id(target: Path, place: str, bad: object) -> None:
    if place == "vocab":
        write(target, model={"vocab": {"a": 0, "b": bad}})
    else:
        write(target, model={"vocab": {"a": 0}}, added_tokens=[{"id": bad, "content": "b"}])
    with pytest.raises(InputError, match="is not a token id") as caught:
        count(target)
    assert caught.value.id == "tokenizer/bad-id"
    assert caught.value.diagnostics[0].where == "target/tokenizer.json"


@pytest.mark.parametrize("text", ["", "[]", "nonsense", '{"a": 1, "a": 2}', "\x00"])
def test_no_json(target: Path, text: str) -> None:
    (target / "tokenizer.json").write_text(text)
    with pytest.raises(InputError) as caught:
        count(target)
    assert caught.value.id == "checkpoint/bad-json"
    assert caught.value.diagnostics[0].where == "target/tokenizer.json"
