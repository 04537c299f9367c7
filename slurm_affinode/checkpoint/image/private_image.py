"""A private copy of the small files of a checkpoint image, so that CRIU reads exactly the bytes that were verified.

Every file but the pages is read once, digested on the way, and written to a directory that only root may enter, on a
file system in memory. CRIU and the restore read that copy.

Pages are too large for it. On a file system of this node where only root can change them, CRIU reads them in place. If
other machines can write to the file system, CRIU's reads would be separate from those that verify the pages: so the
pages that CRIU reads itself are copied too, and compared while the pages are verified.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.image import digest
from slurm_affinode.checkpoint.image.criu_images import BadImage, read_image
from slurm_affinode.checkpoint.image.memory_map import TreeMemory
from slurm_affinode.checkpoint.image.writer import CRIU
from slurm_affinode.checkpoint.interface import (
    CheckpointError,
    ImageDamaged,
    ImageUnreadable,
    Pages,
    RestoreFailed,
    RestoreInterrupted,
    Take,
    restore_failure,
)
from slurm_affinode.checkpoint.work_directory import work_directory

_PAGES = re.compile(r"pages-[^/]+\.img")
_CONTENT_PREFIXES = ("ghost-file-", "local-")
"""Files of a size chosen by the job, which CRIU does not read."""
_LARGE = 4 << 20
_CHUNK = 1 << 20
_PLACES = ("/run", "/dev/shm")  # noqa: S108 - a directory of root's own is made there
_MARGIN = 16 << 20
_TMPFS = 0x01021994
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class PrivateImage:
    """The private copy for one restore."""

    def __init__(self, path: Path, fd: int, source_fd: int, sizes: Mapping[str, int], *, shared: bool) -> None:
        """``path``, ``fd``: the private directory. ``source_fd``: that of the store; ``sizes``: of its files."""
        self.path, self.fd, self.source_fd, self.shared = path, fd, source_fd, shared
        self.pages = {name: size for name, size in sizes.items() if _PAGES.fullmatch(name)}
        """Sizes of the pages files by name."""
        self._opened: dict[str, int] = {}
        self._copied_ranges: dict[str, list[tuple[int, int]]] = {}
        self._changed: str | None = None

    def read(self, name: str) -> bytes:
        """Read a file. Raises ``BadImage``."""
        return read_image(self.fd, name)

    def names(self) -> list[str]:
        """Return the names of its files, without pages and large files."""
        return [name for name in root_directory.names(self.fd) if not _PAGES.fullmatch(name)]

    def replace(self, name: str, data: bytes | None) -> None:
        """Replace a file for CRIU; ``None`` removes it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)
        if data is not None:
            _write(self.fd, name, [memoryview(data)])

    def open(self, name: str) -> int:
        """Open a file for ``pread``. It is closed with the image. Raises ``BadImage`` if it does not exist."""
        if name not in self._opened:
            try:
                self._opened[name] = os.open(name, _FILE, dir_fd=self.fd)
            except OSError as error:
                raise BadImage(f"{name}: {error.strerror}") from None
        return self._opened[name]

    def keep(self, name: str, fd: int) -> None:
        """Take ownership of a descriptor, which ``open`` then returns."""
        self._opened[name] = fd

    def close(self) -> None:
        """Close the files."""
        while self._opened:
            os.close(self._opened.popitem()[1])

    # --- pages

    def provide_pages(self, memories: Sequence[TreeMemory]) -> None:
        """Provide the pages that CRIU places itself: all but those of ``memories``.

        Raises ``RestoreFailed`` if there is no room for a copy of them.
        """
        for name in self.pages:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)
        if not self.shared:
            for name in self.pages:
                self._link(name)
            return
        filled = {memory.file: memory for memory in memories}
        self._copied_ranges = {name: _gaps(size, filled.get(name)) for name, size in self.pages.items()}
        self._changed = None
        needed = sum(length for ranges in self._copied_ranges.values() for _, length in ranges)
        if needed > _room(self.path):
            raise RestoreInterrupted(
                f"{self.path.parent}: there is no room for {needed} bytes of memory that CRIU has to read from a "
                "private copy, as the image is in the shared store and no tier of this node has room for it"
            )
        for name, ranges in self._copied_ranges.items():
            self._copy(name, ranges)

    def _link(self, name: str) -> None:
        """Create a symbolic link to a pages file that works in any namespace.

        It leads up to the root of this process's own file systems first, so no part of it is resolved below a job's
        root.
        """
        target = f"{os.readlink(f'/proc/self/fd/{self.source_fd}')}/{name}"  # noqa: PTH115 - of a descriptor
        above = "../" * (len(self.path.resolve().parts) - 1)
        os.symlink(above + target.lstrip("/"), name, dir_fd=self.fd)
        try:
            present = os.stat(name, dir_fd=self.fd)
            status = os.stat(name, dir_fd=self.source_fd, follow_symlinks=False)
        except OSError as error:
            raise restore_failure(f"{name}: cannot be reached", error) from None
        if not stat.S_ISREG(status.st_mode) or not os.path.samestat(present, status):
            raise RestoreFailed(f"{name}: is another file than that of the image")

    def _copy(self, name: str, ranges: Sequence[tuple[int, int]]) -> None:
        source, target = (
            _opened(self.source_fd, name),
            os.open(name, _CREATE_FLAGS, root_directory.FILE_MODE, dir_fd=self.fd),
        )
        try:
            os.ftruncate(target, self.pages[name])
            for begin, length in ranges:
                for offset in range(begin, begin + length, _CHUNK):
                    data = os.pread(source, min(_CHUNK, begin + length - offset), offset)
                    if not data:
                        raise ImageDamaged(f"{CRIU}/{name}: is not complete")
                    _write_at(target, memoryview(data), offset)
        except OSError as error:
            raise restore_failure(f"{name}: cannot be copied", error) from None
        finally:
            os.close(source)
            os.close(target)

    def compare(self, then: Take | None) -> Take | None:
        """Return a function for pages as they are verified: it compares them with CRIU's copy and calls ``then``."""
        if not self.shared:
            return then
        for name, ranges in self._copied_ranges.items():
            if ranges:
                self.open(name)  # now, as several threads read it

        def take(name: str, offset: int, view: memoryview) -> None:
            self._compare(name, offset, view)
            if then is not None:
                then(name, offset, view)

        return take

    def _compare(self, name: str, offset: int, view: memoryview) -> None:
        end = offset + len(view)
        for begin, length in self._copied_ranges.get(name, ()):
            first, last = max(offset, begin), min(end, begin + length)
            if first < last:
                try:
                    same = os.pread(self._opened[name], last - first, first) == view[first - offset : last - offset]
                except OSError:
                    same = False
                if not same:
                    self._changed = name

    def check_compared(self) -> None:
        """Check the comparison after all pages are verified. Raises ``ImageDamaged``."""
        if self._changed is not None:
            raise ImageDamaged(f"{CRIU}/{self._changed}: its contents change while it is read")


