"""Small random modules for property tests, and what every pass must keep.

`modules()` draws typed expression trees from the wanted result downwards; equal subtrees become one
shared node, so that failures shrink to small graphs. `check_pass` runs a pass on a module and
compares values bit for bit before and after. `helpers.pairs` has decoder-like modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgecc.ir import (
    Builder,
    DType,
    Graph,
    Interpreter,
    Module,
    Role,
    SymbolRange,
    Value,
    print_module,
    sym,
    verify,
)
from edgecc.ir.ops.norm import RmsNormAttributes
from edgecc.ir.ops.shape import AxisAttributes, SliceAttributes, SplitAttributes
from edgecc.ir.types import substitute
from edgecc.passes.base import Pass, PassContext
from helpers.ops import assert_same_bits
from helpers.weights import dense, packed

Array: TypeAlias = NDArray[Any]
Inputs: TypeAlias = Mapping[str, Mapping[str, Array]]
"""Arrays by graph and input name."""

Tree: TypeAlias = tuple[Any, ...]
"""An expression of shape `[t, width]`: op, width, then children and parameters."""

WIDTHS = (2, 4, 8)


@lru_cache
def trees(width: int, depth: int) -> st.SearchStrategy[Tree]:
    """Expressions with at most `depth` ops on a path."""
    leaf = st.just(("input", width))
    if depth == 0:
        return leaf
    same = trees(width, depth - 1)
    options: list[st.SearchStrategy[Tree]] = [
        leaf,
        st.tuples(st.sampled_from(["silu", "sigmoid"]), st.just(width), same),
        st.tuples(st.sampled_from(["add", "mul", "swiglu"]), st.just(width), same, same),
        st.tuples(st.just("rms_norm"), st.just(width), same, _weights(1)),
    ]
    for columns in WIDTHS:
        x, weight = trees(columns, depth - 1), _weights(columns)
        options.append(st.tuples(st.just("linear"), st.just(width), x, weight, st.booleans()))
        # Two layers of one input: what the fusions look for.
        options.append(st.builds(_gated, st.just(width), x, weight, weight))
    for wider in WIDTHS:
        if wider > width:
            x = trees(wider, depth - 1)
            starts, pieces = st.integers(0, wider - width), st.integers(0, wider // width - 1)
            options.append(st.tuples(st.just("slice"), st.just(width), x, starts))
            options.append(st.tuples(st.just("split"), st.just(width), x, pieces))
    if width > min(WIDTHS):
        half = trees(width // 2, depth - 1)
        options.append(st.tuples(st.just("concat"), st.just(width), half, half))
    return st.one_of(options)


def _weights(columns: int) -> st.SearchStrategy[tuple[str, int]]:
    """Encoding and seed: few of each, so that weights are used twice."""
    kinds = ["f32", "bf16", "nvfp4"] if columns % 4 == 0 else ["f32", "bf16"]
    return st.tuples(st.sampled_from(kinds), st.integers(0, 2))


def _gated(width: int, x: Tree, gate: tuple[str, int], up: tuple[str, int]) -> Tree:
    layers = [("linear", width, x, weight, False) for weight in (gate, up)]
    return ("swiglu", width, *layers)


class _Emitter:
    """Turns trees into nodes of one graph."""

    def __init__(self, module: Module, name: str) -> None:
        self.builder = Builder(module, name)
        self._values: dict[Tree, Value] = {}

    def __call__(self, tree: Tree) -> Value:
        """The value of a tree; equal trees give the same one."""
        op, width, *rest = tree
        if tree not in self._values:
            make = getattr(self, f"_{op}", None)
            self._values[tree] = (
                make(width, *rest) if make else self.builder.op(op, *map(self, rest))
            )
        return self._values[tree]

    def _input(self, width: int) -> Value:
        return self.builder.input(f"x{width}", DType.F32, (sym("t"), width), Role.ACTIVATION)

    def _rms_norm(self, width: int, x: Tree, weight: tuple[str, int]) -> Value:
        symbol = add_weight(self.builder.module, *weight, (width,))
        return self.builder.op(
            "rms_norm", self(x), weights=(symbol,), attrs=RmsNormAttributes(1e-5)
        )

    def _linear(self, width: int, x: Tree, weight: tuple[str, int], bias: bool) -> Value:
        symbols = [add_weight(self.builder.module, *weight, (width, x[1]))]
        if bias:
            symbols.append(add_weight(self.builder.module, "bf16", weight[1], (width,)))
        return self.builder.op("linear", self(x), weights=symbols)

    def _slice(self, width: int, x: Tree, start: int) -> Value:
        attrs = SliceAttributes(1, start, start + width)
        return self.builder.op("slice", self(x), attrs=attrs)

    def _split(self, width: int, x: Tree, index: int) -> Value:
        sizes = (width,) * (x[1] // width)
        node = self.builder.node("split", (self(x),), attrs=SplitAttributes(1, sizes))
        for i, piece in enumerate(node.results):
            self._values["split", width, x, i] = piece
        return node.results[index]

    def _concat(self, width: int, *parts: Tree) -> Value:
        return self.builder.op("concat", *map(self, parts), attrs=AxisAttributes(1))


def add_weight(module: Module, kind: str, seed: int, shape: tuple[int, ...]) -> str:
    """An inline weight fixed by its arguments; vectors of kind nvfp4 are bf16.

    NVFP4 weights of seeds 0 and 1 share a global scale, so they can be stacked; seed 2 has its own.
    """
    kind = kind if len(shape) == 2 or kind != "nvfp4" else "bf16"
    symbol = f"{kind}.{'x'.join(map(str, shape))}.{seed}"
    if symbol not in module.weights:
        rng = np.random.default_rng([seed, *shape])
        if kind == "nvfp4":
            made = packed(rng, shape[0], shape[1], global_scale=0.125 if seed == 2 else 0.0625)
            module.weights.add(symbol, made.weight)
        else:
            module.weights.add(symbol, dense(rng.standard_normal(shape) / 2, DType(kind)))
    return symbol


@st.composite
def modules(
    draw: st.DrawFn, *, graphs: int = 2, outputs: int = 3, depth: int = 4, dead: bool = False
) -> Module:
    """Modules of a few graphs over inputs `[t, width]`, with inline weights that they share.

    Args:
        draw: Of Hypothesis.
        graphs: Most graphs.
        outputs: Most outputs of a graph.
        depth: Most ops on a path.
        dead: Whether there may be nodes and weights that no output needs.
    """
    root = st.sampled_from(WIDTHS).flatmap(lambda width: trees(width, depth))
    kept = st.lists(st.booleans(), min_size=outputs, max_size=outputs)
    roots = st.tuples(st.lists(root, min_size=1, max_size=outputs), kept)
    module = Module("random", symbols={"t": SymbolRange(0, 16)})
    for index, (wanted, keep) in enumerate(draw(st.lists(roots, min_size=1, max_size=graphs))):
        emit = _Emitter(module, f"g{index}")
        for number, tree in enumerate(wanted):
            value = emit(tree)
            if keep[number] or not dead:
                emit.builder.output(value, f"y{number}", Role.ACTIVATION)
    if dead and draw(st.booleans()):
        module.weights.derive("unread", "concat_rows", (add_weight(module, "f32", 0, (2, 2)),))
    return module


def random_inputs(module: Module, seed: int = 0, *, rows: int = 3) -> dict[str, dict[str, Array]]:
    """Normal deviates for every input of every entry; all symbols are `rows`."""
    rng = np.random.default_rng(seed)
    sizes = dict.fromkeys(module.symbols, rows)
    return {
        graph.name: {
            i.name: rng.standard_normal(substitute(i.value.type.shape, sizes)).astype(np.float32)
            for i in graph.inputs
        }
        for graph in module.entries()
    }


def evaluate(module: Module, inputs: Inputs) -> dict[str, Array]:
    """Outputs of all entries, by `graph.output`."""
    run = Interpreter(module).run
    return {
        f"{graph}.{name}": array
        for graph, arrays in inputs.items()
        for name, array in run(graph, arrays).items()
    }


def interface(graph: Graph) -> list[tuple[object, ...]]:
    """What the runtime sees of a graph."""
    inputs = [(i.name, i.role, i.value.type) for i in graph.inputs]
    return [*inputs, *((o.name, o.role, o.value.type, o.alias) for o in graph.outputs)]


def storage(module: Module) -> set[str]:
    """Symbols with bytes of their own that nodes depend on: what ends up in a bundle."""
    table = module.weights
    used = {
        d for g in module.graphs.values() for s in g.used_weights() for d in table.dependencies(s)
    }
    return {s for s in used if table.resolve(s) == s}


def module_text(module: Module) -> str:
    """The printed module without the hashes that are printed once they are known."""
    return print_module(module, hashes=False)


def check_pass(
    made: Pass[Any], module: Module, inputs: Inputs | None = None, ctx: PassContext | None = None
) -> bool:
    """Run a pass and check everything that holds for all of them but `drop-outputs`.

    The module verifies before and after, entries and their interfaces stay, values are equal bit
    for bit, the answer whether anything changed is true, and a second run changes nothing.

    Returns:
        Whether the pass changed the module.
    """
    assert verify(module) == []
    ctx = ctx or PassContext()
    inputs = random_inputs(module) if inputs is None else inputs
    text, decisions = module_text(module), list(module.decisions)
    entries = {g.name: interface(g) for g in module.entries()}
    before = evaluate(module, inputs)

    changed = made.run(module, ctx)

    assert verify(module) == []
    assert {g.name: interface(g) for g in module.entries()} == entries
    after = evaluate(module, inputs)
    assert list(after) == list(before)
    assert_same_bits(list(after.values()), list(before.values()))
    new_text = module_text(module)
    assert changed is (new_text != text or module.decisions != decisions)
    assert made.run(module, PassContext(ctx.device)) is False
    assert module_text(module) == new_text
    return changed
