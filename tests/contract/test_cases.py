"""Each rule tells what it is about, on small pairs broken in one place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edgecc.contract.examination import examine
from edgecc.contract.report import check
from edgecc.contract.rules import RULES
from edgecc.errors import EdgeccError
from edgecc.frontends.options import LiftOptions
from helpers.broken_cases import CASES
from helpers.broken_pairs import BAD, FINE, Case, write_pair


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contract")
    write_pair(folder)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.id}: {case.about}")
def test_broken(case: Case, originals: Path, tmp_path: Path) -> None:
    work = tmp_path / "pair"
    shutil.copytree(originals, work)
    case.apply(work / "target", work / "draft")
    draft = None if case.alone else work / "draft"
    report = check(work / "target", draft, components=case.components)
    by_id = [f for f in report.findings if f.diagnostic.id == case.id]
    assert by_id, [f.diagnostic.render() for f in report.findings]
    finding = by_id[0]
    told = finding.diagnostic.render()
    assert case.says in told
    assert finding.diagnostic.where
    assert finding.why
    assert finding.action
    assert report.exit_code == case.code, told
    assert (finding.diagnostic.severity == "error") is (case.code != FINE)
    if case.code != FINE and case.id != "bind/hidden-mismatch":  # that is for a pass to tell
        assert_a_compile_says_what_to_do(case, work / "target", draft)


def assert_a_compile_says_what_to_do(case: Case, target: Path, draft: Path | None) -> None:
    options = LiftOptions(components=case.components)
    found = examine(target, draft, options, metadata_only=True)
    with pytest.raises(EdgeccError) as caught:
        found.lifted()
    found.close()
    assert caught.value.exit_code == case.code
    assert all(d.help for d in caught.value.diagnostics)


def test_a_pair_as_it_should_be(originals: Path) -> None:
    """Nothing but what the helpers' pair really has: its one layer is tapped, two stop lists."""
    report = check(originals / "target", originals / "draft")
    assert report.exit_code == 0
    ids = {f.diagnostic.id for f in report.findings}
    assert ids == {"draft/last-layer", "tokenizer/stop-tokens"}


def test_every_rule_is_tested() -> None:
    covered = {case.id for case in CASES}
    # What the hub says has tests with one, in tests/hub.
    assert [r.name for r in RULES if not covered & r.ids.keys()] == ["model-hub"]
    assert {case.code for case in CASES} > {BAD, FINE}