@contextmanager
def private_image(source_fd: int, pages: Pages, *, shared: bool) -> Iterator[PrivateImage]:
    """Copy a checkpoint image. ``source_fd``: CRIU's directory in the store.

    ``shared``: other machines may write to the store. Raises ``ImageDamaged`` if a file does not match the manifest,
    and ``BadImage`` if one cannot be read.
    """
    sizes = _sizes(source_fd)
    large = [name for name, size in sizes.items() if name.startswith(_CONTENT_PREFIXES) and size > _LARGE]
    small = [name for name in sizes if name not in large and not _PAGES.fullmatch(name)]
    with ExitStack() as stack:
        place = _place(sum(sizes[name] for name in small))
        path, fd = stack.enter_context(work_directory(place))
        image = PrivateImage(path, fd, source_fd, sizes, shared=shared)
        stack.callback(image.close)
        for name in small:
            contents = _verified(source_fd, name, pages)
            try:
                _write(fd, name, contents)
            except OSError as error:
                raise CheckpointError(f"{path}: the image cannot be copied there: {error.strerror}") from None
        for name in large:
            image.keep(name, verified_file(source_fd, name, f"{CRIU}/{name}", pages, shared=shared))
        yield image


def verified_file(directory_fd: int, name: str, path: str, pages: Pages, *, shared: bool) -> int:
    """Open a file of a checkpoint image, with the contents that the manifest lists for ``path``.

    ``shared``: other machines may write to the directory, so the descriptor is that of a copy. The caller closes it.
    Raises ``ImageDamaged`` and ``CheckpointError``.
    """
    try:
        return _spooled(directory_fd, name, path, pages) if shared else _opened(directory_fd, name)
    except BadImage as error:
        raise ImageDamaged(str(error)) from None


