"""Synthetic checkpoints against the real ones whose configs they are made for."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import synthetic
from benchmarks.checkpoints.architectures import parameters, with_layers
from benchmarks.checkpoints.presets import PRESETS
from benchmarks.checkpoints.quantization import Scheme, Tensor
from benchmarks.checkpoints.values import POOLS, Values
from benchmarks.checkpoints.writer import write_checkpoint
from benchmarks.synthetic import main, write_like, write_preset
from safetensors import safe_open

from edgecc import driver
from edgecc.backends.weight_file import TensorSpec
from edgecc.checkpoints import close_checkpoints, findings_of
from edgecc.compile_checks import check_module
from edgecc.compile_options import CompileOptions
from edgecc.errors import Severity, UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.ir.interpreter import Interpreter
from edgecc.ir.random_inputs import random_inputs
from helpers.goldens import PAIRS

REAL = (
    "tiny-qwen3-nvfp4",
    "tiny-qwen3_5-mixed",
    "tiny-qwen3-dspark",
    "tiny-qwen3_5-dspark",
    "tiny-qwen3-eagle3",
)

# Published: tensors and parameters before quantization, then bytes of the weight files.
PUBLISHED = {
    "qwen3.8-27b": (1199, 27_781_427_952, 21_921_697_280),
    "qwen3.8-27b-dspark": (62, 1_857_358_337, None),
    "qwen3.8-27b-dspark-first": (62, 1_359_284_737, 2_718_576_122),
    "qwen3-4b-dspark": (62, 615_221_249, None),
    "qwen3-8b-dspark": (62, 1_126_422_017, None),
}


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor of a folder, by name."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                view = file.get_slice(name)
                found[name] = (view.get_dtype(), tuple(view.get_shape()))
    return found


def digests(folder: Path) -> dict[str, str]:
    with Checkpoint.open(folder, role="target") as checkpoint:
        return {
            name: hashlib.sha256(checkpoint.read(name).tobytes()).hexdigest()
            for name in checkpoint.tensors
        }


@pytest.mark.parametrize("name", REAL)
def test_same_tensors_as_the_real_one(name: str, tmp_path: Path) -> None:
    made = write_like(PAIRS / name / "config.json", tmp_path / name)
    assert tensors(made) == tensors(PAIRS / name)
    for path in (PAIRS / name).glob("*.json*"):
        assert (made / path.name).exists(), path.name
        assert json.loads((made / path.name).read_text()) == json.loads(path.read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_counts(name: str) -> None:
    config = PRESETS[name]()
    found = parameters(config)
    stored = [t.spec for p in found for t in Scheme(config).stored(p)]
    count, elements, nbytes = PUBLISHED[name]
    assert (len(found), sum(math.prod(p.shape) for p in found)) == (count, elements)
    if nbytes is not None:  # the difference is the headers: 80 to 130 bytes a tensor
        header = (nbytes - sum(s.nbytes for s in stored)) / len(stored)
        assert 80 < header < 130


def test_mixed_precision_of_27b() -> None:
    """208 FP8 modules, 193 of NVFP4, and both files say which."""
    config = PRESETS["qwen3.8-27b"]()
    stored = {t.spec.name: t.spec for p in parameters(config) for t in Scheme(config).stored(p)}
    weights = [s for name, s in stored.items() if name.endswith(".weight")]
    assert sum(s.dtype == "F8_E4M3" for s in weights) == 208
    assert sum(s.dtype == "U8" for s in weights) == 193
    assert stored["lm_head.weight"].shape == (248320, 2560)
    assert stored["lm_head.weight_scale"].shape == (248320, 320)
    q_proj = "model.language_model.layers.3.self_attn.q_proj.weight"
    assert (stored[q_proj].dtype, stored[q_proj].shape) == ("F8_E4M3", (12288, 5120))
    block = config["quantization_config"]
    packed = {name.removesuffix(".weight") for name, s in stored.items() if s.dtype == "U8"}
    assert set(block["config_groups"]["group_1"]["targets"]) == packed
    side = synthetic.side_files("qwen3.8-27b", config)["hf_quant_config.json"]["quantization"]
    assert side["quantized_layers"] == block["quantized_layers"]
    assert len(side["quantized_layers"]) == 401


@pytest.fixture
def small_27b(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 27B pair with an eighth and less of every width."""

    def shrunk(config: dict[str, Any]) -> dict[str, Any]:
        text = config.get("text_config", config)
        text |= {"hidden_size": 128, "intermediate_size": 192, "vocab_size": 768}
        text["head_dim"] = 64 if text is not config else 32
        text["num_attention_heads"], text["num_key_value_heads"] = 4, 2
        if text is config:
            config["dflash_config"]["mask_token_id"] = 767
            return config
        text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
        text |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
        text["rope_parameters"]["mrope_section"] = [3, 3, 2]
        text |= {"eos_token_id": 700, "bos_token_id": 700}
        config["vision_config"] |= {"depth": 2, "hidden_size": 32, "intermediate_size": 48}
        config["vision_config"] |= {"out_hidden_size": 128, "num_position_embeddings": 16}
        return config

    names = ("qwen3.8-27b", "qwen3.8-27b-dspark")
    small = {n: (lambda n=n: shrunk(PRESETS[n]())) for n in names}
    monkeypatch.setattr(synthetic, "PRESETS", {**PRESETS, **small})


