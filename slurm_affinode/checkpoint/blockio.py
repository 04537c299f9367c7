"""Large blocks in and out of files: past the page cache where the file system lets us, holes and zeros left out."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator

from slurm_affinode.core.tokens import TokenBucket

CHUNK = 8 << 20
ALIGN = 4096
_PIECE = 256 << 10
_BURST_S = 0.25
_LOOK_S = 0.25
_SAMPLES = 16

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


class Limiter:
    """A rate in bytes per second, for all threads together; 0: none."""

    def __init__(
        self, rate: float, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        """``clock``, ``sleep``: seconds."""
        self._bucket = TokenBucket(rate, max(CHUNK, rate * _BURST_S)) if rate > 0 else None
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()

    def pass_(self, count: int, over: Callable[[], bool] = lambda: False) -> None:
        """Wait until so many bytes may pass, or ``over`` says that nobody has to wait any more."""
        if self._bucket is None:
            return
        with self._lock:
            wait_s = self._bucket.take(count, self._clock())
        while wait_s > 0 and not over():
            self._sleep(min(wait_s, _LOOK_S))
            wait_s -= _LOOK_S


class Buffer:
    """Memory that a disk can write to without the page cache between: on pages of its own."""

    def __init__(self, size: int = CHUNK) -> None:
        """``size``: bytes, whole pages."""
        self._map = mmap.mmap(-1, size)
        self.view = memoryview(self._map)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        """In memory."""

    def zero(self, at: int, length: int) -> bool:
        """Whether these bytes are all 0."""
        if length == 0:
            return True
        if self.view[at] or self.view[at + length - 1]:
            return False
        start = self.address + at
        return bool(_memcmp(start, start + 1, length - 1) == 0)


class _Buffers(threading.local):
    """A buffer for each thread."""

    buffer: Buffer | None = None


_buffers = _Buffers()


def buffer() -> Buffer:
    """The buffer of this thread, made when it is first asked for."""
    if _buffers.buffer is None:
        _buffers.buffer = Buffer()
    return _buffers.buffer


def past_cache(fd: int, *, on: bool = True) -> bool:
    """Switch direct I/O of a descriptor; whether it is as asked. File systems may refuse (tmpfs of older kernels)."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True


def is_direct(fd: int) -> bool:
    """Whether a descriptor reads and writes past the page cache."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def is_cached(fd: int, size: int) -> bool:
    """Whether a file of so many bytes seems to be in the page cache: some of its pages, evenly spread, are."""
    page, pages = bytearray(ALIGN), size // ALIGN
    try:
        return all(os.preadv(fd, [page], pages * n // _SAMPLES * ALIGN, os.RWF_NOWAIT) for n in range(_SAMPLES))
    except OSError:  # it would have to wait, or the file system does not tell
        return False


def read_into(fd: int, block: Buffer, length: int, at: int) -> int:
    """Fill the first bytes of a buffer from a position on; bytes read, fewer only at the end of the file."""
    view, done = block.view[: length + -length % ALIGN], 0
    while done < len(view):
        try:
            got = os.preadv(fd, [view[done:]], at + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not is_direct(fd):
                raise
            past_cache(fd, on=False)
            continue
        if got == 0:
            break
        done += got
        if done % ALIGN and is_direct(fd):
            break  # the end of the file
    return min(done, length)


def write_from(fd: int, block: Buffer, begin: int, end: int, at: int) -> None:
    """Write a part of a buffer at a position.

    Direct, the end of a file is padded with zeros to a whole page: it has to be cut to size later.
    """
    view = block.view[begin:end]
    padding = -(end - begin) % ALIGN
    if padding and is_direct(fd):
        block.view[end : end + padding] = bytes(padding)
        view = block.view[begin : end + padding]
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(fd, view[done:], at + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not is_direct(fd):
                raise
            past_cache(fd, on=False)


def data_ranges(fd: int, at: int, end: int) -> Iterator[tuple[int, int]]:
    """Parts of a file that are not holes, begin and end. All of it where the file system does not tell."""
    while at < end:
        try:
            begin = max(at, os.lseek(fd, at, os.SEEK_DATA) // ALIGN * ALIGN)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only holes from here to the end
                return
            yield at, end
            return
        if begin >= end:
            return
        hole = os.lseek(fd, begin, os.SEEK_HOLE)
        stop = min(end, hole + -hole % ALIGN)
        yield begin, stop
        at = stop


def runs(block: Buffer, length: int) -> Iterator[tuple[int, int]]:
    """Parts of the buffer's first bytes that are not 0, begin and end, in pieces of 256 KiB."""
    begin = None
    for at in range(0, length, _PIECE):
        if block.zero(at, min(_PIECE, length - at)):
            if begin is not None:
                yield begin, at
                begin = None
        elif begin is None:
            begin = at
    if begin is not None:
        yield begin, length
