"""What a lowered module takes of a device's memory at run time, known before anything is built.

Weights, caches and recurrent states follow from types and encodings. Activations are the largest
set of values that are alive at the same time, for the two kinds of calls a runtime makes: reading a
prompt chunk by chunk, and verifying proposals. Every graph without calls is a program of its own.
The working memory of an ONNX Runtime session stays with it, so the peaks of several are added up;
engines of TensorRT run one after the other in one block, so only the largest counts, and what they
pass to each other.

Not counted: the process, its libraries, what a builder's kernels want as scratch (engines tell that
when they are built), and rounding up by allocators.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import TypeAlias

from edgecc.backends.tensorrt.profiles import verify_rows
from edgecc.devices import Device, Dialect
from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.evaluation import last_uses
from edgecc.ir.types import DimExpr, TensorType, symbols_of
from edgecc.memory_weights import WeightBytes
from edgecc.roles import Role

Sizes: TypeAlias = Mapping[str, int]

_CACHES = ("kv_cache",)
_STATES = ("state", "state_log")
_KEPT = (*_CACHES, *_STATES)
"""Roles of inputs that stay on the device from call to call, updated in place."""

_ATTENTION = ("attention", "cached_attention")
_IMAGE_ATTENTION = ("multi_head_attention",)
_SCORE_BYTES = 4


@dataclass(frozen=True, slots=True)
class PartMemory:
    """Bytes of one part: the target, the draft, or a graph that both call.

    Attributes:
        name: Of the entry or graph.
        stored: Its weights in the bundle; what several parts read counts for the first.
        weights: Its weights as they are computed with, of which
        mapped: are pages of the bundle's files, which the system gives up when memory is short.
        caches: Keys and values.
        states: Recurrent states, and the log they are replayed from; on a GPU, where engines do
            not update them in place, twice.
        prefill: Activations while a prompt is read.
        verify: Activations while proposals are made or verified.
    """

    name: str
    stored: int = 0
    weights: int = 0
    mapped: int = 0
    caches: int = 0
    states: int = 0
    prefill: int = 0
    verify: int = 0

    @property
    def activations(self) -> int:
        """The larger of both kinds of calls: working memory is not given back between them."""
        return max(self.prefill, self.verify)

    @property
    def total(self) -> int:
        """All of it at run time."""
        return self.weights + self.caches + self.states + self.activations

    def as_json(self) -> dict[str, int | str]:
        """All figures in bytes."""
        figures = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**figures, "activations": self.activations, "total": self.total}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory one device needs.

    Attributes:
        device: Its name.
        batch: Sequences at a time.
        max_model_len: Prompt and answer of each together.
        prefill_rows: Rows of a call that reads a prompt.
        verify_rows: Rows of a verification.
        parts: Target, draft, and graphs that both call.
    """

    device: str
    batch: int
    max_model_len: int
    prefill_rows: int
    verify_rows: int
    parts: tuple[PartMemory, ...]

    @property
    def total(self) -> PartMemory:
        """The sum of the parts."""
        sums = {
            f.name: sum(getattr(part, f.name) for part in self.parts)
            for f in fields(PartMemory)
            if f.name != "name"
        }
        return PartMemory("total", **sums)

    @property
    def total_bytes(self) -> int:
        """Run-time memory of all parts."""
        return sum(part.total for part in self.parts)

    def as_json(self) -> dict[str, object]:
        """For `--json`: all figures in bytes."""
        return {
            "device": self.device,
            "batch": self.batch,
            "max_model_len": self.max_model_len,
            "prefill_rows": self.prefill_rows,
            "verify_rows": self.verify_rows,
            "parts": [part.as_json() for part in self.parts],
            "total_bytes": self.total_bytes,
        }

    def lines(self) -> list[str]:
        """A table for people, in megabytes of 10^6 bytes."""
        head = ("", "in bundle", "weights", "caches", "states", "prefill", "verify", "all")
        rows = [
            (p.name, p.stored, p.weights, p.caches, p.states, p.prefill, p.verify, p.total)
            for p in self.parts
        ]
        total = self.total
        sums = (total.stored, total.weights, total.caches, total.states)
        rows.append(("total", *sums, total.prefill, total.verify, self.total_bytes))
        cells = [head, *((r[0], *(f"{n / 1e6:.1f}" for n in r[1:])) for r in rows)]
        widths = [max(len(str(row[i])) for row in cells) for i in range(len(head))]
        mapped = f", {total.mapped / 1e6:.1f} MB of the weights are mapped" if total.mapped else ""
        return [
            f"memory on {self.device} in MB, batch {self.batch}, {self.max_model_len} tokens, "
            f"{self.prefill_rows} rows to prefill, {self.verify_rows} to verify{mapped}",
            *(
                "  ".join(
                    str(c).ljust(w) if i == 0 else str(c).rjust(w)
                    for i, (c, w) in enumerate(zip(row, widths, strict=True))
                ).rstrip()
                for row in cells
            ),
        ]


