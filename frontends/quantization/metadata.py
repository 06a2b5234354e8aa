"""Finding the metadata of a checkpoint, and choosing who reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgecc.errors import InputError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.fields import Fields
from edgecc.frontends.quantization import compressed_tensors, modelopt
from edgecc.frontends.quantization.declaration import Declaration
from edgecc.frontends.quantization.layouts import first_sidecar, unsupported
from edgecc.frontends.quantization.methods import read_awq, read_fp8, read_gptq, read_mxfp4

_READERS: Mapping[str, Callable[[Fields], Declaration]] = {
    compressed_tensors.METHOD: compressed_tensors.read_compressed_tensors,
    "awq": read_awq,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
}


def read_declaration(checkpoint: Checkpoint) -> Declaration | None:
    """What a checkpoint declares, None if it is unquantized.

    Raises:
        InputError: The metadata has a wrong type, or tensors show that it is missing.
        UnsupportedError: The declared method, or one that tensor names give away, is not read.
    """
    block, side = _metadata(checkpoint)
    reader = _reader(block) if block is not None else None
    if reader is not None and block is not None:
        return reader(block)
    if block is not None or side is not None:
        return modelopt.read_modelopt(block, side)
    if (found := first_sidecar(checkpoint.tensors)) is None:
        return None
    where, count = checkpoint.location(found.tensor), f"{found.count} such tensors"
    if not found.is_read:
        raise unsupported(found.producer, where, f"{count}, and no metadata about them")
    raise InputError(
        "quant/no-metadata",
        f"the weights are quantized ({found.producer}), and no metadata says how",
        where=where,
        notes=(count, "looked for quantization_config in config.json and hf_quant_config.json"),
        help="fetch config.json of the same revision",
    )


def _metadata(checkpoint: Checkpoint) -> tuple[Fields | None, Fields | None]:
    """`quantization_config` of config.json, and `quantization` of hf_quant_config.json."""
    top = Fields(checkpoint.config, f"{checkpoint.role}/config.json")
    if "quantization" in top:
        raise unsupported("MLX", top.at("quantization"))
    places = (top, top.section("text_config"))
    blocks = (
        place.section(key)
        for key in ("quantization_config", "compression_config")
        for place in places
        if place is not None
    )
    block = next((found for found in blocks if found is not None and found.values), None)
    side = checkpoint.json("hf_quant_config.json")
    if side is None:
        return block, None
    return block, Fields(side, f"{checkpoint.role}/hf_quant_config.json").section("quantization")


def _reader(block: Fields) -> Callable[[Fields], Declaration] | None:
    """Who reads a `quantization_config`; None for ModelOpt, which has two files.

    Raises:
        UnsupportedError: Nobody does.
    """
    if block.values.get("load_in_4bit") or block.values.get("load_in_8bit"):
        raise unsupported("bitsandbytes", block.where)
    method = block.string("quant_method", default="").lower()
    if not method and block.where.endswith("compression_config"):
        method = compressed_tensors.METHOD
    if method in _READERS:
        return _READERS[method]
    producer = block.section("producer")
    by_modelopt = producer is not None and producer.string("name", default="") == "modelopt"
    if method in modelopt.METHODS or (not method and ("quant_algo" in block or by_modelopt)):
        return None
    raise unsupported(repr(method) if method else "an unnamed method", block.at("quant_method"))
