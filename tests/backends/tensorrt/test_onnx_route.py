"""The head by another route: our portable ONNX, FP4 by onnx-graphsurgeon, NVIDIA's parser.

The head has no cache, so the parser drops nothing. What it makes of the graph is a second opinion
on the network that the native route builds: the same weights, exact, in as many bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import edgecc
from edgecc.backends.tensorrt.builder import Session
from edgecc.backends.tensorrt.library import uncollected
from edgecc.devices import get_device
from edgecc.driver import lift
from edgecc.ir import Interpreter, Module
from edgecc.passes.base import PassContext
from edgecc.passes.default import default_pipeline
from edgecc.passes.manager import PassManager
from helpers.goldens import DRAFT, TARGET

gs = pytest.importorskip("onnx_graphsurgeon", reason="pip install onnx-graphsurgeon")

DEVICE = get_device("sm120")
ROWS = 5


@pytest.fixture(scope="module")
def head() -> Module:
    """The pair as it is lowered for a GPU with FP4; its graph `lm_head` is what is built."""
    module = lift(TARGET, DRAFT)
    PassManager(default_pipeline(DEVICE, activations="16bit")).run(module, PassContext(DEVICE))
    return module


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    """The head of the `onnx` bundle, its widening function replaced by FP4 and two dequantizers."""
    bundle = tmp_path_factory.mktemp("onnx") / "bundle"
    edgecc.compile(TARGET, DRAFT, out=bundle, device="onnx", verify="none")
    return with_fp4(bundle / "onnx-lm_head.onnx")


def with_fp4(path: Path) -> onnx.ModelProto:
    """Replace `DequantizeNVFP4` by what TensorRT takes in: 4-bit codes, 8-bit scales, bf16 product.

    The scale of the scales is one, so nothing is rounded; the global scale multiplies the logits.
    """
    model = onnx.load(path)
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    graph = gs.import_onnx(model)
    (widen,) = [n for n in graph.nodes if n.op == "DequantizeNVFP4"]
    codes, scales, factor = (arrays[i.name] for i in widen.inputs)
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    (matrix,) = widen.outputs
    (product,) = [n for n in graph.nodes if n.op == "MatMul"]
    (hidden,), (logits,) = graph.inputs, graph.outputs
    bf16 = TensorProto.BFLOAT16
    narrow, scores, wide = (
        gs.Variable(n, dtype=d)
        for n, d in (("narrow", bf16), ("scores", bf16), ("wide", np.float32))
    )
    block, names = gs.Variable("block_scales", dtype=bf16), ("codes", "scales", "one")
    taken = [gs.Variable(n) for n in names]
    attrs = {"axis": -1, "block_size": 16}
    matrix.dtype = bf16
    product.inputs[0], product.outputs = narrow, [scores]
    widen.outputs = []
    graph.nodes.remove(widen)
    graph.nodes += [
        gs.Node("Cast", inputs=[hidden], outputs=[narrow], attrs={"to": bf16}),
        gs.Node("DequantizeLinear", inputs=[taken[1], taken[2]], outputs=[block]),
        gs.Node("DequantizeLinear", inputs=[taken[0], block], outputs=[matrix], attrs=attrs),
        gs.Node("Cast", inputs=[scores], outputs=[wide], attrs={"to": TensorProto.FLOAT}),
        gs.Node(
            "Mul",
            inputs=[wide, gs.Constant("factor", np.asarray(factor, np.float32).reshape(1))],
            outputs=[logits],
        ),
    ]
    made = gs.export_onnx(graph.cleanup().toposort())
    one = np.ones((), dtype=ml_dtypes.bfloat16)
    made.graph.initializer.extend(
        helper.make_tensor(name, kind, shape, array.tobytes(), raw=True)
        for name, kind, shape, array in (
            ("codes", TensorProto.FLOAT4E2M1, (rows, columns), codes),
            ("scales", TensorProto.FLOAT8E4M3FN, scales.shape, scales),
            ("one", bf16, (), one),
        )
    )
    del made.functions[:]
    return made


def test_the_reference_evaluator_computes_what_is_built(head, quantized):
    """FP4 as onnx defines it, against the graph that the native route gets."""
    hidden = np.random.default_rng(0).standard_normal((1, ROWS, 256)).astype(ml_dtypes.bfloat16)
    (found,) = ReferenceEvaluator(quantized).run(None, {"hidden": hidden.astype(np.float32)})
    (expected,) = Interpreter(head).run("lm_head", {"hidden": hidden}).values()
    difference = np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max()
    assert difference < 2**-8  # one bf16 rounding, of the product before the global scale


def test_the_parser_keeps_four_bits(trt, head, quantized, tmp_path):
    """As many bytes as the native route's plan of the same head, within the size of a kernel."""
    with uncollected():
        session = Session(trt, DEVICE)
        network = session.network("lm_head")
        parser = trt.OnnxParser(network, session.builder.logger)
        assert parser.parse(quantized.SerializeToString()), [
            parser.get_error(i).desc() for i in range(parser.num_errors)
        ]
        config: Any = session.builder.create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM120, 0)
        profile = session.builder.create_optimization_profile()
        profile.set_shape("hidden", (1, 1, 256), (1, ROWS, 256), (1, 64, 256))
        config.add_optimization_profile(profile)
        plan = session.builder.build_serialized_network(network, config)
    assert plan is not None, session.errors
    weight = head.weights[head.weights.resolve("target.lm_head.weight")]
    packed = weight.nbytes
    assert packed < len(bytes(plan)) < packed + 1_000_000
