"""Reasons against a suspension: each has its code, and is reported only if it applies."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from stat import S_IFBLK, S_IFCHR
from typing import Any

import pytest
from namespace_job import Job, needs_root
from waiting import wait_until

from slurm_affinode.base.pidfd import Id, Process
from slurm_affinode.checkpoint import inspection
from slurm_affinode.checkpoint.criu.restore_gate import of_owner
from slurm_affinode.checkpoint.files import open_files
from slurm_affinode.checkpoint.files.service_connections import ServiceConnection
from slurm_affinode.checkpoint.inspection import (
    CLOSED,
    EXECUTED,
    LEASED,
    PACKETS,
    SEALED,
    THREAD,
    MemoryFacts,
    ProcessFacts,
    TreeFacts,
    collect,
    forked_workers,
    memory_facts,
)
from slurm_affinode.checkpoint.interface import Capabilities
from slurm_affinode.checkpoint.user_files import User
from slurm_affinode.model.suspension import Mode, Refusal, RefusalCode, Steps, SuspendOption
from slurm_affinode.suspension.refusals import (
    GpuUseFacts,
    ImageFacts,
    JobFacts,
    estimate,
    of_mode,
    of_tree,
    refusals,
    remedy,
)

GIB = 1 << 30
HERE = {"pid": "pid:[5]", "mnt": "mnt:[5]", "user": "user:[1]"}
ROOT = ProcessFacts(100, "slurm_script", (1001,) * 4, namespaces=HERE, files=("/dev/null", "/home/a/out"))
USER = replace(ROOT, pid=101, name="python", files=("/dev/nvidia0", "/dev/nvidiactl", "anon_inode:[eventpoll]"))
TREE = TreeFacts(99, 100, (ROOT, USER), HERE)
SESSIONS = (
    replace(ROOT, parent=99, session=100),
    replace(USER, parent=100, session=100),
    replace(ROOT, pid=102, parent=100, session=102),
    replace(ROOT, pid=103, name="odd", parent=101, session=102),
)
"""The last one is in the session of the third, which is not above it."""
GPU = GpuUseFacts(Capabilities("580.95.05", checkpoint=True), frozenset({101}), 40 * GIB)
MEMORY = MemoryFacts(100 * GIB, 64 * GIB)
JOB = JobFacts(batch=True, requeue=True)
IMAGE = ImageFacts("4.2", "6.18.0")
OWNER = User(1001, 1001, (4, 24))
RIGHTS = of_owner(OWNER)


def refusals_with(**changes: Any) -> list[Refusal]:
    """Return the refusals with some facts changed."""
    facts: dict[str, Any] = {
        "job": JOB, "tree": TREE, "gpu": GPU, "memory": MEMORY, "owner": OWNER, "image": IMAGE, **changes,
    }  # fmt: skip
    return list(refusals(**facts))


def with_process(**changes: Any) -> TreeFacts:
    """Return the process tree with a further process."""
    return replace(TREE, processes=(*TREE.processes, replace(ROOT, pid=102, name="odd", **changes)))


def test_ordinary_job_can_be_suspended() -> None:
    """A batch script with a program on the GPU."""
    assert refusals_with() == []


REASONS: list[tuple[str, dict[str, Any]]] = [
    ("interactive", {"job": JobFacts(batch=False, requeue=False)}),
    ("no-requeue", {"job": replace(JOB, requeue=False)}),
    ("multi-node", {"job": replace(JOB, nodes=2)}),
    ("heterogeneous", {"job": replace(JOB, heterogeneous=True)}),
    ("srun-steps", {"job": replace(JOB, steps=("0", "1"))}),
    ("srun-steps", {"tree": replace(TREE, processes=(ROOT, USER, replace(ROOT, pid=103, name="srun")))}),
    ("criu", {"image": replace(IMAGE, criu=None)}),
    ("criu-sockets", {"image": replace(IMAGE, criu="4.1.1"), "tree": replace(TREE, inet_sockets=True)}),
    ("left-tree", {"tree": replace(TREE, outside=(replace(ROOT, pid=104, name="daemon"),))}),
    ("gone", {"tree": replace(TREE, processes=())}),
    ("setuid", {"tree": with_process(uids=(1001, 0, 0, 0))}),
    ("landlock", {"tree": replace(TREE, maybe_landlocked=frozenset({TREE.root_pid}))}),
    ("socket-kind", {"tree": with_process(protocols=frozenset({"TCPv6", "MPTCP"}))}),
    ("socket-kind", {"tree": with_process(protocols=frozenset({"UDP", "UDP in a multicast group"}))}),
    ("socket-kind", {"tree": with_process(protocols=frozenset({"TCP", "TCP with a connection to accept"}))}),
    ("other-user", {"tree": with_process(uids=(1002,) * 4)}),
    ("credentials", {"tree": with_process(credentials=(RIGHTS, replace(RIGHTS, gids=frozenset((1001, 104)))))}),
    ("credentials", {"tree": with_process(credentials=(replace(RIGHTS, groups=frozenset((4, 27))),))}),
    ("credentials", {"tree": with_process(credentials=(replace(RIGHTS, capabilities={"CapPrm": 1 << 21}),))}),
    ("other-user", {"tree": with_process(uids=(0,) * 4)}),
    ("traced", {"tree": with_process(tracer=55)}),
    ("kernel-state", {"tree": with_process(lost="shares memory with its parent")}),
    ("io-uring", {"tree": with_process(files=("anon_inode:[io_uring]",))}),
    ("rdma", {"tree": with_process(files=("/dev/infiniband/uverbs0",))}),
    ("rdma", {"tree": with_process(mapped_devices=("/dev/infiniband/uverbs0",))}),
    ("namespaces", {"tree": with_process(namespaces={**HERE, "mnt": "mnt:[6]"})}),
    (
        "namespaces",
        {"tree": replace(TREE, node_namespaces={"user": frozenset({"user:[1]"}), "net": frozenset({"net:[1]"})})},
    ),
    ("namespaces", {"tree": replace(TREE, node_namespaces={"user": frozenset({"user:[2]", "user:[3]"})})}),
    ("gpu-file", {"tree": with_process(files=("/dev/nvidia0",))}),
    ("gpu-file", {"tree": with_process(files=("/dev/nvidia-uvm",))}),
    ("gpu-file", {"tree": with_process(mapped_devices=("/dev/nvidiactl",))}),
    ("gpu-file", {"tree": with_process(files=("/dev/nvidia0",), heir_of=(100,))}),
    (
        "gpu-file",
        {
            "tree": with_process(files=("/dev/nvidia0",), heir_of=(101,)),
            "image": replace(IMAGE, no_device_files="the CRIU plugin /p cannot be used"),
        },
    ),
    (
        "service-plugin",
        {
            "tree": with_process(services=(ServiceConnection(1, "/run/nss", busy=False),)),
            "image": replace(IMAGE, no_plugin="the CRIU plugin /p cannot be used"),
        },
    ),
    ("service-busy", {"tree": with_process(services=(ServiceConnection(1, "/run/nss", busy=True),))}),
    ("undumpable", {"tree": with_process(files=("anon_inode:[perf_event]",))}),
    ("undumpable", {"tree": with_process(files=("/dev/fuse",))}),
    ("undumpable", {"tree": with_process(files=("anon_inode:[userfaultfd]",))}),
    ("undumpable", {"tree": with_process(files=("anon_inode:[eventfd-semaphore]",))}),
    ("undumpable", {"tree": with_process(files=("memfd (sealed)",))}),
    ("undumpable", {"tree": with_process(files=("pipe (packets)",))}),
    ("undumpable", {"tree": with_process(files=("anon_inode:[pidfd-thread]",))}),
    ("undumpable", {"tree": with_process(files=("temporary file (leased)",))}),
    ("undumpable", {"tree": with_process(files=("anon_inode:[eventpoll-closed]",))}),
    ("undumpable", {"tree": with_process(files=("memfd (executed)",))}),
    ("undumpable", {"tree": with_process(files=("mqueue:/jobs",))}),
    ("undumpable", {"tree": with_process(files=("anon_inode:[landlock-ruleset]",))}),
    ("undumpable", {"tree": with_process(files=("net:[4026531840]",))}),
    ("undumpable", {"tree": with_process(unlasting=("/proc/2",))}),
    ("session", {"tree": replace(TREE, processes=SESSIONS)}),
    ("stream-deleted", {"tree": replace(TREE, lost_streams=("/home/a/out",))}),
    ("sysv-ipc", {"tree": replace(TREE, sysv=("sem 1",))}),
    ("mig", {"gpu": replace(GPU, mig=True)}),
    ("driver", {"gpu": replace(GPU, capabilities=Capabilities("565", why_not="driver 565 cannot checkpoint"))}),
    ("mps", {"tree": with_process(mps=True)}),
    ("stopped", {"tree": replace(TREE, processes=(ROOT, replace(USER, state="T")))}),
    ("stopped", {"image": None, "tree": replace(TREE, processes=(ROOT, replace(USER, state="t")))}),
    ("host-memory", {"memory": MemoryFacts(100 * GIB, 40 * GIB)}),
    ("host-memory", {"memory": MemoryFacts(39 * GIB)}),
    ("no-room", {"image": replace(IMAGE, room="/images: 3 GiB free, 41 GiB needed")}),
]


@pytest.mark.parametrize(("code", "changes"), REASONS, ids=[f"{i}-{code}" for i, (code, _) in enumerate(REASONS)])
def test_each_reason_has_its_code(code: str, changes: dict[str, Any]) -> None:
    """No other is reported, and it is one line."""
    result = refusals_with(**changes)
    assert [refusal.code for refusal in result] == [code]
    assert result[0].text
    assert "\n" not in result[0].text


@pytest.mark.parametrize("code", sorted({code for code, _ in REASONS} - {"interactive", "gone"}))
def test_each_reason_has_a_remedy(code: str) -> None:
    """The remedy against steps depends on the option; ``agent.requests`` has that of jobs without the option."""
    assert remedy(Refusal(code, "text"), SuspendOption())


@pytest.mark.parametrize("code", sorted({code for code, _ in REASONS}))
def test_no_remedy_names_the_mode_that_the_job_has(code: str) -> None:
    """The rest of the remedy is a complete sentence, or there is none."""
    text = remedy(Refusal(code, "text"), SuspendOption(mode=Mode.INPLACE))
    assert text is None or (text and "inplace" not in text and not text.endswith((";", " ", "or")))


def test_remedy_depends_on_the_memory_that_is_short() -> None:
    """More memory for the job does not help where the node has too little."""
    (limit,), (node,) = (
        refusals_with(memory=memory) for memory in (MemoryFacts(100 * GIB, 40 * GIB), MemoryFacts(39 * GIB))
    )
    assert remedy(limit, SuspendOption()) == "request more memory (--mem)"
    assert "--mem" not in node.text
    assert "of the node" in (remedy(node, SuspendOption()) or "")
    assert "--mem" not in (remedy(node, SuspendOption()) or "")


def test_remedy_of_steps_depends_on_option() -> None:
    refusal = Refusal(RefusalCode.SRUN_STEPS, "text")
    assert "steps=local" in (remedy(refusal, SuspendOption()) or "")
    assert "steps=local" not in (remedy(refusal, SuspendOption(steps=Steps.LOCAL)) or "")
    assert remedy(Refusal(RefusalCode.GONE, "text"), SuspendOption()) is None


def test_refused_mode_lists_allowed_ones() -> None:
    """The list may be empty."""
    assert of_mode(Mode.INPLACE, ()) == Refusal(RefusalCode.MODE, "mode=inplace is not allowed here (allowed: none)")
    assert of_mode(Mode.INPLACE, (Mode.REQUEUE,)).text.endswith("(allowed: requeue)")


def test_descriptors_without_a_path_are_not_refused() -> None:
    """Those of the kinds that CRIU dumps."""
    kinds = ("eventfd", "eventpoll", "signalfd", "timerfd", "pidfd")
    files = (*(f"anon_inode:[{kind}]" for kind in kinds), "anon_inode:inotify", "pipe:[77]", "socket:[78]")
    assert refusals_with(tree=with_process(files=(*files, "/memfd:x (deleted)"))) == []


def test_resources_of_driver_are_not_refused() -> None:
    """Files of GPUs, and the userfaultfd of an emulated driver, are closed by the checkpoint."""
    files = ("/dev/nvidia0", "anon_inode:[userfaultfd]", "anon_inode:dmabuf")
    assert refusals_with(tree=replace(TREE, processes=(ROOT, replace(USER, files=files)))) == []


def test_forked_worker_of_cuda_process_is_not_refused() -> None:
    """It has inherited its device files; a plugin that cannot be used matters only to jobs with such processes."""
    tree = with_process(files=("/dev/nvidia0",), mapped_devices=("/dev/nvidiactl",), heir_of=(100, 101), started=7)
    assert refusals_with(tree=tree) == []
    assert forked_workers(tree, GPU.users) == {Id(102, 7)}
    assert forked_workers(tree, {102}) == frozenset()
    no_plugin = replace(IMAGE, no_device_files="the CRIU plugin /p cannot be used (install it)")
    assert refusals_with(image=no_plugin) == []
    assert refusals_with(tree=tree, image=no_plugin)[0].text.endswith(
        "and the CRIU plugin /p cannot be used (install it)"
    )


def test_refusals_give_numbers() -> None:
    """The required and the available amount."""
    assert refusals_with(memory=MemoryFacts(100 * GIB, 30 * GIB))[0].text == (
        "its GPU memory (40 GiB) does not fit below its memory limit, which leaves 30 GiB: raise --mem"
    )
    assert "3 GiB free" in refusals_with(image=replace(IMAGE, room="/images: 3 GiB free"))[0].text
    assert estimate(TREE, 5 * GIB, 7) == 5 * GIB + 7 + (256 << 20)


def test_inplace_has_fewer_refusals() -> None:
    """Nothing is dumped or requeued: steps and daemons do not matter; GPU memory and driver do."""
    tree = replace(TREE, outside=(ROOT,))
    assert refusals_with(image=None, job=replace(JOB, steps=("0",)), tree=tree) == []
    assert [refusal.code for refusal in refusals_with(image=None, memory=MemoryFacts(GIB))] == ["host-memory"]


def test_launcher_of_local_steps_is_not_refused() -> None:
    """It has the name of Slurm's program, and runs the step below the script."""
    launcher = ("/usr/bin/python3", "-I", "/usr/libexec/slurm-affinode/srun", "hostname")
    assert (
        refusals_with(
            tree=replace(TREE, processes=(*TREE.processes, replace(ROOT, pid=102, name="srun", arguments=launcher)))
        )
        == []
    )
    for arguments in ((), ("srun", "hostname"), ("/usr/bin/srun", "python3")):
        slurms = replace(ROOT, pid=102, name="srun", arguments=arguments)
        assert [refusal.code for refusal in refusals_with(tree=replace(TREE, processes=(*TREE.processes, slurms)))] == [
            "srun-steps"
        ]


