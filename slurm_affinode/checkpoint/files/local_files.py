"""Node-local files that a tree has open by name: shared memory in ``/dev/shm``, temporary files in ``/tmp``.

They are reopened by path and do not exist on another node. So a dump copies those that belong to the job's user, and a
restore creates the missing ones: as that user, below the root of the job's mount namespace, following no link out of
it. An existing file that differs is replaced if an earlier restore of the job has created it on this node
(``created_files.py``) and no process of its user has it open; it is then left over from an attempt that was killed.
Any other one is not touched, and the restore is refused. For a socket only the directories are created here
(``unix_sockets.py`` creates the socket).

A file opened under a name that is gone, with another link in the same directory, is included: ``sem_open(3)`` creates
named semaphores that way. It gets a name for the dump (``deleted_files.give_names``), which the restore removes. If the
node has another link to the file, that one is removed with the dump and recreated, since two dumps may choose the same
name.

A tensor of PyTorch's sharing strategy ``file_system`` is a file that no process has open while it is in flight to
another process. ``torch_shm_manager``, which removes such files when their users have ended, has their names in its
memory, and these files are included.

When the job has left the node, its copies there are removed (``leave``): shared memory would hold host memory, and a
job that returns with newer contents could not be restored. A file that was changed, or that another process of its user
has open, stays.

Users choose the number of their files and their file systems, so a dump has a time limit.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import re
import stat
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from slurm_affinode.base import json_values, kernel_text
from slurm_affinode.base.pidfd import PROC, ExhaustedError, Id, Process, ProcessGoneError, processes
from slurm_affinode.base.timeouts import FileSystemCalls, NoAnswerError, time_limit
from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.files import deleted_files
from slurm_affinode.checkpoint.files.created_files import CreatedFiles, FileIdentity
from slurm_affinode.checkpoint.interface import (
    CheckpointError,
    DumpFailed,
    DumpNoRoom,
    ImageDamaged,
    RestoreFailed,
    RestoreInterrupted,
    restore_failure,
)
from slurm_affinode.checkpoint.user_files import MOST_ID, User, as_user

INDEX = "local.json"
PLACES = ("/dev/shm", "/tmp", "/var/tmp")  # noqa: S108 - these are what it is about
_CHUNK = 1 << 20
LIMIT = 16 << 20
"""Of the index, in bytes."""
_ANSWER_S = 30.0
"""Timeout for the file systems of a job's files."""
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PATH_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_DELETED = " (deleted)"
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where shm_open(3) creates files
_MANAGER = "torch_shm_manager"
_HEAPS = ("", "[heap]", "[anon: glibc: malloc]")  # the last with the tunable glibc.mem.decorate_maps
_LONGEST_NAME = 64
_TENSOR = re.compile(rb"/(torch_[0-9]{1,10}_[0-9]{1,10}_[0-9]{1,20})\0")
"""PyTorch's ``NewProcessWideShmHandle``: PID, random number, counter."""
_MOST_MEMORY = 1 << 30
"""Of a manager. Observed with PyTorch 2.6: 70 MiB."""
_MOST_NAMES = 100_000
"""In the memory of a manager."""
_UNREADABLE = "the image's list of temporary files cannot be read"
_KINDS = ("file", "fifo", "directory", "link")
_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_EMPTY_PATH, _AT_STATX_DONT_SYNC, _STATX_INO = 0x1000, 0x4000, 0x100
_STATX = struct.Struct("=32xQ96xII112x")
"""``struct statx``: the inode number, and major and minor number of the device."""
Check = Callable[[], None]
"""Raises ``OSError`` when the time limit has passed."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A node-local file, or a directory above it that belongs to the user too."""

    path: str
    kind: str
    """``file``, ``fifo``, ``directory``, or ``link``: another name of a file listed earlier."""
    mode: int
    copy: str | None = None
    """Name of the copy in the checkpoint image; for a link, the path of the linked file."""
    size: int = 0


