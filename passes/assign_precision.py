"""`assign-precision`: compute activations in 16 bits."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

from edgecc.errors import UsageError, did_you_mean
from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.encodings import Dense
from edgecc.ir.ops import OPS
from edgecc.ir.ops.elementwise import CastAttributes
from edgecc.ir.rewriter import Rewriter
from edgecc.ir.types import DType, TensorType
from edgecc.passes.base import Pass, PassContext, site
from edgecc.roles import Role

TOLERANCES: Mapping[str, float] = {"bf16": 0.25, "f16": 0.05}
"""Relative error of results of a few layers, with room: a rounding is off by at most 2^-9 (bf16) or
2^-12 (f16) of a value, each op rounds once, and norms may enlarge what small values lost."""

_MOVES = (
    *("concat", "split", "slice", "tail", "take_rows", "pad", "unsqueeze", "squeeze"),
    *("merge_rows", "replace_rows"),
)
NARROW = frozenset(
    (
        *("linear", "rms_norm", "rope", "add", "sub", "mul", "silu", "sigmoid", "tanh", "swiglu"),
        "fake_quantize",
        *("layer_norm", "gelu", "multi_axis_rope", "multi_head_attention"),
        *_MOVES,
    )
)
"""Ops that compute in the narrow type. All others keep float32: attention and caches (scores,
softmax and the rows of earlier calls), recurrent layers and their states, choices of tokens, calls,
embeddings as they are read."""

CACHED = ("cache_update", "attention", "cached_attention")
"""Ops over KV caches, narrowed with the caches on request."""

SCORES = ("wide", "packed")

_READS_SHAPE = ("position_ids", "advance")
_CHOOSES = ("argmax", "markov_chain")
_WIDE_OUTPUTS = (Role.LOGITS, Role.BASE_LOGITS, Role.DRAFT_LOGITS, Role.CONFIDENCE)


@dataclass(frozen=True, slots=True)
class AssignPrecisionOptions:
    """What to compute in, and where not.

    `dtype`: `bf16` or `f16`.
    `keep`: names of ops or of modules with `*` and `?`, separated by commas, that stay in float32:
    `rms_norm`, `*.layers.0.*`. A pattern that names nothing is an error.
    `caches`: narrow attention and KV caches as well.
    `scores`: which linear layers keep float32 results because tokens are chosen by them: all
    (`wide`), or only those whose weights are `packed`.
    """

    dtype: str = "bf16"
    keep: str = ""
    caches: bool = False
    scores: str = "wide"


class AssignPrecision(Pass[AssignPrecisionOptions]):
    """Compute activations in bf16 or f16 where that is safe.

    What it does
        Gives the results of linear layers, norms, elementwise and data-moving ops a 16-bit type,
        and inserts a `cast` wherever a value passes between them and the float32 rest: graph inputs
        and outputs (their types stay), attention with its caches, embeddings, and what tokens are
        chosen from. Within an op, kernels accumulate and take means in float32: a value is rounded
        when it is stored.

    Why
        Half the bytes of activations, and the arithmetic that tensor cores are built for. Models
        are trained in bf16, so this is the precision their publishers measured.

    Example:
        ```
        %y = linear(%x, @up_proj) : f32[b, t, 512]
        %z = silu(%y) : f32[b, t, 512]
        ```
        becomes
        ```
        %x_1 = cast(%x) {dtype = "bf16"} : bf16[b, t, 256]
        %y = linear(%x_1, @up_proj) : bf16[b, t, 512]
        %z_1 = silu(%y) : bf16[b, t, 512]
        %z = cast(%z_1) {dtype = "f32"} : f32[b, t, 512]
        ```

    Options
        `dtype`: `bf16` or `f16`. `keep`: ops and modules that stay in float32. `caches`: attention
        and KV caches become narrow too; the caches are graph inputs, so this changes the types of
        the entry, and it has to come before `outline-shared`. States stay in float32: a state is
        rewritten at every row, and 16 bits would lose its small updates. `scores`: with `packed`,
        layers with dense weights give narrow scores. For engines that keep a constant as wide as it
        is multiplied: there a float32 product doubles the bytes of 16-bit weights, not of packed
        ones.

    Requires and ensures
        Nothing. After the fusions, which do not look through casts. Weights keep their encodings,
        which a device lowers as before.

    Exactness
        Rounds every narrow result once. The tolerance is 0.25 for `bf16` and 0.05 for `f16`,
        relative to the largest result. Linear layers whose results are logits, or are added up to
        logits, read rounded values and give float32, so that no two tokens tie by rounding; with
        `scores=packed` those with dense weights can tie. A `fake_quantize` before such a layer
        keeps float32 as well: packed numbers are exact in it.

    Limits
        `f16` overflows above 65504: bf16 models may need `keep`. Devices that compute in float32
        refuse the result.
    """

    name = "assign-precision"
    options_type = AssignPrecisionOptions

    def __init__(self, options: AssignPrecisionOptions | None = None) -> None:
        super().__init__(options)
        if self.options.dtype not in TOLERANCES:
            raise UsageError(
                "pass/bad-option",
                f"assign-precision: dtype {self.options.dtype!r} is not one of 16 bits",
                help=did_you_mean(self.options.dtype, TOLERANCES),
            )
        if self.options.scores not in SCORES:
            raise UsageError(
                "pass/bad-option",
                f"assign-precision: scores {self.options.scores!r}",
                help=did_you_mean(self.options.scores, SCORES),
            )
        self.tolerance = TOLERANCES[self.options.dtype]  # type: ignore[misc]
        self._keep = [p for p in (k.strip() for k in self.options.keep.split(",")) if p]

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Narrow node by node, in order, then drop the casts nobody reads.

        Raises:
            UsageError: A pattern of `keep` names no op and no module.
        """
        self._check_keep(module)
        changed = False
        for graph in module.graphs.values():
            wide = _scores(graph)
            chosen = [n for n in graph.nodes if self._narrows(module, graph, n, wide, ctx)]
            if chosen:
                _Narrowing(module, graph, DType(self.options.dtype), self.name).apply(chosen)
                self.remark(ctx, f"@{graph.name}", f"{len(chosen)} ops", applied=True)
                changed = True
        return changed

    def _narrows(
        self,
        module: Module,
        graph: Graph,
        node: Node,
        wide: Mapping[Node, str],
        ctx: PassContext,
    ) -> bool:
        """Whether a node is to compute in 16 bits: it does so in float32 now, and may."""
        allowed = node.op.name in NARROW or (self.options.caches and node.op.name in CACHED)
        if not allowed or all(r.type.dtype is not DType.F32 for r in node.results):
            return False
        reason = self._kept(node) or wide.get(node, "")
        if node in wide and self.options.scores == "packed" and node.op.name == "linear":
            encoding = module.weights[module.weights.resolve(node.weights[0])].encoding
            narrow = isinstance(encoding, Dense) and encoding.dtype.bits == 16
            reason = self._kept(node) if narrow else reason
        if reason:
            self.remark(ctx, site(graph, node), reason, applied=False)
        return not reason

    def _check_keep(self, module: Module) -> None:
        """Refuse patterns that name nothing: a typo would narrow what was to stay."""
        known = {*OPS}.union(*(_names(n) for g in module.graphs.values() for n in g.nodes))
        for pattern in self._keep:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in known):
                raise UsageError(
                    "assign-precision/no-match",
                    f"assign-precision: keep {pattern!r} names no op and no module",
                    help="modules are known by the locations of nodes, which IR text has if it "
                    "is written with --locations",
                )

    def _kept(self, node: Node) -> str:
        for pattern in self._keep:
            if any(fnmatch.fnmatchcase(name, pattern) for name in _names(node)):
                return f"kept by {pattern}"
        return ""


