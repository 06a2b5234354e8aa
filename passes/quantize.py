"""`quantize`: round the weights of linear layers to 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from edgecc.errors import UsageError, did_you_mean
from edgecc.ir.core import Module, Node, Value
from edgecc.ir.encodings import FP8, NVFP4, Dense, Encoding, Int4, Int8
from edgecc.ir.quantize import has_global_scale
from edgecc.ir.recipes import stored_forms
from edgecc.ir.rewriter import Rewriter
from edgecc.ir.weights import Derived, Unbound, WeightTable
from edgecc.passes.base import Pass, PassContext
from edgecc.passes.module_patterns import (
    check_patterns,
    matches,
    module_names,
    not_selected,
    patterns,
)

FORMATS: Mapping[str, Encoding] = {
    "nvfp4": NVFP4(16),
    "fp8": FP8("tensor"),
    "fp8-channel": FP8("channel"),
    "fp8-block": FP8("block"),
    "int8": Int8(),
    "int4": Int4(128),
}
"""Names of formats; `group` changes the columns that share a scale of `int4`."""

TOLERANCES: Mapping[str, float] = {
    "nvfp4": 0.5,
    "fp8": 0.15,
    "fp8-channel": 0.15,
    "fp8-block": 0.15,
    "int8": 0.05,
    "int4": 0.5,
}
"""Relative error of results of a few layers, with room: single weights are off by at most 1/6 of
the largest in their block (nvfp4), 1/16 (fp8), 1/254 of the largest in their row (int8), 1/14 of
the largest in their group (int4)."""

HEAD = ("*lm_head*", "*output_layer*", "output")
EXCLUDED = (
    *("*router*", "*mlp.gate", "*mlp.shared_expert_gate", "*block_sparse_moe.gate", "*proj_out"),
    *("*linear_attn.in_proj_a", "*linear_attn.in_proj_b", "*linear_attn.conv1d", "*mixer.conv1d"),
    *("mtp.*", "*visual*", "*vision_tower*", "*vision_model*", "*multi_modal_projector*"),
    "*confidence_head*",
)
"""Modules that ModelOpt 0.47 leaves alone by default: small, and sensitive. So is the one row that
says how sure a draft is."""


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """What to quantize, and how.

    `format`: `nvfp4`, `fp8` (one scale for a weight), `fp8-channel`, `fp8-block`, `int8` (a scale
    for each row) or `int4`.
    `include`, `exclude`: module names with `*` and `?`, separated by commas; with or without the
    checkpoint's role in front: `draft.*`, `*.mlp.*`. A pattern that names nothing is an error.
    `head`: also the output head.
    `group`: columns that share a scale, for `int4` only; 0 is 128.
    """

    format: str = "nvfp4"
    include: str = "*"
    exclude: str = ""
    head: bool = False
    group: int = 0


class Quantize(Pass[QuantizeOptions]):
    """Round unquantized weights of linear layers to a packed format.

    What it does
        Every dense weight that only linear layers read becomes a derived weight,
        `quantize(@w, encoding = ...)`, and the layers read that. Weights of layers that read the
        same value (queries, keys and values; gate and up) get one global scale, from the largest
        magnitude in all of them, in the formats that have one (`nvfp4`, `fp8`).

    Why
        Weights are what a decoder reads for every token: a quarter of the bytes is up to four times
        the speed where memory is the limit, and a pair that fits where it did not. A model whose
        publisher ships 16-bit weights only can be compiled to what the device runs best.

    Example:
        ```
        %q = linear(%x, @target.layers.0.q_proj.weight) : f32[b, t, 512]
        ```
        becomes
        ```
        weight @target.layers.0.q_proj-nvfp4.weight : nvfp4<block=16> [512, 256] =
            derived quantize(@target.layers.0.q_proj.weight, encoding = "nvfp4<block=16>")
        %q = linear(%x, @target.layers.0.q_proj-nvfp4.weight) : f32[b, t, 512]
        ```

    Options
        `format`, `include`, `exclude`, `head`, `group`. Runs for several formats combine: what is
        quantized already stays, so `quantize{include="*.self_attn.*",format=fp8},quantize` mixes.

    Requires and ensures
        Nothing. Before the fusions, which then find equal scales to stack. A head that a draft
        borrows stays one weight, whether it is bound before or after.

    Exactness
        Rounds: scales and codes are those of NVIDIA ModelOpt, nearest value, ties to even. The
        tolerance depends on the format, from 0.05 (`int8`) to 0.5 (4 bits), relative to the largest
        result; what it costs a model has to be measured, in acceptance and in its task.

    Limits
        Weights only, no calibration. Routers, vision parts, the small projections of linear
        attention and (without `head`) the output head stay as they are, and so do tied embeddings.
        `fp8` shares scales within a group of layers, where ModelOpt has one for each, so that they
        can be fused.
    """

    name = "quantize"
    options_type = QuantizeOptions

    def __init__(self, options: QuantizeOptions | None = None) -> None:
        super().__init__(options)
        if self.options.format not in FORMATS:
            raise UsageError(
                "pass/bad-option",
                f"quantize: unknown format {self.options.format!r}",
                help=did_you_mean(self.options.format, FORMATS),
            )
        if not patterns(self.options.include):
            raise UsageError(
                "pass/bad-option",
                "quantize: include names nothing",
                help="leave it out to take every linear layer",
            )
        if self.options.group < 0 or (self.options.group and self.options.format != "int4"):
            raise UsageError(
                "pass/bad-option",
                f"quantize: group {self.options.group} with format {self.options.format}",
                help="group is for int4: how many columns share a scale",
            )
        self.encoding = FORMATS[self.options.format]
        if self.options.group:
            self.encoding = Int4(self.options.group)
        self.tolerance = TOLERANCES[self.options.format]  # type: ignore[misc]

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Derive the quantized weights, then let the layers read them.

        Raises:
            UsageError: A pattern of `include` names no linear layer, or one of `exclude` no weight.
        """
        uses = _LinearUses(module)
        self._check_patterns(module, uses)
        chosen = [s for s in uses.nodes if self._chosen(module, uses, s, ctx)]
        if not chosen:
            return False
        groups = uses.groups(chosen) if has_global_scale(self.encoding) else {}
        made = {
            symbol: module.weights.derive_shared(
                quantized_name(symbol, self.options.format),
                "quantize",
                (symbol, *(s for s in groups.get(symbol, ()) if s != symbol)),
                encoding=str(self.encoding),
            )
            for symbol in chosen
        }
        for symbol, packed in made.items():
            for graph_name, node in uses.nodes[symbol]:
                rewriter = Rewriter(module, module.graphs[graph_name], self.name)
                rewriter.replace_weights(node, (packed, *node.weights[1:]))
            self.remark(ctx, f"@{symbol}", f"@{packed}", applied=True)
        before, after = (
            sum(module.weights[s].nbytes for s in names) for names in (made, made.values())
        )
        module.decisions.append(
            f"{len(made)} linear weights quantized to {self.encoding} ({before} -> {after} bytes)"
        )
        return True

    def _chosen(self, module: Module, uses: _LinearUses, symbol: str, ctx: PassContext) -> bool:
        """Whether to quantize a weight; a remark says why not."""
        weight = module.weights[symbol]
        if _origin(module.weights, symbol) != symbol:
            return False  # made by an earlier run of this pass
        reason = self._excluded(symbol)
        if isinstance(weight.source, Unbound):
            reason = f"unbound {weight.source.role}: bind it first"
        elif not isinstance(weight.encoding, Dense):
            reason = f"is {weight.encoding} already"
        elif not reason:
            reason = uses.other_reader(symbol) or self._misfit(weight.shape)
        if reason:
            self.remark(ctx, f"@{symbol}", reason, applied=False)
        return not reason

    def _excluded(self, symbol: str) -> str:
        names = module_names(symbol)
        reason = not_selected(names, self.options.include, self.options.exclude)
        defaults = EXCLUDED if self.options.head else (*HEAD, *EXCLUDED)
        found = next((p for p in defaults if matches(names, [p])), "")
        return reason or (f"excluded by default, {found}" if found else "")

    def _misfit(self, shape: tuple[int, ...]) -> str:
        try:
            self.encoding.components(shape)
        except ValueError as error:
            return str(error)
        return ""

    def _check_patterns(self, module: Module, uses: _LinearUses) -> None:
        """Refuse patterns that name nothing: a typo would round what was to stay, or nothing.

        `exclude` may also name weights that no linear layer reads, as lists of exclusions do.
        """
        linear = [module_names(_origin(module.weights, s)) for s in uses.nodes]
        weights = [module_names(s) for s in module.weights]
        check_patterns(self.name, "include", self.options.include, "linear layer", linear)
        check_patterns(self.name, "exclude", self.options.exclude, "weight", weights, linear)


