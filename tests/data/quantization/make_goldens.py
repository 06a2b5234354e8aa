"""Makes `goldens.safetensors`: small weights in every stored layout, and what their libraries make
of them.

Needs PyTorch, transformers 5.24, compressed-tensors 0.20.1, and the sources of AutoAWQ 0.2.9 and
GPTQModel 7.7.0, unpacked (`pip download --no-deps --no-binary :all: autoawq==0.2.9`, and the same
for gptqmodel): their packages ask for GPUs, so the functions that dequantize are taken out of their
files and run as they are.

    python tests/data/quantization/make_goldens.py AUTOAWQ_DIR GPTQMODEL_DIR

Each case is a group of tensors `CASE/x.NAME`, spelled as in a checkpoint, and `CASE/values`, what
the library returns, in the type it returns. compressed-tensors and AutoAWQ compute in the type of
their scales, 16 bits; scales are in float32 where a case ends with `-f32`, so that nothing is
rounded.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

OUT = Path(__file__).with_name("goldens.safetensors")
Case = dict[str, Tensor]
ROWS, COLUMNS = 16, 64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 8


def words(*shape: int, seed: int) -> Tensor:
    """Any 32 bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).int()


def scales(*shape: int, seed: int, dtype: torch.dtype = torch.float16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) / 50 + 0.001).to(dtype)


def compressed(
    format_: str, weight: Tensor, scale: Tensor, *, zero: Tensor | None = None, **options: Any
) -> Case:
    """What a compressor of compressed-tensors stores, and what it reads back.

    Args:
        format_: Name of the compressor.
        weight: Values.
        scale: As an observer gives it.
        zero: Zero points, i8.
        options: Of `QuantizationArgs`; `global_scale` is a tensor of its own.
    """
    global_scale = options.pop("global_scale", None)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**options))
    compressor = BaseCompressor.get_value_from_registry(format_)
    given = {"weight": weight.to(scale.dtype), "weight_scale": scale}
    if zero is not None:
        given["weight_zero_point"] = zero
    if global_scale is not None:
        given["weight_global_scale"] = global_scale
    stored = compressor.compress(given, scheme)
    values = compressor.decompress(stored, scheme)["weight"]
    return {**{f"x.{name}": t.contiguous() for name, t in stored.items()}, "values": values}


def groups(weight: Tensor, size: int) -> Tensor:
    return weight.unflatten(-1, (-1, size))


def nvfp4(weight: Tensor) -> Case:
    global_scale = (2688 / weight.abs().max()).reshape(1)
    scale = groups(weight, 16).abs().amax(-1) / 6 * global_scale
    scale = scale.to(torch.float8_e4m3fn).to(torch.float32)
    options = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    return compressed("nvfp4-pack-quantized", weight, scale, global_scale=global_scale, **options)


def fp8(strategy: str, dtype: torch.dtype = torch.float32) -> Case:
    weight = normal(150, 140, seed=3) if strategy == "block" else normal(ROWS, COLUMNS, seed=3)
    largest = {
        "tensor": lambda: weight.abs().max().reshape(1),
        "channel": lambda: weight.abs().amax(1, keepdim=True),
        "block": lambda: torch.stack(
            [
                torch.stack([part.abs().max() for part in rows.split(128, 1)])
                for rows in weight.split(128)
            ]
        ),
    }[strategy]()
    options: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy}
    if strategy == "block":
        options["block_structure"] = [128, 128]
    return compressed("float-quantized", weight, (largest / 448).to(dtype), **options)


def mx(format_: str, bits: int) -> Case:
    weight = normal(ROWS, COLUMNS, seed=4)
    largest = groups(weight, 32).abs().amax(-1) / {4: 6, 8: 448}[bits]
    scale = torch.exp2(torch.ceil(torch.log2(largest)))
    options = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32}
    return compressed(format_, weight, scale, scale_dtype=torch.uint8, **options)


def packed(size: int, dtype: torch.dtype, *, asymmetric: bool = False) -> Case:
    weight = normal(ROWS, COLUMNS, seed=5) + (0.05 if asymmetric else 0)
    grouped = groups(weight, size)
    zero = None
    if asymmetric:
        low, high = grouped.amin(-1), grouped.amax(-1)
        scale = (high - low) / 15
        zero = (-8 - low / scale).round().clamp(-8, 7).to(torch.int8)
    else:
        scale = grouped.abs().amax(-1) / 7
    options: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": not asymmetric}
    options |= {"strategy": "channel"} if size == COLUMNS else {}
    options |= {"strategy": "group", "group_size": size} if size != COLUMNS else {}
    return compressed("pack-quantized", weight, scale.to(dtype), zero=zero, **options)


