"""A log for each recurrent layer: what is computed stays, whatever is accepted in between."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import UsageError
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.ir import Builder, DType, Interpreter, Module, SymbolRange, sym
from edgecc.ir.ops.shape import SplitAttributes
from edgecc.ir.ops.state import GatedDeltaNetAttributes
from edgecc.ir.verifier import check_property
from edgecc.passes.add_state_replay import AddStateReplay, AddStateReplayOptions
from edgecc.passes.base import PassContext
from edgecc.passes.equivalence import compare_modules
from edgecc.roles import Role
from helpers.checkpoints import write_draft
from helpers.hybrid import FULL, LINEAR, HybridSizes, write_hybrid_target
from helpers.modules import check_pass, modules
from helpers.weights import dense

B, T = sym("b"), sym("t")


def layers(kinds: list[tuple[int, int, int]], seed: int = 0, metadata: int | None = None) -> Module:
    """A chain of layers, each of (key heads, value heads per key head, taps)."""
    rng = np.random.default_rng(seed)
    module = Module("m", symbols={"b": SymbolRange(1, 2), "t": SymbolRange(0, 4)})
    if metadata is not None:
        module.metadata["draft"] = {"num_speculative_tokens": metadata}
    b = Builder(module, "main").at("target: layers")
    x = None
    for i, (key_heads, repeat, taps) in enumerate(kinds):
        heads = key_heads * repeat
        keys, values = 2 * key_heads, 3 * heads
        channels = 2 * keys + values
        if x is None:
            x = b.input("x", DType.F32, (B, T, channels), Role.ACTIVATION)
        else:
            matrix = dense(rng.standard_normal((channels, x.type.shape[2])))
            x = b.op("linear", x, weights=(module.weights.add(f"in{i}", matrix),))
        gates = [b.input(f"{n}{i}", DType.F32, (B, T, heads), Role.ACTIVATION) for n in "ab"]
        states = [
            b.input(f"conv_state.{i}", DType.F32, (B, channels, taps - 1), Role.STATE),
            b.input(f"delta_state.{i}", DType.F32, (B, heads, 2, 3), Role.STATE),
        ]
        weights = [
            module.weights.add(f"{name}{i}", dense(rng.standard_normal(shape)))
            for name, shape in (("conv1d", (channels, 1, taps)), ("A_log", heads), ("dt", heads))
        ]
        mixed, conv = b.node("causal_conv1d", (x, states[0]), weights[:1]).results
        split = SplitAttributes(2, (keys, keys, values))
        qkv = b.node("split", (b.op("silu", mixed),), attrs=split).results
        attrs = GatedDeltaNetAttributes(key_heads, heads)
        operands = (*qkv, *gates, states[1])
        x, delta = b.node("gated_delta_net", operands, weights[1:], attrs).results
        for before, after in zip(states, (conv, delta), strict=True):
            b.output(after, before.name, Role.STATE, alias=before.name)
    assert x is not None
    b.output(x, "y", Role.ACTIVATION)
    return module


KINDS = st.lists(
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(2, 4)), min_size=1, max_size=3
)


@given(kinds=KINDS, rows=st.integers(0, 4), seed=st.integers(0, 9))
def test_layers(kinds, rows, seed):
    module = layers(kinds, seed)
    assert check_property(module, "states-replayed")
    assert check_pass(AddStateReplay(AddStateReplayOptions(rows)), module)
    assert not check_property(module, "states-replayed")


@given(modules())
def test_random_modules(module):
    check_pass(AddStateReplay(), module)


@pytest.mark.parametrize(("proposals", "rows", "expected"), [(None, 0, 1), (7, 0, 8), (7, 3, 3)])
def test_rows_of_the_log(proposals, rows, expected):
    module = layers([(1, 2, 4), (2, 1, 4)], metadata=proposals)
    AddStateReplay(AddStateReplayOptions(rows)).run(module, PassContext())
    logs = module.graphs["main"].by_role(Role.STATE_LOG)
    assert [i.value.type.shape[1] for i in logs] == [expected, expected]
    assert [i.name for i in logs] == ["state_log.0", "state_log.1"]
    outputs = module.graphs["main"].outputs_by_role(Role.STATE_LOG)
    assert [(o.name, o.alias) for o in outputs] == [(i.name, i.name) for i in logs]
    for role in (Role.REPLAY_LENGTH, Role.COMMIT_LENGTH):
        assert len(module.graphs["main"].by_role(role)) == 1


def test_negative_rows():
    with pytest.raises(UsageError, match="rows is -1"):
        AddStateReplay(AddStateReplayOptions(-1)).run(layers([(1, 1, 2)]), PassContext())


def test_a_wrong_rewrite_would_be_found():
    """The comparison of `--check` fills in the added inputs, and still compares everything else."""
    before, after = layers([(1, 2, 4)]), layers([(1, 2, 4)], seed=1)
    AddStateReplay().run(after, PassContext())
    found = compare_modules(before, after)
    assert found.difference is not None
    right = layers([(1, 2, 4)])
    AddStateReplay().run(right, PassContext())
    comparison = compare_modules(before, right, seeds=(0, 1, 2))
    assert comparison.difference is None
    assert len(comparison.compared) == 3


# --- rounds of speculation ------------------------------------------------------------------------

SIZES = HybridSizes(layer_types=(FULL, LINEAR), head_dim=16)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A lifted target, and the same with logs of four rows."""
    folder = tmp_path_factory.mktemp("pair")
    target = write_hybrid_target(folder / "t", SIZES)
    draft = write_draft(
        folder / "d", hidden=32, layers=1, target_layers=2, target_layer_ids=(0, 1), block_size=3
    )
    options = LiftOptions(max_model_len=40)
    plain, logged = lift(target, draft, options), lift(target, draft, options)
    AddStateReplay().run(logged, PassContext())
    return Interpreter(plain), Interpreter(logged)