class _Narrowing:
    """Rewrites the chosen nodes of one graph."""

    def __init__(self, module: Module, graph: Graph, dtype: DType, pass_name: str) -> None:
        self._rewriter = Rewriter(module, graph, pass_name)
        self._dtype = dtype
        self._narrow: dict[Value, Value] = {}
        self._widened: set[Value] = set()
        self._casts: list[Node] = []

    def apply(self, nodes: list[Node]) -> None:
        """Replace each node by a narrow one between casts; casts that undo each other go."""
        self._narrow_caches(nodes)
        for node in nodes:
            self._replace(node)
        for node in list(self._rewriter.graph.nodes):
            if node.op.name in _READS_SHAPE and any(o in self._widened for o in node.operands):
                self._replace(node)
        outputs = {o.value for o in self._rewriter.graph.outputs}
        for cast in reversed(self._casts):
            if not cast.result.uses and cast.result not in outputs:
                self._rewriter.erase(cast)

    def _narrow_caches(self, nodes: list[Node]) -> None:
        """Retype the cache inputs that only narrow ops read."""
        chosen = set(nodes)
        for item in self._rewriter.graph.by_role(Role.KV_CACHE):
            users = item.value.users()
            if users and all(n in chosen and n.op.name in CACHED for n in users):
                item.value.type = TensorType(self._dtype, item.value.type.shape)

    def _replace(self, node: Node) -> None:
        made = self._rewriter.insert(
            node,
            node.op.name,
            [self._narrowed(o, node) for o in node.operands],
            node.weights,
            node.attrs,
            [r.name for r in node.results],
            node.location,
        )
        wide = []
        for old, new in zip(node.results, made.results, strict=True):
            if _is_cache(new):
                old.type = new.type  # like the buffer it overwrites
                wide.append(new)
            elif new.type != old.type:
                cast = self._cast(new, DType.F32, node, old.name)
                self._narrow[cast] = new
                self._widened.add(cast)
                wide.append(cast)
            else:
                wide.append(new)
        self._rewriter.replace(node, wide)

    def _narrowed(self, value: Value, anchor: Node) -> Value:
        """A value in the narrow type, cast before its first user; other types stay."""
        if value.type.dtype is not DType.F32:
            return value
        if value not in self._narrow:
            self._narrow[value] = self._cast(value, self._dtype, anchor, value.name)
        return self._narrow[value]

    def _cast(self, value: Value, dtype: DType, anchor: Node, name: str) -> Value:
        attrs = CastAttributes(dtype.value)
        node = self._rewriter.insert(
            anchor, "cast", (value,), attrs=attrs, names=(name,), origin=anchor.location
        )
        self._casts.append(node)
        return node.result


