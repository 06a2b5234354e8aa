"""The runtime on a simulated GPU when something goes wrong, or ends early."""

from __future__ import annotations

import gc
import sys
import threading
import types
import weakref

import numpy as np
import pytest

from edgecc.backends.base import Role
from edgecc.backends.runtime import Generator, ModelInfo
from edgecc.backends.tensorrt.cuda import Cuda
from edgecc.backends.tensorrt.library import load_library
from edgecc.errors import BackendError, RequestError, ResourceError, UnsupportedError
from helpers.lowered_pairs import draft_inputs, target_inputs
from helpers.simulated_tensorrt import SimulatedEngine

PROMPT = [7, 3, 11, 2, 5, 13, 1, 9, 4, 8, 6, 21, 30, 12, 17, 19, 23, 29, 31, 37]


def answer(generator, **arguments):
    options = {"token_ids": PROMPT, "max_new_tokens": 12, "ignore_eos": True} | arguments
    return generator.generate(**options).token_ids


# --- after the end --------------------------------------------------------------------------------


def test_nothing_touches_memory_that_was_given_back(make):
    """The host's memory is gone as well: writing an anchor there would end the process."""
    engine = make().open()
    target, rounds = engine.entry("target"), engine.rounds
    target.run(target_inputs(PROMPT[:5], 0), [Role.HIDDEN_TAP])
    engine.close()
    for use in (
        lambda: target.run(target_inputs([1], 5), []),
        lambda: rounds.run(np.array([1]), 5, 5, 0),
        lambda: rounds.features(2),
    ):
        with pytest.raises(BackendError, match="the engine is closed"):
            use()


def test_a_stream_that_is_taken_further_after_the_end(make):
    generator = make().generator()
    stream = generator.stream(token_ids=PROMPT, max_new_tokens=12, ignore_eos=True)
    next(stream)
    generator.close()
    with pytest.raises(RequestError, match="the generator is closed"):
        next(stream)


