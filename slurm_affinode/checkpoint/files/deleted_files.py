"""Open files that were deleted: link them before the dump, recreate them before the restore.

If a file was deleted while a process has it open, and it has another link or is on NFS, CRIU would create a link in the
same directory (``--link-remap``), as root and by a path that the user can change meanwhile. So the file is linked
before the dump, with the user's rights, under the name that ``/proc`` shows, ``NAME (deleted)``, which CRIU finds and
accepts (``check_path_remap`` in ``criu/files-reg.c``), or on NFS renamed from the kernel's ``.nfs`` name to
``link_remap.INODE``. Similar jobs would use equal names, so after the dump the name is replaced with a unique one and
exists again only during the restore; of two concurrent restores the second waits. Images of older releases have CRIU's
names, ``link_remap.N``.

Files without any link are stored in the image. CRIU would recreate them as root next to their old path
(``NAME.cr.N.ghost``), following symbolic links; they are recreated here with the user's rights. ``ghost-file-N.img``
holds a ``ghost_file_entry`` (``images/ghost-file.proto``) followed by the contents, in one piece or in chunks with a
``ghost_chunk_entry`` each.

All operations time out if a file system does not respond.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TypeVar

from slurm_affinode.base import json_values, pidfd
from slurm_affinode.base.pidfd import ExhaustedError, Id, Process
from slurm_affinode.base.timeouts import FileSystemCalls, time_limit
from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.image.criu_images import BadImage, integer, message
from slurm_affinode.checkpoint.interface import CheckpointError, Image, ImageDamaged, RestoreFailed, restore_failure
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.checkpoint.user_files import MOST_ID, User, as_user

T = TypeVar("T")
INDEX = "remaps.json"
REMAP = "link_remap."
ASIDE = ".link_remap."
WAIT_S = 120.0
"""Time to wait for the restore of another job to remove its name."""
_ANSWER_S = 30.0
"""Timeout for the file systems of a job's files."""
_LIMIT = 16 << 20
_MOST_AHEAD = 1000
"""Limit on the files that are recorded in the journal."""
_PAUSE_S = 0.1
_DELETED = " (deleted)"
_NFS = ".nfs"
_NFS_MAGIC = 0x6969


@dataclass(frozen=True, slots=True)
class NamedFile:
    """A deleted file with another link, as listed in the index of an image."""

    directory: str
    name: str
    """Name that CRIU uses."""
    aside: str
    """Unique name while the job is suspended."""
    inode: int


@dataclass(frozen=True, slots=True)
class RemovedFile:
    """A deleted file that a dump may link."""

    directory: str
    aside: str
    """Unique name while the job is suspended."""
    inode: int


def give_names(init: Id, tree: Collection[Id], owner: User) -> None:
    """Link deleted files before a dump. Never raises: CRIU reports files that it cannot dump.

    ``init``: PID 1 of the job's namespaces, below whose root directory paths are resolved. ``owner``: the owner of the
    job.
    """

    def give(root: int) -> None:
        for directory, name, fd, inode in opened:
            with suppress(OSError), _opened(root, directory) as parent:
                if name.endswith(_DELETED):
                    os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=parent, follow_symlinks=True)
                elif root_directory.filesystem_type(parent) == _NFS_MAGIC:
                    os.rename(name, f"{REMAP}{inode}", src_dir_fd=parent, dst_dir_fd=parent)

    def open_all() -> list[tuple[str, str, int, int]]:
        opened = []
        for process, deleted in _nameless(tree):
            with suppress(OSError):
                fd = process.open(deleted.link, os.O_PATH)
                # The descriptor may now refer to another file.
                if os.path.samestat(os.fstat(fd), deleted.facts):
                    opened.append((deleted.directory, deleted.name, fd, deleted.facts.st_ino))
                else:
                    os.close(fd)
        return opened

    opened: list[tuple[str, str, int, int]] = []
    with suppress(OSError, ExhaustedError):
        opened = _patiently(open_all)
        if opened:
            _below(init, owner, give)
    for _, _, fd, _ in opened:
        os.close(fd)


