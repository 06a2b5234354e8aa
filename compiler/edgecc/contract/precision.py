"""The table of a pair: each tensor, how it is stored, what the config says, what is done."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from edgecc.contract.examination import Examination
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.gather import Gather
from edgecc.frontends.quantization import read_quantization
from edgecc.frontends.quantization.declaration import Declaration, form
from edgecc.frontends.quantization.names import as_weight
from edgecc.ir.core import Module
from edgecc.ir.encodings import Dense, Encoding
from edgecc.ir.recipes import RECIPES
from edgecc.ir.weights import Alias, Derived, Stored, Unbound, Weight

_SIDECAR = re.compile(
    r".*(_scales?|_scale_2|_scale_inv|\.[kvq]_scale|\.input_amax|_zero_point|_shape|[._]g_idx|"
    r"\.qzeros|\.scales|\.absmax|\.quant_map|\.SCB)"
)
"""Tensors that say how to read another one."""

_NOT_READ = "not read"
_PART = re.compile(r"\w+: (?:(?:model|language_model|thinker)\.)*\w+\.")
"""The role and the part of a model that a tensor belongs to."""


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor, or the same tensor of many layers.

    Attributes:
        tensor: Its name, after the role; numbers of layers that are alike are a `*`.
        count: How many there are.
        stored: Format in the file.
        declared: Format in the config; empty where a config says nothing about such a tensor.
        decision: What is done with it.
    """

    tensor: str
    count: int
    stored: str
    declared: str
    decision: str


def precision_table(found: Examination) -> list[Row]:
    """All tensors of the checkpoints that could be opened, and what a draft borrows."""
    rows: list[Row] = []
    for role, checkpoint in found.checkpoints.items():
        rows += _rows_of(checkpoint, found.module)
        if found.module is not None:
            rows += _borrowed(found.module, role)
    return list(_grouped(rows))


def _rows_of(checkpoint: Checkpoint, module: Module | None) -> Iterator[Row]:
    declaration = _declaration(checkpoint)
    weights = _by_key(module, checkpoint.role)
    for name, info in checkpoint.tensors.items():
        weight = weights.get(name)
        title = f"{checkpoint.role}: {name}"
        if weight is None:
            if not _SIDECAR.fullmatch(name):
                decision = "not decided" if module is None else _NOT_READ
                yield Row(title, 1, info.dtype.value, "", decision)
            continue
        declared, agrees = _declared(declaration, name, weight)
        kept = "kept" if agrees else "kept as stored, against the config"
        yield Row(title, 1, _format(weight.encoding), declared, kept)


def _by_key(module: Module | None, role: str) -> dict[str, Weight]:
    """Weights by the tensor that holds their values; packed words are the weight made of them."""
    found: dict[str, Weight] = {}
    made: dict[str, Weight] = {}
    parts: set[str] = set()
    for weight in module.weights.values() if module is not None else ():
        source = weight.source
        if isinstance(source, Stored) and source.checkpoint == role:
            found[_key(source)] = weight
        elif module is not None and isinstance(source, Derived) and RECIPES[source.recipe].repacks:
            inputs = [module.weights[i].source for i in source.inputs]
            keys = [_key(i) for i in inputs if isinstance(i, Stored) and i.checkpoint == role]
            made |= dict.fromkeys(keys[:1], weight)
            parts |= set(keys[1:])
    return {key: weight for key, weight in (found | made).items() if key not in parts}


def _key(source: Stored) -> str:
    return next(p.key for p in source.parts if p.component == "weight")


def _declaration(checkpoint: Checkpoint) -> Declaration | None:
    with Gather().step():  # what is wrong with it is told elsewhere
        return read_quantization(checkpoint).declaration
    return None


def _declared(declaration: Declaration | None, name: str, weight: Weight) -> tuple[str, bool]:
    """What the metadata says about a weight, and whether it is so."""
    module = as_weight(name).removesuffix(".weight")
    linear = len(weight.shape) == 2 and "embed" not in module.rpartition(".")[2]
    dense = isinstance(weight.encoding, Dense)
    if not linear and dense:
        return "", True  # metadata speaks of linear layers
    expected = declaration.expects(module) if declaration is not None else None
    if expected is None:
        return "unquantized" if declaration is not None else "nothing", dense
    return expected.name, not dense and expected.allows(weight.encoding)


def _format(encoding: Encoding) -> str:
    return encoding.dtype.value if isinstance(encoding, Dense) else form(encoding)


def _borrowed(module: Module, role: str) -> Iterator[Row]:
    for symbol, weight in module.weights.items():
        owner, _, name = symbol.partition(".")
        if owner != role:
            continue
        if isinstance(weight.source, Alias):
            donor = module.weights.resolve(symbol)
            donor_role, _, donor_name = donor.partition(".")
            decision = f"shared: {donor_role}'s {donor_name}, {_format(weight.encoding)}"
            yield Row(f"{role}: {name}", 1, "not stored", "", decision)
        elif isinstance(weight.source, Unbound):
            yield Row(f"{role}: {name}", 1, "not stored", "", "borrowed from the target")


def _grouped(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows that differ in numbers only, as one; of what is not read, one for each part."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", row.tensor)
        if row.decision == _NOT_READ and (part := _PART.match(pattern)):
            pattern = f"{part[0]}*"
        key = (pattern, row.stored, row.declared, row.decision)
        groups.setdefault(key, []).append(row)
    for (pattern, *_), group in groups.items():
        first = group[0]
        name = pattern if len(group) > 1 else first.tensor
        yield Row(name, len(group), first.stored, first.declared, first.decision)


def counts(rows: Iterable[Row]) -> Mapping[str, int]:
    """Tensors by the format they are stored in, without those that are not stored."""
    found: dict[str, int] = {}
    for row in rows:
        if row.stored != "not stored":
            found[row.stored] = found.get(row.stored, 0) + row.count
    return found
