"""Decisions about findings: what is promised holds whatever the findings are."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zombie_samples import NOW, evidence, gpu, job, node, orphan, squatter

from slurm_affinode.core.cleanup_plan import decide, plan
from slurm_affinode.core.cleanup_policy import parse_policy
from slurm_affinode.core.cleanup_rules import effective
from slurm_affinode.model.cleanup import DESTRUCTIVE, Keep, Ledger, Policy, SentWarning
from slurm_affinode.model.finding import Finding

RULE = """
[[rule]]
name = "idle"
kinds = ["squatter", "idle-allocation"]
action = "cancel"
fixed = { first_warning = "1h", second_warning = "1h45m", cancel = "2h" }
sliding = { first_warning = "1h", second_warning = "90m", cancel = "2h" }
[[rule]]
name = "orphans"
kinds = ["orphan-process"]
action = "kill"
"""


def policy(more: str = "", rule: str = RULE) -> Policy:
    return parse_policy(rule + more, where="z.toml")


def warned(finding: Finding, *ago: timedelta) -> Ledger:
    sent = tuple(SentWarning(finding.key, n, NOW - one) for n, one in enumerate(ago, 1))
    return Ledger({finding.key: sent})


TWICE = (timedelta(minutes=80), timedelta(minutes=40))


def verdict(finding: Finding, more: str = "", ledger: Ledger | None = None, **options: Any) -> tuple[str, str, int]:
    action = decide(finding, policy(more), ledger or Ledger(), NOW, **options)
    return action.verb, action.code, action.number


# --- stages


def test_warned_warned_cancelled() -> None:
    """Each stage after its time."""
    young = squatter(idle=timedelta(minutes=59))
    assert verdict(young) == ("none", "too-early", 0)
    assert verdict(squatter(idle=timedelta(minutes=60))) == ("warn-user", "due", 1)
    old = squatter(idle=timedelta(hours=3))
    assert verdict(old, ledger=warned(old, timedelta(minutes=30))) == ("warn-user", "due", 2)
    assert verdict(old, ledger=warned(old, *TWICE)) == ("cancel", "due", 0)


def test_a_missed_night_does_not_shorten_the_warnings() -> None:
    """Found for the first time after seven hours: the warnings still come, as far apart as the rule says."""
    late = squatter(idle=timedelta(hours=7))
    assert verdict(late) == ("warn-user", "due", 1)
    assert verdict(late, ledger=warned(late, timedelta(minutes=29))) == ("none", "too-early", 0)
    assert verdict(late, ledger=warned(late, timedelta(hours=1), timedelta(minutes=29))) == ("none", "too-early", 0)


def test_a_job_that_computed_after_a_warning_begins_anew() -> None:
    """Warnings from before it was idle this time count for nothing."""
    again = squatter(idle=timedelta(hours=3))
    assert verdict(again, ledger=warned(again, timedelta(hours=5), timedelta(hours=4))) == ("warn-user", "due", 1)


def test_what_was_idle_only_as_long_as_a_run_looked_is_not_warned_of_anew() -> None:
    """Without a history each run sees the last minutes alone: what was in between is unknown, and no new matter."""
    began = NOW - timedelta(hours=1)
    finding = squatter(idle=timedelta(hours=1))
    assert verdict(finding, looked_from=began)[0] == "warn-user"
    assert verdict(finding, ledger=warned(finding, timedelta(hours=5)), looked_from=began)[:2] == ("none", "told")
    assert verdict(finding, ledger=warned(finding, timedelta(days=8)), looked_from=began)[0] == "warn-user"
    longer = squatter(idle=timedelta(minutes=61))
    assert verdict(longer, ledger=warned(longer, timedelta(hours=5)), looked_from=began)[0] == "warn-user"


def test_never_used_counts_from_the_start_of_the_job() -> None:
    """By the fixed window; what was used and then idle by the sliding one."""
    more = '[default]\n[[rule]]\nusers = ["alice"]\nfixed = { first_warning = "10m" }'
    began = job(start=NOW - timedelta(minutes=20))
    assert verdict(squatter(idle=timedelta(minutes=20), subject=began), more) == ("warn-user", "due", 1)
    assert verdict(squatter(idle=timedelta(minutes=20)), more) == ("none", "too-early", 0)


def test_of_several_gpus_the_one_that_was_used_last_counts() -> None:
    """Never used, and used until 70 minutes ago: the job was used, and is idle since then. Unless fewer GPUs do."""
    more = """
