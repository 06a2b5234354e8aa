"""All rules of the contract, by theme."""

from __future__ import annotations

from edgecc.contract.rule import Manual, Rule, manual_of
from edgecc.contract.rules import (
    configs,
    drafts,
    files,
    heads,
    quantization,
    revisions,
    tensors,
    vocabularies,
)

RULES: tuple[type[Rule], ...] = (
    files.CheckpointFolder,
    files.ModelHub,
    files.FileFormat,
    files.Links,
    files.Headers,
    files.Shards,
    revisions.OneRevision,
    configs.ConfigKeys,
    configs.Architecture,
    configs.Geometry,
    configs.RotaryEmbedding,
    configs.Biases,
    tensors.Layers,
    tensors.Tensors,
    quantization.QuantizationMethod,
    quantization.QuantizedModules,
    quantization.Scales,
    quantization.CacheScales,
    heads.HeadAndEmbedding,
    heads.RotatedHead,
    drafts.DraftKind,
    drafts.DraftVariants,
    drafts.TappedLayers,
    drafts.BlockLayout,
    drafts.MarkovAndConfidence,
    drafts.DraftLength,
    vocabularies.DraftVocabulary,
    vocabularies.DraftTokens,
    vocabularies.Tokens,
    vocabularies.StopTokens,
    tensors.Vision,
)
"""In the order a reader meets what they are about: files, config, tensors, pair."""


def manual_for(id: str) -> Manual | None:
    """The manual of the rule that explains a finding; None if no rule does."""
    return next((manual_of(rule) for rule in RULES if id in rule.ids), None)
