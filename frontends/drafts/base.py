"""What lifting asks of a draft, whatever its kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from edgecc.errors import Diagnostic, InputError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.config import TextConfig
from edgecc.frontends.drafts.names import canonical_names
from edgecc.frontends.inventory import check_layers
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.frontends.mtp_block import MTP_TENSORS
from edgecc.frontends.quantization import read_quantization
from edgecc.ir.core import Json, Module

_FROM_TARGET = ("verifier_lm_head.*", "verifier_norm.*", "target_model.*", *MTP_TENSORS)
"""Globs of tensors some exports carry along from the target."""

ANOTHER_TARGET = "use the target this draft was trained for"


@dataclass(frozen=True, slots=True)
class DraftSize:
    """What the target and the options say about a draft's graph.

    Attributes:
        target_hidden: Hidden size of the target.
        num_tokens: Ids of the target at or above this are padding rows and never proposed.
        max_model_len: Most positions of a sequence.
    """

    target_hidden: int
    num_tokens: int
    max_model_len: int


class Draft(ABC):
    """A draft checkpoint whose config has been read.

    Class attributes:
        method: Name of the speculation method.

    Attributes:
        ignorable: Globs of tensors that are expected to be left over.
        checkpoint: The checkpoint.
        text: Hyperparameters of the draft's own layers.
        steps: N, proposals per round.
        rows: Rows a round puts behind the context, at least N: caches and verifications hold them.
        rows_from: The key or option `rows` follow from, for messages.
        numbering: What the tapped layers were read from, for the report.
    """

    method: ClassVar[str]

    ignorable: tuple[str, ...] = _FROM_TARGET
    checkpoint: Checkpoint
    text: TextConfig
    steps: int
    rows: int
    rows_from: str
    numbering: str

    @abstractmethod
    def __init__(self, checkpoint: Checkpoint, steps: int | None) -> None:
        """Read and check the config.

        Args:
            checkpoint: A draft of this kind.
            steps: Proposals per round that were asked for; None takes the draft's own number.

        Raises:
            InputError: A fact is missing, contradictory or out of range.
            UnsupportedError: A variant this frontend does not build.
            UsageError: The draft cannot propose so many tokens.
        """

    @property
    def target_hidden(self) -> int:
        """Hidden size of the target, as far as the draft knows: its own, unless it says more."""
        return self.text.hidden_size

    @abstractmethod
    def taps(self, target: TextConfig | None) -> tuple[int, ...]:
        """Target layers (from 0) whose outputs the draft reads; -1 is the embedding.

        Args:
            target: The target; without one, layers that depend on it are left out.
        """

    @abstractmethod
    def check_target(self, target: TextConfig) -> None:
        """Compare vocabularies, layers and sizes with the target, from the configs alone.

        Raises:
            InputError: The two do not belong together.
        """

    def check_tokens(self, target: Checkpoint, config: TextConfig) -> None:  # noqa: B027
        """Compare what tokens mean; drafts that were trained on states of a target share them.

        Args:
            target: The target.
            config: Its hyperparameters.

        Raises:
            InputError: Tokens mean something else.
        """

    def open_weights(self, module: Module) -> ModuleWeights:
        """The draft's tensors by canonical names, to be added to a module.

        Raises:
            InputError: Layers are missing, or two tensors mean the same.
            UnsupportedError: They are quantized in a way edgecc cannot read.
        """
        names = canonical_names(self.checkpoint.tensors)
        check_layers(self.checkpoint, names, self.text.num_hidden_layers)
        return ModuleWeights(module, self.checkpoint, read_quantization(self.checkpoint), names)

    def findings(self, weights: ModuleWeights) -> list[Diagnostic]:
        """What was found out about the precision of its tensors while the graph was built."""
        return weights.quantization.findings

    def reads(self, taps: tuple[int, ...]) -> str:
        """Which states of the target it reads, for the report.

        Args:
            taps: What `taps` returned for the target.
        """
        return f"the outputs of target layers {list(taps)} (from 0; read from {self.numbering})"

    @abstractmethod
    def build(self, weights: ModuleWeights, size: DraftSize) -> None:
        """Add graph `draft` to the module of `weights`.

        Raises:
            InputError: Config and tensors contradict each other.
            UnsupportedError: A variant this frontend does not build.
        """

    @abstractmethod
    def metadata(self, taps: tuple[int, ...]) -> dict[str, Json]:
        """What a runtime has to know besides the graph.

        Args:
            taps: What `taps` returned for the target.
        """

    @abstractmethod
    def facts(self) -> dict[str, Json]:
        """What `edgecc inspect` shows of the config."""


def check_vocabulary(draft: TextConfig, target: TextConfig) -> None:
    """Tokens of the one index tables of the other.

    Raises:
        InputError: The sizes differ.
    """
    if draft.vocab_size != target.vocab_size:
        raise InputError(
            "bind/vocab-mismatch",
            f"the draft's vocabulary has {draft.vocab_size} rows, the target's {target.vocab_size}",
            where=f"{draft.where}: vocab_size",
            help=ANOTHER_TARGET,
        )


def check_taps(
    taps: tuple[int, ...], numbering: str, declared: int | None, target: TextConfig
) -> None:
    """The tapped layers exist, and the target has as many layers as the draft expects.

    Args:
        taps: Target layers whose outputs are read, increasing.
        numbering: The key they were read from.
        declared: Layers of the target the draft was trained for, if it says.
        target: The target.

    Raises:
        InputError: They do not, or it has not.
    """
    if taps[-1] >= target.num_hidden_layers:
        raise InputError(
            "draft/tapped-layers",
            f"the draft reads layers {list(taps)} (outputs, from 0), the target has "
            f"{target.num_hidden_layers} layers",
            where=f"draft/config.json: {numbering}",
            help=ANOTHER_TARGET,
        )
    if declared not in (None, target.num_hidden_layers):
        raise InputError(
            "draft/target-layers",
            f"the draft was trained for a target of {declared} layers, this one has "
            f"{target.num_hidden_layers}",
            where="draft/config.json: num_target_layers",
            help=ANOTHER_TARGET,
        )