def save(
    init: Id, tree: Collection[Id], directory_fd: int, owner: User, *, places: Sequence[str] = PLACES,
    timeout_s: float = _ANSWER_S,
) -> int:  # fmt: skip
    """Copy node-local files into CRIU's directory while the tree is stopped; return the bytes copied.

    ``init``: PID 1 of the job's namespaces. ``owner``: the owner of the job, whose files are copied. Raises
    ``DumpFailed``, also when it times out, and ``DumpNoRoom``. The user may still end a process, so each process is
    held, and the file that is copied is the one that was checked.
    """
    check, target = time_limit(timeout_s, "files of the job"), os.dup(directory_fd)

    def call() -> int:
        try:
            return _save(init, tree, target, owner, places=places, check=check)
        finally:
            os.close(target)

    try:
        # A file system that does not respond delays the other jobs of the node no longer than that.
        return FileSystemCalls(None, probe_s=timeout_s + _ANSWER_S)(call)
    except NoAnswerError as error:
        raise DumpFailed(f"a temporary file of the job cannot be kept: {error.strerror}") from None


def _save(
    init: Id, tree: Collection[Id], directory_fd: int, owner: User, *, places: Sequence[str], check: Check
) -> int:  # fmt: skip
    by_path: dict[str, LocalFile] = {}
    originals: dict[str, list[int]] = {}
    total = promised = 0
    with ExitStack() as stack:
        try:
            members = _open_members(tree, stack)
            if not members:
                return 0
            first = stack.enter_context(Process(init.pid, started=init.started))
            root = first.open("root", os.O_PATH | os.O_DIRECTORY)
            stack.callback(os.close, root)
            for path in _sockets(members, places):
                check()
                by_path.update({above.path: above for above in _above(path, owner.uid, root, places)})
            for file, names in chain(
                _open_files(members, places, check), _shared_tensors(members, root, places, check)
            ):
                path, facts = names[0], os.fstat(file)
                if facts.st_uid != owner.uid or by_path.keys() >= set(names):
                    continue
                for above in _above(path, owner.uid, root, places):
                    by_path.setdefault(above.path, above)
                mode = stat.S_IMODE(facts.st_mode)
                if path in by_path:
                    pass
                elif stat.S_ISREG(facts.st_mode):
                    _check_room(directory_fd, promised + facts.st_size, path)
                    promised += _holes(facts)
                    name = f"local-{len(by_path)}"
                    by_path[path] = LocalFile(path, "file", mode, name, facts.st_size)
                    total += _copy_in(file, directory_fd, name, facts.st_size, check)
                    originals.update(dict.fromkeys(names, identity_of(facts)))
                elif stat.S_ISFIFO(facts.st_mode):
                    by_path[path] = LocalFile(path, "fifo", mode)
                elif stat.S_ISDIR(facts.st_mode):
                    by_path[path] = LocalFile(path, "directory", mode)
                for linked_name in names[1:]:
                    by_path.setdefault(linked_name, LocalFile(linked_name, "link", mode, path))
            if by_path:
                files = [asdict(file) for file in by_path.values()]
                index = {"uid": owner.uid, "gid": owner.gid, "files": files, "originals": originals}
                check()
                root_directory.write(directory_fd, INDEX, _encoded(index))
                links = [file.path for file in by_path.values() if file.kind == "link"]
                _remove_remaps(links, root, owner)
            check()
            deleted_files.set_aside(init, [member.id for member in members], directory_fd, owner, but=places)
        except OSError as error:
            kind = DumpNoRoom if error.errno in root_directory.FULL else DumpFailed
            raise kind(f"a temporary file of the job cannot be kept: {error.strerror}: {error.filename}") from None
    return total


def _encoded(index: Mapping[str, object]) -> bytes:
    """Return the contents of the index. Raises ``OSError`` if no restore would read it."""
    data = json.dumps(index).encode()
    if len(data) > LIMIT:
        raise OSError(errno.E2BIG, f"their list is longer than {LIMIT} bytes", "files of the job")
    return data


def _open_members(tree: Collection[Id], stack: ExitStack) -> list[Process]:
    """Return the processes that still exist, without zombies.

    A zombie has no files, and one made by a restore belongs to root.
    """
    members = []
    for member in tree:
        with suppress(ProcessGoneError):
            process = stack.enter_context(Process(member.pid, started=member.started))
            if process.stat().state != "Z":
                members.append(process)
    return members


