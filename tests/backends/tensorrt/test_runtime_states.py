"""Targets with recurrent layers on a simulated GPU: states, their logs, and what is replayed."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from math import prod
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgecc.backends.base import Role
from edgecc.backends.runtime import Session
from edgecc.backends.runtime.golden import NARROW, SAME_ARITHMETIC
from edgecc.backends.runtime.golden_calls import next_logits, prompt_inputs, replayed_logits
from edgecc.backends.runtime.near_ties import compare_near_tokens
from edgecc.backends.tensorrt.executable import TrtExecutable
from edgecc.devices import get_device
from edgecc.engine_facts import engine_facts, engine_lines
from edgecc.errors import BackendError, BundleError, RequestError
from edgecc.memory_plan import plan_memory
from helpers.checkpoints import write_draft
from helpers.goldens import relative
from helpers.hybrid import FULL, LINEAR, HybridSizes, write_hybrid_target
from helpers.lowered_pairs import PAIRS, Reference, draft_inputs, target_inputs
from helpers.remembering import RememberingInterpreter
from helpers.simulated_bundle import DEVICE, SimulatedBundle, lowered
from helpers.simulated_cuda import UNWRITTEN
from helpers.tensorrt_network import NetworkInterpreter

ROWS = 5
"""Rows of a round: four proposals and the anchor."""

CAPACITY = 64
VOCAB = 256
STATES = (Role.STATE, Role.STATE_LOG)
PROMPT = [7, 3, 11, 2, 5, 13, 1, 9, 4, 8, 6, 21, 30, 12, 17, 19, 23, 29, 31, 37]
REAL = PAIRS / "tiny-qwen3_5-mixed", PAIRS / "tiny-qwen3_5-dspark"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A small pair of random weights: two recurrent layers, and one of attention between them."""
    folder = tmp_path_factory.mktemp("hybrid")
    sizes = HybridSizes(layer_types=(LINEAR, FULL, LINEAR), value_heads=6)
    target = write_hybrid_target(folder / "t", sizes, mixed=True)
    draft = write_draft(
        folder / "d",
        hidden=32,
        layers=1,
        target_layers=3,
        target_layer_ids=(0, 2),
        block_size=ROWS - 1,
    )
    return target, draft


@pytest.fixture(scope="module")
def opened(tmp_path_factory, trt, cuda_runtime, module):
    """One bundle for all examples of a test with many."""
    bundle = SimulatedBundle(tmp_path_factory.mktemp("opened"), trt, cuda_runtime, module)
    engine = bundle.open()
    yield bundle, engine
    engine.close()


def call(ids: Iterable[int], start: int, replay: int, commit: int):
    counts = {Role.REPLAY_LENGTH: replay, Role.COMMIT_LENGTH: commit}
    return {**target_inputs(ids, start), **{role: np.array([n]) for role, n in counts.items()}}


def reference(module, entry):
    made = Reference(module, entry)
    made.interpreter = RememberingInterpreter(module)
    return made


def greedy(module, prompt, count):
    """Plain decoding by the interpreter: all rows are final, nothing is ever replayed."""
    target, limit = reference(module, "target"), module.metadata["target"]["num_tokens"]
    tokens, made, start = list(prompt), [], 0
    while len(made) < count:
        new = tokens[start:]
        logits = target.run(call(new, start, 0, len(new)))[Role.LOGITS]
        start = len(tokens)
        made.append(int(logits[0, -1, :limit].argmax()))
        tokens.append(made[-1])
    return made


def answer(generator, prompt=PROMPT, count=12, **arguments):
    found = generator.generate(token_ids=prompt, max_new_tokens=count, ignore_eos=True, **arguments)
    return found.token_ids


def wrong_from(places):
    """Makes a draft err at the next of some places of its block, again and again."""
    turns = []

    def change(graph, results):
        if graph == "draft.tail":
            place = places[len(turns) % len(places)]
            turns.append(place)
            made = results["proposals"].copy()
            made[:, place:] = (made[:, place:] + 1) % 200
            results["proposals"] = made

    return change


