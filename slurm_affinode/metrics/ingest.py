"""Ingest of files with samples: find them, detect their formats, read, check and store them.

A bad file does not stop the others. Values that no GPU can produce (wrong unit, fault) become "not measured".
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import polars as pl

from slurm_affinode.base.errors import AffinodeError, DiskError, InputError, UnreachableError
from slurm_affinode.metrics.ahead import ItemSource, read_ahead
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.parquet.table import GPU, SampleTable
from slurm_affinode.metrics.parquet.writer import (
    AddedSource,
    Prepared,
    SampleSource,
    WrittenTotals,
    prepared,
    prepared_parts,
)
from slurm_affinode.metrics.readers import inputs
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions, RejectedLine
from slurm_affinode.metrics.readers.exposition import FileSamples
from slurm_affinode.metrics.readers.lines import compression_of
from slurm_affinode.model.gpu import MIG, UNMEASURED, VGPU, VGPU_MODEL

_MOST = {
    "util_pct": (100, "%"), "engine_active": (1, ""), "sm_active": (1, ""), "tensor_active": (1, ""),
    "dram_active": (1, ""), "fb_used_mib": (2**24, "MiB"), "fb_total_mib": (2**24, "MiB"), "power_w": (100_000, "W"),
}  # fmt: skip
"""Metric -> its maximum, and the unit for messages."""
_NOISE = 1.1
"""Tolerance: counters are not read at the same moment, so that a value may slightly exceed its maximum."""


def possible(samples: pl.DataFrame, notes: ReadingNotes) -> pl.DataFrame:
    """Set impossible values of ``samples`` (``SAMPLES``) to not measured, and add their number to ``notes``.

    So are values of fields that a device cannot measure (``model.gpu.UNMEASURED``).
    """
    samples = _measured(samples, notes)
    beyond = {name: pl.col(name) > most * _NOISE for name, (most, _) in _MOST.items() if name in samples.columns}
    counts = samples.select(above.sum().alias(name) for name, above in beyond.items()).row(0, named=True)
    bad = [name for name, count in counts.items() if count]
    for name in bad:
        most, unit = _MOST[name]
        above = f"{name} above {most:,} {unit}".rstrip()
        notes.decide(f"values of {above} are impossible and count as not measured", counts[name])
    return samples.with_columns(pl.when(~beyond[name]).then(pl.col(name)) for name in bad) if bad else samples


def _measured(samples: pl.DataFrame, notes: ReadingNotes) -> pl.DataFrame:
    kinds = {
        MIG: ("MIG instances", samples["mig"].is_not_null()),
        VGPU: (
            "virtual GPUs",
            samples["mig"].is_null() & samples["model"].str.contains(VGPU_MODEL).fill_null(value=False),
        ),
    }
    for kind, (title, present) in kinds.items():
        if not present.any():
            continue
        for name in sorted(UNMEASURED[kind] & set(samples.columns)):
            if count := int((present & samples[name].is_not_null()).sum()):
                notes.decide(f"{title} do not measure {name}: its values are not used", count)
                samples = samples.with_columns(pl.when(~present).then(pl.col(name)).alias(name))
    return samples


Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class FileReader:
    """Reader of the files of a table."""

    read: Callable[[Path, ReadOptions, ReadingNotes, str | None, Advance], tuple[str, Iterator[pl.DataFrame]]]
    """Return the format of a file and its samples. Raises ``InputError``, also between frames."""
    fingerprint: Callable[[Path, str, ReadOptions, str | None], str]
    """Return a digest of a file's content and of everything that determines how it is read."""
    checked: Callable[[pl.DataFrame, ReadingNotes], pl.DataFrame]
    """Set impossible values to not measured, and note them."""
    item: str
    """Name of a sample, for the error of a file without any."""
    hint: str
    table: SampleTable = GPU
    read_small: Callable[[Sequence[Path], ReadOptions, str | None], Mapping[Path, FileSamples]] = (
        lambda paths, options, format: {}
    )
    """Return the samples of those of several small files about which there is nothing to report."""
    parallel: bool = False
    """Whether several threads may read files at the same time."""


