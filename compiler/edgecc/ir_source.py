"""Modules from IR text: their checkpoints, and what a compile needs to find in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

from edgecc.checkpoints import checkpoints_of, close_checkpoints
from edgecc.compile_options import CompileOptions
from edgecc.errors import Diagnostic, EdgeccError, InputError, UsageError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.components import parse_components
from edgecc.frontends.lift import lift
from edgecc.frontends.mtp_block import MTP_FILES
from edgecc.frontends.options import LiftOptions
from edgecc.frontends.spec_methods import OWN_BLOCK, WITHOUT_DRAFT
from edgecc.ir.clone import CACHE_AXIS
from edgecc.ir.compare import equal
from edgecc.ir.core import Json, Module
from edgecc.ir.parser import read_module
from edgecc.ir.verifier import verify_or_raise
from edgecc.ir.weights import Stored
from edgecc.roles import Role

SUFFIX = ".eir"
"""What the name of a file of IR text ends with."""

_OF_DRAFT = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
"""Sizes in the metadata of the draft."""

FIXED = ("max_model_len", "max_input_len", "prefill_chunk", "max_batch_size")
"""Options that are sizes of a lifted module, by their names in its `limits`."""


def attach_checkpoints(
    module: Module, *, near: Path | None = None, folders: Mapping[str, str] | None = None
) -> None:
    """Open the checkpoints a parsed module names, so that its stored weights can be read.

    Args:
        module: Module whose `checkpoints` are opened.
        near: Folder of the IR file: relative paths that do not exist are tried from there as well.
        folders: Folders by role that replace the module's own.

    Raises:
        InputError: A checkpoint is missing or damaged.
    """
    module.checkpoints.update(folders or {})
    for role, text in module.checkpoints.items():
        path = Path(text)
        if near is not None and not path.is_absolute() and not path.exists():
            path = near / path
        also = MTP_FILES if role == "target" and _method(module) == OWN_BLOCK else ()
        module.weights.readers[role] = Checkpoint.open(path, role=role, also=also)


def read_ir(path: str | Path) -> Module:
    """A module from a file of IR text, with the checkpoints it names open.

    Raises:
        InputError: The file is missing or not IR, or a checkpoint is missing or damaged.
    """
    path = Path(path)
    module = read_module(path)
    attach_checkpoints(module, near=path.parent)
    return module


def is_ir_text(path: Path) -> bool:
    """Whether a path means IR text and not the folder of a checkpoint."""
    return path.suffix == SUFFIX and not path.is_dir()


def read_lifted(path: Path, draft: Path | None, options: CompileOptions) -> Module:
    """A module to compile, from IR text, with its checkpoints open.

    Text that `edgecc lift` wrote without locations gets them back: it is lifted again, and if that
    gives the same module, the new one is taken.

    Args:
        path: File of IR text.
        draft: Draft checkpoint that was asked for; text names its own.
        options: Sizes that were asked for; a lifted module has its own.

    Raises:
        UsageError: The options contradict the text.
        InputError: The text is bad, not a whole module, or does not fit its checkpoints.
    """
    if draft is not None:
        raise UsageError(
            "usage/draft-with-ir",
            f"--draft {draft} does not go with IR text: {path} names its own checkpoints",
            help=f"lift both first: edgecc lift TARGET --draft {draft} -o pair.eir",
        )
    module = read_module(path)
    verify_or_raise(module, f"in {path}")
    _check_complete(module, path)
    _check_sizes(module, path, options)
    attach_checkpoints(module, near=path.parent)
    findings = list(_stored_findings(module))
    if findings:
        raise InputError(*findings)
    return _lifted_again(module) or module


def _check_complete(module: Module, path: Path) -> None:
    limits = module.metadata.get("limits")
    needed = {
        "graph @target": "target" in module.graphs,
        "checkpoint of the target": "target" in module.checkpoints,
        "metadata target": isinstance(module.metadata.get("target"), dict),
        "metadata limits": isinstance(limits, dict)
        and all(type(limits.get(name)) is int for name in FIXED),
        "metadata draft": "draft" not in module.graphs
        or isinstance(module.metadata.get("draft"), dict),
        "metadata vision": "vision" not in module.graphs
        or isinstance(module.metadata.get("vision"), dict),
    }
    missing = [what for what, found in needed.items() if not found]
    if missing:
        raise InputError(
            "ir/incomplete",
            f"this module cannot be compiled to a bundle: it has no {', no '.join(missing)}",
            where=str(path),
            help="compile text that edgecc lift or opt wrote for a target",
        )


def _check_sizes(module: Module, path: Path, options: CompileOptions) -> None:
    """Sizes and parts are those of the graphs: a flag can only repeat them."""
    limits, draft = _section(module, "limits"), _section(module, "draft")
    if options.spec_method not in ("auto", _method(module)):
        raise UsageError(
            "usage/lifted-method",
            f"--spec-method {options.spec_method}: the module was lifted "
            + (f"for {method}" if (method := _method(module)) else "without a draft"),
            where=str(path),
            help=f"lift the checkpoints again with --spec-method {options.spec_method}",
        )
    defaults = CompileOptions()
    for name in (*FIXED, *_OF_DRAFT):
        wanted, found = getattr(options, name), limits.get(name, draft.get(name))
        if wanted != getattr(defaults, name) and wanted != found:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                "usage/lifted-size",
                f"{flag} {wanted}: the module was lifted for {found}",
                where=str(path),
                help="lift the checkpoints again with this size",
            )
    if parse_components(options.components).vision and "vision" not in module.graphs:
        raise UsageError(
            "usage/lifted-components",
            f"--components {options.components}: the module was lifted without a vision tower",
            where=str(path),
            help=f"lift the checkpoints again with --components {options.components}",
        )


def _stored_findings(module: Module) -> Iterator[Diagnostic]:
    """Stored weights that their checkpoints do not hold as the text says."""
    for symbol, weight in module.weights.items():
        source = weight.source
        if not isinstance(source, Stored):
            continue
        reader = module.weights.readers.get(source.checkpoint)
        components = weight.encoding.components(weight.shape)
        for part in source.parts:
            expected = components[part.component]
            if not isinstance(reader, Checkpoint):
                message = f"the text names no checkpoint {source.checkpoint!r}"
            else:
                try:
                    found = reader.info(part.key)
                except EdgeccError as error:
                    yield error.diagnostics[0]
                    continue
                if (found.dtype, prod(found.shape)) == (expected.dtype, prod(expected.shape)):
                    continue
                message = (
                    f"{part.key} is {found.dtype.value} {list(found.shape)}, the text says "
                    f"{expected.dtype.value} {list(expected.shape)}"
                )
            yield Diagnostic(
                "ir/stored-weight",
                message,
                f"weight @{symbol}",
                help="lift the checkpoints again",
            )
            break


def _lifted_again(module: Module) -> Module | None:
    """The module as lifting its checkpoints gives it, if that is what the text says.

    It has all locations, and what was found out about the checkpoints.
    """
    paths = {role: checkpoint.path for role, checkpoint in checkpoints_of(module).items()}
    try:
        made = lift(paths.get("target"), paths.get("draft"), lift_options_of(module))
    except EdgeccError:
        return None
    made.checkpoints = dict(module.checkpoints)
    unused = module if equal(made, module) else made
    close_checkpoints(unused)
    return None if unused is made else made


def lift_options_of(module: Module) -> LiftOptions:
    """The sizes a module was lifted with."""
    limits, draft = _section(module, "limits"), _section(module, "draft")
    length, prompt, chunk, batch = (int(str(limits[name])) for name in FIXED)
    return LiftOptions(
        max_model_len=length,
        max_input_len=prompt,
        prefill_chunk=chunk,
        spec_method=method if (method := _method(module)) in WITHOUT_DRAFT else "auto",
        **{name: _number(draft.get(name)) for name in _OF_DRAFT},
        max_batch_size=batch,
        pads_rounds=_pads_rounds(module, length),
        components="all" if "vision" in module.graphs else "text",
    )


def _number(value: Json) -> int | None:
    return value if isinstance(value, int) else None


def _method(module: Module) -> str | None:
    """The speculation method of a lifted module."""
    method = _section(module, "draft").get("method")
    return method if isinstance(method, str) else None


def _pads_rounds(module: Module, length: int) -> bool:
    """Whether the target's caches have more than the one spare row that all have."""
    target = module.graphs.get("target")
    caches = target.by_role(Role.KV_CACHE) if target else []
    rows = [c.value.type.shape[CACHE_AXIS] for c in caches]
    return any(isinstance(r, int) and r > length + 1 for r in rows)


def _section(module: Module, key: str) -> dict[str, Json]:
    found = module.metadata.get(key)
    return found if isinstance(found, dict) else {}