def places_of(engine):
    """Both places of each state and log, by name."""
    target = engine.entry("target")
    ports = (*target.interface.states, *target.interface.logs)
    updates = {old: new for new, old in target.interface.updates.items()}
    return {p.name: (target.values[p.name], target.values[updates[p.name]]) for p in ports}


def content(bundle, value):
    nbytes = prod(value.shape) * value.dtype.itemsize
    return bundle.cuda.device(value.address, nbytes)


# --- calls ----------------------------------------------------------------------------------------


def test_calls_compute_what_the_graphs_do(make, module):
    """Prompts, steps, verifications and replays, in turn from one place of the states to the other.

    Calls of fewer rows than a round are padded, which the interpreter's are not.
    """
    engine = make().open()
    target, expected = engine.entry("target"), reference(module, "target")
    calls = [
        ([5, 9, 1], 0, 0, 3),
        ([4, 8, 8, 8, 8], 3, 0, 0),
        ([2, 6, 6], 5, 2, 0),
        ([7], 8, 3, 1),
        ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], 9, 0, 12),
        ([1, 2], 21, 0, 0),
        ([11], 21, 0, 1),
    ]
    for ids, start, replay, commit in calls:
        inputs = call(ids, start, replay, commit)
        found = target.run(inputs, [Role.LOGITS, Role.HIDDEN_TAP, Role.CHOSEN_TOKENS])
        for role, array in expected.run(inputs).items():
            np.testing.assert_array_equal(found[role], array, err_msg=str(role))


TOKEN = st.integers(0, VOCAB - 1)
ROUNDS = st.lists(
    st.tuples(st.lists(TOKEN, max_size=4), st.integers(0, 4), TOKEN), min_size=1, max_size=5
)


@settings(max_examples=10)
@given(prompt=st.lists(TOKEN, min_size=1, max_size=20), rounds=ROUNDS, chunk=st.integers(5, 16))
def test_whatever_is_rejected_leaves_no_trace(opened, module, prompt, rounds, chunk):
    """Logits are those of the accepted tokens, each of which the reference takes for good."""
    _, engine = opened
    session = Session(engine.entry("target"), prefill_chunk=chunk)
    expected = reference(module, "target")
    found = session.run(session.prefill(prompt, features=False))
    want = expected.run(call(prompt, 0, 0, len(prompt)))[Role.LOGITS][0, -1]
    compare(found, want)
    session.push(1)
    for proposals, accepted, token in rounds:
        accepted = min(accepted, len(proposals))
        kept = [session.tokens[-1], *proposals[:accepted]]
        start = session.start
        logits = session.run(session.verify(proposals, features=False))
        want = expected.run(call(kept, start, 0, len(kept)))[Role.LOGITS][0]
        compare(logits[: accepted + 1], want)
        session.commit(accepted, token)


def compare(found, want):
    """Up to rounding: rows of a call are computed together, and their number differs."""
    np.testing.assert_allclose(found, want, rtol=0, atol=0.01 * np.abs(want).max())


def test_a_sequence_starts_from_zero(make):
    """Whatever the one before it left in either place, numbers or none."""
    bundle = make()
    engine = bundle.open()
    target = engine.entry("target")
    first = target.run(call([1, 2, 3], 0, 0, 3), [Role.LOGITS])[Role.LOGITS]
    for turn in (0, 1):
        while target.turn != turn:
            target.run(call([4], 3, 0, 1), [])
        for value in places_of(engine)[f"delta_state.{2 * turn}"]:
            content(bundle, value)[...] = UNWRITTEN
        for value in places_of(engine)["state_log.0"]:
            content(bundle, value)[...] = UNWRITTEN
        again = target.run(call([1, 2, 3], 0, 0, 3), [Role.LOGITS])[Role.LOGITS]
        assert again.tobytes() == first.tobytes()


