"""Words of 4-bit codes: any block of rows, against a definition of one element; what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgecc.ir import parse_module, print_module
from edgecc.ir.core import Module
from edgecc.ir.encodings import Dense, Int4
from edgecc.ir.recipes import RECIPES
from edgecc.ir.sampled_weights import SampledWeights
from edgecc.ir.types import DType
from edgecc.ir.weights import Inline, Weight, WeightTable

Arrays = Mapping[str, NDArray[Any]]
ROWS, COLUMNS, GROUP = 24, 32, 8
GROUPS = COLUMNS // GROUP
AWQ_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in an AWQ word each of eight neighbours is."""


def nibble(words: NDArray[Any], row: int, column: int, place: int) -> int:
    return int(words.view(np.uint32)[row, column]) >> (4 * place) & 15


def awq(a: Arrays, n: int, k: int) -> tuple[int, int, float]:
    """Code, zero point and scale of one element."""
    code = nibble(a["codes"], k, n // 8, AWQ_NIBBLE[n % 8])
    g = k // GROUP
    return code, nibble(a["zeros"], g, n // 8, AWQ_NIBBLE[n % 8]), float(a["scales"][g, n])


def gptq(a: Arrays, n: int, k: int) -> tuple[int, int, float]:
    g = int(a["index"][k])
    code = nibble(a["codes"], k // 8, n, k % 8)
    return code, nibble(a["zeros"], g, n // 8, n % 8), float(a["scales"][g, n])


def packed(a: Arrays, n: int, k: int) -> tuple[int, int, float]:
    g = int(a["index"][k])
    code = nibble(a["codes"], n, k // 8, k % 8)
    return code, nibble(a["zeros"], n // 8, g, n % 8), float(a["scales"][n, g])


SHAPES = {
    "awq_int4": ((COLUMNS, ROWS // 8), (GROUPS, ROWS), (GROUPS, ROWS // 8)),
    "gptq_int4": ((COLUMNS // 8, ROWS), (GROUPS, ROWS), (GROUPS, ROWS // 8)),
    "packed_int4": ((ROWS, COLUMNS // 8), (ROWS, GROUPS), (ROWS // 8, GROUPS)),
}
ELEMENTS = {"awq_int4": awq, "gptq_int4": gptq, "packed_int4": packed}


def arrays(recipe: str, seed: int) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    codes, scales, zeros = SHAPES[recipe]

    def words(shape: tuple[int, ...]) -> NDArray[Any]:
        return rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.int32)

    return {
        "codes": words(codes),
        "scales": rng.uniform(0.5, 2, scales).astype(np.float16),
        "zeros": words(zeros),
        "index": rng.integers(0, GROUPS, COLUMNS).astype(np.int32),
    }


def derived(
    table: WeightTable, recipe: str, given: Arrays, **params: bool
) -> tuple[str, dict[str, NDArray[Any]]]:
    """The weight, and the arrays that are its inputs."""
    flags = {"zero_point": True, "ordered": recipe != "awq_int4", **params}
    if recipe == "gptq_int4":
        flags = {"v1": False, **flags}
    used = {
        name: array
        for name, array in given.items()
        if flags.get({"zeros": "zero_point", "index": "ordered"}.get(name, ""), True)
    }
    for name, array in used.items():
        source = Inline((("weight", array.tobytes()),))
        table.add(name, Weight(array.shape, Dense(DType.of(array.dtype)), source))
    return table.derive("w", recipe, tuple(used), **flags), used


@given(
    recipe=st.sampled_from(list(SHAPES)),
    start=st.integers(0, ROWS // 2),
    count=st.integers(0, ROWS),
    zero_point=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_rows(recipe: str, start: int, count: int, zero_point: bool, seed: int) -> None:
    table, stored = WeightTable(), arrays(recipe, seed)
    symbol, _ = derived(table, recipe, stored, zero_point=zero_point)
    first, last = 2 * start, min(2 * start + count, ROWS)
    got = table.dense(symbol, first, max(first, last))
    assert got.shape == (max(0, last - first), COLUMNS)
    for n in range(first, last):
        for k in range(0, COLUMNS, 3):
            code, zero, scale = ELEMENTS[recipe](stored, n, k)
            expected = np.float32((code - (zero if zero_point else 8)) * scale)
            assert got[n - first, k] == expected


def test_zero_points_of_the_first_format_carry() -> None:
    """Words are added: 15 becomes 0, and the next zero point one more still."""
    table, stored = WeightTable(), arrays("gptq_int4", 1)
    stored["zeros"][:] = np.array(0x0000_70F3, np.uint32).view(np.int32)
    symbol, _ = derived(table, "gptq_int4", stored, v1=True)
    zeros = table.read(symbol)["weight_zero_point"]
    # 0x000070f3 + 0x11111111 = 0x11118204: the carry of f goes into the 0 above it.
    assert (zeros[:8, 0] + 8).tolist() == [4, 0, 2, 8, 1, 1, 1, 1]


def test_the_text_of_a_module() -> None:
    module = Module("m")
    derived(module.weights, "gptq_int4", arrays("gptq_int4", 2))
    text = print_module(module)
    assert "derived gptq_int4(@codes, @scales, @zeros, @index" in text
    assert "int4<group=8, scale=f16, zero_point, ordered>" in text
    again = parse_module(text)
    assert print_module(again) == text
    np.testing.assert_array_equal(again.weights.dense("w"), module.weights.dense("w"))


def test_large_ones_are_sampled_like_stored_ones() -> None:
    """Only the groups of columns are real: stacking compares them."""
    table = WeightTable()
    symbol, stored = derived(table, "gptq_int4", arrays("gptq_int4", 3))
    sampled = SampledWeights(table, limit=16)
    parts = sampled.read(symbol)
    np.testing.assert_array_equal(parts["group_index"], stored["index"])
    assert parts["weight"].shape == (ROWS // 2, COLUMNS)
    assert not (parts["weight"] == table.read(symbol)["weight"]).all()
    assert sampled.read(symbol)["weight"].tobytes() == parts["weight"].tobytes()


def weight(array: NDArray[Any]) -> Weight:
    return Weight(array.shape, Dense(DType.of(array.dtype)), Inline((("weight", b""),)))


REFUSED = {
    "no flags": ("awq_int4", {}, {}, "takes zero_point, ordered"),
    "a number": ("awq_int4", {"zero_point": 1}, {}, "takes zero_point, ordered"),
    "an input too few": ("packed_int4", {}, {"zeros": None}, "inputs are needed, got 3"),
    "codes of 64 bits": (
        "packed_int4",
        {},
        {"codes": np.zeros((ROWS, COLUMNS // 8), np.int64)},
        "needs words, found dense<i64>",
    ),
    "integer scales": (
        "packed_int4",
        {},
        {"scales": np.ones((ROWS, GROUPS), np.int32)},
        "needs words",
    ),
    "scales of other rows": (
        "packed_int4",
        {},
        {"scales": np.ones((ROWS - 2, GROUPS), np.float16)},
        "expected [24, 4]",
    ),
    "groups that are not equal": (
        "packed_int4",
        {},
        {"scales": np.ones((ROWS, 5), np.float16)},
        "32 columns are no 5 groups",
    ),
    "no groups": (
        "packed_int4",
        {},
        {"scales": np.ones((ROWS, 0), np.float16)},
        "32 columns are no 0 groups",
    ),
    "few zero points": (
        "gptq_int4",
        {},
        {"zeros": np.zeros((GROUPS, 2), np.int32)},
        "gptq_int4: expected [4, 3]",
    ),
    "few groups of columns": (
        "gptq_int4",
        {},
        {"index": np.zeros(COLUMNS - 1, np.int32)},
        "expected [32]",
    ),
    "a vector of codes": ("awq_int4", {}, {"codes": np.zeros(8, np.int32)}, "a matrix is needed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_inputs_that_do_not_belong_together(case: str) -> None:
    recipe, params, changes, words = REFUSED[case]
    given = {**arrays(recipe, 0), **changes}
    if recipe == "awq_int4":
        del given["index"]
    inputs = [weight(a) for a in given.values() if a is not None]
    flags: dict[str, Any] = {"zero_point": True, "ordered": recipe != "awq_int4"}
    if recipe == "gptq_int4":
        flags["v1"] = False
    flags = {} if case == "no flags" else flags | params
    with pytest.raises(ValueError, match=re.escape(words)):
        RECIPES[recipe].check(inputs, flags)


def test_what_comes_of_inputs_that_do() -> None:
    inputs = [weight(array) for array in arrays("packed_int4", 0).values()]
    flags = {"zero_point": True, "ordered": True}
    found = RECIPES["packed_int4"].check(inputs, flags)
    assert found == ((ROWS, COLUMNS), Int4(GROUP, True, True, DType.F16))
