from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import InputError, Severity, UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.lift import lift
from edgecc.frontends.quantization import (
    EncodedWeight,
    Quantization,
    check_scales,
    read_quantization,
)
from edgecc.frontends.quantization.ranges import ScaleRange
from edgecc.ir.encodings import FP8, NVFP4, Dense
from edgecc.ir.types import DType
from edgecc.ir.weights import Stored, StoredPart, TensorReader, Weight, WeightTable
from edgecc.roles import Role
from helpers.checkpoints import (
    DROP,
    Tensors,
    edit_json,
    edit_tensors,
    hf_quant_config,
    nvfp4,
    quantization_config,
    write_draft,
    write_target,
)

PAIRS = Path(__file__).parents[1] / "data" / "pairs"
E4M3 = ml_dtypes.float8_e4m3fn
HEAD = (288, 64)
Q_PROJ = "model.layers.0.self_attn.q_proj"


def quantization(path: Path, role: str = "target") -> Quantization:
    return read_quantization(Checkpoint.open(path, role=role))


def ids(found: Quantization) -> list[str]:
    return [finding.id for finding in found.findings]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "t", layers=1, tokenizer=False)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return write_target(tmp_path / "t", layers=1, tokenizer=False, quantized=False)


# Goldens: outputs of ModelOpt 0.47 itself

INPUT_A = np.array(
    [[0, 0.25, -0.25, 0.5, -0.75, 1, -1.25, 1.5, -1.75, 2, -2.5, 3, -3.5, 4, -5, 6], [0] * 16],
    np.float32,
)
_I = np.arange(32)
INPUT_B = np.stack([((37 * _I + 11) % 97 - 48) / 64, ((53 * _I + 5) % 89 - 44) / 1024]).astype(
    np.float32
)
GOLDENS: dict[str, tuple[np.ndarray[Any, Any], str, str, str, list[str]]] = {
    "6.1": (
        INPUT_A,
        "00182a3a4c5c6e7e" + "00" * 8,
        "7e38",
        "3b124925",
        [
            "00000000 00000000 80000000 3f000000 bf800000 3f800000 bf800000 3fc00000"
            " c0000000 40000000 c0000000 40400000 c0800000 40800000 c0800000 40c00000",
            " ".join(["00000000"] * 16),
        ],
    ),
    "6.2": (
        INPUT_B,
        "0ed6f46a1ec7f4693db7e5604dafe6724f6df9d3a63f6e7ae2b5275e7ce1c517",
        "7e7e5d5d",
        "398f3cf4",
        [
            "befaaaab 00000000 3efaaaab bebc0000 3e7aaaab bf3c0000 bdfaaaab 3efaaaab"
            " befaaaab 3d7aaaab 3f3c0000 be7aaaab 3e7aaaab bf3c0000 bd7aaaab 3efaaaab"
            " bebc0000 3e3c0000 3f3c0000 be3c0000 3ebc0000 befaaaab 00000000 3efaaaab"
            " bebc0000 3e7aaaab bf3c0000 bdfaaaab 3efaaaab befaaaab 3dfaaaab 3f3c0000",
            "bd2e9249 3c68c30c bcae9249 3ce8c30c bb68c30c bd2e9249 3c2e9249 bcae9249"
            " 3ce8c30c bbe8c30c bd2e9249 3c2e9249 bce8c30c 3ce8c30c bbe8c30c 3d2e9249"
            " 3be8c30c bce8c30c 3cae9249 bc2e9249 3d2e9249 3be8c30c bce8c30c 3cae9249"
            " bc68c30c 3d2e9249 3b68c30c bce8c30c 3cae9249 bc68c30c 3d2e9249 3b68c30c",
        ],
    ),
}


