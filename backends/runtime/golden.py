"""Compares an engine with golden rows: what the compiler computed for a short prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from edgecc.backends.base import Array, Engine, Executable, Role
from edgecc.backends.runtime.golden_calls import (
    next_logits,
    prompt_inputs,
    proposals,
    replayed_logits,
)
from edgecc.backends.runtime.proposer import PROPOSERS, Proposer
from edgecc.errors import BundleError, MismatchError

GOLDEN_FILE = "golden.safetensors"
"""What the reference computes in float32, from the checkpoints as they are."""


def lowered_golden_file(device: str) -> str:
    """What the graphs of a device's engines compute, rounded where they round."""
    return f"golden-{device}.safetensors"


def tower_tensor(role: Role) -> str:
    """Golden input of the vision tower."""
    return f"tower.{role}"


@dataclass(frozen=True, slots=True)
class Limits:
    """How far an engine may be off.

    Attributes:
        values: Largest difference, relative to the largest reference value of the tensor.
        tokens: Share of proposals that may differ: one rounding decides between two near tokens,
            and the tokens after it follow.
        average: Compare root mean squares in place of largest values.
    """

    values: float
    tokens: float
    average: bool = False


EXACT = Limits(1e-4, 0.0)
"""An engine that computes in float32."""

NARROW = Limits(0.05, 0.5)
"""One that rounds to 16 bits, against a reference that does not: each op rounds by up to 2^-9 in
bf16; the shipped pairs stay below 0.01."""

SAME_ARITHMETIC = Limits(0.02, 0.5)
"""One that rounds to 16 bits, against rows that were rounded at the same places: what is left is
the order of sums, after which a value may round to its neighbour. Two implementations on a CPU
differ by up to 0.0104 on the shipped pair."""

QUANTIZED = Limits(0.5, 1.0, average=True)
"""One that also rounds what layers read to 4 or 8 bits, against any rows. That is chaotic: two
correct evaluations of the shipped pair differ by 0.2 (root mean square, relative), unrelated logits
by 1.4."""


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison: what, how far off, and whether that is fine.

    Attributes:
        name: What was compared.
        error: The largest difference, relative to the largest reference value; or a share of
            tokens.
        tolerance: What is allowed.
        passed: Whether that holds.
        detail: Where the largest difference is, if it is too large.
    """

    name: str
    error: float
    tolerance: float
    passed: bool
    detail: str = ""

    def __str__(self) -> str:
        mark = "ok" if self.passed else "FAILED"
        text = f"{self.name}: {mark} (error {self.error:.2e}, tolerance {self.tolerance:.2e})"
        return f"{text}: {self.detail}" if self.detail else text


@dataclass(frozen=True, slots=True)
class Verification:
    """All comparisons of one run."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(c.passed for c in self.checks)

    def raise_if_failed(self) -> None:
        """Raise with all checks listed if any failed.

        Raises:
            MismatchError: Naming each failed check with its figures.
        """
        if not self.passed:
            raise MismatchError(
                "verify/mismatch",
                "the engine's numbers differ from the reference",
                notes=[str(c) for c in self.checks],
                help="please report this with the model, the device and the versions of edgecc and "
                "of the engine's library",
            )


def read_golden(source: bytes | Path) -> dict[str, Array]:
    """Tensors of a golden file.

    Raises:
        BundleError: The file is missing or damaged.
    """
    try:
        data = source.read_bytes() if isinstance(source, Path) else source
        return dict(load(data))
    except (OSError, SafetensorError, ValueError) as error:
        raise BundleError(
            "bundle/golden",
            f"the golden rows cannot be read: {error}",
            where=GOLDEN_FILE,
            help="compile again with --verify fast",
        ) from error


def compare_golden(
    engine: Engine,
    golden: Mapping[str, Array],
    limits: Limits = EXACT,
    *,
    suffix: str = "",
    num_tokens: int = 0,
    proposer: Proposer = PROPOSERS["dspark"],
) -> Verification:
    """Run the golden prompt, the draft's round and the call after it on an engine, and compare.

    That call reads the caches and states that the prompt left. Where there are states, it comes
    once more with a part of the prompt in the log.

    Args:
        engine: The engine.
        golden: Tensors of a golden file.
        limits: What is allowed.
        suffix: Added to the names of the comparisons.
        num_tokens: Tokens the target chooses among, if it says what it chooses: compared with its
            logits.
        proposer: How the draft is called.
    """
    checks = []
    if "image_features" in golden:
        checks.append(_compare_tower(engine, golden, limits, suffix))
    target = engine.entry("target")
    wanted = [Role.LOGITS] + ([Role.HIDDEN_TAP] if "hidden_tap" in golden else [])
    if num_tokens:
        wanted.append(Role.CHOSEN_TOKENS)
    out = target.run(prompt_inputs(target, golden), wanted)
    logits = out[Role.LOGITS][0]
    checks.append(_compare(f"target logits{suffix}", logits, golden["logits"], limits))
    if num_tokens:
        chosen = out[Role.CHOSEN_TOKENS][0]
        checks.append(compare_choices("target choices", chosen, logits[:, :num_tokens]))
    if "hidden_tap" in golden:
        taps = out[Role.HIDDEN_TAP]
        name = f"target hidden states{suffix}"
        checks.append(_compare(name, taps[0], golden["hidden_tap"], limits))
    if "proposals" in golden:
        found = proposals(engine.entry("draft"), golden, out.get(Role.HIDDEN_TAP), proposer)
        expected = golden["proposals"]
        checks.append(compare_proposals(f"draft proposals{suffix}", found, expected, limits.tokens))
    checks += _later_calls(target, golden, limits, suffix)
    return Verification(tuple(checks))


