"""Readers of ``/proc`` on real processes with misleading names, arguments, paths and cgroups chosen by the user."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from job_owner import OWNER

from fuzz.mutation import LINE_ENDS
from slurm_affinode.agent import orphans
from slurm_affinode.base.pidfd import ExhaustedError, Id, Process, processes
from slurm_affinode.checkpoint import inspection
from slurm_affinode.checkpoint.criu.criu import cgroup_files
from slurm_affinode.checkpoint.cuda import client as cuda
from slurm_affinode.checkpoint.files import deleted_files, local_files, open_files
from slurm_affinode.checkpoint.files.local_files import _sockets
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.suspension.inplace.freezer import LinuxFreezer
from slurm_affinode.suspension.inplace.sock_diag import socket_inodes
from slurm_affinode.suspension.inplace.sockets import waits
from slurm_affinode.suspension.job.peers import Inspector
from slurm_affinode.suspension.job.process_tree import LinuxProcesses, thread_state

_PR_SET_NAME = 15
_CGROUPS = Path("/sys/fs/cgroup")
NAMES = [
    *(f"x{end}Uid:\t0\t0" for end in LINE_ENDS),
    *(f"x{end}NSpid:\t1" for end in LINE_ENDS),
    "x\rVmSwap:",
    "\x85VmRSS: x kB",
    ") S 1 1",
    "a) Z 0 (b",
    "((((((((",
    "\x1b[2J\x07",
    "\\n\\",
    "PPid:\t1",
    "\N{GRINNING FACE}" * 3,
]


@contextlib.contextmanager
def child(name: bytes, prepare: Callable[[], object] = lambda: None, *, zombie: bool = False) -> Iterator[int]:
    """Run a process with this name that waits or has ended."""
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)
            prepare()
            os.write(done, b"x")
            if not zombie:
                signal.pause()
        finally:
            os._exit(0)
    try:
        os.close(done)
        assert os.read(ready, 1) == b"x"
        if zombie:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        yield pid
    finally:
        os.close(ready)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("zombie", [False, True], ids=["alive", "zombie"])
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_process_name_does_not_affect_other_fields(name: str, zombie: bool) -> None:
    """User, parent and state are read correctly."""
    with child(name.encode()[:15], zombie=zombie) as pid:
        me = (os.getuid(), os.getuid(), os.getuid(), os.getuid())
        member = LinuxProcesses().read(pid)
        assert member is not None
        assert (member.parent, member.uid, member.has_ended) == (os.getpid(), os.getuid(), zombie)
        with Process(pid) as held:
            assert member.pid_ns == int(held.status()["NSpid"].split()[-1])
        (process,) = inspection.collect(pid, pid).processes
        assert (process.uids, process.state == "Z", process.tracer) == (me, zombie, 0)
        assert (process.memory > 0) is not zombie
        assert (cuda.host_bytes(pid) is None) is zombie
        assert Inspector().started(pid) == member.started == facts_started(pid)
        with Process(pid) as held:
            assert (thread_state(held) == "Z") is zombie
        assert Inspector().cpu_ticks(pid) is not None
        assert isinstance(waits((pid,)), dict)
        with Process(pid) as held:
            assert (orphans._peak_mib(held) > 0) is not zombie


def facts_started(pid: int) -> int:
    """Return the start time as read by ``pidfd``, which also reads the true parent and user."""
    with Process(pid) as held:
        assert held.stat().parent == os.getpid()
        assert held.status()["Uid"].split() == [str(os.getuid())] * 4
        return held.started


PATHS = [
    *(f"x{end}00400000-00401000 r--p 00000000 00:01 1 -dev-nvidia0" for end in LINE_ENDS),
    "x\rzz-zz",
    "x\r\r",
    "\r",
    "(deleted)",
    "x\n00400000-00401000 r--p 00000000 00:01 1 -etc",
    " lead",
    "a b  c",
]


@pytest.mark.parametrize("name", PATHS, ids=ascii)
def test_name_of_mapped_file_does_not_forge_line(tmp_path: Path, name: str) -> None:
    """Each mapped file is found once, at its mapping, and nothing else."""
    if os.getuid() != 0:
        pytest.skip("only root reads map_files")
    path = tmp_path / name
    path.write_bytes(b"x" * 4096)

    def prepare() -> None:
        with path.open("rb") as file:
            mapped.append(mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ))

    mapped: list[mmap.mmap] = []
    with child(b"x", prepare) as pid:
        with Process(pid) as held:
            names = [file.name for file in open_files._files(held) if file.name.startswith("map_files/")]
        links = [f"/proc/{pid}/{name}" for name in names]
        assert os.fspath(path) in {os.readlink(link) for link in links}
        assert all(os.readlink(link).startswith("/") for link in links)
        with Process(pid) as held:
            assert inspection._mapped_devices(held) == ()


@pytest.mark.parametrize("end", LINE_ENDS, ids=ascii)
def test_name_of_socket_does_not_forge_line(tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``net/unix`` shows names unescaped, including newlines."""
    sock = socket.socket(socket.AF_UNIX)
    row = f"x{end}0000000000000000: 00000002 00000000 00010000 0001 01 {os.fstat(sock.fileno()).st_ino} /etc/x"
    monkeypatch.chdir(tmp_path)
    sock.bind(row.replace("/", "-"))
    try:
        with Process(os.getpid()) as held:
            result = socket_inodes(held)
        assert os.fstat(sock.fileno()).st_ino in result
        with Process(os.getpid()) as held:
            names = _sockets([held], [str(tmp_path)])
        assert all(path.startswith(f"{tmp_path}/") for path in names)
    finally:
        sock.close()


