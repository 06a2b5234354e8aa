"""Weights of random modules: bytes, aliases, derived and unbound weights, as immutable trees.

Like expressions, weights are equal by value: an equal tree gives the same symbol, in whichever
graph it is read, and that is how graphs come to share weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hypothesis import strategies as st

from edgecc.ir.core import Module
from edgecc.ir.encodings import NVFP4, Dense, Encoding, IntShape
from edgecc.ir.types import DType
from edgecc.ir.weights import Alias, Param, Unbound, Weight
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


WeightTree: TypeAlias = Bytes | AnotherName | Made | Missing


def add_weight(module: Module, tree: WeightTree) -> str:
    """The symbol of a weight, added to the table with everything it is made from."""
    table = module.weights
    if isinstance(tree, Bytes):
        source = random_weight(tree.encoding, tree.shape, tree.seed)
        return table.add(_label(tree), Weight(tree.shape, tree.encoding, source))
    if isinstance(tree, AnotherName):
        target = add_weight(module, tree.of)
        weight = table[target]
        return table.add(f"{target}.alias", Weight(weight.shape, weight.encoding, Alias(target)))
    if isinstance(tree, Made):
        inputs = tuple(add_weight(module, i) for i in tree.inputs)
        named = [*inputs, *(str(value) for _, value in tree.params)]
        return table.derive(
            f"{tree.recipe}.{'.'.join(named)}", tree.recipe, inputs, **dict(tree.params)
        )
    shape = "x".join(map(str, tree.shape))
    weight = Weight(tree.shape, Dense(DType.BF16), Unbound(tree.role))
    return table.add(f"{tree.role}.{shape}", weight)


def _label(tree: Bytes) -> str:
    """`w0.8x4.nvfp4-4`."""
    kind = "".join(c if c.isalnum() else "-" for c in str(tree.encoding)).strip("-")
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
    if all(e in encodings_of(shape) for e in encodings) and Dense(DType.BF16) in encodings:
        options.append(own.map(lambda of: Made("narrow", (of,), (("dtype", "bf16"),))))
    if len(shape) == 2:
        options.append(_stacked(shape, held))
        packed = [e for e in held if isinstance(e, NVFP4)]
        if packed:
            nvfp4 = st.builds(Bytes, st.just(shape), st.sampled_from(packed), SEEDS)
            options.append(nvfp4.map(lambda of: Made("int8_codes", (of,))))
        if unbound:
            role = st.sampled_from(["lm_head", "embed_tokens"])
            options.append(st.builds(Missing, st.just(shape), role))
    return st.one_of(options)


def _stacked(shape: IntShape, encodings: Sequence[Encoding]) -> st.SearchStrategy[WeightTree]:
    """Two matrices under each other, with equal scalars; either may have no rows."""
    rows, columns = shape

    def stack(cut: int, encoding: Encoding, first: int, second: int) -> WeightTree:
        above = Bytes((cut, columns), encoding, first)
        return Made("concat_rows", (above, Bytes((rows - cut, columns), encoding, second)))

    seed = st.integers(0, 1)
    return st.builds(stack, st.integers(0, rows), st.sampled_from(encodings), seed, seed)


def rotary_tables(length: int, dim: int) -> tuple[WeightTree, WeightTree]:
    """Cosines and sines `[length, dim / 2]`."""
    cos, sin = (
        Made("rope_table", (), (("dim", dim), ("length", length), ("part", part), ("theta", 100.0)))
        for part in ("cos", "sin")
    )
    return cos, sin
