"""The files of a sample store in a directory: locks, staging, live parts, the log of sources.

Staging uses a directory of its own, locked while the writer lives; the next writer removes the directory of a dead one.
A log of file fingerprints avoids reading old files every night; a file that is missing from it is read again, without
effect.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path

import polars as pl

from slurm_affinode.base.errors import unwritable
from slurm_affinode.base.files import fsync_dir, write_text
from slurm_affinode.metrics.parquet import manifest
from slurm_affinode.metrics.parquet.manifest import PartEntry, StoreManifest
from slurm_affinode.metrics.parquet.parts import PartFiles
from slurm_affinode.metrics.parquet.table import SampleTable

LOG = "sources.jsonl"
KEPT = 200_000
WRITE_LOCK = "write.lock"
READ_LOCK = "read.lock"
_REFUSED = re.compile(r"([A-Z][^:]*?) \(os error (\d+)\)")
_STAGING = "staging"
_LOCK = "lock"


class Staging:
    """The directory of one writer below ``root/staging``."""

    def __init__(self, root: Path) -> None:
        self.path = root / _STAGING / secrets.token_hex(8)
        self.path.mkdir(parents=True)
        self._fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self._closer = weakref.finalize(self, os.close, self._fd)

    def close(self) -> None:
        """Remove the directory and all files left in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._closer()


class StoreDirectory:
    """The files of a store below ``root``. Reading needs read permission only."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._reading: weakref.finalize[..., StoreDirectory] | None = None

    # -- reading ------------------------------------------------------------------------------------------------

    def load(self) -> StoreManifest:
        """Return the manifest; see ``manifest.load``."""
        return manifest.load(self.root)

    def hold(self) -> None:
        """Keep parts that are replaced from now on, until ``release`` or the end of the object."""
        if self._reading is None:
            fd = manifest.lock_shared(self.root / READ_LOCK)
            if fd is not None:
                self._reading = weakref.finalize(self, os.close, fd)

    def release(self) -> None:
        """End ``hold``."""
        if self._reading is not None:
            self._reading()
            self._reading = None

    def fingerprints(self) -> frozenset[str]:
        """Return the fingerprints of all ingested sources."""
        try:
            text = (self.root / LOG).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return frozenset()
        return frozenset(log_entries(text))

    def part_files(self, day: date, entry: PartEntry, table: SampleTable) -> PartFiles:
        """Return the files of a live part."""
        return PartFiles.live(day_dir(self.root, day), entry, table)

    def fetch(self, paths: Sequence[Path]) -> None:
        """Make files of live parts available for reading: here they are."""

    def size(self, path: Path) -> int:
        """Return the size of a file of samples in bytes. Raises ``OSError``."""
        return path.stat().st_size

    # -- writing ------------------------------------------------------------------------------------------------

    def begin(self) -> tuple[StoreManifest, Staging]:
        """Begin an ingest: create a new store, remove what dead writers left, return manifest and a staging area."""
        prepare(self.root)
        with self.locked():
            sweep_staging(self.root)
            # No part may exist without a manifest.
            current = self.load()
            if not (self.root / manifest.FILE).exists():
                manifest.save(self.root, current)
            sweep_orphans(self.root, current)
            return current, Staging(self.root)

    def stage(self) -> Staging:
        """Return a staging area."""
        prepare(self.root)
        with self.locked():
            return Staging(self.root)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the write lock, which is needed to change the live parts."""
        with manifest.locked(self.root / WRITE_LOCK):
            yield

    def land(
        self, directory: Path, staged: Sequence[tuple[date, PartEntry]], sources: Iterable[tuple[str, str | None]]
    ) -> StoreManifest:
        """Add parts in ``directory`` to their days, and (name, fingerprint) of their sources to the log.

        Return the manifest before.
        """
        with self.locked():
            current = self.load()
            for day, entry in staged:
                move_part(self.root, day, PartFiles.of(directory, entry.name), entry)
            if staged:
                manifest.save(self.root, current.with_parts(by_day(staged)))
            self._remember(sources)
        return current

    def replace_day(
        self, current: StoreManifest, day: date, merged: Sequence[PartEntry], written: PartFiles, entry: PartEntry
    ) -> bool:
        """Make ``entry`` the part of ``day`` in place of the parts ``merged`` of ``current``.

        Return whether they still were the parts of the day: here they are, as the caller holds the write lock.
        """
        del merged
        move_part(self.root, day, written, entry)
        changed = current.with_day(day, (entry,))
        manifest.save(self.root, changed)
        sweep_orphans(self.root, changed, only=(day,))
        return True

    def delete_before(self, day: date) -> list[date]:
        """Delete the days before ``day``; return them."""
        if not self.load().days:
            return []
        with self.locked():
            current = self.load()
            removed_days = [part_day for part_day in current.days if part_day < day]
            if removed_days:
                changed = current.without(removed_days)
                manifest.save(self.root, changed)
                sweep_orphans(self.root, changed)
        return removed_days

    def _remember(self, sources: Iterable[tuple[str, str | None]]) -> None:
        """Append (name, fingerprint) pairs. The caller holds the write lock and has made the samples durable."""
        lines = log_lines(sources)
        if not lines:
            return
        with (self.root / LOG).open("a", encoding="utf-8") as file:
            file.write(lines)
            size = file.tell()
        if size > 2 * KEPT * 100:
            write_text(self.root / LOG, trimmed_log((self.root / LOG).read_text(encoding="utf-8", errors="replace")))


