"""Records of devices."""

from __future__ import annotations

import pytest

from edgecc.devices import DEVICES, get_device
from edgecc.errors import UnsupportedError


@pytest.mark.parametrize("name", DEVICES)
def test_known_devices(name):
    assert get_device(name).name == name


@pytest.mark.parametrize(
    "name", ["sm_21", "compute_87x", "xavier", "CUDA:0", "gpu", "nvidia", "trt-rtx"]
)
def test_a_gpu_is_told_apart_from_a_slip(name):
    with pytest.raises(UnsupportedError) as caught:
        get_device(name)
    shown = str(caught.value)
    assert f"unknown device {name!r}: no backend builds engines for this GPU" in shown
    assert "did you mean" not in shown
    for device in DEVICES.values():
        assert f"{device.name}: {device.description}" in shown


@pytest.mark.parametrize(
    ("name", "help_"),
    [
        ("orin", "Jetson Orin: --device sm87"),
        ("jetson-thor", "Jetson Orin: --device sm87, Jetson Thor: --device sm110"),
        ("Jetson", "Jetson Orin: --device sm87, Jetson Thor: --device sm110"),
    ],
)
def test_a_gpu_by_its_name(name, help_):
    with pytest.raises(UnsupportedError, match="unknown device") as caught:
        get_device(name)
    assert caught.value.diagnostics[0].help == help_


@pytest.mark.parametrize(
    ("name", "help_"),
    [
        ("CPU", "did you mean 'cpu'?"),
        ("onnxx", "did you mean 'onnx'?"),
        ("SM120", "did you mean 'sm120'?"),
        ("sm_89", "did you mean 'sm89'?"),
        ("compute_86", "did you mean 'sm86'?"),
        ("RTX", "did you mean 'rtx'?"),
        ("smooth", "valid: "),
        ("", "valid: "),
    ],
)
def test_a_slip(name, help_):
    with pytest.raises(UnsupportedError) as caught:
        get_device(name)
    assert caught.value.diagnostics[0].message == f"unknown device {name!r}"
    assert caught.value.diagnostics[0].help.startswith(help_)