def set_aside(
    init: Id, tree: Collection[Id], directory_fd: int, owner: User, *, but: Sequence[str] = ()
) -> None:  # fmt: skip
    """Give the linked files unique names after a dump and list them in the image. The tree is stopped.

    A file that cannot be renamed, because it belongs to another user, keeps its name. ``init``, ``owner``: as for
    ``give_names``. ``but``: directories to skip, with their subdirectories.
    """

    def find() -> dict[tuple[str, str], NamedFile]:
        check = time_limit(_ANSWER_S, "deleted files")
        return {
            (deleted.directory, name): NamedFile(
                deleted.directory, name, _unique_name(process, deleted.facts), deleted.facts.st_ino
            )
            for process, deleted in _nameless(tree)
            if not f"{deleted.directory}/".startswith(tuple(f"{place}/" for place in but))
            for name in _names(process, deleted, check)
            if not name.startswith(ASIDE)
        }

    named = _patiently(find)
    if not named:
        return
    _encoded(owner, list(named.values()))  # before any is renamed
    moved: list[NamedFile] = []

    def rename(root: int) -> None:
        moved.extend(removed for removed in named.values() if _moved(root, removed))

    _below(init, owner, rename)
    root_directory.write(directory_fd, INDEX, _encoded(owner, moved))


def _encoded(owner: User, files: Sequence[NamedFile]) -> bytes:
    """Return the contents of the index. Raises ``OSError`` if no restore would read it."""
    data = json.dumps({"uid": owner.uid, "gid": owner.gid, "files": [asdict(file) for file in files]}).encode()
    if len(data) > _LIMIT:
        raise OSError(errno.E2BIG, f"their list is longer than {_LIMIT} bytes", "deleted files")
    return data


def put_in_place(init: Id, directory_fd: int, owner: User, *, wait_s: float = WAIT_S) -> None:
    """Link the files under CRIU's names before a restore. Raises ``RestoreFailed``.

    ``owner``: the owner of the job, according to Slurm; root on another node could have written others to the image.
    """
    (uid, _), remaps = _read(directory_fd)
    if remaps and uid != owner.uid:
        raise RestoreFailed(f"the image's removed files belong to user {uid}, not to user {owner.uid}")
    deadline = time.monotonic() + wait_s

    def make(root: int) -> None:
        for remap in remaps:
            with _opened(root, remap.directory) as parent:
                while not _linked(parent, remap):
                    if time.monotonic() >= deadline:
                        raise OSError(errno.EEXIST, "exists already, and is another file", remap.name)
                    time.sleep(_PAUSE_S)

    if remaps:
        try:
            _below(init, owner, make, limit_s=wait_s + _ANSWER_S)
        except OSError as error:
            name = error.filename or remaps[0].name
            raise restore_failure(f"a deleted file cannot be recreated: {name}", error) from None


def settle(init: Id, directory_fd: int, owner: User) -> None:
    """Remove CRIU's names after a restore, unless CRIU has removed them. Never raises. ``owner``: see above."""
    with suppress(OSError, RestoreFailed):
        _take_away(init, _read(directory_fd)[1], lambda remap: remap.name, owner)


def gone(store: DirectoryStore, image: Image, init: Id | None = None) -> None:
    """Remove the unique names of an image when its job has been restored or has ended. Never raises.

    Paths are resolved below the root directory of ``init``, or of this process if that is ``None``.
    """
    with suppress(OSError, CheckpointError, ExhaustedError):
        _, remaps = _parsed(store.small_file(image, INDEX, _LIMIT))
        _take_away(init, remaps, lambda remap: remap.aside, User(image.manifest.uid, image.manifest.gid))


def forget(init: Id, tree: Collection[Id], owner: User) -> None:
    """Remove the names that a dump has created before the tree resumes in place. Never raises."""

    def remove(root: int) -> None:
        for directory, name, inode in removed:
            with suppress(OSError), _opened(root, directory) as parent:
                _remove(parent, name, inode)

    def find() -> list[tuple[str, str, int]]:
        check = time_limit(_ANSWER_S, "deleted files")
        return [
            (deleted.directory, name, deleted.facts.st_ino)
            for process, deleted in _nameless(tree)
            for name in _names(process, deleted, check)
            if not name.startswith(ASIDE) or name == _unique_name(process, deleted.facts)
        ]

    with suppress(OSError, ExhaustedError):
        removed = _patiently(find)
        if removed:
            _below(init, owner, remove)


