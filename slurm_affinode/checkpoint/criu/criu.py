"""Dump and restore with CRIU, as root, from outside the job's namespaces.

CRIU runs inside the job's PID and mount namespaces, so that it sees the job's PIDs: ``launcher.py`` enters them by
descriptors held since the shepherd's hello, and executes CRIU by descriptor. CRIU gets nothing that a user can choose:
a fixed environment, no configuration file, and image and work directories as inherited descriptors
(``/proc/self/fd/N``), so no path is resolved where a job could have placed a file. It loads a plugin only for a dump of
forked workers (``device_files.py``).

CRIU's exit status alone is not trusted: the files of a dump and the restored process tree are checked too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from slurm_affinode.base import kernel_text, pidfd, process
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.node_config import CRIU_PLUGIN
from slurm_affinode.base.pidfd import Id, Namespace, Process, ProcessGoneError
from slurm_affinode.base.text import last_line
from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.criu import cpu_affinity, kernel_states, restore_gate, sessions
from slurm_affinode.checkpoint.criu import launcher as criu_launcher
from slurm_affinode.checkpoint.criu.restore_gate import Gate
from slurm_affinode.checkpoint.files import (
    deleted_files,
    device_files,
    inet_sockets,
    local_files,
    open_files,
    service_connections,
)
from slurm_affinode.checkpoint.files.created_files import CreatedFiles
from slurm_affinode.checkpoint.files.file_table import FILES
from slurm_affinode.checkpoint.files.open_files import Inheritance, OpenFiles
from slurm_affinode.checkpoint.files.service_connections import Services
from slurm_affinode.checkpoint.image import memory_map
from slurm_affinode.checkpoint.image.criu_images import BadImage, Inventory, failure, inspect, log_of, prediction
from slurm_affinode.checkpoint.image.memory_map import TreeMemory
from slurm_affinode.checkpoint.image.page_filler import CannotFill, Filler, beside
from slurm_affinode.checkpoint.image.private_image import PrivateImage, private_image
from slurm_affinode.checkpoint.interface import (
    CheckpointError,
    DumpFailed,
    DumpNoRoom,
    ImageDamaged,
    InheritFd,
    Pages,
    RestoreFailed,
    RestoreInterrupted,
    Stop,
    Tree,
    restore_failure,
)
from slurm_affinode.checkpoint.user_files import User
from slurm_affinode.checkpoint.work_directory import work_directory

OLDEST = (4, 1)
"""Older versions fail on newer kernels or lack ``--tcp-close`` for dumps."""
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "HOME": "/"}
_CHECK_S = 30.0
_GRACE_S = 10.0
"""Time after the deadline for killing a held tree before CRIU is killed: without CRIU the tree would run."""
_GHOST_LIMIT = "64G"
_VERSION = re.compile(r"^Version: (\d+)\.(\d+)(\S*)", re.MULTILINE)
_PID_GAP = 64
_HELPERS = 300
"""First PID that CRIU tries for its session helpers (``get_free_pid`` in ``criu/pstree.c``)."""
_CGROUPS = Path("/sys/fs/cgroup")

_COMMON = (
    "--no-default-config",
    "--manage-cgroups=ignore",  # the restored tree belongs in the cgroup of Slurm's new step
    "--shell-job",
    "--skip-in-flight",
    "--ext-unix-sk",
    "--file-locks",
)

_HALF = "half of stream unix connection"
"""CRIU's error about a connection with one end outside of the process tree."""
_ABOUT_MEMORY = re.compile("lazy|uffd|userfault")
"""Matches CRIU's errors about lazy pages."""

LOG = logging.getLogger("slurm_affinode.agent")
Runner = Callable[..., process.Completed]


@dataclass(frozen=True, slots=True)
class _Target:
    """Parameters of one restore."""

    space: Namespace
    image: PrivateImage
    passed: Inheritance
    root_pid_ns: int
    inventory: Inventory
    connections: Sequence[str]
    """CRIU's options for TCP connections."""
    deadline: float

    def left_s(self) -> float:
        """Return the seconds until the restore times out."""
        return self.deadline - time.monotonic()