GPU_FILES = FileReader(
    inputs.read_file, inputs.fingerprint, possible, "GPU metric",
    "name further metrics in a file and give it as gpu_history.aliases", read_small=inputs.read_small, parallel=True,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileOutcome:
    """Outcome for one file."""

    path: str
    status: str
    """``taken``; ``known``: ingested before and unchanged; ``failed``: nothing of it was stored."""
    format: str | None = None
    samples: int = 0
    first: datetime | None = None
    last: datetime | None = None
    problems: tuple[RejectedLine, ...] = ()
    """The first of the rejected lines."""
    problem_count: int = 0
    unknown: tuple[tuple[str, int], ...] = ()
    """Names of metrics and columns that are not stored, with their counts."""
    decisions: tuple[tuple[str, int], ...] = ()
    """Decisions made while reading, e.g. on local times that exist twice, with their counts."""
    error: str | None = None
    """Reason of the failure, in one line that names the file."""
    hint: str | None = None
    fingerprint: str | None = None
    started: datetime | None = None
    finished: datetime | None = None


@dataclass(frozen=True, slots=True)
class IngestSummary:
    """Outcome for all files."""

    files: tuple[FileOutcome, ...]
    samples: int
    new: int
    """Samples (device and time) that were not in the store before; 0 in a dry run."""
    duplicates: int
    devices: int
    """Devices in the ingested files."""
    nodes: int
    first: datetime | None
    last: datetime | None
    steps_s: tuple[tuple[float, int], ...]
    """Sampling interval in seconds, number of devices with it; most devices first. Empty in a dry run."""
    dry_run: bool = False

    @property
    def failed(self) -> tuple[FileOutcome, ...]:
        """Files that failed; nothing of them was stored."""
        return tuple(file for file in self.files if file.status == "failed")

    @property
    def problem_count(self) -> int:
        """Number of rejected lines."""
        return sum(file.problem_count for file in self.files)


@dataclass(slots=True)
class SeenFiles:
    """Devices and nodes seen while samples are read."""

    checked: Callable[[pl.DataFrame, ReadingNotes], pl.DataFrame] = possible
    table: SampleTable = GPU
    devices: set[int] = field(default_factory=set)
    nodes: set[tuple[str, str | None]] = field(default_factory=set)
    """Cluster and name."""

    def watch(self, frames: Iterator[pl.DataFrame | Prepared], notes: ReadingNotes) -> Iterator[Prepared]:
        """Prepare ``frames`` for a writer; impossible values are set to not measured and noted."""
        for frame in frames:
            ready = frame if isinstance(frame, Prepared) else prepared(self.checked(frame, notes), self.table)
            self.devices.update(ready.identities["device"])
            self.nodes.update(ready.identities.select("cluster", "node").iter_rows())
            yield ready


def ingest_files(
    store: SampleStore,
    paths: Sequence[str | Path],
    options: ReadOptions,
    *,
    format: str | None = None,
    again: bool = False,
    dry_run: bool = False,
    advance: Advance = lambda count: None,
    on_landed: Callable[[Sequence[FileOutcome]], None] = lambda outcomes: None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    reader: FileReader = GPU_FILES,
) -> IngestSummary:
    """Ingest ``paths``. A file that fails does not stop the others; a store that cannot be written does.

    Files that were ingested before and have not changed are skipped, unless ``again``. ``advance`` is called with
    numbers of bytes read, ``on_landed`` with files when their samples are durable. Raises ``UnreachableError`` or
    ``DiskError`` if the store cannot be written.
    """
    files, unusable = inputs.expand(paths)
    missing = [FileOutcome(path, "failed", error=f"{path}: {why}") for path, why in unusable]
    known_sources = frozenset[str]() if again or dry_run else store.sources()
    run = SourceRun(options, format, known_sources, now, advance, reader=reader)
    if dry_run or not files:
        for _ in run.take(files, count):
            pass
        return run.summary(missing, None, (), dry_run=dry_run)
    with store.writer(on_landed=run.landed) as writer:
        for _ in run.take(files, writer.add):
            run.report(on_landed)
    run.report(on_landed)
    return run.summary(missing, writer.totals, run.steps(store))


_FILES_AT_ONCE = 500
_BYTES_AT_ONCE = 16 << 20
_BYTES_AHEAD = 512 << 20
"""Files of this size may be read at the same time."""
_PACKED = 20
"""Factor by which compressed text and Parquet are larger in memory, for ``_BYTES_AHEAD``."""


def _groups(files: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield ``files`` in groups of limited number and size."""
    group: list[Path] = []
    pending_bytes = 0
    for path in files:
        pending_bytes += inputs.size(path)
        if group and (pending_bytes > _BYTES_AT_ONCE or len(group) == _FILES_AT_ONCE):
            yield group
            group, pending_bytes = [], inputs.size(path)
        group.append(path)
    if group:
        yield group


def _cost(path: Path) -> int:
    """Return the memory that reading a file needs, roughly."""
    with contextlib.suppress(OSError):
        if path.suffix == ".parquet" or compression_of(path) is not None:
            return _PACKED * inputs.size(path)
    return inputs.size(path)


@dataclass(frozen=True, slots=True)
class _Ready:
    """The samples of a file that was read with others."""

    samples: Prepared
    unknown: Counter[str]
    digest: str


def count(frames: Iterator[Prepared], source: SampleSource) -> AddedSource:
    """Count samples; replaces ``Writer.add`` in a dry run."""
    rows, times = 0, set[int]()
    for frame in frames:
        rows += len(frame.rows)
        times.update(int(time) for time in frame.rows["time"].dt.epoch("ms").unique())
        times = {min(times), max(times)} if times else times
    return AddedSource(source, rows, min(times, default=None), max(times, default=None))


@dataclass(frozen=True, slots=True)
class _Opened:
    """A file of which the samples follow, then ``_End``."""

    notes: ReadingNotes
    kind: str
    digest: str | None


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a file, which may be an error."""

    notes: ReadingNotes
    error: Exception | None = None


_Item = _Opened | Prepared | _End


class _KnownError(Exception):
    """The source was ingested before and has not changed."""

    def __init__(self, fingerprint: str) -> None:
        super().__init__(fingerprint)
        self.fingerprint = fingerprint


class SourceRun:
    """State of an ingest."""

    def __init__(
        self, options: ReadOptions, format: str | None, known_sources: frozenset[str], now: Callable[[], datetime],
        advance: Advance, *, reader: FileReader,
    ) -> None:  # fmt: skip
        self._options = options
        self._reader = reader
        self._format = format
        self._known_sources = known_sources
        self._now = now
        self._advance = advance
        self._seen_files = SeenFiles()
        self._outcomes: dict[str, FileOutcome] = {}
        self._durable: list[str] = []
        self._current: Path | None = None
        """The file that is ingested."""
        self._bytes_read: Counter[Path] = Counter()
        self._reported_bytes = 0
        """Bytes of the current file that were passed to ``advance``."""

    def take(
        self, paths: Sequence[Path], add: Callable[[Iterator[Prepared], SampleSource], AddedSource]
    ) -> Iterator[Path]:  # fmt: skip
        """Ingest files in their order, and yield each one when it was ingested.

        Small files are read together. Threads read the next files meanwhile, if the reader allows it.
        """
        groups = list(_groups(paths))
        sources = (ItemSource(partial(self._read, group), sum(map(_cost, group))) for group in groups)
        workers = len(os.sched_getaffinity(0)) if self._reader.parallel else 1
        with closing(read_ahead(sources, workers=workers, budget=_BYTES_AHEAD, idle=self._report_progress)) as streams:
            for group, items in zip(groups, streams, strict=True):
                for path in group:
                    self._take(path, items, add)
                    yield path

    def _read(self, paths: Sequence[Path]) -> Generator[_Item, None, None]:
        """Yield ``_Opened``, samples and ``_End`` of each file; a file that cannot be opened has the last alone."""
        ready = self._ready(paths) if len(paths) > 1 else {}
        for path in paths:
            notes = ReadingNotes(str(path))
            try:
                kind, frames, digest = self._open(path, notes, ready.get(path))
                yield _Opened(notes, kind, digest)
                yield from SeenFiles(self._reader.checked, self._reader.table).watch(frames, notes)
            except Exception as error:  # raised again where the file is taken
                yield _End(notes, error)
            else:
                yield _End(notes)

    def _open(
        self, path: Path, notes: ReadingNotes, ready: _Ready | None
    ) -> tuple[str, Iterator[pl.DataFrame | Prepared], str | None]:
        if ready is not None:
            notes.unknown = ready.unknown
            return "prometheus", iter((ready.samples,)), ready.digest
        digest = self._reader.fingerprint(path, notes.name, self._options, self._format)
        if digest in self._known_sources:
            raise _KnownError(digest)

        def advance(count: int) -> None:
            self._bytes_read[path] += count

        return *self._reader.read(path, self._options, notes, self._format, advance), digest

    def _take(
        self, path: Path, items: Iterator[_Item], add: Callable[[Iterator[Prepared], SampleSource], AddedSource]
    ) -> None:  # fmt: skip
        """Ingest the next file of ``items``."""
        self._current, self._reported_bytes = path, 0
        ended = False

        def noted(end: _Item, notes: ReadingNotes) -> Prepared | None:
            """Return samples; at the end of the file, note what was noted while it was read, and raise its error."""
            nonlocal ended
            self._report_progress()
            if isinstance(end, Prepared):
                return end
            if isinstance(end, _End):
                ended = True
                notes.problems, notes.problem_count = end.notes.problems, end.notes.problem_count
                notes.unknown, notes.decisions = end.notes.unknown, end.notes.decisions
                if end.error is not None:
                    raise end.error
            return None

        def frames(notes: ReadingNotes) -> Iterator[Prepared]:
            while (frame := noted(next(items), notes)) is not None:
                yield frame

        def read(notes: ReadingNotes) -> tuple[str, Iterator[Prepared], str | None]:
            first = next(items)
            noted(first, notes)
            assert isinstance(first, _Opened)  # noqa: S101 - a file begins with this or an error
            return first.kind, frames(notes), first.digest

        try:
            self.take_from(str(path), read, add, origin=str(path.resolve()))
            while not ended:  # the samples could not be used
                ended = isinstance(next(items), _End)
        finally:
            self._bytes_read[path] = inputs.size(path)
            self._report_progress()
            self._current = None
            del self._bytes_read[path]

    def _report_progress(self) -> None:
        """Pass on how much of the current file was read."""
        if self._current is not None:
            bytes_read = self._bytes_read[self._current]
            self._advance(bytes_read - self._reported_bytes)
            self._reported_bytes = bytes_read

    def _ready(self, paths: Sequence[Path]) -> dict[Path, _Ready]:
        digests: dict[Path, str] = {}
        for path in paths:
            if inputs.size(path) <= inputs.SMALL_FILE_BYTES:
                with contextlib.suppress(AffinodeError):  # reported when the file is read alone
                    digests[path] = self._reader.fingerprint(path, str(path), self._options, self._format)
        new = [path for path, digest in digests.items() if digest not in self._known_sources]
        samples_by_path = self._reader.read_small(new, self._options, self._format)
        if not samples_by_path:
            return {}
        notes = ReadingNotes("")
        frame = self._reader.checked(pl.concat([samples.frame for samples in samples_by_path.values()]), notes)
        if notes.decisions:
            return {}
        ends = list(accumulate(len(samples.frame) for samples in samples_by_path.values()))
        frames = [frame[start:end] for start, end in pairwise([0, *ends])]
        parts = prepared_parts(frames, self._reader.table)
        return {
            path: _Ready(part, samples.unknown, digests[path])
            for part, (path, samples) in zip(parts, samples_by_path.items(), strict=True)
        }

    def take_from(
        self,
        name: str,
        read: Callable[
            [ReadingNotes],
            tuple[str, Iterator[pl.DataFrame] | Iterator[Prepared] | Iterator[pl.DataFrame | Prepared], str | None],
        ],
        add: Callable[[Iterator[Prepared], SampleSource], AddedSource],
        *,
        origin: str | None = None,
    ) -> None:
        """Ingest one source; ``read`` returns its format, samples and fingerprint. Raises if the store cannot be used.

        Any other error is part of the outcome. ``origin``: see ``SampleSource``.
        """
        started, notes = self._now(), ReadingNotes(name)
        try:
            kind, frames, digest = read(notes)
            file_history = SeenFiles(self._reader.checked, self._reader.table)
            source = SampleSource(name, digest, origin)
            addition = add(_not_empty(file_history.watch(frames, notes), notes, self._reader), source)
            self._outcomes[name] = replace(_outcome(notes, addition, started, self._now()), format=kind)
            self._seen_files.devices |= file_history.devices
            self._seen_files.nodes |= file_history.nodes
        except _KnownError as known_error:
            self._outcomes[name] = FileOutcome(name, "known", fingerprint=known_error.fingerprint)
        except (UnreachableError, DiskError):
            raise
        except AffinodeError as error:
            self._outcomes[name] = _failure(name, notes, error, started, self._now())

    def landed(self, additions: Sequence[AddedSource]) -> None:
        """Record that files are durable, which may happen before ``take`` returns for the last of them."""
        self._durable += [entry.source.name for entry in additions]

    def report(self, on_landed: Callable[[Sequence[FileOutcome]], None]) -> None:
        """Report the files that have become durable."""
        ready = [self._outcomes[name] for name in self._durable if name in self._outcomes]
        self._durable = []
        if ready:
            on_landed(ready)

    def summary(
        self,
        missing: Sequence[FileOutcome],
        totals: WrittenTotals | None,
        steps: tuple[tuple[float, int], ...],
        *,
        dry_run: bool = False,
    ) -> IngestSummary:
        """Return the outcome for all files; ``missing`` ones come first."""
        files = (*missing, *self._outcomes.values())
        first, last = self._span()
        return IngestSummary(
            files=files,
            samples=sum(file.samples for file in files),
            new=totals.new if totals else 0,
            duplicates=totals.duplicates if totals else 0,
            devices=len(self._seen_files.devices),
            nodes=len(self._seen_files.nodes),
            first=first,
            last=last,
            steps_s=steps,
            dry_run=dry_run,
        )

    def _span(self) -> tuple[datetime | None, datetime | None]:
        times = [
            time for outcome in self._outcomes.values() for time in (outcome.first, outcome.last) if time is not None
        ]
        return min(times, default=None), max(times, default=None)

    def steps(self, store: SampleStore) -> tuple[tuple[float, int], ...]:
        """Return the sampling intervals in seconds with their numbers of devices, for the devices and days read."""
        return sampling_steps(store, *self._span(), self._seen_files.devices)


def sampling_steps(
    store: SampleStore, first: datetime | None, last: datetime | None, devices: Set[int]
) -> tuple[tuple[float, int], ...]:
    """Return the sampling intervals in seconds with their numbers of ``devices``, from ``first`` to ``last``."""
    if first is None or last is None:
        return ()
    known_devices = store.devices(first, last + timedelta(milliseconds=1))
    of_devices = known_devices.filter(pl.col("device").is_in(list(devices)))
    counts = Counter(round(step / 1000, 1) for step in of_devices["step_ms"].drop_nulls())
    return tuple(counts.most_common())


def _not_empty(frames: Iterator[Prepared], notes: ReadingNotes, reader: FileReader) -> Iterator[Prepared]:
    """Yield ``frames``; raise ``InputError`` if the file had no usable sample."""
    rows = 0
    for frame in frames:
        rows += len(frame.rows)
        yield frame
    if rows:
        return
    if notes.problem_count:
        first = notes.problems[0]
        where = notes.name if first.line is None else f"{notes.name}:{first.line}"
        raise InputError(f"none of its {notes.problem_count} samples can be used: {first.reason}", where=where)
    unknown = ", ".join(name for name, _ in notes.unknown.most_common(5))
    raise InputError(
        f"has no {reader.item} that is known{f' (it has {unknown})' if unknown else ''}",
        where=notes.name,
        hint=reader.hint,
    )


def _outcome(notes: ReadingNotes, addition: AddedSource, started: datetime, finished: datetime) -> FileOutcome:
    return FileOutcome(
        notes.name,
        "taken",
        samples=addition.samples,
        first=_moment(addition.first_ms),
        last=_moment(addition.last_ms),
        problems=tuple(notes.problems),
        problem_count=notes.problem_count,
        unknown=tuple(notes.unknown.most_common()),
        decisions=tuple(notes.decisions.items()),
        fingerprint=addition.source.fingerprint,
        started=started,
        finished=finished,
    )


def _failure(
    name: str, notes: ReadingNotes, error: AffinodeError, started: datetime, finished: datetime
) -> FileOutcome:
    text = str(error) if name in str(error) else f"{name}: {error}"
    return FileOutcome(
        name, "failed", problems=tuple(notes.problems), problem_count=notes.problem_count, error=text, hint=error.hint,
        started=started, finished=finished,
    )  # fmt: skip


def _moment(epoch_ms: int | None) -> datetime | None:
    return None if epoch_ms is None else datetime.fromtimestamp(epoch_ms / 1000, UTC)
