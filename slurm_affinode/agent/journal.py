"""The write-ahead journal of suspensions: what the agent was about to do, readable after any crash.

One file per job, ``CLUSTER.JOBID.SUBMIT.jsonl``, one JSON object per line, each line durable before the step that it
announces is taken. A line that a crash has torn is as if it had never been written. A file is removed when its job is
where it can be left: running unharmed, or queued with an image that others know of.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_affinode import jsonvalues
from slurm_affinode.errors import AffinodeError
from slurm_affinode.files import fsync_dir
from slurm_affinode.model.suspension import JobKey, Phase

VERSION = 1
_NAME = re.compile(r"(?P<cluster>[A-Za-z0-9_-]{1,64})\.(?P<job>\d+)\.(?P<submit>\d+)\.jsonl")


class JournalError(AffinodeError):
    """The journal cannot be written: nothing may be done that would have to be in it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line: the phase that begins, when (epoch), and what has to be known to go on from there."""

    phase: Phase
    time_epoch: float
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Record:
    """The journal of one job."""

    key: JobKey
    path: Path
    entries: list[Entry] = field(default_factory=list)
    damage: str | None = None
    """What could not be read, other than a torn last line. What stands before it counts."""
    _clock: Callable[[], float] = time.time
    _end: int | None = None
    """Where the intact lines end, in bytes; ``None``: the file is not there yet."""
    _writing: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    @property
    def phase(self) -> Phase:
        """The phase that was announced last; ``running`` where none was."""
        return self.entries[-1].phase if self.entries else Phase.RUNNING

    @property
    def unreadable(self) -> bool:
        """How far the suspension has got is not known: nothing may be done about it, and nothing written."""
        return self.damage is not None and not self.entries

    @property
    def hindrance(self) -> str | None:
        """Why no suspension of the job may begin now; ``None``: none is open."""
        if self.unreadable:
            return f"its journal cannot be read: {self.damage}"
        return "an earlier suspension of it is still being put in order" if self.entries else None

    @property
    def facts(self) -> dict[str, Any]:
        """Everything noted, the later over the earlier."""
        merged: dict[str, Any] = {}
        for entry in self.entries:
            merged.update(entry.facts)
        return merged

    @property
    def phases(self) -> dict[str, float]:
        """Phase -> when it was announced last (epoch)."""
        return {entry.phase.value: entry.time_epoch for entry in self.entries}

    def write(self, phase: Phase, **facts: Any) -> Entry:
        """Announce ``phase``; durable when this returns. Raises ``JournalError``, and then nothing was announced."""
        if self.unreadable:
            raise JournalError(f"{self.path}: {self.damage}")
        entry = Entry(phase, self._clock(), facts)
        line = json.dumps(
            {"version": VERSION, "phase": phase.value, "time": entry.time_epoch, "facts": facts}, separators=(",", ":")
        )
        try:
            with self._writing:
                self._append(line.encode() + b"\n")
                self.entries.append(entry)
        except OSError as error:
            raise JournalError(f"{self.path}: cannot be written: {error.strerror or error}") from error
        return entry

    def _append(self, line: bytes) -> None:
        new = self._end is None
        if new:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            start = end = self._end or 0
            os.ftruncate(fd, start)  # what a crash has torn
            try:
                while line:
                    written = os.pwrite(fd, line, end)
                    line, end = line[written:], end + written
                os.fsync(fd)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, start)
                raise
            self._end = end
        finally:
            os.close(fd)
        if new:
            fsync_dir(self.path.parent)

    def close(self) -> None:
        """Nothing is left to be recovered. Raises ``JournalError``."""
        try:
            self.path.unlink(missing_ok=True)
            if self.path.parent.is_dir():
                fsync_dir(self.path.parent)
        except OSError as error:
            raise JournalError(f"{self.path}: cannot be removed: {error.strerror or error}") from error
        self._end = None


class Journal:
    """The journals of a node, in one directory that only root reads."""

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._clock = clock

    def record(self, key: JobKey) -> Record:
        """The journal of a job, with what is in it; nothing is written. Raises ``JournalError``."""
        self._check()
        path = self._directory / f"{key.cluster}.{key.job_id}.{key.submit_epoch}.jsonl"
        record = Record(key, path, _clock=self._clock)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return record
        except OSError as error:
            raise JournalError(f"{path}: cannot be read: {error.strerror}") from error
        record.entries, record._end, record.damage = parse(data)
        return record

    def open_records(self) -> list[Record]:
        """Every journal that was not closed, oldest job first: what an agent that starts has to look after.

        Raises ``JournalError``.
        """
        self._check()
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in sorted(self._directory.iterdir()):
                match = _NAME.fullmatch(path.name)
                if match is not None:
                    found.append(self.record(JobKey(match["cluster"], int(match["job"]), int(match["submit"]))))
        return sorted(found, key=lambda record: record.key)

    def _check(self) -> None:
        """Nobody else can write there: what a journal says, root does, to the processes that it names."""
        try:
            facts = self._directory.stat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise JournalError(f"{self._directory}: cannot be looked at: {error.strerror}") from error
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            raise JournalError(
                f"{self._directory}: others than user {os.geteuid()} may write to the journal "
                f"(it is of {facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):04o})",
                hint=f"look at what is in it; then: chown root:root {self._directory} && chmod 0700 {self._directory}",
            )


def parse(data: bytes) -> tuple[list[Entry], int, str | None]:
    """Intact entries, the byte at which they end, and what is wrong after them (``None``: nothing, or a torn end).

    None where a line is of another release.
    """
    entries: list[Entry] = []
    end = 0
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break  # torn: the step was not announced
        try:
            value = jsonvalues.loads(line)
        except ValueError as error:
            last = end + len(line) == len(data)
            return entries, end, None if last else f"line {number} is damaged ({error})"
        try:
            entries.append(_entry(value))
        except (ValueError, KeyError, TypeError) as error:
            # What it announced may have been done: what stands before it is not how things are.
            return [], 0, f"line {number} is of another release of slurm-affinode ({error}): its job is left alone"
        end += len(line)
    return entries, end, None


def _entry(value: Any) -> Entry:
    if value["version"] != VERSION:
        raise ValueError(f"version {value['version']}, not {VERSION}")
    facts = value["facts"]
    if not isinstance(facts, dict):
        raise TypeError("facts are no table")
    return Entry(Phase(value["phase"]), jsonvalues.number(value["time"]), facts)