def test_rights_of_the_owner_are_not_refused() -> None:
    """A thread may have fewer groups, another of the owner's groups, and inheritable capabilities."""
    fewer = replace(
        RIGHTS, groups=frozenset((4,)), gids=frozenset((24,)), capabilities={"CapInh": 1, "CapBnd": 1 << 40}
    )
    assert refusals_with(tree=with_process(credentials=(RIGHTS, fewer))) == []


def test_zombie_of_root_is_not_refused() -> None:
    """It was restored from an image and has not been waited for yet."""
    assert refusals_with(tree=with_process(state="Z", uids=(0,) * 4, namespaces={**HERE, "mnt": "mnt:[6]"})) == []


def test_stopped_process_without_gpu_is_not_refused() -> None:
    """A background job of a shell: it stays stopped."""
    assert refusals_with(tree=with_process(state="T")) == []


def test_old_criu_is_accepted_on_older_kernels() -> None:
    """Sockets restored by CRIU 4.1 fail only on Linux 6.16 or newer."""
    tree = replace(TREE, inet_sockets=True)
    assert refusals_with(image=ImageFacts("4.1.1", "6.12.57+deb13-amd64"), tree=tree) == []
    assert refusals_with(image=replace(IMAGE, criu="4.1.1")) == []


BEGAN = 100
"""Ticks since boot."""


