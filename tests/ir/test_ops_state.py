from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import RequestError
from edgecc.ir.ops import TypeRuleError
from edgecc.ir.ops import state as family_module
from edgecc.ir.ops.state import GatedDeltaNetAttributes, l2_normalize, softplus
from edgecc.ir.types import DType
from helpers.ops import Case as C
from helpers.ops import Cases, assert_same_bits, check_reference, family, infer, run_op, values
from helpers.weights import dense

ATTRS = GatedDeltaNetAttributes(2, 4)


def causal_conv1d(rng: np.random.Generator) -> C:
    """Each output by the sum in the docstring, inputs before the call looked up in the state."""
    x, state, w = values(rng, 2, 5, 3), values(rng, 2, 3, 3), values(rng, 3, 1, 4)
    y = np.zeros_like(x)
    for b, t, c in np.ndindex(x.shape):
        for j in range(4):
            row = t - 3 + j
            y[b, t, c] += w[c, 0, j] * (x[b, row, c] if row >= 0 else state[b, c, row + 3])
    return C(
        (x, state),
        (y, x[:, -3:].transpose(0, 2, 1)),
        (dense(w),),
        types=("f32[b, t, 3]", "f32[b, 3, 3]"),
        results=("f32[b, t, 3]", "f32[b, 3, 3]"),
    )


def causal_conv1d_short(rng: np.random.Generator) -> C:
    """Fewer rows than taps: the new state still holds old inputs."""
    x, state, w = values(rng, 1, 1, 2), values(rng, 1, 2, 3), values(rng, 2, 1, 4)
    window = np.concatenate([state, x.transpose(0, 2, 1)], axis=2)
    y = np.sum(window * w[None, :, 0], axis=2)[:, None]
    return C(
        (x, state),
        (y, window[:, :, 1:]),
        (dense(w),),
        types=("f32[b, t, 2]", "f32[b, 2, 3]"),
        results=("f32[b, t, 2]", "f32[b, 2, 3]"),
    )


def operands(rng: np.random.Generator, batch: int, rows: int, scale: float = 1.0) -> list:
    """q, k, v, a, b and a state of 2 key heads of 3 and 4 value heads of 5."""
    return [
        values(rng, batch, rows, 6, scale=scale),
        values(rng, batch, rows, 6, scale=scale),
        values(rng, batch, rows, 20, scale=scale),
        values(rng, batch, rows, 4),
        values(rng, batch, rows, 4),
        values(rng, batch, 4, 3, 5),
    ]


def gates(rng: np.random.Generator) -> tuple:
    """Weights A_log and dt_bias."""
    return dense(values(rng, 4)), dense(values(rng, 4))