def plan_memory(module: Module, device: Device, weights: Mapping[str, WeightBytes]) -> MemoryPlan:
    """The memory plan of a module that is legalized for a device.

    Args:
        module: After all passes; no weight is read.
        device: What it was lowered for.
        weights: Bytes of the weights of each graph without calls, see `edgecc.memory_weights`.
    """
    limits = module.metadata.get("limits")
    limits = limits if isinstance(limits, dict) else {}
    batch, rows = int(str(limits.get("max_batch_size", 1))), verify_rows(module)
    chunk = module.symbols["t"].high if "t" in module.symbols else None
    chunk = rows if chunk is None else chunk
    # A prompt is read alone; only models of ONNX Runtime verify several sequences in one call.
    prefill = _sizes(module, 1, chunk, 1)
    verify = _sizes(module, batch if device.dialect is not None else 1, rows, rows)
    towers = {e.name for e in module.entries() if e.by_role(Role.PIXEL_VALUES)}
    figures = {
        "prefill": _activations(module, device, prefill),
        "verify": _activations(module, device, verify, without=towers),
    }
    places = 2 if device.library else 1
    parts = tuple(
        _part(module, name, graphs, {**verify, "b": batch}, weights, figures, places)
        for name, graphs in _parts(module).items()
    )
    length = int(str(limits.get("max_model_len", 0)))
    return MemoryPlan(device.name, batch, length, chunk, rows, parts)


def _sizes(module: Module, batch: int, rows: int, wanted: int) -> dict[str, int]:
    """Symbols of a call with so many rows: `b`, `r`, and all others are rows.

    The tower reads one image a call, while a prompt is read: the largest one it takes.
    """
    sizes = dict.fromkeys(module.symbols, rows)
    inputs = (i for g in module.graphs.values() for i in g.by_role(Role.PIXEL_VALUES))
    for name in symbols_of(dim for i in inputs for dim in i.value.type.shape):
        sizes[name] = module.symbols[name].high
    return sizes | {"b": batch, "r": wanted}


def _parts(module: Module) -> dict[str, list[Graph]]:
    """Graphs by part: an entry with what it alone calls, and each graph that several call."""
    reached = {entry.name: list(_reachable(module, entry)) for entry in module.entries()}
    parts: dict[str, list[Graph]] = {name: [] for name in reached}
    for graph in module.graphs.values():
        callers = [name for name, graphs in reached.items() if graph in graphs]
        parts.setdefault(callers[0] if len(callers) == 1 else graph.name, []).append(graph)
    return parts


def _reachable(module: Module, graph: Graph) -> Iterator[Graph]:
    yield graph
    for name in graph.callees():
        yield from _reachable(module, module.graphs[name])


def _part(
    module: Module,
    name: str,
    graphs: Iterable[Graph],
    sizes: Sizes,
    weights: Mapping[str, WeightBytes],
    figures: Mapping[str, Mapping[str, int]],
    places: int,
) -> PartMemory:
    """The figures of one part; states have so many places."""
    graphs = list(graphs)
    held = [weights[g.name] for g in graphs if g.name in weights]
    kept = [i for g in graphs if g in module.entries() for i in g.inputs if i.role in _KEPT]
    return PartMemory(
        name,
        stored=sum(w.stored for w in held),
        weights=sum(w.resident for w in held),
        mapped=sum(w.mapped for w in held),
        caches=sum(_nbytes(i.value.type, sizes) for i in kept if i.role in _CACHES),
        states=places * sum(_nbytes(i.value.type, sizes) for i in kept if i.role in _STATES),
        prefill=sum(figures["prefill"].get(g.name, 0) for g in graphs),
        verify=sum(figures["verify"].get(g.name, 0) for g in graphs),
    )


def _activations(
    module: Module, device: Device, sizes: Sizes, *, without: Collection[str] = ()
) -> dict[str, int]:
    """By graph: what entries are passed, and the peak of each graph without calls.

    A graph that is called several times has the largest of its peaks.

    Args:
        module: Legalized for the device.
        device: What it was lowered for.
        sizes: Value of every symbol.
        without: Entries that do not run.
    """
    if device.library:
        return _engine_activations(module, sizes, without)
    found: dict[str, int] = {}
    for entry in (e for e in module.entries() if e.name not in without):
        passed = (i.value.type for i in entry.inputs if i.role not in _KEPT)
        found[entry.name] = sum(_nbytes(t, sizes) for t in passed)
        for graph, bound in _leaves(module, entry, sizes):
            peak = peak_bytes(
                graph,
                bound,
                scores=device.dialect is not None,
                image_scores=device.dialect is Dialect.STANDARD,
            )
            own = found[entry.name] if graph is entry else 0
            found[graph.name] = max(found.get(graph.name, 0), own + peak)
    return found


