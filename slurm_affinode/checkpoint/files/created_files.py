"""Records of the node-local files that restores of a job have created on this node.

An attempt that is killed leaves such files behind, with contents that no image has. The next restore of the job on the
node replaces exactly these (``local_files.put_back``). A file is identified by its device and the handle that the
kernel gives it (``name_to_handle_at(2)``), which contains the generation of the inode: a reused inode number does not
match. A file on a file system without handles is not recorded.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_affinode.base import files, json_values
from slurm_affinode.model.suspension import JobKey

LOG = logging.getLogger("slurm_affinode.agent")
_LIBC = ctypes.CDLL(None, use_errno=True)
_HANDLE_BYTES = 128  # MAX_HANDLE_SZ
_AT_EMPTY_PATH = 0x1000
_LIMIT = 64 << 20
_VERSION = 1


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """A file for as long as its file system exists."""

    device: int
    handle: str
    """Its type and contents, in hexadecimal."""

    @classmethod
    def of(cls, fd: int) -> FileIdentity | None:
        """Return the identity of an open file (``O_PATH`` suffices), or ``None`` if its file system has no handles."""
        handle = (ctypes.c_uint32 * (2 + _HANDLE_BYTES // 4))(_HANDLE_BYTES)
        if _LIBC.name_to_handle_at(fd, b"", handle, ctypes.byref(ctypes.c_int()), _AT_EMPTY_PATH) != 0:
            return None
        return cls(os.fstat(fd).st_dev, bytes(handle)[4 : 8 + handle[0]].hex())


@dataclass(frozen=True, slots=True)
class _Record:
    uid: int
    submit: int
    files: Mapping[str, FileIdentity]
    version: int = _VERSION


def _decoded(data: bytes) -> _Record:
    """Return a record. Raises ``ValueError``."""
    if len(data) > _LIMIT:
        raise ValueError(f"it is larger than {_LIMIT} bytes")
    value = json_values.table(json_values.loads(data))
    if value.get("version", _VERSION) != _VERSION:
        raise ValueError("its version is unknown")
    return json_values.record(_Record, value, strict=False)


@dataclass(frozen=True, slots=True)
class CreatedFiles:
    """The record of one job."""

    path: Path
    uid: int
    """The user of the job."""
    submit: int
    """Its submit time, which Slurm moves forward with each requeue."""

    def read(self) -> Mapping[str, FileIdentity]:
        """Return the identity of each file by its path; empty if the record is of another job or cannot be read."""
        try:
            with self.path.open("rb") as file:
                record = _decoded(file.read(_LIMIT + 1))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            LOG.warning("%s: cannot be read, files of killed attempts are not replaced: %s", self.path, error)
            return {}
        return record.files if record.uid == self.uid and record.submit <= self.submit else {}

    def write(self, created: Mapping[str, FileIdentity]) -> None:
        """Replace the record. A failure is logged: the restore does not depend on it."""
        try:
            if not created:
                self.path.unlink(missing_ok=True)
                return
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = json.dumps(asdict(_Record(self.uid, self.submit, created)))
            files.write_text(self.path, text, mode=0o600)
        except OSError as error:
            LOG.warning("%s: cannot be written: %s", self.path, error.strerror or error)


class RecordsOfJobs:
    """Records of a node, one for each job, named by its ID."""

    def __init__(self, directory: Path) -> None:
        """``directory``: created with the first record; its parent belongs to root."""
        self._directory = directory

    def path(self, job_id: int) -> Path:
        """Return the path of the record of a job."""
        return self._directory / f"{job_id}.json"

    def remove(self, job_id: int) -> None:
        """Remove the record of a job that has left the node or ended. Never raises."""
        with suppress(OSError):
            self.path(job_id).unlink()

    def jobs(self) -> list[int]:
        """Return the IDs of the jobs that have a record. Never raises."""
        with suppress(OSError):
            return sorted(int(path.stem) for path in self._directory.glob("*.json") if path.stem.isdecimal())
        return []


class CreatedFilesOfJobs(RecordsOfJobs):
    """The records of the files that restores have created."""

    def of(self, key: JobKey, uid: int) -> CreatedFiles:
        """Return the record of a job."""
        return CreatedFiles(self.path(key.job_id), uid, key.submit_epoch)