def chunked(q, k, v, a, b, state, a_log, dt_bias):
    """All rows of a head at once, as matrices: the form prefill kernels use.

    With G the running sum of g and D_ij = exp(G_i - G_j) below the diagonal, the corrected values
    solve a unit lower triangular system; the state enters through exp(G).
    """
    batch, rows, _ = v.shape
    out, after = np.empty_like(v), np.empty_like(state)
    for i, h in np.ndindex(batch, 4):
        pick = slice(3 * (h // 2), 3 * (h // 2) + 3)
        queries, keys = q[i, :, pick], k[i, :, pick]
        queries = queries / np.sqrt((queries**2).sum(1, keepdims=True) + 1e-6) / np.sqrt(3)
        keys = keys / np.sqrt((keys**2).sum(1, keepdims=True) + 1e-6)
        vectors = v[i, :, 5 * h : 5 * h + 5]
        beta = 1 / (1 + np.exp(-b[i, :, h]))
        total = np.cumsum(-np.exp(a_log[h]) * np.log1p(np.exp(a[i, :, h] + dt_bias[h])))
        lower = np.tril(np.ones((rows, rows), dtype=bool))
        decay = np.where(lower, np.exp(np.where(lower, total[:, None] - total[None], 0)), 0)
        system = np.eye(rows) + np.tril(beta[:, None] * (keys @ keys.T) * decay, -1)
        seen = np.exp(total)[:, None] * (keys @ state[i, h])
        written = np.linalg.solve(system, beta[:, None] * (vectors - seen))
        answer = np.exp(total)[:, None] * (queries @ state[i, h])
        out[i, :, 5 * h : 5 * h + 5] = answer + ((queries @ keys.T) * decay) @ written
        left = np.exp(total[-1] - total)[:, None] * keys
        after[i, h] = np.exp(total[-1]) * state[i, h] + left.T @ written
    return out, after


def gated_delta_net(rng: np.random.Generator) -> C:
    given_, weights = operands(rng, 2, 7), [values(rng, 4), values(rng, 4)]
    return C(
        tuple(given_),
        chunked(*given_, *weights),
        tuple(dense(w) for w in weights),
        ATTRS,
        types=(
            *("f32[b, t, 6]", "f32[b, t, 6]", "f32[b, t, 20]"),
            *("f32[b, t, 4]", "f32[b, t, 4]", "f32[b, 4, 3, 5]"),
        ),
        results=("f32[b, t, 20]", "f32[b, 4, 3, 5]"),
    )


def gated_delta_net_golden(rng: np.random.Generator) -> C:
    """Three rows of one head of two dims that transformers' recurrence computed in float32."""
    rows = np.array(
        [
            [1, 2, 0.5, -1, 1, -2, 0.5, 0],
            [-1, 0.5, 2, 1, 0.5, 3, -1, 1],
            [0.25, -2, -1, -0.5, -1.5, 0.25, 2, -2],
        ]
    )[None]
    q, k, v, a, b = np.split(rows, [2, 4, 6, 7], axis=2)
    out = [
        [-0.212131932, 0.424263865],
        [-0.353324383, -0.533998251],
        [-0.0307687726, -0.0590271913],
    ]
    state = [[0.191780686, 0.074655205], [0.0678248405, 0.0934586003]]
    return C(
        (q, k, v, a, b, np.zeros((1, 1, 2, 2))),
        (np.array([out]), np.array([[state]])),
        (dense(np.array([0.3])), dense(np.array([-0.2]))),
        GatedDeltaNetAttributes(1, 1),
    )


def logged_operands(
    rng: np.random.Generator, rows: int, replay: list[int], commit: list[int], logged: int = 4
) -> list:
    """x, a and b of `rows` rows, the states, a log, and both counts."""
    batch = len(replay)
    return [
        values(rng, batch, rows, 32),
        values(rng, batch, rows, 4),
        values(rng, batch, rows, 4),
        values(rng, batch, 32, 2),
        values(rng, batch, 4, 3, 5),
        values(rng, batch, logged, 40),
        np.array(replay),
        np.array(commit),
    ]


def logged_weights(rng: np.random.Generator) -> list:
    """Weights conv1d of 3 taps, A_log and dt_bias."""
    return [values(rng, 32, 1, 3), values(rng, 4), values(rng, 4)]


def logged_delta_net(rng: np.random.Generator) -> C:
    """The matrix form on logged rows, then on new ones, then on the rows that are final."""
    given_ = logged_operands(rng, 5, [0, 2, 4], [5, 0, 3])
    taps, a_log, dt_bias = weights = logged_weights(rng)
    x, a, b, conv_state, state, log, replay, commit = given_
    new = np.concatenate([x, a, b], axis=2)
    out, conv_after, after = np.empty((3, 5, 20)), np.empty_like(conv_state), np.empty_like(state)
    for i, (m, c) in enumerate(zip(replay, commit, strict=True)):
        rows = np.concatenate([log[i, :m], new[i]])
        window = np.concatenate([conv_state[i].T, rows[:, :32]])
        y = sum(window[j : j + m + 5] * taps[:, 0, j] for j in range(3))
        y = y / (1 + np.exp(-y))
        q, k, v = y[:, :6], y[:, 6:12], y[:, 12:]

        def walk(start, stop, before, parts=(q, k, v, rows[:, 32:36], rows[:, 36:])):
            operands_ = [part[None, start:stop] for part in parts]
            return chunked(*operands_, before, a_log, dt_bias) if stop > start else (None, before)

        _, replayed = walk(0, m, state[i : i + 1])
        real = c or 5
        row, after[i : i + 1] = walk(m, m + real, replayed)
        out[i, :real] = row[0]
        for t in range(real, 5):  # padding: only read
            query = q[m + t].reshape(2, 3)
            query = query / np.sqrt((query**2).sum(1, keepdims=True) + 1e-6) / np.sqrt(3)
            out[i, t] = np.einsum("hkv,hk->hv", after[i], query.repeat(2, axis=0)).reshape(-1)
        if not c:
            after[i] = replayed[0]
        conv_after[i] = window[m + c : m + c + 2].T
    return C(
        tuple(given_),
        (out, conv_after, after, new[:, :4]),
        tuple(dense(w) for w in weights),
        ATTRS,
        types=LOGGED,
        results=("f32[b, t, 20]", "f32[b, 32, 2]", "f32[b, 4, 3, 5]", "f32[b, 4, 40]"),
    )


def logged_delta_net_short(rng: np.random.Generator) -> C:
    """A call of one row that nothing precedes: it goes to the log, the rest of which stays."""
    given_ = logged_operands(rng, 1, [0], [0])
    weights = logged_weights(rng)
    x, a, b, conv_state, state, log, *_ = given_
    window = np.concatenate([conv_state[0].T, x[0]])
    y = (window * weights[0][:, 0].T).sum(0)
    y = (y / (1 + np.exp(-y)))[None, None]
    row, _ = chunked(y[..., :6], y[..., 6:12], y[..., 12:], a, b, state, *weights[1:])
    after = log.copy()
    after[:, 0] = np.concatenate([x, a, b], axis=2)[:, 0]
    expected = (row, conv_state, state, after)
    return C(tuple(given_), expected, tuple(dense(w) for w in weights), ATTRS)


LOGGED = (
    *("f32[b, t, 32]", "f32[b, t, 4]", "f32[b, t, 4]"),
    *("f32[b, 32, 2]", "f32[b, 4, 3, 5]", "f32[b, 4, 40]", "i64[b]", "i64[b]"),
)

CASES: Cases = {
    "causal_conv1d": causal_conv1d,
    "causal_conv1d-short": causal_conv1d_short,
    "gated_delta_net": gated_delta_net,
    "logged_delta_net": logged_delta_net,
}


def test_every_op_has_a_case():
    assert {name.split("-")[0] for name in CASES} == family(family_module.OPS)


@pytest.mark.parametrize("name", CASES)
def test_reference(name):
    check_reference(name.split("-")[0], CASES[name](np.random.default_rng(1)))


def test_a_row_that_is_only_logged():
    case = logged_delta_net_short(np.random.default_rng(2))
    found = run_op("logged_delta_net", case.operands, case.weights, case.attrs, dtype=np.float64)
    for value, expected in zip(found, case.expected, strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-13)


def stepwise(rows, states, weights, dtype):
    """What the ops of a lifted layer give for each row, and the states at the end."""
    x, a, b = rows
    conv_state, state = states
    y, conv_state = run_op("causal_conv1d", [x, conv_state], weights[:1], dtype=dtype)
    (y,) = run_op("silu", [y], dtype=dtype)
    q, k, v = np.split(y, [6, 12], axis=2)
    out, state = run_op("gated_delta_net", [q, k, v, a, b, state], weights[1:], ATTRS, dtype=dtype)
    return out, [conv_state, state]


@given(
    calls=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.booleans()), max_size=6),
    narrow=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rounds_of_any_acceptance_give_the_bits_of_accepted_rows(calls, narrow, seed):
    """Verification after verification, each keeping some rows; now and then a final call.

    Every accepted row has the result, and the states at the end are those, of a walk over accepted
    rows alone.
    """
    rng, dtype = np.random.default_rng(seed), np.float32 if narrow else np.float64
    weights = [dense(w) for w in logged_weights(rng)]
    start = [values(rng, 1, 32, 2), values(rng, 1, 4, 3, 5)]
    states, log, replay = start, np.zeros((1, 4, 40)), 0
    kept_rows, results = [], []
    for count, accepted, final in [*calls, (1, 1, True)]:
        accepted = count if final else min(accepted, count)
        rows = [values(rng, 1, count, width) for width in (32, 4, 4)]
        counts = [np.array([replay]), np.array([count if final else 0])]
        out, *states, log = run_op(
            "logged_delta_net", [*rows, *states, log, *counts], weights, ATTRS, dtype=dtype
        )
        replay = 0 if final else accepted
        kept_rows.append([part[:, :accepted] for part in rows])
        results.append(out[:, :accepted])
    together = [np.concatenate(parts, axis=1) for parts in zip(*kept_rows, strict=True)]
    expected, after = stepwise(together, start, weights, dtype)
    assert_same_bits([np.concatenate(results, axis=1), *states], [expected, *after])


@pytest.mark.parametrize("commit", [1, 2, 3])
def test_padding_leaves_no_trace(commit):
    rng = np.random.default_rng(4)
    given_ = logged_operands(rng, 3, [2], [commit])
    weights = [dense(w) for w in logged_weights(rng)]
    padded = run_op("logged_delta_net", given_, weights, ATTRS)
    short = [x[:, :commit] for x in given_[:3]]
    alone = run_op("logged_delta_net", [*short, *given_[3:]], weights, ATTRS)
    assert_same_bits([padded[0][:, :commit], *padded[1:3]], alone[:3])


@pytest.mark.parametrize(
    ("replay", "commit", "message"),
    [
        (5, 0, r"replayed rows: index 5 is outside 0\.\.4"),
        (-1, 0, "replayed rows: index -1"),
        (0, 4, r"committed rows: index 4 is outside 0\.\.3"),
        (0, -1, "committed rows: index -1"),
    ],
)
def test_counts_out_of_range(replay, commit, message):
    rng = np.random.default_rng(4)
    given_ = logged_operands(rng, 3, [replay], [commit])
    with pytest.raises(RequestError, match=message):
        run_op("logged_delta_net", given_, [dense(w) for w in logged_weights(rng)], ATTRS)


def test_values_of_transformers():
    case = gated_delta_net_golden(np.random.default_rng(0))
    for dtype, bound in ((np.float32, 6e-8), (np.float64, 4e-8)):
        found = run_op("gated_delta_net", case.operands, case.weights, case.attrs, dtype=dtype)
        for value, expected in zip(found, case.expected, strict=True):
            np.testing.assert_allclose(value, expected, rtol=0, atol=bound)


def test_repeated_keys():
    """Equal keys with full write strength: the form that makes careless kernels diverge."""
    rng = np.random.default_rng(3)
    given_ = operands(rng, 1, 64)
    given_[1] = np.broadcast_to(given_[1][:, :1], given_[1].shape).copy()
    given_[4] = np.full_like(given_[4], 5.0)
    weights = [np.full(4, -8.0), np.zeros(4)]
    expected = chunked(*given_, *weights)
    found = run_op("gated_delta_net", given_, [dense(w) for w in weights], ATTRS, dtype=np.float64)
    for value, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-11)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.booleans(), st.integers(0, 99))