def stat(proc: Path, pid: int, parent: int, *, started: int = BEGAN) -> None:
    """Write ``/proc/PID/stat``."""
    text = f"{pid} (odd) name) S {parent} {'0 ' * 17}{started} 0\n"
    (proc / str(pid) / "stat").write_text(text)


def process(proc: Path, pid: int, parent: int, *, inner: int, fds: dict[str, str] | None = None, **status: str) -> None:
    """Create a process in a fake ``/proc``."""
    base = proc / str(pid)
    (base / "fd").mkdir(parents=True)
    (base / "ns").mkdir()
    lines = {
        "Name": "worker", "State": "S (sleeping)", "PPid": str(parent), "TracerPid": "0", "Uid": "1001 1001 1001 1001",
        "NSpid": f"{pid} {inner}", "RssAnon": "1000 kB", "RssShmem": "24 kB", "VmSwap": "0 kB", **status,
    }  # fmt: skip
    (base / "status").write_text("".join(f"{key}:\t{value}\n" for key, value in lines.items()))
    stat(proc, pid, parent)
    (base / "ns" / "pid").symlink_to("pid:[7]")
    for name, target in (fds or {}).items():
        (base / "fd" / name).symlink_to(target)


def test_tree_is_read_from_proc(tmp_path: Path) -> None:
    """Parents precede children; processes beside the root are outside."""
    process(tmp_path, 50, 1, inner=1)
    process(tmp_path, 60, 50, inner=2, fds={"0": "/dev/null", "3": "anon_inode:[io_uring]"})
    process(tmp_path, 70, 60, inner=3, fds={"3": "socket:[42]"})
    process(tmp_path, 80, 50, inner=9)
    (tmp_path / "60" / "net").mkdir()
    row = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1001  0 42 1 x 100 0 0 10 0\n"
    (tmp_path / "60" / "net" / "tcp").write_text("  sl  local_address ...\n" + row)
    (tmp_path / "70" / "smaps_rollup").write_text("Pss_Anon: 500 kB\nPss_Shmem: 12 kB\nSwapPss: 0 kB\n")
    (tmp_path / "60" / "maps").write_text("7f0 rw-s 0 00:05 9   /dev/infiniband/uverbs0\n7f1 rw-s 0 0:1 2 /dev/shm/x\n")
    (tmp_path / "60" / "cmdline").write_bytes(b"python\0-m\0caf\xe9\0")
    tree = collect(50, 60, proc=tmp_path)
    assert [item.pid for item in tree.processes] == [60, 70]
    assert [item.arguments for item in tree.processes] == [("python", "-m", "caf\N{REPLACEMENT CHARACTER}"), ()]
    assert [item.pid for item in tree.outside] == [80]
    assert tree.processes[0].files == ("/dev/null", "anon_inode:[io_uring]")
    assert tree.processes[0].mapped_devices == ("/dev/infiniband/uverbs0",)
    assert tree.memory == (1024 + 512) * 1024
    assert tree.inet_sockets
    assert tree.init_namespaces == {"pid": "pid:[7]"}
    assert tree.node_namespaces == {}


