"""A gate that holds a restored tree until its image and credentials are verified, without the tree noticing.

CRIU runs a script at certain points and waits for it. The script sends a message through one pipe and waits at another.
Two points matter (``restore_root_task`` in ``cr-restore.c``):

- ``post-restore``: everything is in place, and all processes still belong to root, so no other process of the user can
  trace one, read its memory or take a descriptor. If the script fails, CRIU aborts.
- ``pre-resume``: the processes belong to the user and do not run yet. CRIU ignores the script's exit status here, so
  the script ends only on request. If the agent has died, script and tree wait for the next agent, which kills them.

A stop signal is no alternative: programs with a handler for SIGCONT would notice it.

Credentials never exceed those that Slurm gave to this attempt. CRIU restores those in the image, including groups that
the user has lost since, and for a process without groups CRIU leaves its own.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from slurm_affinode.base.pidfd import Process
from slurm_affinode.checkpoint.image.criu_images import BadImage, Message, image_records, integer, message, repeated
from slurm_affinode.checkpoint.interface import RestoreFailed
from slurm_affinode.checkpoint.user_files import User

POST_RESTORE, PRE_RESUME = "post-restore", "pre-resume"
_SCRIPT = f"""#!/bin/sh
case "$CRTOOLS_SCRIPT_ACTION" in {POST_RESTORE}|{PRE_RESUME}) ;; *) exit 0 ;; esac
echo "$CRTOOLS_SCRIPT_ACTION" >ask
until read -r answer <go; do sleep 1; done
exit "$answer"
"""


class Gate:
    """The gate of one restore. A context manager, left when CRIU has ended."""

    OPTION = "--action-script=./gate"
    """The option of CRIU, which runs scripts in its work directory with none of the agent's descriptors."""

    def __init__(
        self, directory: Path, *, restored: Callable[[], None], resuming: Callable[[], None] = lambda: None
    ) -> None:
        """``directory``: CRIU's work directory, which only root may write to.

        ``restored`` is called at ``post-restore``, ``resuming`` at ``pre-resume``, in a thread of its own. If one
        raises an error, it must leave no process of the tree, because the gate opens afterwards.
        """
        self._directory = directory
        self._calls = {POST_RESTORE: restored, PRE_RESUME: resuming}
        self._actions: list[str] = []
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        """Create the script and wait for its messages."""
        script = self._directory / "gate"
        script.write_text(_SCRIPT, encoding="ascii")
        script.chmod(0o700)
        self._ask, self._answer = self._pipe("ask"), self._pipe("go")
        self._end_reader, self._end = os.pipe()
        self._thread = threading.Thread(target=self._wait, name="gate")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop waiting for messages. Raises the error of a failed call, which explains any error of CRIU."""
        os.close(self._end)
        self._thread.join()
        for fd in (self._ask, self._answer, self._end_reader):
            os.close(fd)
        if self._error is not None:
            raise self._error from None

    def check_actions(self) -> None:
        """Check that CRIU ran the script at both points, once it reports success. Raises ``RestoreFailed``."""
        if self._actions != [POST_RESTORE, PRE_RESUME]:
            raise RestoreFailed("CRIU resumed the restored process tree without running its script")

    def _pipe(self, name: str) -> int:
        path = self._directory / name
        os.mkfifo(path, 0o600)
        # Open for reading and writing: opening does not block, and a writer that ends does not close the pipe.
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def _wait(self) -> None:
        poll = select.poll()  # select(2) is limited to descriptors below 1024
        for fd in (self._ask, self._end_reader):
            poll.register(fd, select.POLLIN)
        while self._ask in [fd for fd, _ in poll.poll()]:
            action = os.read(self._ask, 64).decode("ascii", "replace").strip()
            self._actions.append(action)
            try:
                if self._error is None:
                    self._calls[action]()
            except BaseException as error:
                self._error = error
            os.write(self._answer, b"0\n" if self._error is None else b"1\n")


_KEEP_CAPS = 1 << 4  # SECBIT_KEEP_CAPS can be set by any process; the others need CAP_SETPCAP, which no job has
_SETS = {"CapInh": 9, "CapPrm": 10, "CapEff": 11, "CapBnd": 12, "CapAmb": 19}
"""Capability set in ``/proc/PID/status`` -> field of ``images/creds.proto`` in CRIU 4.1."""
_UIDS, _GIDS = (1, 3, 5, 7), (2, 4, 6, 8)
_GROUPS, _SECUREBITS, _NO_NEW_PRIVS = 14, 13, 18
_TASK_CORE, _THREAD_CORE, _CREDS, _SECCOMP = 3, 5, 10, 11  # images/core.proto
_FILTER = 2


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of a thread, as reported by the kernel or stored in an image."""

    uids: frozenset[int]
    gids: frozenset[int]
    groups: frozenset[int]
    capabilities: Mapping[str, int]
    """Name of the set in ``/proc/PID/status`` -> bits."""
    no_new_privs: bool
    seccomp: int
    """Mode: 0 none, 1 strict, 2 filter."""
    securebits: int = 0
    """Known for images only."""


