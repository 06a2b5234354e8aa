"""Weights of random modules: bytes, aliases, derived and unbound weights, as immutable trees.

Like expressions, weights are equal by value: an equal tree gives the same symbol, in whichever
graph it is read, and that is how graphs come to share weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from hypothesis import strategies as st

from edgecc.ir import words
from edgecc.ir.core import Module
from edgecc.ir.encodings import NVFP4, Dense, Encoding, Int4, IntShape
from edgecc.ir.quantize import target_encoding
from edgecc.ir.recipes import RECIPES
from edgecc.ir.types import DType
from edgecc.ir.weights import Alias, Inline, Param, Unbound, Weight
from edgecc.testing.encoding_samples import encodings_of, random_weight

SEEDS = st.sampled_from((0, 0, 1, 2))
"""Few, so that weights are read twice."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """A weight with bytes of its own."""

    shape: IntShape
    encoding: Encoding
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Ids:
    """A table of i64 numbers below a bound; with `offsets`, made from distances to row numbers."""

    shape: IntShape
    below: int
    seed: int = 0
    offsets: bool = False


@dataclass(frozen=True, slots=True)
class AnotherName:
    """An alias."""

    of: WeightTree


@dataclass(frozen=True, slots=True)
class Made:
    """A weight derived by a recipe."""

    recipe: str
    inputs: tuple[WeightTree, ...] = ()
    params: tuple[tuple[str, Param], ...] = ()


@dataclass(frozen=True, slots=True)
class Missing:
    """An unbound weight."""

    shape: IntShape
    role: str


WeightTree: TypeAlias = Bytes | Ids | AnotherName | Made | Missing


def add_weight(module: Module, tree: WeightTree) -> str:
    """The symbol of a weight, added to the table with everything it is made from."""
    table = module.weights
    if isinstance(tree, Bytes):
        source = random_weight(tree.encoding, tree.shape, tree.seed)
        return table.add(_label(tree), Weight(tree.shape, tree.encoding, source))
    if isinstance(tree, Ids):
        return _add_ids(module, tree)
    if isinstance(tree, AnotherName):
        target = add_weight(module, tree.of)
        weight = table[target]
        return table.add(f"{target}.alias", Weight(weight.shape, weight.encoding, Alias(target)))
    if isinstance(tree, Made):
        inputs = tuple(add_weight(module, i) for i in tree.inputs)
        named = [*inputs, *(_plain(str(value)) for _, value in tree.params)]
        return table.derive(
            f"{tree.recipe}.{'.'.join(named)}", tree.recipe, inputs, **dict(tree.params)
        )
    shape = "x".join(map(str, tree.shape))
    weight = Weight(tree.shape, Dense(DType.BF16), Unbound(tree.role))
    return table.add(f"{tree.role}.{shape}", weight)


def _plain(text: str) -> str:
    """Text that needs no quotes in a symbol."""
    return "".join(c if c.isalnum() or c == "." else "-" for c in text).strip("-")


def _add_ids(module: Module, tree: Ids) -> str:
    rng = np.random.default_rng([tree.seed, tree.below, *tree.shape])
    ids = rng.integers(0, tree.below, tree.shape)
    if tree.offsets:
        ids -= np.arange(len(ids))
    kind = "offsets" if tree.offsets else "ids"
    symbol = f"{kind}{tree.seed}.{'x'.join(map(str, tree.shape))}.below{tree.below}"
    source = Inline((("weight", ids.astype(np.int64).tobytes()),))
    module.weights.add(symbol, Weight(tree.shape, Dense(DType.I64), source))
    if not tree.offsets:
        return symbol
    return module.weights.derive(f"offsets_to_ids.{symbol}", "offsets_to_ids", (symbol,))


def _label(tree: Bytes) -> str:
    """`w0.8x4.nvfp4-4`."""
    kind = _plain(str(tree.encoding))
    kind = kind.removeprefix("dense-").replace("block-", "").replace("--", "-")
    return f"w{tree.seed}.{'x'.join(map(str, tree.shape))}.{kind}"


def weights(*shape: int) -> st.SearchStrategy[WeightTree]:
    """Weights of a shape in every encoding that can hold it."""
    return weight_trees(shape, encodings_of(shape))


def weight_trees(
    shape: IntShape, encodings: Sequence[Encoding], *, unbound: bool = False
) -> st.SearchStrategy[WeightTree]:
    """Weights of a shape: with bytes of their own, aliased, derived, perhaps unbound.

    Args:
        shape: Logical shape.
        encodings: Encodings to choose from; Dense f32 if none of them can hold the shape.
        unbound: Whether it may be unbound.
    """
    held = tuple(e for e in encodings if e in encodings_of(shape)) or (Dense(DType.F32),)
    own = st.builds(Bytes, st.just(shape), st.sampled_from(held), SEEDS)
    options: list[st.SearchStrategy[WeightTree]] = [own, own, st.builds(AnotherName, own)]
    options.append(own.map(lambda of: Made("dequantize", (of,))))
    dense = tuple(e for e in held if isinstance(e, Dense)) or (Dense(DType.F32),)
    plain = st.builds(Bytes, st.just(shape), st.sampled_from(dense), SEEDS)
    options.append(plain.map(lambda of: Made("add_one", (of,))))
    if all(e in encodings_of(shape) for e in encodings) and Dense(DType.BF16) in encodings:
        options.append(own.map(lambda of: Made("narrow", (of,), (("dtype", "bf16"),))))
    if len(shape) == 2:
        options.append(_stacked(shape, held))
        rounded = tuple(str(e) for e in held if _can_round(e))
        if rounded and 0 not in shape:
            options.append(st.builds(_quantized, plain, st.sampled_from(rounded)))
        packed = [e for e in held if isinstance(e, NVFP4)]
        if packed:
            nvfp4 = st.builds(Bytes, st.just(shape), st.sampled_from(packed), SEEDS)
            options.append(nvfp4.map(lambda of: Made("int8_codes", (of,))))
        if any(isinstance(e, Int4) for e in held) and 0 not in shape:
            options.append(word_weights(*shape))
        if unbound:
            role = st.sampled_from(["lm_head", "embed_tokens"])
            options.append(st.builds(Missing, st.just(shape), role))
    return st.one_of(options)


def word_weights(rows: int, columns: int) -> st.SearchStrategy[WeightTree]:
    """Words of 4-bit codes in one of the orders that can hold the shape, neighbours in a group."""
    along_rows, along_columns = -(-rows // words.CODES), columns // words.CODES

    def make(recipe: str, groups: int, zero_point: bool, scale: DType, seed: int) -> WeightTree:
        codes, scales, zeros = {
            "awq_int4": ((columns, along_rows), (groups, rows), (groups, along_rows)),
            "gptq_int4": ((along_columns, rows), (groups, rows), (groups, along_rows)),
            "packed_int4": ((rows, along_columns), (rows, groups), (along_rows, groups)),
        }[recipe]
        inputs = [Bytes(codes, Dense(DType.I32), seed), Bytes(scales, Dense(scale), seed)]
        if zero_point:
            inputs.append(Bytes(zeros, Dense(DType.I32), seed))
        flags: dict[str, Param] = {"ordered": False, "zero_point": zero_point}
        if recipe == "gptq_int4":
            flags["v1"] = seed > 0
        return Made(recipe, tuple(inputs), tuple(sorted(flags.items())))

    filled = ("gptq_int4", "packed_int4") if columns % words.CODES == 0 else ()
    groups = [g for g in (1, 2) if columns % g == 0]
    scales = st.sampled_from((DType.F32, DType.F16))
    recipes = st.sampled_from(("awq_int4", *filled))
    return st.builds(make, recipes, st.sampled_from(groups), st.booleans(), scales, SEEDS)


def _stacked(shape: IntShape, encodings: Sequence[Encoding]) -> st.SearchStrategy[WeightTree]:
    """Two matrices under each other, with equal scalars; either may have no rows."""
    rows, columns = shape

    def stack(cut: int, encoding: Encoding, first: int, second: int) -> WeightTree:
        if not _can_stack(encoding, (cut, rows - cut), columns):
            encoding = Dense(DType.F32)
        above = Bytes((cut, columns), encoding, first)
        return Made("concat_rows", (above, Bytes((rows - cut, columns), encoding, second)))

    seed = st.integers(0, 1)
    return st.builds(stack, st.integers(0, rows), st.sampled_from(encodings), seed, seed)


def _can_stack(encoding: Encoding, rows: Sequence[int], columns: int) -> bool:
    """Whether weights of an encoding can be put under each other."""
    try:
        parts = [Weight((count, columns), encoding, Inline(())) for count in rows]
        for part in parts:
            encoding.components(part.shape)
        RECIPES["concat_rows"].check(parts, {})
    except ValueError:
        return False
    return True


def _can_round(encoding: Encoding) -> bool:
    """Whether the recipe `quantize` makes this encoding."""
    try:
        target_encoding(str(encoding))
    except ValueError:
        return False
    return True


def _quantized(of: WeightTree, encoding: str) -> WeightTree:
    return Made("quantize", (of,), (("encoding", encoding),))


def rotary_tables(length: int, dim: int) -> tuple[WeightTree, WeightTree]:
    """Cosines and sines `[length, dim / 2]`."""
    cos, sin = (
        Made("rope_table", (), (("dim", dim), ("length", length), ("part", part), ("theta", 100.0)))
        for part in ("cos", "sin")
    )
    return cos, sin