def test_processes_forked_during_read_are_in_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that constantly starts commands is not refused by chance."""
    process(tmp_path, 50, 1, inner=1)
    process(tmp_path, 60, 50, inner=2)
    process(tmp_path, 80, 50, inner=9)
    members, ancestors = inspection._members, inspection.ancestors
    queries: list[int] = []

    def later(space: str, proc: Path) -> list[Id]:
        process(proc, 70, 60, inner=3)
        process(proc, 90, 71, inner=4)
        return members(space, proc)

    def adopted(held: Process, *, proc: Path) -> Iterator[Process]:
        """Let process 71 end during the lookup, with 90 adopted by the script."""
        queries.append(held.pid)
        yield from ancestors(held, proc=proc)
        if held.pid == 90:
            stat(proc, 90, 60)

    monkeypatch.setattr(inspection, "_members", later)
    monkeypatch.setattr(inspection, "ancestors", adopted)
    tree = collect(50, 60, proc=tmp_path)
    assert [item.pid for item in tree.processes] == [60, 70, 90]
    assert [item.pid for item in tree.outside] == [80]
    assert queries.count(90) == 2


def test_child_of_earlier_process_with_reused_pid_is_not_in_tree(tmp_path: Path) -> None:
    """It is older than the current owner of its parent's PID: it belongs to another job, and so do its children."""
    process(tmp_path, 50, 1, inner=1)
    process(tmp_path, 60, 50, inner=2)
    process(tmp_path, 70, 60, inner=3)
    stat(tmp_path, 70, 60, started=BEGAN - 1)
    (tmp_path / "70" / "ns" / "pid").unlink()
    assert [item.pid for item in collect(50, 60, proc=tmp_path).processes] == [60]


