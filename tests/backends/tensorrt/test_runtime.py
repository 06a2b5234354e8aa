"""The runtime on a simulated GPU, which evaluates the lowered graphs as they are."""

from __future__ import annotations

import copy
from unittest.mock import patch

import numpy as np
import pytest

from edgecc.backends.base import Role
from edgecc.backends.runtime.sampling import Sampler, SamplingParams
from edgecc.backends.tensorrt import engine as engine_module
from edgecc.errors import (
    BackendError,
    BundleError,
    RequestError,
    ResourceError,
    UnsupportedError,
)
from helpers.eagle3 import write_eagle3
from helpers.hybrid import FULL, LINEAR, HybridSizes, write_hybrid_target
from helpers.lowered_pairs import (
    REAL_DRAFT,
    REAL_TARGET,
    Reference,
    draft_inputs,
    target_inputs,
    write_pair,
)
from helpers.mtp import make_predictable
from helpers.remembering import RememberingInterpreter
from helpers.simulated_bundle import artifact_of, lowered

ROWS = 5
"""Rows of a round of the synthetic pair: four proposals and the anchor."""

PROMPT = [7, 3, 11, 2, 5, 13, 1, 9, 4, 8, 6, 21, 30, 12, 17, 19, 23, 29, 31, 37]


def reference(module, entry):
    made = Reference(module, entry)
    made.interpreter = RememberingInterpreter(module)
    return made


def greedy(module, prompt, count):
    """Plain decoding by the interpreter over the same lowered graph, row by row."""
    target, limit = reference(module, "target"), module.metadata["target"]["num_tokens"]
    tokens, made = list(prompt), []
    start = 0
    while len(made) < count:
        logits = target.run(target_inputs(tokens[start:], start))[Role.LOGITS]
        start = len(tokens)
        made.append(int(logits[0, -1, :limit].argmax()))
        tokens.append(made[-1])
    return made


# --- executables ----------------------------------------------------------------------------------


def test_calls_compute_what_the_graphs_do(make, module):
    engine = make().open()
    target, draft = engine.entry("target"), engine.entry("draft")
    expected = reference(module, "target")
    drafted = reference(module, "draft")
    start, length = 0, 0
    for rows in ([5, 9, 1], [4], [8] * 16, [7, 7, 2, 1, 6]):
        inputs = target_inputs(rows, start)
        found = target.run(inputs, [Role.LOGITS, Role.HIDDEN_TAP, Role.CHOSEN_TOKENS])
        want = expected.run(inputs)
        for role, array in found.items():
            np.testing.assert_array_equal(array, want[role], err_msg=str(role))
        taps = want[Role.HIDDEN_TAP][0]
        asked = draft_inputs(taps, 3, length)
        proposals = draft.run(asked, [Role.PROPOSALS])[Role.PROPOSALS]
        np.testing.assert_array_equal(proposals, drafted.run(asked)[Role.PROPOSALS])
        start, length = start + len(rows), length + len(rows)
    engine.close()


def test_a_call_without_outputs_updates_caches_and_runs_no_head(make, module):
    bundle = make()
    engine = bundle.open()
    target = engine.entry("target")
    target.run(target_inputs([5, 9, 1, 2], 0), [])
    assert [name for name, _ in bundle.simulation.enqueued] == ["target.body"]
    found = target.run(target_inputs([6], 4), [Role.LOGITS])[Role.LOGITS]
    want = reference(module, "target").run(target_inputs([5, 9, 1, 2, 6], 0))[Role.LOGITS]
    np.testing.assert_array_equal(found[0, 0], want[0, -1])


def test_profiles_follow_the_rows(make):
    """Rounds and shorter calls take the first profile, prompts the second."""
    bundle = make()
    target = bundle.open().entry("target")
    for rows in (1, ROWS, ROWS + 1, 16):
        target.run(target_inputs(range(rows), 0, [0]), [Role.HIDDEN_TAP])
    assert [p for _, p in bundle.simulation.enqueued] == [0, 0, 1, 1]


