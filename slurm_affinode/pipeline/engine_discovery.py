"""Discovery of inference engines in the jobs of this node, and their scrapes.

A connection changes the process that accepts it, so only announced ports are connected to: listening TCP sockets of a
process that is known as an inference engine by its command line or executable, or that the site names, and ports that
the job names in ``SLURM_AFFINODE_METRICS_PORT``. Such a port is an engine if it responds as one to ``/metrics``. A
process that does not respond in HTTP is probed ``MOST_REFUSALS`` times, in growing intervals, and then never again.

The request is sent by a program with the privileges of that process (``engines.scrape``): it reaches nothing
that the user could not reach, and only its bounded result is read here. A process is held while it is examined, and the
socket must still be its own after the scrape, so that no other program's metrics count for the job. Jobs are those of
cgroups and of slurmstepd; environment variables are the user's, and do not count. Engines in network namespaces of
their own are not found.

A process that is stopped or frozen is not scraped: the request would wake a job that sleeps in place. Nor is a job with
an open journal: a connection that waits would roll its suspension back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from slurm_affinode.base import kernel_text
from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.base.pidfd import PROC, ExhaustedError, Id, Process, own_namespace, processes
from slurm_affinode.base.process import of_module
from slurm_affinode.base.process import run as run_program
from slurm_affinode.base.users import name_of_user
from slurm_affinode.engines import metric_table, scrape
from slurm_affinode.engines.scrape import EngineReading
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.gpu.server_trees import TRUSTED, GpuHolder, ServerPort, ServerTrees, listening, sockets_of
from slurm_affinode.model.gpu import total_mib
from slurm_affinode.suspension.inplace.freezer import LinuxFreezer

VARIABLE = "SLURM_AFFINODE_METRICS_PORT"
"""Environment variable in which a job names ports of engines that their programs do not announce, with commas."""
MOST_PORTS_OF_JOB = 16
MOST_PORTS = 128
MOST_SEARCH_S = 1.0
"""CPU time for the descriptors of one job's processes, of which a user may have thousands."""
AT_ONCE = 4
"""Scrapes at the same time."""
RETRY_S = 300.0
"""How long an engine that fails is still exported as down."""
FIRST_RETRY_S = 1.0
"""How long a port is left alone after a response without metrics, twice as long after each further one.

A server that loads its model, which takes seconds to many minutes, does not respond as an engine yet.
"""
LONGEST_RETRY_S = 4 * 3600.0
MOST_REFUSALS = 4
"""Requests to a process without a response of HTTP after which it is not probed again."""
FIRST_REFUSAL_S = 300.0
"""How long a process is left alone after the first of them, four times as long after each further one."""
PROGRAM_S = scrape.TIMEOUT_S + 5.0
"""Timeout of the program, which needs time to start."""
_MOST_GROUPS = 1024
_MOST_BYTES = 64 << 10
"""Of a command line or an environment that are read."""
_ANNOUNCED, _DEFAULT, _OTHER = range(3)
"""Ranks of ports: in the command line or the environment, the engine's default, other ports of its server."""


@dataclass(frozen=True, slots=True)
class ListeningPort:
    """A listening socket of a job's process."""

    process: Id
    inode: int
    job: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    host: str
    """Address to connect to: that of the socket, or loopback if it listens on all."""
    port: int
    rank: int = _ANNOUNCED
    """Ports with a lower rank are probed first."""

    @property
    def key(self) -> tuple[Id, int]:
        """Identity of the socket as long as the process lives."""
        return self.process, self.inode


@dataclass(frozen=True, slots=True)
class DiscoveredEngine:
    """An engine of a job, at one scrape."""

    reading: EngineReading
    address: str
    job: str
    user: str
    took_s: float | None
    """Duration of the scrape; ``None``: there was none."""
    up: bool | None = True
    """Whether the last scrape succeeded; if not, ``reading`` has no values. ``None``: its server has ended."""


