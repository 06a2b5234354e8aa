"""`fuse-qkv`: one product for the query, key and value projections of an attention layer."""

from __future__ import annotations

from edgecc.ir.core import Module
from edgecc.ir.patterns import OpPattern, Pattern, op, through, var
from edgecc.ir.rules import Rule
from edgecc.passes.base import NoOptions, PassContext
from edgecc.passes.fuse_linears import FuseLayers, WeightReaders
from edgecc.passes.rewrite import RewritePass

_BETWEEN = {
    **dict.fromkeys(("rms_norm", "rope", "multi_axis_rope", "split_heads"), 0),
    "cache_update": 1,
}
"""What lies between a projection and the attention, with the operand that carries its rows."""


def _attention(q: str, k: str, v: str) -> OpPattern:
    """An attention whose labelled operands come from layers of one value."""

    def layer(operand: str, label: str) -> Pattern:
        return through(_BETWEEN, op("linear", var("x"), label=label)) if label else var(operand)

    return op("attention", layer("q", q), layer("k", k), layer("v", v), var("length"))


_GROUPS = (("q", "k", "v"), ("q", "k", "k"), ("", "k", "v"))
"""What is stacked, widest first; one layer may give keys and values."""


class FuseQkv(RewritePass[NoOptions]):
    """Stack the projections that feed one attention into one linear layer.

    What it does
        Follows q, k and v of an `attention` back through per-head norms, rotary embedding and the
        split of query and gate to their linear layers, and stacks all three when they read one
        value. In a block draft, where keys and values also cover the context rows and queries do
        not, and where only the query's layer does not fit, k and v are stacked and q stays alone.

    Why
        One larger product instead of three small ones; k and v are narrow in grouped-query
        attention, so alone they use a fraction of the machine.

    Example:
        ```
        %q = linear(%x, @q_proj) : f32[b, t, 512]
        %k = linear(%x, @k_proj) : f32[b, t, 128]
        %v = linear(%x, @v_proj) : f32[b, t, 128]
        ```
        becomes
        ```
        %qkv = linear(%x, @q_proj+k_proj+v_proj) : f32[b, t, 768]
        %q, %k, %v = split(%qkv) {axis = 2, sizes = [512, 128, 128]} : ...
        ```

    Options
        None.

    Requires and ensures
        Runs before `fuse-cached-attention`; works on unfused `attention`.

    Exactness
        Exact: rows of weight and bias are only stacked, in the order q, k, v.

    Limits
        Needs one encoding, bit-equal per-weight scalars, weights nothing else reads, and biases in
        all of the layers or in none; says why when it does not apply.
    """

    name = "fuse-qkv"

    def rules(self, module: Module, ctx: PassContext) -> list[Rule]:
        """One rule for each group of projections, rooted at `attention`."""
        readers = WeightReaders(module)
        return [
            FuseLayers(readers, _attention(*group), [*dict.fromkeys(filter(None, group))])
            for group in _GROUPS
        ]
