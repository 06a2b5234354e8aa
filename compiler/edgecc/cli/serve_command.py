"""`edgecc serve`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgecc.backends.bundle_manifest import MANIFEST
from edgecc.cli.cache_options import cache_dir_option
from edgecc.cli.options import (
    Command,
    common,
    components_option,
    confidence_threshold_option,
    num_threads,
    num_threads_option,
    offline_option,
)
from edgecc.cli.output import Console
from edgecc.cli.pair_options import PAIR_FLAGS, draft_options, models_of, size_options
from edgecc.cli.server_flags import open_to_all, server_options
from edgecc.errors import BundleError, UnsupportedError, UsageError
from edgecc.hub_layout import checkpoint_name
from edgecc.paths import local_path

if TYPE_CHECKING:
    from edgecc.backends.server import ServerOptions


@click.command(cls=Command, name="serve", short_help="Serve a bundle with OpenAI's API.")
@click.argument("source", metavar="BUNDLE|TARGET")
@draft_options("Draft checkpoint of a TARGET.")
@size_options("of a TARGET")
@components_option
@offline_option
@cache_dir_option
@click.option(
    "--host",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen at.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    metavar="N",
    help="Port to listen at; 0 takes a free one.",
)
@click.option(
    "--served-model-name",
    metavar="NAME",
    help="Name of the model in requests; default: that of the bundle's directory.",
)
@click.option("--api-key", hidden=True)
@click.option(
    "--max-queued-requests",
    type=click.IntRange(min=0),
    default=16,
    show_default=True,
    metavar="N",
    help="Requests that may wait for a slot; more are refused with 429.",
)
@click.option(
    "--queue-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600,
    show_default=True,
    metavar="S",
    help="Seconds that one may wait.",
)
@click.option(
    "--shutdown-timeout",
    type=click.IntRange(min=0),
    default=30,
    show_default=True,
    metavar="S",
    help="Seconds that answers under way have at the end.",
)
@click.option(
    "--max-request-bytes",
    type=click.IntRange(min=1),
    default=32 * 2**20,
    show_default=True,
    metavar="N",
    help="Longest body of a request.",
)
@click.option(
    "-k",
    "--num-speculative-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Proposals per round where a request does not say; default: as compiled.",
)
@click.option("--no-speculation", is_flag=True, help="Decode with the target alone.")
@confidence_threshold_option
@click.option(
    "--metrics/--no-metrics", default=True, show_default=True, help="Serve /metrics for Prometheus."
)
@click.option(
    "--chat-page/--no-chat-page",
    default=True,
    show_default=True,
    help="Serve a page to chat with at /.",
)
@click.option("--chat-template", metavar="FILE", help="Template to use instead of the bundle's.")
@click.option("--strict", is_flag=True, help="Refuse unknown fields instead of ignoring them.")
@click.option(
    "--device", metavar="NAME", help="Device of the bundle to use, or to compile a TARGET for."
)
@num_threads_option
@common
def command(console: Console, source: str, **flags: Any) -> int:
    """Serve BUNDLE with OpenAI's API until a signal ends it.

    TARGET, the folder of a checkpoint or its id on the model hub (org/name[@revision]), is compiled
    into the cache first, unless it is there.
    Requests need a key if EDGECC_API_KEY has some, separated by commas.
    """
    _check_installed()
    import edgecc
    from edgecc.backends.server import Server, bind
    from edgecc.hub import hub_id

    wanted = hub_id(source, "target", console.finding)
    name = wanted.repository if wanted else checkpoint_name(local_path(source, "bundle"))
    options = server_options(name, flags)
    if finding := open_to_all(flags["host"], options):
        console.finding(finding)
    with bind(flags["host"], flags["port"]) as listener, _bundle(console, source, flags) as bundle:
        generator = edgecc.load(
            bundle,
            device=flags["device"],
            num_threads=num_threads(flags["num_threads"]),
            progress=console.progress(),
        )
        with generator:
            _check_proposals(generator, options)
            server = Server(
                generator,
                options,
                listener,
                on_start=lambda url: console.always(f"serving {options.model_name} at {url}/v1"),
                shutdown_timeout_s=flags["shutdown_timeout"],
                verbose=console.verbosity > 0,
            )
            server.serve_until_told()
    return console.ok("stopped")


@contextmanager
def _bundle(console: Console, source: str, flags: dict[str, Any]) -> Iterator[Path]:
    """What to serve: the bundle that was given, or that of a checkpoint, from the cache.

    A bundle of the cache is not pruned while the block runs.

    Raises:
        UsageError: A bundle was given, and flags to compile it with.
        EdgeccError: The checkpoint cannot be had, or not be compiled.
    """
    from edgecc.hub import checkpoint_folder

    path = checkpoint_folder(  # which of a folder and an id is used has been told
        source, "target", offline=flags["offline"], progress=console.progress()
    )
    if (path / MANIFEST).exists() or not (path / "config.json").exists():
        given = [name for name in PAIR_FLAGS if flags[name] is not None]
        if given:
            raise UsageError(
                "usage/compiled",
                f"--{given[0].replace('_', '-')} is for checkpoints, and {path} is none",
                help="a bundle has been compiled: leave it out",
            )
        yield path
        return
    with _compiled(console, path, flags) as bundle:
        try:
            yield bundle
        except BundleError as error:  # nobody compiles this one by hand
            help = f"remove {bundle}: it is in the cache, and will be compiled again"
            raise BundleError(*(replace(d, help=help) for d in error.diagnostics)) from error


def _compiled(
    console: Console, target: Path, flags: dict[str, Any]
) -> AbstractContextManager[Path]:
    import edgecc
    from edgecc.backends.cache import ArtifactCache, cache_directory
    from edgecc.bundle_cache import cached_bundle
    from edgecc.hub import checkpoint_folder

    models = {"target": str(target), "model": None, "spec_method": "auto"}
    models |= {"draft_quantization": "auto", "num_speculative_tokens": None}
    models |= {"prompt_lookup_min": None, "prompt_lookup_max": None}
    wanted = flags | models
    _, draft, speculative = models_of(wanted)
    place = None
    if draft is not None:
        place = checkpoint_folder(
            draft,
            "draft",
            offline=flags["offline"],
            tell=console.finding,
            progress=console.progress(),
        )
    options: dict[str, Any] = {
        "device": flags["device"] or "cpu",
        "components": flags["components"],
        "max_model_len": flags["max_model_len"],
        "max_input_len": flags["max_input_len"],
        "max_batch_size": flags["max_batch_size"] or 1,
        **speculative,
    }

    def build(out: Path) -> None:
        console.info(f"compiling {target} into the cache at {root}")
        edgecc.compile(
            target,
            place,
            out=out,
            progress=console.progress(),
            tell=console.finding,
            cache=ArtifactCache.open(flags["cache_dir"], report=console.finding),
            **options,
        )

    def on_wait() -> None:
        console.info("another process compiles the same bundle: waiting for it")

    root = cache_directory(flags["cache_dir"])
    return cached_bundle(root, target, place, options, build, on_wait)


def _check_proposals(generator: Any, options: ServerOptions) -> None:
    """What is asked for by default must be possible: else each request would fail.

    Raises:
        UsageError: More proposals than were compiled.
        RequestError: A confidence threshold that the draft does not have.
    """
    from edgecc.backends.runtime.request import check_confidence_threshold, check_lookup

    wanted = options.num_speculative_tokens
    draft = generator.model.draft
    most = draft.num_speculative_tokens if draft else 0
    if wanted is not None and wanted > most:
        raise UsageError(
            "usage/num-speculative-tokens",
            f"--num-speculative-tokens is {wanted}, and the bundle was compiled for {most}",
        )
    lookup = check_lookup(None, generator.model)
    check_confidence_threshold(options.confidence_threshold, generator.model, lookup)


def _check_installed() -> None:
    """Say what to install before anything is loaded.

    Raises:
        UnsupportedError: A package of the extra is missing.
    """
    try:
        import fastapi
        import prometheus_client
        import uvicorn
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "serve/not-installed",
            f"serving needs {error.name}, which is not installed",
            help="pip install 'edgecc[serve]'",
        ) from error
    del fastapi, prometheus_client, uvicorn