def ahead(tree: Collection[Id]) -> tuple[RemovedFile, ...]:
    """List the files that a dump may link, for ``forget_lost``. Never raises."""

    def find() -> tuple[RemovedFile, ...]:
        return tuple(
            RemovedFile(deleted.directory, _unique_name(process, deleted.facts), deleted.facts.st_ino)
            for process, deleted in islice(_nameless(tree), _MOST_AHEAD)
        )

    with suppress(OSError, ExhaustedError):
        return _patiently(find)
    return ()


def forget_lost(named: Collection[RemovedFile], owner: User) -> None:
    """Do the same as ``forget`` when the tree is gone, perhaps with its node. Never raises."""

    def remove(root: int) -> None:
        for removed in named:
            with suppress(OSError), _opened(root, removed.directory) as parent:
                for name in root_directory.names(parent):
                    if name.startswith(REMAP) or name.endswith(_DELETED) or name == removed.aside:
                        _remove(parent, name, removed.inode)

    with suppress(OSError, ExhaustedError):
        if named:
            _below(None, owner, remove)


def _read(directory_fd: int) -> tuple[tuple[int, int], list[NamedFile]]:
    """Return UID and GID of the job, and the files in the index. Raises ``RestoreFailed``."""
    if INDEX not in root_directory.names(directory_fd):
        return (0, 0), []
    try:
        return _parsed(root_directory.read(directory_fd, INDEX, owner=os.geteuid(), limit=_LIMIT))
    except ImageDamaged as error:
        raise RestoreFailed(f"the image's list of removed files cannot be read: {error}") from None


def names_of(index: bytes) -> set[str]:
    """Return the paths of CRIU's names in the index of an image. Raises ``RestoreFailed``."""
    return {f"{removed.directory}/{removed.name}" for removed in _parsed(index)[1]}


def _parsed(data: bytes) -> tuple[tuple[int, int], list[NamedFile]]:
    try:
        index = json_values.table(json_values.loads(data))
        named = [_file_of_index(row) for row in json_values.typed(list, index["files"])]
        return (json_values.whole(index["uid"], MOST_ID), json_values.whole(index["gid"], MOST_ID)), named
    except (ValueError, KeyError) as error:
        raise RestoreFailed(f"the image's list of removed files cannot be read: {error}") from None


def _file_of_index(value: object) -> NamedFile:
    """Decode a file of the index. Raises ``ValueError``."""
    removed = json_values.record(NamedFile, value)
    if any("/" in name or "\0" in name for name in (removed.name, removed.aside)) or "\0" in removed.directory:
        raise ValueError(f"{removed.name!r:.60} is not a name in a directory")
    if not removed.name.startswith(REMAP) and not removed.name.endswith(_DELETED):
        raise ValueError(f"{removed.name!r:.60} is not a name for a dump")
    if not removed.aside.startswith(ASIDE):
        raise ValueError(f"{removed.aside!r:.60} is not a name for a suspended job")
    return removed


# ---


def _take_away(init: Id | None, remaps: Sequence[NamedFile], which: Callable[[NamedFile], str], owner: User) -> None:
    def remove(root: int) -> None:
        for remap in remaps:
            with suppress(OSError), _opened(root, remap.directory) as parent:
                _remove(parent, which(remap), remap.inode)

    with suppress(OSError, ExhaustedError):
        if remaps:
            _below(init, owner, remove)


@dataclass(frozen=True, slots=True)
class _Nameless:
    """A deleted file that a process has open."""

    link: str
    """Path relative to the process's directory in ``/proc``."""
    directory: str
    name: str
    """File name as ``/proc`` shows it."""
    facts: os.stat_result


def _nameless(tree: Collection[Id]) -> Iterator[tuple[Process, _Nameless]]:
    """Yield the deleted files of all processes, each name once."""
    keys: set[tuple[str, str, int, int]] = set()
    for member in tree:
        with suppress(OSError), Process(member.pid, started=member.started) as process:
            for file in _nameless_of(process):
                key = (file.directory, file.name, file.facts.st_dev, file.facts.st_ino)
                if key not in keys:
                    keys.add(key)
                    yield process, file


