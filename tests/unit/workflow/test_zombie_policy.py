"""Policies explained and replayed; owners' wishes."""

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

from slurm_affinode.config import Config, ZombiesConfig
from slurm_affinode.core.cleanup_policy import parse_policy
from slurm_affinode.errors import AffinodeError, InputError
from slurm_affinode.model.cleanup import KeepPolicy, Settings
from slurm_affinode.slurm.hostlist import expand
from slurm_affinode.store.repository import Repository
from slurm_affinode.store.zombies import ZombieLog
from slurm_affinode.timespec import parse_span_s
from slurm_affinode.workflow import zombie_keeps as keeps
from slurm_affinode.workflow import zombie_policy as policies

DOCS = Path(__file__).resolve().parents[3] / "docs" / "zombies-policy.md"
RULE = """
[[rule]]
name = "idle"
kinds = ["squatter"]
action = "cancel"
fixed = { first_warning = "1h", second_warning = "90m", cancel = "2h" }
sliding = { first_warning = "1h", second_warning = "90m", cancel = "2h" }
"""


def test_replay_says_what_would_have_been_done_and_when() -> None:
    """Each stage at the first run of the timer after its time, until the job ended."""
    since = NOW - timedelta(hours=8)
    long = squatter(since=since, subject=job(start=since - timedelta(hours=1)))
    short = squatter(since=since, observed_at=since + timedelta(minutes=80), subject=job(job_id=8, id="8"))
    past = policies.episodes([[long, short], [long]])
    done = policies.replay(past, parse_policy(RULE, where="z"), since, NOW, timedelta(minutes=15))
    about = [(one.action.target, one.action.verb, one.action.number, one.at - since) for one in done]
    assert about == [
        ("job 7", "warn-user", 1, timedelta(hours=1)),
        ("job 8", "warn-user", 1, timedelta(hours=1)),
        ("job 7", "warn-user", 2, timedelta(minutes=90)),
        ("job 7", "cancel", 0, timedelta(hours=2)),
    ]


def test_replay_tells_what_was_due_while_a_job_ran_from_what_came_after_its_end() -> None:
    """Found again when it had ended, its warnings and its cancellation are not lost, and not told before it ended."""
    since = NOW - timedelta(hours=6)
    late = since + timedelta(hours=3)
    ran = squatter(since=since, observed_at=late, subject=job(start=since))
    over = squatter(since=since, observed_at=late, subject=job(start=since, state="TIMEOUT", end=late))
    shape = squatter(kind="time-limit", since=since, observed_at=late, subject=job(job_id=8, id="8", end=late))
    done = policies.replay(
        policies.episodes([[ran], [over, shape]]), parse_policy(RULE, where="z"), since, NOW, timedelta(minutes=15)
    )
    about = {(one.action.target, one.action.verb, one.action.number): one.at - since for one in done}
    assert about[("job 7", "warn-user", 1)] == timedelta(hours=1)
    assert about[("job 7", "cancel", 0)] == timedelta(hours=2)
    assert about[("job 8", "warn-user", 0)] == timedelta(hours=3)


def test_replay_knows_what_was_due_of_a_job_that_ran_between_two_looks() -> None:
    """It was idle to its end: a run of the timer before that would have found it."""
    since = NOW - timedelta(hours=9)
    end = since + timedelta(minutes=110)
    over = squatter(since=since, observed_at=end, subject=job(start=since, state="CANCELLED", end=end))
    policy = parse_policy(RULE, where="z")
    done = policies.replay(policies.episodes([[over]]), policy, since, NOW, timedelta(minutes=15))
    about = [(one.action.verb, one.action.number, one.at - since) for one in done]
    assert about[:2] == [("warn-user", 1, timedelta(hours=1)), ("warn-user", 2, timedelta(hours=1.5))]
    assert about[2:] == [("warn-user", 0, timedelta(hours=2))]


def test_replay_finds_one_thing_of_a_job_at_a_time() -> None:
    """Later looks see less of the same idle time, or another kind of it: neither is another matter."""
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
    past = policies.episodes([[changed[0]], [changed[1]], *([one] for one in over)])
    policy = parse_policy(RULE.replace('"squatter"', '"squatter", "idle-allocation"'), where="z")
    done = policies.replay(past, policy, since, NOW, timedelta(minutes=15))
    about = [(one.action.target, one.action.finding.kind, one.action.number, one.at - since) for one in done]
    assert about == [
        ("job 8", "squatter", 1, timedelta(hours=1)),
        ("job 8", "squatter", 2, timedelta(hours=1.5)),
        ("job 8", "idle-allocation", 0, timedelta(hours=2)),
        ("job 7", "squatter", 1, timedelta(hours=9.5)),
        ("job 7", "squatter", 2, timedelta(hours=10)),
        ("job 7", "squatter", 0, timedelta(hours=10.25)),
    ]