class Criu:
    """Implementation of ``Imager`` with the program ``criu``."""

    def __init__(
        self,
        *,
        program: str = "criu",
        plugin: Path = CRIU_PLUGIN,
        services: Services | None = None,
        runner: Runner = process.run,
        cgroup_root: Path = _CGROUPS,
        verbosity: int = 2,
        hold: Callable[[Id], Namespace] = pidfd.namespace,
    ) -> None:
        """``verbosity``: as in ``criu -vN``; 2 means errors and warnings, 4 is for bug reports.

        ``services``: those whose connections are closed. ``hold``: returns the namespaces of a shepherd, held by
        descriptor.
        """
        self._hold = hold
        self._program = program
        self._plugin = plugin
        self._services = services or Services()
        self._run = runner
        self._cgroup_root = cgroup_root
        self._verbosity = verbosity
        self._version: str | None = None
        self._lazy: bool | None = None

    def check(self) -> str:
        """Return the version of CRIU. Raises ``CheckpointError`` if CRIU is missing or too old."""
        if self._version is None:
            try:
                argv = [process.find(self._program), "--version"]
                output = self._run(argv, timeout_s=_CHECK_S, env=_ENVIRONMENT, check=False)
            except UnreachableError as error:
                raise CheckpointError(f"CRIU cannot be run: {error}", hint="install criu 4.1 or newer") from None
            match = _VERSION.search(output.stdout.decode("utf-8", "replace"))
            if match is None:
                raise CheckpointError(f"{self._program} --version reports no version", hint="install criu 4.1 or newer")
            if (int(match[1]), int(match[2])) < OLDEST:
                oldest = ".".join(map(str, OLDEST))
                raise CheckpointError(
                    f"criu {match[1]}.{match[2]} is too old: {oldest} is needed", hint=f"install criu {oldest} or newer"
                )
            self._version = f"{match[1]}.{match[2]}{match[3]}"
        return self._version

    def why_no_device_files(self) -> str | None:
        """Return why processes with inherited device files cannot be dumped here, in one line, or ``None``."""
        return device_files.why_not(self._plugin)

    def why_no_plugin(self) -> str | None:
        """Return why connections to services cannot be passed over in a dump here, in one line, or ``None``."""
        return device_files.why_no_plugin(self._plugin)

    def dump(self, tree: Tree, directory_fd: int, *, timeout_s: float, stop: Stop) -> None:
        """Dump the process tree, which is stopped and held, to the directory, and leave it so.

        ``timeout_s`` applies to the whole dump; when it expires CRIU is killed, which may damage the tree. CRIU traces
        the processes itself, so ``stop`` is released while it runs. Whatever a process does in the moments before and
        after that, the image shows, and it is checked before anything else is done. Raises ``DumpFailed``, or
        ``DumpNoRoom`` if the file system of the directory is full.
        """
        deadline = time.monotonic() + timeout_s
        self.check()
        space = self._space(tree.init, DumpFailed)
        arguments = [
            "dump", f"--tree={tree.root_pid_ns}",
            "--images-dir=/proc/self/fd/" + str(directory_fd),
            "--log-file=dump.log", f"-v{self._verbosity}",
            "--leave-stopped", f"--timeout={max(1, int(timeout_s))}", f"--ghost-limit={_GHOST_LIMIT}", *_COMMON,
            *inet_sockets.options(process for _, process in space.processes()),
        ]  # fmt: skip
        processes = [Id(member.pid, member.started) for member in space.numbers()]
        reusable = inet_sockets.reusable(processes)
        deleted_files.give_names(tree.init, processes, tree.owner)
        try:
            with ExitStack() as stack:
                closed = self._closed(space)
                plugins, variables = (
                    stack.enter_context(self._plugins(space, tree, closed))
                    if tree.forked or closed
                    else (directory_fd, {})
                )
                arguments.append(f"--libdir=/proc/self/fd/{plugins}")
                argv, fds = stack.enter_context(self._launched(space, arguments))
                stop.release()
                try:
                    completed = self._run(
                        argv, timeout_s=timeout_s, env={**_ENVIRONMENT, **variables}, check=False,
                        pass_fds=(*sorted({directory_fd, plugins}), *fds), group=True,
                    )  # fmt: skip
                finally:
                    stop.hold()
                    inet_sockets.end_repair(processes, reusable)
        except (UnreachableError, OSError) as error:
            raise DumpFailed(f"the dump was aborted: {error}") from None
        if completed.returncode != 0:
            why = "the job ended" if space.init.ended() else self._failure_reason(directory_fd, "dump.log", completed)
            if _HALF in why:
                why = (
                    "it is connected to a UNIX socket outside of the job, which is not that of a service in "
                    "suspend.services"
                )
            raise _failed(directory_fd, f"CRIU could not dump it: {why}")
        try:
            sessions.settle(directory_fd)
            sessions.take_back(directory_fd)
            _record(directory_fd, space, processes)
            inventory = inspect(directory_fd)
            more = restore_gate.excess_in_image(directory_fd, inventory.threads, restore_gate.of_owner(tree.owner))
            refusal = more or open_files.refusal(directory_fd)
            _adjust(directory_fd, space, inventory, tree.stopped)
        except BadImage as error:
            raise _failed(directory_fd, f"CRIU reported success, but the image is not complete: {error}") from None
        if inventory.pids[0] != tree.root_pid_ns:
            raise DumpFailed(f"the image holds process {inventory.pids[0]} in place of {tree.root_pid_ns}")
        if refusal is not None:
            raise DumpFailed(f"it could not be restored: {refusal}")
        numbers = space.numbers()
        missing = {number.inner for number in numbers} - set(inventory.pids)
        if missing:
            raise DumpFailed(f"processes are missing in the image: {', '.join(map(str, sorted(missing)))}")
        left_s = max(1.0, deadline - time.monotonic())
        local_files.save(
            tree.init,
            [Id(member.pid, member.started) for member in numbers],
            directory_fd,
            tree.owner,
            timeout_s=left_s,
        )

    @contextmanager
    def _plugins(
        self, space: Namespace, tree: Tree, closed: Collection[int]
    ) -> Iterator[tuple[int, Mapping[str, str]]]:
        """Yield the directory of the plugin, and its environment. ``closed``: inodes of connections to services.

        The plugin accepts device files of any process. Raises ``DumpFailed`` if another process than ``tree.forked``
        has one, which the image would lose, ``UnreachableError`` and ``OSError``.
        """
        with device_files.opened(self._plugin) as fd:
            devices = self._devices(space, tree) if tree.forked else {}
            yield fd, {**devices, **(service_connections.environment(closed) if closed else {})}

    def _closed(self, space: Namespace) -> set[int]:
        """Return the inodes of the connections to services. Raises ``DumpFailed`` if one is busy, and ``OSError``."""
        inodes: set[int] = set()
        for inner, member in space.processes():
            with contextlib.suppress(ProcessGoneError):
                for connection in self._services.of(member):
                    if connection.busy:
                        raise DumpFailed(f"process {inner} has a request to {connection.address} in progress")
                    inodes.add(connection.inode)
        return inodes

    def _devices(self, space: Namespace, tree: Tree) -> Mapping[str, str]:
        majors = device_files.majors()
        for _, member in space.processes():
            with contextlib.suppress(ProcessGoneError):
                if member.id not in tree.forked and (name := device_files.find_device_file(member, majors)) is not None:
                    raise DumpFailed(f"process {member.pid} has {name} open, and has not inherited it")
        return device_files.environment(majors)

    def _space(self, init: Id, kind: type[CheckpointError]) -> Namespace:
        """Hold the namespaces of a shepherd. Raises ``kind``."""
        try:
            space = self._hold(init)
            space.check()
        except (OSError, ValueError) as error:
            raise kind(f"the namespaces of the job cannot be used: {error}") from None
        return space

    def restore(
        self,
        init: Id,
        directory_fd: int,
        inherit: Sequence[InheritFd],
        *,
        root_pid_ns: int,
        timeout_s: float,
        pages: Pages,
        user: User,
        created: CreatedFiles | None = None,
        shared: bool = False,
        ready: Callable[[], None] = lambda: None,
    ) -> int:
        """Restore the process tree below PID 1 of the namespace and return the root's PID in the namespace.

        ``directory_fd`` is only read. ``timeout_s`` applies to the whole restore. ``ready`` is called when ``pages``
        are verified. ``user``, ``created``, ``shared``: see ``interface.Imager``. When this returns the tree
        runs; CUDA calls in it block until the CUDA state is restored and unlocked.

        Raises ``RestoreFailed`` and the errors of ``pages``; no process of the tree is left then.
        """
        self.check()
        deadline = time.monotonic() + timeout_s
        with ExitStack() as stack:
            try:
                image = stack.enter_context(private_image(directory_fd, pages, shared=shared))
                inventory = inspect(image.fd, image.pages)
                memories = memory_map.fillable(image.fd, inventory) if self._leaves_memory() else ()
                kernel_states.clear_death_signals(image)
            except BadImage as error:
                raise RestoreFailed(f"the image is not complete: {error}") from None
            space = self._space(init, RestoreInterrupted)
            _refuse_excess(space, image.fd, inventory)
            if space.members():
                raise RestoreInterrupted("the job's PID namespace is not empty")
            names = stack.enter_context(ExitStack())
            names.callback(deleted_files.settle, init, image.fd, user)
            restored_files = local_files.restore_files(init, image.fd, image.open, user, created=created)
            undo = stack.enter_context(ExitStack())
            undo.callback(local_files.remove, init, restored_files, user)
            passed = stack.enter_context(
                Inheritance(image, space.root_fd, space.mount_fd, user, inherit, timeout_s=timeout_s)
            )
            # CRIU inherits the files, so their names for the dump are removed before a process can list them.
            names.close()
            passed.finish()
            connections = _adapt_sockets(image)
            target = _Target(space, image, passed, root_pid_ns, inventory, connections, deadline)
            self._restore(target, memories, pages, ready)
            undo.pop_all()
        return root_pid_ns

    def _restore(
        self, target: _Target, memories: Sequence[TreeMemory], pages: Pages, ready: Callable[[], None]
    ) -> None:
        try:
            try:
                self._place(target, memories, pages, ready)
            except CannotFill as error:
                if target.left_s() <= 0:
                    raise
                LOG.warning("falling back to CRIU to restore the memory: %s", error)
                self._place(target, (), pages, ready)
        except (UnreachableError, OSError) as error:
            target.space.kill_all()
            raise RestoreInterrupted(f"the restore was aborted: {error}") from None
        except CheckpointError:
            target.space.kill_all()
            raise

    def _leaves_memory(self) -> bool:
        """Return whether CRIU and the kernel support lazy pages, so that another process can fill the memory."""
        if self._lazy is None:
            output = self._run(
                [process.find(self._program), "check", "--feature", "uffd-noncoop"],
                timeout_s=_CHECK_S, env=_ENVIRONMENT, check=False,
            )  # fmt: skip
            self._lazy = output.returncode == 0
        return self._lazy

    def _place(self, target: _Target, memories: Sequence[TreeMemory], pages: Pages, ready: Callable[[], None]) -> None:
        """Restore the process tree. ``memories`` is filled by this process, all other memory by CRIU."""
        space, image, inherit = target.space, target.image, target.passed.fds
        image.provide_pages(memories)
        with work_directory() as (work, work_fd), ExitStack() as stack:
            filler = (
                stack.enter_context(Filler(work_fd, image.source_fd, memories, beside(space.init.pid)))
                if memories
                else None
            )

            def verify() -> None:
                with self._or_none(space):
                    if filler is not None:
                        filler.begin(target.left_s())
                    pages.sound(target.left_s())
                    image.check_compared()
                    if filler is not None:
                        filler.end()

            def check_restored() -> None:
                with self._or_none(space):
                    _check_tree(space, target.inventory.pids, target.passed)
                    _refuse_shared_ports(image, space)
                    cpu_affinity.restore(image, space)
                    ready()

            pages.begin(image.compare(None if filler is None else filler.take))
            arguments = [
                "restore",
                f"--images-dir=/proc/self/fd/{image.fd}", f"--work-dir=/proc/self/fd/{work_fd}",
                f"--libdir=/proc/self/fd/{work_fd}", "--log-file=restore.log", f"-v{self._verbosity}",
                "--restore-detached", "--pidfile=pid", Gate.OPTION, *_COMMON, *target.connections,
                *([Filler.OPTION] if filler is not None else []),
                *(word for descriptor in inherit for word in ("--inherit-fd", f"fd[{descriptor.fd}]:{descriptor.key}")),
            ]  # fmt: skip
            launched = self._launched(space, arguments, last_pid=_last_pid(target.inventory.numbers), joins=True)
            with launched as (argv, fds), Gate(work, restored=verify, resuming=check_restored) as gate:
                failed = True
                try:
                    completed = self._run(
                        argv, timeout_s=target.left_s() + _GRACE_S, env=_ENVIRONMENT, check=False, group=True,
                        pass_fds=(image.fd, work_fd, *fds, *(descriptor.fd for descriptor in inherit)),
                    )  # fmt: skip
                    failed = completed.returncode != 0
                finally:
                    if failed:  # without CRIU nothing holds a partial tree, and the checks may still be running
                        space.kill_all()
            if failed:
                why = self._failure_reason(work_fd, "restore.log", completed)
                stack.close()  # the filler would block the readers of the pages otherwise
                if filler is not None and (filler.error is not None or _ABOUT_MEMORY.search(why)):
                    raise filler.error or CannotFill(why)
                raise _failed_for(why, pages, target.left_s())
            gate.check_actions()
            self._arrived(space, target.root_pid_ns, log_of(work / "pid"), target.deadline)

    @staticmethod
    @contextmanager
    def _or_none(space: Namespace) -> Iterator[None]:
        """Kill the whole tree if a check in the context fails or if the shepherd has ended."""
        try:
            space.check()
            yield
            space.check()
        except BaseException:
            space.kill_all()
            raise

    @staticmethod
    def _arrived(space: Namespace, root_pid_ns: int, output: str, deadline: float) -> None:
        """Check that the root was restored below PID 1. Once running, it and other processes may end at any time."""
        if output.strip() != str(root_pid_ns):
            raise RestoreInterrupted(f"CRIU restored {output.strip() or 'nothing'} in place of process {root_pid_ns}")
        while any(
            inner == root_pid_ns and process.stat().parent != space.init.pid for inner, process in space.processes()
        ):
            if time.monotonic() > deadline:
                raise RestoreInterrupted("the restored tree is not below the job's PID 1")
            time.sleep(0.002)
        space.check()

    @contextmanager
    def _launched(
        self, space: Namespace, arguments: Sequence[str], *, last_pid: int = 0, joins: bool = False
    ) -> Iterator[tuple[list[str], list[int]]]:
        """Yield the command that runs CRIU inside the namespaces, and the descriptors that it needs.

        ``joins``: run it in the cgroups and on the CPUs of the shepherd, because memory is charged to the process that
        touches it first. Raises ``UnreachableError``, ``OSError``.
        """
        with ExitStack() as stack:

            def opened(path: str | Path, flags: int) -> int:
                fd = os.open(path, flags | os.O_CLOEXEC)
                stack.callback(os.close, fd)
                return fd

            program = opened(process.find(self._program), os.O_RDONLY)
            cgroups: list[int] = []
            cpus: Collection[int] = ()
            if joins:
                files = _cgroup_files(space.init, self._cgroup_root)
                _refuse_users_cgroups(files, self._cgroup_root)
                cgroups = [opened(file, os.O_WRONLY) for file in files if os.access(file, os.W_OK)]
                cpus = os.sched_getaffinity(space.init.pid)
                space.check()
            argv = [
                sys.executable, "-I", "-S", criu_launcher.__file__,
                str(program), str(space.pid_fd), str(space.mount_fd), str(last_pid),
                ",".join(map(str, cgroups)), ",".join(map(str, sorted(cpus))), "criu", *arguments,
            ]  # fmt: skip
            yield argv, [program, space.pid_fd, space.mount_fd, *cgroups]

    def _failure_reason(self, directory_fd: int, log: str, completed: process.Completed) -> str:
        text = log_of(Path(f"/proc/self/fd/{directory_fd}/{log}"))
        reason = failure(text)
        if text or not completed.stderr.strip():
            return reason
        return last_line(completed.stderr)


