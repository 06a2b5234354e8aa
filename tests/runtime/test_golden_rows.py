"""Comparisons with golden rows: what is off is told exactly."""

from __future__ import annotations

import numpy as np
import pytest

from edgecc.backends.runtime.golden import (
    compare_averages,
    compare_choices,
    compare_proposals,
    compare_tokens,
    compare_values,
)


def test_values():
    expected = np.array([[1.0, -4.0, 2.0], [0.0, 3.0, -1.0]], np.float32)
    assert compare_values("x", expected, expected, 0.0).passed
    found = expected.copy()
    found[1, 2] += 0.5
    found[0, 0] += 0.1
    check = compare_values("x", found, expected, 0.02)
    assert check.error == pytest.approx(0.125)
    assert check.detail == (
        "row 1, index 2: -0.5, expected -1; 2 of 6 values are off, the largest expected value is 4"
    )
    assert str(check) == f"x: FAILED (error 1.25e-01, tolerance 2.00e-02): {check.detail}"
    check = compare_values("x", found, expected, 0.126)
    assert str(check) == "x: ok (error 1.25e-01, tolerance 1.26e-01)"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers(bad):
    expected = np.ones((2, 3), np.float32)
    found = expected.copy()
    found[1, 0] = bad
    check = compare_values("x", found, expected, 1e9)
    assert (check.passed, check.error) == (False, float("inf"))
    assert check.detail.startswith(f"row 1, index 0: {bad:g}, expected 1")


def test_averages():
    """One value may be far off where all are rounded coarsely; many may not."""
    expected = np.array([[3.0, -4.0], [0.0, 5.0]], np.float32)
    found = expected + np.array([[0.0, 0.0], [2.5, 0.0]], np.float32)
    check = compare_averages("x", found, expected, 0.4)
    assert (check.passed, check.error) == (True, pytest.approx((2.5**2 / 50) ** 0.5))
    check = compare_averages("x", -expected, expected, 0.5)
    assert (check.passed, check.error) == (False, pytest.approx(2))
    assert check.detail == "values are off by 2 of their size, root mean square"
    found[0, 0] = np.nan
    assert compare_averages("x", found, expected, 9.0).error == float("inf")
    assert not compare_averages("x", found[:1], expected, 9.0).passed


def test_other_shapes():
    check = compare_values("x", np.ones((1, 3)), np.ones((2, 3)), 1.0)
    assert check.detail == "shape [1, 3], expected [2, 3]"
    assert compare_proposals("p", np.arange(3), np.arange(4), 1.0).detail == (
        "3 proposals, expected 4"
    )


def test_proposals():
    expected = np.array([4, 5, 6, 7])
    assert compare_proposals("p", expected, expected, 0.0).passed
    found = np.array([4, 9, 6, 8])
    assert compare_proposals("p", found, expected, 0.5).passed
    check = compare_proposals("p", found, expected, 0.25)
    assert (check.error, check.detail) == (0.5, "token 1 is 9, expected 5")


def test_choices():
    logits = np.array([[1.0, 3.0, 3.0], [0.0, -1.0, -2.0]], np.float32)
    assert compare_choices("c", np.array([1, 0]), logits).passed
    assert compare_choices("c", np.array([2, 0]), logits).passed  # a tie: either will do
    check = compare_choices("c", np.array([1, 2]), logits)
    assert check.detail == "row 1: chose token 2 with logit -2, expected token 0 with 0"
    for token in (-1, 3):
        assert "chose token" in compare_choices("c", np.array([token, 0]), logits).detail
    assert not compare_choices("c", np.array([0, 0]), np.full((2, 3), np.nan)).passed


@pytest.mark.parametrize(
    ("found", "detail"),
    [([1, 2, 4], "token 2 is 4, expected 3"), ([1, 2], "2 tokens, expected 3"), ([], "0 tokens")],
)
def test_tokens(found, detail):
    assert compare_tokens("t", [1, 2, 3], [1, 2, 3]).passed
    check = compare_tokens("t", found, [1, 2, 3])
    assert not check.passed
    assert check.error > 0
    assert check.detail.startswith(detail)
