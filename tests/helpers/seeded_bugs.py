"""Passes with one planted mistake each: what people get wrong in passes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

from edgecc.ir import Graph, Inline, Location, Module, Node, Rewriter
from edgecc.ir.ops.sampling import ArgmaxAttributes
from edgecc.ir.ops.shape import AxisAttributes, PadAttributes, SliceAttributes
from edgecc.ir.weights import Alias, Weight
from edgecc.passes.base import NoOptions, Pass, PassContext


class NodeBug(Pass[NoOptions]):
    """Rewrites single nodes, and marks what it made by its location so that it stops there."""

    name = "seeded-bug"

    def run(self, module: Module, ctx: PassContext) -> bool:
        changed = False
        for graph in module.graphs.values():
            rewriter = Rewriter(module, graph, self.name)
            for node in list(graph.nodes):
                if self.name not in node.location.passes:
                    changed |= self.rewrite(rewriter, graph, node)
        return changed

    @abstractmethod
    def rewrite(self, rewriter: Rewriter, graph: Graph, node: Node) -> bool:
        """Rewrite a node, or answer False."""

    def again(self, rewriter: Rewriter, node: Node, **changes: Any) -> bool:
        """Replace a node by one like it."""
        given = {"operands": node.operands, "weights": node.weights, "attrs": node.attrs}
        made = rewriter.insert(node, changes.pop("op", node.op.name), **{**given, **changes})
        rewriter.replace(node, made.results)
        return True


class WeightBug(Pass[NoOptions]):
    """Changes the bytes of every weight once."""

    name = "seeded-bug"

    def run(self, module: Module, ctx: PassContext) -> bool:
        changed = False
        for symbol, weight in list(module.weights.items()):
            if isinstance(weight.source, Inline):
                parts = dict(weight.source.parts)
                new = {**parts, **self.parts(weight, parts)}
                made = replace(weight, source=Inline(tuple(new.items())))
                changed |= made != weight
                module.weights.rebind(symbol, made)
        return changed

    @abstractmethod
    def parts(self, weight: Weight, parts: dict[str, bytes]) -> dict[str, bytes]:
        """The components that become other ones."""


# Values


class SwapsOperands(NodeBug):
    """Takes `silu(a) * b` for commutative."""

    def rewrite(self, rewriter, graph, node):
        if node.op.name != "swiglu" or node.operands[0] is node.operands[1]:
            return False
        return self.again(rewriter, node, operands=node.operands[::-1])


class DropsBias(NodeBug):
    def rewrite(self, rewriter, graph, node):
        if node.op.name != "linear" or len(node.weights) == 1:
            return False
        return self.again(rewriter, node, weights=node.weights[:1])


class SlicesOneLater(NodeBug):
    def rewrite(self, rewriter, graph, node):
        attrs = node.attrs
        if node.op.name != "slice" or attrs.stop == node.operands[0].type.shape[attrs.axis]:
            return False
        moved = SliceAttributes(attrs.axis, attrs.start + 1, attrs.stop + 1)
        return self.again(rewriter, node, attrs=moved)


class SwapsPieces(NodeBug):
    """The pieces of a stacked product in another order, as when q, k and v are mixed up."""

    def rewrite(self, rewriter, graph, node):
        if node.op.name != "split" or len(set(node.attrs.sizes)) > 1 or len(node.results) == 1:
            return False
        made = rewriter.insert(node, "split", node.operands, attrs=node.attrs)
        rewriter.replace(node, made.results[::-1])
        return True


class ConcatsBackwards(NodeBug):
    def rewrite(self, rewriter, graph, node):
        if node.op.name != "concat" or len(set(node.operands)) < 2:
            return False
        return self.again(rewriter, node, operands=node.operands[::-1])


class WrongAxis(NodeBug):
    """Counts axes from the front where there is one more axis there than it thinks."""

    def rewrite(self, rewriter, graph, node):
        if node.op.name not in ("slice", "concat", "split", "tail") or node.attrs.axis == 0:
            return False
        return self.again(rewriter, node, attrs=replace(node.attrs, axis=node.attrs.axis - 1))


class TakesHeadForTail(NodeBug):
    def rewrite(self, rewriter, graph, node):
        x, axis = node.operands[0].type.shape, getattr(node.attrs, "axis", 0)
        rows = node.results[0].type.shape[axis] if node.results[0].type.rank > axis else 0
        if node.op.name != "tail" or not all(isinstance(d, int) for d in (x[axis], rows)):
            return False
        if rows == 0:
            return False
        first = SliceAttributes(axis, 0, rows)
        return self.again(rewriter, node, op="slice", operands=node.operands[:1], attrs=first)


class LosesPadValue(NodeBug):
    def rewrite(self, rewriter, graph, node):
        if node.op.name != "pad" or node.attrs.value == 0:
            return False
        attrs = PadAttributes(node.attrs.axis, node.attrs.after, 0)
        return self.again(rewriter, node, attrs=attrs)


class ForgetsLimit(NodeBug):
    """Lets padding rows of a vocabulary be chosen."""

    def rewrite(self, rewriter, graph, node):
        width = node.operands[0].type.shape[-1] if node.op.name == "argmax" else 0
        if node.op.name != "argmax" or node.attrs.limit == width:
            return False
        return self.again(rewriter, node, attrs=ArgmaxAttributes(width))


class ChangesEpsilon(NodeBug):
    def rewrite(self, rewriter, graph, node):
        if node.op.name != "rms_norm":
            return False
        return self.again(rewriter, node, attrs=replace(node.attrs, eps=1e-3))


class SeesTheFuture(NodeBug):
    """Drops the causal mask."""

    def rewrite(self, rewriter, graph, node):
        if "attention" not in node.op.name or not node.attrs.causal:
            return False
        return self.again(rewriter, node, attrs=replace(node.attrs, causal=False, window=None))


class ForgetsTheWindow(NodeBug):
    """Lets queries see rows behind their window."""

    def rewrite(self, rewriter, graph, node):
        if node.op.name not in ("attention", "cached_attention") or node.attrs.window is None:
            return False
        return self.again(rewriter, node, attrs=replace(node.attrs, window=None))


class SwapsCaches(NodeBug):
    """Keys for values."""

    def rewrite(self, rewriter, graph, node):
        if node.op.name != "attention":
            return False
        q, k, v, length = node.operands
        if k is v or k.type != v.type:
            return False
        return self.again(rewriter, node, operands=(q, v, k, length))


class SkipsCacheUpdate(NodeBug):
    def rewrite(self, rewriter, graph, node):
        if node.op.name != "cache_update":
            return False
        rewriter.replace(node, node.operands[:1])
        return True


class ReadsAnotherWeight(NodeBug):
    """A name that is not unique enough: the first weight that fits."""

    def rewrite(self, rewriter, graph, node):
        table = rewriter.module.weights
        for other in table if node.op.name == "linear" else ():
            if table[other].shape == table[node.weights[0]].shape:
                if table.resolve(other) == table.resolve(node.weights[0]):
                    return False
                rewriter.replace_weights(node, (other, *node.weights[1:]))
                return True
        return False


class SwapsNibbles(WeightBug):
    def parts(self, weight, parts):
        if weight.encoding.kind != "nvfp4":
            return {}
        return {"weight": bytes((b >> 4) | (b & 15) << 4 for b in parts["weight"])}


class DropsScale(WeightBug):
    """The second scale of NVFP4 becomes one."""

    def parts(self, weight, parts):
        return {"weight_scale_2": b"\0\0\x80\x3f"} if weight.encoding.kind == "nvfp4" else {}


# Structure


class LeavesStaleUse(NodeBug):
    """Edits operands behind the back of their uses."""

    def rewrite(self, rewriter, graph, node):
        if node.op.name != "add" or node.operands[0] is node.operands[1]:
            return False
        node._operands = node.operands[::-1]
        node.location = Location(node.location.origin, (self.name,))
        return True


class UsesBeforeDefinition(NodeBug):
    def rewrite(self, rewriter, graph, node):
        if not graph.nodes or graph.nodes[0] is node or node is not graph.nodes[-1]:
            return False
        graph.nodes.remove(node)
        graph.nodes.insert_before(graph.nodes[0], node)
        node.location = Location(node.location.origin, (self.name,))
        return any(o.producer for o in node.operands)


class LosesOrigin(NodeBug):
    def rewrite(self, rewriter, graph, node):
        if node.op.name == "call":
            return False
        made = rewriter.insert(
            node, node.op.name, node.operands, node.weights, node.attrs, origin=Location()
        )
        rewriter.replace(node, made.results)
        return True


class WrongType(NodeBug):
    """Records a type the shape rule does not give."""

    def rewrite(self, rewriter, graph, node):
        if node.op.name != "unsqueeze" or node.attrs.axis == 0:
            return False
        made = rewriter.insert(node, "unsqueeze", node.operands, attrs=AxisAttributes(0))
        made.result.type = node.result.type
        rewriter.replace(node, made.results)
        return True


# Interface


class LosesAlias(Pass[NoOptions]):
    """Updated caches become buffers of their own."""

    name = "seeded-bug"

    def run(self, module: Module, ctx: PassContext) -> bool:
        found = [o for g in module.graphs.values() for o in g.outputs if o.alias]
        for output in found:
            output.alias = None
        return bool(found)


class DropsAliasedOutput(Pass[NoOptions]):
    """Takes updated caches for dead, because no node reads them."""

    name = "seeded-bug"

    def run(self, module: Module, ctx: PassContext) -> bool:
        found = [g for g in module.graphs.values() if any(o.alias for o in g.outputs)]
        for graph in found:
            graph.outputs = [o for o in graph.outputs if not o.alias]
        return bool(found)


class RenamesOutput(Pass[NoOptions]):
    name = "seeded-bug"

    def run(self, module: Module, ctx: PassContext) -> bool:
        renamed = False
        for graph in module.entries():
            for output in graph.outputs:
                renamed |= not output.name.endswith("_new")
                output.name = output.name.removesuffix("_new") + "_new"
        return renamed


# Sharing


class CopiesAliases(Pass[NoOptions]):
    """Bytes of its own for every alias."""

    name = "seeded-bug"

    def run(self, module: Module, ctx: PassContext) -> bool:
        table = module.weights
        aliases = [s for s, w in table.items() if isinstance(w.source, Alias)]
        for symbol in aliases:
            table.rebind(symbol, table[table.resolve(symbol)])
        return bool(aliases)


class OneWeightPerUse(NodeBug):
    """The second reader of a weight gets one of its own, by a recipe or as bytes."""

    recipe = False

    def rewrite(self, rewriter, graph, node):
        table, module = rewriter.module.weights, rewriter.module
        if node.op.name != "linear" or len(table[node.weights[0]].shape) != 2:
            return False
        read = [n for g in module.graphs.values() for n in g.nodes if node.weights[0] in n.weights]
        if len(read) < 2 or read[0] is node:
            return False
        symbol = f"{node.weights[0]}.own"
        if self.recipe:
            table.derive(symbol, "concat_rows", node.weights[:1])
        else:
            table.add(symbol, table[table.resolve(node.weights[0])])
        rewriter.replace_weights(node, (symbol, *node.weights[1:]))
        return True


class StacksSharedWeight(OneWeightPerUse):
    """A stack of a weight that is read elsewhere as well."""

    recipe = True


class LeavesOrphan(Pass[NoOptions]):
    """Makes a derived weight and then does not use it."""

    name = "seeded-bug"

    def run(self, module: Module, ctx: PassContext) -> bool:
        for symbol, weight in list(module.weights.items()):
            if isinstance(weight.source, Inline) and f"{symbol}.wide" not in module.weights:
                module.weights.derive(f"{symbol}.wide", "dequantize", (symbol,))
                return True
        return False


# Behaviour


class SaysNothingChanged(SwapsOperands):
    """Correct but for its answer."""

    def run(self, module: Module, ctx: PassContext) -> bool:
        for graph in module.graphs.values():
            for node in graph.nodes:
                if self.name not in node.location.passes and node.weights:
                    table = module.weights
                    resolved = [table.resolve(w) for w in node.weights]
                    Rewriter(module, graph, self.name).replace_weights(node, resolved)
        return False


class SaysSomethingChanged(Pass[NoOptions]):
    name = "seeded-bug"

    def run(self, module: Module, ctx: PassContext) -> bool:
        return bool(module.weights)


class NeverDone(Pass[NoOptions]):
    """Finds more to do each time."""

    name = "seeded-bug"

    def run(self, module: Module, ctx: PassContext) -> bool:
        module.decisions.append("did something")
        return True


class OrderOfAddresses(Pass[NoOptions]):
    """Walks a set of nodes."""

    name = "seeded-bug"

    def run(self, module: Module, ctx: PassContext) -> bool:
        nodes = {n for g in module.graphs.values() for n in g.nodes}
        if module.decisions or not nodes:
            return False
        module.decisions += [f"visited {node!r} of {node.location}" for node in nodes]
        return True


class BreaksPromise(Pass[NoOptions]):
    """Does not do what it ensures."""

    name = "seeded-bug"
    ensures = ("markov-unrolled",)

    def run(self, module: Module, ctx: PassContext) -> bool:
        return False


class Crashes(NodeBug):
    """Takes every product for one without a bias."""

    def rewrite(self, rewriter, graph, node):
        if node.op.name == "linear":
            (weight,) = node.weights
            assert weight in rewriter.module.weights
        return False
