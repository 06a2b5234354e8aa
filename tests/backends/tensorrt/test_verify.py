"""`edgecc verify` and `edgecc run` on bundles with engines: what differs, and where."""

from __future__ import annotations

import json
from unittest.mock import patch

import numpy as np
import pytest

import edgecc
from edgecc.backends.runtime.golden import lowered_golden_file
from edgecc.backends.runtime.verify import verify_bundle
from edgecc.cli import main
from edgecc.golden import GOLDEN_FILE
from edgecc.lowered_check import check_lowered
from helpers.lowered_pairs import write_pair
from helpers.simulated_bundle import DEVICE, SimulatedBundle, lowered, write_bundle


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The CPU bundle of a pair, its module lowered for a GPU, and what that computes."""
    folder = tmp_path_factory.mktemp("pair")
    pair = write_pair(folder, layers=2)
    cpu = folder / "cpu"
    edgecc.compile(*pair, out=cpu, max_model_len=64, prefill_chunk=16)
    module = lowered(*pair)
    _, rows = check_lowered(module, (cpu / GOLDEN_FILE).read_bytes())
    return cpu, module, rows


@pytest.fixture
def made(tmp_path, trt, parts):
    """Makes a bundle whose engines compute something else; and a function that verifies it."""
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="pip install cuda-bindings")
    cpu, module, rows = parts

    def make(change=None, activations=()):
        bundle = SimulatedBundle(tmp_path, trt, runtime, module, change=change)
        bundle.artifact["activations"] = list(activations)
        files = {lowered_golden_file(DEVICE): rows}
        path = write_bundle(tmp_path, cpu, module, bundle.artifact, files)
        where = "edgecc.backends.tensorrt.engine"

        def verify(prompts=1):
            with (
                patch(f"{where}.load_library", lambda name: bundle.simulation),
                patch(f"{where}.load_runtime", lambda: bundle.cuda),
            ):
                return verify_bundle(path, prompts=prompts, max_new_tokens=8)

        return path, verify

    return make


def failed(result):
    return {c.name: c for c in result.checks if not c.passed}


def test_engines_that_compute_what_was_lowered(made):
    _, verify = made()
    result = verify(prompts=2)
    assert result.passed
    same = [c for c in result.checks if c.name.endswith(", same arithmetic")]
    assert [c.error for c in same] == [0.0] * 4
    names = [c.name for c in result.checks]
    assert names[:5] == [
        "target logits",
        "target choices",
        "target hidden states",
        "draft proposals",
        "target logits after the prompt",
    ]
    assert {c.tolerance for c in result.checks} == {0.05, 0.02, 0.5, 0.0}
    assert sum("speculation with" in n for n in names) == 4


def test_a_difference_that_rounding_does_not_explain(made):
    """Within what 16 bits may do, but not what these graphs do: told by row, index and value."""

    def change(graph, results):
        if graph == "lm_head":
            logits = results["logits"]
            results["logits"] = logits.copy()
            results["logits"][..., 17] += 0.03 * np.abs(logits).max()

    _, verify = made(change)
    found = failed(verify(prompts=0))
    logits = ("target logits", "target logits after the prompt")
    assert list(found) == [f"{name}, same arithmetic" for name in logits]
    check = found["target logits, same arithmetic"]
    assert check.error == pytest.approx(0.03, rel=0.01)
    assert check.detail.startswith("row 0, index 17: ")
    assert "1 of 288 values are off, the largest expected value is" in check.detail
    assert check.detail in str(check)


def test_quantized_activations_are_compared_by_averages(made):
    """One row of logits may be far off, all of them may not."""
    seen = []

    def change(graph, results):
        if graph == "lm_head":
            results["logits"] = results["logits"].copy()
            results["logits"][..., 17] += 0.2 * np.abs(results["logits"]).max()
            results["logits"] *= 1.0 if seen else -1.0

    _, verify = made(change, activations=["nvfp4<block=16>"])
    result = verify(prompts=0)
    later = ("target logits after the prompt", "target logits after the prompt, same arithmetic")
    assert set(failed(result)) == {"target logits", "target logits, same arithmetic", *later}
    seen.append(True)
    assert verify(prompts=0).passed


def test_values_that_are_no_numbers(made):
    def change(graph, results):
        if graph == "target.body":
            results["taps"] = results["taps"].copy()
            results["taps"][0, 2, 5] = np.nan

    _, verify = made(change)
    check = failed(verify(prompts=0))["target hidden states"]
    assert check.error == np.inf
    assert check.detail.startswith("row 2, index 5: nan, expected ")


def test_choices_that_are_not_the_best(made):
    def change(graph, results):
        if graph == "target.tail":
            results["chosen"] = (results["chosen"] + 1) % 200

    _, verify = made(change)
    (check,) = failed(verify(prompts=0)).values()
    assert check.name == "target choices"
    assert check.detail.startswith("row 0: chose token ")


def test_text_that_depends_on_speculation(made):
    calls = []

    def change(graph, results):
        if graph == "target.tail":
            calls.append(graph)
            if len(calls) % 5 == 0:
                results["chosen"] = (results["chosen"] + 1) % 200

    _, verify = made(change)
    found = failed(verify())
    assert found
    assert all("speculation with" in name for name in found)
    assert all(", expected " in check.detail for check in found.values())


def test_proposals_of_another_draft(made):
    def change(graph, results):
        if graph == "draft.tail":
            results["proposals"] = (results["proposals"] + 1) % 200

    _, verify = made(change)
    found = failed(verify(prompts=0))
    assert list(found) == ["draft proposals", "draft proposals, same arithmetic"]
    assert all(c.detail.startswith("token 0 is ") for c in found.values())


@pytest.mark.parametrize("command", [["run", "--prompt", "a"], ["verify"]])
def test_without_a_gpu(made, capfd, command):
    """For real: the package is there, a driver is not."""
    from cuda.bindings import runtime

    if not int(runtime.cudaGetDeviceCount()[0]):
        pytest.skip("this machine has a GPU")
    path, _ = made()
    assert main([command[0], str(path), *command[1:]]) == 4
    err = capfd.readouterr().err
    assert "no GPU can be used here: " in err
    assert "cuda/no-gpu" in err


def test_what_is_missing_is_said_before_anything_else(made, capfd, monkeypatch):
    """No tokenizer is read and no plan opened."""
    path, _ = made()
    for name in json.loads((path / "bundle.json").read_text())["files"]:
        data = (path / name).read_bytes()
        (path / name).write_bytes(bytes(len(data)))  # only the sizes are right
    monkeypatch.setitem(__import__("sys").modules, "tensorrt_rtx", None)
    assert main(["run", str(path), "--prompt", "a"]) == 4
    assert "TensorRT-RTX, which is not installed" in capfd.readouterr().err
