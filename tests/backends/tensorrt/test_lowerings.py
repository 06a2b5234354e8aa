"""Tiny networks, really built: one for each op and each form of a weight."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from edgecc.backends.onnx.emitter import output_names
from edgecc.backends.tensorrt.builder import Session
from edgecc.backends.tensorrt.emitter import LOWERINGS
from edgecc.backends.tensorrt.lower import build
from edgecc.backends.tensorrt.names import PlanNames
from edgecc.backends.tensorrt.operands import Operand, graph_operands
from edgecc.backends.tensorrt.policy import plan_weights
from edgecc.devices import DEVICES, get_device
from edgecc.errors import LegalizeError, UnsupportedError
from edgecc.ir import Builder, Dense, DType, Interpreter, Module, Role, SymbolRange, sym
from edgecc.ir.encodings import NVFP4, Int4, parse_encoding
from edgecc.ir.ops.attention import AttentionAttributes, RopeAttributes, SplitHeadsAttributes
from edgecc.ir.ops.elementwise import CastAttributes, GeluAttributes
from edgecc.ir.ops.norm import AddRmsNormAttributes, LayerNormAttributes, RmsNormAttributes
from edgecc.ir.ops.quantization import FakeQuantizeAttributes
from edgecc.ir.ops.sampling import ArgmaxAttributes
from edgecc.ir.ops.shape import AxisAttributes, PadAttributes, SliceAttributes, SplitAttributes
from edgecc.ir.ops.state import GatedDeltaNetAttributes
from edgecc.ir.ops.vision import (
    MergeRowsAttributes,
    MultiAxisRopeAttributes,
    MultiHeadAttentionAttributes,
)
from edgecc.ir.quantize import quantize
from edgecc.ir.types import substitute
from edgecc.ir.weights import Inline, Weight
from edgecc.nvfp4 import unpack_e2m1
from helpers.lowering import nvfp4_values, random_nvfp4
from helpers.tensorrt_network import NetworkInterpreter

POLICIES = ("embed", "bind")
BF16, F32, I64 = DType.BF16, DType.F32, DType.I64


class Net(Builder):
    """A graph over `t` rows of one sequence, with weights made on the way."""

    def __init__(self) -> None:
        symbols = {"b": SymbolRange(1, 1), "t": SymbolRange(1, 32)}
        super().__init__(Module("net", symbols=symbols), "main")
        self.random = np.random.default_rng(0)

    def take(self, name="x", width=64, dtype=BF16, rows=None):
        return self.input(name, dtype, (sym("b"), rows or sym("t"), width), Role.ACTIVATION)

    def number(self, name="length"):
        return self.input(name, I64, (sym("b"),), Role.CACHE_LENGTH)

    def dense(self, name, shape, dtype=F32):
        values = self.random.standard_normal(shape).astype(dtype.numpy)
        source = Inline((("weight", values.tobytes()),))
        return self.module.weights.add(name, Weight(tuple(shape), Dense(dtype), source))

    def packed(self, name, rows=64, columns=64):
        codes, scale, scale_2 = random_nvfp4(self.random, rows, columns)
        parts = {"weight": codes, "weight_scale": scale, "weight_scale_2": scale_2}
        return self.stored(name, (rows, columns), NVFP4(), parts)

    def rounded(self, name, encoding):
        values = self.random.standard_normal((64, 64)).astype(np.float32)
        parts = quantize(encoding, values, lambda: np.float32(np.abs(values).max()))
        return self.stored(name, (64, 64), encoding, parts)

    def stored(self, name, shape, encoding, parts):
        source = Inline(tuple((k, np.asarray(v).tobytes()) for k, v in parts.items()))
        return self.module.weights.add(name, Weight(shape, encoding, source))


def attention(n: Net, *, causal: bool, rows=None, windows=(None, None)) -> object:
    q, k = n.take("q", 128, rows=rows), n.take("k", 64, rows=rows)
    start = n.number()
    caches = [n.input(c, BF16, (sym("b"), 1, 96, 64), Role.KV_CACHE) for c in ("kc", "vc")]
    new = [n.op("cache_update", c, k, start) for c in caches]
    for cache, value in zip(caches, new, strict=True):
        n.output(value, cache.name, Role.KV_CACHE, alias=cache.name)
    length = n.op("advance", start, k)
    for window in windows:  # two layers, with one mask where their windows are equal
        attrs = AttentionAttributes(2, 1, 0.1, causal, window)
        q = n.op("attention", q, *new, length, attrs=attrs)
    return q


def rope(n: Net) -> object:
    x, start = n.take(width=128), n.number()
    positions = n.op("position_ids", start, x)
    tables = (n.dense("cos", (40, 16)), n.dense("sin", (40, 16)))  # 32 of 64 dims
    return n.op("rope", x, positions, weights=tables, attrs=RopeAttributes(2))


def both(n: Net, op: str) -> object:
    return n.op(op, n.take("a"), n.take("b"))


def linear(n: Net, symbol: str, dtype=BF16, bias=False) -> object:
    weights = (symbol, n.dense("bias", (64,))) if bias else (symbol,)
    return n.op("linear", n.take(dtype=dtype), weights=weights)


def tail(n: Net) -> object:
    x = n.take()
    rows = n.op("concat", x, n.take("y", rows=3), attrs=AxisAttributes(1))
    return n.op("tail", rows, x, attrs=AxisAttributes(1))


def chosen(n: Net) -> object:
    token = n.op("argmax", n.take(dtype=F32), attrs=ArgmaxAttributes(60))
    table = n.dense("table", (64, 32), BF16)
    return n.op("embedding", token, weights=(table,))


def looked_up(n: Net) -> object:
    ids = n.input("ids", I64, (sym("b"), sym("t")), Role.TOKEN_IDS)
    source = Inline((("weight", np.arange(9, dtype=np.int64).tobytes()),))
    n.module.weights.add("map", Weight((9,), Dense(I64), source))
    return n.op("lookup", ids, weights=("map",))


def padded(n: Net) -> object:
    first = n.op("unsqueeze", n.number("anchor"), attrs=AxisAttributes(1))
    return n.op("pad", first, attrs=PadAttributes(1, 6, 7))


def convolved(n: Net) -> object:
    x = n.take(dtype=F32)
    state = n.input("state", F32, (sym("b"), 64, 3), Role.STATE)
    taps = n.dense("taps", (64, 1, 4))
    y, after = n.node("causal_conv1d", (x, state), (taps,)).results
    n.output(after, "state", Role.STATE, alias="state")
    return y


def recurrent(n: Net) -> object:
    q, k = n.take("q", 32, F32), n.take("k", 32, F32)
    v, a, b = n.take("v", 96, F32), n.take("a", 6, F32), n.take("b", 6, F32)
    state = n.input("state", F32, (sym("b"), 6, 16, 16), Role.STATE)
    weights = (n.dense("A_log", (6,)), n.dense("dt_bias", (6,)))
    attrs = GatedDeltaNetAttributes(key_heads=2, value_heads=6)
    y, after = n.node("gated_delta_net", (q, k, v, a, b, state), weights, attrs).results
    n.output(after, "state", Role.STATE, alias="state")
    return y


def replayed(n: Net) -> object:
    x, a, b = n.take(dtype=F32), n.take("a", 2, F32), n.take("b", 2, F32)
    conv = n.input("conv", F32, (sym("b"), 64, 3), Role.STATE)
    delta = n.input("delta", F32, (sym("b"), 2, 8, 24), Role.STATE)
    log = n.input("log", F32, (sym("b"), 8, 68), Role.STATE_LOG)
    counts = [
        n.input(name, I64, (sym("b"),), role)
        for name, role in (("replay", Role.REPLAY_LENGTH), ("commit", Role.COMMIT_LENGTH))
    ]
    weights = (n.dense("taps", (64, 1, 4)), n.dense("A_log", (2,)), n.dense("dt_bias", (2,)))
    attrs = GatedDeltaNetAttributes(key_heads=1, value_heads=2)
    operands = (x, a, b, conv, delta, log, *counts)
    y, *after = n.node("logged_delta_net", operands, weights, attrs).results
    for old, new in zip((conv, delta, log), after, strict=True):
        role = Role.STATE_LOG if old is log else Role.STATE
        n.output(new, old.name, role, alias=old.name)
    return y


def multi_axis_rope(n: Net, width: int = 128, axes=(0, 1, 2, 0, 1, 2, 0, 0)) -> object:
    x = n.take(width=width)
    count = max(axes) + 1
    positions = n.input("positions", I64, (count, sym("b"), sym("t")), Role.POSITIONS)
    tables = [n.dense(name, (40, len(axes))) for name in ("cos", "sin")]
    attrs = MultiAxisRopeAttributes(2, axes)
    first = n.op("multi_axis_rope", x, positions, weights=tables, attrs=attrs)
    return n.op("multi_axis_rope", first, positions, weights=tables, attrs=attrs)


def encoder(n: Net) -> object:
    """Heads of 72, as vision towers have, four rows to a token."""
    rows = 4 * sym("t")
    q, k, v = (n.take(name, 144, rows=rows) for name in "qkv")
    y = n.op("multi_head_attention", q, k, v, attrs=MultiHeadAttentionAttributes(2, 0.1))
    return n.op("merge_rows", y, attrs=MergeRowsAttributes(4))


def replaced(n: Net) -> object:
    index = n.input("index", I64, (sym("b"), sym("t")), Role.IMAGE_ROWS)
    features = n.input("features", F32, (1, 3, 64), Role.IMAGE_FEATURES)
    features = n.op("squeeze", features, attrs=AxisAttributes(0))
    return n.op("replace_rows", n.take(dtype=F32), features, index)


def bag(n: Net) -> object:
    shape = (sym("b"), sym("t"), 4)
    ids = n.input("ids", I64, shape, Role.INTERPOLATION_IDS)
    factors = n.input("factors", F32, shape, Role.INTERPOLATION_WEIGHTS)
    return n.op("embedding_bag", ids, factors, weights=(n.dense("table", (25, 32), BF16),))


def layer_norm(n: Net) -> object:
    weights = n.dense("w", (64,)), n.dense("bias", (64,), BF16)
    return n.op("layer_norm", n.take(), weights=weights, attrs=LayerNormAttributes(1e-6))


def gelus(n: Net) -> object:
    x = n.op("gelu", n.take(), attrs=GeluAttributes("tanh"))
    return n.op("gelu", x, attrs=GeluAttributes("none"))


NETS: dict[str, Callable[[Net], object]] = {
    "add": lambda n: both(n, "add"),
    "sub": lambda n: both(n, "sub"),
    "mul": lambda n: both(n, "mul"),
    "swiglu": lambda n: both(n, "swiglu"),
    "silu": lambda n: n.op("silu", n.take()),
    "sigmoid": lambda n: n.op("sigmoid", n.take()),
    "tanh": lambda n: n.op("tanh", n.take()),
    "cast": lambda n: n.op("cast", n.take(), attrs=CastAttributes("f32")),
    "rms_norm": lambda n: n.op(
        "rms_norm", n.take(), weights=(n.dense("w", (16,)),), attrs=RmsNormAttributes(1e-6, 4)
    ),
    "add_rms_norm": lambda n: n.node(
        "add_rms_norm",
        (n.take("a"), n.take("b")),
        (n.dense("w", (64,)),),
        AddRmsNormAttributes(1e-6),
    ).results[0],
    "fake_quantize": lambda n: n.op(
        "fake_quantize",
        n.take(),
        weights=(n.dense("scale", ()),),
        attrs=FakeQuantizeAttributes("nvfp4<block=16>"),
    ),
    "layer_norm": layer_norm,
    "gelu": gelus,
    "multi_axis_rope": multi_axis_rope,
    "multi_head_attention": encoder,
    "merge_rows": encoder,
    "replace_rows": replaced,
    "embedding_bag": bag,
    "linear": lambda n: linear(n, n.dense("w", (64, 64), BF16), bias=True),
    "embedding": chosen,
    "argmax": chosen,
    "lookup": looked_up,
    "concat": tail,
    "tail": tail,
    "split": lambda n: n.node("split", (n.take(),), attrs=SplitAttributes(2, (16, 48))).results[1],
    "slice": lambda n: n.op("slice", n.take(), attrs=SliceAttributes(2, 3, 9)),
    "take_rows": lambda n: n.op("take_rows", n.take(), n.input("rows", I64, (4,), Role.LOGIT_ROWS)),
    "pad": padded,
    "unsqueeze": padded,
    "squeeze": lambda n: n.op("squeeze", n.take(rows=1), attrs=AxisAttributes(1)),
    "position_ids": rope,
    "rope": rope,
    "advance": lambda n: n.op("advance", n.number(), n.take()),
    "cache_update": lambda n: attention(n, causal=True),
    "attention": lambda n: attention(n, causal=False, rows=7),
    "split_heads": lambda n: n.node(
        "split_heads", (n.take(),), attrs=SplitHeadsAttributes(2, (8, 24))
    ).results[1],
    "constant": lambda n: n.op("constant", weights=(n.dense("w", (3, 4)),)),
    "causal_conv1d": convolved,
    "gated_delta_net": recurrent,
    "logged_delta_net": replayed,
}


FORMS = {
    "nvfp4": (lambda n: n.packed("w"), ["sm120", "sm121"]),
    "fp8": (lambda n: n.rounded("w", parse_encoding("fp8<tensor>")), ["sm89", "sm120"]),
    "fp8 channel": (lambda n: n.rounded("w", parse_encoding("fp8<channel>")), ["sm89"]),
    "int8": (lambda n: n.rounded("w", parse_encoding("int8<channel>")), ["sm86", "rtx"]),
    "int8_block": (
        lambda n: n.module.weights.derive("w8", "int8_codes", (n.packed("w"),)),
        ["sm86", "sm89", "rtx"],
    ),
}


def net(make: Callable[[Net], object]) -> Module:
    builder = Net()
    builder.output(make(builder), "y", Role.ACTIVATION)
    return builder.module


def built(trt, module: Module, device: str, progress=lambda *_: None, weights="embed"):
    session = Session(trt, get_device(device))
    bound = plan_weights(module, weights).bound
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "engine.plan")
        facts = build(session, module, module.graphs["main"], bound, path, progress)
        return path.read_bytes(), facts


def test_every_op_of_the_records_has_a_lowering_and_a_network():
    ops = set().union(*(d.ops for d in DEVICES.values() if d.library)) - {"call"}
    assert ops == set(LOWERINGS) == set(NETS)


def drawn(module: Module, rows: int) -> dict[str, np.ndarray]:
    """Random inputs of the right types; three rows are in the caches."""
    random = np.random.default_rng(rows)

    def draw(item) -> np.ndarray:
        shape = substitute(item.value.type.shape, {"b": 1, "t": rows})
        if item.role is Role.CACHE_LENGTH:
            return np.full(shape, 3)
        if item.role is Role.COMMIT_LENGTH:  # rows behind the final ones have no valid outputs
            return np.full(shape, rows)
        if item.role is Role.IMAGE_ROWS:
            return random.integers(-1, 3, shape)  # of three rows
        if item.value.type.dtype is I64:
            return random.integers(0, min(rows, 9), shape)  # the table has 9
        return random.standard_normal(shape).astype(np.float32)

    return {i.name: draw(i) for i in module.graphs["main"].inputs}


@pytest.mark.parametrize("rows", [1, 7, 8, 32])
def test_each_network_computes_what_the_ir_says(trt, rows):
    """Layer by layer as NVIDIA defines them, against the interpreter and against PyTorch."""
    for op, make in NETS.items():
        check_network(trt, net(make), rows, op)


@pytest.mark.parametrize("rows", [1, 7, 32])
@pytest.mark.parametrize("windows", [(1, 1), (4, 4), (None, 9), (2, 30), (100, 5)], ids=str)
def test_windows_are_masks(trt, windows, rows):
    module = net(lambda n: attention(n, causal=True, windows=windows))
    check_network(trt, module, rows, "attention")
    kinds = NetworkInterpreter(trt, module, "sm120").network(module.graphs["main"]).kinds
    assert kinds["SELECT"] == len(set(windows))  # layers of one window share their mask


def check_network(trt, module: Module, rows: int, what: str) -> None:
    """One rounding of the last result to bf16 may fall either way."""
    torch_executor = pytest.importorskip("edgecc.backends.torch").TorchExecutor
    inputs = drawn(module, rows)
    graph = module.graphs["main"]
    found = NetworkInterpreter(trt, module, "sm120").network(graph).run(inputs)
    for oracle in (Interpreter(module), torch_executor(module)):
        expected = oracle.run("main", inputs)
        for name, output in zip(output_names(graph), graph.outputs, strict=True):
            want = expected[output.name].astype(np.float64)
            error = np.abs(found[name] - want).max() / (np.abs(want).max() or 1)
            exact = output.value.type.dtype is not BF16
            assert error <= (2e-6 if exact else 2**-7), (what, name, error)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=lambda d: d.value)
def test_each_form_of_a_weight_computes_what_it_says(trt, form, dtype):
    make, (device, *_) = FORMS[form]
    module = net(lambda n: linear(n, make(n), dtype))
    inputs = drawn(module, 5)
    inputs["x"] = inputs["x"].astype(ml_dtypes.bfloat16).astype(np.float32)
    found = NetworkInterpreter(trt, module, device).network(module.graphs["main"]).run(inputs)
    expected = Interpreter(module, np.float64).run("main", inputs)["y"]
    error = np.abs(found["y"] - expected).max() / np.abs(expected).max()
    assert error <= (2e-6 if dtype is F32 else 2**-7)


@pytest.mark.parametrize("weights", POLICIES)
@pytest.mark.parametrize("device", ["sm86", "sm89", "sm120"])
def test_each_op_builds(trt, device, weights):
    """One builder for all: what it costs is starting it."""
    refused = {}
    record = get_device(device)
    has_fp4 = "nvfp4<block=16>" in record.native_activations
    nets = {op: NETS[op] for op in record.ops & NETS.keys() if has_fp4 or op != "fake_quantize"}
    nets["window"] = lambda n: attention(n, causal=True, windows=(4, None))
    for op, make in nets.items():
        try:
            plan, _ = built(trt, net(make), device, weights=weights)
            assert plan[:4] == b"ptrt" or len(plan) > 1000
        except UnsupportedError as error:
            refused[op] = str(error)
    assert refused == {}


FORMS = {
    "nvfp4": (lambda n: n.packed("w"), ["sm120", "sm121"]),
    "dense": (lambda n: n.dense("w", (64, 64), BF16), ["sm86", "sm89", "sm120"]),
    "fp8": (lambda n: n.rounded("w", parse_encoding("fp8<tensor>")), ["sm89", "sm120"]),
    "fp8 channel": (
        lambda n: n.rounded("w", parse_encoding("fp8<channel>")),
        ["sm89", "sm120"],
    ),
    "int8": (
        lambda n: n.rounded("w", parse_encoding("int8<channel>")),
        ["sm86", "sm89", "sm120", "rtx"],
    ),
    "int4": (lambda n: n.rounded("w", parse_encoding("int4<group=16>")), ["sm86", "sm89", "sm120"]),
    "int4 large groups": (lambda n: n.rounded("w", Int4(64)), ["rtx", "sm121"]),
    "int8_block": (
        lambda n: n.module.weights.derive("w8", "int8_codes", (n.packed("w"),)),
        ["sm86", "sm89", "sm120", "rtx"],
    ),
}


def operands(module: Module) -> set[Operand]:
    return set(graph_operands(module, module.graphs["main"]))


def nbytes(item) -> int:
    bits = {"f4e2m1": 4, "i4": 4, "f8e4m3": 8, "i8": 8, "bf16": 16, "f32": 32}
    return int(np.prod(item["shape"])) * bits[item["dtype"]] // 8


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=lambda d: d.value)
def test_forms_of_weights_build_where_the_records_say(trt, form, dtype):
    make, devices = FORMS[form]
    for device in devices:
        kind = form.partition(" ")[0]
        assert kind in get_device(device).native_linear | {"dense"}
        module = net(lambda n: linear(n, make(n), dtype))
        _, held = built(trt, module, device)
        _, facts = built(trt, module, device, weights="bind")
        assert (held["bound"], held["bound_bytes"]) == ([], 0)
        assert facts["weight_bytes"] == 0
        assert facts["bound_bytes"] == held["weight_bytes"] == sum(map(nbytes, facts["bound"]))
        names = PlanNames(module, module.graphs["main"])
        assert {i["name"] for i in facts["bound"]} == set(map(names.input, operands(module)))


def test_a_packed_weight_stays_packed_in_the_plan(trt):
    """4 bits and a scale of 8 for each 16; also where the product is in float32."""
    rows, columns = 8192, 2048
    for dtype in (BF16, F32):

        def make(n, dtype=dtype):
            return n.op(
                "linear",
                n.take(width=columns, dtype=dtype),
                weights=(n.packed("w", rows, columns),),
            )

        plan, facts = built(trt, net(make), "sm120")
        assert facts["weight_bytes"] == rows * columns * 9 // 16 + 4
        assert len(plan) <= 1.1 * facts["weight_bytes"]


def test_the_8_bit_form_of_nvfp4_is_exact():
    """Signed codes times half the block scale in bf16, then the global scale: no bit is lost."""
    codes, scale, _ = random_nvfp4(np.random.default_rng(1), 8, 64)
    halves = (scale.astype(np.float32) / 2).astype(ml_dtypes.bfloat16)
    values = (2 * unpack_e2m1(codes)).astype(np.int8).astype(ml_dtypes.bfloat16)
    product = values.astype(np.float64) * halves.astype(np.float64).repeat(16, axis=1)
    assert np.array_equal(product.astype(ml_dtypes.bfloat16).astype(np.float64), product)
    expected = nvfp4_values(codes, scale, np.float32(1))
    assert np.array_equal(product, expected)


@pytest.mark.parametrize("name", ["add", "cache_update"])
def test_two_builds_differ_at_most_in_numbers_of_sizes(trt, name):
    first, second = (built(trt, net(NETS[name]), "sm86")[0] for _ in range(2))
    assert same_but_for_numbers_of_sizes(first, second)


def same_but_for_numbers_of_sizes(first: bytes, second: bytes) -> bool:
    """The builder numbers sizes and places parts in an order of its own."""
    if len(first) != len(second):
        return False
    one, other = (np.frombuffer(plan, np.uint8).astype(int) for plan in (first, second))
    return np.sum(one != other) <= 16 and np.abs(one - other).max(initial=0) <= 8


def test_a_fine_tune_gets_the_plan_of_its_base(trt):
    """Bound weights leave no value in the plan; constants do."""

    def made(seed):
        def fill(n):
            n.random = np.random.default_rng(seed)
            y = linear(n, n.packed("w"), bias=True)
            return n.op(
                "rms_norm", y, weights=(n.dense("g", (64,)),), attrs=RmsNormAttributes(1e-6)
            )

        return net(fill)

    plans = {w: [built(trt, made(s), "sm120", weights=w)[0] for s in (1, 2)] for w in POLICIES}
    assert same_but_for_numbers_of_sizes(*plans["bind"])
    assert not same_but_for_numbers_of_sizes(*plans["embed"])


def test_progress_and_interruption(trt):
    seen = []
    built(trt, net(NETS["add"]), "sm86", lambda *step: seen.append(step))
    assert seen[0][0] == "Building engine"
    assert len({phase for phase, *_ in seen}) > 1
    assert all(0 <= done <= total for _, done, total in seen)

    def interrupt(stage, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        built(trt, net(NETS["add"]), "sm86", interrupt)


def test_a_refusal_names_the_node_and_the_weight(trt):
    """FP4 constants on a GPU without them, which legalize would have refused."""

    def make(n):
        n.at("model.layers.3.mlp.up_proj")
        return linear(n, n.packed("w"))

    with pytest.raises(UnsupportedError) as caught:
        built(trt, net(make), "sm86")
    (finding,) = caught.value.diagnostics
    assert caught.value.exit_code == 4
    assert "cannot build for sm86" in finding.message


def test_an_encoding_without_a_form(trt):
    def make(n):
        return linear(n, n.rounded("w", parse_encoding("fp8<block=16x16>")))

    with pytest.raises(LegalizeError, match="has no form in TensorRT"):
        built(trt, net(make), "sm86")
