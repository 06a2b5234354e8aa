"""Recipes: how a derived weight is computed from others, row block by row block.

A recipe is data in the module (`derived concat_rows(@a, @b)`), so derived weights print, hash and
stream like stored ones. Recipes that only rearrange packed bytes are written to the bundle;
recipes that *expand* (dequantize, widen) are applied when a session is loaded, so that a packed
weight stays packed on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgecc import nvfp4
from edgecc.ir.encodings import (
    ACTIVATION_SCALES,
    NVFP4,
    Array,
    Dense,
    Encoding,
    Int8Block,
    IntShape,
)
from edgecc.ir.quantize import has_global_scale, quantize, target_encoding
from edgecc.ir.recipe import Recipe
from edgecc.ir.rope import RopeParams, rope_tables
from edgecc.ir.types import DType
from edgecc.ir.weights import Derived, Param, Parts, Weight, WeightTable
from edgecc.ir.word_recipes import WORD_RECIPES


def activation_scale(parts: Mapping[str, Array]) -> Array | None:
    """The factor that activations are quantized with, f32 `[]`; None if none is stored.

    Args:
        parts: Components of a packed weight.
    """
    if "input_global_scale" in parts:
        return np.asarray(np.float32(1) / parts["input_global_scale"], np.float32)
    scale = parts.get("input_scale")
    return None if scale is None else np.asarray(scale.astype(np.float32))


def stored_forms(table: WeightTable, symbol: str) -> set[str]:
    """What a bundle has of a weight: recipes that expand are applied when it is loaded.

    Args:
        table: The weights.
        symbol: One of them, or another name of it.

    Returns:
        Symbols at the ends of aliases.
    """
    symbol = table.resolve(symbol)
    source = table[symbol].source
    if isinstance(source, Derived) and RECIPES[source.recipe].expands:
        return {form for name in source.inputs for form in stored_forms(table, name)}
    return {symbol}


def same_layout(inputs: Sequence[Weight]) -> Encoding:
    """The common encoding of matrices with equal columns, or of vectors.

    Raises:
        ValueError: Encodings or column counts differ, or an input is neither.
    """
    first = inputs[0]
    for other in inputs:
        if len(other.shape) not in (1, 2) or other.shape[1:] != first.shape[1:]:
            raise ValueError(f"columns differ: {[w.shape for w in inputs]}")
    found = sorted({str(w.encoding) for w in inputs})
    if len(found) != 1:
        raise ValueError(f"encodings differ: {', '.join(found)}")
    return first.encoding


class ConcatRows(Recipe):
    """Matrices under each other, or vectors one after the other, such as biases.

    Per-weight scalars must be equal bit for bit: passes check.
    """

    name = "concat_rows"
    inputs = None

    def result(
        self, inputs: Sequence[Weight], params: Mapping[str, Param]
    ) -> tuple[IntShape, Encoding]:
        """`[sum of rows, columns]`, or `[sum of sizes]`, in the common encoding.

        Raises:
            ValueError: The inputs cannot be combined, or one ends inside a group of rows that its
                encoding stores together.
        """
        encoding = same_layout(inputs)
        for weight in inputs[:-1]:
            if weight.shape[0] % (group := encoding.row_group(weight.shape)):
                raise ValueError(
                    f"{encoding} stores {group} rows together, an input has {weight.shape[0]}"
                )
        return (sum(w.shape[0] for w in inputs), *inputs[0].shape[1:]), encoding

    def rows(
        self, table: WeightTable, weight: Weight, source: Derived, start: int, stop: int
    ) -> Parts:
        """The overlapping rows of each input, stacked."""
        blocks, offset = [], 0
        for symbol in source.inputs:
            count = table[symbol].shape[0]
            low, high = max(start - offset, 0), min(stop - offset, count)
            if low < high:
                blocks.append(table.read(symbol, low, high))
            offset += count
        blocks = blocks or [table.read(source.inputs[0], 0, 0)]
        return _stack(weight, blocks, np.concatenate)


class Dequantize(Recipe):
    """The exact float32 values of any encoding."""

    name = "dequantize"
    expands = True

    def result(
        self, inputs: Sequence[Weight], params: Mapping[str, Param]
    ) -> tuple[IntShape, Encoding]:
        """The input's shape, dense f32."""
        return inputs[0].shape, Dense(DType.F32)

    def rows(
        self, table: WeightTable, weight: Weight, source: Derived, start: int, stop: int
    ) -> Parts:
        """Dequantized rows."""
        return {"weight": table.dense(source.inputs[0], start, stop).astype(np.float32)}


