"""Running golden cases, and the laws they are held to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgecc.errors import InputError, PassError, UnsupportedError, UsageError, VerifyError
from edgecc.ir.rewriter import Rewriter
from edgecc.ir.types import DType
from edgecc.passes.base import NoOptions, Pass
from edgecc.passes.dce import Dce
from edgecc.testing.golden import Case, Kind, parse_golden
from edgecc.testing.golden_run import (
    GoldenError,
    Ran,
    check_laws,
    made_up_inputs,
    module_body,
    parse_case,
    run_case,
)

BODY = """\
symbol t: 1..8
weight @a : dense<f32> [2, 2] = stored "target" {weight: "m#a"}
weight @b : dense<f32> [2, 2] = stored "draft" {weight: "m#a"}
weight @c : dense<f32> [2, 2] = stored "target" {weight: "m#c"}
graph @main(
  %x: f32[t, 2] activation
) {
  %y = linear(%x, @a) : f32[t, 2]
  %z = linear(%x, @c) : f32[t, 2]
  %s = silu(%y) : f32[t, 2]
  return
    y = %s activation
}
"""


def case(body: str = BODY, pipeline: str = "dce", device: str = "") -> Case:
    text = f"// ---- case: a\n// Text.\n// pipeline: {pipeline}\n// device: {device}\n\n{body}"
    return parse_golden(text, "dce", file="dce.eir").cases[0]


def test_the_module_prints_without_its_first_line_and_hashes():
    module = parse_case(case())
    module.weights.digest("a")
    assert "hash" not in module_body(module)
    assert module_body(module).startswith("symbol t: 1..8\n\nweight @a")


def test_lines_in_errors_are_those_of_the_file():
    with pytest.raises(InputError) as caught:
        parse_case(case(BODY.replace("silu", "sillu")), file="dce.eir")
    line = 5 + BODY.splitlines().index("  %s = silu(%y) : f32[t, 2]") + 1
    assert caught.value.diagnostics[0].where.startswith(f"dce.eir:{line}:")


def test_equal_names_are_equal_bytes_in_every_checkpoint():
    table = parse_case(case()).weights
    again = parse_case(case()).weights
    a, b, c = (table.dense(s) for s in "abc")
    assert a.tobytes() == b.tobytes() != c.tobytes()
    assert again.dense("c").tobytes() == c.tobytes()
    assert table.dense("c", 1, 2).tobytes() == c[1:].tobytes()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "u8", "i8", "i32", "i64", "f8e4m3"])
def test_made_up_tensors_have_the_type_of_their_weight(dtype):
    body = BODY.replace("@c : dense<f32>", f"@c : dense<{dtype}>").replace(", @c)", ", @a)")
    parts = parse_case(case(body)).weights.read("c")
    assert parts["weight"].dtype == DType(dtype).numpy
    assert parts["weight"].shape == (2, 2)
    assert len(np.unique(parts["weight"])) > 1


def test_inputs_fit_roles_and_ranges():
    body = """\
