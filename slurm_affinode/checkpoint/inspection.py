"""Facts about a job's processes and its node, read from ``/proc`` and cgroups before a suspension.

Sizes are bytes; PIDs are those of the agent's PID namespace. Inspection has a timeout, for file systems that do not
respond.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import signal
import socket
import stat
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurm_affinode.base import kernel_text
from slurm_affinode.base.pidfd import (
    DELETED,
    PROC,
    Id,
    Process,
    SharedPart,
    Stat,
    ancestors,
    processes,
    processes_elsewhere,
)
from slurm_affinode.base.timeouts import FileSystemCalls, NoAnswerError
from slurm_affinode.checkpoint.criu import sessions
from slurm_affinode.checkpoint.criu.criu import cgroup_files
from slurm_affinode.checkpoint.criu.restore_gate import Credentials, of_threads
from slurm_affinode.checkpoint.files import device_files, inet_sockets, local_files, open_files, unix_sockets
from slurm_affinode.checkpoint.files.service_connections import ServiceConnection, Services
from slurm_affinode.checkpoint.host_memory import available_memory
from slurm_affinode.checkpoint.interface import CheckpointError

_NAMESPACES = ("mnt", "pid", "net", "ipc", "user", "uts", "cgroup")
NO_LIMIT = 1 << 60
"""A limit of a cgroup (version 1) from here on is none."""
_MOST_ROUNDS = 8
_ARGUMENTS = 4096
"""Bytes of a command line that are read."""
_EVENTFD = "anon_inode:[eventfd]"
SEMAPHORE = "anon_inode:[eventfd-semaphore]"
"""Name used here for an eventfd with ``EFD_SEMAPHORE``; ``/proc`` uses the same name for both kinds."""
MEMORY_FILE = "/memfd:"
"""Prefix of the names of files of memfd_create(2)."""
SEALED = "memfd (sealed)"
"""Name used here for such a file that is mapped, and may no longer be written to."""
EXECUTED = "memfd (executed)"
"""Name used here for the program of a process if it is such a file."""
PACKETS = "pipe (packets)"
"""Name used here for a pipe with ``O_DIRECT``."""
THREAD = "anon_inode:[pidfd-thread]"
"""Name used here for a pidfd of a single thread (``PIDFD_THREAD``)."""
LEASED = "temporary file (leased)"
"""Name used here for a temporary file with a lease (``F_SETLEASE``)."""
CLOSED = "anon_inode:[eventpoll-closed]"
"""Name used here for an epoll instance that reports a file which its process has closed."""
_EVENTPOLL = "anon_inode:[eventpoll]"
_POLLED = re.compile(r"^tfd:\s*(\d+) .*\bino:([0-9a-f]+) ", re.MULTILINE)
_INODE = re.compile(r":\[\d+\]$")
_PIPE, _PIDFD = "pipe:[", "anon_inode:[pidfd]"
_COUNTS_DOWN = re.compile(r"^eventfd-semaphore:\s*1$", re.MULTILINE)
_FLAGS = re.compile(r"^flags:\s*([0-7]+)$", re.MULTILINE)
_LEASE = re.compile(r"^lock:\s*\d+: LEASE ", re.MULTILINE)
_DEVICE = re.compile(r"/dev/(?!zero|shm/|hugepages)\S+")
_SYSV = {"sem": "semid", "msg": "msqid", "shm": "shmid"}
_CREATE_RULESET = 444
"""Number of the system call, on all architectures."""
QUEUE = "mqueue:"
"""Prefix of descriptors of POSIX message queues in ``ProcessFacts.files``."""
_MQUEUE_MAGIC = 0x19800202
"""Type of their file system (``ipc/mqueue.c``)."""
_TEMPORARY = tuple(f"{place}/" for place in local_files.PLACES)
_PROTOCOL = "system.sockprotoname"
"""Extended attribute of a socket (``net/socket.c``)."""
_MEMBERSHIPS = (270, 9, 128)
"""Level, option and size of the bit mask of a netlink socket's groups (``linux/netlink.h``)."""
_GROUPS_DUMPED = 32
_KERNELS = ("/proc/", "/sys/")
_OTHERWISE_REFUSED = re.compile(r"/dev/(nvidia|infiniband/|fuse$|kvm$)")
"""Devices that are closed with the GPU memory, or for which there is another check."""
_SESSION, _EXIT_SIGNAL = 3, 35
"""Indices in ``Stat.fields``."""
_MPS = "nvidia-cuda-mps"
"""Common prefix of the names of the MPS daemon and servers, as truncated by the kernel."""


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """Facts about a process."""

    pid: int
    name: str
    uids: tuple[int, ...]
    """Real, effective, saved and file system UID."""
    tracer: int = 0
    """Thread that traces it, unless it is one of the agent."""
    state: str = "S"
    files: tuple[str, ...] = ()
    """Targets of its descriptors, without duplicates: paths, ``socket:[...]``, ``anon_inode:[...]``, and names that are
    used here (``SEMAPHORE``, ``PACKETS``, ``LEASED``, and others)."""
    mapped_devices: tuple[str, ...] = ()
    namespaces: Mapping[str, str] = field(default_factory=dict)
    memory: int = 0
    """Private memory and its share of shared memory: the size of its pages in an image."""
    deleted_files: int = 0
    """Size of open files that were deleted, which are stored in the image."""
    mps: bool = False
    started: int = 0
    """Start time in ticks since boot."""
    credentials: tuple[Credentials, ...] = field(default=(), repr=False)
    """Of its threads, each once."""
    heir_of: tuple[int, ...] = ()
    """Ancestors from which it has all of its NVIDIA device files (``device_files.inherited``)."""
    arguments: tuple[str, ...] = field(default=(), repr=False)  # may contain passwords
    """The beginning of its command line, as far as the kernel returns it. The process can change it at any time."""
    protocols: frozenset[str] = frozenset()
    """Protocols of its sockets, as the kernel names them: ``TCPv6``, ``UNIX-STREAM``, ``MPTCP``. Also states of sockets
    that a restore would lose (``inet_sockets.state_lost``)."""
    services: tuple[ServiceConnection, ...] = ()
    """Its connections to services, which are closed by a restore."""
    parent: int = 0
    session: int = 0
    unlasting: tuple[str, ...] = ()
    """Its open files, and working directory, that a restore could not open again (``open_files.lasting``)."""
    lost: str | None = None
    """A relation to other processes that CRIU does not dump or restore, in words that follow *process*."""

    @property
    def has_gpu_files(self) -> bool:
        """Whether it has device files of the NVIDIA driver open or mapped."""
        return any(map(device_files.NVIDIA.fullmatch, (*self.files, *self.mapped_devices)))

    def is_forked_worker(self, cuda_users: Collection[int]) -> bool:
        """Return whether it does not use CUDA, and has its device files from a process that does."""
        return self.pid not in cuda_users and not set(cuda_users).isdisjoint(self.heir_of)


