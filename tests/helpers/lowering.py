"""Small graphs lowered to ONNX and run by the real engine and by the onnx reference evaluator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from edgecc.backends.base import Artifact
from edgecc.backends.onnx import lower, stored_tensors
from edgecc.backends.onnxruntime import OrtEngine, open_engine
from edgecc.backends.stored_weights import StoredWeights
from edgecc.backends.weight_file import WrittenFile
from edgecc.devices import Device, Dialect, get_device
from edgecc.ir import (
    NVFP4,
    Builder,
    Dense,
    DType,
    Inline,
    Interpreter,
    Module,
    SymbolRange,
    Value,
    Weight,
    verify_or_raise,
)
from edgecc.passes.base import PassContext
from edgecc.passes.legalize import Legalize
from edgecc.passes.lower_encodings import LowerEncodings, LowerEncodingsOptions
from edgecc.roles import Role

Array: TypeAlias = NDArray[Any]
Build: TypeAlias = Callable[["GraphBuilder"], None]

GRAPH = "graph"
_ROLES = [
    Role.ACTIVATION,
    Role.HIDDEN,
    Role.ANCHOR,
    Role.LOGITS,
    Role.PROPOSALS,
    Role.BASE_LOGITS,
    Role.DRAFT_LOGITS,
    Role.CONFIDENCE,
]
"""The engine binds by role: each input and output of a test graph gets one of its own. These mean
nothing to it."""


class GraphBuilder(Builder):
    """A `Builder` of one graph with inline weights."""

    def __init__(self) -> None:
        module = Module("test")
        for symbol in ("b", "t", "c", "r"):
            module.symbols[symbol] = SymbolRange(1, 1024)
        super().__init__(module, GRAPH)

    def take(self, name: str, shape: tuple[Any, ...], dtype: DType = DType.F32) -> Value:
        """A plain input with a role no other input has."""
        used = len([i for i in self.graph.inputs if i.role in _ROLES])
        return self.input(name, dtype, shape, _ROLES[used])

    def give(self, name: str, value: Value) -> None:
        """A plain output with a role no other output has."""
        used = len([o for o in self.graph.outputs if o.role in _ROLES])
        self.output(value, name, _ROLES[used])

    def dense(self, symbol: str, array: Array) -> str:
        """A weight of plain elements."""
        source = Inline((("weight", array.tobytes()),))
        weight = Weight(array.shape, Dense(DType.of(array.dtype)), source)
        return self.module.weights.add(symbol, weight)

    def nvfp4(self, symbol: str, packed: Array, scale: Array, scale_2: Array) -> str:
        """A packed weight: codes `[N, K/2]`, block scales `[N, K/16]`, global scale."""
        parts = {"weight": packed, "weight_scale": scale, "weight_scale_2": scale_2}
        source = Inline(tuple((name, part.tobytes()) for name, part in parts.items()))
        shape = (packed.shape[0], 2 * packed.shape[1])
        return self.module.weights.add(symbol, Weight(shape, NVFP4(), source))


def lower_onnx(module: Module, device: Device, folder: Path) -> tuple[Artifact, WrittenFile]:
    """Models and their weight file."""
    weights = StoredWeights()
    weights.add(module, stored_tensors(module, device))
    file = weights.write(folder, lambda *_: None)
    return lower(module, device, folder, file), file


class Files:
    """A folder with the interface of a bundle that engines use."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, relative: str) -> Path:
        return self.path / relative


