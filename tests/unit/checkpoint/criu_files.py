"""Image files in CRIU's format, made from a few facts."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from slurm_affinode.checkpoint.image.criu_images import encoded, framed

HEADER = bytes(8)
Field = tuple[int, int | bytes]


def message(*fields: Field) -> bytes:
    """Return a protobuf message."""
    return b"".join(encoded(number, value) for number, value in fields)


def image(*bodies: bytes) -> bytes:
    """Return an image file of these messages."""
    return HEADER + b"".join(map(framed, bodies))


OWNER = message((1, 0), (2, 0), (3, 0), (4, 0), (5, 0))
"""Owner of signals: none."""


def regular(
    number: int, name: str, flags: int = os.O_RDONLY, mode: int | None = None, size: int | None = None
) -> bytes:
    """Return an entry of a file with a name."""
    fields: list[Field] = [(1, number), (2, flags), (3, 0), (5, OWNER), (6, os.fsencode(name))]
    fields += [] if size is None else [(8, size)]
    fields += [] if mode is None else [(10, mode)]
    return message((1, 1), (2, number), (3, message(*fields)))


def root(number: int) -> bytes:
    """Return an entry of the root directory."""
    return regular(number, "/", mode=os.stat("/").st_mode)  # noqa: PTH116 - as elsewhere


def fifo(number: int, name: int) -> bytes:
    """Return an entry of a FIFO; ``name`` is the ID of the entry with its path."""
    return message((1, 3), (2, number), (17, message((1, number), (2, 9), (3, name))))


def terminal(number: int, name: int) -> bytes:
    """Return an entry of a terminal; ``name`` is the ID of the entry with its path."""
    return message((1, 11), (2, number), (19, message((1, number), (2, 1), (3, 2), (4, OWNER), (6, name))))


def unix(
    number: int, name: bytes = b"", *, kind: int = 1, state: int = 10, peer: int = 0, uflags: int = 0,
    extra: Sequence[Field] = (),
) -> bytes:  # fmt: skip
    """Return an entry of a UNIX socket; its inode is its ID plus 1000."""
    options = message((1, 212992), (2, 212992), (3, 0), (4, 0), (5, 0), (6, 0))
    body = message(
        (1, number), (2, 1000 + number), (3, kind), (4, state), (5, os.O_RDWR), (6, uflags), (7, 5), (8, peer),
        (9, OWNER), (10, options), (11, name), *extra,
    )  # fmt: skip
    return message((1, 5), (2, number), (16, body))


def network(number: int, kind: int, port: int = 0) -> bytes:
    """Return an entry of an IPv4 socket of this type (``SOCK_STREAM`` and so on)."""
    fields = [(1, number), (2, 1000 + number), (3, 2), (4, kind), (5, 6), (6, 10), (7, port), (8, 0), (11, 0), (12, 0)]
    return message((1, 4), (2, number), (4, message(*fields)))


def external(number: int) -> bytes:
    """Return an entry of a file that was dumped with a plugin."""
    return message((1, 16), (2, number), (15, message((1, number), (5, OWNER))))


def inotify(number: int, *watches: tuple[int, int, str | None]) -> bytes:
    """Return an entry of an inotify descriptor; a watch is device, inode and path."""
    fields: list[Field] = [(1, number), (2, 0), (4, OWNER)]
    for device, inode, path in watches:
        handle = message((1, 8), (2, 1), *([] if path is None else [(4, os.fsencode(path))]))
        watch = message((1, number), (2, inode), (3, 2), (4, 0), (5, device), (6, 1), (7, handle))
        fields.append((5, watch))
    return message((1, 8), (2, number), (13, message(*fields)))


def descriptors(*used: tuple[int, int]) -> bytes:
    """Return ``fdinfo-N.img`` with descriptors of these entries and their kinds."""
    return image(*(message((1, number), (2, 0), (3, kind), (4, fd)) for fd, (number, kind) in enumerate(used)))


def memory(program: int, *areas: bytes) -> bytes:
    """Return ``mm-PID.img``."""
    return image(message((1, 1), (12, program), *((14, area) for area in areas)))


def mapping(number: int, *, status: int = 1 << 6, protection: int = 1, flags: int | None = os.O_RDONLY) -> bytes:
    """Return a mapping of a file."""
    fields: list[Field] = [(1, 4096), (2, 8192), (3, 0), (4, number), (5, protection), (6, 2), (7, status), (8, 0)]
    return message(*fields, *([] if flags is None else [(10, flags)]))


def places(cwd: int, top: int) -> bytes:
    """Return ``fs-PID.img``."""
    return image(message((1, cwd), (2, top)))


def remap(number: int, source: int, kind: int) -> bytes:
    """Return an entry of ``remap-fpath.img``."""
    return message((1, number), (2, source), (3, kind))


def ghost(mode: int, data: bytes = b"", **facts: int) -> bytes:
    """Return ``ghost-file-N.img`` with its contents uncompressed."""
    fields: list[Field] = [(1, facts.get("uid", 0)), (2, facts.get("gid", 0)), (3, mode)]
    if stat.S_ISLNK(mode):
        return image(message(*fields, (11, data)))
    return image(message(*fields)) + data
