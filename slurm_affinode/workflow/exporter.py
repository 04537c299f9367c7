"""The exporter: samples the GPUs of this node, shows them over HTTP, keeps them in a spool, until told to stop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector

from slurm_affinode import process
from slurm_affinode.errors import AffinodeError, unwritable
from slurm_affinode.gpu import sampler
from slurm_affinode.gpu.exposition import LastSweep
from slurm_affinode.gpu.interface import GpuDriver
from slurm_affinode.gpu.serve import Access, MetricsServer
from slurm_affinode.gpu.spool import Spool
from slurm_affinode.model.gpu import Sweep

Say = Callable[[str], None]
CONVERT_TIMEOUT_S = 120.0
LAST_CONVERSION_S = 20.0


@dataclass(frozen=True, slots=True)
class ExporterOptions:
    """What the exporter does."""

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
    """What the process was asked to do; set by signal handlers."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.close_file = threading.Event()


class Converter:
    """Makes Parquet of closed files, one after the other, in a process of its own each."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._waiting: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="parquet", daemon=True)
        self._thread.start()

    def add(self, path: Path) -> None:
        """Convert ``path`` soon. Where that fails it stays a table of text, which can be taken in as well."""
        self._waiting.put(path)

    def close(self) -> None:
        """Wait for what is under way; the rest is done at the next start."""
        self._waiting.put(None)
        self._thread.join(LAST_CONVERSION_S)

    def _work(self) -> None:
        while (path := self._waiting.get()) is not None:
            try:
                process.run(process.of_module("slurm_affinode.history.spool", str(path)), timeout_s=CONVERT_TIMEOUT_S)
            except AffinodeError as error:
                self._say(f"{path.name} stays a table of text: {error}")


class _Rotation:
    """A sink behind the spool: closes its file when that was asked for."""

    def __init__(self, spool: Spool, asked: threading.Event, say: Say) -> None:
        self._spool, self._asked, self._say = spool, asked, say

    def put(self, sweep: Sweep) -> None:
        """Look whether it was asked for."""
        if self._asked.is_set():
            self._asked.clear()
            try:
                self._spool.rotate()
            except OSError as error:
                self._say(f"the open file cannot be closed: {error.strerror}")

    def close(self) -> None:
        """Nothing is left to do."""


def run(options: ExporterOptions, driver: GpuDriver, signals: Signals, *, say: Say) -> None:
    """Sample until ``signals.stop``. Without a driver it waits for one, and says so.

    Raises ``UnreachableError`` where the address or the spool cannot be had, ``InputError`` for bad certificates.
    """
    processes = sampler.ProcessJobs(driver)
    jobs = processes if options.job_map is None else sampler.MappedJobs(options.job_map, processes)
    shown = LastSweep(node=options.node, cluster=options.cluster, stale_s=3 * options.period_s + 5)
    sinks: list[sampler.Sink] = [shown]
    converter = None
    if options.spool is not None:
        converter = Converter(say)
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
