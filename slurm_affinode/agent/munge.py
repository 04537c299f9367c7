"""munge credentials: the cluster's munge daemons certify the sender of a message and restrict who may read it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from slurm_affinode.base import process
from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.base.process import Completed
from slurm_affinode.base.text import last_line

TIMEOUT_S = 10.0
TTL_S = 60
MAX_CREDENTIAL_BYTES = 1 << 20
_CREDENTIAL = re.compile(rb"MUNGE:[A-Za-z0-9+/=]{16,}:")
_UID = re.compile(r"^UID:\s+\S*\s*\((\d+)\)\s*$", re.MULTILINE)
_STATUS = re.compile(r"^STATUS:\s+(.+?)\s+\((\d+)\)\s*$", re.MULTILINE)


class BadCredentialError(AffinodeError):
    """munge rejected a credential: malformed, expired, replayed, or from another cluster."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Message:
    """The payload of a credential and its sender."""

    payload: bytes
    uid: int


def encode(payload: bytes, *, only_uid: int | None = None, run: Callable[..., Completed] = process.run) -> bytes:
    """Return a credential of the calling user with ``payload``. ``only_uid``: only that user and root may decode it.

    Raises ``UnreachableError``.
    """
    restrict = () if only_uid is None else (f"--restrict-uid={only_uid}",)
    argv = ("munge", f"--ttl={TTL_S}", *restrict)
    completed = run(argv, timeout_s=TIMEOUT_S, stdin=payload, check=False)
    if completed.returncode != 0:
        raise UnreachableError(f"munge: {_last(completed)}", hint="is munged running on this machine?")
    return completed.stdout.strip()


def decode(credential: bytes, *, run: Callable[..., Completed] = process.run) -> Message:
    """Return the message in a credential, which a machine accepts only once. Raises ``BadCredentialError``."""
    if len(credential) > MAX_CREDENTIAL_BYTES or not _CREDENTIAL.fullmatch(credential.strip()):
        raise BadCredentialError("the data is not a munge credential")
    completed = run(
        ("unmunge", "--keys=STATUS,UID", "--metadata=/dev/stderr"), timeout_s=TIMEOUT_S, stdin=credential, check=False
    )
    status, uid = _STATUS.search(completed.stderr), _UID.search(completed.stderr)
    if completed.returncode != 0 or status is None or uid is None or status[2] != "0":
        raise BadCredentialError(f"unmunge: {status[1] if status else _last(completed)}")
    return Message(completed.stdout, int(uid[1]))


def _last(completed: Completed) -> str:
    return last_line(completed.stderr) or f"it ended with status {completed.returncode}"
