"""Building TensorRT engines from the command line: cache, interruption, memory and errors.

Tests that take `trt` build for real; in the others, something before the builder is what is tested.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgecc.backends.tensorrt import builder, estimate, lower
from edgecc.backends.tensorrt.emitter import LOWERINGS
from helpers.command_line import Command, arguments_of, environment, process
from helpers.goldens import PAIRS

NAMES = ("lm_head", "target.body", "target.tail", "draft.body", "draft.tail")
GB = 10**9


@pytest.fixture(scope="module")
def trt() -> Any:
    return pytest.importorskip("tensorrt_rtx", reason="pip install 'edgecc[rtx]'")


@pytest.fixture(scope="module")
def built(
    trt: Any, tmp_path_factory: pytest.TempPathFactory, target: Path, draft: Path
) -> tuple[Path, Path, str]:
    """A bundle for sm120, its cache, and what was said. Not to be changed."""
    folder = tmp_path_factory.mktemp("engines")
    done = process(*words(target, folder / "b", draft), "--cache-dir", folder / "c")
    assert done.code == 0, done.err
    return folder / "b", folder / "c", done.err


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the user is another one."""
    monkeypatch.setenv("EDGECC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def words(target: Path, out: Path, draft: Path | None = None, device: str = "sm120") -> list[Any]:
    """Arguments of a compile; scales of random weights are not calibrated for activations."""
    pair = [] if draft is None else ["--draft", draft]
    options = ["--device", device, "--max-model-len", 64, "--activations", "16bit"]
    return ["compile", target, *pair, "-o", out, *options]


def content(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    found = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


class TestCache:
    def test_what_is_told_of_a_first_build(self, built: tuple[Path, Path, str]) -> None:
        _, cache, err = built
        assert "note[build/estimate]: building 5 engines for sm120 takes about" in err
        for name in NAMES:
            assert f"  note: {name}: about " in err
            assert f"edgecc: build {name} for sm120\n" in err
            assert f"engine {name} for sm120 built anew: none is in the cache yet (" in err
        assert len(list(cache.glob("*/key.json"))) == 5

    def test_a_second_build_takes_all_and_gives_the_same_bytes(
        self,
        built: tuple[Path, Path, str],
        edgecc: Command,
        tmp_path: Path,
        target: Path,
        draft: Path,
    ) -> None:
        bundle, cache, _ = built
        out = tmp_path / "b"
        found = edgecc(*words(target, out, draft), "--cache-dir", cache, "--json")
        assert found.code == 0, found.err
        engines = json.loads(found.out)["engines"]
        assert {e["name"]: e["cached"] for e in engines} == dict.fromkeys(NAMES, True)
        assert "engine target.body for sm120 taken from the cache (" in found.err
        assert "edgecc: build" not in found.err
        assert "build/estimate" not in found.err
        assert content(out) == content(bundle)

    def test_a_damaged_entry_is_built_again(
        self,
        built: tuple[Path, Path, str],
        edgecc: Command,
        tmp_path: Path,
        target: Path,
        draft: Path,
    ) -> None:
        bundle, cache, _ = built
        digest = json.loads((bundle / "bundle.json").read_text())["artifacts"]["sm120"]["engines"]
        plan = cache / digest["lm_head"]["key"] / "files" / "engine.plan"
        data = bytearray(plan.read_bytes())
        data[len(data) // 2] ^= 1
        plan.write_bytes(data)
        out = tmp_path / "b"
        found = edgecc(*words(target, out, draft), "--cache-dir", cache, "--json")
        assert found.code == 0, found.err
        assert "note[cache/damaged]: " in found.err
        assert "engine lm_head for sm120 built anew: the cached one is damaged" in found.err
        assert [e["name"] for e in json.loads(found.out)["engines"] if not e["cached"]] == [
            "lm_head"
        ]
        assert content(out) == content(bundle)
        assert plan.read_bytes() != bytes(data)

    def test_a_cache_in_the_bundle(self, edgecc: Command, tmp_path: Path, target: Path) -> None:
        out = tmp_path / "b"
        found = edgecc(*words(target, out), "--cache-dir", out / "cache")
        assert (found.code, found.id) == (2, "usage/output-overlap")
        assert list(tmp_path.iterdir()) == []

    def test_flags_that_contradict(self, edgecc: Command, tmp_path: Path, target: Path) -> None:
        found = edgecc(*words(target, tmp_path / "b"), "--no-cache", "--cache-dir", tmp_path / "c")
        assert (found.code, found.id) == (2, "usage/contradiction")


class TestInterruption:
    def begun(self, tmp_path: Path) -> subprocess.Popen[bytes]:
        """A compile whose builder works on the target of the shipped pair, for ten seconds."""
        arguments = words(PAIRS / "tiny-qwen3-nvfp4", tmp_path / "out" / "b")
        process = subprocess.Popen(
            arguments_of(*arguments, "--verify", "none", "--cache-dir", tmp_path / "cache"),
            stderr=subprocess.PIPE,
            env=environment(),
            start_new_session=True,
        )
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(b"edgecc: build target"):
                break
        time.sleep(1.5)  # inside of a call of the builder that looks at nothing
        return process

    @pytest.mark.parametrize(
        ("number", "code"),
        [
            (signal.SIGINT, 130),
            pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        ],
    )
    def test_a_signal_ends_it_at_once(
        self, trt: Any, tmp_path: Path, number: signal.Signals, code: int
    ) -> None:
        process = self.begun(tmp_path)
        (child,) = children(process.pid)
        begin = time.monotonic()
        os.killpg(process.pid, number)  # as a terminal does it
        _, err = process.communicate(timeout=60)
        took = time.monotonic() - begin
        assert process.returncode == code
        assert err.decode().rstrip().splitlines()[-1].startswith("edgecc: error[")
        assert not running(child)
        assert not list((tmp_path / "out").glob("*"))
        assert not list((tmp_path / "cache").glob("*/key.json"))
        assert took < 5, "the builder was waited for"  # it had ten seconds of work left

    @pytest.mark.slow
    def test_a_killed_compile_leaves_no_builder_and_nothing_wrong(
        self, trt: Any, tmp_path: Path, edgecc: Command, draft: Path, target: Path
    ) -> None:
        process = self.begun(tmp_path)
        (child,) = children(process.pid)
        process.kill()
        process.communicate(timeout=60)
        until(lambda: not running(child))
        assert not (tmp_path / "out" / "b").exists()
        assert not list((tmp_path / "cache").glob("*/key.json"))
        found = edgecc("compile", target, "-o", tmp_path / "out" / "b", "--max-model-len", 64)
        assert found.code == 0, found.err
        assert [p.name for p in (tmp_path / "out").iterdir()] == ["b"]


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [
        int(c)
        for thread in os.listdir(f"/proc/{pid}/task")
        for c in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
    ]


def running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def until(condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("it does not happen")


class TestMemory:
    def patched(self, monkeypatch: pytest.MonkeyPatch, available: int | None) -> None:
        monkeypatch.setattr("edgecc.device_artifact.available_bytes", lambda: available)

    def test_a_dry_run_tells_what_to_expect(
        self, edgecc: Command, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.patched(monkeypatch, 8 * GB)
        found = edgecc(*words(target, tmp_path / "b"), "--dry-run")
        assert found.code == 0, found.err
        (line,) = [x for x in found.err.splitlines() if x.startswith("note[build/estimate]")]
        assert "building 1 engine for sm120 takes about" in line
        assert line.endswith("MB of memory, 8.0 GB are free")
        assert "  note: target: about" in found.err
        assert found.last.startswith("edgecc: ok dry run")
        assert "build/estimate" not in edgecc(*words(target, tmp_path / "b"), "--dry-run", "-q").err

    def test_memory_that_may_not_do_is_a_warning(
        self, edgecc: Command, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.patched(monkeypatch, estimate.START_BYTES // 2 + GB // 10)
        found = edgecc(*words(target, tmp_path / "b"), "--dry-run")
        assert found.code == 0, found.err
        assert "warning[build/memory]: building 1 engine for sm120" in found.err
        assert "help: " in found.err

    @pytest.mark.parametrize("flag", [[], ["--dry-run"]])
    def test_memory_that_cannot_do_is_refused_before_the_work(
        self,
        edgecc: Command,
        tmp_path: Path,
        target: Path,
        monkeypatch: pytest.MonkeyPatch,
        no_cache: Path,
        flag: list[str],
    ) -> None:
        if not flag:
            pytest.importorskip("tensorrt_rtx")
        self.patched(monkeypatch, GB // 10)
        monkeypatch.setattr(lower, "build", lambda *_: pytest.fail("nothing may be built"))
        found = edgecc(*words(target, tmp_path / "b"), *flag)
        assert (found.code, found.id) == (6, "resources/memory")
        assert "building target for sm120 takes at least" in found.err
        assert "--weights bind" in found.err
        assert not (tmp_path / "b").exists()

    def test_a_machine_that_tells_nothing(
        self, edgecc: Command, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.patched(monkeypatch, None)
        found = edgecc(*words(target, tmp_path / "b"), "--dry-run")
        assert found.code == 0
        assert "of memory\n" in found.err

    def test_a_builder_that_says_it_has_no_memory(
        self,
        trt: Any,
        edgecc: Command,
        tmp_path: Path,
        target: Path,
        monkeypatch: pytest.MonkeyPatch,
        no_cache: Path,
    ) -> None:
        def failing(self: builder.Session, emitter: Any, *_: Any) -> Any:
            self.errors.append("[graph.cpp::allocate::12] Error Code 2: OutOfMemory (16 MiB)")
            raise self.refusal(emitter)

        monkeypatch.setattr(builder.Session, "build", failing)
        found = edgecc(*words(target, tmp_path / "b"), "--verify", "none")
        assert (found.code, found.id) == (6, "resources/memory")
        assert "the builder of target ran out of memory" in found.last
        assert not (tmp_path / "b").exists()

    @pytest.mark.parametrize(
        ("end", "code", "id", "message"),
        [
            (lambda: os.kill(os.getpid(), signal.SIGKILL), 6, "resources/memory", "memory ran out"),
            (lambda: os.kill(os.getpid(), signal.SIGUSR2), 1, "tensorrt/crashed", "SIGUSR2"),
            (lambda: os._exit(3), 1, "tensorrt/crashed", "exit code 3"),
        ],
    )
    def test_a_builder_that_is_ended(
        self,
        trt: Any,
        edgecc: Command,
        tmp_path: Path,
        target: Path,
        monkeypatch: pytest.MonkeyPatch,
        no_cache: Path,
        end: Callable[[], None],
        code: int,
        id: str,
        message: str,
    ) -> None:
        monkeypatch.setattr(builder.Session, "build", lambda *_: end())
        found = edgecc(*words(target, tmp_path / "b"), "--verify", "none")
        assert (found.code, found.id) == (code, id)
        assert message in found.last
        assert not (tmp_path / "b").exists()

    def test_python_without_memory(
        self,
        trt: Any,
        edgecc: Command,
        tmp_path: Path,
        target: Path,
        monkeypatch: pytest.MonkeyPatch,
        no_cache: Path,
    ) -> None:
        def failing(*_: Any) -> Any:
            raise MemoryError

        monkeypatch.setattr(builder.Session, "build", failing)
        found = edgecc(*words(target, tmp_path / "b"), "--verify", "none")
        assert (found.code, found.id) == (6, "resources/memory")


class TestErrors:
    def test_no_package(self, edgecc: Command, tmp_path: Path, target: Path) -> None:
        """In a process in which it cannot be imported, whatever is installed here."""
        blocked = (
            "import sys\n"
            "sys.modules['tensorrt_rtx'] = None\n"
            "from edgecc.cli import main\n"
            "sys.exit(main(sys.argv[1:]))\n"
        )
        command = [sys.executable, "-c", blocked, *map(str, words(target, tmp_path / "b"))]
        done = subprocess.run(command, capture_output=True, env=environment(), text=True)
        assert done.returncode == 4
        assert done.stderr.splitlines() == [
            "error[tensorrt/not-installed]: this device needs TensorRT-RTX, which is not installed",
            "  help: pip install 'edgecc[rtx]'",
            "edgecc: error[tensorrt/not-installed]: this device needs TensorRT-RTX, which is not "
            "installed",
        ]

    def test_a_device_of_the_full_package(
        self, edgecc: Command, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "tensorrt", None)
        found = edgecc(*words(target, tmp_path / "b", device="sm87"))
        assert (found.code, found.id) == (4, "tensorrt/not-installed")
        assert "pip install 'edgecc[tensorrt]'" in found.err

    def test_no_such_device(self, edgecc: Command, tmp_path: Path, target: Path) -> None:
        found = edgecc(*words(target, tmp_path / "b", device="sm119"))
        assert found.code == 4
        assert "  note: sm120: " in found.err

    def test_an_op_without_lowering_names_its_node(
        self,
        trt: Any,
        edgecc: Command,
        tmp_path: Path,
        target: Path,
        monkeypatch: pytest.MonkeyPatch,
        no_cache: Path,
    ) -> None:
        monkeypatch.delitem(LOWERINGS, "swiglu")
        found = edgecc(*words(target, tmp_path / "b"), "--verify", "none")
        assert (found.code, found.id) == (4, "tensorrt/no-lowering")
        assert "--> @target, swiglu of target: model.layers.0.mlp" in found.err
        assert not (tmp_path / "b").exists()

    def test_a_refused_layer_names_node_tensor_and_device(
        self,
        trt: Any,
        edgecc: Command,
        tmp_path: Path,
        target: Path,
        monkeypatch: pytest.MonkeyPatch,
        no_cache: Path,
    ) -> None:
        def failing(self: builder.Session, emitter: Any, *_: Any) -> Any:
            name = next(n for n, node in emitter.nodes.items() if node.op.name == "linear")
            self.errors.append(f"[kernel.cpp::pick::7] Error Code 10: no tactic for {name}")
            raise self.refusal(emitter)

        monkeypatch.setattr(builder.Session, "build", failing)
        found = edgecc(*words(target, tmp_path / "b"), "--verify", "none")
        assert (found.code, found.id) == (4, "tensorrt/build")
        assert "cannot build for sm120: " in found.err
        assert "--> @target, linear of target: model.layers.0." in found.err
        assert "note: weight @target.model.layers.0." in found.err
        assert "model.safetensors: model.layers.0." in found.err

    @pytest.mark.skipif(sys.platform != "linux", reason="needs a file size limit")
    def test_a_full_disk(self, trt: Any, tmp_path: Path, target: Path) -> None:
        """A limit on the size of files stands for it: the plan is the first large one."""
        program = (
            "import resource, signal, sys\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))\n"
            "from edgecc.cli import main\n"
            "sys.exit(main(sys.argv[1:]))\n"
        )
        arguments = [*words(target, tmp_path / "b"), "--verify", "none", "--no-cache"]
        command = [sys.executable, "-c", program, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, env=environment(), text=True)
        assert done.returncode == 6, done.stderr
        assert "error[bundle/disk-full]: cannot write " in done.stderr
        assert "sm120-target.plan" in done.stderr
        assert list(tmp_path.iterdir()) == []


class TestProgress:
    def test_a_terminal_shows_each_engine_and_the_phase_of_the_builder(
        self, trt: Any, tmp_path: Path, target: Path
    ) -> None:
        pty = pytest.importorskip("pty")
        ours, theirs = pty.openpty()
        arguments = [*words(target, tmp_path / "b"), "--verify", "none", "--no-cache"]
        child = subprocess.Popen(
            arguments_of(*arguments), stderr=theirs, env=environment(TERM="xterm", COLUMNS="120")
        )
        os.close(theirs)
        text = b""
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while data := os.read(ours, 1 << 16):
                text += data
        os.close(ours)
        assert child.wait(timeout=60) == 0
        assert b"build target for sm120" in text
        assert b"building engine" in text
        assert text.rstrip().endswith(b"of weights")


class TestInspect:
    def test_text(self, built: tuple[Path, Path, str], edgecc: Command) -> None:
        found = edgecc("inspect", built[0])
        assert found.code == 0, found.err
        assert "sm120: compute capability 12.0, GeForce RTX 50, RTX PRO Blackwell" in found.out
        assert "built by TensorRT-RTX " in found.out
        head = found.out.split("engine sm120/lm_head\n")[1].split("\nengine ")[0].splitlines()
        plan = (built[0] / "engines" / "sm120-lm_head.plan").stat().st_size
        assert head[0].startswith(f"  engines/sm120-lm_head.plan: {plan:,} bytes, ")
        assert "  input   hidden: f32[1, ?, 32]" in head
        assert "  output  logits: f32[1, ?, 288]" in head
        assert "  profile verify: hidden [1, 1, 32] to [1, 5, 32], best [1, 5, 32]" in head
        assert any(line.startswith("  weights 1 x nvfp4, ") for line in head)
        assert "present.k_cache.0: bf16[1, 1, 68, 16], overwrites k_cache.0" in found.out

    def test_every_weight(self, built: tuple[Path, Path, str], edgecc: Command) -> None:
        found = edgecc("inspect", built[0], "--weights")
        assert "  weight  target.lm_head.weight: nvfp4, " in found.out
        assert "from target/model.safetensors: lm_head.weight" in found.out

    def test_json(
        self,
        built: tuple[Path, Path, str],
        edgecc: Command,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        bundle, cache, _ = built
        monkeypatch.setenv("EDGECC_CACHE_DIR", str(cache))
        facts = json.loads(edgecc("inspect", bundle, "--json").out)
        assert facts["runs_on"]["sm120"]["gpus"] == {"12.0": "GeForce RTX 50, RTX PRO Blackwell"}
        assert facts["runs_on"]["sm120"]["builder"] == "tensorrt_rtx"
        assert set(facts["engines"]) == {f"sm120/{name}" for name in NAMES}
        head = facts["engines"]["sm120/lm_head"]
        assert head["in_cache"] is True
        weight = head["weights"]["target.lm_head.weight"]
        assert weight["precision"] == "nvfp4"
        assert weight["origin"] == "target/model.safetensors: lm_head.weight"
        assert head["weight_bytes"] == weight["bytes"]
        monkeypatch.setenv("EDGECC_CACHE_DIR", str(tmp_path))
        again = json.loads(edgecc("inspect", bundle, "--json").out)
        assert again["engines"]["sm120/lm_head"]["in_cache"] is False
