"""A vision tower and a language model that reads it, built for a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgecc.backends.tensorrt.builder import Session
from edgecc.backends.tensorrt.lower import build
from edgecc.backends.tensorrt.profiles import profiles
from edgecc.devices import get_device
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.ir.core import Module
from edgecc.ir.types import SymbolRange
from edgecc.passes.base import PassContext
from edgecc.passes.default import default_pipeline
from edgecc.passes.manager import PassManager
from helpers.hybrid import FULL, HybridSizes
from helpers.vision import VisionSizes, write_vision_target


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Module:
    path: Path = tmp_path_factory.mktemp("vision") / "t"
    text = HybridSizes(layer_types=(FULL,), head_dim=64, sections=(6, 5, 5))
    write_vision_target(path, VisionSizes(depth=1, hidden=144, heads=2), text)
    made = lift(path, None, LiftOptions(max_model_len=192, components="all"))
    device = get_device("sm120")
    PassManager(default_pipeline(device)).run(made, PassContext(device))
    return made


@pytest.mark.parametrize("most", [64, 16384])
def test_one_profile_for_images_of_all_sizes(module: Module, most: int) -> None:
    """Made fastest for a megapixel, where so many tokens fit."""
    module.symbols["m"] = SymbolRange(1, most)
    (found,) = profiles(module, module.graphs["vision"], {"b": 1})
    likely = 4 * min(most, 1024)
    assert found.name == "image"
    assert found.shapes["pixel_values"] == ((1, 4, 96), (1, likely, 96), (1, 4 * most, 96))
    assert found.shapes["positions"] == ((2, 1, 4), (2, 1, likely), (2, 1, 4 * most))


@pytest.mark.parametrize("graph", ["vision", "target"])
def test_both_build(trt: Any, tmp_path: Path, module: Module, graph: str) -> None:
    module.symbols["m"] = SymbolRange(1, 64)
    session = Session(trt, get_device("sm120"))
    path = tmp_path / "graph.plan"
    info = build(session, module, module.graphs[graph], (), path, lambda *_: None)
    assert path.stat().st_size > 1000
    names = {item["name"] for item in info["inputs"]}
    assert {"pixel_values", "interpolation_ids"} <= names or "image_rows" in names
