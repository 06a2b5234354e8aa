"""`edgecc verify`."""

from __future__ import annotations

from typing import Any

import click

from edgecc.cli.options import Command, common, num_threads, num_threads_option
from edgecc.cli.output import Console, print_json
from edgecc.errors import MismatchError
from edgecc.paths import local_path


@click.command(cls=Command, name="verify", short_help="Prove a bundle on this machine.")
@click.argument("bundle")
@click.option("--device", metavar="NAME", help="Device of the bundle to use.")
@num_threads_option
@click.option(
    "--prompts",
    type=click.IntRange(min=0),
    default=4,
    show_default=True,
    metavar="N",
    help="Random prompts on which speculation is compared with plain decoding.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    metavar="N",
    help="Length of each answer.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@common
def command(console: Console, bundle: str, **flags: Any) -> int:
    """Check BUNDLE here: file hashes, reference rows, and speculation against plain decoding."""
    from edgecc.backends.runtime.verify import verify_bundle

    result = verify_bundle(
        local_path(bundle, "bundle"),
        device=flags["device"],
        num_threads=num_threads(flags["num_threads"]),
        prompts=flags["prompts"],
        max_new_tokens=flags["max_new_tokens"],
        progress=console.progress(),
    )
    for check in result.checks:
        console.info(f"  {check}")
    if flags["as_json"]:
        fields = ("name", "error", "tolerance", "passed")
        print_json(
            {
                "passed": result.passed,
                "checks": [
                    {f: getattr(c, f) for f in (*fields, *(["detail"] if c.detail else []))}
                    for c in result.checks
                ],
            }
        )
    if not result.passed:
        failed = [c for c in result.checks if not c.passed]
        raise MismatchError(
            "verify/mismatch",
            f"{len(failed)} of {len(result.checks)} checks failed, first: {failed[0]}",
            where=bundle,
            help="the bundle's answers on this machine cannot be trusted: compile again, and "
            "report it if it stays",
        )
    return console.ok(f"{bundle}: {len(result.checks)} checks passed")
