"""The strategies users draw from."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

from hypothesis import strategies as st

from edgecc.ir.core import Module
from edgecc.ir.encodings import Dense, Encoding
from edgecc.ir.ops import (
    OPS,
    attention,
    elementwise,
    get_op,
    matmul,
    norm,
    quantization,
    sampling,
    shape,
    state,
)
from edgecc.ir.types import DType, Shape, TensorType, sym
from edgecc.testing.emit import Emitter
from edgecc.testing.encoding_samples import ENCODINGS, encodings_of
from edgecc.testing.expressions import Expr, Wanted, floats, indices
from edgecc.testing.families import RULES
from edgecc.testing.rules import Budget
from edgecc.testing.weight_trees import add_weight, weights, word_weights

_ROWS: tuple[Shape, ...] = (
    (sym("t"),),
    (sym("b"), sym("t")),
    (sym("b"), sym("s")),
    (sym("b"), 3),
    (sym("b"), 1),
    (1,),
    (),
    (0,),
)
"""Leading axes of outputs, simplest first."""

WIDTHS = ((4, 2), (8, 4), (3, 2), (1, 4), (0, 4))
"""Widths that occur in one module: few, so that they meet. Blocks divide some of them."""

ENCODINGS_USED = (
    (Dense(DType.F32), Dense(DType.BF16)),
    *((Dense(DType.F32), *listed) for listed in ENCODINGS.values()),
    tuple(e for listed in ENCODINGS.values() for e in listed),
)
"""Encodings that occur in one module: plain ones, those of one class, or all."""


def encodings(*dims: int) -> st.SearchStrategy[Encoding]:
    """Encodings that can hold a weight of this shape, dense f32 simplest."""
    return st.sampled_from(encodings_of(dims))


THEMES: tuple[frozenset[str], ...] = tuple(
    frozenset(op.name for family in families for op in family.OPS)
    for families in (
        (elementwise, norm, matmul, quantization),
        (attention, matmul, shape),
        (state, norm, matmul),
        (shape, elementwise),
        (sampling, matmul, shape),
    )
)
"""Ops that occur in one module, unless all do: those that belong together meet more often."""


@st.composite
def modules(
    draw: st.DrawFn,
    *,
    ops: Collection[str] | None = None,
    results: Sequence[TensorType] | None = None,
    graphs: int = 2,
    outputs: int = 3,
    depth: int = 3,
    dead: bool = False,
    unbound: bool = False,
) -> Module:
    """Well-typed modules over all ops and encodings, with inline weights that graphs share.

    Graphs have inputs of awkward sizes (none, one, no multiple of any block), call other graphs,
    and return updated caches in place of the old ones. They shrink to few ops.

    Args:
        draw: Given by Hypothesis.
        ops: The only ops that may occur; all by default.
        results: Types the outputs of graphs are taken from, f32 ones only.
        graphs: Most graphs the runtime starts; those they call come on top.
        outputs: Most outputs of a graph, updated caches not counted.
        depth: Most rules on a path; a rule places one op, or a few that belong together.
        dead: Whether there may be nodes and weights that no output needs.
        unbound: Whether there may be unbound weights; such modules cannot be evaluated.

    Raises:
        UnsupportedError: There is no such op.
    """
    allowed = frozenset(OPS if ops is None else (get_op(op).name for op in ops))
    theme, widths, listed = draw(_PALETTES)
    budget = _budget(allowed & (theme or allowed), widths, listed, unbound)
    wanted = [floats(*type.shape) for type in results or ()] or _results(budget.widths)
    root = st.sampled_from(wanted).flatmap(lambda w: budget.expressions(w, depth, root=True))
    kept = st.lists(st.booleans(), min_size=outputs, max_size=outputs)
    drawn = st.tuples(st.lists(root, min_size=1, max_size=outputs), kept)
    module, callees = Module("random"), dict[tuple[Expr, ...], str]()
    for index, (trees, keep) in enumerate(draw(st.lists(drawn, min_size=1, max_size=graphs))):
        emit = Emitter(module, f"g{index}", callees)
        for number, tree in enumerate(trees):
            if keep[number] or not dead:
                emit.output(tree, f"y{number}")
            else:
                emit(tree)
        emit.return_caches()
    if dead and draw(st.booleans()):
        of = draw(st.one_of(weights(2, 2), word_weights(2, 8)))
        module.weights.derive("unread", "concat_rows", (add_weight(module, of),))
    return module


_PALETTES = st.tuples(
    st.sampled_from((None, *THEMES)), st.sampled_from(WIDTHS), st.sampled_from(ENCODINGS_USED)
)


@functools.cache
def _budget(
    ops: frozenset[str], widths: tuple[int, ...], encodings: tuple[Encoding, ...], unbound: bool
) -> Budget:
    return Budget(RULES, ops, widths, encodings, unbound=unbound)


def _results(widths: Sequence[int]) -> list[Wanted]:
    """What outputs are, unless the caller says: rows of features, indices, caches."""
    return [
        *(floats(*rows, width) for rows in _ROWS for width in widths),
        floats(),
        *(indices(below, *rows) for rows in _ROWS[:4] for below in (5, 11)),
        *(floats(sym("b"), heads, 5, 2) for heads in (1, 2)),
    ]
