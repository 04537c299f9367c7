"""What is known of a job's processes and node before anything is touched; read from ``/proc`` and cgroups.

Sizes are bytes, PIDs are those of this process's namespace.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurm_affinode import kerneltext
from slurm_affinode.checkpoint.criu import cgroup_files
from slurm_affinode.pinned import DELETED, PROC, Id, Process, ancestors, processes

_NAMESPACES = ("mnt", "pid", "net", "ipc", "user", "uts", "cgroup")
_NO_LIMIT = 1 << 60
_LOOKS = 8
_EVENTFD = "anon_inode:[eventfd]"
SEMAPHORE = "anon_inode:[eventfd-semaphore]"
"""How an eventfd that counts down (``EFD_SEMAPHORE``) is called here; ``/proc`` has one name for both kinds."""
_COUNTS_DOWN = re.compile(r"^eventfd-semaphore:\s*1$", re.MULTILINE)
_DEVICE = re.compile(r"/dev/(?!zero|shm/|hugepages)\S+")
_SYSV = {"sem": "semid", "msg": "msqid", "shm": "shmid"}
_MPS = "nvidia-cuda-mps"
"""Names of its daemon and its servers, as far as the kernel keeps them."""


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """One process."""

    pid: int
    name: str
    uids: tuple[int, ...]
    """Real, effective, saved, file system."""
    tracer: int = 0
    state: str = "S"
    files: tuple[str, ...] = ()
    """Where its descriptors point: paths, ``socket:[...]``, ``anon_inode:[...]``; each once."""
    mapped_devices: tuple[str, ...] = ()
    namespaces: Mapping[str, str] = field(default_factory=dict)
    memory: int = 0
    """Private and its share of shared memory; what an image of it takes."""
    deleted_files: int = 0
    """Bytes of open files without a name, which go into the image."""
    mps: bool = False


@dataclass(frozen=True, slots=True)
class TreeFacts:
    """The tree that would be dumped."""

    init_pid: int
    root_pid: int
    processes: tuple[ProcessFacts, ...]
    """Root first."""
    init_namespaces: Mapping[str, str] = field(default_factory=dict)
    outside: tuple[ProcessFacts, ...] = ()
    """Of the job's PID namespace, but not below the root: they would be lost."""
    inet_sockets: bool = False
    lost_streams: tuple[str, ...] = ()
    """Files of its standard streams, opened by Slurm, that have been deleted; processes have them open."""
    sysv: tuple[str, ...] = ()
    """System V semaphores, queues and shared memory that its user made on this node since it began: ``sem 3``."""
    node_namespaces: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Those that a restored process tree may be in, whatever namespaces its new shepherd has."""

    @property
    def memory(self) -> int:
        """Bytes that an image takes, GPU memory not counted."""
        return sum(one.memory + one.deleted_files for one in self.processes)


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Host memory that the job may still use."""

    available: int
    """``MemAvailable`` of the node."""
    headroom: int | None = None
    """What the tightest memory cgroup above the job leaves, counting what it can give back; ``None``: no limit."""


def collect(init_pid: int, root_pid: int, *, proc: Path = PROC) -> TreeFacts:
    """Look at the tree below ``root_pid``, in the namespace of which ``init_pid`` is PID 1.

    A process is known by its number and start from the first look on. Where PID 1 or the root has ended, or the root is
    not in the namespace, there are no processes.
    """
    nothing = TreeFacts(init_pid, root_pid, ())
    try:
        with Process(init_pid, proc=proc) as init, Process(root_pid, proc=proc) as root:
            space = init.link("ns/pid")
            return _collect(init, root, space, proc) if root.link("ns/pid") == space else nothing
    except OSError:
        return nothing


def _collect(init: Process, root: Process, space: str, proc: Path) -> TreeFacts:
    tree = _tree(root.id, proc)
    known = {init.id, *tree}
    strangers = [one for one in _members(space, proc) if one not in known]
    # Some were forked while this looked.
    late = [one for one in strangers if _is_below(one, set(tree), init.id, proc)]
    members = _facts_of_all([*tree, *late], proc)
    return TreeFacts(
        init.pid,
        root.pid,
        members,
        _namespaces(init),
        _facts_of_all([one for one in strangers if one not in late], proc),
        _has_inet(members, root),
        _lost_streams(init, members),
        _sysv(init, root, proc),
        _of_node(proc),
    )