def test_calls_on_few_rows_give_the_bits_of_one_call(chunks, narrow, seed):
    """Rows do not depend on each other's number, and neither does the state after them."""
    rng, dtype = np.random.default_rng(seed), np.float32 if narrow else np.float64
    *rows, state = operands(rng, 2, sum(chunks))
    weights = gates(rng)
    taps, conv_state = dense(values(rng, 20, 1, 4)), values(rng, 2, 20, 3)
    for op, xs, memory, w, attrs in (
        ("gated_delta_net", rows, state, weights, ATTRS),
        ("causal_conv1d", rows[2:3], conv_state, (taps,), None),
    ):
        together = run_op(op, [*xs, memory], w, attrs, dtype=dtype)
        pieces, start = [], 0
        for count in chunks:
            part = [x[:, start : start + count] for x in xs]
            piece, memory = run_op(op, [*part, memory], w, attrs, dtype=dtype)
            pieces.append(piece)
            start += count
        assert_same_bits([np.concatenate(pieces, axis=1), memory.astype(dtype)], together)


def test_sequences_do_not_depend_on_each_other():
    rng = np.random.default_rng(5)
    given_, weights = operands(rng, 3, 4), gates(rng)
    together = run_op("gated_delta_net", given_, weights, ATTRS)
    for i in range(3):
        alone = run_op("gated_delta_net", [x[i : i + 1] for x in given_], weights, ATTRS)
        assert_same_bits(alone, [y[i : i + 1] for y in together])


