"""Estimates: what they grow with, and what is said about memory."""

from __future__ import annotations

import pytest

from edgecc.backends.tensorrt.estimate import Estimate, expectation
from edgecc.backends.tensorrt.lower import jobs
from edgecc.backends.tensorrt.policy import plan_weights
from edgecc.errors import ResourceError, Severity
from helpers.goldens import PAIRS

GB = 10**9
SMALL = Estimate("a", "sm120", 3.0, GB, GB // 4)
LARGE = Estimate("b", "sm120", 40.0, 3 * GB, GB)


def test_the_largest_engine_decides_about_memory_and_all_about_time():
    found = expectation([SMALL, LARGE], 10 * GB)
    assert (found.id, found.severity) == ("build/estimate", Severity.NOTE)
    assert found.message == (
        "building 2 engines for sm120 takes about 43 s of one core and 3.0 GB of memory, "
        "10.0 GB are free"
    )
    assert found.notes == (
        "a: about 3 s, 1.0 GB of memory",
        "b: about 40 s, 3.0 GB of memory",
    )


def test_too_little_is_a_warning_and_far_too_little_an_error():
    found = expectation([SMALL, LARGE], 2 * GB)
    assert (found.id, found.severity) == ("build/memory", Severity.WARNING)
    assert "--weights bind" in found.help
    with pytest.raises(
        ResourceError, match=r"building b for sm120 takes at least 1\.0 GB"
    ) as error:
        expectation([SMALL, LARGE], GB - 1)
    assert "--weights bind" in error.value.diagnostics[0].help


def test_bound_weights_take_no_memory_to_build():
    from edgecc.devices import get_device
    from edgecc.driver import lift
    from edgecc.passes.base import PassContext
    from edgecc.passes.default import default_pipeline
    from edgecc.passes.manager import PassManager

    device = get_device("sm120")
    module = lift(PAIRS / "tiny-qwen3-nvfp4", PAIRS / "tiny-qwen3-dspark")
    PassManager(default_pipeline(device)).run(module, PassContext(device))
    embed, bind = (
        {j.estimate.name: j.estimate for j in jobs(module, device, plan_weights(module, weights))}
        for weights in ("embed", "bind")
    )
    assert bind["target.tail"].bytes == embed.pop("target.tail").bytes  # it has no weights
    for name, held in embed.items():
        assert bind[name].bytes < held.bytes
        assert bind[name].least_bytes < held.least_bytes
        assert bind[name].seconds <= held.seconds
    assert embed["target.body"].seconds > 3 * embed["draft.body"].seconds
