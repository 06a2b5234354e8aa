"""What a compile can be asked for besides its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgecc.devices import Device, LinearForm, get_device
from edgecc.errors import UsageError
from edgecc.frontends.components import TEXT, parse_components
from edgecc.frontends.spec_methods import method_named

LM_HEAD_CHOICES = ("auto", "share", "own", "copy")
VERIFY_CHOICES = ("none", "fast", "full")
LINEAR_FORM_CHOICES = ("auto", *(form.value for form in LinearForm))
WEIGHTS_CHOICES = ("auto", "embed", "bind")
QUANTIZATION_CHOICES = ("auto", "nvfp4", "fp8", "fp8-channel", "fp8-block", "int8", "int4")

ACTIVATION_CHOICES = ("auto", "16bit", "quantized")


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Everything that shapes a bundle besides the checkpoints.

    Attributes:
        device: Name of the compile target, see `edgecc.devices`, or several of them for one bundle.
        components: Which parts of the checkpoints are compiled, see `edgecc.frontends.components`.
            `text` leaves out the vision tower of a multimodal target.
        max_model_len: Most tokens of a sequence; None takes 8192 or the trained length, if less.
        max_input_len: Most tokens of a prompt; None takes 4096 or one less than `max_model_len`.
        spec_method: Speculation method; `auto` is that of the draft, none without one; `mtp` drafts
            with the target's own multi-token-prediction block, `ngram` looks proposals up in the
            text so far.
        num_speculative_tokens: Proposals per round; None takes the draft's block.
        prompt_lookup_min: For `ngram`: fewest tokens that have to repeat; None takes the most.
        prompt_lookup_max: For `ngram`: most tokens that are compared; None takes the fewest, or 5.
        prefill_chunk: Most rows per call of the target.
        max_batch_size: Most sequences at a time.
        lm_head: `auto` binds what the draft lacks; `share` requires that it borrows; `own` requires
            a head of its own; `copy` binds to a copy (to measure what sharing saves).
        linear_form: How quantized linear layers run, see `lower-encodings`.
        quantization: Format the target's linear weights are rounded to, see the pass `quantize`;
            `auto` keeps what the files have.
        draft_quantization: The same for the draft; never inherited from the target.
        quantize_head: Round the output head as well.
        activations: What linear layers read: `auto` quantizes it where the weights are stored with
            calibrated scales for that and the device multiplies such numbers, see the pass
            `quantize-activations`; `16bit` never does; `quantized` requires it.
        pass_pipeline: Passes to run instead of the default ones; `legalize` always follows.
        draft_outputs: Keep the draft's logits as outputs.
        weights: Where engines that can hold weights have them: `embed` as constants, `bind` as
            inputs that the runtime binds at load; `auto` decides by their size.
        verify: `none`; `fast` stores golden rows of the reference and checks the engine against
            them when the bundle is small; `full` checks always.
    """

    device: str | tuple[str, ...] = "cpu"
    components: str = TEXT
    max_model_len: int | None = None
    max_input_len: int | None = None
    spec_method: str = "auto"
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    prefill_chunk: int = 128
    max_batch_size: int = 1
    lm_head: str = "auto"
    linear_form: str = "auto"
    quantization: str = "auto"
    draft_quantization: str = "auto"
    quantize_head: bool = False
    activations: str = "auto"
    pass_pipeline: str | None = None
    draft_outputs: bool = False
    weights: str = "auto"
    verify: str = "fast"

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec_method", method_named(self.spec_method))
        self._check_devices()
        parse_components(self.components)
        _choice("weights", self.weights, WEIGHTS_CHOICES)
        _choice("lm_head", self.lm_head, LM_HEAD_CHOICES)
        _choice("verify", self.verify, VERIFY_CHOICES)
        _choice("linear_form", self.linear_form, LINEAR_FORM_CHOICES)
        _choice("quantization", self.quantization, QUANTIZATION_CHOICES)
        _choice("draft_quantization", self.draft_quantization, QUANTIZATION_CHOICES)
        _choice("activations", self.activations, ACTIVATION_CHOICES)
        self._check_quantization()
        lookup = ("prompt_lookup_min", "prompt_lookup_max")
        optional = ("max_model_len", "max_input_len", "num_speculative_tokens", *lookup)
        for name in (*optional, "prefill_chunk", "max_batch_size"):
            value = getattr(self, name)
            unset = value is None and name in optional
            if not unset and (type(value) is not int or value < 1):
                raise UsageError(
                    "usage/not-positive", f"{name} must be a positive number, not {value!r}"
                )

    @property
    def devices(self) -> tuple[Device, ...]:
        """The compile targets, in the order they were given."""
        names = (self.device,) if isinstance(self.device, str) else self.device
        return tuple(map(get_device, names))

    def _check_devices(self) -> None:
        devices = self.devices
        names = [d.name for d in devices]
        if not names:
            raise UsageError("usage/no-device", "an empty list of devices", help="name one: cpu")
        if twice := [n for i, n in enumerate(names) if n in names[:i]]:
            raise UsageError(
                "usage/device-twice", f"device {twice[0]} is given twice", help="name it once"
            )
        if len(names) > 1 and self.pass_pipeline is not None:
            raise UsageError(
                "usage/pipeline-devices",
                f"one pass pipeline for {', '.join(names)}: each device has passes of its own",
                help="compile for one device at a time",
            )
        if self.weights != "auto" and not any(d.library for d in devices):
            raise UsageError(
                "usage/weights",
                f"--weights {self.weights}: no engine of {', '.join(names)} can hold weights, they "
                "lie in the weight file",
                help="leave out --weights",
            )

    @property
    def quantizes(self) -> bool:
        """Whether any weights are to be rounded."""
        return (self.quantization, self.draft_quantization) != ("auto", "auto")

    def _check_quantization(self) -> None:
        if self.quantize_head and not self.quantizes:
            raise UsageError(
                "usage/quantize-head",
                "quantize_head without a format",
                help="say how: quantization=nvfp4",
            )
        if self.quantizes and self.pass_pipeline is not None:
            raise UsageError(
                "usage/contradiction",
                "quantization is a part of the default passes, and pass_pipeline replaces those",
                help="write the pass into the pipeline: quantize{format=nvfp4}",
            )
        if self.activations != "auto" and self.pass_pipeline is not None:
            raise UsageError(
                "usage/contradiction",
                "activations are quantized by the default passes, and pass_pipeline replaces those",
                help="write the pass into the pipeline, or leave it out: quantize-activations",
            )


def compile_options(values: Mapping[str, Any]) -> CompileOptions:
    """Options by name.

    Raises:
        UsageError: There is no such option, or a value is not one it can have.
    """
    values = dict(values)
    if isinstance(values.get("device"), Sequence) and not isinstance(values["device"], str):
        names = tuple(values["device"])
        values["device"] = names[0] if len(names) == 1 else names
    try:
        return CompileOptions(**values)
    except TypeError as error:
        raise UsageError(
            "usage/unknown-option",
            str(error).replace("CompileOptions.__init__()", "compile()"),
            help=f"valid: {', '.join(CompileOptions.__dataclass_fields__)}",
        ) from None


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(
            "usage/bad-choice", f"{name} is {value!r}", help=f"choose one of {', '.join(choices)}"
        )
