from __future__ import annotations

import numpy as np
import pytest

from edgecc.errors import InternalError
from edgecc.ir import Builder, DType, Location, Module, Role
from edgecc.ir.ops.control import CallAttributes
from edgecc.ir.ops.shape import SplitAttributes
from helpers.pairs import DRAFT_HEAD, TARGET_HEAD, PairOptions, pair
from helpers.weights import dense


def test_location_text():
    assert str(Location()) == ""
    assert str(Location("config.json: eps")) == "config.json: eps"
    assert str(Location("a", ("fuse-qkv", "dce"))) == "a <- fuse-qkv <- dce"
    assert str(Location("", ("dce",))) == " <- dce"
    assert Location("a") == Location("a", ())


def small() -> Builder:
    b = Builder(Module("m"), "main")
    x = b.input("x", DType.F32, (4,), Role.ACTIVATION)
    y = b.op("add", x, x, name="y")
    b.op("mul", y, x)
    return b


def test_uses_are_kept_in_order_and_by_position():
    graph = small().graph
    x, (add, mul) = graph.inputs[0].value, graph.nodes
    assert list(x.uses) == [(add, 0), (add, 1), (mul, 1)]
    assert x.users() == [add, mul]
    assert list(add.result.uses) == [(mul, 0)]
    assert mul.result.users() == []


def test_changing_operands_moves_uses():
    graph = small().graph
    x, (add, mul) = graph.inputs[0].value, graph.nodes
    mul._set_operands((x, x))
    assert add.result.uses == {}
    assert list(x.uses) == [(add, 0), (add, 1), (mul, 0), (mul, 1)]
    assert mul.operands == (x, x)


def test_names_default_to_the_op():
    b = Builder(Module("m"), "main")
    x = b.input("x", DType.F32, (4,), Role.ACTIVATION)
    node = b.node("split", (x,), attrs=SplitAttributes(0, (1, 2, 1)), names=("a", "b"))
    assert [r.name for r in node.results] == ["a", "b", "split"]
    assert [(r.producer, r.index) for r in node.results] == [(node, 0), (node, 1), (node, 2)]
    assert repr(node) == "%a, %b, %split = split(%x)"
    assert repr(x) == "%x: f32[4]"
    with pytest.raises(InternalError, match="split has 3 results"):
        _ = node.result


def test_finding_inputs_and_outputs():
    graph = pair().graphs["target"]
    assert graph.input("token_ids").role is Role.TOKEN_IDS
    assert [i.name for i in graph.by_role(Role.KV_CACHE)] == ["k_cache.0", "v_cache.0"]
    assert [o.name for o in graph.outputs_by_role(Role.LOGITS)] == ["logits"]
    assert graph.by_role(Role.ANCHOR) == []
    with pytest.raises(InternalError, match="graph @target has no input %ids"):
        graph.input("ids")


def test_signature():
    signature = small().graph.signature()
    assert [str(t) for t in signature.inputs] == ["f32[4]"]
    assert signature.outputs == ()


def test_weights_of_graphs_are_listed_once_in_order():
    module = Module("m")
    for symbol in ("a", "b"):
        module.weights.add(symbol, dense(np.ones((4, 4))))
    module.weights.add("c", dense(np.zeros((4, 4))))
    module.weights.alias("c", "a")
    for name, symbols in (("f", "bcb"), ("g", "a"), ("h", "")):
        b = Builder(module, name)
        x = b.input("x", DType.F32, (4,), Role.ACTIVATION)
        for symbol in symbols:
            x = b.op("linear", x, weights=(symbol,))
    assert list(module.graphs["f"].used_weights()) == ["b", "c"]
    assert module.weight_users() == {"b": ["f"], "a": ["f", "g"]}


def test_entries_are_the_graphs_nobody_calls():
    module = Module("m")
    main, f, g = (Builder(module, n) for n in ("main", "f", "g"))
    values = [b.input("x", DType.F32, (2,), Role.ACTIVATION) for b in (main, f, g)]
    for b, v in zip((main, f, g), values, strict=True):
        b.output(v, "y", Role.ACTIVATION)
    for callee in ("f", "g", "f"):
        main.op("call", values[0], attrs=CallAttributes(callee))
    f.op("call", values[1], attrs=CallAttributes("g"))
    assert list(main.graph.callees()) == ["f", "g"]
    assert module.entries() == [main.graph]
    assert list(module.scope()) == ["main", "f", "g"]
    assert repr(main.graph) == "<graph @main: 3 nodes>"


def test_the_test_pair_borrows_what_the_target_has():
    module = pair(PairOptions(draft_head="same", draft_embedding="own"))
    table = module.weights
    assert table.digest(DRAFT_HEAD) == table.digest(TARGET_HEAD)
    assert table.digest("draft.embed_tokens.weight") != table.digest("target.embed_tokens.weight")
    tied = pair(PairOptions(head="tied", draft_head="same")).weights
    assert tied.digest(DRAFT_HEAD) == tied.digest("target.embed_tokens.weight")
