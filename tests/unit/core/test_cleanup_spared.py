"""Reasons against an action: weak evidence, rules of the site, requests of the owner, limits of a run."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from cleanup_samples import TWICE, due, policy, verdict, warned
from zombie_samples import NOW, evidence, gpu, job, squatter

from slurm_affinode.core.cleanup_plan import decide, plan
from slurm_affinode.model.cleanup import Keep, Ledger
from slurm_affinode.model.finding import Finding


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
        ({"gpus": (gpu(mapping="whole-node"),)}, "weak-evidence"),
        ({"gpus": (gpu(mapping=None),)}, "weak-evidence"),
        ({"gpus": (gpu(0), gpu(1, mapping="whole-node")), "allocated_gpus": 2}, "weak-evidence"),
        ({"allocated_gpus": 2}, "fraction"),
        ({"observed_at": NOW - timedelta(minutes=11)}, "stale"),
        ({"since": None}, "unknown"),
    ],
)
def test_weak_old_or_unknown_evidence_is_not_acted_on(values: dict[str, Any], code: str) -> None:
    """An action requires two kinds of measurements, of all GPUs of the job, recently taken."""
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
def test_site_rules_prevent_an_action(more: str, code: str) -> None:
    """An exemption includes its last day; working days are those of the site."""
    finding = squatter()
    [action] = plan([finding], policy(more), warned(finding, *TWICE), NOW)
    assert (action.verb, action.code) == ("none", code or "limit")


@pytest.mark.parametrize(
    ("more", "batch", "reason"),
    [
        ("min_gpus = 2", True, "it has 1 GPU; the rule is for 2 or more"),
        ('interactive = { max_run = "9d" }', False, "interactive, at most 1 GPU for at most 9d"),
    ],
)
def test_one_gpu_is_singular(more: str, batch: bool, reason: str) -> None:
    finding = squatter(subject=job(batch=batch), gpus=squatter().gpus[:1], allocated_gpus=1)
    [action] = plan([finding], policy(f"[default]\n{more}"), Ledger(), NOW)
    assert action.reason == reason


@pytest.mark.parametrize(
    ("kinds", "verb"),
    [('["whole-node"]', "cancel"), ('["labels", "whole-node"]', "cancel"), ('["labels", "recorded"]', "none")],
)
def test_mappings_of_the_policy_decide_which_assignment_suffices(kinds: str, verb: str) -> None:
    finding = squatter(gpus=(gpu(mapping="whole-node"),))
    rules = policy(f'[[rule]]\nusers = ["alice"]\nmappings = {kinds}')
    [action] = plan([finding], rules, warned(finding, *TWICE), NOW)
    assert action.verb == verb


def test_uncertain_gpu_assignment_is_named_in_the_reason() -> None:
    finding = squatter(gpus=(gpu(mapping="whole-node"),))
    [action] = plan([finding], policy(), warned(finding, *TWICE), NOW)
    assert "GPU 0 is the job's is known from GPU counts" in action.reason


def test_two_activity_signals_are_two_measurements() -> None:
    """Utilization and SM activity are two; utilization alone is one, however long it lasted."""
    assert due(evidence=(evidence("compute", sources=2), evidence("time")))[0] == "cancel"
    assert due(evidence=(evidence("compute", sources=2, met=False), evidence("time")))[1] == "weak-evidence"


def test_exemption_ends_after_its_last_day() -> None:
    assert due('[[exempt]]\nusers = ["alice"]\nuntil = 2026-11-17\nreason = "thesis"')[0] == "cancel"


def test_exemption_may_permit_warnings_only() -> None:
    more = '[[exempt]]\nusers = ["alice"]\nuntil = "never"\nreason = "x"\nwarnings = true'
    assert due(more)[:2] == ("none", "exempt")
    assert verdict(squatter(), more) == ("warn-user", "due", 1)


def test_keep_request_holds_until_its_time_and_for_its_attempt() -> None:
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


def test_interactive_jobs_have_more_time() -> None:
    """Short ones with few GPUs are exempt; others have more time."""
    more = '[default]\ninteractive = { max_run = "8h", max_gpus = 1, extra = "4h" }'
    short, long = job(batch=False, time_limit_s=8 * 3600.0), job(batch=False, time_limit_s=None)
    assert due(more, subject=short)[:2] == ("none", "interactive")
    assert due(more, subject=short, gpus=(gpu(), gpu(1)), allocated_gpus=2)[:2] == ("none", "too-early")
    assert due(more, subject=long)[:2] == ("none", "too-early")
    assert due(more, subject=job(batch=None))[0] == "cancel"


def test_job_suspended_in_place_is_neither_warned_nor_canceled() -> None:
    """It is expected to be idle. A rule may prefer cancellation."""
    finding = squatter()
    assert verdict(finding, asleep={7})[:2] == ("none", "asleep")
    ledger = warned(finding, *TWICE)
    assert verdict(finding, ledger=ledger, asleep={7})[:2] == ("none", "asleep")
    assert verdict(finding, "[default]\nprefer_suspend = false", ledger, asleep={7})[0] == "cancel"


def test_limit_of_a_run_selects_the_worst() -> None:
    """The others wait for an administrator or the next run, and are reported so."""
    findings = [squatter(subject=job(job_id=n, id=str(n)), held_gpu_hours=float(n)) for n in range(1, 9)]
    ledger = Ledger({finding.key: warned(finding, *TWICE).warnings[finding.key] for finding in findings})
    actions = plan(findings, policy("[limits]\ncancel = 3"), ledger, NOW)
    assert [action.finding.held_gpu_hours for action in actions if action.verb == "cancel"] == [8.0, 7.0, 6.0]
    assert {action.code for action in actions[3:]} == {"limit"}


def test_job_with_two_findings_is_canceled_once() -> None:
    """It is a squatter and an idle allocation."""
    first, second = squatter(), squatter(kind="idle-allocation")
    ledger = Ledger({figure.key: warned(figure, *TWICE).warnings[figure.key] for figure in (first, second)})
    assert [action.verb for action in plan([first, second], policy(), ledger, NOW)].count("cancel") == 1


def test_finding_of_another_cluster_is_reported_only() -> None:
    """Its job ID is that of another job here; it does not count towards the limit."""
    foreign, here = squatter(cluster="beta", held_gpu_hours=9.0), squatter()
    ledger = Ledger({figure.key: warned(figure, *TWICE).warnings[figure.key] for figure in (foreign, here)})
    actions = plan([foreign, here], policy("[limits]\ncancel = 1"), ledger, NOW, elsewhere={"beta"})
    assert [(action.verb, action.code) for action in actions] == [("none", "elsewhere"), ("cancel", "due")]
    assert plan([foreign], policy(), Ledger(), NOW, elsewhere={"beta"})[0].verb == "warn-user"


def test_warning_of_an_exempt_job_announces_no_cancellation() -> None:
    more = '[[exempt]]\nusers = ["alice"]\nuntil = "never"\nreason = "thesis"\nwarnings = true'
    assert decide(squatter(), policy(), Ledger(), NOW).stays is False
    action = decide(squatter(), policy(more), Ledger(), NOW)
    assert (action.verb, action.stays) == ("warn-user", True)


@pytest.mark.parametrize(("jobs", "name"), [("7", "7_3"), ("7", "7+1"), ("7_*", "7_3"), ("9", "7+1")])
def test_exemption_of_a_job_applies_to_its_parts(jobs: str, name: str) -> None:
    """Parts are array tasks and components of a heterogeneous job; a raw ID is that part only."""
    finding = squatter(subject=job(job_id=9, id=name))
    more = f'[[exempt]]\njobs = ["{jobs}"]\nuntil = "never"\nreason = "thesis"'
    assert decide(finding, policy(more), Ledger(), NOW).code == "exempt"


def test_heterogeneous_job_is_canceled_if_all_components_are_due() -> None:
    """The components are one program: one that computes, or is unknown, protects the others, also in mails."""
    first, second = (squatter(subject=job(job_id=7 + n, id=f"7+{n}")) for n in (0, 1))
    ledger = Ledger(warned(first, *TWICE).warnings | warned(second, *TWICE).warnings)
    both = {7: {7, 8}, 8: {7, 8}}

    def codes(findings: list[Finding], sent: Ledger = ledger, **options: Any) -> list[tuple[str, str, bool]]:
        return [
            (refusal.verb, refusal.code, refusal.stays) for refusal in plan(findings, policy(), sent, NOW, **options)
        ]

    assert codes([first], parts=both) == [("none", "part", False)]
    assert codes([first], parts={}) == [("none", "part", False)]
    assert codes([first], parts={7: {7}, 8: {7}}) == [("cancel", "due", False)]
    assert codes([first, second], parts=both) == [("cancel", "due", False)] * 2
    assert codes([first, second], warned(first, *TWICE), parts=both) == [
        ("none", "part", False), ("warn-user", "due", False),
    ]  # fmt: skip
    assert codes([second], Ledger(), parts=both) == [("warn-user", "due", True)]
    elsewhere = replace(second, cluster="beta")
    assert codes([first, elsewhere], parts=both)[0] == ("none", "part", False)
    [item, other] = plan([first, second], policy(), ledger, NOW, parts=both)
    assert (item.parts, other.parts) == ((second,), (first,))
    assert codes([first]) == [("cancel", "due", False)]  # of unknown parts, those with findings count
    assert codes([first, second], warned(first, *TWICE))[0] == ("none", "part", False)
    busy = replace(second, gpus=(gpu(flagged=False),))
    assert codes([first, busy], Ledger(), parts=both) == [("warn-user", "due", True)] * 2
    misfit = replace(first, kind="time-limit")
    assert codes([misfit, second], Ledger(), parts=both) == [("warn-user", "due", True), ("warn-user", "due", False)]
