"""Signatures: evidence that makes a GPU a finding, and evidence that does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.base.resources import asset_dir
from slurm_affinode.core import signatures
from slurm_affinode.core.signatures import GpuFacts, RunFacts, judge

FILE = signatures.parse((asset_dir("reports") / "signatures.toml").read_text(encoding="utf-8"))
SIGNATURES = {one.name: one for one in FILE.signatures}
RUNNING = RunFacts("RUNNING", running=True, elapsed_s=20_000, limit_s=86_400)
SQUATTING = GpuFacts({"util_pct": 0.0}, 7200.0, 77.6, 80.0, 60.0, used_before=False)

maybe = st.none() | st.floats(0, 200)
facts = st.builds(
    GpuFacts,
    peaks_pct=st.dictionaries(st.sampled_from(["util_pct", "sm_active", "dram_active"]), st.none() | st.floats(0, 100)),
    idle_s=st.none() | st.floats(0, 1e6),
    memory_gib=maybe,
    memory_total_gib=st.none() | st.floats(1, 200),
    power_w=maybe,
    used_before=st.none() | st.booleans(),
)
runs = st.builds(
    RunFacts,
    state=st.sampled_from([None, "RUNNING", "TIMEOUT", "FAILED", "OUT_OF_MEMORY", "COMPLETED"]),
    running=st.booleans(),
    elapsed_s=st.none() | st.floats(0, 1e6),
    limit_s=st.none() | st.floats(0, 1e6),
)


def test_packaged_signatures_are_valid_and_judge_their_examples() -> None:
    """The file has no faults and an example of each outcome, and all examples have the expected outcome."""
    assert not FILE.faults
    tried = signatures.try_examples(FILE)
    assert [one.example.claim for one in tried if not one.ok] == []
    assert {one.example.fits for one in tried} == {True, False}


def test_framework_that_preallocates_and_computes_is_not_a_squatter() -> None:
    """97 % of the memory and 98.6 % utilization match no signature."""
    busy = GpuFacts({"util_pct": 98.6}, 0.0, 38.8, 40.0, 390.0, used_before=True)
    for one in FILE.signatures:
        assert not judge(one, busy, RUNNING).fits


def test_held_memory_without_measured_activity_is_not_a_finding() -> None:
    """Unknown activity is not idleness."""
    for peaks in ({}, {"util_pct": None}):
        verdict = judge(SIGNATURES["squatter"], dataclasses.replace(SQUATTING, peaks_pct=peaks), RUNNING)
        assert not verdict.fits
        assert "not measured" in verdict.why_not


@pytest.mark.parametrize(
    ("run", "fits"),
    [
        (RUNNING, True),
        (RunFacts("TIMEOUT", False, 3600, 3600), True),
        (RunFacts("TIMEOUT", False, 3600, None), True),
        (RunFacts("OUT_OF_MEMORY", False, 3590, 3600), True),
        (RunFacts("FAILED", False, 600, 3600), False),
        (RunFacts("FAILED", False, 600, None), False),
        (RunFacts("COMPLETED", False, 3600, 3600), False),
    ],
)
def test_state_is_running_or_ended_at_the_time_limit(run: RunFacts, fits: bool) -> None:
    """A job that failed early, or completed, is no squatter."""
    assert judge(SIGNATURES["squatter"], SQUATTING, run).fits is fits


@pytest.mark.parametrize("watts", [None, 0.0, 60.0, 700.0])
def test_power_is_reported_and_never_required(watts: float | None) -> None:
    """Its value does not matter, and it may be unknown."""
    verdict = judge(SIGNATURES["squatter"], dataclasses.replace(SQUATTING, power_w=watts), RUNNING)
    assert verdict.fits
    assert verdict.score == pytest.approx(1.0)
    assert verdict.evidence[-1].dimension == "power"


def test_evidence_has_value_threshold_weight_and_unknown() -> None:
    """Each dimension can be read separately."""
    unknown = dataclasses.replace(SQUATTING, memory_gib=None)
    evidence = {one.dimension: one for one in judge(SIGNATURES["squatter"], unknown, RUNNING).evidence}
    assert evidence["memory"].unknown
    assert evidence["memory"].value is None
    assert evidence["memory"].points == 0
    assert evidence["time"].value == 7200
    assert evidence["time"].threshold == "at least 1h"
    assert evidence["compute"].weight == pytest.approx(0.4)


@given(facts, runs, st.sampled_from(sorted(SIGNATURES)), st.sampled_from(["x_active", "y_active"]))
def test_unknown_additional_signal_changes_no_score(gpu: GpuFacts, run: RunFacts, name: str, signal: str) -> None:
    """It neither raises a score nor makes a finding."""
    before = judge(SIGNATURES[name], gpu, run)
    after = judge(SIGNATURES[name], dataclasses.replace(gpu, peaks_pct={**gpu.peaks_pct, signal: None}), run)
    assert after.score == before.score
    assert after.fits == before.fits


@given(
    facts,
    runs,
    st.sampled_from(sorted(SIGNATURES)),
    st.sampled_from(["idle_s", "memory_gib", "power_w", "used_before"]),
)
def test_less_knowledge_never_raises_a_score(gpu: GpuFacts, run: RunFacts, name: str, what: str) -> None:
    """A dimension that becomes unknown counts as zero."""
    before = judge(SIGNATURES[name], gpu, run)
    after = judge(SIGNATURES[name], dataclasses.replace(gpu, **{what: None}), run)
    assert after.score <= before.score + 1e-9
    assert before.fits or not after.fits


@given(facts, runs, st.sampled_from(sorted(SIGNATURES)))
def test_one_dimension_is_never_a_finding(gpu: GpuFacts, run: RunFacts, name: str) -> None:
    """A match has at least two dimensions, one of which is measured compute."""
    verdict = judge(SIGNATURES[name], gpu, run)
    met = {one.dimension for one in verdict.evidence if one.met and one.weight > 0}
    if verdict.fits:
        assert len(met) >= 2
        assert "compute" in met
        assert any(value is not None for value in gpu.peaks_pct.values())
    assert 0 <= verdict.score <= 1


GOOD = """[[signature]]
name = "a"
kind = "squatter"
min_score = 0.8
[signature.memory]
above_pct = 95
weight = 0.4
[signature.compute]
at_most_pct = 5
weight = 0.4
[signature.time]
longer_than = "1h"
weight = 0.2
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ('name = "a"', 'name = "A b"', 2, "is not a name"),
        ('kind = "squatter"', 'kind = "x"', 3, "'x' is not one of squatter"),
        ("min_score = 0.8", "min_score = 2", 4, "2 is not from 0 to 1"),
        ("above_pct = 95", "above_pct = 101", 6, "101 is not from 0 to 100"),
        ("above_pct = 95", "abov_pct = 95", 6, "unknown key"),
        ("at_most_pct = 5", "at_most_pct = true", 9, "not a number"),
        ('longer_than = "1h"', 'longer_than = "soon"', 12, "soon"),
        (
            "[signature.time]",
            '[signature.state]\nweight = 0\nended = [["FAILED"]]\n[signature.time]',
            13,
            "list of strings",
        ),
        ("min_score = 0.8", "min_score = 0.4", 7, "by itself"),
        ("[signature.compute]\nat_most_pct = 5\nweight = 0.4\n", "", 1, "is missing"),
        ("above_pct = 95\n", "", 5, "needs above_pct"),
        ("weight = 0.2", "weight = 0.3", 1, "add up to"),
        ("min_score = 0.8", "min_score = ", 4, "not TOML"),
    ],
)
def test_faults_are_reported_by_line(old: str, new: str, line: int, words: str) -> None:
    assert not signatures.parse(GOOD).faults
    faults = signatures.parse(GOOD.replace(old, new, 1)).faults
    assert any(one.line == line and words in one.message for one in faults), faults


@given(st.text(max_size=300))
def test_any_text_is_valid_or_has_a_fault(text: str) -> None:
    """No exception is raised."""
    parsed = signatures.parse(text)
    assert parsed.faults or parsed.signatures


def test_example_with_another_outcome_is_reported(tmp_path: Path) -> None:
    """An example of the site shows that a threshold was changed too far."""
    example = '[[signature.example]]\nsays = "idle"\nfits = true\nmemory_gib = 79\nmemory_total_gib = 80\n'
    example += 'peaks_pct = { util_pct = 0 }\nidle = "30m"\n'
    tried = signatures.try_examples(signatures.parse(GOOD + example))
    assert [one.ok for one in tried] == [False]
    half = signatures.parse(GOOD + example).with_window(1200)
    assert [one.ok for one in signatures.try_examples(half)] == [True]
