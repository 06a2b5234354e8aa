from __future__ import annotations

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import LegalizeError, RequestError
from edgecc.ir import Builder, DType, Interpreter, Module, Role, SymbolRange, sym
from edgecc.ir.ops import OPS, Trait
from edgecc.ir.ops.shape import AxisAttributes
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from helpers.modules import evaluate, modules, random_inputs
from helpers.ops import assert_same_bits, tensor
from helpers.pairs import PairOptions, pair, pair_inputs
from helpers.weights import MemoryReader, dense, packed, store


def graph(*types: str) -> Builder:
    """A graph of inputs `x0`, `x1` ..."""
    b = Builder(Module("m"), "main")
    for i, text in enumerate(types):
        made = tensor(text)
        for symbol in "bct":
            b.module.symbols[symbol] = SymbolRange(0, 99)
        b.input(f"x{i}", made.dtype, made.shape, Role.ACTIVATION)
    return b


def echo(*types: str) -> Interpreter:
    """Returns its inputs."""
    b = graph(*types)
    for i, item in enumerate(b.graph.inputs):
        b.output(item.value, f"y{i}", Role.ACTIVATION)
    return Interpreter(b.module)


def test_outputs_by_name_in_order():
    b = graph("f32[2]", "f32[2]")
    x, y = (i.value for i in b.graph.inputs)
    for name, value in (("z", b.op("add", x, y)), ("a", x), ("z2", b.graph.nodes[0].result)):
        b.output(value, name, Role.ACTIVATION)
    found = Interpreter(b.module).run("main", {"x1": np.ones(2), "x0": np.array([1.0, 2.0])})
    assert list(found) == ["z", "a", "z2"]
    assert [v.tolist() for v in found.values()] == [[2, 3], [1, 2], [2, 3]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_float_is_held_in_the_wanted_dtype(dtype):
    b = graph("bf16[2]", "f64[2]", "i64[2]", "bool[2]", "u8[2]")
    for i, item in enumerate(b.graph.inputs):
        b.output(item.value, f"y{i}", Role.ACTIVATION)
    arrays = {
        "x0": np.array([1, 2], ml_dtypes.bfloat16),
        "x1": np.array([0.1, 2], np.float64),
        "x2": np.array([1, 2], np.int32),
        "x3": np.array([True, False]),
        "x4": np.array([1, 255], np.uint8),
    }
    found = Interpreter(b.module, dtype).run("main", arrays)
    kinds = [found[f"y{i}"].dtype for i in range(5)]
    assert kinds == [dtype, dtype, np.int64, np.bool_, np.uint8]
    assert found["y1"].tolist() == [float(dtype(0.1)), 2]


def test_float64_is_more_precise():
    b = graph("f32[1]")
    b.module.weights.add("w", dense(np.full((1, 1), 1 / 3)))
    b.output(b.op("linear", b.graph.inputs[0].value, weights=("w",)), "y", Role.ACTIVATION)
    (y,) = Interpreter(b.module, np.float64).run("main", {"x0": np.array([0.1])})["y"]
    assert y == 0.1 * float(np.float32(1 / 3))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x0": np.ones(2)}, r"graph @main takes \['x0', 'x1'\], got \['x0'\]"),
        ({"x0": np.ones(2), "x1": np.ones(2), "z": 1}, r"got \['x0', 'x1', 'z'\]"),
        ({}, r"got \[\]"),
    ],
)
def test_missing_and_unknown_inputs(inputs, message):
    with pytest.raises(RequestError, match=message) as caught:
        echo("f32[2]", "f32[2]").run("main", inputs)
    assert caught.value.id == "run/inputs"


def test_unknown_graph():
    with pytest.raises(RequestError, match="no graph @mian") as caught:
        echo("f32[2]").run("mian", {})
    assert caught.value.diagnostics[0].help == "did you mean 'main'? valid: main"


@pytest.mark.parametrize(
    ("types", "shapes", "message"),
    [
        (["f32[2]"], [(3,)], r"@main: input %x0: expected f32\[2\], got shape \(3,\)"),
        (["f32[2]"], [(2, 1)], r"got shape \(2, 1\)"),
        (["f32[2]"], [()], r"got shape \(\)"),
        (["f32[t]", "f32[t]"], [(2,), (3,)], r"input %x1: expected f32\[t\], got shape \(3,\)"),
        (["f32[t, t]"], [(2, 3)], r"expected f32\[t, t\]"),
        (["f32[t]", "f32[2*t]"], [(2,), (3,)], r"expected f32\[2\*t\]"),
        (["f32[4*t]"], [(6,)], r"expected f32\[4\*t\], got shape \(6,\)"),
        (["f32[2*t + 1]", "f32[t]"], [(7,), (4,)], r"input %x1: expected f32\[t\]"),
        (["f32[t + 1]", "f32[t]"], [(2,), (2,)], r"input %x1: expected f32\[t\]"),
        (["f32[t + 3]"], [(2,)], r"expected f32\[t \+ 3\], got shape \(2,\)"),
        (["f32[b]", "f32[c]", "f32[b + c]"], [(1,), (2,), (4,)], r"expected f32\[b \+ c\]"),
    ],
)
def test_shapes_that_do_not_match(types, shapes, message):
    inputs = {f"x{i}": np.zeros(s) for i, s in enumerate(shapes)}
    with pytest.raises(RequestError, match=message) as caught:
        echo(*types).run("main", inputs)
    assert caught.value.id == "run/shape"


