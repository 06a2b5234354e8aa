"""Commands with models of the hub, as processes with the variables that users set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgecc.backends.bundle import Bundle
from edgecc.bundle_cache import bundle_key
from edgecc.contract.report import check
from edgecc.errors import HubError
from edgecc.hub import checkpoint_folder
from helpers.checkpoints import edit_json
from helpers.command_line import environment, in_process, process
from helpers.hub_server import Hub
from helpers.serving import served

TARGET, DRAFT = "org/tiny-target", "org/tiny-draft"


def test_from_a_name_to_a_bundle(hub: Hub, tmp_path: Path) -> None:
    """Check, compile and look at a pair of which nothing is here; then again without a network."""
    env = environment(HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="0")
    checked = process("check", TARGET, "--draft", DRAFT, "--json", env=env)
    assert checked.code == 0, checked.err
    commits = {name: hub.models[name]["main"] for name in (TARGET, DRAFT)}
    report = json.loads(checked.out)
    for role, name in (("target", TARGET), ("draft", DRAFT)):
        assert f"{role}: {name}@{commits[name]}, from the hub" in report["decisions"]

    out = tmp_path / "bundle"
    config = json.dumps({"method": "dspark", "model": DRAFT, "revision": "main"})
    arguments = ("compile", TARGET, "--speculative-config", config, "-o", out)
    made = process(*arguments, env=env)
    assert made.code == 0, made.err
    provenance = Bundle.open(out).manifest["provenance"]
    for role, name in (("target", TARGET), ("draft", DRAFT)):
        assert provenance[role]["name"] == name.partition("/")[2]
        assert provenance[role]["repository"] == name
        assert provenance[role]["commit"] == commits[name]
    shown = process("inspect", out, env=env)
    assert f"{'repository':<30}  {TARGET}" in shown.out
    assert f"{'commit':<30}  {commits[DRAFT]}" in shown.out

    hub.failing = 503
    offline = env | {"HF_HUB_OFFLINE": "1"}
    again = process(*arguments, "--dry-run", "--json", env=offline)
    assert again.code == 0, again.err
    assert report["decisions"][:2] == json.loads(again.out)["decisions"][:2]
    missing = process("check", "org/other", env=offline)
    assert (missing.code, missing.id) == (7, "hub/offline")
    assert "Traceback" not in missing.err


def test_a_check_of_headers(hub: Hub, pair: tuple[Path, Path]) -> None:
    """The same report as of the folder; the weights stay where they are."""
    local, remote = check(*pair), check(TARGET, DRAFT)
    assert remote.table == local.table
    assert [f.diagnostic for f in remote.findings] == [f.diagnostic for f in local.findings]
    assert remote.exit_code == 0
    assert not any(
        path.endswith(".safetensors") and method == "HEAD" for method, path, _ in hub.log
    )


def test_a_check_without_a_model(hub: Hub) -> None:
    with pytest.raises(HubError):
        check("org/none", DRAFT)


def test_a_lifted_pair_names_the_snapshot(
    hub: Hub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    edgecc = in_process(capsys)
    text = tmp_path / "pair.eir"
    assert edgecc("lift", TARGET, "--draft", DRAFT, "-o", text).code == 0
    assert f"snapshots/{hub.models[TARGET]['main']}" in text.read_text()
    assert edgecc("opt", text, "-p", "bind-shared-weights").code == 0


def test_inspecting_a_model(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    edgecc = in_process(capsys)
    facts = json.loads(edgecc("inspect", f"{DRAFT}@main", "--json").out)
    assert facts["kind"] == "draft checkpoint"
    assert (facts["repository"], facts["commit"]) == (DRAFT, hub.models[DRAFT]["main"])
    assert sorted(facts["borrows"]) == ["embed_tokens", "lm_head"]
    failed = edgecc("inspect", "org/none")
    assert (failed.code, failed.id) == (7, "hub/not-found")


def test_the_key_of_a_served_bundle_has_the_commit(
    hub: Hub, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Another commit with the same files is another version: its bundle says so."""
    first = checkpoint_folder(TARGET, "target")
    hub.add(TARGET, pair[0])
    second = checkpoint_folder(TARGET, "target")
    assert first != second
    keys = {bundle_key(folder, None, {}) for folder in (first, second, first)}
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"revision": "main"}, "goes with a model"),
        ({"model": "org/x@v1", "revision": "v2"}, "goes with a model"),
        ({"model": "org/x", "revision": 3}, "must be a string"),
    ],
)
def test_a_revision_needs_a_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: dict[str, object], says: str
) -> None:
    result = in_process(capsys)(
        "compile", tmp_path, "--speculative-config", json.dumps(config), "-o", tmp_path / "out"
    )
    assert (result.code, result.id) == (2, "usage/speculative-config")
    assert says in result.err


def test_a_bad_model_of_the_hub(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong with it is told as of a folder."""
    edit_json(hub.folders[hub.models[DRAFT]["main"]] / "config.json", markov_rank=16)
    result = in_process(capsys)("check", TARGET, "--draft", DRAFT)
    assert (result.code, result.id) == (3, "draft/markov-rank")


@pytest.mark.slow
def test_a_served_model(hub: Hub, tmp_path: Path) -> None:
    """The command that names two models of the hub, and nothing else; then again from the cache."""
    httpx = pytest.importorskip("httpx")
    config = json.dumps({"method": "dspark", "model": DRAFT, "num_speculative_tokens": 3})
    arguments = (TARGET, "--speculative-config", config, "--cache-dir", tmp_path / "kept")
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    with served(*arguments, "--max-model-len", "64", **variables) as server:
        (model,) = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
        assert model["id"] == TARGET
        body = {"model": TARGET, "prompt": "a", "max_tokens": 2}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200
    (bundle,) = (tmp_path / "kept" / "bundles").glob("tiny-target-*")
    commit = Bundle.open(bundle).manifest["provenance"]["draft"]["commit"]
    assert commit == hub.models[DRAFT]["main"]
    variables |= {"HF_HUB_OFFLINE": "1"}
    with served(*arguments, "--max-model-len", "64", **variables) as server:
        assert server.url
        assert not any("compiling" in line for line in server.lines)
