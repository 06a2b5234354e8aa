"""`fuse-gate-up`: one product for both halves of a gated MLP."""

from __future__ import annotations

from edgecc.ir.core import Module
from edgecc.ir.patterns import op, var
from edgecc.ir.rules import Rule
from edgecc.passes.base import NoOptions, PassContext
from edgecc.passes.fuse_linears import FuseLayers, WeightReaders
from edgecc.passes.rewrite import RewritePass

_GATE_UP = op("swiglu", op("linear", var("x"), label="gate"), op("linear", var("x"), label="up"))


class FuseGateUp(RewritePass[NoOptions]):
    """Stack the gate and up projections of a gated MLP into one linear layer.

    What it does
        `swiglu(linear(x, G), linear(x, U))` becomes `swiglu` of the two pieces of
        `linear(x, [G; U])`.

    Why
        One larger product uses caches and threads better than two, and an engine starts one kernel
        less.

    Example:
        ```
        %g = linear(%x, @gate) : f32[b, t, 768]
        %u = linear(%x, @up) : f32[b, t, 768]
        %y = swiglu(%g, %u) : f32[b, t, 768]
        ```
        becomes
        ```
        %gu = linear(%x, @gate+up) : f32[b, t, 1536]
        %g, %u = split(%gu) {axis = 2, sizes = [768, 768]} : f32[b, t, 768], f32[b, t, 768]
        %y = swiglu(%g, %u) : f32[b, t, 768]
        ```

    Options
        None.

    Requires and ensures
        Nothing.

    Exactness
        Exact: rows of weight and bias are only stacked.

    Limits
        Needs one encoding, bit-equal per-weight scalars, weights nothing else reads, and biases in
        all of the layers or in none; says why when it does not apply.
    """

    name = "fuse-gate-up"

    def rules(self, module: Module, ctx: PassContext) -> list[Rule]:
        """One rule, rooted at `swiglu`."""
        return [FuseLayers(WeightReaders(module), _GATE_UP, ("gate", "up"))]
