"""The streamed safetensors files, read back with the reference library."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import edgecc.errors
from edgecc.backends.weight_file import TensorSpec, WeightFileWriter, WrittenFile
from edgecc.errors import InternalError, ResourceError

# Types of the reference library's own NumPy reader, with the NumPy type it gives.
NUMPY = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class Entry(NamedTuple):
    """One tensor as the reference library reports it."""

    dtype: str
    shape: list[int]
    data: bytes


def reference(path: Path) -> dict[str, Entry]:
    """Read a file with the reference library, which also checks its layout."""
    parsed = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    return {n: Entry(t["dtype"], t["shape"], bytes(t["data"])) for n, t in parsed}


def write(path: Path, tensors: Sequence[tuple[TensorSpec, Sequence[Any]]]) -> WrittenFile:
    with WeightFileWriter(path, [spec for spec, _ in tensors]) as file:
        for spec, blocks in tensors:
            for block in blocks:
                file.write(spec.name, block)
    return file.finish()


def raw(array: NDArray[Any]) -> bytes:
    return array.tobytes()


def test_every_dtype_reads_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, NDArray[Any]] = {}
    for name, dtype in NUMPY.items():
        data = rng.integers(0, 2 if name == "BOOL" else 256, (4, 6 * np.dtype(dtype).itemsize))
        arrays[name] = data.astype(np.uint8).view(dtype)
    specs = [TensorSpec(name, name, array.shape) for name, array in arrays.items()]

    written = write(tmp_path / "w", [(s, [arrays[s.name][:1], arrays[s.name][1:]]) for s in specs])

    found = reference(written.path)
    assert found == {n: Entry(n, [4, 6], raw(a)) for n, a in arrays.items()}


def test_packed_four_bits_keep_their_logical_shape(tmp_path: Path) -> None:
    packed = np.arange(12, dtype=np.uint8).reshape(3, 4)

    written = write(tmp_path / "w", [(TensorSpec("w", "F4", (3, 8)), [packed])])

    assert reference(written.path) == {"w": Entry("F4", [3, 8], raw(packed))}


def test_equal_to_what_the_numpy_reader_of_the_reference_gives(tmp_path: Path) -> None:
    arrays: dict[str, NDArray[Any]] = {
        "embed": np.arange(15, dtype=np.float32).reshape(5, 3),
        "norm": np.arange(3, dtype=np.float16),
        "scalar": np.array(7, dtype=np.int64),
        "empty": np.zeros((0, 4), dtype=np.int8),
    }
    dtypes = {"embed": "F32", "norm": "F16", "scalar": "I64", "empty": "I8"}
    specs = [TensorSpec(name, dtypes[name], array.shape) for name, array in arrays.items()]

    write(tmp_path / "w", [(spec, [arrays[spec.name]]) for spec in specs])

    found = safetensors.numpy.load_file(tmp_path / "w")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_layout(tmp_path: Path) -> None:
    specs = [TensorSpec("b", "U8", (3,)), TensorSpec("a", "U8", (2, 2))]

    written = write(tmp_path / "w", [(specs[0], [b"xyz"]), (specs[1], [b"12", b"34"])])

    content = written.path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert list(header) == ["__metadata__", "b", "a"]
    assert header["__metadata__"] == {"format": "edgecc"}
    assert header["a"] == {"dtype": "U8", "shape": [2, 2], "data_offsets": [3, 7]}
    assert content[8 + length :] == b"xyz1234"
    assert (8 + length) % 64 == 0
    assert written.offsets == {"b": (8 + length, 3), "a": (8 + length + 3, 4)}
    assert written.bytes == len(content)
    assert written.sha256 == hashlib.sha256(content).hexdigest()


def test_offsets_are_known_before_writing(tmp_path: Path) -> None:
    with WeightFileWriter(tmp_path / "w", [TensorSpec("a", "U8", (4,))]) as file:
        early = dict(file.offsets)
        file.write("a", b"1234")

    begin, length = early["a"]
    assert file.path.read_bytes()[begin : begin + length] == b"1234"
    assert file.finish() is file.finish()


def test_no_tensors(tmp_path: Path) -> None:
    assert reference(write(tmp_path / "w", []).path) == {}


def test_tensors_without_elements_may_be_left_out(tmp_path: Path) -> None:
    specs = [TensorSpec(n, "F32", s) for n, s in [("a", (0,)), ("b", (1,)), ("c", (2, 0))]]

    with WeightFileWriter(tmp_path / "w", specs) as file:
        file.write("b", b"1234")
        file.write("c", b"")

    assert reference(tmp_path / "w")["c"] == Entry("F32", [2, 0], b"")


COUNT = np.arange(24, dtype="<i4").reshape(4, 6)


@pytest.mark.parametrize(
    "block",
    [
        COUNT,
        COUNT.astype(">i4"),
        np.repeat(COUNT, 2, axis=1)[:, ::2],
        np.asfortranarray(COUNT),
        COUNT.view(np.uint8),
        COUNT.tobytes(),
        bytearray(COUNT.tobytes()),
        COUNT.data,
    ],
    ids=["c", "big-endian", "strided", "fortran", "bytes-array", "bytes", "bytearray", "view"],
)
def test_kinds_of_blocks(tmp_path: Path, block: Any) -> None:
    write(tmp_path / "w", [(TensorSpec("a", "I32", (4, 6)), [block])])

    assert reference(tmp_path / "w")["a"].data == COUNT.tobytes()


def test_strided_rows(tmp_path: Path) -> None:
    table = np.arange(40, dtype=np.float32).reshape(5, 8)

    write(tmp_path / "w", [(TensorSpec("a", "F32", (8, 5)), [table.T[:3], table.T[3:]])])

    assert reference(tmp_path / "w")["a"].data == np.ascontiguousarray(table.T).tobytes()


def test_same_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    spec = TensorSpec("l0.wq ünïcode", "U8", (4,))

    one = write(tmp_path / "one", [(spec, [b"1234"])])
    two = write(tmp_path / "two", [(spec, [b"1", b"", b"234"])])

    assert one.path.read_bytes() == two.path.read_bytes()
    assert one.sha256 == two.sha256
    assert list(reference(one.path)) == [spec.name]


@pytest.mark.parametrize(
    ("dtype", "shape"), [("F8_E4M3FN", (1,)), ("f32", (1,)), ("U8", (2, -1)), ("F4", (3, 3))]
)
def test_tensors_that_cannot_be_stored(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(InternalError) as caught:
        TensorSpec("a", dtype, shape)
    assert caught.value.id == "bundle/bad-tensor"


@pytest.mark.parametrize("names", [("a", "a"), ("a", "__metadata__")])
def test_names_that_cannot_be_used(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(InternalError, match="reserved or used twice"):
        WeightFileWriter(tmp_path / "w", [TensorSpec(name, "U8", (1,)) for name in names])
    assert list(tmp_path.iterdir()) == []


A, B = TensorSpec("a", "U8", (4,)), TensorSpec("b", "F32", (2,))


@pytest.mark.parametrize(
    ("calls", "id"),
    [
        ([("a", b"123")], "bundle/missing-bytes"),
        ([("a", b"1234")], "bundle/missing-bytes"),
        ([("a", b"12345")], "bundle/excess-bytes"),
        ([("a", b"1234"), ("a", b"5")], "bundle/excess-bytes"),
        ([("b", b"12345678")], "bundle/wrong-order"),
        ([("a", b"123"), ("b", b"12345678")], "bundle/wrong-order"),
        ([("c", b"1")], "bundle/unknown-tensor"),
        ([("a", b"1234"), ("b", np.zeros(2, np.int32))], "bundle/wrong-dtype"),
        ([("a", b"1234"), ("b", np.zeros(1, np.float64))], "bundle/wrong-dtype"),
    ],
)
def test_accounting(tmp_path: Path, calls: list[tuple[str, Any]], id: str) -> None:
    file = WeightFileWriter(tmp_path / "w", [A, B])

    def write_all() -> None:
        with file:
            for name, block in calls:
                file.write(name, block)

    with pytest.raises(InternalError) as caught:
        write_all()

    assert caught.value.id == id
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InternalError):
        file.finish()


def test_unpacked_four_bits_are_refused(tmp_path: Path) -> None:
    unpacked = np.zeros(8, ml_dtypes.float4_e2m1fn)

    with pytest.raises(InternalError, match="float4_e2m1fn"):
        write(tmp_path / "w", [(TensorSpec("a", "F4", (8,)), [unpacked])])


def test_nothing_can_follow_the_end(tmp_path: Path) -> None:
    with WeightFileWriter(tmp_path / "w", [A]) as file:
        file.write("a", b"1234")

    with pytest.raises(InternalError):
        file.write("a", b"5")
    assert len((tmp_path / "w").read_bytes()) == file.finish().bytes


def test_exception_removes_the_file(tmp_path: Path) -> None:
    def interrupted() -> None:
        with WeightFileWriter(tmp_path / "w", [A]) as file:
            file.write("a", b"12")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert list(tmp_path.iterdir()) == []


def test_existing_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"mine")

    with pytest.raises(ResourceError, match="File exists"):
        WeightFileWriter(tmp_path / "w", [A])
    assert (tmp_path / "w").read_bytes() == b"mine"


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ResourceError) as caught:
        WeightFileWriter(tmp_path / "absent" / "w", [A])
    assert caught.value.exit_code == 6


def test_too_large_for_the_disk_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"needs [\d,]+ bytes, only [\d,]+ are free") as caught:
        WeightFileWriter(tmp_path / "w", [TensorSpec("a", "F64", (1 << 57,))])

    assert caught.value.id == "bundle/disk-full"
    assert list(tmp_path.iterdir()) == []


def run(program: str, *args: object) -> subprocess.CompletedProcess[str]:
    root = Path(edgecc.errors.__file__).parents[1]
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, args)],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("block", [100, 65_536])
def test_full_disk(tmp_path: Path, block: int) -> None:
    # Small blocks wait in a buffer, so that the last of them fails when the file is closed.
    program = """
