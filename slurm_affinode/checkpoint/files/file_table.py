"""Parser for the table of open files of an image, which also writes the table without paths. Pure functions on bytes.

CRIU writes one entry for each open file description (``files.img``, ``images/fdinfo.proto`` of CRIU 4.1). Other files
refer to the entries: descriptors (``fdinfo-N.img``), mappings and executables (``mm-PID.img``), working and root
directories (``fs-PID.img``). If the entry of a regular file has ``ext`` set, CRIU uses the inherited descriptor with
the entry's name as its key instead of opening the path (``open_path`` in ``criu/files-reg.c``).

Device files of forked workers (``device_files.py``) are entries of external files, and mappings marked as those of a
plugin. Both become entries of inherited regular files, so that a restore needs no plugin.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from slurm_affinode.checkpoint.image.criu_images import BadImage, bodies, encoded, framed, integer, message, spans

FILES, REMAPS, QUEUES = "files.img", "remap-fpath.img", "sk-queues.img"
_MAGICS = 8  # bytes
READ, WRITE, SEARCH = os.R_OK, os.W_OK, os.X_OK
_ACCESS = {os.O_RDONLY: READ, os.O_WRONLY: WRITE}
_FILE_PRIVATE, _FILE_SHARED, _MEMFD = 1 << 6, 1 << 7, 1 << 14  # status flags of a mapping, criu/include/image.h
_SYSTEM_V, _SOCKET_MAPPING = 1 << 10, 1 << 11
_BY_PLUGIN = 1 << 27
_ID_LIMIT = 1 << 32
_NAME_OF_UNNAMED = re.compile(r"(.*/)?#\d+", re.DOTALL)
LISTEN, ESTABLISHED = 10, 1
STREAM, DATAGRAM = 1, 2
EXTERNAL, _CALLBACK = 1, 4
"""Flags of a UNIX socket (``criu/sk-unix.c``). The second one is that of a socket that a plugin has accepted; CRIU
creates no peer for a datagram socket with it."""


class NotRestored(BadImage):
    """A process has a file open whose type cannot be restored."""


class Type(IntEnum):
    """Supported ``fd_types``. For others, CRIU would open paths from the image, load a program, or open a socket that
    only root may open.
    """

    REG = 1
    PIPE = 2
    FIFO = 3
    INETSK = 4
    UNIXSK = 5
    EVENTFD = 6
    EVENTPOLL = 7
    INOTIFY = 8
    SIGNALFD = 9
    TTY = 11
    NETLINKSK = 13
    EXTERNAL = 16
    TIMERFD = 17
    MEMFD = 18
    PIDFD = 20


_BODY = {Type.REG: 3, Type.INETSK: 4, Type.INOTIFY: 13, Type.EXTERNAL: 15, Type.UNIXSK: 16, Type.FIFO: 17, Type.TTY: 19}
"""Fields of ``file_entry`` that are decoded."""


@dataclass(frozen=True, slots=True)
class RegularFile:
    """An open file with a name: a regular file, directory, device or FIFO."""

    id: int
    name: str
    flags: int
    mode: int | None
    """``st_mode`` as in ``stat(2)``."""
    size: int | None

    @property
    def key(self) -> str:
        """Key of the file among the descriptors that CRIU inherits."""
        return "." if self.name == "/" else self.name[1:]

    @property
    def by_name(self) -> bool:
        """Whether it is open with ``O_PATH``, and so can be neither read nor written."""
        return bool(self.flags & os.O_PATH)

    @property
    def unnamed(self) -> bool:
        """Whether it was created without a name (``O_TMPFILE``). A restored one has the kernel's name, but no flag."""
        return self.flags & os.O_TMPFILE == os.O_TMPFILE or _NAME_OF_UNNAMED.fullmatch(self.name) is not None


