"""Names of files that are open while their own name is gone, outside of the node's own places.

Of a file that was removed while the tree has it open, and that has another name still or is on NFS, CRIU would make a
name in the same directory (``--link-remap``), as root and by a path that a user can change meanwhile: a link to a
user's file in any directory of root's. So it is given a name before the dump, with the user's rights: that by which
``/proc`` knows it, ``NAME (deleted)``, which CRIU finds and takes for the file's own (``check_path_remap`` in
``criu/files-reg.c``); on NFS ``link_remap.INODE``, in place of the name that the kernel has given it.

Jobs that began alike choose the same names. Therefore the name is set aside with the dump, under one that no other job
chooses, and is there for the restore alone: of two that are restored at once the second one waits. Images of older
releases have CRIU's names, ``link_remap.N``.

What is done here is done with the user's rights, and given up where the file system of such a file does not answer.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, TypeVar

from slurm_affinode import jsonvalues, pinned
from slurm_affinode.checkpoint import rootdir
from slurm_affinode.checkpoint.asuser import MOST_ID, User, as_user, user_of
from slurm_affinode.checkpoint.images import DirectoryStore
from slurm_affinode.checkpoint.interface import CheckpointError, Image, ImageDamaged, RestoreFailed
from slurm_affinode.patience import Patience
from slurm_affinode.pinned import Id, Process

T = TypeVar("T")
INDEX = "remaps.json"
REMAP = "link_remap."
ASIDE = ".link_remap."
WAIT_S = 120.0
"""For another job's restore to take its name away."""
_ANSWER_S = 30.0
"""For the file systems of the files of one job."""
_LIMIT = 16 << 20
_MOST_AHEAD = 1000
"""A journal has to hold them."""
_PAUSE_S = 0.1
_DELETED = " (deleted)"
_NFS = ".nfs"
_NFS_MAGIC = 0x6969


@dataclass(frozen=True, slots=True)
class Remap:
    """One of them."""

    directory: str
    name: str
    """CRIU's."""
    aside: str
    inode: int


def give_names(tree: Collection[Id], owner: tuple[int, int]) -> None:
    """Before a dump: give names to files that have lost theirs. Never raises: CRIU says what it cannot dump.

    ``owner``: uid and gid of the job.
    """

    def give(root: int) -> None:
        for directory, own, fd, inode in opened:
            with suppress(OSError), _opened(root, directory) as parent:
                if own.endswith(_DELETED):
                    os.link(f"/proc/self/fd/{fd}", own, dst_dir_fd=parent, follow_symlinks=True)
                elif rootdir.filesystem_type(parent) == _NFS_MAGIC:
                    os.rename(own, f"{REMAP}{inode}", src_dir_fd=parent, dst_dir_fd=parent)

    def open_all() -> list[tuple[str, str, int, int]]:
        found = []
        for process, one in _nameless(tree):
            with suppress(OSError):
                fd = process.open(one.link, os.O_PATH)
                # By now it may lead to another file.
                if os.path.samestat(os.fstat(fd), one.facts):
                    found.append((one.directory, one.own, fd, one.facts.st_ino))
                else:
                    os.close(fd)
        return found

    opened: list[tuple[str, str, int, int]] = []
    with suppress(OSError):
        opened = _patiently(open_all)
        if opened:
            _below(next(iter(tree)), owner, give)
    for _, _, fd, _ in opened:
        os.close(fd)


def set_aside(tree: Collection[Id], directory_fd: int, owner: tuple[int, int], *, but: Sequence[str] = ()) -> None:
    """After a dump: rename what was named for it, and write that down beside the image. The tree is stopped.

    A file of which that cannot be done (it is another user's) keeps its name. ``owner``: uid and gid of the job.
    ``but``: directories that are left alone, with all below them.
    """

    def find() -> dict[tuple[str, str], Remap]:
        return {
            (one.directory, name): Remap(one.directory, name, _aside(process, one.facts), one.facts.st_ino)
            for process, one in _nameless(tree)
            if not f"{one.directory}/".startswith(tuple(f"{place}/" for place in but))
            for name in _names(process, one)
            if not name.startswith(ASIDE)
        }

    found = _patiently(find)
    if not found:
        return
    done: list[Remap] = []

    def rename(root: int) -> None:
        done.extend(one for one in found.values() if _moved(root, one))

    _below(next(iter(tree)), owner, rename)
    index = {"uid": owner[0], "gid": owner[1], "files": [asdict(one) for one in done]}
    rootdir.write(directory_fd, INDEX, json.dumps(index).encode())


