"""Samples on the node's disk, in files that ``slurm-affinode ingest gpu`` takes in.

The open file is a table of text, ``NAME.csv.part``: each sweep is handed to the kernel as it is taken, so a process
that dies loses nothing; once a minute it is made durable. A file that is full is closed and handed on (to become
Parquet); what a crash left open is cut after its last whole line and closed at the next start. The columns are those
of ``history.schema.SAMPLES``; that module is not imported, for a sampler has no use for Polars.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from slurm_affinode.files import fsync_dir
from slurm_affinode.model.gpu import GpuSample, Reading, Sweep

COLUMNS = (
    "cluster", "node", "uuid", "pci", "index", "mig", "mig_profile", "model", "time",
    "util_pct", "engine_active", "sm_active", "tensor_active", "dram_active", "fb_used_mib", "fb_total_mib", "power_w",
    "xid", "job",
)  # fmt: skip
PART = ".csv.part"
DURABLE_EVERY_S = 60.0
SWEEP_EVERY_S = 3600.0


class Spool:
    """A sink that keeps sweeps in files below a directory. Every node has names of its own: it may be shared."""

    def __init__(
        self,
        directory: Path,
        *,
        node: str,
        cluster: str | None,
        file_s: float,
        keep_s: float | None,
        closed: Callable[[Path], None] = lambda path: None,
        say: Callable[[str], None] = lambda message: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """``file_s``: seconds in a file; ``keep_s``: closed files older than this go; ``closed`` is told of a file.

        Raises ``OSError`` where nothing can be written.
        """
        self._directory, self._node, self._cluster = directory, node, cluster
        self._file_s, self._keep_s = file_s, keep_s
        self._closed, self._say, self._now = closed, say, now
        self._file: TextIO | None = None
        self._path = directory
        self._opened = self._durable = self._expired = 0.0
        self._failing = False
        directory.mkdir(parents=True, exist_ok=True)
        self._recover()

    def put(self, sweep: Sweep) -> None:
        """Append a sweep. Where it cannot be written (disk full) that is said once, and tried again with the next."""
        if not sweep.samples and all(fault.device is None for fault in sweep.faults):
            return
        try:
            if self._file is not None and not self._opened <= sweep.time_s < self._opened + self._file_s:
                self.rotate()
            file = self._file or self._open(sweep.time_s)
            file.write(rows_of(sweep, self._node, self._cluster))
            file.flush()
            if sweep.time_s >= self._durable + DURABLE_EVERY_S:
                os.fsync(file.fileno())
                self._durable = sweep.time_s
            if self._failing:
                self._say(f"{self._directory}: samples are written again")
            self._failing = False
        except OSError as error:
            if not self._failing:
                self._say(f"{self._directory}: samples cannot be written and are lost: {error.strerror}")
            self._failing = True
            self._abandon()

    def rotate(self) -> None:
        """Close the open file now. Raises ``OSError``."""
        if self._file is None:
            return
        file, self._file = self._file, None
        with file:
            file.flush()
            os.fsync(file.fileno())
        self._finish(self._path)
        self._expire()

    def close(self) -> None:
        """Close the open file."""
        try:
            self.rotate()
        except OSError as error:
            self._say(f"{self._directory}: the last file cannot be closed: {error.strerror}")

    # -- files ----------------------------------------------------------------------------------------------------

    def _open(self, time_s: float) -> TextIO:
        stamp = datetime.fromtimestamp(time_s, UTC).strftime("%Y%m%dT%H%M%S.%f")[:-3] + "Z"
        self._path = self._directory / f"gpu-{self._node}-{stamp}{PART}"
        self._file = self._path.open("a", encoding="utf-8", newline="")
        self._opened = self._durable = time_s
        if self._file.tell() == 0:
            self._file.write(",".join(COLUMNS) + "\n")
        return self._file

    def _finish(self, path: Path) -> None:
        whole = path.with_name(path.name.removesuffix(".part"))
        path.replace(whole)
        fsync_dir(self._directory)
        self._closed(whole)

    def _abandon(self) -> None:
        """After a failure: what was written up to the last whole line is closed as after a crash."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
            with contextlib.suppress(OSError):
                self._salvage(self._path)

    def _mine(self, suffix: str) -> Iterator[Path]:
        # The time stamp has no hyphen, a node's name may have some: gpu-c1-... is not of the node c1-2.
        for path in sorted(self._directory.glob(f"gpu-{self._node}-*{suffix}")):
            if "-" not in path.name.removeprefix(f"gpu-{self._node}-"):
                yield path

    def _recover(self) -> None:
        for path in list(self._mine(PART)):
            self._salvage(path)
        for path in list(self._mine(".csv")):
            self._closed(path)

    def _salvage(self, path: Path) -> None:
        with path.open("r+b") as file:
            content = file.read()
            size = content.rfind(b"\n") + 1
            file.truncate(size)
        if content[:size].count(b"\n") < 2:
            path.unlink()
        else:
            self._finish(path)

    def _expire(self) -> None:
        now = self._now()
        if self._keep_s is None or now < self._expired + SWEEP_EVERY_S:
            return
        self._expired = now
        for path in (*self._mine(".csv"), *self._mine(".parquet")):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < now - self._keep_s:
                    path.unlink()


def rows_of(sweep: Sweep, node: str, cluster: str | None) -> str:
    """The lines of a sweep; an empty cell is a value that is missing. A GPU that could not be read has no value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    stamp = datetime.fromtimestamp(sweep.time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    failed = (GpuSample(fault.device, Reading(), None) for fault in sweep.faults if fault.device is not None)
    for sample in (*sweep.samples, *failed):
        writer.writerow(_cells(sample, stamp, node, cluster))
    return text.getvalue()


def _cells(sample: GpuSample, stamp: str, node: str, cluster: str | None) -> tuple[object, ...]:
    device, reading = sample.device, sample.reading
    return (
        cluster, node, device.uuid, device.pci, device.index, device.mig, device.mig_profile, device.model, stamp,
        *map(_number, (
            reading.util_pct, reading.engine_active, reading.sm_active, reading.tensor_active, reading.dram_active,
            reading.fb_used_mib, reading.fb_total_mib, reading.power_w,
        )),
        reading.xid, ",".join(sample.jobs or ()),
    )  # fmt: skip


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.7g}"
