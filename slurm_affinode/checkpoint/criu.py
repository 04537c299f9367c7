"""Dump and restore with CRIU, as root, from outside of the job's namespaces.

CRIU runs inside them, because the PIDs of the tree are plain there: ``launcher.py`` enters them by descriptors that are
held since the shepherd has said hello, and executes CRIU by a descriptor. It gets nothing that a user chose: a fixed
environment, no configuration file, no plugin, image and work directories as inherited descriptors
(``/proc/self/fd/N``), so no path is looked up where a job could have put something.

What CRIU says at its end is not trusted: the files of a dump are looked at, and a restored tree is looked for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from slurm_affinode import kerneltext, pinned, process
from slurm_affinode.checkpoint import (
    credentials,
    inheritance,
    launcher,
    localfiles,
    memorymap,
    remaps,
    rootdir,
    sessions,
)
from slurm_affinode.checkpoint.asuser import User
from slurm_affinode.checkpoint.criu_images import BadImage, Inventory, failure, inspect, log_of
from slurm_affinode.checkpoint.filling import CannotFill, Filler, beside
from slurm_affinode.checkpoint.gate import Gate, work_directory
from slurm_affinode.checkpoint.inheritance import Inheritance
from slurm_affinode.checkpoint.interface import (
    CheckpointError,
    DumpFailed,
    DumpNoRoom,
    DumpResult,
    ImageDamaged,
    InheritFd,
    Pages,
    RestoreFailed,
    Tree,
)
from slurm_affinode.checkpoint.memorymap import Memory
from slurm_affinode.checkpoint.openfiles import OpenFiles
from slurm_affinode.checkpoint.private_image import PrivateImage, private_image
from slurm_affinode.errors import UnreachableError
from slurm_affinode.pinned import Id, Namespace, Process

OLDEST = (4, 1)
"""Older ones fail on newer kernels, or lack ``--tcp-close`` of dumps."""
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "HOME": "/"}
_CHECK_S = 30.0
_GRACE_S = 10.0
"""A tree that is held when the time is over is ended before CRIU is: without CRIU it would run."""
_GHOST_LIMIT = "64G"
_VERSION = re.compile(r"^Version: (\d+)\.(\d+)(\S*)", re.MULTILINE)
_PID_GAP = 64
_HELPERS = 300
"""CRIU takes the numbers of helpers that restore sessions from here on (``get_free_pid`` in ``criu/pstree.c``)."""
_CGROUPS = Path("/sys/fs/cgroup")

_COMMON = (
    "--no-default-config",
    "--manage-cgroups=ignore",  # the restored tree belongs where Slurm's new step is
    "--shell-job",
    "--tcp-close",
    "--skip-in-flight",
    "--ext-unix-sk",
    "--file-locks",
)

_ABOUT_MEMORY = re.compile("lazy|uffd|userfault")
"""In what CRIU says where it cannot leave memory to somebody else."""

LOG = logging.getLogger("slurm_affinode.agent")
Runner = Callable[..., process.Completed]


@dataclass(frozen=True, slots=True)
class _Target:
    """Of one restore."""

    space: Namespace
    image: PrivateImage
    passed: Inheritance
    root_pid_ns: int
    inventory: Inventory
    deadline: float

    def left_s(self) -> float:
        """Seconds until it is given up."""
        return self.deadline - time.monotonic()


class Criu:
    """``Imager`` with the program ``criu``."""

    def __init__(
        self,
        *,
        program: str = "criu",
        runner: Runner = process.run,
        cgroup_root: Path = _CGROUPS,
        verbosity: int = 2,
        hold: Callable[[Id], Namespace] = pinned.namespace,
    ) -> None:
        """``verbosity``: as of ``criu -vN``; 2 is errors and warnings, 4 is for bug reports. ``hold``: gives the
        namespaces of a shepherd.
        """
        self._hold = hold
        self._program = program
        self._run = runner
        self._cgroup_root = cgroup_root
        self._verbosity = verbosity
        self._version: str | None = None
        self._lazy: bool | None = None

    def check(self) -> str:
        """Version of CRIU. Raises ``CheckpointError`` where it is missing or too old."""
        if self._version is None:
            try:
                argv = [process.find(self._program), "--version"]
                said = self._run(argv, timeout_s=_CHECK_S, env=_ENVIRONMENT, check=False)
            except UnreachableError as error:
                raise CheckpointError(f"CRIU cannot be run: {error}", hint="install criu 4.1 or newer") from None
            match = _VERSION.search(said.stdout.decode("utf-8", "replace"))
            if match is None:
                raise CheckpointError(f"{self._program} --version says no version", hint="install criu 4.1 or newer")
            if (int(match[1]), int(match[2])) < OLDEST:
                wanted = ".".join(map(str, OLDEST))
                raise CheckpointError(
                    f"criu {match[1]}.{match[2]} is too old: {wanted} is needed", hint=f"install criu {wanted} or newer"
                )
            self._version = f"{match[1]}.{match[2]}{match[3]}"
        return self._version

    def dump(self, tree: Tree, directory_fd: int, *, timeout_s: float) -> DumpResult:
        """Write the tree to the directory and leave it stopped. Raises ``DumpFailed``: the tree goes on as it was;
        ``DumpNoRoom`` where the directory's file system ran full.

        ``timeout_s`` is for stopping the tree *and* for all of it: past it CRIU is killed, which may harm the tree.
        """
        version = self.check()
        space = self._space(tree.init, DumpFailed)
        arguments = [
            "dump", f"--tree={tree.root_pid_ns}",
            "--images-dir=/proc/self/fd/" + str(directory_fd), "--libdir=/proc/self/fd/" + str(directory_fd),
            "--log-file=dump.log", f"-v{self._verbosity}",
            "--leave-stopped", f"--timeout={max(1, int(timeout_s))}", f"--ghost-limit={_GHOST_LIMIT}", *_COMMON,
        ]  # fmt: skip
        processes = [Id(one.pid, one.started) for one in space.numbers()]
        owner = localfiles.owner_of(processes)
        if owner is not None:
            remaps.give_names(processes, owner)
        try:
            with self._launched(space, arguments) as (argv, fds):
                done = self._run(
                    argv, timeout_s=timeout_s, env=_ENVIRONMENT, check=False, pass_fds=(directory_fd, *fds), group=True
                )
        except (UnreachableError, OSError) as error:
            raise DumpFailed(f"the dump was given up: {error}") from None
        if done.returncode != 0:
            raise _failed(directory_fd, f"CRIU could not dump it: {self._why(directory_fd, 'dump.log', done)}")
        try:
            sessions.settle(directory_fd)
            inventory = inspect(directory_fd)
            refusal = inheritance.refusal(directory_fd)
        except BadImage as error:
            raise _failed(directory_fd, f"CRIU said it was done, but the image is not complete: {error}") from None
        if inventory.pids[0] != tree.root_pid_ns:
            raise DumpFailed(f"the image holds process {inventory.pids[0]} in place of {tree.root_pid_ns}")
        if refusal is not None:
            raise DumpFailed(f"it could not be restored: {refusal}")
        numbers = space.numbers()
        missing = {one.inner for one in numbers} - set(inventory.pids)
        if missing:
            raise DumpFailed(f"processes are missing in the image: {', '.join(map(str, sorted(missing)))}")
        kept = localfiles.save([Id(one.pid, one.started) for one in numbers], directory_fd)
        return DumpResult(inventory.size + kept, inventory.pids, inventory.frozen_s, version)

    def _space(self, init: Id, kind: type[CheckpointError]) -> Namespace:
        """The namespaces of a shepherd. Raises ``kind``."""
        try:
            space = self._hold(init)
            space.check()
        except (OSError, ValueError) as error:
            raise kind(f"the namespaces of the job are not there: {error}") from None
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
        shared: bool = False,
        ready: Callable[[], None] = lambda: None,
    ) -> int:
        """Put the tree below PID 1 of the namespace; its root's PID there. Raises ``RestoreFailed``, and what ``pages``
        raise: nothing is left.

        ``directory_fd`` is only read; ``timeout_s`` is for all of it; ``ready`` is called when ``pages`` are sound.
        ``user``, ``shared``: see ``interface.Imager``.
        The tree runs when this returns; its CUDA processes wait in their calls until they are restored and unlocked.
        """
        self.check()
        deadline = time.monotonic() + timeout_s
        with ExitStack() as stack:
            try:
                image = stack.enter_context(private_image(directory_fd, pages, shared=shared))
                inventory = inspect(image.fd, image.pages)
                memories = memorymap.fillable(image.fd, inventory) if self._leaves_memory() else ()
            except BadImage as error:
                raise RestoreFailed(f"the image is not complete: {error}") from None
            space = self._space(init, RestoreFailed)
            _refuse_excess(space, image.fd, inventory)
            if space.members():
                raise RestoreFailed("the job's PID namespace is not empty")
            stack.callback(remaps.settle, init, image.fd)
            localfiles.put_back(init, image.fd, image.open)
            passed = stack.enter_context(
                Inheritance(image, space.root_fd, space.mount_fd, user, inherit, timeout_s=timeout_s)
            )
            self._restore(_Target(space, image, passed, root_pid_ns, inventory, deadline), memories, pages, ready)
            passed.finish()
        return root_pid_ns

    def _restore(self, target: _Target, memories: Sequence[Memory], pages: Pages, ready: Callable[[], None]) -> None:
        try:
            try:
                self._place(target, memories, pages, ready)
            except CannotFill as error:
                if target.left_s() <= 0:
                    raise
                LOG.warning("CRIU fills the memory of this restore: %s", error)
                self._place(target, (), pages, ready)
        except (UnreachableError, OSError) as error:
            target.space.kill_all()
            raise RestoreFailed(f"the restore was given up: {error}") from None
        except CheckpointError:
            target.space.kill_all()
            raise

    def _leaves_memory(self) -> bool:
        """Whether CRIU and the kernel can leave memory to be filled by somebody else."""
        if self._lazy is None:
            said = self._run(
                [process.find(self._program), "check", "--feature", "uffd-noncoop"],
                timeout_s=_CHECK_S, env=_ENVIRONMENT, check=False,
            )  # fmt: skip
            self._lazy = said.returncode == 0
        return self._lazy

    def _place(self, target: _Target, memories: Sequence[Memory], pages: Pages, ready: Callable[[], None]) -> None:
        """Restore the tree, ``memories`` filled here and everything else by CRIU."""
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

            def look() -> None:
                with self._or_none(space):
                    _look(space, target.inventory.pids, target.passed)
                    ready()

            pages.begin(image.compare(None if filler is None else filler.take))
            arguments = [
                "restore",
                f"--images-dir=/proc/self/fd/{image.fd}", f"--work-dir=/proc/self/fd/{work_fd}",
                f"--libdir=/proc/self/fd/{work_fd}", "--log-file=restore.log", f"-v{self._verbosity}",
                "--restore-detached", "--pidfile=pid", Gate.OPTION, *_COMMON,
                *([Filler.OPTION] if filler is not None else []),
                *(word for one in inherit for word in ("--inherit-fd", f"fd[{one.fd}]:{one.key}")),
            ]  # fmt: skip
            launched = self._launched(space, arguments, last_pid=_last_pid(target.inventory.numbers), joins=True)
            with launched as (argv, fds), Gate(work, restored=verify, resuming=look) as gate:
                failed = True
                try:
                    done = self._run(
                        argv, timeout_s=target.left_s() + _GRACE_S, env=_ENVIRONMENT, check=False, group=True,
                        pass_fds=(image.fd, work_fd, *fds, *(one.fd for one in inherit)),
                    )  # fmt: skip
                    failed = done.returncode != 0
                finally:
                    if failed:  # nobody holds what is there of the tree, and the look may take its time
                        space.kill_all()
            if failed:
                why = self._why(work_fd, "restore.log", done)
                stack.close()  # else nobody gets to the end of the pages
                if filler is not None and (filler.error is not None or _ABOUT_MEMORY.search(why)):
                    raise filler.error or CannotFill(why)
                raise _failed_for(why, pages, target.left_s())
            gate.check_asked()
            self._arrived(space, target.root_pid_ns, log_of(work / "pid"), target.deadline)

    @staticmethod
    @contextmanager
    def _or_none(space: Namespace) -> Iterator[None]:
        """Where something is against the tree, or its shepherd has ended, nothing of the tree is left."""
        try:
            space.check()
            yield
            space.check()
        except BaseException:
            space.kill_all()
            raise

    @staticmethod
    def _arrived(space: Namespace, root_pid_ns: int, said: str, deadline: float) -> None:
        """The root is there, below PID 1. Other processes, and it too, may end at once when they run again."""
        if said.strip() != str(root_pid_ns):
            raise RestoreFailed(f"CRIU restored {said.strip() or 'nothing'} in place of process {root_pid_ns}")
        while any(inner == root_pid_ns and one.stat().parent != space.init.pid for inner, one in space.processes()):
            if time.monotonic() > deadline:
                raise RestoreFailed("the restored tree is not below the job's PID 1")
            time.sleep(0.002)
        space.check()

    @contextmanager
    def _launched(
        self, space: Namespace, arguments: Sequence[str], *, last_pid: int = 0, joins: bool = False
    ) -> Iterator[tuple[list[str], list[int]]]:
        """The command that runs CRIU inside the namespaces, and the descriptors that it needs.

        ``joins``: in the cgroups and on the CPUs of the shepherd, since memory is charged to whoever touches it first.
        Raises ``UnreachableError``, ``OSError``.
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
                cgroups = [opened(file, os.O_WRONLY) for file in files if os.access(file, os.W_OK)]
                cpus = os.sched_getaffinity(space.init.pid)
                space.check()
            argv = [
                sys.executable, "-I", "-S", launcher.__file__,
                str(program), str(space.pid_fd), str(space.mount_fd), str(last_pid),
                ",".join(map(str, cgroups)), ",".join(map(str, sorted(cpus))), "criu", *arguments,
            ]  # fmt: skip
            yield argv, [program, space.pid_fd, space.mount_fd, *cgroups]

    def _why(self, directory_fd: int, log: str, done: process.Completed) -> str:
        text = log_of(Path(f"/proc/self/fd/{directory_fd}/{log}"))
        said = failure(text)
        if text or not done.stderr.strip():
            return said
        return done.stderr.strip().splitlines()[-1]


