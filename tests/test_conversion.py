"""Pickled checkpoints become safetensors, and nothing in them is run."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgecc.conversion import convert
from edgecc.errors import EdgeccError, InputError, UnsupportedError, UsageError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.lift import lift
from edgecc.frontends.pickle_bounds import check_bounds
from edgecc.frontends.torch_file import read_torch_file
from edgecc.ir import DType
from helpers.checkpoints import write_target
from helpers.command_line import in_process
from helpers.eagle3 import write_eagle3

TYPES = {
    "float64": DType.F64, "float32": DType.F32, "float16": DType.F16, "bfloat16": DType.BF16,
    "int64": DType.I64, "int32": DType.I32, "int16": DType.I16, "int8": DType.I8,
    "uint8": DType.U8, "bool": DType.BOOL,
}  # fmt: skip


def pickled(safe: Path, folder: Path, **options: Any) -> Path:
    """A checkpoint as PyTorch writes it, made from one with safetensors."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    folder.mkdir()
    tensors = load_torch(safe / "model.safetensors")
    torch.save(OrderedDict(tensors), folder / "pytorch_model.bin", **options)
    for file in safe.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_a_draft_of_angelslims_form(tmp_path: Path) -> None:
    """Half precision, maps of ids and of marks, no safetensors: lifted after the conversion."""
    target = write_target(tmp_path / "t", layers=8, hidden=32, head_dim=16, quantized=False)
    safe = write_eagle3(tmp_path / "safe", architectures=["LlamaForCausalLMEEagle3"])
    source = pickled(safe, tmp_path / "d")
    with pytest.raises(UnsupportedError, match="edgecc convert FOLDER -o DIR") as caught:
        Checkpoint.open(source, role="draft")
    assert caught.value.id == "checkpoint/pickle"
    count = convert(source, tmp_path / "out")
    expected, found = (load_file(p / "model.safetensors") for p in (safe, tmp_path / "out"))
    assert count == len(expected)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name].view(np.uint8), array.view(np.uint8))
    assert "speculation by method eagle3: the draft stores d2t" in (
        lift(target, tmp_path / "out").decisions
    )