def test_no_rows_keep_the_state():
    rng = np.random.default_rng(6)
    given_ = operands(rng, 2, 0)
    out, state = run_op("gated_delta_net", given_, gates(rng), ATTRS, dtype=np.float64)
    assert out.shape == (2, 0, 20)
    np.testing.assert_array_equal(state, given_[-1])
    x, before = np.zeros((1, 0, 2)), values(rng, 1, 2, 3)
    y, after = run_op("causal_conv1d", [x, before], [dense(np.ones((2, 1, 4)))], dtype=np.float64)
    assert y.shape == (1, 0, 2)
    np.testing.assert_array_equal(after, before)


def test_a_closed_gate_freezes_the_state():
    """Write strength 0 and decay 1 in the limit: beta and g can be switched off exactly."""
    rng = np.random.default_rng(7)
    given_ = operands(rng, 1, 3)
    given_[3][:], given_[4][:] = -1e4, -1e4
    _, state = run_op("gated_delta_net", given_, gates(rng), ATTRS, dtype=np.float64)
    np.testing.assert_array_equal(state, given_[-1])


def test_zero_rows_are_finite():
    rng = np.random.default_rng(8)
    given_ = [np.zeros_like(x) for x in operands(rng, 1, 2)]
    for y in run_op("gated_delta_net", given_, gates(rng), ATTRS):
        assert not y.any()