def test_reduced_pair_lifts_and_stays_finite(small_27b: None, tmp_path: Path) -> None:
    """All 64 layers: nothing is left over, every scale is good, activations keep their size."""
    target = write_preset("qwen3.8-27b", tmp_path / "target", shard_bytes=1 << 20)
    draft = write_preset("qwen3.8-27b-dspark", tmp_path / "draft")
    assert len(list(target.glob("*.safetensors"))) > 2
    module = driver.lift(target, draft, max_model_len=64)
    try:
        check_module(module, CompileOptions(), lambda *_: None)
        assert [f.id for f in findings_of(module) if f.severity is not Severity.NOTE] == []
        assert any("vision tower" in line and "left out" in line for line in module.decisions)
        inputs = random_inputs(module, sizes={"t": 8, "r": 8})["target"]
        out = Interpreter(module).run("target", inputs)
        taps, logits = out["hidden_tap"], out["logits"]
        assert np.isfinite(taps).all()
        assert np.isfinite(logits).all()
        assert 0.1 < np.std(taps) < 100
        assert 0.1 < np.std(logits) < 10
        assert len(set(np.argmax(logits[0], axis=1))) > 4
    finally:
        close_checkpoints(module)


def test_fewer_layers(small_27b: None, tmp_path: Path) -> None:
    """Config, metadata and tensors of a cut pair agree, and the draft's taps exist."""
    target = write_preset("qwen3.8-27b", tmp_path / "target", layers=4)
    draft = write_preset("qwen3.8-27b-dspark", tmp_path / "draft", target_layers=4)
    config = json.loads((target / "config.json").read_text())
    assert config["text_config"]["layer_types"][-1] == "full_attention"
    side = json.loads((target / "hf_quant_config.json").read_text())["quantization"]
    assert len(side["quantized_layers"]) == 4 * 3 + 3 * 3 + 4 + 1
    module = driver.lift(target, draft, max_model_len=64)
    try:
        assert [f.id for f in findings_of(module) if f.severity is not Severity.NOTE] == []
        facts = module.metadata["draft"]
        assert isinstance(facts, dict)
        assert facts["target_layer_ids"] == [0, 1, 2, 3]
    finally:
        close_checkpoints(module)


