"""Lowerings of layers with a recurrent state: short convolution and Gated DeltaNet, in float32.

The delta rule is not walked row by row: a loop cannot be part of a CUDA graph. All rows of a call
are the solution of one triangular system (arXiv 2406.06484, with the decays of arXiv 2412.06464),
whose inverse is put together from the inverses of blocks of 1, 2, 4 ... rows. That takes as many
steps as the largest call has binary digits, works for any number of rows, and is as exact as
forward substitution; products of powers of the matrix, which take as few steps, are not.
See docs/adr/0015-recurrent-layers-on-tensorrt.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgecc.backends.tensorrt.emitter import Emitter, Tensor, lowers
from edgecc.backends.tensorrt.shape import join, row_numbers
from edgecc.backends.tensorrt.weights import table
from edgecc.errors import LegalizeError
from edgecc.ir.core import Node, Value, site
from edgecc.ir.ops.state import L2_EPSILON, GatedDeltaNetAttributes
from edgecc.ir.types import DType

MAX_ROWS = 512
"""Largest call. A system has rows x rows numbers for each value head: 50 MB for 48 heads."""

_RANK = 5
"""Operands of the delta rule are `[b, key heads, value heads of each, rows, width]`."""


@lowers("causal_conv1d")
def causal_conv1d(e: Emitter, node: Node) -> None:
    """Taps from the oldest to the newest, each times the rows it meets, added in that order."""
    x, state = node.operands
    taps = int(str(state.type.shape[2])) + 1
    before = e.transpose(e.cast(e.value(state), DType.F32), (0, 2, 1))
    window = join(e, [before, e.cast(e.value(x), DType.F32)], 1)
    weight = e.transpose(table(e, node.weights[0]), (1, 2, 0))  # [1, taps, C]
    total = None
    for j in range(taps):
        tap = e.out("slice", e.network.add_slice(weight, (0, j, 0), _one_row(x), (1, 1, 1)))
        term = e.binary("PROD", _rows(e, window, x, j), tap)
        total = term if total is None else e.binary("SUM", total, term)
    kept = e.transpose(_last_rows(e, window, x, taps - 1), (0, 2, 1))
    result, after = node.results
    e.result(node, e.cast(total, result.type.dtype), e.cast(kept, after.type.dtype))


def _one_row(x: Value) -> tuple[int, int, int]:
    return (1, 1, int(str(x.type.shape[2])))


def _rows(e: Emitter, window: Tensor, x: Value, start: int) -> Tensor:
    """As many rows of the window as x has, from `start` on."""
    sizes = e.shape(x)
    known = tuple(max(d, 0) for d in sizes)
    layer = e.layer("rows", e.network.add_slice(window, (0, start, 0), known, (1, 1, 1)))
    if -1 in sizes:
        layer.set_input(2, e.shape_of(x))
    return layer.get_output(0)


def _last_rows(e: Emitter, window: Tensor, x: Value, count: int) -> Tensor:
    """The last rows of the window: as many as come before those of x."""
    batch, rows, width = e.shape(x)
    first = (0, max(rows, 0), 0)
    sizes = (max(batch, 0), count, width)
    layer = e.layer("last", e.network.add_slice(window, first, sizes, (1, 1, 1)))
    zero, number = (e.constant(np.array([n], dtype=np.int64)) for n in (0, count))
    if rows < 0:
        layer.set_input(1, join(e, [zero, e.run_size(x, 1), zero], 0))
    if batch < 0:
        layer.set_input(2, join(e, [e.run_size(x, 0), number, e.run_size(x, 2)], 0))
    return layer.get_output(0)


@lowers("gated_delta_net")
def gated_delta_net(e: Emitter, node: Node) -> None:
    """One triangular system for all rows of a call.

    With `G` the sums of log decays, `D_ij = exp(G_i - G_j)` for i >= j and 0 else:

    - `A = I + strictly lower(beta_i k_i.k_j D_ij)`;
    - `U = A^-1 (beta (V - exp(G) K S))`;
    - result `exp(G) Q S + ((Q K^T) * D) U`, state `exp(G_T) S + (exp(G_T - G) K)^T U`.

    The differences of sums are sums of the decays between two rows, all of one sign, so none is
    lost to cancellation.

    Raises:
        LegalizeError: A call may have more than `MAX_ROWS` rows.
    """
    e.exact_float32 = True  # TF32 has as few digits as f16: states would lose small updates
    rows = _Rows.of(e, node)
    q, k, v, a, b, state = node.operands
    attrs = node.attrs
    assert isinstance(attrs, GatedDeltaNetAttributes)
    _, _, key_dim, value_dim = (int(str(d)) if i else d for i, d in enumerate(state.type.shape))
    batch, groups = state.type.shape[0], attrs.value_heads // attrs.key_heads
    heads = (batch, attrs.key_heads, groups)
    count = q.type.shape[1]

    def per_head(x: Value, per_key: int, width: int) -> Tensor:
        """`[b, rows, heads * width]` to `[b, key heads, heads of each, rows, width]`."""
        wide = e.cast(e.value(x), DType.F32)
        split = e.reshape(wide, (batch, count, attrs.key_heads, per_key, width))
        return e.transpose(split, (0, 2, 3, 1, 4))

    query = _scaled(e, _normalized(e, per_head(q, 1, int(str(key_dim)))), float(key_dim) ** -0.5)
    key = _normalized(e, per_head(k, 1, int(str(key_dim))))
    value = per_head(v, groups, int(str(value_dim)))
    before = e.reshape(e.cast(e.value(state), DType.F32), (*heads, key_dim, value_dim))
    write = e.activation("SIGMOID", per_head(b, groups, 1))
    log_decay = _log_decay(e, node, per_head(a, groups, 1), heads[1:])

    decay = rows.between(log_decay)
    carried = e.unary("EXP", rows.up_to(log_decay))
    key_products = e.matmul(key, key, transpose_b=True)
    system = rows.earlier(e.binary("PROD", e.binary("PROD", write, decay), key_products))
    wrong = e.binary("SUB", value, e.binary("PROD", carried, e.matmul(key, before)))
    update = e.matmul(rows.inverse(system), e.binary("PROD", write, wrong))
    seen = e.binary("PROD", decay, e.matmul(query, key, transpose_b=True))
    out = e.binary(
        "SUM", e.binary("PROD", carried, e.matmul(query, before)), e.matmul(seen, update)
    )
    left = e.binary("PROD", e.unary("EXP", rows.after(log_decay)), key)
    total = e.unary("EXP", e.reduce("SUM", log_decay, _RANK - 2))
    after = e.binary(
        "SUM", e.binary("PROD", total, before), e.matmul(left, update, transpose_a=True)
    )
    joined = e.reshape(e.transpose(out, (0, 3, 1, 2, 4)), v.type.shape)
    result, new = node.results
    e.result(
        node,
        e.cast(joined, result.type.dtype),
        e.cast(e.reshape(after, state.type.shape), new.type.dtype),
    )


def _scaled(e: Emitter, x: Tensor, factor: float) -> Tensor:
    return e.binary("PROD", x, e.constant(np.full((1,) * _RANK, factor, dtype=np.float32)))


def _normalized(e: Emitter, x: Tensor) -> Tensor:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis."""
    total = e.reduce("SUM", e.binary("PROD", x, x), _RANK - 1)
    floor = e.constant(np.full((1,) * _RANK, L2_EPSILON, dtype=np.float32))
    return e.binary("DIV", x, e.unary("SQRT", e.binary("SUM", total, floor)))


