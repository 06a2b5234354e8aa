"""Running one pass: what the manager and `repeat` do alike."""

from __future__ import annotations

import traceback
from typing import Any, Literal

from edgecc.errors import EdgeccError, PassError, VerifyError
from edgecc.ir.core import Module
from edgecc.ir.verifier import check_property
from edgecc.passes.base import Pass, PassContext


def run_pass(item: Pass[Any], module: Module, ctx: PassContext) -> bool:
    """Run a pass; returns whether it changed anything.

    Raises:
        EdgeccError: Its own error, with the pass named.
        PassError: It crashed, or did not say whether it changed anything.
        MemoryError: There is not enough.
    """
    try:
        changed = item.run(module, ctx)
    except MemoryError:
        raise
    except EdgeccError as error:
        error.add_note(f"in pass {item.name}")
        raise
    except Exception as error:
        reason = "".join(traceback.format_exception_only(error)[-1:]).strip()
        raise PassError(
            "pass/crash",
            f"pass {item.name} failed: {reason}",
            help="this is a bug in the pass: --debug shows the traceback, `edgecc reduce` "
            "makes the input small for a report",
        ) from error
    if not isinstance(changed, bool):
        raise PassError(
            "pass/no-answer",
            f"pass {item.name} returned {changed!r}, expected True or False",
            help="run() says whether it changed the module",
        )
    return changed


def require(module: Module, item: Pass[Any], verb: Literal["requires", "ensures"]) -> None:
    """Check the properties a pass requires, or those it ensures.

    Raises:
        VerifyError: A requirement does not hold: a pipeline in the wrong order.
        PassError: A promise is broken: a bug.
    """
    for name in item.requires if verb == "requires" else item.ensures:
        findings = check_property(module, name)
        if findings:
            error = VerifyError if verb == "requires" else PassError
            raise error(*[f.with_note(f"pass {item.name} {verb} {name}") for f in findings])
