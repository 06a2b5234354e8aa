"""The tokenizer and chat templates that go into a bundle as the target checkpoint ships them."""

from __future__ import annotations

from dataclasses import replace

from edgecc.backends.bundle_writer import BundleWriter
from edgecc.backends.runtime.chat import ChatTemplates
from edgecc.backends.runtime.tokenizer import Tokenizer
from edgecc.errors import BundleError, Diagnostic, InputError, Severity
from edgecc.frontends.checkpoint import Checkpoint

TOKENIZER = "tokenizer.json"


def check_tokenizer(checkpoint: Checkpoint) -> None:
    """Load what the runtime will load, so that no bundle is made that it cannot open.

    A template that is not Jinja only stops chats: it becomes a warning among the findings.

    Raises:
        InputError: The tokenizer or its config cannot be read.
    """
    path = checkpoint.file(TOKENIZER)
    if path is None:
        checkpoint.findings.append(
            Diagnostic(
                "tokenizer/missing",
                f"no {TOKENIZER}: the bundle takes and gives token ids, not text",
                where=checkpoint.role,
                severity=Severity.NOTE,
            )
        )
        return
    try:
        _check_ids(Tokenizer.from_directory(path.parent), checkpoint)
        templates = ChatTemplates.from_directory(path.parent)
    except BundleError as error:
        raise InputError(*(_relocated(d, checkpoint) for d in error.diagnostics)) from error
    try:
        templates.check()
    except BundleError as error:
        checkpoint.findings += [
            replace(_relocated(d, checkpoint), severity=Severity.WARNING) for d in error.diagnostics
        ]


def _check_ids(tokenizer: Tokenizer, checkpoint: Checkpoint) -> None:
    """The library numbers added tokens itself; where a file has gaps, it means other ids."""
    added = (checkpoint.json(TOKENIZER) or {}).get("added_tokens")
    declared = [
        (token["id"], token["content"])
        for token in (added if isinstance(added, list) else ())
        if isinstance(token, dict) and isinstance(token.get("id"), int) and "content" in token
    ]
    differing = [(i, text) for i, text in declared if tokenizer.token(int(str(i))) != text]
    if differing:
        checkpoint.findings.append(
            Diagnostic(
                "tokenizer/other-ids",
                f"{len(differing)} added tokens get other ids than {TOKENIZER} declares",
                where=f"{checkpoint.role}/{TOKENIZER}",
                notes=tuple(f"{text!r} is declared as {i}" for i, text in differing[:5]),
                help="export the tokenizer again with the tokenizers library",
                severity=Severity.WARNING,
            )
        )


def copy_tokenizer(writer: BundleWriter, checkpoint: Checkpoint) -> None:
    """Copy tokenizer, templates and generation config into the bundle."""
    files = {p.name: p for p in checkpoint.tokenizer_files()}
    generation = checkpoint.file("generation_config.json")
    if generation is not None:
        files[generation.name] = generation
    for name, path in sorted(files.items()):
        writer.copy_file(path, f"tokenizer/{name}")


def _relocated(diagnostic: Diagnostic, checkpoint: Checkpoint) -> Diagnostic:
    """A finding about a file, with the file named like others of the checkpoint."""
    where = diagnostic.where.replace(str(checkpoint.path), checkpoint.role)
    return replace(diagnostic, where=where.replace(str(checkpoint.path.resolve()), checkpoint.role))
