"""What `edgecc check` finds out, and how it is told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from edgecc.contract.examination import Examination, examine
from edgecc.contract.precision import Row, precision_table
from edgecc.contract.rule import Manual
from edgecc.contract.rules import manual_for
from edgecc.errors import Diagnostic, EdgeccError, InputError, Severity
from edgecc.frontends.gather import merged
from edgecc.frontends.options import LiftOptions
from edgecc.hub import metadata_place
from edgecc.ir.core import Module
from edgecc.ir.weights import Derived
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights

_ROWS = 1024
"""Rows of a target call: a choice of the compile, which says so if a block has more."""
_HEADINGS = ("tensor", "in the file", "in the config", "decision")


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding with the manual of its rule.

    Attributes:
        diagnostic: What was found, where, and what to do.
        rule: The manual; None for what no rule explains.
    """

    diagnostic: Diagnostic
    rule: Manual | None

    @property
    def why(self) -> str:
        """Why it matters."""
        return self.rule.why if self.rule is not None else ""

    @property
    def action(self) -> str:
        """What to do: what the finding says, else the manual."""
        return self.diagnostic.help or (self.rule.action if self.rule is not None else "")

    def as_json(self) -> dict[str, Any]:
        """One object."""
        d = self.diagnostic
        return {
            "id": d.id,
            "severity": d.severity.value,
            "what": d.message,
            "where": d.where,
            "notes": list(d.notes),
            "why": self.why,
            "do": self.action,
            "rule": None if self.rule is None else self.rule.name,
        }


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What was found out about a target, or a pair.

    Attributes:
        exit_code: 0 as it should be, 3 bad, 4 not supported.
        findings: Errors first, then warnings, then notes.
        table: All tensors.
        decisions: What a compile would make of them.
    """

    exit_code: int
    findings: tuple[Finding, ...]
    table: tuple[Row, ...]
    decisions: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """One object."""
        return {
            "ok": self.exit_code == 0,
            "exit_code": self.exit_code,
            "findings": [f.as_json() for f in self.findings],
            "tensors": [{f: getattr(r, f) for f in Row.__dataclass_fields__} for r in self.table],
            "decisions": list(self.decisions),
        }

    def table_lines(self) -> list[str]:
        """The table as text, its columns aligned."""
        cells = [_HEADINGS, *(_cells(row) for row in self.table)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(_HEADINGS) - 1)]
        return [
            "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]).rstrip()
            for row in cells
        ]


def check(
    target: str | os.PathLike[str],
    draft: str | os.PathLike[str] | None = None,
    *,
    strict: bool = False,
    spec_method: str = "auto",
    components: str = "text",
    offline: bool = False,
) -> CheckReport:
    """Check a target, or a pair, from metadata alone.

    Never raises for what is wrong with the checkpoints: that is what the report is about.

    Args:
        target: Folder of the target checkpoint, or its id on the hub (`org/name[@revision]`): then
            only headers of its weights are fetched.
        draft: Folder of the draft checkpoint, or its id.
        strict: Count warnings as errors.
        spec_method: Speculation method; `mtp` checks the target's own block.
        components: Parts of a multimodal target.
        offline: Do not ask the hub: take what its cache has.

    Raises:
        UsageError: The arguments are no paths, or contradict each other.
        UnsupportedError: An id was given, and `huggingface_hub` is not installed.
        ResourceError: The file system refuses.
        HubError: A model cannot be had from the hub.
    """
    options = LiftOptions(spec_method=spec_method, components=components, prefill_chunk=_ROWS)
    notes: list[Diagnostic] = []
    with ExitStack() as stack:
        places = [
            stack.enter_context(metadata_place(v, role, offline=offline, tell=notes.append))
            for v, role in ((target, "target"), (draft, "draft"))
            if v is not None
        ]
        second = places[1] if draft is not None else None
        found = examine(places[0], second, options, metadata_only=True, notes=True)
        stack.callback(found.close)
        module = found.module
        if module is not None:
            with found.errors.step():
                BindSharedWeights().run(module, PassContext())
        return _report(found, notes, strict)


def _report(found: Examination, notes: list[Diagnostic], strict: bool) -> CheckReport:
    errors = found.errors.errors
    told = merged(d for error in sorted(errors, key=_order) for d in error.diagnostics)
    others = sorted([*notes, *found.warnings()], key=lambda d: d.severity is Severity.NOTE)
    code = min((error.exit_code for error in errors), default=0)
    if strict and code != InputError.exit_code:
        warned = any(d.severity is Severity.WARNING for d in others)
        code = InputError.exit_code if warned else code
    return CheckReport(
        exit_code=code,
        findings=tuple(Finding(d, manual_for(d.id)) for d in (*told, *others)),
        table=tuple(precision_table(found)),
        decisions=(
            *(() if found.module is None else _decisions(found.module)),
            *(
                f"{role}: only headers were fetched, values of scales are left to a compile"
                for role, checkpoint in found.checkpoints.items()
                if checkpoint.headers_only
            ),
        ),
    )


def _decisions(module: Module) -> tuple[str, ...]:
    """What lifting decided, and what it took from the configs that nobody else shows."""
    draft = module.metadata.get("draft")
    layout = draft.get("slot_layout") if isinstance(draft, dict) else None
    facts = [f"{symbol.partition('.')[0]} {text}" for symbol, text in _ropes(module)]
    if isinstance(draft, dict) and layout is not None:
        facts.append(
            f"draft block: {draft['block_size']} slots, {layout}, mask token "
            f"{draft['mask_token_id']}"
        )
    return (*module.decisions, *facts)


def _ropes(module: Module) -> Iterator[tuple[str, str]]:
    for symbol, weight in module.weights.items():
        source = weight.source
        if isinstance(source, Derived) and source.recipe == "rope_table":
            params = dict(source.params)
            if params["part"] == "cos":
                scaled = (
                    f", factor {params['factor']:g}" if params.get("factor", 1.0) != 1.0 else ""
                )
                kind, theta = params["rope_type"], params["theta"]
                yield symbol, f"rope: {kind}, theta {theta:g}, {params['dim']} dims{scaled}"


def _order(error: EdgeccError) -> int:
    return error.exit_code


def _cells(row: Row) -> tuple[str, ...]:
    name = row.tensor if row.count == 1 else f"{row.tensor} ({row.count})"
    return (name, row.stored, row.declared, row.decision)
