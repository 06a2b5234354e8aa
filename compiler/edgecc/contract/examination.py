"""Everything that can be found out about checkpoints before their values are read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from edgecc.contract.pair import Pair, Side, side_of
from edgecc.contract.rules import RULES, manual_for
from edgecc.errors import Diagnostic, EdgeccError, Severity
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.checkpoint_files import Place
from edgecc.frontends.gather import Gather, merged
from edgecc.frontends.lift import check_given, lift_opened, open_target
from edgecc.frontends.options import LiftOptions
from edgecc.ir.core import Module


@dataclass(slots=True)
class Examination:
    """What was found.

    Attributes:
        checkpoints: Those that could be opened, by role; see `close`.
        module: What was lifted; None if that is impossible.
        errors: What is wrong.
    """

    checkpoints: dict[str, Checkpoint]
    module: Module | None = None
    errors: Gather = field(default_factory=Gather)

    def lifted(self) -> Module:
        """The module of a pair that is as it should be.

        Raises:
            InputError: Something is bad. Each finding says what to do: itself, or its rule.
            UnsupportedError: Something is not supported. Likewise.
        """
        try:
            self.errors.raise_found()
        except EdgeccError as error:
            raise type(error)(*map(_with_action, error.diagnostics)) from error
        assert self.module is not None
        return self.module

    def close(self) -> None:
        """Close the checkpoints: no stored weight can be read any more."""
        for checkpoint in self.checkpoints.values():
            checkpoint.close()

    def warnings(self) -> list[Diagnostic]:
        """Warnings and notes about the checkpoints."""
        found = [f for checkpoint in self.checkpoints.values() for f in checkpoint.findings]
        return merged(dict.fromkeys(found))


def examine(
    target: Path | Place,
    draft: Path | Place | None,
    options: LiftOptions,
    *,
    metadata_only: bool = False,
    notes: bool = False,
) -> Examination:
    """Open, lift, and run the rules; all of it that is possible.

    Warnings and notes go to the `findings` of the checkpoints.

    Args:
        target: Where the target checkpoint is.
        draft: Where the draft checkpoint is.
        options: For lifting.
        metadata_only: Read headers, configs, single scales and maps of ids, no whole weight.
        notes: Also keep notes of the rules, which ask for no action.

    Raises:
        UsageError: Options contradict each other or the checkpoints.
        ResourceError: The file system refuses.
    """
    check_given(options, target=True, draft=draft is not None)
    found = Examination({})
    opened = found.checkpoints
    with found.errors.step():
        opened["target"] = open_target(target, options)
    if draft is not None:
        with found.errors.step():
            opened["draft"] = Checkpoint.open(draft, role="draft")
    for checkpoint in opened.values():
        checkpoint.metadata_only = metadata_only
    if found.errors.errors:
        # Half of a pair is lifted for what is wrong with it, and not for the speculation.
        options = replace(options, spec_method="auto", num_speculative_tokens=None)
    if opened:
        with found.errors.step():
            module = lift_opened(opened.get("target"), opened.get("draft"), options)
            found.module = None if found.errors.errors else module
    _run_rules(found, notes)
    return found


def _with_action(diagnostic: Diagnostic) -> Diagnostic:
    manual = None if diagnostic.help else manual_for(diagnostic.id)
    return diagnostic if manual is None else replace(diagnostic, help=manual.action)


def _run_rules(found: Examination, notes: bool) -> None:
    sides: dict[str, Side | None] = {}
    for role, checkpoint in found.checkpoints.items():
        with Gather().step():  # an error here is one that lifting has told
            sides[role] = side_of(checkpoint)
    pair = Pair(sides.get("target"), sides.get("draft"))
    for rule in RULES:
        with found.errors.step():
            for finding in rule().check(pair):
                if notes or finding.severity is not Severity.NOTE:
                    role = finding.where.partition("/")[0].partition(":")[0]
                    found.checkpoints[role].findings.append(finding)
