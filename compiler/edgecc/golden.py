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
from edgecc.backends.runtime.golden import (
    GOLDEN_FILE,
    Check,
    compare_golden,
    read_golden,
)
from edgecc.backends.runtime.proposer import proposer_of
from edgecc.errors import InternalError
from edgecc.golden_image import IMAGE_ROWS, GoldenImage, golden_image
from edgecc.ir.clone import with_smaller_caches
from edgecc.ir.core import Json, Module
from edgecc.ir.interpreter import Interpreter
from edgecc.ir.types import DimExpr
from edgecc.overflow import OverflowFinder
from edgecc.passes.base import Pass, PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.passes.quantize import Quantize
from edgecc.passes.repeat import Repeat
from edgecc.roles import Role

__all__ = ["GOLDEN_FILE", "GoldenSequence", "check_engine", "golden_rows", "make_golden", "section"]

PROMPT_ROWS = 5
"""Long enough for every kernel's many-row path, short enough for models that take seconds a row."""


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
    limits = section(module, "limits")
    length, chunk = int(str(limits["max_model_len"])), int(str(limits["prefill_chunk"]))
    rows = min(IMAGE_ROWS if "vision" in module.graphs else PROMPT_ROWS, length - 1, chunk)
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
    caches and states that the prompt left. For a pair also, of the draft's round after the prompt,
    `proposals` i64 `[N]`, `draft_logits` f32 `[N, Vd]` if the graph has that output, and where the
    draft reads states of the target `hidden_tap` f32 `[T, n*H]`.

    Where the target reads images, a small one stands in the prompt. Then there are also the inputs
    of the tower as `tower.ROLE`, its `image_features` f32 `[m, H]`, and `positions` i64 `[3, T]`
    and `image_rows` i64 `[T]` of the target.

    Raises:
        InputError: The reference overflows; the weight that makes it is named.
    """
    target = section(module, "target")
    count, padding = int(str(target["num_tokens"])), int(str(target["vocab_size"]))
    ids = (np.arange(1, rows + 1, dtype=np.int64) * 7919) % min(count, padding)
    if (image := golden_image(module, rows)) is not None:
        ids = image.prompt.token_ids
    with np.errstate(all="ignore"):  # judged by the result
        golden = _rows(Interpreter(module), image, ids, count)
        bad = sorted(k for k, v in golden.items() if v.dtype.kind == "f" and not _is_finite(v))
        if bad:
            finder = OverflowFinder(module)
            _rows(finder, image, ids, count)
            raise finder.error(bad)
    return save({k: np.ascontiguousarray(v) for k, v in golden.items()})


def _rows(
    interpreter: Interpreter, image: GoldenImage | None, ids: Array, count: int
) -> dict[str, Array]:
    """The tensors of `make_golden`.

    Args:
        interpreter: Of the module.
        image: What is in the prompt, where the target reads images.
        ids: The prompt, `[T]`.
        count: Tokens of the vocabulary, without padding.
    """
    sequence = GoldenSequence(interpreter, image)
    out = {**sequence.image, **sequence.target(ids)}
    anchor = np.argmax(out["logits"][0, :, :count], axis=-1).astype(np.int64)
    golden: dict[str, Array] = {"token_ids": ids, "logits": out["logits"][0], "anchor": anchor}
    golden |= sequence.image
    if "draft" in interpreter.module.graphs:
        if "hidden_tap" in out:
            golden["hidden_tap"] = out["hidden_tap"][0]
        draft = sequence.draft(out.get("hidden_tap"), ids, anchor)
        golden["proposals"] = draft["proposals"][0]
        if "draft_logits" in draft:  # an output that lowered graphs have lost
            golden["draft_logits"] = draft["draft_logits"][0]
    golden["next_logits"] = sequence.target(anchor)["logits"][0]
    return golden


def _is_finite(values: Array) -> bool:
    return bool(np.all(np.isfinite(values)))


class GoldenSequence:
    """One sequence on the graphs of a module; caches, states and logs of the target stay.

    Args:
        interpreter: Of the module.
        image: What is in the prompt, where the target reads images.

    Attributes:
        image: The golden rows of the tower and of what goes into the target with them.
    """

    def __init__(self, interpreter: Interpreter, image: GoldenImage | None = None) -> None:
        self._interpreter = interpreter
        self._module = interpreter.module
        self._memory = _caches(self._module, "target")
        self._length = 0
        self._picture = image
        self.image: dict[str, Array] = image.rows(interpreter) if image is not None else {}

    def target(self, ids: Array) -> dict[str, Array]:
        """Go on with some tokens; logits of the last one."""
        out = self._interpreter.run(
            "target",
            {
                "token_ids": ids[None],
                "cache_length": np.array([self._length]),
                "logit_rows": np.array([len(ids) - 1]),
                **_counts(self._module, len(ids)),
                **self._image_inputs(len(ids)),
                **self._memory,
            },
        )
        self._memory = {name: out[name] for name in self._memory}
        self._length += len(ids)
        return out

    def _image_inputs(self, rows: int) -> dict[str, Array]:
        if self._picture is None:
            return {}
        features = self.image["image_features"]
        given = self._picture.prompt.inputs_from(self._length, rows, features)
        graph = self._module.graphs["target"]
        return {i.name: given[i.role] for i in graph.inputs if i.role in given}

    def draft(self, features: Array | None, ids: Array, anchor: Array) -> dict[str, Array]:
        """The first round of the draft.

        Args:
            features: Of the prompt, `[1, T, n*H]`; None for a draft that reads tokens alone.
            ids: The prompt, `[T]`.
            anchor: The token after it, `[1]`.
        """
        if features is None:
            return self._draft_by_token(np.concatenate([ids, anchor]))
        given: dict[Role, Array] = {
            Role.FEATURES: features,
            Role.ANCHOR: anchor,
            Role.NEXT_TOKEN_IDS: np.concatenate([ids[1:], anchor])[None],
            Role.CACHE_LENGTH: np.zeros(1, dtype=np.int64),
        }
        inputs = self._module.graphs["draft"].inputs
        named = {i.name: given[i.role] for i in inputs if i.role in given}
        return self._interpreter.run("draft", {**named, **_caches(self._module, "draft")})

    def _draft_by_token(self, ids: Array) -> dict[str, Array]:
        """Calls of a draft that answers with one proposal each; outputs joined."""
        memory, length = _caches(self._module, "draft"), 0
        made: list[dict[str, Array]] = []
        for _ in range(int(str(section(self._module, "draft")["num_speculative_tokens"]))):
            given = {
                "token_ids": ids[None],
                "cache_length": np.array([length]),
                "logit_rows": np.array([len(ids) - 1]),
            }
            out = self._interpreter.run("draft", {**given, **memory})
            memory = {name: out.pop(name) for name in memory}
            length += len(ids)
            ids = out["proposals"][0]
            made.append(out)
        return {name: np.concatenate([out[name] for out in made], axis=1) for name in made[0]}


def check_engine(directory: Path, artifact: Mapping[str, Any], golden: bytes) -> tuple[Check, ...]:
    """Open the engine of an unfinished bundle and compare it with the golden rows.

    Returns:
        The comparisons, all passed.

    Raises:
        MismatchError: Numbers differ by more than the tolerance.
    """
    engine = OrtEngine(_Directory(directory), artifact, num_threads=None, progress=None)
    try:
        proposer = proposer_of(artifact)
        result = compare_golden(engine, read_golden(golden), proposer=proposer)
        result.raise_if_failed()
        return result.checks
    finally:
        engine.close()


class _Directory:
    """The files of a bundle that has no manifest yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, relative: str) -> Path:
        """Path of a file."""
        return self.path / relative


def section(module: Module, key: str) -> dict[str, Json]:
    """A part of a module's metadata."""
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