def test_root_in_another_namespace_is_ignored(tmp_path: Path) -> None:
    """Its PID has been reused since."""
    process(tmp_path, 50, 1, inner=1)
    process(tmp_path, 60, 50, inner=2)
    (tmp_path / "60" / "ns" / "pid").unlink()
    (tmp_path / "60" / "ns" / "pid").symlink_to("pid:[8]")
    assert collect(50, 60, proc=tmp_path).processes == ()


def test_files_of_reused_pid_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its PID is reused while it is read."""
    process(tmp_path, 50, 1, inner=1)
    process(tmp_path, 60, 50, inner=2, fds={"0": "/home/a/in"})
    listdir = os.listdir

    def after_that(path: Any) -> list[str]:
        names = listdir(path)
        if names == ["0"] and not (tmp_path / "ended").exists():
            (tmp_path / "60").rename(tmp_path / "ended")
            process(tmp_path, 60, 50, inner=2, fds={"0": "/home/b/secret"}, RssAnon="77 kB")
        return names

    monkeypatch.setattr(os, "listdir", after_that)
    monkeypatch.setattr(inspection, "_has_inet", lambda *_: False)
    [item] = collect(50, 60, proc=tmp_path).processes
    assert item.files == ("/home/a/in",)


def test_deleted_output_file_counts_if_open(tmp_path: Path) -> None:
    """PID 1 keeps Slurm's descriptors; a script that writes elsewhere does not need them."""
    process(
        tmp_path, 50, 1, inner=1, fds={"0": "/dev/null", "1": "/home/a/out (deleted)", "2": "/home/a/err (deleted)"}
    )
    process(tmp_path, 60, 50, inner=2, fds={"1": "/home/a/out (deleted)", "2": "/home/a/log", "3": "/x (deleted)"})
    assert collect(50, 60, proc=tmp_path).lost_streams == ("/home/a/out",)


def test_system_v_ipc_created_since_job_start_counts(tmp_path: Path) -> None:
    """Older objects, and those of other users, do not belong to the job."""
    process(tmp_path, 50, 1, inner=1)
    process(tmp_path, 60, 50, inner=2)
    (tmp_path / "stat").write_text("cpu 1\nbtime 1000\n")
    ticks = 500 * os.sysconf("SC_CLK_TCK") + 1
    stat(tmp_path, 60, 50, started=ticks)
    (tmp_path / "sysvipc").mkdir()
    head = "       key      semid perms      nsems   uid   gid  cuid  cgid      otime      ctime\n"
    rows = [(0, 1001, 1499), (1, 1001, 1500), (2, 1002, 1600), (3, 1001, 1700)]
    (tmp_path / "sysvipc" / "sem").write_text(
        head + "".join(f"  0 {item} 600 3 1001 1001 {uid} 1001 0 {when}\n" for item, uid, when in rows)
    )
    assert collect(50, 60, proc=tmp_path).sysv == ("sem 1", "sem 3")
    (tmp_path / "50" / "ns" / "ipc").symlink_to("ipc:[8]")
    assert collect(50, 60, proc=tmp_path).sysv == ()


