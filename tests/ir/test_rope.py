from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import UnsupportedError
from edgecc.ir.rope import AXIAL, RopeParams, inverse_frequencies, rope_tables

# Values of transformers 5.24, printed with nine digits: enough to identify a float32.
DEFAULT = (
    RopeParams(1e7, 64),
    {
        0: 1.0,
        1: 0.604296386,
        2: 0.365174145,
        3: 0.220673397,
        15: 0.000523299095,
        30: 2.73841977e-07,
        31: 1.65481708e-07,
    },
)
LLAMA3 = (
    RopeParams(
        5e5,
        128,
        "llama3",
        factor=8,
        low_freq_factor=1,
        high_freq_factor=4,
        original_max_position_embeddings=8192,
    ),
    {
        0: 1.0,
        1: 0.814617217,
        20: 0.0165604409,
        28: 0.00321144611,
        29: 0.00216657063,
        30: 0.00137189368,
        31: 0.00085675146,
        32: 0.000524846022,
        33: 0.00031269365,
        34: 0.000178507791,
        35: 9.55621217e-05,
        40: 3.42810235e-05,
        63: 3.06892588e-07,
    },
)
YARN = (
    RopeParams(1e6, 128, "yarn", factor=4, original_max_position_embeddings=32768),
    {
        0: 1.0,
        10: 0.115478203,
        22: 0.00865964312,
        23: 0.00697830599,
        24: 0.00537532149,
        25: 0.0041317381,
        30: 0.00106436096,
        35: 0.000246258394,
        39: 6.4903943e-05,
        40: 4.44569851e-05,
        41: 3.58253164e-05,
        45: 1.51074091e-05,
        63: 3.10234441e-07,
    },
)


