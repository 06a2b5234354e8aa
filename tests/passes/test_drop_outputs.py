from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import UsageError
from edgecc.ir import Builder, DType, Module, Role, verify
from edgecc.ir.ops.control import CallAttributes
from edgecc.passes.base import PassContext
from edgecc.passes.dce import Dce
from edgecc.passes.drop_outputs import OPTIONAL, DropOutputs, DropOutputsOptions
from helpers.modules import evaluate, interface, module_text
from helpers.ops import assert_same_bits
from helpers.pairs import FEWER, PairOptions, pair, pair_inputs, pair_options

OWN = PairOptions(draft_head="own", draft_embedding="own")
CACHES = ["k_cache.0", "v_cache.0"]


def outputs(module: Module, graph: str = "draft") -> list[str]:
    return [o.name for o in module.graphs[graph].outputs]


def run(module: Module, roles: str | None = None) -> bool:
    text = module_text(module)
    made = DropOutputs() if roles is None else DropOutputs(DropOutputsOptions(roles))
    changed = made.run(module, PassContext())
    assert verify(module) == []
    assert changed is (module_text(module) != text)
    assert not made.run(module, PassContext())
    return changed


def test_drops_what_the_runtime_never_reads_by_default():
    module = pair(OWN)
    target = interface(module.graphs["target"])
    inputs = pair_inputs(module, OWN)
    before = evaluate(module, inputs)
    assert run(module)
    assert outputs(module) == [*CACHES, "proposals", "confidence"]
    assert interface(module.graphs["target"]) == target
    after = evaluate(module, inputs)
    assert_same_bits(list(after.values()), [before[name] for name in after])


@pytest.mark.parametrize(
    ("roles", "left"),
    [
        ("confidence", ["proposals", "base_logits", "draft_logits"]),
        ("base_logits+draft_logits", ["proposals", "confidence"]),
        ("base_logits+proposals", ["proposals", "draft_logits", "confidence"]),
    ],
)
def test_roles(roles, left):
    module = pair(OWN)
    assert run(module, roles)
    assert outputs(module) == CACHES + left


@pytest.mark.parametrize("roles", ["logits", "kv_cache+proposals", "hidden_tap"])
def test_outputs_the_runtime_needs_are_never_dropped(roles):
    module = pair(OWN)
    assert not run(module, roles)
    assert {r.value for r in OPTIONAL}.isdisjoint(roles.split("+"))


@pytest.mark.parametrize("roles", ["", "confidense", "confidence+", "confidence,base_logits"])
def test_unknown_roles(roles):
    module = pair(OWN)
    text = module_text(module)
    with pytest.raises(UsageError, match="drop-outputs: unknown role") as caught:
        DropOutputs(DropOutputsOptions(roles)).run(module, PassContext())
    assert caught.value.id == "pass/bad-option"
    assert "valid: activation, anchor" in caught.value.diagnostics[0].help
    assert module_text(module) == text


def test_dce_then_removes_the_work():
    module = pair(OWN)
    run(module, "confidence")
    assert Dce().run(module, PassContext())
    assert not any(s.startswith("draft.confidence") for s in module.weights)
    assert verify(module) == []


def test_nothing_to_drop():
    assert not run(pair(OWN, draft=False))


def test_outputs_of_called_graphs_stay():
    """They are part of the type of the call."""
    module = Module("m")
    main, f = Builder(module, "main"), Builder(module, "f")
    x, y = (b.input("x", DType.F32, (2,), Role.ACTIVATION) for b in (main, f))
    f.output(f.op("silu", y), "logits", Role.DRAFT_LOGITS)
    called = main.op("call", x, attrs=CallAttributes("f"))
    main.output(called, "logits", Role.DRAFT_LOGITS)
    main.output(called, "tokens", Role.ACTIVATION)
    assert run(module)
    assert (outputs(module, "main"), outputs(module, "f")) == (["tokens"], ["logits"])


def test_spelling():
    assert str(DropOutputs()) == "drop-outputs"
    assert str(DropOutputs(DropOutputsOptions("confidence"))) == "drop-outputs{roles=confidence}"


@FEWER
@given(pair_options(), st.sets(st.sampled_from(sorted(Role)), min_size=1), st.integers(0, 9))
def test_random_pairs(options, roles, seed):
    """What is not asked for stays, in order and bit for bit; what is not optional always stays."""
    options = replace(options, draft_head="own", draft_embedding="own")
    module = pair(options)
    inputs = pair_inputs(module, options, seed)
    before, graphs = evaluate(module, inputs), {g.name: interface(g) for g in module.entries()}
    kept = {
        name: [o for o in graph.outputs if o.role not in roles & set(OPTIONAL)]
        for name, graph in module.graphs.items()
    }

    made = DropOutputs(DropOutputsOptions("+".join(sorted(roles))))
    changed = made.run(module, PassContext())

    assert verify(module) == []
    assert {name: graph.outputs for name, graph in module.graphs.items()} == kept
    after = evaluate(module, inputs)
    assert list(after) == [f"{g}.{o.name}" for g, outputs in kept.items() for o in outputs]
    assert_same_bits(list(after.values()), [before[name] for name in after])
    assert changed is ({g.name: interface(g) for g in module.entries()} != graphs)
    assert not made.run(module, PassContext())
