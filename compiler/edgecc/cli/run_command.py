"""`edgecc run`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from edgecc.cli.grammar_options import grammar_argument, grammar_flags
from edgecc.cli.options import (
    Command,
    common,
    confidence_threshold_option,
    num_threads,
    num_threads_option,
    prompt_lookup_options,
)
from edgecc.cli.output import Console, print_json, print_text
from edgecc.cli.sampling_options import sampling_arguments, sampling_flags
from edgecc.errors import EdgeccError, UsageError
from edgecc.paths import local_path
from edgecc.prompt_lookup import PromptLookup

if TYPE_CHECKING:
    from edgecc.backends.runtime import Chunk, Generation, Generator
    from edgecc.backends.runtime.request import Request


@click.command(cls=Command, name="run", short_help="Generate text with a bundle.")
@click.argument("bundle")
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    metavar="TEXT",
    help="Text to continue; several are answered together.",
)
@click.option(
    "--chat", multiple=True, metavar="TEXT", help="A request, put into the bundle's chat template."
)
@click.option("--system", multiple=True, metavar="TEXT", help="System message for --chat.")
@click.option("--token-ids", multiple=True, metavar="ID,ID,...", help="The prompt as token ids.")
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
@confidence_threshold_option
@prompt_lookup_options
@sampling_flags
@grammar_flags
@click.option("--stop", multiple=True, metavar="TEXT", help="End the answer at this text.")
@click.option("--ignore-eos", is_flag=True, help="Go on after end-of-text tokens.")
@click.option("--stats", is_flag=True, help="Acceptance and times on standard error.")
@click.option("--device", metavar="NAME", help="Device of the bundle to use.")
@num_threads_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@common
def command(console: Console, bundle: str, **flags: Any) -> int:
    """Generate text with BUNDLE; the text streams to standard output.

    Decoding is greedy unless --temperature or --sample is given.
    """
    import edgecc

    prompts, grammar = _prompts(flags), grammar_argument(flags)
    generator = edgecc.load(
        local_path(bundle, "bundle"),
        device=flags["device"],
        num_threads=num_threads(flags["num_threads"]),
        progress=console.progress(),
    )
    with generator:
        wanted = {
            "max_new_tokens": flags["max_new_tokens"],
            "num_speculative_tokens": flags["num_speculative_tokens"],
            "speculation": not flags["no_speculation"],
            "stop": list(flags["stop"]),
            "ignore_eos": flags["ignore_eos"],
            "adaptive_speculation": flags["adaptive_speculation"],
            "prompt_lookup": _prompt_lookup(flags),
            "confidence_threshold": flags["confidence_threshold"],
            "grammar": grammar,
            **sampling_arguments(generator, flags),
        }
        if len(prompts) == 1:
            chunks = generator.stream(**prompts[0], **wanted)
            answers = [_shown(chunks, as_text=not flags["as_json"])]
        else:
            answers = generator.generate_batch(_requests(generator, prompts, wanted))
            if not flags["as_json"]:
                parts = (f"{_title(n)}\n{a.text}\n" for n, a in enumerate(answers, 1))
                print_text("\n".join(parts))
        if flags["as_json"]:
            found = [_as_json(generator, answer) for answer in answers]
            print_json(found[0] if len(found) == 1 else {"answers": found})
    for number, answer in enumerate(answers, 1):
        if len(answers) > 1 and flags["stats"]:
            console.always(_title(number))
        _tell(console, answer, stats=flags["stats"])
    count = sum(answer.stats.new_tokens for answer in answers)
    reasons = ", ".join(dict.fromkeys(str(answer.finish_reason) for answer in answers))
    several = f" in {len(answers)} answers" if len(answers) > 1 else ""
    return console.ok(f"{count} tokens{several}, finished by {reasons}")


def _prompt_lookup(flags: dict[str, Any]) -> PromptLookup | None:
    """Look proposals up if a number of tokens says so, else as the bundle was compiled."""
    low, high = flags["prompt_lookup_min"], flags["prompt_lookup_max"]
    return None if low is None and high is None else PromptLookup.of(low, high)


def _title(number: int) -> str:
    """What stands above one of several answers, as `head` has it above one of several files."""
    return f"==> prompt {number} <=="


def _tell(console: Console, answer: Generation, *, stats: bool) -> None:
    """What is said about an answer beside its text."""
    if stats:
        console.always(answer.stats.render())
    for warning in answer.stats.warnings:
        console.info(f"warning[run/acceptance]: {warning}")
    if answer.seed is not None:
        console.info(f"seed {answer.seed}")


def _prompts(flags: dict[str, Any]) -> list[dict[str, Any]]:
    """The prompt arguments of `Generator.request`, for each prompt.

    Raises:
        UsageError: None or several kinds were given, or ids are no numbers.
    """
    chat, system, token_ids = (_single(flags, name) for name in ("chat", "system", "token_ids"))
    prompts = flags["prompts"]
    given = [kind for kind in (prompts or None, chat, token_ids) if kind is not None]
    if len(given) != 1:
        raise UsageError(
            "usage/prompt",
            "give one of --prompt, --chat and --token-ids"
            + (f", not {len(given)}" if given else ""),
        )
    if system is not None and chat is None:
        raise UsageError("usage/prompt", "--system goes with --chat")
    images = list(flags["images"]) or None
    if images and len(prompts) > 1:
        raise UsageError("usage/prompt", f"--image goes with one --prompt, not {len(prompts)}")
    if chat is not None:
        head = [] if system is None else [{"role": "system", "content": system}]
        return [{"messages": [*head, {"role": "user", "content": _content(chat, images)}]}]
    if token_ids is not None:
        return [{"token_ids": _token_ids(token_ids), "images": images}]
    return [{"prompt": prompt, "images": images} for prompt in prompts]


def _single(flags: dict[str, Any], name: str) -> str | None:
    """The value of a flag that may be given once; None if it was not.

    Raises:
        UsageError: It was given several times. `--prompt` may be, so the last value is not it.
    """
    values: tuple[str, ...] = flags[name]
    if len(values) > 1:
        raise UsageError(
            "usage/prompt",
            f"--{name.replace('_', '-')} is given {len(values)} times, it makes one request",
            help="only --prompt may be given several times",
        )
    return values[0] if values else None


def _requests(
    generator: Generator, prompts: list[dict[str, Any]], wanted: dict[str, Any]
) -> list[Request]:
    """The requests of several prompts.

    Raises:
        EdgeccError: One of them is refused; a note says which.
    """
    requests = []
    for number, prompt in enumerate(prompts, 1):
        try:
            requests.append(generator.request(**prompt, **wanted))
        except EdgeccError as error:
            first, *rest = error.diagnostics
            noted = first.with_note(f"this is prompt {number} of {len(prompts)}")
            raise type(error)(noted, *rest) from error
    return requests


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


def _shown(chunks: Iterable[Chunk], *, as_text: bool) -> Generation:
    """An answer, its text shown as it comes."""
    from edgecc.backends.runtime import Generation

    def shown() -> Iterator[Chunk]:
        begun = False
        try:
            for chunk in chunks:
                if as_text:
                    print_text(chunk.text)
                    begun = begun or bool(chunk.text)
                yield chunk
        except EdgeccError:
            if begun:  # messages begin a line of their own
                print_text("\n")
            raise
        if as_text:
            print_text("\n")

    return Generation.of(shown())


def _as_json(generator: Generator, answer: Generation) -> dict[str, object]:
    stats = answer.stats
    logprobs = answer.logprobs
    return {
        "token_ids": answer.token_ids,
        "text": answer.text,
        "finish_reason": str(answer.finish_reason),
        "seed": answer.seed,
        **({} if logprobs is None else {"logprobs": [item.as_dict() for item in logprobs]}),
        "accepted": stats.accepted_by_round,
        "proposed": stats.proposed_by_round,
        "compiled_speculative_tokens": generator.model.num_speculative_tokens,
        "stats": stats.as_dict(),
    }