def _refuse_users_cgroups(files: Iterable[Path], root: Path) -> None:
    """Raise ``RestoreFailed`` if users may change one of these cgroups, or one above it.

    They could move CRIU from the cgroup of the tree that it holds and kill it, and the tree would run unchecked.
    """
    for file in files:
        for place in (file, *file.parents):
            if place == root:
                break
            facts = place.stat()
            if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & 0o022:
                raise RestoreFailed(f"users other than root may change a cgroup of its shepherd: {place}")


def cgroup_files(pid: int, root: Path = _CGROUPS, *, proc: Path = pidfd.PROC, also_own: bool = False) -> list[Path]:
    """Return the ``cgroup.procs`` files of a process's cgroups.

    Cgroups that this process is in as well are left out unless ``also_own`` is set.
    """
    try:
        with Process(pid, proc=proc) as process:
            return _cgroup_files(process, root, proc=proc, also_own=also_own)
    except OSError:
        return []


def _cgroup_files(
    process: Process, root: Path = _CGROUPS, *, proc: Path = pidfd.PROC, also_own: bool = False
) -> list[Path]:
    try:
        job_lines = os.fsdecode(process.read("cgroup")).split("\n")
        own_lines = set(kernel_text.lines(proc / "self" / "cgroup"))
    except OSError:
        return []
    paths = []
    for line in job_lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (line in own_lines and not also_own) or ".." in path.split("/") or not path.startswith("/"):
            continue
        base = root / controllers.removeprefix("name=") if controllers else root
        if not controllers and (root / "unified").is_dir():
            base = root / "unified"
        file = base / path.lstrip("/") / "cgroup.procs"
        with contextlib.suppress(OSError, ValueError):  # invalid or too long a name
            if file.exists():
                paths.append(file)
    return paths


