"""Explaining and replaying policies; keep requests of owners."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from agent_stand_ins import job as slurm_job
from hypothesis import given
from hypothesis import strategies as st
from zombie_samples import NOW, job, squatter

from slurm_affinode.base.config import Config, ZombiesConfig
from slurm_affinode.base.errors import AffinodeError, InputError
from slurm_affinode.base.times import parse_span_s
from slurm_affinode.core.cleanup_policy import parse_policy
from slurm_affinode.db.audit import ZombieLog
from slurm_affinode.db.repository import Repository
from slurm_affinode.model.cleanup import KeepPolicy, Settings
from slurm_affinode.slurm.hostlist import expand
from slurm_affinode.zombies import exemption_intake
from slurm_affinode.zombies import exemptions as keeps
from slurm_affinode.zombies import policy as policies

DOCS = Path(__file__).resolve().parents[3] / "docs" / "zombies-policy.md"
RULE = """
[[rule]]
name = "idle"
kinds = ["squatter"]
action = "cancel"
fixed = { first_warning = "1h", second_warning = "90m", cancel = "2h" }
sliding = { first_warning = "1h", second_warning = "90m", cancel = "2h" }
"""


def test_replay_lists_actions_with_times() -> None:
    """Each stage comes at the first run of the timer after its time, until the job ended."""
    since = NOW - timedelta(hours=8)
    long = squatter(since=since, subject=job(start=since - timedelta(hours=1)))
    short = squatter(since=since, observed_at=since + timedelta(minutes=80), subject=job(job_id=8, id="8"))
    past = policies.episodes([[long, short], [long]])
    done = policies.replay(past, parse_policy(RULE, where="z"), since, NOW, timedelta(minutes=15))
    about = [
        (outcome.action.target, outcome.action.verb, outcome.action.number, outcome.time - since) for outcome in done
    ]
    assert about == [
        ("job 7", "warn-user", 1, timedelta(hours=1)),
        ("job 8", "warn-user", 1, timedelta(hours=1)),
        ("job 7", "warn-user", 2, timedelta(minutes=90)),
        ("job 7", "cancel", 0, timedelta(hours=2)),
    ]


def test_replay_combines_findings_before_and_after_the_end_of_a_job() -> None:
    """A job found again after its end keeps its warnings and its cancellation; its time limit is reported after its
    end.
    """
    since = NOW - timedelta(hours=6)
    late = since + timedelta(hours=3)
    ran = squatter(since=since, observed_at=late, subject=job(start=since))
    over = squatter(since=since, observed_at=late, subject=job(start=since, state="TIMEOUT", end=late))
    shape = squatter(kind="time-limit", since=since, observed_at=late, subject=job(job_id=8, id="8", end=late))
    done = policies.replay(
        policies.episodes([[ran], [over, shape]]), parse_policy(RULE, where="z"), since, NOW, timedelta(minutes=15)
    )
    about = {
        (outcome.action.target, outcome.action.verb, outcome.action.number): outcome.time - since for outcome in done
    }
    assert about[("job 7", "warn-user", 1)] == timedelta(hours=1)
    assert about[("job 7", "cancel", 0)] == timedelta(hours=2)
    assert about[("job 8", "warn-user", 0)] == timedelta(hours=3)


def test_replay_covers_jobs_found_only_after_their_end() -> None:
    """A job IDle to its end would have been found by an earlier run of the timer."""
    since = NOW - timedelta(hours=9)
    end = since + timedelta(minutes=110)
    over = squatter(since=since, observed_at=end, subject=job(start=since, state="CANCELLED", end=end))
    policy = parse_policy(RULE, where="z")
    done = policies.replay(policies.episodes([[over]]), policy, since, NOW, timedelta(minutes=15))
    about = [(outcome.action.verb, outcome.action.number, outcome.time - since) for outcome in done]
    assert about[:2] == [("warn-user", 1, timedelta(hours=1)), ("warn-user", 2, timedelta(hours=1.5))]
    assert about[2:] == [("warn-user", 0, timedelta(hours=2))]


def test_replay_has_one_finding_per_job_at_a_time() -> None:
    """Later searches may find a shorter part or another kind of the same idle time; neither is a new finding."""
    since = NOW - timedelta(hours=20)
    end = since + timedelta(hours=10)
    over = [
        squatter(since=since + timedelta(hours=n), observed_at=end, subject=job(start=since, state="TIMEOUT", end=end))
        for n in (8.5, 9, 9.5)
    ]
    changed = [
        squatter(
            since=since, observed_at=since + timedelta(hours=n), subject=job(job_id=8, id="8", start=since), **kind
        )
        for n, kind in ((1.6, {}), (8, {"kind": "idle-allocation"}))
    ]
    past = policies.episodes([[changed[0]], [changed[1]], *([item] for item in over)])
    policy = parse_policy(RULE.replace('"squatter"', '"squatter", "idle-allocation"'), where="z")
    done = policies.replay(past, policy, since, NOW, timedelta(minutes=15))
    about = [
        (outcome.action.target, outcome.action.finding.kind, outcome.action.number, outcome.time - since)
        for outcome in done
    ]
    assert about == [
        ("job 8", "squatter", 1, timedelta(hours=1)),
        ("job 8", "squatter", 2, timedelta(hours=1.5)),
        ("job 8", "idle-allocation", 0, timedelta(hours=2)),
        ("job 7", "squatter", 1, timedelta(hours=9.5)),
        ("job 7", "squatter", 2, timedelta(hours=10)),
        ("job 7", "squatter", 0, timedelta(hours=10.25)),
    ]


def test_replay_reports_user_period_when_it_was_observed() -> None:
    """Once, with the data of that time; not at the start of the period."""
    since = NOW - timedelta(hours=16)
    period = squatter(kind="low-efficiency-user", since=since, observed_at=NOW - timedelta(hours=8))
    later = replace(period, observed_at=NOW, advice="seen later")
    past = policies.episodes([[period], [later]])
    policy = parse_policy('[default]\naction = "warn"\nrepeat = "7d"\n', where="z")
    (outcome,) = policies.replay(past, policy, since, NOW, timedelta(minutes=15))
    assert (outcome.action.target, outcome.time, outcome.action.finding.advice) == (
        "user alice",
        NOW - timedelta(hours=8),
        "",
    )


def test_replay_applies_the_limits_of_a_run() -> None:
    """Actions above the limit are shown and come in the next run."""
    since = NOW - timedelta(hours=4)
    many = [squatter(since=since, subject=job(job_id=n, id=str(n))) for n in range(1, 4)]
    policy = parse_policy(RULE + "[limits]\ncancel = 2", where="z")
    done = policies.replay(policies.episodes([many]), policy, since, NOW, timedelta(minutes=15))
    ends = [
        (outcome.action.code, outcome.time - since) for outcome in done if outcome.action.verb in ("cancel", "none")
    ]
    assert ends == [
        ("due", timedelta(hours=2)), ("due", timedelta(hours=2)), ("limit", timedelta(hours=2)),
        ("due", timedelta(hours=2, minutes=15)),
    ]  # fmt: skip


def test_policy_is_explained_in_words() -> None:
    """The text includes stages, limits, and exemptions that have expired."""
    text = RULE + '[[exempt]]\nusers = ["carol"]\nuntil = 2020-01-01\nreason = "thesis"\n[keep]\nallow = false'
    text += '\n[[rule]]\nkinds = ["completing"]\nwarn_admins = true\ngrace = "2h"\n'
    explanation = "\n".join(policies.explain(parse_policy(text, where="z"), NOW))
    for words in ("idle (line 2): kinds squatter: cancel", "canceled after 2h", "EXPIRED", "Owners may not exempt jobs",
                  "warn_admins true; grace 2h", "cancel 5, suspend 10, kill 20", "mail.via is none"):  # fmt: skip
        assert words in explanation


def test_cancel_rule_without_stage_is_reported() -> None:
    """It would only warn, which its author did not intend."""
    lines = policies.explain(parse_policy('[[rule]]\nkinds = ["squatter"]\naction = "cancel"\n', where="z"), NOW)
    assert any(line.startswith("rule 1 (line 1) never cancels") for line in lines)
    assert not any("never cancels" in line for line in policies.explain(parse_policy(RULE, where="z"), NOW))


def test_policy_file_is_option_site_or_built_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order; a file that is configured must exist."""
    site = tmp_path / "site.toml"
    monkeypatch.setattr("slurm_affinode.base.config.DEFAULT_POLICY", site)
    assert policies.load(Config()).where == "built-in policy"
    site.write_text("[limits]\ncancel = 1\n")
    assert policies.load(Config()).limits.cancel == 1
    with pytest.raises(InputError, match="cannot be read"):
        policies.load(Config(), tmp_path / "none.toml")
    site.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="UTF-8"):
        policies.load(Config())
    site.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        policies.load(Config(), tmp_path)
    with pytest.raises(InputError, match=r"site\.toml: cannot be read: No such file"):
        policies.load(Config(zombies=ZombiesConfig(policy=site)))
    site.symlink_to("gone.toml")
    with pytest.raises(InputError, match=r"site\.toml: cannot be read: No such file"):
        policies.load(Config())