def test_softplus():
    x = np.array([-800.0, -30, -1, 0, 1, 19.99, 20, 20.01, 800])
    with np.errstate(over="raise"):
        y = softplus(x)
    expected = [0, 9.357623e-14, 0.31326168752, 0.69314718056, 1.31326168752]
    np.testing.assert_allclose(y[:5], expected, rtol=1e-7, atol=0)
    assert y[5] > 19.99
    assert y[6] > 20
    assert y[7] == 20.01  # the identity, as in PyTorch
    assert y[8] == 800
    assert softplus(x.astype(np.float32)).dtype == np.float32


def test_l2_normalize_adds_to_the_sum_not_the_mean():
    x = np.array([[3e-3, 4e-3]])
    np.testing.assert_allclose(l2_normalize(x), x / np.sqrt(2.5e-5 + 1e-6), rtol=1e-15)


CONV = ("f32[b, t, 3]", "f32[b, 3, 3]")
NET = (
    *("f32[b, t, 6]", "f32[b, t, 6]", "f32[b, t, 20]"),
    *("f32[b, t, 4]", "f32[b, t, 4]", "f32[b, 4, 3, 5]"),
)


@pytest.mark.parametrize(
    ("types", "shape", "message"),
    [
        (("i64[b, t, 3]", CONV[1]), (3, 1, 4), "x must be floating-point, got i64"),
        (("f32[t, 3]", CONV[1]), (3, 1, 4), "x must have rank 3"),
        ((CONV[0], "f16[b, 3, 3]"), (3, 1, 4), "state must be f32, got f16"),
        (CONV, (3, 4), r"must be \[channels, 1, taps\] .* got \[3, 4\]"),
        (CONV, (3, 2, 4), r"must be \[channels, 1, taps\]"),
        (CONV, (3, 1, 1), "at least 2 taps"),
        (CONV, (4, 1, 4), "channels of x: expected 4, got 3"),
        (CONV, (3, 1, 5), "shape of the state"),
        ((CONV[0], "f32[c, 3, 3]"), (3, 1, 4), "shape of the state"),
        (("f32[b, t, t]", CONV[1]), (3, 1, 4), "channels of x: expected 3, got t"),
    ],
)
def test_causal_conv1d_refuses(types, shape, message):
    with pytest.raises(TypeRuleError, match=message):
        infer("causal_conv1d", types, [dense(np.ones(shape))])


def changed(index: int, type_: str) -> tuple[str, ...]:
    return (*NET[:index], type_, *NET[index + 1 :])