@pytest.mark.parametrize(
    ("ids", "replay", "commit", "message"),
    [
        ([1, 2], 6, 0, "replay_length is 6, expected 0 to 5"),
        ([1, 2], 0, 3, "commit_length is 3, expected 0 to 2"),
        ([1] * 6, 0, 0, "6 rows that are not final, the log has 5"),
    ],
)
def test_counts_are_checked_before_anything_runs(make, ids, replay, commit, message):
    bundle = make()
    target = bundle.open().entry("target")
    with pytest.raises(RequestError, match=message):
        target.run(call(ids, 0, replay, commit), [Role.LOGITS])
    assert (bundle.simulation.enqueued, target.turn) == ([], 0)


# --- decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("capturable", [True, False])
def test_the_text_is_that_of_plain_decoding(make, module, capturable):
    bundle = make(capturable=capturable)
    expected = greedy(module, PROMPT, 12)
    with bundle.generator() as generator:
        assert answer(generator, speculation=False) == expected
        for wanted in range(1, ROWS) if capturable else [ROWS - 1]:
            assert answer(generator, num_speculative_tokens=wanted) == expected
    assert bool(bundle.cuda.launched) is capturable


@pytest.mark.parametrize("places", [(0,), (2, 0, 4, 1, 3)])
def test_rejections_everywhere(make, module, places):
    expected = greedy(module, PROMPT, 16)
    bundle = make(change=wrong_from(places))
    with bundle.generator() as generator:
        for wanted in (1, 4):
            assert answer(generator, count=16, num_speculative_tokens=wanted) == expected


@pytest.mark.parametrize("length", [1, 16, 33])
def test_prompts_of_any_length_one_after_another(make, module, length):
    """Chunks have 16 rows. A text in between leaves other states behind."""
    prompt = (PROMPT + PROMPT)[:length]
    expected = greedy(module, prompt, 6)
    with make().generator() as generator:
        for other in ([200, 3], PROMPT):
            answer(generator, other, 3)
            assert answer(generator, prompt, 6) == expected
            assert answer(generator, prompt, 6, speculation=False) == expected


def test_a_batch_has_the_texts_of_single_requests(make, checkpoints):
    """Each slot has states, logs and turns of its own."""
    with make(lowered(*checkpoints, max_batch_size=2)).generator() as generator:
        wanted = [
            {"token_ids": PROMPT[:length], "max_new_tokens": count, "ignore_eos": True, **more}
            for length, count, more in (
                (9, 8, {}),
                (1, 5, {"speculation": False}),
                (6, 6, {"num_speculative_tokens": 2}),
            )
        ]
        singles = [generator.generate(**arguments) for arguments in wanted]
        found = generator.generate_batch([generator.request(**a) for a in wanted])
        assert [f.token_ids for f in found] == [s.token_ids for s in singles]


def test_to_the_last_position(make, module):
    """The draft is left out near the end: its last rows are replayed by a plain step."""
    prompt = PROMPT + PROMPT + PROMPT[:12]
    expected = greedy(module, prompt, CAPACITY - 52)
    with make().generator() as generator:
        for speculation in (False, True):
            assert answer(generator, prompt, 99, speculation=speculation) == expected


def test_a_target_alone(make, checkpoints):
    """Every target with states has a log, without a draft of one row; steps need none of it."""
    alone = lowered(checkpoints[0], None)
    bundle = make(alone)
    with bundle.generator() as generator:
        assert answer(generator, count=9) == greedy(alone, PROMPT, 9)
        assert generator.engine.entry("target").log_rows == 1
    assert bundle.cuda.launched == 6  # of 8 rounds, one for each place ran as it is


def test_rounds_do_what_calls_do(make, module):
    engine = make().open()
    target, draft = reference(module, "target"), reference(module, "draft")
    taps = target.run(call(PROMPT[:16], 0, 0, 16))[Role.HIDDEN_TAP][0]
    engine.entry("target").run(call(PROMPT[:16], 0, 0, 16), [Role.HIDDEN_TAP])
    start, length, replay = 16, 0, 0
    for anchor, accepted in ((3, 0), (5, 4), (2, 3), (8, 3), (1, 4), (4, 0), (6, 1), (9, 0)):
        found = engine.rounds.run(np.array([anchor]), start, len(taps), length, replay)
        proposals = draft.run(draft_inputs(taps, anchor, length))[Role.PROPOSALS][0]
        np.testing.assert_array_equal(found.proposals, proposals)
        want = target.run(call([anchor, *proposals], start, replay, 0))
        np.testing.assert_array_equal(found.chosen, want[Role.CHOSEN_TOKENS][0])
        length, replay = start, accepted + 1
        start += replay
        taps = want[Role.HIDDEN_TAP][0, :replay]
    for anchor in (7, 2, 9):
        found = engine.rounds.run(np.array([anchor]), start, 0, length, replay)
        want = target.run(call([anchor], start, replay, 1))
        assert found.chosen[0] == want[Role.CHOSEN_TOKENS][0, 0]
        start, replay = start + 1, 0