@pytest.mark.parametrize("end", [*LINE_ENDS[1:], "\udcff"], ids=ascii)
def test_name_of_cgroup_does_not_forge_line(end: str) -> None:
    """A process in it belongs to that cgroup only."""
    place = _CGROUPS / "unified" if (_CGROUPS / "unified").is_dir() else _CGROUPS
    group = place / f"fuzz{end}0::"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        with child(b"x") as pid:
            try:
                (group / "cgroup.procs").write_text(str(pid))
            except OSError as error:
                pytest.skip(f"no process can be moved to a cgroup here: {error}")
            inside = Path(f"/proc/{pid}/cgroup").read_bytes()
            assert os.fsencode(group.name) in inside
            assert group / "cgroup.procs" in cgroup_files(pid)
            if end != "\udcff":  # names that are not UTF-8 are not checked
                assert any(Path(str(cgroup)).name == group.name for cgroup in LinuxFreezer()._cgroups_of((pid,)))
            assert inspection.memory_facts(pid).available > 0
            JobFinder().find(pid)
    finally:
        group.rmdir()


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open no further file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


READERS: dict[str, Callable[[Process], object]] = {
    "processes": lambda item: list(processes()),
    "processes of a list": lambda process: list(processes((process.pid,))),
    "file": lambda item: item.read("stat"),
    "threads": lambda item: item.threads(),
    "end": lambda item: item.ended(),
    "start": lambda process: Inspector().started(process.pid),
    "children": lambda process: Inspector().tree(process.pid),
    "alive": lambda process: LinuxProcesses().alive(process.pid, process.started),
    "member": lambda process: LinuxProcesses().read(process.pid),
    "job": lambda process: JobFinder().find(process.pid),
    "jobs of the node": lambda item: JobFinder().jobs_here(),
    "usage": lambda item: orphans.uses(JobFinder()),
    "tree": lambda process: inspection.collect(process.pid, process.pid),
    "host memory": lambda process: cuda.host_bytes(process.pid),
    "cgroups": lambda process: cgroup_files(process.pid),
    "cgroups to freeze": lambda process: list(LinuxFreezer()._cgroups_of((process.pid,))),
    "ended member": lambda process: LinuxFreezer().find_ended((process.pid,)),
    "waits": lambda process: waits((process.pid,)),
    "sockets": socket_inodes,
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
def test_missing_descriptor_is_not_taken_for_end_of_process(reader: Callable[[Process], object]) -> None:
    """A reader without a free descriptor fails; it reports no processes, files or jobs as absent."""
    with Process(os.getpid()) as held:
        assert held.started
        with no_descriptors(), pytest.raises(ExhaustedError, match=r"Too many open files") as raised:
            reader(held)
    assert "LimitNOFILE" in (raised.value.hint or "")
    reader(Process(os.getpid()))


CLEAN_UPS: dict[str, Callable[[Id], object]] = {
    "names before a dump": lambda item: deleted_files.give_names(item, [item], OWNER),
    "names of removed files": lambda item: deleted_files.ahead([item]),
    "names of an aborted dump": lambda item: deleted_files.forget(item, [item], OWNER),
    "files of a failed restore": lambda item: local_files.remove(item, {}, OWNER),
}


@pytest.mark.parametrize("clean_up", CLEAN_UPS.values(), ids=CLEAN_UPS.keys())
def test_clean_up_without_descriptors_does_not_fail(clean_up: Callable[[Id], object]) -> None:
    with Process(os.getpid()) as held:
        item = held.id
    with no_descriptors():
        clean_up(item)
