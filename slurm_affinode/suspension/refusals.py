"""Reasons against a suspension, computed before anything is changed. Pure, except for reading Slurm's configuration.

Each reason has a code for programs and a line for the owner.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.pidfd import Id
from slurm_affinode.base.text import size
from slurm_affinode.checkpoint.criu.restore_gate import excess, of_owner
from slurm_affinode.checkpoint.criu.sessions import NOT_LED
from slurm_affinode.checkpoint.files.service_connections import addresses
from slurm_affinode.checkpoint.inspection import (
    CLOSED,
    EXECUTED,
    LEASED,
    PACKETS,
    QUEUE,
    SEALED,
    SEMAPHORE,
    THREAD,
    MemoryFacts,
    ProcessFacts,
    TreeFacts,
)
from slurm_affinode.checkpoint.interface import Capabilities, CudaDriver
from slurm_affinode.checkpoint.user_files import User
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.suspension import Mode, Refusal, RefusalCode, Steps, SuspendOption
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.suspension.context import Gpus
from slurm_affinode.suspension.job.memory_limits import STILL_RAISED, of_spare
from slurm_affinode.suspension.job.registry import WatchedJob

MARGIN = 256 << 20
"""Host memory to spare once GPU memory has moved in; also disk space for CRIU's small files and the manifest."""

_RDMA = re.compile(r"/dev/infiniband/.*|anon_inode:\[?infinibandevent\]?")
_STUCK = re.compile(
    r"anon_inode:\[?(perf_event|bpf-map|bpf-prog|bpf_link|kvm-\w+|fanotify|secretmem)\]?|/dev/(fuse|kvm)"
)
# The driver may have a userfaultfd of its own, which is closed with its other files when the process is checkpointed.
_FAULTS = re.compile(r"anon_inode:\[?userfaultfd\]?")
_OTHER_KIND = re.compile(
    r"anon_inode:(?!\[?(eventfd(-semaphore)?|eventpoll(-closed)?|signalfd|timerfd|pidfd(-thread)?|inotify|"
    r"io_uring|infinibandevent|perf_event|bpf-map|bpf-prog|bpf_link|kvm-\w+|fanotify|secretmem|userfaultfd)\]?$).*|"
    r"(?!pipe:|socket:)\w+:\[\d+\]"
)
"""Files without a path that are neither of a kind that CRIU dumps (``criu/cr-dump.c``) nor in another pattern here."""
_UNDUMPABLE = {
    re.escape(QUEUE) + ".*": "has a POSIX message queue, which cannot be dumped",
    # CRIU dumps these, but restores something else (4.2: an eventfd without EFD_SEMAPHORE), or fails to restore them.
    re.escape(SEMAPHORE): "holds an object that cannot be restored (a semaphore of eventfd(2))",
    re.escape(PACKETS): "has a pipe in packet mode (O_DIRECT), which cannot be dumped",
    re.escape(THREAD): "has a pidfd of a thread (PIDFD_THREAD), which cannot be dumped",
    re.escape(CLOSED): "has an epoll instance with a file that it has closed, and another process has open",
    re.escape(LEASED): "has a lease on a temporary file (F_SETLEASE), which copying the file would break",
    re.escape(SEALED): "has mapped a sealed file of memfd_create(2), which cannot be restored",
    re.escape(EXECUTED): "executes a file of memfd_create(2), which cannot be restored",
}
"""Pattern of names of files -> the reason against a suspension."""
_PROTOCOLS = frozenset(
    ("TCP", "TCPv6", "UDP", "UDPv6", "UDP-Lite", "UDPLITEv6", "PING", "PINGv6", "UNIX", "UNIX-STREAM", "NETLINK")
)
"""Protocols of the sockets that CRIU dumps (``can_dump_ipproto`` in ``criu/sk-inet.c``, ``dump_socket`` in
``criu/sockets.c``) and that are restored: raw sockets are not."""
_SLURM_STEPS = ("batch", "extern", "interactive")
"""Steps that Slurm itself starts."""
_SOCKETS_FIXED, _SOCKETS_BROKE = (4, 2), (6, 16)
_SOME_GPUS = (575, 57, 8)
"""The first driver that can checkpoint and restore a process with access to only some GPUs (its release notes)."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """Slurm's data about the job."""

    batch: bool
    """Submitted with a batch script."""
    requeue: bool
    """It may be requeued (``Requeue=1``)."""
    nodes: int = 1
    heterogeneous: bool = False
    steps: tuple[str, ...] = ()
    """Steps that run now, without ``batch``, ``extern`` and ``interactive``."""

    @classmethod
    def of(cls, job: Job) -> JobFacts:
        """Return the facts in Slurm's record of a job."""
        steps = tuple(step.id for step in job.steps or () if step.step not in _SLURM_STEPS)
        return cls(job.batch, job.requeue, job.node_count or 1, job.het_job_id is not None, steps)


