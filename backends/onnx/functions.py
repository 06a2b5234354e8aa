"""Composite operators of the standard dialect, as ONNX functions written with onnxscript."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnxscript import FLOAT, FLOAT8E4M3FN, UINT8, script
from onnxscript.onnx_opset import opset24
from onnxscript.values import Opset

from edgecc.nvfp4 import E2M1_VALUES

op: Any = opset24  # its generated signatures do not type-check their own results
_domain = Opset("edgecc", 1)
_BYTES = np.arange(256)
_PAIRS = numpy_helper.from_array(
    np.stack([E2M1_VALUES[_BYTES & 15], E2M1_VALUES[_BYTES >> 4]], axis=1), "e2m1_pairs"
)


@script(_domain, default_opset=op)
def DequantizeNVFP4(codes: UINT8, scales: FLOAT8E4M3FN, global_scale: FLOAT) -> FLOAT:
    """e2m1(code) * (float32(scale) * global): codes u8 [N, K/2], scales f8e4m3 [N, K/16]."""
    pairs = op.Gather(op.Constant(value=_PAIRS), op.Cast(codes, to=6), axis=0)
    blocks = op.Reshape(pairs, op.Constant(value_ints=[0, -1, 16]))
    factors = op.Cast(scales, to=1) * global_scale
    values = blocks * op.Unsqueeze(factors, op.Constant(value_ints=[2]))
    return op.Reshape(values, op.Constant(value_ints=[0, -1]))  # type: ignore[no-any-return]


@script(_domain, default_opset=op)
def DequantizeDividedNVFP4(codes: UINT8, scales: FLOAT8E4M3FN, global_scale: FLOAT) -> FLOAT:
    """e2m1(code) * (float32(scale) / global): codes u8 [N, K/2], scales f8e4m3 [N, K/16]."""
    pairs = op.Gather(op.Constant(value=_PAIRS), op.Cast(codes, to=6), axis=0)
    blocks = op.Reshape(pairs, op.Constant(value_ints=[0, -1, 16]))
    factors = op.Cast(scales, to=1) / global_scale
    values = blocks * op.Unsqueeze(factors, op.Constant(value_ints=[2]))
    return op.Reshape(values, op.Constant(value_ints=[0, -1]))  # type: ignore[no-any-return]


def dequantize_nvfp4() -> onnx.FunctionProto:
    """`edgecc.DequantizeNVFP4`: float32 values of packed codes, bit for bit ModelOpt's."""
    return DequantizeNVFP4.to_function_proto()


def dequantize_divided_nvfp4() -> onnx.FunctionProto:
    """`edgecc.DequantizeDividedNVFP4`: the same for a global scale that divides."""
    return DequantizeDividedNVFP4.to_function_proto()
