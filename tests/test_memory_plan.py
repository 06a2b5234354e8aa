"""Memory plans: numbers by hand on small modules, and what the CPU engine really takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import edgecc
from edgecc.backends.tensorrt.policy import plan_weights
from edgecc.devices import get_device
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.ir import Builder, DType, Module, Role, SymbolRange, sym
from edgecc.ir.core import Graph
from edgecc.ir.ops.attention import AttentionAttributes
from edgecc.ir.ops.control import CallAttributes
from edgecc.ir.ops.vision import MultiHeadAttentionAttributes
from edgecc.memory_plan import MemoryPlan, PartMemory, peak_bytes, plan_memory
from edgecc.memory_weights import WeightBytes, engine_weights, model_weights
from edgecc.passes.base import PassContext
from edgecc.passes.default import default_pipeline
from edgecc.passes.manager import PassManager
from helpers.command_line import in_process
from helpers.goldens import DRAFT, TARGET
from helpers.lowered_pairs import write_pair

CPU, GPU = get_device("cpu"), get_device("sm120")


def empty() -> Module:
    module = Module("m")
    module.symbols.update({"b": SymbolRange(1, 4), "t": SymbolRange(1, 16)})
    module.symbols["r"] = SymbolRange(1, 16)
    return module


def test_values_die_after_their_last_reader() -> None:
    """A chain holds two values at a time, a value that is read again three; inputs are not ours."""
    b = Builder(empty(), "g")
    x = b.input("x", DType.F32, (sym("t"), 5), Role.ACTIVATION)
    one = b.op("silu", x)
    two = b.op("silu", one)
    b.output(b.op("silu", two), "y", Role.ACTIVATION)
    graph = b.module.graphs["g"]
    assert peak_bytes(graph, {"t": 3}, scores=True) == 2 * 3 * 5 * 4
    three = b.op("add", one, two)
    b.output(three, "z", Role.ACTIVATION)
    assert peak_bytes(graph, {"t": 3}, scores=True) == 4 * 3 * 5 * 4


def attention(module: Module, dtype: DType = DType.F32, capacity: int = 32) -> Graph:
    """One layer's cache update and attention: 4 heads over 2 KV heads of width 8."""
    b = Builder(module, "target")
    ids = b.input("ids", DType.I64, (sym("b"), sym("t")), Role.TOKEN_IDS)
    start = b.input("start", DType.I64, (sym("b"),), Role.CACHE_LENGTH)
    q = b.input("q", dtype, (sym("b"), sym("t"), 32), Role.ACTIVATION)
    k = b.input("k", dtype, (sym("b"), sym("t"), 16), Role.ACTIVATION)
    caches = [
        b.input(f"{kind}_cache", dtype, (sym("b"), 2, capacity, 8), Role.KV_CACHE) for kind in "kv"
    ]
    state = b.input("state", DType.F32, (sym("b"), 3, 7), Role.STATE)
    length = b.op("advance", start, ids)
    made = [b.op("cache_update", cache, k, start) for cache in caches]
    y = b.op("attention", q, *made, length, attrs=AttentionAttributes(4, 2, 1.0))
    b.output(y, "y", Role.ACTIVATION)
    for cache, new in zip(caches, made, strict=True):
        b.output(new, cache.name, Role.KV_CACHE, alias=cache.name)
    b.output(b.op("silu", state), "state", Role.STATE, alias="state")
    return module.graphs["target"]


def test_caches_and_states_are_counted_once_and_updated_in_place() -> None:
    module = empty()
    module.metadata["limits"] = {"max_batch_size": 3, "max_model_len": 31}
    graph = attention(module)
    plan = plan_memory(module, CPU, {})
    (part,) = plan.parts
    assert (plan.batch, plan.max_model_len, plan.prefill_rows, plan.verify_rows) == (3, 31, 16, 1)
    assert part.caches == 2 * 3 * 2 * 32 * 8 * 4
    assert part.states == 3 * 3 * 7 * 4
    for figure, batch, rows in ((part.prefill, 1, 16), (part.verify, 3, 1)):
        passed = batch * (rows * 8 + 8 + rows * 32 * 4 + rows * 16 * 4)
        made = batch * (8 + rows * 32 * 4)  # length and y
        assert figure == passed + made + batch * 4 * rows * 32 * 4
        assert peak_bytes(graph, {"b": batch, "t": rows}, scores=False) == made
    assert part.total == part.caches + part.states + part.prefill
    on_gpu = plan_memory(module, GPU, {}).parts[0]
    assert on_gpu.caches == part.caches  # one engine call a sequence, but caches of all
    assert on_gpu.verify == 8 + 8 + 32 * 4 + 16 * 4 + 8 + 32 * 4


