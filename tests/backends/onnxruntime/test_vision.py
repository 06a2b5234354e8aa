"""A vision tower and a language model that reads it, through the default pipeline on the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgecc.backends.onnxruntime import OrtEngine
from edgecc.backends.runtime.image_config import ImageConfig
from edgecc.backends.runtime.image_grid import Grid, interpolation, patches
from edgecc.backends.runtime.image_prompt import expand
from edgecc.devices import ONNX_DEVICES, get_device
from edgecc.errors import RequestError
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.passes.base import PassContext
from edgecc.passes.default import default_pipeline
from edgecc.passes.manager import PassManager
from edgecc.roles import Role
from helpers.checkpoints import Array
from helpers.hybrid import FULL, HybridSizes
from helpers.lowering import Files, lower_onnx
from helpers.vision import IMAGE, VisionSizes, write_vision_target
from helpers.vision_reference import MultimodalTarget, Tower

TOLERANCE = 2e-5
"""Relative, of float32."""


class Engine:
    """A compiled multimodal target without recurrent layers."""

    def __init__(self, device: str, folder: Path) -> None:
        text = HybridSizes(layer_types=(FULL, FULL), heads=4, head_dim=32, sections=(3, 3, 2))
        self.path = write_vision_target(folder / "t", VisionSizes(heads=3), text)
        module = lift(self.path, None, LiftOptions(max_model_len=96, components="all"))
        self.config = ImageConfig.from_metadata(module.metadata["vision"])  # type: ignore[arg-type]
        record = get_device(device)
        PassManager(default_pipeline(record)).run(module, PassContext(record))
        (folder / "bundle").mkdir()
        artifact, _ = lower_onnx(module, record, folder / "bundle")
        self.engine = OrtEngine(
            Files(folder / "bundle"), artifact.manifest, num_threads=1, progress=None
        )

    def image(self, rows: int, columns: int, seed: int = 0) -> tuple[Grid, Array]:
        grid, size = Grid(rows, columns, 2), self.config.patch_size
        shape = (rows * size, columns * size, 3)
        return grid, np.random.default_rng(seed).standard_normal(shape).astype(np.float32)

    def inputs(self, grid: Grid, pixels: Array) -> dict[Role, Array]:
        ids, factors = interpolation(grid, self.config.grid_size)
        return {
            Role.PIXEL_VALUES: np.ascontiguousarray(patches(pixels, grid, self.config)[None]),
            Role.POSITIONS: grid.places()[:, None],
            Role.INTERPOLATION_IDS: ids[None],
            Role.INTERPOLATION_WEIGHTS: factors[None],
        }

    def features(self, grid: Grid, pixels: Array) -> Array:
        entry = self.engine.entry("vision")
        out = entry.run(self.inputs(grid, pixels), [Role.IMAGE_FEATURES])
        return out[Role.IMAGE_FEATURES][0].copy()


@pytest.fixture(scope="module", params=sorted(ONNX_DEVICES))
def engine(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(request.param, tmp_path_factory.mktemp(f"vision-{request.param}"))


def relative(found: Array, expected: Array) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("shape", [(2, 2), (4, 6), (2, 30), (14, 2), (8, 8)])
def test_one_graph_for_all_sizes(engine: Engine, shape: tuple[int, int]) -> None:
    grid, pixels = engine.image(*shape)
    expected = Tower(engine.path).features(pixels.astype(np.float64))
    assert relative(engine.features(grid, pixels), expected) < TOLERANCE


@pytest.mark.parametrize("chunk", [99, 4, 1])
def test_logits_of_text_with_images(engine: Engine, chunk: int) -> None:
    """In one call, in several, and token by token, where engines pad the rows."""
    images = [engine.image(4, 6), engine.image(2, 4, seed=1)]
    features = np.concatenate([engine.features(*image) for image in images])
    prompt = expand([3, IMAGE, 141, 59, IMAGE, 26], [grid for grid, _ in images], engine.config)
    entry, count, rows = engine.engine.entry("target"), len(prompt.token_ids), []
    for first in range(0, count, chunk):
        ids = prompt.token_ids[first : first + chunk]
        out = entry.run(
            {
                Role.TOKEN_IDS: ids[None],
                Role.CACHE_LENGTH: np.array([first]),
                Role.LOGIT_ROWS: np.arange(len(ids)),
                **prompt.inputs_from(first, len(ids), features),
            },
            [Role.LOGITS],
        )
        rows.append(out[Role.LOGITS][0].copy())
    tower = Tower(engine.path)
    wanted = np.concatenate([tower.features(p.astype(np.float64)) for _, p in images])
    places = np.flatnonzero(prompt.feature_rows >= 0).tolist()
    expected = MultimodalTarget(engine.path).run_at(
        prompt.token_ids.tolist(), prompt.positions, dict(zip(places, wanted, strict=True))
    )
    assert relative(np.concatenate(rows), expected.logits) < TOLERANCE


def test_calls_of_the_wrong_shape_are_refused(engine: Engine) -> None:
    inputs = engine.inputs(*engine.image(4, 6))
    cut = {**inputs, Role.POSITIONS: inputs[Role.POSITIONS][:, :, :-1]}
    with pytest.raises(RequestError) as caught:
        engine.engine.entry("vision").run(cut, [Role.IMAGE_FEATURES])
    assert caught.value.id == "run/shape"
