"""The builder's Python package: importing it, or saying how to get it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from edgecc.errors import UnsupportedError

NAMES: Mapping[str, tuple[str, str]] = {
    "tensorrt_rtx": ("TensorRT-RTX", "pip install 'edgecc[rtx]'"),
    "tensorrt": ("TensorRT", "pip install 'edgecc[tensorrt]'"),
}
"""Product name and how to install it, by the name of the Python package."""


def load_library(name: str) -> Any:
    """The module `tensorrt_rtx` or `tensorrt`.

    Raises:
        UnsupportedError: It is not installed, or cannot be loaded on this machine.
    """
    product, install = NAMES[name]
    try:
        return importlib.import_module(name)
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
