"""Detection of idle windows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.core.idle import (
    STOPPED,
    GpuActivity,
    IdleDetector,
    IdleRule,
    IdleState,
    Sample,
    Signal,
    Verdict,
    judge,
    observe,
    still_idle,
)
from slurm_affinode.model.gpu import FLOORS_PCT

RULE = IdleRule(window_s=60, max_gap_s=15)


def gpu(name: str = "GPU 0", used: int | None = 1 << 30, **signals: float | None) -> GpuActivity:
    return GpuActivity(name, signals or {"utilization": 0.0, "processes": 0.0}, used)


def at(time_s: float, *gpus: GpuActivity, **host: float | None) -> Sample:
    return Sample(time_s, gpus or (gpu(),), host)


def fed(*samples: Sample, rule: IdleRule = RULE) -> IdleState:
    detector = IdleDetector(rule)
    states = [detector.feed(sample) for sample in samples]
    return states[-1]


BUSY = gpu(utilization=37.0, processes=0.0)
BLIND = gpu(utilization=None, processes=None)


def test_window_is_reached_when_all_its_samples_are_idle() -> None:
    """It is reached at the sample that completes sixty seconds, not before."""
    samples = [at(float(t)) for t in range(0, 61, 10)]
    assert not fed(*samples[:-1]).reached
    state = fed(*samples)
    assert state.reached
    assert state.progress_s == 60
    assert state.used_bytes == 1 << 30


def test_burst_restarts_the_window() -> None:
    """After a single busy sample in the middle, the whole window is needed again."""
    samples = [at(float(t)) if t != 30 else at(30.0, BUSY) for t in range(0, 91, 10)]
    state = fed(*samples)
    assert state.progress_s == 50
    assert not state.reached
    assert state.broken == "GPU 0: utilization 37 is above 0"
    assert fed(*samples, at(100.0)).reached


def test_all_gpus_of_the_job_must_be_idle() -> None:
    verdict, why, _ = judge(RULE, at(0.0, gpu("GPU 0"), gpu("GPU 1", utilization=1.0, processes=0.0)))
    assert verdict is Verdict.BUSY
    assert why.startswith("GPU 1: utilization")


def test_each_signal_counts_separately() -> None:
    """PROF counters can read 0 after a fault while utilization is 100, and vice versa."""
    for name in ("utilization", "memory", "engine", "sm", "tensor", "dram", "processes"):
        quiet: dict[str, float | None] = {"utilization": 0.0, "sm": 0.0, "processes": 0.0}
        assert judge(RULE, at(0.0, gpu(**(quiet | {name: 0.5}))))[0] is Verdict.BUSY


def test_unknown_samples_do_not_extend_the_window() -> None:
    """They have no readable signal."""
    state = fed(at(0.0), at(10.0), at(20.0, BLIND))
    assert state.verdict is Verdict.UNKNOWN
    assert state.progress_s == 10
    assert not fed(at(0.0, BLIND), *(at(float(t), BLIND) for t in range(10, 200, 10))).reached


def test_window_is_not_reached_on_an_unknown_sample() -> None:
    """The newest sample must be idle itself."""
    rule = replace(RULE, window_s=10)
    assert not fed(at(0.0), at(10.0, BLIND), rule=rule).reached
    assert fed(at(0.0), at(10.0, BLIND), at(12.0), rule=rule).reached


def test_long_gap_restarts_the_window() -> None:
    """The activity in between is unknown."""
    state = fed(at(0.0), at(10.0), at(26.0))
    assert state.since_s == 26
    assert "no sample" in state.broken
    assert fed(at(0.0), at(10.0), at(25.0)).progress_s == 25


def test_stop_by_others_restarts_the_window() -> None:
    """Stopped time is unknown, however long the job was idle before; a full window is needed after it continues."""
    before = [at(float(t)) for t in range(0, 51, 10)]
    stopped = [replace(at(float(t)), stopped=True) for t in range(52, 58, 2)]
    state = fed(*before, *stopped)
    assert (state.verdict, state.progress_s, state.reached) == (Verdict.UNKNOWN, 0, False)
    assert state.why == state.broken == "it is stopped (scontrol suspend, or a signal)"
    after = [at(float(t)) for t in range(60, 121, 10)]
    assert not fed(*before, *stopped, *after[:-1]).reached
    assert fed(*before, *stopped, *after).reached
    assert still_idle(RULE, stopped[0]) == "it is stopped (scontrol suspend, or a signal)"
    assert judge(RULE, replace(at(0.0, BUSY), stopped=True))[0] is Verdict.BUSY


def test_single_readable_signal_is_not_idle() -> None:
    """A site with one signal only can permit it."""
    lonely = gpu(utilization=0.0, processes=None)
    assert judge(RULE, at(0.0, lonely))[0] is Verdict.UNKNOWN
    assert judge(replace(RULE, min_signals=1), at(0.0, lonely))[0] is Verdict.IDLE
    assert judge(RULE, at(0.0, gpu(utilization=5.0)))[0] is Verdict.BUSY


def test_unknown_gpus_are_not_idle() -> None:
    """A missing list of GPUs is not a list of idle GPUs."""
    assert judge(RULE, Sample(0.0, ()))[0] is Verdict.UNKNOWN


def test_higher_of_job_limit_and_site_floor_applies() -> None:
    """A value at the limit is idle."""
    rule = replace(RULE, util_pct=5.0, floors_pct={"dram": 8.0})
    assert judge(rule, at(0.0, gpu(utilization=5.0, dram=8.0)))[0] is Verdict.IDLE
    assert judge(rule, at(0.0, gpu(utilization=5.1, dram=8.0)))[0] is Verdict.BUSY
    assert judge(rule, at(0.0, gpu(utilization=5.0, dram=8.1)))[0] is Verdict.BUSY


@pytest.mark.parametrize(
    ("signals", "verdict"),
    [
        ({"engine": 0.0062, "sm": 0.0, "tensor": 0.0, "dram": 0.0005}, Verdict.IDLE),  # PyTorch holds 2 GiB
        ({"engine": 0.0062, "sm": 0.0, "tensor": 0.0, "dram": 0.0006}, Verdict.IDLE),  # sixteen programs hold memory
        ({"engine": 0.0, "sm": 0.0, "tensor": 0.0, "dram": 0.0004}, Verdict.IDLE),  # no program
        ({"engine": 0.0084, "sm": 2.7e-6, "tensor": 1.5e-8, "dram": 0.0005}, Verdict.BUSY),  # ten tiny kernels a second
    ],
)
def test_default_floors_are_above_the_noise_of_an_h200(signals: dict[str, float], verdict: Verdict) -> None:
    """Readings of an H200 with driver 580: an idle context keeps the engine busy for 62 us a second, and no SM."""
    rule = replace(RULE, floors_pct=FLOORS_PCT)
    assert judge(rule, at(0.0, gpu(utilization=0.0, **signals)))[0] is verdict


def test_host_activity_counts_if_configured() -> None:
    """Without a limit it is ignored; with a limit it is unknown if it was not read."""
    rule = replace(RULE, host_limits={"cpu": 20.0})
    assert judge(RULE, at(0.0, cpu=300.0))[0] is Verdict.IDLE
    assert judge(rule, at(0.0, cpu=300.0))[0] is Verdict.BUSY
    assert judge(rule, at(0.0, cpu=20.0))[0] is Verdict.IDLE
    assert judge(rule, at(0.0))[0] is Verdict.UNKNOWN


def test_held_memory_is_unknown_if_one_gpu_is_unknown() -> None:
    assert fed(at(0.0, gpu(used=5), gpu("GPU 1", used=7))).used_bytes == 12
    assert fed(at(0.0, gpu(used=5), gpu("GPU 1", used=None))).used_bytes is None


def test_still_idle_reports_activity_or_unknown() -> None:
    assert still_idle(RULE, at(0.0)) is None
    assert still_idle(RULE, at(0.0, BUSY)) == "GPU 0: utilization 37 is above 0"
    assert still_idle(RULE, at(0.0, BLIND)) is not None


def test_restart_resets_the_window() -> None:
    """It is used after a restore."""
    detector = IdleDetector(RULE)
    for t in range(0, 61, 10):
        detector.feed(at(float(t)))
    detector.restart()
    assert detector.feed(at(70.0)).progress_s == 0


KINDS = {"idle": gpu(), "busy": BUSY, "blind": BLIND}
HISTORY = st.lists(st.tuples(st.floats(0.5, 40.0), st.sampled_from(sorted(KINDS))), min_size=1, max_size=60)


@given(HISTORY)
def test_reached_window_has_idle_samples_without_gaps(history: list[tuple[float, str]]) -> None:
    """A complete window has idle samples over its length, none busy, and no gap that is too long."""
    detector, now, past = IdleDetector(RULE), 0.0, list[tuple[float, str]]()
    for step, kind in history:
        now += step
        past.append((now, kind))
        state = detector.feed(at(now, KINDS[kind]))
        idle = [time for time, what in past if what == "idle" and state.since_s is not None and time >= state.since_s]
        if state.since_s is not None:
            assert idle[0] == state.since_s
            assert all(b - a <= RULE.max_gap_s for a, b in itertools.pairwise(idle))
            assert not any(what == "busy" and time >= state.since_s for time, what in past)
        if state.reached:
            assert kind == "idle"
            assert idle[-1] - idle[0] >= RULE.window_s


@given(HISTORY, st.floats(0.5, 40.0))
def test_burst_always_resets_the_window(history: list[tuple[float, str]], step: float) -> None:
    """After a busy sample no progress is left, and the next idle sample begins at zero."""
    now, state = 0.0, None
    for gap, kind in history:
        now += gap
        state = observe(RULE, state, at(now, KINDS[kind]))
    state = observe(RULE, state, at(now + step, BUSY))
    assert state.progress_s == 0
    assert observe(RULE, state, at(now + 2 * step)).progress_s == 0


@given(HISTORY)
def test_unknown_samples_never_extend_the_window(history: list[tuple[float, str]]) -> None:
    """With unreadable samples the window is never longer than with idle ones in their place."""
    now, seen, blind = 0.0, None, None
    for gap, kind in history:
        now += gap
        seen = observe(RULE, seen, at(now, KINDS["idle" if kind == "blind" else kind]))
        blind = observe(RULE, blind, at(now, KINDS[kind]))
        assert blind.progress_s <= seen.progress_s


def test_gpu_with_a_fault_is_unknown_unless_it_is_busy() -> None:
    """After an XID error counters may read 0 forever; a counter that still changes is used."""
    faulty = replace(gpu(), fault="XID 31 was reported")
    assert judge(RULE, at(0.0, faulty))[:2] == (Verdict.UNKNOWN, "GPU 0: XID 31 was reported")
    assert judge(RULE, at(0.0, replace(BUSY, fault="XID 31 was reported")))[0] is Verdict.BUSY


def test_window_is_not_reached_if_the_newest_sample_is_unknown() -> None:
    """However long the job was idle before: it may compute now."""
    rule = replace(RULE, window_s=10)
    state = fed(at(0.0), at(10.0), at(12.0, BLIND), rule=rule)
    assert (state.progress_s, state.verdict, state.reached) == (10, Verdict.UNKNOWN, False)


def test_remaining_time_is_that_of_the_window() -> None:
    """It is never negative."""
    assert fed(at(0.0, BUSY)).remaining_s == 60
    assert fed(at(0.0), at(10.0)).remaining_s == 50
    assert fed(*(at(float(t)) for t in range(0, 71, 10))).remaining_s == 0


def test_time_that_goes_back_restarts_the_window() -> None:
    """A second sample at the same time does not."""
    state = fed(at(10.0), at(5.0))
    assert (state.since_s, state.broken) == (5, "no sample for more than 15 s showed it as idle")
    assert fed(at(0.0), at(10.0), at(10.0)).since_s == 0


def test_reason_is_that_of_the_sample_that_ended_the_window() -> None:
    """Later busy samples have no window to end."""
    other = gpu(utilization=1.0, processes=0.0)
    assert fed(at(0.0, BUSY)).broken == "GPU 0: utilization 37 is above 0"
    assert fed(at(0.0, BUSY), at(1.0, other)).broken == "GPU 0: utilization 37 is above 0"
    assert fed(at(0.0), at(1.0, other), at(2.0, BUSY)).broken == "GPU 0: utilization 1 is above 0"
    assert fed(at(0.0, BLIND), at(1.0, BUSY)).broken == ""


def test_stop_is_reported_before_other_unknowns() -> None:
    assert still_idle(RULE, replace(at(0.0, BLIND), stopped=True)) == STOPPED


@pytest.mark.parametrize(
    ("rule", "sample", "why"),
    [
        (RULE, at(0.0, BLIND), "GPU 0: 0 of the 2 signals needed could be read"),
        (RULE, Sample(0.0, ()), "which GPUs the job has is not known"),
        (replace(RULE, host_limits={"cpu": 20.0}), at(0.0), "host: cpu could not be read"),
        (replace(RULE, host_limits={"cpu": 20.0}), at(0.0, cpu=21.0), "host: cpu 21 is above 20"),
    ],
)
def test_reason_names_the_signal(rule: IdleRule, sample: Sample, why: str) -> None:
    assert judge(rule, sample)[1] == why


def test_signal_within_its_limit_is_described() -> None:
    assert str(Signal("GPU 0", "dram", 0.0005, 0.01)) == "GPU 0: dram 0.0005 is within 0.01"


def test_verdicts_are_the_words_of_the_status() -> None:
    """``--json`` has them."""
    assert [verdict.value for verdict in Verdict] == ["idle", "busy", "unknown"]
