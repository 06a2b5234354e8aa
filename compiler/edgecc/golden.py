"""Golden rows: what the reference computes for a short prompt, kept in the bundle.

Made by the interpreter from the lifted module, before any pass but binding; compared with an engine
right after compiling, and by `edgecc verify` on the user's device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from edgecc.backends.base import Array
from edgecc.backends.onnxruntime import OrtEngine
from edgecc.backends.runtime.verify import (
    GOLDEN_FILE,
    Check,
    Verification,
    compare_golden,
    read_golden,
)
from edgecc.errors import InputError, InternalError, MismatchError
from edgecc.ir.clone import with_smaller_caches
from edgecc.ir.core import Json, Module
from edgecc.ir.interpreter import Interpreter
from edgecc.ir.types import DimExpr
from edgecc.passes.base import Pass, PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.passes.quantize import Quantize
from edgecc.passes.repeat import Repeat
from edgecc.roles import Role

__all__ = ["GOLDEN_FILE", "check_engine", "check_lowered", "golden_rows", "make_golden"]

PROMPT_ROWS = 5
"""Long enough for every kernel's many-row path, short enough for models that take seconds a row."""

NARROW_TOLERANCE = 0.05
"""Largest difference of a graph that computes in 16 bits, relative to the largest reference value.
Each op rounds by up to 2^-9 in bf16; the shipped pairs stay below 0.01."""

NARROW_PROPOSALS = 0.5
"""Share of proposals that may differ: a rounding decides between two near tokens, and the tokens
after it follow. A wrong graph proposes all others."""


def golden_rows(module: Module, passes: Sequence[Pass[Any]]) -> bytes:
    """Golden rows of a module as lifted, only bound: what the interpreter takes for the truth.

    Weights that the pipeline rounds are rounded here as well: rounding is what was asked for, and
    the rows are to show that the engine computes with those weights. Its caches are small: their
    capacity changes no value, and the interpreter copies them.

    Args:
        module: As lifted; it is bound and rounded in place.
        passes: The pipeline.

    Raises:
        InputError: The reference overflows.
    """
    limits = _section(module, "limits")
    length, chunk = int(str(limits["max_model_len"])), int(str(limits["prefill_chunk"]))
    rows = min(PROMPT_ROWS, length, chunk)
    BindSharedWeights().run(module, PassContext())
    for item in _rounding(passes):
        item.run(module, PassContext())
    with suppress(InternalError, ValueError):  # IR text in which some node has the capacity
        module = with_smaller_caches(module, length - max(rows, 2))
    return make_golden(module, rows)


def _rounding(passes: Sequence[Pass[Any]]) -> Iterator[Quantize]:
    """The passes of a pipeline that change weights on purpose."""
    for item in passes:
        if isinstance(item, Quantize):
            yield item
        elif isinstance(item, Repeat):
            yield from _rounding(item.passes)


def make_golden(module: Module, rows: int = PROMPT_ROWS) -> bytes:
    """Inputs and reference outputs of one prompt call and one draft call, as safetensors bytes.

    The prompt is a fixed spread of `rows` token ids, T below. Tensors: `token_ids` i64 `[T]`,
    `logits` f32 `[1, V]` of the last row, and for a pair `hidden_tap` f32 `[T, n*H]`, `anchor` i64
    `[1]` and `proposals` i64 `[N]`.

    Raises:
        InputError: The reference overflows.
    """
    target = _section(module, "target")
    count, padding = int(str(target["num_tokens"])), int(str(target["vocab_size"]))
    ids = (np.arange(1, rows + 1, dtype=np.int64) * 7919) % min(count, padding)
    interpreter = Interpreter(module)
    with np.errstate(over="ignore", invalid="ignore"):  # judged by the result
        out = interpreter.run(
            "target",
            {
                "token_ids": ids[None],
                "cache_length": np.zeros(1, dtype=np.int64),
                "logit_rows": np.array([rows - 1]),
                **_counts(module, rows),
                **_caches(module, "target"),
            },
        )
    for name in out.keys() & {"logits", "hidden_tap"}:
        if not np.all(np.isfinite(out[name])):
            raise InputError(
                "golden/not-finite",
                f"the reference computes {name} that are no numbers: the values overflow float32",
                where="target",
                help="the checkpoint is damaged: fetch it again",
            )
    golden: dict[str, Array] = {"token_ids": ids, "logits": out["logits"][0]}
    if "draft" in module.graphs:
        anchor = np.argmax(out["logits"][0, :, :count], axis=-1).astype(np.int64)
        draft = interpreter.run(
            "draft",
            {
                "features": out["hidden_tap"],
                "anchor": anchor,
                "cache_length": np.zeros(1, dtype=np.int64),
                **_caches(module, "draft"),
            },
        )
        golden["hidden_tap"] = out["hidden_tap"][0]
        golden["anchor"] = anchor
        golden["proposals"] = draft["proposals"][0]
    return save({k: np.ascontiguousarray(v) for k, v in golden.items()})


