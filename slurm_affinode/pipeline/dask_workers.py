"""Fold the GPU samples of a report on the workers of a Dask cluster.

A range of samples is a task (``analysis.join.ranges``). The sums of all ranges are added here, in order, so that the
report is that of a single machine to the last digit. Tasks of a lost worker are run again by others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dask import config as dask_config
from distributed import Client, Future
from distributed.client import FutureCancelledError
from distributed.comm import CommClosedError
from distributed.scheduler import KilledWorker

from slurm_affinode.analysis.join import kernel, ranges
from slurm_affinode.analysis.join.kernel import Folded
from slurm_affinode.analysis.result import Thresholds, Totals
from slurm_affinode.analysis.samples import Index
from slurm_affinode.analysis.segments import Allocations, Cells
from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.base.text import one_line

SCHEMES = ("tcp://", "tls://")
CONNECT_S = 10.0
FIRST_WORKER_S = 60.0
"""Workers that are jobs of Slurm may start late."""
_AHEAD = 4
"""Tasks per thread of the workers that are queued at once: memory does not grow with the number of samples."""
_ATTEMPTS = 3
"""Of a range, if workers lose its input; a task that a worker's end interrupts is run again by the scheduler."""


@contextmanager
def connected(address: str) -> Iterator[Workers]:
    """Connect to the scheduler at ``address`` (``tcp://HOST:PORT``, ``tls://HOST:PORT``).

    Raises ``UnreachableError`` without a scheduler or a worker.
    """
    if not address.startswith(SCHEMES):
        raise AffinodeError(f"{address}: not an address of a Dask scheduler", hint="it is tcp://HOST:PORT or tls://...")
    try:
        # A scheduler that has ended is an error of the report, and not awaited.
        with dask_config.set({"distributed.comm.timeouts.connect": CONNECT_S, "distributed.comm.retry.count": 0}):
            client = Client(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise UnreachableError(f"there is no Dask scheduler at {address}: {one_line(error)}") from error
    try:
        client.wait_for_workers(1, timeout=FIRST_WORKER_S)
        yield Workers(client, address)
    except TimeoutError as error:
        raise UnreachableError(
            f"no worker has joined the Dask scheduler at {address} in {FIRST_WORKER_S:.0f} s"
        ) from error
    finally:
        client.close(timeout=CONNECT_S)


class Workers:
    """The workers of a Dask cluster; ``fold`` is called as ``kernel.run_all`` is."""

    def __init__(self, client: Client, address: str) -> None:
        """``client`` is connected to the scheduler at ``address``."""
        self._client, self._address = client, address

    def fold(
        self,
        index: Index,
        allocations: Allocations,
        cells: Cells,
        thresholds: Thresholds,
        advance: Callable[[int], None] | None = None,
    ) -> Totals:
        """Fold all samples of ``index``, and return the totals. ``advance`` is called with numbers of samples.

        Raises ``UnreachableError`` for damaged files, workers of another version or without the sample store, and if
        the workers or the scheduler end.
        """
        given = ranges.Input(index.store.root.absolute(), index.pieces, cells, thresholds, ranges.identity())
        try:
            return kernel.total(self._folded(list(ranges.of_index(index)), given, advance), allocations, cells)
        except AffinodeError:
            raise
        except (KilledWorker, FutureCancelledError, CommClosedError, OSError, TimeoutError) as error:
            raise UnreachableError(
                f"the Dask cluster at {self._address} failed: {one_line(error) or type(error).__name__}",
                hint="nothing was written; start the report again",
            ) from error

    def _folded(
        self, todo: list[ranges.RowRange], given: ranges.Input, advance: Callable[[int], None] | None
    ) -> Iterator[Folded]:
        """Yield the sums of each range, in order."""
        attempts = 0
        done = 0
        while done < len(todo):
            try:
                for folded in self._attempt(todo[done:], given):
                    if advance is not None:
                        advance(todo[done].end - todo[done].row)
                    done, attempts = done + 1, 0
                    yield folded
            except FutureCancelledError:  # all workers that had the input are gone
                attempts += 1
                if attempts == _ATTEMPTS:
                    raise
                self._client.wait_for_workers(1, timeout=FIRST_WORKER_S)

    def _attempt(self, todo: list[ranges.RowRange], given: ranges.Input) -> Iterator[Folded]:
        shared = self._client.scatter(given, broadcast=True, hash=False)
        waiting: deque[Future] = deque()
        at = 0
        while at < len(todo) or waiting:
            threads = sum(self._client.nthreads().values())
            while at < len(todo) and len(waiting) < _AHEAD * max(threads, 1):
                waiting.append(self._client.submit(ranges.fold, todo[at], shared, pure=False))
                at += 1
            yield waiting.popleft().result()
