"""Proves a bundle on the device it runs on: golden rows, and speculation against plain decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from edgecc.backends.base import Array, Engine, Role
from edgecc.errors import BundleError, MismatchError

GOLDEN_FILE = "golden.safetensors"
TOLERANCE = 1e-4
"""Largest allowed difference, relative to the largest reference value of the tensor."""


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison: what, how far off, and whether that is fine."""

    name: str
    error: float
    tolerance: float
    passed: bool

    def __str__(self) -> str:
        mark = "ok" if self.passed else "FAILED"
        return f"{self.name}: {mark} (error {self.error:.2e}, tolerance {self.tolerance:.0e})"


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
                help="please report this with the model, the device and the onnxruntime version",
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


def compare_golden(engine: Engine, golden: Mapping[str, Array]) -> Verification:
    """Run the golden prompt (and draft round) on an engine and compare with the reference."""
    ids = golden["token_ids"]
    target = engine.entry("target")
    wanted = [Role.LOGITS] + ([Role.HIDDEN_TAP] if "hidden_tap" in golden else [])
    out = target.run(
        {
            Role.TOKEN_IDS: ids[None],
            Role.CACHE_LENGTH: np.zeros(1, dtype=np.int64),
            Role.LOGIT_ROWS: np.array([len(ids) - 1]),
        },
        wanted,
    )
    checks = [_relative("target logits", out[Role.LOGITS][0], golden["logits"])]
    if "hidden_tap" in golden:
        taps = out[Role.HIDDEN_TAP]
        checks.append(_relative("target hidden states", taps[0], golden["hidden_tap"]))
        draft = engine.entry("draft").run(
            {
                Role.FEATURES: taps,
                Role.ANCHOR: golden["anchor"],
                Role.CACHE_LENGTH: np.zeros(1, dtype=np.int64),
            },
            [Role.PROPOSALS],
        )
        found, expected = draft[Role.PROPOSALS][0], golden["proposals"]
        differing = float(np.mean(found != expected)) if found.shape == expected.shape else 1.0
        checks.append(Check("draft proposals", differing, 0.0, differing == 0.0))
    return Verification(tuple(checks))


def compare_tokens(name: str, speculative: Sequence[int], plain: Sequence[int]) -> Check:
    """Speculative output against plain output, token for token."""
    same = list(speculative) == list(plain)
    pairs = list(zip(speculative, plain, strict=False))
    agree = sum(1 for a, b in pairs if a == b) / max(1, len(plain))
    return Check(name, 0.0 if same else 1.0 - agree or 1.0, 0.0, same)


def _relative(name: str, found: Array, expected: Array) -> Check:
    if found.shape != expected.shape or not np.all(np.isfinite(found)):
        return Check(name, float("inf"), TOLERANCE, False)
    scale = float(np.abs(expected).max()) or 1.0
    error = float(np.abs(found.astype(np.float64) - expected).max()) / scale
    return Check(name, error, TOLERANCE, error <= TOLERANCE)
