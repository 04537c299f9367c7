"""Taking samples in: files become staged parts, staged parts become live together, touched days become one part."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import TracebackType

import polars as pl

from slurm_affinode.errors import unwritable
from slurm_affinode.files import fsync_dir
from slurm_affinode.history import compact, manifest, sources, staging
from slurm_affinode.history.devices import merged_identities
from slurm_affinode.history.identity import with_device
from slurm_affinode.history.manifest import Manifest, PartEntry
from slurm_affinode.history.merge import SAMPLE_COLUMNS, merge
from slurm_affinode.history.partfiles import PartFiles
from slurm_affinode.history.parts import PartWriter
from slurm_affinode.history.schema import IDENTITY, SAMPLES

ROWS_AT_ONCE = 1_000_000
WRITE_LOCK = "write.lock"
READ_LOCK = "read.lock"
_REFUSED = re.compile(r"([A-Z][^:]*?) \(os error (\d+)\)")


@dataclass(frozen=True, slots=True)
class Source:
    """Where samples come from."""

    name: str
    """Path or address, for people."""
    fingerprint: str | None = None
    """Digest of its content and of the options it was read with; None: never skipped as already read."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a source held, once it is complete; it is live when ``on_landed`` hears of it."""

    source: Source
    samples: int
    """Rows, duplicates within the source counted once per reading."""
    first_ms: int | None
    last_ms: int | None


@dataclass(frozen=True, slots=True)
class Totals:
    """What a writer changed, once it is closed."""

    samples: int
    """Rows that were handed in."""
    new: int
    """Samples (device and time) that the history did not have before."""
    days: tuple[date, ...]

    @property
    def duplicates(self) -> int:
        """Rows handed in that were already there, from before or from another row."""
        return self.samples - self.new


def day_dir(root: Path, day: date) -> Path:
    """The directory of a day."""
    return root / f"day={day.isoformat()}"


def part_files(root: Path, day: date, entry: PartEntry) -> PartFiles:
    """Where the files of a live part are."""
    return PartFiles.live(day_dir(root, day), entry)


@contextlib.contextmanager
def write_locked(root: Path) -> Iterator[None]:
    """Hold the lock of the one writer that may change what is live."""
    with manifest.locked(root / WRITE_LOCK):
        yield


