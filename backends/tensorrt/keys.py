"""Cache keys of engines: everything that decides what the builder makes of one graph.

A key is about one graph and not about its bundle, so a fine-tuned target finds the engines of the
draft it shares with another one.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from edgecc.backends.cache import CacheKey, code_digest
from edgecc.backends.tensorrt.builder import Profile
from edgecc.backends.tensorrt.names import PlanNames, network_digest
from edgecc.devices import Device
from edgecc.ir.core import Graph, Module
from edgecc.ir.weights import Derived, WeightTable

_CODE = (
    "edgecc.backends.tensorrt",
    "edgecc.backends.base",
    "edgecc.backends.onnx.emitter",
    "edgecc.ir",
    "edgecc.nvfp4",
    "edgecc.fp8",
    "edgecc.integers",
)
"""What turns a lowered graph and stored bytes into a network."""

_LIBRARIES = ("numpy", "ml_dtypes")
"""Compute what weights are derived to, such as rotary tables."""

_DRIVER = Path("/proc/driver/nvidia")
_BOARD = Path("/proc/device-tree/model")


def engine_key(
    library: Any,
    device: Device,
    module: Module,
    graph: Graph,
    sizes: Mapping[str, int],
    profiles: Sequence[Profile],
    weights: Iterable[str],
    bound: Iterable[str] = (),
) -> CacheKey | None:
    """The key of a graph's engine; None if it is unknown what the builder would build for.

    Args:
        library: The builder's package.
        device: What is built for.
        module: Owner of the graph, lowered for the device.
        graph: Without calls.
        sizes: Symbols that have one size in all calls.
        profiles: Of the graph.
        weights: Symbols of the weights whose bytes go into the engine.
        bound: Names of inputs that take the place of weights.

    Raises:
        InputError: A stored weight cannot be read.
    """
    machine = "" if hasattr(library, "ComputeCapability") else _gpus()
    if machine is None:
        return None
    table, names = module.weights, PlanNames(module, graph)
    symbols = dict.fromkeys(map(table.resolve, weights))
    return CacheKey(
        kind="engine",
        name=names.graph,
        device=device.name,
        ir=network_digest(module, graph, sizes),
        lowering=_lowering(),
        builder=device.library,
        builder_version=str(library.__version__),
        weights={names.weight(s): weight_digest(table, s) for s in symbols},
        flags={
            "gpu": machine or ", ".join(map(str, device.compute_capabilities)),
            "system": sys.platform,
            "bound weights": ", ".join(bound) or "none",
            **{name: version(name) for name in _LIBRARIES},
            **ranges(profiles),
        },
    )


def weight_digest(table: WeightTable, symbol: str) -> str:
    """SHA-256 of the stored bytes that a weight is made of, and of how it is made, in hex.

    The values themselves need not be computed: the code that does is in the key.
    """
    symbol = table.resolve(symbol)
    weight = table[symbol]
    source = weight.source
    if not isinstance(source, Derived):
        return table.digest(symbol)
    made = [weight_digest(table, name) for name in source.inputs]
    text = json.dumps([source.recipe, source.params, str(weight.encoding), weight.shape, made])
    return hashlib.sha256(text.encode()).hexdigest()


def ranges(profiles: Sequence[Profile]) -> dict[str, str]:
    """What profiles say, by name and input."""
    return {
        f"{profile.name} {name}": f"{list(low)} to {list(high)}, best {list(best)}"
        for profile in profiles
        for name, (low, best, high) in profile.shapes.items()
    }


@cache
def _lowering() -> str:
    return code_digest(*_CODE)


def _gpus() -> str | None:
    """What a builder for the GPU of this machine builds for; None if nothing tells."""
    models = sorted(p.read_text(errors="replace") for p in _DRIVER.glob("gpus/*/information"))
    names = [
        line.partition(":")[2].strip()
        for text in models
        for line in text.splitlines()
        if line.startswith("Model:")
    ]
    if not names and _BOARD.is_file():
        names = [_BOARD.read_text(errors="replace").strip("\0\n")]
    driver = _DRIVER / "version"
    if driver.is_file():
        names += driver.read_text(errors="replace").splitlines()[:1]
    return ", ".join(names) or None
