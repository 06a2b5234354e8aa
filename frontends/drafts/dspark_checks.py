"""Whether the tensors of a DSpark draft are those its config speaks of."""

from __future__ import annotations

from edgecc.errors import Diagnostic, InputError, Severity, UnsupportedError
from edgecc.frontends.drafts.dspark_config import DSparkConfig
from edgecc.frontends.module_weights import ModuleWeights

_VARIANTS = (
    ("mask_embedding", "draft/mask-embedding", "an own mask embedding is not supported"),
    (".attention_sink_bias", "draft/attention", "attention sinks are not supported"),
    (".qkv_proj.weight", "draft/fused-qkv", "fused q, k and v projections are not supported"),
)
"""Ends of tensor names that mean another network, the error's id and what is said about it."""


def check_tensors(weights: ModuleWeights, config: DSparkConfig, target_hidden: int) -> None:
    """Cross-check config and tensors where shapes alone would not.

    Raises:
        InputError: They contradict each other.
        UnsupportedError: A variant this frontend does not build.
    """
    role = weights.checkpoint.role
    for name, id, reason in _VARIANTS:
        found = next((n for n in weights.names() if n.endswith(name)), None)
        if found is not None:
            raise UnsupportedError(id, f"{found} is stored: {reason}", where=role)
    stored, taps = weights.columns("fc.weight"), len(config.target_layer_ids)
    if stored not in (None, taps * target_hidden):
        raise InputError(
            "draft/fc-width",
            f"fc.weight has {stored} columns, expected {taps} tapped layers x hidden size "
            f"{target_hidden} of the target = {taps * target_hidden}",
            where=f"{role}: {weights.names()['fc.weight']}",
            notes=(f"tapped layers: {list(config.target_layer_ids)} ({config.numbering})",),
            help="wrong target, or config and weights of different revisions",
        )
    stores = weights.has("confidence_head.proj.weight")
    if config.confidence not in (None, stores):
        found = "a confidence head is stored" if stores else "no confidence head is stored"
        weights.checkpoint.findings.append(
            Diagnostic(
                "draft/confidence-flag",
                f"enable_confidence_head is {str(config.confidence).lower()}, but {found}",
                where=f"{role}/config.json: enable_confidence_head",
                help="check that config and weights belong together",
                severity=Severity.WARNING,
            )
        )


def markov_rank(weights: ModuleWeights, config: DSparkConfig) -> int:
    """Columns of the Markov matrices: the tensors know, the config has to agree.

    Raises:
        InputError: It does not.
    """
    name = "markov_head.markov_w1.weight"
    stored = weights.columns(name)
    if config.markov_rank is not None and stored not in (None, config.markov_rank):
        raise InputError(
            "draft/markov-rank",
            f"markov_rank is {config.markov_rank}, but {name} has {stored} columns",
            where=f"{weights.checkpoint.role}/config.json: markov_rank",
            help="config and weights are of different revisions: fetch both again",
        )
    return stored or config.markov_rank or 1
