"""Reduced draft vocabularies: what is read, what is refused, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgecc.errors import InputError, Severity
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.ir.core import Module
from edgecc.ir.ops.sampling import ArgmaxAttributes
from helpers.byte_tokenizer import NUM_TOKENS
from helpers.checkpoints import VOCAB, Tensors, edit_json, edit_tensors, write_target
from helpers.eagle3 import DRAFT_IDS, write_eagle3

SIZE = len(DRAFT_IDS)
SMALL = {"layers": 3, "hidden": 32, "head_dim": 16, "intermediate": 48, "quantized": False}

Change = Callable[[Tensors], None]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("map") / "t", **SMALL)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_eagle3(tmp_path / "d", target_layer_ids=[0, 1, 2])


def lifted(target: Path, draft: Path) -> Module:
    return lift(target, draft, LiftOptions(max_model_len=16, num_speculative_tokens=2))


def table(module: Module) -> list[int] | None:
    """Values of the table proposals go through; None without a `lookup`."""
    nodes = [n for n in module.graphs["draft"].nodes if n.op.name == "lookup"]
    assert len(nodes) in (0, 2)
    if not nodes:
        return None
    found: list[int] = module.weights.dense(nodes[0].weights[0]).tolist()
    return found


def limit(module: Module) -> int:
    """Draft ids from here on are never proposed."""
    attrs = next(n.attrs for n in module.graphs["draft"].nodes if n.op.name == "argmax")
    assert isinstance(attrs, ArgmaxAttributes)
    return attrs.limit


def warnings(module: Module) -> list[str]:
    reader = module.weights.readers["draft"]
    assert isinstance(reader, Checkpoint)
    return [f.id for f in reader.findings if f.severity is Severity.WARNING]


def unused(module: Module) -> list[str]:
    return [d for d in module.decisions if "not used" in d]


@pytest.mark.parametrize("marks", [True, False])
def test_distances(target: Path, tmp_path: Path, marks: bool) -> None:
    draft = write_eagle3(tmp_path / "d", target_layer_ids=[0, 1, 2], marks=marks)
    module = lifted(target, draft)
    assert table(module) == list(DRAFT_IDS)
    assert limit(module) == SIZE
    assert warnings(module) == unused(module) == []


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(12)), st.booleans())
def test_rows_in_any_order(
    target: Path,
    tmp_path_factory: pytest.TempPathFactory,
    ids: list[int],
    marks: bool,
) -> None:
    folder = tmp_path_factory.mktemp("order") / "d"
    ids = [7 * i for i in ids]
    draft = write_eagle3(folder, target_layer_ids=[0, 1, 2], draft_ids=ids, marks=marks)
    assert table(lifted(target, draft)) == ids


def test_ids_in_place_of_distances(target: Path, draft: Path) -> None:
    """Only `t2d` can tell."""
    edit_tensors(draft, lambda t: {**t, "d2t": np.array(DRAFT_IDS, dtype=np.int64)})
    module = lifted(target, draft)
    assert table(module) == list(DRAFT_IDS)
    assert "d2t of the draft holds target ids, not distances" in module.decisions


def test_no_map_for_the_whole_vocabulary(target: Path, tmp_path: Path) -> None:
    module = lifted(
        target, write_eagle3(tmp_path / "d", target_layer_ids=[0, 1, 2], draft_ids=None)
    )
    assert table(module) is None
    assert limit(module) == NUM_TOKENS


@pytest.mark.parametrize("own_head", [True, False])
def test_a_map_of_the_whole_vocabulary_onto_itself(
    target: Path, tmp_path: Path, own_head: bool
) -> None:
    draft = write_eagle3(
        tmp_path / "d", target_layer_ids=[0, 1, 2], draft_ids=range(VOCAB), own_head=own_head
    )
    module = lifted(target, draft)
    assert table(module) is None
    assert limit(module) == NUM_TOKENS
    assert warnings(module) == unused(module) == []


def test_a_permutation_of_the_whole_vocabulary(target: Path, tmp_path: Path) -> None:
    ids = [*range(1, VOCAB), 0]
    module = lifted(target, write_eagle3(tmp_path / "d", target_layer_ids=[0, 1, 2], draft_ids=ids))
    assert table(module) == ids
    assert limit(module) == VOCAB


def test_rows_of_padding_at_the_end_are_cut(target: Path, tmp_path: Path) -> None:
    ids = [*DRAFT_IDS, NUM_TOKENS, VOCAB - 1]
    module = lifted(target, write_eagle3(tmp_path / "d", target_layer_ids=[0, 1, 2], draft_ids=ids))
    assert table(module) == ids
    assert limit(module) == SIZE


@pytest.mark.parametrize("marks", [True, False])
def test_zeros_are_the_first_ids_or_a_map_never_filled(
    target: Path, tmp_path: Path, marks: bool
) -> None:
    """B09: legal, but a buffer that was never filled looks the same, unless `t2d` agrees."""
    draft = write_eagle3(
        tmp_path / "d", target_layer_ids=[0, 1, 2], draft_ids=range(96), marks=marks
    )
    module = lifted(target, draft)
    assert table(module) == list(range(96))
    assert warnings(module) == ([] if marks else ["draft/zero-map"])


def test_the_size_may_be_left_to_the_tensors(target: Path, draft: Path) -> None:
    edit_json(draft / "config.json", draft_vocab_size=None)
    module = lifted(target, draft)
    metadata = module.metadata["draft"]
    assert isinstance(metadata, dict)
    assert metadata["draft_vocab_size"] == SIZE


def set_(name: str, value: Callable[[Tensors], np.ndarray]) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[name] = value(tensors)

    return change


def with_entry(row: int, offset: int) -> Callable[[Tensors], np.ndarray]:
    def change(tensors: Tensors) -> np.ndarray:
        changed = tensors["d2t"].copy()
        changed[row] = offset
        return changed

    return change


@pytest.mark.parametrize(
    ("change", "id", "words"),
    [
        (set_("d2t", lambda t: t["d2t"][:-1]), "checkpoint/shape", ("d2t", f"[{SIZE}]")),
        (set_("d2t", lambda t: np.append(t["d2t"], 0)), "checkpoint/shape", (f"[{SIZE + 1}]",)),
        (set_("d2t", lambda t: t["d2t"][:, None]), "checkpoint/shape", (f"[{SIZE}, 1]",)),
        (set_("d2t", lambda t: t["d2t"].astype("f4")), "checkpoint/shape", ("d2t", "f32")),
        (set_("d2t", lambda t: t["d2t"].astype("i4")), "checkpoint/shape", ("d2t", "i32")),
        (
            set_("d2t", with_entry(5, VOCAB - 5)),
            "draft/vocabulary-map",
            ("d2t", f"row 5 means token {VOCAB}", f"0..{VOCAB - 1}"),
        ),
        (set_("d2t", with_entry(4, -5)), "draft/vocabulary-map", ("row 4 means token -1",)),
        (
            set_("d2t", with_entry(9, (1 << 63) - 1)),
            "draft/vocabulary-map",
            ("row 9 means token -9223372036854775800",),
        ),
        (
            set_("d2t", with_entry(3, DRAFT_IDS[2] - 3)),
            "draft/vocabulary-map",
            (f"row 3 means token {DRAFT_IDS[2]}, as an earlier row does",),
        ),
        (
            set_("d2t", with_entry(SIZE - 1, 257 - SIZE + 1)),
            "draft/vocabulary-map",
            ("t2d", "token 257 has an id but is not marked"),
        ),
        (set_("t2d", lambda t: t["t2d"][:-1]), "checkpoint/shape", ("t2d", f"[{VOCAB}]")),
        (set_("t2d", lambda t: t["t2d"].astype("i8")), "checkpoint/shape", ("t2d", "i64")),
        (
            set_("t2d", lambda t: np.ones(VOCAB, np.bool_)),
            "draft/vocabulary-map",
            ("t2d", f"marks {VOCAB} tokens", f"{SIZE} ids", "token 4 is marked but has no id"),
        ),
        (
            set_("t2d", lambda t: np.zeros(VOCAB, np.bool_)),
            "draft/vocabulary-map",
            ("t2d", "marks 0 tokens", "token 0 has an id but"),
        ),
        (
            lambda t: t.update(d2t=np.arange(VOCAB - SIZE, VOCAB) - np.arange(SIZE)),
            "draft/vocabulary-map",
            ("t2d",),
        ),
        (lambda t: t.pop("d2t"), "draft/no-vocabulary-map", (str(SIZE), str(VOCAB), "d2t")),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:-1]}),
            "draft/vocabulary-size",
            (f"lm_head has {SIZE - 1} rows", f"draft_vocab_size is {SIZE}"),
        ),
        (
            lambda t: t.pop("lm_head.weight"),
            "bind/vocab-mismatch",
            (f"{SIZE} rows", "no lm_head", str(VOCAB), "head of its own"),
        ),
    ],
)
def test_refused(
    target: Path, draft: Path, change: Change, id: str, words: tuple[str, ...]
) -> None:
    def apply(tensors: Tensors) -> None:
        change(tensors)

    edit_tensors(draft, apply)
    with pytest.raises(InputError) as caught:
        lifted(target, draft)
    assert caught.value.id == id
    for word in words:
        assert word in str(caught.value)


def test_no_d2t_and_nobody_says_the_size(target: Path, draft: Path) -> None:
    """B09: 96 rows of a head alone would be ids of another vocabulary."""
    edit_json(draft / "config.json", draft_vocab_size=None)
    edit_tensors(draft, lambda t: {n: a for n, a in t.items() if n not in ("d2t", "t2d")})
    with pytest.raises(InputError, match="no d2t that says which token each row means") as caught:
        lifted(target, draft)
    assert caught.value.id == "draft/no-vocabulary-map"


def test_a_map_without_a_head(target: Path, draft: Path) -> None:
    edit_json(draft / "config.json", draft_vocab_size=None)
    edit_tensors(draft, lambda t: {n: a for n, a in t.items() if n != "lm_head.weight"})
    with pytest.raises(InputError, match=f"vocabulary has {SIZE} rows and it ships no lm_head"):
        lifted(target, draft)


def test_a_head_larger_than_the_vocabulary(target: Path, draft: Path) -> None:
    edit_json(draft / "config.json", draft_vocab_size=None)
    head = np.zeros((VOCAB + 1, 32), dtype=np.float32)
    edit_tensors(draft, lambda t: {**t, "lm_head.weight": head})
    with pytest.raises(InputError, match=f"lm_head has {VOCAB + 1} rows.* vocab_size {VOCAB}"):
        lifted(target, draft)


def test_only_padding(target: Path, tmp_path: Path) -> None:
    ids = range(NUM_TOKENS, VOCAB)
    draft = write_eagle3(tmp_path / "d", target_layer_ids=[0, 1, 2], draft_ids=ids)
    with pytest.raises(InputError, match="every id of the draft means a padding row") as caught:
        lifted(target, draft)
    assert caught.value.id == "draft/vocabulary-map"
