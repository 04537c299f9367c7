"""The write-ahead journal of suspensions, which makes it possible to recover from a crash at any point.

One file per job, ``CLUSTER.JOBID.SUBMIT.jsonl``, with one JSON object per line. Each line is durable before the step
that it announces is taken. A line truncated by a crash is ignored. A file is removed when nothing is left to recover:
the job runs unharmed, or it is queued with an image known to the other nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_affinode.base import json_values
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.files import fsync_dir
from slurm_affinode.model.suspension import JobKey, Phase
from slurm_affinode.suspension.records.record import NO_NEW_FACTS, SuspensionFacts, SuspensionRecord, decode, encode

Observe = Callable[[Phase | None, float, Phase | None], None]
"""Called with the phase that has ended or continues, its seconds so far, and the phase that begins, if any."""
VERSION = 1
_NAME = re.compile(r"(?P<cluster>[A-Za-z0-9_-]{1,64})\.(?P<job>\d+)\.(?P<submit>\d+)\.jsonl")


class JournalError(AffinodeError):
    """The journal cannot be written, so no step that it would have to record may be taken."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line: the phase that begins, its time (epoch), and the facts that it adds or changes."""

    phase: Phase
    time_epoch: float
    facts: SuspensionFacts


@dataclass(slots=True)
class JobJournal:
    """The journal of one job."""

    key: JobKey
    path: Path
    entries: list[Entry] = field(default_factory=list)
    damage: str | None = None
    """Description of unreadable data, except for a truncated last line. The entries before it are valid."""
    _clock: Callable[[], float] = time.time
    _observe: Observe = lambda ended, seconds, begun: None
    _end: int | None = None
    """End of the intact lines, in bytes; ``None``: the file does not exist yet."""
    _writing: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    @property
    def phase(self) -> Phase:
        """The last phase announced; ``running`` if there is none."""
        return self.entries[-1].phase if self.entries else Phase.RUNNING

    @property
    def unreadable(self) -> bool:
        """The progress of the suspension is unknown: it must be left alone, and nothing may be written."""
        return self.damage is not None and not self.entries

    @property
    def hindrance(self) -> str | None:
        """The reason why no suspension of the job may begin now; ``None``: no suspension is open."""
        if self.unreadable:
            return f"its journal cannot be read: {self.damage}"
        return "an earlier suspension of it is not completed or rolled back yet" if self.entries else None

    @property
    def record(self) -> SuspensionRecord:
        """The record of the suspension after the last line. Raises ``JournalError`` if that is not complete."""
        try:
            return SuspensionRecord.of(
                self.key, ((entry.phase, entry.time_epoch, entry.facts) for entry in self.entries)
            )
        except ValueError as error:
            raise JournalError(f"{self.path}: is not the journal of a suspension: {error}") from None

    def write(self, phase: Phase, facts: SuspensionFacts = NO_NEW_FACTS) -> None:
        """Announce ``phase``; durable on return. Raises ``JournalError`` if nothing was announced.

        ``facts``: those to add or change.
        """
        if self.unreadable:
            raise JournalError(f"{self.path}: {self.damage}")
        entry = Entry(phase, self._clock(), facts)
        value = {"version": VERSION, "phase": phase.value, "time": entry.time_epoch, "facts": encode(facts)}
        line = json.dumps(value, separators=(",", ":"))
        try:
            with self._writing:
                self._append(line.encode() + b"\n")
                last = self.entries[-1] if self.entries else None
                self.entries.append(entry)
        except OSError as error:
            raise JournalError(f"{self.path}: cannot be written: {error.strerror or error}") from error
        self._observed(last, entry.time_epoch, phase)

    def _append(self, line: bytes) -> None:
        new = self._end is None
        if new:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            start = end = self._end or 0
            os.ftruncate(fd, start)  # a line truncated by a crash
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
        """Remove the file: nothing is left to recover. Raises ``JournalError``."""
        try:
            self.path.unlink(missing_ok=True)
            if self.path.parent.is_dir():
                fsync_dir(self.path.parent)
        except OSError as error:
            raise JournalError(f"{self.path}: cannot be removed: {error.strerror or error}") from error
        if self._end is not None and self.entries:
            self._observed(self.entries[-1], self._clock(), None)
        self._end = None

    def _observed(self, last: Entry | None, now: float, begun: Phase | None) -> None:
        if last is None:
            self._observe(None, 0.0, begun)
        else:  # a line with further facts of the same phase does not begin it
            self._observe(last.phase, now - last.time_epoch, None if begun is last.phase else begun)


