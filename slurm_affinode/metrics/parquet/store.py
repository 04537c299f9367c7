"""The sample store: samples of all devices (GPUs, or engines) in Parquet files, partitioned by UTC day.

Layout of ``ROOT``: ``manifest.json`` lists the live parts of each day; ``day=YYYY-MM-DD/part-NAME.parquet`` has the
samples, ``devices-NAME.parquet`` and ``jobs-NAME.parquet`` index them (see ``parts``); ``staging/`` is the work area of
writers; ``sources.jsonl`` lists the files that were read; ``write.lock`` and ``read.lock`` synchronize processes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime
from pathlib import Path

import polars as pl

from slurm_affinode.base.object_url import StorePlace
from slurm_affinode.base.times import epoch_ms
from slurm_affinode.metrics.parquet import manifest, writer
from slurm_affinode.metrics.parquet.directory import StoreDirectory, writing
from slurm_affinode.metrics.parquet.parts import (
    NAMES_SEEN,
    Part,
    PartFiles,
    PartWriter,
    agreed,
    merge_lazy,
    scan_rows,
    seen_names,
    several_names,
    without_names,
)
from slurm_affinode.metrics.parquet.table import GPU, SampleTable
from slurm_affinode.metrics.parquet.writer import AddedSource, SampleSource, StoreWriter, WrittenTotals


def _files(place: StorePlace) -> StoreDirectory:
    if isinstance(place, Path):
        return StoreDirectory(place)
    from slurm_affinode.metrics.parquet.bucket import StoreBucket  # noqa: PLC0415 - needs the extra `objects`

    return StoreBucket(place)


class SampleStore:
    """The sample store at ``place``, a directory or the URL of an object store; ``root`` has the files that are read.

    Reading a directory needs read permission only; nothing is created before the first write.

    From the first read on, parts that this object may have returned stay on disk until ``close`` or the end of the
    object, even if another process replaces them meanwhile.
    """

    def __init__(self, place: StorePlace, table: SampleTable = GPU) -> None:
        self.place = place
        self.files = _files(place)
        self.root = self.files.root
        self.table = table

    # -- reading ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the lock that keeps replaced parts on disk; the object can be used again."""
        self.files.release()

    def _manifest(self) -> manifest.StoreManifest:
        self.files.hold()
        return self.files.load()

    def fetch(self, paths: Iterable[Path]) -> None:
        """Make the files of parts available for reading, if the store is not a directory."""
        self.files.fetch(list(paths))

    def days(self) -> list[date]:
        """Return the UTC days that have samples, ascending."""
        return list(self._manifest().days)

    def span(self) -> tuple[datetime, datetime] | None:
        """Return the times of the earliest and of the latest sample; None for an empty store."""
        entries = [entry for parts in self._manifest().days.values() for entry in parts]
        if not entries:
            return None
        first, last = min(entry.first_ms for entry in entries), max(entry.last_ms for entry in entries)
        return datetime.fromtimestamp(first / 1000, UTC), datetime.fromtimestamp(last / 1000, UTC)

    def parts(self, since: datetime | None = None, until: datetime | None = None) -> list[Part]:
        """Return the parts that may have samples in the half-open interval, by day, then in the order of ingest."""
        return self._parts(self._manifest(), since, until)

    def _parts(self, current: manifest.StoreManifest, since: datetime | None, until: datetime | None) -> list[Part]:
        low = -(2**63) if since is None else epoch_ms(since)
        high = 2**63 if until is None else epoch_ms(until)
        return [
            Part(day, self.files.part_files(day, entry, self.table), entry, single=len(entries) == 1)
            for day, entries in current.days.items()
            for entry in entries
            if entry.last_ms >= low and entry.first_ms < high
        ]

    def devices(self, since: datetime | None = None, until: datetime | None = None) -> pl.DataFrame:
        """Return ``SampleTable.devices`` for the interval, one row per device: total rows, widest span, median step.

        Rows are counted for whole parts, not only within the interval. Identity columns with several values for a
        device are null.
        """
        return self.devices_and_names(since, until)[0]

    def devices_and_names(
        self, since: datetime | None = None, until: datetime | None = None
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return ``devices``, and all names of the devices: ``NAMES`` with their ``first`` and ``last`` samples."""
        parts = self.parts(since, until)
        tables = [part.devices() for part in parts]
        if not tables:
            return pl.DataFrame(schema=self.table.devices), pl.DataFrame(schema=NAMES_SEEN)
        names = seen_names(tables, [part.files for part in parts])
        identity = [agreed(name) for name in self.table.identity]
        step = pl.col("step_ms").median().round().cast(pl.Int64)
        grouped = pl.concat(tables).group_by("device", maintain_order=True)
        return (
            grouped.agg(*identity, pl.col("rows").sum(), pl.col("first").min(), pl.col("last").max(), step)
            .select(*self.table.devices)
            .sort("device")
            .pipe(without_names, several_names(names)),
            names,
        )

    def scan(self, since: datetime | None = None, until: datetime | None = None) -> pl.LazyFrame:
        """Return the samples of the half-open interval: ``device`` and the columns of readers, duplicates merged.

        Rows are ordered by day, and within a day by (device, time).
        """
        table = self.table
        columns = ["device", *table.samples]
        current = self._manifest()
        parts = self._parts(current, since, until)
        days = sorted({part.day for part in parts})
        of_days = {
            day: [self.files.part_files(day, entry, table).samples for entry in current.days[day]] for day in days
        }
        self.fetch(path for paths in of_days.values() for path in paths)
        frames = [scan_rows(part.path, table, columns) for part in parts if part.single]
        # A day with several parts is merged as a whole: a part outside the filter may have other values of a row.
        for day in sorted({part.day for part in parts if not part.single}):
            merged = [*columns, *(name for name in table.columns if name not in columns)]
            rows = pl.concat([scan_rows(path, table, merged) for path in of_days[day]])
            frames.append(merge_lazy(rows, tuple(table.identity), table).select(columns))
        if not frames:
            return pl.LazyFrame(schema={"device": pl.UInt64(), **table.samples})
        # Texts are stored with a dictionary; identity columns may have been merged as categories.
        plain = {name for name, dtype in table.metrics.items() if dtype != pl.String()}
        # A mapping would be in another order in each process: queries are inputs of tasks on other machines.
        casts = (pl.col(name).cast(dtype) for name, dtype in table.samples.items() if name not in plain)
        whole = pl.concat(frames).with_columns(*casts)
        if since is not None:
            whole = whole.filter(pl.col("time") >= since)
        if until is not None:
            whole = whole.filter(pl.col("time") < until)
        return whole

    def sources(self) -> frozenset[str]:
        """Return the fingerprints of the ingested files."""
        return self.files.fingerprints()

    # -- writing ------------------------------------------------------------------------------------------------

    def writer(self, *, on_landed: Callable[[Sequence[AddedSource]], None] | None = None) -> StoreWriter:
        """Return a context to ingest sources; see ``Writer``. ``on_landed`` is called with sources that are durable."""
        return StoreWriter(self.files, on_landed=on_landed, table=self.table)

    def ingest(
        self, frames: pl.DataFrame | Iterable[pl.DataFrame], *, source: str, fingerprint: str | None = None
    ) -> WrittenTotals:
        """Ingest one source (frames of samples) and compact the days that it changed."""
        with self.writer() as session:
            whole = [frames] if isinstance(frames, pl.DataFrame) else frames
            session.add(whole, SampleSource(source, fingerprint, origin=source))
        return session.totals

    def write_day(self, day: date, frames: Iterable[pl.DataFrame], identities: pl.DataFrame) -> Part:
        """Replace ``day`` with samples that are already sorted, without checking them: for generated data.

        ``frames``: ``device`` (UInt64), ``time`` (within the UTC day) and any of the metrics and ``job``; sorted by
        (device, time) within and across frames, keys unique. ``identities``: the identity columns, a row for each
        description of a device; ``device`` is computed if it is missing (``SampleTable.numbered``).
        """
        numbered = identities if "device" in identities.columns else self.table.numbered(identities)
        with writing(self.root):
            stage = self.files.stage()
            try:
                name = secrets.token_hex(8)
                written = PartFiles.of(stage.path, name, self.table)
                with PartWriter(written, name, *writer.merged_identities(numbered, table=self.table)) as part:
                    for frame in frames:
                        part.write(frame)
                with self.files.locked():
                    current = self.files.load()
                    while not self.files.replace_day(current, day, current.days.get(day, ()), written, part.entry):
                        current = self.files.load()
            finally:
                stage.close()
        return Part(day, self.files.part_files(day, part.entry, self.table), part.entry, single=True)

    def compact(self) -> None:
        """Compact every day into one part. An ingest does so for the days that it changed."""
        with writing(self.root):
            stage = self.files.stage()
            try:
                for day in list(self.files.load().days):
                    writer.compact_day(self.files, day, stage, self.table)
            finally:
                stage.close()

    def delete_before(self, day: date) -> list[date]:
        """Delete the days before ``day``; return them. Files in use by a reader are deleted with the next write."""
        self.close()
        with writing(self.root):
            return self.files.delete_before(day)
