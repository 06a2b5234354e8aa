"""What is said where nothing can be built or run."""

from __future__ import annotations

import builtins
import sys

import pytest

from edgecc.backends.tensorrt import open_engine
from edgecc.backends.tensorrt.builder import Session
from edgecc.backends.tensorrt.cuda import Cuda, load_runtime
from edgecc.backends.tensorrt.library import error_log, load_library
from edgecc.backends.tensorrt.lower import build
from edgecc.backends.tensorrt.plan import deserialize
from edgecc.devices import get_device
from edgecc.errors import BackendError, BundleError, UnsupportedError
from edgecc.ir import Builder, DType, Module, Role, SymbolRange, sym
from helpers.signatures import signatures
from helpers.simulated_cuda import SimulatedCuda
from helpers.simulated_tensorrt import SimulatedRuntime, Simulation


@pytest.mark.parametrize(
    ("name", "extra"), [("tensorrt_rtx", "edgecc[rtx]"), ("tensorrt", "edgecc[tensorrt]")]
)
def test_a_missing_package_says_what_to_install(monkeypatch, name, extra):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match="is not installed") as caught:
        load_library(name)
    assert caught.value.exit_code == 4
    assert caught.value.diagnostics[0].help == f"pip install '{extra}'"


def test_a_library_that_does_not_load(monkeypatch):
    real = builtins.__import__
    monkeypatch.delitem(sys.modules, "tensorrt_rtx", raising=False)

    def broken(name):
        raise OSError("libnvinfer.so: cannot open shared object file")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(UnsupportedError, match="cannot be loaded: libnvinfer"):
        load_library("tensorrt_rtx")
    assert builtins.__import__ is real


ARTIFACT = {
    "backend": "tensorrt",
    "library": "tensorrt_rtx",
    "library_version": "1.7.1.116",
    "compute_capabilities": [89, 120],
    "compute_type": "bf16",
    "min_rows": 5,
    "weights": "embed",
    "weight_file": None,
    "tensors": {},
    "engines": {},
    "programs": {},
    "entries": {},
}


def test_a_foreign_manifest_imports_nothing():
    with pytest.raises(BundleError, match="antigravity"):
        open_engine(object(), {**ARTIFACT, "library": "antigravity"})
    assert "antigravity" not in sys.modules


def test_opening_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(UnsupportedError, match="TensorRT-RTX, which is not installed"):
        open_engine(object(), ARTIFACT)


def test_opening_without_cuda_bindings(trt, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    artifact = {**ARTIFACT, "library_version": trt.__version__}
    with pytest.raises(UnsupportedError, match="through cuda-bindings") as caught:
        open_engine(object(), artifact)
    assert caught.value.diagnostics[0].help == "pip install 'cuda-bindings>=12.8,<14'"


# --- the real modules, without a GPU --------------------------------------------------------------


@pytest.fixture(scope="module")
def runtime():
    pytest.importorskip("cuda.bindings", reason="pip install cuda-bindings")
    made = load_runtime()
    if not int(made.cudaGetDeviceCount()[0]):
        pytest.skip("this machine has a GPU")
    return made


def test_the_real_module_says_that_there_is_no_driver(runtime):
    with pytest.raises(UnsupportedError, match="no GPU can be used here: ") as caught:
        Cuda(runtime)
    assert (caught.value.id, caught.value.exit_code) == ("cuda/no-gpu", 4)


CALLS = {
    "cudaDriverGetVersion": (),
    "cudaGetDeviceCount": (),
    "cudaSetDevice": (0,),
    "cudaMalloc": (256,),
    "cudaFree": (4096,),
    "cudaHostAlloc": (256, 0),
    "cudaFreeHost": (4096,),
    "cudaStreamCreateWithFlags": (1,),
    "cudaStreamDestroy": ("stream",),
    "cudaStreamSynchronize": ("stream",),
    "cudaMemsetAsync": (4096, 0, 8, "stream"),
    "cudaStreamEndCapture": ("stream",),
    "cudaGraphLaunch": ("graph", "stream"),
    "cudaGraphExecDestroy": ("graph",),
}
"""Calls with arguments as `cuda.py` gives them."""


@pytest.mark.parametrize("name", sorted(CALLS))
def test_every_call_reaches_the_real_function(runtime, name):
    """It takes the arguments, and gives the status and as many results as the simulation does."""
    made = {"stream": runtime.cudaStream_t(0), "graph": runtime.cudaGraphExec_t(0)}
    found = getattr(runtime, name)(*(made.get(a, a) for a in CALLS[name]))
    assert isinstance(found[0], runtime.cudaError_t)
    simulated = SimulatedCuda(runtime, capability=None)
    if name in ("cudaMalloc", "cudaHostAlloc", "cudaGetDeviceCount", "cudaDriverGetVersion"):
        assert len(found) == len(getattr(simulated, name)(*CALLS[name])) == 2


def test_a_failing_call_is_an_error_that_names_it(runtime, monkeypatch):
    monkeypatch.setattr(Cuda, "_check", lambda self: None)
    with pytest.raises(BackendError, match=r"cudaSetDevice failed: .* \(cudaError\w+\)"):
        Cuda(runtime)


def test_a_plan_cannot_be_opened_without_a_driver(trt, tmp_path):
    """For real, up to where a driver is needed: a plan that is built here."""
    builder = Builder(Module("net", symbols={"t": SymbolRange(1, 8)}), "main")
    x = builder.input("x", DType.F32, (sym("t"), 4), Role.ACTIVATION)
    builder.output(builder.op("silu", x), "y", Role.ACTIVATION)
    session = Session(trt, get_device("sm120"))
    path, graph = tmp_path / "main.plan", builder.module.graphs["main"]
    build(session, builder.module, graph, (), path, lambda *_: None)
    errors: list[str] = []
    log = error_log(trt, errors)
    with pytest.raises(UnsupportedError, match="cannot open the engine") as caught:
        deserialize(trt, trt.Runtime(log), path, errors)
    notes = caught.value.diagnostics[0].notes
    assert any("driver" in note for note in notes), notes


def test_the_stand_in_fails_where_the_real_classes_would(trt):
    """What makes the simulation worth something."""
    context = trt.IExecutionContext
    known = signatures(context.set_input_shape)
    assert [[p.name for p in s.parameters] for s in known] == [["name", "shape"]] * 3
    assert known[0].bind(("x", (1,)), {}) == {"name": "x", "shape": (1,)}
    assert known[0].bind(("x",), {}) is None
    assert known[0].bind(("x", (1,), 2), {}) is None
    assert known[0].bind(("x",), {"shapes": (1,)}) is None
    real = signatures(trt.ICudaEngine.create_execution_context)
    assert [s.parameters[0].name for s in real] == ["strategy", "runtime_config"]
    assert all(s.parameters[0].optional for s in real)
    cuda = type("Cuda", (), {})()
    simulation = Simulation(trt, cuda, Module("m"), {"g": {"inputs": [], "outputs": []}})
    made = SimulatedRuntime(simulation)
    with pytest.raises(AssertionError, match="fits none of"):
        made.deserialize_cuda_engine()
    with pytest.raises(AssertionError, match="has no deserialise"):
        made.deserialise(b"")
