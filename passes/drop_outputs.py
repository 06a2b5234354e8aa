"""`drop-outputs`: leave out optional graph outputs a runtime will not ask for."""

from __future__ import annotations

from dataclasses import dataclass

from edgecc.errors import UsageError, did_you_mean
from edgecc.ir.core import Module
from edgecc.passes.base import Pass, PassContext
from edgecc.roles import Role

OPTIONAL = (Role.BASE_LOGITS, Role.DRAFT_LOGITS, Role.CONFIDENCE)
_UNREAD = OPTIONAL[:2]


@dataclass(frozen=True, slots=True)
class DropOutputsOptions:
    """`roles`: roles to drop, joined by `+`; by default what the runtime never reads."""

    roles: str = "+".join(r.value for r in _UNREAD)


class DropOutputs(Pass[DropOutputsOptions]):
    """Remove optional outputs, so that `dce` can remove the work only they need.

    What it does
        Drops graph outputs by role: by default the draft's logits, which the runtime never reads.
        Its confidences stay: a request may have a threshold for them, and they cost next to
        nothing.

    Why
        Engines compute every output of a graph; seven rows of logits of a large vocabulary are
        megabytes a round.

    Example:
        `return proposals = %tokens, draft_logits = %logits` keeps `proposals` only.

    Options
        `roles`: which ones.

    Requires and ensures
        Nothing.

    Exactness
        Exact for the outputs that stay.

    Limits
        Only optional roles are dropped; others are left alone.
    """

    name = "drop-outputs"
    options_type = DropOutputsOptions

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Filter the outputs of all graphs the runtime starts.

        Raises:
            UsageError: A role is unknown.
        """
        known = {r.value for r in Role}
        for name in self.options.roles.split("+"):
            if name not in known:
                raise UsageError(
                    "pass/bad-option",
                    f"drop-outputs: unknown role {name!r}",
                    help=did_you_mean(name, known),
                )
        roles = {Role(r) for r in self.options.roles.split("+")} & set(OPTIONAL)
        changed = False
        for graph in module.entries():
            kept = [o for o in graph.outputs if o.role not in roles]
            changed |= len(kept) != len(graph.outputs)
            graph.outputs = kept
        return changed
