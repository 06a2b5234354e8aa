"""Lift checkpoints into one module: the target's graph, the draft's graph, one weight table."""

from __future__ import annotations

from pathlib import Path

from edgecc.errors import InputError, UsageError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.config import TextConfig, read_text_config
from edgecc.frontends.drafts import detect_draft, dspark, is_draft
from edgecc.frontends.drafts.dspark_config import DSparkConfig, read_dspark_config
from edgecc.frontends.drafts.names import canonical_names
from edgecc.frontends.inventory import bias_findings, check_layers, check_unread, left_out
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.frontends.options import DEFAULT_INPUT_LEN, DEFAULT_MODEL_LEN, LiftOptions
from edgecc.frontends.quantization import read_quantization
from edgecc.frontends.targets import get_target
from edgecc.frontends.targets import names as target_names
from edgecc.frontends.vocabulary import count_tokens
from edgecc.ir.core import Module
from edgecc.ir.types import SymbolRange


def lift(
    target: str | Path | None,
    draft: str | Path | None = None,
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
    target_ckpt = Checkpoint.open(target, role="target") if target is not None else None
    draft_ckpt = Checkpoint.open(draft, role="draft") if draft is not None else None
    if target_ckpt is not None and is_draft(target_ckpt):
        raise InputError(
            "draft/needs-target",
            f"{target_ckpt.path.name} is a draft: it has no head or embedding of its own",
            where="target/config.json",
            help="this draft needs a target: edgecc compile TARGET --draft DRAFT",
        )
    name = "+".join(c.path.resolve().name for c in (target_ckpt, draft_ckpt) if c is not None)
    module = Module(name)
    module.checkpoints.update(
        {c.role: str(c.path) for c in (target_ckpt, draft_ckpt) if c is not None}
    )
    target_config = read_text_config(target_ckpt) if target_ckpt is not None else None
    if target_config is not None:
        get_target(target_config)
    draft_config = None
    if draft_ckpt is not None:
        detect_draft(draft_ckpt)
        draft_config = read_dspark_config(draft_ckpt)
    base = target_config or (draft_config.text if draft_config else None)
    assert base is not None
    length = _model_len(base, options)
    _symbols(module, options, draft_config)
    num_tokens = count_tokens(target_ckpt, base) if target_ckpt else base.vocab_size
    if target_ckpt is not None and target_config is not None:
        _lift_target(module, target_ckpt, target_config, draft_config, length, num_tokens)
    if draft_ckpt is not None and draft_config is not None:
        _lift_draft(module, draft_ckpt, draft_config, base, options, length, num_tokens)
    module.metadata["limits"] = {
        "max_model_len": length,
        "max_input_len": _input_len(length, options),
        "prefill_chunk": options.prefill_chunk,
        "max_batch_size": 1,
    }
    return module


def _lift_target(
    module: Module,
    checkpoint: Checkpoint,
    config: TextConfig,
    draft: DSparkConfig | None,
    length: int,
    num_tokens: int,
) -> None:
    frontend = get_target(config)
    prefix = target_names.text_prefix(checkpoint.tensors, checkpoint.role)
    names = target_names.canonical_names(checkpoint.tensors, prefix, checkpoint.role)
    quantization = read_quantization(checkpoint)
    weights = ModuleWeights(
        module, checkpoint, quantization, names, (target_names.CANONICAL, prefix)
    )
    taps = draft.target_layer_ids if draft is not None else ()
    if draft is not None:
        _check_taps(draft, config)
    check_layers(checkpoint, names, config.num_hidden_layers)
    # One row more than the runtime may use: engines pad single-row calls.
    frontend.build(weights, config, taps, length + 1)
    ignorable = [pattern for patterns in frontend.left_out.values() for pattern in patterns]
    _note(module, weights, check_unread(weights, ignorable))
    module.decisions.extend(left_out(weights, frontend.left_out))
    bias_findings(checkpoint, names, config)
    module.metadata["target"] = {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "num_tokens": num_tokens,
        "eos_token_ids": [*sorted(config.eos_token_ids)],
        "max_position_embeddings": config.max_position_embeddings,
    }


def _lift_draft(
    module: Module,
    checkpoint: Checkpoint,
    config: DSparkConfig,
    target: TextConfig,
    options: LiftOptions,
    length: int,
    num_tokens: int,
) -> None:
    steps = options.num_speculative_tokens or config.block_size
    if not 1 <= steps <= config.block_size:
        raise UsageError(
            "usage/speculative-tokens",
            f"{steps} speculative tokens asked for, the draft's block proposes at most "
            f"{config.block_size}",
            where="draft/config.json: block_size",
            help=f"choose 1..{config.block_size}: beyond the block every proposal gets worse",
        )
    _check_vocabulary(config, target)
    names = canonical_names(checkpoint.tensors)
    check_layers(checkpoint, names, config.text.num_hidden_layers)
    quantization = read_quantization(checkpoint)
    weights = ModuleWeights(module, checkpoint, quantization, names)
    dspark.build(
        weights,
        config,
        target_hidden=target.hidden_size,
        num_tokens=num_tokens,
        steps=steps,
        capacity=length + config.block_size,
    )
    _note(module, weights, check_unread(weights, dspark.IGNORABLE))
    bias_findings(checkpoint, names, config.text)
    module.metadata["draft"] = {
        "method": "dspark",
        "block_size": config.block_size,
        "num_speculative_tokens": steps,
        "slot_layout": "anchor-predicts",
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "max_position_embeddings": config.text.max_position_embeddings,
    }
    module.decisions.append(
        f"draft reads the outputs of target layers {list(config.target_layer_ids)} (from 0; "
        f"read from {config.numbering})"
    )
    if config.text.max_position_embeddings < length:
        module.decisions.append(
            f"the draft was made for {config.text.max_position_embeddings} positions: beyond, "
            "decoding goes on without it"
        )


def _check_vocabulary(draft: DSparkConfig, target: TextConfig) -> None:
    """Anchors are target ids and proposals are draft ids: both index tables of the other."""
    if draft.text.vocab_size != target.vocab_size:
        raise InputError(
            "bind/vocab-mismatch",
            f"the draft's vocabulary has {draft.text.vocab_size} rows, the target's "
            f"{target.vocab_size}",
            where=f"{draft.text.where}: vocab_size",
            help="use the target this draft was trained for",
        )
    if draft.mask_token_id >= target.vocab_size:
        raise InputError(
            "draft/mask-token",
            f"mask_token_id {draft.mask_token_id} has no row in an embedding of "
            f"{target.vocab_size} rows",
            where="draft/config.json: mask_token_id",
            help="use the target this draft was trained for",
        )


def _check_taps(draft: DSparkConfig, target: TextConfig) -> None:
    if draft.target_layer_ids[-1] >= target.num_hidden_layers:
        raise InputError(
            "draft/tapped-layers",
            f"the draft reads layers {list(draft.target_layer_ids)} (outputs, from 0), the target "
            f"has {target.num_hidden_layers} layers",
            where="draft/config.json: target_layer_ids",
            help="use the target this draft was trained for",
        )
    if draft.num_target_layers not in (None, target.num_hidden_layers):
        raise InputError(
            "draft/target-layers",
            f"the draft was trained for a target of {draft.num_target_layers} layers, this one has "
            f"{target.num_hidden_layers}",
            where="draft/config.json: num_target_layers",
            help="use the target this draft was trained for",
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


def _symbols(module: Module, options: LiftOptions, draft: DSparkConfig | None) -> None:
    most = options.prefill_chunk
    block = draft.block_size if draft is not None else 0
    if most < block + 1:
        raise UsageError(
            "usage/prefill-chunk",
            f"a target call takes at most {most} rows (prefill_chunk), a verification of the "
            f"draft's block has {block + 1}",
            where="draft/config.json: block_size",
            help=f"compile with a prefill_chunk of at least {block + 1}",
        )
    module.symbols["b"] = SymbolRange(1, 1)
    module.symbols["t"] = SymbolRange(1, most)
    module.symbols["r"] = SymbolRange(1, most)
    if draft is not None:
        module.symbols["c"] = SymbolRange(1, most)


def _note(module: Module, weights: ModuleWeights, unused: str | None) -> None:
    """Keep what was found out about a checkpoint while its graph was built."""
    weights.checkpoint.findings.extend(weights.quantization.findings)
    role, summary = weights.checkpoint.role, weights.quantization.summary()
    module.decisions.append(f"{role} weights as stored: {summary}")
    if (cache := weights.quantization.cache_decision()) is not None:
        module.decisions.append(f"{role} KV cache: {cache}")
    if unused is not None:
        module.decisions.append(unused)