@dataclass(frozen=True, slots=True)
class GpuUseFacts:
    """How the job uses its GPUs."""

    capabilities: Capabilities
    users: frozenset[int]
    """Processes that use CUDA."""
    used_bytes: int
    """Device memory of the job's processes."""
    mig: bool = False
    some: bool = False
    """The driver ``needs_all_gpus``, and the job may use only some of the node's."""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Prospects of the image of a job that is to be requeued."""

    criu: str | None
    """Version of CRIU, or ``None`` if it cannot be used."""
    kernel: str = ""
    """Release of the kernel; empty if CRIU may dump network sockets on any kernel."""
    room: str | None = None
    """Why no store can accept the image."""
    no_device_files: str | None = None
    """Why processes with inherited device files cannot be dumped."""
    no_plugin: str | None = None
    """Why connections to services cannot be passed over in a dump."""


def needs_all_gpus(capabilities: Capabilities) -> bool:
    """Return whether this driver cannot checkpoint or restore a process without access to all GPUs of the node."""
    return _numbers(capabilities.driver or "") < _SOME_GPUS


def of_mode(mode: Mode, allowed: Iterable[Mode]) -> Refusal:
    """Return the refusal of a mode that is not possible on this node."""
    return Refusal(RefusalCode.MODE, f"mode={mode} is not allowed here (allowed: {', '.join(allowed) or 'none'})")


def refusals(
    job: JobFacts,
    tree: TreeFacts,
    gpu: GpuUseFacts,
    memory: MemoryFacts,
    *,
    owner: User,
    image: ImageFacts | None = None,
) -> tuple[Refusal, ...]:
    """Return all reasons against suspending the job now, the most permanent first; empty if it can be suspended.

    ``image``: ``None`` if the job is suspended in place, without an image and a requeue.
    """
    reasons: list[Refusal] = []
    if image is not None:
        reasons += of_job(job)
        reasons += of_criu(image, tree)
        reasons += of_services(image, tree)
        reasons += of_tree(tree, gpu.users, owner, image.no_device_files)
    reasons += of_gpu(gpu, tree)
    reasons += of_memory(gpu.used_bytes, memory)
    if image is not None and image.room is not None:
        reasons.append(Refusal(RefusalCode.NO_ROOM, f"no room for the image: {image.room}"))
    return tuple(reasons)


def estimate(tree: TreeFacts, gpu_bytes: int, output_bytes: int) -> int:
    """Return the number of bytes that the image may take."""
    return tree.memory + gpu_bytes + output_bytes + MARGIN


def of_job(job: JobFacts) -> list[Refusal]:
    """Return why a job of this kind cannot be requeued with its state."""
    reasons = []
    if not job.batch:
        reasons.append(Refusal(RefusalCode.INTERACTIVE, "it is interactive: only batch jobs can be requeued"))
    reasons += of_nodes(job)
    if job.batch and not job.requeue:
        reasons.append(Refusal(RefusalCode.NO_REQUEUE, "it may not be requeued: submit it with --requeue"))
    return [*reasons, *of_steps(job)]


def of_nodes(job: JobFacts) -> list[Refusal]:
    """Return why a job has processes that are not on this node."""
    reasons = []
    if job.heterogeneous:
        reasons.append(
            Refusal(RefusalCode.HETEROGENEOUS, "it is a heterogeneous job: its parts cannot be suspended as one")
        )
    if job.nodes > 1:
        reasons.append(
            Refusal(RefusalCode.MULTI_NODE, f"it runs on {job.nodes} nodes: only jobs on one node can be suspended")
        )
    return reasons


def of_steps(job: JobFacts, harm: str = "") -> list[Refusal]:
    """Return a refusal if the job has ``srun`` steps. ``harm``: the consequence for them, appended to the text."""
    if not job.steps:
        return []
    names = ", ".join(job.steps[:3]) + (", ..." if len(job.steps) > 3 else "")
    return [Refusal(RefusalCode.SRUN_STEPS, f"it runs srun steps ({names}), which are not below its script{harm}")]


def of_criu(image: ImageFacts, tree: TreeFacts) -> list[Refusal]:
    """Return why CRIU on this node cannot dump the job."""
    version, kernel = image.criu, image.kernel
    if version is None:
        return [Refusal(RefusalCode.CRIU, "CRIU 4.1 or newer is not installed on its node")]
    if tree.inet_sockets and _numbers(version) < _SOCKETS_FIXED and _numbers(kernel) >= _SOCKETS_BROKE:
        text = f"it has network sockets, which CRIU {version} cannot dump on Linux {kernel} (4.2 can)"
        return [Refusal(RefusalCode.CRIU_SOCKETS, text)]
    return []


def of_services(image: ImageFacts, tree: TreeFacts) -> list[Refusal]:
    """Return why the job's connections to services cannot be closed by a suspension."""
    for process in tree.processes:
        if process.services and image.no_plugin is not None:
            service = addresses(process.services)
            text = f"{process.name} ({process.pid}) is connected to {service}, and {image.no_plugin}"
            return [Refusal(RefusalCode.SERVICE_PLUGIN, text)]
    for member in tree.processes:
        if busy := [connection for connection in member.services if connection.busy]:
            text = f"{member.name} ({member.pid}) has a request to {addresses(busy)} in progress"
            return [Refusal(RefusalCode.SERVICE_BUSY, text)]
    return []