def test_types_scalars_views_and_parameters(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    whole = torch.arange(24).reshape(4, 6)
    saved = {name: whole.to(getattr(torch, name)) for name in TYPES}
    saved |= {"rows": whole[1:3], "scalar": torch.tensor(3.5), "none": torch.zeros(0, 4)}
    saved["parameter"] = torch.nn.Parameter(torch.ones(3))
    saved["one row"] = whole[1:2]
    path = tmp_path / "x.bin"
    torch.save(saved, path)
    found, data = read_torch_file(path, "x"), path.read_bytes()
    assert {n: t.dtype for n, t in found.items() if n in TYPES} == TYPES
    for name, tensor in found.items():
        flat = np.frombuffer(data[tensor.offset :][: tensor.nbytes], tensor.dtype.numpy)
        assert tensor.shape == tuple(saved[name].shape)
        expected = saved[name].detach().to(torch.float64).numpy()
        assert np.array_equal(flat.reshape(tensor.shape).astype(np.float64), expected)


@pytest.mark.parametrize("of", ["transposed", "column"])
def test_views_that_are_no_rows_are_refused(tmp_path: Path, of: str) -> None:
    torch = pytest.importorskip("torch")
    whole = torch.ones(3, 5)
    torch.save({"x": whole.T if of == "transposed" else whole[:, :1]}, tmp_path / "x.bin")
    with pytest.raises(UnsupportedError, match="skips or swaps"):
        read_torch_file(tmp_path / "x.bin", "x")


def archive(path: Path, description: bytes, **entries: bytes) -> Path:
    """An archive as torch.save makes it."""
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("archive/data.pkl", description)
        for name, data in entries.items():
            made.writestr(f"archive/{name.replace('_', '/')}", data)
    return path


class Bomb:
    """What its unpickling runs makes a folder."""

    def __init__(self, path: Path, run: Callable[..., Any] = os.mkdir) -> None:
        self.path, self.run = path, run

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return self.run, (str(self.path),)


@pytest.mark.parametrize("run", [os.mkdir, os.system, eval, Path], ids=lambda run: run.__name__)
@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_run(tmp_path: Path, run: Callable[..., Any], protocol: int) -> None:
    place = tmp_path / "made"
    described = pickle.dumps({"x": Bomb(place, run)}, protocol=protocol)
    path = archive(tmp_path / "x.bin", described)
    with pytest.raises(UnsupportedError, match="to be run") as caught:
        read_torch_file(path, "x")
    assert caught.value.id == "checkpoint/torch-code"
    assert not place.exists()


TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = (
    b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x06tQ"
)


def tensor(
    offset: bytes = b"K\x00",
    shape: bytes = b"K\x02K\x03\x86",
    stride: bytes = b"K\x03K\x01\x86",
    storage: bytes = STORAGE,
) -> bytes:
    return TENSOR + b"(" + storage + offset + shape + stride + b"\x89N" + b"tR"


def entry(value: bytes) -> bytes:
    """A description written by hand, in opcodes of protocol 2, of one value called x."""
    return b"\x80\x02}X\x01\x00\x00\x00x" + value + b"s."


FLOATS = np.arange(6, dtype=np.float32).tobytes()


def test_a_description_by_hand(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.bin", entry(tensor()), data_0=FLOATS, byteorder=b"little")
    (found,) = read_torch_file(path, "x").values()
    assert (found.shape, found.dtype, found.nbytes) == ((2, 3), DType.F32, 24)
    assert path.read_bytes()[found.offset :][:24] == FLOATS


@pytest.mark.parametrize(
    ("described", "entries"),
    [
        (b"", {}),
        (b"\x80\x02K\x01.", {}),
        (b"\x80\x02}.", {}),
        (b"\x80\x02]K\x01a.", {}),
        (b"\x80\x02}K\x01K\x02s.", {}),
        (entry(b"K\x01"), {}),
        (entry(b"N"), {}),
        (entry(tensor()), {}),
        (entry(tensor()), {"data_0": FLOATS[:-1]}),
        (entry(tensor(offset=b"K\x01")), {"data_0": FLOATS}),
        (entry(tensor(offset=b"J\xff\xff\xff\xff")), {"data_0": FLOATS}),
        (entry(tensor(shape=b"K\x02K\x04\x86", stride=b"K\x04K\x01\x86")), {"data_0": FLOATS}),
        (entry(tensor(stride=b"K\x01\x85")), {"data_0": FLOATS}),
        (entry(tensor(shape=b"]")), {"data_0": FLOATS}),
        (entry(tensor(storage=b"N")), {"data_0": FLOATS}),
        (entry(tensor(storage=b"NQ")), {"data_0": FLOATS}),
        (entry(TENSOR + b")R"), {"data_0": FLOATS}),
        (entry(tensor() + b"}X\x05\x00\x00\x00partsK\x01sb"), {"data_0": FLOATS}),
        (entry(b"ctorch\nFloatStorage\n}X\x05\x00\x00\x00valueK\x01sb"), {}),
        (entry(tensor())[:-4], {"data_0": FLOATS}),
        (entry(tensor()), {"data_0": FLOATS, "byteorder": b"big"}),
    ],
    ids=range(21),
)  # fmt: skip
def test_damaged_descriptions(tmp_path: Path, described: bytes, entries: dict[str, bytes]) -> None:
    path = archive(tmp_path / "x.bin", described, **entries)
    with pytest.raises(InputError) as caught:
        read_torch_file(path, "x")
    assert caught.value.id == "checkpoint/torch-damaged"
    assert DType.F32.value == "f32"


NESTED = b")" + b"\x85" * 100_000
"""Tuples in tuples: to hash them ends the process."""


@pytest.mark.parametrize(
    ("described", "says"),
    [
        (b"\x80\x02}r" + (2**28).to_bytes(4, "little") + b".", "memo entry 268435456"),
        (b"}p99999999\n.", "memo entry 99999999"),
        (b"}p-1\n.", "memo entry -1"),
        (b"\x80\x02}" + NESTED + b"Ns.", "more than 64 deep"),
        (b"\x80\x04(" + NESTED + b"\x91.", "more than 64 deep"),
        (b"\x80\x02})q\x01" + b"h\x01\x85q\x01" * 100 + b"Ns.", "more than 64 deep"),
        (b"\x80\x04})" + b"\x94h\x00\x85" + b"\x85" * 100 + b"Ns.", "more than 64 deep"),
        (b"\x80\x02}X\x01\x00\x00\x00x" + b"]" * 100 + b"a" * 99 + b"s.", "more than 64 deep"),
        (b"\x80\x02q\x00.", "nothing to keep"),
        (b"\x80\x02\x85.", "finds nothing"),
        (b"\x80\x02t.", "finds nothing"),
        (b"\x80\x02s.", "finds nothing"),
    ],
    ids=range(12),
)
def test_descriptions_that_would_take_too_much(tmp_path: Path, described: bytes, says: str) -> None:
    """Told from the instructions: nothing of this may be run, it takes gigabytes or the process."""
    path = archive(tmp_path / "x.bin", described)
    with pytest.raises(InputError, match=says) as caught:
        read_torch_file(path, "x")
    assert caught.value.id == "checkpoint/torch-damaged"


def test_descriptions_that_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgecc.frontends.pickle_bounds.MAX_STEPS", 1000)
    check_bounds(b"N0" * 499 + b"N.")
    with pytest.raises(ValueError, match="more than 1000 instructions"):
        check_bounds(b"N0" * 500 + b"N.")


@pytest.mark.parametrize("protocol", range(6))
def test_ordinary_values_are_within_the_bounds(protocol: int) -> None:
    """A dictionary is as deep as its deepest value, however many there are."""
    values = {str(n): ((n, (n, [n])), {n: {"x": (1,)}}, n % 2 == 0, 1.5, None) for n in range(200)}
    check_bounds(pickle.dumps(OrderedDict(values), protocol=protocol))
    check_bounds(pickle.dumps([values, [{"a"}, frozenset({(1, 2)})]] * 5, protocol=protocol))


def test_a_file_cannot_become_many(tmp_path: Path) -> None:
    """Views of one storage are written each for itself: so many of them would fill a disk."""
    shape, stride = b"M\x00\x04\x85", b"K\x01\x85"
    item = b"X\x04\x00\x00\x00%04d" + tensor(shape=shape, stride=stride).replace(b"%", b"%%")
    described = b"\x80\x02}(" + b"".join(item % n for n in range(2000)) + b"u."
    with pytest.raises(InputError, match=r"take 8192000 bytes, the file has") as caught:
        read_torch_file(archive(tmp_path / "x.bin", described, data_0=bytes(4096)), "x")
    assert caught.value.id == "checkpoint/torch-damaged"


def test_a_tensor_cannot_be_called_like_the_metadata(tmp_path: Path) -> None:
    """It would replace them in the header, and the file could not be read."""
    described = b"\x80\x02}X\x0c\x00\x00\x00__metadata__" + tensor() + b"s."
    with pytest.raises(InputError, match="__metadata__"):
        read_torch_file(archive(tmp_path / "x.bin", described, data_0=FLOATS), "x")


def test_every_cut_of_a_file_is_told(tmp_path: Path) -> None:
    data = archive(tmp_path / "x.bin", entry(tensor()), data_0=FLOATS).read_bytes()
    path = tmp_path / "cut.bin"
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(EdgeccError):
            read_torch_file(path, "x")


def test_compressed_archives_and_bare_pickles(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("archive/data.pkl", b"\x80\x02}." * 50)
    (tmp_path / "x.bin").write_bytes(stream.getvalue())
    with pytest.raises(InputError, match="compressed or encrypted"):
        read_torch_file(tmp_path / "x.bin", "x")
    (tmp_path / "x.bin").write_bytes(pickle.dumps({"x": 1}))
    with pytest.raises(UnsupportedError, match="before PyTorch") as caught:
        read_torch_file(tmp_path / "x.bin", "x")
    assert caught.value.id == "checkpoint/torch-format"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "d"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (source / "modeling.py").write_text("raise SystemExit")
    archive(source / "pytorch_model.bin", entry(tensor()), data_0=FLOATS)
    run = in_process(capsys)
    made = run("convert", source, "-o", tmp_path / "new" / "out")
    assert made.code == 0
    out = tmp_path / "new" / "out"
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    assert np.array_equal(
        load_file(out / "model.safetensors")["x"], np.arange(6, dtype=np.float32).reshape(2, 3)
    )
    assert run("convert", source, "-o", out).id == "usage/output-exists"
    assert run("convert", source, "-o", source / "x").id == "usage/output-in-checkpoint"
    assert run("convert", out, "-o", tmp_path / "x").id == "checkpoint/nothing-to-convert"
    assert run("convert", tmp_path / "none", "-o", tmp_path / "x").id == "checkpoint/not-found"
    (source / "pytorch_model.bin").write_bytes(b"PK")
    assert run("convert", source, "-o", tmp_path / "x").code == 4
    assert not (tmp_path / "x").exists()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_an_output_that_exists(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with pytest.raises(UsageError):
        convert(tmp_path / "d", tmp_path)