def test_current_process_can_be_read() -> None:
    """The real ``/proc`` is read, with a real deleted file, a message queue, and both kinds of eventfd."""
    descriptor = os.memfd_create("x")
    name, library = f"/affinode-{os.getpid()}", ctypes.CDLL("librt.so.1")
    queue = library.mq_open(name.encode(), os.O_CREAT | os.O_RDWR, 0o600, None)
    library.mq_unlink(name.encode())
    plain, counting = os.eventfd(0), os.eventfd(0, os.EFD_SEMAPHORE)
    collected = collect(os.getpid(), os.getpid())
    files = set(collected.processes[0].files)
    assert {"anon_inode:[eventfd]", "anon_inode:[eventfd-semaphore]"} <= files
    assert f"mqueue:{name} (deleted)" in files
    os.close(queue)
    os.close(plain)
    os.close(counting)
    assert collected.processes[0].pid == os.getpid()
    assert collected.processes[0].memory > 1 << 20
    assert memory_facts(os.getpid()).available > 0
    os.close(descriptor)


def test_sealed_and_executed_files_in_memory_are_known() -> None:
    """A file that may no longer be written to is sealed, which matters if it is mapped."""
    plain, sized, sealed = (os.memfd_create(name, os.MFD_ALLOW_SEALING) for name in ("a", "b", "c"))
    try:
        fcntl.fcntl(sized, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        assert not {SEALED, EXECUTED} & set(collect(os.getpid(), os.getpid()).processes[0].files)
        os.ftruncate(sealed, 4096)
        fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert SEALED not in collect(os.getpid(), os.getpid()).processes[0].files
        with mmap.mmap(sealed, 4096, prot=mmap.PROT_READ):
            assert SEALED in collect(os.getpid(), os.getpid()).processes[0].files
        os.write(plain, Path("/bin/sleep").read_bytes())
        with subprocess.Popen(("sleep", "100"), executable=f"/proc/{os.getpid()}/fd/{plain}") as running:
            assert EXECUTED in collect(os.getpid(), running.pid).processes[0].files
            running.kill()
    finally:
        for descriptor in (plain, sized, sealed):
            os.close(descriptor)


CLONE = """
import ctypes, os, sys, threading
libc, stack = ctypes.CDLL(None), ctypes.create_string_buffer(1 << 20)
pause = ctypes.cast(libc.pause, ctypes.c_void_p)
top = ctypes.c_void_p((ctypes.addressof(stack) + (1 << 20)) & ~0xF)
number = libc.clone(pause, top, int(sys.argv[1], 16), None)
print(number, flush=True)
threading.Event().wait()
"""
RELATIONS = {
    "0x11": None,
    "0x411": None,
    "0x0": "another signal than SIGCHLD",
    "0xa": "another signal than SIGCHLD",
    "0x111": "shares memory",
    "0x211": "shares its working directory",
}
"""Flags of clone(2) -> the words of the refusal."""


@pytest.mark.parametrize("flags", RELATIONS)
def test_relations_of_processes_that_are_lost_are_known(flags: str) -> None:
    """A child with another exit signal, and those that share what CRIU does not restore as shared."""
    argv = (sys.executable, "-c", CLONE, flags)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            (facts,) = collect(os.getpid(), child).processes
            expected = RELATIONS[flags]
            assert (facts.lost is None) if expected is None else (expected in (facts.lost or ""))
            assert collect(os.getpid(), parent.pid).processes[0].lost is None
            os.kill(child, signal.SIGKILL)
        finally:
            parent.kill()


def test_process_without_its_first_thread_is_known() -> None:
    """It looks like one that has ended."""
    code = "import ctypes, os, signal, threading\n"
    code += "threading.Thread(target=signal.pause).start(); print(flush=True); ctypes.CDLL(None).pthread_exit(None)"
    with subprocess.Popen((sys.executable, "-c", code), stdout=subprocess.PIPE) as running:
        try:
            assert running.stdout is not None
            running.stdout.readline()
            with Process(running.pid) as process:
                wait_until("its first thread has ended", lambda: process.stat().state, lambda state: state == "Z")
            assert "has ended its first thread" in (collect(os.getpid(), running.pid).processes[0].lost or "")
        finally:
            running.kill()


def test_states_of_descriptors_are_known() -> None:
    """Pipes in packet mode, pidfds of threads, and leases on temporary files."""

    def states() -> set[str]:
        return {PACKETS, THREAD, LEASED} & set(collect(os.getpid(), os.getpid()).processes[0].files)

    with ExitStack() as stack:

        def close(*descriptors: int) -> None:
            for descriptor in descriptors:
                stack.callback(os.close, descriptor)

        close(*os.pipe(), os.pidfd_open(os.getpid()))
        temporary = stack.enter_context(tempfile.NamedTemporaryFile(dir="/var/tmp"))
        assert states() == set()
        close(*os.pipe2(os.O_DIRECT))
        assert states() == {PACKETS}
        close(os.pidfd_open(threading.get_native_id(), os.O_EXCL))
        assert states() == {PACKETS, THREAD}
        fcntl.fcntl(temporary, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        assert states() == {PACKETS, THREAD, LEASED}


EPOLL = """
import os, select, signal, sys
reader, writer = os.pipe()
poll = select.epoll()
poll.register(reader, select.EPOLLIN)
if "duplicate" in sys.argv:
    os.dup(reader)
child = os.fork()
if child == 0:
    signal.pause()
if "closed" in sys.argv:
    os.close(reader)
print(child, flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    ("arguments", "expected"), [((), False), (("closed",), True), (("closed", "duplicate"), False)]
)
def test_epoll_instance_with_closed_file_is_known(arguments: tuple[str, ...], expected: bool) -> None:
    """Only another process still has it open. A duplicate in the same process can be restored."""
    with subprocess.Popen((sys.executable, "-c", EPOLL, *arguments), stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            child = int(running.stdout.readline())
            assert (CLOSED in collect(os.getpid(), running.pid).processes[0].files) == expected
            os.kill(child, signal.SIGKILL)
        finally:
            running.kill()


def test_states_of_sockets_are_known() -> None:
    """A member of a multicast group, and a connection within the user's processes that is not accepted."""

    def states() -> set[str]:
        return {name for name in collect(os.getpid(), os.getpid()).processes[0].protocols if " " in name}

    assert states() == set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as member:
        member.bind(("127.0.0.1", 0))
        assert states() == set()
        group = socket.inet_aton("239.77.7.7") + socket.inet_aton("127.0.0.1")
        member.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        assert states() == {"UDP in a multicast group"}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as subscriber:
        subscriber.bind((0, 1))
        assert states() == set()
        subscriber.setsockopt(270, 1, 34)  # SOL_NETLINK, NETLINK_ADD_MEMBERSHIP
        assert states() == {"NETLINK in a group above 32"}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as corked:
        corked.setsockopt(socket.IPPROTO_UDP, 1, 1)
        assert states() == {"UDP with a datagram that is not complete"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert states() == set()
        with socket.create_connection(server.getsockname()):
            assert states() == {"TCP with a connection to accept"}
            accepted, _ = server.accept()
            assert states() == set()
            accepted.close()


def test_states_of_unix_sockets_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with which CRIU does not dump a socket, or with which it could not be created before the restore."""

    def states() -> set[str]:
        return {name for name in collect(os.getpid(), os.getpid()).processes[0].protocols if " " in name}

    monkeypatch.chdir(tmp_path)
    near, far = socket.socketpair()
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client, near, far:
        server.bind(f"\0affinode-{os.getpid()}")
        server.listen()
        near.send(b"to be read")
        fcntl.fcntl(far, fcntl.F_SETOWN, os.getpid())
        assert states() == set()
        client.connect(server.getsockname())
        assert states() == {"UNIX with a connection to accept"}
        client.close()
        assert states() == {"UNIX with a connection to accept"}
        server.accept()[0].close()
        assert states() == set()
        fcntl.fcntl(server, fcntl.F_SETOWN, -os.getpgrp())
        assert states() == {"UNIX that sends signals"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("receiver")
        assert states() == set()
        receiver.sendto(b"to be read", "receiver")
        assert states() == {"UNIX with a message to receive"}


@pytest.mark.parametrize(
    ("directory", "name", "uid", "uses"),
    [
        ("/tmp/nvidia-mps", "nvidia-cuda-mps", 0, True),  # noqa: S108 - where the daemon of a node has it
        ("/tmp/nvidia-mps", "nvidia-cuda-mps", 1001, True),  # noqa: S108
        ("/tmp/nvidia-mps", "nvidia-cuda-mps", 1002, False),  # noqa: S108
        ("/tmp/nvidia-mps", "nvidia-smi", 0, False),  # noqa: S108
        ("/x" * 3000, "nvidia-cuda-mps", 0, True),
        (None, "nvidia-cuda-mps", 0, False),
    ],
)
def test_mps_is_detected_without_following_path_of_user(
    tmp_path: Path, directory: str | None, name: str, uid: int, uses: bool
) -> None:
    """The evidence is the environment of the process and a daemon that serves its user."""
    process(tmp_path, 1, 0, inner=1)
    for pid, called, owner in ((70, "python", 1001), (71, name, uid)):
        process(tmp_path, pid, 1, inner=pid, Name=called, Uid=f"{owner}\t{owner}")
    if directory is not None:
        (tmp_path / "70" / "environ").write_text(f"A=1\0CUDA_MPS_PIPE_DIRECTORY={directory}\0")
    assert collect(1, 70, proc=tmp_path).processes[0].mps is uses


@pytest.mark.parametrize(
    ("line", "directory", "names"),
    [
        ("0::/slurm/job_1/step_batch", "slurm/job_1", ("memory.max", "memory.current")),
        ("4:memory:/slurm/job_1/step_batch", "memory/slurm/job_1", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
)
def test_memory_limit_is_that_of_tightest_cgroup(
    tmp_path: Path, line: str, directory: str, names: tuple[str, str]
) -> None:
    """Both versions of cgroups are supported; page cache is reclaimable."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    for pid in ("9", "self"):
        (proc / pid).mkdir(parents=True)
        (proc / pid / "cgroup").write_text(line + "\n")
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    job = cgroups / directory
    (job / "step_batch").mkdir(parents=True)
    (job / "step_batch" / "cgroup.procs").touch()
    (job / "step_batch" / names[0]).write_text("max\n")
    (job / names[0]).write_text("1000\n")
    (job / names[1]).write_text("900\n")
    (job / "memory.stat").write_text("inactive_file 50\n")
    assert memory_facts(9, proc=proc, cgroups=cgroups) == MemoryFacts(4 << 20, 150)


@pytest.mark.parametrize(
    ("line", "top", "names"),
    [
        ("0::/", "", ("memory.max", "memory.current")),
        ("4:memory:/docker/1f", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
)
def test_memory_limit_of_container_counts_inside(tmp_path: Path, line: str, top: str, names: tuple[str, str]) -> None:
    """There the root of the tree is the container's cgroup; version 1 gives a path that does not exist."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    for pid in ("9", "self"):
        (proc / pid).mkdir(parents=True)
        (proc / pid / "cgroup").write_text(line + "\n")
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    (cgroups / top).mkdir(parents=True)
    (cgroups / top / "cgroup.procs").touch()
    (cgroups / top / names[0]).write_text("1000\n")
    (cgroups / top / names[1]).write_text("900\n")
    assert memory_facts(9, proc=proc, cgroups=cgroups) == MemoryFacts(4 << 20, 100)


@needs_root
@pytest.mark.parametrize(("options", "names"), [((), ""), (("--net", "--ipc", "--uts"), "ipc, net, uts")])
def test_job_with_private_network_is_refused(tmp_path: Path, options: tuple[str, ...], names: str) -> None:
    """Its processes and its PID 1 share the same namespaces, but these are not the node's."""
    job = Job(tmp_path / "log", 'echo up >>"$0"; sleep 1000', options)
    try:
        result = of_tree(collect(job.init, job.init), (), User(0, 0))
    finally:
        job.end()
    texts = [problem.text for problem in result if problem.code == "namespaces"]
    named = [re.search(r"\((.*)\)", text) for text in texts]
    assert [", ".join(sorted(item[1].split(", "))) for item in named if item] == ([names] if names else [])


def test_session_of_a_process_above_is_not_refused() -> None:
    """The parent may have begun a session of its own meanwhile; so may the process. A zombie leads no session."""
    root, user, leader, odd = SESSIONS
    for change in ({"parent": 102}, {"session": 100}, {"session": 103}, {"session": 77}):
        assert refusals_with(tree=replace(TREE, processes=(root, user, leader, replace(odd, **change)))) == []  # type: ignore[arg-type]
    assert refusals_with(tree=replace(TREE, processes=(root, user, replace(leader, state="Z"), odd))) == []


def test_session_is_unknown_while_a_parent_is_missing() -> None:
    """It has ended meanwhile; the stopped job is examined again."""
    root, _, leader, odd = SESSIONS
    assert refusals_with(tree=replace(TREE, processes=(root, leader, odd))) == []


def test_files_that_cannot_be_opened_again_are_found() -> None:
    """Files of the kernel that depend on the process that opens them; not those that are the same for all users."""
    with (
        Process(os.getpid()) as process,
        Path("/proc/self/status").open(encoding="utf-8"),
        Path("/proc/cpuinfo").open(encoding="utf-8"),
        Path("/dev/null").open(encoding="utf-8"),
        Path("/dev/ptmx").open("r+b", buffering=0),
    ):
        result = inspection._unlasting(process)
    assert not {"/dev/ptmx", "/dev/pts/ptmx"} & set(result)
    assert f"/proc/{os.getpid()}/status" in result
    assert "/proc/cpuinfo" not in result
    assert "/dev/null" not in result


@needs_root
@pytest.mark.parametrize(("kind", "major", "minor", "lasts"), [
    (S_IFCHR, 1, 3, True),  # null
    (S_IFCHR, 5, 2, True),  # ptmx
    (S_IFCHR, 136, 7, True),  # pts/7
    (S_IFCHR, 5, 1, False),  # console
    (S_IFCHR, 10, 200, False),  # net/tun
    (S_IFBLK, 7, 0, False),  # loop0
])  # fmt: skip
def test_devices_that_are_opened_again_are_known(
    tmp_path: Path, kind: int, major: int, minor: int, lasts: bool
) -> None:
    os.mknod(tmp_path / "device", kind | 0o600, os.makedev(major, minor))
    assert open_files.device_lasts((tmp_path / "device").stat()) == lasts
