"""The Qwen3.5 frontend against an independent float64 decoder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgecc.errors import EdgeccError, InputError, UnsupportedError
from edgecc.frontends.lift import lift
from edgecc.ir import parse_module, print_module
from edgecc.ir.compare import equal
from edgecc.ir.core import Module
from edgecc.ir.encodings import FP8, NVFP4
from edgecc.ir.types import format_shape
from edgecc.ir.verifier import verify
from edgecc.roles import Role
from helpers.checkpoints import DROP, Tensors, edit_json, edit_tensors, write_draft
from helpers.hybrid import FULL, LINEAR, MTP, VISION, HybridSizes, write_hybrid_target
from helpers.hybrid_reference import HybridTarget
from helpers.lifted import Lifted
from helpers.reference import Draft

TOLERANCE = 2e-6
"""Relative. Rotary tables and `1 + w` are float32; everything else is float64 on both sides."""

IDS = [3, 141, 59, 26, 53, 58, 97, 93, 238, 46, 264]


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    """Whether the largest difference is small beside the largest expected value."""
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max()) <= TOLERANCE * float(np.abs(expected).max())


def check(path: Path, expected: Path | None = None, ids: list[int] = IDS) -> None:
    """Logits of all rows and all layer outputs of the lifted graph equal the reference.

    Args:
        path: The target.
        expected: A target of the same weights in the plain layout, if `path` is wrapped.
        ids: The tokens.
    """
    reference = HybridTarget(expected or path)
    layers = reference.config["num_hidden_layers"]
    draft = write_draft(
        path.parent / f"{path.name}-taps",
        hidden=reference.config["hidden_size"],
        layers=1,
        target_layers=layers,
        target_layer_ids=range(-1, layers),
    )
    found = Lifted(path, draft).target(ids)
    wanted = reference.run(ids)
    assert close(found["logits"], wanted.logits)
    assert close(found["hidden_tap"], wanted.taps(range(-1, layers)))


SIZES: Mapping[str, HybridSizes] = {
    "default": HybridSizes(),
    "one linear layer": HybridSizes(layer_types=(LINEAR,)),
    "one attention layer": HybridSizes(layer_types=(FULL,)),
    "one value head a key head": HybridSizes(key_heads=3, value_heads=3, layer_types=(LINEAR,)),
    "three value heads a key head": HybridSizes(
        key_heads=2, value_heads=6, key_dim=4, value_dim=4, layer_types=(LINEAR, FULL)
    ),
    "one head": HybridSizes(
        heads=1, kv_heads=1, key_heads=1, value_heads=1, layer_types=(FULL, LINEAR)
    ),
    "two taps": HybridSizes(taps=2, layer_types=(LINEAR,)),
    "more taps than tokens": HybridSizes(taps=13, layer_types=(LINEAR, LINEAR)),
    "whole heads rotated": HybridSizes(rotary=1.0, sections=(3, 3, 2), layer_types=(FULL,)),
    "a quarter rotated": HybridSizes(
        head_dim=32, rotary=0.25, sections=(2, 1, 1), layer_types=(FULL, FULL)
    ),
    "hidden is no multiple of the heads": HybridSizes(
        hidden=48, heads=5, kv_heads=1, head_dim=8, sections=(1, 1, 0), layer_types=(FULL,)
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(tmp_path: Path, name: str) -> None:
    check(write_hybrid_target(tmp_path / "t", SIZES[name]))


@pytest.mark.parametrize("multimodal", [False, True])
def test_mixed_precision(tmp_path: Path, multimodal: bool) -> None:
    """FP8 in the mixers, NVFP4 in MLPs and head, the small projections of the gates dense."""
    plain = write_hybrid_target(tmp_path / "plain", mixed=True)
    path = write_hybrid_target(tmp_path / "t", mixed=True, multimodal=multimodal)
    check(path, plain)
    module = lift(path)
    kinds = {s: type(w.encoding) for s, w in module.weights.items() if s.endswith("weight")}
    for name, kind in kinds.items():
        packed = "mlp." in name or "lm_head" in name
        fp8 = any(f"{p}_proj" in name for p in "qkvo" if "self_attn" in name)
        fp8 |= any(p in name for p in ("in_proj_qkv", "in_proj_z", "out_proj"))
        assert (kind is NVFP4) == packed, name
        assert (kind is FP8) == fp8, name
    assert "fp8 x 13" in next(d for d in module.decisions if "as stored" in d)
    assert not findings(module)


def findings(module: Module) -> list[str]:
    return [f.id for f in module.weights.readers["target"].findings]  # type: ignore[attr-defined]


def test_the_multimodal_class(tmp_path: Path) -> None:
    """Keys nested, tensors under another prefix, vision and MTP beside them."""
    plain = write_hybrid_target(tmp_path / "plain")
    path = write_hybrid_target(tmp_path / "t", multimodal=True)
    check(path, plain)
    module, other = lift(path), lift(plain)
    assert list(module.weights) == list(other.weights)
    assert [str(n) for n in module.graphs["target"].nodes] == [
        str(n) for n in other.graphs["target"].nodes
    ]
    lines = [d for d in module.decisions if "left out" in d]
    assert lines == [
        f"target: the vision tower ({len(VISION)} tensors) is left out: only the language model "
        "is built",
        f"target: the multi-token-prediction block ({len(MTP)} tensors) is left out: only the "
        "language model is built",
    ]
    assert not [d for d in module.decisions if "not used" in d]
    assert not findings(module)


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.language_model.", "lm_head."),
        ("model.language_model.", "model.language_model.lm_head."),
        ("language_model.model.", "language_model.lm_head."),
        ("language_model.", "lm_head."),
        ("thinker.model.", "thinker.lm_head."),
        ("model.", "model.lm_head."),
    ],
)
def test_prefixes(tmp_path: Path, prefix: str, head: str) -> None:
    plain = write_hybrid_target(tmp_path / "plain", HybridSizes(layer_types=(LINEAR, FULL)))
    path = write_hybrid_target(tmp_path / "t", HybridSizes(layer_types=(LINEAR, FULL)))

    def rename(tensors: Tensors) -> Tensors:
        return {
            name.replace("lm_head.", head, 1)
            if name.startswith("lm_head.")
            else name.replace("model.", prefix, 1): array
            for name, array in tensors.items()
        }

    edit_tensors(path, rename)
    check(path, plain)


def test_tied_embedding_is_the_head(tmp_path: Path) -> None:
    """The tie of a multimodal config stands at the top only."""
    plain = write_hybrid_target(tmp_path / "plain", tied=True)
    path = write_hybrid_target(tmp_path / "t", tied=True, multimodal=True)
    check(path, plain)
    assert not [name for name in lift(path).weights if "lm_head" in name]


@pytest.mark.parametrize("interval", [DROP, 4, 2, 1])
def test_layer_kinds_by_interval(tmp_path: Path, interval: Any) -> None:
    """Without `layer_types`, every fourth layer is full attention, or every n-th."""
    step = 4 if interval is DROP else interval
    kinds = [FULL if (i + 1) % step == 0 else LINEAR for i in range(4)]
    path = write_hybrid_target(
        tmp_path / "t",
        HybridSizes(layer_types=kinds),
        layer_types=DROP,
        full_attention_interval=interval,
    )
    module = lift(path)
    states = [i.name for i in module.graphs["target"].by_role(Role.STATE)]
    assert states == [
        f"{what}_state.{i}"
        for i, kind in enumerate(kinds)
        for what in ("conv", "delta")
        if kind == LINEAR
    ]


def test_old_places_of_the_rotary_keys(tmp_path: Path) -> None:
    """The fraction beside the object, sections in the old spelling; the default is a quarter."""
    plain = write_hybrid_target(tmp_path / "plain")
    path = write_hybrid_target(
        tmp_path / "t",
        rope_parameters=DROP,
        rope_theta=1e4,
        partial_rotary_factor=0.5,
        rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]},
    )
    check(path, plain)
    silent = write_hybrid_target(tmp_path / "s", rope_parameters={"rope_theta": 1e4})
    rotated = [w.shape[1] for s, w in lift(silent).weights.items() if s.endswith("rope.cos")]
    assert rotated == [2]  # a quarter of 16, half of it frequencies


def test_the_interface(tmp_path: Path) -> None:
    module = lift(write_hybrid_target(tmp_path / "t"))
    graph = module.graphs["target"]
    assert not verify(module)
    memory = {
        i.name: format_shape(i.value.type.shape)
        for role in (Role.STATE, Role.KV_CACHE)
        for i in graph.by_role(role)
    }
    channels, width = 2 * 2 * 8 + 4 * 12, 512 + 1
    assert memory == {
        **{f"conv_state.{i}": f"[b, {channels}, 3]" for i in range(3)},
        **{f"delta_state.{i}": "[b, 4, 8, 12]" for i in range(3)},
        **{f"{kind}_cache.3": f"[b, 2, {width}, 16]" for kind in "kv"},
    }
    for role in (Role.STATE, Role.KV_CACHE):
        outputs = graph.outputs_by_role(role)
        assert [o.alias for o in outputs] == [o.name for o in outputs]
        assert {o.name for o in outputs} == {i.name for i in graph.by_role(role)}
    assert list(dict.fromkeys(module.symbols)) == ["b", "t", "r"]


def test_text_round_trip(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "d", hidden=32, target_layer_ids=(0, 2, 3))
    module = lift(write_hybrid_target(tmp_path / "t", mixed=True, multimodal=True), draft)
    text = print_module(module, locations=True)
    parsed = parse_module(text)
    assert equal(parsed, module, locations=True)
    assert print_module(parsed, locations=True) == text
    assert " state" in text
    assert "causal_conv1d(" in text
    assert "{key_heads = 2, value_heads = 4}" in text


class TestText:
    """Interleaved rotary embedding of three axes is plain rotary embedding where they agree."""

    @pytest.fixture(scope="class")
    @staticmethod
    def reference(tmp_path_factory: pytest.TempPathFactory) -> HybridTarget:
        path = tmp_path_factory.mktemp("text") / "t"
        return HybridTarget(write_hybrid_target(path, HybridSizes(layer_types=(FULL, FULL))))

    def test_sections_do_not_matter(self, tmp_path: Path, reference: HybridTarget) -> None:
        expected = reference.run(IDS).logits
        for sections in ((4, 0, 0), (0, 2, 2), (2, 1, 1)):
            path = tmp_path / str(sections)
            write_hybrid_target(path, HybridSizes(layer_types=(FULL, FULL), sections=sections))
            assert close(Lifted(path).target(IDS)["logits"], expected)

    def test_they_matter_where_the_axes_differ(self, reference: HybridTarget) -> None:
        """Otherwise the reference would prove nothing."""
        positions = np.tile(np.arange(len(IDS)), (3, 1))
        positions[1:, 4:8] = [[4, 4, 5, 5], [4, 5, 4, 5]]
        other = reference.run_at(IDS, positions).logits
        assert not close(other, reference.run(IDS).logits)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lifted, HybridTarget]:
    """A small target both ways; the caches of the lifted one are full of garbage."""
    path = write_hybrid_target(tmp_path_factory.mktemp("qwen3_5") / "t")
    return Lifted(path, garbage=1e3), HybridTarget(path)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_chunks_equal_the_whole_sequence(
    pair: tuple[Lifted, HybridTarget], chunks: list[int], seed: int
) -> None:
    lifted, reference = pair
    lifted.reset()
    ids = np.random.default_rng(seed).integers(0, 288, sum(chunks)).tolist()
    expected = reference.run(ids).logits
    for chunk in chunks:
        start = lifted.lengths["target"]
        found = lifted.target(ids[start : start + chunk])["logits"]
        assert close(found, expected[start : start + chunk])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_chunks_give_the_same_bits(tmp_path: Path, dtype: type[Any]) -> None:
    """Plain and speculative decoding differ in nothing but how many rows a call has."""
    lifted = Lifted(write_hybrid_target(tmp_path / "t", mixed=True), dtype=dtype)
    together = lifted.target(IDS)["logits"]
    lifted.reset()
    rows = [lifted.target([token])["logits"] for token in IDS]
    assert np.concatenate(rows).tobytes() == together.tobytes()


def test_rejected_rows_leave_no_trace(pair: tuple[Lifted, HybridTarget]) -> None:
    """Whoever keeps the states from before a call can go back to them."""
    lifted, reference = pair
    lifted.reset()
    lifted.target(IDS[:5])
    lifted.target([7, 7, 7, 7], keep=0)
    lifted.target([IDS[5], 9, 9], keep=1)
    found = lifted.target(IDS[6:])["logits"]
    assert close(found, reference.run(IDS).logits[6:])


def test_a_state_that_is_not_restored_is_noticed(pair: tuple[Lifted, HybridTarget]) -> None:
    """The test before would pass for nothing if states did not matter."""
    lifted, reference = pair
    lifted.reset()
    lifted.target(IDS[:5])
    lifted.target([7, 7, 7, 7])
    lifted.lengths["target"] -= 4
    found = lifted.target(IDS[5:])["logits"]
    assert not close(found, reference.run(IDS).logits[5:])


# Drafts over hybrid targets


@pytest.mark.parametrize(
    ("taps", "shapes"),
    [
        ((0, 2), {"heads": 5, "kv_heads": 1, "intermediate": 40}),
        ((1, 3), {"heads": 4, "kv_heads": 2, "intermediate": 96}),
        ((-1, 0, 1, 2, 3), {}),
    ],
    ids=["recurrent layers", "both kinds", "all layers"],
)
def test_draft(tmp_path: Path, taps: tuple[int, ...], shapes: dict[str, Any]) -> None:
    """A draft of another shape, with a YaRN rotary embedding of its own over whole heads."""
    target = write_hybrid_target(tmp_path / "t", mixed=True, multimodal=True)
    reference = HybridTarget(write_hybrid_target(tmp_path / "plain", mixed=True))
    path = write_draft(
        tmp_path / "d",
        hidden=32,
        target_layer_ids=taps,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e7,
            "factor": 32.0,
            "original_max_position_embeddings": 8,
        },
        **shapes,
    )
    lifted = Lifted(target, path)
    features = lifted.target(IDS)["hidden_tap"]
    wanted = reference.run(IDS).taps(taps)
    assert close(features, wanted)
    found = lifted.draft(features, 17)
    expected = Draft(path, reference, 4, 287, 288).run(wanted, 17, 4)
    assert close(found["base_logits"], expected.base_logits)
    assert close(found["draft_logits"], expected.logits)
    assert found["proposals"].tolist() == expected.tokens
    assert expected.confidence is not None
    assert close(found["confidence"], expected.confidence)


# Checkpoints that are refused


def refused(path: Path, kind: type[EdgeccError]) -> EdgeccError:
    with pytest.raises(kind) as caught:
        lift(path)
    assert type(caught.value) is kind
    return caught.value


ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        ({"layer_types": [LINEAR] * 3}, "layer_types", "one entry for each of 4 layers, found 3"),
        ({"layer_types": "linear_attention"}, "layer_types", "a list of strings"),
        ({"layer_types": [FULL, LINEAR, LINEAR, FULL]}, "layer_types", "layer 0 is full_attention"),
        ({"linear_num_key_heads": 3}, "linear_num_value_heads", "a multiple of linear_num_key"),
        ({"linear_num_key_heads": DROP}, "linear_num_key_heads", "is missing"),
        ({"linear_num_value_heads": 0}, "linear_num_value_heads", "at least 1"),
        ({"linear_key_head_dim": 8.0}, "linear_key_head_dim", "an integer"),
        ({"linear_value_head_dim": DROP}, "linear_value_head_dim", "is missing"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim", "at least 2"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "a divisor of num_attention_heads 4"),
        ({"num_attention_heads": 4.5}, "num_attention_heads", "an integer"),
        ({"attn_output_gate": "yes"}, "attn_output_gate", "true or false"),
        ({"full_attention_interval": 0, "layer_types": DROP}, "full_attention_interval", "least 1"),
        (
            {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 1]}},
            "rope_parameters.mrope_section",
            "three numbers that add up to 4, half of the 8 rotated dims",
        ),
        (
            {"rope_parameters": {**ROPE, "mrope_section": [2, 2]}},
            "rope_parameters.mrope_section",
            "three numbers",
        ),
        (
            {"rope_parameters": {**ROPE, "mrope_section": [5, 0, -1]}},
            "rope_parameters.mrope_section",
            "integers of at least 0",
        ),
        (
            {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.3125}},
            "rope_parameters.partial_rotary_factor",
            "even dims",
        ),
    ],
)
@pytest.mark.parametrize("multimodal", [False, True])
def test_bad_configs(
    tmp_path: Path, change: dict[str, object], key: str, words: str, multimodal: bool
) -> None:
    path = write_hybrid_target(tmp_path / "t", multimodal=multimodal, **change)
    finding = refused(path, InputError).diagnostics[0]
    place = "config.json: text_config." if multimodal else "config.json: "
    assert finding.where == f"target/{place}{key}"
    assert words in finding.message


@pytest.mark.parametrize(
    ("change", "id", "words"),
    [
        ({"hidden_act": "gelu"}, "target/activation", "gelu"),
        ({"output_gate_type": "sigmoid"}, "target/output-gate", "'sigmoid' is not supported"),
        ({"num_experts": 8}, "target/experts", "mixture-of-experts"),
        ({"model_type": "qwen3_5_moe_text"}, "target/experts", "qwen3_5_moe_text"),
        ({"layer_types": [LINEAR] * 3 + ["mamba"]}, "config/layer-type", "'mamba'"),
        (
            {"layer_types": [LINEAR] * 3 + ["sliding_attention"], "sliding_window": 8},
            "target/layer-type",
            "not supported",
        ),
    ],
)
def test_other_networks(tmp_path: Path, change: dict[str, object], id: str, words: str) -> None:
    error = refused(write_hybrid_target(tmp_path / "t", **change), UnsupportedError)
    assert error.id == id
    assert words in str(error)
    assert error.exit_code == 4


L0, L3 = "model.layers.0.linear_attn", "model.layers.3.self_attn"


@pytest.mark.parametrize(
    "name",
    [
        f"{L0}.conv1d.weight",
        f"{L0}.A_log",
        f"{L0}.dt_bias",
        f"{L0}.norm.weight",
        f"{L0}.in_proj_a.weight",
        f"{L0}.in_proj_qkv.weight",
        f"{L0}.out_proj.weight",
        f"{L3}.q_norm.weight",
        f"{L3}.o_proj.weight",
        "model.norm.weight",
        "model.layers.2.mlp.down_proj.weight",
    ],
)
@pytest.mark.parametrize("multimodal", [False, True])
def test_missing_tensors(tmp_path: Path, name: str, multimodal: bool) -> None:
    path = write_hybrid_target(tmp_path / "t", multimodal=multimodal)
    stored = name.replace("model.", "model.language_model.") if multimodal else name

    def drop(tensors: Tensors) -> None:
        del tensors[stored]

    error = refused(edit_tensors(path, drop), InputError)
    assert error.id == "checkpoint/missing-tensor"
    assert stored in error.diagnostics[0].message


@pytest.mark.parametrize(
    ("name", "shape", "id"),
    [
        (f"{L0}.conv1d.weight", (80, 1, 3), "checkpoint/shape"),
        (f"{L0}.conv1d.weight", (80, 4), "checkpoint/shape"),
        (f"{L0}.A_log", (4, 1), "checkpoint/shape"),
        (f"{L0}.dt_bias", (2,), "checkpoint/shape"),
        (f"{L0}.norm.weight", (48,), "checkpoint/shape"),
        (f"{L0}.in_proj_qkv.weight", (64, 32), "quant/bad-shape"),
        (f"{L0}.in_proj_z.weight", (32, 48), "quant/bad-shape"),
        (f"{L3}.q_norm.weight", (64,), "checkpoint/shape"),
        (f"{L3}.q_proj.weight", (64, 32), "target/no-gate"),
        (f"{L3}.q_proj.weight", (96, 32), "quant/bad-shape"),
    ],
)
def test_tensors_of_other_shapes(
    tmp_path: Path, name: str, shape: tuple[int, ...], id: str
) -> None:
    path = write_hybrid_target(tmp_path / "t")
    edit_tensors(path, lambda t: {**t, name: np.ones(shape, ml_dtypes.bfloat16)})
    error = refused(path, InputError)
    assert error.id == id
    assert error.diagnostics[0].where == f"target/model.safetensors: {name}"


@pytest.mark.parametrize(
    ("name", "id"),
    [
        (f"{L0}.conv1d.bias", "checkpoint/unread-parameter"),
        (f"{L0}.in_proj_qkvz.weight", "target/fused-projections"),
        (f"{L3}.qkv_proj.weight", "target/fused-projections"),
        ("model.layers.1.mlp.gate_up_proj.weight", "target/fused-projections"),
        ("model.layers.1.mlp.experts.0.up_proj.weight", "checkpoint/unread-parameter"),
    ],
)
@pytest.mark.parametrize("multimodal", [False, True])
def test_parameters_that_would_not_be_computed(
    tmp_path: Path, name: str, id: str, multimodal: bool
) -> None:
    path = write_hybrid_target(tmp_path / "t", multimodal=multimodal)
    stored = name.replace("model.", "model.language_model.") if multimodal else name
    edit_tensors(path, lambda t: {**t, stored: np.ones((4, 4), np.float32)})
    error = refused(path, UnsupportedError)
    assert error.id == id
    assert stored in str(error)


def test_a_layer_of_both_kinds(tmp_path: Path) -> None:
    path = write_hybrid_target(tmp_path / "t")
    stray = "model.layers.1.self_attn.k_proj.weight"
    edit_tensors(path, lambda t: {**t, stray: np.ones((32, 32), ml_dtypes.bfloat16)})
    finding = refused(path, InputError).diagnostics[0]
    assert finding.id == "target/layer-kind"
    assert "layer 1 is linear_attention" in finding.message
    assert "linear_attn and self_attn" in finding.message


@pytest.mark.parametrize(
    ("extra", "id"),
    [
        ("model.language_model.embed_tokens.weight", "target/two-models"),
        ("model.lm_head.weight", "target/duplicate-tensor"),
    ],
)
def test_two_spellings_at_once(tmp_path: Path, extra: str, id: str) -> None:
    path = write_hybrid_target(tmp_path / "t")
    edit_tensors(path, lambda t: {**t, extra: np.ones((288, 32), ml_dtypes.bfloat16)})
    error = refused(path, InputError)
    assert error.id == id
    assert extra in str(error)


def test_layers_that_are_not_stored(tmp_path: Path) -> None:
    path = write_hybrid_target(tmp_path / "t", multimodal=True, num_hidden_layers=5)
    edit_json(path / "config.json", text_config={**_text(path), "layer_types": [LINEAR] * 5})
    error = refused(path, InputError)
    assert error.id == "checkpoint/missing-layers"


def _text(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())["text_config"]
    return found


def test_a_gate_that_is_declared_absent_is_used_and_reported(tmp_path: Path) -> None:
    """The stored projection has the rows of a gate, and every implementation uses them."""
    path = write_hybrid_target(tmp_path / "t", attn_output_gate=False)
    check(path)
    assert findings(lift(path)) == ["config/output-gate"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_gates_and_norms_in_other_precisions(tmp_path: Path, dtype: type[Any]) -> None:
    path = write_hybrid_target(tmp_path / "t")

    def widen(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith(("A_log", "dt_bias", "norm.weight")):
                tensors[name] = tensors[name].astype(dtype)

    check(edit_tensors(path, widen))
