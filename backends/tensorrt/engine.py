"""Opening TensorRT engines: says what is missing, because nothing runs them yet."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NoReturn

from edgecc.errors import UnsupportedError


def open_engine(
    bundle: Any,
    artifact: Mapping[str, Any],
    *,
    num_threads: int | None = None,
    progress: object = None,
) -> NoReturn:
    """Refuse, with the reason.

    Args:
        bundle: The bundle.
        artifact: Its part of the manifest.
        num_threads: Not used.
        progress: Not used.

    Raises:
        UnsupportedError: Always: edgecc builds TensorRT engines and does not run them yet.
    """
    gpus = ", ".join(f"{n // 10}.{n % 10}" for n in artifact.get("compute_capabilities", ()))
    raise UnsupportedError(
        "tensorrt/cannot-run",
        "this edgecc builds TensorRT engines, but cannot run them yet",
        where=str(getattr(bundle, "path", "")),
        notes=[
            f"the engines are for GPUs of compute capability {gpus or 'unknown'}",
            _present(str(artifact.get("library", ""))),
        ],
        help="compile for --device cpu to run here; `edgecc inspect` shows the engines",
    )


def _present(library: str) -> str:
    """What this machine has of what running them takes."""
    if library not in ("tensorrt_rtx", "tensorrt"):
        return f"the manifest names no library of ours: {library!r}"
    try:
        module = importlib.import_module(library)
    except (ImportError, OSError):
        return f"{library} is not installed here"
    logger = module.Logger(module.Logger.INTERNAL_ERROR)
    if module.Runtime(logger) is None:
        return f"{library} {module.__version__} has no runtime here"
    return f"{library} {module.__version__} is installed here"
