"""compressed-tensors, as llm-compressor writes it: metadata. Formats: compressed-tensors 0.20.

`config_groups` give a scheme to modules by class (`Linear`), by exact name or by `re:` and a
regular expression; `ignore` wins over all of them, and exact names over expressions over classes.
"""

from __future__ import annotations

from collections.abc import Iterator

from edgecc.errors import InputError
from edgecc.frontends.fields import Fields
from edgecc.frontends.quantization.declaration import Declaration, Scheme, kv_cache
from edgecc.frontends.quantization.layouts import unsupported
from edgecc.frontends.quantization.patterns import ModulePatterns

METHOD = "compressed-tensors"

_SPARSE = ("marlin-24", "sparse-bitmask", "sparse-24-bitmask")
_DENSE = ("", "dense")
_ORDERS_COLUMNS = (True, "group", "dynamic")
"""Values of `actorder` with which a group has columns that are no neighbours."""
_CLASSES = ("Linear", "Embedding")
_STRATEGIES = {"tensor": "fp8 tensor", "channel": "fp8 channel", "block": "fp8 block"}


def read_compressed_tensors(block: Fields) -> Declaration:
    """The declaration of `quantization_config`.

    Raises:
        InputError: A key has a wrong type or is missing.
        UnsupportedError: A format or a combination of options that is not read.
    """
    _reject_sparse(block)
    status = block.string("quantization_status", default="compressed")
    if status != "compressed":
        raise InputError(
            "quant/not-compressed",
            f"quantization_status is {status!r}: the weights are not in their stored form yet",
            where=block.at("quantization_status"),
            help="save the model compressed: save_pretrained(..., save_compressed=True)",
        )
    overall = block.string("format", default="")
    by_pattern: dict[str, Scheme] = {}
    default = None
    for target, scheme in _schemes(block, overall):
        if target == "Linear":
            default = default or scheme
        elif target not in _CLASSES:
            by_pattern.setdefault(target, scheme)
    return Declaration(
        method=METHOD,
        default=default,
        where=block.where,
        named=by_pattern,
        patterns=ModulePatterns(by_pattern, block.where),
        excluded=ModulePatterns(block.strings("ignore") or (), block.where),
        kv_cache=kv_cache(block),
    )


def _reject_sparse(block: Fields) -> None:
    sparsity = block.section("sparsity_config")
    found = sparsity.string("format", default="") if sparsity is not None else ""
    if found not in _DENSE:
        raise unsupported(f"compressed-tensors {found} (sparse weights)", sparsity.at("format"))  # type: ignore[union-attr]
    found = block.string("format", default="")
    if found in _SPARSE:
        raise unsupported(f"compressed-tensors {found} (sparse weights)", block.at("format"))
    if block.section("transform_config") is not None:
        raise unsupported("compressed-tensors transforms", block.at("transform_config"))


def _schemes(block: Fields, overall: str) -> Iterator[tuple[str, Scheme]]:
    """Targets and what is declared for them, in the order of the groups."""
    groups = block.section("config_groups")
    for name in groups.values if groups is not None else ():
        group = groups.section(name) if groups is not None else None
        if group is None:
            continue
        scheme = _scheme(group, group.string("format", default="") or overall)
        for target in group.strings("targets") or ():
            if scheme is not None:
                yield target, scheme


def _scheme(group: Fields, format_: str) -> Scheme | None:
    """What one group declares; None if it leaves weights alone.

    Raises:
        UnsupportedError: It is not read.
    """
    weights = group.section("weights")
    if weights is None:
        return None
    bits, kind = weights.integer("num_bits"), weights.string("type", default="int")
    size = weights.integer("group_size", minimum=-1, default=None)
    symmetric = weights.boolean("symmetric", default=True)
    inputs = group.section("input_activations")
    static = inputs is not None and inputs.values.get("dynamic") in (False, "local", None)
    strategy = weights.string("strategy", default="group" if size else "tensor")
    forms = _forms(bits, kind, strategy, size)
    if forms is None or (kind == "float" and not symmetric):
        spelled = f"{format_ or 'no format'}: {kind}{bits}, {strategy}, group {size}"
        raise unsupported(f"compressed-tensors {spelled}", weights.where)
    return Scheme(
        name=f"compressed-tensors {_title(forms[0], format_)}",
        forms=forms,
        weight_only=not static,
        group=(size or -1) if forms[0] == "int4" else None,
        block=_block(weights) if strategy == "block" else None,
        symmetric=symmetric,
        ordered=weights.values.get("actorder") in _ORDERS_COLUMNS,
    )


def _forms(bits: int, kind: str, strategy: str, group: int | None) -> tuple[str, ...] | None:
    """The forms that weights of a scheme are stored in; None if they are not read."""
    if kind == "float" and bits == 4:
        return {16: ("nvfp4",), 32: ("mxfp4",)}.get(group or 0)
    if kind == "float" and bits == 8:
        if group == 32:
            return ("mxfp8",)
        # a single row or block has one scale
        return (_STRATEGIES[strategy], "fp8 tensor") if strategy in _STRATEGIES else None
    if kind == "int" and bits == 4 and strategy in ("group", "channel"):
        return ("int4", "int4 ordered")
    return None


def _title(form: str, format_: str) -> str:
    return f"{format_} {form}" if format_ else form


def _block(weights: Fields) -> tuple[int, int]:
    sizes = weights.integers("block_structure", minimum=1) or (128, 128)
    if len(sizes) != 2:
        weights.fail("block_structure", "rows and columns of a block")
    return sizes[0], sizes[1]
