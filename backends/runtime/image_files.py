"""Image files to pixels: decoding and resizing, with Pillow.

Pillow is an optional extra, imported when the first image is read. Only formats that are plain
pixels are opened; those that Pillow hands to other programs are not.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from edgecc.errors import EdgeccError, RequestError, ResourceError, UnsupportedError

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels: TypeAlias = NDArray[np.uint8]
"""RGB, `[height, width, 3]`."""

ImageSource: TypeAlias = "str | os.PathLike[str] | bytes | Image"
"""A file, the bytes of one, or an image that Pillow has opened."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedImage:
    """An image, and what messages call it.

    Attributes:
        source: The image.
        name: Its file, or its place in the request.
    """

    source: ImageSource
    name: str


FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What is opened. Of animations and of files with several pages, the first one."""

MAX_AREA = 89_478_485
"""Pixels of the largest image that is decoded: a small file can name any size. It is the number
from which on Pillow warns."""

_WHITE = (255, 255, 255, 255)

_NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError)
"""What opening a path raises if there is no file of that name: the caller's mistake."""


def read_image(
    source: ImageSource, where: str, check_size: Callable[[int, int], object] = lambda *size: None
) -> Image:
    """An image as RGB, the right way up.

    As transformers does it: turned by the orientation that cameras note (EXIF), transparent parts
    on white. (Its loader of files drops transparency instead, which shows colours that nobody was
    meant to see; its processor, and the tools of the models' publisher, do as here.)

    Args:
        source: The image.
        where: What messages call it.
        check_size: Called with height and width before the pixels are decoded, which may be many;
            what it raises is passed on. The two may still change places.

    Raises:
        RequestError: It is no image, damaged, truncated, or too large.
        ResourceError: The file cannot be read.
        UnsupportedError: Pillow is not installed.
    """
    pillow = _pillow()
    try:
        if isinstance(source, pillow.Image.Image):
            return _rgb(_decoded(source, pillow, where, check_size), pillow, where)
        with _stream(source, where) as stream:
            image = pillow.Image.open(stream, formats=FORMATS)
            return _rgb(_decoded(image, pillow, where, check_size), pillow, where)
    except (EdgeccError, MemoryError):
        raise
    except (pillow.Image.DecompressionBombError, pillow.Image.DecompressionBombWarning) as error:
        raise _too_large(where, f"it has more than {MAX_AREA} pixels") from error
    except pillow.UnidentifiedImageError as error:
        raise RequestError(
            "image/unknown-format",
            "this is no image that can be read",
            where=where,
            help=f"formats: {', '.join(FORMATS)}",
        ) from error
    except Exception as error:  # decoders raise whatever their damaged input leads them to
        raise RequestError(
            "image/damaged",
            f"the image cannot be decoded: {error}",
            where=where,
            help="the file is truncated or damaged: make or fetch it again",
        ) from error


def resize(image: Image, height: int, width: int) -> Pixels:
    """An RGB image in another size, bicubic with antialiasing, rounded to whole grey levels."""
    resized = image.resize((width, height), resample=_pillow().Image.Resampling.BICUBIC)
    return np.asarray(resized)


def _pillow() -> Any:
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise UnsupportedError(
            "image/no-pillow",
            "reading images needs Pillow, which is not installed",
            help="pip install 'edgecc[vision]'",
        ) from error
    return PIL


def _stream(source: ImageSource, where: str) -> IO[bytes]:
    """The bytes of a file.

    Raises:
        RequestError: The source is something else, or no file.
        ResourceError: The file cannot be read.
    """
    if isinstance(source, bytes):
        return io.BytesIO(source)
    if not isinstance(source, str | os.PathLike):
        raise RequestError(
            "image/bad-source",
            f"an image is a path, the bytes of a file, or a Pillow image, not a "
            f"{type(source).__name__}",
            where=where,
        )
    try:
        return Path(source).open("rb")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        kind = RequestError if isinstance(error, _NO_FILE) else ResourceError
        raise kind("image/unreadable", f"cannot read the image: {reason}", where=where) from error


def _decoded(
    image: Image, pillow: Any, where: str, check_size: Callable[[int, int], object]
) -> Image:
    """The pixels themselves, the right way up; files are only decoded here.

    Raises:
        RequestError: There are too many, or none.
    """
    width, height = image.size
    if width * height > MAX_AREA:
        raise _too_large(where, f"{width} x {height} pixels, at most {MAX_AREA} in all")
    if not width or not height:
        raise RequestError("image/empty", f"{width} x {height} pixels", where=where)
    check_size(height, width)
    image.load()
    upright: Image = pillow.ImageOps.exif_transpose(image)
    return upright


def _rgb(image: Image, pillow: Any, where: str) -> Image:
    """Without transparency: what is behind it is white."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return _eight_bits(image, pillow, where).convert("RGB")
    layers = pillow.Image.new("RGBA", image.size, _WHITE), image.convert("RGBA")
    flat: Image = pillow.Image.alpha_composite(*layers)
    return flat.convert("RGB")


def _eight_bits(image: Image, pillow: Any, where: str) -> Image:
    """Grey levels of 16 bits as the 8 that RGB has: Pillow alone would cut them off at 255.

    Raises:
        RequestError: They are of 32 bits: what is white is known to the maker of the file only.
    """
    if image.mode in ("I", "F"):
        raise RequestError(
            "image/depth",
            f"the image has grey levels of 32 bits (mode {image.mode}), which have no agreed range",
            where=where,
            help="save it with 8 or 16 bits",
        )
    if not image.mode.startswith("I;16"):
        return image
    levels = np.asarray(image)
    return cast("Image", pillow.Image.fromarray((levels >> 8).astype(np.uint8)))


def _too_large(where: str, message: str) -> RequestError:
    return RequestError(
        "image/too-large",
        f"the image is too large: {message}",
        where=where,
        help="make it smaller: the model sees no more than its own largest size",
    )