def put_in_place(init: Id, directory_fd: int, *, wait_s: float = WAIT_S) -> None:
    """Before a restore: CRIU's names, beside ours. Raises ``RestoreFailed``."""
    owner, remaps = _read(directory_fd)
    deadline = time.monotonic() + wait_s

    def make(root: int) -> None:
        for one in remaps:
            with _opened(root, one.directory) as parent:
                while not _linked(parent, one):
                    if time.monotonic() >= deadline:
                        raise OSError(errno.EEXIST, "is there already, and is another one", one.name)
                    time.sleep(_PAUSE_S)

    if remaps:
        try:
            _below(init, owner, make, limit_s=wait_s + _ANSWER_S)
        except OSError as error:
            name = error.filename or remaps[0].name
            raise RestoreFailed(f"a removed file cannot be put back: {name}: {error.strerror}") from None


def settle(init: Id, directory_fd: int) -> None:
    """After CRIU: its names go, where it has not taken them away itself. Never raises."""
    _take_away(init, directory_fd, lambda one: one.name)


def gone(store: DirectoryStore, image: Image, init: Id | None = None) -> None:
    """Its job is restored, or over: our names go, as far as a process (this one, where none is given) sees them.

    Never raises.
    """
    with suppress(OSError, CheckpointError):
        directory_fd = store.open_criu(image)
        try:
            # Its list is not verified: what it says of the owner need not be so.
            owner = image.manifest.uid, image.manifest.gid
            _take_away(init, directory_fd, lambda one: one.aside, owner)
        finally:
            os.close(directory_fd)


def forget(tree: Collection[Id], owner: tuple[int, int]) -> None:
    """Before the tree goes on where it is: what a dump has named, by CRIU or by us, goes. Never raises."""

    def remove(root: int) -> None:
        for directory, name, inode in found:
            with suppress(OSError), _opened(root, directory) as parent:
                _remove(parent, name, inode)

    def find() -> list[tuple[str, str, int]]:
        return [
            (one.directory, name, one.facts.st_ino)
            for process, one in _nameless(tree)
            for name in _names(process, one)
            if not name.startswith(ASIDE) or name == _aside(process, one.facts)
        ]

    with suppress(OSError):
        found = _patiently(find)
        if found:
            _below(next(iter(tree)), owner, remove)


def ahead(tree: Collection[Id]) -> list[dict[str, Any]]:
    """Before a dump: what it may name, for ``forget_lost``. Never raises."""

    def find() -> list[dict[str, Any]]:
        return [
            {"directory": one.directory, "aside": _aside(process, one.facts), "inode": one.facts.st_ino}
            for process, one in islice(_nameless(tree), _MOST_AHEAD)
        ]

    with suppress(OSError):
        return _patiently(find)
    return []


def forget_lost(named: Sequence[Mapping[str, Any]], owner: tuple[int, int]) -> None:
    """As ``forget``, where the tree is gone, with its node perhaps. Never raises."""

    def remove(root: int) -> None:
        for one in named:
            with suppress(OSError), _opened(root, one["directory"]) as parent:
                for name in rootdir.names(parent):
                    if name.startswith(REMAP) or name.endswith(_DELETED) or name == one["aside"]:
                        _remove(parent, name, one["inode"])

    with suppress(OSError):
        if named:
            _below(None, owner, remove)


def _read(directory_fd: int) -> tuple[tuple[int, int], list[Remap]]:
    """Uid and gid of the job, and what was set aside. Raises ``RestoreFailed``."""
    if INDEX not in rootdir.names(directory_fd):
        return (0, 0), []
    try:
        return _parsed(rootdir.read(directory_fd, INDEX, owner=os.geteuid(), limit=_LIMIT))
    except ImageDamaged as error:
        raise RestoreFailed(f"the image's list of removed files cannot be read: {error}") from None


def names_of(index: bytes) -> set[str]:
    """Paths of the names that the index of an image has. Raises ``RestoreFailed``."""
    return {f"{one.directory}/{one.name}" for one in _parsed(index)[1]}


def _parsed(data: bytes) -> tuple[tuple[int, int], list[Remap]]:
    try:
        index = jsonvalues.table(jsonvalues.loads(data))
        found = [_listed(one) for one in jsonvalues.typed(list, index["files"])]
        return (jsonvalues.whole(index["uid"], MOST_ID), jsonvalues.whole(index["gid"], MOST_ID)), found
    except (ValueError, KeyError) as error:
        raise RestoreFailed(f"the image's list of removed files cannot be read: {error}") from None


def _listed(value: object) -> Remap:
    """A file of the index. Raises ``ValueError``."""
    one = jsonvalues.record(Remap, value)
    if any("/" in name or "\0" in name for name in (one.name, one.aside)) or "\0" in one.directory:
        raise ValueError(f"{one.name!r:.60} is not a name in a directory")
    return one


# ---


