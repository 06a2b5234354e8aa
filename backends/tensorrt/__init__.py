"""TensorRT engines: IR to plans through the native network API, strongly typed.

`tensorrt_rtx` builds for GPUs that are not there; `tensorrt` builds for the GPU of the machine. The
same code drives both: `library.py` imports the one that the device record names. File names mirror
`edgecc.ir.ops`: `attention.py` here lowers the ops of `ir/ops/attention.py`.
"""

from edgecc.backends.tensorrt.engine import open_engine

__all__ = ["open_engine"]
