"""What target architectures have in common besides their layers."""

from __future__ import annotations

from collections.abc import Collection

from edgecc.errors import Diagnostic, InputError, Severity, UnsupportedError
from edgecc.frontends.config import TextConfig
from edgecc.frontends.module_weights import ModuleWeights

FINAL_NORM = -2
"""Among tapped layers: what the output head reads, as -1 is the embedding."""


def output_head(weights: ModuleWeights, config: TextConfig, table: str) -> str:
    """The weight of the output head: its own, or the embedding table when tied.

    Args:
        weights: Tensors of the checkpoint.
        config: Hyperparameters.
        table: Symbol of the embedding table.

    Raises:
        InputError: Untied and no head is stored, or tied and a different head is stored.
    """
    role = weights.checkpoint.role
    stored = weights.has("lm_head.weight")
    if not stored and not config.tie_word_embeddings:
        raise InputError(
            "bind/no-lm-head",
            f"the {role} has no lm_head and tie_word_embeddings is false",
            where=config.at("tie_word_embeddings"),
            notes=[f"looked for {role}: lm_head.weight, lm_head.weight_packed"],
            help="the checkpoint is incomplete: fetch the missing shard",
        )
    if not stored:
        return table
    head = weights.matrix("lm_head", config.vocab_size, config.hidden_size)
    entries = weights.module.weights
    if config.tie_word_embeddings and not weights.errors.errors:
        if entries[head].encoding != entries[table].encoding:
            weights.module.decisions.append(
                f"{head} is used although tie_word_embeddings is true: it is "
                f"{entries[head].encoding}, the embedding {entries[table].encoding}"
            )
        elif weights.checkpoint.metadata_only:
            weights.checkpoint.findings.append(_not_compared(weights, config))
        elif entries.digest(head) != entries.digest(table):
            raise InputError(
                "target/tied-heads-differ",
                "tie_word_embeddings is true, but lm_head.weight differs from the embedding",
                where=weights.checkpoint.location(weights.stored_name("lm_head.weight")),
                help="set tie_word_embeddings to false, or remove lm_head.weight",
            )
        else:
            return table
    return head


def _not_compared(weights: ModuleWeights, config: TextConfig) -> Diagnostic:
    return Diagnostic(
        "target/tied-heads-stored",
        "tie_word_embeddings is true, but an lm_head is stored: whether it is the embedding is "
        "only seen when compiling",
        where=weights.checkpoint.location(weights.stored_name("lm_head.weight")),
        notes=(f"{config.at('tie_word_embeddings')} is true",),
        help="remove lm_head.weight, or set tie_word_embeddings to false if it is another matrix",
        severity=Severity.NOTE,
    )


def check_variant(config: TextConfig, kinds: Collection[str]) -> None:
    """Check what every target here is built with: SwiGLU in the MLP, and layers it has.

    Args:
        config: Hyperparameters.
        kinds: The layer types of the architecture.

    Raises:
        UnsupportedError: The config asks for another activation or for layers of another type.
    """
    where = config.where
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedError(
            "target/activation", f"hidden_act {config.hidden_act!r} is not supported", where=where
        )
    other = next((kind for kind in config.layer_types if kind not in kinds), None)
    if other is not None:
        raise UnsupportedError(
            "target/layer-type",
            f"layers of type {other} are not supported for {config.model_type}",
            where=config.at("layer_types"),
            help=f"supported: {', '.join(kinds)}",
        )
