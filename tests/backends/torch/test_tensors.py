from __future__ import annotations

import numpy as np
import pytest
import torch

from edgecc.backends.torch.tensors import DTYPES, numpy_dtype, to_array, to_tensor, torch_dtype
from edgecc.errors import UnsupportedError
from edgecc.ir import DType
from helpers.ops import assert_same_bits

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_every_bit_crosses(dtype, shape):
    """All bit patterns of narrow types are drawn, NaNs with payloads among them."""
    size = int(np.prod(shape)) * dtype.numpy.itemsize
    high = 2 if dtype is DType.BOOL else 256
    data = np.random.default_rng(1).integers(0, high, size, dtype=np.uint8)
    array = np.frombuffer(data.tobytes(), dtype.numpy).reshape(shape)
    tensor = to_tensor(array, CPU)
    assert (tensor.dtype, tuple(tensor.shape)) == (torch_dtype(dtype), shape)
    assert_same_bits([to_array(tensor)], [array])
    assert numpy_dtype(tensor.dtype) == array.dtype


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.is_float and d.bits <= 16])
def test_values_mean_the_same(dtype):
    codes = np.arange(1 << dtype.bits, dtype=np.uint16 if dtype.bits == 16 else np.uint8)
    array = codes.view(dtype.numpy)
    with np.errstate(invalid="ignore"):
        expected = array.astype(np.float32)
    found = to_array(to_tensor(array, CPU).to(torch.float32))
    np.testing.assert_array_equal(found, expected)


def test_arrays_of_any_layout_are_copied():
    array = np.arange(12.0).reshape(3, 4)
    for view in (array.T, array[::-1, ::2], np.broadcast_to(array[0], (2, 4))):
        view.setflags(write=False)
        tensor = to_tensor(view, CPU)
        tensor += 1
        assert tensor.tolist() == (view + 1).tolist()
    assert to_array(torch.arange(4.0)[::2][:1]).tolist() == [0]
    back = to_array(tensor)
    back += 1
    assert tensor.tolist() == (back - 1).tolist()


def test_types_without_a_counterpart():
    with pytest.raises(UnsupportedError, match="PyTorch has no element type i4") as caught:
        torch_dtype(DType.I4)
    assert caught.value.id == "torch/dtype"
    with pytest.raises(UnsupportedError, match=r"no element type for torch\.complex64"):
        numpy_dtype(torch.complex64)
