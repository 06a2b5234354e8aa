"""The head is stored once: on disk, in memory, and as one engine that both programs call.

The head is made so large that nothing else matters: 65,536 x 1,024 weights, 38 MB packed, 268 MB
expanded. Every bound is asserted from both sides: a bundle compiled with `lm_head="copy"` must show
the second head that the shared bundle must not have.
"""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

import edgecc
from edgecc.backends.bundle import Bundle
from edgecc.roles import Role
from helpers.checkpoints import write_draft
from helpers.large import write_large_target
from helpers.lowered_pairs import (
    FORMS,
    REAL_DRAFT,
    REAL_TARGET,
    Array,
    LoweredPair,
    draft_inputs,
    target_inputs,
)

VOCAB, HIDDEN = 65536, 1024
PACKED_HEAD = VOCAB * HIDDEN // 2 + VOCAB * HIDDEN // 16 + 4
EXPANDED_HEAD = 4 * VOCAB * HIDDEN
EMBEDDING = 2 * VOCAB * HIDDEN
HEAD = "target.lm_head.weight"


@dataclass(frozen=True)
class Bundles:
    """One target compiled alone, with a draft, and with a draft that gets a copy of the head."""

    alone: Bundle
    pair: Bundle
    copy: Bundle
    target: Path
    draft: Path


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    folder = tmp_path_factory.mktemp("sharing")
    target = write_large_target(
        folder / "target",
        hidden=HIDDEN,
        layers=2,
        heads=4,
        kv_heads=2,
        intermediate=256,
        vocab=VOCAB,
    )
    draft = write_draft(
        folder / "draft",
        hidden=HIDDEN,
        layers=1,
        intermediate=256,
        vocab=VOCAB,
        mask_token_id=VOCAB - 1,
        target_layer_ids=(0, 1),
        target_layers=2,
    )

    def compiled(name: str, with_draft: bool, lm_head: str) -> Bundle:
        report = edgecc.compile(
            target,
            draft if with_draft else None,
            out=folder / name,
            lm_head=lm_head,
            max_model_len=64,
            prefill_chunk=16,
            verify="none",
        )
        assert report.bundle is not None
        return report.bundle

    return Bundles(
        compiled("alone", False, "auto"),
        compiled("pair", True, "auto"),
        compiled("copy", True, "copy"),
        target,
        draft,
    )


def weight_files(bundle: Bundle) -> list[Path]:
    return sorted(bundle.path.rglob("*.safetensors"))


def weight_bytes(bundle: Bundle) -> int:
    return sum(path.stat().st_size for path in weight_files(bundle))


def occurrences(path: Path, stretch: bytes) -> int:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found, count = content.find(stretch), 0
        while found >= 0:
            count, found = count + 1, content.find(stretch, found + 1)
    return count


