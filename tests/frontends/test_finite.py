"""Looking at values: no NaN and no infinity may get into a bundle."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from edgecc.errors import InputError
from edgecc.frontends import finite
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.finite import check_finite
from helpers.checkpoints import Array

DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
}


def check(folder: Path, values: Array) -> None:
    folder.mkdir(exist_ok=True)
    save_file({"w": values}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    with Checkpoint.open(folder, role="target") as checkpoint:
        check_finite(checkpoint, "w")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_largest_values_are_fine(tmp_path: Path, dtype: type) -> None:
    largest = float(ml_dtypes.finfo(dtype).max)
    smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    values = [0.0, -0.0, largest, -largest, smallest, -smallest, 1.5]
    check(tmp_path, np.array(values, dtype=np.float64).astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    ("value", "word"), [(np.nan, "NaN"), (-np.nan, "NaN"), (np.inf, "infinite"), (-np.inf, "inf")]
)
def test_one_bad_value(tmp_path: Path, dtype: type, value: float, word: str) -> None:
    values = np.zeros((3, 5), dtype=np.float64)
    values[1, 4] = value
    with pytest.raises(InputError, match=rf"value at \[1, 4\] is {word}") as caught:
        check(tmp_path, values.astype(dtype))
    assert caught.value.id == "checkpoint/not-finite"
    assert caught.value.diagnostics[0].where == "target/model.safetensors: w"


@given(st.integers(1, 40), st.integers(1, 9), st.data())
def test_the_first_of_several_in_any_chunk(
    tmp_path_factory: pytest.TempPathFactory, rows: int, columns: int, data: st.DataObject
) -> None:
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    values = np.ones((rows, columns), dtype=np.float32)
    values[row, column] = np.nan
    values[-1, -1] = np.inf
    chunk = finite._CHUNK
    finite._CHUNK = 16
    try:
        first = min((row, column), (rows - 1, columns - 1))
        with pytest.raises(InputError, match=rf"value at \[{first[0]}, {first[1]}\]"):
            check(tmp_path_factory.mktemp("finite"), values)
    finally:
        finite._CHUNK = chunk


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (2, 3, 4)], ids=str)
def test_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    check(tmp_path, np.ones(shape, dtype=np.float32))
    if 0 not in shape:
        with pytest.raises(InputError, match="is NaN"):
            check(tmp_path, np.full(shape, np.nan, dtype=np.float32))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_, ml_dtypes.float8_e4m3fn])
def test_other_dtypes_are_left_alone(tmp_path: Path, dtype: type) -> None:
    check(tmp_path, np.full((2, 2), 0x7F, dtype=np.uint8).astype(dtype))
