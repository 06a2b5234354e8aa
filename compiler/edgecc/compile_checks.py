"""What a compile refuses about its checkpoints: before the passes, and what those left undone."""

from __future__ import annotations

from collections.abc import Iterator

from edgecc.backends.base import Progress
from edgecc.backends.runtime.proposer import PROPOSERS
from edgecc.checkpoints import checkpoints_of
from edgecc.compile_options import CompileOptions
from edgecc.devices import DEVICES, Device
from edgecc.errors import InputError, LegalizeError, UnsupportedError, UsageError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.finite import check_finite
from edgecc.frontends.quantization import EncodedWeight, check_group_scales, check_scales
from edgecc.frontends.quantization.names import as_weight
from edgecc.ir.core import Module
from edgecc.ir.encodings import FP8, MXFP4, NVFP4, Int4
from edgecc.ir.verifier import check_property
from edgecc.ir.weights import Derived, Stored, Unbound
from edgecc.passes.base import PassContext
from edgecc.passes.quantize import Quantize, is_head
from edgecc.passes.quantize_activations import QuantizeActivations
from edgecc.prompt_lookup import NGRAM
from edgecc.text_side import check_tokenizer

RUNTIME_METHODS = tuple(PROPOSERS)
"""Speculation methods `edgecc.backends.runtime` can drive."""

_GROUP_SCALES = (".scales", ".weight_scale")
"""Of AWQ and GPTQ, of compressed-tensors."""


def check_module(module: Module, options: CompileOptions, report: Progress) -> None:
    """Check what holds for a lifted module whatever the device.

    Args:
        module: As lifted.
        options: What was asked for.
        report: Told about the values that are looked at.

    Raises:
        UsageError: An option needs a draft, and there is none.
        InputError: The head, the tokenizer or a value cannot be used.
        UnsupportedError: The runtime does not drive the draft's method.
    """
    check_needs_draft(options, "draft" in module.graphs)
    check_needs_proposals(options, isinstance(module.metadata.get("draft"), dict))
    _check_method(module, options)
    _check_head_choice(module, options)
    check_tokenizer(checkpoints_of(module)["target"])
    _check_placeholder(module)
    _scan_values(module, report)


def check_needs_draft(options: CompileOptions, draft: bool) -> None:
    """Check that options about a draft come with one.

    Raises:
        UsageError: They do not.
    """
    if draft:
        return
    if options.lm_head != "auto":
        raise UsageError("usage/lm-head", f"--lm-head {options.lm_head} needs --draft")
    if options.draft_quantization != "auto":
        raise UsageError(
            "usage/draft-quantization",
            f"--draft-quantization {options.draft_quantization} needs --draft",
        )


def check_needs_proposals(options: CompileOptions, proposals: bool) -> None:
    """Check that a number of proposals comes with something that proposes.

    Raises:
        UsageError: It does not.
    """
    if options.num_speculative_tokens is not None and not proposals:
        raise UsageError(
            "usage/speculative-tokens",
            f"{options.num_speculative_tokens} speculative tokens need a draft",
            help=f"give its folder: --draft DIR; or look proposals up: --spec-method {NGRAM}",
        )


def check_quantized(module: Module, options: CompileOptions, ctx: PassContext) -> None:
    """Refuse a quantization that found nothing to round.

    Args:
        module: After the passes.
        options: What was asked for.
        ctx: Of the passes, with their remarks.

    Raises:
        UsageError: The flag and the role are named, and why weights were left alone.
    """
    sources = [
        module.weights.resolve(weight.source.inputs[0])
        for weight in module.weights.values()
        if isinstance(weight.source, Derived) and weight.source.recipe == "quantize"
    ]
    rounded = {symbol.partition(".")[0] for symbol in sources}
    for role, flag, format in (
        ("target", "--quantization", options.quantization),
        ("draft", "--draft-quantization", options.draft_quantization),
    ):
        if format != "auto" and role not in rounded:
            reasons = [
                f"{r.where}: {r.message}"
                for r in ctx.remarks
                if r.pass_name == Quantize.name and r.where.startswith(f"@{role}.")
            ]
            raise UsageError(
                "usage/nothing-to-quantize",
                f"{flag} {format} fits none of the {role}'s linear weights",
                notes=reasons[:3],
                help=f"leave out {flag}: weights keep the precision of the files",
            )
    if options.quantize_head and not any(is_head(symbol) for symbol in sources):
        raise UsageError(
            "usage/no-head-to-quantize",
            "--quantize-head rounds no head",
            notes=_why_no_head(module, options, ctx),
            help="leave out --quantize-head: the head keeps the precision of the file",
        )


def check_states(module: Module, device: Device) -> None:
    """Check that what states have seen can be taken back, by replaying their logs.

    Args:
        module: After the passes.
        device: What it was lowered for.

    Raises:
        LegalizeError: A state has no log.
    """
    findings = check_property(module, "states-replayed") if device.replays_states else []
    if findings:
        raise LegalizeError(*findings)


