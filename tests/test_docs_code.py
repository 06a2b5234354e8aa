"""The Python of the documentation runs and does what the text says."""

from __future__ import annotations

import re
from pathlib import Path

from edgecc.passes import PassContext

DOCS = Path(__file__).parents[1] / "docs"


def python_of(page: str) -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


def test_rewriting(capsys):
    names: dict = {}
    exec(python_of("rewriting.md"), names)
    assert "  %y = silu(%x) : f32[t, 4]\n  return" in capsys.readouterr().out
    (node,) = names["module"].graphs["main"].nodes
    assert node.location.passes == ("fuse-silu",)
    ctx = PassContext()
    assert not names["FuseSilu"]().run(names["module"], ctx)
    assert ctx.remarks == []
