"""Decisions about findings: actions on jobs, processes and nodes, their times, and the rules that apply."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from cleanup_samples import TWICE, due, policy, verdict, warned
from zombie_samples import NOW, evidence, gpu, job, lost, node, orphan, squatter

from slurm_affinode.core.cleanup_plan import (
    decide,
    effective,
    enough_idle,
    exemption,
    extra_s,
    idle_since,
    matches,
    plan,
    specificity,
    stages_of,
)
from slurm_affinode.model.cleanup import Interactive, Keep, Ledger, Match, Policy, Settings, Stages
from slurm_affinode.model.finding import Finding


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
    old = squatter(idle=timedelta(hours=3))  # warned since the run began to sample
    assert verdict(old, ledger=warned(old, *TWICE), looked_from=NOW - timedelta(hours=3))[0] == "cancel"


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
    for item, other in ((first, then), (then, first)):
        assert verdict(item, alike, warned(other, timedelta(minutes=29))) == ("none", "too-early", 0)
        assert verdict(item, alike, warned(other, timedelta(minutes=30))) == ("warn-user", "due", 2)
        assert verdict(item, alike, warned(other, *TWICE))[0] == "cancel"
    gentle = alike + '[[rule]]\nkinds = ["squatter"]\ndo_not_cancel = true\n'  # it announced no cancellation
    assert verdict(then, gentle, warned(first, *TWICE)) == ("warn-user", "due", 1)
    ledger = Ledger(mailed={first.matter: NOW - timedelta(hours=1), then.matter: NOW - timedelta(days=8)})
    assert decide(then, Policy(), ledger, NOW).code == "told"


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
        ledger = Ledger(mailed={finding.key: NOW - timedelta(days=1)})
        assert decide(finding, Policy(), ledger, NOW).code == "told"


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
    jobs_only = policy("[default]\ndo_not_cancel = true\n", rule + "\n")
    assert decide(node("orphan-memory"), jobs_only, Ledger(), NOW).verb == "drain"


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
    ledger = Ledger({}, {}, {ended.matter: NOW - timedelta(days=1)})
    assert verdict(other, ledger=ledger)[:2] == ("none", "told")
    assert verdict(replace(other, user="bob"), ledger=ledger)[0] == "warn-user"
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
    result = effective(policy(more), squatter())
    settings = result.settings
    assert (settings.min_gpus, settings.min_run_s, settings.grace_s) == (1, 3600.0, 3600.0)
    assert (settings.repeat_s, settings.min_score, settings.gpu_fraction) == (3600.0, 0.1, 0.5)
    assert result.origin["gpu_fraction"] == "cluster"
    assert result.rules == ("idle", "cluster", "partition", "node", "qos", "account", "user")
    assert result.rule == "idle"


SECOND = timedelta(seconds=1)


def test_each_time_of_a_rule_is_reached_at_its_second() -> None:
    """Neither a second earlier nor a second later."""
    exact = squatter(idle=timedelta(hours=2))
    sent = warned(exact, timedelta(hours=1), timedelta(minutes=30))
    assert verdict(exact, ledger=sent)[0] == "cancel"
    assert verdict(squatter(idle=timedelta(hours=2) - SECOND), ledger=sent)[:2] == ("none", "too-early")
    assert verdict(exact, ledger=warned(exact, timedelta(hours=1), timedelta(minutes=30) - SECOND))[1] == "too-early"
    assert verdict(exact, ledger=warned(exact, timedelta(hours=2))) == ("warn-user", "due", 2)
    assert verdict(exact, ledger=warned(exact, timedelta(hours=2) + SECOND)) == ("warn-user", "due", 1)
    assert due(observed_at=NOW - timedelta(minutes=10))[0] == "cancel"
    assert due(observed_at=NOW - timedelta(minutes=10) - SECOND)[1] == "stale"
    assert verdict(orphan(since=NOW - timedelta(seconds=120)))[0] == "kill-process"
    began = NOW - timedelta(hours=1)
    finding = squatter(idle=timedelta(hours=1))
    assert verdict(finding, ledger=warned(finding, timedelta(days=7)), looked_from=began)[0] == "warn-user"
    assert verdict(finding, ledger=warned(finding, timedelta(days=7) - SECOND), looked_from=began)[1] == "told"


def test_reason_names_the_next_step_and_its_time() -> None:
    """A warning that comes later, one that waits for the interval, and a cancellation."""

    def reason(idle: timedelta, *ago: timedelta) -> str:
        finding = squatter(idle=idle)
        return decide(finding, policy(), warned(finding, *ago), NOW).reason

    assert reason(timedelta(minutes=59)) == "idle for 59m; warning 1 comes after 1h"
    assert reason(timedelta(minutes=60)) == "idle for 1h, warning 1 of 2"
    assert reason(timedelta(minutes=70), timedelta(minutes=10)) == "idle for 1h 10m; warning 2 comes after 1h 30m"
    late = reason(timedelta(hours=3), timedelta(minutes=29))
    assert late == "idle for 3h; warning 2 comes 30m after the one before"
    last = reason(timedelta(hours=3), timedelta(hours=1), timedelta(minutes=29))
    assert last == "idle for 3h, warned 2 times; it ends after 2h, and 30m after the last warning"
    assert reason(timedelta(hours=3), *TWICE) == "idle for 3h, warned 2 times"


def test_notice_is_repeated_after_its_interval() -> None:
    """Without stages there is one notice in each interval, by default a week."""
    finding = squatter(kind="time-limit")
    for ago, code in ((timedelta(days=7) - SECOND, "told"), (timedelta(days=7), "due")):
        assert decide(finding, Policy(), Ledger(mailed={finding.matter: NOW - ago}), NOW).code == code
    ended = squatter(subject=job(state="COMPLETED", end=NOW), observed_at=NOW - timedelta(days=7))
    assert decide(ended, Policy(), Ledger(), NOW).code == "due"
    assert decide(replace(ended, observed_at=ended.observed_at - SECOND), Policy(), Ledger(), NOW).code == "stale"


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ("min_score = 0.95", "due"),
        ("min_score = 0.96", "score"),
        ('min_run = "8h"', "due"),
        ('min_run = "8h1s"', "min-run"),
        ("min_gpus = 1", "due"),
    ],
)
def test_threshold_of_a_rule_is_sufficient(more: str, code: str) -> None:
    assert due(f"[default]\n{more}")[1] == code


def test_idle_job_without_gpus_has_too_few() -> None:
    assert due(allocated_gpus=0)[1] == "few-gpus"


def test_run_time_is_that_of_the_job() -> None:
    """An ended job ran until its end. A job without a known start has run for an unknown time."""
    rule = '[default]\nmin_run = "2h"'
    ended = job(state="COMPLETED", end=NOW - timedelta(hours=6))
    assert verdict(squatter(kind="time-limit", subject=ended), rule)[0] == "warn-user"
    short = replace(ended, end=NOW - timedelta(hours=6) - SECOND)
    assert verdict(squatter(kind="time-limit", subject=short), rule)[1] == "min-run"
    assert due(rule, subject=job(start=None))[1] == "min-run"
    assert due(subject=job(start=None))[0] == "cancel"


def test_stages_of_a_gpu_that_was_never_used_are_those_from_the_start() -> None:
    """Samples begin up to a minute after the job, and those of its GPUs up to a minute apart."""
    settings = Settings(fixed=Stages((60.0,), None), sliding=Stages((600.0,), None))
    start = NOW - timedelta(hours=2)
    never = squatter(idle=timedelta(hours=2) - timedelta(seconds=60), subject=job(start=start))
    assert stages_of(settings, never) == settings.fixed
    assert stages_of(settings, replace(never, since=start + timedelta(seconds=61))) == settings.sliding
    assert stages_of(settings, replace(never, since=None)) == settings.sliding
    assert stages_of(settings, replace(never, subject=job(start=None))) == settings.sliding
    assert stages_of(settings, orphan(since=start)) == settings.sliding
    pair = replace(never, since=start, gpus=(gpu(0, idle_s=7200.0), gpu(1, idle_s=7140.0)), allocated_gpus=2)
    assert stages_of(settings, pair) == settings.fixed
    assert stages_of(settings, replace(pair, gpus=(pair.gpus[0], gpu(1, idle_s=7139.0)))) == settings.sliding
    once = replace(pair, variant="used-once")
    assert stages_of(settings, once) == settings.sliding
    assert stages_of(replace(settings, gpu_fraction=0.5), once) == settings.fixed  # the GPU that was not used suffices


def test_idle_time_begins_when_as_many_gpus_are_idle_as_the_rule_requires() -> None:
    """A GPU whose idle time is unknown, or that is not idle, is left out; at least one GPU is required."""
    since = NOW - timedelta(seconds=300)
    gpus = (gpu(0, idle_s=100.0), gpu(1, idle_s=300.0), gpu(2, idle_s=200.0))
    finding = squatter(idle=timedelta(seconds=300), gpus=gpus, allocated_gpus=3)
    for fraction, after_s in ((1.0, 200), (0.67, 200), (0.5, 100), (1 / 3, 0), (0.0, 0)):
        assert idle_since(Settings(gpu_fraction=fraction), finding) == since + timedelta(seconds=after_s), fraction
    known = replace(finding, gpus=(*gpus[:2], gpu(2, idle_s=None)))
    assert idle_since(Settings(), known) == since + timedelta(seconds=200)
    assert idle_since(Settings(), replace(finding, gpus=(gpu(0, idle_s=None),))) == since
    assert idle_since(Settings(), replace(finding, since=None)) is None


def test_share_of_idle_gpus_is_that_of_the_allocated_ones() -> None:
    """Without a count of Slurm it is that of the GPUs in the finding; no GPUs are never idle."""
    half = Settings(gpu_fraction=0.5)
    pair = squatter(gpus=(gpu(0), gpu(1, flagged=False)), allocated_gpus=None)
    assert (enough_idle(half, pair), enough_idle(Settings(), pair)) == (True, False)
    assert not enough_idle(half, replace(pair, allocated_gpus=3))
    assert not enough_idle(Settings(gpu_fraction=0.0), replace(pair, allocated_gpus=0))
    assert not enough_idle(Settings(gpu_fraction=0.0), replace(pair, gpus=(), allocated_gpus=None))


def test_interactive_jobs_alone_have_more_time() -> None:
    """Whether a job is interactive may be unknown."""
    settings = Settings(interactive=Interactive(extra_s=60.0))
    more_s = [extra_s(settings, squatter(subject=job(batch=batch))) for batch in (False, True, None)]
    assert (more_s, extra_s(settings, orphan())) == ([60.0, 0.0, 0.0], 0.0)
    assert due("[default]\ninteractive = { max_gpus = 1 }", subject=job(batch=False, time_limit_s=0.0))[0] == "cancel"


@pytest.mark.parametrize(
    ("match", "fits"),
    [
        (Match(), True),
        (Match(partitions=("gpu",)), True),
        (Match(partitions=("g",)), False),
        (Match(partitions=("gp?",), users=("al*",)), True),
        (Match(partitions=("gpu",), users=("bob",)), False),
        (Match(users=("ALICE",)), False),
        (Match(users=("bob", "alice")), True),
        (Match(nodes=("n2",)), True),
        (Match(nodes=("n3",)), False),
        (Match(clusters=("alpha",), qos=("normal",), accounts=("vision",), kinds=("squatter",)), True),
        (Match(jobs=("7",)), True),
        (Match(jobs=("7_3",)), True),
        (Match(jobs=("9",)), True),
        (Match(jobs=("3",)), False),
        (Match(diagnoses=("idle",)), False),
    ],
)
def test_rule_matches_if_each_of_its_lists_does(match: Match, fits: bool) -> None:
    """A job may wait in several partitions, and run on several nodes."""
    finding = squatter(partition="cpu,gpu", nodes=("n1", "n2"), subject=job(job_id=9, id="7_3"))
    assert matches(match, finding) is fits


def test_unknown_value_matches_no_pattern() -> None:
    unknown = squatter(partition=None, user=None, qos=None, account=None)
    for match in (Match(partitions=("*",)), Match(users=("*",)), Match(qos=("*",)), Match(accounts=("*",))):
        assert not matches(match, unknown)
    assert not matches(Match(jobs=("*",)), node())
    server = squatter(kind="model-server", variant="idle")
    assert matches(Match(diagnoses=("idle",)), server)


def test_rules_are_ordered_from_kinds_to_jobs() -> None:
    scopes = ("clusters", "partitions", "nodes", "qos", "accounts", "users", "jobs")
    ordered = [Match(), *(Match(**{name: ("x",)}) for name in ("kinds", "diagnoses", *scopes))]
    assert sorted(ordered, key=specificity) == ordered
    both = Match(users=("x",), kinds=("x",))
    assert specificity(Match(users=("x",))) < specificity(both) < specificity(Match(jobs=("x",)))


def test_of_equal_rules_the_later_one_wins() -> None:
    rules = "[[rule]]\nname = '{}'\nusers = ['alice']\nmin_gpus = {}\n"
    applied = effective(policy(rules.format("first", 2) + rules.format("second", 3)), squatter())
    assert (applied.settings.min_gpus, applied.origin["min_gpus"]) == (3, "second")
    assert effective(Policy(), squatter()).rule == "default"
    unnamed = effective(policy("", rules.format("first", 2)), squatter())
    assert unnamed.rule == "first"  # the last rule that matches, if none sets the action


@pytest.mark.parametrize(
    ("finding", "entry", "field"),
    [
        (orphan(user="2001"), "[[exempt]]\nusers = ['alice']\nuntil = 'never'\nreason = 'thesis'", "user"),
        (orphan(user=None), "[[exempt]]\nusers = ['alice']\nuntil = 'never'\nreason = 'thesis'", "user"),
        (orphan(user="2001"), "[[rule]]\nusers = ['alice']\naction = 'none'", "user"),
        (squatter(account=None), "[[exempt]]\naccounts = ['a']\nuntil = 'never'\nreason = 'demo'", "account"),
        (squatter(qos=None), "[[rule]]\nqos = ['q']\ndo_not_cancel = true", "QOS"),
        (squatter(partition=None), "[[rule]]\npartitions = ['p']\naction = 'none'", "partition"),
    ],
)
def test_nothing_is_ended_while_an_entry_may_apply_to_it(finding: Finding, entry: str, field: str) -> None:
    """The name of a user, for example, is unknown while the directory service does not respond."""
    rules, ledger = policy("\n" + entry), warned(finding, *TWICE)
    action = decide(finding, rules, ledger, NOW)
    assert (action.verb, action.code) == ("none", "unknown")
    assert f"its {field} is not known, and z.toml:" in action.reason
    elsewhere = policy("\n" + entry.replace("]]\n", "]]\nnodes = ['n2']\n"))
    assert decide(finding, elsewhere, ledger, NOW).verb in ("cancel", "kill-process")


def test_exemption_that_permits_nothing_or_lasts_longest_applies() -> None:
    entry = "[[exempt]]\nusers = ['alice']\nuntil = {}\nreason = '{}'\nwarnings = {}\n"
    strict = policy("", entry.format("'never'", "long", "true") + entry.format("2026-11-19", "strict", "false"))
    applied = exemption(strict, squatter(), NOW.date())
    assert applied is not None
    assert applied.reason == "strict"
    action = decide(squatter(), strict, Ledger(), NOW)
    assert action.reason.startswith("exempt until 2026-11-19: strict (z.toml:")
    longest = policy("", entry.format("2026-11-19", "short", "true") + entry.format("'never'", "long", "true"))
    applied = exemption(longest, squatter(), NOW.date())
    assert applied is not None
    assert applied.reason == "long"
    never = policy("", entry.format("'never'", "thesis", "false"))
    assert decide(squatter(), never, Ledger(), NOW).reason.startswith("exempt: thesis (z.toml:")
    assert exemption(never, squatter(user="bob"), NOW.date()) is None


MONDAYS = '[calendar]\nworking_days = ["mon"]'
"""Not the day of the samples."""


def test_warnings_and_cancellations_wait_for_working_days_separately() -> None:
    warnings = f"[default]\nwarn_working_days_only = true\n{MONDAYS}"
    assert verdict(squatter(), warnings)[:2] == ("none", "working-days")
    assert due(warnings)[0] == "cancel"
    cancels = f"[default]\ncancel_working_days_only = true\n{MONDAYS}"
    assert verdict(squatter(), cancels)[0] == "warn-user"
    assert due(cancels)[1] == "working-days"
    assert due("[default]\ncancel_working_days_only = true")[0] == "cancel"
    assert verdict(squatter(), "[default]\nwarn_working_days_only = true")[0] == "warn-user"


def test_model_server_is_suspended_if_its_job_opted_in() -> None:
    """Neither the server of a job that sleeps already, nor one with another diagnosis."""
    rule = '[[rule]]\nkinds = ["model-server"]\ndiagnoses = ["idle"]\naction = "suspend"'
    server = squatter(kind="model-server", variant="idle")
    assert verdict(server, rule, opted_in={7})[0] == "suspend"
    assert verdict(server, rule, opted_in={8})[:2] == ("none", "not-opted-in")
    assert verdict(server, rule, opted_in={7}, asleep={7})[:2] == ("none", "asleep")
    assert verdict(server, rule + "\nprefer_suspend = false", opted_in={7}, asleep={7})[:2] == ("none", "asleep")
    assert verdict(replace(server, variant="swapping"), rule, opted_in={7})[0] == "warn-user"
    assert verdict(squatter(kind="time-limit"), asleep={7})[0] == "warn-user"


def test_notice_goes_to_the_user_or_to_the_administrators() -> None:
    """A rule may disable both; a finding that has no owner is for the administrators in any case."""
    disabled = "[default]\nwarn_user = false"
    assert verdict(squatter(), disabled)[:2] == ("none", "nobody")
    assert verdict(squatter(), f"{disabled}\nwarn_admins = true")[0] == "warn-admin"
    assert verdict(squatter(user=None))[:2] == ("none", "nobody")
    assert verdict(squatter(user=None), "[default]\nwarn_admins = true")[0] == "warn-admin"
    assert decide(node(), policy(disabled), Ledger(), NOW).verb == "warn-admin"


def test_finding_without_a_time_is_timed_from_its_first_listing() -> None:
    unknown = orphan(since=None)
    assert verdict(unknown)[1] == "too-early"
    for ago, verb in ((timedelta(seconds=120), "kill-process"), (timedelta(seconds=119), "none")):
        assert verdict(unknown, ledger=Ledger(first_seen={unknown.key: NOW - ago}))[0] == verb


def test_order_is_by_the_hours_held_and_then_by_the_key() -> None:
    """Unknown hours are last."""
    findings = [
        squatter(subject=job(job_id=number, id=str(number)), held_gpu_hours=hours)
        for number, hours in ((4, None), (3, 1.0), (2, 1.0), (1, 0.5))
    ]
    actions = plan(findings, policy(), Ledger(), NOW)
    assert [action.finding.job.job_id for action in actions] == [2, 3, 1, 4]  # type: ignore[union-attr]


def test_action_beyond_the_limit_is_held() -> None:
    """Warnings have no limit here, and the reason says which limit it is."""
    findings = [squatter(subject=job(job_id=number, id=str(number))) for number in (1, 2, 3)]
    assert [action.verb for action in plan(findings, policy("[limits]\ncancel = 1"), Ledger(), NOW)] == [
        "warn-user"
    ] * 3
    ledger = Ledger({finding.key: warned(finding, *TWICE).warnings[finding.key] for finding in findings})
    first, second, third = plan(findings, policy("[limits]\ncancel = 2"), ledger, NOW)
    assert (first.prevented_action, second.prevented_action, first.verb, second.verb) == (
        None,
        None,
        "cancel",
        "cancel",
    )
    assert third.prevented_action is not None
    assert (third.prevented_action.verb, third.prevented_action.code) == ("cancel", "due")
    assert "2 in this run already: the limit of cancel" in third.reason


def test_measurements_of_one_dimension_count_once() -> None:
    assert due(evidence=(evidence("compute"), evidence("compute")))[1] == "weak-evidence"
    assert due(evidence=(evidence("compute"), evidence("compute", sources=2)))[0] == "cancel"
    more = "[evidence]\nmin_dimensions = 3"
    assert due(more)[1] == "weak-evidence"
    assert due(more, evidence=(evidence("compute", sources=2), evidence("memory")))[0] == "cancel"
    assert due(gpus=(gpu(0), gpu(1, measured=False)), allocated_gpus=2)[1] == "weak-evidence"


def test_job_without_warnings_in_its_stages_is_only_reported() -> None:
    """No cancellation is unannounced."""
    rule = '[[rule]]\nkinds = ["squatter"]\naction = "{}"\nsliding = {{ first_warning = "1h", cancel = "2h" }}'
    finding = squatter()
    once = warned(finding, timedelta(hours=1))
    assert decide(finding, policy("", rule.format("cancel")), once, NOW).verb == "cancel"
    assert decide(finding, policy("", rule.format("warn")), once, NOW).code == "warned"
    assert decide(finding, policy("", rule.format("warn")), once, NOW).reason == "idle for 3h, warned once"
    never_warned = policy("", '[[rule]]\nkinds = ["squatter"]\naction = "cancel"')
    assert decide(finding, never_warned, once, NOW).verb == "warn-user"
    assert decide(finding, never_warned, once, NOW).number == 0


def test_request_of_the_owner_is_compared_in_seconds() -> None:
    """Slurm's times are whole seconds. A job without a known submit time may be the same attempt."""
    submit = NOW - timedelta(hours=9)
    keep = Keep("alpha", 7, submit + timedelta(milliseconds=900), "alice", "x", NOW, NOW + timedelta(hours=1))
    for subject in (job(submit=submit), job(submit=None)):
        finding = squatter(subject=subject)
        ledger = replace(warned(finding, *TWICE), keeps={("alpha", 7): keep})
        assert verdict(finding, ledger=ledger)[1] == "kept"
    elsewhere = replace(warned(squatter(), *TWICE), keeps={("beta", 7): keep})
    assert verdict(squatter(), ledger=elsewhere)[0] == "cancel"
