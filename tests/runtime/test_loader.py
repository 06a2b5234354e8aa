"""Opening bundles: which engine, which device, with or without text."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import edgecc.backends.runtime as runtime
from edgecc.backends.runtime import loader
from edgecc.errors import BundleError, UnsupportedError

from .fakes import FakeEngine, make_pair

PAIR = Path(__file__).parents[1] / "data" / "pairs" / "tiny-qwen3-nvfp4"


def ports(*roles: str) -> list[dict[str, Any]]:
    return [{"name": role, "role": role, "dtype": "i64", "shape": ["b"]} for role in roles]


def outputs(*roles: str) -> list[dict[str, Any]]:
    return [{**port, "alias": None} for port in ports(*roles)]


def write_bundle(
    directory: Path,
    *,
    tokenizer: bool = True,
    edit: Callable[[dict[str, Any]], object] | None = None,
) -> Path:
    """A bundle with a manifest, tokenizer files, and no graphs: the engine is a fake."""
    files = {}
    if tokenizer:
        (directory / "tokenizer").mkdir(parents=True)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            data = (PAIR / name).read_bytes()
            (directory / "tokenizer" / name).write_bytes(data)
            digest = hashlib.sha256(data).hexdigest()
            files[f"tokenizer/{name}"] = {"bytes": len(data), "sha256": digest}
    manifest: dict[str, Any] = {
        "format": "edgecc-bundle",
        "version": 1,
        "producer": "edgecc 0.1.0",
        "target": {
            "model_type": "qwen3",
            "hidden_size": 256,
            "num_layers": 8,
            "vocab_size": 4096,
            "num_tokens": 4095,
            "eos_token_ids": [4094, 4092],
            "max_position_embeddings": 4096,
        },
        "draft": {
            "method": "dspark",
            "block_size": 7,
            "num_speculative_tokens": 5,
            "slot_layout": "anchor-predicts",
            "mask_token_id": 4095,
            "target_layer_ids": [1, 3, 5],
            "max_position_embeddings": 2048,
        },
        "limits": {
            "max_model_len": 64,
            "max_input_len": 48,
            "prefill_chunk": 8,
            "max_batch_size": 1,
        },
        "entries": {
            "target": {
                "inputs": ports("token_ids", "cache_length", "logit_rows"),
                "outputs": outputs("logits", "hidden_tap"),
            },
            "draft": {
                "inputs": ports("features", "anchor", "cache_length"),
                "outputs": outputs("proposals"),
            },
        },
        "artifacts": {"cpu": {"backend": "fake", "graphs": {"target": "cpu-target.onnx"}}},
        "weights": {},
        "shared": [],
        "provenance": {
            "target": {"name": "t", "files": {}},
            "draft": {"name": "d", "files": {}},
            "pipeline": "",
            "options": {},
        },
        "decisions": [],
        "files": files,
    }
    if edit is not None:
        edit(manifest)
    directory.mkdir(exist_ok=True)
    (directory / "bundle.json").write_text(json.dumps(manifest), encoding="utf-8")
    return directory


class FakeEngineModule(ModuleType):
    """An engine's module that remembers how it was called."""

    def __init__(self) -> None:
        super().__init__("edgecc_fake_engine")
        pair = make_pair(vocab_size=4096, num_tokens=4095, proposals=7)
        self.engine = FakeEngine(pair.engine.target, pair.engine.draft)
        self.calls: list[tuple[Any, ...]] = []

    def open_engine(
        self, bundle: Any, artifact: Mapping[str, Any], *, num_threads: int | None, progress: Any
    ) -> FakeEngine:
        self.calls.append((bundle.path, dict(artifact), num_threads, progress))
        return self.engine


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> FakeEngineModule:
    fake = FakeEngineModule()
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(loader, "ENGINES", {"fake": fake.__name__, "gone": "edgecc.no_such_engine"})
    return fake


def test_what_a_bundle_says_of_images() -> None:
    example = Path(__file__).parents[1] / "backends" / "bundle.example.json"
    manifest = json.loads(example.read_text("utf-8"))
    images = runtime.ModelInfo.from_manifest(manifest).images
    assert images is not None
    assert (images.factor, images.max_tokens, images.image_token_id) == (32, 255, 10)
    assert (images.mean, images.grid_size) == ((0.5, 0.5, 0.5), 48)
    del manifest["vision"]
    assert runtime.ModelInfo.from_manifest(manifest).images is None


def test_a_bundle_becomes_a_generator(tmp_path: Path, module: FakeEngineModule) -> None:
    def progress(stage: str, done: int, total: int) -> None: ...

    with runtime.load(write_bundle(tmp_path / "b"), num_threads=3, progress=progress) as generator:
        artifact = {"backend": "fake", "graphs": {"target": "cpu-target.onnx"}}
        assert module.calls == [(tmp_path / "b", artifact, 3, progress)]
        assert generator.model == runtime.ModelInfo(
            vocab_size=4096,
            num_tokens=4095,
            eos_token_ids=frozenset({4092, 4094}),
            max_model_len=64,
            max_input_len=48,
            prefill_chunk=8,
            draft=runtime.DraftInfo(5, 7, 2048),
        )
        assert generator.tokenizer.encode("<|im_end|>") == [4094]
        assert generator.chat.names == ["default"]
        found = generator.generate(messages=[{"role": "user", "content": "hi"}], max_new_tokens=9)
        assert found.prompt_tokens == 9
    assert module.engine.closed == 1


