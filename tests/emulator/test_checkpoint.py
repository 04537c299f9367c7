"""Another process suspends and resumes a process on a GPU through `cuCheckpointProcess*`."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest
from emulator.node import DriverError, Node, Program
from stopping import stop

MIB = 1 << 20


def suspend(agent: Program, pid: int) -> None:
    """Lock and checkpoint the process, so that it holds no GPU."""
    agent.do(f"lock({pid}, 10_000); ok(d.cuCheckpointProcessCheckpoint({pid}, None))")


def resume(agent: Program, pid: int, pairs: list[tuple[str, str]] | None = None) -> None:
    """Restore and unlock the process."""
    agent.do(f"restore({pid}, {pairs!r}); ok(d.cuCheckpointProcessUnlock({pid}, None))")


def test_checkpoint_frees_memory_and_restore_keeps_contents(node: Node) -> None:
    """Three times in a row; meanwhile the GPU is free for others, and the process's own memory grows."""
    agent, user = node.agent(), node.user()
    user.do("a, b = alloc(64), alloc(2000)")
    written = user.get("[fill(a, 64 * MIB, 3), fill(b + 1000 * MIB, 77, 4)]")
    before = user.get("resident('RssAnon')")
    used = "n.nvmlDeviceGetMemoryInfo(handle(), n.nvmlMemory_v2).used"
    for _ in range(3):
        assert agent.get(used) == (64 + 2000 + 100) * MIB
        suspend(agent, user.pid)
        assert agent.get(f"state({user.pid})") == "checkpointed"
        assert agent.get(used) == 0
        assert agent.get("processes()") == {}
        assert user.get("resident('RssAnon')") - before > 60 * MIB
        other = node.user()
        other.do("alloc(3900)")
        other.kill()
        resume(agent, user.pid)
        assert agent.get(f"state({user.pid})") == "running"
        assert user.get("[digest(a, 64 * MIB), digest(b + 1000 * MIB, 77)]") == written
        assert user.get("resident('RssAnon')") - before < 20 * MIB


def test_calls_of_locked_process_wait_for_unlock(node: Node) -> None:
    """They neither fail nor complete, whether or not the process is checkpointed meanwhile."""
    agent, user = node.agent(), node.user()
    for between in ("pass", f"ok(d.cuCheckpointProcessCheckpoint({user.pid}, None)); restore({user.pid})"):
        agent.do(f"lock({user.pid})")
        user.do("done = []; t = threading.Thread(target=lambda: (use(), done.append(alloc(1)))); t.start()")
        agent.do(between)
        assert agent.get(f"state({user.pid})") == "locked"
        user.do("t.join(0.05)")
        assert user.get("done") == []
        agent.do(f"ok(d.cuCheckpointProcessUnlock({user.pid}, None))")
        user.do("t.join()")
        assert len(user.get("done")) == 1


def test_checkpointed_process_holds_no_driver_resources(node: Node) -> None:
    """It has no descriptor and no mapping that exists on this node only."""
    agent, user = node.agent(), node.user()
    user.do("alloc(10)")
    held = user.get("opened()")
    assert any("vram" in name for name in held)
    suspend(agent, user.pid)
    agent.until(f"'{node.directory}' in open('/proc/{user.pid}/maps').read()", lambda mapped: not mapped)
    left = user.get("opened()")
    assert not [name for name in left if "vram" in name or "userfaultfd" in name or str(node.directory) in name]
    resume(agent, user.pid)
    assert len(user.get("opened()")) == len(held)


def test_steps_out_of_order_are_rejected(node: Node) -> None:
    """RUNNING, LOCKED, CHECKPOINTED, LOCKED, RUNNING; any other step is refused and changes nothing."""
    agent, user = node.agent(), node.user()
    steps = {
        "lock": f"lock({user.pid})",
        "checkpoint": f"ok(d.cuCheckpointProcessCheckpoint({user.pid}, None))",
        "restore": f"restore({user.pid})",
        "unlock": f"ok(d.cuCheckpointProcessUnlock({user.pid}, None))",
    }
    path = [
        ("running", "lock"),
        ("locked", "checkpoint"),
        ("checkpointed", "restore"),
        ("locked", "unlock"),
        ("running", None),
    ]
    allowed = {"running": {"lock"}, "locked": {"checkpoint", "unlock"}, "checkpointed": {"restore"}}
    for state, following in path:
        for name in steps.keys() - allowed[state]:
            with pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_STATE"):
                agent.do(steps[name])
        assert agent.get(f"state({user.pid})") == state
        if following:
            agent.do(steps[following])


def test_lock_waits_for_kernel_or_times_out(node: Node) -> None:
    """The lock waits for a kernel that ends; one that does not end leaves the process running."""
    agent, user = node.agent(), node.user()
    user.do("busy(200)")
    agent.do(f"lock({user.pid}, 10_000)")
    agent.do(f"ok(d.cuCheckpointProcessUnlock({user.pid}, None))")
    user.do("busy(600_000)")
    with pytest.raises(DriverError, match="CUDA_ERROR_NOT_READY"):
        agent.do(f"lock({user.pid}, 50)")
    assert agent.get(f"state({user.pid})") == "running"
    user.do("alloc(1)")


