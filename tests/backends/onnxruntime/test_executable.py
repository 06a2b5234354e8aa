"""Plans, capacity and checks of a call, against the interpreter with caches of its own."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgecc.backends.interface import Port
from edgecc.backends.onnxruntime import OrtEngine
from edgecc.backends.onnxruntime.executable import CACHED_ROWS, MAX_PLANS, allocate
from edgecc.errors import BackendError, EdgeccError, RequestError
from edgecc.roles import Role
from helpers.lowered_pairs import (
    FORMS,
    Array,
    LoweredPair,
    Reference,
    draft_inputs,
    target_inputs,
    write_pair,
)

CAPACITY = 40
VOCAB = 270
TARGET_OUTPUTS = (Role.LOGITS, Role.HIDDEN_TAP)
DRAFT_OUTPUTS = (Role.PROPOSALS, Role.BASE_LOGITS, Role.DRAFT_LOGITS, Role.CONFIDENCE)


@pytest.fixture(scope="module", params=FORMS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoweredPair:
    device, form = FORMS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    target, draft = write_pair(folder, layers=2, hidden=32, vocab=VOCAB, intermediate=48)
    out = folder / "out"
    return LoweredPair(out, target, draft, device=device, form=form, max_model_len=CAPACITY)


@pytest.fixture(scope="module")
def shared(pair: LoweredPair) -> Iterator[OrtEngine]:
    opened = pair.engine()
    yield opened
    opened.close()


@pytest.fixture
def engine(pair: LoweredPair) -> Iterator[OrtEngine]:
    opened = pair.engine()
    yield opened
    opened.close()


class Counting:
    """A session that counts what is done with it."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.runs = 0
        self.bindings = 0

    def io_binding(self) -> Any:
        self.bindings += 1
        return self.session.io_binding()

    def run_with_iobinding(self, binding: Any) -> None:
        self.runs += 1
        self.session.run_with_iobinding(binding)


@pytest.fixture
def counters(engine: OrtEngine) -> dict[str, Counting]:
    counting = {name: Counting(session) for name, session in engine._sessions.items()}
    engine._sessions.update(counting)  # type: ignore[arg-type]
    return counting


def runs(counters: dict[str, Counting]) -> dict[str, int]:
    return {name: counter.runs for name, counter in counters.items() if counter.runs}


def assert_near(found: Array, expected: Array, tolerance: float) -> None:
    assert found.shape == expected.shape
    if expected.dtype.kind == "i":
        np.testing.assert_array_equal(found, expected)
    else:
        scale = float(np.abs(expected).max())
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)


