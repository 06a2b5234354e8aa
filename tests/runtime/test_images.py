"""Image files to inputs of a vision tower: decoding, resizing, and what cannot be read."""

from __future__ import annotations

import builtins
import errno
import io
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgecc.backends.base import Role
from edgecc.backends.runtime.image_config import ImageConfig
from edgecc.backends.runtime.image_files import MAX_AREA, read_image
from edgecc.backends.runtime.images import prepare
from edgecc.errors import EdgeccError, RequestError, ResourceError, UnsupportedError

Image = pytest.importorskip("PIL.Image")

CONFIG = ImageConfig(
    patch_size=4,
    temporal_patch_size=2,
    merge_size=2,
    grid_size=5,
    min_pixels=256,
    max_pixels=4096,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    max_tokens=64,
    feature_size=8,
    image_token_id=9,
)


def picture(height: int = 24, width: int = 40, seed: int = 0) -> Any:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def saved(image: Any, format: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def rgb(source: Any) -> np.ndarray:
    return np.asarray(read_image(source, "here"))


def test_paths_bytes_and_pillow_images_are_the_same(tmp_path: Path) -> None:
    image = picture()
    path = tmp_path / "cat.png"
    path.write_bytes(saved(image))
    found = prepare([image, saved(image), str(path), path], CONFIG)
    for one in found[1:]:
        for role, array in found[0].inputs.items():
            assert np.array_equal(array, one.inputs[role])


def test_inputs_of_the_tower() -> None:
    (found,) = prepare([picture(24, 40)], CONFIG)
    assert (found.grid.rows, found.grid.columns, found.tokens) == (6, 10, 15)
    shapes = {role: (array.shape, array.dtype.name) for role, array in found.inputs.items()}
    assert shapes == {
        Role.PIXEL_VALUES: ((1, 60, 96), "float32"),
        Role.POSITIONS: ((2, 1, 60), "int64"),
        Role.INTERPOLATION_IDS: ((1, 60, 4), "int64"),
        Role.INTERPOLATION_WEIGHTS: ((1, 60, 4), "float32"),
    }
    assert prepare([], CONFIG) == []


def test_an_image_of_a_fitting_size_is_not_resampled() -> None:
    image = picture(16, 24)
    (found,) = prepare([image], CONFIG)
    first = (np.asarray(image)[:4, :4, 0] / 255 - 0.5) / 0.5
    np.testing.assert_allclose(found.pixel_values[0, 0, :16].reshape(4, 4), first, atol=1e-6)


@settings(max_examples=20)
@given(st.integers(1, 300), st.integers(1, 300))
def test_any_size(height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    (found,) = prepare([Image.new("RGB", (width, height), (10, 200, 30))], CONFIG)
    assert found.tokens <= 64
    # One colour stays that colour, whatever the resampling.
    expected = (np.array([10, 200, 30]) / 255 - 0.5) / 0.5
    colours = found.pixel_values[0].reshape(len(found.pixel_values[0]), 3, -1)
    assert np.abs(colours - expected[:, None]).max() < 1e-6


# Odd images


def test_transparency_is_white() -> None:
    pixels = np.zeros((8, 8, 4), np.uint8)
    pixels[:, :4] = [200, 0, 0, 255]
    pixels[:, 4:] = [0, 0, 200, 0]  # a colour that nobody was meant to see
    pixels[0, 0] = [0, 0, 0, 51]  # a fifth
    found = rgb(saved(Image.fromarray(pixels)))
    assert found[1, 1].tolist() == [200, 0, 0]
    assert found[1, 5].tolist() == [255, 255, 255]
    assert found[0, 0].tolist() == [204, 204, 204]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "YCbCr"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    image = Image.new("L", (20, 10), 255).convert(mode) if ";" not in mode else None
    if image is None:
        image = Image.fromarray(np.full((10, 20), 65535, np.uint16))
        assert image.mode == mode
    found = rgb(image)
    assert (found.shape, found.dtype) == ((10, 20, 3), np.uint8)
    assert found.min() >= 253  # white stays white; YCbCr rounds


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_grey_levels_of_16_bits(format: str) -> None:
    """Those of 8 bits, finer: not cut off where 8 bits end."""
    levels = np.arange(0, 65536, 64).astype(np.uint16).reshape(32, 32)
    found = rgb(saved(Image.fromarray(levels), format))
    assert np.array_equal(found, np.repeat((levels // 256)[..., None], 3, axis=2))


@pytest.mark.parametrize("mode", ["I", "F"])
def test_grey_levels_without_a_range(mode: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_image(Image.new(mode, (8, 8)), "x.tiff")
    assert caught.value.id == "image/depth"
    assert "x.tiff" in str(caught.value)


def test_a_palette_with_a_transparent_colour() -> None:
    image = Image.new("P", (4, 2), 1)
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putpixel((0, 0), 0)
    found = rgb(saved(image, transparency=1))
    assert found[0, 0].tolist() == [255, 0, 0]
    assert found[1, 3].tolist() == [255, 255, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_cameras_note_which_way_is_up(orientation: int) -> None:
    """The eight orientations of EXIF, as operations on arrays."""
    stored = np.asarray(picture(8, 16))
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.swapaxes(0, 1),
        6: stored.swapaxes(0, 1)[:, ::-1],
        7: stored.swapaxes(0, 1)[::-1, ::-1],
        8: stored.swapaxes(0, 1)[::-1],
    }[orientation]
    assert np.array_equal(rgb(saved(Image.fromarray(stored), exif=exif)), upright)


def test_the_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    found = rgb(saved(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert found[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("format", ["BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"])
def test_formats(format: str) -> None:
    found = rgb(saved(Image.new("RGB", (16, 8), (250, 10, 10)), format))
    assert np.abs(found.astype(int) - [250, 10, 10]).max() <= 4  # JPEG and WEBP are lossy


# What cannot be read


def refused(
    source: Any, config: ImageConfig = CONFIG, kind: type[EdgeccError] = RequestError
) -> EdgeccError:
    with pytest.raises(kind) as caught:
        prepare([source], config)
    assert type(caught.value) is kind
    return caught.value


@pytest.mark.parametrize("format", ["BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP"])
def test_truncated_files(format: str) -> None:
    """Wherever the file ends before its last pixels."""
    data = saved(picture(), format)
    for length in {0, 1, 10, 30, len(data) // 2, len(data) * 9 // 10}:
        error = refused(data[:length])
        assert error.id in ("image/damaged", "image/unknown-format")
        assert error.diagnostics[0].where == "image 1"
        assert error.diagnostics[0].help


@given(st.integers(0, 1 << 30), st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"]))
def test_damaged_files_never_crash(seed: int, format: str) -> None:
    rng = np.random.default_rng(seed)
    data = bytearray(saved(picture(9, 9), format))
    for place in rng.integers(0, len(data), 4):
        data[place] = rng.integers(0, 256)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = outcome(bytes(data))
    assert found == "RGB" or found.startswith("image/")


def outcome(data: bytes) -> str:
    """The mode of the image, or the id of the error."""
    try:
        return read_image(data, "x").mode
    except EdgeccError as error:
        return error.id


@pytest.mark.parametrize(
    "data",
    [b"", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"<svg/>", b"\x00" * 99, b"hello"],
    ids=["nothing", "PostScript", "SVG", "zeros", "text"],
)
def test_other_files(data: bytes) -> None:
    error = refused(data)
    assert error.id == "image/unknown-format"
    assert "PNG" in error.diagnostics[0].help


def test_narrow_images() -> None:
    error = refused(Image.new("RGB", (2010, 10)))
    assert error.id == "image/aspect-ratio"
    assert "2010 x 10 pixels: one side is 201 times the other" in str(error)
    wide = replace(CONFIG, max_tokens=200)
    assert prepare([Image.new("RGB", (2000, 10))], wide)[0].tokens == 113


def test_images_with_more_tokens_than_the_bundle_takes() -> None:
    error = refused(picture(64, 64), replace(CONFIG, max_tokens=63))
    assert error.id == "image/too-many-tokens"
    assert "64 tokens (64 x 64 pixels)" in str(error)


def test_a_small_file_of_a_huge_image() -> None:
    """The size is read from the header, before any pixel."""
    data = bytearray(saved(Image.new("1", (8, 8)), "BMP"))
    for size in (9500, 65000):  # above the limit, and above what Pillow itself refuses
        data[18:22] = data[22:26] = size.to_bytes(4, "little")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert refused(bytes(data)).id == "image/too-large"
        assert refused(bytes(data)).id == "image/too-large"
    assert MAX_AREA < 9500**2


@pytest.mark.parametrize("name", ["missing.png", "folder", "a\0b"])
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    error = refused(str(tmp_path / name))
    assert error.id == "image/unreadable"
    assert error.diagnostics[0].where.endswith(name)


def test_a_file_that_the_machine_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    error = refused("cat.png", kind=ResourceError)
    assert error.id == "image/unreadable"
    assert "Permission denied" in str(error)


@pytest.mark.parametrize("source", [3, None, np.zeros((4, 4, 3)), [b""]])
def test_other_sources(source: Any) -> None:
    error = refused(source)
    assert error.id == "image/bad-source"
    assert type(source).__name__ in str(error)


def test_messages_say_which_image() -> None:
    with pytest.raises(RequestError) as caught:
        prepare([picture(), b"hello"], CONFIG)
    assert caught.value.diagnostics[0].where == "image 2"


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("PIL"):
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    error = refused(b"", kind=UnsupportedError)
    assert error.id == "image/no-pillow"
    assert "edgecc[vision]" in error.diagnostics[0].help