def test_a_round_can_begin_a_sequence(make):
    engine = make().open()
    steps = [(np.array([token]), start, 0, 0) for start, token in enumerate(PROMPT)]
    first = [engine.rounds.run(*step).chosen[0] for step in steps]
    assert [engine.rounds.run(*step).chosen[0] for step in steps] == first


def test_two_graphs_for_a_number_of_features(make):
    """One for each place that states are read from; the host passes two counts more."""
    bundle = make()
    engine = bundle.open()
    engine.entry("target").run(call(PROMPT[:5], 0, 0, 5), [Role.HIDDEN_TAP])
    start, length, replay = 5, 0, 0
    engine.rounds.run(np.array([1]), start, 5, length, replay)
    for step in range(6):
        length, start, replay = start, start + 2, 2
        waits, moved = bundle.cuda.synchronized, dict(bundle.cuda.copied)
        launched = bundle.cuda.launched
        engine.rounds.run(np.array([step]), start, 2, length, replay)
        assert bundle.cuda.launched - launched == (1 if step > 1 else 0)
        assert bundle.cuda.synchronized == waits + 1
        assert bundle.cuda.copied["HostToDevice"] - moved["HostToDevice"] == 40
        confidence = 4 * 4
        read = bundle.cuda.copied["DeviceToHost"] - moved["DeviceToHost"]
        assert read == 8 * (4 + ROWS) + confidence


# --- memory ---------------------------------------------------------------------------------------


def test_states_have_two_places_and_caches_one(make, module):
    """Bound once, zeroed, and as many bytes as the memory plan says."""
    bundle = make()
    engine = bundle.open()
    bundle.cuda.run()
    target = engine.entry("target")
    places = places_of(engine)
    assert len(places) == 6  # of two layers
    for first, second in places.values():
        assert first.address != second.address
        assert not content(bundle, first).any()
        assert not content(bundle, second).any()
    for updated, old in target.interface.updates.items():
        same = target.values[updated].address == target.values[old].address
        assert same is (old not in places)
    before = {n: v.address for n, v in target.values.items()}
    target.run(call(PROMPT[:12], 0, 0, 12), [Role.LOGITS])
    target.run(call([1], 12, 0, 1), [Role.LOGITS])
    assert before == {n: v.address for n, v in target.values.items()}
    held = sum(len(content(bundle, value)) for pair in places.values() for value in pair)
    (planned, *_) = plan_memory(module, get_device(DEVICE), {}).parts
    assert planned.states == held
    facts = engine_facts({DEVICE: bundle.artifact})
    assert facts["runs_on"][DEVICE]["state_bytes"] == held
    told = f"{DEVICE}: states and their logs, twice: {held:,} bytes a sequence"
    assert told in "\n".join(engine_lines(facts, weights=False))
    caches = (target.values[c.name] for c in target.interface.caches)
    assert planned.caches == sum(len(content(bundle, value)) for value in caches)


def test_an_engine_does_not_write_what_it_reads(make):
    """The simulation notices a runtime that binds a state in place."""
    target = make().open().entry("target")

    def in_place(self, value, slot):
        return self.values[self.interface.updates.get(value, value)].slot(slot)

    with (
        patch.object(TrtExecutable, "_place", in_place),
        pytest.raises(AssertionError, match="is written over"),
    ):
        target.run(call([1, 2], 0, 0, 2), [])