def _take_away(
    init: Id | None, directory_fd: int, which: Callable[[Remap], str], known: tuple[int, int] | None = None
) -> None:
    def remove(root: int) -> None:
        for one in remaps:
            with suppress(OSError), _opened(root, one.directory) as parent:
                _remove(parent, which(one), one.inode)

    with suppress(OSError, RestoreFailed):
        owner, remaps = _read(directory_fd)
        if remaps:
            _below(init, known or owner, remove)


@dataclass(frozen=True, slots=True)
class _Nameless:
    """A file that a process has open, and whose name is gone."""

    link: str
    """Below the process's directory in ``/proc``."""
    directory: str
    own: str
    """The name by which ``/proc`` knows it."""
    facts: os.stat_result


def _nameless(tree: Collection[Id]) -> Iterator[tuple[Process, _Nameless]]:
    """Such files of all processes, each of their names once."""
    seen: set[tuple[str, str, int, int]] = set()
    for one in tree:
        with suppress(OSError), Process(one.pid, started=one.started) as process:
            for file in _nameless_of(process):
                key = (file.directory, file.own, file.facts.st_dev, file.facts.st_ino)
                if key not in seen:
                    seen.add(key)
                    yield process, file


def _nameless_of(process: Process) -> Iterator[_Nameless]:
    for link in (*_listed_in(process, "fd"), *_listed_in(process, "map_files")):
        with suppress(OSError):
            path = process.link(link)  # "pipe:[1]" is no path
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


def _names(process: Process, file: _Nameless) -> list[str]:
    """Those in its directory that a dump may have made."""
    ours = {file.own} if file.own.endswith(_DELETED) else set()
    found = []
    with suppress(OSError):
        root = process.open("root", os.O_PATH | os.O_DIRECTORY)
        try:
            with _opened(root, file.directory) as parent:
                for name in rootdir.names(parent):
                    if name.startswith((REMAP, ASIDE)) or name in ours:
                        with suppress(FileNotFoundError):
                            if os.path.samestat(os.stat(name, dir_fd=parent, follow_symlinks=False), file.facts):
                                found.append(name)
        finally:
            os.close(root)
    return found


def _aside(process: Process, facts: os.stat_result) -> str:
    """No other file in the directory has its inode number, and no other run the rest of it."""
    return f"{ASIDE}{facts.st_ino}.{_run_of(process)}"


def _run_of(process: Process) -> str:
    """The PID namespace of a process, among all that there were, on every node: the number alone is used again as soon
    as a job sleeps. Two jobs may well have one file open: a library that was replaced, and has a hard link elsewhere.
    """
    space, began = process.namespace("pid"), process.started
    if space is None:
        raise pinned.ProcessGoneError(errno.ESRCH, "it has ended", str(process.pid))
    for above in pinned.ancestors(process):
        if above.namespace("pid") != space:
            break
        began = above.started
    boot = (pinned.PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return f"{space[1]}.{began}.{boot}"


def _patiently(call: Callable[[], T], limit_s: float = _ANSWER_S) -> T:
    """Raises ``NoAnswerError``; the call then goes on by itself, and uses no descriptor but its own."""
    return Patience(None, look_s=limit_s)(call)


def _below(init: Id | None, owner: tuple[int, int], call: Callable[[int], None], *, limit_s: float = _ANSWER_S) -> None:
    """``call``, as the user, with the root that a process sees, or this one. ``owner``: uid and gid."""

    def there() -> None:
        if init is None:
            user, root = User(*owner), os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        else:
            user = user_of(init.pid, *owner, started=init.started)
            with Process(init.pid, started=init.started) as process:
                root = process.open("root", os.O_PATH | os.O_DIRECTORY)
        try:
            as_user(user, lambda: call(root))
        finally:
            os.close(root)

    _patiently(there, limit_s)


@contextmanager
def _opened(root: int, path: str) -> Iterator[int]:
    fd = rootdir.open_below(root, path or "/")
    try:
        yield fd
    finally:
        os.close(fd)


def _moved(root: int, one: Remap) -> bool:
    with suppress(OSError), _opened(root, one.directory) as parent:
        with suppress(FileExistsError):  # of a dump that was taken back, or it is another's: looked at below
            os.link(one.name, one.aside, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
        if _inode(parent, one.aside) == one.inode:
            os.unlink(one.name, dir_fd=parent)
            return True
    return False


def _linked(parent: int, one: Remap) -> bool:
    """Whether CRIU's name is there now; false where another job's is."""
    try:
        os.link(one.aside, one.name, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
    except FileExistsError:
        return _inode(parent, one.name) == one.inode
    except FileNotFoundError:
        pass  # its user has taken it away: CRIU says what is missing
    return True


def _remove(parent: int, name: str, inode: int) -> None:
    if _inode(parent, name) == inode:
        os.unlink(name, dir_fd=parent)


def _inode(parent: int, name: str) -> int | None:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return None