def _sizes(directory_fd: int) -> dict[str, int]:
    with root_directory.reading(directory_fd) as fd, os.scandir(fd) as entries:
        return {
            entry.name: entry.stat(follow_symlinks=False).st_size
            for entry in entries
            if entry.is_file(follow_symlinks=False)
        }


def _opened(directory_fd: int, name: str) -> int:
    """Open a regular file. Raises ``BadImage``."""
    try:
        fd = os.open(name, _FILE, dir_fd=directory_fd)
    except OSError as error:
        raise BadImage(f"{name}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadImage(f"{name}: is not a regular file")
    return fd


def _blocks(fd: int, path: str) -> Iterator[memoryview]:
    """Yield the blocks of a file. Raises ``ImageUnreadable``."""
    while True:
        block = bytearray()
        try:
            while len(block) < digest.BLOCK and (data := os.read(fd, min(_CHUNK, digest.BLOCK - len(block)))):
                block += data
        except OSError as error:
            raise ImageUnreadable(f"{path}: cannot be read: {error.strerror}") from None
        if block:
            yield memoryview(block)
        if len(block) < digest.BLOCK:
            return


def _verified(directory_fd: int, name: str, pages: Pages) -> list[memoryview]:
    """Return a whole file, read once and verified."""
    fd, path = _opened(directory_fd, name), f"{CRIU}/{name}"
    pieces: list[memoryview] = []

    def read() -> Iterator[memoryview]:
        for block in _blocks(fd, path):
            pieces.append(block)
            yield block

    try:
        pages.check(path, read())
    finally:
        os.close(fd)
    return pieces


def _spooled(directory_fd: int, name: str, path: str, pages: Pages) -> int:
    """Return an unnamed copy on a disk of this node; blocks of zeros become holes."""
    source = _opened(directory_fd, name)
    try:
        with work_directory() as (place, _), tempfile.TemporaryFile(dir=place, buffering=0) as temporary:

            def copied() -> Iterator[memoryview]:
                position = 0
                for block in _blocks(source, path):
                    try:
                        if block.tobytes().count(0) != len(block):
                            _write_at(temporary.fileno(), block, position)
                        position += len(block)
                        os.ftruncate(temporary.fileno(), position)
                    except OSError as error:
                        # A full disk of this node does not mean that the image is damaged.
                        raise CheckpointError(f"{path}: cannot be copied: {error.strerror}") from None
                    yield block

            pages.check(path, copied())
            return os.dup(temporary.fileno())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be copied: {error.strerror}") from None
    finally:
        os.close(source)


def _write(directory_fd: int, name: str, blocks: Sequence[memoryview]) -> None:
    fd = os.open(name, _CREATE_FLAGS, root_directory.FILE_MODE, dir_fd=directory_fd)
    try:
        position = 0
        for block in blocks:
            _write_at(fd, block, position)
            position += len(block)
    finally:
        os.close(fd)


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], offset + written)


def _gaps(size: int, memory: TreeMemory | None) -> list[tuple[int, int]]:
    """Return the ranges (start, length) of a pages file that CRIU places itself."""
    gaps, position = [], 0
    for run in sorted(memory.runs, key=lambda run: run.offset) if memory is not None else ():
        if run.offset > position:
            gaps.append((position, run.offset - position))
        position = max(position, run.offset + run.length)
    return [*gaps, (position, size - position)] if size > position else gaps


def _place(needed: int) -> str | None:
    """Return a file system in memory with enough room, or ``None``."""
    for place in _PLACES:
        with contextlib.suppress(OSError):
            if (
                os.access(place, os.W_OK)
                and root_directory.filesystem_type(place) == _TMPFS
                and _room(Path(place)) > needed + _MARGIN
            ):
                return place
    return None


def _room(path: Path) -> int:
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize
