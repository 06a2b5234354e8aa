from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.devices import DEVICES
from edgecc.ir import Module, Role, verify
from edgecc.passes.base import PassContext
from edgecc.passes.choose_tokens import ChooseTokens
from edgecc.passes.default import default_pipeline
from edgecc.passes.equivalence import compare_modules
from helpers.modules import evaluate, interface, module_text
from helpers.ops import assert_same_bits
from helpers.pairs import FEWER, PairOptions, pair, pair_inputs, pair_options

OWN = PairOptions(draft_head="own", draft_embedding="own")


def known(options: PairOptions) -> Module:
    module = pair(options)
    module.metadata["target"] = {"num_tokens": options.tokens}
    return module


@FEWER
@given(pair_options(), st.integers(0, 9))
def test_random_pairs(options, seed):
    """What was there stays bit for bit, and the new output is NumPy's choice among real tokens."""
    module = known(options)
    inputs = {g: i for g, i in pair_inputs(module, options, seed).items() if g == "target"}
    before, graphs = evaluate(module, inputs), {g.name: interface(g) for g in module.entries()}
    assert ChooseTokens().run(module, PassContext())
    assert verify(module) == []
    (chosen,) = module.graphs["target"].outputs_by_role(Role.CHOSEN_TOKENS)
    assert chosen is module.graphs["target"].outputs[-1]
    assert {n: g for n, g in graphs.items() if n != "target"} == {
        g.name: interface(g) for g in module.entries() if g.name != "target"
    }
    after = evaluate(module, inputs)
    assert_same_bits([after[name] for name in before], list(before.values()))
    best = np.argmax(before["target.logits"][..., : options.tokens], axis=-1)
    np.testing.assert_array_equal(after["target.chosen_tokens"], best)
    text = module_text(module)
    assert not ChooseTokens().run(module, PassContext())
    assert module_text(module) == text


@pytest.mark.parametrize("metadata", [None, [], {}, {"num_tokens": "5"}, {"num_tokens": 0}])
def test_without_a_number_of_tokens_it_says_why_not(metadata):
    module = pair(OWN)
    if metadata is not None:
        module.metadata["target"] = metadata
    text, ctx = module_text(module), PassContext()
    assert not ChooseTokens().run(module, ctx)
    assert module_text(module) == text
    (remark,) = ctx.remarks
    assert (remark.where, remark.applied) == ("@target", False)
    assert "number of tokens" in remark.message


def test_the_new_node_comes_from_the_head():
    module = known(OWN)
    ChooseTokens().run(module, PassContext())
    logits, chosen = module.graphs["target"].nodes[-2:]
    assert chosen.operands == (logits.result,)
    assert chosen.location.origin == logits.location.origin
    assert chosen.location.passes[-1] == "choose-tokens"


@pytest.mark.parametrize("device", sorted(DEVICES))
def test_devices_that_choose(device):
    """Reading logits is free on the CPU, and its bundles stay as they are."""
    record = DEVICES[device]
    passes = [p.name for p in default_pipeline(record)]
    assert ("choose-tokens" in passes) is record.chooses_tokens is bool(record.library)
    if record.chooses_tokens:
        assert passes.index("choose-tokens") < passes.index("assign-precision")
        assert passes.index("choose-tokens") < passes.index("outline-shared")


def test_a_check_between_passes_takes_the_new_output_and_compares_the_others():
    before, after = known(OWN), known(OWN)
    ChooseTokens().run(after, PassContext())
    found = compare_modules(before, after)
    assert found.difference is None
    assert "target.logits" in found.compared
    after.graphs["target"].outputs[-1].role = Role.LOGITS
    assert "other outputs: chosen_tokens" in str(compare_modules(before, after).difference)