[[rule]]
users = ["alice"]
fixed = { first_warning = "1h", cancel = "2h" }
sliding = { first_warning = "2h", cancel = "5h" }
"""
    began = job(start=NOW - timedelta(hours=4))
    never, used = gpu(0, idle_s=4 * 3600.0), gpu(1, idle_s=70 * 60.0)
    finding = squatter(idle=timedelta(hours=4), subject=began, gpus=(never, used), allocated_gpus=2)
    once = warned(finding, timedelta(minutes=65))
    assert verdict(finding, more, once)[:2] == ("none", "too-early")
    half = more + "gpu_fraction = 0.5\n"
    assert verdict(finding, half, once)[0] == "cancel"
    sampled = replace(finding, since=began.start + timedelta(seconds=50), gpus=(never, gpu(1, idle_s=4 * 3600.0 - 50)))  # type: ignore[operator]
    assert verdict(sampled, more, once)[0] == "cancel"  # never used, and not sampled at the same moment
    shortly = replace(sampled, kind="idle-allocation", variant="used-once")
    assert verdict(shortly, more, warned(shortly, timedelta(minutes=65)))[:2] == ("none", "too-early")
    computing = replace(finding, gpus=(never, replace(used, flagged=False)))
    assert verdict(computing, more, once)[:2] == ("none", "fraction")


# --- what stands against it

WORKING = "[default]\ncancel_working_days_only = true\n"


def due(more: str = "", **values: Any) -> tuple[str, str, int]:
    finding = squatter(**values)
    return verdict(finding, more, warned(finding, *TWICE))


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"evidence": (evidence("compute"), evidence("time"))}, "weak-evidence"),
        ({"evidence": (evidence("compute"), evidence("power"), evidence("use"))}, "weak-evidence"),
        ({"evidence": (evidence("compute"), evidence("memory", met=False))}, "weak-evidence"),
        ({"evidence": (evidence("compute"), evidence("memory", weight=0.0))}, "weak-evidence"),
        ({"evidence": (evidence("compute"), evidence("memory", met=False, unknown=True))}, "weak-evidence"),
        ({"gpus": (gpu(flagged=False),)}, "weak-evidence"),
        ({"gpus": (gpu(measured=False),)}, "weak-evidence"),
        ({"allocated_gpus": 2}, "fraction"),
        ({"observed_at": NOW - timedelta(minutes=11)}, "stale"),
        ({"since": None}, "unknown"),
    ],
)
def test_not_on_one_metric_nor_on_what_is_old_or_unknown(values: dict[str, Any], code: str) -> None:
    """Two kinds of measurement, all GPUs of the job, fresh."""
    assert due(**values)[:2] == ("none", code)


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ('[[exempt]]\nusers = ["al*"]\nuntil = 2026-11-18\nreason = "thesis"', "exempt"),
        ('[[exempt]]\njobs = ["7"]\nuntil = "never"\nreason = "thesis"', "exempt"),
        ('[[rule]]\nusers = ["alice"]\ndo_not_cancel = true', "do-not-cancel"),
        ('[[rule]]\nusers = ["alice"]\naction = "none"', "rule"),
        ('[[rule]]\nusers = ["alice"]\naction = "warn"', "warned"),
        ('[[rule]]\nusers = ["alice"]\nmin_run = "9h"', "min-run"),
        ('[[rule]]\nusers = ["alice"]\nmin_gpus = 2', "few-gpus"),
        ('[[rule]]\nusers = ["alice"]\nmin_score = 0.99', "score"),
        ('[default]\ncancel_working_days_only = true\n[calendar]\nworking_days = ["mon"]', "working-days"),
        (
            '[default]\ncancel_working_days_only = true\n[calendar]\nhours = "14:00-18:00"\ntimezone = "UTC"',
            "working-days",
        ),
        ("[limits]\ncancel = 0", ""),
    ],
)
def test_what_the_site_says_against_it(more: str, code: str) -> None:
    """Exemptions on their last day still hold; working days are the site's."""
    finding = squatter()
    [action] = plan([finding], policy(more), warned(finding, *TWICE), NOW)
    assert (action.verb, action.code) == ("none", code or "limit")


