"""Discovery of inference engines in the jobs of this node, and their scrapes.

An engine is found by a listening TCP socket that a process of a job holds, and by the response to ``/metrics``. The
request is sent by a program with the privileges of that process (``metrics.serving.scrape``): it reaches nothing that
the user could not reach, and only its bounded result is read here. A process is held while it is examined, and the
socket must still be its own after the scrape, so that no other program's metrics count for the job. Jobs are those of
cgroups and of slurmstepd; environment variables are the user's, and do not count. Engines in network namespaces of
their own are not found.

A process that is stopped or frozen is not scraped: the request would wake a job that sleeps in place.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from slurm_affinode.base import kernel_text, process
from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.base.pidfd import PROC, ExhaustedError, Id, Process, own_namespace, processes
from slurm_affinode.base.users import name_of_user
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.gpu.server_trees import TRUSTED, GpuHolder, ServerPort, ServerTrees, listening, sockets_of
from slurm_affinode.metrics.serving import scrape
from slurm_affinode.metrics.serving.scrape import EngineReading
from slurm_affinode.model.gpu import total_mib
from slurm_affinode.suspension.inplace.freezer import LinuxFreezer

MOST_PORTS_OF_JOB = 8
MOST_PORTS = 64
MOST_SEARCH_S = 1.0
"""CPU time for the descriptors of one job's processes, of which a user may have thousands."""
AT_ONCE = 4
"""Scrapes at the same time."""
RETRY_S = 300.0
"""How long a port that has no engine is left alone at most, and an engine that fails is still exported as down."""
FIRST_RETRY_S = 1.0
"""How long a port is left alone after its first request, twice as long after each further one.

A server that loads its model, which takes seconds to many minutes, does not respond as an engine yet.
"""
PROGRAM_S = scrape.TIMEOUT_S + 5.0
"""Timeout of the program, which needs time to start."""
_MOST_GROUPS = 1024


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

    @property
    def key(self) -> tuple[Id, int]:
        """Identity of the socket as long as the process lives."""
        return self.process, self.inode


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """An engine of a job, at one scrape."""

    reading: EngineReading
    address: str
    job: str
    user: str
    took_s: float | None
    """Duration of the scrape; ``None``: there was none."""
    up: bool | None = True
    """Whether the last scrape succeeded; if not, ``reading`` has no values. ``None``: its server has ended."""


def ports(finder: JobFinder, *, jobs: Collection[int] | None = None, proc: Path = PROC) -> list[ListeningPort]:
    """Return the listening ports of jobs on this node, each once, bounded for each job and the node.

    ``jobs``: raw IDs of the jobs; ``None``: all.

    Raises ``ExhaustedError``.
    """
    found: dict[int, ListeningPort] = {}
    of_job: Counter[str] = Counter()
    spent_s: defaultdict[int, float] = defaultdict(float)
    with contextlib.suppress(OSError):
        sockets, here = listening(proc=proc), own_namespace("net", proc=proc)
        for one in processes(proc=proc):
            job = finder.of(one)
            if job is None or job.source not in TRUSTED or (jobs is not None and job.job_id not in jobs):
                continue
            if spent_s[job.job_id] > MOST_SEARCH_S:
                continue
            began_s = time.thread_time()
            for port in _of_process(one, str(job.job_id), sockets, here):
                # Workers of a server share its socket.
                if port.inode not in found and of_job[port.job] < MOST_PORTS_OF_JOB and len(found) < MOST_PORTS:
                    found[port.inode] = port
                    of_job[port.job] += 1
            spent_s[job.job_id] += time.thread_time() - began_s
    return list(found.values())


def _of_process(
    one: Process, job: str, sockets: Mapping[int, tuple[str, int]], here: tuple[int, int]
) -> Iterator[ListeningPort]:
    try:
        if one.namespace("net") != here:
            return
        user = _user(one)
        if user is None:
            return
        for inode in sockets_of(one):
            if inode in sockets:
                host, port = sockets[inode]
                yield ListeningPort(one.id, inode, job, *user, host, port)
    except ExhaustedError:
        raise
    except OSError:
        return  # it has ended, or may not be examined


def _user(one: Process) -> tuple[int, int, tuple[int, ...]] | None:
    """Return UID, GID and groups of a process; None for root, and for one that is changing its user."""
    status = one.status()
    uids, gids = (set(kernel_text.numbers(status.get(name, ""))) for name in ("Uid", "Gid"))
    groups = kernel_text.numbers(status.get("Groups", ""))
    if len(uids) != 1 or len(gids) != 1 or 0 in uids or len(groups) > _MOST_GROUPS:
        return None
    return uids.pop(), gids.pop(), groups


def request(port: ListeningPort) -> list[EngineReading]:
    """Scrape a port with the privileges of its user. Raises ``UnreachableError`` with the reason."""
    argv = process.of_module(
        "slurm_affinode.metrics.serving.scrape", port.host, str(port.port), str(port.uid), str(port.gid),
        ",".join(map(str, port.groups)),
    )  # fmt: skip
    done = process.run(argv, timeout_s=PROGRAM_S)
    try:
        return scrape.decode(done.stdout.strip())
    except (ValueError, RecursionError) as error:
        raise UnreachableError(f"{port.host}:{port.port}: the result of the scrape {error}") from error