def ports(
    finder: JobFinder,
    *,
    jobs: Collection[int] | None = None,
    programs: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
    proc: Path = PROC,
) -> list[ListeningPort]:
    """Return the announced ports of jobs on this node, each once, bounded for each job and the node.

    ``jobs``: raw IDs of the jobs; ``None``: all. ``programs``: patterns of further servers. ``say`` is called for each
    job with ports beyond the bounds.

    Raises ``ExhaustedError``.
    """
    by_inode: dict[int, ListeningPort] = {}
    spent_s: defaultdict[int, float] = defaultdict(float)
    with contextlib.suppress(OSError):
        sockets, netns = listening(proc=proc), own_namespace("net", proc=proc)
        for process in processes(proc=proc):
            job = finder.of(process)
            if job is None or job.source not in TRUSTED or (jobs is not None and job.job_id not in jobs):
                continue
            if spent_s[job.job_id] > MOST_SEARCH_S:
                continue
            began_s = time.thread_time()
            for port in _process_ports(process, str(job.job_id), sockets, netns, programs):
                # Workers of a server share its socket.
                if port.inode not in by_inode or port.rank < by_inode[port.inode].rank:
                    by_inode[port.inode] = port
            spent_s[job.job_id] += time.thread_time() - began_s
    of_job: Counter[str] = Counter()
    bounded: list[ListeningPort] = []
    for port in sorted(by_inode.values(), key=lambda port: port.rank):
        of_job[port.job] += 1
        if of_job[port.job] <= MOST_PORTS_OF_JOB and len(bounded) < MOST_PORTS:
            bounded.append(port)
    job_ids = {port.job for port in by_inode.values()} if len(by_inode) > len(bounded) else set()
    for job_id in sorted(job_ids):
        count = sum(port.job == job_id for port in bounded)
        if count < of_job[job_id]:
            say(f"job {job_id}: {of_job[job_id]} ports of model servers, of which {count} are examined")
    return bounded


def _process_ports(
    process: Process, job: str, sockets: Mapping[int, tuple[str, int]], netns: tuple[int, int], programs: Sequence[str]
) -> Iterator[ListeningPort]:
    try:
        announcement = _Announcement.of(process, programs)
        if announcement is None or process.namespace("net") != netns:
            return
        user = _user(process)
        if user is None:
            return
        for inode in sockets_of(process):
            if inode in sockets:
                host, port = sockets[inode]
                rank = announcement.rank(port)
                if rank is not None:
                    yield ListeningPort(process.id, inode, job, *user, host, port, rank)
    except ExhaustedError:
        raise
    except OSError:
        return  # it has ended, or may not be examined


@dataclass(frozen=True, slots=True)
class _Announcement:
    """Ports that a process announces."""

    named: frozenset[int]
    """Ports that the job names."""
    arguments: frozenset[int] = frozenset()
    """Numbers in the command line."""
    defaults: frozenset[int] = frozenset()
    server: bool = False
    """Whether it is known as the server of an engine."""

    @classmethod
    def of(cls, process: Process, programs: Sequence[str]) -> _Announcement | None:
        """Read it; ``None``: nothing is announced. Raises ``OSError``, ``ExhaustedError``."""
        arguments = process.read("cmdline", _MOST_BYTES).decode("utf-8", "replace").rstrip("\0").split("\0")
        names = metric_table.program_names(arguments)
        with contextlib.suppress(OSError):
            names.append(process.link("exe").rpartition("/")[2])
        servers = metric_table.servers_named(names)
        has_ports = any(
            fnmatchcase(name.removesuffix(".py"), pattern.removesuffix(".py")) for name in names for pattern in programs
        )
        named = _named_ports(process)
        if not servers and not has_ports:
            return cls(named) if named else None
        numbers = (kernel_text.number(word.rpartition("=")[2].rpartition(":")[2]) for word in arguments)
        defaults = frozenset(port for engine in servers for port in engine.ports)
        return cls(named, frozenset(number for number in numbers if number), defaults, server=True)

    def rank(self, port: int) -> int | None:
        """Return the rank of a port; ``None``: it must not be connected to."""
        if port in self.named or port in self.arguments:
            return _ANNOUNCED
        if port in self.defaults:
            return _DEFAULT
        return _OTHER if self.server else None


def _named_ports(process: Process) -> frozenset[int]:
    """Return the ports that the environment of a process names. Raises ``ExhaustedError``."""
    try:
        text = process.read("environ", _MOST_BYTES).decode("utf-8", "replace")
    except ExhaustedError:
        raise
    except OSError:
        return frozenset()
    values = [entry.partition("=")[2] for entry in text.split("\0") if entry.startswith(f"{VARIABLE}=")]
    return frozenset(number for value in values for word in value.split(",") if (number := kernel_text.number(word)))


def _user(process: Process) -> tuple[int, int, tuple[int, ...]] | None:
    """Return UID, GID and groups of a process; None for root, and for one that is changing its user."""
    status = process.status()
    uids, gids = (set(kernel_text.numbers(status.get(name, ""))) for name in ("Uid", "Gid"))
    groups = kernel_text.numbers(status.get("Groups", ""))
    if len(uids) != 1 or len(gids) != 1 or 0 in uids or len(groups) > _MOST_GROUPS:
        return None
    return uids.pop(), gids.pop(), groups


