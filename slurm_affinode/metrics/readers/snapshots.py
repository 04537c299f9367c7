"""Snapshots of nvidia-smi: the default table, ``nvidia-smi -q`` and ``nvidia-smi -q -x``, one or many in a file.

``smi_table``, ``smi_query`` and ``smi_xml`` parse the three layouts. This module gives snapshots their times and
converts them to samples, as a table of the columns of ``nvidia-smi --query-gpu``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.metrics.readers import local_time
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions
from slurm_affinode.metrics.readers.lines import LineBlock
from slurm_affinode.metrics.readers.snapshot_times import SnapshotTime, later, time_from_line
from slurm_affinode.metrics.readers.tables import TableReader

_COLUMNS = ("index", "pci.bus_id", "uuid", "mig", "name", "utilization.gpu", "memory.used", "memory.total",
            "power.draw")  # fmt: skip
_FLUSH_ROWS = 20_000
MOST_DEVICES = 1_024
"""GPUs and MIG instances of a node; each line of a process is compared with all of them."""
NO_TIME_HINT = (
    "keep the line with the date above each snapshot, name the file after its time (gpu01_2026-11-01T0800.txt), or "
    "give --start TIME, and --interval for several snapshots"
)
HELD = "samples at 0 % of GPUs whose memory is held by compute processes"


@dataclass(slots=True)
class SmiDevice:
    """A GPU, or a MIG instance, in a snapshot. Values are texts with units; None, N/A and ERR! are not measured."""

    line: int
    index: str | None = None
    pci: str | None = None
    uuid: str | None = None
    mig: str | None = None
    """ID of the GPU instance."""
    model: str | None = None
    util: str | None = None
    used: str | None = None
    total: str | None = None
    power: str | None = None
    compute_processes: int = 0
    """Listed processes that compute and hold memory."""

    def row(self) -> tuple[str | None, ...]:
        """Return the values of ``_COLUMNS``."""
        return (self.index, self.pci, self.uuid, self.mig, self.model, self.util, self.used, self.total, self.power)


@dataclass(slots=True)
class SmiOutput:
    """Output of one call of nvidia-smi."""

    line: int
    name: str
    """The file, for messages."""
    time: SnapshotTime | None = None
    devices: list[SmiDevice] = field(default_factory=list)
    incomplete: str | None = None
    """Where and how the output ends too early; None: it is complete."""
    last_line: int = 0

    def add(self, device: SmiDevice) -> None:
        """Add a device. Raises ``InputError`` if there are more than a node can have."""
        if len(self.devices) >= MOST_DEVICES:
            raise InputError(f"has more than {MOST_DEVICES:,} GPUs in a snapshot", where=f"{self.name}:{device.line}")
        self.devices.append(device)

    def add_time(self, text: str) -> None:
        """Take the time that the output itself has, unless it lacks the zone that a line above it has."""
        if (moment := time_from_line(text)) is not None:
            self.time = later(self.time, moment)


Parser = Callable[[Iterator[tuple[str, int]], str], Iterator[SmiOutput]]
"""Parse lines with their numbers; the text is the name of the file. Raises ``InputError`` for an unknown layout."""


class SnapshotReader:
    """Convert the snapshots of one file to samples."""

    def __init__(
        self, notes: ReadingNotes, options: ReadOptions, fallback_node: str | None, parser: Parser,
        named_time: str | None,
    ) -> None:  # fmt: skip
        """``named_time``: the time in the name of the file."""
        self._notes = notes
        self._options = options
        self._node = fallback_node
        self._parser = parser
        self._named_time = named_time
        self._table: TableReader | None = None
        self._timed = False

    def read(self, blocks: Iterator[LineBlock]) -> Iterator[pl.DataFrame]:
        """Yield samples. A snapshot without an end, at the end of a log, is reported and left out."""
        rows: list[tuple[int, str | None, SmiDevice]] = []
        incomplete: list[SmiOutput] = []
        count, held_count = 0, 0
        for snapshot in self._parser(_lines(blocks), self._notes.name):
            if snapshot.incomplete is not None:
                incomplete.append(snapshot)
                continue
            if not self._is_usable(snapshot, first=not count):
                continue
            count += 1
            held_count += sum(_is_held(device) for device in snapshot.devices)
            rows += [(device.line, self._time(snapshot), device) for device in snapshot.devices]
            if len(rows) >= _FLUSH_ROWS:
                yield from self._samples(rows)
                rows = []
        if not count:
            raise self._without_samples(incomplete)
        for snapshot in incomplete:
            reason = f"the snapshot is cut off, or still being written: {snapshot.incomplete}"
            self._notes.problem(snapshot.last_line, reason, strict=self._options.strict)
        yield from self._samples(rows)
        self._notes.decide(HELD, held_count)

    def _without_samples(self, incomplete: list[SmiOutput]) -> InputError:
        if not incomplete:
            return InputError("has no snapshot of nvidia-smi with a GPU", where=self._notes.name)
        return InputError(
            f"is cut off: {incomplete[0].incomplete}",
            where=f"{self._notes.name}:{incomplete[0].last_line}",
            hint="copy the whole output; nothing of it was ingested",
        )

    def _is_usable(self, snapshot: SmiOutput, *, first: bool) -> bool:
        """Return whether the snapshot has devices and, if the first one has a time, a time."""
        if not snapshot.devices:
            return False
        if first:
            self._timed = snapshot.time is not None
            self._set_start()
        elif self._timed and snapshot.time is None:
            self._notes.problem(snapshot.line, "the snapshot has no time", strict=self._options.strict)
            return False
        return True

    def _set_start(self) -> None:
        """Determine the time of the first snapshot if the file has none. Raises ``InputError`` if nothing gives it."""
        if self._timed or self._options.start is not None:
            return
        named = None
        if self._named_time is not None:
            named = local_time.parse(pl.Series([self._named_time]), self._options.zone)[0][0]
        if named is None:
            raise InputError("the snapshots have no times", where=self._notes.name, hint=NO_TIME_HINT)
        self._notes.decide(f"time taken from the name of the file: {self._named_time}")
        self._options = replace(self._options, start=named)

    def _time(self, snapshot: SmiOutput) -> str | None:
        if snapshot.time is None or not self._timed:
            return None
        if snapshot.time.ignored_zone is not None:
            self._notes.decide("times with an abbreviated time zone, which has several meanings, read as local times")
        return snapshot.time.text

    def _samples(self, rows: list[tuple[int, str | None, SmiDevice]]) -> Iterator[pl.DataFrame]:
        if not rows:
            return
        if self._table is None:
            header = ("timestamp" if self._timed else "", *_COLUMNS)
            self._table = TableReader(header, self._notes, self._options, self._node)
        cells = [(time, *device.row(), number) for number, time, device in rows]
        schema = {**{f"c{index}": pl.String() for index in range(len(_COLUMNS) + 1)}, "number": pl.Int64()}
        yield from self._table.rows(pl.DataFrame(cells, schema=schema, orient="row"))


def _lines(blocks: Iterator[LineBlock]) -> Iterator[tuple[str, int]]:
    for block in blocks:
        yield from block.lines.select("line", "number").iter_rows()


def _is_held(device: SmiDevice) -> bool:
    return device.compute_processes > 0 and device.util is not None and device.util.strip(" %") == "0"


def is_compute_process(kind: str, memory: str) -> bool:
    """Return whether a listed process computes (types C, M and C+G) and holds memory that was measured."""
    digits = memory.strip().split("M")[0].strip()
    return kind.strip()[:1] in ("C", "M") and digits.isdecimal() and int(digits) > 0
