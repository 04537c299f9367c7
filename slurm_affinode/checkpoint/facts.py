"""What is known of a job's processes and node before anything is touched; read from ``/proc`` and cgroups.

Sizes are bytes, PIDs are those of this process's namespace.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurm_affinode.checkpoint import namespace
from slurm_affinode.checkpoint.criu import cgroup_files

_NAMESPACES = ("mnt", "pid", "net", "ipc", "user", "uts", "cgroup")
_DELETED = " (deleted)"
_NO_LIMIT = 1 << 60
_EVENTFD = "anon_inode:[eventfd]"
SEMAPHORE = "anon_inode:[eventfd-semaphore]"
"""How an eventfd that counts down (``EFD_SEMAPHORE``) is called here; ``/proc`` has one name for both kinds."""
_COUNTS_DOWN = re.compile(r"^eventfd-semaphore:\s*1$", re.MULTILINE)
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


def collect(init_pid: int, root_pid: int, *, proc: Path = namespace.PROC) -> TreeFacts:
    """Look at the tree below ``root_pid``, in the namespace of which ``init_pid`` is PID 1."""
    pids = namespace.tree(root_pid, proc=proc)
    strangers = sorted(set(namespace.members(init_pid, proc=proc).values()) - set(pids))
    # Some were forked while this looked.
    late = [pid for pid in strangers if namespace.is_below(pid, pids, proc=proc)]
    pids, outside = [*pids, *late], sorted(set(strangers) - set(late))
    processes = tuple(one for pid in pids if (one := process_facts(pid, proc=proc)) is not None)
    return TreeFacts(
        init_pid,
        root_pid,
        processes,
        _namespaces(init_pid, proc),
        tuple(one for pid in outside if (one := process_facts(pid, proc=proc)) is not None),
        _has_inet(processes, root_pid, proc),
        _lost_streams(init_pid, processes, proc),
        _sysv(init_pid, root_pid, proc),
    )


def process_facts(pid: int, *, proc: Path = namespace.PROC) -> ProcessFacts | None:
    """One process; ``None`` where it is gone."""
    base = proc / str(pid)
    status = _status(base)
    if not status:
        return None
    files, deleted = _files(base)
    uids = tuple(int(word) for word in status.get("Uid", "").split())
    return ProcessFacts(
        pid,
        status.get("Name", "?"),
        uids,
        int(status.get("TracerPid", "0") or 0),
        status.get("State", "S")[:1],
        files,
        _mapped_devices(base),
        _namespaces(pid, proc),
        _memory(base, status),
        deleted,
        _uses_mps(base, uids, proc),
    )


def available_memory(*, proc: Path = namespace.PROC) -> int | None:
    """Bytes of host memory that can be had without swapping; ``None``: the kernel does not say."""
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def memory_facts(pid: int, *, proc: Path = namespace.PROC, cgroups: Path = Path("/sys/fs/cgroup")) -> MemoryFacts:
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
        most, used = _text(directory / limit).strip(), _text(directory / usage).strip()
        if most.isdecimal() and used.isdecimal() and int(most) < _NO_LIMIT:
            return int(most) - int(used) + _reclaimable(directory)
    return None


def _reclaimable(directory: Path) -> int:
    """File pages that go when memory is needed."""
    for line in _text(directory / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _status(base: Path) -> dict[str, str]:
    return {
        key: value.strip() for key, _, value in (line.partition(":") for line in _text(base / "status").splitlines())
    }


def _files(base: Path) -> tuple[tuple[str, ...], int]:
    """Where descriptors point, and the bytes of regular files that have no name any more."""
    seen: dict[str, None] = {}
    deleted: dict[tuple[int, int], int] = {}
    directory = f"{base}/fd"  # a path for each of thousands would take longer than to read them
    try:
        entries = os.listdir(directory)  # noqa: PTH208
    except OSError:
        return (), 0
    for name in entries:
        try:
            target = os.readlink(f"{directory}/{name}")  # noqa: PTH115 - "anon_inode:[x]" is no path
            if target == _EVENTFD and _COUNTS_DOWN.search(_text(base / "fdinfo" / name)):
                target = SEMAPHORE
            seen[target] = None
            if target.endswith(_DELETED):
                facts = (base / "fd" / name).stat()
                deleted[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
        except OSError:
            continue
    return tuple(sorted(seen)), sum(deleted.values())


def _lost_streams(init_pid: int, processes: Iterable[ProcessFacts], proc: Path) -> tuple[str, ...]:
    held = {file for one in processes for file in one.files if file.startswith("/") and file.endswith(_DELETED)}
    streams, _ = _files(proc / str(init_pid))
    return tuple(file.removesuffix(_DELETED) for file in streams if file in held)


def _sysv(init_pid: int, root_pid: int, proc: Path) -> tuple[str, ...]:
    """The kernel does not say which process made a semaphore: those of the user's other jobs count as well."""
    if _namespaces(init_pid, proc).get("ipc") != _namespaces("self", proc).get("ipc"):
        return ()  # the tables below are not theirs
    began, uids = _began(root_pid, proc), _status(proc / str(root_pid)).get("Uid", "").split()
    if began is None or not uids:
        return ()
    found = []
    for kind, key in _SYSV.items():
        head, *rows = _text(proc / "sysvipc" / kind).splitlines() or [""]
        made = (dict(zip(head.split(), line.split(), strict=False)) for line in rows)
        found += [
            f"{kind} {one[key]}" for one in made if one.get("cuid") == uids[0] and int(one.get("ctime", 0)) >= began
        ]
    return tuple(found)