def test_two_signals_of_activity_are_two_measurements() -> None:
    """Utilization and SM activity agree; utilization alone is one, however long it lasted."""
    assert due(evidence=(evidence("compute", sources=2), evidence("time")))[0] == "cancel"
    assert due(evidence=(evidence("compute", sources=2, met=False), evidence("time")))[1] == "weak-evidence"


def test_an_exemption_ends() -> None:
    """On the day after its last one."""
    assert due('[[exempt]]\nusers = ["alice"]\nuntil = 2026-11-17\nreason = "thesis"')[0] == "cancel"


def test_an_exemption_may_leave_the_warnings() -> None:
    """And nothing more."""
    more = '[[exempt]]\nusers = ["alice"]\nuntil = "never"\nreason = "x"\nwarnings = true'
    assert due(more)[:2] == ("none", "exempt")
    assert verdict(squatter(), more) == ("warn-user", "due", 1)


def test_the_owners_wish_holds_until_its_time_and_for_its_run() -> None:
    """A requeued job has another submit time."""
    finding = squatter()
    submit = finding.job.submit  # type: ignore[union-attr]
    keep = Keep("alpha", 7, submit, "alice", "debugging", NOW, NOW + timedelta(hours=1))  # type: ignore[arg-type]
    ledger = replace(warned(finding, *TWICE), keeps={("alpha", 7): keep})
    assert verdict(finding, ledger=ledger)[:2] == ("none", "kept")
    past = replace(ledger, keeps={("alpha", 7): replace(keep, until=NOW)})
    assert verdict(finding, ledger=past)[0] == "cancel"
    other = replace(ledger, keeps={("alpha", 7): replace(keep, submit=NOW - timedelta(days=1))})
    assert verdict(finding, ledger=other)[0] == "cancel"


def test_interactive_jobs_have_more() -> None:
    """Short ones with few GPUs are left alone; others have more time."""
    more = '[default]\ninteractive = { max_run = "8h", max_gpus = 1, extra = "4h" }'
    short, long = job(batch=False, time_limit_s=8 * 3600.0), job(batch=False, time_limit_s=None)
    assert due(more, subject=short)[:2] == ("none", "interactive")
    assert due(more, subject=short, gpus=(gpu(), gpu(1)), allocated_gpus=2)[:2] == ("none", "too-early")
    assert due(more, subject=long)[:2] == ("none", "too-early")
    assert due(more, subject=job(batch=None))[0] == "cancel"


def test_a_job_that_opted_in_is_suspended() -> None:
    """Unless the rule says otherwise."""
    finding = squatter()
    ledger = warned(finding, *TWICE)
    assert verdict(finding, ledger=ledger, opted_in={7})[0] == "suspend"
    assert verdict(finding, "[default]\nprefer_suspend = false", ledger, opted_in={7})[0] == "cancel"
    assert verdict(finding, ledger=ledger, opted_in={8})[0] == "cancel"
    assert decide(finding, policy(), Ledger(), NOW, opted_in={7}).suspends
    assert not decide(finding, policy(), Ledger(), NOW).suspends


def test_a_job_that_sleeps_in_place_is_neither_warned_nor_cancelled() -> None:
    """Being idle is what it was asked for. Unless the rule prefers to cancel."""
    finding = squatter()
    assert verdict(finding, asleep={7})[:2] == ("none", "asleep")
    ledger = warned(finding, *TWICE)
    assert verdict(finding, ledger=ledger, asleep={7})[:2] == ("none", "asleep")
    assert verdict(finding, "[default]\nprefer_suspend = false", ledger, asleep={7})[0] == "cancel"