def _record(directory_fd: int, space: Namespace, tree: Collection[Id]) -> None:
    """Record what a restore needs and CRIU does not write. Raises ``BadImage``, ``OSError``."""
    inet_sockets.record(directory_fd, inet_sockets.addresses())
    cpu_affinity.record(directory_fd, space)
    open_files.record(directory_fd, tree)


def _adjust(directory_fd: int, space: Namespace, inventory: Inventory, stopped: Collection[int]) -> None:
    """Change what a dump says of processes that are stopped for it. Raises ``BadImage``, ``OSError``."""
    sessions.resume(directory_fd, inventory.with_memory, but=stopped)
    sessions.rearm(directory_fd)
    sessions.keep_wiped(directory_fd, space)


def _failed(directory_fd: int, why: str) -> DumpFailed:
    """Return the error of a dump. If the directory is full, CRIU's log is truncated and may not mention it."""
    if root_directory.is_full(directory_fd) or any(os.strerror(number) in why for number in root_directory.FULL):
        return DumpNoRoom(f"the image store ran full, or read-only, during the dump ({why})")
    return DumpFailed(why)


def _failed_for(why: str, pages: Pages, left_s: float) -> CheckpointError:
    """Return the error of a restore at which CRIU failed. A damaged image takes precedence over CRIU's error."""
    try:
        pages.sound(left_s)
    except ImageDamaged as error:
        return error
    except CheckpointError:  # verification timed out
        pass
    kind = RestoreFailed if prediction(why) is not None else RestoreInterrupted
    return kind(f"CRIU could not restore it: {why}")


