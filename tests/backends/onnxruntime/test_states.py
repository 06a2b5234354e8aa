"""Targets with states in the real engine: rollback by replay, starts from zero, checked calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgecc.backends.artifact import check_artifact
from edgecc.backends.onnxruntime import OrtEngine
from edgecc.backends.runtime import Session
from edgecc.errors import BundleError, RequestError
from edgecc.roles import Role
from helpers.checkpoints import write_draft
from helpers.hybrid import FULL, LINEAR, HybridSizes, write_hybrid_target
from helpers.lifted import Lifted
from helpers.lowered_pairs import LoweredPair, target_inputs

CAPACITY = 40
VOCAB = 256
LAYERS = {
    "recurrent first": HybridSizes(layer_types=(LINEAR, LINEAR, FULL), value_heads=6),
    "attention first": HybridSizes(layer_types=(FULL, LINEAR), key_heads=3, value_heads=3, taps=2),
    "no attention": HybridSizes(layer_types=(LINEAR,), key_dim=5, value_dim=7),
}


class Hybrid:
    """A pair, its lifted module behind the interpreter, and an engine."""

    def __init__(self, folder: Path, sizes: HybridSizes, device: str, *, mixed: bool) -> None:
        self.sizes = sizes
        layers = len(sizes.layer_types)
        target = write_hybrid_target(folder / "t", sizes, mixed=mixed)
        draft = write_draft(
            folder / "d",
            hidden=32,
            layers=1,
            target_layers=layers,
            target_layer_ids=sorted({0, layers - 1}),
            block_size=4,
        )
        self.pair = LoweredPair(
            folder / "out", target, draft, device=device, max_model_len=CAPACITY
        )
        self.engine = self.pair.engine()
        self.lifted = Lifted(target, draft, dtype=np.float32, max_model_len=CAPACITY)

    def session(self, chunk: int = 8) -> Session:
        return Session(self.engine.entry("target"), self.engine.entry("draft"), prefill_chunk=chunk)


@pytest.fixture(
    scope="module",
    params=[
        ("recurrent first", "cpu"),
        ("recurrent first", "onnx"),
        ("attention first", "cpu"),
        ("no attention", "onnx"),
    ],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def hybrid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hybrid]:
    name, device = request.param
    made = Hybrid(
        tmp_path_factory.mktemp("hybrid"), LAYERS[name], device, mixed=name == "attention first"
    )
    yield made
    made.engine.close()


def call(ids: list[int], start: int, replay: int, commit: int) -> dict[Role, np.ndarray]:
    counts = {Role.REPLAY_LENGTH: replay, Role.COMMIT_LENGTH: commit}
    return {**target_inputs(ids, start), **{role: np.array([n]) for role, n in counts.items()}}


TOKEN = st.integers(0, VOCAB - 1)
ROUNDS = st.lists(
    st.tuples(st.lists(TOKEN, max_size=4), st.integers(0, 4), TOKEN), min_size=1, max_size=4
)


@settings(max_examples=8)
@given(prompt=st.lists(TOKEN, min_size=1, max_size=12), rounds=ROUNDS, chunk=st.integers(2, 7))
def test_rounds_against_the_lifted_graph(
    hybrid: Hybrid, prompt: list[int], rounds: list[Any], chunk: int
) -> None:
    """Whatever is proposed and accepted: logits are those of the accepted tokens."""
    session, lifted = hybrid.session(chunk), hybrid.lifted
    lifted.reset()
    expected = lifted.target(prompt)["logits"][-1]
    scale = np.abs(expected).max()
    tolerance = hybrid.pair.tolerance * scale
    found = session.run(session.prefill(prompt, features=False))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
    session.push(1)
    for proposals, accepted, token in rounds:
        proposals = proposals[: session.room]
        accepted = min(accepted, len(proposals))
        anchor = session.tokens[-1]
        logits = session.run(session.verify(proposals, features=False))
        wanted = lifted.target([anchor, *proposals[:accepted]])["logits"]
        np.testing.assert_allclose(logits[: accepted + 1], wanted, rtol=0, atol=tolerance)
        session.commit(accepted, token)


@settings(max_examples=8)
@given(prompt=st.lists(TOKEN, min_size=1, max_size=12), rounds=ROUNDS, chunk=st.integers(2, 7))
def test_rounds_have_the_bits_of_single_steps(
    hybrid: Hybrid, prompt: list[int], rounds: list[Any], chunk: int
) -> None:
    fast: list[bytes] = []
    session = hybrid.session(chunk)
    session.run(session.prefill(prompt, features=False))
    session.push(1)
    for proposals, accepted, token in rounds:
        proposals = proposals[: session.room]
        accepted = min(accepted, len(proposals))
        logits = session.run(session.verify(proposals, features=False))
        fast += [row.tobytes() for row in logits[: accepted + 1]]
        session.commit(accepted, token)
    tokens = list(session.tokens)
    session.reset()
    session.run(session.prefill(prompt, features=False))
    session.push(1)
    plain = []
    for token in tokens[len(prompt) + 1 :]:
        plain.append(session.run(session.verify([], features=False))[0].tobytes())
        session.commit(0, token)
    assert fast == plain


def test_a_sequence_starts_from_zero(hybrid: Hybrid) -> None:
    target = hybrid.engine.entry("target")
    first = target.run(call([1, 2, 3], 0, 0, 3), [Role.LOGITS])[Role.LOGITS].copy()
    target.run(call([4, 5], 3, 0, 0), [])
    target.run(call([6], 5, 2, 1), [])
    again = target.run(call([1, 2, 3], 0, 0, 3), [Role.LOGITS])[Role.LOGITS]
    assert again.tobytes() == first.tobytes()


def test_bytes_a_sequence_holds(hybrid: Hybrid) -> None:
    """States once, and a log of an anchor and 4 proposals."""
    sizes, target = hybrid.sizes, hybrid.engine.entry("target")
    held = {
        role: sum(array.nbytes for name, array in target._carried.items() if name in names)
        for role in (Role.STATE, Role.STATE_LOG)
        if (names := {i.name for i in hybrid.pair.module.graphs["target"].by_role(role)})
    }
    layers = sizes.layer_types.count(LINEAR)
    values = sizes.value_heads * sizes.value_dim
    channels = 2 * sizes.key_heads * sizes.key_dim + values
    state = values * sizes.key_dim + channels * (sizes.taps - 1)
    assert held[Role.STATE] == 4 * layers * state
    assert target.log_rows == 5
    assert held[Role.STATE_LOG] == 4 * layers * 5 * (channels + 2 * sizes.value_heads)


@pytest.mark.parametrize(
    ("ids", "replay", "commit", "message"),
    [
        ([1, 2], 6, 0, "replay_length is 6, expected 0 to 5"),
        ([1, 2], -1, 0, "replay_length is -1"),
        ([1, 2], 0, 3, "commit_length is 3, expected 0 to 2"),
        ([1, 2], 0, -1, "commit_length is -1"),
        ([1] * 6, 0, 0, "6 rows that are not final, the log has 5"),
    ],
)
def test_counts_are_checked(
    hybrid: Hybrid, ids: list[int], replay: int, commit: int, message: str
) -> None:
    target = hybrid.engine.entry("target")
    before = {name: array.copy() for name, array in target._carried.items()}
    with pytest.raises(RequestError, match=message):
        target.run(call(ids, 0, replay, commit), [Role.LOGITS])
    for name, array in target._carried.items():
        np.testing.assert_array_equal(array, before[name])


def test_counts_are_inputs(hybrid: Hybrid) -> None:
    with pytest.raises(RequestError, match="commit_length"):
        hybrid.engine.entry("target").run(target_inputs([1], 0), [Role.LOGITS])


@pytest.mark.parametrize("role", ["state_log", "replay_length", "commit_length", "cache_length"])
def test_an_artifact_with_states_has_what_they_need(hybrid: Hybrid, role: str) -> None:
    manifest = dict(hybrid.pair.artifact.manifest)
    entries = {name: dict(entry) for name, entry in manifest["entries"].items()}
    target = entries["target"]
    target["inputs"] = [
        {**p, "role": "activation"} if p["role"] == role else p for p in target["inputs"]
    ]
    with pytest.raises(BundleError, match=f"it has states and no input {role}"):
        check_artifact({**manifest, "entries": entries}, "edgecc.backends.onnxruntime", "models")


def test_a_state_of_unknown_size_is_refused(hybrid: Hybrid) -> None:
    manifest = dict(hybrid.pair.artifact.manifest)
    entries = {name: dict(entry) for name, entry in manifest["entries"].items()}
    target = entries["target"]
    target["inputs"] = [
        {**p, "shape": ["b", "n", 3]} if p["role"] == "state" else p for p in target["inputs"]
    ]
    with pytest.raises(BundleError, match=r"state 'conv_state\.\d' has shape"):
        check_artifact({**manifest, "entries": entries}, "edgecc.backends.onnxruntime", "models")


def test_engines_of_one_bundle_have_states_of_their_own(hybrid: Hybrid) -> None:
    other: OrtEngine = hybrid.pair.engine()
    one, two = hybrid.engine.entry("target"), other.entry("target")
    one.run(call([1, 2, 3], 0, 0, 3), [])
    two.run(call([9, 8], 0, 0, 2), [])
    found = one.run(call([4], 3, 0, 1), [Role.LOGITS])[Role.LOGITS].copy()
    one.run(call([1, 2, 3, 4], 0, 0, 4), [])
    expected = one.run(call([1, 2, 3, 4], 0, 0, 4), [Role.LOGITS])[Role.LOGITS][:, 3:]
    assert found.tobytes() == expected.tobytes()
    other.close()