@pytest.mark.parametrize(
    ("types", "shapes"),
    [
        (["f32[b, t, 4]", "f32[b, t + 7]"], [(2, 3, 4), (2, 10)]),
        (["f32[t + 7]", "f32[2*t]"], [(7,), (0,)]),
        (["f32[2*t]", "f32[t]"], [(6,), (3,)]),
        (["f32[0, t]"], [(0, 5)]),
        (["f32[4*t]", "f32[t]", "f32[2*t + 1]"], [(12,), (3,), (7,)]),
    ],
)
def test_shapes_that_match(types, shapes):
    inputs = {f"x{i}": np.zeros(s, np.float32) for i, s in enumerate(shapes)}
    found = echo(*types).run("main", inputs)
    assert [v.shape for v in found.values()] == shapes


@pytest.mark.parametrize(("type_", "array"), [("i64[2]", [1.0, 2.0]), ("bool[2]", [0, 1])])
def test_dtypes_that_would_lose_values(type_, array):
    with pytest.raises(
        RequestError, match=r"input %x0: expected .*, got (float64|int64)"
    ) as caught:
        echo(type_).run("main", {"x0": np.array(array)})
    assert caught.value.id == "run/dtype"


def test_integers_are_fine_where_floats_are_wanted():
    assert echo("f32[2]").run("main", {"x0": [1, 2]})["y0"].tolist() == [1.0, 2.0]


def test_results_that_do_not_match_are_reported_with_their_node():
    """A type the shape rule cannot check: rows of `like` are only known at run time."""
    b = graph("f32[c]", "f32[t]")
    x, like = (i.value for i in b.graph.inputs)
    b.output(b.op("tail", x, like, attrs=AxisAttributes(0), name="y"), "y", Role.ACTIVATION)
    with pytest.raises(RequestError, match=r"@main: %y = tail\(%x0, %x1\): expected f32\[t\]"):
        Interpreter(b.module).run("main", {"x0": np.zeros(2), "x1": np.zeros(3)})


def test_inputs_are_not_changed():
    module = pair(PairOptions(draft_head="own", draft_embedding="own"))
    inputs = pair_inputs(module)
    copies = {g: {n: a.copy() for n, a in arrays.items()} for g, arrays in inputs.items()}
    evaluate(module, inputs)
    for graph_name, arrays in inputs.items():
        assert_same_bits(list(arrays.values()), list(copies[graph_name].values()))


@given(modules(), st.integers(0, 9))
def test_evaluation_is_deterministic(module, seed):
    inputs = random_inputs(module, seed)
    first, second = evaluate(module, inputs), evaluate(module, inputs)
    assert_same_bits(list(first.values()), list(second.values()))


ROW_OPS = [name for name, op in OPS.items() if Trait.ROWWISE in op.traits]
ROW_OPS += [name for name, op in OPS.items() if Trait.ELEMENTWISE in op.traits]
ROWS = [tensor(f"f32[t, {width}]") for width in (2, 4, 3, 0)]


@given(modules(ops=[*ROW_OPS, "slice", "split"], results=ROWS), st.integers(0, 9))
def test_rows_do_not_depend_on_each_other(module, seed):
    """All ops of these modules work row by row, so the law of single ops holds for graphs."""
    inputs = random_inputs(module, seed, {"t": 4})
    together = evaluate(module, inputs)
    for row in (0, 3):
        some = {g: {n: a[row : row + 1] for n, a in arrays.items()} for g, arrays in inputs.items()}
        for name, array in evaluate(module, some).items():
            assert array.tobytes() == together[name][row : row + 1].tobytes()


