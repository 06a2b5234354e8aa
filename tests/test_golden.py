"""Golden rows: what the reference computes, and engines that compute something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

import edgecc
from edgecc.devices import get_device
from edgecc.errors import InputError, MismatchError
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.golden import (
    GOLDEN_FILE,
    PROMPT_ROWS,
    check_engine,
    golden_rows,
    make_golden,
)
from edgecc.ir.core import Module
from edgecc.ir.types import DType
from edgecc.lowered_check import check_lowered
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.passes.default import default_pipeline
from edgecc.passes.manager import PassManager
from edgecc.roles import Role
from helpers.byte_tokenizer import NUM_TOKENS
from helpers.checkpoints import Tensors, edit_tensors, write_draft, write_target
from helpers.eagle3 import DRAFT_IDS, Eagle3Draft, write_eagle3
from helpers.hybrid import FULL, LINEAR, HybridSizes, write_hybrid_target
from helpers.hybrid_reference import HybridTarget
from helpers.reference import Draft, Target
from helpers.vision import IMAGE, write_vision_target
from helpers.vision_reference import MultimodalTarget, Tower
from helpers.weights import dense


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("golden") / "t", layers=2, quantized=False)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(
        tmp_path_factory.mktemp("golden") / "d",
        layers=1,
        target_layers=2,
        target_layer_ids=(0, 1),
    )


def lifted(target: Path, draft: Path | None = None) -> Module:
    module = lift(target, draft, LiftOptions(max_model_len=16))
    BindSharedWeights().run(module, PassContext())
    return module


def test_states_start_at_zero(tmp_path: Path) -> None:
    """Golden rows of a target with recurrent layers."""
    target = write_hybrid_target(tmp_path / "t")
    draft = write_draft(tmp_path / "d", hidden=32, layers=1, target_layer_ids=(0, 3))
    golden = load(make_golden(lifted(target, draft)))
    ids, model = golden["token_ids"].tolist(), HybridTarget(target)
    expected = model.run(ids)
    assert np.allclose(golden["logits"], expected.logits[-1:], rtol=1e-4, atol=1e-4)
    taps = expected.taps((0, 3))
    assert np.allclose(golden["hidden_tap"], taps, rtol=1e-4, atol=1e-4)
    reference = Draft(draft, model, block_size=4, mask_token_id=287, num_tokens=288)
    anchor = int(golden["anchor"][0])
    assert anchor == int(expected.logits[-1].argmax())
    assert golden["proposals"].tolist() == reference.run(taps, anchor, 4).tokens
    following = model.run([*ids, anchor]).logits[-1:]  # from caches and states of the prompt
    assert np.allclose(golden["next_logits"], following, rtol=1e-4, atol=1e-4)


def test_a_chain_of_an_eagle3_draft(target: Path, tmp_path: Path) -> None:
    draft = write_eagle3(tmp_path / "d", hidden=64, taps=2, target_layer_ids=[0, 1])
    golden = load(make_golden(lifted(target, draft)))
    ids, anchor, model = golden["token_ids"].tolist(), int(golden["anchor"][0]), Target(target)
    reference = Eagle3Draft(draft, model, DRAFT_IDS, NUM_TOKENS)
    steps = len(golden["proposals"])
    expected = reference.run(golden["hidden_tap"], [*ids[1:], anchor], steps)
    assert golden["proposals"].tolist() == expected.tokens


@pytest.mark.parametrize("rows", [1, 2, PROMPT_ROWS, 9])
def test_rows_equal_an_independent_reference(target: Path, draft: Path, rows: int) -> None:
    golden = load(make_golden(lifted(target, draft), rows))
    ids = golden["token_ids"].tolist()
    assert len(ids) == rows
    assert len(set(ids)) == rows
    assert max(ids) < NUM_TOKENS
    model = Target(target)
    expected = model.run(ids)
    assert np.allclose(golden["logits"], expected.logits[-1:], rtol=1e-4, atol=1e-4)
    taps = expected.taps((0, 1))
    assert np.allclose(golden["hidden_tap"], taps, rtol=1e-4, atol=1e-4)
    anchor = int(expected.logits[-1, :NUM_TOKENS].argmax())
    assert golden["anchor"].tolist() == [anchor]
    reference = Draft(draft, model, block_size=4, mask_token_id=287, num_tokens=NUM_TOKENS)
    assert golden["proposals"].tolist() == reference.run(taps, anchor, 4).tokens
    following = model.run([*ids, anchor]).logits[-1:]
    assert np.allclose(golden["next_logits"], following, rtol=1e-4, atol=1e-4)


def test_a_target_alone_has_no_draft_rows(target: Path) -> None:
    golden = load(make_golden(lifted(target)))
    assert golden.keys() == {"token_ids", "logits", "anchor", "next_logits"}
    assert golden["logits"].shape == (1, 288)
    assert golden["logits"].dtype == np.float32


def test_the_same_every_time(target: Path, draft: Path) -> None:
    assert make_golden(lifted(target, draft)) == make_golden(lifted(target, draft))


@pytest.mark.parametrize(
    ("side", "name", "outputs", "node"),
    [
        ("target", "model.norm.weight", "logits", "rms_norm"),
        ("target", "lm_head.weight", "logits", "linear"),
        ("target", "model.layers.1.mlp.down_proj.weight", "hidden_tap", "linear"),
        ("draft", "norm.weight", "draft_logits that are", "rms_norm"),
        ("draft", "markov_head.markov_w2.weight", "draft_logits that are", "markov_chain"),
    ],
)
def test_overflow_names_the_weight(
    tmp_path: Path, side: str, name: str, outputs: str, node: str
) -> None:
    paths = {
        "target": write_target(tmp_path / "t", layers=2, quantized=False),
        "draft": write_draft(tmp_path / "d", layers=1, target_layers=2, target_layer_ids=(0, 1)),
    }

    def scale(tensors: Tensors) -> None:
        tensors[name][:] = 3e38

    edit_tensors(paths[side], scale)
    with pytest.raises(InputError, match="overflow float32") as caught:
        make_golden(lifted(paths["target"], paths["draft"]))
    (found,) = caught.value.diagnostics
    assert found.id == "golden/not-finite"
    assert found.where == f"{side}/model.safetensors: {name}"
    assert outputs in found.message
    assert node in found.notes[0]
    assert "3e+38" in found.notes[1]


class TestCheckEngine:
    @pytest.fixture(scope="module")
    @staticmethod
    def bundle(tmp_path_factory: pytest.TempPathFactory, target: Path, draft: Path) -> Path:
        out = tmp_path_factory.mktemp("golden") / "b"
        edgecc.compile(target, draft, out=out, max_model_len=16)
        return out

    def check(self, bundle: Path, golden: bytes) -> None:
        manifest = edgecc.backends.bundle.Bundle.open(bundle).manifest
        check_engine(bundle, manifest["artifacts"]["cpu"], golden)

    def test_its_own_rows(self, bundle: Path) -> None:
        self.check(bundle, (bundle / GOLDEN_FILE).read_bytes())

    @pytest.mark.parametrize("name", ["logits", "hidden_tap"])
    def test_rows_off_by_more_than_rounding(self, bundle: Path, name: str) -> None:
        golden = load((bundle / GOLDEN_FILE).read_bytes())
        largest = float(np.abs(golden[name]).max())
        golden[name] = golden[name].copy()
        golden[name].reshape(-1)[0] += np.float32(3e-5 * largest)
        self.check(bundle, save(golden))
        golden[name].reshape(-1)[0] += np.float32(2e-4 * largest)
        with pytest.raises(MismatchError) as caught:
            self.check(bundle, save(golden))
        assert sum("FAILED" in note for note in caught.value.diagnostics[0].notes) == 1

    def test_one_other_proposal(self, bundle: Path) -> None:
        golden = load((bundle / GOLDEN_FILE).read_bytes())
        golden["proposals"] = golden["proposals"].copy()
        golden["proposals"][-1] ^= 1
        with pytest.raises(MismatchError, match="numbers differ"):
            self.check(bundle, save(golden))

    def test_reference_that_is_no_number(self, bundle: Path) -> None:
        golden = load((bundle / GOLDEN_FILE).read_bytes())
        golden["logits"] = np.full_like(golden["logits"], np.nan)
        with pytest.raises(MismatchError):
            self.check(bundle, save(golden))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A hybrid with a block draft, and a plain target with a chain."""
    folder = tmp_path_factory.mktemp("lowered")
    hybrid = write_hybrid_target(folder / "h", HybridSizes(layer_types=(LINEAR, FULL)))
    block = write_draft(
        folder / "hd", hidden=32, layers=1, target_layers=2, target_layer_ids=(0, 1)
    )
    plain = write_target(folder / "t", layers=2, quantized=False)
    chain = write_eagle3(folder / "td", hidden=64, taps=2, target_layer_ids=[0, 1])
    return {"hybrid": (hybrid, block), "chain": (plain, chain)}