@dataclass(frozen=True, slots=True)
class UnixSocket:
    """An AF_UNIX socket."""

    id: int
    ino: int
    type: int
    state: int
    flags: int
    uflags: int
    backlog: int
    peer: int
    """``ino`` of the connected socket; 0: not connected."""
    name: bytes
    """Address; empty if unbound, with a leading zero byte if abstract."""
    directory: str | None
    """Directory to which a relative name refers."""
    deleted: bool
    mode: int | None
    shutdown: int
    signals: bool
    """Whether a process receives signals from it (``F_SETOWN``)."""
    options: Mapping[int, int]
    """``sk_opts_entry``: field -> value."""

    @property
    def path(self) -> str | None:
        """Path in the file system, or ``None``."""
        # The kernel includes the terminating zero byte.
        return os.fsdecode(self.name.rstrip(b"\0")) if self.name and self.name[0] else None

    @property
    def external(self) -> bool:
        """Whether it belongs to another job or to the node, so that it is not restored."""
        return bool(self.uflags & EXTERNAL)

    @property
    def closed(self) -> bool:
        """Whether it is a connection to a service, which is restored with its other end closed."""
        return bool(self.uflags & _CALLBACK) and self.type != DATAGRAM and self.state == ESTABLISHED


@dataclass(frozen=True, slots=True)
class InotifyWatch:
    """An inotify watch."""

    inode: int
    device: int
    """Device number as in ``/proc/PID/fdinfo``."""
    path: str | None
    """Path by which CRIU opens it; ``None``: CRIU uses a file handle."""


class RemapKind(IntEnum):
    """``remap_type``: source of a file that was removed."""

    LINKED = 0
    """The file has another name, which is that of another entry."""
    CONTENTS = 1
    """The contents are in the image."""
    PROCFS = 2
    """The file is in the ``/proc`` directory of a process that has ended."""


@dataclass(frozen=True, slots=True)
class Remap:
    """An open file that was removed."""

    id: int
    kind: RemapKind
    source: int
    """Number of the ``ghost-file-N.img``, or entry of the other name."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Use of an entry by the process tree."""

    access: int = 0
    """``R_OK``, ``W_OK``, and ``X_OK`` for searching a directory."""
    program: bool = False
    """It is the executable of a process."""
    root: bool = False
    """It is the root directory of a process."""
    executable: bool = False
    """It is mapped with ``PROT_EXEC``."""


