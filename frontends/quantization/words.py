"""4-bit integers in 32-bit words: AutoAWQ, GPTQ and compressed-tensors `pack-quantized`.

A recipe of the IR gives the words another order (`edgecc.ir.word_recipes`); here their tensors are
checked and the recipe is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.quantization.declaration import Scheme
from edgecc.frontends.quantization.groups import (
    check_declared,
    count_groups,
    group_order,
    is_ordered,
)
from edgecc.frontends.quantization.layouts import unsupported
from edgecc.frontends.quantization.stored import (
    EncodedWeight,
    bad,
    check_tensor,
    matrix_shape,
    sidecar,
)
from edgecc.frontends.quantization.zero_points import middle
from edgecc.ir import words
from edgecc.ir.encodings import Int4
from edgecc.ir.types import DType, format_shape

AWQ_FORMAT = "AWQ (qweight, qzeros, scales)"
GPTQ_FORMAT = "GPTQ (qweight, qzeros, scales, g_idx)"
PACKED_FORMAT = "compressed-tensors pack-quantized (weight_packed, weight_scale, weight_shape)"

_BITS = 32


def read_awq(
    checkpoint: Checkpoint, module: str, shape: tuple[int, ...], scheme: Scheme | None
) -> EncodedWeight:
    """A weight of AutoAWQ: `qweight` `[K, N/8]`, `qzeros` `[G, N/8]`, `scales` `[G, N]`.

    Args:
        checkpoint: Where the tensors are.
        module: Module name.
        shape: Logical `[N, K]` the model needs.
        scheme: What is declared.

    Raises:
        InputError: A tensor is missing, or of a wrong dtype or shape.
        UnsupportedError: Another number of bits, or columns that are no whole number of groups.
    """
    key = f"{module}.qweight"
    rows, columns = matrix_shape(checkpoint, key, shape)
    _check_words(checkpoint, key, (columns, rows), 1, "AWQ")
    names = ("scales", "qzeros")
    parts = {"qweight": key, **{n: sidecar(checkpoint, module, n, AWQ_FORMAT) for n in names}}
    groups = count_groups(checkpoint, parts["scales"], 0, rows, columns)
    check_declared(checkpoint, parts["scales"], columns, groups, scheme)
    zeros = (groups, rows // words.CODES)
    check_tensor(checkpoint, parts["qzeros"], "zero points", (DType.I32,), zeros)
    return _weight(checkpoint, module, shape, parts, "awq_int4", zero_point=True)


def read_gptq(
    checkpoint: Checkpoint, module: str, shape: tuple[int, ...], scheme: Scheme | None
) -> EncodedWeight:
    """A weight of GPTQ: `qweight` `[K/8, N]`, `scales` `[G, N]`, `qzeros` `[G, N/8]`, `g_idx`.

    Zero points that are all in the middle are left out. A file that says it has the first format
    and holds the middle of the second in every word has the second.

    Raises:
        InputError: See `read_awq`; or zero points of a symmetric weight that are not all equal, or
            columns of groups that are not there or not told.
        UnsupportedError: See `read_awq`.
    """
    key = f"{module}.qweight"
    rows, columns = matrix_shape(checkpoint, key, shape)
    _check_words(checkpoint, key, (columns, rows), 0, "GPTQ")
    parts = {"qweight": key, "scales": sidecar(checkpoint, module, "scales", GPTQ_FORMAT)}
    groups = count_groups(checkpoint, parts["scales"], 0, rows, columns)
    zeros = sidecar(checkpoint, module, "qzeros", GPTQ_FORMAT)
    packed = (groups, -(-rows // words.CODES))
    check_tensor(checkpoint, zeros, "zero points", (DType.I32,), packed)
    v1 = scheme is not None and scheme.v1
    beside: tuple[str, ...] = ()
    symmetric = scheme is not None and bool(scheme.symmetric)
    if symmetric:
        v1, beside = middle(checkpoint, zeros, v1), (zeros,)
    else:
        parts["qzeros"] = zeros
    order = group_order(checkpoint, module, "g_idx", GPTQ_FORMAT, scheme)
    if not order:
        check_declared(checkpoint, parts["scales"], columns, groups, scheme)
    return _weight(
        checkpoint,
        module,
        shape,
        parts,
        "gptq_int4",
        zero_point=not symmetric,
        order=order,
        beside=beside,
        v1=v1,
    )


def read_packed(
    checkpoint: Checkpoint, module: str, shape: tuple[int, ...], scheme: Scheme | None
) -> EncodedWeight:
    """A weight of compressed-tensors: `weight_packed` `[N, K/8]`, `weight_scale` `[N, G]`.

    With zero points, `weight_zero_point` `[N/8, G]`; with an order of columns, `weight_g_idx`.

    Raises:
        InputError: See `read_awq`; or `weight_shape` says something else.
        UnsupportedError: See `read_awq`.
    """
    key = f"{module}.weight_packed"
    rows, columns = matrix_shape(checkpoint, key, shape)
    _check_stated_shape(checkpoint, module, shape)
    _check_words(checkpoint, key, (rows, columns), 1, "compressed-tensors")
    parts = {"weight_packed": key}
    parts["weight_scale"] = sidecar(checkpoint, module, "weight_scale", PACKED_FORMAT)
    groups = count_groups(checkpoint, parts["weight_scale"], 1, rows, columns)
    order = group_order(checkpoint, module, "weight_g_idx", PACKED_FORMAT, scheme)
    if not order:
        check_declared(checkpoint, parts["weight_scale"], columns, groups, scheme)
    zeros = f"{module}.weight_zero_point"
    stored = zeros in checkpoint.tensors
    if not stored and scheme is not None and scheme.symmetric is False:
        sidecar(checkpoint, module, "weight_zero_point", f"{PACKED_FORMAT}, asymmetric")
    if stored:
        packed = (-(-rows // words.CODES), groups)
        check_tensor(checkpoint, zeros, "zero points", (DType.I32,), packed)
        parts["weight_zero_point"] = zeros
    return _weight(
        checkpoint,
        module,
        shape,
        parts,
        "packed_int4",
        zero_point=stored,
        order=order,
        beside=tuple(n for n in (f"{module}.weight_shape",) if n in checkpoint.tensors),
    )


def _weight(
    checkpoint: Checkpoint,
    module: str,
    shape: tuple[int, ...],
    parts: Mapping[str, str],
    recipe: str,
    *,
    zero_point: bool,
    order: str = "",
    beside: tuple[str, ...] = (),
    **params: bool,
) -> EncodedWeight:
    """The weight that a recipe makes of these tensors, in the order of its inputs."""
    codes, scales, *rest = parts.items()
    rows, columns = shape
    scale = checkpoint.info(scales[1])
    groups = scale.shape[1 if recipe == "packed_int4" else 0]
    ordered = bool(order) and is_ordered(checkpoint, order, columns, groups)
    inputs = dict([codes, scales, *rest])
    if ordered:
        inputs[order.rpartition(".")[2]] = order
    elif order:
        beside = (*beside, order)
    if rows % 2:
        raise unsupported("4-bit integers and an odd number of rows", checkpoint.location(codes[1]))
    return EncodedWeight(
        Int4(columns // groups, zero_point, ordered, scale.dtype),
        inputs,
        module,
        shape,
        recipe,
        {"zero_point": zero_point, "ordered": ordered, **params},
        beside,
    )


def _check_words(
    checkpoint: Checkpoint, key: str, values: tuple[int, int], packed: int, producer: str
) -> None:
    """Check the codes: eight values a word, along one axis.

    Args:
        checkpoint: Where they are.
        key: Their tensor.
        values: Shape of the values, in the order of the tensor.
        packed: The axis along which values share a word.
        producer: For messages.

    Raises:
        InputError: The codes have another dtype or shape.
        UnsupportedError: Another number of bits, or words that are partly filled.
    """
    info = checkpoint.info(key)
    where = checkpoint.location(key)
    expected = tuple(-(-n // words.CODES) if a == packed else n for a, n in enumerate(values))
    if info.dtype is not DType.I32:
        raise bad("quant/bad-dtype", f"codes are {info.dtype.value}, expected i32", where)
    if values[packed] % words.CODES:
        raise unsupported(
            f"{producer} and {values[packed]} values along a packed axis",
            where,
            f"eight 4-bit codes share a word: a multiple of {words.CODES} is read",
        )
    if info.shape == expected:
        return
    same = len(info.shape) == 2 and info.shape[1 - packed] == expected[1 - packed]
    bits = _BITS * info.shape[packed] / values[packed] if same and values[packed] else 0
    if bits in (2, 3, 8):
        raise unsupported(f"{producer} with {bits:.0f} bits", where, "read: 4 bits")
    raise bad(
        "quant/bad-shape",
        f"words {format_shape(info.shape)}, expected {format_shape(expected)}: eight 4-bit codes "
        f"of {producer} a word",
        where,
        "AWQ packs rows of the weight, [K, N/8]; GPTQ columns, [K/8, N]",
    )


def _check_stated_shape(checkpoint: Checkpoint, module: str, shape: tuple[int, ...]) -> None:
    key = f"{module}.weight_shape"
    if key not in checkpoint.tensors:
        return
    check_tensor(checkpoint, key, "sizes", (DType.I64, DType.I32), (2,), "quant/bad-shape")
    if checkpoint.is_remote(key):  # as in `check_scalar`
        return
    stated = tuple(int(size) for size in checkpoint.read(key))
    if stated != shape:
        raise bad(
            "quant/bad-shape",
            f"weight_shape is {format_shape(stated)}, expected {format_shape(shape)}",
            checkpoint.location(key),
        )
