"""Why a job cannot be suspended: found before anything is touched, each reason with a code of its own.

Read from ``/proc``, Slurm's last word and the driver; what cannot be read is no reason.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurm_affinode.agent import words
from slurm_affinode.agent.tree import Member, below
from slurm_affinode.checkpoint.interface import Capabilities
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.suspension import Mode, Refusal, SuspendOption

OVERHEAD_BYTES = 64 << 20
"""Of an image, beyond the memory of its processes."""
_MEMORY_MARGIN = 0.05
_BATCH_STEPS = ("batch", "extern")


@dataclass(frozen=True, slots=True)
class Seen:
    """What ``/proc`` shows of a job's processes."""

    tree: Sequence[Member]
    """The root and all below it."""
    left: Sequence[Member]
    """Of the namespace, and not below the root."""
    nested: Collection[int] = ()
    """PIDs below the root in a namespace of their own: containers."""
    links: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """PID -> where its descriptors point."""
    memory_bytes: int = 0
    """Of all of them, shared pages counted once for each."""


def look(members: Sequence[Member], root_pid: int, *, proc: Path = Path("/proc")) -> Seen:
    """Look at the processes of a namespace (``members``) whose tree has its root at ``root_pid``."""
    own = [member for member in members if not member.ours]
    tree, left = below(own, root_pid)
    here = {member.pid for member in members}
    nested = [pid for pid in _below(here, proc) if pid not in here]
    links = {member.pid: tuple(_links(member.pid, proc)) for member in own}
    memory = sum(_resident(member.pid, proc) for member in own)
    return Seen(tree, left, nested, links, memory)


def _below(roots: Collection[int], proc: Path) -> list[int]:
    found, queue = [], list(roots)
    while queue:
        pid = queue.pop()
        with contextlib.suppress(OSError):
            for task in (proc / str(pid) / "task").iterdir():
                children = [int(child) for child in (task / "children").read_text().split()]
                found += children
                queue += [child for child in children if child not in roots]
    return found


def _links(pid: int, proc: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for name in os.listdir(proc / str(pid) / "fd"):  # noqa: PTH208 - only names are wanted
            with contextlib.suppress(OSError):
                yield os.readlink(proc / str(pid) / "fd" / name)  # noqa: PTH115 - it need not be a path


def _resident(pid: int, proc: Path) -> int:
    try:
        text = (proc / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return 0
    match = re.search(r"^VmRSS:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) << 10 if match else 0


def of_slurm(job: Job | None, option: SuspendOption) -> Iterator[Refusal]:
    """What Slurm's word on the job rules out."""
    if option.mode is Mode.INPLACE:
        yield Refusal("inplace", "mode=inplace is not available on this node")
    if job is None:
        yield Refusal("slurm", "slurmctld has not said anything about this job yet")
        return
    if job.het_job_id is not None:
        yield Refusal("heterogeneous", f"it is a part of the heterogeneous job {job.het_job_id}")
    if job.node_count is not None and job.node_count > 1:
        yield Refusal("multi-node", f"it runs on {job.node_count} nodes; only jobs on one node can be suspended")
    if not job.batch:
        yield Refusal("interactive", "it is interactive (salloc, srun): only batch jobs can be requeued")
    elif not job.requeue:
        yield Refusal("no-requeue", "it must not be requeued (--no-requeue, or JobRequeue=0)")
    steps = [step.step for step in job.steps or () if step.step not in _BATCH_STEPS]
    if steps:
        names = ", ".join(f"{job.job_id}.{step}" for step in steps[:3])
        yield Refusal("srun-steps", f"srun steps are running ({names}): they are outside of the batch script's tree")


def of_processes(seen: Seen, uid: int, cuda: Collection[int]) -> Iterator[Refusal]:
    """What its processes rule out. ``cuda``: those that use CUDA."""
    if not seen.tree:
        yield Refusal("not-started", "its script has not started yet, or has ended")
        return
    if seen.left:
        yield Refusal("left-tree", f"{_named(seen.left)} has left the tree of the script (a daemon)")
    if seen.nested:
        yield Refusal("nested", f"process {min(seen.nested)} is in a PID namespace of its own (a container)")
    strangers = [member for member in (*seen.tree, *seen.left) if member.uid != uid]
    if strangers:
        yield Refusal("setuid", f"{_named(strangers)} runs as user {strangers[0].uid}, not as {uid}")
    traced = [member for member in seen.tree if member.state == "t"]
    if traced:
        yield Refusal("traced", f"{_named(traced)} is being traced by a debugger")
    for code, pattern, text in (
        ("io-uring", "anon_inode:[io_uring]", "uses io_uring"),
        ("rdma", "/dev/infiniband/", "uses RDMA (/dev/infiniband)"),
    ):
        found = [m for m in seen.tree if any(link.startswith(pattern) for link in seen.links.get(m.pid, ()))]
        if found:
            yield Refusal(code, f"{_named(found)} {text}")
    holders = [
        member
        for member in seen.tree
        if member.pid not in cuda and any(link.startswith("/dev/nvidia") for link in seen.links.get(member.pid, ()))
    ]
    if holders:
        yield Refusal(
            "gpu-file", f"{_named(holders)} has /dev/nvidia* open without using CUDA itself (forked from one)"
        )


def _named(members: Sequence[Member]) -> str:
    more = f" and {len(members) - 1} more" if len(members) > 1 else ""
    return f"process {members[0].pid_ns} ({words.one(members[0].name, 20)}){more}"


def of_driver(capabilities: Capabilities, cuda: Collection[int]) -> Iterator[Refusal]:
    """What the driver cannot do."""
    if cuda and not capabilities.checkpoint:
        yield Refusal("driver", capabilities.why_not or "the driver cannot checkpoint processes")


def of_memory(gpu_bytes: int, available: int | None, room: int | None) -> Iterator[Refusal]:
    """GPU memory goes to the host first. ``available`` on the node, ``room`` below the job's own limit."""
    for code, text, limit in (
        ("host-memory", "available on the node", available),
        ("job-memory", "left below the job's memory limit", room),
    ):
        need = round(gpu_bytes * (1 + _MEMORY_MARGIN))
        if limit is not None and gpu_bytes and need > limit:
            yield Refusal(
                code,
                f"its {words.size(gpu_bytes)} of GPU memory need as much host memory; {words.size(limit)} are {text}",
            )


def available_bytes(proc: Path = Path("/proc")) -> int | None:
    """Host memory that can be had without swapping."""
    with contextlib.suppress(OSError):
        match = re.search(r"^MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE)
        if match:
            return int(match[1]) << 10
    return None


def cgroup_room_bytes(pid: int, *, proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the tightest memory limit above a process leaves (cgroup v1 and v2); ``None``: there is none."""
    rooms: list[int] = []
    with contextlib.suppress(OSError):
        for line in (proc / str(pid) / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            base = root / "memory" if controllers else root
            names = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
            )
            for directory in _upwards(base, path):
                with contextlib.suppress(OSError, ValueError):
                    limit = int((directory / names[0]).read_text())
                    if limit < 1 << 60:
                        rooms.append(max(0, limit - int((directory / names[1]).read_text())))
    return min(rooms, default=None)


def _upwards(base: Path, path: str) -> Iterable[Path]:
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        return
    for count in range(len(parts), 0, -1):
        yield base.joinpath(*parts[:count])
