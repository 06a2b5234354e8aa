"""Stored quantization formats, as encodings of the IR.

`metadata` finds out what is declared: `modelopt`, `compressed_tensors` and `methods` know the
dialects, `declaration` is what they give. `reader` decides per module from stored tensors and
compares; `fp4`, `fp8` and `words` check the tensors of one weight (`stored`: what all need),
`names` says how tensors are called, `layouts` recognizes what is not supported, `patterns` matches
module names in every dialect, `scales` scans scales and codes for damage.
"""

from edgecc.frontends.quantization.reader import Quantization, read_quantization
from edgecc.frontends.quantization.scales import check_group_scales, check_scales
from edgecc.frontends.quantization.stored import EncodedWeight

__all__ = [
    "EncodedWeight",
    "Quantization",
    "check_group_scales",
    "check_scales",
    "read_quantization",
]
