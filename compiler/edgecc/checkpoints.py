"""The open checkpoints that a module's weights are read from."""

from __future__ import annotations

from edgecc.errors import Diagnostic
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.ir.core import Module


def checkpoints_of(module: Module) -> dict[str, Checkpoint]:
    """Open checkpoints by role."""
    return {
        role: reader
        for role, reader in module.weights.readers.items()
        if isinstance(reader, Checkpoint)
    }


def close_checkpoints(module: Module) -> None:
    """Close them all: no stored weight can be read any more."""
    for checkpoint in checkpoints_of(module).values():
        checkpoint.close()


def findings_of(module: Module) -> list[Diagnostic]:
    """Warnings and notes about them."""
    return [f for checkpoint in checkpoints_of(module).values() for f in checkpoint.findings]