@pytest.mark.parametrize("case", GOLDENS)
def test_dequantization_of_the_goldens(dense: Path, case: str) -> None:
    values, packed, scales, scale_2, rows = GOLDENS[case]
    n, k = values.shape

    def add(tensors: Tensors) -> None:
        tensors["x.weight"] = np.frombuffer(bytes.fromhex(packed), np.uint8).reshape(n, k // 2)
        tensors["x.weight_scale"] = np.frombuffer(bytes.fromhex(scales), E4M3).reshape(n, k // 16)
        tensors["x.weight_scale_2"] = np.frombuffer(bytes.fromhex(scale_2), ">f4").astype("<f4")[
            0:1
        ]

    found = quantization(edit_tensors(dense, add))
    weight = found.weight("x", (n, k))
    assert weight.encoding == NVFP4()
    parts = {c: found.checkpoint.read(key) for c, key in weight.parts.items()}
    parts["weight_scale_2"] = parts["weight_scale_2"].reshape(())
    got = weight.encoding.dequantize(parts)
    # A code of minus zero reads as -0 or +0, which is the producer's free choice.
    expected = np.array([[int(word, 16) for word in row.split()] for row in rows], np.uint32)
    assert (got + np.float32(0)).tobytes() == (expected.view(np.float32) + np.float32(0)).tobytes()


@pytest.mark.parametrize("case", GOLDENS)
def test_the_quantizer_of_the_helpers_matches_the_goldens(case: str) -> None:
    values, packed, scales, scale_2, _ = GOLDENS[case]
    stored = nvfp4("x", values)
    assert stored["x.weight"].tobytes().hex() == packed
    assert stored["x.weight_scale"].tobytes().hex() == scales
    assert stored["x.weight_scale_2"].astype(">f4").tobytes().hex() == scale_2


# Decisions


def test_a_quantized_target(target: Path) -> None:
    found = quantization(target)
    head = found.weight("lm_head", HEAD)
    assert head == EncodedWeight(
        NVFP4(input_scale=True),
        {
            "weight": "lm_head.weight",
            "weight_scale": "lm_head.weight_scale",
            "weight_scale_2": "lm_head.weight_scale_2",
            "input_scale": "lm_head.input_scale",
        },
        "lm_head",
        HEAD,
    )
    embedding = found.weight("model.embed_tokens", HEAD)
    assert embedding.encoding == Dense(DType.BF16)
    assert found.weight("model.norm", (64,)).parts == {"weight": "model.norm.weight"}
    assert found.findings == []
    assert found.summary() == "bf16 x 2, nvfp4 x 1"


def test_the_committed_pair() -> None:
    target = quantization(PAIRS / "tiny-qwen3-nvfp4")
    draft = quantization(PAIRS / "tiny-qwen3-dspark", role="draft")
    assert target.weight("lm_head", (4096, 256)).encoding == NVFP4(input_scale=True)
    assert target.weight("model.layers.7.mlp.down_proj", (256, 768)).encoding.kind == "nvfp4"
    check_scales(target.checkpoint, target.weight("lm_head", (4096, 256)))
    # The draft's precision comes from its own files only.
    assert draft.declaration is None
    assert draft.weight("fc", (256, 768)).encoding == Dense(DType.BF16)
    assert target.findings == draft.findings == []


def test_consumed_and_unused_tensors(target: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(16, np.float32)
        tensors["mtp.norm.weight"] = np.zeros(64, np.float32)

    found = quantization(edit_tensors(target, add))
    found.weight("lm_head", HEAD)
    found.tensor("model.norm.weight", (64,))
    assert found.consumed == {
        "lm_head.weight",
        "lm_head.weight_scale",
        "lm_head.weight_scale_2",
        "lm_head.input_scale",
        "model.norm.weight",
    }
    left = found.unused(["*.rotary_emb.inv_freq", "model.layers.0.self_attn.?_proj.*"])
    assert "mtp.norm.weight" in left
    assert left == sorted(left)
    assert not any("rotary" in name or ("_proj.weight" in name and "attn" in name) for name in left)
    assert found.unused(["*"]) == []


def test_asking_twice_counts_once(target: Path) -> None:
    found = quantization(target)
    assert found.weight("lm_head", HEAD) == found.weight("lm_head", HEAD)
    assert found.summary() == "nvfp4 x 1"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
def test_dense_dtypes(dense: Path, dtype: type[Any]) -> None:
    edit_tensors(dense, lambda t: t | {"x.weight": np.ones((3, 5), dtype)})
    encoding = quantization(dense).weight("x", (3, 5)).encoding
    assert isinstance(encoding, Dense)
    assert encoding.dtype.numpy == np.dtype(dtype)


def test_weight_only_exports_leave_a_stored_input_scale_out(target: Path) -> None:
    for name in ("config.json", "hf_quant_config.json"):
        text = (target / name).read_text().replace('"NVFP4"', '"W4A16_NVFP4"')
        (target / name).write_text(text)
    # a weight-only export may hold an uncalibrated value there
    edit_tensors(target, lambda t: t | {"lm_head.input_scale": np.array(0, np.float32)})
    found = quantization(target)
    assert found.weight("lm_head", HEAD).encoding == NVFP4()
    assert "lm_head.input_scale" in found.consumed


def test_no_input_scale_stored(target: Path) -> None:
    edit_tensors(target, lambda t: {k: v for k, v in t.items() if "input_scale" not in k})
    assert quantization(target).weight("lm_head", HEAD).encoding == NVFP4()


@pytest.mark.parametrize("shape", [(), (1,)])
def test_weights_read_through_the_weight_table(target: Path, shape: tuple[int, ...]) -> None:
    edit_tensors(target, lambda t: t | {"lm_head.weight_scale_2": np.full(shape, 0.5, np.float32)})
    found = quantization(target)
    head = found.weight("lm_head", HEAD)
    table = WeightTable()
    reader: TensorReader = found.checkpoint
    table.readers["target"] = reader
    parts = tuple(StoredPart(c, "model.safetensors", key) for c, key in head.parts.items())
    table.add("lm_head", Weight(HEAD, head.encoding, Stored("target", parts)))
    rows = head.encoding.dequantize(table.read("lm_head", 10, 20))
    whole = head.encoding.dequantize(table.read("lm_head"))
    assert rows.tobytes() == whole[10:20].tobytes()


@pytest.mark.parametrize("shape", [(), (1,)])
def test_scalars_may_be_vectors_of_one(target: Path, shape: tuple[int, ...]) -> None:
    edit_tensors(target, lambda t: t | {"lm_head.weight_scale_2": np.full(shape, 0.5, np.float32)})
    assert quantization(target).weight("lm_head", HEAD).encoding.kind == "nvfp4"


# What the metadata says


DIALECTS: dict[str, dict[str, object]] = {
    "plain": {"ignore": ["lm_head", "model.embed_tokens"]},
    "glob": {"ignore": ["*lm_head*"]},
    "regex": {"ignore": ["re:.*lm_head"]},
    "wrapped": {"ignore": ["model.lm_head"]},
    "exclude_modules": {"ignore": DROP, "exclude_modules": ["lm_head"]},
    "ignore with star": {"ignore": ["lm_head*"]},
    "multimodal": {"ignore": ["model.language_model.lm_head", "language_model.model.lm_head"]},
}


@pytest.mark.parametrize("stored_head", [True, False], ids=["packed", "dense"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_exclude_patterns_of_every_dialect_decide_the_same(
    tmp_path: Path, dialect: str, stored_head: bool
) -> None:
    path = write_target(tmp_path / "t", layers=1, tokenizer=False, quantized_head=stored_head)
    (path / "hf_quant_config.json").unlink()
    block = {**quantization_config([]), **DIALECTS[dialect]}
    edit_json(
        path / "config.json",
        quantization_config={k: v for k, v in block.items() if v is not DROP},
    )
    found = quantization(path)
    assert found.weight("lm_head", HEAD).encoding.kind == ("nvfp4" if stored_head else "dense")
    assert found.weight(Q_PROJ, (128, 64)).encoding.kind == "nvfp4"
    assert ids(found) == (["quant/stored-not-declared"] if stored_head else [])


def test_patterns_name_modules_their_children_and_globs(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t", layers=2, tokenizer=False, quantized=False)
    patterns = [
        "layers.0.self_attn",
        "model.layers.1.mlp*",
        "*.o_proj",
        "re:model\\.layers\\.1\\.self",
        "lm_head",
    ]
    edit_json(path / "config.json", quantization_config=quantization_config(patterns))
    found = quantization(path)
    shapes = {"q": (128, 64), "k": (64, 64), "v": (64, 64), "o": (64, 128)}
    for layer in range(2):
        for name, shape in shapes.items():
            found.weight(f"model.layers.{layer}.self_attn.{name}_proj", shape)
        found.weight(f"model.layers.{layer}.mlp.up_proj", (128, 64))
    found.weight("lm_head", HEAD)
    findings = found.findings
    assert [f.id for f in findings] == ["quant/declared-not-stored"]
    assert findings[0].notes == ("model.layers.0.mlp.up_proj",)
    assert findings[0].severity is Severity.WARNING


def test_unused_patterns_are_listed(target: Path) -> None:
    patterns = ["mtp*", "model.visual.*", "re:vision.*", "lm_hea", "model.embed_tokens"]
    edit_json(target / "config.json", quantization_config=quantization_config(patterns))
    (finding,) = quantization(target).findings
    assert finding.id == "quant/unused-pattern"
    assert finding.notes == tuple(patterns[:4])
    assert finding.severity is Severity.NOTE


def test_declared_quantized_but_stored_dense(dense: Path) -> None:
    edit_json(dense / "config.json", quantization_config=quantization_config([]))
    found = quantization(dense)
    found.weight("lm_head", HEAD)
    found.weight("model.embed_tokens", HEAD)  # never meant by the metadata
    found.weight("model.norm", (64,))
    (finding,) = found.findings
    assert finding.id == "quant/declared-not-stored"
    assert finding.notes == ("lm_head",)


def test_stored_packed_but_not_declared(target: Path) -> None:
    edit_json(target / "config.json", quantization_config=DROP)
    (target / "hf_quant_config.json").unlink()
    found = quantization(target)
    assert found.weight("lm_head", HEAD).encoding.kind == "nvfp4"
    (finding,) = found.findings
    assert finding.id == "quant/stored-not-declared"
    assert finding.notes == ("lm_head",)


def test_metadata_in_the_side_file_only(target: Path) -> None:
    edit_json(target / "config.json", quantization_config=DROP)
    found = quantization(target)
    found.weight("lm_head", HEAD)
    assert found.declaration is not None
    assert found.declaration.default is not None
    assert found.declaration.default.name == "NVFP4"
    assert found.findings == []


def test_metadata_inside_the_text_config(target: Path) -> None:
    text = {"quantization_config": {"quant_method": "hqq"}}
    edit_json(target / "config.json", quantization_config={}, text_config=text)
    with pytest.raises(UnsupportedError, match="hqq") as caught:
        quantization(target)
    assert "text_config.quantization_config" in caught.value.diagnostics[0].where


def test_an_empty_block_declares_nothing(dense: Path) -> None:
    edit_json(dense / "config.json", quantization_config={})
    assert quantization(dense).declaration is None


@pytest.mark.parametrize("method", ["modelopt", "modelopt_fp4", "ModelOpt", DROP])
def test_spellings_of_the_method(target: Path, method: object) -> None:
    block = {**quantization_config(["model.embed_tokens"]), "quant_method": method}
    edit_json(
        target / "config.json",
        quantization_config={k: v for k, v in block.items() if v is not DROP},
    )
    assert quantization(target).findings == []


def test_two_files_that_disagree(target: Path) -> None:
    side = hf_quant_config(["model.embed_tokens"])
    side["quantization"]["quant_algo"] = "W4A16_NVFP4"  # type: ignore[index]
    (target / "hf_quant_config.json").write_text(json.dumps(side))
    found = quantization(target)
    assert ids(found) == ["quant/metadata-disagrees"]
    assert found.findings[0].notes == (
        "target/config.json: quantization_config.quant_algo is NVFP4",
        "target/hf_quant_config.json: quantization.quant_algo is W4A16_NVFP4",
    )


@pytest.mark.parametrize("scheme", [{"dynamic": False, "num_bits": 8, "type": "float"}, "FP8"])
def test_quantized_cache_is_only_noted(target: Path, scheme: object) -> None:
    block = {**quantization_config(["model.embed_tokens"]), "kv_cache_scheme": scheme}
    edit_json(target / "config.json", quantization_config=block)
    (finding,) = quantization(target).findings
    assert finding.id == "quant/kv-cache"
    assert finding.severity is Severity.NOTE


@pytest.mark.parametrize("calibrated", [True, False])
def test_what_becomes_of_a_quantized_cache_is_a_decision(target: Path, calibrated: bool) -> None:
    """ModelOpt's constant-scale recipe stores no scales; a calibrated one two a layer."""
    block = {**quantization_config(["model.embed_tokens"]), "kv_cache_scheme": "FP8"}
    edit_json(target / "config.json", quantization_config=block)
    names = [f"model.layers.0.self_attn.{n}" for n in ("k_proj.k_scale", "v_proj.v_scale")]
    if calibrated:
        edit_tensors(target, lambda t: t | dict.fromkeys(names, np.ones((), np.float32)))
    module = lift(target)
    (line,) = [d for d in module.decisions if "KV cache" in d]
    stored = "2 scales are stored" if calibrated else "no scales are stored, which means 1"
    assert line.startswith(f"target KV cache: FP8 is declared ({stored}); kept in float32")
    caches = module.graphs["target"].by_role(Role.KV_CACHE)
    assert {cache.value.type.dtype for cache in caches} == {DType.F32}
    assert not [d for d in module.decisions if "not used" in d]


def test_only_the_cache_is_quantized(dense: Path) -> None:
    block = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    edit_json(dense / "config.json", quantization_config=block)
    found = quantization(dense)
    assert found.weight("lm_head", HEAD).encoding == Dense(DType.BF16)
    assert ids(found) == ["quant/kv-cache"]


def test_mixed_precision_of_supported_formats(target: Path) -> None:
    layers = {"model.language_model.layers.0.mlp.*": {"quant_algo": "nvfp4", "group_size": 16}}
    layers["lm_head"] = {"quant_algo": "W4A16_NVFP4"}
    block = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": []}
    edit_json(target / "config.json", quantization_config={**block, "quantized_layers": layers})
    (target / "hf_quant_config.json").unlink()
    found = quantization(target)
    assert found.weight("lm_head", HEAD).encoding == NVFP4()
    assert found.weight("model.layers.0.mlp.up_proj", (128, 64)).encoding == NVFP4(input_scale=True)
    assert found.findings == []
    found.weight(Q_PROJ, (128, 64))
    assert ids(found) == ["quant/stored-not-declared"]


def test_mixed_precision_with_an_unsupported_format_is_counted(target: Path) -> None:
    layers = {f"model.layers.{i}.self_attn.q_proj": {"quant_algo": "NVFP4_AWQ"} for i in range(3)}
    layers["lm_head"] = {"quant_algo": "NVFP4"}
    block = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    edit_json(target / "config.json", quantization_config={**block, "quantized_layers": layers})
    with pytest.raises(UnsupportedError, match=r"NVFP4_AWQ \(3 modules\)"):
        quantization(target)


def test_a_pattern_that_is_no_regular_expression(target: Path) -> None:
    edit_json(target / "config.json", quantization_config=quantization_config(["re:("]))
    with pytest.raises(InputError, match="not a regular expression"):
        quantization(target)


@pytest.mark.parametrize(
    "block",
    [
        [],
        "modelopt",
        {"quant_method": 3},
        {"quant_method": "modelopt", "quant_algo": 4},
        {"quant_method": "modelopt", "ignore": "lm_head"},
        {"quant_method": "modelopt", "ignore": [1]},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": []},
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a": "FP8"},
        },
    ],
)
def test_metadata_of_wrong_types(target: Path, block: object) -> None:
    edit_json(target / "config.json", quantization_config=block)
    with pytest.raises(InputError) as caught:
        quantization(target)
    assert caught.value.diagnostics[0].where.startswith("target/config.json: quantization_config")


# Methods that are not supported


@pytest.mark.parametrize(
    ("block", "name"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, "FP8 e5m2"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ in the order 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "format": "llm-awq"}, "AWQ in the order 'llm-awq'"),
        ({"quant_method": "awq", "bits": 8, "group_size": 64}, "AWQ with 8 bits"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 64}, "GPTQ with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "layout 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int64"}, "words of int64"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}},
            "sparse-bitmask",
        ),
        ({"quant_method": "compressed-tensors", "transform_config": {}}, "transforms"),
        *(
            ({"quant_method": name}, name)
            for name in (
                *("aqlm", "vptq", "quanto", "eetq", "higgs", "hqq", "fbgemm_fp8", "torchao"),
                *("gguf", "bitnet", "spqr", "quark", "fp_quant", "auto-round", "sinq", "metal"),
                *("fouroversix", "nvfp4", "mxfp8", "exl2", "exl3"),
            )
        ),
        ({"bits": 4}, "unnamed"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}, "W4A8_MXFP4_FP8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8"}, "W4A8_NVFP4_FP8"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "W4A16_AWQ"),
    ],
)
def test_unsupported_methods_are_named_before_anything_else(
    target: Path, block: object, name: str
) -> None:
    edit_json(target / "config.json", quantization_config=block)
    with pytest.raises(UnsupportedError, match=name) as caught:
        quantization(target)
    assert caught.value.exit_code == 4
    assert "ModelOpt NVFP4" in caught.value.diagnostics[0].help
    assert "FP8_PB_WO" in caught.value.diagnostics[0].help


