"""One deserialized plan: checked against the manifest, and its execution contexts.

Contexts get their scratch memory from outside: all engines of a bundle run one after another in one
stream, so one block serves them all.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from edgecc.backends.tensorrt.library import DATA_TYPES, OUT_OF_MEMORY
from edgecc.errors import BackendError, BundleError, ResourceError, UnsupportedError

Shape: TypeAlias = tuple[int, ...]


class Plan:
    """An engine of the library.

    Args:
        library: The module `tensorrt_rtx` or `tensorrt`.
        engine: Its `ICudaEngine`.
        name: The graph.
        described: `engines.<graph>` of the artifact, checked.
        errors: What the library's log got.
        kernels: Of all plans of a bundle: what TensorRT-RTX has compiled for this GPU. The first
            context fills it.

    Raises:
        BundleError: The engine has other inputs, outputs or profiles than the manifest says.
    """

    def __init__(
        self,
        library: Any,
        engine: Any,
        name: str,
        described: Mapping[str, Any],
        errors: list[str],
        kernels: list[Any],
    ) -> None:
        self._library = library
        self._kernels = kernels
        self._engine = engine
        self._errors = errors
        self.name = name
        self.inputs: tuple[str, ...] = tuple(i["name"] for i in described["inputs"])
        self.outputs: tuple[str, ...] = tuple(o["name"] for o in described["outputs"])
        self._static = {i["name"]: tuple(i["shape"]) for i in described["inputs"]}
        self._profiles = [
            {n: tuple(map(tuple, shapes)) for n, shapes in p["shapes"].items()}
            for p in described["profiles"]
        ] or [{}]
        finding = next(_differences(library, engine, described), "")
        if finding:
            raise BundleError(
                "bundle/engine",
                f"engine {name!r} is not what the manifest says: {finding}",
                where=str(described["file"]),
                help="compile the bundle again",
            )

    @property
    def scratch_bytes(self) -> int:
        """Memory a context needs while it runs, whatever its profile."""
        return int(self._engine.device_memory_size_v2)

    @property
    def last_profile(self) -> int:
        """The profile with the largest shapes."""
        return len(self._profiles) - 1

    def largest(self, name: str) -> Shape:
        """The largest shape of an input."""
        shapes = self._profiles[-1].get(name)
        found: Shape = shapes[2] if shapes else self._static[name]
        return found

    def profile(self, shapes: Mapping[str, Shape]) -> int:
        """The first profile that takes inputs of these shapes: the one with the least rows.

        Raises:
            BackendError: None does.
        """
        for index, ranges in enumerate(self._profiles):
            if all(_within(shapes[name], low, high) for name, (low, _, high) in ranges.items()):
                return index
        raise BackendError("tensorrt/profile", f"engine {self.name!r} takes no {dict(shapes)}")

    def context(self, profile: int, scratch: int, scratch_bytes: int, stream: int) -> Context:
        """A new context.

        Args:
            profile: Number of its optimization profile.
            scratch: Address of memory that nothing else uses while it runs.
            scratch_bytes: At least `scratch_bytes`.
            stream: Handle of the stream it will run in.

        Raises:
            BackendError: The library refused.
        """
        trt = self._library
        config = self._engine.create_runtime_config()
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        config.set_execution_context_allocation_strategy(strategy)
        if hasattr(config, "dynamic_shapes_kernel_specialization_strategy"):
            # A round has few shapes: compile for each. Kernels that are swapped in later could
            # change a result between two calls. A prompt's last chunk may have any length.
            kinds = trt.DynamicShapesKernelSpecializationStrategy
            many = profile == self.last_profile and profile > 0
            kind = kinds.NONE if many else kinds.EAGER
            config.dynamic_shapes_kernel_specialization_strategy = kind
        if hasattr(config, "create_runtime_cache"):
            # Each number of new features has contexts of its own: without this, each would compile
            # the kernels of the whole model again.
            if not self._kernels:
                self._kernels.append(config.create_runtime_cache())
            config.set_runtime_cache(self._kernels[0])
        made = self._engine.create_execution_context(config)
        context = Context(made, self, self._errors)
        if made is None or not made.set_optimization_profile_async(profile, stream):
            raise context.failure("makes no context")
        made.set_device_memory(scratch, scratch_bytes)
        return context


class Context:
    """An execution context of a plan, for one profile.

    Args:
        context: The library's `IExecutionContext`.
        plan: Its plan.
        errors: What the library's log got.
    """

    def __init__(self, context: Any, plan: Plan, errors: list[str]) -> None:
        self._context = context
        self._plan = plan
        self._errors = errors

    def set_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Set the shapes of all inputs.

        Returns:
            The shapes of the outputs, which follow.

        Raises:
            BackendError: The engine takes no such shapes.
        """
        for name in self._plan.inputs:
            if not self._context.set_input_shape(name, tuple(shapes[name])):
                raise self.failure(f"takes no shape {list(shapes[name])} for {name!r}")
        found = {n: tuple(self._context.get_tensor_shape(n)) for n in self._plan.outputs}
        for name, shape in found.items():
            if any(size < 0 for size in shape):
                raise self.failure(f"leaves the shape of {name!r} open: {list(shape)}")
        return found

    def bind(self, addresses: Mapping[str, int]) -> None:
        """Set where inputs are read and outputs written.

        Raises:
            BackendError: The library refused an address.
        """
        for name, address in addresses.items():
            if not self._context.set_tensor_address(name, address):
                raise self.failure(f"takes no address for {name!r}")

    def enqueue(self, stream: int) -> None:
        """Run it in a stream.

        Raises:
            BackendError: The library refused.
        """
        if not self._context.execute_async_v3(stream):
            raise self.failure("does not run")

    def capturable(self, stream: int) -> bool:
        """Whether a CUDA graph can hold it; the full library can always be captured."""
        if not hasattr(self._context, "is_stream_capturable"):
            return True
        return bool(self._context.is_stream_capturable(stream))

    def failure(self, what: str) -> BackendError | ResourceError:
        """An error with what the library said."""
        said = list(self._errors)
        self._errors.clear()
        if any(map(OUT_OF_MEMORY.search, said)):
            return _out_of_memory(f"engine {self._plan.name!r} {what}", said)
        return BackendError(
            "tensorrt/run", f"engine {self._plan.name!r} {what}", notes=_notes(said)
        )