# --- the documentation


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_examples_of_the_documentation_are_valid() -> None:
    blocks = _blocks("toml")
    assert blocks
    for block in blocks:
        parse_policy(block, where="docs", expand=expand)


def test_documentation_lists_every_rule_setting() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for name in Settings.__slots__:
        assert f"`{name.removesuffix('_s')}`" in text, name


# --- keeps


EXEMPTION = keeps.ExemptionRequest(NOW + timedelta(hours=2), "the debugger is attached")


def test_keep_request_is_stored_in_the_job_comment() -> None:
    """The existing comment is kept."""
    comment = keeps.comment_with("my own words", EXEMPTION)
    assert comment.startswith("my own words [keep until=2026-11-18T14:00:00Z why=the debugger")
    assert keeps.parse(comment) == EXEMPTION


@given(st.text(max_size=200), st.text(max_size=100))
def test_any_reason_and_comment_are_accepted(why: str, before: str) -> None:
    """No text breaks the format, and a comment without a request is none."""
    assert keeps.parse(before.replace("[keep", "")) is None
    made = (
        keeps.comment_with(before.replace("[keep", "") or None, keeps.ExemptionRequest(NOW, why))
        if len(why) < 150
        else None
    )
    if made is not None:
        exemption = keeps.parse(made)
        assert exemption is not None
        assert exemption.until == NOW


