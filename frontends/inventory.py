"""Whether the tensors of a checkpoint are those of the network that is built from its config.

A parameter exists if its tensor is stored; flags of a config only say what to expect. A tensor that
belongs to the network and is not read would make its results wrong without any other sign, so it is
an error; tensors of something else are only listed.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from edgecc.errors import Diagnostic, InputError, Severity, UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.config import TextConfig
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.frontends.quantization.names import as_weight

_LAYER = re.compile(r"(?:model\.)?layers\.(0|[1-9]\d*)\.")
_BIAS = re.compile(r"(?:model\.)?layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj\.bias")
_PROJECTION = re.compile(
    r"(?:model\.)?layers\.(\d+)\.((?:self_attn|mlp)\.[a-z]+_proj)\.(weight|bias)"
)
_OTHER_REVISION = (
    "config and weights are of different models or revisions: fetch both again, or export again"
)

IGNORABLE = (
    "*rotary_emb*",  # computed from the config
    "*.k_scale",  # of a quantized KV cache, which is kept unquantized here
    "*.v_scale",
    "*.kv_scale",
    "*.q_scale",
    "*.input_scale",  # of quantized activations, where the weight is not read with it
    "*.input_amax",
)
"""Globs of tensor names that a decoder does not need."""


def layer_numbers(names: Iterable[str]) -> list[int]:
    """Numbers of the layers that tensors belong to, sorted."""
    return sorted({int(m[1]) for name in names if (m := _LAYER.match(name))})


def check_layers(
    checkpoint: Checkpoint, names: Iterable[str], count: int, key: str = "num_hidden_layers"
) -> None:
    """Compare the numbers of stored layers with the count of the config.

    Args:
        checkpoint: Whose layers, for messages.
        names: Names of its tensors.
        count: What the config says.
        key: Where it says so.

    Raises:
        InputError: Layers are missing, or there are more.
    """
    by_layer = {int(m[1]): name for name in names if (m := _LAYER.match(name))}
    stored = sorted(by_layer)
    absent = max(count - sum(1 for index in stored if index < count), 0)
    if absent:
        # Looks at no more numbers than there are layers, whatever the config says.
        first = [i for i in range(min(count, len(stored) + 8)) if i not in by_layer][:8]
        listed = ", ".join(map(str, first)) + (", ..." if absent > len(first) else "")
        raise InputError(
            "checkpoint/missing-layers",
            f"the config counts {count} layers, but {absent} of them are not stored: {listed}",
            where=f"{checkpoint.role}/config.json: {key}",
            notes=(f"stored: {_ranges(stored)}",),
            help=_OTHER_REVISION,
        )
    surplus = [index for index in stored if index >= count]
    if surplus:
        raise InputError(
            "checkpoint/surplus-layers",
            f"the config counts {count} layers, but {by_layer[surplus[0]]} is stored",
            where=f"{checkpoint.role}/config.json: {key}",
            notes=(f"stored: {_ranges(stored)}",),
            help=_OTHER_REVISION,
        )


def bias_findings(checkpoint: Checkpoint, names: Iterable[str], config: TextConfig) -> None:
    """Note where the config's bias flags and the stored biases disagree; the stored ones count.

    Args:
        checkpoint: Whose biases; takes the findings.
        names: Names of its tensors.
        config: Hyperparameters.

    Raises:
        InputError: Only some layers have a bias that others lack.
    """
    names = list(names)
    _check_biases(checkpoint, names)
    stored = {m[1] for name in names if (m := _BIAS.fullmatch(name))}
    for part, key, declared in (
        ("self_attn", "attention_bias", config.attention_bias),
        ("mlp", "mlp_bias", config.mlp_bias),
    ):
        if declared != (part in stored):
            found = "biases are stored and used" if part in stored else "no bias is stored"
            checkpoint.findings.append(
                Diagnostic(
                    "config/bias-flag",
                    f"{key} is {str(declared).lower()}, but {found}",
                    where=f"{config.where}: {key}",
                    help="check that config and weights belong together",
                    severity=Severity.WARNING,
                )
            )


def _check_biases(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """A bias is one of all layers with that projection, or of none."""
    layers: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, map(_PROJECTION.fullmatch, map(as_weight, names))):
        layers.setdefault((match[2], match[3]), set()).add(int(match[1]))
    for (module, kind), having in layers.items():
        lacking = sorted(layers.get((module, "weight"), set()) - having)
        if kind == "bias" and lacking:
            raise InputError(
                "checkpoint/missing-bias",
                f"{module}.bias is stored for layers {_ranges(sorted(having))}, but not for "
                f"{_ranges(lacking)}",
                where=f"{checkpoint.role}: layers.{lacking[0]}.{module}.bias",
                help=_OTHER_REVISION,
            )


def check_unread(
    weights: ModuleWeights, ignorable: Sequence[str] = (), built: Sequence[str] = ()
) -> str | None:
    """Look at the tensors that nothing has asked for, once a network is built.

    Args:
        weights: Of the network.
        ignorable: Globs of names that are expected to be left over, besides `IGNORABLE`.
        built: Globs of names that belong to the network besides those of its layers.

    Returns:
        A line that lists those of no known use, None if there are none.

    Raises:
        UnsupportedError: One of them is a parameter of the network that was built.
    """
    checkpoint = weights.checkpoint
    unused = weights.unused((*IGNORABLE, *ignorable))
    read = {name.rpartition(".")[0] for name in weights.quantization.consumed}
    canonical = {stored: name for name, stored in weights.names().items()}
    lost = [
        name
        for name in unused
        if 0 not in checkpoint.tensors[name].shape
        and (
            any(parent in read for parent in _parents(name))
            or _LAYER.match(canonical.get(name, name))
            or any(fnmatch.fnmatchcase(name, pattern) for pattern in built)
        )
    ]
    if lost:
        raise UnsupportedError(
            "checkpoint/unread-parameter",
            f"{lost[0]} is stored, but this architecture has no such parameter: without it the "
            "results would be wrong",
            where=checkpoint.location(lost[0]),
            notes=[f"so is {name}" for name in lost[1:5]],
            help="the checkpoint is of a variant edgecc does not build",
        )
    if not unused:
        return None
    shown = ", ".join(unused[:8]) + (" ..." if len(unused) > 8 else "")
    return f"{checkpoint.role}: {len(unused)} tensors are not used: {shown}"


def _parents(name: str) -> Iterator[str]:
    """The modules that a tensor is in: wrappers put theirs below one, `fc.lora_A.weight`."""
    while name := name.rpartition(".")[0]:
        yield name


def left_out(
    weights: ModuleWeights, parts: Mapping[str, Sequence[str]], built: str = "language model is"
) -> list[str]:
    """One line for each part of a checkpoint that is knowingly not built.

    Args:
        weights: Of the network, once it is built.
        parts: Names of the parts and globs of their tensors.
        built: What is, with its verb.
    """
    lines = []
    for part, patterns in parts.items():
        known = [n for n in weights.unused(()) if any(fnmatch.fnmatchcase(n, p) for p in patterns)]
        if known:
            count = f"{len(known)} tensor{'s' if len(known) > 1 else ''}"
            lines.append(
                f"{weights.checkpoint.role}: the {part} ({count}) is left out: only the {built} "
                "built"
            )
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers in short: `0-2, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    shown = ["-".join(map(str, run)) for run in runs[:8]]
    return ", ".join([*shown, "..."] if len(runs) > 8 else shown) or "none"
