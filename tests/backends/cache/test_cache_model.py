"""The cache against a dictionary in the order of use."""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edgecc.backends.cache import CacheKey
from helpers.cache_entries import Bench, key

LIMIT = 20_000
KEYS = [
    key(),
    key(name="draft"),
    key(device="sm89"),
    key(builder_version="1.7.2"),
    key(flags={}),
    key(weights={}),
]


class CacheModel(RuleBasedStateMachine):
    """Every step on a cache, and on what it ought to hold."""

    keys = st.sampled_from(KEYS)
    contents = st.builds(lambda size, fill: bytes([fill]) * size, st.integers(0, 4000), st.just(7))

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.bench = Bench(self.root, max_bytes=LIMIT)
        self.model: OrderedDict[CacheKey, bytes] = OrderedDict()

    def evict(self, limit: int) -> list[CacheKey]:
        """Remove from the model what is too much, before the cache does it."""
        sizes = self.sizes
        gone = []
        while self.model and sum(sizes[k] for k in self.model) > limit:
            gone.append(self.model.popitem(last=False)[0])
        return gone

    @property
    def sizes(self) -> dict[CacheKey, int]:
        """Size of each entry: its content and its key, as written once."""
        return {k: len(content) + self.overhead(k, content) for k, content in self.model.items()}

    def overhead(self, key: CacheKey, content: bytes) -> int:
        """Bytes of `key.json`, measured in a cache of its own."""
        found = _OVERHEAD.get((key, len(content)))
        if found is None:
            with tempfile.TemporaryDirectory() as folder:
                bench = Bench(Path(folder))
                bench.put(key, content)
                path = bench.root / "cache" / key.digest / "key.json"
                found = _OVERHEAD[key, len(content)] = path.stat().st_size
        return found

    @rule(key=keys, content=contents)
    def put(self, key: CacheKey, content: bytes) -> None:
        assert self.bench.put(key, content)
        self.model.setdefault(key, content)
        self.model.move_to_end(key)
        self.evict(LIMIT)

    @rule(key=keys)
    def put_too_large(self, key: CacheKey) -> None:
        assert not self.bench.put(key, bytes(LIMIT + 1))
        assert self.bench.ids() == ["cache/too-large"]
        self.bench.reported.clear()

    @rule(key=keys)
    def get(self, key: CacheKey) -> None:
        assert self.bench.get(key) == self.model.get(key)
        if key in self.model:
            self.model.move_to_end(key)

    @rule(limit=st.integers(0, LIMIT))
    def prune(self, limit: int) -> None:
        done = self.bench.store.prune(max_bytes=limit)
        assert [entry.key for entry in done.removed] == self.evict(limit)
        assert (done.kept, done.kept_bytes) == (len(self.model), sum(self.sizes.values()))

    @rule()
    def prune_all(self) -> None:
        assert self.bench.store.prune(max_bytes=0, everything=True).kept == 0
        self.model.clear()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.model)))
        path = self.root / "cache" / key.digest / "files" / "engine.plan"
        path.write_bytes(b"\0" + path.read_bytes()[1:] if self.model[key] else b"x")
        assert self.bench.get(key) is None
        assert self.bench.ids() == ["cache/damaged"]
        self.bench.reported.clear()
        del self.model[key]

    @invariant()
    def holds_what_it_should(self) -> None:
        found = self.bench.store.scan()
        assert [item.entry and item.entry.key for item in found] == list(self.model)
        assert {item.entry.key: item.bytes for item in found if item.entry} == self.sizes
        assert sum(item.bytes for item in found) <= LIMIT
        assert self.bench.reported == []

    def teardown(self) -> None:
        shutil.rmtree(self.root)


_OVERHEAD: dict[tuple[CacheKey, int], int] = {}

TestCacheModel = CacheModel.TestCase
TestCacheModel.settings = settings(stateful_step_count=20)  # each step waits for the disk
