"""Sizes, the order of patches, interpolation, and prompts with images: no Pillow needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.base import Role
from edgecc.backends.runtime.image_config import ImageConfig
from edgecc.backends.runtime.image_grid import (
    Grid,
    fitted_size,
    interpolation,
    normalized,
    patches,
)
from edgecc.backends.runtime.image_prompt import expand
from edgecc.errors import RequestError

CONFIG = ImageConfig(
    patch_size=16,
    temporal_patch_size=2,
    merge_size=2,
    grid_size=48,
    min_pixels=65536,
    max_pixels=16777216,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    max_tokens=16384,
    feature_size=8,
    image_token_id=9,
)
"""Values of Qwen3.8-27B."""


@pytest.mark.parametrize(
    ("size", "fitted", "tokens"),
    [
        ((480, 640), (480, 640), 300),
        ((100, 60), (352, 224), 77),
        ((1080, 1920), (1088, 1920), 2040),
        ((255, 257), (256, 256), 64),
        ((16, 16), (256, 256), 64),
        ((1, 1), (256, 256), 64),
        ((48, 4800), (64, 4800), 300),
        ((5000, 8000), (3232, 5152), 16261),
        ((272, 272), (256, 256), 64),  # 8.5 blocks: ties round to even
        ((304, 304), (320, 320), 100),  # 9.5
        ((30, 6000), (32, 6016), 188),
    ],
)
def test_sizes_of_transformers(size: tuple[int, int], fitted: tuple[int, int], tokens: int) -> None:
    found = fitted_size(*size, CONFIG, "here")
    assert found == fitted
    assert Grid(found[0] // 16, found[1] // 16, 2).tokens == tokens


@given(st.integers(1, 9000), st.integers(1, 9000))
def test_sizes_fit_the_tower(height: int, width: int) -> None:
    """Multiples of a token's pixels; within the limits, but for the rounding of very thin ones."""
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(RequestError) as caught:
            fitted_size(height, width, CONFIG, "cat.png")
        assert caught.value.id == "image/aspect-ratio"
        assert caught.value.diagnostics[0].where == "cat.png"
        return
    found = fitted_size(height, width, CONFIG, "")
    assert all(side > 0 and side % 32 == 0 for side in found)
    assert CONFIG.min_pixels <= found[0] * found[1] <= CONFIG.max_pixels


def test_patches_follow_each_other_block_by_block() -> None:
    rows, columns = Grid(4, 6, 2).places()
    first = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3), (0, 4), (0, 5), (1, 4)]
    later = [(1, 5), (2, 0), (2, 1), (3, 0), (3, 1)]
    found = list(zip(rows.tolist(), columns.tolist(), strict=True))
    assert found[:16] == first + later
    assert len(set(found)) == 24


def test_interpolation_of_a_known_grid() -> None:
    ids, factors = interpolation(Grid(4, 6, 2), 48)
    assert ids[1].tolist() == [9, 10, 57, 58]
    assert ids[3].tolist() == [729, 730, 777, 778]
    np.testing.assert_allclose(factors[1], [0.6, 0.4, 0, 0], atol=1e-6)
    np.testing.assert_allclose(factors[3], [0.2, 2 / 15, 0.4, 4 / 15], atol=1e-6)
    assert (ids[-1][0], factors[-1].tolist()) == (2303, [1, 0, 0, 0])


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 48))
def test_interpolation_keeps_what_is_linear(rows: int, columns: int, side: int) -> None:
    """A plane over the grid stays that plane, with its corners on the corners of the image."""
    grid = Grid(2 * rows, 2 * columns, 2)
    ids, factors = interpolation(grid, side)
    assert ids.min() >= 0
    assert ids.max() < side * side
    table = np.add.outer(3.0 * np.arange(side), np.arange(side)).reshape(-1)
    found = (table[ids] * factors).sum(axis=-1)
    row, column = grid.places() / [[2 * rows - 1], [2 * columns - 1]]
    np.testing.assert_allclose(found, (3 * row + column) * (side - 1), atol=1e-4 * side)


