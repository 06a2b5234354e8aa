"""Whether the tensors of a DSpark draft are those its config speaks of."""

from __future__ import annotations

import numpy as np

from edgecc.errors import Diagnostic, InputError, Severity, UnsupportedError
from edgecc.frontends.drafts.dspark_config import DSparkConfig
from edgecc.frontends.module_weights import ModuleWeights

_VARIANTS = (
    ("markov_head.gate_proj.weight", "draft/markov-type", "only vanilla Markov heads are built"),
    ("markov_head.joint_proj.weight", "draft/markov-type", "only vanilla Markov heads are built"),
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
    _check_vocabulary(weights, config)
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


def _check_vocabulary(weights: ModuleWeights, config: DSparkConfig) -> None:
    """A map between vocabularies is fine if it maps each id to itself."""
    role, names, vocab = weights.checkpoint.role, weights.names(), config.text.vocab_size
    maps = [names[name] for name in ("d2t", "t2d") if name in names]
    for name in maps:
        neutral = 0 if name == names.get("d2t") else 1
        values = weights.checkpoint.read(name)
        if values.shape != (vocab,) or not np.all(values == neutral):
            raise UnsupportedError(
                "draft/reduced-vocab",
                "DSpark drafts with a reduced vocabulary are not supported",
                where=f"{role}: {name}",
                notes=(f"it has {values.size} entries, the vocabulary {vocab} rows",),
            )
        weights.quantization.consumed.add(name)
    head = weights.checkpoint.tensors.get(names.get("lm_head.weight", ""))
    if head is not None and head.shape and head.shape[0] < vocab:
        raise InputError(
            "draft/no-vocabulary-map",
            f"lm_head has {head.shape[0]} rows, the vocabulary {vocab}, and there is no d2t that "
            "says which token each row means",
            where=f"{role}: {names['lm_head.weight']}",
            help="the checkpoint is incomplete: fetch it again",
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
