"""One device's share of a bundle: its engines and weights, checked against the golden rows."""

from __future__ import annotations

from dataclasses import dataclass

from edgecc.backends.base import Artifact, Progress
from edgecc.backends.bundle_writer import BundleWriter
from edgecc.backends.onnx import lower
from edgecc.backends.onnx.lower import WEIGHT_FILE
from edgecc.backends.onnx.storage import Storage
from edgecc.backends.weight_file import file_size
from edgecc.compile_options import CompileOptions
from edgecc.device_lowering import Lowered
from edgecc.golden import GOLDEN_FILE, check_engine, check_lowered, golden_rows
from edgecc.ir.clone import clone_module
from edgecc.ir.core import Module

ENGINE_CHECK_BYTES = 64 << 20
"""`verify="fast"` opens the engine only if it computes with fewer bytes of weights than this.
Opening takes up to twice that (expanded and packed for kernels), and it is the only part of a
compile whose memory would grow with the checkpoint."""


@dataclass(frozen=True, slots=True)
class Written:
    """What was written for a device.

    Attributes:
        artifact: Its files and its part of the manifest.
        weight_bytes: Bytes of its weights, packed.
    """

    artifact: Artifact
    weight_bytes: int


def write_artifact(
    writer: BundleWriter, lowered: Lowered, options: CompileOptions, report: Progress
) -> Written:
    """Write a device's engines and weights, and check them as the options say.

    Args:
        writer: Of the unfinished bundle.
        lowered: For the device; its decisions and checks grow.
        options: What was asked for.
        report: Told as work goes on.

    Raises:
        InputError: The reference overflows.
        MismatchError: The engine's numbers differ from the reference.
        UnsupportedError: The backend cannot build something.
        ResourceError: Disk or memory.
    """
    write = _build_engines if lowered.device.library else _write_models
    return write(writer, lowered, options, report)


def stored_bytes(lowered: Lowered) -> int:
    """Bytes the weight file, or the weights in the engines, would take."""
    module = lowered.module
    if lowered.device.library:
        return _engine_bytes(module)
    leaves = [g for g in module.graphs.values() if not list(g.callees())]
    return file_size(Storage(module, WEIGHT_FILE).collect(leaves))


def _write_models(
    writer: BundleWriter, lowered: Lowered, options: CompileOptions, report: Progress
) -> Written:
    """ONNX models over one weight file, opened for a check."""
    module, device = lowered.module, lowered.device
    artifact, weights = lower(module, device, writer.directory, report)
    relative = str(artifact.manifest["weight_file"])
    writer.add_file(relative, sha256=weights.sha256, nbytes=weights.bytes)
    if options.verify != "none":
        golden = _golden(writer, lowered, report)
        if options.verify == "full" or _engine_bytes(module) < ENGINE_CHECK_BYTES:
            checks = check_engine(writer.directory, artifact.manifest, golden)
            lowered.checks.extend(map(str, checks))
        else:
            module.decisions.append(
                "the engine was not opened for a check: run edgecc verify on the device"
            )
    return Written(artifact, weights.bytes)


def _build_engines(
    writer: BundleWriter, lowered: Lowered, options: CompileOptions, report: Progress
) -> Written:
    """Engines of a builder: no graph is handed over that was not evaluated."""
    from edgecc.backends.tensorrt.lower import lower as build_engines

    module = lowered.module
    size = _engine_bytes(module)
    module.decisions.append(
        f"engines hold {size / 1e6:.1f} MB of weights; building takes up to four times that"
    )
    if options.verify != "none":
        golden = _golden(writer, lowered, report)
        report("evaluate", 0, 1)
        lowered.checks.extend(map(str, check_lowered(module, golden)))
        report("evaluate", 1, 1)
        module.decisions.append(
            "the lowered graphs were evaluated in their own precision, the engines were not run"
        )
    artifact = build_engines(module, lowered.device, writer.directory, report)
    sizes = [int(e["weight_bytes"]) for e in artifact.manifest["engines"].values()]
    return Written(artifact, sum(sizes))


def _golden(writer: BundleWriter, lowered: Lowered, report: Progress) -> bytes:
    """Write the golden rows into the bundle."""
    report("golden", 0, 1)
    golden = golden_rows(clone_module(lowered.lifted), lowered.manager.passes)
    writer.write_file(GOLDEN_FILE, golden)
    report("golden", 1, 1)
    return golden


def _engine_bytes(module: Module) -> int:
    """Bytes of all weights in the encodings the engine computes with."""
    table = module.weights
    used = {table.resolve(s) for g in module.graphs.values() for s in g.used_weights()}
    return sum(table[s].nbytes for s in used)
