"""Mails to users and administrators: each is sent and recorded once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from zombie_samples import NOW, job, orphan, squatter

from slurm_affinode.core.cleanup_policy import parse_policy
from slurm_affinode.model.cleanup import Action
from slurm_affinode.model.finding import Finding
from slurm_affinode.zombies.mail import mail_done, notify

from .zombie_world import MAIL, World, due


def warning(finding: Finding | None = None, number: int = 1, verb: str = "warn-user", **settings: Any) -> Action:
    """The first mail to a user, or the mail given by ``number`` and ``verb``."""
    return replace(due(finding, verb, **settings), number=number)


def test_user_gets_one_mail_for_all_jobs(world: World) -> None:
    """Other users and administrators get their own."""
    bobs = squatter(user="bob", subject=job(job_id=9))
    actions = [
        warning(), warning(squatter(subject=job(job_id=8, id="8"))), warning(bobs), warning(orphan(), 0, "warn-admin"),
    ]  # fmt: skip
    outcomes = notify(actions, world.tools(), world.log.ledger(NOW))
    assert [outcome.result for outcome in outcomes] == ["done"] * 4
    assert [mail.recipient for mail in world.mails] == ["alice@example.org", "bob@example.org", "ops@example.org"]
    assert "Job 8" in world.mails[0].text
    assert world.log.ledger(NOW).warnings[squatter().key][0].number == 1


def test_misfit_mail_is_sent_once_per_period(world: World) -> None:
    """All jobs of that kind are in one mail; another job of the same kind a minute later is not a new finding."""
    before = world.log.ledger(NOW)
    shapes = [warning(squatter(kind="time-limit", subject=job(job_id=n, id=str(n))), 0) for n in (7, 8)]
    assert [outcome.result for outcome in notify(shapes, world.tools("r1"), before)] == ["done", "done"]
    assert "Job 7" in world.mails[0].text
    assert "Job 8" in world.mails[0].text
    assert world.log.ledger(NOW).mailed == {shapes[0].finding.matter: NOW}
    late = warning(squatter(kind="time-limit", subject=job(job_id=9, id="9")), 0)
    assert [outcome.result for outcome in notify([late], world.tools("r2"), before)] == ["gone"]
    assert len(world.mails) == 1


def test_concurrent_runs_send_one_mail(world: World) -> None:
    """The second run decided before the first had sent the mail."""
    before = world.log.ledger(NOW)
    notify([warning()], world.tools("r1"), before)
    assert [outcome.result for outcome in notify([warning()], world.tools("r2"), before)] == ["gone"]
    assert len(world.mails) == 1


def test_unsent_mail_does_not_count_as_warning(world: World) -> None:
    """It is retried; the mails of other users are sent."""
    world.refuse.add("alice@example.org")
    other = warning(squatter(user="bob", subject=job(job_id=9)))
    outcomes = notify([warning(), other], world.tools(), world.log.ledger(NOW))
    assert [outcome.result for outcome in outcomes] == ["failed", "done"]
    assert squatter().key not in world.log.ledger(NOW).warnings
    world.refuse.clear()
    assert notify([warning()], world.tools("r2"), world.log.ledger(NOW))[0].result == "done"


def test_copy_to_administrators_does_not_count_as_warning(world: World) -> None:
    world.refuse.add("alice@example.org")
    [outcome] = notify([warning(warn_admins=True)], world.tools(), world.log.ledger(NOW))
    assert outcome.result == "failed"
    assert [mail.recipient for mail in world.mails] == ["ops@example.org"]


def test_interrupted_mail_is_recorded(world: World) -> None:
    """It may have been sent."""
    world.post = lambda _: (_ for _ in ()).throw(KeyboardInterrupt())  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        notify([warning()], world.tools(), world.log.ledger(NOW))
    [record] = world.log.history()
    assert (record.verb, record.result, "interrupted" in record.reason) == ("warn-user", "failed", True)


def test_mails_per_run_are_limited(world: World) -> None:
    world.policy = parse_policy(MAIL + "[limits]\nmails = 1", where="z")
    others = [warning(), warning(squatter(user="bob", subject=job(job_id=9)))]
    assert [outcome.result for outcome in notify(others, world.tools(), world.log.ledger(NOW))] == ["done", "spared"]


def test_mail_is_about_one_cluster(world: World) -> None:
    """Its commands name jobs by ID, which is unique only within a cluster."""
    actions = [warning(), warning(squatter(cluster="beta", subject=job(job_id=9, id="9")))]
    assert [outcome.result for outcome in notify(actions, world.tools(), world.log.ledger(NOW))] == ["done"] * 2
    assert [(mail.subject, "scancel 9" in mail.text) for mail in world.mails] == [
        ("[alpha] GPUs of job 7 are idle", False), ("[beta] GPUs of job 9 are idle", True),
    ]  # fmt: skip


def test_owners_who_are_not_warned_get_no_mail_about_the_action(world: World) -> None:
    """Administrators received the warnings instead."""
    mail_done([due(warn_user=False, warn_admins=True)], world.tools())
    assert [(mail.recipient, mail.user) for mail in world.mails] == [("ops@example.org", None)]
    mail_done([due(warn_admins=True)], world.tools())
    assert [mail.recipient for mail in world.mails[1:]] == ["alice@example.org", "ops@example.org"]
