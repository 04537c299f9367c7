"""Sweeps: every GPU is read at a steady interval, whatever the state of the others."""

from __future__ import annotations

import threading

from gpu_fakes import A100, IDLE, OTHER

from slurm_affinode.base.pidfd import ExhaustedError
from slurm_affinode.gpu import jobs
from slurm_affinode.gpu.interface import GpuLost, NotPermitted
from slurm_affinode.gpu.sampler import MappedJobs, ProcessJobs, Sampler, run
from slurm_affinode.model.gpu import GpuFault, GpuProcess, JobRef


class Known:
    """A job finder with fixed results."""

    def __init__(self, refs):
        self.refs = refs

    def find(self, pid, started=None):
        return self.refs.get(pid)


def sampler(driver, jobs=None):
    return Sampler(driver, jobs or ProcessJobs(driver, Known({})), now=lambda: 1000.0)


def test_lost_gpu_does_not_hide_the_others(driver):
    """It is a fault of the sweep, with the driver's message."""
    driver.readings[A100] = GpuLost("GPU 0: fell off the bus")
    driver.unopened = (GpuFault(None, 2, "GPU 2: did not open"),)
    sweep = sampler(driver).sweep()
    assert [sample.device for sample in sweep.samples] == [OTHER]
    assert sweep.faults == (driver.unopened[0], GpuFault(A100, 0, "GPU 0: fell off the bus"))
    assert sweep.driver_error is None


def test_missing_driver_is_a_sweep_without_samples(driver):
    driver.missing = "no driver"
    sweep = sampler(driver).sweep()
    assert (sweep.samples, sweep.driver_error) == ((), "no driver")


def test_mapping_has_the_allocated_gpus(driver, tmp_path):
    """A job without a process is included; a GPU without a file has no job."""
    mapped = MappedJobs(tmp_path / "map")
    jobs.add(tmp_path / "map", ["0"], "10")
    jobs.add(tmp_path / "map", ["0"], "9")
    assert [sample.jobs for sample in sampler(driver, mapped).sweep().samples] == [("9", "10"), ()]


def test_processes_are_used_without_a_mapping(driver, tmp_path):
    """No prolog has run yet, or none writes a mapping."""
    driver.running[A100] = [GpuProcess(5, 1.0, "compute"), GpuProcess(6, 1.0, "compute")]
    processes = ProcessJobs(driver, Known({5: JobRef(7, "batch", "cgroup"), 6: JobRef(8, None, "environment")}))
    jobs = MappedJobs(tmp_path / "map", processes)
    assert [sample.jobs for sample in sampler(driver, jobs).sweep().samples] == [("7",), None]
    (tmp_path / "file").write_text("")
    assert MappedJobs(tmp_path / "file").jobs_of(A100) is None


def test_jobs_are_unknown_if_processes_cannot_be_listed(driver):
    driver.running[A100] = NotPermitted("only root")
    assert sampler(driver).sweep().samples[0].jobs is None


def test_jobs_are_unknown_without_free_descriptors(driver):
    class Exhausted(Known):
        def find(self, pid, started=None):
            raise ExhaustedError("process 5 cannot be examined: Too many open files")

    driver.running[A100] = [GpuProcess(5, 1.0, "compute")]
    assert sampler(driver, ProcessJobs(driver, Exhausted({}))).sweep().samples[0].jobs is None


class Recorder:
    """A sink that stops after ``count`` sweeps; each sweep takes a time on a clock of its own."""

    def __init__(self, count, costs):
        self.count, self.costs = count, costs
        self.stop = threading.Event()
        self.clock = 0.0
        self.times: list[float] = []
        self.sweeps = []
        self.closed = False
        self.stop.wait = self.wait

    def put(self, sweep):
        self.times.append(self.clock)
        self.sweeps.append(sweep)
        self.clock += self.costs.pop(0) if self.costs else 0.0
        if len(self.times) == self.count:
            self.stop.set()

    def wait(self, seconds=None):
        self.clock += seconds
        return self.stop.is_set()

    def close(self):
        self.closed = True


def test_interval_is_kept_and_missed_sweeps_are_skipped(driver):
    """A sweep of 2.5 intervals is followed by the next regular one, not by a burst."""
    sink = Recorder(5, [0.1, 2.5, 0.1])
    run(sampler(driver), [sink], period_s=1.0, stop=sink.stop, monotonic=lambda: sink.clock)
    assert [round(time, 6) for time in sink.times] == [0.0, 1.0, 4.0, 5.0, 6.0]
    assert sink.closed


def test_fault_and_recovery_are_reported_once(driver):
    messages: list[str] = []
    sink = Recorder(6, [])
    put = sink.put

    def change(sweep):
        put(sweep)
        driver.readings[A100] = GpuLost("lost") if len(sink.sweeps) in (1, 2) else IDLE
        driver.missing = "gone" if len(sink.sweeps) == 3 else None

    sink.put = change
    run(sampler(driver), [sink], period_s=1.0, stop=sink.stop, say=messages.append, monotonic=lambda: sink.clock)
    assert messages == ["lost", "gone", "all GPUs respond again"]