def _last_pid(numbers: Collection[int]) -> int:
    """Return the value for ``ns_last_pid`` that lets CRIU and its helpers use only PIDs that the job does not need."""
    return _free_pid(numbers, int(Path("/proc/sys/kernel/pid_max").read_text(encoding="ascii")))


def _free_pid(numbers: Collection[int], limit: int) -> int:
    """Return a PID after which none of ``numbers`` follows soon. ``limit``: the highest PID plus 1.

    Raises ``RestoreFailed`` if there is none.
    """
    base = max(*numbers, _HELPERS + 2 * len(numbers)) + _PID_GAP
    if base + _PID_GAP <= limit:
        return base
    # The job's PIDs have reached the limit. CRIU's helpers take the lowest free ones, hence the middle of a gap.
    bounds = sorted({_HELPERS, limit, *numbers})
    begin, room = max(((a, b - a) for a, b in pairwise(bounds)), key=lambda gap: gap[1])
    if room < 2 * (_PID_GAP + len(numbers)):
        raise RestoreFailed("the image leaves no PIDs for CRIU")
    return begin + room // 2


def _adapt_sockets(image: PrivateImage) -> tuple[str, ...]:
    """Change the network sockets of an image to those that it has here; return CRIU's options for connections."""
    try:
        connections = inet_sockets.restored(image)
        moved = inet_sockets.move(image, inet_sockets.addresses())
        inet_sockets.refuse_shared(inet_sockets.ports(image.read(FILES)))
    except BadImage as error:
        raise RestoreFailed(f"the image is not complete: {error}") from None
    for old, new in moved.items():
        LOG.info("sockets at %s are restored at %s", old, new)
    return connections


