"""Images at the command line: compiling the tower, `run --image`, and what goes wrong."""

from __future__ import annotations

import json
import re
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgecc as package
from helpers.byte_tokenizer import write_tokenizer
from helpers.checkpoints import write_draft
from helpers.command_line import Command
from helpers.hybrid import FULL, LINEAR, HybridSizes
from helpers.vision import IMAGE, write_vision_target

Image = pytest.importorskip("PIL.Image")

PLACEHOLDER = "<|image_pad|>"
SHORT = ("--max-new-tokens", 12, "--ignore-eos")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("images")
    target = write_vision_target(folder / "t", text=HybridSizes(layer_types=(LINEAR, FULL)))
    write_tokenizer(target, images=True)
    draft = write_draft(folder / "d", hidden=32, layers=1, target_layers=2, target_layer_ids=(0, 1))
    return target, draft


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, checkpoints: tuple[Path, Path]) -> Path:
    """The pair with its tower: prompts of 60 tokens, calls of 8."""
    out = tmp_path_factory.mktemp("images") / "bundle"
    sizes = {"max_model_len": 96, "max_input_len": 60, "prefill_chunk": 8}
    package.compile(*checkpoints, out=out, components="all", **sizes)
    return out


@pytest.fixture(scope="module")
def cat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A picture of 15 tokens."""
    return picture(tmp_path_factory.mktemp("cat") / "cat.png", 24, 40)


def picture(path: Path, height: int, width: int, seed: int = 0) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def tokens(edgecc: Command, bundle: Path, *flags: object) -> list[int]:
    result = edgecc("run", bundle, "--json", *SHORT, *flags)
    assert result.code == 0, result.err
    found: list[int] = json.loads(result.out)["token_ids"]
    return found


def test_compile(edgecc: Command, tmp_path: Path, checkpoints: tuple[Path, Path]) -> None:
    """The tower is an entry of the bundle, its weights lie there once, and it is checked."""
    out = tmp_path / "bundle"
    flags = ["--components", "target,draft,vision", "--max-model-len", 96]
    result = edgecc("compile", checkpoints[0], "--draft", checkpoints[1], "-o", out, *flags)
    assert result.code == 0, result.err
    assert "checked image features: ok" in result.err
    assert "checked target logits: ok" in result.err
    manifest = json.loads((out / "bundle.json").read_text("utf-8"))
    assert set(manifest["entries"]) == {"target", "draft", "vision"}
    assert manifest["provenance"]["options"]["components"] == "target,draft,vision"
    tower = {s: w for s, w in manifest["weights"].items() if "model.visual." in s}
    assert {w["file"] for w in tower.values()} == {"weights/weights.safetensors"}
    assert all(w["users"] == ["vision"] for w in tower.values())
    inspected = edgecc("inspect", out).out
    assert re.search(r"^images\n(  .*\n)*  max_image_tokens +64$", inspected, re.MULTILINE)
    result = edgecc("verify", out, "--prompts", 1, "--max-new-tokens", 6)
    assert result.code == 0, result.err
    assert "image features: ok" in result.err
    assert re.search(r"with 4 proposals, prompt of \d+ tokens with an image: ok", result.err)


def test_text_is_the_default(
    edgecc: Command, tmp_path: Path, checkpoints: tuple[Path, Path], cat: Path
) -> None:
    """A text bundle is smaller, and says how to make one that reads images."""
    out = tmp_path / "bundle"
    result = edgecc("compile", checkpoints[0], "-o", out, "--max-model-len", 96)
    assert "the bundle reads text only; images take --components all" in result.err
    manifest = json.loads((out / "bundle.json").read_text("utf-8"))
    assert set(manifest["entries"]) == {"target"}
    assert not [s for s in manifest["weights"] if "visual" in s]
    assert "none: text only" in edgecc("inspect", out).out
    result = edgecc("run", out, "--image", cat, "--prompt", "a")
    assert (result.code, result.id) == (2, "request/no-vision")
    assert "--components all" in result.err


def test_dry_run(edgecc: Command, tmp_path: Path, checkpoints: tuple[Path, Path]) -> None:
    out = tmp_path / "bundle"
    flags = ["--components", "all", "--dry-run", "-o", out]
    result = edgecc("compile", checkpoints[0], *flags)
    assert result.code == 0, result.err
    assert re.search(r"^  vision +[\d.]+", result.err, re.MULTILINE)
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "id", "text"),
    [
        (["--components", "vison"], "usage/components", "did you mean 'vision'?"),
        (["--components", "target,draft"], "usage/components", "none is given"),
        (["--components", "vision"], "usage/components", "add target to the list"),
    ],
)
def test_bad_components(
    edgecc: Command,
    tmp_path: Path,
    checkpoints: tuple[Path, Path],
    flags: list[str],
    id: str,
    text: str,
) -> None:
    result = edgecc("compile", checkpoints[0], "-o", tmp_path / "bundle", *flags)
    assert (result.code, result.id) == (2, id)
    assert text in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_without_placeholder(
    edgecc: Command, tmp_path: Path, checkpoints: tuple[Path, Path]
) -> None:
    target = write_vision_target(tmp_path / "t", text=HybridSizes(layer_types=(LINEAR, FULL)))
    write_tokenizer(target)
    result = edgecc("compile", target, "--components", "all", "-o", tmp_path / "bundle")
    assert (result.code, result.id) == (3, "vision/placeholder")
    assert not (tmp_path / "bundle").exists()


def test_images_come_before_a_prompt(edgecc: Command, seeing: Path, cat: Path) -> None:
    """All ways to say the same; what the image is matters, and what the text is."""
    dog = picture(cat.with_name("dog.png"), 16, 16, seed=1)
    expected = tokens(edgecc, seeing, "--prompt", "What?", "--image", cat)
    around = f"<|vision_start|>{PLACEHOLDER}<|vision_end|>"
    ids = [259, IMAGE, 260, *b"What?"]
    assert tokens(edgecc, seeing, "--prompt", f"{around}What?", "--image", cat) == expected
    listed = ",".join(map(str, ids))
    assert tokens(edgecc, seeing, "--token-ids", listed, "--image", cat) == expected
    with package.load(seeing) as generator:
        found = generator.generate("What?", images=[cat], max_new_tokens=12, ignore_eos=True)
        assert found.token_ids == expected
        assert found.prompt_tokens == 15 + 2 + 5
    assert tokens(edgecc, seeing, "--prompt", "What?", "--image", dog) != expected
    assert tokens(edgecc, seeing, "--prompt", "What?") != expected
    both = [("--image", cat, "--image", dog), ("--image", dog, "--image", cat)]
    found_both = [tokens(edgecc, seeing, "--prompt", "What?", *flags) for flags in both]
    assert found_both[0] != found_both[1]


def test_images_of_a_chat(edgecc: Command, seeing: Path, cat: Path) -> None:
    found = tokens(edgecc, seeing, "--chat", "Hm?", "--image", cat)
    parts = [{"type": "image", "image": str(cat)}, {"type": "text", "text": "Hm?"}]
    with package.load(seeing) as generator:
        expected = generator.generate(
            messages=[{"role": "user", "content": parts}], max_new_tokens=12, ignore_eos=True
        )
    assert found == expected.token_ids


def test_speculation_changes_nothing(edgecc: Command, seeing: Path, cat: Path) -> None:
    flags = ("--prompt", "Tell me", "--image", cat)
    plain = tokens(edgecc, seeing, *flags, "--no-speculation")
    for proposals in (1, 3, 4):
        assert tokens(edgecc, seeing, *flags, "-k", proposals) == plain


def test_an_image_alone(edgecc: Command, seeing: Path, cat: Path) -> None:
    assert len(tokens(edgecc, seeing, "--prompt", "", "--image", cat)) == 12


def bomb(path: Path) -> Path:
    """A PNG of some bytes that says it has ten billion pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        ends = struct.pack(">I", len(data)), struct.pack(">I", zlib.crc32(kind + data))
        return ends[0] + kind + data + ends[1]

    head = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + body + chunk(b"IEND", b""))
    return path