def test_capacity_leaves_room_for_padding(make, module):
    target = make().open().entry("target")
    assert target.capacity == 64
    target.run(target_inputs([1], 63), [])
    with pytest.raises(RequestError, match="exceed the cache capacity 64"):
        target.run(target_inputs([1, 2], 63), [])


# --- deep targets ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Twelve layers in five graphs; taps in the first and the last of them."""
    sizes = {"layers": 12, "hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 16}
    return lowered(*write_pair(tmp_path_factory.mktemp("deep"), **sizes, intermediate=32))


def test_a_deep_target_decodes_graph_by_graph(make, deep):
    bundle = make(deep)
    found = bundle.generator().generate(token_ids=PROMPT, max_new_tokens=8, ignore_eos=True)
    assert found.token_ids == greedy(deep, PROMPT, 8)
    ran = {name for name, _ in bundle.simulation.enqueued}
    assert {f"target.body.{i}" for i in range(5)} <= ran


def test_a_plan_that_serves_two_graphs_is_opened_once(make, deep):
    bundle = make(deep)
    artifact = copy.deepcopy(bundle.artifact)
    engines = artifact["engines"]
    kind = engines["target.body.2"]
    bodies = (n for n in engines if n.startswith("target.body"))
    same = [n for n in bodies if engines[n]["outputs"] == kind["outputs"]]
    assert "target.body.3" in same
    for name in same:
        engines[name] = copy.deepcopy(kind)
    with patch(
        "edgecc.backends.tensorrt.engine.deserialize", wraps=engine_module.deserialize
    ) as opened:
        bundle.open(artifact).close()
    files = [call.args[2].name for call in opened.call_args_list]
    assert sorted(files) == sorted({e["file"] for e in engines.values()})
    assert len(files) == len(engines) - len(same) + 1


# --- decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("capturable", [True, False])
def test_the_text_is_that_of_plain_decoding(make, module, capturable):
    bundle = make(capturable=capturable)
    expected = greedy(module, PROMPT, 12)
    with bundle.generator() as generator:
        for wanted in (None, 1, 4):
            found = generator.generate(
                token_ids=PROMPT,
                max_new_tokens=12,
                num_speculative_tokens=wanted,
                speculation=wanted is not None,
                ignore_eos=True,
            )
            assert found.token_ids == expected
            assert max(found.stats.proposed_by_round, default=0) == (wanted or 0)
    assert bool(bundle.cuda.launched) is capturable


def test_a_capture_that_fails(make, module):
    """Said once; the text comes all the same."""
    bundle = make()
    bundle.simulation.refuses_capture = True
    with (
        bundle.generator() as generator,
        pytest.warns(RuntimeWarning, match="without a CUDA graph: .*does not run") as told,
    ):
        found = generator.generate(token_ids=PROMPT, max_new_tokens=12, ignore_eos=True)
    assert found.token_ids == greedy(module, PROMPT, 12)
    assert bundle.cuda.launched == 0
    assert len([w for w in told if w.category is RuntimeWarning]) == 1


@pytest.fixture(scope="module")
def batched(checkpoints):
    """The same pair, for three sequences at a time."""
    return lowered(*checkpoints, max_batch_size=3)


def test_engines_run_one_sequence_whatever_the_batch(module, batched):
    alone, many = (artifact_of(m, "1")["engines"] for m in (module, batched))
    assert alone == many


def test_a_batch_has_the_texts_of_single_requests(make, batched):
    """One call after the other, each in its slot: text, and what is accepted, are the same."""
    prompts = [PROMPT, PROMPT[:1], PROMPT[3:12], PROMPT[5:9]]
    with make(batched).generator() as generator:
        options = [
            {"max_new_tokens": 4 + 2 * i, "num_speculative_tokens": i} if i else {}
            for i in range(len(prompts))
        ]
        options[0] = {"speculation": False, "max_new_tokens": 7}
        wanted = [
            {"token_ids": ids, "ignore_eos": True, **more}
            for ids, more in zip(prompts, options, strict=True)
        ]
        singles = [generator.generate(**arguments) for arguments in wanted]
        found = generator.generate_batch([generator.request(**a) for a in wanted])
        assert [f.token_ids for f in found] == [s.token_ids for s in singles]
        with generator.batch() as batch:
            assert batch.slots == 3


def test_slots_have_memory_of_their_own(make, batched):
    bundle = make(batched)
    engine = bundle.open()
    target = engine.entry("target")
    assert (target.slots, target.batch_size) == (3, 1)
    for slot, prompt in ((0, PROMPT[:4]), (2, PROMPT[4:9])):
        target.run(target_inputs(prompt, 0), [Role.LOGITS], slot=slot)
    held = []
    for cache in target.interface.caches:
        value = target.values[cache.name]
        nbytes = int(np.prod(value.shape)) * value.dtype.itemsize
        held.append([bundle.cuda.device(value.slot(slot), nbytes).any() for slot in range(3)])
    assert held == [[True, False, True]] * len(held)
    with pytest.raises(RequestError, match="after which 0 are held"):
        target.run(target_inputs(PROMPT[:4], 0), [Role.LOGITS], slot=3)


def test_to_the_last_position(make, module):
    prompt = PROMPT + PROMPT + PROMPT[:12]
    expected = greedy(module, prompt, 64 - 52)
    with make().generator() as generator:
        for speculation in (False, True):
            found = generator.generate(
                token_ids=prompt, max_new_tokens=99, speculation=speculation, ignore_eos=True
            )
            assert found.token_ids == expected


def test_one_wait_and_few_bytes_a_round(make):
    """No synchronization between draft and verification, and no logits on the host."""
    bundle = make()
    engine = bundle.open()
    engine.entry("target").run(target_inputs(PROMPT[:5], 0), [Role.HIDDEN_TAP])
    features, start, length = 5, 5, 0
    for step in range(4):
        waits, moved = bundle.cuda.synchronized, dict(bundle.cuda.copied)
        made = engine.rounds.run(np.array([9] * (features - 1) + [step]), start, features, length)
        assert bundle.cuda.synchronized == waits + 1
        assert bundle.cuda.copied["HostToDevice"] - moved["HostToDevice"] == 24
        confidence = 4 * 4
        read = bundle.cuda.copied["DeviceToHost"] - moved["DeviceToHost"]
        assert read == 8 * (4 + ROWS) + confidence
        assert (made.proposals.shape, made.chosen.shape) == ((4,), (ROWS,))
        length, features = start, 2
        start += 2
    assert bundle.cuda.launched == 2  # features 5 and 2 ran as they are once, then 2 as a graph


def test_rounds_do_what_calls_do(make, module):
    engine = make().open()
    target, draft = reference(module, "target"), reference(module, "draft")
    taps = target.run(target_inputs(PROMPT[:16], 0))[Role.HIDDEN_TAP][0]
    engine.entry("target").run(target_inputs(PROMPT[:16], 0), [Role.HIDDEN_TAP])
    start, length = 16, 0
    for anchor, accepted in ((3, 0), (5, 4), (2, 3), (8, 3), (1, 4), (4, 0)):
        following = np.array([9] * (len(taps) - 1) + [anchor])
        found = engine.rounds.run(following, start, len(taps), length)
        drafted = draft.run(draft_inputs(taps, anchor, length))
        proposals = drafted[Role.PROPOSALS][0]
        np.testing.assert_array_equal(found.proposals, proposals)
        np.testing.assert_array_equal(found.confidence, drafted[Role.CONFIDENCE][0])
        want = target.run(target_inputs([anchor, *proposals], start))
        np.testing.assert_array_equal(found.chosen, want[Role.CHOSEN_TOKENS][0])
        length, start = start, start + accepted + 1
        taps = want[Role.HIDDEN_TAP][0, : accepted + 1]
        np.testing.assert_array_equal(engine.rounds.features(accepted + 1)[0], taps)


@pytest.fixture(scope="module")
def chain(checkpoints, tmp_path_factory):
    """An EAGLE3 pair as it is lowered for the simulated GPU; its rounds have eight rows."""
    folder = tmp_path_factory.mktemp("chain") / "d"
    hidden = lowered(*checkpoints).metadata["target"]["hidden_size"]
    draft = write_eagle3(folder, hidden=hidden, taps=2, target_layer_ids=[0, 1])
    return lowered(checkpoints[0], draft)


def test_rounds_of_a_chain(make, chain):
    """Such a draft is told the token after each row of features; a prompt's chunk has many."""
    engine = make(chain).open()
    target, draft = reference(chain, "target"), reference(chain, "draft")
    tokens = [*PROMPT[:16], 3]
    taps = target.run(target_inputs(PROMPT[:16], 0))[Role.HIDDEN_TAP][0]
    engine.entry("target").run(target_inputs(PROMPT[:16], 0), [Role.HIDDEN_TAP])
    start, length = 16, 0
    for accepted in (0, 7, 3, 3, 7, 0):
        following = np.array(tokens[length + 1 :])
        found = engine.rounds.run(following, start, len(taps), length)
        inputs = {
            Role.FEATURES: taps[None],
            Role.NEXT_TOKEN_IDS: following[None],
            Role.CACHE_LENGTH: np.array([length]),
        }
        np.testing.assert_array_equal(found.proposals, draft.run(inputs)[Role.PROPOSALS][0])
        want = target.run(target_inputs([tokens[-1], *found.proposals], start))
        np.testing.assert_array_equal(found.chosen, want[Role.CHOSEN_TOKENS][0])
        tokens += [*found.proposals[:accepted].tolist(), int(found.chosen[accepted])]
        length, start = start, start + accepted + 1
        taps = want[Role.HIDDEN_TAP][0, : accepted + 1]
    engine.close()


def test_the_text_of_a_chain(make, chain):
    bundle = make(chain)
    with bundle.generator() as generator:
        found = generator.generate(token_ids=PROMPT, max_new_tokens=24, ignore_eos=True)
    assert found.token_ids == greedy(chain, PROMPT, 24)
    assert found.stats.proposed > 0
    assert bundle.cuda.launched


@pytest.mark.parametrize("capturable", [True, False])
def test_the_text_of_a_target_that_drafts_itself(make, tmp_path, capturable):
    """A hybrid whose states replay what its block has got right; steps share one engine."""
    sizes = HybridSizes(layer_types=(LINEAR, FULL))
    target = write_hybrid_target(tmp_path / "t", sizes, mtp=1)
    module = lowered(make_predictable(target, 0.8), None, method="mtp")
    bundle = make(module, capturable=capturable)
    with bundle.generator() as generator:
        for prompt in (PROMPT, PROMPT[:1]):
            plain = generator.generate(
                token_ids=prompt, max_new_tokens=30, speculation=False, ignore_eos=True
            )
            found = generator.generate(token_ids=prompt, max_new_tokens=30, ignore_eos=True)
            assert found.token_ids == plain.token_ids
            assert len({*found.stats.accepted_by_round}) > 1
    assert {"draft.body", "draft.step1", "lm_head"} <= {n for n, _ in bundle.simulation.enqueued}


def test_a_target_alone(make, checkpoints):
    alone = lowered(checkpoints[0], None)
    bundle = make(alone)
    with bundle.generator() as generator:
        found = generator.generate(token_ids=PROMPT, max_new_tokens=9, ignore_eos=True)
    assert found.token_ids == greedy(alone, PROMPT, 9)
    assert bundle.cuda.launched == 7


def sampled(module, prompt, count, params):
    """Plain sampling by the interpreter over the same lowered graph, row by row."""
    target, limit = reference(module, "target"), module.metadata["target"]["num_tokens"]
    sampler = Sampler(params, prompt, limit)
    tokens, start = list(prompt), 0
    for _ in range(count):
        logits = target.run(target_inputs(tokens[start:], start))[Role.LOGITS]
        start = len(tokens)
        tokens.append(sampler.choose(logits[0, -1]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8, "seed": 6},
        {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "frequency_penalty": 0.5, "seed": 2},
        {"repetition_penalty": 1.5, "logprobs": 2},
    ],
)
def test_what_is_sampled_is_chosen_from_logits(make, module, options):
    """The device chooses greedily, so it runs no round of such a request, and all of the next."""
    bundle = make()
    expected = sampled(module, PROMPT, 10, SamplingParams(**options))
    arguments = {"token_ids": PROMPT, "max_new_tokens": 10, "ignore_eos": True}
    with bundle.generator() as generator:
        for wanted in (None, 2, 4):
            found = generator.generate(
                num_speculative_tokens=wanted,
                speculation=wanted is not None,
                **arguments,
                **options,
            )
            assert found.token_ids == expected
            assert bundle.cuda.launched == 0
            assert max(found.stats.proposed_by_round, default=0) == (wanted or 0)
            assert len(found.logprobs or ()) == (10 if "logprobs" in options else 0)
        assert generator.generate(**arguments).token_ids == greedy(module, PROMPT, 10)
    assert bundle.cuda.launched > 0


