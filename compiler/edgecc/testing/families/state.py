"""Expressions of the ops that carry a state from call to call."""

from __future__ import annotations

from edgecc.ir.ops.state import GatedDeltaNetAttributes
from edgecc.ir.types import Dim, sym
from edgecc.testing.expressions import Apply, Expr, Wanted, floats, indices, least, most
from edgecc.testing.families.norm import last_axis
from edgecc.testing.rules import Grower, Rule, is_float

KEY_DIM = 2
"""Width of a key head, where the wanted tensor does not fix it."""

ROWS: tuple[Dim, ...] = (sym("t"), 1, sym("s"))
"""How many rows are put into a state at once."""


def _is_rows(wanted: Wanted) -> bool:
    return is_float(wanted) and wanted.rank == 3 and last_axis(wanted) > 0


def _is_state(wanted: Wanted, rank: int) -> bool:
    known = all(isinstance(d, int) and d > 0 for d in wanted.shape[1:])
    return is_float(wanted) and wanted.rank == rank and known


def _convolution(grow: Grower, wanted: Wanted) -> Expr:
    batch, rows, channels = (*wanted.shape[:2], last_axis(wanted))
    return _conv(grow, batch, rows, channels, grow.pick(2, 4), 0)


def _convolution_state(grow: Grower, wanted: Wanted) -> Expr:
    channels, kept = map(most, wanted.shape[1:])
    return _conv(grow, wanted.shape[0], grow.pick(*ROWS), channels, kept + 1, 1)


def _conv(grow: Grower, batch: Dim, rows: Dim, channels: int, taps: int, index: int) -> Expr:
    operands = grow(floats(batch, rows, channels)), grow(floats(batch, channels, taps - 1))
    return Apply("causal_conv1d", operands, (grow.weight(channels, 1, taps),), None, index)


def _delta(grow: Grower, wanted: Wanted) -> Expr:
    batch, rows, width = (*wanted.shape[:2], last_axis(wanted))
    heads = grow.pick(*(h for h in (1, 2, 4) if width % h == 0))
    return _net(grow, floats(batch, heads, KEY_DIM, width // heads), rows, 0)


def _delta_state(grow: Grower, wanted: Wanted) -> Expr:
    return _net(grow, wanted, grow.pick(*ROWS), 1)


def _net(grow: Grower, state: Wanted, rows: Dim, index: int) -> Expr:
    batch, (heads, key_dim, value_dim) = state.shape[0], map(most, state.shape[1:])
    key_heads = grow.pick(*(h for h in (1, 2) if heads % h == 0))
    widths = (key_heads * key_dim, key_heads * key_dim, heads * value_dim, heads, heads)
    operands = (*(floats(batch, rows, width) for width in widths), state)
    return Apply(
        "gated_delta_net",
        tuple(map(grow, operands)),
        (grow.weight(heads), grow.weight(heads)),
        GatedDeltaNetAttributes(key_heads, heads),
        index,
    )


def _logged(grow: Grower, wanted: Wanted) -> Expr:
    batch, rows, width = (*wanted.shape[:2], last_axis(wanted))
    heads = grow.pick(*(h for h in (1, 2, 4) if width % h == 0))
    return _logged_net(grow, floats(batch, heads, KEY_DIM, width // heads), rows, 0)


def _logged_state(grow: Grower, wanted: Wanted) -> Expr:
    return _logged_net(grow, wanted, grow.pick(*ROWS), 2)


def _logged_net(grow: Grower, state: Wanted, rows: Dim, index: int) -> Expr:
    batch, (heads, key_dim, value_dim) = state.shape[0], map(most, state.shape[1:])
    key_heads, taps = grow.pick(*(h for h in (1, 2) if heads % h == 0)), grow.pick(2, 4)
    channels, logged = 2 * key_heads * key_dim + heads * value_dim, grow.pick(1, 3)
    operands = (
        floats(batch, rows, channels),
        floats(batch, rows, heads),
        floats(batch, rows, heads),
        floats(batch, channels, taps - 1),
        state,
        floats(batch, logged, channels + 2 * heads),
        indices(logged + 1, batch),
        indices(least(rows) + 1, batch),
    )
    return Apply(
        "logged_delta_net",
        tuple(map(grow, operands)),
        (grow.weight(channels, 1, taps), grow.weight(heads), grow.weight(heads)),
        GatedDeltaNetAttributes(key_heads, heads),
        index,
    )


RULES = (
    Rule("causal_conv1d", _is_rows, _convolution),
    Rule("causal_conv1d", lambda wanted: _is_state(wanted, 3), _convolution_state),
    Rule("gated_delta_net", _is_rows, _delta),
    Rule("gated_delta_net", lambda wanted: _is_state(wanted, 4), _delta_state),
    Rule("logged_delta_net", _is_rows, _logged),
    Rule("logged_delta_net", lambda wanted: _is_state(wanted, 4), _logged_state),
)
