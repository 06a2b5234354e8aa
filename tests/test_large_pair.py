"""The benchmark of the 27B pair, on a pair of two small layers."""

from __future__ import annotations

import pytest
from benchmarks import large_pair


@pytest.mark.slow
def test_it_measures_and_leaves_no_bundle(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pair, "TARGET", "deep")
    monkeypatch.setattr(large_pair, "DRAFTS", {"current": "deep-dspark"})
    flags = ["--verify", "none", "--max-model-len", "64"]
    result = large_pair.run(tmp_path, "current", 2, ["cpu"], flags)
    found = result.data["cpu"]
    assert found["bundle_bytes"] > found["weight_file_bytes"] > 0
    assert found["bundle_bytes"] < 1.1 * found["checkpoint_bytes"]
    assert found["peak"] > 10_000_000  # the interpreter and its modules at least
    assert found["shared_bytes"] > 0
    assert "| cpu |" in result.tables[0].markdown()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep-2", "deep-dspark-2"]