def request(port: ListeningPort) -> list[EngineReading]:
    """Scrape a port with the privileges of its user; empty: it responded without metrics of an engine.

    Raises ``AffinodeError`` with the reason if there was no response of HTTP.
    """
    argv = of_module(
        "slurm_affinode.engines.scrape", port.host, str(port.port), str(port.uid), str(port.gid),
        ",".join(map(str, port.groups)),
    )  # fmt: skip
    completion = run_program(argv, timeout_s=PROGRAM_S)
    try:
        return scrape.decode(completion.stdout.strip())
    except (ValueError, RecursionError) as error:
        raise UnreachableError(f"{port.host}:{port.port}: the result of the scrape {error}") from error


def orphaned(trees: ServerTrees, on_gpu: Iterable[GpuHolder]) -> list[DiscoveredEngine]:
    """Return the engines whose server has ended, with the number of their processes and the GPU memory they hold."""
    orphaned_ports: dict[ServerPort, list[GpuHolder]] = {}
    for holder in on_gpu:
        lost = trees.lost(holder.process, holder.job)
        if lost is not None:
            orphaned_ports.setdefault(lost.port, []).append(holder)
    engines = []
    for port, holders in orphaned_ports.items():
        values = {"orphaned_processes": float(len(holders))}
        used = total_mib(holder.used_mib for holder in holders)
        if used is not None:
            values["orphaned_memory_mib"] = used
        engines += [
            DiscoveredEngine(EngineReading(*name, values), port.address, str(port.job), port.user, None, up=None)
            for name in port.engines
        ]
    return engines


