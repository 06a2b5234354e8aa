"""Rules about quantized weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from edgecc.contract.pair import Pair
from edgecc.contract.rule import Rule
from edgecc.errors import Diagnostic, Severity
from edgecc.frontends.fields import Fields
from edgecc.ir.encodings import NVFP4

_BLOCK = NVFP4().block


class QuantizationMethod(Rule):
    """The weights are quantized with a method that edgecc reads exactly.

    What it checks
        `quantization_config`, `hf_quant_config.json`, and the names of stored tensors: a method is
        recognized even where the metadata is missing. Two files that disagree are told.

    Why it matters
        Packed bytes of one method read as another give numbers, and no error. In which order AWQ
        packed its words, and whether GPTQ's zero points are one less than they mean, no tensor
        shows.

    What to do
        Use an export with a supported method, or the unquantized checkpoint with `--quantization`.
    """

    name = "quantization-method"
    ids: ClassVar[Mapping[str, str]] = {
        "quant/unsupported-method": "a method or layout that is understood but not read",
        "quant/metadata-disagrees": "two files name different algorithms",
        "quant/no-metadata": "tensors are packed, and no metadata says how",
        "quant/not-compressed": "weights are not saved in their stored form",
        "quant/bad-pattern": "a pattern is no regular expression, or may take for ever",
        "quant/bad-dtype": "a weight is stored as numbers of an unexpected kind",
    }


class QuantizedModules(Rule):
    """What is quantized is decided from the tensors; the metadata only has to agree.

    What it checks
        Every linear layer: stored format against the declared one. Exclusions are understood in
        every dialect: exact names, parents, globs, `re:` patterns, with and without `model.` and
        `language_model.`, under `ignore`, `exclude_modules` or `modules_to_not_convert`, whose
        entries may also be the middle of a name; the targets of `config_groups`, and `dynamic` of
        GPTQ. Patterns that name nothing are listed. A draft has its own metadata and inherits
        nothing.

    Why it matters
        Lists are incomplete in published exports, and loaders that trust them read BF16 weights as
        packed, or take scales that were never stored. A head that is excluded under another name
        is the usual case.

    What to do
        Nothing if the table is as you expect; else export again, or correct the list.
    """

    name = "quantized-modules"
    ids: ClassVar[Mapping[str, str]] = {
        "quant/declared-not-stored": "declared quantized, stored unquantized",
        "quant/stored-not-declared": "stored quantized, not declared so",
        "quant/stored-otherwise": "stored in another format than declared",
        "quant/unused-pattern": "a pattern names no stored module",
    }


class CacheScales(Rule):
    """A quantized KV cache is an offer of the producer, and not taken.

    What it checks
        Whether the metadata declares a precision for the KV cache. Stored scales of keys and values
        are left unread.

    Why it matters
        The setting never changes weights. Keeping keys and values wider is always possible and at
        least as accurate; it takes more memory a token.

    What to do
        Nothing.
    """

    name = "cache-scales"
    ids: ClassVar[Mapping[str, str]] = {
        "quant/kv-cache": "a quantized KV cache is declared; it is kept wider",
    }


class Scales(Rule):
    """Every packed weight has all of its scales, in the shapes its format asks for.

    What it checks
        Presence, dtype and shape of scales beside every packed weight, under the same prefix, and
        that single scales are positive numbers; zero points likewise, and the group of each column.
        Block scales and values are read when compiling: NaN, negative, or zero over values that are
        not, and zero points of a symmetric weight that are not all equal. A width that is no whole
        number of blocks, and a declared block size that is not the stored one, are told.

    Why it matters
        A missing scale that is taken as one, or a NaN in one block, gives NaN or noise at run time.

    What to do
        Fetch or export the checkpoint again.
    """

    name = "scales"
    ids: ClassVar[Mapping[str, str]] = {
        "quant/missing-scale": "a packed weight lacks a scale",
        "quant/bad-scale": "a scale has a wrong shape, dtype or value",
        "quant/stray-scale": "an unquantized weight has a scale beside it",
        "quant/two-weights": "a weight is stored in two layouts",
        "quant/bad-shape": "a quantized weight has another shape than the config gives it",
        "quant/partial-block": "a row is no whole number of blocks",
        "quant/group-size": "the declared block size is not the one of the format, or stored",
        "quant/bad-groups": "columns are of groups that are not there",
        "quant/zero-points": "a symmetric weight has zero points that differ",
    }

    def check(self, pair: Pair) -> Iterable[Diagnostic]:
        """Compare declared block sizes of NVFP4 with what the format has."""
        for side in pair.sides:
            for block in side.quantization():
                yield from self._sizes(block)

    def _sizes(self, block: Fields) -> Iterator[Diagnostic]:
        named = [block, *self._layers(block)]
        for fields in named:
            algorithm = fields.string("quant_algo", default="").upper()
            size = fields.integer("group_size", minimum=-1, default=None)
            if algorithm in ("NVFP4", "W4A16_NVFP4") and size not in (None, _BLOCK):
                yield Diagnostic(
                    "quant/group-size",
                    f"group_size is {size}, but blocks of NVFP4 have {_BLOCK} values",
                    where=fields.at("group_size"),
                    help="the stored scales count: correct the entry, or export again",
                    severity=Severity.WARNING,
                )

    def _layers(self, block: Fields) -> Iterator[Fields]:
        layers = block.section("quantized_layers")
        for module in layers.values if layers is not None else ():
            if (entry := layers.section(module) if layers is not None else None) is not None:
                yield entry