def orphaned(trees: ServerTrees, on_gpu: Iterable[GpuHolder]) -> list[FoundEngine]:
    """Return the engines whose server has ended, with the number of their processes and the GPU memory they hold."""
    left: dict[ServerPort, list[GpuHolder]] = {}
    for holder in on_gpu:
        lost = trees.lost(holder.process, holder.job)
        if lost is not None:
            left.setdefault(lost.port, []).append(holder)
    found = []
    for port, holders in left.items():
        values = {"orphaned_processes": float(len(holders))}
        used = total_mib(holder.used_mib for holder in holders)
        if used is not None:
            values["orphaned_memory_mib"] = used
        found += [
            FoundEngine(EngineReading(*name, values), port.address, str(port.job), port.user, None, up=None)
            for name in port.engines
        ]
    return found


class EngineScraper:
    """Finds and scrapes the engines of this node, round by round."""

    def __init__(
        self,
        finder: JobFinder,
        *,
        say: Callable[[str], None],
        look: Callable[[], Sequence[ListeningPort]] | None = None,
        send: Callable[[ListeningPort], list[EngineReading]] = request,
        now: Callable[[], float] = time.monotonic,
        proc: Path = PROC,
        once: bool = False,
    ) -> None:
        """``once``: do not scrape a port again that has responded as an engine. ``look``, ``send``: for tests."""
        self._once = once
        self._look = look or (lambda: ports(finder, proc=proc))
        self._say, self._send, self._now, self._proc = say, send, now, proc
        self._freezer = LinuxFreezer(proc=proc)
        self._quiet: dict[tuple[Id, int], tuple[float, float]] = {}
        """Port without an engine -> time from which it is scraped again, and how long it was left alone."""
        self._known: dict[tuple[Id, int], tuple[float, ListeningPort, list[FoundEngine]]] = {}
        """Port -> time of its last good scrape, and its engines then."""
        self._failing = False

    def round(self) -> list[FoundEngine]:
        """Scrape the ports of all processes that run once; return the engines."""
        try:
            found = self._found(self._look())
        except AffinodeError as error:
            if not self._failing:
                self._say(f"engines are not searched for: {error}")
            self._failing = True
            return []
        self._failing = False
        return found

    def _found(self, there: Sequence[ListeningPort]) -> list[FoundEngine]:
        """Scrape these ports. Raises ``ExhaustedError``."""
        keys = {port.key for port in there}
        self._quiet = {key: one for key, one in self._quiet.items() if key in keys}
        self._known = {key: one for key, one in self._known.items() if key in keys}
        done = self._known if self._once else ()
        now, due = self._now(), (0.0, 0.0)
        wanted = [port for port in there if self._quiet.get(port.key, due)[0] <= now and port.key not in done]
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="engines") as pool:
            return [engine for found in pool.map(self._one, wanted) for engine in found]

    def servers(self) -> list[ServerPort]:
        """Return the ports of the last round that have responded as engines, also if they do not respond now."""
        return [
            ServerPort(
                port.inode, int(port.job), port.port, engines[0].address, engines[0].user,
                tuple((one.reading.engine, one.reading.model, one.reading.rank) for one in engines),
            )
            for _, port, engines in self._known.values()
        ]  # fmt: skip

    def _one(self, port: ListeningPort) -> list[FoundEngine]:
        if not self._runs(port.process):
            return []
        started = time.monotonic()
        try:
            readings = self._send(port)
        except AffinodeError:
            readings = []
        took_s = time.monotonic() - started
        if not self._still_there(port):
            return []
        if readings:
            name = f"[{port.host}]" if ":" in port.host else port.host
            engines = [
                FoundEngine(one, f"{name}:{port.port}", port.job, _name_of(port.uid), took_s) for one in readings
            ]
            self._known[port.key] = self._now(), port, engines
            self._quiet.pop(port.key, None)
            return engines
        last, _, engines = self._known.get(port.key, (float("-inf"), port, []))
        if self._now() - last > RETRY_S:
            self._known.pop(port.key, None)
            _, pause_s = self._quiet.get(port.key, (0.0, 0.0))
            pause_s = min(RETRY_S, max(FIRST_RETRY_S, 2 * pause_s))
            self._quiet[port.key] = self._now() + pause_s, pause_s
            return []
        return [
            replace(one, reading=replace(one.reading, values={}, buckets={}), took_s=took_s, up=False)
            for one in engines
        ]

    def _runs(self, process: Id) -> bool:
        """Return whether a process has not ended and is neither stopped nor frozen."""
        try:
            with Process(process.pid, started=process.started, proc=self._proc) as one:
                return not self._freezer.held(one.pid) and not one.ended()  # not ended: the PID was its own
        except OSError:
            return False

    def _still_there(self, port: ListeningPort) -> bool:
        """Return whether the process still holds the socket: otherwise another program may have responded."""
        try:
            with Process(port.process.pid, started=port.process.started, proc=self._proc) as one:
                return port.inode in sockets_of(one)
        except OSError:
            return False

    def run(self, put: Callable[[list[FoundEngine]], None], *, period_s: float, stop: threading.Event) -> None:
        """Pass the engines of a round to ``put`` every ``period_s`` seconds until ``stop`` is set."""
        while not stop.is_set():
            started = time.monotonic()
            put(self.round())
            stop.wait(max(1.0, period_s - (time.monotonic() - started)))


@lru_cache(maxsize=1024)
def _name_of(uid: int) -> str:
    return name_of_user(uid)