class Lowered:
    """A module lowered for a device, its engine, and its models for the reference evaluator."""

    def __init__(self, module: Module, device: str, folder: Path, form: str = "dense") -> None:
        self.module = module
        self.device: Device = get_device(device)
        self.folder = folder
        context = PassContext(self.device)
        LowerEncodings(LowerEncodingsOptions(form)).run(module, context)
        Legalize().run(module, context)
        verify_or_raise(module)
        self.artifact: Artifact
        self.weights: WrittenFile
        self.artifact, self.weights = lower_onnx(module, self.device, folder)
        for name in self.artifact.files:
            onnx.checker.check_model(str(folder / name), full_check=True)

    def engine(self, threads: int = 1) -> OrtEngine:
        """The real engine."""
        return open_engine(Files(self.folder), self.artifact.manifest, num_threads=threads)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the test graph once in a fresh engine; caches stay inside."""
        engine = self.engine()
        try:
            return self.call(engine, inputs)
        finally:
            engine.close()

    def call(self, engine: OrtEngine, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Call the test graph by input names; results by output names, copied."""
        graph = self.module.graphs[GRAPH]
        named = {graph.input(name).role: array for name, array in inputs.items()}
        outputs = {o.role: o.name for o in graph.outputs if o.role is not Role.KV_CACHE}
        result = engine.entry(GRAPH).run(named, list(outputs))
        return {outputs[role]: array.copy() for role, array in result.items()}

    def evaluator(self) -> ReferenceEvaluator:
        """The onnx reference evaluator over the model of the test graph."""
        assert self.device.dialect is Dialect.STANDARD
        path = self.folder / f"{self.device.name}-{GRAPH}.onnx"
        return ReferenceEvaluator(onnx.load(str(path)))


def reference(build: Build, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """What the interpreter computes in float64, before any pass."""
    builder = GraphBuilder()
    build(builder)
    return Interpreter(builder.module, np.float64).run(GRAPH, inputs)


def lowered(build: Build, device: str, folder: Path, form: str = "dense") -> Lowered:
    """Build and lower a test graph."""
    builder = GraphBuilder()
    build(builder)
    return Lowered(builder.module, device, folder, form)


def compare(
    build: Build,
    device: str,
    folder: Path,
    inputs: Mapping[str, Array],
    expected: Mapping[str, Array],
    *,
    tolerance: float = 3e-6,
    form: str = "dense",
) -> None:
    """Check a stateless graph in every evaluator the device allows.

    Args:
        build: Builds the graph, with `take`, `give` and ops.
        device: Compile target.
        folder: Where to write.
        inputs: By name.
        expected: An independent formula's results by output name, in float64.
        tolerance: Of float results, relative to the largest expected value.
        form: Of quantized linear layers.
    """
    wanted = reference(build, inputs)
    assert_close(wanted, expected, 1e-9)
    graph = lowered(build, device, folder, form)
    assert_close(graph.run(inputs), expected, tolerance)
    if graph.device.dialect is Dialect.STANDARD:
        evaluator = graph.evaluator()
        # Its sigmoid also computes the branch it does not take.
        with np.errstate(over="ignore", invalid="ignore"):
            results = evaluator.run(None, dict(inputs))
        names = [o.name for o in graph.module.graphs[GRAPH].outputs]
        assert_close(dict(zip(names, results, strict=True)), expected, tolerance)


def assert_close(
    found: Mapping[str, Array], expected: Mapping[str, Array], tolerance: float
) -> None:
    """Integers equal, floats within the tolerance relative to the largest expected value."""
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        have = found[name]
        assert have.shape == want.shape, name
        if want.dtype.kind == "i":
            assert have.dtype == np.int64, name
            np.testing.assert_array_equal(have, want, err_msg=name)
        else:
            assert have.dtype in (np.float32, np.float64), name
            scale = float(np.abs(want).max()) or 1.0
            np.testing.assert_allclose(have, want, rtol=0, atol=tolerance * scale, err_msg=name)


def random_nvfp4(random: np.random.Generator, rows: int, columns: int) -> list[Array]:
    """Codes, block scales and global scale of a random NVFP4 weight; all 256 code bytes occur."""
    packed = random.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    scale = random.integers(0x28, 0x48, (rows, columns // 16), dtype=np.uint8)
    return [packed, scale.view(ml_dtypes.float8_e4m3fn), np.array(0.0117, dtype=np.float32)]


def nvfp4_values(packed: Array, scale: Array, scale_2: Array) -> Array:
    """The values of an NVFP4 weight, float64, by ml_dtypes' own E2M1 type."""
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
    codes = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    factors = (scale.astype(np.float32) * scale_2).repeat(16, axis=1)
    return (codes * factors).astype(np.float64)