class EngineScraper:
    """Finds and scrapes the engines of this node, round by round."""

    def __init__(
        self,
        finder: JobFinder,
        *,
        say: Callable[[str], None],
        list_ports: Callable[[], Sequence[ListeningPort]] | None = None,
        send: Callable[[ListeningPort], list[EngineReading]] = request,
        suspending: Callable[[], Collection[int]] = tuple,
        programs: Sequence[str] = (),
        now: Callable[[], float] = time.monotonic,
        proc: Path = PROC,
        once: bool = False,
    ) -> None:
        """``once``: do not scrape a port again that has responded as an engine. ``list_ports``, ``send``: for tests.

        ``suspending``: returns the raw IDs of jobs that must not be probed now. Raises ``AffinodeError``: unknown.
        ``programs``: see ``ports``.
        """
        self._once = once
        self._reported: set[str] = set()
        self._list_ports = list_ports or (lambda: ports(finder, programs=programs, say=self._say_once, proc=proc))
        self._say, self._send, self._suspending, self._now, self._proc = say, send, suspending, now, proc
        self._freezer = LinuxFreezer(proc=proc)
        self._quiet: dict[tuple[Id, int], tuple[float, float]] = {}
        """Port -> time from which it is scraped again, and how long it was left alone."""
        self._refusals: dict[Id, tuple[float, int]] = {}
        """Process -> time from which ports that are no known engines are probed, and the number of refusals."""
        self._discovered: dict[tuple[Id, int], tuple[float, ListeningPort, list[DiscoveredEngine]]] = {}
        """Port -> time of its last good scrape, and its engines then."""
        self._proven: set[tuple[Id, int]] = set()
        """Ports that have responded as engines at any time."""
        self._failing = False

    def round(self) -> list[DiscoveredEngine]:
        """Scrape the ports of all processes that run once; return the engines."""
        try:
            engines = self._scrape(self._list_ports())
        except AffinodeError as error:
            if not self._failing:
                self._say(f"engines are not searched for: {error}")
            self._failing = True
            return []
        self._failing = False
        return engines

    def _say_once(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._say(text)

    def _scrape(self, listening_ports: Sequence[ListeningPort]) -> list[DiscoveredEngine]:
        """Scrape these ports. Raises ``ExhaustedError``."""
        keys = {port.key for port in listening_ports}
        self._quiet = {key: pause for key, pause in self._quiet.items() if key in keys}
        self._discovered = {key: last for key, last in self._discovered.items() if key in keys}
        self._proven &= keys
        self._refusals = {process: refusals for process, refusals in self._refusals.items() if self._lives(process)}
        due, waiting = self._due(listening_ports)
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="engines") as pool:
            engines = [engine for of_port in pool.map(self._scrape_port, due) for engine in of_port]
        return engines + [engine for port in waiting for engine in self._down(port, None)]

    def _due(self, listening_ports: Sequence[ListeningPort]) -> tuple[list[ListeningPort], list[ListeningPort]]:
        """Return the ports to scrape now, at most one of a process that is no engine, and failing engines to wait for.

        Ports that were left alone for the shortest time come first, of these the announced ones.
        """
        now = self._now()
        due: list[ListeningPort] = []
        waiting: list[ListeningPort] = []
        serving = {process for process, _ in self._proven}
        probed: set[Id] = set()
        for port in sorted(listening_ports, key=lambda port: (self._quiet.get(port.key, (0.0, 0.0))[1], port.rank)):
            is_known, paused = port.key in self._discovered, self._quiet.get(port.key, (now, 0.0))[0] > now
            if is_known and self._once:
                continue
            if paused:
                waiting += [port] * is_known
            elif port.key in self._proven:
                due.append(port)
            elif port.process not in probed and (port.rank == _ANNOUNCED or port.process not in serving):
                refused_until, refusals = self._refusals.get(port.process, (now, 0))
                if refused_until <= now and refusals < MOST_REFUSALS:
                    probed.add(port.process)
                    due.append(port)
        return due, waiting

    def servers(self) -> list[ServerPort]:
        """Return the ports of the last round that have responded as engines, also if they do not respond now."""
        return [
            ServerPort(
                port.inode, int(port.job), port.port, engines[0].address, engines[0].user,
                tuple((engine.reading.engine, engine.reading.model, engine.reading.rank) for engine in engines),
            )
            for _, port, engines in self._discovered.values()
        ]  # fmt: skip

    def _scrape_port(self, port: ListeningPort) -> list[DiscoveredEngine]:
        if int(port.job) in self._suspending() or not self._runs(port.process):
            return []
        started = time.monotonic()
        responded, readings = True, list[EngineReading]()
        try:
            readings = self._send(port)
        except AffinodeError:
            responded = False
        took_s = time.monotonic() - started
        if not responded and port.key not in self._proven:
            _, refusals = self._refusals.get(port.process, (0.0, 0))
            pause_s = min(LONGEST_RETRY_S, FIRST_REFUSAL_S * 4**refusals)
            self._refusals[port.process] = self._now() + pause_s, refusals + 1
        if not self._still_there(port):
            return []
        if readings:
            name = f"[{port.host}]" if ":" in port.host else port.host
            address, user = f"{name}:{port.port}", _name_of(port.uid)
            engines = [DiscoveredEngine(reading, address, port.job, user, took_s) for reading in readings]
            self._discovered[port.key] = self._now(), port, engines
            self._proven.add(port.key)
            self._quiet.pop(port.key, None)
            return engines
        _, pause_s = self._quiet.get(port.key, (0.0, 0.0))
        pause_s = min(LONGEST_RETRY_S, max(FIRST_RETRY_S, 2 * pause_s))
        self._quiet[port.key] = self._now() + pause_s, pause_s
        return self._down(port, took_s)

    def _down(self, port: ListeningPort, took_s: float | None) -> list[DiscoveredEngine]:
        """Return the engines of a port that does not respond; none once that has lasted for ``RETRY_S``."""
        last, _, engines = self._discovered.get(port.key, (float("-inf"), port, []))
        if self._now() - last > RETRY_S:
            self._discovered.pop(port.key, None)
            return []
        return [
            replace(engine, reading=replace(engine.reading, values={}, buckets={}), took_s=took_s, up=False)
            for engine in engines
        ]  # fmt: skip

    def _lives(self, process: Id) -> bool:
        """Return whether a process has not ended."""
        try:
            with Process(process.pid, started=process.started, proc=self._proc) as process_fd:
                return not process_fd.ended()
        except ExhaustedError:
            return True
        except OSError:
            return False

    def _runs(self, process: Id) -> bool:
        """Return whether a process has not ended and is neither stopped nor frozen."""
        try:
            with Process(process.pid, started=process.started, proc=self._proc) as process_fd:
                return (
                    not self._freezer.is_stopped_by_slurm(process_fd.pid) and not process_fd.ended()
                )  # not ended: the PID was its own
        except OSError:
            return False

    def _still_there(self, port: ListeningPort) -> bool:
        """Return whether the process still holds the socket: otherwise another program may have responded."""
        try:
            with Process(port.process.pid, started=port.process.started, proc=self._proc) as process_fd:
                return port.inode in sockets_of(process_fd)
        except OSError:
            return False

    def run(self, put: Callable[[list[DiscoveredEngine]], None], *, period_s: float, stop: threading.Event) -> None:
        """Pass the engines of a round to ``put`` every ``period_s`` seconds until ``stop`` is set."""
        while not stop.is_set():
            started = time.monotonic()
            put(self.round())
            stop.wait(max(1.0, period_s - (time.monotonic() - started)))


@lru_cache(maxsize=1024)
def _name_of(uid: int) -> str:
    return name_of_user(uid)
