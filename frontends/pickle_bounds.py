"""Bounds of what a pickle makes Python do, found before it is run.

A few bytes can ask the machine behind `pickle` for gigabytes (the number of a memo entry is the
length of an array), and values that are nested deeply enough end the process when they are hashed:
nothing counts the calls. Both can be told from the instructions alone.
"""

from __future__ import annotations

import pickletools
from itertools import repeat

MAX_DEPTH = 64
"""Values within values: those of a model have a tenth of it."""

MAX_STEPS = 2**20
"""Instructions; a tensor takes some 30."""

_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
_GETS = ("GET", "BINGET", "LONG_BINGET")
_FILLS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
"""Instructions that put values into the one below them, which stays."""


def check_bounds(data: bytes) -> None:
    """Check the instructions of a pickle.

    Raises:
        ValueError: They ask for too much, or are none.
    """
    machine = _Machine()
    for count, (opcode, argument, position) in enumerate(pickletools.genops(data)):
        if count == MAX_STEPS:
            raise ValueError(f"more than {MAX_STEPS} instructions")
        if opcode.name in _PUTS and not 0 <= int(argument or 0) <= int(position or 0):
            raise ValueError(f"memo entry {argument} at byte {position}: they are numbered from 0")
        machine.step(opcode, argument)


class _Machine:
    """How deeply each value on the stack is nested; None is a mark."""

    def __init__(self) -> None:
        self._stack: list[int | None] = []
        self._memo: dict[int, int] = {}

    def step(self, opcode: pickletools.OpcodeInfo, argument: object) -> None:
        """Do what an instruction does to the stack.

        Raises:
            ValueError: It needs what is not there, or nests too deeply.
        """
        name = opcode.name
        if name in _PUTS or name == "MEMOIZE":
            number = len(self._memo) if name == "MEMOIZE" else int(str(argument))
            self._memo[number] = self._top()
            return
        taken = self._taken(opcode)
        if name in _GETS:
            depth = self._memo.get(int(str(argument)), 0)
        elif name == "DUP":
            depth = taken[0]
        elif name in _FILLS:
            depth = max(taken[-1], 1 + max(taken[:-1], default=-1))
        else:
            depth = 1 + max(taken, default=-1)
        if depth > MAX_DEPTH:
            raise ValueError(f"values are nested more than {MAX_DEPTH} deep")
        for given in opcode.stack_after:
            self._stack.append(None if given is pickletools.markobject else depth)

    def _top(self) -> int:
        if not self._stack:
            raise ValueError("nothing to keep")
        return self._stack[-1] or 0

    def _taken(self, opcode: pickletools.OpcodeInfo) -> list[int]:
        """What an instruction takes away, the topmost first."""
        needs = list(opcode.stack_before)
        taken: list[int] = []
        if pickletools.stackslice in needs:
            while (depth := self._pop(opcode)) is not None:
                taken.append(depth)
            needs = [n for n in needs if n not in (pickletools.markobject, pickletools.stackslice)]
        return taken + [self._pop(opcode) or 0 for _ in repeat(None, len(needs))]

    def _pop(self, opcode: pickletools.OpcodeInfo) -> int | None:
        if not self._stack:
            raise ValueError(f"{opcode.name} finds nothing on the stack")
        return self._stack.pop()