def of_tree(
    tree: TreeFacts, cuda_users: Collection[int], owner: User, no_device_files: str | None = None,
    forked: Collection[Id] | None = None,
) -> list[Refusal]:  # fmt: skip
    """Return why CRIU cannot dump or restore the job's processes.

    ``no_device_files``: see ``ImageFacts``. ``forked``: the forked workers, once their parents have closed the device
    files that they share; ``None``: they still have them.
    """
    uid, permitted = owner.uid, of_owner(owner)

    def is_forked(process: ProcessFacts) -> bool:
        return process.is_forked_worker(cuda_users) if forked is None else Id(process.pid, process.started) in forked

    reasons: list[Refusal] = []

    def refuse(code: RefusalCode, what: str, guilty: Sequence[ProcessFacts]) -> None:
        reasons.extend(_of_processes(code, what, guilty))

    def having(pattern: re.Pattern[str]) -> list[ProcessFacts]:
        return _having(tree, pattern)

    if not tree.processes:
        reasons.append(Refusal(RefusalCode.GONE, "its processes have ended"))
    refuse(RefusalCode.SRUN_STEPS, "is srun: the step that it runs is not below the script",
           [process for process in tree.processes if process.name == "srun" and not _is_launcher(process)])  # fmt: skip
    refuse(RefusalCode.LEFT_TREE, "is outside of the script's process tree and would be lost", list(tree.outside))
    # CRIU restores a zombie without its IDs: it then belongs to root.
    living = [process for process in tree.processes if process.state != "Z"]
    changed = [process for process in living if len(set(process.uids)) > 1]
    strangers = [process for process in living if process.uids and process not in changed and uid not in process.uids]
    refuse(RefusalCode.SETUID, "runs with changed user ids (setuid)", changed)
    refuse(RefusalCode.OTHER_USER, f"does not belong to the job's user {uid}", strangers)
    for process in living:
        if process in changed or process in strangers:
            continue
        more = next(
            (why for credentials in process.credentials if (why := excess(credentials, permitted)) is not None), None
        )
        if more is not None:
            refuse(RefusalCode.CREDENTIALS, f"has {more} (setgid, a file capability)", [process])
    refuse(RefusalCode.LANDLOCK, "has set no_new_privs, and so may be in a Landlock domain, which a restore would lose",
           [process for process in living if process.pid in tree.maybe_landlocked])  # fmt: skip
    refuse(
        RefusalCode.TRACED, "is being traced (a debugger)", [process for process in tree.processes if process.tracer]
    )
    for text in dict.fromkeys(filter(None, (process.lost for process in tree.processes))):
        refuse(RefusalCode.KERNEL_STATE, text, [process for process in tree.processes if process.lost == text])
    refuse(RefusalCode.IO_URING, "uses io_uring", having(re.compile(r"anon_inode:\[io_uring\]")))
    other_protocols = {name for process in tree.processes for name in process.protocols} - _PROTOCOLS
    refuse(RefusalCode.SOCKET_KIND, f"has a socket that cannot be dumped ({', '.join(sorted(other_protocols))})",
           [process for process in tree.processes if process.protocols & other_protocols])  # fmt: skip
    refuse(RefusalCode.RDMA, "uses RDMA (InfiniBand)", having(_RDMA))
    refuse(RefusalCode.NAMESPACES, "is in namespaces of its own (a container)",
           [process for process in living if _elsewhere(process, tree)])  # fmt: skip
    foreign = [name for name, inodes in tree.node_namespaces.items() if tree.init_namespaces.get(name) not in inodes]
    if foreign and tree.processes:
        text = f"Slurm has put it into namespaces of its own ({', '.join(foreign)}), which a restore would not"
        reasons.append(Refusal(RefusalCode.NAMESPACES, text))
    holders = [process for process in tree.processes if process.has_gpu_files and process.pid not in cuda_users]
    monitor = "holds the GPU's device files, and neither it nor its parent uses CUDA with them (a monitor)"
    refuse(RefusalCode.GPU_FILE, monitor, [process for process in holders if not is_forked(process)])
    if no_device_files is not None:
        inherited = f"holds the GPU's device files that it has inherited by a fork, and {no_device_files}"
        refuse(RefusalCode.GPU_FILE, inherited, [process for process in holders if is_forked(process)])
    reasons += _of_files(tree, cuda_users)
    if tree.stray is not None:
        refuse(RefusalCode.SESSION, f"is in session {tree.stray.session}, {NOT_LED}", [tree.stray])
    return [*reasons, *_node_dependences(tree)]


