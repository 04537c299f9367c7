"""Assembly of the node daemon: sockets, loop and workers, and the order in which they start and stop."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

from slurm_affinode import __version__
from slurm_affinode.agent import settings
from slurm_affinode.agent.admin_comments import AdminComments
from slurm_affinode.agent.arrivals import Arrivals
from slurm_affinode.agent.client import CONTROL
from slurm_affinode.agent.control import ControlServer
from slurm_affinode.agent.hook_records import GpuNumbers, LeftoverReports
from slurm_affinode.agent.listeners import prepare_directory
from slurm_affinode.agent.loop import Loop, period_of, run
from slurm_affinode.agent.orphan_requests import OrphanVerbs
from slurm_affinode.agent.orphans import Orphans
from slurm_affinode.agent.reload import reload
from slurm_affinode.agent.requests import Admins
from slurm_affinode.agent.service import Service
from slurm_affinode.agent.shepherd_server import ShepherdServer
from slurm_affinode.agent.systemd import notify
from slurm_affinode.agent.workers import Work
from slurm_affinode.base import process
from slurm_affinode.base.config import Config, policy_path
from slurm_affinode.base.fork_server import Starter
from slurm_affinode.base.node_config import listen_address
from slurm_affinode.base.pidfd import ExhaustedError
from slurm_affinode.base.threads import Workers, WorkQueue, surviving
from slurm_affinode.base.times import parse_span_s
from slurm_affinode.base.users import name_of_user
from slurm_affinode.checkpoint.image.manifest import load_key
from slurm_affinode.checkpoint.image.signatures import Signer
from slurm_affinode.gpu.interface import GpuDriver, GpuError
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.gpu.server_trees import ServerTrees, holders
from slurm_affinode.model.suspension import Mode, SuspendOption
from slurm_affinode.pipeline.engine_discovery import EngineScraper, ports
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.suspension import metrics
from slurm_affinode.suspension.activity import Watch, by_index
from slurm_affinode.suspension.interface import AgentContext, DaemonCalls, Orchestration
from slurm_affinode.suspension.job.announcements import DIRECTORY, Announcements
from slurm_affinode.suspension.job.peers import Identity, Inspector, Peer
from slurm_affinode.suspension.job.registry import Registry
from slurm_affinode.suspension.records.journal import Journal
from slurm_affinode.suspension.records.promises import Promises
from slurm_affinode.suspension.slurm_queue import QueueView, SlurmQueue

log = logging.getLogger(__name__)

CALL_S = 5.0
"""Timeout for slurmctld and the driver while a status request waits; it is then answered from the data at hand."""
NEXT_CALL_S = 0.5
"""Timeout after the previous call has timed out, so that many requests in the meantime still get a reply."""
ENDED_AT_ONCE = 4
"""Number of ended jobs whose checkpoint images are cleaned up at the same time."""
STOP_S = 20.0
"""Timeout for work under way when the agent is stopped. The journal covers the rest."""


@dataclass(frozen=True, slots=True)
class DaemonParts:
    """Components that are passed to the daemon."""

    driver: Callable[[], GpuDriver]
    slurm: Callable[[], SlurmClient]
    orchestration: Callable[[AgentContext], Orchestration]
    identify: Callable[[Peer], Identity] | None = None
    """Used instead of reading ``/proc``."""
    read_config: Callable[[], Config] | None = None
    """Reads the configuration again, with the options of the command; ``None``: it cannot be reloaded."""


class Daemon:
    """One agent. Call ``start``, then ``run`` in the main thread, then ``stop``."""

    def __init__(self, config: Config, parts: DaemonParts) -> None:
        """Raises ``AffinodeError`` if a socket cannot be opened or the orchestration cannot be set up."""
        self.config = config
        self.node = settings.node_name(config)
        self.registry = Registry()
        self.counters = metrics.agent_counters(__version__, time.time())
        slurm = metrics.counted(parts.slurm, self.counters)
        self.stopping = threading.Event()
        self._read_config = parts.read_config
        self._reload_requested = threading.Event()
        self._poke = threading.Event()
        self.workers = Workers()
        self._slurm = self.workers.queue("slurm", last=True)
        self._aside = self.workers.queue("aside", last=True)
        self._rounds = self.workers.queue("waker")
        self._searches = self.workers.queue("servers")
        self._reloads = self.workers.queue("reload")
        self._uses = self.workers.queue("uses")
        self._slurm_calls = BoundedCalls(self._slurm)
        self.announcements = Announcements(config.agent.run_dir / DIRECTORY)
        inspector = Inspector(announcements=self.announcements, shepherd=config.suspend.shepherd)
        self.watch = Watch(parts.driver(), inspector)
        self.queue = QueueView(slurm, parse_span_s(config.agent.queue_period))
        prepare_directory(config.agent.run_dir)
        self.servers = ServerDiscovery(
            self.watch.driver, self.registry, suspending=Journal(config.suspend.journal).open_jobs,
            programs=config.agent.server_programs,
        )  # fmt: skip
        indices = GpuNumbers(config.agent.run_dir / "gpus.json")
        calls = DaemonCalls(self._idle_s, self._woken, self._poke.set, self._gpus_of, self._turn_left_s)
        context = AgentContext(
            config, self.node, self.registry, slurm, self.watch.driver, self.workers, indices, calls, self.counters
        )  # fmt: skip
        self.orchestration = parts.orchestration(context)
        self.work = Work(
            self.orchestration, self.workers, config.suspend.max_at_once, changed=self._changed, counters=self.counters
        )  # fmt: skip
        self.loop = Loop(
            config=config.agent, policy=settings.policy(config.suspend, config.inplace), node=self.node,
            registry=self.registry, watch=self.watch, queue=self.queue, work=self.work,
            orchestration=self.orchestration,
            promises=_promises(config, self.node), later=self._slurm.post, aside=self._aside.post, gpu_indices=indices,
            answered=self._poke.set,
        )  # fmt: skip
        self.comments = self._admin_comments(parts.driver, indices) if config.agent.admin_comment else None
        self.admins = Admins(config.agent.admins, self.queue.slurm_user, self._slurm.post)
        self.service = Service(
            node=self.node, cluster=config.cluster.name_or_default, registry=self.registry, loop=self.loop,
            work=self.work, orchestration=self.orchestration, is_admin=self.admins, slurm_calls=self._slurm_calls,
            local_calls=BoundedCalls(self._aside), name_of=name_of_user,
            name_calls=BoundedCalls(self.workers.queue("names")), gpu_indices=indices,
            ended_jobs=self.workers.queue("ended", ENDED_AT_ONCE), orphans=self._orphans(),
            comments=self.comments, clear=self.announcements.clear,
            mismatch=self.announcements.mismatch,
            prolog_s=parse_span_s(config.inplace.prolog_timeout) if config.inplace.wake_at_prolog else 0.0,
            counters=self.counters, journal=Journal(config.suspend.journal),
        )  # fmt: skip
        self.arrivals = Arrivals(
            self.registry,
            inspector,
            self.orchestration,
            self.work,
            later=self._slurm.post,
            on_departure=self.service.record_departure,
        )
        run_dir = config.agent.run_dir
        self.shepherds = ShepherdServer(run_dir / "shepherd.sock", self.arrivals, parts.identify or inspector.identify)
        self.control = ControlServer(
            self.service.answer, self.workers, path=run_dir / CONTROL, node=self.node,
            address=listen_address(config.agent.listen) if config.agent.listen else None,
        )  # fmt: skip

    def start(self) -> None:
        """Recover the work of the previous agent, then accept connections."""
        self.announcements.sweep()
        self.orchestration.keeper.recover()
        if self.orchestration.in_place is not None:
            self.orchestration.in_place.start()
        self.shepherds.start()
        self.control.start()
        self._rounds.every(parse_span_s(self.config.suspend.wake_every), self._wake)
        if period_s := parse_span_s(self.config.agent.server_period):
            self._searches.every(period_s, self.servers.search)
        if self.comments is not None:
            self._uses.every(period_of(self.config.agent), self.comments.sample)
        log.info("the agent of %s watches every %g s%s", self.node, period_of(self.config.agent),
                 " (dry run)" if self.config.suspend.dry_run else "")  # fmt: skip

    def run(self) -> None:
        """Sample, decide and act until ``end``."""
        run(
            self._tick,
            self._act,
            period_of(self.config.agent),
            stop=self.stopping,
            poke=self._poke,
            soon=self.loop.full_s,
        )

    def end(self) -> None:
        """Make ``run`` return. Safe to call from a signal handler."""
        self.stopping.set()
        self._poke.set()

    def request_reload(self) -> None:
        """Have the configuration read again. Safe to call from a signal handler."""
        self._reload_requested.set()
        self._poke.set()

    def reload(self) -> None:
        """Read the configuration again, and apply what a running agent takes over; see ``reload``."""
        if self._read_config is not None:
            self.config = reload(self.config, self._read_config, self._apply)

    def _apply(self, config: Config) -> None:
        self.loop.reconfigure(config.agent, settings.policy(config.suspend, config.inplace))
        self.admins.replace(config.agent.admins)

    def stop(self) -> None:
        """Close the sockets, wait a short time for work under way, then release all resources."""
        self.end()
        self._rounds.close()
        self._searches.close()
        self._uses.close()
        self._reloads.close()
        self.control.stop()
        self.work.stop(STOP_S)
        self.orchestration.stop()
        if self.orchestration.in_place is not None:
            self.orchestration.in_place.stop()
        self.shepherds.stop()
        self.workers.close()
        self.queue.close()
        self.watch.close()
        log.info("the agent of %s has ended", self.node)

    def _idle_s(self, job_id: int) -> float | None:
        return self.loop.movable_s(job_id)

    def _turn_left_s(self, job_id: int) -> float | None:
        return self.loop.turn_left_s(job_id)

    def _gpus_of(self, job_id: int) -> list[str] | None:
        """Return the UUIDs of a job's GPUs as the prolog reported them, or ``None`` if not known."""
        indices = self.service.gpu_indices.get(job_id)
        devices = None if indices is None else by_index(self.watch.devices(), indices)
        return None if devices is None else [device.uuid for device in devices]

    def _admin_comments(self, open_driver: Callable[[], GpuDriver], indices: GpuNumbers) -> AdminComments:
        separate = open_driver()

        @contextlib.contextmanager
        def driver() -> Iterator[GpuDriver]:
            with self.watch.driver():  # NVML is called by one thread at a time
                yield separate

        def suspensions(job_id: int) -> int:
            job = self.registry.get(job_id)
            return 0 if job is None else job.suspensions

        rule = settings.idle_rule(self.config.agent, SuspendOption())
        return AdminComments(
            self.node, driver, rule, jobs=indices.snapshot, suspensions=suspensions,
            read_job=self.queue.read_job, later=self.workers.queue("comments").later,
        )  # fmt: skip

    def _orphans(self) -> OrphanVerbs:
        def fresh() -> SlurmQueue | None:
            answer: list[SlurmQueue | None] = []
            self._slurm_calls(lambda: answer.append(self.queue.refresh()))
            return answer[0] if answer else None

        orphans = Orphans(
            self.watch.driver, fresh, self.node, self.servers.finder, servers=self.servers.trees,
            reports=LeftoverReports(self.config.agent.leftovers),
        )  # fmt: skip
        return OrphanVerbs(orphans, policy_path(self.config), self._drain, name_of_user)

    def _drain(self, reason: str) -> bool:
        # Wait for the drain: once the epilog has returned, the next job may start on the node.
        answer: list[bool] = []
        self._slurm_calls(lambda: answer.append(self.queue.drain(self.node, reason)))
        return answer == [True]

    def _tick(self) -> None:
        self._start_reload()
        self.arrivals.sweep()
        self.loop.tick()
        self.counters.add(metrics.SAMPLES)
        self.counters.set(metrics.LAST_SAMPLE, time.time())

    def _act(self) -> None:
        self._start_reload()
        self.loop.act()

    def _start_reload(self) -> None:
        """Start a requested reload in the background: the file may be on a file system that does not respond."""
        if self._reload_requested.is_set():
            self._reload_requested.clear()
            self._reloads.post(_safely, self.reload)

    def _changed(self, job_id: int) -> None:
        self.loop.restart(job_id)
        self._poke.set()

    def _woken(self, job_id: int, result: str, slept_s: float | None) -> None:
        self.counters.add(metrics.WAKES, mode=Mode.INPLACE.value)
        self.work.set_comment(job_id, result)
        self.loop.woken(job_id, slept_s)
        self._changed(job_id)

    def _wake(self) -> None:
        _safely(self.orchestration.waker.tick)
        _safely(self.loop.promises.refresh)  # expired promises are removed even if no job is waiting


