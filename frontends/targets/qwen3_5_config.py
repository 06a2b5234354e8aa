"""Keys of Qwen3.5 configs that other decoders do not have, checked against each other.

Qwen3.6 and Qwen3.8 use the same classes and keys. Rules follow transformers' configuration_qwen3_5.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgecc.errors import Diagnostic, Severity, UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.config import TextConfig, config_fields, rope_fields
from edgecc.frontends.fields import Fields

_OUTPUT_GATES = ("swish", "silu")
_SECTIONS = (11, 11, 10)


@dataclass(frozen=True, slots=True)
class LinearAttentionConfig:
    """Sizes of the Gated DeltaNet layers.

    Attributes:
        key_heads: Heads of queries and keys.
        value_heads: Heads of values, gates and states; a multiple of the key heads.
        key_dim: Width of a query or key head.
        value_dim: Width of a value head.
        taps: Taps of the convolution.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def key_width(self) -> int:
        """All query heads, or all key heads."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """All value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """What the convolution runs over: queries, keys and values."""
        return 2 * self.key_width + self.value_width


def read_linear_attention(checkpoint: Checkpoint, config: TextConfig) -> LinearAttentionConfig:
    """Read the sizes of the linear-attention layers, and check what else the config says of them.

    Raises:
        InputError: A key is missing, has a wrong type, or contradicts another.
        UnsupportedError: The config asks for another network.
    """
    _, text = config_fields(checkpoint)
    gate = text.string("output_gate_type", default=_OUTPUT_GATES[0])
    if gate not in _OUTPUT_GATES:  # of the DeltaNet; the gate of attention is always a sigmoid
        raise UnsupportedError(
            "target/output-gate",
            f"output_gate_type {gate!r} is not supported",
            where=text.at("output_gate_type"),
            help=f"supported: {', '.join(_OUTPUT_GATES)}",
        )
    _check_sections(text, config)
    _note_gate(checkpoint, text)
    found = LinearAttentionConfig(
        key_heads=text.integer("linear_num_key_heads"),
        value_heads=text.integer("linear_num_value_heads"),
        key_dim=text.integer("linear_key_head_dim"),
        value_dim=text.integer("linear_value_head_dim"),
        taps=text.integer("linear_conv_kernel_dim", minimum=2),
    )
    if found.value_heads % found.key_heads:
        text.fail("linear_num_value_heads", f"a multiple of linear_num_key_heads {found.key_heads}")
    return found


def multimodal_axes(checkpoint: Checkpoint, config: TextConfig) -> tuple[int, ...]:
    """Which position of a token each frequency turns with: 0 time, 1 row, 2 column.

    Interleaved: frequency j takes axis j mod 3 as long as that axis has frequencies left, and time
    from there on.

    Raises:
        InputError: The sections do not add up to all frequencies.
        UnsupportedError: The axes are not interleaved.
    """
    _, text = config_fields(checkpoint)
    rope = rope_fields(text)
    if not rope.boolean("mrope_interleaved", default=True):
        raise UnsupportedError(
            "rope/sections",
            "mrope_interleaved is false: this model_type interleaves the axes",
            where=rope.at("mrope_interleaved"),
        )
    half = config.rope.dim // 2
    sections = rope.integers("mrope_section") or _SECTIONS
    if sum(sections) != half:
        rope.fail("mrope_section", f"three numbers that add up to {half}")
    return tuple(j % 3 if j < 3 * sections[j % 3] else 0 for j in range(half))


def _check_sections(text: Fields, config: TextConfig) -> None:
    """The three axes of a multimodal rotary embedding share out all its frequencies."""
    rope = rope_fields(text)
    sections = rope.integers("mrope_section")
    if sections is not None and (len(sections) != 3 or 2 * sum(sections) != config.rope.dim):
        rope.fail(
            "mrope_section",
            f"three numbers that add up to {config.rope.dim // 2}, half of the "
            f"{config.rope.dim} rotated dims",
        )


def _note_gate(checkpoint: Checkpoint, text: Fields) -> None:
    if not text.boolean("attn_output_gate", default=True):
        checkpoint.findings.append(
            Diagnostic(
                "config/output-gate",
                "attn_output_gate is false, but query projections with a gate are stored and used",
                where=text.at("attn_output_gate"),
                help="check that config and weights belong together",
                severity=Severity.WARNING,
            )
        )
