"""`passes`: how passes, verifier and text scale with the graph, and what the manager adds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import numpy as np

import edgecc
from benchmarks.pairs import SHIPPED, Settings, checkpoints
from benchmarks.results import Result, Table
from edgecc import ir
from edgecc.devices import get_device
from edgecc.ir.ops.attention import AttentionAttributes
from edgecc.ir.ops.norm import RmsNormAttributes
from edgecc.passes import PassContext, PassManager
from edgecc.passes.default import default_pipeline

SIZES = (1_000, 10_000, 100_000)
PAIRS = (SHIPPED, "deep")
WIDTH = 4
NODES_PER_LAYER = 16


def run(settings: Settings) -> Result:
    """Both tables."""
    scaling = {size: _times(decoder(size // NODES_PER_LAYER)) for size in SIZES}
    overhead = {pair: _overhead(pair, settings) for pair in PAIRS}
    data = {"seconds": {str(k): v for k, v in scaling.items()}, "overhead": overhead}
    return Result("passes", [_scaling_table(scaling), _overhead_table(overhead)], data)


def decoder(layers: int) -> ir.Module:
    """A decoder of many tiny layers with weights of their own, 16 nodes a layer.

    Its shape is that of a real one, so every fusion of the default pipeline applies in each layer.
    """
    module = ir.Module("synthetic", symbols={"b": ir.SymbolRange(1, 1), "t": ir.SymbolRange(1, 8)})
    b = ir.Builder(module, "target")
    random = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> str:
        data = random.standard_normal(shape, np.float32).tobytes()
        source = ir.Inline((("weight", data),))
        return module.weights.add(name, ir.Weight(shape, ir.Dense(ir.DType.F32), source))

    def linear(x: ir.Value, name: str) -> ir.Value:
        return b.op("linear", x, weights=(weight(name, WIDTH, WIDTH),))

    def norm(x: ir.Value, name: str) -> ir.Value:
        return b.op("rms_norm", x, weights=(weight(name, WIDTH),), attrs=RmsNormAttributes(1e-6))

    rows = (ir.sym("b"), ir.sym("t"))
    x = b.input("x", ir.DType.F32, (*rows, WIDTH), ir.Role.ACTIVATION)
    start = b.input("start", ir.DType.I64, (ir.sym("b"),), ir.Role.CACHE_LENGTH)
    shape = (ir.sym("b"), 1, 16, WIDTH)
    caches = [b.input(f"{n}_cache", ir.DType.F32, shape, ir.Role.KV_CACHE) for n in "kv"]
    for i in range(layers):
        b.at(f"layers.{i}")
        y = norm(x, f"{i}.input_norm")
        q, k, v = (linear(y, f"{i}.{n}_proj") for n in "qkv")
        keys, values = (
            b.op("cache_update", cache, new, start)
            for cache, new in zip(caches, (k, v), strict=True)
        )
        length = b.op("advance", start, x)
        attrs = AttentionAttributes(1, 1, 0.5)
        y = b.op("attention", q, keys, values, length, attrs=attrs)
        x = b.op("add", x, linear(y, f"{i}.o_proj"))
        y = norm(x, f"{i}.post_norm")
        y = b.op("swiglu", linear(y, f"{i}.gate_proj"), linear(y, f"{i}.up_proj"))
        x = b.op("add", x, linear(y, f"{i}.down_proj"))
    b.output(x, "y", ir.Role.ACTIVATION)
    return module


def _times(module: ir.Module) -> dict[str, float]:
    """Seconds of each pass of the default pipeline, of the verifier, and of the text forms."""
    manager = PassManager(default_pipeline(get_device("cpu")), verify_each=False)
    texts: list[str] = []
    steps: Mapping[str, Callable[[], object]] = {
        "verify": lambda: ir.verify(module),
        "print": lambda: texts.append(ir.print_module(module)),
        "parse": lambda: ir.parse(texts[0]),
    }
    seconds = {}
    for name, step in steps.items():
        gc.collect()
        begin = perf_counter()
        step()
        seconds[name] = perf_counter() - begin
    gc.collect()
    manager.run(module, PassContext(get_device("cpu")))
    for timing in manager.timings:
        name = timing.name
        seconds[name] = seconds.get(name, 0.0) + timing.seconds
    return seconds


def _overhead(pair: str, settings: Settings) -> dict[str, Any]:
    """The manager's own seconds, verification included, beside those of a whole compile."""
    target, draft = checkpoints(pair, settings.work)
    options = {"max_model_len": 1024}
    own, compiles, nodes = [], [], 0
    for _ in range(settings.repeats):
        module = edgecc.lift(target, draft)
        device = get_device("cpu")
        manager = PassManager(default_pipeline(device))
        begin = perf_counter()
        manager.run(module, PassContext(device))
        total = perf_counter() - begin
        own.append(total - sum(t.seconds for t in manager.timings))
        nodes = sum(len(graph.nodes) for graph in module.graphs.values())
        begin = perf_counter()
        out = settings.work / "bundles" / f"{pair}-passes"
        edgecc.compile(target, draft, out=out, force=True, **options)
        compiles.append(perf_counter() - begin)
    return {
        "nodes": nodes,
        "manager_seconds": float(np.median(own)),
        "compile_seconds": float(np.median(compiles)),
        "ratio": float(np.median(np.array(own) / np.array(compiles))),
    }


def _scaling_table(found: Mapping[int, Mapping[str, float]]) -> Table:
    names = list(dict.fromkeys(name for times in found.values() for name in times))
    middle, large = SIZES[-2:]
    rows = [
        [
            name,
            *(f"{1e6 * found[size][name] / size:.1f}" for size in SIZES),
            f"{found[large][name]:.2f}",
            f"**{found[large][name] / found[middle][name]:.1f}**",
        ]
        for name in names
    ]
    return Table(
        "time of passes against the size of the graph (measured)",
        (
            "step",
            *(f"{size:,} nodes: us a node" for size in SIZES),
            f"{large:,} nodes: s",
            f"ratio of {large:,} to {middle:,}",
        ),
        rows,
        (
            f"a linear step has ratio {large // middle}, a quadratic one {(large // middle) ** 2}",
            "a synthetic decoder in which every fusion applies; passes of one name added up",
        ),
    )


def _overhead_table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = [
        [
            pair,
            times["nodes"],
            f"{1e3 * times['manager_seconds']:.0f}",
            f"{1e3 * times['compile_seconds']:.0f}",
            f"**{100 * times['ratio']:.1f} %**",
        ]
        for pair, times in found.items()
    ]
    return Table(
        "what the pass manager adds, verification after each pass included (measured)",
        ("pair", "nodes", "manager ms", "whole compile ms", "share"),
        rows,
        ("`deep` is a synthetic pair: 64 layers of width 256, a draft of five",),
    )