@pytest.mark.slow
def test_the_shipped_pair_writes_the_text_of_its_cpu_bundle(make, tmp_path):
    import edgecc

    pair = lowered(REAL_TARGET, REAL_DRAFT)
    prompt = [(7919 * i) % 4000 for i in range(1, 12)]
    with make(pair).generator() as generator:
        plain = generator.generate(token_ids=prompt, max_new_tokens=24, speculation=False)
        found = generator.generate(token_ids=prompt, max_new_tokens=24)
    assert found.token_ids == plain.token_ids == greedy(pair, prompt, len(plain.token_ids))
    assert found.stats.accepted > 0
    edgecc.compile(REAL_TARGET, REAL_DRAFT, out=tmp_path / "cpu", max_model_len=64)
    with edgecc.load(tmp_path / "cpu") as cpu:
        text = cpu.generate(token_ids=prompt, max_new_tokens=24).token_ids
    assert found.token_ids[:8] == text[:8]


def test_kernels_are_compiled_once(make):
    """All contexts of a bundle, of which rounds have many, share what was compiled."""
    bundle = make()
    with bundle.generator() as generator:
        generator.generate(token_ids=PROMPT, max_new_tokens=12, ignore_eos=True)
    assert len(bundle.simulation.kernels) > 15
    assert len(set(map(id, bundle.simulation.kernels))) == 1


