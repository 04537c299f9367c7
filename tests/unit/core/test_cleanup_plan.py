"""Decisions about findings: actions on jobs, processes and nodes, their times, and the rules that apply."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from cleanup_samples import TWICE, due, policy, verdict, warned
from zombie_samples import NOW, gpu, job, lost, node, orphan, squatter

from slurm_affinode.core.cleanup_plan import decide, effective, plan
from slurm_affinode.model.cleanup import Keep, Ledger, Policy


def test_job_is_warned_twice_and_then_canceled() -> None:
    """Each stage follows at its configured time."""
    young = squatter(idle=timedelta(minutes=59))
    assert verdict(young) == ("none", "too-early", 0)
    assert verdict(squatter(idle=timedelta(minutes=60))) == ("warn-user", "due", 1)
    old = squatter(idle=timedelta(hours=3))
    assert verdict(old, ledger=warned(old, timedelta(minutes=30))) == ("warn-user", "due", 2)
    assert verdict(old, ledger=warned(old, *TWICE)) == ("cancel", "due", 0)


def test_missed_run_does_not_shorten_the_warnings() -> None:
    """A job first found after seven hours still gets the warnings, at the intervals of the rule."""
    late = squatter(idle=timedelta(hours=7))
    assert verdict(late) == ("warn-user", "due", 1)
    assert verdict(late, ledger=warned(late, timedelta(minutes=29))) == ("none", "too-early", 0)
    assert verdict(late, ledger=warned(late, timedelta(hours=1), timedelta(minutes=29))) == ("none", "too-early", 0)


def test_job_that_computed_after_a_warning_is_warned_from_the_beginning() -> None:
    """Warnings from before the current idle time do not count."""
    again = squatter(idle=timedelta(hours=3))
    assert verdict(again, ledger=warned(again, timedelta(hours=5), timedelta(hours=4))) == ("warn-user", "due", 1)


def test_job_idle_as_long_as_a_run_sampled_is_not_warned_again() -> None:
    """Without metrics each run knows the last minutes only: the time in between is unknown, the finding not new."""
    began = NOW - timedelta(hours=1)
    finding = squatter(idle=timedelta(hours=1))
    assert verdict(finding, looked_from=began)[0] == "warn-user"
    assert verdict(finding, ledger=warned(finding, timedelta(hours=5)), looked_from=began)[:2] == ("none", "told")
    assert verdict(finding, ledger=warned(finding, timedelta(days=8)), looked_from=began)[0] == "warn-user"
    longer = squatter(idle=timedelta(minutes=61))
    assert verdict(longer, ledger=warned(longer, timedelta(hours=5)), looked_from=began)[0] == "warn-user"


def test_job_that_changes_between_idle_kinds_is_warned_once() -> None:
    """Using less memory turns an idle allocation into a squatter; warnings of the same consequence still count."""
    first = squatter(idle=timedelta(hours=3))
    then = replace(first, kind="idle-allocation", variant="idle")
    alike = """
