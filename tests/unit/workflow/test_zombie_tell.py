"""Users and administrators are told by mail, once, and what was told is written down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from zombie_samples import NOW, job, orphan, squatter
from zombie_world import MAIL, World, due

from slurm_affinode.core.cleanup_policy import parse_policy
from slurm_affinode.model.cleanup import Action
from slurm_affinode.model.finding import Finding
from slurm_affinode.workflow.zombie_tell import tell, tell_done


def warning(finding: Finding | None = None, number: int = 1, verb: str = "warn-user", **settings: Any) -> Action:
    """The first mail to a user, or another one."""
    return replace(due(finding, verb, **settings), number=number)


def test_a_user_gets_one_mail_about_all_his_jobs(world: World) -> None:
    """And another user another one; administrators theirs."""
    bobs = squatter(user="bob", subject=job(job_id=9))
    actions = [
        warning(), warning(squatter(subject=job(job_id=8, id="8"))), warning(bobs), warning(orphan(), 0, "warn-admin"),
    ]  # fmt: skip
    outcomes = tell(actions, world.tools(), world.log.ledger(NOW))
    assert [one.result for one in outcomes] == ["done"] * 4
    assert [mail.recipient for mail in world.mails] == ["alice@example.org", "bob@example.org", "ops@example.org"]
    assert "Job 8" in world.mails[0].text
    assert world.log.ledger(NOW).warnings[squatter().key][0].number == 1


def test_the_shape_of_a_users_jobs_is_told_once_in_a_time(world: World) -> None:
    """All jobs of that kind in one mail; another job of the same kind a minute later is no other matter."""
    before = world.log.ledger(NOW)
    shapes = [warning(squatter(kind="time-limit", subject=job(job_id=n, id=str(n))), 0) for n in (7, 8)]
    assert [one.result for one in tell(shapes, world.tools("r1"), before)] == ["done", "done"]
    assert "Job 7" in world.mails[0].text
    assert "Job 8" in world.mails[0].text
    assert world.log.ledger(NOW).told == {shapes[0].finding.matter: NOW}
    late = warning(squatter(kind="time-limit", subject=job(job_id=9, id="9")), 0)
    assert [one.result for one in tell([late], world.tools("r2"), before)] == ["gone"]
    assert len(world.mails) == 1


def test_nobody_is_told_twice_by_two_runs(world: World) -> None:
    """The second decided on what the first had not done yet."""
    before = world.log.ledger(NOW)
    tell([warning()], world.tools("r1"), before)
    assert [one.result for one in tell([warning()], world.tools("r2"), before)] == ["gone"]
    assert len(world.mails) == 1


def test_what_could_not_be_sent_is_no_warning(world: World) -> None:
    """It is tried again, and nothing follows from it; other users get theirs."""
    world.refuse.add("alice@example.org")
    other = warning(squatter(user="bob", subject=job(job_id=9)))
    outcomes = tell([warning(), other], world.tools(), world.log.ledger(NOW))
    assert [one.result for one in outcomes] == ["failed", "done"]
    assert squatter().key not in world.log.ledger(NOW).warnings
    world.refuse.clear()
    assert tell([warning()], world.tools("r2"), world.log.ledger(NOW))[0].result == "done"


def test_a_copy_to_administrators_alone_is_no_warning(world: World) -> None:
    world.refuse.add("alice@example.org")
    [outcome] = tell([warning(warn_admins=True)], world.tools(), world.log.ledger(NOW))
    assert outcome.result == "failed"
    assert [mail.recipient for mail in world.mails] == ["ops@example.org"]


def test_a_mail_that_is_broken_off_is_written_down(world: World) -> None:
    """It may have been sent."""
    world.post = lambda _: (_ for _ in ()).throw(KeyboardInterrupt())  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        tell([warning()], world.tools(), world.log.ledger(NOW))
    [record] = world.log.history()
    assert (record.verb, record.result, "broken off" in record.reason) == ("warn-user", "failed", True)


def test_mails_have_a_limit(world: World) -> None:
    """Of one run."""
    world.policy = parse_policy(MAIL + "[limits]\nmails = 1", where="z")
    others = [warning(), warning(squatter(user="bob", subject=job(job_id=9)))]
    assert [one.result for one in tell(others, world.tools(), world.log.ledger(NOW))] == ["done", "spared"]


def test_a_mail_is_about_one_cluster(world: World) -> None:
    """Its commands name jobs by number, which are other jobs elsewhere."""
    actions = [warning(), warning(squatter(cluster="beta", subject=job(job_id=9, id="9")))]
    assert [one.result for one in tell(actions, world.tools(), world.log.ledger(NOW))] == ["done"] * 2
    assert [(mail.subject, "scancel 9" in mail.text) for mail in world.mails] == [
        ("[alpha] GPUs of job 7 are idle", False), ("[beta] GPUs of job 9 are idle", True),
    ]  # fmt: skip


def test_owners_who_are_not_told_are_not_told_of_the_end_either(world: World) -> None:
    """Administrators had the warnings in their place."""
    tell_done([due(warn_user=False, warn_admins=True)], world.tools())
    assert [(mail.recipient, mail.user) for mail in world.mails] == [("ops@example.org", None)]
    tell_done([due(warn_admins=True)], world.tools())
    assert [mail.recipient for mail in world.mails[1:]] == ["alice@example.org", "ops@example.org"]
