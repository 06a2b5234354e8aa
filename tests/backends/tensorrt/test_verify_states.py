"""`edgecc verify` of a target with states on a simulated GPU: what goes wrong is noticed."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest

import edgecc
from edgecc.backends.runtime.golden import lowered_golden_file
from edgecc.backends.runtime.verify import verify_bundle
from edgecc.backends.tensorrt.executable import TrtExecutable
from edgecc.golden import GOLDEN_FILE
from edgecc.lowered_check import check_lowered
from helpers.byte_tokenizer import write_tokenizer
from helpers.checkpoints import write_draft
from helpers.hybrid import FULL, LINEAR, HybridSizes, write_hybrid_target
from helpers.remembering import RememberingInterpreter
from helpers.simulated_bundle import DEVICE, SimulatedBundle, lowered, write_bundle

LATER = {"target logits after the prompt", "target logits after a replay"}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The CPU bundle of a hybrid pair, its module lowered for a GPU, and what that computes."""
    folder = tmp_path_factory.mktemp("hybrid")
    sizes = HybridSizes(layer_types=(LINEAR, FULL))
    target = write_hybrid_target(folder / "t", sizes, mixed=True)
    write_tokenizer(target)
    draft = write_draft(
        folder / "d",
        hidden=32,
        layers=1,
        target_layers=2,
        target_layer_ids=(0, 1),
        block_size=4,
    )
    cpu = folder / "cpu"
    edgecc.compile(target, draft, out=cpu, max_model_len=64, prefill_chunk=16)
    module = lowered(target, draft)
    _, rows = check_lowered(module, (cpu / GOLDEN_FILE).read_bytes())
    return cpu, module, rows


@pytest.fixture
def verify(tmp_path, trt, cuda_runtime, parts):
    """Verifies a bundle whose graphs an interpreter evaluates."""
    cpu, module, rows = parts

    def run(interpreter=None, prompts=0):
        bundle = SimulatedBundle(tmp_path, trt, cuda_runtime, module, interpreter=interpreter)
        files = {lowered_golden_file(DEVICE): rows}
        path = write_bundle(tmp_path, cpu, module, bundle.artifact, files)
        where = "edgecc.backends.tensorrt.engine"
        with (
            patch(f"{where}.load_library", lambda name: bundle.simulation),
            patch(f"{where}.load_runtime", lambda: bundle.cuda),
        ):
            return verify_bundle(path, prompts=prompts, max_new_tokens=8)

    return run


def failed(result):
    return {c.name.removesuffix(", same arithmetic") for c in result.checks if not c.passed}


def test_engines_that_compute_what_was_lowered(verify):
    result = verify(prompts=2)
    assert result.passed
    same = [c for c in result.checks if c.name.endswith(", same arithmetic")]
    assert [c.error for c in same] == [0.0] * 5
    assert {c.name for c in result.checks} > LATER
    texts = [c for c in result.checks if "speculation with" in c.name]
    assert len(texts) == 4


class Deaf(RememberingInterpreter):
    """Engines that are passed another count than the runtime passes."""

    def __init__(self, module, role, count):
        super().__init__(module)
        self.role, self.count = role, count

    def run(self, graph, inputs):
        other = {n: np.array([self.count]) for n in inputs if n == self.role}
        return super().run(graph, {**inputs, **other})


def test_rows_that_are_not_replayed(verify, parts):
    assert failed(verify(Deaf(parts[1], "replay_length", 0))) == {"target logits after a replay"}


def test_rows_that_are_not_committed(verify, parts):
    """A prompt whose last row alone is kept in the states."""
    found = failed(verify(Deaf(parts[1], "commit_length", 1)))
    assert found >= {"target logits after a replay"}


@pytest.mark.parametrize("method", ["take_turn", "clear_states"])
def test_states_of_another_call(verify, method):
    """The call before is forgotten, or the sequence before is not."""
    with patch.object(TrtExecutable, method, lambda self, slot=0: None):
        found = failed(verify())
    assert found & LATER
    assert ("target logits" in found) is (method == "clear_states")