def test_sixteen_bits_and_fused_scores_on_a_gpu() -> None:
    module = empty()
    attention(module, DType.BF16)
    on_cpu, on_gpu = (plan_memory(module, d, {}).parts[0] for d in (CPU, GPU))
    assert on_gpu.caches == 2 * 1 * 2 * 32 * 8 * 2
    assert on_cpu.prefill - on_gpu.prefill == 4 * 16 * 32 * 4


def tower(module: Module) -> Graph:
    """A tower of one attention: 2 heads over the 4 patches of each of m tokens, 8 wide."""
    module.symbols["m"] = SymbolRange(1, 25)
    b = Builder(module, "vision")
    x = b.input("pixels", DType.F32, (1, sym("m") * 4, 8), Role.PIXEL_VALUES)
    y = b.op("multi_head_attention", x, x, x, attrs=MultiHeadAttentionAttributes(2, 1.0))
    b.output(y, "features", Role.IMAGE_FEATURES)
    return module.graphs["vision"]


def test_a_tower_reads_the_largest_image_while_a_prompt_is_read() -> None:
    """One image a call, whatever the batch is; only portable ONNX keeps scores of all patches."""
    module = empty()
    module.metadata["limits"] = {"max_batch_size": 3, "max_model_len": 31}
    attention(module)
    tower(module)
    patches = 4 * 25
    held = patches * 8 * 4 + patches * 8 * 4  # pixels and the result
    for device, scores in ((CPU, 0), (GPU, 0), (get_device("onnx"), 2 * patches**2 * 4)):
        plan = plan_memory(module, device, {"vision": WeightBytes(resident=10)})
        (part,) = (p for p in plan.parts if p.name == "vision")
        assert (part.prefill, part.verify) == (held + scores, 0)
        assert (part.caches, part.states, part.total) == (0, 0, held + scores + 10)


def shared(rows: tuple[str, int]) -> Module:
    """Two entries that call one graph with other numbers of rows."""
    module = empty()
    head = Builder(module, "head")
    x = head.input("x", DType.F32, (sym("b"), sym("r"), 4), Role.ACTIVATION)
    head.output(head.op("silu", x), "y", Role.ACTIVATION)
    for name, count in zip(("target", "draft"), rows, strict=True):
        b = Builder(module, name)
        dim = sym(count) if isinstance(count, str) else count
        x = b.input("x", DType.F32, (sym("b"), dim, 4), Role.FEATURES)
        called = b.node("call", (x,), attrs=CallAttributes("head"), names=("y",)).results
        b.output(called[0], "y", Role.LOGITS)
    return module


def test_a_graph_that_two_entries_call_is_a_part_with_the_larger_call() -> None:
    module = shared(("r", 7))
    held = {"head": WeightBytes(stored=10, resident=40, mapped=5)}
    plan = plan_memory(module, CPU, held)
    parts = {p.name: p for p in plan.parts}
    assert parts["head"].prefill == 7 * 4 * 4  # the target asks for one row, the draft for seven
    assert parts["target"].prefill == 1 * 4 * 4
    assert parts["draft"].prefill == 7 * 4 * 4
    assert (parts["head"].stored, parts["head"].weights, parts["head"].mapped) == (10, 40, 5)
    assert plan.total_bytes == sum(p.total for p in plan.parts)


def test_text_and_json_say_the_same() -> None:
    parts = (
        PartMemory("target", 1_000_000, 2_000_000, 500_000, 30_000_000, 4_000_000, 700_000, 90_000),
        PartMemory("draft", 100_000, 100_000, 0, 0, 0, 200_000, 300_000),
    )
    plan = MemoryPlan("cpu", 1, 4096, 128, 8, parts)
    lines = plan.lines()
    assert "batch 1" in lines[0]
    assert "0.5 MB of the weights are mapped" in lines[0]
    assert lines[2].split() == ["target", "1.0", "2.0", "30.0", "4.0", "0.7", "0.1", "36.7"]
    assert lines[3].split()[-1] == "0.4"  # the larger of both kinds of calls
    assert lines[4].split() == ["total", "1.1", "2.1", "30.0", "4.0", "0.9", "0.4", "37.1"]
    found = json.loads(json.dumps(plan.as_json()))
    assert found["total_bytes"] == 37_100_000
    assert found["parts"][1]["activations"] == 300_000


def lowered(device: str, length: int) -> Module:
    record = get_device(device)
    module = lift(TARGET, DRAFT, LiftOptions(max_model_len=length))
    PassManager(default_pipeline(record)).run(module, PassContext(record))
    return module


@pytest.fixture(scope="module")
def on_cpu() -> Module:
    return lowered("cpu", 4096)


