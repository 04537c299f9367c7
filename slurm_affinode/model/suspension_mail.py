"""What a job's owner is told by mail of its suspension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MailKind = Literal["suspended", "restored", "failed"]
MAIL_KINDS: tuple[MailKind, ...] = ("suspended", "restored", "failed")


@dataclass(frozen=True, slots=True)
class SuspensionMail:
    """One thing that happened to a job. ``None`` is unknown."""

    kind: MailKind
    """``failed``: it was not restored, or not woken."""
    cluster: str
    job_id: int
    user: str
    node: str
    """Where it was suspended, restored, or not restored."""
    at_epoch: float
    once: str
    """The same for the same event, also when it is told again after a crash: letters, digits, ``. - _``."""
    shown: str | None = None
    """What its owner calls the job, where that is not its number: ``123_4``."""
    job_name: str | None = None
    partition: str | None = None
    why: str | None = None
    """Why it was suspended; of ``failed`` why it was not restored."""
    gpus: int | None = None
    gpu_model: str | None = None
    gpu_bytes: int | None = None
    """GPU memory that was saved."""
    slept_s: float | None = None
    wake: str | None = None
    """When it goes on: ``auto``, ``hold`` or a time."""
    fresh: bool = False
    """Of ``failed``: it was started from its beginning, in place of being held."""
    in_place: bool = False
    """It sleeps in place: there is no image, and its allocation stays."""
    on_request: bool = False
    """In place: a request on one of its sockets wakes it."""
    ended: bool = False
    """Of ``failed``, in place: it was cancelled, since it had waited too long."""
    left_out: int = 0
    """Mails to this user that were not sent since the last one: there were too many."""

    @property
    def called(self) -> str:
        """What its owner calls the job."""
        return self.shown or str(self.job_id)