@dataclass(frozen=True, slots=True)
class TreeFacts:
    """Facts about the process tree to be dumped."""

    init_pid: int
    root_pid: int
    processes: tuple[ProcessFacts, ...]
    """Root first."""
    init_namespaces: Mapping[str, str] = field(default_factory=dict)
    outside: tuple[ProcessFacts, ...] = ()
    """Processes in the job's PID namespace that are not below the root, and would be lost."""
    inet_sockets: bool = False
    lost_streams: tuple[str, ...] = ()
    """Files of the standard streams, opened by Slurm, that have been deleted but are still open."""
    sysv: tuple[str, ...] = ()
    """System V semaphores, queues and shared memory that the user created on this node since the job started, such as
    ``sem 3``."""
    node_namespaces: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Namespaces of the node, by type: a restored tree may be in them, whatever namespaces the new shepherd has."""
    maybe_landlocked: frozenset[int] = frozenset()
    """PIDs of processes that may be in a Landlock domain, which CRIU does not carry.

    The kernel shows only its precondition: ``no_new_privs``, which the job was not started with.
    """

    @property
    def stray(self) -> ProcessFacts | None:
        """A process that could not be restored into its session (``sessions.stray``)."""
        by_pid = {process.pid: process for process in self.processes}
        if not self.processes or any(process.parent not in by_pid for process in self.processes[1:]):
            return None  # a parent has ended meanwhile: the stopped job is examined again
        tree = [
            sessions.SessionProcess(process.pid, process.parent, process.session, process.state == "Z")
            for process in self.processes
        ]
        stray_process = sessions.stray([replace(tree[0], parent=0), *tree[1:]])
        return None if stray_process is None else by_pid[stray_process.pid]

    @property
    def memory(self) -> int:
        """Size of an image in bytes, without GPU memory."""
        return sum(process.memory + process.deleted_files for process in self.processes)


def forked_workers(tree: TreeFacts, cuda_users: Collection[int]) -> frozenset[Id]:
    """Return the processes with device files that they have inherited from a process that uses CUDA, and do not use."""
    return frozenset(
        Id(process.pid, process.started) for process in tree.processes if process.is_forked_worker(cuda_users)
    )


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Host memory available to the job."""

    available: int
    """``MemAvailable`` of the node."""
    headroom: int | None = None
    """Memory left in the most limited cgroup above the job, including reclaimable memory; ``None``: no limit. Without
    the limits of ``job_headroom``."""
    job_headroom: int | None = None
    """Memory left below limits of the job that can be raised for the suspension; ``None``: there are none."""
    spare: SpareMemory | None = None
    """Memory for which they can be raised; ``None``: unknown."""
    raised: int | None = 0
    """Bytes by which they are still raised since an earlier suspension; ``None``: unknown."""