def test_the_limit_of_a_run_takes_the_worst() -> None:
    """The rest waits for a person or the next run, and says so."""
    findings = [squatter(subject=job(job_id=n, id=str(n)), held_gpu_hours=float(n)) for n in range(1, 9)]
    ledger = Ledger({one.key: warned(one, *TWICE).warnings[one.key] for one in findings})
    actions = plan(findings, policy("[limits]\ncancel = 3"), ledger, NOW)
    assert [action.finding.held_gpu_hours for action in actions if action.verb == "cancel"] == [8.0, 7.0, 6.0]
    assert {action.code for action in actions[3:]} == {"limit"}


def test_a_job_found_twice_is_cancelled_once() -> None:
    """Squatter and idle allocation."""
    first, second = squatter(), squatter(kind="idle-allocation")
    ledger = Ledger({one.key: warned(one, *TWICE).warnings[one.key] for one in (first, second)})
    assert [one.verb for one in plan([first, second], policy(), ledger, NOW)].count("cancel") == 1


def test_what_is_on_another_cluster_is_told_and_not_acted_on() -> None:
    """Its number is another job's here; it takes nothing of the limit."""
    there, here = squatter(cluster="beta", held_gpu_hours=9.0), squatter()
    ledger = Ledger({one.key: warned(one, *TWICE).warnings[one.key] for one in (there, here)})
    actions = plan([there, here], policy("[limits]\ncancel = 1"), ledger, NOW, elsewhere={"beta"})
    assert [(one.verb, one.code) for one in actions] == [("none", "elsewhere"), ("cancel", "due")]
    assert plan([there], policy(), Ledger(), NOW, elsewhere={"beta"})[0].verb == "warn-user"


# --- processes and nodes


def test_orphans_are_killed_after_their_grace_and_only_by_their_start() -> None:
    """A process id alone may be another's."""
    assert verdict(orphan())[0] == "kill-process"
    assert verdict(orphan(since=NOW - timedelta(seconds=119)))[:2] == ("none", "too-early")
    unknown = orphan()
    unknown = replace(unknown, subject=replace(unknown.subject, start_ticks=None))  # type: ignore[arg-type]
    assert verdict(unknown)[:2] == ("none", "unknown")


def test_without_a_rule_administrators_are_told_of_nodes_and_processes_once() -> None:
    """And nothing is done to them."""
    for finding in (node(), node("orphan-memory"), orphan()):
        action = decide(finding, Policy(), Ledger(), NOW)
        assert action.verb == "warn-admin"
        told = Ledger(told={finding.key: NOW - timedelta(days=1)})
        assert decide(finding, Policy(), told, NOW).code == "told"


def test_nodes_are_drained_and_resumed_where_a_rule_says_so() -> None:
    rule = '[[rule]]\nkinds = ["drained-kill-failed"]\naction = "resume"\n'
    rule += '[[rule]]\nkinds = ["orphan-memory"]\naction = "drain"'
    assert decide(node(), policy("", rule), Ledger(), NOW).verb == "resume"
    assert decide(node("orphan-memory"), policy("", rule), Ledger(), NOW).verb == "drain"


def test_misfits_and_ended_jobs_are_told_and_never_cancelled() -> None:
    """Whatever the action."""
    assert verdict(squatter(kind="time-limit"), "[default]\naction = 'cancel'")[0] == "warn-user"
    ended = job(state="TIMEOUT", end=NOW)
    assert due(subject=ended)[0] == "warn-user"


@pytest.mark.parametrize(
    ("more", "kind", "code"),
    [
        ("min_gpus = 2", "time-limit", "few-gpus"),
        ("min_score = 0.99", "time-limit", "score"),
        ('min_run = "9h"', "time-limit", "min-run"),
        ('min_run = "9h"', "low-efficiency-user", "due"),
        ("min_gpus = 2", "cpu-idle", "due"),
    ],
)
def test_small_matters_are_left_alone_whatever_they_are(more: str, kind: str, code: str) -> None:
    """The shape of a job as much as its idle GPUs; a job without GPUs has not too few of them."""
    finding = squatter(kind=kind, allocated_gpus=0 if kind == "cpu-idle" else 1)
    assert verdict(finding, f"[default]\n{more}")[1] == code


