"""Stored quantization formats, as encodings of the IR.

`reader` decides per module from stored tensors and compares with the metadata, `modelopt` knows
ModelOpt's files, `layouts` recognizes what is not supported, `patterns` matches module names in
every dialect, `scales` scans block scales for damage.
"""

from edgecc.frontends.quantization.reader import EncodedWeight, Quantization, read_quantization
from edgecc.frontends.quantization.scales import check_scales

__all__ = ["EncodedWeight", "Quantization", "check_scales", "read_quantization"]
