"""Slurm's variables of the current attempt of a restored job, in a file that its programs can read.

The memory of a restored process has the environment of the first attempt: ``SLURM_JOB_NODELIST``, ``SLURMD_NODENAME``,
``SLURM_JOB_END_TIME`` and ``SLURM_RESTART_COUNT`` are out of date, and so are the numbers of its GPUs for programs that
it starts now. The shepherd of the new attempt has the current values, as slurmstepd has set them. The file is one
``export NAME='value'`` per line, for a shell to source and for ``shlex`` to split. Only root can write to it, and only
the job's user can read it, as with ``/proc/PID/environ``: users may share their group and hide the names of jobs.
"""

from __future__ import annotations

import os
import re
import shlex
import struct
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from slurm_affinode.base import files
from slurm_affinode.base.pidfd import Id, Process

DIRECTORY = "environment"
"""Below the directory of the agent's sockets."""
_GPUS = rb"CUDA_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ROCR_VISIBLE_DEVICES|ZE_AFFINITY_MASK"
_NAME = re.compile(rb"(?!SLURM_JWT)SLURM[A-Z0-9_]{0,80}|" + _GPUS)
"""``SLURM_JWT`` is a credential (auth/jwt), and says nothing of the attempt."""
_LIMIT = 1 << 20
_ACL = "system.posix_acl_access"
_ACL_VERSION = struct.pack("<I", 2)
_ACL_ENTRY = struct.Struct("<HHI")
_OWNER, _USER, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20
"""Tags of entries, in the order of linux/posix_acl.h."""
_READ, _NONE, _NO_ID = 4, 0, 0xFFFFFFFF


class JobEnvironments:
    """The files of a node, one for each restored job, named by its ID."""

    def __init__(self, directory: Path) -> None:
        """``directory``: created with the first file; its parent belongs to root."""
        self._directory = directory

    def write(self, job_id: int, uid: int, shepherd: Id) -> None:
        """Write the variables of a job's shepherd, for its user. Raises ``OSError``."""
        with Process(shepherd.pid, started=shepherd.started) as process:
            text = exports(process.read("environ", _LIMIT))
            process.check()
        files.make_open(self._directory)
        with files.replacing(self._directory / str(job_id), mode=0o440) as file:
            file.write_bytes(text)
            os.setxattr(file, _ACL, _readable_by(uid))

    def remove(self, job_id: int) -> None:
        """Remove the file of a job that has left the node. Never raises."""
        with suppress(OSError):
            (self._directory / str(job_id)).unlink()

    def keep(self, job_ids: Collection[int]) -> None:
        """Remove the files of all other jobs. Never raises."""
        with suppress(OSError):
            for path in list(self._directory.iterdir()):
                if not path.name.isdecimal() or int(path.name) not in job_ids:
                    path.unlink(missing_ok=True)


def _readable_by(uid: int) -> bytes:
    """Return the access control list of a file that only its owner and this user can read: acl(5).

    The user must not own it: an owner can make it writable, and fill the file system of /run.
    """
    entries = (_OWNER, _READ, _NO_ID), (_USER, _READ, uid), (_GROUP, _NONE, _NO_ID), (_MASK, _READ, _NO_ID)
    return _ACL_VERSION + b"".join(_ACL_ENTRY.pack(*entry) for entry in (*entries, (_OTHERS, _NONE, _NO_ID)))


def exports(environ: bytes) -> bytes:
    """Return the variables of Slurm and of its GPUs in ``/proc/PID/environ`` as commands of a shell, sorted by name."""
    variables = {}
    for entry in environ.split(b"\0")[:-1]:  # the last one is empty, or cut off
        name, equals, value = entry.partition(b"=")
        if equals and _NAME.fullmatch(name):
            variables[name] = value
    lines = (
        f"export {os.fsdecode(name)}={shlex.quote(os.fsdecode(value))}\n" for name, value in sorted(variables.items())
    )
    return os.fsencode("".join(lines))
