"""The shipped pair: against the interpreter, against what transformers computed, and decoding."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from edgecc.backends.runtime import ModelInfo, Session, SpeculativeDecoder
from edgecc.backends.torch import TorchExecutable, TorchExecutor
from edgecc.devices import ONNX_DEVICES, get_device
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.ir import Interpreter, Module
from edgecc.ir.types import DimExpr
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.passes.default import default_pipeline
from edgecc.passes.manager import PassManager
from edgecc.roles import Role
from helpers.goldens import DRAFT, PROMPTS, TARGET, read_goldens, relative
from helpers.oracle import assert_close, on_devices

TOLERANCE = 1e-4
KEEP = 1 << 30


@pytest.fixture(scope="module")
def goldens():
    return read_goldens()


def lifted() -> Module:
    return lift(TARGET, DRAFT, LiftOptions(max_model_len=384, prefill_chunk=64))


@pytest.fixture(scope="module")
def module() -> Module:
    made = lifted()
    BindSharedWeights().run(made, PassContext())
    return made


class Pair:
    """Both graphs of the pair on a device."""

    def __init__(self, module: Module, device: str) -> None:
        executor = TorchExecutor(module, torch.float32, device, keep_bytes=KEEP)
        self.target, self.draft = (TorchExecutable(executor, n) for n in ("target", "draft"))
        self.model = ModelInfo.from_manifest(module.metadata)

    def prompt(self, ids, rows):
        """Logits of some rows and the tapped states of a whole prompt, in one call."""
        inputs = {
            Role.TOKEN_IDS: ids[None].astype(np.int64),
            Role.CACHE_LENGTH: np.zeros(1, dtype=np.int64),
            Role.LOGIT_ROWS: np.asarray(rows, dtype=np.int64),
        }
        return self.target.run(inputs, [Role.LOGITS, Role.HIDDEN_TAP])


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def pair(request, module) -> Pair:
    return Pair(module, request.param)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_target(pair, goldens, prompt):
    golden = goldens[prompt]
    out = pair.prompt(golden["ids"], np.arange(len(golden["ids"])))
    logits = out[Role.LOGITS][0]
    assert relative(logits[-1:], golden["target_logits_last"]) <= TOLERANCE
    assert logits.argmax(axis=-1).tolist() == golden["target_top1"].tolist()
    if "draft_input_states" in golden:
        assert relative(out[Role.HIDDEN_TAP][0], golden["draft_input_states"]) <= TOLERANCE


@pytest.mark.parametrize("prompt", ["p0", "p1"])
def test_draft(pair, goldens, prompt):
    golden = goldens[prompt]
    taps = pair.prompt(golden["ids"], [0])[Role.HIDDEN_TAP]
    inputs = {
        Role.FEATURES: taps,
        Role.ANCHOR: golden["greedy"][:1].astype(np.int64),
        Role.CACHE_LENGTH: np.zeros(1, dtype=np.int64),
    }
    roles = {
        Role.BASE_LOGITS: "block_logits_before_markov",
        Role.DRAFT_LOGITS: "block_logits_after_markov",
        Role.CONFIDENCE: "block_confidence_logits",
    }
    out = pair.draft.run(inputs, [*roles, Role.PROPOSALS])
    for role, key in roles.items():
        assert relative(out[role][0], golden[key]) <= TOLERANCE
    assert out[Role.PROPOSALS][0].tolist() == golden["block_tokens"].tolist()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_every_round_of_decoding(pair, goldens, prompt):
    """The runtime's own decoder on the second oracle proposes, accepts and writes the goldens."""
    golden, model = goldens[prompt], pair.model
    session = Session(pair.target, pair.draft, prefill_chunk=model.prefill_chunk)
    decoder = SpeculativeDecoder(session, model, model.draft, 7)
    rounds = list(decoder.rounds(golden["ids"].astype(np.int64), 64, model.eos_token_ids))
    assert [t for r in rounds for t in r.tokens] == golden["greedy"].tolist()
    assert [list(r.proposed) for r in rounds[1:]] == golden["proposals"].tolist()
    assert [r.accepted for r in rounds[1:]] == golden["accepted"].tolist()


def call(module: Module, graph: str, seed: int = 0, start: int = 2):
    """Three target rows, or a round on three new features, over caches full of numbers."""
    rng = np.random.default_rng(seed)
    sizes = {"b": 1, "t": 3, "r": 3, "c": 3}
    special = {
        Role.TOKEN_IDS: lambda shape: rng.integers(0, 4095, shape),
        Role.ANCHOR: lambda shape: rng.integers(0, 4095, shape),
        Role.CACHE_LENGTH: lambda shape: np.full(shape, start),
        Role.LOGIT_ROWS: lambda shape: np.arange(*shape),
    }
    inputs = {}
    for item in module.graphs[graph].inputs:
        dims = item.value.type.shape
        shape = tuple(d.substitute(sizes) if isinstance(d, DimExpr) else d for d in dims)
        inputs[item.name] = special.get(item.role, rng.standard_normal)(shape)
    return inputs


@on_devices
@pytest.mark.parametrize("graph", ["target", "draft"])
def test_both_oracles_agree(module, graph, device):
    inputs = call(module, graph)
    expected = Interpreter(module, np.float64).run(graph, inputs)
    found = TorchExecutor(module, torch.float64, device).run(graph, inputs)
    assert_close(found, expected, 1e-10)


@pytest.fixture(scope="module")
def before(module):
    """What the second oracle computes from the lifted graphs."""
    executor = TorchExecutor(module, torch.float64)
    return {name: executor.run(name, call(module, name)) for name in ("target", "draft")}


@on_devices
@pytest.mark.parametrize("form", ["dense", "int8-split"])
@pytest.mark.parametrize("name", ONNX_DEVICES)
def test_what_the_pipeline_makes_of_it(module, before, name, form, device):
    """Fused, lowered, outlined: the second oracle's word that all passes together are exact."""
    compiled, made = lifted(), get_device(name)
    PassManager(default_pipeline(made, linear_form=form)).run(compiled, PassContext(made))
    for graph, expected in before.items():
        after = TorchExecutor(compiled, torch.float64, device).run(graph, call(module, graph))
        assert_close(after, {output: expected[output] for output in after}, 1e-12)


def test_the_example_of_the_manual():
    text = (Path(__file__).parents[3] / "docs" / "ir.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n([^`]*TorchExecutor.*?)```", text, re.DOTALL)
    code = code.replace('"./target", "./draft"', repr((str(TARGET), str(DRAFT)))[1:-1])
    seen: dict[str, object] = {}
    exec(code, {"print": seen.update})
    assert {"logits", "hidden_tap", "k_cache.0"} <= seen.keys()
    assert max(float(str(v)) for v in seen.values()) < 1e-9
