"""IR to ONNX: one lowering per op family, weights in one external safetensors file.

File names mirror `edgecc.ir.ops`: `attention.py` here lowers the ops of `ir/ops/attention.py`.
"""

from edgecc.backends.onnx.lower import lower, stored_tensors

__all__ = ["lower", "stored_tensors"]
