"""A pass for edgecc in a package of its own: the entry point in pyproject.toml registers it."""

from edgecc.ir import Module, Rewriter
from edgecc.passes import Pass, PassContext
from edgecc.passes.base import NoOptions


class DropIdentitySlice(Pass[NoOptions]):
    """Remove slices that take all of an axis: `slice(%x) {axis = 0, start = 0, stop = 8}`."""

    name = "drop-identity-slice"

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Let readers of such a slice read what it slices."""
        changed = False
        for graph in module.graphs.values():
            rewriter = Rewriter(module, graph, self.name)
            for node in list(graph.nodes):
                if node.op.name == "slice" and node.result.type == node.operands[0].type:
                    rewriter.replace(node, node.operands)
                    changed = True
        return changed
