"""DFlash drafts: the block of a DSpark draft without its heads.

Source: z-lab's DFlash (arXiv 2602.06036). Backbone, context and attention are those of `dspark`.
Each slot chooses its token for itself. In z-lab's and SpecForge's drafts masks fill their own
positions and the anchor's slot predicts nothing; DeepSpec publishes drafts of this kind whose
anchor predicts. Embedding and head are the target's.
"""

from __future__ import annotations

from edgecc.frontends.drafts.dspark import BlockBuilder, DSpark
from edgecc.frontends.drafts.markov import choose
from edgecc.ir.core import Json, Value
from edgecc.roles import Role


class DFlash(DSpark):
    """A DFlash draft."""

    method = "dflash"

    @property
    def builder(self) -> type[BlockBuilder]:
        """What builds the graph; its outputs are those of `DSpark.build` but for base_logits."""
        return _Builder

    def facts(self) -> dict[str, Json]:
        """The block, what it reads, and the confidence head if there is one."""
        found = super().facts()
        absent = ("markov_rank", *(("confidence_head",) if not found["confidence_head"] else ()))
        return {name: fact for name, fact in found.items() if name not in absent}


class _Builder(BlockBuilder):
    """Slots that do not know of each other's tokens."""

    def _choose(self, z: Value, base: Value) -> None:
        """The best token of each slot, for itself."""
        proposals = choose(self, base, self.vocabulary, "proposals")
        self.b.output(proposals, "proposals", Role.PROPOSALS)
        self.b.output(base, "draft_logits", Role.DRAFT_LOGITS)