def _check_room(directory_fd: int, size: int, path: str) -> None:
    """Raise ``OSError`` if the size, holes of all files included, exceeds the room.

    To digest and copy a huge hole could take days.
    """
    facts = os.fstatvfs(directory_fd)
    if size > facts.f_bavail * facts.f_frsize:
        raise OSError(errno.ENOSPC, f"it has {size} bytes, more than there is room for", path)


def _holes(facts: os.stat_result) -> int:
    return max(0, facts.st_size - facts.st_blocks * 512)


def _open_files(tree: Sequence[Process], places: Sequence[str], check: Check) -> Iterator[tuple[int, list[str]]]:
    """Yield the files that descriptors, mappings and working directories refer to, with their names.

    A file has several names if CRIU gave it one. Each descriptor (``O_PATH``) is valid until the next iteration.
    """
    for process in tree:
        for file, path in _files_of(process, places, check):
            names = _names_left(file, path, process, check) if path.endswith(_DELETED) else [path]
            if names:
                yield file, names


def _files_of(process: Process, places: Sequence[str], check: Check) -> Iterator[tuple[int, str]]:
    """Yield a descriptor (``O_PATH``, valid until the next iteration) and the path of each file in these places."""
    links = ["cwd"]
    for directory in ("fd", "map_files"):
        with suppress(OSError):
            links += [f"{directory}/{name}" for name in process.names(directory)]
    for link in links:
        check()
        with suppress(OSError):
            if not process.link(link).startswith(tuple(f"{place}/" for place in places)):  # excludes "pipe:[1]"
                continue
            file = process.open(link, os.O_PATH)
            try:
                path = os.readlink(f"/proc/self/fd/{file}")  # noqa: PTH115 - of what was opened
                if path.startswith(tuple(f"{place}/" for place in places)):
                    yield file, path
            finally:
                os.close(file)


def _shared_tensors(
    tree: Sequence[Process], root: int, places: Sequence[str], check: Check
) -> Iterator[tuple[int, list[str]]]:
    """Yield the files of a PyTorch program, open or not, with their names. Raises ``OSError``.

    Some have been removed: their names are still in the memory of the manager. Each descriptor (``O_PATH``) is valid
    until the next iteration.
    """
    for process in tree:
        for name in _names_in_memory(process, check) if _is_manager(process) else ():
            check()
            path = f"{_SHARED_MEMORY}/{name}"
            with suppress(OSError):
                parent = root_directory.open_below(root, _SHARED_MEMORY)
                try:
                    file = os.open(name, _PATH_FLAGS, dir_fd=parent)
                finally:
                    os.close(parent)
                try:
                    if _is_below(path, places) and stat.S_ISREG(os.fstat(file).st_mode):
                        yield file, [path]
                finally:
                    os.close(file)


def _is_manager(process: Process) -> bool:
    with suppress(OSError):
        return process.link("exe").rpartition("/")[2] == _MANAGER
    return False


def _names_in_memory(process: Process, check: Check) -> list[str]:
    """Return the names of shared memory in the heap of a process.

    Raises ``OSError``, also if its heap is too large, or has too many names.
    """
    areas = []
    for line in process.text_lines("maps"):
        words = line.split(None, 5)
        if len(words) < 5 or words[1] != "rw-p" or words[4] != "0" or "".join(words[5:]) not in _HEAPS:
            continue
        first, last = (kernel_text.number(word, 16) for word in words[0].partition("-")[::2])
        if first is not None and last is not None and first < last < 1 << 63:
            areas.append((first, last))
    if sum(last - first for first, last in areas) > _MOST_MEMORY:
        raise OSError(errno.E2BIG, f"{_MANAGER} has more than {_MOST_MEMORY} bytes of memory", _SHARED_MEMORY)
    names: set[bytes] = set()
    memory = process.open("mem")
    try:
        for first, last in areas:
            position, tail = first, b""
            while position < last:
                check()
                chunk = b""
                with suppress(OSError):  # a guard page
                    chunk = os.pread(memory, min(_CHUNK, last - position), position)
                names.update(_TENSOR.findall(tail + chunk))
                if len(names) > _MOST_NAMES:
                    raise OSError(errno.E2BIG, f"{_MANAGER} has more than {_MOST_NAMES} names", _SHARED_MEMORY)
                tail = chunk[-_LONGEST_NAME:]
                position += len(chunk) or mmap.PAGESIZE
    finally:
        os.close(memory)
    return sorted(map(os.fsdecode, names))


