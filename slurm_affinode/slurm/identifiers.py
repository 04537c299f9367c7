"""Names that go to Slurm: checked before, so that no text of a user becomes an option or another request."""

from __future__ import annotations

import re
import signal as signals
from dataclasses import dataclass

from slurm_affinode.errors import InputError
from slurm_affinode.slurm.faults import BadIdentifierError

MAX_COMMENT_BYTES = 1024
"""Slurm's own limit at submission (MAX_COMMENT_LEN of slurmctld.h)."""
MAX_ADMIN_COMMENT_BYTES = 64 * 1024
"""Sites keep machine-readable records there; an argument of a program may have 128 KiB."""
MAX_MESSAGE_BYTES = 4096

_JOB = re.compile(r"([1-9][0-9]{0,9})(?:_([0-9]{1,7})|\+([0-9]{1,5}))?(?:\.([0-9]{1,10}|batch|extern|interactive))?")
_NODE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,253}[A-Za-z0-9])?")
_LAST_JOB_ID = 0xFFFFFFF0


@dataclass(frozen=True, slots=True)
class Target:
    """A job or step that a person named: ``123``, ``123_4``, ``123+1``, each with ``.0``, ``.batch``, ..."""

    job_id: int
    """The number before ``_`` or ``+``."""
    task: int | None = None
    het_offset: int | None = None
    step: str | None = None

    @property
    def job(self) -> str:
        """The job without its step."""
        if self.task is not None:
            return f"{self.job_id}_{self.task}"
        return str(self.job_id) if self.het_offset is None else f"{self.job_id}+{self.het_offset}"

    def __str__(self) -> str:
        """As Slurm's commands take it."""
        return self.job if self.step is None else f"{self.job}.{self.step}"


def target(text: int | str) -> Target:
    """Take a job or step apart. Raises ``BadIdentifierError``."""
    match = _JOB.fullmatch(str(text)) if str(text).isascii() else None
    if match is None or int(match[1]) > _LAST_JOB_ID:
        raise BadIdentifierError(
            f"{_shown(str(text))} is not a job or step", hint="write 123, 123_4, 123+1, 123.0 or 123.batch"
        )
    job, task, offset, step = match.groups()
    return Target(int(job), None if task is None else int(task), None if offset is None else int(offset), step)


def job(text: int | str) -> Target:
    """A job, not a step. Raises ``BadIdentifierError``."""
    found = target(text)
    if found.step is not None:
        raise BadIdentifierError(f"{found} is a step, and a job is needed", hint=f"write {found.job}")
    return found


def node(text: str) -> str:
    """One node's name. Raises ``BadIdentifierError``: also for a list of nodes, so that one request means one node."""
    if not _NODE.fullmatch(text) or text.upper() == "ALL":
        raise BadIdentifierError(f"{_shown(text)} is not the name of one node")
    return text


def text(value: str, what: str, max_bytes: int) -> str:
    """Free text for Slurm, with any characters but NUL. Raises ``InputError``."""
    if "\0" in value:
        raise InputError(f"the {what} holds a NUL character")
    try:
        size = len(value.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        raise InputError(f"the {what} holds half a character (a lone surrogate)") from None
    if size > max_bytes:
        raise InputError(f"the {what} has {size:,} bytes; at most {max_bytes:,} fit")
    return value


def signal(value: int | str) -> int:
    """The number of a signal given as ``10``, ``USR1`` or ``SIGUSR1``. Raises ``InputError``."""
    word = str(value).upper()
    if re.fullmatch(r"[0-9]{1,2}", word) and 1 <= int(word) <= signals.SIGRTMAX:
        return int(word)
    name = word if word.startswith("SIG") else f"SIG{word}"
    found = getattr(signals, name, None)
    if not isinstance(found, signals.Signals):
        raise InputError(f"{_shown(str(value))} is not a signal", hint="write USR1, SIGUSR1 or 10")
    return int(found)


def _shown(value: str) -> str:
    return repr(value if len(value) <= 60 else f"{value[:57]}...")