# --- memory ---------------------------------------------------------------------------------------


def test_everything_is_given_back(make):
    bundle = make()
    generator = bundle.generator()
    generator.generate(token_ids=PROMPT, max_new_tokens=9, ignore_eos=True)
    generator.close()
    generator.close()
    assert bundle.cuda.memory == {}
    assert bundle.cuda.pinned == {}
    assert all(not work for work in bundle.cuda.graphs.values())
    with pytest.raises(BackendError, match="the engine is closed"):
        generator.engine.entry("target")


def test_caches_are_cleared_and_bound_once(make, module):
    """They hold no NaN before they are written: masked rows are multiplied by 0."""
    bundle = make()
    engine = bundle.open()
    bundle.cuda.run()
    target = engine.entry("target")
    before = {n: v.address for n, v in target.values.items()}
    for cache in target.interface.caches:
        value = target.values[cache.name]
        nbytes = int(np.prod(value.shape)) * value.dtype.itemsize
        assert not bundle.cuda.device(value.address, nbytes).any()
    for updated, cache in target.interface.updates.items():
        assert target.values[updated].address == target.values[cache].address
    target.run(target_inputs(PROMPT[:12], 0), [Role.LOGITS])
    assert before == {n: v.address for n, v in target.values.items()}
    features = engine.entry("draft").address(Role.FEATURES)
    assert features == target.address(Role.HIDDEN_TAP)


