"""Block I/O for large files: bypass the page cache where possible, keep holes, start writeback early, limit the rate.

Without early writeback the kernel starts when a tenth of memory is dirty, or after seconds: a dump would fill the page
cache first, and all disk I/O would be left to the final fsync.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from slurm_affinode.base.threads import Repeated
from slurm_affinode.checkpoint import root_directory

_START = 2  # SYNC_FILE_RANGE_WRITE
_EVERY_S = 0.05
_LEAST = 4 << 20
_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)


def start_writing(fd: int, offset: int, length: int) -> None:
    """Start writeback of a range of a file without waiting for it to complete.

    Blocks if the disk's request queue is full. This is only a hint: errors are ignored.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(length), _START)


class Writeback:
    """Starts writeback of all files in a directory, in a thread, until it is stopped."""

    def __init__(
        self, directory_fd: int, *, every_s: float = _EVERY_S, start: Callable[[int, int, int], None] = start_writing
    ) -> None:
        """Start the thread. ``start`` gets a descriptor, an offset and a length in bytes."""
        self._directory_fd = os.dup(directory_fd)
        self._start = start
        self._files: dict[str, tuple[int, int]] = {}
        self._poller = Repeated("writeback", every_s, self._push_all)
        self._poller.start()

    def _push_all(self) -> None:
        for name in root_directory.names(self._directory_fd):
            with suppress(OSError):  # the file was removed
                self._push(name)

    def _push(self, name: str) -> None:
        """Start writeback of the data appended since the last call, in multiples of 4 MiB."""
        if name not in self._files:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._files[name] = os.open(name, flags, dir_fd=self._directory_fd), 0
        fd, written_bytes = self._files[name]
        facts = os.fstat(fd)
        if stat.S_ISREG(facts.st_mode) and facts.st_size - written_bytes >= _LEAST and not self._poller.stopped:
            end = facts.st_size // _LEAST * _LEAST
            self._start(fd, written_bytes, end - written_bytes)
            self._files[name] = fd, end

    def stop(self) -> None:
        """Start no further writeback. Writeback already started completes by itself."""
        self._poller.stop()

    def close(self) -> None:
        """Stop, and close the descriptors. Idempotent."""
        self._poller.join()
        while self._files:
            os.close(self._files.popitem()[1][0])
        if self._directory_fd >= 0:
            os.close(self._directory_fd)
            self._directory_fd = -1


class TokenBucket:
    """A token bucket that limits a byte rate. The caller supplies the time and does the waiting."""

    def __init__(self, rate: float, burst: float) -> None:
        """``rate``: bytes per second; ``burst``: bytes. Both must be positive."""
        self._rate, self._burst = rate, burst
        self._tokens = burst
        self._at_s: float | None = None

    def take(self, count: int, now_s: float) -> float:
        """Take ``count`` bytes and return the seconds to wait before using them. The balance may become negative."""
        if self._at_s is not None:
            self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
        self._tokens -= count
        return max(0.0, -self._tokens / self._rate)


CHUNK = 8 << 20
ALIGN = 4096
_PIECE = 256 << 10
_BURST_S = 0.25
_LATENCY_CHECK_S = 0.25
_SAMPLES = 16

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