class TestLowered:
    """What a builder is going to get, against the golden rows."""

    @staticmethod
    def lowered(pair: tuple[Path, Path], device: str = "sm120") -> tuple[Module, bytes]:
        """A pair for a GPU, and its golden rows."""
        record, options = get_device(device), LiftOptions(max_model_len=16)
        manager = PassManager(default_pipeline(record))
        module = lift(*pair, options)
        manager.run(module, PassContext(record))
        return module, golden_rows(lift(*pair, options), manager.passes)

    @staticmethod
    def failed(module: Module, golden: bytes) -> set[str]:
        with pytest.raises(MismatchError, match="other numbers than the reference") as caught:
            check_lowered(module, golden)
        notes = [n for n in caught.value.diagnostics[0].notes if "FAILED" in n]
        return {n.partition(":")[0].removeprefix("lowered ") for n in notes}

    @pytest.mark.parametrize("device", ["sm86", "sm120"])
    @pytest.mark.parametrize("name", ["hybrid", "chain"])
    def test_right_graphs(
        self, pairs: dict[str, tuple[Path, Path]], name: str, device: str
    ) -> None:
        checks, _ = check_lowered(*self.lowered(pairs[name], device))
        assert [c.name.removeprefix("lowered ") for c in checks] == [
            "logits", "hidden_tap", "draft_logits", "proposals", "next_logits",
        ]  # fmt: skip
        assert all(c.passed for c in checks)

    def test_a_state_that_is_not_updated(self, pairs: dict[str, tuple[Path, Path]]) -> None:
        """The prompt's call does not show it, the next one does."""
        module, golden = self.lowered(pairs["hybrid"])
        for graph in module.graphs.values():
            inputs = {i.name: i.value for i in graph.by_role(Role.STATE)}
            for index, output in enumerate(graph.outputs):
                if output.role is Role.STATE and "delta" in output.name:
                    assert output.alias is not None
                    graph.outputs[index] = replace(output, value=inputs[output.alias])
        assert self.failed(module, golden) == {"next_logits"}

    def test_other_ids_of_the_target(self, pairs: dict[str, tuple[Path, Path]]) -> None:
        """The first choice is right, and means another token."""
        module, golden = self.lowered(pairs["chain"])
        (symbol,) = {n.weights[0] for n in module.graphs["draft"].nodes if n.op.name == "lookup"}
        ids = module.weights.read(symbol)["weight"]
        other = dense(np.roll(ids, 1), DType.I64)
        module.weights.rebind(module.weights.resolve(symbol), other)
        assert {"proposals", "draft_logits"} <= self.failed(module, golden)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = HybridSizes(layer_types=(LINEAR, FULL))
    return write_vision_target(tmp_path_factory.mktemp("golden") / "v", text=text)


