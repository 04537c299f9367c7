"""The manifest of the sample store, which lists the live parts. Parts that are not listed are ignored.

One writer at a time holds ``write.lock``; readers hold ``read.lock`` shared, so that parts replaced by a compaction
stay on disk as long as a reader may use them. The kernel releases both when a process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date
from hashlib import blake2b
from pathlib import Path
from typing import Any

from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.base.files import write_text

FILE = "manifest.json"
VERSION = 3
_KNOWN = (1, 2, VERSION)
"""Version 1 had no digests, version 2 no names of devices with several."""
_DIGEST_BYTES = 16
_NAME = re.compile(r"[0-9a-f]+(?:-[0-9a-f]+)*")


@dataclass(frozen=True, slots=True)
class PartEntry:
    """One live part of a day."""

    name: str
    """The files are ``part-NAME.parquet``, ``devices-NAME.parquet`` and ``jobs-NAME.parquet``."""
    rows: int
    devices: int
    first_ms: int
    """Time of the earliest sample, UTC epoch milliseconds."""
    last_ms: int
    devices_digest: str | None = None
    """``digest`` of the table of devices; None: not recorded when it was written."""
    jobs_digest: str | None = None
    names: tuple[tuple[int, str, str], ...] = ()
    """Device, identity column and value, for the columns of a device that have several values on the day. The table of
    devices and the samples have none of them."""


@dataclass(frozen=True, slots=True)
class SamplesFile:
    """Size and digest of the samples of a part. Recorded in object stores only."""

    size: int
    """Bytes."""
    digest: str

    @classmethod
    def of(cls, path: Path) -> SamplesFile:
        """Return those of a file."""
        hasher = blake2b(digest_size=_DIGEST_BYTES)
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                hasher.update(block)
            return cls(file.tell(), hasher.hexdigest())


@dataclass(frozen=True, slots=True)
class RemovedPart:
    """A part that is no longer listed. Recorded in object stores only."""

    day: date
    name: str
    at: float
    """When it was removed: seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class StoreManifest:
    """The live parts of each day, in the order of ingest."""

    days: Mapping[date, tuple[PartEntry, ...]] = field(default_factory=dict)
    generation: int = 0
    """Number of changes so far."""
    samples: Mapping[str, SamplesFile] = field(default_factory=dict)
    """By name of the part."""
    removed: tuple[RemovedPart, ...] = ()

    def with_parts(self, added: Mapping[date, tuple[PartEntry, ...]]) -> StoreManifest:
        """Return this manifest with ``added`` appended to the parts of each day."""
        days = dict(self.days)
        for day, entries in added.items():
            days[day] = (*days.get(day, ()), *entries)
        return replace(self, days=days, generation=self.generation + 1)

    def with_day(self, day: date, entries: tuple[PartEntry, ...]) -> StoreManifest:
        """Return this manifest with the parts of ``day`` replaced."""
        days = {part_day: parts for part_day, parts in self.days.items() if part_day != day}
        return replace(self, days={**days, day: entries}, generation=self.generation + 1)

    def without(self, days: Iterable[date]) -> StoreManifest:
        """Return this manifest without ``days``."""
        removed = frozenset(days)
        kept_days = {day: parts for day, parts in self.days.items() if day not in removed}
        return replace(self, days=kept_days, generation=self.generation + len(removed))


def digest(content: bytes) -> str:
    """Return the digest that detects changes of a small file."""
    return blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


def load(root: Path) -> StoreManifest:
    """Read the manifest of ``root``; a store that does not exist yet is empty.

    Raises ``AffinodeError``, also if there are samples but no manifest, as the next sweep would delete them all.
    """
    path = root / FILE
    try:
        content = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        part = next(root.glob("day=*/*-*.parquet"), None)
        if part is not None:
            raise AffinodeError(
                f"{path}: is missing, and there are samples ({part.parent.name})",
                hint=f"restore it from a backup of the directory; without one, move {root} away and ingest "
                "the metrics again",
            ) from None
        return StoreManifest()
    except OSError as error:
        raise UnreachableError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise AffinodeError(f"{path}: is damaged: {error}", hint=_HINT) from error
    return parsed(content, str(path))


_HINT = "restore it from a backup"


def parsed(content: str, where: str) -> StoreManifest:
    """Return the manifest with this text; ``where`` is its path or URL. Raises ``AffinodeError``."""
    try:
        data = json.loads(content)
    except ValueError as error:
        raise AffinodeError(f"{where}: is damaged: {error}", hint=_HINT) from error
    try:
        if data["version"] not in _KNOWN:
            raise AffinodeError(
                f"{where}: has version {data['version']}, this program knows {VERSION}",
                hint="use the release of slurm-affinode that wrote it",
            )
        days = {
            date.fromisoformat(day): tuple(_entry(entry) for entry in entries) for day, entries in data["days"].items()
        }
        samples = {
            name: SamplesFile(**_fields_of(SamplesFile, entry)) for name, entry in data.get("samples", {}).items()
        }
        removed = [
            RemovedPart(date.fromisoformat(day), name, float(removed_at))
            for day, name, removed_at in data.get("removed", [])
        ]
        return StoreManifest(dict(sorted(days.items())), int(data["generation"]), samples, tuple(removed))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise AffinodeError(f"{where}: is damaged: {error!r}", hint=_HINT) from error


def _fields_of(kind: type[PartEntry | SamplesFile], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that are fields of ``kind``: a later release may add others to this version."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in data.items() if name in names}


def _entry(data: Mapping[str, Any]) -> PartEntry:
    names = tuple(_name_of(name) for name in data.get("names", []))
    entry = PartEntry(**{**_fields_of(PartEntry, data), "names": names})
    if not _NAME.fullmatch(entry.name):
        raise ValueError(entry.name)
    return entry


def _name_of(data: Sequence[object]) -> tuple[int, str, str]:
    device, column, value = data
    if not isinstance(device, int) or not isinstance(column, str) or not isinstance(value, str):
        raise ValueError(data)  # noqa: TRY004 - damage, as any other
    return device, column, value


def text(manifest: StoreManifest) -> str:
    """Return the text of a manifest."""
    days = {day.isoformat(): [asdict(entry) for entry in parts] for day, parts in sorted(manifest.days.items())}
    data: dict[str, object] = {"version": VERSION, "generation": manifest.generation, "days": days}
    if manifest.samples:
        data["samples"] = {name: asdict(samples_file) for name, samples_file in manifest.samples.items()}
    if manifest.removed:
        data["removed"] = [(part.day.isoformat(), part.name, part.at) for part in manifest.removed]
    return json.dumps(data, indent=1) + "\n"


def save(root: Path, manifest: StoreManifest) -> None:
    """Replace the manifest of ``root``, durably; the caller holds the write lock."""
    write_text(root / FILE, text(manifest))


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold an exclusive lock on ``path``; yield whether it was acquired (always, with ``wait``)."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def lock_shared(path: Path) -> int | None:
    """Return a descriptor that holds a shared lock on ``path`` until it is closed; None if it cannot be locked.

    A file system without locks can still be read: a read that is overtaken by a compaction then fails and is retried.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
    except OSError:
        os.close(fd)
        return None
    return fd
