"""`check_pass` and `assert_equivalent` on modules written by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import edgecc.testing
from edgecc.devices import get_device
from edgecc.ir import Module, parse_module
from edgecc.passes.base import NoOptions, Pass, PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.passes.dce import Dce
from edgecc.passes.lower_encodings import LowerEncodings, LowerEncodingsOptions
from edgecc.testing import assert_equivalent, check_pass, module_text, storage
from edgecc.testing.numbers import chosen_outputs, compare_arrays
from edgecc.testing.sharing import Sharing

ROOT = Path(__file__).parents[2]

ADD = """\
edgecc.module v1 "m"
symbol t: 0..4
graph @g(
  %x: f32[t, 2] activation
) {
  %a = add(%x, %x) : f32[t, 2]
  %dead = mul(%a, %x) : f32[t, 2]
  %id = argmax(%a) {limit = 2} : i64[t]
  return
    y = %a activation,
    id = %id activation
}
"""


class Rewrite(Pass[NoOptions]):
    """Puts another text in place of the module."""

    name = "rewrite"

    def __init__(self, old: str, new: str) -> None:
        super().__init__()
        self.old, self.new = old, new

    def run(self, module: Module, ctx: PassContext) -> bool:
        text = module_text(module)
        made = parse_module(text.replace(self.old, self.new))
        module.graphs, module.weights = made.graphs, made.weights
        return module_text(module) != text


def test_the_answer_is_whether_something_changed():
    module = parse_module(ADD)
    assert check_pass(Dce(), module) is True
    assert [n.op.name for n in module.graphs["g"].nodes] == ["add", "argmax"]
    assert check_pass(Dce(), module) is False


def test_inputs_of_the_caller():
    """With these, doubling and squaring are the same."""
    twos = {"g": {"x": np.full((3, 2), 2, np.float32)}}
    swap = Rewrite("%a = add(", "%a = mul(")
    assert check_pass(swap, parse_module(ADD), twos)
    with pytest.raises(AssertionError, match=r"output g.y differs for inputs %x \[\d, 2\]: "):
        check_pass(swap, parse_module(ADD))


CHAIN = """\
edgecc.module v1 "m"
weight @w : dense<bf16> [2, 1] = inline {weight: 0x803f0040}
graph @g(
  %x: f32[1, 1, 2] activation,
  %id: i64[1] activation
) {
  %ids, %logits, %e = markov_chain(%x, %id, @w, @w) {steps = 1, limit = 2} : i64[1, 1], f32[1, 1, 2], f32[1, 1, 1]
  return
    y = %ids activation
}
"""  # noqa: E501


class Promises(LowerEncodings):
    ensures = ("markov-unrolled",)


def test_a_failure_tells_how_to_repeat_it():
    lowering = Promises(LowerEncodingsOptions(form="dense"))
    with pytest.raises(AssertionError, match="lower-encodings ensures markov-unrolled") as caught:
        check_pass(lowering, parse_module(CHAIN), ctx=PassContext(get_device("cpu")))
    (note,) = caught.value.__notes__
    command, *lines = note.splitlines()[1:]
    assert command == "edgecc opt -p 'lower-encodings{form=dense}' --device cpu - <<'EOF'"
    assert lines.pop() == "EOF"
    answer = subprocess.run(
        [sys.executable, "-m", "edgecc", "opt", "-p", "lower-encodings{form=dense}", "-"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "compiler")},
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "markov_chain(%x, %id, @w.f32, @w.f32)" in answer.stdout


def test_a_module_that_does_not_verify_is_not_blamed_on_the_pass():
    module = parse_module(ADD)
    module.graphs["g"].outputs[0].alias = "nothing"
    with pytest.raises(AssertionError, match="does not verify before the pass"):
        check_pass(Dce(), module)


def test_what_a_pass_requires_must_hold():
    text = ADD.replace("graph", 'weight @w : dense<f32> [2, 2] = unbound "lm_head"\ngraph', 1)
    lowering = LowerEncodings()
    with pytest.raises(AssertionError, match="lower-encodings requires heads-bound"):
        check_pass(lowering, parse_module(text))


def test_graphs_that_read_unbound_weights_are_not_evaluated():
    text = ADD.replace("graph", 'weight @w : dense<f32> [2, 2] = unbound "lm_head"\ngraph', 1)
    text = text.replace("mul(%a, %x)", "linear(%a, @w)")
    module = parse_module(text)
    with pytest.raises(Exception, match="there is no target"):
        check_pass(BindSharedWeights(), parse_module(text))
    assert check_pass(Dce(), module)


def test_tolerance_of_the_caller():
    """A weight becomes 1.03 instead of 1."""
    rounding = Rewrite("0x0000803f", "0x0ad7833f")
    assert check_pass(rounding, parse_module(WEIGHTS), tolerance=0.1)
    for tolerance in (None, 0.01):
        with pytest.raises(AssertionError, match=r"output g\.y differs"):
            check_pass(rounding, parse_module(WEIGHTS), tolerance=tolerance)


def test_equivalent_modules():
    assert_equivalent(parse_module(ADD), parse_module(ADD.replace("%a", "%twice")))
    other = parse_module(ADD.replace("limit = 2", "limit = 1"))
    with pytest.raises(AssertionError, match=r"output g.id differs"):
        assert_equivalent(parse_module(ADD), other)
    assert_equivalent(parse_module(ADD), other, tolerance=1e-6)


def test_outputs_that_depend_on_a_choice():
    assert chosen_outputs(parse_module(ADD)) == {"g.id"}


F = np.float32


@pytest.mark.parametrize(
    ("found", "expected", "tolerance", "says"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, ""),
        ([1.0, 2.5], [1.0, 2.0], 0.0, "1 of 2 elements, first at [1]: "),
        ([0.0], [-0.0], 0.0, "1 of 1 elements"),
        ([1.0, 2.5], [1.0, 2.0], 0.3, ""),
        ([1.0, 2.7], [1.0, 2.0], 0.3, "1 of 2 elements, first at [1]"),
        ([0.5, 100.0], [0.0, 100.0], 0.01, ""),
        ([np.inf, 1.0], [np.inf, 1.0], 0.1, ""),
        ([np.inf, 1.0], [5.0, 1.0], 0.1, "1 of 2 elements, first at [0]"),
        ([np.nan, 1.0], [np.nan, 1.05], 0.1, ""),
        ([np.nan, 1.0], [0.0, 1.0], 0.1, "1 of 2 elements, first at [0]"),
        ([np.inf], [-np.inf], 0.1, "1 of 1 elements"),
        ([1.0], [1.0, 2.0], 0.1, "float32[1] instead of float32[2]"),
        ([], [], 0.1, ""),
    ],
)
def test_compare_arrays(found, expected, tolerance, says):
    message = compare_arrays(np.array(found, F), np.array(expected, F), tolerance)
    assert message.startswith(says)
    assert bool(message) == bool(says)


def test_integers_are_compared_exactly():
    assert compare_arrays(np.array([1, 2]), np.array([1, 3]), 0.9)
    assert "int64[] instead of float32[]" in compare_arrays(np.array(1), np.array(1, F))


WEIGHTS = """\
edgecc.module v1 "m"
weight @a : dense<f32> [1, 1] = inline {weight: 0x0000803f}
weight @b : dense<f32> [1, 1] = inline {weight: 0x0000003f}
weight @a.too : dense<f32> [1, 1] = alias @a
weight @ab : dense<f32> [2, 1] = derived concat_rows(@a, @b)
weight @b.wide : dense<f32> [1, 1] = derived dequantize(@b)
graph @g(
  %x: f32[1] activation
) {
  %y = linear(%x, @a) : f32[1]
  %z = linear(%y, @a.too) : f32[1]
  %ab = linear(%z, @ab) : f32[2]
  return
    y = %ab activation
}
"""


def test_storage_is_what_nodes_depend_on():
    assert storage(parse_module(WEIGHTS)) == {"a", "b", "ab"}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("linear(%y, @a.too)", "linear(%y, @a)", None),
        ("linear(%z, @ab)", "linear(%z, @ab.2)", "one weight became 2 with equal content"),
        ("linear(%y, @a.too)", "linear(%y, @copy)", "one weight became 2 with equal content"),
        ("linear(%y, @a.too)", "linear(%y, @a.rows)", "@a is stored 3 times, was 2 times"),
        ("linear(%y, @a.too)", "linear(%y, @b.wide)", "@b is stored 2 times, was 1 times"),
        ("graph", "weight @n : dense<f32> [1, 1] = derived dequantize(@a)\ngraph", "@n, which nob"),
    ],
)
def test_sharing(old, new, problem):
    added = {
        "@ab.2": "weight @ab.2 : dense<f32> [2, 1] = derived concat_rows(@a, @b)\n",
        "@copy": "weight @copy : dense<f32> [1, 1] = inline {weight: 0x0000803f}\n",
        "@a.rows": "weight @a.rows : dense<f32> [1, 1] = derived concat_rows(@a)\n",
    }
    more = next((line for symbol, line in added.items() if symbol in new), "")
    text = WEIGHTS.replace(old, new, 1)
    if "@ab.2" in new:  # both stacks are read
        text = text.replace("y = %ab activation", "y = %ab activation,\n    z = %ab1 activation")
        text = text.replace("  return", "  %ab1 = linear(%z, @ab) : f32[2]\n  return")
    before = Sharing(parse_module(WEIGHTS))
    problems = list(before.problems(parse_module(text.replace("graph", f"{more}graph", 1))))
    if problem is None:
        assert problems == []
    else:
        assert any(problem in p for p in problems), problems


# The package


def test_the_public_names_are_there():
    for name in edgecc.testing.__all__:
        assert callable(getattr(edgecc.testing, name)), name
    assert set(dir(edgecc.testing)) == set(edgecc.testing.__all__)
    with pytest.raises(AttributeError, match="no attribute 'module'"):
        edgecc.testing.module  # noqa: B018


def test_without_hypothesis_one_message_says_what_to_install():
    program = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import edgecc.testing, edgecc.testing.golden\n"
        "from edgecc.testing import check_pass\n"
        "from edgecc.testing import modules\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT / "compiler")},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 1
    last = answer.stderr.splitlines()[-1]
    message = "edgecc.testing.modules needs hypothesis: pip install 'edgecc[test]'"
    assert last == f"ModuleNotFoundError: {message}"