def _sockets(tree: Sequence[Process], places: Sequence[str]) -> list[str]:
    """Return the paths of the tree's sockets. CRIU recreates a socket's file and needs its directory."""
    inodes = set()
    for process in tree:
        with suppress(OSError):
            for name in process.names("fd"):
                with suppress(OSError):
                    inodes.add(os.fsencode(process.link(f"fd/{name}")))
    with suppress(OSError, IndexError):
        text = tree[0].read("net/unix")
        # Any user may choose a name that looks like a line of this file.
        rows = (row.split(None, 7) for row in text.split(b"\n"))
        socket_paths = (os.fsdecode(row[7]) for row in rows if len(row) == 8 and b"socket:[%s]" % row[6] in inodes)
        return [path for path in socket_paths if _is_below(path, places)]
    return []


def _is_below(path: str, places: Sequence[str]) -> bool:
    """Return whether a path begins with one of these directories and does not lead upwards. It may contain links."""
    return path.startswith(tuple(f"{place}/" for place in places)) and ".." not in path.split("/")


def _names_left(file: int, path: str, process: Process, check: Check) -> list[str]:
    """Return the remaining names of a removed file in its directory, the one made for the dump last.

    The list is empty without a name made for the dump.
    """
    facts, directory = os.fstat(file), os.path.dirname(path)  # noqa: PTH120 - a path of another process
    if not stat.S_ISREG(facts.st_mode) or not facts.st_nlink:
        return []
    names = []
    root = process.open("root", os.O_PATH | os.O_DIRECTORY)
    try:
        parent = root_directory.open_below(root, directory)
        try:
            for name in root_directory.names(parent):
                check()
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.stat(name, dir_fd=parent, follow_symlinks=False), facts):
                        names.append(name)
        finally:
            os.close(parent)
    finally:
        os.close(root)
    name_shown = os.path.basename(path)  # noqa: PTH119 - as above
    names.sort(key=lambda name: (name.startswith(deleted_files.REMAP) or name == name_shown, name))
    named = names and (names[-1].startswith(deleted_files.REMAP) or names[-1] == name_shown)
    return [f"{directory}/{name}" for name in names] if named else []


def _remove_remaps(links: Sequence[str], root: int, user: User) -> None:
    """Remove names made for the dump, with the rights of the user who owns the directories."""

    def remove() -> None:
        for path in map(Path, links):
            if path.name.startswith(deleted_files.REMAP) or path.name.endswith(_DELETED):
                with suppress(OSError):
                    parent = root_directory.open_below(root, str(path.parent))
                    try:
                        os.unlink(path.name, dir_fd=parent)
                    finally:
                        os.close(parent)

    as_user(user, remove)


def _above(path: str, uid: int, root: int, places: Sequence[str]) -> list[LocalFile]:
    """Return the directories between the place and the file, topmost first, that belong to the user.

    Others cannot be recreated.
    """
    directories = []
    for above in reversed(Path(path).parents):
        if str(above) in ("/", *places) or not str(above).startswith(tuple(f"{place}/" for place in places)):
            continue
        with suppress(OSError):
            fd = root_directory.open_below(root, str(above))
            try:
                facts = os.fstat(fd)
            finally:
                os.close(fd)
            if stat.S_ISDIR(facts.st_mode) and facts.st_uid == uid:
                directories.append(LocalFile(str(above), "directory", stat.S_IMODE(facts.st_mode)))
    return directories


