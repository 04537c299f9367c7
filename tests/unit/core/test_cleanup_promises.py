"""Guarantees about clean-up actions that hold for any findings."""

from __future__ import annotations

from datetime import timedelta

from cleanup_samples import policy
from hypothesis import given, settings
from hypothesis import strategies as st
from zombie_samples import NOW, evidence, gpu, job, squatter

from slurm_affinode.core.cleanup_plan import plan
from slurm_affinode.model.cleanup import DESTRUCTIVE, Ledger, SentWarning
from slurm_affinode.model.finding import Finding

_EVIDENCE = st.lists(
    st.builds(
        lambda dimension, state, weight: evidence(
            dimension, met=state == "met", unknown=state == "unknown", weight=weight
        ),
        st.sampled_from(["memory", "compute", "time", "use", "state", "power"]),
        st.sampled_from(["met", "not", "unknown"]),
        st.sampled_from([0.0, 0.4]),
    ),
    max_size=6,
).map(tuple)
_GPUS = st.lists(st.builds(gpu, st.integers(0, 7), measured=st.booleans(), flagged=st.booleans()), max_size=4).map(
    tuple
)
_SPAN = st.integers(-600, 20000).map(lambda s: timedelta(seconds=s))
_FINDINGS = st.lists(
    st.builds(
        lambda number, idle, kind, proofs, gpus, old, state, batch: squatter(
            idle=idle, kind=kind, evidence=proofs, gpus=gpus, allocated_gpus=len(gpus), observed_at=NOW - old,
            subject=job(job_id=number, id=str(number), state=state, batch=batch),
        ),
        st.integers(1, 9), _SPAN, st.sampled_from(["squatter", "idle-allocation", "time-limit"]), _EVIDENCE, _GPUS,
        st.sampled_from([0, 300, 601, 86400]).map(lambda s: timedelta(seconds=s)),
        st.sampled_from(["RUNNING", "COMPLETED", "TIMEOUT"]), st.sampled_from([True, False, None]),
    ),
    max_size=12,
)  # fmt: skip
_AGOS = st.lists(st.lists(st.integers(0, 20000), max_size=2), min_size=12, max_size=12)


@settings(max_examples=300)
@given(_FINDINGS, _AGOS, st.integers(0, 3), st.booleans(), st.sets(st.integers(1, 9)))
def test_destructive_actions_meet_all_guarantees(
    findings: list[Finding], agos: list[list[int]], most: int, holiday: bool, opted_in: set[int]
) -> None:
    """No action on one metric, on old evidence, unannounced, if exempt, on a holiday, above the limit, or twice."""
    more = f"[limits]\ncancel = {most}\nsuspend = {most}\n[default]\ncancel_working_days_only = true\n[calendar]\n"
    more += f"holidays = [{'2026-11-18' if holiday else ''}]\n[[exempt]]\njobs = ['3']\nuntil = 'never'\nreason = 'x'"
    ledger = Ledger(
        {
            item.key: tuple(SentWarning(item.key, n, NOW - timedelta(seconds=s)) for n, s in enumerate(ago, 1))
            for item, ago in zip(findings, agos, strict=False)
        }
    )
    actions = plan(findings, policy(more), ledger, NOW, opted_in=opted_in)
    assert len(actions) == len(findings)
    acting = [action for action in actions if action.verb in DESTRUCTIVE]
    assert all(sum(item.verb == verb for item in acting) <= most for verb in ("cancel", "suspend"))
    assert len({action.target for action in acting}) == len(acting)
    for action in acting:
        finding = action.finding
        ref = finding.job
        assert ref is not None
        assert ref.running
        assert finding.kind in ("squatter", "idle-allocation")
        assert ref.job_id != 3
        assert not holiday
        assert NOW - finding.observed_at <= timedelta(minutes=10)
        dimensions = {item.dimension for item in finding.evidence if item.met and item.weight > 0 and not item.unknown}
        assert {"memory", "compute"} <= dimensions
        assert all(item.flagged and item.measured for item in finding.gpus)
        sent = ledger.warnings[finding.key]
        assert [item.number for item in sent] == [1, 2]
        assert finding.since is not None
        assert all(item.time >= finding.since for item in sent)
        assert NOW - max(item.time for item in sent) >= timedelta(minutes=15)
        assert (action.verb == "suspend") == (ref.job_id in opted_in)
    assert plan(findings, policy(more), ledger, NOW, opted_in=opted_in) == actions