def test_a_bundle_without_text(tmp_path: Path, module: FakeEngineModule) -> None:
    generator = runtime.load(str(write_bundle(tmp_path / "b", tokenizer=False)))
    assert generator.generate(token_ids=[1], max_new_tokens=3).text == ""
    assert generator.chat.names == []


def test_a_bundle_without_a_draft(tmp_path: Path, module: FakeEngineModule) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        manifest["draft"] = None
        del manifest["entries"]["draft"]

    generator = runtime.load(write_bundle(tmp_path / "b", edit=edit))
    assert generator.model.draft is None
    assert generator.generate(token_ids=[1], max_new_tokens=3).stats.proposed == 0


@pytest.mark.parametrize(
    ("devices", "asked", "chosen"),
    [
        (["rtx"], None, "rtx"),
        (["rtx", "cpu"], None, "cpu"),
        (["rtx", "cpu"], "rtx", "rtx"),
        (["rtx", "sm87"], None, "bundle/device-not-chosen"),
        ([], None, "bundle/device-not-chosen"),
        (["cpu"], "rtx", "bundle/no-artifact"),
    ],
)
def test_the_device(
    tmp_path: Path, module: FakeEngineModule, devices: list[str], asked: str | None, chosen: str
) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        manifest["artifacts"] = {name: {"backend": "fake", "for": name} for name in devices}

    bundle = write_bundle(tmp_path / "b", edit=edit)
    if "/" in chosen:
        with pytest.raises(BundleError) as caught:
            runtime.load(bundle, device=asked)
        assert caught.value.id == chosen
        assert all(name in str(caught.value) for name in devices)
    else:
        runtime.load(bundle, device=asked)
        assert module.calls[0][1]["for"] == chosen


@pytest.mark.parametrize(
    ("backend", "identifier", "part"),
    [
        ("fakes", "runtime/unknown-engine", "did you mean 'fake'"),
        ("os", "runtime/unknown-engine", "valid: fake, gone"),
        ("gone", "runtime/engine-not-installed", "pip install"),
    ],
)
def test_engines_that_cannot_be_used(
    tmp_path: Path, module: FakeEngineModule, backend: str, identifier: str, part: str
) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        manifest["artifacts"]["cpu"]["backend"] = backend

    with pytest.raises(UnsupportedError, match=part) as caught:
        runtime.load(write_bundle(tmp_path / "b", edit=edit))
    assert caught.value.id == identifier


def test_a_draft_of_another_kind(tmp_path: Path, module: FakeEngineModule) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        manifest["entries"]["draft"]["inputs"] = ports("token_ids", "cache_length")

    with pytest.raises(UnsupportedError, match="anchor, features") as caught:
        runtime.load(write_bundle(tmp_path / "b", edit=edit))
    assert caught.value.id == "runtime/unsupported-draft"


def test_a_draft_without_the_tokens_of_its_method(tmp_path: Path, module: FakeEngineModule) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        manifest["draft"]["method"] = "eagle3"

    with pytest.raises(UnsupportedError, match=r"no eagle3 draft .* lacks next_token_ids"):
        runtime.load(write_bundle(tmp_path / "b", edit=edit))


def test_a_draft_of_an_unknown_method(tmp_path: Path, module: FakeEngineModule) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        manifest["draft"]["method"] = "eagle"

    with pytest.raises(UnsupportedError, match="does not drive drafts of method eagle") as caught:
        runtime.load(write_bundle(tmp_path / "b", edit=edit))
    assert caught.value.id == "runtime/unsupported-draft"
    assert "did you mean 'eagle3'?" in caught.value.diagnostics[0].help


def test_an_engine_without_an_entry_is_closed(
    tmp_path: Path, module: FakeEngineModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry(name: str) -> None:
        raise BundleError("bundle/no-entry", f"the bundle has no entry {name!r}")

    monkeypatch.setattr(module.engine, "entry", entry)
    with pytest.raises(BundleError, match="no entry"):
        runtime.load(write_bundle(tmp_path / "b"))
    assert module.engine.closed == 1


def test_every_known_engine_is_one_of_ours() -> None:
    assert {n: f"edgecc.backends.{n}" for n in ("onnxruntime", "tensorrt")} == loader.ENGINES


def test_the_runtime_starts_without_the_compiler() -> None:
    code = (
        "import sys, edgecc.backends.runtime\n"
        "heavy = ['edgecc.ir', 'edgecc.passes', 'edgecc.frontends', 'edgecc.backends.onnx',\n"
        "         'onnx', 'onnxruntime', 'onnxscript', 'networkx', 'torch']\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout == "[]\n"


def test_all_lists_what_the_package_offers() -> None:
    public = {
        name
        for name, value in vars(runtime).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }
    assert set(runtime.__all__) == public
    assert runtime.__all__ == sorted(runtime.__all__)