def _nameless_of(process: Process) -> Iterator[_Nameless]:
    for link in (*_listed_in(process, "fd"), *_listed_in(process, "map_files")):
        with suppress(OSError):
            path = process.link(link)  # may be "pipe:[1]"
            parent, _, name = path.rpartition("/")
            deleted = path.endswith(_DELETED)
            if path.startswith("/") and (deleted or name.startswith((_NFS, REMAP))):
                facts = process.facts(link)
                named = not deleted and name.startswith(REMAP)
                if named and name != f"{REMAP}{facts.st_ino}":
                    continue
                if stat.S_ISREG(facts.st_mode) and facts.st_nlink:
                    yield _Nameless(link, parent, name, facts)


def _listed_in(process: Process, directory: str) -> list[str]:
    with suppress(OSError):
        return [f"{directory}/{name}" for name in process.names(directory)]
    return []


def _names(process: Process, file: _Nameless, check: Callable[[], None]) -> list[str]:
    """Return the names of a file in its directory that a dump may have created. Raises the error of ``check``."""
    check()
    own_names = {file.name} if file.name.endswith(_DELETED) else set()
    names = []
    with suppress(OSError):
        root = process.open("root", os.O_PATH | os.O_DIRECTORY)
        try:
            with _opened(root, file.directory) as parent:
                for name in root_directory.names(parent):
                    if name.startswith((REMAP, ASIDE)) or name in own_names:
                        with suppress(FileNotFoundError):
                            if os.path.samestat(os.stat(name, dir_fd=parent, follow_symlinks=False), file.facts):
                                names.append(name)
        finally:
            os.close(root)
    return names


def _unique_name(process: Process, facts: os.stat_result) -> str:
    """Return the unique name of a file: no other file there has its inode number, no other attempt the rest."""
    return f"{ASIDE}{facts.st_ino}.{_run_of(process)}"