@dataclass(frozen=True, slots=True)
class FileTable:
    """``files.img``."""

    regular: Mapping[int, RegularFile]
    sockets: tuple[UnixSocket, ...]
    fifos: Mapping[int, int]
    """Entry of a FIFO -> entry of its name."""
    terminals: frozenset[int]
    """Entries with the names of terminals."""
    watches: tuple[InotifyWatch, ...]
    external: frozenset[int]
    """Entries of device files that were dumped with the plugin."""
    _data: bytes = field(repr=False)

    @classmethod
    def parse(cls, data: bytes) -> FileTable:
        """Decode the table. Raises ``BadImage``, or ``NotRestored`` for an unsupported file type."""
        regular: dict[int, RegularFile] = {}
        sockets: list[UnixSocket] = []
        fifos: dict[int, int] = {}
        terminals: set[int] = set()
        watches: list[InotifyWatch] = []
        external: set[int] = set()
        for body in bodies(data):
            kind, inner = _entry(body)
            if kind is Type.REG:
                file = _regular(inner)
                if file.id in regular:
                    raise BadImage(f"two files have the number {file.id:#x}")
                regular[file.id] = file
            elif kind is Type.UNIXSK:
                sockets.append(_socket(inner))
            elif kind is Type.INETSK:
                if _single(message(inner), 4) not in (STREAM, DATAGRAM):
                    raise NotRestored("it has a raw network socket open, which is not restored")
            elif kind is Type.FIFO:
                facts = message(inner)
                number = integer(facts, 1)
                fifos[number] = integer(facts, 3, number)
            elif kind is Type.TTY:
                facts = message(inner)
                terminals.add(integer(facts, 6, integer(facts, 1)))
            elif kind is Type.INOTIFY:
                watches += _watches(inner)
            elif kind is Type.EXTERNAL:
                external.add(integer(message(inner), 1))
        if not external.isdisjoint(regular):
            raise BadImage(f"{FILES}: a regular file has the number of an external one")
        return cls(regular, tuple(sockets), fifos, frozenset(terminals), tuple(watches), frozenset(external), data)

    def rewritten(
        self, names: Mapping[int, str], inherited: Collection[int] = (), replaced: Collection[int] = ()
    ) -> bytes:
        """Return the table with new names for files, which are inherited, and without paths of UNIX sockets.

        ``names``: entry -> new name, of regular files, and of external ones, which become regular files. ``inherited``:
        sockets that CRIU inherits, for which it neither connects nor creates a peer. ``replaced``: regular files for
        which another file is inherited, so that CRIU must not compare it.
        """
        packed = bytearray(self._data[:_MAGICS])
        for body in bodies(self._data):
            kind, inner = _entry(body)
            changes: dict[int, int | bytes | None] = {}
            if kind is Type.REG:
                file = _regular(inner)
                if file.id in names:
                    changes |= {2: file.flags & ~_NOT_KEPT, 6: os.fsencode(names[file.id]), 9: 1}
                    if file.id in replaced:
                        changes |= dict.fromkeys(_CONTENT_FIELDS)
                    body = _with(body, {_BODY[kind]: _with(inner, changes)})  # noqa: PLW2901 - the same entry
            elif kind is Type.EXTERNAL:
                facts = message(inner)
                number = integer(facts, 1)
                if number in names:
                    owner = (5, _text(facts, 5))  # the same field in both
                    fields = ((1, number), (2, os.O_RDWR), (3, 0), owner, (6, os.fsencode(names[number])), (9, 1))
                    new = b"".join(encoded(*field) for field in fields)
                    body = _with(body, {1: Type.REG, _BODY[kind]: None, _BODY[Type.REG]: new})  # noqa: PLW2901
            elif kind is Type.UNIXSK:
                sk = _socket(inner)
                if sk.path is not None or sk.directory is not None or sk.id in inherited:
                    # Keep an abstract name that CRIU binds itself.
                    name = sk.name if sk.path is None and sk.id not in inherited else b""
                    changes |= {11: name, 13: None, 14: None, 15: None}
                if sk.id in inherited:
                    changes |= {6: sk.uflags | _CALLBACK, 8: 0}
                if changes:
                    body = _with(body, {_BODY[kind]: _with(inner, changes)})  # noqa: PLW2901
            packed += framed(body)
        return bytes(packed)


_NOT_KEPT = os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)
"""Flags for the moment of opening. The kernel reports at most the first and the last for an open file."""
_CONTENT_FIELDS = (8, 10, 11, 12, 13, 14)
"""Fields of ``reg_file_entry``: size, mode, build ID and checksums."""


def with_regular_files(data: bytes, external: Collection[int]) -> bytes:
    """Return a ``fdinfo-N.img`` whose descriptors of external files are those of regular files."""
    packed = bytearray(data[:_MAGICS])
    for body in bodies(data):
        facts = message(body)
        if integer(facts, 3) == Type.EXTERNAL and integer(facts, 1) in external:
            body = _with(body, {3: Type.REG})  # noqa: PLW2901 - the same entry
        packed += framed(body)
    return bytes(packed)


def remaps(data: bytes) -> list[Remap]:
    """Decode ``remap-fpath.img``. Raises ``BadImage``."""
    by_id: dict[int, Remap] = {}
    for body in bodies(data):
        facts = message(body)
        number, source, kind = integer(facts, 1), integer(facts, 2), facts.get(3, [None])[-1]
        if not isinstance(kind, int) or kind not in list(RemapKind):
            raise BadImage(f"{REMAPS}: a removed file of unknown kind")
        if number in by_id:
            raise BadImage(f"{REMAPS}: two entries for the file {number:#x}")
        by_id[number] = Remap(number, RemapKind(kind), source)
    return list(by_id.values())


