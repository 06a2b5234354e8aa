"""Pieces of a pre-norm decoder layer that targets and drafts share."""

from __future__ import annotations

from edgecc.frontends.module_weights import ModuleWeights
from edgecc.ir.builder import Builder
from edgecc.ir.core import Value
from edgecc.ir.ops.attention import RopeAttributes
from edgecc.ir.ops.norm import RmsNormAttributes


class DecoderBuilder:
    """Adds layer pieces to a graph, named after the tensors of the checkpoint.

    Args:
        b: Builder of the graph.
        weights: Where tensors come from.
        eps: Epsilon of every norm.
        unit_offset: Whether norm weights are stored as offsets from one (`(1 + w)` norms).
    """

    def __init__(
        self, b: Builder, weights: ModuleWeights, eps: float, *, unit_offset: bool = False
    ) -> None:
        self.b = b
        self.weights = weights
        self.eps = eps
        self.unit_offset = unit_offset

    def linear(self, x: Value, module: str, rows: int, name: str = "") -> Value:
        """`x W^T` with the bias if the checkpoint stores one (`module.bias`)."""
        symbols = [self.weights.matrix(module, rows, int(str(x.type.shape[-1])))]
        if self.weights.has(f"{module}.bias"):
            symbols.append(self.weights.vector(f"{module}.bias", rows))
        self.b.at(f"{self.weights.checkpoint.role}: {module}")
        return self.b.op("linear", x, weights=symbols, name=name or module.rsplit(".", 1)[-1])

    def norm(self, x: Value, module: str, name: str = "") -> Value:
        """RMSNorm over the last axis."""
        symbol = self._norm_weight(module, int(str(x.type.shape[-1])))
        self.b.at(f"{self.weights.checkpoint.role}: {module}")
        attrs = RmsNormAttributes(self.eps)
        return self.b.op("rms_norm", x, weights=(symbol,), attrs=attrs, name=name or "normed")

    def head_norm(self, x: Value, module: str, heads: int) -> Value:
        """RMSNorm of each head with one shared weight."""
        symbol = self._norm_weight(module, int(str(x.type.shape[-1])) // heads)
        self.b.at(f"{self.weights.checkpoint.role}: {module}")
        attrs = RmsNormAttributes(self.eps, heads)
        return self.b.op("rms_norm", x, weights=(symbol,), attrs=attrs, name=x.name)

    def _norm_weight(self, module: str, size: int) -> str:
        read = self.weights.one_plus if self.unit_offset else self.weights.vector
        return read(f"{module}.weight", size)

    def rope(self, x: Value, positions: Value, tables: tuple[str, str], heads: int) -> Value:
        """Rotary embedding."""
        return self.b.op(
            "rope", x, positions, weights=tables, attrs=RopeAttributes(heads), name=x.name
        )

    def add(self, a: Value, b: Value) -> Value:
        """Residual sum."""
        return self.b.op("add", a, b, name="x")

    def mlp(self, x: Value, module: str, intermediate: int, hidden: int) -> Value:
        """`down(silu(gate(x)) * up(x))`."""
        gate = self.linear(x, f"{module}.gate_proj", intermediate)
        up = self.linear(x, f"{module}.up_proj", intermediate)
        y = self.b.op("swiglu", gate, up, name="act")
        return self.linear(y, f"{module}.down_proj", hidden)
