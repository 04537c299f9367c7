"""The agent's metrics of itself: names, labels, and how they are measured.

An agent serves them on its socket, and the exporter of the node adds them to its own (``pipeline.exporter``).
Counters begin at 0 with the agent; an unknown value is absent.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from slurm_affinode.base import kernel_text
from slurm_affinode.base.counters import Counters, DeclaredMetric
from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.checkpoint.store.tiers import Tiers
from slurm_affinode.model.suspension import Mode, Phase
from slurm_affinode.slurm.interface import SlurmClient

PREFIX = "slurm_affinode_agent_"
MODES = tuple(mode.value for mode in Mode)
PHASES = tuple(phase.value for phase in Phase if phase is not Phase.RUNNING)
STORES_S = 60.0
"""Interval at which the image stores are read."""

BUILD_INFO = PREFIX + "build_info"
CPU = PREFIX + "cpu_seconds_total"
IMAGES = PREFIX + "images"
IMAGES_DAMAGED = PREFIX + "images_damaged"
IMAGE_BYTES = PREFIX + "image_bytes"
JOBS = PREFIX + "jobs"
JOB_INFO = PREFIX + "job_info"
JOURNALS = PREFIX + "journals_open"
LAST_SAMPLE = PREFIX + "last_sample_timestamp_seconds"
MEMORY = PREFIX + "resident_memory_bytes"
PHASE_SECONDS = PREFIX + "phase_seconds_total"
PHASES_BEGUN = PREFIX + "phases_total"
RESTORES = PREFIX + "restores_total"
SAMPLES = PREFIX + "samples_total"
SLURM_QUERIES = PREFIX + "slurm_queries_total"
SLURM_SECONDS = PREFIX + "slurm_query_seconds_total"
SLURM_UP = PREFIX + "slurm_up"
START = PREFIX + "start_time_seconds"
STORE_LEFT = PREFIX + "store_left_bytes"
SUSPENSIONS = PREFIX + "suspensions_total"
SUSPENSION_FAILURES = PREFIX + "suspension_failures_total"
THREADS = PREFIX + "threads"
WAKES = PREFIX + "wakes_total"

JOB_STATES = ("watched", "signalled", "suspending", "restoring", "starting", "asleep", "waking")
SUSPENSION_OUTCOMES = ("suspended", "busy", "refused", "failed", "stopped", "gone", "fault")
RESTORE_OUTCOMES = ("restored", "fresh", "held")
QUERY_OUTCOMES = ("ok", "refused", "unreachable")

METRICS = (
    DeclaredMetric(BUILD_INFO, "gauge", "Version of the agent; the value is 1", {"version": ()}),
    DeclaredMetric(START, "gauge", "Start of the agent, in seconds since the epoch"),
    DeclaredMetric(LAST_SAMPLE, "gauge", "Time of the last sample of the jobs, in seconds since the epoch"),
    DeclaredMetric(SAMPLES, "counter", "Times that the jobs were sampled"),
    DeclaredMetric(JOBS, "gauge", "Jobs with --gpu-suspend-idle that the agent watches", {"state": JOB_STATES}),
    DeclaredMetric(JOB_INFO, "gauge", "Owner of a job on this node; the value is 1", {"hpc_job": (), "user": ()}),
    DeclaredMetric(
        SUSPENSIONS, "counter", "Attempts to suspend a job that have ended",
        {"mode": MODES, "outcome": SUSPENSION_OUTCOMES},
    ),
    DeclaredMetric(
        SUSPENSION_FAILURES, "counter", "Suspensions that were rolled back, by the last phase reached",
        {"mode": MODES, "phase": PHASES},
    ),
    DeclaredMetric(PHASES_BEGUN, "counter", "Phases of suspensions and restores that have begun", {"phase": PHASES}),
    DeclaredMetric(PHASE_SECONDS, "counter", "Seconds spent in phases that have ended", {"phase": PHASES}),
    DeclaredMetric(WAKES, "counter", "Jobs released to Slurm, or awake again in place", {"mode": MODES}),
    DeclaredMetric(RESTORES, "counter", "Restores that have ended", {"outcome": RESTORE_OUTCOMES}),
    DeclaredMetric(IMAGES, "gauge", "Complete checkpoint images in a tier", {"tier": ()}),
    DeclaredMetric(IMAGES_DAMAGED, "gauge", "Checkpoint images in a tier that were set aside as damaged", {"tier": ()}),
    DeclaredMetric(IMAGE_BYTES, "gauge", "Bytes used in the store of a tier", {"tier": ()}),
    DeclaredMetric(STORE_LEFT, "gauge", "Bytes that a tier may still use; at most 0 if it is full", {"tier": ()}),
    DeclaredMetric(JOURNALS, "gauge", "Journals of suspensions that are not closed"),
    DeclaredMetric(
        SLURM_QUERIES, "counter", "Requests to Slurm that have ended", {"operation": (), "outcome": QUERY_OUTCOMES},
    ),
    DeclaredMetric(SLURM_SECONDS, "counter", "Seconds spent in requests to Slurm", {"operation": ()}),
    DeclaredMetric(SLURM_UP, "gauge", "Whether slurmctld has responded to the last request"),
    DeclaredMetric(CPU, "counter", "CPU seconds of the agent, without its child processes"),
    DeclaredMetric(MEMORY, "gauge", "Resident memory of the agent"),
    DeclaredMetric(THREADS, "gauge", "Threads of the agent"),
)  # fmt: skip
"""All metrics, in the order of the documentation."""


def agent_counters(version: str, now: float) -> Counters:
    """Return the counters of an agent of this version that starts ``now`` (epoch)."""
    counters = Counters(METRICS)
    counters.set(BUILD_INFO, 1.0, version=version)
    counters.set(START, now)
    return counters


def phase_observer(counters: Counters) -> Callable[[Phase | None, float, Phase | None], None]:
    """Return a function that the journal calls with the phase that ended, its seconds, and the phase that begins."""

    def observe(ended: Phase | None, seconds: float, begun: Phase | None) -> None:
        if ended is not None and ended is not Phase.RUNNING:
            counters.add(PHASE_SECONDS, seconds, phase=ended.value)
        if begun is not None and begun is not Phase.RUNNING:
            counters.add(PHASES_BEGUN, phase=begun.value)

    return observe


def read_process(counters: Counters) -> None:
    """Read memory, CPU time and threads of this process."""
    counters.set(THREADS, float(threading.active_count()))
    pages = None
    with suppress(OSError, IndexError):
        pages = kernel_text.numbers(kernel_text.lines("/proc/self/statm")[0])[1]
    counters.set(MEMORY, None if pages is None else float(pages * os.sysconf("SC_PAGE_SIZE")))
    counters.set(CPU, time.process_time())


class StoreReader:
    """Reads the usage of the image stores, at most every ``STORES_S``.

    The shared store is read by the node that holds the lease only: with many nodes, each would read all images.
    """

    def __init__(self, counters: Counters, tiers: Tiers, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters, self._tiers, self._clock = counters, tiers, clock
        self._read_s = float("-inf")

    def read(self, holds_lease: bool) -> None:
        """Read the stores if it is time to. A store that cannot be read has no values."""
        if self._clock() - self._read_s < STORES_S:
            return
        self._read_s = self._clock()
        for tier in self._tiers.tiers:
            images = damaged = used = free = None
            if not tier.shared or holds_lease:
                with suppress(AffinodeError, OSError):
                    usage = tier.store.usage()
                    free = float(tier.store.budget.available_bytes(usage))
                    images, used = float(usage.images), float(usage.used)
                    damaged = float(len(tier.store.aside()))
            for name, value in ((IMAGES, images), (IMAGES_DAMAGED, damaged), (IMAGE_BYTES, used), (STORE_LEFT, free)):
                self._counters.set(name, value, tier=tier.name)


class _CountedClient:
    """A client of Slurm with requests that are counted and timed."""

    def __init__(self, client: SlurmClient, counters: Counters) -> None:
        self._client, self._counters = client, counters

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if not callable(method) or name.startswith("_") or name == "close":
            return method

        def call(*arguments: Any, **named: Any) -> Any:
            began, outcome = time.monotonic(), "ok"
            try:
                return method(*arguments, **named)
            except UnreachableError:
                outcome = "unreachable"
                raise
            except AffinodeError:
                outcome = "refused"
                raise
            finally:
                self._counters.add(SLURM_QUERIES, operation=name, outcome=outcome)
                self._counters.add(SLURM_SECONDS, time.monotonic() - began, operation=name)
                self._counters.set(SLURM_UP, float(outcome != "unreachable"))

        return call


def counted(open_client: Callable[[], SlurmClient], counters: Counters) -> Callable[[], SlurmClient]:
    """Return a function that opens clients of Slurm with requests that are counted and timed."""
    return lambda: cast(SlurmClient, _CountedClient(open_client(), counters))