def test_replay_tells_of_a_users_period_when_it_was_known() -> None:
    """Not at the begin of the period, which is since when the user's jobs ran; once, with what was seen then."""
    since = NOW - timedelta(hours=16)
    period = squatter(kind="low-efficiency-user", since=since, observed_at=NOW - timedelta(hours=8))
    later = replace(period, observed_at=NOW, advice="seen later")
    past = policies.episodes([[period], [later]])
    policy = parse_policy('[default]\naction = "warn"\nrepeat = "7d"\n', where="z")
    (one,) = policies.replay(past, policy, since, NOW, timedelta(minutes=15))
    assert (one.action.target, one.at, one.action.finding.advice) == ("user alice", NOW - timedelta(hours=8), "")


def test_replay_knows_the_limits_of_a_run() -> None:
    """What was over the limit is shown, and comes in the next run."""
    since = NOW - timedelta(hours=4)
    many = [squatter(since=since, subject=job(job_id=n, id=str(n))) for n in range(1, 4)]
    policy = parse_policy(RULE + "[limits]\ncancel = 2", where="z")
    done = policies.replay(policies.episodes([many]), policy, since, NOW, timedelta(minutes=15))
    ends = [(one.action.code, one.at - since) for one in done if one.action.verb in ("cancel", "none")]
    assert ends == [
        ("due", timedelta(hours=2)), ("due", timedelta(hours=2)), ("limit", timedelta(hours=2)),
        ("due", timedelta(hours=2, minutes=15)),
    ]  # fmt: skip


def test_a_policy_is_explained_in_words() -> None:
    """Who, what, when; what is over."""
    text = RULE + '[[exempt]]\nusers = ["carol"]\nuntil = 2020-01-01\nreason = "thesis"\n[keep]\nallow = false'
    said = "\n".join(policies.explain(parse_policy(text, where="z"), NOW))
    for words in ("idle (line 2): kinds squatter: cancel", "cancelled after 2h", "OVER", "Owners may not postpone",
                  "cancel 5, suspend 10, kill 20", "mail.via is none"):  # fmt: skip
        assert words in said


def test_a_rule_that_cancels_and_says_not_when_is_told_of() -> None:
    """It warns for ever: who wrote it meant something else."""
    lines = policies.explain(parse_policy('[[rule]]\nkinds = ["squatter"]\naction = "cancel"\n', where="z"), NOW)
    assert any(line.startswith("rule 1 (line 1) never cancels") for line in lines)
    assert not any("never cancels" in line for line in policies.explain(parse_policy(RULE, where="z"), NOW))


