"""`edgecc check`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from edgecc.cli.options import (
    Command,
    common,
    components_option,
    offline_option,
    spec_method_option,
)
from edgecc.cli.output import Console, counted, print_json, print_text, visible
from edgecc.errors import Severity

if TYPE_CHECKING:
    from edgecc.contract.report import CheckReport


@click.command(cls=Command, name="check", short_help="Check a pair by its metadata.")
@click.argument("target")
@click.option("--draft", metavar="DIR|ID", help="Draft checkpoint.")
@spec_method_option
@components_option
@offline_option
@click.option("--strict", is_flag=True, help="Warnings are errors.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@common
def command(
    console: Console,
    target: str,
    draft: str | None,
    spec_method: str,
    components: str,
    offline: bool,
    strict: bool,
    as_json: bool,
) -> int:
    """Check TARGET, alone or with its draft: all findings at once, without reading weights.

    TARGET is the folder of a checkpoint, or its id on the model hub, org/name[@revision]: of that,
    only the headers of the weights are fetched.
    """
    from edgecc.contract.report import check

    report = check(
        target,
        draft,
        strict=strict,
        spec_method=spec_method,
        components=components,
        offline=offline,
    )
    if as_json:
        print_json(report.as_json())
    elif report.table:
        print_text(visible("\n".join(report.table_lines())) + "\n")
    _tell(console, report)
    return _verdict(console, report)


def _tell(console: Console, report: CheckReport) -> None:
    for finding in report.findings:
        console.finding(finding.diagnostic)
        if finding.why:
            console.info(f"  why: {finding.why}")
        if not finding.diagnostic.help and finding.action:
            console.info(f"  help: {finding.action}")
    for decision in report.decisions:
        console.info(f"  {decision}")


def _verdict(console: Console, report: CheckReport) -> int:
    severities = [f.diagnostic.severity for f in report.findings]
    counts = [counted(severities.count(s), s.value) for s in Severity]
    if report.exit_code == 0:
        return console.ok(", ".join(counts))
    first = report.findings[0].diagnostic
    return console.failed(first.id, first.message, report.exit_code)