class Narrow(Recipe):
    """The values of any encoding, rounded once to a 16-bit type.

    Param `dtype`: `bf16` or `f16`. For devices that compute in it and do not read the encoding.
    """

    name = "narrow"
    expands = True

    def result(
        self, inputs: Sequence[Weight], params: Mapping[str, Param]
    ) -> tuple[IntShape, Encoding]:
        """The input's shape, dense in the wanted type.

        Raises:
            ValueError: The type is not one of 16 bits.
        """
        if set(params) != {"dtype"} or params["dtype"] not in ("bf16", "f16"):
            raise ValueError(f"narrow takes dtype = bf16 or f16, got {dict(params)}")
        return inputs[0].shape, Dense(DType(str(params["dtype"])))

    def rows(
        self, table: WeightTable, weight: Weight, source: Derived, start: int, stop: int
    ) -> Parts:
        """Rounded rows."""
        values = table.dense(source.inputs[0], start, stop)
        dtype = weight.encoding.components(weight.shape)["weight"].dtype
        with np.errstate(over="ignore"):
            return {"weight": values.astype(dtype.numpy)}


class Int8Codes(Recipe):
    """NVFP4 as 8-bit codes around 128 with float32 block scales; exact (see `Int8Block`)."""

    name = "int8_codes"
    expands = True

    def result(
        self, inputs: Sequence[Weight], params: Mapping[str, Param]
    ) -> tuple[IntShape, Encoding]:
        """The input's shape, `int8_block` of the same block.

        Raises:
            ValueError: The input is not NVFP4.
        """
        encoding = inputs[0].encoding
        if not isinstance(encoding, NVFP4):
            raise ValueError(f"int8_codes needs nvfp4, found {encoding}")
        return inputs[0].shape, Int8Block(encoding.block)

    def rows(
        self, table: WeightTable, weight: Weight, source: Derived, start: int, stop: int
    ) -> Parts:
        """Codes and scales of a block of rows."""
        parts = table.read(source.inputs[0], start, stop)
        encoding = table[table.resolve(source.inputs[0])].encoding
        assert isinstance(encoding, NVFP4)
        codes, scale = nvfp4.int8_codes(
            parts["weight"],
            parts["weight_scale"],
            parts[encoding.global_component],
            divisor=encoding.divisor,
        )
        return {"weight": codes, "weight_scale": scale}


class InputScale(Recipe):
    """The calibrated activation scale that is stored with a packed weight: f32 `[]`.

    Where a divisor is stored it is the reciprocal of that, in float32.
    """

    name = "input_scale"
    sources = 0

    def result(
        self, inputs: Sequence[Weight], params: Mapping[str, Param]
    ) -> tuple[IntShape, Encoding]:
        """A scalar, dense f32.

        Raises:
            ValueError: The encoding has no such scale.
        """
        encoding = inputs[0].encoding
        if not any(c in encoding.components(inputs[0].shape) for c in ACTIVATION_SCALES):
            raise ValueError(f"{encoding} has no input_scale")
        return (), Dense(DType.F32)

    def rows(
        self, table: WeightTable, weight: Weight, source: Derived, start: int, stop: int
    ) -> Parts:
        """The scalar, widened from 16 bits or inverted where it is stored so."""
        scale = activation_scale(table.read(source.inputs[0], 0, 1))
        assert scale is not None
        return {"weight": scale}


class AddOne(Recipe):
    """`1 + w` of a dense floating-point weight, float32.

    For norms whose weight is stored as the offset from one. Transformers adds in float32 as well;
    rounding the sum to the 16 bits of a checkpoint would cost up to 2^-9 of it.
    """

    name = "add_one"

    def result(
        self, inputs: Sequence[Weight], params: Mapping[str, Param]
    ) -> tuple[IntShape, Encoding]:
        """The input's shape, dense f32.

        Raises:
            ValueError: The input is packed, or holds integers.
        """
        encoding = inputs[0].encoding
        if not isinstance(encoding, Dense) or not encoding.dtype.is_float:
            raise ValueError(f"add_one needs dense floating-point numbers, found {encoding}")
        return inputs[0].shape, Dense(DType.F32)

    def rows(
        self, table: WeightTable, weight: Weight, source: Derived, start: int, stop: int
    ) -> Parts:
        """The sum, rounded once to float32."""
        values = table.dense(source.inputs[0], start, stop).astype(np.float32)
        return {"weight": np.float32(1) + values}


