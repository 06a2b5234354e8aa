"""Every way to break a small pair that a rule of the contract tells, with the id it is told by."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from helpers.broken_pairs import (
    BAD,
    FINE,
    PACKED,
    PLAIN,
    QUANT,
    UNSUPPORTED,
    Case,
    Q,
    added,
    all_of,
    bf16,
    bigger,
    config,
    eagle3,
    f32,
    file,
    header,
    index,
    language_model,
    only,
    plain_target,
    replaced,
    rows_less,
    stored,
    tokenizer,
    weights,
)
from helpers.checkpoints import DROP, write_draft, write_target
from helpers.command_line import SMALL, TAPS
from helpers.hybrid import FULL, LINEAR, HybridSizes, write_hybrid_target
from helpers.quantized_layouts import GPTQ
from helpers.vision import write_vision_target


def _vision(
    id: str,
    code: int,
    about: str,
    says: str,
    *,
    processor: Mapping[str, object] | None = None,
    file: str | None = "preprocessor_config.json",
    **vision: object,
) -> Case:
    """A target whose tower, or the processor of its images, is wrong in one place."""

    def write(path: Path) -> None:
        write_vision_target(path, vision=vision, processor=processor)
        if file is None:
            (path / "preprocessor_config.json").unlink()

    apply = replaced(write, "target")
    return Case(id, code, about, apply, says, alone=True, components="all")


FILES = [
    Case("checkpoint/not-found", BAD, "no folder", lambda t, d: shutil.rmtree(t)),
    Case(
        "checkpoint/not-a-folder",
        BAD,
        "a file for the folder",
        lambda t, d: (shutil.rmtree(d), d.write_text("x")),
    ),
    Case("checkpoint/no-config", BAD, "no config", file("draft", "config.json", None)),
    Case("checkpoint/no-weights", BAD, "no weights", file("target", "model.safetensors", None)),
    Case(
        "checkpoint/no-index",
        BAD,
        "a shard without index",
        weights("target", lambda p: p.rename(p.with_name("model-00001-of-00002.safetensors"))),
    ),
    Case(
        "checkpoint/pickle",
        UNSUPPORTED,
        "pickled weights",
        weights("target", lambda p: p.rename(p.with_name("pytorch_model.bin"))),
        "pytorch_model.bin",
    ),
    Case(
        "checkpoint/gguf",
        UNSUPPORTED,
        "GGUF",
        weights("target", lambda p: p.rename(p.with_name("model.gguf"))),
    ),
    Case(
        "checkpoint/not-safetensors",
        BAD,
        "a zip archive",
        file("target", "model.safetensors", b"PK\x03\x04" + bytes(60)),
        "zip archive",
    ),
    Case(
        "checkpoint/lfs-pointer",
        BAD,
        "a pointer",
        file("draft", "model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
    ),
    Case(
        "checkpoint/broken-link",
        BAD,
        "a broken link",
        lambda t, d: ((t / "config.json").unlink(), (t / "config.json").symlink_to("gone")),
    ),
    Case(
        "checkpoint/outside-link",
        BAD,
        "a path escape by a link",
        lambda t, d: ((t / "config.json").unlink(), (t / "config.json").symlink_to("/etc/passwd")),
        "/etc/passwd",
    ),
    Case(
        "checkpoint/not-a-file",
        BAD,
        "a folder for a file",
        lambda t, d: ((t / "config.json").unlink(), (t / "config.json").mkdir()),
    ),
    Case(
        "checkpoint/bad-header",
        BAD,
        "a length of zero",
        file("target", "model.safetensors", bytes(16)),
        "header length 0",
    ),
    Case(
        "checkpoint/bad-tensor",
        BAD,
        "an unknown dtype",
        file(
            "target",
            "model.safetensors",
            header({"x": {"dtype": "F7", "shape": [1], "data_offsets": [0, 1]}}, 1),
        ),
        "F7",
    ),
    Case(
        "checkpoint/truncated",
        BAD,
        "1 KiB cut off",
        weights("target", lambda p: os.truncate(p, p.stat().st_size - 1024)),
    ),
    Case("checkpoint/trailing-bytes", BAD, "a byte more", weights("draft", bigger)),
    Case(
        "checkpoint/bad-json",
        BAD,
        "a key twice",
        file("target", "config.json", b'{"a": 1, "a": 2}'),
        "'a' occurs twice",
    ),
    Case(
        "checkpoint/bad-index",
        BAD,
        "a path escape by the index",
        index("target", lambda c: c["weight_map"].update(x="../../x.safetensors")),
        "../../x.safetensors",
    ),
    Case(
        "checkpoint/missing-shard",
        BAD,
        "a shard is missing",
        index("target", lambda c: c["weight_map"].update(x="model-00002-of-00002.safetensors")),
        "model-00002-of-00002.safetensors",
    ),
    Case(
        "checkpoint/ambiguous",
        BAD,
        "a file and an index",
        all_of(
            index("target", lambda c: None),
            file("target", "model.safetensors", header({})),
        ),
    ),
    Case(
        "checkpoint/duplicate-tensor",
        BAD,
        "a tensor in two shards",
        all_of(
            index("target", lambda c: c["weight_map"].update(other="model-2.safetensors")),
            file(
                "target",
                "model-2.safetensors",
                header(
                    {
                        n: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
                        for i, n in enumerate(("other", "model.norm.weight"))
                    },
                    8,
                ),
            ),
        ),
        "model.norm.weight",
    ),
    Case(
        "checkpoint/unindexed-tensor",
        FINE,
        "a tensor the index leaves out",
        all_of(
            stored("draft", {"rotary_emb.inv_freq": f32(4)}),
            index("draft", lambda c: c["weight_map"].pop("rotary_emb.inv_freq")),
        ),
    ),
    Case(
        "checkpoint/shard-count",
        FINE,
        "shards of two exports",
        all_of(
            index("target", lambda c: c["weight_map"].update(x="model-00002-of-00002.safetensors")),
            file(
                "target",
                "model-00002-of-00002.safetensors",
                header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 4),
            ),
        ),
        "00001 and to 00002",
    ),
    Case(
        "checkpoint/total-size",
        FINE,
        "another total size",
        index("target", lambda c: c["metadata"].update(total_size=7)),
        "total_size is 7",
    ),
    Case(
        "checkpoint/unlisted-file",
        FINE,
        "a file that nothing lists",
        file("target", "model_mtp.safetensors", header({})),
        "model_mtp.safetensors",
    ),
]
CONFIGS = [
    Case("config/missing-key", BAD, "no rms_norm_eps", config("target", rms_norm_eps=DROP)),
    Case("config/bad-value", BAD, "hidden_size -1", config("draft", hidden_size=-1), "-1"),
    Case(
        "draft/config-conflict",
        BAD,
        "two mask tokens",
        config("draft", dflash_config={"mask_token_id": 3}),
        "mask_token_id",
    ),
    Case("config/head-dim", BAD, "another head_dim", config("target", head_dim=8), "head_dim is 8"),
    Case(
        "config/layer-type",
        UNSUPPORTED,
        "a new kind of layer",
        config("target", layer_types=["new_attention"]),
        "new_attention",
    ),
    Case(
        "rope/unsupported-type",
        UNSUPPORTED,
        "longrope",
        config("target", rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
        "longrope",
    ),
    Case(
        "rope/per-layer",
        UNSUPPORTED,
        "parameters by layer",
        config("target", rope_parameters={"full_attention": {"rope_theta": 1e4}}),
    ),
    Case("rope/default-theta", FINE, "no theta", config("draft", rope_parameters=DROP)),
    Case(
        "draft/rope-layout",
        UNSUPPORTED,
        "interleaved pairs",
        config("draft", rope_is_neox_style=False),
    ),
    Case("config/bias-flag", FINE, "a bias flag", config("target", attention_bias=True)),
    Case(
        "target/layer-type",
        UNSUPPORTED,
        "linear attention in an architecture without",
        config("target", layer_types=["linear_attention"]),
        "linear_attention",
    ),
    Case(
        "checkpoint/missing-bias",
        BAD,
        "a bias in one of two layers",
        all_of(
            replaced(lambda p: write_target(p, **{**SMALL, "layers": 2}, **PLAIN), "target"),
            stored("target", {f"{Q}.bias": bf16(32)}),
        ),
        "layers.1.self_attn.q_proj.bias",
        alone=True,
    ),
    Case(
        "target/architecture",
        UNSUPPORTED,
        "an unknown family",
        config("target", model_type="mamba9"),
        "mamba9",
    ),
    Case(
        "target/activation",
        UNSUPPORTED,
        "gelu",
        config("target", hidden_act="gelu_new"),
        "gelu_new",
    ),
]
TENSORS = [
    Case(
        "checkpoint/missing-layers",
        BAD,
        "a layer less",
        config("target", num_hidden_layers=2, layer_types=["full_attention"] * 2),
        "1",
    ),
    Case(
        "checkpoint/surplus-layers",
        BAD,
        "a layer more",
        stored("target", {"model.layers.1.input_layernorm.weight": bf16(32)}),
        "model.layers.1",
    ),
    Case(
        "checkpoint/missing-tensor",
        BAD,
        "no norm",
        stored("target", {"model.norm.weight": DROP}),
        "model.norm.weight",
    ),
    Case(
        "checkpoint/shape",
        BAD,
        "a norm of length zero",
        stored("target", {"model.norm.weight": f32(0)}),
        "[32]",
    ),
    Case(
        "checkpoint/unread-parameter",
        UNSUPPORTED,
        "a parameter of another architecture",
        stored("target", {"model.layers.0.self_attn.sinks": bf16(2)}),
        "sinks",
    ),
    Case(
        "target/duplicate-tensor",
        BAD,
        "two heads",
        stored("target", {"model.lm_head.weight": bf16(288, 32)}),
        "model.lm_head.weight",
    ),
    Case(
        "target/two-models",
        BAD,
        "two models",
        stored("target", {"model.language_model.embed_tokens.weight": bf16(288, 32)}),
    ),
    Case(
        "draft/duplicate-tensor",
        BAD,
        "two norms of the draft",
        stored("draft", {"model.norm.weight": bf16(32)}),
        "norm.weight",
    ),
    Case(
        "draft/fused-qkv",
        UNSUPPORTED,
        "fused projections",
        stored("draft", {"layers.0.self_attn.qkv_proj.weight": bf16(64, 32)}),
    ),
]
QUANTIZATION = [
    Case(
        "quant/unsupported-method",
        UNSUPPORTED,
        "HQQ by the config",
        config("target", quantization_config={"quant_method": "hqq", "bits": 4}),
        "hqq",
    ),
    Case(
        "quant/unsupported-method",
        UNSUPPORTED,
        "GPTQ with 3 bits",
        config("target", quantization_config={"quant_method": "gptq", "bits": 3, "group_size": 32}),
        "GPTQ with 3 bits",
    ),
    Case(
        "quant/unsupported-method",
        UNSUPPORTED,
        "an order of AWQ that is not read",
        config("target", quantization_config={"quant_method": "awq", "version": "gemv"}),
        "'gemv'",
    ),
    Case(
        "quant/unsupported-method",
        UNSUPPORTED,
        "bitsandbytes by the tensors",
        all_of(
            plain_target(), stored("target", {f"{Q}.weight.absmax": np.zeros((32, 16), np.uint8)})
        ),
        "bitsandbytes",
    ),
    Case(
        "quant/no-metadata",
        BAD,
        "compressed-tensors by the tensors",
        all_of(
            plain_target(), stored("target", {f"{Q}.weight_packed": np.zeros((32, 16), np.uint8)})
        ),
        "compressed-tensors",
    ),
    Case(
        "quant/not-compressed",
        BAD,
        "a model that was saved while it was calibrated",
        config(
            "target",
            quantization_config={
                "quant_method": "compressed-tensors",
                "quantization_status": "calibration",
            },
        ),
        "calibration",
    ),
    Case(
        "quant/bad-groups",
        BAD,
        "a column of a group that is not there",
        all_of(
            plain_target(),
            config("target", quantization_config=GPTQ),
            stored(
                "target",
                {
                    f"{Q}.weight": DROP,
                    f"{Q}.qweight": np.zeros((4, 32), np.int32),
                    f"{Q}.qzeros": np.zeros((1, 4), np.int32),
                    f"{Q}.scales": np.ones((1, 32), np.float16),
                    f"{Q}.g_idx": np.ones(32, np.int32),
                },
            ),
        ),
        "column 0 is of group 1",
    ),
    Case(
        "quant/metadata-disagrees",
        FINE,
        "two algorithms",
        config("target", quantization_config={**QUANT, "quant_algo": "FP8"}),
    ),
    Case(
        "quant/bad-pattern",
        BAD,
        "no regular expression",
        config("target", quantization_config={**QUANT, "ignore": ["re:("]}),
    ),
    Case(
        "quant/bad-pattern",
        BAD,
        "an expression that takes for ever",
        config("target", quantization_config={**QUANT, "ignore": [r"re:(.+)+\.Z$"]}),
        "a group with a choice or a repeat in it is repeated",
    ),
    Case(
        "quant/bad-dtype",
        BAD,
        "integers for a norm's matrix",
        all_of(plain_target(), stored("target", {f"{Q}.weight": np.zeros((32, 32), np.int16)})),
    ),
    Case(
        "quant/declared-not-stored",
        FINE,
        "declared, not stored",
        all_of(plain_target(), config("target", quantization_config=QUANT)),
    ),
    Case(
        "quant/stored-not-declared",
        FINE,
        "stored, not declared",
        all_of(
            config("target", quantization_config=DROP), file("target", "hf_quant_config.json", None)
        ),
    ),
    Case(
        "quant/stored-otherwise",
        FINE,
        "declared FP8, stored NVFP4",
        all_of(
            config("target", quantization_config={**QUANT, "quant_algo": "FP8"}),
            file("target", "hf_quant_config.json", None),
        ),
    ),
    Case(
        "quant/unused-pattern",
        FINE,
        "a pattern that names nothing",
        config("target", quantization_config={**QUANT, "ignore": ["re:.*no_such"]}),
        "re:.*no_such",
    ),
    Case(
        "quant/kv-cache",
        FINE,
        "a quantized cache",
        config("target", quantization_config={**QUANT, "kv_cache_scheme": "FP8"}),
        "FP8",
    ),
    Case(
        "quant/missing-scale",
        BAD,
        "no global scale",
        stored("target", {f"{Q}.weight_scale_2": DROP}),
        "weight_scale_2",
    ),
    Case(
        "quant/bad-scale",
        BAD,
        "a global scale of zero",
        stored("target", {f"{Q}.weight_scale_2": np.array(0, np.float32)}),
        "0.0",
    ),
    Case(
        "quant/bad-scale",
        BAD,
        "a global scale of shape [2]",
        stored("target", {f"{Q}.weight_scale_2": f32(2) + 1}),
        "[2]",
    ),
    Case(
        "quant/bad-scale",
        BAD,
        "a NaN for a global scale",
        stored("target", {f"{Q}.weight_scale_2": np.array(np.nan, np.float32)}),
        "nan",
    ),
    Case(
        "quant/stray-scale",
        BAD,
        "a scale beside a plain weight",
        all_of(plain_target(), stored("target", {f"{Q}.weight_scale": f32(1)})),
    ),
    Case(
        "quant/two-weights",
        BAD,
        "a packed weight beside a plain one",
        all_of(
            plain_target(),
            config("target", quantization_config=GPTQ),
            stored("target", {f"{Q}.qweight": np.zeros((4, 32), np.int32)}),
        ),
        f"{Q}.qweight is there as well",
    ),
    Case(
        "quant/bad-shape",
        BAD,
        "a row less",
        stored("target", {"model.embed_tokens.weight": rows_less}),
        "[287, 32]",
    ),
    Case(
        "quant/partial-block",
        UNSUPPORTED,
        "a row of 24 in blocks of 16",
        all_of(
            replaced(lambda p: write_target(p, **{**SMALL, "hidden": 24}, **PLAIN), "target"),
            stored(
                "target",
                {
                    f"{Q}.weight": np.zeros((32, 12), np.uint8),
                    f"{Q}.weight_scale": np.ones((32, 2), ml_dtypes.float8_e4m3fn),
                    f"{Q}.weight_scale_2": np.array(1, np.float32),
                },
            ),
        ),
        "24 columns",
        alone=True,
    ),
    Case(
        "quant/group-size",
        FINE,
        "a block size of 32",
        config("target", quantization_config={**QUANT, "group_size": 32}),
        "group_size is 32",
    ),
]
HEADS = [
    Case(
        "bind/no-lm-head",
        BAD,
        "no head",
        stored("target", {f"lm_head.{part}": DROP for part in PACKED}),
        "tie_word_embeddings",
    ),
    Case(
        "bind/hidden-mismatch",
        BAD,
        "another hidden size",
        replaced(
            lambda p: write_draft(p, **{**SMALL, "hidden": 16}, **TAPS, target_hidden=32), "draft"
        ),
        "16",
    ),
    Case(
        "bind/vocab-mismatch",
        BAD,
        "another vocabulary",
        replaced(lambda p: write_draft(p, **SMALL, **TAPS, vocab=272, mask_token_id=271), "draft"),
        "272",
    ),
    Case(
        "draft/needs-target",
        BAD,
        "a draft for a target",
        lambda t, d: (shutil.rmtree(t), shutil.copytree(d, t)),
        "--draft",
        alone=True,
    ),
    Case("draft/ships", BAD, "a head is promised", config("draft", has_lm_head=True), "lm_head"),
    Case(
        "target/tied-heads-stored",
        FINE,
        "tied, and a head is stored",
        plain_target(tie_word_embeddings=True),
    ),
    Case(
        "head/rotated",
        UNSUPPORTED,
        "a rotation is marked",
        config("target", quantization_config={**QUANT, "rotation": "hadamard"}),
        "rotation",
    ),
]
DRAFTS = [
    Case(
        "draft/unknown",
        BAD,
        "tensors of no draft",
        replaced(lambda p: (p.mkdir(), only(p, {"x.weight": bf16(2, 2)}))),
    ),
    Case(
        "draft/kind",
        UNSUPPORTED,
        "a projector edgecc does not know",
        config("draft", dflash_config={"projector_type": "domino"}),
        "domino",
    ),
    Case(
        "draft/markov-missing",
        BAD,
        "a rank without tensors",
        stored("draft", {f"markov_head.markov_w{i}.weight": DROP for i in (1, 2)}),
        "8",
    ),
    Case("draft/layers", UNSUPPORTED, "EAGLE3 with two layers", eagle3(num_hidden_layers=2)),
    Case(
        "draft/recurrent",
        UNSUPPORTED,
        "a hybrid as a draft",
        replaced(lambda p: write_hybrid_target(p, HybridSizes(layer_types=(LINEAR, FULL)))),
        "qwen3_5_text",
    ),
    Case(
        "draft/tokenizer",
        BAD,
        "two tokens change places",
        language_model(lambda vocab: {**vocab, "a": vocab["b"], "b": vocab["a"]}),
        "2 of 259 ids",
    ),
    Case(
        "draft/tokenizer-unknown",
        FINE,
        "a draft without a tokenizer",
        all_of(language_model(), file("draft", "tokenizer.json", None)),
        "no draft/tokenizer.json",
    ),
    Case(
        "draft/tokens-differ",
        FINE,
        "a token that the draft lacks",
        language_model(lambda vocab: {t: i for t, i in vocab.items() if t != "a"}),
        "1 tokens are unknown to the draft",
    ),
    Case(
        "draft/activation",
        UNSUPPORTED,
        "gelu in the draft",
        config("draft", hidden_act="gelu"),
        "gelu",
    ),
    Case("draft/sliding-window", UNSUPPORTED, "a window", config("draft", use_swa=True)),
    Case("draft/attention", UNSUPPORTED, "a causal block", config("draft", is_causal=True)),
    Case(
        "draft/logit-scale",
        UNSUPPORTED,
        "capped logits",
        config("draft", final_logit_softcapping=30.0),
    ),
    Case(
        "draft/tapped-layers",
        BAD,
        "a layer that does not exist",
        config("draft", target_layer_ids=[7]),
        "[7]",
    ),
    Case("draft/tapped-layers", BAD, "a null list", config("draft", target_layer_ids=None)),
    Case("draft/tapped-layers", BAD, "a repeated layer", config("draft", target_layer_ids=[0, 0])),
    Case("draft/target-layers", BAD, "another depth", config("draft", num_target_layers=64), "64"),
    Case(
        "draft/target-hidden",
        BAD,
        "another width of the target",
        eagle3(target_hidden=48, target_hidden_size=48),
        "48",
    ),
    Case("draft/target-family", FINE, "another family", eagle3(target_model_type="llama")),
    Case(
        "draft/fc-width",
        BAD,
        "a narrow fc",
        stored("draft", {"fc.weight": bf16(32, 16)}),
        "16 columns",
    ),
    Case("draft/last-layer", FINE, "the last layer is tapped", lambda t, d: None, "layer 0"),
    Case(
        "draft/slot-layout",
        BAD,
        "keys about the anchor's slot that contradict each other",
        config("draft", sample_from_anchor=False, shift_label=True),
        "shift_label",
    ),
    Case(
        "draft/mask-token",
        BAD,
        "a mask beyond the table",
        config("draft", mask_token_id=288),
        "288",
    ),
    Case(
        "draft/mask-embedding",
        UNSUPPORTED,
        "a mask embedding",
        stored("draft", {"mask_embedding": bf16(32)}),
    ),
    Case("draft/markov-rank", BAD, "another rank", config("draft", markov_rank=16), "16"),
    Case(
        "draft/markov-type",
        BAD,
        "a Markov head without the tensors of its type",
        config("draft", markov_head_type="rnn"),
        "joint_proj",
    ),
    Case(
        "draft/markov-type",
        UNSUPPORTED,
        "an unknown Markov head",
        config("draft", markov_head_type="lstm"),
        "lstm",
    ),
    Case(
        "draft/confidence-flag",
        FINE,
        "no confidence head is declared",
        config("draft", enable_confidence_head=False),
    ),
    Case(
        "draft/confidence-width",
        FINE,
        "the confidence head reads less than declared",
        all_of(
            stored("draft", {"confidence_head.proj.weight": bf16(1, 32)}),
            config("draft", confidence_head_with_markov=True),
        ),
        "32 columns",
    ),
    Case(
        "draft/positions",
        FINE,
        "a short draft",
        config("draft", max_position_embeddings=48),
        "48",
    ),
]
VOCABULARIES = [
    Case(
        "draft/no-vocabulary-map",
        BAD,
        "a reduced head without d2t",
        all_of(eagle3(), stored("draft", {"d2t": DROP, "t2d": DROP})),
        "d2t",
    ),
    Case(
        "draft/vocabulary-map",
        BAD,
        "a distance out of range",
        all_of(eagle3(), stored("draft", {"d2t": lambda a: a + 10_000})),
        "d2t",
    ),
    Case(
        "draft/vocabulary-size",
        BAD,
        "another size in the config",
        all_of(eagle3(), config("draft", draft_vocab_size=50)),
        "50",
    ),
    Case(
        "draft/zero-map",
        FINE,
        "a map of zeros",
        all_of(eagle3(marks=False), stored("draft", {"d2t": np.zeros_like})),
    ),
    Case(
        "tokenizer/bad-id",
        BAD,
        "an id that is none",
        tokenizer(lambda t: t["model"]["vocab"].update(x=-1)),
        "-1",
    ),
    Case(
        "tokenizer/tokens-without-row",
        FINE,
        "a token beyond the table",
        tokenizer(added(300, "<far>")),
        "<far>",
    ),
    Case(
        "tokenizer/added-without-row",
        FINE,
        "an added token beyond the table",
        file("target", "added_tokens.json", b'{"<x>": 400}'),
        "400",
    ),
    Case(
        "tokenizer/two-ids",
        FINE,
        "a text with two ids",
        tokenizer(lambda t: (added(270, "<x>")(t), added(271, "<x>")(t))),
        "<x>",
    ),
    Case("tokenizer/stop-tokens", FINE, "two lists of stop tokens", lambda t, d: None, "eos"),
    Case(
        "tokenizer/pair-differs", FINE, "another stop token", config("draft", eos_token_id=5), "[5]"
    ),
]

VISION = [
    _vision("vision/activation", UNSUPPORTED, "relu in the tower", "relu", hidden_act="relu"),
    _vision("vision/deepstack", UNSUPPORTED, "inner layers", "[1]", deepstack_visual_indexes=[1]),
    _vision("vision/no-processor", BAD, "no processor", "preprocessor_config.json", file=None),
    _vision(
        "vision/processor",
        UNSUPPORTED,
        "images are not resized",
        "do_resize",
        processor={"do_resize": False},
    ),
    _vision("vision/resample", UNSUPPORTED, "linear", "2", processor={"resample": 2}),
    _vision(
        "vision/too-small",
        BAD,
        "images larger than a prompt",
        "image",
        processor={"size": {"shortest_edge": 2**30, "longest_edge": 2**30}},
    ),
    _vision("config/bad-value", BAD, "another width", "out_hidden_size", out_hidden_size=24),
    _vision("config/bad-value", BAD, "blocks that are not stored", "depth is 2", depth=2**31 - 1),
    _vision(
        "config/bad-value",
        BAD,
        "a grid that is none",
        "num_position_embeddings",
        num_position_embeddings=24,
    ),
    Case(
        "vision/no-tower",
        BAD,
        "a tower that is not there",
        lambda t, d: None,
        alone=True,
        components="target,vision",
    ),
]

CASES: tuple[Case, ...] = (
    *FILES,
    *CONFIGS,
    *TENSORS,
    *QUANTIZATION,
    *HEADS,
    *DRAFTS,
    *VOCABULARIES,
    *VISION,
)