def _refuse_shared_ports(image: PrivateImage, space: Namespace) -> None:
    """Raise ``RestoreFailed`` if another process has taken a port of the restored tree meanwhile."""
    ports = inet_sockets.ports(image.read(FILES))
    if ports:
        tree_sockets: set[str] = set()
        for _, member in space.processes():
            tree_sockets |= inet_sockets.sockets_of(member)
        inet_sockets.refuse_shared(ports, tree_sockets)


def _refuse_excess(space: Namespace, directory_fd: int, inventory: Inventory) -> None:
    """Raise ``RestoreFailed`` if a thread of the image has more rights than Slurm gave to this attempt."""
    permitted = restore_gate.of_process(space.init)
    try:
        more = restore_gate.excess_in_image(directory_fd, inventory.threads, permitted)
    except BadImage as error:
        raise RestoreFailed(f"the image is not complete: {error}") from None
    if more is not None:
        raise RestoreFailed(more)


def _check_tree(space: Namespace, pids: Collection[int], passed: Inheritance) -> None:
    """Check a restored tree before it runs.

    Raises ``RestoreFailed`` if it has more rights than the attempt, or a file that was not passed to it. ``pids``: PIDs
    of the tree in the job's namespace.
    """
    files = OpenFiles(passed.user, passed.rights, [descriptor.fd for descriptor in passed.streams], passed.watched)
    allowed = restore_gate.of_process(space.init)
    try:
        for inner, member in space.processes():
            if inner not in pids or member.stat().state in "ZX":
                continue
            for thread in member.names("task"):
                more = restore_gate.excess(restore_gate.of_process(member, int(thread)), allowed)
                if more is not None:
                    raise RestoreFailed(f"process {inner} would have {more}")
            strange = files.strange(member)
            if strange is not None:
                raise RestoreFailed(f"{strange} is open in the restored tree, and is not the file that it was")
    except OSError as error:
        raise restore_failure("the open files of the restored tree cannot be examined", error) from None
