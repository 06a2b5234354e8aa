"""Lift checkpoints into one module: the target's graph, the draft's graph, one weight table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgecc.errors import Diagnostic, InputError, UsageError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.checkpoint_files import Place
from edgecc.frontends.components import Components, parse_components
from edgecc.frontends.config import TextConfig, read_text_config
from edgecc.frontends.drafts import choose_draft, is_draft
from edgecc.frontends.drafts.base import Draft, DraftSize
from edgecc.frontends.drafts.mtp import Mtp
from edgecc.frontends.drafts.ngram import Ngram
from edgecc.frontends.gather import Gather
from edgecc.frontends.inventory import bias_findings, check_layers, check_unread, left_out
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.frontends.mtp_block import MTP_BLOCK, MTP_FILES, MTP_TENSORS
from edgecc.frontends.options import (
    DEFAULT_INPUT_LEN,
    DEFAULT_MODEL_LEN,
    MAX_BATCH_SIZE,
    LiftOptions,
)
from edgecc.frontends.quantization import read_quantization
from edgecc.frontends.targets import (
    TargetFrontend,
    VisionFrontend,
    get_target,
    reject_experts,
)
from edgecc.frontends.targets import names as target_names
from edgecc.frontends.vocabulary import count_tokens
from edgecc.hub_layout import origin_of
from edgecc.ir.core import Module
from edgecc.ir.types import SymbolRange


def lift(
    target: str | Path | Place | None,
    draft: str | Path | Place | None = None,
    options: LiftOptions = LiftOptions(),  # noqa: B008 (immutable)
) -> Module:
    """Build the module of a target, a pair, or a draft alone.

    Reads configs and tensor headers only; weights stay where they are until asked for. The module's
    weight table keeps the checkpoints open (`module.weights.readers`).

    Args:
        target: Folder of the target checkpoint; None lifts the draft alone, its borrowed weights
            unbound and the target's hidden size taken to be the draft's.
        draft: Folder of the draft checkpoint.
        options: Sizes that become part of the graphs.

    Raises:
        InputError: A checkpoint is damaged, incomplete, or the two do not belong together.
        UnsupportedError: An architecture, variant or encoding without a frontend.
        UsageError: Sizes that contradict each other or the checkpoints.
    """
    if target is None and draft is None:
        raise UsageError("usage/nothing-to-lift", "give a target, a draft, or both")
    check_given(options, target=target is not None, draft=draft is not None)
    errors = Gather()
    target_ckpt = draft_ckpt = None
    with errors.step():
        target_ckpt = open_target(target, options) if target is not None else None
    with errors.step():
        draft_ckpt = Checkpoint.open(draft, role="draft") if draft is not None else None
    errors.raise_found()
    return lift_opened(target_ckpt, draft_ckpt, options)


def check_given(options: LiftOptions, *, target: bool, draft: bool) -> None:
    """Check that the components that were asked for are those that were given.

    Raises:
        UsageError: They are not.
    """
    has_draft = draft or options.spec_method == Mtp.method
    parse_components(options.components).check_given(target=target, draft=has_draft)


def open_target(path: str | Path | Place, options: LiftOptions) -> Checkpoint:
    """Open the checkpoint of a target, with the file of its own draft if that is asked for.

    Raises:
        InputError: See `Checkpoint.open`.
        UnsupportedError: See `Checkpoint.open`.
        ResourceError: See `Checkpoint.open`.
    """
    also = MTP_FILES if options.spec_method == Mtp.method else ()
    return Checkpoint.open(path, role="target", also=also)


def lift_opened(
    target_ckpt: Checkpoint | None, draft_ckpt: Checkpoint | None, options: LiftOptions
) -> Module:
    """The same for open checkpoints, at least one of them.

    What is wrong with one config, tensor or network does not keep the others from being looked at:
    the error tells all that was found. The checkpoints keep their findings either way.

    Raises:
        InputError: See `lift`.
        UnsupportedError: See `lift`.
        UsageError: See `lift`.
    """
    if target_ckpt is not None and is_draft(target_ckpt):
        raise InputError(
            "draft/needs-target",
            f"{target_ckpt.name} is a draft: it computes from the states of its target",
            where="target/config.json",
            help="this draft needs a target: edgecc compile TARGET --draft DRAFT",
        )
    name = "+".join(c.name for c in (target_ckpt, draft_ckpt) if c is not None)
    module = Module(name)
    module.checkpoints.update(
        {c.role: str(c.path) for c in (target_ckpt, draft_ckpt) if c is not None}
    )
    errors = Gather()
    target_config = speculation = decision = None
    if target_ckpt is not None:
        with errors.step():
            reject_experts(target_ckpt)
            target_config = read_text_config(target_ckpt)
            get_target(target_config)
    with errors.step():
        speculation, decision = choose_draft(target_ckpt, draft_ckpt, options)
    errors.raise_found()
    lifted_draft = speculation if isinstance(speculation, Draft) else None
    for checkpoint in filter(None, (target_ckpt, draft_ckpt)):
        if origin := origin_of(checkpoint.path):
            module.decisions.append(f"{checkpoint.role}: {origin}, from the hub")
    if decision is not None:
        module.decisions.append(decision)
    base = target_config or (lifted_draft.text if lifted_draft else None)
    assert base is not None
    length = _model_len(base, options)
    _symbols(module, options, speculation)
    num_tokens = base.vocab_size
    if target_ckpt is not None:
        with errors.step():
            num_tokens = count_tokens(target_ckpt, base)
    if target_ckpt is not None and target_config is not None:
        # A row more than the runtime may use: engines pad single-row calls.
        spare = speculation.steps if speculation and options.pads_rounds else 1
        sizes = TargetSize(length + max(spare, 1), _input_len(length, options), num_tokens)
        with errors.step():
            _lift_target(module, target_ckpt, target_config, lifted_draft, sizes, options)
    if lifted_draft is not None:
        with errors.step():
            _lift_draft(module, lifted_draft, target_config, length, num_tokens)
    errors.raise_found()
    if isinstance(speculation, Ngram):
        module.metadata["draft"] = speculation.metadata()
    module.metadata["limits"] = {
        "max_model_len": length,
        "max_input_len": _input_len(length, options),
        "prefill_chunk": options.prefill_chunk,
        "max_batch_size": options.max_batch_size,
    }
    return module


@dataclass(frozen=True, slots=True)
class TargetSize:
    """How much a target can be given.

    Attributes:
        capacity: Rows of its caches.
        input_length: Most tokens of a prompt.
        num_tokens: Real entries of the vocabulary.
    """

    capacity: int
    input_length: int
    num_tokens: int


def _lift_target(
    module: Module,
    checkpoint: Checkpoint,
    config: TextConfig,
    draft: Draft | None,
    sizes: TargetSize,
    options: LiftOptions,
) -> None:
    frontend = get_target(config)
    prefix = target_names.text_prefix(checkpoint.tensors, checkpoint.role)
    names = target_names.canonical_names(checkpoint.tensors, prefix, checkpoint.role)
    quantization = read_quantization(checkpoint)
    weights = ModuleWeights(
        module, checkpoint, quantization, names, (target_names.CANONICAL, prefix)
    )
    taps: tuple[int, ...] = ()
    if draft is not None:
        with weights.errors.step():
            draft.check_target(config)
            draft.check_tokens(checkpoint, config)
            taps = draft.taps(config)
    built = "language model is"
    left = dict(frontend.left_out)
    if isinstance(draft, Mtp):
        del left[MTP_BLOCK]
    owned: Sequence[str] = ()
    if (vision := _vision(frontend, weights, parse_components(options.components))) is not None:
        with weights.errors.step():
            check_layers(checkpoint, names, config.num_hidden_layers)
            vision.build_target(weights, config, taps, sizes.capacity)
            module.symbols["n"] = SymbolRange(1, options.prefill_chunk)
            module.metadata["vision"] = vision.build(weights, config, sizes.input_length)
        left = {part: globs for part, globs in left.items() if part != vision.part}
        built = f"language model and the {vision.part} are"
        owned = frontend.left_out[vision.part]
    else:
        with weights.errors.step():
            check_layers(checkpoint, names, config.num_hidden_layers)
            frontend.build(weights, config, taps, sizes.capacity)
    weights.errors.raise_found()
    ignorable = [*MTP_TENSORS, *(pattern for patterns in left.values() for pattern in patterns)]
    _note(module, weights, weights.quantization.findings, check_unread(weights, ignorable, owned))
    module.decisions.extend(left_out(weights, left, built))
    bias_findings(checkpoint, names, config)
    module.metadata["target"] = {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "num_tokens": sizes.num_tokens,
        "eos_token_ids": [*sorted(config.eos_token_ids)],
        "max_position_embeddings": config.max_position_embeddings,
    }


def _vision(
    frontend: TargetFrontend, weights: ModuleWeights, components: Components
) -> VisionFrontend | None:
    """How to build the vision tower, if it is wanted and there.

    Raises:
        InputError: It was asked for by name, and is not there.
    """
    vision = frontend.vision
    there = vision is not None and vision.has_tower(weights)
    if not there and components.named and components.vision:
        raise InputError(
            "vision/no-tower",
            "the target has no vision tower that edgecc builds: it reads text only",
            where=weights.checkpoint.role,
            help="take vision out of --components",
        )
    if there and not components.vision:
        weights.module.decisions.append("the bundle reads text only; images take --components all")
    elif not there and components.vision:
        weights.module.decisions.append("the target has no vision tower: it reads text only")
    return vision if there and components.vision else None


def _lift_draft(
    module: Module, draft: Draft, target: TextConfig | None, length: int, num_tokens: int
) -> None:
    weights = draft.open_weights(module)
    hidden = draft.target_hidden if target is None else target.hidden_size
    with weights.errors.step():
        draft.build(weights, DraftSize(hidden, num_tokens, length))
    weights.errors.raise_found()
    unread = check_unread(weights, draft.ignorable)
    _note(module, weights, draft.findings(weights), unread)
    bias_findings(weights.checkpoint, weights.names(), draft.text)
    taps = draft.taps(target)
    module.metadata["draft"] = draft.metadata(taps)
    if taps:
        module.decisions.append(f"draft reads {draft.reads(taps)}")
    if draft.text.max_position_embeddings < length:
        module.decisions.append(
            f"the draft was made for {draft.text.max_position_embeddings} positions: beyond, "
            "decoding goes on without it"
        )


def _model_len(config: TextConfig, options: LiftOptions) -> int:
    trained = config.max_position_embeddings
    length = options.max_model_len or min(DEFAULT_MODEL_LEN, trained)
    if length > trained:
        raise UsageError(
            "usage/max-model-len",
            f"--max-model-len {length} exceeds the {trained} positions the model was trained for",
            where=f"{config.where}: max_position_embeddings",
            help=f"choose at most {trained}",
        )
    if length < 2:
        raise UsageError("usage/max-model-len", f"--max-model-len {length} holds no prompt")
    return length


def _input_len(length: int, options: LiftOptions) -> int:
    wanted = options.max_input_len or min(DEFAULT_INPUT_LEN, length - 1)
    if wanted >= length:
        raise UsageError(
            "usage/max-input-len",
            f"--max-input-len {wanted} leaves no room for an answer in --max-model-len {length}",
            help=f"choose at most {length - 1}",
        )
    return wanted


def _symbols(module: Module, options: LiftOptions, draft: Draft | Ngram | None) -> None:
    most = options.prefill_chunk
    if draft is not None and most < draft.rows + 1:
        raise UsageError(
            "usage/prefill-chunk",
            f"a target call takes at most {most} rows (--prefill-chunk), a verification of this "
            f"draft has {draft.rows + 1}",
            where=draft.rows_from,
            help=f"compile with --prefill-chunk {draft.rows + 1} or more",
        )
    if not 1 <= options.max_batch_size <= MAX_BATCH_SIZE:
        raise UsageError(
            "usage/max-batch-size",
            f"--max-batch-size {options.max_batch_size} is not from 1 to {MAX_BATCH_SIZE}",
        )
    module.symbols["b"] = SymbolRange(1, options.max_batch_size)
    module.symbols["t"] = SymbolRange(1, most)
    module.symbols["r"] = SymbolRange(1, most)
    if isinstance(draft, Draft):
        module.symbols["c"] = SymbolRange(1, most)


def _note(
    module: Module, weights: ModuleWeights, findings: Sequence[Diagnostic], unused: str | None
) -> None:
    """Keep what was found out about a checkpoint while its graph was built."""
    weights.checkpoint.findings.extend(findings)
    owner, summary = weights.owner, weights.quantization.summary()
    module.decisions.append(f"{owner} weights as stored: {summary}")
    if (cache := weights.quantization.cache_decision()) is not None:
        module.decisions.append(f"{owner} KV cache: {cache}")
    if unused is not None:
        module.decisions.append(unused)