def check_engine(directory: Path, artifact: Mapping[str, Any], golden: bytes) -> tuple[Check, ...]:
    """Open the engine of an unfinished bundle and compare it with the golden rows.

    Returns:
        The comparisons, all passed.

    Raises:
        MismatchError: Numbers differ by more than the tolerance.
    """
    engine = OrtEngine(_Directory(directory), artifact, num_threads=None, progress=None)
    try:
        result = compare_golden(engine, read_golden(golden))
        result.raise_if_failed()
        return result.checks
    finally:
        engine.close()


def check_lowered(module: Module, golden: bytes) -> tuple[Check, ...]:
    """Evaluate the graphs that a builder is going to get, and compare with the golden rows.

    The interpreter rounds every value to the type it has in the lowered graph, and computes with
    the values of the lowered weights, so this is the arithmetic of an engine that accumulates in
    float32.

    Args:
        module: After all passes.
        golden: Of the module as lifted.

    Returns:
        The comparisons, all passed.

    Raises:
        MismatchError: Numbers differ by more than the tolerance.
    """
    expected = read_golden(golden)
    rows = len(expected["token_ids"])
    limits = _section(module, "limits")
    with suppress(InternalError, ValueError):
        module = with_smaller_caches(module, int(str(limits["max_model_len"])) - max(rows, 2))
    found = read_golden(make_golden(module, rows))
    checks = [
        _narrow_check(f"lowered {name}", found[name], expected[name])
        for name in ("logits", "hidden_tap")
        if name in expected
    ]
    if "proposals" in expected:
        share = float(np.mean(found["proposals"] != expected["proposals"]))
        passed = share <= NARROW_PROPOSALS
        checks.append(Check("lowered proposals", share, NARROW_PROPOSALS, passed))
    result = Verification(tuple(checks))
    if not result.passed:
        raise MismatchError(
            "verify/lowered",
            "the lowered graphs compute other numbers than the reference",
            notes=[str(c) for c in checks],
            help="find the pass with --check 1",
        )
    return result.checks


def _narrow_check(name: str, found: Array, expected: Array) -> Check:
    scale = float(np.abs(expected).max()) or 1.0
    error = float(np.abs(found.astype(np.float64) - expected).max()) / scale
    return Check(name, error, NARROW_TOLERANCE, error <= NARROW_TOLERANCE)


class _Directory:
    """The files of a bundle that has no manifest yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, relative: str) -> Path:
        """Path of a file."""
        return self.path / relative


def _section(module: Module, key: str) -> dict[str, Json]:
    section = module.metadata[key]
    assert isinstance(section, dict)
    return section


def _counts(module: Module, rows: int) -> dict[str, Array]:
    """Nothing to replay, and all rows are final; for targets that want to know."""
    counts = {Role.REPLAY_LENGTH: 0, Role.COMMIT_LENGTH: rows}
    graph = module.graphs["target"]
    return {i.name: np.array([n]) for role, n in counts.items() for i in graph.by_role(role)}


def _caches(module: Module, graph: str) -> dict[str, Array]:
    """Empty caches, states and logs of the declared shapes."""
    return {
        item.name: np.zeros(
            [1 if isinstance(d, DimExpr) else d for d in item.value.type.shape], dtype=np.float32
        )
        for role in (Role.KV_CACHE, Role.STATE, Role.STATE_LOG)
        for item in module.graphs[graph].by_role(role)
    }
