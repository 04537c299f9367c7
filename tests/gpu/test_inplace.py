"""A process is checkpointed into host memory and restored to its GPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from gpu.machine import MIB, Machine, settled
from gpu.programs import Programs
from slurm_affinode.checkpoint.cuda.client import Cuda
from slurm_affinode.checkpoint.cuda.features import refusal
from slurm_affinode.checkpoint.interface import CudaState, CudaUnavailable, Feature
from slurm_affinode.gpu.nvml import NvmlDriver
from slurm_affinode.suspension.inplace.sockets import waits, went_on

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(540)]
STORAGE = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "custom_storage.py"


def free_mib(nvml: NvmlDriver, index: int = 0) -> float:
    """Return the free memory of a GPU according to NVML."""
    device = next(item for item in nvml.devices() if item.index == index)
    result = settled(lambda: nvml.free_mib(device))
    assert result is not None
    return result


def test_outputs_are_those_of_an_uninterrupted_run(
    machine: Machine, run: Programs, cuda: Cuda, nvml: NvmlDriver, note: Any
) -> None:
    """Weights, optimizer state and a captured graph, bit for bit; another process uses the freed memory meanwhile."""
    calm = run.start()
    calm.ask("setup", mib=machine.mib, seed=7)
    expected = [calm.ask("steps", count=3), calm.ask("steps", count=3), calm.ask("digest")]
    run.close()  # the next program needs its memory

    program = run.start()
    note("graph", program.ask("setup", mib=machine.mib, seed=7)["graph"])
    first = program.ask("steps", count=3)
    before = free_mib(nvml)
    began = time.monotonic()
    run.suspend(program)
    out_s = time.monotonic() - began
    freed = free_mib(nvml) - before
    assert cuda.state(program.pid) is CudaState.CHECKPOINTED
    assert freed >= machine.mib

    other = run.start()
    other.ask("setup", mib=8, seed=3)
    other.ask("hold", mib=int(machine.mib * 0.9))
    before_other = other.ask("digest")
    number = program.send("steps", count=3)  # waits in the driver until the restore
    other.ask("steps", count=2)
    assert not program.answered(number)
    other.ask("release")
    assert other.ask("digest") != before_other

    began = time.monotonic()
    run.resume(program)
    in_s = time.monotonic() - began
    assert [first, program.answer(number), program.ask("digest")] == expected
    note("gib", machine.mib / 1024)
    note("freed_mib", freed)
    note("out_s", round(out_s, 3))
    note("in_s", round(in_s, 3))


def test_process_is_suspended_ten_times(machine: Machine, run: Programs) -> None:
    """Ten times, with computations in between."""
    mib = max(8, machine.mib // 8)
    calm, program = run.start(), run.start()
    for item in (calm, program):
        item.ask("setup", mib=mib, seed=11)
    for _ in range(10):
        assert program.ask("steps", count=1) == calm.ask("steps", count=1)
        run.suspend(program)
        run.resume(program)
    assert program.ask("digest") == calm.ask("digest")


def test_several_processes_are_suspended_together(
    machine: Machine, run: Programs, cuda: Cuda, nvml: NvmlDriver
) -> None:
    """All are locked before the first one is checkpointed, and move at once."""
    mib = max(8, machine.mib // 6)
    before = free_mib(nvml)
    started = [run.start() for _ in range(3)]
    for seed, program in enumerate(started):
        program.ask("setup", mib=mib, seed=seed)
    digests = [program.ask("digest") for program in started]
    held = free_mib(nvml)
    assert before - held >= 3 * mib
    assert cuda.users([program.pid for program in started]) == {program.pid for program in started}
    for program in started:
        cuda.lock(program.pid, timeout_ms=30_000)
    cuda.checkpoint(*[program.pid for program in started])
    assert free_mib(nvml) - held >= 3 * mib
    for program in started:
        program.restored = True
    cuda.restore(*[program.pid for program in reversed(started)])
    for program in started:
        cuda.unlock(program.pid)
    assert [program.ask("digest") for program in started] == digests


def test_process_moves_to_another_gpu(machine: Machine, run: Programs, cuda: Cuda, nvml: NvmlDriver) -> None:
    """By pairs of UUIDs of all GPUs; a driver without that feature is refused without side effects."""
    program = run.start()
    program.ask("setup", mib=max(8, machine.mib // 8), seed=5)
    digest = program.ask("digest")
    uuids = cuda.devices()
    if refusal(Feature.MIGRATION, cuda.capabilities()) is not None:
        run.suspend(program)
        with pytest.raises(CudaUnavailable, match=Feature.MIGRATION.value):
            cuda.restore(program.pid, pairs={uuids[0]: uuids[-1]})
        assert cuda.state(program.pid) is CudaState.CHECKPOINTED
        run.resume(program)
        assert program.ask("digest") == digest
        return
    models = {gpu.uuid: gpu.model for gpu in machine.gpus}
    if len(uuids) < 2 or models[uuids[0]] != models[uuids[1]]:
        pytest.skip("there are no two GPUs of one model here")
    used = free_mib(nvml, 1)
    run.suspend(program)
    pairs = dict(zip(uuids, [uuids[1], uuids[0], *uuids[2:]], strict=True))
    program.restored = True
    cuda.restore(program.pid, pairs=pairs)
    cuda.unlock(program.pid)
    assert used - free_mib(nvml, 1) >= max(8, machine.mib // 8)
    assert program.ask("digest") == digest


def test_custom_storage_writes_files_of_our_own(
    machine: Machine, run: Programs, cuda: Cuda, tmp_path: Path, note: Any
) -> None:
    """The memory is in a file and not in the process, and is restored from the file."""
    if (why := refusal(Feature.CUSTOM_STORAGE, cuda.capabilities())) is not None:
        pytest.skip(why)
    mib = min(machine.mib, 4096)
    storage = run.start(str(STORAGE))
    program = run.start()
    program.ask("setup", mib=mib, seed=6)
    digest, before = program.ask("digest"), resident(program.pid)
    cuda.lock(program.pid, timeout_ms=30_000)
    where = {"pid": program.pid, "directory": str(tmp_path)}
    stored = storage.ask("checkpoint", **where, held={machine.gpus[0].uuid: mib * MIB})["result"]
    assert cuda.state(program.pid) is CudaState.CHECKPOINTED
    assert resident(program.pid) - before < mib * MIB // 2
    note("files", [item["size"] for item in stored])
    program.restored = True
    storage.ask("restore", **where, stored=stored)
    cuda.unlock(program.pid)
    for entry in stored:
        (tmp_path / entry["file"]).unlink()
    assert program.ask("digest") == digest


def test_unsupported_features_are_refused_by_name(cuda: Cuda) -> None:
    """For any driver: each feature is available, or its error names the driver that has it."""
    for capability in cuda.capabilities().table:
        if capability.available:
            cuda.require(capability.feature)
        else:
            with pytest.raises(CudaUnavailable, match=rf"^{capability.feature}: .*{capability.since}"):
                cuda.require(capability.feature)


def test_host_memory_grows_by_size_of_gpu_memory(machine: Machine, run: Programs, note: Any) -> None:
    """The memory check before a suspension relies on this."""
    program = run.start()
    program.ask("setup", mib=machine.mib, seed=2)
    before = resident(program.pid)
    run.suspend(program)
    grown = resident(program.pid) - before
    run.resume(program)
    note("host_bytes_per_gpu_byte", round(grown / (machine.mib * MIB), 3))
    assert grown < machine.mib * MIB * 1.25 + 512 * MIB


def test_only_threads_of_cuda_move_with_its_memory(machine: Machine, run: Programs, cuda: Cuda, note: Any) -> None:
    """And the one that the driver uses. Any other would be taken for a thread of the program that read a request."""
    program = run.start()
    program.ask("setup", mib=max(8, machine.mib // 8), seed=4)
    thread_calls = waits([program.pid])
    names = {
        item: Path(f"/proc/{program.pid}/task/{item}/comm").read_text(encoding="utf-8").strip() for item in thread_calls
    }
    before = {**thread_calls, **dict.fromkeys(cuda.restore_threads([program.pid]), "")}
    run.suspend(program)
    after = waits([program.pid])
    run.resume(program)
    others = {
        item: place for item, place in after.items() if item != program.pid
    }  # without the main thread, which polls for commands
    moved = sorted(names.get(other, "new") for other in others if went_on(before, {other: others[other]}))
    note("moved", moved)
    assert moved == []


def resident(pid: int) -> int:
    """Return the host memory of a process in bytes."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:  # noqa: PTH123
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))