def test_lock_timeout_is_injected(node: Node) -> None:
    """The fault applies to one process and a number of calls."""
    agent, user, other = node.agent(), node.user(), node.user()
    node.ctl("fault", "lock-timeout", "--pid", str(user.pid), "--count", "1")
    agent.do(f"lock({other.pid}, 20)")
    with pytest.raises(DriverError, match="CUDA_ERROR_NOT_READY"):
        agent.do(f"lock({user.pid}, 20)")
    user.do("alloc(1)")
    agent.do(f"lock({user.pid}, 20)")


def test_checkpoint_failure_is_injected(node: Node) -> None:
    """The process stays locked and can be unlocked intact; with a fatal fault it has failed for good."""
    agent, user = node.agent(), node.user()
    user.do("a = alloc(1)")
    written = user.get("fill(a, MIB, 5)")
    agent.do(f"lock({user.pid})")
    node.ctl("fault", "checkpoint-fails", "--error", "304", "--count", "1")
    with pytest.raises(DriverError, match="CUDA_ERROR_OPERATING_SYSTEM"):
        agent.do(f"ok(d.cuCheckpointProcessCheckpoint({user.pid}, None))")
    assert agent.get(f"state({user.pid})") == "locked"
    agent.do(f"ok(d.cuCheckpointProcessUnlock({user.pid}, None))")
    assert user.get("digest(a, MIB)") == written
    agent.do(f"lock({user.pid})")
    node.ctl("fault", "checkpoint-fails", "--fatal", "--count", "1")
    with pytest.raises(DriverError, match="CUDA_ERROR_UNKNOWN"):
        agent.do(f"ok(d.cuCheckpointProcessCheckpoint({user.pid}, None))")
    assert agent.get(f"state({user.pid})") == "failed"
    with pytest.raises(DriverError, match="CUDA_ERROR_UNKNOWN"):
        user.do("alloc(1)")


@pytest.mark.parametrize(("fatal", "state"), [((), "checkpointed"), (("--fatal",), "failed")])
def test_restore_failure_is_injected(node: Node, fatal: tuple[str, ...], state: str) -> None:
    """The process stays checkpointed, for another attempt; with a fatal fault it has failed for good."""
    agent, user = node.agent(), node.user()
    user.do("a = alloc(1)")
    written = user.get("fill(a, MIB, 5)")
    suspend(agent, user.pid)
    node.ctl("fault", "restore-fails", "--count", "1", *fatal)
    with pytest.raises(DriverError, match="CUDA_ERROR_UNKNOWN"):
        agent.do(f"restore({user.pid})")
    assert agent.get(f"state({user.pid})") == state
    if not fatal:
        resume(agent, user.pid)
        assert user.get("digest(a, MIB)") == written