def test_a_patch_is_colour_frame_row_column() -> None:
    config = replace(CONFIG, patch_size=2)
    pixels = np.arange(4 * 8 * 3, dtype=np.float32).reshape(4, 8, 3)
    grid = Grid(2, 4, 2)
    found = patches(pixels, grid, config)
    assert found.shape == (8, 3 * 2 * 2 * 2)
    for patch, (row, column) in zip(found, grid.places().T, strict=True):
        piece = pixels[2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        expected = [c for colour in range(3) for _ in "ab" for c in piece[:, :, colour].ravel()]
        assert patch.tolist() == expected


def test_normalization_is_that_of_float32_steps() -> None:
    config = replace(CONFIG, mean=(0.5, 0.25, 0.4), std=(0.5, 0.3, 0.25))
    pixels = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    found = normalized(pixels, config)
    assert found.dtype == np.float32
    exact = (pixels / 255 - config.mean) / config.std
    np.testing.assert_allclose(found, exact, atol=2e-7 * 4)
    assert found[0, 0].tolist() == [
        np.float32(-m) / np.float32(s)
        for m, s in zip(map(np.float32, config.mean), config.std, strict=True)
    ]


# Prompts


def test_positions_of_a_known_prompt() -> None:
    """Three text tokens, an image of 2 x 3 tokens, two text tokens."""
    prompt = expand([1, 2, 3, 9, 4, 5], [Grid(4, 6, 2)], CONFIG)
    assert prompt.token_ids.tolist() == [1, 2, 3, *[9] * 6, 4, 5]
    assert prompt.feature_rows.tolist() == [-1, -1, -1, 0, 1, 2, 3, 4, 5, -1, -1]
    assert prompt.positions.tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7],
    ]
    assert prompt.delta == -3
    assert prompt.positions_from(9, 4).tolist() == [[6, 7, 8, 9]] * 3
    assert prompt.rows_from(7, 5).tolist() == [4, 5, -1, -1, -1]
    assert prompt.positions_from(20, 1).tolist() == [[17]] * 3
    assert prompt.rows_from(20, 2).tolist() == [-1, -1]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 99])
def test_inputs_of_the_target_in_chunks(chunk: int) -> None:
    """Each token finds the features it would find in one call; calls without images get a row."""
    prompt = expand([9, 1, 2, 9, 9, 3, 4], [Grid(2, 4, 2), Grid(2, 2, 2), Grid(4, 4, 2)], CONFIG)
    features = np.arange(7 * 3, dtype=np.float32).reshape(7, 3)
    for first in range(0, 14, chunk):
        inputs = prompt.inputs_from(first, chunk, features)
        shown, rows = inputs[Role.IMAGE_FEATURES], inputs[Role.IMAGE_ROWS]
        assert shown.dtype == np.float32
        assert shown.shape[0] == 1
        assert 1 <= shown.shape[1] <= max(chunk, 1)
        assert rows.shape == (1, chunk)
        assert rows.max() < shown.shape[1]
        whole = prompt.rows_from(first, chunk)
        for row, expected in zip(rows[0], whole, strict=True):
            assert (row < 0) == (expected < 0)
            assert row < 0 or shown[0, row].tolist() == features[expected].tolist()
        assert inputs[Role.POSITIONS].shape == (3, 1, chunk)
    none = expand([1, 2], [], CONFIG).inputs_from(0, 2, np.zeros((0, 3), np.float32))
    assert none[Role.IMAGE_FEATURES].shape == (1, 1, 3)
    assert none[Role.IMAGE_ROWS].tolist() == [[-1, -1]]
    assert none[Role.POSITIONS][:, 0].tolist() == [[0, 1]] * 3


def test_images_side_by_side_and_at_the_ends() -> None:
    prompt = expand([9, 9, 7, 9], [Grid(2, 2, 2), Grid(2, 8, 2), Grid(6, 2, 2)], CONFIG)
    assert prompt.token_ids.tolist() == [9, 9, 9, 9, 9, 7, 9, 9, 9]
    assert prompt.feature_rows.tolist() == [0, 1, 2, 3, 4, -1, 5, 6, 7]
    assert prompt.positions.tolist() == [
        [0, 1, 1, 1, 1, 5, 6, 6, 6],
        [0, 1, 1, 1, 1, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 6, 6, 6],
    ]
    assert prompt.delta == 0  # every image is one token wide or high: it takes no less room


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(1, 5), st.integers(1, 5))), max_size=9))
def test_any_prompt(parts: list[tuple[int, int] | None]) -> None:
    """Text counts on after an image; positions never pass the plain numbers of tokens."""
    grids = [Grid(2 * p[0], 2 * p[1], 2) for p in parts if p is not None]
    prompt = expand([9 if p else 1 for p in parts], grids, CONFIG)
    count = sum(g.tokens for g in grids) + parts.count(None)
    assert prompt.positions.shape == (3, count)
    assert sorted(r for r in prompt.feature_rows.tolist() if r >= 0) == list(
        range(sum(g.tokens for g in grids))
    )
    assert (prompt.positions <= np.arange(count)).all()
    assert prompt.delta <= 0
    following = prompt.positions_from(count, 1)[0, 0]
    assert following == count + prompt.delta == prompt.positions.max(initial=-1) + 1
    for first in range(count):
        part = prompt.positions_from(first, 3)
        assert part[:, : count - first].tolist() == prompt.positions[:, first : first + 3].tolist()


@pytest.mark.parametrize(
    ("ids", "images", "words"),
    [
        ([1, 2], 1, "0 image placeholders (token 9) for 1 image"),
        ([1, 9], 0, "1 image placeholder (token 9) for 0 images"),
        ([9, 9, 9], 2, "3 image placeholders (token 9) for 2 images"),
        ([], 1, "0 image placeholders"),
    ],
)
def test_each_image_needs_its_placeholder(ids: list[int], images: int, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        expand(ids, [Grid(2, 2, 2)] * images, CONFIG)
    assert caught.value.id == "image/placeholders"
    assert words in str(caught.value)