@pytest.mark.parametrize(
    ("exemption", "policy", "message"),
    [
        (EXEMPTION, KeepPolicy(allow=False), "exemptions"),
        (EXEMPTION, KeepPolicy(max_s=3600.0), "at most 1h"),
        (replace(EXEMPTION, why="short"), KeepPolicy(), "10 are needed"),
        (replace(EXEMPTION, why="x" * 500), KeepPolicy(), "longer than 400"),
    ],
)
def test_keep_request_outside_the_policy_is_rejected(
    exemption: keeps.ExemptionRequest, policy: KeepPolicy, message: str
) -> None:
    with pytest.raises(AffinodeError, match=message):
        keeps.check(exemption, policy, NOW)


def test_keep_requests_are_collected_once_and_limited(tmp_path: Path) -> None:
    """Later changes have no effect; requests of ended jobs, expired ones and those without a reason are ignored."""
    far = keeps.comment_with(None, keeps.ExemptionRequest(NOW + timedelta(days=30), "a very long time"))
    running = slurm_job(7, comment=far, submit=NOW)
    over = slurm_job(8, comment=keeps.comment_with(None, keeps.ExemptionRequest(NOW, "it was enough")))
    brief = slurm_job(9, comment=keeps.comment_with(None, keeps.ExemptionRequest(NOW + timedelta(hours=1), "x")))
    ended = slurm_job(10, comment=far, state="COMPLETED")
    with Repository.open(str(tmp_path / "z.sqlite")) as store:
        log = ZombieLog(store.engine)
        jobs = [running, over, brief, ended]
        taken = exemption_intake.collect(jobs, "alpha", KeepPolicy(), log, now=NOW, run="r")
        assert [(item.job_id, item.until) for item in taken] == [(7, NOW + timedelta(hours=4))]
        later = NOW + timedelta(hours=3)
        again = [
            replace(
                running,
                comment=keeps.comment_with(None, keeps.ExemptionRequest(later + timedelta(hours=4), "and more time")),
            )
        ]
        assert exemption_intake.collect(again, "alpha", KeepPolicy(), log, now=later, run="r2") == []
        for run in ("r3", "r4"):
            later = NOW + timedelta(hours=5)
            assert exemption_intake.collect(again, "alpha", KeepPolicy(), log, now=later, run=run) == []
        assert [(outcome.verb, outcome.result, outcome.run) for outcome in log.history()] == [
            ("keep", "done", "r"), ("keep", "refused", "r3"),
        ]  # fmt: skip
        assert "only one exemption is allowed" in log.history()[1].reason