def awq(directory: Path, dtype: torch.dtype) -> Case:
    path = directory / "awq" / "utils" / "packing_utils.py"
    spec = importlib.util.spec_from_file_location("packing_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    case = {
        "x.qweight": words(COLUMNS, ROWS // 8, seed=6),
        "x.qzeros": words(COLUMNS // 32, ROWS // 8, seed=7),
        "x.scales": scales(COLUMNS // 32, ROWS, seed=8, dtype=dtype),
    }
    values = module.dequantize_gemm(*case.values(), 4, 32)
    return {**case, "values": values.T.contiguous()}


def functions(path: Path, names: list[str], scope: dict[str, Any]) -> dict[str, Any]:
    """Functions and methods of a file, compiled alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in names]
    for node in found:
        node.decorator_list = []
        module = ast.Module([ast.parse("from __future__ import annotations").body[0], node], [])
        exec(compile(module, str(path), "exec"), scope)
    return {name: scope[name] for name in names}


def gptq(directory: Path, *, v1: bool, order: bool, symmetric: bool = False) -> Case:
    """GPTQModel's `dequantize_weight`, after its own conversion where the file is in version 1."""
    count = COLUMNS // 16
    zeros = words(count, ROWS // 8, seed=10)
    if symmetric:
        zeros = torch.full_like(zeros, 0x77777777 if v1 else 0x88888888 - 2**32)
    columns = torch.arange(COLUMNS, dtype=torch.int32)
    index = (columns * 7 % COLUMNS if order else columns) // 16
    case = {
        "x.qweight": words(COLUMNS // 8, ROWS, seed=9),
        "x.qzeros": zeros,
        "x.scales": scales(count, ROWS, seed=11),
        "x.g_idx": index,
    }
    package = directory / "gptqmodel"
    shift = torch.arange(0, 32, 4, dtype=torch.int32)
    layer = SimpleNamespace(
        **{name[2:]: tensor.clone() for name, tensor in case.items()},
        planar=False,
        bits=4,
        maxq=15,
        pack_factor=8,
        dequant_dtype=torch.int8,
        in_features=COLUMNS,
        wf_unsqueeze_zero=shift.reshape(1, 1, 8),
        wf_unsqueeze_neg_one=shift.reshape(1, 8, 1),
        _init_wf_unsqueeze_buffers=lambda: None,
        qzero_format=lambda format: None,
    )
    scope: dict[str, Any] = {"t": torch, "torch": torch, "BaseQuantLinear": SimpleNamespace}
    scope |= {"log": SimpleNamespace(info=SimpleNamespace(once=lambda message: None))}
    scope |= {"_torch_right_shift": torch.bitwise_right_shift, "nn": torch.nn}
    if v1:
        convert = functions(
            package / "utils" / "model.py", ["convert_gptq_v1_to_v2_format_module"], scope
        )["convert_gptq_v1_to_v2_format_module"]
        convert(layer, 4, torch.int32)
    linear = package / "nn_modules" / "qlinear" / "__init__.py"
    made = functions(linear, ["dequantize_weight", "_dequantize_from_codes"], scope)
    layer._dequantize_from_codes = lambda *a, **k: made["_dequantize_from_codes"](layer, *a, **k)
    values = made["dequantize_weight"](layer)
    return {**case, "values": values.T.contiguous()}


def fine_grained(dtype: torch.dtype) -> Case:
    """transformers' own dequantization, which takes whole blocks only."""
    case = {
        "x.weight": normal(256, 128, seed=12).mul(800).to(torch.float8_e4m3fn),
        "x.weight_scale_inv": scales(2, 1, seed=13, dtype=torch.float32).to(dtype),
    }
    quantizer = SimpleNamespace(quantization_config=None)
    values = Fp8Dequantize(quantizer)._dequantize_one(*case.values(), torch.float32)
    return {**case, "values": values}


def gpt_oss() -> Case:
    generator = torch.Generator().manual_seed(14)
    blocks = torch.randint(0, 256, (1, ROWS, 2, 16), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(110, 130, (1, ROWS, 2), generator=generator, dtype=torch.uint8)
    values = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
    values = values.reshape(1, COLUMNS, ROWS).transpose(1, 2)[0].contiguous()
    return {"x_blocks": blocks[0], "x_scales": exponents[0], "values": values}


def main(awq_dir: Path, gptq_dir: Path) -> None:
    weight = normal(ROWS, COLUMNS, seed=1)
    weight[3, :16] = 0
    cases = {
        "nvfp4": nvfp4(weight),
        "fp8-tensor-f32": fp8("tensor"),
        "fp8-channel-f32": fp8("channel"),
        "fp8-channel": fp8("channel", torch.bfloat16),
        "fp8-block-f32": fp8("block"),
        "mxfp4": mx("mxfp4-pack-quantized", 4),
        "mxfp8": mx("mxfp8-quantized", 8),
        "int4-f32": packed(32, torch.float32),
        "int4": packed(32, torch.bfloat16),
        "int4-channel-f32": packed(COLUMNS, torch.float32),
        "int4-zeros-f32": packed(32, torch.float32, asymmetric=True),
        "int4-zeros": packed(32, torch.bfloat16, asymmetric=True),
        "awq": awq(awq_dir, torch.float16),
        "awq-f32": awq(awq_dir, torch.float32),
        "gptq-v1": gptq(gptq_dir, v1=True, order=False),
        "gptq-v2": gptq(gptq_dir, v1=False, order=False),
        "gptq-v1-symmetric": gptq(gptq_dir, v1=True, order=False, symmetric=True),
        "gptq-v2-symmetric": gptq(gptq_dir, v1=False, order=False, symmetric=True),
        "gptq-v1-order": gptq(gptq_dir, v1=True, order=True),
        "fine-grained-f32": fine_grained(torch.float32),
        "fine-grained-bf16": fine_grained(torch.bfloat16),
        "gpt-oss": gpt_oss(),
    }
    tensors = {f"{case}/{name}": t for case, made in cases.items() for name, t in made.items()}
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, OUT)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
