"""A command loads what it needs and no more: what is imported decides how long the short ones take.

Counted in modules and not in seconds, which differ between machines.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.broken_pairs import write_pair
from helpers.command_line import environment

ENGINES = {"onnx", "onnx_ir", "onnxruntime", "onnxscript", "tensorrt", "tensorrt_rtx", "torch"}
HUB = {"httpx", "httpx2", "huggingface_hub"}
OTHERS = {"jinja2", "jsonschema", "networkx", "rich", "safetensors", "tokenizers", "transformers"}

_RUN = """
import json, sys
from edgecc.cli import main
code = main(sys.argv[1:])
print("\\n" + json.dumps([code, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def loaded(*arguments: object) -> set[str]:
    """Top-level packages that a command has loaded at its end."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *map(str, arguments)],
        capture_output=True,
        env=environment(),
        text=True,
    )
    assert done.returncode == 0, done.stderr
    code, names = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    return set(names)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_check_reads_metadata_and_loads_no_engine(tmp_path: Path, as_json: bool) -> None:
    """Neither a graph library, nor a network client for local folders."""
    target, draft = write_pair(tmp_path)
    flags = ["--json"] if as_json else []
    found = loaded("check", target, "--draft", draft, *flags)
    assert not found & {*ENGINES, *HUB, *OTHERS}
    assert "numpy" in found  # the test sees what is loaded


def test_the_ir_is_loaded_by_parts() -> None:
    """Reading the types of the IR loads no parser, and no graph library."""
    done = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import sys, edgecc.ir; from edgecc.ir import DType; "
            "print(*[n for n in sys.modules if n.startswith(('edgecc.ir.', 'networkx'))])",
        ],
        capture_output=True,
        env=environment(),
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["edgecc.ir.types"]