[[rule]]
kinds = ["squatter", "idle-allocation"]
action = "cancel"
sliding = { first_warning = "1h", second_warning = "1h30m", cancel = "2h" }
"""
    for one, other in ((first, then), (then, first)):
        assert verdict(one, alike, warned(other, timedelta(minutes=29))) == ("none", "too-early", 0)
        assert verdict(one, alike, warned(other, timedelta(minutes=30))) == ("warn-user", "due", 2)
        assert verdict(one, alike, warned(other, *TWICE))[0] == "cancel"
    gentle = alike + '[[rule]]\nkinds = ["squatter"]\ndo_not_cancel = true\n'  # it announced no cancellation
    assert verdict(then, gentle, warned(first, *TWICE)) == ("warn-user", "due", 1)
    told = Ledger(mailed={first.matter: NOW - timedelta(hours=1)})
    assert decide(then, Policy(), told, NOW).code == "told"


def test_job_that_never_used_its_gpus_is_timed_from_its_start() -> None:
    """The fixed window applies; for a job that used them, the sliding window applies."""
    more = '[default]\n[[rule]]\nusers = ["alice"]\nfixed = { first_warning = "10m" }'
    began = job(start=NOW - timedelta(minutes=20))
    assert verdict(squatter(idle=timedelta(minutes=20), subject=began), more) == ("warn-user", "due", 1)
    assert verdict(squatter(idle=timedelta(minutes=20)), more) == ("none", "too-early", 0)


def test_gpu_used_last_decides() -> None:
    """One GPU was never used, another one until 70 minutes ago: idle since then, unless fewer GPUs suffice."""
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
    assert verdict(sampled, more, once)[0] == "cancel"  # never used, but not sampled at the same moment
    shortly = replace(sampled, kind="idle-allocation", variant="used-once")
    assert verdict(shortly, more, warned(shortly, timedelta(minutes=65)))[:2] == ("none", "too-early")
    computing = replace(finding, gpus=(never, replace(used, flagged=False)))
    assert verdict(computing, more, once)[:2] == ("none", "fraction")


def test_job_that_opted_in_is_suspended() -> None:
    """A rule can disable it."""
    finding = squatter()
    ledger = warned(finding, *TWICE)
    assert verdict(finding, ledger=ledger, opted_in={7})[0] == "suspend"
    assert verdict(finding, "[default]\nprefer_suspend = false", ledger, opted_in={7})[0] == "cancel"
    assert verdict(finding, ledger=ledger, opted_in={8})[0] == "cancel"
    assert decide(finding, policy(), Ledger(), NOW, opted_in={7}).suspends
    assert not decide(finding, policy(), Ledger(), NOW).suspends


def test_orphans_are_killed_after_their_grace_if_their_start_is_known() -> None:
    """Without its start time, a PID may refer to another process."""
    assert verdict(orphan())[0] == "kill-process"
    assert verdict(orphan(since=NOW - timedelta(seconds=119)))[:2] == ("none", "too-early")
    unknown = orphan()
    unknown = replace(unknown, subject=replace(unknown.subject, start_ticks=None))  # type: ignore[arg-type]
    assert verdict(unknown)[:2] == ("none", "unknown")


def test_without_a_rule_administrators_are_notified_once_of_nodes_and_processes() -> None:
    """No action is taken on them."""
    for finding in (node(), node("orphan-memory"), orphan()):
        action = decide(finding, Policy(), Ledger(), NOW)
        assert action.verb == "warn-admin"
        told = Ledger(mailed={finding.key: NOW - timedelta(days=1)})
        assert decide(finding, Policy(), told, NOW).code == "told"


LOST = '[[rule]]\nname = "engines"\ndiagnoses = ["orphaned-engine"]\naction = "kill"\n'


def test_engine_without_its_server_is_ended_if_a_rule_names_the_diagnosis() -> None:
    """Otherwise its owner is warned. The rule may require a confidence and a duration."""
    assert decide(lost(), Policy(), Ledger(), NOW).verb == "warn-user"
    assert decide(lost(), policy("", LOST), Ledger(), NOW).verb == "kill-process"
    assert decide(orphan(), policy("", LOST), Ledger(), NOW).verb == "warn-admin"
    sure = policy("", LOST + "min_score = 0.9\ngrace = '10m'")
    assert decide(lost(), sure, Ledger(), NOW).verb == "kill-process"
    assert decide(lost(score=0.6), sure, Ledger(), NOW).code == "score"
    young = lost(since=NOW - timedelta(minutes=9))
    assert decide(young, sure, Ledger(), NOW).code == "too-early"


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ("[[exempt]]\njobs = ['7']\nuntil = 'never'\nreason = 'a demonstration'", "exempt"),
        ("[[exempt]]\naccounts = ['vision']\nuntil = 'never'\nreason = 'paid'\nwarnings = true", "exempt"),
        ("[evidence]\nmax_age = '30s'", "stale"),
        ("[limits]\nkill = 0", "limit"),
    ],
)
def test_engine_without_its_server_is_protected_as_its_job(more: str, code: str) -> None:
    finding = lost(observed_at=NOW - timedelta(minutes=1))
    [action] = plan([finding], policy("", f"{LOST}\n{more}"), Ledger(), NOW)
    assert (action.verb, action.code) == ("none", code)


def test_owner_may_keep_an_engine_without_its_server() -> None:
    submit = NOW - timedelta(hours=9)
    keep = Keep("alpha", 7, submit, "alice", "debugging it", NOW, NOW + timedelta(hours=1))
    kept = Ledger(keeps={("alpha", 7): keep})
    assert decide(lost(), policy("", LOST), kept, NOW).code == "kept"
    earlier = Ledger(keeps={("alpha", 7): replace(keep, submit=submit - timedelta(days=1))})
    assert decide(lost(), policy("", LOST), earlier, NOW).verb == "kill-process"
    warned_only = policy("", LOST + "do_not_cancel = true")
    assert decide(lost(), warned_only, Ledger(), NOW).verb == "warn-user"


def test_nodes_are_drained_and_resumed_if_a_rule_requires_it() -> None:
    rule = '[[rule]]\nkinds = ["drained-kill-failed"]\naction = "resume"\n'
    rule += '[[rule]]\nkinds = ["orphan-memory"]\naction = "drain"'
    assert decide(node(), policy("", rule), Ledger(), NOW).verb == "resume"
    assert decide(node("orphan-memory"), policy("", rule), Ledger(), NOW).verb == "drain"


def test_misfits_and_ended_jobs_are_reported_and_never_canceled() -> None:
    """The configured action does not matter."""
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
def test_small_findings_are_ignored_for_every_kind(more: str, kind: str, code: str) -> None:
    """That applies to the shape of a job as well as to idle GPUs; a job without GPUs does not have too few of them."""
    finding = squatter(kind=kind, allocated_gpus=0 if kind == "cpu-idle" else 1)
    assert verdict(finding, f"[default]\n{more}")[1] == code


def test_job_shape_is_one_notice_per_user() -> None:
    """A notice is sent once per period for any number of jobs; ended jobs may be reported later than running ones."""
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


def test_the_most_specific_rule_wins_key_by_key() -> None:
    """Precedence is user, account, QOS, node, partition, cluster, regardless of their order in the file."""
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
