"""Which pair a command compiles, and for what sizes: options of `compile` and of `serve`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from edgecc.errors import UsageError, did_you_mean
from edgecc.frontends.spec_methods import method_named

F = TypeVar("F", bound=Callable[..., Any])

SPECULATIVE_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "draft_quantization",
)
REVISION = "revision"
"""Of the draft on the hub: the same as `model@revision`."""
VLLM_KEYS = (
    "draft_tensor_parallel_size",
    "disable_by_batch_size",
    "quantization",
    "max_model_len",
    "draft_sample_method",
)

PAIR_FLAGS = ("draft", "speculative_config", "max_model_len", "max_input_len", "max_batch_size")
"""Names of what `draft_options` and `size_options` add; each is None unless it is given."""


def draft_options(text: str) -> Callable[[F], F]:
    """Add `--draft` and `--speculative-config` to a command: see `models_of`.

    Args:
        text: What the draft is for.
    """
    draft = click.option(
        "--draft",
        "--draft-model-dir",
        "--draft-model",
        "draft",
        metavar="DIR|ID",
        help=text,
    )
    config = click.option(
        "--speculative-config", metavar="JSON|@FILE", help="The same as JSON, as for vLLM."
    )
    return lambda function: draft(config(function))


def size_options(of: str = "") -> Callable[[F], F]:
    """Add `--max-model-len`, `--max-input-len` and `--max-batch-size` to a command.

    Args:
        of: Whose sizes they are, if that is not plain.
    """
    whose = f", {of}" if of else ""
    length = click.option(
        "--max-model-len",
        "--max-seq-len",
        "--max-kv-cache-capacity",
        "max_model_len",
        type=click.IntRange(min=1),
        metavar="N",
        help=f"Prompt and answer together{whose}; default: 8192 or what it was trained for.",
    )
    prompt = click.option(
        "--max-input-len", type=click.IntRange(min=1), metavar="N", help=f"Longest prompt{whose}."
    )
    sequences = click.option(
        "--max-batch-size",
        "--max-num-seqs",
        "max_batch_size",
        type=click.IntRange(min=1),
        metavar="N",
        help=f"Most sequences at a time{whose}, each with caches of its own.  [default: 1]",
    )
    return lambda function: length(prompt(sequences(function)))


def models_of(flags: dict[str, Any]) -> tuple[str, str | None, dict[str, Any]]:
    """Target, draft and the options about speculation, from flags and the JSON config.

    Raises:
        UsageError: Missing, or given twice with different values.
    """
    targets = {t for t in (flags["target"], flags["model"]) if t}
    if len(targets) != 1:
        raise UsageError(
            "usage/target", "give one TARGET", help="edgecc compile TARGET --draft DRAFT -o DIR"
        )
    config = _speculative_config(flags["speculative_config"])
    found = {}
    for key in SPECULATIVE_KEYS:
        name = {"method": "spec_method", "model": "draft"}.get(key, key)
        flag, value = flags[name], config.get(key)
        if flag == "auto":
            flag = None
        if name == "spec_method":
            flag, value = (given and method_named(given) for given in (flag, value))
        if flag is not None and value is not None and flag != value:
            raise UsageError(
                "usage/contradiction",
                f"--{name.replace('_', '-')} is {flag}, --speculative-config says {value}",
            )
        found[name] = flag if flag is not None else value
    draft = found.pop("draft")
    for name in ("spec_method", "draft_quantization"):
        found[name] = found[name] or "auto"
    return targets.pop(), draft, found


def _speculative_config(text: str | None) -> dict[str, Any]:
    """The settings of `--speculative-config`; nulls count as absent.

    Raises:
        UsageError: No JSON object, or a key or value that edgecc does not know.
    """
    if text is None:
        return {}
    where = text[1:] if text.startswith("@") else "--speculative-config"
    found = {key: value for key, value in _json(text, where).items() if value is not None}
    for key in found:
        if key in VLLM_KEYS:
            raise UsageError(
                "usage/speculative-config",
                f"{key!r} is known from vLLM, edgecc has no such setting",
                where=where,
            )
        if key not in (*SPECULATIVE_KEYS, REVISION):
            raise UsageError(
                "usage/speculative-config",
                f"unknown key {key!r}",
                where=where,
                help=did_you_mean(key, (*SPECULATIVE_KEYS, REVISION)),
            )
    for key in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
        number = found.get(key, 1)
        if type(number) is not int or number < 1:
            raise UsageError(
                "usage/speculative-config",
                f"{key} is {number!r}, expected a whole number of at least 1",
                where=where,
            )
    for key in ("model", "method", "draft_quantization", REVISION):
        if not isinstance(found.get(key, ""), str):
            raise UsageError("usage/speculative-config", f"{key} must be a string", where=where)
    return _pinned(found, where)


def _pinned(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The settings with the draft's revision in its id."""
    revision, model = config.pop(REVISION, None), config.get("model")
    if revision is not None:
        if model is None or "@" in model:
            raise UsageError(
                "usage/speculative-config",
                f"{REVISION} {revision!r} goes with a model of the hub that has none yet",
                where=where,
                help='"model": "org/name"',
            )
        config["model"] = f"{model}@{revision}"
    return config


def _json(text: str, where: str) -> dict[str, Any]:
    try:
        if text.startswith("@"):
            text = Path(where).read_text(encoding="utf-8")
        config = json.loads(text, object_pairs_hook=_unique)
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise UsageError("usage/speculative-config", reason, where=where) from error
    except (ValueError, RecursionError) as error:
        raise UsageError("usage/json", f"not usable as JSON: {error}", where=where) from error
    if not isinstance(config, dict):
        raise UsageError("usage/json", "expected a JSON object", where=where)
    return config


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found
