"""Published statements are verified at the precision at which they were printed."""

from __future__ import annotations

import pytest

from slurm_affinode.traces import claims, trace_page
from slurm_affinode.traces.fleet import ServingSummary

ENTRY = {
    "id": "x", "finding": "f", "source": "s", "text": "66.7 %", "measure": "direct", "value": 66.7, "unit": "%",
    "scale": 100, "decimals": 1, "other": "by_pod", "other_recipe": "summing per pod",
}  # fmt: skip


def judged(**figures: float | None) -> claims.Claim:
    return claims.judge({"sources": {"s": "somebody"}, "claim": [ENTRY]}, figures)[0]


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ({"direct": 0.6674999, "by_pod": 0.5}, claims.BORNE_OUT),
        ({"direct": 0.6665}, claims.BORNE_OUT),
        ({"direct": 0.6675}, claims.NOT_BORNE_OUT),
        ({"direct": 0.6986, "by_pod": 0.66729}, claims.OTHER_RECIPE),
        ({"direct": 0.6986, "by_pod": 0.7}, claims.NOT_BORNE_OUT),
        ({"direct": 0.6986, "by_pod": None}, claims.NOT_BORNE_OUT),
        ({"by_pod": 0.667}, claims.UNKNOWN),
        ({"direct": None}, claims.UNKNOWN),
    ],
)
def test_verdict_compares_at_printed_precision(figures: dict[str, float | None], verdict: str) -> None:
    """Values are rounded half up; a match by another recipe has its own verdict; a missing figure is unknown."""
    assert judged(**figures).verdict == verdict


@pytest.mark.parametrize(
    ("share", "verdict"),
    [
        (0.14499, claims.NOT_BORNE_OUT), (0.145, claims.BORNE_OUT), (0.2, claims.BORNE_OUT),
        (0.30499, claims.BORNE_OUT), (0.305, claims.NOT_BORNE_OUT),
    ],
)  # fmt: skip
def test_published_range_includes_its_ends(share: float, verdict: str) -> None:
    entry = {**ENTRY, "value": 15, "to": 30, "decimals": 0}
    (claim,) = claims.judge({"sources": {"s": "somebody"}, "claim": [entry]}, {"direct": share})
    assert (claim.verdict, claim.published, claim.published_to) == (verdict, 15, 30)
    assert claim.as_dict()["published_to"] == 30


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ({"direct": None, "reversed": 0.9}, "the tables are exchanged"),
        ({"direct": None, "reversed": None}, None),
        ({"direct": 0.667, "reversed": 0.1}, None),
    ],
)
def test_contradiction_is_the_reason_of_an_unknown_verdict(
    figures: dict[str, float | None], reason: str | None
) -> None:
    """A missing table has no such reason, nor has a known figure."""
    entry = {**ENTRY, "contradicted_by": "reversed", "contradiction": "the tables are exchanged"}
    (claim,) = claims.judge({"sources": {"s": "somebody"}, "claim": [entry]}, figures)
    assert claim.reason == reason
    assert claim.as_dict().get("reason") == reason
    assert (claim.verdict == claims.UNKNOWN) == (figures["direct"] is None)
    shown = trace_page.claim_row(claim).detail
    assert (shown == reason) == (reason is not None)


def test_claim_json_names_recipe() -> None:
    result = judged(direct=0.6986, by_pod=0.66729).as_dict()
    assert result["published"] == 66.7
    assert result["computed"] == pytest.approx(69.86)
    assert result["other_computed"] == pytest.approx(66.729)
    assert result["other_recipe"] == "summing per pod"


def test_gentd26_claims_refer_to_known_figures_and_sources() -> None:
    """Every claim names figures of the summary and a listed source."""
    table = claims.load("gentd26")
    figures = ServingSummary().as_dict()
    for entry in table["claim"]:
        assert entry["measure"] in figures, entry["id"]
        assert entry["source"] in table["sources"]
        assert entry.get("other", entry["measure"]) in figures
        assert entry.get("contradicted_by", entry["measure"]) in figures
        assert ("contradicted_by" in entry) == ("contradiction" in entry)
        assert ("other" in entry) == ("other_recipe" in entry)
    assert {claim.verdict for claim in claims.judge(table, figures)} == {claims.UNKNOWN}
    assert len({entry["id"] for entry in table["claim"]}) == len(table["claim"])


def test_nested_figures_are_flat() -> None:
    assert claims.flat({"a": {"b": {"c": 1}, "d": [1]}, "e": None}) == {"a.b.c": 1, "e": None}
