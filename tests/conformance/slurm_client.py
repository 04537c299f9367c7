"""Conformance suite of ``slurm.interface.SlurmClient``: both clients, and the fakes of other tests.

A test file subclasses one of the suites and defines the fixture ``site``. Both clients run it on live clusters
(``cluster/test_slurm_client.py``) and on a slurmctld in memory (``slurm_controller.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

import pytest

from slurm_affinode.model.cluster import Job
from slurm_affinode.slurm import interface
from slurm_affinode.slurm.interface import SlurmClient

UNKNOWN_JOB = 4000000
BAD_NAMES = ("5; id", "", "-5", "--all", "5 6", "0")


@dataclass(frozen=True)
class SlurmSite:
    """A cluster, and a client of its administrator."""

    client: SlurmClient
    job: Callable[[Literal["PENDING", "RUNNING"]], int]
    """Return the ID of a job in this state: not held, and requeued if that is requested."""
    outage: Callable[[], AbstractContextManager[object]] = nullcontext
    """slurmctld does not respond within this context; for ``OutageSuite``."""
    node: str = "c1"
    until: Callable[[Callable[[], Job], Callable[[Job], bool]], Job] = lambda ask, _: ask()
    """Wait until a job is in a state."""


Request = Callable[[SlurmClient, int | str], object]

CHANGES: Sequence[Request] = (
    lambda client, job: client.hold(job),
    lambda client, job: client.release(job),
    lambda client, job: client.requeue(job, hold=True),
    lambda client, job: client.set_comment(job, "x"),
    lambda client, job: client.set_begin(job, datetime.now(UTC) + timedelta(hours=1)),
    lambda client, job: client.set_time_limit(job, 5),
    lambda client, job: client.set_required_nodes(job, ()),
)
"""The changes that the agent requests."""


class QuerySuite:
    """Tests for a client that can query."""

    @pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
    def test_job_is_shown_by_number_and_by_name(self, site: SlurmSite, state: Literal["PENDING", "RUNNING"]) -> None:
        number = site.job(state)
        for job in (site.client.job(number), site.client.job(str(number)), site.client.job(number)):
            assert (job.job_id, job.state, job.is_held) == (number, state, False)
        assert [job.state for job in site.client.jobs() if job.job_id == number] == [state]

    def test_unknown_job_is_reported(self, site: SlurmSite) -> None:
        for name in (UNKNOWN_JOB, str(UNKNOWN_JOB)):
            with pytest.raises(interface.UnknownJobError):
                site.client.job(name)

    def test_close_is_idempotent(self, site: SlurmSite) -> None:
        """The client remains usable: it starts what it needs again."""
        number = site.job("RUNNING")
        site.client.close()
        site.client.close()
        assert site.client.job(number).job_id == number


class ActionSuite(QuerySuite):
    """Further tests, for a client that can change jobs as the agent does."""

    def test_hold_and_release_are_idempotent(self, site: SlurmSite) -> None:
        number, client = site.job("PENDING"), site.client
        for _ in range(2):
            client.hold(number, by_user=True)
            assert client.job(number).is_held
        for _ in range(2):
            client.release(number)
            assert not client.job(number).is_held

    def test_requeued_job_is_pending_and_cannot_be_requeued_again(self, site: SlurmSite) -> None:
        """A second request is an error and has no effect."""
        number, client = site.job("RUNNING"), site.client
        client.requeue(number, hold=True, running=True)
        job = site.until(lambda: client.job(number), lambda job: job.state == "PENDING")
        assert (job.state, job.is_held, job.restarts) == ("PENDING", True, 1)
        with pytest.raises(interface.InvalidStateError):
            client.requeue(number, hold=True)
        assert client.job(number).restarts == 1

    def test_comment_is_replaced_and_removed(self, site: SlurmSite) -> None:
        """Any text; repeatedly."""
        number, client = site.job("PENDING"), site.client
        for text in ("Priority=0 'x' é", "Priority=0 'x' é", "-v"):
            client.set_comment(number, text)
            assert client.job(number).comment == text
        client.set_comment(number, "")
        assert client.job(number).comment is None

    def test_begin_and_nodes_of_a_pending_job_are_set(self, site: SlurmSite) -> None:
        """To the second; repeatedly, and to no node."""
        number, client = site.job("PENDING"), site.client
        when = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=3)
        for _ in range(2):
            client.set_begin(number, when)
            client.set_required_nodes(number, [site.node])
            job = client.job(number)
            assert (job.expected_start, job.nodes_required) == (when, (site.node,))
        client.set_required_nodes(number, [])
        assert client.job(number).nodes_required == ()

    def test_begin_of_a_running_job_is_refused(self, site: SlurmSite) -> None:
        number = site.job("RUNNING")
        with pytest.raises(interface.InvalidStateError):
            site.client.set_begin(number, datetime.now(UTC) + timedelta(hours=1))

    def test_time_limit_is_set(self, site: SlurmSite) -> None:
        """In minutes."""
        number, client = site.job("RUNNING"), site.client
        for _ in range(2):
            client.set_time_limit(number, 7)
            assert client.job(number).time_limit_s == 420

    def test_change_of_an_unknown_job_is_reported(self, site: SlurmSite) -> None:
        for change in CHANGES:
            for name in (UNKNOWN_JOB, str(UNKNOWN_JOB)):
                with pytest.raises(interface.UnknownJobError):
                    change(site.client, name)


class OutageSuite(QuerySuite):
    """Further tests, for a site where an outage of slurmctld costs nothing."""

    def test_text_that_names_no_job_is_refused(self, site: SlurmSite) -> None:
        """Before a request is sent."""
        with site.outage():
            for text in BAD_NAMES:
                with pytest.raises(interface.BadIdentifierError):
                    site.client.job(text)

    def test_unreachable_controller_is_no_empty_answer(self, site: SlurmSite) -> None:
        """The client works again when slurmctld does."""
        number = site.job("RUNNING")
        client = site.client
        with site.outage():
            for query in (client.jobs, client.nodes, client.config, lambda: client.job(number)):
                with pytest.raises(interface.ControllerDownError):
                    query()
        assert client.job(number).job_id == number
        assert "SlurmUser" in client.config()


class ActionOutageSuite(ActionSuite, OutageSuite):
    """All tests, for a client that can change jobs."""

    def test_change_is_not_requested_for_text_that_names_no_job(self, site: SlurmSite) -> None:
        with site.outage():
            for change in CHANGES:
                with pytest.raises(interface.BadIdentifierError):
                    change(site.client, BAD_NAMES[0])

    def test_change_without_controller_has_no_effect(self, site: SlurmSite) -> None:
        number, client = site.job("PENDING"), site.client
        before = client.job(number)
        with site.outage():
            for change in CHANGES:
                with pytest.raises(interface.ControllerDownError):
                    change(client, number)
        job = client.job(number)
        assert (job.state, job.is_held, job.comment) == (before.state, before.is_held, before.comment)