def _run_of(process: Process) -> str:
    """Identify the PID namespace of a process uniquely, for all nodes and times.

    Its inode number alone may be reused as soon as the job is suspended. Two jobs may have the same deleted file open,
    for example a library that was replaced and has a hard link elsewhere.
    """
    space, began = process.namespace("pid"), process.started
    if space is None:
        raise pidfd.ProcessGoneError(errno.ESRCH, "it has ended", str(process.pid))
    for above in pidfd.ancestors(process):
        if above.namespace("pid") != space:
            break
        began = above.started
    boot = (pidfd.PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return f"{space[1]}.{began}.{boot}"


def _patiently(call: Callable[[], T], limit_s: float = _ANSWER_S) -> T:
    """Call with a timeout. Raises ``NoAnswerError``; the call then continues and must use only its own descriptors."""
    return FileSystemCalls(None, probe_s=limit_s)(call)


def _below(init: Id | None, owner: User, call: Callable[[int], None], *, limit_s: float = _ANSWER_S) -> None:
    """Call with the rights of the owner, passing a descriptor of the root directory of ``init``, or of this process."""

    def resolve() -> None:
        if init is None:
            root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        else:
            with Process(init.pid, started=init.started) as process:
                root = process.open("root", os.O_PATH | os.O_DIRECTORY)
        try:
            as_user(owner, lambda: call(root))
        finally:
            os.close(root)

    _patiently(resolve, limit_s)


@contextmanager
def _opened(root: int, path: str) -> Iterator[int]:
    fd = root_directory.open_below(root, path or "/")
    try:
        yield fd
    finally:
        os.close(fd)


def _moved(root: int, named: NamedFile) -> bool:
    with suppress(OSError), _opened(root, named.directory) as parent:
        with suppress(FileExistsError):  # left by an aborted suspension, or another file: checked below
            os.link(named.name, named.aside, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
        if _inode(parent, named.aside) == named.inode:
            os.unlink(named.name, dir_fd=parent)
            return True
    return False


def _linked(parent: int, named: NamedFile) -> bool:
    """Return whether the file is linked under CRIU's name; false if a file of another job has the name."""
    try:
        os.link(named.aside, named.name, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
    except FileExistsError:
        return _inode(parent, named.name) == named.inode
    except FileNotFoundError:
        pass  # removed by its user: CRIU reports the missing file
    return True


def _remove(parent: int, name: str, inode: int) -> None:
    if _inode(parent, name) == inode:
        os.unlink(name, dir_fd=parent)


def _inode(parent: int, name: str) -> int | None:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return None


_MAGICS = 8  # bytes
_CHUNK = 1 << 20
_ENTRY_LIMIT = 1 << 16
_PLACES = ("/var/tmp", "/tmp", "/dev/shm")  # noqa: S108 - a file without a name is made there
_PERMISSIONS = 0o777
"""Mask without setuid and setgid."""
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EOPNOTSUPP)
"""Errors after which another directory is tried."""


@dataclass(frozen=True, slots=True)
class Ghost:
    """A deleted file without links, stored in ``ghost-file-N.img``."""

    mode: int
    uid: int
    gid: int
    chunks: bool
    size: int | None
    target: bytes | None
    """Target of a symbolic link."""
    times: tuple[int, int] | None
    """Times of last access and modification, in nanoseconds."""
    begin: int
    """Offset of the contents in the image file."""
    inode: int | None
    """Inode number at the time of the dump."""

    @classmethod
    def read(cls, fd: int) -> Ghost:
        """Decode the header of a ``ghost-file-N.img``. Raises ``BadImage``."""
        length = int.from_bytes(os.pread(fd, 4, _MAGICS), "little")
        if not 0 < length <= _ENTRY_LIMIT:
            raise BadImage("a removed file is not described")
        body = os.pread(fd, length, _MAGICS + 4)
        if len(body) < length:
            raise BadImage("a record is cut short")
        facts = message(body)
        target = facts.get(11, [None])[0]
        times = [_time(facts.get(key, [None])[0]) for key in (7, 8)]
        return cls(
            integer(facts, 3), integer(facts, 1), integer(facts, 2), bool(integer(facts, 9, 0)),
            integer(facts, 10) if 10 in facts else None, target if isinstance(target, bytes) else None,
            (times[0], times[1]) if times[0] is not None and times[1] is not None else None, _MAGICS + 4 + length,
            integer(facts, 5) if 5 in facts else None,
        )  # fmt: skip


def _time(packed: int | bytes | None) -> int | None:
    if not isinstance(packed, bytes):
        return None
    facts = message(packed)
    seconds, micro = integer(facts, 1), integer(facts, 2)
    return seconds * 1_000_000_000 + micro * 1000 if seconds < 1 << 33 and micro < 1_000_000 else None


def make(root: int, path: str, ghost: Ghost, image_fd: int, *, executable: bool, linkable: bool = False) -> int:
    """Recreate the file that was at ``path``, unlink it, and return its descriptor, which the caller closes.

    Must be called with the user's rights. The file is created in its old directory, else in one above it, else in a
    directory for temporary files. ``executable``: the file will be mapped with ``PROT_EXEC``. ``linkable``: it was
    opened with ``O_TMPFILE``, so that its process may still give it a name (``linkat(2)``). Raises ``OSError``,
    ``BadImage``.
    """
    directory, _, name = path.rpartition("/")
    error: OSError | None = None
    for place in _places(directory):
        try:
            parent = root_directory.open_below(root, place)
        except OSError as why:
            error = error or why
            continue
        try:
            if executable and os.statvfs(parent).f_flag & os.ST_NOEXEC:
                continue
            if linkable and (fd := _make_linkable(parent, ghost, image_fd)) is not None:
                return fd
            return _make(parent, name if place == (directory or "/") else _unused(), ghost, image_fd)
        except OSError as why:
            error = error or why
            if why.errno not in _UNWRITABLE:
                raise
        finally:
            os.close(parent)
    raise error or OSError(errno.EACCES, "there is no directory to make it in", path)


def _places(directory: str) -> Iterator[str]:
    """Yield the directory, its parents, and the directories for temporary files."""
    while directory:
        yield directory
        directory = directory.rpartition("/")[0]
    yield "/"
    yield from _PLACES


def _unused() -> str:
    return f".removed.{uuid.uuid4().hex}"


def _make(parent: int, name: str, ghost: Ghost, image_fd: int) -> int:
    """Create the file, under its old name if that is free, so that ``/proc`` shows the same as before."""
    try:
        return _make_named(parent, name, ghost, image_fd)
    except FileExistsError:
        return _make_named(parent, _unused(), ghost, image_fd)


def _make_linkable(parent: int, ghost: Ghost, image_fd: int) -> int | None:
    """Create a file that has never had a name; ``None``: the file system cannot. A removed one gets no name again."""
    if not stat.S_ISREG(ghost.mode):
        return None
    try:
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, stat.S_IRUSR | stat.S_IWUSR, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR):
            return None
        raise
    try:
        return _complete(fd, ghost, image_fd)
    finally:
        os.close(fd)


def _complete(fd: int, ghost: Ghost, image_fd: int) -> int:
    """Give a new file its contents and attributes; return another descriptor of it (``O_PATH``)."""
    _fill(fd, ghost, image_fd)
    with suppress(OSError):
        os.fchown(fd, -1, ghost.gid)
    os.fchmod(fd, ghost.mode & _PERMISSIONS)
    if ghost.times is not None:
        os.utime(fd, ns=ghost.times)
    # A file that is open for writing cannot be executed.
    return os.open(f"/proc/self/fd/{fd}", os.O_PATH | os.O_CLOEXEC)


def _make_named(parent: int, name: str, ghost: Ghost, image_fd: int) -> int:
    mode = ghost.mode & _PERMISSIONS
    place = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    if stat.S_ISREG(ghost.mode):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, mode | stat.S_IRUSR | stat.S_IWUSR, dir_fd=parent)
        try:
            try:
                return _complete(fd, ghost, image_fd)
            finally:
                os.unlink(name, dir_fd=parent)
        finally:
            os.close(fd)
    if stat.S_ISDIR(ghost.mode):
        os.mkdir(name, mode, dir_fd=parent)
        try:
            fd = os.open(name, place | os.O_DIRECTORY, dir_fd=parent)
            with suppress(OSError):
                os.chmod(name, mode, dir_fd=parent)
            return fd
        finally:
            os.rmdir(name, dir_fd=parent)
    if stat.S_ISFIFO(ghost.mode):
        os.mkfifo(name, mode, dir_fd=parent)
    elif stat.S_ISLNK(ghost.mode) and ghost.target is not None:
        os.symlink(ghost.target, name, dir_fd=parent)
    else:
        raise BadImage(f"a removed file of the type {stat.S_IFMT(ghost.mode):o} is not restored")
    try:
        if stat.S_ISFIFO(ghost.mode):
            os.chmod(name, mode, dir_fd=parent)
        return os.open(name, place, dir_fd=parent)
    finally:
        os.unlink(name, dir_fd=parent)