def test_shipped_pair_on_the_cpu(on_cpu: Module, tmp_path: Path) -> None:
    """Head counts and widths are those of the configs; the bundle's bytes those of its file."""
    plan = plan_memory(on_cpu, CPU, model_weights(on_cpu))
    parts = {p.name: p for p in plan.parts}
    assert parts["target"].caches == 2 * 8 * 2 * 4097 * 64 * 4
    assert parts["draft"].caches == 2 * 2 * 2 * (4096 + 7) * 64 * 4
    assert parts["lm_head"].weights == 4096 * 256 * 4
    assert parts["lm_head"].stored == 4096 * 256 // 2 + 4096 * 16 + 4
    report = edgecc.compile(TARGET, DRAFT, out=tmp_path / "b", dry_run=True)
    assert report.memory == (plan,)
    header = report.weight_bytes - plan.total.stored
    assert 0 < header < 20_000


def test_shipped_pair_on_a_gpu() -> None:
    """Packed weights stay packed, and the embedding that both engines read is there once."""
    module = lowered("sm120", 1024)
    embedding = 4096 * 256 * 2
    for policy in ("embed", "bind"):
        weights = engine_weights(module, plan_weights(module, policy))
        plan = plan_memory(module, GPU, weights)
        parts = {p.name: p for p in plan.parts}
        scalars = 4 + 4  # of the weight, and of what it is multiplied with
        assert parts["lm_head"].weights == 4096 * 256 // 2 + 4096 * 16 + scalars
        assert parts["target"].caches == 2 * 8 * 2 * 1025 * 64 * 2
        assert parts["draft"].weights < 6_000_000 - embedding / 2
        assert plan.total.stored == pytest.approx(plan.total.weights, rel=0.01)


SESSIONS = 4
ROUNDED_UP = 4 << 20
"""Of each session's arena; 2.8 MB were measured with ONNX Runtime 1.32."""

CHILD = """
import sys
from pathlib import Path
import numpy as np
import edgecc
from edgecc.backends.bundle import Bundle
from edgecc.backends.onnxruntime import open_engine
from edgecc.backends.runtime.session import Session

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

warm, out, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
small = edgecc.load(warm)  # what any process takes: modules, libraries, the first session
small.generate(token_ids=[1, 2, 3], max_new_tokens=4)
bundle = Bundle.open(out)
before = anonymous()
engine = open_engine(bundle, bundle.manifest["artifacts"]["cpu"], num_threads=1)
loaded = anonymous()
chunk = bundle.manifest["limits"]["prefill_chunk"]
session = Session(engine.entry("target"), engine.entry("draft"), prefill_chunk=chunk)
row = session.run(session.prefill([7 * i % 4000 for i in range(length - 10)], features=True))
session.push(int(np.argmax(row[:4000])))
proposals = session.run(session.propose()).tokens
session.run(session.verify(proposals, features=True))
print(loaded - before, anonymous() - loaded)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_against_what_the_engine_takes(on_cpu: Module, tmp_path: Path) -> None:
    """Full caches of the shipped pair: weights are right within ten percent, and so is the whole.

    Mapped weights are no anonymous memory. What allocators round up is no part of a plan: scores
    that grow from chunk to chunk leave holes in ONNX Runtime's arenas, one for each session.
    """
    length = 4096
    warm_target, warm_draft = write_pair(tmp_path / "small")
    edgecc.compile(warm_target, warm_draft, out=tmp_path / "warm", verify="none")
    options = {"max_model_len": length, "verify": "none"}
    edgecc.compile(TARGET, DRAFT, out=tmp_path / "bundle", **options)
    command = [sys.executable, "-c", CHILD, str(tmp_path / "warm"), str(tmp_path / "bundle")]
    sources = str(Path(edgecc.__file__).parent.parent)  # these, whatever is installed
    environment = {**os.environ, "PYTHONPATH": sources}
    command.append(str(length))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    weights, rest = map(int, done.stdout.split())
    plan = plan_memory(on_cpu, CPU, model_weights(on_cpu))
    assert weights == pytest.approx(plan.total.weights - plan.total.mapped, rel=0.1)
    assert rest > plan.total.caches
    planned = plan.total_bytes - plan.total.mapped
    assert 0.95 * planned < weights + rest < planned + SESSIONS * ROUNDED_UP


def test_a_dry_run_tells_it(capsys: pytest.CaptureFixture[str]) -> None:
    run = in_process(capsys)
    command = ["compile", str(TARGET), "--draft", str(DRAFT), "--dry-run", "--json"]
    command += ["--device", "cpu", "--device", "sm120"]
    found = run(*command)
    assert found.code == 0
    plans = json.loads(found.out)["memory"]
    assert [plan["device"] for plan in plans] == ["cpu", "sm120"]
    assert [part["name"] for part in plans[0]["parts"]] == ["target", "draft", "lm_head"]
    shown = run(*[word for word in command if word != "--json"]).err
    total = f"{plans[1]['total_bytes'] / 1e6:.1f}"
    assert any(
        line.split()[:1] == ["total"] and line.endswith(f" {total}") for line in shown.splitlines()
    )
