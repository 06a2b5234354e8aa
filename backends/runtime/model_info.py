"""What the runtime must know about a model: the part of `bundle.json` that it acts on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgecc.backends.base import Role
from edgecc.backends.runtime.image_config import ImageConfig
from edgecc.prompt_lookup import NGRAM, PromptLookup


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """A draft as compiled.

    Attributes:
        num_speculative_tokens: Proposals one call returns; requests may ask for fewer.
        block_size: Rows a call puts behind the context, from position `start` on.
        max_position_embeddings: Positions the draft was made for. Beyond it the draft is not used.
        method: Its kind: how it is called.
        tells_confidence: Whether it says how sure it is of its proposals.
    """

    num_speculative_tokens: int
    block_size: int
    max_position_embeddings: int
    method: str = "dspark"
    tells_confidence: bool = False


@dataclass(frozen=True, slots=True)
class LookupInfo:
    """Speculation without a draft, as compiled.

    Attributes:
        num_speculative_tokens: Most proposals of a verification; requests may ask for fewer.
        lookup: How many tokens have to repeat, unless a request says otherwise.
    """

    num_speculative_tokens: int
    lookup: PromptLookup


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The numbers that bound a request.

    Attributes:
        vocab_size: Rows of the embedding and of the head.
        num_tokens: Ids from here to `vocab_size` are padding rows: never accepted, never chosen.
        eos_token_ids: Tokens that end a text.
        max_model_len: Most tokens of prompt and answer together.
        max_input_len: Most tokens of a prompt.
        prefill_chunk: Most rows of one target call.
        draft: The draft, when the bundle has one.
        images: How images are read, when the bundle reads them.
        lookup: Speculation without a draft, when the bundle was compiled for that.
    """

    vocab_size: int
    num_tokens: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    max_input_len: int
    prefill_chunk: int
    draft: DraftInfo | None = None
    images: ImageConfig | None = None
    lookup: LookupInfo | None = None

    @property
    def num_speculative_tokens(self) -> int:
        """Most proposals of a verification; 0 without speculation."""
        speculation = self.draft or self.lookup
        return 0 if speculation is None else speculation.num_speculative_tokens

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> ModelInfo:
        """Pick what is needed from a manifest that follows the bundle's schema."""
        target, limits, draft = manifest["target"], manifest["limits"], manifest["draft"]
        looks_up = draft is not None and draft["method"] == NGRAM
        return cls(
            vocab_size=target["vocab_size"],
            num_tokens=target["num_tokens"],
            eos_token_ids=frozenset(target["eos_token_ids"]),
            max_model_len=limits["max_model_len"],
            max_input_len=limits["max_input_len"],
            prefill_chunk=limits["prefill_chunk"],
            draft=None if draft is None or looks_up else _draft_info(draft, manifest),
            lookup=_lookup_info(draft) if looks_up else None,
            images=ImageConfig.from_metadata(manifest["vision"]) if "vision" in manifest else None,
        )


def _draft_info(draft: Mapping[str, Any], manifest: Mapping[str, Any]) -> DraftInfo:
    proposals = draft["num_speculative_tokens"]
    outputs = manifest.get("entries", {}).get("draft", {"outputs": ()})["outputs"]
    return DraftInfo(
        num_speculative_tokens=proposals,
        block_size=draft.get("block_size", proposals),
        max_position_embeddings=draft["max_position_embeddings"],
        method=draft["method"],
        tells_confidence=any(port["role"] == Role.CONFIDENCE for port in outputs),
    )


def _lookup_info(draft: Mapping[str, Any]) -> LookupInfo:
    lengths = PromptLookup(draft["prompt_lookup_min"], draft["prompt_lookup_max"])
    return LookupInfo(draft["num_speculative_tokens"], lengths)
