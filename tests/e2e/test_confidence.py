"""The confidence heads of the shipped DSpark pairs: how much is verified, and the same text."""

from __future__ import annotations

import numpy as np
import pytest

import edgecc
from edgecc.errors import RequestError

LENGTH = 48


@pytest.fixture(scope="module")
def goldens_of_dspark(pair, goldens):
    if pair.method != "dspark":
        pytest.skip("no confidence head")
    return goldens


def leading(confidence, threshold):
    """Slots before the first one below a threshold, by the definition."""
    unsure = np.flatnonzero(1 / (1 + np.exp(-confidence.astype(np.float64))) < threshold)
    return int(unsure[0]) if len(unsure) else len(confidence)


def middle(confidence):
    """A threshold that cuts the block, far from all of its values."""
    values = np.sort(1 / (1 + np.exp(-confidence.astype(np.float64))))
    place = int(np.argmax(np.diff(values)))
    return float(values[place : place + 2].mean())


def test_the_first_round_verifies_what_the_reference_is_sure_of(goldens_of_dspark, generator):
    for golden in goldens_of_dspark.values():
        confidence = golden["block_confidence_logits"]
        for threshold in (middle(confidence), 0.0, 1.0):
            found = generator.generate(
                token_ids=golden["ids"], max_new_tokens=12, confidence_threshold=threshold
            )
            sure = leading(confidence, threshold) if threshold else len(confidence)
            stats = found.stats
            assert stats.proposed_by_round[0] == sure
            assert stats.withheld_by_round[0] == len(confidence) - sure
            assert found.token_ids == golden["greedy"].tolist()[:12]


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.8])
def test_text_stays_and_acceptance_grows(goldens_of_dspark, generator, threshold):
    everything, sure = (
        [
            generator.generate(
                token_ids=golden["ids"], max_new_tokens=LENGTH, confidence_threshold=value
            )
            for golden in goldens_of_dspark.values()
        ]
        for value in (None, threshold)
    )
    assert [f.token_ids for f in sure] == [f.token_ids for f in everything]

    def rate(found):
        stats = [f.stats for f in found]
        return sum(s.accepted for s in stats) / sum(s.proposed for s in stats)

    assert sum(f.stats.withheld for f in sure) > 0
    assert rate(sure) > rate(everything)


def test_sampled_text_stays(goldens_of_dspark, generator):
    golden = goldens_of_dspark["p0"]
    asked = {"token_ids": golden["ids"], "max_new_tokens": LENGTH, "temperature": 0.9, "seed": 3}
    plain = generator.generate(**asked, speculation=False)
    found = generator.generate(**asked, confidence_threshold=0.4)
    assert found.token_ids == plain.token_ids
    assert found.stats.withheld > 0


def test_each_sequence_of_a_batch_has_its_own_length(pair, goldens_of_dspark, tmp_path):
    """And its own threshold; what comes out is that of the request alone."""
    out = tmp_path / "b"
    sizes = {"max_model_len": 160, "prefill_chunk": 32, "max_batch_size": 3}
    edgecc.compile(pair.target, pair.draft, out=out, verify="none", **sizes)
    prompts = [g["ids"] for g in goldens_of_dspark.values() if len(g["ids"]) + LENGTH < 160]
    asked = [
        {"token_ids": ids, "max_new_tokens": LENGTH, "confidence_threshold": threshold}
        for ids in prompts[:2]
        for threshold in (None, 0.3, 0.7)
    ]
    with edgecc.load(out) as generator:
        together = generator.generate_batch([generator.request(**one) for one in asked])
        alone = [generator.generate(**one) for one in asked]
    for found, single in zip(together, alone, strict=True):
        assert found.token_ids == single.token_ids
        assert found.stats.proposed_by_round == single.stats.proposed_by_round
        assert found.stats.withheld_by_round == single.stats.withheld_by_round
    assert len({tuple(found.stats.proposed_by_round) for found in together}) > 2


def test_drafts_without_the_head(pair, generator):
    if pair.method == "dspark":
        pytest.skip("it has one")
    with pytest.raises(RequestError, match="does not tell how sure it is") as caught:
        generator.generate(token_ids=[1, 2], confidence_threshold=0.5)
    assert caught.value.id == "request/no-confidence"
