"""Credentials of a restored tree: never more than Slurm has given to the run that it is restored in.

CRIU gives each thread what the image says. Groups that the user has lost since then would come back with it, and where
the image lists no groups CRIU leaves those that it has itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_affinode.checkpoint.criu_images import Message, image_records, integer, message, repeated
from slurm_affinode.pinned import Process

_KEEP_CAPS = 1 << 4  # SECBIT_KEEP_CAPS: anybody may set it; the others take CAP_SETPCAP, which no job has
_SETS = {"CapInh": 9, "CapPrm": 10, "CapEff": 11, "CapBnd": 12, "CapAmb": 19}
"""Of ``/proc/PID/status``: field of ``images/creds.proto`` of CRIU 4.1."""
_UIDS, _GIDS = (1, 3, 5, 7), (2, 4, 6, 8)
_GROUPS, _SECUREBITS, _NO_NEW_PRIVS = 14, 13, 18
_THREAD_CORE, _CREDS, _SECCOMP = 5, 10, 11  # images/core.proto


@dataclass(frozen=True, slots=True)
class Credentials:
    """The rights of a thread, by the kernel's account or by that of an image."""

    uids: frozenset[int]
    gids: frozenset[int]
    groups: frozenset[int]
    capabilities: Mapping[str, int]
    """Set, as in ``/proc/PID/status`` -> bits."""
    no_new_privs: bool
    seccomp: int
    """Mode: 0 none, 1 strict, 2 filter."""
    securebits: int = 0
    """Only an image tells."""


def of_process(process: Process, thread: int | None = None) -> Credentials:
    """Of a process, or of one of its threads (its number here). Raises ``OSError``."""
    status = process.status(None if thread is None else f"task/{thread}/status")

    def numbers(key: str) -> frozenset[int]:
        return frozenset(int(word) for word in status.get(key, "").split())

    return Credentials(
        numbers("Uid"), numbers("Gid"), numbers("Groups"),
        {name: int(status[name], 16) for name in _SETS if name in status},
        status.get("NoNewPrivs") == "1", int(status.get("Seccomp", "0")),
    )  # fmt: skip


def of_image(directory_fd: int, number: int) -> Credentials | None:
    """Of a process or thread of an image; ``None``: it is a zombie, or has none. Raises ``BadImage``."""
    core = next(image_records(directory_fd, f"core-{number}.img"), {})
    thread = _below(core, _THREAD_CORE)
    creds = None if thread is None else _below(thread, _CREDS)
    if thread is None or creds is None:
        return None

    def bits(field: int) -> int:
        return sum(word << 32 * at for at, word in enumerate(repeated(creds, field)))

    return Credentials(
        frozenset(integer(creds, field) for field in _UIDS),
        frozenset(integer(creds, field) for field in _GIDS),
        frozenset(repeated(creds, _GROUPS)),
        {name: bits(field) for name, field in _SETS.items()},
        bool(integer(creds, _NO_NEW_PRIVS, 0)), integer(thread, _SECCOMP, 0), integer(creds, _SECUREBITS, 0),
    )  # fmt: skip


def excess(found: Credentials, given: Credentials) -> str | None:
    """Name a right that a thread has beyond ``given``; ``None``: there is none. It may have fewer."""
    if found.uids != given.uids:
        return f"user IDs {_list(found.uids)} in place of {_list(given.uids)}"
    allowed = given.gids | given.groups
    if not found.gids <= allowed:
        return f"group ID {_list(found.gids - allowed)}, which its user does not have any more"
    if not found.groups <= allowed:
        return f"group {_list(found.groups - allowed)}, which its user does not have any more"
    for name, bits in found.capabilities.items():
        if more := bits & ~given.capabilities.get(name, 0):
            return f"capabilities that its run was not given ({name} {more:#x})"
    if given.no_new_privs and not found.no_new_privs:
        return "no no_new_privs, with which its run was started"
    if given.seccomp and not found.seccomp:
        return "no seccomp filter, with which its run was started"
    if found.securebits & ~_KEEP_CAPS:
        return f"securebits {found.securebits:#x}"
    return None


def _below(fields: Message, number: int) -> Message | None:
    value = fields.get(number, [None])[0]
    return message(value) if isinstance(value, bytes) else None


def _list(numbers: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "none"
