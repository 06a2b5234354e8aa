"""`dedupe-weights`: byte-identical weights become one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from edgecc.ir.core import Module
from edgecc.ir.encodings import Encoding, IntShape
from edgecc.ir.weights import Derived, Stored
from edgecc.passes.base import Pass, PassContext


@dataclass(frozen=True, slots=True)
class DedupeWeightsOptions:
    """`min_bytes`: smaller weights are left alone."""

    min_bytes: int = 1 << 16


class DedupeWeights(Pass[DedupeWeightsOptions]):
    """Make weights with equal bytes aliases of the first of them.

    What it does
        Groups stored weights by shape and encoding, compares content hashes within a group, and
        turns later ones into aliases of the first. Then weights that one recipe derives from the
        same weights become one as well.

    Why
        Some drafts ship a frozen copy of the target's head and embedding. Loading both wastes
        memory; comparing bytes makes sharing safe without trusting any flag.

    Example:
        `@draft.embed_tokens.weight` with the bytes of `@target.model.embed_tokens.weight` becomes
        `alias @target.model.embed_tokens.weight`.

    Options
        `min-bytes`: smaller weights are left alone.

    Requires and ensures
        Nothing.

    Exactness
        Exact.

    Limits
        Only weights from different checkpoints are compared: a checkpoint does not store one tensor
        twice, and hashing every layer of a large model takes longer than it saves.
    """

    name = "dedupe-weights"
    options_type = DedupeWeightsOptions

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Hash candidates, alias duplicates."""
        table = module.weights
        groups: dict[tuple[IntShape, Encoding], list[str]] = defaultdict(list)
        for symbol, weight in table.items():
            if isinstance(weight.source, Stored) and weight.nbytes >= self.options.min_bytes:
                groups[weight.shape, weight.encoding].append(symbol)
        changed = False
        for symbols in groups.values():
            if len({table[s].source.checkpoint for s in symbols}) > 1:  # type: ignore[union-attr]
                changed |= self._merge(module, symbols, ctx)
        return self._merge_derived(module, ctx) or changed

    def _merge(self, module: Module, symbols: list[str], ctx: PassContext) -> bool:
        table = module.weights
        first_rows: dict[bytes, list[str]] = defaultdict(list)
        for symbol in symbols:  # one row tells nearly all differing weights apart
            row = b"".join(a.tobytes() for a in table.read(symbol, 0, 1).values())
            first_rows[row].append(symbol)
        changed = False
        for candidates in first_rows.values():
            kept: dict[str, str] = {}
            for symbol in candidates if len(candidates) > 1 else ():
                original = kept.setdefault(table.digest(symbol), symbol)
                if original != symbol:
                    self._alias(module, symbol, original, "equal bytes", ctx)
                    changed = True
        return changed

    def _merge_derived(self, module: Module, ctx: PassContext) -> bool:
        table = module.weights
        made: dict[object, str] = {}
        changed = False
        for symbol, weight in list(table.items()):
            source = weight.source
            if not isinstance(source, Derived) or not source.inputs:
                continue
            key = (source.recipe, tuple(map(table.resolve, source.inputs)), source.params)
            original = made.setdefault(key, symbol)
            if original != symbol and weight.nbytes >= self.options.min_bytes:
                self._alias(module, symbol, original, f"both {source.recipe}", ctx)
                changed = True
        return changed

    def _alias(
        self, module: Module, symbol: str, original: str, why: str, ctx: PassContext
    ) -> None:
        size = module.weights[symbol].nbytes
        module.weights.alias(symbol, original)
        module.decisions.append(f"{symbol} -> {original} ({why}, {size} bytes saved)")
        self.remark(ctx, f"@{symbol}", f"equals @{original}", applied=True)
