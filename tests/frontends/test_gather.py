"""Errors of independent steps, told together."""

from __future__ import annotations

import pytest

from edgecc.errors import Diagnostic, InputError, ResourceError, UnsupportedError, UsageError
from edgecc.frontends.gather import Gather, merged


def test_nothing_found() -> None:
    errors = Gather()
    with errors.step():
        pass
    errors.raise_found()
    assert errors.errors == []


def test_one_error_is_raised_as_it_is() -> None:
    errors = Gather()
    reached = []
    with errors.step():
        raise InputError("a/b", "x")
        reached.append(1)
    reached.append(2)
    assert reached == [2]
    with pytest.raises(InputError) as caught:
        errors.raise_found()
    assert caught.value is errors.errors[0]


def test_bad_comes_before_unsupported() -> None:
    errors = Gather()
    for error in (UnsupportedError("a/u", "u"), InputError("a/b", "b"), InputError("a/c", "c")):
        with errors.step():
            raise error
    with pytest.raises(InputError) as caught:
        errors.raise_found()
    assert [d.id for d in caught.value.diagnostics] == ["a/b", "a/c", "a/u"]
    assert caught.value.__cause__ is errors.errors[0]


def test_only_unsupported() -> None:
    errors = Gather()
    for id in ("a/u", "a/v"):
        with errors.step():
            raise UnsupportedError(id, "u")
    with pytest.raises(UnsupportedError) as caught:
        errors.raise_found()
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("error", [ResourceError("a/b", "x"), UsageError("a/b", "x"), ValueError()])
def test_other_errors_pass(error: Exception) -> None:
    errors = Gather()
    with pytest.raises(type(error)), errors.step():
        raise error
    assert errors.errors == []


def test_gathers_nest() -> None:
    inner, outer = Gather(), Gather()
    for id in ("a/b", "a/c"):
        with inner.step():
            raise InputError(id, "x")
    with outer.step():
        inner.raise_found()
    with outer.step():
        raise InputError("a/d", "y")
    with pytest.raises(InputError) as caught:
        outer.raise_found()
    assert [d.id for d in caught.value.diagnostics] == ["a/b", "a/c", "a/d"]


def finding(layer: int, message: str = "no tensor") -> Diagnostic:
    return Diagnostic(
        "a/b", f"{message} layers.{layer}.x", f"target/m-{layer}.st: layers.{layer}.x"
    )


def test_equal_faults_of_layers_are_one() -> None:
    (one,) = merged([finding(i) for i in range(7)])
    assert one.message == "no tensor layers.0.x"
    (note,) = one.notes
    assert note.startswith("the same in 6 more: target/m-1.st: layers.1.x, ")
    assert note.endswith(", ...")


def test_other_faults_stay_apart() -> None:
    """Numbers that are no layer are part of what is said."""
    shapes = [Diagnostic("a/b", f"shape [{i}]", "target: x") for i in range(2)]
    assert merged(shapes) == shapes
    assert len(merged([finding(0), finding(1, "a shape of")])) == 2


def test_the_same_finding_twice_is_one() -> None:
    assert merged([finding(0), finding(0)]) == [finding(0)]