def cgroup_files(pid: int, root: Path = _CGROUPS, *, proc: Path = pinned.PROC, also_ours: bool = False) -> list[Path]:
    """``cgroup.procs`` of the cgroups of ``pid``; without ``also_ours`` of those that this process is not in."""
    try:
        with Process(pid, proc=proc) as held:
            return _cgroup_files(held, root, proc=proc, also_ours=also_ours)
    except OSError:
        return []


def _cgroup_files(
    held: Process, root: Path = _CGROUPS, *, proc: Path = pinned.PROC, also_ours: bool = False
) -> list[Path]:
    try:
        theirs = os.fsdecode(held.read("cgroup")).split("\n")
        ours = set(kerneltext.lines(proc / "self" / "cgroup"))
    except OSError:
        return []
    found = []
    for line in theirs:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (line in ours and not also_ours) or ".." in path.split("/") or not path.startswith("/"):
            continue
        base = root / controllers.removeprefix("name=") if controllers else root
        if not controllers and (root / "unified").is_dir():
            base = root / "unified"
        file = base / path.lstrip("/") / "cgroup.procs"
        with contextlib.suppress(OSError, ValueError):  # a name that is too long, or none
            if file.exists():
                found.append(file)
    return found


def _failed(directory_fd: int, why: str) -> DumpFailed:
    """The error of a dump. Where its directory is full CRIU's log is cut off, too, and need not say so."""
    if rootdir.is_full(directory_fd) or any(os.strerror(number) in why for number in rootdir.FULL):
        return DumpNoRoom(f"the image store ran full, or read-only, during the dump ({why})")
    return DumpFailed(why)