def test_restore_without_free_memory_is_lost(node: Node) -> None:
    """As with the driver: out of memory at first, impossible afterwards: check free memory in advance."""
    agent, user, other = node.agent(), node.user(), node.user()
    user.do("alloc(3000)")
    suspend(agent, user.pid)
    other.do("alloc(2000)")
    with pytest.raises(DriverError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        agent.do(f"restore({user.pid})")
    other.kill()
    with pytest.raises(DriverError, match="CUDA_ERROR_OPERATING_SYSTEM"):
        agent.do(f"restore({user.pid})")
    with pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_STATE"):
        agent.do(f"ok(d.cuCheckpointProcessUnlock({user.pid}, None))")
    assert agent.get(f"state({user.pid})") == "checkpointed"


def test_pairs_move_process_to_another_gpu(node: Node) -> None:
    """The pairs must name every GPU of the driver; the program then sees the new GPU as its own."""
    agent, user = node.agent(), node.user()
    first, second = (gpu["uuid"] for gpu in node.show()["gpus"])
    user.do("a = alloc(5)")
    written = user.get("fill(a, 5 * MIB, 6)")
    suspend(agent, user.pid)
    for pairs in (
        [(first, second)],
        [(first, second), (second, second)],
        [(first, first), (second, "GPU-" + "0" * 32)],
    ):
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
            agent.do(f"restore({user.pid}, {pairs!r})")
    resume(agent, user.pid, [(first, second), (second, first)])
    assert agent.get("processes(0)") == {}
    assert agent.get("processes(1)") == {str(user.pid): 106 * MIB}
    assert user.get("digest(a, 5 * MIB)") == written
    assert user.get("bytes(ok(d.cuDeviceGetUuid(0)).bytes).hex()") == second.removeprefix("GPU-").replace("-", "")


def test_pairs_of_different_models_are_rejected(bare_node: Node) -> None:
    """Tested with two models on a node."""
    bare_node.init("--model", "a100-80g", "--model", "h100-80g")
    agent, user = bare_node.agent(), bare_node.user()
    first, second = (gpu["uuid"] for gpu in bare_node.show()["gpus"])
    suspend(agent, user.pid)
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        agent.do(f"restore({user.pid}, {[(first, second), (second, first)]!r})")
    resume(agent, user.pid)


def test_managed_memory_and_old_drivers_are_not_supported(bare_node: Node) -> None:
    """Each fails with its own error, and the program continues."""
    bare_node.init("--gpus", "1")
    agent, user = bare_node.agent(), bare_node.user()
    user.do("ok(d.cuMemAllocManaged(MIB, 1))")
    agent.do(f"lock({user.pid})")
    with pytest.raises(DriverError, match="CUDA_ERROR_NOT_SUPPORTED"):
        agent.do(f"ok(d.cuCheckpointProcessCheckpoint({user.pid}, None))")
    agent.do(f"ok(d.cuCheckpointProcessUnlock({user.pid}, None))")
    user.do("alloc(1)")
    user.kill()
    bare_node.init("--gpus", "1", "--driver-version", "565.57.01", "--cuda-version", "12.7")
    user = bare_node.user()
    with pytest.raises(DriverError):
        bare_node.agent().do(f"lock({user.pid})")


def test_processes_without_cuda_have_no_restore_thread(node: Node) -> None:
    """Their state is "running" nevertheless; a missing process is an error."""
    agent, user, idler = node.agent(), node.user(), node.agent()
    tid = agent.get(f"ok(d.cuCheckpointProcessGetRestoreThreadId({user.pid}))")
    assert str(tid) in [task.name for task in Path(f"/proc/{user.pid}/task").iterdir()]
    with pytest.raises(DriverError, match="CUDA_ERROR_NOT_INITIALIZED"):
        agent.do(f"ok(d.cuCheckpointProcessGetRestoreThreadId({idler.pid}))")
    assert agent.get(f"state({idler.pid})") == "running"
    user.kill()
    with pytest.raises(DriverError, match="CUDA_ERROR_OPERATING_SYSTEM"):
        agent.do(f"lock({user.pid})")


def test_query_of_stopped_process_waits(node: Node) -> None:
    """Also for the state, as with real drivers; the restore thread can be determined without waiting."""
    agent, user = node.agent(), node.user()
    suspend(agent, user.pid)
    stop(user.pid)
    assert agent.get(f"ok(d.cuCheckpointProcessGetRestoreThreadId({user.pid}))") > 0
    agent.send(f"result = state({user.pid})")
    assert agent.process.stdout is not None
    assert not select.select([agent.process.stdout], [], [], 0.3)[0]
    os.kill(user.pid, signal.SIGCONT)
    assert agent.receive() == "checkpointed"
    resume(agent, user.pid)


def test_checkpointed_process_can_be_killed(node: Node) -> None:
    agent, user = node.agent(), node.user()
    suspend(agent, user.pid)
    user.kill()
    with pytest.raises(DriverError, match="CUDA_ERROR_OPERATING_SYSTEM"):
        agent.do(f"restore({user.pid})")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a PID namespace")
def test_process_in_nested_namespace_has_its_outer_pid(node: Node) -> None:
    """From the outer namespace; in its own namespace it has its own PID, and processes outside are not listed."""
    agent, outer = node.agent(), node.user()
    probe = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"no PID namespace with its own /proc can be made here: {probe.stderr.decode().strip()}")
    inner = node.start("unshare", "--pid", "--fork", "--mount-proc")
    inner.do("use(); n.nvmlInit(); a = alloc(50)")
    written = inner.get("fill(a, 50 * MIB, 7)")
    (inner_pid, listed), seen = inner.get("[os.getpid(), list(processes())]"), agent.get("list(processes())")
    assert inner_pid == 1
    assert listed == [1]
    assert outer.pid in seen
    (pid,) = set(seen) - {outer.pid}
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    assert next(line.split() for line in status if line.startswith("NSpid")) == ["NSpid:", str(pid), "1"]
    suspend(agent, pid)
    assert agent.get("list(processes())") == [outer.pid]
    resume(agent, pid)
    assert inner.get("digest(a, 50 * MIB)") == written


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_processes_of_other_users_are_not_permitted(node: Node) -> None:
    """Processes of any user can use the GPUs; root suspends any process, a user none of others."""
    become = "d.cuDriverGetVersion(); os.setgid({0}); os.setuid({0})"
    root, user, stranger = node.agent(), node.start(), node.agent()
    user.do(become.format(65534))
    user.do("use(); a = alloc(5)")
    written = user.get("fill(a, 5 * MIB, 8)")
    stranger.do(become.format(65533))
    with pytest.raises(DriverError, match="CUDA_ERROR_NOT_PERMITTED"):
        stranger.do(f"lock({user.pid}, 10)")
    assert stranger.get("processes()") == {str(user.pid): 106 * MIB}
    suspend(root, user.pid)
    resume(root, user.pid)
    assert user.get("digest(a, 5 * MIB)") == written