def _copy_in(file: int, directory_fd: int, name: str, size: int, check: Check) -> int:
    """Copy the first ``size`` bytes of a file into the image. Blocks of zeros become holes.

    The user may change its size meanwhile, or have a lease on it (``F_SETLEASE``), for which ``open(2)`` would wait.
    """
    try:
        source = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except BlockingIOError as error:
        path = os.readlink(f"/proc/self/fd/{file}")  # noqa: PTH115 - of a descriptor
        raise OSError(error.errno, "a process has a lease on it", path) from None
    try:
        target = os.open(name, _CREATE_FLAGS, root_directory.FILE_MODE, dir_fd=directory_fd)
        try:
            return _copy(source, target, size, check)
        finally:
            os.close(target)
    finally:
        os.close(source)


def _copy(source: int, target: int, size: int, check: Check = lambda: None) -> int:
    copy_range(source, target, size, check=check)
    os.ftruncate(target, size)
    return size


def copy_range(
    source: int, target: int, size: int, *, source_at: int = 0, target_at: int = 0, check: Check = lambda: None
) -> None:  # fmt: skip
    """Copy bytes from one open file to another; blocks of zeros are left out, so that they become holes.

    Fewer bytes are copied if the source has become shorter. Raises ``OSError``.
    """
    position, last, moved = source_at, source_at + size, target_at - source_at
    while (position := _next_data(source, position, last)) < last:
        check()
        end = min(position + _CHUNK, os.lseek(source, position, os.SEEK_HOLE), last)
        chunk = os.pread(source, end - position, position)
        if not chunk:
            break
        if chunk.count(0) != len(chunk):
            written = 0
            while written < len(chunk):
                written += os.pwrite(target, chunk[written:], position + moved + written)
        position += len(chunk)


