"""How many ids of a vocabulary have a token: the rows of a table beyond them are padding."""

from __future__ import annotations

from collections.abc import Iterator

from edgecc.errors import Diagnostic, InputError, Severity
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.config import TextConfig
from edgecc.frontends.strict_json import Json, JsonObject

TOKENIZER = "tokenizer.json"


def count_tokens(checkpoint: Checkpoint, config: TextConfig) -> int:
    """One more than the highest id a token has; all rows count where there is no tokenizer.

    An id that the config calls a stop token has a meaning, so it counts even if the tokenizer does
    not know it: otherwise it could never be chosen, and no text would end.

    Raises:
        InputError: The tokenizer is damaged.
    """
    named = named_tokens(checkpoint)
    if not named:
        return config.vocab_size
    beyond = sorted((i, token) for i, token in named.items() if i >= config.vocab_size)
    if beyond:
        checkpoint.findings.append(
            Diagnostic(
                "tokenizer/tokens-without-row",
                f"{len(beyond)} tokens have no row in an embedding of {config.vocab_size} rows; "
                "prompts with them are refused",
                where=f"{checkpoint.role}/{TOKENIZER}",
                notes=tuple(f"{token!r} is {i}" for i, token in beyond[:5]),
                help="use the tokenizer this model was trained with",
                severity=Severity.WARNING,
            )
        )
    known = [i for i in (*named, *config.eos_token_ids) if i < config.vocab_size]
    return max(known, default=config.vocab_size - 1) + 1


def named_tokens(checkpoint: Checkpoint) -> dict[int, str]:
    """Ids with their tokens, empty where there is no tokenizer.

    Raises:
        InputError: The tokenizer is damaged.
    """
    tokenizer = checkpoint.json(TOKENIZER)
    if tokenizer is None:
        return {}
    return dict(_tokens(tokenizer, f"{checkpoint.role}/{TOKENIZER}"))


def _tokens(tokenizer: JsonObject, where: str) -> Iterator[tuple[int, str]]:
    """Ids with their tokens, in whichever form the tokenizer's model keeps them."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        yield from ((_id(value, where), token) for token, value in vocab.items())
    elif isinstance(vocab, list):  # Unigram: token and score, in the order of ids
        yield from ((i, str(entry)) for i, entry in enumerate(vocab))
    added = tokenizer.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict):
            yield _id(entry.get("id"), where), str(entry.get("content"))


def _id(value: Json, where: str) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise InputError(
            "tokenizer/bad-id",
            f"{value!r} is not a token id",
            where=where,
            help="fetch the tokenizer again",
        )
    return value
