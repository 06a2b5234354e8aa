"""The default pipelines, in phases."""

from __future__ import annotations

from typing import Any

from edgecc.devices import Device
from edgecc.passes.add_state_replay import AddStateReplay
from edgecc.passes.assign_precision import AssignPrecision, AssignPrecisionOptions
from edgecc.passes.base import Pass
from edgecc.passes.bind_shared_weights import BindSharedWeights, BindSharedWeightsOptions
from edgecc.passes.canonicalize import Canonicalize
from edgecc.passes.choose_tokens import ChooseTokens
from edgecc.passes.cse import Cse
from edgecc.passes.dce import Dce
from edgecc.passes.dedupe_weights import DedupeWeights
from edgecc.passes.drop_outputs import DropOutputs
from edgecc.passes.fold_constants import FoldConstants
from edgecc.passes.fuse_cached_attention import FuseCachedAttention
from edgecc.passes.fuse_gate_up import FuseGateUp
from edgecc.passes.fuse_qkv import FuseQkv
from edgecc.passes.legalize import Legalize, LegalizeOptions
from edgecc.passes.lower_encodings import LowerEncodings, LowerEncodingsOptions
from edgecc.passes.outline_shared import OutlineShared, OutlineSharedOptions
from edgecc.passes.quantize import Quantize, QuantizeOptions
from edgecc.passes.quantize_activations import (
    QuantizeActivations,
    QuantizeActivationsOptions,
)
from edgecc.passes.split_layers import SplitLayers
from edgecc.passes.unroll_markov import UnrollMarkov


def default_pipeline(
    device: Device,
    *,
    copy_head: bool = False,
    keep_draft_logits: bool = False,
    linear_form: str = "auto",
    quantization: str = "auto",
    draft_quantization: str = "auto",
    quantize_head: bool = False,
    activations: str = "auto",
) -> list[Pass[Any]]:
    """Passes from a lifted module to one the device's backend takes.

    Args:
        device: What is compiled for.
        copy_head: Bind the draft to a copy of the target's head and embedding (experiments).
        keep_draft_logits: Keep the draft's logits.
        linear_form: Form of quantized linear layers, see `lower-encodings`.
        quantization: Format to round the target's weights to, see `quantize`; `auto` keeps them.
        draft_quantization: The same for the draft.
        quantize_head: Round output heads as well.
        activations: `16bit` keeps activations as they are; `auto` and `quantized` round the inputs
            of linear layers as the checkpoint was calibrated, where the device multiplies that.
    """
    formats = {"target": quantization, "draft": draft_quantization}
    return [
        # Pairing: afterwards the module is complete (heads-bound) and has no byte twice.
        BindSharedWeights(BindSharedWeightsOptions(copy=copy_head)),
        *([] if copy_head else [DedupeWeights()]),
        # Precision: before the fusions, which stack weights of equal scales.
        *(
            Quantize(QuantizeOptions(format, include=f"{role}.*", head=quantize_head))
            for role, format in formats.items()
            if format != "auto"
        ),
        # Structure: only what the runtime asks for, in the shapes engines like.
        *([] if keep_draft_logits else [DropOutputs()]),
        *([ChooseTokens()] if device.chooses_tokens else []),
        UnrollMarkov(),
        # Clean-up: what the structure left behind, so that fusions find one form of everything.
        Canonicalize(),
        FoldConstants(),
        Cse(),
        Dce(),
        # Fusion: exact.
        FuseQkv(),
        FuseGateUp(),
        Dce(),
        # Rollback: what cannot be cut back is replayed from a log; states-replayed holds.
        *([AddStateReplay()] if device.replays_states else []),
        # Precision: of activations, after the fusions, so that q, k and v share one op.
        *(
            [QuantizeActivations(QuantizeActivationsOptions(device=device.name))]
            if device.native_activations and activations != "16bit"
            else []
        ),
        # Device: native encodings, one engine per shared weight and for the steps of a draft, and
        # several for a deep graph where a builder makes them; legal(device) holds afterwards.
        LowerEncodings(LowerEncodingsOptions(linear_form, device.name)),
        *([_narrow(device)] if device.is_narrow else []),
        OutlineShared(OutlineSharedOptions(steps=device.fused_attention)),
        # Caches: once more exact, and after the cuts, so that each part updates its own in place.
        *([FuseCachedAttention()] if device.fused_attention else []),
        Dce(),
        *([SplitLayers()] if device.library else []),
        Legalize(LegalizeOptions(device.name)),
    ]


def _narrow(device: Device) -> AssignPrecision:
    """The device's 16-bit type for everything between token ids and scores."""
    return AssignPrecision(
        AssignPrecisionOptions(device.compute_type, caches=True, scores="packed")
    )
