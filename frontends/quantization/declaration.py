"""What the metadata of a checkpoint says about its weights, in whatever dialect.

It only says what to *expect*: lists are incomplete in practice, and stored tensors decide. Two
facts are in the metadata alone, because no tensor shows them: in which order AutoAWQ packed its
words, and whether GPTQ's zero points are one less than they mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edgecc.errors import Diagnostic
from edgecc.frontends.fields import Fields
from edgecc.frontends.quantization.patterns import ModulePatterns
from edgecc.ir.encodings import FP8, Encoding, Int4

NONE = ModulePatterns((), "")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a module is declared to be stored.

    Attributes:
        name: For people: `NVFP4`, `compressed-tensors W4A16`.
        forms: What `form` says of encodings it may be stored in.
        weight_only: Whether there is no static activation scale; one that is stored was not
            calibrated.
        group: Columns of a group, -1 for all of them; None if it is not declared.
        block: Rows and columns of a block of FP8.
        symmetric: Whether integers have no zero points; None if it is not declared.
        ordered: Whether a tensor has to say of which group each column is.
        v1: Whether zero points are stored as one less, as in GPTQ's first format.
    """

    name: str
    forms: tuple[str, ...]
    weight_only: bool = False
    group: int | None = None
    block: tuple[int, int] | None = None
    symmetric: bool | None = None
    ordered: bool = False
    v1: bool = False

    def allows(self, encoding: Encoding) -> bool:
        """Whether a weight is stored in a declared form."""
        return form(encoding) in self.forms


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a checkpoint's metadata says about its weights.

    Attributes:
        method: `modelopt`, `compressed-tensors`, `fp8`, `awq`, `gptq`, `mxfp4`.
        default: Of linear layers that no pattern names; None if they are declared unquantized.
        named: Schemes by module pattern.
        patterns: The patterns of `named`.
        excluded: Modules left out.
        implied: Modules that the method always leaves out, without a list.
        excluded_first: Whether the exclusions win over the named ones.
        kv_cache: Declared precision of the KV cache, if any.
        findings: Contradictions in the metadata.
        where: File and key, for messages.
    """

    method: str
    default: Scheme | None
    where: str
    named: Mapping[str, Scheme] = field(default_factory=dict)
    patterns: ModulePatterns = NONE
    excluded: ModulePatterns = NONE
    implied: ModulePatterns = NONE
    excluded_first: bool = True
    kv_cache: str | None = None
    findings: tuple[Diagnostic, ...] = ()

    def expects(self, module: str) -> Scheme | None:
        """How a linear module should be stored, or None for unquantized."""
        left_out = any(p.match(module) is not None for p in (self.excluded, self.implied))
        if left_out and self.excluded_first:
            return None
        pattern = self.patterns.match(module)
        if pattern is not None:
            return self.named[pattern]
        return None if left_out else self.default

    def reads(self, module: str) -> Scheme | None:
        """How a packed module is stored: one that is declared unquantized, as all the others."""
        return self.expects(module) or self.default


def form(encoding: Encoding) -> str:
    """What a weight is stored in, in short: `nvfp4`, `fp8 channel`, `mxfp8`, `int4`."""
    if isinstance(encoding, FP8):
        return "mxfp8" if encoding.is_mx else f"fp8 {encoding.scaling}"
    if isinstance(encoding, Int4) and encoding.ordered:
        return "int4 ordered"
    return encoding.kind


def kv_cache(fields: Fields) -> str | None:
    """Declared precision of the KV cache; some producers write a string for the object."""
    if isinstance(fields.values.get("kv_cache_scheme"), str):
        return fields.string("kv_cache_scheme")
    if (scheme := fields.section("kv_cache_scheme")) is not None:
        return f"{scheme.string('type', default='')}{scheme.integer('num_bits', default=8)}"
    return fields.string("kv_cache_quant_algo", default=None)
