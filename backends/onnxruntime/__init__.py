"""ONNX Runtime on CPU: opens the models of a bundle, expands packed weights, owns the caches."""

from edgecc.backends.onnxruntime.engine import OrtEngine, open_engine

__all__ = ["OrtEngine", "open_engine"]
