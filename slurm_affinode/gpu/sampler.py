"""Sampler that reads every GPU of the node periodically and spools the samples to disk.

The open spool file is text, ``NAME.csv.part``. Each sweep is written at once, so a crash of the process loses nothing,
and synced once a minute. A full file is closed and converted to Parquet; after a crash an open file is truncated after
its last complete line and closed at the next start. The columns are those of ``metrics.schema.SAMPLES``; that module is
not imported, because the sampler does not need Polars.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, TextIO

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.files import fsync_dir
from slurm_affinode.base.pidfd import ExhaustedError
from slurm_affinode.base.times import utc
from slurm_affinode.gpu import jobs
from slurm_affinode.gpu.interface import DriverMissing, GpuDriver, GpuError
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.model.gpu import Device, GpuFault, GpuSample, Reading, Sweep

COLUMNS = (
    "cluster", "node", "uuid", "pci", "index", "mig", "mig_profile", "model", "time",
    "util_pct", "engine_active", "sm_active", "tensor_active", "dram_active", "fb_used_mib", "fb_total_mib", "power_w",
    "xid", "job",
)  # fmt: skip
PART = ".csv.part"
DURABLE_EVERY_S = 60.0
SWEEP_EVERY_S = 3600.0


class Spool:
    """Sink that writes sweeps to files in a directory, which nodes may share: names contain the node."""

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
        """``file_s``: seconds per file; ``keep_s``: age limit of closed files; ``closed`` is called with each.

        Raises ``OSError`` if nothing can be written.
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
        """Append a sweep. A failure (disk full) is reported once; writing is retried with the next sweep."""
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
        """Close the file after a failed write, truncated to its last complete line as after a crash."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
            with contextlib.suppress(OSError):
                self._salvage(self._path)

    def _node_files(self, suffix: str) -> Iterator[Path]:
        # The time stamp has no hyphen, but a node's name may: gpu-c1-... does not belong to node c1-2.
        for path in sorted(self._directory.glob(f"gpu-{self._node}-*{suffix}")):
            if "-" not in path.name.removeprefix(f"gpu-{self._node}-"):
                yield path

    def _recover(self) -> None:
        for path in list(self._node_files(PART)):
            self._salvage(path)
        for path in list(self._node_files(".csv")):
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
        for path in (*self._node_files(".csv"), *self._node_files(".parquet")):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < now - self._keep_s:
                    path.unlink()


def rows_of(sweep: Sweep, node: str, cluster: str | None) -> str:
    """Return the CSV lines of a sweep. A missing value is an empty cell; a GPU that could not be read has no values."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    stamp = utc(datetime.fromtimestamp(sweep.time_s, UTC), "milliseconds")
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


Say = Callable[[str], None]


class JobSource(Protocol):
    """Maps devices to jobs."""

    def refresh(self) -> None:
        """Prepare for a sweep. Called once before each."""
        ...

    def jobs_of(self, device: Device) -> tuple[str, ...] | None:
        """Return the job IDs, ascending; ``()``: no job; None: not known."""
        ...


class Sink(Protocol):
    """Receives sweeps."""

    def put(self, sweep: Sweep) -> None:
        """Process one sweep."""
        ...

    def close(self) -> None:
        """Finish after the last sweep."""
        ...


class MappedJobs:
    """The jobs in a job mapping directory: allocations, including jobs without a process on the device.

    If the directory does not exist (no prolog has run yet), ``otherwise`` is used.
    """

    def __init__(self, directory: Path, otherwise: JobSource | None = None) -> None:
        self._directory = directory
        self._otherwise = otherwise
        self._map: Mapping[str, tuple[str, ...]] | None = None

    def refresh(self) -> None:
        """Read the directory. If that fails, the jobs are not known."""
        try:
            self._map = jobs.read(self._directory)
        except AffinodeError:
            self._map = None

    def jobs_of(self, device: Device) -> tuple[str, ...] | None:
        """See ``JobSource``."""
        if self._map is not None:
            return ordered(self._map.get(jobs.key_of(device), ()))
        return None if self._otherwise is None else self._otherwise.jobs_of(device)


class ProcessJobs:
    """The jobs of processes that hold a context on the device.

    Environment variables of a process do not count, since it may have outlived the job.
    """

    def __init__(self, driver: GpuDriver, finder: JobFinder | None = None) -> None:
        self._driver = driver
        self._finder = finder or JobFinder()

    def refresh(self) -> None:
        """Do nothing; there is no state between sweeps."""

    def jobs_of(self, device: Device) -> tuple[str, ...] | None:
        """See ``JobSource``. Never ``()``, because an idle allocation has no process yet."""
        try:
            refs = [self._finder.find(process.pid) for process in self._driver.processes(device)]
        except (GpuError, ExhaustedError):
            return None
        return ordered({str(ref.job_id) for ref in refs if ref is not None and ref.source != "environment"}) or None


def ordered(jobs: set[str] | Sequence[str]) -> tuple[str, ...]:
    """Return unique job IDs in numerical order."""
    return tuple(sorted(set(jobs), key=lambda job: (len(job), job)))


class Sampler:
    """Takes one sweep at a time. ``now`` returns seconds since the epoch."""

    def __init__(self, driver: GpuDriver, jobs: JobSource, *, now: Callable[[], float] = time.time) -> None:
        self._driver = driver
        self._jobs = jobs
        self._now = now

    def sweep(self) -> Sweep:
        """Read every device once. Failing devices become faults of the sweep, and so does a missing driver."""
        moment = self._now()
        self._jobs.refresh()
        samples: list[GpuSample] = []
        faults: list[GpuFault] = []
        try:
            devices = self._driver.devices()
            faults += self._driver.faults()
            for device in devices:
                try:
                    reading = self._driver.read(device)
                    samples.append(GpuSample(device, reading, self._jobs.jobs_of(device)))
                except DriverMissing:
                    raise
                except GpuError as error:
                    faults.append(GpuFault(device, device.index, str(error)))
        except GpuError as error:
            return Sweep(moment, driver_error=str(error))
        return Sweep(moment, tuple(samples), tuple(faults))


def run(
    sampler: Sampler,
    sinks: Sequence[Sink],
    *,
    period_s: float,
    stop: threading.Event,
    say: Say = lambda message: None,
    monotonic: Callable[[], float] = time.monotonic,
) -> None:
    """Sweep every ``period_s`` seconds until ``stop``, then close the sinks. A sweep that takes longer skips some.

    Each problem is reported once, and again when all are gone.
    """
    began, sampled, reported = monotonic(), 0, frozenset[str]()
    try:
        while not stop.is_set():
            sweep = sampler.sweep()
            for sink in sinks:
                sink.put(sweep)
            wrong = frozenset(fault.reason for fault in sweep.faults) | (
                {sweep.driver_error} if sweep.driver_error else frozenset()
            )
            for reason in sorted(wrong - reported):
                say(reason)
            if reported and not wrong:
                say("all GPUs respond again")
            reported = wrong
            passed = monotonic() - began
            sampled = max(sampled + 1, int(passed / period_s) + (passed % period_s > 0))
            stop.wait(max(0.0, began + sampled * period_s - monotonic()))
    finally:
        for sink in sinks:
            sink.close()