@pytest.mark.parametrize("policy", ["embed", "bind"])
def test_weights_that_are_inputs(make, module, monkeypatch, policy):
    """Uploaded once, bound to every engine that takes them, and what a constant would hold."""
    monkeypatch.setattr("edgecc.backends.tensorrt.policy.SHARED_BYTES", 0)
    bundle = make(weights=policy)
    with bundle.generator() as generator:
        found = generator.generate(token_ids=PROMPT, max_new_tokens=8, ignore_eos=True)
    assert found.token_ids == greedy(module, PROMPT, 8)
    bound = {n for names in bundle.simulation.weights.values() for n in names}
    shared = set.intersection(
        *(set(bundle.simulation.weights[g]) for g in ("target.body", "draft.body"))
    )
    assert any("embed_tokens" in name for name in shared)
    assert (len(bound) > 20) is (policy == "bind")


def test_an_engine_without_its_weights(make):
    bundle = make(weights="bind")
    artifact = copy.deepcopy(bundle.artifact)
    artifact["engines"]["lm_head"]["bound"].pop()
    with pytest.raises(BundleError, match="in one of both only"):
        bundle.open(artifact)


def test_too_little_memory(make):
    bundle = make()
    bundle.cuda.limit = 100_000
    with pytest.raises(ResourceError, match="no memory left"):
        bundle.open()
    assert bundle.cuda.memory == {}