# A call: rows, how far to step back first, which rows get logits (as fractions), wanted outputs.
target_calls = st.lists(
    st.tuples(
        st.integers(1, 9),
        st.integers(0, 6),
        st.lists(st.floats(0, 0.999), min_size=1, max_size=4),
        st.lists(st.sampled_from(TARGET_OUTPUTS), unique=True),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=12)
@given(calls=target_calls, seed=st.integers(0, 99))
def test_any_sequence_of_target_calls(
    calls: list[tuple[int, int, list[float], list[Role]]],
    seed: int,
    pair: LoweredPair,
    shared: OrtEngine,
) -> None:
    """One engine serves all examples: what earlier ones left in its caches must not matter."""
    random, length = np.random.default_rng(seed), 0
    reference, target = Reference(pair.reference, "target"), shared.entry("target")
    for rows, back, fractions, outputs in calls:
        start = max(0, length - back)
        if start + rows > CAPACITY:
            break
        wanted = [int(f * rows) for f in fractions]
        inputs = target_inputs(random.integers(0, VOCAB, rows), start, wanted)
        expected = reference.run(inputs)
        found = target.run(inputs, outputs)
        assert found.keys() == set(outputs)
        for role in outputs:
            assert_near(found[role], expected[role], pair.tolerance)
        length = start + rows


draft_calls = st.lists(
    st.tuples(
        st.integers(1, 8),
        st.integers(0, 3),
        st.lists(st.sampled_from(DRAFT_OUTPUTS[1:]), unique=True),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=8)
@given(calls=draft_calls, seed=st.integers(0, 99))
def test_any_sequence_of_draft_calls(
    calls: list[tuple[int, int, list[Role]]], seed: int, pair: LoweredPair, shared: OrtEngine
) -> None:
    random, length = np.random.default_rng(seed), 0
    reference, draft = Reference(pair.reference, "draft"), shared.entry("draft")
    for rows, back, outputs in calls:
        start = max(0, length - back)
        features = random.standard_normal((rows, 64)).astype(np.float32)
        inputs = draft_inputs(features, int(random.integers(VOCAB)), start)
        expected = reference.run(inputs)
        found = draft.run(inputs, [*outputs, Role.PROPOSALS])
        if not np.array_equal(found[Role.PROPOSALS], expected[Role.PROPOSALS]):
            # A near tie: later slots then continue from another token, and nothing can be compared.
            length = start + rows
            continue
        for role in outputs:
            assert_near(found[role], expected[role], pair.tolerance)
        length = start + rows


def test_proposals_are_the_interpreters(pair: LoweredPair, shared: OrtEngine) -> None:
    """Most of twenty rounds; int8-split and near ties may differ in a few."""
    random = np.random.default_rng(8)
    reference, draft = Reference(pair.reference, "draft"), shared.entry("draft")
    equal = 0
    for start in range(20):
        inputs = draft_inputs(random.standard_normal((1, 64)), int(random.integers(VOCAB)), start)
        expected = reference.run(inputs)[Role.PROPOSALS]
        equal += bool(np.array_equal(draft.run(inputs, [Role.PROPOSALS])[Role.PROPOSALS], expected))
    assert equal >= 18


def test_a_plan_is_made_once_per_shape_and_outputs(
    pair: LoweredPair, engine: OrtEngine, counters: dict[str, Counting]
) -> None:
    target, reference = engine.entry("target"), Reference(pair.reference, "target")
    for start, seed in ((0, 1), (3, 2), (6, 3), (2, 4)):
        inputs = target_inputs(np.random.default_rng(seed).integers(0, VOCAB, 3), start)
        expected = reference.run(inputs)
        found = target.run(inputs, TARGET_OUTPUTS)
        for role in TARGET_OUTPUTS:
            assert_near(found[role], expected[role], pair.tolerance)
    assert {n: (c.runs, c.bindings) for n, c in counters.items() if c.runs} == {
        "target.body": (4, 1),
        "lm_head": (4, 1),
    }
    target.run(target_inputs([1, 2], 0), TARGET_OUTPUTS)
    target.run(target_inputs([1, 2, 3], 0), [Role.LOGITS])
    target.run(target_inputs([1, 2, 3], 0, [1]), TARGET_OUTPUTS)
    assert counters["target.body"].bindings == 4
    target.run(target_inputs([1, 2, 3], 0), [*reversed(TARGET_OUTPUTS)])
    assert counters["target.body"].bindings == 4
    # A single row is padded to two: the same buffers, and other logits rows than two real rows.
    target.run(target_inputs([1], 0), [Role.LOGITS])
    target.run(target_inputs([1, 2], 0, [1]), [Role.LOGITS])
    assert counters["target.body"].bindings == 5


def test_the_head_runs_only_for_logits(
    pair: LoweredPair, engine: OrtEngine, counters: dict[str, Counting]
) -> None:
    """Prefill asks for nothing, or for features: the head is most of a small model's work."""
    target, reference = engine.entry("target"), Reference(pair.reference, "target")
    ids = np.random.default_rng(0).integers(0, VOCAB, 12).tolist()
    reference.run(target_inputs(ids[:8], 0))
    assert target.run(target_inputs(ids[:5], 0, [0]), []) == {}
    assert runs(counters) == {"target.body": 1}
    taps = target.run(target_inputs(ids[5:8], 5, [0]), [Role.HIDDEN_TAP])
    assert runs(counters) == {"target.body": 2}
    assert taps.keys() == {Role.HIDDEN_TAP}
    inputs = target_inputs(ids[8:], 8)
    expected = reference.run(inputs)[Role.LOGITS]
    found = target.run(inputs, [Role.LOGITS])[Role.LOGITS]
    assert_near(found, expected, pair.tolerance)
    assert runs(counters) == {"target.body": 3, "lm_head": 1}


def test_draft_calls_for_caches_run_its_body_alone(
    pair: LoweredPair, engine: OrtEngine, counters: dict[str, Counting]
) -> None:
    draft, reference = engine.entry("draft"), Reference(pair.reference, "draft")
    features = np.random.default_rng(1).standard_normal((9, 64)).astype(np.float32)
    assert draft.run(draft_inputs(features[:6], 3, 0), []) == {}
    assert runs(counters) == {"draft.body": 1}
    reference.run(draft_inputs(features[:6], 3, 0))
    inputs = draft_inputs(features[6:], 4, 6)
    expected = reference.run(inputs)
    found = draft.run(inputs, [Role.BASE_LOGITS])
    assert runs(counters) == {"draft.body": 2, "lm_head": 1}
    assert_near(found[Role.BASE_LOGITS], expected[Role.BASE_LOGITS], pair.tolerance)
    draft.run(inputs, [Role.PROPOSALS])
    assert runs(counters) == {"draft.body": 3, "lm_head": 2, "draft.tail": 1}


def test_outputs_outlive_their_plans(engine: OrtEngine, counters: dict[str, Counting]) -> None:
    """A caller may hold an array while its plan is thrown away: its memory must not be freed."""
    target = engine.entry("target")
    held = target.run(target_inputs(range(20), 0), TARGET_OUTPUTS)
    copies = {role: array.copy() for role, array in held.items()}
    shapes = [(rows, count) for rows in range(1, 10) for count in range(1, 6)]
    assert len(shapes) > MAX_PLANS
    for rows, count in shapes:
        target.run(target_inputs(range(rows), 0, [0] * count), TARGET_OUTPUTS)
    gc.collect()
    junk = [np.full(array.shape, np.nan, np.float32) for array in held.values() for _ in range(20)]
    assert all(np.array_equal(held[role], copies[role]) for role in held)
    before = counters["target.body"].bindings
    target.run(target_inputs(range(20), 0), TARGET_OUTPUTS)
    assert counters["target.body"].bindings == before + 1, "the plan was not thrown away"
    del junk


def test_plans_of_many_rows_are_not_kept(tmp_path: Path) -> None:
    target_path, _ = write_pair(tmp_path, layers=1, hidden=32, vocab=VOCAB)
    lowered = LoweredPair(tmp_path / "out", target_path, max_model_len=256)
    engine = lowered.engine()
    counting = {name: Counting(session) for name, session in engine._sessions.items()}
    engine._sessions.update(counting)  # type: ignore[arg-type]
    target, reference = engine.entry("target"), Reference(lowered.reference, "target")
    held = []
    for rows in (CACHED_ROWS, CACHED_ROWS + 1):
        for _ in range(2):
            inputs = target_inputs(np.arange(rows) % VOCAB, 0, [rows - 1])
            held.append((target.run(inputs, [Role.LOGITS])[Role.LOGITS], reference.run(inputs)))
    assert counting["target"].bindings == 3
    gc.collect()
    junk = [np.full((1, 1, VOCAB), np.nan, np.float32) for _ in range(50)]
    for found, expected in held:
        assert_near(found, expected[Role.LOGITS], 2e-5)
    del junk


def test_capacity_is_what_the_runtime_may_fill(pair: LoweredPair, shared: OrtEngine) -> None:
    assert shared.entry("target").capacity == CAPACITY
    assert shared.entry("draft").capacity == CAPACITY + 4


def test_the_last_row_of_the_caches(pair: LoweredPair, engine: OrtEngine) -> None:
    """A single row is padded to two: the caches have a row for that."""
    target, reference = engine.entry("target"), Reference(pair.reference, "target")
    ids = np.random.default_rng(3).integers(0, VOCAB, CAPACITY).tolist()
    for start, end in ((0, CAPACITY - 1), (CAPACITY - 1, CAPACITY), (CAPACITY - 2, CAPACITY)):
        inputs = target_inputs(ids[start:end], start)
        expected = reference.run(inputs)
        found = target.run(inputs, TARGET_OUTPUTS)
        for role in TARGET_OUTPUTS:
            assert_near(found[role], expected[role], pair.tolerance)


@pytest.mark.parametrize(("start", "rows"), [(CAPACITY, 1), (CAPACITY - 1, 2), (0, 41), (-1, 2)])
def test_target_rows_beyond_the_capacity(
    start: int, rows: int, pair: LoweredPair, engine: OrtEngine
) -> None:
    """Refused before anything is written, and the engine goes on as if nothing had happened."""
    target, reference = engine.entry("target"), Reference(pair.reference, "target")
    first = target_inputs(range(6), 0)
    reference.run(first)
    target.run(first, [])
    with pytest.raises(RequestError) as caught:
        target.run(target_inputs(range(rows), start, [0]), [Role.LOGITS])
    assert caught.value.id == "run/cache-overflow"
    inputs = target_inputs([7, 8], 6)
    found = target.run(inputs, [Role.LOGITS])[Role.LOGITS]
    assert_near(found, reference.run(inputs)[Role.LOGITS], pair.tolerance)


@pytest.mark.parametrize(("start", "rows"), [(CAPACITY - 3, 4), (CAPACITY + 4, 1), (-1, 1)])
def test_draft_rows_beyond_the_capacity(
    start: int, rows: int, pair: LoweredPair, engine: OrtEngine
) -> None:
    """The block's own rows count as well: context may fill all but those."""
    draft, reference = engine.entry("draft"), Reference(pair.reference, "draft")
    random = np.random.default_rng(5)
    with pytest.raises(EdgeccError) as caught:
        draft.run(draft_inputs(random.standard_normal((rows, 64)), 3, start), [Role.PROPOSALS])
    assert caught.value.id in ("run/cache-overflow", "onnxruntime/run")
    features = random.standard_normal((CAPACITY, 64)).astype(np.float32)
    inputs = draft_inputs(features, 3, 0)
    found = draft.run(inputs, [Role.BASE_LOGITS])[Role.BASE_LOGITS]
    assert_near(found, reference.run(inputs)[Role.BASE_LOGITS], pair.tolerance)


def change(inputs: dict[Role, Array], role: Role, array: Array | None) -> dict[Role, Array]:
    changed = {r: a for r, a in inputs.items() if r is not role}
    return changed if array is None else {**changed, role: array}


BAD_TARGET_CALLS = {
    "missing input": (Role.CACHE_LENGTH, None, "run/inputs"),
    "unknown input": (Role.FEATURES, np.zeros((1, 3, 64), np.float32), "run/inputs"),
    "caches are the engine's": (Role.KV_CACHE, np.zeros((1, 2, 41, 32), np.float32), "run/inputs"),
    "ids of 32 bits": (Role.TOKEN_IDS, np.zeros((1, 3), np.int32), "run/dtype"),
    "ids as floats": (Role.TOKEN_IDS, np.full((1, 3), 1.7), "run/dtype"),
    "length as float": (Role.CACHE_LENGTH, np.zeros(1, np.float32), "run/dtype"),
    "ids without a batch axis": (Role.TOKEN_IDS, np.zeros(3, np.int64), "run/shape"),
    "two sequences": (Role.TOKEN_IDS, np.zeros((2, 3), np.int64), "run/shape"),
    "no rows": (Role.TOKEN_IDS, np.zeros((1, 0), np.int64), "run/shape"),
    "two lengths": (Role.CACHE_LENGTH, np.zeros(2, np.int64), "run/shape"),
    "scalar length": (Role.CACHE_LENGTH, np.array(0), "run/shape"),
    "no logit rows": (Role.LOGIT_ROWS, np.zeros(0, np.int64), "run/shape"),
    "logit row behind the last": (Role.LOGIT_ROWS, np.array([0, 3]), "run/logit-rows"),
    "negative logit row": (Role.LOGIT_ROWS, np.array([-1]), "run/logit-rows"),
}


@pytest.mark.parametrize("name", BAD_TARGET_CALLS)
def test_bad_target_calls(name: str, shared: OrtEngine) -> None:
    role, array, expected = BAD_TARGET_CALLS[name]
    inputs = change(target_inputs([1, 2, 3], 0), role, array)
    with pytest.raises(RequestError) as caught:
        shared.entry("target").run(inputs, [Role.LOGITS])
    (finding,) = caught.value.diagnostics
    assert finding.id == expected
    named = (role.value, "logit rows", "cache_length must have shape [2]")  # one for two sequences
    assert any(name in finding.message for name in named)


def test_padding_rows_cannot_be_asked_for(shared: OrtEngine) -> None:
    """A call of one row is computed as two; the second is nobody's."""
    with pytest.raises(RequestError) as caught:
        shared.entry("target").run(target_inputs([1], 0, [1]), [Role.LOGITS])
    assert caught.value.id == "run/logit-rows"


BAD_DRAFT_CALLS = {
    "features of other layers": (Role.FEATURES, np.zeros((1, 2, 63), np.float32), "run/shape"),
    "features of 64 bits": (Role.FEATURES, np.zeros((1, 2, 64)), "run/dtype"),
    "no features": (Role.FEATURES, np.zeros((1, 0, 64), np.float32), "run/shape"),
    "anchor of two axes": (Role.ANCHOR, np.zeros((1, 1), np.int64), "run/shape"),
    "no anchor": (Role.ANCHOR, None, "run/inputs"),
}


@pytest.mark.parametrize("name", BAD_DRAFT_CALLS)
def test_bad_draft_calls(name: str, shared: OrtEngine) -> None:
    role, array, expected = BAD_DRAFT_CALLS[name]
    inputs = change(draft_inputs(np.zeros((2, 64)), 3, 0), role, array)
    with pytest.raises(RequestError) as caught:
        shared.entry("draft").run(inputs, [Role.PROPOSALS])
    assert caught.value.id == expected


@pytest.mark.parametrize("role", [Role.PROPOSALS, Role.KV_CACHE, Role.TOKEN_IDS])
def test_unknown_outputs(role: Role, shared: OrtEngine) -> None:
    with pytest.raises(RequestError) as caught:
        shared.entry("target").run(target_inputs([1, 2], 0), [Role.LOGITS, role])
    (finding,) = caught.value.diagnostics
    assert finding.id == "run/outputs"
    assert role.value in finding.message
    assert finding.notes == ("it has hidden_tap, logits",)


def test_what_the_engine_itself_refuses(shared: OrtEngine) -> None:
    """Token ids are the caller's to check; the engine's own refusal still arrives as an error."""
    with pytest.raises(BackendError) as caught:
        shared.entry("target").run(target_inputs([1, VOCAB], 0), [Role.LOGITS])
    assert caught.value.id == "onnxruntime/run"


def test_inputs_are_not_changed_and_may_be_views(pair: LoweredPair, engine: OrtEngine) -> None:
    """Strided and read-only arrays are copied into the plan's buffers."""
    target, reference = engine.entry("target"), Reference(pair.reference, "target")
    ids = np.arange(24, dtype=np.int64)[None, ::3]
    ids.flags.writeable = False
    inputs = {**target_inputs(range(8), 0), Role.TOKEN_IDS: ids}
    for _ in range(2):
        found = target.run(inputs, [Role.LOGITS])[Role.LOGITS]
        expected = reference.run(inputs)[Role.LOGITS]
        assert_near(found, expected, pair.tolerance)
    assert ids.tolist() == [list(range(0, 24, 3))]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_caches_take_the_memory_of_rows_that_are_written() -> None:
    """A row of each head of one slot of 128 MB: pages of 4 KB, not of 2 MB."""
    shape = ("b", 16, 2048, 64)
    port = Port("k_cache", Role.KV_CACHE, np.dtype(np.float32), shape, "k_cache", None)
    before = resident_bytes()
    cache = allocate(port, 16)
    cache[3, :, 0] = 1
    assert resident_bytes() - before < 4 << 20
    assert cache.nbytes == 128 << 20
    assert cache.sum() == 16 * 64


def resident_bytes() -> int:
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