class Target:
    """The target's graph with what lives between calls."""

    def __init__(self, interpreter):
        self.interpreter, self.length, self.replay = interpreter, 0, 0
        self.graph = interpreter.module.graphs["target"]
        roles = (Role.KV_CACHE, Role.STATE, Role.STATE_LOG)
        self.kept = {
            i.name: np.zeros((1, *i.value.type.shape[1:]), np.float32)
            for role in roles
            for i in self.graph.by_role(role)
        }

    def run(self, ids, keep=None):
        """Logits `[T, V]` of the rows of `ids`, of which the first `keep` stay (all: now)."""
        counts = {"replay_length": self.replay, "commit_length": len(ids) if keep is None else 0}
        given_ = {
            "token_ids": np.array([ids]),
            "cache_length": np.array([self.length]),
            "logit_rows": np.arange(len(ids)),
            **({n: np.array([c]) for n, c in counts.items()} if self.logged else {}),
        }
        out = self.interpreter.run("target", {**given_, **self.kept})
        self.kept = {name: out[name] for name in self.kept}
        self.length += len(ids) if keep is None else keep
        self.replay = keep or 0
        return out["logits"][0]

    @property
    def logged(self):
        return bool(self.graph.by_role(Role.STATE_LOG))


TOKEN = st.integers(0, 255)


@given(
    prompt=st.lists(TOKEN, min_size=1, max_size=4),
    rounds=st.lists(
        st.tuples(st.lists(TOKEN, min_size=1, max_size=4), st.integers(1, 4)), max_size=3
    ),
)
def test_rounds_give_the_bits_of_accepted_tokens_one_by_one(pair, prompt, rounds):
    plain, logged = map(Target, pair)
    expected = [plain.run([token]) for token in prompt]
    np.testing.assert_array_equal(logged.run(prompt), np.concatenate(expected))
    for ids, accepted in rounds:
        accepted = min(accepted, len(ids))
        found = logged.run(ids, keep=accepted)[:accepted]
        expected = [plain.run([token]) for token in ids[:accepted]]
        np.testing.assert_array_equal(found, np.concatenate(expected))
    logged.run([1])
    plain.run([1])
    for item in plain.graph.by_role(Role.STATE):
        np.testing.assert_array_equal(logged.kept[item.name], plain.kept[item.name])