def _began(pid: int, proc: Path) -> int | None:
    """When a process began, in whole seconds since the epoch; ``None``: it is gone."""
    fields = _text(proc / str(pid) / "stat").rpartition(")")[2].split()
    booted = re.search(r"^btime (\d+)$", _text(proc / "stat"), re.MULTILINE)
    if len(fields) < 20 or booted is None:
        return None
    return int(booted[1]) + int(fields[19]) // os.sysconf("SC_CLK_TCK")


def _mapped_devices(base: Path) -> tuple[str, ...]:
    found = set(re.findall(r"(/dev/(?!zero|shm/|hugepages)\S+)$", _text(base / "maps"), re.MULTILINE))
    return tuple(sorted(found))


def _namespaces(pid: int | str, proc: Path) -> dict[str, str]:
    found = {}
    for name in _NAMESPACES:
        try:
            found[name] = os.readlink(proc / str(pid) / "ns" / name)  # noqa: PTH115 - "mnt:[1]" is no path
        except OSError:
            continue
    return found


def _memory(base: Path, status: Mapping[str, str]) -> int:
    """Proportional size of memory that is not backed by files; its resident size on older kernels."""
    wanted = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")
    rows = [line.split() for line in _text(base / "smaps_rollup").splitlines()]
    parts = [int(row[1]) for row in rows if row and row[0] in wanted]
    if len(parts) == len(wanted):
        return sum(parts) * 1024
    return sum(int(status.get(key, "0 kB").split()[0]) for key in ("RssAnon", "RssShmem", "VmSwap")) * 1024


def _uses_mps(base: Path, uids: Sequence[int], proc: Path) -> bool:
    """Whether it talks to an MPS daemon: its environment names one's directory, and there is a daemon for its user.

    Whether that directory exists is not looked at: a path that a user chose is nothing for root to follow.
    """
    try:
        environment = (base / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    if not any(entry.startswith(b"CUDA_MPS_PIPE_DIRECTORY=") for entry in environment):
        return False
    for other in os.listdir(proc):  # noqa: PTH208 - only names are wanted
        if other.isdecimal():
            status = _status(proc / other)
            if status.get("Name", "").startswith(_MPS) and set(status.get("Uid", "").split()) & {"0", *map(str, uids)}:
                return True
    return False


def _has_inet(processes: Iterable[ProcessFacts], root_pid: int, proc: Path) -> bool:
    """Whether the tree has sockets of the internet families."""
    inodes = {file[8:-1] for one in processes for file in one.files if file.startswith("socket:[")}
    if not inodes:
        return False
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in _text(proc / str(root_pid) / "net" / kind).splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[9] in inodes:
                return True
    return False