def test_the_shape_of_jobs_is_one_matter_for_each_user() -> None:
    """Told once in a time, however many jobs; jobs that have ended are told of later than what may change."""
    long_ago = NOW - timedelta(hours=5)
    ended = squatter(kind="time-limit", subject=job(state="COMPLETED", end=long_ago), observed_at=long_ago)
    assert verdict(ended)[0] == "warn-user"
    other = replace(ended, subject=job(job_id=8, id="8", state="COMPLETED", end=long_ago))
    assert other.matter == ended.matter
    assert other.key != ended.key
    told = Ledger({}, {}, {ended.matter: NOW - timedelta(days=1)})
    assert verdict(other, ledger=told)[:2] == ("none", "told")
    assert verdict(replace(other, user="bob"), ledger=told)[0] == "warn-user"
    assert verdict(other, ledger=Ledger({}, {}, {ended.matter: NOW - timedelta(days=8)}))[0] == "warn-user"
    ancient = replace(ended, observed_at=NOW - timedelta(days=9))
    assert verdict(ancient)[:2] == ("none", "stale")
    assert verdict(squatter(observed_at=long_ago))[:2] == ("none", "stale")


# --- which rule


def test_the_most_specific_rule_wins_key_by_key() -> None:
    """User before account before QOS before node before partition before cluster, wherever they stand."""
    more = """
[[rule]]
name = "user"
users = ["alice"]
min_gpus = 1
[[rule]]
name = "account"
accounts = ["vision"]
min_gpus = 2
min_run = "1h"
[[rule]]
name = "qos"
qos = ["normal"]
min_run = "2h"
grace = "1h"
[[rule]]
name = "node"
nodes = ["n*"]
grace = "2h"
repeat = "1h"
[[rule]]
name = "partition"
partitions = ["gpu"]
repeat = "2h"
min_score = 0.1
[[rule]]
name = "cluster"
clusters = ["alpha"]
min_score = 0.2
gpu_fraction = 0.5
[[rule]]
name = "another"
users = ["bob"]
min_gpus = 9
"""
    found = effective(policy(more), squatter())
    settings = found.settings
    assert (settings.min_gpus, settings.min_run_s, settings.grace_s) == (1, 3600.0, 3600.0)
    assert (settings.repeat_s, settings.min_score, settings.gpu_fraction) == (3600.0, 0.1, 0.5)
    assert found.origin["gpu_fraction"] == "cluster"
    assert found.rules == ("idle", "cluster", "partition", "node", "qos", "account", "user")
    assert found.rule == "idle"


# --- whatever comes

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
def test_promises(findings: list[Finding], agos: list[list[int]], most: int, holiday: bool, opted_in: set[int]) -> None:
    """Never on one metric, on old evidence, unannounced, exempt, on a holiday, over the limit, or twice."""
    more = f"[limits]\ncancel = {most}\nsuspend = {most}\n[default]\ncancel_working_days_only = true\n[calendar]\n"
    more += f"holidays = [{'2026-11-18' if holiday else ''}]\n[[exempt]]\njobs = ['3']\nuntil = 'never'\nreason = 'x'"
    ledger = Ledger(
        {
            one.key: tuple(SentWarning(one.key, n, NOW - timedelta(seconds=s)) for n, s in enumerate(ago, 1))
            for one, ago in zip(findings, agos, strict=False)
        }
    )
    actions = plan(findings, policy(more), ledger, NOW, opted_in=opted_in)
    assert len(actions) == len(findings)
    acting = [action for action in actions if action.verb in DESTRUCTIVE]
    assert all(sum(one.verb == verb for one in acting) <= most for verb in ("cancel", "suspend"))
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
        dimensions = {one.dimension for one in finding.evidence if one.met and one.weight > 0 and not one.unknown}
        assert {"memory", "compute"} <= dimensions
        assert all(one.flagged and one.measured for one in finding.gpus)
        sent = ledger.warnings[finding.key]
        assert [one.number for one in sent] == [1, 2]
        assert finding.since is not None
        assert all(one.at >= finding.since for one in sent)
        assert NOW - max(one.at for one in sent) >= timedelta(minutes=15)
        assert (action.verb == "suspend") == (ref.job_id in opted_in)
    assert plan(findings, policy(more), ledger, NOW, opted_in=opted_in) == actions
