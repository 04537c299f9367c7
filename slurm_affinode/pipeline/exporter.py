"""The exporter: samples the GPUs of this node, serves the metrics over HTTP, and keeps the samples in a spool."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector

from slurm_affinode.base import process
from slurm_affinode.base.errors import AffinodeError, unwritable
from slurm_affinode.gpu import sampler
from slurm_affinode.gpu.exporter import Access, LastSweep, MetricsServer
from slurm_affinode.gpu.interface import GpuDriver
from slurm_affinode.gpu.sampler import Spool
from slurm_affinode.model.gpu import Sweep

Say = Callable[[str], None]
CONVERT_TIMEOUT_S = 120.0
LAST_CONVERSION_S = 20.0


@dataclass(frozen=True, slots=True)
class ExporterOptions:
    """Options of the exporter."""

    node: str
    cluster: str | None
    host: str
    port: int
    period_s: float
    access: Access = field(default_factory=Access)
    job_map: Path | None = None
    spool: Path | None = None
    spool_file_s: float = 600.0
    spool_keep_s: float | None = None


class Signals:
    """Requests to the process, set by signal handlers."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.close_file = threading.Event()


class SpoolConverter:
    """Converts closed spool files to Parquet, one at a time, each in its own process."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._waiting: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="parquet", daemon=True)
        self._thread.start()

    def add(self, path: Path) -> None:
        """Queue ``path`` for conversion. If that fails it stays a text table, which can be ingested as well."""
        self._waiting.put(path)

    def close(self) -> None:
        """Wait for the conversions, at most ``LAST_CONVERSION_S``; the rest is done at the next start."""
        self._waiting.put(None)
        self._thread.join(LAST_CONVERSION_S)

    def _work(self) -> None:
        while (path := self._waiting.get()) is not None:
            try:
                process.run(process.of_module("slurm_affinode.metrics.spool", str(path)), timeout_s=CONVERT_TIMEOUT_S)
            except AffinodeError as error:
                self._say(f"{path.name} stays a table of text: {error}")


class _Rotation:
    """A sink after the spool that rotates the spool's file on request."""

    def __init__(self, spool: Spool, asked: threading.Event, say: Say) -> None:
        self._spool, self._asked, self._say = spool, asked, say

    def put(self, sweep: Sweep) -> None:
        """Rotate the file if that was requested."""
        if self._asked.is_set():
            self._asked.clear()
            try:
                self._spool.rotate()
            except OSError as error:
                self._say(f"the open file cannot be closed: {error.strerror}")

    def close(self) -> None:
        """Do nothing: the spool closes its file itself."""


def run(options: ExporterOptions, driver: GpuDriver, signals: Signals, *, say: Say) -> None:
    """Sample until ``signals.stop`` is set. Without a driver, report that and wait for one.

    Raises ``UnreachableError`` if the address or the spool cannot be used, ``InputError`` for bad certificates.
    """
    processes = sampler.ProcessJobs(driver)
    jobs = processes if options.job_map is None else sampler.MappedJobs(options.job_map, processes)
    shown = LastSweep(node=options.node, cluster=options.cluster, stale_s=3 * options.period_s + 5)
    sinks: list[sampler.Sink] = [shown]
    converter = None
    if options.spool is not None:
        converter = SpoolConverter(say)
        try:
            spool = Spool(options.spool, node=options.node, cluster=options.cluster, file_s=options.spool_file_s,
                          keep_s=options.spool_keep_s, closed=converter.add, say=say)  # fmt: skip
        except OSError as error:
            raise unwritable(options.spool, error) from error
        sinks += [spool, _Rotation(spool, signals.close_file, say)]
    registry = CollectorRegistry()
    registry.register(shown)
    ProcessCollector(registry=registry)
    server = MetricsServer(registry, options.host, options.port, options.access)
    say(f"{options.node}: a sample every {options.period_s:g} s, metrics at {options.host}:{server.port}/metrics")
    try:
        sampler.run(sampler.Sampler(driver, jobs), sinks, period_s=options.period_s, stop=signals.stop, say=say)
    finally:
        server.close()
        driver.close()
        if converter is not None:
            converter.close()