def test_the_key_of_mlx(dense: Path) -> None:
    edit_json(dense / "config.json", quantization={"bits": 4})
    with pytest.raises(UnsupportedError):
        quantization(dense)


def u8(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.uint8)


def f32(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


FOREIGN: dict[str, tuple[dict[str, np.ndarray[Any, Any]], str]] = {
    "FP8 E5M2": ({"weight": f32(32, 64).astype(ml_dtypes.float8_e5m2)}, "FP8 E5M2"),
    "FP8 with zero points": (
        {"weight": f32(32, 64).astype(E4M3), "weight_scale": f32(1), "weight_zero_point": f32(1)},
        "FP8 with zero points",
    ),
    "sparse": ({"weight": f32(32, 64), "bitmask": u8(32, 8)}, "sparse-bitmask"),
    "INT4": ({"weight": u8(16, 64), "weight_scale": f32(32, 4)}, "INT4"),
    "INT8": ({"weight": u8(32, 64).view(np.int8), "weight_scale": f32(32)}, "INT8"),
    "W4A8": ({"weight": u8(32, 32), "weight_scale": f32(32, 2).astype(E4M3)}, "blocks of 32"),
    "NVFP4_AWQ": ({"weight": u8(32, 32), "pre_quant_scale": f32(64)}, "AWQ"),
    "NVFP4_SVD": ({"weight": u8(32, 32), "svdquant_lora_a": f32(4, 64)}, "NVFP4_SVD"),
    "bitsandbytes": ({"weight": u8(1024, 1), "weight.absmax": f32(32)}, "bitsandbytes"),
    "bitsandbytes 8": ({"weight": u8(32, 64).view(np.int8), "SCB": f32(32)}, "bitsandbytes"),
    "MLX": ({"weight": u8(32, 32).view(np.uint32), "scales": f32(32, 1)}, "MLX"),
}


def stored(tensors: dict[str, np.ndarray[Any, Any]]) -> Tensors:
    return {f"x{s}" if s.startswith("_") else f"x.{s}": array for s, array in tensors.items()}


@pytest.mark.parametrize("case", FOREIGN)
def test_unsupported_layouts_are_named_by_their_tensors(target: Path, case: str) -> None:
    tensors, name = FOREIGN[case]
    edit_tensors(target, lambda t: t | stored(tensors))
    with pytest.raises(UnsupportedError, match=name) as caught:
        quantization(target).weight("x", (32, 64))
    assert caught.value.diagnostics[0].where == "target: x"


def test_foreign_tensors_without_any_metadata_are_named_at_once(dense: Path) -> None:
    edit_tensors(dense, lambda t: t | stored(FOREIGN["bitsandbytes"][0]))
    with pytest.raises(UnsupportedError, match="bitsandbytes"):
        quantization(dense)


@pytest.mark.parametrize(
    "ending", [".qweight", ".weight_packed", ".weight_scale_inv", ".weight_global_scale", "_blocks"]
)
def test_weights_that_need_metadata(dense: Path, ending: str) -> None:
    """Facts of AWQ and GPTQ are in the metadata alone; the others would be read by a guess."""
    edit_tensors(dense, lambda t: t | {f"x{ending}": u8(32, 32)})
    with pytest.raises(InputError, match="no metadata says how") as caught:
        quantization(dense)
    assert caught.value.id == "quant/no-metadata"
    assert caught.value.diagnostics[0].where == f"target/model.safetensors: x{ending}"


def test_words_below_metadata_of_another_method(target: Path) -> None:
    edit_tensors(target, lambda t: t | {"x.qweight": u8(64, 16).view(np.int32)})
    with pytest.raises(UnsupportedError, match="AWQ or GPTQ below metadata of modelopt"):
        quantization(target).weight("x", (32, 64))


# FP8


def fp8(scale: np.ndarray[Any, Any], n: int = 200, k: int = 300, **more: Any) -> Tensors:
    """An FP8 weight `x` of random codes, none of them NaN."""
    codes = np.random.default_rng(1).integers(0, 0x7F, (n, k)).astype(np.uint8)
    codes |= (np.arange(k) % 2 * 0x80).astype(np.uint8)
    tensors = {"weight": codes.view(E4M3), "weight_scale": scale, **more}
    return {f"x.{name}": array for name, array in tensors.items()}


def factors(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(2).uniform(0.001, 0.1, shape).astype(np.float32)


def declare(path: Path, algorithm: str, **more: object) -> Path:
    block = {"quant_method": "modelopt", "quant_algo": algorithm, **more}
    return edit_json(path / "config.json", quantization_config=block).parent


FP8_SCALES: dict[str, tuple[np.ndarray[Any, Any], str, str]] = {
    "scalar": (factors(), "FP8", "tensor"),
    "vector of one": (factors(1), "FP8", "tensor"),
    "rows": (factors(200), "FP8_PER_CHANNEL_PER_TOKEN", "channel"),
    "rows as a column": (factors(200, 1), "FP8_PER_CHANNEL_PER_TOKEN", "channel"),
    "blocks": (factors(2, 3), "fp8_pb_wo", "block"),
    "blocks of four axes": (factors(2, 1, 3, 1), "fp8_pb_wo", "block"),
    "one block": (factors(), "FP8_PB_WO", "tensor"),
    "rows in bf16": (
        factors(200).astype(ml_dtypes.bfloat16),
        "FP8_PER_CHANNEL_PER_TOKEN",
        "channel",
    ),
}


@pytest.mark.parametrize("case", FP8_SCALES)
def test_fp8_by_tensor_row_and_block(dense: Path, case: str) -> None:
    """Values by the definition, element by element; blocks at the edges are partial."""
    scale, algorithm, scaling = FP8_SCALES[case]
    tensors = fp8(scale)
    found = quantization(declare(edit_tensors(dense, lambda t: t | tensors), algorithm))
    weight = found.weight("x", (200, 300))
    assert weight.encoding == FP8(scaling, scale_dtype=DType.of(scale.dtype))
    assert found.findings == []
    table = WeightTable()
    table.readers["target"] = found.checkpoint
    parts = tuple(StoredPart(c, "model.safetensors", key) for c, key in weight.parts.items())
    table.add("x", Weight((200, 300), weight.encoding, Stored("target", parts)))
    got = table.dense("x", 100, 200)
    wide, grid = tensors["x.weight"].astype(np.float64), scale.astype(np.float64).reshape(-1)
    for row, column in ((100, 0), (127, 127), (128, 128), (150, 299), (199, 255), (199, 256)):
        index = {"tensor": 0, "channel": row, "block": row // 128 * 3 + column // 128}[scaling]
        expected = np.float32(wide[row, column] * grid[index])
        assert got[row - 100, column] == expected
    check_scales(found.checkpoint, weight)


@pytest.mark.parametrize("algorithm", ["FP8", "FP8_PB_WO"])
def test_fp8_activation_scales_belong_to_static_algorithms(dense: Path, algorithm: str) -> None:
    tensors = fp8(factors(), input_scale=np.array(0.5, np.float32))
    found = quantization(declare(edit_tensors(dense, lambda t: t | tensors), algorithm))
    weight = found.weight("x", (200, 300))
    assert ("input_scale" in weight.parts) == (algorithm == "FP8")
    assert weight.encoding == FP8(input_scale=algorithm == "FP8")
    assert "x.input_scale" in found.consumed


def test_mixed_precision_of_fp8_and_nvfp4(target: Path) -> None:
    layers = {"lm_head": {"quant_algo": "NVFP4"}, "x": {"quant_algo": "FP8"}}
    declare(target, "MIXED_PRECISION", quantized_layers=layers)
    (target / "hf_quant_config.json").unlink()
    found = quantization(edit_tensors(target, lambda t: t | fp8(factors())))
    assert found.weight("lm_head", HEAD).encoding == NVFP4(input_scale=True)
    assert found.weight("x", (200, 300)).encoding == FP8()
    assert found.summary() == "fp8 x 1, nvfp4 x 1"
    assert found.findings == []


def test_formats_that_are_not_the_declared_ones_are_listed(target: Path) -> None:
    layers = {"lm_head": {"quant_algo": "FP8"}, "x": {"quant_algo": "FP8_PB_WO"}}
    declare(target, "MIXED_PRECISION", quantized_layers=layers)
    (target / "hf_quant_config.json").unlink()
    found = quantization(edit_tensors(target, lambda t: t | fp8(factors(200))))
    found.weight("lm_head", HEAD)
    found.weight("x", (200, 300))
    (finding,) = found.findings
    assert finding.id == "quant/stored-otherwise"
    assert finding.notes == ("lm_head: nvfp4, declared FP8", "x: fp8 channel, declared FP8_PB_WO")
    assert finding.severity is Severity.WARNING


BAD_FP8: dict[str, tuple[Tensors, tuple[int, ...], str, str]] = {
    "another shape": (fp8(factors()), (200, 299), "quant/bad-shape", "expected [200, 299]"),
    "no matrix": (fp8(factors()), (60000,), "quant/bad-shape", "not a matrix"),
    "two scales": (fp8(factors(2)), (200, 300), "quant/bad-scale", "[2, 3] (one per 128 x 128"),
    "scales by column": (fp8(factors(300)), (200, 300), "quant/bad-scale", "200 (one a row)"),
    "integer scales": (
        fp8(np.ones(200, np.int64)),
        (200, 300),
        "quant/bad-scale",
        "the scales are i64 [200]",
    ),
    "zero": (fp8(np.array(0, np.float32)), (200, 300), "quant/bad-scale", "finite positive"),
    "NaN": (fp8(np.array(np.nan, np.float32)), (200, 300), "quant/bad-scale", "nan"),
    "too large": (
        fp8(np.array(1e36, np.float32)),
        (200, 300),
        "quant/bad-scale",
        "expected 7.2e-43 to 7.6e+35: the values, up to 448 times the scale",
    ),
    "too small": (fp8(np.array(1e-44, np.float32)), (200, 300), "quant/bad-scale", "7.2e-43 to"),
    "activations NaN": (
        fp8(factors(), input_scale=np.array(np.nan, np.float32)),
        (200, 300),
        "quant/bad-scale",
        "nan",
    ),
}


@pytest.mark.parametrize("case", BAD_FP8)
def test_bad_fp8(dense: Path, case: str) -> None:
    tensors, shape, id, words = BAD_FP8[case]
    error = refused(declare(edit_tensors(dense, lambda t: t | tensors), "FP8"), "x", shape)
    assert error.id == id
    assert words in str(error)
    assert "target/model.safetensors: x." in error.diagnostics[0].where


def test_fp8_without_its_scale(dense: Path) -> None:
    tensors = fp8(factors())
    del tensors["x.weight_scale"]
    error = refused(declare(edit_tensors(dense, lambda t: t | tensors), "FP8"), "x", (200, 300))
    assert error.id == "quant/missing-scale"
    assert "packed (f8e4m3)" in str(error)
    assert "assumed format: FP8" in str(error)


@pytest.mark.parametrize(("row", "column", "byte"), [(0, 0, 0x7F), (150, 299, 0xFF)])
def test_fp8_elements_that_are_no_numbers(
    dense: Path, monkeypatch: pytest.MonkeyPatch, row: int, column: int, byte: int
) -> None:
    monkeypatch.setattr("edgecc.frontends.quantization.scales._CHUNK", 3000)  # 10 rows at a time
    tensors = fp8(factors())
    tensors["x.weight"].view(np.uint8)[row, column] = byte
    found = quantization(declare(edit_tensors(dense, lambda t: t | tensors), "FP8"))
    weight = found.weight("x", (200, 300))
    with pytest.raises(InputError, match=rf"value at \[{row}, {column}\] is NaN"):
        check_scales(found.checkpoint, weight)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        *((value, "expected a finite positive number") for value in (np.nan, np.inf, 0, -1)),
        *((value, "expected 7.2e-43 to 7.6e+35") for value in (1e36, 1e-44)),
    ],
)
def test_fp8_scales_of_rows_and_blocks_are_scanned(dense: Path, value: float, words: str) -> None:
    scale = factors(2, 3)
    scale[1, 2] = value
    found = quantization(declare(edit_tensors(dense, lambda t: t | fp8(scale)), "fp8_pb_wo"))
    weight = found.weight("x", (200, 300))
    with pytest.raises(InputError, match=rf"scale at \[1, 2\] is .*{re.escape(words)}"):
        check_scales(found.checkpoint, weight)


# Damage


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: v for k, v in tensors.items() if k not in names}


