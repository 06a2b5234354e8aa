"""The vision tower of Qwen3.5 and the language model that reads it, against float64 decoders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgecc.backends.runtime.image_config import PREPROCESSING, ImageConfig
from edgecc.backends.runtime.image_grid import Grid, interpolation, patches
from edgecc.backends.runtime.image_prompt import ImagePrompt, expand
from edgecc.errors import EdgeccError, InputError, UnsupportedError, UsageError
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.ir import parse_module, print_module
from edgecc.ir.compare import equal
from edgecc.ir.interpreter import Interpreter
from edgecc.ir.verifier import verify
from edgecc.ir_source import lift_options_of
from edgecc.roles import Role
from helpers.checkpoints import Array, Tensors, edit_tensors, write_draft
from helpers.hybrid import FULL, LINEAR, HybridSizes, write_hybrid_target
from helpers.vision import END, IMAGE, START, VisionSizes, write_vision_target
from helpers.vision_reference import MultimodalTarget, Tower

TOLERANCE = 2e-6
"""Relative. Rotary tables, angles and interpolation are float32; the rest is float64."""

ALL = LiftOptions(max_model_len=96, components="all")


def close(found: Array, expected: Array) -> bool:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max()) <= TOLERANCE * float(np.abs(expected).max())


class Images:
    """A lifted multimodal target in the interpreter."""

    def __init__(self, path: Path, options: LiftOptions = ALL) -> None:
        self.module = lift(path, None, options)
        self.config = ImageConfig.from_metadata(self.module.metadata["vision"])  # type: ignore[arg-type]
        self.interpreter = Interpreter(self.module, np.float64)

    def grid(self, rows: int, columns: int) -> Grid:
        return Grid(rows, columns, self.config.merge_size)

    def pixels(self, grid: Grid, seed: int = 0) -> Array:
        size = self.config.patch_size
        shape = (grid.rows * size, grid.columns * size, 3)
        return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)

    def features(self, pixels: Array, grid: Grid) -> Array:
        ids, factors = interpolation(grid, self.config.grid_size)
        inputs = {
            "pixel_values": patches(pixels, grid, self.config)[None],
            "positions": grid.places()[:, None],
            "interpolation_ids": ids[None],
            "interpolation_weights": factors[None],
        }
        return self.interpreter.run("vision", inputs)["image_features"][0]

    def logits(self, prompt: ImagePrompt, features: Array, chunk: int = 99) -> Array:
        """Logits of all tokens, read in chunks."""
        memory = {
            i.name: np.zeros((1, *i.value.type.shape[1:]))
            for role in (Role.KV_CACHE, Role.STATE)
            for i in self.module.graphs["target"].by_role(role)
        }
        rows = []
        for first in range(0, len(prompt.token_ids), chunk):
            ids = prompt.token_ids[first : first + chunk]
            out = self.interpreter.run(
                "target",
                {
                    "token_ids": ids[None],
                    "cache_length": np.array([first]),
                    "logit_rows": np.arange(len(ids)),
                    "positions": prompt.positions_from(first, len(ids))[:, None],
                    "image_features": features[None],
                    "image_rows": prompt.rows_from(first, len(ids))[None],
                    **memory,
                },
            )
            memory = {name: out[name] for name in memory}
            rows.append(out["logits"][0])
        return np.concatenate(rows)


SIZES: Mapping[str, VisionSizes] = {
    "default": VisionSizes(),
    "one block, one head": VisionSizes(depth=1, heads=1),
    "blocks of nine patches": VisionSizes(merge=3, grid=3),
    "no merging": VisionSizes(merge=1, frames=1),
    "one position embedding": VisionSizes(grid=1),
    "a fine grid": VisionSizes(grid=12),
}


@pytest.mark.parametrize("name", SIZES)
def test_features(tmp_path: Path, name: str) -> None:
    path = write_vision_target(tmp_path / "t", SIZES[name])
    images, merge = Images(path), SIZES[name].merge
    for rows, columns in ((merge, merge), (2 * merge, 3 * merge), (5 * merge, merge)):
        grid = images.grid(rows, columns)
        pixels = images.pixels(grid)
        expected = Tower(path).features(pixels.astype(np.float64))
        assert close(images.features(pixels, grid), expected)


@settings(max_examples=8)
@given(rows=st.integers(1, 6), columns=st.integers(1, 6), seed=st.integers(0, 9))
def test_features_of_any_shape(
    rows: int, columns: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any") / "t"
    images = Images(write_vision_target(path, VisionSizes(depth=1), seed=seed))
    grid = images.grid(2 * rows, 2 * columns)
    pixels = images.pixels(grid, seed)
    assert close(images.features(pixels, grid), Tower(path).features(pixels.astype(np.float64)))


def test_names_without_the_model_prefix(tmp_path: Path) -> None:
    plain, other = (
        Images(write_vision_target(tmp_path / str(i), prefix=prefix))
        for i, prefix in enumerate(("model.visual.", "visual."))
    )
    grid = plain.grid(4, 2)
    pixels = plain.pixels(grid)
    assert np.array_equal(plain.features(pixels, grid), other.features(pixels, grid))


PROMPT = [3, 141, IMAGE, 59, 26, IMAGE, 53]
KINDS: Mapping[str, tuple[str, ...]] = {
    "both kinds": (LINEAR, FULL),
    "attention": (FULL, FULL),
}


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("chunk", [99, 5, 1])
def test_logits_of_text_with_images(tmp_path: Path, kinds: str, chunk: int) -> None:
    """Positions, rows replaced and the rotation by three axes, in one call and in several."""
    path = write_vision_target(tmp_path / "t", None, HybridSizes(layer_types=KINDS[kinds]))
    images = Images(path)
    grids = [images.grid(4, 6), images.grid(6, 2)]
    pixels = [images.pixels(g, i) for i, g in enumerate(grids)]
    features = np.concatenate([images.features(p, g) for p, g in zip(pixels, grids, strict=True)])
    prompt = expand(PROMPT, grids, images.config)
    tower = Tower(path)
    wanted = np.concatenate([tower.features(p.astype(np.float64)) for p in pixels])
    # 2 text tokens, 2 x 3 image tokens, 2 text, 3 x 1 image, 1 text.
    ids = [3, 141, *[IMAGE] * 6, 59, 26, *[IMAGE] * 3, 53]
    time = [0, 1, *[2] * 6, 5, 6, *[7] * 3, 10]
    row = [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10]
    column = [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, *[7] * 3, 10]
    places = dict(zip([2, 3, 4, 5, 6, 7, 10, 11, 12], wanted, strict=True))
    expected = MultimodalTarget(path).run_at(ids, np.array([time, row, column]), places).logits
    assert prompt.token_ids.tolist() == ids
    assert close(images.logits(prompt, features, chunk), expected)


def test_text_has_the_logits_of_the_graph_for_text(tmp_path: Path) -> None:
    """Bit for bit: the three positions are equal, and no row is replaced."""
    path = write_vision_target(tmp_path / "t", None, HybridSizes(layer_types=(LINEAR, FULL)))
    images, ids = Images(path), [3, 141, 59, 26]
    garbage = np.full((1, 32), np.nan)
    found = images.logits(expand(ids, [], images.config), garbage)
    module = lift(path, None, LiftOptions(max_model_len=96))
    memory = {
        i.name: np.zeros((1, *i.value.type.shape[1:]))
        for role in (Role.KV_CACHE, Role.STATE)
        for i in module.graphs["target"].by_role(role)
    }
    inputs = {"token_ids": np.array([ids]), "cache_length": np.array([0])}
    expected = Interpreter(module, np.float64).run(
        "target", {**inputs, "logit_rows": np.arange(4), **memory}
    )
    assert np.array_equal(found, expected["logits"][0])


def test_the_text_graph_stays_as_it_is(tmp_path: Path) -> None:
    path = write_vision_target(tmp_path / "t")
    module = lift(path)
    assert list(module.graphs) == ["target"]
    assert [i.name for i in module.graphs["target"].inputs[:3]] == [
        "token_ids",
        "cache_length",
        "logit_rows",
    ]
    assert "vision" not in module.metadata
    assert any("vision tower (" in d and "is left out" in d for d in module.decisions)
    assert "the bundle reads text only; images take --components all" in module.decisions


def test_the_module(tmp_path: Path) -> None:
    """What is recorded, and that it survives as text; packed layers stay packed."""
    module = lift(write_vision_target(tmp_path / "t", mixed=True), None, ALL)
    assert verify(module) == []
    text = print_module(module)
    assert equal(parse_module(text), module)
    assert module.metadata["vision"] == {
        "preprocessing": PREPROCESSING,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "grid_size": 5,
        "min_pixels": 256,
        "max_pixels": 4096,
        "image_mean": [0.5, 0.45, 0.4],
        "image_std": [0.5, 0.25, 0.3],
        "max_image_tokens": 64,
        "feature_size": 32,
        "image_token_id": IMAGE,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
    }
    assert str(module.symbols["m"]) == "1..64"
    assert not any("vision tower (" in d for d in module.decisions)
    left = "only the language model and the vision tower are built"
    assert any("multi-token-prediction" in d and left in d for d in module.decisions)
    assert lift_options_of(module).components == "all"


def test_images_are_as_large_as_prompts_allow(tmp_path: Path) -> None:
    path = write_vision_target(tmp_path / "t")
    options = LiftOptions(max_model_len=96, max_input_len=20, components="all")
    module = lift(path, None, options)
    assert str(module.symbols["m"]) == "1..20"
    assert module.metadata["vision"]["max_image_tokens"] == 20  # type: ignore[index, call-overload]


def test_targets_without_a_tower_read_text(tmp_path: Path) -> None:
    module = lift(write_hybrid_target(tmp_path / "t"), None, ALL)
    assert list(module.graphs) == ["target"]
    assert "the target has no vision tower: it reads text only" in module.decisions


# Checkpoints that are refused


def refused(path: Path, kind: type[EdgeccError], options: LiftOptions = ALL) -> EdgeccError:
    with pytest.raises(kind) as caught:
        lift(path, None, options)
    assert type(caught.value) is kind
    return caught.value


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        ({"vision_config": None}, "vision_config", "tensors of a vision tower are stored"),
        ({"vision_config": []}, "vision_config", "an object"),
        ({"vision": {"depth": None}}, "vision_config.depth", "is missing"),
        ({"vision": {"depth": "2"}}, "vision_config.depth", "an integer"),
        ({"vision": {"num_heads": 5}}, "vision_config.num_heads", "divides 24 into heads"),
        ({"vision": {"num_heads": 12}}, "vision_config.num_heads", "heads of 4, 8, 12"),
        ({"vision": {"out_hidden_size": 31}}, "vision_config.out_hidden_size", "the 32 of"),
        ({"vision": {"num_position_embeddings": 26}}, "vision_config.num_position", "a square"),
        ({"vision": {"in_channels": 1}}, "vision_config.in_channels", "RGB"),
        ({"vision": {"patch_size": [4, 4]}}, "vision_config.patch_size", "an integer"),
        ({"image_token_id": None}, "image_token_id", "is missing"),
        ({"image_token_id": 99999}, "image_token_id", "below vocab_size 288"),
        ({"vision_end_token_id": -1}, "vision_end_token_id", "an integer of at least 0"),
    ],
)
def test_bad_configs(tmp_path: Path, change: dict[str, Any], key: str, words: str) -> None:
    finding = refused(write_vision_target(tmp_path / "t", **change), InputError).diagnostics[0]
    assert finding.where.startswith(f"target/config.json: {key}")
    assert words in finding.message


@pytest.mark.parametrize(
    ("change", "id_", "where"),
    [
        ({"vision": {"hidden_act": "relu"}}, "vision/activation", "hidden_act"),
        ({"vision": {"deepstack_visual_indexes": [1]}}, "vision/deepstack", "deepstack"),
        ({"processor": {"do_resize": False}}, "vision/processor", "do_resize"),
        ({"processor": {"do_normalize": False}}, "vision/processor", "do_normalize"),
        ({"processor": {"resample": 2}}, "vision/resample", "resample"),
    ],
)
def test_variants_without_a_frontend(
    tmp_path: Path, change: dict[str, Any], id_: str, where: str
) -> None:
    error = refused(write_vision_target(tmp_path / "t", **change), UnsupportedError)
    assert error.id == id_
    assert where in error.diagnostics[0].where


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        ({"patch_size": 16}, "patch_size", "the 4 of target/config.json: vision_config"),
        ({"merge_size": 4}, "merge_size", "the 2 of"),
        ({"temporal_patch_size": 1}, "temporal_patch_size", "the 2 of"),
        ({"size": None}, "shortest_edge", "is missing"),
        ({"size": {"shortest_edge": 9, "longest_edge": 8}}, "size.longest_edge", "at least the 9"),
        ({"size": 224}, "size", "an object"),
        ({"image_mean": [0.5, 0.5]}, "image_mean", "a list of three numbers"),
        ({"image_std": [0.5, 0.5, 0]}, "image_std", "positive number"),
        ({"rescale_factor": 1.0}, "rescale_factor", "1/255"),
    ],
)
def test_bad_processors(tmp_path: Path, change: dict[str, Any], key: str, words: str) -> None:
    path = write_vision_target(tmp_path / "t", processor=change)
    finding = refused(path, InputError).diagnostics[0]
    assert finding.where.startswith(f"target/preprocessor_config.json: {key}")
    assert words in finding.message


def test_older_and_newer_spellings_of_the_processor(tmp_path: Path) -> None:
    path = write_vision_target(
        tmp_path / "t", processor={"min_pixels": 64, "max_pixels": 2048, "size": None}
    )
    first = lift(path, None, ALL).metadata["vision"]
    text = (path / "preprocessor_config.json").read_text("utf-8")
    (path / "preprocessor_config.json").unlink()
    (path / "processor_config.json").write_text(f'{{"image_processor": {text}}}', "utf-8")
    second = lift(path, None, ALL).metadata["vision"]
    assert first == second
    assert (first["min_pixels"], first["max_pixels"]) == (64, 2048)  # type: ignore[index, call-overload]


def test_without_a_processor(tmp_path: Path) -> None:
    path = write_vision_target(tmp_path / "t")
    (path / "preprocessor_config.json").unlink()
    error = refused(path, InputError)
    assert error.id == "vision/no-processor"
    assert "--components text" in error.diagnostics[0].help
    assert list(lift(path).graphs) == ["target"]  # text needs none


def test_prompts_that_hold_no_image(tmp_path: Path) -> None:
    path = write_vision_target(tmp_path / "t")
    options = LiftOptions(max_model_len=96, max_input_len=3, components="all")
    error = refused(path, InputError, options)
    assert error.id == "vision/too-small"
    assert "has 4 tokens, but at most 3 fit" in str(error)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("patch_embed.proj.weight", (24, 3, 1, 4, 4), "[24, 3, 2, 4, 4]"),
        ("blocks.1.norm2.bias", (23,), "[24]"),
        ("merger.linear_fc1.bias", (24,), "[96]"),
    ],
)
def test_misshapen_tensors(tmp_path: Path, name: str, shape: tuple[int, ...], words: str) -> None:
    def change(tensors: Tensors) -> None:
        old = tensors[f"model.visual.{name}"]
        tensors[f"model.visual.{name}"] = np.zeros(shape, old.dtype)

    path = edit_tensors(write_vision_target(tmp_path / "t"), change)
    error = refused(path, InputError)
    assert error.id == "checkpoint/shape"
    assert words in str(error)
    assert f"model.visual.{name}" in error.diagnostics[0].where


def test_missing_tensors(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["model.visual.blocks.1.attn.proj.weight"]

    error = refused(edit_tensors(write_vision_target(tmp_path / "t"), change), InputError)
    assert "model.visual.blocks.1.attn.proj.weight" in str(error)


def test_tensors_the_tower_does_not_have(tmp_path: Path) -> None:
    """A deepstack merger, for example, would change the results."""
    name = "model.visual.deepstack_merger_list.0.norm.bias"

    def change(tensors: Tensors) -> None:
        tensors[name] = tensors["model.visual.merger.norm.bias"]

    path = edit_tensors(write_vision_target(tmp_path / "t"), change)
    error = refused(path, UnsupportedError)
    assert error.id == "checkpoint/unread-parameter"
    assert name in error.diagnostics[0].where
    lift(path)  # text does not need it


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ("vison", "'vison' is no part"),
        ("", "'' is no part"),
        ("target,", "'' is no part"),
        ("target,all", "'all' is no part"),
        ("target,target", "'target' is there twice"),
        ("vision", "of no use without its target"),
        ("draft,vision", "of no use without its target"),
        ("target,draft", "lists a draft, and none is given"),
        ("draft", "leaves out the target, which is given"),
    ],
)
def test_other_components(tmp_path: Path, components: str, message: str) -> None:
    path = write_hybrid_target(tmp_path / "t")
    error = refused(path, UsageError, LiftOptions(components=components))
    assert error.id == "usage/components"
    assert message in str(error)


def test_listed_components(tmp_path: Path) -> None:
    """A list takes what it names, no more and no less."""
    path = write_vision_target(tmp_path / "t")
    draft = write_draft(tmp_path / "d", hidden=32, target_layer_ids=(0,))

    def graphs(components: str, *paths: Path | None) -> set[str]:
        return set(lift(*paths, LiftOptions(max_model_len=96, components=components)).graphs)

    assert graphs("target", path, None) == {"target"}
    assert graphs("vision, target", path, None) == {"target", "vision"}
    assert graphs("target,draft,vision", path, draft) == {"target", "draft", "vision"}
    assert graphs("target,draft", path, draft) == {"target", "draft"}
    assert graphs("draft", None, draft) == {"draft"}
    with pytest.raises(UsageError, match="leaves out the draft"):
        graphs("target,vision", path, draft)


def test_a_listed_tower_that_is_not_there(tmp_path: Path) -> None:
    path = write_hybrid_target(tmp_path / "t")
    error = refused(path, InputError, LiftOptions(components="target,vision"))
    assert error.id == "vision/no-tower"


def test_a_rotation_without_interleaved_axes(tmp_path: Path) -> None:
    path = write_vision_target(tmp_path / "t")
    config = path / "config.json"
    text = config.read_text("utf-8")
    config.write_text(text.replace('interleaved": true', 'interleaved": false'), "utf-8")
    assert refused(path, UnsupportedError).id == "rope/sections"
    lift(path)  # in text the axes do not matter