def _log_decay(e: Emitter, node: Node, a: Tensor, heads: tuple[int, ...]) -> Tensor:
    """`-exp(A_log) * softplus(a + dt_bias)`, `[b, key heads, heads of each, rows, 1]`."""
    shape = (1, *heads, 1, 1)
    rate, bias = (e.reshape(table(e, w), shape) for w in node.weights)
    rate = e.unary("NEG", e.unary("EXP", rate))
    return e.binary("PROD", rate, _softplus(e, e.binary("SUM", a, bias)))


def _softplus(e: Emitter, x: Tensor) -> Tensor:
    """`max(x, 0) + log(1 + exp(-|x|))`: the layer of that name overflows."""
    small = e.unary("EXP", e.unary("NEG", e.unary("ABS", x)))
    one = e.constant(np.ones((1,) * _RANK, dtype=np.float32))
    zero = e.constant(np.zeros((1,) * _RANK, dtype=np.float32))
    return e.binary("SUM", e.binary("MAX", x, zero), e.unary("LOG", e.binary("SUM", one, small)))


@dataclass(frozen=True, slots=True)
class _Rows:
    """What depends on the rows of a call alone: computed once for all layers.

    Attributes:
        e: Emitter.
        value: Any value whose axis 1 are the rows.
        most: Rows of the largest call.
    """

    e: Emitter
    value: Value
    most: int

    @classmethod
    def of(cls, e: Emitter, node: Node) -> _Rows:
        """Of a node whose first operand has them.

        Raises:
            LegalizeError: They may be more than `MAX_ROWS`.
        """
        value = node.operands[0]
        most = e.largest(value.type.shape[1])
        if most > MAX_ROWS:
            raise LegalizeError(
                "tensorrt/too-many-rows",
                f"{node.op.name} takes up to {MAX_ROWS} rows a call, a prompt chunk has {most}",
                where=site(e.graph, node),
                help=f"compile with --prefill-chunk {MAX_ROWS} or less",
            )
        return cls(e, value, most)

    def between(self, log_decay: Tensor) -> Tensor:
        """The factor from row j to row i, `[..., i, j]`: 1 for i = j, 0 for rows to come."""
        sums = self.e.matmul(self._lower(), self.e.binary("PROD", log_decay, self._strict()))
        return self.e.binary("PROD", self.e.unary("EXP", sums), self._lower())

    def up_to(self, log_decay: Tensor) -> Tensor:
        """Sums from the first row to each row, `[..., rows, 1]`."""
        return self.e.matmul(self._lower(), log_decay)

    def after(self, log_decay: Tensor) -> Tensor:
        """Sums over the rows after each row, `[..., rows, 1]`."""
        return self.e.matmul(self._strict(), log_decay, transpose_a=True)

    def earlier(self, x: Tensor) -> Tensor:
        """`[..., i, j]` where j comes before i, 0 else."""
        return self.e.binary("PROD", x, self._strict())

    def inverse(self, system: Tensor) -> Tensor:
        """The inverse of I + a strictly lower matrix `[..., rows, rows]`.

        With X the inverse of its blocks of m rows on the diagonal, and L the blocks that join two
        of them, `X - X L X` is the inverse of its blocks of 2m rows.
        """
        e, size = self.e, 1
        identity = self._mask("same", lambda i, j: e.binary("EQUAL", i, j))
        if self.most == 1:
            return identity
        found = e.binary("SUB", identity, e.binary("PROD", system, self._joins(size)))
        while (size := 2 * size) < self.most:
            blocks = e.binary("PROD", system, self._joins(size))
            found = e.binary("SUB", found, e.matmul(e.matmul(found, blocks), found))
        return found

    def _joins(self, size: int) -> Tensor:
        """1 where two rows are in one block of 2 * size rows and not in one of size rows."""
        e = self.e

        def make(i: Tensor, j: Tensor) -> Tensor:
            near, far = (
                e.binary("EQUAL", *(e.binary("FLOOR_DIV", x, self._number(n)) for x in (i, j)))
                for n in (size, 2 * size)
            )
            return e.binary("AND", far, e.unary("NOT", near))

        return self._mask(f"joins {size}", make)

    def _lower(self) -> Tensor:
        """1 where row j is row i or comes before it."""
        e = self.e
        return self._mask("lower", lambda i, j: e.unary("NOT", e.binary("LESS", i, j)))

    def _strict(self) -> Tensor:
        """1 where row j comes before row i."""
        return self._mask("strict", lambda i, j: self.e.binary("LESS", j, i))

    def _mask(self, name: str, make: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """A float32 mask `[1, 1, 1, rows, rows]` from the numbers of row i and column j."""
        e, rows = self.e, self.value.type.shape[1]

        def build() -> Tensor:
            numbers = row_numbers(e, self.value)
            down = e.reshape(numbers, (1, 1, 1, rows, 1))
            across = e.reshape(numbers, (1, 1, 1, 1, rows))
            return e.cast(make(down, across), DType.F32)

        return e.once(("rows mask", name, str(rows)), build)

    def _number(self, value: int) -> Tensor:
        return self.e.constant(np.full((1,) * _RANK, value, dtype=np.int64))
