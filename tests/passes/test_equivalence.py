"""Comparing two versions of a module: what is found, what is left out, and why."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from edgecc.errors import EdgeccError
from edgecc.ir import Builder, DType, Module, Rewriter, Role, SymbolRange, Value, sym
from edgecc.ir.clone import clone_module
from edgecc.ir.ops.sampling import ArgmaxAttributes
from edgecc.ir.ops.shape import AxisAttributes, PadAttributes
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.passes.equivalence import Comparer, compare_modules
from edgecc.passes.fuse_qkv import FuseQkv
from helpers.modules import modules
from helpers.pairs import PairOptions, pair
from helpers.planted import ForgetCausal, Scale, SwapGate
from helpers.weights import dense

OWN = PairOptions(draft_head="own", draft_embedding="own")


def simple(scale: float = 1.0) -> Module:
    """`z = norm(x)`, `token = argmax(z)`, and a row of a table for the token."""
    module = Module("m", symbols={"t": SymbolRange(1, 4)})
    b = Builder(module, "g")
    x = b.input("x", DType.F32, (sym("t"), 8), Role.ACTIVATION)
    weight = module.weights.add("w", dense(np.full((8, 8), scale) + np.eye(8), DType.F32))
    z = b.op("linear", x, weights=(weight,))
    token = b.op("argmax", z, attrs=ArgmaxAttributes(8))
    b.output(z, "z", Role.ACTIVATION)
    b.output(token, "token", Role.PROPOSALS)
    b.output(b.op("embedding", token, weights=(weight,)), "row", Role.ACTIVATION)
    return module


@given(modules())
def test_a_module_equals_itself(module: Module) -> None:
    result = compare_modules(module, clone_module(module), seeds=range(2))
    assert result.difference is None
    assert result.skipped == {}
    assert len(result.compared) == sum(len(g.outputs) for g in module.entries())


def test_a_fusion_is_equal_to_the_bit() -> None:
    before = pair(OWN)
    after = clone_module(before)
    assert FuseQkv().run(after, PassContext())
    result = compare_modules(before, after, seeds=range(3))
    assert result.difference is None
    assert "draft.proposals" in result.compared


def test_the_first_difference_is_told() -> None:
    before, after = simple(), simple(1.5)
    found = compare_modules(before, after, seeds=(7,)).difference
    assert found is not None
    assert (found.graph, found.output, found.seed) == ("g", "z", 7)
    assert found.message.startswith("first at [0, 0]: ")
    assert "no difference is allowed" in found.message


def test_a_swap_is_found_in_every_graph() -> None:
    for graph in ("target", "draft"):
        before = pair(OWN, target=graph == "target", draft=graph == "draft")
        after = clone_module(before)
        SwapGate().run(after, PassContext())
        found = compare_modules(before, after).difference
        assert found is not None
        assert found.graph == graph


def test_a_mask_is_only_missed_with_one_row() -> None:
    """Sizes are drawn: with several seeds there is a call with two rows, where causal matters."""
    before = pair(OWN, draft=False)
    after = clone_module(before)
    ForgetCausal().run(after, PassContext())
    assert compare_modules(before, after, seeds=range(4)).difference is not None


@pytest.mark.parametrize(("tolerance", "differs"), [(0.0, True), (1e-6, True), (0.2, False)])
def test_a_tolerance_is_relative_to_the_largest_value(tolerance: float, differs: bool) -> None:
    before = pair(OWN, draft=False)
    after = clone_module(before)
    Scale().run(after, PassContext())
    result = compare_modules(before, after, tolerance=tolerance)
    assert (result.difference is not None) is differs


def test_choices_are_not_compared_where_numbers_may_change() -> None:
    before, after = simple(), simple(1.0 + 1e-6)
    result = compare_modules(before, after, tolerance=1e-3)
    assert result.difference is None
    assert result.compared == ("g.z",)
    assert result.skipped == {
        "g.token": "it depends on the choice of argmax",
        "g.row": "it depends on the choice of argmax",
    }
    assert compare_modules(before, clone_module(before)).compared == ("g.z", "g.token", "g.row")


def test_positions_are_no_choice() -> None:
    """They come from lengths and from the number of rows, whatever is in the rows."""
    before = pair(OWN)
    result = compare_modules(before, clone_module(before), tolerance=1e-3)
    assert set(result.skipped) == {
        "draft.proposals",
        "draft.draft_logits",
        "draft.confidence",
    }
    assert all("markov_chain" in reason for reason in result.skipped.values())
    assert {"draft.base_logits", "draft.k_cache.0", "target.logits"} <= set(result.compared)


def test_outputs_that_need_unbound_weights_are_left_out() -> None:
    before = pair(PairOptions())
    after = clone_module(before)
    BindSharedWeights().run(after, PassContext())
    result = compare_modules(before, after)
    assert result.difference is None
    assert result.skipped["draft.base_logits"].endswith("was unbound before the pass")
    assert {n for n in result.compared if n.startswith("draft.")} == set()
    assert "target.logits" in result.compared


def test_dropped_outputs_are_left_out_and_the_others_compared() -> None:
    before = pair(OWN)
    after = clone_module(before)
    after.graphs["draft"].outputs.pop()
    result = compare_modules(before, after)
    assert result.difference is None
    assert result.skipped == {"draft.confidence": "the pass has dropped it"}
    assert "draft.proposals" in result.compared


def test_graphs_and_inputs_must_stay() -> None:
    before = pair(OWN)
    after = clone_module(before)
    del after.graphs["draft"]
    gone = compare_modules(before, after).difference
    assert gone is not None
    assert gone.message == "the graph is gone"
    after = clone_module(before)
    after.graphs["draft"].inputs[0].value.name = "renamed"
    other = compare_modules(before, after).difference
    assert other is not None
    assert other.message == "other inputs: features, renamed"


def test_what_cannot_be_evaluated_any_more_is_a_difference() -> None:
    """Padded with an id that the table does not have."""

    def made(value: int) -> Module:
        module = Module("m")
        b = Builder(module, "g")
        ids: Value = b.input("ids", DType.I64, (2,), Role.TOKEN_IDS)
        ids = b.op("pad", ids, attrs=PadAttributes(0, 1, value))
        table = module.weights.add("w", dense(np.ones((4, 2)), DType.F32))
        b.output(b.op("embedding", ids, weights=(table,)), "y", Role.ACTIVATION)
        return module

    found = compare_modules(made(3), made(4)).difference
    assert found is not None
    assert found.output == ""
    assert found.message.startswith("cannot be evaluated any more: table @w: index 4 is outside")
    with pytest.raises(EdgeccError, match="index 4 is outside"):
        compare_modules(made(4), made(3))


def test_other_types_are_a_difference() -> None:
    def made(axis: int) -> Module:
        module = Module("m")
        b = Builder(module, "g")
        x = b.input("x", DType.F32, (2, 3), Role.ACTIVATION)
        b.output(b.op("unsqueeze", x, attrs=AxisAttributes(axis)), "y", Role.ACTIVATION)
        return module

    found = compare_modules(made(0), made(1)).difference
    assert found is not None
    assert found.message == "float64 [1, 2, 3] before, float64 [2, 1, 3] after"


def test_not_a_number_equals_itself_only() -> None:
    def made(value: float) -> Module:
        module = simple()
        module.weights.rebind("w", dense(np.full((8, 8), value), DType.F32))
        return module

    for tolerance in (0.0, 1e-3):
        for value in (np.nan, np.inf):
            same = compare_modules(made(value), made(value), tolerance=tolerance)
            assert same.difference is None
            for values in ((value, 1.0), (1.0, value)):
                found = compare_modules(*map(made, values), tolerance=tolerance).difference
                assert found is not None


def test_a_chain_evaluates_every_version_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgecc.passes import equivalence

    evaluated = []
    original = equivalence.evaluate

    def counting(module: Module, *rest: object) -> object:
        evaluated.append(module)
        return original(module, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(equivalence, "evaluate", counting)
    version = simple()
    comparer = Comparer((0,))
    for _ in range(3):
        following = clone_module(version)
        assert comparer.compare(version, following, chained=True).difference is None
        version = following
    assert len(evaluated) == 4
    wrong = clone_module(version)
    graph = wrong.graphs["g"]
    Rewriter(wrong, graph, "test").replace_weights(
        graph.nodes[0], [wrong.weights.add("other", dense(np.ones((8, 8)), DType.F32))]
    )
    assert comparer.compare(version, wrong, chained=True).difference is not None


def test_new_names_and_roles_of_the_interface_are_differences() -> None:
    before = simple()
    renamed, other_role, new_input_role = (clone_module(before) for _ in range(3))
    renamed.graphs["g"].outputs[0].name = "other"
    other_role.graphs["g"].outputs[0].role = Role.KV_CACHE
    new_input_role.graphs["g"].inputs[0].role = Role.KV_CACHE
    for after, message in (
        (renamed, "other outputs: other"),
        (other_role, "other outputs: "),
        (new_input_role, "other inputs: "),
    ):
        difference = compare_modules(before, after).difference
        assert difference is not None
        assert difference.message.startswith(message)