def test_keep_request_is_valid_for_one_attempt() -> None:
    """A request that expired before the requeue does not prevent a new one, which replaces it."""
    comment = keeps.comment_with("my own words", EXEMPTION)
    assert keeps.has_request(slurm_job(7, comment=comment, submit=NOW))
    assert not keeps.has_request(slurm_job(7, comment=comment, submit=EXEMPTION.until))
    assert not keeps.has_request(slurm_job(7, comment="my own words", submit=NOW))
    later = keeps.ExemptionRequest(NOW + timedelta(hours=5), "again, in another attempt")
    again = keeps.comment_with(comment, later)
    assert (again.count("[keep"), keeps.parse(again)) == (1, later)
    assert again.startswith("my own words [keep")


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ('[[rule]]\nnodes = ["gpu[01-"]\naction = "warn"', 2, "unbalanced"),
        ('[[rule]]\nnodes = ["gpu[1-99999999]"]', 2, "names more than"),
        ('[[rule]]\nnodes = ["none"]', 2, "names no node"),
        ("[default]\nmin_run = inf", 2, "inf is not a finite number"),
        ('[keep]\nmax = "99999999d"', 2, "more than 100 years"),
    ],
)
def test_policy_errors_are_reported_by_line(tmp_path: Path, text: str, line: int, expected: str) -> None:
    """Invalid host lists and out-of-range durations."""
    file = tmp_path / "policy.toml"
    file.write_text(text)
    _, faults = policies.examine(Config(), file)
    assert [fault.line for fault in faults] == [line]
    assert expected in faults[0].message


def test_host_lists_are_expanded_in_every_form() -> None:
    """Brackets, commas and patterns; an unexpanded list would match no node."""
    text = '[[exempt]]\nnodes = ["a1,a2", "b[1-2]*", "c?"]\nuntil = "never"\nreason = "x"'
    [exempt] = parse_policy(text, where="z", expand=expand).exemptions
    assert exempt.match.nodes == ("a1", "a2", "b1*", "b2*", "c?")


def test_exemption_expires_in_the_time_zone_of_the_site() -> None:
    """At 12:00 UTC, the next day has begun on Kiritimati."""
    text = '[calendar]\ntimezone = "{}"\n[[exempt]]\nusers = ["a"]\nuntil = 2026-11-18\nreason = "x"'
    for zone, over in (("Pacific/Kiritimati", True), ("UTC", False)):
        lines = policies.explain(parse_policy(text.format(zone), where="z"), NOW)
        assert any("EXPIRED" in line for line in lines) is over


def test_look_back_covers_the_longest_stage() -> None:
    """The look-back is extended to the longest stage plus a day, and never shortened."""
    config = Config(zombies=ZombiesConfig(look_back="2d"))
    assert policies.reaching(config, parse_policy(RULE, where="z")) is config
    long = RULE.replace('cancel = "2h"', 'cancel = "3d"') + '[default]\ninteractive = { extra = "2h" }\n'
    assert parse_span_s(policies.reaching(config, parse_policy(long, where="z")).zombies.look_back) == 4 * 86400 + 7200
    assert policies.reaching(config, parse_policy("", where="z")) is config


def test_oversized_policy_file_is_rejected() -> None:
    """It is not read into memory."""
    with pytest.raises(InputError, match=r"^/dev/zero: is larger than 1 MiB"):
        policies.load(Config(), Path("/dev/zero"))
