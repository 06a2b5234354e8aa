"""How images become pixels for a vision tower: the checkpoint's processor config, checked.

`preprocessor_config.json`, or the `image_processor` object of `processor_config.json`. Keys are
those of transformers' Qwen2VLImageProcessor, which Qwen3-VL and Qwen3.5 use as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgecc.errors import InputError, UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.fields import Fields
from edgecc.frontends.targets.qwen3_5_vision_config import VisionConfig

_FILES = ("preprocessor_config.json", "processor_config.json")
_BICUBIC = 3
_RESCALE = 1 / 255


@dataclass(frozen=True, slots=True)
class ImageProcessorConfig:
    """Sizes and normalization of images.

    Attributes:
        min_pixels: Smaller images are enlarged to this area.
        max_pixels: Larger ones are reduced to it.
        mean: Subtracted from each colour, of values in 0..1.
        std: What each colour is then divided by.
    """

    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def read_image_processor(checkpoint: Checkpoint, vision: VisionConfig) -> ImageProcessorConfig:
    """Read and check the processor config of a checkpoint.

    Raises:
        InputError: There is none, or it contradicts the config of the tower.
        UnsupportedError: It asks for steps that edgecc does not do.
    """
    fields = _fields(checkpoint)
    for key, expected in (
        ("patch_size", vision.patch_size),
        ("temporal_patch_size", vision.temporal_patch_size),
        ("merge_size", vision.spatial_merge_size),
    ):
        if fields.integer(key, default=expected) != expected:
            fields.fail(key, f"the {expected} of {vision.where}")
    _check_steps(fields)
    least, most = _areas(fields)
    return ImageProcessorConfig(
        least, most, _colours(fields, "image_mean"), _colours(fields, "image_std")
    )


def _fields(checkpoint: Checkpoint) -> Fields:
    for name in _FILES:
        found = checkpoint.json(name)
        if found is not None:
            outer = Fields(found, f"{checkpoint.role}/{name}")
            return outer.section("image_processor") or outer
    raise InputError(
        "vision/no-processor",
        f"there is no {_FILES[0]}: nothing says how images become pixels",
        where=checkpoint.role,
        help=f"fetch {_FILES[0]} of the same model, or build the language model alone: "
        "--components text",
    )


def _areas(fields: Fields) -> tuple[int, int]:
    """Least and largest area, in either spelling; the older one wins, as in transformers."""
    size = fields.section("size")
    least, most = (fields.integer(key, default=None) for key in ("min_pixels", "max_pixels"))
    holder = size if size is not None and (least is None or most is None) else fields
    if least is None:
        least = holder.integer("shortest_edge")
    if most is None:
        most = holder.integer("longest_edge")
    if least > most:
        holder.fail("longest_edge", f"at least the {least} of shortest_edge")
    return least, most


def _check_steps(fields: Fields) -> None:
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not fields.boolean(key, default=True):
            raise UnsupportedError(
                "vision/processor",
                f"{key} is false: images are always resized, rescaled, normalized and read as RGB",
                where=fields.at(key),
            )
    if fields.integer("resample", minimum=0, default=_BICUBIC) != _BICUBIC:
        raise UnsupportedError(
            "vision/resample",
            f"resample {fields.integer('resample', minimum=0)}: images are resized bicubically "
            f"({_BICUBIC})",
            where=fields.at("resample"),
        )
    if abs(fields.number("rescale_factor", default=_RESCALE) - _RESCALE) > 1e-9:
        fields.fail("rescale_factor", f"1/255 = {_RESCALE}")


def _colours(fields: Fields, key: str) -> tuple[float, ...]:
    values = fields.values.get(key)
    if not isinstance(values, list) or len(values) != 3:
        fields.fail(key, "a list of three numbers")
    wanted = Fields({str(i): v for i, v in enumerate(values)}, fields.at(key))
    return tuple(wanted.number(str(i)) for i in range(3))
