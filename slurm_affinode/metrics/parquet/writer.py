"""Writer of the sample store: stage parts, publish them together, merge devices, compact each day into one part.

Compaction goes device range by device range, in bounded memory.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise
from types import TracebackType
from typing import cast

import numpy as np
import polars as pl

from slurm_affinode.metrics.distinct import distinct
from slurm_affinode.metrics.parquet.directory import Staging, StoreDirectory, writing
from slurm_affinode.metrics.parquet.manifest import PartEntry
from slurm_affinode.metrics.parquet.parts import (
    NAMES,
    PartFiles,
    PartWriter,
    agreed,
    concat,
    fetch,
    merge,
    names_of,
    read_devices,
    read_rows,
    several_names,
    without_names,
)
from slurm_affinode.metrics.parquet.table import GPU, ORIGIN, SampleTable, source_number
from slurm_affinode.metrics.schema import IDENTITY

Row = dict[str, object]


def adoptions(identities: pl.DataFrame, several: pl.DataFrame) -> dict[int, int]:
    """Return the mapping from devices without a UUID to the devices that they are identified with.

    ``identities`` has ``device`` and the columns of ``IDENTITY``; ``several``: ``NAMES`` that it lacks. A device known
    by PCI address is identified with the UUID that has this address on the node; one known by index only, with the
    UUID, else the PCI address, that has this index. In both cases exactly one candidate must occur in
    ``identities``.
    """
    if not identities["uuid"].has_nulls():
        return {}
    # A device has a row for each description: one source gave its index, another only its address.
    rows = list(_described(identities, several).unique(maintain_order=True).iter_rows(named=True))
    nameless = [row for row in rows if row["uuid"] is None and (row["pci"] is not None or row["index"] is not None)]
    if not nameless:
        return {}
    with_uuid = [row for row in rows if row["uuid"] is not None]
    by_pci = _unique(with_uuid, _pci)
    by_index = _unique(with_uuid, _index)
    pci_by_index = _unique((row for row in nameless if row["pci"] is not None), _index)
    claimed = {_index(row) for row in with_uuid}
    targets: dict[int, int] = {}
    for row in nameless:
        target = by_pci.get(_pci(row)) if row["pci"] is not None else by_index.get(_index(row))
        if target is not None:
            targets[row["device"]] = target
    for row in nameless:
        if row["pci"] is None and row["device"] not in targets and _index(row) not in claimed:
            target = pci_by_index.get(_index(row))
            if target is not None:
                targets[row["device"]] = targets.get(target, target)
    return targets


def _described(identities: pl.DataFrame, several: pl.DataFrame) -> pl.DataFrame:
    """Return the identities with a further row for each of several names of a device."""
    identities_known = identities.select("device", *IDENTITY)
    names = several.join(identities_known, on="device")
    more = [
        group.with_columns(pl.col("value").cast(IDENTITY[str(column)]).alias(str(column))).select(
            identities_known.columns
        )
        for (column,), group in names.group_by("column", maintain_order=True)
    ]
    return pl.concat([identities_known, *more])


def _pci(row: Row) -> Hashable:
    return (row["cluster"], row["node"], row["mig"], row["pci"])


def _index(row: Row) -> Hashable:
    return (row["cluster"], row["node"], row["mig"], row["index"])


def _unique(rows: Iterable[Row], key: Callable[[Row], Hashable]) -> dict[Hashable, int]:
    """Return key -> its only device. Keys with a missing last element or several devices are omitted."""
    devices: dict[Hashable, set[int]] = {}
    for row in rows:
        row_key = key(row)
        if isinstance(row_key, tuple) and row_key[-1] is not None:
            devices.setdefault(row_key, set()).add(row["device"])  # type: ignore[arg-type]
    return {known_key: next(iter(ids)) for known_key, ids in devices.items() if len(ids) == 1}


def merged_identities(
    identities: pl.DataFrame, known_devices: pl.DataFrame | None = None, table: SampleTable = GPU
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Reduce to one row per ``device``, sorted, and the names of devices with several.

    ``known_devices``: ``NAMES`` of devices that had several before. An identity column with several values for a device
    is null: which of them applies to a sample is not known. The second frame (``NAMES``) has these values.
    """
    if (known_devices is None or known_devices.is_empty()) and identities["device"].is_unique().all():
        return identities.select("device", *table.identity).sort("device"), pl.DataFrame(schema=NAMES)
    names = [names_of(identities, table), *([] if known_devices is None else [known_devices])]
    several = several_names(pl.concat(names).select(*NAMES).unique(maintain_order=True))
    merged = identities.group_by("device", maintain_order=True).agg(agreed(name) for name in table.identity)
    return without_names(merged.sort("device"), several), several


COMPACTION_ROWS = 2_000_000


