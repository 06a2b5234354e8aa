"""What lifting needs to know besides the checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from edgecc.frontends.spec_methods import method_named


@dataclass(frozen=True, slots=True)
class LiftOptions:
    """Sizes that become part of the graphs.

    Attributes:
        max_model_len: Most tokens of one sequence, prompt and answer; None takes 8192 or what the
            model was trained for, whichever is less.
        max_input_len: Most tokens of a prompt; None takes 4096 or one less than `max_model_len`.
        prefill_chunk: Most new tokens in one call of the target.
        spec_method: One of `SPEC_METHODS`, or vLLM's name for one; `mtp` drafts with the target's
            own block, `ngram` looks proposals up in the text so far.
        num_speculative_tokens: Proposals per round; None takes the draft's block.
        max_batch_size: Most sequences at a time.
        pads_rounds: Whether the engine pads target calls to the rows of a round, which then have to
            fit behind the last position.
        components: `text` builds the language model of a multimodal target; `all` also its vision
            tower, if it has one, and a language model that reads images; a list of `target`,
            `draft` and `vision`, with commas, builds exactly these.
        prompt_lookup_min: For `ngram`: fewest tokens that have to repeat; None takes the most.
        prompt_lookup_max: For `ngram`: most tokens that are compared; None takes the fewest, or 5.
    """

    max_model_len: int | None = None
    max_input_len: int | None = None
    prefill_chunk: int = 128
    spec_method: str = "auto"
    num_speculative_tokens: int | None = None
    max_batch_size: int = 1
    pads_rounds: bool = False
    components: str = "text"
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None

    def __post_init__(self) -> None:
        """Take edgecc's name of the method."""
        object.__setattr__(self, "spec_method", method_named(self.spec_method))


MAX_BATCH_SIZE = 64
"""More sequences than a bundle can be compiled for: models grow with the number."""

DEFAULT_MODEL_LEN = 8192
DEFAULT_INPUT_LEN = 4096
