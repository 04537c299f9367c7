"""Sweeps: every GPU, whatever happens to the others, at a steady pace."""

from __future__ import annotations

import threading

from gpu_fakes import A100, IDLE, OTHER

from slurm_affinode.gpu import jobmap
from slurm_affinode.gpu.interface import GpuLost, NotPermitted
from slurm_affinode.gpu.sampler import MappedJobs, ProcessJobs, Sampler, run
from slurm_affinode.model.gpu import GpuFault, GpuProcess, JobRef


class Known:
    """A finder of jobs that knows."""

    def __init__(self, refs):
        self.refs = refs

    def find(self, pid, started=None):
        return self.refs.get(pid)


def sampler(driver, jobs=None):
    return Sampler(driver, jobs or ProcessJobs(driver, Known({})), now=lambda: 1000.0)


def test_a_lost_gpu_does_not_hide_the_others(driver):
    """It is a fault of the sweep, with what was said."""
    driver.readings[A100] = GpuLost("GPU 0: fell off the bus")
    driver.unopened = (GpuFault(None, 2, "GPU 2: did not open"),)
    sweep = sampler(driver).sweep()
    assert [sample.device for sample in sweep.samples] == [OTHER]
    assert sweep.faults == (driver.unopened[0], GpuFault(A100, 0, "GPU 0: fell off the bus"))
    assert sweep.driver_error is None


def test_a_missing_driver_is_a_sweep_without_samples(driver):
    driver.missing = "no driver"
    sweep = sampler(driver).sweep()
    assert (sweep.samples, sweep.driver_error) == ((), "no driver")


def test_the_mapping_says_what_was_allocated(driver, tmp_path):
    """Also to a job without a process; a GPU without a file has no job."""
    jobs = MappedJobs(tmp_path / "map")
    jobmap.add(tmp_path / "map", ["0"], "10")
    jobmap.add(tmp_path / "map", ["0"], "9")
    assert [sample.jobs for sample in sampler(driver, jobs).sweep().samples] == [("9", "10"), ()]


def test_without_a_mapping_processes_are_asked(driver, tmp_path):
    """Before the first prolog, or where none writes a mapping."""
    driver.running[A100] = [GpuProcess(5, 1.0, "compute"), GpuProcess(6, 1.0, "compute")]
    processes = ProcessJobs(driver, Known({5: JobRef(7, "batch", "cgroup"), 6: JobRef(8, None, "environment")}))
    jobs = MappedJobs(tmp_path / "map", processes)
    assert [sample.jobs for sample in sampler(driver, jobs).sweep().samples] == [("7",), None]
    (tmp_path / "file").write_text("")
    assert MappedJobs(tmp_path / "file").jobs_of(A100) is None


def test_processes_that_cannot_be_listed_leave_the_jobs_unknown(driver):
    driver.running[A100] = NotPermitted("only root")
    assert sampler(driver).sweep().samples[0].jobs is None


class Recorder:
    """A sink that ends the run after some sweeps; each takes a time on a clock of its own."""

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


def test_the_pace_is_kept_and_what_was_missed_is_left_out(driver):
    """A sweep of 2.5 periods is followed by the next full one, not by a burst of late ones."""
    sink = Recorder(5, [0.1, 2.5, 0.1])
    run(sampler(driver), [sink], period_s=1.0, stop=sink.stop, monotonic=lambda: sink.clock)
    assert [round(time, 6) for time in sink.times] == [0.0, 1.0, 4.0, 5.0, 6.0]
    assert sink.closed


def test_what_is_wrong_is_said_once_and_that_it_is_over_too(driver):
    """Not at every sweep."""
    said: list[str] = []
    sink = Recorder(6, [])
    put = sink.put

    def change(sweep):
        put(sweep)
        driver.readings[A100] = GpuLost("lost") if len(sink.sweeps) in (1, 2) else IDLE
        driver.missing = "gone" if len(sink.sweeps) == 3 else None

    sink.put = change
    run(sampler(driver), [sink], period_s=1.0, stop=sink.stop, say=said.append, monotonic=lambda: sink.clock)
    assert said == ["lost", "gone", "all GPUs answer again"]
