"""Small language models that draft for a larger one: ordinary checkpoints with the same tokenizer.

The network is that of a target, with its own embedding, head and caches, and reads nothing of the
target. A round calls it once for each proposal, with the committed tokens that it has not read and
then with its own choices. What it writes for these are the rows of these tokens, so those that the
target accepts stay, and the others are taken back by counting fewer. The last proposal is never
read: where all are accepted, the next round begins with two tokens.

Source: Leviathan et al. (arXiv 2211.17192); vLLM calls the method `draft_model`, transformers
assisted generation.
"""

from __future__ import annotations

from edgecc.errors import Diagnostic, InputError, Severity, UnsupportedError, UsageError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.config import TextConfig, read_text_config
from edgecc.frontends.drafts.base import Draft, DraftSize
from edgecc.frontends.inventory import check_layers
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.frontends.mtp_block import MTP_TENSORS
from edgecc.frontends.quantization import read_quantization
from edgecc.frontends.spec_methods import DRAFT_MODEL
from edgecc.frontends.targets import TARGETS, get_target, reject_experts
from edgecc.frontends.targets import names as target_names
from edgecc.frontends.vocabulary import TOKENIZER, named_tokens
from edgecc.ir.core import Json, Module

_DEFAULT_STEPS = 5

_SAME_TOKENIZER = "use a draft of the target's own family, with the same tokenizer"


class DraftModel(Draft):
    """A language model as a draft."""

    method = DRAFT_MODEL

    def __init__(self, checkpoint: Checkpoint, steps: int | None) -> None:
        """See `Draft`."""
        self.checkpoint = checkpoint
        reject_experts(checkpoint)
        self.text = read_text_config(checkpoint)
        self._frontend = get_target(self.text)
        if self._frontend.build_draft is None:
            able = [name for name, found in TARGETS.items() if found.build_draft is not None]
            raise UnsupportedError(
                "draft/recurrent",
                f"a draft of model_type {self.text.model_type!r} has recurrent layers, whose "
                "states cannot be taken back after a rejected proposal",
                where=self.text.at("model_type"),
                help=f"supported as drafts: {', '.join(able)}",
            )
        self.ignorable = (
            *MTP_TENSORS,
            *(glob for globs in self._frontend.left_out.values() for glob in globs),
        )
        self.steps = self.rows = _DEFAULT_STEPS if steps is None else steps
        self.rows_from = "num_speculative_tokens"
        self.numbering = ""
        if self.steps < 1:
            raise UsageError(
                "usage/speculative-tokens",
                f"{steps} speculative tokens asked for",
                help="choose at least 1",
            )

    def taps(self, target: TextConfig | None) -> tuple[int, ...]:
        """None: it reads tokens."""
        return ()

    def check_target(self, target: TextConfig) -> None:
        """Configs may differ in all but what `check_tokens` looks at."""

    def check_tokens(self, target: Checkpoint, config: TextConfig) -> None:
        """An id that both have is the same token, and the draft has a row for all of the target's.

        Rows of padding may differ in number. Tokens that only one of the two has are told: the
        draft never proposes what it lacks, and what the target lacks is never accepted.

        Raises:
            InputError: An id means two tokens, or the draft has too few rows.
        """
        mine, theirs = named_tokens(self.checkpoint), named_tokens(target)
        if not mine or not theirs:
            self._check_sizes_alone(config, lacking=target if not theirs else self.checkpoint)
            return
        other = [i for i in sorted(mine.keys() & theirs.keys()) if mine[i] != theirs[i]]
        if other:
            first = other[0]
            raise InputError(
                "draft/tokenizer",
                f"the draft's tokenizer is another one: token {first} is {mine[first]!r}, the "
                f"target's is {theirs[first]!r}",
                where=f"{self.checkpoint.role}/{TOKENIZER}",
                notes=(f"{len(other)} of {len(mine.keys() & theirs.keys())} ids differ",),
                help=_SAME_TOKENIZER,
            )
        known = (*theirs, *config.eos_token_ids)
        count = 1 + max((i for i in known if i < config.vocab_size), default=-1)
        if self.text.vocab_size < count:
            raise _other_size(self.text, config, f"{count} of which have a token")
        self._note_lacking(mine, theirs)

    def _check_sizes_alone(self, config: TextConfig, lacking: Checkpoint) -> None:
        """Without two tokenizers, equal sizes are all that can be asked for.

        Raises:
            InputError: They differ.
        """
        if self.text.vocab_size != config.vocab_size:
            raise _other_size(self.text, config, f"and there is no {lacking.role}/{TOKENIZER}")
        self.checkpoint.findings.append(
            Diagnostic(
                "draft/tokenizer-unknown",
                f"there is no {lacking.role}/{TOKENIZER}: whether draft and target have the same "
                "tokens is not known",
                where=f"{lacking.role}/{TOKENIZER}",
                help="if they have not, no proposal is accepted",
                severity=Severity.WARNING,
            )
        )

    def _note_lacking(self, mine: dict[int, str], theirs: dict[int, str]) -> None:
        """Tell of tokens that one of the two has not."""
        for who, ids in (
            ("the target", sorted(mine.keys() - theirs.keys())),
            ("the draft", sorted(theirs.keys() - mine.keys())),
        ):
            if ids:
                named = {**mine, **theirs}
                self.checkpoint.findings.append(
                    Diagnostic(
                        "draft/tokens-differ",
                        f"{len(ids)} tokens are unknown to {who}, all others are the same",
                        where=f"{self.checkpoint.role}/{TOKENIZER}",
                        notes=tuple(f"{named[i]!r} is {i}" for i in ids[:3]),
                        help="nothing to do: the target decides, such tokens are not foreseen",
                        severity=Severity.NOTE,
                    )
                )

    def open_weights(self, module: Module) -> ModuleWeights:
        """See `Draft.open_weights`; names are those of targets."""
        checkpoint = self.checkpoint
        prefix = target_names.text_prefix(checkpoint.tensors, checkpoint.role)
        names = target_names.canonical_names(checkpoint.tensors, prefix, checkpoint.role)
        check_layers(checkpoint, names, self.text.num_hidden_layers)
        spelled = (target_names.CANONICAL, prefix)
        return ModuleWeights(module, checkpoint, read_quantization(checkpoint), names, spelled)

    def build(self, weights: ModuleWeights, size: DraftSize) -> None:
        """Build graph `draft`; see `edgecc.frontends.targets.dense.build_dense`.

        Raises:
            InputError: Config and tensors contradict each other.
            UnsupportedError: A variant the frontend of its architecture does not build.
        """
        assert self._frontend.build_draft is not None
        capacity = size.max_model_len + self.rows
        proposes = min(size.num_tokens, self.text.vocab_size)
        self._frontend.build_draft(weights, self.text, (), capacity, proposes=proposes)

    def metadata(self, taps: tuple[int, ...]) -> dict[str, Json]:
        """Proposals and positions."""
        return {
            "method": self.method,
            "num_speculative_tokens": self.steps,
            "model_type": self.text.model_type,
            "max_position_embeddings": self.text.max_position_embeddings,
        }

    def facts(self) -> dict[str, Json]:
        """Its family and its vocabulary."""
        return {"model_type": self.text.model_type, "vocab_size": self.text.vocab_size}


def _other_size(draft: TextConfig, target: TextConfig, about: str) -> InputError:
    return InputError(
        "bind/vocab-mismatch",
        f"the draft's vocabulary has {draft.vocab_size} rows, the target's {target.vocab_size}, "
        f"{about}",
        where=f"{draft.where}: vocab_size",
        help=_SAME_TOKENIZER,
    )
