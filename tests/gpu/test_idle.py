"""The agent's idle detection on the signals of a real GPU: utilization, engine and DRAM activity."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from gpu.machine import Machine, Missing, settled
from gpu.programs import Program, Programs
from gpu.skips import without
from slurm_affinode.base.node_config import AgentConfig
from slurm_affinode.core.idle import IdleDetector, IdleRule, IdleState, Verdict, still_idle
from slurm_affinode.gpu.interface import NotPermitted, NotSupported
from slurm_affinode.gpu.nvml import NvmlDriver
from slurm_affinode.model.suspension import SuspendOption
from slurm_affinode.suspension.activity import Watch
from slurm_affinode.suspension.job.peers import Inspector
from slurm_affinode.suspension.job.registry import WatchedJob

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

EVERY_S = 0.25
SETTLES_S = 30.0
FLOORS = {"memory": 1.0, "engine": 1.0, "sm": 1.0, "tensor": 1.0, "dram": 1.0}
"""Higher than the agent's: that these permit an idle GPU, too, is tested by itself, so that the results tell both."""


@pytest.fixture
def quiet(machine: Machine, nvml: NvmlDriver) -> None:
    """Wait until no other process uses the GPU; programs of the previous test may still be ending."""
    deadline = time.monotonic() + 10
    while True:
        try:
            others = [
                process.pid for process in nvml.processes(nvml.devices()[0]) if not only_queries_driver(process.pid)
            ]
        except (NotPermitted, NotSupported) as error:
            pytest.skip(f"who uses the GPU is not told here: {error}")
        if not others:
            return
        if time.monotonic() > deadline:
            pytest.skip(f"others use the GPU now (PIDs {', '.join(map(str, others))})")
        time.sleep(0.05)


def only_queries_driver(pid: int) -> bool:
    """Return whether the process only queries the driver, like this one and the helpers."""
    try:
        return pid == os.getpid() or b"checkpoint.cuda.helper" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


class NoLink:
    """The link of a job without a shepherd."""

    open = False

    def send(self, message: object) -> bool:
        return False


def watched(nvml: NvmlDriver, program: Program) -> tuple[Watch, WatchedJob]:
    """Return the program as a job watched by the agent."""
    job = WatchedJob(
        job_id=1, uid=os.getuid(), gid=os.getgid(), restarts=0, option=SuspendOption(), init_pid=program.pid,
        init_started=0, root=1, link=NoLink(), since_epoch=time.time(), devices=(nvml.devices()[0],),
    )  # fmt: skip
    return Watch(nvml, Inspector()), job


def enough(watch: Watch, job: WatchedJob) -> None:
    """Skip if NVML reports too few signals for idle detection: an agent would suspend nothing there."""
    rule = IdleRule(window_s=2.0)
    watch.sample(job, rule)
    time.sleep(EVERY_S)
    (gpu,) = watch.sample(job, rule).gpus
    known = [name for name, value in gpu.signals.items() if value is not None]
    if gpu.fault is None and len(known) < rule.min_signals:
        reported = ", ".join(known) or "nothing"
        pytest.skip(
            f"of what this GPU does NVML tells {reported} here, and idle detection needs {rule.min_signals} signals"
        )


def until(
    watch: Watch, job: WatchedJob, detector: IdleDetector, done: Callable[[IdleState], bool], what: str
) -> tuple[IdleState, list[IdleState]]:
    """Sample as the agent does until the condition holds; return the last state and all states."""
    deadline = time.monotonic() + SETTLES_S
    states = []
    while True:
        states.append(detector.feed(watch.sample(job, detector.rule)))
        if done(states[-1]):
            return states[-1], states
        assert time.monotonic() < deadline, f"not {what}: {states[-1].verdict}, {states[-1].why}"
        time.sleep(EVERY_S)


