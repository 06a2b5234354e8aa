"""What a pass is.

A pass has a name, a docstring that is its manual, options as a frozen dataclass, named properties
it requires and ensures, and `run`, which edits the module in place and says whether it changed
anything. Everything a pass may use is the module, its options and the context: no globals, no
environment.
"""

from __future__ import annotations

import dataclasses
import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from edgecc.devices import Device, get_device
from edgecc.ir.core import Module, site

__all__ = ["NoOptions", "Pass", "PassContext", "Remark", "site"]


@dataclass(frozen=True, slots=True)
class NoOptions:
    """For passes without options."""


PLAIN_VALUE = re.compile(r"[A-Za-z0-9_.+*/-]+")
"""Option values that need no quotes in a pipeline."""

O_co = TypeVar("O_co", covariant=True)


@dataclass(slots=True)
class Remark:
    """Why a pass did or did not do something: the answer to "why was this not fused?"."""

    pass_name: str
    where: str
    message: str
    applied: bool

    def __str__(self) -> str:
        verb = "applied" if self.applied else "not applied"
        return f"{self.pass_name}: {verb} at {self.where}: {self.message}"


@dataclass(slots=True)
class PassContext:
    """What a pass may use besides the module.

    Attributes:
        device: The device being compiled for, if the pipeline has one.
        remarks: Collected in order; `-v` prints them.
    """

    device: Device | None = None
    remarks: list[Remark] = field(default_factory=list)

    def device_for(self, option: str) -> Device | None:
        """The device an option names, or the one being compiled for when it is empty.

        Raises:
            UnsupportedError: The option names no device.
        """
        return get_device(option) if option else self.device


class Pass(ABC, Generic[O_co]):
    """One transformation of a module.

    Class attributes:
        name: Verb-object with dashes; the file has the same name with underscores.
        options_type: Frozen dataclass of the options; its fields are the spelling in pipelines.
        requires: Properties (`edgecc.ir.verifier.PROPERTIES`) that must hold before.
        ensures: Properties that hold after.
        tolerance: 0 for passes that keep values exactly; else the relative error they may add.
        idempotent: Whether a second run, right after the first, never changes anything.
    """

    name: ClassVar[str]
    options_type: ClassVar[type] = NoOptions
    requires: ClassVar[tuple[str, ...]] = ()
    ensures: ClassVar[tuple[str, ...]] = ()
    tolerance: ClassVar[float] = 0.0
    idempotent: ClassVar[bool] = True

    def __init__(self, options: O_co | None = None) -> None:
        self.options: O_co = self.options_type() if options is None else options

    @abstractmethod
    def run(self, module: Module, ctx: PassContext) -> bool:
        """Edit the module in place; return whether anything changed."""

    def remark(self, ctx: PassContext, where: str, message: str, *, applied: bool) -> None:
        """Record why something was or was not done."""
        ctx.remarks.append(Remark(self.name, where, message, applied))

    def __str__(self) -> str:
        """Spelling in a pipeline: name, then the options that differ from their defaults."""
        shown = [
            f"{f.name.replace('_', '-')}={print_value(value)}"
            for f in dataclasses.fields(self.options)  # type: ignore[arg-type]
            if (value := getattr(self.options, f.name)) != f.default
        ]
        return f"{self.name}{{{','.join(shown)}}}" if shown else self.name


def print_value(value: object) -> str:
    """An option's value as a pipeline spells it."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if PLAIN_VALUE.fullmatch(text) else json.dumps(text, ensure_ascii=False)