def _of_files(tree: TreeFacts, cuda_users: Collection[int]) -> list[Refusal]:
    """Return which open files CRIU cannot dump, or a restore could not open again."""
    reasons: list[Refusal] = []

    def refuse(what: str, guilty: Sequence[ProcessFacts]) -> None:
        reasons.extend(_of_processes(RefusalCode.UNDUMPABLE, what, guilty))

    stuck = [
        *_having(tree, _STUCK),
        *(process for process in _having(tree, _FAULTS) if process.pid not in cuda_users),
    ]
    refuse("holds something that cannot be dumped (perf, BPF, FUSE, KVM, fanotify, memfd_secret, userfaultfd)", stuck)
    for pattern, text in _UNDUMPABLE.items():
        refuse(text, _having(tree, re.compile(pattern)))
    for process in tree.processes:
        other_kind = next(filter(_OTHER_KIND.fullmatch, process.files), None)
        if (
            other_kind is not None and process.pid not in cuda_users
        ):  # those of the driver are closed with its device files
            refuse(f"has {other_kind} open, which cannot be dumped", [process])
    # A file below /proc/PID would belong to another process, and access to others depends on the process that opens it.
    for process in tree.processes:
        if process.unlasting:
            refuse(f"has {process.unlasting[0]} open, which cannot be opened again for it", [process])
    return reasons


