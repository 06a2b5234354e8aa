"""The builder's Python package: importing it, or saying how to get it."""

from __future__ import annotations

import gc
import importlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from edgecc.errors import UnsupportedError

NAMES: Mapping[str, tuple[str, str]] = {
    "tensorrt_rtx": ("TensorRT-RTX", "pip install 'edgecc[rtx]'"),
    "tensorrt": ("TensorRT", "pip install 'edgecc[tensorrt]'"),
}
"""Product name and how to install it, by the name of the Python package."""


OUT_OF_MEMORY = re.compile(r"OutOfMemory|out of memory|bad_alloc", re.IGNORECASE)
"""How the library's log says so."""

DATA_TYPES: Mapping[str, str] = {
    "f32": "FLOAT",
    "f16": "HALF",
    "bf16": "BF16",
    "f8e4m3": "FP8",
    "f4e2m1": "FP4",
    "i4": "INT4",
    "i64": "INT64",
    "i32": "INT32",
    "i8": "INT8",
    "bool": "BOOL",
}
"""Members of the library's `DataType` by the spelling of element types in IR and manifests."""


def error_log(library: Any, errors: list[str]) -> Any:
    """A logger that says nothing and keeps errors.

    Args:
        library: The module.
        errors: Grows by each message.
    """
    severities = (library.ILogger.Severity.INTERNAL_ERROR, library.ILogger.Severity.ERROR)

    class Log(library.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            library.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in severities:
                errors.append(message)

    return Log()


@contextmanager
def uncollected() -> Iterator[None]:
    """No cyclic garbage collection inside: calls into the library go here.

    The library holds a lock while it calls a logger written in Python. If a collection started
    there and found an old builder in a cycle (a kept traceback is enough), destroying that builder
    would wait for the same lock, for ever.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def load_library(name: str) -> Any:
    """The module `tensorrt_rtx` or `tensorrt`.

    Raises:
        UnsupportedError: It is not installed, cannot be loaded on this machine, or is too old.
    """
    product, install = NAMES[name]
    try:
        library = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "tensorrt/not-installed",
            f"this device needs {product}, which is not installed",
            help=install,
        ) from error
    except (ImportError, OSError) as error:  # a shared library it needs is missing
        raise UnsupportedError(
            "tensorrt/cannot-load", f"{product} cannot be loaded: {error}", help=install
        ) from error
    if not hasattr(library.INetworkDefinition, "add_kv_cache_update"):
        raise UnsupportedError(
            "tensorrt/too-old",
            f"{product} {library.__version__} has no KV caches that are updated in place",
            help=f"they came with TensorRT 10.15, JetPack's own may be older: {install}",
        )
    return library
