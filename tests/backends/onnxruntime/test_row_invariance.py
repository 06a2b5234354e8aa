"""The bits of a row do not depend on how many rows are computed together, nor on threads.

This is what makes speculative decoding write exactly the text plain decoding writes: verification
runs many rows at once, plain steps one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgecc.backends.onnxruntime import OrtEngine
from edgecc.ir import sym
from edgecc.ir.ops.norm import AddRmsNormAttributes
from edgecc.roles import Role
from helpers.lowered_pairs import (
    FORMS,
    REAL_DRAFT,
    REAL_TARGET,
    Array,
    LoweredPair,
    draft_inputs,
    target_inputs,
    write_pair,
)
from helpers.lowering import GraphBuilder, lowered

ROWS = 72
VOCAB = 288
BLOCK_OUTPUTS = (Role.PROPOSALS, Role.BASE_LOGITS, Role.DRAFT_LOGITS, Role.CONFIDENCE)
SIZES = {
    # Odd widths, one query head per KV head.
    "synthetic": {"hidden": 80, "heads": 3, "kv_heads": 3, "head_dim": 32, "intermediate": 112},
    # Heads that the fused attention op does not take.
    "narrow": {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 24},
}
PAIRS = [
    *((name, form) for name in ("real", "synthetic") for form in FORMS),
    ("narrow", "cpu-dense"),
]


@pytest.fixture(scope="module", params=PAIRS, ids=" ".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoweredPair:
    name, form = request.param
    folder = tmp_path_factory.mktemp(f"{name}-{form}")
    device, linear = FORMS[form]
    target, draft = REAL_TARGET, REAL_DRAFT
    if name != "real":
        target, draft = write_pair(folder, layers=3, **SIZES[name])
    return LoweredPair(folder / "out", target, draft, device=device, form=linear)


@pytest.fixture(scope="module", params=[1, 2], ids=["1 thread", "2 threads"])
def engine(request: pytest.FixtureRequest, pair: LoweredPair) -> Iterator[OrtEngine]:
    opened = pair.engine(threads=request.param)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return np.random.default_rng(11).integers(0, VOCAB, ROWS).tolist()


@pytest.fixture(scope="module")
def whole(pair: LoweredPair, ids: list[int]) -> dict[Role, Array]:
    """Logits and tapped states of every position, computed in one call by one thread."""
    opened = pair.engine(threads=1)
    result = opened.entry("target").run(target_inputs(ids, 0), [Role.LOGITS, Role.HIDDEN_TAP])
    copies = {role: array.copy() for role, array in result.items()}
    opened.close()
    return copies


def in_calls(engine: OrtEngine, ids: Sequence[int], sizes: Sequence[int]) -> dict[Role, Array]:
    """Logits and tapped states of every position, in calls of the given row counts."""
    target = engine.entry("target")
    pieces: list[dict[Role, Array]] = []
    start = 0
    for size in sizes:
        inputs = target_inputs(ids[start : start + size], start)
        result = target.run(inputs, [Role.LOGITS, Role.HIDDEN_TAP])
        pieces.append({role: array.copy() for role, array in result.items()})
        start += size
    return {role: np.concatenate([p[role] for p in pieces], axis=1) for role in pieces[0]}


def chunks(total: int, size: int) -> list[int]:
    return [size] * (total // size) + ([total % size] if total % size else [])


def assert_same_bits(found: Array, expected: Array) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    bits = [np.ascontiguousarray(a).view(np.uint8) for a in (found, expected)]
    differing = int(np.count_nonzero(bits[0] != bits[1]))
    assert differing == 0, f"{differing} bytes differ"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 64])
def test_rows_per_call(
    size: int, engine: OrtEngine, ids: list[int], whole: dict[Role, Array]
) -> None:
    found = in_calls(engine, ids, chunks(ROWS, size))
    for role, expected in whole.items():
        assert_same_bits(found[role], expected)


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_split_of_the_rows(
    data: st.DataObject, engine: OrtEngine, ids: list[int], whole: dict[Role, Array]
) -> None:
    sizes = []
    while sum(sizes) < ROWS:
        sizes.append(data.draw(st.integers(1, min(9, ROWS - sum(sizes)))))
    found = in_calls(engine, ids, sizes)
    for role, expected in whole.items():
        assert_same_bits(found[role], expected)


def test_verification_after_steps_back(
    engine: OrtEngine, ids: list[int], whole: dict[Role, Array]
) -> None:
    """Rejected rows lie behind the valid ones; the next calls write over them."""
    target = engine.entry("target")
    in_calls(engine, ids, [16])
    wrong = [(token + 1) % VOCAB for token in ids]
    for start in range(16, 40):
        guessed = [ids[start], *wrong[start + 1 : start + 8]]
        result = target.run(target_inputs(guessed, start), [Role.LOGITS])
        assert_same_bits(result[Role.LOGITS][:, :1], whole[Role.LOGITS][:, start : start + 1])


@pytest.mark.parametrize("form", FORMS)
def test_far_from_the_start(form: str, tmp_path: Path) -> None:
    """Kernels cut long contexts into blocks: a row must not see where the cuts are."""
    device, linear = FORMS[form]
    lowered = LoweredPair(tmp_path, REAL_TARGET, device=device, form=linear, max_model_len=1024)
    target = lowered.engine(threads=2).entry("target")
    tokens = np.random.default_rng(2).integers(0, VOCAB, 1024).tolist()
    for start in range(0, 1000, 125):
        target.run(target_inputs(tokens[start : start + 125], start, [0]), [Role.LOGITS])
    for start in (509, 1016):
        rows = target.run(target_inputs(tokens[start : start + 8], start), [Role.LOGITS])
        expected = rows[Role.LOGITS].copy()
        for row in range(8):
            one = target.run(target_inputs([tokens[start + row]], start + row), [Role.LOGITS])
            assert_same_bits(one[Role.LOGITS][0, 0], expected[0, row])


def test_logits_of_chosen_rows(engine: OrtEngine, ids: list[int], whole: dict[Role, Array]) -> None:
    """The head sees other row counts than the layers before it."""
    target = engine.entry("target")
    for rows in ([7], [0], [3, 4], [7, 0, 7], range(8), [5, 1, 2]):
        result = target.run(target_inputs(ids[:8], 0, rows), [Role.LOGITS])
        assert_same_bits(result[Role.LOGITS], whole[Role.LOGITS][:, list(rows)])


def run_draft(engine: OrtEngine, features: Array, sizes: Sequence[int]) -> dict[Role, Array]:
    """Outputs of the block after all features, which were given in calls of the given rows."""
    draft = engine.entry("draft")
    start = 0
    for size in sizes[:-1]:
        draft.run(draft_inputs(features[start : start + size], 9, start), [])
        start += size
    result = draft.run(draft_inputs(features[start:], 9, start), BLOCK_OUTPUTS)
    return {role: array.copy() for role, array in result.items()}


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_proposals_do_not_depend_on_the_split_of_pending_rows(
    data: st.DataObject, pair: LoweredPair, engine: OrtEngine, whole: dict[Role, Array]
) -> None:
    total = data.draw(st.integers(1, 20))
    features = whole[Role.HIDDEN_TAP][0, :total]
    sizes = []
    while sum(sizes) < total:
        sizes.append(data.draw(st.integers(1, total - sum(sizes))))
    expected = run_draft(engine, features, [total])
    found = run_draft(engine, features, sizes)
    for role in BLOCK_OUTPUTS:
        assert_same_bits(found[role], expected[role])


def test_proposals_do_not_depend_on_threads(
    pair: LoweredPair, engine: OrtEngine, whole: dict[Role, Array]
) -> None:
    features = whole[Role.HIDDEN_TAP][0, :30]
    single = pair.engine(threads=1)
    expected = run_draft(single, features, [30])
    found = run_draft(engine, features, [1] * 23 + [7])
    for role in BLOCK_OUTPUTS:
        assert_same_bits(found[role], expected[role])
    single.close()


def test_head_of_a_wide_vocabulary(tmp_path: Path) -> None:
    """Two threads share the columns of a large head; rows keep their bits."""
    target, draft = write_pair(tmp_path, layers=2, vocab=5003)
    lowered = LoweredPair(tmp_path / "out", target, draft)
    hidden = np.random.default_rng(0).standard_normal((1, 64, 64)).astype(np.float32)
    results = []
    for threads in (1, 2):
        session = lowered.engine(threads)._sessions["lm_head"]
        (logits,) = session.run(None, {"hidden": hidden})
        results.append(logits)
        for size in (1, 2, 3, 5, 7, 8):
            for start in (0, 17, 64 - size):
                (part,) = session.run(None, {"hidden": hidden[:, start : start + size]})
                assert_same_bits(part, logits[:, start : start + size])
    assert_same_bits(*results)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [48, 256, 1000])
def test_residual_norms(width: int, threads: int, tmp_path: Path) -> None:
    """The kernel behind `fuse-residual-norm`, which the pairs above do without."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(width).astype(np.float32)

    def build(b: GraphBuilder) -> None:
        operands = [b.take(name, (sym("b"), sym("t"), width)) for name in "xy"]
        attrs = AddRmsNormAttributes(1e-6)
        node = b.node("add_rms_norm", operands, (b.dense("w", weight),), attrs)
        b.give("normed", node.results[0])
        b.give("sum", node.results[1])

    graph = lowered(build, "cpu", tmp_path)
    engine = graph.engine(threads)
    inputs = {name: rng.standard_normal((1, 64, width)).astype(np.float32) for name in "xy"}
    whole = graph.call(engine, inputs)
    for rows in range(1, 65):
        part = graph.call(engine, {name: array[:, -rows:] for name, array in inputs.items()})
        for name, expected in whole.items():
            assert_same_bits(part[name], expected[:, -rows:])
    engine.close()
