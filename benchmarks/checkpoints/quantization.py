"""How each parameter is stored: ModelOpt's layouts, as the config's metadata asks for them."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import ml_dtypes
import numpy as np

from benchmarks.checkpoints.parameters import Config, Parameter
from edgecc.backends.weight_file import TensorSpec
from edgecc.errors import UnsupportedError

NVFP4_GROUP: Final = 16
"""Weights per NVFP4 block scale."""

FP8_BLOCK: Final = 128
"""Rows, and columns, of a block of FP8 with block scales."""

FP8_STD: Final = 80.0
"""Standard deviation of stored FP8 elements: the largest of a matrix come close to 448."""

BLOCK_SCALES: Final = (0x70, 0x7F)
"""Codes of NVFP4 block scales, the last one left out: 128 to 448, as in published checkpoints. The
global scale is then so small that it is subnormal in float16."""

_CODE_RMS: Final = float(np.sqrt(np.mean(np.square([0, 0.5, 1, 1.5, 2, 3, 4, 6]))))
"""Root mean square of the E2M1 values when all codes are equally likely."""

_SCALE_RMS: Final = float(
    np.sqrt(
        np.mean(
            np.arange(*BLOCK_SCALES, dtype=np.uint8)
            .view(ml_dtypes.float8_e4m3fn)
            .astype(np.float64)
            ** 2
        )
    )
)

_INPUT_AMAX: Final = 16.0
"""Largest activation that a calibration would have seen."""

_DTYPES: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_EXCLUDED: Final = ("ignore", "exclude_modules")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file.

    Attributes:
        spec: Its name, type and shape.
        mean: Of its values; of a tensor without deviation all are equal to it.
        std: Standard deviation; of FP8 elements the one they are stored with.
    """

    spec: TensorSpec
    mean: float = 0.0
    std: float = 0.0


class Scheme:
    """Which module is stored how.

    Args:
        config: `config.json`, with `quantization_config` if anything is quantized.

    Raises:
        UnsupportedError: A format that is not written.
    """

    def __init__(self, config: Config) -> None:
        block = config.get("quantization_config") or {}
        text = config.get("text_config") or config
        dtype = (config.get("dtype") or config.get("torch_dtype")) or (
            text.get("dtype") or text.get("torch_dtype") or "bfloat16"
        )
        self.dtype = _DTYPES[dtype]
        self.algorithm = _algorithm(block.get("quant_algo"))
        layers: Mapping[str, Mapping[str, str]] = block.get("quantized_layers") or {}
        self._layers = {name: _algorithm(entry["quant_algo"]) for name, entry in layers.items()}
        self._excluded = [p for key in _EXCLUDED for p in block.get(key) or ()]

    def stored(self, parameter: Parameter) -> list[Tensor]:
        """The tensors of a parameter, in the order of their names."""
        algorithm = self._of(parameter) if parameter.quantizable else ""
        if algorithm:
            return _packed(parameter, algorithm)
        spec = TensorSpec(parameter.name, parameter.dtype or self.dtype, parameter.shape)
        return [Tensor(spec, parameter.mean, parameter.deviation)]

    def _of(self, parameter: Parameter) -> str:
        if self.algorithm != "MIXED_PRECISION":
            excluded = any(fnmatch.fnmatchcase(parameter.module, p) for p in self._excluded)
            return "" if excluded else self.algorithm
        exact = self._layers.get(parameter.module)
        if exact is not None:
            return exact
        names = (n for n in self._layers if fnmatch.fnmatchcase(parameter.module, n))
        return next((self._layers[n] for n in names), "")


def _algorithm(name: str | None) -> str:
    algorithm = (name or "").upper()
    if algorithm not in ("", "MIXED_PRECISION", *_PACKED):
        raise UnsupportedError(
            "synthetic/algorithm",
            f"no synthetic weights in {name}",
            where="config.json: quantization_config",
            help=f"written: {', '.join(_PACKED)}",
        )
    return algorithm


def _packed(parameter: Parameter, algorithm: str) -> list[Tensor]:
    return sorted(_PACKED[algorithm](parameter), key=lambda tensor: tensor.spec.name)


def _nvfp4(parameter: Parameter) -> list[Tensor]:
    """Layers that read the same rows get the same global scale, as their producer gives them."""
    return [*_nvfp4_weights(parameter), _input_scale(parameter, 6 * 448)]


def _nvfp4_weights(parameter: Parameter) -> list[Tensor]:
    module, (rows, columns) = parameter.module, parameter.shape
    scale = parameter.deviation / (_CODE_RMS * _SCALE_RMS)
    return [
        Tensor(TensorSpec(f"{module}.weight", "U8", (rows, columns // 2))),
        Tensor(TensorSpec(f"{module}.weight_scale", "F8_E4M3", (rows, columns // NVFP4_GROUP))),
        Tensor(TensorSpec(f"{module}.weight_scale_2", "F32", ()), scale),
    ]


def _fp8(parameter: Parameter) -> list[Tensor]:
    return [*_fp8_weights(parameter, ()), _input_scale(parameter, 448)]


def _fp8_channel(parameter: Parameter) -> list[Tensor]:
    return _fp8_weights(parameter, parameter.shape[:1])


def _fp8_block(parameter: Parameter) -> list[Tensor]:
    high, wide = (-(-size // FP8_BLOCK) for size in parameter.shape)
    return _fp8_weights(parameter, () if high == wide == 1 else (high, 1, wide, 1))


def _fp8_weights(parameter: Parameter, scales: Sequence[int]) -> list[Tensor]:
    """Scales differ by a few percent, between layers that read the same rows as well."""
    module, scale = parameter.module, parameter.deviation / FP8_STD
    return [
        Tensor(TensorSpec(f"{module}.weight", "F8_E4M3", parameter.shape), std=FP8_STD),
        Tensor(TensorSpec(f"{module}.weight_scale", "F32", tuple(scales)), scale, 0.03 * scale),
    ]


def _input_scale(parameter: Parameter, largest: float) -> Tensor:
    spec = TensorSpec(f"{parameter.module}.input_scale", "F32", ())
    return Tensor(spec, _INPUT_AMAX / largest)


_PACKED: Final = {
    "NVFP4": _nvfp4,
    "W4A16_NVFP4": _nvfp4_weights,
    "FP8": _fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": _fp8_channel,
    "FP8_PB_WO": _fp8_block,
}
