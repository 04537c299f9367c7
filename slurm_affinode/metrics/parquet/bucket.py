"""The files of a sample store in an object store, with copies of those in use in a directory.

The names of objects are those of the files of a store in a directory, and so are their contents. A commit writes the
manifest only if it is still the one that was read, and otherwise applies the change to the new one: concurrent
writers never lose each other's parts. The manifest has two more entries: ``samples`` with sizes and digests, and
``removed`` with the parts that it no longer lists. These are deleted after a day, as readers elsewhere may still use
them; objects that it never listed, a day after they were written, as a writer may be about to commit them.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.base.files import replacing
from slurm_affinode.base.object_url import ObjectPrefix
from slurm_affinode.metrics.parquet import manifest, objects
from slurm_affinode.metrics.parquet.directory import (
    LOG,
    READ_LOCK,
    Staging,
    StoreDirectory,
    by_day,
    day_dir,
    log_entries,
    log_lines,
    move_part,
    prepare,
    sweep_orphans,
    sweep_staging,
    trimmed_log,
    writing,
)
from slurm_affinode.metrics.parquet.manifest import PartEntry, RemovedPart, SamplesFile, StoreManifest
from slurm_affinode.metrics.parquet.objects import ConflictError, ObjectClient, UnchangedError, Version
from slurm_affinode.metrics.parquet.parts import PartFiles
from slurm_affinode.metrics.parquet.table import SampleTable

KEPT_S = 86_400.0
"""Objects that the manifest does not list are kept for this time."""
LANDING_S = KEPT_S / 2
"""A commit later than this after the upload is refused: its objects may soon be deleted. The rest of ``KEPT_S`` is for
clocks that differ."""
ATTEMPTS = 30
_LONGEST_WAIT_S = 2.0
_AT_ONCE = 8
"""Transfers."""

Change = Callable[[StoreManifest], StoreManifest | None]
"""Returns the manifest to commit; ``None`` if there is nothing to change, as the same change was committed already."""


class _SupersededError(Exception):
    """Parts that were merged are no longer those of the day."""


class StoreBucket(StoreDirectory):
    """The files of a store below a URL; ``root`` is the directory of the copies."""

    def __init__(
        self, place: ObjectPrefix, *, client: ObjectClient | None = None, now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        super().__init__(place.cache)
        self.url = place.url
        self._limit = place.cache_bytes
        self._client = objects.client(place.url) if client is None else client
        self._now = now
        self._sleep = sleep
        self._last_read: tuple[StoreManifest, Version] | None = None

    # -- reading ------------------------------------------------------------------------------------------------

    def load(self) -> StoreManifest:
        """Return the manifest. Raises ``AffinodeError`` as ``manifest.load`` does."""
        self.hold()
        return self._read()[0]

    def hold(self) -> None:
        """Prepare the directory of the copies, and keep them until ``release`` or the end of the object.

        Copies that are not needed are deleted before, unless another process uses the directory.
        """
        if self._reading is None:
            current, _ = self._read()
            with writing(self.root, _CACHE_HINT):
                prepare(self.root)
                sweep_orphans(self.root, current)
                trim(self.root, self._limit)
            super().hold()

    def fingerprints(self) -> frozenset[str]:
        """Return the fingerprints of all ingested sources."""
        return frozenset(log_entries(self._log()[0]))

    def part_files(self, day: date, entry: PartEntry, table: SampleTable) -> PartFiles:
        """Return the files of a live part, of which copies are made when they are read."""
        return replace(super().part_files(day, entry, table), fetch=self.fetch)

    def fetch(self, paths: Sequence[Path]) -> None:
        """Copy the files of live parts that were not copied yet. Size and digest of a copy are verified."""
        self.hold()
        missing = [path for path in dict.fromkeys(paths) if not _touched(path)]
        if not missing:
            return
        current, _ = self._read()
        with writing(self.root, _CACHE_HINT), ThreadPoolExecutor(min(_AT_ONCE, len(missing))) as pool:
            for _ in pool.map(partial(self._copy, current), missing):
                pass

    def size(self, path: Path) -> int:
        """Return the size of a file of samples in bytes; 0 if it is not in the manifest."""
        current, _ = self._read() if self._last_read is None else self._last_read
        samples_file = current.samples.get(_part_name(path))
        return 0 if samples_file is None else samples_file.size

    def _copy(self, current: StoreManifest, path: Path) -> None:
        name = self._name(path)
        size, digest = _expected(current, path)
        with replacing(path, durable=False) as temporary:
            copied = self._client.download(name, temporary)
            if copied is None:
                raise UnreachableError(
                    f"{self.url}/{name}: does not exist",
                    hint="if this command runs for a day, start it again; otherwise restore the object from a backup",
                )
            if (size not in (None, copied[0])) or (digest not in (None, copied[1])):
                raise UnreachableError(
                    f"{self.url}/{name}: its contents have changed since it was written",
                    hint="restore the object from a backup, or an earlier version of it",
                )

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _read(self) -> tuple[StoreManifest, Version | None]:
        """Return the manifest and its version; no version if there is none."""
        try:
            answer = self._client.get(manifest.FILE, None if self._last_read is None else self._last_read[1])
        except UnchangedError:
            if self._last_read is None:
                raise
            return self._last_read
        where = f"{self.url}/{manifest.FILE}"
        if answer is None:
            part = next((entry.name for entry in self._client.names() if _is_part(entry.name)), None)
            if part is not None:
                raise AffinodeError(
                    f"{where}: is missing, and there are samples ({part.partition('/')[0]})",
                    hint="restore it from a backup, or an earlier version of it",
                )
            return StoreManifest(), None
        content, version = answer
        self._last_read = manifest.parsed(content.decode("utf-8", "replace"), where), version
        return self._last_read

    def _log(self) -> tuple[str, Version | None]:
        answer = self._client.get(LOG)
        return ("", None) if answer is None else (answer[0].decode("utf-8", "replace"), answer[1])

    # -- writing ------------------------------------------------------------------------------------------------

    def begin(self) -> tuple[StoreManifest, Staging]:
        """Begin an ingest: see ``StoreDirectory``. Objects that are not needed are deleted."""
        staging = self.stage()
        try:
            with self.locked():
                sweep_staging(self.root)
            self._sweep()
            return self.load(), staging
        except BaseException:
            staging.close()
            raise

    def stage(self) -> Staging:
        """Return a staging area. A new store is created, as no part may exist without a manifest."""
        self.hold()
        current, version = self._read()
        if version is None:
            with contextlib.suppress(ConflictError):
                self._client.put(manifest.FILE, manifest.text(current).encode(), None)
        return super().stage()

    def land(
        self, directory: Path, staged: Sequence[tuple[date, PartEntry]], sources: Iterable[tuple[str, str | None]]
    ) -> StoreManifest:
        """Add parts to their days: see ``StoreDirectory``."""
        began = self._now()
        samples = self._upload(directory, staged)
        names = {entry.name for _, entry in staged}

        def add(current: StoreManifest) -> StoreManifest | None:
            known_names = {entry.name for entries in current.days.values() for entry in entries}
            new = [(day, entry) for day, entry in staged if entry.name not in known_names]
            changed = replace(current.with_parts(by_day(new)), samples={**current.samples, **samples})
            return changed if new else None

        before = self._commit(add, began) if staged else self._read()[0]
        self._keep(directory, staged)
        self._remember(sources)
        days = {day: tuple(entry for entry in before.days[day] if entry.name not in names) for day in before.days}
        return replace(before, days=days)

    def replace_day(
        self, current: StoreManifest, day: date, merged: Sequence[PartEntry], written: PartFiles, entry: PartEntry
    ) -> bool:
        """Make ``entry`` a part of ``day`` in place of the parts ``merged``; parts that were added later are kept.

        Return whether they still were the parts of the day; if not, nothing is changed.
        """
        began = self._now()
        names = [part.name for part in merged]
        directory = written.samples.parent
        samples = self._upload(directory, [(day, entry)])

        def put_in_place(current: StoreManifest) -> StoreManifest | None:
            entries = current.days.get(day, ())
            part_names = [part.name for part in entries]
            if entry.name in part_names:
                return None
            if part_names[: len(names)] != names:
                raise _SupersededError
            changed = current.with_day(day, (entry, *entries[len(names) :]))
            removed = tuple(RemovedPart(day, name, began) for name in names)
            return replace(changed, samples={**current.samples, **samples}, removed=(*current.removed, *removed))

        try:
            self._commit(put_in_place, began)
        except _SupersededError:
            self._client.delete(_object_names(day, entry.name))
            return False
        self._keep(directory, [(day, entry)])
        return True

    def delete_before(self, day: date) -> list[date]:
        """Delete the days before ``day``; return them. Their objects are deleted by a later ingest."""
        removed_days: list[date] = []
        began = self._now()

        def remove(current: StoreManifest) -> StoreManifest | None:
            removed_days[:] = [part_day for part_day in current.days if part_day < day]
            removed = tuple(
                RemovedPart(part_day, entry.name, began)
                for part_day in removed_days
                for entry in current.days[part_day]
            )
            return (
                replace(current.without(removed_days), removed=(*current.removed, *removed)) if removed_days else None
            )

        self._commit(remove, began)
        return removed_days

    def _upload(self, directory: Path, staged: Sequence[tuple[date, PartEntry]]) -> dict[str, SamplesFile]:
        """Write the objects of parts; return size and digest of each file of samples."""
        if not staged:
            return {}
        todo = [
            (name, path)
            for day, entry in staged
            for name, path in zip(
                _object_names(day, entry.name), PartFiles.of(directory, entry.name).all(), strict=True
            )
        ]
        with ThreadPoolExecutor(min(_AT_ONCE, len(todo))) as pool:
            for _ in pool.map(lambda transfer: self._client.upload(*transfer), todo):
                pass
        return {entry.name: SamplesFile.of(PartFiles.of(directory, entry.name).samples) for _, entry in staged}

    def _keep(self, directory: Path, staged: Sequence[tuple[date, PartEntry]]) -> None:
        """Move files that were uploaded to the copies: a compaction reads them next."""
        for day, entry in staged:
            move_part(self.root, day, PartFiles.of(directory, entry.name), entry)

    def _commit(self, change: Change, began: float) -> StoreManifest:
        """Write the manifest with ``change``, which is called again if another writer was first.

        Return the manifest before. ``began``: when the upload of new objects began.
        """
        for attempt in range(ATTEMPTS):
            current, version = self._read()
            changed = change(current)
            if changed is None:
                return current
            if self._now() - began > LANDING_S:
                raise UnreachableError(
                    f"{self.url}: {LANDING_S / 3600:.0f} h have passed since the samples were written",
                    hint="run the command again",
                )
            try:
                self._client.put(manifest.FILE, manifest.text(_pruned(changed)).encode(), version)
            except ConflictError:
                self._wait(attempt)
            else:
                return current
        raise self._busy()

    def _remember(self, sources: Iterable[tuple[str, str | None]]) -> None:
        lines = log_lines(sources)
        if not lines:
            return
        for attempt in range(ATTEMPTS):
            text, version = self._log()
            try:
                self._client.put(LOG, trimmed_log(text + lines).encode(), version)
            except ConflictError:
                self._wait(attempt)
            else:
                return
        raise self._busy()

    def _wait(self, attempt: int) -> None:
        self._sleep(random.uniform(0, min(_LONGEST_WAIT_S, 0.05 * 2**attempt)))  # noqa: S311 - no secret

    def _busy(self) -> UnreachableError:
        return UnreachableError(
            f"{self.url}: other writers were first {ATTEMPTS} times",
            hint="run the command again; samples that it has stored are not stored twice",
        )

    def _sweep(self) -> None:
        """Delete objects of parts that are not in the manifest, and were not for ``KEPT_S``."""
        current, _ = self._read()
        before = self._now() - KEPT_S
        waiting = {part.name for part in current.removed if part.at >= before}
        due = {part.name for part in current.removed} - waiting
        stale = [
            entry.name
            for entry in self._client.names()
            if _is_part(entry.name) and entry.written < before and _part_name(entry.name) not in waiting
        ]
        live = _live(current)
        stale = [name for name in stale if _part_name(name) not in live]
        if not stale and not due:
            return

        # A writer whose parts are among them reads the manifest again, and notices that it is late.
        def forget(current: StoreManifest) -> StoreManifest:
            remaining = tuple(part for part in current.removed if part.name not in due)
            return replace(current, removed=remaining, generation=current.generation + 1)

        self._commit(forget, self._now())
        live = _live(self._read()[0])
        self._client.delete([name for name in stale if _part_name(name) not in live])


_CACHE_HINT = "store.history_cache is a directory that this user can write"


def _object_names(day: date, name: str) -> tuple[str, ...]:
    return tuple(path.as_posix() for path in PartFiles.of(day_dir(Path(), day), name).all())


def _is_part(name: str) -> bool:
    directory, _, file = name.partition("/")
    return directory.startswith("day=") and "-" in file and file.endswith(".parquet") and "/" not in file


def _part_name(path: Path | str) -> str:
    return Path(path).stem.partition("-")[2]


def _live(current: StoreManifest) -> frozenset[str]:
    return frozenset(entry.name for entries in current.days.values() for entry in entries)


def _pruned(current: StoreManifest) -> StoreManifest:
    live = _live(current)
    return replace(
        current, samples={name: samples_file for name, samples_file in current.samples.items() if name in live}
    )


def _expected(current: StoreManifest, path: Path) -> tuple[int | None, str | None]:
    """Return size and digest that a file of a part must have; ``None``: not recorded."""
    kind, _, name = path.stem.partition("-")
    day = date.fromisoformat(path.parent.name.removeprefix("day="))
    entry = next((entry for entry in current.days.get(day, ()) if entry.name == name), None)
    if kind == "part":
        samples_file = current.samples.get(name)
        return (None, None) if samples_file is None else (samples_file.size, samples_file.digest)
    if entry is None:
        return None, None
    return None, entry.devices_digest if kind == "devices" else entry.jobs_digest


def _touched(path: Path) -> bool:
    """Return whether a copy exists, and record that it is in use."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True
    return True


def trim(root: Path, limit: int) -> None:
    """Delete the copies that were unused for longest, until there are ``limit`` bytes, unless there are readers."""
    with manifest.locked(root / READ_LOCK, wait=False) as alone:
        if not alone:
            return
        for path in root.glob("day=*/.*.tmp"):  # of a copy that was interrupted
            path.unlink(missing_ok=True)
        copies = sorted(
            ((path.stat(), path) for path in root.glob("day=*/*.parquet")), key=lambda copy: copy[0].st_mtime
        )
        total = sum(facts.st_size for facts, _ in copies)
        for facts, path in copies:
            if total <= limit:
                return
            path.unlink(missing_ok=True)
            total -= facts.st_size
