"""Expands packed weights when a session is loaded.

The bundle holds weights as the checkpoint did. A session gets the expanded tensor through
`SessionOptions.add_initializer` over the placeholder of the model, and packs it for its kernels;
the expanded array is dropped afterwards, so one copy stays. Expansion goes by blocks of rows: the
packed bytes stay in the page cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, TypeAlias

import numpy as np

from edgecc import nvfp4
from edgecc.backends.base import Array
from edgecc.backends.layouts import Parts, blocks, check_nvfp4, global_scale, values_of
from edgecc.backends.mapped_weights import WeightFile
from edgecc.errors import BundleError

Item: TypeAlias = Mapping[str, Any]
"""One `expand` entry of the manifest."""


def _float32(parts: Parts, item: Item, layout: str) -> list[Array]:
    """A float32 array filled block by block."""
    values = values_of(layout, parts, item.get("block", ()))
    out = np.empty(values.shape, dtype=np.float32)
    for rows in blocks(values.shape[0], prod(values.shape[1:]), values.group):
        out[rows] = values.rows(rows)
    return [out]


def _nvfp4_int8(parts: Parts, item: Item) -> list[Array]:
    rows, columns = check_nvfp4(parts)
    packed, scale = parts["weight"], parts["weight_scale"]
    of_all, divisor = global_scale(parts)
    codes = np.empty((rows, columns // 16, 16), dtype=np.uint8)
    scales = np.empty((rows, columns // 16), dtype=np.float32)
    for block in blocks(rows, columns):
        made, factors = nvfp4.int8_codes(packed[block], scale[block], of_all, divisor=divisor)
        codes[block] = made.reshape(-1, columns // 16, 16)
        scales[block] = factors
    return [codes, scales]


_LAYOUTS: Mapping[str, str] = {
    "fp8-block-f32": "fp8-block",
    "fp8-f32": "fp8",
    "int4-f32": "int4",
    "int8-f32": "int8",
    "mxfp4-f32": "mxfp4",
    "nvfp4-f32": "nvfp4",
    "widen-f32": "dense",
}
"""Forms that give float32, and the layout they read."""

FORMS: Mapping[str, Callable[[Parts, Item], list[Array]]] = {
    **{form: partial(_float32, layout=layout) for form, layout in _LAYOUTS.items()},
    "nvfp4-int8": _nvfp4_int8,
}
"""Expansion forms of the manifest: component arrays to initializers."""


def expanded_bytes(item: Item, file: WeightFile) -> int:
    """Bytes of the initializers of one `expand` entry; nothing is read.

    Raises:
        BundleError: Unknown form or tensor, or parts that do not belong together.
    """
    parts = _parts(item, file)
    try:
        layout = _LAYOUTS.get(item["form"])
        if layout is not None:
            return 4 * prod(values_of(layout, parts, item.get("block", ())).shape)
        rows, columns = check_nvfp4(parts)
        return rows * columns + 4 * (rows * columns // 16)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise _damaged(item, file, error) from error


def expand(item: Item, file: WeightFile) -> dict[str, Array]:
    """Initializers of one `expand` entry of the manifest, by name.

    Raises:
        BundleError: Unknown form or tensor, or parts that do not belong together.
    """
    parts = _parts(item, file)
    try:
        return dict(zip(item["initializers"], FORMS[item["form"]](parts, item), strict=True))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise _damaged(item, file, error) from error


def _parts(item: Item, file: WeightFile) -> Parts:
    if item["form"] not in FORMS:
        raise BundleError(
            "bundle/unknown-form",
            f"unknown expansion {item['form']!r}",
            where=str(file.path),
            help="the bundle was made by a newer edgecc: update, or compile again",
        )
    return {name: file.tensor(tensor) for name, tensor in item["parts"].items()}


def _damaged(item: Item, file: WeightFile, error: Exception) -> BundleError:
    return BundleError(
        "bundle/expansion",
        f"{', '.join(item['initializers'])} cannot be made from {item['parts']}: {error}",
        where=str(file.path),
        help="compile the bundle again",
    )
