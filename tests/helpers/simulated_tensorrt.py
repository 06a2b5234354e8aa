"""TensorRT's runtime over simulated device memory: engines evaluate their graph.

Every method and property is looked up in the real class, and every call bound to a signature that
the class states. Rules of TensorRT that a GPU would answer with wrong numbers are checked: shapes
within the profile, addresses set and aligned, updated caches in place, nothing else written over
what an engine reads, scratch memory large enough and not relied upon, contexts that are captured
run before and are left alone afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgecc.backends.tensorrt.library import DATA_TYPES
from edgecc.ir import Interpreter, Module
from edgecc.roles import Role
from helpers.remembering import RememberingInterpreter
from helpers.signatures import check_call
from helpers.simulated_cuda import UNWRITTEN, SimulatedCuda

Array: TypeAlias = NDArray[Any]

NUMPY: Mapping[str, Any] = {
    "f32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "i64": np.int64,
    "i32": np.int32,
}
SCRATCH = 1024


class StandIn:
    """Base of objects that stand for those of a real class."""

    real: Any
    simulation: Simulation

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name in ("real", "simulation"):
            return object.__getattribute__(self, name)
        real = vars(self.real).get(name)
        assert real is not None, f"{self.real.__name__} has no {name}"
        found = object.__getattribute__(self, name)  # AttributeError: not simulated
        if isinstance(real, property):
            assert not callable(found), f"{name} is a property"
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            check_call(real, args, kwargs, self.simulation.fits)
            return found(*args, **kwargs)

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in ("real", "simulation"):
            assert isinstance(vars(self.real).get(name), property), f"no property {name}"
        object.__setattr__(self, name, value)


class Simulation:
    """The module `tensorrt_rtx` with a runtime that works.

    Args:
        trt: The real module: enumerations, the logger, and the classes calls are checked against.
        cuda: The GPU.
        module: The lowered module whose graphs the plans stand for.
        engines: What the manifest says about each graph.
        capturable: What contexts answer when asked.
        change: Changes results of a graph, to see what notices.
        interpreter: Evaluates the graphs; that of the IR unless given.

    Attributes:
        kernels: The cache of kernels of each context that was made.
        enqueued: Graph and profile of every call that ran.
        full: `engine` or `context`: the GPU has no memory for any more of these.
        weights: What the memory of inputs that are weights has to hold, by graph and input.
    """

    def __init__(
        self,
        trt: Any,
        cuda: SimulatedCuda,
        module: Module,
        engines: Mapping[str, Mapping[str, Any]],
        *,
        capturable: bool = True,
        change: Callable[[str, dict[str, Array]], None] | None = None,
        interpreter: Interpreter | None = None,
    ) -> None:
        self.trt, self.cuda, self.module, self.engines = trt, cuda, module, engines
        self.interpreter = interpreter or RememberingInterpreter(module)
        self.capturable, self.change = capturable, change
        self.refuses_capture = False
        self.full = ""
        self.logger: Any = None
        self.kernels: list[SimulatedKernels] = []
        self.enqueued: list[tuple[str, int]] = []
        self.weights: dict[str, dict[str, bytes]] = {}
        self.__name__, self.__version__ = trt.__name__, trt.__version__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trt, name)

    def Runtime(self, logger: Any) -> SimulatedRuntime:
        assert isinstance(logger, self.trt.ILogger)
        self.logger = logger
        return SimulatedRuntime(self)

    def has_memory(self, kind: str) -> bool:
        """Whether there is memory; says so in the log, as the library does, if not."""
        if self.full == kind:
            text = "[defaultAllocator.cpp::48] Error Code 1: Cuda Runtime (out of memory)"
            self.logger.log(self.trt.ILogger.Severity.ERROR, text)
        return self.full != kind

    def fits(self, kind: str, value: Any) -> bool:
        simple: dict[str, Any] = {
            "str": str,
            "tuple": tuple,
            "list": list,
            "typing.SupportsInt": int,
            "typing_extensions.Buffer": object,
        }
        if kind in simple:
            return isinstance(value, simple[kind])
        real = getattr(self.trt, re.split(r"[.:]", kind)[-1])
        return isinstance(value, real) or getattr(value, "real", None) is real


class SimulatedRuntime(StandIn):
    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.real = simulation, simulation.trt.Runtime

    def deserialize_cuda_engine(self, serialized_engine: Any) -> SimulatedEngine | None:
        if not self.simulation.has_memory("engine"):
            return None
        kind, _, name = bytes(serialized_engine).decode().partition(":")
        return SimulatedEngine(self.simulation, name) if kind == "plan" else None


class SimulatedEngine(StandIn):
    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation, self.real = simulation, simulation.trt.ICudaEngine
        self._name = name
        self._described = simulation.engines[name]
        kinds = ("inputs", "bound", "outputs")
        self._tensors = {t["name"]: t for k in kinds for t in self._described.get(k, ())}
        self._inputs = self._tensors.keys() - {t["name"] for t in self._described["outputs"]}
        self.num_io_tensors = len(self._tensors)
        self.num_optimization_profiles = max(1, len(self._described["profiles"]))
        self.device_memory_size_v2 = SCRATCH

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        modes = self.simulation.trt.TensorIOMode
        return modes.INPUT if name in self._inputs else modes.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return getattr(self.simulation.trt.DataType, DATA_TYPES[self._tensors[name]["dtype"]])

    def get_tensor_shape(self, name: str) -> Any:
        return self.simulation.trt.Dims(self._tensors[name]["shape"])

    def get_tensor_location(self, name: str) -> Any:
        return self.simulation.trt.TensorLocation.DEVICE

    def get_aliased_input_tensor(self, name: str) -> str | None:
        alias: str | None = self._tensors[name].get("alias")
        return alias

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Any]:
        shapes = self._described["profiles"][profile_index]["shapes"][name]
        return [self.simulation.trt.Dims(s) for s in shapes]

    def create_runtime_config(self) -> SimulatedConfig:
        return SimulatedConfig(self.simulation)

    def create_execution_context(self, runtime_config: SimulatedConfig) -> SimulatedContext | None:
        if not self.simulation.has_memory("context"):
            return None
        assert runtime_config._strategy.name == "USER_MANAGED"
        assert runtime_config._kernels is not None
        self.simulation.kernels.append(runtime_config._kernels)
        return SimulatedContext(self.simulation, self)


class SimulatedConfig(StandIn):
    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.real = simulation, simulation.trt.IRuntimeConfig
        self.dynamic_shapes_kernel_specialization_strategy = None
        self._strategy: Any = None
        self._kernels: SimulatedKernels | None = None

    def create_runtime_cache(self) -> SimulatedKernels:
        return SimulatedKernels(self.simulation)

    def set_runtime_cache(self, cache: SimulatedKernels) -> bool:
        self._kernels = cache
        return True

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self._strategy = strategy


class SimulatedKernels(StandIn):
    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.real = simulation, simulation.trt.IRuntimeCache


class SimulatedContext(StandIn):
    def __init__(self, simulation: Simulation, engine: SimulatedEngine) -> None:
        self.simulation, self.real = simulation, simulation.trt.IExecutionContext
        self._engine = engine
        self._profile = -1
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._scratch = (0, 0)
        self._ran, self._captured = False, False

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._profile = profile_index
        return 0 <= profile_index < self._engine.num_optimization_profiles

    def set_device_memory(self, memory: int, size: int) -> None:
        assert size >= SCRATCH
        self.simulation.cuda.device(memory, size)
        self._scratch = (memory, size)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert not self._captured, "a captured context is changed"
        assert name in self._engine._inputs
        described = self._engine._described
        profiles = described["profiles"]
        ranges = profiles[self._profile]["shapes"] if profiles else {}
        fixed = tuple(self._engine._tensors[name]["shape"])
        low, _, high = ranges.get(name, (fixed, fixed, fixed))
        if len(shape) != len(low) or any(
            not a <= s <= b for s, a, b in zip(shape, low, high, strict=True)
        ):
            return False
        self._ran = self._ran and self._shapes.get(name) == tuple(shape)
        self._shapes[name] = tuple(shape)
        return True

    def get_tensor_shape(self, name: str) -> Any:
        """Sizes follow from the inputs: here by the symbols of the graph."""
        graph = self.simulation.module.graphs[self._engine._name]
        symbols: dict[str, int] = {}
        for item in graph.inputs:
            for size, dim in zip(self._shapes[item.name], item.value.type.shape, strict=True):
                if not isinstance(dim, int) and len(dim.terms) == 1:
                    ((symbol, factor),) = dim.terms
                    symbols[symbol] = (size - dim.constant) // factor
        names = [t["name"] for t in _outputs(self._engine)]
        shape = graph.outputs[names.index(name)].value.type.shape
        sizes = [d if isinstance(d, int) else d.substitute(symbols) for d in shape]
        return self.simulation.trt.Dims([int(str(s)) for s in sizes])

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert not self._captured or self._addresses[name] == memory
        assert memory % 256 == 0, "the address is not aligned"
        self._addresses[name] = memory
        return name in self._engine._tensors

    def is_stream_capturable(self, stream: int) -> bool:
        return self.simulation.capturable

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle == 4711
        engine, cuda = self._engine, self.simulation.cuda
        if cuda.recording is not None and self.simulation.refuses_capture:
            return False
        if cuda.recording is not None:
            assert self._ran, "captured before it has run with these shapes"
            assert self.simulation.capturable
            self._captured = True
        self._ran = True
        assert self._addresses.keys() == engine._tensors.keys(), "a tensor has no address"
        for name, tensor in engine._tensors.items():
            alias = tensor.get("alias")
            if alias:
                assert self._addresses[name] == self._addresses[alias], "a cache moves"
        shapes = {**self._shapes}
        shapes |= {o["name"]: tuple(self.get_tensor_shape(o["name"])) for o in _outputs(engine)}
        addresses = dict(self._addresses)
        _check_places(engine, shapes, addresses)
        profile = self._profile

        def work() -> None:
            self.simulation.enqueued.append((engine._name, profile))
            _evaluate(self.simulation, engine, shapes, addresses)
            cuda.device(*self._scratch)[...] = 0xFF

        cuda.put(work)
        return True


def _outputs(engine: SimulatedEngine) -> list[Any]:
    return list(engine._described["outputs"])


def _nbytes(engine: SimulatedEngine, name: str, shape: tuple[int, ...]) -> int:
    itemsize = np.dtype(NUMPY[engine._tensors[name]["dtype"]]).itemsize
    return int(np.prod(shape, dtype=np.int64)) * itemsize


def _check_places(
    engine: SimulatedEngine, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]
) -> None:
    """Outputs lie nowhere in an input, or they do and the engine updates that input in place."""
    ends = {name: addresses[name] + _nbytes(engine, name, s) for name, s in shapes.items()}
    for output in _outputs(engine):
        name = output["name"]
        for other in ends.keys() - {name, output.get("alias")}:
            apart = ends[other] <= addresses[name] or ends[name] <= addresses[other]
            assert apart, f"{name} is written over {other}"


def _evaluate(
    simulation: Simulation,
    engine: SimulatedEngine,
    shapes: Mapping[str, tuple[int, ...]],
    addresses: Mapping[str, int],
) -> None:
    def memory(name: str) -> Array:
        dtype = np.dtype(NUMPY[engine._tensors[name]["dtype"]])
        shape = shapes[name]
        nbytes = _nbytes(engine, name, shape)
        return simulation.cuda.device(addresses[name], nbytes).view(dtype).reshape(shape)

    for name, content in simulation.weights.get(engine._name, {}).items():
        found = simulation.cuda.device(addresses[name], len(content)).tobytes()
        assert found == content, f"{name} is not the weight"
    graph = simulation.module.graphs[engine._name]
    inputs = {}
    for item in graph.inputs:
        array = memory(item.name)
        is_float = item.value.type.dtype.is_float
        inputs[item.name] = array.astype(np.float32) if is_float else array
        if is_float and item.role is not Role.KV_CACHE:
            unwritten = array.view(np.uint8).reshape(-1, array.itemsize) == UNWRITTEN
            assert not unwritten.all(axis=1).any(), f"{item.name} was never written"
    results = simulation.interpreter.run(graph.name, inputs)
    if simulation.change is not None:
        simulation.change(graph.name, results)
    for described, output in zip(_outputs(engine), graph.outputs, strict=True):
        target = memory(described["name"])
        target[...] = results[output.name].astype(target.dtype)