class ServerDiscovery:
    """Searches the jobs with processes on GPUs for model servers, and the GPU processes below these.

    Jobs with ``mode=inplace`` are not searched: a request would wake them, or keep them from falling asleep.
    """

    def __init__(
        self, driver: Callable[[], contextlib.AbstractContextManager[GpuDriver]], registry: Registry,
        finder: JobFinder | None = None, *,
        suspending: Callable[[], Collection[int]] = tuple, programs: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.finder = finder or JobFinder()
        self.trees = ServerTrees(self.finder)
        self._driver, self._registry = driver, registry
        self._jobs: frozenset[int] = frozenset()
        self._scraper = EngineScraper(
            self.finder, say=log.warning, list_ports=lambda: ports(self.finder, jobs=self._jobs, programs=programs),
            suspending=suspending, once=True,
        )  # fmt: skip

    def search(self) -> None:
        """Search once. A port that has responded as an engine is not requested again."""
        with contextlib.suppress(GpuError, ExhaustedError):  # reported by the loop, which needs the driver more often
            with self._driver() as driver:
                on_gpu = holders(driver, self.finder)
            in_place = {job.job_id for job in self._registry.jobs() if job.option.mode is Mode.INPLACE}
            self._jobs = frozenset(holder.job for holder in on_gpu) - in_place
            if self._jobs:
                self._scraper.round()
            self.trees.update(self._scraper.servers() if self._jobs else (), on_gpu)


def _promises(config: Config, node: str) -> Promises:
    """Open the promises beside the shared store; each lasts as long as a suspension may take."""
    suspend = config.suspend
    spans = (suspend.lock_timeout, suspend.dump_timeout, suspend.slurm_timeout)
    root = None if suspend.shared_store is None else suspend.shared_store.parent
    # Without a shared store no promise is written for other nodes, so any key will do.
    key = os.urandom(32) if root is None else load_key(suspend.key_file, owner=os.geteuid())
    return Promises(root, config.cluster.name_or_default, Signer(key, node), lasts_s=sum(map(parse_span_s, spans)))


class BoundedCalls:
    """Runs calls in a queue and waits a limited time for each."""

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue
        self._timed_out = False

    def __call__(self, call: Callable[[], None]) -> None:
        """Run a call there. Whether it finished in time is not reported."""
        future = self._queue.submit(_safely, call)
        try:
            future.result(min(CALL_S, NEXT_CALL_S) if self._timed_out else CALL_S)
            self._timed_out = False
        except FutureTimeoutError:
            # Its caller has stopped waiting: while slurmctld does not respond such calls would pile up before the
            # agent's own.
            future.cancel()
            self._timed_out = True
        except CancelledError:  # the agent is stopping
            pass


def _safely(call: Callable[[], None]) -> None:
    with surviving(log, "a call in the background failed"):
        call()


def serve(config: Config, parts: DaemonParts) -> None:
    """Run an agent until SIGTERM or SIGINT; SIGHUP reloads its configuration.

    Raises ``AffinodeError`` if it cannot start.
    """
    starter = Starter()
    process.run_by(starter.run)
    try:
        _serve(config, parts)
    finally:
        process.run_by(None)
        starter.close()


def _serve(config: Config, parts: DaemonParts) -> None:
    daemon = Daemon(config, parts)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: daemon.end())
    signal.signal(signal.SIGHUP, lambda *_: daemon.request_reload())
    daemon.start()
    notify("READY=1")
    try:
        daemon.run()
    finally:
        notify("STOPPING=1")
        daemon.stop()
        daemon.workers.finish()