def _tree(root: Id, proc: Path) -> list[Id]:
    """The root and all below it, parents before children."""
    children: dict[int, list[Id]] = {}
    for process in processes(proc=proc):
        with contextlib.suppress(OSError):
            children.setdefault(process.stat().parent, []).append(process.id)
    found, at = [root], 0
    while at < len(found):
        # One that is older than its parent is the child of a process that had its number before.
        found += sorted(one for one in children.get(found[at].pid, ()) if one.started >= found[at].started)
        at += 1
    return found


def _members(space: str, proc: Path) -> list[Id]:
    """All of a PID namespace, by number."""
    found = []
    for process in processes(proc=proc):
        with contextlib.suppress(OSError):
            if process.link("ns/pid") == space:
                found.append(process.id)
    return sorted(found)


def _is_below(one: Id, above: Collection[Id], init: Id, proc: Path) -> bool:
    """Whether one of ``above`` is among a process's ancestors now; ``False`` where the process is gone."""
    with contextlib.suppress(OSError), Process(one.pid, started=one.started, proc=proc) as process:
        for _ in range(_LOOKS):
            with contextlib.suppress(OSError):
                for ancestor in ancestors(process, proc=proc):
                    if ancestor.id in above:
                        return True
                    if ancestor.id == init:
                        return False
            # Where one in between has ended its children have another parent by now.
    return False


def _facts_of_all(found: Iterable[Id], proc: Path) -> tuple[ProcessFacts, ...]:
    told = []
    for one in found:
        with contextlib.suppress(OSError), Process(one.pid, started=one.started, proc=proc) as process:
            told.append(_facts_of(process, proc))
    return tuple(told)


def process_facts(pid: int, *, proc: Path = PROC) -> ProcessFacts | None:
    """One process; ``None`` where it is gone."""
    try:
        with Process(pid, proc=proc) as process:
            return _facts_of(process, proc)
    except OSError:
        return None


def _facts_of(process: Process, proc: Path) -> ProcessFacts:
    """Raises ``OSError`` where it is gone. What ends meanwhile has fewer files and namespaces."""
    status = process.status()
    files, deleted = _files(process)
    uids = kerneltext.numbers(status.get("Uid", ""))
    return ProcessFacts(
        process.pid,
        status.get("Name", "?"),
        uids,
        kerneltext.number(status.get("TracerPid")) or 0,
        status.get("State", "S")[:1],
        files,
        _mapped_devices(process),
        _namespaces(process),
        _memory(process, status),
        deleted,
        _uses_mps(process, uids, proc),
    )


def available_memory(*, proc: Path = PROC) -> int | None:
    """Bytes of host memory that can be had without swapping; ``None``: the kernel does not say."""
    return kerneltext.kib(kerneltext.table(_lines(proc / "meminfo")).get("MemAvailable"))


def memory_facts(pid: int, *, proc: Path = PROC, cgroups: Path = Path("/sys/fs/cgroup")) -> MemoryFacts:
    """Host memory that a process of the job may still use."""
    directories = {
        directory: None
        for file in cgroup_files(pid, cgroups, proc=proc, also_ours=True)
        for directory in (file.parent, *file.parent.parents)
        if cgroups in directory.parents
    }
    # The top of a node has no limit; that of a container is the container's own cgroup, whatever path it is told.
    left = [_headroom(directory) for directory in (*directories, cgroups, cgroups / "memory")]
    return MemoryFacts(available_memory(proc=proc) or 0, min((room for room in left if room is not None), default=None))


def _headroom(directory: Path) -> int | None:
    """Of one cgroup, of either version; ``None``: it has no limit."""
    for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        most, used = (kerneltext.number("".join(_lines(directory / name)).strip()) for name in (limit, usage))
        if most is not None and used is not None and most < _NO_LIMIT:
            return most - used + _reclaimable(directory)
    return None


def _reclaimable(directory: Path) -> int:
    """File pages that go when memory is needed."""
    for line in _lines(directory / "memory.stat"):
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file"):
            return kerneltext.number(value) or 0
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return kerneltext.lines(path)
    except OSError:
        return []


def _text_of(process: Process, name: str) -> str:
    try:
        return process.text(name)
    except OSError:
        return ""


