"""Signatures: evidence that makes a GPU a finding, and evidence that does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.base.resources import asset_dir
from slurm_affinode.core import signatures
from slurm_affinode.core.signatures import (
    Compute,
    GpuFacts,
    MemoryCondition,
    Power,
    RunFacts,
    Signature,
    State,
    Time,
    UseHistory,
    judge,
    lacks_only_time,
)
from slurm_affinode.model.finding import Evidence

FILE = signatures.parse((asset_dir("reports") / "signatures.toml").read_text(encoding="utf-8"))
SIGNATURES = {entry.name: entry for entry in FILE.signatures}
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
    assert [entry.example.claim for entry in tried if not entry.ok] == []
    assert {entry.example.fits for entry in tried} == {True, False}


def test_framework_that_preallocates_and_computes_is_not_a_squatter() -> None:
    """97 % of the memory and 98.6 % utilization match no signature."""
    busy = GpuFacts({"util_pct": 98.6}, 0.0, 38.8, 40.0, 390.0, used_before=True)
    for entry in FILE.signatures:
        assert not judge(entry, busy, RUNNING).fits


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
    evidence = {entry.dimension: entry for entry in judge(SIGNATURES["squatter"], unknown, RUNNING).evidence}
    assert evidence["memory"].unknown
    assert evidence["memory"].value is None
    assert evidence["memory"].points == 0
    assert evidence["time"].value == 7200
    assert evidence["time"].threshold == "at least 1h"
    assert evidence["compute"].weight == pytest.approx(0.4)


def signature(min_score: float = 0.8, **parts: Any) -> Signature:
    """Return a signature with compute and time, and other dimensions."""
    compute, time = Compute(0.4, required=True, at_most_pct=5.0), Time(0.4, required=True, longer_than_s=3600.0)
    return Signature("a", "squatter", "", compute, time, min_score, **parts)


IDLE = GpuFacts({"util_pct": 0.0}, 7200.0)


def item(dimension: str, gpu: GpuFacts = IDLE, run: RunFacts = RUNNING, **parts: Any) -> Evidence:
    """Return the evidence of one dimension."""
    return next(result for result in judge(signature(**parts), gpu, run).evidence if result.dimension == dimension)


@pytest.mark.parametrize(
    ("memory", "used", "total", "met"),
    [
        (MemoryCondition(0.2, False, above_pct=50.0), 40.0, 80.0, False),
        (MemoryCondition(0.2, False, above_pct=50.0), 40.1, 80.0, True),
        (MemoryCondition(0.2, False, above_pct=50.0), 40.1, 0.0, False),
        (MemoryCondition(0.2, False, above_pct=50.0), 40.1, None, False),
        (MemoryCondition(0.2, False, above_pct=50.0), None, 80.0, False),
        (MemoryCondition(0.2, False, or_above_gib=40.0), 40.0, 80.0, False),
        (MemoryCondition(0.2, False, or_above_gib=40.0), 40.1, 80.0, True),
        (MemoryCondition(0.2, False, or_above_gib=40.0), 40.1, None, True),
        (MemoryCondition(0.2, False, above_pct=95.0, or_above_gib=40.0), 41.0, 80.0, True),
        (MemoryCondition(0.2, False, above_pct=95.0, or_above_gib=40.0), 39.0, 40.0, True),
        (MemoryCondition(0.2, False, above_pct=95.0, or_above_gib=40.0), 38.0, 40.0, False),
        (MemoryCondition(0.2, False, at_most_gib=1.0), 1.0, 80.0, True),
        (MemoryCondition(0.2, False, at_most_gib=1.0), 1.1, 80.0, False),
        (MemoryCondition(0.2, False, at_most_gib=1.0), 0.0, None, True),
        (MemoryCondition(0.2, False, at_most_gib=1.0), None, 80.0, False),
    ],
)
def test_memory_is_met_above_its_bounds_or_up_to_one(
    memory: MemoryCondition, used: float | None, total: float | None, met: bool
) -> None:
    """The share is unknown without the size of the GPU, and 0 GiB is a measurement."""
    gpu = dataclasses.replace(IDLE, memory_gib=used, memory_total_gib=total)
    assert item("memory", gpu, memory=memory).met is met


@pytest.mark.parametrize(
    ("memory", "used", "total", "threshold", "words"),
    [
        (MemoryCondition(0.2, False, 95.0), 40.0, 80.0, "above 95 %", "50 % of the GPU memory held (40.0 of 80.0 GiB)"),
        (MemoryCondition(0.2, False, 95.0), 40.0, None, "above 95 %", "40.0 GiB held, of an unknown size"),
        (
            MemoryCondition(0.2, False, 95.0, 40.0),
            30.0,
            None,
            "above 95 % or above 40 GiB",
            "30.0 GiB of GPU memory held",
        ),
        (MemoryCondition(0.2, False, None, 40.0), 30.0, None, "above 40 GiB", "30.0 GiB of GPU memory held"),
        (MemoryCondition(0.2, False, None, 40.0), None, 80.0, "above 40 GiB", "memory held on the GPU is not known"),
    ],
)
def test_memory_is_described_as_far_as_it_is_known(
    memory: MemoryCondition, used: float | None, total: float | None, threshold: str, words: str
) -> None:
    evidence = item("memory", dataclasses.replace(IDLE, memory_gib=used, memory_total_gib=total), memory=memory)
    assert (evidence.threshold, evidence.text) == (threshold, words)


def test_compute_time_and_power_have_bounds() -> None:
    """Activity at the limit is idle, a time of the window suffices, and power must be below its bound."""
    assert item("compute", GpuFacts({"util_pct": 5.0, "sm_active": 0.0}, 0.0)).met
    busy = item("compute", GpuFacts({"util_pct": 5.1, "sm_active": 0.0}, 0.0))
    assert (busy.met, busy.text, busy.sources) == (False, "it computes: util_pct reached 5.1 %", 2)
    assert item("time", dataclasses.replace(IDLE, idle_s=3600.0)).met
    assert not item("time", dataclasses.replace(IDLE, idle_s=3599.0)).met
    cool = dataclasses.replace(IDLE, power_w=99.0)
    assert item("power", cool, power=Power(0.1, below_w=100.0)).met
    assert not item("power", dataclasses.replace(IDLE, power_w=100.0), power=Power(0.1, below_w=100.0)).met
    assert not item("power", cool, power=Power(0.0, below_w=100.0)).met
    unbounded = item("power", cool, power=Power(0.1))
    assert (unbounded.met, unbounded.threshold) == (False, None)


def test_highest_signal_is_the_peak() -> None:
    """Signals without a value are left out, and 0 % is a value."""
    assert GpuFacts({"util_pct": 0.0, "sm_active": None}).peak_pct == 0.0
    assert GpuFacts({"util_pct": 3.0, "sm_active": 4.0}).peak_pct == 4.0
    assert GpuFacts({"sm_active": None}).peak_pct is None


@pytest.mark.parametrize(
    ("before", "used", "met", "words"),
    [
        ("never", False, True, "never above 5 % in the examined time"),
        ("never", True, False, "it was above 5 % before"),
        ("once", True, True, "it was above 5 % before"),
        ("once", False, False, "never above 5 % in the examined time"),
        ("never", None, False, "whether it was used before is not known"),
        ("once", None, False, "whether it was used before is not known"),
    ],
)
def test_use_before_is_never_or_once(before: str, used: bool | None, met: bool, words: str) -> None:
    rule = UseHistory(0.2, required=False, before=before)
    evidence = item("use", dataclasses.replace(IDLE, used_before=used), use=rule)
    assert (evidence.met, evidence.text) == (met, words)


@pytest.mark.parametrize(
    ("rule", "run", "met", "words"),
    [
        (State(0.2, False), RUNNING, True, "the job is RUNNING"),
        (State(0.2, False), RunFacts("SUSPENDED", True), False, "the job is SUSPENDED"),
        (State(0.2, False), RunFacts(None, False), False, "the state of the job is not known"),
        (State(0.2, False, running=False, ended=("FAILED",)), RUNNING, False, "the job is RUNNING"),
        (State(0.2, False, ended=("FAILED",)), RunFacts("COMPLETED", False, 98, 100), False, "the job ended COMPLETED"),
        (State(0.2, False, ended=("TIMEOUT",)), RunFacts("TIMEOUT", False), True, "the job ended at its time limit"),
        (
            State(0.2, False, ended=("FAILED",)), RunFacts("FAILED", False, 98, 100), True,
            "the job ended FAILED after 98 % of its time limit",
        ),
        (
            State(0.2, False, ended=("FAILED",)), RunFacts("FAILED", False, 97, 100), False,
            "the job ended FAILED after 97 % of its time limit",
        ),
        (
            State(0.2, False, ended=("FAILED",)), RunFacts("FAILED", False, 98, 0), False,
            "the job ended FAILED; its time limit is not known",
        ),
        (
            State(0.2, False, ended=("FAILED",)), RunFacts("FAILED", False, None, 100), False,
            "the job ended FAILED; its time limit is not known",
        ),
    ],
)  # fmt: skip
def test_state_is_met_by_the_share_of_the_time_limit(rule: State, run: RunFacts, met: bool, words: str) -> None:
    evidence = item("state", run=run, state=rule)
    assert (evidence.met, evidence.text) == (met, words)


@pytest.mark.parametrize(
    ("rule", "threshold"),
    [
        (State(0.2, False), "RUNNING"),
        (State(0.2, False, ended=("FAILED", "TIMEOUT")), "RUNNING or FAILED, TIMEOUT at its time limit"),
        (State(0.2, False, running=False, ended=("FAILED",)), "FAILED at its time limit"),
    ],
)
def test_threshold_of_the_state_names_what_the_rule_names(rule: State, threshold: str) -> None:
    assert item("state", state=rule).threshold == threshold


def test_signature_fits_from_its_least_score() -> None:
    """Dimensions that are not met are named in the order of their importance: compute, then those required."""
    memory = MemoryCondition(0.1, required=False, above_pct=50.0)
    full = dataclasses.replace(IDLE, memory_gib=60.0, memory_total_gib=80.0)
    assert judge(signature(0.9, memory=memory), full, RUNNING).fits
    assert judge(signature(0.9, memory=memory), IDLE, RUNNING).why_not == "score 0.80 is below 0.90"
    required = dataclasses.replace(memory, required=True)
    assert judge(signature(memory=memory), IDLE, RUNNING).fits
    assert judge(signature(memory=required), IDLE, RUNNING).why_not == "memory held on the GPU is not known"
    busy = dataclasses.replace(IDLE, peaks_pct={"util_pct": 9.0}, idle_s=0.0)
    assert judge(signature(memory=required), busy, RUNNING).why_not == "it computes: util_pct reached 9.0 %"
    optional = dataclasses.replace(signature(0.0), compute=Compute(0.4, required=False, at_most_pct=5.0))
    assert not judge(optional, dataclasses.replace(busy, idle_s=7200.0), RUNNING).fits
    alone = dataclasses.replace(signature(0.3), time=Time(0.0, required=True, longer_than_s=3600.0))
    for entry in (alone, dataclasses.replace(alone, memory=memory)):
        assert judge(entry, IDLE, RUNNING).why_not == "one dimension alone is not sufficient"
    heavy = dataclasses.replace(signature(), compute=Compute(0.9, required=True, at_most_pct=5.0))
    assert judge(heavy, IDLE, RUNNING).score == 1.0


def test_only_the_time_is_missing_if_nothing_else_speaks_against_it() -> None:
    """Whether the GPU was used before may be unknown for the same reason."""
    memory = MemoryCondition(0.2, required=True, above_pct=50.0)
    use = UseHistory(0.2, required=True, before="never")
    late = dataclasses.replace(IDLE, idle_s=60.0)
    full = dataclasses.replace(late, memory_gib=60.0, memory_total_gib=80.0)
    assert lacks_only_time(judge(signature(), late, RUNNING))
    assert lacks_only_time(judge(signature(), dataclasses.replace(late, idle_s=None), RUNNING))
    assert not lacks_only_time(judge(signature(), IDLE, RUNNING))
    assert not lacks_only_time(judge(signature(), dataclasses.replace(late, peaks_pct={"util_pct": 9.0}), RUNNING))
    assert not lacks_only_time(judge(signature(), dataclasses.replace(late, peaks_pct={}), RUNNING))
    assert lacks_only_time(judge(signature(memory=memory), full, RUNNING))
    assert not lacks_only_time(judge(signature(memory=memory), late, RUNNING))
    optional = dataclasses.replace(memory, required=False)
    assert lacks_only_time(judge(signature(memory=optional), late, RUNNING))
    assert lacks_only_time(judge(signature(1.0, use=use), dataclasses.replace(late, used_before=None), RUNNING))
    assert not lacks_only_time(judge(signature(1.0, use=use), dataclasses.replace(late, used_before=True), RUNNING))
    assert not lacks_only_time(judge(signature(0.9), late, RUNNING))
    assert not lacks_only_time(judge(signature(0.9, memory=optional), IDLE, RUNNING))
    active = dataclasses.replace(full, peaks_pct={"util_pct": 9.0})
    rarely = dataclasses.replace(signature(0.5, memory=memory), compute=Compute(0.4, required=False, at_most_pct=5.0))
    assert not lacks_only_time(judge(rarely, active, RUNNING))  # activity is not idleness, also if it is not required


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
    met = {entry.dimension for entry in verdict.evidence if entry.met and entry.weight > 0}
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
    assert any(fault.line == line and words in fault.message for fault in faults), faults


FULL = (
    GOOD
    + """[signature.use]
