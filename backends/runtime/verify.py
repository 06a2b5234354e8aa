"""Proves a bundle on the device it runs on: golden rows, and speculation against plain decoding."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from edgecc.backends.base import Array, Engine, IntArray, Progress, Role
from edgecc.backends.bundle import Bundle
from edgecc.backends.runtime.generator import Generator
from edgecc.backends.runtime.loader import load_bundle
from edgecc.backends.runtime.model_info import ModelInfo
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
    inputs: dict[Role, Array] = {
        Role.TOKEN_IDS: ids[None],
        Role.CACHE_LENGTH: np.zeros(1, dtype=np.int64),
        Role.LOGIT_ROWS: np.array([len(ids) - 1]),
    }
    if target.log_rows:
        inputs[Role.REPLAY_LENGTH] = np.zeros(1, dtype=np.int64)
        inputs[Role.COMMIT_LENGTH] = np.array([len(ids)])
    out = target.run(inputs, wanted)
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


def verify_bundle(
    path: str | os.PathLike[str],
    *,
    device: str | None = None,
    num_threads: int | None = None,
    prompts: int = 4,
    max_new_tokens: int = 32,
    progress: Progress | None = None,
) -> Verification:
    """Everything that can be proved about a bundle without its checkpoints.

    File hashes, golden rows of the reference (when the bundle has them), and on random prompts that
    speculative output equals plain output for the smallest and the largest number of proposals.

    Args:
        path: The bundle.
        device: Device of the bundle to use.
        num_threads: Threads of the engine.
        prompts: How many random prompts; their lengths spread from one token to two prefill chunks.
        max_new_tokens: Tokens generated for each.
        progress: Called as work goes on.

    Raises:
        BundleError: The bundle is damaged.
        ResourceError: A file cannot be read.
    """
    bundle = Bundle.open(path)
    bundle.verify_hashes(progress)
    checks: list[Check] = []
    with load_bundle(bundle, device=device, num_threads=num_threads, progress=progress) as loaded:
        if GOLDEN_FILE in bundle.manifest["files"]:
            golden = read_golden(bundle.file(GOLDEN_FILE))
            checks += compare_golden(loaded.engine, golden).checks
        model = loaded.model
        for index, ids in enumerate(_prompts(model, prompts, max_new_tokens)):
            if progress is not None:
                progress("verify", index, prompts)
            checks += _compare_decoding(loaded, ids, max_new_tokens)
    return Verification(tuple(checks))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _compare_decoding(generator: Generator, ids: IntArray, max_new_tokens: int) -> list[Check]:
    draft = generator.model.draft
    if draft is None:
        return []
    plain = generator.generate(
        token_ids=ids, max_new_tokens=max_new_tokens, speculation=False
    ).token_ids
    return [
        compare_tokens(
            f"speculation with {_count(n, 'proposal')}, prompt of {_count(len(ids), 'token')}",
            generator.generate(
                token_ids=ids, max_new_tokens=max_new_tokens, num_speculative_tokens=n
            ).token_ids,
            plain,
        )
        for n in sorted({1, draft.num_speculative_tokens})
    ]


def _prompts(model: ModelInfo, count: int, max_new_tokens: int) -> list[IntArray]:
    """Random prompts, the same on every machine."""
    random = np.random.default_rng(0)
    longest = min(2 * model.prefill_chunk + 1, model.max_input_len)
    longest = max(1, min(longest, model.max_model_len - max_new_tokens))
    lengths = np.linspace(1, longest, max(count, 1)).astype(int)[:count]
    return [random.integers(0, model.num_tokens, n, dtype=np.int64) for n in lengths]