def truncated(path: Path) -> Path:
    picture(path, 24, 40)
    path.write_bytes(path.read_bytes()[:300])
    return path


def words(path: Path) -> Path:
    path.write_text("not a picture", "utf-8")
    return path


@pytest.mark.parametrize(
    ("make", "code", "id", "help"),
    [
        (bomb, 2, "image/too-large", "make it smaller"),
        (truncated, 2, "image/damaged", "truncated or damaged"),
        (words, 2, "image/unknown-format", "formats: BMP"),
        (lambda path: path, 2, "image/unreadable", "No such file"),
        (lambda path: path.parent, 2, "image/unreadable", "Is a directory"),
        (lambda path: picture(path, 1, 300), 2, "image/aspect-ratio", "cut the image"),
        (lambda path: picture(path, 64, 64), 2, "image/too-many-tokens", "--max-input-len"),
    ],
)
def test_bad_images(
    edgecc: Command,
    tmp_path: Path,
    seeing: Path,
    make: Callable[[Path], Path],
    code: int,
    id: str,
    help: str,
) -> None:
    path = make(tmp_path / "x.png")
    result = edgecc("run", seeing, "--prompt", "a", "--image", path)
    assert (result.code, result.id, result.out) == (code, id, "")
    assert help in result.err
    assert str(path) in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("prompt", "count", "id", "text"),
    [
        (PLACEHOLDER, 2, "image/placeholders", "1 image placeholder (token 261) for 2 images"),
        (PLACEHOLDER * 2, 1, "image/placeholders", "2 image placeholders (token 261) for 1 image"),
        (PLACEHOLDER, 0, "image/placeholders", "1 image placeholder (token 261) for 0 images"),
        ("a", 4, "request/prompt-too-long", "69 tokens, 60 of them for images"),
        ("a" * 50, 1, "request/prompt-too-long", "give smaller or fewer images"),
    ],
)
def test_bad_prompts(
    edgecc: Command, seeing: Path, cat: Path, prompt: str, count: int, id: str, text: str
) -> None:
    images = [item for _ in range(count) for item in ("--image", cat)]
    result = edgecc("run", seeing, "--prompt", prompt, *images)
    assert (result.code, result.id, result.out) == (2, id, "")
    assert text in result.err