@pytest.mark.parametrize(
    ("types", "attrs", "sizes", "message"),
    [
        (changed(0, "i64[b, t, 6]"), ATTRS, (4, 4), "q must be floating-point"),
        (changed(0, "f32[t, 6]"), ATTRS, (4, 4), "q must have rank 3"),
        (changed(1, "f16[b, t, 6]"), ATTRS, (4, 4), "k must be f32"),
        (changed(1, "f32[b, t, 8]"), ATTRS, (4, 4), "width of k: expected 6, got 8"),
        (changed(2, "f32[b, r, 20]"), ATTRS, (4, 4), "rows of v"),
        (changed(2, "f32[b, t, 18]"), ATTRS, (4, 4), "width 18 of v must divide into 4 heads"),
        (changed(0, "f32[b, t, t]"), ATTRS, (4, 4), "width t of q must divide into 2 heads"),
        (changed(3, "f32[b, t, 2]"), ATTRS, (4, 4), "width of a: expected 4, got 2"),
        (changed(4, "f32[b, t, 8]"), ATTRS, (4, 4), "width of b: expected 4, got 8"),
        (changed(5, "f32[b, 4, 5, 3]"), ATTRS, (4, 4), "shape of the state"),
        (changed(5, "f16[b, 4, 3, 5]"), ATTRS, (4, 4), "state must be f32"),
        (changed(5, "f32[c, 4, 3, 5]"), ATTRS, (4, 4), "shape of the state"),
        (NET, GatedDeltaNetAttributes(3, 4), (4, 4), "not whole: 4 / 3"),
        (NET, GatedDeltaNetAttributes(0, 4), (4, 4), "not whole: 4 / 0"),
        (NET, GatedDeltaNetAttributes(2, 0), (4, 4), "not whole: 0 / 2"),
        (NET, GatedDeltaNetAttributes(1, -4), (4, 4), "not whole: -4 / 1"),
        (NET, ATTRS, (2, 4), r"shape of A_log: expected \(4,\), got \(2,\)"),
        (NET, ATTRS, (4, 2), r"shape of dt_bias: expected \(4,\), got \(2,\)"),
        (NET, None, (4, 4), "expects attributes GatedDeltaNetAttributes"),
    ],
)
def test_gated_delta_net_refuses(types, attrs, sizes, message):
    with pytest.raises(TypeRuleError, match=message):
        infer("gated_delta_net", types, [dense(np.ones(n)) for n in sizes], attrs)


def logged(index: int, type_: str) -> tuple[str, ...]:
    return (*LOGGED[:index], type_, *LOGGED[index + 1 :])


@pytest.mark.parametrize(
    ("types", "attrs", "message"),
    [
        (logged(0, "f32[b, t, 30]"), ATTRS, "channels of x: expected 32, got 30"),
        (logged(1, "f32[b, t, 2]"), ATTRS, "width of a: expected 4, got 2"),
        (logged(2, "f32[b, r, 4]"), ATTRS, "rows of b"),
        (logged(3, "f32[b, 32, 3]"), ATTRS, "shape of the state"),
        (logged(4, "f32[b, 4, 15]"), ATTRS, "delta_state must have rank 4"),
        (logged(4, "f32[b, 4, 3, 4]"), ATTRS, "channels of x: q, k and v: expected 28, got 32"),
        (logged(4, "f32[b, 2, 3, 5]"), ATTRS, "shape of the state"),
        (logged(5, "f32[b, 4, 32]"), ATTRS, "log: expected"),
        (logged(5, "f32[c, 4, 40]"), ATTRS, "log: expected"),
        (logged(5, "f32[b, t, 40]"), ATTRS, "the log must have rows, got"),
        (logged(5, "bf16[b, 4, 40]"), ATTRS, "log must be f32"),
        (logged(6, "f32[b]"), ATTRS, "replay must be i64"),
        (logged(7, "i64[b, 1]"), ATTRS, "commit must have rank 1"),
        (logged(7, "i64[c]"), ATTRS, "batch of commit"),
        (LOGGED, GatedDeltaNetAttributes(3, 4), "channels of x: q, k and v"),
        (LOGGED, GatedDeltaNetAttributes(2, 0), "expected 12, got 32"),
    ],
)
def test_logged_delta_net_refuses(types, attrs, message):
    weights = [dense(np.ones(shape)) for shape in ((32, 1, 3), 4, 4)]
    with pytest.raises(TypeRuleError, match=message):
        infer("logged_delta_net", types, weights, attrs)


def test_gates_may_be_stored_in_16_bits():
    rng = np.random.default_rng(9)
    given_ = operands(rng, 1, 2)
    narrow = [dense(values(rng, 4), DType.BF16) for _ in range(2)]
    wide = [dense(run_dense(w)) for w in narrow]
    found = run_op("gated_delta_net", given_, narrow, ATTRS)
    assert_same_bits(found, run_op("gated_delta_net", given_, wide, ATTRS))


def run_dense(weight) -> np.ndarray:
    """The values of an inline weight."""
    (_, data), shape = weight.source.parts[0], weight.shape
    return np.frombuffer(data, weight.encoding.dtype.numpy).reshape(shape).astype(np.float32)
