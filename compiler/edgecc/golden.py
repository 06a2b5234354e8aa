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
from edgecc.ir.core import Json, Module, Node
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
    rows = min(PROMPT_ROWS, length - 1, chunk)
    BindSharedWeights().run(module, PassContext())
    for item in _rounding(passes):
        item.run(module, PassContext())
    with suppress(InternalError, ValueError):  # IR text in which some node has the capacity
        module = with_smaller_caches(module, length - rows - 1)
    return make_golden(module, rows)


def _rounding(passes: Sequence[Pass[Any]]) -> Iterator[Quantize]:
    """The passes of a pipeline that change weights on purpose."""
    for item in passes:
        if isinstance(item, Quantize):
            yield item
        elif isinstance(item, Repeat):
            yield from _rounding(item.passes)


def make_golden(module: Module, rows: int = PROMPT_ROWS) -> bytes:
    """Inputs and reference outputs of a short sequence, as safetensors bytes.

    The prompt is a fixed spread of `rows` token ids, T below; the token after it is the best one,
    also for a target alone. Tensors: `token_ids` i64 `[T]`, `logits` f32 `[1, V]` of the last row,
    `anchor` i64 `[1]` and `next_logits` f32 `[1, V]` of a call with that token, which reads the
    caches and states that the prompt left. For a pair also `hidden_tap` f32 `[T, n*H]`, and
    `proposals` i64 `[N]` and `draft_logits` f32 `[N, Vd]` of the draft's round after the prompt.

    Raises:
        InputError: The reference overflows.
    """
    target = _section(module, "target")
    count, padding = int(str(target["num_tokens"])), int(str(target["vocab_size"]))
    ids = (np.arange(1, rows + 1, dtype=np.int64) * 7919) % min(count, padding)
    sequence = _Sequence(Interpreter(module))
    with np.errstate(over="ignore", invalid="ignore"):  # judged by the result
        out = sequence.target(ids)
    for name in out.keys() & {"logits", "hidden_tap"}:
        if not np.all(np.isfinite(out[name])):
            raise InputError(
                "golden/not-finite",
                f"the reference computes {name} that are no numbers: the values overflow float32",
                where="target",
                help="the checkpoint is damaged: fetch it again",
            )
    anchor = np.argmax(out["logits"][0, :, :count], axis=-1).astype(np.int64)
    golden: dict[str, Array] = {"token_ids": ids, "logits": out["logits"][0], "anchor": anchor}
    if "draft" in module.graphs:
        golden["hidden_tap"] = out["hidden_tap"][0]
        draft = sequence.draft(out["hidden_tap"], ids, anchor)
        golden["proposals"] = draft["proposals"][0]
        golden["draft_logits"] = draft["draft_logits"][0]
    golden["next_logits"] = sequence.target(anchor)["logits"][0]
    return save({k: np.ascontiguousarray(v) for k, v in golden.items()})


class _Sequence:
    """One sequence on the graphs of a module; the target's caches and states stay between calls."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self._module = interpreter.module
        self._memory = _caches(self._module, "target")
        self._length = 0

    def target(self, ids: Array) -> dict[str, Array]:
        """Go on with some tokens; logits of the last one."""
        out = self._interpreter.run(
            "target",
            {
                "token_ids": ids[None],
                "cache_length": np.array([self._length]),
                "logit_rows": np.array([len(ids) - 1]),
                **_counts(self._module, len(ids)),
                **self._memory,
            },
        )
        self._memory = {name: out[name] for name in self._memory}
        self._length += len(ids)
        return out

    def draft(self, features: Array, ids: Array, anchor: Array) -> dict[str, Array]:
        """The first round of the draft."""
        given: dict[Role, Array] = {
            Role.FEATURES: features,
            Role.ANCHOR: anchor,
            Role.NEXT_TOKEN_IDS: np.concatenate([ids[1:], anchor])[None],
            Role.CACHE_LENGTH: np.zeros(1, dtype=np.int64),
        }
        inputs = self._module.graphs["draft"].inputs
        named = {i.name: given[i.role] for i in inputs if i.role in given}
        return self._interpreter.run("draft", {**named, **_caches(self._module, "draft")})


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
    float32. The draft is made to choose the tokens of the reference, and what it would have chosen
    by is compared: a rounding may decide between two near tokens, and all tokens after it follow.

    Args:
        module: After all passes.
        golden: Of the module as lifted.

    Returns:
        The comparisons, all passed.

    Raises:
        MismatchError: Numbers differ by more than the tolerance.
    """
    expected = read_golden(golden)
    ids, anchor = expected["token_ids"], expected["anchor"]
    limits = _section(module, "limits")
    with suppress(InternalError, ValueError):
        rows = int(str(limits["max_model_len"])) - len(ids) - 1
        module = with_smaller_caches(module, rows)
    interpreter = _Chooser(module, expected.get("draft_logits"))
    sequence = _Sequence(interpreter)
    out = sequence.target(ids)
    checks = [_narrow_check("lowered logits", out["logits"][0], expected["logits"])]
    if "draft_logits" in expected:
        checks.append(
            _narrow_check("lowered hidden_tap", out["hidden_tap"][0], expected["hidden_tap"])
        )
        draft = sequence.draft(out["hidden_tap"], ids, anchor)
        found = interpreter.scores()
        checks.append(_narrow_check("lowered draft_logits", found, expected["draft_logits"]))
        differ = float(np.mean(draft["proposals"][0] != expected["proposals"]))
        checks.append(Check("lowered proposals", differ, 0.0, differ == 0.0))
    following = sequence.target(anchor)["logits"][0]
    checks.append(_narrow_check("lowered next_logits", following, expected["next_logits"]))
    result = Verification(tuple(checks))
    if not result.passed:
        raise MismatchError(
            "verify/lowered",
            "the lowered graphs compute other numbers than the reference",
            notes=[str(c) for c in checks],
            help="find the pass with --check 1",
        )
    return result.checks


class _Chooser(Interpreter):
    """Chooses the tokens that reference scores name, and keeps the scores it was given.

    Args:
        module: Module to evaluate.
        scores: Of the reference, one row `[Vd]` for each choice in the order they are made.
    """

    def __init__(self, module: Module, scores: Array | None) -> None:
        super().__init__(module)
        self._reference = np.empty((0, 0)) if scores is None else scores
        self._found: list[Array] = []

    def node(self, node: Node, operands: Sequence[Array]) -> tuple[Array, ...]:
        """`argmax` answers with the next choices of the reference, as long as there are any."""
        if node.op.name != "argmax":
            return super().node(node, operands)
        (values,) = operands
        rows = values.reshape(-1, values.shape[-1])
        wanted = self._reference[len(self._found) : len(self._found) + len(rows)]
        self._found.extend(rows)
        if wanted.shape != rows.shape:
            return super().node(node, operands)
        return super().node(node, (wanted.reshape(values.shape),))

    def scores(self) -> Array:
        """What choices were made by, `[N, Vd]`."""
        return np.stack(self._found) if self._found else np.empty((0, 0))


def _narrow_check(name: str, found: Array, expected: Array) -> Check:
    if found.shape != expected.shape:
        return Check(name, float("inf"), NARROW_TOLERANCE, False)
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