def _engine_activations(module: Module, sizes: Sizes, without: Collection[str]) -> dict[str, int]:
    """By graph: what entries are passed, what their engines pass on, and one block for all."""
    found: dict[str, int] = {}
    block, largest = 0, ""
    for entry in (e for e in module.entries() if e.name not in without):
        aliased = {o.value for o in entry.outputs if o.alias is not None}
        calls = [n for n in entry.nodes if n.op.name == "call"]
        passed = [i.value for i in entry.inputs if i.role not in _KEPT]
        passed += [r for n in calls for r in n.results if r not in aliased]
        found[entry.name] = sum(_nbytes(v.type, sizes) for v in passed)
        for graph, bound in _leaves(module, entry, sizes):
            peak = peak_bytes(graph, bound, scores=False, outputs=graph is entry)
            if peak > block:
                block, largest = peak, graph.name
    if largest:
        found[largest] = found.get(largest, 0) + block
    return found


def _leaves(module: Module, graph: Graph, sizes: Sizes) -> Iterator[tuple[Graph, Sizes]]:
    """Each call of a graph without calls, with the sizes of its symbols there."""
    calls = [n for n in graph.nodes if n.op.name == "call"]
    if not calls:
        yield graph, sizes
    for node in calls:
        callee = module.graphs[str(getattr(node.attrs, "callee", ""))]
        yield from _leaves(module, callee, {**sizes, **_bound(callee, node, sizes)})


def _bound(callee: Graph, node: Node, sizes: Sizes) -> dict[str, int]:
    """Symbols of a callee that are whole axes of its inputs."""
    found: dict[str, int] = {}
    for item, operand in zip(callee.inputs, node.operands, strict=True):
        shape = _shape(operand.type, sizes)
        for dim, size in zip(item.value.type.shape, shape, strict=True):
            if isinstance(dim, DimExpr) and dim == DimExpr(((dim.terms[0][0], 1),)):
                found[dim.terms[0][0]] = size
    return found


def peak_bytes(
    graph: Graph,
    sizes: Sizes,
    *,
    scores: bool,
    image_scores: bool = False,
    outputs: bool = True,
) -> int:
    """The most bytes that results of a graph's nodes take at the same time.

    Values live from the node that makes them to the last that reads them, outputs to the end.
    Updated caches and states lie in the buffers of the old ones and take nothing. Inputs are not
    counted: they are the caller's.

    Args:
        graph: Without calls.
        sizes: Value of every symbol.
        scores: Whether attention keeps its scores f32 `[b, heads, t, capacity]` while it runs.
        image_scores: Whether that of a vision tower does, f32 `[1, heads, s, s]`.
        outputs: Whether the graph makes its outputs; else they are the caller's, like inputs.
    """
    nodes = list(graph.nodes)
    aliased = {o.value for o in graph.outputs if o.alias is not None or not outputs}
    dead = last_uses(nodes, (o.value for o in graph.outputs))

    def size(value: Value) -> int:
        in_place = value in aliased or value.producer is None
        return 0 if in_place else _nbytes(value.type, sizes)

    held = {*(_ATTENTION if scores else ()), *(_IMAGE_ATTENTION if image_scores else ())}
    live = most = 0
    for index, node in enumerate(nodes):
        live += sum(map(size, node.results))
        most = max(most, live + (_scores(node, sizes) if node.op.name in held else 0))
        live -= sum(map(size, dead.get(index, ())))
    return most


def _scores(node: Node, sizes: Sizes) -> int:
    batch, rows = _shape(node.operands[0].type, sizes)[:2]
    caches = [v.type for v in node.operands if v.type.rank == 4]
    capacity = _shape(caches[0], sizes)[2] if caches else rows
    return _SCORE_BYTES * batch * int(getattr(node.attrs, "heads", 1)) * rows * capacity


def _shape(type: TensorType, sizes: Sizes) -> tuple[int, ...]:
    dims = (d.substitute(sizes) if isinstance(d, DimExpr) else d for d in type.shape)
    return tuple(int(str(d)) for d in dims)


def _nbytes(type: TensorType, sizes: Sizes) -> int:
    return type.dtype.nbytes(prod(_shape(type, sizes)))
