"""Proves a bundle on the device it runs on: golden rows, and speculation against plain decoding."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from edgecc.backends.base import IntArray, Progress, Role
from edgecc.backends.bundle import Bundle
from edgecc.backends.runtime.generator import Generator
from edgecc.backends.runtime.golden import (
    EXACT,
    GOLDEN_FILE,
    NARROW,
    QUANTIZED,
    SAME_ARITHMETIC,
    Check,
    Verification,
    compare_golden,
    lowered_golden_file,
    read_golden,
)
from edgecc.backends.runtime.image_grid import Grid
from edgecc.backends.runtime.images import PreparedImage, prepare_pixels
from edgecc.backends.runtime.loader import choose_device, load_bundle
from edgecc.backends.runtime.model_info import ModelInfo
from edgecc.backends.runtime.near_ties import compare_near_tokens
from edgecc.backends.runtime.proposer import proposer_of
from edgecc.prompt_lookup import PromptLookup

__all__ = ["GOLDEN_FILE", "Check", "Verification", "compare_golden", "read_golden", "verify_bundle"]


def verify_bundle(
    path: str | os.PathLike[str],
    *,
    device: str | None = None,
    num_threads: int | None = None,
    prompts: int = 4,
    max_new_tokens: int = 32,
    progress: Progress | None = None,
) -> Verification:
    """Everything that can be proved about a bundle without its checkpoints.

    File hashes, golden rows of the reference (when the bundle has them), and on random prompts that
    speculative output equals plain output for the smallest and the largest number of proposals; one
    of the prompts has an image if the bundle reads images. A
    device that computes in 16 bits may be off by what rounding explains; rows that the compiler
    rounded at the same places are compared more tightly. Where layers read quantized activations,
    only averages mean something. Where 16-bit layers read states, texts may part at a near tie.

    Args:
        path: The bundle.
        device: Device of the bundle to use.
        num_threads: Threads of the engine.
        prompts: How many random prompts; their lengths spread from one token to two prefill chunks.
        max_new_tokens: Tokens generated for each.
        progress: Called as work goes on.

    Raises:
        BundleError: The bundle is damaged.
        ResourceError: A file cannot be read.
    """
    bundle = Bundle.open(path)
    bundle.verify_hashes(progress)
    checks: list[Check] = []
    name = choose_device(bundle, device)
    with load_bundle(bundle, device=name, num_threads=num_threads, progress=progress) as loaded:
        checks += _compare_rows(bundle, name, loaded)
        tie = _tie(bundle.artifact(name))
        model = loaded.model
        for index, ids in enumerate(_prompts(model, prompts, max_new_tokens)):
            if progress is not None:
                progress("verify", index, prompts)
            checks += _compare_decoding(loaded, ids, max_new_tokens, tie=tie)
        if model.images is not None and prompts:
            ids, count, picture = _image_prompt(model, max_new_tokens)
            checks += _compare_decoding(loaded, ids, count, picture)
    return Verification(tuple(checks))


def _compare_rows(bundle: Bundle, device: str, generator: Generator) -> list[Check]:
    """Golden rows of the reference, and of the graphs that the engines were built from."""
    artifact = bundle.artifact(device)
    reference, same = EXACT, SAME_ARITHMETIC
    if artifact.get("activations"):
        reference = same = QUANTIZED
    elif artifact.get("compute_type", "f32") != "f32":
        reference = NARROW
    chooses = Role.CHOSEN_TOKENS in _roles(artifact)
    count = generator.model.num_tokens if chooses else 0
    checks: list[Check] = []
    for file, limits, suffix in (
        (GOLDEN_FILE, reference, ""),
        (lowered_golden_file(device), same, ", same arithmetic"),
    ):
        if file in bundle.manifest["files"]:
            golden = read_golden(bundle.file(file))
            found = compare_golden(
                generator.engine,
                golden,
                limits,
                suffix=suffix,
                num_tokens=0 if suffix else count,
                proposer=proposer_of(artifact),
            )
            checks += found.checks
    return checks


def _roles(artifact: Mapping[str, Any]) -> set[str]:
    """Roles of the target's outputs on a device."""
    return {o["role"] for o in artifact["entries"]["target"]["outputs"]}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _tie(artifact: Mapping[str, Any]) -> float:
    """How near two logits are that a rounding may decide between, relative to the largest.

    Equal rows have equal bits on every device, but where 16-bit layers read a state: its float32
    sums are over as many rows as there are to replay, and what is off by a last bit may be rounded
    to another 16-bit number.
    """
    states = any(p["role"] == Role.STATE for p in artifact["entries"]["target"]["inputs"])
    narrow = artifact.get("compute_type", "f32") != "f32"
    return SAME_ARITHMETIC.values if states and narrow else 0.0