import resource, sys
from pathlib import Path
from edgecc.backends.weight_file import TensorSpec, WeightFileWriter
from edgecc.errors import EdgeccError
block = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (block, block))
try:
    with WeightFileWriter(Path(sys.argv[1]), [TensorSpec("a", "U8", (4 * block,))]) as file:
        for _ in range(4):
            file.write("a", bytes(block))
except EdgeccError as error:
    print(error.id)
    sys.exit(error.exit_code)
"""
    answer = run(program, tmp_path / "w", block)

    assert (answer.returncode, answer.stdout, answer.stderr) == (6, "bundle/disk-full\n", "")
    assert list(tmp_path.iterdir()) == []


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    program = """
import resource, sys
from pathlib import Path
from edgecc.backends.weight_file import TensorSpec, WeightFileWriter
block = bytes(1 << 20)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with WeightFileWriter(Path(sys.argv[1]), [TensorSpec("a", "U8", (96, 1 << 20))]) as file:
    file.write("a", block)
    before = peak()
    for _ in range(95):
        file.write("a", block)
print((peak() - before) * (1 if sys.platform == "darwin" else 1024))
"""
    answer = run(program, tmp_path / "w")

    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "w").stat().st_size > 96 << 20
    assert int(answer.stdout) < 8 << 20


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@settings(deadline=None)  # disks may be slow
@given(data=st.data())
def test_any_tensors_in_any_blocks(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    names = data.draw(st.lists(st.text().filter("__metadata__".__ne__), unique=True, max_size=4))
    specs = [
        TensorSpec(name, data.draw(st.sampled_from(list(NUMPY))), data.draw(SHAPES))
        for name in names
    ]
    content = {}
    tensors = []
    for spec in specs:
        size = spec.nbytes
        content[spec.name] = data.draw(st.binary(min_size=size, max_size=size))
        cuts = [0, *sorted(data.draw(st.lists(st.integers(0, size), max_size=3))), size]
        tensors.append((spec, [content[spec.name][a:b] for a, b in pairwise(cuts)]))
    path = tmp_path_factory.mktemp("any") / "w"

    written = write(path, tensors)

    file = path.read_bytes()
    assert reference(path) == {
        spec.name: Entry(spec.dtype, list(spec.shape), content[spec.name]) for spec in specs
    }
    for name, (begin, length) in written.offsets.items():
        assert file[begin : begin + length] == content[name]
    assert (written.bytes, written.sha256) == (len(file), hashlib.sha256(file).hexdigest())