def _of_processes(code: RefusalCode, what: str, guilty: Sequence[ProcessFacts]) -> list[Refusal]:
    if not guilty:
        return []
    names = ", ".join(f"{process.name} ({process.pid})" for process in guilty[:3])
    return [Refusal(code, f"{names}{', ...' if len(guilty) > 3 else ''} {what}")]


def _having(tree: TreeFacts, pattern: re.Pattern[str]) -> list[ProcessFacts]:
    return [
        process for process in tree.processes if any(map(pattern.fullmatch, (*process.files, *process.mapped_devices)))
    ]


def _node_dependences(tree: TreeFacts) -> list[Refusal]:
    """Return what would stay on the node."""
    reasons = []
    if tree.lost_streams:
        # CRIU finds a deleted file by its mount, which belongs to slurmstepd and not to the job.
        names = ", ".join(tree.lost_streams)
        reasons.append(
            Refusal(RefusalCode.STREAM_DELETED, f"its output or input was deleted while it has it open: {names}")
        )
    if tree.sysv:
        names = ", ".join(tree.sysv[:3]) + (", ..." if len(tree.sysv) > 3 else "")
        text = f"its user has made System V IPC since it began ({names}), which would stay on its node"
        reasons.append(Refusal(RefusalCode.SYSV_IPC, text))
    return reasons


def _is_launcher(process: ProcessFacts) -> bool:
    """Return whether a process named ``srun`` is that of local steps (``spank/srun.py``), which runs them below itself.

    Observed: a script that starts a step twice a second could not be suspended while Python was loading.
    """
    return bool(process.arguments) and process.arguments[0].rpartition("/")[2].startswith("python")


def _elsewhere(process: ProcessFacts, tree: TreeFacts) -> bool:
    """Return whether a process is in other namespaces (a container); an exiting process has none."""
    return any(
        tree.init_namespaces[name] != inode
        for name, inode in process.namespaces.items()
        if name in tree.init_namespaces
    )


def of_gpu(gpu: GpuUseFacts, tree: TreeFacts) -> list[Refusal]:
    """Return why the driver cannot checkpoint the job's GPU memory."""
    reasons = []
    if gpu.mig:
        reasons.append(Refusal(RefusalCode.MIG, "it runs on MIG instances, which cannot be checkpointed"))
    elif not gpu.capabilities.checkpoint:
        reasons.append(Refusal(RefusalCode.DRIVER, gpu.capabilities.why_not or "the driver cannot checkpoint"))
    elif gpu.some:
        text = f"it may use only some of the node's GPUs, and driver {gpu.capabilities.driver} needs all of them"
        reasons.append(Refusal(RefusalCode.DRIVER, f"{text} (575.57.08 does not)"))
    all_processes = (*tree.processes, *tree.outside)
    if any(process.mps for process in all_processes):
        reasons.append(Refusal(RefusalCode.MPS, "it uses MPS, which cannot be checkpointed"))
    still = [process for process in all_processes if process.pid in gpu.users and process.state in "Tt"]
    if still:
        # The process has to lock itself for the driver, which would wait for it beyond every time-out.
        names = ", ".join(f"{process.name} ({process.pid})" for process in still[:3])
        reasons.append(
            Refusal(RefusalCode.STOPPED, f"{names} is stopped (SIGSTOP), and holds GPU memory that only it can move")
        )
    return reasons