weight = 0
before = "never"
[signature.state]
weight = 0
ended = ["FAILED"]
[signature.power]
weight = 0
below_w = 100
"""
)


def test_signature_has_the_values_and_the_defaults_of_its_file() -> None:
    """Compute and time are required by default, power never."""
    [parsed] = signatures.parse(FULL).signatures
    assert (parsed.name, parsed.kind, parsed.title, parsed.advice, parsed.line) == ("a", "squatter", "", "", 1)
    assert parsed.compute == Compute(0.4, required=True, at_most_pct=5)
    assert parsed.time == Time(0.2, required=True, longer_than_s=3600)
    assert parsed.memory == MemoryCondition(0.4, required=False, above_pct=95)
    assert parsed.use == UseHistory(0, required=False, before="never")
    assert parsed.state == State(0, required=False, running=True, ended=("FAILED",), limit_share=0.98)
    assert parsed.power == Power(0, below_w=100)
    [parsed] = signatures.parse(GOOD.replace("min_score = 0.8\n", "")).signatures
    assert (parsed.min_score, parsed.use, parsed.state, parsed.power) == (0.8, None, None, None)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("min_score = 0.8", "min_score = 1"),
        ("weight = 0.2", "weight = 0"),
        ("above_pct = 95", "or_above_gib = 40"),
        ("above_pct = 95", "above_pct = 100\nor_above_gib = 40"),
        ("above_pct = 95", "at_most_gib = 1"),
        ("above_pct = 95", "above_pct = 0"),
        ("at_most_pct = 5", "at_most_pct = 50"),
        ("[[signature]]", "version = 1\n[[signature]]"),
    ],
)
def test_values_at_their_bounds_are_valid(old: str, new: str) -> None:
    parsed = signatures.parse(GOOD.replace(old, new, 1))
    assert (parsed.faults, len(parsed.signatures)) == ((), 1)


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("[[signature]]", "version = 2\n[[signature]]", 1, "this release reads version 1"),
        ("weight = 0.2", "weight = 0.201", 1, "the weights add up to 1.001"),
        ("above_pct = 95", "above_pct = 95\nat_most_gib = 1", 5, "needs above_pct"),
        ('before = "never"\n', "", 14, "before"),
        ('before = "never"', 'before = "twice"', 16, "'twice' is not one of"),
        ("below_w = 100", "below_w = 0", 22, "0 is not"),
        ("below_w = 100", "required = true", 22, "unknown key"),
        ('ended = ["FAILED"]', "limit_share = 1.1", 19, "1.1 is not from 0 to 1"),
        ('longer_than = "1h"\n', "", 11, "longer_than"),
    ],
)
def test_every_bound_of_a_value_is_checked(old: str, new: str, line: int, words: str) -> None:
    faults = signatures.parse(FULL.replace(old, new, 1)).faults
    assert [(fault.line, words in fault.message) for fault in faults] == [(line, True)], faults


def test_weight_that_reaches_the_least_score_by_itself_is_a_fault() -> None:
    """At the least score, and not below it. A weight of 0 is none."""
    assert [fault.line for fault in signatures.parse(FULL.replace("0.8", "0.4")).faults] == [7, 10]
    assert signatures.parse(FULL.replace("0.8", "0.41")).faults == ()
    assert [fault.line for fault in signatures.parse(FULL.replace("0.8", "0")).faults] == [7, 10, 13]


def test_least_score_must_be_reachable() -> None:
    """The weights may add up to exactly the least score."""
    assert signatures.parse(GOOD.replace("weight = 0.2", "weight = 0")).faults == ()
    [fault] = signatures.parse(GOOD.replace("weight = 0.2", "weight = 0").replace("0.8", "0.81")).faults
    assert (fault.line, "0.81 cannot be reached: the weights add up to 0.8" in fault.message) == (4, True)


def test_file_needs_a_signature_and_each_name_once() -> None:
    assert [fault.message for fault in signatures.parse("").faults] == ["there is no [[signature]] in it"]
    assert len(signatures.parse("version = ").faults) == 1  # it is not TOML
    twice = signatures.parse(GOOD + GOOD)
    assert [(fault.line, fault.message) for fault in twice.faults] == [(15, "signature[2].name: a is there twice")]
    assert len(twice.signatures) == 1
    other = signatures.parse(GOOD + GOOD.replace('"a"', '"b"'))
    assert ([parsed.name for parsed in other.signatures], other.faults) == (["a", "b"], ())
    for old, new in (("above_pct = 95", "above_pct = 101"), ('kind = "squatter"\n', "")):
        damaged = signatures.parse(GOOD + GOOD.replace('"a"', '"b"').replace(old, new))
        assert ([parsed.name for parsed in damaged.signatures], len(damaged.faults)) == (["a"], 1)
    assert signatures.parse("signature = [1]").signatures == ()


def test_example_is_read_with_its_values_and_defaults() -> None:
    """Values may be unknown; a job without a state is running, and one with another state is not."""
    text = '[[signature.example]]\nsays = "one"\nfits = false\n'
    text += 'state = "FAILED"\nelapsed = "1h"\nlimit = "2h"\nused_before = true\npower_w = 0\n'
    text += 'peaks_pct = { util_pct = 0, sm_active = "unknown" }\nmemory_gib = "unknown"\n'
    text += '[[signature.example]]\nsays = "two"\nfits = true\nidle = "2h"\n'
    text += '[[signature.example]]\nsays = "three"\nfits = true\nstate = "SUSPENDED"\nrunning = true\n'
    parsed = signatures.parse(GOOD + text)
    assert parsed.faults == ()
    first, second, third = parsed.examples
    assert (first.signature, first.claim, first.fits, first.line) == ("a", "one", False, 14)
    assert first.run == RunFacts("FAILED", False, 3600, 7200)
    assert first.gpu == GpuFacts({"util_pct": 0, "sm_active": None}, power_w=0, used_before=True)
    assert (second.fits, second.run, second.gpu) == (True, RunFacts("RUNNING", True), GpuFacts(idle_s=7200))
    assert third.run == RunFacts("SUSPENDED", True)


@pytest.mark.parametrize(
    ("example", "line", "words"),
    [
        ("[[signature.example]]\nfits = true\n", 14, "says"),
        ('[[signature.example]]\nsays = "one"\n', 14, "fits"),
        ('[[signature.example]]\nsays = "one"\nfits = "yes"\n', 16, "fits"),
        ('[[signature.example]]\nsays = "one"\nfits = true\nmemory_gib = -1\n', 17, "-1 is below 0"),
        ('[signature.example]\nsays = "one"\n', 14, "is a list of tables"),
    ],
)
def test_invalid_example_is_a_fault_and_is_left_out(example: str, line: int, words: str) -> None:
    parsed = signatures.parse(GOOD + example)
    assert parsed.examples == ()
    assert [fault.line for fault in parsed.faults] == [line], parsed.faults
    assert words in parsed.faults[0].message, parsed.faults


def test_example_of_an_invalid_signature_is_skipped() -> None:
    text = GOOD.replace("at_most_pct = 5", "at_most_pct = 51") + '[[signature.example]]\nsays = "one"\nfits = true\n'
    parsed = signatures.parse(text)
    assert (len(parsed.signatures), len(parsed.examples), signatures.try_examples(parsed)) == (0, 1, ())


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
    assert [entry.ok for entry in tried] == [False]
    half = signatures.parse(GOOD + example).with_window(1200)
    assert [entry.ok for entry in signatures.try_examples(half)] == [True]