def packets(data: bytes) -> Iterator[int]:
    """Yield the socket of each queued packet in ``sk-queues.img``. Raises ``BadImage``."""
    offset = _MAGICS
    while offset < len(data):
        length = int.from_bytes(data[offset : offset + 4], "little")
        facts = message(data[offset + 4 : offset + 4 + length])
        yield integer(facts, 1)
        offset += 4 + length + integer(facts, 2)
    if offset > len(data):
        raise BadImage(f"{QUEUES}: a record is cut short")


def needs(table: FileTable, *, descriptors: Collection[bytes], memories: Collection[bytes],
          places: Collection[bytes]) -> dict[int, Needs]:  # fmt: skip
    """Return the use of each entry with a name; unused entries are left out. Raises ``BadImage``.

    ``descriptors``, ``memories``, ``places``: contents of all ``fdinfo-N.img``, ``mm-PID.img``, ``fs-PID.img``.
    """
    by_file: dict[int, Needs] = {}

    def need(number: int, access: int = 0, *, program: bool = False, root: bool = False, run: bool = False) -> None:
        if number not in table.regular:
            raise BadImage(f"{FILES}: there is no file {number:#x}")
        had = by_file.get(number, Needs())
        by_file[number] = Needs(
            had.access | access, had.program or program, had.root or root, had.executable or run
        )  # fmt: skip

    for data in descriptors:
        for body in bodies(data):
            facts = message(body)
            number, kind = integer(facts, 1), integer(facts, 3)
            if kind == Type.REG and number in table.regular:
                need(number, _access_of(table.regular[number]))
            elif kind == Type.FIFO and number in table.fifos:
                name = table.fifos[number]
                need(name)
                need(name, _access_of(table.regular[name]))
            elif kind == Type.REG or (kind == Type.EXTERNAL and number not in table.external):
                raise BadImage(f"{FILES}: there is no file {number:#x}")
    for data in memories:
        for body in bodies(data):
            facts = message(body)
            need(integer(facts, 12), program=True)
            for area in facts.get(14, []):
                if not isinstance(area, bytes):
                    raise BadImage("a mapping is not a message")
                vma = message(area)
                status = integer(vma, 7)
                if status & (_SYSTEM_V | _SOCKET_MAPPING):
                    raise BadImage("a mapping of System V shared memory, or of a socket, is not restored")
                if status & (_FILE_PRIVATE | _FILE_SHARED) and not status & (_MEMFD | _BY_PLUGIN):
                    access, protection = _access_of_mapping(vma), integer(vma, 5)
                    need(integer(vma, 4), access, run=bool(protection & 4))
    for data in places:
        for body in bodies(data):
            facts = message(body)
            need(integer(facts, 1), SEARCH)
            need(integer(facts, 2), SEARCH, root=True)
    return by_file


def device_mappings(memories: Collection[bytes]) -> set[int]:
    """Return the entries of device files that are mapped and were dumped with the plugin. Raises ``BadImage``."""
    identifiers = set()
    for data in memories:
        for body in bodies(data):
            for area in message(body).get(14, []):
                if not isinstance(area, bytes):
                    raise BadImage("a mapping is not a message")
                vma = message(area)
                if integer(vma, 7) & _BY_PLUGIN:
                    identifiers.add(integer(vma, 4))
    return identifiers


def access_of(flags: int) -> int:
    """Return the access (``R_OK``, ``W_OK``) for the flags of an open file. Access mode 3 (ioctl only) needs both."""
    return _ACCESS.get(flags & os.O_ACCMODE, READ | WRITE)


def _access_of(file: RegularFile) -> int:
    return 0 if file.by_name else access_of(file.flags)


def _access_of_mapping(area: Mapping[int, list[int | bytes]]) -> int:
    """Return the access of the descriptor that CRIU maps from. If the image does not say, guess it as CRIU does."""
    if 10 in area:
        return access_of(integer(dict(area), 10))
    shared = integer(dict(area), 7) & _FILE_SHARED and integer(dict(area), 5) & 2
    return READ | WRITE if shared else READ


