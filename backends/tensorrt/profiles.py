"""Optimization profiles of a graph: which sizes its inputs have in calls of the runtime."""

from __future__ import annotations

from collections.abc import Mapping

from edgecc.backends.onnx.emitter import sequences
from edgecc.backends.tensorrt.builder import Profile
from edgecc.ir.clone import CACHE_AXIS
from edgecc.ir.core import Graph, Module
from edgecc.ir.types import Dim, DimExpr, symbols_of
from edgecc.roles import Role

IMAGE_TOKENS = 1024
"""Tokens of the images that a tower is made fastest for: a megapixel, at 32 pixels a side."""

Range = tuple[int, int, int]
"""Smallest, most likely, largest."""


def verify_rows(module: Module) -> int:
    """Rows of a verification: the proposals and the token before them; 1 without a draft."""
    draft = module.metadata.get("draft")
    steps = draft.get("num_speculative_tokens", 0) if isinstance(draft, dict) else 0
    return int(str(steps)) + 1


def fixed_sizes(module: Module, graph: Graph) -> dict[str, int]:
    """Symbols of a graph that have one size: by their range, or because all callers pass it.

    Engines run one sequence at a time, whatever number a module was lifted for.
    """
    sizes = {
        name: found.low
        for name, found in module.symbols.items()
        if found.low == found.high and found.low > 0
    }
    if sequences(module) > 1:
        sizes["b"] = 1
    passed: dict[str, set[Dim]] = {}
    for caller in module.graphs.values():
        for node in caller.nodes:
            if node.op.name != "call" or getattr(node.attrs, "callee", "") != graph.name:
                continue
            for item, operand in zip(graph.inputs, node.operands, strict=True):
                for want, have in zip(item.value.type.shape, operand.type.shape, strict=True):
                    if isinstance(want, DimExpr) and want == DimExpr(want.terms[:1]):
                        size = have if isinstance(have, int) else have.substitute(sizes)
                        passed.setdefault(want.terms[0][0], set()).add(size)
    for name, found in passed.items():
        (first, *more) = found
        if not more and isinstance(first, int):
            sizes[name] = first
    return sizes


def profiles(module: Module, graph: Graph, sizes: Mapping[str, int]) -> list[Profile]:
    """`verify` for the calls of decoding, `prefill` for those of reading a prompt.

    One profile is enough where no size is chosen by calls, or where both would be the same, and for
    a vision tower, which takes images of any size: `image`.

    Args:
        module: Owner of the graph; its symbols have the ranges.
        graph: The graph.
        sizes: Symbols with one size.
    """
    names = symbols_of(d for i in graph.inputs for d in i.value.type.shape) - sizes.keys()
    if not names:
        return []
    rows = verify_rows(module)
    found = {n: module.symbols[n] for n in sorted(names)}
    most = _fitting(graph, sizes)
    largest = {n: max(1, min(r.high, most.get(n, r.high))) for n, r in found.items()}
    smallest = {n: max(1, r.low) for n, r in found.items()}
    if graph.by_role(Role.PIXEL_VALUES):
        image = {n: (smallest[n], min(IMAGE_TOKENS, largest[n]), largest[n]) for n in found}
        return [_profile("image", graph, sizes, image)]
    decode = {n: (smallest[n], *(min(max(rows, smallest[n]), largest[n]),) * 2) for n in found}
    read = {n: (smallest[n], largest[n], largest[n]) for n in found}
    made = [_profile("verify", graph, sizes, decode)]
    if read != decode:
        made.append(_profile("prefill", graph, sizes, read))
    return made


def _fitting(graph: Graph, sizes: Mapping[str, int]) -> dict[str, int]:
    """Largest sizes with which the rows of each cache update fit into its cache."""
    most: dict[str, int] = {}
    for node in graph.nodes:
        if node.op.name != "cache_update":
            continue
        cache, new = node.operands[0].type.shape[CACHE_AXIS], node.operands[1].type.shape[1]
        rows = new if isinstance(new, int) else new.substitute(sizes)
        if isinstance(cache, int) and isinstance(rows, DimExpr) and len(rows.terms) == 1:
            ((name, factor),) = rows.terms
            fitting = (cache - rows.constant) // factor
            most[name] = min(fitting, most.get(name, fitting))
    return most


def _profile(
    name: str, graph: Graph, sizes: Mapping[str, int], ranges: Mapping[str, Range]
) -> Profile:
    def shape(dims: tuple[Dim, ...], index: int) -> tuple[int, ...]:
        values = {**sizes, **{n: r[index] for n, r in ranges.items()}}
        return tuple(int(str(d if isinstance(d, int) else d.substitute(values))) for d in dims)

    return Profile(
        name,
        {
            item.name: (shape(dims, 0), shape(dims, 1), shape(dims, 2))
            for item in graph.inputs
            if symbols_of(dims := item.value.type.shape) - sizes.keys()
        },
    )
