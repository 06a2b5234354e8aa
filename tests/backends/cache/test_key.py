"""Keys: what makes two of them equal, and how a difference is told."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.cache import CacheKey, code_digest
from edgecc.backends.cache.key import differences
from edgecc.errors import InternalError
from helpers.cache_entries import key

FIELDS = [f.name for f in dataclasses.fields(CacheKey)]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
TABLES = st.dictionaries(TEXT, TEXT, max_size=2)
KEYS = st.builds(CacheKey, **{f: TABLES if f in ("weights", "flags") else TEXT for f in FIELDS})


def changed(name: str) -> CacheKey:
    value = getattr(key(), name)
    return key(**{name: {**value, "more": "x"} if isinstance(value, dict) else value + "x"})


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_counts(name: str) -> None:
    assert changed(name).digest != key().digest
    assert len(differences(key(), changed(name))) == 1


def test_order_does_not_count() -> None:
    weights = key().weights
    other = key(weights=dict(reversed(weights.items())))
    assert list(other.weights) != list(weights)
    assert (other, other.digest, hash(other)) == (key(), key().digest, hash(key()))


def test_digest_stays() -> None:
    """A changed digest makes all caches of all users useless: bump `VERSION` knowingly."""
    text = (
        '[1,{"builder":"tensorrt_rtx","builder_version":"1.7.1","device":"sm120",'
        f'"flags":{{"weights":"embed"}},"ir":"{"a" * 64}","kind":"engine",'
        f'"lowering":"{"b" * 64}","name":"target",'
        f'"weights":{{"target.head":"{"c" * 64}","target.norm":"{"d" * 64}"}}}}]'
    )
    assert key().digest == hashlib.sha256(text.encode()).hexdigest()


@given(KEYS, KEYS)
def test_digests_are_equal_as_keys_are(a: CacheKey, b: CacheKey) -> None:
    assert (a.digest == b.digest) is (a == b)
    assert (differences(a, b) == []) is (a == b)


@given(KEYS)
def test_keys_survive_json(a: CacheKey) -> None:
    b = CacheKey.from_json(json.loads(json.dumps(a.to_json())))
    assert (a, a.digest) == (b, b.digest)


@pytest.mark.parametrize(
    "change",
    [{"kind": 1}, {"name": None}, {"ir": "\ud800"}, {"flags": {"a": 1}}, {"flags": {1: "a"}},
     {"weights": {"\udc00": "a"}}, {"device": {"a": "b"}}],
    ids=str,
)  # fmt: skip
def test_only_text(change: dict[str, Any]) -> None:
    with pytest.raises(InternalError) as caught:
        key(**change)
    assert caught.value.id == "cache/bad-key"


@pytest.mark.parametrize(
    "value",
    [None, [], {}, "x", key().to_json() | {"more": ""}, key().to_json() | {"flags": []},
     key().to_json() | {"weights": None}, key().to_json() | {"kind": 1},
     key().to_json() | {"kind": {"a": "b"}}, key().to_json() | {"flags": {"a": []}}],
    ids=str,
)  # fmt: skip
def test_bad_json(value: object) -> None:
    with pytest.raises(ValueError, match=r"key|weights"):
        CacheKey.from_json(value)


def test_a_key_does_not_follow_its_arguments() -> None:
    flags = {"a": "1"}
    made = key(flags=flags)
    digest = made.digest
    flags["a"] = "2"
    assert made.digest == digest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"builder_version": "1.7.2"}, "builder version 1.7.1 -> 1.7.2"),
        ({"device": "sm89"}, "device sm120 -> sm89"),
        ({"flags": {"weights": "bind"}}, "flag weights embed -> bind"),
        ({"flags": {}}, "flag weights embed -> unset"),
        ({"ir": "0"}, "the graph changed"),
        ({"lowering": "0"}, "edgecc's lowering changed"),
        (
            {"weights": {"target.head": "0", "target.norm": "d" * 64}},
            "1 of 2 weights changed (target.head)",
        ),
        (
            {"weights": {f"w{i}": "0" for i in range(9)}},
            "11 of 11 weights changed (target.head, target.norm, w0, ...)",
        ),
        ({"builder": "\x1b[2J\n"}, "builder tensorrt_rtx -> '\\x1b[2J\\n'"),
        ({"builder": ""}, "builder tensorrt_rtx -> ''"),
        ({"builder": "x" * 99}, f"builder tensorrt_rtx -> {'x' * 57}..."),
    ],
)
def test_differences(change: dict[str, Any], words: str) -> None:
    assert differences(key(), key(**change)) == [words]


class TestCodeDigest:
    @pytest.fixture
    def package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        folder = tmp_path / "cache_probe"
        (folder / "below").mkdir(parents=True)
        for name in ("__init__.py", "a.py", "below/__init__.py", "below/b.py"):
            (folder / name).write_text(f"# {name}\n")
        monkeypatch.syspath_prepend(tmp_path)
        yield folder
        for name in [n for n in sys.modules if n.partition(".")[0] == "cache_probe"]:
            del sys.modules[name]

    def test_every_source_counts(self, package: Path) -> None:
        seen = {code_digest("cache_probe")}
        for path in sorted(package.rglob("*.py")):
            path.write_text(path.read_text() + "x = 1\n")
            seen.add(code_digest("cache_probe"))
        (package / "below" / "b.py").rename(package / "below" / "c.py")
        seen.add(code_digest("cache_probe"))
        assert len(seen) == 6

    def test_other_files_do_not_count(self, package: Path) -> None:
        before = code_digest("cache_probe")
        (package / "notes.txt").write_text("x")
        assert code_digest("cache_probe") == before

    def test_a_module_is_its_own_file(self, package: Path) -> None:
        before = code_digest("cache_probe.a")
        (package / "below" / "b.py").write_text("changed\n")
        assert code_digest("cache_probe.a") == before
        (package / "a.py").write_text("changed\n")
        assert code_digest("cache_probe.a") != before

    def test_the_code_is_not_run(self, package: Path) -> None:
        (package / "a.py").write_text("raise RuntimeError\n")
        assert code_digest("cache_probe.a")

    @pytest.mark.parametrize("name", ["sys", "cache_probe.missing", "no_such_package"])
    def test_no_source(self, package: Path, name: str) -> None:
        with pytest.raises(InternalError) as caught:
            code_digest(name)
        assert caught.value.id == "cache/no-source"