def _entry(body: bytes) -> tuple[Type, bytes]:
    """Return the type and contents of a ``file_entry``. The contents are empty for types that are not decoded."""
    facts = message(body)
    if any(len(values) > 1 for values in facts.values()):
        raise BadImage(f"{FILES}: an entry has a field twice")
    number = integer(facts, 1)
    if number not in list(Type):
        raise NotRestored(
            f"it has a file of the kind {number} open (images/fdinfo.proto of CRIU), which is not restored"
        )
    kind = Type(number)
    if kind not in _BODY:
        return kind, b""
    inner = facts.get(_BODY[kind], [None])[0]
    if not isinstance(inner, bytes):
        raise BadImage(f"{FILES}: an entry of the kind {number} is empty")
    if integer(facts, 2) != _single(message(inner), 1):
        raise BadImage(f"{FILES}: the numbers of an entry differ")
    return kind, inner


def _single(facts: dict[int, list[int | bytes]], key: int, default: int | None = None) -> int:
    """Return an integer field that must not occur twice."""
    if len(facts.get(key, ())) > 1:
        raise BadImage(f"{FILES}: field {key} is there twice")
    return integer(facts, key, default)


def _text(facts: dict[int, list[int | bytes]], key: int) -> bytes:
    values = facts.get(key, [])
    if len(values) != 1 or not isinstance(values[0], bytes):
        raise BadImage(f"{FILES}: field {key} is missing, or there twice")
    return values[0]


def _regular(body: bytes) -> RegularFile:
    facts = message(body)
    name = _text(facts, 6)
    if not name.startswith(b"/") or b"\0" in name:
        raise BadImage(f"{FILES}: {name!r} is not a path")
    number = _single(facts, 1)
    mode = _single(facts, 10) if 10 in facts else None
    size = _single(facts, 8) if 8 in facts else None
    if not 0 <= number < _ID_LIMIT:
        raise BadImage(f"{FILES}: {number} is not the number of a file")
    if _single(facts, 9, 0):
        raise BadImage(f"{FILES}: {name!r} is to be had from somewhere else")
    return RegularFile(number, os.fsdecode(name), _single(facts, 2), mode, size)


def _socket(body: bytes) -> UnixSocket:
    facts = message(body)
    mode, directory = None, None
    if 13 in facts:
        mode = _single(message(_text(facts, 13)), 1)
    if 14 in facts:
        directory = os.fsdecode(_text(facts, 14))
    if directory is not None and "\0" in directory:
        raise BadImage(f"{FILES}: {directory!r} is not a path")
    name = _text(facts, 11)
    if name and name[0] and b"\0" in name.rstrip(b"\0"):
        raise BadImage(f"{FILES}: {name!r} is not a path")
    owner = message(_text(facts, 9))
    options = message(_text(facts, 10))
    return UnixSocket(
        _single(facts, 1), _single(facts, 2), _single(facts, 3), _single(facts, 4), _single(facts, 5),
        _single(facts, 6), _single(facts, 7), _single(facts, 8), name, directory, bool(_single(facts, 15, 0)),
        mode, _single(facts, 12, 0), bool(_single(owner, 5, 0)),
        {key: values[-1] for key, values in options.items() if isinstance(values[-1], int)},
    )  # fmt: skip


def _watches(body: bytes) -> Iterator[InotifyWatch]:
    for watch in message(body).get(5, []):
        if not isinstance(watch, bytes):
            raise BadImage(f"{FILES}: a watch is not a message")
        facts = message(watch)
        handle = message(_text(facts, 7))
        path = os.fsdecode(_text(handle, 4)) if 4 in handle else None
        if path is not None and (not path.startswith("/") or "\0" in path):
            raise BadImage(f"{FILES}: {path!r} is not a path")
        yield InotifyWatch(_single(facts, 2), _single(facts, 5), path)


def _with(body: bytes, changes: Mapping[int, int | bytes | None]) -> bytes:
    """Return a message with these fields replaced; ``None`` removes a field."""
    unchanged = b"".join(body[begin:end] for number, _, begin, end in spans(body) if number not in changes)
    return unchanged + b"".join(encoded(number, value) for number, value in changes.items() if value is not None)