@dataclass(frozen=True, slots=True)
class SpareMemory:
    """Memory of a node that no job needs."""

    free: int
    """``MemAvailable``, less the memory reserved by suspensions in progress."""
    promised: int
    """Memory that Slurm has allocated to other jobs, and that they do not use yet."""
    reserve: int
    """Memory that the site keeps free."""

    @property
    def available(self) -> int:
        """The rest."""
        return max(0, self.free - self.promised - self.reserve)


def collect(init_pid: int, root_pid: int, *, proc: Path = PROC, services: Services | None = None) -> TreeFacts:
    """Collect facts about the tree below ``root_pid``. ``init_pid`` is PID 1 of its PID namespace.

    ``services``: those whose connections are closed by a restore.

    Processes are identified by PID and start time throughout. The result has no processes if ``init_pid`` or
    ``root_pid`` has ended, or if the root is not in the namespace.
    """
    empty = TreeFacts(init_pid, root_pid, ())
    try:
        with Process(init_pid, proc=proc) as init, Process(root_pid, proc=proc) as root:
            space = init.link("ns/pid")
            return _collect(init, root, space, proc, services or Services()) if root.link("ns/pid") == space else empty
    except OSError:
        return empty


def _collect(init: Process, root: Process, space: str, proc: Path, services: Services) -> TreeFacts:
    tree = _tree(root.id, proc)
    member_ids = {init.id, *tree}
    strangers = [member for member in _members(space, proc) if member not in member_ids]
    # Some may have been forked since the tree was read.
    late = [stranger for stranger in strangers if _is_below(stranger, set(tree), init.id, proc)]
    members = _facts_of_all([*tree, *late], proc, services)
    return TreeFacts(
        init.pid,
        root.pid,
        tuple(_with_ancestors(member, proc) if member.has_gpu_files else member for member in members),
        _namespaces(init),
        _facts_of_all([stranger for stranger in strangers if stranger not in late], proc, services),
        _has_inet(members, root),
        _lost_streams(init, members),
        _sysv(init, root, proc),
        _node_namespaces(proc),
        _maybe_landlocked(init, members),
    )


