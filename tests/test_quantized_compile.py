"""Compiling unquantized checkpoints to quantized bundles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgecc
from edgecc.backends.bundle import Bundle
from edgecc.compile_options import QUANTIZATION_CHOICES
from edgecc.errors import MismatchError, UsageError
from edgecc.passes.quantize import FORMATS, Quantize
from helpers.checkpoints import read_tensors, write_draft, write_target

SMALL: Mapping[str, Any] = {
    **{"layers": 2, "hidden": 128, "heads": 2, "kv_heads": 1, "head_dim": 64},
    "intermediate": 128,
}
TAPS: Mapping[str, Any] = {"target_layers": 2, "target_layer_ids": (0, 1)}
FAST: Mapping[str, Any] = {"max_model_len": 48}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("q") / "dense", **SMALL, quantized=False)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tmp_path_factory.mktemp("q") / "draft", **SMALL, **TAPS)


def test_the_formats_of_the_command_line_are_those_of_the_pass() -> None:
    assert list(QUANTIZATION_CHOICES) == ["auto", *FORMATS]


@pytest.mark.parametrize(
    ("format", "form"), [*((f, "dense") for f in FORMATS), ("nvfp4", "int8-split")]
)
def test_engines_compute_with_the_rounded_weights(
    format: str, form: str, dense: Path, draft: Path, tmp_path: Path
) -> None:
    """`verify="full"` compares them with the interpreter, whose weights are rounded as well; and
    speculation changes no token.
    """
    report = edgecc.compile(
        dense,
        draft,
        out=tmp_path / "b",
        quantization=format,
        draft_quantization=format,
        quantize_head=True,
        linear_form=form,
        verify="full",
        **FAST,
    )
    assert len(report.checks) == 4
    with edgecc.load(tmp_path / "b") as generator:
        ids = [5, 9, 200, 31]
        plain = generator.generate(token_ids=ids, max_new_tokens=24, speculation=False)
        fast = generator.generate(token_ids=ids, max_new_tokens=24)
    assert plain.token_ids == fast.token_ids
    bits = {"nvfp4": 4.6, "int4": 4.3}.get(format, 8.4)  # of each element, scales included
    for weight in linear_weights(tmp_path / "b"):
        assert 8 * weight["bytes"] <= bits * np.prod(weight["shape"]), weight


def linear_weights(path: Path) -> list[dict[str, Any]]:
    found = Bundle.open(path).manifest["weights"]
    return [w for s, w in found.items() if "-" in s.rpartition(".")[0].rpartition(".")[2]]


def test_the_bytes_are_those_of_a_quantized_checkpoint(dense: Path, tmp_path: Path) -> None:
    """The tests' own quantizer, which shares no code, wrote the same weights as NVFP4."""
    packed = write_target(tmp_path / "packed", **SMALL)
    contents = []
    for source, options in (
        (packed, {}),
        (dense, {"quantization": "nvfp4", "quantize_head": True}),
    ):
        edgecc.compile(source, out=tmp_path / "b", **options, **FAST)
        tensors = read_tensors(tmp_path / "b" / "weights")
        contents.append(
            {n.replace("-nvfp4", ""): (a.dtype, a.tobytes()) for n, a in tensors.items()}
        )
    assert contents[0] == contents[1]
    assert sum("weight_scale_2" in name for name in contents[0]) == 9


def test_stacked_layers_keep_one_scale(dense: Path, tmp_path: Path) -> None:
    """q, k and v are one tensor in the file: fusing found equal scales."""
    report = edgecc.compile(dense, out=tmp_path / "b", quantization="nvfp4", **FAST)
    names = Bundle.open(tmp_path / "b").manifest["weights"]
    stack = "target.model.layers.0.self_attn.q_proj-nvfp4+k_proj-nvfp4+v_proj-nvfp4.weight"
    assert stack in names
    assert report.pipeline.startswith(
        "bind-shared-weights,dedupe-weights,quantize{include=target.*},"
    )


def test_reference_rows_round_like_the_pipeline(dense: Path, draft: Path, tmp_path: Path) -> None:
    """Also for a pipeline of one's own, inside `repeat`; and they notice what is not rounded."""
    pipeline = (
        "bind-shared-weights,repeat(quantize{format=int8}),unroll-markov,dce,"
        "lower-encodings{device=onnx},dce"
    )
    options = {"device": "onnx", "pass_pipeline": pipeline, "verify": "full", **FAST}
    report = edgecc.compile(dense, draft, out=tmp_path / "b", **options)
    assert len(report.checks) == 4


def test_an_engine_with_other_weights_is_noticed(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without rounding the reference as well, the comparison fails: it is no formality."""
    monkeypatch.setattr("edgecc.golden._rounding", lambda passes: iter(()))
    with pytest.raises(MismatchError):
        edgecc.compile(dense, out=tmp_path / "b", quantization="int8", **FAST)


def test_a_shared_head_is_stored_once(dense: Path, draft: Path, tmp_path: Path) -> None:
    edgecc.compile(dense, draft, out=tmp_path / "b", quantization="fp8", quantize_head=True, **FAST)
    manifest = Bundle.open(tmp_path / "b").manifest
    shared = {item["symbol"]: item for item in manifest["shared"]}
    head = shared["target.lm_head-fp8.weight"]
    assert (head["role"], head["users"]) == ("lm_head", ["draft", "target"])
    assert not any("lm_head.weight" in name for name in manifest["artifacts"]["cpu"]["tensors"])


def test_same_bytes_twice(dense: Path, draft: Path, tmp_path: Path) -> None:
    files = []
    for name in "ab":
        out = tmp_path / name
        edgecc.compile(dense, draft, out=out, quantization="nvfp4", **FAST)
        files.append({p.name: p.read_bytes() for p in out.rglob("*") if p.is_file()})
    assert files[0] == files[1]


def test_dry_run_tells_the_size(dense: Path, tmp_path: Path) -> None:
    sizes = {
        format: edgecc.compile(
            dense, out=tmp_path / "b", dry_run=True, quantization=format, **FAST
        ).weight_bytes
        for format in ("auto", "nvfp4", "int8")
    }
    assert sizes["nvfp4"] < sizes["int8"] < sizes["auto"]


def test_the_pass_runs_only_when_asked(dense: Path, tmp_path: Path) -> None:
    report = edgecc.compile(dense, out=tmp_path / "b", dry_run=True, **FAST)
    assert Quantize.name not in report.pipeline


@pytest.mark.parametrize(
    ("options", "tied", "words"),
    [
        ({"draft_quantization": "fp8"}, False, "the draft reads the target's head"),
        ({"quantization": "nvfp4"}, True, "the head is the embedding table"),
    ],
)
def test_a_head_that_cannot_be_rounded_is_told(
    options: dict[str, str], tied: bool, words: str, draft: Path, tmp_path: Path
) -> None:
    """The flag was given, so a head of 16 bits would be a surprise."""
    target = write_target(tmp_path / "dense", **SMALL, quantized=False, tied=tied)
    out = tmp_path / "b"
    with pytest.raises(UsageError, match="rounds no head") as caught:
        edgecc.compile(target, draft, out=out, quantize_head=True, **options, **FAST)
    assert words in str(caught.value)
    assert not out.exists()
