"""Mail to the owners of jobs, sent by a queue and a process of their own so that it cannot delay or fail a suspension.

``deliver`` returns at once. Each event is mailed at most once, even if it is reported again after a crash: a file
``mailed/EVENT`` is created first. The number of mails per user and hour is limited; the next mail states how many were
omitted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path

from slurm_affinode.base import process
from slurm_affinode.base.config import Config, policy_path
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import last_line
from slurm_affinode.base.threads import Workers, surviving
from slurm_affinode.model.suspension import JobKey, SuspensionMail

LOG = logging.getLogger("slurm_affinode.agent")

Send = Callable[[SuspensionMail], None]

_HOUR_S = 3600.0
_SEND_S = 120.0
_PAUSES_S = (30.0, 300.0)
"""Delays before the retries of a mail that was not sent."""
_WAITING = 256
_KEEP_S = 30 * 86400.0
_EVENT = re.compile(r"[A-Za-z0-9._-]{1,200}")


def event(key: JobKey, began_epoch: float, run: int | None = None) -> str:
    """Return the name of an event of the suspension that began at this time.

    ``run``: the event concerns its restore for the attempt with this restart count.
    """
    name = f"{key.name}.{round(began_epoch * 1000)}"
    return name if run is None else f"{name}.{run}"


class Mailer:
    """The mailer of the agent. Mails are sent one at a time."""

    def __init__(
        self,
        send: Send,
        workers: Workers,
        *,
        kinds: Collection[str] = (),
        most_per_hour: int = 10,
        marks: Path | None = None,
        now: Callable[[], float] = time.time,
        pauses_s: Collection[float] = _PAUSES_S,
    ) -> None:
        """``send``: create and send one mail; raises ``AffinodeError``. ``marks``: directory of the event files."""
        self._send = send
        self._kinds = frozenset(kinds)
        self._most = most_per_hour
        self._marks = marks
        self._now = now
        self._pauses_s = tuple(pauses_s)
        self._queue = workers.queue("mail")
        # Only the thread of the queue uses the counts.
        self._sent: dict[str, deque[float]] = {}
        self._left_out: dict[str, int] = {}

    def deliver(self, event: SuspensionMail) -> None:
        """Queue a mail if the site has enabled its kind. Never raises or blocks."""
        if event.kind not in self._kinds or self._queue.stopping.is_set():
            return
        if self._queue.waiting >= _WAITING:
            LOG.warning("job %s: no mail to %s: %d others wait", event.job_id, event.user, _WAITING)
            return
        self._queue.post(self._run, event)

    def stop(self) -> None:
        """Stop sending; queued mails are dropped."""
        self._queue.close()

    def _run(self, event: SuspensionMail) -> None:
        with surviving(LOG, "job %s: no mail to %s", event.job_id, event.user):
            self._mail(event)

    def _mail(self, event: SuspensionMail) -> None:
        if not self._first(event):
            return
        sent = self._sent.setdefault(event.user, deque())
        while sent and sent[0] <= self._now() - _HOUR_S:
            sent.popleft()
        if len(sent) >= self._most:
            self._left_out[event.user] = self._left_out.get(event.user, 0) + 1
            LOG.warning("job %s: no mail to %s: %d mails in the last hour", event.job_id, event.user, len(sent))
            return
        sent.append(self._now())
        event = replace(event, left_out=self._left_out.get(event.user, 0))
        for pause_s in (*self._pauses_s, None):
            try:
                self._send(event)
            except AffinodeError as error:
                LOG.warning("job %s: no mail to %s: %s", event.job_id, event.user, error)
                if pause_s is None or self._queue.stopping.wait(pause_s):
                    return
            else:
                self._left_out.pop(event.user, None)
                return

    def _first(self, event: SuspensionMail) -> bool:
        """Return whether this event was not mailed yet. An event that cannot be recorded is not mailed."""
        name = f"{event.once}.{event.kind}"
        marks = self._marks
        if marks is None:
            return True
        if not _EVENT.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of an event")
        try:
            marks.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(marks / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return False
        except OSError as error:
            LOG.warning("job %s: no mail to %s: %s: %s", event.job_id, event.user, marks, error.strerror)
            return False
        self._forget(marks)
        return True

    def _forget(self, marks: Path) -> None:
        for path in marks.iterdir():
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < self._now() - _KEEP_S:
                    path.unlink()


NO_MAILS = Mailer(lambda mail: None, Workers())
"""For sites that have disabled mail."""


def mailer(config: Config, workers: Workers) -> Mailer:
    """Return the mailer for the kinds in ``[suspend] mail``, or ``NO_MAILS`` if there are none.

    Each mail is sent by a process of its own. Raises nothing itself; sending raises ``AffinodeError`` with the last
    line of the process's standard error.
    """
    suspend = config.suspend
    if not suspend.mail:
        return NO_MAILS
    policy, timezone = str(policy_path(config)), config.cluster.timezone

    def send(event: SuspensionMail) -> None:
        request = {"event": asdict(event), "policy": policy, "timezone": timezone}
        argv = process.of_module("slurm_affinode.pipeline.suspension_mail")
        completed = process.run(argv, timeout_s=_SEND_S, stdin=json.dumps(request).encode(), group=True, check=False)
        if completed.returncode != 0:
            last = last_line(completed.stderr)
            raise AffinodeError(last or f"the mail's process ended with status {completed.returncode}")

    marks = suspend.journal.parent / "mailed"
    return Mailer(send, workers, kinds=suspend.mail, most_per_hour=suspend.mail_limit, marks=marks)