def test_another_thread_closes_while_a_round_runs(make):
    """The round is done first; the request ends with an error, and the memory is given back."""
    bundle = make()
    generator = bundle.generator()
    inside, closing = threading.Event(), threading.Event()
    run = generator.engine.rounds.run

    def slow(*numbers):
        inside.set()
        closing.wait(10)
        return run(*numbers)

    generator.engine.rounds.run = slow
    failed = []

    def request():
        with pytest.raises(RequestError, match="the generator is closed"):
            answer(generator)
        failed.append(True)

    def close():
        inside.wait(10)
        closing.set()
        generator.close()

    threads = [threading.Thread(target=f) for f in (request, close)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == [True]
    assert bundle.cuda.memory == {}


def test_closing_gives_back_the_plans(make, monkeypatch):
    """Weights inside of plans are most of the memory, and whoever closed may keep the generator."""
    engines = []
    made = SimulatedEngine.__init__

    def remembered(self, *args):
        made(self, *args)
        engines.append(weakref.ref(self))

    monkeypatch.setattr(SimulatedEngine, "__init__", remembered)
    generator = make().generator()
    answer(generator)
    assert len(engines) == 5
    generator.close()
    gc.collect()
    assert [e() for e in engines] == [None] * 5


def test_a_gpu_that_fails(make):
    """The error of the call that noticed comes out, and closing does not hide it."""
    bundle = make()
    generator = bundle.generator()

    def fail_later():
        with generator:
            for chunk in generator.stream(token_ids=PROMPT, max_new_tokens=12, ignore_eos=True):
                bundle.cuda.broken = len(chunk.stats.proposed_by_round) > 1

    with pytest.raises(BackendError, match="illegal memory access") as caught:
        fail_later()
    assert caught.value.__context__ is None
    bundle.cuda.broken = False
    with pytest.raises(BackendError, match="the engine is closed"):
        generator.engine.entry("target")


def test_no_stream_is_left_of_what_does_not_fit(make):
    bundle = make()
    bundle.cuda.limit = 100
    with pytest.raises(ResourceError, match="no memory left"):
        bundle.open()
    assert (bundle.cuda.memory, bundle.cuda.streams) == ({}, 0)


@pytest.mark.parametrize("kind", ["engine", "context"])
def test_a_gpu_that_is_full_is_no_bug(make, kind):
    """The library answers with nothing, and says why in its log."""
    bundle = make()
    bundle.simulation.full = kind
    with pytest.raises(ResourceError, match="the GPU has no memory left: ") as caught:
        bundle.open()
    assert caught.value.exit_code == 6
    (note,) = caught.value.diagnostics[0].notes
    assert "Cuda Runtime (out of memory)" in note
    assert (bundle.cuda.memory, bundle.cuda.streams) == ({}, 0)


# --- graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["capture", "memory"])
def test_a_graph_that_cannot_be_made_leaves_nothing(make, fault):
    bundle = make()
    with make().generator() as plain:
        expected = answer(plain)
    bundle.simulation.refuses_capture = fault == "capture"
    bundle.cuda.refuses_graphs = fault == "memory"
    with bundle.generator() as generator:
        with pytest.warns(RuntimeWarning, match="without a CUDA"):
            found = answer(generator)
        assert found == expected
        assert len(bundle.cuda.graphs) == 1
        assert all(not work for work in bundle.cuda.graphs.values())
    assert bundle.cuda.launched == 0


def test_no_garbage_is_collected_during_a_capture(make):
    """Freeing GPU memory of somebody else would end it."""
    bundle = make()
    enabled = []
    begin = type(bundle.cuda).do_cudaStreamBeginCapture

    def watched(self, *args):
        enabled.append(gc.isenabled())
        begin(self, *args)

    type(bundle.cuda).do_cudaStreamBeginCapture = watched
    try:
        with bundle.generator() as generator:
            answer(generator)
    finally:
        type(bundle.cuda).do_cudaStreamBeginCapture = begin
    assert enabled
    assert not any(enabled)
    assert gc.isenabled()


# --- memory ---------------------------------------------------------------------------------------


def test_copies_to_the_host_keep_their_memory(make):
    """An interrupt may come between a copy and its end, where copies do not wait for pages."""
    cuda = Cuda(make().cuda)
    stream = cuda.stream()
    address = cuda.allocate(8)
    result = np.zeros(8, np.uint8)
    alive = weakref.ref(result)
    stream.download(result, address)
    del result
    assert alive() is not None
    stream.synchronize()
    assert alive() is None
    stream.close()


@pytest.mark.parametrize(
    ("entry", "inputs"),
    [
        ("target", target_inputs(range(17), 0, [0])),
        ("target", target_inputs(range(4), 0, [0] * 17)),
        ("draft", draft_inputs(np.zeros((17, 128), np.float32), 3, 0)),
    ],
)
def test_a_call_that_is_too_large_does_not_reach_memory(make, entry, inputs):
    bundle = make()
    engine = bundle.open()
    executable = engine.entry(entry)
    features = executable.interface.inputs.get(Role.FEATURES)
    if features is not None:
        width = features.shape[2]
        inputs = draft_inputs(np.zeros((17, width), np.float32), 3, 0)
    with pytest.raises(RequestError, match="the engines take at most"):
        executable.run(inputs, [])
    engine.close()  # runs what waits


def test_what_is_no_number_does_not_outlive_its_sequence(make):
    """Masked rows of caches are multiplied by 0, and 0 times NaN is NaN."""
    spoilt = []

    def change(graph, results):
        if graph == "target.body" and spoilt:
            values = [array for name, array in results.items() if "v_cache" in name]
            assert values
            values[0][:, :, 12:16] = np.nan
            spoilt.pop()

    bundle = make(change=change)
    with bundle.generator() as generator:
        expected = answer(generator, token_ids=PROMPT[:5])
        spoilt.append(True)
        with pytest.raises(BackendError, match="is not a number"):
            answer(generator)
        bundle.cuda.run()
        entries = [generator.engine.entry(name) for name in ("target", "draft")]
        for value in (e.values[c.name] for e in entries for c in e.interface.caches):
            nbytes = int(np.prod(value.shape)) * value.dtype.itemsize
            assert not bundle.cuda.device(value.address, nbytes).any()
        assert answer(generator, token_ids=PROMPT[:5]) == expected


def test_two_generators_on_one_gpu(make, tmp_path):
    """Taken in turn: neither sees memory, graphs or lengths of the other."""
    first, second = make(), make()
    with first.generator() as alone:
        expected = [answer(alone), answer(alone, token_ids=PROMPT[:7])]
    second.cuda = second.simulation.cuda = first.cuda
    with first.generator() as one, second.generator() as two:
        asked = {"max_new_tokens": 12, "ignore_eos": True}
        streams = [one.stream(token_ids=PROMPT, **asked), two.stream(token_ids=PROMPT[:7], **asked)]
        found = [[], []]
        while any(streams):
            for index, stream in enumerate(streams):
                chunk = next(stream, None) if stream else None
                streams[index] = stream if chunk else None
                found[index] += chunk.token_ids if chunk else []
        assert found == expected
        one.close()
        assert answer(two) == expected[0]
    assert first.cuda.memory == {}


# --- ends inside of a round -----------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [1, 4])
def test_limits_and_stop_tokens_inside_of_a_round(make, module, wanted):
    """Every length and every token that may end the text, at each place of a round."""
    bundle = make()
    with bundle.generator() as generator:
        whole = answer(generator, max_new_tokens=9, speculation=False)
        for length in range(1, 10):
            found = answer(generator, max_new_tokens=length, num_speculative_tokens=wanted)
            assert found == whole[:length]
    metadata = {"draft": None, **module.metadata}
    for stop in dict.fromkeys(whole):
        target = {**metadata["target"], "eos_token_ids": [stop]}
        model = ModelInfo.from_manifest({**metadata, "target": target})
        with Generator(bundle.open(), model) as generator:
            found = generator.generate(
                token_ids=PROMPT, max_new_tokens=9, num_speculative_tokens=wanted
            )
        assert found.token_ids == whole[: whole.index(stop) + 1]
        assert found.finish_reason.value == "stop"


# --- what is missing ------------------------------------------------------------------------------


def test_a_driver_older_than_cuda_bindings(make):
    bundle = make()
    bundle.cuda.driver = 12060
    with pytest.raises(UnsupportedError, match=r"driver is for CUDA 12\.6.* for CUDA 13") as caught:
        bundle.open()
    assert "'cuda-bindings==12.*'" in caught.value.diagnostics[0].help


def test_a_library_without_caches_in_place(monkeypatch):
    """That of JetPack, for example."""
    old = types.ModuleType("tensorrt")
    old.__version__, old.INetworkDefinition = "10.7.0", type("INetworkDefinition", (), {})
    monkeypatch.setitem(sys.modules, "tensorrt", old)
    with pytest.raises(UnsupportedError, match=r"TensorRT 10\.7\.0 has no KV caches") as caught:
        load_library("tensorrt")
    assert "10.15" in caught.value.diagnostics[0].help
