"""The exporter: samples the GPUs of this node, serves the metrics over HTTP, and keeps the samples in a spool."""

from __future__ import annotations

import math
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from slurm_affinode.base import extras, process
from slurm_affinode.base.errors import AffinodeError, unwritable
from slurm_affinode.base.pidfd import ExhaustedError
from slurm_affinode.engines import metric_table
from slurm_affinode.gpu import sampler
from slurm_affinode.gpu.exporter import Access, LastSweep, MetricsServer
from slurm_affinode.gpu.interface import GpuDriver, GpuError
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.gpu.sampler import Spool
from slurm_affinode.gpu.server_trees import GpuHolder, ServerTrees, holders
from slurm_affinode.model.gpu import Sweep
from slurm_affinode.pipeline.engine_discovery import DiscoveredEngine, EngineScraper, orphaned
from slurm_affinode.suspension.records.journal import Journal

Say = Callable[[str], None]
CONVERT_TIMEOUT_S = 120.0
LAST_CONVERSION_S = 20.0
LAST_ROUND_S = 10.0
MOST_PROCESS_PERIOD_S = 15.0
"""Longest interval at which processes are read: one that starts and loses its server in between is not observed."""


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
    serving_s: float | None = None
    """Scrape interval of engines in jobs; ``None``: they are not searched for."""
    server_programs: Sequence[str] = ()
    """Patterns of programs that are searched for engines, in addition to the known ones."""
    agent: AgentMetrics | None = None
    """Metrics of the agent on this node, which are exported as well."""
    journal: Path | None = None
    """Journal of the agent on this node: a job that it suspends is not scraped."""


