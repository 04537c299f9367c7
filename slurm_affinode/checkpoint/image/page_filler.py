"""Concurrent filling of a process tree's memory while CRIU restores it.

CRIU reads and places the pages of a process with one thread, which is slower than a good disk. But it can delegate
private anonymous memory (``--lazy-pages``) to a listener at a socket in its work directory, to which it sends the PID
and the userfaultfd of each process (``criu/uffd.c``). The threads that read the pages to verify them also place them,
so each page is read once. The tree is held until that is done (``restore_gate.py``), before CRIU reports completion;
unlike a lazily restored tree, it never waits for a page.

A page that CRIU's restorer or the kernel touches earlier is delivered at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import socket
import struct
import threading
from bisect import bisect_right
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from slurm_affinode.checkpoint.image.block_io import Buffer, read_into
from slurm_affinode.checkpoint.image.criu_images import PAGE
from slurm_affinode.checkpoint.image.memory_map import TreeMemory
from slurm_affinode.checkpoint.image.writer import CRIU
from slurm_affinode.checkpoint.interface import ImageDamaged, RestoreFailed

_SOCKET = "lazy-pages.socket"  # criu/uffd.c
_FINISHED = 0x52535446
_NUMBER = struct.Struct("=i")
# From linux/userfaultfd.h, for processors that number ioctls as x86 and ARM do.
_COPY = struct.Struct("=QQQQq")  # struct uffdio_copy
_ZEROPAGE = struct.Struct("=QQQq")
_MESSAGE = struct.Struct("=B7xQQ8x")  # struct uffd_msg, of a page fault or a fork
_UFFDIO_COPY, _UFFDIO_ZEROPAGE = 0xC028AA03, 0xC020AA04
_PAGEFAULT, _FORK = 0x12, 0x13


_NODES = Path("/sys/devices/system/node")


def beside(pid: int, *, nodes: Path = _NODES) -> set[int]:
    """Return the CPUs of the NUMA nodes on which a process may run; pages placed from there are in local memory.

    Empty if not known.
    """
    with contextlib.suppress(OSError, ValueError):
        allowed = os.sched_getaffinity(pid)
        each = [_numbers(file.read_text(encoding="ascii")) for file in nodes.glob("node[0-9]*/cpulist")]
        return set().union(*(cpus for cpus in each if cpus & allowed))
    return set()


def _numbers(text: str) -> set[int]:
    """Parse a list such as ``0-3,8``. Raises ``ValueError``."""
    parts = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in parts for number in range(int(first), int(last or first) + 1)}


class CannotFill(RestoreFailed):
    """Memory could not be filled from outside. CRIU may be able to fill it."""


class _Place:
    """Memory of a process that is to be filled."""

    def __init__(self, memory: TreeMemory, uffd: int, pages: int) -> None:
        """``uffd``: the userfaultfd of the process. ``pages``: its pages file. ``close`` closes both."""
        self.memory, self.uffd, self.pages = memory, uffd, pages
        self._offsets = [run.offset for run in memory.runs]
        self._addresses = [run.address for run in memory.runs]
        self.unread_bytes = sum(run.length for run in memory.runs)
        """Bytes not placed yet. ``Filler`` locks it."""
        self._delivered: dict[int, bytes] = {}
        """Pages delivered on a fault, by address. They are read separately from those that are verified."""
        self.changed = False
        """Whether one of them differs from the verified page."""

    def close(self) -> None:
        """Close the descriptors. Safe to call twice."""
        for fd in (self.uffd, self.pages):
            if fd >= 0:
                os.close(fd)
        self.uffd = self.pages = -1

    def take(self, offset: int, view: memoryview) -> int:
        """Place bytes of the pages file, from offset ``offset`` on; return how many belong here. Raise ``OSError``."""
        placed = 0
        source, end = ctypes.addressof(ctypes.c_char.from_buffer(view)), offset + len(view)
        runs = self.memory.runs
        for number in range(max(0, bisect_right(self._offsets, offset) - 1), len(runs)):
            run = runs[number]
            if run.offset >= end:
                break
            begin, stop = max(offset, run.offset), min(end, run.offset + run.length)
            if begin < stop:
                self._copy(run.address + begin - run.offset, source + begin - offset, stop - begin)
                placed += stop - begin
        return placed

    def serve(self) -> None:
        """Handle one message, if there is one. Raises ``OSError``."""
        with contextlib.suppress(BlockingIOError):
            event, first, address = _MESSAGE.unpack(os.read(self.uffd, _MESSAGE.size))
            if event == _FORK:
                os.close(first & 0xFFFFFFFF)
            elif event == _PAGEFAULT:
                self._fault(address & -PAGE)

    def _fault(self, page: int) -> None:
        number = bisect_right(self._addresses, page) - 1
        run = self.memory.runs[number] if number >= 0 else None
        if run is not None and page < run.address + run.length:
            block = Buffer(PAGE)
            if read_into(self.pages, block, PAGE, run.offset + page - run.address) == PAGE:
                self._delivered[page] = bytes(block.view[:PAGE])
                self._copy(page, block.address, PAGE)
            return
        words = bytearray(_ZEROPAGE.pack(page, PAGE, 0, 0))  # it was never written to
        with contextlib.suppress(FileExistsError):
            fcntl.ioctl(self.uffd, _UFFDIO_ZEROPAGE, words)

    def _copy(self, address: int, source: int, length: int) -> None:
        """Copy whole pages to addresses without a page; existing pages are kept."""
        copied = 0
        while copied < length:
            words = bytearray(_COPY.pack(address + copied, source + copied, length - copied, 0, 0))
            try:
                fcntl.ioctl(self.uffd, _UFFDIO_COPY, words)
                copied = length
            except OSError as error:
                if error.errno == errno.EAGAIN:  # partially done, or the mappings are changing
                    copied += max(0, _COPY.unpack(words)[4])
                elif error.errno == errno.EEXIST:
                    filled = self._delivered.get(address + copied)
                    self.changed |= filled is not None and filled != ctypes.string_at(source + copied, PAGE)
                    copied += PAGE
                else:
                    raise


class Filler:
    """Fills memory for one restore. A context manager, left when CRIU has ended.

    Its thread talks to CRIU and the kernel; other threads pass the pages to ``take``.
    """

    OPTION = "--lazy-pages"
    """The command-line option of CRIU."""

    def __init__(
        self, work_fd: int, images_fd: int, memories: Sequence[TreeMemory], cpus: Collection[int] = ()
    ) -> None:
        """``work_fd``: CRIU's work directory, closed to other users. ``images_fd``: the directory of the image's files.
        ``cpus``: CPUs of the threads that fill, see ``beside``; empty: any.
        """
        self._work_fd, self._images_fd, self._cpus = work_fd, images_fd, cpus
        self._this_thread = threading.local()
        self._memories = {memory.pid: memory for memory in memories}
        self._places: dict[str, _Place] = {}
        self._begun, self._released = threading.Event(), threading.Event()
        self._lock = threading.Condition()
        self._taking, self._is_closed, self._all_announced = 0, False, False
        self.error: CannotFill | None = None
        """Why filling failed, if known."""

    def __enter__(self) -> Self:
        """Listen for CRIU."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"/proc/self/fd/{self._work_fd}/{_SOCKET}")
        self._listener.listen(1)
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="pages")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening and release waiting threads."""
        self._close()

    def _close(self) -> None:
        if self._wake_read < 0:
            return
        with self._lock:
            self._is_closed = True
            self._begun.set()
        os.close(self._wake_write)
        self._thread.join()
        self._listener.close()
        self._release()
        os.close(self._wake_read)
        self._wake_read = -1

    def _release(self) -> None:
        """Close the userfaultfds once no thread places pages. Pages still missing read as zeros from then on."""
        with self._lock:
            self._lock.wait_for(lambda: self._taking == 0)
            for place in self._places.values():
                place.close()

    def take(self, file: str, offset: int, view: memoryview) -> None:
        """Place whole pages of a pages file, starting at offset ``offset``. Waits until that is possible.

        Does nothing if the restore was aborted, and for files that CRIU reads itself.
        """
        self._begun.wait()
        self._move()
        with self._lock:
            place = self._places.get(file)
            if place is None or self._is_closed:
                return
            self._taking += 1
        placed = 0
        try:
            placed = place.take(offset, view)
        except OSError as error:
            self._fail(f"the memory of process {place.memory.pid} cannot be filled: {error.strerror}")
        finally:
            with self._lock:
                place.unread_bytes -= placed
                self._taking -= 1
                self._lock.notify_all()

    def begin(self, timeout_s: float) -> None:
        """Start placing pages, once CRIU has restored everything else. Raises ``CannotFill``."""
        with self._lock:
            self._lock.wait_for(lambda: self.error is not None or not self._missing(), max(0.0, timeout_s))
        self._check()
        self._begun.set()

    def end(self) -> None:
        """Release the memory after the last page. CRIU's messages are still handled afterwards.

        Raises ``CannotFill`` if a page is missing, and ``ImageDamaged`` if one differs from the verified page.
        """
        with self._lock:
            self._is_closed = True
            self._begun.set()
        os.write(self._wake_write, b"x")
        self._released.wait()
        self._release()
        for place in self._places.values():
            if place.changed:
                raise ImageDamaged(f"{CRIU}/{place.memory.file}: its contents change while it is read")
            if place.unread_bytes > 0:
                self._fail(f"{place.unread_bytes} bytes of process {place.memory.pid} were not read")
        self._check()

    def _move(self) -> None:
        """Pin this thread to the CPUs that fill."""
        if self._cpus and not getattr(self._this_thread, "pinned", False):
            with contextlib.suppress(OSError):  # none of them is available to the agent
                os.sched_setaffinity(0, self._cpus)
            self._this_thread.pinned = True

    def _missing(self) -> set[int]:
        """Return the processes with memory that CRIU has not handed over yet."""
        return self._memories.keys() - {place.memory.pid for place in self._places.values()}

    def _check(self) -> None:
        missing = self._missing()
        if missing and self.error is None:
            self._fail(f"CRIU has not handed over the memory of process {min(missing)}")
        if self.error is not None:
            raise self.error

    def _fail(self, why: str) -> None:
        with self._lock:
            self._is_closed = True
            self.error = self.error or CannotFill(why)
            self._lock.notify_all()

    def _run(self) -> None:
        try:
            self._talk()
        except (OSError, ValueError) as error:
            self._fail(f"CRIU cannot be talked with about memory: {error}")
            self._release()  # else a process that touches a page there would block forever
        self._released.set()

    def _talk(self) -> None:
        """Handle messages until the context ends."""
        with contextlib.ExitStack() as stack:
            poll = select.poll()
            poll.register(self._wake_read, select.POLLIN)
            poll.register(self._listener, select.POLLIN)
            talk: socket.socket | None = None
            places: dict[int, _Place] = {}
            while True:
                for fd, _ in poll.poll():
                    if fd == self._wake_read:
                        if not os.read(fd, 1):
                            return
                        for uffd in places:
                            poll.unregister(uffd)
                        places = {}
                        self._released.set()
                    elif fd in places:
                        places[fd].serve()
                    elif talk is None:
                        poll.unregister(fd)
                        talk = stack.enter_context(self._listener.accept()[0])
                        poll.register(talk, select.POLLIN)
                    elif (place := self._arrived(talk)) is not None:
                        places[place.uffd] = place
                        poll.register(place.uffd, select.POLLIN)
                    elif self._all_announced:
                        poll.unregister(talk)

    def _arrived(self, talk: socket.socket) -> _Place | None:
        """Receive a message of CRIU: a process, one without memory (``None``), or the end."""
        received = talk.recv(_NUMBER.size, socket.MSG_WAITALL)
        (pid,) = _NUMBER.unpack(received) if len(received) == _NUMBER.size else (_FINISHED,)
        self._all_announced = pid == _FINISHED
        if self._all_announced and self._missing():
            raise ValueError(f"it did not ask for the memory of process {min(self._missing())}")
        if self._all_announced or pid < 0:
            return None
        _, (uffd, *_), _, _ = socket.recv_fds(talk, 1, 1)
        memory = self._memories.get(pid)
        if memory is None:
            os.close(uffd)
            raise ValueError(f"it asks for the memory of process {pid}, which is not in the image")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        place = _Place(memory, uffd, os.open(memory.file, flags, dir_fd=self._images_fd))
        with self._lock:
            self._places[memory.file] = place
            self._lock.notify_all()
        return place