def _files(process: Process) -> tuple[tuple[str, ...], int]:
    """Where descriptors point, and the bytes of regular files that have no name any more."""
    seen: dict[str, None] = {}
    deleted: dict[tuple[int, int], int] = {}
    try:
        entries = process.names("fd")
    except OSError:
        return (), 0
    for name in entries:
        with contextlib.suppress(OSError):
            target = process.link(f"fd/{name}")
            if target == _EVENTFD and _COUNTS_DOWN.search(_text_of(process, f"fdinfo/{name}")):
                target = SEMAPHORE
            seen[target] = None
            if target.endswith(DELETED):
                facts = process.facts(f"fd/{name}")
                deleted[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
    return tuple(sorted(seen)), sum(deleted.values())


def _lost_streams(init: Process, members: Iterable[ProcessFacts]) -> tuple[str, ...]:
    held = {file for one in members for file in one.files if file.startswith("/") and file.endswith(DELETED)}
    streams, _ = _files(init)
    return tuple(file.removesuffix(DELETED) for file in streams if file in held)


def _sysv(init: Process, root: Process, proc: Path) -> tuple[str, ...]:
    """The kernel does not say which process made a semaphore: those of the user's other jobs count as well."""
    try:
        ours = str((proc / "self" / "ns" / "ipc").readlink())
    except OSError:
        ours = None
    if _namespaces(init).get("ipc") != ours:
        return ()  # the tables below are not theirs
    rows = (row.partition(" ") for row in _lines(proc / "stat"))
    booted = next((kerneltext.number(value) for key, _, value in rows if key == "btime"), None)
    uids = root.status().get("Uid", "").split()
    if booted is None or not uids:
        return ()
    began = booted + root.started // os.sysconf("SC_CLK_TCK")
    found = []
    for kind, key in _SYSV.items():
        head, *lines = _lines(proc / "sysvipc" / kind) or [""]
        made = (dict(zip(head.split(), line.split(), strict=False)) for line in lines)
        found += [
            f"{kind} {one[key]}"
            for one in made
            if one.get("cuid") == uids[0] and (kerneltext.number(one.get("ctime")) or 0) >= began
        ]
    return tuple(found)


def _mapped_devices(process: Process) -> tuple[str, ...]:
    rows = (line.split(None, 5) for line in _text_of(process, "maps").split("\n"))
    return tuple(sorted({row[5] for row in rows if len(row) == 6 and _DEVICE.fullmatch(row[5])}))


def _namespaces(process: Process) -> dict[str, str]:
    found = {}
    for name in _NAMESPACES:
        with contextlib.suppress(OSError):
            found[name] = process.link(f"ns/{name}")
    return found


def _of_node(proc: Path) -> dict[str, frozenset[str]]:
    """Of this process. A service may have a host name of its own (ProtectHostname=): the node's is PID 1's then."""
    found: dict[str, frozenset[str]] = {}
    with contextlib.suppress(ProcessLookupError), Process(os.getpid(), proc=proc) as own:
        found = {name: frozenset((inode,)) for name, inode in _namespaces(own).items() if name not in ("mnt", "pid")}
    with contextlib.suppress(ProcessLookupError), Process(1, proc=proc) as first:
        if "uts" in found and (name := _namespaces(first).get("uts")) is not None:
            found["uts"] |= {name}
    return found


def _memory(process: Process, status: Mapping[str, str]) -> int:
    """Proportional size of memory that is not backed by files; its resident size on older kernels."""
    rollup = kerneltext.table(_text_of(process, "smaps_rollup").split("\n"))
    parts = [kerneltext.kib(rollup.get(key)) for key in ("Pss_Anon", "Pss_Shmem", "SwapPss")]
    if None in parts:
        parts = [kerneltext.kib(status.get(key)) for key in ("RssAnon", "RssShmem", "VmSwap")]
    return sum(part or 0 for part in parts)


def _uses_mps(process: Process, uids: Sequence[int], proc: Path) -> bool:
    """Whether it talks to an MPS daemon: its environment names one's directory, and there is a daemon for its user.

    Whether that directory exists is not looked at: a path that a user chose is nothing for root to follow.
    """
    entries = _text_of(process, "environ").split("\0")
    if not any(entry.startswith("CUDA_MPS_PIPE_DIRECTORY=") for entry in entries):
        return False
    for other in processes(proc=proc):
        with contextlib.suppress(OSError):
            status = other.status()
            if status.get("Name", "").startswith(_MPS) and set(status.get("Uid", "").split()) & {"0", *map(str, uids)}:
                return True
    return False


def _has_inet(members: Iterable[ProcessFacts], root: Process) -> bool:
    """Whether the tree has sockets of the internet families."""
    inodes = {file[8:-1] for one in members for file in one.files if file.startswith("socket:[")}
    if not inodes:
        return False
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in _text_of(root, f"net/{kind}").split("\n")[1:]:
            words = line.split()
            if len(words) > 9 and words[9] in inodes:
                return True
    return False