def check_activations(
    module: Module, device: Device, options: CompileOptions, ctx: PassContext
) -> None:
    """Refuse quantized activations that were asked for where nothing is quantized.

    Args:
        module: After the passes.
        device: What it was lowered for.
        options: What was asked for.
        ctx: Of the passes, with their remarks.

    Raises:
        UnsupportedError: The device has no products of quantized activations.
        UsageError: The checkpoints have no scales for them.
    """
    nodes = (n for g in module.graphs.values() for n in g.nodes)
    if options.activations != "quantized" or any(n.op.name == "fake_quantize" for n in nodes):
        return
    if not device.native_activations:
        able = [d.name for d in DEVICES.values() if d.native_activations]
        raise UnsupportedError(
            "device/activations",
            f"--activations quantized: device {device.name} has no products of such activations",
            notes=[f"devices that have: {', '.join(able)}"],
            help="leave it out: activations keep the precision the device computes in",
        )
    remarks = [r for r in ctx.remarks if r.pass_name == QuantizeActivations.name]
    raise UsageError(
        "usage/no-activations-to-quantize",
        "--activations quantized: no linear layer has a scale for activations",
        notes=[f"{r.where}: {r.message}" for r in remarks[:3]],
        help="W4A4 and FP8 checkpoints have input_scale tensors; --activations auto takes others",
    )


def _why_no_head(module: Module, options: CompileOptions, ctx: PassContext) -> list[str]:
    """What is known about heads that were not rounded."""
    found = {
        f"{r.where}: {r.message}"
        for r in ctx.remarks
        if r.pass_name == Quantize.name and not r.applied and is_head(r.where.removeprefix("@"))
    }
    if options.quantization == "auto" and "draft" in module.graphs:
        return ["the draft reads the target's head: --quantization says how to round that"]
    return sorted(found) or ["the head is the embedding table"]


def _check_method(module: Module, options: CompileOptions) -> None:
    """The runtime drives the pair, or the decisions say that it cannot yet.

    Engines for a GPU are worth having before: they are built from evaluated graphs.

    Raises:
        UnsupportedError: It does not drive the draft's method, on a device that it runs on.
    """
    draft = module.metadata.get("draft")
    method = draft["method"] if isinstance(draft, dict) else None
    driven = method in (None, NGRAM, *RUNTIME_METHODS)
    runs_here = [d.name for d in options.devices if not d.library]
    if runs_here and not driven:
        raise UnsupportedError(
            "draft/no-runtime",
            f"method {method}: lifting and evaluating work, the runtime does not drive it yet",
            where="draft/config.json: architectures",
            help="edgecc lift and edgecc opt take this pair, and a GPU's engines can be built; "
            f"compile for {runs_here[0]} takes drafts of method {', '.join(RUNTIME_METHODS)}",
        )
    if not driven:
        module.decisions.append(f"engines only: the runtime does not drive method {method} yet")


def _check_head_choice(module: Module, options: CompileOptions) -> None:
    borrowed = [
        s
        for s, w in module.weights.items()
        if isinstance(w.source, Unbound) and w.source.role == "lm_head"
    ]
    if options.lm_head == "own" and borrowed:
        raise InputError(
            "bind/no-own-head",
            "--lm-head own: the draft ships no lm_head",
            where=f"weight @{borrowed[0]}",
            help="use --lm-head auto, which binds the target's",
        )
    if options.lm_head in ("share", "copy") and not borrowed:
        raise InputError(
            "bind/has-own-head",
            f"--lm-head {options.lm_head}: the draft ships its own lm_head, which stays",
            where="draft: lm_head.weight",
            help="use --lm-head auto",
        )


def _check_placeholder(module: Module) -> None:
    """The tokenizer must have the token that stands for an image, or no prompt could hold one."""
    vision, target = module.metadata.get("vision"), module.metadata["target"]
    assert isinstance(target, dict)
    if not isinstance(vision, dict):
        return
    token, count = int(str(vision["image_token_id"])), int(str(target["num_tokens"]))
    if token >= count:
        raise InputError(
            "vision/placeholder",
            f"image_token_id is {token}, and the tokenizer has tokens 0 to {count - 1}",
            where="target/config.json: image_token_id",
            help="fetch tokenizer.json of the same model, or compile without the vision tower: "
            "--components text",
        )


def _scan_values(module: Module, report: Progress) -> None:
    """Look at every block scale and every unquantized value once: a NaN would become NaN logits."""
    stored = [(w, w.source) for w in module.weights.values() if isinstance(w.source, Stored)]
    of_groups = set(_group_scales(module))
    for done, (weight, source) in enumerate(stored):
        report("check values", done, len(stored))
        reader = module.weights.readers[source.checkpoint]
        assert isinstance(reader, Checkpoint)
        parts = {p.component: p.key for p in source.parts}
        if isinstance(weight.encoding, NVFP4 | MXFP4 | FP8):
            name = as_weight(parts["weight"]).removesuffix(".weight")
            check_scales(reader, EncodedWeight(weight.encoding, parts, name, weight.shape))
        elif source in of_groups:
            check_group_scales(reader, parts["weight"])
        else:
            for key in parts.values():
                check_finite(reader, key)
    report("check values", len(stored), len(stored))


def _group_scales(module: Module) -> Iterator[Stored]:
    """Tensors with the scales of 4-bit integers, which are weights of their own until unpacked."""
    for weight in module.weights.values():
        if isinstance(weight.encoding, Int4) and isinstance(weight.source, Derived):
            for symbol in weight.source.inputs:
                source = module.weights[symbol].source
                if isinstance(source, Stored) and source.parts[0].key.endswith(_GROUP_SCALES):
                    yield source