def test_the_policy_that_holds_is_asked_for_the_sites_or_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order; one that was asked for has to be there."""
    site = tmp_path / "site.toml"
    monkeypatch.setattr("slurm_affinode.config.DEFAULT_POLICY", site)
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


def test_examples_of_the_documentation_are_right() -> None:
    """As they stand."""
    blocks = _blocks("toml")
    assert blocks
    for block in blocks:
        parse_policy(block, where="docs", expand=expand)


def test_the_documentation_names_every_setting() -> None:
    """Of rules."""
    text = DOCS.read_text(encoding="utf-8")
    for name in Settings.__slots__:
        assert f"`{name.removesuffix('_s')}`" in text, name


# --- keeps


WISH = keeps.Wish(NOW + timedelta(hours=2), "the debugger is attached")


def test_a_wish_goes_through_the_jobs_comment() -> None:
    """What was there stays."""
    comment = keeps.comment_with("my own words", WISH)
    assert comment.startswith("my own words [keep until=2026-11-18T14:00:00Z why=the debugger")
    assert keeps.parse(comment) == WISH


@given(st.text(max_size=200), st.text(max_size=100))
def test_any_reason_and_any_comment_go_through(why: str, before: str) -> None:
    """Nothing breaks the form; a comment that is no wish is none."""
    assert keeps.parse(before.replace("[keep", "")) is None
    made = keeps.comment_with(before.replace("[keep", "") or None, keeps.Wish(NOW, why)) if len(why) < 150 else None
    if made is not None:
        wish = keeps.parse(made)
        assert wish is not None
        assert wish.until == NOW


@pytest.mark.parametrize(
    ("wish", "policy", "says"),
    [
        (WISH, KeepPolicy(allow=False), "nobody"),
        (WISH, KeepPolicy(max_s=3600.0), "at most 1h"),
        (replace(WISH, why="short"), KeepPolicy(), "10 are needed"),
        (replace(WISH, why="x" * 500), KeepPolicy(), "longer than 400"),
    ],
)
def test_what_the_policy_does_not_grant(wish: keeps.Wish, policy: KeepPolicy, says: str) -> None:
    with pytest.raises(AffinodeError, match=says):
        keeps.check(wish, policy, NOW)


def test_wishes_are_taken_in_once_and_cut_to_what_is_allowed(tmp_path: Path) -> None:
    """What its owner writes later changes nothing; without a reason, of an ended job, or over, it is none."""
    far = keeps.comment_with(None, keeps.Wish(NOW + timedelta(days=30), "a very long time"))
    running = slurm_job(7, comment=far, submit=NOW)
    over = slurm_job(8, comment=keeps.comment_with(None, keeps.Wish(NOW, "it was enough")))
    brief = slurm_job(9, comment=keeps.comment_with(None, keeps.Wish(NOW + timedelta(hours=1), "x")))
    ended = slurm_job(10, comment=far, state="COMPLETED")
    with Repository.open(str(tmp_path / "z.sqlite")) as store:
        log = ZombieLog(store.engine)
        jobs = [running, over, brief, ended]
        taken = keeps.collect(jobs, "alpha", KeepPolicy(), log, now=NOW, run="r")
        assert [(one.job_id, one.until) for one in taken] == [(7, NOW + timedelta(hours=4))]
        later = NOW + timedelta(hours=3)
        again = [
            replace(running, comment=keeps.comment_with(None, keeps.Wish(later + timedelta(hours=4), "and more time")))
        ]
        assert keeps.collect(again, "alpha", KeepPolicy(), log, now=later, run="r2") == []
        for run in ("r3", "r4"):
            assert keeps.collect(again, "alpha", KeepPolicy(), log, now=NOW + timedelta(hours=5), run=run) == []
        assert [(one.verb, one.result, one.run) for one in log.history()] == [
            ("keep", "done", "r"), ("keep", "refused", "r3"),
        ]  # fmt: skip
        assert "may be done once" in log.history()[1].reason


def test_a_wish_is_for_one_run_of_a_job() -> None:
    """One that was over when the job was requeued keeps its owner from nothing, and makes room for the next."""
    comment = keeps.comment_with("my own words", WISH)
    assert keeps.asked_before(slurm_job(7, comment=comment, submit=NOW))
    assert not keeps.asked_before(slurm_job(7, comment=comment, submit=WISH.until))
    assert not keeps.asked_before(slurm_job(7, comment="my own words", submit=NOW))
    later = keeps.Wish(NOW + timedelta(hours=5), "once more, in another run")
    again = keeps.comment_with(comment, later)
    assert (again.count("[keep"), keeps.parse(again)) == (1, later)
    assert again.startswith("my own words [keep")


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ('[[rule]]\nnodes = ["gpu[01-"]\naction = "warn"', 2, "unbalanced"),
        ('[[rule]]\nnodes = ["gpu[1-99999999]"]', 2, "names more than"),
        ('[[rule]]\nnodes = ["none"]', 2, "names no node"),
        ("[default]\nmin_run = inf", 2, "hundred years"),
        ('[keep]\nmax = "99999999d"', 2, "hundred years"),
    ],
)
def test_slips_are_told_by_line(tmp_path: Path, text: str, line: int, says: str) -> None:
    """Host lists with a slip in them, and spans with which no time can be reckoned: never a traceback."""
    file = tmp_path / "policy.toml"
    file.write_text(text)
    _, faults = policies.examine(Config(), file)
    assert [fault.line for fault in faults] == [line]
    assert says in faults[0].message


def test_host_lists_are_of_nodes_however_they_are_written() -> None:
    """With brackets, with commas, with patterns beside them: what fits nothing would be no exemption."""
    text = '[[exempt]]\nnodes = ["a1,a2", "b[1-2]*", "c?"]\nuntil = "never"\nreason = "x"'
    [exempt] = parse_policy(text, where="z", expand=expand).exemptions
    assert exempt.match.nodes == ("a1", "a2", "b1*", "b2*", "c?")


def test_an_exemption_is_over_when_the_day_of_the_site_is() -> None:
    """As the decision has it: at 12 UTC it is the next day already on Kiritimati."""
    text = '[calendar]\ntimezone = "{}"\n[[exempt]]\nusers = ["a"]\nuntil = 2026-11-18\nreason = "x"'
    for zone, over in (("Pacific/Kiritimati", True), ("UTC", False)):
        lines = policies.explain(parse_policy(text.format(zone), where="z"), NOW)
        assert any("OVER" in line for line in lines) is over


def test_every_stage_can_be_reached() -> None:
    """What a run looks at is as long as the longest stage, and a day more; a shorter one changes nothing."""
    config = Config(zombies=ZombiesConfig(look_back="2d"))
    assert policies.reaching(config, parse_policy(RULE, where="z")) is config
    long = RULE.replace('cancel = "2h"', 'cancel = "3d"') + '[default]\ninteractive = { extra = "2h" }\n'
    assert parse_span_s(policies.reaching(config, parse_policy(long, where="z")).zombies.look_back) == 4 * 86400 + 7200
    assert policies.reaching(config, parse_policy("", where="z")) is config


def test_what_does_not_end_is_no_policy() -> None:
    """Nor what is too large to be one: one line, and not all of the memory."""
    with pytest.raises(InputError, match=r"^/dev/zero: is larger than 1 MiB"):
        policies.load(Config(), Path("/dev/zero"))
