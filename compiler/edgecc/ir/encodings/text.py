"""The spelling of encodings in IR text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from edgecc.ir.encodings.base import Encoding
from edgecc.ir.encodings.dense import Dense
from edgecc.ir.encodings.floating import FP8, MXFP4, NVFP4
from edgecc.ir.encodings.integer import Int4, Int8, Int8Block
from edgecc.ir.types import DType

VALID = (
    "dense<TYPE>, nvfp4<block=N>, nvfp4<block=N, divisor, input_scale>, mxfp4<block=N>, "
    "fp8<tensor>, fp8<channel>, fp8<block=RxC>, fp8<tensor, scale=TYPE, input_scale>, "
    "int8<channel>, int8_block<block=N>, int4<group=N>, "
    "int4<group=N, scale=TYPE, zero_point, ordered>"
)
_ENCODING = re.compile(r"([a-z0-9_]+)<([^<>]*)>")


@dataclass(slots=True)
class _Arguments:
    """What stands between the angle brackets; reading takes it away."""

    flags: list[str]
    values: dict[str, str] = field(default_factory=dict)

    def word(self) -> str:
        if not self.flags:
            raise ValueError("an argument is missing")
        return self.flags.pop(0)

    def flag(self, name: str) -> bool:
        found = name in self.flags
        if found:
            self.flags.remove(name)
        return found

    def numbers(self, name: str, count: int = 1) -> list[int]:
        words = self.values.pop(name, "").split("x")
        if len(words) != count or not all(w.isascii() and w.isdecimal() for w in words):
            raise ValueError(f"{name} needs {'x'.join('N' * count)}")
        return [int(w) for w in words]

    def number(self, name: str) -> int:
        return self.numbers(name)[0]

    def scale_dtype(self) -> DType:
        return _dtype(self.values.pop("scale", DType.F32.value))


def _dtype(name: str) -> DType:
    try:
        return DType(name)
    except ValueError:
        raise ValueError(f"unknown element type {name!r}") from None


def _fp8(arguments: _Arguments) -> Encoding:
    input_scale, scale_dtype = arguments.flag("input_scale"), arguments.scale_dtype()
    if "block" in arguments.values:
        rows, columns = arguments.numbers("block", 2)
        return FP8("block", (rows, columns), input_scale, scale_dtype)
    return FP8(arguments.word(), input_scale=input_scale, scale_dtype=scale_dtype)


def _int8(arguments: _Arguments) -> Encoding:
    if not arguments.flag("channel"):
        raise ValueError("scales are per channel")
    return Int8(arguments.scale_dtype())


_READERS: Mapping[str, Callable[[_Arguments], Encoding]] = {
    "dense": lambda a: Dense(_dtype(a.word())),
    "nvfp4": lambda a: NVFP4(a.number("block"), a.flag("input_scale"), a.flag("divisor")),
    "mxfp4": lambda a: MXFP4(a.number("block")),
    "fp8": _fp8,
    "int8": _int8,
    "int8_block": lambda a: Int8Block(a.number("block")),
    "int4": lambda a: Int4(
        a.number("group"), a.flag("zero_point"), a.flag("ordered"), a.scale_dtype()
    ),
}


def parse_encoding(text: str) -> Encoding:
    """The inverse of `str(encoding)`.

    Raises:
        ValueError: No such encoding or argument; what is valid is listed.
    """
    match = _ENCODING.fullmatch(text.strip())
    read = _READERS.get(match[1]) if match else None
    reason = ""
    if match and read:
        given = [a.strip() for a in match[2].split(",") if a.strip()]
        flags = [a for a in given if "=" not in a]
        values = [a.split("=", 1) for a in given if "=" in a]
        arguments = _Arguments(flags, dict(values))
        try:
            found = read(arguments)
        except ValueError as error:
            reason = f": {error}"
        else:
            if not arguments.flags and not arguments.values and len(dict(values)) == len(values):
                return found
            reason = ": an argument too many"
    raise ValueError(f"unknown encoding {text!r}{reason}; valid: {VALID}")
