"""Samples every GPU of the node at a period and hands each sweep to the sinks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from slurm_affinode.errors import AffinodeError
from slurm_affinode.gpu import jobmap
from slurm_affinode.gpu.interface import DriverMissing, GpuDriver, GpuError
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.model.gpu import Device, GpuFault, GpuSample, Sweep

Say = Callable[[str], None]


class JobSource(Protocol):
    """Says which jobs have a device."""

    def refresh(self) -> None:
        """Called once before each sweep."""
        ...

    def jobs_of(self, device: Device) -> tuple[str, ...] | None:
        """Ids, ascending; ``()``: no job; None: not known."""
        ...


class Sink(Protocol):
    """Takes sweeps."""

    def put(self, sweep: Sweep) -> None:
        """Take one sweep."""
        ...

    def close(self) -> None:
        """There will be no more."""
        ...


class MappedJobs:
    """The jobs that a job mapping directory names: what was allocated, also to a job without a process on it.

    Where there is no such directory (no prolog has run yet), ``otherwise`` is asked.
    """

    def __init__(self, directory: Path, otherwise: JobSource | None = None) -> None:
        self._directory = directory
        self._otherwise = otherwise
        self._map: Mapping[str, tuple[str, ...]] | None = None

    def refresh(self) -> None:
        """Read the directory. One that cannot be read says nothing."""
        try:
            self._map = jobmap.read(self._directory)
        except AffinodeError:
            self._map = None

    def jobs_of(self, device: Device) -> tuple[str, ...] | None:
        """See ``JobSource``."""
        if self._map is not None:
            return ordered(self._map.get(jobmap.key_of(device), ()))
        return None if self._otherwise is None else self._otherwise.jobs_of(device)


class ProcessJobs:
    """The jobs whose processes hold a context on the device.

    What a process says of itself (its environment) does not count: it may have outlived the job.
    """

    def __init__(self, driver: GpuDriver, finder: JobFinder | None = None) -> None:
        self._driver = driver
        self._finder = finder or JobFinder()

    def refresh(self) -> None:
        """Nothing is kept between sweeps."""

    def jobs_of(self, device: Device) -> tuple[str, ...] | None:
        """See ``JobSource``. An idle allocation has no process yet: that no job has the device is never known."""
        try:
            processes = self._driver.processes(device)
        except GpuError:
            return None
        refs = (self._finder.find(process.pid) for process in processes)
        return ordered({str(ref.job_id) for ref in refs if ref is not None and ref.source != "environment"}) or None


def ordered(jobs: set[str] | Sequence[str]) -> tuple[str, ...]:
    """Job ids ascending by number, each once."""
    return tuple(sorted(set(jobs), key=lambda job: (len(job), job)))


class Sampler:
    """One sweep at a time. ``now`` gives seconds of the epoch."""

    def __init__(self, driver: GpuDriver, jobs: JobSource, *, now: Callable[[], float] = time.time) -> None:
        self._driver = driver
        self._jobs = jobs
        self._now = now

    def sweep(self) -> Sweep:
        """Ask every device once. A device that fails is a fault of the sweep, and so is a driver that is not there."""
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
    """Sweep every ``period_s`` seconds until ``stop``; close the sinks. A sweep that takes longer leaves some out.

    What is wrong is said once, and once more when it is over.
    """
    began, done, said = monotonic(), 0, frozenset[str]()
    try:
        while not stop.is_set():
            sweep = sampler.sweep()
            for sink in sinks:
                sink.put(sweep)
            wrong = frozenset(fault.reason for fault in sweep.faults) | (
                {sweep.driver_error} if sweep.driver_error else frozenset()
            )
            for reason in sorted(wrong - said):
                say(reason)
            if said and not wrong:
                say("all GPUs answer again")
            said = wrong
            passed = monotonic() - began
            done = max(done + 1, int(passed / period_s) + (passed % period_s > 0))
            stop.wait(max(0.0, began + done * period_s - monotonic()))
    finally:
        for sink in sinks:
            sink.close()