def of_memory(gpu_bytes: int, memory: MemoryFacts) -> list[Refusal]:
    """Return why the GPU memory does not fit into host memory: the node's, and below the job's memory limit."""
    needed = gpu_bytes + MARGIN
    if memory.raised is None:
        return [Refusal(RefusalCode.LIMIT_RAISED, "the record of its memory limit cannot be read")]
    if memory.raised:
        text = f"its memory limit is still raised by {size(memory.raised)} for an earlier suspension: {STILL_RAISED}"
        return [Refusal(RefusalCode.LIMIT_RAISED, text)]
    reasons = []
    if gpu_bytes and memory.headroom is not None and needed > memory.headroom:
        headroom = size(max(0, memory.headroom))
        text = f"its GPU memory ({size(gpu_bytes)}) does not fit below its memory limit, which leaves {headroom}"
        reasons.append(Refusal(RefusalCode.HOST_MEMORY, f"{text}: raise --mem"))
    if gpu_bytes and needed > memory.available:
        text = f"its GPU memory ({size(gpu_bytes)}) does not fit into the node's free memory ({size(memory.available)})"
        reasons.append(Refusal(RefusalCode.HOST_MEMORY, text, _NODE_MEMORY))
    spare = 0 if memory.spare is None else memory.spare.available
    if gpu_bytes and memory.job_headroom is not None and memory.job_headroom < needed and spare < needed:
        headroom = size(max(0, memory.job_headroom))
        text = f"its GPU memory ({size(gpu_bytes)}) does not fit below its memory limit, which leaves {headroom}"
        reasons.append(Refusal(RefusalCode.HOST_MEMORY, f"{text}, and {of_spare(memory.spare)}: raise --mem"))
    return reasons[:1]


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+\.\d+(\.\d+)?", version)
    return tuple(map(int, match[0].split("."))) if match else (0, 0)


_NODE_MEMORY = "try again when others use less memory of the node, or submit it to a node with more memory"
_IN_PLACE = "submit it with mode=inplace"
_ADMINISTRATORS = "for administrators"
_REMEDIES = {
    RefusalCode.NO_REQUEUE: f"submit it with --requeue; or {_IN_PLACE}",
    RefusalCode.MULTI_NODE: "submit it for one node (--nodes=1)",
    RefusalCode.HETEROGENEOUS: "submit its components as separate jobs",
    RefusalCode.SRUN_STEPS: "start the program without srun, or submit it with steps=local in --gpu-suspend-idle",
    RefusalCode.CRIU: f"{_ADMINISTRATORS}: install CRIU 4.1 or newer; or {_IN_PLACE}",
    RefusalCode.SERVICE_PLUGIN: f"{_ADMINISTRATORS}: install the CRIU plugin; or {_IN_PLACE}",
    RefusalCode.SERVICE_BUSY: "try again in a moment",
    RefusalCode.CRIU_SOCKETS: f"{_ADMINISTRATORS}: install CRIU 4.2 or newer; or {_IN_PLACE}",
    RefusalCode.NO_SHARED_STORE: f"{_ADMINISTRATORS}: set suspend.shared_store; or {_IN_PLACE}",
    RefusalCode.NO_ROOM: f"try again later; or {_IN_PLACE}",
    RefusalCode.SETUID: _IN_PLACE,
    RefusalCode.KERNEL_STATE: _IN_PLACE,
    RefusalCode.LANDLOCK: _IN_PLACE,
    RefusalCode.SOCKET_KIND: (
        f"use TCP (GODEBUG=multipathtcp=0 for programs in Go) without multicast, and accept "
        f"all connections; or {_IN_PLACE}"
    ),
    RefusalCode.CREDENTIALS: f"end the program, or start it outside of the job; or {_IN_PLACE}",
    RefusalCode.ROOT: f"submit it as another user; or {_IN_PLACE}",
    RefusalCode.OTHER_USER: _IN_PLACE,
    RefusalCode.LEFT_TREE: _IN_PLACE,
    RefusalCode.SESSION: _IN_PLACE,
    RefusalCode.TRACED: f"detach the debugger; or {_IN_PLACE}",
    RefusalCode.IO_URING: f"submit it without io_uring=allow; or {_IN_PLACE}",
    RefusalCode.RDMA: _IN_PLACE,
    RefusalCode.NAMESPACES: _IN_PLACE,
    RefusalCode.UNDUMPABLE: _IN_PLACE,
    RefusalCode.STREAM_DELETED: f"do not delete its output while it runs; or {_IN_PLACE}",
    RefusalCode.SYSV_IPC: f"remove the objects (ipcrm) if they are not needed; or {_IN_PLACE}",
    RefusalCode.GPU_FILE: f"end the program, or start it outside of the job; or {_IN_PLACE}",
    RefusalCode.GPU_NUMBERS: f"{_ADMINISTRATORS}: set up the prolog",
    RefusalCode.MIG: "request a whole GPU, or shards",
    RefusalCode.MPS: "start it without MPS",
    RefusalCode.DRIVER: f"{_ADMINISTRATORS}: install a newer driver",
    RefusalCode.STOPPED: "resume the process (kill -CONT)",
    RefusalCode.HOST_MEMORY: "request more memory (--mem)",
    RefusalCode.LIMIT_RAISED: "free memory of the job, and try again in a moment",
    RefusalCode.MODE: "submit it with another mode",
    RefusalCode.SLURM: "try again in a moment",
    RefusalCode.NOT_STARTED: "try again in a moment",
    RefusalCode.BUSY: "try again in a moment",
    RefusalCode.RECOVERING: "try again in a moment",
}
"""Code -> what the owner can do; codes without an entry have no remedy."""