def test_an_image_without_a_prompt(edgecc: Command, seeing: Path, cat: Path) -> None:
    assert edgecc("run", seeing, "--image", cat).id == "usage/prompt"


def test_without_pillow(
    edgecc: Command, seeing: Path, cat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text works, images say what to install; so does a verification, which has its own pixels."""
    for name in [n for n in sys.modules if n == "PIL" or n.startswith("PIL.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    result = edgecc("run", seeing, "--prompt", "a", "--image", cat)
    assert (result.code, result.id) == (4, "image/no-pillow")
    assert "pip install 'edgecc[vision]'" in result.err
    assert edgecc("run", seeing, "--prompt", "a", *SHORT).code == 0
    assert edgecc("verify", seeing, "--prompts", 1, "--max-new-tokens", 4).code == 0


def test_a_bundle_of_other_steps(edgecc: Command, tmp_path: Path, seeing: Path, cat: Path) -> None:
    """Preparing images is versioned: a runtime that does not know the steps refuses."""
    manifest: dict[str, Any] = json.loads((seeing / "bundle.json").read_text("utf-8"))
    manifest["vision"]["preprocessing"] = "qwen2-vl-2"
    copy = tmp_path / "bundle"
    copy.mkdir()
    for path in seeing.iterdir():
        (copy / path.name).symlink_to(path)
    (copy / "bundle.json").unlink()
    (copy / "bundle.json").write_text(json.dumps(manifest), "utf-8")
    result = edgecc("run", copy, "--prompt", "a", "--image", cat)
    assert (result.code, result.id) == (3, "bundle/image-preprocessing")
    assert "pip install --upgrade edgecc" in result.err
