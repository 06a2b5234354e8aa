"""Weight encodings: how a logical matrix is stored, and how to get its exact values back.

An `Encoding` is a type, equal by value. It knows the component tensors of a weight (a packed NVFP4
matrix is three tensors), their dtypes and shapes, and the exact dequantization in the association
the producing library uses. Formats and formulas: NVIDIA ModelOpt's unified Hugging Face export
(0.47), compressed-tensors (0.20), AutoAWQ (0.2), GPTQModel (7.7) and the OCP Microscaling
specification for E2M1, E4M3 and E8M0.

Component arrays are NumPy arrays in the component's own dtype; dequantization works on any block of
rows that starts at a multiple of the encoding's row group, so callers can stream a matrix that
would not fit into memory.
"""

from edgecc.ir.encodings.base import Array, Component, Encoding, IntShape
from edgecc.ir.encodings.dense import Dense
from edgecc.ir.encodings.floating import ACTIVATION_SCALES, FP8, MX_BLOCK, MXFP4, NVFP4
from edgecc.ir.encodings.integer import Int4, Int8, Int8Block
from edgecc.ir.encodings.text import parse_encoding

__all__ = [
    "ACTIVATION_SCALES",
    "FP8",
    "MXFP4",
    "MX_BLOCK",
    "NVFP4",
    "Array",
    "Component",
    "Dense",
    "Encoding",
    "Int4",
    "Int8",
    "Int8Block",
    "IntShape",
    "parse_encoding",
]
