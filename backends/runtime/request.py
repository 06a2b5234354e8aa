"""Requests: what a caller may ask of a generator, checked before the model runs."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from edgecc.backends.base import IntArray
from edgecc.backends.runtime.grammar import CompiledGrammar
from edgecc.backends.runtime.image_prompt import PromptImages
from edgecc.backends.runtime.model_info import ModelInfo
from edgecc.backends.runtime.sampling import SamplingParams
from edgecc.errors import RequestError
from edgecc.prompt_lookup import PromptLookup


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request that can be run as it is.

    Attributes:
        token_ids: The prompt, i64 `[T]`, T at least 1; each id has a token and an embedding row.
        max_new_tokens: Most tokens to generate; the model's length limits it as well.
        num_speculative_tokens: Proposals per round; 0 means plain decoding.
        stop: Strings that end the text.
        stop_ids: Tokens that end the text.
        sampling: How tokens are chosen.
        adaptive_speculation: Propose fewer than `num_speculative_tokens` where it is faster.
        images: What is in the prompt besides text.
        lookup: Propose by lookup, with these settings; None asks the draft.
        confidence_threshold: Verify no proposal the draft is less sure of; 0 verifies all.
        grammar: What the text must follow.
    """

    token_ids: IntArray
    max_new_tokens: int
    num_speculative_tokens: int
    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    sampling: SamplingParams
    adaptive_speculation: bool
    images: PromptImages | None = None
    lookup: PromptLookup | None = None
    confidence_threshold: float = 0.0
    grammar: CompiledGrammar | None = None


def check_prompt(prompt: object) -> str:
    """A prompt given as text.

    Raises:
        RequestError: It is no string.
    """
    if not isinstance(prompt, str):
        raise RequestError(
            "request/bad-prompt",
            f"a prompt is a string, not a {type(prompt).__name__}",
            help="pass token ids as token_ids, a chat as messages",
        )
    return prompt


def check_token_ids(token_ids: Sequence[int] | IntArray, model: ModelInfo) -> IntArray:
    """A prompt's ids as i64 `[T]`.

    Raises:
        RequestError: The prompt is empty, has an id without a token or embedding row, or leaves no
            room for an answer.
    """
    if not hasattr(token_ids, "__len__"):
        raise _not_ids(token_ids)
    count = len(token_ids)
    if count == 0:
        raise RequestError(
            "request/empty-prompt",
            "the prompt has no tokens",
            help="pass at least one token; a model continues a text, it does not start one",
        )
    check_length(count, model)
    try:
        ids = np.asarray(token_ids)
    except (ValueError, OverflowError) as error:
        raise _not_ids(token_ids) from error
    if ids.ndim != 1 or ids.dtype.kind not in "iuO":
        raise _not_ids(token_ids)
    if ids.dtype.kind == "O" and not all(type(item) is int for item in ids):
        raise _not_ids(token_ids)
    bad = np.flatnonzero((ids < 0) | (ids >= model.num_tokens))
    if bad.size:
        place = int(bad[0])
        padding = 0 <= ids[place] < model.vocab_size
        raise RequestError(
            "request/token-out-of-range",
            f"token id {ids[place]} at position {place} of the prompt: the model has tokens "
            f"0 to {model.num_tokens - 1}",
            notes=[
                f"rows {model.num_tokens} to {model.vocab_size - 1} of its embedding are padding"
                if padding
                else f"its embedding has {model.vocab_size} rows"
            ],
            help="encode the text with the tokenizer of this bundle",
        )
    return ids.astype(np.int64)


def check_length(count: int, model: ModelInfo, *, image_tokens: int = 0) -> None:
    """Check that a prompt fits and leaves room for an answer.

    Args:
        count: Its tokens.
        model: Has the limits.
        image_tokens: How many of them are images.

    Raises:
        RequestError: It does not.
    """
    if count <= model.max_input_len and count < model.max_model_len:
        return
    found = f"the prompt has {count} tokens"
    if image_tokens:
        found += f", {image_tokens} of them for images"
    if count >= model.max_model_len:
        limit = (
            f"prompt and answer together have room for {model.max_model_len}: at most "
            f"{model.max_model_len - 1} can be prompt"
        )
        flag = "--max-model-len"
    else:
        limit = f"the bundle takes prompts of at most {model.max_input_len}"
        flag = "--max-input-len"
    less = "give smaller or fewer images" if image_tokens else "shorten the prompt"
    raise RequestError(
        "request/prompt-too-long",
        f"{found}, and {limit}",
        help=f"{less}, or compile with a larger {flag}",
    )


