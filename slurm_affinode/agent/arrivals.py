"""Handling of shepherds that connect, report or disappear."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from slurm_affinode.agent.workers import Work
from slurm_affinode.model.suspension import Mode
from slurm_affinode.suspension.interface import Arrival, Orchestration
from slurm_affinode.suspension.job.peers import Identity, Inspector
from slurm_affinode.suspension.job.registry import Link, Registry, WatchedJob
from slurm_affinode.suspension.job.shepherd import Hello, Hold, Outgoing, Reply, Restored, Start, Wait
from slurm_affinode.suspension.job.streams import close

log = logging.getLogger(__name__)


class LatestLink:
    """Connection of a shepherd that waits for its restore: the newest one, if it had to reconnect."""

    def __init__(self, link: Link) -> None:
        self.current = link

    @property
    def open(self) -> bool:
        """See ``Link``."""
        return self.current.open

    def send(self, message: Outgoing) -> bool:
        """See ``Link``."""
        return self.current.send(message)

    def status_of(self, pid: int) -> int | None:
        """See ``Link``."""
        return self.current.status_of(pid)

    def forget_status(self, pid: int) -> None:
        """See ``Link``."""
        self.current.forget_status(pid)


class Arrivals:
    """Keeps the registry current; implements ``shepherd_server.ShepherdEvents``."""

    def __init__(
        self,
        registry: Registry,
        inspector: Inspector,
        orchestration: Orchestration,
        work: Work,
        *,
        later: Callable[[Callable[[], None]], None],
        on_departure: Callable[[int], None] = lambda job_id: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """``later`` runs a call in another thread; ``on_departure`` is called when a job is no longer watched."""
        self._registry = registry
        self._inspector = inspector
        self._orchestration = orchestration
        self._work = work
        self._later = later
        self._on_departure = on_departure
        self._now = now
        self._lock = threading.Lock()
        """Guards ``_restoring``: shepherds that reconnect, and workers that reply."""
        self._restoring: dict[int, tuple[int, LatestLink]] = {}

    def hello(self, who: Identity, hello: Hello, link: Link, fds: tuple[int, ...]) -> bool:
        """See ``ShepherdEvents``."""
        registration = self._registry.get(who.job_id)
        if registration is not None and (registration.init_pid, registration.init_started) != (who.pid, who.started):
            if (
                self._inspector.started(registration.init_pid) == registration.init_started
                and registration.restarts >= hello.restarts
            ):
                log.warning("job %d: refused process %d as a second shepherd", who.job_id, who.pid)
                close(fds, who.uid)
                return False
            self._registry.remove(who.job_id)
            self._on_departure(who.job_id)
            registration = None
        # A requeued job may have a checkpoint image even if its plugin has no path to look for one.
        if hello.root == 0 and (hello.image or hello.restarts > 0):
            return self._restore(who, hello, link, fds)
        close(fds, who.uid)
        if registration is None:
            job = self._watched(_arrival(who, hello, link), link, hello.root)
        else:
            job = replace(registration, link=link, root=hello.root or registration.root)
        self._registry.put(job)
        if hello.root == 0:
            log.info("job %d: starts (uid %d, process %d, %s)", who.job_id, who.uid, who.pid, hello.option)
            if self._admitted(job):
                link.send(Start())
        else:
            log.info(
                "job %d: runs already (uid %d, process %d, restarts %d, %s)",
                who.job_id, who.uid, who.pid, hello.restarts, hello.option,
            )  # fmt: skip
            self._later(lambda: self._orchestration.keeper.registered(job))
        return True

    def _restore(self, who: Identity, hello: Hello, link: Link, fds: tuple[int, ...]) -> bool:
        with self._lock:
            shepherd, latest = self._restoring.get(who.job_id, (0, LatestLink(link)))
            if shepherd == who.pid:
                # The shepherd reconnected during its restore: the reply goes to the new connection.
                latest.current = link
                close(fds, who.uid)
                return link.send(Wait())
            if not hello.image:
                link.send(Wait())  # else it starts the script itself, beside the job that is being restored
            arrival = _arrival(who, hello, latest, fds)
            if not self._work.restore(arrival, self._restored):
                log.info("job %d: work on it is under way; its new shepherd will retry", who.job_id)
                close(fds, who.uid)
                return False
            self._restoring[who.job_id] = (who.pid, latest)
        log.info("job %d: starts again; looking for a checkpoint (uid %d, process %d)", who.job_id, who.uid, who.pid)
        return True

    def started(self, job_id: int, root: int, link: Link) -> None:
        """See ``ShepherdEvents``."""
        self._registry.change(job_id, lambda job: replace(job, root=root) if job.link is link else job)

    def signalled(self, job_id: int, number: int) -> None:
        """See ``ShepherdEvents``."""
        if self._orchestration.in_place is not None:
            self._orchestration.in_place.signalled(job_id, number)

    def on_disconnect(self, job_id: int, link: Link, status: int | None) -> None:
        """See ``ShepherdEvents``. A job is kept if its shepherd still runs and only the connection was lost."""
        job = self._registry.get(job_id)
        if job is None or job.link is not link:
            return
        if status is None and self._inspector.started(job.init_pid) == job.init_started:
            log.info("job %d: lost the connection to its shepherd, which will reconnect", job_id)
            return
        self._drop(job, "has ended" if status is not None else "is gone")

    def sweep(self) -> None:
        """Remove jobs if their shepherd has ended without notice."""
        for job in self._registry.jobs():
            if not job.link.open and self._inspector.started(job.init_pid) != job.init_started:
                self._drop(job, "is gone")

    def _drop(self, job: WatchedJob, ending: str) -> None:
        # This also ends a suspension: the process tree is killed once its checkpoint image is complete.
        if self._registry.remove(job.job_id, job.link) is not None:
            log.info("job %d: its shepherd %s", job.job_id, ending)
            self._on_departure(job.job_id)

    def _restored(self, arrival: Arrival, reply: Reply) -> None:
        """Watch the job after its restore, then reply to the shepherd."""
        with self._lock:
            self._restoring.pop(arrival.job_id, None)
            link = arrival.link.current if isinstance(arrival.link, LatestLink) else arrival.link
        if not isinstance(reply, Hold):
            job = self._watched(arrival, link, reply.pid if isinstance(reply, Restored) else 0)
            self._registry.put(job)
            if not isinstance(reply, Start) or self._admitted(job):
                link.send(reply)
        else:
            link.send(reply)
        close(arrival.fds, arrival.uid)

    def _watched(self, arrival: Arrival, link: Link, root: int) -> WatchedJob:
        """Return a job to be watched. ``root``: see ``WatchedJob``."""
        return WatchedJob(
            job_id=arrival.job_id, uid=arrival.uid, gid=arrival.gid, restarts=arrival.hello.restarts,
            option=arrival.hello.option, init_pid=arrival.init_pid, init_started=arrival.init_started, root=root,
            link=link, since_epoch=self._now(), groups=arrival.groups,
        )  # fmt: skip

    def _admitted(self, job: WatchedJob) -> bool:
        """Return whether a job may start its script now. Otherwise, it is started when its turn comes."""
        in_place = self._orchestration.in_place
        return in_place is None or job.option.mode is not Mode.INPLACE or in_place.admit(job)


def _arrival(who: Identity, hello: Hello, link: Link, fds: tuple[int, ...] = ()) -> Arrival:
    return Arrival(hello, who.job_id, who.uid, who.gid, who.pid, who.started, link, fds, who.foreign, who.groups)