def of_process(process: Process, thread: int | None = None) -> Credentials:
    """Return the credentials of a process or of one of its threads (TID in this namespace). Raises ``OSError``."""
    status = process.status(None if thread is None else f"task/{thread}/status")

    def numbers(key: str) -> frozenset[int]:
        return frozenset(int(word) for word in status.get(key, "").split())

    return Credentials(
        numbers("Uid"), numbers("Gid"), numbers("Groups"),
        {name: int(status[name], 16) for name in _SETS if name in status},
        status.get("NoNewPrivs") == "1", int(status.get("Seccomp", "0")),
    )  # fmt: skip


_ALL = (1 << 64) - 1


def of_owner(owner: User) -> Credentials:
    """Return the credentials of a process without further rights that Slurm has started for the owner of a job.

    Any process may have inheritable capabilities, and a limit for others: neither is a right.
    """
    return Credentials(
        frozenset((owner.uid,)), frozenset((owner.gid,)), frozenset(owner.groups), {"CapInh": _ALL, "CapBnd": _ALL},
        no_new_privs=False, seccomp=0,
    )  # fmt: skip


def of_threads(process: Process) -> tuple[Credentials, ...]:
    """Return the credentials of the threads of a process, each once. Raises ``OSError``."""
    result: list[Credentials] = []
    for thread in process.names("task"):
        with suppress(FileNotFoundError):  # it has ended
            credentials = of_process(process, int(thread))
            if credentials not in result:
                result.append(credentials)
    return tuple(result)


def excess_in_image(directory_fd: int, threads: Iterable[int], permitted: Credentials) -> str | None:
    """Return which process or thread of an image has a right beyond ``permitted``, and which; ``None``: none has.

    Raises ``BadImage``.
    """
    for number in threads:
        recorded = of_image(directory_fd, number)
        why = None if recorded is None else excess(recorded, permitted)
        if why is not None:
            return f"process {number} would have {why}"
    return None


def of_image(directory_fd: int, number: int) -> Credentials | None:
    """Return the credentials of a process or thread in an image. Raises ``BadImage``.

    ``None`` for a zombie, or if the image has none.
    """
    core = next(image_records(directory_fd, f"core-{number}.img"), {})
    thread = _below(core, _THREAD_CORE)
    creds = None if thread is None else _below(thread, _CREDS)
    if thread is None or creds is None:
        return None

    def bits(field: int) -> int:
        return sum(word << 32 * index for index, word in enumerate(repeated(creds, field)))

    # CRIU records filters that all threads share with the main thread only, and sets them for all threads at once. The
    # kernel's values are checked before the process tree runs.
    unrecorded = 0 if _TASK_CORE in core else _FILTER
    return Credentials(
        frozenset(integer(creds, field) for field in _UIDS),
        frozenset(integer(creds, field) for field in _GIDS),
        frozenset(repeated(creds, _GROUPS)),
        {name: bits(field) for name, field in _SETS.items()},
        bool(integer(creds, _NO_NEW_PRIVS, 0)), integer(thread, _SECCOMP, unrecorded),
        integer(creds, _SECUREBITS, 0),
    )  # fmt: skip


def excess(credentials: Credentials, permitted: Credentials) -> str | None:
    """Return a right that a thread has beyond ``permitted``, or ``None``. It may have fewer."""
    if credentials.uids != permitted.uids:
        return f"user IDs {_list(credentials.uids)} in place of {_list(permitted.uids)}"
    allowed = permitted.gids | permitted.groups
    if not credentials.gids <= allowed:
        return f"group ID {_list(credentials.gids - allowed)}, which its owner does not have"
    if not credentials.groups <= allowed:
        return f"group {_list(credentials.groups - allowed)}, which its owner does not have"
    for name, bits in credentials.capabilities.items():
        if more := bits & ~permitted.capabilities.get(name, 0):
            return f"capabilities that it was not given ({name} {more:#x})"
    if permitted.no_new_privs and not credentials.no_new_privs:
        return "no no_new_privs, with which it was started"
    if permitted.seccomp and not credentials.seccomp:
        return "no seccomp filter, with which it was started"
    if credentials.securebits & ~_KEEP_CAPS:
        return f"securebits {credentials.securebits:#x}"
    return None


def _below(fields: Message, number: int) -> Message | None:
    value, *further_values = fields.get(number, [None])
    if further_values:  # CRIU merges them
        raise BadImage(f"field {number} of the credentials is there twice")
    return message(value) if isinstance(value, bytes) else None


def _list(numbers: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "none"
