"""`acceptance`: tokens per step of the shipped pair on code it was not trained on."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import edgecc
from benchmarks.pairs import PAIRS, SHIPPED, Settings, bundle
from benchmarks.results import Result, Table

PACKAGES = {
    "attr": "attrs",
    "click": "click",
    "jinja2": "Jinja2",
    "jsonschema": "jsonschema",
    "markdown_it": "markdown-it-py",
    "onnx": "onnx",
    "onnx_ir": "onnx-ir",
    "onnxscript": "onnxscript",
    "pygments": "Pygments",
    "referencing": "referencing",
}
"""Packages that are installed with edgecc and not among the sources of the training text."""

PER_PACKAGE = 4
NEW_TOKENS = 64
REQUESTS = (
    ("reverse_words", "It returns the words of a sentence in reverse order."),
    ("is_prime", "It tells whether a number is prime."),
    ("read_lines", "It returns the lines of a text file without line ends."),
    ("merge_dicts", "It merges two dictionaries."),
    ("count_vowels", "It counts the vowels of a string."),
    ("flatten", "It flattens a list of lists."),
    ("mean", "It returns the mean of a list of numbers."),
    ("parse_date", "It parses a date in ISO format."),
)


def run(settings: Settings) -> Result:
    """Generate with and without speculation for every prompt."""
    _check_sources()
    with edgecc.load(bundle(SHIPPED, settings.work)) as generator:
        data = acceptance(generator)
    groups = list(data)
    data["packages"] = {name: _version(name) for name in PACKAGES.values()}
    rows = [
        [name, d["prompts"], d["rounds"], f"**{d['tokens_per_step']:.2f}**", d["positions"]]
        for name, d in data.items()
        if name in groups
    ]
    table = Table(
        "Shipped pair: acceptance on code outside its training text (measured)",
        ("prompts", "count", "rounds", "tokens per step", "accepted at position 1 to 7"),
        rows,
        (
            f"excerpts of 32 to 100 tokens from {', '.join(PACKAGES)}; {NEW_TOKENS} new tokens; "
            "no timing, so the figures depend on the package versions only",
            "share accepted: among the rounds that reached the position",
            "each speculative text was compared with the plain one and is equal",
        ),
    )
    return Result("acceptance", [table], data)


def acceptance(generator: Any) -> dict[str, Any]:
    """Figures of the code prompts, of the chat prompts, and of all, by these names."""
    code = [_both(generator, token_ids=ids) for ids in _excerpts(generator.tokenizer)]
    chat = [_both(generator, messages=[_request(*request)]) for request in REQUESTS]
    groups = {"code": code, "chat": chat, "all": code + chat}
    return {name: _summary(stats) for name, stats in groups.items()}


def _request(name: str, what: str) -> dict[str, str]:
    return {"role": "user", "content": f"Write a Python function `{name}`. {what}"}


def _check_sources() -> None:
    """Fail if a package became a source of the training text."""
    text = (PAIRS / "README.md").read_text(encoding="utf-8")
    listed = text.split("## Sources of the training text")[1]
    sources = {line.split("|")[1].strip().lower() for line in listed.splitlines() if "|" in line}
    both = sources & {name.lower() for name in (*PACKAGES, *PACKAGES.values())}
    if both or len(sources) < 10:
        raise SystemExit(f"the pair was trained on {sorted(both)}, or its list has moved")


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "missing"


def _excerpts(tokenizer: Any) -> Iterator[Sequence[int]]:
    """Beginnings of functions and classes: files and places chosen by a hash of the file's name."""
    for package in PACKAGES:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            print(f"acceptance: {package} is not installed, left out", file=sys.stderr)
            continue
        root = Path(spec.submodule_search_locations[0])
        files = {_digest(p.relative_to(root).as_posix()): p for p in root.rglob("*.py")}
        found = (ids for d in sorted(files) if (ids := _excerpt(files[d], d, tokenizer)))
        for _, ids in zip(range(PER_PACKAGE), found, strict=False):
            yield ids


def _excerpt(path: Path, digest: int, tokenizer: Any) -> list[int]:
    """32 to 100 tokens from the start of a function or class; empty if the file has too little."""
    text = path.read_text(encoding="utf-8", errors="ignore")
    starts = [m.start() for m in re.finditer(r"^(?:    )?(?:def|class) ", text, re.MULTILINE)]
    if len(starts) < 3:
        return []
    start = starts[digest % (len(starts) - 1)]
    ids = list(tokenizer.encode(text[start : start + 1500]))
    length = 32 + digest % 69
    return ids[:length] if len(ids) > length else []


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _both(generator: Any, **prompt: Any) -> Any:
    """Statistics of a speculative run whose tokens equal the plain run's."""
    plain = generator.generate(**prompt, max_new_tokens=NEW_TOKENS, speculation=False)
    speculative = generator.generate(**prompt, max_new_tokens=NEW_TOKENS)
    if plain.token_ids != speculative.token_ids:
        raise SystemExit(f"speculative text differs from plain text for {prompt}")
    return speculative.stats


def _summary(stats: Sequence[Any]) -> dict[str, Any]:
    rounds = sum(s.rounds for s in stats)
    kept = [k for s in stats for k in s.accepted_by_round]
    shares = []
    for position in range(max(kept, default=0)):
        reached = sum(k >= position for k in kept)
        shares.append(sum(k > position for k in kept) / reached)
    return {
        "prompts": len(stats),
        "rounds": rounds,
        "tokens_per_step": 1 + sum(kept) / rounds,
        "acceptance_by_position": shares,
        "positions": " ".join(f"{share:.2f}" for share in shares),
    }
