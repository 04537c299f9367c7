"""Work on the workers of a Dask cluster: the fold of GPU samples, the diagnosis of model servers.

A range of samples is a task (``kernel.fold_range``). The sums of all ranges are added here, in order, so that the
report is that of a single machine to the last digit. Tasks of a lost worker are run again by others. Results are kept
until the command is complete (``partial_results``).
"""

from __future__ import annotations

import math
import shlex
import shutil
import socket
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from datetime import UTC, datetime, time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from dask import config as dask_config
from dask_jobqueue import SLURMCluster
from distributed import Client, Future
from distributed.client import FutureCancelledError
from distributed.comm import CommClosedError
from distributed.scheduler import KilledWorker
from distributed.security import Security

from slurm_affinode import __version__
from slurm_affinode.analysis.join import kernel, native
from slurm_affinode.analysis.result import Thresholds, Totals
from slurm_affinode.analysis.samples import Index, StoredSamples
from slurm_affinode.analysis.segments import Allocations, Cells
from slurm_affinode.base import compiled
from slurm_affinode.base.config import DaskConfig
from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.base.text import one_line
from slurm_affinode.base.times import parse_span_s
from slurm_affinode.pipeline import partial_results
from slurm_affinode.pipeline.partial_results import PartialResults

SCHEMES = ("tcp://", "tls://")
CONNECT_S = 10.0
FIRST_WORKER_S = 60.0
_DEFAULTS = DaskConfig()
_CHECK_S = 5.0
_AHEAD = 4
"""Tasks per thread of the workers that are queued at once: memory does not grow with the number of samples."""
_ATTEMPTS = 3
"""Of a range, if workers lose its input; a task that a worker's end interrupts is run again by the scheduler."""


@contextmanager
def connected(
    address: str, settings: DaskConfig = _DEFAULTS, state: Path | None = None,
    warned: Callable[[str], None] = lambda line: None,
) -> Iterator[DaskWorkers]:  # fmt: skip
    """Connect to the scheduler at ``address``: ``tcp://HOST:PORT``, ``tls://HOST:PORT``, or ``slurm`` to start one.

    With ``slurm``, the scheduler is in this process, and the workers are jobs of Slurm by ``settings``, with keys in
    the directory ``state``, which the nodes see. Partial results are kept there; ``warned`` gets a line about them.
    Raises ``UnreachableError`` without a scheduler or a worker.
    """
    state_context = nullcontext() if state is None else PartialResults(state / partial_results.DIRECTORY, warned)
    if address == "slurm":
        with (
            _keys(state) as security,
            _jobs(settings, security) as cluster,
            _client(cluster.scheduler_address, security) as client,
            state_context as partial,
        ):

            def submit() -> None:
                # The library does not submit jobs again that have ended (dask-jobqueue, issue 691).
                cluster.scale(0)
                cluster.scale(jobs=settings.jobs)

            submit()
            wait_s = parse_span_s(settings.wait)
            yield _with_worker(DaskWorkers(client, "slurm", wait_s, submit, partial=partial))
        return
    if not address.startswith(SCHEMES):
        raise AffinodeError(f"{address}: not an address of a Dask scheduler", hint="it is tcp://HOST:PORT or slurm")
    with _client(address) as client, state_context as partial:
        yield _with_worker(DaskWorkers(client, address, FIRST_WORKER_S, partial=partial))


class _JobSecurity(Security):  # type: ignore[misc]  # distributed has no types
    """Keys whose paths may contain any character: dask-jobqueue (0.9) puts them into job scripts as they are."""

    def get_tls_config_for_role(self, role: str) -> dict[str, str]:
        """Return the settings of a role; for workers, which are started by a shell, quoted."""
        settings: dict[str, str] = super().get_tls_config_for_role(role)
        return {name: shlex.quote(value) for name, value in settings.items()} if role == "worker" else settings


@contextmanager
def _keys(shared: Path | None) -> Iterator[Security]:
    """Make keys for one scheduler and its workers, in files that their owner alone can read.

    A client of a scheduler can run any program as its workers: only holders of these keys are admitted.
    """
    credentials = Security.temporary()
    with TemporaryDirectory(prefix="dask-", dir=shared) as directory:
        paths = {}
        for name, text in (
            ("ca", credentials.tls_ca_file), ("cert", credentials.tls_scheduler_cert),
            ("key", credentials.tls_scheduler_key)
        ):  # fmt: skip
            paths[name] = Path(directory) / f"{name}.pem"
            paths[name].touch(mode=0o600)
            paths[name].write_text(text, encoding="ascii")
        roles = ("client", "scheduler", "worker")
        pairs = {f"tls_{role}_{name}": str(paths[name]) for role in roles for name in ("cert", "key")}
        yield _JobSecurity(require_encryption=True, tls_ca_file=str(paths["ca"]), **pairs)