def _names(node: Node) -> tuple[str, str, str]:
    """What a pattern can name a node by: its op, where it comes from, the same without the role."""
    origin = node.location.origin
    return node.op.name, origin, origin.partition(": ")[2] or origin


def _is_quantized(value: Value) -> bool:
    return value.producer is not None and value.producer.op.name == "fake_quantize"


def _is_cache(value: Value) -> bool:
    """Whether a value is an updated cache: `attention` has none, `cached_attention` two."""
    node = value.producer
    return node is not None and node.op.name in CACHED and value.type.rank == 4


def _scores(graph: Graph) -> dict[Node, str]:
    """Nodes that make what tokens are chosen by, back to their linear layers, and why.

    Two scores that round to one 16-bit number would be a tie, which the first token wins.
    """
    waiting = [
        (output.value, f"output {output.name} is {output.role.value}")
        for output in graph.outputs
        if output.role in _WIDE_OUTPUTS
    ]
    waiting += [
        (operand, f"{node.op.name} chooses tokens by it")
        for node in graph.nodes
        if node.op.name in _CHOOSES
        for operand in node.operands
    ]
    found: dict[Node, str] = {}
    while waiting:
        value, reason = waiting.pop()
        node = value.producer
        if node is None or node in found or node.op.name not in NARROW:
            continue
        found[node] = reason
        if node.op.name in (*_MOVES, "add"):
            waiting += [(operand, reason) for operand in node.operands]
        elif node.op.name == "linear":  # packed numbers are exact in float32
            waiting += [(o, reason) for o in node.operands if _is_quantized(o)]
    return found
