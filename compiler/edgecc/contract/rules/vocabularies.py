"""Rules about vocabularies, tokenizers and stop tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from edgecc.contract.pair import Pair, Side
from edgecc.contract.rule import Rule
from edgecc.errors import Diagnostic, Severity
from edgecc.frontends.fields import Fields
from edgecc.frontends.strict_json import Json

ADDED = "added_tokens.json"
TOKENIZER = "tokenizer.json"


class DraftVocabulary(Rule):
    """Every id that the draft proposes means a token of the target.

    What it checks
        Rows of the draft's head, `draft_vocab_size`, `d2t` and `t2d` against each other and the
        target's vocabulary. `d2t` holds distances, or target ids where `t2d` proves it. Each id
        means another token, in range. All zeros are legal, and told.

    Why it matters
        Ids of the wrong space are plausible tokens: nothing fails, nothing is accepted. A map that
        was never filled looks like one that is all zeros.

    What to do
        Fetch the draft again; use the target it was trained for.
    """

    name = "draft-vocabulary"
    ids: ClassVar[Mapping[str, str]] = {
        "draft/no-vocabulary-map": "a reduced head without d2t",
        "draft/vocabulary-map": "d2t or t2d cannot be right",
        "draft/vocabulary-size": "head, config and vocabulary disagree about the rows",
        "draft/zero-map": "d2t is all zeros",
    }


class DraftTokens(Rule):
    """A language model that drafts has the target's tokens.

    What it checks
        `tokenizer.json` of both: an id that both have is the same token. The draft's table has a
        row for each token of the target; rows of padding may differ in number. Where one of the two
        has no tokenizer, the tables must have as many rows.

    Why it matters
        Draft and target tell each other ids. With other tokens behind them nothing fails, and
        nothing is accepted.

    What to do
        Use a draft of the target's own family. Tokens that only one of them has do no harm.
    """

    name = "draft-tokens"
    ids: ClassVar[Mapping[str, str]] = {
        "draft/tokenizer": "an id means two tokens",
        "draft/tokenizer-unknown": "one of the two has no tokenizer to compare",
        "draft/tokens-differ": "some tokens are only known to one of the two",
    }


class Tokens(Rule):
    """Tokenizer and embedding table agree about the ids there are.

    What it checks
        Ids of `tokenizer.json` and `added_tokens.json` against the rows of the table, tokens of
        the same text at two ids. A compile also loads tokenizer and chat templates as the runtime
        does. Rows without a token are padding: they are never chosen.

    Why it matters
        An id without a row reads outside of the table, or crashes a server with one prompt.
        Padded rows have ordinary weights, and can win.

    What to do
        Use the tokenizer this model was trained with.
    """

    name = "tokens"
    ids: ClassVar[Mapping[str, str]] = {
        "tokenizer/missing": "there is no tokenizer: token ids only",
        "tokenizer/bad-id": "an id is no number",
        "tokenizer/tokens-without-row": "tokens have no row in the embedding table",
        "tokenizer/added-without-row": "added tokens have no row in the embedding table",
        "tokenizer/two-ids": "a text has two ids",
        "tokenizer/other-ids": "the library gives added tokens other ids than the file",
        "tokenizer/unreadable": "the tokenizer cannot be read",
        "tokenizer/malformed": "the tokenizer cannot be loaded",
        "tokenizer/malformed-config": "tokenizer_config.json cannot be used",
        "chat/unreadable-template": "a chat template cannot be read",
        "chat/bad-templates": "a list of chat templates is malformed",
        "chat/template-syntax": "a chat template is no Jinja",
    }

    def check(self, pair: Pair) -> Iterable[Diagnostic]:
        """Look at added tokens."""
        if pair.target is not None:
            yield from self._added(pair.target)
            yield from self._twice(pair.target)

    def _added(self, side: Side) -> Iterator[Diagnostic]:
        rows = side.text.integer("vocab_size")
        added = side.checkpoint.json(ADDED) or {}
        beyond = [(t, i) for t, i in added.items() if type(i) is int and i >= rows]
        if beyond:
            yield Diagnostic(
                "tokenizer/added-without-row",
                f"{len(beyond)} added tokens have no row in an embedding of {rows} rows",
                where=f"{side.role}/{ADDED}",
                notes=tuple(f"{token!r} is {i}" for token, i in beyond[:5]),
                help="use the tokenizer this model was trained with",
                severity=Severity.WARNING,
            )

    def _twice(self, side: Side) -> Iterator[Diagnostic]:
        tokenizer = side.checkpoint.json(TOKENIZER) or {}
        texts = Counter({text: len(ids) for text, ids in _added_ids(tokenizer).items()})
        twice = [text for text, count in texts.items() if count > 1]
        if twice:
            yield Diagnostic(
                "tokenizer/two-ids",
                f"{len(twice)} added tokens have two ids, among them {twice[0]!r}",
                where=f"{side.role}/{TOKENIZER}: added_tokens",
                help="export the tokenizer again: which id is used depends on the reader",
                severity=Severity.WARNING,
            )


def _added_ids(tokenizer: dict[str, Json]) -> dict[str, set[int]]:
    """Ids of each added token, with that of the same text in the vocabulary."""
    added, model = tokenizer.get("added_tokens"), tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    found: dict[str, set[int]] = {}
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and type(entry.get("id")) is int:
            text = str(entry.get("content"))
            found.setdefault(text, set()).add(int(str(entry["id"])))
            known = vocab.get(text) if isinstance(vocab, dict) else None
            if type(known) is int:
                found[text].add(known)
    return found


class StopTokens(Rule):
    """Which ids end a text, and whether the draft agrees.

    What it checks
        `eos_token_id` of config.json and generation_config.json, which need not be the same: the
        union is used. First and last tokens of the draft's config against the target's.

    Why it matters
        Chat models name the id that ends a turn in one of the two files only: a reader of the
        other never stops. Where a draft names others, it may have been trained with another
        tokenizer.

    What to do
        Nothing if the list is right; for a draft, make sure that it belongs to this target.
    """

    name = "stop-tokens"
    ids: ClassVar[Mapping[str, str]] = {
        "tokenizer/stop-tokens": "config and generation config name different ids",
        "tokenizer/pair-differs": "draft and target name different first or last tokens",
    }

    def check(self, pair: Pair) -> Iterable[Diagnostic]:
        """Compare the lists."""
        if pair.target is None:
            return
        yield from self._stops(pair.target)
        for key in ("bos_token_id", "eos_token_id") if pair.draft is not None else ():
            yield from self._differs(pair.target, pair.draft, key)

    def _stops(self, side: Side) -> Iterator[Diagnostic]:
        generation = _generation(side).ids("eos_token_id")
        config = _ids(side, "eos_token_id")
        if generation and config and generation != config:
            yield Diagnostic(
                "tokenizer/stop-tokens",
                f"{side.text.at('eos_token_id')} is {sorted(config)}, generation_config.json says "
                f"{sorted(generation)}: a text ends at each of {sorted(config | generation)}",
                where=f"{side.role}/generation_config.json: eos_token_id",
                help="nothing to do if these are the ids that end a turn or a text",
                severity=Severity.NOTE,
            )

    def _differs(self, target: Side, draft: Side | None, key: str) -> Iterator[Diagnostic]:
        if draft is None:
            return
        mine = _ids(draft, key)
        theirs = _ids(target, key) | _generation(target).ids(key)
        if mine and theirs and not mine <= theirs:
            yield Diagnostic(
                "tokenizer/pair-differs",
                f"{key} of the draft is {sorted(mine)}, the target's {sorted(theirs)}; the target's"
                " counts",
                where=draft.text.at(key),
                help="make sure that the draft was trained with the target's tokenizer",
                severity=Severity.WARNING,
            )


def _ids(side: Side, key: str) -> frozenset[int]:
    return side.text.ids(key) | side.top.ids(key)


def _generation(side: Side) -> Fields:
    return Fields(side.checkpoint.generation_config, f"{side.role}/generation_config.json")