@pytest.mark.parametrize(
    ("params", "golden", "attention_factor"),
    [(*DEFAULT, 1.0), (*LLAMA3, 1.0), (*YARN, 1.138629436)],
    ids=["default", "llama3", "yarn"],
)
def test_goldens(params: RopeParams, golden: dict[int, float], attention_factor: float) -> None:
    inverse, factor = inverse_frequencies(params)
    assert inverse.shape == (params.dim // 2,)
    assert inverse.dtype == np.float32
    for index, value in golden.items():
        assert inverse[index] == pytest.approx(value, rel=1e-7)
    assert factor == pytest.approx(attention_factor, rel=1e-9)


def exact(params: RopeParams) -> list[float]:
    """The formulas in float64, written independently: one frequency at a time."""
    plain = [params.theta ** (-2 * j / params.dim) for j in range(params.dim // 2)]
    original = params.original_max_position_embeddings or 0
    if params.rope_type == "linear":
        return [f / params.factor for f in plain]
    if params.rope_type == "llama3":
        result = []
        for f in plain:
            turns = original * f / (2 * math.pi)  # original length over wavelength
            blend = (turns - params.low_freq_factor) / (
                params.high_freq_factor - params.low_freq_factor
            )
            blend = min(max(blend, 0.0), 1.0)
            result.append((1 - blend) * f / params.factor + blend * f)
        return result
    if params.rope_type == "yarn":

        def bound(beta: float) -> float:
            return (
                params.dim
                * math.log(original / (beta * 2 * math.pi))
                / (2 * math.log(params.theta))
            )

        low = max(math.floor(bound(params.beta_fast)), 0)
        high = min(math.ceil(bound(params.beta_slow)), params.dim - 1)
        ramp = [min(max((j - low) / ((high - low) or 0.001), 0), 1) for j in range(len(plain))]
        return [f * (1 - r) + f / params.factor * r for f, r in zip(plain, ramp, strict=True)]
    return plain


@given(
    rope_type=st.sampled_from(["default", "linear", "llama3", "yarn"]),
    theta=st.floats(1e3, 1e8),
    half=st.integers(4, 128),
    factor=st.floats(1, 64),
    original=st.sampled_from([2048, 8192, 32768, 262144]),
)
def test_all_types_follow_the_formulas(
    rope_type: str, theta: float, half: int, factor: float, original: int
) -> None:
    params = RopeParams(
        theta, 2 * half, rope_type, factor=factor, original_max_position_embeddings=original
    )
    inverse, _ = inverse_frequencies(params)
    # Exponents are rounded to float32 first (ln(theta) * 2^-24 relative), and where a kept and a
    # divided frequency are blended, the rounding of the blend counts up to `factor` times.
    assert inverse == pytest.approx(exact(params), rel=3e-6 + 2e-7 * factor)


@given(theta=st.floats(1e3, 1e8), half=st.integers(4, 64))
def test_a_factor_of_one_changes_nothing(theta: float, half: int) -> None:
    plain, _ = inverse_frequencies(RopeParams(theta, 2 * half))
    for rope_type in ("linear", "llama3", "yarn"):
        params = RopeParams(theta, 2 * half, rope_type, original_max_position_embeddings=4096)
        inverse, attention_factor = inverse_frequencies(params)
        np.testing.assert_allclose(inverse, plain, rtol=3e-7)
        assert attention_factor == 1.0


def test_yarn_attention_factor_rules() -> None:
    plain = RopeParams(1e6, 128, "yarn", factor=4, original_max_position_embeddings=4096)

    def factor(**given: float) -> float:
        return inverse_frequencies(replace(plain, **given))[1]  # type: ignore[arg-type]

    log = math.log(4)
    assert factor() == pytest.approx(0.1 * log + 1)
    assert factor(attention_factor=1.25, mscale=2, mscale_all_dim=3) == 1.25
    assert factor(mscale=2, mscale_all_dim=3) == pytest.approx((0.2 * log + 1) / (0.3 * log + 1))
    assert factor(mscale=2) == pytest.approx(0.1 * log + 1)


def test_yarn_without_truncation_uses_fractional_bounds() -> None:
    rounded, _ = inverse_frequencies(YARN[0])
    exact_bounds, _ = inverse_frequencies(replace(YARN[0], truncate=False))
    # low = 23.59, high = 39.65 instead of 23 and 40: index 24 lies 0.41/16.06 into the ramp
    low = 128 * math.log(32768 / (32 * 2 * math.pi)) / (2 * math.log(1e6))
    high = 128 * math.log(32768 / (2 * math.pi)) / (2 * math.log(1e6))
    ramp = (24 - low) / (high - low)
    plain = 1e6 ** (-48 / 128)
    assert exact_bounds[24] == pytest.approx(plain * (1 - ramp) + plain / 4 * ramp, rel=1e-6)
    assert rounded[24] < exact_bounds[24]


@pytest.mark.parametrize("params", [DEFAULT[0], LLAMA3[0], YARN[0]], ids=lambda p: p.rope_type)
def test_tables_are_cos_and_sin_of_float32_angles(params: RopeParams) -> None:
    length = 4097
    cos, sin = rope_tables(params, length)
    inverse, factor = inverse_frequencies(params)
    assert cos.shape == sin.shape == (length, params.dim // 2)
    assert cos.dtype == sin.dtype == np.float32
    for position in (0, 1, 1000, 4096):
        angle = [float(np.float32(position) * f) for f in inverse]
        expected_cos = np.array([math.cos(a) for a in angle], np.float32) * np.float32(factor)
        expected_sin = np.array([math.sin(a) for a in angle], np.float32) * np.float32(factor)
        np.testing.assert_allclose(cos[position], expected_cos, rtol=0, atol=1.5e-7)
        np.testing.assert_allclose(sin[position], expected_sin, rtol=0, atol=1.5e-7)
    assert (cos[0] == np.float32(factor)).all()
    assert (sin[0] == 0).all()


def test_long_positions_round_the_angle_like_the_reference() -> None:
    cos, _ = rope_tables(RopeParams(1e7, 64), 262144)
    exact_angle = 262143 * 1e7 ** (-2 / 64)
    difference = abs(float(cos[-1, 1]) - math.cos(exact_angle))
    assert 1e-4 < difference < 0.02  # an exact table would differ from the trained one


def test_empty_and_negative_lengths() -> None:
    cos, sin = rope_tables(RopeParams(1e4, 8), 0)
    assert cos.shape == sin.shape == (0, 4)
    with pytest.raises(ValueError, match="negative"):
        rope_tables(RopeParams(1e4, 8), -1)


def test_axial_frequencies_are_those_of_half_as_many_dims_twice() -> None:
    """Of heads of 72 dims: 18 for the row of a patch, the same 18 for its column."""
    inverse, factor = inverse_frequencies(RopeParams(1e4, 72, AXIAL))
    half, _ = inverse_frequencies(RopeParams(1e4, 36))
    assert factor == 1
    assert inverse.shape == (36,)
    assert inverse[:18].tobytes() == inverse[18:].tobytes() == half.tobytes()
    np.testing.assert_allclose(half, [1e4 ** (-2 * j / 36) for j in range(18)], rtol=1e-6)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "su", ""])
def test_other_types_are_refused_by_name(rope_type: str) -> None:
    with pytest.raises(UnsupportedError, match=repr(rope_type)):
        inverse_frequencies(RopeParams(1e4, 8, rope_type))


@pytest.mark.parametrize(
    "bad",
    [
        {"dim": 7},
        {"dim": 0},
        {"dim": 6, "rope_type": AXIAL},
        {"theta": 1.0},
        {"theta": math.nan},
        {"theta": math.inf},
        {"factor": 0.5},
        {"factor": math.nan},
        {"rope_type": "yarn"},
        {"rope_type": "llama3", "original_max_position_embeddings": 0},
        {"low_freq_factor": 4.0, "high_freq_factor": 4.0},
        {"low_freq_factor": 0.0},
        {"beta_fast": 0.5},
        {"beta_slow": 0.0},
        {"attention_factor": 0.0},
        {"mscale": math.inf},
    ],
)
def test_parameters_out_of_range(bad: dict[str, object]) -> None:
    values: dict[str, object] = {"theta": 1e4, "dim": 8, **bad}
    with pytest.raises(ValueError, match=r"must|needs"):
        RopeParams(**values)  # type: ignore[arg-type]