def test_what_is_no_number_does_not_outlive_its_sequence(make):
    """Not in a log either, whose rows that do not count are multiplied by 0."""
    spoilt = []

    def change(graph, results):
        if graph == "target.body" and spoilt:
            for name, array in results.items():
                if name.startswith(spoilt[0]):
                    array[...] = np.nan
            spoilt.pop()

    bundle = make(change=change)
    with bundle.generator() as generator:
        expected = answer(generator, PROMPT[:5])
        for name in ("delta_state", "conv_state"):
            spoilt.append(name)
            with pytest.raises(BackendError, match="is not a number"):
                answer(generator)
            bundle.cuda.run()
            for pair in places_of(generator.engine).values():
                assert not any(content(bundle, value).any() for value in pair)
            assert answer(generator, PROMPT[:5]) == expected


def test_a_log_that_is_too_short_for_a_round(make):
    bundle = make()
    artifact = copy.deepcopy(bundle.artifact)
    for port in artifact["entries"]["target"]["inputs"]:
        if port["role"] == Role.STATE_LOG:
            port["shape"][1] = ROWS - 1
    with pytest.raises(BundleError, match=r"log 'state_log\.0' has 4 rows, a round has 5"):
        bundle.open(artifact)


def test_an_update_of_another_size(make):
    """The plan of another model, say: writing it would end behind the memory of the state."""
    bundle = make()
    artifact = copy.deepcopy(bundle.artifact)
    outputs = artifact["entries"]["target"]["outputs"]
    first, second = (o for o in outputs if o["role"] == Role.STATE and "0" in o["name"])
    first["alias"], second["alias"] = second["alias"], first["alias"]
    with pytest.raises(BundleError, match="is no update of"):
        bundle.open(artifact)
    assert bundle.cuda.memory == {}


# --- networks -------------------------------------------------------------------------------------


def test_networks_of_the_builder_write_the_text_of_plain_decoding(make, trt, module):
    """What the builder gets, evaluated layer by layer, where rows are one triangular system.

    Its float32 sums depend on the rows before them, so texts may part, but only at a near tie.
    """
    bundle = make(interpreter=NetworkInterpreter(trt, module, DEVICE))
    with bundle.generator() as generator:
        plain = answer(generator, count=8, speculation=False)
        same_text(generator, PROMPT, plain, greedy(module, PROMPT, 8))
        same_text(generator, PROMPT, answer(generator, count=8), plain)


def same_text(generator, prompt, found, plain):
    check = compare_near_tokens("text", generator, prompt, found, plain, SAME_ARITHMETIC.values)
    assert check.passed, check


@pytest.mark.slow
@pytest.mark.parametrize("evaluated", ["graphs", "networks"])
def test_the_shipped_pair_writes_the_text_of_its_cpu_bundle(make, trt, tmp_path, evaluated):
    import edgecc

    pair = lowered(*REAL, max_model_len=96, chunk=16)
    network = NetworkInterpreter(trt, pair, DEVICE) if evaluated == "networks" else None
    edgecc.compile(*REAL, out=tmp_path / "cpu", max_model_len=96, prefill_chunk=16)
    prompt = [(7919 * i) % 4000 for i in range(1, 20)]
    with (
        make(pair, interpreter=network).generator() as generator,
        edgecc.load(tmp_path / "cpu") as cpu,
    ):
        plain = answer(generator, prompt, 24, speculation=False)
        for wanted in range(1, 8) if network is None else (3, 7):
            found = answer(generator, prompt, 24, num_speculative_tokens=wanted)
            same_text(generator, prompt, found, plain)
            assert network or found == plain
        same_text(generator, prompt, answer(cpu, prompt, 24), plain)
        targets = [e.engine.entry("target") for e in (generator, cpu)]
        golden = {"token_ids": np.array(prompt[:16]), "anchor": np.array(plain[:1])}
        for logits in (next_logits, replayed_logits):
            for target in targets:
                target.run(prompt_inputs(target, golden), [])
            gpu_row, cpu_row = (logits(target, golden).copy() for target in targets)
            assert relative(gpu_row, cpu_row) <= NARROW.values