class Writer:
    """One ingest: ``add`` sources, leave the context, and the history has them.

    Each source lands as a whole or not at all; small ones land together. Left by an exception, nothing lands that had
    not landed before. Raises ``UnreachableError`` where the directory cannot be written.
    """

    def __init__(
        self, root: Path, *, on_landed: Callable[[Sequence[Taken]], None] | None = None,
        rows_at_once: int = ROWS_AT_ONCE,
    ) -> None:  # fmt: skip
        self._root = root
        self._on_landed = on_landed
        self._rows_at_once = rows_at_once
        self._buffer: list[Prepared] = []
        self._buffered = 0
        self._waiting: list[Taken] = []
        self._samples = 0
        self._before: dict[date, int] = {}
        self._totals: Totals | None = None

    @property
    def totals(self) -> Totals:
        """The outcome. Only once the context was left without an error."""
        if self._totals is None:
            raise RuntimeError("the ingest is still under way, or was given up")
        return self._totals

    def __enter__(self) -> Writer:
        with writing(self._root):
            prepare_root(self._root)
            with write_locked(self._root):
                staging.sweep(self._root)
                sweep_orphans(self._root, manifest.begin(self._root))
                self._staging = staging.Staging(self._root)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with writing(self._root):
                    self.flush()
                    after = [compact_day(self._root, day, self._staging) for day in sorted(self._before)]
                new = max(0, sum(after) - sum(self._before.values()))
                self._totals = Totals(self._samples, new, tuple(sorted(self._before)))
        finally:
            self._staging.close()

    def add(self, frames: Iterable[pl.DataFrame | Prepared], source: Source) -> Taken:
        """Take in all ``frames`` (``SAMPLES``) of ``source``; what ``frames`` raises leaves nothing of it behind."""
        own: list[Prepared] = []
        staged: list[tuple[date, PartEntry]] = []
        rows, held, first, last = 0, 0, None, None
        try:
            for frame in frames:
                ready = frame if isinstance(frame, Prepared) else prepared(frame)
                own.append(ready)
                rows += len(ready.rows)
                held += len(ready.rows)
                if len(ready.rows):
                    times = ready.rows["time"].dt.epoch("ms")
                    low, high = times.min(), times.max()
                    first = min(low, first) if first is not None else low  # type: ignore[type-var]
                    last = max(high, last) if last is not None else high  # type: ignore[type-var]
                if held >= self._rows_at_once:
                    with writing(self._root):
                        staged += self._stage(own)
                    own, held = [], 0
            taken = Taken(source, rows, first, last)  # type: ignore[arg-type]
            if staged:
                with writing(self._root):
                    staged += self._stage(own)
                    self.flush()
                    self._land(staged, [taken])
                return taken
        except BaseException:
            for _, entry in staged:
                for path in PartFiles.of(self._staging.path, entry.name).all():
                    path.unlink(missing_ok=True)
            raise
        self._buffer += own
        self._buffered += rows
        self._waiting.append(taken)
        if self._buffered >= self._rows_at_once:
            with writing(self._root):
                self.flush()
        return taken

    def flush(self) -> None:
        """Make live what waits."""
        if not self._waiting:
            return
        buffer, waiting = self._buffer, self._waiting
        self._buffer, self._waiting, self._buffered = [], [], 0
        self._land(self._stage(buffer), waiting)

    def _stage(self, held: Sequence[Prepared]) -> list[tuple[date, PartEntry]]:
        whole = [one for one in held if len(one.rows)]
        if not whole:
            return []
        identities = merged_identities(pl.concat([one.identities for one in whole]))
        merged = merge(pl.concat([one.rows for one in whole]))
        staged = []
        for (day,), part in merged.group_by(merged["time"].dt.date().alias("day"), maintain_order=True):
            name = secrets.token_hex(8)
            with PartWriter(PartFiles.of(self._staging.path, name), name, identities) as writer:
                writer.write(part)
            staged.append((day, writer.entry))
        return staged

    def _land(self, staged: Sequence[tuple[date, PartEntry]], taken: Sequence[Taken]) -> None:
        with write_locked(self._root):
            current = manifest.load(self._root)
            added: dict[date, tuple[PartEntry, ...]] = {}
            for day, entry in staged:
                self._before.setdefault(day, sum(part.rows for part in current.days.get(day, ())))
                move_part(self._root, day, PartFiles.of(self._staging.path, entry.name), entry)
                added[day] = (*added.get(day, ()), entry)
            if added:
                manifest.save(self._root, current.with_parts(added))
            sources.remember(self._root, [(one.source.name, one.source.fingerprint) for one in taken])
        self._samples += sum(one.samples for one in taken)
        if self._on_landed is not None:
            self._on_landed(taken)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Samples with their identity held aside."""

    rows: pl.DataFrame
    """``SAMPLE_COLUMNS``."""
    identities: pl.DataFrame
    """``device`` and the columns of ``IDENTITY``; a device has a row for each way in which it was described."""


def prepared(frame: pl.DataFrame) -> Prepared:
    """Take the identity out of a frame of ``SAMPLES``.

    A row without any value stays: nothing was measured then, and the sample before it does not count for its time.

    Raises ``ValueError`` for samples without a cluster or node: a reader has to see to that.
    """
    full = frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in SAMPLES.items()
    )
    full = full.filter(pl.col("time").is_not_null())
    if full["node"].has_nulls() or full["cluster"].has_nulls():
        raise ValueError("samples need a cluster and a node")
    described = full.select(*IDENTITY)
    # Identities are few and rows are many: rows are told apart by a hash, and joined to the device by it.
    hashed = pl.DataFrame({"hash": described.hash_rows()})
    first = hashed.with_row_index("at").unique("hash", keep="first", maintain_order=True)
    known = with_device(described[first["at"]])
    device = hashed.join(
        first.select("hash", known["device"]), on="hash", how="left", maintain_order="left"
    )["device"]  # fmt: skip
    rows = full.select(device, *(name for name in SAMPLE_COLUMNS if name != "device"))
    return Prepared(rows, known)


@contextlib.contextmanager
def writing(root: Path) -> Iterator[None]:
    """Turn the operating system's refusals into one line: see ``errors.unwritable``."""
    try:
        yield
    except (OSError, pl.exceptions.ComputeError) as error:
        # What Polars writes fails with a ComputeError, of which the text alone says that it was the disk.
        hint = f"check the permissions of {root}"
        if isinstance(error, OSError):
            raise unwritable(error.filename or root, error, hint=hint) from error
        if (why := _REFUSED.search(str(error))) is None:
            raise
        raise unwritable(root, OSError(int(why[2]), why[1]), hint=hint) from error


def prepare_root(root: Path) -> None:
    """Make the directory and its lock files."""
    root.mkdir(parents=True, exist_ok=True)
    for name in (WRITE_LOCK, READ_LOCK):
        (root / name).touch(exist_ok=True)


def move_part(root: Path, day: date, written: PartFiles, entry: PartEntry) -> None:
    """Give a staged part its place; the caller holds the write lock and names it in the manifest afterwards."""
    directory = day_dir(root, day)
    directory.mkdir(exist_ok=True)
    for source, target in zip(written.all(), PartFiles.of(directory, entry.name).all(), strict=True):
        with source.open("rb") as file:
            os.fsync(file.fileno())
        source.replace(target)
    fsync_dir(directory)
    fsync_dir(root)


def compact_day(root: Path, day: date, stage: staging.Staging) -> int:
    """Make ``day`` one part; return its number of samples."""
    with write_locked(root):
        current = manifest.load(root)
        entries = current.days.get(day, ())
        files = [part_files(root, day, entry) for entry in entries]
        if not compact.needed(files):
            return sum(entry.rows for entry in entries)
        name = secrets.token_hex(8)
        written = PartFiles.of(stage.path, name)
        entry = compact.compact(files, written, name)
        replace_day(root, current, day, written, entry)
        return entry.rows


def replace_day(root: Path, current: Manifest, day: date, written: PartFiles, entry: PartEntry) -> None:
    """Make ``entry`` the only part of ``day``; the caller holds the write lock."""
    move_part(root, day, written, entry)
    changed = current.with_day(day, (entry,))
    manifest.save(root, changed)
    sweep_orphans(root, changed, only=(day,))


def sweep_orphans(root: Path, current: Manifest, only: Sequence[date] | None = None) -> None:
    """Remove files that the manifest does not name, unless somebody may be reading them; write lock held."""
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
