"""Targets that read images on a simulated GPU: the tower, calls with places, and speculation."""

from __future__ import annotations

import numpy as np
import pytest

from edgecc.backends.runtime.golden import NARROW, compare_golden, read_golden
from edgecc.backends.runtime.image_config import ImageConfig
from edgecc.backends.runtime.image_grid import Grid
from edgecc.backends.runtime.images import prepare_pixels
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.golden import golden_rows
from helpers.checkpoints import write_draft
from helpers.hybrid import FULL, LINEAR, HybridSizes
from helpers.simulated_bundle import lowered
from helpers.vision import IMAGE, VisionSizes, write_vision_target

TEXT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    text = HybridSizes(layer_types=(LINEAR, FULL))
    target = write_vision_target(folder / "t", VisionSizes(depth=1), text)
    draft = write_draft(folder / "d", hidden=32, layers=1, target_layers=2, target_layer_ids=(0, 1))
    return target, draft


@pytest.fixture(scope="module")
def seeing(pair):
    return lowered(*pair, chunk=8, components="all")


@pytest.fixture(scope="module")
def picture(seeing):
    """Twelve tokens: more than a call of the target takes."""
    config = ImageConfig.from_metadata(seeing.metadata["vision"])
    noise = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    return prepare_pixels(noise, Grid(6, 8, 2), config)


def answer(generator, ids, picture=None, **options):
    return generator.generate(
        token_ids=ids,
        images=None if picture is None else [picture],
        max_new_tokens=8,
        ignore_eos=True,
        **options,
    ).token_ids


def test_the_golden_rows(make, pair, seeing):
    """Features of the tower, and what the target makes of them: in calls of fewer rows than pad."""
    module = lift(*pair, LiftOptions(max_model_len=64, prefill_chunk=8, components="all"))
    golden = read_golden(golden_rows(module, []))
    result = compare_golden(make(seeing).open(), golden, NARROW)
    assert result.passed, result
    assert [c.name for c in result.checks][:2] == ["image features", "target logits"]


def test_speculation_and_places(make, seeing, picture):
    """The text is the same with the draft and without; the image and where it is matter."""
    with make(seeing).generator() as generator:
        found = []
        for ids, image in (
            (TEXT, None),
            ([IMAGE, *TEXT], picture),
            ([*TEXT, IMAGE, 10], picture),
        ):
            plain = answer(generator, ids, image, speculation=False)
            assert answer(generator, ids, image) == plain
            assert answer(generator, ids, image, num_speculative_tokens=1) == plain
            found.append(plain)
        assert len({tuple(tokens) for tokens in found}) == len(found)
        assert answer(generator, TEXT) == found[0]
