"""`add-state-replay`: make recurrent layers able to go back, by a log of their last inputs."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from edgecc.errors import UsageError
from edgecc.ir.builder import Builder
from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.ops.shape import SplitAttributes
from edgecc.ir.ops.state import GatedDeltaNetAttributes
from edgecc.ir.rewriter import Rewriter
from edgecc.ir.types import Dim, DType
from edgecc.passes.base import Pass, PassContext, site
from edgecc.roles import Role


@dataclass(frozen=True, slots=True)
class AddStateReplayOptions:
    """`rows`: rows of each log; 0 for the anchor and all proposals of the module's draft."""

    rows: int = 0


class AddStateReplay(Pass[AddStateReplayOptions]):
    """Give each Gated DeltaNet layer a log of its last inputs, and the counts to replay and commit.

    What it does
        Turns the convolution, SiLU, split and `gated_delta_net` of a layer into one
        `logged_delta_net`. Its graph gets a log as input and output, and two more inputs: how many
        logged rows to replay before the new rows, and how many of the new rows are final.

    Why
        A verification computes rows of which some are rejected afterwards. A cache forgets them by
        a smaller length, a state cannot. With the log, states are written only for rows that are
        known to stay, once a call; the next call replays the accepted rows of the last one, which
        takes no product with a weight. The alternatives are a state for each row (3 MB a layer and
        row in a 27B model, against 40 KB of log in float32) or a second pass of the target.

    Example:
        ```
        %y, %conv_1 = causal_conv1d(%x, %conv, @conv1d)
        %s = silu(%y)
        %q, %k, %v = split(%s) {axis = 2, ...}
        %r, %delta_1 = gated_delta_net(%q, %k, %v, %a, %b, %delta, @A_log, @dt_bias) {...}
        ```
        becomes
        ```
        %r, %conv_1, %delta_1, %log_1 = logged_delta_net(%x, %a, %b, %conv, %delta, %log,
            %replay_length, %commit_length, @conv1d, @A_log, @dt_bias) {...}
        ```

    Options
        `rows`: rows of each log, the most that one verification computes. By default one more than
        the draft proposes; 1 in a module without a draft.

    Requires and ensures
        Nothing. `edgecc compile` checks afterwards that `states-replayed` holds.

    Exactness
        Exact: with no row to replay and all new rows final, results and states have the same bits.

    Limits
        The layer must have the form above, in float32, with states that nothing else reads.
    """

    name = "add-state-replay"
    options_type = AddStateReplayOptions

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Rewrite the layers of all graphs.

        Raises:
            UsageError: The number of rows is negative.
        """
        if self.options.rows < 0:
            raise UsageError("pass/bad-option", f"{self.name}: rows is {self.options.rows}")
        rows = self.options.rows or _most_rows(module)
        changed = False
        for graph in module.graphs.values():
            for node in [n for n in graph.nodes if n.op.name == "gated_delta_net"]:
                layer = _match(graph, node)
                where = site(graph, node)
                if isinstance(layer, str):
                    self.remark(ctx, where, layer, applied=False)
                    continue
                log = self._rewrite(module, graph, layer, rows)
                self.remark(ctx, where, f"a log {log.type}", applied=True)
                changed = True
        if changed:
            _say(module, rows)
        return changed

    def _rewrite(self, module: Module, graph: Graph, layer: _Layer, rows: int) -> Value:
        """Replace the nodes of a layer; returns its log."""
        conv, delta = layer.conv, layer.delta
        x, conv_state = conv.operands
        *_, a, b, delta_state = delta.operands
        attrs = delta.attrs
        assert isinstance(attrs, GatedDeltaNetAttributes)
        builder = Builder(module, graph)
        batch = delta_state.type.shape[0]
        width = x.type.shape[2] + 2 * attrs.value_heads
        _, dot, layer_name = delta_state.name.partition(".")
        name = _unused(graph, f"state_log{dot}{layer_name}")
        log = builder.input(name, DType.F32, (batch, rows, width), Role.STATE_LOG)
        counts = [_count(builder, role, batch) for role in (Role.REPLAY_LENGTH, Role.COMMIT_LENGTH)]
        rewriter = Rewriter(module, graph, self.name)
        results = [delta.results[0].name, conv_state.name, delta_state.name, log.name]
        made = rewriter.insert(
            delta,
            "logged_delta_net",
            (x, a, b, conv_state, delta_state, log, *counts),
            weights=(*conv.weights, *delta.weights),
            attrs=attrs,
            names=results,
        )
        result, conv_after, delta_after, log_after = made.results
        rewriter.replace(delta, (result, delta_after))
        for node in (layer.split, layer.silu):
            rewriter.erase(node)
        rewriter.replace_value(conv.results[1], conv_after)
        rewriter.erase(conv)
        builder.output(log_after, log.name, Role.STATE_LOG, alias=log.name)
        return log


@dataclass(frozen=True, slots=True)
class _Layer:
    """The nodes that become one."""

    conv: Node
    silu: Node
    split: Node
    delta: Node


def _say(module: Module, rows: int) -> None:
    """Record what a sequence holds."""
    held = {
        role: sum(_elements(i.value) for g in module.graphs.values() for i in g.by_role(role)) * 4
        for role in (Role.STATE, Role.STATE_LOG)
    }
    module.decisions.append(
        f"states of {held[Role.STATE]} bytes a sequence go back by replaying up to {rows} "
        f"row{'s' if rows > 1 else ''} from logs of {held[Role.STATE_LOG]} bytes"
    )


def _elements(value: Value) -> int:
    return prod(d if isinstance(d, int) else 1 for d in value.type.shape)


def _most_rows(module: Module) -> int:
    """Rows of the widest verification: the anchor and all proposals."""
    draft = module.metadata.get("draft")
    proposals = draft.get("num_speculative_tokens", 0) if isinstance(draft, dict) else 0
    return 1 + int(str(proposals))


def _match(graph: Graph, delta: Node) -> _Layer | str:
    """The layer around a `gated_delta_net`, or why it cannot be rewritten."""
    split = delta.operands[0].producer
    if split is None or split.op.name != "split" or split.results != delta.operands[:3]:
        return "q, k and v are not the pieces of one value, in this order"
    assert isinstance(split.attrs, SplitAttributes)
    silu = split.operands[0].producer
    conv = silu.operands[0].producer if silu is not None and silu.op.name == "silu" else None
    if silu is None or conv is None or conv.op.name != "causal_conv1d":
        return "q, k and v are not the SiLU of a convolution"
    if split.attrs.axis != 2:
        return "q, k and v are not split by channels"
    layer = _Layer(conv, silu, split, delta)
    if delta.results[0].type.dtype is not DType.F32:
        return "it does not compute in f32"
    inner = [conv.results[0], silu.result, *split.results]
    if any(len(v.uses) != 1 for v in inner) or any(o.value in inner for o in graph.outputs):
        return "something else reads what the convolution makes"
    logged = next((n for n in graph.nodes if n.op.name == "logged_delta_net"), None)
    x = conv.operands[0].type
    if logged is not None and logged.operands[0].type.shape[:2] != x.shape[:2]:
        return "the layers of the graph do not see the same rows"
    return _why_no_state(graph, conv, 1) or _why_no_state(graph, delta, 5) or layer


def _why_no_state(graph: Graph, node: Node, operand: int) -> str:
    """Why what a node carries is not a state of its own; empty if it is."""
    before, after = node.operands[operand], node.results[1]
    carried = next((i for i in graph.by_role(Role.STATE) if i.value is before), None)
    if carried is None or len(before.uses) != 1:
        return f"%{before.name} is not a state that {node.op.name} alone reads"
    returned = [o for o in graph.outputs if o.value is after]
    if after.uses or [o.alias for o in returned] != [carried.name]:
        return f"the state after {node.op.name} is not just what overwrites %{before.name}"
    return ""


def _count(builder: Builder, role: Role, batch: Dim) -> Value:
    """The input of a count; one for all layers."""
    found = builder.graph.by_role(role)
    if found:
        return found[0].value
    name = _unused(builder.graph, role.value)
    return builder.input(name, DType.I64, (batch,), role)


def _unused(graph: Graph, name: str) -> str:
    taken = {i.name for i in graph.inputs} | {o.name for o in graph.outputs}
    while name in taken:
        name += "_"
    return name
