"""The contract of the runtime, on the graphs of a small pair."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgecc.backends.base import Executable, Role
from edgecc.backends.runtime import Session
from edgecc.backends.torch import TorchExecutable, TorchExecutor
from edgecc.errors import RequestError
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.ir import Interpreter, Module
from edgecc.passes.add_state_replay import AddStateReplay, AddStateReplayOptions
from edgecc.passes.base import PassContext
from helpers.hybrid import FULL, LINEAR, HybridSizes, write_hybrid_target
from helpers.lifted import Lifted
from helpers.pairs import PairOptions, pair

OPTIONS = PairOptions(layers=2, draft_head="own", draft_embedding="own")


@pytest.fixture(scope="module")
def module() -> Module:
    return pair(OPTIONS)


def target(module: Module, dtype: torch.dtype = torch.float64) -> TorchExecutable:
    made: Executable = TorchExecutable(TorchExecutor(module, dtype), "target")
    assert isinstance(made, TorchExecutable)
    return made


def call(ids, start, rows=None):
    count = len(ids)
    return {
        Role.TOKEN_IDS: np.array([ids], dtype=np.int64),
        Role.CACHE_LENGTH: np.array([start], dtype=np.int64),
        Role.LOGIT_ROWS: np.arange(count) if rows is None else np.array(rows, dtype=np.int64),
    }


def test_caches_live_between_calls(module):
    """Three calls over the same caches give the rows of one; a rollback is a smaller length."""
    ids = [3, 1, 4, 1, 5]
    (logits,) = target(module).run(call(ids, 0), [Role.LOGITS]).values()
    pieces = target(module)
    pieces.run(call([9, 9, 9], 0), [])  # thrown away
    first = pieces.run(call(ids[:2], 0), [Role.LOGITS])[Role.LOGITS]
    second = pieces.run(call(ids[2:], 2), [Role.LOGITS])[Role.LOGITS]
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), logits, atol=1e-6)


def test_results_are_those_of_the_interpreter_in_the_dtype_of_the_graph(module):
    graph = module.graphs["target"]
    caches = {i.name: np.zeros((1, *i.value.type.shape[1:])) for i in graph.by_role(Role.KV_CACHE)}
    inputs = {"token_ids": [[3, 1]], "cache_length": [0], "logit_rows": [1]}
    expected = Interpreter(module, np.float64).run("target", {**inputs, **caches})
    wanted = [Role.HIDDEN_TAP, Role.LOGITS]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = target(module, dtype).run(call([3, 1], 0, [1]), wanted)
        assert list(found) == wanted
        assert {a.dtype for a in found.values()} == {np.dtype(np.float32)}
        tolerance = 0.2 if dtype is torch.bfloat16 else 1e-5
        np.testing.assert_allclose(found[Role.LOGITS], expected["logits"], atol=tolerance)


def test_only_what_is_wanted_is_computed(module):
    seen: list[str] = []

    class Names(TorchExecutor):
        def node(self, node, operands):
            seen.extend(r.name for r in node.results)
            return super().node(node, operands)

    made = TorchExecutable(Names(module), "target")
    made.run(call([1], 0), [])
    assert "logits" not in seen
    assert any(name.startswith("k_cache") for name in seen)


def test_capacity():
    made = target(pair(PairOptions(rope=False), draft=False))
    assert made.capacity == PairOptions().capacity
    made.run(call([1] * 8, 0), [])
    made.run(call([1] * 2, 8), [])
    with pytest.raises(RequestError, match=r"rows 9\.\.11 exceed the cache capacity 10"):
        made.run(call([1] * 2, 9), [])


def test_a_refused_call_changes_no_cache(module):
    made = target(module)
    made.run(call([3, 1], 0), [])
    again = target(module)
    again.run(call([3, 1], 0), [])
    with pytest.raises(RequestError, match="index 99"):
        again.run(call([99], 2), [Role.LOGITS])
    with pytest.raises(RequestError, match="take_rows: index 5"):  # after the caches' nodes
        again.run(call([7], 2, [5]), [Role.LOGITS])
    for answer in (made, again):
        answer.run(call([4], 2), [])
    found, expected = (a.run(call([1], 3), [Role.LOGITS])[Role.LOGITS] for a in (again, made))
    np.testing.assert_array_equal(found, expected)


def test_missing_and_unknown_roles(module):
    made = target(module)
    inputs = call([1], 0)
    del inputs[Role.LOGIT_ROWS]
    with pytest.raises(RequestError) as caught:
        made.run(inputs, [])
    assert caught.value.id == "run/inputs"
    assert "takes cache_length, logit_rows, token_ids, got cache_length, token_ids" in str(
        caught.value
    )
    with pytest.raises(RequestError, match="has no output proposals") as caught:
        made.run(call([1], 0), [Role.PROPOSALS])
    assert caught.value.id == "run/outputs"
    assert caught.value.diagnostics[0].notes == ("it has hidden_tap, logits",)


def test_unknown_graph(module):
    with pytest.raises(RequestError, match="no graph @vision"):
        TorchExecutable(TorchExecutor(module), "vision")


def test_states_start_from_zero_and_go_back(tmp_path):
    """A target with states: verifications of which a part is accepted, and a second sequence."""
    target = write_hybrid_target(tmp_path / "t", HybridSizes(layer_types=(LINEAR, FULL)))
    plain = Lifted(target, max_model_len=32)
    logged = lift(target, None, LiftOptions(max_model_len=32))
    AddStateReplay(AddStateReplayOptions(3)).run(logged, PassContext())
    executable = TorchExecutable(TorchExecutor(logged, torch.float64), "target")
    assert executable.log_rows == 3
    session = Session(executable, prefill_chunk=4)
    for prompt in ([5, 6, 7, 8, 9], [1, 2]):
        plain.reset()
        session.reset()
        found = [session.run(session.prefill(prompt, features=False))]
        expected = [plain.target(prompt)["logits"][-1]]
        session.push(3)
        for proposals, accepted in (([1, 2], 1), ([4], 0), ([], 0), ([6, 7], 2)):
            anchor = session.tokens[-1]
            found.extend(session.run(session.verify(proposals, features=False))[: accepted + 1])
            expected.extend(plain.target([anchor, *proposals[:accepted]])["logits"])
            session.commit(accepted, 9)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_several_sequences_are_those_of_each_alone(tmp_path):
    """Two slots: prompts of other lengths, then one call for both, one of them padded."""
    target = write_hybrid_target(tmp_path / "t", HybridSizes(layer_types=(LINEAR, FULL)))
    logged = lift(target, None, LiftOptions(max_model_len=32, max_batch_size=3))
    AddStateReplay(AddStateReplayOptions(3)).run(logged, PassContext())
    executor = TorchExecutor(logged, torch.float64)
    together = TorchExecutable(executor, "target", slots=3)
    assert (together.slots, together.batch_size) == (3, 3)
    prompts, steps = [[5, 6, 7, 8, 9], [1, 2]], [[4, 3, 2], [7]]
    expected = []
    for slot, (prompt, ids) in enumerate(zip(prompts, steps, strict=True), start=1):
        alone = TorchExecutable(executor, "target")
        for executable, place in ((alone, 0), (together, slot)):
            executable.run(batch([prompt], [0], [len(prompt)]), (), slot=place)
        commit = int(len(ids) == 1)
        expected.append(alone.run(batch([ids], [len(prompt)], [commit]), (Role.LOGITS,)))
    inputs = batch([[4, 3, 2], [7, 0, 0]], [5, 2], [0, 1])
    found = together.run(inputs, (Role.LOGITS,), slot=1)[Role.LOGITS]
    for index, (own, ids) in enumerate(zip(expected, steps, strict=True)):
        logits = own[Role.LOGITS][0]
        np.testing.assert_allclose(found[index, : len(ids)], logits, rtol=0, atol=1e-5)
    with pytest.raises(RequestError, match="2 sequences from slot 2 on, of 3"):
        together.run(inputs, (Role.LOGITS,), slot=2)


def batch(ids, lengths, commits):
    return {
        Role.TOKEN_IDS: np.array(ids),
        Role.CACHE_LENGTH: np.array(lengths),
        Role.LOGIT_ROWS: np.arange(len(ids[0])),
        Role.REPLAY_LENGTH: np.zeros(len(ids), dtype=np.int64),
        Role.COMMIT_LENGTH: np.array(commits),
    }