def refused(path: Path, module: str = "lm_head", shape: tuple[int, ...] = HEAD) -> InputError:
    with pytest.raises(InputError) as caught:
        quantization(path).weight(module, shape)
    assert type(caught.value) is InputError
    return caught.value


@pytest.mark.parametrize("component", ["weight_scale", "weight_scale_2"])
def test_missing_scale_names_what_was_assumed_and_looked_for(target: Path, component: str) -> None:
    key = f"lm_head.{component}"

    def move(tensors: Tensors) -> None:
        tensors[f"draft.{key}"] = tensors.pop(key)

    error = refused(edit_tensors(target, move))
    assert error.id == "quant/missing-scale"
    text = str(error)
    for part in (component, "ModelOpt NVFP4", f"looked for {key}", "model.safetensors"):
        assert part in text
    assert f"another module's: draft.{key}" in text
    assert "target/model.safetensors: lm_head.weight" in text


BAD_SCALES: dict[str, tuple[str, np.ndarray[Any, Any], str]] = {
    "f32 block scales": ("weight_scale", f32(288, 4), "f32"),
    "too few columns": ("weight_scale", f32(288, 3).astype(E4M3), "expected f8e4m3 [288, 4]"),
    "too few rows": ("weight_scale", f32(287, 4).astype(E4M3), "[287, 4]"),
    "flat": ("weight_scale", f32(1152).astype(E4M3), "[1152]"),
    "global NaN": ("weight_scale_2", np.array(np.nan, np.float32), "nan"),
    "global infinite": ("weight_scale_2", np.array(np.inf, np.float32), "inf"),
    "global zero": ("weight_scale_2", np.array(0, np.float32), "0.0"),
    "global negative": ("weight_scale_2", np.array(-1, np.float32), "-1.0"),
    "global too large": (
        "weight_scale_2",
        np.array(3e38, np.float32),
        "expected 1.4e-42 to 1.3e+35",
    ),
    "global just too large": (
        "weight_scale_2",
        np.array(np.nextafter(np.float32(2.0**128 / 2688), np.float32(np.inf))),
        "up to 2688 times the scale",
    ),
    "global too small": ("weight_scale_2", np.array(1e-43, np.float32), "expected 1.4e-42 to"),
    "global of two": ("weight_scale_2", f32(2), "[2]"),
    "global in bf16": ("weight_scale_2", np.array(1, ml_dtypes.bfloat16), "bf16"),
    "input NaN": ("input_scale", np.array(np.nan, np.float32), "nan"),
    "input zero": ("input_scale", np.array(0, np.float32), "0.0"),
    "input of two": ("input_scale", f32(2), "[2]"),
}