def test_equal_arguments_equal_bytes_and_no_tensor_twice(tmp_path: Path) -> None:
    config = PAIRS / "tiny-qwen3-dspark" / "config.json"
    first, again, other = (
        write_like(config, tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1))
    )
    assert digests(first) == digests(again)
    assert not set(digests(first).values()) & set(digests(other).values())
    target = digests(write_like(PAIRS / "tiny-qwen3_5-mixed" / "config.json", tmp_path / "mixed"))
    large = [d for name, d in target.items() if not name.endswith(("_scale", "scale_2"))]
    assert len(set(large)) == len(large)


def test_shards_hold_everything_once(tmp_path: Path) -> None:
    config = PAIRS / "tiny-qwen3-nvfp4" / "config.json"
    whole = write_like(config, tmp_path / "whole")
    parts = write_like(config, tmp_path / "parts", shard_bytes=1_000_000)
    assert not (whole / "model.safetensors.index.json").exists()
    assert len(list(parts.glob("model-*-of-*.safetensors"))) > 3
    assert digests(whole) == digests(parts)
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors(parts).keys()


def test_rows_differ_when_a_tensor_is_longer_than_the_pool() -> None:
    """Also when rows divide the length of a pool that is no prime."""
    rows, columns = 2 * POOLS[0] // 256, 256
    spec = TensorSpec("w.weight", "F8_E4M3", (rows, columns))
    values = Values(0, 1)
    made = np.concatenate(list(values.blocks(Tensor(spec, std=80.0)))).view(np.uint8)
    assert len(made) == rows * columns > POOLS[0]
    assert len(np.unique(made.reshape(rows, columns), axis=0)) == rows
    assert all(all(n % d for d in range(2, math.isqrt(n) + 1)) for n in POOLS)


@pytest.mark.parametrize(
    ("algorithm", "bound"),
    [
        ("NVFP4", 0.02),
        ("W4A16_NVFP4", 0.02),
        ("FP8", 0.07),
        ("FP8_PER_CHANNEL_PER_TOKEN", 0.07),
        ("FP8_PB_WO", 0.07),
    ],
)
def test_every_format_is_read_back(algorithm: str, bound: float, tmp_path: Path) -> None:
    """The frontend decodes it to values of the wanted size."""
    config = json.loads((PAIRS / "tiny-qwen3-nvfp4" / "config.json").read_text())
    config = with_layers(config, 1) | {"intermediate_size": 768}
    config["quantization_config"] |= {"quant_algo": algorithm}
    folder = write_checkpoint(tmp_path / "made", config)
    module = driver.lift(folder, max_model_len=64)
    try:
        check_module(module, CompileOptions(), lambda *_: None)
        assert [f.id for f in findings_of(module) if f.severity is not Severity.NOTE] == []
        for symbol, columns in (("gate_proj", 256), ("down_proj", 768)):
            name = next(s for s in module.weights if f"{symbol}.weight" in s)
            weight = module.weights[name]
            blocks = [
                weight.encoding.dequantize(parts) for _, _, parts in module.weights.row_blocks(name)
            ]
            assert abs(np.std(np.concatenate(blocks)) * columns**0.5 - 1) < bound
    finally:
        close_checkpoints(module)


def test_unknown_things_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((PAIRS / "tiny-qwen3-nvfp4" / "config.json").read_text())
    with pytest.raises(UnsupportedError, match="Qwen4ForCausalLM"):
        write_checkpoint(tmp_path / "a", {**config, "architectures": ["Qwen4ForCausalLM"]})
    with pytest.raises(UnsupportedError, match="mxfp4"):
        write_checkpoint(tmp_path / "b", {**config, "quantization_config": {"quant_algo": "mxfp4"}})
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        main(["qwen3-0.6", str(tmp_path / "c")])
    assert "qwen3-0.6b" in capsys.readouterr().err


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = PAIRS / "tiny-qwen3_5-mixed" / "config.json"
    main(["--config", str(config), str(tmp_path / "made"), "--layers", "4"])
    assert "MB" in capsys.readouterr().out
    names = tensors(tmp_path / "made")
    assert "model.layers.3.self_attn.q_proj.weight" in names
    assert not any(".layers.4." in name for name in names)