def _next_data(fd: int, offset: int, size: int) -> int:
    """Return the offset of the next data. Holes before it are not read."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) if offset < size else size
    except OSError as error:
        if error.errno == errno.ENXIO:
            return size
        raise


def names_of(index: bytes) -> set[str]:
    """Return the paths of the files in the index of a checkpoint image. Raises ``RestoreFailed``."""
    try:
        files = json_values.typed(list, json_values.table(json_values.loads(index))["files"])
        return {_file_of_index(row).path for row in files}
    except (ValueError, KeyError) as error:
        raise RestoreFailed(f"{_UNREADABLE}: {error}") from None


def stored(directory_fd: int) -> set[str]:
    """Return the paths of the files in an image that is being written. Raises ``DumpFailed``."""
    if INDEX not in root_directory.names(directory_fd):
        return set()
    try:
        return names_of(root_directory.read(directory_fd, INDEX, owner=os.geteuid(), limit=LIMIT))
    except CheckpointError as error:
        raise DumpFailed(str(error)) from None


def leave(index: Callable[[], bytes], owner: User, *, places: Sequence[str] = PLACES, proc: Path = PROC) -> list[str]:
    """Remove the files of a dump from the node that the job has left; return their paths. Never raises.

    ``index``: return the verified index of the image. ``owner``: the owner of the job. A file is removed with the
    owner's rights, and only if it is the one that was copied, is unchanged since, and no process of the owner has it
    open.
    """
    removed: list[str] = []

    def remove() -> None:
        root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for path, identity in originals.items():
                if unlink_if(root, path, partial(is_unused, identity, used)):
                    removed.append(path)
        finally:
            os.close(root)

    with suppress(OSError, CheckpointError, ExhaustedError, ValueError, KeyError):
        original_index = json_values.table(json_values.loads(index())).get("originals", {})
        originals = {
            path: [json_values.whole(number) for number in json_values.typed(list, identity)]
            for path, identity in json_values.table(original_index).items()
            if _is_below(path, places) and "\0" not in path
        }
        if originals:
            used = used_files(places, owner.uid, proc)
            FileSystemCalls(None, probe_s=_ANSWER_S)(lambda: as_user(owner, remove))
    return removed


def remove(init: Id, inodes: Mapping[str, tuple[int, int]], user: User) -> None:
    """Remove the files that ``restore_files`` has created, after a failed restore. Never raises."""

    def call() -> None:
        for path in reversed(list(inodes)):
            unlink_if(root, path, partial(_is, inodes[path]))

    with suppress(OSError, ExhaustedError):
        with Process(init.pid, started=init.started) as process:
            root = process.open("root", os.O_PATH | os.O_DIRECTORY)
        try:
            as_user(user, call)
        finally:
            os.close(root)


def unlink_if(root: int, path: str, accepts: Callable[[os.stat_result], bool]) -> bool:
    """Remove a file, or an empty directory, if ``accepts`` is true for it. Return whether it was removed.

    The rights are those of the calling thread (``as_user``).
    """
    with suppress(OSError):
        parent = root_directory.open_below(root, os.path.dirname(path))  # noqa: PTH120 - a path of the user
        try:
            name = os.path.basename(path)  # noqa: PTH119 - as above
            facts = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if accepts(facts):
                (os.rmdir if stat.S_ISDIR(facts.st_mode) else os.unlink)(name, dir_fd=parent)
                return True
        finally:
            os.close(parent)
    return False


def identity_of(facts: os.stat_result) -> list[int]:
    """Return device, inode, size in bytes and time of the last change in nanoseconds of a file."""
    return [facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns]


def _inode(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino


def _is(inode: tuple[int, int], facts: os.stat_result) -> bool:
    return _inode(facts) == inode


def is_unused(identity: Sequence[int], used: Collection[tuple[int, int]], facts: os.stat_result) -> bool:
    """Return whether a file is the one of ``identity_of``, unchanged, and is not among the files in use."""
    return identity_of(facts) == list(identity) and _inode(facts) not in used


def used_files(places: Sequence[str], uid: int, proc: Path) -> set[tuple[int, int]]:
    """Return device and inode of the files in these places that processes of a user have open or mapped.

    Those of other users do not count: they could have millions of files open, and delay the jobs of this user. Raises
    ``OSError``.
    """
    used: set[tuple[int, int]] = set()
    check = time_limit(_ANSWER_S, "files of the user")
    for process in processes(proc=proc):
        with suppress(ProcessGoneError):
            if str(uid) in process.status().get("Uid", "").split():
                used.update(inode for file, _ in _files_of(process, places, check) if (inode := known_inode(file)))
    return used


def known_inode(file: int) -> tuple[int, int] | None:
    """Return device and inode of a file without asking a file server; ``None`` on a FUSE that is closed to root."""
    facts = ctypes.create_string_buffer(_STATX.size)
    if _LIBC.statx(file, b"", _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, _STATX_INO, facts) != 0:
        return None
    number, major, minor = _STATX.unpack(facts.raw)
    return os.makedev(major, minor), number


def restore_files(
    init: Id, directory_fd: int, contents: Callable[[str], int], user: User, *, created: CreatedFiles | None = None,
    places: Sequence[str] = PLACES, proc: Path = PROC,
) -> dict[str, tuple[int, int]]:  # fmt: skip
    """Create missing files in the mount namespace of a process; return the device and inode of each by its path.

    Raises ``RestoreFailed``.

    ``directory_fd``: a copy of the checkpoint image that only root can change. ``contents`` returns a descriptor of a
    file of the image, which stays open. ``user``: the user of the job, according to Slurm; root on another node could
    have written a different one to the image. ``created``: the record of the files that earlier restores have created,
    which may be replaced.
    """
    deleted_files.put_in_place(init, directory_fd, user)
    if INDEX not in root_directory.names(directory_fd):
        return {}
    files = [file for file in _files_in(directory_fd, user) if _is_below(file.path, places)]
    try:
        copies: dict[str | None, int] = {
            file.copy: contents(file.copy) for file in files if file.kind == "file" and file.copy is not None
        }
    except ImageDamaged as error:
        raise RestoreFailed(f"{_UNREADABLE}: {error}") from None
    recorded = {} if created is None else created.read()
    recorded = {file.path: recorded[file.path] for file in files if file.path in recorded}
    inodes: dict[str, tuple[int, int]] = {}
    identities: dict[str, FileIdentity] = {}
    try:
        leftovers = Leftovers(recorded, user.uid, used_files(places, user.uid, proc) if recorded else ())
        with Process(init.pid, started=init.started, proc=proc) as process:
            root = process.open("root", os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        raise restore_failure("a temporary file cannot be recreated", error) from None

    def make() -> str | None:
        for file in files:
            try:
                fd = _make(root, file, copies, leftovers, places)
                if fd is not None:
                    try:
                        inodes[file.path] = _inode(os.fstat(fd))
                        identity = FileIdentity.of(fd) if file.kind in ("file", "link") else None
                    finally:
                        os.close(fd)
                    if identity is not None:
                        identities[file.path] = identity
            except OSError as error:
                return f"{file.path}: {error.strerror}"
        return None

    def fill() -> str | None:
        for file in files:
            if file.kind == "file" and file.path in inodes:
                try:
                    _fill(root, file, inodes[file.path], identities.get(file.path), copies[file.copy])
                except OSError as error:
                    return f"{file.path}: {error.strerror}"
        return None

    try:
        failure = as_user(user, make)  # with the user's rights, so a path may lead anywhere
        if created is not None and (recorded or identities):
            # Before the copies, which take time: if the agent is killed meanwhile, the next restore finds partial ones.
            created.write({**recorded, **identities})
        if failure is None:
            failure = as_user(user, fill)
    except OSError as error:
        raise restore_failure("a temporary file cannot be recreated", error) from None
    finally:
        os.close(root)
    if failure is not None:
        remove(init, inodes, user)
        # In a directory of this node: another one does not have the file in its way, or the full disk.
        raise RestoreInterrupted(f"a temporary file cannot be recreated: {failure}")
    return inodes


def _files_in(directory_fd: int, user: User) -> list[LocalFile]:
    """Return the files in the index of an image. Raises ``RestoreFailed``."""
    try:
        index = json_values.table(
            json_values.loads(root_directory.read(directory_fd, INDEX, owner=os.geteuid(), limit=LIMIT))
        )
        files = [_file_of_index(row) for row in json_values.typed(list, index["files"])]
        _check_links(files)
        uid = json_values.whole(index["uid"], MOST_ID)
    except (ImageDamaged, ValueError, KeyError) as error:
        raise RestoreFailed(f"{_UNREADABLE}: {error}") from None
    if uid != user.uid:
        raise RestoreFailed(f"the image's temporary files belong to user {uid}, not to user {user.uid}")
    return files


def _file_of_index(value: object) -> LocalFile:
    """Return a file of the index. Raises ``ValueError``."""
    file = json_values.record(LocalFile, value)
    json_values.whole(file.mode, 0o7777)
    json_values.whole(file.size)
    os.fsencode(file.path + (file.copy or ""))  # UnicodeEncodeError for a lone surrogate, which JSON allows
    if file.kind not in _KINDS or "\0" in file.path + (file.copy or ""):
        raise ValueError(f"{file.path!r:.60} is a {file.kind!r:.20}")
    if file.kind == "file" and (file.copy is None or "/" in file.copy):
        raise ValueError(f"{file.copy!r:.60} is not the name of a copy")
    return file


def _check_links(files: Iterable[LocalFile]) -> None:
    """Raise ``ValueError`` for a link to a file that is not in the index: it may belong to another job of the user."""
    paths: set[str] = set()
    for file in files:
        if file.kind == "link" and (file.copy not in paths or Path(file.copy).parent != Path(file.path).parent):
            raise ValueError(f"{file.path!r:.60} is not another name of a file listed before it")
        if file.kind in ("file", "link"):
            paths.add(file.path)


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Files of earlier attempts of the job that may be replaced."""

    created_files: Mapping[str, FileIdentity]
    """Path -> the file that a restore of the job has created there."""
    uid: int
    used: Collection[tuple[int, int]]
    """Device and inode of the files that a process of the user has open or mapped."""

    def remove(self, parent: int, path: str) -> None:
        """Remove an existing file with the rights of the user. Raises ``OSError`` if it may not be replaced."""
        name = os.path.basename(path)  # noqa: PTH119 - a path of the user
        fd = os.open(name, _PATH_FLAGS, dir_fd=parent)
        try:
            facts, identity = os.fstat(fd), FileIdentity.of(fd)
        finally:
            os.close(fd)
        replaceable = stat.S_ISREG(facts.st_mode) and facts.st_uid == self.uid and identity is not None
        if not replaceable or identity != self.created_files.get(path):
            what = f"exists already, and is another file: if it is not needed, remove it from {os.uname().nodename}"
            raise OSError(errno.EEXIST, what, path)
        if _inode(facts) in self.used:
            raise OSError(errno.EBUSY, "is left over from an earlier attempt, and a process has it open", path)
        os.unlink(name, dir_fd=parent)


