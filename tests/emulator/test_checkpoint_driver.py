"""The interface to the CUDA driver (``Cuda``) on the emulated driver: its helper, errors and deadlines."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulator.node import Node, Program
from stopping import stop

from slurm_affinode.checkpoint.cuda.client import Cuda, Deadlines
from slurm_affinode.checkpoint.interface import (
    CudaError,
    CudaState,
    CudaUnavailable,
    Feature,
    HelperLost,
    LockTimeout,
)

VERSION = "580.95.05"


@pytest.fixture
def cuda(node: Node) -> Iterator[Cuda]:
    """The driver of the node."""
    made = Cuda(driver_version=lambda: VERSION, env=node.env)
    yield made
    made.close()


def suspend(cuda: Cuda, user: Program) -> None:
    """Lock and checkpoint the process."""
    cuda.lock(user.pid, timeout_ms=5000)
    cuda.checkpoint(user.pid)


def test_process_is_checkpointed_and_restored(cuda: Cuda, node: Node) -> None:
    """Its memory is unchanged, and its GPU is free meanwhile."""
    user = node.user()
    user.do("a = alloc(30)")
    written = user.get("fill(a, 30 * MIB, 1)")
    assert cuda.state(user.pid) is CudaState.RUNNING
    suspend(cuda, user)
    assert cuda.state(user.pid) is CudaState.CHECKPOINTED
    assert not any(gpu["processes"] for gpu in node.show()["gpus"])
    cuda.restore(user.pid)
    assert cuda.state(user.pid) is CudaState.LOCKED
    cuda.unlock(user.pid)
    assert user.get("digest(a, 30 * MIB)") == written


def test_only_cuda_processes_are_found(cuda: Cuda, node: Node) -> None:
    """Processes that only use NVML, other processes and missing ones are not found."""
    user, watcher = node.user(), node.agent()
    assert cuda.users([user.pid, watcher.pid, os.getpid(), 2**22 - 1]) == {user.pid}
    assert cuda.users([]) == frozenset()
    (thread,) = cuda.restore_threads([user.pid, watcher.pid])
    assert thread in [int(task.name) for task in Path(f"/proc/{user.pid}/task").iterdir()]


def test_lock_times_out_on_busy_gpu(cuda: Cuda, node: Node) -> None:
    """The lock times out, and the process keeps running."""
    user = node.user()
    user.do("busy(600_000)")
    with pytest.raises(LockTimeout, match=r"within 0\.05 s"):
        cuda.lock(user.pid, timeout_ms=50)
    assert cuda.state(user.pid) is CudaState.RUNNING
    with pytest.raises(ValueError, match="time-out"):
        cuda.lock(user.pid, timeout_ms=0)


def test_injected_lock_timeout_is_reported(cuda: Cuda, node: Node) -> None:
    """A process that hangs in NCCL causes such a timeout."""
    user = node.user()
    node.ctl("fault", "lock-timeout", "--count", "1")
    with pytest.raises(LockTimeout):
        cuda.lock(user.pid, timeout_ms=50)
    cuda.lock(user.pid, timeout_ms=5000)
    cuda.unlock(user.pid)


def test_errors_have_names_of_driver(cuda: Cuda, node: Node) -> None:
    """Errors also have a message of one line."""
    user = node.user()
    user.do("alloc(1)")
    for code, action in (
        ("CUDA_ERROR_ILLEGAL_STATE", lambda: cuda.checkpoint(user.pid)),
        ("CUDA_ERROR_OPERATING_SYSTEM", lambda: cuda.lock(2**22 - 1, timeout_ms=50)),
    ):
        with pytest.raises(CudaError, match=code) as caught:
            action()
        assert caught.value.code == code
        assert "\n" not in str(caught.value)
    cuda.lock(user.pid, timeout_ms=5000)
    node.ctl("fault", "checkpoint-fails", "--count", "1")
    with pytest.raises(CudaError, match="move the GPU memory of process"):
        cuda.checkpoint(user.pid)
    assert cuda.state(user.pid) is CudaState.LOCKED
    cuda.checkpoint(user.pid)
    node.ctl("fault", "restore-fails", "--count", "1")
    with pytest.raises(CudaError):
        cuda.restore(user.pid)
    assert cuda.state(user.pid) is CudaState.CHECKPOINTED
    cuda.restore(user.pid)
    cuda.unlock(user.pid)


def test_several_processes_are_moved_at_once(cuda: Cuda, node: Node) -> None:
    """The error names the process that failed; the others have moved."""
    first, second = node.user(), node.user()
    for process in (first, second):
        process.do("a = alloc(30)")
    written = [item.get("fill(a, 30 * MIB, 1)") for item in (first, second)]
    cuda.lock(first.pid, timeout_ms=5000)
    with pytest.raises(CudaError, match=rf"process {second.pid} out: .*CUDA_ERROR_ILLEGAL_STATE"):
        cuda.checkpoint(first.pid, second.pid)
    assert [cuda.state(item.pid) for item in (first, second)] == [CudaState.CHECKPOINTED, CudaState.RUNNING]
    suspend(cuda, second)
    with pytest.raises(CudaError, match=rf"process {2**22 - 1} back: "):
        cuda.restore(first.pid, 2**22 - 1)
    cuda.restore(second.pid)
    for process in (first, second):
        cuda.unlock(process.pid)
    assert [item.get("digest(a, 30 * MIB)") for item in (first, second)] == written
    cuda.checkpoint()  # none


def test_managed_memory_is_reported(cuda: Cuda, node: Node) -> None:
    """Managed memory; the process can be unlocked and continues."""
    user = node.user()
    user.do("ok(d.cuMemAllocManaged(MIB, 1))")
    cuda.lock(user.pid, timeout_ms=5000)
    with pytest.raises(CudaError, match=r"managed memory.*CUDA IPC \(driver 580\.95\.05 cannot \(610 can\)\)"):
        cuda.checkpoint(user.pid)
    cuda.unlock(user.pid)
    user.do("alloc(1)")


def test_pairs_move_process_to_another_gpu(cuda: Cuda, node: Node) -> None:
    """All GPUs of the driver are named, by the driver's UUIDs."""
    first, second = cuda.devices()
    assert [first, second] == [gpu["uuid"] for gpu in node.show()["gpus"]]
    user = node.user()
    suspend(cuda, user)
    with pytest.raises(CudaError, match="GPUs do not fit"):
        cuda.restore(user.pid, pairs={first: second})
    cuda.restore(user.pid, pairs={first: second, second: first})
    cuda.unlock(user.pid)
    assert [len(gpu["processes"]) for gpu in node.show()["gpus"]] == [0, 1]