class LastEngines(Collector):
    """Provides the engines of the last round to a registry, unless it is older than ``stale_s``."""

    def __init__(
        self, *, node: str, cluster: str | None, stale_s: float, gpus: Callable[[], Mapping[str, Sequence[str]]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """``gpus`` returns the UUIDs of the GPUs of each job."""
        self._node, self._cluster, self._stale_s, self._gpus, self._now = node, cluster, stale_s, gpus, now
        self._last: tuple[float, list[DiscoveredEngine]] = (float("-inf"), [])

    def put(self, engines: list[DiscoveredEngine]) -> None:
        """Replace the engines."""
        self._last = (self._now(), engines)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
        scraped_at, engines = self._last
        if self._now() - scraped_at > self._stale_s:
            return
        gpus = self._gpus()
        # A user may serve two engines with the same labels: each series may occur once.
        labelled = {
            tuple(sorted(labels.items())): (engine, labels)
            for engine in engines
            if (labels := self._labels(engine, gpus))
        }
        up = Metric(metric_table.EXPORTED_UP, "Whether the last scrape of the engine succeeded.", "gauge")
        fields: dict[str, Metric] = {}
        for engine, labels in labelled.values():
            if engine.up is not None:
                up.add_sample(up.name, labels, float(engine.up))
            values = (
                dict(engine.reading.values)
                if engine.took_s is None
                else {**engine.reading.values, "scrape_s": engine.took_s}
            )
            for field_name, value in values.items():
                name = metric_table.exported_name(field_name)
                kind = "counter" if field_name in metric_table.COUNTERS else "gauge"
                metric = fields.setdefault(
                    field_name, Metric(name.removesuffix("_total"), f"Column {field_name} of engine samples.", kind)
                )
                metric.add_sample(name, labels, value)
            for field_name, buckets in engine.reading.buckets.items():
                text = f"Column {field_name} of engine samples, of requests that ended."
                metric = fields.setdefault(field_name, Metric(metric_table.EXPORTED + field_name, text, "histogram"))
                for bound, count in buckets:
                    metric.add_sample(
                        f"{metric.name}_bucket", {**labels, "le": "+Inf" if bound == math.inf else str(bound)}, count
                    )
        if up.samples:
            yield up
        yield from fields.values()

    def _labels(self, engine: DiscoveredEngine, gpus: Mapping[str, Sequence[str]]) -> dict[str, str]:
        labels = {
            "engine": engine.reading.engine, "model": engine.reading.model, "rank": engine.reading.rank,
            "address": engine.address, "Hostname": self._node, "cluster": self._cluster, "hpc_job": engine.job,
            "user": engine.user, "gpus": ",".join(gpus.get(engine.job, ())) or None,
        }  # fmt: skip
        return {name: text for name, text in labels.items() if text is not None}


AGENT_UP = "slurm_affinode_agent_up"
AGENT_SCRAPE_S = "slurm_affinode_agent_scrape_duration_seconds"
AGENT_TIMEOUT_S = 3.0
"""Shorter than the scrape timeouts in use, so that a hanging agent does not hide the GPUs."""
_AGENT_METRIC = re.compile(r"slurm_affinode_agent_[a-z_]+")
_AGENT_LABEL = re.compile(r"[a-z_]+")
AskAgent = Callable[[], Mapping[str, Any]]
"""Requests the metrics of the agent (``agent.client``). Raises ``AffinodeError``."""


class AgentMetrics(Collector):
    """Provides the agent's metrics to a registry.

    A node without the agent's directory has no agent, and no metrics of one. If an agent does not respond, its metrics
    are absent and ``AGENT_UP`` is 0.
    """

    def __init__(self, run_dir: Path, ask: AskAgent, *, node: str, cluster: str | None) -> None:
        """``run_dir``: directory with the agent's sockets. ``ask`` requests the metrics."""
        self._run_dir, self._ask = run_dir, ask
        self._labels = {"Hostname": node} | ({} if cluster is None else {"cluster": cluster})

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
        if not self._run_dir.is_dir():
            return
        began, families = time.monotonic(), []
        try:
            families = list(self._families(self._ask()))
            up = 1.0
        except (AffinodeError, ValueError):
            up = 0.0
        yield self._gauge(AGENT_UP, "Whether the agent has responded to this scrape", up)
        yield self._gauge(AGENT_SCRAPE_S, "Time that the agent took to respond", time.monotonic() - began)
        yield from families

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        metric = Metric(name, text, "gauge")
        metric.add_sample(name, self._labels, value)
        return metric

    def _families(self, reply: Mapping[str, Any]) -> Iterator[Metric]:
        """Yield the metrics in a reply. Raises ``ValueError`` if it has another form."""
        try:
            for family in reply["metrics"]:
                name, kind = family["name"], family["kind"]
                if not _AGENT_METRIC.fullmatch(name) or kind not in ("counter", "gauge"):
                    raise ValueError(f"{name!r:.80} is not a metric of an agent")
                metric = Metric(name.removesuffix("_total"), str(family["help"]), kind)
                for labels, value in family["samples"]:
                    number = float(value)
                    if not math.isfinite(number) or not all(map(_AGENT_LABEL.fullmatch, labels)):
                        raise ValueError(f"a sample of {name} is not valid")
                    texts = {label: str(text) for label, text in labels.items()}
                    metric.add_sample(name, texts | self._labels, number)
                yield metric
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the reply of the agent has another form: {error}") from None


class ProcessesOnGpus:
    """A sink that reads the processes of jobs on the GPUs, at most every ``period_s`` seconds.

    The driver is used in the thread of the sampler only.
    """

    def __init__(
        self, driver: GpuDriver, finder: JobFinder, *, period_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._driver, self._finder, self._period_s, self._now = driver, finder, period_s, now
        self._read = float("-inf")
        self.last: Sequence[GpuHolder] | None = None
        """The processes; ``None``: unknown."""

    def put(self, sweep: Sweep) -> None:
        """Read the processes if it is time to."""
        if self._now() - self._read < self._period_s:
            return
        self._read = self._now()
        try:
            self.last = holders(self._driver, self._finder) if sweep.driver_error is None else None
        except (GpuError, ExhaustedError):
            self.last = None

    def close(self) -> None:
        """Forget the processes."""
        self.last = None


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

    def __init__(self, spool: Spool, dump_requested: threading.Event, say: Say) -> None:
        self._spool, self._dump_requested, self._say = spool, dump_requested, say

    def put(self, sweep: Sweep) -> None:
        """Rotate the file if that was requested."""
        if self._dump_requested.is_set():
            self._dump_requested.clear()
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
        if extras.missing():
            say(f"files of the spool stay tables of text: Parquet needs the extra analysis; {extras.INSTALL}")
        else:
            converter = SpoolConverter(say)
        closed = (lambda _: None) if converter is None else converter.add
        try:
            spool = Spool(options.spool, node=options.node, cluster=options.cluster, file_s=options.spool_file_s,
                          keep_s=options.spool_keep_s, closed=closed, say=say)  # fmt: skip
        except OSError as error:
            raise unwritable(options.spool, error) from error
        sinks += [spool, _Rotation(spool, signals.close_file, say)]
    registry = CollectorRegistry()
    registry.register(shown)
    if options.agent is not None:
        registry.register(options.agent)
    scraping = None
    if options.serving_s is not None:
        finder = JobFinder()
        on_gpus = ProcessesOnGpus(driver, finder, period_s=min(options.serving_s, MOST_PROCESS_PERIOD_S))
        sinks.append(on_gpus)
        scraping = _search_engines(options, registry, shown, on_gpus, finder, signals, say)
    ProcessCollector(registry=registry)
    server = MetricsServer(registry, options.host, options.port, options.access)
    say(f"{options.node}: a sample every {options.period_s:g} s, metrics at {options.host}:{server.port}/metrics")
    try:
        sampler.run(sampler.Sampler(driver, jobs), sinks, period_s=options.period_s, stop=signals.stop, say=say)
    finally:
        server.close()
        driver.close()
        if scraping is not None:
            scraping.join(LAST_ROUND_S)
        if converter is not None:
            converter.close()


def _search_engines(  # noqa: PLR0917
    options: ExporterOptions, registry: CollectorRegistry, shown: LastSweep, on_gpus: ProcessesOnGpus,
    finder: JobFinder, signals: Signals, say: Say,
) -> threading.Thread:  # fmt: skip
    """Start the search for engines in a thread of its own, so that a slow engine delays no GPU sample."""
    period_s = options.serving_s or 0.0
    last = LastEngines(
        node=options.node, cluster=options.cluster, stale_s=3 * period_s + 60, gpus=shown.gpus
    )  # fmt: skip
    registry.register(last)
    suspending = tuple if options.journal is None else Journal(options.journal).open_jobs
    scraper = EngineScraper(finder, say=say, suspending=suspending, programs=options.server_programs)
    trees = ServerTrees(finder)

    def put(engines: list[DiscoveredEngine]) -> None:
        last_sweep = on_gpus.last
        if last_sweep is not None:
            try:
                trees.update(scraper.servers(), last_sweep)
                engines = [*engines, *orphaned(trees, last_sweep)]
            except ExhaustedError as error:
                say(f"orphaned engines are not searched for: {error}")
        last.put(engines)

    thread = threading.Thread(
        target=scraper.run, args=(put,), kwargs={"period_s": period_s, "stop": signals.stop}, name="engines",
        daemon=True,
    )  # fmt: skip
    thread.start()
    return thread
