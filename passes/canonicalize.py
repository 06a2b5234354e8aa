"""`canonicalize`: data movement and casts that undo other ones go away."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.passes.base import NoOptions, Pass, PassContext, site
from edgecc.passes.shape_editor import Editor
from edgecc.passes.shape_rules import RULES, Rule


class Canonicalize(Pass[NoOptions]):
    """Simplify slices, splits, concatenations, paddings, casts and their like by local rules.

    What it does
        Applies the rules below, each to one node and the producers of its operands, until none
        applies anywhere. Axes must be the same throughout a rule. Nodes that lose their last user
        on the way are erased.

        | before | after |
        | --- | --- |
        | `slice` of the full range of x | x |
        | `slice` of `slice` | one `slice` |
        | `slice` of `concat`, within one part | `slice` of that part |
        | `slice` of `concat`, whole parts | `concat` of those parts |
        | `slice` of `pad`, without padding | `slice` of what was padded |
        | `split` of x into one piece | x |
        | `split` of `concat` into the same sizes | the operands of `concat` |
        | `concat` of x alone | x |
        | `concat` of `concat` that nothing else reads | one `concat` |
        | `concat` of all pieces of a `split` in order | what was split |
        | `concat` of neighbouring slices of x, all of x | x |
        | `concat` of neighbouring slices that nothing else reads | one `slice` in their place |
        | `unsqueeze` of `squeeze` | what was squeezed |
        | `squeeze` of `unsqueeze` | what was unsqueezed |
        | `pad` of x by nothing | x |
        | `pad` of `pad` with the same value | one `pad` |
        | `tail` of x, as long as x | x |
        | `tail` of `tail` | one `tail` |
        | `tail` of `concat`, as long as its last parts | those parts |
        | `tail` of `concat`, shorter than the last part | `tail` of that part |
        | `cast` of x to the type of x | x |
        | `cast` of a widening `cast` back to the type of x | x |

    Why
        Passes cut and join without looking at who joins and cuts next. What is left after these
        rules moves fewer bytes, and later passes have one form to match instead of several.

    Example:
        ```
        %kv = concat(%k, %v) {axis = 2} : f32[b, t, 256]
        %k2, %v2 = split(%kv) {axis = 2, sizes = [128, 128]} : f32[b, t, 128], f32[b, t, 128]
        %y = mul(%k2, %v2) : f32[b, t, 128]
        ```
        becomes
        ```
        %y = mul(%k, %v) : f32[b, t, 128]
        ```

    Options
        None.

    Requires and ensures
        Nothing.

    Exactness
        Exact.

    Limits
        Sizes must be equal for all values of the symbols; ranges of symbols are not looked at.
        Operands of commutative ops stay in their order, `cse` does not mind it.
    """

    name = "canonicalize"

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Each graph to its fixed point; time grows with the number of nodes."""
        changed = False
        for graph in module.graphs.values():
            changed |= self._run(module, graph, ctx)
        return changed

    def _run(self, module: Module, graph: Graph, ctx: PassContext) -> bool:
        editor = Editor(module, graph, self.name)
        worklist = _Worklist(graph)
        changed = False
        while (node := worklist.pop()) is not None:
            for rule in RULES.get(node.op.name, ()):
                values = rule(editor, node)
                if values is not None:
                    self.remark(ctx, site(graph, node), _title(rule), applied=True)
                    _replace(editor, worklist, node, values)
                    changed = True
                    break
        return changed


class _Worklist:
    """Nodes to look at, each once at a time, those of a graph in order first."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._queue = deque(n for n in graph.nodes if n.op.name in RULES)
        self._queued = set(self._queue)

    def pop(self) -> Node | None:
        """The next node that is still in the graph."""
        while self._queue:
            node = self._queue.popleft()
            self._queued.discard(node)
            if node in self._graph.nodes:
                return node
        return None

    def push(self, node: Node | None) -> None:
        """Look at a node again, if there are rules for it."""
        if node is not None and node.op.name in RULES and node not in self._queued:
            self._queue.append(node)
            self._queued.add(node)


def _replace(editor: Editor, worklist: _Worklist, node: Node, values: Sequence[Value]) -> None:
    """Put values in the place of a node, and queue every node a rule may now apply to."""
    operands, users = list(node.operands), [u for r in node.results for u in r.users()]
    for old, new in zip(node.results, values, strict=True):
        if old in editor.returned:
            editor.returned.add(new)
    editor.replace(node, values)
    for value in values:
        worklist.push(value.producer)
    for user in users:
        worklist.push(user)
    while operands:  # they may have one user less, and a rule may want exactly one
        value = operands.pop()
        producer = value.producer
        if producer is not None and producer in editor.graph.nodes and editor.is_dead(producer):
            operands.extend(producer.operands)
            editor.erase(producer)
        else:
            worklist.push(producer)
            worklist.push(editor.only_user(value))


def _title(rule: Rule) -> str:
    return rule.__name__.replace("_", " ")