def _tree(root: Id, proc: Path) -> list[Id]:
    """Return the root, which is in another PID namespace, and its descendants, parents before children."""
    children: dict[int, list[Id]] = {}
    for process in processes_elsewhere(proc=proc):
        with contextlib.suppress(OSError):
            children.setdefault(process.stat().parent, []).append(process.id)
    ids, position = [root], 0
    while position < len(ids):
        # A process older than its parent was the child of a previous process with the parent's PID.
        ids += sorted(child for child in children.get(ids[position].pid, ()) if child.started >= ids[position].started)
        position += 1
    return ids


def _members(space: str, proc: Path) -> list[Id]:
    """Return the processes of another PID namespace, sorted by PID."""
    ids = []
    for process in processes_elsewhere(proc=proc):
        with contextlib.suppress(OSError):
            if process.link("ns/pid") == space:
                ids.append(process.id)
    return sorted(ids)


def _is_below(identity: Id, above: Collection[Id], init: Id, proc: Path) -> bool:
    """Return whether one of ``above`` is an ancestor of the process; ``False`` if the process has ended."""
    with contextlib.suppress(OSError), Process(identity.pid, started=identity.started, proc=proc) as process:
        for _ in range(_MOST_ROUNDS):
            with contextlib.suppress(OSError):
                for ancestor in ancestors(process, proc=proc):
                    if ancestor.id in above:
                        return True
                    if ancestor.id == init:
                        return False
            # An ancestor has ended meanwhile, and its children were reparented: try again.
    return False


def _facts_of_all(ids: Iterable[Id], proc: Path, services: Services) -> tuple[ProcessFacts, ...]:
    facts = []
    for member in ids:
        with contextlib.suppress(OSError), Process(member.pid, started=member.started, proc=proc) as process:
            facts.append(_facts_of(process, proc, services))
    return tuple(facts)


def _with_ancestors(facts: ProcessFacts, proc: Path) -> ProcessFacts:
    """Add the ancestors from which a process has its device files; none if it has ended."""
    heirs = []
    with contextlib.suppress(OSError), Process(facts.pid, started=facts.started, proc=proc) as process:
        for ancestor in ancestors(process, proc=proc):
            with contextlib.suppress(OSError):
                if device_files.inherited(process, ancestor):
                    heirs.append(ancestor.pid)
    return replace(facts, heir_of=tuple(heirs))


def _facts_of(process: Process, proc: Path, services: Services) -> ProcessFacts:
    """Return facts about a process; files and namespaces may be missing if it ends meanwhile.

    Raises ``OSError`` if it has ended before.
    """
    status, numbers = process.status(), process.stat()
    files, deleted, protocols = _files(process)
    uids = kernel_text.numbers(status.get("Uid", ""))
    return ProcessFacts(
        process.pid,
        status.get("Name", "?"),
        uids,
        _tracer(status, proc),
        status.get("State", "S")[:1],
        files,
        _mapped_devices(process),
        _namespaces(process),
        _memory(process, status),
        deleted,
        _uses_mps(process, uids, proc),
        process.started,
        _credentials(process),
        arguments=_arguments(process),
        protocols=protocols,
        services=_services(process, services),
        parent=numbers.parent,
        session=kernel_text.number(numbers.fields[_SESSION]) or 0,
        unlasting=_unlasting(process),
        lost=_lost(process, status, numbers) if proc == PROC else None,  # the kernel compares only its own
    )


