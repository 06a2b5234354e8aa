"""`edgecc run`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from edgecc.cli.options import Command, common, num_threads
from edgecc.cli.output import Console, print_json, print_text
from edgecc.cli.sampling_options import sampling_arguments, sampling_flags
from edgecc.errors import UsageError
from edgecc.paths import local_path

if TYPE_CHECKING:
    from edgecc.backends.runtime import Chunk, Generator


@click.command(cls=Command, name="run", short_help="Generate text with a bundle.")
@click.argument("bundle")
@click.option("--prompt", metavar="TEXT", help="Text to continue.")
@click.option("--chat", metavar="TEXT", help="A request, put into the bundle's chat template.")
@click.option("--system", metavar="TEXT", help="System message for --chat.")
@click.option("--token-ids", metavar="ID,ID,...", help="The prompt as token ids.")
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="FILE",
    help="An image in the prompt, before its text; may be given several times.",
)
@click.option(
    "--max-new-tokens",
    type=int,
    default=128,
    show_default=True,
    metavar="N",
    help="Longest answer.",
)
@click.option(
    "-k",
    "--num-speculative-tokens",
    type=int,
    metavar="N",
    help="Most proposals per round; default: as compiled.",
)
@click.option("--no-speculation", is_flag=True, help="Decode with the target alone.")
@click.option(
    "--adaptive-speculation",
    is_flag=True,
    help="Propose fewer where it is faster, by what is measured.",
)
@sampling_flags
@click.option("--stop", multiple=True, metavar="TEXT", help="End the answer at this text.")
@click.option("--ignore-eos", is_flag=True, help="Go on after end-of-text tokens.")
@click.option("--stats", is_flag=True, help="Acceptance and times on standard error.")
@click.option("--device", help="Device of the bundle to use.")
@click.option(
    "--num-threads",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads of the engine; default: $EDGECC_NUM_THREADS, or chosen by size.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@common
def command(console: Console, bundle: str, **flags: Any) -> int:
    """Generate text with BUNDLE; the text streams to standard output.

    Decoding is greedy unless --temperature or --sample is given.
    """
    import edgecc

    prompt = _prompt(flags)
    generator = edgecc.load(
        local_path(bundle, "bundle"),
        device=flags["device"],
        num_threads=num_threads(flags["num_threads"]),
        progress=console.progress(),
    )
    with generator:
        chunks = generator.stream(
            **prompt,
            max_new_tokens=flags["max_new_tokens"],
            num_speculative_tokens=flags["num_speculative_tokens"],
            speculation=not flags["no_speculation"],
            stop=list(flags["stop"]),
            ignore_eos=flags["ignore_eos"],
            adaptive_speculation=flags["adaptive_speculation"],
            **sampling_arguments(generator, flags),
        )
        last = _as_json(generator, chunks) if flags["as_json"] else _as_text(chunks)
    if flags["stats"] and last is not None:
        console.always(last.stats.render())
    for warning in last.stats.warnings if last is not None else ():
        console.info(f"warning[run/acceptance]: {warning}")
    if last is not None and last.seed is not None:
        console.info(f"seed {last.seed}")
    count = last.stats.new_tokens if last is not None else 0
    reason = last.finish_reason if last is not None else "length"
    return console.ok(f"{count} tokens, finished by {reason}")


def _prompt(flags: dict[str, Any]) -> dict[str, Any]:
    """The prompt argument of `Generator.stream`.

    Raises:
        UsageError: None or several were given, or ids are no numbers.
    """
    given = [n for n in ("prompt", "chat", "token_ids") if flags[n] is not None]
    if len(given) != 1:
        raise UsageError(
            "usage/prompt",
            "give one of --prompt, --chat and --token-ids"
            + (f", not {len(given)}" if given else ""),
        )
    if flags["system"] is not None and flags["chat"] is None:
        raise UsageError("usage/prompt", "--system goes with --chat")
    images = list(flags["images"]) or None
    if flags["prompt"] is not None:
        return {"prompt": flags["prompt"], "images": images}
    if flags["chat"] is not None:
        system = flags["system"]
        head = [] if system is None else [{"role": "system", "content": system}]
        return {"messages": [*head, {"role": "user", "content": _content(flags["chat"], images)}]}
    return {"token_ids": _token_ids(flags["token_ids"]), "images": images}


def _content(text: str, images: list[str] | None) -> str | list[dict[str, str]]:
    """A message of text, with images before it."""
    if not images:
        return text
    pictures = [{"type": "image", "image": path} for path in images]
    return [*pictures, {"type": "text", "text": text}]


def _token_ids(text: str) -> list[int]:
    items = [item.strip() for item in text.split(",")] if text.strip() else []
    if bad := [item for item in items if not re.fullmatch(r"-?[0-9]{1,18}", item)]:
        raise UsageError(
            "usage/token-ids",
            f"--token-ids has {bad[0]!r}, which is no token id",
            help="for example --token-ids 12,5,77",
        )
    return [int(item) for item in items]


def _as_text(chunks: Iterator[Chunk]) -> Chunk | None:
    last = None
    for last in chunks:
        print_text(last.text)
    print_text("\n")
    return last


def _as_json(generator: Generator, chunks: Iterator[Chunk]) -> Chunk | None:
    tokens: list[int] = []
    text: list[str] = []
    logprobs: list[dict[str, object]] = []
    last = None
    for last in chunks:
        tokens += last.token_ids
        logprobs += [item.as_dict() for item in last.logprobs or ()]
        text.append(last.text)
    stats = last.stats if last is not None else None
    draft = generator.model.draft
    wants_logprobs = last is not None and last.logprobs is not None
    print_json(
        {
            "token_ids": tokens,
            "text": "".join(text),
            "finish_reason": str(last.finish_reason) if last is not None else "length",
            "seed": last.seed if last is not None else None,
            **({"logprobs": logprobs} if wants_logprobs else {}),
            "accepted": stats.accepted_by_round if stats else [],
            "proposed": stats.proposed_by_round if stats else [],
            "compiled_speculative_tokens": draft.num_speculative_tokens if draft else 0,
            "stats": stats.as_dict() if stats else {},
        }
    )
    return last
