"""Images and text through transformers itself: pixels, positions, features, embeddings, logits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgecc.backends.runtime.image_config import ImageConfig
from edgecc.backends.runtime.image_prompt import ImagePrompt, expand
from edgecc.backends.runtime.images import PreparedImage, prepare
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.ir.interpreter import Interpreter
from edgecc.roles import Role
from helpers.checkpoints import Array, write_draft
from helpers.hybrid import FULL, LINEAR, HybridSizes
from helpers.vision import IMAGE, VisionSizes, write_vision_target

Image = pytest.importorskip("PIL.Image")
transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

TOLERANCE = 1e-4
"""Relative. Transformers computes in float32, in which a whole hybrid model is that uncertain."""

SIZES = [(24, 40), (100, 23), (31, 200), (1, 1), (9, 300), (257, 255), (16, 16)]
PROMPT = [3, IMAGE, 141, 59, IMAGE, 26, IMAGE, IMAGE, 53, IMAGE, 58, IMAGE, 97, IMAGE]


@dataclass(frozen=True)
class Both:
    """One checkpoint in edgecc and in transformers, and what each makes of the same images."""

    path: Path
    interpreter: Interpreter
    prompt: ImagePrompt
    prepared: list[PreparedImage]
    model: Any
    pixels: Any
    grids: Any


def pictures() -> list[Any]:
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in SIZES]
    return [Image.fromarray(pixels) for pixels in noise]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    kinds = (LINEAR, FULL, LINEAR)
    folder = tmp_path_factory.mktemp("transformers")
    path = write_vision_target(
        folder / "t", VisionSizes(depth=3, heads=3), HybridSizes(layer_types=kinds)
    )
    draft = write_draft(
        folder / "d", hidden=32, layers=1, target_layers=len(kinds), target_layer_ids=(-1,)
    )
    module = lift(path, draft, LiftOptions(max_model_len=400, components="all"))
    config = ImageConfig.from_metadata(module.metadata["vision"])  # type: ignore[arg-type]
    prepared = prepare(pictures(), config)
    prompt = expand(PROMPT, [image.grid for image in prepared], config)
    name = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
    processors = pytest.importorskip(name)
    processor = processors.Qwen2VLImageProcessorPil.from_pretrained(path)
    found = processor(images=pictures(), return_tensors="pt")
    model = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(path, dtype="float32")
    return Both(
        path,
        Interpreter(module, np.float64),
        prompt,
        prepared,
        model.eval(),
        found["pixel_values"],
        found["image_grid_thw"],
    )


def relative(found: Array, expected: Array) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def features(both: Both) -> list[Array]:
    names = {i.role: i.name for i in both.interpreter.module.graphs["vision"].inputs}
    return [
        both.interpreter.run("vision", {names[r]: a for r, a in image.inputs.items()})[
            "image_features"
        ][0]
        for image in both.prepared
    ]


def test_pixels_and_grids_are_equal(both: Both) -> None:
    """Bit for bit."""
    grids = [[1, image.grid.rows, image.grid.columns] for image in both.prepared]
    assert grids == both.grids.tolist()
    found = np.concatenate([image.pixel_values[0] for image in both.prepared])
    assert found.tobytes() == both.pixels.numpy().tobytes()


def test_transparency_and_palettes(both: Both) -> None:
    rng = np.random.default_rng(1)
    clear = Image.fromarray(rng.integers(0, 256, (24, 24, 4), dtype=np.uint8))
    images = [clear, clear.convert("LA"), pictures()[0].convert("P"), pictures()[0].convert("L")]
    images.append(pictures()[0].convert("P"))
    images[-1].info["transparency"] = 7
    config = ImageConfig.from_metadata(both.interpreter.module.metadata["vision"])  # type: ignore[arg-type]
    name = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
    processor = pytest.importorskip(name).Qwen2VLImageProcessorPil.from_pretrained(both.path)
    for image, ours in zip(images, prepare(images, config), strict=True):
        expected = processor(images=[image], return_tensors="np")["pixel_values"]
        assert ours.pixel_values[0].tobytes() == expected.tobytes()


def test_inputs_of_the_tower_are_equal(both: Both) -> None:
    """Positions; neighbours among the learned embeddings, and their weights bit for bit."""
    from transformers import vision_utils

    side, merge = 5, 2
    ids, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        both.grids, side, "bilinear", align_corners=True, spatial_merge_size=merge
    )
    places = vision_utils.get_vision_position_ids(both.grids, merge)
    joined = [
        np.concatenate([getattr(image, name) for image in both.prepared], axis=axis)
        for name, axis in (("interpolation_ids", 1), ("interpolation_weights", 1), ("positions", 2))
    ]
    assert np.array_equal(joined[2][:, 0], places.numpy().T)
    # Where a weight is zero, which embedding it belongs to is of no account.
    assert joined[1][0].tobytes() == weights.numpy().astype(np.float32).tobytes()
    used = joined[1][0] != 0
    assert np.array_equal(joined[0][0][used], ids.numpy()[used])


def test_positions_of_the_prompt_are_equal(both: Both) -> None:
    """But for images side by side, of which the reference knows the first only."""
    ids = [i for k, i in enumerate(PROMPT) if k != 7]
    grids = [image.grid for k, image in enumerate(both.prepared) if k != 3]
    config = ImageConfig.from_metadata(both.interpreter.module.metadata["vision"])  # type: ignore[arg-type]
    prompt = expand(ids, grids, config)
    tokens = torch.tensor(prompt.token_ids)[None]
    kept = both.grids[[k for k in range(len(both.grids)) if k != 3]]
    positions, delta = both.model.model.get_rope_index(tokens, (tokens == IMAGE).int(), kept)
    assert np.array_equal(prompt.positions, positions[:, 0].numpy())
    assert prompt.delta == delta.item()


def test_features_of_the_tower(both: Both) -> None:
    with torch.no_grad():
        out = both.model.model.get_image_features(both.pixels, both.grids, return_dict=True)
    for found, expected in zip(features(both), out.pooler_output, strict=True):
        assert relative(found, expected.numpy()) < TOLERANCE


def test_embeddings_and_logits(both: Both) -> None:
    prompt, graph = both.prompt, both.interpreter.module.graphs["target"]
    count = len(prompt.token_ids)
    memory = {
        i.name: np.zeros((1, *i.value.type.shape[1:]))
        for role in (Role.KV_CACHE, Role.STATE)
        for i in graph.by_role(role)
    }
    out = both.interpreter.run(
        "target",
        {
            "token_ids": prompt.token_ids[None],
            "cache_length": np.array([0]),
            "logit_rows": np.arange(count),
            "positions": prompt.positions[:, None],
            "image_features": np.concatenate(features(both))[None],
            "image_rows": prompt.feature_rows[None],
            **memory,
        },
    )
    with torch.no_grad():
        expected = both.model(
            input_ids=torch.tensor(prompt.token_ids)[None],
            position_ids=torch.tensor(prompt.positions)[:, None],
            pixel_values=both.pixels,
            image_grid_thw=both.grids,
            output_hidden_states=True,
        )
    embeddings = expected.hidden_states[0][0].numpy()
    assert relative(out["hidden_tap"][0], embeddings) < TOLERANCE
    assert relative(out["logits"][0], expected.logits[0].numpy()) < TOLERANCE