def needed(parts: Sequence[PartFiles]) -> bool:
    """Return whether a day has several parts, or one part with devices to be merged."""
    if len(parts) != 1:
        return bool(parts)
    (part,) = parts
    return part.table.adopted and bool(adoptions(read_devices(part), part.several()))


def compact(
    parts: Sequence[PartFiles], target: PartFiles, name: str, *, rows_at_once: int = COMPACTION_ROWS
) -> PartEntry:
    """Merge ``parts`` (in the order of ingest) into ``target`` and return its entry."""
    table = target.table
    fetch(parts, (files.samples for files in parts))
    devices = pl.concat([files.several() for files in parts])
    slices = _slices(parts, devices, table)
    to = slices.select("device", "to").unique()
    devices = devices.join(to, on="device").with_columns(pl.col("to").alias("device")).select(*NAMES)
    described = slices.select(pl.col("to").alias("device"), *table.identity)
    with PartWriter(target, name, *merged_identities(described, devices, table)) as writer:
        for group in _ranges(slices, rows_at_once // table.breadth):
            writer.write(merge(concat(_read(parts, group), table), table))
    return writer.entry


def _slices(parts: Sequence[PartFiles], several: pl.DataFrame, kind: SampleTable) -> pl.DataFrame:
    """Locate the rows of each device: ``part``, ``device``, ``start``, ``rows``, and the device ``to`` merge into."""
    tables = [
        read_devices(files).with_columns(
            pl.lit(number, dtype=pl.Int64).alias("part"), (pl.col("rows").cum_sum() - pl.col("rows")).alias("start")
        )
        for number, files in enumerate(parts)
    ]
    table = pl.concat(tables)
    adopted = adoptions(table, several) if kind.adopted else {}
    renamed = pl.col("device").replace_strict(
        list(adopted), list(adopted.values()), default=pl.col("device"), return_dtype=pl.UInt64
    )
    return table.with_columns((renamed if adopted else pl.col("device")).alias("to"))


def _ranges(slices: pl.DataFrame, rows_at_once: int) -> Iterator[pl.DataFrame]:
    """Yield groups of whole devices, ascending, of about ``rows_at_once`` rows or one device."""
    totals = slices.group_by("to").agg(pl.col("rows").sum()).sort("to")
    number = ((totals["rows"].cum_sum() - 1) // rows_at_once).alias("range")
    tagged = slices.join(totals.select("to", number), on="to")
    for _, group in tagged.sort("range", "part", "start").group_by("range", maintain_order=True):
        yield group


def _read(parts: Sequence[PartFiles], group: pl.DataFrame) -> Iterator[pl.DataFrame]:
    for (number,), rows in group.group_by("part", maintain_order=True):
        end = rows["start"] + rows["rows"]
        run = (rows["start"] != end.shift()).fill_null(value=True).cum_sum()
        runs = rows.group_by(run.alias("run"), maintain_order=True).agg(pl.col("start").first(), pl.col("rows").sum())
        renamed = rows.filter(pl.col("device") != pl.col("to"))
        for start, length in runs.select("start", "rows").iter_rows():
            frame = read_rows(parts[int(number)], start, length)
            if len(renamed):
                frame = frame.with_columns(
                    pl.col("device").replace_strict(
                        renamed["device"], renamed["to"], default=pl.col("device"), return_dtype=pl.UInt64
                    )
                )
            yield frame


ROWS_AT_ONCE = 1_000_000
SOURCES_AT_ONCE = 4_000
"""Sources that are published together: an ingest of many small files that is killed loses at most the work on these."""


@dataclass(frozen=True, slots=True)
class SampleSource:
    """A source of samples."""

    name: str
    """Path or address, for display."""
    fingerprint: str | None = None
    """Digest of the content and of the options for reading it; None: never skipped as already read."""
    origin: str | None = None
    """Identity of the source, e.g. its absolute path: values that it has now replace those that it had. None: unknown,
    this ingest is a source of its own."""


@dataclass(frozen=True, slots=True)
class AddedSource:
    """A source that was read completely. Its samples are live when it is passed to ``on_landed``."""

    source: SampleSource
    samples: int
    """Rows read, including duplicates within the source."""
    first_ms: int | None
    last_ms: int | None


@dataclass(frozen=True, slots=True)
class WrittenTotals:
    """Changes made by a writer, available when it is closed."""

    samples: int
    """Rows passed to the writer."""
    new: int
    """Samples (device and time) that were not in the store before."""
    days: tuple[date, ...]

    @property
    def duplicates(self) -> int:
        """Rows that were already in the store or repeated another row."""
        return self.samples - self.new


class StoreWriter:
    """One ingest: ``add`` sources; when the context ends, the store has them.

    Each source is published as a whole or not at all; small ones are published together. On an exception, no further
    sources are published. Raises ``UnreachableError`` if the directory cannot be written.
    """

    def __init__(
        self, files: StoreDirectory, *, on_landed: Callable[[Sequence[AddedSource]], None] | None = None,
        rows_at_once: int = ROWS_AT_ONCE, table: SampleTable = GPU,
    ) -> None:  # fmt: skip
        self._files = files
        self._root = files.root
        self._table = table
        self._on_landed = on_landed
        self._rows_at_once = max(1, rows_at_once // table.breadth)
        self._buffer: list[Prepared] = []
        self._buffered = 0
        self._waiting: list[AddedSource] = []
        self._samples = 0
        self._number = 0
        self._before: dict[date, int] = {}
        self._totals: WrittenTotals | None = None

    @property
    def totals(self) -> WrittenTotals:
        """The outcome. Available after the context has ended without an error."""
        if self._totals is None:
            raise RuntimeError("the ingest is still in progress, or was aborted")
        return self._totals

    def __enter__(self) -> StoreWriter:
        with writing(self._root):
            current, self._staging = self._files.begin()
            self._number = (current.generation + 1) % 2**32
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with writing(self._root):
                    self.flush()
                    after = [compact_day(self._files, day, self._staging, self._table) for day in sorted(self._before)]
                new = max(0, sum(after) - sum(self._before.values()))
                self._totals = WrittenTotals(self._samples, new, tuple(sorted(self._before)))
        finally:
            self._staging.close()

    def add(self, frames: Iterable[pl.DataFrame | Prepared], source: SampleSource) -> AddedSource:
        """Add all ``frames`` (samples of the table) of ``source``; if ``frames`` raises, none of them is stored."""
        pending: list[Prepared] = []
        number = source_number(secrets.token_hex(8) if source.origin is None else source.origin)
        origin = pl.lit(number * 2**32 + self._number, pl.UInt64).alias(ORIGIN)
        staged: list[tuple[date, PartEntry]] = []
        rows, held_rows, first, last = 0, 0, None, None
        try:
            for frame in frames:
                ready = frame if isinstance(frame, Prepared) else prepared(frame, self._table)
                if ORIGIN in self._table.columns:
                    ready = replace(ready, rows=ready.rows.with_columns(origin))
                pending.append(ready)
                rows += len(ready.rows)
                held_rows += len(ready.rows)
                if len(ready.rows):
                    times = ready.rows["time"].dt.epoch("ms")
                    low, high = times.min(), times.max()
                    first = min(low, first) if first is not None else low  # type: ignore[type-var]
                    last = max(high, last) if last is not None else high  # type: ignore[type-var]
                if held_rows >= self._rows_at_once:
                    with writing(self._root):
                        staged += self._stage(pending)
                    pending, held_rows = [], 0
            addition = AddedSource(source, rows, first, last)  # type: ignore[arg-type]
            if staged:
                with writing(self._root):
                    staged += self._stage(pending)
                    self.flush()
                    self._land(staged, [addition])
                return addition
        except BaseException:
            for _, entry in staged:
                for path in PartFiles.of(self._staging.path, entry.name).all():
                    path.unlink(missing_ok=True)
            raise
        self._buffer += pending
        self._buffered += rows
        self._waiting.append(addition)
        if self._buffered >= self._rows_at_once or len(self._waiting) >= SOURCES_AT_ONCE:
            with writing(self._root):
                self.flush()
        return addition

    def flush(self) -> None:
        """Publish the buffered sources."""
        if not self._waiting:
            return
        buffer, waiting = self._buffer, self._waiting
        self._buffer, self._waiting, self._buffered = [], [], 0
        self._land(self._stage(buffer), waiting)

    def _stage(self, prepared: Sequence[Prepared]) -> list[tuple[date, PartEntry]]:
        whole = [ready for ready in prepared if len(ready.rows)]
        if not whole:
            return []
        described = pl.concat([ready.identities for ready in whole])
        merged = merge(pl.concat([ready.rows for ready in whole]), self._table)
        staged = []
        for day, part in _by_day(merged):
            name = secrets.token_hex(8)
            of_day = described.filter(pl.col("day") == day)
            files = PartFiles.of(self._staging.path, name, self._table)
            with PartWriter(files, name, *merged_identities(of_day, table=self._table)) as writer:
                writer.write(part)
            staged.append((day, writer.entry))
        return staged

    def _land(self, staged: Sequence[tuple[date, PartEntry]], additions: Sequence[AddedSource]) -> None:
        sources = [(entry.source.name, entry.source.fingerprint) for entry in additions]
        before = self._files.land(self._staging.path, staged, sources)
        for day, _ in staged:
            self._before.setdefault(day, sum(part.rows for part in before.days.get(day, ())))
        self._samples += sum(entry.samples for entry in additions)
        if self._on_landed is not None:
            self._on_landed(additions)


def _by_day(rows: pl.DataFrame) -> Iterator[tuple[date, pl.DataFrame]]:
    """Yield the rows of each UTC day."""
    days = rows["time"].dt.date()
    first = days[0]
    if (days == first).all():
        yield first, rows
        return
    for (day,), part in rows.group_by(days.alias("day"), maintain_order=True):
        yield cast("date", day), part


@dataclass(frozen=True, slots=True)
class Prepared:
    """Samples, separated from their identity columns."""

    rows: pl.DataFrame
    """The columns of the table in memory (``SampleTable.columns``); the writer sets ``ORIGIN``."""
    identities: pl.DataFrame
    """``device``, the identity columns and ``day`` (UTC); a device has a row for each of its descriptions on a day."""


def prepared(frame: pl.DataFrame, table: SampleTable = GPU) -> Prepared:
    """Separate the identity columns from a frame of samples.

    A row without any value is kept: nothing was measured, and the previous sample does not extend beyond its time.

    Raises ``ValueError`` for samples without a cluster or another required column, which readers must set.
    """
    return Prepared(*_separated(frame, table))


def prepared_parts(frames: Sequence[pl.DataFrame], table: SampleTable = GPU) -> list[Prepared]:
    """Return what ``prepared`` returns for each of ``frames``, which have the same columns, in one pass."""
    parts = np.repeat(np.arange(len(frames)), [len(frame) for frame in frames])
    rows, identities = _separated(pl.concat(frames).with_columns(pl.Series(_PART, parts, pl.Int64)), table, (_PART,))
    every = (_split(whole, len(frames)) for whole in (rows, identities))
    return [Prepared(*pair) for pair in zip(*every, strict=True)]


_PART = "#part"


def _split(whole: pl.DataFrame, count: int) -> Iterator[pl.DataFrame]:
    """Yield the rows of each part, in order."""
    ends = np.searchsorted(whole[_PART].to_numpy(), np.arange(count), side="right").tolist()
    rest = whole.drop(_PART)
    yield from (rest[start:end] for start, end in pairwise([0, *ends]))


def _separated(
    frame: pl.DataFrame, table: SampleTable, more: tuple[str, ...] = ()
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the fields of ``Prepared``, both with the columns ``more``: each of their values is a frame of its own."""
    full = frame.select(
        *((pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
          for name, dtype in table.samples.items()),
        *more,
    )  # fmt: skip
    if full["time"].has_nulls():
        full = full.filter(pl.col("time").is_not_null())
    if any(full[name].has_nulls() for name in table.required):
        raise ValueError(f"samples need {' and '.join(f'a {name}' for name in table.required)}")
    # There are few identities and many rows.
    described, row_numbers = distinct(full.select(*table.identity))
    numbered = table.numbered(described)
    rows = full.select(
        numbered["device"].gather(row_numbers), *(name for name in table.columns if name in table.samples), *more
    )  # fmt: skip
    if ORIGIN in table.columns:
        rows = rows.with_columns(pl.lit(None, pl.UInt64).alias(ORIGIN))
    days = _days(full.select(row_numbers.alias("at"), "time", *more), len(numbered))
    identities = numbered[days["at"]].with_columns(days["day"], *(days[name] for name in more))
    return rows, identities.select(*numbered.columns, "day", *more)


def _days(rows: pl.DataFrame, count: int) -> pl.DataFrame:
    """Replace ``time`` with ``day``, and keep the first of equal rows. ``at`` is below ``count``."""
    day = rows["time"].to_physical().to_numpy() // _DAY_MS
    span = (int(day.max() - day.min()) + 1) * count if len(day) else 0
    if rows.columns == ["at", "time"] and span <= 2 * len(rows):
        place = (day - day.min()) * count + rows["at"].to_numpy() if len(day) else day
        first = np.full(span, -1)
        first[place[::-1]] = np.arange(len(rows) - 1, -1, -1)  # of equal places, the last assignment counts
        rows = rows[np.sort(first[first >= 0])]
    days = rows.with_columns(pl.col("time").dt.date()).rename({"time": "day"})
    return days.unique(maintain_order=True)


_DAY_MS = 86_400_000


def compact_day(files: StoreDirectory, day: date, stage: Staging, table: SampleTable) -> int:
    """Compact ``day`` into one part; return its number of samples."""
    while True:
        with files.locked():
            current = files.load()
            entries = current.days.get(day, ())
            parts = [files.part_files(day, entry, table) for entry in entries]
            if not needed(parts):
                return sum(entry.rows for entry in entries)
            name = secrets.token_hex(8)
            written = PartFiles.of(stage.path, name, table)
            entry = compact(parts, written, name)
            if files.replace_day(current, day, entries, written, entry):
                return entry.rows
