"""A tokenizer over three letters with tokens of several of them, and two special tokens."""

from __future__ import annotations

from typing import Final

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from edgecc.backends.runtime import Tokenizer

PIECES: Final = ("a", "b", "c", "ab", "bc", "abc", "ca")
END: Final = len(PIECES)
OTHER_SPECIAL: Final = END + 1
NUM_TOKENS: Final = len(PIECES) + 2


def toy_tokenizer() -> Tokenizer:
    """The tokenizer; id i is `PIECES[i]`, then `<end>` and `<other>`."""
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ("c", "a")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(PIECES)}, merges=merges)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<end>", "<other>")])
    return Tokenizer(backend)