def test_chunks_of_a_prompt_give_the_bits_of_the_whole():
    """Prefill in one call or token by token: caches, taps and logits are the same bits."""
    module = pair(draft=False)
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 11, (1, 6))
    run = Interpreter(module).run
    caches = {n: rng.standard_normal((1, 1, 10, 4)) for n in ("k_cache.0", "v_cache.0")}
    common = {"cache_length": np.array([0]), **caches}
    whole = run("target", {"token_ids": ids, "logit_rows": np.arange(6), **common})
    taps, logits = [], []
    for i in range(6):
        step = {"token_ids": ids[:, i : i + 1], "logit_rows": np.array([0])}
        found = run("target", {**step, "cache_length": np.array([i]), **caches})
        caches = {n: found[n] for n in caches}
        taps.append(found["hidden_tap"])
        logits.append(found["logits"])
    assert_same_bits([np.concatenate(taps, axis=1)], [whole["hidden_tap"]])
    assert_same_bits([np.concatenate(logits, axis=1)], [whole["logits"]])
    assert_same_bits(list(caches.values()), [whole[n] for n in caches])


def test_unbound_weights_raise_when_they_are_read():
    module = pair()
    inputs = pair_inputs(module)
    assert "logits" in Interpreter(module).run("target", inputs["target"])
    with pytest.raises(LegalizeError, match=r"weight @draft\.embed_tokens\.weight has no bytes"):
        Interpreter(module).run("draft", inputs["draft"])


def test_binding_gives_the_values_of_the_target():
    """A draft that borrows computes what one with copies of the same tensors computes."""
    options = PairOptions(draft_head="same", draft_embedding="same", head="bf16")
    own, borrowed = pair(options), pair(PairOptions(head="bf16"))
    BindSharedWeights().run(borrowed, PassContext())
    inputs = pair_inputs(own)
    assert_same_bits(
        list(evaluate(borrowed, inputs).values()), list(evaluate(own, inputs).values())
    )


def test_values_are_dropped_after_their_last_use():
    b = graph("f32[3]")
    x = b.graph.inputs[0].value
    for _ in range(5):
        x = b.op("silu", x)
    b.output(x, "y", Role.ACTIVATION)
    alive: list[weakref.ref[np.ndarray]] = []
    peak = []

    class Watch(Interpreter):
        def node(self, node, operands):
            results = super().node(node, operands)
            alive.extend(weakref.ref(r) for r in results)
            gc.collect()
            peak.append(sum(r() is not None for r in alive))
            return results

    Watch(b.module).run("main", {"x0": np.ones(3)})
    assert max(peak) <= 2  # the operand and the result


def test_values_with_several_users_and_outputs_stay():
    b = graph("f32[2]")
    x = b.graph.inputs[0].value
    y = b.op("silu", x)
    z = b.op("add", y, y)
    b.op("mul", z, x)  # dead
    b.output(b.op("add", z, y), "sum", Role.ACTIVATION)
    for name, value in (("y", y), ("x", x), ("z", z)):
        b.output(value, name, Role.ACTIVATION)
    found = Interpreter(b.module).run("main", {"x0": np.array([1.0, -2.0])})
    np.testing.assert_array_equal(found["sum"], 3 * found["y"])
    np.testing.assert_array_equal(found["z"], 2 * found["y"])


def test_subclasses_observe_nodes():
    seen = []

    class Names(Interpreter):
        def node(self, node, operands):
            seen.append(node.op.name)
            return super().node(node, operands)

    b = graph("f32[2]")
    b.output(b.op("silu", b.op("silu", b.graph.inputs[0].value)), "y", Role.ACTIVATION)
    Names(b.module).run("main", {"x0": np.ones(2)})
    assert seen == ["silu", "silu"]


def test_a_table_of_embeddings_is_not_read_as_a_whole():
    module = Module("m", symbols={"t": SymbolRange(0, 9)})
    b = Builder(module, "main")
    store(module, "c", "table", packed(np.random.default_rng(0), 64, 8).weight)
    ids = b.input("ids", DType.I64, (sym("t"),), Role.TOKEN_IDS)
    b.output(b.op("embedding", ids, weights=("table",)), "y", Role.ACTIVATION)
    Interpreter(module).run("main", {"ids": np.array([5, 5, 9])})
    reader = module.weights.readers["c"]
    assert isinstance(reader, MemoryReader)
    assert len(reader.reads) == 2 * 3  # two different rows, three components


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_narrow_values_are_rounded_when_they_are_made(dtype):
    """Inputs, results and outputs; the arithmetic in between is that of the evaluation."""
    module = Module("m", symbols={"t": SymbolRange(0, 8)})
    b = Builder(module, "main")
    x = b.input("x", DType.BF16, (3,), Role.ACTIVATION)
    y = b.op("add", x, x)
    b.output(b.op("mul", y, y), "y", Role.ACTIVATION)
    given = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 257.0])
    found = Interpreter(module, dtype).run("main", {"x": given.astype(np.float32)})["y"]
    assert found.dtype == dtype
    rounded = np.array([1.0, 1 + 2.0**-6, 256.0])
    exact = (2 * rounded) ** 2
    assert found.tolist() == [4.0, 4.125, 262144.0]
    assert np.max(np.abs(found - exact) / exact) < 2.0**-8
