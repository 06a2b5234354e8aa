"""Stored quantization formats, as encodings of the IR.

`reader` decides per module from stored tensors and compares with the metadata, `modelopt` knows
ModelOpt's metadata, `nvfp4` and `fp8` check the tensors of one weight (`stored`: what both need),
`layouts` recognizes what is not supported, `patterns` matches module names in every dialect,
`scales` scans scales and codes for damage.
"""

from edgecc.frontends.quantization.reader import EncodedWeight, Quantization, read_quantization
from edgecc.frontends.quantization.scales import check_scales

__all__ = ["EncodedWeight", "Quantization", "check_scales", "read_quantization"]