class Limiter:
    """A limit on the byte rate of all threads together, in bytes per second; 0 means no limit."""

    def __init__(
        self, rate: float, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        """``clock`` and ``sleep`` use seconds."""
        self._bucket = TokenBucket(rate, max(CHUNK, rate * _BURST_S)) if rate > 0 else None
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()

    def pass_(self, count: int, over: Callable[[], bool] = lambda: False) -> None:
        """Wait until ``count`` bytes may be transferred, or until ``over`` returns true."""
        if self._bucket is None:
            return
        with self._lock:
            wait_s = self._bucket.take(count, self._clock())
        while wait_s > 0 and not over():
            self._sleep(min(wait_s, _LATENCY_CHECK_S))
            wait_s -= _LATENCY_CHECK_S


class Buffer:
    """A page-aligned buffer suitable for direct I/O."""

    def __init__(self, size: int = CHUNK) -> None:
        """``size``: bytes, a multiple of the page size."""
        self._map = mmap.mmap(-1, size)
        self.view = memoryview(self._map)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        """Address of the buffer in memory."""

    def zero(self, offset: int, length: int) -> bool:
        """Return whether all bytes of the range are 0."""
        if length == 0:
            return True
        if self.view[offset] or self.view[offset + length - 1]:
            return False
        start = self.address + offset
        return bool(_memcmp(start, start + 1, length - 1) == 0)


class _Buffers(threading.local):
    """One buffer per thread."""

    buffer: Buffer | None = None


_buffers = _Buffers()


def buffer() -> Buffer:
    """Return this thread's buffer, allocated on first use."""
    if _buffers.buffer is None:
        _buffers.buffer = Buffer()
    return _buffers.buffer


def past_cache(fd: int, *, on: bool = True) -> bool:
    """Switch direct I/O on or off and return whether that succeeded. File systems may refuse (tmpfs on old kernels)."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True


def is_direct(fd: int) -> bool:
    """Return whether the descriptor uses direct I/O."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def is_cached(fd: int, size: int) -> bool:
    """Return whether a file of ``size`` bytes seems to be in the page cache, from a sample of evenly spaced pages."""
    page, pages = bytearray(ALIGN), size // ALIGN
    try:
        return all(os.preadv(fd, [page], pages * n // _SAMPLES * ALIGN, os.RWF_NOWAIT) for n in range(_SAMPLES))
    except OSError:  # the read would block, or the file system does not support RWF_NOWAIT
        return False


def read_into(fd: int, block: Buffer, length: int, offset: int) -> int:
    """Read ``length`` bytes at offset ``offset`` into the buffer. Return the bytes read, fewer only at end of file."""
    view, count = block.view[: length + -length % ALIGN], 0
    while count < len(view):
        try:
            got = os.preadv(fd, [view[count:]], offset + count)
        except OSError as error:
            if error.errno != errno.EINVAL or not is_direct(fd):
                raise
            past_cache(fd, on=False)
            continue
        if got == 0:
            break
        count += got
        if count % ALIGN and is_direct(fd):
            break  # the end of the file
    return min(count, length)


def write_from(fd: int, block: Buffer, begin: int, end: int, offset: int) -> None:
    """Write a range of a buffer at offset ``offset``.

    With direct I/O the end of the file is padded with zeros to a whole page; the caller must truncate it afterwards.
    """
    view = block.view[begin:end]
    padding = -(end - begin) % ALIGN
    if padding and is_direct(fd):
        block.view[end : end + padding] = bytes(padding)
        view = block.view[begin : end + padding]
    written = 0
    while written < len(view):
        try:
            written += os.pwrite(fd, view[written:], offset + written)
        except OSError as error:
            if error.errno != errno.EINVAL or not is_direct(fd):
                raise
            past_cache(fd, on=False)


def is_hole(fd: int, offset: int, end: int) -> bool:
    """Return whether a range of a file is a hole; false if the file ends before, or its file system reports no holes.

    Data is not followed to its end, as ``data_ranges`` does: in memory (tmpfs) that takes as long as the file is.
    """
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) >= end
    except OSError as error:
        return error.errno == errno.ENXIO and os.fstat(fd).st_size >= end


def data_ranges(fd: int, offset: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a file that are not holes, or the whole range if the file system does not report holes."""
    while offset < end:
        try:
            begin = max(offset, os.lseek(fd, offset, os.SEEK_DATA) // ALIGN * ALIGN)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only holes from here to the end
                return
            yield offset, end
            return
        if begin >= end:
            return
        hole = os.lseek(fd, begin, os.SEEK_HOLE)
        stop = min(end, hole + -hole % ALIGN)
        yield begin, stop
        offset = stop


def runs(block: Buffer, length: int) -> Iterator[tuple[int, int]]:
    """Yield the nonzero ranges of the buffer's first ``length`` bytes, with a granularity of 256 KiB."""
    begin = None
    for offset in range(0, length, _PIECE):
        if block.zero(offset, min(_PIECE, length - offset)):
            if begin is not None:
                yield begin, offset
                begin = None
        elif begin is None:
            begin = offset
    if begin is not None:
        yield begin, length
