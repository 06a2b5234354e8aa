"""What a manifest says about engines: shown or opened only if it holds together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.tensorrt.artifact import check_engines
from edgecc.engine_facts import engine_facts, engine_lines
from edgecc.errors import BundleError
from helpers.lowered_pairs import write_pair
from helpers.simulated_bundle import artifact_of, lowered

VALUES: list[Any] = [None, -1, 0, 10**30, 1.5, True, "x", "../../x", [], [1], {}, {"a": 1}]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> dict[str, Any]:
    pair = write_pair(tmp_path_factory.mktemp("pair"), layers=1)
    found = artifact_of(lowered(*pair), "1.7.1")
    use = {"precision": "bf16", "bytes": 2, "bound_bytes": 0, "origin": "target: w"}
    for engine in found["engines"].values():
        engine["weights"] = {"target.w": dict(use)}
    return found


def test_what_the_compiler_writes(artifact) -> None:
    check_engines(artifact)


def _step(artifact: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = artifact["programs"]["target"][0]
    return found


def _shapes(artifact: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = artifact["engines"]["target.body"]["profiles"][1]["shapes"]
    return found


CHANGES = {
    "an input that no engine takes": lambda a: a["entries"]["target"]["inputs"].append(
        {"name": "s", "role": "kv_cache", "dtype": "bf16", "shape": ["b", 2, 4, 4]}
    ),
    "a cache that nothing updates": lambda a: [
        o.update(alias=None) for o in a["entries"]["target"]["outputs"]
    ],
    "an input that the step lacks": lambda a: _step(a)["inputs"].pop("cache_length"),
    "an input that the engine lacks": lambda a: _step(a)["inputs"].update(more="token_ids"),
    "an output that the engine lacks": lambda a: _step(a)["outputs"].update(more="more"),
    "a profile without an input": lambda a: _shapes(a).pop("token_ids"),
    "a profile with a fixed input": lambda a: _shapes(a).update(cache_length=[[1], [1], [1]]),
    "a profile of another rank": lambda a: _shapes(a)["token_ids"][1].append(1),
    "a profile with another fixed size": lambda a: _shapes(a)["token_ids"].__setitem__(2, [2, 16]),
    "a profile with an open size": lambda a: _shapes(a)["token_ids"].__setitem__(0, [1, -1]),
    "no profiles": lambda a: a["engines"]["target.body"].update(profiles=[]),
    "no sizes": lambda a: a["engines"]["lm_head"].pop("weight_bytes"),
    "a weight without a precision": lambda a: a["engines"]["lm_head"]["weights"].update(w={}),
    "a weight from nowhere": lambda a: a["engines"]["lm_head"]["weights"]["target.w"].pop("origin"),
    "a key that is a path": lambda a: a["engines"]["lm_head"].update(key="../../etc"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_contradiction(artifact, change: str) -> None:
    damaged = copy.deepcopy(artifact)
    CHANGES[change](damaged)
    with pytest.raises(BundleError, match="manifest is damaged") as caught:
        check_engines(damaged)
    assert caught.value.exit_code == 3
    assert caught.value.diagnostics[0].help


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested JSON but the outermost."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [p for key, item in items for p in ((*path, key), *places(item, (*path, key)))]


@given(data=st.data())
def test_inspect_shows_any_manifest_or_refuses_it(artifact, data) -> None:
    damaged = copy.deepcopy(artifact)
    everywhere = [p for p in places(artifact) if p != ("backend",)]
    for *path, key in data.draw(st.lists(st.sampled_from(everywhere), min_size=1, max_size=2)):
        try:
            place: Any = damaged
            for step in path:
                place = place[step]
            place[key] = data.draw(st.sampled_from(VALUES))
        except (KeyError, IndexError, TypeError):  # the first change removed it
            continue
    try:
        facts = engine_facts({"sm120": damaged})
    except BundleError:
        return
    for weights in (False, True):
        assert all(isinstance(line, str) for line in engine_lines(facts, weights=weights))
