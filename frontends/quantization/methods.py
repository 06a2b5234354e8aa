"""Metadata of methods with a `quantization_config` of their own: FP8, MXFP4, AutoAWQ and GPTQ.

Keys: transformers 5.24, AutoAWQ 0.2 and GPTQModel 7.7.
"""

from __future__ import annotations

from collections.abc import Iterable

from edgecc.errors import InputError
from edgecc.frontends.fields import Fields
from edgecc.frontends.quantization.declaration import Declaration, Scheme
from edgecc.frontends.quantization.layouts import unsupported
from edgecc.frontends.quantization.patterns import ModulePatterns

_HEAD = ("lm_head",)


def read_fp8(block: Fields) -> Declaration:
    """Fine-grained FP8: `weight_scale_inv`, one factor per block.

    Raises:
        InputError: A key has a wrong type or value.
        UnsupportedError: Elements that are not E4M3.
    """
    elements = block.string("fmt", default="e4m3")
    if elements not in ("e4m3", "float8_e4m3fn"):
        raise unsupported(f"FP8 {elements}", block.at("fmt"))
    sizes = block.integers("weight_block_size", minimum=1)
    if sizes is not None and len(sizes) != 2:
        block.fail("weight_block_size", "rows and columns of a block")
    size = (sizes[0], sizes[1]) if sizes is not None else None
    forms = ("fp8 tensor",) if size is None else ("fp8 block", "fp8 tensor", "mxfp8")
    title = f"FP8 in blocks of {size[0]} x {size[1]}" if size else "FP8"
    scheme = Scheme(title, forms, weight_only=True, block=size)
    return _declared("fp8", scheme, block, _HEAD)


def read_mxfp4(block: Fields) -> Declaration:
    """MXFP4 as gpt-oss stores it.

    Raises:
        InputError: A key has a wrong type.
    """
    return _declared("mxfp4", Scheme("MXFP4", ("mxfp4",), weight_only=True), block, _HEAD)


def read_awq(block: Fields) -> Declaration:
    """AutoAWQ: 4 bits, in the order of its GEMM kernels.

    Raises:
        InputError: A key has a wrong type or value.
        UnsupportedError: Another order of the words, or another number of bits.
    """
    order = next((block.string(k) for k in ("version", "format") if k in block), "gemm").lower()
    if order != "gemm":
        raise unsupported(f"AWQ in the order {order!r}", block.at("version"), "read: gemm")
    if (backend := block.string("backend", default="autoawq").lower()) == "llm-awq":
        raise unsupported(f"AWQ in the order of {backend}", block.at("backend"), "read: gemm")
    _four_bits("AWQ", block, "bits" if "bits" in block else "w_bit")
    scheme = Scheme("AWQ int4", ("int4",), weight_only=True, group=_group(block), symmetric=False)
    return _declared("awq", scheme, block, _HEAD)


def read_gptq(block: Fields) -> Declaration:
    """GPTQ: 4 bits, in either format of its zero points, with `desc_act` or without.

    Raises:
        InputError: A key has a wrong type or value.
        UnsupportedError: Another layout, or another number of bits.
    """
    layout = next((block.string(k) for k in ("checkpoint_format", "format") if k in block), "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise unsupported(
            f"GPTQ in the layout {layout!r}", block.at("checkpoint_format"), "read: gptq, gptq_v2"
        )
    _four_bits("GPTQ", block, "bits")
    if (words := block.string("pack_dtype", default="int32")) != "int32":
        raise unsupported(f"GPTQ in words of {words}", block.at("pack_dtype"))
    scheme = Scheme(
        f"GPTQ int4 {'v1' if layout == 'gptq' else 'v2'}",
        ("int4", "int4 ordered") if block.boolean("desc_act", default=False) else ("int4",),
        weight_only=True,
        group=_group(block),
        symmetric=block.boolean("sym", default=True),
        ordered=block.boolean("desc_act", default=False),
        v1=layout == "gptq",
    )
    head = () if block.boolean("lm_head", default=False) else _HEAD
    return _declared("gptq", scheme, block, head, _left_out(block))


def _declared(
    method: str, scheme: Scheme, block: Fields, implied: Iterable[str], more: Iterable[str] = ()
) -> Declaration:
    listed = block.strings("modules_to_not_convert") or block.strings("ignored_layers") or ()
    return Declaration(
        method=method,
        default=scheme,
        where=block.where,
        excluded=ModulePatterns([*listed, *more], block.where, anywhere=True),
        implied=ModulePatterns(implied, block.where),
    )


def _left_out(block: Fields) -> list[str]:
    """Modules that GPTQModel's `dynamic` leaves out: `-:` and a regular expression."""
    dynamic = block.section("dynamic")
    names = dynamic.values if dynamic is not None else ()
    return [f"re:{name[2:]}" for name in names if name.startswith("-:")]


def _four_bits(method: str, block: Fields, key: str) -> None:
    bits = block.integer(key)
    if bits != 4:
        raise unsupported(f"{method} with {bits} bits", block.at(key), "read: 4 bits")


def _group(block: Fields) -> int:
    """`group_size`; AutoAWQ's own files call it `q_group_size`.

    Raises:
        InputError: It is zero, or less than -1.
    """
    key = "group_size" if "group_size" in block else "q_group_size"
    size = block.integer(key, minimum=-1)
    if size == 0:
        raise InputError(
            "config/bad-value",
            f"{key} is 0, expected -1 or a positive integer",
            where=block.at(key),
            help="fetch config.json again",
        )
    return size
