"""Tables of a published trace: CSV files, plain or compressed, or members of tar and zip archives.

Members are read into memory and never written to disk, so a member's path can lead nowhere. Links and devices in an
archive are skipped; sizes are limited, so that a small archive which unpacks to a huge one ends in an error.
"""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from slurm_affinode.errors import InputError

MEMBER_LIMIT_BYTES = 2 << 30
"""The largest table that is read. The largest published one of the traces read here is 14 MB."""
ARCHIVE_LIMIT_BYTES = 16 << 30
"""The most that one archive may unpack to."""

_TAR_GZ = (".tar.gz", ".tgz")
_TAR_XZ = (".tar.xz", ".txz")
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError)


@dataclass(frozen=True, slots=True)
class Table:
    """One CSV table as found: its name without ``.csv``, its bytes, and where it came from."""

    name: str
    data: bytes
    where: str


class _TooLargeError(Exception):
    """An archive unpacks to more than its limit."""


class _Limited(io.RawIOBase):
    """A reader that raises ``_TooLargeError`` once more than ``limit`` bytes were read through it."""

    def __init__(self, source: IO[bytes], limit: int) -> None:
        super().__init__()
        self._source = source
        self._left = limit

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read into ``buffer``; see the class."""
        chunk = self._source.read(len(buffer))
        self._left -= len(chunk)
        if self._left < 0:
            raise _TooLargeError
        buffer[: len(chunk)] = chunk
        return len(chunk)


def find_tables(
    paths: Iterable[Path],
    wanted: Callable[[str], bool],
    *,
    member_limit: int = MEMBER_LIMIT_BYTES,
    archive_limit: int = ARCHIVE_LIMIT_BYTES,
    on_file: Callable[[Path], None] = lambda _: None,
) -> Iterator[Table]:
    """Yield every table whose name (without ``.csv``, any case kept) is ``wanted``.

    ``paths`` are directories, searched with their subdirectories, and files. ``on_file`` is told of each file before
    it is read. Raises ``InputError`` for a path that does not exist or cannot be read, a damaged archive, and a table
    or an archive over its limit.
    """
    for path in paths:
        for file in _files(path):
            on_file(file)
            yield from _tables_of(file, wanted, member_limit, archive_limit)


def _files(path: Path) -> list[Path]:
    """The file itself, or the readable kinds of file below the directory, in the order of their names."""
    try:
        if not path.is_dir():
            if not path.exists():
                raise InputError("no such file or directory", where=str(path))
            if _kind(path.name) is None:
                raise InputError("neither a CSV file nor an archive of them", where=str(path))
            return [path]
        found = [file for file in path.rglob("*") if _kind(file.name) and not _is_sidecar(file.name) and file.is_file()]
    except OSError as error:
        raise InputError(f"cannot read it: {error.strerror}", where=str(path)) from error
    return sorted(found)


def _kind(name: str) -> str | None:
    lower = name.lower()
    if lower.endswith(_TAR_GZ):
        return "tar.gz"
    if lower.endswith(_TAR_XZ):
        return "tar.xz"
    for ending in (".tar", ".zip", ".csv", ".csv.gz"):
        if lower.endswith(ending):
            return ending[1:]
    return None


def _is_sidecar(name: str) -> bool:
    """True for files that macOS adds beside each file (``._name``, ``__MACOSX/``): attributes, never data."""
    path = PurePosixPath(name)
    return path.name.startswith("._") or "__MACOSX" in path.parts


def _table_name(member: str) -> str | None:
    """Name of the table in the member ``a/b/name.csv``; None where the member is no table."""
    name = PurePosixPath(member).name
    if _is_sidecar(member) or not name.lower().endswith(".csv"):
        return None
    return name[: -len(".csv")]


def _tables_of(file: Path, wanted: Callable[[str], bool], member_limit: int, archive_limit: int) -> Iterator[Table]:
    kind = _kind(file.name)
    where = str(file)
    try:
        if kind in ("csv", "csv.gz"):
            name = file.name[: -len(f".{kind}")]
            if wanted(name):
                with _open(file, kind) as source:
                    yield Table(name, _read_limited(source, member_limit, where), where)
        elif kind == "zip":
            yield from _zip_tables(file, wanted, member_limit)
        else:
            yield from _tar_tables(file, kind, wanted, member_limit, archive_limit)
    except _DAMAGE as error:
        reason = str(error) or type(error).__name__
        raise InputError(
            f"damaged or cut short ({reason})", where=where, hint="fetch the archive again and compare its size"
        ) from error
    except _TooLargeError as error:
        raise InputError(f"unpacks to more than {_size(archive_limit)}", where=where) from error
    except OSError as error:
        raise InputError(f"cannot read it: {error.strerror or error}", where=where) from error


def _tar_tables(
    file: Path, kind: str | None, wanted: Callable[[str], bool], member_limit: int, archive_limit: int
) -> Iterator[Table]:
    with _open(file, kind) as unpacked:
        limited = io.BufferedReader(_Limited(unpacked, archive_limit), 1 << 20)
        with tarfile.open(fileobj=limited, mode="r|") as archive:
            for member in archive:
                name = _table_name(member.name)
                if name is None or not member.isfile() or not wanted(name):
                    continue
                where = f"{file}: {member.name}"
                if member.size > member_limit:
                    raise InputError(f"larger than {_size(member_limit)}", where=where)
                content = archive.extractfile(member)
                data = content.read() if content is not None else b""
                if len(data) != member.size:
                    raise EOFError(f"{member.name} ends after {len(data)} of {member.size} bytes")
                yield Table(name, data, where)
        while limited.read(1 << 20):  # to the end of the stream, where the checksum is compared
            pass


def _open(file: Path, kind: str | None) -> IO[bytes]:
    if kind in ("tar.gz", "csv.gz"):
        return gzip.open(file, "rb")  # type: ignore[return-value]
    if kind == "tar.xz":
        return lzma.open(file, "rb")
    return file.open("rb")


def _zip_tables(file: Path, wanted: Callable[[str], bool], member_limit: int) -> Iterator[Table]:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            name = _table_name(member.filename)
            if name is None or not wanted(name):
                continue
            where = f"{file}: {member.filename}"
            if member.flag_bits & 1:
                raise InputError("is encrypted", where=where)
            with archive.open(member) as content:
                yield Table(name, _read_limited(content, member_limit, where), where)


def _read_limited(source: IO[bytes], limit: int, where: str) -> bytes:
    data = source.read(limit + 1)
    if len(data) > limit:
        raise InputError(f"larger than {_size(limit)}", where=where)
    return data


def _size(count: int) -> str:
    return f"{count / (1 << 30):g} GiB" if count >= 1 << 30 else f"{count:,} bytes"
