"""The job mapping directory that dcgm-exporter knows (``--hpc-job-mapping-dir``): which jobs have which GPU.

A file for each GPU, named by its index on the node (``0``; ``0.7`` for GPU instance 7 of GPU 0), one job id per line;
no file: no job. The prolog adds a job, the epilog removes it. Writers wait for each other; readers see whole files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slurm_affinode.errors import UnreachableError
from slurm_affinode.files import make_open
from slurm_affinode.model.gpu import Device

_NAME = re.compile(r"\d{1,4}(?:\.\d{1,4})?")
_JOB = re.compile(r"\d+(?:[_+]\d+)?")
LOCK_S = 20.0


def key_of(device: Device) -> str:
    """The name of a device's file."""
    return str(device.index) if device.mig is None else f"{device.index}.{device.mig}"


def read(directory: Path) -> Mapping[str, tuple[str, ...]] | None:
    """File name -> job ids, in order, each once. None where there is no directory: then nothing is known.

    Raises ``UnreachableError`` where it may not be read.
    """
    found: dict[str, tuple[str, ...]] = {}
    try:
        for path in directory.iterdir():
            if not _NAME.fullmatch(path.name):
                continue
            with contextlib.suppress(FileNotFoundError):  # the last job ended meanwhile
                found[path.name] = _jobs(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreachableError(f"{directory}: cannot be read: {error.strerror}") from error
    return found


def add(directory: Path, gpus: Sequence[str], job: str, *, lock_s: float = LOCK_S) -> None:
    """Note that ``job`` has the GPUs (file names). Twice is as once.

    Raises ``ValueError`` for a name or id that is none, ``UnreachableError`` where nothing can be written.
    """
    _check(job)
    wrong = [name for name in gpus if not _NAME.fullmatch(name)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no index of a GPU")
    with _locked(directory, lock_s):
        for name in gpus:
            path = directory / name
            jobs = _jobs(path) if path.exists() else ()
            _write(path, jobs if job in jobs else (*jobs, job))


def remove(directory: Path, job: str, *, lock_s: float = LOCK_S) -> None:
    """Note that ``job`` has no GPU any more; one that had none is fine. Raises as ``add``.

    Every file is looked at: an epilog may not be told the GPUs (Slurm leaves ``SLURM_JOB_GPUS`` empty where a job was
    cancelled while its prolog ran).
    """
    _check(job)
    with _locked(directory, lock_s):
        for path in sorted(directory.iterdir()):
            if _NAME.fullmatch(path.name) and job in (jobs := _jobs(path)):
                _write(path, tuple(one for one in jobs if one != job))


def _check(job: str) -> None:
    if not _JOB.fullmatch(job):
        raise ValueError(f"{job!r} is no job id")


def _jobs(path: Path) -> tuple[str, ...]:
    lines = (line.strip() for line in path.read_text("utf-8", "replace").splitlines())
    return tuple(dict.fromkeys(line for line in lines if line))


def _write(path: Path, jobs: tuple[str, ...]) -> None:
    """Replace a file; it need not survive a power loss, for the jobs do not either."""
    if not jobs:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with temporary.open("x") as file:
        file.write("".join(f"{job}\n" for job in jobs))
        os.fchmod(file.fileno(), 0o644)
    temporary.replace(path)


@contextlib.contextmanager
def _locked(directory: Path, lock_s: float) -> Iterator[None]:
    """Hold the directory itself locked, so that no further file lies in it (a shell may use ``flock DIRECTORY``)."""
    try:
        make_open(directory)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            facts = os.fstat(fd)
            if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & 0o022:
                # Root would follow their links, out of it and into it.
                raise UnreachableError(
                    f"{directory}: others than its user may write to it",
                    hint=f"try: chown root:root {directory} && chmod 0755 {directory}",
                )
            if not _lock(fd, lock_s):
                raise UnreachableError(f"{directory}: has been locked for {lock_s:g} s")
            yield
        finally:
            os.close(fd)
    except OSError as error:
        raise UnreachableError(f"{directory}: cannot be written: {error.strerror}") from error


def _lock(fd: int, wait_s: float) -> bool:
    """Lock a file for others; ``False``: somebody else has held it for so long."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        else:
            return True