symbol b: 1..1
symbol t: 3..8
symbol r: 1..8
graph @main(
  %ids: i64[b, t] token_ids,
  %rows: i64[r] logit_rows,
  %length: i64[b] cache_length,
  %x: f32[b, t, 4] activation
) {
  return
    y = %x activation
}
"""
    inputs = made_up_inputs(parse_case(case(body)), "main")
    shapes = {"ids": (1, 3), "rows": (2,), "length": (1,), "x": (1, 3, 4)}
    assert {name: array.shape for name, array in inputs.items()} == shapes
    assert inputs["x"].dtype == np.float32
    assert set(inputs["ids"].ravel()) <= {0, 1}
    assert inputs["length"].tolist() == [1]


def test_outcomes():
    assert run_case(case()).outcome.kind is Kind.AFTER
    assert run_case(case(pipeline="dce,dce")).changed == [True, False]
    ran = run_case(case(pipeline="fuse-gate-up"))
    assert (ran.outcome.kind, ran.outcome.notes, ran.outcome.ir) == (Kind.UNCHANGED, (), "")
    ran = run_case(case(pipeline="legalize"))
    assert ran.outcome.kind is Kind.ERROR
    assert ran.outcome.notes[0] == "error[pass/no-device]: legalize needs a device"
    assert run_case(case(pipeline="legalize", device="cpu")).outcome.kind is Kind.UNCHANGED


def test_locations_are_printed_where_a_case_has_some():
    body = BODY.replace(
        "%y = linear(%x, @a) : f32[t, 2]", '%y = linear(%x, @a) : f32[t, 2]  loc("a")'
    )
    assert 'loc("a")' in run_case(case(body)).outcome.ir
    assert "loc(" not in run_case(case()).outcome.ir
    check_laws(run_case(case(body)))


@pytest.mark.parametrize(
    ("made", "error"),
    [
        (case(pipeline="dse"), UsageError),
        (case(device="gpu"), UnsupportedError),
        (case(BODY.replace("%y = linear(%x, @a) : f32[t, 2]", "%y = silu(%x) : f32[t, 4]")), None),
        (case("graph"), InputError),
    ],
)
def test_a_wrong_case_is_no_outcome(made, error):
    with pytest.raises(error or VerifyError):
        run_case(made)


def test_a_crash_is_no_outcome(monkeypatch):
    monkeypatch.setattr(Dce, "run", lambda *_: 1 // 0)
    with pytest.raises(PassError, match="ZeroDivisionError"):
        run_case(case())


class Faulty(Pass[NoOptions]):
    """Reports what it is told to; with an op, puts it in place of the last node, or beside it."""

    name = "faulty"

    def __init__(self, reports, op=None, *, beside=False):
        super().__init__()
        self.reports, self.op, self.beside = list(reports), op, beside

    def run(self, module, ctx):
        graph = module.graphs["main"]
        if self.op:
            last = graph.nodes[-1]
            rewriter = Rewriter(module, graph, self.name)
            new = rewriter.insert(last, self.op, last.operands)
            if not self.beside:
                rewriter.replace(last, (new.result,))
        return self.reports.pop(0)


def ran_by(faulty: Pass, *, changed: bool) -> Ran:
    module = parse_case(case())
    body = module_body(module)
    reported = faulty.run(module, None)
    kind = Kind.AFTER if module_body(module) != body else Kind.UNCHANGED
    assert (kind is Kind.AFTER) is changed
    ran = run_case(case())
    return replace(
        ran,
        outcome=replace(ran.outcome, kind=kind),
        after=module,
        passes=[faulty],
        changed=[reported],
    )


def test_laws_hold():
    for pipeline in ("dce", "fuse-qkv", "dce,legalize{device=cpu}"):
        check_laws(run_case(case(pipeline=pipeline)))


@pytest.mark.parametrize(
    ("faulty", "changed", "message"),
    [
        (Faulty([True]), False, "report changed=.True., but the module is unchanged"),
        (
            Faulty([False], "silu", beside=True),
            True,
            "report changed=.False., but the module is after",
        ),
        (Faulty([True], "sigmoid"), True, "@main, output y: the values differ"),
        (Faulty([True, True], "silu", beside=True), True, "a second run changes the module again"),
        (Faulty([False, True]), False, "a second run reports a change and makes none"),
    ],
)
def test_laws_that_do_not_hold(faulty, changed, message):
    with pytest.raises(GoldenError, match=message):
        check_laws(ran_by(faulty, changed=changed))


def test_a_pass_that_is_not_idempotent():
    faulty = Faulty([True], "silu", beside=True)
    faulty.idempotent = False  # type: ignore[misc]
    check_laws(ran_by(faulty, changed=True))


def test_values_within_the_tolerance_of_the_pass():
    """Half of a value is no rounding, unless somebody declares it to be."""
    faulty = Faulty([True, False], "sigmoid")
    faulty.tolerance = 10.0  # type: ignore[misc]
    ran = ran_by(faulty, changed=True)
    faulty.op = None
    check_laws(ran)


def test_graphs_that_read_unbound_weights_have_no_values_before():
    unbound = '@a : dense<f32> [2, 2] = unbound "lm_head"'
    body = BODY.replace('@a : dense<f32> [2, 2] = stored "target" {weight: "m#a"}', unbound)
    check_laws(run_case(case(body)))
    other = BODY[BODY.index("graph") :].replace("@main", "@other").replace("@a)", "@b)")
    ran = run_case(case(body + other))
    node = ran.after.graphs["other"].nodes[-1]
    rewriter = Rewriter(ran.after, ran.after.graphs["other"], "faulty")
    rewriter.replace(node, node.operands)
    ran = replace(ran, outcome=replace(ran.outcome, kind=Kind.AFTER))
    with pytest.raises(GoldenError, match="@other, output y: the values differ"):
        check_laws(ran)


def test_an_output_that_appears_is_an_error():
    ran = run_case(case())
    outputs = ran.before.graphs["main"].outputs
    outputs[0] = replace(outputs[0], name="other")
    with pytest.raises(GoldenError, match="output y was not there before"):
        check_laws(ran)


def test_nothing_left_to_compare_is_an_error():
    ran = run_case(case())
    ran.after.graphs["main"].outputs.clear()
    with pytest.raises(GoldenError, match="no output is left to compare"):
        check_laws(ran)
