"""Memory, copies and captured graphs on a real GPU: needs cuda-bindings, no TensorRT."""

from __future__ import annotations

import numpy as np
import pytest

from edgecc.backends.tensorrt.cuda import ALIGNMENT, Cuda, load_runtime
from edgecc.errors import BackendError, ResourceError

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cuda():
    pytest.importorskip("cuda.bindings", reason="pip install cuda-bindings")
    return Cuda(load_runtime())


@pytest.fixture
def stream(cuda):
    made = cuda.stream()
    yield made
    made.close()


def test_the_gpu_says_what_it_is(cuda):
    assert 50 <= cuda.capability < 300


@pytest.mark.parametrize("count", [1, 7, 1 << 20])
def test_what_goes_up_comes_down(cuda, stream, count):
    values = np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)
    first, second = cuda.allocate(count), cuda.allocate(count)
    assert first % ALIGNMENT == second % ALIGNMENT == 0
    stream.upload(first, values)
    stream.copy(second, first, count)
    found = np.zeros_like(values)
    stream.download(found, second)
    stream.synchronize()
    np.testing.assert_array_equal(found, values)
    stream.clear(second, count)
    stream.download(found, second)
    stream.synchronize()
    assert not found.any()
    cuda.free(first)
    cuda.free(second)


def test_what_is_uploaded_lives_until_it_is_copied(cuda, stream):
    count = 1 << 20
    address = cuda.allocate(8 * count)
    for _ in range(3):  # nobody else holds the array
        stream.upload(address, np.arange(count, dtype=np.int64))
    found = np.empty(count, dtype=np.int64)
    stream.download(found, address)
    stream.synchronize()
    np.testing.assert_array_equal(found, np.arange(count))
    cuda.free(address)


def test_a_graph_reads_what_its_memory_holds_when_it_is_launched(cuda, stream):
    source, result = cuda.allocate_host(16), cuda.allocate_host(16)
    numbers, found = source.bytes.view(np.int64), result.bytes.view(np.int64)
    address = cuda.allocate(32)
    stream.clear(address, 32)
    stream.synchronize()
    with stream.capture() as graph:
        stream.upload(address, source.bytes)
        stream.copy(address + 16, address, 16)
        stream.download(result.bytes, address + 16)
    stream.synchronize()
    found[...] = 5
    for step in range(3):
        numbers[...] = (step, -step)
        stream.launch(graph)
        stream.synchronize()
        assert found.tolist() == [step, -step]
    graph.close()
    source.close()
    result.close()
    cuda.free(address)


def test_capture_runs_nothing(cuda, stream):
    address = cuda.allocate(8)
    stream.clear(address, 8)
    stream.synchronize()
    ones = cuda.allocate_host(8)
    ones.bytes[...] = 1
    with stream.capture() as graph:
        stream.upload(address, ones.bytes)
    found = np.full(8, 9, np.uint8)
    stream.download(found, address)
    stream.synchronize()
    assert not found.any()
    graph.close()
    ones.close()
    cuda.free(address)


def test_an_error_in_a_capture_ends_it(cuda, stream):
    with pytest.raises(ZeroDivisionError), stream.capture():
        raise ZeroDivisionError
    stream.synchronize()  # would fail while a capture is open


def test_more_memory_than_there_is(cuda):
    with pytest.raises(ResourceError, match="no memory left") as caught:
        cuda.allocate(1 << 50)
    assert caught.value.exit_code == 6


def test_a_failing_call_is_named(cuda):
    with pytest.raises(BackendError, match=r"cudaFree failed: .*\(cudaErrorInvalidValue\)"):
        cuda.free(12345)
