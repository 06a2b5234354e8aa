"""What a checkpoint or a bundle holds, from metadata alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from edgecc.backends.bundle import Bundle
from edgecc.checkpoints import close_checkpoints
from edgecc.engine_facts import engine_facts
from edgecc.errors import EdgeccError, InputError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.checkpoint_files import Place
from edgecc.frontends.config import TextConfig, read_text_config
from edgecc.frontends.drafts import is_draft, read_draft
from edgecc.frontends.lift import lift
from edgecc.hub import hub_id, metadata_place
from edgecc.hub_layout import origin_of
from edgecc.ir.core import Module
from edgecc.ir.types import DType
from edgecc.ir.weights import Stored, Unbound
from edgecc.paths import local_path
from edgecc.prompt_lookup import NGRAM
from edgecc.roles import Role


def inspect_path(path: str | os.PathLike[str], *, offline: bool = False) -> dict[str, Any]:
    """Facts about a bundle or a checkpoint, JSON-compatible, most important first.

    Args:
        path: Of a bundle or checkpoint; or the id of a checkpoint on the hub.
        offline: Do not ask the hub: take what its cache has.

    Raises:
        InputError: The path is neither, or damaged.
        UsageError: It is no path.
        UnsupportedError: An id was given, and `huggingface_hub` is not installed.
        HubError: A model cannot be had from the hub.
    """
    if hub_id(path, "checkpoint") is not None:
        with metadata_place(path, "checkpoint", offline=offline) as place:
            return _checkpoint(place)
    path = local_path(path, "given")
    with suppress(PermissionError):  # told below, where the folder is opened
        _check_exists(path)
    if path.is_file() and path.suffix == ".eir":
        raise InputError(
            "inspect/ir-text",
            f"{path} is IR text",
            help="use edgecc explain FILE NAME, or edgecc opt",
        )
    if os.path.exists(path / "bundle.json"):
        return _bundle(Bundle.open(path))
    return _checkpoint(Place(path))


def _checkpoint(place: Place) -> dict[str, Any]:
    with Checkpoint.open(place, role="checkpoint") as checkpoint:
        draft = is_draft(checkpoint)
        facts = _draft_facts(checkpoint) if draft else _target_facts(checkpoint)
        origin = origin_of(place.path)
        return {
            "kind": "draft checkpoint" if draft else "target checkpoint",
            "path": str(origin if place.remote else place.path),
            **({"repository": origin.repository, "commit": origin.commit} if origin else {}),
            **facts,
            **_tensor_facts(place, checkpoint, draft),
        }


def _check_exists(path: Path) -> None:
    try:
        path.lstat()
    except PermissionError:
        raise
    except OSError as error:
        raise InputError(
            "inspect/no-such-path",
            f"{path}: {error.strerror}",
            help="give the folder of a checkpoint or of a bundle",
        ) from error


def _target_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    config = read_text_config(checkpoint)
    sources = {
        "config.json": checkpoint.config.get("eos_token_id"),
        "generation_config.json": checkpoint.generation_config.get("eos_token_id"),
    }
    return {
        "model": {
            "architecture": ", ".join(config.architectures),
            "model_type": config.model_type,
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "heads": f"{config.num_attention_heads} query, {config.num_key_value_heads} key/value, "
            f"{config.head_dim} wide",
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
            "max_positions": config.max_position_embeddings,
            "rope": f"{config.rope.rope_type}, theta {config.rope.theta:g}, {config.rope.dim} dims",
            **_windows(config),
            "tied_embeddings": config.tie_word_embeddings,
            "stop_tokens": sorted(config.eos_token_ids),
            "stop_tokens_from": {k: v for k, v in sources.items() if v is not None},
        }
    }


def _windows(config: TextConfig) -> dict[str, str]:
    """Which layers see the last rows only, if some do."""
    windows = [w for w in config.sliding_windows if w is not None]
    if not windows:
        return {}
    layers = f"{len(windows)} of {config.num_hidden_layers} layers"
    return {"sliding_window": f"{windows[0]} rows, in {layers}"}


def _draft_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    draft = read_draft(checkpoint)
    return {
        "draft": {
            "method": draft.method,
            "layers": draft.text.num_hidden_layers,
            "hidden_size": draft.text.hidden_size,
            **draft.facts(),
        }
    }


def _tensor_facts(place: Place, checkpoint: Checkpoint, draft: bool) -> dict[str, Any]:
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    facts: dict[str, Any] = {"tensors": len(checkpoint.tensors), "tensor_bytes": total}
    try:
        module = lift(None, place) if draft else lift(place)
    except EdgeccError as error:
        facts["cannot_compile"] = [d.render().splitlines()[0] for d in error.diagnostics]
        return facts
    try:
        facts["encodings"] = _encodings(module)
        facts["borrows"] = [
            w.source.role for w in module.weights.values() if isinstance(w.source, Unbound)
        ]
        facts["weights"] = {
            name: {"encoding": str(w.encoding), "shape": list(w.shape), "bytes": w.nbytes}
            for name, w in module.weights.items()
            if isinstance(w.source, Stored)
        }
    finally:
        close_checkpoints(module)
    return facts


def _encodings(module: Module) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for weight in module.weights.values():
        if isinstance(weight.source, Stored):
            counts[str(weight.encoding)] += 1
            sizes[str(weight.encoding)] += weight.nbytes
    return {name: f"{counts[name]} weights, {sizes[name]:,} bytes" for name in sorted(counts)}


def _per_sequence(entries: Mapping[str, Any]) -> dict[str, str]:
    """Bytes of what lives between the calls of one sequence, by entry and role."""
    held: Counter[str] = Counter()
    for name, entry in entries.items():
        for port in entry["inputs"]:
            if port["role"] in _CARRIED:
                elements = prod(d if isinstance(d, int) else 1 for d in port["shape"])
                held[f"{name}/{port['role']}"] += elements * DType(port["dtype"]).bits // 8
    return {name: f"{count:,} bytes" for name, count in held.items()}


_CARRIED = (Role.KV_CACHE, Role.STATE, Role.STATE_LOG)


def _source(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint of a bundle was, and where it came from."""
    known = {key: provenance[key] for key in ("repository", "commit") if key in provenance}
    return {"checkpoint": provenance["name"], **known}


def _bundle(bundle: Bundle) -> dict[str, Any]:
    manifest = bundle.manifest
    files = manifest["files"]
    provenance = manifest["provenance"]
    return {
        "kind": "bundle",
        "path": str(bundle.path),
        "producer": manifest["producer"],
        "devices": {
            name: f"{a['backend']}, {len(a.get('models', a.get('engines', {})))} models"
            for name, a in manifest["artifacts"].items()
        },
        **engine_facts(manifest["artifacts"]),
        "target": {**_source(provenance["target"]), **manifest["target"]},
        "draft": "none"
        if manifest["draft"] is None
        else {
            **(
                {"checkpoint": "none: looked up in the text"}
                if manifest["draft"]["method"] == NGRAM
                else _source(provenance["draft"] or provenance["target"])
            ),
            **manifest["draft"],
        },
        "images": manifest.get("vision", "none: text only"),
        "limits": manifest["limits"],
        "per_sequence": _per_sequence(manifest["entries"]),
        "shared": [
            f"{s['role']}: {s['symbol']}, {s['bytes']:,} bytes, stored once for "
            + " and ".join(s["users"])
            for s in manifest["shared"]
        ],
        "pipeline": provenance["pipeline"],
        "decisions": manifest["decisions"],
        "files": {name: f"{f['bytes']:,} bytes" for name, f in files.items()},
        "weights": manifest["weights"],
    }