def _lost(process: Process, status: Mapping[str, str], numbers: Stat) -> str | None:
    """Return why a process cannot be restored as the child that it is, or ``None``."""
    if numbers.state == "Z":
        threads = kernel_text.number(status.get("Threads")) or 0
        return "has ended its first thread, but not the others (pthread_exit(3))" if threads > 1 else None
    if kernel_text.number(numbers.fields[_EXIT_SIGNAL]) != signal.SIGCHLD:
        return "notifies its parent of its end by another signal than SIGCHLD (clone(2))"
    with contextlib.suppress(OSError):
        if process.has_in_common(SharedPart.MEMORY, numbers.parent):
            return "shares memory with its parent (vfork(2), CLONE_VM)"
        if process.has_in_common(SharedPart.DIRECTORIES, numbers.parent):
            return "shares its working directory with its parent (CLONE_FS)"
    return None


def _services(process: Process, services: Services) -> tuple[ServiceConnection, ...]:
    try:
        return services.of(process)
    except OSError:
        return ()  # the dump examines them again, and reports the error


def _maybe_landlocked(init: Process, members: Iterable[ProcessFacts]) -> frozenset[int]:
    if init.status().get("NoNewPrivs") == "1" or not has_landlock():
        return frozenset()
    return frozenset(member.pid for member in members if any(thread.no_new_privs for thread in member.credentials))


def has_landlock() -> bool:
    """Return whether this kernel has Landlock: landlock_create_ruleset(2) then returns its version."""
    return int(ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, 1)) > 0


def _tracer(status: Mapping[str, str], proc: Path) -> int:
    """Return the thread that traces a process; 0: none does. The agent itself does not count."""
    number = kernel_text.number(status.get("TracerPid")) or 0
    return 0 if number and (proc / "self" / "task" / str(number)).exists() else number


def _credentials(process: Process) -> tuple[Credentials, ...]:
    try:
        return of_threads(process)
    except (OSError, ValueError):
        return ()


def memory_facts(pid: int, *, proc: Path = PROC, cgroups: Path = Path("/sys/fs/cgroup")) -> MemoryFacts:
    """Return the host memory available to a process of the job."""
    directories = {
        directory: None
        for file in cgroup_files(pid, cgroups, proc=proc, also_own=True)
        for directory in (file.parent, *file.parent.parents)
        if cgroups in directory.parents
    }
    # The root cgroup of a node has no limit, but in a container it is the container's own cgroup.
    rooms = [_headroom(directory) for directory in (*directories, cgroups, cgroups / "memory")]
    return MemoryFacts(
        available_memory(proc=proc) or 0, min((room for room in rooms if room is not None), default=None)
    )


def _headroom(directory: Path) -> int | None:
    """Return the memory left in a cgroup (v1 or v2) in bytes; ``None``: no limit."""
    for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        most, used = (kernel_text.number("".join(_lines(directory / name)).strip()) for name in (limit, usage))
        if most is not None and used is not None and most < NO_LIMIT:
            return most - used + reclaimable(_lines(directory / "memory.stat"))
    return None


def reclaimable(stat: Iterable[str]) -> int:
    """Return the size of inactive file pages, which the kernel reclaims under memory pressure.

    ``stat``: lines of ``memory.stat``. In version 1 only ``total_inactive_file`` includes the cgroups below.
    """
    sizes = {key: value for key, _, value in (line.partition(" ") for line in stat)}
    return kernel_text.number(sizes.get("total_inactive_file", sizes.get("inactive_file"))) or 0


def _lines(path: Path) -> list[str]:
    try:
        return kernel_text.lines(path)
    except OSError:
        return []


