"""Changes to a dump so that CRIU restores every process in its place, running if it ran, with its timers.

A daemon that has forked twice is in a session without a leader, and a child of the script, which is a subreaper
(``PR_SET_CHILD_SUBREAPER``). CRIU restores such a session with a helper that leads it, is the daemon's parent and ends
(``prepare_pstree_ids`` in ``criu/pstree.c``), but makes the script a subreaper again only at its end
(``criu/pie/restorer.c``): by then the daemon is a child of PID 1, outside the tree that the next dump covers. So such
sessions are dissolved, and their processes are restored in the script's session. Their process groups stay, and no
other session can get the old session's number meanwhile; the only visible change is the result of ``getsid()``.

If another process of the job leads the session (a shell below ``setsid`` or in a terminal multiplexer), its terminal
and its process groups are in use, and the session stays. The daemon is then restored as a child of that leader instead
of the script: CRIU needs no helper for that, and every process stays below the script.

A job is stopped before it is dumped, and CRIU restores a process as it finds it. So the processes that the agent has
stopped are marked as running: ``task_core_entry.task_state`` in ``core-PID.img`` (``images/core.proto``, CRIU 4.1).

Their parents have received SIGCHLD with the news that a child stopped. Where such a signal is pending, it says in the
image that the child continued: script(1) stops, too, when it reads that its child has stopped.

The kernel rearms a periodic timerfd when the expiration is read (``timerfd_read_iter`` in ``fs/timerfd.c``). Until
then ``/proc/PID/fdinfo`` shows no time left, and CRIU 4.1 sets the timer to that (``criu/timerfd.c``): to 0, which
disarms it. A job is stopped for seconds before its dump, so most periodic timers have expired by then.

A terminal keeps the number of its foreground process group when the group has ended, until the shell takes the terminal
back. CRIU would fail to set that group (``tty_set_prgp`` in ``criu/tty.c``), so the image has the shell's instead.

Memory with ``MADV_WIPEONFORK`` is empty in a child process. The C library (glibc 2.41 on Linux 6.11) and libraries for
cryptography keep the state of their random numbers there: without the property, a process and the child that it forks
after a restore would draw the same numbers. CRIU ignores it (``parse_vmflags`` in ``criu/proc_parse.c``), but gives any
advice in the image of a mapping to the kernel (``criu/pie/restorer.c``), of which this is one.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from slurm_affinode.base.pidfd import Namespace, Process
from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.files.file_table import FILES
from slurm_affinode.checkpoint.image.criu_images import (
    BadImage,
    bodies,
    encoded,
    framed,
    integer,
    message,
    read_image,
    rewrite,
    spans,
    with_field,
)
from slurm_affinode.checkpoint.interface import DumpFailed

_TREE = "pstree.img"
_MAGICS = 8  # bytes
_PID, _PARENT, _GROUP, _SESSION = 1, 2, 3, 4  # fields of pstree_entry in images/pstree.proto
_TERMINALS = "tty-info.img"
_OF_SESSION, _FOREGROUND = 6, 7  # fields of tty_info_entry in images/tty.proto
_TASK, _STATE, _PENDING = 3, 1, 10  # fields of core_entry and task_core_entry in images/core.proto
_SIGNALS, _INFO = 1, 1  # fields of signal_queue_entry and siginfo_entry in images/siginfo.proto
_SIGINFO = struct.Struct("=iii4xiIi")
"""Number, error, code, PID, UID, status: how ``siginfo_t`` of SIGCHLD begins on 64-bit machines (sigaction(2))."""
_CLD_STOPPED, _CLD_CONTINUED = 5, 6  # asm-generic/siginfo.h
_TIMERFD = 12  # field of file_entry in images/fdinfo.proto
_TICKS, _LEFT_S, _LEFT_NS, _INTERVAL_S, _INTERVAL_NS = 5, 7, 8, 9, 10  # fields of timerfd_entry in images/timerfd.proto
_AREAS, _START, _END, _ADVICE = 14, 1, 2, 9  # fields of mm_entry (images/mm.proto) and vma_entry (images/vma.proto)
_WIPE_ON_FORK = 1 << 18  # asm-generic/mman-common.h
_MAPPING = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) ")
_ALIVE, _STOPPED = 1, 3  # criu/include/pstree.h
Range = tuple[int, int]
"""First address of a mapping, and the one after its last."""
NOT_LED = "which is not led by a process above it: it could not be restored"


@dataclass(frozen=True, slots=True)
class SessionProcess:
    """One entry of the tree, parents before children."""

    pid: int
    parent: int
    session: int
    zombie: bool = False
    group: int = 0


def settle(directory_fd: int) -> None:
    """Change a dump as described above. Raises ``BadImage``, and ``DumpFailed`` if CRIU could not restore it.

    The file is rewritten before digests are computed. A tree whose root leads no session is not changed.
    """
    data = read_image(directory_fd, _TREE)
    bodies = list(_bodies(data))
    names = frozenset(root_directory.names(directory_fd))
    tree = [_process(body, names) for body in bodies]
    _check(tree)
    if not _leads(tree):
        return
    lost = stray(tree)
    if lost is not None:
        raise DumpFailed(f"process {lost.pid} is in session {lost.session}, {NOT_LED}")
    after = _settled(tree)
    if after != tree:
        before = {process.pid: body for process, body in zip(tree, bodies, strict=True)}
        bodies_of_tasks = (
            with_field(with_field(before[process.pid], _PARENT, process.parent), _SESSION, process.session)
            for process in after
        )
        packed = b"".join(len(body).to_bytes(4, "little") + body for body in bodies_of_tasks)
        root_directory.write(directory_fd, _TREE + ".new", data[:_MAGICS] + packed)
        os.rename(_TREE + ".new", _TREE, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)


def stray(tree: Sequence[SessionProcess]) -> SessionProcess | None:
    """Return a process that could not be restored into its session; ``None``: there is none. Parents come first."""
    return misplaced(_settled(tree)) if _leads(tree) else None


def _leads(tree: Sequence[SessionProcess]) -> bool:
    return bool(tree) and tree[0].session == tree[0].pid


def _settled(tree: Sequence[SessionProcess]) -> list[SessionProcess]:
    """Return the tree as it is restored."""
    lost = unled(tree)
    return adopted([replace(process, session=tree[0].pid) if process.session in lost else process for process in tree])


def resume(directory_fd: int, pids: Iterable[int], *, but: Collection[int]) -> None:
    """Mark the stopped processes of a dump as running, except ``but``. Raises ``BadImage``, ``OSError``.

    ``pids``, ``but``: PIDs in the job's namespace. The files are rewritten before digests are computed.
    """
    for pid in pids:
        _resume(directory_fd, f"core-{pid}.img", runs=pid not in but, stopped=but)


def rearm(directory_fd: int) -> None:
    """Let the expired periodic timers of a dump expire at once when they are restored.

    Raises ``BadImage``, ``OSError``. The file is rewritten before digests are computed. Expirations that were not read
    are still counted.
    """
    rewrite(directory_fd, FILES, _rearmed)


def keep_wiped(directory_fd: int, space: Namespace) -> None:
    """Keep the memory of a stopped tree empty in children, in its dump. Raises ``BadImage``, ``OSError``.

    The files are rewritten before digests are computed.
    """
    for inner, process in space.processes():
        if ranges := wiped(process):
            name = f"mm-{inner}.img"
            missing = set(ranges)
            rewrite(directory_fd, name, partial(_with_advice, ranges=ranges, missing=missing))
            if missing:
                begin, end = min(missing)
                raise BadImage(f"{name}: the mapping {begin:x}-{end:x} is missing")


def wiped(process: Process) -> frozenset[Range]:
    """Return the mappings of a process that are empty in its children; none if it has ended."""
    ranges, mapping = set(), None
    with contextlib.suppress(OSError):
        for line in process.lines("smaps"):
            if head := _MAPPING.match(line):
                mapping = int(head[1], 16), int(head[2], 16)
            elif mapping is not None and line.startswith(b"VmFlags:") and b"wf" in line.split():
                ranges.add(mapping)
    return frozenset(ranges)


def _with_advice(body: bytes, ranges: Collection[Range], missing: set[Range]) -> bytes:
    """Return the memory of a process in which ``ranges`` have the property; those that it has leave ``missing``."""
    return b"".join(
        encoded(_AREAS, _advised(value, ranges, missing))
        if number == _AREAS and isinstance(value, bytes)
        else body[begin:end]
        for number, value, begin, end in spans(body)
    )


def _advised(area: bytes, ranges: Collection[Range], missing: set[Range]) -> bytes:
    fields = message(area)
    mapping = integer(fields, _START), integer(fields, _END)
    if mapping not in ranges:
        return area
    missing.discard(mapping)
    advice = encoded(_ADVICE, integer(fields, _ADVICE, 0) | _WIPE_ON_FORK)
    return b"".join(area[begin:end] for number, _, begin, end in spans(area) if number != _ADVICE) + advice


def take_back(directory_fd: int) -> None:
    """Make the leader of a session the foreground of its terminal if the foreground process group has ended.

    Raises ``BadImage``, ``OSError``. The file is rewritten before digests are computed.
    """
    names = frozenset(root_directory.names(directory_fd))
    if _TERMINALS not in names:
        return
    living = [
        process for body in _bodies(read_image(directory_fd, _TREE)) if not (process := _process(body, names)).zombie
    ]
    groups = {(process.session, process.group) for process in living}

    def with_foreground(terminal: bytes) -> bytes:
        fields = message(terminal)
        session, group = integer(fields, _OF_SESSION), integer(fields, _FOREGROUND)
        led = session > 0 and (session, session) in groups  # a leader is in the group of its PID
        return with_field(terminal, _FOREGROUND, session) if led and (session, group) not in groups else terminal

    rewrite(directory_fd, _TERMINALS, with_foreground)


def _resume(directory_fd: int, name: str, *, runs: bool, stopped: Collection[int]) -> None:
    data = read_image(directory_fd, name)
    body, *further_bodies = bodies(data)
    task = message(body).get(_TASK, [])
    if further_bodies or len(task) != 1 or not isinstance(task[0], bytes):
        raise BadImage(f"{name}: a process is described twice, or not at all")
    after = task[0]
    if runs and integer(message(after), _STATE) == _STOPPED:
        after = with_field(after, _STATE, _ALIVE)
    pending = _part(after, _PENDING)
    if pending is not None:
        after = with_field(after, _PENDING, _without_stops(pending, stopped))
    if after == task[0]:
        return
    running = with_field(body, _TASK, after)
    fd = os.open(name, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
    with os.fdopen(fd, "wb") as file:
        file.write(data[:_MAGICS] + framed(running))


def _without_stops(pending: bytes, stopped: Collection[int]) -> bytes:
    """Return a queue of signals in which children that had stopped, except ``stopped``, have continued."""
    entries = message(pending).get(_SIGNALS, [])
    task_entries = []
    for entry in entries:
        if not isinstance(entry, bytes) or (info := _part(entry, _INFO)) is None or len(info) < _SIGINFO.size:
            raise BadImage("a pending signal is incomplete")
        number, error, code, child, user, _ = _SIGINFO.unpack_from(info)
        if (number, code) == (signal.SIGCHLD, _CLD_STOPPED) and child not in stopped:
            head = _SIGINFO.pack(number, error, _CLD_CONTINUED, child, user, signal.SIGCONT)
            info = head + info[_SIGINFO.size :]
        task_entries.append(encoded(_SIGNALS, with_field(entry, _INFO, info)))
    return b"".join(task_entries)


def _rearmed(entry: bytes) -> bytes:
    timer = _part(entry, _TIMERFD)
    if timer is None:
        return entry
    fields = message(timer)
    remaining = integer(fields, _LEFT_S) or integer(fields, _LEFT_NS)
    interval = integer(fields, _INTERVAL_S) or integer(fields, _INTERVAL_NS)
    if remaining or not interval or not integer(fields, _TICKS):
        return entry  # it expires in the future, once, or was disarmed
    return with_field(entry, _TIMERFD, with_field(timer, _LEFT_NS, 1))


def _part(body: bytes, field: int) -> bytes | None:
    """Return the message in a field; ``None`` if it has none. Raises ``BadImage``."""
    parts = message(body).get(field, [])
    if len(parts) > 1 or not all(isinstance(part, bytes) for part in parts):
        raise BadImage(f"field {field} is there twice, or is no message")
    return next((part for part in parts if isinstance(part, bytes)), None)


def _check(tree: Sequence[SessionProcess]) -> None:
    """Check that parents precede children, so that walking the tree terminates. Raises ``BadImage``."""
    tree_pids: set[int] = set()
    for process in tree:
        if process.pid in tree_pids or process.parent not in (tree_pids or (0,)):
            raise BadImage(f"{_TREE}: process {process.pid} is there twice, or has no parent")
        tree_pids.add(process.pid)


def unled(tree: Sequence[SessionProcess]) -> frozenset[int]:
    """Return the sessions without a leader."""
    led = {process.pid for process in tree if process.session == process.pid and not process.zombie}
    return frozenset(process.session for process in tree) - led


def adopted(tree: Sequence[SessionProcess]) -> list[SessionProcess]:
    """Make children of the root in another process's session children of its leader. Parents come first.

    This includes zombies: CRIU would wait forever for one forked by a helper. A process above the leader is not moved,
    since otherwise two processes could be put below each other and be lost.
    """
    by_pid, root = {process.pid: process for process in tree}, tree[0].pid
    orphans = []
    for process in tree:
        leader = by_pid.get(process.session)
        strange = process.parent == root and leader is not None and leader.pid not in (root, process.pid)
        if (
            strange
            and leader is not None
            and leader.session == leader.pid
            and process.pid not in _above(leader, by_pid)
        ):
            process = by_pid[process.pid] = replace(process, parent=leader.pid)  # noqa: PLW2901 - the same process
        orphans.append(process)
    return orphans if orphans == list(tree) else _parents_first(orphans)


def _above(process: SessionProcess, by_pid: Mapping[int, SessionProcess]) -> set[int]:
    ancestors: set[int] = set()
    while process.parent in by_pid and process.parent not in ancestors:
        ancestors.add(process.parent)
        process = by_pid[process.parent]
    return ancestors


def _parents_first(tree: Sequence[SessionProcess]) -> list[SessionProcess]:
    children: dict[int, list[SessionProcess]] = {}
    for process in tree[1:]:
        children.setdefault(process.parent, []).append(process)
    ordered, todo = [], [tree[0]]
    while todo:
        ordered.append(todo.pop())
        todo.extend(reversed(children.get(ordered[-1].pid, ())))
    return ordered


def misplaced(tree: Sequence[SessionProcess]) -> SessionProcess | None:
    """Return a process that CRIU cannot put into its session, by the rules of ``prepare_pstree_ids``.

    Children of the root get a helper. Others are forked by a parent that was in that session before it began its own.
    This applies to all ancestors up to the leader, and each was born in one session only.
    """
    by_pid = {process.pid: process for process in tree}
    root = tree[0].pid
    born: dict[int, int] = {}
    for process in tree[1:]:
        if (
            process.session == process.pid
            or process.parent == root
            or by_pid[process.parent].session == process.session
        ):
            continue
        above = by_pid[process.parent]
        while above.pid != process.session:
            if above.pid == root or born.setdefault(above.pid, process.session) != process.session:
                return process
            above = by_pid[above.parent]
    return None


def _bodies(data: bytes) -> list[bytes]:
    bodies, offset = [], _MAGICS
    while offset < len(data):
        length = int.from_bytes(data[offset : offset + 4], "little")
        bodies.append(data[offset + 4 : offset + 4 + length])
        offset += 4 + length
        if offset > len(data):
            raise BadImage(f"{_TREE}: a record is cut short")
    return bodies


def _process(body: bytes, names: Collection[str]) -> SessionProcess:
    numbers = {number: value for number, value, _, _ in spans(body) if isinstance(value, int)}
    try:
        pid = numbers[_PID]
        # A zombie has a core file and no memory file.
        zombie = f"mm-{pid}.img" not in names
        return SessionProcess(pid, numbers[_PARENT], numbers[_SESSION], zombie, numbers[_GROUP])
    except KeyError as error:
        raise BadImage(f"{_TREE}: field {error} is missing") from None