@pytest.mark.parametrize("case", BAD_SCALES)
def test_bad_scales(target: Path, case: str) -> None:
    component, array, shown = BAD_SCALES[case]
    error = refused(edit_tensors(target, lambda t: t | {f"lm_head.{component}": array}))
    assert error.id == "quant/bad-scale"
    assert shown in str(error)
    assert error.diagnostics[0].where == f"target/model.safetensors: lm_head.{component}"


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        # the first is the very shape of the packed bytes
        ((288, 32), "u8 [288, 32] holds [288, 64] values, expected [288, 32] values"),
        ((288, 128), "expected [288, 128] values"),
        ((272, 64), "expected [272, 64] values"),
        ((288, 65), "expected [288, 65] values"),
        ((288,), "not a matrix: [288]"),
        ((2, 144, 64), "not a matrix"),
    ],
)
def test_packed_weights_are_told_by_dtype_never_by_shape(
    target: Path, shape: tuple[int, ...], expected: str
) -> None:
    error = refused(target, shape=shape)
    assert error.id == "quant/bad-shape"
    assert expected in str(error)


def test_width_that_is_no_multiple_of_the_block(target: Path) -> None:
    def narrow(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = u8(288, 36)
        tensors["lm_head.weight_scale"] = f32(288, 5).astype(E4M3)

    found = quantization(edit_tensors(target, narrow))
    with pytest.raises(UnsupportedError, match="72 columns are not a multiple of the block 16"):
        found.weight("lm_head", (288, 72))


@pytest.mark.parametrize(
    ("array", "id"),
    [
        (f32(288, 32), "quant/bad-shape"),
        (f32(287, 64), "quant/bad-shape"),
        (f32(0, 64), "quant/bad-shape"),
        (f32(288 * 64), "quant/bad-shape"),
        (np.zeros((288, 64), np.int64), "quant/bad-dtype"),
        (np.zeros((288, 64), np.bool_), "quant/bad-dtype"),
    ],
)
def test_bad_dense_weights(dense: Path, array: np.ndarray[Any, Any], id: str) -> None:
    assert refused(edit_tensors(dense, lambda t: t | {"lm_head.weight": array})).id == id


@pytest.mark.parametrize("component", ["weight_scale", "weight_scale_2"])
def test_scales_beside_a_dense_weight(target: Path, component: str) -> None:
    def mix(tensors: Tensors) -> Tensors:
        others = {"weight_scale", "weight_scale_2"} - {component}
        kept = without(*(f"lm_head.{name}" for name in others))(tensors)
        return kept | {"lm_head.weight": f32(*HEAD)}

    error = refused(edit_tensors(target, mix))
    assert error.id == "quant/stray-scale"
    assert component in str(error)


def test_missing_weight(target: Path) -> None:
    assert (
        refused(edit_tensors(target, without("lm_head.weight"))).id == "checkpoint/missing-tensor"
    )


def scale_bytes(path: Path, row: int, block: int, byte: int) -> Quantization:
    def damage(tensors: Tensors) -> None:
        tensors["lm_head.weight_scale"].view(np.uint8)[row, block] = byte

    return quantization(edit_tensors(path, damage))


@pytest.mark.parametrize(
    ("byte", "what"), [(0x7F, "NaN"), (0xFF, "NaN"), (0xB8, "negative"), (0x80, "negative")]
)
@pytest.mark.parametrize(("row", "block"), [(0, 0), (5, 3), (287, 1)])
def test_damaged_block_scales_are_found(
    target: Path, monkeypatch: pytest.MonkeyPatch, byte: int, what: str, row: int, block: int
) -> None:
    monkeypatch.setattr("edgecc.frontends.quantization.scales._CHUNK", 40)  # 10 rows at a time
    found = scale_bytes(target, row, block, byte)
    weight = found.weight("lm_head", HEAD)  # reading metadata does not look at block scales
    with pytest.raises(InputError, match=what) as caught:
        check_scales(found.checkpoint, weight)
    assert f"row {row}, block {block} (columns {16 * block}..{16 * block + 15})" in str(
        caught.value
    )


def test_zero_scales_only_over_zeros(target: Path) -> None:
    found = scale_bytes(target, 7, 2, 0)
    with pytest.raises(InputError, match=r"row 7, block 2 .* zero over values"):
        check_scales(found.checkpoint, found.weight("lm_head", HEAD))

    def clear(tensors: Tensors) -> None:
        tensors["lm_head.weight"][7, 16:24] = 0x80  # zeros of both signs

    found = quantization(edit_tensors(target, clear))
    check_scales(found.checkpoint, found.weight("lm_head", HEAD))


def test_clean_scales_and_dense_weights_pass(target: Path) -> None:
    found = quantization(target)
    for module, shape in (("lm_head", HEAD), ("model.embed_tokens", HEAD), ("model.norm", (64,))):
        check_scales(found.checkpoint, found.weight(module, shape))


@given(position=st.integers(0, 288 * 4 - 1), byte=st.integers(0, 255))
def test_a_scale_byte_is_refused_exactly_when_it_is_no_positive_number(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int
) -> None:
    path = write_target(tmp_path_factory.mktemp("scale") / "t", layers=0, tokenizer=False)
    found = scale_bytes(path, *divmod(position, 4), byte)
    weight = found.weight("lm_head", HEAD)
    value = float(np.array(byte, np.uint8).view(E4M3))
    if value > 0:
        check_scales(found.checkpoint, weight)
    else:
        with pytest.raises(InputError):
            check_scales(found.checkpoint, weight)


@given(
    st.floats(2.0**-149, float(np.finfo(np.float32).max), width=32),
    st.sampled_from([np.multiply, np.divide]),
)
def test_a_range_is_where_values_are_numbers(value: float, apply: np.ufunc) -> None:
    divided = apply is np.divide
    within = (ScaleRange.of_divisor if divided else ScaleRange.of_factor)(2.0**-10, 2688)
    scale = np.full(1, value, np.float32)

    def numbers(slack: float) -> bool:
        """Whether codes and block scales within a factor of the extremes give numbers."""
        with np.errstate(over="ignore"):
            ends = apply(np.array([2.0**-9 / slack, 448 * slack], np.float32), scale)
            smallest, largest = ends * np.array([0.5, 6], np.float32)
        return bool(smallest > 0 and np.isfinite(largest))

    if within.refuses(value):
        assert not numbers(slack=2)
    else:
        assert numbers(slack=1)


def test_a_draft_does_not_inherit_the_targets_quantization(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t", layers=1, tokenizer=False)
    draft = write_draft(tmp_path / "d", layers=1)
    assert quantization(target).declaration is not None
    found = quantization(draft, role="draft")
    assert found.declaration is None
    assert found.weight("layers.0.mlp.down_proj", (64, 128)).encoding == Dense(DType.BF16)
    assert found.findings == []
