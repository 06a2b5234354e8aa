"""Backends: what turns a legalized IR module into something that runs, and the runtime.

`base` holds the contracts, `bundle` the directory format, `onnx` the lowering to ONNX,
`onnxruntime` the CPU engine, `torch` a second oracle in eager PyTorch, `runtime` the
engine-agnostic speculative decoding, `cache` what took long to build.
"""
