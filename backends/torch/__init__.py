"""Eager PyTorch: evaluates any graph, as a second oracle beside the NumPy interpreter.

The op table is the same, the arithmetic is not: every op and every weight encoding is written again
in PyTorch's own terms. What both computed alike, on random modules and on real pairs, is very
unlikely to be one mistake made twice. It also runs on CUDA.

File names mirror `edgecc.ir.ops`: `attention.py` here computes the ops of `ir/ops/attention.py`.
PyTorch is an optional extra and is imported when one of the classes is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from edgecc.errors import UnsupportedError

if TYPE_CHECKING:
    from edgecc.backends.torch.executable import TorchExecutable
    from edgecc.backends.torch.executor import TorchExecutor

__all__ = ["TorchExecutable", "TorchExecutor"]

_MODULES = {"TorchExecutable": "executable", "TorchExecutor": "executor"}


def __getattr__(name: str) -> object:
    """Import a class when it is first used.

    Raises:
        UnsupportedError: PyTorch is not installed.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UnsupportedError(
            "torch/not-installed",
            "the torch backend needs PyTorch, which is not installed",
            help="pip install 'edgecc[torch]'",
        ) from error
    return getattr(module, name)