class Quantize(Recipe):
    """A matrix rounded to another encoding.

    Inputs: the matrix, then those that take part in its global scale (queries, keys and values that
    are to be stacked later need one scale). Param `encoding`: the wanted encoding as text. A global
    scale needs the largest magnitude of all inputs, so they are read once before the first row;
    the table remembers it.
    """

    name = "quantize"
    inputs = None
    sources = 1

    def result(
        self, inputs: Sequence[Weight], params: Mapping[str, Param]
    ) -> tuple[IntShape, Encoding]:
        """The first input's shape in the wanted encoding.

        Raises:
            ValueError: Unknown parameters, an encoding that cannot be made by rounding or cannot
                hold the shape, an input without floating-point values, or inputs beyond the first
                for an encoding without a global scale.
        """
        if set(params) != {"encoding"}:
            raise ValueError(f"quantize takes the parameter encoding, got {sorted(params)}")
        encoding = target_encoding(str(params["encoding"]))
        encoding.components(inputs[0].shape)
        for weight in inputs:
            if isinstance(weight.encoding, Dense) and not weight.encoding.dtype.is_float:
                raise ValueError(f"quantize needs floating-point values, found {weight.encoding}")
        if len(inputs) > 1 and not has_global_scale(encoding):
            raise ValueError(f"{encoding} has no scale that {len(inputs)} weights could share")
        return inputs[0].shape, encoding

    def rows(
        self, table: WeightTable, weight: Weight, source: Derived, start: int, stop: int
    ) -> Parts:
        """Quantized rows."""
        values = table.dense(source.inputs[0], start, stop).astype(np.float32)
        return quantize(
            weight.encoding, values, lambda: max(map(table.absolute_maximum, source.inputs))
        )


class RopeTable(Recipe):
    """Cosine or sine table of a rotary embedding: f32 `[length, dim/2]`, no inputs.

    Params: `part` ("cos" or "sin"), `length`, and the fields of `RopeParams`.
    """

    name = "rope_table"
    inputs = 0

    def result(
        self, inputs: Sequence[Weight], params: Mapping[str, Param]
    ) -> tuple[IntShape, Encoding]:
        """`[length, dim/2]`, dense f32.

        Raises:
            ValueError: A parameter is missing, unknown or out of range.
        """
        part, length, rope = _rope_params(params)
        if part not in ("cos", "sin") or length < 0:
            raise ValueError(f"no part {part!r} of a table of {length} rows")
        return (length, rope.dim // 2), Dense(DType.F32)

    def rows(
        self, table: WeightTable, weight: Weight, source: Derived, start: int, stop: int
    ) -> Parts:
        """Rows of the table; positions are rows."""
        part, length, rope = _rope_params(dict(source.params))
        cos, sin = rope_tables(rope, length)
        return {"weight": (cos if part == "cos" else sin)[start:stop]}


class OffsetsToIds(Recipe):
    """A table of ids from a table of distances: entry i becomes `i + offset[i]`.

    EAGLE3 drafts store the target id of each draft id this way (`d2t`).
    """

    name = "offsets_to_ids"

    def result(
        self, inputs: Sequence[Weight], params: Mapping[str, Param]
    ) -> tuple[IntShape, Encoding]:
        """The input's shape, dense i64.

        Raises:
            ValueError: The input is no vector of i64.
        """
        (offsets,) = inputs
        if offsets.encoding != Dense(DType.I64) or len(offsets.shape) != 1:
            raise ValueError(
                f"offsets_to_ids needs a dense<i64> vector, found {offsets.encoding} "
                f"{list(offsets.shape)}"
            )
        return offsets.shape, offsets.encoding

    def rows(
        self, table: WeightTable, weight: Weight, source: Derived, start: int, stop: int
    ) -> Parts:
        """Offsets plus their row numbers."""
        offsets = table.read(source.inputs[0], start, stop)["weight"]
        return {"weight": offsets + np.arange(start, stop, dtype=np.int64)}


def _rope_params(params: Mapping[str, Param]) -> tuple[Param, int, RopeParams]:
    """Part, length and rotation.

    Raises:
        ValueError: A parameter is missing, unknown or out of range.
    """
    rest = {k: v for k, v in params.items() if k not in ("part", "length")}
    try:
        return params["part"], int(params["length"]), RopeParams(**rest)  # type: ignore[arg-type]
    except (KeyError, TypeError) as error:
        raise ValueError(f"parameters of a rope table: {error}") from error


def _stack(weight: Weight, blocks: Sequence[Parts], join: object) -> Parts:
    components = weight.encoding.components(weight.shape)
    return {
        name: join([b[name] for b in blocks])  # type: ignore[operator]
        if component.rows
        else blocks[0][name]
        for name, component in components.items()
    }


RECIPES: Mapping[str, Recipe] = {
    r.name: r
    for r in (
        *WORD_RECIPES,
        AddOne(),
        ConcatRows(),
        Dequantize(),
        InputScale(),
        Int8Codes(),
        Narrow(),
        OffsetsToIds(),
        Quantize(),
        RopeTable(),
    )
}
"""Every recipe by name."""
