"""Rules about drafts: their kind, what they read of the target, and their block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from edgecc.contract.pair import Pair, Side
from edgecc.contract.rule import Rule
from edgecc.errors import Diagnostic, Severity
from edgecc.frontends.drafts.dspark_config import NESTED
from edgecc.frontends.drafts.names import canonical_names
from edgecc.frontends.drafts.places import OUTPUT_IDS, Places


class DraftKind(Rule):
    """The draft is of a kind that edgecc builds, recognized by its tensors.

    What it checks
        Which tensors are stored. The architecture's name is not trusted: one name stands for
        several networks. A block draft without a Markov head is DFlash, whatever the name; a rank
        without tensors means an incomplete checkpoint.

    Why it matters
        Weights of one kind run as another kind: everything fits, and next to no proposal is
        accepted.

    What to do
        Use a draft of a supported kind, or fetch the missing tensors.
    """

    name = "draft-kind"
    ids: ClassVar[Mapping[str, str]] = {
        "draft/unknown": "no draft that edgecc knows",
        "draft/kind": "a kind of draft that is known and not built",
        "draft/markov-missing": "a Markov head is declared and not stored",
        "draft/no-mtp": "the target has no block of its own to draft with",
        "draft/layers": "a kind with one layer has several",
        "draft/recurrent": "a language model with recurrent layers, which cannot be rolled back",
        "draft/no-runtime": "the runtime does not drive this kind on the device",
    }


class DraftVariants(Rule):
    """The draft's layers are those that edgecc builds.

    What it checks
        Activation, windows, causality and sinks of attention, constants on logits and values.

    Why it matters
        Loaders that ignore keys they do not know build another network without an error.

    What to do
        Use a draft without the variant that is named.
    """

    name = "draft-variants"
    ids: ClassVar[Mapping[str, str]] = {
        "draft/activation": "the draft's MLP has another activation",
        "draft/sliding-window": "the draft has a sliding window",
        "draft/attention": "attention in the block is causal, or has sinks",
        "draft/logit-scale": "logits or values are scaled or capped",
    }


class TappedLayers(Rule):
    """The draft reads outputs of layers that the target has, counted as the draft was trained.

    What it checks
        The list: not empty, increasing, in range. `target_layer_ids` counts outputs from 0;
        `aux_hidden_state_layer_ids` counts inputs, so that one is subtracted. The width of `fc` is
        the number of layers times the target's hidden size. Declared facts about the target
        (layers, hidden size, family) are compared.

    Why it matters
        A layer off by one costs a half of the acceptance, and never an error.

    What to do
        Use the target the draft was trained for, and its own list.
    """

    name = "tapped-layers"
    ids: ClassVar[Mapping[str, str]] = {
        "draft/tapped-layers": "the list is missing, not increasing, or out of range",
        "draft/target-layers": "the draft was trained for another number of layers",
        "draft/target-hidden": "the draft was trained for another hidden size",
        "draft/target-family": "the draft was trained for another architecture",
        "draft/fc-width": "fc has another width than the tapped layers give",
        "draft/last-layer": "the output of the last layer is tapped",
    }

    def check(self, pair: Pair) -> Iterable[Diagnostic]:
        """Look for the last layer among the tapped ones."""
        if pair.target is None or pair.draft is None:
            return
        places = Places(pair.draft.checkpoint, NESTED)
        layers = pair.target.text.integer("num_hidden_layers")
        found = places.find((OUTPUT_IDS,), lambda f, k: f.integers(k, minimum=-1) or ())
        if found is not None and layers - 1 in found[1]:
            yield Diagnostic(
                "draft/last-layer",
                f"the draft reads the output of layer {layers - 1}, the last",
                where=found[0],
                notes=("edgecc gives the output itself, before the final norm",),
                help="make sure that it was trained on that: some tools give the normed output "
                "in its place",
                severity=Severity.NOTE,
            )


class BlockLayout(Rule):
    """The slots of a block mean what they meant in training.

    What it checks
        Whether the anchor's slot already predicts: `sample_from_anchor`, `shift_label` and
        `dspark_bonus_anchor` have to agree; without them the family decides, which has to be known
        for drafts without a Markov head. That there is a mask token with a row in the table it is
        looked up in, and no mask embedding of its own.

    Why it matters
        Read one slot off, every proposal is of the wrong position: 1.1 tokens a round in the place
        of 4. A default mask token of another family is a wrong row without an error.

    What to do
        Add the key, or the mask token, that the draft was trained with.
    """

    name = "block-layout"
    ids: ClassVar[Mapping[str, str]] = {
        "draft/slot-layout": "what slots mean is unknown, or said in two ways",
        "draft/mask-token": "the mask token has no row",
        "draft/mask-embedding": "the mask has an embedding of its own",
    }


class MarkovAndConfidence(Rule):
    """The heads of a DSpark draft have the form and width that its config gives.

    What it checks
        `markov_rank` against the stored matrices, the type of the Markov head, and the flags of
        the confidence head against what is stored.

    Why it matters
        A gated head run as a plain one loses every slot but the first. Loaders ignore the extra
        tensors that would tell.

    What to do
        Fetch config and weights of one revision.
    """

    name = "markov-and-confidence"
    ids: ClassVar[Mapping[str, str]] = {
        "draft/markov-rank": "markov_rank is not the stored width",
        "draft/markov-type": "a Markov head of another type than declared, or of an unknown one",
        "draft/confidence-flag": "a confidence head is declared and not stored, or the reverse",
        "draft/confidence-width": "the confidence head reads something else than declared",
    }

    def check(self, pair: Pair) -> Iterable[Diagnostic]:
        """Compare the width of the confidence head with its flag."""
        if pair.draft is not None:
            yield from self._width(pair.draft)

    def _width(self, draft: Side) -> Iterator[Diagnostic]:
        checkpoint = draft.checkpoint
        names = canonical_names(checkpoint.tensors)
        stored = checkpoint.tensors.get(names.get("confidence_head.proj.weight", ""))
        flag = Places(checkpoint, NESTED).flag("confidence_head_with_markov")
        if stored is None or flag is None or len(stored.shape) != 2 or not stored.dtype.is_float:
            return
        width, hidden = stored.shape[1], draft.text.integer("hidden_size")
        if flag[1] is (width == hidden):
            reads = "hidden states only" if width == hidden else "more than hidden states"
            yield Diagnostic(
                "draft/confidence-width",
                f"confidence_head_with_markov is {str(flag[1]).lower()}, but the head has {width} "
                f"columns: it reads {reads} (hidden size {hidden})",
                where=flag[0],
                notes=("the stored matrix counts",),
                help="check that config and weights belong together",
                severity=Severity.WARNING,
            )


class DraftLength(Rule):
    """What happens beyond the positions the draft was made for.

    What it checks
        `max_position_embeddings` of the draft against the target's.

    Why it matters
        A draft run past its positions reads outside of its tables, or proposes noise.

    What to do
        Nothing: beyond, decoding goes on without the draft.
    """

    name = "draft-length"
    ids: ClassVar[Mapping[str, str]] = {
        "draft/positions": "the draft was made for fewer positions than the target"
    }

    def check(self, pair: Pair) -> Iterable[Diagnostic]:
        """Compare the two lengths."""
        if pair.target is None or pair.draft is None:
            return
        key = "max_position_embeddings"
        target, draft = pair.target.text.integer(key), pair.draft.text.integer(key)
        if draft < target:
            yield Diagnostic(
                "draft/positions",
                f"the draft was made for {draft} positions, the target for {target}: beyond, "
                "decoding goes on without the draft",
                where=pair.draft.text.at(key),
                help="nothing to do; or compile with a smaller --max-model-len",
                severity=Severity.NOTE,
            )