def _files(process: Process) -> tuple[tuple[str, ...], int, frozenset[str]]:
    """Return the targets of the descriptors, the total size of deleted files, and the protocols of sockets."""
    targets: dict[str, None] = {}
    protocols: set[str] = set()
    deleted: dict[tuple[int, int], int] = {}
    try:
        entries = process.names("fd")
    except OSError:
        return (), 0, frozenset()
    for name in entries:
        with contextlib.suppress(OSError):
            target = process.link(f"fd/{name}")
            if target.startswith("socket:[") and target not in targets:
                protocols |= _protocol(process, name)
            target = _state_of(process, name, target) or target
            if target.rfind("/") == 0 and _is_queue(process, name):
                target = f"{QUEUE}{target}"
            targets[target] = None
            if target.endswith(DELETED):
                facts = process.facts(f"fd/{name}")
                deleted[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
    with contextlib.suppress(OSError):
        if _EVENTPOLL in targets and _polls_closed(process):
            targets[CLOSED] = None
        if process.link("exe").startswith(MEMORY_FILE):
            targets[EXECUTED] = None
    if _maps_sealed(process):
        targets[SEALED] = None
    return tuple(sorted(targets)), sum(deleted.values()), frozenset(protocols)


def _state_of(process: Process, descriptor: str, target: str) -> str | None:
    """Return the name used here for the state of a descriptor that its own name does not show, or ``None``."""
    if target.startswith((_EVENTFD, _PIPE, _PIDFD, *_TEMPORARY)):
        text = process.text_if_readable(f"fdinfo/{descriptor}")
        match = _FLAGS.search(text)
        flags = int(match[1], 8) if match else 0
        if target == _EVENTFD and _COUNTS_DOWN.search(text):
            return SEMAPHORE
        if target.startswith(_PIPE) and flags & os.O_DIRECT:
            return PACKETS
        if target == _PIDFD and flags & os.O_EXCL:  # the value of PIDFD_THREAD
            return THREAD
        if target.startswith(_TEMPORARY) and _LEASE.search(text):
            return LEASED
    return None


def _polls_closed(process: Process) -> bool:
    """Return whether an epoll instance still reports a file that another process has open, but not this one.

    CRIU looks for it among the descriptors of this process, also under other numbers. Raises ``OSError``.
    """
    targets = {}
    for number in process.names("fd"):
        with contextlib.suppress(OSError):
            targets[int(number)] = process.link(f"fd/{number}")
    for instance in (number for number, target in targets.items() if target == _EVENTPOLL):
        before: Counter[int] = Counter()
        for polled, inode in _POLLED.findall(process.text_if_readable(f"fdinfo/{instance}")):
            entry = (instance, int(polled), before[int(polled)])
            before[int(polled)] += 1
            alike = f":[{int(inode, 16)}]"  # a pipe or a socket; all other files without a name have one inode
            candidates = (
                number for number, target in targets.items() if not _INODE.search(target) or target.endswith(alike)
            )
            if not any(process.is_polled(number, entry) for number in (int(polled), *candidates)):
                return True
    return False


def _unlasting(process: Process) -> tuple[str, ...]:
    paths: dict[str, None] = {}
    with contextlib.suppress(OSError):
        for name in ("cwd", *(f"fd/{number}" for number in process.names("fd"))):
            with contextlib.suppress(OSError):
                target = process.link(name)
                if not _lasts(process, name, target):
                    paths[target] = None
    return tuple(sorted(paths))


def _lasts(process: Process, name: str, target: str) -> bool:
    """Return whether a restore could open a file again. Only file systems that always respond are examined."""
    if target.startswith(_KERNELS):
        return open_files.lasting(target.removesuffix(DELETED), directory=stat.S_ISDIR(process.facts(name).st_mode))
    if target.startswith("/dev/") and not _OTHERWISE_REFUSED.match(target):
        return open_files.device_lasts(process.facts(name))
    return True


def _maps_sealed(process: Process) -> bool:
    """Return whether it shares memory with a file that may no longer be written to (``F_SEAL_WRITE``).

    CRIU maps the file so that it could be written to, and the kernel then refuses the seal.
    """
    for row in _mappings(process):
        if row[5].startswith(MEMORY_FILE) and row[1].endswith("s"):
            begin, _, end = row[0].partition("-")
            with contextlib.suppress(OSError):
                fd = process.open(f"map_files/{begin.lstrip('0')}-{end.lstrip('0')}", os.O_RDONLY)
                try:
                    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
                        return True
                finally:
                    os.close(fd)
    return False


def _is_queue(process: Process, descriptor: str) -> bool:
    """Return whether a descriptor is that of a POSIX message queue: its file system has no mount point."""
    fd = process.open(f"fd/{descriptor}", os.O_PATH)
    try:
        statfs = (ctypes.c_long * 64)()  # struct statfs, which begins with the type
        return ctypes.CDLL(None).fstatfs(fd, statfs) == 0 and statfs[0] == _MQUEUE_MAGIC
    finally:
        os.close(fd)


def _protocol(process: Process, descriptor: str) -> set[str]:
    """Return the protocol of a socket, and a state that is lost; empty if the kernel does not name it."""
    names = set()
    with contextlib.suppress(OSError):
        names.add(process.attribute(f"fd/{descriptor}", _PROTOCOL).rstrip(b"\0").decode("ascii", "replace"))
    with contextlib.suppress(OSError), process.as_socket(int(descriptor)) as opened:
        state = None
        if opened.family == socket.AF_UNIX:
            state = unix_sockets.state_lost(opened)
        elif opened.family in (socket.AF_INET, socket.AF_INET6):
            state = inet_sockets.state_lost(process, opened)
        elif opened.family == socket.AF_NETLINK and any(opened.getsockopt(*_MEMBERSHIPS)[_GROUPS_DUMPED // 8 :]):
            state = f"NETLINK in a group above {_GROUPS_DUMPED}"
        names |= set() if state is None else {state}
    return names


def _lost_streams(init: Process, members: Iterable[ProcessFacts]) -> tuple[str, ...]:
    deleted_files = {
        file for member in members for file in member.files if file.startswith("/") and file.endswith(DELETED)
    }
    streams, _, _ = _files(init)
    return tuple(file.removesuffix(DELETED) for file in streams if file in deleted_files)


def _sysv(init: Process, root: Process, proc: Path) -> tuple[str, ...]:
    """Return the System V objects that the user created since the root was started.

    The kernel does not record which process created an object, so those of the user's other jobs are included.
    """
    try:
        own_namespace = str((proc / "self" / "ns" / "ipc").readlink())
    except OSError:
        own_namespace = None
    if _namespaces(init).get("ipc") != own_namespace:
        return ()  # the tables below are those of another IPC namespace
    rows = (row.partition(" ") for row in _lines(proc / "stat"))
    booted = next((kernel_text.number(value) for key, _, value in rows if key == "btime"), None)
    uids = root.status().get("Uid", "").split()
    if booted is None or not uids:
        return ()
    began = booted + root.started // os.sysconf("SC_CLK_TCK")
    objects = []
    for kind, key in _SYSV.items():
        head, *lines = _lines(proc / "sysvipc" / kind) or [""]
        sysv_objects = (dict(zip(head.split(), line.split(), strict=False)) for line in lines)
        objects += [
            f"{kind} {object_[key]}"
            for object_ in sysv_objects
            if object_.get("cuid") == uids[0] and (kernel_text.number(object_.get("ctime")) or 0) >= began
        ]
    return tuple(objects)


def _arguments(process: Process) -> tuple[str, ...]:
    try:
        text = process.read("cmdline", _ARGUMENTS).decode("utf-8", "replace")
    except OSError:
        return ()
    return tuple(text.removesuffix("\0").split("\0")) if text else ()


def _mapped_devices(process: Process) -> tuple[str, ...]:
    return tuple(sorted({row[5] for row in _mappings(process) if _DEVICE.fullmatch(row[5])}))


def _mappings(process: Process) -> Iterator[list[str]]:
    """Yield the six fields of each mapping with a name; none, or not all, if they cannot be read."""
    with contextlib.suppress(OSError):
        for line in process.text_lines("maps"):
            row = line.split(None, 5)
            if len(row) == 6:
                yield row


def _namespaces(process: Process) -> dict[str, str]:
    inodes = {}
    for name in _NAMESPACES:
        with contextlib.suppress(OSError):
            inodes[name] = process.link(f"ns/{name}")
    return inodes


def _node_namespaces(proc: Path) -> dict[str, frozenset[str]]:
    """Return the namespaces of this process, except for mounts and PIDs.

    systemd may run the agent in a UTS namespace of its own (``ProtectHostname=``), so that of PID 1 is included.
    """
    inodes_by_kind: dict[str, frozenset[str]] = {}
    with contextlib.suppress(ProcessLookupError), Process(os.getpid(), proc=proc) as current:
        inodes_by_kind = {
            name: frozenset((inode,)) for name, inode in _namespaces(current).items() if name not in ("mnt", "pid")
        }
    with contextlib.suppress(ProcessLookupError), Process(1, proc=proc) as first:
        if "uts" in inodes_by_kind and (name := _namespaces(first).get("uts")) is not None:
            inodes_by_kind["uts"] |= {name}
    return inodes_by_kind


def _memory(process: Process, status: Mapping[str, str]) -> int:
    """Return the proportional set size of anonymous, shared and swapped memory; the resident size on older kernels."""
    rollup = kernel_text.table(process.text_if_readable("smaps_rollup").split("\n"))
    parts = [kernel_text.kib(rollup.get(key)) for key in ("Pss_Anon", "Pss_Shmem", "SwapPss")]
    if None in parts:
        parts = [kernel_text.kib(status.get(key)) for key in ("RssAnon", "RssShmem", "VmSwap")]
    return sum(part or 0 for part in parts)


def _uses_mps(process: Process, uids: Sequence[int], proc: Path) -> bool:
    """Return whether the process uses MPS: its environment names an MPS directory and its user has a daemon.

    The directory itself is not checked, because root should not resolve a path chosen by a user.
    """
    try:
        if process.variable("CUDA_MPS_PIPE_DIRECTORY") is None:
            return False
    except OSError:
        return False
    for candidate in processes(proc=proc):
        with contextlib.suppress(OSError):
            status = candidate.status()
            if status.get("Name", "").startswith(_MPS) and set(status.get("Uid", "").split()) & {"0", *map(str, uids)}:
                return True
    return False


def _has_inet(members: Iterable[ProcessFacts], root: Process) -> bool:
    """Return whether the tree has IPv4 or IPv6 sockets (TCP or UDP)."""
    inodes = {file[8:-1] for member in members for file in member.files if file.startswith("socket:[")}
    if not inodes:
        return False
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in root.text_if_readable(f"net/{kind}").split("\n")[1:]:
            words = line.split()
            if len(words) > 9 and words[9] in inodes:
                return True
    return False


class TreeInspector:
    """``collect`` with a timeout. Thread-safe."""

    def __init__(self, inspect: Callable[[int, int], TreeFacts] = collect, *, limit_s: float = 20.0) -> None:
        """``limit_s``: timeout of one call in seconds."""
        self._inspect, self._limit_s = inspect, limit_s
        self._unresponsive: dict[Id, FileSystemCalls] = {}
        self._lock = threading.Lock()
        """Guards the process trees with unresponsive files."""

    def __call__(self, init_pid: int, root_pid: int) -> TreeFacts:
        """Call ``collect``. Raises ``CheckpointError`` if it times out because of a file that the tree has open.

        Until that call has returned, further calls for the same job fail at once, so that other jobs are not delayed.
        """
        try:
            with Process(init_pid) as process:
                init = process.id
        except OSError:
            return TreeFacts(init_pid, root_pid, ())
        with self._lock:
            self._unresponsive = {key: value for key, value in self._unresponsive.items() if value.unresponsive}
            calls = self._unresponsive.get(init) or FileSystemCalls(None, probe_s=self._limit_s)
        try:
            return calls(lambda: self._inspect(init_pid, root_pid))
        except NoAnswerError:
            with self._lock:
                self._unresponsive[init] = calls
            raise CheckpointError(
                "it has files open, or memory mapped, on a file system that does not respond"
            ) from None