@contextlib.contextmanager
def writing(root: Path, hint: str | None = None) -> Iterator[None]:
    """Convert errors of the operating system to one-line errors: see ``errors.unwritable``."""
    try:
        yield
    except (OSError, pl.exceptions.ComputeError) as error:
        # Polars raises a ComputeError for write errors; only its text has the error of the operating system.
        hint = hint or f"check the permissions of {root}"
        if isinstance(error, OSError):
            raise unwritable(error.filename or root, error, hint=hint) from error
        if (why := _REFUSED.search(str(error))) is None:
            raise
        raise unwritable(root, OSError(int(why[2]), why[1]), hint=hint) from error


def day_dir(root: Path, day: date) -> Path:
    """Return the directory of a day."""
    return root / f"day={day.isoformat()}"


def by_day(staged: Iterable[tuple[date, PartEntry]]) -> dict[date, tuple[PartEntry, ...]]:
    """Return the entries of each day, in order."""
    added: dict[date, tuple[PartEntry, ...]] = {}
    for day, entry in staged:
        added[day] = (*added.get(day, ()), entry)
    return added


def log_entries(text: str) -> dict[str, str]:
    """Return fingerprint -> name of the log of sources; lines truncated by a crash are skipped."""
    entries: dict[str, str] = {}
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            entries[str(entry["fingerprint"])] = str(entry["name"])
        except (ValueError, KeyError, TypeError):
            continue
    return entries


def log_lines(sources: Iterable[tuple[str, str | None]]) -> str:
    """Return the lines of the log for (name, fingerprint) pairs; sources without a fingerprint have none."""
    lines = (json.dumps({"fingerprint": digest, "name": name}) for name, digest in sources if digest is not None)
    return "".join(f"{line}\n" for line in lines)


def trimmed_log(text: str) -> str:
    """Return the log with its newest ``KEPT`` entries."""
    return log_lines((name, digest) for digest, name in list(log_entries(text).items())[-KEPT:])


def prepare(root: Path) -> None:
    """Create the directory and its lock files."""
    root.mkdir(parents=True, exist_ok=True)
    for name in (WRITE_LOCK, READ_LOCK):
        (root / name).touch(exist_ok=True)


def sweep_staging(root: Path) -> None:
    """Remove the staging areas of dead writers. The caller holds the write lock."""
    for directory in _children(root / _STAGING):
        try:
            fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # being created or removed
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(fd)


def _children(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []


def move_part(root: Path, day: date, written: PartFiles, entry: PartEntry) -> None:
    """Move a staged part to its day. The caller holds the write lock and adds it to the manifest afterwards."""
    directory = day_dir(root, day)
    directory.mkdir(exist_ok=True)
    for source, target in zip(written.all(), PartFiles.of(directory, entry.name).all(), strict=True):
        with source.open("rb") as file:
            os.fsync(file.fileno())
        source.replace(target)
    fsync_dir(directory)
    fsync_dir(root)


def sweep_orphans(root: Path, current: StoreManifest, only: Sequence[date] | None = None) -> None:
    """Remove files that are not in the manifest, unless there are readers; the caller holds the write lock."""
    with manifest.locked(root / READ_LOCK, wait=False) as alone:
        if not alone:
            return
        directories = root.glob("day=*") if only is None else (day_dir(root, day) for day in only)
        for directory in directories:
            try:
                entries = current.days.get(date.fromisoformat(directory.name.removeprefix("day=")), ())
            except ValueError:
                continue
            live = {path for entry in entries for path in PartFiles.of(directory, entry.name).all()}
            for path in directory.glob("*-*.parquet"):
                if path not in live:
                    path.unlink(missing_ok=True)
            if not entries:
                with contextlib.suppress(OSError):
                    directory.rmdir()