def _compare_tower(
    engine: Engine, golden: Mapping[str, Array], limits: Limits, suffix: str
) -> Check:
    """The features of an image; the target is given those of the reference, whatever these are."""
    roles = (
        Role.PIXEL_VALUES,
        Role.POSITIONS,
        Role.INTERPOLATION_IDS,
        Role.INTERPOLATION_WEIGHTS,
    )
    inputs = {role: golden[tower_tensor(role)] for role in roles}
    found = engine.entry("vision").run(inputs, [Role.IMAGE_FEATURES])[Role.IMAGE_FEATURES][0]
    return _compare(f"image features{suffix}", found, golden["image_features"], limits)


def _later_calls(
    target: Executable, golden: Mapping[str, Array], limits: Limits, suffix: str
) -> Iterator[Check]:
    ways = {"after the prompt": next_logits, "after a replay": replayed_logits}
    for way, run in list(ways.items())[: 2 if target.log_rows else 1]:
        found = run(target, golden)
        yield _compare(f"target logits {way}{suffix}", found, golden["next_logits"], limits)


def _compare(name: str, found: Array, expected: Array, limits: Limits) -> Check:
    compare = compare_averages if limits.average else compare_values
    return compare(name, found, expected, limits.values)


def relative_rms(found: Array, expected: Array) -> float:
    """Root mean square of the difference, relative to that of what was expected."""
    size = float(np.sqrt(np.mean(np.square(expected, dtype=np.float64)))) or 1.0
    return float(np.sqrt(np.mean(np.square(found.astype(np.float64) - expected)))) / size


def compare_averages(name: str, found: Array, expected: Array, tolerance: float) -> Check:
    """Floating-point rows by their root mean squares, where single values say nothing.

    Args:
        name: Of the comparison.
        found: `[rows, width]`.
        expected: The reference, of the same shape.
        tolerance: Of the difference, relative to the reference.
    """
    if found.shape != expected.shape or not np.all(np.isfinite(found)):
        return compare_values(name, found, expected, tolerance)
    off = relative_rms(found, expected)
    if off <= tolerance:
        return Check(name, off, tolerance, True)
    detail = f"values are off by {off:.3g} of their size, root mean square"
    return Check(name, off, tolerance, False, detail)


def compare_values(name: str, found: Array, expected: Array, tolerance: float) -> Check:
    """Floating-point rows against reference rows.

    Args:
        name: Of the comparison.
        found: `[rows, width]`.
        expected: The reference, of the same shape.
        tolerance: Largest difference, relative to the largest reference value.
    """
    if found.shape != expected.shape:
        detail = f"shape {list(found.shape)}, expected {list(expected.shape)}"
        return Check(name, float("inf"), tolerance, False, detail)
    difference = np.abs(found.astype(np.float64) - expected)
    difference[~np.isfinite(difference)] = np.inf
    worst = np.unravel_index(int(difference.argmax()), difference.shape)
    scale = float(np.abs(expected).max()) or 1.0
    error = float(difference[worst]) / scale
    if error <= tolerance:
        return Check(name, error, tolerance, True)
    *rows, index = (int(i) for i in worst)
    many = int((difference > tolerance * scale).sum())
    detail = (
        f"row {', '.join(map(str, rows)) or 0}, index {index}: {float(found[worst]):.6g}, expected "
        f"{float(expected[worst]):.6g}; {many} of {found.size} values are off, the largest "
        f"expected value is {scale:.6g}"
    )
    return Check(name, error, tolerance, False, detail)


def compare_proposals(name: str, found: Array, expected: Array, tolerance: float) -> Check:
    """A draft's tokens against those of the reference.

    Args:
        name: Of the comparison.
        found: i64 `[N]`.
        expected: i64 `[N]`.
        tolerance: Share that may differ.
    """
    if found.shape != expected.shape:
        detail = f"{found.size} proposals, expected {expected.size}"
        return Check(name, 1.0, tolerance, False, detail)
    differ = np.flatnonzero(found != expected)
    error = len(differ) / max(1, found.size)
    if error <= tolerance:
        return Check(name, error, tolerance, True)
    return Check(name, error, tolerance, False, _first_token(found, expected))


def compare_choices(name: str, chosen: Array, logits: Array) -> Check:
    """Tokens that a device chose against the logits it chose by; of equal ones any will do.

    Args:
        name: Of the comparison.
        chosen: i64 `[rows]`.
        logits: Of tokens, without rows of padding, `[rows, tokens]`.
    """
    for row, token in enumerate(chosen.tolist()):
        best = int(logits[row].argmax())
        found = float(logits[row, token]) if 0 <= token < logits.shape[1] else float("nan")
        if not found >= float(logits[row, best]):
            detail = (
                f"row {row}: chose token {token} with logit {found:.6g}, expected token {best} "
                f"with {float(logits[row, best]):.6g}"
            )
            return Check(name, 1.0, 0.0, False, detail)
    return Check(name, 0.0, 0.0, True)


def compare_tokens(name: str, speculative: Sequence[int], plain: Sequence[int]) -> Check:
    """Speculative output against plain output, token for token."""
    if list(speculative) == list(plain):
        return Check(name, 0.0, 0.0, True)
    pairs = list(zip(speculative, plain, strict=False))
    agree = sum(1 for a, b in pairs if a == b) / max(1, len(plain))
    return Check(name, 1.0 - agree or 1.0, 0.0, False, _first_token(speculative, plain))


def _first_token(found: Sequence[int] | Array, expected: Sequence[int] | Array) -> str:
    """Where two lists of tokens begin to differ."""
    for place, (a, b) in enumerate(zip(found, expected, strict=False)):
        if a != b:
            return f"token {place} is {a}, expected {b}"
    return f"{len(found)} tokens, expected {len(expected)}"