def _failed_for(why: str, pages: Pages, left_s: float) -> CheckpointError:
    """The error of a restore that CRIU has given up. A damaged image is a reason before all others."""
    try:
        pages.sound(left_s)
    except ImageDamaged as error:
        return error
    except CheckpointError:  # not known in time
        pass
    return RestoreFailed(f"CRIU could not restore it: {why}")


def _last_pid(numbers: Collection[int]) -> int:
    """The number before those that CRIU and its helpers take: let them be such that are not needed."""
    limit = int(Path("/proc/sys/kernel/pid_max").read_text(encoding="ascii"))
    base = max(*numbers, _HELPERS + 2 * len(numbers)) + _PID_GAP
    if base + _PID_GAP > limit:
        taken = sorted(numbers)
        base, room = max(((a, b - a) for a, b in pairwise(taken)), key=lambda gap: gap[1])
        if room < 2 * _PID_GAP:
            raise RestoreFailed("the image leaves no PIDs for CRIU")
    return base


def _refuse_excess(space: Namespace, directory_fd: int, inventory: Inventory) -> None:
    """Raises ``RestoreFailed`` where a thread of the image has more rights than Slurm has given to this run."""
    given = credentials.of_process(space.init)
    try:
        for number in inventory.threads:
            found = credentials.of_image(directory_fd, number)
            why = None if found is None else credentials.excess(found, given)
            if why is not None:
                raise RestoreFailed(f"process {number} would have {why}")
    except BadImage as error:
        raise RestoreFailed(f"the image is not complete: {error}") from None


def _look(space: Namespace, pids: Collection[int], passed: Inheritance) -> None:
    """Look at a restored tree before it runs on. Raises ``RestoreFailed`` where it has more rights than its run, or a
    file that was not passed to it. ``pids``: those of the tree, in its namespace."""
    files = OpenFiles(passed.user, passed.rights, [one.fd for one in passed.given], passed.watched)
    allowed = credentials.of_process(space.init)
    try:
        for inner, one in space.processes():
            if inner not in pids or one.stat().state in "ZX":
                continue
            for thread in one.names("task"):
                more = credentials.excess(credentials.of_process(one, int(thread)), allowed)
                if more is not None:
                    raise RestoreFailed(f"process {inner} would have {more}")
            found = files.strange(one)
            if found is not None:
                raise RestoreFailed(f"{found} is open in the restored tree, and is not the file that it was")
    except OSError as error:
        raise RestoreFailed(f"what the restored tree has open cannot be looked at: {error}") from None
