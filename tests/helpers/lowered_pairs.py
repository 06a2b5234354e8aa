"""Pairs lowered to a folder without a bundle around it, and the interpreter's view of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgecc.backends.interface import CARRIED
from edgecc.backends.onnxruntime import OrtEngine, open_engine
from edgecc.devices import get_device
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.ir import Interpreter, Module
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.passes.default import default_pipeline
from edgecc.passes.manager import PassManager
from edgecc.roles import Role
from helpers.checkpoints import write_draft, write_target
from helpers.lowering import Files, lower_onnx

Array: TypeAlias = NDArray[Any]

PAIRS: Final = Path(__file__).parents[1] / "data" / "pairs"
REAL_TARGET: Final = PAIRS / "tiny-qwen3-nvfp4"
REAL_DRAFT: Final = PAIRS / "tiny-qwen3-dspark"

FORMS: Final = {
    "cpu-dense": ("cpu", "dense"),
    "cpu-int8-split": ("cpu", "int8-split"),
    "onnx-dense": ("onnx", "dense"),
}
"""Device and form of linear layers of every way a pair is lowered."""


class LoweredPair:
    """Models and weight file of a target, alone or with its draft.

    Args:
        folder: Where to write.
        target: Checkpoint.
        draft: Checkpoint, or None.
        device: Compile target.
        form: Of quantized linear layers.
        max_model_len: Tokens of a sequence.
        draft_outputs: Keep the draft's logits and confidences.

    Attributes:
        module: After the passes.
        reference: As lifted, only bound.
        tolerance: Of results against the interpreter, relative to the largest.
    """

    def __init__(
        self,
        folder: Path,
        target: Path,
        draft: Path | None = None,
        *,
        device: str = "cpu",
        form: str = "dense",
        max_model_len: int = 96,
        draft_outputs: bool = True,
    ) -> None:
        self.folder = folder
        self.tolerance = 2e-3 if form == "int8-split" else 2e-5
        folder.mkdir(parents=True, exist_ok=True)
        options = LiftOptions(max_model_len=max_model_len)
        record = get_device(device)
        module = lift(target, draft, options)
        passes = default_pipeline(record, keep_draft_logits=draft_outputs, linear_form=form)
        PassManager(passes).run(module, PassContext(record))
        self.module = module
        self.artifact, self.weights = lower_onnx(module, record, folder)
        self.reference: Module = lift(target, draft, options)
        BindSharedWeights().run(self.reference, PassContext())

    def engine(self, threads: int = 1) -> OrtEngine:
        """The real engine."""
        return open_engine(Files(self.folder), self.artifact.manifest, num_threads=threads)


def write_pair(folder: Path, **sizes: Any) -> tuple[Path, Path]:
    """A synthetic pair; sizes go to `write_target`, those a draft has as well to `write_draft`.

    Returns:
        Folders of target and draft.
    """
    shared = ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
    target = write_target(folder / "target", **sizes)
    draft_sizes = {k: v for k, v in sizes.items() if k in shared}
    layers = int(sizes.get("layers", 4))
    draft = write_draft(
        folder / "draft",
        target_layers=layers,
        target_layer_ids=sorted({0, layers - 1}),
        mask_token_id=int(sizes.get("vocab", 288)) - 1,
        **draft_sizes,
    )
    return target, draft


def target_inputs(
    ids: Iterable[int], start: int, rows: Iterable[int] | None = None
) -> dict[Role, Array]:
    """Inputs of a target call; all rows get logits unless some are named."""
    tokens = np.array([list(ids)], dtype=np.int64)
    wanted = range(tokens.shape[1]) if rows is None else rows
    return {
        Role.TOKEN_IDS: tokens,
        Role.CACHE_LENGTH: np.array([start], dtype=np.int64),
        Role.LOGIT_ROWS: np.array(list(wanted), dtype=np.int64),
    }


def draft_inputs(features: Array, anchor: int, start: int) -> dict[Role, Array]:
    """Inputs of a draft call: features `[c, n*H]` of the positions from `start` on."""
    return {
        Role.FEATURES: np.ascontiguousarray(features[None], dtype=np.float32),
        Role.ANCHOR: np.array([anchor], dtype=np.int64),
        Role.CACHE_LENGTH: np.array([start], dtype=np.int64),
    }


class Reference:
    """An entry evaluated by the interpreter; caches, states and logs stay from call to call."""

    def __init__(self, module: Module, entry: str) -> None:
        self.interpreter = Interpreter(module)
        self.graph = module.graphs[entry]
        self.caches = {
            item.name: np.zeros([1, *map(int, map(str, item.value.type.shape[1:]))], np.float32)
            for item in self.graph.inputs
            if item.role in CARRIED
        }

    def run(self, inputs: Mapping[Role, Array]) -> dict[Role, Array]:
        """Every output by role; caches are updated."""
        names = {i.role: i.name for i in self.graph.inputs}
        named = {names[role]: array for role, array in inputs.items()}
        results = self.interpreter.run(self.graph.name, {**named, **self.caches})
        self.caches = {name: results[name] for name in self.caches}
        return {o.role: results[o.name] for o in self.graph.outputs if o.role not in CARRIED}