def remedy(refusal: Refusal, option: SuspendOption) -> str | None:
    """Return the remedy of the owner of a job with this option, or ``None`` if there is none."""
    if refusal.code == RefusalCode.SRUN_STEPS and option.steps is Steps.LOCAL:
        return "start the program without srun, or without the options that need Slurm's srun"
    text = refusal.remedy or _REMEDIES.get(refusal.code)
    if text is not None and option.mode is Mode.INPLACE:
        text = text.removesuffix(_IN_PLACE).removesuffix("; or ")
    return text or None


_RETRY_S = 600.0
"""Maximum age of the configuration."""


class SlurmFacts:
    """Settings in Slurm's configuration.

    While slurmctld does not respond, its last answer is used; before the first one, every setting is empty.
    """

    def __init__(self, slurm: SlurmClient, cuda: CudaDriver, gpus: Gpus, now: Callable[[], float]) -> None:
        self._slurm = slurm
        self._cuda = cuda
        self._gpus = gpus
        self._now = now
        self._queried_s = -1e9
        self._configuration: Mapping[str, str] = {}

    def ends_above_memory(self) -> bool:
        """Return whether Slurm itself ends jobs that exceed their ``--mem``."""
        return "overmemorykill" in self._setting("JobAcctGatherParams")

    def allowed_memory_share(self) -> float:
        """Return the memory limit of a job per allocated byte (``AllowedRAMSpace``); 1 if Slurm does not report it."""
        match = re.match(r"\d{1,6}(\.\d{1,6})?", self._setting("AllowedRAMSpace"))
        return float(match[0]) / 100 if match else 1.0

    def some_gpus(self, job: WatchedJob) -> bool:
        """Return whether the driver needs all GPUs of the node for a checkpoint, but the job has access to only some.

        Raises ``GpuError``.
        """
        if not job.devices or not needs_all_gpus(self._cuda.capabilities()):
            return False
        other_gpus = {device.uuid for device in self._gpus.devices()} - {device.uuid for device in job.devices}
        closed = self._setting("ConstrainDevices") in ("yes", "true") and "task/cgroup" in self._setting("TaskPlugin")
        return bool(other_gpus) and closed

    def _setting(self, name: str) -> str:
        if self._now() - self._queried_s >= _RETRY_S:
            try:
                self._configuration = self._slurm.config()
                self._queried_s = self._now()
            except AffinodeError:
                pass
        return self._configuration.get(name, "").lower()