# --- what does not fit ----------------------------------------------------------------------------


def test_what_the_machine_lacks_is_said_before_a_plan_is_read(make, monkeypatch):
    bundle = make()
    opened = []
    monkeypatch.setattr(bundle.files, "file", opened.append, raising=False)
    for capability, reason in (
        (None, "there is no NVIDIA driver"),
        (0, "there is no GPU"),
        (89, "for GPUs of compute capability 12.0, and this one has 8.9"),
    ):
        bundle.cuda.capability = capability
        with pytest.raises(UnsupportedError, match=reason) as caught:
            bundle.open()
        assert caught.value.exit_code == 4
    assert opened == []


def test_another_version_of_the_library(make):
    bundle = make()
    artifact = {**bundle.artifact, "library_version": "1.6.0"}
    with pytest.raises(UnsupportedError, match=r"built with TensorRT-RTX 1\.6\.0, and 1\.7"):
        bundle.open(artifact)


def _retype(engine):
    engine["inputs"][0]["dtype"] = "bf16"


def _reshape(engine):
    engine["outputs"][0]["shape"][-1] += 1


def _unalias(engine):
    engine["outputs"][1]["alias"] = None


def _widen(engine):
    engine["profiles"][1]["shapes"]["token_ids"][2][1] += 1


def _drop(engine):
    del engine["profiles"][1]


@pytest.mark.parametrize(
    ("edit", "finding"),
    [
        (_retype, "type of 'cache_length' is"),
        (_reshape, "shape of 'taps' is"),
        (_unalias, "overwrites k_cache.0, not None"),
        (_widen, "profile prefill takes"),
        (_drop, "it has 2 profiles, not 1"),
    ],
)
def test_an_engine_that_is_not_what_the_manifest_says(make, edit, finding):
    bundle = make()
    artifact = copy.deepcopy(bundle.artifact)
    edit(artifact["engines"]["target.body"])
    with pytest.raises(BundleError, match="is not what the manifest says") as caught:
        bundle.open(artifact)
    assert finding in caught.value.diagnostics[0].message
    assert bundle.cuda.memory == {}


def test_an_engine_with_other_inputs_than_the_manifest_says(make):
    bundle = make()
    artifact = copy.deepcopy(bundle.artifact)
    artifact["engines"]["target.body"]["inputs"][0]["name"] = "other"
    step = artifact["programs"]["target"][0]
    step["inputs"]["other"] = step["inputs"].pop("cache_length")
    with pytest.raises(BundleError, match="in one of both only"):
        bundle.open(artifact)
    assert bundle.cuda.memory == {}


def test_a_file_that_is_no_plan(make, tmp_path):
    bundle = make()
    (tmp_path / "lm_head.plan").write_text("other")
    with pytest.raises(UnsupportedError, match="cannot open the engine"):
        bundle.open()
    (tmp_path / "lm_head.plan").write_text("")
    with pytest.raises(BundleError, match="the plan is empty"):
        bundle.open()


def test_progress(make):
    told = []
    bundle = make()
    bundle.open(progress=lambda *step: told.append(step)).close()
    assert told[0] == ("load", 0, 5)
    assert told[-1] == ("load", 5, 5)


@pytest.mark.parametrize("key", ["library", "engines", "programs", "entries", "min_rows"])
def test_a_damaged_manifest(make, key):
    bundle = make()
    artifact = {k: v for k, v in bundle.artifact.items() if k != key}
    with pytest.raises(BundleError, match="manifest is damaged"):
        bundle.open(artifact)