def stretches(checkpoint: Path, name: str) -> list[bytes]:
    """64 bytes at the start, in the middle and at the end of a tensor."""
    with (checkpoint / "model.safetensors").open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(length))[name]["data_offsets"]
        found = []
        for place in (begin, (begin + end) // 128 * 64, end - 64):
            file.seek(8 + length + place)
            found.append(file.read(64))
    return found


# --- on disk --------------------------------------------------------------------------------------


def test_a_draft_adds_its_own_bytes_only(bundles: Bundles) -> None:
    own = (bundles.draft / "model.safetensors").stat().st_size
    added = weight_bytes(bundles.pair) - weight_bytes(bundles.alone)
    assert 0.95 * own < added < own + 0.02 * PACKED_HEAD


def test_a_copy_adds_exactly_what_the_draft_borrows(bundles: Bundles) -> None:
    """`lm_head="copy"` copies the head, packed, and the embedding."""
    added = weight_bytes(bundles.copy) - weight_bytes(bundles.pair)
    names = len("draft.lm_head.weight.copy") * 20
    assert 0 <= added - PACKED_HEAD - EMBEDDING < names


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_head.weight_scale"])
def test_head_bytes_occur_once(name: str, bundles: Bundles) -> None:
    for stretch in stretches(bundles.target, name):
        counts = {
            which: sum(occurrences(f, stretch) for f in weight_files(bundle))
            for which, bundle in (
                ("alone", bundles.alone),
                ("pair", bundles.pair),
                ("copy", bundles.copy),
            )
        }
        assert counts == {"alone": 1, "pair": 1, "copy": 2}


def test_embedding_bytes_occur_once(bundles: Bundles) -> None:
    stretch = stretches(bundles.target, "model.embed_tokens.weight")[1]
    assert sum(occurrences(f, stretch) for f in weight_files(bundles.pair)) == 1
    assert sum(occurrences(f, stretch) for f in weight_files(bundles.copy)) == 2


def test_manifest_names_what_is_shared(bundles: Bundles) -> None:
    def shared(bundle: Bundle) -> dict[str, tuple[str, int]]:
        return {s["symbol"]: (s["role"], s["bytes"]) for s in bundle.manifest["shared"]}

    assert shared(bundles.alone) == shared(bundles.copy) == {}
    assert shared(bundles.pair) == {
        HEAD: ("lm_head", PACKED_HEAD),
        "target.model.embed_tokens.weight": ("embed_tokens", EMBEDDING),
    }
    for entry in bundles.pair.manifest["shared"]:
        assert entry["users"] == ["draft", "target"]


# --- one engine for both --------------------------------------------------------------------------


def users_of(bundle: Bundle, tensor: str) -> list[str]:
    """Models with an initializer at the place of a tensor in the weight file."""
    artifact = bundle.artifact("cpu")
    offset = str(artifact["tensors"][tensor]["offset"])
    users = []
    for name, model in artifact["models"].items():
        proto = onnx.load(str(bundle.path / model["file"]), load_external_data=False)
        places = [{e.key: e.value for e in i.external_data} for i in proto.graph.initializer]
        parts = [part for item in model["expand"] for part in item["parts"].values()]
        if tensor in parts or any(place.get("offset") == offset for place in places):
            users.append(name)
    return users


def callers(bundle: Bundle, model: str) -> dict[str, int]:
    programs = bundle.artifact("cpu")["programs"]
    return {
        name: sum(step["graph"] == model for step in program) for name, program in programs.items()
    }


def test_one_model_refers_to_the_head(bundles: Bundles) -> None:
    for tensor in (HEAD, "target.lm_head.weight_scale"):
        assert users_of(bundles.pair, tensor) == ["lm_head"]
    assert callers(bundles.pair, "lm_head") == {"target": 1, "draft": 1}
    # Rows of the embedding are read from the mapped file by both.
    assert sorted(users_of(bundles.pair, "target.model.embed_tokens.weight")) == [
        "draft.body",
        "target.body",
    ]
    (owner,) = users_of(bundles.copy, HEAD)
    assert callers(bundles.copy, owner) == {"target": 1, "draft": 0}


@pytest.fixture(scope="module", params=FORMS)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoweredPair:
    device, form = FORMS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return LoweredPair(folder, REAL_TARGET, REAL_DRAFT, device=device, form=form)


def test_drafting_and_verifying_head_give_the_same_bits(real: LoweredPair) -> None:
    """Each path's hidden rows through the other path's call: 7 slots at once, or one row."""
    engine = real.engine()
    sessions = engine._sessions
    ids = np.random.default_rng(6).integers(0, 4000, 12).tolist()
    target = engine.entry("target").run(target_inputs(ids, 0), [Role.LOGITS, Role.HIDDEN_TAP])
    logits, taps = target[Role.LOGITS].copy(), target[Role.HIDDEN_TAP][0].copy()
    drafted = engine.entry("draft").run(draft_inputs(taps, ids[-1], 0), [Role.BASE_LOGITS])
    base = drafted[Role.BASE_LOGITS].copy()

    slots = hidden_of(real, "draft", draft_inputs(taps, ids[-1], 0))
    rows = hidden_of(real, "target", target_inputs(ids, 0))
    assert slots.shape == (1, 7, 256)
    assert rows.shape == (1, 12, 256)
    for slot in range(7):  # as a plain step of the target calls it
        (alone,) = sessions["lm_head"].run(None, {"hidden": slots[:, slot : slot + 1]})
        assert alone.tobytes() == base[:, slot : slot + 1].tobytes()
    for first in range(0, 12 - 6):  # as the draft calls it
        (block,) = sessions["lm_head"].run(None, {"hidden": rows[:, first : first + 7]})
        assert block.tobytes() == logits[:, first : first + 7].tobytes()
    mixed = np.concatenate([slots, rows], axis=1)
    (both,) = sessions["lm_head"].run(None, {"hidden": mixed})
    assert both.tobytes() == np.concatenate([base, logits], axis=1).tobytes()


def hidden_of(pair: LoweredPair, entry: str, inputs: dict[Role, Array]) -> Array:
    """What an entry hands to the head: its first model run by itself, on empty caches."""
    artifact = pair.artifact.manifest
    step, head = artifact["programs"][entry][:2]
    assert head["graph"] == "lm_head"
    feeds = {}
    for port in artifact["entries"][entry]["inputs"]:
        role = Role(port["role"])
        if role is Role.KV_CACHE:
            feeds[port["name"]] = np.zeros([1, *port["shape"][1:]], np.float32)
        else:
            feeds[port["name"]] = inputs[role]
    wanted = {value: name for name, value in step["outputs"].items()}[head["inputs"]["hidden"]]
    session = pair.engine()._sessions[step["graph"]]
    named = {name: feeds[value] for name, value in step["inputs"].items()}
    (hidden,) = session.run([wanted], named)
    made: Array = hidden
    return made


# --- in memory ------------------------------------------------------------------------------------

MEASURE = """
import ctypes, gc, json, sys
import edgecc
with edgecc.load(sys.argv[1], num_threads=1) as generator:
    tokens = generator.generate(token_ids=[1, 2, 3, 4, 5], max_new_tokens=6).token_ids
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/smaps_rollup") as file:
        fields = dict(line.split(":") for line in list(file)[1:])
print(json.dumps({k: 1024 * int(v.split()[0]) for k, v in fields.items()} | {"tokens": tokens}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_holds_one_head(bundles: Bundles) -> None:
    """Pss of a process that has loaded a bundle and generated: anonymous, and with mapped files."""

    def measure(bundle: Bundle) -> dict[str, int]:
        command = [sys.executable, "-c", MEASURE, str(bundle.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        result: dict[str, int] = json.loads(done.stdout)
        return result

    alone, pair, copy = (measure(b) for b in (bundles.alone, bundles.pair, bundles.copy))
    assert pair["tokens"] == alone["tokens"] == copy["tokens"]
    # The measure sees a head when there is one.
    assert alone["Pss_Anon"] > EXPANDED_HEAD
    for kind in ("Pss_Anon", "Pss"):
        assert pair[kind] - alone[kind] < 0.3 * EXPANDED_HEAD
        assert 0.7 * EXPANDED_HEAD < copy[kind] - pair[kind] < 1.3 * EXPANDED_HEAD