class Journal:
    """The journals of a node, in one directory that only root can read."""

    def __init__(
        self, directory: Path, *, clock: Callable[[], float] = time.time,
        observe: Observe = lambda ended, seconds, begun: None,
    ) -> None:  # fmt: skip
        """``observe`` is called with each line that is written, and when a journal is closed."""
        self._directory = directory
        self._clock = clock
        self._observe = observe

    def of_job(self, key: JobKey) -> JobJournal:
        """Return the journal of a job with its entries; writes nothing. Raises ``JournalError``."""
        self._check()
        path = self._directory / f"{key.cluster}.{key.job_id}.{key.submit_epoch}.jsonl"
        journal = JobJournal(key, path, _clock=self._clock, _observe=self._observe)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return journal
        except OSError as error:
            raise JournalError(f"{path}: cannot be read: {error.strerror}") from error
        journal.entries, journal._end, journal.damage = parse(data)
        return journal

    def open_journals(self) -> list[JobJournal]:
        """Return every journal that was not closed, oldest job first, for recovery. Raises ``JournalError``."""
        self._check()
        journals = []
        with contextlib.suppress(FileNotFoundError):
            for path in sorted(self._directory.iterdir()):
                match = _NAME.fullmatch(path.name)
                if match is not None:
                    journals.append(self.of_job(JobKey(match["cluster"], int(match["job"]), int(match["submit"]))))
        return sorted(journals, key=lambda journal: journal.key)

    def open_jobs(self) -> frozenset[int]:
        """Return the raw IDs of the jobs that are being suspended or sleep in place. Raises ``JournalError``."""
        try:
            names = [path.name for path in self._directory.iterdir()]
        except FileNotFoundError:
            return frozenset()
        except OSError as error:
            raise JournalError(f"{self._directory}: cannot be read: {error.strerror}") from error
        return frozenset(int(match["job"]) for name in names if (match := _NAME.fullmatch(name)))

    def _check(self) -> None:
        """Check that no other user can write there: the agent acts as root on the processes that a journal names."""
        try:
            facts = self._directory.stat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise JournalError(f"{self._directory}: cannot be examined: {error.strerror}") from error
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            raise JournalError(
                f"{self._directory}: users other than {os.geteuid()} may write to the journal "
                f"(it belongs to user {facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):04o})",
                hint=f"check its contents; then: chown root:root {self._directory} && chmod 0700 {self._directory}",
            )


def parse(data: bytes) -> tuple[list[Entry], int, str | None]:
    """Return the intact entries, the offset of their end, and a description of the damage after them.

    The description is ``None`` if there is no damage, or only a truncated last line. No entry is returned if a line was
    written by another release.
    """
    entries: list[Entry] = []
    end = 0
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break  # truncated: the step was not announced
        try:
            value = json_values.loads(line)
            damage = None if isinstance(value, dict) else "it is not an object"
        except ValueError as error:
            damage = str(error)
        if damage is not None:
            last = end + len(line) == len(data)
            return entries, end, None if last else f"line {number} is damaged ({damage})"
        try:
            entries.append(_entry(value))
        except (ValueError, KeyError, TypeError) as error:
            # The step that it announced may have been taken, so the entries before it may be out of date.
            return (
                [],
                0,
                f"line {number} was written by another release of slurm-affinode ({error}): its job is left alone",
            )
        end += len(line)
    return entries, end, None


def _entry(value: Any) -> Entry:
    if value["version"] != VERSION:
        raise ValueError(f"version {value['version']}, not {VERSION}")
    facts = value["facts"]
    if not isinstance(facts, dict):
        raise TypeError("facts are not a table")
    return Entry(Phase(value["phase"]), json_values.number(value["time"]), decode(facts))