def _compare_decoding(
    generator: Generator,
    ids: IntArray,
    max_new_tokens: int,
    picture: PreparedImage | None = None,
    tie: float = 0.0,
) -> list[Check]:
    most, compiled = generator.model.num_speculative_tokens, generator.model.lookup
    if not most:
        return []
    # In random text only single tokens repeat.
    lookup = None if compiled is None else PromptLookup(1, compiled.lookup.max)
    generate = partial(
        generator.generate,
        token_ids=ids,
        images=None if picture is None else [picture],
        max_new_tokens=max_new_tokens,
        prompt_lookup=lookup,
    )
    plain = generate(speculation=False)
    prompt = f"prompt of {_count(plain.prompt_tokens, 'token')}"
    prompt += "" if picture is None else " with an image"
    return [
        compare_near_tokens(
            f"speculation with {_count(n, 'proposal')}, {prompt}",
            generator,
            ids.tolist(),
            generate(num_speculative_tokens=n).token_ids,
            plain.token_ids,
            tie,
        )
        for n in sorted({1, most})
    ]


def _prompts(model: ModelInfo, count: int, max_new_tokens: int) -> list[IntArray]:
    """Random prompts of text, the same on every machine."""
    random = np.random.default_rng(0)
    lengths = np.linspace(1, _longest(model, max_new_tokens), max(count, 1)).astype(int)[:count]
    found = [random.integers(0, model.num_tokens, n, dtype=np.int64) for n in lengths]
    return [_without_placeholders(ids, model) for ids in found]


def _longest(model: ModelInfo, max_new_tokens: int) -> int:
    """Two chunks and a token, if there is room."""
    longest = min(2 * model.prefill_chunk + 1, model.max_input_len)
    return max(1, min(longest, model.max_model_len - max_new_tokens))


def _without_placeholders(ids: IntArray, model: ModelInfo) -> IntArray:
    """Random tokens of which none stands for an image."""
    if model.images is None:
        return ids
    token = model.images.image_token_id
    return np.where(ids == token, (token + 1) % model.num_tokens, ids)


def _image_prompt(model: ModelInfo, max_new_tokens: int) -> tuple[IntArray, int, PreparedImage]:
    """A picture of noise between random tokens; where there is room, chunks cut it."""
    config = model.images
    assert config is not None
    random = np.random.default_rng(1)
    blocks = 2 if min(config.max_tokens, _longest(model, max_new_tokens) - 2) >= 4 else 1
    side = blocks * config.merge_size
    pixels = side * config.patch_size
    noise = random.integers(0, 256, (pixels, pixels, 3), dtype=np.uint8)
    picture = prepare_pixels(noise, Grid(side, side, config.merge_size), config)
    room = max(0, _longest(model, max_new_tokens) - picture.tokens)
    before = min(room, max(0, model.prefill_chunk - picture.tokens // 2))
    text = random.integers(0, model.num_tokens, min(room, before + 1), dtype=np.int64)
    text = _without_placeholders(text, model)
    ids = np.insert(text, min(before, len(text)), config.image_token_id)
    return ids, max_new_tokens, picture