def _fill(fd: int, ghost: Ghost, image_fd: int) -> None:
    target_offset = ghost.begin
    if not ghost.chunks:
        _copy(image_fd, target_offset, fd, 0, os.fstat(image_fd).st_size - target_offset)
        return
    if ghost.size is None:
        raise BadImage("a removed file has no size")
    os.ftruncate(fd, ghost.size)
    end = os.fstat(image_fd).st_size
    while target_offset < end:
        length = int.from_bytes(os.pread(image_fd, 4, target_offset), "little")
        if length > _ENTRY_LIMIT or target_offset + 4 + length > end:
            raise BadImage("a record is cut short")
        facts = message(os.pread(image_fd, length, target_offset + 4))
        target_offset += 4 + length
        size, offset = integer(facts, 1), integer(facts, 2)
        if target_offset + size > end or offset + size > ghost.size:
            raise BadImage("a piece of a removed file is cut short")
        _copy(image_fd, target_offset, fd, offset, size)
        target_offset += size


def _copy(source: int, begin: int, target: int, offset: int, size: int) -> None:
    copied = 0
    while copied < size:
        data = os.pread(source, min(_CHUNK, size - copied), begin + copied)
        if not data:
            raise BadImage("a removed file is cut short")
        written = 0
        while written < len(data):
            written += os.pwrite(target, data[written:], offset + copied + written)
        copied += len(data)
