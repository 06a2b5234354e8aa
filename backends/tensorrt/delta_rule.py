"""The gated delta rule over all rows of a call at once, in float32.

The rule is not walked row by row: a loop cannot be part of a CUDA graph. All rows of a call are the
solution of one triangular system (arXiv 2406.06484, with the decays of arXiv 2412.06464), whose
inverse is put together from the inverses of blocks of 1, 2, 4 ... rows. That takes as many steps as
the largest call has binary digits, works for any number of rows, and is as exact as forward
substitution; products of powers of the matrix, which take as few steps, are not. See
docs/adr/0015-recurrent-layers-on-tensorrt.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgecc.backends.tensorrt.emitter import Emitter, Tensor
from edgecc.backends.tensorrt.shape import count_up
from edgecc.ir.ops.state import L2_EPSILON
from edgecc.ir.types import Dim, DType

MAX_ROWS = 512
"""Largest call. A system has rows x rows numbers for each value head: 50 MB for 48 heads."""

_RANK = 5
"""Operands are `[b, key heads, value heads of each, rows, width]`."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of a DeltaNet."""

    batch: Dim
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def groups(self) -> int:
        """Value heads that read one key head."""
        return self.value_heads // self.key_heads


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """Operands of the rule: float32, rows as in the IR.

    Attributes:
        q: `[b, rows, key_heads * key_dim]`, as are k; v `[b, rows, value_heads * value_dim]`.
        k: See q.
        v: See q.
        a: `[b, rows, value_heads]`, as is b.
        b: See a.
        state: `[b, value_heads, key_dim, value_dim]`.
        A_log: `[value_heads]`, as is dt_bias.
        dt_bias: See A_log.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    state: Tensor
    A_log: Tensor
    dt_bias: Tensor


def delta_rule(
    rows: Rows,
    heads: Heads,
    x: DeltaInputs,
    *,
    live: Tensor | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Results `[b, rows, value_heads * value_dim]` and the state after the last row.

    With `G` the sums of log decays, `D_ij = exp(G_i - G_j)` for i >= j and 0 else:

    - `A = I + strictly lower(beta_i k_i.k_j D_ij)`;
    - `U = A^-1 (beta (V - exp(G) K S))`;
    - result `exp(G) Q S + ((Q K^T) * D) U`, state `exp(G_T) S + (exp(G_T - G) K)^T U`.

    The differences of sums are sums of the decays between two rows, all of one sign, so none is
    lost to cancellation.

    Args:
        rows: The rows of the call.
        heads: Sizes.
        x: Operands.
        live: `[b, 1, 1, rows, 1]`, 0 for rows of padding: they do not decay and write nothing.
        kept: The same, 0 for rows whose effect is left out of the state; none before a kept one.
    """
    e = rows.e
    query = _scaled(
        e, _normalized(e, rows.split(heads, x.q, 1, heads.key_dim)), heads.key_dim**-0.5
    )
    key = _normalized(e, rows.split(heads, x.k, 1, heads.key_dim))
    value = rows.split(heads, x.v, heads.groups, heads.value_dim)
    shape = (heads.batch, heads.key_heads, heads.groups, heads.key_dim, heads.value_dim)
    before = e.reshape(x.state, shape)
    write = e.activation("SIGMOID", rows.split(heads, x.b, heads.groups, 1))
    log_decay = _log_decay(e, heads, x, rows.split(heads, x.a, heads.groups, 1))
    if live is not None:
        write, log_decay = (e.binary("PROD", t, live) for t in (write, log_decay))

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
    if kept is not None:
        log_decay, key = (e.binary("PROD", t, kept) for t in (log_decay, key))
    left = e.binary("PROD", e.unary("EXP", rows.after(log_decay)), key)
    total = e.unary("EXP", e.reduce("SUM", log_decay, _RANK - 2))
    after = e.binary(
        "SUM", e.binary("PROD", total, before), e.matmul(left, update, transpose_a=True)
    )
    joined = e.transpose(out, (0, 3, 1, 2, 4))
    width = heads.value_heads * heads.value_dim
    result = e.reshape(joined, (heads.batch, rows.count, width))
    return result, e.reshape(after, (heads.batch, heads.value_heads, *shape[3:]))


def _scaled(e: Emitter, x: Tensor, factor: float) -> Tensor:
    return e.binary("PROD", x, e.constant(np.full((1,) * _RANK, factor, dtype=np.float32)))


def _normalized(e: Emitter, x: Tensor) -> Tensor:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis."""
    total = e.reduce("SUM", e.binary("PROD", x, x), _RANK - 1)
    floor = e.constant(np.full((1,) * _RANK, L2_EPSILON, dtype=np.float32))
    return e.binary("DIV", x, e.unary("SQRT", e.binary("SUM", total, floor)))


def _log_decay(e: Emitter, heads: Heads, x: DeltaInputs, a: Tensor) -> Tensor:
    """`-exp(A_log) * softplus(a + dt_bias)`, `[b, key heads, heads of each, rows, 1]`."""
    shape = (1, heads.key_heads, heads.groups, 1, 1)
    rate, bias = (e.reshape(w, shape) for w in (x.A_log, x.dt_bias))
    rate = e.unary("NEG", e.unary("EXP", rate))
    return e.binary("PROD", rate, _softplus(e, e.binary("SUM", a, bias)))


def _softplus(e: Emitter, x: Tensor) -> Tensor:
    """`max(x, 0) + log(1 + exp(-|x|))`: the layer of that name overflows."""
    small = e.unary("EXP", e.unary("NEG", e.unary("ABS", x)))
    one = e.constant(np.ones((1,) * _RANK, dtype=np.float32))
    zero = e.constant(np.zeros((1,) * _RANK, dtype=np.float32))
    return e.binary("SUM", e.binary("MAX", x, zero), e.unary("LOG", e.binary("SUM", one, small)))


@dataclass(frozen=True, slots=True)
class Rows:
    """What depends on the rows of a call alone: computed once for all layers.

    Attributes:
        e: Emitter.
        count: How many rows.
        tensor: Has them as axis 1.
        most: Rows of the largest call.
    """

    e: Emitter
    count: Dim
    tensor: Tensor
    most: int

    def split(self, heads: Heads, x: Tensor, per_key: int, width: int) -> Tensor:
        """`[b, rows, heads * width]` to `[b, key heads, heads of each, rows, width]`."""
        shape = (heads.batch, self.count, heads.key_heads, per_key, width)
        return self.e.transpose(self.e.reshape(x, shape), (0, 2, 3, 1, 4))

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

    def numbers(self) -> Tensor:
        """0, 1, ... for the rows, i64 `[rows]`."""
        return count_up(self.e, self.count, self.tensor, 1)

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
        e, rows = self.e, self.count

        def build() -> Tensor:
            numbers = self.numbers()
            down = e.reshape(numbers, (1, 1, 1, rows, 1))
            across = e.reshape(numbers, (1, 1, 1, 1, rows))
            return e.cast(make(down, across), DType.F32)

        return e.once(("rows mask", name, str(rows)), build)

    def _number(self, value: int) -> Tensor:
        return self.e.constant(np.full((1,) * _RANK, value, dtype=np.int64))
