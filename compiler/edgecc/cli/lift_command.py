"""`edgecc lift`."""

from __future__ import annotations

import click

from edgecc.cli.options import (
    Command,
    common,
    components_option,
    offline_option,
    prompt_lookup_options,
    spec_method_option,
)
from edgecc.cli.output import Console
from edgecc.cli.text_output import text_file, write_text


@click.command(cls=Command, name="lift", short_help="Write checkpoints as IR text.")
@click.argument("target", required=False)
@click.option(
    "--draft", metavar="DIR|ID", help="Draft checkpoint; alone it lifts with unbound weights."
)
@click.option("-o", "--output", metavar="FILE", help="Default: standard output.")
@click.option(
    "--max-model-len", type=click.IntRange(min=1), metavar="N", help="Prompt and answer together."
)
@spec_method_option
@click.option(
    "-k",
    "--num-speculative-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Most proposals per round; default: the draft's block.",
)
@prompt_lookup_options
@click.option(
    "--max-batch-size",
    "--max-num-seqs",
    "max_batch_size",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Most sequences at a time.",
)
@components_option
@offline_option
@click.option("--locations", is_flag=True, help="Also print where each node comes from.")
@common
def command(
    console: Console,
    target: str | None,
    draft: str | None,
    output: str | None,
    max_model_len: int | None,
    spec_method: str,
    num_speculative_tokens: int | None,
    prompt_lookup_min: int | None,
    prompt_lookup_max: int | None,
    max_batch_size: int,
    components: str,
    offline: bool,
    locations: bool,
) -> int:
    """Lift TARGET, with --draft or without, to IR text. Reads configs and headers only.

    Both are folders, or ids on the model hub, org/name[@revision]: those are fetched into its
    cache first, because the text names the weights.
    """
    import edgecc
    from edgecc.ir import print_module

    file = text_file(output, [target, draft])
    module = edgecc.lift(
        target,
        draft,
        max_model_len=max_model_len,
        spec_method=spec_method,
        num_speculative_tokens=num_speculative_tokens,
        prompt_lookup_min=prompt_lookup_min,
        prompt_lookup_max=prompt_lookup_max,
        max_batch_size=max_batch_size,
        components=components,
        offline=offline,
        tell=console.finding,
        progress=console.progress(),
    )
    write_text(file, print_module(module, locations=locations))
    nodes = sum(len(g.nodes) for g in module.graphs.values())
    graphs = ", ".join(module.graphs)
    return console.ok(f"{graphs}: {nodes} nodes, {len(module.weights)} weights")
