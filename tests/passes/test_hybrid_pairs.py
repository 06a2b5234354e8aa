"""The default passes on pairs whose target has recurrent layers: values stay, remarks say why."""

from __future__ import annotations

import numpy as np
import pytest

from edgecc.devices import ONNX_DEVICES, get_device
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.ir import Interpreter, parse_module, print_module
from edgecc.ir.types import substitute
from edgecc.ir.verifier import check_property, verify
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.passes.default import default_pipeline
from edgecc.passes.manager import PassManager
from edgecc.roles import Role
from helpers.checkpoints import write_draft
from helpers.hybrid import FULL, LINEAR, HybridSizes, write_hybrid_target

SIZES = HybridSizes(layer_types=(LINEAR, FULL), head_dim=16)


@pytest.fixture(scope="module", params=["bf16", "mixed"])
def checkpoints(request, tmp_path_factory):
    """A pair whose draft taps one layer of each kind."""
    folder = tmp_path_factory.mktemp(request.param)
    target = write_hybrid_target(folder / "t", SIZES, mixed=request.param == "mixed")
    draft = write_draft(
        folder / "d", hidden=32, layers=1, target_layers=2, target_layer_ids=(0, 1), block_size=3
    )
    return target, draft


def lifted(checkpoints):
    return lift(*checkpoints, LiftOptions(max_model_len=20))


def inputs(graph):
    """Three new rows behind four valid ones, all final; states full of numbers."""
    rng, sizes = np.random.default_rng(4), {"b": 1, "t": 3, "r": 2, "c": 2}
    made = {}
    for item in graph.inputs:
        shape = substitute(item.value.type.shape, sizes)
        made[item.name] = rng.standard_normal(shape)
        if item.role is Role.CACHE_LENGTH:
            made[item.name] = np.full(shape, 4)
        elif item.role is Role.REPLAY_LENGTH:
            made[item.name] = np.zeros(shape, np.int64)
        elif item.role is Role.COMMIT_LENGTH:
            made[item.name] = np.full(shape, sizes["t"])
        elif not item.value.type.dtype.is_float:
            made[item.name] = rng.integers(0, 3, shape)
    return made


def evaluate(module):
    return {
        name: Interpreter(module, np.float64).run(name, inputs(module.graphs[name]))
        for name in ("target", "draft")
    }


@pytest.mark.parametrize("device", ONNX_DEVICES)
def test_values_stay(checkpoints, device):
    module = lifted(checkpoints)
    BindSharedWeights().run(module, PassContext())
    expected = evaluate(module)
    module, ctx = lifted(checkpoints), PassContext(get_device(device))
    PassManager(default_pipeline(get_device(device))).run(module, ctx)
    assert not verify(module)
    assert not check_property(module, "states-replayed")
    found = evaluate(module)
    for graph, outputs in found.items():
        assert {"logits", "proposals"} & outputs.keys()
        for name, value in outputs.items():
            if name not in expected[graph]:
                assert name == "state_log.0"
                continue
            wanted = expected[graph][name]
            assert value.shape == wanted.shape
            scale = max(1.0, float(np.abs(wanted).max()))
            np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-12 * scale, err_msg=name)


def test_states_stay_inputs_and_outputs(checkpoints):
    """Binding by role is all the runtime has: no pass may drop a state or rename it."""
    module = lifted(checkpoints)
    wanted = [(i.name, str(i.value.type)) for i in module.graphs["target"].by_role(Role.STATE)]
    assert len(wanted) == 2
    PassManager(default_pipeline(get_device("cpu"))).run(module, PassContext(get_device("cpu")))
    graph = module.graphs["target"]
    assert [(i.name, str(i.value.type)) for i in graph.by_role(Role.STATE)] == wanted
    outputs = graph.outputs_by_role(Role.STATE)
    assert [(o.alias, str(o.value.type)) for o in outputs] == wanted


def test_what_is_fused_and_why_not(checkpoints):
    """BF16 projections are stacked, query with gate; FP8 ones have a scale each."""
    module, ctx = lifted(checkpoints), PassContext(get_device("cpu"))
    PassManager(default_pipeline(get_device("cpu"))).run(module, ctx)
    said = {
        (r.pass_name, r.applied): r.message
        for r in ctx.remarks
        if "target" in r.where or "@body" in r.where
    }
    stacked = "target.model.layers.1.self_attn.q_proj+k_proj+v_proj.weight"
    if "mixed" in str(checkpoints[0]):
        assert ("fuse-qkv", True) not in said
        assert "weight_scale differs between the layers" in said["fuse-qkv", False]
    else:
        assert stacked in said["fuse-qkv", True]
    assert ("fuse-cached-attention", True) in said
    assert said["add-state-replay", True] == "a log f32[b, 4, 88]"


def test_text_of_every_stage(checkpoints):
    module = lifted(checkpoints)
    for step in default_pipeline(get_device("cpu")):
        PassManager([step]).run(module, PassContext(get_device("cpu")))
        text = print_module(module, locations=True)
        assert print_module(parse_module(text), locations=True) == text