@contextmanager
def _jobs(settings: DaskConfig, security: Security) -> Iterator[SLURMCluster]:
    """Start a scheduler in this process, for workers that are jobs of Slurm.

    The number of jobs is fixed: ``adapt`` ends all workers between two computations (dask-jobqueue, issue 701). Workers
    end by themselves before their time limit, so that none is killed with a result that others wait for.
    """
    if shutil.which("sbatch") is None:
        raise UnreachableError("sbatch: not found on PATH", hint="--dask slurm submits the workers as jobs of Slurm")
    limit_s = parse_span_s(settings.time_limit)
    lifetime = ["--lifetime", f"{limit_s * 0.8:.0f}s", "--lifetime-stagger", f"{limit_s * 0.1:.0f}s"]
    minutes = math.ceil(limit_s / 60)
    try:
        cluster = SLURMCluster(
            cores=settings.cores,
            processes=1,
            memory=f"{settings.memory_gib} GiB",
            walltime=f"{minutes // 60:02d}:{minutes % 60:02d}:00",
            queue=settings.partition,
            account=settings.account,
            job_extra_directives=["--output=/dev/null", *settings.options],
            worker_extra_args=lifetime,
            python=shlex.quote(settings.python or sys.executable),
            local_directory="/tmp",  # noqa: S108 - of the node; workers write nothing unless memory is short
            nanny=False,
            scheduler_options={"dashboard_address": None},
            security=security,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UnreachableError(f"the Dask scheduler did not start: {one_line(error)}") from error
    try:
        yield cluster
    finally:
        cluster.close(timeout=CONNECT_S)


def _with_worker(workers: DaskWorkers) -> DaskWorkers:
    workers.wait()
    return workers


@contextmanager
def _client(address: str, security: Security | None = None) -> Iterator[Client]:
    try:
        # A scheduler that has ended is an error of the report, and not awaited.
        with dask_config.set({"distributed.comm.timeouts.connect": CONNECT_S, "distributed.comm.retry.count": 0}):
            client = Client(address, timeout=CONNECT_S, set_as_default=False, security=security)
    except (OSError, ValueError, TypeError, TimeoutError) as error:  # TypeError: tls:// without keys
        raise UnreachableError(f"there is no Dask scheduler at {address}: {one_line(error)}") from error
    try:
        yield client
    finally:
        client.close(timeout=CONNECT_S)


_KeepingSpread = Callable[[Callable[[Any, Any], Any], Sequence[Any], Any], Generator[Any, None, None]]
Item = TypeVar("Item")
Shared = TypeVar("Shared")
Result = TypeVar("Result")


class _NoWorkerError(UnreachableError):
    """All workers have ended."""

    def __init__(self) -> None:
        super().__init__("all workers have ended")


class DaskWorkers:
    """The workers of a Dask cluster; ``fold`` is called as ``kernel.run_all`` is."""

    def __init__(
        self, client: Client, address: str, wait_s: float, submit: Callable[[], None] = lambda: None, *,
        partial: PartialResults | None = None,
    ) -> None:  # fmt: skip
        """``client`` is connected to the scheduler at ``address``.

        ``wait_s``: timeout for the first worker; ``submit`` starts workers if all have ended; ``partial``: results that
        are kept.
        """
        self._client, self._address, self._wait_s, self._submit = client, address, wait_s, submit
        self._partial = partial

    def wait(self) -> None:
        """Wait for a worker. Raises ``UnreachableError``."""
        try:
            self._client.wait_for_workers(1, timeout=self._wait_s)
        except TimeoutError as error:
            raise UnreachableError(
                f"no worker has joined the Dask scheduler ({self._address}) in {self._wait_s:.0f} s",
                hint="squeue --me shows jobs that are pending" if self._address == "slurm" else None,
            ) from error

    def fold(
        self,
        index: Index,
        allocations: Allocations,
        cells: Cells,
        thresholds: Thresholds,
        advance: Callable[[int], None] | None = None,
    ) -> Totals:
        """Fold all samples of ``index``, and return the totals. ``advance`` is called with numbers of samples.

        Raises ``UnreachableError``, see ``each``, and for damaged files and workers without the sample store.
        """
        days = [source.day for source in index.sources]
        first = datetime.combine(min(days), time(), UTC) if days else None
        stored = StoredSamples.of(index.store, first, index.until)
        fold_input = kernel.FoldInput(stored, index.pieces, cells, thresholds)
        todo = list(kernel.ranges_of(index))
        since, until = (datetime.fromtimestamp(ms / 1000, UTC) for ms in (cells.since, cells.until))

        def all_ranges() -> Generator[kernel.Folded, None, None]:
            with closing(self.during(since, until)(kernel.fold_range, todo, fold_input)) as results:
                for rows, result in zip(todo, results, strict=True):
                    if advance is not None:
                        advance(rows.end - rows.row)
                    yield result

        with closing(all_ranges()) as results:
            return kernel.total(results, allocations, cells)

    def during(self, since: datetime, until: datetime) -> _KeepingSpread:
        """Return ``each`` for a command about an interval: a ``Spreading``. Results are kept until it is complete."""
        partial = self._partial
        if partial is None:
            return self.each

        def spread(
            function: Callable[[Any, Any], Any], todo: Sequence[Any], shared: Any
        ) -> Generator[Any, None, None]:  # fmt: skip
            key = partial_results.key_of(identity(), function, todo, shared, since, until)
            return partial.resumed(key, lambda first: self.each(function, todo[first:], shared))

        return spread

    def each(
        self, function: Callable[[Item, Shared], Result], todo: Sequence[Item], shared: Shared
    ) -> Generator[Result, None, None]:
        """Yield ``function(item, shared)`` of each item, in order. ``shared`` is sent to the workers once.

        Raises ``UnreachableError`` for workers of another version, and if the workers or the scheduler end.
        """
        finished = attempts = 0
        try:
            while finished < len(todo):
                try:
                    for result in self._attempt(function, todo[finished:], shared):
                        finished, attempts = finished + 1, 0
                        yield result
                except (FutureCancelledError, _NoWorkerError):  # all workers that had the input are gone
                    attempts += 1
                    if attempts == _ATTEMPTS:
                        raise
                    self._submit()
                    self.wait()
        except AffinodeError:
            raise
        except (KilledWorker, FutureCancelledError, CommClosedError, OSError, TimeoutError) as error:
            raise UnreachableError(
                f"the Dask cluster ({self._address}) failed: {one_line(error) or type(error).__name__}",
                hint="no result was written; start the command again",
            ) from error

    def _attempt(
        self, function: Callable[[Item, Shared], Result], todo: Sequence[Item], shared: Shared
    ) -> Iterator[Result]:
        shared_input = self._client.scatter(shared, broadcast=True, hash=False)
        waiting: deque[Future] = deque()
        position = 0
        while position < len(todo) or waiting:
            threads = sum(self._client.nthreads().values())
            while position < len(todo) and len(waiting) < _AHEAD * max(threads, 1):
                waiting.append(
                    self._client.submit(_task, function, todo[position], shared_input, identity(), pure=False)
                )
                position += 1
            yield self._result(waiting.popleft())

    def _result(self, future: Future) -> Any:
        """Wait for a result. Without a worker it would never come: then give the attempt up."""
        while True:
            try:
                return future.result(timeout=_CHECK_S)
            except TimeoutError:
                if not self._client.nthreads():
                    raise _NoWorkerError from None


def identity() -> str:
    """Return version and build of this program: those of a worker must be the same."""
    return f"{__version__}, {compiled.digest(native.LIBRARY.parent)[:12]}"


def _task(function: Callable[[Item, Shared], Result], item: Item, shared: Shared, started_with: str) -> Result:
    if started_with != identity():
        raise UnreachableError(
            f"slurm-affinode of a worker is {identity()}; the command was started with {started_with}",
            hint="install the same version on all workers",
        )
    try:
        return function(item, shared)
    except OSError as error:
        raise UnreachableError(
            f"a worker on {socket.gethostname()} failed: {one_line(error)}",
            hint="workers must be able to read the sample store, at the same path as this machine",
        ) from error