class _LinearUses:
    """Which linear layers read each weight, and what else does.

    Attributes:
        nodes: Resolved symbol to graph and node, in order.
    """

    def __init__(self, module: Module) -> None:
        table = module.weights
        self.nodes: dict[str, list[tuple[str, Node]]] = {}
        self._others: dict[str, str] = {}
        read: dict[str, None] = {}
        for graph in module.graphs.values():
            for node in graph.nodes:
                for index, name in enumerate(node.weights):
                    symbol = table.resolve(name)
                    read[symbol] = None
                    if index == 0 and node.op.name == "linear":
                        self.nodes.setdefault(symbol, []).append((graph.name, node))
                    else:
                        self._note(table, symbol, f"{node.op.name} in @{graph.name}")
        for symbol in self.nodes:
            if not isinstance(table[symbol].encoding, Dense):
                self._note(table, symbol, f"@{symbol}", first=1)
        self._note_twins(table, read)

    def _note(self, table: WeightTable, symbol: str, reader: str, first: int = 0) -> None:
        for name in list(table.dependencies(symbol))[first:]:
            self._others.setdefault(table.resolve(name), reader)

    def _note_twins(self, table: WeightTable, read: Iterable[str]) -> None:
        """Weights that nodes read in two forms of which a bundle stores one."""
        forms: dict[str, list[str]] = {}
        for symbol in read:
            for stored in stored_forms(table, symbol):
                forms.setdefault(stored, []).append(symbol)
        for symbols in forms.values():
            for symbol in symbols[1:]:
                self._others.setdefault(symbol, f"@{symbols[0]}")
                self._others.setdefault(symbols[0], f"@{symbol}")

    def other_reader(self, symbol: str) -> str:
        """Why a weight would be stored twice if its linear layers read a quantized copy; or ""."""
        reader = self._others.get(symbol)
        return f"is also read by {reader}" if reader else ""

    def groups(self, chosen: list[str]) -> dict[str, list[str]]:
        """For each chosen weight, those that share its scale, itself included.

        Weights belong together if two of their layers read one value; that is transitive.
        """
        by_value: dict[Value, list[str]] = {}
        for symbol in chosen:
            for _, node in self.nodes[symbol]:
                by_value.setdefault(node.operands[0], []).append(symbol)
        group = {symbol: [symbol] for symbol in chosen}
        for symbols in by_value.values():
            for symbol in symbols:
                if group[symbol] is not group[symbols[0]]:
                    merged = group[symbols[0]] + group[symbol]
                    group.update(dict.fromkeys(merged, merged))
        order = {symbol: i for i, symbol in enumerate(chosen)}
        return {symbol: sorted(members, key=order.__getitem__) for symbol, members in group.items()}


def quantized_name(symbol: str, format: str) -> str:
    """`a.q_proj.weight` gives `a.q_proj-nvfp4.weight`: stacking keeps such names short."""
    stem = symbol.removesuffix(".weight")
    return f"{stem}-{format}{symbol[len(stem) :]}"


def is_head(symbol: str) -> bool:
    """Whether a weight is an output head, by its name."""
    return matches(module_names(symbol), HEAD)


def _origin(table: WeightTable, symbol: str) -> str:
    """The weight a quantized one was made from, or the weight itself."""
    source = table[symbol].source
    if isinstance(source, Derived) and source.recipe == "quantize":
        return table.resolve(source.inputs[0])
    return symbol