def test_killed_helper_is_replaced(cuda: Cuda, node: Node) -> None:
    """The current call fails with that reason, the process's state is unchanged, and the next call works."""
    user = node.user()
    suspend(cuda, user)
    helper = cuda._child
    assert helper is not None
    os.kill(helper.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(HelperLost, match="was ended by signal 9"):
        cuda.restore(user.pid)
    assert cuda.state(user.pid) is CudaState.CHECKPOINTED
    cuda.restore(user.pid)
    cuda.unlock(user.pid)


def test_hanging_call_is_abandoned(node: Node) -> None:
    """A call that exceeds its deadline fails, and the helper is killed."""
    cuda = Cuda(driver_version=lambda: VERSION, env=node.env, deadlines=Deadlines(move=0.2))
    user = node.user()
    assert cuda.users([user.pid]) == {user.pid}
    cuda.lock(user.pid, timeout_ms=5000)
    stop(user.pid)
    with pytest.raises(HelperLost, match=r"timed out after 0\.2 s"):
        cuda.checkpoint(user.pid)
    os.kill(user.pid, signal.SIGCONT)
    assert cuda.users([user.pid]) == {user.pid}
    cuda.close()


@pytest.mark.parametrize(
    ("version", "has"),
    [
        ("560.35.03", ""),
        ("570.124.06", "LOCK CHECKPOINT RESTORE"),
        ("580.95.05", "LOCK CHECKPOINT RESTORE MIGRATION"),
        ("610.57.04", "LOCK CHECKPOINT RESTORE MIGRATION IPC"),
        ("615.71.05", "LOCK CHECKPOINT RESTORE MIGRATION IPC CUSTOM_STORAGE"),
    ],
)
def test_features_follow_driver_version(node: Node, version: str, has: str) -> None:
    """The node emulates each driver; a missing feature has a reason that names it and the driver that has it."""
    node.ctl("driver", version)
    cuda = Cuda(driver_version=lambda: version, env=node.env)
    can = cuda.capabilities()
    assert {item.feature for item in can.table if item.available} == {Feature[name] for name in has.split()}
    assert (can.checkpoint, can.why_not is None) == ("LOCK" in has, "LOCK" in has)
    for entry in can.table:
        if entry.available:
            cuda.require(entry.feature)
        else:
            with pytest.raises(CudaUnavailable, match=rf"^{entry.feature}: .*\({entry.since} (can|has it)\)$"):
                cuda.require(entry.feature)
    if has and "MIGRATION" not in has:
        with pytest.raises(CudaUnavailable, match=r"restore on other GPUs: driver 570\.124\.06 cannot \(580 can\)"):
            cuda.restore(1, pairs={"GPU-1": "GPU-2"})
    cuda.close()


def test_features_follow_older_of_library_and_kernel_driver(node: Node) -> None:
    """Features without a function of their own follow the older of the two; the others follow the function."""
    node.ctl("driver", "615.71.05")
    older_kernel = Cuda(driver_version=lambda: "570.124.06", env=node.env)
    can = older_kernel.capabilities()
    assert can.checkpoint
    available = {item.feature for item in can.table if item.available}
    assert available & {Feature.MIGRATION, Feature.IPC, Feature.CUSTOM_STORAGE} == {Feature.CUSTOM_STORAGE}
    older_kernel.close()
    node.ctl("driver", "570.124.06")
    older_library = Cuda(driver_version=lambda: "610.57.04", env=node.env)
    table = {capability.feature: capability for capability in older_library.capabilities().table}
    assert table[Feature.MIGRATION].why == "the driver's library is of CUDA 12.8 (13.0 can, driver 580)"
    older_library.close()


def test_mig_and_unknown_version_disable_checkpoints(node: Node) -> None:
    """Regardless of the available functions."""
    mig = Cuda(driver_version=lambda: VERSION, mig=lambda: True, env=node.env)
    assert mig.capabilities().why_not == "MIG is on, and MIG instances cannot be checkpointed"
    mig.close()
    unknown = Cuda(driver_version=lambda: None, env=node.env)
    assert not unknown.capabilities().checkpoint
    unknown.close()


def test_missing_driver_is_reported(node: Node) -> None:
    """Querying the capabilities raises nothing; using them fails with a reason."""
    env = {key: value for key, value in node.env.items() if key != "LD_LIBRARY_PATH"}
    cuda = Cuda(driver_version=lambda: None, env=env)
    assert not cuda.capabilities().checkpoint
    with pytest.raises(CudaUnavailable):
        cuda.lock(os.getpid(), timeout_ms=10)
    cuda.close()