def _make(
    root: int, file: LocalFile, copies: Mapping[str | None, int], leftovers: Leftovers, places: Sequence[str]
) -> int | None:
    """Create a file, still without contents, if it does not exist; return a descriptor of it, otherwise ``None``.

    Raises ``OSError`` if another one exists.
    """
    path = Path(file.path)
    parent = root_directory.open_below(root, str(path.parent))
    try:
        if str(path.parent) not in places and os.fstat(parent).st_uid not in (0, leftovers.uid):
            raise OSError(errno.EPERM, "another user owns its directory, and could exchange it", file.path)
        with suppress(FileNotFoundError):
            present = os.stat(path.name, dir_fd=parent, follow_symlinks=False)
            if present.st_uid != leftovers.uid:
                same = False  # its owner could change it later
            elif file.kind == "link":
                target = os.stat(Path(file.copy or "").name, dir_fd=parent, follow_symlinks=False)
                same = os.path.samestat(present, target)
            else:
                same = _equal(parent, path.name, file, present, copies)
            if same:
                return None
            leftovers.remove(parent, file.path)
        return _create(parent, path.name, file)
    finally:
        os.close(parent)


def _create(parent: int, name: str, file: LocalFile) -> int:
    """Create a file without contents; return a descriptor of it."""
    if file.kind == "directory":
        os.mkdir(name, file.mode, dir_fd=parent)
    elif file.kind == "fifo":
        os.mkfifo(name, file.mode, dir_fd=parent)
    elif file.kind == "link":
        os.link(Path(file.copy or "").name, name, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
    else:
        return os.open(name, _CREATE_FLAGS, 0o600, dir_fd=parent)
    return os.open(name, _PATH_FLAGS, dir_fd=parent)


def _fill(root: int, file: LocalFile, inode: tuple[int, int], identity: FileIdentity | None, copy: int) -> None:
    """Copy the contents to a file that was created. Raises ``OSError``."""
    parent = root_directory.open_below(root, os.path.dirname(file.path))  # noqa: PTH120 - a path of the user
    try:
        name = os.path.basename(file.path)  # noqa: PTH119 - as above
        # It may have been replaced in between, even by a FIFO.
        fd = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        if _inode(os.fstat(fd)) != inode or FileIdentity.of(fd) != identity:
            raise OSError(errno.EEXIST, "was replaced while it was created", file.path)
        _copy(copy, fd, os.fstat(copy).st_size)
        os.fchmod(fd, file.mode)
    finally:
        os.close(fd)


def _equal(parent: int, name: str, file: LocalFile, present: os.stat_result, copies: Mapping[str | None, int]) -> bool:
    """Return whether the existing file is the saved one; on the original node it is, unless it was changed."""
    kinds = {"directory": stat.S_ISDIR, "fifo": stat.S_ISFIFO, "file": stat.S_ISREG}
    if not kinds[file.kind](present.st_mode):
        return False
    if file.kind != "file":
        return True
    if present.st_size != file.size:
        return False
    # It may have been replaced in between, even by a FIFO.
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    try:
        position = 0
        while position < file.size:
            chunk = os.pread(fd, _CHUNK, position)
            if not chunk or chunk != os.pread(copies[file.copy], _CHUNK, position):
                return False
            position += len(chunk)
        return True
    finally:
        os.close(fd)