def with_tower(path: Path, **sizes: int) -> Module:
    options = LiftOptions(components="all", **{"max_model_len": 32, **sizes})
    module = lift(path, None, options)
    BindSharedWeights().run(module, PassContext())
    return module


@pytest.mark.parametrize(
    ("rows", "blocks"),
    [(9, (2, 2)), (6, (2, 2)), (5, (1, 2)), (4, (1, 2)), (3, (1, 1)), (2, (1, 1)), (1, (1, 1))],
)
def test_rows_of_an_image(seeing: Path, rows: int, blocks: tuple[int, int]) -> None:
    """Features and logits by another implementation, after a picture that fits into the rows."""
    golden = load(make_golden(with_tower(seeing), rows))
    text = 2 if rows > 2 else 0
    size, side = golden["tower.pixel_values"].shape, blocks[0] * blocks[1]
    assert size == (1, 4 * side, 3 * 2 * 4 * 4)
    ids = golden["token_ids"]
    assert (ids == IMAGE).sum() == side == len(ids) - text
    reference = Tower(seeing)
    pixels = picture_of(golden["tower.pixel_values"][0], blocks)
    features = reference.features(pixels)
    assert relative(golden["image_features"], features) < 1e-5
    places = np.flatnonzero(ids == IMAGE).tolist()
    run = MultimodalTarget(seeing).run_at
    given = dict(zip(places, features, strict=True))
    found = run(ids.tolist(), golden["positions"], given)
    assert relative(golden["logits"][0], found.logits[-1]) < 1e-4
    after = golden["positions"].max() + 1
    positions = np.concatenate([golden["positions"], np.full((3, 1), after)], axis=1)
    found = run([*ids.tolist(), *golden["anchor"].tolist()], positions, given)
    assert relative(golden["next_logits"][0], found.logits[-1]) < 1e-4


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def picture_of(patches: np.ndarray, blocks: tuple[int, int]) -> np.ndarray:
    """The image `[height, width, 3]` that patches of 4 x 4 pixels were cut from."""
    rows, columns = blocks
    split = patches.reshape(rows, columns, 2, 2, 3, 2, 4, 4)[:, :, :, :, :, 0]
    return split.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * 8, columns * 8, 3).astype(float)


@pytest.mark.parametrize(("chunk", "rows"), [(128, 6), (5, 4), (2, 1), (1, 1)])
def test_golden_images_fit_into_a_call(seeing: Path, chunk: int, rows: int) -> None:
    """What was made once is made again from as many rows: for the arithmetic of a device."""
    module = with_tower(seeing, prefill_chunk=chunk)
    golden = golden_rows(module, [])
    assert len(load(golden)["token_ids"]) == rows
    assert make_golden(with_tower(seeing), rows) == golden


def test_a_wrong_tower_is_found(seeing: Path) -> None:
    """Lowered graphs are compared with the reference: features first."""
    golden = golden_rows(with_tower(seeing), [])
    wrong = load(golden)
    wrong["image_features"] = wrong["image_features"][::-1].copy()
    module = with_tower(seeing)
    device = get_device("sm120")
    PassManager(default_pipeline(device)).run(module, PassContext(device))
    checks, _ = check_lowered(module, golden)
    assert checks[0].name == "lowered image_features"
    with pytest.raises(MismatchError, match="lowered image_features: FAILED"):
        check_lowered(module, save(wrong))