def _not_ids(token_ids: object) -> RequestError:
    shown = repr(token_ids)
    return RequestError(
        "request/bad-token-ids",
        "expected a flat list of whole numbers, found "
        + (shown if len(shown) <= 60 else shown[:57] + "..."),
    )


def check_max_new_tokens(value: int) -> int:
    """Most tokens to generate; 0 asks for an empty answer.

    Raises:
        RequestError: Not a whole number from 0.
    """
    if not _is_whole(value) or value < 0:
        raise RequestError(
            "request/bad-max-new-tokens",
            f"max_new_tokens must be a whole number, 0 or more, not {value!r}",
        )
    return value


def check_num_speculative_tokens(value: int | None, speculation: bool, model: ModelInfo) -> int:
    """Proposals per round: the compiled number unless fewer are asked for, 0 without speculation.

    Raises:
        RequestError: There is no draft to ask, or it does not propose so many.
    """
    most = model.num_speculative_tokens
    if value is not None:
        if not most:
            raise _no_speculation(f"num_speculative_tokens is {value!r}")
        if not _is_whole(value) or not 1 <= value <= most:
            raise RequestError(
                "request/bad-num-speculative-tokens",
                f"num_speculative_tokens must be from 1 to {most}, not {value!r}",
                help="to decode without proposals: speculation=False, --no-speculation, "
                "or disable_spec_decode in a request to a server",
            )
    if not speculation:
        return 0
    return value or most


def check_lookup(lookup: PromptLookup | None, model: ModelInfo) -> PromptLookup | None:
    """How to propose without a draft; None asks the draft.

    Args:
        lookup: What a request says.
        model: What the bundle says.

    Raises:
        RequestError: It is something else, or the bundle verifies no proposals.
    """
    if lookup is None:
        return None if model.lookup is None else model.lookup.lookup
    if not isinstance(lookup, PromptLookup):
        raise RequestError(
            "request/bad-prompt-lookup", f"prompt_lookup must be PromptLookup, not {lookup!r}"
        )
    if not model.num_speculative_tokens:
        raise _no_speculation("prompt_lookup is given")
    return lookup


def check_confidence_threshold(
    value: float | None, model: ModelInfo, lookup: PromptLookup | None
) -> float:
    """The least confidence of a proposal that is verified; 0 verifies all.

    Args:
        value: What a request says.
        model: What the bundle says.
        lookup: How the request proposes without the draft, if it does.

    Raises:
        RequestError: It is no probability, or no draft with a confidence head is asked.
    """
    if value is None:
        return 0.0
    if not _is_number(value) or not 0 <= value <= 1:
        raise RequestError(
            "request/bad-confidence-threshold",
            f"confidence_threshold must be a number from 0 to 1, not {value!r}",
            help="0 verifies all proposals",
        )
    if not value:
        return 0.0
    found = f"confidence_threshold is {value!r}"
    if not model.num_speculative_tokens:
        raise _no_speculation(found)
    if lookup is not None or model.draft is None:
        raise RequestError(
            "request/no-confidence",
            f"{found}, but proposals are looked up in the text: nothing tells how sure they are",
            help="leave it out, or ask a draft with a confidence head",
        )
    if not model.draft.tells_confidence:
        raise RequestError(
            "request/no-confidence",
            f"{found}, but the bundle's draft ({model.draft.method}) does not tell how sure it is",
            help="leave it out; if the draft checkpoint has a confidence head, compile it again",
        )
    return float(value)


def _no_speculation(found: str) -> RequestError:
    return RequestError(
        "request/no-draft",
        f"{found}, but the bundle has no draft and no room for proposals",
        help="leave it out, or compile the target with --draft or --spec-method ngram",
    )


def check_stop(stop: str | Sequence[str], *, has_tokenizer: bool) -> tuple[str, ...]:
    """Stop strings, each once; a single string is a list of one.

    Raises:
        RequestError: One is empty or no string, they are no list, or there is no tokenizer to make
            text with.
    """
    if not isinstance(stop, Sequence | Set):
        raise RequestError(
            "request/bad-stop",
            f"stop is a string or a list of strings, not a {type(stop).__name__}",
            help="leave it out where nothing but the model ends the text",
        )
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for item in stops:
        if not _is_text(item):
            raise RequestError(
                "request/bad-stop", f"a stop must be a string that is not empty, not {item!r}"
            )
    if stops and not has_tokenizer:
        raise RequestError("request/bad-stop", "stop strings need a bundle with a tokenizer")
    return tuple(dict.fromkeys(stops))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