def _notes(said: Sequence[str]) -> list[str]:
    return [f"TensorRT says: {line[:300]}" for line in said[-3:]]


def _out_of_memory(what: str, said: Sequence[str]) -> ResourceError:
    return ResourceError(
        "tensorrt/out-of-memory",
        f"the GPU has no memory left: {what}",
        notes=_notes(said),
        help="compile with a smaller --max-model-len, or free memory of the GPU",
    )


def deserialize(library: Any, runtime: Any, path: Path, errors: list[str]) -> Any:
    """The engine in a file, which is mapped and not read into memory first.

    Raises:
        UnsupportedError: The library cannot open it here: for want of a driver, or because the plan
            is for another GPU or version.
        ResourceError: The GPU has too little memory for it.
        BundleError: The file is empty.
    """
    errors.clear()
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise BundleError("bundle/engine", "the plan is empty", where=str(path)) from error
        with data:
            engine = runtime.deserialize_cuda_engine(data)
    if engine is None and any(map(OUT_OF_MEMORY.search, errors)):
        raise _out_of_memory(f"{path.name} cannot be opened", errors)
    if engine is None:
        said = errors[-3:] or ["nothing"]
        raise UnsupportedError(
            "tensorrt/deserialize",
            f"{library.__name__} {library.__version__} cannot open the engine",
            where=str(path),
            notes=[f"it says: {line[:300]}" for line in said],
            help="the notes say what is missing: a driver for this version of CUDA, or an engine "
            "that was built for this GPU and this version of the library",
        )
    return engine


def _within(shape: Shape, low: Shape, high: Shape) -> bool:
    return len(shape) == len(low) and all(
        a <= size <= b for size, a, b in zip(shape, low, high, strict=True)
    )


def _differences(library: Any, engine: Any, described: Mapping[str, Any]) -> Iterator[str]:
    """What an engine is, other than the manifest says."""
    names = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
    modes = library.TensorIOMode
    parts = (("inputs", modes.INPUT), ("bound", modes.INPUT), ("outputs", modes.OUTPUT))
    expected = {t["name"]: (t, mode) for part, mode in parts for t in described.get(part, ())}
    if names != expected.keys():
        yield f"it has the tensors {sorted(names ^ expected.keys())} in one of both only"
        return
    for name, (tensor, mode) in expected.items():
        yield from _tensor_differences(library, engine, name, tensor, mode)
    profiles = described["profiles"]
    if engine.num_optimization_profiles != max(len(profiles), 1):
        yield f"it has {engine.num_optimization_profiles} profiles, not {max(len(profiles), 1)}"
        return
    for index, profile in enumerate(profiles):
        for name, shapes in profile["shapes"].items():
            found = [list(s) for s in engine.get_tensor_profile_shape(name, index)]
            if found != [list(s) for s in shapes]:
                yield f"profile {profile['name']} takes {found} for {name!r}, not {shapes}"


def _tensor_differences(
    library: Any, engine: Any, name: str, tensor: Mapping[str, Any], mode: Any
) -> Iterator[str]:
    found: Sequence[tuple[str, Any, Any]] = (
        ("mode", engine.get_tensor_mode(name), mode),
        (
            "type",
            engine.get_tensor_dtype(name),
            getattr(library.DataType, DATA_TYPES[tensor["dtype"]]),
        ),
        ("shape", list(engine.get_tensor_shape(name)), list(tensor["shape"])),
        ("memory", engine.get_tensor_location(name), library.TensorLocation.DEVICE),
    )
    for what, have, want in found:
        if have != want:
            yield f"{what} of {name!r} is {have}, not {want}"
    if "alias" in tensor:
        alias = engine.get_aliased_input_tensor(name) or None
        if alias != tensor["alias"]:
            yield f"{name!r} overwrites {alias}, not {tensor['alias']}"