def why_not_counted(uuid: str) -> Missing:
    """Return why NVML reports no engine and memory activity; NVML must be initialized."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            return Missing("this GPU does not count engine and DRAM activity (NVML GPM: Hopper and later)")
        sample = pynvml.nvmlGpmSampleAlloc()
        pynvml.nvmlGpmSampleGet(handle, sample)
        pynvml.nvmlGpmSampleFree(sample)
    except pynvml.NVMLError as error:
        refused = error.value in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        not_permitted = error.value == pynvml.NVML_ERROR_NO_PERMISSION
        return Missing(f"NVML counts no engine and DRAM activity here: {error}", broken=not (refused or not_permitted))
    return Missing("NVML counts engine and DRAM activity here, and gave no engine activity", broken=True)


def by_default(watch: Watch, job: WatchedJob) -> str:
    """Return the verdict of an agent with the default configuration."""
    rule = IdleRule(window_s=2.0, floors_pct=AgentConfig().floors_pct)
    return still_idle(rule, watch.sample(job, rule)) or "idle"


def values(state: IdleState) -> dict[str, float | None]:
    """Return the values of the GPU's signals by name."""
    return {signal.name: signal.value for signal in state.signals if signal.of != "host"}


@pytest.mark.usefixtures("quiet")
def test_work_is_busy_and_held_memory_is_idle(run: Programs, nvml: NvmlDriver, note: Any) -> None:
    """The window begins when the work ends, grows while memory is only held, and ends with the next kernel."""
    program = run.start()
    program.ask("setup", mib=64, seed=1)
    watch, job = watched(nvml, program)
    enough(watch, job)
    detector = IdleDetector(IdleRule(window_s=2.0, floors_pct=FLOORS))

    number = program.send("work", seconds=4.0)
    busy, _ = until(watch, job, detector, lambda state: state.verdict is Verdict.BUSY, "busy")
    note("busy", values(busy))
    assert (busy.since_s, busy.reached) == (None, False)
    program.answer(number)

    idle, states = until(watch, job, detector, lambda state: state.reached, "idle for its window")
    note("idle", values(idle))
    note("by_the_agents_defaults", result := by_default(watch, job))
    assert result == "idle"
    assert idle.used_bytes is not None
    assert idle.used_bytes >= 64 << 20
    assert idle.progress_s >= 2.0
    assert all(state.verdict is not Verdict.UNKNOWN for state in states)

    number = program.send("work", seconds=3.0)
    broken, _ = until(watch, job, detector, lambda state: state.verdict is Verdict.BUSY, "busy again")
    assert broken.since_s is None
    assert broken.broken
    program.answer(number)


@pytest.mark.usefixtures("quiet")
def test_engine_and_memory_activity_where_the_gpu_counts_them(
    machine: Machine, run: Programs, nvml: NvmlDriver, note: Any
) -> None:
    """NVML's performance counters (GPM, Hopper and later): engine and DRAM activity show the work and its end."""
    program = run.start()
    program.ask("setup", mib=512 if (nvml.read(nvml.devices()[0]).fb_total_mib or 0) > 8192 else 64, seed=1)
    device = nvml.devices()[0]
    nvml.read(device)
    time.sleep(0.2)
    if nvml.read(device).engine_active is None:
        missing = why_not_counted(device.uuid)
        note("gpm", missing.why)
        without(missing)
    watch, job = watched(nvml, program)
    detector = IdleDetector(IdleRule(window_s=2.0, floors_pct=FLOORS))
    # The emulated GPU is busy as long as a kernel waits; a real one moves memory continuously.
    number = program.send("work", seconds=5.0, wait_ms=20 if machine.emulated else 0)

    def at_work(state: IdleState) -> bool:
        return all((values(state).get(name) or 0) > FLOORS[name] for name in ("engine", "dram"))

    busy, _ = until(watch, job, detector, at_work, "busy by engine and DRAM activity")
    note("busy", values(busy))
    program.answer(number)
    idle, _ = until(watch, job, detector, lambda state: state.reached, "idle for its window")
    note("idle", values(idle))
    note("by_the_agents_defaults", result := by_default(watch, job))
    assert result == "idle"
    assert all((values(idle)[name] or 0.0) <= FLOORS[name] for name in ("engine", "dram"))


@pytest.mark.usefixtures("quiet")
def test_suspended_process_leaves_idle_gpu(run: Programs, nvml: NvmlDriver) -> None:
    """NVML no longer lists it, and its memory is not counted."""
    device = nvml.devices()[0]

    def process_count() -> int:
        return settled(lambda: len(nvml.processes(device)))

    before = process_count()
    program = run.start()
    program.ask("setup", mib=64, seed=1)
    if not nvml.processes(device):
        pytest.skip("NVML lists no processes here (a container without the host's PIDs)")
    assert process_count() == before + 1
    run.suspend(program)
    assert process_count() == before
    run.resume(program)
    assert process_count() == before + 1
