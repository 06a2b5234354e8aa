"""What the devices of a bundle have in it: engines over one weight file, checked by golden rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from edgecc.backends.base import Artifact, Progress
from edgecc.backends.bundle_writer import BundleWriter
from edgecc.backends.cache import ArtifactCache
from edgecc.backends.memory import available_bytes
from edgecc.backends.onnx.lower import lower as write_models
from edgecc.backends.onnx.lower import stored_tensors
from edgecc.backends.runtime.golden import lowered_golden_file
from edgecc.backends.stored_weights import WEIGHT_FILE, StoredTensor, StoredWeights
from edgecc.backends.tensorrt.engines import Engines, same_engines
from edgecc.backends.tensorrt.estimate import Estimate, expectation
from edgecc.backends.tensorrt.lower import jobs
from edgecc.backends.tensorrt.lower import lower as build_engines
from edgecc.backends.tensorrt.policy import plan_weights
from edgecc.backends.weight_file import WrittenFile
from edgecc.compile_options import CompileOptions
from edgecc.device_lowering import Lowered
from edgecc.errors import Diagnostic
from edgecc.expectations import evaluating, running
from edgecc.golden import GOLDEN_FILE, check_engine, golden_rows
from edgecc.ir.clone import clone_module
from edgecc.ir.core import Module
from edgecc.lowered_check import check_lowered
from edgecc.memory_plan import MemoryPlan, plan_memory
from edgecc.memory_weights import WeightBytes, engine_weights, model_weights

ENGINE_CHECK_BYTES = 64 << 20
"""`verify="fast"` opens the engine only if it computes with fewer bytes of weights than this.
Opening takes up to twice that (expanded and packed for kernels), and it is the only part of a
compile whose memory would grow with the checkpoint."""


@dataclass(frozen=True, slots=True)
class Written:
    """What was written for all devices.

    Attributes:
        artifacts: Files and parts of the manifest, in the order of the devices.
        weight_bytes: Bytes of the weight file, and of weights inside of engines.
    """

    artifacts: tuple[Artifact, ...]
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Site:
    """Where a bundle is written, with what, and who is told.

    Attributes:
        writer: Of the unfinished bundle.
        report: Told as work goes on.
        tell: Told at once what to expect of builds.
        cache: Engines that were built before.
    """

    writer: BundleWriter
    report: Progress
    tell: Callable[[Diagnostic], None]
    cache: ArtifactCache


class Share(ABC):
    """One device's part of a bundle.

    Args:
        lowered: For the device.
        options: What was asked for.

    Attributes:
        tensors: What it needs in the weight file.
        embedded_bytes: Bytes of the weights inside of its engines.
    """

    embedded_bytes = 0

    def __init__(self, lowered: Lowered, options: CompileOptions) -> None:
        self.lowered = lowered
        self.options = options
        self.tensors: list[StoredTensor] = []

    @cached_property
    def memory(self) -> MemoryPlan:
        """What running it takes."""
        return plan_memory(self.lowered.module, self.lowered.device, self._weights())

    @abstractmethod
    def _weights(self) -> dict[str, WeightBytes]:
        """Bytes of weights by graph."""

    @abstractmethod
    def expect(self, tell: Callable[[Diagnostic], None]) -> None:
        """Tell what writing would take, where that is much.

        Raises:
            ResourceError: There is not enough memory.
        """

    @abstractmethod
    def prepare(self, site: Site) -> None:
        """Find out what there is to do, before any of it is done.

        Raises:
            ResourceError: There is not enough memory.
        """

    @abstractmethod
    def write(self, site: Site, file: WrittenFile | None, golden: bytes | None) -> Artifact:
        """Write its engines and compare its numbers.

        Args:
            site: Where.
            file: The weight file; None if no device needs one.
            golden: The golden rows; None if nothing is to be compared.
        """


class ModelShare(Share):
    """ONNX models over the weight file, opened for a check."""

    def __init__(self, lowered: Lowered, options: CompileOptions) -> None:
        super().__init__(lowered, options)
        self.tensors = stored_tensors(lowered.module, lowered.device)

    def _weights(self) -> dict[str, WeightBytes]:
        return model_weights(self.lowered.module)

    def expect(self, tell: Callable[[Diagnostic], None]) -> None:
        """See the class."""
        finding = running(self.memory, self.lowered.module, available_bytes())
        if finding is not None:
            tell(finding)

    def prepare(self, site: Site) -> None:
        """See the class."""
        self.expect(site.tell)

    def write(self, site: Site, file: WrittenFile | None, golden: bytes | None) -> Artifact:
        """See the class."""
        assert file is not None
        writer = site.writer
        lowered, module = self.lowered, self.lowered.module
        artifact = write_models(module, lowered.device, writer.directory, file)
        if golden is None:
            return artifact
        if self.options.verify == "full" or _engine_bytes(module) < ENGINE_CHECK_BYTES:
            checks = check_engine(writer.directory, artifact.manifest, golden)
            lowered.checks.extend(map(str, checks))
        else:
            module.decisions.append(
                "the engine was not opened for a check: run edgecc verify on the device"
            )
        return artifact


class EngineShare(Share):
    """Engines of a builder: no graph is handed over that was not evaluated."""

    def __init__(self, lowered: Lowered, options: CompileOptions) -> None:
        super().__init__(lowered, options)
        self.plan = plan_weights(lowered.module, options.weights)
        self.tensors = self.plan.tensors(lowered.module)
        self.embedded_bytes = self.plan.embedded_bytes
        lowered.module.decisions.extend(self.plan.decisions())
        self._jobs = jobs(lowered.module, lowered.device, self.plan)
        self._engines: Engines | None = None

    def _weights(self) -> dict[str, WeightBytes]:
        return engine_weights(self.lowered.module, self.plan)

    def expect(self, tell: Callable[[Diagnostic], None]) -> None:
        """See the class."""
        same = same_engines(self._jobs)
        wanted = [job.estimate for job in self._jobs if job.estimate.name not in same]
        self._tell(wanted, tell)

    def prepare(self, site: Site) -> None:
        """Take engines from the cache; the others must fit into memory."""
        self._engines = Engines(site.writer.directory, site.cache, site.report)
        self._tell(self._engines.look_up(self._jobs), site.tell)

    def _tell(self, wanted: Sequence[Estimate], tell: Callable[[Diagnostic], None]) -> None:
        if wanted:
            tell(expectation(wanted, available_bytes()))

    def write(self, site: Site, file: WrittenFile | None, golden: bytes | None) -> Artifact:
        """See the class."""
        assert self._engines is not None, "prepare comes first"
        lowered, module, report = self.lowered, self.lowered.module, site.report
        if golden is not None:
            report("evaluate", 0, 1)
            checks, rows = check_lowered(module, golden)
            lowered.checks.extend(map(str, checks))
            site.writer.write_file(lowered_golden_file(lowered.device.name), rows)
            report("evaluate", 1, 1)
            module.decisions.append(
                "the lowered graphs were evaluated in their own precision, the engines were not run"
            )
        used = file if self.tensors else None
        return build_engines(module, lowered.device, self.plan, used, self._engines)


def expect(
    parts: Sequence[Share], options: CompileOptions, tell: Callable[[Diagnostic], None]
) -> None:
    """Tell what writing all of it would take.

    Raises:
        ResourceError: There is not enough memory.
    """
    for part in parts:
        part.expect(tell)
    _expect_golden(parts, options, tell)


def _expect_golden(
    parts: Sequence[Share], options: CompileOptions, tell: Callable[[Diagnostic], None]
) -> None:
    finding = None if options.verify == "none" else evaluating([p.lowered for p in parts])
    if finding is not None:
        tell(finding)


def shares(lowered: Sequence[Lowered], options: CompileOptions) -> list[Share]:
    """What each device needs, before anything is written.

    Raises:
        LegalizeError: A weight has no form in a device's engines.
    """
    return [(EngineShare if item.device.library else ModelShare)(item, options) for item in lowered]


def stored_weights(parts: Sequence[Share]) -> StoredWeights:
    """The weight file of all devices: what several of them need lies there once.

    Raises:
        InternalError: Two devices mean different tensors by one name.
    """
    weights = StoredWeights()
    for part in parts:
        weights.add(part.lowered.module, part.tensors)
    return weights


def weight_bytes(parts: Sequence[Share]) -> int:
    """Bytes the weight file and the weights in engines would take."""
    weights = stored_weights(parts)
    return (weights.nbytes if weights else 0) + sum(part.embedded_bytes for part in parts)


def write_artifacts(site: Site, parts: Sequence[Share], options: CompileOptions) -> Written:
    """Write the weights once and the engines of each device, and check them as the options say.

    Args:
        site: Where.
        parts: Of the devices; their decisions and checks grow.
        options: What was asked for.

    Raises:
        InputError: The reference overflows.
        MismatchError: The numbers of an engine differ from the reference.
        UnsupportedError: A backend cannot build something.
        ResourceError: Disk or memory.
    """
    writer, report = site.writer, site.report
    for part in parts:
        part.prepare(site)
    _expect_golden(parts, options, site.tell)
    weights = stored_weights(parts)
    file = weights.write(writer.directory, report) if weights else None
    if file is not None:
        writer.add_file(WEIGHT_FILE, sha256=file.sha256, nbytes=file.bytes)
    golden = None if options.verify == "none" else _golden(writer, parts[0].lowered, report)
    artifacts = tuple(part.write(site, file, golden) for part in parts)
    embedded = sum(part.embedded_bytes for part in parts)
    return Written(artifacts, embedded + (file.bytes if file else 0))


def _golden(writer: BundleWriter, lowered: Lowered, report: Progress) -> bytes:
    """Write the golden rows into the bundle: as lifted and rounded, so the same for all devices."""
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
